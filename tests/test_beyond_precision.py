"""precision: formats bit by bit, scales, the loss scale, and what ranks must agree on."""

import math

import pytest
import torch
import torch.distributed as dist
from harness import ROOT, beyond, on_ranks, refusal, run_script

precision = beyond("precision")
question = pytest.mark.question
SCRIPT = ROOT / "beyond/precision.py"
TORCHS = {
    "E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2,
    "FP16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
each_format = pytest.mark.parametrize("name", TORCHS)


def numbers(dtype):
    """All finite numbers of a dtype, in order, in float64."""
    bits = torch.uint8 if dtype.itemsize == 1 else torch.int16
    codes = torch.arange(2 ** (8 * dtype.itemsize)).to(bits)
    every = codes.view(dtype).double()
    return every[every.isfinite()].unique()


def test_precision_proves_itself(tmp_path):
    done = run_script(SCRIPT, "--steps", 0, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT AS CLAIMED" not in done.stdout and done.stderr == ""
    assert "BF16 masters by dice" in done.stdout and list(tmp_path.iterdir()) == []


# ── formats ──────────────────────────────────────────────────────────────────────────────────


def test_the_numbers_of_the_example():
    values = torch.tensor([0.3, 0.0012, 0.0009, 500.0, 448.0, -0.3], dtype=torch.float64)
    found = precision.round_to(values, precision.E4M3).tolist()
    assert found == [0.3125, 2**-9, 0.0, 448.0, 448.0, -0.3125]


@each_format
def test_every_number_of_a_format_stays_and_every_midpoint_goes_to_the_even_one(name):
    format, dtype = getattr(precision, name), TORCHS[name]
    every = numbers(dtype)
    assert torch.equal(precision.round_to(every, format), every)
    middle = (every[1:] + every[:-1]) / 2
    middle = middle.float()  # torch casts float64 by way of float32, which rounds twice
    above, below = (torch.nextafter(middle, end.float()) for end in (every[1:], every[:-1]))
    near = torch.cat([middle, above, below])
    assert torch.equal(precision.round_to(near, format), near.to(dtype).float())


@pytest.mark.parametrize("name, found", [("E4M3", 448.0), ("E5M2", 57344.0), ("FP16", math.inf)])
def test_what_is_too_large_saturates_or_becomes_infinite(name, found):
    x = torch.tensor([1e6, -1e6, math.inf], dtype=torch.float64)
    expected = [found, -found, found]
    assert precision.round_to(x, getattr(precision, name)).tolist() == expected


@question("QN.3")
def test_dice_move_a_number_up_as_often_as_it_lies_above_the_one_below():
    steps = torch.full((10_000,), 3.1, dtype=torch.float64)
    dice = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    found = precision.round_by_dice(steps, dice)
    assert set(found.tolist()) == {3.0, 4.0} and found.mean().item() == pytest.approx(3.1, abs=1e-3)
    whole = torch.tensor([0.0, 5.0])
    assert precision.round_by_dice(whole, torch.tensor([0.0, 0.999])).tolist() == [0.0, 5.0]
    dice = torch.tensor([0, 0.4, 0.6, 0.9])
    drawn = precision.round_to(torch.full((4,), 1.0625), precision.E4M3, dice)
    assert drawn.tolist() == [1.0, 1.0, 1.125, 1.125]


@pytest.mark.reference
@pytest.mark.parametrize("name", ["E4M3", "E5M2", "BF16"])
def test_a_format_is_that_of_ml_dtypes(name):
    import ml_dtypes
    import numpy as np

    theirs = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2,
              "BF16": ml_dtypes.bfloat16}[name]  # fmt: skip
    format = getattr(precision, name)
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).double() * 20
    x = x.float().double()
    wanted = x.float().numpy().astype(theirs).astype(np.float64)
    assert torch.equal(precision.round_to(x, format), torch.from_numpy(wanted))


# ── scales ───────────────────────────────────────────────────────────────────────────────────


@question("QN.1")
@pytest.mark.parametrize("name, amax, edge", [
    ("E4M3", 448.0, 2**-10), ("E4M3", 4480.0, 10 * 2**-10), ("E5M2", 57344.0, 2**-17),
    ("E4M3", 1.0, 2**-10 / 448),
])  # fmt: skip
def test_what_becomes_zero_beside_an_outlier(name, amax, edge):
    format = getattr(precision, name)
    assert precision.flushed_below(amax, format) == pytest.approx(edge, rel=1e-12)
    row = torch.tensor([[amax, 0.999 * edge, 1.001 * edge, -0.999 * edge]], dtype=torch.float64)
    kept = precision.quantise(row, format) != 0
    assert kept.tolist() == [[True, False, True, False]]


def test_a_scale_is_never_infinite_and_one_where_nothing_can_be_scaled():
    amax = torch.tensor([0.0, math.inf, math.nan, 1e-45, 448.0])
    scale = precision.scale_of(amax, precision.E4M3)
    assert scale.isfinite().all() and scale[[0, 1, 2, 4]].tolist() == [1.0] * 4


def test_blocks_have_scales_of_their_own():
    x = torch.ones(4, 256)
    x[0, 0], x[3, 255] = 1000.0, 1e-3
    assert precision.amax_of(x, precision.TILE).shape == (4, 1, 2, 1)
    assert precision.amax_of(x, precision.TILE)[:, 0, :, 0].tolist() == [[1000, 1], *[[1, 1]] * 3]
    assert precision.amax_of(x).item() == 1000
    back = precision.quantise(x, precision.E4M3, precision.TILE)
    assert back[0, 0].item() == pytest.approx(1000) and (back[1:3] == 1).all()
    assert back[3, 255] != 1e-3 and back[0, 1] != 1
    with pytest.raises(ValueError, match="100 x 7 is no whole number of blocks of 1 x 128"):
        precision.cells(torch.ones(100, 7), precision.TILE)


@question("QN.2")
def test_all_ranks_have_the_amax_of_the_whole_tensor():
    def amax():
        part = torch.full((2, 4), float([3, 7, 5][dist.get_rank()]))
        found = precision.amax_of(part)
        return precision.agree_on_amax(found, dist.group.WORLD).item()

    assert on_ranks(3, amax) == [7.0] * 3


def test_codes_are_those_of_torch_and_come_back():
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1)).double()
    for block in (None, precision.TILE):
        codes, scale = precision.encode(x, block)
        scaled = (precision.cells(x, block) * scale).reshape(x.shape)
        assert torch.equal(codes, scaled.to(torch.float8_e4m3fn).view(torch.uint8))
        back = precision.decode(codes, scale, block)
        assert torch.equal(back, precision.quantise(x, precision.E4M3, block))


def test_a_delayed_scale_forgets_after_its_length_and_skips_an_overflow():
    def history():
        cast, seen = precision.Delayed(precision.E4M3, length=2), []
        for size in (8.0, math.inf, 2.0, 1.0, 0.0):
            cast(torch.full((1, 2), size))
            cast.end_step(dist.group.WORLD)
            seen.append([amax.item() for amax in cast.past])
        return seen

    expected = [[8], [8, 8], [8, 2], [2, 1], [1, 1]]
    cast = precision.Delayed(precision.E4M3)
    cast.past.extend(torch.full((1, 1, 1, 1), size) for size in (8.0, 2.0))
    x = torch.tensor([[1.9, 0.3]])
    assert torch.equal(cast(x), precision.quantise(x, precision.E4M3, amax=torch.tensor(8.0)))
    assert on_ranks(2, history) == [expected] * 2


# ── the loss scale ───────────────────────────────────────────────────────────────────────────


def test_the_loss_scale_follows_torchs_own():
    overflows = [0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0]
    ours = precision.LossScale(2.0**10, interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.0)
    theirs.scale(torch.zeros(()))  # it makes its scale at the first call
    for overflow in overflows:
        param.grad = torch.tensor([math.inf if overflow else 1.0])
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflow)
        assert ours.scale == theirs.get_scale()


def test_a_loss_scale_that_no_longer_helps_is_a_diverged_run():
    scaler = precision.LossScale(4.0)
    for _ in range(2):
        scaler.update(True)
    with pytest.raises(OverflowError, match="the loss scale fell to 0.5"):
        scaler.update(True)


def test_a_step_is_skipped_on_all_ranks_where_one_gradient_overflows():
    def step(bad):
        w = torch.nn.Parameter(torch.ones(2))
        x = torch.full((2,), math.inf if bad == dist.get_rank() else 1.0)
        scaler, group = precision.LossScale(8.0), dist.group.WORLD
        taken = precision.scaled_gradients((w * x).sum(), [w], scaler, group)
        return taken, scaler.scale, w.grad.tolist()

    assert on_ranks(2, step, 1) == [(False, 4.0, [math.inf] * 2)] * 2
    assert on_ranks(2, step, None) == [(True, 8.0, [2.0, 2.0])] * 2


def test_an_overflow_of_one_shard_is_known_to_all():
    def found(bad):
        own = torch.tensor([math.nan if bad == dist.get_rank() else 1.0])
        return precision.any_overflow([torch.ones(3), own], dist.group.WORLD)

    assert on_ranks(3, found, 2) == [True] * 3 and on_ranks(3, found, None) == [False] * 3


# ── layers, masters, sums ────────────────────────────────────────────────────────────────────


def test_a_policy_spares_the_ends():
    of = precision.policy("FP8 blocks", ends="BF16")
    x = torch.ones(1, 128)
    x[0, 0] = 1 + 2**-6  # it becomes 448 in eight bits, and so does the 1 beside it; BF16 has both
    rounded = [of(i, 4).x(x)[0, 1].item() for i in range(4)]
    assert rounded[0] == rounded[3] == 1 and rounded[1] == rounded[2] != 1
    plain = precision.policy("all bits")(0, 4)
    assert plain.w(x) is x


def test_a_layer_of_all_bits_is_nn_linear():
    torch.manual_seed(0)
    layer = precision.Linear(6, 5, precision.RECIPES["all bits"]()).double()
    twin = torch.nn.Linear(6, 5, bias=False).double()
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    grads = []
    for module in (layer, twin):
        a = x.clone().requires_grad_()
        y = module(a)
        y.square().sum().backward()
        grads.append([y.detach(), a.grad, module.weight.grad])
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(*grads))


@pytest.mark.parametrize("name, update, at", [
    ("BF16", 1e-3, 0.25 * 2), ("BF16", 2**-10, 2**-2), ("E4M3", 1e-3, 2**-5)])
def test_a_master_stalls_where_its_steps_are_two_updates(name, update, at):
    format = getattr(precision, name)
    stall = precision.master_stalls_at(update, format)
    assert stall == at
    w = torch.tensor([stall], dtype=torch.float64)
    assert precision.round_to(w + update, format) == w
    assert precision.round_to(w / 2 + 1.01 * update, format) > w / 2


def test_a_short_accumulator_loses_and_a_long_one_does_not():
    a = torch.rand(3, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ones = torch.ones(512, dtype=torch.float64)
    assert torch.allclose(precision.dot(a, ones, 53), a.sum(-1), rtol=1e-12)
    short = precision.dot(a, ones, 14)
    moved = precision.dot(a, ones, 14, every=64)
    assert (short < moved).all() and (moved < a.sum(-1)).all()


def test_precision_refuses_what_cannot_work():
    assert "3 ranks: use 2 or 4" in refusal(SCRIPT, "--ranks", 3)


@pytest.mark.slow
def test_precision_trains_by_every_policy(tmp_path):
    done = run_script(SCRIPT, "--steps", 12, torchrun=2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(any(line.startswith(name) for line in done.stdout.splitlines())
               for name in precision.RUNS)  # fmt: skip
