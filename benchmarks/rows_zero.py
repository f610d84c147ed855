"""02's stage 1 beside ZeroRedundancyOptimizer under DDP, its stage 3 beside FSDP2's fully_shard."""

import copy
import importlib

import torch
import torch.distributed as dist
from pairs import device, time_pair
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

zero = importlib.import_module("02_zero")


def rows(ranks):
    """Two rows for a step (forward, backward, AdamW) of 3.3 M parameters in fp32. On every rank."""
    group, here = dist.group.WORLD, device()
    torch.manual_seed(0)
    model = zero.LanguageModel(D=256, layers=6).to(here)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch = torch.randint(256, (2, 8, 64), generator=generator).to(here)
    P = sum(param.nbytes for param in model.parameters())
    P_root = sum(p.nbytes for name, p in model.named_parameters() if "blocks" not in name)
    ring = (ranks - 1) / ranks
    shared = {"batch": batch, "group": group, "ranks": ranks}
    return [
        {
            "row": "zero: stage 1 / DDP + ZeroRedundancyOptimizer",
            **compare(1, stage_1(copy.deepcopy(model), group), model, **shared),
            "theirs_sent": 3 * P * ring,
        },
        {
            "row": "zero: stage 3 / fully_shard (FSDP2)",
            **compare(3, stage_3(copy.deepcopy(model)), model, **shared),
            "theirs_sent": (3 * P - P_root) * ring,
        },
    ]


def stage_1(model, group):
    """torch's: gradients all-reduced in buckets, then parameters broadcast by who stepped them."""
    parallel = DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=4, gradient_as_bucket_view=True
    )
    given = dict(process_group=group, lr=1e-3, parameters_as_bucket_view=True)
    return parallel, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **given)


def stage_3(model):
    """torch's: a unit a block, and the root, which stays gathered between its two passes."""
    for module in (*model.blocks, model):
        fully_shard(module)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def compare(stage, theirs, model, batch, group, ranks):
    """What all rows have: times in turns, bytes sent and held, and how far gradients differ."""
    parallel, their_optimizer = theirs
    ours = copy.deepcopy(model)
    optimizer = zero.sharded(ours, stage, group, bucket_mb=4, lr=1e-3)
    valid = batch[1].numel() * ranks

    def our_step():
        zero.loss_share(ours(batch[0]), batch[1], valid).backward()
        optimizer.step()
        optimizer.zero_grad()

    def their_step():
        their_loss = zero.loss_share(parallel(batch[0]), batch[1], valid / ranks)
        their_loss.backward()  # they divide by the ranks
        their_optimizer.step()
        their_optimizer.zero_grad()

    zero.loss_share(ours(batch[0]), batch[1], valid).backward()
    zero.loss_share(parallel(batch[0]), batch[1], valid / ranks).backward()
    wanted = [param.grad for param in parallel.parameters()]
    wanted = [g.full_tensor() if isinstance(g, DTensor) else g for g in wanted]
    optimizer.finish_reduce()
    difference = zero.largest_error(zero.whole_gradients(ours, optimizer), wanted)
    optimizer.zero_grad()
    their_optimizer.zero_grad()
    for _ in range(2):
        with zero.Ledger() as ledger:
            our_step()
        their_step()
    zero.loss_share(ours(batch[0]), batch[1], valid).backward()
    zero.loss_share(parallel(batch[0]), batch[1], valid / ranks).backward()
    held = sum(zero.bytes_held(optimizer)), their_bytes(parallel, their_optimizer)
    optimizer.zero_grad()
    their_optimizer.zero_grad()
    P = sum(param.numel() for param in model.parameters())
    return {
        "ranks": ranks,
        "shape": f"{P / 1e6:.1f} M parameters, 8 x 64 tokens a rank",
        **time_pair(our_step, their_step),
        "ours_sent": sum(ledger.sent.values()),
        "max_gradient_difference": difference,
        "note": f"held {held[0]:,} / {held[1]:,} bytes; theirs_sent is the ring's formula",
    }


def their_bytes(model, optimizer):
    """Bytes of parameters, gradients and state of torch's, on this rank, after backward."""
    local = lambda x: x.to_local() if isinstance(x, DTensor) else x
    inner = getattr(optimizer, "optim", optimizer)
    tensors = [x for p in model.parameters() for x in (p.detach(), p.grad)]
    tensors += [x for state in inner.state.values() for x in state.values() if x.dim()]
    return sum(local(x).nbytes for x in tensors)
