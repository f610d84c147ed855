"""compression: nothing is lost, messages are as long as they say, and each method is what it is."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from harness import ROOT, beyond, on_ranks, refusal, run_script

compression = beyond("compression")
question = pytest.mark.question
SCRIPT = ROOT / "beyond/compression.py"
SHAPES = [(12, 10), (7,)]
P = 127
KINDS = {
    "dense": lambda: compression.Dense(SHAPES),
    "top-k": lambda: compression.TopK(SHAPES, 9),
    "random-k": lambda: compression.RandomK(SHAPES, 9),
    "sign": lambda: compression.Sign(SHAPES),
    "two-sided": lambda: compression.TwoSidedSign(SHAPES),
    "low rank": lambda: compression.LowRank(SHAPES, 2),
    "DCT": lambda: compression.DCT(SHAPES, kept=5),
}


def drawn(n, steps=4, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(steps, n, P, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("ranks", [2, 4])
def test_compression_proves_itself(ranks, tmp_path):
    done = run_script(SCRIPT, "--steps", 0, "--ranks", ranks, "--keep", 0.005, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT AS CLAIMED" not in done.stdout and done.stderr == ""
    assert done.stdout.count("nothing is lost") == 7 and list(tmp_path.iterdir()) == []


def test_the_example_of_two_numbers():
    def steps():
        rest, applied, seen = torch.zeros(2), torch.zeros(2), []
        for _ in range(3):
            gradient = torch.tensor([3.0, 2.0])
            out, rest = compression.top_k_by_hand(gradient, rest, 1, dist.group.WORLD)
            applied += out
            seen.append((out.tolist(), rest.tolist()))
        return seen, applied.tolist()

    seen = [([3, 0], [0, 2]), ([0, 4], [3, 0]), ([6, 0], [0, 2])]
    assert on_ranks(1, steps) == [(seen, [9, 4])]


@question("QK.1")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "two-sided"])
def test_what_is_applied_and_what_is_kept_add_up_to_all_gradients(kind):
    gradients = drawn(3)

    def steps():
        feedback = compression.Feedback(KINDS[kind]())
        applied = sum(feedback.reduce(g[dist.get_rank()], dist.group.WORLD) for g in gradients)
        return applied, feedback.residual_P

    ranks = on_ranks(3, steps)
    assert all(torch.equal(applied, ranks[0][0]) for applied, _ in ranks), "one update on all ranks"
    total = ranks[0][0] + sum(residual for _, residual in ranks)
    assert torch.allclose(total, gradients.sum((0, 1)), rtol=0, atol=1e-10)
    assert kind == "dense" or ranks[0][1].abs().max() > 0.1, "something was left out"


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_message_has_the_bytes_of_its_formula(kind, n):
    def sent():
        compressor = KINDS[kind]()
        with compression.dp.Ledger() as ledger:
            compressor.reduce(drawn(n)[0, dist.get_rank()], dist.group.WORLD)
        return sum(ledger.sent.values()), compressor.sent(n, 8)

    for found, formula in on_ranks(n, sent):
        assert found == pytest.approx(formula, rel=1e-12)


@question("QK.3")
@pytest.mark.parametrize("numbers, n", [(1000, 2), (1000, 4), (1001, 4), (3, 8), (10**6, 1024)])
def test_top_k_pays_up_to_the_most_kept_and_no_further(numbers, n):
    dense = compression.Dense([(numbers,)]).sent(n)
    sent = lambda kept: compression.TopK([(numbers,)], kept).sent(n)
    most = compression.most_kept(numbers, n)
    assert sent(most) < dense <= sent(most + 1)


@question("QK.2")
def test_low_rank_is_torchs_own_hook_over_steps():
    """torch's PowerSGD averages; ours adds up, and goes on from the directions of torch's first."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    rows, columns, few = 12, 10, 2

    def steps():
        n, r = dist.get_world_size(), dist.get_rank()
        model = torch.nn.Linear(columns, rows, bias=False).double()
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        options = dict(min_compression_rate=0.5, orthogonalization_epsilon=0)
        state = power.PowerSGDState(dist.group.WORLD, few, start_powerSGD_iter=2, **options)
        ddp.register_comm_hook(state, power.powerSGD_hook)
        ours = compression.Feedback(compression.LowRank([(rows, columns)], few, least=0.5))
        errors = []
        for step in range(6):
            gradient = drawn(n, 6)[step, r, : rows * columns]
            ddp.zero_grad()
            x = torch.eye(columns, dtype=torch.float64)
            (ddp(x) * gradient.view(rows, columns).T).sum().backward()
            if step < 2:
                continue
            if step == 2:  # its first directions are drawn: go on from there
                ours.compressor.state["rights"] = [next(iter(state.q_memory_dict.values())).view(
                    columns, few).clone()]  # fmt: skip
                ours.residual_P = next(iter(state.error_dict.values())).flatten().clone()
                continue
            applied = ours.reduce(gradient, dist.group.WORLD) / n
            found = model.weight.grad.flatten()
            errors.append(((applied - found).abs().max() / found.abs().max()).item())
        return errors

    for errors in on_ranks(2, steps):
        assert len(errors) == 3 and max(errors) < 1e-10


def test_low_rank_of_a_matrix_of_that_rank_loses_nothing():
    a, b = torch.randn(2, 12, 2, generator=torch.Generator().manual_seed(3)).double()
    matrix = a @ b[:10].T

    def reduce():
        x = torch.cat([matrix.flatten(), torch.ones(7).double()])
        return compression.LowRank(SHAPES, 2).reduce(x, dist.group.WORLD)[0] - 2 * x

    assert on_ranks(2, reduce)[0].abs().max() < 1e-12


def test_signs_are_packed_eight_to_a_byte():
    x = torch.tensor([1.0, -2, 0, -0.5, 3, 3, -3, 3, -1])
    packed = compression.pack(x)
    assert packed.tolist() == [0b10110101, 0] and packed.dtype == torch.uint8
    scale = compression.mean_size(x)
    assert scale.item() == pytest.approx(16.5 / 9)
    signs = compression.unpack(packed, scale, 9).sign().tolist()
    assert signs == [1, -1, 1, -1, 1, 1, -1, 1, -1]


@pytest.mark.parametrize("least_loss", [0.9, 1.1])
def test_the_mean_size_is_the_scale_that_loses_least(least_loss):
    x = drawn(1)[0, 0]
    signs = torch.where(x >= 0, 1.0, -1.0)
    loss = lambda scale: (x - scale * signs).square().sum()
    best = compression.mean_size(x)
    assert loss(best) < loss(least_loss * best) and loss(best) <= (1 - 1 / P) * x.square().sum()


def test_places_of_random_k_are_the_same_on_all_ranks_and_change():
    one, two = compression.RandomK(SHAPES, 9), compression.RandomK(SHAPES, 9)
    assert torch.equal(one.places(3), two.places(3))
    assert not torch.equal(one.places(3), one.places(4))
    assert len(one.places(3).unique()) == 9 and one.places(3).max() < P


def test_places_that_ranks_draw_for_themselves_add_up_what_does_not_belong_together():
    """The j-th value of one rank is added to the j-th of another, which stands at another place."""
    x_nP = drawn(2, steps=1)[0]

    def reduce():
        compressor = compression.RandomK(SHAPES, 9)
        compressor.state["step"] = dist.get_rank()  # in place of one number for all ranks
        return compressor.reduce(x_nP[dist.get_rank()], dist.group.WORLD)[0]

    places = [compression.RandomK(SHAPES, 9).places(step) for step in range(2)]
    sums = x_nP[0, places[0]] + x_nP[1, places[1]]
    for applied_P, at in zip(on_ranks(2, reduce), places):
        torch.testing.assert_close(applied_P, torch.zeros(P).double().index_copy(0, at, sums))


def test_the_root_of_the_mean_square_is_no_scale_for_a_lonely_number():
    """Of one number in 64, the mean size leaves out 1 - 1/64 of the square; the root of the mean
    square leaves out 2 - 2/8, more than there was: its residual can grow from step to step."""
    x_P = torch.zeros(64, dtype=torch.float64)
    x_P[5] = 3.0

    def left_out(scale):
        own_P = compression.Sign([(64,)], scale).reduce(x_P, dist.group.WORLD)[1]
        return ((x_P - own_P).square().sum() / x_P.square().sum()).item()

    def both():
        return left_out(compression.mean_size), left_out(lambda x: x.square().mean().sqrt())

    assert on_ranks(1, both)[0] == pytest.approx((1 - 1 / 64, 2 - 2 / 8), rel=1e-12)


@pytest.mark.parametrize("N", [1, 2, 6, 64])
def test_waves_are_orthonormal_and_start_with_the_constant_one(N):
    waves = compression.waves(N)
    assert torch.allclose(waves @ waves.T, torch.eye(N, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(waves[0], torch.full((N,), N**-0.5, dtype=torch.float64))


@pytest.mark.reference
def test_waves_are_scipys_transform():
    from scipy.fft import dct

    x = drawn(1)[0, 0, :64]
    wanted = torch.from_numpy(dct(x.numpy(), norm="ortho"))
    assert torch.allclose(compression.waves(64) @ x, wanted, atol=1e-12)


@pytest.mark.parametrize("length, size", [(1, 1), (64, 64), (96, 48), (67, 1), (130, 26)])
def test_a_tile_divides_its_side(length, size):
    assert compression.tile(length) == size


def test_with_a_vote_a_number_moves_by_its_sign():
    def reduce():
        compressor = compression.DCT(SHAPES, kept=5, vote=True)
        return compressor.reduce(drawn(2)[0, dist.get_rank()], dist.group.WORLD)[0]

    one, two = on_ranks(2, reduce)
    assert torch.equal(one, two) and set(one.unique().tolist()) <= {-1.0, 0.0, 1.0}


@pytest.mark.parametrize("vote", [False, True])
def test_the_largest_waves_of_each_tile_are_those_of_one_process(vote):
    """By one matrix for a whole tile. With a vote, a wave's mean is over those ranks that sent it;
    a sum instead would give the wave of three ranks more weight than that of one."""
    gradient = drawn(3)[0]

    def reduce():
        compressor = compression.DCT(SHAPES, kept=5, vote=vote)
        return compressor.reduce(gradient[dist.get_rank()], dist.group.WORLD)

    applied, own = torch.zeros(P).double(), torch.zeros(3, P).double()
    for rows, columns, start in (12, 10, 0), (1, 7, 120):
        place = slice(start, start + rows * columns)
        change = torch.kron(compression.waves(rows), compression.waves(columns))
        waves = gradient[:, place] @ change.T
        least = waves.abs().sort(dim=1, descending=True).values[:, 4:5]
        sent = torch.where(waves.abs() >= least, waves, 0.0)
        own[:, place] = sent @ change
        senders = (sent != 0).sum(0).clamp(min=1) if vote else 1
        applied[place] = sent.sum(0) / senders @ change
    for rank, (found, found_own) in enumerate(on_ranks(3, reduce)):
        assert torch.allclose(found, applied.sign() if vote else applied, rtol=0, atol=1e-10)
        assert torch.allclose(found_own, own[rank], rtol=0, atol=1e-10)


@pytest.mark.parametrize("masking, second", [(False, [0, 1 + 1.9]), (True, [0, 2.9])])
def test_momentum_is_added_up_before_the_message(masking, second):
    """(2, 1): step 0 sends 2; the velocity of what was sent starts anew only where it is masked."""

    def steps():
        feedback = compression.Feedback(compression.TopK([(2,)], 1), 1.0, 0.9, masking)
        gradients = torch.tensor([[2.0, 1.0], [0.0, 1.0]]).double()
        return [feedback.reduce(g, dist.group.WORLD).tolist() for g in gradients]

    found = on_ranks(1, steps)[0]
    assert found == [[2, 0], pytest.approx(second)]


def adam_steps(resume):
    optimizer = compression.OneBitAdam([(P,)], warmup=2)
    weights, r = torch.zeros(P).double(), dist.get_rank()
    for step, gradient in enumerate(drawn(2, 6)):
        optimizer.step(weights, gradient[r], dist.group.WORLD)
        if step == resume:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = compression.OneBitAdam([(P,)], warmup=2)
            optimizer.load_state_dict(saved)
    return weights


@pytest.mark.parametrize("resume", [0, 1, 2, 4])
def test_one_bit_adam_goes_on_bit_by_bit(resume):
    wanted = on_ranks(2, adam_steps, None)
    assert all(map(torch.equal, on_ranks(2, adam_steps, resume), wanted))


def test_one_bit_adam_begins_as_adam_without_bias_correction_and_freezes_the_second_moment():
    def steps():
        optimizer, r = compression.OneBitAdam([(P,)], warmup=2, rate=0.1), dist.get_rank()
        weights, sent = torch.zeros(P).double(), []
        first = second = torch.zeros(P).double()
        for step, gradient in enumerate(drawn(2, 4)):
            with compression.dp.Ledger() as ledger:
                before = weights.clone()
                optimizer.step(weights, gradient[r], dist.group.WORLD)
            sent.append(sum(ledger.sent.values()))
            if step < 2:
                whole = gradient.sum(0)
                first = 0.9 * first + 0.1 * whole
                second = 0.999 * second + 0.001 * whole**2
                wanted = before - 0.1 * first / (second.sqrt() + 1e-8)
                assert torch.allclose(weights, wanted, atol=1e-12)
        assert torch.allclose(optimizer.second_P, second, atol=1e-15)
        return sent

    for sent in on_ranks(2, steps):
        assert sent[0] == sent[1] == 8 * P and sent[2] == sent[3] == 2 * 8 + 2 * 8


def test_one_bit_adam_is_that_of_one_process_which_has_all_ranks_gradients():
    n, warmup, gradients = 3, 3, drawn(3, 7)
    gradients[:, :, 100:] = 0.0  # untouched numbers: their second moment is 0, they never move

    def steps():
        optimizer, weights = compression.OneBitAdam(SHAPES, warmup), torch.zeros(P).double()
        for gradient in gradients:
            optimizer.step(weights, gradient[dist.get_rank()], dist.group.WORLD)
        return weights

    signs = lambda x: torch.where(x >= 0, 1.0, -1.0) * x.abs().mean(-1, keepdim=True)
    first = second = weights = torch.zeros(P).double()
    residual, rounding = torch.zeros(n, 100).double(), torch.zeros(100).double()
    for step, gradient in enumerate(gradients):
        if step < warmup:
            first = 0.9 * first + 0.1 * gradient.sum(0)
            second = 0.999 * second + 0.001 * gradient.sum(0) ** 2
        else:
            x = 0.9 * first[:100] / n + 0.1 * gradient[:, :100] + residual
            residual, sums = x - signs(x), signs(x).sum(0) + rounding
            moved = torch.cat([signs(chunk) for chunk in sums.split(40)])  # whole bytes on 3 ranks
            first, rounding = torch.cat([moved, torch.zeros(27)]), sums - moved
        weights = weights - 3e-3 * first / (second.sqrt() + 1e-8)
    for found in on_ranks(n, steps):
        assert torch.allclose(found, weights, rtol=0, atol=1e-10) and weights.abs().max() > 0.01


def test_compression_refuses_what_cannot_work():
    assert "1 rank: it has nobody to send to" in refusal(SCRIPT, "--ranks", 1)
    told = refusal(SCRIPT, "--keep", 0.5)
    assert "--keep 0.5" in told and math.isclose(0.1, float(told.split("at most ")[1].split()[0]),
                                                  abs_tol=1e-3)  # fmt: skip


@pytest.mark.slow
def test_every_method_trains(tmp_path):
    done = run_script(SCRIPT, "--steps", 40, torchrun=2, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    table = done.stdout.split("held-out loss")[1].splitlines()[1:]
    losses = {line[:26].strip(): float(line.split()[-3]) for line in table}
    assert len(losses) == 13 and losses["dense"] < 3.26, "the unigram entropy of the text"
    assert losses["dense"] < losses["top-k 1.00%"] < losses["top-k 1.00%, no residual"]
