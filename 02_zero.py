"""02 · ZeRO: nobody holds what somebody else holds already

Data parallel ranks keep n copies of everything. ZeRO cuts the copies into n shards: first of the
optimizer's state, then of the gradients, then of the parameters. What a rank lacks it gathers when
it needs it, so each stage is the one before and one thing freed.

    rank r holds, of P       parameters   gradients   optimizer   sent in a step, · (n-1)/n
    stage 0  data parallel   all          all         all         2 P
    stage 1  ZeRO-1          all          all         shard r     2 P
    stage 2  ZeRO-2          all          shard r     shard r     (K+1) P   K micro-batches
    stage 3  ZeRO-3, FSDP    shard r      shard r     shard r     3K P      two gathers, one sum
    bytes, bf16, fp32 Adam   2            2           12          stage 0: 16 a parameter in all

    layout of a stage-3 unit (a block)        "flat", as FSDP1        "per_parameter", as FSDP2
    zeros that pad it                         < n in all              < n rows a parameter
    gathered parameters                       views, no copy          one copy more
    frozen and trained ones in a unit         refused                 one collective each
    two dtypes in a unit                      refused                 one collective each
    a rank's part of a parameter              any run of elements     whole rows: a slice of dim 0

    python 02_zero.py --stage 3              prove all stages, train with one of them
    torchrun --nproc-per-node 4 02_zero.py   the same, started by torchrun

Guide: FSDP and ZeRO · DeepSpeed ZeRO stages · FSDP1 vs FSDP2 · FSDP eviction · Overlap and
prefetch · Mixed precision · CPU offload. Its per-stage table does not follow from its own 16 bytes
a parameter: the right one is printed below. Its FSDP peak lacks the gathered blocks. And ZeRO does
not replicate state: a lost rank's shard is nowhere else, unless groups of shards are replicated.

Questions  Q2.1 * how many zeros?    Q2.2 ** whose square counts?    Q2.3 ** overwrite or add?
           Q2.4 ** when may it leave?   Q2.5 *** what is fetched meanwhile?
"""
# P parameters · n ranks that share them · s of a shard, (n, s) the whole · r this rank
# K micro-batches · B samples, S bytes of one, b of them here · D width · V vocabulary (256)

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
from collections import Counter, defaultdict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from pathlib import Path
from pydoc_data.topics import topics
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

__all__ = ["ZeroOptimizer", "fully_shard", "gathered"]


# ── the serial twin: a byte from the byte before ─────────────────────────────────────────────


class Block(nn.Module):
    """An MLP on a normed copy of the residual stream: (b, S, D) to itself."""

    def __init__(self, D):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x_bSD):
        return x_bSD + self.down(F.gelu(self.up(self.norm(x_bSD))))


class LanguageModel(nn.Module):
    """Bytes (b, S) to logits of the next byte (b, S, V): position-wise, for state is the subject
    here. Blocks are the units of stage 3; what remains, both ends, is one more."""

    def __init__(self, D=128, layers=4, V=256):
        super().__init__()
        self.token = nn.Embedding(V, D)
        self.blocks = nn.Sequential(*(Block(D) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, x_bS):
        return self.head(self.norm(self.blocks(self.token(x_bS))))


def loss_share(model, x_bS, y_bS, valid):
    """This rank's part of the mean over the step's `valid` labels, on all ranks: parts add up."""
    logits_bSV = model(x_bS).flatten(0, 1)
    promoted = logits_bSV.to(torch.promote_types(logits_bSV.dtype, torch.float32))
    return F.cross_entropy(promoted, y_bS.flatten(), reduction="sum") / valid


# ── the shard: the one mechanism of all stages ───────────────────────────────────────────────


def start_reduce_scatter(rows_ns, group):
    """Begin to add up every rank's row r on rank r. Returns a function that waits for the sum (s,).

    gloo's own reduce-scatter sends twice the ring's bytes, and blocks; an all-to-all and a local
    sum send the least. The local sum also rounds once where a chain of sums rounds n-1 times.
    """
    if dist.get_backend(group) == "nccl":
        sum_s = rows_ns.new_empty(rows_ns.shape[1])
        # reduce_scatter(SUM) over dp, P: rank r will hold the sum of all rows r
        work = dist.reduce_scatter_single(sum_s, rows_ns.view(-1), group=group, async_op=True)
        return lambda: (work.wait(), sum_s)[1]
    parts_ns = torch.empty_like(rows_ns)
    # all_to_all over dp, P: rank r will hold all rows r, and add them
    work = dist.all_to_all_single(parts_ns, rows_ns, group=group, async_op=True)
    return lambda: (work.wait(), parts_ns.sum(0))[1]


@dataclass
class Piece:
    """What a rank holds of a parameter: its elements start:stop, flattened, at `where` in row r.
    `tensor` is what an optimizer steps: these elements, or a copy of them in fp32."""

    param: nn.Parameter
    start: int
    stop: int
    where: slice
    tensor: torch.Tensor = None


class Shard:
    """Parameters of one dtype as a matrix (n, s): rank r keeps row r, and gathers the others.

    Args: group, whose ranks have a row each (None: one row, n = 1); replicate_group, whose ranks
    have the same row and add up its gradient; layout, "flat" or "per_parameter"; param_dtype, of
    what is gathered, and reduce_dtype, of what is summed, where they are not the parameters' own.
    `own` is row r (s,), `grad` the sum of its gradients since the last zero_grad, or None.
    """

    def __init__(
        self, params, group, replicate_group=None, layout="flat",
        param_dtype=None, reduce_dtype=None,
    ):  # fmt: skip
        self.params, self.group, self.replicate_group = list(params), group, replicate_group
        self.n, self.r = (dist.get_world_size(group), dist.get_rank(group)) if group else (1, 0)
        self.flat, self.reduce_dtype = layout == "flat", reduce_dtype
        self.shapes = [param.shape for param in self.params]
        rows_ns = self.pack([param.detach() for param in self.params])
        self.own, self.grad = rows_ns[self.r], None
        self.state_dtype = torch.promote_types(self.own.dtype, torch.float32)
        self.rows = rows_ns.to(param_dtype or rows_ns.dtype)
        self.whole = [whole if self.flat else whole.clone() for whole in self.unpack(self.rows)]
        self.pieces = list(self._pieces())
        self.gathering, self.reducing, self.arrived, self.is_whole = None, None, set(), True
        for param, whole in zip(self.params, self.whole):
            param.data, param.shard = whole, self

    def pack(self, tensors):
        """Tensors of the parameters' shapes as (n, s). Flat pads their concatenation to a multiple
        of n; per parameter pads each to a multiple of n rows of its dimension 0."""
        # Q2.1 * n ranks, equal rows, and a numel that n does not divide. How many zeros are added?
        #        hint: 19 elements over 8 ranks want 5, not 19 % 8
        pad = lambda x, unit: F.pad(x, (0, -len(x) % unit)) if len(x) % unit else x
        flats = [x.reshape(-1) for x in tensors]
        if self.flat:
            return pad(torch.cat(flats), self.n).view(self.n, -1)
        rows = [self.n * (shape[1:].numel() if shape else 1) for shape in self.shapes]
        padded = [pad(x, unit).view(self.n, -1) for x, unit in zip(flats, rows)]
        # /Q2.1
        return torch.cat(padded, dim=1)

    def _widths(self):
        """Columns of each parameter in (n, s), per parameter: those of ceil(rows / n) rows."""
        for shape in self.shapes:
            yield -(-(shape[0] if shape else 1) // self.n) * (shape[1:].numel() if shape else 1)

    def unpack(self, rows_ns):
        """The tensors of a packed (n, s): views if flat, copies if per parameter."""
        numels = [shape.numel() for shape in self.shapes]
        if self.flat:
            parts = rows_ns.view(-1)[: sum(numels)].split(numels)
        else:
            cells = rows_ns.split(list(self._widths()), dim=1)
            parts = [cell.reshape(-1)[:numel] for cell, numel in zip(cells, numels)]
        return [part.view(shape) for part, shape in zip(parts, self.shapes)]

    def _pieces(self):
        """What this rank holds. Padding is in no piece, so it gets no state, norm or checkpoint."""
        column = begin = 0
        widths = [len(self.own)] * len(self.params) if self.flat else self._widths()
        for param, shape, width in zip(self.params, self.shapes, widths):
            edges = (rank * width - begin for rank in (self.r, self.r + 1))
            start, stop = (min(max(edge, 0), shape.numel()) for edge in edges)
            at = column + begin + start - self.r * width
            if start < stop:
                yield Piece(param, start, stop, slice(at, at + stop - start))
            begin, column = (begin + shape.numel(), 0) if self.flat else (0, column + width)

    def gather(self):
        """Begin to make the parameters whole."""
        if self.gathering or self.is_whole:
            return
        _resize(self.rows, self.rows.numel())
        own = self.own.to(self.rows.dtype)
        if not self.group:
            self.rows[0].copy_(own)
            self.gathering = list
            return
        # all_gather over dp, s from each: every rank will hold the whole parameters
        flat = self.rows.view(-1)
        work = dist.all_gather_single(flat, own, group=self.group, async_op=True)
        self.gathering = lambda own=own: work.wait()

    def wait(self):
        """Make the parameters whole: views of what was gathered, or copies of its columns."""
        if not self.gathering:
            return
        self.gathering()
        self.gathering, self.is_whole = None, True
        if not self.flat:
            for whole, part in zip(self.whole, self.unpack(self.rows)):
                _resize(whole, whole.numel())
                whole.copy_(part)
            _resize(self.rows, 0)
        for param, whole in zip(self.params, self.whole):
            param.data = whole

    def free(self):
        """Keep row r alone. The graph still holds views: their storage is emptied, and filled
        again before backward reads it."""
        if self.is_whole:
            for param in self.params:
                param.data = self.rows.new_empty(0)
            for tensor in (self.rows, *self.whole):
                _resize(tensor, 0)
        self.is_whole = False

    def reduce(self):
        """Begin to sum the gradients over ranks, and free them. A parameter without one sends
        zeros."""
        zeros = lambda shape: self.rows.new_zeros(shape)
        found = zip(self.params, self.shapes)
        grads = [zeros(shape) if param.grad is None else param.grad for param, shape in found]
        rows_ns = self.pack(grads).to(self.reduce_dtype or grads[0].dtype)
        for param in self.params:
            param.grad = None
        self.arrived.clear()
        begin = start_reduce_scatter if self.group else lambda rows_ns, _: lambda: rows_ns[0]
        self.reducing = begin(rows_ns, self.group)

    def finish_reduce(self):
        """Wait for the sum of row r, and take it in."""
        sum_s, self.reducing = self.reducing(), None
        if self.replicate_group:
            # all_reduce(SUM) over the replicas, s: the shards of all groups add up
            dist.all_reduce(sum_s, group=self.replicate_group)
        # Q2.3 ** The full gradient is gone; the next micro-batch brings another. Where does it go?
        #         hint: three micro-batches of 1, 2 and 4 make 7
        if self.grad is None:
            self.grad = sum_s.to(self.reduce_dtype or self.own.dtype)
        else:
            self.grad += sum_s
        # /Q2.3

    def spread(self, row_s):
        """Every rank's row, as tensors of the parameters' shapes on each rank."""
        rows_ns = row_s.new_empty(self.n, len(row_s))
        if self.group:
            # all_gather over dp, s from each: every rank now holds all rows
            dist.all_gather_single(rows_ns.view(-1), row_s, group=self.group)
        else:
            rows_ns.copy_(row_s)
        return self.unpack(rows_ns)


def _resize(tensor, numel):
    tensor.untyped_storage().resize_(numel * tensor.element_size())


# ── stage 2: gradients leave while backward runs ─────────────────────────────────────────────


class Reducer:
    """Reduces shards as backward completes them, in the order that `order()` lists: all ranks
    must call collectives in one order. Two shards' full gradients exist at a time, no more."""

    def __init__(self, order):
        self.order, self.left, self.flying = order, None, None

    def begin(self):
        """The first news of a backward: what is left in it, and what to do when it is over."""
        if self.left is None:
            self.left = list(self.order())
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def ready(self, param):
        self.begin()
        param.shard.arrived.add(param)
        # Q2.4 ** Gradients come one by one, not in the same order on every rank. Which shards go?
        #         hint: a shard that is complete waits for those before it
        while self.left and len(self.left[0].arrived) == len(self.left[0].params):
            self.launch(self.left.pop(0))
        # /Q2.4

    def launch(self, shard):
        shard.reduce()
        self._land()
        self.flying = shard

    def _land(self):
        if self.flying:
            self.flying.finish_reduce()
        self.flying = None

    def finish(self):
        for shard in self.left:
            self.launch(shard)
        self._land()
        self.left = None


# ── stage 3: parameters are whole only while their unit computes ─────────────────────────────


class Order:
    """The units in the order in which one direction enters them: learnt in the first pass, with
    all ranks compared, and from then on expected. It is what prefetching goes by."""

    def __init__(self, direction, group, device):
        self.direction, self.group, self.device = direction, group, device
        self.units, self.at, self.known = [], 0, False

    def enter(self, unit, every):
        if not self.known:
            self._compare(unit, every)
            self.units.append(unit)
        elif self.expected() is not unit:
            self._refuse(unit.name)
        self.at += 1
        unit.gather()
        unit.wait()
        # Q2.5 *** This unit is about to compute. Which gather may be in flight meanwhile?
        #          hint: the last pass went through the units in the order of this one
        if self.known and unit.prefetch and self.expected():
            self.expected().gather()
        # /Q2.5

    def expected(self):
        return self.units[self.at] if self.at < len(self.units) else None

    def finish(self):
        if self.known and self.expected():
            self._refuse("nothing more")
        self.known, self.at = True, 0

    def _refuse(self, name):
        expected = self.expected().name if self.expected() else "nothing more"
        raise RuntimeError(
            f"rank {dist.get_rank(self.group)}: {self.direction} entered {name}, expected "
            f"{expected}: every rank must call the same units, in the order of the first pass"
        )

    def _compare(self, unit, every):
        where = 2 * every.index(unit) + (self.direction == "backward")
        mine = torch.tensor([where], device=self.device)
        all_n = mine.new_empty(dist.get_world_size(self.group))
        # all_gather over dp, 1 from each, in the first pass alone: where does every rank stand?
        dist.all_gather_single(all_n, mine, group=self.group)
        if len(all_n.unique()) > 1:
            stand = ", ".join(
                f"rank {rank} at {('forward', 'backward')[i % 2]} of {every[i // 2].name}"
                for rank, i in enumerate(all_n.tolist())
            )
            raise RuntimeError(f"ranks disagree on which unit comes next: {stand}")


class Window(Reducer):
    """What the units under one root share: their orders, and the reduction of their gradients."""

    def __init__(self, root, units, group):
        super().__init__(self._completion)
        self.root, self.units = root, units
        device = next(shard.own.device for unit in units for shard in unit.shards)
        self.forward, self.backward = (Order(x, group, device) for x in ("forward", "backward"))

    def _completion(self):
        """Backward completes units in the reverse of the order in which forward entered them."""
        for unit in reversed(dict.fromkeys(self.forward.units)):
            yield from (shard for shard in unit.shards if shard.params[0].requires_grad)

    def begin(self):
        if self.left is None:
            self.backward.at = 0
        super().begin()

    def launch(self, shard):
        super().launch(shard)
        shard.free()

    def finish(self):
        super().finish()
        for unit in self.units:
            unit.free()
            unit.in_backward = unit.is_done = False
        self.backward.finish()


class Unit:
    """A module whose parameters are gathered and freed together, by hooks around its forward and
    its backward."""

    def __init__(self, module, shards, prefetch):
        self.module, self.shards, self.prefetch = module, shards, prefetch
        self.in_backward, self.is_done, self.window, self.name = False, False, None, None
        module.register_forward_pre_hook(self._before_forward)
        module.register_forward_hook(self._after_forward)

    def gather(self):
        for shard in self.shards:
            shard.gather()

    def wait(self):
        for shard in self.shards:
            shard.wait()

    def free(self):
        for shard in self.shards:
            shard.wait()
            shard.free()

    def _before_forward(self, module, inputs):
        if self.in_backward:  # a checkpoint runs this forward again: all is there
            return
        order, window = self.window.forward, self.window
        if self is window.root:
            order.at = 0
        order.enter(self, window.units)
        wanted = [x for x in tree_leaves(inputs) if torch.is_tensor(x) and x.requires_grad]
        if wanted:
            register_multi_grad_hook(wanted, self._after_backward)

    def _after_forward(self, module, inputs, output):
        if self.in_backward:
            return
        self.free()
        for x in tree_leaves(output):
            if torch.is_tensor(x) and x.grad_fn:  # its hook runs after those of the next unit's
                x.grad_fn.register_prehook(self._before_backward)  # inputs, so _after_backward
        if self is self.window.root:
            self.window.forward.finish()

    def _before_backward(self, _):
        self.window.begin()
        self.is_done = False
        for unit in self.window.units:
            if unit.is_done:  # frozen, or not all of it used; it may have been called once more
                unit.free()
                unit.in_backward = unit.is_done = False
        if not self.in_backward:
            self.window.backward.enter(self, self.window.units)
        self.in_backward = True

    def _after_backward(self, _):
        self.is_done = True


def fully_shard(
    module, group, layout="flat", replicate_group=None, prefetch=True,
    param_dtype=None, reduce_dtype=None,
):  # fmt: skip
    """Make a module a unit of ZeRO-3, in place: its parameters, less those of units inside it, are
    sharded over `group`, gathered just before use and freed after. Returns the module.

    Call it on the inner modules first and on the root last, as torch's fully_shard; all ranks must
    hold the same parameters. Outside forward and backward they are empty: see `gathered`.
    replicate_group: ranks with the same shard, in other groups (hybrid). param_dtype: what is
    gathered and computed in, the shard keeping its own dtype. Raises ValueError where the layout
    cannot hold the module's parameters. Sources: Rajbhandari et al., arXiv:1910.02054, section
    5.3; Zhao et al., arXiv:2304.11277, section 3.
    """
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
    if len(kinds) > 1 and layout == "flat":
        found = ", ".join(f"{str(d)[6:]} {'trained' if g else 'frozen'}" for d, g in kinds)
        raise ValueError(
            f"{type(module).__name__} holds {found} parameters, and a flat unit holds one kind: "
            "use layout='per_parameter', or make them units of their own"
        )
    given = (group, replicate_group, layout, param_dtype, reduce_dtype)
    shards = [Shard(params, *given) for params in kinds.values()]
    module.zero_unit = unit = Unit(module, shards, prefetch)
    names = {part: name or "the root" for name, part in module.named_modules()}
    window = Window(unit, _units(module), group)
    for each in window.units:
        each.window, each.name = window, names[each.module]
    for shard in shards:
        shard.own = shard.own.clone()
        shard.free()
        for param in shard.params:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(lambda param: unit.window.ready(param))
    return module


@contextmanager
def gathered(module):
    """Inside, every parameter is whole, to be read, saved or loaded; what is written is kept."""
    shards = [shard for unit in _units(module) for shard in unit.shards]
    for shard in shards:
        for param, whole in zip(shard.params, shard.spread(shard.own)):
            param.data = whole
    yield module
    for shard in shards:
        shard.own.copy_(shard.pack([param.data for param in shard.params])[shard.r])
        for param in shard.params:
            param.data = shard.rows.new_empty(0)


def _units(module):
    return [part.zero_unit for part in module.modules() if hasattr(part, "zero_unit")]


# ── stages 0, 1 and 2: an optimizer over shards ──────────────────────────────────────────────


def probe(optimizer_class, given):
    """The defaults of an optimizer, and its state's names: True where a value belongs to each
    element. Raises ValueError where a step of parts is not a part of the step."""
    draw = torch.Generator().manual_seed(0)
    whole, grad = torch.randn(2, 6, 4, generator=draw)
    parts = [part.clone() for part in whole.flatten().split(14)]
    stepped, defaults = [], optimizer_class([whole], **given).defaults
    try:
        for tensors in ([whole], parts):
            optimizer = optimizer_class(tensors, **{**given, "lr": 0.1})
            for _ in range(2):
                for tensor, part in zip(tensors, grad.flatten().split(tensors[0].numel())):
                    tensor.grad = part.view_as(tensor)
                optimizer.step()
            stepped.append(torch.cat([tensor.flatten() for tensor in tensors]))
        alike = torch.allclose(*stepped, rtol=1e-5)
    except (TypeError, ValueError, RuntimeError):
        alike = False
    if not alike:
        raise ValueError(
            f"{optimizer_class.__name__} needs whole tensors, and a shard is a part of one: use an "
            "optimizer that treats each element alone, such as AdamW or SGD"
        )
    state = optimizer.state[parts[0]]
    return defaults, {name: torch.is_tensor(x) and x.dim() > 0 for name, x in state.items()}


class ZeroOptimizer(torch.optim.Optimizer):
    """An element-wise torch.optim class whose state, gradients and parameters are sharded.

    Args: param_groups, as torch's, each a dictionary with its own "group", the ranks that share
    it, and if it is hybrid a "replicate_group"; "params" may be (name, parameter) pairs. stage, 0
    to 3; 3 wants modules given to `fully_shard`, which knows the groups. offload, "cpu" or a
    folder, where the optimizer's state is kept between steps. bucket_mb, of what is sent at once,
    and reduce_dtype, that gradients are summed in, in stages 0 to 2. kwargs go to optimizer_class.

    16-bit parameters get an fp32 master copy. Gradients are summed, never divided: in stages 2 and
    3 by every backward, in 0 and 1 by the first call after the last. A parameter without one has a
    gradient of zero. Raises ValueError. The convention is that of torch's ZeroRedundancyOptimizer.
    Source: Rajbhandari et al., arXiv:1910.02054, section 5.
    """

    def __init__(
        self, param_groups, optimizer_class, stage=1, offload=None,
        bucket_mb=25, reduce_dtype=None, **kwargs,
    ):  # fmt: skip
        defaults, self.kinds = probe(optimizer_class, kwargs)
        super().__init__(param_groups, defaults)
        self.stage, self.offload, self.homes = stage, offload, defaultdict(list)
        self.has_state = False
        self.owner, self.names = {}, {}  # parameter to index of its group, to name
        for i, each in enumerate(self.param_groups):
            for k, param in enumerate(each["params"]):
                self.owner[param] = i
                self.names[param] = each.get("param_names", {k: f"{i}.{k}"})[k]
        find = self._given if stage == 3 else partial(self._buckets, bucket_mb, reduce_dtype)
        self.shards = list(find([param for param in self.owner if param.requires_grad]))
        for shard in self.shards:
            self._attach(shard, optimizer_class, kwargs)
        reducer = Reducer(lambda: self.shards)
        for param in (param for shard in self.shards if stage == 2 for param in shard.params):
            param.register_post_accumulate_grad_hook(reducer.ready)

    def _given(self, params):
        for param in params:
            if not hasattr(param, "shard"):
                raise ValueError(f"stage 3: call fully_shard on what holds {self.names[param]}")
        return dict.fromkeys(param.shard for param in params)

    def _buckets(self, bucket_mb, reduce_dtype, params):
        """Shards of one dtype, device and group of ranks, of about bucket_mb MB each."""
        full, filling = [], {}
        for param in reversed(params):  # roughly as backward finds their gradients
            if hasattr(param, "shard"):
                raise ValueError(f"{self.names[param]} is sharded already: that is stage 3")
            each = self.param_groups[self.owner[param]]
            if not each.get("group"):
                raise ValueError('each parameter group needs a "group": the ranks that share it')
            kind = (each["group"], each.get("replicate_group"), param.dtype, param.device)
            bucket = filling.get(kind, [])
            if not bucket or sum(p.nbytes for p in [*bucket, param]) > bucket_mb * 1e6:
                bucket = filling[kind] = []
                full.append((kind, bucket))
            bucket.append(param)
        for (group, replicas, *_), bucket in full:
            if self.stage == 0:  # one row, and a copy of it on every rank
                if replicas:
                    raise ValueError("stage 0 has no shards to replicate: give it one group")
                group, replicas = None, group
            yield Shard(bucket, group, replicas, reduce_dtype=reduce_dtype)

    def _attach(self, shard, optimizer_class, kwargs):
        """Give a shard an optimizer of its own, for its pieces, with the groups that we have."""
        groups = [{**self._options(each), "params": []} for each in self.param_groups]
        for piece in shard.pieces:
            own = shard.own[piece.where]
            piece.tensor = own.to(shard.state_dtype)
            groups[self.owner[piece.param]]["params"].append(piece.tensor)
        shard.optimizer = optimizer_class(groups, **kwargs)
        if self.offload:
            self._send_home(shard)

    @staticmethod
    def _options(group):
        ours = ("params", "param_names", "group", "replicate_group")
        return {key: value for key, value in group.items() if key not in ours}

    def finish_reduce(self):
        """Stages 0 and 1: sum over ranks the gradients since the last call."""
        if any(param.grad is not None for shard in self.shards for param in shard.params):
            reducer = Reducer(None)
            reducer.left = self.shards
            reducer.finish()

    @torch.no_grad()
    def step(self, closure=None):
        """Step this rank's shards; below stage 3, gather each while the next is stepped."""
        loss = torch.enable_grad()(closure)() if closure else None
        self.finish_reduce()
        for shard in self._brought_in():
            if shard.grad is None:
                continue
            for inner, outer in zip(shard.optimizer.param_groups, self.param_groups):
                inner.update(self._options(outer))  # such as the rate that a scheduler set
            for piece in shard.pieces:
                piece.tensor.grad = shard.grad[piece.where].to(piece.tensor.dtype)
            shard.optimizer.step()
            for piece in shard.pieces:
                piece.tensor.grad = None
                if shard.own.dtype != shard.state_dtype:
                    shard.own[piece.where] = piece.tensor
            if self.stage < 3:
                shard.is_whole = False
                shard.gather()
            self.has_state = True
        for shard in self.shards:
            shard.wait()
        return loss

    def zero_grad(self, set_to_none=True):
        """Drop all gradients, whole and sharded."""
        for shard in self.shards:
            shard.grad = None
        super().zero_grad(set_to_none=True)

    # offload: between steps, what only a step needs is at home, on the CPU or in files

    def _brought_in(self):
        """The shards in turn, each with its state on its device, the next one's on its way."""
        if not self.offload:
            yield from self.shards
            return
        with ThreadPoolExecutor(1) as reader:
            coming = reader.submit(self._read, self.shards[0])
            for shard, following in zip_longest(self.shards, self.shards[1:]):
                for tensor, copy in zip(self._state(shard), coming.result()):
                    tensor.data = copy
                if following:
                    coming = reader.submit(self._read, following)
                yield shard
                self._send_home(shard)

    def _state(self, shard):
        """Master copies, and the optimizer's tensors with a value for each element."""
        low = shard.own.dtype != shard.state_dtype
        masters = [piece.tensor for piece in shard.pieces if low]
        states = [shard.optimizer.state.get(piece.tensor, {}) for piece in shard.pieces]
        return masters + [state[name] for state in states for name in state if self.kinds[name]]

    def _read(self, shard):
        return [home.to(shard.own.device, copy=True) for home in self.homes[shard]]

    def _send_home(self, shard):
        for tensor, home in zip_longest(self._state(shard), self.homes[shard][:]):
            if home is None:
                home = self._new_home(tensor)
                self.homes[shard].append(home)
            home.copy_(tensor)
            tensor.data = home

    def _new_home(self, tensor):
        if self.offload == "cpu":
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        with tempfile.NamedTemporaryFile(dir=self.offload) as file:  # the name goes, the map stays
            given = dict(size=tensor.numel(), dtype=tensor.dtype)
            return torch.from_file(file.name, shared=True, **given)

    # the gradient's norm

    @torch.no_grad()
    def grad_norm_sq(self):
        """The gradient's squared norm by parameter group, (G,): over all shards of the group, and
        the same on all ranks that share it. Whoever splits parameters further adds those parts."""
        self.finish_reduce()
        total_G = torch.zeros(len(self.param_groups), device=self.shards[0].own.device).double()
        for group in dict.fromkeys(shard.group for shard in self.shards):
            # Q2.2 ** A rank has shards, their padding, perhaps replicas. What is added to what?
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

    # checkpoints

    def local_state(self):
        """(name, (start, stop), tensors) of each piece that this rank holds: elements start:stop
        of the flattened parameter, as "param", and the optimizer's state. Not copies."""
        return [
            (self.names[piece.param], (piece.start, piece.stop),
             {"param": piece.tensor, **shard.optimizer.state.get(piece.tensor, {})})
            for shard in self.shards for piece in shard.pieces
        ]  # fmt: skip

    @torch.no_grad()
    def state_dict(self):
        """The plain optimizer's state_dict on every rank, plus "master" beside 16-bit parameters.
        All ranks must call it. A number that belongs to a tensor travels as a row of itself."""
        state, indices = defaultdict(dict), {param: i for i, param in enumerate(self.owner)}
        for shard in self.shards:
            masters = ["master"] * (shard.own.dtype != shard.state_dtype)
            for name in [*(self.kinds if self.has_state else ()), *masters]:
                row_s = shard.own.new_zeros(shard.own.shape, dtype=shard.state_dtype)
                for piece in shard.pieces:
                    held = {"master": piece.tensor, **shard.optimizer.state.get(piece.tensor, {})}
                    row_s[piece.where] = held[name]
                for param, whole in zip(shard.params, shard.spread(row_s)):
                    if not self.kinds.get(name, True):
                        whole = whole.flatten()[0].cpu()
                    state[indices[param]][name] = whole.clone()
        groups, start = [], 0
        for each in self.param_groups:
            stop = start + len(each["params"])
            groups.append({**self._options(each), "params": list(range(start, stop))})
            start = stop
        return {"state": dict(state), "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Take this rank's pieces from a state_dict of any stage, number of ranks, or of the plain
        optimizer. Load the parameters first: without a "master" they are its start."""
        for each, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            each.update(self._options(saved))
        indices = {param: i for i, param in enumerate(self.owner)}
        for shard in self.shards:
            for piece in shard.pieces:
                saved = dict(state_dict["state"].get(indices[piece.param], {}))
                part = lambda whole: whole.flatten()[piece.start : piece.stop].to(piece.tensor)
                own = shard.own[piece.where]
                piece.tensor.copy_(part(saved["master"]) if "master" in saved else own)
                shard.optimizer.state[piece.tensor] = {
                    name: part(saved[name]).clone() if each else saved[name].clone()
                    for name, each in self.kinds.items() if name in saved
                }  # fmt: skip
            if self.offload:
                self._send_home(shard)
        self.has_state = bool(state_dict["state"])


# ── proof ────────────────────────────────────────────────────────────────────────────────────


def sharded(model, stage, group, optimizer_class=torch.optim.AdamW, unit=None, **options):
    """The optimizer of a model at a stage; at stage 3 its blocks are units, and both ends are one.
    unit: further arguments of fully_shard; options: of ZeroOptimizer."""
    unit = {"group": group, **(unit or {})}
    for module in (*model.blocks, model) if stage == 3 else ():
        fully_shard(module, **unit)
    groups = [{"params": list(model.named_parameters()), **unit}]
    return ZeroOptimizer(groups, optimizer_class, stage, **options)


def tiny_model(device, dtype=torch.float64):
    """A twin for the proof, the same from the same seed; few ranks divide its numbers."""
    torch.manual_seed(0)
    return LanguageModel(D=10, layers=4, V=31).to(device, dtype)


def proof_batch(n, K, device, seed=1):
    """[r][k]: the samples of rank r's k-th micro-batch, and their labels, from one of n · K."""
    draw = torch.Generator().manual_seed(seed)
    x_BS, y_BS = torch.randint(31, (2, n * K, 8), generator=draw).to(device)
    micro_batches = list(zip(x_BS.split(1), y_BS.split(1)))
    return [micro_batches[r * K : (r + 1) * K] for r in range(n)]


def backward(model, micro_batches, valid):
    """Backward of this rank's micro-batches. Returns its share of the loss."""
    total = 0
    for x_bS, y_bS in micro_batches:
        share = loss_share(model, x_bS, y_bS, valid)
        share.backward()
        total += share.detach()
    return total


def serial_gradients(batch, last_only=False):
    """The twin's gradients of the whole batch, or of each rank's last micro-batch alone."""
    model = tiny_model(batch[0][0][0].device)
    valid = sum(y_bS.numel() for part in batch for _, y_bS in part)
    backward(model, [b for part in batch for b in (part[-1:] if last_only else part)], valid)
    return [param.grad for param in model.parameters()]


def whole_gradients(model, optimizer):
    """The summed gradients of all parameters, gathered, in the model's order."""
    optimizer.finish_reduce()
    found = {}
    for shard in optimizer.shards:
        found.update(zip(shard.params, shard.spread(shard.grad)))
    return [found[param] for param in model.parameters()]


def off(found, wanted):
    """The largest relative error over pairs of tensors."""
    return max(relative_error(f, w) for f, w in zip(found, wanted, strict=True))


def bytes_held(optimizer):
    """Bytes of this rank's storages: (parameters, gradients, optimizer's state)."""
    shards, seen, sums = optimizer.shards, set(), []
    params = [param for shard in shards for param in shard.params]
    parameters = params + [t for shard in shards for t in (shard.own, shard.rows, *shard.whole)]
    gradients = [x.grad for x in (*params, *shards) if x.grad is not None]
    masters = [piece.tensor for shard in shards for piece in shard.pieces]
    states = [x for shard in shards for each in shard.optimizer.state.values()
              for x in each.values() if x.dim()]  # fmt: skip
    for tensors in (parameters, gradients, masters + states):
        found = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
        sums.append(sum(found[key] for key in found.keys() - seen))
        seen |= found.keys()
    return sums


def claimed(optimizer, K, sizes=(8, 8, 16)):
    """By formula, from shapes alone: bytes that this rank sends in a step of K micro-batches, and
    bytes that it holds before the step, as bytes_held. sizes: bytes of a parameter, of a gradient
    and of what AdamW adds, which has no padding."""
    sent, held, stage = 0, torch.zeros(3), optimizer.stage
    for shard in optimizer.shards:
        n, r, R = shard.n, shard.r, 1
        if shard.replicate_group:
            R = dist.get_world_size(shard.replicate_group)
        numels = [shape.numel() for shape in shard.shapes]
        if shard.flat:  # what is padded together: (its elements, those of a row)
            padded = [(sum(numels), -(-sum(numels) // n))]
        else:
            padded = [(p, -(-s[0] // n) * s[1:].numel()) for p, s in zip(numels, shard.shapes)]
        P, s = (sum(column) for column in zip(*padded))
        mine = sum(min(max(p - r * width, 0), width) for p, width in padded)
        sent += sizes[0] * s * (n - 1) * (0, 2, K + 1, 3 * K)[stage]
        sent += sizes[1] * s * 2 * (R - 1) / R * (1, 1, K, K)[stage]
        held += torch.tensor([s if stage == 3 else n * s, P if stage < 2 else s, mine])
    return sent, [int(x) for x in held * torch.tensor(sizes)]


def check(stage, K, group, device, dtype=torch.float64, n=None, r=None, **options):
    """The second step of a stage on this rank's micro-batches: AdamW, at a rate of zero, so that
    state exists and gradients stay. Returns gradients, optimizer, bytes sent, bytes held."""
    n, r = n or dist.get_world_size(group), dist.get_rank(group) if r is None else r
    model, batch = tiny_model(device, dtype), proof_batch(n, K, device)
    given = dict(lr=0.0, weight_decay=0.0, bucket_mb=0.005)
    optimizer = sharded(model, stage, group, **given, **options)
    for _ in range(2):
        optimizer.zero_grad()
        with Ledger() as ledger:
            backward(model, batch[r], n * K * 8)
            held = bytes_held(optimizer)
            optimizer.step()
    return whole_gradients(model, optimizer), optimizer, sum(ledger.sent.values()), held


def proof(group, device, hybrid=None):
    """The rows of the table: every stage, and what forgetting an idea looks like. hybrid: a group
    to shard over, and one of replicas."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    variants = [(f"ZeRO-{stage}", stage, group, {}) for stage in range(4)]
    variants[0] = ("stage 0, data parallel", 0, group, {})
    variants += [("ZeRO-3, per parameter", 3, group, {"layout": "per_parameter"})]
    if hybrid:
        variants += [
            (f"hybrid ZeRO-{stage}", stage, hybrid[0], {"replicate_group": hybrid[1]})
            for stage in (1, 3)
        ]
    for K in (1, 3):
        wanted = serial_gradients(proof_batch(n, K, device))
        for name, stage, shared, unit in variants:
            found, optimizer, sent, held = check(stage, K, shared, device, n=n, r=r, unit=unit)
            sent_claim, held_claim = claimed(optimizer, K)
            name = f"{name}, {K} micro-batch{'es' * (K > 1)}"
            yield Row(name, off(found, wanted), (sent, sent_claim), (sum(held), sum(held_claim)))
    yield Row("ZeRO-3, SGD, clipped, 3 steps", sgd_error(group, device))
    yield from wrong_on_purpose(group, device) if n > 1 else ()


def sgd_error(group, device):
    """The parameters after three clipped steps of SGD with momentum, beside the twin's."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    model, twin = tiny_model(device), tiny_model(device)
    given = dict(lr=0.5, momentum=0.9)
    optimizer, plain = sharded(model, 3, group, torch.optim.SGD, **given), None
    plain = torch.optim.SGD(twin.parameters(), **given)
    for step in range(3):
        batch = proof_batch(n, 2, device, seed=step)
        optimizer.zero_grad()
        plain.zero_grad()
        backward(model, batch[r], n * 16)
        backward(twin, [b for part in batch for b in part], n * 16)
        optimizer.clip_grad_norm(0.3)
        nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
        optimizer.step()
        plain.step()
    with gathered(model), torch.no_grad():
        return off(model.parameters(), twin.parameters())


def wrong_on_purpose(group, device):
    """Rows without one idea of the chapter, each with the error that it must show."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    batch = proof_batch(n, 3, device)
    wanted, last = serial_gradients(batch), serial_gradients(batch, last_only=True)

    def overwrite(shard, real=Shard.finish_reduce):
        shard.grad = None
        real(shard)

    with patch.object(Shard, "finish_reduce", overwrite):
        found, *_ = check(2, 3, group, device)
    yield Row("a sum that overwrites the shard", off(found, wanted), wrong=off(last, wanted))

    model = tiny_model(device)
    optimizer = sharded(model, 2, group)
    backward(model, batch[r], n * 3 * 8)
    (shard,) = optimizer.shards
    optimizer.scale_gradients(0.1 / shard.grad.norm())
    found = whole_gradients(model, optimizer)
    of = dict(zip(model.parameters(), wanted))
    rows_ns = shard.pack([of[param] for param in shard.params])
    own_norm = shard.unpack(rows_ns * 0.1 / rows_ns.norm(dim=1, keepdim=True))
    own_norm = [dict(zip(shard.params, own_norm))[param] for param in of]
    right = [g * 0.1 / rows_ns.norm() for g in wanted]
    yield Row("clipped by each rank's own norm", off(found, right), wrong=off(own_norm, right))

    P = 2 * n + 1
    s = (P + P % n) // n
    if s * n < P:  # for two ranks the remainder is its own complement
        whole = torch.arange(1.0, P + 1, device=device).double()
        rows_ns = whole.new_empty(n * s)
        # all_gather over dp, s from each: every rank now holds what somebody had a row for
        dist.all_gather_single(rows_ns, whole[r * s : (r + 1) * s].contiguous(), group=group)
        found = F.pad(rows_ns, (0, P - n * s))
        yield Row("padded by the remainder", relative_error(found, whole), wrong=1.0)


@contextmanager
def watching(shards):
    """A list that grows by (seconds, bytes gathered of each shard) whenever one comes or goes."""
    seen, size = [], lambda x: (x.untyped_storage()._cdata, x.untyped_storage().nbytes())

    def look(real):
        def call(shard):
            real(shard)
            now = [sum(dict(map(size, (each.rows, *each.whole))).values()) for each in shards]
            seen.append((time.perf_counter(), now))

        return call

    with ExitStack() as patches:
        for name in ("gather", "wait", "free"):
            patches.enter_context(patch.object(Shard, name, look(getattr(Shard, name))))
        yield seen


def orders(group, device):
    """Events of a step, in order: of stage 2's backward, and of stage 3's forward in its second
    pass; "gradient" and "compute" are marked. And the most bytes stage 3 gathered in the step, with
    the formula: the root unit and two blocks."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    (micro_batch,) = proof_batch(n, 1, device)[r]
    model = tiny_model(device)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: ledger.mark("gradient"))
    sharded(model, 2, group, bucket_mb=0.005)
    with Ledger() as ledger:
        backward(model, [micro_batch], 8)
    stage_2 = [event.what for event in ledger.events]

    model = tiny_model(device)
    optimizer = sharded(model, 3, group)
    for block in model.blocks:
        block.up.register_forward_pre_hook(lambda *_: ledger.mark("compute"))
    with Ledger() as ledger:
        backward(model, [micro_batch], 8)
        ledger.events.clear()
        with watching(optimizer.shards) as seen:
            share = loss_share(model, *micro_batch, 8)
            stage_3 = [event.what for event in ledger.events]
            share.backward()
    whole = [8 * n * len(unit.shards[0].own) for unit in model.zero_unit.window.units]
    return stage_2, stage_3, (max(sum(now) for _, now in seen), whole[0] + 2 * max(whole[1:]))


def in_flight(events, start, mark):
    """How many of `mark` stand between each call of `start` and its wait; calls land in order."""
    calls, waits = ([i for i, what in enumerate(events) if what == x] for x in (start, "wait"))
    return [events[i:j].count(mark) for i, j in zip(calls, waits, strict=True)]


def prove_order(group, device):
    """Print what travels while what is computed. 0 if it is as the chapter says."""
    stage_2, stage_3, (most, formula) = orders(group, device)
    start = "reduce_scatter_single" if "nccl" in dist.get_backend() else "all_to_all_single"
    reduced = in_flight(stage_2, start, "gradient")
    fetched = in_flight(stage_3, "all_gather_single", "compute")
    holds = min(reduced[:-1] + fetched[2:]) > 0 and most == formula
    say(f"\nwhile a bucket of stage 2 flies, so many gradients are found: {reduced}\n"
        f"while a unit of stage 3 is gathered, so many blocks are computed: {fetched}\n"
        f"at most {most:,} bytes are gathered at a time; the root and two blocks: {formula:,}"
        f"{'' if holds else '  NOT AS CLAIMED'}")  # fmt: skip
    return int(not holds)


GUIDE = {16: (1400, 950, 600, 90), 256: (1400, 750, 350, 5.5)}  # its GB a rank for 70 B, by stage


def per_stage_table(group, device):
    """Print the guide's table beside the right one, and this run's bytes. 0 if all are as they
    should be on this rank."""
    n, broken = dist.get_world_size(group), 0
    say("\nGB a rank for 70 B parameters,  16 ranks:      256 ranks:     bytes of this run's bf16 "
        f"model, {n} ranks\nbf16, with fp32 master, m and v  guide  right  guide  right "
        "   parameters    gradients        state      formula")  # fmt: skip
    for stage in range(4):
        right = [70 * bytes_each(stage, ranks) for ranks in GUIDE]
        cells = "".join(f"{GUIDE[k][stage]:7}{x:7.4g}" for k, x in zip(GUIDE, right))
        _, optimizer, _, held = check(stage, 1, group, device, torch.bfloat16)
        formula = claimed(optimizer, 1, sizes=(2, 2, 12))[1]
        say(f"stage {stage:<24}{cells}" + "".join(f"{x:13,}" for x in (*held, sum(formula)))
            + ("" if held == formula else "  NOT AS CLAIMED"))  # fmt: skip
        broken |= held != formula
    return int(broken)


def bytes_each(stage, n):
    """Bytes a rank holds for each parameter in bf16 with fp32 master, m and v, padding aside."""
    return (16, 4 + 12 / n, 2 + 14 / n, 16 / n)[stage]


# ── run ──────────────────────────────────────────────────────────────────────────────────────


def build(args, group, device):
    """The model of the run, and its optimizer."""
    torch.manual_seed(0)
    model = LanguageModel().to(device)
    unit = {"layout": args.layout}
    return model, sharded(
        model, args.stage, group, unit=unit, offload=args.offload, bucket_mb=0.5, lr=3e-3
    )  # fmt: skip


def train_step(model, optimizer, batch, K, group):
    """One step on this rank's part of the batch, in K micro-batches. Returns the step's loss, the
    gradient's norm, and the bytes held before the optimizer's step."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    x_bS, y_bS = (whole.tensor_split(n)[r] for whole in batch)
    optimizer.zero_grad()
    micro_batches = zip(x_bS.tensor_split(K), y_bS.tensor_split(K))
    loss = backward(model, micro_batches, batch[1].numel())
    held = sum(bytes_held(optimizer))
    norm = optimizer.clip_grad_norm(1.0)
    optimizer.step()
    # all_reduce(SUM) over dp, 1: the shares of the loss, for the reader
    dist.all_reduce(loss, group=group)
    return loss.item(), norm.item(), held


def train(args, group, device):
    """Train on text; print the loss beside the unigram entropy, and what a step sends."""
    text, (model, optimizer) = read_text(args.text, 0), build(args, group, device)
    n, K = dist.get_world_size(group), args.micro_batches
    formula, held_formula = claimed(optimizer, K, sizes=(4, 4, 8))
    formula += 2 * (n - 1) / n * (4 + 8 * (args.stage > 0))  # the loss, the squared norm
    P = sum(shape.numel() for shard in optimizer.shards for shape in shard.shapes)
    say(f"\n{P:,} parameters, fp32, stage {args.stage}; unigram entropy of the text "
        f"{unigram_entropy(text):.3f}\nstep   loss   norm  tokens/s    sent/step      formula"
        "         held      formula")  # fmt: skip
    compared = 16 * (n - 1) * len(model.zero_unit.window.units) if args.stage == 3 else 0
    for step in range(args.steps):
        batch = [whole.to(device) for whole in sample(text, step, args.batch, 64)]
        started = time.perf_counter()
        with Ledger() as ledger:  # at first there is no state, and the order is compared
            loss, norm, held = train_step(model, optimizer, batch, K, group)
        if step % 10 == 0 or step == args.steps - 1:
            rate = args.batch * 64 / (time.perf_counter() - started)
            claims = formula + compared * (not step), sum(held_formula[: 3 if step else 2])
            sizes = sum(ledger.sent.values()), claims[0], held, claims[1]
            cells = "".join(f"{x:13,.0f}" for x in sizes)
            say(f"{step:4}{loss:7.3f}{norm:7.3f}{rate:10,.0f}{cells}")
    return 0


def plot(args, group, device):
    """Draw bytes for each parameter by stage and number of ranks, measured ones as points, and
    which unit is gathered when in one step of stage 3."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    n = dist.get_world_size(group)
    sizes = [k for k in (1, 2, 4, 8, 16, 32, 64) if n % k == 0]
    groups = {k: dist.new_subgroups(k, timeout=timedelta(seconds=60))[0] for k in sizes}
    figure = plt.figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subfigures(2)
    colours, kinds = ("#0b3c5d", "#f2a541", "#c9d6df"), ("parameters", "gradients", "state")
    ranks = [2 ** (x / 8) for x in range(49)]
    for stage, axis in enumerate(above.subplots(1, 4, sharey=True)):
        parts = zip(*([2 / (k if stage == 3 else 1), 2 / (k if stage > 1 else 1),
                       12 / (k if stage else 1)] for k in ranks))  # fmt: skip
        axis.stackplot(ranks, *parts, colors=colours, labels=kinds)
        for k in sizes:
            held = check(stage, 1, groups[k], device, torch.bfloat16)[3]
            P = sum(param.numel() for param in tiny_model("meta").parameters())
            above_axis = [sum(held[: i + 1]) / P for i in range(3)]
            axis.plot([k] * 3, above_axis, "o", color="k", markersize=3.5, clip_on=False)
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
        axis.set_title(f"stage {stage}", fontsize=10)
        axis.set_xlabel("ranks")
    above.axes[0].set_ylabel("bytes a parameter")
    above.axes[-1].legend(fontsize=8, loc="upper right")
    draw_window(args, group, device, below.subplots())
    if dist.get_rank() == 0:
        figure.savefig(args.plot, dpi=110)
        print(f"drew {args.plot}")


def draw_window(args, group, device, axis):
    """One step of stage 3 as bars: from when a unit's gather begins until it is freed."""
    args.stage, args.layout = 3, "flat"
    text, (model, optimizer) = read_text(args.text, 0), build(args, group, device)
    units = model.zero_unit.window.units
    shards = [unit.shards[0] for unit in units]
    for step in range(3):  # the last is drawn: the first learns the order
        batch = [whole.to(device) for whole in sample(text, step, args.batch, 64)]
        dist.barrier(group=group)
        with watching(shards) as seen:
            train_step(model, optimizer, batch, 1, group)
    turn = 0  # when the root is gathered again, which begins backward
    for row, _ in enumerate(units):
        begun = None
        for seconds, sizes in seen:
            ms = 1e3 * (seconds - seen[0][0])
            if sizes[row] and begun is None:
                begun = ms
            elif begun is not None and not sizes[row]:
                axis.barh(row, ms - begun, 0.6, begun, color="#0b3c5d" if row else "#f2a541")
                turn, begun = turn if row else begun, None
    names = ["root: both ends", *(f"block {i}" for i in range(len(units) - 1))]
    axis.set_yticks(range(len(units)), names)
    axis.invert_yaxis()
    axis.set_title("stage 3: which unit is gathered when, in one step", fontsize=10, loc="left")
    axis.axvline(turn, color="k", linestyle=":", linewidth=1)
    axis.set_xlabel("ms; dotted: backward begins; a gather begins while the unit before computes")
    axis.spines[["top", "right"]].set_visible(False)


def main(args, device):
    """Prove, then train (or draw); 0 if everything is as claimed."""
    group, hybrid, n = dist.group.WORLD, None, dist.get_world_size()
    if n >= 4 and n % 2 == 0:  # two groups of shards; a rank's replica is n / 2 further
        halves = [list(range(n // 2)), list(range(n // 2, n))]
        patience = {"timeout": timedelta(seconds=args.timeout or 60)}
        make = partial(dist.new_subgroups_by_enumeration, **patience)
        hybrid = make(halves)[0], make([list(pair) for pair in zip(*halves)])[0]
    say(f"02 ZeRO · {n} ranks · {dist.get_backend()} · {device.type}")
    broken = prove(list(proof(group, device, hybrid)), device)
    broken |= prove_order(group, device) if n > 1 else 0
    broken |= per_stage_table(group, device)
    if args.plot:
        plot(args, group, device)
    elif args.steps:
        broken |= train(args, group, device)
    return int(broken)


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    if args.batch < ranks * args.micro_batches or args.micro_batches < 1:
        raise ValueError(
            f"--batch {args.batch} samples for {ranks} ranks with --micro-batches "
            f"{args.micro_batches}: each needs one, {ranks * args.micro_batches} in all"
        )
    if args.offload and args.offload != "cpu" and not os.path.isdir(args.offload):
        raise ValueError(f"--offload {args.offload}: neither cpu nor a folder that exists")
    read_text(args.text, at_least=65)


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
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="to train with")
    parser.add_argument("--layout", default="flat", choices=["flat", "per_parameter"])
    parser.add_argument("--offload", metavar="cpu|DIR", help="where AdamW's state is kept")
    parser.add_argument("--batch", type=int, default=32, help="samples of 64 bytes in a step")
    parser.add_argument("--micro-batches", type=int, default=1, help="of each rank in a step")
    parser.add_argument("--plot", metavar="PNG", help="draw bytes and window; do not train")
    launch(main, parser.parse_args(), validate)
