"""03's tensor parallelism beside DTensor's parallelize_module: one model, batch and start."""

import importlib
from contextlib import ExitStack
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from pairs import device, time_pair
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

tp = importlib.import_module("03_tp")


class Attention(nn.Module):
    """03's attention with a matrix each for q, k and v, because DTensor cuts no fused blocks."""

    def __init__(self, c):
        super().__init__()
        self.d = c.D // c.heads
        self.q = nn.Linear(c.D, c.D, bias=False)
        self.k, self.v = (nn.Linear(c.D, c.kv_heads * self.d, bias=False) for _ in range(2))
        self.out = nn.Linear(c.D, c.D, bias=False)

    def forward(self, x, positions_S):
        q, k, v = (matrix(x).unflatten(-1, (-1, self.d)) for matrix in (self.q, self.k, self.v))
        mixed = tp.causal(tp.rotary(q, positions_S), tp.rotary(k, positions_S), v)
        return self.out(mixed.flatten(2))


class MLP(nn.Module):
    """03's MLP, likewise."""

    def __init__(self, c):
        super().__init__()
        self.gate, self.up = (nn.Linear(c.D, c.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(c.hidden, c.D, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """03's block."""

    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(c.D, eps=1e-6) for _ in range(2))
        self.attention, self.mlp = Attention(c), MLP(c)

    def forward(self, x, positions_S):
        x = x + self.attention(self.norm1(x), positions_S)
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """03's model, untied."""

    def __init__(self, c):
        super().__init__()
        self.embedding = nn.Embedding(c.V, c.D)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm, self.head = nn.RMSNorm(c.D, eps=1e-6), nn.Linear(c.D, c.V, bias=False)

    def forward(self, x_BS):
        positions_S = torch.arange(x_BS.shape[1], device=x_BS.device)
        x = self.embedding(x_BS)
        for block in self.blocks:
            x = block(x, positions_S)
        return self.head(self.norm(x))


def parallelize(model, mesh, sequence):
    """The plan that moves the least: an input is gathered, or its gradient summed, once a block."""
    between = Shard(1) if sequence else Replicate()
    column, row = ColwiseParallel(), RowwiseParallel(output_layouts=between)
    once = lambda *rest: PrepareModuleInput(
        input_layouts=(between, *rest), desired_input_layouts=(Replicate(), *rest)
    )
    plan = {
        "attention": once(None), "attention.q": column, "attention.k": column,
        "attention.v": column, "attention.out": row,
        "mlp": once(), "mlp.gate": column, "mlp.up": column, "mlp.down": row,
    }  # fmt: skip
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if sequence:
        plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        ends["norm"] = SequenceParallel()
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return parallelize_module(model, mesh, ends)


def rename(whole, c):
    """03's whole weights under this file's names, fused blocks taken apart."""
    d, named = c.D // c.heads, {}
    fused = {"qkv": [c.D, c.kv_heads * d, c.kv_heads * d], "gate_up": [c.hidden, c.hidden]}
    for name, value in whole.items():
        *at, layer, kind = name.split(".")
        parts = {"qkv": "q k v", "gate_up": "gate up"}.get(layer, layer).split()
        for part, piece in zip(parts, value.split(fused.get(layer, len(value)))):
            named[".".join((*at, part, kind))] = piece
    return named


class Sent:
    """Bytes that the functional collectives of DTensor send, as a ring would."""

    def __enter__(self):
        n, self.bytes, self.patches = dist.get_world_size(), 0, ExitStack()
        prices = {"all_reduce": 2 * (n - 1) / n, "all_gather_single": n - 1,
                  "reduce_scatter_single": (n - 1) / n}  # fmt: skip
        for name, price in prices.items():
            real = getattr(functional, name)
            counted = lambda x, *rest, real=real, price=price, **named: (
                self.add(price * x.nbytes) or real(x, *rest, **named)
            )
            self.patches.enter_context(patch.object(functional, name, counted))
        return self

    def add(self, count):
        self.bytes += count

    def __exit__(self, *_):
        self.patches.close()


def row(ranks, c, S, sequence):
    """Forward, loss and backward of one block between its two ends, in turns."""
    group, here = dist.group.WORLD, device()
    torch.manual_seed(0)
    ours = tp.LanguageModel(c, group, "keep" if sequence else "off").to(here)
    theirs = LanguageModel(c).to(here)
    theirs.load_state_dict(rename(tp.gather_whole(ours, group), c))
    mesh = init_device_mesh(here.type, (ranks,))
    parallelize(theirs, mesh, sequence)
    draw = torch.Generator().manual_seed(0)
    x_BS, y_BS = torch.randint(c.V, (2, 4, S), generator=draw).to(here)

    def our_step():
        ours.zero_grad()
        return tp.loss_and_gradients(ours, x_BS, y_BS)

    def their_step():
        theirs.zero_grad()
        with loss_parallel():
            loss = F.cross_entropy(theirs(x_BS).flatten(0, 1), y_BS.flatten())
            loss.backward()
        return loss

    with tp.Ledger() as ledger:
        our_step()
    with Sent() as sent:
        their_step()
    for param in ours.parameters():
        param.data = param.grad  # gradients, cut as their parameters are
    found = rename(tp.gather_whole(ours, group), c)
    wanted = {name: p.grad.full_tensor() for name, p in theirs.named_parameters()
              if hasattr(p.grad, "full_tensor")}  # fmt: skip
    wanted |= {name: p.grad for name, p in theirs.named_parameters() if name not in wanted}
    difference = max((found[name] - wanted[name]).abs().max().item() for name in wanted)
    return {
        "row": f"tp: {'SP' if sequence else 'no SP'}, hidden {c.D} / parallelize_module",
        "ranks": ranks,
        "shape": f"hidden {c.D}, 4 x {S} tokens, {c.heads} heads, a block between its two ends",
        **time_pair(our_step, their_step),
        "ours_sent": sum(ledger.sent.values()),
        "theirs_sent": sent.bytes,
        "max_gradient_difference": difference,
        "note": "theirs leaves the sums of norm gradients for later" if sequence else None,
    }


def rows(ranks):
    """A row for each of two shapes, without and with sequence parallelism. On every rank."""
    small = tp.Config(D=128, heads=8, kv_heads=4, hidden=384, V=1024, layers=1, tied=False)
    large = tp.Config(D=512, heads=8, kv_heads=4, hidden=1536, V=1024, layers=1, tied=False)
    shapes = ((large, 256), (small, 128))
    return [row(ranks, c, S, sequence) for sequence in (False, True) for c, S in shapes]
