"""03 · Tensor parallel: matrices cut in pairs, one sum a pair

Cut the first matrix of a pair by its outputs and the second by its inputs. A rank then takes its
heads, or its part of the hidden units, all the way alone, and what the ranks end with adds up: two
matrices, one sum. Between pairs all ranks hold the same tokens; with sequence parallelism (SP) each
holds 1/n of them there, for norms, dropout and the residual stream, and the sum leaves it those.

    x ── f ──┬── W_up, outputs of rank 0 ── silu ── W_down, those inputs ──┬── g ── x'
             └── W_up, outputs of rank 1 ── silu ── W_down, those inputs ──┘

    ladder      f: forward, backward          g: forward, backward    sent   kept, per token
    off         nothing, all-reduce           all-reduce, nothing       8    4D + 2       + R/n
    keep        all-gather, reduce-scatter    the reverse               8    (2D + 2)/n + 2D + R/n
    regather    and all-gather once more      the reverse              10    (4D + 2)/n   + R/n
    overlap     as regather, in chunks that travel while others are multiplied
    sent: by a rank for a layer, in (n-1)/n · B·S·D.  R = 2(H + K)d + H + 4F: q, k, v, the result
    and its normaliser (K at least n: heads are copied); gate, up, silu, product.
    Held: 1/n of each matrix, all of norms.

    python 03_tp.py                          four ranks on this machine
    torchrun --nproc-per-node 4 03_tp.py     the same, started by torchrun

Guide: Tensor Parallelism · TP requires divisibility · Sequence parallelism · Megatron-LM TP, SP and
CP in detail · Sequence-parallel activation memory. Not so there: nothing is summed between the two
matmuls; 80 layers take 320 all-reduces a step, not 160, and 80 GiB of payload, not 40; SP as such
adds no byte, its second gathering a quarter, without which activations do not fall to 1/n; fewer
key/value heads than ranks do not cap n: they are copied.

Questions  Q3.1 ** who adds d_x?            Q3.2 * when is the bias added?  Q3.3 * whose token?
           Q3.4 ** which sums of a row?     Q3.5 ** who saw which tokens?   Q3.6 *** when to wait?
"""
# B sequences · S tokens, s = S/n on this rank · D width · H heads, K key/value heads, of width d
# F hidden units, f = F/n here · V vocabulary, v = V/n, rounded up, here · n ranks, r one of them

import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import nn

__all__ = [
    "Attention", "ColumnParallelLinear", "MLP", "RMSNorm", "RowParallelLinear",
    "VocabParallelEmbedding", "causal", "copy_to_ranks", "dropout", "gather_sequence",
    "gather_whole", "join_sequence", "load_whole", "reduce_from_ranks", "scatter_sequence", "shard",
    "shard_specs", "split_sequence", "sum_replicated_gradients", "unshard",
    "vocab_parallel_cross_entropy",
]  # fmt: skip


# ── the serial twin ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Config:
    """A small Llama: grouped-query attention, rotary positions, RMSNorm, SwiGLU."""

    D: int = 128
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 384
    V: int = 257  # bytes and an end of text: a vocabulary that no n divides
    layers: int = 2
    bias: bool = False
    tied: bool = True
    dropout: float = 0.0
    smoothing: float = 0.0


def whole_mask(shape, p, key):
    """What dropout keeps of a whole tensor, on any rank: True with probability 1 - p."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(key)) >= p


def serial_logits(w, c, x_BS, step=0):
    """Tokens (B, S) to logits (B, S, V) on one process, from whole weights by name."""
    S, groups, d = x_BS.shape[1], c.heads // c.kv_heads, c.D // c.heads
    norm = lambda x, name: F.rms_norm(x, (c.D,), w[f"{name}.weight"], eps=1e-6)
    linear = lambda x, name: F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))
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
        qkv = linear(norm(x, f"{at}.norm1"), f"{at}.attention.qkv").unflatten(-1, (-1, d))
        q, k, v = qkv.split([c.heads, c.kv_heads, c.kv_heads], -2)
        q, k, v = rotate(q), *(t.repeat_interleave(groups, -2) for t in (rotate(k), v))
        scores = torch.einsum("bshd,bthd->bhst", q, k) / d**0.5
        p = scores.masked_fill(future, -math.inf).softmax(-1)
        mixed = torch.einsum("bhst,bthd->bshd", p, v).flatten(2)
        x = x + drop(linear(mixed, f"{at}.attention.out"), key)
        gate, up = linear(norm(x, f"{at}.norm2"), f"{at}.mlp.gate_up").chunk(2, -1)
        x = x + drop(linear(F.silu(gate) * up, f"{at}.mlp.down"), key + 1)
    return norm(x, "norm") @ w["embedding.weight" if c.tied else "head.weight"].T


def serial_step(w, c, x_BS, y_BS):
    """The twin's loss, in nats per label that counts (not -100), and {name: gradient}."""
    w = {name: value.detach().clone().requires_grad_() for name, value in w.items()}
    logits_BSV = serial_logits(w, c, x_BS)
    loss = F.cross_entropy(
        logits_BSV.flatten(0, 1), y_BS.flatten(), label_smoothing=c.smoothing, reduction="sum"
    ) / (y_BS != -100).sum()
    return loss.detach(), dict(zip(w, torch.autograd.grad(loss, list(w.values()))))


# ── who holds what ───────────────────────────────────────────────────────────────────────────


def check_divides(n, **counts):
    """Raise ValueError, with what would work, where n does not divide one of the counts."""
    for name, count in counts.items():
        if count % n:
            fit = [k for k in range(1, count + 1) if count % k == 0]
            raise ValueError(f"tp {n} does not divide {name} {count}: use one of {fit}")


def check_heads(D, heads, kv_heads, n):
    """Raise ValueError, with what would work, where n ranks cannot share the heads: n divides the
    heads, and the key/value heads, or they it: then each is copied to n/kv_heads ranks."""
    if D % heads or D // heads % 2 or heads % kv_heads:
        raise ValueError(f"width {D} must be heads {heads} times an even number, and the heads a "
                         f"multiple of key/value heads {kv_heads}")  # fmt: skip
    fit = [k for k in range(1, heads + 1)
           if heads % k == 0 and (kv_heads % k == 0 or k % kv_heads == 0)]  # fmt: skip
    if n not in fit:
        raise ValueError(f"tp {n} cannot share {heads} heads and {kv_heads} key/value heads: "
                         f"use one of {fit}")  # fmt: skip


def shard(whole, spec, n, r):
    """Rank r's part of a whole tensor.

    spec: (dim, blocks). Along dim lie blocks, each cut for itself, so that every rank gets a part
    of q, of k and of v. blocks: how many, all equal, or a (units, width of one) for each. Of fewer
    units than ranks, all are copied, unit u to ranks from u·n/units on. Where n does not divide the
    units, zeros follow the last.
    """
    dim, blocks = spec
    if isinstance(blocks, int):
        blocks = [(whole.shape[dim] // blocks, 1)] * blocks
    parts = []
    for block, (units, width) in zip(whole.split([u * w for u, w in blocks], dim), blocks):
        held, first = math.ceil(units / n), r * units // n if units < n else r * -(-units // n)
        lacking = [size if i != dim else n * held * width for i, size in enumerate(block.shape)]
        lacking[dim] = max(lacking[dim] - units * width, 0)
        padded = torch.cat([block, block.new_zeros(lacking)], dim)
        parts.append(padded.narrow(dim, first * width, held * width))
    return torch.cat(parts, dim)


def unshard(parts, spec):
    """The whole tensor of all ranks' parts: a copy counts once, and what was added is cut off."""
    (dim, blocks), n = spec, len(parts)
    if isinstance(blocks, int):
        blocks = [(parts[0].shape[dim] * n // blocks, 1)] * blocks
    wholes, sizes = [], [math.ceil(units / n) * width for units, width in blocks]
    for pieces, (units, width) in zip(zip(*(part.split(sizes, dim) for part in parts)), blocks):
        once = pieces[:: max(n // units, 1)]
        wholes.append(torch.cat(once, dim).narrow(dim, 0, units * width))
    return torch.cat(wholes, dim)


def shard_specs(module):
    """{name: (dim, blocks)}, for shard(), of the parameters that tp cuts. It copies all others."""
    found = {
        f"{prefix}.{name}".lstrip("."): spec
        for prefix, part in module.named_modules()
        for name, spec in getattr(part, "shard_spec", {}).items()
    }
    return {name: found[name] for name, _ in module.named_parameters() if name in found}


@torch.no_grad()
def load_whole(module, whole, group):
    """Fill a module with this rank's parts of {name: whole tensor}."""
    n, r, specs = dist.get_world_size(group), dist.get_rank(group), shard_specs(module)
    for name, param in module.named_parameters():
        cut = name in specs
        param.copy_(shard(whole[name], specs[name], n, r) if cut else whole[name])


@torch.no_grad()
def gather_whole(module, group):
    """{name: whole tensor} of a module, the same on every rank and for every n."""
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


def _when(work, value):
    """A function that waits for work and returns value()."""

    def land():
        work.wait()
        return value()

    return land


def start_all_gather(x_BsD, group):
    """Send this rank's tokens; what is returned waits for those of all ranks, (n, B, s, D)."""
    parts = x_BsD.new_empty(dist.get_world_size(group) * len(x_BsD), *x_BsD.shape[1:])
    # all_gather over tp, B·s·D from each: every rank will hold all tokens
    work = dist.all_gather_single(parts, x_BsD.contiguous(), group=group, async_op=True)
    return _when(work, lambda: parts.unflatten(0, (-1, len(x_BsD))))


def start_reduce_scatter(x_nBsD, group):
    """Send each rank its tokens; what is returned waits for the sum of this rank's, (B, s, D)."""
    parts = x_nBsD.flatten(0, 1).contiguous()
    if dist.get_backend(group) == "gloo":  # its reduce_scatter sends twice as much, and blocks
        received = torch.empty_like(parts)
        # all_to_all over tp, B·s·D to each: every rank will hold n parts of its tokens, to add
        work = dist.all_to_all_single(received, parts, group=group, async_op=True)
        return _when(work, lambda: received.view(x_nBsD.shape).sum(0))
    total = parts.new_empty(x_nBsD.shape[1:])
    # reduce_scatter(SUM) over tp, B·S·D: every rank will hold the sum of its tokens
    work = dist.reduce_scatter_single(total, parts, group=group, async_op=True)
    return _when(work, lambda: total)


def all_reduce(x, group):
    """The sum of x over the ranks. x stays: in backward, others may read the same gradient."""
    x = x.clone(memory_format=torch.contiguous_format)
    # all_reduce(SUM) over tp, B·S·D: every rank now holds the whole sum
    dist.all_reduce(x, group=group)
    return x


def all_gather(x_BsD, group):
    """(B, s, D) of each rank to (B, S, D)."""
    return rearrange(start_all_gather(x_BsD, group)(), "n B s ... -> B (n s) ...")


def by_rank(x_BSD, group):
    """(B, S, D) to (n, B, s, D). Raises ValueError where n does not divide S, before any call."""
    check_divides(dist.get_world_size(group), sequence=x_BSD.shape[1])
    return rearrange(x_BSD, "B (n s) ... -> n B s ...", n=dist.get_world_size(group))


def reduce_scatter(x_BSD, group):
    """The sum over ranks of (B, S, D), of which each gets its tokens (B, s, D)."""
    return start_reduce_scatter(by_rank(x_BSD, group), group)()


def split(x_BSD, group):
    """This rank's tokens (B, s, D) of (B, S, D)."""
    return by_rank(x_BSD, group)[dist.get_rank(group)].contiguous()


def as_it_is(x, group):
    """x."""
    return x


class _Pair(torch.autograd.Function):
    """A function going forward, another coming back."""

    @staticmethod
    def forward(ctx, x, group, there, back):
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx, d_y):
        return ctx.back(d_y, ctx.group), None, None, None


def pair(there, back):
    """A function of (x, group) whose gradient is `back` of its gradient."""
    return lambda x, group: _Pair.apply(x, group, there, back)


# Tensor parallelism is the first two (Shoeybi et al., arXiv:1909.08053, section 3), and SP the next
# two in their places (Korthikanti et al., arXiv:2205.05198, section 4.2). The last two are for
# tokens that each rank has, or will use, in the same way.
copy_to_ranks     = pair(as_it_is,       all_reduce)      # f: each rank finds a part of d_x
reduce_from_ranks = pair(all_reduce,     as_it_is)        # g: d_sum is the d_part of every part
gather_sequence   = pair(all_gather,     reduce_scatter)  # (B, s, D) to (B, S, D), as f
scatter_sequence  = pair(reduce_scatter, all_gather)      # (B, S, D) to (B, s, D), as g
split_sequence    = pair(split,          all_gather)      # (B, S, D) to (B, s, D)
join_sequence     = pair(all_gather,     split)           # (B, s, D) to (B, S, D)  # fmt: skip


def dropout(x, p, key, group, dim=None):
    """Dropout as on one process: the mask of the whole tensor is drawn from `key`, and a rank takes
    its slice along dim, or all where x is the same on every rank (None). A key is for one place in
    one step. Backward draws the mask again; nothing is kept."""
    n, r = (1, 0) if dim is None else (dist.get_world_size(group), dist.get_rank(group))

    def drop(x, group):
        shape = [size * n if i == dim else size for i, size in enumerate(x.shape)]
        return x * whole_mask(shape, p, key).chunk(n, dim or 0)[r].to(x.device) / (1 - p)

    return pair(drop, drop)(x, group) if p else x


# ── matrices ─────────────────────────────────────────────────────────────────────────────────


class _GatherAgain(torch.autograd.Function):
    """gather_sequence, which keeps this rank's tokens so that they can be gathered again."""

    @staticmethod
    def forward(ctx, x_BsD, group):
        ctx.save_for_backward(x_BsD)
        ctx.group = group
        return all_gather(x_BsD, group)

    @staticmethod
    def backward(ctx, d_y):
        return reduce_scatter(d_y, ctx.group), None


def gathered_linear(x_BsD, weight, bias, group):
    """F.linear of the tokens of all ranks. F.linear would keep all of them for the gradient of the
    weight. Its hooks keep the node that has this rank's tokens, and gather them once more."""
    if not x_BsD.requires_grad:  # what needs no gradient has no node
        x_BsD = x_BsD.detach().requires_grad_(torch.is_grad_enabled())
    gathered_BSD = _GatherAgain.apply(x_BsD, group)
    node, storage = gathered_BSD.grad_fn, gathered_BSD.untyped_storage().data_ptr()

    def keep(tensor):
        return tensor.shape if tensor.untyped_storage().data_ptr() == storage else tensor

    def restore(kept):
        if isinstance(kept, torch.Tensor):
            return kept
        return all_gather(*node.saved_tensors, group).view(kept)

    with torch.autograd.graph.saved_tensors_hooks(keep, restore):
        return F.linear(gathered_BSD, weight, bias)


CHUNKS = 4  # of a rank's tokens, in the rung that overlaps


def gather_then_multiply(x_BsD, weight_DF, group):
    """all_gather(x) W and all_gather(x): a chunk is multiplied while those after it travel."""
    flights = [start_all_gather(chunk, group) for chunk in x_BsD.chunk(CHUNKS, 1)]
    gathered, products = [], []
    for land in flights:
        gathered.append(land())
        products.append(torch.matmul(gathered[-1], weight_DF))
    return [rearrange(torch.cat(x, 2), "n B s F -> B (n s) F") for x in (products, gathered)]


def multiply_then_scatter(x_BSF, weight_FD, group):
    """reduce_scatter(x W): a chunk travels while the next is multiplied."""
    chunks_nBsF = by_rank(x_BSF, group).chunk(CHUNKS, 2)
    # Q3.6 *** Multiply and send every chunk, and join the sums. When does this rank wait?
    #          hint: start_reduce_scatter sends, and returns a function that waits
    flights = [start_reduce_scatter(torch.matmul(x, weight_FD), group) for x in chunks_nBsF]
    return torch.cat([land() for land in flights], 1)
    # /Q3.6


class _Overlapped(torch.autograd.Function):
    """
              forward                  backward
    column    gather_then_multiply     multiply_then_scatter, beside it x is gathered once more
    row       multiply_then_scatter    gather_then_multiply
    """

    @staticmethod
    def forward(ctx, x, weight, group, column):
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.column = group, column
        if column:
            return gather_then_multiply(x, weight.T, group)[0]
        return multiply_then_scatter(x, weight.T, group)

    @staticmethod
    def backward(ctx, d_y):
        (x, weight), group = ctx.saved_tensors, ctx.group
        if ctx.column:
            land = start_all_gather(x, group)
            d_x = multiply_then_scatter(d_y, weight, group)
            x = rearrange(land(), "n B s D -> B (n s) D")
        else:
            d_x, d_y = gather_then_multiply(d_y, weight, group)
        d_weight = d_y.flatten(0, -2).T @ x.flatten(0, -2)
        return d_x, d_weight, None, None


# ── the layers; their `sp` is a rung of the ladder ───────────────────────────────────────────

LADDER = "off", "keep", "regather", "overlap"


def rung(sp):
    """sp, if it is a rung. Raises ValueError: False would be taken for a sequence that is cut."""
    if sp not in LADDER:
        raise ValueError(f"sp={sp!r}: use one of {LADDER}")
    return sp


class ColumnParallelLinear(nn.Module):
    """x Wᵀ + b, the outputs cut over the group (columns of Wᵀ; for `blocks` see shard()).

    x (B, S, D), under SP (B, s, D), to (B, S, outputs of this rank). Every rank draws all of W from
    torch's seed and keeps its part, so any n starts from the same. Raises ValueError where n does
    not divide the outputs.
    """

    def __init__(self, n_in, n_out, group, bias=False, sp="off", blocks=1):
        super().__init__()
        n, r = dist.get_world_size(group), dist.get_rank(group)
        if isinstance(blocks, int):
            check_divides(n, outputs=n_out // blocks)
        self.group, self.sp = group, rung(sp)
        self.shard_spec = dict.fromkeys(("weight", "bias"), (0, blocks))
        draw = lambda whole: nn.Parameter(shard(whole, (0, blocks), n, r))
        self.weight = draw(torch.randn(n_out, n_in) / n_in**0.5)
        self.bias = draw(torch.zeros(n_out)) if bias else None

    def forward(self, x):
        # Q3.1 ** Without SP, every rank has all of x already. What must still be done with it?
        #         hint: a rank's outputs give it a part of d_x; the layer below needs the sum
        if self.sp == "off":
            return F.linear(copy_to_ranks(x, self.group), self.weight, self.bias)
        # /Q3.1
        if self.sp == "keep":
            return F.linear(gather_sequence(x, self.group), self.weight, self.bias)
        if self.sp == "regather":
            return gathered_linear(x, self.weight, self.bias, self.group)
        y = _Overlapped.apply(x, self.weight, self.group, True)
        return y if self.bias is None else y + self.bias


class RowParallelLinear(nn.Module):
    """x Wᵀ + b, the inputs cut over the group (rows of Wᵀ): what the layer above leaves.

    x (B, S, inputs of this rank) to (B, S, D), under SP (B, s, D). The bias is on every rank; under
    SP its gradient is that of a rank's tokens until sum_replicated_gradients(). Otherwise as above.
    """

    def __init__(self, n_in, n_out, group, bias=False, sp="off"):
        super().__init__()
        n, r = dist.get_world_size(group), dist.get_rank(group)
        check_divides(n, inputs=n_in)
        self.group, self.sp, self.shard_spec = group, rung(sp), {"weight": (1, 1)}
        whole = torch.randn(n_out, n_in) / n_in**0.5
        self.weight = nn.Parameter(shard(whole, (1, 1), n, r).contiguous())
        self.bias = nn.Parameter(torch.zeros(n_out)) if bias else None

    def forward(self, x):
        if self.sp == "overlap":
            y = _Overlapped.apply(x, self.weight, self.group, False)
        else:
            combine = reduce_from_ranks if self.sp == "off" else scatter_sequence
            y = combine(F.linear(x, self.weight), self.group)
        # Q3.2 * y is the sum over ranks, and every rank has b. When is it added, and not earlier?
        #        hint: n times a bias is a bias too; it would train, and differ from one process
        if self.bias is not None:
            y = y + self.bias
        return y
        # /Q3.2


class _RMSNorm(torch.autograd.Function):
    """x / rms(x) · w, in float32 at least, keeping x and one number per token."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, scale)
        ctx.weight = weight.detach()
        return (wide * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, d_y):
        x, scale = ctx.saved_tensors
        unit, d_unit = x * scale, d_y * ctx.weight
        d_x = scale * (d_unit - unit * (d_unit * unit).mean(-1, keepdim=True))
        d_weight = (d_y * unit).flatten(0, -2).sum(0)
        return d_x.to(x.dtype), d_weight.to(ctx.weight.dtype), None


class RMSNorm(nn.Module):
    """x / rms(x) · w over the last dimension; w is on every rank, as RowParallelLinear's bias."""

    def __init__(self, D, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(D)), eps

    def forward(self, x):
        return _RMSNorm.apply(x, self.weight, self.eps)


def rotary(x_BShd, positions_S, theta=1e4):
    """Turn elements i and i + d/2 of each head by position · theta^(-2i/d): RoFormer,
    arXiv:2104.09864, with the pairs laid out as in Llama."""
    half, wide = x_BShd.shape[-1] // 2, torch.promote_types(x_BShd.dtype, torch.float32)
    rates = theta ** -(torch.arange(half, device=x_BShd.device, dtype=wide) / half)
    angles = positions_S.to(wide)[:, None, None] * rates
    cos, sin = angles.cos().to(x_BShd.dtype), angles.sin().to(x_BShd.dtype)
    a, b = x_BShd.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def causal(q_BShd, k_BSkd, v_BSkd):
    """Each position mixes the values up to its own; h/k queries share a key and a value."""
    q, k, v = (x.transpose(1, 2) for x in (q_BShd, k_BSkd, v_BSkd))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2)


class Attention(nn.Module):
    """Grouped-query attention, the heads cut over the group. x as in ColumnParallelLinear, to the
    same shape; positions (S,) are those of the gathered tokens.

    attend(q, k, v) gets a rank's heads, (B, S, H/n, d) and twice (B, S, K/n, d). Where K < n, n/K
    ranks hold a copy of a head: sum_replicated_gradients(). ValueError: see check_heads().
    """

    def __init__(self, D, heads, kv_heads, group, bias=False, sp="off", attend=causal):
        super().__init__()
        n, self.d, self.attend = dist.get_world_size(group), D // heads, attend
        check_heads(D, heads, kv_heads, n)
        self.heads, self.kv_heads = heads // n, max(kv_heads // n, 1)
        blocks = tuple((count, self.d) for count in (heads, kv_heads, kv_heads))
        n_out = (heads + 2 * kv_heads) * self.d
        self.qkv = ColumnParallelLinear(D, n_out, group, bias, sp, blocks)
        self.out = RowParallelLinear(D, D, group, bias, sp)

    def forward(self, x, positions_S):
        qkv = self.qkv(x).unflatten(-1, (-1, self.d))
        qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], 2)
        q, k = rotary(qk, positions_S).split([self.heads, self.kv_heads], 2)
        mixed = self.attend(q, k, v.contiguous())  # a view would keep all of qkv for backward
        return self.out(mixed.flatten(2))


class MLP(nn.Module):
    """SwiGLU, down(silu(gate(x)) · up(x)), the hidden units cut over the group. Gate and up are one
    matrix of two blocks: one gathering, one matmul, and halves that belong together."""

    def __init__(self, D, hidden, group, bias=False, sp="off"):
        super().__init__()
        check_divides(dist.get_world_size(group), hidden=hidden)
        self.gate_up = ColumnParallelLinear(D, 2 * hidden, group, bias, sp, blocks=2)
        self.down = RowParallelLinear(hidden, D, group, bias, sp)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


# ── the two ends: embedding and loss over a vocabulary that is cut ───────────────────────────


def own_rows(ids, V, v, group):
    """The rows of ids among this rank's v of a table of V, and where they are its own (elsewhere
    row 0). Raises IndexError for what no rank has: the zeros would add up unnoticed."""
    if ids.numel() and not 0 <= ids.min() <= ids.max() < V:
        raise IndexError(f"ids from {ids.min()} to {ids.max()}, in a vocabulary of {V}")
    # Q3.3 * Rank r holds rows r·v to (r + 1)·v - 1. Which row of its own is an id, if any?
    #        hint: an index must be valid even where what it finds is thrown away
    rows = ids - dist.get_rank(group) * v
    mine = (rows >= 0) & (rows < v)
    return rows.where(mine, 0), mine
    # /Q3.3


class VocabParallelEmbedding(nn.Module):
    """Tokens (B, S) to (B, S, D), under SP (B, s, D); the V rows are cut over the group.

    Rows beyond V, where n does not divide it, are zeros and stay so. A tied head uses `weight`.
    """

    def __init__(self, V, D, group, sp="off"):
        super().__init__()
        n, r = dist.get_world_size(group), dist.get_rank(group)
        if V < n:
            raise ValueError(f"tp {n} is larger than the vocabulary, {V}")
        self.V, self.group, self.sp = V, group, rung(sp)
        self.shard_spec = {"weight": (0, ((V, 1),))}
        self.weight = nn.Parameter(shard(torch.randn(V, D) / D**0.5, (0, ((V, 1),)), n, r))

    def forward(self, x_BS):
        rows, mine = own_rows(x_BS, self.V, len(self.weight), self.group)
        found = F.embedding(rows, self.weight).masked_fill(~mine[..., None], 0)
        combine = reduce_from_ranks if self.sp == "off" else scatter_sequence
        return combine(found, self.group)


class _CrossEntropy(torch.autograd.Function):
    """
    forward   all_reduce(MAX) of a number per token, all_reduce(SUM) of 2, or 3 with smoothing
    backward  nothing moves
    """

    @staticmethod
    def forward(ctx, logits_BSv, labels_BS, V, group, smoothing, ignore_index):
        z = logits_BSv.to(torch.promote_types(logits_BSv.dtype, torch.float32), copy=True)
        v, counts = z.shape[-1], labels_BS != ignore_index
        real = min(max(V - dist.get_rank(group) * v, 0), v)
        z[..., real:] = -math.inf  # what lies beyond the vocabulary never wins
        rows, mine = own_rows(labels_BS.where(counts, 0), V, v, group)
        top_BS = z.amax(-1)
        # Q3.4 ** A rank has v of a row's V logits. Which numbers must be those of the whole row?
        #         hint: loss = log Σ exp(z - top) - (z_label - top), and one rank has the label
        # all_reduce(MAX) over tp, B·S: every rank now subtracts the same number
        dist.all_reduce(top_BS, op=dist.ReduceOp.MAX, group=group)
        z -= top_BS[..., None]
        label = z.gather(-1, rows[..., None])[..., 0].masked_fill(~mine, 0)
        p = z.exp()
        sums = torch.stack([p.sum(-1), label, z[..., :real].sum(-1)][: 3 if smoothing else 2])
        # all_reduce(SUM) over tp, 2·B·S or 3·B·S: normaliser, the label's logit, all logits' sum
        dist.all_reduce(sums, group=group)
        # /Q3.4
        loss_BS = sums[0].log() - (1 - smoothing) * sums[1]
        if smoothing:
            loss_BS -= smoothing / V * sums[2]
        ctx.save_for_backward(p.div_(sums[0][..., None]), rows, mine, counts)
        ctx.given = smoothing / V, smoothing, real, logits_BSv.dtype
        return loss_BS * counts

    @staticmethod
    def backward(ctx, d_loss_BS):
        (p, rows, mine, counts), (each, smoothing, real, dtype) = ctx.saved_tensors, ctx.given
        d_z = p.clone()
        d_z[..., :real] -= each
        d_z.scatter_add_(-1, rows[..., None], (smoothing - 1) * mine[..., None].to(d_z.dtype))
        d_z *= (d_loss_BS * counts)[..., None]
        return d_z.to(dtype), None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits_BSv, labels_BS, V, group, label_smoothing=0.0, ignore_index=-100
):
    """Losses (B, S) of logits of which no rank holds a whole row, for labels (B, S).

    V is the true vocabulary: what a rank has beyond it gets probability and gradient 0. An ignored
    label's loss is 0: add up, and divide by the number of labels of the step that count.
    """
    given = labels_BS, V, group, label_smoothing, ignore_index
    return _CrossEntropy.apply(logits_BSv, *given)


# ── the model ────────────────────────────────────────────────────────────────────────────────


class Block(nn.Module):
    """Attention, then an MLP, each on a normed copy of the residual stream: x to its own shape."""

    def __init__(self, c, group, sp):
        super().__init__()
        self.p, self.group, self.dim = c.dropout, group, None if sp == "off" else 1
        self.norm1, self.norm2 = RMSNorm(c.D), RMSNorm(c.D)
        self.attention = Attention(c.D, c.heads, c.kv_heads, group, c.bias, sp)
        self.mlp = MLP(c.D, c.hidden, group, c.bias, sp)

    def forward(self, x, positions_S, key=0):
        drop = lambda y, key: dropout(y, self.p, key, self.group, self.dim)
        x = x + drop(self.attention(self.norm1(x), positions_S), key)
        return x + drop(self.mlp(self.norm2(x)), key + 1)


class LanguageModel(nn.Module):
    """Tokens and labels (B, S) to losses (B, S). Each layer is drawn from a seed of its own."""

    def __init__(self, c, group, sp="off"):
        super().__init__()
        self.c, self.group, self.sp, self.blocks = c, group, sp, nn.ModuleList()
        torch.manual_seed(0)
        self.embedding = VocabParallelEmbedding(c.V, c.D, group, sp)
        self.norm = RMSNorm(c.D)
        self.head = ColumnParallelLinear(c.D, c.V, group, sp=sp, blocks=((c.V, 1),))
        if c.tied:
            self.head.weight = self.embedding.weight
        for i in range(c.layers):
            torch.manual_seed(1 + i)
            self.blocks.append(Block(c, group, sp))

    def forward(self, x_BS, y_BS, step=0):
        positions_S = torch.arange(x_BS.shape[1], device=x_BS.device)
        x = self.embedding(x_BS)
        for i, block in enumerate(self.blocks):
            x = block(x, positions_S, 2 * (step * self.c.layers + i))
        given = y_BS, self.c.V, self.group, self.c.smoothing
        return vocab_parallel_cross_entropy(self.head(self.norm(x)), *given)


@torch.no_grad()
def sum_replicated_gradients(module, group, sp):
    """Between backward and the step: give copies of a parameter the same gradient, in place.

    Under SP each rank saw other tokens with its copy of a norm or a bias. Without, all saw the same
    and found the sum. A copied key/value head served other queries on each rank, SP or not.
    """
    n, r, specs = dist.get_world_size(group), dist.get_rank(group), shard_specs(module)
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    # Q3.5 ** Of which parameters does each rank have a part of the gradient, and of which all?
    #         hint: who is not in specs is on every rank; what did it see there, SP off and on?
    copies = [gradient for name, gradient in gradients.items() if name not in specs]
    if sp != "off" and copies:
        flat = torch.cat([gradient.flatten() for gradient in copies])
        # all_reduce(SUM) over tp, norms and row-parallel biases: what all tokens asked for
        dist.all_reduce(flat, group=group)
        for gradient, part in zip(copies, flat.split([g.numel() for g in copies])):
            gradient.copy_(part.view_as(gradient))
    # /Q3.5
    for name, (_, blocks) in specs.items():
        heads = [] if isinstance(blocks, int) else [block for block in blocks if block[0] < n]
        if not heads or name not in gradients:
            continue
        K, mine = heads[0][0], gradients[name][-sum(width for _, width in heads) :]
        by_head = mine.new_zeros(K, *mine.shape)
        by_head[r * K // n] = mine
        # all_reduce(SUM) over tp, 2·K·d·D: what the queries of all ranks ask of each k and v
        dist.all_reduce(by_head, group=group)
        mine.copy_(by_head[r * K // n])


# ── proof ────────────────────────────────────────────────────────────────────────────────────


def parameter_bytes(c, n, e=8):
    """Of a rank's parameters, with what it holds as a copy."""
    d, kv = c.D // c.heads, max(c.kv_heads, n)
    cut = ((c.heads + 2 * kv) * d + 2 * c.hidden) * (c.D + c.bias) + (c.D + c.hidden) * c.D
    ends = math.ceil(c.V / n) * c.D * (1 if c.tied else 2) + c.D
    return e * (c.layers * (cut / n + 2 * c.D * (1 + c.bias)) + ends)


def saved_bytes(c, B, S, n, sp, e=8):
    """Of what a block keeps for backward on a rank: Korthikanti et al., arXiv:2205.05198, section
    4, for this block (fused attention, SwiGLU, no dropout mask)."""
    d, kv = c.D // c.heads, max(c.kv_heads, n)
    stream = (2 * c.D + 2) / (1 if sp == "off" else n)  # what the norms got, and their scales
    normed = 2 * c.D / (1 if sp in ("off", "keep") else n)  # what qkv and gate_up got
    inside = 2 * (c.heads + kv) * d + c.heads + 4 * c.hidden
    return e * (B * S * (stream + normed + inside / n) + S * d)  # S·d: cosines and sines


def sent_bytes(c, B, S, n, sp, e=8):
    """That leave a rank in a step: by blocks, embedding and head; the loss; copies' gradients."""
    L, d = c.layers, c.D // c.heads
    halves = 2 * (4 * L + 2) + (2 * L + 1) * (sp in ("regather", "overlap"))
    loss = 2 * B * S * (4 if c.smoothing else 3)
    copies = 2 * c.D * (2 * L + 1 + 2 * L * c.bias) * (sp != "off")
    heads = 2 * L * 2 * c.kv_heads * d * (c.D + c.bias) * (c.kv_heads < n)
    return e * (n - 1) / n * (halves * B * S * c.D + loss + copies + heads)


def build(c, group, device, sp="off"):
    """The model in float64, and its whole weights for the twin: the same for every n."""
    model = LanguageModel(c, group, sp).double().to(device)
    whole, draw = gather_whole(model, group), torch.Generator().manual_seed(0)
    for value in whole.values():
        if value.dim() == 1:  # norms of one and biases of zero would hide mistakes
            value += 0.1 * torch.randn(len(value), generator=draw).to(value)
    load_whole(model, whole, group)
    return model, whole


def loss_and_gradients(model, x_BS, y_BS, step=0):
    """Forward, backward, and the sums over copies. Returns the loss, per label that counts."""
    loss = model(x_BS, y_BS, step).sum() / (y_BS != -100).sum()
    loss.backward()
    sum_replicated_gradients(model, model.group, model.sp)
    return loss.detach()


def proof_batch(c, B, S, device):
    """Tokens and labels (B, S), the same on every rank; a quarter of the labels do not count."""
    draw = torch.Generator().manual_seed(1)
    x_BS, y_BS = torch.randint(c.V, (2, B, S), generator=draw)
    y_BS[torch.rand(B, S, generator=draw) < 0.25] = -100
    return x_BS.to(device), y_BS.to(device)


def check(c, group, device, sp, B, S):
    """One step beside the twin: the largest relative error of the loss and of this rank's part of
    any gradient, and the bytes sent, measured and by formula."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    (model, whole), (x_BS, y_BS) = build(c, group, device, sp), proof_batch(c, B, S, device)
    with Ledger() as ledger:
        loss = loss_and_gradients(model, x_BS, y_BS)
    wanted_loss, wanted = serial_step(whole, c, x_BS, y_BS)
    errors, specs = [relative_error(loss, wanted_loss)], shard_specs(model)
    for name, param in model.named_parameters():
        part = shard(wanted[name], specs[name], n, r) if name in specs else wanted[name]
        errors.append(relative_error(param.grad, part))
    return max(errors), (sum(ledger.sent.values()), sent_bytes(c, B, S, n, sp))


def check_saved(c, group, device, sp, B, S):
    """The bytes that a block keeps for backward, each storage once and no weights, measured and by
    formula."""
    n, block, kept = dist.get_world_size(group), Block(c, group, sp).double().to(device), {}
    s = S if sp == "off" else S // n
    x = torch.randn(B, s, c.D, dtype=torch.float64, device=device, requires_grad=True)
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = block(x, torch.arange(S, device=device))
    measured = sum(storage.nbytes() for at, storage in kept.items() if at not in own)
    y.sum().backward()  # until here the graph has kept all of it
    return measured, saved_bytes(c, B, S, n, sp)


def overlap_order(group, device):
    """What a gathering and a scattering product of CHUNKS chunks call, in order."""
    n, orders, matmul = dist.get_world_size(group), [], torch.matmul
    for rung, S in ((gather_then_multiply, CHUNKS), (multiply_then_scatter, n * CHUNKS)):
        with Ledger() as ledger:
            marked = lambda *given: ledger.mark("matmul") or matmul(*given)
            with patch.object(torch, "matmul", marked):
                rung(torch.ones(1, S, 2, device=device), torch.ones(2, 2, device=device), group)
        orders.append([event.what for event in ledger.events])
    return orders


def wrong_on_purpose(group, device):
    """Rows without one idea each, on the least that shows it, beside what is right."""
    n = dist.get_world_size(group)
    ones = torch.ones(1, n, 2, dtype=torch.float64, device=device)
    row = RowParallelLinear(2 * n, 2, group, bias=True).to(ones)
    nn.init.zeros_(row.weight), nn.init.ones_(row.bias)
    found = reduce_from_ranks(F.linear(ones, row.weight, row.bias), group)
    yield Row("bias added on every rank", relative_error(found, row(ones)), wrong=n - 1.0)

    column, norm = ColumnParallelLinear(2, n, group).to(ones), RMSNorm(2).to(ones)
    nn.init.ones_(column.weight)
    own = torch.autograd.grad(F.linear(x := ones.requires_grad_(), column.weight).sum(), x)[0]
    whole = torch.autograd.grad(column(x).sum(), x)[0]
    yield Row("f without its all-reduce back", relative_error(own, whole), wrong=1 - 1 / n)

    norm(split_sequence(ones, group)).sum().backward()
    own = norm.weight.grad.clone()
    sum_replicated_gradients(norm, group, "keep")
    error = relative_error(own, norm.weight.grad)
    yield Row("SP, norm gradients not summed", error, wrong=1 - 1 / n)

    zeros, labels = torch.zeros_like(ones), torch.zeros(1, n, dtype=torch.long, device=device)
    found = zeros.logsumexp(-1)  # of V = 2n logits, a rank's own two
    wanted = vocab_parallel_cross_entropy(zeros, labels, 2 * n, group)
    wrong = 1 - math.log(2) / math.log(2 * n)
    yield Row("loss over a rank's own logits", relative_error(found, wanted), wrong=wrong)


def proof(c, group, device, B, S):
    """The rows of the table: the ladder, other models on it, and ideas left out."""
    n, full = dist.get_world_size(group), dict(tied=False, bias=True, smoothing=0.1, dropout=0.2)
    rows = {f"{sp}; held: saved by a block": (sp, c) for sp in LADDER}
    rows["one key/value head for all"] = "keep", replace(c, kv_heads=1)
    rows["untied, biases, smoothing, dropout"] = "regather", replace(c, **full)
    for name, (sp, config) in rows.items():
        given = config, group, device, sp, B, S
        yield Row(name, *check(*given), check_saved(*given))
    model, whole = build(c, group, device)
    held = sum(p.nbytes for p in model.parameters()), parameter_bytes(c, n)
    gathered = gather_whole(model, group)
    error = max(relative_error(gathered[name], whole[name]) for name in whole)
    yield Row("cut and gathered; held: parameters", error, None, held)
    send = "all_to_all_single" if dist.get_backend(group) == "gloo" else "reduce_scatter_single"
    claimed = [["all_gather_single"] * CHUNKS + ["wait", "matmul"] * CHUNKS,
               ["matmul", send] * CHUNKS + ["wait"] * CHUNKS]  # fmt: skip
    yield Row("overlap: order of its calls", float(overlap_order(group, device) != claimed))
    yield from wrong_on_purpose(group, device) if n > 1 else ()


# ── run ──────────────────────────────────────────────────────────────────────────────────────


def train(c, args, group, device):
    """Train on text, in float64, so that every n prints the same digits. 0 if each step sent what
    the formula says."""
    text, n, S = read_text(args.text, 0), dist.get_world_size(group), args.sequence
    model, _ = build(c, group, device, args.sp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    formula = sent_bytes(c, args.batch, S, n, args.sp)
    say(f"\nSP {args.sp}, {sum(p.numel() for p in model.parameters()):,} parameters a rank; "
        f"unigram entropy of the text {unigram_entropy(text):.3f}")  # fmt: skip
    say("step      loss   tokens/s   sent/step     formula")
    broken = False
    for step in range(args.steps):
        x_BS, y_BS = (whole.to(device) for whole in sample(text, step, args.batch, S))
        started = time.perf_counter()
        with Ledger() as ledger:
            loss = loss_and_gradients(model, x_BS, y_BS, step)
        optimizer.step()
        optimizer.zero_grad()
        sent = sum(ledger.sent.values())
        broken |= abs(sent - formula) > 0.5
        if step % 10 == 0 or step == args.steps - 1:
            rate = args.batch * S / (time.perf_counter() - started)
            say(f"{step:4}{loss.item():10.6f}{rate:11,.0f}{sent:12,.0f}{formula:12,.0f}")
    return int(broken)


def plot(c, args, group, device):
    """Draw what a block keeps for backward on tp 1, 2, 4 ... of these ranks, beside its formula."""
    from matplotlib.figure import Figure

    looks = {"off": ("SP off", "#0b3c5d"), "keep": ("SP, gathered inputs kept", "#d9822b"),
             "regather": ("SP, gathered again in backward", "#cfe3f2")}  # fmt: skip
    kept, sizes = {}, [2**k for k in range(dist.get_world_size(group).bit_length())]
    for n in sizes:
        some = dist.new_group(range(n), timeout=timedelta(seconds=args.timeout))
        for sp in looks if dist.get_rank(group) < n else ():
            kept[n, sp] = check_saved(c, some, device, sp, args.batch, args.sequence)
    if dist.get_rank(group):
        return
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for i, (sp, (label, color)) in enumerate(looks.items()):
        measured, formula = ([b / 2**20 for b in row] for row in zip(*(kept[n, sp] for n in sizes)))
        at = [k + 0.27 * (i - 1) for k in range(len(sizes))]
        axes.bar(at, measured, 0.25, color=color, ec="black", lw=0.6, label=label)
        axes.plot(at, formula, "kx", ms=5, label="formula" if i == 2 else None)
    axes.set_xticks(range(len(sizes)), [f"tp {n}" for n in sizes])
    axes.set(title="Activations of a block that a rank keeps for backward", ylabel="MiB")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(args.plot, dpi=120)
    print(f"drew {args.plot}")


def main(args, device):
    """Prove, then draw or train; 0 if everything is as claimed."""
    group, n = dist.group.WORLD, dist.get_world_size(dist.group.WORLD)
    c = Config(heads=args.heads, kv_heads=args.kv_heads, hidden=args.hidden)
    say(f"03 tensor parallel · {n} ranks · {dist.get_backend(group)} · {device.type}")
    broken = prove(list(proof(c, group, device, 2, args.sequence)), device)
    if args.plot:
        plot(c, args, group, device)
    elif args.steps:
        broken |= train(c, args, group, device)
    return broken


def validate(args, ranks):
    """Refuse, in a sentence, what the ranks cannot share."""
    for flag in ("heads", "kv_heads", "hidden", "sequence", "batch"):
        if (value := getattr(args, flag)) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} {value}: at least 1 is needed")
    check_heads(Config.D, args.heads, args.kv_heads, ranks)
    check_divides(ranks, hidden=args.hidden, sequence=args.sequence)
    read_text(args.text, at_least=args.sequence + 1)


# ── launch kit: the same lines close chapters 01 to 06; a test keeps them identical ──────────

import argparse
import faulthandler
import inspect
import linecache
import logging
import math
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, namedtuple
from contextlib import ExitStack, suppress
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from pydoc_data.topics import topics
from unittest.mock import patch

import torch.multiprocessing as mp

WAITED = 3  # exit status of a rank that waited in vain for another
Event = namedtuple("Event", "what group sent at")  # a call, a wait or a mark; bytes; seconds


class Ledger(ExitStack):
    """While open, prices each `torch.distributed` call of this rank as a ring would send it:
    `events` has the calls, waits and marks in order, `sent` the bytes by call."""

    PRICES = {  # call: (its arguments, n ranks, rank r) -> bytes that leave rank r
        "all_reduce": lambda a, n, r: 2 * (n - 1) / n * a["tensor"].nbytes,
        "all_gather_single": lambda a, n, r: (n - 1) * a["input_tensor"].nbytes,
        "reduce_scatter_single": lambda a, n, r: (n - 1) / n * a["input"].nbytes,
        "all_to_all_single": lambda a, n, r: a["input"].nbytes
        - a["input"][:1].nbytes * (a.get("input_split_sizes") or [len(a["input"]) / n] * n)[r],
        "broadcast": lambda a, n, r: a["tensor"].nbytes * ((r - a["group_src"]) % n < n - 1),
        "isend": lambda a, n, r: a["tensor"].nbytes,
        **dict.fromkeys(["irecv", "barrier"], lambda a, n, r: 0),
    }
    UNPRICED = "all_gather all_to_all gather reduce reduce_scatter scatter send recv".split()

    def __enter__(self):
        self.events, self.sent, wait = [], Counter(), dist.Work.wait
        names = [*self.PRICES, *self.UNPRICED]
        calls = {name: self._priced(name, getattr(dist, name)) for name in names}
        for module in (dist, dist.distributed_c10d):  # batch_isend_irecv looks in the latter
            self.enter_context(patch.multiple(module, **calls))
        marked = lambda work, *seconds: self.mark("wait") or wait(work, *seconds)
        self.enter_context(patch.object(dist.Work, "wait", marked))
        return self

    def mark(self, what, group=None, sent=0):
        name = (group or dist.group.WORLD).group_name
        self.events.append(Event(what, name, sent, time.perf_counter()))
        self.sent[what] += sent

    def _priced(self, name, call):
        def priced(*args, **kwargs):
            a = inspect.signature(call).bind(*args, **kwargs).arguments
            n, r = (ask(a.get("group")) for ask in (dist.get_world_size, dist.get_rank))
            self.mark(name, a.get("group"), self.PRICES[name](a, n, r))
            return call(*args, **kwargs)

        return priced


# A line of the proof: error beside the twin; bytes as (measured, formula) or None; the error that a
# row must show if it is wrong on purpose; the (least, greatest) error of a method that loses on
# purpose.
Row = namedtuple("Row", "name error sent held wrong bound", defaults=[None, None, 0.0, None])


def relative_error(value, reference):
    """max|value - reference| / max|reference|; of a reference of zeros, 0 if equal, else inf."""
    gap, size = (t.abs().max().item() if t.numel() else 0.0 for t in (value - reference, reference))
    return gap / size if size else math.inf if gap else 0.0


def prove(rows, device):
    """Print the table. Return 0 if on every rank each error is at most 1e-10, or as predicted, or
    inside its bound, and all bytes equal their formula; else 1."""
    off = lambda pair: abs(pair[0] - pair[1]) if pair else 0.0
    slack = lambda row: max(1e-6 * row.wrong, 1e-10)
    bounds = [x.bound or (x.wrong - slack(x), x.wrong + slack(x)) for x in rows]
    outside = [max(low - x.error, x.error - high) for x, (low, high) in zip(rows, bounds)]
    worst = [[x.error, out, off(x.sent), off(x.held)] for x, out in zip(rows, outside)]
    worst = torch.tensor(worst).double().nan_to_num(math.inf).to(device)
    # all_reduce(MAX) over all ranks, four numbers a row: the worst rank speaks for all
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
    say("error: max|difference| / max|one process|; bytes: of rank 0, sent as a ring sends them")
    say(f"{'':36}    error   bytes sent      formula   bytes held      formula")
    broken = 0
    for row, (error, out, unsent, unheld) in zip(rows, worst.tolist()):
        holds = out <= 0 and unsent < 0.5 and unheld < 0.5
        pairs = [[f"{x:,.0f}" for x in pair] if pair else "--" for pair in (row.sent, row.held)]
        note = f"  wrong on purpose: {row.wrong:.3g} predicted" if row.wrong else ""
        note += "  bounded: {:.3g} to {:.3g}".format(*row.bound) if row.bound else ""
        note += "" if holds else "  NOT AS CLAIMED"
        say(f"{row.name:36}{error:9.2g}{''.join(f'{x:>13}' for pair in pairs for x in pair)}{note}")
        broken |= not holds
    return int(broken)


class Disagreement(ValueError):
    """Ranks hold different things where all must hold the same."""


def agree(lines, group):
    """Raise Disagreement, with the first line that differs, unless all ranks have the same lines
    of text. One all-gather of a digest; the lines follow only where digests differ."""
    digest, n = sha256("\n".join(lines).encode()).digest(), dist.get_world_size(group)
    dist.all_gather_object(digests := [None] * n, digest, group=group)
    if len(set(digests)) > 1:
        dist.all_gather_object(texts := [None] * n, [*lines, "no more"], group=group)
        rank = next(r for r, text in enumerate(texts) if text != texts[0])
        here, first = next(pair for pair in zip(texts[rank], texts[0]) if pair[0] != pair[1])
        raise Disagreement(f"ranks disagree: rank {rank} has {here}, rank 0 has {first}")


def read_text(path, at_least):
    """The bytes of a file, or of Python's own help topics, as tokens of a vocabulary of 256.
    Raises ValueError where they cannot be read or are fewer than `at_least`."""
    try:
        text = Path(path).read_bytes() if path is not None else "\n".join(topics.values()).encode()
    except OSError as error:
        raise ValueError(f"--text {path}: {error.strerror}") from error
    if len(text) < at_least:
        raise ValueError(f"--text {path}: {len(text)} bytes, and one batch needs {at_least}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def unigram_entropy(text):
    """The loss, in nats per byte, of the best guess that looks at no context."""
    return torch.distributions.Categorical(torch.bincount(text).double()).entropy().item()


def sample(text, step, B, S):
    """The batch of a step, the same on all ranks: bytes (B, S), and the byte after each (B, S)."""
    starts_B1 = torch.randint(len(text) - S, (B, 1), generator=torch.Generator().manual_seed(step))
    windows = text[starts_B1 + torch.arange(S + 1)]
    return windows[:, :-1], windows[:, 1:]


def say(*words):
    """Print, on rank 0 alone."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def arguments(doc, ranks, steps, plot=None):
    """A parser with the flags of every chapter; `plot` says what its --plot draws."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    add, seconds = parser.add_argument, 120 if "RANK" in os.environ else 20
    add("--ranks", type=int, default=ranks, help="ranks to start, where torchrun did not")
    add("--steps", type=int, default=steps, help="steps to train after the proof; may be 0")
    add("--text", help="file to train on; default: Python's own help topics")
    add("--timeout", type=float, default=seconds, help="seconds that a collective may take")
    if plot:
        add("--plot", metavar="FILE", help=f"draw {plot} (png, pdf or svg); do not train")
    return parser


def launch(main, args, validate):
    """Run main(args, device) on every rank, torchrun's or args.ranks started here, and exit: 0 if
    each returned 0, 1 if not, 2 and a sentence if validate(args, ranks) raised ValueError."""
    torch.set_num_threads(1)  # a forked child must not inherit a pool of threads
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    ranks = int(os.environ.get("WORLD_SIZE", args.ranks))
    try:
        for flag, least in ("ranks", 1), ("steps", 0), ("timeout", 0.001):
            if not (value := vars(args).get(flag, least)) >= least:
                raise ValueError(f"--{flag} {value}: must be at least {least}")
        plot = Path(vars(args).get("plot") or "here.png")
        if plot.suffix not in (".png", ".pdf", ".svg") or not os.access(plot.parent, os.W_OK):
            raise ValueError(f"--plot {plot}: name a .png, .pdf or .svg in a folder to write to")
        validate(args, ranks)
    except ValueError as refusal:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(refusal, file=sys.stderr)
        sys.exit(2)
    if "RANK" in os.environ:
        _rank(int(os.environ["LOCAL_RANK"]), ranks, main, args)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    method = "fork" if sys.platform == "linux" and torch.cuda.device_count() < ranks else "spawn"
    with tempfile.TemporaryDirectory() as folder:
        run = mp.start_processes(_rank, (ranks, main, args, folder), ranks, False, True, method)
        try:
            while not run.join():
                pass
        except mp.ProcessExitedException:  # join() has ended the other ranks by SIGTERM
            codes = [process.exitcode for process in run.processes]
            stacks = [Path(folder, str(rank)).read_text() for rank in range(ranks)]
            sys.exit(_what_went_wrong(codes, stacks))
    sys.exit(0)


def _what_went_wrong(codes, stacks):
    """Which signal ended a rank; or, if no rank told a fault of its own, where each one stood."""
    killed = {r: -code for r, code in enumerate(codes) if code < 0 and code != -signal.SIGTERM}
    said = [f"rank {r} was ended by {signal.Signals(by).name}" for r, by in killed.items()]
    if {*codes} <= {0, WAITED, -signal.SIGTERM}:
        said = ["some ranks waited in vain for others; each one stood at"]
        said += [f"rank {r} of {len(codes)}: {_place(stack)}" for r, stack in enumerate(stacks)]
    return "\n".join(said) or (1 if 1 in codes else max(codes))


def _place(stack):
    """The innermost line of a stack that belongs neither to a library nor to the Ledger."""
    for file, number in re.findall(r'File "(.+)", line (\d+)', stack):
        line = linecache.getline(file, int(number)).strip()
        if "/lib/python" not in file and not re.search(r"return call\(|wait\(work", line):
            return f"line {number} of {Path(file).name}: {line}"
    return "the end, it had returned"


def _rank(local, ranks, main, args, folder=None):
    """Meet the other ranks, run main, and leave with its exit status or with what went wrong."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    env, local_ranks = os.environ, int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    rank, on_gpu = int(env.get("RANK", local)), torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if local_ranks == ranks:  # one machine: the loopback address needs no network
        env.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    if folder:
        report, store = open(f"{folder}/{rank}", "w"), dist.FileStore(f"{folder}/store", ranks)
        faulthandler.register(signal.SIGTERM, report, chain=True)  # says where it stood
    else:  # a restarted attempt must not read the addresses of the one before
        attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
        report, store = sys.stderr, dist.PrefixStore(attempt, next(dist.rendezvous("env://"))[0])
    try:
        given = dict(timeout=timedelta(seconds=args.timeout), rank=rank, world_size=ranks)
        dist.init_process_group("nccl" if on_gpu else "gloo", store=store, **given)
        agree([f"--{flag} {value}" for flag, value in vars(args).items()], dist.group.WORLD)
        code = main(args, device)
        dist.destroy_process_group()
    except BrokenPipeError:  # what read the output, such as `head`, has left
        code = 128 + signal.SIGPIPE
    except Exception as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until this has been told
        stack = "".join(reversed(traceback.format_tb(error.__traceback__)))
        code = 2 if isinstance(error, Disagreement) else 1
        if re.search("by peer|imed out", str(error)):
            code = WAITED
            where = f"rank {rank} of {ranks} waited in vain at {_place(stack)}"
            print(stack if folder else where, file=report)
        elif store.add(repr(error), 1) == 1:  # what ranks have in common is told once
            told = error if code == 2 else traceback.format_exc()
            print(f"rank {rank} of {ranks}: {told}", file=sys.stderr)
        report.flush()
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(code)  # an ordinary exit may abort where a reference to a group is left



if __name__ == "__main__":
    parser = arguments(__doc__, ranks=4, steps=40)
    parser.add_argument("--sp", choices=LADDER, default="regather", help="rung of the training")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=384, help="units of the MLP")
    parser.add_argument("--sequence", type=int, default=64, help="bytes in a sample")
    parser.add_argument("--batch", type=int, default=16, help="samples in a step")
    parser.add_argument("--plot", metavar="PNG", help="draw kept activations instead of training")
    launch(main, parser.parse_args(), validate)
