"""04 · Pipeline schedules: a schedule is a list

The layers are cut into stages and the batch into micro-batches; every rank runs its stages on one
micro-batch after another. In which order? That is a list per rank, and all there is to a schedule.
Here one list is simulated, drawn, and run on real ranks, and prediction meets measurement.

    rank 0  F0 F1 F2 F3 .. .. .. B0 F4 B1     F  forward            B  both: I and W
    rank 1     F0 F1 F2 .. .. B0 F3 B1 F4     I  gradient of the input: the stage before waits
    rank 2        F0 F1 .. B0 F2 B1 F3 B2     W  gradient of the weights: nobody waits
    rank 3           F0 B0 F1 B1 F2 B2 F3     (here B takes as long as F)

    bubble   (p-1)(F+B), with 1F1B as with GPipe: (p-1)/m of the ideal time, (p-1)/(m+p-1) of the
             step. v chunks a rank divide it by v, ZB-H1 leaves a third (F = I = W), ZB-H2 none
             within a rank's own span
    held     activations of m micro-batches (GPipe) or p - s (1F1B on rank s): what 1F1B is for
    sent     B·S·D per micro-batch, each way, at p-1, vp-1 or (V shapes) 2(p-1) boundaries

    python 04_pp_schedules.py                                   prove all, train with 1f1b
    python 04_pp_schedules.py --schedule zb-h1 --plot out       predicted above measured, drawn
    python 04_pp_schedules.py --simulate --ranks 64 --microbatches 512 --schedule zb-v
    torchrun --nproc-per-node 4 04_pp_schedules.py

Guide: Pipeline Parallelism · Pipeline schedules · PP's activation surcharge · pipeline overlap. Not
so there: (P-1)/(P+M) is neither share; 1F1B's bubble is not smaller than GPipe's; GPipe's memory is
the highest, not low; interleaving multiplies messages by (vp-1)/(p-1), not by 1.1 or 1.2.

Questions  Q4.1 ** which order?   Q4.2 * how many first?   Q4.3 * who waits for what?
           Q4.4 ** what can wait?   Q4.5 ** what is a part's loss?   Q4.6 *** who posts what, when?
"""
# p ranks, s one of them · m micro-batches, i one of them · v stages (chunks) per rank
# B sequences of a micro-batch · S bytes of each · D width · V vocabulary (256)

import argparse
import inspect
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
import traceback
import weakref
from collections import Counter, defaultdict, deque, namedtuple
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from pydoc_data.topics import topics
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge

__all__ = [
    "Op", "SCHEDULES", "placement", "receiver", "simulate", "marginal", "execute",
    "share_gradients", "gantt",
]  # fmt: skip


# ── the ladder: twelve schedules, each a list of cells per rank ──────────────────────────────

Op = namedtuple("Op", "kind stage microbatch direction", defaults=(0,))


def spell(words, tracks):
    """One rank's list of cells from words: "F" is its next forward, "I" or "B" its next backward,
    "W" the oldest weight gradient that it owes. A letter names one of several tracks ("Fa"), "&"
    fuses two into one cell. What has run out is left out, so that words may ask for too much.

    tracks: {letter: (forwards, backwards)}, each (stage, micro-batch[, direction]) in their order.
    A list says "W", of any track, or "Wa" and "Wb", but not both: each has a queue of its own.
    """
    todo, cells = defaultdict(deque), []
    for letter, (forwards, backwards) in tracks.items():
        todo["F" + letter] = deque(forwards)
        todo["B" + letter] = todo["I" + letter] = deque(backwards)
    for word in words.split():
        cell = ()
        # Q4.1 ** A word of one part or two is a cell. What does it take, and what does an I owe?
        #         hint: todo has a queue for each word; an I leaves a W to do, in two of them
        for part in word.split("&"):
            if todo[part]:
                at = todo[part].popleft()
                cell += (Op(part[0], *at),)
                if part[0] == "I":
                    for debt in {"W", part.replace("I", "W")}:
                        todo[debt].append(at)
        # /Q4.1
        cells += [cell] if cell else []
    return cells


def looped(p, m, words, v=1, g=None):
    """Every rank's list, by words(s) on rank s, whose chunk c is stage c·p + s. Micro-batches pass
    through all chunks of a rank in groups of g, backwards from the last chunk on."""
    groups = [range(m)[k : k + (g or m)] for k in range(0, m, g or m)]
    order = lambda s, chunks: [(c * p + s, i) for group in groups for c in chunks for i in group]
    track = lambda s: (order(s, range(v)), order(s, range(v)[::-1]))
    return [spell(words(s), {"": track(s)}) for s in range(p)]


def gpipe(p, m):
    """All forwards, then all backwards (Huang et al., arXiv:1811.06965)."""
    return looped(p, m, lambda s: "F " * m + "B " * m)


def one_f_one_b(p, m):
    """GPipe's bubble, but each backward as soon as it can run, so that rank s holds p - s
    micro-batches, not m (PipeDream-Flush, Narayanan et al., arXiv:2006.09503)."""
    # Q4.2 * How many forwards does rank s run before its first pair of F and B? With one too few,
    #        33 units become 54 at p = 4 and m = 8; with one too many, it holds more.
    #        hint: how many stages lie between s and the loss?
    return looped(p, m, lambda s: "F " * (p - 1 - s) + "F B " * m)
    # /Q4.2


def eager_1f1b(p, m):
    """1F1B that runs a round trip ahead, so that it hides slow links; up to twice its memory."""
    return looped(p, m, lambda s: "F " * 2 * (p - 1 - s) + "F B " * m)


def zb_h1(p, m):
    """1F1B, W put off to fill the end of the step (Qi et al., arXiv:2401.10241)."""
    return looped(p, m, lambda s: "F " * (p - 1 - s) + "F I " * s + "F I W " * m)


def zb_h2(p, m):
    """Eager 1F1B, W put off: with F = I = W and 2p - 1 micro-batches, no rank idles between its
    first operation and its last (source: as zb-h1)."""
    return looped(p, m, lambda s: "F " * 2 * (p - 1 - s) + "F I " * 2 * s + "F I W " * m)


def looped_bfs(p, m, v=2):
    """GPipe with v chunks per rank, breadth first (Lamy-Poirier, arXiv:2211.05953)."""
    return looped(p, m, lambda s: "F " * m * v + "B " * m * v, v)


def interleaved(p, m, v=2, g=None):
    """1F1B with v chunks per rank: 1/v of the bubble (Narayanan et al., arXiv:2104.04473)."""
    g = group_size(p, m, g)
    ahead = lambda s: 2 * (p - 1 - s) + (v - 1) * g
    return looped(p, m, lambda s: "F " * ahead(s) + "F B " * m * v, v, g)


def interleaved_zb(p, m, v=2, g=None):
    """Interleaved 1F1B, W put off, at its memory or less (torch's InterleavedZeroBubble)."""
    g = group_size(p, m, g)
    ahead = lambda s: p - 1 - s + (v - 1) * g
    return looped(p, m, lambda s: "F " * ahead(s) + "F I " * s + "F I W " * m * v, v, g)


def group_size(p, m, g=None):
    """g, or the least size of a group that works: in one smaller than p, be it the last, the first
    rank waits for the last, and may do so for ever (p = 8, m = 12, g = 8). Raises ValueError."""
    fit = [k for k in range(p, m + 1) if m % k == 0 or m % k >= p] or [m]
    if g not in (None, *fit):
        raise ValueError(f"--group {g} with --microbatches {m} stalls {p} ranks: use one of {fit}")
    return g or fit[0]


def zb_auto(p, m, limit=None, costs=(1, 1, 1, 0), kept=1.0):
    """Greedy: a rank that is free takes I if it can, else F if memory allows, else W.

    limit: micro-batches whose activations a rank may hold (default 2p - 1, for no bubble within a
    rank's span; p is ZB-H1's memory). kept: the part of them that lives on from I to W.
    Source: the heuristic of Qi et al., arXiv:2401.10241, section 3.1, without its look-ahead.
    """
    limit = 2 * p - 1 if limit is None else limit
    if limit < 1:
        raise ValueError(f"--limit {limit}: a rank must be allowed one micro-batch")
    lists, free, never = [[] for _ in range(p)], [0.0] * p, math.inf
    count = [[0, 0, 0] for _ in range(p)]  # I, F and W that a rank has run
    there = {(kind, end, i): 0 for kind, end in (("F", -1), ("I", p)) for i in range(m)}

    def soonest(s):
        """(start, 0 for I 1 for F 2 for W, s, micro-batch) of what rank s would do next."""
        i, f, w = count[s]
        room = f - (1 - kept) * i - kept * w + 1 <= limit + 1e-9
        arrival = [there.get(("I", s + 1, i), never) if i < f else never]
        arrival += [there.get(("F", s - 1, f), never) if room else never, 0 if w < i else never]
        return min((max(free[s], at), k, s, n) for k, (at, n) in enumerate(zip(arrival, (i, f, w))))

    upcoming = [soonest(s) for s in range(p)]
    while (chosen := min(upcoming))[0] < never:
        start, k, s, i = chosen
        lists[s].append((Op("IFW"[k], s, i),))
        count[s][k] += 1
        free[s] = start + (costs[1], costs[0], costs[2])[k]
        there["IFW"[k], s, i] = free[s] + costs[3]
        for near in range(max(0, s - 1), min(p, s + 2)):
            upcoming[near] = soonest(near)
    return lists


def folded(p, m, words):
    """Every rank's list, by words(s). The stages go down the ranks and back up: rank s holds stage
    s, its track a, and stage 2p-1-s, its track b."""
    track = lambda stage: 2 * [[(stage, i) for i in range(m)]]
    return [spell(words(s), dict(a=track(s), b=track(2 * p - 1 - s))) for s in range(p)]


def zb_v(p, m):
    """ZB-H2's bubble, each rank holding what 1F1B's first does (Qi et al., arXiv:2405.15362)."""

    def words(s):
        start = "Fa " * (2 * (p - s) - 1) + "Fb Fa " * s + "Fb Ib Wb " * (p - s)
        steady = "Fa Ia Wa Fb Ib Wb " * (max(m, 2 * p - 1) - p)
        return start + steady + "Ia Ib " * s + "Ia Wa " * (p - s) + "Wb " * s + "Wa " * s

    return folded(p, m, words)


def _dual_words(s, h, n):
    """DualPipe's phases (github.com/deepseek-ai/DualPipe) at place s of h in the fold, for n
    micro-batches per chunk, 2h or more. At the fold the first F and B stay two cells: fused, the
    forward would wait for the gradient, and all ranks for the forward."""
    fill = "Fa " * 2 * (h - s - 1) + "Fa Fb " * (s + 1)
    turn = "Ib W Fb " * (h - s - 1) + ("Fa Bb " if s == h - 1 else "Fa&Bb ")
    steady = "Fb&Ba " + "Fa&Bb Fb&Ba " * (n - h - 1)
    drain = "".join(f"{'B' if k <= s else 'I'}{'ba'[k % 2]} " for k in range(2 * s + 2))
    return fill + turn + steady + drain + "W Ia " * (h - s - 1) + "W " * (s + 1)


def dualpipev(p, m):
    """DualPipe cut in half: ZB-V's placement, and one copy of the weights."""
    return folded(p, m, lambda s: _dual_words(s, p, max(m, 2 * p)))


def dualpipe(p, m):
    """Two directions at once: rank r holds stage r of direction 0 and stage p-1-r of direction 1;
    two ranks hold each weight; m counts both directions (DeepSeek-V3, arXiv:2412.19437)."""
    if p % 2:
        raise ValueError(f"dualpipe folds the ranks in two: --ranks {p} is odd")
    lists, half = [], (m + 1) // 2
    track = lambda direction, stage, share: 2 * [[(stage, i, direction) for i in share]]
    for r in range(p):
        tracks = [track(0, r, range(half)), track(1, p - 1 - r, range(half, m))]
        a, b = tracks if r < p // 2 else tracks[::-1]
        words = _dual_words(min(r, p - 1 - r), p // 2, max(half, p))
        lists.append(spell(words, dict(a=a, b=b)))
    return lists


SCHEDULES = {
    "gpipe": gpipe, "1f1b": one_f_one_b, "eager-1f1b": eager_1f1b, "interleaved": interleaved,
    "looped-bfs": looped_bfs, "zb-h1": zb_h1, "zb-h2": zb_h2, "zb-auto": zb_auto, "zb-v": zb_v,
    "interleaved-zb": interleaved_zb, "dualpipev": dualpipev, "dualpipe": dualpipe,
}  # fmt: skip


# ── the simulator ────────────────────────────────────────────────────────────────────────────

Timed = namedtuple("Timed", "rank ops start end")  # a cell, and when its rank ran it


def placement(schedule):
    """{(direction, stage): rank}, read off the lists."""
    ops = [(r, op) for r, cells in enumerate(schedule) for cell in cells for op in cell]
    return {(op.direction, op.stage): r for r, op in ops}


def result(op):
    """The key of what an operation leaves: an activation "F", a gradient "G", or "W"."""
    return "G" if op.kind in "IB" else op.kind, op.stage, op.microbatch


def needs(op, last):
    """The keys of what an operation waits for; `last` is the last stage."""
    # Q4.3 * What must be there before F, before I or B, and before W can run?
    #        hint: what a neighbouring stage computes, and what this stage kept
    if op.kind == "F":
        return [("F", op.stage - 1, op.microbatch)] if op.stage else []
    if op.kind == "W":
        return [("G", op.stage, op.microbatch)]
    above = [("G", op.stage + 1, op.microbatch)] if op.stage < last else []
    return [("F", op.stage, op.microbatch), *above]
    # /Q4.3


def receiver(op, place, last):
    """(rank, stage) that an operation's result is for: the stage after an F, before an I or B; or
    (None, None)."""
    if op.kind == "W":
        return None, None
    stage = op.stage + (1 if op.kind == "F" else -1)
    return (place[op.direction, stage], stage) if 0 <= stage <= last else (None, None)


def show(*keys):
    """F3.7: the forward of stage 3 on micro-batch 7."""
    return [f"{kind}{stage}.{i}" for kind, stage, i, *_ in keys]


def simulate(schedule, costs=(1, 1, 1, 0), kept=1.0):
    """Time a schedule: a cell starts when its rank is free and all that its operations need is
    there, takes the sum of their times, and at its end what it computed is there.

    Args:
        schedule: per rank a list of cells, a cell being a tuple of Ops.
        costs: (F, I, W, comm) in any unit; B takes I + W. F, I and W are for all layers of a rank
            (a chunk takes its share), or functions (stage, micro-batch) -> time. comm is the
            latency of a message.
        kept: the part of a micro-batch's activations that lives on from I to W.
    Returns a Timeline. Raises ValueError for a schedule that cannot complete (with the operation
    that blocks each rank), or that has an operation too many or too few.
    """
    if not all(callable(cost) or 0 <= cost < math.inf for cost in costs):
        raise ValueError(f"--costs {costs}: each must be 0 or more, and finite; B is I + W")
    last = check_whole(schedule)
    share, prices = len(schedule) / (last + 1), dict(zip("FIW", costs))

    def duration(op):
        terms = [prices[kind] for kind in ("IW" if op.kind == "B" else op.kind)]
        return sum(c(op.stage, op.microbatch) if callable(c) else c * share for c in terms)

    todo, clock = [deque(cells) for cells in schedule], [0.0] * len(schedule)
    done, cells, going, messages = {}, [], True, 0
    lacking = lambda ops: [need for op in ops for need in needs(op, last) if need not in done]
    while going:
        going = False
        for rank, queue in enumerate(todo):
            while queue and not lacking(queue[0]):
                ops, going = queue.popleft(), True
                inputs = [done[need] for op in ops for need in needs(op, last)]
                messages += sum(source != rank for _, source in inputs)
                there = [end + costs[3] * (source != rank) for end, source in inputs]
                start = max([clock[rank], *there])
                clock[rank] = start + sum(map(duration, ops))
                cells.append(Timed(rank, ops, start, clock[rank]))
                done |= {result(op): (clock[rank], rank) for op in ops}
    heads = [(rank, queue[0]) for rank, queue in enumerate(todo) if queue]
    stuck = [f"rank {r} at {'&'.join(show(*ops))} for {show(*lacking(ops))[0]}" for r, ops in heads]
    if stuck:
        raise ValueError(f"no rank can go on: {', '.join(stuck)}")
    return Timeline(sorted(cells, key=lambda cell: (cell.end, cell.start)), kept, messages)


def check_whole(schedule):
    """The last stage of a schedule. Raises ValueError if an operation comes twice or is missing: a
    micro-batch that goes up, or down, visits all stages, and each I has its W."""
    ops = [(rank, op) for rank, cells in enumerate(schedule) for cell in cells for op in cell]
    last, seen, place = max(op.stage for _, op in ops), set(), placement(schedule)
    for rank, op in ops:
        if (home := place[op.direction, op.stage]) != rank:
            raise ValueError(f"rank {rank} has {show(op)[0]}, and rank {home} has its stage")
        if result(op) in seen:
            raise ValueError(f"rank {rank} has {show(op)[0]} a second time")
        seen.add(result(op))
    ways = {(kind, i) for kind, _, i in seen if kind != "W"}
    due = {(kind, stage, i) for kind, i in ways for stage in range(last + 1)}
    owed = {("W", op.stage, op.microbatch) for _, op in ops if op.kind == "I"}
    due |= owed
    if spare := {key for key in seen if key[0] == "W"} - owed:
        raise ValueError(f"no I owes {', '.join(show(*sorted(spare)))}")
    if due - seen:
        raise ValueError(f"no rank has {', '.join(show(*sorted(due - seen)))}")
    return last


@dataclass
class Timeline:
    """When each cell ran, by simulation or by the clock.

    cells: Timed, in an order in which they could run one at a time, none waiting for a later one.
    makespan: from the first start on any rank to the last end on any. span: from a rank's own first
    start to its own last end, the longest. ideal: the work of the busiest rank. What the first two
    have beyond the third are the two bubbles; bubble: the span's, as a share of the span.
    """

    cells: list
    kept: float = 1.0
    messages: int = 0  # boundaries crossed in all: activations up, gradients down

    def __post_init__(self):
        ranks = defaultdict(list)
        for cell in self.cells:
            ranks[cell.rank].append(cell)
        self.ranks = [ranks[rank] for rank in sorted(ranks)]  # the cells of each
        self.share = len(self.ranks) / (1 + max(op.stage for c in self.cells for op in c.ops))
        self.makespan = max(c.end for c in self.cells) - min(c.start for c in self.cells)
        self.span = max(own[-1].end - own[0].start for own in self.ranks)
        self.ideal = max(sum(c.end - c.start for c in own) for own in self.ranks)
        self.bubble = 1 - self.ideal / self.span if self.span else 0.0

    def held(self, rank):
        """[(time, micro-batches whose activations the rank holds)], each from its F to its B, or in
        part to its W; one micro-batch in all layers of a rank counts 1."""
        share, curve, level = self.share, [], 0.0  # a stage's part of the layers of a rank
        freed = {"F": 0, "B": share, "I": share * (1 - self.kept), "W": share * self.kept}
        trained = {op[1:3] for cell in self.ranks[rank] for op in cell.ops if op.kind != "F"}
        for _, ops, start, end in self.ranks[rank]:
            level += share * sum(op.kind == "F" and op[1:3] in trained for op in ops)
            curve.append((start, level))
            level -= sum(freed[op.kind] for op in ops)
            curve.append((end, level))
        return curve

    @cached_property
    def peak(self):
        """The most that each rank ever holds."""
        return [max(level for _, level in self.held(rank)) for rank in range(len(self.ranks))]


def marginal(schedule, costs=(1, 1, 1, 0), once=None):
    """What a further step costs if a rank enters it as soon as it is done with the one before, with
    no barrier at the optimizer: the bubble as a long run sees it."""
    m = 1 + max(op.microbatch for cells in schedule for cell in cells for op in cell)
    again = lambda cell: tuple(op._replace(microbatch=op.microbatch + m) for op in cell)
    twice = [cells + [again(cell) for cell in cells] for cells in schedule]
    return simulate(twice, costs).makespan - (once or simulate(schedule, costs)).makespan


FORMULAS = {  # bubble without comm; in what; peak on rank s; boundaries; where all of it is exact
    "gpipe": ("(p-1)*(F+B)", "makespan", "m", "p-1", "True"),
    "1f1b": ("(p-1)*(F+B)", "makespan", "min(m, p-s)", "p-1", "True"),
    "eager-1f1b": ("(p-1)*(F+B)", "makespan", "min(m, 2*(p-s)-1)", "p-1", "True"),
    "interleaved": ("(p-1)*(F+B)/v", "makespan", "min(m, (2*(p-s)-1+(v-1)*g)/v)", "v*p-1", "m>=p"),
    "looped-bfs": ("(p-1)*(F+B)/v", "makespan", "m", "v*p-1", "m>=p"),
    "zb-h1": ("(p-1)*(F+I-W)", "makespan", "p-s+s*k", "p-1", "m>=p and W<=min(F,I)"),
    "zb-h2": ("(p-1)*(F+I-2*W)", "span", "2*(p-s)-1+2*s*k", "p-1", "m>=2*p-1 and W<=min(F,I)"),
    "zb-auto": ("0", "span", "2*p-1", "p-1", "F==I==W and k==1 and m>=2*p-1==limit"),
    "zb-v": ("0", "span", "p", "2*(p-1)", "F==I==W and m>=2*p"),
    "interleaved-zb": (
        "(p-1)*(F+I-W)/v", "makespan", "(p-s+(v-1)*g+s*k)/v", "v*p-1", "m>=p and W<=min(F,I)"
    ),
    "dualpipev": ("(p-1)*(F+2*B-3*W)/2", "makespan", "p+1/2", "2*(p-1)", "F==I==W and m>=2*p"),
    "dualpipe": ("(p/2-1)*(F+2*B-3*W)", "makespan", "p+1", "p-1", "F==I==W and m>=2*p and m%2==0"),
}  # fmt: skip


def closed_form(name, p, m, v=2, g=None, limit=None, costs=(1, 1, 1, 0), kept=1.0):
    """(bubble, peak of each rank, messages) by FORMULAS; None for the first two where they are not
    exact. B = I + W, k = kept, and DualPipe's F&B takes F + B: nothing is gained by the overlap."""
    given = dict(zip("FIW", costs), p=p, m=m, v=v, k=kept, limit=limit or 2 * p - 1)
    given |= dict(B=costs[1] + costs[2], g=group_size(p, m, g))
    bubble, _, peak, boundaries, exact = FORMULAS[name]
    messages = 2 * m * eval(boundaries, given) if p > 1 else 0
    if costs[3] or not eval(exact, given):
        return None, None, messages
    return eval(bubble, given), [eval(peak, given | {"s": s}) for s in range(p)], messages


# ── drawing ──────────────────────────────────────────────────────────────────────────────────


def bars(timeline):
    """(rank, op, start, length) of each operation; of a fused cell, each gets its usual share: a B
    twice that of an F."""
    for rank, ops, start, end in timeline.cells:
        parts = [1 + (op.kind == "B") for op in ops]
        for k, op in enumerate(ops):
            unit = (end - start) / sum(parts)
            yield rank, op, start + unit * sum(parts[:k]), unit * parts[k]


def sketch(timeline, width=160):
    """A Gantt in characters: kind and micro-batch, lower case for a rank's second chunk and on,
    dots where it idles; "" where that takes more than `width` columns."""
    lines, drawn = [""] * len(timeline.ranks), [bar for bar in bars(timeline) if bar[-1]]
    if not drawn:
        return ""
    digits = 1 + len(str(max(op.microbatch for _, op, *_ in drawn)))
    unit = min(length for *_, length in drawn)
    column = lambda t: round(t / unit) * digits
    for rank, op, start, length in drawn:
        word = f"{op.kind}{op.microbatch}".ljust(digits, "_")
        word = word.lower() if op.stage >= len(lines) else word
        lines[rank] = lines[rank].ljust(column(start), ".") + word
        lines[rank] = lines[rank].ljust(column(start + length), "_")
    lines = [line.ljust(column(timeline.makespan), ".") for line in lines]
    return "\n".join(lines) if len(lines[0]) <= width else ""


NAMES = {"F": "forward", "I": "input gradient", "B": "both gradients", "W": "weight gradient"}
COLORS = {"F": "#dcebf7", "I": "#f4b678", "B": "#d0693c", "W": "#1f3f5b"}  # light to dark
GREY = "#8a8a8a"


def gantt(timelines, path):
    """Draw a Timeline, or {title: Timeline} as panels on one scale of time, into a picture file.

    A bar is an operation, its number the micro-batch; a rank's second chunk, or direction, has a
    dark foot. Under a rank's bars, in grey: the activations that it holds, on one scale for all.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    timelines = timelines if isinstance(timelines, dict) else {"": timelines}
    most, longest = (max(of(t) for t in timelines.values())
                     or 1.0 for of in (lambda t: max(t.peak), lambda t: t.makespan))  # fmt: skip
    height = 0.5 + sum(0.45 + 0.36 * len(t.ranks) for t in timelines.values())
    figure = Figure(figsize=(13, height), layout="constrained")
    panels = figure.subplots(len(timelines), squeeze=False).flat
    for axes, (title, t) in zip(panels, timelines.items()):
        title += f"   bubble {t.bubble:.1%} of a rank's span, holds {max(t.peak):.3g} micro-batches"
        axes.set_title(title, loc="left", size=10)
        axes.set(xlim=(0, longest), ylim=(len(t.ranks) - 0.4, -0.5))
        axes.set_axis_off()
        for rank, op, start, length in bars(t):
            axes.barh(rank - 0.13, length, 0.46, start, color=COLORS[op.kind], ec="black", lw=0.3)
            if op.stage >= len(t.ranks) or op.direction:
                axes.barh(rank + 0.06, length, 0.08, start, color="black")
            if length > longest / 100:
                look = dict(color="white" if op.kind == "W" else "black", ha="center", va="center")
                axes.text(start + length / 2, rank - 0.15, op.microbatch, size=6.5, **look)
        for rank in range(len(t.ranks)):
            times, levels = zip(*t.held(rank))
            curve = [rank + 0.48 - 0.36 * level / most for level in levels]
            axes.fill_between(times, curve, rank + 0.48, step="post", fc=GREY)
    patches = [Patch(fc=COLORS[kind], ec="black", lw=0.4, label=NAMES[kind]) for kind in NAMES]
    patches.append(Patch(fc="black", label="foot: a later chunk, or direction"))
    patches.append(Patch(fc=GREY, label="activations held"))
    figure.legend(handles=patches, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


def bubbles(path, p, times=(1, 2, 3, 4, 6, 8)):
    """Draw the bubble of each schedule against m/p into a picture file; equal ones share a line."""
    from matplotlib.figure import Figure

    curves, figure = defaultdict(list), Figure(figsize=(9, 4.2), layout="constrained")
    for name in runnable(p):
        shares = [100 * simulate(SCHEDULES[name](p, k * p)).bubble for k in times]
        curves[tuple(round(share, 6) for share in shares)].append(name)
    axes = figure.subplots()
    axes.set_prop_cycle(color="#0072b2 #e69f00 #000000 #56b4e9 #d55e00 #999999 #009e73".split())
    for k, shares in enumerate(sorted(curves, key=lambda shares: shares[::-1], reverse=True)):
        look = "osD^vP*"[k % 7] + ("-", "--", ":")[k % 3]
        axes.plot(times, shares, look, label=" = ".join(curves[shares]))
    axes.set(title=f"Bubble of a rank's span, {p} ranks, F = I = W, no communication time")
    axes.set(xlabel="micro-batches per rank, m/p", ylabel="idle, % of a rank's span", xticks=times)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


# ── the serial twin, cut into stages ─────────────────────────────────────────────────────────


class _Matmul(torch.autograd.Function):
    """
    forward   x Wᵀ
    backward  the input gradient now; the weight gradient now, or later: a closure in a list
    """

    @staticmethod
    def forward(ctx, x, weight, later):
        ctx.save_for_backward(x)
        ctx.weight, ctx.later = weight, later
        return x @ weight.T

    @staticmethod
    def backward(ctx, d_y):
        x, weight = ctx.saved_tensors[0].detach(), ctx.weight  # detached: x would keep its graph
        d_x = d_y @ weight if ctx.needs_input_grad[0] else None
        d_weight = lambda: d_y.flatten(0, -2).T @ x.flatten(0, -2)

        def accumulate():
            weight.grad = d_weight() if weight.grad is None else weight.grad + d_weight()

        # Q4.4 ** Upstream waits for d_x and nobody for d_weight: return it, or leave it for later?
        #         hint: a frozen weight owes nothing; if later is a list, autograd must get None
        if not ctx.needs_input_grad[1]:
            return d_x, None, None
        if ctx.later is None:
            return d_x, d_weight(), None
        ctx.later.append(accumulate)
        return d_x, None, None
        # /Q4.4


class Block(nn.Module):
    """x + down(gelu(up(x))), (B, S, D) to itself. Saves 9·B·S·D elements for backward, of which the
    inputs of the two matrices, 5·B·S·D, until W (and with them the gradients of their outputs)."""

    def __init__(self, D):
        super().__init__()
        self.up, self.down = (nn.Linear(*shape, bias=False) for shape in ((D, 4 * D), (4 * D, D)))
        for layer in (self.up, self.down):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)

    def forward(self, x_BSD, later=None):
        h = F.gelu(_Matmul.apply(x_BSD, self.up.weight, later))
        return x_BSD + _Matmul.apply(h, self.down.weight, later)


class Stage(nn.Module):
    """Consecutive blocks {global index: Block}; the first stage embeds, the last returns the loss.

    A micro-batch is (x_BS, y_BS, divisor): bytes, the bytes after them (-100: not counted), and the
    number of counted ones in the whole step. The head is the embedding's own weight (tied).
    """

    def __init__(self, blocks, embedding, first, last):
        super().__init__()
        self.blocks, self.first, self.last = nn.ModuleDict(blocks), first, last
        self.D, self.embedding = embedding.embedding_dim, embedding if first or last else None

    def boundary(self, microbatch):
        """Room for what arrives from a neighbouring stage: (B, S, D)."""
        return next(self.parameters()).new_empty(*microbatch[0].shape, self.D)

    def forward(self, h_BSD, microbatch, later=None):
        x_BS, y_BS, divisor = microbatch
        if self.first:
            h_BSD = self.embedding(x_BS)
        for block in self.blocks.values():
            h_BSD = block(h_BSD, later)
        if not self.last:
            return h_BSD
        logits_BSV = _Matmul.apply(h_BSD, self.embedding.weight, later)
        # Q4.5 ** Micro-batches differ in how many bytes count; their gradients are summed. What is
        #         the loss of one?
        #         hint: not its mean, which would weigh a short one like a long one
        logits, targets = logits_BSV.flatten(0, 1), y_BS.flatten()
        total = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        return total / divisor
        # /Q4.5


def build(stages, layers, D=16, V=256):
    """The model as a list of stages, from one seed however it is cut; run in turn, or as one stage,
    it is the serial twin. Parameters are named by global layer index. Raises ValueError."""
    if layers % stages:
        raise ValueError(f"--layers {layers} cannot be cut into {stages} equal stages")
    torch.manual_seed(0)
    embedding, blocks = nn.Embedding(V, D), [(str(k), Block(D)) for k in range(layers)]
    nn.init.normal_(embedding.weight, std=D**-0.5)
    cut = lambda k: dict(blocks[k * layers // stages : (k + 1) * layers // stages])
    return [Stage(cut(k), embedding, k == 0, k == stages - 1) for k in range(stages)]


# ── the executor ─────────────────────────────────────────────────────────────────────────────

# Why nothing deadlocks, whatever the schedule: every rank walks one and the same list of all cells,
# in an order in which they could run one at a time, and posts a cell's messages where it passes the
# cell. The first cell that is not done never waits for one behind it, even if every send and every
# receive blocked; and any two ranks post what passes between them in the same order, which is all
# that NCCL goes by (it ignores tags).


class _Worker:
    """A rank at work: its stages, what they got from their neighbours, and the graphs and closures
    of forwards whose backward is still to come."""

    def __init__(self, schedule, stages, microbatches):
        ops = [op for cells in schedule for cell in cells for op in cell]
        self.stages, self.microbatches, self.last = stages, microbatches, max(o.stage for o in ops)
        self.split = {op[1:3] for op in ops if op.kind == "I"}
        self.trained = {op[1:3] for op in ops if op.kind in "IB"}
        self.results, self.losses, self.graphs, self.owed = {}, {}, {}, {}

    def run(self, op):
        """Compute one operation; returns what the neighbouring stage is to get."""
        at = stage, i = op.stage, op.microbatch
        if op.kind == "F":
            x = self.results.pop(("F", stage - 1, i), None)
            later = self.owed[at] = [] if at in self.split else None
            with torch.set_grad_enabled(at in self.trained):
                x = x if x is None else x.requires_grad_()
                y = self.stages[stage](x, self.microbatches[i], later)
            if y.requires_grad:  # the edge into the graph, not y: an output is freed once sent
                self.graphs[at] = x, get_gradient_edge(y)
            if stage == self.last:
                self.losses[i] = y.detach()
            return y.detach()
        if op.kind == "W":
            while self.owed[at]:
                self.owed[at].pop()()
            return None
        d_y = self.results.pop(("G", stage + 1, i), None)
        x, edge = self.graphs.pop(at, (None, None))
        if edge:  # a frozen first stage has none
            torch.autograd.backward([edge], [self.losses[i].new_ones(()) if d_y is None else d_y])
        return None if x is None else x.grad


def execute(schedule, stages, microbatches, group, last_backward=None):
    """Run a schedule on the ranks of `group`, one list each, and add up gradients in .grad.

    Args:
        schedule: per rank a list of cells, as in SCHEDULES; micro-batches of which it has only F
            run without gradients (validation).
        stages: {stage: module}, this rank's. A module is called module(x, microbatch, later). x is
            what the stage before returned, None for the first; the last returns its scalar loss.
            later is None, or a list where the schedule splits this backward into I and W: then
            each layer's backward appends to it a closure that adds the weight gradient to .grad,
            and W calls these. module.boundary(microbatch) returns an empty tensor with the shape,
            dtype and device of what arrives from a neighbour, either way.
        microbatches: a sequence; its i-th is what modules get for micro-batch i.
        last_backward: called with a stage once its last gradient of this step is complete. Closures
            fire no parameter hooks, so a stage's data-parallel reduction starts here.
    Returns {micro-batch: loss}, empty where the last stage is not, and this rank's cells as Timed,
    in seconds of this machine's clock (on a GPU, of launching them).
    """
    me, place, timed = dist.get_rank(group), placement(schedule), []
    if len(schedule) != (n := dist.get_world_size(group)):
        raise ValueError(f"a schedule of {len(schedule)} ranks cannot run on {n}")
    worker, arriving, leaving = _Worker(schedule, stages, microbatches), {}, deque()
    final = {op.stage: op for cell in schedule[me] for op in cell if op.kind != "F"}.values()
    for cell in simulate(schedule).cells:
        outputs = [None] * len(cell.ops)
        if cell.rank == me:
            for need in [need for op in cell.ops for need in needs(op, worker.last)]:
                if need in arriving:
                    arriving.pop(need).wait()
            start = time.perf_counter()
            outputs = [worker.run(op) for op in cell.ops]
            timed.append(Timed(me, cell.ops, start, time.perf_counter()))
        for op, output in zip(cell.ops, outputs):
            to, stage = receiver(op, place, worker.last)
            # Q4.6 *** The result of op, computed on cell.rank, is for `stage` on rank `to`, if for
            #          any. What does this rank do?
            #          hint: it may be the one, the other, both or neither
            if cell.rank == me == to:
                worker.results[result(op)] = output
            elif cell.rank == me and to is not None:
                # isend to the neighbouring stage, B·S·D: both ends post it at this cell
                leaving.append((dist.isend(output, group=group, group_dst=to), output))
            elif to == me:
                room = stages[stage].boundary(microbatches[op.microbatch])
                # irecv, B·S·D: posted while the sender computes, awaited where it is first used
                arriving[result(op)] = dist.irecv(room, group=group, group_src=cell.rank)
                worker.results[result(op)] = room
            # /Q4.6
        outputs = output = room = None
        while len(leaving) > 2:  # what is sent is freed: backward starts from the graph's edge
            leaving.popleft()[0].wait()
        for op in [op for op in cell.ops if last_backward and op in final]:
            last_backward(op.stage)
    for work, _ in leaving:
        work.wait()
    return worker.losses, timed


def share_gradients(schedule, stages, group):
    """Add up the gradients of weights that two ranks hold: both ends' of a tied embedding, or
    DualPipe's two copies of everything. Where one rank has both ends, autograd has done it. What is
    frozen must be so on both."""
    place, me = placement(schedule), dist.get_rank(group)
    ends = place[0, 0], place[0, max(place)[1]]
    if (1, 0) in place:
        peer, modules = dist.get_world_size(group) - 1 - me, [stages[s] for s in sorted(stages)]
    elif me in ends and ends[0] != ends[1]:
        peer, modules = sum(ends) - me, [s.embedding for s in stages.values() if s.embedding]
    else:
        return
    every = (param for module in modules for param in module.parameters())
    params = dict.fromkeys(param for param in every if param.requires_grad)  # in both or neither
    if not params:
        return
    theirs = [torch.empty_like(param.grad) for param in params]
    swap = [(dist.isend, param.grad) for param in params] + [(dist.irecv, part) for part in theirs]
    swap = [dist.P2POp(*one, group=group, group_peer=peer) for one in swap]
    # batch_isend_irecv with the rank that holds the same weights: one batch, so neither goes first
    for work in dist.batch_isend_irecv(swap):
        work.wait()
    for param, part in zip(params, theirs):
        param.grad += part


# ── proof ────────────────────────────────────────────────────────────────────────────────────

KEPT = 5 / 9  # of what a Block saves, the part that lives on from I to W


class Scale:
    """Weighs what autograd saves in the given blocks: `peak` is the most bytes ever alive at once.
    It follows the tensors' storages, so whatever keeps one, a graph or a closure, is found out."""

    def __init__(self, blocks):
        self.now = self.peak = 0
        saving = torch.autograd.graph.saved_tensors_hooks(self._save, lambda t: t)
        for block in blocks:
            block.register_forward_pre_hook(lambda *_: saving.__enter__())
            block.register_forward_hook(lambda *_: saving.__exit__())

    def _save(self, t):
        self._add(t.nbytes)
        weakref.finalize(t.untyped_storage(), self._add, -t.nbytes)
        return t

    def _add(self, nbytes):
        self.now += nbytes
        self.peak = max(self.peak, self.now)


def proof_batch(m, device, B=2, S=8):
    """m micro-batches of random bytes, some with fewer bytes that count than others."""
    generator = torch.Generator().manual_seed(1)
    x_mBS, y_mBS = torch.randint(256, (2, m, B, S), generator=generator).to(device)
    for i in range(m):
        y_mBS[i, :, : i % S] = -100
    return [(x_BS, y_BS, (y_mBS != -100).sum()) for x_BS, y_BS in zip(x_mBS, y_mBS)]


def twin_gradients(layers, batch, later=None):
    """{name: gradient} of the serial twin on the whole batch at once, and its loss."""
    twin = build(1, layers)[0].to(batch[0][0].device, torch.float64)
    x, y, divisors = zip(*batch)
    loss = twin(None, (torch.cat(x), torch.cat(y), divisors[0]), later)
    loss.backward()
    return {name: param.grad for name, param in twin.named_parameters()}, loss.detach()


def mine(schedule, model, group):
    """{stage: module}, of a list of all stages those of this rank."""
    me = dist.get_rank(group)
    return {stage: model[stage] for (_, stage), rank in placement(schedule).items() if rank == me}


def check(schedule, layers, batch, group, times=1, share=True):
    """A step by `schedule` beside the twin. Returns the largest relative error of the loss and of
    this rank's gradients; the bytes sent by all ranks; the most bytes saved in this rank's blocks.
    times: a factor that every loss gets by mistake. share: add up what two ranks hold."""
    wanted, loss = twin_gradients(layers, batch)
    stages = mine(schedule, build(1 + max(placement(schedule))[1], layers), group)
    model = nn.ModuleList(stages.values()).to(loss.device, torch.float64)
    scale = Scale(block for stage in model for block in stage.blocks.values())
    with Ledger() as ledger:
        losses, _ = execute(schedule, stages, [(x, y, n / times) for x, y, n in batch], group)
    if share:
        share_gradients(schedule, stages, group)
    totals = torch.stack([sum(losses.values(), 0 * loss), loss.new_tensor(ledger.sent.total())])
    # all_reduce(SUM) over pp, 2: the loss, which the last stage knows; the bytes of all ranks
    dist.all_reduce(totals, group=group)
    named = [pair for stage in model for pair in stage.named_parameters()]
    errors = [relative_error(param.grad, wanted[name]) for name, param in named]
    return max(relative_error(totals[0], loss), *errors), totals[1].item(), scale.peak


def proof(args, group, device):
    """A row for every schedule, and two that are wrong on purpose."""
    p, m, v = dist.get_world_size(group), args.microbatches, args.chunks or 2
    batch, layers = proof_batch(m, device), p * math.lcm(2, v)
    B_S_D = batch[0][0].numel() * 16 * 8
    for name, schedule in schedules(args, p).items():
        error, sent, held = check(schedule, layers, batch, group)
        messages = closed_form(name, p, m, v)[-1]
        peak = simulate(schedule, kept=KEPT).peak[dist.get_rank(group)]
        yield Row(name, error, (sent, messages * B_S_D), (held, peak * layers / p * 9 * B_S_D))
    if p == 1 or m == 1:
        return
    whole, first = (  # of the tied weight: with the head's part, and without, which waits
        twin_gradients(layers, batch, later)[0]["embedding.weight"] for later in (None, [])
    )
    ends = relative_error(first, whole), relative_error(whole - first, whole)
    error, *_ = check(one_f_one_b(p, m), layers, batch, group, times=m)
    yield Row("losses not divided by m", error, wrong=m - 1)
    error, *_ = check(one_f_one_b(p, m), layers, batch, group, share=False)
    yield Row("tied ends not added up", error, wrong=max(ends))


# ── run ──────────────────────────────────────────────────────────────────────────────────────

def runnable(p):
    """The names of the schedules that p ranks can run."""
    return [name for name in SCHEDULES if name != "dualpipe" or p % 2 == 0]


def schedules(args, p, names=None):
    """{name: schedule} on p ranks, each with the options that it takes: those named, or that of
    --schedule, or all. Raises ValueError."""
    made = {}
    for name in names or ([args.schedule] if args.schedule else runnable(p)):
        takes, given = inspect.signature(SCHEDULES[name]).parameters, {}
        for flag, key in {"chunks": "v", "group": "g", "limit": "limit"}.items():
            value = getattr(args, flag)
            if value is not None and key in takes:
                given[key] = value
            elif value is not None and args.schedule and not names:
                raise ValueError(f"--{flag} {value} means nothing to --schedule {name}")
        if "costs" in takes:  # the greedy one is made for them
            given["costs"] = args.costs
        made[name] = SCHEDULES[name](p, args.microbatches, **given)
    return made


def together(timed, group, unit=1.0):
    """One Timeline, the same on every rank, of all ranks' Timed cells; `unit`: seconds of a unit of
    its time. Ranks of one machine only: it compares their clocks."""
    ranks = [None] * dist.get_world_size(group)
    # all_gather_object over pp: everybody's cells
    dist.all_gather_object(ranks, timed, group=group)
    cells = sorted(sum(ranks, []), key=lambda cell: cell.start)
    since = lambda t: (t - cells[0].start) / unit
    return Timeline([Timed(*cell[:2], since(cell.start), since(cell.end)) for cell in cells])


def replay(measured, schedule):
    """The schedule simulated with the time that each operation was measured to take: what a run has
    beyond it are messages, and ranks that wait for a core."""
    took = Counter()
    for cell in measured.cells:
        for kind, stage, i, _ in cell.ops:
            took[kind.replace("B", "I"), stage, i] = (cell.end - cell.start) / len(cell.ops)
    costs = [lambda *at, kind=kind: took[kind, *at] for kind in "FIW"]
    return simulate(schedule, (*costs, 0))


def report(args, p, made, timelines, out=print):
    """The table of predictions: what is simulated, and its closed form where that is exact."""
    m, costs = args.microbatches, tuple(args.costs)
    out(f"{p} ranks, {m} micro-batches, (F, I, W, comm) = {costs}. Bubble: what the makespan, or a")
    out("rank's span, has beyond the busiest rank's work; next: a further step without a barrier;")
    out("held: micro-batches, worst rank; =: closed form where exact, * for a span's bubble\n")
    out(f"{'':15}makespan  bubble  /step /ideal  span's       =    next   held     =  messages")
    for name, t in timelines.items():
        given = (args.chunks or 2, args.group, args.limit, costs)
        bubble, peaks, _ = closed_form(name, p, m, *given)
        idle, exact, held = t.makespan - t.ideal, "--", "--"
        if peaks:
            exact = f"{bubble:.4g}" + (" *" if FORMULAS[name][1] == "span" else "  ")
            held = f"{max(peaks):.4g}"
        out(f"{name:15}{t.makespan:8.5g}{idle:8.4g}{idle / t.makespan:7.1%}{idle / t.ideal:7.1%}"
            f"{t.span - t.ideal:8.4g}{exact:>8}{marginal(made[name], costs, t):8.5g}"
            f"{max(t.peak):7.4g}{held:>6}{t.messages:10}")  # fmt: skip


def train(args, name, schedule, group, device):
    """Train on text by the schedule; print the loss beside the text's unigram entropy. Returns the
    last step's cells, as this rank ran them."""
    text, m, stages = read_text(args.text, 0), args.microbatches, 1 + max(placement(schedule))[1]
    model = mine(schedule, build(stages, max(stages, 4 // stages * stages), D=64), group)
    params = {param for stage in model.values() for param in stage.to(device).parameters()}
    optimizer = torch.optim.AdamW(params, lr=3e-3)
    say(f"\n{name} on text; its unigram entropy is {unigram_entropy(text):.3f}")
    for step in range(args.steps):
        x, y = (whole.to(device).chunk(m) for whole in sample(text, step, 4 * m, 64))
        losses, timed = execute(schedule, model, list(zip(x, y, [4 * m * 64] * m)), group)
        share_gradients(schedule, model, group)
        optimizer.step()
        optimizer.zero_grad()
        loss = sum(losses.values(), torch.zeros((), device=device))
        # all_reduce(SUM) over pp, 1: only the last stage knows the loss
        dist.all_reduce(loss, group=group)
        if step % 10 == 0 or step == args.steps - 1:
            say(f"step {step:3}  loss {loss.item():.3f}")
    return timed


def main(args, device):
    """Predict, prove, then train and draw; 0 if everything is as claimed."""
    group, name = dist.group.WORLD, args.schedule or "1f1b"
    p = dist.get_world_size(group)
    made = schedules(args, p)
    schedule, timelines = made[name], {key: simulate(made[key], args.costs) for key in made}
    say(f"04 pipeline schedules · {p} ranks · {dist.get_backend()} · {device.type}\n")
    say(f"{name}\n{sketch(timelines[name]) or '(too wide to draw here)'}\n")
    report(args, p, made, timelines, say)
    say("\nsent: by all ranks; held: the most bytes saved in this rank's blocks, and as simulated")
    broken = prove(list(proof(args, group, device)), device)
    if args.steps:
        measured = together(train(args, name, schedule, group, device), group)
        if args.plot and dist.get_rank(group) == 0:
            predicted = f"{name}, simulated with the measured times"
            both = {predicted: replay(measured, schedule), "measured": measured}
            gantt(both, f"{args.plot}_gantt.png")
            every = schedules(args, p, runnable(p)).items()
            gantt({key: simulate(made) for key, made in every}, f"{args.plot}_all.png")
            bubbles(f"{args.plot}_bubbles.png", p)
            say(f"drew {args.plot}_gantt.png, {args.plot}_all.png, {args.plot}_bubbles.png")
    return broken


def predict(args):
    """--list and --simulate: all that needs no ranks."""
    if args.list:
        for name, (bubble, of, peak, boundaries, _) in FORMULAS.items():
            about = inspect.getdoc(SCHEDULES[name]).replace("\n", "\n    ")
            print(f"{name}\n    {about}")
            print(f"    bubble of the {of} {bubble}, peak {peak}, boundaries {boundaries}")
        return
    validate(args, args.ranks)
    made = schedules(args, args.ranks)
    timelines = {name: simulate(made[name], args.costs) for name in made}
    if args.json:
        cells = lambda t: [[cell.rank, show(*cell.ops), cell.start, cell.end] for cell in t.cells]
        print(json.dumps({name: cells(timeline) for name, timeline in timelines.items()}))
        return
    for name, timeline in timelines.items():
        print(f"{name}\n{sketch(timeline) or '(too wide to draw here)'}\n")
    report(args, args.ranks, made, timelines)


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    for flag, least in dict(ranks=1, steps=0, microbatches=1, chunks=1).items():
        value = ranks if flag == "ranks" else getattr(args, flag)
        if value is not None and value < least:
            raise ValueError(f"--{flag} {value}: at least {least} is needed")
    if args.json and not args.simulate:
        raise ValueError("--json prints what --simulate predicts: give both")
    try:
        args.costs = [float(number) for number in str(args.costs).split(",")]
        F, I, W, comm = args.costs
    except ValueError as error:
        raise ValueError(f"--costs {args.costs}: four numbers are needed, F,I,W,comm") from error
    if F == I == W == 0:
        raise ValueError(f"--costs {args.costs}: one of F, I and W must take time")
    if args.plot and args.simulate:
        raise ValueError("--plot draws a run beside its prediction: leave out --simulate")
    if args.plot and args.steps < 1:
        raise ValueError(f"--plot draws the last step, and --steps {args.steps} has none")
    read_text(args.text, at_least=65)
    for schedule in () if args.simulate else schedules(args, ranks).values():
        simulate(schedule, args.costs)


# ── launch kit: the same lines close chapters 01 to 06; a test keeps them identical ──────────

import argparse
import faulthandler
import inspect
import linecache
import logging
import math
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, namedtuple
from contextlib import ExitStack, suppress
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from pydoc_data.topics import topics
from unittest.mock import patch

import torch.multiprocessing as mp

WAITED = 3  # exit status of a rank that waited in vain for another
Event = namedtuple("Event", "what group sent at")  # a call, a wait or a mark; bytes; seconds


class Ledger(ExitStack):
    """While open, prices each `torch.distributed` call of this rank as a ring would send it:
    `events` has the calls, waits and marks in order, `sent` the bytes by call."""

    PRICES = {  # call: (its arguments, n ranks, rank r) -> bytes that leave rank r
        "all_reduce": lambda a, n, r: 2 * (n - 1) / n * a["tensor"].nbytes,
        "all_gather_single": lambda a, n, r: (n - 1) * a["input_tensor"].nbytes,
        "reduce_scatter_single": lambda a, n, r: (n - 1) / n * a["input"].nbytes,
        "all_to_all_single": lambda a, n, r: a["input"].nbytes
        - a["input"][:1].nbytes * (a.get("input_split_sizes") or [len(a["input"]) / n] * n)[r],
        "broadcast": lambda a, n, r: a["tensor"].nbytes * ((r - a["group_src"]) % n < n - 1),
        "isend": lambda a, n, r: a["tensor"].nbytes,
        **dict.fromkeys(["irecv", "barrier"], lambda a, n, r: 0),
    }
    UNPRICED = "all_gather all_to_all gather reduce reduce_scatter scatter send recv".split()

    def __enter__(self):
        self.events, self.sent, wait = [], Counter(), dist.Work.wait
        names = [*self.PRICES, *self.UNPRICED]
        calls = {name: self._priced(name, getattr(dist, name)) for name in names}
        for module in (dist, dist.distributed_c10d):  # batch_isend_irecv looks in the latter
            self.enter_context(patch.multiple(module, **calls))
        marked = lambda work, *seconds: self.mark("wait") or wait(work, *seconds)
        self.enter_context(patch.object(dist.Work, "wait", marked))
        return self

    def mark(self, what, group=None, sent=0):
        name = (group or dist.group.WORLD).group_name
        self.events.append(Event(what, name, sent, time.perf_counter()))
        self.sent[what] += sent

    def _priced(self, name, call):
        def priced(*args, **kwargs):
            a = inspect.signature(call).bind(*args, **kwargs).arguments
            n, r = (ask(a.get("group")) for ask in (dist.get_world_size, dist.get_rank))
            self.mark(name, a.get("group"), self.PRICES[name](a, n, r))
            return call(*args, **kwargs)

        return priced


# A line of the proof: error beside the twin; bytes as (measured, formula) or None; the error that a
# row must show if it is wrong on purpose; the (least, greatest) error of a method that loses on
# purpose.
Row = namedtuple("Row", "name error sent held wrong bound", defaults=[None, None, 0.0, None])


def relative_error(value, reference):
    """max|value - reference| / max|reference|; of a reference of zeros, 0 if equal, else inf."""
    gap, size = (t.abs().max().item() if t.numel() else 0.0 for t in (value - reference, reference))
    return gap / size if size else math.inf if gap else 0.0


def prove(rows, device):
    """Print the table. Return 0 if on every rank each error is at most 1e-10, or as predicted, or
    inside its bound, and all bytes equal their formula; else 1."""
    off = lambda pair: abs(pair[0] - pair[1]) if pair else 0.0
    slack = lambda row: max(1e-6 * row.wrong, 1e-10)
    bounds = [x.bound or (x.wrong - slack(x), x.wrong + slack(x)) for x in rows]
    outside = [max(low - x.error, x.error - high) for x, (low, high) in zip(rows, bounds)]
    worst = [[x.error, out, off(x.sent), off(x.held)] for x, out in zip(rows, outside)]
    worst = torch.tensor(worst).double().nan_to_num(math.inf).to(device)
    # all_reduce(MAX) over all ranks, four numbers a row: the worst rank speaks for all
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
    say("error: max|difference| / max|one process|; bytes: of rank 0, sent as a ring sends them")
    say(f"{'':36}    error   bytes sent      formula   bytes held      formula")
    broken = 0
    for row, (error, out, unsent, unheld) in zip(rows, worst.tolist()):
        holds = out <= 0 and unsent < 0.5 and unheld < 0.5
        pairs = [[f"{x:,.0f}" for x in pair] if pair else "--" for pair in (row.sent, row.held)]
        note = f"  wrong on purpose: {row.wrong:.3g} predicted" if row.wrong else ""
        note += "  bounded: {:.3g} to {:.3g}".format(*row.bound) if row.bound else ""
        note += "" if holds else "  NOT AS CLAIMED"
        say(f"{row.name:36}{error:9.2g}{''.join(f'{x:>13}' for pair in pairs for x in pair)}{note}")
        broken |= not holds
    return int(broken)


class Disagreement(ValueError):
    """Ranks hold different things where all must hold the same."""


def agree(lines, group):
    """Raise Disagreement, with the first line that differs, unless all ranks have the same lines
    of text. One all-gather of a digest; the lines follow only where digests differ."""
    digest, n = sha256("\n".join(lines).encode()).digest(), dist.get_world_size(group)
    dist.all_gather_object(digests := [None] * n, digest, group=group)
    if len(set(digests)) > 1:
        dist.all_gather_object(texts := [None] * n, [*lines, "no more"], group=group)
        rank = next(r for r, text in enumerate(texts) if text != texts[0])
        here, first = next(pair for pair in zip(texts[rank], texts[0]) if pair[0] != pair[1])
        raise Disagreement(f"ranks disagree: rank {rank} has {here}, rank 0 has {first}")


def read_text(path, at_least):
    """The bytes of a file, or of Python's own help topics, as tokens of a vocabulary of 256.
    Raises ValueError where they cannot be read or are fewer than `at_least`."""
    try:
        text = Path(path).read_bytes() if path is not None else "\n".join(topics.values()).encode()
    except OSError as error:
        raise ValueError(f"--text {path}: {error.strerror}") from error
    if len(text) < at_least:
        raise ValueError(f"--text {path}: {len(text)} bytes, and one batch needs {at_least}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def unigram_entropy(text):
    """The loss, in nats per byte, of the best guess that looks at no context."""
    return torch.distributions.Categorical(torch.bincount(text).double()).entropy().item()


def sample(text, step, B, S):
    """The batch of a step, the same on all ranks: bytes (B, S), and the byte after each (B, S)."""
    starts_B1 = torch.randint(len(text) - S, (B, 1), generator=torch.Generator().manual_seed(step))
    windows = text[starts_B1 + torch.arange(S + 1)]
    return windows[:, :-1], windows[:, 1:]


def say(*words):
    """Print, on rank 0 alone."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def arguments(doc, ranks, steps, plot=None):
    """A parser with the flags of every chapter; `plot` says what its --plot draws."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    add, seconds = parser.add_argument, 120 if "RANK" in os.environ else 20
    add("--ranks", type=int, default=ranks, help="ranks to start, where torchrun did not")
    add("--steps", type=int, default=steps, help="steps to train after the proof; may be 0")
    add("--text", help="file to train on; default: Python's own help topics")
    add("--timeout", type=float, default=seconds, help="seconds that a collective may take")
    if plot:
        add("--plot", metavar="FILE", help=f"draw {plot} (png, pdf or svg); do not train")
    return parser


def launch(main, args, validate):
    """Run main(args, device) on every rank, torchrun's or args.ranks started here, and exit: 0 if
    each returned 0, 1 if not, 2 and a sentence if validate(args, ranks) raised ValueError."""
    torch.set_num_threads(1)  # a forked child must not inherit a pool of threads
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    ranks = int(os.environ.get("WORLD_SIZE", args.ranks))
    try:
        for flag, least in ("ranks", 1), ("steps", 0), ("timeout", 0.001):
            if not (value := vars(args).get(flag, least)) >= least:
                raise ValueError(f"--{flag} {value}: must be at least {least}")
        plot = Path(vars(args).get("plot") or "here.png")
        if plot.suffix not in (".png", ".pdf", ".svg") or not os.access(plot.parent, os.W_OK):
            raise ValueError(f"--plot {plot}: name a .png, .pdf or .svg in a folder to write to")
        validate(args, ranks)
    except ValueError as refusal:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(refusal, file=sys.stderr)
        sys.exit(2)
    if "RANK" in os.environ:
        _rank(int(os.environ["LOCAL_RANK"]), ranks, main, args)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    method = "fork" if sys.platform == "linux" and torch.cuda.device_count() < ranks else "spawn"
    with tempfile.TemporaryDirectory() as folder:
        run = mp.start_processes(_rank, (ranks, main, args, folder), ranks, False, True, method)
        try:
            while not run.join():
                pass
        except mp.ProcessExitedException:  # join() has ended the other ranks by SIGTERM
            codes = [process.exitcode for process in run.processes]
            stacks = [Path(folder, str(rank)).read_text() for rank in range(ranks)]
            sys.exit(_what_went_wrong(codes, stacks))
    sys.exit(0)


def _what_went_wrong(codes, stacks):
    """Which signal ended a rank; or, if no rank told a fault of its own, where each one stood."""
    killed = {r: -code for r, code in enumerate(codes) if code < 0 and code != -signal.SIGTERM}
    said = [f"rank {r} was ended by {signal.Signals(by).name}" for r, by in killed.items()]
    if {*codes} <= {0, WAITED, -signal.SIGTERM}:
        said = ["some ranks waited in vain for others; each one stood at"]
        said += [f"rank {r} of {len(codes)}: {_place(stack)}" for r, stack in enumerate(stacks)]
    return "\n".join(said) or (1 if 1 in codes else max(codes))


def _place(stack):
    """The innermost line of a stack that belongs neither to a library nor to the Ledger."""
    for file, number in re.findall(r'File "(.+)", line (\d+)', stack):
        line = linecache.getline(file, int(number)).strip()
        if "/lib/python" not in file and not re.search(r"return call\(|wait\(work", line):
            return f"line {number} of {Path(file).name}: {line}"
    return "the end, it had returned"


def _rank(local, ranks, main, args, folder=None):
    """Meet the other ranks, run main, and leave with its exit status or with what went wrong."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    env, local_ranks = os.environ, int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    rank, on_gpu = int(env.get("RANK", local)), torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if local_ranks == ranks:  # one machine: the loopback address needs no network
        env.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    if folder:
        report, store = open(f"{folder}/{rank}", "w"), dist.FileStore(f"{folder}/store", ranks)
        faulthandler.register(signal.SIGTERM, report, chain=True)  # says where it stood
    else:  # a restarted attempt must not read the addresses of the one before
        attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
        report, store = sys.stderr, dist.PrefixStore(attempt, next(dist.rendezvous("env://"))[0])
    try:
        given = dict(timeout=timedelta(seconds=args.timeout), rank=rank, world_size=ranks)
        dist.init_process_group("nccl" if on_gpu else "gloo", store=store, **given)
        agree([f"--{flag} {value}" for flag, value in vars(args).items()], dist.group.WORLD)
        code = main(args, device)
        dist.destroy_process_group()
    except BrokenPipeError:  # what read the output, such as `head`, has left
        code = 128 + signal.SIGPIPE
    except Exception as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until this has been told
        stack = "".join(reversed(traceback.format_tb(error.__traceback__)))
        code = 2 if isinstance(error, Disagreement) else 1
        if re.search("by peer|imed out", str(error)):
            code = WAITED
            where = f"rank {rank} of {ranks} waited in vain at {_place(stack)}"
            print(stack if folder else where, file=report)
        elif store.add(repr(error), 1) == 1:  # what ranks have in common is told once
            told = error if code == 2 else traceback.format_exc()
            print(f"rank {rank} of {ranks}: {told}", file=sys.stderr)
        report.flush()
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(code)  # an ordinary exit may abort where a reference to a group is left



if __name__ == "__main__":
    parser = arguments(__doc__, ranks=4, steps=60)
    parser.add_argument("--schedule", choices=SCHEDULES, help="default: prove all, train with 1f1b")
    parser.add_argument("--microbatches", "--micro-batches", type=int, default=8, help="in a step")
    parser.add_argument("--chunks", type=int, help="stages per rank, where interleaved; default 2")
    parser.add_argument("--group", type=int, help="micro-batches per turn, where interleaved")
    parser.add_argument("--limit", type=int, help="micro-batches that a rank may hold, for zb-auto")
    parser.add_argument("--costs", default="1,1,1,0", metavar="F,I,W,COMM")
    parser.add_argument("--simulate", action="store_true", help="predict, and start no ranks")
    parser.add_argument("--json", action="store_true", help="with --simulate: each cell's times")
    parser.add_argument("--list", action="store_true", help="the schedules and their formulas")
    parser.add_argument("--plot", metavar="PREFIX", help="draw three pictures, one of the run")
    args = parser.parse_args()
    if not (args.simulate or args.list):
        launch(main, args, validate)
    try:
        predict(args)
    except ValueError as refused:
        sys.exit(print(refused, file=sys.stderr) or 2)
