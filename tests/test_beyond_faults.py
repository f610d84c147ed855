"""faults: what the proof shows, the numbers behind its rows, and refusals."""

import math
import random
import re
import statistics

import pytest
import torch.distributed as dist
from harness import ROOT, beyond, on_ranks, refusal, run_script

faults = beyond("faults")
question = pytest.mark.question


@question("QF.1")
def test_a_step_counts_only_if_all_ranks_are_well_and_have_one_gradient():
    def told(unwell, leaving, joining, digests):
        r = dist.get_rank()
        flags = r == unwell, r == leaving, r == joining
        return faults.commit(*flags, digests[r], dist.group.WORLD)

    for who, digests, expected in [
        ((None, None, None), [7, 7, 7], (False, False, False)),
        ((2, None, None), [7, 7, 7], (True, False, False)),
        ((None, 1, None), [7, 7, 7], (False, True, False)),
        ((None, None, 0), [7, 7, 7], (False, False, True)),
        ((None, None, None), [7, 7, -3], (True, False, False)),
    ]:
        assert on_ranks(3, told, *who, digests) == [expected] * 3


def test_faults_proves_itself(tmp_path):
    """Every scenario: values beside one process, bytes by formula, sentences, wrong rows. Three
    ranks are torchrun's, below."""
    script = ROOT / "beyond/faults.py"
    done = run_script(script, "--steps", 0, "--ranks", 4, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT AS CLAIMED" not in done.stdout and "buddy lost: refused" in done.stdout
    assert done.stderr == "" and list(tmp_path.iterdir()) == []


@question("QF.2")
def test_moves_send_each_chunk_once_from_who_has_it():
    owners, old = faults.cut_anew(None, None, [0, 1, 2, 3]), [0, 1, 2, 3]
    assert owners == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    travel, then = faults.moves(owners, old, [0, 1, 2], [0, 1, 2], faults.cut_anew)
    assert then == [0] * 4 + [1] * 4 + [2] * 4
    assert travel == [(3, 1, 0), (6, 2, 1), (7, 2, 1), (9, 0, 2), (10, 0, 2), (11, 0, 2)]
    travel, then = faults.moves(owners, old, [0, 1, 2], [0, 1, 2], faults.give_away)
    assert then[:9] == owners[:9] and sorted(then[9:]) == [0, 1, 2]
    assert travel == [(10, 0, 1), (11, 0, 2)]  # rank 0 was the buddy: its own part is there
    travel, then = faults.moves(owners, old, [0, 1, 3], [0, 1, 7, 3], faults.cut_anew)
    assert travel == [(6, 3, 7), (7, 3, 7), (8, 3, 7)]
    assert then == [7 if owner == 2 else owner for owner in owners]


@question("QF.2")
def test_a_rank_and_its_buddy_may_not_both_be_lost():
    owners, old = faults.cut_anew(None, None, [0, 1, 2, 3]), [0, 1, 2, 3]
    with pytest.raises(ValueError, match="rank 3 and its buddy rank 0 are both lost"):
        faults.moves(owners, old, [1, 2], [1, 2], faults.cut_anew)
    faults.moves(owners, old, [0, 2], [0, 2], faults.cut_anew)  # 1 and 3: each buddy is there


@question("QF.3")
def test_a_slow_rank_is_told_from_noise():
    draw = random.Random(0)
    for slow_one in range(8):
        seconds = [draw.gauss(1.0, 0.01) for _ in range(8)]
        seconds[slow_one] = 1.3
        assert faults.slow(seconds) == [slow_one]
    assert faults.slow([1.0] * 8) == []
    assert faults.slow([1.0] * 7 + [1.02]) == []  # its z is huge, and 2% are not worth a change
    assert faults.slow([1.0] * 7 + [0.5]) == []  # fast is not slow
    noise = [faults.slow([draw.gauss(1.0, 0.01) for _ in range(8)]) for _ in range(1000)]
    assert statistics.mean(map(len, noise)) < 0.02


@pytest.mark.parametrize("seconds", [[1.0] * 4, [1, 2, 1, 1], [1, 1.1, 1.2, 5], [3, 1]])
def test_shares_keep_the_batch_and_follow_the_speed(seconds):
    counts = faults.shares(48, seconds)
    assert sum(counts) == 48
    exact = [48 / t / sum(1 / t for t in seconds) for t in seconds]
    assert all(math.floor(x) <= count <= math.ceil(x) for x, count in zip(exact, counts))


def test_the_kinds_of_death_are_all_tried():
    kinds = {kind for s in faults.scenarios(4) for kind in s.faults.values()}
    assert kinds == {"kill", "kill prepared", "stop", "flip", "leave"}


def test_faults_refuses_what_cannot_work():
    script = ROOT / "beyond/faults.py"
    assert "3 or 4" in refusal(script, "--ranks", 5)
    assert "--text no such file" in refusal(script, "--text", "no such file")


@pytest.mark.slow
def test_faults_trains_on_while_ranks_die():
    done = run_script(ROOT / "beyond/faults.py", "--steps", 40, timeout=300)
    assert done.returncode == 0, done.stderr
    losses = {int(row[1]): float(row[2]) for row in re.finditer(
        r"^ *(\d+) +(\d\.\d+)  \[", done.stdout, re.M)}  # fmt: skip
    assert losses[40] < losses[10]  # two ranks died between these lines


@pytest.mark.slow
def test_faults_runs_under_torchrun():
    done = run_script(ROOT / "beyond/faults.py", "--steps", 0, torchrun=3, timeout=300)
    assert done.returncode == 0 and "NOT AS CLAIMED" not in done.stdout, done.stderr
