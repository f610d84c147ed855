"""How large should a bucket be? 01's buckets on a link that is slow by a known amount.

    python benchmarks/slow_link.py              2 ranks, 8 layers
    python benchmarks/slow_link.py --call 0     each call costs nothing by itself

A layer's backward sleeps, and so does the link: for each call, and for each byte. The order of the
buckets, the calls and the waits are 01's own; only the durations are set. Exposed time is what a
step waits after its last gradient. It is predicted by a timeline of two streams, backward and link.
Exits with 1 if a sum is wrong or an exposed time is more than 10% from the predicted one.
"""

import argparse
import importlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).resolve().parent.parent))
dp = importlib.import_module("01_dp")

NUMEL = 25_000  # of a layer: 0.1 MB of fp32


class Sleep(torch.autograd.Function):
    """x + w.sum(); backward sleeps a layer's time, and gives 1 to x and rank + 1 to w."""

    @staticmethod
    def forward(ctx, x, w, layers):
        ctx.layers, ctx.like = layers, w
        return x + w.sum()

    @staticmethod
    def backward(ctx, d_x):
        ctx.layers.clock += ctx.layers.seconds
        time.sleep(max(0.0, ctx.layers.clock - time.perf_counter()))
        return d_x, torch.full_like(ctx.like, dist.get_rank() + 1), None


class Layers(nn.Module):
    """Layers of one tensor each, whose backward ends `seconds` a layer after `clock`."""

    def __init__(self, count, seconds):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(NUMEL) for _ in range(count))
        self.seconds, self.clock = seconds, 0.0

    def forward(self, x):
        for w in self.weights:
            x = Sleep.apply(x, w, self)
        return x


class SlowLink(dp.DataParallel):
    """A DataParallel whose buckets go one by one over a link that takes seconds(bytes) for each."""

    def __init__(self, seconds, *args, **options):
        super().__init__(*args, **options)
        self.seconds, self.link, self.calls, self.free = seconds, ThreadPoolExecutor(1), 0, 0.0

    def launch(self, bucket):
        """Queue the bucket behind those before it; wait() returns when it has been added up."""
        self.calls += 1
        self.free = max(self.free, time.perf_counter()) + self.seconds(bucket.flat.nbytes)
        bucket.work = SimpleNamespace(
            wait=self.link.submit(self.send, bucket.flat, self.free).result
        )

    def send(self, flat, until):
        """Sleep until the link has carried the bucket, then add up over the ranks."""
        time.sleep(max(0.0, until - time.perf_counter()))
        # all_reduce(SUM) over dp, one bucket: every rank now holds the sum
        dist.all_reduce(flat, group=self.group)


def predict(buckets, arrivals, seconds, overlap):
    """Return the exposed time: buckets are lists of layers in the order in which they are sent,
    arrivals[layer] is when its gradient is there, and seconds[k] is what bucket k takes."""
    end, free = max(arrivals), 0.0
    launched = 0.0 if overlap else end
    for layers, duration in zip(buckets, seconds):
        launched = max(launched, *(arrivals[layer] for layer in layers))
        free = max(free, launched) + duration
    return free - end


def measure(args, layers_a_bucket, order, group):
    """Run one step. Returns calls, the exposed time measured and predicted, and whether all sums
    are right."""
    link = lambda nbytes: args.call + args.mb * nbytes / 1e6
    fill, overlap = dp.fill_buckets, order != "after backward"
    turned = lambda params, *rest: fill(list(params)[:: -1 if order == "forward" else 1], *rest)
    with patch.object(dp, "fill_buckets", turned):
        bucket_mb = layers_a_bucket * NUMEL * 4 / 1e6
        model = SlowLink(link, Layers(args.layers, args.backward), group, bucket_mb, overlap)
    last = []
    model.module.weights[0].register_post_accumulate_grad_hook(
        lambda _: last.append(time.perf_counter())
    )
    loss = model(torch.zeros(1, requires_grad=True))
    # barrier over dp: all start together
    dist.barrier(group=group)
    model.module.clock = time.perf_counter()
    loss.backward()
    model.finish_gradient_synchronization()
    exposed = time.perf_counter() - last[0]
    model.link.shutdown()
    number = {param: k for k, param in enumerate(model.module.weights)}
    buckets = [[number[param] for param in bucket.views] for bucket in model.buckets]
    arrivals = [args.backward * (args.layers - k) for k in range(args.layers)]
    seconds = [link(bucket.flat.nbytes) for bucket in model.buckets]
    n = dist.get_world_size(group)
    right = all((w.grad == n * (n + 1) / 2).all() for w in model.module.weights)
    return model.calls, exposed, predict(buckets, arrivals, seconds, overlap), right


def main(args, device):
    """Print a row for each size of a bucket and each order of sending."""
    group, broken = dist.group.WORLD, 0
    ms = lambda seconds: f"{1e3 * seconds:g} ms"
    dp.say(f"{args.layers} layers of 0.1 MB; backward {ms(args.backward)} a layer, "
           f"link {ms(args.call)} a call and {ms(args.mb)} a MB; exposed time in ms")  # fmt: skip
    dp.say(f"{'buckets of':12}{'sent':16}calls  measured  predicted    off")
    for size in [2**k for k in range(args.layers.bit_length())]:
        for order in "reverse", "forward", "after backward":
            calls, exposed, predicted, right = measure(args, size, order, group)
            off = exposed / predicted - 1
            row = f"{0.1 * size:<6.1f}MB    {order:16}{calls:5}{1e3 * exposed:10.0f}"
            note = "" if abs(off) < 0.1 else "  over 10% off: is the machine busy?"
            note = note if right else "  WRONG SUMS"
            dp.say(f"{row}{1e3 * predicted:11.0f}{off:7.1%}{note}")
            broken |= not right
    return int(broken)


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    if args.layers < 1 or not args.backward > 0 or not args.mb > 0 or not args.call >= 0:
        raise ValueError("--layers, --backward and --mb must be greater than 0, --call at least 0")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start")
    parser.add_argument("--layers", type=int, default=8, help="layers of 0.1 MB")
    parser.add_argument("--backward", type=float, default=0.04, help="seconds of a backward")
    parser.add_argument("--call", type=float, default=0.02, help="seconds of a call on the link")
    parser.add_argument("--mb", type=float, default=0.25, help="seconds of a MB on the link")
    parser.add_argument("--timeout", type=float, default=60, help="seconds a collective may take")
    dp.launch(main, parser.parse_args(), validate)
