"""07 · Five axes at once: a mixture-of-experts transformer on a grid of ranks, equal to one process

Nothing new is split here. Chapters 01 to 06 each split one thing; this one lays their groups on one
grid of ranks and settles the questions that only arise together: who adds which gradient to whom,
what divides the loss, what counts once in a norm, and what a checkpoint must say so that any other
grid can read it. One table answers the first; all else follows from it.

    rank  0  1  2  3   4  5  6  7   8 ...          outermost axis: pp      stages of layers
          └tp┘  └tp┘   └tp┘  └tp┘   next stage     then dp                 samples
          └── cp ──┘   └── cp ──┘                  then cp                 positions
          └──────── dp ─────────┘                  innermost: tp (+ SP)    heads, widths, vocabulary
          experts: the plane dp x cp once more, as edp x ep

    parameter             split over    its gradient is summed over
    norm, router          -             dp, cp, and tp if SP gives tp ranks different tokens
    attention, MLP, ends  tp            dp, cp
    expert                ep            edp, and tp if SP
    tied embedding        tp            the same, after first and last stage have added theirs

    python 07_5d.py                                                    16 ranks: 2 of each axis
    python 07_5d.py --pp 1 --dp 2 --cp 1 --tp 1 --ep 2                 any other factorisation
    torchrun --nnodes 4 --nproc-per-node 8 07_5d.py ...                many machines: see README

Guide: 3D, 4D, 5D parallelism · Communication patterns and topology · Activation checkpointing ·
Gradient accumulation · Checkpointing and resharding · Hyperparameters. Llama 3 405B had no five
axes: TP 8, PP 16, CP 1 (16 for 131K tokens), no experts; DeepSeek-V3 had PP 16, EP 64 and no TP.

Questions  Q7.1 ** which ranks form a group?   Q7.2 *** over whom is a gradient summed?
           Q7.3 ** what counts once?           Q7.4 ** who decides to skip?
"""
# B samples of a step, b of a micro-batch here · S bytes of a sample, s of them on this cp rank
# D width · H query and K key/value heads · F inner width · E experts · V vocabulary (256)

import argparse
import hashlib
import importlib
import io
import json
import math
import os
import shutil
import time
from collections import Counter, defaultdict, namedtuple
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from einops import rearrange
from torch import nn
from torch.utils.checkpoint import checkpoint

dp, zero, tp, pp, ep, cp = (
    importlib.import_module(name)
    for name in ("01_dp", "02_zero", "03_tp", "04_pp_schedules", "05_ep", "06_cp_ring")
)

# ── the grid ─────────────────────────────────────────────────────────────────────────────────


class Grid:
    """Ranks as one named array, and this rank's process group along every set of axes in use.

    Args: the size of each axis; order, the axes from the outermost to the innermost, which gets
    neighbouring ranks and so the fastest links; alone=True makes a grid of this rank by itself,
    for the serial twin. `grid["dp cp"]` is the group of the ranks that differ from this one in
    nothing but dp and cp. Experts divide the plane dp x cp again, as edp x ep with ep inside.
    """

    GROUPS = "pp", "cp", "tp", "ep", "edp", "edp tp", "dp cp", "dp cp tp", "pp dp cp tp"

    def __init__(self, pp, dp, cp, tp, ep, order="pp dp cp tp", alone=False, timeout=60):
        self.sizes = dict(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, edp=dp * cp // ep)
        self.me = dist.get_rank()
        ranks = np.array([self.me]) if alone else np.arange(pp * dp * cp * tp)
        # Q7.1 ** Name the axes of the ranks, for dense parameters and for experts: whose neighbours
        #         are neighbours in rank?
        #         hint: the last name in the pattern of a rearrangement varies fastest
        self.dense = rearrange(ranks, f"({order}) -> pp dp cp tp", pp=pp, dp=dp, cp=cp, tp=tp)
        self.expert = rearrange(
            rearrange(self.dense, "pp dp cp tp -> pp (dp cp) tp"),
            "pp (edp ep) tp -> pp edp ep tp", ep=ep,
        )  # fmt: skip
        # /Q7.1
        dense, expert = (np.argwhere(a == self.me)[0].tolist() for a in (self.dense, self.expert))
        self.at = dict(zip("pp dp cp tp edp ep".split(), [*dense, *expert[1:3]]))
        given = dict(timeout=timedelta(seconds=timeout), use_local_synchronization=alone)
        self._groups, made = {}, {}
        for axes in self.GROUPS:  # every rank makes every group, in this order, or all would hang
            for peers in self.rows(axes).tolist():
                of = axes if len(peers) > 1 else "any axes", peers[0]
                if of not in made:
                    made[of] = dist.new_group(peers, **given)
                if self.me in peers:
                    self._groups[axes] = made[of]

    def rows(self, axes):
        """Rank numbers (groups, size of a group) for axes such as "dp cp"."""
        names = "pp edp ep tp" if "e" in axes else "pp dp cp tp"
        array = self.expert if "e" in axes else self.dense
        others = " ".join(name for name in names.split() if name not in axes.split())
        return rearrange(array, f"{names} -> ({others}) ({axes})")

    def __getitem__(self, axes):
        return self._groups[axes]

    def size(self, axes):
        """Ranks along axes such as "dp cp"."""
        return math.prod(self.sizes[axis] for axis in axes.split())

    def lines(self):
        """The grid as text: for each stage a table of ranks, a row per (dp, cp), tp across."""
        for stage, plane in enumerate(self.dense):
            yield f"pp {stage}   " + "   ".join(
                f"dp {d} cp {c}: " + " ".join(f"{rank:2}" for rank in row)
                for d, rows in enumerate(plane) for c, row in enumerate(rows)
            )  # fmt: skip


# ── the model, cut along all axes ────────────────────────────────────────────────────────────


class Block(nn.Module):
    """Attention, then a dense MLP or a mixture of experts, each on a normed copy of the residual
    stream: (b, s, D) to itself, s / tp tokens of it on each rank under SP."""

    def __init__(self, args, layer, grid, attend):
        super().__init__()
        torch.manual_seed(1 + layer)  # by global index, so that no layout changes the start
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

    def forward(self, x, positions_s, later=None):
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.compute, x, positions_s, later, use_reentrant=False)
        return self.compute(x, positions_s, later)

    def compute(self, x, positions_s, later):
        x = x + self.attention(self.norm1(x, later), positions_s, later)
        return x + self.mlp(self.norm2(x, later), later)


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

    def forward(self, h, micro_batch, later=None):
        """Hidden states in, and out; out of the last stage, this rank's part of the loss."""
        x_bs, y_bs, positions_s, valid = micro_batch
        if self.first:
            h = self.embedding(x_bs, later)
        for block in self.blocks.values():
            h = block(h, positions_s, later)
        if not self.last:
            return h
        logits_bsv = self.head(self.norm(h, later), later)
        lost_bs = tp.vocab_parallel_cross_entropy(logits_bsv, y_bs, 256, self.grid["tp"])
        return lost_bs.sum() / valid


def attention_of(args, grid):
    """(attend(q, k, v), layout) over the context-parallel group."""
    layout = "contiguous" if args.attention == "ulysses" else "zigzag"
    over = dict(group=grid["cp"], layout=layout)
    if grid.size("cp") == 1:
        return tp.causal, layout
    kinds = {"ring": cp.ring_attention, "all-gather": cp.all_gather_attention}
    return partial(kinds.get(args.attention, cp.ulysses_attention), **over), layout


def reduction_table(sp):
    """{kind of parameter: (axes it is split over, axes its gradient is summed over)}. The stages
    split everything. All that this file does with a parameter is read off here: what is reduced,
    what counts in the norm, who writes it to a checkpoint, how many bytes it takes."""
    # Q7.2 *** A gradient is a sum over tokens. Which axes hold other tokens for the same weights?
    #          hint: an expert saw its tokens of all its ep group; tp ranks share them, unless SP
    return {
        "whole": ("", "dp cp tp" if sp else "dp cp"),
        "cut by tp": ("tp", "dp cp"),
        "expert": ("ep", "edp tp" if sp else "edp"),
    }
    # /Q7.2


class Model:
    """The stages that this rank holds, its parameters by name and kind, and their optimizer."""

    def __init__(self, args, grid, device, optimizer_class=torch.optim.AdamW, table=None, **given):
        self.args, self.grid, self.device = args, grid, device
        self.schedule = make_schedule(args, grid.size("pp"))
        self.place = pp.placement(self.schedule)
        self.twins = (1, 0) in self.place  # DualPipe: each stage stands on two ranks
        last = max(stage for _, stage in self.place)
        here = sorted({s for (_, s), rank in self.place.items() if rank == grid.at["pp"]})
        attend, self.layout = attention_of(args, grid)
        torch.manual_seed(0)
        sp = "regather" if args.sp else "off"
        embedding = tp.VocabParallelEmbedding(256, args.width, grid["tp"], sp)
        cuts = np.array_split(np.arange(args.layers), last + 1)
        build = lambda s: Stage(args, cuts[s], grid, attend, s == 0, s == last, embedding)
        self.stages = {s: build(s).to(device, DTYPES[args.precision]) for s in here}
        self.named, self.kinds, self.specs = {}, {}, {}
        for stage in self.stages.values():
            tp_specs, experts = tp.shard_specs(stage), ep.shard_specs(stage)
            for name, param in stage.named_parameters():
                name = "embedding.weight" if param is embedding.weight else name
                self.named[name] = param
                self.kinds[name] = (
                    "cut by tp" if name in tp_specs else "expert" if name in experts else "whole"
                )
                self.specs[name] = {**tp_specs, **experts}.get(name)
        if args.tied and 0 not in self.stages and last in self.stages:
            self.kinds["embedding.weight"] = "copy"
        self.table = {**reduction_table(args.sp), **(table or {})}
        self.table["copy"] = self.table["cut by tp"]
        groups = [
            {"params": [(n, p) for n, p in self.named.items() if self.kinds[n] == kind],
             "group": grid[summed], "kind": kind}
            for kind, (_, summed) in self.table.items() if kind in self.kinds.values()
        ]  # fmt: skip
        self.shapes = {name: param.shape for name, param in self.named.items()}
        for stage in self.stages.values() if args.zero == 3 else ():
            self._fully_shard(stage)
        reduce_dtype = torch.float32 if args.precision == "bf16" else None
        self.optimizer = zero.ZeroOptimizer(
            groups, optimizer_class, stage=args.zero, reduce_dtype=reduce_dtype, **given
        )
        modules = [module for stage in self.stages.values() for module in stage.modules()]
        self.routers = [module for module in modules if isinstance(module, ep.Router)]
        for router in self.routers:  # a bias learns by thousandths, which bf16 would round away
            router.bias_E = router.bias_E.float()

    def _fully_shard(self, stage):
        """Make units of ZeRO-3: each block, the stage around them, and, under SP, each norm, whose
        gradient is summed over more ranks than theirs."""
        norms, others = (self.grid[self.table[kind][1]] for kind in ("whole", "cut by tp"))
        for unit in (*stage.blocks.values(), stage):
            for part in unit.modules() if norms is not others else ():
                if isinstance(part, tp.RMSNorm) and not hasattr(part, "zero_unit"):
                    zero.fully_shard(part, norms)
            zero.fully_shard(unit, others)

    def copies(self, kind):
        """How many ranks hold the same element of a parameter of this kind."""
        # Q7.3 ** Every rank adds its squares to one sum. How often does an element come up in it?
        #         hint: once for each rank of its stage, but for the axes that it is split over
        split, _ = self.table[kind]
        stage_ranks = self.grid.size("dp cp tp")
        return (1 + self.twins) * stage_ranks // self.grid.size(split)
        # /Q7.3

    def parameters(self, active=False):
        """How many parameters all ranks hold together, each counted once; of the experts, if
        active, only as many as a token goes to."""
        chosen = self.args.top_k / self.args.experts if active and self.args.experts else 1
        share = {"copy": 0, "expert": chosen}
        mine = sum(
            share.get(kind, 1) * self.shapes[name].numel() / self.copies(kind)
            for name, kind in self.kinds.items()
        )
        count = torch.tensor(mine, dtype=torch.float64, device=self.device)
        # all_reduce(SUM) over all ranks, 1
        dist.all_reduce(count, group=self.grid["pp dp cp tp"])
        return round(count.item())

    def micro_batches(self, x_BS, y_BS):
        """This rank's part of each micro-batch of the whole batch, labels that do not count -100:
        the samples of its dp coordinate, the positions of its cp coordinate."""
        grid, m = self.grid, self.args.micro_batches
        inner = grid.size("tp") if self.args.sp else 1
        positions_s = cp.positions(x_BS.shape[1], grid["cp"], self.layout, inner).to(self.device)
        mine = lambda whole: whole.chunk(grid.size("dp"))[grid.at["dp"]][:, positions_s.cpu()]
        x_y = [[mine(part).to(self.device) for part in (x, y)]
               for x, y in zip(x_BS.chunk(m), y_BS.chunk(m))]  # fmt: skip
        valid = sum((y != -100).sum() for _, y in x_y)
        # all_reduce(SUM) over dp x cp, 1: the one divisor of the step
        dist.all_reduce(valid, group=grid["dp cp"])
        return [MicroBatch(x, y, positions_s, valid) for x, y in x_y]

    def gradients(self, x_BS, y_BS):
        """Forward, backward, and all reductions. Returns (loss, gradient norm) of the whole step,
        the same numbers on every rank."""
        loss = self._run(self.schedule, x_BS, y_BS)
        if self.args.tied or self.twins:
            pp.share_gradients(self.schedule, self.stages, self.grid["pp"])
        kinds = [group["kind"] for group in self.optimizer.param_groups]
        squares = dict(zip(kinds, self.optimizer.grad_norm_sq()))
        square = sum(squares[kind] / self.copies(kind) for kind in kinds if kind != "copy")
        totals = torch.stack([loss, square])
        # all_reduce(SUM) over all ranks, 2: the loss, and the square of the one gradient's norm
        dist.all_reduce(totals, group=self.grid["pp dp cp tp"])
        return totals[0].item(), totals[1].sqrt().item()

    def step(self, x_BS, y_BS, rate, max_norm=1.0):
        """One step at a learning rate. Returns (loss, norm); a norm that is not finite, on every
        rank alike, means that the step was skipped."""
        loss, norm = self.gradients(x_BS, y_BS)
        # Q7.4 ** One rank found a NaN. Who has to leave this step out, and how do they know?
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
        only_f = lambda cell: tuple(op for op in cell if op.kind == "F")
        forwards = [[only_f(cell) for cell in cells if only_f(cell)] for cells in self.schedule]
        loss = self._run(forwards, x_BS, y_BS)
        # all_reduce(SUM) over all ranks, 1
        dist.all_reduce(loss, group=self.grid["pp dp cp tp"])
        return loss.item()

    def _run(self, schedule, x_BS, y_BS):
        """Run the micro-batches; return this rank's share of the loss: tp rank 0 has all."""
        micro_batches = self.micro_batches(x_BS, y_BS)
        losses, _ = pp.execute(schedule, self.stages, micro_batches, self.grid["pp"])
        mine = sum(losses.values()) if self.grid.at["tp"] == 0 else 0.0
        return torch.as_tensor(mine, dtype=torch.float64, device=self.device)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def make_schedule(args, stages):
    """The lists of the schedule for `stages` ranks of pp. Raises ValueError as its generator does,
    whose --ranks are --pp here."""
    try:
        return pp.SCHEDULES[args.schedule](stages, args.micro_batches)
    except ValueError as refused:
        raise ValueError(str(refused).replace("--ranks", "--pp")) from None


def rate_at(step, args):
    """Linear warm-up over a tenth of the steps, then cosine to a tenth of the peak, or "wsd": stay
    at the peak, and decay linearly over the last fifth."""
    warm, t = max(1, args.steps // 10), step / max(1, args.steps)
    if step < warm:
        return args.rate * (step + 1) / warm
    if args.decay == "wsd":
        return args.rate * min(1.0, (1 - t) / 0.2)
    return args.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * t)))


# ── checkpoints that any grid can read ───────────────────────────────────────────────────────


def save(model, step, folder):
    """Write step's checkpoint, every rank its own pieces, and make it the newest.

    It appears under its name only when all ranks have written and synced theirs: whatever is killed
    whenever, the last complete one stays. `folder` must be one that all machines share.
    """
    world, me, folder = model.grid["pp dp cp tp"], model.grid.me, Path(folder)
    final, aside = folder / f"step_{step:08}", folder / f"step_{step:08}.partial"
    if me == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier(group=world)
    mine = io.BytesIO()
    torch.save({"pieces": list(pieces(model)), "random": torch.get_rng_state()}, mine)
    file = aside / f"rank_{me:05}.pt"
    file.write_bytes(mine.getvalue())
    sync(file)
    digest = torch.tensor([*hashlib.sha256(mine.getvalue()).digest()], device=model.device)
    digests = digest.new_empty(dist.get_world_size(world) * len(digest))
    # all_gather over all ranks, 32 from each: all files are written, and this is what is in them
    dist.all_gather_single(digests, digest, group=world)
    if me == 0:
        rows = enumerate(digests.view(-1, 32).tolist())
        files = {f"rank_{r:05}.pt": bytes(row).hex() for r, row in rows}
        about = {"step": step, "grid": model.grid.sizes, "model": model_of(model.args)}
        content = json.dumps({**about, "files": files}).encode()
        seal = hashlib.sha256(content).hexdigest().encode()
        (aside / "manifest").write_bytes(seal + b"\n" + content)
        for path in (aside / "manifest", aside):
            sync(path)
        aside.rename(final)
        sync(folder)
        for old in checkpoints(folder)[:-2]:
            shutil.rmtree(old)
    dist.barrier(group=world)


def sync(path):
    """Wait until the bytes of a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def pieces(model):
    """(name, its cut, elements start:stop of this cut flattened, tensors) that this rank writes: of
    what several ranks hold, the first among them."""
    at = model.grid.at
    if model.twins and 2 * at["pp"] >= model.grid.size("pp"):
        return
    for name, (start, stop), tensors in model.optimizer.local_state():
        kind = model.kinds[name]
        if kind == "copy":
            continue
        split, summed = model.table[kind]
        apart = summed.split() if model.args.zero else []
        others = {"dp", "cp", "tp"} if kind != "expert" else {"edp", "ep", "tp"}
        if all(at[axis] == 0 for axis in others - {split, *apart}):
            cut = (at[split], model.grid.size(split)) if split else (0, 1)
            yield name, cut, (start, stop), {k: v.clone() for k, v in tensors.items()}
    for stage in model.stages.values():
        if all(at[axis] == 0 for axis in ("dp", "cp", "tp")):
            for name, buffer in stage.named_buffers():
                if "bias_E" in name:
                    yield name, (0, 1), (0, buffer.numel()), {"param": buffer.clone()}


def checkpoints(folder):
    """Complete checkpoints, oldest first."""
    return sorted(Path(folder).glob("step_" + 8 * "[0-9]"))


def newest(folder):
    """(path, manifest) of the newest checkpoint; None where there is none. Raises ValueError, with
    the file's name, where one of its files is missing, truncated or altered."""
    complete = checkpoints(folder)
    if not complete:
        return None
    path = complete[-1]
    manifest = json.loads(intact(path / "manifest"))
    for name, digest in manifest["files"].items():
        intact(path / name, digest)
    return path, manifest


def intact(file, digest=None):
    """The bytes of a file of a checkpoint; without a digest, what follows its first line, which is
    one. Raises ValueError with its name where it is missing, or not what was written."""
    if not file.is_file():
        raise ValueError(f"--resume: {file} is missing; remove {file.parent}")
    content = file.read_bytes()
    if digest is None:
        seal, _, content = content.partition(b"\n")
        digest = seal.decode(errors="replace")
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(f"--resume: {file} is not what was written; remove {file.parent}")
    return content


@torch.no_grad()
def load(model, folder):
    """Take parameters and optimizer state from the newest checkpoint, whatever grid wrote it, and
    on the same grid this rank's random state. Returns the step to go on with, 0 without any."""
    if not (checkpoint := newest(folder)):
        return 0
    path, manifest = checkpoint
    written = defaultdict(lambda: defaultdict(dict))  # name, tensor, then cut: its pieces
    for file in manifest["files"]:
        saved = torch.load(path / file, map_location="cpu", weights_only=True)
        for name, cut, span, tensors in saved["pieces"]:
            for key, tensor in tensors.items() if name in model.named or "bias_E" in name else ():
                written[name][key].setdefault(cut, []).append((span, tensor))
        if file == f"rank_{model.grid.me:05}.pt" and manifest["grid"] == model.grid.sizes:
            torch.set_rng_state(saved["random"])
    state, groups = {}, model.optimizer.param_groups
    named = [pair for group in groups for pair in zip(group["param_names"], group["params"])]
    with ExitStack() as whole:
        for stage in model.stages.values():
            whole.enter_context(zero.gathered(stage))  # what ZeRO-3 has cut, to be written
        for index, (name, param) in enumerate(named):
            local = {key: resharded(model, name, cuts) for key, cuts in written[name].items()}
            master = local.pop("param")
            param.copy_(master)
            state[index] = {**local, **({"master": master} if param.dtype != master.dtype else {})}
    for stage in model.stages.values():
        for name, buffer in stage.named_buffers():
            if name in written:
                buffer.copy_(written[name]["param"][0, 1][0][1])
    model.optimizer.load_state_dict({"state": state, "param_groups": groups})
    return manifest["step"]


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
    n, at = model.grid.size(split), model.grid.at[split]
    theirs = [size * n // len(parts) if i == dim else size for i, size in enumerate(shape)]
    return tp.shard(tp.unshard([part.view(theirs) for part in parts], spec), spec, n, at)


def model_of(args):
    """What a checkpoint and the run that resumes it must agree on."""
    keys = "layers width heads kv_heads hidden experts top_k every tied text batch length".split()
    return {key: getattr(args, key) for key in keys}


AXES = "pp", "dp", "cp", "tp", "ep", "all"
RECOMPUTE = "none", "selective", "full"

# ── what it sends, by formula ────────────────────────────────────────────────────────────────


def sent_by_formula(model, x_BS, plans):
    """{axis: bytes} that this rank sends in Model.gradients; plans: of each MoE forward, in order.
    By axis, not by group: dp has all reductions over replicas, "all" the two totals."""
    args, grid, e = model.args, model.grid, model.optimizer.shards[0].own.element_size()
    size, n_tp, n_cp, sent = grid.size, grid.size("tp"), grid.size("cp"), Counter()
    part, wide = lambda n: (n - 1) / n, max(e, 4)
    m, (B, S) = args.micro_batches, x_BS.shape
    b, s = B // m // size("dp"), S // n_cp
    X, d = b * s * args.width * e, args.width // args.heads
    around = part(n_tp) * X  # one reduce-scatter or all-gather of this rank's tokens
    for stage in model.stages.values():
        dense = [not isinstance(block.mlp, ep.MoE) for block in stage.blocks.values()]
        cut = len(dense) + sum(dense)  # layers that tp cuts: attention, and MLPs of no experts
        sent["tp"] += m * cut * around * (5 if args.sp else 4)
        if stage.first:
            sent["tp"] += m * around * 2
        if stage.last:
            sent["tp"] += m * around * (3 if args.sp else 2)
            sent["tp"] += m * 2 * part(n_tp) * 3 * b * s * wide
        kv = 2 * b * s * max(args.kv_heads // n_tp, 1) * d
        q = b * s * args.heads // n_tp * d
        k_copied = 2 * b * s * math.lcm(args.kv_heads // n_tp, n_cp) * d
        forward, backward = {
            "ring": ((n_cp - 1) * kv * e, (n_cp - 1) * kv * e + n_cp * kv * wide * (n_cp > 1)),
            "all-gather": ((n_cp - 1) * kv * e, (n_cp - 1) * kv * wide),
            "ulysses": (part(n_cp) * (2 * q + k_copied) * e,) * 2,
        }[args.attention]
        sent["cp"] += m * len(stage.blocks) * (forward + backward)
    for plan in plans:
        me, n = grid.at["ep"], size("ep")
        rows = sum(plan.sent) - plan.sent[me] + sum(plan.received) - plan.received[me]
        sent["ep"] += 2 * rows * args.width * e + 8 * (n - 1) * (args.experts // n)
    last = max(stage for _, stage in model.place)
    for op in (op for cell in model.schedule[grid.at["pp"]] for op in cell):
        to, _ = pp.receiver(op, model.place, last)
        sent["pp"] += X / (n_tp if args.sp else 1) * (to is not None and to != grid.at["pp"])
    ends = {model.place[0, 0], model.place[0, last]}
    if model.twins:  # two copies of everything exchange their gradients
        sent["pp"] += sum(param.nbytes for param in model.named.values())
    elif args.tied and len(ends) == 2 and grid.at["pp"] in ends:
        sent["pp"] += model.named["embedding.weight"].nbytes
    sent["dp"] = sent_to_replicas(model, e)
    sent["all"] = 2 * part(size("pp dp cp tp")) * 16
    return sent


def sent_to_replicas(model, e):
    """Bytes of gradients, of elements of e bytes, and of what else a step sums over replicas."""
    args, size, m = model.args, model.grid.size, model.args.micro_batches
    part, over, sent = lambda n: (n - 1) / n, defaultdict(int), 0
    for name, shape in model.shapes.items():
        over[model.table[model.kinds[name]][1]] += shape.numel()
    squares = 8 * len(model.optimizer.param_groups)
    for axes, P in over.items():
        n = size(axes)
        padded = -(-P // n) * n if args.zero else P
        sent += part(n) * (2 * squares if args.zero else 0)
        sent += part(n) * {0: 2, 1: 1, 3: 0}[args.zero] * padded * e  # 1 gathers in step()
    for unit in model.optimizer.shards if args.zero == 3 else ():
        row = -(-sum(shape.numel() for shape in unit.shapes) // unit.n) * e
        sent += 3 * m * (unit.n - 1) * row  # gathered twice, reduced once, each micro-batch
        sent += 2 * 8 * (size("dp cp") - 1)  # once: do all ranks enter the same unit?
    sent += 2 * part(size("dp cp")) * 8  # how many tokens are valid
    routers = sum(router.balance > 0 for router in model.routers)
    among = size("dp cp tp" if args.sp else "dp cp")
    return sent + m * routers * 2 * part(among) * 8 * args.experts  # counts, for the balance loss


def sent_by_axis(ledger, grid):
    """{axis: bytes} of a ledger's events, by the group each went over."""
    axis_of = {"dp cp": "dp", "dp cp tp": "dp", "edp": "dp", "edp tp": "dp", "pp dp cp tp": "all"}
    names = {grid[axes].group_name: axis_of.get(axes, axes) for axes in grid.GROUPS}
    sent = Counter()
    for event in ledger.events:
        if event.sent:
            sent[names[event.group]] += event.sent
    return sent


# ── proof ────────────────────────────────────────────────────────────────────────────────────


def twin_of(model, **given):
    """The whole model on this rank alone: no axis, no SP, no ZeRO, every micro-batch in turn."""
    alone = dict(pp=1, dp=1, cp=1, tp=1, ep=1)
    args = argparse.Namespace(**{
        **vars(model.args), **alone, "sp": False, "zero": 0, "schedule": "gpipe",
        "recompute": "none", "attention": "ring",
    })  # fmt: skip
    return Model(args, Grid(**alone, alone=True), model.device, **given)


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


def largest_error(found, wanted, model):
    """Over (name, span, elements) triples beside {name: whole}: max|difference| / max|whole|."""
    worst = 0.0
    for name, span, part in found:
        gap = (part - part_of(wanted[name], model, name, span)).abs().max().item()
        size = wanted[name].abs().max().item()
        worst = max(worst, gap / size if size else math.inf if gap else 0.0)
    return worst


def small(args):
    """The arguments of the run with a model that float64 proves in seconds."""
    pieces = 2 * args.cp * args.tp
    given = {"width": 32, "hidden": 48, "layers": 2 * n_stages(args), "length": 2 * pieces}
    return argparse.Namespace(**{**vars(args), **given, "precision": "fp64"})


def proof_batch(args, grid):
    """A batch of the twin's size, its labels unequally many on every rank."""
    draw = torch.Generator().manual_seed(3)
    B = args.micro_batches * grid.size("dp")
    x_BS, y_BS = torch.randint(256, (2, B, args.length), generator=draw)
    y_BS[torch.rand(y_BS.shape, generator=draw) < torch.linspace(0.1, 0.7, B)[:, None]] = -100
    return x_BS, y_BS


def proof(args, grid, device):
    """Rows: loss, norm, every gradient, weights after three steps; bytes by axis; bytes held; and
    the table of reductions with one entry changed."""
    batch, model = proof_batch(args, grid), Model(args, grid, device)
    twin, plans = twin_of(model), []
    note = lambda *given, real=ep.make_plan: plans.append(real(*given)) or plans[-1]
    with dp.Ledger() as ledger, patch.object(ep, "make_plan", note):
        loss, norm = model.gradients(*batch)
    wanted_loss, wanted_norm = twin.gradients(*batch)
    wanted = {name: part.view_as(twin.named[name]) for name, _, part in local_gradients(twin)}
    yield dp.Row("every gradient", largest_error(local_gradients(model), wanted, model))
    yield dp.Row("loss", abs(loss / wanted_loss - 1))
    yield dp.Row("norm of the gradient", abs(norm / wanted_norm - 1))
    sent, formula = sent_by_axis(ledger, grid), sent_by_formula(model, batch[0], plans)
    for axis in AXES if args.recompute == "none" else ():
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
    yield from wrong_on_purpose(args, grid, device, batch, twin_of(model), wanted, wanted_norm)


def kept_by_block(args, grid, device, recompute):
    """Bytes that a block keeps of one sample for backward, weights apart; and those of its input
    and positions, which is all that full recomputation needs."""
    args = argparse.Namespace(**{**vars(args), "recompute": recompute})
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
    grid, over, stage = model.grid, defaultdict(int), model.args.zero
    for name in model.named:
        split, summed = model.table[model.kinds[name]]
        unit = model.named[name].shard if stage == 3 else None
        over[summed, unit] += twin.named[name].numel() // grid.size(split)
    total = 0
    for (axes, _), P in over.items():
        n, rank = (grid.size(axes), dist.get_rank(grid[axes])) if stage else (1, 0)
        row = -(-P // n)
        here = min(max(P - rank * row, 0), row)
        total += 8 * (3 * here if stage == 3 else P + 2 * here)
    return total


def wrong_on_purpose(args, grid, device, batch, twin, wanted, wanted_norm):
    """The reduction table with one entry changed, and the error that it must show."""
    args = argparse.Namespace(**{**vars(args), "zero": 0})  # so that every rank has all to compare
    model, n_tp, n_ep = Model(args, grid, device), grid.size("tp"), grid.size("ep")
    if n_tp > 1:
        right = model.copies
        model.copies = lambda kind: right(kind) // (n_tp if kind == "whole" else 1)
        whole = [wanted[name] for name in wanted if twin.kinds[name] == "whole"]
        squares = sum(gradient.square().sum().item() for gradient in whole)
        predicted = math.sqrt(1 + (n_tp - 1) * squares / wanted_norm**2) - 1
        found = model.gradients(*batch)[1] / wanted_norm - 1
        yield dp.Row("norms counted once a tp rank", found, wrong=predicted)
    if args.experts and n_ep > 1:
        over = {"expert": ("ep", reduction_table(args.sp)["whole"][1])}
        model = Model(args, grid, device, table=over)
        model.gradients(*batch)
        experts = {name: wanted[name] for name in wanted if twin.kinds[name] == "expert"}
        found = [each for each in local_gradients(model) if each[0] in experts]
        # each place among a rank's experts gets the sum of what all ranks have in that place
        predicted = max(
            dp.relative_error(sum(w.chunk(n_ep)).repeat(n_ep, 1, 1), w) for w in experts.values()
        )
        error = largest_error(found, wanted, model)
        yield dp.Row("experts summed over dp x cp", error, wrong=predicted)
    ends = [rank for (_, stage), rank in model.place.items() if stage in (0, n_stages(args) - 1)]
    if args.tied and len(ends) == len(set(ends)) == 2:
        model = Model(args, grid, device)
        with patch.object(pp, "share_gradients", lambda *_: None):
            model.gradients(*batch)
        found = [each for each in local_gradients(model) if each[0] == "embedding.weight"]
        whole = wanted["embedding.weight"]
        predicted = max(dp.relative_error(end, whole) for end in untied_gradients(twin, batch))
        error = largest_error(found, wanted, model)
        yield dp.Row("tied embedding not summed", error, wrong=predicted)


def untied_gradients(twin, batch):
    """What the embedding alone, and the head alone, ask of the weight that they share."""
    args = argparse.Namespace(**{**vars(twin.args), "tied": False})
    apart = Model(args, twin.grid, twin.device)
    (stage,) = apart.stages.values()
    with torch.no_grad():
        stage.head.weight.copy_(twin.named["embedding.weight"])
    apart.gradients(*batch)
    found = {name: part for name, _, part in local_gradients(apart)}
    like = twin.named["embedding.weight"]
    return [found[name].view_as(like) for name in ("embedding.weight", "head.weight")]


# ── run ──────────────────────────────────────────────────────────────────────────────────────


def train(args, grid, device):
    """Train on text. A line every few steps, and wherever the last is ten seconds old: loss, norm,
    tokens/s, time left, bytes sent by axis; now and then, the loss of text that was held out."""
    text = dp.read_text(args.text, 0)
    training, held_out = text[: -len(text) // 20], text[-len(text) // 20 :]
    model = Model(args, grid, device, weight_decay=0.1, betas=(0.9, 0.95))
    first = load(model, args.resume) if args.resume else 0
    P, active = model.parameters(), model.parameters(active=True)
    dp.say(
        f"\n{P:,} parameters, {active:,} of them active; "
        f"unigram entropy of the text {dp.unigram_entropy(text):.3f}"
        + (f"; going on from step {first}" if first else "")
    )
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
            rate, said = args.batch * args.length / (now - started), now
            left = to_do * (now - began) / (step + 1 - first)
            sent = "".join(f"{sent_by_axis(ledger, grid)[axis]:10,.0f}" for axis in AXES)
            dp.say(f"{step + 1:4}/{args.steps:<4}{loss:7.3f}{norm:7.2f}{rate:11,.0f}"
                   f"{left:7.0f}s{sent}{utilisation(active, rate)}")  # fmt: skip
        if args.save and ((step + 1) % args.save_every == 0 or not to_do):
            save(model, step + 1, args.save)
    validation()
    return 0


def utilisation(active, rate):
    """Model FLOPs utilisation at `rate` tokens/s, where a peak is known: 6 FLOPs a token and active
    parameter, experts that rest and attention's scores not counted."""
    if not torch.cuda.is_available():
        return ""
    try:
        peak = importlib.import_module("memory_math").peak_flops(torch.cuda.get_device_name())
    except ValueError:
        return ""
    return f"   MFU {6 * active * rate / (peak * dist.get_world_size()):.1%}"


def main(args, device):
    """Prove on this very grid, then train."""
    grid = Grid(args.pp, args.dp, args.cp, args.tp, args.ep, args.order, timeout=args.timeout)
    dp.say(f"07 five axes · {dist.get_world_size()} ranks · {dist.get_backend()} · {device.type}")
    dp.say("\n".join(grid.lines()) + "\n")
    broken = dp.prove(list(proof(small(args), grid, device)), device)
    kept = [f"{how} {kept_by_block(small(args), grid, device, how)[0]:,}" for how in RECOMPUTE]
    dp.say(f"\na block keeps for backward, by --recompute, bytes of a sample: {', '.join(kept)}")
    return broken | (train(args, grid, device) if args.steps else 0)


def n_stages(args):
    """Stages of the model under the schedule of the arguments."""
    return 1 + max(stage for _, stage in pp.placement(make_schedule(args, args.pp)))


def validate(args, ranks):
    """Refuse, in a sentence with the numbers, what cannot work."""
    validate_grid(args, ranks)
    validate_model(args)
    dp.read_text(args.text, at_least=20 * (args.length + 1))
    validate_folders(args)


def refuse(wrong, why):
    """Raise ValueError with the sentence, if it is so."""
    if wrong:
        raise ValueError(why)


def validate_grid(args, ranks):
    """The numbers alone, and the ranks."""
    sizes = {axis: getattr(args, axis) for axis in ("pp", "dp", "cp", "tp")}
    least = dict.fromkeys(("ep", *sizes, *(name.replace("-", "_") for name in NUMBERS)), 1)
    for name, at_least in {**least, "experts": 0, "steps": 0}.items():
        flag, n = f"--{name.replace('_', '-')}", getattr(args, name)
        refuse(n < at_least, f"{flag} {n}: at least {at_least} is needed")
    refuse(not 0 < args.rate < math.inf, f"--rate {args.rate}: a rate is more than 0")
    product, n = " x ".join(f"--{axis} {n}" for axis, n in sizes.items()), math.prod(sizes.values())
    refuse(n != ranks, f"{product} = {n}, and there are {ranks} ranks")
    named = sorted(args.order.split()) == sorted(sizes)
    refuse(not named, f"--order {args.order!r}: name each of pp, dp, cp and tp once")
    fit = [n for n in range(1, args.dp * args.cp + 1) if args.dp * args.cp % n == 0]
    plane = f"--dp {args.dp} x --cp {args.cp}"
    refuse(args.ep not in fit, f"--ep {args.ep} does not divide {plane}: use one of {fit}")


def validate_model(args):
    """What the model, its schedule and the switches ask of the grid."""
    E, k, length, m = args.experts, args.top_k, args.length, args.micro_batches
    refuse(E % args.ep, f"--ep {args.ep} does not divide --experts {E}")
    refuse(E and not 1 < k <= E, f"--top-k {k}: choose from 2 to {E} experts, or gates are all 1")
    kinds = {op.kind for cells in make_schedule(args, args.pp) for cell in cells for op in cell}
    if args.schedule == "dualpipe" and E:
        apart = "each copy of a router would learn from its half of the micro-batches"
        refuse(args.balance == "bias", f"--schedule dualpipe: {apart}: say --balance aux")
    if args.zero == 3:
        units = args.recompute == "full" and args.sp and args.tp > 1
        refuse(units, "--zero 3 --recompute full: under SP norms are units: say --no-sp")
        refuse("W" in kinds, f"--zero 3 reduces in backward, which {args.schedule} splits")
        refuse(E, "--zero 3 shards dense models: say --experts 0, or --zero 1")
        apart = args.tied and args.pp > 1
        refuse(apart, f"--zero 3 --pp {args.pp}: both ends share no shard: say --no-tied")
    refuse(args.kv_heads % args.tp, f"--tp {args.tp} does not divide --kv-heads {args.kv_heads}")
    tp.check_heads(args.width, args.heads, args.kv_heads, args.tp)
    tp.check_divides(args.tp, hidden=args.hidden)
    heads, ulysses = args.heads // args.tp, args.attention == "ulysses"
    left = f"the {heads} heads that --tp {args.tp} leaves a rank"
    refuse(ulysses and heads % args.cp, f"ulysses: --cp {args.cp} does not divide {left}")
    pieces = 2 * args.cp * (args.tp if args.sp else 1)
    refuse(length % pieces, f"--length {length} is no multiple of {pieces}: 2 x cp, x tp with SP")
    parts = f"--micro-batches {m} x --dp {args.dp}"
    refuse(args.batch % (m * args.dp), f"--batch {args.batch} is no multiple of {parts}")
    stages = f"{args.schedule} on --pp {args.pp} has {n_stages(args)} stages, of a layer or more"
    refuse(n_stages(args) > args.layers, f"--layers {args.layers}: {stages} each")


def validate_folders(args):
    """Checkpoints: none to go on from, one of another model, or one in the way."""
    nothing = None, {"model": {}, "step": 0}
    path, manifest = args.resume and newest(args.resume) or nothing
    missing = args.resume and not path and args.resume != args.save
    refuse(missing, f"--resume {args.resume}: there is no checkpoint in it")
    for key, value in manifest["model"].items():
        given = getattr(args, key)
        refuse(value != given, f"--resume: {path} has {key} {value}, not {given}")
    past = f"--resume: {path} is of step {manifest['step']}, past --steps {args.steps}"
    refuse(0 < args.steps < manifest["step"], past)
    if args.save and args.save != args.resume and (kept := checkpoints(args.save)):
        raise ValueError(f"--save {args.save}: {kept[-1].name} is there; --resume it, or move it")
    try:
        if args.save:
            Path(args.save).mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        raise ValueError(f"--save {args.save}: {refused.strerror}") from None


NUMBERS = {
    "layers": 4, "width": 64, "heads": 8, "kv-heads": 4, "hidden": 128, "experts": 4, "top-k": 2,
    "every": 2, "length": 64, "batch": 16, "micro-batches": 2, "save-every": 10, "print-every": 5,
    "validate-every": 10,
}  # fmt: skip


def options(argv=None):
    """The command line, parsed."""
    parser = dp.arguments(__doc__, ranks=None, steps=30)
    for axis in ("pp", "dp", "cp", "tp", "ep"):
        parser.add_argument(f"--{axis}", type=int, default=2, help="ranks along this axis")
    parser.add_argument("--order", default="pp dp cp tp", help="axes, the innermost last")
    parser.add_argument("--schedule", choices=pp.SCHEDULES, default="1f1b")
    parser.add_argument("--attention", choices=("ring", "all-gather", "ulysses"), default="ring")
    parser.add_argument("--sp", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--zero", type=int, choices=(0, 1, 3), default=1)
    parser.add_argument("--recompute", choices=RECOMPUTE, default="none")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--balance", choices=("aux", "bias", "none"), default="aux")
    parser.add_argument("--decay", choices=("cosine", "wsd"), default="cosine")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--tied", action=argparse.BooleanOptionalAction, default=True)
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--save", metavar="DIR", help="write checkpoints there")
    parser.add_argument("--resume", metavar="DIR", help="go on from the newest checkpoint there")
    args = parser.parse_args(argv)
    if args.ranks is None:
        args.ranks = args.pp * args.dp * args.cp * args.tp
    return args


if __name__ == "__main__":
    import torch._dynamo  # noqa: F401  an optimizer loads it: once here, not in each forked rank

    dp.launch(main, options(), validate)
