"""Like with like: two ways of doing the same step, timed in turns, in one run."""

import statistics
import time

import torch
import torch.distributed as dist


def device():
    """The device of this rank's group: its GPU under NCCL, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if _on_gpu() else torch.device("cpu")


def time_pair(ours, theirs, pairs=40, group=None):
    """Time two callables in turns, the first of each pair changing, after two pairs of warm-up.

    A step lasts until the last rank is done. Returns medians in ms, `time_ratio`, the median of
    the pairs' ratios ours / theirs, and `spread`, their middle half.
    """
    seconds = []
    for k in range(pairs + 2):
        pair = {}
        for step in (ours, theirs) if k % 2 else (theirs, ours):
            dist.barrier(group=group)
            pair[step] = _seconds(step)
        seconds.append([pair[ours], pair[theirs]])
    slowest = torch.tensor(seconds[2:], dtype=torch.float64, device=device())
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    ours_s, theirs_s = slowest.T.tolist()
    ratios = [a / b for a, b in zip(ours_s, theirs_s)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "ours_ms": 1e3 * statistics.median(ours_s),
        "theirs_ms": 1e3 * statistics.median(theirs_s),
        "time_ratio": middle,
        "spread": [low, high],
    }


def _on_gpu():
    return dist.get_backend() == "nccl"


def _seconds(step):
    started = time.perf_counter()
    step()
    if _on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter() - started
