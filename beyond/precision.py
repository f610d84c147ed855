"""precision · Fewer bits, and where they are lost

A number of 8 or 16 bits is rounded: large ones saturate or become infinite, small ones become zero,
and the rest moves to a neighbour. A scale moves a tensor into the range where least is lost. This
file rounds by hand, scales, and shows what each choice loses: in a product, in a gradient, in a
master weight, in a sum.

    a layer's three products            operands                         rounded to
    forward    y  = x w^T               x by rows of the input width     E4M3   activations
    backward   dx = g w                 w in squares                     E4M3   weights
               dw = g^T x               g by rows of what is summed      E5M2, or E4M3 in blocks

    who holds what       rank 0                    rank 1
    ZeRO-3 weights       rows 0 .. M/2             rows M/2 .. M       one scale, or one a block
    gradients            the sum over all ranks    the same            one overflow, one loss scale

    moves                                   bytes that leave a rank
    amax of a tensor, agreed                2 (n-1)/n · 4
    ZeRO-3 gather, one scale for all        (n-1)/n · P                       BF16: (n-1)/n · 2P
    ZeRO-3 gather, blocks of 128 x 128      (n-1)/n · P (1 + 4/128^2)
    dispatch of tokens, tiles of 1 x 128    (D + 4 D/128) a token that leaves; BF16: 2D
    found an overflow                       2 (n-1)/n · 4

    python beyond/precision.py                          two ranks: proof, then eight runs on text
    torchrun --nproc-per-node 4 beyond/precision.py     the same on four

Rounding is emulated: operands take the values that a small format has, and products are summed in
the dtype of the tensors, so no speed is measured here. Four bits are in four_bits.py.
Guide: Mixed precision training (FP8 serves the attention projections too, not only the MLP; FP16
does not overflow in a softmax because a sequence is long).
Sources: loss scaling, arXiv:1710.03740; FP8, arXiv:2209.05433; blocks and sums of 128 products,
DeepSeek-V3, arXiv:2412.19437, section 3.3.
Questions  QN.1 ** which values become zero beside an outlier?   QN.2 ** who agrees on a scale?
           QN.3 *** how does a small update survive?
"""
# n ranks · r this rank · B sequences · S tokens of a sequence · D width · V vocabulary
# P parameters

import importlib
import math
import signal
import sys
from collections import deque
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads ends it without a trace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1]))
dp = importlib.import_module("01_dp")

BLOCK = 128
TILE, SQUARE = (1, BLOCK), (BLOCK, BLOCK)  # of activations and of weights (DeepSeek-V3)


# ── by hand: one number, rounded to eight bits ───────────────────────────────────────────────

# E4M3 has a sign, 4 bits of exponent, and 3 bits after the leading one. 0.3 in E4M3:
#
#     0.3 lies between 1/4 and 1/2; there, neighbours are 1/4 / 2^3 = 1/32 apart
#     0.3 / (1/32) = 9.6            9.6 steps from zero: the nearest whole number is 10
#     10 · 1/32 = 0.3125            E4M3's answer, 4% off; the worst case is 1/17
#
#     0.0012 lies below 1/64, the smallest normal number; the steps below it stay at 1/512
#     0.0012 / (1/512) = 0.6        rounds to 1: the answer is 0.00195, 63% off
#     0.0009 / (1/512) = 0.46       rounds to 0: the number is lost
#
#     500 rounds to 512, and E4M3 ends at 448: it saturates


class Format(NamedTuple):
    """A number format: what decides which numbers it has."""

    name: str
    mantissa: int  # bits after the leading one
    least: int  # exponent of the smallest normal number
    greatest: float
    infinite: bool = False  # larger numbers become infinite; or else they saturate


E4M3 = Format("E4M3", 3, -6, 448.0)
E5M2 = Format("E5M2", 2, -14, 57344.0)  # it has infinities; casts for training saturate
FP16 = Format("FP16", 10, -14, 65504.0, infinite=True)
BF16 = Format("BF16", 7, -126, (2 - 2**-7) * 2.0**127, infinite=True)


def spacing(x, format):
    """The distance between neighbours of `format` at each element of x, a power of two."""
    size = x.abs().clamp(2.0**format.least, format.greatest)
    # frexp writes a size as (1/2 <= mantissa < 1) · 2^exponent
    return torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent - 1 - format.mantissa)


def round_to(x, format, dice=None):
    """Each element of x as the nearest number of `format`, ties to even, in the dtype of x; with
    `dice`, uniform in [0, 1) and of x's shape, as one of its two neighbours, drawn."""
    step = spacing(x, format)
    steps = x.abs() / step
    size = step * (steps.round() if dice is None else round_by_dice(steps, dice))
    over = math.inf if format.infinite else format.greatest
    return torch.where(size > format.greatest, over, size).copysign(x)


def round_by_dice(steps, dice):
    """Stochastic rounding of positive numbers: to the whole number above, or to the one below."""
    # QN.3 *** An update is a tenth of a step. Rounded to nearest, it is lost each time. How is a
    #      weight rounded, so that ten such updates move it by one step on average?
    #      hint: 3.1 should become 4 once in ten times; `dice` is below 0.1 as often as above 0.9
    below = steps.floor()
    chance = steps - below
    return below + (dice >= 1 - chance)
    # /QN.3


# ── a scale: where in the format's range a block lies ────────────────────────────────────────


def cells(x, block=None):
    """A view of a matrix (M, N) as (M/a, a, N/b, b) for blocks of (a, b); None: one block.

    Raises ValueError if the matrix is not a whole number of blocks.
    """
    a, b = block or x.shape
    if x.shape[0] % a or x.shape[1] % b:
        raise ValueError(f"a matrix of {x.shape[0]} x {x.shape[1]} is no whole number of blocks of "
                         f"{a} x {b}: pad it, or take a width that {b} divides")
    return x.unflatten(1, (-1, b)).unflatten(0, (-1, a))


def amax_of(x, block=None):
    """The largest magnitude in each block, (M/a, 1, N/b, 1), fp32."""
    return cells(x, block).abs().amax((1, 3), keepdim=True).float()


def agree_on_amax(amax, group):
    """The amax of a tensor, or of its blocks, whose parts lie on the ranks of `group`; in place."""
    # QN.2 ** Ranks hold parts of one tensor and send one another codes without a scale. Which
    #      amax must each of them use?
    #      hint: the scale is one number for the whole tensor, so the amax is that of all parts
    # all_reduce(MAX) over the ranks that hold a part, one number a block: all have one scale
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax
    # /QN.2


def scale_of(amax, format):
    """What a block is multiplied by, so that its largest value is the format's greatest.

    1 where a block is zero or not finite; a tiny amax must not make the scale infinite.
    """
    scale = (format.greatest / amax).clamp(max=torch.finfo(torch.float32).max)
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def quantise(x, format, block=None, amax=None, dice=None):
    """A matrix as `format` holds it, in its own dtype: scaled by block, rounded, scaled back."""
    if format.infinite:  # 16 bits have the range to go without a scale
        return round_to(x, format, dice)
    scale = scale_of(amax_of(x, block) if amax is None else amax, format)
    return (round_to(cells(x, block) * scale, format, dice) / scale).reshape(x.shape)


def flushed_below(amax, format):
    """The magnitude below which a value becomes zero, in a block whose largest value is `amax`."""
    # QN.1 ** A block is scaled so that its outlier just fits. Which values beside it become zero?
    #      hint: E4M3's smallest positive number is 2^-6 / 2^3; what is under half of it rounds to 0
    smallest = 2.0 ** (format.least - format.mantissa)
    scale = format.greatest / amax
    return smallest / 2 / scale
    # /QN.1


class Delayed:
    """A cast whose scale comes from the amax of earlier steps, so that no pass over the tensor has
    to end before the cast begins. A checkpoint has to hold `past`."""

    def __init__(self, format, length=16):
        self.format, self.past, self.now = format, deque(maxlen=length), torch.zeros(1, 1, 1, 1)

    def __call__(self, x):
        # a forward that recomputation repeats sees the same x: the maximum does not change
        self.now = torch.maximum(self.now.to(x.device), amax_of(x))
        amax = torch.stack([*self.past]).amax(0) if self.past else self.now
        return quantise(x, self.format, amax=amax)

    def end_step(self, group):
        """Append the amax of this step, over all ranks and micro-batches, to the history."""
        amax = self.now.clone()
        if not 0 < amax < math.inf:  # a step that overflowed must not decide: keep the scale
            amax = self.past[-1].clone() if self.past else torch.zeros_like(self.now)
        self.past.append(agree_on_amax(amax, group))
        self.now = torch.zeros_like(self.now)


# ── a layer: three products, each of two rounded operands ────────────────────────────────────


def product(a, b, cast_a, cast_b):
    """a (M, N) times b (O, N) transposed. Blocks run along N, which is summed over, so that a
    scale is a factor of a whole partial sum."""
    return cast_a(a) @ cast_b(b).T


class Products(torch.autograd.Function):
    """y = x w^T of rounded operands, and the two products of its backward, also rounded."""

    @staticmethod
    def forward(ctx, x, w, casts):
        ctx.save_for_backward(x, w)
        ctx.casts = casts
        return product(x, w, casts.x, casts.w)

    @staticmethod
    def backward(ctx, g):
        (x, w), casts = ctx.saved_tensors, ctx.casts
        dx = product(g, w.T.contiguous(), casts.g, casts.w)
        return dx, product(g.T.contiguous(), x.T.contiguous(), casts.g, casts.x), None


class Casts(NamedTuple):
    """What the operands of a layer pass through."""

    x: object  # activations
    w: object  # weights
    g: object  # gradients


def cast(format, block=None):
    """A function that rounds a matrix."""
    return lambda x: quantise(x, format, block)


RECIPES = {  # a new set of casts for each layer: delayed scales have a history of their own
    "all bits": lambda: Casts(*[lambda x: x] * 3),
    "BF16": lambda: Casts(*[cast(BF16)] * 3),
    "FP16": lambda: Casts(*[cast(FP16)] * 3),
    # one scale a tensor, from the tensor itself; gradients get the format with more range
    "FP8 a tensor": lambda: Casts(cast(E4M3), cast(E4M3), cast(E5M2)),
    # the same formats, scaled by the past (Transformer Engine's HYBRID recipe)
    "FP8 delayed": lambda: Casts(Delayed(E4M3), Delayed(E4M3), Delayed(E5M2)),
    # a scale a block leaves no need for range: E4M3 for all three (DeepSeek-V3)
    "FP8 blocks": lambda: Casts(cast(E4M3, TILE), cast(E4M3, SQUARE), cast(E4M3, TILE)),
}


def policy(inner, ends=None):
    """Casts by layer: recipe `ends` for the first and the last layer, `inner` for the others."""
    return lambda i, layers: RECIPES[ends if ends and i in (0, layers - 1) else inner]()


class Linear(nn.Linear):
    """nn.Linear without bias whose three products round their operands."""

    products = Products

    def __init__(self, D, out, casts):
        super().__init__(D, out, bias=False)
        self.casts = casts

    def forward(self, x_BSD):
        y = self.products.apply(x_BSD.flatten(0, -2), self.weight, self.casts)
        return y.unflatten(0, x_BSD.shape[:-1])


class LanguageModel(nn.Module):
    """Bytes (B, S) to logits of the next byte (B, S, V), from the last three bytes.

    The embedding, the norms and the head stay as they are, whatever the policy: they are a small
    part of the work, and the loss feels their rounding most.
    """

    def __init__(self, casts_of, D=128, V=256, layers=4):
        super().__init__()
        self.token, self.mix = nn.Embedding(V, D), nn.Linear(3 * D, D)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(layers))
        self.layers = nn.ModuleList(Linear(D, D, casts_of(i, layers)) for i in range(layers))
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, x_BS):
        x_BSD = self.token(F.pad(x_BS, (2, 0)))
        seen_BSD = torch.cat([x_BSD[:, 2:], x_BSD[:, 1:-1], x_BSD[:, :-2]], dim=-1)
        x_BSD = self.mix(seen_BSD)
        for norm, layer in zip(self.norms, self.layers):
            x_BSD = x_BSD + layer(F.gelu(norm(x_BSD)))
        return self.head(x_BSD)


# ── a loss scale: FP16 gradients that are neither zero nor infinite ──────────────────────────


class LossScale:
    """The factor of the loss: halved by each overflow, doubled after `interval` steps without one.
    A checkpoint has to hold `scale` and `good`."""

    def __init__(self, scale=2.0**16, interval=2000, least=1.0):
        self.scale, self.interval, self.least, self.good = scale, interval, least, 0

    def update(self, overflow):
        """Raises OverflowError where the scale falls below `least`: no scale helps then."""
        if overflow:
            self.scale, self.good = self.scale / 2, 0
            if self.scale < self.least:
                raise OverflowError(f"the loss scale fell to {self.scale}, below {self.least}: "
                                    "gradients overflow at any scale, so the run has diverged")
            return
        self.good += 1
        if self.good == self.interval:
            self.scale, self.good = self.scale * 2, 0


def any_overflow(gradients, group):
    """True on all ranks if a gradient on any rank of `group` is infinite or NaN."""
    bad = torch.stack([~g.isfinite().all() for g in gradients]).any().float()
    # all_reduce(MAX) over the ranks, 1: all skip the step, or none; shards may differ
    dist.all_reduce(bad, op=dist.ReduceOp.MAX, group=group)
    return bool(bad)


def scaled_gradients(loss, parameters, scaler, group, clip=math.inf):
    """Fill `.grad` with the sum over ranks, unscaled, then clipped. False: the step is skipped.

    The scale is undone before the norm is taken; a norm that is 2^16 too large clips everything.
    """
    (loss * scaler.scale).backward()
    for param in parameters:
        # all_reduce(SUM) over dp, P in all: every rank now has the whole gradient
        dist.all_reduce(param.grad, group=group)
    overflow = any_overflow([param.grad for param in parameters], group)
    for param in parameters:
        param.grad /= scaler.scale
    if not overflow:
        nn.utils.clip_grad_norm_(parameters, clip)
    scaler.update(overflow)
    return not overflow


# ── what travels: codes of one byte ──────────────────────────────────────────────────────────


def encode(x, block=None, amax=None):
    """A matrix as E4M3: uint8 codes (M, N), and fp32 scales of the blocks (M/a, 1, N/b, 1)."""
    scale = scale_of(amax_of(x, block) if amax is None else amax, E4M3)
    rounded = round_to(cells(x, block) * scale, E4M3).reshape(x.shape)
    return rounded.to(torch.float8_e4m3fn).view(torch.uint8), scale


def decode(codes, scale, block=None, dtype=torch.float64):
    """The matrix that `encode` wrote as codes and scales."""
    values = codes.view(torch.float8_e4m3fn).to(dtype)
    return (cells(values, block) / scale).reshape(codes.shape)


def gather_weights(shard, group, block=None, agreed=True):
    """All-gather rows (M/n, N) of a ZeRO-3 weight as E4M3: (codes (M, N), their scales).

    One scale for the whole tensor has to be agreed before the cast, and does not travel. The scale
    of a block that lies on one rank needs no agreement, and travels.
    """
    n, amax = dist.get_world_size(group), amax_of(shard, block)
    if block is None and agreed:
        agree_on_amax(amax, group)
    own, scale = encode(shard, block, amax)
    codes = own.new_empty(n * len(own), own.shape[1])
    # all_gather over dp, P/n bytes from each: every rank now holds the codes of the whole weight
    dist.all_gather_single(codes, own, group=group)
    if block is None:
        return codes, scale
    scales = scale.new_empty(n * len(scale), *scale.shape[1:])
    # all_gather over dp, 4 bytes a block: every rank now holds the scales of all blocks
    dist.all_gather_single(scales, scale, group=group)
    return codes, scales


def dispatch(x, sends, receives, group):
    """Send rows (tokens, D), sorted by rank, to their experts as E4M3 in tiles of 1 x 128.

    `sends[j]` rows go to rank j, `receives[j]` come from it. Returns the rows received, decoded.
    Gradients take their way back in BF16 (DeepSeek-V3); that is not shown here.
    """
    codes, scale = encode(x, TILE)
    received = [part.new_empty(sum(receives), *part.shape[1:]) for part in (codes, scale)]
    for whole, part in zip(received, (codes, scale)):
        # all_to_all over ep, D bytes a token, then 4 D/128: each expert now has its tokens
        dist.all_to_all_single(whole, part, receives, sends, group=group)
    return decode(*received, TILE, x.dtype)


# ── what is kept: master weights, and the accumulator of a product ───────────────────────────

# A master is rounded after each update. Replicas of a weight must roll the same dice, or else
# they are replicas no more.


def master_stalls_at(update, format):
    """The power of two at which w + update, rounded to nearest, is w again: an update of at most
    half a step is lost, and from that magnitude on a step is 2 updates or more."""
    return 2.0 ** math.ceil(math.log2(update) + format.mantissa + 1)


def dot(a, b, significant, every=None):
    """The sums over the last dimension of a · b in an accumulator of few significant bits, which
    cuts off what does not fit; after `every` products its sum is moved to full precision."""
    cut = Format("accumulator", significant - 1, -126, 2.0**127)
    total = 0.0
    for part in (a * b).split(every or a.shape[-1], dim=-1):
        partial = torch.zeros_like(part[..., 0])
        for term in part.unbind(-1):
            partial = round_to(partial + term, cut, dice=torch.zeros_like(term))
        total = total + partial
    return total


# ── from here on: proof, run, kit ────────────────────────────────────────────────────────────


def normal(N):
    """N values that are spread as the normal distribution is, (N,), in a shuffled order."""
    even = torch.special.ndtri((torch.arange(N, dtype=torch.float64) + 0.5) / N)
    return even[torch.randperm(N, generator=torch.Generator().manual_seed(0))]


def seeded(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_table(x, dtype, block=None):
    """The reference for `quantise`: the nearest of all numbers that torch's own dtype has."""
    a, b = block or x.shape
    numbers = torch.arange(256).to(torch.uint8).view(dtype).double()
    numbers = numbers[numbers.isfinite()].unique()
    rows = []
    for band in x.split(a):
        parts = []
        for part in band.split(b, dim=1):
            scale = numbers[-1].item() / part.abs().max().float().cpu()
            scaled = part.cpu().contiguous() * scale
            nearest = torch.bucketize(scaled, (numbers[1:] + numbers[:-1]) / 2)
            parts.append(numbers[nearest] / scale)
        rows.append(torch.cat(parts, dim=1))
    return torch.cat(rows).to(x.device)


def norm_error(value, reference):
    return ((value - reference).norm() / reference.norm()).item()


def format_rows(device):
    """The rounding of one number, and an outlier beside normal numbers."""
    x = torch.exp2(torch.linspace(-6, 8, 100_001, device=device, dtype=torch.float64))
    for format in E4M3, E5M2, BF16:
        worst = 1 / (1 + 2 ** (format.mantissa + 1))
        error = (round_to(x, format) / x - 1).abs().max().item()
        yield dp.Row(f"{format.name}: the worst number", error, bound=(0.98 * worst, worst))
    x = normal(BLOCK**2).to(device).view(BLOCK, BLOCK)
    zeros = lambda y: (y == 0).double().mean().item()
    rest = lambda y: norm_error(y[x.abs() < 5], x[x.abs() < 5])
    for A in 100.0, 10_000.0:
        x[0, 0] = A
        lost = math.erf(flushed_below(A, E4M3) / math.sqrt(2))
        whole, tiles = quantise(x, E4M3), quantise(x, E4M3, TILE)
        name, slack = f"zeros beside an outlier of {A:,.0f}", 1.01 / x.numel()
        yield dp.Row(name, zeros(whole), bound=(lost - slack, lost + slack))
        share = lost / BLOCK  # only the outlier's own tile loses any
        yield dp.Row("  in tiles of 1 x 128", zeros(tiles), bound=(0.0, 3 * share + slack))
        yield dp.Row("  rest: error over the tensor's", rest(tiles) / rest(whole), bound=(0.9, 1.0))


def layer_rows(device):
    """Three products against products of operands that were looked up in a table."""
    x, w, g = (seeded(seed, 2 * BLOCK, 2 * BLOCK).to(device) for seed in (1, 2, 3))
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    exact = [x @ w.T, g @ w, g.T @ x]
    for name, on_x, on_w, on_g in [
        ("all bits", None, None, None),
        ("FP8 a tensor", (e4m3, None), (e4m3, None), (e5m2, None)),
        ("FP8 blocks", (e4m3, TILE), (e4m3, SQUARE), (e4m3, TILE)),
    ]:
        look = lambda t, how: by_table(t, *how) if how else t
        twin = [look(x, on_x) @ look(w, on_w).T, look(g, on_g) @ look(w.T, on_w).T]
        twin.append(look(g.T, on_g) @ look(x.T, on_x).T)
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = Products.apply(a, b, RECIPES[name]())
        y.backward(g)
        values = [y.detach(), a.grad, b.grad]
        yield dp.Row(f"{name}: 3 products", max(map(dp.relative_error, values, twin)))
        if on_x:
            yield dp.Row("  beside products of all bits", max(map(norm_error, values, exact)),
                         bound=(0.02, 1 / 17 + 1 / 9))  # fmt: skip


def delayed_rows(group, device):
    """A scale from the past: right while the amax stays, saturated where it jumps."""
    x = normal(BLOCK**2).to(device).view(BLOCK, BLOCK)
    part = x[dist.get_rank(group) :: dist.get_world_size(group)]
    cast = Delayed(E4M3)
    cast(part)
    cast(part)  # the forward that recomputation repeats
    with dp.Ledger() as ledger:
        cast.end_step(group)
    n, now = dist.get_world_size(group), quantise(x, E4M3)
    sent = ledger.sent["all_reduce"], 2 * (n - 1) / n * 4
    yield dp.Row("delayed scale, the amax stays", dp.relative_error(cast(x), now), sent)
    jump = dp.relative_error(cast(8 * x), 8 * now)
    yield dp.Row("  the amax is 8 times the past's", jump, wrong=1 - 1 / 8)


def wire_rows(group, device):
    """Bytes and values of what is sent as codes."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    rows, P = BLOCK, n * BLOCK * 2 * BLOCK
    base = seeded(4, rows, 2 * BLOCK).to(device)
    whole = torch.cat([base * 2**j for j in range(n)])
    shard = whole[r * rows : (r + 1) * rows]
    ring = (n - 1) / n
    for name, block in ("ZeRO-3 gather, one scale", None), ("  a scale a block", SQUARE):
        with dp.Ledger() as ledger:
            codes, scale = gather_weights(shard, group, block)
        sent = ledger.sent["all_gather_single"] + ledger.sent["all_reduce"]
        scales = 4 * P / BLOCK**2 if block else 4
        formula = ring * (P + (scales if block else 2 * 4))
        held = codes.nbytes + scale.nbytes, P + scales
        error = dp.relative_error(decode(codes, scale, block), quantise(whole, E4M3, block))
        yield dp.Row(name, error, (sent, formula), held)
    codes, scale = gather_weights(shard, group, agreed=False)
    error = dp.relative_error(decode(codes, scale), quantise(whole, E4M3))
    most = 2 ** (n - 1)  # the last rank's part; rank r reads all parts with the scale of its own
    yield dp.Row("  nobody agrees on the scale", error, wrong=max(2**r - 1, most - 2**r) / most)
    tokens = lambda rank: [1 + (rank + j) % 3 for j in range(n)]
    sends, receives = tokens(r), [tokens(j)[r] for j in range(n)]
    x = lambda rank: seeded(10 + rank, sum(tokens(rank)), 2 * BLOCK).to(device)
    with dp.Ledger() as ledger:
        got = dispatch(x(r), sends, receives, group)
    right = torch.cat([x(j).split(tokens(j))[r] for j in range(n)])
    error = dp.relative_error(got, quantise(right, E4M3, TILE))
    sent = ledger.sent["all_to_all_single"], (sum(sends) - sends[r]) * (2 * BLOCK + 4 * 2)
    yield dp.Row("dispatch of tokens, tiles", error, sent)


def loss_scale_rows(group, device):
    """FP16's range, and a scale that all ranks share."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    ring = 2 * (n - 1) / n
    tiny, slack = 1e-7 * normal(2**14).to(device), 1.01 / 2**14
    for name, scale in ("FP16 gradients of 1e-7: zeros", 1.0), ("  scaled by 2^16", 2.0**16):
        lost = math.erf(2**-25 / (1e-7 * scale * math.sqrt(2)))
        zeros = (round_to(tiny * scale, FP16) == 0).double().mean().item()
        yield dp.Row(name, zeros, bound=(max(0.0, lost - slack), lost + slack))
    w, x = (seeded(seed, 2 * BLOCK, BLOCK).to(device) for seed in (5, 6 + r))
    shares = lambda: (Products.apply(x, param, RECIPES["all bits"]()) ** 2).mean() / n
    values = []
    for scale, clip in (1.0, 1e9), (2.0**16, 1e9), (1.0, 0.1), (2.0**16, 0.1):
        param = w.clone().requires_grad_()
        with dp.Ledger() as ledger:
            scaled_gradients(shares(), [param], LossScale(scale), group, clip)
        values.append(param.grad)
    sent = ledger.sent["all_reduce"], ring * (w.nbytes + 4)
    yield dp.Row("a loss scale changes no gradient", dp.relative_error(*values[1::-1]), sent)
    yield dp.Row("  clipped after the scale is undone", dp.relative_error(*values[:1:-1]))
    early = values[1] * min(1.0, 0.1 / (2**16 * values[1].norm().item()))
    yield dp.Row("  clipped before", dp.relative_error(early, values[2]), wrong=1 - 2**-16)
    own = torch.full([4], math.inf if r == 0 else 1.0, device=device)  # a shard of ZeRO
    agreed, alone = LossScale(), LossScale()
    with dp.Ledger() as ledger:
        agreed.update(any_overflow([own], group))
    sent = ledger.sent["all_reduce"], ring * 4
    yield dp.Row("rank 0 overflows: one scale", abs(agreed.scale / 2**15 - 1), sent)
    alone.update(not own.isfinite().all())
    yield dp.Row("  each looks at its own shard", abs(alone.scale / 2**15 - 1), wrong=float(r > 0))


def master_rows(group, device):
    """1,000 updates of 0.001 to a weight, and a sum of 4,096 products."""
    r, u, N = dist.get_rank(group), 1e-3, 2**12

    def after(w, format, seed=None):
        die = torch.Generator().manual_seed(seed or 0)
        for _ in range(1000):
            dice = torch.rand(w.shape, generator=die).to(w) if seed is not None else None
            w = round_to(w + u, format, dice) if format else w + u
        return w
    start, one = torch.tensor([0.125], device=device), torch.ones(N, device=device)
    exact = start.double() + 1000 * u
    yield dp.Row("fp32 masters", norm_error(after(start, None), exact), bound=(0.0, 1e-5))
    for format in BF16, E4M3:
        stalled = max(master_stalls_at(u, format), start.item())
        error = norm_error(after(start, format), exact)
        yield dp.Row(f"{format.name} masters stop at {stalled:.3g}", error,
                     wrong=1 - stalled / exact.item())  # fmt: skip
    drawn, step = after(one, BF16, seed=1), spacing(one[:1], BF16).item()
    p = u / step
    sigma = step * math.sqrt(p * (1 - p) * 1000 / N)  # of the mean of N weights
    error = abs(drawn.double().mean().item() - (1 + 1000 * u))
    yield dp.Row("BF16 masters by dice: their mean", error, bound=(0.0, 4 * sigma))
    for name, seed in ("  replicas roll the same dice", 1), ("  replicas roll their own", 1 + r):
        mine = drawn if seed == 1 else after(one, BF16, seed)
        first = mine.clone()
        # broadcast from rank 0, 4,096: every rank now has the replica of rank 0
        dist.broadcast(first, group_src=0, group=group)
        predicted = dp.relative_error(mine, drawn)  # both rolled here, by one process
        yield dp.Row(name, dp.relative_error(mine, first), wrong=predicted)
    a = torch.rand(64, 4096, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    a, b = a.to(device), torch.ones(4096, device=device)
    for name, every, K in ("a sum of 4,096 in 14 bits", None, 4096), ("  moved each 128", 128, 128):
        lost = K / 3 * 2**-14  # half a step a term; the step is that of the sum so far
        error = (1 - dot(a, b, 14, every) / a.sum(-1)).mean().item()
        yield dp.Row(name, error, bound=(0.85 * lost, 1.05 * lost))


def proof(group, device):
    """All rows of the table."""
    yield from [*format_rows(device), *layer_rows(device)]
    for rows in delayed_rows, wire_rows, loss_scale_rows, master_rows:
        yield from rows(group, device)


# name: casts of a layer, loss scale, format of the masters, whether they are rounded by dice
RUNS = {
    "all bits": (policy("all bits"), 1.0, None, False),
    "FP16, no loss scale": (policy("FP16"), 1.0, None, False),
    "FP16, loss scale": (policy("FP16"), 2.0**16, None, False),
    "FP8 a tensor": (policy("FP8 a tensor"), 1.0, None, False),
    "FP8 delayed": (policy("FP8 delayed"), 1.0, None, False),
    "FP8 blocks, ends in BF16": (policy("FP8 blocks", ends="BF16"), 1.0, None, False),
    "BF16 masters": (policy("all bits"), 1.0, BF16, False),
    "BF16 masters by dice": (policy("all bits"), 1.0, BF16, True),
}


def note_zeros(layer, shares):
    """Let a layer append, at each cast of a gradient, the share of it that becomes zero."""
    inner = layer.casts.g

    def noted(g):
        rounded = inner(g)
        shares.append(((rounded == 0) & (g != 0)).float().mean().item())
        return rounded

    layer.casts = layer.casts._replace(g=noted)


def train(args, group, device):
    """Train the same model once for each policy; print the loss and the zeros of each layer."""
    text, n, r = dp.read_text(args.text, 33), dist.get_world_size(group), dist.get_rank(group)
    dp.say(f"\nunigram entropy {dp.unigram_entropy(text):.3f}; loss: mean of the last ten steps")
    dp.say("                            loss   loss scale   gradients that become zero, by layer")
    for name, (casts_of, scale, master, by_dice) in RUNS.items():
        torch.manual_seed(0)
        model, scaler = LanguageModel(casts_of).to(device), LossScale(scale)
        params, losses = list(model.parameters()), []
        optimizer, die = torch.optim.AdamW(params, 1e-3), torch.Generator().manual_seed(0)
        zeros = [[] for _ in model.layers]
        delayed = [c for layer in model.layers for c in layer.casts if isinstance(c, Delayed)]
        for layer, shares in zip(model.layers, zeros):
            note_zeros(layer, shares)
        for t in range(args.steps):
            x_BS, y_BS = (whole.chunk(n)[r].to(device) for whole in dp.sample(text, t, 16, 32))
            optimizer.zero_grad()
            logits = model(x_BS).flatten(0, 1)
            loss = F.cross_entropy(logits, y_BS.flatten(), reduction="sum") / (16 * 32)
            if scaled_gradients(loss, params, scaler, group, clip=1.0):
                optimizer.step()
            for each in delayed:
                each.end_step(group)
            for param in params if master else ():
                dice = torch.rand(param.shape, generator=die).to(device) if by_dice else None
                param.data = round_to(param.data, master, dice)
            losses.append(loss.detach())
        last = torch.stack(losses[-10:]).mean()
        # all_reduce(SUM) over dp, 1: the loss of all tokens
        dist.all_reduce(last, group=group)
        shares = " ".join(f"{100 * sum(share) / len(share):5.2f}%" for share in zeros)
        dp.say(f"{name:26}{last.item():6.3f}{scaler.scale:13,.0f}   {shares}")


def main(args, device):
    """Prove, then train under each policy; 0 if everything is as claimed."""
    group = dist.group.WORLD
    dp.say(f"precision · {dist.get_world_size()} ranks · {device.type} · rounding is emulated")
    broken = dp.prove(list(proof(group, device)), device)
    if args.steps:
        train(args, group, device)
    return broken


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    if ranks not in (2, 4):
        raise ValueError(f"{ranks} ranks: use 2 or 4, so that each has whole tiles of {BLOCK} of "
                         "the 512 tokens of a step")
    dp.read_text(args.text, at_least=33)


if __name__ == "__main__":
    dp.launch(main, dp.arguments(__doc__, ranks=2, steps=30).parse_args(), validate)
