"""01's DataParallel beside torch.nn.parallel.DistributedDataParallel: the same model and batch."""

import copy
import importlib

import torch
import torch.distributed as dist
from pairs import device, time_pair

dp = importlib.import_module("01_dp")


def rows(ranks):
    """A row for a step (forward, backward, reduction, SGD) of 5 M parameters. On every rank."""
    group, here = dist.group.WORLD, device()
    torch.manual_seed(0)
    model = dp.LanguageModel(D=256, layers=6, heads=8).to(here)
    ours = dp.DataParallel(copy.deepcopy(model), group, bucket_mb=4, reduction="mean")
    theirs = torch.nn.parallel.DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=4, gradient_as_bucket_view=True
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    x_bS, y_bS = torch.randint(256, (2, 4, 64), generator=generator).to(here)
    num_labels = torch.tensor(float(y_bS.numel()), device=here)

    def step(parallel, optimizer, finish):
        def run():
            dp.loss_share(parallel, x_bS, y_bS, num_labels).backward()
            finish()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        return run

    sgd = [torch.optim.SGD(parallel.parameters(), lr=0.01) for parallel in (ours, theirs)]
    our_step = step(ours, sgd[0], ours.finish_gradient_synchronization)
    their_step = step(theirs, sgd[1], lambda: None)
    for parallel, finish in ((ours, ours.finish_gradient_synchronization), (theirs, list)):
        dp.loss_share(parallel, x_bS, y_bS, num_labels).backward()
        finish()
    gradients = [[param.grad for param in parallel.parameters()] for parallel in (ours, theirs)]
    difference = dp.max_error(*gradients)
    for optimizer in sgd:
        optimizer.zero_grad(set_to_none=False)
    with dp.Ledger() as ledger:
        our_step()
    their_step()
    timed = time_pair(our_step, their_step)
    payload = sum(p.nbytes for p in model.parameters())
    return [
        {
            "row": "dp: DataParallel / DistributedDataParallel",
            "ranks": ranks,
            "shape": f"{payload // 4 / 1e6:.1f} M parameters, 4 x 64 tokens a rank, buckets 4 MB",
            **timed,
            "ours_sent": ledger.sent["all_reduce"],
            "theirs_sent": 2 * (ranks - 1) / ranks * payload,
            "max_gradient_difference": difference,
            "note": "theirs_sent is the formula: it sends from C++, where no ledger looks",
        }
    ]
