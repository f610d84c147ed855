"""07's step on grids beside the same dense model assembled from torch's own parts (DDP or FSDP2,
parallelize_module, pipelining): the same start and batch, forward, backward, clipping and AdamW."""

import importlib
import logging
from contextlib import nullcontext

import rows_tp
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pairs import device, time_pair
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

five = importlib.import_module("07_5d")
tp = importlib.import_module("03_tp")
GRIDS = {  # ranks: ((pp, dp, tp), stage of ZeRO)
    2: [((1, 2, 1), 0), ((1, 2, 1), 3), ((1, 1, 2), 0), ((2, 1, 1), 0)],
    4: [
        ((1, 4, 1), 0), ((1, 4, 1), 3), ((1, 1, 4), 0), ((4, 1, 1), 0),
        ((1, 2, 2), 3), ((2, 2, 1), 0), ((2, 1, 2), 0),
    ],
}  # fmt: skip
PAIRS = 20
MODEL = "--width 256 --hidden 768 --layers 4 --length 128 --batch 16 --experts 0 --no-tied --no-sp"


class Stage(nn.Module):
    """Some blocks of rows_tp's model, by 07's names, and the ends that stand on their stage."""

    def __init__(self, whole, layers, first, last):
        super().__init__()
        self.embedding = whole.embedding if first else None
        self.blocks = nn.ModuleDict({str(k): whole.blocks[k] for k in layers})
        self.norm, self.head = (whole.norm, whole.head) if last else (None, None)

    def forward(self, x):
        positions_S = torch.arange(x.shape[1], device=x.device)
        x = self.embedding(x) if self.embedding else x
        for block in self.blocks.values():
            x = block(x, positions_S)
        return self.head(self.norm(x)) if self.head else x


class Theirs:
    """The stage of this rank, split by torch's parts, and a step of it."""

    def __init__(self, args, start, mesh, divisor):
        me, last = mesh["pp"].get_local_rank(), args.pp - 1
        config = tp.Config(
            D=args.width, heads=args.heads, kv_heads=args.kv_heads, hidden=args.hidden, V=256,
            layers=args.layers, tied=False,
        )  # fmt: skip
        model = rows_tp.LanguageModel(config).to(device())
        model.load_state_dict(rows_tp.rename(start, config))
        if args.tp > 1:
            rows_tp.parallelize(model, mesh["tp"], sequence=False)
        cuts = torch.arange(args.layers).chunk(args.pp)
        self.mesh, self.model = mesh, Stage(model, cuts[me].tolist(), me == 0, me == last)
        parallel = self.model
        if args.zero == 3:
            for unit in (*self.model.blocks.values(), self.model):
                fully_shard(unit, mesh=mesh["dp"])
        elif args.dp > 1:
            parallel = DistributedDataParallel(
                self.model, process_group=mesh["dp"].get_group(), gradient_as_bucket_view=True
            )
        self.params = dict(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(self.params.values(), lr=1e-3)
        self.whole_loss = loss_parallel if args.tp > 1 else nullcontext
        share = divisor / args.dp  # DDP and FSDP2 divide by the ranks of dp

        def loss_of(logits, y):
            return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / share

        self.run = lambda x, y: loss_of(parallel(x), y).backward()
        if args.pp > 1:
            group = mesh["pp"].get_group()
            given = dict(group=group, get_mesh=lambda *_: mesh["tp"])
            stage = PipelineStage(parallel, me, args.pp, device(), **given)
            schedule = schedules.Schedule1F1B(
                stage, args.micro_batches, loss_fn=loss_of, scale_grads=False
            )
            self.run = lambda x, y: schedule.step(
                *[x] if me == 0 else [], target=y if me == last else None
            )

    def gradients(self, x, y):
        with self.whole_loss():
            self.run(x, y)

    def step(self, x, y):
        self.gradients(x, y)
        self.clip(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip(self, max_norm):
        """By the norm of all stages' gradients; clip_grad_norm_ alone would know this stage's."""
        kinds = {}  # of tensors that one norm can be taken of
        for param in self.params.values():
            kinds.setdefault(getattr(param, "device_mesh", None), []).append(param)
        norms = [nn.utils.get_total_norm([p.grad for p in params]) for params in kinds.values()]
        square = torch.stack([whole_of(norm) for norm in norms]).square().sum()
        dist.all_reduce(square, group=self.mesh["pp"].get_group())
        for params in kinds.values():
            nn.utils.clip_grads_with_norm_(params, max_norm, square.sqrt())


def compare(ranks, sizes, stage):
    """A row: times in turns, and how far gradients differ, relative to each one's largest."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # advice
    (n_pp, n_dp, n_tp), m = sizes, 4 if sizes[0] > 1 else 1
    flags = f"--pp {n_pp} --dp {n_dp} --tp {n_tp} --cp 1 --ep 1 --zero {stage} --micro-batches {m}"
    args = five.options(f"{MODEL} {flags}".split())
    five.validate(args, ranks)
    grid = five.Grid(n_pp, n_dp, 1, n_tp, 1)
    ours = five.Model(args, grid, device(), weight_decay=0.01)
    twin = five.twin_of(ours)
    start = {name: param.detach() for name, param in twin.named.items()}
    x_BS, y_BS = torch.randint(
        256, (2, args.batch, args.length), generator=torch.Generator().manual_seed(0)
    ).to(device())
    mesh = init_device_mesh(device().type, sizes, mesh_dim_names=("pp", "dp", "tp"))
    theirs = Theirs(args, start, mesh, y_BS.numel())
    # the samples of our micro-batches, in their order
    mine = [torch.cat([part.chunk(n_dp)[grid.at["dp"]] for part in whole.chunk(m)])
            for whole in (x_BS, y_BS)]  # fmt: skip

    ours.gradients(x_BS, y_BS)
    theirs.gradients(*mine)
    wanted = fuse({name: whole_of(param.grad) for name, param in theirs.params.items()})
    gap = torch.tensor(five.largest_error(five.local_gradients(ours), wanted, ours))
    dist.all_reduce(gap, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
    for each in (ours, theirs):
        each.optimizer.zero_grad()
    our_step = lambda: ours.step(x_BS, y_BS, rate=1e-3)
    with five.dp.Ledger() as ledger:
        our_step()
    axes = {"pp": n_pp, "dp": n_dp, "tp": n_tp}
    note = "bytes of theirs, sent from C++, are not counted"
    if n_dp > 1 and stage == 0:
        note += "; DDP sums gradients within backward, ours when it is over"
    name = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
    parts = {"pp": "pipelining", "dp": "FSDP2" if stage == 3 else "DDP", "tp": "DTensor"}
    return {
        "row": f"5d: {name} / " + " + ".join(parts[axis] for axis in axes if axes[axis] > 1),
        "ranks": ranks,
        "shape": f"4 layers of 256, 16 x 128 tokens, {m} micro-batch{'es' * (m > 1)}, AdamW",
        **time_pair(our_step, lambda: theirs.step(*mine), pairs=PAIRS),
        "ours_sent": sum(ledger.sent.values()),
        "theirs_sent": None,
        "max_gradient_difference": gap.item(),
        "note": note,
    }


def whole_of(tensor):
    """A tensor, all of it on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fuse(found):
    """Their gradients by 07's names: q, k and v in one, gate and up in one."""
    fused, homes = {}, {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
    for name, gradient in found.items():
        *at, layer, kind = name.split(".")
        layer = homes.get(layer, layer)
        fused.setdefault(".".join((*at, layer, kind)), []).append(gradient)
    return {name: torch.cat(parts) for name, parts in fused.items()}


def beside_one_process(ranks):
    """A row: one long sample, cut over cp, beside one rank that has all of it."""
    flags = f"--pp 1 --dp 1 --tp 1 --cp {ranks} --ep 1 --zero 0 --micro-batches 1"
    args = five.options(f"{MODEL} {flags} --batch 1 --length 1024".split())
    grid = five.Grid(1, 1, ranks, 1, 1)
    ours = five.Model(args, grid, device(), weight_decay=0.01)
    twin = five.twin_of(ours, weight_decay=0.01)
    batch = torch.randint(256, (2, 1, 1024), generator=torch.Generator().manual_seed(0))
    ours.gradients(*batch)
    twin.gradients(*batch)
    wanted = {name: g.view_as(twin.named[name]) for name, _, g in five.local_gradients(twin)}
    gap = five.largest_error(five.local_gradients(ours), wanted, ours)
    for each in (ours, twin):
        each.optimizer.zero_grad()
    our_step = lambda: ours.step(*batch, rate=1e-3)
    with five.dp.Ledger() as ledger:
        our_step()
    alone = lambda: twin.step(*batch, rate=1e-3) if dist.get_rank() == 0 else None
    return {
        "row": f"5d: cp {ranks} / one process",
        "ranks": ranks,
        "shape": "4 layers of 256, 1 x 1024 tokens, ring attention, AdamW",
        **time_pair(our_step, alone, pairs=PAIRS),
        "ours_sent": sum(ledger.sent.values()),
        "theirs_sent": 0,
        "max_gradient_difference": gap,
        "note": f"with a core for each rank, 1 / {ranks} would be all that there is to gain",
    }


def rows(ranks):
    """A row for each grid, and one for cp. On every rank."""
    found = [compare(ranks, sizes, stage) for sizes, stage in GRIDS.get(ranks, ())]
    return [*found, beside_one_process(ranks)]
