"""01 · Data parallel: copies of the model, parts of the batch, one sum of gradients

Each of n ranks holds the whole model and a part of the batch. A sum of losses has the sum of the
gradients, so one all-reduce of the gradients makes n small steps equal to one big one.

    rank 0   all P parameters   samples 0 .. b-1       gradients P ─┐
    rank 1   all P parameters   samples b .. 2b-1      gradients P ─┼─ all-reduce: the same sum
    ...                                                            ─┘  on every rank

    ladder                     calls          sent per rank        held beside the parameters
    all_reduce_gradients       one a tensor   2(n-1)/n · P         P
    all_reduce_flat            one            2(n-1)/n · P         2P: the tensors, their copy
    DataParallel               one a bucket   2(n-1)/n · P         P: tensors are views of buckets
      and K micro-batches      the same       the same, not K of them
    all_reduce_flat, by gather_and_broadcast  (n-1) · P on rank 0  3P on rank 0
    all_reduce_flat, by ring_all_reduce       2(n-1)/n · P         2P + P/n

    python 01_dp.py                          four ranks on this machine
    torchrun --nproc-per-node 4 01_dp.py     the same, started by torchrun

Guide: Data Parallelism · DP and gradient overlap · gradient_as_bucket_view · Gradient accumulation.
Some of it does not hold. "N x 4 bytes per GPU" is the payload; a ring sends 2(n-1)/n of it: 490 GB
for 70 B fp32 gradients on 8 GPUs, in 1.1 s at NVLink's 450 GB/s each way, not in 30 ms. A 7 B model
does not fit an 80 GB GPU under pure data parallelism: weights, gradients and mixed-precision Adam
are 16 bytes a parameter, 112 GB. Its accumulation loop adds up mean losses, which makes gradients K
times too large. It names 25-50 MB and 50-100 MB as good buckets: measure yours (--plot).

Questions  Q1.1 * what divides the loss?        Q1.2 * which tensors must start equal?
           Q1.3 ** when may a bucket leave?     Q1.4 ** which micro-batch sends?
           Q1.5 *** which chunk goes round?     Q1.6 *** and which comes home?
"""
# B samples of the step · b on this rank · S bytes of a sample · D width · V vocabulary (256)
# P parameters, in the proof their bytes · n ranks · K micro-batches

import argparse
import hashlib
import inspect
import logging
import math
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter, namedtuple
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

__all__ = [
    "DataParallel",
    "all_reduce_gradients",
    "broadcast_parameters",
    "ring_all_reduce",
]


# ── the serial twin: a small language model over bytes ───────────────────────────────────────


class Block(nn.Module):
    """Attention, then an MLP, each on a normed copy of the residual stream: (b, S, D) to itself."""

    def __init__(self, D, heads):
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x_bSD):
        qkv = self.qkv(self.norm_attention(x_bSD)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_bSD = x_bSD + self.out(attended.transpose(1, 2).flatten(2))
        return x_bSD + self.down(F.gelu(self.up(self.norm_mlp(x_bSD))))


class LanguageModel(nn.Module):
    """Bytes (b, S) to logits of the next byte (b, S, V): 1.1 M parameters by default, in 54
    tensors from 128 elements to 65,536."""

    def __init__(self, D=128, layers=5, heads=4, S=64, V=256):
        super().__init__()
        self.token, self.position = nn.Embedding(V, D), nn.Embedding(S, D)
        self.blocks = nn.ModuleList(Block(D, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, x_bS):
        positions_S = torch.arange(x_bS.shape[1], device=x_bS.device)
        x_bSD = self.token(x_bS) + self.position(positions_S)
        for block in self.blocks:
            x_bSD = block(x_bSD)
        return self.head(self.norm(x_bSD))


def valid_tokens(y_bS, group):
    """How many labels of the whole step count, on all ranks of the group: not those of -100."""
    count = (y_bS != -100).sum()
    # all_reduce(SUM) over dp, 1: every rank now knows the divisor of the whole step
    dist.all_reduce(count, group=group)
    return count


def loss_and_gradients(model, x_bS, y_bS, valid):
    """Backward of this rank's share of the loss; returns the share, in nats per valid token."""
    logits_bSV = model(x_bS)
    # Q1.1 * Ranks hold unequal numbers of labels. What is a rank's part of the mean over all?
    #        hint: parts that add up need one divisor, and no part may divide by its own count
    lost = F.cross_entropy(logits_bSV.flatten(0, 1), y_bS.flatten(), reduction="sum")
    share = lost / valid
    # /Q1.1
    share.backward()
    return share.detach()


# ── the same start ───────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def broadcast_parameters(module, group):
    """Give every rank of the group the parameters and buffers of its rank 0, in place."""
    # Q1.2 * Ranks that start apart stay apart, whatever they sum. What do they have to share?
    #        hint: a step changes parameters; a forward may change more than those
    for tensor in (*module.parameters(), *module.buffers()):
        # broadcast from rank 0 over dp, P in all: every rank now starts from the same model
        dist.broadcast(tensor, group_src=0, group=group)
    # /Q1.2


# ── the ladder: who adds the gradients, in how many calls, and when ──────────────────────────


def all_reduce_gradients(module, group):
    """Sum the gradients over the group after backward, one all-reduce a tensor, in place."""
    for param in module.parameters():
        if param.grad is not None:
            # all_reduce(SUM) over dp, one tensor: every rank now holds the sum of the gradients
            dist.all_reduce(param.grad, group=group)


def all_reduce_flat(module, group, all_reduce=None):
    """Sum the gradients over the group in one call, through a copy that is as large as they are:
    a call has a cost however little it carries."""
    gradients = [param.grad for param in module.parameters() if param.grad is not None]
    flat_P = torch.cat([gradient.flatten() for gradient in gradients])
    # all_reduce(SUM) over dp, P: every rank now holds the sum of all gradients
    (all_reduce or dist.all_reduce)(flat_P, group=group)
    for gradient, part in zip(gradients, flat_P.split([g.numel() for g in gradients])):
        gradient.copy_(part.view_as(gradient))


@dataclass
class Bucket:
    """Gradients that travel together: `flat` is what is sent, `views` its parts by parameter."""

    flat: torch.Tensor
    views: dict
    work: dist.Work = None


def fill_buckets(parameters, bucket_mb, reduce_dtype=None):
    """Buckets of one dtype and device, of at most bucket_mb MB unless one tensor is larger.

    Filled from the last parameter to the first, as backward finds their gradients: roughly, and
    only the speed depends on it.
    """
    groups, filling = [], {}
    for param in reversed(list(parameters)):
        dtype = reduce_dtype or param.dtype
        group = filling.get((param.dtype, param.device), [])
        if not group or sum(p.numel() for p in [*group, param]) * dtype.itemsize > bucket_mb * 1e6:
            group = filling[param.dtype, param.device] = []
            groups.append(group)
        group.append(param)
    buckets = []
    for group in groups:
        flat = group[0].new_zeros(sum(p.numel() for p in group), dtype=reduce_dtype)
        parts = flat.split([p.numel() for p in group])
        buckets.append(Bucket(flat, {p: part.view_as(p) for p, part in zip(group, parts)}))
    return buckets


class DataParallel(nn.Module):
    """A module whose gradients are summed over a group while backward still runs.

    Args: group; bucket_mb, the size of what is sent at once; overlap=False sends after backward
    instead; reduction, "sum", or "mean" as torch's DistributedDataParallel divides; reduce_dtype,
    in which gradients are added, by default their own; find_unused=True, where a parameter may
    get no gradient on some rank (it counts as zero there).

    Its parameters start as rank 0's. Call `finish_gradient_synchronization()` between the last
    backward and the step, and zero the gradients after it: what is left is summed once more.
    Without reduce_dtype a `.grad` is a view of its bucket, and zero_grad(set_to_none=False) leaves
    it one. Buffers are made equal at the start only, not before each forward.
    Source: Li et al., PyTorch Distributed, arXiv:2006.15704, section 3.2.
    """

    def __init__(
        self, module, group, bucket_mb=25, overlap=True,
        reduction="sum", reduce_dtype=None, find_unused=False,
    ):  # fmt: skip
        super().__init__()
        self.module, self.group = module, group
        self.overlap, self.find_unused = overlap, find_unused
        self.op = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG}[reduction]
        broadcast_parameters(module, group)
        self.names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        self.buckets = fill_buckets(self.names, bucket_mb, reduce_dtype)
        self.bucket_of = {param: bucket for bucket in self.buckets for param in bucket.views}
        self.synchronizing, self.arrived, self.launched = True, set(), 0
        for param in self.names:
            param.register_post_accumulate_grad_hook(self.ready)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def ready(self, param):
        """This backward's part of param.grad is in. Autograd calls it; so must whoever
        accumulates a gradient without autograd. Raises RuntimeError at a second time in a step."""
        if param.grad is None:  # backward owes it still: autograd calls hooks for a None as well
            return
        view = self.bucket_of[param].views[param]
        if param.grad is not view and param.grad.dtype == view.dtype:
            view.copy_(param.grad)
            param.grad = view  # from here on, backward adds into the bucket itself
        if not self.synchronizing:
            return
        if param in self.arrived:
            raise RuntimeError(
                f"{self.names[param]} got two gradients in one step: put no_sync() around all "
                "micro-batches but the last, and finish_gradient_synchronization() after it"
            )
        self.arrived.add(param)
        if self.overlap:
            self._launch_complete()

    def _launch_complete(self):
        # Q1.3 ** Ranks may see gradients arrive in different orders. Which buckets may leave now?
        #         hint: collectives meet in the order in which each rank calls them
        while self.launched < len(self.buckets):
            bucket = self.buckets[self.launched]
            if not bucket.views.keys() <= self.arrived:
                break
            self._launch(bucket)
            self.launched += 1
        # /Q1.3

    def _launch(self, bucket):
        for param, view in bucket.views.items():
            if param.grad is not view:
                view.copy_(param.grad)
        # all_reduce(SUM) over dp, one bucket: on its way while backward goes on
        bucket.work = dist.all_reduce(bucket.flat, op=self.op, group=self.group, async_op=True)

    @contextmanager
    def no_sync(self):
        """Around a micro-batch that is not the step's last: its gradients stay on this rank."""
        # Q1.4 ** Sums of sums may be taken in any order. Which order sends the least?
        #         hint: a gradient that was summed over ranks must not be summed again
        self.synchronizing = False
        try:
            yield
        finally:
            self.synchronizing = True
        # /Q1.4

    def finish_gradient_synchronization(self):
        """Send what has not left, wait for all of it: every `.grad` is then the reduced one.

        Raises RuntimeError, with names and rank, where a parameter got no gradient, before it
        waits for anyone.
        """
        missing = [param for param in self.names if param not in self.arrived]
        if missing and not self.find_unused:
            raise RuntimeError(
                f"rank {dist.get_rank(self.group)}: no gradient for "
                f"{', '.join(self.names[param] for param in missing)}; "
                "if that is meant, say find_unused=True"
            )
        for param in missing:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            self.ready(param)
        self._launch_complete()
        for bucket in self.buckets:
            bucket.work.wait()
            for param, view in bucket.views.items():
                if param.grad is not view:
                    param.grad.copy_(view)
        self.arrived.clear()
        self.launched = 0


def accumulate(parallel, micro_batches, valid):
    """Backward of K micro-batches, reduced once. Returns this rank's share of the loss."""
    *first, last = micro_batches
    with parallel.no_sync():
        loss = sum(loss_and_gradients(parallel, x_bS, y_bS, valid) for x_bS, y_bS in first)
    loss = loss + loss_and_gradients(parallel, *last, valid)
    parallel.finish_gradient_synchronization()
    return loss


# ── all-reduce by hand ───────────────────────────────────────────────────────────────────────


def _exchange(sends, receives, group):
    """Send and receive (tensor, group rank) pairs at once: in one batch, no order can deadlock."""
    operations = [dist.P2POp(dist.isend, x, group=group, group_peer=to) for x, to in sends]
    operations += [dist.P2POp(dist.irecv, x, group=group, group_peer=of) for x, of in receives]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def gather_and_broadcast(x, group):
    """Sum x over the group, in place, the obvious way: all to rank 0, which adds and sends back.
    Rank 0's link carries (n-1) · x each way while the others wait."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    if r:
        _exchange([(x, 0)], [], group)
        _exchange([], [(x, 0)], group)
        return
    part = torch.empty_like(x)
    for peer in range(1, n):
        _exchange([], [(part, peer)], group)
        x += part
    _exchange([(x, peer) for peer in range(1, n)], [], group)


def ring_all_reduce(x, group):
    """Sum x (any numel) over the group, in place: chunks go round, and every link is always busy.

    Rank r sends 2 · numel less two chunks, whatever n is. Source: Patarasu & Yuan, Bandwidth
    optimal all-reduce algorithms for clusters of workstations, JPDC 69 (2009).
    """
    n, r = dist.get_world_size(group), dist.get_rank(group)
    chunks = x.view(-1).tensor_split(n)  # some are empty where numel < n: they are not sent
    arriving = torch.empty_like(chunks[0])

    def pass_on(outgoing, incoming):
        _exchange(
            [(outgoing, (r + 1) % n)] if outgoing.numel() else [],
            [(incoming, (r - 1) % n)] if incoming.numel() else [],
            group,
        )

    # Q1.5 *** Each step, a rank sends one chunk on and adds one. Which, so that sums pile up?
    #          hint: what you sent last step is where your left neighbour's next one belongs
    for step in range(n - 1):
        mine, theirs = chunks[(r - step) % n], chunks[(r - step - 1) % n]
        pass_on(mine, arriving[: theirs.numel()])
        theirs += arriving[: theirs.numel()]
    # /Q1.5
    # Q1.6 *** Rank r now holds the whole sum of one chunk. Which, and how do the others get it?
    #          hint: the same journey, with copies instead of sums, beginning one chunk later
    for step in range(n - 1):
        mine, theirs = chunks[(r + 1 - step) % n], chunks[(r - step) % n]
        pass_on(mine, theirs)
    # /Q1.6


# ── proof ────────────────────────────────────────────────────────────────────────────────────


def after_backward(reduce, own_divisor=False, every_time=False):
    """A rung that calls reduce(model, group) once backward is over. Wrong on purpose: own_divisor
    takes the mean of the ranks' means; every_time sums again after each micro-batch."""

    def rung(model, group):
        def step(micro_batches, valid):
            if own_divisor:
                own = sum((y_bS != -100).sum() for _, y_bS in micro_batches)
                valid = own * dist.get_world_size(group)
            loss = 0
            for k, (x_bS, y_bS) in enumerate(micro_batches, start=1):
                loss = loss + loss_and_gradients(model, x_bS, y_bS, valid)
                if every_time or k == len(micro_batches):
                    reduce(model, group)
            return loss

        return step

    return rung


def during_backward(model, group, **options):
    """The rung that sends buckets while backward runs, in the last micro-batch alone."""
    parallel = DataParallel(model, group, bucket_mb=0.05, **options)
    return partial(accumulate, parallel)


def tiny_model(device, seed=0):
    """A twin for the proof, float64, the same from the same seed."""
    torch.manual_seed(seed)
    return LanguageModel(D=32, layers=2, heads=2, S=16).double().to(device)


def proof_batch(n, device, K=3):
    """Samples in n parts of K micro-batches each, as rank r has them in [r]: of unequal sizes,
    and with labels that do not count."""
    draw = torch.Generator().manual_seed(1)
    x_BS, y_BS = torch.randint(256, (2, n * K + n + 1, 16), generator=draw).to(device)
    y_BS[torch.rand(y_BS.shape, generator=draw) < torch.linspace(0, 0.9, len(y_BS))[:, None]] = -100
    parts = zip(x_BS.tensor_split(n), y_BS.tensor_split(n))
    return [list(zip(x.tensor_split(K), y.tensor_split(K))) for x, y in parts]


def serial(shares):
    """The twin: on one process, (loss, gradients) added up over (model, batch, divisor) shares."""
    losses, gradients = [], []
    for model, (x_bS, y_bS), divisor in shares:
        logits_bVS = model(x_bS).transpose(1, 2)
        lost_bS = F.cross_entropy(logits_bVS, y_bS, reduction="none")
        losses.append(lost_bS.sum() / divisor)
        gradients.append(torch.autograd.grad(losses[-1], list(model.parameters())))
    return sum(losses).detach(), [torch.stack(parts).sum(0) for parts in zip(*gradients)]


def off(found, wanted):
    """The largest relative error over pairs of tensors."""
    return max(relative_error(f, w) for f, w in zip(found, wanted))


@contextmanager
def storages_sent():
    """A dictionary, address to storage, of all tensors given to collectives inside."""
    seen = {}

    def look(real):
        def call(*args, **kwargs):
            storage = next(a for a in args if torch.is_tensor(a)).untyped_storage()
            seen[storage.data_ptr()] = storage
            return real(*args, **kwargs)

        return call

    with ExitStack() as patches:
        for name in ("all_reduce", "P2POp"):
            patches.enter_context(patch.object(dist, name, look(getattr(dist, name))))
        yield seen


def check(rung, group, device, own_start=False):
    """One step of a rung on this rank's micro-batches, beside the twin on all of them.

    Returns the loss of all ranks and the gradients, and the bytes that this rank sent, and that its
    gradients and what it sent them from take. own_start seeds every rank apart.
    """
    n, r = dist.get_world_size(group), dist.get_rank(group)
    batch = proof_batch(n, device)
    valid = valid_tokens(torch.cat([y for _, y in batch[r]]), group)
    model = tiny_model(device, seed=r if own_start else 0)
    step = rung(model, group)
    with Ledger() as ledger, storages_sent() as held:
        loss = step(batch[r], valid)
    # all_reduce(SUM) over dp, 1: the shares of the loss
    dist.all_reduce(loss, group=group)
    gradients = [param.grad for param in model.parameters()]
    for storage in (gradient.untyped_storage() for gradient in gradients):
        held[storage.data_ptr()] = storage
    sent = sum(ledger.sent.values())
    return [loss, *gradients], sent, sum(storage.nbytes() for storage in held.values())


def ladder(P, n, r):
    """(name, rung, bytes sent, bytes held) of each rung; P bytes of gradients, rank r of n."""
    ring, after = 2 * (n - 1) / n * P, after_backward
    yield "all_reduce_gradients", after(all_reduce_gradients), ring, P
    yield "all_reduce_flat", after(all_reduce_flat), ring, 2 * P
    yield "DataParallel, 3 micro-batches", during_backward, ring, P
    yield "DataParallel(overlap=False)", partial(during_backward, overlap=False), ring, P
    if n > 1:
        naive = partial(all_reduce_flat, all_reduce=gather_and_broadcast)
        by_hand = partial(all_reduce_flat, all_reduce=ring_all_reduce)
        chunks = [8 * len(chunk) for chunk in torch.empty(P // 8, device="meta").tensor_split(n)]
        # the first half of the journey sends all chunks but r + 1, the second all but r + 2
        two_chunks = chunks[(r + 1) % n] + chunks[(r + 2) % n]
        sent, held = (P, 2 * P) if r else ((n - 1) * P, 3 * P)
        yield "gather_and_broadcast, rank 0", after(naive), sent, held
        yield "ring_all_reduce", after(by_hand), 2 * P - two_chunks, 2 * P + chunks[0]


def proof(group, device):
    """The rows of the table: the ladder, and what it looks like to leave out one idea of it."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    batch, model = proof_batch(n, device), tiny_model(device)
    total = sum((y != -100).sum() for part in batch for _, y in part)
    whole = [torch.cat(tensors) for tensors in zip(*(b for part in batch for b in part))]
    wanted_loss, wanted = serial([(model, whole, total)])
    P = sum(param.nbytes for param in model.parameters())
    for name, rung, sent, held in ladder(P, n, r):
        found, sent_here, held_here = check(rung, group, device)
        error = off(found, [wanted_loss, *wanted])
        yield Row(name, error, (sent_here, sent), (held_here, held))

    own = tiny_model(device, seed=r)
    with Ledger() as ledger:
        broadcast_parameters(own, group)
    start_error = off(own.parameters(), model.parameters())
    passed_on = P if r < n - 1 else 0  # rank 0 sends, each passes it on, the last one keeps it
    yield Row("broadcast_parameters", start_error, (ledger.sent["broadcast"], passed_on))
    for name, rung, shares in wrong_on_purpose(batch, total, model) if n > 1 else ():
        (_, *gradients), _, _ = check(rung, group, device, own_start="apart" in name)
        predicted = off(serial(shares)[1], wanted)
        yield Row(name, off(gradients, wanted), wrong=predicted)


def wrong_on_purpose(batch, total, model):
    """(name, rung, shares): a rung without one idea, and the shares that it adds up instead."""
    n, device = len(batch), total.device
    counts = [sum((y != -100).sum() for _, y in part) for part in batch]
    alone = [tiny_model(device, seed=rank) for rank in range(n)]
    yield (
        "each rank seeded apart", after_backward(all_reduce_gradients),
        [(alone[rank], b, total) for rank, part in enumerate(batch) for b in part],
    )  # fmt: skip
    yield (
        "mean of the ranks' means", after_backward(all_reduce_gradients, own_divisor=True),
        [(model, b, n * count) for part, count in zip(batch, counts) for b in part],
    )  # fmt: skip
    yield (
        "every micro-batch is summed", after_backward(all_reduce_gradients, every_time=True),
        # of K = 3, what is summed after micro-batch k is summed again, n times, at each later one
        [(model, b, total / n ** (2 - k)) for part in batch for k, b in enumerate(part)],
    )  # fmt: skip


def overlap_order(group, device):
    """Marks of one step, in order: "gradient", "all_reduce" of a bucket, "wait" for one."""
    model, n = tiny_model(device), dist.get_world_size(group)
    batch = proof_batch(n, device)[dist.get_rank(group)]
    with Ledger() as ledger:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda _: ledger.mark("gradient"))
        step = during_backward(model, group)
        ledger.events.clear()
        step(batch[-1:], valid=torch.tensor(1.0, device=device))
    return [event.what for event in ledger.events]


# ── run ──────────────────────────────────────────────────────────────────────────────────────


class Flights:
    """When each gradient of a DataParallel arrived, and each of its buckets left and landed, in
    seconds; `clear()` before a step. The clock is the host's: on gloo it sees the network."""

    def __init__(self, parallel):
        self.gradients, self.buckets, self._launch = [], [], parallel._launch
        parallel._launch = self._timed_launch
        for param in parallel.names:
            param.register_post_accumulate_grad_hook(
                lambda _: self.gradients.append(time.perf_counter())
            )

    def _timed_launch(self, bucket):
        flight = [time.perf_counter(), None]
        self.buckets.append(flight)
        self._launch(bucket)
        land = lambda _: flight.__setitem__(1, time.perf_counter())
        bucket.work.get_future().then(land)

    def clear(self):
        self.gradients.clear()
        self.buckets.clear()

    def hidden(self):
        """The share of the buckets' time in flight that backward was still running, 0 to 1."""
        landed = self.gradients[-1]
        behind = sum(max(0.0, min(b, landed) - a) for a, b in self.buckets)
        return behind / max(sum(b - a for a, b in self.buckets), 1e-9)


def train_step(parallel, optimizer, batch, K, group):
    """One step on this rank's part of the batch, in K micro-batches. Returns the step's loss."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    x_bS, y_bS = (whole.tensor_split(n)[r] for whole in batch)
    valid = valid_tokens(y_bS, group)
    loss = accumulate(parallel, zip(x_bS.tensor_split(K), y_bS.tensor_split(K)), valid)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    # all_reduce(SUM) over dp, 1: the shares of the loss, for the reader
    dist.all_reduce(loss, group=group)
    return loss.item()


def build(bucket_mb, group, device):
    """The model of the run, its ranks seeded apart and brought together, and its optimizer."""
    torch.manual_seed(dist.get_rank(group))
    parallel = DataParallel(LanguageModel().to(device), group, bucket_mb)
    return parallel, torch.optim.AdamW(parallel.parameters(), lr=2e-3)


def train(args, group, device):
    """Train on text; print the loss beside the unigram entropy, and what a step sends."""
    text, (parallel, optimizer) = read_text(args.text, 0), build(args.bucket_mb, group, device)
    flights, n = Flights(parallel), dist.get_world_size(group)
    P = sum(param.nbytes for param in parallel.parameters())
    formula = 2 * (n - 1) / n * (P + 8 + 4)  # the gradients, the count of tokens, the loss
    say(f"\n{P // 4:,} parameters, {len(parallel.buckets)} buckets of {args.bucket_mb} MB; "
        f"unigram entropy of the text {unigram_entropy(text):.3f}")  # fmt: skip
    say("step   loss   tokens/s   sent/step     formula   hidden behind backward (medians of 10)")
    rates, shares, as_claimed = [], [], True
    for step in range(args.steps):
        batch = [whole.to(device) for whole in sample(text, step, args.batch, 64)]
        flights.clear()
        started = time.perf_counter()
        with Ledger() as ledger:
            loss = train_step(parallel, optimizer, batch, args.micro_batches, group)
        rates.append(args.batch * 64 / (time.perf_counter() - started))
        shares.append(flights.hidden())
        sent = sum(ledger.sent.values())
        as_claimed &= abs(sent - formula) < 0.5
        if step % 10 == 0 or step == args.steps - 1:
            rate, hidden = (statistics.median(recent[-10:]) for recent in (rates, shares))
            say(f"{step:4}{loss:7.3f}{rate:11,.0f}{sent:12,.0f}{formula:12,.0f}{hidden:10.0%}")
    weights = torch.cat([param.detach().flatten() for param in parallel.parameters()])
    digest = hashlib.sha256(weights.cpu().numpy().tobytes()).digest()[:6]
    digests = torch.tensor([*digest, *(-byte for byte in digest)], device=device)
    # all_reduce(MAX) over dp, 12: of each byte the largest and, negated, the smallest
    dist.all_reduce(digests, op=dist.ReduceOp.MAX, group=group)
    alike = torch.equal(digests[:6], -digests[6:])
    say(f"weights {digest.hex()} on {'every rank' if alike else 'rank 0, OTHERS ON OTHER RANKS'}")
    return 0 if alike and as_claimed else 1


def plot(args, group, device):
    """Draw one step's timeline for three bucket sizes: gradients above, buckets below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    text = read_text(args.text, 0)
    figure, axes = plt.subplots(3, figsize=(9, 7), layout="constrained", sharex=True)
    for bucket_mb, axis in zip((0.1, 0.5, 25), axes):
        parallel, optimizer = build(bucket_mb, group, device)
        flights = Flights(parallel)
        for step in range(3):  # the last is drawn: the first two warm up
            batch = [whole.to(device) for whole in sample(text, step, args.batch, 64)]
            dist.barrier(group=group)
            flights.clear()
            train_step(parallel, optimizer, batch, 1, group)
        start, N = flights.gradients[0], len(flights.buckets)
        ms = lambda seconds: [1e3 * (t - start) for t in seconds]
        axis.vlines(ms(flights.gradients), 0.2, 1, color="#0b3c5d", linewidth=1)
        axis.axvline(ms(flights.gradients)[-1], color="k", linestyle=":", linewidth=1)
        for k, (left, landed) in enumerate(map(ms, flights.buckets)):
            axis.barh(-2 * (k + 0.5) / N, landed - left, min(1.4 / N, 0.3), left, color="#f2a541")
        axis.set_yticks([0.6, -1], ["gradients", "buckets\nin flight"])
        hidden = f"{flights.hidden():.0%} of their flight is hidden"
        title = f"buckets of {bucket_mb} MB: {N}; {hidden}"
        axis.set_title(title, loc="left", fontsize=10)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[-1].set_xlabel("ms since the first gradient; dotted: the last one, backward is over")
    if dist.get_rank() == 0:
        figure.savefig(args.plot, dpi=110)
        print(f"drew {args.plot}")


def main(args, device):
    """Prove, then train (or draw); 0 if everything is as claimed."""
    group = dist.group.WORLD
    say(f"01 data parallel · {dist.get_world_size()} ranks · {dist.get_backend()} · {device.type}")
    broken = prove(list(proof(group, device)), device)
    order = overlap_order(group, device)
    last = len(order) - 1 - order[::-1].index("gradient")
    early = order.index("all_reduce") < last < order.index("wait")
    first = order[: order.index("all_reduce")].count("gradient")
    say(f"\noverlap: the first bucket of 0.05 MB left after {first} of {order.count('gradient')} "
        f"gradients, and nobody waited before the last{'' if early else ': NOT AS CLAIMED'}")
    broken |= not early
    if args.plot:
        plot(args, group, device)
    elif args.steps:
        broken |= train(args, group, device)
    return int(broken)


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    if args.batch < 1 or args.micro_batches < 1:
        given = f"--batch {args.batch} --micro-batches {args.micro_batches}"
        raise ValueError(f"{given}: each must be at least 1")
    if not args.bucket_mb > 0:
        raise ValueError(f"--bucket-mb {args.bucket_mb}: more than 0 is needed, such as 0.5")
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
    parser = arguments(__doc__, ranks=4, steps=60)
    parser.add_argument("--batch", type=int, default=32, help="samples of 64 bytes in a step")
    parser.add_argument("--micro-batches", type=int, default=1, help="of each rank in a step")
    parser.add_argument("--bucket-mb", type=float, default=0.5, help="MB that are sent at once")
    parser.add_argument("--plot", metavar="PNG", help="draw a step's timeline instead of training")
    launch(main, parser.parse_args(), validate)
