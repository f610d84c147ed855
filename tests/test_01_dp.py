"""01_dp: gradients equal to one process, bytes equal to the formulas, and the reported faults."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from harness import ROOT, RankFailed, chapter, on_ranks, refusal, run_script
from torch import nn

dp = chapter("01_dp")
CPU = torch.device("cpu")
world = lambda: dist.group.WORLD
rank = lambda: dist.get_rank()
question = pytest.mark.question


# ── the ladder ───────────────────────────────────────────────────────────────────────────────


def rows():
    return list(dp.proof(world(), CPU))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_every_row_of_the_proof_is_as_claimed_on_every_rank(n):
    for row in (row for ranks in on_ranks(n, rows) for row in ranks):
        assert row.error == pytest.approx(row.wrong, rel=1e-6, abs=1e-10), row.name
        for measured, formula in filter(None, (row.sent, row.held)):
            assert measured == pytest.approx(formula, abs=0.5), row.name
        assert row.wrong == 0 or row.wrong > 0.01, f"{row.name} would not show"


@question("Q1.3")
def test_overlap_sends_before_the_last_gradient_and_waits_after_it():
    for order in on_ranks(2, lambda: dp.overlap_order(world(), CPU)):
        last = max(i for i, what in enumerate(order) if what == "gradient")
        assert order.index("all_reduce") < last < order.index("wait")


class Branches(nn.Module):
    """Two linear maps; `first` is the branch that a rank uses first."""

    def __init__(self, buffers=True):
        super().__init__()
        self.a, self.b = (nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in range(2))
        self.register_buffer("mean", torch.zeros(3) + dist.get_rank() * buffers)


@question("Q1.3")
def test_buckets_leave_in_one_order_whatever_order_their_gradients_arrive_in():
    def step():
        torch.manual_seed(0)
        model = dp.DataParallel(Branches(), world(), bucket_mb=1e-6)
        a, b = model.module.a, model.module.b
        x = torch.full((1, 3), rank() + 1.0, dtype=torch.float64)
        for first, second in [[(a, b), (b, a)][rank()]]:
            with dp.Ledger() as ledger:
                first(x).sum().backward()  # on rank 1 the first bucket's, on rank 0 the second's
                early = ledger.sent["all_reduce"]
                second(x * 10).sum().backward()
                model.finish_gradient_synchronization()
        return early, a.weight.grad[0, 0].item(), b.weight.grad[0, 0].item()

    assert on_ranks(2, step) == [(0, 21, 12), (72, 21, 12)]


@question("Q1.4")
@pytest.mark.parametrize("overlap", [True, False])
def test_each_bucket_is_reduced_once_a_step_and_never_inside_no_sync(overlap):
    def step():
        model = dp.DataParallel(dp.tiny_model(CPU), world(), bucket_mb=0.05, overlap=overlap)
        batch = dp.proof_batch(2, CPU, K=4)[rank()]
        calls = []
        for _ in range(2):
            with dp.Ledger() as ledger:
                with model.no_sync():
                    for micro_batch in batch[:3]:
                        dp.loss_and_gradients(model, *micro_batch, 1)
                assert not ledger.events
                dp.loss_and_gradients(model, *batch[3], 1)
                model.finish_gradient_synchronization()
            calls.append([e.what for e in ledger.events].count("all_reduce"))
        return calls == [len(model.buckets)] * 2 and len(model.buckets) > 3

    assert on_ranks(2, step) == [True, True]


@question("Q1.4")
def test_no_sync_ends_where_its_block_ends_even_by_an_exception():
    def leave():
        model = dp.DataParallel(nn.Linear(2, 2), world())
        try:
            with model.no_sync():
                assert not model.synchronizing
                raise KeyError
        except KeyError:
            return model.synchronizing

    assert on_ranks(1, leave) == [True]


def test_gradients_are_views_of_their_buckets_not_copies():
    def step(set_to_none):
        model = dp.DataParallel(dp.tiny_model(CPU), world(), bucket_mb=0.05)
        flats = {bucket.flat.untyped_storage().data_ptr() for bucket in model.buckets}
        for micro_batch in dp.proof_batch(2, CPU)[rank()][:2]:
            dp.loss_and_gradients(model, *micro_batch, 1)
            model.finish_gradient_synchronization()
            storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
            assert storages == flats
            model.zero_grad(set_to_none=set_to_none)

    on_ranks(2, step, True)
    on_ranks(2, step, False)


def test_buckets_are_filled_from_the_last_parameter_and_hold_one_dtype():
    sizes = [(10, torch.float32), (20, torch.float32), (30, torch.bfloat16), (40, torch.float32)]
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in sizes]
    buckets = dp.fill_buckets(parameters, bucket_mb=250e-6)
    assert [[len(p) for p in b.views] for b in buckets] == [[40, 20], [30], [10]]
    assert [b.flat.dtype for b in buckets] == [torch.float32, torch.bfloat16, torch.float32]


# ── by hand ──────────────────────────────────────────────────────────────────────────────────


def all_reduce_every_size(how):
    n, results = dist.get_world_size(), []
    for numel in [0, 1, 2, n - 1, n, n + 1, 3 * n + 1, 1000]:
        x = torch.arange(numel, dtype=torch.float64) * (rank() + 1)
        with dp.Ledger() as ledger:
            how(x, world())
        assert torch.equal(x, torch.arange(numel) * (n * (n + 1) / 2)), numel
        results.append((numel, ledger.sent["isend"]))
    return results


@question("Q1.5")
@question("Q1.6")
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_the_ring_sums_any_numel_and_sends_twice_all_but_two_chunks(n):
    ranks = on_ranks(n, partial(all_reduce_every_size, dp.ring_all_reduce))
    for (numel, *sent) in zip([size for size, _ in ranks[0]], *([b for _, b in r] for r in ranks)):
        assert sum(sent) == 2 * (n - 1) * numel * 8, "over all ranks: 2(n-1) numel"
        assert max(sent) - min(sent) <= 16


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_naive_sum_loads_rank_0_alone(n):
    ranks = on_ranks(n, partial(all_reduce_every_size, dp.gather_and_broadcast))
    for r, results in enumerate(ranks):
        assert all(sent == numel * 8 * (n - 1 if r == 0 else 1 % n) for numel, sent in results)


def test_nothing_leaves_the_group_that_was_given():
    """Ranks 1 and 3 of four add up and start alike; what 0 and 2 have, and send, is untouched."""

    def step():
        group = dist.new_group([1, 3])
        if rank() % 2 == 0:
            return None
        peers = {name: torch.full((5,), rank() + 1.0) for name in ("ring", "naive")}
        dp.ring_all_reduce(peers["ring"], group)
        dp.gather_and_broadcast(peers["naive"], group)
        torch.manual_seed(rank())
        linear = nn.Linear(2, 1)
        with dp.Ledger() as ledger:
            parallel = dp.DataParallel(linear, group)
            parallel(torch.ones(1, 2)).sum().backward()
            parallel.finish_gradient_synchronization()
            dp.all_reduce_gradients(linear, group)
        sums = [x.tolist() for x in peers.values()]
        start = [p.sum().item() for p in linear.parameters()]
        return sums, start, linear.weight.grad.tolist(), dict(+ledger.sent)

    one, two, three, four = on_ranks(4, step)
    assert one is three is None and two == four
    assert two[0] == [[6.0] * 5] * 2 and two[2] == [[4.0, 4.0]]
    assert two[3] == {"broadcast": 6.0, "all_reduce": 24.0}, "n is the group's, not the world's"


# ── what a module may be ─────────────────────────────────────────────────────────────────────


@question("Q1.2")
def test_parameters_and_buffers_start_as_rank_0_has_them():
    def start():
        torch.manual_seed(rank())
        model = dp.DataParallel(nn.Sequential(nn.Linear(3, 3), Branches()), world())
        return {name: tensor.sum().item() for name, tensor in model.state_dict().items()}

    first, *others = on_ranks(3, start)
    assert others == [first, first] and first["module.1.mean"] == 0


def test_mean_is_the_convention_of_torchs_own():
    def both():
        batch = dp.proof_batch(2, CPU)[rank()][0]
        ours, theirs = dp.tiny_model(CPU), dp.tiny_model(CPU)
        parallel = dp.DataParallel(ours, world(), reduction="mean")
        dp.loss_and_gradients(parallel, *batch, 7.0)
        parallel.finish_gradient_synchronization()
        dp.loss_and_gradients(nn.parallel.DistributedDataParallel(theirs), *batch, 7.0)
        pairs = zip(ours.parameters(), theirs.parameters())
        return all(torch.equal(a.grad, b.grad) for a, b in pairs)

    assert on_ranks(2, both) == [True, True]


def test_a_tied_parameter_is_reduced_once_and_a_frozen_one_never():
    def step():
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        model[1].bias.requires_grad_(False)
        nn.init.ones_(model[0].weight)
        parallel = dp.DataParallel(model, world())
        with dp.Ledger() as ledger:
            parallel(torch.ones(1, 2)).sum().backward()
            parallel.finish_gradient_synchronization()
        return ledger.sent["all_reduce"], model[0].weight.grad.tolist(), model[1].bias.grad

    # y = W W x: dL/dW = both uses, 2 + 2 in each entry, and of two ranks
    assert on_ranks(2, step) == [(16, [[8, 8], [8, 8]], None)] * 2


def test_bf16_gradients_are_added_in_the_reduce_dtype():
    def step(reduce_dtype):
        model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        parallel = dp.DataParallel(model, world(), reduce_dtype=reduce_dtype)
        with dp.Ledger() as ledger:
            x = 1.0 if rank() == 0 else 2**-8
            parallel(torch.tensor([[x]], dtype=torch.bfloat16)).backward()
            parallel.finish_gradient_synchronization()
        return model.weight.grad.item(), model.weight.grad.dtype, ledger.sent["all_reduce"]

    # 1 + 7 / 256 = 1.02734375, once rounded to bf16
    assert on_ranks(8, step, torch.float32) == [(1.03125, torch.bfloat16, 7.0)] * 8
    assert {sent for _, _, sent in on_ranks(8, step, None)} == {3.5}


def test_two_gradients_in_a_step_are_refused_by_name():
    def twice():
        model = dp.DataParallel(nn.Linear(2, 2), world())
        model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()

    with pytest.raises(RankFailed, match="weight got two gradients.*no_sync|bias got two"):
        on_ranks(2, twice)


# ── reported faults (dp-01 to dp-05) ─────────────────────────────────────────────────────────


@question("Q1.1")
@pytest.mark.parametrize("split", [(4, 3, 3), (10, 0, 0), (9, 1, 0), (4, 4, 2)])
def test_dp_01_samples_weigh_the_same_on_whatever_rank_they_are(split):
    """y = w x of x = 1..10 at w = 1, mean of y²: dL/dw = 2 · 38.5 = 77."""

    def step():
        x = torch.arange(1.0, 11, dtype=torch.float64).split(split)[rank()]
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.ones_(model.weight)
        parallel = dp.DataParallel(model, world())
        valid = dp.valid_tokens(torch.zeros(len(x)), world())
        (parallel(x[:, None]).square().sum() / valid).backward()
        parallel.finish_gradient_synchronization()
        return model.weight.grad.item()

    assert on_ranks(3, step) == pytest.approx([77.0] * 3, abs=1e-12)


class Bias(nn.Module):
    """Logits that are parameters, whatever the token: cross-entropy known in closed form."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64))

    def forward(self, x_bS):
        return self.logits.expand(*x_bS.shape, 3)


@question("Q1.1")
@pytest.mark.parametrize("ranks", [1, 2])
def test_dp_02_tokens_weigh_the_same_in_whatever_micro_batch_they_are(ranks):
    """Counts of valid labels [[1, 3], [2, 6]] over ranks and micro-batches; -100 does not count."""
    labels = [[[0], [1, 1, 2]], [[2, 2], [1, 0, 2, 2, 2, 2]]]

    def step():
        mine = labels if ranks == 1 else labels[rank() : rank() + 1]
        y = [torch.tensor([row + [-100] * (6 - len(row))]) for part in mine for row in part]
        parallel = dp.DataParallel(Bias(), world())
        valid = dp.valid_tokens(torch.cat(y), world())
        loss = dp.accumulate(parallel, [(y_bS, y_bS) for y_bS in y], valid)
        dist.all_reduce(loss)
        return valid.item(), loss.item(), parallel.module.logits.grad.tolist()

    all_labels = torch.tensor([label for part in labels for row in part for label in row])
    twin = Bias()
    wanted = nn.functional.cross_entropy(twin(all_labels), all_labels)
    wanted.backward()
    for valid, loss, gradient in on_ranks(ranks, step):
        assert valid == 12
        assert loss == pytest.approx(wanted.item(), abs=1e-14)
        assert gradient == pytest.approx(twin.logits.grad.tolist(), abs=1e-14)


def test_dp_03_a_short_last_window_weighs_its_own_tokens():
    """Five equal micro-batches in windows of 2, 2 and 1: one loss, one gradient, three times."""

    def windows():
        parallel, y = dp.DataParallel(Bias(), world()), torch.tensor([[0, 1]])
        for size in (2, 2, 1):
            window = [(y, y)] * size
            loss = dp.accumulate(parallel, window, dp.valid_tokens(y.repeat(size, 1), world()))
            yield loss.item() * dist.get_world_size(), parallel.module.logits.grad.norm().item()
            parallel.zero_grad()

    (first, second, third), _ = on_ranks(2, lambda: list(windows()))
    assert second == pytest.approx(first, abs=1e-14) and third == pytest.approx(first, abs=1e-14)


@question("Q1.4")
@pytest.mark.parametrize("around_forward", [True, False])
def test_dp_04_ranks_stay_identical_however_no_sync_is_placed(around_forward):
    def step():
        parallel = dp.DataParallel(dp.tiny_model(CPU), world(), bucket_mb=0.05)
        batch, total = dp.proof_batch(2, CPU, K=4), torch.tensor(50.0)
        *first, last = batch[rank()]
        for x, y in first:
            if around_forward:
                with parallel.no_sync():
                    dp.loss_and_gradients(parallel, x, y, total)
            else:
                logits = parallel(x)
                lost = nn.functional.cross_entropy(
                    logits.flatten(0, 1), y.flatten(), reduction="sum"
                )
                with parallel.no_sync():
                    (lost / total).backward()
        dp.loss_and_gradients(parallel, *last, total)
        parallel.finish_gradient_synchronization()
        model = dp.tiny_model(CPU)
        _, wanted = dp.serial([(model, b, total) for part in batch for b in part])
        gradients = [p.grad for p in parallel.parameters()]
        return dp.off(gradients, wanted), torch.cat([g.flatten() for g in gradients])

    (error, ours), (other_error, theirs) = on_ranks(2, step)
    assert max(error, other_error) < 1e-12 and torch.equal(ours, theirs)


def branch_step(find_unused):
    torch.manual_seed(0)
    parallel = dp.DataParallel(Branches(), world(), bucket_mb=1e-6, find_unused=find_unused)
    branch = [parallel.module.a, parallel.module.b][rank()]
    (branch(torch.ones(1, 3, dtype=torch.float64)).sum() * (rank() + 1)).backward()
    parallel.finish_gradient_synchronization()
    return [p.grad[0, 0].item() for p in parallel.parameters()]


def test_dp_05_a_branch_that_one_rank_uses_counts_as_zero_on_the_other_if_so_declared():
    assert on_ranks(2, branch_step, True) == [[1, 2], [1, 2]]


def test_dp_05_and_keeps_counting_as_zero_in_the_next_step():
    def steps():
        parallel = dp.DataParallel(Branches(), world(), bucket_mb=1e-6, find_unused=True)
        for _ in range(2):
            parallel.zero_grad()
            branch = [parallel.module.a, parallel.module.b][rank()]
            branch(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
            parallel.finish_gradient_synchronization()
        return [p.grad[0, 0].item() for p in parallel.parameters()]

    assert on_ranks(2, steps) == [[1, 1], [1, 1]]


def test_dp_05_and_is_an_error_with_names_and_rank_if_not():
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank [01]: no gradient for (a|b)\.weight.*find_unused"):
        on_ranks(2, branch_step, False, timeout=20)
    assert time.monotonic() - started < 10


# ── as a user runs it ────────────────────────────────────────────────────────────────────────


def test_three_ranks_share_a_batch_that_three_does_not_divide():
    done = run_script(ROOT / "01_dp.py", "--ranks", 3, "--batch", 4, "--steps", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on every rank" in done.stdout


@pytest.mark.parametrize("wrong, says", [
    (["--batch", 0], "--batch 0"),
    (["--micro-batches", 0], "--micro-batches 0"),
    (["--bucket-mb", "nan"], "--bucket-mb nan"),
    (["--timeout", -1], "--timeout -1"),
])  # fmt: skip
def test_wrong_numbers_are_sentences(wrong, says):
    assert says in refusal(ROOT / "01_dp.py", *wrong)


@pytest.mark.slow
def test_the_run_learns_and_repeats_itself_bit_for_bit():
    """Below the unigram entropy in 40 steps; the same digits and weights on any launcher."""

    def digits(steps, torchrun=0):
        done = run_script(ROOT / "01_dp.py", "--steps", steps, "--ranks", 2, torchrun=torchrun)
        assert done.returncode == 0, done.stdout + done.stderr
        *table, weights = done.stdout.splitlines()[-3:]
        return [line.split()[:2] for line in table] + [weights]

    assert float(digits(40)[-2][1]) < 3.26
    assert digits(11) == digits(11) == digits(11, torchrun=2)


@pytest.mark.slow
def test_the_timeline_is_drawn(tmp_path):
    picture = tmp_path / "timeline.png"
    done = run_script(ROOT / "01_dp.py", "--ranks", 2, "--plot", picture)
    assert done.returncode == 0 and picture.stat().st_size > 10_000
