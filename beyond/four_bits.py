"""four_bits · Sixteen numbers, and a scale for every few of them

A number of four bits, E2M1, is one of 0, 1/2, 1, 3/2, 2, 3, 4, 6, or the negative of one. From the
smallest to the greatest is a factor of 12; a tensor spans thousands. So a scale belongs to a short
block. Small gradients are rounded up or down by chance: to nearest, all of them would become zero.

    MXFP4     | 32 numbers: 16 bytes | scale: a power of two, E8M0, 1 byte |
    NVFP4     | 16 numbers: 8 bytes | scale: E4M3, 1 byte |    and one fp32 scale for the tensor

    held, or gathered by ZeRO-3     bytes for P numbers
    MXFP8                           P + P/32
    MXFP4                           P/2 + P/32
    NVFP4                           P/2 + P/16, and 4

    moves                           bytes that leave a rank
    ZeRO-3 gather in NVFP4          (n-1)/n · (P/2 + P/16 + 2 · 4); BF16: (n-1)/n · 2P

    python beyond/four_bits.py                          two ranks: proof, then six runs on text
    torchrun --nproc-per-node 4 beyond/four_bits.py     the same on four

Rounding is emulated, as in precision.py, on which this file builds: no speed is measured.

Guide: FP4 training, in its outlook to 2027.
Sources: MX, OCP Microscaling Formats v1.0, section 6.3; NVFP4, arXiv:2509.25149.
Questions  QW.1 ** which power of two is a block's scale?   QW.2 ** what may be rotated for free?
"""
# n ranks · r this rank · D width · P parameters

import importlib
import math
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads ends it without a trace

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))
dp = importlib.import_module("01_dp")
precision = importlib.import_module("beyond.precision")
BF16, E4M3, Casts, Format = (getattr(precision, x) for x in ("BF16", "E4M3", "Casts", "Format"))
amax_of, cells, round_to = precision.amax_of, precision.cells, precision.round_to

E2M1 = Format("E2M1", 1, 0, 6.0)
MX, NV = (1, 32), (1, 16)  # blocks along what a product sums over
NV_SQUARE = (16, 16)  # of weights: the same numbers for w and for its transpose


# ── by hand: four numbers with one scale ─────────────────────────────────────────────────────

# A block (of four here) whose largest magnitude is 12 = 1.5 · 2^3. E2M1 ends at 6 = 1.5 · 2^2.
# The scale is 2^3 / 2^2 = 2:
#
#     the block             0.5    -1.2     3.0    12.0
#     divided by the scale  0.25   -0.6     1.5     6.0
#     rounded to E2M1       0      -0.5     1.5     6.0      0.25 is a tie: 0 is even
#     times the scale       0      -1.0     3.0    12.0
#
# Had 12 been 15, then 15 / 2 = 7.5 would saturate at 6: a power of two can be a quarter off.
# NVFP4's scale has three bits more, so it fits better. It has less range, and so a tensor scale.


def power_of_two_scale(amax, format):
    """The scale of an MX block, by which it is divided: E8M0 has powers of two alone.

    The exponent of the block's largest value becomes the exponent of the format's greatest.
    """
    # QW.1 ** A scale is a power of two. Which one brings the largest value of a block among the
    #      format's largest values?
    #      hint: compare exponents, that of the amax and that of the format's greatest number
    exponent = torch.frexp(amax).exponent - 1
    top = math.frexp(format.greatest)[1] - 1
    return torch.ldexp(torch.ones_like(amax), (exponent - top).clamp(-127, 127))
    # /QW.1


def mx(x, format):
    """A matrix as MX holds it: (numbers of `format` by block, scale of each block)."""
    scale = power_of_two_scale(amax_of(x, MX), format)
    return round_to(cells(x, MX) / scale, format), scale


def nvfp4(x, block=NV, by_dice=False, group=None):
    """A matrix as NVFP4 holds it: (numbers of E2M1 by block, E4M3 scale of each, tensor scale).

    Parts of a tensor on the ranks of `group` get one tensor scale. `by_dice` rounds stochastically.
    """
    amax = amax_of(x, block)
    whole = amax.amax().view(1)
    if group is not None:
        precision.agree_on_amax(whole, group)
    tensor = torch.where(whole > 0, whole / (E4M3.greatest * E2M1.greatest), 1.0)
    # a scale of zero would lose the block: E4M3's smallest number is the least
    scale = round_to(amax / E2M1.greatest / tensor, E4M3).clamp(min=2**-9)
    blocks = cells(x, block) / (scale * tensor)
    return round_to(blocks, E2M1, torch.rand_like(blocks) if by_dice else None), scale, tensor


def as_mx(format):
    """The cast of a matrix to MX and back."""

    def cast(x):
        numbers, scale = mx(x, format)
        return (numbers * scale).reshape(x.shape)

    return cast


def as_nvfp4(block=NV, by_dice=False):
    """The cast of a matrix to NVFP4 and back."""

    def cast(x):
        numbers, scale, tensor = nvfp4(x, block, by_dice)
        return (numbers * (scale * tensor)).reshape(x.shape)

    return cast


# ── two numbers in a byte ────────────────────────────────────────────────────────────────────

NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # code 0 to 7; the fourth bit is the sign


def pack(numbers):
    """E2M1 numbers, an even count, as bytes: the first of two in the lower half."""
    codes = torch.searchsorted(NUMBERS.to(numbers), numbers.abs().contiguous())
    codes = (codes + 8 * numbers.signbit()).to(torch.uint8).view(-1, 2)
    return codes[:, 0] + 16 * codes[:, 1]


def unpack(packed, dtype):
    """The numbers that `pack` wrote, flat."""
    codes = torch.stack([packed % 16, packed // 16], dim=1).flatten().long()
    return NUMBERS.to(packed.device, dtype)[codes % 8].copysign(7.5 - codes)


def gather_weights(shard, group, agreed=True):
    """All-gather rows (M/n, N) of a ZeRO-3 weight: its packed numbers, its scales, tensor scale.

    The tensor scale does not travel, so it has to be agreed before the numbers are rounded.
    """
    n = dist.get_world_size(group)
    numbers, scale, tensor = nvfp4(shard, group=group if agreed else None)
    parts = pack(numbers), scale.to(torch.float8_e4m3fn).view(torch.uint8).flatten()
    wholes = [part.new_empty(n * len(part)) for part in parts]
    for whole, part in zip(wholes, parts):
        # all_gather over dp, P/2 bytes in all, then P/16: every rank now holds numbers and scales
        dist.all_gather_single(whole, part, group=group)
    return *wholes, tensor


def read_weights(packed, scale, tensor, D, dtype=torch.float64):
    """The matrix (M, D) of packed NVFP4 numbers and their scales."""
    scale = scale.view(torch.float8_e4m3fn).float()
    return (unpack(packed, dtype).view(-1, 16) * (scale * tensor)[:, None]).view(-1, D)


# ── an outlier that is spread before it is rounded ───────────────────────────────────────────


def hadamard(seed=0):
    """An orthogonal matrix (16, 16) of entries of one size, with random signs: R R^T = 1."""
    R = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        R = torch.cat([torch.cat([R, R], 1), torch.cat([R, -R], 1)])
    signs = torch.randint(2, (16, 1), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return signs * R / 4


def rotate(x, R):
    """Each run of 16 in the rows of a matrix, times R: one outlier becomes 16 values a quarter as
    large."""
    return (x.unflatten(1, (-1, 16)) @ R.to(x)).flatten(1)


def rotated_product(a, b, cast_a, cast_b, R):
    """a (M, N) times b (O, N) transposed, where an outlier is spread over 16 before the cast."""
    # QW.2 ** Rows of a are rotated, so that their outliers are spread. What has to be done to b, so
    #      that the product is the same?
    #      hint: (a R) (b R)^T = a R R^T b^T
    a = rotate(a, R)
    b = rotate(b, R)
    return precision.product(a, b, cast_a, cast_b)
    # /QW.2


class Rotated(torch.autograd.Function):
    """The three products of a layer; operands of the weight's gradient are rotated.

    Only those are (arXiv:2509.25149): to rotate x and w as well would break that w has one set of
    rounded numbers, in squares of 16 x 16, for the forward and for dx.
    """

    @staticmethod
    def forward(ctx, x, w, casts):
        return precision.Products.forward(ctx, x, w, casts)

    @staticmethod
    def backward(ctx, g):
        (x, w), casts = ctx.saved_tensors, ctx.casts
        dx = precision.product(g, w.T.contiguous(), casts.g, casts.w)
        g, x = g.T.contiguous(), x.T.contiguous()
        return dx, rotated_product(g, x, casts.g, casts.x, hadamard()), None


NEAREST = Casts(as_nvfp4(), as_nvfp4(NV_SQUARE), as_nvfp4())
BY_DICE = NEAREST._replace(g=as_nvfp4(by_dice=True))
RECIPES = {  # casts of a layer, its three products, whether the first and last layer stay in BF16
    "all bits": (Casts(*[lambda x: x] * 3), precision.Products, False),
    "MXFP8": (Casts(*[as_mx(E4M3)] * 3), precision.Products, False),
    "MXFP4": (Casts(*[as_mx(E2M1)] * 3), precision.Products, False),
    "NVFP4": (NEAREST, precision.Products, False),
    "NVFP4, gradients by dice": (BY_DICE, precision.Products, False),
    "  rotated too, ends in BF16": (BY_DICE, Rotated, True),
}


# ── from here on: proof, run, kit ────────────────────────────────────────────────────────────


def block_rows(device):
    """Scales by block: bytes, the range, and a transpose."""
    x = precision.normal(2**14).to(device).view(128, 128)
    P, error = x.numel(), precision.norm_error
    numbers, scale = mx(x, E2M1)
    held = pack(numbers).nbytes + scale.to(torch.float8_e8m0fnu).nbytes, P / 2 + P / 32
    yield dp.Row("MXFP4: error", error(as_mx(E2M1)(x), x), held=held, bound=(0.1, 0.13))
    over = (cells(x, MX) / scale).abs()  # in units of the format
    largest = over.amax((1, 3))
    off = dp.relative_error(largest.clamp(max=6), largest.clamp(max=8))
    yield dp.Row("  the largest saturates, at most", off, bound=(0.2, 0.25))
    numbers, scale = mx(x, E4M3)
    held = numbers.to(torch.float8_e4m3fn).nbytes + scale.to(torch.float8_e8m0fnu).nbytes
    mxfp8 = error(as_mx(E4M3)(x), x)
    yield dp.Row("MXFP8: error", mxfp8, held=(held, P + P / 32), bound=(0.02, 0.04))
    numbers, scale, tensor = nvfp4(x)
    held = pack(numbers).nbytes + scale.to(torch.float8_e4m3fn).nbytes + tensor.nbytes
    nv = error(as_nvfp4()(x), x)
    yield dp.Row("NVFP4: error", nv, held=(held, P / 2 + P / 16 + 4), bound=(0.09, 0.1))
    held_by_format = (numbers * (scale * tensor)).reshape(x.shape)
    again = dp.relative_error(as_nvfp4()(held_by_format), held_by_format)
    yield dp.Row("  what NVFP4 has, rounded again", again)
    share, zeros = zeros_of_blocks(), lambda y: (y == 0).double().mean().item()
    slack = 4 * math.sqrt(share / P)  # of a share of P values that are drawn
    blocks = zeros(as_nvfp4()(x))
    yield dp.Row("  values that become zero", blocks, bound=(share - slack, share + slack))
    x[0, 0] = A = 10.0
    lost = math.erf(precision.flushed_below(A, E2M1) / math.sqrt(2))
    whole = zeros(precision.quantise(x, E2M1))
    yield dp.Row("FP4, one scale: zeros beside 10", whole, bound=(lost - 1e-4, lost + 1e-4))
    blocks = zeros(as_nvfp4()(x))
    yield dp.Row("  in blocks of 16", blocks, bound=(share - slack, share + slack))
    for name, block, bound in ("16 x 16", NV_SQUARE, None), ("1 x 16", NV, (0.08, 0.2)):
        cast = as_nvfp4(block)
        off = error(cast(x.T.contiguous()), cast(x).T)
        yield dp.Row(f"w^T beside w, blocks of {name}", off, bound=bound)


def zeros_of_blocks(size=16):
    """The share of normal values that become zero, if blocks of `size` are scaled to E2M1's 6."""
    chance = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096
    amax = torch.erfinv(chance ** (1 / size))  # quantiles of a block's largest value, over sqrt(2)
    below = torch.erf(precision.flushed_below(amax, E2M1)) / torch.erf(amax)
    return (size - 1) / size * below.mean().item()


def chance_rows(device):
    """15 gradients of a tenth of a step beside a large one, in each of 1,024 blocks."""
    p, step = 0.1, 0.5
    x = torch.full([1024, 16], p * step, device=device, dtype=torch.float64)
    x[:, 0] = 6.0
    small = lambda y: abs(y[:, 1:].mean().item() / (p * step) - 1)
    yield dp.Row("small gradients, to nearest: lost", small(as_nvfp4()(x)), wrong=1.0)
    torch.manual_seed(0)
    sigma = math.sqrt(p * (1 - p) / (15 * len(x))) / p
    drawn = small(as_nvfp4(by_dice=True)(x))
    yield dp.Row("  by dice: their mean", drawn, bound=(0.0, 4 * sigma))


def rotation_rows(device):
    """A product of matrices, one of which has a column of outliers: what a rotation is worth."""
    a, b = (precision.seeded(seed, 128, 128).to(device) for seed in (1, 2))
    a[:, 5] *= 10
    R, exact, keep = hadamard(), a @ b.T, lambda x: x
    same = rotated_product(a, b, keep, keep, R)
    yield dp.Row("a product of rotated operands", dp.relative_error(same, exact))
    explicit = a @ torch.block_diag(*[R.to(a)] * 8) @ b.T
    error = dp.relative_error(rotate(a, R) @ b.T, exact)
    yield dp.Row("  only one is rotated", error, wrong=dp.relative_error(explicit, exact))
    # a block of 16 shuts an outlier in, and holds it exactly: to spread it then costs
    for name, cast, bound in [
        ("one scale", lambda x: precision.quantise(x, E2M1), (0.25, 0.5)),
        ("MXFP4", as_mx(E2M1), (0.5, 0.9)),
        ("NVFP4", as_nvfp4(), (1.0, 1.2)),
    ]:
        plain = precision.norm_error(precision.product(a, b, cast, keep), exact)
        turned = precision.norm_error(rotated_product(a, b, cast, keep, R), exact)
        yield dp.Row(f"  error over unrotated, {name}", turned / plain, bound=bound)


def wire_rows(group, device):
    """A ZeRO-3 gather of four-bit weights."""
    n, r, D = dist.get_world_size(group), dist.get_rank(group), 64
    base = precision.seeded(4, 32, D).to(device)
    whole = torch.cat([base * 2**j for j in range(n)])
    shard, P, right = whole[32 * r : 32 * r + 32], whole.numel(), as_nvfp4()(whole)
    with dp.Ledger() as ledger:
        packed, scale, tensor = gather_weights(shard, group)
    sent = ledger.sent["all_gather_single"] + ledger.sent["all_reduce"]
    error = dp.relative_error(read_weights(packed, scale, tensor, D), right)
    held = packed.nbytes + scale.nbytes + tensor.nbytes, P / 2 + P / 16 + 4
    formula = (n - 1) / n * (P / 2 + P / 16 + 2 * 4)
    yield dp.Row("ZeRO-3 gather in NVFP4", error, (sent, formula), held)
    error = dp.relative_error(read_weights(*gather_weights(shard, group, agreed=False), D), right)
    most = 2 ** (n - 1)  # the last rank's part; rank r reads all parts with a scale of its own
    yield dp.Row("  nobody agrees on the scale", error, wrong=max(2**r - 1, most - 2**r) / most)


def train(args, group, device):
    """Train the same model once for each recipe; print the loss."""
    text, n, r = dp.read_text(args.text, 33), dist.get_world_size(group), dist.get_rank(group)
    dp.say(f"\nunigram entropy {dp.unigram_entropy(text):.3f}; loss: mean of the last ten steps")
    for name, (casts, products, ends) in RECIPES.items():
        torch.manual_seed(0)
        model = precision.LanguageModel(lambda i, layers: casts).to(device)
        for layer in model.layers:
            layer.products = products
        for layer in (model.layers[0], model.layers[-1]) if ends else ():
            layer.products, layer.casts = precision.Products, precision.RECIPES["BF16"]()
        params, losses = list(model.parameters()), []
        optimizer, scaler = torch.optim.AdamW(params, 1e-3), precision.LossScale(1.0)
        for t in range(args.steps):
            x_BS, y_BS = (whole.chunk(n)[r].to(device) for whole in dp.sample(text, t, 16, 32))
            optimizer.zero_grad()
            logits = model(x_BS).flatten(0, 1)
            loss = F.cross_entropy(logits, y_BS.flatten(), reduction="sum") / (16 * 32)
            precision.scaled_gradients(loss, params, scaler, group, clip=1.0)
            optimizer.step()
            losses.append(loss.detach())
        last = torch.stack(losses[-10:]).mean()
        # all_reduce(SUM) over dp, 1: the loss of all tokens
        dist.all_reduce(last, group=group)
        dp.say(f"{name:30}{last.item():6.3f}")


def main(args, device):
    """Prove, then train under each recipe; 0 if everything is as claimed."""
    group = dist.group.WORLD
    dp.say(f"four_bits · {dist.get_world_size()} ranks · {device.type} · rounding is emulated")
    rows = [*block_rows(device), *chance_rows(device), *rotation_rows(device)]
    broken = dp.prove([*rows, *wire_rows(group, device)], device)
    if args.steps:
        train(args, group, device)
    return broken


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    if ranks not in (2, 4):
        raise ValueError(f"{ranks} ranks: use 2 or 4, so that each has whole blocks of 32 of the "
                         "512 tokens of a step")
    dp.read_text(args.text, at_least=33)


if __name__ == "__main__":
    dp.launch(main, dp.arguments(__doc__, ranks=2, steps=30).parse_args(), validate)
