"""05 · Expert parallelism: tokens travel to the few weights they chose

A mixture-of-experts layer has E small networks where a dense one has one large; a router chooses k
of them for each token. Here E/ep of them live on each rank, and rows of tokens go to and fro.

    rank 0   N tokens   router, shared expert   experts 0 .. e-1   ─┐  all_to_all there: dispatch
    rank 1   N tokens   the same ones           experts e .. 2e-1  ─┼─ all_to_all back: combine
    ...                                                            ─┘  and both again in backward

    ladder          rows sent per rank and all-to-all, of D elements, if routing is even
    gather_tokens   N · (ep-1)                 every token to everyone
    one_hop         N · k · (ep-1)/ep          to the ranks of its experts
    two_hops        N · (nodes reached - 1)    over slow links; then inside the node, over fast ones
    held: e · 3·D·F parameters, gradients and optimizer state on a rank. Activations are not split.

    python 05_ep.py                          four ranks on this machine
    torchrun --nproc-per-node 4 05_ep.py     the same, started by torchrun

Guide: Expert Parallelism · EP all-to-all bandwidth math · Load balancing in MoE training · the FAQ
on EP. What does not hold there: Mixtral 8x22B is 6,144 wide, not 8,192; rows also come back, so
its forward moves 90 GB, not 56, and backward as much again. That is the traffic of all eight GPUs:
with a link each, 1/8 of it, less the 1/8 that stays at home, is 9.9 GB a GPU. "EP stays within a
node", but the guide's own example, DeepSeek-V3, has 64 ranks on 8 nodes; and ep divides E, it need
not equal k.

Questions  Q5.1 ** who must lose?             Q5.2 *** what is summed before a product of means?
           Q5.3 ** where do gradients go?     Q5.4 ** in which order do experts want rows?
           Q5.5 *** who crosses twice?        Q5.6 ** over whom does an expert's gradient add up?
"""
# B sequences · S bytes of each · N tokens, B·S on this rank · D width · F an expert's inner width
# E experts · e on this rank · k choices of a token · R rows that arrive · G segments to balance

import argparse
import inspect
import logging
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, namedtuple
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as nnf
from torch import nn

__all__ = [
    "MoE", "Router", "attach_loss", "combine", "dispatch", "every_expert", "make_plan", "one_hop",
    "shard_specs", "two_hops",
]  # fmt: skip


# ── experts ──────────────────────────────────────────────────────────────────────────────────


def grouped_linear(x_Ri, weight_eoi, runs):
    """Rows (R, ..., i), each run of them times its own matrix of (e, o, i), to (R, ..., o).

    An expert without a token is in the graph too: its gradient is zeros, never None.
    """
    weights = weight_eoi.to(x_Ri.dtype).unbind()
    return torch.cat([nnf.linear(x, w_oi) for x, w_oi in zip(x_Ri.split(runs), weights)])


class Experts(nn.Module):
    """SwiGLU networks side by side, each for a run of rows: down(silu(gate(x)) · up(x)).

    Args: how many; widths D and F. Weights: gate_up (E, 2F, D), down (E, D, F).
    """

    def __init__(self, E, D, F):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(E, 2 * F, D) / D**0.5)
        self.down = nn.Parameter(torch.randn(E, D, F) / F**0.5)

    def forward(self, x_RD, runs=None):
        """Rows (R, ..., D), the first runs[0] for the first expert and so on, to as many. A single
        expert, a dense layer, needs no runs."""
        runs = runs or [len(x_RD)]
        gate_RF, up_RF = grouped_linear(x_RD, self.gate_up, runs).chunk(2, -1)
        return grouped_linear(nnf.silu(gate_RF) * up_RF, self.down, runs)

    def keep(self, held):
        """Let go of all experts but those of these numbers."""
        for name, weight in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(weight.detach()[held].clone()))


# ── the router, and three ways to keep it from having favourites ──────────────────────────────

Routing = namedtuple("Routing", "expert gates aux")  # (N, k), E where dropped; (N, k); loss or None


def top(scores, k):
    """The numbers of the k largest in each row; of equals, the first. torch.topk promises no
    order among equals, and CPU and GPU differ: of eight zeros, the CPU's top two are 6 and 5."""
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :k]


def capacity(N, E, k, factor):
    """Tokens that an expert takes of N: ceil(factor · N·k / E), at most N; 1.1 is exactly 11/10."""
    return min(N, math.ceil(Fraction(str(factor)) * N * k / E))


def drop(expert_Nk, gates_Nk, E, factor, first="token"):
    """The choices that fit the experts' capacity; E, an expert that is nowhere, for the others.

    first: "token" keeps the earliest tokens (Switch), "gate" the largest gates.
    """
    N, k = expert_Nk.shape
    priority = (-gates_Nk if first == "gate" else torch.zeros_like(gates_Nk)).flatten()
    queue = priority.argsort(stable=True)
    queue = queue[expert_Nk.flatten()[queue].argsort(stable=True)]  # by expert, then by priority
    lengths_E = expert_Nk.flatten().bincount(minlength=E)
    starts_E = lengths_E.cumsum(0) - lengths_E
    place = torch.arange(N * k, device=queue.device) - starts_E.repeat_interleave(lengths_E)
    late = queue[place >= capacity(N, E, k, factor)]
    return expert_Nk.flatten().index_fill(0, late, E).view(N, k)


class Router(nn.Module):
    """Chooses k of E experts for each token, and how much each counts.

    Args:
        D, E, k: width, experts, choices.
        score: "softmax", or "sigmoid" (DeepSeek-V3).
        renormalize: gates of a token sum to 1. After a softmax this is the same as a softmax over
            the k chosen logits (Mixtral); without it gates are probabilities (Switch).
        scale: multiplies the gates (DeepSeek-V3's routed scaling factor).
        limit: (groups, kept): choose only within a token's best groups of experts, of nodes say.
        factor, first: capacity factor and who goes first, see `drop`; None: no token is dropped.
        balance, z: coefficients of the auxiliary losses; scope: "batch" or "sequence".
        group: the ranks over whose tokens balance is judged, dp x cp (x tp where tokens are
            sharded over it); None: this rank's alone.
        sequence_group: those that hold parts of the same sequences, cp (x tp); None: no others.
        microbatches: auxiliary losses are per micro-batch, and a step's is the mean over them.

    `bias_E` takes part in the choice only, and learns by `update_bias`. (Were experts to choose
    tokens, the load would be even, but a token's experts would depend on the tokens after it.)
    Raises ValueError where E, k and the limit do not fit, or where gates could not learn.
    Sources: Shazeer et al., arXiv:1701.06538; Fedus et al. (Switch), arXiv:2101.03961, section 2.2;
    Zoph et al. (z-loss), arXiv:2202.08906; DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """

    def __init__(
        self, D, E, k, score="softmax", renormalize=True, scale=1.0, limit=None,
        factor=None, first="token", balance=0.0, z=0.0, scope="batch",
        group=None, sequence_group=None, microbatches=1,
    ):  # fmt: skip
        super().__init__()
        groups, kept = limit or (1, 1)
        if E % groups or kept > groups or not 1 <= k <= kept * E // groups:
            raise ValueError(f"k {k} from {kept} of {groups} groups of {E} experts does not work")
        if renormalize and k == 1:
            raise ValueError("k 1 renormalised is a gate of 1: the router would get no gradient")
        self.weight = nn.Parameter(torch.randn(E, D) / D**0.5)
        self.register_buffer("bias_E", torch.zeros(E))
        self.register_buffer("load_2E", torch.zeros(2, E, dtype=torch.long), persistent=False)
        self.E, self.k, self.score, self.renormalize, self.scale = E, k, score, renormalize, scale
        self.limit, self.factor, self.first = limit, factor, first
        self.balance, self.z, self.scope = balance, z, scope
        self.group, self.sequence_group, self.microbatches = group, sequence_group, microbatches
        self.parts = None  # tokens of each rank, where one process stands for several (the twin)

    def forward(self, x_BSD):
        """Tokens (B, S, D) to a Routing: experts and gates (B·S, k), auxiliary loss or None."""
        wide = torch.promote_types(x_BSD.dtype, torch.float32)  # bf16 makes ties
        x_ND = x_BSD.flatten(0, 1).to(wide)
        logits_NE = nnf.linear(x_ND, self.weight.to(wide))
        scores_NE = logits_NE.softmax(-1) if self.score == "softmax" else logits_NE.sigmoid()
        chosen_Nk = self.choose(scores_NE.detach())
        gates_Nk = scores_NE.gather(1, chosen_Nk)
        if self.renormalize:
            gates_Nk = gates_Nk / (gates_Nk.sum(-1, keepdim=True) + 1e-20)
        expert_Nk = chosen_Nk
        if self.factor:
            parts = [t.split(self.parts or len(t)) for t in (chosen_Nk, gates_Nk.detach())]
            expert_Nk = torch.cat([drop(*p, self.E, self.factor, self.first) for p in zip(*parts)])
            gates_Nk = gates_Nk.masked_fill(expert_Nk == self.E, 0)
        self.count_in_backward(gates_Nk, chosen_Nk, expert_Nk)
        aux = None
        if self.balance or self.z:
            aux = self.auxiliary_loss(logits_NE, scores_NE, chosen_Nk, x_BSD.shape)
        return Routing(expert_Nk, gates_Nk * self.scale, aux)

    def choose(self, scores_NE):
        """The k best biased scores of each token, (N, k), within its best groups."""
        # Q5.1 ** A group that is not allowed must lose. What stands in place of its scores?
        #         hint: biased scores may be below zero
        biased_NE = scores_NE + self.bias_E.to(scores_NE.dtype)
        if self.limit:
            groups, kept = self.limit
            each = biased_NE.unflatten(-1, (groups, -1))
            best = each.sort(-1, descending=True).values[..., : max(1, self.k // kept)].sum(-1)
            allowed = torch.zeros_like(best, dtype=torch.bool).scatter(-1, top(best, kept), True)
            biased_NE = each.masked_fill(~allowed[..., None], -math.inf).flatten(-2)
        return top(biased_NE, self.k)
        # /Q5.1

    def auxiliary_loss(self, logits_NE, scores_NE, chosen_Nk, shape):
        """This rank's part of the auxiliary losses: parts of all ranks add up to the whole.

        Balance is E · Σ_i f_i · P_i per segment (the micro-batch, or each sequence): f_i the share
        of choices that fell on expert i, P_i the mean of its normalised scores: 1 if all are equal,
        whatever k.
        """
        sequences, whole = self.scope == "sequence", (*shape[:2], self.E)
        by_segment = lambda t_NE: t_NE.view(whole).sum(1) if sequences else t_NE.sum(0)[None]
        counts_GE = by_segment(nnf.one_hot(chosen_Nk, self.E).sum(1))
        share_GE = by_segment(scores_NE / scores_NE.sum(-1, keepdim=True))
        # Q5.2 *** f · P is a product of means over all ranks. What has to be summed before it?
        #          hint: counts have no gradient; P has, and each rank can keep its own part of it
        among = self.sequence_group if sequences else self.group
        if among is not None:
            # all_reduce(SUM) over dp x cp (or cp), G·E integers: counts of the whole segments
            dist.all_reduce(counts_GE, group=among)
        # /Q5.2
        tokens_G1 = counts_GE.sum(-1, keepdim=True).clamp(min=1) / self.k
        others = size(self.group) // size(among)  # times as many segments, on other ranks
        balance_G = self.E * (counts_GE * share_GE / (self.k * tokens_G1**2)).sum(-1)
        balance = balance_G.mean() / others
        z = logits_NE.logsumexp(-1).square().sum() / (tokens_G1.sum() * others)
        return (self.balance * balance + self.z * z) / self.microbatches

    def count_in_backward(self, gates_Nk, chosen_Nk, expert_Nk):
        """Add to load_2E, chosen and kept tokens per expert, when backward comes by: once for each
        forward that trains, however often recomputation repeats it, and never for validation."""
        if not gates_Nk.requires_grad:
            return
        chosen_E = chosen_Nk.flatten().bincount(minlength=self.E)
        kept_E = expert_Nk.flatten().bincount(minlength=self.E + 1)[: self.E]

        def count(_):
            self.load_2E += torch.stack([chosen_E, kept_E])

        gates_Nk.register_hook(count)

    @torch.no_grad()
    def update_bias(self, rate):
        """Once a step, on every rank: raise the bias of experts chosen less than the mean, lower
        the others', by `rate`. Returns the step's load (2, E): tokens that chose each, and kept.

        Source: Wang et al., Auxiliary-loss-free load balancing, arXiv:2408.15664; centred, so that
        biases do not drift together.
        """
        load_2E = self.load_2E.clone()
        self.load_2E.zero_()
        if self.group is not None:
            # all_reduce(SUM) over dp x cp, 2·E integers: every rank now takes the same step
            dist.all_reduce(load_2E, group=self.group)
        chosen_E = load_2E[0]
        step_E = rate * (chosen_E.sum() - self.E * chosen_E).sign().to(self.bias_E.dtype)
        self.bias_E += step_E - step_E.mean()
        return load_2E


def size(group):
    """Ranks of a group; None stands for this rank alone."""
    return 1 if group is None else dist.get_world_size(group)


class _AttachLoss(torch.autograd.Function):
    """
    forward   x, unchanged
    backward  its gradient, unchanged, and 1 for the auxiliary loss
    """

    @staticmethod
    def forward(ctx, x, aux):
        ctx.save_for_backward(torch.ones_like(aux))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d_x):
        return d_x, *ctx.saved_tensors


def attach_loss(x, aux):
    """x, through which backward also minimises `aux`, as if it had been added to the loss: so no
    pipeline stage but the last has to return one. What is returned must be used in x's place."""
    return _AttachLoss.apply(x, aux)


# ── the serial twin ──────────────────────────────────────────────────────────────────────────


def every_expert(x_ND, gates_Nk, expert_Nk, experts, group=None):
    """The twin: all experts on all tokens, those not chosen times zero. No rows are moved."""
    none_NE = gates_Nk.new_zeros(len(x_ND), len(experts.down) + 1)
    gates_NE = none_NE.scatter_add(1, expert_Nk, gates_Nk)
    y_ND = torch.zeros_like(x_ND)
    for gate_N, gate_up, down in zip(gates_NE.T, experts.gate_up, experts.down):
        gate_NF, up_NF = (x_ND @ gate_up.T).chunk(2, -1)
        y_ND = y_ND + gate_N[:, None] * ((nnf.silu(gate_NF) * up_NF) @ down.T)
    return y_ND


# ── the collective of the axis ───────────────────────────────────────────────────────────────


class _AllToAll(torch.autograd.Function):
    """
    forward   all_to_all, `sent` rows to each rank, `received` from each
    backward  all_to_all, `received` rows to each rank, `sent` from each
    """

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.splits = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx, d_rows):
        # Q5.3 ** A row went to an expert. Where does its gradient have to go?
        #         hint: back, and what came from each rank is what each rank gets
        sent, received, group = ctx.splits
        return _exchange(d_rows, received, sent, group), None, None, None
        # /Q5.3


def _exchange(rows, sent, received, group):
    if group is None:
        return rows
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    # all_to_all over ep, uneven: row i of those for a rank is now on that rank; 0 rows is a number
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


# ── the ladder ───────────────────────────────────────────────────────────────────────────────


@dataclass
class Plan:
    """Who sends how many rows to whom, and in which order: made once, used there and back."""

    order: torch.Tensor  # of this rank's N·k choices, those that are sent, by expert
    sent: list  # rows to each rank
    received: list  # rows from each rank
    regroup: torch.Tensor  # rows as they arrive, by rank and then expert: taken by expert
    runs: list  # rows of each of this rank's experts
    shape: torch.Size  # (N, k)
    group: dist.ProcessGroup


def make_plan(expert_Nk, e, group):
    """Count, tell each rank its counts, and order rows: a Plan. Expert i lives on rank i // e of
    the group; numbers beyond the last are nowhere, and are not sent. group None: this rank alone.

    The lengths of messages have to be known on the host: this waits for the device, twice.
    """
    n = size(group)
    counts_E = expert_Nk.flatten().bincount(minlength=n * e + 1)[: n * e]
    # how many rows will come for each expert here: e integers from each rank
    arriving_E = _exchange(counts_E, [e] * n, [e] * n, group)
    # Q5.4 ** Rows have to leave sorted by expert. In which order do they arrive, and which order
    #         do the experts here want?
    #         hint: two stable sorts by expert, one at either end
    order = expert_Nk.flatten().argsort(stable=True)[: counts_E.sum()]
    local_R = torch.arange(e, device=order.device).repeat(n).repeat_interleave(arriving_E)
    regroup = local_R.argsort(stable=True)
    # /Q5.4
    sent, received = (c.view(n, e).sum(1).tolist() for c in (counts_E, arriving_E))
    runs = arriving_E.view(n, e).sum(0).tolist()
    return Plan(order, sent, received, regroup, runs, expert_Nk.shape, group)


def dispatch(x_ND, plan):
    """Send each token's row to each of its experts: (N, ...) here to (R, ...), expert-major, there.

    A rank to which nothing comes still takes part, forward and backward.
    """
    rows = x_ND[plan.order // plan.shape[1]]
    return _AllToAll.apply(rows, plan.sent, plan.received, plan.group)[plan.regroup]


def combine(rows_RD, gates_Nk, plan):
    """Bring rows (R, D) back, and add up each token's, times its gates: (N, D). A choice that was
    nowhere adds nothing. Summed in the wider dtype, in the order of choices: no atomics."""
    back_RD = torch.empty_like(rows_RD).index_copy(0, plan.regroup, rows_RD)
    rows = _AllToAll.apply(back_RD, plan.received, plan.sent, plan.group)
    each_PD = rows.new_zeros(gates_Nk.numel(), rows.shape[-1]).index_copy(0, plan.order, rows)
    return (gates_Nk[..., None] * each_PD.unflatten(0, plan.shape)).sum(1)


def one_hop(x_ND, gates_Nk, expert_Nk, experts, group):
    """Rows go straight to the ranks of their experts and back."""
    plan = make_plan(expert_Nk, len(experts.down), group)
    return combine(experts(dispatch(x_ND, plan), plan.runs), gates_Nk, plan)


def two_hops(x_ND, gates_Nk, expert_Nk, experts, group, nodes=None):
    """Rows cross to each node once, however many of its experts were chosen, and fan out there.

    The same mechanism twice: first nodes are the experts, and the rank that a row arrives on, the
    one with this rank's place in its node, then dispatches inside. On the way back it adds up
    first, so that one row returns. nodes: (ranks of my node, ranks with my place in each node).
    Source: DeepSeek-V3, arXiv:2412.19437, section 3.2.2.
    """
    inside, across = nodes
    per_node = len(experts.down) * size(inside)
    # Q5.5 *** Of a token's k choices, which name a node that an earlier one has named already?
    #          hint: compare all pairs of choices, and look below the diagonal
    node_Nk = expert_Nk.div(per_node, rounding_mode="floor")
    named_Nk = (node_Nk[:, :, None] == node_Nk[:, None, :]).tril(-1).any(-1)
    node_Nk = node_Nk.masked_fill(named_Nk, size(across))
    # /Q5.5
    return _by_way_of(node_Nk, across, inside, x_ND, gates_Nk, expert_Nk, experts)


def gather_tokens(x_ND, gates_Nk, expert_Nk, experts, group):
    """The naive way: each rank gets every token, and works on those that chose its experts."""
    n = size(group)
    all_Nn = torch.arange(n, device=x_ND.device).expand(len(x_ND), n)
    return _by_way_of(all_Nn, group, None, x_ND, gates_Nk, expert_Nk, experts)


def _by_way_of(stop_Nk, across, inside, x_ND, gates_Nk, expert_Nk, experts):
    """Send tokens to stops, ranks of `across`, with their gates and choices; there dispatch to the
    experts `inside`; bring back one row from each stop, already summed over its experts."""
    n, per_stop = size(across), len(experts.down) * size(inside)
    plan = make_plan(stop_Nk, 1, across)
    x_RD, gates_Rk, expert_Rk = (dispatch(t, plan) for t in (x_ND, gates_Nk, expert_Nk))
    here_Rk = expert_Rk - per_stop * dist.get_rank(across)
    here_Rk = here_Rk.masked_fill((here_Rk < 0) | (here_Rk >= per_stop), per_stop)
    y_RD = one_hop(x_RD, gates_Rk, here_Rk, experts, inside)
    return combine(y_RD, (stop_Nk < n).to(y_RD.dtype), plan)


# ── the layer ────────────────────────────────────────────────────────────────────────────────


class MoE(nn.Module):
    """A router, experts that are spread over the ranks of a group, and one that all tokens share.

    Args: router; F, an expert's inner width; group, the ranks that share the experts, None for this
    one alone; shared, the inner width of the shared expert, 0 for none; path, how tokens find their
    experts: a rung of the ladder; slots, the expert in each place where some are held repeatedly.

    (B, S, D) to (B, S, D), no residual: a token whose choices were dropped gives the shared
    expert's output alone. Every rank draws all experts, and keeps its own: the same start on any
    number of ranks. Raises ValueError where the group does not divide the experts.
    """

    def __init__(self, router, F, group, shared=0, path=one_hop, slots=None):
        super().__init__()
        E, D = router.weight.shape
        self.router, self.group, self.path, self.slots = router, group, path, slots
        self.experts = Experts(E, D, F)
        self.shared = Experts(1, D, shared) if shared else None
        places, n = slots or list(range(E)), size(group)
        if len(places) % n:
            fit = [d for d in range(1, len(places) + 1) if len(places) % d == 0]
            raise ValueError(f"ep {n} does not divide {len(places)} experts: use one of {fit}")
        e, r = len(places) // n, 0 if group is None else dist.get_rank(group)
        self.experts.keep(places[r * e : (r + 1) * e])

    def forward(self, x_BSD, later=None):  # later: for callers that still pass it
        x_ND, (expert_Nk, gates_Nk, aux) = x_BSD.flatten(0, 1), self.router(x_BSD)
        if self.slots:
            expert_Nk = take_turns(expert_Nk, self.slots)
        y_ND = self.path(x_ND, gates_Nk, expert_Nk, self.experts, self.group)
        if self.shared:
            y_ND = y_ND + self.shared(x_ND)
        y_BSD = y_ND.to(x_BSD.dtype).view_as(x_BSD)
        return y_BSD if aux is None else attach_loss(y_BSD, aux)


def shard_specs(module):
    """{name: (dimension, blocks)} of the parameters that ep splits; others are on every rank."""
    return {
        f"{name}.experts.{weight}".lstrip("."): (0, 1)
        for name, part in module.named_modules()
        if isinstance(part, MoE)
        for weight in ("gate_up", "down")
    }


def take_turns(expert_Nk, slots):
    """The place for each choice, where places slots[i] may hold an expert more than once: token
    n goes to copy n modulo their number. Nowhere stays nowhere."""
    places = [[i for i, held in enumerate(slots) if held == e] for e in range(max(slots) + 1)]
    places.append([len(slots)])
    most = max(map(len, places))
    table = torch.tensor([p + [0] * (most - len(p)) for p in places], device=expert_Nk.device)
    copies = torch.tensor([len(p) for p in places], device=expert_Nk.device)
    turn_Nk = torch.arange(len(expert_Nk), device=expert_Nk.device)[:, None] % copies[expert_Nk]
    return table[expert_Nk, turn_Nk]


def sum_over_copies(moe):
    """Make the gradients of copies of an expert one: what training with `slots` costs. Serving uses
    copies against hot experts (DeepSeek-V3, section 3.4); training pays this sum each step, and
    holds the copies' optimizer state, so there they are data parallelism by another name."""
    e, r = len(moe.experts.down), dist.get_rank(moe.group)
    mine = moe.slots[r * e : (r + 1) * e]
    for expert in sorted({held for held in moe.slots if moe.slots.count(held) > 1}):
        here = [i for i, held in enumerate(mine) if held == expert]
        for param in moe.experts.parameters():
            total = param.grad[here].sum(0)  # zeros on a rank without a copy, which must join
            # all_reduce(SUM) over ep, one expert: every copy now has all of its tokens' gradient
            dist.all_reduce(total, group=moe.group)
            param.grad[here] = total


def reduce_gradients(module, dense, replicas):
    """Sum gradients after backward, in place. dense: the group of all ranks with other tokens;
    replicas: the ranks that hold the same experts."""
    split, parts = shard_specs(module), {dense: [], replicas: []}
    for name, param in module.named_parameters():
        # Q5.6 ** An expert has seen its tokens of all ranks of its ep group. Who has seen others?
        #         hint: the loss was divided by all tokens, so nothing is divided here
        holders = replicas if name in split else dense
        parts[holders].append(param.grad)
        # /Q5.6
    for group, gradients in parts.items():
        if not gradients:
            continue
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        # all_reduce(SUM) over dp, or over edp for experts: every holder now has the whole sum
        dist.all_reduce(flat, group=group)
        for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients])):
            gradient.copy_(total.view_as(gradient))


# ── proof ────────────────────────────────────────────────────────────────────────────────────

Groups = namedtuple("Groups", "world ep replicas inside across")  # all ranks, and this rank's parts


def make_groups(ep, nodes=1, timeout=20):
    """All ranks as (replica, node, place in it), and this rank's groups along each: see Groups."""
    ranks = torch.arange(dist.get_world_size()).view(-1, nodes, ep // nodes)
    parts = [ranks.flatten(1), ranks.flatten(1).T, ranks.flatten(0, 1)]
    parts.append(ranks.transpose(1, 2).flatten(0, 1))
    patience = timedelta(seconds=timeout)
    made = [dist.new_subgroups_by_enumeration(p.tolist(), timeout=patience)[0] for p in parts]
    return Groups(dist.group.WORLD, *made)


def bytes_sent(path, expert_PNk, e, D, groups):
    """By formula, from the routing of every rank of the ep group: bytes that leave this rank in
    forward and backward, in float64: (to ranks of its node, to other nodes)."""
    (ep, N, k), places = expert_PNk.shape, dist.get_world_size(groups.inside)
    me, home = dist.get_rank(groups.ep), expert_PNk // e  # of a dropped choice: ep, or beyond
    straight, fanned = torch.zeros(2, ep, ep, dtype=torch.long)  # rows from rank p to rank q
    for p, q in product(range(ep), range(ep)):
        node, relay = q // places, q // places * places + p % places
        if path is two_hops:
            fanned[relay, q] += (home[p] == q).sum().item()
            straight[p, q] = (home[p] // places == node).any(-1).sum() * (relay == q)
        else:
            straight[p, q] = (home[p] == q).sum() if path is one_hop else N
    near = torch.arange(ep) // places == me // places
    counts = {gather_tokens: (1, 1), one_hop: (e, e), two_hops: (e, 1 / places)}[path]
    sent = []
    for there, count in zip((near & (torch.arange(ep) != me), ~near), counts):
        out, back = straight[me, there].sum().item(), straight[there, me].sum().item()
        fan = (fanned[me, there].sum() + fanned[there, me].sum()).item()
        elements = 2 * D * (out + back + fan) + count * there.sum().item()
        if path is not one_hop:  # gates and the numbers of experts go along, and gates' gradients
            elements += k * (2 * out + back)
        sent.append(8 * elements)
    return sent


# What `check` saw on this rank: relative errors by name; (measured, formula) in bytes, and what of
# them has to cross between nodes; calls; whom each rank's tokens chose; the layer, its twin; and by
# name, (what was found, the twin's part of it).
Found = namedtuple("Found", "errors sent held across events expert_PNk moe twin pairs")


def twins(path, groups, device, bias=(), E=8, k=2, D=16, F=12, slots=None, parts=None, **routing):
    """A layer and its twin, in float64, from one seed. bias: added to the scores of the first
    experts, so that they are chosen; parts: tokens of each rank."""
    made = []
    for world, *how in ((None, None, 8, every_expert), (groups.world, groups.ep, 8, path, slots)):
        torch.manual_seed(0)
        router = Router(D, E, k, group=world, **routing)
        router.bias_E[: len(bias)] = torch.tensor(bias)
        made.append(MoE(router, F, *how).double().to(device))
    made[0].router.parts = parts
    return made


def batch(n, device, B=2, S=6, D=16):
    """Tokens of all ranks and, to make a loss of them, a weight for each number, (n·B, S, D). The
    tokens have a mean, so that routing is skewed."""
    draw = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, n * B, S, D, dtype=torch.float64, generator=draw).to(device)
    return x + 0.5, weight / (n * B * S)


def check(groups, path, device, S=6, slots=None, times=1, **layer):
    """One step of a layer, of a loss so many `times` as large, beside its twin, which has the
    tokens of all ranks. Returns Found."""
    n, r, ep = dist.get_world_size(), dist.get_rank(), dist.get_world_size(groups.ep)
    x_BSD, weight_BSD = batch(n, device, S=S)
    N = len(x_BSD) // n * S
    twin, moe = twins(path, groups, device, slots=slots, parts=[N] * n, **layer)
    x_bSD = x_BSD.chunk(n)[r].clone().requires_grad_()
    y_BSD = twin(x_BSD.requires_grad_())
    (y_BSD * weight_BSD).sum().backward()
    with Ledger() as ledger:
        y_bSD = moe(x_bSD)
        (y_bSD * weight_BSD.chunk(n)[r] * times).sum().backward()
    if slots:
        sum_over_copies(moe)
    reduce_gradients(moe, groups.world, groups.replicas)

    E, e, split = moe.router.E, len(moe.experts.down), shard_specs(moe)
    mine = (slots or list(range(E)))[dist.get_rank(groups.ep) * e :][:e]
    pairs = {"output": (y_bSD, y_BSD.chunk(n)[r]), "input": (x_bSD.grad, x_BSD.grad.chunk(n)[r])}
    for (name, param), whole in zip(moe.named_parameters(), twin.parameters()):
        pairs[name] = param.grad, whole.grad[mine] if name in split else whole.grad
    pairs = {name: (found.detach(), part.detach()) for name, (found, part) in pairs.items()}
    errors = {name: relative_error(*pair) for name, pair in pairs.items()}

    with torch.no_grad():
        expert_PNk = twin.router(x_BSD).expert.view(n // ep, ep, N, -1)[r // ep]
    if slots:
        expert_PNk = torch.stack([take_turns(expert_Nk, slots) for expert_Nk in expert_PNk])
    _, D, F = moe.experts.down.shape
    inside, across = bytes_sent(getattr(path, "func", path), expert_PNk, e, D, groups)
    balanced = moe.router.scope == "batch" and (moe.router.balance or moe.router.z)
    counts = 2 * (n - 1) / n * E * 8 if balanced else 0
    sent = sum(ledger.sent.values()), inside + across + counts
    held = held_by(moe.experts), 4 * 8 * e * 3 * D * F
    return Found(errors, sent, held, across, ledger.events, expert_PNk, moe, twin, pairs)


def held_by(experts):
    """Bytes of parameters, gradients, and what AdamW holds for them once it has taken a step."""
    optimizer = torch.optim.AdamW(experts.parameters(), lr=0)
    optimizer.step()
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    weights = [t for param in experts.parameters() for t in (param, param.grad)]
    return sum(t.nbytes for t in weights + moments)


def skipped(found, groups):
    """Wrong on purpose: the largest error of an expert's gradient, where a rank on which nobody
    chose it leaves it None, and so is passed over by the sum over replicas and by the optimizer."""
    each = list(zip(*found.pairs["experts.down"]))
    first, chosen = dist.get_rank(groups.ep) * len(each), set(found.expert_PNk.flatten().tolist())
    return max(relative_error(g * (i in chosen), w) for i, (g, w) in enumerate(each, first))


def averaged_aux(groups, device):
    """Wrong on purpose: the balance loss of each rank's tokens, averaged over ranks: its error,
    and the one predicted. A mean of products is the product of means and the covariance."""
    n, r = dist.get_world_size(), dist.get_rank()
    twin, _ = twins(one_hop, groups, device, balance=1.0)
    router, x_BSD = twin.router, batch(n, device)[0]
    aux = router(x_BSD.chunk(n)[r]).aux.detach()
    # all_reduce(SUM) over dp, 1: every rank now has the mean over ranks, which is no balance loss
    dist.all_reduce(aux, group=groups.world)
    share_nE = (x_BSD @ router.weight.T).softmax(-1).view(n, -1, router.E).mean(1)
    chosen = nnf.one_hot(router(x_BSD).expert, router.E).double().view(n, -1, router.E)
    chosen_nE = chosen.mean(1)
    covariance = ((chosen_nE - chosen_nE.mean(0)) * (share_nE - share_nE.mean(0))).mean(0)
    wanted = router(x_BSD).aux.detach()
    return relative_error(aux / n, wanted), abs(router.E * covariance.sum() / wanted).item()


def proof(groups, part, device):
    """The rows of the table: the ladder, the routers, and what forgetting looks like. groups: one
    ep group of all ranks; part: two, of half the ranks each (or one rank alone)."""
    n, ep = dist.get_world_size(), dist.get_world_size(part.ep)
    hop2 = partial(two_hops, nodes=(groups.inside, groups.across))
    nodes, k1 = dist.get_world_size(groups.across), dict(k=1, renormalize=False)
    v3 = dict(k=4, score="sigmoid", limit=(4, 2), scale=2.5, balance=0.1, scope="sequence")
    copies = [*range(8), *[0] * 8]  # expert 0 is hot: it has the second half of the places too
    ladder = {
        f"gather_tokens, ep {n}": (groups, gather_tokens, {}),
        f"one_hop, ep {n}": (groups, one_hop, {}),
        f"two_hops, {nodes} nodes of {n // nodes}": (groups, hop2, {}),
        f"one_hop, ep {ep} in dp {n}": (part, one_hop, {}),
        "  k 1, one expert takes everything": (part, one_hop, k1 | dict(bias=[9])),
        "  capacity 1.25, by gate": (groups, hop2, dict(k=4, factor=1.25, first="gate")),
        "  balance loss and z-loss": (part, one_hop, dict(balance=0.1, z=0.01)),
        "  sigmoid, 2 of 4 groups, sequences": (groups, hop2, v3),
        "  expert 0 in 9 of 16 places": (groups, one_hop, dict(slots=copies)),
    }
    for name, (which, path, layer) in ladder.items():
        found = check(which, path, device, **layer)
        yield Row(name, max(found.errors.values()), found.sent, found.held)
    if n == 1:
        return
    error, predicted = averaged_aux(groups, device)
    yield Row("balance loss averaged over ranks", error, wrong=predicted)
    if ep > 1:  # each loss a mean over its rank's tokens, each gradient over those who hold it
        gradient, whole = check(part, one_hop, device, times=n).pairs["experts.down"]
        averaged = gradient / dist.get_world_size(part.replicas)
        yield Row("expert gradients, replicas' mean", relative_error(averaged, whole), wrong=ep - 1)
    found = check(part, one_hop, device, S=1, **k1)
    yield Row("expert without a token skipped", skipped(found, part), wrong=1)


# ── run ──────────────────────────────────────────────────────────────────────────────────────

BALANCE = {  # how: what the router is given beside it, and the rate of its bias
    "none": ({}, 0),
    "aux": ({"balance": 0.02}, 0),
    "bias": ({}, 0.02),
    "capacity": ({"factor": 1.25}, 0),
}


class LanguageModel(nn.Module):
    """Bytes (b, S) to logits of the next (b, S, V): the last four bytes, and a layer."""

    def __init__(self, layer, D, V=256):
        super().__init__()
        self.history, self.layer = nn.Embedding(4 * V, D), layer
        self.norm_layer, self.norm, self.head = nn.RMSNorm(D), nn.RMSNorm(D), nn.Linear(D, V)

    def forward(self, x_bS):
        last4_bS4 = nnf.pad(x_bS, (3, 0)).unfold(1, 4, 1)
        place = self.head.out_features * torch.arange(4, device=x_bS.device)
        x_bSD = self.history(last4_bS4 + place).sum(2)
        x_bSD = x_bSD + self.layer(self.norm_layer(x_bSD))
        return self.head(self.norm(x_bSD))


def fit(args, groups, device, how):
    """Train one model on text; yields each step's loss, in nats per byte, and load (2, E) or None.

    how: a key of BALANCE, for 8 experts of which a token chooses one, beside a shared one; or
    "dense": one network as wide as those two.
    """
    n, r = dist.get_world_size(), dist.get_rank()
    text, (options, rate), D, F = read_text(args.text, 0), BALANCE.get(how, ({}, 0)), 64, 64
    torch.manual_seed(0)
    if how == "dense":
        layer = Experts(1, D, 2 * F)
    else:
        router = Router(D, 8, 1, renormalize=False, group=groups.world, **options)
        layer = MoE(router, F, groups.ep, shared=F)
    model = LanguageModel(layer, D).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    for step in range(args.steps):
        x_bS, y_bS = (t.to(device).tensor_split(n)[r] for t in sample(text, step, args.batch, 64))
        logits = model(x_bS).flatten(0, 1)
        loss = nnf.cross_entropy(logits, y_bS.flatten(), reduction="sum") / (args.batch * 64)
        loss.backward()
        reduce_gradients(model, groups.world, groups.replicas)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        # all_reduce(SUM) over dp, 1: the shares of the loss, for the reader
        dist.all_reduce(loss, group=groups.world)
        yield loss.item(), None if how == "dense" else layer.router.update_bias(rate)


def peaks(load_2E, n):
    """The most over the mean: tokens kept by an expert, by a rank; and the share dropped."""
    chosen_E, kept_E = load_2E.double()
    over_mean = lambda load: (load.max() / load.mean()).item()
    dropped = 1 - (kept_E.sum() / chosen_E.sum()).item()
    return over_mean(kept_E), over_mean(kept_E.view(n, -1).sum(1)), dropped


def train(args, groups, device):
    """Train 8 experts, and beside them a dense model of as many active parameters."""
    text, n = read_text(args.text, 0), dist.get_world_size()
    say(f"\n8 experts on {n} ranks, of which a token chooses one beside a shared one; balance by "
        f"{args.balance}.\nThe dense layer is as wide as those two. "
        f"Unigram entropy of the text {unigram_entropy(text):.3f}")  # fmt: skip
    say("step   loss   dense   busiest expert / mean   slowest rank / mean   dropped")
    both = zip(fit(args, groups, device, args.balance), fit(args, groups, device, "dense"))
    for step, ((loss, load_2E), (dense, _)) in enumerate(both):
        if step % 10 == 0 or step == args.steps - 1:
            expert, rank, dropped = peaks(load_2E, n)
            say(f"{step:4}{loss:7.3f}{dense:8.3f}{expert:24.2f}{rank:22.2f}{dropped:10.1%}")


def plot(args, groups, device):
    """Draw, for each way to balance, the busiest expert's load over time, and the loss."""
    runs = {how: list(fit(args, groups, device, how)) for how in BALANCE}
    if dist.get_rank():
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    styles = zip(("-", "--", "-", ":"), ("0.55", "#b5541c", "#0b3c5d", "k"), (1.4, 1.8, 2.2, 2.2))
    smooth = lambda series: torch.tensor(series).unfold(0, 10, 1).mean(1)
    losses = {how: smooth([loss for loss, _ in run]) for how, run in runs.items()}
    for (how, run), (line, color, width) in zip(runs.items(), styles):
        given = dict(linestyle=line, color=color, linewidth=width)
        experts, ranks, dropped = zip(*(peaks(load, dist.get_world_size()) for _, load in run))
        dropped, steps = sum(dropped) / len(run), range(9, len(run))
        note = f" ({dropped:.0%} of choices dropped)" if dropped else ""
        left.plot(steps, smooth(experts), label=how + note, **given)
        right.plot(steps, losses[how] - losses["none"], **given)
        print(f"{how:9} last 10 steps: busiest expert {smooth(experts)[-1]:.2f} of the mean, "
              f"slowest rank {smooth(ranks)[-1]:.2f}, loss {losses[how][-1]:.3f}")  # fmt: skip
    left.set_title("tokens of the busiest expert / mean", loc="left", fontsize=10)
    right.set_title("loss, less that of none, nats per byte", loc="left", fontsize=10)
    left.set_ylim(bottom=1)
    left.legend(fontsize=9, frameon=False)
    for axis in (left, right):
        axis.set_xlabel("step (mean of 10)")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(args.plot, dpi=110)
    print(f"drew {args.plot}")


def main(args, device):
    """Prove, then train (or draw); 0 if everything is as claimed."""
    n = dist.get_world_size()
    nodes = 1 + (n % 2 == 0)
    groups = make_groups(n, nodes, args.timeout)
    part = make_groups(n // nodes, 1, args.timeout)
    say(f"05 expert parallelism · {n} ranks · {dist.get_backend()} · {device.type}")
    broken = prove(list(proof(groups, part, device)), device)
    hop2 = partial(two_hops, nodes=(groups.inside, groups.across))
    one, two = (check(groups, path, device, k=4).across for path in (one_hop, hop2))
    say(f"\nk 4, to other nodes: {one:,.0f} bytes in one hop, {two:,.0f} in two")
    if args.plot:
        plot(args, groups, device)
    elif args.steps:
        train(args, groups, device)
    return broken


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    if 8 % ranks:
        raise ValueError(f"{ranks} ranks do not divide 8 experts: use 1, 2, 4 or 8")
    if args.batch < ranks:
        raise ValueError(f"--batch {args.batch}: each of {ranks} ranks needs at least 1")
    if args.plot and args.steps < 10:
        raise ValueError(f"--steps {args.steps}: a picture needs at least 10")
    read_text(args.text, at_least=65)


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
    import torch._dynamo  # noqa: F401  an optimizer loads it: once here, not in each forked rank

    parser = arguments(__doc__, ranks=4, steps=80)
    parser.add_argument("--batch", type=int, default=32, help="sequences of 64 bytes in a step")
    parser.add_argument("--balance", choices=BALANCE, default="bias", help="what evens the load")
    parser.add_argument("--plot", metavar="PNG", help="draw each way to balance; try --steps 300")
    launch(main, parser.parse_args(), validate)
