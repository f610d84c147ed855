"""04 · Pipeline schedules: a schedule is a list

The layers are cut into stages and the batch into micro-batches; every rank runs its stages on one
micro-batch after another. In which order? That is a list per rank, and all there is to a schedule.
Here one list is simulated, drawn, and run on real ranks, and prediction meets measurement.

    rank 0  F0 F1 F2 F3 .. .. .. B0 F4 B1     F  forward            B  both: I and W
    rank 1     F0 F1 F2 .. .. B0 F3 B1 F4     I  gradient of the input: the stage before waits
    rank 2        F0 F1 .. B0 F2 B1 F3 B2     W  gradient of the weights: nobody waits

    bubble   (p-1)(F+B), with 1F1B as with GPipe: (p-1)/m of the ideal time, (p-1)/(m+p-1) of the
             step. v chunks a rank divide it by v, ZB-H1 leaves a third (F = I = W), ZB-H2 nothing
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
from heapq import heappop, heappush
from pathlib import Path
from pydoc_data.topics import topics
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge

__all__ = ["Op", "SCHEDULES", "placement", "simulate", "marginal", "execute", "gantt"]


# ── the ladder: twelve schedules, each a list of cells per rank ──────────────────────────────

Op = namedtuple("Op", "kind stage microbatch direction", defaults=(0,))


def walk(forwards, backwards, warmup, lag=None):
    """One rank's list: `warmup` forwards, then one forward and one backward in turn, then the rest.

    forwards, backwards: (stage, micro-batch) pairs in the order in which this rank takes them.
    With a lag, backwards are split, and each W comes `lag` backwards after its I.
    """
    # Q4.1 ** Write the list. Eight schedules are this loop with another warm-up, order and lag.
    #         hint: there are as many backwards as forwards, which run out `warmup` pairs early
    cells = [Op("F", *at) for at in forwards[:warmup]]
    for n, at in enumerate(backwards):
        cells += [Op("F", *ahead) for ahead in forwards[warmup + n : warmup + n + 1]]
        cells.append(Op("B" if lag is None else "I", *at))
        if lag is not None and n >= lag:
            cells.append(Op("W", *backwards[n - lag]))
    if lag is not None:
        cells += [Op("W", *at) for at in backwards[max(0, len(backwards) - lag) :]]
    # /Q4.1
    return [(op,) for op in cells]


def looped(p, m, warmup, v=1, g=None, lag=lambda s: None):
    """Every rank's list. Chunk c of rank s is stage c·p + s. Micro-batches pass through all chunks
    of a rank in groups of g, backwards from the last chunk on. warmup, lag: functions of s."""
    groups = [range(m)[k : k + (g or m)] for k in range(0, m, g or m)]

    def order(s, chunks):
        return [(c * p + s, i) for group in groups for c in chunks for i in group]

    up, down = range(v), range(v)[::-1]
    return [walk(order(s, up), order(s, down), warmup(s), lag(s)) for s in range(p)]


def gpipe(p, m):
    """All forwards, then all backwards (Huang et al., arXiv:1811.06965)."""
    return looped(p, m, warmup=lambda s: m)


def one_f_one_b(p, m):
    """GPipe's bubble, but each backward as soon as it can run, so that rank s holds p - s
    micro-batches, not m (PipeDream-Flush, Narayanan et al., arXiv:2006.09503)."""
    # Q4.2 * How many forwards does rank s run before its first pair of F and B? With one too few,
    #        33 units become 54 at p = 4 and m = 8; with one too many, it holds more.
    #        hint: how many stages lie between s and the loss?
    return looped(p, m, warmup=lambda s: p - 1 - s)
    # /Q4.2


def eager_1f1b(p, m):
    """1F1B that runs a round trip ahead, so that it hides slow links; up to twice its memory."""
    return looped(p, m, warmup=lambda s: 2 * (p - 1 - s))


def interleaved(p, m, v=2, g=None):
    """1F1B with v chunks per rank: 1/v of the bubble (Narayanan et al., arXiv:2104.04473)."""
    g = group_size(p, m, g)
    return looped(p, m, lambda s: 2 * (p - 1 - s) + (v - 1) * g, v, g)


def looped_bfs(p, m, v=2):
    """GPipe with v chunks per rank, breadth first (Lamy-Poirier, arXiv:2211.05953)."""
    return looped(p, m, lambda s: m * v, v)


def zb_h1(p, m):
    """1F1B, W put off to fill the end of the step (Qi et al., arXiv:2401.10241)."""
    return looped(p, m, lambda s: p - 1 - s, lag=lambda s: s)


def zb_h2(p, m):
    """Eager 1F1B, W put off: no rank idles between its first operation and its last (as zb-h1)."""
    return looped(p, m, lambda s: 2 * (p - 1 - s), lag=lambda s: 2 * s)


def interleaved_zb(p, m, v=2, g=None):
    """Interleaved 1F1B, W put off, at 1F1B's memory (torch's InterleavedZeroBubble)."""
    g = group_size(p, m, g)
    return looped(p, m, lambda s: p - 1 - s + (v - 1) * g, v, g, lag=lambda s: s)


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
    lists, counts, busy = [[] for _ in range(p)], [Counter() for _ in range(p)], [0.0] * p
    arrival, wake = {}, [(0.0, s) for s in range(p)]  # when a rank looks for something to do
    while wake:
        now, s = heappop(wake)
        if now < busy[s]:
            continue
        n = counts[s]
        held = n["F"] - (1 - kept) * n["I"] - kept * n["W"]

        def there(kind, source):
            absent = math.inf if 0 <= source < p else 0
            return n[kind] < m and arrival.get((kind, source, n[kind]), absent) <= now

        if n["I"] < n["F"] and there("I", s + 1):
            kind = "I"
        elif held + 1 <= limit + 1e-9 and there("F", s - 1):
            kind = "F"
        elif n["W"] < n["I"]:
            kind = "W"
        else:
            continue
        busy[s] = end = now + costs["FIW".index(kind)]
        arrival[kind, s, n[kind]] = end + costs[3]
        lists[s].append((Op(kind, s, n[kind]),))
        n[kind] += 1
        for other, at in ((s, end), (s - 1, end + costs[3]), (s + 1, end + costs[3])):
            if 0 <= other < p:
                heappush(wake, (at, other))
    return lists


def spell(words, **chunks):
    """A rank's list from words: "Fa" is the next forward of chunk a, "W" the oldest weight gradient
    still owed, "Fa&Bb" a fused cell. chunks: letter=(stage, direction, its micro-batches). Words
    beyond a chunk's last micro-batch are left out, so a rule for many gives the list for few."""
    taken, owed, cells = Counter(), [], []
    for word in words.split():
        cell = ()
        for kind, *letter in word.split("&"):
            if kind == "W":
                letter, i = next(debt for debt in owed if debt[0] in letter or not letter)
                owed.remove((letter, i))
            else:
                letter, way = letter[0], "up" if kind == "F" else "down"
                i, taken[way, letter] = taken[way, letter], taken[way, letter] + 1
                owed += [(letter, i)] if kind == "I" else []
            stage, direction, microbatches = chunks[letter]
            cell += tuple(Op(kind, stage, j, direction) for j in microbatches[i : i + 1])
        cells += [cell] if cell else []
    return cells


def zb_v(p, m):
    """ZB-H2's bubble at 1F1B's memory: stages go down the ranks and back up, rank s holds s and
    2p-1-s (Qi et al., arXiv:2405.15362)."""
    lists, n = [], max(m, 2 * p - 1)
    for s in range(p):
        words = "Fa " * (2 * (p - s) - 1) + "Fb Fa " * s + "Fb Ib Wb " * (p - s)
        words += "Fa Ia Wa Fb Ib Wb " * (n - 2 * p + s + 1) + "Ia Wa Fb Ib Wb " * (p - s - 1)
        words += "Ia Ib " * s + "Ia Wa " * (p - s) + "Wb " * s + "Wa " * s
        lists.append(spell(words, a=(s, 0, range(m)), b=(2 * p - 1 - s, 0, range(m))))
    return lists


def _dual_words(s, h, n):
    """DualPipe's eight phases (github.com/deepseek-ai/DualPipe) at place s of h in the fold, for n
    micro-batches per chunk, 2h or more. At the fold the first F and B stay two cells: fused, the
    forward would wait for the gradient, and all ranks for the forward."""
    words = "Fa " * (2 * (h - s - 1)) + "Fa Fb " * (s + 1) + "Ib Wb Fb " * (h - s - 1)
    words += ("Fa Bb " if s == h - 1 else "Fa&Bb ") + "Fb&Ba " + "Fa&Bb Fb&Ba " * (n - 2 * h + s)
    words += "Bb Fb&Ba " * (h - s - 1)
    words += "".join(f"{'B' if k <= s else 'I'}{'ba'[k % 2]} " for k in range(2 * s + 2))
    return words + "W Ia " * (h - s - 1) + "W " * (s + 1)


def dualpipev(p, m):
    """DualPipe cut in half: ZB-V's placement, and one copy of the weights."""
    chunks = [dict(a=(s, 0, range(m)), b=(2 * p - 1 - s, 0, range(m))) for s in range(p)]
    return [spell(_dual_words(s, p, max(m, 2 * p)), **chunks[s]) for s in range(p)]


def dualpipe(p, m):
    """Two directions at once: rank r holds stage r of direction 0 and stage p-1-r of direction 1;
    two ranks hold each weight; m counts both directions (DeepSeek-V3, arXiv:2412.19437)."""
    if p % 2:
        raise ValueError(f"dualpipe folds the ranks in two: --ranks {p} is odd")
    lists, half = [], (m + 1) // 2
    shares = [(0, range(half)), (1, range(half, m))]
    for r in range(p):
        s, upper = min(r, p - 1 - r), r >= p // 2
        chunks = dict(a=(s, *shares[upper]), b=(p - 1 - s, *shares[not upper]))
        lists.append(spell(_dual_words(s, p // 2, max(half, p)), **chunks))
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
    stage = op.stage + {"F": 1, "W": math.inf}.get(op.kind, -1)
    return (place[op.direction, stage], stage) if 0 <= stage <= last else (None, None)


def show(kind, stage, microbatch, *_):
    """F3.7: the forward of stage 3 on micro-batch 7."""
    return f"{kind}{stage}.{microbatch}"


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
    last = max(stage for _, stage in placement(schedule))
    prices = dict(F=costs[:1], I=costs[1:2], W=costs[2:3], B=costs[1:3])
    share = len(schedule) / (last + 1)

    def duration(op):
        at = op.stage, op.microbatch
        return sum(cost(*at) if callable(cost) else cost * share for cost in prices[op.kind])

    done, asleep, cells = {}, defaultdict(list), []
    at, clock, awake = [0] * len(schedule), [0.0] * len(schedule), [*range(len(schedule))]
    while awake:
        rank = awake.pop()
        for ops in schedule[rank][at[rank] :]:
            inputs = [need for op in ops for need in needs(op, last)]
            missing = next((need for need in inputs if need not in done), None)
            if missing:
                asleep[missing].append(rank)
                break
            there = [end + costs[3] * (source != rank) for end, source in map(done.get, inputs)]
            start, at[rank] = max([clock[rank], *there]), at[rank] + 1
            clock[rank] = start + sum(map(duration, ops))
            cells.append(Timed(rank, ops, start, clock[rank]))
            for op in ops:
                if result(op) in done:
                    raise ValueError(f"rank {rank} has {show(*op)} a second time")
                done[result(op)] = clock[rank], rank
                awake += asleep.pop(result(op), ())
    _complete(schedule, at, asleep, done, last)
    return Timeline(sorted(cells, key=lambda cell: (cell.end, cell.start)), kept)


def _complete(schedule, at, asleep, done, last):
    stuck = {rank: need for need, ranks in asleep.items() for rank in ranks}
    if stuck:
        here = {rank: "&".join(show(*op) for op in schedule[rank][at[rank]]) for rank in stuck}
        blocked = [f"rank {rank} at {here[rank]} for {show(*stuck[rank])}" for rank in sorted(here)]
        raise ValueError(f"no rank can go on: {', '.join(blocked)}")
    due = {("W", *op[1:3]) for cells in schedule for ops in cells for op in ops if op.kind == "I"}
    ways = {(kind, i) for kind, _, i in done if kind != "W"}  # a micro-batch visits all stages
    due |= {(kind, stage, i) for kind, i in ways for stage in range(last + 1)}
    if lacking := sorted(due - done.keys()):
        raise ValueError(f"no rank has {', '.join(show(*key) for key in lacking)}")


@dataclass
class Timeline:
    """When each cell ran, by simulation or by the clock.

    cells: Timed, in an order in which they could run one at a time, none waiting for a later one.
    makespan: from the first start on any rank to the last end on any. span: from a rank's own first
    start to its own last end, the longest. ideal: the work of the busiest rank. What the first two
    have beyond the third are the two bubbles.
    """

    cells: list
    kept: float = 1.0

    @cached_property
    def ranks(self):
        """The cells of each rank."""
        ranks = defaultdict(list)
        for cell in self.cells:
            ranks[cell.rank].append(cell)
        return [ranks[rank] for rank in sorted(ranks)]

    @cached_property
    def place(self):
        return placement([[cell.ops for cell in cells] for cells in self.ranks])

    @property
    def makespan(self):
        return max(cell.end for cell in self.cells) - min(cell.start for cell in self.cells)

    @property
    def span(self):
        return max(cells[-1].end - cells[0].start for cells in self.ranks)

    @property
    def ideal(self):
        return max(sum(cell.end - cell.start for cell in cells) for cells in self.ranks)

    def held(self, rank):
        """[(time, micro-batches whose activations the rank holds)], each from its F to its B, or in
        part to its W; one micro-batch in all layers of a rank counts 1."""
        share, curve, level = len(self.ranks) / (1 + max(self.place)[1]), [], 0.0
        freed = {"F": 0, "B": share, "I": share * (1 - self.kept), "W": share * self.kept}
        trained = {op[1:3] for cell in self.ranks[rank] for op in cell.ops if op.kind != "F"}
        for _, ops, start, end in self.ranks[rank]:
            level += share * sum(op.kind == "F" and op[1:3] in trained for op in ops)
            curve.append((start, level))
            level -= sum(freed[op.kind] for op in ops)
            curve.append((end, level))
        return curve

    @property
    def peak(self):
        """The most that each rank ever holds."""
        return [max(level for _, level in self.held(rank)) for rank in range(len(self.ranks))]

    @property
    def messages(self):
        """Boundaries crossed in all: activations up, gradients down."""
        ops = [(cell.rank, op) for cell in self.cells for op in cell.ops]
        to = [receiver(op, self.place, max(self.place)[1])[0] for _, op in ops]
        return sum(there not in (None, rank) for there, (rank, _) in zip(to, ops))


def marginal(schedule, costs=(1, 1, 1, 0)):
    """What a further step costs if a rank enters it as soon as it is done with the one before, with
    no barrier at the optimizer: the bubble as a long run sees it."""
    m = 1 + max(op.microbatch for cells in schedule for cell in cells for op in cell)
    again = lambda cell: tuple(op._replace(microbatch=op.microbatch + m) for op in cell)
    twice = [cells + [again(cell) for cell in cells] for cells in schedule]
    return simulate(twice, costs).makespan - simulate(schedule, costs).makespan


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


def sketch(timeline, width=160):
    """A Gantt in characters: kind and micro-batch, lower case for a rank's second chunk and on,
    dots where it idles; "" where that takes more than `width` columns."""
    p, ops = len(timeline.ranks), [op for cell in timeline.cells for op in cell.ops]
    digits, lines = 1 + len(str(max(op.microbatch for op in ops))), []
    unit = min((cell.end - cell.start) / len(cell.ops) for cell in timeline.cells) or math.inf
    column = lambda t: round(t / unit) * digits
    for cells in timeline.ranks:
        line = ""
        for _, ops, start, end in cells:
            words = [f"{op.kind}{op.microbatch}".ljust(digits, "_") for op in ops]
            words = [word.lower() if op.stage >= p else word for word, op in zip(words, ops)]
            line = (line.ljust(column(start), ".") + "".join(words)).ljust(column(end), "_")
        lines.append(line.ljust(column(timeline.makespan), "."))
    return "\n".join(lines) if len(lines[0]) <= width else ""


NAMES = {"F": "forward", "I": "input gradient", "B": "both gradients", "W": "weight gradient"}
COLORS = {"F": "#dcebf7", "I": "#f4b678", "B": "#d0693c", "W": "#1f3f5b"}  # light to dark


def gantt(timelines, path, columns=1):
    """Draw a Timeline, or {title: Timeline} as panels on one scale of time, into a picture file.

    A bar is an operation, its number the micro-batch; a rank's second chunk, or direction, has a
    dark foot. Under a rank's bars, in grey: the activations that it holds, on one scale for all.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    timelines = timelines if isinstance(timelines, dict) else {"": timelines}
    every, rows = list(timelines.values()), math.ceil(len(timelines) / columns)
    most, longest = max(max(t.peak) for t in every), max(t.makespan for t in every)
    height = 0.5 + rows * (0.45 + 0.36 * max(len(t.ranks) for t in every))
    figure = Figure(figsize=(6 + 7 * columns, height), layout="constrained")
    panels = [*figure.subplots(rows, columns, squeeze=False).flat]
    for axes in panels:
        axes.set_axis_off()
    for axes, (title, timeline) in zip(panels, timelines.items()):
        bubble, peak = 1 - timeline.ideal / timeline.makespan, max(timeline.peak)
        axes.set_title(f"{title}   bubble {bubble:.1%} of the step, holds {peak:.3g} micro-batches",
                       loc="left", fontsize=10)  # fmt: skip
        axes.set(xlim=(0, longest), ylim=(len(timeline.ranks) - 0.4, -0.5))
        _panel(axes, timeline, most, narrow=longest / 100)
    kinds = [k for k in NAMES if any(op.kind == k for t in every for c in t.cells for op in c.ops)]
    patches = [Patch(fc=COLORS[kind], ec="black", lw=0.4, label=NAMES[kind]) for kind in kinds]
    patches.append(Patch(fc="#9a9a9a", label="activations held"))
    figure.legend(handles=patches, loc="outside lower left", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


def _panel(axes, timeline, most, narrow):
    zero, p = min(cell.start for cell in timeline.cells), len(timeline.ranks)
    for rank, cells in enumerate(timeline.ranks):
        for _, ops, start, end in cells:
            left, parts = start - zero, sum(1 + (op.kind == "B") for op in ops)
            for op in ops:  # of a fused cell, each operation gets its usual share
                width = (end - start) * (1 + (op.kind == "B")) / parts
                axes.barh(rank - 0.1, width, 0.5, left, color=COLORS[op.kind], ec="black", lw=0.3)
                if op.stage >= p or op.direction:
                    axes.barh(rank + 0.11, width, 0.08, left, color="black")
                if width > narrow:
                    ink = "white" if op.kind == "W" else "black"
                    middle = left + width / 2, rank - 0.12
                    axes.text(*middle, op.microbatch, color=ink, ha="center", va="center", size=6.5)
                left += width
        times, levels = zip(*timeline.held(rank))
        curve = [rank + 0.48 - 0.3 * level / most for level in levels]
        axes.fill_between([t - zero for t in times], curve, rank + 0.48, step="post", fc="#9a9a9a")


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


class Linear(nn.Module):
    """x Wᵀ, (..., n_in) to (..., n_out), whose weight gradient can wait."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) / n_in**0.5)

    def forward(self, x, later=None):
        return _Matmul.apply(x, self.weight, later)


class Block(nn.Module):
    """x + down(gelu(up(x))), (B, S, D) to itself. Saves 9·B·S·D elements for backward, of which the
    inputs of the two matrices, 5·B·S·D, until W (and with them the gradients of their outputs)."""

    def __init__(self, D):
        super().__init__()
        self.up, self.down = Linear(D, 4 * D), Linear(4 * D, D)

    def forward(self, x_BSD, later=None):
        return x_BSD + self.down(F.gelu(self.up(x_BSD, later)), later)


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
    """What a rank works with: its stages, results that it waits for or has been sent, and the
    graphs and closures of forwards whose backward is still to come."""

    def __init__(self, schedule, stages, microbatches):
        self.stages, self.microbatches, self.results, self.losses = stages, microbatches, {}, {}
        ops = [op for cells in schedule for cell in cells for op in cell]
        self.last, self.graphs, self.owed = max(op.stage for op in ops), {}, {}
        self.split = {op[1:3] for op in ops if op.kind == "I"}
        self.trained = {op[1:3] for op in ops if op.kind in "IB"}

    def run(self, op):
        """Compute one operation; returns what the neighbouring stage is to get."""
        at = op.stage, op.microbatch
        return {"F": self.forward, "W": self.weights}.get(op.kind, self.backward)(*at)

    def forward(self, stage, i):
        x = self.results.pop(("F", stage - 1, i), None)
        later = self.owed[stage, i] = [] if (stage, i) in self.split else None
        with torch.set_grad_enabled((stage, i) in self.trained):
            x = x if x is None else x.requires_grad_()
            y = self.stages[stage](x, self.microbatches[i], later)
        if y.requires_grad:  # the edge into the graph, not y: an output is freed once it is sent
            self.graphs[stage, i] = x, get_gradient_edge(y)
        if stage == self.last:
            self.losses[i] = y.detach()
        return y.detach()

    def backward(self, stage, i):
        d_y = self.results.pop(("G", stage + 1, i), None)
        x, edge = self.graphs.pop((stage, i), (None, None))
        if edge:  # a frozen first stage has none
            torch.autograd.backward([edge], [self.losses[i].new_ones(()) if d_y is None else d_y])
        return None if x is None else x.grad

    def weights(self, stage, i):
        later = self.owed.pop((stage, i))
        while later:
            later.pop()()


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
    cells, me, timed = simulate(schedule).cells, dist.get_rank(group), []
    worker, place = _Worker(schedule, stages, microbatches), placement(schedule)
    backwards = Counter(op.stage for cell in schedule[me] for op in cell if op.kind != "F")
    arriving, leaving = {}, deque()
    for cell in cells:
        outputs = []
        if cell.rank == me:
            for need in [need for op in cell.ops for need in needs(op, worker.last)]:
                if need in arriving:
                    arriving.pop(need).wait()
            start = time.perf_counter()
            outputs = [worker.run(op) for op in cell.ops]
            timed.append(Timed(me, cell.ops, start, time.perf_counter()))
        for k, op in enumerate(cell.ops):
            to, stage = receiver(op, place, worker.last)
            # Q4.6 *** The result of op, computed on cell.rank, is for `stage` on rank `to`, if for
            #          any. What does this rank do?
            #          hint: it may be the one, the other, both or neither
            if cell.rank == me == to:
                worker.results[result(op)] = outputs[k]
            elif cell.rank == me and to is not None:
                # isend to the neighbouring stage, B·S·D: both ends post it at this cell
                leaving.append((dist.isend(outputs[k], group=group, group_dst=to), outputs[k]))
            elif to == me:
                room = stages[stage].boundary(microbatches[op.microbatch])
                # irecv, B·S·D: posted while the sender computes, awaited where it is first used
                arriving[result(op)] = dist.irecv(room, group=group, group_src=cell.rank)
                worker.results[result(op)] = room
            # /Q4.6
        outputs = room = None
        while len(leaving) > 2:  # what is sent is freed: backward starts from the graph's edge
            leaving.popleft()[0].wait()
        for op in cell.ops if cell.rank == me else ():
            backwards[op.stage] -= op.kind != "F"
            if last_backward and op.kind != "F" and not backwards[op.stage]:
                last_backward(op.stage)
    for work, _ in leaving:
        work.wait()
    return worker.losses, timed


def share_gradients(schedule, stages, group):
    """Add up the gradients of weights that two ranks hold: both ends' of a tied embedding, or
    DualPipe's two copies of everything. Where one rank has both ends, autograd has done it."""
    place, me = placement(schedule), dist.get_rank(group)
    ends = place[0, 0], place[0, max(place)[1]]
    if (1, 0) in place:
        peer, modules = dist.get_world_size(group) - 1 - me, [stages[s] for s in sorted(stages)]
    elif me in ends and ends[0] != ends[1]:
        peer, modules = sum(ends) - me, [s.embedding for s in stages.values() if s.embedding]
    else:
        return
    params = dict.fromkeys(param for module in modules for param in module.parameters())
    ours = torch.cat([param.grad.flatten() for param in params])
    theirs = torch.empty_like(ours)
    swap = [(dist.isend, ours), (dist.irecv, theirs)]
    swap = [dist.P2POp(*one, group=group, group_peer=peer) for one in swap]
    # batch_isend_irecv with the rank that holds the same weights: one batch, so neither goes first
    for work in dist.batch_isend_irecv(swap):
        work.wait()
    for param, part in zip(params, theirs.split([param.numel() for param in params])):
        param.grad += part.view_as(param)


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
    for stage in stages.values():
        stage.to(loss.device, torch.float64)
    scale = Scale(block for stage in stages.values() for block in stage.blocks.values())
    given = [(x_BS, y_BS, divisor / times) for x_BS, y_BS, divisor in batch]
    with Ledger() as ledger:
        losses, _ = execute(schedule, stages, given, group)
    if share:
        share_gradients(schedule, stages, group)
    found = sum(losses.values(), torch.zeros_like(loss))
    totals = torch.stack([found, loss.new_tensor(sum(ledger.sent.values()))])
    # all_reduce(SUM) over pp, 2: the loss, which the last stage knows; the bytes of all ranks
    dist.all_reduce(totals, group=group)
    named = [pair for stage in stages.values() for pair in stage.named_parameters()]
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
    schedule = one_f_one_b(p, m)
    error, *_ = check(schedule, layers, batch, group, times=m)
    yield Row("losses not divided by m", error, wrong=m - 1)
    whole = twin_gradients(layers, batch)[0]["embedding.weight"]
    first = twin_gradients(layers, batch, later=[])[0]["embedding.weight"]  # the head's part waits
    error, *_ = check(schedule, layers, batch, group, share=False)
    ends = relative_error(first, whole), relative_error(whole - first, whole)
    yield Row("tied ends not added up", error, wrong=max(ends))


# ── run ──────────────────────────────────────────────────────────────────────────────────────


def schedules(args, p, names=None):
    """{name: schedule} on p ranks, each with the options that it takes: those named, or that of
    --schedule, or all. Raises ValueError."""
    flags, made = {"chunks": "v", "group": "g", "limit": "limit"}, {}
    names = names or ([args.schedule] if args.schedule else [*SCHEDULES])
    for name in names:
        given, takes = {}, inspect.signature(SCHEDULES[name]).parameters
        for flag, key in flags.items():
            if (value := getattr(args, flag)) is not None and key in takes:
                given[key] = value
            elif value is not None and len(names) == 1:
                raise ValueError(f"--{flag} {value} means nothing to --schedule {name}")
        if len(names) == 1 or name != "dualpipe" or p % 2 == 0:
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


def report(args, p, out=print):
    """The table of predictions: what is simulated, and its closed form where that is exact."""
    m, costs = args.microbatches, tuple(args.costs)
    out(f"{p} ranks, {m} micro-batches, (F, I, W, comm) = {costs}. Bubble: what the makespan, or a")
    out("rank's span, has beyond the busiest rank's work; next: a further step without a barrier;")
    out("held: micro-batches, worst rank; =: closed form where exact, * for a span's bubble\n")
    out(f"{'':15}makespan  bubble  /step /ideal  span's       =    next   held     =  messages")
    for name, schedule in schedules(args, p).items():
        t, given = simulate(schedule, costs), (args.chunks or 2, args.group, args.limit, costs)
        bubble, peaks, _ = closed_form(name, p, m, *given)
        idle, exact, held = t.makespan - t.ideal, "--", "--"
        if peaks:
            exact = f"{bubble:.4g}" + (" *" if FORMULAS[name][1] == "span" else "  ")
            held = f"{max(peaks):.4g}"
        out(f"{name:15}{t.makespan:8.5g}{idle:8.4g}{idle / t.makespan:7.1%}{idle / t.ideal:7.1%}"
            f"{t.span - t.ideal:8.4g}{exact:>8}{marginal(schedule, costs):8.5g}"
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


def replay(measured, schedule):
    """The schedule simulated with the time that each operation was measured to take: what a run has
    beyond it are messages, and ranks that wait for a core."""
    took = Counter()
    for cell in measured.cells:
        for kind, stage, i, _ in cell.ops:
            took[kind.replace("B", "I"), stage, i] = (cell.end - cell.start) / len(cell.ops)
    costs = [lambda *at, kind=kind: took[kind, *at] for kind in "FIW"]
    return simulate(schedule, (*costs, 0))


def plot(args, name, measured, schedule):
    """Three pictures: the schedule predicted above measured; all schedules; bubbles over m/p."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    both = {f"{name}, simulated with the measured times": replay(measured, schedule)}
    gantt(both | {"measured": measured}, f"{args.plot}_gantt.png")
    p, every = len(schedule), schedules(args, len(schedule), [*SCHEDULES])
    gantt({key: simulate(made) for key, made in every.items()}, f"{args.plot}_all.png", columns=2)
    figure, times = Figure(figsize=(11, 4.2), layout="constrained"), [1, 2, 3, 4, 6, 8]
    panels = {"one step, first start to last end": lambda made: simulate(made).makespan,
              "each further step, no barrier between": marginal}  # fmt: skip
    for axes, (title, length) in zip(figure.subplots(1, 2, sharey=True), panels.items()):
        curves = defaultdict(list)
        for key in every:
            made = [SCHEDULES[key](p, k * p) for k in times]
            bubbles = [round(1 - simulate(lists).ideal / length(lists), 6) for lists in made]
            curves[tuple(bubbles)].append(key)
        for bubbles, names in sorted(curves.items(), reverse=True):
            k = list(every).index(names[0])
            look = dict(color=colormaps["cividis"](k / 13), marker="osD^v<>PX*dh"[k], lw=1.2)
            axes.plot(times, bubbles, **look, markeredgecolor="black", label=" = ".join(names))
        axes.set(title=title, xlabel=f"micro-batches per rank, m/p, at p = {p}", xticks=times)
        axes.legend(fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("bubble, share of the step")
    figure.savefig(f"{args.plot}_bubbles.png", dpi=120)
    print(f"drew {args.plot}_gantt.png, {args.plot}_all.png, {args.plot}_bubbles.png")


def main(args, device):
    """Predict, prove, then draw or train; 0 if everything is as claimed."""
    group, name = dist.group.WORLD, args.schedule or "1f1b"
    p = dist.get_world_size(group)
    schedule = schedules(args, p)[name]
    say(f"04 pipeline schedules · {p} ranks · {dist.get_backend()} · {device.type}\n")
    say(f"{name}\n{sketch(simulate(schedule))}\n")
    report(args, p, say)
    say("\nsent: by all ranks; held: the most bytes saved in this rank's blocks, and as simulated")
    broken = prove(list(proof(args, group, device)), device)
    if args.steps:
        measured = together(train(args, name, schedule, group, device), group)
        if args.plot and dist.get_rank(group) == 0:
            plot(args, name, measured, schedule)
    return broken


def predict(args):
    """--list and --simulate: all that needs no ranks."""
    if args.list:
        for name, (bubble, of, peak, boundaries, _) in FORMULAS.items():
            about = inspect.getdoc(SCHEDULES[name]).replace("\n", "\n    ")
            formulas = f"bubble of the {of} {bubble}, peak {peak}, boundaries {boundaries}"
            print(f"{name}\n    {about}\n    {formulas}")
        return
    validate(args, args.ranks)
    timelines = {k: simulate(made, args.costs) for k, made in schedules(args, args.ranks).items()}
    if args.json:
        rows = {k: [[c.rank, [show(*op) for op in c.ops], c.start, c.end] for c in t.cells]
                for k, t in timelines.items()}  # fmt: skip
        print(json.dumps(rows))
        return
    for name, timeline in timelines.items():
        print(f"{name}\n{sketch(timeline) or '(too wide to draw here)'}\n")
    report(args, args.ranks)


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    if ranks < 1 or args.steps < 0:
        raise ValueError(f"--ranks {ranks}, --steps {args.steps}: at least 1 and 0 are needed")
    if args.json and not args.simulate:
        raise ValueError("--json prints what --simulate predicts: give both")
    for flag in ("microbatches", "chunks"):
        if (value := getattr(args, flag)) is not None and value < 1:
            raise ValueError(f"--{flag} {value}: at least 1 is needed")
    try:
        args.costs = [float(number) for number in str(args.costs).split(",")]
        F, I, W, comm = args.costs
    except ValueError as error:
        raise ValueError(f"--costs {args.costs}: four numbers are needed, F,I,W,comm") from error
    if args.plot and not os.access(Path(args.plot).parent, os.W_OK | os.X_OK):
        raise ValueError(f"--plot {args.plot}: {Path(args.plot).parent} is no folder to write in")
    if args.plot and args.steps < 1:
        raise ValueError(f"--plot draws the last step, and --steps {args.steps} has none")
    read_text(args.text, at_least=65)
    for schedule in schedules(args, ranks).values():
        simulate(schedule, args.costs)


# ── launch kit: the same lines close chapters 01 to 06; a test keeps them identical ──────────

Event = namedtuple("Event", "what group sent at")  # a call, a wait or a mark; bytes; seconds


class Ledger:
    """While open, prices each `torch.distributed` call of this rank as a ring would send it.

    `events` holds calls, waits and marks in order, `sent` the bytes by call. It stands in front
    of the functions of `dist`; a call without a price raises KeyError, so none goes uncounted.
    """

    RING_BYTES = {  # call: (its arguments, n ranks, this rank) -> bytes that leave this rank
        "all_reduce": lambda a, n, me: 2 * (n - 1) / n * a["tensor"].nbytes,
        "all_gather_single": lambda a, n, me: (n - 1) * a["input_tensor"].nbytes,
        "reduce_scatter_single": lambda a, n, me: (n - 1) / n * a["input"].nbytes,
        "all_to_all_single": lambda a, n, me: a["input"].nbytes
        - a["input"][:1].nbytes * (a.get("input_split_sizes") or [len(a["input"]) / n] * n)[me],
        "broadcast": lambda a, n, me: (n - 1) / n * a["tensor"].nbytes,  # mean over the ring
        "isend": lambda a, n, me: a["tensor"].nbytes,
        "irecv": lambda a, n, me: 0,
        "barrier": lambda a, n, me: 0,
    }
    UNPRICED = "all_gather all_to_all gather scatter reduce reduce_scatter send recv".split()

    def __enter__(self):
        self.events, self.sent, self._patches = [], Counter(), ExitStack()
        for name in [*self.RING_BYTES, *self.UNPRICED]:
            counted = self._counted(name, getattr(dist, name))
            for module in (dist, dist.distributed_c10d):  # batch_isend_irecv looks in the latter
                self._patches.enter_context(patch.object(module, name, counted))
        wait = dist.Work.wait
        marked = lambda work, *timeout: self.mark("wait") or wait(work, *timeout)
        self._patches.enter_context(patch.object(dist.Work, "wait", marked))
        return self

    def __exit__(self, *_):
        self._patches.close()

    def mark(self, what, group=None, sent=0):
        name = (group or dist.group.WORLD).group_name
        self.events.append(Event(what, name, sent, time.perf_counter()))
        self.sent[what] += sent

    def _counted(self, name, real):
        signature = inspect.signature(real)

        def call(*args, **kwargs):
            given = signature.bind(*args, **kwargs).arguments
            n, me = (ask(given.get("group")) for ask in (dist.get_world_size, dist.get_rank))
            self.mark(name, given.get("group"), self.RING_BYTES[name](given, n, me))
            return real(*args, **kwargs)

        return call


# A line of the proof: error relative to the twin; bytes as (measured, by formula) or None; and, of
# a row that is wrong on purpose, the error that it must show.
Row = namedtuple("Row", "name error sent held wrong", defaults=[None, None, 0.0])


def relative_error(found, wanted):
    """max|found - wanted| / max|wanted|; where all wanted are zero, 0 if all found are, or inf."""
    gap, size = ((t.abs().max().item() if t.numel() else 0.0) for t in (found - wanted, wanted))
    return gap / size if size else math.inf if gap else 0.0


def prove(rows, device):
    """Print the table, bytes as on rank 0. 0 if every row is as claimed on every rank: its error
    at most 1e-10, or as predicted; its bytes equal to the formula. Otherwise 1."""
    off = lambda pair: abs(pair[0] - pair[1]) if pair else 0.0
    mine = [[row.error, row.wrong, off(row.sent), off(row.held)] for row in rows]
    worst = torch.tensor(mine, dtype=torch.float64, device=device).nan_to_num(math.inf)
    # all_reduce(MAX) over all ranks, four numbers a row: the worst rank speaks for all
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
    say(f"{'':36}    error         sent      formula         held      formula")
    broken = 0
    for row, (error, wrong, unsent, unheld) in zip(rows, worst.tolist()):
        holds = abs(error - wrong) <= max(1e-6 * wrong, 1e-10) and unsent < 0.5 and unheld < 0.5
        pairs = (row.sent or "--"), (row.held or "--")
        numbers = "".join(f"{x:>13}" if x == "-" else f"{x:13,.0f}" for pair in pairs for x in pair)
        note = f"  wrong on purpose: {wrong:.3g} predicted" if wrong else ""
        say(f"{row.name:36}{error:9.2g}{numbers}{note}{'' if holds else '  NOT AS CLAIMED'}")
        broken |= not holds
    return int(broken)


def read_text(path, at_least):
    """The bytes of a file as tokens, vocabulary 256; without a path, Python's own help topics.
    Raises ValueError where it cannot be read or is shorter than `at_least`."""
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
    """A step's batch, the same on every rank: bytes (B, S), and the byte after each (B, S)."""
    starts_B1 = torch.randint(len(text) - S, (B, 1), generator=torch.Generator().manual_seed(step))
    windows = text[starts_B1 + torch.arange(S + 1)]
    return windows[:, :-1], windows[:, 1:]


def say(*words):
    """Print, on rank 0 alone."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def arguments(doc, ranks, steps):
    """A parser with the flags of every chapter."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=ranks, help="to start, where torchrun did not")
    parser.add_argument("--steps", type=int, default=steps, help="0: prove, and do not train")
    parser.add_argument("--text", help="file to train on; default: Python's own help topics")
    parser.add_argument("--timeout", type=float, help="seconds a collective may take")
    return parser


def launch(main, args, validate):
    """Run main(args, device) on every rank, torchrun's or args.ranks started here, and exit: 0 if
    each returned 0, 1 if not, 2 and a sentence if validate(args, ranks) raised ValueError."""
    torch.set_num_threads(1)  # a forked child must not inherit a pool of threads
    by_torchrun = "RANK" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if by_torchrun else args.ranks
    args.timeout = args.timeout if args.timeout is not None else 120 if by_torchrun else 20
    try:
        if ranks < 1:
            raise ValueError(f"--ranks {ranks}: at least one is needed")
        if not args.timeout > 0:
            raise ValueError(f"--timeout {args.timeout}: more than 0 seconds are needed")
        validate(args, ranks)
    except ValueError as refused:
        print(refused, file=sys.stderr)
        sys.exit(2)
    if by_torchrun:
        _rank(int(os.environ["LOCAL_RANK"]), ranks, main, args)
    forks = sys.platform == "linux" and torch.cuda.device_count() < ranks
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        given, method = (ranks, main, args, folder), "fork" if forks else "spawn"
        try:
            started = mp.start_processes(_rank, given, ranks, join=False, start_method=method)
            while not started.join():
                pass
        except mp.ProcessExitedException:  # join() has ended the other ranks by SIGTERM
            codes = [(r, -p.exitcode) for r, p in enumerate(started.processes)]
            died = [(r, signal.Signals(c).name) for r, c in codes if c > 0 and c != signal.SIGTERM]
            sys.exit("\n".join(f"rank {r} was ended by {name}" for r, name in died) or 1)
        except KeyboardInterrupt:
            sys.exit(130)
    sys.exit(0)


def _rank(local, ranks, main, args, folder=None):
    """Meet the other ranks, run main, and leave with its exit status or with what went wrong."""
    torch.set_num_threads(1)
    env, local_ranks = os.environ, int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    on_gpu = torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if local_ranks == ranks:  # one machine: the loopback address needs no network
        env.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    rank = int(env.get("RANK", local))
    try:
        if folder:
            store = dist.FileStore(f"{folder}/store", ranks)
        else:  # a restarted attempt must not read the addresses of the one before
            attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"attempt {attempt}", next(dist.rendezvous("env://"))[0])
        given = dict(store=store, rank=rank, world_size=ranks)
        patience, backend = timedelta(seconds=args.timeout), "nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, timeout=patience, **given)
        code = main(args, device)
        dist.destroy_process_group()
    except Exception as error:
        lost = "by peer" in str(error)  # gloo: connection closed, or reset, by peer
        why = "lost another rank, which failed first" if lost else traceback.format_exc()
        print(f"rank {rank} of {ranks}: {why}", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an ordinary exit may abort where a reference to a group is left


if __name__ == "__main__":
    parser = arguments(__doc__, ranks=4, steps=60)
    parser.add_argument("--schedule", choices=SCHEDULES, help="default: prove all, train with 1f1b")
    parser.add_argument("--microbatches", type=int, default=8, help="in a step")
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
