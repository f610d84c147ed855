"""four_bits: MX and NVFP4 number by number, packed bytes, dice, rotation, and what ranks send."""

import math

import pytest
import torch
import torch.distributed as dist
from harness import ROOT, beyond, on_ranks, refusal, run_script

four_bits = beyond("four_bits")
precision = beyond("precision")
question = pytest.mark.question
SCRIPT = ROOT / "beyond/four_bits.py"
E2M1, E4M3 = four_bits.E2M1, four_bits.E4M3


def matrix(seed, rows=64, columns=64):
    return precision.seeded(seed, rows, columns)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_four_bits_proves_itself(ranks, tmp_path):
    done = run_script(SCRIPT, "--steps", 0, "--ranks", ranks, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT AS CLAIMED" not in done.stdout and done.stderr == ""
    assert "ZeRO-3 gather in NVFP4" in done.stdout and list(tmp_path.iterdir()) == []


# ── formats and scales ───────────────────────────────────────────────────────────────────────


def test_e2m1_has_eight_magnitudes_and_ties_go_to_the_even_one():
    values = torch.tensor([0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 9.0, -5.0, -0.7])
    expected = [0, 0.5, 1, 1, 2, 2, 4, 4, 6, 6, -4, -0.5]
    assert precision.round_to(values, E2M1).tolist() == expected
    assert torch.equal(precision.round_to(four_bits.NUMBERS, E2M1), four_bits.NUMBERS)


@question("QW.1")
def test_the_numbers_of_the_example():
    block = torch.tensor([0.5, -1.2, 3.0, 12.0] + [0.0] * 28).view(1, 32)
    numbers, scale = four_bits.mx(block, E2M1)
    assert scale.item() == 2 and (numbers * scale).flatten()[:4].tolist() == [0, -1, 3, 12]
    block[0, 3] = 15.0
    assert four_bits.as_mx(E2M1)(block)[0, 3] == 12


@question("QW.1")
@pytest.mark.parametrize("format, top", [(E2M1, 2), (E4M3, 8), (precision.E5M2, 15)])
def test_the_scale_is_the_power_of_two_that_the_standard_names(format, top):
    amax = torch.exp2(torch.linspace(-30, 30, 1001))
    scale = four_bits.power_of_two_scale(amax, format)
    assert scale.tolist() == [2.0 ** (math.floor(math.log2(a)) - top) for a in amax.tolist()]
    assert torch.equal(scale.to(torch.float8_e8m0fnu).float(), scale)


@question("QW.1")
def test_the_exponent_of_a_scale_stays_in_its_byte():
    """E8M0 ends at 2^-127; a block of zeros gets a scale that can divide."""
    scale = four_bits.power_of_two_scale(torch.tensor([1e-38, 0.0]), E4M3)
    assert scale[0] == 2.0**-127 and 0 < scale[1] < math.inf
    assert torch.equal(four_bits.as_mx(E2M1)(torch.zeros(1, 32)), torch.zeros(1, 32))


def test_an_mx_block_has_no_scale_but_its_own():
    x = matrix(1)
    x[3, :32] *= 1000
    alone = [four_bits.as_mx(E4M3)(part.contiguous()) for part in x.split(32, dim=1)]
    assert torch.equal(four_bits.as_mx(E4M3)(x), torch.cat(alone, dim=1))


def test_nvfp4_has_a_tensor_scale_that_makes_the_largest_block_scale_448():
    x = matrix(2) * 1e-6
    numbers, scale, tensor = four_bits.nvfp4(x)
    assert tensor.item() == pytest.approx(x.abs().max().item() / (448 * 6), rel=1e-6)
    assert scale.max() == 448 and scale.min() > 0
    assert torch.equal(scale.to(torch.float8_e4m3fn).float(), scale)
    held = numbers * (scale * tensor)
    assert held.abs().max().item() == pytest.approx(x.abs().max().item(), rel=1e-6)


def test_nvfp4_by_hand_of_one_block():
    """The block's amax is the tensor's: the scale brings it to 6 and the others beside it."""
    x = torch.tensor([[12.0, 2.0, 0.4, -0.6, -7.0, *[0.0] * 11]])
    expected = [12, 2, 0, -1, -8]  # in halves: 6, 1, 0.2, -0.3, -3.5, and -3.5 is a tie
    assert four_bits.as_nvfp4()(x)[0, :5].tolist() == pytest.approx(expected, rel=1e-6)


def test_a_block_far_below_the_others_and_a_tensor_of_zeros_stay_finite():
    x = torch.cat([torch.full([1, 16], 1e6), torch.full([1, 16], 1e-6)], dim=1)
    assert four_bits.as_nvfp4()(x).isfinite().all()
    assert four_bits.nvfp4(x)[1].min() == 2**-9
    assert torch.equal(four_bits.as_nvfp4()(torch.zeros(1, 16)), torch.zeros(1, 16))


def test_square_blocks_round_a_matrix_and_its_transpose_alike():
    w, cast = matrix(3), four_bits.as_nvfp4(four_bits.NV_SQUARE)
    assert torch.equal(cast(w.T.contiguous()), cast(w).T)
    assert not torch.equal(four_bits.as_nvfp4()(w.T.contiguous()), four_bits.as_nvfp4()(w).T)


def test_the_predicted_zeros_are_those_of_many_draws():
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    zeros = (four_bits.as_nvfp4()(x) == 0).float().mean().item()
    assert zeros == pytest.approx(four_bits.zeros_of_blocks(), rel=0.02)
    assert four_bits.zeros_of_blocks(128) > 1.3 * four_bits.zeros_of_blocks()


@pytest.mark.reference
def test_formats_are_those_of_ml_dtypes():
    import ml_dtypes

    x = torch.linspace(-7, 7, 5001, dtype=torch.float32).clamp(-6, 6)
    theirs = x.numpy().astype(ml_dtypes.float4_e2m1fn).astype("float32")
    assert torch.equal(precision.round_to(x, E2M1), torch.from_numpy(theirs))
    powers = torch.exp2(torch.arange(-120, 120).float())
    theirs = powers.numpy().astype(ml_dtypes.float8_e8m0fnu).astype("float32")
    ours = four_bits.power_of_two_scale(powers * 4, E2M1)
    assert torch.equal(ours, torch.from_numpy(theirs))


# ── bytes ────────────────────────────────────────────────────────────────────────────────────


def test_two_numbers_share_a_byte_and_come_back():
    numbers = torch.cat([four_bits.NUMBERS, -four_bits.NUMBERS])
    packed = four_bits.pack(numbers)
    assert packed.dtype == torch.uint8 and packed.numel() == 8
    assert packed.tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    back = four_bits.unpack(packed, torch.float32)
    assert torch.equal(back, numbers) and torch.equal(back.signbit(), numbers.signbit())


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_gather_reads_as_the_whole_weight_rounded_by_one_process(ranks):
    whole = torch.cat([matrix(j, 16, 32) * 7.0**j for j in range(ranks)])

    def gathered():
        r, group = dist.get_rank(), dist.group.WORLD
        with four_bits.dp.Ledger() as ledger:
            parts = four_bits.gather_weights(whole[16 * r : 16 * r + 16].clone(), group)
        return four_bits.read_weights(*parts, 32), dict(ledger.sent)

    P = whole.numel()
    for read, sent in on_ranks(ranks, gathered):
        assert torch.equal(read, four_bits.as_nvfp4()(whole))
        assert sent["all_gather_single"] == (ranks - 1) / ranks * (P / 2 + P / 16)
        assert sent["all_reduce"] == pytest.approx(2 * (ranks - 1) / ranks * 4)


# ── dice and rotation ────────────────────────────────────────────────────────────────────────


def test_dice_keep_on_average_what_the_nearest_number_loses():
    x = torch.full([512, 16], 0.1, dtype=torch.float64)
    x[:, 0] = 6.0
    torch.manual_seed(1)
    drawn = four_bits.as_nvfp4(by_dice=True)(x)[:, 1:]
    assert drawn.unique().numel() == 2 and (four_bits.as_nvfp4()(x)[:, 1:] == 0).all()
    assert drawn.mean().item() == pytest.approx(0.1, abs=4 * 0.2 / math.sqrt(512 * 15))


@question("QW.2")
def test_a_rotation_of_both_operands_changes_no_product():
    a, b = matrix(4, 48, 32), matrix(5, 64, 32)
    seen = []

    def noted(x):
        seen.append(x)
        return x

    product = four_bits.rotated_product(a, b, noted, noted, four_bits.hadamard())
    assert precision.norm_error(product, a @ b.T) < 1e-12
    # what is rounded is rotated, both times: or else the outlier is still there
    assert [x.shape for x in seen] == [a.shape, b.shape]
    assert all(torch.allclose(x, four_bits.rotate(whole, four_bits.hadamard()))
               for x, whole in zip(seen, (a, b)))  # fmt: skip


def test_a_rotation_spreads_one_outlier_over_its_sixteen():
    R = four_bits.hadamard()
    assert torch.allclose(R @ R.T, torch.eye(16, dtype=torch.float64), atol=1e-14)
    assert not torch.equal(R, four_bits.hadamard(seed=1))
    x = torch.zeros(1, 32, dtype=torch.float64)
    x[0, 5] = 8.0
    turned = four_bits.rotate(x, R)
    assert (turned[0, :16].abs() == 2).all() and (turned[0, 16:] == 0).all()


def test_the_backward_rotates_only_the_gradient_of_the_weight():
    x, w, g = matrix(6), matrix(7), matrix(8)
    casts = four_bits.NEAREST._replace(x=four_bits.as_mx(E4M3))  # x and g are told apart

    def gradients(function):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = function.apply(a, b, casts)
        y.backward(g)
        return y.detach(), a.grad, b.grad

    plain, turned = gradients(precision.Products), gradients(four_bits.Rotated)
    assert torch.equal(plain[0], turned[0]) and torch.equal(plain[1], turned[1])
    cast, R = four_bits.as_nvfp4(), four_bits.hadamard()
    by_hand = cast(four_bits.rotate(g.T, R)) @ casts.x(four_bits.rotate(x.T, R)).T
    assert torch.allclose(turned[2], by_hand, rtol=1e-12)
    assert not torch.allclose(turned[2], plain[2], rtol=1e-3)


def test_gradients_alone_are_rounded_by_dice_and_weights_alone_in_squares():
    x, nearest, drawn = matrix(9), four_bits.NEAREST, four_bits.BY_DICE
    assert torch.equal(nearest.w(x.T.contiguous()), nearest.w(x).T)
    for casts, by_dice in (nearest, ""), (drawn, "g"):
        for name, cast in casts._asdict().items():
            assert torch.equal(cast(x), cast(x)) == (name not in by_dice), name
    for name in ("x", "g"):
        assert torch.equal(getattr(nearest, name)(x), four_bits.as_nvfp4()(x))


def test_a_width_that_blocks_do_not_divide_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match="4 x 40 is no whole number of blocks of 1 x 16"):
        four_bits.nvfp4(matrix(1, 4, 40))


def test_four_bits_refuses_what_cannot_work():
    assert "3 ranks: use 2 or 4" in refusal(SCRIPT, "--ranks", 3)


@pytest.mark.slow
def test_four_bits_trains_by_every_recipe(tmp_path):
    done = run_script(SCRIPT, "--steps", 12, torchrun=2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(any(line.startswith(name) for line in lines) for name in four_bits.RECIPES)
