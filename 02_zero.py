"""02 · ZeRO: shard what data parallel ranks copy

Each data parallel rank holds a copy of the parameters, of the gradients, and of what the optimizer
remembers (its state: AdamW's two moments and fp32 copy). ZeRO cuts them into n shards, and a rank
keeps one of them. Stage 1 cuts the state, stage 2 the gradients too, stage 3 the parameters too. A
rank steps its shard alone. Whole parameters are gathered from all ranks: in stages 1 and 2 after
each step, in stage 3 whenever a block needs its own, and they are freed after use.

                             a rank holds, of P elements       a rank sends in a step of
                             parameters   gradients   state    m micro-batches: P (n-1)/n times
    stage 0, data parallel   all          all         all      2
    stage 1, ZeRO-1          all          all         P/n      2
    stage 2, ZeRO-2          all          P/n         P/n      1 + m
    stage 3, ZeRO-3, FSDP    P/n          P/n         P/n      3 m
    bytes of an element      2            2           12       in bf16, with fp32 AdamW

A gather of parameters sends P (n-1)/n elements, and so does a reduction of gradients. Stage 3
gathers twice in each micro-batch, for forward and for backward, and reduces once.

    python 02_zero.py --stage 3              prove all stages, train with one of them
    torchrun --nproc-per-node 4 02_zero.py   the same, started by torchrun

Guide: FSDP and ZeRO · DeepSpeed ZeRO stages · FSDP1 vs FSDP2 · FSDP eviction · Overlap and
prefetch · Mixed precision. Its table of stages contradicts its own 16 bytes: 70 billion parameters
on 16 ranks take 1,120, 333, 201 and 70 GB. ZeRO does not replicate state: a lost rank's shard
exists nowhere else, unless another group of ranks holds the same shards (hybrid).

Questions  Q2.1 * how long is a row?         Q2.2 ** whose squares make the norm?
           Q2.3 ** where does the next micro-batch's gradient go?
           Q2.4 ** which bucket may leave?   Q2.5 *** which unit is gathered during computation?
"""
# n ranks · r this rank · m micro-batches · B sequences · b sequences of this rank
# S tokens of a sequence · D width · V vocabulary · P parameters

# A small p is this rank's part of P: an (n, p) matrix has a row for each rank.

import signal
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import partial
from itertools import accumulate

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads ends it without a trace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

# ── the serial twin: a byte from the byte before ─────────────────────────────────────────────


class Block(nn.Module):
    """An MLP on a normed copy of the residual stream: (b, S, D) to (b, S, D)."""

    def __init__(self, D):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x_bSD):
        return x_bSD + self.down(F.gelu(self.up(self.norm(x_bSD))))


class LanguageModel(nn.Module):
    """Bytes (b, S) to logits of the next byte (b, S, V). ZeRO needs no attention to be shown."""

    def __init__(self, D=128, layers=4, V=256):
        super().__init__()
        self.token = nn.Embedding(V, D)
        self.blocks = nn.Sequential(*(Block(D) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, x_bS):
        return self.head(self.norm(self.blocks(self.token(x_bS))))


def loss_share(logits_bSV, y_bS, num_labels):
    """This rank's share of the mean loss over the num_labels labels of the step: the sum over its
    own labels, divided by num_labels. The shares of all ranks and micro-batches add up to the mean,
    so gradients are summed and never averaged. A label of -100 does not count."""
    logits = logits_bSV.flatten(0, 1)
    at_least_fp32 = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss_sum = F.cross_entropy(at_least_fp32, y_bS.flatten(), reduction="sum")
    return loss_sum / max(num_labels, 1)


# ── ZeRO by hand: three stages are one loop that differs in three ifs ────────────────────────


class BlockShard:
    """A block's parameters as one vector, filled up with zeros and cut into n equal rows. Rank r
    keeps row r. For example a weight of 4 elements and a bias of 3, on 3 ranks:

                           rank 0                rank 1                rank 2
        row r, `own`       w0 w1 w2              w3 b0 b1              b2 0 0
        after gather()     w0 w1 w2 w3 b0 b1 b2  w0 w1 w2 w3 b0 b1 b2  w0 w1 w2 w3 b0 b1 b2
        full gradients     1 1 1 1 1 1 1         2 2 2 2 2 2 2         4 4 4 4 4 4 4
        after reduce()     7 7 7                 7 7 7                 7 0 0

    Each rank's gradients come from its own batch. A rank's optimizer steps `own` alone, so a rank
    has the state of 3 elements, not of 7."""

    def __init__(self, block, group):
        self.params, self.group = list(block.parameters()), group
        self.shapes, self.n = [param.shape for param in self.params], dist.get_world_size(group)
        rows_np = self.pack([param.detach() for param in self.params])
        self.own = nn.Parameter(rows_np[dist.get_rank(group)].clone())

    def pack(self, tensors):
        """Tensors of the block's shapes as the matrix (n, p)."""
        vector_P = torch.cat([tensor.flatten() for tensor in tensors])
        return F.pad(vector_P, (0, -len(vector_P) % self.n)).view(self.n, -1)

    def gather(self):
        """Make the block's parameters whole: views of the gathered rows."""
        rows_np = self.own.new_empty(self.n, len(self.own))
        # all_gather over dp, p from each: every rank now holds all rows
        dist.all_gather_single(rows_np.view(-1), self.own.detach(), group=self.group)
        start = 0
        for param, shape in zip(self.params, self.shapes):
            param.data = rows_np.view(-1)[start : start + shape.numel()].view(shape)
            start += shape.numel()

    def free(self):
        """Drop the whole parameters; row r stays."""
        for param in self.params:
            param.data = self.own.new_empty(0)

    def reduce(self):
        """Sum the gradients over ranks into the gradient of row r, and drop the whole gradients."""
        rows_np, sum_p = self.pack([param.grad for param in self.params]), self.own.new_empty(0)
        sum_p.resize_(len(self.own))
        # reduce_scatter(SUM) over dp, P: rank r now holds the sum of all rows r
        dist.reduce_scatter_single(sum_p, rows_np.view(-1), group=self.group)
        self.own.grad = sum_p if self.own.grad is None else self.own.grad + sum_p
        for param in self.params:
            param.grad = None


def step_by_hand(stage, blocks, shards, optimizer, micro_batches, num_labels):
    """A training step of ZeRO-1, 2 or 3 on this rank's micro-batches. The optimizer has this rank's
    rows. Returns this rank's share of the loss.

    Forward keeps a block's input alone, and backward computes the block again. ZeRO does not ask
    for this: it makes visible when a block needs its parameters. The hooks below keep activations.
    """
    loss = 0.0
    for x, y_bS in micro_batches:
        inputs = []
        for block, shard in zip(blocks, shards):
            inputs.append(x)
            if stage == 3:
                shard.gather()
            with torch.no_grad():
                x = block(x)
            if stage == 3:
                shard.free()
        logits_bSV = x.requires_grad_()
        share = loss_share(logits_bSV, y_bS, num_labels)
        share.backward()
        loss, d_x = loss + share.detach(), logits_bSV.grad
        for block, shard, x in reversed([*zip(blocks, shards, inputs)]):
            if stage == 3:
                shard.gather()
            x = x.detach().requires_grad_(x.is_floating_point())  # bytes have no gradient
            block(x).backward(d_x)
            d_x = x.grad
            if stage >= 2:
                shard.reduce()
            if stage == 3:
                shard.free()
    for shard in shards:
        if stage == 1:
            shard.reduce()
    optimizer.step()
    for shard in shards:
        if stage < 3:
            shard.gather()  # every rank stepped another row
    optimizer.zero_grad()
    return loss


# ── the same by hooks: two collectives that begin now and are waited for later ───────────────
#
# The loop above takes a list of blocks, waits for each collective, and computes each block twice.
# The rest of the lesson takes any module, and computes while collectives are under way. Hooks call
# it: autograd runs them when a gradient is there, and modules run them around their forward.


def start_all_gather(rows_np, row_p, group):
    """Begin to fill rows_np with every rank's row. Returns a function that waits for the rows.
    Without a group there is one rank."""
    if not group:
        rows_np[0].copy_(row_p)
        return lambda: None
    # all_gather over dp, p from each: every rank will hold all rows
    work = dist.all_gather_single(rows_np.view(-1), row_p, group=group, async_op=True)

    def wait(sent=row_p):  # the argument keeps the row alive until it has been sent
        work.wait()

    return wait


def start_reduce_scatter(rows_np, group):
    """Begin to add up every rank's row r on rank r. Returns a function that waits for the sum.

    gloo's own reduce-scatter blocks, and sends twice what a ring sends. An all-to-all and a local
    sum send the least. The local sum rounds once, where a chain of sums rounds n - 1 times.
    """
    if not group:
        return lambda: rows_np[0]
    if dist.get_backend(group) == "nccl":
        sum_p = rows_np.new_empty(rows_np.shape[1])
        # reduce_scatter(SUM) over dp, P: rank r will hold the sum of all rows r
        work = dist.reduce_scatter_single(sum_p, rows_np.view(-1), group=group, async_op=True)
    else:
        parts_np = torch.empty_like(rows_np)
        # all_to_all over dp, P: rank r will hold all rows r, and add them
        work = dist.all_to_all_single(parts_np, rows_np, group=group, async_op=True)

    def wait(sent=rows_np):
        work.wait()
        return sum_p if dist.get_backend(group) == "nccl" else parts_np.sum(0)

    return wait


# ── the shard: what all stages are made of ───────────────────────────────────────────────────


@dataclass
class Piece:
    """The elements start:stop of a flattened parameter that stand in row r, at `where`. An
    optimizer steps `tensor`: these elements, or a copy of them in fp32."""

    index: int  # of the parameter in its shard
    param: nn.Parameter
    start: int
    stop: int
    where: slice
    tensor: torch.Tensor = None


def cut(shapes, n, layout):
    """Where each tensor stands in the (n, p) matrix: p, and (column, width, start) of each tensor.

    "flat", as FSDP1, puts all tensors end to end and cuts once: at most n - 1 zeros fill the last
    row, and a rank has any run of elements. "per_parameter", as FSDP2, cuts every tensor between
    rows of its dimension 0: zeros fill each tensor's last part, and parts of row r stand side by
    side. So a tensor has columns of some width; its first element stands `start` elements further.
    """
    # Q2.1 * n ranks get equal rows of a tensor whose length n may not divide. How long is a row?
    #        hint: 19 elements over 8 ranks: rows of 3; 5 zeros fill the last two
    row_length = lambda length: -(-length // n)
    if layout == "flat":
        *starts, numel = [0, *accumulate(shape.numel() for shape in shapes)]
        return row_length(numel), [(0, row_length(numel), start) for start in starts]
    widths = [row_length(shape[0] if shape else 1) * shape[1:].numel() for shape in shapes]
    # /Q2.1
    *columns, p = [0, *accumulate(widths)]
    return p, [(column, width, 0) for column, width in zip(columns, widths)]


class Shard:
    """Parameters of one dtype as a matrix (n, p): rank r keeps row r, and gathers the others.

    Args: group, whose ranks have a row each (None: one row, n = 1); replicate_group, whose ranks
    have the same row and add up its gradient; layout, of `cut`; param_dtype, of what is gathered,
    and reduce_dtype, of what is summed. `own` is row r (p,), and `grad` the sum of its gradients
    since the last zero_grad, or None. `used` counts how many gradients of each parameter are in
    that sum. `rows` is the gathered matrix. `full` has the parameters: views of `rows` in the
    layout "flat", else copies of its columns.
    """

    def __init__(self, params, group, replicate_group=None, layout="flat",
                 param_dtype=None, reduce_dtype=None):  # fmt: skip
        self.params, self.group, self.replicate_group = list(params), group, replicate_group
        self.n, self.r = (dist.get_world_size(group), dist.get_rank(group)) if group else (1, 0)
        self.reduce_dtype, self.shapes = reduce_dtype, [param.shape for param in self.params]
        self.p, self.places = cut(self.shapes, self.n, layout)
        self.parts = [list(self._pieces(r)) for r in range(self.n)]
        self.pieces = self.parts[self.r]
        rows_np = self.pack([param.detach() for param in self.params])
        self.own, self.grad, self.used = rows_np[self.r], None, 0
        self.state_dtype = torch.promote_types(self.own.dtype, torch.float32)
        self.rows, self.is_flat = rows_np.to(param_dtype or rows_np.dtype), layout == "flat"
        views = self.unpack(self.rows)
        self.full = views if self.is_flat else [view.clone() for view in views]
        self.gathering, self.reducing, self.arrived, self.is_whole = None, None, set(), True
        self.is_trained, self.summed = self.params[0].requires_grad, set()
        for param, full in zip(self.params, self.full):
            param.data, param.shard = full, self
        self.accumulators = watch_gradients(self) if self.is_trained else []

    def _pieces(self, r):
        """The piece of each parameter that has elements in row r."""
        for i, (column, width, begin) in enumerate(self.places):
            ends = (r * width - begin, (r + 1) * width - begin)
            start, stop = (min(max(end, 0), self.shapes[i].numel()) for end in ends)
            if start < stop:  # padding is in no piece, so it gets no state, norm or checkpoint
                at = column + begin + start - r * width
                yield Piece(i, self.params[i], start, stop, slice(at, at + stop - start))

    def pack(self, tensors, *last):
        """Tensors of the parameters' shapes as the matrix (n, p), `last` at the end of each row."""
        flats, parts = [tensor.reshape(-1) for tensor in tensors], []
        zeros_p = flats[0].new_zeros(self.p)
        for pieces in self.parts:
            filled = 0
            for x in pieces:
                parts += [zeros_p[: x.where.start - filled], flats[x.index][x.start : x.stop]]
                filled = x.where.stop
            parts += [zeros_p[: self.p - filled], *last]
        return torch.cat(parts).view(self.n, -1)

    def unpack(self, rows_np):
        """The tensors of a packed (n, p): views of it in the layout "flat", else copies."""
        cut = lambda column, width: rows_np[:, column : column + width].reshape(-1)
        return [cut(column, width)[start : start + shape.numel()].view(shape)
                for shape, (column, width, start) in zip(self.shapes, self.places)]  # fmt: skip

    def gather(self):
        """Begin to make the parameters whole."""
        if not self.gathering and not self.is_whole:
            _resize(self.rows, self.rows.numel())
            own = self.own.to(self.rows.dtype)
            self.gathering = start_all_gather(self.rows, own, self.group)

    def wait(self):
        """Wait until the parameters are whole."""
        if not self.gathering:
            return
        self.gathering()
        self.gathering, self.is_whole = None, True
        if not self.is_flat:
            for full, part in zip(self.full, self.unpack(self.rows)):
                _resize(full, full.numel())
                full.copy_(part)
            _resize(self.rows, 0)
        for param, full in zip(self.params, self.full):
            param.data = full

    def free(self):
        """Keep row r alone: empty the storages of the whole parameters.

        Autograd saved views of these storages in forward, and keeps them for backward. A view does
        not own memory, its storage does. So the storage is resized to nothing, and the views stay.
        Before backward reads a view, gather() resizes the storage again and fills it with the same
        values: no step comes between. Autograd's check for changed tensors does not notice, because
        the collective writes through another tensor than the saved one.
        """
        self.wait()
        if self.is_whole:
            for param in self.params:
                param.data = self.rows.new_empty(0)
            for tensor in (self.rows, *self.full):
                _resize(tensor, 0)
        self.is_whole = False

    def reduce(self):
        """Begin to sum the gradients over ranks, and free them.

        A rank without a gradient of a parameter sends zeros, because another rank may have one. If
        no rank has one, the sum is not a gradient of zeros: the parameter must not decay. So each
        row ends with a 1 or 0 for each parameter, and the same sum counts the gradients.
        """
        for i in range(len(self.params)):
            drop_if_cleared(self, i)
        new = [new_gradient(param) for param in self.params]
        dtype = self.reduce_dtype or self.rows.dtype
        zero = torch.zeros(1, dtype=dtype, device=self.own.device)
        full = [zero.expand(shape.numel()) if grad is None else grad.to(dtype)
                for grad, shape in zip(new, self.shapes)]  # fmt: skip
        used = torch.tensor([float(grad is not None) for grad in new]).to(zero)
        self.reducing = start_reduce_scatter(self.pack(full, used), self.group)
        self.arrived.clear()
        mark_as_reduced(self)

    def finish_reduce(self):
        """Wait for the sum of row r, and take it in."""
        sum_p, self.reducing = self.reducing(), None
        if self.replicate_group:
            # all_reduce(SUM) over the replicas, p: the shards of all groups add up
            dist.all_reduce(sum_p, group=self.replicate_group)
        sum_p, used = sum_p[: self.p], sum_p[self.p :]
        # Q2.3 ** The full gradient is gone. The next micro-batch brings another one. Where does the
        #         sum of the next micro-batch go?
        #         hint: three micro-batches of 1, 2 and 4 make 7
        if self.grad is None:
            self.grad = sum_p.to(torch.promote_types(sum_p.dtype, self.own.dtype))
        else:
            self.grad += sum_p
        # /Q2.3
        self.used = self.used + used

    def spread(self, row_p):
        """Every rank's row, as tensors of the parameters' shapes on each rank."""
        rows_np = row_p.new_empty(self.n, len(row_p))
        start_all_gather(rows_np, row_p, self.group)()
        return self.unpack(rows_np)


def _resize(tensor, numel):
    storage, nbytes = tensor.untyped_storage(), numel * tensor.element_size()
    if storage.nbytes() != nbytes:
        if not storage.resizable():
            raise RuntimeError("numpy has a weight that ZeRO-3 must free: hand it a clone")
        storage.resize_(nbytes)


# ── stages 0, 1, 2: gradients are reduced after backward, or while it runs ───────────────────


class Reductions:
    """Reductions under way, at most two: to send one is to wait for the one before.

    All ranks must call collectives in one order. A collective has no name: call number i of one
    rank meets call number i of another. If the first sums bucket A and the second bucket B, the
    result is garbage or a hang. Autograd promises no order of gradients, and ranks may take
    different branches. So the order of reductions never follows the gradients: it is a list.
    """

    def __init__(self):
        self.in_flight = None

    def send(self, shard):
        shard.reduce()
        self.wait()
        self.in_flight = shard

    def wait(self):
        if self.in_flight:
            self.in_flight.finish_reduce()
        self.in_flight = None

    def drop(self):
        """Forget the reduction in flight of a backward that ended in an exception."""
        if self.in_flight:
            self.in_flight.reducing()
        self.in_flight = None


class Buckets(Reductions):
    """The shards of stages 0 to 2: reduced all at once, or in stage 2 as backward completes them.

    No bucket is ready before the bucket before it. A bucket is complete when autograd has found all
    of its gradients. On one rank bucket 2 may be complete first, on another bucket 1. Bucket 2 then
    waits, and leaves right after bucket 1. What is incomplete when backward ends leaves then.
    """

    def __init__(self, shards):
        super().__init__()
        self.shards, self.left = shards, None

    def ready(self, param):
        """Called by autograd when it has accumulated a parameter's gradient."""
        if self.left is None:  # the first gradient of a backward
            self.left = list(self.shards)
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        param.shard.arrived.add(param)
        # Q2.4 ** Gradients arrive one by one, and not in the same order on every rank. Which
        #         buckets may leave now?
        #         hint: a bucket that is complete waits for the buckets before it
        while self.left and len(self.left[0].arrived) == len(self.left[0].params):
            self.send(self.left.pop(0))
        # /Q2.4

    def finish(self):
        """Send what has not left, and wait for all sums."""
        for shard in self.shards if self.left is None else self.left:
            self.send(shard)
        self.wait()
        self.left = None

    def catch_up(self):
        """Reduce the gradients that no backward of this rank reduced. A rank that had no backward
        joins the others without gradients."""
        params = (param for shard in self.shards for param in shard.params)
        reduced = any(shard.summed for shard in self.shards)
        if not reduced or any(new_gradient(param) is not None for param in params):
            self.finish()

    def drop(self):
        super().drop()
        for shard in self.shards:
            shard.arrived.clear()
        self.left = None


# ── stage 3: parameters are whole only while their unit computes ─────────────────────────────


class Window(Reductions):
    """The units under one root, in the order in which forward and backward enter them. A unit is a
    module whose parameters are gathered and freed together, such as a block.

    The first pass learns the order, and compares it over ranks at every unit. Later passes follow
    it. A rank that skips a unit still takes part in the collectives of this unit: `enter` visits
    every unit in between. So ranks may skip different units, and what they skip has no gradient.
    A rank that skips a whole backward keeps the others waiting; the launcher says where each stood.

    Prefetch: when a unit is whole and about to compute, the gather of the next unit begins. It runs
    while the unit computes. Two units are whole at a time, beside the root, and no more.

    In backward, a unit is done when another unit begins that it does not contain: autograd runs the
    operations of a later module first. Then the unit's gradients are sent, its parameters freed.
    """

    def __init__(self, root, units, group):
        super().__init__()
        self.root, self.units, self.group = root, units, group
        self.orders, self.known = {"forward": [], "backward": []}, set()
        self.at, self.open, self.in_backward = 0, [], False

    def begin_forward(self):
        """Start a pass at the root. First clean up after a pass that ended in an exception."""
        self.drop()
        self.at, self.open, self.in_backward = 0, [], False
        for unit in self.units:
            unit.free()
            if any(param.numel() for shard in unit.shards for param in shard.params):
                raise RuntimeError(f"{unit.name} has whole parameters: write them inside "
                                   "gathered(), and run the model outside")  # fmt: skip
        for direction in self.orders.keys() - self.known:
            self.orders[direction].clear()

    def enter_backward(self, unit):
        """Called by autograd before it computes the gradients of a unit's operations."""
        if not self.in_backward:
            self.at, self.in_backward = 0, True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        if unit not in self.open:
            self.enter(unit, "backward")

    def enter(self, unit, direction):
        """Make a unit whole that is about to compute. Visit the units that this pass skipped."""
        order = self.orders[direction]
        if direction not in self.known:
            self._compare(unit, direction)
            order.append(unit)
        elif unit not in order[self.at :]:
            expected = order[self.at].name if self.at < len(order) else "nothing more"
            raise RuntimeError(
                f"rank {dist.get_rank(self.group)}: {direction} entered {unit.name}, expected "
                f"{expected}: a pass may skip units of the first pass, not repeat or reorder them"
            )
        while self.visit(direction) is not unit:
            pass

    def visit(self, direction):
        """Make the next unit of the order whole, and begin to gather the one after it."""
        order = self.orders[direction]
        unit, self.at = order[self.at], self.at + 1
        for other in list(self.open):
            if unit not in other.inside and other not in unit.inside:
                self.close(other)
        self.open.append(unit)
        unit.gather()
        for shard in unit.shards:
            shard.wait()
        # Q2.5 *** This unit is about to compute. Which gather may be in flight during that time?
        #          hint: the last pass went through the units in the order of this one
        if direction in self.known and unit.prefetch and self.at < len(order):
            order[self.at].gather()
        # /Q2.5
        return unit

    def close(self, unit):
        """Free a unit that has computed; in backward, send its gradients first."""
        self.open.remove(unit)
        for shard in unit.shards if self.in_backward else ():
            if shard.is_trained:
                self.send(shard)
        unit.free()

    def leave(self, direction):
        """End a pass: visit the units that were skipped at its end, and close all."""
        while self.at < len(self.orders[direction]):
            self.visit(direction)
        for unit in self.open[::-1]:
            self.close(unit)
        self.known.add(direction)

    def finish(self):
        """Called by autograd when a backward is over."""
        self.leave("backward")
        self.wait()
        self.in_backward = False

    def _compare(self, unit, direction):
        places = [(direction, unit) for direction in self.orders for unit in self.units]
        shards = [shard for unit in self.units for shard in unit.shards]
        here = torch.tensor([places.index((direction, unit))], device=shards[0].own.device)
        all_n = here.new_empty(dist.get_world_size(self.group))
        # all_gather over dp, 1 from each, in the first pass alone: where does every rank stand?
        dist.all_gather_single(all_n, here, group=self.group)
        if len(all_n.unique()) > 1:
            stands = [(rank, *places[i]) for rank, i in enumerate(all_n.tolist())]
            text = ", ".join(f"rank {rank} at {way} of {unit.name}" for rank, way, unit in stands)
            raise RuntimeError(f"ranks disagree on which unit comes next: {text}")


class Unit:
    """A module whose parameters are gathered and freed together. Hooks tell its window when the
    module's forward begins and ends, and when backward reaches a tensor that it returned."""

    def __init__(self, module, shards, prefetch):
        self.module, self.shards, self.prefetch = module, shards, prefetch
        self.inside, self.window, self.name = _units(module), None, None
        hooked = {part for unit in self.inside for part in unit.module.modules()}
        for part in set(module.modules()) - hooked:
            part.register_forward_hook(self._watch)
        module.register_forward_pre_hook(self._before_forward)
        module.register_forward_hook(self._after_forward)
        module.register_state_dict_pre_hook(partial(refuse_unless_whole, self))
        module.register_load_state_dict_pre_hook(partial(refuse_unless_whole, self))

    def gather(self):
        for shard in self.shards:
            shard.gather()

    def free(self):
        for shard in self.shards:
            shard.free()

    def _before_forward(self, module, inputs):
        if _in_backward():  # a checkpoint computes the unit again
            self.window.enter_backward(self)
            return
        if self is self.window.root:
            self.window.begin_forward()
        self.window.enter(self, "forward")

    def _after_forward(self, module, inputs, output):
        if _in_backward():
            return
        if self is self.window.root:
            self.window.leave("forward")
        elif self in self.window.open:
            self.window.close(self)

    def _watch(self, module, inputs, output):
        """Backward may reach the unit by any tensor that one of its modules returned."""
        for x in _tensors(output):
            base = x._base if x._is_view() else x  # what is written into a view goes past its node
            for node in {x.grad_fn, base.grad_fn} - {None}:
                node.register_prehook(self._before_backward)

    def _before_backward(self, gradients):
        if torch.is_grad_enabled():
            raise RuntimeError("stage 3 frees parameters that create_graph=True would save: use a "
                               "stage below 3 for gradients of gradients")  # fmt: skip
        self.window.enter_backward(self)

    def __deepcopy__(self, memo):
        raise RuntimeError("ZeRO-3 cannot copy a model: copy its state_dict() inside gathered()")


def _in_backward():
    return torch._C._current_graph_task_id() >= 0


def _tensors(output):
    """All tensors in what a module returns: in lists, dictionaries and dataclasses."""
    for leaf in tree_leaves(output):
        if torch.is_tensor(leaf):
            yield leaf
        elif is_dataclass(leaf):
            yield from _tensors(vars(leaf))


def _units(module):
    return [part.zero_unit for part in module.modules() if hasattr(part, "zero_unit")]


def fully_shard(module, group, layout="flat", replicate_group=None, prefetch=True,
                param_dtype=None, reduce_dtype=None):  # fmt: skip
    """Make a module a unit of ZeRO-3, in place: its parameters, less those of units inside it, are
    sharded over `group`, gathered just before use and freed after. Returns the module.

    Call it on the inner modules first and on the root last, as torch's fully_shard. Outside forward
    and backward the parameters are empty: see `gathered`. Other arguments: see `Shard`. Raises
    ValueError. Sources: Rajbhandari et al., arXiv:1910.02054, section 5.3; Zhao et al.,
    arXiv:2304.11277, section 3.
    """
    if hasattr(module, "zero_unit"):
        raise ValueError(f"{type(module).__name__} is a unit already")
    if layout not in ("flat", "per_parameter"):
        raise ValueError(f"layout {layout!r}: use 'flat' or 'per_parameter'")
    inside = {shard for unit in _units(module) for shard in unit.shards}
    kinds = defaultdict(list)
    for name, param in module.named_parameters():
        shard = getattr(param, "shard", None)
        if shard is None:
            kinds[param.dtype, param.requires_grad].append(param)
        elif shard not in inside:
            raise ValueError(f"{name} belongs to another unit too: shard what contains both")
    options = (group, replicate_group, layout, param_dtype, reduce_dtype)
    shards = [Shard(params, *options) for params in kinds.values()]
    agree_on(shards, describe, module.named_parameters())
    unit = Unit(module, shards, prefetch)
    module.zero_unit = unit
    window = Window(unit, _units(module), group)
    names = {part: name or "the root" for name, part in module.named_modules()}
    for each in window.units:
        each.window, each.name = window, names[each.module]
    for shard in shards:
        shard.own, shard.unit = shard.own.clone(), unit
        shard.free()
    return module


@contextmanager
def gathered(module):
    """Make every parameter of the units whole inside a `with` block, to be read, saved or loaded.
    What is written is kept, also if an exception ends the block. At its end the block raises
    Disagreement if ranks have written different values."""
    shards = [shard for unit in _units(module) for shard in unit.shards]
    for shard in shards:
        for param, full in zip(shard.params, shard.spread(shard.own)):
            param.data = full
    try:
        yield module
        agree_on(shards, digest, module.named_parameters())
    finally:
        for shard in shards:
            shard.own.copy_(shard.pack([param.detach() for param in shard.params])[shard.r])
            for param in shard.params:
                param.data = shard.rows.new_empty(0)


# ── the optimizer of all stages ──────────────────────────────────────────────────────────────


class ZeroOptimizer(torch.optim.Optimizer):
    """A torch.optim class whose state, gradients and parameters are sharded.

    Args: param_groups, as torch's, each a dictionary with its own "group", the ranks that share it,
    and if it is hybrid a "replicate_group"; stage, 0 to 3 (3 needs modules given to `fully_shard`);
    bucket_mb, of what is sent at once, and reduce_dtype, that gradients are summed in, in stages 0
    to 2; kwargs, of the class.

    16-bit parameters get an fp32 copy, which is stepped. Gradients are summed over ranks, never
    averaged: by every backward in stages 2 and 3, at step or clip_grad_norm in stages 0 and 1.
    Raises ValueError. Source: Rajbhandari et al., arXiv:1910.02054, section 5.
    """

    def __init__(self, param_groups, optimizer_class, stage=1, bucket_mb=25, reduce_dtype=None,
                 **kwargs):  # fmt: skip
        if stage not in range(4):
            raise ValueError(f"stage {stage!r}: use 0, 1, 2 or 3")
        if {each.__name__ for each in optimizer_class.__mro__}.isdisjoint(ELEMENT_WISE):
            raise ValueError(f"{optimizer_class.__name__} needs whole tensors, a shard is a part "
                             f"of one: use {', '.join(ELEMENT_WISE)}")  # fmt: skip
        defaults = optimizer_class([nn.Parameter(torch.empty(1))], **kwargs).defaults
        super().__init__(param_groups, defaults)
        self.stage = stage
        self.owner, self.names = {}, {}  # a parameter's group, and its name
        for i, each in enumerate(self.param_groups):
            for k, param in enumerate(each["params"]):
                self.owner[param] = i
                self.names[param] = each.get("param_names", {k: f"{i}.{k}"})[k]
        self.index = {param: i for i, param in enumerate(self.owner)}
        self.frozen = [param for param in self.owner if not param.requires_grad]
        trained = [param for param in self.owner if param.requires_grad]
        cut_buckets = partial(self._buckets, bucket_mb, reduce_dtype)
        self.shards = list((self._shards_of_units if stage == 3 else cut_buckets)(trained))
        groups = ((f"group {self.owner[x]}, {name}", x) for x, name in self.names.items())
        agree_on(self.shards, describe, groups)
        for shard in self.shards:  # each has an optimizer of its own, with the same groups
            groups = [{**self._options(each), "params": []} for each in self.param_groups]
            for piece in shard.pieces:
                piece.tensor = shard.own[piece.where].to(shard.state_dtype)
                groups[self.owner[piece.param]]["params"].append(piece.tensor)
            shard.optimizer = optimizer_class(groups, **kwargs)
        if stage == 3:
            self.reductions = list(dict.fromkeys(shard.unit.window for shard in self.shards))
            return
        self.reductions = [Buckets(self.shards)]
        for param in trained:
            hook = self.reductions[0].ready if stage == 2 else mark_as_local
            param.register_post_accumulate_grad_hook(hook)

    def add_param_group(self, param_group):
        if hasattr(self, "shards"):
            raise ValueError("shards are cut once: give all parameter groups at the start")
        super().add_param_group(param_group)

    def _shards_of_units(self, params):
        for param in params:
            if not hasattr(param, "shard"):
                raise ValueError(f"stage 3: call fully_shard on what holds {self.names[param]}")
        shards = dict.fromkeys(param.shard for param in params)
        for shard in shards:
            if not self.owner.keys() >= set(shard.params):
                raise ValueError(f"stage 3 steps whole units, and no parameter group has all of "
                                 f"{shard.unit.name}")  # fmt: skip
        return shards

    def _buckets(self, bucket_mb, reduce_dtype, params):
        """Shards of one dtype, device and group of ranks, of about bucket_mb MB each."""
        buckets, filled = defaultdict(list), defaultdict(int)
        for param in reversed(params):  # roughly the order of gradients in backward
            if hasattr(param, "shard"):
                raise ValueError(f"{self.names[param]} is sharded already")
            each = self.param_groups[self.owner[param]]
            if not each.get("group"):
                raise ValueError('each parameter group needs a "group": the ranks that share it')
            kind = (each["group"], each.get("replicate_group"), param.dtype, param.device)
            filled[kind] += param.nbytes
            buckets[kind, filled[kind] // (bucket_mb * 1e6)].append(param)
            if reduce_dtype:  # micro-batches add up in the wider dtype too
                param.grad_dtype = torch.promote_types(param.dtype, reduce_dtype)
        for ((group, replicas, *_), _), bucket in buckets.items():
            if self.stage == 0:  # one row, and a copy of it on every rank
                if replicas:
                    raise ValueError("stage 0 has no shards to replicate: give it one group")
                group, replicas = None, group
            yield Shard(bucket, group, replicas, reduce_dtype=reduce_dtype)

    @staticmethod
    def _options(group):
        ours = ("params", "param_names", "group", "replicate_group")
        return {key: value for key, value in group.items() if key not in ours}

    @torch.no_grad()
    def finish_reduce(self):
        """Sum over ranks what is not summed yet. All ranks must call it, as they call step."""
        for param in self.frozen:
            if param.requires_grad:
                raise RuntimeError(f"{self.names[param]} was frozen when its optimizer was built: "
                                   "choose what is trained before")  # fmt: skip
        for shard in self.shards:
            adopt(shard)
            for i in range(len(shard.params)):
                drop_if_cleared(shard, i)
        if self.stage < 3:
            self.reductions[0].catch_up()

    @torch.no_grad()
    def step(self, closure=None):
        """Step this rank's shards. Below stage 3, gather each while the next one is stepped."""
        loss = torch.enable_grad()(closure)() if closure else None
        self.finish_reduce()
        for shard in self.shards:
            used = shard.used.tolist() if shard.grad is not None else []
            if any(used):
                self._step_shard(shard, used)
                if self.stage < 3:
                    shard.is_whole = False
                    shard.gather()
        for shard in self.shards:
            shard.wait()
        return loss

    def _step_shard(self, shard, used):
        """Step the parameters of which some rank had a gradient; others keep what they are."""
        for inner, outer in zip(shard.optimizer.param_groups, self.param_groups):
            inner.update(self._options(outer))  # such as the rate that a scheduler set
        for piece in shard.pieces:
            if used[piece.index]:
                piece.tensor.grad = shard.grad[piece.where].to(piece.tensor.dtype)
            refresh(shard, piece)
        shard.optimizer.step()
        for piece in shard.pieces:
            piece.tensor.grad = None
            if shard.own.dtype != shard.state_dtype:
                shard.own[piece.where] = piece.tensor

    def zero_grad(self, set_to_none=True):
        """Drop all gradients, local ones and summed ones; or set those that exist to zero."""
        for each in self.reductions:
            each.drop()
        for shard in self.shards:
            for param in shard.params:
                if set_to_none:
                    param.grad = None
                elif new_gradient(param) is not None:
                    new_gradient(param).zero_()
            if set_to_none:
                shard.grad, shard.used = None, 0
                shard.summed.clear()
            elif shard.grad is not None:
                shard.grad.zero_()

    @torch.no_grad()
    def grad_norm_sq(self):
        """The gradient's squared norm by parameter group, (G,): over all shards of the group, and
        the same on all ranks that share it. Whoever splits parameters further adds those parts."""
        self.finish_reduce()
        total_G = torch.zeros(len(self.param_groups), device=self.shards[0].own.device).double()
        for group in dict.fromkeys(shard.group for shard in self.shards):
            # Q2.2 ** A rank has pieces of parameters, and perhaps replicas of other ranks' pieces.
            #         Whose squares are added to make the norm of the whole gradient?
            #         hint: [3, 0] on one rank and [0, 4] on the other have a norm of 5
            square_G = torch.zeros_like(total_G)
            for shard in (shard for shard in self.shards if shard.group is group):
                for piece in shard.pieces if shard.grad is not None else ():
                    norm = torch.linalg.vector_norm(shard.grad[piece.where], dtype=torch.float64)
                    square_G[self.owner[piece.param]] += norm**2
            if group:
                # all_reduce(SUM) over dp, G: the squares of shards are parts of the whole's
                dist.all_reduce(square_G, group=group)
            total_G += square_G
            # /Q2.2
        return total_G

    @torch.no_grad()
    def scale_gradients(self, c):
        """Multiply every gradient by c."""
        self.finish_reduce()
        for shard in self.shards:
            if shard.grad is not None:
                shard.grad *= c

    def clip_grad_norm(self, max_norm):
        """Scale all gradients by one factor, to a norm of at most max_norm. Returns the norm."""
        norm = self.grad_norm_sq().sum().sqrt()
        self.scale_gradients((max_norm / (norm + 1e-6)).clamp(max=1))
        return norm

    def local_state(self):
        """(name, (start, stop), tensors) of each piece that this rank holds: elements start:stop
        of the flattened parameter, as "param", and the optimizer's state. Not copies."""
        return [(self.names[piece.param], (piece.start, piece.stop), held)
                for shard in self.shards for piece, held in states_of(shard)]  # fmt: skip

    def state_dict(self):
        """The plain optimizer's state_dict on every rank, plus "master" beside 16-bit parameters.
        All ranks must call it."""
        return gather_state(self)

    def load_state_dict(self, state_dict):
        """Take this rank's pieces from a state_dict of any stage, number of ranks, or of the plain
        optimizer. Load the parameters first: without a "master" they are its start."""
        load_state(self, state_dict)


# ── what a library adds ──────────────────────────────────────────────────────────────────────
#
# Nothing below is needed to understand ZeRO. It refuses in a sentence what would go wrong in
# silence, keeps the optimizer's state elsewhere, and saves and loads.

ELEMENT_WISE = "SGD Adam AdamW Adamax NAdam RAdam Adadelta Adagrad RMSprop Rprop".split()
NUMBERS = "step", "mu_product"  # state of a whole parameter; other state has a value per element


def agree_on(shards, what, named_parameters):
    """Raise Disagreement unless what(param) is the same text on all ranks that share a shard."""
    names, lines = {param: name for name, param in named_parameters}, defaultdict(list)
    for shard in shards:
        for group in filter(None, (shard.group, shard.replicate_group)):
            lines[group] += [f"{names[param]}: {what(param)}" for param in shard.params]
    for group in lines:
        agree(lines[group], group)


def describe(param):
    """What ranks must have alike before they begin."""
    kind = "trained" if param.requires_grad else "frozen"
    return f"{tuple(param.shape)}, {str(param.dtype)[6:]}, {kind}"


def digest(param):
    """What ranks must have alike when they have written the same."""
    values = param.detach().cpu().flatten().contiguous().view(torch.uint8).numpy()
    return f"values with digest {sha256(values.tobytes()).hexdigest()[:8]}"


# weights that somebody else writes


def refuse_unless_whole(unit, *_):
    """Raise RuntimeError where a state_dict would have the empty parameters of a unit."""
    for shard in unit.shards:
        if [param.shape for param in shard.params] != shard.shapes:
            raise RuntimeError(f"ZeRO-3 keeps the parameters of {unit.name} in shards: call "
                               "state_dict() and load_state_dict() inside gathered()")  # fmt: skip


def adopt(shard):
    """Take in what somebody put in a parameter's place, as `param.data = new` does."""
    for param, full in zip(shard.params, shard.full) if shard.is_whole else ():
        if param.data_ptr() != full.data_ptr():
            if param.shape != full.shape:
                raise RuntimeError(f"a parameter of {tuple(full.shape)} became "
                                   f"{tuple(param.shape)}")  # fmt: skip
            full.copy_(param.detach())
            param.data = full


def refresh(shard, piece):
    """Where a 16-bit weight was written since the last step, its fp32 copy starts from it."""
    if shard.own.dtype != shard.state_dtype:
        own, copy = shard.own[piece.where], piece.tensor
        torch.where(copy.to(own.dtype) == own, copy, own.to(copy), out=copy)


# gradients that somebody else scales or drops


class LocalGradient(torch.Tensor):
    """A gradient of this rank alone, not summed over ranks: its norm is no norm of the gradient.
    Whoever clips gradients multiplies them in place."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # an ordinary tensor to torch

    def mul_(self, *_):
        raise RuntimeError("this gradient is not whole on one rank: use the ZeroOptimizer's "
                           "clip_grad_norm, scale_gradients and zero_grad")  # fmt: skip

    clamp_ = mul_


class InShards(LocalGradient):
    """Stands in for a gradient that was summed and cut into shards. To set it to None drops it."""

    zero_ = LocalGradient.mul_


def mark_as_local(param):
    """Called by autograd in stages 0 and 1, when it has accumulated a gradient."""
    if type(param.grad) is not LocalGradient:
        param.grad = param.grad.as_subclass(LocalGradient)


def mark_as_reduced(shard):
    """Put stand-ins in the place of gradients."""
    for param in shard.params:
        nan = torch.full((), torch.nan, dtype=param.grad_dtype, device=param.device)
        param.grad = nan.expand(param.shape).as_subclass(InShards)
    shard.summed = set(range(len(shard.params)))


def new_gradient(param):
    """The gradient that was accumulated since the last reduction, or None."""
    return None if type(param.grad) is InShards else param.grad


def watch_gradients(shard):
    """Call before_gradient whenever autograd is about to accumulate a gradient. A hook of the
    parameter would also run for gradients that a split backward (04) only asks for."""
    with torch.enable_grad():
        nodes = [x.view_as(x).grad_fn.next_functions[0][0] for x in shard.params]
    for i, node in enumerate(nodes):
        node.register_prehook(partial(before_gradient, shard, i))
    return nodes  # a node keeps its hooks as long as it lives


def before_gradient(shard, i, gradient):
    """Make room for a gradient: a stand-in is no tensor to add to."""
    drop_if_cleared(shard, i)
    if type(shard.params[i].grad) is InShards:
        shard.params[i].grad = None
        shard.summed.discard(i)


def drop_if_cleared(shard, i):
    """Drop a parameter's part of the sum if its gradient was set to None, as by model.zero_grad."""
    if i in shard.summed and shard.params[i].grad is None:
        shard.summed.discard(i)
        shard.used[i] = 0
        for piece in shard.pieces:
            if piece.index == i:
                shard.grad[piece.where] = 0


# checkpoints


def states_of(shard):
    """(piece, tensors) of a shard: "param", which is stepped, and the optimizer's state."""
    adopt(shard)
    for piece in shard.pieces:
        state = shard.optimizer.state.get(piece.tensor, {})
        yield piece, {"param": piece.tensor} | {k: x for k, x in state.items() if x is not None}


@torch.no_grad()
def gather_state(optimizer):
    """The plain optimizer's state_dict, put together from the pieces of all ranks."""
    state = defaultdict(dict)
    for shard in optimizer.shards:
        pieces = [(piece.index, {name: x.cpu().clone() for name, x in held.items()})
                  for piece, held in states_of(shard)]  # fmt: skip
        if shard.group:
            # all_gather over dp, as objects: every rank now holds all pieces, in the order of ranks
            dist.all_gather_object(of_ranks := [None] * shard.n, pieces, group=shard.group)
            pieces = sum(of_ranks, [])
        for i, (param, shape) in enumerate(zip(shard.params, shard.shapes)):
            parts = [held for index, held in pieces if index == i]
            for name in parts[0] if parts else ():
                whole = parts[0][name]
                if name not in NUMBERS:
                    whole = torch.cat([part[name] for part in parts]).view(shape).to(param.device)
                state[optimizer.index[param]][name] = whole
            master = state[optimizer.index[param]].pop("param", None)
            if master is not None and shard.own.dtype != shard.state_dtype:
                state[optimizer.index[param]]["master"] = master
    groups = [{**optimizer._options(each), "params": [optimizer.index[x] for x in each["params"]]}
              for each in optimizer.param_groups]  # fmt: skip
    return {"state": {i: held for i, held in state.items() if held}, "param_groups": groups}


@torch.no_grad()
def load_state(optimizer, state_dict):
    """Copy this rank's pieces of a state_dict, and its options."""
    both = optimizer.param_groups, state_dict["param_groups"]
    sizes = [[len(each["params"]) for each in groups] for groups in both]
    if sizes[0] != sizes[1]:
        raise ValueError(f"a state_dict of groups of {sizes[1]} parameters, not of {sizes[0]}")
    for each, saved in zip(*both):
        each.update(optimizer._options(saved))
    for shard in optimizer.shards:
        adopt(shard)
        for piece in shard.pieces:
            saved = dict(state_dict["state"].get(optimizer.index[piece.param], {}))
            part = lambda whole: whole.flatten()[piece.start : piece.stop].to(piece.tensor)
            master = saved.pop("master", None)
            piece.tensor.copy_(shard.own[piece.where] if master is None else part(master))
            shard.optimizer.state[piece.tensor] = {
                name: (x if name in NUMBERS else part(x)).clone()
                for name, x in saved.items() if x is not None
            }  # fmt: skip


# ── from here on: proof, run, kit ────────────────────────────────────────────────────────────

SGD, CLIP = dict(lr=0.5, momentum=0.9), 0.3


def sharded(model, stage, group, optimizer_class=torch.optim.AdamW, unit=None, **options):
    """The optimizer of a model at a stage. At stage 3 each block is a unit, and both ends are one.
    unit: further arguments of fully_shard; options: of ZeroOptimizer."""
    unit = {"group": group, **(unit or {})}
    for module in (*model.blocks, model) if stage == 3 else ():
        fully_shard(module, **unit)
    groups = [{"params": list(model.named_parameters()), **unit}]
    return ZeroOptimizer(groups, optimizer_class, stage, **options)


def tiny_model(device, dtype=torch.float64):
    """A model for the proof, the same from the same seed. Few ranks divide its numbers."""
    torch.manual_seed(0)
    return LanguageModel(D=10, layers=4, V=31).to(device, dtype)


def proof_batch(n, m, device, seed=1):
    """[r][k]: the sequences of rank r's micro-batch k, and their labels."""
    draw = torch.Generator().manual_seed(seed)
    x_BS, y_BS = torch.randint(31, (2, n * m, 8), generator=draw).to(device)
    assert len(x_BS.unique()) > 5 and len(y_BS.unique()) > 5  # one token alone would prove little
    micro_batches = list(zip(x_BS.split(1), y_BS.split(1)))
    return [micro_batches[r * m : (r + 1) * m] for r in range(n)]


def backward(model, micro_batches, num_labels):
    """Backward of this rank's micro-batches. Returns its share of the loss."""
    total = 0.0
    for x_bS, y_bS in micro_batches:
        share = loss_share(model(x_bS), y_bS, num_labels)
        share.backward()
        total += share.detach()
    return total


def train_step(model, optimizer, micro_batches, num_labels, clip=None):
    """A step on this rank's micro-batches; without labels, none. Returns its share of the loss, the
    gradient's norm if it is clipped, the bytes sent, and those held before the optimizer's step."""
    with Ledger() as ledger:
        optimizer.zero_grad()
        loss = backward(model, micro_batches, num_labels)
        held = bytes_held(optimizer)
        norm = optimizer.clip_grad_norm(clip) if clip else None
        if num_labels:
            optimizer.step()
    return loss, norm, sum(ledger.sent.values()), held


def plain_training(n, m, device, last_only=False, clip=CLIP):
    """What ZeRO must equal: two steps of torch's SGD on the mean loss of the whole batch, or of
    each rank's last micro-batch alone. Returns [loss, gradients, parameters]."""
    model, batch = tiny_model(device), proof_batch(n, m, device)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    parts = [part for of_rank in batch for part in of_rank[-1 if last_only else 0 :]]
    x_BS, y_BS = (torch.cat(parts) for parts in zip(*parts))
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x_BS).flatten(0, 1), y_BS.flatten()) * len(parts) / (n * m)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return [loss.detach(), *(param.grad for param in model.parameters()), *model.parameters()]


def summed(loss, group):
    """The loss of all ranks from their shares."""
    # all_reduce(SUM) over dp, 1: for the reader, no rank needs it
    dist.all_reduce(loss, group=group)
    return loss


def check(stage, m, among, device, dtype=torch.float64, optimizer_class=torch.optim.SGD, **unit):
    """Two clipped steps at a stage on a batch divided over a group; the second finds momentum.
    Returns [loss, gradients, parameters], the optimizer, and bytes sent and held in a step."""
    n, r = dist.get_world_size(among), dist.get_rank(among)
    model, batch = tiny_model(device, dtype), proof_batch(n, m, device)
    options = SGD if optimizer_class is torch.optim.SGD else {}
    optimizer = sharded(model, stage, among, optimizer_class, unit, bucket_mb=0.005, **options)
    for _ in range(2):
        loss, _, sent, held = train_step(model, optimizer, batch[r], n * m * 8, CLIP)
    with gathered(model):
        weights = [param.detach().clone() for param in model.parameters()]
    tensors = [summed(loss, among), *whole_gradients(model, optimizer), *weights]
    return tensors, optimizer, sent, held


def whole_gradients(model, optimizer):
    """The summed gradients of all trained parameters, gathered, in the model's order."""
    whole = {}
    for shard in optimizer.shards:
        whole.update(zip(shard.params, shard.spread(shard.grad)))
    return [whole[param] for param in model.parameters() if param in whole]


def largest_error(tensors, references):
    """The largest relative error over pairs of tensors."""
    return max(relative_error(*pair) for pair in zip(tensors, references, strict=True))


def bytes_held(optimizer):
    """Bytes of this rank's storages: [parameters, gradients, optimizer's state]. Each storage
    counts once."""
    params = [param for shard in optimizer.shards for param in shard.params]
    rows = [x for shard in optimizer.shards for x in (shard.own, shard.rows, *shard.full)]
    gradients = [new_gradient(param) for param in params] + [x.grad for x in optimizer.shards]
    states = [x for *_, held in optimizer.local_state() for x in held.values() if x.dim()]
    seen, sums = set(), []
    for tensors in (params + rows, [x for x in gradients if x is not None], states):
        sizes = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
        sums.append(sum(sizes[key] for key in sizes.keys() - seen))
        seen |= sizes.keys()
    return sums


def claimed(optimizer, m, sizes=(8, 8, 8)):
    """By formula, from shapes alone: bytes that this rank sends in a clipped step of m
    micro-batches, and bytes that it holds before, as bytes_held. sizes: bytes of a parameter, of a
    gradient, and of what the optimizer adds, which has no padding."""
    held, stage = torch.zeros(3), optimizer.stage
    ring = lambda group: 1 - 1 / dist.get_world_size(group) if group else 0
    among = {shard.group for shard in optimizer.shards} - {None}
    sent = sum(2 * ring(group) * 8 * len(optimizer.param_groups) for group in among)  # the norm
    for shard in optimizer.shards:
        n, sizes_P = shard.n, [shape.numel() for shape in shard.shapes]
        cuts = [(sum(sizes_P), 1)] if shard.is_flat else [
            (P, P // shape[0]) for P, shape in zip(sizes_P, shard.shapes)]  # fmt: skip
        widths = [(P, math.ceil(P / row / n) * row) for P, row in cuts]
        p, k = sum(width for _, width in widths), len(sizes_P)  # a reduction counts k parameters
        own = sum(min(max(P - shard.r * width, 0), width) for P, width in widths)
        sent += sizes[0] * p * (n - 1) * (0, 1, 1, 2 * m)[stage]
        sent += sizes[1] * (p + k) * (n - 1) * (0, 1, m, m)[stage]
        sent += sizes[1] * (p + k) * 2 * ring(shard.replicate_group) * (1, 1, m, m)[stage]
        gradients = sum(sizes_P) if stage < 2 else p + k
        held += torch.tensor([p if stage == 3 else n * p, gradients, own])
    return sent, [int(x) for x in held * torch.tensor(sizes)]


def check_by_hand(stage, m, group, device):
    """Two steps of step_by_hand. Returns [loss, parameters], and (measured, formula) of the bytes
    sent in the second step."""
    n, model = dist.get_world_size(group), tiny_model(device)
    blocks = [model.token, *model.blocks, nn.Sequential(model.norm, model.head)]
    shards = [BlockShard(block, group) for block in blocks]
    for shard in shards if stage == 3 else ():
        shard.free()
    optimizer = torch.optim.SGD([shard.own for shard in shards], **SGD)
    batch = proof_batch(n, m, device)[dist.get_rank(group)]
    for _ in range(2):
        with Ledger() as ledger:
            loss = step_by_hand(stage, blocks, shards, optimizer, batch, n * m * 8)
    for shard in shards:
        shard.gather()
    weights = [param.detach() for param in model.parameters()]
    p = sum(math.ceil(sum(map(torch.numel, block.parameters())) / n) for block in blocks)
    formula = 8 * p * (n - 1) * (0, 2, m + 1, 3 * m)[stage]
    return [summed(loss, group), *weights], (sum(ledger.sent.values()), formula)


def proof(group, device):
    """The rows of the table: every stage by hand and by hooks, and a row that is wrong on purpose,
    with the error that it must show."""
    n, m = dist.get_world_size(group), 3
    loss, *rest = plain_training(n, m, device, clip=None)
    weights = rest[len(rest) // 2 :]
    for stage in (1, 2, 3):
        by_hand, sent = check_by_hand(stage, m, group, device)
        yield Row(f"ZeRO-{stage} by hand", largest_error(by_hand, [loss, *weights]), sent)
    twin = plain_training(n, m, device)
    names = "stage 0, data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3, per parameter"
    for stage, name in zip((0, 1, 2, 3, 3), names):
        layout = "per_parameter" if "per" in name.split() else "flat"
        tensors, optimizer, sent, held = check(stage, m, group, device, layout=layout)
        sent_claim, held_claim = claimed(optimizer, m)
        error, held = largest_error(tensors, twin), (sum(held), sum(held_claim))
        yield Row(name, error, (sent, sent_claim), held)

    def overwrite(shard, real=Shard.finish_reduce):
        shard.grad = None
        real(shard)

    with patch.object(Shard, "finish_reduce", overwrite):
        (_, *tensors), *_ = check(2, m, group, device)
    predicted = largest_error(plain_training(n, m, device, last_only=True)[1:], twin[1:])
    error = largest_error(tensors, twin[1:])
    yield Row("a sum that overwrites the shard", error, wrong=predicted)


# ── run ──────────────────────────────────────────────────────────────────────────────────────


def training(args, group, device):
    """Train a model; after each step yield (model, loss, norm, bytes sent, bytes held)."""
    n, r, text = dist.get_world_size(group), dist.get_rank(group), read_text(args.text, 65)
    torch.manual_seed(0)
    model = LanguageModel().to(device)
    optimizer = sharded(model, args.stage, group, bucket_mb=0.5, lr=3e-3)
    for step in range(args.steps):
        parts = (x.to(device).tensor_split(n)[r] for x in sample(text, step, args.batch, 64))
        batch = list(zip(*(part.tensor_split(args.micro_batches) for part in parts)))
        loss, *rest = train_step(model, optimizer, batch, args.batch * 64, clip=1.0)
        yield model, summed(loss, group), *rest


def train(args, group, device):
    """Train, and print the loss beside the unigram entropy."""
    entropy = unigram_entropy(read_text(args.text, at_least=65))
    say(f"\nstage {args.stage}; unigram entropy of the text {entropy:.3f}\n"
        "step   loss   norm   bytes sent   bytes held")  # fmt: skip
    for step, (_, loss, norm, sent, held) in enumerate(training(args, group, device)):
        if step % 10 == 0 or step == args.steps - 1:
            say(f"{step:4}{loss:7.3f}{norm:7.3f}{sent:13,.0f}{sum(held):13,}")


def plot(path, group, device):
    """Draw the bytes that a rank holds in each stage, as measured: bf16 under AdamW."""
    from matplotlib.figure import Figure

    kind = torch.bfloat16, torch.optim.AdamW
    stages = [check(stage, 1, group, device, *kind)[3] for stage in range(4)]
    axis, bottom = Figure(layout="constrained").subplots(), torch.zeros(4)
    for name, sizes in zip(("parameters", "gradients", "optimizer's state"), zip(*stages)):
        axis.bar(range(4), sizes, bottom=bottom, label=name, tick_label=["stage 0", 1, 2, 3])
        bottom += torch.tensor(sizes)
    axis.set_title(f"bytes that one of {dist.get_world_size(group)} ranks holds before a step")
    axis.legend()
    if dist.get_rank(group) == 0:
        axis.figure.savefig(path)


def main(args, device):
    """Prove, then train (or draw); 0 if everything is as claimed."""
    group = dist.group.WORLD
    say(f"02 ZeRO · {dist.get_world_size()} ranks · {dist.get_backend()} · {device.type}")
    broken = prove(list(proof(group, device)), device)
    if args.plot:
        plot(args.plot, group, device)
    elif args.steps:
        train(args, group, device)
    return broken


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    if args.batch < ranks * args.micro_batches or args.micro_batches < 1:
        raise ValueError(
            f"--batch {args.batch} sequences for {ranks} ranks with --micro-batches "
            f"{args.micro_batches}: each needs one, {ranks * args.micro_batches} in all"
        )
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

LOST, WAITED = 3, 4  # exit status of a rank whose peer has gone, or has not come in time
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
    worst = [[x.error, x.wrong, o, off(x.sent), off(x.held)] for x, o in zip(rows, outside)]
    worst = torch.tensor(worst).double().nan_to_num(math.inf).to(device)
    # all_reduce(MAX) over all ranks, five numbers a row: the worst rank speaks for all
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
    say("error: max|difference| / max|one process|; bytes: of rank 0, sent as a ring sends them")
    say(f"{'':36}    error   bytes sent      formula   bytes held      formula")
    broken = 0
    for row, (error, wrong, outside, unsent, unheld) in zip(rows, worst.tolist()):
        holds = outside <= 0 and unsent < 0.5 and unheld < 0.5
        pairs = [[f"{x:,.0f}" for x in pair] if pair else "--" for pair in (row.sent, row.held)]
        note = f"  wrong on purpose: {wrong:.3g} predicted" if wrong else ""
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
            while not run.join(grace_period=2):
                pass
        except mp.ProcessExitedException:  # join() has ended the other ranks by SIGTERM
            codes = [process.exitcode for process in run.processes]
            stacks = [Path(folder, str(rank)).read_text() for rank in range(ranks)]
            sys.exit(_what_went_wrong(codes, stacks))
    sys.exit(0)


def _what_went_wrong(codes, stacks):
    """Which signal ended a rank; or, if no rank told a fault of its own, where each one stood."""
    killed = {r: signal.Signals(-code).name for r, code in enumerate(codes) if code < -1}
    said = [f"rank {r} was ended by {by}" for r, by in killed.items() if by != "SIGTERM"]
    if 1 not in codes and (WAITED in codes or {*codes} <= {0, LOST, -signal.SIGTERM}):
        said = ["some ranks waited in vain for others; each one stood at"]
        for r, stack in enumerate(stacks):
            silent = killed.get(r) == "SIGKILL"  # it did not even answer the launcher's SIGTERM
            said.append(f"rank {r} of {len(codes)}: {'no answer' if silent else _place(stack)}")
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
        tempfile.tempdir = folder  # what a rank leaves behind goes with the launcher's folder
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
        if waited := re.search("by peer|ime(d )?out", str(error)):
            code = LOST if waited[0] == "by peer" else WAITED
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

    parser = arguments(__doc__, ranks=4, steps=60, plot="what a rank holds in each stage")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="to train with")
    parser.add_argument("--batch", type=int, default=32, help="sequences of 64 bytes in a step")
    parser.add_argument("--micro-batches", type=int, default=1, help="of each rank in a step")
    launch(main, parser.parse_args(), validate)
