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
from itertools import accumulate, pairwise, zip_longest
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


# ── two collectives that begin, and are waited for ───────────────────────────────────────────


def start_all_gather(rows_ns, row_s, group):
    """Begin to fill rows_ns with every rank's row; no group is one rank. Returns a function that
    waits for it."""
    if not group:
        rows_ns[0].copy_(row_s)
        return lambda: None
    # all_gather over dp, s from each: every rank will hold all rows
    work = dist.all_gather_single(rows_ns.view(-1), row_s, group=group, async_op=True)
    return lambda: (work.wait(), row_s)  # which must live until it has left


def start_reduce_scatter(rows_ns, group):
    """Begin to add up every rank's row r on rank r. Returns a function that waits for the sum (s,).

    gloo's own reduce-scatter sends twice the ring's bytes, and blocks; an all-to-all and a local
    sum send the least. The local sum also rounds once where a chain of sums rounds n-1 times.
    """
    if not group:
        return lambda: rows_ns[0]
    if dist.get_backend(group) == "nccl":
        sum_s = rows_ns.new_empty(rows_ns.shape[1])
        # reduce_scatter(SUM) over dp, P: rank r will hold the sum of all rows r
        work = dist.reduce_scatter_single(sum_s, rows_ns.view(-1), group=group, async_op=True)
        return lambda: (work.wait(), sum_s)[1]
    parts_ns = torch.empty_like(rows_ns)
    # all_to_all over dp, P: rank r will hold all rows r, and add them
    work = dist.all_to_all_single(parts_ns, rows_ns, group=group, async_op=True)
    return lambda: (work.wait(), parts_ns.sum(0))[1]


# ── the shard: what all stages are made of ───────────────────────────────────────────────────


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

    The matrix is cells side by side, each cut into n rows: all parameters end to end in one cell
    (layout "flat"), or a cell for each, of whole rows of dimension 0 ("per_parameter").

    Args: group, whose ranks have a row each (None: one row, n = 1); replicate_group, whose ranks
    have the same row and add up its gradient; param_dtype, of what is gathered, and reduce_dtype,
    of what is summed, where they are not the parameters' own.
    `own` is row r (s,), `grad` the sum of its gradients since the last zero_grad, or None; `rows`
    is the matrix while it is gathered, `whole` the parameters in it, or copied out of it.
    """

    def __init__(self, params, group, replicate_group=None, layout="flat",
                 param_dtype=None, reduce_dtype=None):  # fmt: skip
        self.params, self.group, self.replicate_group = list(params), group, replicate_group
        self.n, self.r = (dist.get_world_size(group), dist.get_rank(group)) if group else (1, 0)
        self.reduce_dtype, self.shapes = reduce_dtype, [param.shape for param in self.params]
        apart = [([shape], shape[1:].numel()) for shape in self.shapes]
        self.cells = [(self.shapes, 1)] if layout == "flat" else apart  # what must stay together
        rows_ns = self.pack([param.detach() for param in self.params])
        self.own, self.grad = rows_ns[self.r], None
        self.state_dtype = torch.promote_types(self.own.dtype, torch.float32)
        self.rows, self.pieces = rows_ns.to(param_dtype or rows_ns.dtype), list(self._pieces())
        views = self.unpack(self.rows)
        self.whole = views if len(self.cells) == 1 else [view.clone() for view in views]
        self.gathering, self.reducing, self.arrived, self.is_whole = None, None, set(), True
        for param, whole in zip(self.params, self.whole):
            param.data, param.shard = whole, self

    def pack(self, tensors):
        """Tensors of the parameters' shapes as (n, s). A cell is padded to n equal rows."""
        tensors, cells = iter(tensors), []
        for shapes, together in self.cells:
            # Q2.1 * n ranks, equal rows, and a numel that n does not divide. How many zeros?
            #        hint: 19 elements over 8 ranks want 5, not 19 % 8
            flats = [next(tensors).reshape(-1) for _ in shapes]
            missing = -sum(map(len, flats)) % (self.n * together)
            cells.append(torch.cat([*flats, flats[0].new_zeros(missing)]).view(self.n, -1))
            # /Q2.1
        return torch.cat(cells, dim=1) if len(cells) > 1 else cells[0]

    def _places(self):
        """(cell's first column, its width, where in the cell flattened) of each parameter."""
        column = 0
        for shapes, together in self.cells:
            ends = [0, *accumulate(shape.numel() for shape in shapes)]
            width = -(-ends[-1] // (self.n * together)) * together
            yield from ((column, width, begin, end) for begin, end in pairwise(ends))
            column += width

    def unpack(self, rows_ns):
        """The tensors of a packed (n, s): views of it if it is one cell, copies if it is more."""
        return [
            rows_ns[:, column : column + width].reshape(-1)[begin:end].view(shape)
            for shape, (column, width, begin, end) in zip(self.shapes, self._places())
        ]

    def _pieces(self):
        """What this rank holds. Padding is in no piece, so it gets no state, norm or checkpoint."""
        for param, (column, width, begin, end) in zip(self.params, self._places()):
            mine = self.r * width  # of the cell's elements, this rank has width from here
            first, last = max(begin, mine), min(end, mine + width)
            if first < last:
                where = slice(column + first - mine, column + last - mine)
                yield Piece(param, first - begin, last - begin, where)

    def gather(self):
        """Begin to make the parameters whole."""
        if not self.gathering and not self.is_whole:
            _resize(self.rows, self.rows.numel())
            own = self.own.to(self.rows.dtype)
            self.gathering = start_all_gather(self.rows, own, self.group)

    def wait(self):
        """Make the parameters whole: views of what was gathered, or copies of its columns."""
        if not self.gathering:
            return
        self.gathering()
        self.gathering, self.is_whole = None, True
        if len(self.cells) > 1:
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
        """Begin to sum the gradients over ranks, and free them; a parameter without one sends
        zeros."""
        found = zip(self.params, self.shapes)
        zeros = self.rows.new_zeros
        grads = [zeros(shape) if param.grad is None else param.grad for param, shape in found]
        rows_ns = self.pack(grads).to(self.reduce_dtype or grads[0].dtype)
        for param in self.params:
            param.grad = None
        self.arrived.clear()
        self.reducing = start_reduce_scatter(rows_ns, self.group)

    def finish_reduce(self):
        """Wait for the sum of row r, and take it in."""
        sum_s, self.reducing = self.reducing(), None
        if self.replicate_group:
            # all_reduce(SUM) over the replicas, s: the shards of all groups add up
            dist.all_reduce(sum_s, group=self.replicate_group)
        # Q2.3 ** The full gradient is gone; the next micro-batch brings another. Where does it go?
        #         hint: three micro-batches of 1, 2 and 4 make 7
        if self.grad is None:
            self.grad = sum_s.to(torch.promote_types(sum_s.dtype, self.own.dtype))
        else:
            self.grad += sum_s
        # /Q2.3

    def spread(self, row_s):
        """Every rank's row, as tensors of the parameters' shapes on each rank."""
        rows_ns = row_s.new_empty(self.n, len(row_s))
        start_all_gather(rows_ns, row_s, self.group)()
        return self.unpack(rows_ns)


def _resize(tensor, numel):
    tensor.untyped_storage().resize_(numel * tensor.element_size())


# ── stages 0, 1, 2: gradients are summed after backward, or while it runs ────────────────────


class Reducer:
    """Reduces shards in the order that `order()` lists, for all ranks must call collectives in one
    order: all at once (finish), or each as backward completes it (ready, then finish is called by
    backward's end). Two shards' full gradients fly at a time, no more."""

    def __init__(self, order):
        self.order, self.left, self.flying = order, None, None

    def reset(self):
        """Forget a backward that an exception ended."""
        if self.flying:
            self.flying.reducing()
        for shard in self.order():
            shard.arrived.clear()
        self.left = self.flying = None

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

    def launch(self, shard=None):
        """Send a shard's gradients off, and take in those of the one before it."""
        if shard:
            shard.reduce()
        if self.flying:
            self.flying.finish_reduce()
        self.flying = shard

    def finish(self):
        for shard in (*(self.order() if self.left is None else self.left), None):
            self.launch(shard)
        self.left = None


# ── stage 3: parameters are whole only while their unit computes ─────────────────────────────


class Window(Reducer):
    """The units under one root, in the order in which forward and backward enter them. The first
    pass learns it, with all ranks compared; the next ones expect it, and prefetch by it."""

    def __init__(self, root, units, group):
        super().__init__(self._completion)
        self.root, self.units, self.group = root, units, group
        self.orders, self.known, self.at = {"forward": [], "backward": []}, set(), 0

    def start(self):
        """A forward of the root begins; what one that an exception ended left behind goes first."""
        self.reset()
        self.at = 0
        for unit in self.units:
            unit.free()
        for direction in self.orders.keys() - self.known:
            self.orders[direction].clear()

    def enter(self, unit, direction):
        """Gather a unit that is about to compute, and begin to gather the next."""
        order = self.orders[direction]
        if direction not in self.known:
            self._compare(unit, direction)
            order.append(unit)
        self._expect(unit, direction)
        self.at += 1
        unit.gather()
        unit.wait()
        # Q2.5 *** This unit is about to compute. Which gather may be in flight meanwhile?
        #          hint: the last pass went through the units in the order of this one
        if direction in self.known and unit.prefetch and self.at < len(order):
            order[self.at].gather()
        # /Q2.5

    def leave(self, direction):
        self._expect(None, direction)
        self.known.add(direction)

    def _expect(self, unit, direction):
        expected = [*self.orders[direction], None][self.at]
        if unit is not expected:
            name = lambda unit: unit.name if unit else "nothing more"
            raise RuntimeError(
                f"rank {dist.get_rank(self.group)}: {direction} entered {name(unit)}, expected "
                f"{name(expected)}: every rank must call the same units, in the order of the first "
                "pass"
            )

    def _compare(self, unit, direction):
        stands = [(direction, unit) for direction in self.orders for unit in self.units]
        device = next(shard.own.device for unit in self.units for shard in unit.shards)
        mine = torch.tensor([stands.index((direction, unit))], device=device)
        all_n = mine.new_empty(dist.get_world_size(self.group))
        # all_gather over dp, 1 from each, in the first pass alone: where does every rank stand?
        dist.all_gather_single(all_n, mine, group=self.group)
        if len(all_n.unique()) > 1:
            found = [(rank, *stands[i]) for rank, i in enumerate(all_n.tolist())]
            stand = ", ".join(f"rank {rank} at {way} of {unit.name}" for rank, way, unit in found)
            raise RuntimeError(f"ranks disagree on which unit comes next: {stand}")

    def _completion(self):
        """Backward completes units in the reverse of the order in which forward entered them."""
        for unit in reversed(dict.fromkeys(self.orders["forward"])):
            yield from (shard for shard in unit.shards if shard.params[0].requires_grad)

    def begin(self):
        if self.left is None:
            self.at = 0
        super().begin()

    def finish(self):
        super().finish()
        for unit in self.units:
            unit.free()
        self.leave("backward")


class Unit:
    """A module whose parameters are gathered and freed together, by hooks around its forward and
    its backward."""

    def __init__(self, module, shards, prefetch):
        self.module, self.shards, self.prefetch = module, shards, prefetch
        self.in_backward, self.window, self.name = False, None, None
        module.register_forward_pre_hook(self._before_forward)
        module.register_forward_hook(self._after_forward)

    def gather(self):
        for shard in self.shards:
            shard.gather()

    def wait(self):
        for shard in self.shards:
            shard.wait()

    def free(self, *_):
        self.wait()
        for shard in self.shards:
            shard.free()
        self.in_backward = False

    def _before_forward(self, module, inputs):
        if torch._C._current_graph_task_id() >= 0:  # in backward: a checkpoint runs this again
            self._before_backward(None)
            return
        if self is self.window.root:
            self.window.start()
        self.window.enter(self, "forward")
        wanted = [x for x in tree_leaves(inputs) if torch.is_tensor(x) and x.grad_fn]
        if wanted:  # their gradients end this unit's backward; a leaf's may come before its end
            register_multi_grad_hook(wanted, self.free)

    def _after_forward(self, module, inputs, output):
        if self.in_backward:
            return
        self.free()
        for x in tree_leaves(output):
            if torch.is_tensor(x) and x.grad_fn:  # runs after the next unit's hook on this tensor
                x.grad_fn.register_prehook(self._before_backward)
        if self is self.window.root:
            self.window.leave("forward")

    def _before_backward(self, _):
        self.window.begin()
        if not self.in_backward:
            self.window.enter(self, "backward")
        self.in_backward = True


def fully_shard(module, group, layout="flat", replicate_group=None, prefetch=True,
                param_dtype=None, reduce_dtype=None):  # fmt: skip
    """Make a module a unit of ZeRO-3, in place: its parameters, less those of units inside it, are
    sharded over `group`, gathered just before use and freed after. Returns the module.

    Call it on the inner modules first and on the root last, as torch's fully_shard; all ranks must
    hold the same parameters. Outside forward and backward they are empty: see `gathered`.
    replicate_group: ranks with the same shard, in other groups (hybrid). param_dtype: what is
    gathered and computed in, the shard keeping its own dtype. Raises ValueError where the layout
    cannot hold the module's parameters. Sources: Rajbhandari et al., arXiv:1910.02054, section
    5.3; Zhao et al., arXiv:2304.11277, section 3.
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
    if len(kinds) > 1 and layout == "flat":
        found = ", ".join(f"{str(d)[6:]} {'trained' if g else 'frozen'}" for d, g in kinds)
        raise ValueError(
            f"{type(module).__name__} holds {found} parameters, and a flat unit holds one kind: "
            "use layout='per_parameter', or make them units of their own"
        )
    given = (group, replicate_group, layout, param_dtype, reduce_dtype)
    shards = [Shard(params, *given) for params in kinds.values()]
    module.zero_unit = unit = Unit(module, shards, prefetch)
    window = Window(unit, _units(module), group)
    names = {part: name or "the root" for name, part in module.named_modules()}
    for each in window.units:
        each.window, each.name = window, names[each.module]
    for shard in shards:
        shard.own = shard.own.clone()
        shard.free()
        for param in shard.params:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(lambda param: unit.window.ready(param))
    return module


def _units(module):
    return [part.zero_unit for part in module.modules() if hasattr(part, "zero_unit")]


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


# ── the optimizer of all stages ──────────────────────────────────────────────────────────────


def probe(optimizer_class, given, options=()):
    """The defaults of an optimizer, and its state's names: True where a value belongs to each
    element. Raises ValueError where a step of parts is not a part of the step."""
    whole, grad = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    parts = [part.clone() for part in whole.flatten().split(14)]
    stepped, defaults = [], optimizer_class([whole], **given).defaults
    try:
        for tensors in ([whole], parts):
            group = {**dict(options), "params": tensors, "lr": 0.1}
            optimizer = optimizer_class([group], **given)
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
    gradient of zero, so every rank must call backward in a step; a stage-3 unit that no rank
    entered is not stepped. Raises ValueError. The convention is that of torch's own
    ZeroRedundancyOptimizer. Source: Rajbhandari et al., arXiv:1910.02054, section 5.
    """

    def __init__(self, param_groups, optimizer_class, stage=1, offload=None,
                 bucket_mb=25, reduce_dtype=None, **kwargs):  # fmt: skip
        if stage not in range(4):
            raise ValueError(f"stage {stage!r}: use 0, 1, 2 or 3")
        if offload and offload != "cpu" and not os.path.isdir(offload):
            raise ValueError(f"offload {offload!r}: neither cpu nor a folder that exists")
        super().__init__(param_groups, probe(optimizer_class, kwargs)[0])
        options = map(self._options, self.param_groups)  # amsgrad or momentum may be one group's
        self.kinds = [probe(optimizer_class, kwargs, each)[1] for each in options]
        self.stage, self.offload, self.homes = stage, offload, defaultdict(dict)
        self.has_state, self.owner, self.names = False, {}, {}  # a parameter's group, and name
        for i, each in enumerate(self.param_groups):
            for k, param in enumerate(each["params"]):
                self.owner[param] = i
                self.names[param] = each.get("param_names", {k: f"{i}.{k}"})[k]
        self.index = {param: i for i, param in enumerate(self.owner)}
        trained = [param for param in self.owner if param.requires_grad]
        find = self._units_of if stage == 3 else partial(self._buckets, bucket_mb, reduce_dtype)
        self.shards = list(find(trained))
        for shard in self.shards:  # each with an optimizer of its own, with the groups that we have
            groups = [{**self._options(each), "params": []} for each in self.param_groups]
            for piece in shard.pieces:
                piece.tensor = shard.own[piece.where].to(shard.state_dtype)
                groups[self.owner[piece.param]]["params"].append(piece.tensor)
            shard.optimizer = optimizer_class(groups, **kwargs)
            self._send_home(shard)
        self.reducer = Reducer(lambda: self.shards)
        for param in trained if stage == 2 else ():
            param.register_post_accumulate_grad_hook(self.reducer.ready)

    def add_param_group(self, param_group):
        if hasattr(self, "shards"):
            raise ValueError("shards are cut once: give all parameter groups at the start")
        super().add_param_group(param_group)

    def _units_of(self, params):
        for param in params:
            if not hasattr(param, "shard"):
                raise ValueError(f"stage 3: call fully_shard on what holds {self.names[param]}")
        return dict.fromkeys(param.shard for param in params)

    def _buckets(self, bucket_mb, reduce_dtype, params):
        """Shards of one dtype, device and group of ranks, of about bucket_mb MB each."""
        buckets, filled = defaultdict(list), Counter()
        for param in reversed(params):  # roughly as backward finds their gradients
            if hasattr(param, "shard"):
                raise ValueError(f"{self.names[param]} is sharded already: that is stage 3")
            each = self.param_groups[self.owner[param]]
            if not each.get("group"):
                raise ValueError('each parameter group needs a "group": the ranks that share it')
            kind = (each["group"], each.get("replicate_group"), param.dtype, param.device)
            filled[kind] += param.nbytes
            buckets[kind, filled[kind] // (bucket_mb * 1e6)].append(param)
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

    def finish_reduce(self):
        """Stages 0 and 1: sum over ranks the gradients since the last call."""
        if any(param.grad is not None for shard in self.shards for param in shard.params):
            self.reducer.finish()

    @torch.no_grad()
    def step(self, closure=None):
        """Step this rank's shards; below stage 3, gather each while the next is stepped."""
        loss = torch.enable_grad()(closure)() if closure else None
        self.finish_reduce()
        for shard in self._at_hand():
            if shard.grad is None:
                continue
            for inner, outer in zip(shard.optimizer.param_groups, self.param_groups):
                inner.update(self._options(outer))  # such as the rate that a scheduler set
            for piece in shard.pieces:
                piece.tensor.grad = shard.grad[piece.where].to(piece.tensor.dtype)
                if shard.own.dtype != shard.state_dtype:  # weights that were loaded since win
                    own, master = shard.own[piece.where], piece.tensor
                    torch.where(master.to(own.dtype) == own, master, own.to(master), out=master)
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
        self.reducer.reset()
        for shard in self.shards:
            shard.grad = None
        super().zero_grad(set_to_none=True)

    def _held(self, shard):
        """(piece, what it has) of a shard: "param", which is stepped, and the optimizer's state."""
        states = shard.optimizer.state
        return [(x, {"param": x.tensor, **states.get(x.tensor, {})}) for x in shard.pieces]

    # offload: between steps, what only a step needs is at home, on the CPU or in files

    def _at_hand(self):
        """The shards in turn, each with its state on its device, the next one's on its way."""
        if not self.offload:
            yield from self.shards
            return
        with ThreadPoolExecutor(1) as reader:
            coming = reader.submit(self._read, self.shards[0])
            for shard, following in zip_longest(self.shards, self.shards[1:]):
                for tensor, copy in zip(self._movable(shard).values(), coming.result()):
                    tensor.data = copy
                if following:
                    coming = reader.submit(self._read, following)
                yield shard
                self._send_home(shard)

    def _movable(self, shard):
        """Master copies, and the optimizer's tensors with a value for each element, by name."""
        moves = {k: each for kinds in self.kinds for k, each in kinds.items()}
        moves["param"] = shard.own.dtype != shard.state_dtype
        pieces = enumerate(self._held(shard))
        return {(i, name): held[name] for i, (_, held) in pieces for name in held if moves[name]}

    def _read(self, shard):
        homes = (self.homes[shard][key] for key in self._movable(shard))
        return [home.to(shard.own.device, copy=True) for home in homes]

    def _send_home(self, shard):
        for key, tensor in self._movable(shard).items() if self.offload else ():
            if key not in self.homes[shard]:
                self.homes[shard][key] = self._new_home(tensor)
            self.homes[shard][key].copy_(tensor)
            tensor.data = self.homes[shard][key]

    def _new_home(self, tensor):
        if self.offload == "cpu":
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        with tempfile.NamedTemporaryFile(dir=self.offload) as file:  # the name goes, the map stays
            return torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)

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
            (self.names[piece.param], (piece.start, piece.stop), held)
            for shard in self.shards for piece, held in self._held(shard)
        ]  # fmt: skip

    @torch.no_grad()
    def state_dict(self):
        """The plain optimizer's state_dict on every rank, plus "master" beside 16-bit parameters.
        All ranks must call it. A number that belongs to a tensor travels as a row of itself."""
        state = defaultdict(dict)
        for shard in self.shards:
            masters = ["param"] * (shard.own.dtype != shard.state_dtype)
            names = dict.fromkeys(k for kinds in self.kinds for k in kinds if self.has_state)
            for name in [*names, *masters]:
                row_s = torch.zeros_like(shard.own, dtype=shard.state_dtype)
                for piece, held in self._held(shard):
                    row_s[piece.where] = held.get(name, 0)
                for param, whole in zip(shard.params, shard.spread(row_s)):
                    kinds = {**self.kinds[self.owner[param]], "param": True}
                    if name not in kinds:
                        continue
                    if not kinds[name]:
                        whole = whole.flatten()[0].cpu()
                    key = "master" if name == "param" else name
                    state[self.index[param]][key] = whole.clone()
        indices = [[self.index[param] for param in each["params"]] for each in self.param_groups]
        options = [self._options(each) for each in self.param_groups]
        groups = [{**each, "params": params} for each, params in zip(options, indices)]
        return {"state": dict(state), "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Take this rank's pieces from a state_dict of any stage, number of ranks, or of the plain
        optimizer. Load the parameters first: without a "master" they are its start."""
        both = self.param_groups, state_dict["param_groups"]
        ours, theirs = ([len(each["params"]) for each in groups] for groups in both)
        if ours != theirs:
            raise ValueError(f"a state_dict of groups of {theirs} parameters, and ours are {ours}")
        for each, saved in zip(*both):
            each.update(self._options(saved))
        for shard in self.shards:
            for piece in shard.pieces:
                saved = state_dict["state"].get(self.index[piece.param], {})
                part = lambda whole: whole.flatten()[piece.start : piece.stop].to(piece.tensor)
                master = part(saved["master"]) if "master" in saved else shard.own[piece.where]
                piece.tensor.copy_(master)
                shard.optimizer.state[piece.tensor] = {
                    name: (part(saved[name]) if each else saved[name]).clone()
                    for name, each in self.kinds[self.owner[piece.param]].items()
                    if name in saved
                }  # fmt: skip
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
        (share := loss_share(model, x_bS, y_bS, valid)).backward()
        total += share.detach()
    return total


def train_step(model, optimizer, micro_batches, valid, clip=None):
    """A step on this rank's micro-batches. Returns its share of the loss, the gradient's norm if it
    is clipped, the bytes sent, and those held before the optimizer's step."""
    with Ledger() as ledger:
        optimizer.zero_grad()
        loss = backward(model, micro_batches, valid)
        held = bytes_held(optimizer)
        norm = optimizer.clip_grad_norm(clip) if clip else None
        optimizer.step()
    return loss, norm, sum(ledger.sent.values()), held


def plain(n, K, device, last_only=False):
    """What `check` should find: torch's SGD on the twin, on the whole batch, or on each rank's last
    micro-batch alone."""
    model, batch = tiny_model(device), proof_batch(n, K, device)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, [b for part in batch for b in part[-1 if last_only else 0 :]], n * K * 8)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return [param.grad for param in model.parameters()] + [*model.parameters()]


def whole_gradients(model, optimizer):
    """The summed gradients of all trained parameters, gathered, in the model's order."""
    optimizer.finish_reduce()
    found = {}
    for shard in optimizer.shards:
        found.update(zip(shard.params, shard.spread(shard.grad)))
    return [found[param] for param in model.parameters() if param in found]


def off(found, wanted):
    """The largest relative error over pairs of tensors."""
    return max(relative_error(f, w) for f, w in zip(found, wanted, strict=True))


def bytes_held(optimizer):
    """Bytes of this rank's storages: [parameters, gradients, optimizer's state]."""
    shards, seen, sums = optimizer.shards, set(), []
    params = [param for shard in shards for param in shard.params]
    parameters = params + [t for shard in shards for t in (shard.own, shard.rows, *shard.whole)]
    gradients = [x.grad for x in (*params, *shards) if x.grad is not None]
    states = [x for *_, held in optimizer.local_state() for x in held.values() if x.dim()]
    for tensors in (parameters, gradients, states):
        found = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
        sums.append(sum(found[key] for key in found.keys() - seen))
        seen |= found.keys()
    return sums


def claimed(optimizer, K, sizes=(8, 8, 8)):
    """By formula, from shapes alone: bytes that this rank sends in a clipped step of K
    micro-batches, and bytes that it holds before, as bytes_held. sizes: bytes of a parameter, of a
    gradient, and of what the optimizer adds, which has no padding."""
    held, stage = torch.zeros(3), optimizer.stage
    among = {shard.group for shard in optimizer.shards} - {None}
    ring = lambda group: 1 - 1 / dist.get_world_size(group) if group else 0
    sent = sum(2 * ring(group) * 8 * len(optimizer.param_groups) for group in among)  # the norm
    for shard in optimizer.shards:
        n, P, s, mine = shard.n, sum(shape.numel() for shape in shard.shapes), 0, 0
        for shapes, together in shard.cells:
            numel = sum(shape.numel() for shape in shapes)
            s += (width := math.ceil(numel / together / n) * together)
            mine += min(max(numel - shard.r * width, 0), width)
        sent += sizes[0] * s * (n - 1) * (0, 2, K + 1, 3 * K)[stage]
        sent += sizes[1] * s * 2 * ring(shard.replicate_group) * (1, 1, K, K)[stage]
        held += torch.tensor([s if stage == 3 else n * s, P if stage < 2 else s, mine])
    return sent, [int(x) for x in held * torch.tensor(sizes)]


SGD, CLIP = dict(lr=0.5, momentum=0.9), 0.3


def check(stage, K, among, device, dtype=torch.float64, optimizer_class=torch.optim.SGD, **unit):
    """Two clipped steps at a stage, a batch divided over a group: with momentum, so that the second
    finds a state. Returns gradients and parameters, optimizer, bytes sent and held in a step."""
    n, r = dist.get_world_size(among), dist.get_rank(among)
    model, batch = tiny_model(device, dtype), proof_batch(n, K, device)
    given = SGD if optimizer_class is torch.optim.SGD else {}
    optimizer = sharded(model, stage, among, optimizer_class, unit, bucket_mb=0.005, **given)
    for _ in range(2):
        *_, sent, held = train_step(model, optimizer, batch[r], n * K * 8, CLIP)
    with gathered(model):
        found = whole_gradients(model, optimizer) + [x.detach().clone() for x in model.parameters()]
    return found, optimizer, sent, held


def proof(group, device, hybrid=None):
    """The rows of the table: every stage, and what forgetting an idea looks like. hybrid: a group
    to shard over, and one of replicas."""
    n, cases = dist.get_world_size(group), {
        "stage 0, data parallel": (0, {}), "ZeRO-1": (1, {}), "ZeRO-2": (2, {}), "ZeRO-3": (3, {}),
        "ZeRO-3, per parameter": (3, {"layout": "per_parameter"}),
    }  # fmt: skip
    if hybrid:
        both = dict(zip(("group", "replicate_group"), hybrid))
        cases |= {"hybrid ZeRO-1": (1, both), "hybrid ZeRO-3": (3, both)}
    for K in (1, 3):
        wanted = plain(n, K, device)
        for name, (stage, unit) in cases.items():
            found, optimizer, sent, held = check(stage, K, group, device, **unit)
            sent_claim, held_claim = claimed(optimizer, K)
            name = f"{name}, K = {K}"
            yield Row(name, off(found, wanted), (sent, sent_claim), (sum(held), sum(held_claim)))
    if n > 1:
        yield from prove_order(group, device)
        yield from wrong_on_purpose(group, device)


def wrong_on_purpose(group, device):
    """Rows without one idea of the chapter, each with the error that it must show."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    wanted, last = plain(n, 3, device), plain(n, 3, device, last_only=True)

    def overwrite(shard, real=Shard.finish_reduce):
        shard.grad = None
        real(shard)

    with patch.object(Shard, "finish_reduce", overwrite):
        found, *_ = check(2, 3, group, device)
    yield Row("a sum that overwrites the shard", off(found, wanted), wrong=off(last, wanted))

    model, twin = tiny_model(device), tiny_model(device)
    optimizer, batch = sharded(model, 2, group), proof_batch(n, 1, device)
    backward(model, batch[r], n * 8)
    backward(twin, sum(batch, []), n * 8)
    (shard,) = optimizer.shards
    grads = {name: param.grad for name, param in twin.named_parameters()}
    rows_ns = shard.pack([grads[optimizer.names[param]] for param in shard.params])
    right, own = (rows_ns / rows_ns.norm(dim=dim, keepdim=True) for dim in ((0, 1), 1))
    found = shard.pack(shard.spread(shard.grad / shard.grad.norm()))
    error, predicted = relative_error(found, right), relative_error(own, right)
    yield Row("clipped by each rank's own norm", error, wrong=predicted)

    whole = torch.arange(1.0, 2 * n + 2, device=device).double()
    s = (len(whole) + len(whole) % n) // n
    if s * n < len(whole):  # for two ranks the remainder is its own complement
        rows_ns = whole.new_empty(n, s)
        start_all_gather(rows_ns, whole[r * s : (r + 1) * s].contiguous(), group)()
        found = F.pad(rows_ns.flatten(), (0, len(whole) - n * s))
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

    with patch.multiple(Shard, **{x: look(getattr(Shard, x)) for x in ("gather", "wait", "free")}):
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
    backward(model, [micro_batch], 8)
    with Ledger() as ledger, watching(optimizer.shards) as seen:
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
    """Rows whose error is inf where something waits that should fly, all but the last bucket, and
    but the root and the first block; and what is gathered at most beside the formula."""
    stage_2, stage_3, gathered_bytes = orders(group, device)
    start = "reduce_scatter_single" if "nccl" in dist.get_backend() else "all_to_all_single"
    reduced = in_flight(stage_2, start, "gradient")[:-1]
    fetched = in_flight(stage_3, "all_gather_single", "compute")[2:]
    error = lambda flown: 0.0 if min(flown) > 0 else math.inf
    yield Row("ZeRO-2: backward goes on meanwhile", error(reduced))
    yield Row("ZeRO-3: a block computes meanwhile", error(fetched), held=gathered_bytes)


GUIDE = {16: (1400, 950, 600, 90), 256: (1400, 750, 350, 5.5)}  # its GB a rank for 70 B, by stage


def parts_each(stage, n):
    """Bytes a rank holds for each parameter, padding aside: of it and of its gradient in bf16, and
    of AdamW's master, m and v in fp32. Each stage cuts one more of the three, from the last."""
    return [size / (n if stage + i > 2 else 1) for i, size in enumerate((2, 2, 12))]


def bytes_each(stage, n):
    """The sum of parts_each: 16, 4 + 12/n, 2 + 14/n, 16/n."""
    return sum(parts_each(stage, n))


def per_stage_table(group, device):
    """Print the guide's table beside the right one, and this run's bytes. 0 if all are as they
    should be on this rank."""
    n, broken = dist.get_world_size(group), 0
    say("\nGB a rank for 70 B parameters,  16 ranks:      256 ranks:     bytes of this run's bf16 "
        f"model, {n} ranks\nbf16, with fp32 master, m and v  guide  right  guide  right "
        "   parameters    gradients        state      formula")  # fmt: skip
    for stage in range(4):
        cells = "".join(f"{GUIDE[k][stage]:7}{70 * bytes_each(stage, k):7.4g}" for k in GUIDE)
        _, optimizer, _, held = check(stage, 1, group, device, torch.bfloat16, torch.optim.AdamW)
        formula = claimed(optimizer, 1, sizes=(2, 2, 12))[1]
        say(f"stage {stage:<24}{cells}" + "".join(f"{x:13,}" for x in (*held, sum(formula)))
            + ("" if held == formula else "  NOT AS CLAIMED"))  # fmt: skip
        broken |= held != formula
    return int(broken)


# ── run ──────────────────────────────────────────────────────────────────────────────────────


def build(args, group, device):
    """The text of the run, its model and optimizer."""
    torch.manual_seed(0)
    model, given = LanguageModel().to(device), dict(unit={"layout": args.layout}, lr=3e-3)
    optimizer = sharded(model, args.stage, group, offload=args.offload, bucket_mb=0.5, **given)
    return read_text(args.text, 0), model, optimizer


def micro_batches(args, text, step, group, device):
    """[k]: this rank's k-th part of a step's batch: samples, and their labels."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    parts = (x.to(device).tensor_split(n)[r] for x in sample(text, step, args.batch, 64))
    return list(zip(*(part.tensor_split(args.micro_batches) for part in parts)))


def train(args, group, device):
    """Train on text; print the loss beside the unigram entropy, and what a step sends."""
    text, model, optimizer = build(args, group, device)
    sent_claim, held_claim = claimed(optimizer, args.micro_batches, sizes=(4, 4, 8))
    P = sum(shape.numel() for shard in optimizer.shards for shape in shard.shapes)
    say(f"\n{P:,} parameters, fp32, stage {args.stage}; unigram entropy of the text "
        f"{unigram_entropy(text):.3f}\nstep   loss   norm  tokens/s    sent/step      formula"
        "         held      formula")  # fmt: skip
    units, as_claimed = len(model.zero_unit.window.units) if args.stage == 3 else 0, True
    for step in range(args.steps):
        started, valid = time.perf_counter(), args.batch * 64
        batch = micro_batches(args, text, step, group, device)
        loss, norm, sent, held = train_step(model, optimizer, batch, valid, clip=1.0)
        # all_reduce(SUM) over dp, 1: the shares of the loss, for the reader
        dist.all_reduce(loss, group=group)
        first = 16 * (dist.get_world_size(group) - 1) * units * (not step)  # orders compared
        sizes = sent, sent_claim + first, sum(held), sum(held_claim[: 3 if step else 2])
        as_claimed &= abs(sizes[0] - sizes[1]) < 0.5 and sizes[2] == sizes[3]
        if step % 10 == 0 or step == args.steps - 1:
            rate = valid / (time.perf_counter() - started)
            cells = "".join(f"{x:13,.0f}" for x in sizes)
            say(f"{step:4}{loss:7.3f}{norm:7.3f}{rate:10,.0f}{cells}")
    return 0 if as_claimed else 1


def plot(args, group, device):
    """Draw bytes for each parameter by stage and number of ranks, measured ones as points, and
    which unit is gathered when in one step of stage 3."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subfigures(2)
    sizes = [2**i for i in range(7) if dist.get_world_size(group) % 2**i == 0]
    groups = {k: dist.new_subgroups(k, timeout=timedelta(seconds=60))[0] for k in sizes}
    P = sum(param.numel() for param in tiny_model("meta").parameters())
    ranks = [2 ** (x / 8) for x in range(49)]
    look = dict(colors=COLOURS, labels=("parameters", "gradients", "state"))
    for stage, axis in enumerate(above.subplots(1, 4, sharey=True)):
        axis.stackplot(ranks, *zip(*(parts_each(stage, k) for k in ranks)), **look)
        for k in sizes:
            *_, held = check(stage, 1, groups[k], device, torch.bfloat16, torch.optim.AdamW)
            tops = torch.tensor(held).cumsum(0) / P
            axis.plot([k] * 3, tops, "ok", markersize=3.5, clip_on=False)
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
        axis.set(title=f"stage {stage}", xlabel="ranks")
    above.axes[0].set_ylabel("bytes a parameter")
    above.axes[-1].legend(fontsize=8, loc="upper right")
    draw_window(args, group, device, below.subplots())
    if dist.get_rank() == 0:
        figure.savefig(args.plot, dpi=110)
        print(f"drew {args.plot}")


COLOURS = "#0b3c5d", "#f2a541", "#c9d6df"


def draw_window(args, group, device, axis):
    """One step of stage 3 as bars: from when a unit's gather begins until it is freed."""
    args.stage, args.layout = 3, "flat"
    text, model, optimizer = build(args, group, device)
    for step in range(3):  # the last is drawn: the first learns the order
        batch = micro_batches(args, text, step, group, device)
        dist.barrier(group=group)
        with watching(optimizer.shards) as seen:
            train_step(model, optimizer, batch, args.batch * 64)
    units = [unit.shards[0] for unit in model.zero_unit.window.units]
    ms = [1e3 * (seconds - seen[0][0]) for seconds, _ in seen]
    names = ["root: both ends", *(f"block {i}" for i in range(len(units) - 1))]
    for row, unit in enumerate(units):
        half = [0.3 * (now[optimizer.shards.index(unit)] > 0) for _, now in seen]
        edges = [row - x for x in half], [row + x for x in half]
        axis.fill_between(ms, *edges, step="post", color=COLOURS[row == 0], lw=0)
        if row == 0:  # it is gathered again when backward begins
            turn = [x for x, before, now in zip(ms[1:], half, half[1:]) if now > before][-1]
    axis.axvline(turn, color="k", linestyle=":", linewidth=1)
    axis.set_yticks(range(len(units)), names)
    axis.invert_yaxis()
    axis.set_title("stage 3: which unit is gathered when, in one step", fontsize=10, loc="left")
    axis.set_xlabel("ms; dotted: backward begins; a gather begins while the unit before computes")
    axis.spines[["top", "right"]].set_visible(False)


def main(args, device):
    """Prove, then train (or draw); 0 if everything is as claimed."""
    group, hybrid, n = dist.group.WORLD, None, dist.get_world_size()
    if n >= 4 and n % 2 == 0:  # two groups of shards; a rank's replica is n / 2 further
        halves = [list(range(n // 2)), list(range(n // 2, n))]
        patience = {"timeout": timedelta(seconds=args.timeout)}
        make = partial(dist.new_subgroups_by_enumeration, **patience)
        hybrid = make(halves)[0], make([list(pair) for pair in zip(*halves)])[0]
    say(f"02 ZeRO · {n} ranks · {dist.get_backend()} · {device.type}")
    broken = prove(list(proof(group, device, hybrid)), device)
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

    parser = arguments(__doc__, ranks=4, steps=60)
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="to train with")
    parser.add_argument("--layout", default="flat", choices=["flat", "per_parameter"])
    parser.add_argument("--offload", metavar="cpu|DIR", help="where AdamW's state is kept")
    parser.add_argument("--batch", type=int, default=32, help="samples of 64 bytes in a step")
    parser.add_argument("--micro-batches", type=int, default=1, help="of each rank in a step")
    parser.add_argument("--plot", metavar="PNG", help="draw bytes and window; do not train")
    launch(main, parser.parse_args(), validate)
