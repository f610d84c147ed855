"""07 · Five axes at once: a mixture-of-experts transformer on a grid of ranks, equal to one process

Chapters 01 to 06 each split one thing over a group of ranks. This chapter splits nothing new: it
lays all their groups on one grid. Four questions arise only then: which ranks form a group, over
which ranks a gradient is summed, what counts once in a norm, and how all ranks skip the same step.

    rank  0  1  2  3   4  5  6  7   8 ...          outermost axis: pp      stages of layers
          └tp┘  └tp┘   └tp┘  └tp┘   next stage     then dp                 sequences
          └── cp ──┘   └── cp ──┘                  then cp                 positions
          └──────── dp ─────────┘                  innermost: tp (+ SP)    heads, widths, vocabulary
          experts: the ranks of dp x cp, numbered once more as edp x ep

    parameter             split over    its gradient is summed over
    norm, router          -             dp, cp, and tp if SP gives tp ranks different tokens
    attention, MLP, ends  tp            dp, cp
    expert                ep            edp, and tp if SP
    tied embedding        tp            the same, after the first and last stage have added theirs

A rank holds 1/(pp·tp) of the dense weights and 1/(pp·ep) of the experts. ZeRO-1 splits AdamW's two
moments once more, over the ranks that the gradient is summed over. Chapter 02 makes those sums (its
stage 0 is the all-reduce of chapter 01, after backward), so of 01 itself only the kit is used.

    python 07_5d.py                                                    16 ranks: 2 of each axis
    python 07_5d.py --pp 1 --dp 2 --cp 1 --tp 1 --ep 2                 any other factorisation
    torchrun --nnodes 4 --nproc-per-node 8 07_5d.py ...                many machines: see README

Guide: 3D, 4D, 5D parallelism · Communication patterns and topology · Activation checkpointing ·
Gradient accumulation · Checkpointing and resharding · Hyperparameters. Nobody trains with five axes
at once: Llama 3 405B had TP 8, PP 16, CP 1 (16 for 131K tokens) and no experts; DeepSeek-V3 had
PP 16, EP 64 and no TP.
Questions  Q7.1 ** which ranks form a group?          Q7.2 *** over whom is a gradient summed?
           Q7.3 ** how often is an element counted?   Q7.4 ** which ranks skip a step?
"""
# n ranks · r this rank · m micro-batches · B sequences · b sequences of this rank
# S tokens of a sequence · s tokens of this rank · D width · E experts · P parameters

import importlib
import math
import signal
from collections import namedtuple
from datetime import timedelta
from functools import partial

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads ends it without a trace

import numpy as np
import torch
import torch.distributed as dist
from einops import rearrange
from torch import nn
from torch.utils.checkpoint import checkpoint

chapters = "01_dp", "02_zero", "03_tp", "04_pp_schedules", "05_ep", "06_cp_ring"
dp, zero, tp, pp, ep, cp = map(importlib.import_module, chapters)

# ── the grid: which ranks form a group ───────────────────────────────────────────────────────

# Sixteen ranks, two along each axis, in the order pp dp cp tp. Rank 5 = 0·8 + 1·4 + 0·2 + 1 is at
# pp 0, dp 1, cp 0, tp 1. The four ranks of dp x cp that share its pp and tp are 1 3 5 7. Experts
# number these again, as edp x ep: rank 5 is the third of them, at edp 1, ep 0. Its groups:
#
#   axes       ranks             what they do together
#   pp         5 13              pass activations forward, and their gradients back
#   tp         4 5               add partial sums of one matrix product
#   cp         5 7               pass keys and values round
#   ep         5 7               send tokens to their experts
#   dp cp      1 3 5 7           add gradients of what tp splits: four batches of tokens
#   dp cp tp   0 1 2 3 4 5 6 7   add gradients of a norm: under SP all eight had other tokens
#   edp tp     0 1 4 5           add gradients of an expert: it has had 6's and 7's tokens


class Grid:
    """Ranks as a named array, and the process group of this rank along each set of axes.

    Args: the size of each axis; order, the axes from the outermost to the innermost, which gets
    neighbouring ranks and so the fastest links; alone=True makes a grid of this rank by itself,
    for the serial twin; timeout, in seconds, of the groups' collectives. `grid["dp cp"]` is the
    group of the ranks that differ from this rank in dp and cp and in no other axis.
    """

    DENSE, EXPERT = "pp dp cp tp", "pp edp ep tp"  # two ways to name the axes of the same ranks
    GROUPS = "pp", "cp", "tp", "ep", "edp", "edp tp", "dp cp", "dp cp tp", "pp dp cp tp"

    def __init__(self, pp, dp, cp, tp, ep, order="pp dp cp tp", alone=False, timeout=60):
        self.sizes = dict(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, edp=dp * cp // ep)
        self.me = dist.get_rank()
        ranks = np.array([self.me]) if alone else np.arange(pp * dp * cp * tp)
        # Q7.1 ** Name the axes of the ranks, for dense parameters and for experts. Along which axis
        #         are neighbours also neighbours in rank?
        #         hint: the last name in the pattern of a rearrangement varies fastest
        self.dense = rearrange(ranks, f"({order}) -> pp dp cp tp", pp=pp, dp=dp, cp=cp, tp=tp)
        plane = rearrange(self.dense, "pp dp cp tp -> pp (dp cp) tp")
        self.expert = rearrange(plane, "pp (edp ep) tp -> pp edp ep tp", ep=ep)
        # /Q7.1
        self.at = {}  # this rank's coordinate along each axis
        for names, array in (self.DENSE, self.dense), (self.EXPERT, self.expert):
            self.at.update(zip(names.split(), np.argwhere(array == self.me)[0].tolist()))
        options = dict(timeout=timedelta(seconds=timeout), use_local_synchronization=alone)
        self._groups, made = {}, {}
        for axes in self.GROUPS:  # every rank makes every group in this order, or all would hang
            for peers in self.rows(axes).tolist():
                key = axes if len(peers) > 1 else "one rank", *peers  # one rank needs one group
                if key not in made:
                    made[key] = dist.new_group(peers, **options)
                if self.me in peers:
                    self._groups[axes] = made[key]

    def rows(self, axes):
        """Rank numbers (groups, size of a group) for axes such as "dp cp"."""
        dense = set(axes.split()) <= set(self.DENSE.split())
        names, array = (self.DENSE, self.dense) if dense else (self.EXPERT, self.expert)
        others = " ".join(name for name in names.split() if name not in axes.split())
        return rearrange(array, f"{names} -> ({others}) ({axes})")

    def __getitem__(self, axes):
        return self._groups[axes]

    def size(self, axes):
        """Number of ranks along axes such as "dp cp"."""
        return math.prod(self.sizes[axis] for axis in axes.split())

    def lines(self):
        """The grid as text: a line for each stage, a block for each (dp, cp), tp across."""
        for stage, plane in enumerate(self.dense):
            yield f"pp {stage}   " + "   ".join(
                f"dp {d} cp {c}: " + " ".join(f"{rank:2}" for rank in row)
                for d, rows in enumerate(plane) for c, row in enumerate(rows)
            )  # fmt: skip


# ── the table: over which ranks a gradient is summed ─────────────────────────────────────────


def reduction_table(sp):
    """{kind of parameter: (axes that split it, axes that its gradient is summed over)}.

    The stages of the pipeline split every kind. All that this file does with a parameter follows
    from this table: what is summed, what counts in the norm, what ZeRO shards, which rank writes it
    to a checkpoint, how many bytes are sent.
    """
    # Q7.2 *** A gradient is a sum over tokens. Which axes hold other tokens for the same weights?
    #          hint: an expert got the tokens of its whole ep group; tp ranks have the same ones,
    #          unless SP splits them
    return {
        "whole": ("", "dp cp tp" if sp else "dp cp"),
        "cut by tp": ("tp", "dp cp"),
        "expert": ("ep", "edp tp" if sp else "edp"),
    }
    # /Q7.2


# ── the model, split along all axes ──────────────────────────────────────────────────────────

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class Block(nn.Module):
    """Attention, then a dense MLP or a mixture of experts, each on a normed copy of the residual
    stream: (b, s, D) to itself. Under SP a tp rank has s/tp of the tokens between the layers."""

    def __init__(self, args, layer, grid, attend):
        super().__init__()
        torch.manual_seed(1 + layer)  # by global index, so that every layout starts alike
        D, sp = args.width, "regather" if args.sp else "off"
        self.norm1, self.norm2 = tp.RMSNorm(D), tp.RMSNorm(D)
        if args.recompute == "selective":
            attend = partial(checkpoint, attend, use_reentrant=False)
        heads = D, args.heads, args.kv_heads
        self.attention = tp.Attention(*heads, grid["tp"], sp=sp, attend=attend)
        if args.experts and layer % args.every == args.every - 1:
            router = ep.Router(
                D, args.experts, args.top_k, balance=0.01 if args.balance == "aux" else 0.0,
                group=grid["dp cp tp" if args.sp else "dp cp"], microbatches=args.micro_batches,
            )  # fmt: skip
            self.mlp = ep.MoE(router, args.hidden // 2, grid["ep"], shared=args.hidden // 2)
        else:
            self.mlp = tp.MLP(D, args.hidden, grid["tp"], sp=sp)
        self.recompute = args.recompute == "full"

    def forward(self, x, positions_s):
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.compute, x, positions_s, use_reentrant=False)
        return self.compute(x, positions_s)

    def compute(self, x, positions_s):
        """What forward returns; full recomputation calls it again in backward."""
        x = x + self.attention(self.norm1(x), positions_s)
        return x + self.mlp(self.norm2(x))


MicroBatch = namedtuple("MicroBatch", "x_bs y_bs positions_s valid")


class Stage(nn.Module):
    """Consecutive blocks, named by global index; the first stage embeds, the last has the loss."""

    def __init__(self, args, layers, grid, attend, first, last, embedding):
        super().__init__()
        self.width, self.grid, self.parts = args.width, grid, grid.size("tp") if args.sp else 1
        self.first, self.last = first, last
        self.blocks = nn.ModuleDict({str(k): Block(args, k, grid, attend) for k in layers})
        self.embedding = embedding if first or (last and args.tied) else None
        if last:
            torch.manual_seed(1 + args.layers)
            self.norm, sp = tp.RMSNorm(args.width), "regather" if args.sp else "off"
            ends = args.width, 256, grid["tp"]
            self.head = tp.ColumnParallelLinear(*ends, sp=sp, blocks=((256, 1),))
            if args.tied:
                self.head.weight = embedding.weight

    def boundary(self, micro_batch):
        """Room for what arrives from a neighbouring stage."""
        b, s = micro_batch.x_bs.shape
        return next(self.parameters()).new_empty(b, s // self.parts, self.width)

    def forward(self, h, micro_batch):
        """Hidden states in and out; out of the last stage, this rank's part of the loss."""
        x_bs, y_bs, positions_s, valid = micro_batch
        if self.first:
            h = self.embedding(x_bs)
        for block in self.blocks.values():
            h = block(h, positions_s)
        if not self.last:
            return h
        logits_bsv = self.head(self.norm(h))
        losses_bs = tp.vocab_parallel_cross_entropy(logits_bsv, y_bs, 256, self.grid["tp"])
        return losses_bs.sum() / valid


def attention_of(args, grid):
    """(attend(q, k, v), layout of positions) over the context-parallel group."""
    if grid.size("cp") == 1:
        return tp.causal, "contiguous"
    layout = "contiguous" if args.attention == "ulysses" else "zigzag"
    kinds = {"ring": cp.ring_attention, "all-gather": cp.all_gather_attention,
             "ulysses": cp.ulysses_attention}  # fmt: skip
    return partial(kinds[args.attention], group=grid["cp"], layout=layout), layout


class Model:
    """The stages that this rank holds, its parameters by name and kind, and their optimizer.

    `named` {name: parameter} by global layer index, `kinds` {name: kind in the reduction table},
    `specs` {name: how tp or ep cuts it}. table: changes of the reduction table; options go to the
    optimizer. Raises Disagreement where ranks have different flags.
    """

    def __init__(self, args, grid, device, optimizer_class=torch.optim.AdamW,
                 table=None, **options):  # fmt: skip
        dp.agree([f"--{flag} {value}" for flag, value in vars(args).items()], grid["pp dp cp tp"])
        self.args, self.grid, self.device, self.written = args, grid, device, []
        self.schedule = make_schedule(args, grid.size("pp"))
        self.place = pp.placement(self.schedule)
        self.holders = 2 if (1, 0) in self.place else 1  # DualPipe: each stage stands on two ranks
        self.table = {**reduction_table(args.sp), **(table or {})}
        self.table["copy"] = self.table["cut by tp"]  # the last stage's copy of a tied embedding
        self.build_stages()
        self.name_parameters()
        self.shapes = {name: param.shape for name, param in self.named.items()}
        self.reduce_dtype = torch.float32 if args.precision == "bf16" else None
        if args.zero == 3:
            fully_shard(self)
        groups = [
            {"params": [pair for pair in self.named.items() if self.kinds[pair[0]] == kind],
             "group": grid[summed], "kind": kind}
            for kind, (_, summed) in self.table.items() if kind in self.kinds.values()
        ]  # fmt: skip
        self.optimizer = zero.ZeroOptimizer(
            groups, optimizer_class, stage=args.zero, reduce_dtype=self.reduce_dtype, **options
        )

    def build_stages(self):
        """Make this rank's stages. Layers are shared out to stages as evenly as possible."""
        args, grid = self.args, self.grid
        last = max(stage for _, stage in self.place)
        here = sorted({stage for (_, stage), r in self.place.items() if r == grid.at["pp"]})
        attend, self.layout = attention_of(args, grid)
        torch.manual_seed(0)
        sp = "regather" if args.sp else "off"
        embedding = tp.VocabParallelEmbedding(256, args.width, grid["tp"], sp)
        layers = np.array_split(np.arange(args.layers), last + 1)
        self.stages, self.routers = {}, []
        for k in here:
            stage = Stage(args, layers[k], grid, attend, k == 0, k == last, embedding)
            self.stages[k] = stage.to(self.device, DTYPES[args.precision])
            self.routers += [part for part in stage.modules() if isinstance(part, ep.Router)]
        for router in self.routers:  # a bias learns by thousandths, which bf16 would round away
            router.bias_E = router.bias_E.float()
        self.second_end = args.tied and last in self.stages and 0 not in self.stages

    def name_parameters(self):
        """Give every parameter of this rank its name, its kind, and how it is cut."""
        self.named, self.kinds, self.specs = {}, {}, {}
        for stage in self.stages.values():
            cut, experts = tp.shard_specs(stage), ep.shard_specs(stage)
            for name, param in stage.named_parameters():
                if stage.embedding and param is stage.embedding.weight:
                    name = "embedding.weight"
                self.named[name] = param
                kind = "cut by tp" if name in cut else "expert" if name in experts else "whole"
                self.kinds[name] = kind
                self.specs[name] = {**cut, **experts}.get(name)
        if self.second_end:
            self.kinds["embedding.weight"] = "copy"

    def copies(self, kind):
        """How many ranks hold the same element of a parameter of this kind."""
        # Q7.3 ** Every rank adds its squares to one sum. How often does an element come up in it?
        #         hint: once for each rank of its stage, divided by the axes that split it
        split, _ = self.table[kind]
        stage_ranks = self.grid.size("dp cp tp")
        return self.holders * stage_ranks // self.grid.size(split)
        # /Q7.3

    def micro_batches(self, x_BS, y_BS):
        """This rank's part of each micro-batch of the whole batch: the sequences of its dp
        coordinate, the positions of its cp coordinate. A label of -100 does not count."""
        grid, m = self.grid, self.args.micro_batches
        inner = grid.size("tp") if self.args.sp else 1
        positions_s = cp.positions(x_BS.shape[1], grid["cp"], self.layout, inner).to(self.device)
        part = lambda whole: whole.chunk(grid.size("dp"))[grid.at["dp"]][:, positions_s.cpu()]
        pairs = [(part(x).to(self.device), part(y).to(self.device))
                 for x, y in zip(x_BS.chunk(m), y_BS.chunk(m))]  # fmt: skip
        valid = sum((y != -100).sum() for _, y in pairs)
        # all_reduce(SUM) over dp x cp, 1: the one divisor of the step
        dist.all_reduce(valid, group=grid["dp cp"])
        return [MicroBatch(x, y, positions_s, valid) for x, y in pairs]

    def gradients(self, x_BS, y_BS):
        """Forward, backward, and all reductions. Returns (loss, gradient norm) of the whole step,
        the same numbers on every rank."""
        loss = self.run_schedule(self.schedule, x_BS, y_BS)
        if self.args.tied or self.holders == 2:
            pp.share_gradients(self.schedule, self.stages, self.grid["pp"])
        kinds = [group["kind"] for group in self.optimizer.param_groups]
        squares = dict(zip(kinds, self.optimizer.grad_norm_sq()))
        square = sum(squares[kind] / self.copies(kind) for kind in kinds if kind != "copy")
        totals = torch.stack([loss, square])
        # all_reduce(SUM) over all ranks, 2: the loss, and the square of the one gradient's norm
        dist.all_reduce(totals, group=self.grid["pp dp cp tp"])
        return totals[0].item(), totals[1].sqrt().item()

    def step(self, x_BS, y_BS, rate, max_norm=1.0):
        """One step at a learning rate. Returns (loss, norm). A norm that is not finite is so on
        every rank, and means that every rank skipped the step."""
        loss, norm = self.gradients(x_BS, y_BS)
        # Q7.4 ** One rank has a NaN in its gradient. Which ranks skip the step, and how do they
        #         know?
        #         hint: a decision that each rank takes alone is taken differently somewhere
        if math.isfinite(norm):
            self.optimizer.scale_gradients(min(1.0, max_norm / (norm + 1e-6)))
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            for router in self.routers if self.args.balance == "bias" else ():
                router.update_bias(1e-3)
        # /Q7.4
        self.optimizer.zero_grad()
        for router in self.routers:  # a step that was skipped leaves no counts behind
            router.load_2E.zero_()
        return loss, norm

    def evaluate(self, x_BS, y_BS):
        """The loss of a batch, forward only, by the forwards of the same schedule."""
        forwards = [[tuple(op for op in cell if op.kind == "F") for cell in cells]
                    for cells in self.schedule]  # fmt: skip
        loss = self.run_schedule([[*filter(None, cells)] for cells in forwards], x_BS, y_BS)
        # all_reduce(SUM) over all ranks, 1
        dist.all_reduce(loss, group=self.grid["pp dp cp tp"])
        return loss.item()

    def run_schedule(self, schedule, x_BS, y_BS):
        """Run the micro-batches; return this rank's share of the loss: of tp ranks, the first."""
        micro_batches = self.micro_batches(x_BS, y_BS)
        losses, _ = pp.execute(schedule, self.stages, micro_batches, self.grid["pp"])
        share = sum(losses.values()) if self.grid.at["tp"] == 0 else 0.0
        return torch.as_tensor(share, dtype=torch.float64, device=self.device)


# ── what a library adds: schedules by name, ZeRO-3, a count, learning rates ──────────────────


def make_schedule(args, stages):
    """The lists of the schedule for `stages` ranks of pp. Raises ValueError as its generator does;
    the generator's --ranks are --pp here."""
    there, here = "--ranks", "--pp"
    try:
        return pp.SCHEDULES[args.schedule](stages, args.micro_batches)
    except ValueError as refusal:
        raise ValueError(str(refusal).replace(there, here)) from None


def n_stages(args):
    """Stages of the model under the schedule of the arguments."""
    return 1 + max(stage for _, stage in pp.placement(make_schedule(args, args.pp)))


def fully_shard(model):
    """Make units of ZeRO-3: each block, and the stage around the blocks. Under SP each norm is a
    unit too, because its gradient is summed over more ranks than those of the layers."""
    norms, others = (model.grid[model.table[kind][1]] for kind in ("whole", "cut by tp"))
    for stage in model.stages.values():
        for unit in (*stage.blocks.values(), stage):
            for part in unit.modules() if norms is not others else ():
                if isinstance(part, tp.RMSNorm) and not hasattr(part, "zero_unit"):
                    zero.fully_shard(part, norms, reduce_dtype=model.reduce_dtype)
            zero.fully_shard(unit, others, reduce_dtype=model.reduce_dtype)
    for param in model.named.values():  # micro-batches add up in the wider dtype too
        param.grad_dtype = model.reduce_dtype or param.dtype


def parameter_count(model, active=False):
    """How many parameters all ranks hold together, each counted once; with active=True, of the
    experts only as many as a token goes to."""
    chosen = model.args.top_k / model.args.experts if active and model.args.experts else 1
    share = {"copy": 0, "expert": chosen}
    here = sum(
        share.get(kind, 1) * model.shapes[name].numel() / model.copies(kind)
        for name, kind in model.kinds.items()
    )
    count = torch.tensor(here, dtype=torch.float64, device=model.device)
    # all_reduce(SUM) over all ranks, 1
    dist.all_reduce(count, group=model.grid["pp dp cp tp"])
    return round(count.item())


def rate_at(step, args):
    """Linear warm-up over a tenth of the steps; then cosine to a tenth of the peak, or "wsd": stay
    at the peak, and decay linearly over the last fifth."""
    warm, t = max(1, args.steps // 10), step / max(1, args.steps)
    if step < warm:
        return args.rate * (step + 1) / warm
    if args.decay == "wsd":
        return args.rate * min(1.0, (1 - t) / 0.2)
    return args.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * t)))


# ── from here on: proof, run, kit ────────────────────────────────────────────────────────────

import argparse
import io
import json
import os
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from unittest.mock import patch

AXES = "pp", "dp", "cp", "tp", "ep", "all"
RECOMPUTE = "none", "selective", "full"

# ── bytes sent, by formula ───────────────────────────────────────────────────────────────────


def part(n):
    """The part of a tensor that leaves a rank of n in a reduce-scatter or an all-gather."""
    return (n - 1) / n


def sent_by_formula(model, x_BS, plans):
    """{axis: bytes} that this rank sends in Model.gradients; plans: of each MoE forward, in order.
    By axis, not by group: dp has all reductions over replicas, "all" the two totals."""
    args, grid, e = model.args, model.grid, model.optimizer.shards[0].own.element_size()
    size, m, sent = grid.size, args.micro_batches, Counter()
    bs = len(x_BS) // m // size("dp") * x_BS.shape[1] // size("cp")  # tokens of a micro-batch
    for stage in model.stages.values():
        sent["tp"] += m * sent_over_tp(args, stage, size("tp"), bs, e)
        sent["cp"] += m * len(stage.blocks) * sent_over_cp(args, size("tp"), size("cp"), bs, e)
    # rows go to experts and back, and so do gradients; of a plan and its repetition, one has those
    passes = 1.5 if args.recompute == "full" else 2
    for plan in plans:
        r, n = grid.at["ep"], size("ep")
        rows = sum(plan.sent) - plan.sent[r] + sum(plan.received) - plan.received[r]
        sent["ep"] += passes * rows * args.width * e + 8 * (n - 1) * (args.experts // n)
    last = max(stage for _, stage in model.place)
    for op in (op for cell in model.schedule[grid.at["pp"]] for op in cell):
        to, _ = pp.receiver(op, model.place, last)
        crosses = to is not None and to != grid.at["pp"]
        sent["pp"] += crosses * bs * args.width * e / (size("tp") if args.sp else 1)
    ends = {model.place[0, 0], model.place[0, last]}
    if model.holders == 2:  # the two ranks of a stage exchange all their gradients
        sent["pp"] += sum(param.nbytes for param in model.named.values())
    elif args.tied and len(ends) == 2 and grid.at["pp"] in ends:
        sent["pp"] += model.named["embedding.weight"].nbytes
    sent["dp"] = sent_to_replicas(model, e)
    sent["all"] = 2 * part(size("pp dp cp tp")) * 16
    return sent


def sent_over_tp(args, stage, n, bs, e):
    """Bytes of a micro-batch of bs tokens in a stage: chapter 03's table, forward and backward."""
    once = part(n) * bs * args.width * e  # one all-gather or reduce-scatter of these tokens
    dense = sum(not isinstance(block.mlp, ep.MoE) for block in stage.blocks.values())
    calls = (5 if args.sp else 4) * (len(stage.blocks) + dense)
    if args.recompute == "full":  # a block's forward once more, but for its last collective: the
        calls += 2 * len(stage.blocks) + (1 if args.sp else 0) * dense  # checkpoint stops before it
    calls += 2 * stage.first + (3 if args.sp else 2) * stage.last
    return calls * once + stage.last * 2 * part(n) * 3 * bs * max(e, 4)


def sent_over_cp(args, n_tp, n, bs, e):
    """Bytes of a micro-batch of bs tokens in one attention: chapter 06's formulas."""
    d, again, wide = args.width // args.heads, args.recompute != "none", max(e, 4)
    kv_heads = max(args.kv_heads // n_tp, 1)
    kv, q = 2 * bs * kv_heads * d, bs * args.heads // n_tp * d
    if args.attention == "ulysses":  # q, k and v go, the result comes; fewer heads are copied
        there, back = part(n) * (q + 2 * bs * math.lcm(kv_heads, n) * d) * e, part(n) * q * e
        return (2 + again) * there + (2 + (args.recompute == "full")) * back
    forward = (n - 1) * kv * e
    backward = (n - 1) * kv * wide
    if args.attention == "ring":  # keys and values go round once more, their gradients go home
        backward = forward + n * kv * wide * (n > 1)
    return forward * (1 + again) + backward


def sent_to_replicas(model, e):
    """Bytes of gradients, of elements of e bytes, and of what else a step sums over replicas."""
    args, size, m = model.args, model.grid.size, model.args.micro_batches
    over, counts, sent = Counter(), Counter(), 0
    for name, shape in model.shapes.items():
        axes = model.table[model.kinds[name]][1]
        over[axes] += shape.numel()
        counts[axes] += 1  # beside the gradients, a reduction counts who used each parameter
    squares = 8 * len(model.optimizer.param_groups)
    for axes, P in over.items():
        n = size(axes)
        padded = -(-P // n) * n + n * counts[axes] if args.zero else P + counts[axes]
        sent += part(n) * (2 * squares if args.zero else 0)
        sent += part(n) * {0: 2, 1: 1, 3: 0}[args.zero] * padded * e  # 1 gathers in step()
    for shard in model.optimizer.shards if args.zero == 3 else ():
        row = -(-sum(shape.numel() for shape in shard.shapes) // shard.n)
        row = 3 * row + len(shard.shapes)  # gathered twice, reduced once, each micro-batch
        sent += m * (shard.n - 1) * row * e
    for stage in model.stages.values():  # twice a unit: do all ranks enter the same one?
        units = sum(hasattr(module, "zero_unit") for module in stage.modules())
        sent += units * 2 * 8 * (size("dp cp") - 1)
    sent += 2 * part(size("dp cp")) * 8  # how many labels count
    routers = sum(router.balance > 0 for router in model.routers)
    among, times = size("dp cp tp" if args.sp else "dp cp"), 2 if args.recompute == "full" else 1
    return sent + m * routers * times * 2 * part(among) * 8 * args.experts  # counts for the balance


def sent_by_axis(ledger, grid):
    """{axis: bytes} of a ledger's events, by the group that each went over."""
    axis_of = {"dp cp": "dp", "dp cp tp": "dp", "edp": "dp", "edp tp": "dp", "pp dp cp tp": "all"}
    names = {grid[axes].group_name: axis_of.get(axes, axes) for axes in grid.GROUPS}
    sent = Counter()
    for event in ledger.events:
        if event.sent:
            sent[names[event.group]] += event.sent
    return sent


# ── proof ────────────────────────────────────────────────────────────────────────────────────


def changed(args, **changes):
    """A copy of the arguments, with changes."""
    return argparse.Namespace(**{**vars(args), **changes})


def twin_of(model, **options):
    """The whole model on this rank alone: no axis, no SP, no ZeRO, one micro-batch after the other.
    That it computes the right thing is held to plain torch in tests/twin_5d.py."""
    alone = dict(pp=1, dp=1, cp=1, tp=1, ep=1)
    plain = dict(sp=False, zero=0, schedule="gpipe", recompute="none", attention="ring")
    args = changed(model.args, **alone, **plain)
    return Model(args, Grid(**alone, alone=True), model.device, **options)


def local_gradients(model):
    """(name, (start, stop), elements) of the summed gradients that this rank holds."""
    for shard in model.optimizer.shards:
        for piece in shard.pieces:
            name = model.optimizer.names[piece.param]
            yield name, (piece.start, piece.stop), shard.grad[piece.where]


def part_of(whole, model, name, span):
    """The elements of a whole tensor that this rank holds as `span` of its part."""
    spec = model.specs[name]
    if spec is not None:
        split, _ = model.table[model.kinds[name]]
        whole = tp.shard(whole, spec, model.grid.size(split), model.grid.at[split])
    return whole.flatten()[slice(*span)]


def largest_error(triples, reference, model):
    """Over (name, span, elements) beside {name: whole}: max|difference| / max|whole|."""
    worst = 0.0
    for name, span, elements in triples:
        gap = (elements - part_of(reference[name], model, name, span)).abs().max().item()
        size = reference[name].abs().max().item()
        worst = max(worst, gap / size if size else math.inf if gap else 0.0)
    return worst


def small(args):
    """The arguments of the run, with a model that float64 proves in seconds."""
    length = 4 * args.cp * math.lcm(2, args.tp)
    heads = dict(width=4 * args.heads, hidden=6 * args.heads)  # so that the ranks can share them
    return changed(args, **heads, layers=2 * n_stages(args), length=length, precision="fp64")


def proof_batch(args, grid):
    """A batch of the small model, with unequal numbers of counted labels on the ranks."""
    draw = torch.Generator().manual_seed(3)
    B = args.micro_batches * grid.size("dp")
    x_BS, y_BS = torch.randint(256, (2, B, args.length), generator=draw)
    y_BS[torch.rand(y_BS.shape, generator=draw) < torch.linspace(0.1, 0.7, B)[:, None]] = -100
    return x_BS, y_BS


def proof(args, grid, device):
    """Rows: loss, norm, every gradient, weights after three steps; bytes by axis; bytes held; and
    the reduction table with one entry changed."""
    batch, model = proof_batch(args, grid), Model(args, grid, device)
    twin, plans = twin_of(model), []
    note = lambda *inputs, real=ep.make_plan: plans.append(real(*inputs)) or plans[-1]
    with dp.Ledger() as ledger, patch.object(ep, "make_plan", note):
        loss, norm = model.gradients(*batch)
    twin_loss, twin_norm = twin.gradients(*batch)
    reference = {name: part.view_as(twin.named[name]) for name, _, part in local_gradients(twin)}
    yield dp.Row("every gradient", largest_error(local_gradients(model), reference, model))
    yield dp.Row("loss", abs(loss / twin_loss - 1))
    yield dp.Row("norm of the gradient", abs(norm / twin_norm - 1))
    sent, formula = sent_by_axis(ledger, grid), sent_by_formula(model, batch[0], plans)
    for axis in AXES:
        yield dp.Row(f"bytes over {axis}", 0.0, sent=(sent[axis], formula[axis]))
    model.optimizer.step()
    bytes_held = held(model), held_by_formula(model, twin)
    yield dp.Row("bytes of weights and AdamW's state", 0.0, held=bytes_held)
    kept = kept_by_block(args, grid, device, "full")
    yield dp.Row("kept by a block, recomputed in full", 0.0, held=kept)

    sgd = dict(optimizer_class=torch.optim.SGD, lr=0.1)
    model, twin = Model(args, grid, device, **sgd), twin_of(model, **sgd)
    for _ in range(3):
        for each in (model, twin):
            each.step(*batch, rate=0.1)
    state = model.optimizer.local_state()
    weights = [(name, span, tensors["param"]) for name, span, tensors in state]
    yield dp.Row("weights after three SGD steps", largest_error(weights, twin.named, model))
    yield from wrong_on_purpose(args, grid, device, batch, twin_of(model), reference, twin_norm)


def kept_by_block(args, grid, device, recompute):
    """Bytes that a block keeps of one sequence for backward, without its weights; and those of its
    input and positions, which is all that full recomputation needs."""
    args = changed(args, recompute=recompute)
    (attend, layout), inner = attention_of(args, grid), grid.size("tp") if args.sp else 1
    positions_s = cp.positions(args.length, grid["cp"], layout, inner).clone().to(device)
    x = torch.randn(1, len(positions_s) // inner, args.width, dtype=torch.float64, device=device)
    block = Block(args, 0, grid, attend).to(x)
    weights = {param.untyped_storage()._cdata for param in block.parameters()}
    with cp.kept_bytes() as kept:
        block(x.clone().requires_grad_(), positions_s)
    total = sum(nbytes for storage, nbytes in kept.items() if storage not in weights)
    return total, x.nbytes + positions_s.nbytes


def held(model):
    """Bytes of this rank's weights between steps, and of AdamW's state of each element."""
    total = sum(param.nbytes for param in model.named.values())
    for *_, tensors in model.optimizer.local_state():
        own = {key for key in tensors if key != "param" or model.args.zero == 3}
        total += sum(tensors[key].nbytes for key in own if tensors[key].dim())
    return total


def held_by_formula(model, twin):
    """From the twin's whole tensors and the table: weights / split, twice that / replicas; at
    stage 3, unit by unit, weights / replicas too."""
    grid, over, stage = model.grid, Counter(), model.args.zero
    for name in model.named:
        _, summed = model.table[model.kinds[name]]
        unit = model.named[name].shard if stage == 3 else None
        whole = part_of(twin.named[name], model, name, (None, None))
        over[summed, unit] += whole.numel()
    total = 0
    for (axes, _), P in over.items():
        n, r = (grid.size(axes), dist.get_rank(grid[axes])) if stage else (1, 0)
        row = -(-P // n)
        here = min(max(P - r * row, 0), row)
        total += 8 * (3 * here if stage == 3 else P + 2 * here)
    return total


def wrong_on_purpose(args, grid, device, batch, twin, reference, twin_norm):
    """The reduction table with one entry changed, and the error that it must show."""
    args = changed(args, zero=0)  # so that every rank has all to compare
    model, n_tp, n_ep = Model(args, grid, device), grid.size("tp"), grid.size("ep")
    if n_tp > 1:
        right = model.copies
        model.copies = lambda kind: right(kind) // (n_tp if kind == "whole" else 1)
        whole = [reference[name] for name in reference if twin.kinds[name] == "whole"]
        squares = sum(gradient.square().sum().item() for gradient in whole)
        predicted = math.sqrt(1 + (n_tp - 1) * squares / twin_norm**2) - 1
        error = model.gradients(*batch)[1] / twin_norm - 1
        yield dp.Row("norms counted once a tp rank", error, wrong=predicted)
    if args.experts and n_ep > 1:
        model = Model(args, grid, device, table={"expert": ("ep", model.table["whole"][1])})
        model.gradients(*batch)
        # each place among a rank's experts gets the sum of what all ranks have in that place
        sums = {name: sum(reference[name].chunk(n_ep)).repeat(n_ep, 1, 1)
                for name in reference if twin.kinds[name] == "expert"}  # fmt: skip
        yield beside("experts summed over dp x cp", model, sums, reference)
    ends = [rank for (_, stage), rank in model.place.items() if stage in (0, n_stages(args) - 1)]
    if args.tied and len(ends) == len(set(ends)) == 2:
        model = Model(args, grid, device)
        with patch.object(pp, "share_gradients", lambda *_: None):
            model.gradients(*batch)
        embedding, head = untied_gradients(twin, batch)
        alone = {"embedding.weight": head if model.second_end else embedding}
        yield beside("tied embedding not summed", model, alone, reference)


def beside(name, model, predicted, reference):
    """The row of gradients that are wrong on purpose, and so are {name: whole tensor}."""
    own = [each for each in local_gradients(model) if each[0] in predicted]
    parts = [(name, span, part_of(predicted[name], model, name, span)) for name, span, _ in own]
    errors = [largest_error(each, reference, model) for each in (own, parts)]
    return dp.Row(name, errors[0], wrong=errors[1])


def untied_gradients(twin, batch):
    """What the embedding alone, and the head alone, add to the gradient of their weight."""
    untied = Model(changed(twin.args, tied=False), twin.grid, twin.device)
    (stage,) = untied.stages.values()
    with torch.no_grad():
        stage.head.weight.copy_(twin.named["embedding.weight"])
    untied.gradients(*batch)
    gradients = {name: part for name, _, part in local_gradients(untied)}
    like = twin.named["embedding.weight"]
    return [gradients[name].view_as(like) for name in ("embedding.weight", "head.weight")]


# ── checkpoints that any grid can read ───────────────────────────────────────────────────────


def save(model, step, folder, keep=2):
    """Write the checkpoint of a step, every rank its own pieces; of those that this run has written
    to the folder, the newest `keep` stay.

    A checkpoint appears under its name only when all ranks have written and synced their files: a
    run that is killed at any moment leaves the last complete one. All machines must share `folder`.
    Raises Disagreement, with the file's name, where a file cannot be written.
    """
    world, r, folder = model.grid["pp dp cp tp"], model.grid.me, Path(folder)
    final, unfinished = folder / f"step_{step:08}", folder / f"step_{step:08}.partial"
    if r == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier(group=world)
    file = io.BytesIO()
    torch.save({"pieces": list(pieces(model)), "random": torch.get_rng_state()}, file)
    write(unfinished / f"rank_{r:05}.pt", file.getvalue())
    digest, digests = sha256(file.getvalue()).hexdigest(), [None] * dist.get_world_size(world)
    # all_gather_object over all ranks: all files are written, and this is what is in them
    dist.all_gather_object(digests, digest, group=world)
    if r == 0:
        files = {f"rank_{rank:05}.pt": digest for rank, digest in enumerate(digests)}
        model.written.append(final.name)
        manifest = {"step": step, "written": model.written, "grid": model.grid.sizes,
                    "files": files, **flags_of(model.args)}  # fmt: skip
        manifest = json.dumps(manifest).encode()
        seal = sha256(manifest).hexdigest().encode()
        write(unfinished / "manifest", seal + b"\n" + manifest)
        sync(unfinished)
        if final.exists():  # a damaged one, which --resume has passed over: it is kept aside
            final.rename(tempfile.mkdtemp(prefix=f"{final.name}.old_", dir=folder))
        unfinished.rename(final)
        sync(folder)
        while len(model.written) > keep:
            shutil.rmtree(folder / model.written.pop(0), ignore_errors=True)
    dist.barrier(group=world)


def write(file, content):
    """Write a file of a checkpoint, and wait until it is on the disk."""
    try:
        file.write_bytes(content)
        sync(file)
    except OSError as error:
        raise dp.Disagreement(f"--save: {file} cannot be written: {error.strerror}") from None


def sync(path):
    """Wait until the bytes of a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def biases(model):
    """{name: buffer} of the routers' biases on this rank: state that no optimizer holds."""
    named = [pair for stage in model.stages.values() for pair in stage.named_buffers()]
    return {name: buffer for name, buffer in named if name.endswith("bias_E")}


def pieces(model):
    """(name, its cut, elements start:stop of this cut flattened, tensors) that this rank writes.
    Where several ranks hold the same elements, the first of them writes."""
    at = model.grid.at
    if model.holders == 2 and 2 * at["pp"] >= model.grid.size("pp"):
        return
    for name, (start, stop), tensors in model.optimizer.local_state():
        split, summed = model.table[model.kinds[name]]
        sharded = summed.split() if model.args.zero else []
        others = {"edp", "ep", "tp"} if split == "ep" else {"dp", "cp", "tp"}
        first = all(at[axis] == 0 for axis in others - {split, *sharded})
        if first and model.kinds[name] != "copy":
            cut = (at[split], model.grid.size(split)) if split else (0, 1)
            yield name, cut, (start, stop), {k: v.clone() for k, v in tensors.items()}
    if all(at[axis] == 0 for axis in ("dp", "cp", "tp")):
        for name, bias_E in biases(model).items():
            yield name, (0, 1), (0, bias_E.numel()), {"param": bias_E.clone()}


def checkpoints(folder):
    """Complete checkpoints in a folder, oldest first."""
    return sorted(Path(folder).glob("step_" + 8 * "[0-9]"))


def newest(folder):
    """(path, manifest, sentences about newer ones that are damaged) of the newest whole checkpoint;
    (None, None, []) where the folder has none. Raises ValueError where all are damaged."""
    damages = []
    for path in reversed(checkpoints(folder)):
        try:
            manifest = json.loads(intact(path / "manifest"))
            for name, digest in manifest["files"].items():
                intact(path / name, digest)
            return path, manifest, damages
        except ValueError as damage:
            damages.append(str(damage))
    if damages:
        raise ValueError(f"--resume: no checkpoint is whole: {'; '.join(damages)}")
    return None, None, []


def intact(file, digest=None):
    """The bytes of a file of a checkpoint. A manifest has its digest in its first line, which is
    not returned. Raises ValueError, with the file's name, where it is not what was written."""
    if not file.is_file():
        raise ValueError(f"{file} is missing")
    content = file.read_bytes()
    if digest is None:
        seal, _, content = content.partition(b"\n")
        digest = seal.decode(errors="replace")
    if sha256(content).hexdigest() != digest:
        raise ValueError(f"{file} is not what was written")
    return content


@torch.no_grad()
def load(model, folder):
    """Take parameters and optimizer state from the newest whole checkpoint, whatever grid wrote it,
    and on the same grid this rank's random state. Returns the step to go on with, 0 without any.

    Raises Disagreement where ranks see different checkpoints, or where the checkpoint and the model
    have different names; then nothing has been changed.
    """
    world, (path, manifest, _) = model.grid["pp dp cp tp"], newest(folder)
    digest = sha256(json.dumps(manifest).encode()).hexdigest()
    dp.agree([f"{path} as the newest whole checkpoint, of digest {digest[:12]}"], world)
    if path is None:
        return 0
    written, random = read(model, path, manifest)
    here = [*model.named, *biases(model)]
    dist.all_gather_object(names := [None] * dist.get_world_size(world), here, group=world)
    names = {name for each in names for name in each}
    if names != written.keys():
        lacks, has = (", ".join(sorted(x)) for x in (names - {*written}, {*written} - names))
        raise dp.Disagreement(f"--resume: {path} lacks {lacks or 'nothing'}, and has "
                              f"{has or 'nothing'} beyond what this model has")  # fmt: skip
    new = {name: {key: resharded(model, name, cuts) for key, cuts in written[name].items()}
           for name in model.named}  # fmt: skip
    state, groups = {}, model.optimizer.param_groups
    pairs = [pair for group in groups for pair in zip(group["param_names"], group["params"])]
    with ExitStack() as whole:
        for stage in model.stages.values():
            whole.enter_context(zero.gathered(stage))  # so that what ZeRO-3 shards can be written
        for index, (name, param) in enumerate(pairs):
            master = new[name].pop("param")
            param.copy_(master)
            masters = {"master": master} if param.dtype != master.dtype else {}
            state[index] = {**new[name], **masters}
    for name, bias_E in biases(model).items():
        bias_E.copy_(written[name]["param"][0, 1][0][1])
    model.optimizer.load_state_dict({"state": state, "param_groups": groups})
    if random is not None:
        torch.set_rng_state(random)
    model.written = manifest["written"]
    return manifest["step"]


def read(model, path, manifest):
    """({name: {tensor: {cut: [((start, stop), elements)]}}}, random state) of a checkpoint. Names
    that this rank does not hold are empty; the random state is None on another grid."""
    written, random = defaultdict(lambda: defaultdict(dict)), None
    here = {*model.named, *biases(model)}
    for file in manifest["files"]:
        saved = torch.load(path / file, map_location="cpu", weights_only=True)
        for name, cut, span, tensors in saved["pieces"]:
            kept = written[name]
            for key, tensor in tensors.items() if name in here else ():
                kept[key].setdefault(cut, []).append((span, tensor))
        if file == f"rank_{model.grid.me:05}.pt" and manifest["grid"] == model.grid.sizes:
            random = saved["random"]
    return written, random


def resharded(model, name, cuts):
    """This rank's part of a tensor, from the pieces {(cut, of): [((start, stop), elements)]}."""
    (_, first), *_ = next(iter(cuts.values()))
    if first.dim() == 0:  # a number that belongs to the whole tensor, such as AdamW's step
        return first
    join = lambda pieces: torch.cat([x for _, x in sorted(pieces, key=lambda piece: piece[0])])
    parts = [join(cuts[cut]) for cut in sorted(cuts)]
    shape, spec = model.shapes[name], model.specs[name]
    if spec is None:
        return parts[0].view(shape)
    split, dim = model.table[model.kinds[name]][0], spec[0]
    n, r = model.grid.size(split), model.grid.at[split]
    shape = [size * n // len(parts) if i == dim else size for i, size in enumerate(shape)]
    return tp.shard(tp.unshard([part.view(shape) for part in parts], spec), spec, n, r)


def flags_of(args):
    """{"model": what a run that resumes must have alike, "flags": what may change, and is said}.
    The digest of the text is kept in the arguments, where it is compared over ranks as well."""
    if "text_sha256" not in args:
        text = dp.read_text(args.text, 0).to(torch.uint8)
        args.text_sha256 = sha256(text.numpy().tobytes()).hexdigest()
    alike = "layers width heads kv_heads hidden experts top_k every tied batch length text_sha256"
    may_change = {*vars(args)} - {*alike.split(), "text", "ranks", "timeout", "save", "resume"}
    of = lambda flags: {flag: getattr(args, flag) for flag in sorted(flags)}
    return {"model": of(alike.split()), "flags": of(may_change)}


# ── run ──────────────────────────────────────────────────────────────────────────────────────


def train(args, grid, device):
    """Train on text. A line every few steps, and wherever the last is ten seconds old: loss, norm,
    tokens/s, time left, bytes sent by axis; now and then, the loss of text that was held out."""
    text = dp.read_text(args.text, 0)
    training, held_out = text[: -len(text) // 20], text[-len(text) // 20 :]
    model = Model(args, grid, device, weight_decay=0.1, betas=(0.9, 0.95))
    first = load(model, args.resume) if args.resume else 0
    P, active = parameter_count(model), parameter_count(model, active=True)
    dp.say(
        f"\n{P:,} parameters, {active:,} of them active; "
        f"unigram entropy of the text {dp.unigram_entropy(text):.3f}"
        + (f"; going on from step {first}" if first else "")
    )
    for sentence in what_changed(args) if first else ():
        dp.say(sentence)
    axes = "".join(f"{axis:>10}" for axis in AXES)
    dp.say(f"step        loss   norm   tokens/s    left{axes}   bytes that rank 0 sent")
    unseen = dp.sample(held_out, 0, args.batch, args.length)
    validation = lambda: dp.say(f"loss of text that was held out {model.evaluate(*unseen):.3f}")
    began = said = time.perf_counter()
    for step in range(first, args.steps):
        if step % args.validate_every == 0:
            validation()
        started = time.perf_counter()
        with dp.Ledger() as ledger:
            batch = dp.sample(training, step, args.batch, args.length)
            loss, norm = model.step(*batch, rate_at(step, args))
        now, to_do = time.perf_counter(), args.steps - step - 1
        if not math.isfinite(norm):
            dp.say(f"{step + 1:4} skipped on every rank: the gradient's norm is {norm}")
        elif step == first or (step + 1) % args.print_every == 0 or not to_do or now - said > 10:
            speed, said = args.batch * args.length / (now - started), now
            left = to_do * (now - began) / (step + 1 - first)
            sent = "".join(f"{sent_by_axis(ledger, grid)[axis]:10,.0f}" for axis in AXES)
            dp.say(f"{step + 1:4}/{args.steps:<4}{loss:7.3f}{norm:7.2f}{speed:11,.0f}"
                   f"{left:7.0f}s{sent}{utilisation(active, speed)}")  # fmt: skip
        if args.save and ((step + 1) % args.save_every == 0 or not to_do):
            save(model, step + 1, args.save, args.keep)
    validation()
    return 0


def what_changed(args):
    """Sentences about the checkpoint that is resumed: newer ones that are damaged, and flags."""
    path, manifest, damages = newest(args.resume)
    yield from (f"{damage}: passed over for {path.name}" for damage in damages)
    for flag, now in flags_of(args)["flags"].items():
        if (before := manifest["flags"].get(flag)) != now:
            yield f"--{flag.replace('_', '-')} {before} -> {now}"


def utilisation(active, speed):
    """Model FLOPs utilisation at so many tokens/s, where a peak is known: 6 FLOPs a token and
    active parameter, without attention's scores and without experts that get no token."""
    if not torch.cuda.is_available():
        return ""
    try:
        peak = importlib.import_module("memory_math").peak_flops(torch.cuda.get_device_name())
    except ValueError:
        return ""
    return f"   MFU {6 * active * speed / (peak * dist.get_world_size()):.1%}"


def main(args, device):
    """Prove on this very grid, then train."""
    grid = Grid(args.pp, args.dp, args.cp, args.tp, args.ep, args.order, timeout=args.timeout)
    dp.say(f"07 five axes · {dist.get_world_size()} ranks · {dist.get_backend()} · {device.type}")
    dp.say("\n".join(grid.lines()) + "\n")
    broken = dp.prove(list(proof(small(args), grid, device)), device)
    kept = [f"{how} {kept_by_block(small(args), grid, device, how)[0]:,}" for how in RECOMPUTE]
    dp.say(f"\na block keeps for backward, by --recompute, bytes of a sequence: {', '.join(kept)}")
    return broken | (train(args, grid, device) if args.steps else 0)


# ── what is refused ──────────────────────────────────────────────────────────────────────────


def validate(args, ranks):
    """Refuse, in a sentence with the numbers, what cannot work."""
    for rules in (rules_of_grid, rules_of_model, rules_of_zero_3, rules_of_folders):
        for wrong, sentence in rules(args, ranks):
            if wrong:
                raise ValueError(sentence)


def rules_of_grid(args, ranks):
    """(wrong, sentence) of each number alone, of the axes, and of the text."""
    for flag, (_, least, _) in FLAGS.items():
        n = getattr(args, flag.replace("-", "_"))
        yield type(least) is int and n < least, f"--{flag} {n}: at least {least} is needed"
    yield args.steps < 0, f"--steps {args.steps}: at least 0 is needed"
    yield not 0 < args.rate < math.inf, f"--rate {args.rate}: a rate is more than 0"
    sizes = {axis: getattr(args, axis) for axis in ("pp", "dp", "cp", "tp")}
    product, n = " x ".join(f"--{axis} {n}" for axis, n in sizes.items()), math.prod(sizes.values())
    yield n != ranks, f"{product} = {n}, and there are {ranks} ranks"
    named_once = sorted(args.order.split()) == sorted(sizes)
    yield not named_once, f"--order {args.order!r}: name each of pp, dp, cp and tp once"
    plane, text = args.dp * args.cp, f"--dp {args.dp} x --cp {args.cp}"
    divisors = [n for n in range(1, plane + 1) if plane % n == 0]
    yield plane % args.ep, f"--ep {args.ep} does not divide {text}: use one of {divisors}"
    dp.read_text(args.text, at_least=20 * (args.length + 1))


def rules_of_model(args, ranks):
    """(wrong, sentence) of what the model and its schedule ask of the grid."""
    E, k, m, ulysses = args.experts, args.top_k, args.micro_batches, args.attention == "ulysses"
    yield E % args.ep, f"--ep {args.ep} does not divide --experts {E}"
    yield E and not 1 < k <= E, f"--top-k {k}: choose from 2 to {E} experts, or gates are all 1"
    two_copies = args.schedule == "dualpipe" and E and args.balance == "bias"
    why = "each copy of a router would learn from its half of the micro-batches"
    yield two_copies, f"--schedule dualpipe: {why}: say --balance aux"
    yield args.kv_heads % args.tp, f"--tp {args.tp} does not divide --kv-heads {args.kv_heads}"
    tp.check_heads(args.width, args.heads, args.kv_heads, args.tp)
    tp.check_divides(args.tp, hidden=args.hidden)
    heads = args.heads // args.tp
    left = f"the {heads} heads that --tp {args.tp} leaves a rank"
    yield ulysses and heads % args.cp, f"ulysses: --cp {args.cp} does not divide {left}"
    halves = 1 if args.cp == 1 or ulysses else 2  # zigzag: an early and a late half
    parts = args.cp * math.lcm(halves, args.tp if args.sp else 1)
    why = f"cp parts, of {halves} chunks each, and of tp chunks each under SP"
    yield args.length % parts, f"--length {args.length} is no multiple of {parts}: {why}"
    factors = f"--micro-batches {m} x --dp {args.dp}"
    yield args.batch % (m * args.dp), f"--batch {args.batch} is no multiple of {factors}"
    stages = n_stages(args)
    why = f"{args.schedule} on --pp {args.pp} has {stages} stages, of a layer or more each"
    yield stages > args.layers, f"--layers {args.layers}: {why}"


def rules_of_zero_3(args, ranks):
    """(wrong, sentence) of what does not go together with fully sharded parameters."""
    lists = make_schedule(args, args.pp) if args.zero == 3 else []
    splits = "W" in {op.kind for cells in lists for cell in cells for op in cell}
    if args.zero == 3:
        units = args.recompute == "full" and args.sp and args.tp > 1
        yield units, "--zero 3 --recompute full: under SP norms are units: say --no-sp"
        yield splits, f"--zero 3 reduces in backward, which {args.schedule} splits"
        yield args.experts, "--zero 3 shards dense models: say --experts 0, or --zero 1"
        ends = args.tied and args.pp > 1
        yield ends, f"--zero 3 --pp {args.pp}: both ends share no shard: say --no-tied"


def rules_of_folders(args, ranks):
    """(wrong, sentence) of checkpoints: none to go on from, one of another model, or others in the
    way of new ones."""
    here, (path, manifest, _) = flags_of(args)["model"], newest(args.resume or os.devnull)
    missing = args.resume and not path and args.resume != args.save
    yield missing, f"--resume {args.resume}: there is no checkpoint in it"
    for flag, value in manifest["model"].items() if path else ():
        yield value != here[flag], f"--resume: {path} has {flag} {value}, not {here[flag]}"
    step = manifest["step"] if path else 0
    past = f"--resume: {path} is of step {step}, past --steps {args.steps}"
    yield 0 < args.steps < step, past
    others = checkpoints(args.save) if args.save and args.save != args.resume else []
    names = ", ".join(path.name for path in others)
    yield others, f"--save {args.save}: {names} is there; --resume it, or move it"
    try:
        Path(args.save or ".").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        yield True, f"--save {args.save}: {error.strerror}"


FLAGS = {  # flag: (default, at least or one of, what it is)
    "pp": (2, 1, "pipeline ranks, each with consecutive layers"),
    "dp": (2, 1, "data-parallel ranks, each with other sequences"),
    "cp": (2, 1, "context-parallel ranks, each with other positions of a sequence"),
    "tp": (2, 1, "tensor-parallel ranks, each with a part of heads, widths and vocabulary"),
    "ep": (2, 1, "expert-parallel ranks, a divisor of dp x cp, each with other experts"),
    "layers": (4, 1, "blocks of the model"),
    "width": (64, 1, "width of the residual stream"),
    "heads": (8, 1, "query heads"),
    "kv-heads": (4, 1, "key/value heads"),
    "hidden": (128, 1, "hidden units of an MLP; an expert has half"),
    "experts": (4, 0, "experts of a mixture; 0 makes all layers dense"),
    "top-k": (2, 1, "experts of a token"),
    "every": (2, 1, "one of so many layers is a mixture of experts"),
    "length": (64, 1, "tokens of a sequence"),
    "batch": (16, 1, "sequences of a step"),
    "micro-batches": (2, 1, "micro-batches of a step"),
    "order": ("pp dp cp tp", None, "axes, the innermost last"),
    "schedule": ("1f1b", (*pp.SCHEDULES,), "pipeline schedule"),
    "attention": ("ring", ("ring", "all-gather", "ulysses"), "how cp ranks attend"),
    "sp": (True, None, "split tokens over tp between the layers"),
    "tied": (True, None, "one matrix for embedding and head"),
    "zero": (1, (0, 1, 3), "stage of ZeRO"),
    "recompute": ("none", RECOMPUTE, "what backward computes again: attention, or whole blocks"),
    "precision": ("fp32", ("fp32", "bf16"), "dtype of weights; bf16 has fp32 master copies"),
    "balance": ("aux", ("aux", "bias", "none"), "what keeps experts' loads even"),
    "rate": (3e-3, None, "peak learning rate"),
    "decay": ("cosine", ("cosine", "wsd"), "learning rate after the warm-up"),
    "save": (None, None, "folder for checkpoints"),
    "save-every": (10, 1, "steps from one checkpoint to the next"),
    "keep": (2, 1, "checkpoints of this run that stay in the folder"),
    "resume": (None, None, "folder with the checkpoints to go on from"),
    "print-every": (5, 1, "steps from one printed line to the next"),
    "validate-every": (10, 1, "steps from one validation to the next"),
}


def options(argv=None):
    """The command line, parsed."""
    parser = dp.arguments(__doc__, ranks=None, steps=30)
    for flag, (default, allowed, what) in FLAGS.items():
        kind = {"type": type(default) if default is not None else str}
        if isinstance(default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        elif isinstance(allowed, tuple):
            kind["choices"] = allowed
        what += f"; default: {default}"
        parser.add_argument(f"--{flag}", default=default, help=what, **kind)
    args = parser.parse_args(argv)
    if args.ranks is None:
        args.ranks = args.pp * args.dp * args.cp * args.tp
    return args


if __name__ == "__main__":
    import torch._dynamo  # noqa: F401  an optimizer loads it: once here, not in each forked rank

    dp.launch(main, options(), validate)
