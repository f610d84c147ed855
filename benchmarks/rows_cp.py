"""06's attention over a split sequence beside torch's ring, its experimental context parallel, and
one process that has the whole sequence: causal, forward and backward, the same pairs."""

import importlib
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pairs import device, time_pair
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

cp = importlib.import_module("06_cp_ring")
B, S, H, d = 1, 2048, 8, 64


def rows(ranks):
    """Three rows for the ring with zigzag, and one for each other way. On every rank."""
    group, here = dist.group.WORLD, device()
    generator = torch.Generator().manual_seed(0)
    *whole, d_whole = torch.randn(4, B, S, H, d, generator=generator).to(here)
    shape = f"batch {B}, {S} tokens, {H} heads of {d}, fp32, forward and backward"

    def step(attend, layout):
        q, k, v = (cp.shard(x, group, layout).requires_grad_() for x in whole)
        d_out = cp.shard(d_whole, group, layout)

        def run():
            q.grad = k.grad = v.grad = None
            attend(q, k, v).backward(d_out)
            return q.grad, k.grad, v.grad

        return run

    def one_process():
        if dist.get_rank() == 0:
            q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in whole)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(out, (q, k, v), d_whole.transpose(1, 2))

    full = [x.detach().requires_grad_() for x in whole]
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in full), is_causal=True)
    wanted = torch.autograd.grad(out, full, d_whole.transpose(1, 2))

    def row(name, ours, other, layout, sent, note=None):
        with cp.Ledger() as ledger:
            found = ours()
        right = (cp.shard(x, group, layout) for x in wanted)
        gap = torch.stack([(a - b).abs().max() for a, b in zip(found, right)]).max()
        dist.all_reduce(gap, op=dist.ReduceOp.MAX, group=group)
        return {
            "row": name,
            "ranks": ranks,
            "shape": shape,
            **time_pair(ours, other, pairs=20),
            "ours_sent": sum(ledger.sent.values()),
            "theirs_sent": sent,
            "max_gradient_difference": gap.item(),
            "note": note,
        }

    named = cp.ATTENTION
    ways = [("ring", "zigzag"), ("ring", "contiguous"), ("ring", "striped")]
    ways += [("gather", "zigzag"), ("ulysses", "contiguous")]
    found = []
    for way, layout in ways:
        ours = step(partial(named[way], group=group, layout=layout), layout)
        found += [row(f"cp: {way}, {layout} / SDPA in one process", ours, one_process, layout, 0)]
    ring = step(partial(cp.ring_attention, group=group, layout="zigzag"), "zigzag")
    sent = 2 * 4 * B * (S // ranks) * H * d * (3 * ranks - 2)
    note = "theirs_sent is the formula: it sends from C++, where no ledger looks"
    other = step(partial(torch_ring, group=group), "zigzag")
    found += [row("cp: ring, zigzag / torch's private ring", ring, other, "zigzag", sent, note)]
    return found + [public_context_parallel(whole, ring, shape, ranks)]


class _TorchRing(torch.autograd.Function):
    """torch's own ring with its own load balance, given the operator that SDPA uses here."""

    @staticmethod
    def forward(ctx, q, k, v, group):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        theirs.set_rotate_method("alltoall")  # a ring, not a gather
        forward, _ = cp.FUSED[q.device.type]
        out, lse = theirs._templated_ring_attention(group, 2, forward, q, k, v, is_causal=True)
        ctx.group = group
        ctx.save_for_backward(q, k, v, out, lse)
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx, d_out):
        _, backward = cp.FUSED[d_out.device.type]
        given = d_out.transpose(1, 2), "grad_out", *ctx.saved_tensors
        found = theirs._templated_ring_attention_backward(
            ctx.group, 2, backward, *given, is_causal=True, dropout_p=0.0
        )
        return *(x.transpose(1, 2) for x in found), None


def torch_ring(q, k, v, group):
    """(B, t, H, d) in zigzag order, as `cp.ring_attention`; it has no grouped-query heads."""
    return _TorchRing.apply(q, k, v, group)


def public_context_parallel(whole, ours, shape, ranks):
    """A row for torch's experimental `context_parallel`, or for what it says when it cannot."""
    row = {
        "row": "cp: ring, zigzag / context_parallel",
        "ranks": ranks,
        "shape": shape,
        **dict.fromkeys(["ours_ms", "theirs_ms", "time_ratio", "spread"]),
        **dict.fromkeys(["ours_sent", "theirs_sent", "max_gradient_difference"]),
    }
    mesh = init_device_mesh(device().type, (ranks,))

    def run():
        qkv = [x.transpose(1, 2).contiguous() for x in whole]
        with context_parallel(mesh, buffers=qkv, buffer_seq_dims=[2, 2, 2]):
            qkv = [x.detach().requires_grad_() for x in qkv]
            out = F.scaled_dot_product_attention(*qkv, is_causal=True)
            out.sum().backward()

    try:
        run()
    except (NotImplementedError, RuntimeError) as refused:
        said = str(refused).strip().splitlines()[0]
        return row | {"note": f"it does not run here: {type(refused).__name__}: {said[:120]}"}
    return row | time_pair(ours, run, pairs=20) | {"note": "it cuts the buffers at every step"}
