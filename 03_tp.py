"""03 · Tensor parallel: each rank holds a part of every matrix

A layer multiplies by two pairs of matrices: q, k, v and then out in attention, up and then down in
the MLP. Split the first matrix of a pair by columns: each rank computes its own heads or hidden
units from the full input, with no communication. Split the second matrix by rows: each rank's
result is a partial sum, and one all-reduce adds the partial sums. With sequence parallelism (SP)
the all-reduce becomes a reduce-scatter: between two pairs each rank then holds S/n tokens, for the
norms and the residual stream.

    x ──┬── columns of W_up on rank 0 ── silu ── rows of W_down on rank 0 ──┬── sum ── y
        └── columns of W_up on rank 1 ── silu ── rows of W_down on rank 1 ──┘

                before the columns               after the rows
    rung        forward       backward           forward          backward           sent
    off         nothing       all-reduce         all-reduce       nothing            8
    keep        all-gather    reduce-scatter     reduce-scatter   all-gather         8
    regather    as keep; backward gathers x again, so that a rank need not keep it   10
    overlap     as regather, in chunks that travel while others are multiplied       10
    off is without SP, the others are with SP
    sent: by a rank, for a layer and a step, in units of (n-1)/n · B·S·D elements; an all-reduce
          sends 2 units, an all-gather or a reduce-scatter 1
    held: 1/n of each matrix; all of each norm; what is kept for backward: see saved_bytes()

    python 03_tp.py                          four ranks on this machine
    torchrun --nproc-per-node 4 03_tp.py     the same, started by torchrun

Guide: Tensor Parallelism · TP requires divisibility · Sequence parallelism · Megatron-LM TP, SP and
CP in detail · Sequence-parallel activation memory. The guide differs in four places. Nothing is
summed between the two matrices of a pair. 80 layers take 320 all-reduces in a step (two pairs, two
directions), not 160. SP sends as much as the all-reduces; only the second gathering of x adds a
quarter. n may exceed the number of key/value heads, because heads can be copied.

Questions  Q3.1 ** what happens to x before the columns?   Q3.2 * where is a row's bias added?
           Q3.3 ** which row of the table is a token's?    Q3.4 ** which numbers need all columns?
           Q3.5 ** which gradients are only a part?        Q3.6 *** when may a rank wait?
"""
# n ranks · B sequences · S tokens of a sequence · s tokens of this rank · D width
# H query heads · K key/value heads · d width of a head · F hidden units · V vocabulary

import signal
from dataclasses import dataclass

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads ends it without a trace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from torch.utils.checkpoint import checkpoint

# ── the serial twin: the same model on one process, in plain torch ───────────────────────────


@dataclass(frozen=True)
class Config:
    """A small Llama: grouped-query attention, rotary positions, RMSNorm, SwiGLU."""

    D: int = 128
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 384
    V: int = 257  # 256 bytes and an end of text: no n divides this vocabulary
    layers: int = 2
    bias: bool = False
    tied: bool = True


class Twin(nn.Module):
    """The whole model, from tokens (B, S) to logits (B, S, V). Its names are LanguageModel's."""

    def __init__(self, c):
        super().__init__()
        self.c, self.d = c, c.D // c.heads
        linear = lambda n_in, n_out: nn.Linear(n_in, n_out, bias=c.bias)
        self.embedding, self.blocks = nn.Embedding(c.V, c.D), nn.ModuleList()
        for _ in range(c.layers):
            qkv, out = linear(c.D, (c.heads + 2 * c.kv_heads) * self.d), linear(c.D, c.D)
            gate_up, down = linear(c.D, 2 * c.hidden), linear(c.hidden, c.D)
            parts = {"norm1": nn.RMSNorm(c.D, eps=1e-6), "norm2": nn.RMSNorm(c.D, eps=1e-6)}
            parts["attention"] = nn.ModuleDict({"qkv": qkv, "out": out})
            parts["mlp"] = nn.ModuleDict({"gate_up": gate_up, "down": down})
            self.blocks.append(nn.ModuleDict(parts))
        self.norm, self.head = nn.RMSNorm(c.D, eps=1e-6), nn.Linear(c.D, c.V, bias=False)
        for param in self.parameters():  # norms of one and biases of zero would hide mistakes
            mean, std = (1.0, 0.1) if param.dim() == 1 else (0.0, param.shape[1] ** -0.5)
            nn.init.normal_(param, mean, std)
        if c.tied:
            self.head.weight = self.embedding.weight

    def forward(self, x_BS):
        x = self.embedding(x_BS)
        for block in self.blocks:
            x = x + self.attend(block.norm1(x), **block.attention)
            gate, up = block.mlp.gate_up(block.norm2(x)).chunk(2, -1)
            x = x + block.mlp.down(F.silu(gate) * up)
        return self.head(self.norm(x))

    def attend(self, x, qkv, out):
        S, H, K = x.shape[1], self.c.heads, self.c.kv_heads
        q, k, v = qkv(x).unflatten(-1, (-1, self.d)).transpose(1, 2).split([H, K, K], 1)
        rates = 1e4 ** (-torch.arange(0, self.d, 2, dtype=torch.float64) / self.d)
        turn = torch.exp(1j * torch.arange(S)[:, None] * rates).to(x.device)
        q, k = (torch.complex(*t.chunk(2, -1)) * turn for t in (q, k))
        q, k = (torch.cat([t.real, t.imag], -1) for t in (q, k))
        k, v = (t.repeat_interleave(H // K, 1) for t in (k, v))
        future = torch.ones(S, S, dtype=torch.bool, device=x.device).triu(1)
        p = (q @ k.mT / self.d**0.5).masked_fill(future, -torch.inf).softmax(-1)
        return out((p @ v).transpose(1, 2).flatten(2))


# ── the axis by hand: one pair of matrices, forward and backward ─────────────────────────────

#             W_up by columns               W_down by rows
#           ┌─────┬─────┬─────┐            ┌─────────────┐
#           │     │     │     │            │     W1      │  partial sum of rank 1 ─┐
#     x ──  │ W1  │ ... │ Wn  │ ── relu ── ├─────────────┤          ...           ─┼─ all-reduce ─ y
#           │     │     │     │            │     Wn      │  partial sum of rank n ─┘
#           └─────┴─────┴─────┘            └─────────────┘
#
# Example: n = 2, D = 1, two hidden units, x = 3, W_up = [1 2], W_down = [10; 100], d_y = 1.
#             rank 0          rank 1           all-reduce   one process
#     h       3·1 = 3         3·2 = 6
#     y       3·10 = 30       6·100 = 600      630          3·10 + 6·100 = 630
#     d_h     1·10 = 10       1·100 = 100
#     d_x     10·1 = 10       100·2 = 200      210          10·1 + 100·2 = 210
#     d_up    10·3 = 30       100·3 = 300                   [30 300]


def mlp_by_hand(x_BSD, up_fD, down_Df, d_y_BSD, group):
    """Compute y = relu(x W_up) W_down and all its gradients: (y, d_x, d_up, d_down).

    This rank holds f hidden units: their columns of W_up and their rows of W_down. torch stores a
    matrix as (outputs, inputs), so the columns of W_up are the rows of up_fD.
    """
    h_BSf = (x_BSD @ up_fD.T).relu()  # column parallel: every rank has all of x
    y_BSD = h_BSf @ down_Df.T  # row parallel: the sum over this rank's units alone
    # all_reduce(SUM) over tp, B·S·D: every rank now holds the sum over all units
    dist.all_reduce(y_BSD, group=group)

    d_h_BSf = d_y_BSD @ down_Df * (h_BSf > 0)  # every rank has all of d_y
    d_x_BSD = d_h_BSf @ up_fD  # the part of the gradient that comes from this rank's units
    # all_reduce(SUM) over tp, B·S·D: every rank now holds the gradient from all units
    dist.all_reduce(d_x_BSD, group=group)
    d_up_fD = torch.einsum("BSf,BSD->fD", d_h_BSf, x_BSD)
    d_down_Df = torch.einsum("BSD,BSf->Df", d_y_BSD, h_BSf)
    return y_BSD, d_x_BSD, d_up_fD, d_down_Df


# ── the collectives: what one does forward, its partner does backward ────────────────────────


def all_reduce(x, group):
    """The sum of x over the ranks, in a new tensor: in backward, other branches may read x."""
    x = x.clone(memory_format=torch.contiguous_format)
    # all_reduce(SUM) over tp, B·S·D: every rank now holds the whole sum
    dist.all_reduce(x, group=group)
    return x


# Starting a collective of SP and waiting for it are two calls: the last rung computes in between.


def start_all_gather(x_BsD, group):
    """Send this rank's tokens. Returns a function that waits for all tokens, as (n, B, s, D)."""
    tokens_nBsD = x_BsD.new_empty(dist.get_world_size(group), *x_BsD.shape)
    out = tokens_nBsD.flatten(0, 1)
    # all_gather over tp, B·s·D from each: every rank will hold all tokens
    work = dist.all_gather_single(out, x_BsD.contiguous(), group=group, async_op=True)

    def wait():
        work.wait()
        return tokens_nBsD

    return wait


def start_reduce_scatter(x_nBsD, group):
    """Send each rank its tokens. Returns a function that waits for the sum of this rank's tokens,
    (B, s, D)."""
    x_nBsD = x_nBsD.contiguous()
    if dist.get_backend(group) == "gloo":  # gloo's reduce_scatter sends twice as much, and blocks
        sums = torch.empty_like(x_nBsD)
        # all_to_all over tp, B·s·D to each: every rank will hold n parts of its tokens, to add
        work = dist.all_to_all_single(sums, x_nBsD, group=group, async_op=True)
    else:
        sums = torch.empty_like(x_nBsD[0])
        # reduce_scatter(SUM) over tp, B·S·D: every rank will hold the sum of its tokens
        work = dist.reduce_scatter_single(sums, x_nBsD.flatten(0, 1), group=group, async_op=True)

    def wait():
        work.wait()
        return sums.view(-1, *x_nBsD.shape[1:]).sum(0)

    return wait


def by_rank(x_BSD, group):
    """(B, S, D) as (n, B, s, D). Raises ValueError if n does not divide S, before any call."""
    check_divides(dist.get_world_size(group), sequence=x_BSD.shape[1])
    return rearrange(x_BSD, "B (n s) ... -> n B s ...", n=dist.get_world_size(group))


def all_gather(x_BsD, group):
    """The tokens of all ranks, (B, S, D), from each rank's (B, s, D)."""
    return rearrange(start_all_gather(x_BsD, group)(), "n B s ... -> B (n s) ...")


def reduce_scatter(x_BSD, group):
    """This rank's tokens (B, s, D) of the sum of all ranks' (B, S, D)."""
    return start_reduce_scatter(by_rank(x_BSD, group), group)()


def identity(x, group):
    """x unchanged."""
    return x


def pair(forward, backward):
    """A function of (x, group). The gradient of x is `backward` of the gradient of the result."""

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return forward(x, group)

        @staticmethod
        def backward(ctx, d_y):
            return backward(d_y, ctx.group), None

    return Pair.apply


# The first two are tensor parallelism: f before the columns, g after the rows (Shoeybi et al.,
# arXiv:1909.08053, section 3). With SP the last two stand in their places (Korthikanti et al.,
# arXiv:2205.05198, section 4.2).
#
#                        forward         backward
copy_to_ranks     = pair(identity,       all_reduce)      # f: each rank has a part of d_x
reduce_from_ranks = pair(all_reduce,     identity)        # g: d_y of a sum is d_y of each part
gather_sequence   = pair(all_gather,     reduce_scatter)  # (B, s, D) to (B, S, D)
scatter_sequence  = pair(reduce_scatter, all_gather)      # (B, S, D) to (B, s, D)  # fmt: skip


# ── the ladder: column parallel and row parallel, x (B, S, D) to y (B, S, D) ─────────────────


def column_parallel(x_BSD, weight, group):
    """Multiply by this rank's columns of W: weight is (outputs of this rank, D)."""
    # Q3.1 ** Every rank already has all of x. What must still be done to x before the product?
    #         hint: this rank's outputs give a part of d_x, and the layer below needs the whole d_x
    x_BSD = copy_to_ranks(x_BSD, group)
    return F.linear(x_BSD, weight)
    # /Q3.1


def row_parallel(x, weight, group):
    """Multiply by this rank's rows of W, and add the partial sums of all ranks."""
    partial_BSD = F.linear(x, weight)
    return reduce_from_ranks(partial_BSD, group)


def column_parallel_sp(x_BsD, weight, group):
    """column_parallel() for an x of which each rank holds s tokens."""
    x_BSD = gather_sequence(x_BsD, group)
    return F.linear(x_BSD, weight)


def row_parallel_sp(x, weight, group):
    """row_parallel() that leaves each rank the sum of its s tokens."""
    partial_BSD = F.linear(x, weight)
    return scatter_sequence(partial_BSD, group)


# The rung above keeps the gathered x of every layer for backward, because the gradient of the
# weight needs it. The next rung keeps only this rank's tokens. torch's checkpoint() saves the
# arguments of a function and, in backward, calls the function again for what it did not save. It
# stops once it has the gathered x, so the tokens travel again and no product is computed again.


def column_parallel_regather(x_BsD, weight, group):
    """column_parallel_sp() that keeps s tokens instead of S."""
    options = dict(use_reentrant=False, preserve_rng_state=False)
    return checkpoint(column_parallel_sp, x_BsD, weight, group, **options)


LADDER = {
    "off": (column_parallel, row_parallel),
    "keep": (column_parallel_sp, row_parallel_sp),
    "regather": (column_parallel_regather, row_parallel_sp),
}  # and "overlap", below


# ── which part of a whole tensor a rank holds ────────────────────────────────────────────────


def check_divides(n, **counts):
    """Raise ValueError, naming what would work, if n does not divide one of the counts."""
    for name, count in counts.items():
        if count % n:
            divisors = [k for k in range(1, count + 1) if count % k == 0]
            raise ValueError(f"tp {n} does not divide {name} {count}: use one of {divisors}")


def check_heads(D, heads, kv_heads, n):
    """Raise ValueError, naming what would work, if n ranks cannot share the heads. n must divide
    the query heads. n must also divide the key/value heads, or be a multiple of their number."""
    if D % heads or D // heads % 2 or heads % kv_heads:
        raise ValueError(f"width {D} must be heads {heads} times an even number, and the heads a "
                         f"multiple of key/value heads {kv_heads}")  # fmt: skip
    usable = [k for k in range(1, heads + 1)
              if heads % k == 0 and (kv_heads % k == 0 or k % kv_heads == 0)]  # fmt: skip
    if n not in usable:
        raise ValueError(f"tp {n} cannot share {heads} heads and {kv_heads} key/value heads: "
                         f"use one of {usable}")  # fmt: skip


# q, k and v are the three blocks of one matrix, so that x is gathered and multiplied once. A rank
# needs heads of all three. So each block is cut for itself, between two heads.
# Example: H = 4, K = 2, d = 2 on two ranks. The rows of the matrix, by head:
#     whole     q0 q0 q1 q1 q2 q2 q3 q3 | k0 k0 k1 k1 | v0 v0 v1 v1   ((4, 2), (2, 2), (2, 2))
#     rank 0    q0 q0 q1 q1             | k0 k0       | v0 v0
#     rank 1                q2 q2 q3 q3 |       k1 k1 |       v1 v1
# whole.chunk(2) would give rank 0 all of q and no v.


def indices_of(spec, length, n, rank):
    """The indices of a rank's part along a dimension of this length. Index `length` is past the
    end: a row of zeros."""
    blocks, indices, start = spec[1], [], 0
    if isinstance(blocks, int):
        blocks = [(length // blocks, 1)] * blocks
    for units, width in blocks:
        size = -(-units // n) * width
        first = rank * size if units >= n else rank * units // n * width
        index = torch.arange(first, first + size)
        indices.append((start + index).masked_fill(index >= units * width, length))
        start += units * width
    return torch.cat(indices)


def shard(whole, spec, n, rank):
    """A rank's part of a whole tensor.

    spec: (dim, blocks). blocks is a number of equal blocks along dim, or a (units, width of a unit)
    for each block. All ranks get the same number of units of a block. If n does not divide the
    units, zeros follow the last unit. If units are fewer than ranks, n/units ranks get each unit.
    """
    dim, length = spec[0], whole.shape[spec[0]]
    zeros = torch.zeros_like(whole.narrow(dim, 0, 1))
    index = indices_of(spec, length, n, rank).to(whole.device)
    return torch.cat([whole, zeros], dim).index_select(dim, index)


def whole_shape(part, spec, n):
    """The shape of the whole tensor of which a rank holds this part."""
    (dim, blocks), shape = spec, list(part.shape)
    equal = isinstance(blocks, int)
    shape[dim] = n * shape[dim] if equal else sum(units * width for units, width in blocks)
    return shape


def unshard(parts, spec):
    """The whole tensor of all ranks' parts: the reverse of shard()."""
    (dim, _), shape = spec, whole_shape(parts[0], spec, len(parts))
    length, shape[dim] = shape[dim], shape[dim] + 1
    whole = parts[0].new_empty(shape)
    for rank, part in enumerate(parts):
        index = indices_of(spec, length, len(parts), rank).to(part.device)
        whole.index_copy_(dim, index, part)
    return whole.narrow(dim, 0, length)


def shard_specs(module):
    """{name: (dim, blocks)}, as shard() takes it, of the parameters that tp cuts. Every rank holds
    all of the others."""
    specs = {
        f"{prefix}.{name}".lstrip("."): spec
        for prefix, part in module.named_modules()
        for name, spec in getattr(part, "shard_spec", {}).items()
    }
    return {name: specs[name] for name, _ in module.named_parameters() if name in specs}


# ── the layers; `sp` names a rung ────────────────────────────────────────────────────────────


class _Sharded(nn.Module):
    """A layer of which each rank of the group holds a part."""

    def __init__(self, group, sp, specs):
        super().__init__()
        if sp not in LADDER:
            raise ValueError(f"sp={sp!r}: use one of {tuple(LADDER)}")
        self.group, self.sp, self.shard_spec = group, sp, specs

    def part(self, whole, spec):
        """This rank's part of a whole tensor, as a parameter. Every rank draws the whole tensor, so
        every n starts from the same weights."""
        n, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        return refuse_torchs_clipping(nn.Parameter(shard(whole, spec, n, rank)))


class ColumnParallelLinear(_Sharded):
    """x Wᵀ + b with the outputs split over the group: x (B, S, D), with SP (B, s, D), to (B, S,
    outputs of this rank). `blocks`: see shard(). Raises ValueError if n does not divide the outputs
    of each block."""

    def __init__(self, n_in, n_out, group, bias=False, sp="off", blocks=1):
        spec = (0, blocks)
        super().__init__(group, sp, {"weight": spec, "bias": spec})
        if isinstance(blocks, int):
            check_divides(dist.get_world_size(group), outputs=n_out // blocks)
        self.weight = self.part(torch.randn(n_out, n_in) / n_in**0.5, spec)
        self.bias = self.part(torch.zeros(n_out), spec) if bias else None

    def forward(self, x):
        column, _ = LADDER[self.sp]
        y = column(to_autocast_dtype(x), self.weight, self.group)
        return y if self.bias is None else y + self.bias


class RowParallelLinear(_Sharded):
    """x Wᵀ + b with the inputs split over the group: x (B, S, inputs of this rank) to (B, S, D),
    with SP (B, s, D). Every rank holds all of the bias. Raises ValueError if n does not divide the
    inputs."""

    def __init__(self, n_in, n_out, group, bias=False, sp="off"):
        super().__init__(group, sp, {"weight": (1, 1)})
        check_divides(dist.get_world_size(group), inputs=n_in)
        self.weight = self.part(torch.randn(n_out, n_in) / n_in**0.5, (1, 1))
        self.bias = nn.Parameter(torch.zeros(n_out)) if bias else None

    def forward(self, x):
        _, row = LADDER[self.sp]
        y = row(x, self.weight, self.group)
        # Q3.2 * y is already the sum over the ranks, and every rank holds the bias. Where is the
        #        bias added, and why not before the sum?
        #        hint: n times the bias would train as well, and differ from one process
        if self.bias is not None:
            y = y + self.bias
        return y
        # /Q3.2


class RMSNorm(nn.RMSNorm):
    """x / rms(x) · w over the width. Every rank holds all of w; with SP it sees only s tokens."""

    def __init__(self, D):
        super().__init__(D, eps=1e-6)


def rotary(x_BShd, positions_S, theta=1e4):
    """Turn elements i and i + d/2 of each head by the angle position · theta^(-2i/d): RoFormer,
    arXiv:2104.09864, in the order of Llama."""
    half, wide = x_BShd.shape[-1] // 2, torch.promote_types(x_BShd.dtype, torch.float32)
    rates = theta ** -(torch.arange(half, device=x_BShd.device, dtype=wide) / half)
    angles = positions_S.to(wide)[:, None, None] * rates
    cos, sin = angles.cos().to(x_BShd.dtype), angles.sin().to(x_BShd.dtype)
    a, b = x_BShd.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def causal(q_BShd, k_BSkd, v_BSkd):
    """Attention of each position to itself and those before; h/k queries share a key and value."""
    q, k, v = (x.transpose(1, 2) for x in (q_BShd, k_BSkd, v_BSkd))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2)


class Attention(nn.Module):
    """Grouped-query attention with the heads split over the group: x (B, S, D), with SP (B, s, D),
    to its own shape. positions_S are the positions of all S tokens, with SP too.

    attend(q, k, v) gets the heads of this rank: (B, S, H/n, d) and twice (B, S, K/n, d). If K < n,
    n/K ranks hold copies of a head. Raises ValueError: see check_heads().
    """

    def __init__(self, D, heads, kv_heads, group, bias=False, sp="off", attend=causal):
        super().__init__()
        n, self.d, self.attend = dist.get_world_size(group), D // heads, attend
        check_heads(D, heads, kv_heads, n)
        self.heads, self.kv_heads = heads // n, max(kv_heads // n, 1)
        blocks = tuple((count, self.d) for count in (heads, kv_heads, kv_heads))
        rows = (heads + 2 * kv_heads) * self.d
        self.qkv = ColumnParallelLinear(D, rows, group, bias, sp, blocks)
        self.out = RowParallelLinear(D, D, group, bias, sp)

    def forward(self, x, positions_S):
        qkv = self.qkv(x).unflatten(-1, (-1, self.d))
        qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], 2)
        q, k = rotary(qk, positions_S).split([self.heads, self.kv_heads], 2)
        y = self.attend(q, k, v.contiguous())  # a view would keep all of qkv for backward
        return self.out(y.flatten(2))


class MLP(nn.Module):
    """SwiGLU, down(silu(gate(x)) · up(x)), with the hidden units split over the group. Gate and up
    are one matrix of two blocks, so that a rank holds the same units of both."""

    def __init__(self, D, hidden, group, bias=False, sp="off"):
        super().__init__()
        check_divides(dist.get_world_size(group), hidden=hidden)
        self.gate_up = ColumnParallelLinear(D, 2 * hidden, group, bias, sp, blocks=2)
        self.down = RowParallelLinear(hidden, D, group, bias, sp)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


# ── the two ends: embedding and loss over a vocabulary that is split ─────────────────────────


def local_rows(ids, V, v, group):
    """(rows, held): the row of each id among this rank's v rows of a table of V, and whether this
    rank holds it; row 0 if not. Raises IndexError for an id that no rank holds."""
    if ids.numel() and not 0 <= ids.min() <= ids.max() < V:
        raise IndexError(f"ids from {ids.min()} to {ids.max()}, in a vocabulary of {V}")
    # Q3.3 ** Rank r holds the rows r·v to (r + 1)·v - 1. Which of its v rows belongs to an id?
    #         hint: an index must be valid even where its row is masked out afterwards
    rows = ids - dist.get_rank(group) * v
    held = (rows >= 0) & (rows < v)
    return rows.where(held, 0), held
    # /Q3.3


class VocabParallelEmbedding(_Sharded):
    """Tokens (B, S) to (B, S, D), with SP (B, s, D). Each rank holds v of the V rows; if n does not
    divide V, rows of zeros follow the last. A tied head uses the same `weight`."""

    def __init__(self, V, D, group, sp="off"):
        spec = (0, ((V, 1),))
        super().__init__(group, sp, {"weight": spec})
        if V < dist.get_world_size(group):
            raise ValueError(f"tp {dist.get_world_size(group)} is larger than the vocabulary, {V}")
        self.V, self.weight = V, self.part(torch.randn(V, D) / D**0.5, spec)

    def forward(self, x_BS):
        rows, held = local_rows(x_BS, self.V, len(self.weight), self.group)
        partial_BSD = F.embedding(rows, self.weight).masked_fill(~held[..., None], 0)
        combine = reduce_from_ranks if self.sp == "off" else scatter_sequence
        return combine(partial_BSD, self.group)


class _CrossEntropy(torch.autograd.Function):
    """
    forward   all_reduce(MAX) of one number per token, then all_reduce(SUM) of two
    backward  nothing moves
    """

    @staticmethod
    def forward(ctx, logits_BSv, labels_BS, V, group, ignore_index):
        z = logits_BSv.to(torch.promote_types(logits_BSv.dtype, torch.float32), copy=True)
        v, counted = z.shape[-1], labels_BS != ignore_index
        z[..., max(V - dist.get_rank(group) * v, 0) :] = -torch.inf  # rows that only fill up
        rows, held = local_rows(labels_BS.where(counted, 0), V, v, group)
        top_BS = z.amax(-1)
        # Q3.4 ** A rank has v of the V logits of a token. Which numbers need all V of them?
        #         hint: loss = log Σ exp(z - top) - (z_label - top), and one rank has the label
        # all_reduce(MAX) over tp, B·S: every rank now subtracts the same number
        dist.all_reduce(top_BS, op=dist.ReduceOp.MAX, group=group)
        z -= top_BS[..., None]
        label = z.gather(-1, rows[..., None])[..., 0].masked_fill(~held, 0)
        p = z.exp_()
        sums = torch.stack([p.sum(-1), label])
        # all_reduce(SUM) over tp, 2·B·S: the normaliser, and the logit of the label
        dist.all_reduce(sums, group=group)
        # /Q3.4
        ctx.save_for_backward(p.div_(sums[0][..., None]), rows, held, counted)
        ctx.dtype = logits_BSv.dtype
        return (sums[0].log() - sums[1]) * counted

    @staticmethod
    def backward(ctx, d_loss_BS):
        p, rows, held, counted = ctx.saved_tensors
        d_z = p.scatter_add(-1, rows[..., None], -held[..., None].to(p.dtype))
        d_z *= (d_loss_BS * counted)[..., None]
        return d_z.to(ctx.dtype), None, None, None, None


def vocab_parallel_cross_entropy(logits_BSv, labels_BS, V, group, ignore_index=-100):
    """The loss (B, S) of each label, from this rank's v logits of each token. V is the true
    vocabulary. The loss of an ignored label is 0. The caller sums the losses, and divides the sum
    by the number of labels that count."""
    return _CrossEntropy.apply(logits_BSv, labels_BS, V, group, ignore_index)


# ── the model, and the gradients that its parts leave to add ─────────────────────────────────


class Block(nn.Module):
    """Attention, then an MLP, each on a normed copy of the residual stream: x to its own shape."""

    def __init__(self, c, group, sp):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(c.D), RMSNorm(c.D)
        self.attention = Attention(c.D, c.heads, c.kv_heads, group, c.bias, sp)
        self.mlp = MLP(c.D, c.hidden, group, c.bias, sp)

    def forward(self, x, positions_S):
        x = x + self.attention(self.norm1(x), positions_S)
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """Tokens and labels (B, S) to the loss of each label (B, S). Raises Disagreement if the ranks
    of the group were given different configurations."""

    def __init__(self, c, group, sp="off"):
        super().__init__()
        agree([f"{c}, sp {sp}"], group)
        self.c, self.group, self.sp = c, group, sp
        self.embedding = VocabParallelEmbedding(c.V, c.D, group, sp)
        self.blocks = nn.ModuleList(Block(c, group, sp) for _ in range(c.layers))
        self.norm = RMSNorm(c.D)
        self.head = ColumnParallelLinear(c.D, c.V, group, sp=sp, blocks=((c.V, 1),))
        if c.tied:
            self.head.weight = self.embedding.weight

    def forward(self, x_BS, y_BS):
        positions_S = torch.arange(x_BS.shape[1], device=x_BS.device)
        x = self.embedding(x_BS)
        for block in self.blocks:
            x = block(x, positions_S)
        return vocab_parallel_cross_entropy(self.head(self.norm(x)), y_BS, self.c.V, self.group)


@torch.no_grad()
def sum_replicated_gradients(module, group, sp):
    """Add up over tp the gradients of which each rank has a part. Call it once a step, after the
    last backward. Raises ValueError for a gradient that it has summed before.

    With SP, each rank's copy of a norm or a row-parallel bias saw only this rank's tokens. Without
    SP every copy saw all tokens, and has the whole gradient. Copied heads: see copied_heads().
    """
    n, rank, specs = dist.get_world_size(group), dist.get_rank(group), shard_specs(module)
    partial = []  # (gradient, the rows of it that are a part, the number of slots to add in)
    for name, param in module.named_parameters():
        gradient = param.grad
        if gradient is None:
            continue
        if hasattr(gradient, "summed"):  # its old part would be summed twice
            raise ValueError(f"the gradient of {name} was summed over tp: sum_replicated_gradients "
                             "once a step, after the last backward, then zero_grad()")  # fmt: skip
        # Q3.5 ** A norm or a bias is on every rank. When is its gradient only a part of the sum?
        #         hint: which tokens did this rank's copy see, with SP and without?
        if name not in specs and sp != "off":
            partial.append((gradient, gradient, 1))
        # /Q3.5
        partial += [(gradient, *heads) for heads in copied_heads(gradient, specs.get(name), n)]
    if not partial:
        return
    slots = [rows.new_zeros(K, *rows.shape) for _, rows, K in partial]
    for slot, (_, rows, K) in zip(slots, partial):
        slot[rank * K // n] = rows
    flat = torch.cat([slot.flatten() for slot in slots])
    # all_reduce(SUM) over tp, all norms and biases, and K slots of copied heads
    dist.all_reduce(flat, group=group)
    sums = flat.split([slot.numel() for slot in slots])
    for summed, slot, (gradient, rows, K) in zip(sums, slots, partial):
        rows.copy_(summed.view_as(slot)[rank * K // n])
        gradient.summed = True


# ── what a library adds ──────────────────────────────────────────────────────────────────────

# The last rung cuts a rank's tokens into chunks. A chunk travels while another is multiplied.

CHUNKS = 4


def gather_then_multiply(x_BsD, weight_DF, group):
    """all_gather(x) W and all_gather(x): all chunks leave at once, and each is multiplied when it
    has arrived."""
    waits = [start_all_gather(chunk, group) for chunk in x_BsD.chunk(CHUNKS, 1)]
    gathered, products = [], []
    for wait in waits:
        gathered.append(wait())
        products.append(torch.matmul(gathered[-1], weight_DF))
    return [rearrange(torch.cat(x, 2), "n B s F -> B (n s) F") for x in (products, gathered)]


def multiply_then_scatter(x_BSF, weight_FD, group):
    """reduce_scatter(x W): each chunk leaves when it is multiplied."""
    chunks_nBsF = by_rank(x_BSF, group).chunk(CHUNKS, 2)
    # Q3.6 *** Multiply and send every chunk, and join the sums. When may this rank wait for a sum?
    #          hint: start_reduce_scatter() sends, and returns a function that waits
    waits = [start_reduce_scatter(torch.matmul(x, weight_FD), group) for x in chunks_nBsF]
    return torch.cat([wait() for wait in waits], 1)
    # /Q3.6


class _Overlapped(torch.autograd.Function):
    """
              forward                  backward
    column    gather_then_multiply     multiply_then_scatter, while x is gathered once more
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
        x, weight = ctx.saved_tensors
        if ctx.column:
            wait = start_all_gather(x, ctx.group)
            d_x = multiply_then_scatter(d_y, weight, ctx.group)
            x = rearrange(wait(), "n B s D -> B (n s) D")
        else:
            d_x, d_y = gather_then_multiply(d_y, weight, ctx.group)
        d_weight = d_y.flatten(0, -2).T @ x.flatten(0, -2)
        return d_x, d_weight, None, None


def column_parallel_overlap(x_BsD, weight, group):
    """column_parallel_regather() in chunks."""
    return _Overlapped.apply(x_BsD, to_autocast_dtype(weight), group, True)


def row_parallel_overlap(x, weight, group):
    """row_parallel_sp() in chunks."""
    return _Overlapped.apply(to_autocast_dtype(x), to_autocast_dtype(weight), group, False)


LADDER["overlap"] = (column_parallel_overlap, row_parallel_overlap)


def to_autocast_dtype(x):
    """x in the dtype that torch.autocast, if it is on, would give it for a product. So x travels in
    that dtype, and both factors in _Overlapped have it: autocast does not see into a Function."""
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


# Fewer key/value heads than ranks: shard() copies each of the K heads to n/K ranks. A copy serves
# the queries of its rank alone, so its gradient is a part, with SP and without. The ranks add these
# parts in K slots: each rank puts its part in the slot of its head, and the other slots stay zero.


def copied_heads(gradient, spec, n):
    """[(the rows of copied key and value heads in a gradient, K)], or [] if none is copied."""
    blocks = spec[1] if spec and not isinstance(spec[1], int) else ()
    copied = [(units, width) for units, width in blocks if units < n]
    rows = sum(width for _, width in copied)  # k and v come last
    return [(gradient[-rows:], copied[0][0])] if copied else []


@torch.no_grad()
def clip_grad_norm(module, group, max_norm):
    """Scale all gradients so that their norm is at most max_norm. Returns the norm before, of the
    whole model: what several ranks hold is counted once. Call sum_replicated_gradients() first."""
    n, specs = dist.get_world_size(group), shard_specs(module)
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    square = torch.zeros((), dtype=torch.float64, device=next(module.parameters()).device)
    for name, gradient in gradients.items():
        square += gradient.double().square().sum() / (1 if name in specs else n)
        for rows, K in copied_heads(gradient, specs.get(name), n):
            square -= rows.double().square().sum() * (1 - K / n)
    # all_reduce(SUM) over tp, 1: the square of the norm of the whole gradient
    dist.all_reduce(square, group=group)
    norm = square.sqrt()
    for gradient in gradients.values():
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1).to(gradient.dtype))
    return norm


def refuse_torchs_clipping(param):
    """Mark a parameter of which a rank holds a part, and make torch's clip_grad_norm_ refuse it:
    each rank would find another norm, scale by another factor, and copies would drift apart."""
    param.is_part, module = True, torch.nn.utils.clip_grad
    scale = module._clip_grads_with_norm_

    def refuse_parts(parameters, *args, **kwargs):
        if any(getattr(p, "is_part", False) for p in parameters):
            raise ValueError("torch's clip_grad_norm_ finds the norm of this rank's parts alone: "
                             "use clip_grad_norm(module, group, max_norm) of 03_tp")  # fmt: skip
        return scale(parameters, *args, **kwargs)

    if scale.__name__ != "refuse_parts":  # once a process
        module._clip_grads_with_norm_ = refuse_parts
    return param


@torch.no_grad()
def load_whole(module, whole, group):
    """Fill a module with this rank's parts of {name: whole tensor}. Raises ValueError, before
    anything is written, with every wrong shape; the shape None is a name that is missing."""
    n, rank, specs = dist.get_world_size(group), dist.get_rank(group), shard_specs(module)
    params = dict(module.named_parameters())
    given = {name: list(tensor.shape) for name, tensor in whole.items()}
    needed = {name: whole_shape(param, specs[name], n) if name in specs else list(param.shape)
              for name, param in params.items()}  # fmt: skip
    if given != needed:
        wrong = [name for name in sorted(given | needed) if given.get(name) != needed.get(name)]
        raise ValueError("; ".join(f"{name} has shape {given.get(name)} instead of "
                                   f"{needed.get(name)}" for name in wrong))  # fmt: skip
    for name, param in params.items():
        spec = specs.get(name)
        param.copy_(shard(whole[name], spec, n, rank) if spec else whole[name])


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


# ── from here on: proof, run, kit ────────────────────────────────────────────────────────────

from dataclasses import replace


def parameter_bytes(c, n, e=8):
    """The bytes of a rank's parameters, copied heads included; e bytes an element."""
    d, kv = c.D // c.heads, max(c.kv_heads, n)
    cut = ((c.heads + 2 * kv) * d + 2 * c.hidden) * (c.D + c.bias) + (c.D + c.hidden) * c.D
    ends = math.ceil(c.V / n) * c.D * (1 if c.tied else 2) + c.D
    return e * (c.layers * (cut / n + 2 * c.D * (1 + c.bias)) + ends)


def saved_bytes(c, B, S, n, sp, norm, e=8):
    """The bytes that a block keeps for backward on a rank: Korthikanti et al., arXiv:2205.05198,
    section 4, for this block (fused attention, SwiGLU). norm: the bytes that one RMSNorm keeps of
    this rank's tokens, which differ by device."""
    d, kv = c.D // c.heads, max(c.kv_heads, n)
    normed = 2 * c.D / (1 if sp in ("off", "keep") else n)  # the inputs of qkv and gate_up
    inside = 2 * (c.heads + kv) * d + c.heads + 4 * c.hidden
    return 2 * norm + e * (B * S * (normed + inside / n) + S * d)  # S·d: cosines and sines


def sent_bytes(c, B, S, n, sp, e=8):
    """The bytes that leave a rank in forward, backward and sum_replicated_gradients()."""
    L, d = c.layers, c.D // c.heads
    halves = 2 * (4 * L + 2) + (2 * L + 1) * (sp in ("regather", "overlap"))
    copies = 2 * c.D * (2 * L + 1 + 2 * L * c.bias) * (sp != "off")
    heads = 2 * L * 2 * c.kv_heads * d * (c.D + c.bias) * (c.kv_heads < n)
    return e * (n - 1) / n * (halves * B * S * c.D + 2 * B * S * 3 + copies + heads)


def build(c, group, device, sp="off"):
    """The model in float64, and the whole weights of the twin that it holds its parts of."""
    torch.manual_seed(0)
    twin = Twin(c).double().to(device)
    model = LanguageModel(c, group, sp).double().to(device)
    whole = {name: param.detach() for name, param in twin.named_parameters()}
    load_whole(model, whole, group)
    return model, whole


def loss_and_gradients(model, x_BS, y_BS):
    """Forward, backward, and the sums over copies. Returns the loss per label that counts; if none
    does, the loss and every gradient are 0."""
    loss = model(x_BS, y_BS).sum() / (y_BS != -100).sum().clamp(min=1)
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
    """One step beside the twin: the largest relative error of the loss, of this rank's part of any
    gradient and of the norm of all gradients; and the bytes sent, measured and by formula."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    (model, whole), (x_BS, y_BS) = build(c, group, device, sp), proof_batch(c, B, S, device)
    assert min(len(x_BS.unique()), len(y_BS.unique())) > 2, "the batch of the proof is trivial"
    with Ledger() as ledger:
        loss = loss_and_gradients(model, x_BS, y_BS)
    twin = Twin(c).double().to(device)
    twin.load_state_dict(whole, strict=not c.tied)
    twin_loss = F.cross_entropy(twin(x_BS).flatten(0, 1), y_BS.flatten())
    twin_loss.backward()
    errors, specs = [relative_error(loss, twin_loss)], shard_specs(model)
    for name, param in twin.named_parameters():
        part = shard(param.grad, specs[name], n, rank) if name in specs else param.grad
        errors.append(relative_error(model.get_parameter(name).grad, part))
    norm = nn.utils.get_total_norm([param.grad for param in twin.parameters()])
    errors.append(relative_error(clip_grad_norm(model, group, 1.0), norm))
    return max(errors), (sum(ledger.sent.values()), sent_bytes(c, B, S, n, sp))


def kept_bytes(module, *inputs):
    """The bytes that a module keeps for backward: each storage once, and no parameter."""
    kept, params = {}, {p.untyped_storage().data_ptr() for p in module.parameters()}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = module(*inputs)
    y.sum().backward()  # until here the graph has kept all of it
    return sum(storage.nbytes() for at, storage in kept.items() if at not in params)


def check_saved(c, group, device, sp, B, S):
    """The bytes that a block keeps for backward, measured and by formula."""
    n, block = dist.get_world_size(group), Block(c, group, sp).double().to(device)
    shape = B, S if sp == "off" else S // n, c.D
    x = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
    norm = kept_bytes(block.norm1, x)
    measured = kept_bytes(block, x, torch.arange(S, device=device))
    return measured, saved_bytes(c, B, S, n, sp, norm)


def check_by_hand(c, group, device, B, S):
    """The row of mlp_by_hand() beside autograd on one process."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    draw = torch.Generator().manual_seed(2)
    random = lambda *shape: torch.randn(shape, generator=draw, dtype=torch.float64).to(device)
    x, d_y = random(2, B, S, c.D)
    up, down = random(c.hidden, c.D), random(c.D, c.hidden)
    whole = lambda x, up, down: F.linear(F.linear(x, up).relu(), down)
    y, backward = torch.func.vjp(whole, x, up, down)
    own = lambda whole, dim: shard(whole, (dim, 1), n, rank)
    with Ledger() as ledger:
        results = mlp_by_hand(x, own(up, 0), own(down, 1), d_y, group)
    d_x, d_up, d_down = backward(d_y)
    error = max(map(relative_error, results, (y, d_x, own(d_up, 0), own(d_down, 1))))
    sent = sum(ledger.sent.values()), 2 * 2 * (n - 1) / n * 8 * B * S * c.D
    return Row("an MLP by hand", error, sent)


def wrong_on_purpose(group, device):
    """Rows without one idea each, on the least that shows it, beside what is right."""
    n = dist.get_world_size(group)
    ones = torch.ones(1, n, 2, dtype=torch.float64, device=device)
    row = RowParallelLinear(2 * n, 2, group, bias=True).to(ones)
    nn.init.zeros_(row.weight), nn.init.ones_(row.bias)
    y = reduce_from_ranks(F.linear(ones, row.weight, row.bias), group)
    yield Row("bias added on every rank", relative_error(y, row(ones)), wrong=n - 1.0)

    column, norm = ColumnParallelLinear(2, n, group).to(ones), RMSNorm(2).to(ones)
    nn.init.ones_(column.weight)
    part = torch.autograd.grad(F.linear(x := ones.requires_grad_(), column.weight).sum(), x)[0]
    whole = torch.autograd.grad(column(x).sum(), x)[0]
    yield Row("f without its all-reduce back", relative_error(part, whole), wrong=1 - 1 / n)

    norm(ones[:, :1]).sum().backward()
    part = norm.weight.grad.clone()
    sum_replicated_gradients(norm, group, "keep")
    error = relative_error(part, norm.weight.grad)
    yield Row("SP, norm gradients not summed", error, wrong=1 - 1 / n)


def proof(c, group, device, B, S):
    """The rows of the table: by hand, the ladder, other models on it, and ideas left out."""
    n = dist.get_world_size(group)
    yield check_by_hand(c, group, device, B, S)
    rows = {f"{sp}; held: kept by a block": (sp, c) for sp in LADDER}
    other = replace(c, kv_heads=1, tied=False, bias=True)
    rows["one key/value head, biases, untied"] = "keep", other
    for name, (sp, config) in rows.items():
        setting = config, group, device, sp, B, S
        yield Row(name, *check(*setting), check_saved(*setting))
    model, whole = build(c, group, device)
    held = sum(p.nbytes for p in model.parameters()), parameter_bytes(c, n)
    gathered = gather_whole(model, group)
    error = max(relative_error(gathered[name], whole[name]) for name in whole)
    yield Row("cut and gathered; held: parameters", error, None, held)
    yield from wrong_on_purpose(group, device) if n > 1 else ()


# ── run ──────────────────────────────────────────────────────────────────────────────────────


def train_step(model, optimizer, x_BS, y_BS, max_norm=1.0):
    """One step: (loss, norm of the gradient before clipping). A batch in which no label counts
    moves no weight, on any rank."""
    loss = loss_and_gradients(model, x_BS, y_BS)
    norm = clip_grad_norm(model, model.group, max_norm)
    if (y_BS != -100).any():  # all ranks of tp have the same labels
        optimizer.step()
    else:
        say("no label of the batch counts: this step is skipped")
    optimizer.zero_grad()
    return loss, norm


def train(model, args, device):
    """Train on text, in float64, so that every n prints the same digits. Returns 0 if each step
    sent what the formula says, else 1."""
    n, S = dist.get_world_size(model.group), args.sequence
    text, broken = read_text(args.text, 0), False
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    formula = sent_bytes(model.c, args.batch, S, n, model.sp) + 8 * 2 * (n - 1) / n  # the norm
    say(f"\nSP {model.sp}, {sum(p.numel() for p in model.parameters()):,} parameters a rank; "
        f"unigram entropy of the text {unigram_entropy(text):.3f}")  # fmt: skip
    say("step      loss      norm   sent/step     formula")
    for step in range(args.steps):
        x_BS, y_BS = (whole.to(device) for whole in sample(text, step, args.batch, S))
        with Ledger() as ledger:
            loss, norm = train_step(model, optimizer, x_BS, y_BS)
        sent = sum(ledger.sent.values())
        broken |= abs(sent - formula) > 0.5
        if step % 10 == 0 or step == args.steps - 1:
            say(f"{step:4}{loss:10.6f}{norm:10.4f}{sent:12,.0f}{formula:12,.0f}")
    return int(broken)


def plot(c, args, group, device):
    """Draw what a block keeps for backward on tp 1, 2, 4 ... of these ranks, beside its formula."""
    from matplotlib.figure import Figure

    bars = {"off": "SP off", "keep": "SP, gathered inputs kept",
            "regather": "SP, gathered again in backward"}  # fmt: skip
    axes = (figure := Figure(figsize=(8, 4), layout="constrained")).subplots()
    sizes = [2**k for k in range(dist.get_world_size(group).bit_length())]
    for at, n in enumerate(sizes):
        some = dist.new_group(range(n), timeout=timedelta(seconds=args.timeout))
        for i, sp in enumerate(bars if dist.get_rank(group) < n else ()):
            kept, formula = check_saved(c, some, device, sp, args.batch, args.sequence)
            axes.bar(x := at + 0.27 * (i - 1), kept / 2**20, 0.25, color=f"C{i}")
            axes.plot(x, formula / 2**20, "kx")
    if dist.get_rank(group):
        return
    axes.set_xticks(range(len(sizes)), [f"tp {n}" for n in sizes])
    axes.set(title="Activations of a block that a rank keeps for backward (x: formula)\n"
             f"width {c.D}, {c.heads} heads, {args.batch} x {args.sequence} tokens, float64",
             ylabel="MiB")  # fmt: skip
    axes.legend(axes.containers[:3], bars.values(), frameon=False)
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
        broken |= train(build(c, group, device, args.sp)[0], args, device)
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

LOST, WAITED = 3, 4  # exit status of a rank whose peer has gone, or has not come in time
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
    worst = [[x.error, x.wrong, o, off(x.sent), off(x.held)] for x, o in zip(rows, outside)]
    worst = torch.tensor(worst).double().nan_to_num(math.inf).to(device)
    # all_reduce(MAX) over all ranks, five numbers a row: the worst rank speaks for all
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
    say("error: max|difference| / max|one process|; bytes: of rank 0, sent as a ring sends them")
    say(f"{'':36}    error   bytes sent      formula   bytes held      formula")
    broken = 0
    for row, (error, wrong, outside, unsent, unheld) in zip(rows, worst.tolist()):
        holds = outside <= 0 and unsent < 0.5 and unheld < 0.5
        pairs = [[f"{x:,.0f}" for x in pair] if pair else "--" for pair in (row.sent, row.held)]
        note = f"  wrong on purpose: {wrong:.3g} predicted" if wrong else ""
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
            while not run.join(grace_period=2):
                pass
        except mp.ProcessExitedException:  # join() has ended the other ranks by SIGTERM
            codes = [process.exitcode for process in run.processes]
            stacks = [Path(folder, str(rank)).read_text() for rank in range(ranks)]
            sys.exit(_what_went_wrong(codes, stacks))
    sys.exit(0)


def _what_went_wrong(codes, stacks):
    """Which signal ended a rank; or, if no rank told a fault of its own, where each one stood."""
    killed = {r: signal.Signals(-code).name for r, code in enumerate(codes) if code < -1}
    said = [f"rank {r} was ended by {by}" for r, by in killed.items() if by != "SIGTERM"]
    if 1 not in codes and (WAITED in codes or {*codes} <= {0, LOST, -signal.SIGTERM}):
        said = ["some ranks waited in vain for others; each one stood at"]
        for r, stack in enumerate(stacks):
            silent = killed.get(r) == "SIGKILL"  # it did not even answer the launcher's SIGTERM
            said.append(f"rank {r} of {len(codes)}: {'no answer' if silent else _place(stack)}")
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
        tempfile.tempdir = folder  # what a rank leaves behind goes with the launcher's folder
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
        if waited := re.search("by peer|ime(d )?out", str(error)):
            code = LOST if waited[0] == "by peer" else WAITED
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
    parser = arguments(__doc__, ranks=4, steps=40, plot="what a block keeps for backward")
    add = parser.add_argument
    add("--sp", choices=LADDER, default="regather", help="rung of the training")
    add("--heads", type=int, default=8, help="query heads")
    add("--kv-heads", type=int, default=4, help="key/value heads")
    add("--hidden", type=int, default=384, help="hidden units of the MLP")
    add("--sequence", type=int, default=64, help="bytes in a sample")
    add("--batch", type=int, default=16, help="samples in a step")
    launch(main, parser.parse_args(), validate)
