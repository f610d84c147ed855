"""The harness itself: a rank that raises, hangs, is killed or aborts fails its test, by name, and
the test after it passes."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from harness import RankFailed, on_ranks


def total():
    number = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(number)
    return number.item()


@pytest.fixture(autouse=True)
def the_next_call_works():
    yield
    assert on_ranks(2, total) == [3.0, 3.0]


def test_an_answer_that_cannot_travel_is_named():
    with pytest.raises(RankFailed, match="rank 0 raised: (?s:.)*pickle"):
        on_ranks(1, lambda: lambda: None)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_each_rank_answers(n):
    assert on_ranks(n, total) == [n * (n + 1) / 2] * n


def raises():
    if dist.get_rank() == 2:
        raise ValueError("bad")
    return total()


def test_a_rank_that_raises_is_named_with_its_traceback():
    with pytest.raises(RankFailed, match=r"(?s)^rank 2 raised: .* in raises\n.*ValueError: bad"):
        on_ranks(4, raises)


def dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return total()


def test_a_rank_that_is_killed_is_named():
    with pytest.raises(RankFailed, match="^rank 1 died: SIGKILL"):
        on_ranks(4, dies)


def disagrees():
    dist.all_reduce(torch.ones(1 + 1000 * dist.get_rank()))


def test_an_abort_inside_gloo_is_a_sentence():
    with pytest.raises(RankFailed, match="^rank . died: SIGABRT .*different sizes"):
        on_ranks(2, disagrees)


def sleeps():
    if dist.get_rank() == 1:
        time.sleep(60)


def test_a_rank_that_hangs_is_named_with_where_it_stands():
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)^rank 1 hung for 1 s.*in sleeps"):
        on_ranks(2, sleeps, timeout=1)
    assert time.monotonic() - started < 5


def waits_alone():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))


def test_a_rank_that_waits_for_an_absent_one_is_named_with_its_operation():
    here = r"\S*test_harness.py:\d+  dist.all_reduce"
    says = rf"^rank 1 never called all_reduce, which rank 0 waits in, {here}"
    with pytest.raises(RankFailed, match=says):
        on_ranks(2, waits_alone, timeout=2)


def calls_another():
    if dist.get_rank() == 1:
        dist.broadcast(torch.ones(1), group_src=0)
    else:
        dist.barrier()


def test_ranks_in_two_collectives_are_told_apart():
    says = "^ranks wait for each other: rank 0 in barrier, .*; rank 1 in broadcast, "
    with pytest.raises(RankFailed, match=says):
        on_ranks(2, calls_another, timeout=2)


def leaves():
    if dist.get_rank() == 1:
        os._exit(3)
    return total()


def test_a_rank_that_leaves_is_named_with_its_status():
    with pytest.raises(RankFailed, match=r"^rank 1 died: it left by os._exit\(3\)"):
        on_ranks(3, leaves)
