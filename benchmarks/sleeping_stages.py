"""Does a schedule take the time that was simulated? Every schedule, measured beside predicted.

    python benchmarks/sleeping_stages.py                          4 ranks, 8 micro-batches
    python benchmarks/sleeping_stages.py --schedule zb-v --plot zb-v.png

Stages sleep instead of computing, so that a few cores stand for many ranks: the order, messages and
waits are real, and the work is not. Exits with 1 if a makespan is more than 5% from the simulated.
"""

import argparse
import importlib
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).resolve().parent.parent))
pp = importlib.import_module("04_pp_schedules")


class Nap(torch.autograd.Function):
    """x + 1, asleep for the seconds of F, I and W: each part of backward when it is asked for."""

    @staticmethod
    def forward(ctx, x, weight, seconds):
        ctx.seconds = seconds
        time.sleep(seconds[0])
        return x + 1

    @staticmethod
    def backward(ctx, d_y):
        _, down, weights = ctx.seconds
        time.sleep(down * ctx.needs_input_grad[0] + weights * ctx.needs_input_grad[1])
        d_weight = d_y.new_zeros(1, 1) if ctx.needs_input_grad[1] else None
        return d_y if ctx.needs_input_grad[0] else None, d_weight, None


class Sleeper(nn.Module):
    """A stage that sleeps (F, I, W) seconds and passes on one number."""

    def __init__(self, seconds, last):
        super().__init__()
        self.seconds, self.last, self.weight = seconds, last, nn.Parameter(torch.zeros(1, 1))

    def boundary(self, microbatch):
        """Room for one number."""
        return torch.empty(1)

    def forward(self, x, microbatch):
        x = torch.zeros(1, requires_grad=True) if x is None else x
        y = Nap.apply(x, self.weight, self.seconds)
        return y.sum() if self.last else y


def together(timed, group, unit=1.0):
    """One Timeline, the same on every rank, of all ranks' Timed cells; `unit`: seconds of a unit of
    its time. Ranks of one machine only: it compares their clocks."""
    ranks = [None] * dist.get_world_size(group)
    # all_gather_object over pp: everybody's cells
    dist.all_gather_object(ranks, timed, group=group)
    cells = sorted(sum(ranks, []), key=lambda cell: cell.start)
    since = lambda t: (t - cells[0].start) / unit
    return pp.Timeline([pp.Timed(*cell[:2], since(cell.start), since(cell.end)) for cell in cells])


def replay(measured, schedule):
    """The schedule simulated with the time that each operation was measured to take: what a run has
    beyond it are messages, and ranks that wait for a core."""
    took = Counter()
    for cell in measured.cells:
        for kind, stage, i, _ in cell.ops:
            took[kind.replace("B", "I"), stage, i] = (cell.end - cell.start) / len(cell.ops)
    costs = [lambda *at, kind=kind: took[kind, *at] for kind in "FIW"]
    return pp.simulate(schedule, (*costs, 0))


def measure(schedule, group, unit, costs=(1, 1, 1)):
    """The Timeline, in units, of a run whose stages sleep `unit` seconds per unit of (F, I, W); the
    same on every rank. One machine only: it compares the ranks' clocks."""
    last, m = max(pp.placement(schedule))[1], 1 + max(op.microbatch for op, *_ in schedule[0])
    seconds = [unit * cost * len(schedule) / (last + 1) for cost in costs]
    stages = pp.mine(schedule, [Sleeper(seconds, s == last) for s in range(last + 1)], group)
    # barrier over pp: all start together
    dist.barrier(group=group)
    _, timed = pp.execute(schedule, stages, range(m), group)
    return together(timed, group, unit)


def main(args, device):
    """Print a row for every schedule, measured beside simulated."""
    group, p, m = dist.group.WORLD, dist.get_world_size(), args.micro_batches
    measure(pp.SCHEDULES["1f1b"](p, m), group, args.unit / 10)  # pairs of ranks connect here
    pp.say(f"{p} ranks, {m} micro-batches, F = I = W = 1 unit of {1e3 * args.unit:g} ms, asleep")
    pp.say(f"{'':15}simulated  measured    off")
    broken = 0
    for name in [args.schedule] if args.schedule else pp.SCHEDULES:
        if name == "dualpipe" and p % 2:
            continue
        schedule = pp.SCHEDULES[name](p, m)
        predicted, measured = pp.simulate(schedule), measure(schedule, group, args.unit)
        off = measured.makespan / predicted.makespan - 1
        late = abs(off) > 0.05
        line = f"{name:15}{predicted.makespan:9.4g}{measured.makespan:10.2f}{off:7.1%}"
        pp.say(line + ("  NOT WITHIN 5%" if late else ""))
        broken |= late
    if args.plot and dist.get_rank() == 0:
        both = {f"{name}, simulated": predicted, "measured, stages asleep": measured}
        pp.gantt(both, args.plot)
    return int(broken)


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    if args.micro_batches < 1 or not args.unit > 0:
        raise ValueError(f"--micro-batches {args.micro_batches}, --unit {args.unit}: more than 0")
    if args.plot and not args.schedule:
        raise ValueError(f"--plot {args.plot} draws one schedule: name it with --schedule")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.02, help="seconds")
    parser.add_argument("--schedule", choices=pp.SCHEDULES, help="default: all")
    parser.add_argument("--plot", metavar="PNG", help="draw simulated above measured")
    parser.add_argument("--timeout", type=float, default=20, help="seconds a collective may take")
    pp.launch(main, parser.parse_args(), validate)
