"""04's executor beside torch.distributed.pipelining: same schedules, stages and micro-batches."""

import copy
import importlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pairs import device, time_pair
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

pp = importlib.import_module("04_pp_schedules")

THEIRS = {
    "gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B, "zb-v": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}  # fmt: skip
B, S, D, LAYERS = 2, 32, 128, 8


class Part(nn.Module):
    """04's stage as torch's schedules call it: logits come out, and the loss is a function."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, x):
        x = self.stage.embedding(x) if self.stage.first else x
        for block in self.stage.blocks.values():
            x = block(x)
        return F.linear(x, self.stage.embedding.weight) if self.stage.last else x


def their_schedule(name, lists, stages, m, divisor, group):
    """torch's schedule over copies of this rank's stages: a callable that takes (x, y)."""

    def loss(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / divisor

    last = max(pp.placement(lists))[1]
    parts = [
        pipelining.PipelineStage(Part(module), stage, last + 1, device(), group=group)
        for stage, module in sorted(stages.items())
    ]
    one = len(parts) == 1
    schedule = THEIRS[name](parts[0] if one else parts, m, loss_fn=loss, scale_grads=False)

    def step(x, y):
        schedule.step(*[x] if 0 in stages else [], target=y if last in stages else None)

    return step


def rows(ranks):
    """A row for a step (forwards and backwards) by each schedule that both have. On every rank."""
    group, here, m = dist.group.WORLD, device(), 4 * ranks
    text = torch.randint(256, (2, m * B, S), generator=torch.Generator().manual_seed(0)).to(here)
    batch = [(x, y, float(m * B * S)) for x, y in zip(*(half.chunk(m) for half in text))]
    found = []
    for name in THEIRS:
        lists = pp.SCHEDULES[name](ranks, m)
        model = pp.build(1 + max(pp.placement(lists))[1], LAYERS, D)
        ours = pp.mine(lists, nn.ModuleList(model).to(here), group)
        theirs = copy.deepcopy(ours)
        their_step = their_schedule(name, lists, theirs, m, float(m * B * S), group)
        steps = (lambda: pp.execute(lists, ours, batch, group)), (lambda: their_step(*text))
        with pp.Ledger() as ledger:
            steps[0]()
        steps[1]()
        parameters = [nn.ModuleList(side.values()).parameters() for side in (ours, theirs)]
        apart = max(pp.relative_error(a.grad, b.grad) for a, b in zip(*parameters))
        found.append(
            {
                "row": f"pp: {name} / {THEIRS[name].__name__}",
                "ranks": ranks,
                "shape": f"{LAYERS} layers of {D}, {m} micro-batches of {B} x {S} bytes",
                **time_pair(*steps),
                "ours_sent": ledger.sent["isend"],
                "theirs_sent": None,
                "max_gradient_difference": apart,
                "note": "torch's pipeline sends through batches of its own: not counted",
            }
        )
    return found
