"""The launch kit: what the ledger counts, what a wrong row looks like, and how a run may end."""

import os
import random
import re
import signal
import socket
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from harness import ROOT, RankFailed, chapter, on_ranks, run_script, start_script

kit = chapter("01_dp")
CPU = torch.device("cpu")

# ── the ledger ───────────────────────────────────────────────────────────────────────────────


PRICED = {
    "all_reduce", "all_gather_single", "reduce_scatter_single", "broadcast", "all_to_all_single",
    "isend",
}  # fmt: skip


def every_call():
    n, r, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    x, row, whole = torch.ones(12), torch.empty(2), torch.ones(2 * n)
    splits = [r + 1] * n  # this rank gives r + 1 rows of 3 to each, and gets i + 1 from rank i
    uneven = torch.ones(sum(splits), 3), torch.empty(n * (n + 1) // 2, 3)
    with kit.Ledger() as ledger:
        dist.all_reduce(x, group=group)
        dist.all_gather_single(whole, row, group=group)
        dist.reduce_scatter_single(row, whole, group=group)
        dist.broadcast(x, group_src=0, group=group)
        dist.all_to_all_single(torch.empty(2 * n), whole, group=group)
        dist.all_to_all_single(uneven[1], uneven[0], list(range(1, n + 1)), splits, group=group)
        dist.all_to_all_single(torch.empty(0, 3), torch.empty(0, 3), [0] * n, [0] * n, group=group)
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, x, group=group, group_peer=(r + 1) % n),
            dist.P2POp(dist.irecv, torch.empty(12), group=group, group_peer=(r - 1) % n),
        ])  # fmt: skip
        for work in works:
            work.wait()
        dist.barrier(group=group)
    dist.all_gather([torch.empty(12) for _ in range(n)], x)  # closed, the ledger counts nothing
    return ledger.sent


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_call_is_priced_as_a_ring_would_send_it(n):
    for r, sent in enumerate(on_ranks(n, every_call)):
        assert {name: sent[name] for name in PRICED} == {
            "all_reduce": pytest.approx(2 * (n - 1) / n * 48),
            "all_gather_single": 8 * (n - 1),
            "reduce_scatter_single": pytest.approx(8 * (n - 1)),
            "broadcast": 48 * (r < n - 1),  # each passes it on, the last of the ring keeps it
            "all_to_all_single": pytest.approx(8 * (n - 1) + (n - 1) * (r + 1) * 12),
            "isend": 48,
        }
        assert {name for name in sent if sent[name]} <= PRICED


def test_calls_waits_and_marks_are_kept_in_their_order():
    def steps():
        with kit.Ledger() as ledger:
            work = dist.all_reduce(torch.ones(1), async_op=True)
            ledger.mark("computed")
            work.wait()
            dist.all_reduce(torch.ones(1))
        return [event.what for event in ledger.events]

    assert on_ranks(2, steps) == [["all_reduce", "computed", "wait", "all_reduce", "wait"]] * 2


def test_a_call_without_a_price_raises_and_the_real_calls_come_back():
    def gather():
        real = dist.all_gather, dist.all_reduce, dist.Work.wait
        with pytest.raises(KeyError, match="all_gather"), kit.Ledger():
            dist.all_gather([torch.ones(1)] * 2, torch.ones(1))
        return real == (dist.all_gather, dist.all_reduce, dist.Work.wait)

    assert on_ranks(2, gather) == [True, True]


# ── the table of the proof ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("row, holds", [
    (kit.Row("equal", 1e-16, (8, 8), (4, 4)), True),
    (kit.Row("an error", 1e-9), False),
    (kit.Row("not a number", float("nan")), False),
    (kit.Row("a byte too many", 0.0, sent=(9, 8)), False),
    (kit.Row("a byte too few", 0.0, held=(7, 8)), False),
    (kit.Row("wrong as predicted", 0.5, wrong=0.5), True),
    (kit.Row("wrong otherwise", 0.51, wrong=0.5), False),
    (kit.Row("not wrong at all", 0.0, wrong=0.5), False),
    (kit.Row("inside its bound", 0.03, bound=(0.01, 0.04)), True),
    (kit.Row("over its bound", 0.05, bound=(0.01, 0.04)), False),
    (kit.Row("loses nothing, as if it did nothing", 0.0, bound=(0.01, 0.04)), False),
])  # fmt: skip
def test_a_row_that_is_not_as_claimed_on_any_one_rank_fails_the_table_on_all(row, holds):
    fine = kit.Row("fine", row.wrong or (row.bound or [0.0])[0], wrong=row.wrong, bound=row.bound)
    table = lambda: kit.prove([row if dist.get_rank() == 1 else fine], CPU)
    assert on_ranks(2, table) == [int(not holds)] * 2


def test_relative_error():
    ones, zeros = torch.ones(3), torch.zeros(3)
    assert kit.relative_error(ones * 1.5, ones) == 0.5
    assert kit.relative_error(zeros, ones) == 1  # a gradient of zeros does not pass for small
    assert kit.relative_error(zeros, zeros) == 0
    assert kit.relative_error(ones * 1e-30, zeros) == float("inf")
    assert kit.relative_error(torch.empty(0), torch.empty(0)) == 0


# ── how a run may end ────────────────────────────────────────────────────────────────────────

SCRIPT = """
import importlib, os, signal, sys, time
import torch
import torch.distributed as dist
sys.path.insert(0, {root!r})
kit = importlib.import_module("01_dp")

def main(args, device):
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        {body}
    dist.all_reduce(torch.ones(1))
    return {code}

if __name__ == "__main__":
    args = kit.arguments("a run", ranks=4, steps=0).parse_args()
    kit.launch(main, args, lambda args, ranks: None)
"""


def free_address():
    with socket.socket() as free:  # below the ports that any connection may be given meanwhile
        free.bind(("127.0.0.1", random.randrange(10_000, 15_000)))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def script(tmp_path):
    def write(body, code=0):
        path = tmp_path / "run.py"
        path.write_text(SCRIPT.format(root=str(ROOT), body=body, code=code))
        return path

    return write


def test_a_rank_that_raises_ends_the_run_and_is_named(script):
    started = time.monotonic()
    done = run_script(script("raise ValueError('a bad sample')"))
    assert done.returncode == 1 and time.monotonic() - started < 15
    assert done.stderr.count("Traceback") == 1, "the rank that failed first, and no other"
    assert "rank 1 of 4: Traceback" in done.stderr and "ValueError: a bad sample" in done.stderr


def test_a_rank_that_is_killed_ends_the_run_and_is_named(script):
    done = run_script(script("os.kill(os.getpid(), signal.SIGKILL)"))
    assert done.returncode == 1 and "rank 1 was ended by SIGKILL" in done.stderr


def test_a_rank_that_stays_away_ends_the_run_with_the_operation_that_waited(script):
    started = time.monotonic()
    done = run_script(script("time.sleep(100)"), "--timeout", 2)
    assert done.returncode == 1 and time.monotonic() - started < 15
    first, *places = done.stderr.splitlines()
    assert "waited in vain" in first and [line[:9] for line in places] == [
        f"rank {r} of" for r in range(4)
    ]
    assert "time.sleep(100)" in places[1]
    assert all("dist.all_reduce(torch.ones(1))" in places[r] for r in (0, 2, 3))


def test_a_rank_that_returns_early_is_told_from_those_that_wait(script):
    done = run_script(script("return 0"))
    assert done.returncode == 1
    first, *places = done.stderr.splitlines()
    assert "returned" in places[1] or "destroy_process_group" in places[1]
    assert all("dist.all_reduce(torch.ones(1))" in places[r] for r in (0, 2, 3))


def test_a_rank_that_is_stopped_is_named_as_silent(script):
    done = run_script(script("os.kill(os.getpid(), signal.SIGSTOP)"), "--timeout", 2)
    first, *places = done.stderr.splitlines()
    assert done.returncode == 1 and "waited in vain" in first
    assert places[1] == "rank 1 of 4: no answer"
    assert all("dist.all_reduce(torch.ones(1))" in places[r] for r in (0, 2, 3))


def test_what_all_ranks_fail_of_is_told_once(tmp_path):
    path = tmp_path / "run.py"
    path.write_text(SCRIPT.replace("if dist.get_rank() == 1:", "if True:").format(
        root=str(ROOT), body="raise ValueError('a bad sample')", code=0))  # fmt: skip
    done = run_script(path)
    assert done.returncode == 1 and done.stderr.count("ValueError: a bad sample") == 1


def test_ranks_that_disagree_end_with_a_sentence_and_status_2(tmp_path):
    path = tmp_path / "run.py"
    path.write_text(SCRIPT.replace("if dist.get_rank() == 1:", "if True:").format(
        root=str(ROOT), body="kit.agree(['--rate', str(dist.get_rank())], dist.group.WORLD)",
        code=0))  # fmt: skip
    done = run_script(path)
    told = r"rank \d of 4: ranks disagree: rank 1 has 1, rank 0 has 0\n"
    assert done.returncode == 2 and re.fullmatch(told, done.stderr)


def test_ranks_agree_on_lines_or_name_the_first_that_differs():
    def told(lines):
        group = dist.group.WORLD
        try:
            return kit.agree(lines[dist.get_rank()], group)
        except kit.Disagreement as error:
            return str(error)

    same = [["a", "b"]] * 3
    assert on_ranks(3, told, same) == [None] * 3
    longer = [["a", "b"], ["a", "b"], ["a", "b", "c"]]
    assert on_ranks(3, told, longer) == ["ranks disagree: rank 2 has c, rank 0 has no more"] * 3
    shorter = [["a", "b"], ["a"], ["a", "b"]]
    assert on_ranks(3, told, shorter) == ["ranks disagree: rank 1 has no more, rank 0 has b"] * 3


def test_flags_that_differ_between_ranks_are_refused(script):
    """Two agents of torchrun may be given different command lines."""
    agents = [("--steps", 0), ("--steps", 3)]
    meeting = free_address()
    flags = ["--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d"]
    start = lambda words: start_script(
        script("pass"), *words, torchrun=[*flags, "--rdzv-endpoint", meeting]
    )
    with start(agents[0]) as one, start(agents[1]) as other:
        told = "".join(process.communicate(timeout=60)[1] for process in (one, other))
    assert one.returncode and other.returncode
    assert re.search(r"ranks disagree: rank 1 has --steps (\d), rank 0 has --steps \d\n", told)


def test_a_reader_that_leaves_ends_the_run_without_a_traceback():
    with start_script(ROOT / "01_dp.py", "--ranks", 2, "--steps", 0) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 128 + signal.SIGPIPE


def test_ctrl_c_ends_the_run_at_once_with_status_130(script):
    with start_script(script("print('asleep', flush=True); time.sleep(100)")) as process:
        assert process.stdout.readline() == "asleep\n"
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate(timeout=5) == ("", "")
        assert process.returncode == 130


def test_a_row_that_is_not_as_claimed_ends_the_run_without_a_traceback(script):
    done = run_script(script("pass", code=1))
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.slow
def test_torchrun_says_which_rank_raised(script):
    done = run_script(script("raise ValueError('a bad sample')"), torchrun=2)
    assert done.returncode != 0 and "rank 1 of 2: Traceback" in done.stderr


@pytest.mark.slow
def test_torchrun_restarts_ranks_that_meet_anew(script):
    """gloo's addresses of the attempt before are still in torchrun's store."""
    body = "(os.environ['TORCHELASTIC_RESTART_COUNT'] == '2') or os._exit(1)"
    torchrun = ["--standalone", "--nproc-per-node", 2, "--max-restarts", 2]
    done = run_script(script(body), torchrun=torchrun)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_two_agents_meet_on_the_loopback_address():
    meeting = free_address()
    flags = ["--nnodes", 2, "--nproc-per-node", 2, "--rdzv-backend", "c10d"]
    agent = partial(
        start_script, ROOT / "01_dp.py", "--steps", 2, torchrun=[*flags, "--rdzv-endpoint", meeting]
    )
    with agent() as one, agent() as other:
        printed = [process.communicate(timeout=120)[0] for process in (one, other)]
    assert [one.returncode, other.returncode] == [0, 0]
    assert sum("on every rank" in text for text in printed) == 1


@pytest.mark.slow
def test_torchrun_runs_a_chapter():
    done = run_script(ROOT / "01_dp.py", "--steps", 2, torchrun=4)
    assert done.returncode == 0 and "4 ranks" in done.stdout, done.stderr


def test_a_size_mismatch_in_a_test_is_told_apart_from_a_crash():
    with pytest.raises(RankFailed, match="different sizes"):
        on_ranks(2, lambda: dist.all_reduce(torch.ones(1 + 99 * dist.get_rank())))
