"""03 · Tensor parallel: every matrix cut over ranks, and two collectives a pair of matrices

Cut the first matrix of a pair by columns and the second by rows: each rank computes its heads, or
its part of the hidden units, from input to output alone, and the parts add up. So two matrices
need one sum. Between the pairs, where a sum leaves every rank with the same tokens, sequence
parallelism (SP) leaves each rank 1/n of them instead: for norms, dropout and the residual stream.

    rank r    column: W[F/n, D] ── gelu, heads: no one else needed ── row: W[D, F/n] ─┐
              f: copy, or SP: all-gather S                   g: all-reduce, or SP: reduce-scatter S

    ladder, of a layer      sent, in units of (n-1)/n · B·S·D      saved for backward, per token
    off                     8 = 4 all-reduces: 2 forward, 2 back   4D + 2          + R/n
    keep      (SP)          8 = 4 all-gathers, 4 reduce-scatters   2D + (2D+2)/n   + R/n
    regather  (Megatron)    10: two inputs gathered once more           (4D+2)/n   + R/n
    overlap                 10, in chunks: one travels while another is multiplied, same bytes
    R = 2(H+K)d + H + 4F: q, k, v, their result and its normaliser; gate, up, silu and product

    python 03_tp.py                          four ranks on this machine
    torchrun --nproc-per-node 4 03_tp.py     the same, started by torchrun

Guide: Tensor Parallelism · TP requires divisibility · Sequence parallelism · Megatron-LM TP, SP and
CP in detail · Sequence-parallel activation memory. Not so there: no all-reduce stands between the
two matmuls; 80 layers take 320 all-reduces a step, not 160, or 80 GiB of payload, not 40; SP adds
no byte to them, the second gathering does (a quarter); fewer key/value heads than ranks do not cap
n, they are copied; activations fall to 1/n only with that second gathering.

Questions  Q3.1 ** who adds the gradients?   Q3.2 * when is the bias added?   Q3.3 * whose token?
           Q3.4 ** which sums of the row?    Q3.5 ** who saw which tokens?    Q3.6 *** post, or wait?
"""
# B sequences · S tokens, s = S/n on this rank · D width · H heads, K key/value heads of d
# F hidden units, f = F/n here · V vocabulary, v = V/n, rounded up, here · n ranks, r one of them

import argparse
import inspect
import logging
import math
import os
import sys
import tempfile
import time
import traceback
from collections import Counter, namedtuple
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from einops import rearrange
from torch import nn

__all__ = [
    "copy_to_ranks", "reduce_from_ranks", "gather_sequence", "scatter_sequence",
    "split_sequence", "join_sequence", "dropout", "shard", "unshard", "shard_specs",
    "load_whole", "gather_whole", "sum_replicated_gradients", "ColumnParallelLinear",
    "RowParallelLinear", "VocabParallelEmbedding", "vocab_parallel_cross_entropy",
    "RMSNorm", "Attention", "MLP", "causal",
]  # fmt: skip

# ── the serial twin ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Config:
    """A small Llama: grouped-query attention, rotary positions, SwiGLU, RMSNorm."""

    D: int = 128
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 384
    V: int = 257  # 256 bytes and an end of text: few n divide it
    layers: int = 2
    bias: bool = False
    tied: bool = True
    dropout: float = 0.0
    smoothing: float = 0.0


def whole_weights(c, seed=0):
    """{name: whole tensor} in float64, from one seed, each layer from its own."""

    def draw(seed, **shapes):
        source = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
            value = scale * torch.randn(shape, generator=source, dtype=torch.float64)
            yield name.replace("__", "."), value + ("norm" in name)

    D, d = c.D, c.D // c.heads
    ends = {"embedding__weight": (c.V, D), "norm__weight": (D,)}
    weights = dict(draw(seed, **ends, **({} if c.tied else {"head__weight": (c.V, D)})))
    rows = {"attention__qkv": ((c.heads + 2 * c.kv_heads) * d, D), "attention__out": (D, D),
            "mlp__gate_up": (2 * c.hidden, D), "mlp__down": (D, c.hidden)}  # fmt: skip
    layer = {"norm1__weight": (D,), "norm2__weight": (D,)}
    layer |= {f"{name}__weight": shape for name, shape in rows.items()}
    layer |= {f"{name}__bias": shape[:1] for name, shape in rows.items() if c.bias}
    for i in range(c.layers):
        drawn = draw(seed + 1 + i, **layer)
        weights |= {f"blocks.{i}.{name}": value for name, value in drawn}
    return weights


def whole_mask(shape, p, key):
    """True where dropout keeps an element of the whole tensor: a function of key and place."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(key)) >= p


def plain(x, weight, bias, name):
    """x Wᵀ + b."""
    return F.linear(x, weight, bias)


def serial_logits(w, c, x_BS, step=0, column=plain):
    """The twin on one process: tokens (B, S) to logits (B, S, V), from whole weights by name."""
    S, groups, d = x_BS.shape[1], c.heads // c.kv_heads, c.D // c.heads
    norm = lambda x, name: F.rms_norm(x, (c.D,), eps=1e-6) * w[f"{name}.weight"]
    affine = lambda x, name, by: by(x, w[f"{name}.weight"], w.get(f"{name}.bias"), name)
    angles = torch.arange(S)[:, None] * 1e4 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None].to(x_BS.device)
    future = torch.ones(S, S, dtype=torch.bool, device=x_BS.device).triu(1)

    def rotate(x):
        turned = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat([turned.real, turned.imag], -1)

    def drop(x, key):
        return x * whole_mask(x.shape, c.dropout, key).to(x.device) / (1 - c.dropout)

    x = w["embedding.weight"][x_BS]
    for i in range(c.layers):
        at, key = f"blocks.{i}", 2 * (step * c.layers + i)
        qkv = affine(norm(x, f"{at}.norm1"), f"{at}.attention.qkv", column).unflatten(-1, (-1, d))
        q, k, v = qkv.split([c.heads, c.kv_heads, c.kv_heads], -2)
        q, k, v = rotate(q), *(t.repeat_interleave(groups, -2) for t in (rotate(k), v))
        scores = torch.einsum("bshd,bthd->bhst", q, k) / d**0.5
        mixed = torch.einsum("bhst,bthd->bshd", scores.masked_fill(future, -math.inf).softmax(-1), v)
        x = x + drop(affine(mixed.flatten(2), f"{at}.attention.out", plain), key)
        gate, up = affine(norm(x, f"{at}.norm2"), f"{at}.mlp.gate_up", column).chunk(2, -1)
        x = x + drop(affine(F.silu(gate) * up, f"{at}.mlp.down", plain), key + 1)
    return affine(norm(x, "norm"), "embedding" if c.tied else "head", column)


def serial_step(w, c, x_BS, y_BS, column=plain, lost=F.cross_entropy):
    """Loss of the twin, in nats per label that counts, and {name: gradient}."""
    w = {name: value.detach().clone().requires_grad_() for name, value in w.items()}
    logits_BSV = serial_logits(w, c, x_BS, column=column)
    given = dict(label_smoothing=c.smoothing, ignore_index=-100, reduction="sum")
    loss = lost(logits_BSV.flatten(0, 1), y_BS.flatten(), **given) / (y_BS != -100).sum()
    return loss.detach(), dict(zip(w, torch.autograd.grad(loss, list(w.values()))))


# ── who holds what ───────────────────────────────────────────────────────────────────────────


def divides(n, **counts):
    """Raise ValueError, with the numbers that work, where n does not divide a count."""
    for name, count in counts.items():
        if count % n:
            fit = [k for k in range(1, count + 1) if count % k == 0]
            raise ValueError(f"tp {n} does not divide {name.replace('_', ' ')} {count}: use {fit}")


def _blocks(blocks, size):
    return ((size // blocks, 1),) * blocks if isinstance(blocks, int) else blocks


def shard(whole, spec, n, r):
    """Rank r's part of a whole tensor.

    spec: (dim, blocks). Along dim lie fused blocks, each cut for itself, so that a rank's gate and
    up belong together: a number of equal blocks, or for each (units, width of a unit). Fewer units
    than ranks are copied, unit u to ranks u·n/units and on (key/value heads). More that n does not
    divide are filled up with zeros at the end (the vocabulary).
    """
    dim, blocks = spec
    blocks, parts = _blocks(blocks, whole.shape[dim]), []
    for block, (units, width) in zip(whole.split([u * w for u, w in blocks], dim), blocks):
        held = math.ceil(units / n)
        if units >= n and (missing := held * n - units):
            shape = [missing * width if i == dim else k for i, k in enumerate(block.shape)]
            block = torch.cat([block, block.new_zeros(shape)], dim)
        first = r * held if units >= n else r * units // n
        parts.append(block.narrow(dim, first * width, held * width))
    return torch.cat(parts, dim)


def unshard(parts, spec):
    """The whole tensor from all ranks' parts: copies are taken once, what filled up is cut off."""
    (dim, blocks), n = spec, len(parts)
    blocks = _blocks(blocks, parts[0].shape[dim] * n)
    sizes = [math.ceil(units / n) * width for units, width in blocks]
    wholes = []
    for pieces, (units, width) in zip(zip(*(part.split(sizes, dim) for part in parts)), blocks):
        once = pieces if units >= n else pieces[:: n // units]
        wholes.append(torch.cat(once, dim).narrow(dim, 0, units * width))
    return torch.cat(wholes, dim)


def shard_specs(module):
    """{name: (dim, blocks)} of the parameters that tp cuts, for shard(); it copies the others."""
    specs = {
        f"{prefix}.{name}".lstrip("."): spec
        for prefix, part in module.named_modules()
        for name, spec in getattr(part, "shard_spec", {}).items()
    }
    return {name: specs[name] for name, _ in module.named_parameters() if name in specs}


@torch.no_grad()
def load_whole(module, weights, group):
    """Fill a module with this rank's parts of {name: whole tensor}."""
    n, r, specs = dist.get_world_size(group), dist.get_rank(group), shard_specs(module)
    for name, param in module.named_parameters():
        whole = weights[name]
        param.copy_(shard(whole, specs[name], n, r) if name in specs else whole)


@torch.no_grad()
def gather_whole(module, group):
    """{name: whole tensor} from the parts of all ranks, on every rank."""
    n, specs, whole = dist.get_world_size(group), shard_specs(module), {}
    for name, param in module.named_parameters():
        whole[name] = param.detach().clone()
        if name in specs:
            parts = param.new_empty(n * len(param), *param.shape[1:])
            # all_gather over tp, one part from each: every rank now holds the whole tensor
            dist.all_gather_single(parts, param.contiguous(), group=group)
            whole[name] = unshard(parts.chunk(n), specs[name])
    return whole


# ── the collectives of the axis ──────────────────────────────────────────────────────────────


def all_reduce(x, group):
    """The sum of x over the ranks. Of a copy: a gradient may have more than one reader."""
    x = x.clone(memory_format=torch.contiguous_format)
    # all_reduce(SUM) over tp, B·S·D: every rank now holds the whole sum
    dist.all_reduce(x, group=group)
    return x


def start_all_gather(x_BsD, group):
    """Send this rank's tokens on their way; the function returned awaits all: (n, B, s, D)."""
    parts = x_BsD.new_empty(dist.get_world_size(group), *x_BsD.shape)
    # all_gather over tp, B·s·D from each: every rank will hold all tokens
    work = dist.all_gather_single(
        parts.flatten(0, 1), x_BsD.contiguous(), group=group, async_op=True
    )

    def land():
        work.wait()
        return parts

    return land


def start_reduce_scatter(x_nBsD, group):
    """Send each rank its tokens' part; the function returned awaits this rank's sum: (B, s, D)."""
    parts, total = x_nBsD.flatten(0, 1).contiguous(), None
    if dist.get_backend(group) == "gloo":  # its reduce_scatter sends twice as much, and blocks
        received = torch.empty_like(x_nBsD, memory_format=torch.contiguous_format)
        # all_to_all over tp, B·s·D to each: every rank will hold n parts of its tokens, to add
        work = dist.all_to_all_single(received.flatten(0, 1), parts, group=group, async_op=True)
    else:
        total = parts.new_empty(x_nBsD.shape[1:])
        # reduce_scatter(SUM) over tp, B·S·D: every rank will hold the sum of its tokens
        work = dist.reduce_scatter_single(total, parts, group=group, async_op=True)

    def land():
        work.wait()
        return received.sum(0) if total is None else total

    return land


def all_gather(x_BsD, group):
    """All ranks' tokens in order: (B, s, D) to (B, S, D)."""
    return rearrange(start_all_gather(x_BsD, group)(), "n B s ... -> B (n s) ...")


def reduce_scatter(x_BSD, group):
    """The sum over the ranks of this rank's tokens: (B, S, D) to (B, s, D)."""
    n = dist.get_world_size(group)
    divides(n, sequence=x_BSD.shape[1])
    return start_reduce_scatter(rearrange(x_BSD, "B (n s) ... -> n B s ...", n=n), group)()


def split(x_BSD, group):
    """This rank's tokens of tokens that all have: (B, S, D) to (B, s, D)."""
    divides(dist.get_world_size(group), sequence=x_BSD.shape[1])
    return x_BSD.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


def keep(x, group):
    """Nothing moves."""
    return x


class _Pair(torch.autograd.Function):
    """
                         forward          backward
    copy_to_ranks        keep             all_reduce        Megatron's f
    reduce_from_ranks    all_reduce       keep              Megatron's g
    gather_sequence      all_gather       reduce_scatter    under SP in the place of f
    scatter_sequence     reduce_scatter   all_gather        under SP in the place of g
    split_sequence       split            all_gather        where replicated tokens enter SP
    join_sequence        all_gather       split             where they leave it
    """

    @staticmethod
    def forward(ctx, x, group, there, back):
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx, d_y):
        return ctx.back(d_y, ctx.group), None, None, None


def copy_to_ranks(x, group):
    """f, before a column-parallel matrix: the same x for all. Megatron-LM, arXiv:1909.08053."""
    # Q3.1 ** Forward, x goes to every rank as it is. Each finds its heads' part of d_x: and then?
    #         hint: x went to all heads, so its gradient is a sum over all; see the table above
    return _Pair.apply(x, group, keep, all_reduce)
    # /Q3.1


def reduce_from_ranks(x, group):
    """g, after a row-parallel matrix: parts (B, S, D) to their sum. The gradient of a sum is
    every part's gradient, so backward is silent."""
    return _Pair.apply(x, group, all_reduce, keep)


def gather_sequence(x_BsD, group):
    """This rank's tokens (B, s, D) to all (B, S, D), each rank then using them in another way.
    Source: Korthikanti et al., arXiv:2205.05198, section 4.2.2, as is scatter_sequence."""
    return _Pair.apply(x_BsD, group, all_gather, reduce_scatter)


def scatter_sequence(x_BSD, group):
    """Parts (B, S, D) to the sums of this rank's tokens (B, s, D). ValueError if n divides not S."""
    return _Pair.apply(x_BSD, group, reduce_scatter, all_gather)


def split_sequence(x_BSD, group):
    """Tokens that all ranks have (B, S, D) to this rank's (B, s, D). ValueError as above."""
    return _Pair.apply(x_BSD, group, split, all_gather)


def join_sequence(x_BsD, group):
    """This rank's tokens (B, s, D) to all (B, S, D), each rank then using them in the same way."""
    return _Pair.apply(x_BsD, group, all_gather, split)


def dropout(x, p, key, group, dim=None):
    """Dropout as one process would: of a mask for the whole tensor, drawn from `key`, this rank
    takes the part of its slice along `dim`; all of it where x is replicated (None). Give each place
    and step its own key. Backward draws again: the key is kept, not the mask."""
    n, r = (dist.get_world_size(group), dist.get_rank(group)) if dim is not None else (1, 0)

    def drop(x, group):
        whole = [size * n if i == dim else size for i, size in enumerate(x.shape)]
        mask = whole_mask(whole, p, key).chunk(n, dim or 0)[r]
        return x * mask.to(x.device) / (1 - p)

    return _Pair.apply(x, group, drop, drop) if p else x


# ── weights, and gradients that can wait ─────────────────────────────────────────────────────


def settle(later, *owed):
    """What backward returns for parameters: the gradients, or None for each and a closure in
    `later`, which adds them to .grad when it is called.

    owed: pairs of a parameter, or None, and the function that computes its gradient.
    """
    owed = [(p, compute if p is not None and p.requires_grad else None) for p, compute in owed]
    if later is None:
        return tuple(compute and compute() for _, compute in owed)

    def accumulate():
        for param, compute in owed:
            if compute and param.grad is None:
                param.grad = compute()
            elif compute:
                param.grad += compute()

    if any(compute for _, compute in owed):
        later.append(accumulate)
    return (None,) * len(owed)


def outer(d_y, x):
    """The gradient of W in y = x Wᵀ: the sum over tokens of d_y · x."""
    return d_y.flatten(0, -2).T @ x.flatten(0, -2)


def total(d_y):
    """The gradient of a bias: the sum over tokens."""
    return d_y.flatten(0, -2).sum(0)


class _Linear(torch.autograd.Function):
    """x Wᵀ + b. Given a group, x is a gathering of `own`: that is kept instead, and gathered again
    for the weight gradient."""

    @staticmethod
    def forward(ctx, x, weight, bias, later, own=None, group=None):
        ctx.save_for_backward(x if own is None else own)
        ctx.weight, ctx.bias, ctx.later, ctx.group = weight, bias, later, group
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, d_y):
        x, group = ctx.saved_tensors[0].detach(), ctx.group  # detached: a closure keeps no graph
        d_x = d_y @ ctx.weight if ctx.needs_input_grad[0] else None
        d_weight = lambda: outer(d_y, all_gather(x, group) if group else x)
        owed = (ctx.weight, d_weight), (ctx.bias, lambda: total(d_y))
        return d_x, *settle(ctx.later, *owed), None, None, None


class _Add(torch.autograd.Function):
    """y + b."""

    @staticmethod
    def forward(ctx, y, bias, later):
        ctx.bias, ctx.later = bias, later
        return y + bias

    @staticmethod
    def backward(ctx, d_y):
        return d_y, *settle(ctx.later, (ctx.bias, lambda: total(d_y))), None


class _Scale(torch.autograd.Function):
    """x / rms(x) · w, saving x and one number a token."""

    @staticmethod
    def forward(ctx, x, weight, eps, later):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, scale)
        ctx.weight, ctx.later = weight, later
        return (wide * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, d_y):
        x, scale = (saved.detach() for saved in ctx.saved_tensors)
        unit, d_unit = x * scale, d_y * ctx.weight
        d_x = scale * (d_unit - unit * (d_unit * unit).mean(-1, keepdim=True))
        owed = settle(ctx.later, (ctx.weight, lambda: total(d_y * unit).to(ctx.weight.dtype)))
        return d_x.to(x.dtype), *owed, None, None


class _Lookup(torch.autograd.Function):
    """Rows of a table."""

    @staticmethod
    def forward(ctx, rows, weight, later):
        ctx.save_for_backward(rows)
        ctx.weight, ctx.later = weight, later
        return weight[rows]

    @staticmethod
    def backward(ctx, d_y):
        (rows,), weight = ctx.saved_tensors, ctx.weight
        add = lambda: torch.zeros_like(weight).index_add_(0, rows.flatten(), d_y.flatten(0, -2))
        return None, *settle(ctx.later, (weight, add)), None


# ── the ladder: a column-parallel matrix, and a row-parallel one ─────────────────────────────


def column_off(x_BSD, weight_fD, bias_f, group, later):
    """All tokens are here already: (B, S, D) to (B, S, f)."""
    return _Linear.apply(copy_to_ranks(x_BSD, group), weight_fD, bias_f, later)


def row_off(x_BSf, weight_Df, group, later):
    """(B, S, f) to the sum of all ranks' parts (B, S, D)."""
    return reduce_from_ranks(_Linear.apply(x_BSf, weight_Df, None, later), group)


def column_keep(x_BsD, weight_fD, bias_f, group, later):
    """(B, s, D) to (B, S, f); the gathered tokens, B·S·D, are kept for backward."""
    return _Linear.apply(gather_sequence(x_BsD, group), weight_fD, bias_f, later)


def row_keep(x_BSf, weight_Df, group, later):
    """(B, S, f) to the sums of this rank's tokens (B, s, D)."""
    return scatter_sequence(_Linear.apply(x_BSf, weight_Df, None, later), group)


def column_regather(x_BsD, weight_fD, bias_f, group, later):
    """Likewise; only B·s·D are kept. Source: Korthikanti et al., arXiv:2205.05198, section 4.2.2."""
    x_BSD = gather_sequence(x_BsD, group)
    return _Linear.apply(x_BSD, weight_fD, bias_f, later, x_BsD.detach(), group)


CHUNKS = 4  # of a rank's tokens, in the rung that overlaps


def gather_then_multiply(x_BsD, weight_DF, group):
    """(all_gather(x) W, all_gather(x)): a chunk is multiplied while those behind it travel."""
    flights = [start_all_gather(chunk, group) for chunk in x_BsD.chunk(CHUNKS, 1)]
    gathered, products = [], []
    for land in flights:
        gathered.append(land())
        products.append(torch.matmul(gathered[-1], weight_DF))
    join = lambda parts: rearrange(torch.cat(parts, 2), "n B s D -> B (n s) D")
    return join(products), join(gathered)


def multiply_then_scatter(x_BSF, weight_FD, group):
    """reduce_scatter(x W): a chunk travels while the next is multiplied."""
    n = dist.get_world_size(group)
    divides(n, sequence=x_BSF.shape[1])
    chunks = rearrange(x_BSF, "B (n s) F -> n B s F", n=n).chunk(CHUNKS, 2)
    # Q3.6 *** Multiply each chunk, send it, and join the sums. Which waits come when?
    #          hint: start_reduce_scatter returns a function that waits; call none of them too soon
    flights = [start_reduce_scatter(torch.matmul(x, weight_FD), group) for x in chunks]
    return torch.cat([land() for land in flights], 1)
    # /Q3.6


class _Overlapped(torch.autograd.Function):
    """
              forward                 backward
    column    gather_then_multiply    multiply_then_scatter, beside it all_gather(x) once more
    row       multiply_then_scatter   gather_then_multiply
    """

    @staticmethod
    def forward(ctx, x, weight, bias, group, later, column):
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.given = weight, bias, (group, later, column)
        if column:
            y = gather_then_multiply(x, weight.T, group)[0]
            return y if bias is None else y + bias
        return multiply_then_scatter(x, weight.T, group)

    @staticmethod
    def backward(ctx, d_y):
        (x,), weight, (group, later, column) = ctx.saved_tensors, ctx.weight, ctx.given
        x = x.detach()
        if column:
            begin = lambda: start_all_gather(x, group)
            flight = begin() if later is None and weight.requires_grad else None
            d_x = multiply_then_scatter(d_y, weight, group)
            all_x = lambda: rearrange((flight or begin())(), "n B s D -> B (n s) D")
        else:
            d_x, d_y = gather_then_multiply(d_y, weight, group)
            all_x = lambda: x
        owed = (weight, lambda: outer(d_y, all_x())), (ctx.bias, lambda: total(d_y))
        return d_x, *settle(later, *owed), None, None, None


def column_overlap(x_BsD, weight_fD, bias_f, group, later):
    """column_regather, and the tokens arrive and leave in chunks while others are multiplied."""
    return _Overlapped.apply(x_BsD, weight_fD, bias_f, group, later, True)


def row_overlap(x_BSf, weight_Df, group, later):
    """row_keep, likewise."""
    return _Overlapped.apply(x_BSf, weight_Df, None, group, later, False)


LADDER = {
    "off": (column_off, row_off),
    "keep": (column_keep, row_keep),
    "regather": (column_regather, row_keep),
    "overlap": (column_overlap, row_overlap),
}


# ── the layers ───────────────────────────────────────────────────────────────────────────────


class ColumnParallelLinear(nn.Module):
    """x Wᵀ + b, the rows of W (columns of Wᵀ) cut over the group.

    x (B, S, D), under SP (B, s, D), to (B, S, this rank's outputs). blocks: see shard(). Every rank
    draws the whole from torch's seed and keeps its part, so that any n starts alike. ValueError if
    n does not divide the outputs of a block. A list `later` collects closures; see settle().
    """

    def __init__(self, n_in, n_out, group, bias=False, sp="off", blocks=1):
        super().__init__()
        n, r = dist.get_world_size(group), dist.get_rank(group)
        if isinstance(blocks, int):
            divides(n, outputs=n_out // blocks)
        self.group, self.sp, spec = group, sp, (0, blocks)
        whole = torch.randn(n_out, n_in) / n_in**0.5
        self.weight = nn.Parameter(shard(whole, spec, n, r))
        self.bias = nn.Parameter(shard(torch.zeros(n_out), spec, n, r)) if bias else None
        self.shard_spec = {"weight": spec, "bias": spec}

    def forward(self, x, later=None):
        return LADDER[self.sp][0](x, self.weight, self.bias, self.group, later)


class RowParallelLinear(nn.Module):
    """x Wᵀ + b, the columns of W cut over the group, as those of x are.

    x (B, S, this rank's inputs) to (B, S, D), under SP (B, s, D). Otherwise as above. Under SP each
    rank finds the bias gradient of its tokens: see sum_replicated_gradients().
    """

    def __init__(self, n_in, n_out, group, bias=False, sp="off"):
        super().__init__()
        n, r = dist.get_world_size(group), dist.get_rank(group)
        divides(n, inputs=n_in)
        self.group, self.sp, spec = group, sp, (1, 1)
        self.weight = nn.Parameter(shard(torch.randn(n_out, n_in) / n_in**0.5, spec, n, r))
        self.bias = nn.Parameter(torch.zeros(n_out)) if bias else None
        self.shard_spec = {"weight": spec}

    def forward(self, x, later=None):
        # Q3.2 * The ranks' products are parts of a sum, and every rank has the whole bias. In which
        #        order?   hint: n times the bias is a bias as well, and training will not complain
        y = LADDER[self.sp][1](x, self.weight, self.group, later)
        return y if self.bias is None else _Add.apply(y, self.bias, later)
        # /Q3.2


class RMSNorm(nn.Module):
    """x / rms(x) · w over the last dimension; w is on every rank (see RowParallelLinear's bias)."""

    def __init__(self, D, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(D)), eps

    def forward(self, x, later=None):
        return _Scale.apply(x, self.weight, self.eps, later)


def rotary(x_BShd, positions_S, theta=1e4):
    """Turn each pair (i, i + d/2) of a head by position · theta^(-2i/d). RoFormer,
    arXiv:2104.09864, with the pairs as Llama's published weights have them."""
    half = x_BShd.shape[-1] // 2
    wide = torch.promote_types(x_BShd.dtype, torch.float32)
    rates = theta ** -(torch.arange(half, device=x_BShd.device, dtype=wide) / half)
    angles = positions_S.to(wide)[:, None, None] * rates
    cos, sin = angles.cos().to(x_BShd.dtype), angles.sin().to(x_BShd.dtype)
    a, b = x_BShd.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def causal(q_BShd, k_BSkd, v_BSkd):
    """Each position attends to itself and those before; h/k query heads share a k and v."""
    q, k, v = (x.transpose(1, 2) for x in (q_BShd, k_BSkd, v_BSkd))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2)


class Attention(nn.Module):
    """Grouped-query attention, heads cut over the group: tokens in and out as of the linear layers.

    forward(x, positions): positions of the S tokens that a rank has gathered. attend(q, k, v) gets
    (B, S, H/n, d) and twice (B, S, K/n, d). With K < n, n/K ranks share a head and each holds a
    copy: sum_replicated_gradients(). ValueError, with the numbers, where heads cannot be cut so.
    """

    def __init__(self, D, heads, kv_heads, group, bias=False, sp="off", attend=causal):
        super().__init__()
        n = dist.get_world_size(group)
        check_heads(D, heads, kv_heads, n)
        self.d, self.attend = D // heads, attend
        self.heads, self.kv_heads = heads // n, max(kv_heads // n, 1)
        blocks = tuple((count, self.d) for count in (heads, kv_heads, kv_heads))
        outputs = (heads + 2 * kv_heads) * self.d
        self.qkv = ColumnParallelLinear(D, outputs, group, bias, sp, blocks)
        self.out = RowParallelLinear(D, D, group, bias, sp)

    def forward(self, x, positions_S, later=None):
        qkv = self.qkv(x, later).unflatten(-1, (-1, self.d))
        turned, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], 2)
        q, k = rotary(turned, positions_S).split([self.heads, self.kv_heads], 2)
        mixed = self.attend(q, k, v.contiguous())  # a view would keep all of qkv for backward
        return self.out(mixed.flatten(2), later)


def check_heads(D, heads, kv_heads, n):
    """Raise ValueError, with the numbers that work, where heads cannot be cut over n ranks."""
    divides(n, heads=heads)
    if D % heads or heads % kv_heads or D // heads % 2:
        raise ValueError(f"width {D}, {heads} heads, {kv_heads} key/value heads: each must divide "
                         "the one before it, and a head be of even width")  # fmt: skip
    if max(n, kv_heads) % min(n, kv_heads):
        fit = [k for k in range(1, heads + 1)
               if heads % k == 0 and max(k, kv_heads) % min(k, kv_heads) == 0]  # fmt: skip
        raise ValueError(f"tp {n} and {kv_heads} key/value heads: one must divide the other: "
                         f"use {fit}")  # fmt: skip


class MLP(nn.Module):
    """SwiGLU, down(silu(gate(x)) · up(x)), hidden units cut over the group; gate and up are one
    matrix of two blocks, and one matmul."""

    def __init__(self, D, hidden, group, bias=False, sp="off"):
        super().__init__()
        divides(dist.get_world_size(group), hidden=hidden)
        self.gate_up = ColumnParallelLinear(D, 2 * hidden, group, bias, sp, blocks=2)
        self.down = RowParallelLinear(hidden, D, group, bias, sp)

    def forward(self, x, later=None):
        gate, up = self.gate_up(x, later).chunk(2, -1)
        return self.down(F.silu(gate) * up, later)


# ── the two ends: vocabulary-parallel embedding and loss ─────────────────────────────────────


def place_in_shard(ids, V, v, group):
    """Where ids lie in this rank's v rows of a vocabulary of V, and whether they do: 0 and False
    where another rank has them. Raises IndexError: a sum of n zeros would go unnoticed."""
    if ids.numel() and not 0 <= ids.min() <= ids.max() < V:
        raise IndexError(f"token {ids.min()} or {ids.max()} is not among 0 .. {V - 1}")
    # Q3.3 * Rank r holds rows r·v .. r·v + v - 1. Which ids are its own, and at which rows?
    #        hint: the rest need some row as well, which the caller then ignores
    rows = ids - dist.get_rank(group) * v
    mine = (rows >= 0) & (rows < v)
    return rows.where(mine, 0), mine
    # /Q3.3


class VocabParallelEmbedding(nn.Module):
    """Tokens (B, S) to (B, S, D), under SP (B, s, D), the V rows cut over the group.

    The last rank's rows beyond V are zero and stay so. A tied head takes `weight` as it is.
    """

    def __init__(self, V, D, group, sp="off"):
        super().__init__()
        n, r = dist.get_world_size(group), dist.get_rank(group)
        if V < n:
            raise ValueError(f"vocabulary {V} is smaller than tp {n}")
        self.V, self.group, self.sp, spec = V, group, sp, (0, ((V, 1),))
        self.weight = nn.Parameter(shard(torch.randn(V, D) / D**0.5, spec, n, r))
        self.shard_spec = {"weight": spec}

    def forward(self, x_BS, later=None):
        rows, mine = place_in_shard(x_BS, self.V, len(self.weight), self.group)
        found = _Lookup.apply(rows, self.weight, later).masked_fill(~mine[..., None], 0)
        combine = reduce_from_ranks if self.sp == "off" else scatter_sequence
        return combine(found, self.group)


class _CrossEntropy(torch.autograd.Function):
    """
    forward   all_reduce(MAX), all_reduce(SUM)     1 and 2 numbers a token; 3 with smoothing
    backward  nothing moves
    """

    @staticmethod
    def forward(ctx, logits_BSv, labels_BS, V, group, smoothing, ignore_index):
        wide = torch.promote_types(logits_BSv.dtype, torch.float32)
        z, v = logits_BSv.to(wide, copy=True), logits_BSv.shape[-1]
        real = min(max(V - dist.get_rank(group) * v, 0), v)
        z[..., real:] = -math.inf  # columns beyond the vocabulary never win
        counted = labels_BS != ignore_index
        at, mine = place_in_shard(labels_BS.where(counted, 0), V, v, group)
        top_BS = z.amax(-1)
        # Q3.4 ** A rank has v of V columns. Which numbers of a row must be those of all columns?
        #         hint: loss = log Σ exp(z - top) - z_label + top, and the label is on one rank only
        # all_reduce(MAX) over tp, B·S: every rank now subtracts the same number
        dist.all_reduce(top_BS, op=dist.ReduceOp.MAX, group=group)
        z -= top_BS[..., None]
        label = z.gather(-1, at[..., None])[..., 0].masked_fill(~mine, 0)
        p = z.exp()
        sums = torch.stack([p.sum(-1), label, z[..., :real].sum(-1)][: 3 if smoothing else 2])
        # all_reduce(SUM) over tp, 2·B·S or 3·B·S: the normaliser, the label's logit, their sum
        dist.all_reduce(sums, group=group)
        # /Q3.4
        loss_BS = sums[0].log() - (1 - smoothing) * sums[1]
        if smoothing:
            loss_BS -= smoothing / V * sums[2]
        ctx.save_for_backward(p.div_(sums[0][..., None]), at, mine, counted)
        ctx.given = V, real, smoothing, logits_BSv.dtype
        return loss_BS * counted

    @staticmethod
    def backward(ctx, d_loss_BS):
        (p, at, mine, counted), (V, real, smoothing, dtype) = ctx.saved_tensors, ctx.given
        d_z = p.clone()
        d_z[..., :real] -= smoothing / V
        d_z.scatter_add_(-1, at[..., None], (smoothing - 1) * mine[..., None].to(d_z.dtype))
        d_z *= (d_loss_BS * counted)[..., None]
        return d_z.to(dtype), None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits_BSv, labels_BS, V, group, label_smoothing=0.0, ignore_index=-100
):
    """Cross-entropy of logits that no rank holds whole: (B, S, v), labels (B, S) to losses (B, S).

    V: the true vocabulary; columns beyond it, on the last ranks, do not count. The loss of an
    ignored label is 0. Add up, and divide by the step's number of labels that count.
    """
    given = V, group, label_smoothing, ignore_index
    return _CrossEntropy.apply(logits_BSv, labels_BS, *given)


# ── the model ────────────────────────────────────────────────────────────────────────────────


class Block(nn.Module):
    """Attention, then an MLP, each on a normed copy of the residual stream, to itself."""

    def __init__(self, c, group, sp):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(c.D), RMSNorm(c.D)
        self.attention = Attention(c.D, c.heads, c.kv_heads, group, c.bias, sp)
        self.mlp = MLP(c.D, c.hidden, group, c.bias, sp)
        self.drop = partial(dropout, p=c.dropout, group=group, dim=None if sp == "off" else 1)

    def forward(self, x, positions_S, key=0, later=None):
        mixed = self.attention(self.norm1(x, later), positions_S, later)
        x = x + self.drop(mixed, key=key)
        return x + self.drop(self.mlp(self.norm2(x, later), later), key=key + 1)


class LanguageModel(nn.Module):
    """Tokens and labels (B, S) to the loss of each label (B, S), 0 where it is -100."""

    def __init__(self, c, group, sp="off"):
        super().__init__()
        self.c, self.group, self.sp = c, group, sp
        self.embedding = VocabParallelEmbedding(c.V, c.D, group, sp)
        self.blocks = nn.ModuleList(Block(c, group, sp) for _ in range(c.layers))
        self.norm = RMSNorm(c.D)
        self.head = ColumnParallelLinear(c.D, c.V, group, sp=sp, blocks=((c.V, 1),))
        if c.tied:
            self.head.weight = self.embedding.weight

    def forward(self, x_BS, y_BS, step=0, later=None):
        positions_S = torch.arange(x_BS.shape[1], device=x_BS.device)
        x = self.embedding(x_BS, later)
        for i, block in enumerate(self.blocks):
            x = block(x, positions_S, 2 * (step * self.c.layers + i), later)
        logits_BSv = self.head(self.norm(x, later), later)
        given = logits_BSv, y_BS, self.c.V, self.group
        return vocab_parallel_cross_entropy(*given, label_smoothing=self.c.smoothing)


@torch.no_grad()
def sum_replicated_gradients(module, group, sp):
    """After backward, before the step: make gradients of copies the same on the ranks that hold
    one, in place.

    Under SP each rank saw other tokens with its copy of a norm or a bias; without, all saw the same
    and have the sum. Copied key/value heads served other queries on each rank, with SP or without.
    """
    n, r, specs = dist.get_world_size(group), dist.get_rank(group), shard_specs(module)
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    # Q3.5 ** Which gradients of whole tensors are parts of a sum, and which are the sum already?
    #         hint: without SP every rank normed every token
    whole = [gradient for name, gradient in gradients.items() if name not in specs]
    if sp != "off" and whole:
        flat = torch.cat([gradient.flatten() for gradient in whole])
        # all_reduce(SUM) over tp, all norms and row-parallel biases: what all tokens ask of them
        dist.all_reduce(flat, group=group)
        for gradient, part in zip(whole, flat.split([g.numel() for g in whole])):
            gradient.copy_(part.view_as(gradient))
    # /Q3.5
    for name, (dim, blocks) in specs.items():
        copied = [] if isinstance(blocks, int) else [w for units, w in blocks if units < n]
        if not copied or name not in gradients:
            continue
        copies = n // next(units for units, _ in blocks if units < n)
        rows = gradients[name].narrow(dim, gradients[name].shape[dim] - sum(copied), sum(copied))
        splits = [len(rows) * (peer // copies == r // copies) for peer in range(n)]
        received = rows.new_empty(copies * len(rows), *rows.shape[1:])
        sending = rows.repeat(copies, *[1] * (rows.dim() - 1))
        # all_to_all over tp, 2·d·D to each rank with the same heads: they add in the same order
        dist.all_to_all_single(received, sending, splits, splits, group=group)
        rows.copy_(received.view(copies, *rows.shape).sum(0))


# ── proof ────────────────────────────────────────────────────────────────────────────────────


def local_head_count(c, n):
    """Key/value heads on a rank, times n: copies count."""
    return max(c.kv_heads, n)


def parameter_bytes(c, n, e=8):
    """What a rank holds, copies of norms, row-parallel biases and key/value heads included."""
    d, kv = c.D // c.heads, local_head_count(c, n)
    cut = (c.heads + 2 * kv) * d * (c.D + c.bias) + c.D * c.D
    cut += 2 * c.hidden * (c.D + c.bias) + c.hidden * c.D
    ends = math.ceil(c.V / n) * c.D * (1 if c.tied else 2) + c.D
    return e * (c.layers * (cut / n + 2 * c.D + 2 * c.D * c.bias) + ends)


def saved_bytes(c, B, S, n, sp, e=8):
    """What a block keeps for backward, on a rank: Korthikanti et al., arXiv:2205.05198, section
    4.2, for this block (fused attention, SwiGLU, dropout that keeps no mask)."""
    d, kv = c.D // c.heads, local_head_count(c, n)
    normed = 2 * (c.D + 1) / (n if sp != "off" else 1)  # inputs of norms, and their scales
    inputs = 2 * c.D / (n if sp in ("regather", "overlap") else 1)  # of qkv and of gate_up
    inside = 2 * (c.heads + kv) * d + c.heads + 4 * c.hidden  # q k v, result; gate up silu product
    return e * (B * S * (normed + inputs + inside / n) + S * d)  # cos and sin: S·d


def sent_bytes(c, B, S, n, sp, e=8):
    """What a rank sends in a step: forward, backward and the sums of copies' gradients."""
    ring, d, D = (n - 1) / n, c.D // c.heads, c.D
    journeys = 2 * (4 * c.layers + 2)  # an all-reduce is two: embedding, blocks, head
    journeys += (2 * c.layers + 1) * (sp in ("regather", "overlap"))
    loss = 2 * B * S * (4 if c.smoothing else 3)
    copies = 2 * (D * (2 * c.layers + 1) + 2 * D * c.layers * c.bias) * (sp != "off")
    heads = (n // c.kv_heads - 1) * c.layers * 2 * d * (D + c.bias) if n > c.kv_heads else 0
    return e * (ring * (journeys * B * S * D + loss + copies) + heads)


def build(c, group, device, sp="off", weights=None):
    """The model in float64 with this rank's parts of the twin's weights."""
    model = LanguageModel(c, group, sp).double().to(device)
    load_whole(model, weights or whole_weights(c), group)
    return model


def loss_and_gradients(model, x_BS, y_BS, step=0, later=None, summed=True):
    """Forward, backward, and the sums of copies' gradients. Returns the loss."""
    loss = model(x_BS, y_BS, step, later).sum() / (y_BS != -100).sum()
    loss.backward()
    while later:
        later.pop()()
    if summed:
        sum_replicated_gradients(model, model.group, model.sp)
    return loss.detach()


def proof_batch(c, B, S, device):
    """Tokens and labels (B, S), the same on every rank; a quarter of the labels do not count."""
    draw = torch.Generator().manual_seed(1)
    x_BS, y_BS = torch.randint(c.V, (2, B, S), generator=draw)
    y_BS[torch.rand(B, S, generator=draw) < 0.25] = -100
    return x_BS.to(device), y_BS.to(device)


def parts_of(whole, model):
    """{name: this rank's part} of whole tensors by name."""
    (n, r), specs = ranks_of(model.group), shard_specs(model)
    cut = lambda name, t: shard(t, specs[name], n, r) if name in specs else t
    return {name: cut(name, whole[name]) for name, _ in model.named_parameters()}


def off_by(found, wanted):
    """The largest relative error of a loss and of {name: this rank's part of a gradient}."""
    (loss, parts), (wanted_loss, wanted_parts) = found, wanted
    errors = [relative_error(parts[name], wanted_parts[name]) for name in wanted_parts]
    return max(relative_error(loss, wanted_loss), *errors)


def ranks_of(group):
    """(n, r): how many ranks, and which of them this is."""
    return dist.get_world_size(group), dist.get_rank(group)


def saved_by_block(block, x, positions_S):
    """Bytes that one forward of a block saves for backward: of each storage once, no weights."""
    kept, own = {}, {p.untyped_storage().data_ptr() for p in block.parameters()}

    def note(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        y = block(x, positions_S)
    return sum(storage.nbytes() for storage in kept.values()), y


def measure_saved(c, group, device, sp, B, S):
    """(measured, by formula): the bytes that a block keeps for backward on this rank."""
    n, block = dist.get_world_size(group), Block(c, group, sp).double().to(device)
    s = S if sp == "off" else S // n
    x = torch.randn(B, s, c.D, dtype=torch.float64, device=device, requires_grad=True)
    return saved_by_block(block, x, torch.arange(S, device=device))[0], saved_bytes(c, B, S, n, sp)


def check(c, group, device, sp, B, S, summed=True, predicted=None, **changed):
    """One step beside the twin: (error, (sent, by formula), error predicted or 0).

    predicted: of a row that is wrong on purpose, a function of this rank's model, weights and batch
    that gives the loss and gradients it will have. changed: what it has in place of functions of
    this file.
    """
    x_BS, y_BS = proof_batch(c, B, S, device)
    weights = {name: value.to(device) for name, value in whole_weights(c).items()}
    with patch.dict(globals(), changed), Ledger() as ledger:
        model = build(c, group, device, sp, weights)
        loss = loss_and_gradients(model, x_BS, y_BS, summed=summed)
    twin_loss, twin_gradients = serial_step(weights, c, x_BS, y_BS)
    wanted = twin_loss, parts_of(twin_gradients, model)
    error = off_by((loss, {name: p.grad for name, p in model.named_parameters()}), wanted)
    sent = sum(ledger.sent.values()), sent_bytes(c, B, S, dist.get_world_size(group), sp)
    return error, sent, off_by(predicted(model, weights, x_BS, y_BS), wanted) if predicted else 0.0


class _BiasOnEveryRank(RowParallelLinear):
    """Wrong on purpose: the bias goes into the sum, n times."""

    def forward(self, x, later=None):
        return reduce_from_ranks(F.linear(x, self.weight, self.bias), self.group)


def own_columns_only(logits_BSv, labels_BS, V, group, **_):
    """Wrong on purpose: a loss that normalises over this rank's columns."""
    real = max(V - dist.get_rank(group) * logits_BSv.shape[-1], 0)
    at, mine = place_in_shard(labels_BS.clamp(min=0), V, logits_BSv.shape[-1], group)
    label = reduce_from_ranks(logits_BSv.gather(-1, at[..., None])[..., 0] * mine, group)
    return (logits_BSv[..., :real].logsumexp(-1) - label) * (labels_BS != -100)


def wrong_on_purpose(c, S):
    """(name, config, sp, changes, predicted): a step without one idea, and what the twin says that
    it then computes."""

    def biases_n_times(model, w, x, y):
        n = dist.get_world_size(model.group)
        times = lambda name: n if name.endswith(("out.bias", "down.bias")) else 1
        loss, gradients = serial_step({name: t * times(name) for name, t in w.items()}, c_bias, x, y)
        return loss, parts_of(gradients, model)

    def norms_of_own_tokens(model, w, x, y):  # a copy of each norm per token: who asked for what?
        n, r = ranks_of(model.group)
        each = {name: t.expand(S, -1) if "norm" in name else t for name, t in w.items()}
        loss, gradients = serial_step(each, c, x, y)
        own = lambda name, t: t.chunk(n)[r].sum(0) if "norm" in name else t
        return loss, parts_of({name: own(name, t) for name, t in gradients.items()}, model)

    def own_gradients_only(model, w, x, y):  # other ranks' columns send nothing back to x
        (n, r), specs = ranks_of(model.group), shard_specs(model)

        def column(x, weight, bias, name):
            rows = torch.arange(1, len(weight) + 1, device=x.device)
            own = weight.new_zeros(len(weight) + 1)
            own[shard(rows, specs[f"{name}.weight"], n, r)] = 1
            own = own[1:, None]
            return F.linear(x, weight * own, bias) + F.linear(x.detach(), weight * (1 - own))

        loss, gradients = serial_step(w, c, x, y, column)
        return loss, parts_of(gradients, model)

    def own_normaliser(model, w, x, y):  # f adds up what all ranks' losses ask for
        n, r = ranks_of(model.group)

        def lost(ranks, logits, labels, **_):
            columns, counted = logits.split(math.ceil(c.V / n), -1), labels != -100
            label = logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
            norms = sum(columns[k].logsumexp(-1) for k in ranks)
            return ((norms - label) * counted).sum()

        _, gradients = serial_step(w, c, x, y, lost=partial(lost, range(n)))
        loss, _ = serial_step(w, c, x, y, lost=partial(lost, [r]))
        return loss, parts_of(gradients, model)

    c, c_bias = replace(c, bias=False), replace(c, bias=True)
    yield "bias added on every rank", c_bias, "off", \
        dict(RowParallelLinear=_BiasOnEveryRank), biases_n_times
    yield "SP, norm gradients not summed", c, "keep", dict(summed=False), norms_of_own_tokens
    yield "f without its all-reduce back", c, "off", dict(copy_to_ranks=keep), own_gradients_only
    yield "loss over a rank's own columns", c, "off", \
        dict(vocab_parallel_cross_entropy=own_columns_only), own_normaliser


def overlap_order(group, device):
    """What the rung that overlaps does, in order: ("all_gather_single", "wait", "matmul" ...) of a
    gathering and a scattering product."""
    n, orders, matmul = dist.get_world_size(group), [], torch.matmul
    x_BsD, x_BSD = (torch.ones(1, s, 2, device=device) for s in (CHUNKS, n * CHUNKS))
    for rung, x in ((gather_then_multiply, x_BsD), (multiply_then_scatter, x_BSD)):
        with Ledger() as ledger:
            marked = lambda *given: ledger.mark("matmul") or matmul(*given)
            with patch.object(torch, "matmul", marked):
                rung(x, torch.ones(2, 2, device=device), group)
        orders.append([event.what for event in ledger.events])
    return orders


def proof(c, group, device, B, S):
    """The rows of the table: the ladder, other models on it, and what goes wrong without an idea."""
    n = dist.get_world_size(group)
    for sp in LADDER:
        error, sent, _ = check(c, group, device, sp, B, S)
        yield Row(f"{sp}; held: saved by a block", error, sent,
                  measure_saved(c, group, device, sp, B, S))  # fmt: skip
    others = {
        "one key/value head for all": replace(c, kv_heads=1),
        "untied, biases, smoothing, dropout": replace(
            c, tied=False, bias=True, smoothing=0.1, dropout=0.2
        ),
    }
    for name, other in others.items():
        error, sent, _ = check(other, group, device, "regather", B, S)
        yield Row(name, error, sent, measure_saved(other, group, device, "regather", B, S))
    weights, model = whole_weights(c), build(c, group, device)
    whole, held = gather_whole(model, group), sum(p.nbytes for p in model.parameters())
    error = max(relative_error(whole[name].cpu(), weights[name]) for name in weights)
    yield Row("cut and gathered; held: parameters", error, None, (held, parameter_bytes(c, n)))
    gathering, scattering = overlap_order(group, device)
    sends = {"gloo": "all_to_all_single"}.get(dist.get_backend(group), "reduce_scatter_single")
    overlaps = gathering == ["all_gather_single"] * CHUNKS + ["wait", "matmul"] * CHUNKS
    overlaps &= scattering == ["matmul", sends] * CHUNKS + ["wait"] * CHUNKS
    yield Row("overlap: order of send, product, wait", float(not overlaps))
    for name, other, sp, changes, predicted in wrong_on_purpose(c, S) if n > 1 else ():
        error, _, wrong = check(other, group, device, sp, B, S, predicted=predicted, **changes)
        yield Row(name, error, wrong=wrong)


# ── run ──────────────────────────────────────────────────────────────────────────────────────


def train(c, args, group, device):
    """Train on text, in float64, so that any n prints the same digits."""
    text, n, S = read_text(args.text, 0), dist.get_world_size(group), args.sequence
    model = build(c, group, device, args.sp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    formula = sent_bytes(c, args.batch, S, n, args.sp)
    say(f"\nSP: {args.sp}; {sum(p.numel() for p in model.parameters()):,} parameters a rank; "
        f"unigram entropy of the text {unigram_entropy(text):.3f}")  # fmt: skip
    say("step      loss   tokens/s   sent/step     formula")
    for step in range(args.steps):
        x_BS, y_BS = (whole.to(device) for whole in sample(text, step, args.batch, S))
        started = time.perf_counter()
        with Ledger() as ledger:
            loss = loss_and_gradients(model, x_BS, y_BS, step)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == args.steps - 1:
            rate = args.batch * S / (time.perf_counter() - started)
            say(f"{step:4}{loss.item():10.6f}{rate:11,.0f}"
                f"{sum(ledger.sent.values()):12,.0f}{formula:12,.0f}")  # fmt: skip


def plot(c, args, group, device):
    """Draw what a block saves for backward at tp 1, 2, 4 ..., measured, beside its formula."""
    from matplotlib.figure import Figure

    ranks, rungs = dist.get_world_size(group), ("off", "keep", "regather")
    sizes = [n for n in (1, 2, 4, 8, 16) if n <= ranks]
    given, measured = (args.batch, args.sequence), {}
    for n in sizes:
        some = dist.new_group(range(n), timeout=timedelta(seconds=args.timeout or 20))
        if dist.get_rank(group) < n:
            measured[n] = [measure_saved(c, some, device, sp, *given) for sp in rungs]
    if dist.get_rank(group):
        return
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for i, (sp, color) in enumerate(zip(rungs, ("#0b3c5d", "#d9822b", "#a8c8e0"))):
        x = [k + 0.27 * (i - 1) for k in range(len(sizes))]
        found, formula = zip(*(measured[n][i] for n in sizes))
        axes.bar(x, [b / 2**20 for b in found], 0.25, color=color, ec="black", lw=0.5,
                 label={"off": "SP off", "keep": "SP, gathered inputs kept",
                        "regather": "SP, gathered again in backward"}[sp])  # fmt: skip
        axes.plot(x, [b / 2**20 for b in formula], "_", color="black", ms=15, mew=2,
                  label="formula" if i == 2 else None)  # fmt: skip
    axes.set_xticks(range(len(sizes)), [f"tp {n}" for n in sizes])
    axes.set(ylabel="MiB saved for backward, a layer", title="Activations that a rank keeps")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(args.plot, dpi=120)
    print(f"drew {args.plot}")


def config(args):
    """The model that the arguments ask for."""
    return Config(heads=args.heads, kv_heads=args.kv_heads, hidden=args.hidden)


def main(args, device):
    """Prove, then draw or train; 0 if everything is as claimed."""
    group, c = dist.group.WORLD, config(args)
    say(f"03 tensor parallel · {dist.get_world_size()} ranks · {dist.get_backend()} · {device.type}")
    broken = prove(list(proof(c, group, device, 2, args.sequence)), device)
    if args.plot:
        plot(c, args, group, device)
    elif args.steps:
        train(c, args, group, device)
    return broken


def validate(args, ranks):
    """Refuse, in a sentence, what cannot be cut over the ranks."""
    for flag in ("heads", "kv_heads", "hidden", "sequence", "batch"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} {getattr(args, flag)}: at least 1 is needed")
    check_heads(Config.D, args.heads, args.kv_heads, ranks)
    divides(ranks, hidden=args.hidden, sequence=args.sequence)
    if args.plot and not Path(args.plot).parent.is_dir():
        raise ValueError(f"--plot {args.plot}: there is no folder {Path(args.plot).parent}")
    read_text(args.text, at_least=args.sequence + 1)


# ── launch kit: the same lines close chapters 01 to 06; a test keeps them identical ──────────

Event = namedtuple("Event", "what group sent at")  # a call, a wait or a mark; bytes; seconds


class Ledger:
    """While open, prices each `torch.distributed` call of this rank as a ring would send it.

    `events` holds calls, waits and marks in order, `sent` the bytes by call. It stands in front
    of the functions of `dist`; a call without a price raises KeyError, so none goes uncounted.
    """

    RING_BYTES = {  # call: (its arguments, n ranks, this rank) -> bytes that leave this rank
        "all_reduce": lambda a, n, me: 2 * (n - 1) / n * a["tensor"].nbytes,
        "all_gather_single": lambda a, n, me: (n - 1) * a["input_tensor"].nbytes,
        "reduce_scatter_single": lambda a, n, me: (n - 1) / n * a["input"].nbytes,
        "all_to_all_single": lambda a, n, me: a["input"].nbytes
        - a["input"][:1].nbytes * (a.get("input_split_sizes") or [len(a["input"]) / n] * n)[me],
        "broadcast": lambda a, n, me: (n - 1) / n * a["tensor"].nbytes,  # mean over the ring
        "isend": lambda a, n, me: a["tensor"].nbytes,
        "irecv": lambda a, n, me: 0,
        "barrier": lambda a, n, me: 0,
    }
    UNPRICED = "all_gather all_to_all gather scatter reduce reduce_scatter send recv".split()

    def __enter__(self):
        self.events, self.sent, self._patches = [], Counter(), ExitStack()
        for name in [*self.RING_BYTES, *self.UNPRICED]:
            counted = self._counted(name, getattr(dist, name))
            for module in (dist, dist.distributed_c10d):  # batch_isend_irecv looks in the latter
                self._patches.enter_context(patch.object(module, name, counted))
        wait = dist.Work.wait
        marked = lambda work, *timeout: self.mark("wait") or wait(work, *timeout)
        self._patches.enter_context(patch.object(dist.Work, "wait", marked))
        return self

    def __exit__(self, *_):
        self._patches.close()

    def mark(self, what, group=None, sent=0):
        name = (group or dist.group.WORLD).group_name
        self.events.append(Event(what, name, sent, time.perf_counter()))
        self.sent[what] += sent

    def _counted(self, name, real):
        signature = inspect.signature(real)

        def call(*args, **kwargs):
            given = signature.bind(*args, **kwargs).arguments
            n, me = (ask(given.get("group")) for ask in (dist.get_world_size, dist.get_rank))
            self.mark(name, given.get("group"), self.RING_BYTES[name](given, n, me))
            return real(*args, **kwargs)

        return call


# A line of the proof: error relative to the twin; bytes as (measured, by formula) or None; and, of
# a row that is wrong on purpose, the error that it must show.
Row = namedtuple("Row", "name error sent held wrong", defaults=[None, None, 0.0])


def relative_error(found, wanted):
    """max|found - wanted| / max|wanted|; where all wanted are zero, 0 if all found are, or inf."""
    gap, size = ((t.abs().max().item() if t.numel() else 0.0) for t in (found - wanted, wanted))
    return gap / size if size else math.inf if gap else 0.0


def prove(rows, device):
    """Print the table, bytes as on rank 0. 0 if every row is as claimed on every rank: its error
    at most 1e-10, or as predicted; its bytes equal to the formula. Otherwise 1."""
    off = lambda pair: abs(pair[0] - pair[1]) if pair else 0.0
    mine = [[row.error, row.wrong, off(row.sent), off(row.held)] for row in rows]
    worst = torch.tensor(mine, dtype=torch.float64, device=device).nan_to_num(math.inf)
    # all_reduce(MAX) over all ranks, four numbers a row: the worst rank speaks for all
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
    say(f"{'':36}    error         sent      formula         held      formula")
    broken = 0
    for row, (error, wrong, unsent, unheld) in zip(rows, worst.tolist()):
        holds = abs(error - wrong) <= max(1e-6 * wrong, 1e-10) and unsent < 0.5 and unheld < 0.5
        pairs = (row.sent or "--"), (row.held or "--")
        numbers = "".join(f"{x:>13}" if x == "-" else f"{x:13,.0f}" for pair in pairs for x in pair)
        note = f"  wrong on purpose: {wrong:.3g} predicted" if wrong else ""
        say(f"{row.name:36}{error:9.2g}{numbers}{note}{'' if holds else '  NOT AS CLAIMED'}")
        broken |= not holds
    return int(broken)


def read_text(path, at_least):
    """The bytes of a file as tokens, vocabulary 256; without a path, Python's own help topics.
    Raises ValueError where it cannot be read or is shorter than `at_least`."""
    try:
        text = Path(path).read_bytes() if path else "\n".join(topics.values()).encode()
    except OSError as error:
        raise ValueError(f"--text {path}: {error.strerror}") from error
    if len(text) < at_least:
        raise ValueError(f"--text {path}: {len(text)} bytes, and one batch needs {at_least}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def unigram_entropy(text):
    """The loss, in nats per byte, of the best guess that looks at no context."""
    return torch.distributions.Categorical(torch.bincount(text).double()).entropy().item()


def sample(text, step, B, S):
    """A step's batch, the same on every rank: bytes (B, S), and the byte after each (B, S)."""
    starts_B1 = torch.randint(len(text) - S, (B, 1), generator=torch.Generator().manual_seed(step))
    windows = text[starts_B1 + torch.arange(S + 1)]
    return windows[:, :-1], windows[:, 1:]


def say(*words):
    """Print, on rank 0 alone."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def arguments(doc, ranks, steps):
    """A parser with the flags of every chapter."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=ranks, help="to start, where torchrun did not")
    parser.add_argument("--steps", type=int, default=steps, help="0: prove, and do not train")
    parser.add_argument("--text", help="file to train on; default: Python's own help topics")
    parser.add_argument("--timeout", type=float, help="seconds a collective may take")
    return parser


def launch(main, args, validate):
    """Run main(args, device) on every rank, torchrun's or args.ranks started here, and exit: 0 if
    each returned 0, 1 if not, 2 and a sentence if validate(args, ranks) raised ValueError."""
    torch.set_num_threads(1)  # a forked child must not inherit a pool of threads
    by_torchrun = "RANK" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if by_torchrun else args.ranks
    try:
        if ranks < 1:
            raise ValueError(f"--ranks {ranks}: at least one is needed")
        validate(args, ranks)
    except ValueError as refused:
        print(refused, file=sys.stderr)
        sys.exit(2)
    if by_torchrun:
        _rank(int(os.environ["LOCAL_RANK"]), ranks, main, args)
    forks = sys.platform == "linux" and torch.cuda.device_count() < ranks
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        given, method = (ranks, main, args, folder), "fork" if forks else "spawn"
        try:
            mp.start_processes(_rank, given, ranks, start_method=method)
        except mp.ProcessExitedException as failed:
            by_signal = f"rank {failed.error_index} was ended by {failed.signal_name}"
            sys.exit(by_signal if failed.signal_name else 1)
    sys.exit(0)


def _rank(local, ranks, main, args, folder=None):
    """Meet the other ranks, run main, and leave with its exit status or with what went wrong."""
    torch.set_num_threads(1)
    env, local_ranks = os.environ, int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    on_gpu = torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if local_ranks == ranks:  # one machine: the loopback address needs no network
        env.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    rank, patience = int(env.get("RANK", local)), args.timeout or (20 if folder else 120)
    try:
        if folder:
            store = dist.FileStore(f"{folder}/store", ranks)
        else:  # a restarted attempt must not read the addresses of the one before
            attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"attempt {attempt}", next(dist.rendezvous("env://"))[0])
        given = dict(store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=patience))
        dist.init_process_group("nccl" if on_gpu else "gloo", **given)
        code = main(args, device)
        dist.destroy_process_group()
    except Exception as error:
        lost = "by peer" in str(error)  # gloo: connection closed, or reset, by peer
        why = "lost another rank, which failed first" if lost else traceback.format_exc()
        print(f"rank {rank} of {ranks}: {why}", file=sys.stderr, flush=True)
        os._exit(1)  # without farewell, so that the others see the connection close at once
    sys.exit(code)




if __name__ == "__main__":
    parser = arguments(__doc__, ranks=4, steps=60)
    parser.add_argument("--sp", choices=LADDER, default="regather", help="rung for the training")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=384, help="units of the MLP")
    parser.add_argument("--sequence", type=int, default=64, help="bytes in a sample")
    parser.add_argument("--batch", type=int, default=16, help="samples in a step")
    parser.add_argument("--plot", metavar="PNG", help="draw activations instead of training")
    launch(main, parser.parse_args(), validate)
