"""stability: what a report says, what follows from it on every rank, and what goes back."""

import math
import re
import statistics

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import ROOT, RankFailed, beyond, chapter, on_ranks, refusal, run_script

stability, dp = beyond("stability"), chapter("01_dp")
question = pytest.mark.question
SCRIPT = ROOT / "beyond/stability.py"
CPU = torch.device("cpu")
STEADY = [3.0, 3.1, 2.9, 3.0] * 8  # 32 losses; their median is 3.0, their spread 0.05
FALLEN = [9.0] * 24 + [3.0, 3.1] * 8


def world():
    return dist.group.WORLD


def trainer_of(kind=None, **given):
    torch.set_default_dtype(torch.float64)
    batch = given.pop("batch", None) or stability.reader(dp.read_text(None, 65))
    return (kind or stability.Trainer)(stability.fresh(CPU), batch, world(), **given)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_stability_proves_itself(ranks, tmp_path):
    done = run_script(SCRIPT, "--steps", 0, "--ranks", ranks, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT AS CLAIMED" not in done.stdout and done.stderr == ""
    assert done.stdout.count("wrong on purpose") == 5 and list(tmp_path.iterdir()) == []


# ── the report ───────────────────────────────────────────────────────────────────────────────


@question("QS.2")
def test_the_example_of_two_ranks_of_which_one_has_no_number():
    def told():
        r = dist.get_rank()
        shard = torch.tensor([[0.3, math.nan], [0.2, 0.1]][r]).double()
        parts = [(r, shard, 1)]
        return stability.step_report([1.4, 1.5][r], 0.0, shard, parts, 2, world())

    first, second = on_ranks(2, told)
    assert first.loss == second.loss == pytest.approx(2.9)
    for report in first, second:
        assert math.isnan(report.squares[0]) and report.squares[1] == pytest.approx(0.05)
        assert math.isnan(report.norm)


def test_the_norm_is_that_of_all_parameters_and_the_local_square_a_mean():
    def told():
        r = dist.get_rank()
        own = torch.tensor([3.0, 4.0]).double() * (r + 1)
        return stability.step_report(0, 0, own, [(r, own, 1)], 3, world())

    report, same = on_ranks(2, told)
    assert report == same and report.squares == [25.0, 100.0, 0.0]
    assert report.norm == pytest.approx(math.sqrt(125)) and report.local_square == 62.5


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_shards_have_each_element_of_each_parameter_once(n):
    sizes = [5, 1, 7, 2]
    flat = torch.arange(float(sum(sizes) + -sum(sizes) % n))
    seen = [[] for _ in sizes]
    for r, shard in enumerate(flat.chunk(n)):
        for number, part, copies in stability.parts_of_shard(shard, r * len(shard), sizes):
            seen[number] += part.tolist()
            assert copies == 1
    assert seen == [part.tolist() for part in flat[: sum(sizes)].split(sizes)]


# ── high, and odd ────────────────────────────────────────────────────────────────────────────


def test_the_example_of_five_losses():
    losses = [3.0, 3.1, 2.9, 3.0, 9.0]
    assert statistics.fmean(losses) == pytest.approx(4.2)
    assert (9 - 4.2) / statistics.stdev(losses) < 2
    score = stability.z_score(9.0, losses).item()
    assert score == pytest.approx(6 / (1.4826 * 0.1))
    assert stability.z_score(3.2, [3.0] * 5).item() == pytest.approx(0.2 / 0.03)  # the floor
    assert stability.z_score(-3.2, [-3.0] * 5).item() < 0


@pytest.mark.parametrize("new, expected", [
    ([9.0], False), ([9.0, 9.0], True), ([9.0, 3.0, 9.0], True), ([9.0, 3.0, 3.0, 9.0], False),
    ([9.0, 9.0, 3.0], False), ([4.2, 4.2], True), ([1.0, 1.0], False), ([math.inf, 4.2], True),
])  # fmt: skip
def test_a_spike_is_high_twice_in_three_steps(new, expected):
    """Losses of 4.2 beside 3.0 are a disaster, and far from three times the mean."""
    assert stability.spike(STEADY + new) is expected


def test_a_spike_needs_a_history_and_looks_at_its_window_alone():
    few = [3.0] * (stability.HISTORY - 1)
    assert not stability.spike(few + [9.0, 9.0]) and stability.spike(few + [3.0, 9.0, 9.0])
    assert stability.spike(FALLEN + [5.0, 5.0], window=16)
    assert not stability.spike(FALLEN + [5.0, 5.0])


def test_the_largest_norm_that_is_not_high_is_the_limit():
    norms = [1.0 + 0.1 * math.sin(i) for i in range(40)]
    limit = stability.norm_limit(norms, window=20)
    assert stability.z_score(limit, norms[-20:]).item() == pytest.approx(stability.HIGH)
    assert stability.norm_limit(norms[: stability.HISTORY - 1]) == math.inf
    assert stability.norm_limit([2.0] * 20) == pytest.approx(2.0 * (1 + 4 * stability.FLOOR))


def test_a_parameter_is_odd_beside_its_peers_alone():
    names = ["token", "blocks.0.w", "blocks.1.w", "blocks.2.w", "blocks.0.b", "blocks.1.b",
             "blocks.2.b"]  # fmt: skip
    assert stability.odd_parameters(names, [1000.0, 1, 1.2, 0.9, 5, 5, 5]) == []
    odd = stability.odd_parameters(names, [0.0, 1, 4, 0.9, 5, 0.5, 5])
    assert odd == [("blocks.1.b", pytest.approx(0.1)), ("blocks.1.w", pytest.approx(4.0))]
    assert stability.odd_parameters(names, [1, 1, 0, 1, 5, 5, 5])[0][0] == "blocks.1.w"


# ── noise ────────────────────────────────────────────────────────────────────────────────────


@question("QS.1")
@pytest.mark.parametrize("n, b", [(2, 1), (4, 3), (3, 2)])
def test_both_estimates_are_right_where_squares_are_what_batches_have_on_average(n, b):
    G, S, B = 7.0, 30.0, n * b
    report = stability.Report(0, 0, (G + S / b) / n**2, [0.4 * (G + S / B), 0.6 * (G + S / B)])
    assert stability.estimates(report, n, b) == pytest.approx((G, S), rel=1e-12)
    assert stability.noise_scale([report] * 3, n, b) == pytest.approx(S / G)


@question("QS.1")
def test_the_table_of_four_draws():
    rows = []
    for x, y in (1.5, 1.5), (1.5, 0.5), (0.5, 1.5), (0.5, 0.5):
        report = stability.Report(0, 0, ((x / 2) ** 2 + (y / 2) ** 2) / 2, [((x + y) / 2) ** 2])
        rows.append(stability.estimates(report, 2, 1))
    assert rows == [pytest.approx(row) for row in [(2.25, 0), (0.75, 0.5), (0.75, 0.5), (0.25, 0)]]


def test_a_gradient_that_drowns_in_noise_has_an_infinite_scale():
    report = stability.Report(0, 0, 1.0, [1.0])  # |G_b|² = 4, |G_B|² = 1: |G|² is negative
    assert stability.estimates(report, 2, 1)[0] < 0
    assert stability.noise_scale([report], 2, 1) == math.inf


# ── z-loss ───────────────────────────────────────────────────────────────────────────────────


def test_shares_of_two_halves_are_those_of_the_whole_and_a_shift_costs_only_z_loss():
    draw = torch.Generator().manual_seed(0)
    logits, y = torch.randn(4, 3, 7, generator=draw).double(), torch.randint(7, (4, 3))
    whole = stability.loss_shares(logits, y, 12, 0.1)
    halves = [stability.loss_shares(logits[i : i + 2], y[i : i + 2], 12, 0.1) for i in (0, 2)]
    for one, parts in zip(whole, zip(*halves)):
        assert sum(parts).item() == pytest.approx(one.item(), rel=1e-12)
    log_z = logits.logsumexp(-1)
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten()).item()
    assert [x.item() for x in whole] == pytest.approx(
        [loss, log_z.mean().item(), loss + 0.1 * log_z.square().mean().item()], rel=1e-12)
    shifted = stability.loss_shares(logits + 5, y, 12, 0.1)
    assert shifted[0].item() == pytest.approx(loss) and shifted[1] - whole[1] == pytest.approx(5)
    assert shifted[2] > whole[2] + 1


# ── a run ────────────────────────────────────────────────────────────────────────────────────


@question("QS.2")
@pytest.mark.parametrize("lost", [0, 1])
def test_all_ranks_skip_a_step_in_which_one_of_them_has_no_number(lost):
    """And their weights stay those of one another, bit for bit."""

    class Lost(stability.Trainer):
        def own_gradient(self):
            loss, log_z, gradient_P = super().own_gradient()
            if self.cursor == 1 and self.r == lost:
                gradient_P[-1 if lost else 0] = math.inf
            return loss, log_z, gradient_P

    def outcomes():
        trainer = trainer_of(Lost)
        before = [trainer.state.clone() for _ in range(1) if trainer.step()][0]
        skipped = trainer.step()[0]
        same = torch.equal(before, trainer.state)
        return skipped, same, trainer.step()[0], trainer.cursor, trainer.weights.tolist()

    first, second = on_ranks(2, outcomes)
    assert first == second and first[:4] == ("skipped", True, "stepped", 3)


@question("QS.2")
def test_a_loss_that_is_no_number_or_high_twice_decides_and_one_high_loss_does_not():
    def decided():
        trainer = trainer_of(window=32)
        report = lambda loss, square=1.0: stability.Report(loss, 0.0, 0.0, [square])
        trainer.reports = [report(loss) for loss in STEADY]
        first = [trainer.decide(report(*x)) for x in ((math.nan,), (3.0, math.nan), (9.0,), (3.0,))]
        trainer.reports.append(report(9.0))
        return [*first, trainer.decide(report(9.0)), trainer.decide(report(3.0))]

    expected = ["skipped", "skipped", "stepped", "stepped", "rolled back", "stepped"]
    assert on_ranks(1, decided) == [expected]


@question("QS.2")
def test_a_spike_is_judged_by_the_runs_own_window():
    def decided():
        trainer = trainer_of(window=16)
        report = lambda loss: stability.Report(loss, 0.0, 0.0, [1.0])
        trainer.reports = [report(loss) for loss in FALLEN + [5.0]]
        return trainer.decide(report(5.0))

    assert on_ranks(1, decided) == ["rolled back"]


def test_no_batch_is_at_fault_where_steps_in_a_row_are_not_finite():
    def many():
        trainer = trainer_of(stability.Faulty, nan=range(2, 99))
        return stability.run(trainer, 2 + stability.PATIENCE + 1)

    with pytest.raises(RankFailed, match="6 steps in a row are not finite, up to batch 7"):
        on_ranks(1, many)

    def some():
        trainer = trainer_of(stability.Faulty, nan=[2, 3, 4, 5, 6, 8, 9, 10, 11, 12])
        return stability.run(trainer, 13).count("skipped")

    assert on_ranks(1, some) == [10]  # a step that is taken begins the count anew


@question("QS.3")
def test_the_older_snapshot_comes_back_whole_and_the_data_go_on():
    def back():
        trainer, states = trainer_of(), []
        for t in range(19):
            states.append(trainer.state.clone())
            trainer.step()
        assert [x.t for x in trainer.snapshots] == [8, 16]
        trainer.roll_back()
        same = torch.equal(trainer.state, states[8])
        own = trainer.weights.view(trainer.n, -1)[trainer.r]
        assert torch.equal(own, trainer.state[0]) and len(trainer.reports) == 8
        assert trainer.skipped == {*range(8, 19)} and trainer.cursor == 19
        trainer.step()
        assert [x.t for x in trainer.snapshots] == [8] and trainer.cursor == 20
        assert len(trainer.reports) == 9 and not torch.equal(trainer.state, states[9])
        return same, torch.equal(trainer.snapshots[0].state, states[8])

    assert on_ranks(2, back) == [(True, True)] * 2


@question("QS.3")
def test_a_second_rollback_remembers_what_the_first_one_skipped():
    def back():
        trainer = trainer_of()
        stability.run(trainer, 10)
        trainer.roll_back()  # to the start: batches 0 to 9 are skipped
        stability.run(trainer, 17)
        trainer.roll_back()  # to step 8, which had read batches 10 to 17
        return trainer.skipped, trainer.cursor, len(trainer.reports)

    assert on_ranks(1, back) == [({*range(10), *range(18, 27)}, 27, 8)]


def test_skipped_batches_are_never_read():
    def read():
        seen, text = [], dp.read_text(None, 65)
        batch = lambda cursor: seen.append(cursor) or dp.sample(text, cursor, 4, 16)
        stability.run(trainer_of(batch=batch, skipped=[0, 3, 4]), 4)
        return seen

    assert on_ranks(1, read) == [[1, 2, 5, 6]]


def test_stability_refuses_what_cannot_work():
    assert "use 2 or 4" in refusal(SCRIPT, "--ranks", 3)
    assert "use 64 or more, or 0" in refusal(SCRIPT, "--steps", 63)
    assert "--text no such file" in refusal(SCRIPT, "--text", "no such file")


@pytest.mark.slow
def test_stability_trains_on_through_a_nan_and_a_broken_file():
    done = run_script(SCRIPT, "--steps", 80, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^ +(\d+) +(\d+) +([\d.]+) .*?(\w+ ?\w*)$", done.stdout, re.M)
    outcome = {int(batch): (int(steps), float(loss), how) for batch, steps, loss, how in rows}
    assert outcome[20][2] == "skipped" and outcome[20][0] == 20
    assert (outcome[40][2], outcome[41][2]) == ("stepped", "rolled back")
    assert outcome[40][1] > 6 and outcome[41][0] == 32 < outcome[40][0] == 40
    assert outcome[74][1] < 3.7 < outcome[40][1]
    assert "unlike their peers': blocks.2.linear2.weight" in done.stdout
