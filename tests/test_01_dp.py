"""01_dp: gradients equal to one process, bytes equal to the formulas, and the reported faults."""

import copy
import importlib.util
import re
import time
from argparse import Namespace
from functools import partial
from unittest.mock import patch

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


def test_the_twin_sees_no_later_byte_and_all_earlier_ones():
    model = dp.tiny_model(CPU)
    x_bS = torch.arange(16)[None]
    before = model(x_bS)
    for s in range(16):
        other = x_bS.clone()
        other[0, s] = 200
        changed = (model(other) != before).any(-1)[0]
        assert changed.tolist() == [False] * s + [True] * (16 - s)


def test_the_proofs_batch_has_unequal_parts():
    with pytest.raises(AssertionError, match="trivial"):
        with patch.object(dp.torch, "randint", lambda high, *_, **__: torch.zeros(2, 9, 16).long()):
            dp.proof_batch(2, CPU)


@question("Q1.3")
@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_sends_before_the_last_gradient_and_waits_after_it(overlap):
    for gradients, calls, waits in on_ranks(
        2, lambda: dp.order_of_events(world(), CPU, 0.05, overlap)
    ):
        assert len(calls) == len(waits) > 3 and min(waits) > gradients[-1]
        early = sum(call < gradients[-1] for call in calls)
        assert early >= len(calls) - 2 if overlap else early == 0


class Branches(nn.Module):
    """Two linear maps, used apart; a buffer that starts apart on each rank."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in range(2))
        self.register_buffer("mean", torch.zeros(3) + dist.get_rank())

    def forward(self, x, branch):
        return getattr(self, branch)(x)


ONES = torch.ones(1, 3, dtype=torch.float64)


@question("Q1.3")
def test_buckets_leave_in_one_order_whatever_order_their_gradients_arrive_in():
    def step():
        torch.manual_seed(0)
        model = dp.DataParallel(Branches(), world(), bucket_mb=1e-6)
        first, second = ("ab", "ba")[rank()]  # b's bucket is the first one
        with dp.Ledger() as ledger:
            model(ONES * (rank() + 1), first).sum().backward()
            early = ledger.sent["all_reduce"]
            model(ONES * (rank() + 1) * 10, second).sum().backward()
            model.finish_gradient_synchronization()
        return early, *(p.grad[0, 0].item() for p in model.parameters())

    assert on_ranks(2, step) == [(0, 21, 12), (72, 21, 12)]


@question("Q1.4")
@pytest.mark.parametrize("overlap", [True, False])
def test_each_bucket_is_reduced_once_a_step_and_never_inside_no_sync(overlap):
    def step():
        model = dp.DataParallel(dp.tiny_model(CPU), world(), bucket_mb=0.05, overlap=overlap)
        batch = dp.proof_batch(2, CPU, m=4)[rank()]
        calls = []
        for _ in range(2):
            with dp.Ledger() as ledger:
                with model.no_sync():
                    for micro_batch in batch[:3]:
                        dp.loss_share(model, *micro_batch, 1).backward()
                assert not ledger.events
                dp.loss_share(model, *batch[3], 1).backward()
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


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_views_of_their_buckets_not_copies(set_to_none):
    def step():
        model = dp.DataParallel(dp.tiny_model(CPU), world(), bucket_mb=0.05)
        flats = {bucket.flat.untyped_storage().data_ptr() for bucket in model.buckets}
        for micro_batch in dp.proof_batch(2, CPU)[rank()][:2]:
            dp.loss_share(model, *micro_batch, 1).backward()
            model.finish_gradient_synchronization()
            storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
            assert storages == flats
            model.zero_grad(set_to_none=set_to_none)

    on_ranks(2, step)


@pytest.mark.parametrize("dtype, contents", [
    (None, [[40, 20], [30], [10]]),  # of 250 bytes: 40 and 20 floats, 30 halves, 10 floats
    (torch.float64, [[40], [30], [20, 10]]),  # 320, 240 and 240 bytes
])  # fmt: skip
def test_buckets_are_filled_from_the_last_parameter_and_hold_one_dtype(dtype, contents):
    sizes = [(10, torch.float32), (20, torch.float32), (30, torch.bfloat16), (40, torch.float32)]
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in sizes]
    buckets = dp.fill_buckets(parameters, 250e-6, dtype)
    assert [[len(p) for p in b.views] for b in buckets] == contents
    assert all(len(b.flat) == sum(map(len, b.views)) for b in buckets)
    assert {b.flat.dtype for b in buckets} == {dtype} if dtype else {torch.float32, torch.bfloat16}


def test_a_bucket_of_one_mb_holds_a_million_bytes():
    count = lambda numel: len(dp.fill_buckets([nn.Parameter(torch.zeros(numel))] * 2, 1))
    assert (count(125_000), count(125_001)) == (1, 2)


def test_a_gradient_that_is_missing_is_named_before_anything_is_sent():
    def reduce(how):
        model = Branches()
        model(ONES, "a").sum().backward()
        getattr(dp, how)(model, world())

    for how in "all_reduce_gradients", "all_reduce_flat":
        with pytest.raises(RankFailed, match="no gradient for b.weight"):
            on_ranks(2, reduce, how)


# ── by hand ──────────────────────────────────────────────────────────────────────────────────


def all_reduce_every_size():
    n, results = dist.get_world_size(), []
    for numel in [0, 1, 2, n - 1, n, n + 1, 3 * n + 1, 1000]:
        x = torch.arange(numel, dtype=torch.float64) * (rank() + 1)
        with dp.Ledger() as ledger:
            dp.ring_all_reduce(x, world())
        assert torch.equal(x, torch.arange(numel) * (n * (n + 1) / 2)), numel
        results.append((numel, ledger.sent["isend"]))
    return results


@question("Q1.5")
@question("Q1.6")
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_the_ring_sums_any_numel_and_sends_twice_all_but_two_chunks(n):
    ranks = on_ranks(n, all_reduce_every_size)
    for numel, *sent in zip([size for size, _ in ranks[0]], *([b for _, b in r] for r in ranks)):
        assert sum(sent) == 2 * (n - 1) * numel * 8, "over all ranks: 2(n-1) numel"
        assert max(sent) - min(sent) <= 16


def test_the_ring_goes_as_its_comment_shows():
    def chunks_sent():
        sent, send = [], dp.pass_on
        note = lambda outgoing, *rest: (
            sent.append(outgoing.storage_offset()) or send(outgoing, *rest)
        )
        with patch.object(dp, "pass_on", note):
            dp.ring_all_reduce(torch.zeros(4), world())
        return sent

    shown = re.findall(r"step \d   (\d \d \d \d)\b", (ROOT / "01_dp.py").read_text())
    by_step = zip(*on_ranks(4, chunks_sent))
    assert [" ".join(map(str, chunks)) for chunks in by_step] == shown


def test_nothing_leaves_the_group_that_was_given():
    """Ranks 1 and 3 of four add up and start alike; what 0 and 2 have, and send, is untouched."""

    def step():
        group = dist.new_group([1, 3])
        if rank() % 2 == 0:
            return None
        x = torch.full((5,), rank() + 1.0)
        dp.ring_all_reduce(x, group)
        torch.manual_seed(rank())
        linear = nn.Linear(2, 1)
        parallel = dp.DataParallel(linear, group)
        start = [p.sum().item() for p in linear.parameters()]
        with dp.Ledger() as ledger:
            parallel(torch.ones(1, 2)).sum().backward()
            parallel.finish_gradient_synchronization()
            dp.all_reduce_gradients(linear, group)
        return x.tolist(), start, linear.weight.grad.tolist(), dict(+ledger.sent)

    one, two, three, four = on_ranks(4, step)
    assert one is three is None and two == four
    assert two[0] == [6.0] * 5 and two[2] == [[4.0, 4.0]]
    assert two[3] == {"all_reduce": 24.0}, "n is the group's, not the world's"


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
        dp.loss_share(parallel, *batch, 7.0).backward()
        parallel.finish_gradient_synchronization()
        torchs = nn.parallel.DistributedDataParallel(theirs)
        dp.loss_share(torchs, *batch, 7.0).backward()
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


def bf16_step(reduce_dtype, gradients_by_rank, steps=1):
    """Gradient of a bf16 weight from micro-batches with these gradients, and the bytes sent."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    parallel = dp.DataParallel(model, world(), reduce_dtype=reduce_dtype)
    *first, last = torch.tensor(gradients_by_rank[rank()]).bfloat16()
    for _ in range(steps):
        parallel.zero_grad()
        with dp.Ledger() as ledger:
            with parallel.no_sync():
                for x in first:
                    parallel(x[None]).backward()
            parallel(last[None]).backward()
            parallel.finish_gradient_synchronization()
    return model.weight.grad.item(), model.weight.grad.dtype, ledger.sent["all_reduce"]


def test_bf16_gradients_of_ranks_are_added_in_the_reduce_dtype():
    gradients = [[1.0]] + [[2.0**-8]] * 7
    # 1 + 7 / 256 = 1.02734375, once rounded to bf16
    assert on_ranks(8, bf16_step, torch.float32, gradients) == [(1.03125, torch.bfloat16, 7.0)] * 8
    assert {sent for _, _, sent in on_ranks(8, bf16_step, None, gradients)} == {3.5}


@pytest.mark.parametrize("steps", [1, 2])
def test_bf16_gradients_of_micro_batches_are_added_in_the_reduce_dtype(steps):
    gradients = [[1.0] + [2.0**-9] * 8, [0.0]]
    (first, *_), (second, *_) = on_ranks(2, bf16_step, torch.float32, gradients, steps)
    assert first == second == 1.015625  # 1 + 8 / 512
    assert on_ranks(2, bf16_step, None, gradients, steps)[0][0] == 1.0, "bf16 loses each of them"


def test_two_gradients_in_a_step_are_refused_by_name():
    def twice():
        model = dp.DataParallel(nn.Linear(2, 2), world())
        model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()

    with pytest.raises(RankFailed, match="weight got two gradients.*no_sync|bias got two"):
        on_ranks(2, twice)


# ── ranks that differ, and what people do between steps ──────────────────────────────────────


class Other(nn.Module):
    """Two numbers; a rank may register them in another order, shape or dtype, or freeze one."""

    def __init__(self, names="ab", shape=(1,), dtype=torch.float32, frozen=""):
        super().__init__()
        for name in names:
            tensor = torch.zeros(shape, dtype=dtype)
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=name not in frozen))


@pytest.mark.parametrize("options, says", [
    (dict(names="ba"), r"rank 1 has b \(1,\).*rank 0 has a \(1,\)"),
    (dict(names="a"), "rank 1 has no more, rank 0 has b"),
    (dict(shape=(2,)), r"rank 1 has a \(2,\).*rank 0 has a \(1,\)"),
    (dict(dtype=torch.float16), "rank 1 has a.*float16.*rank 0 has a.*float32"),
    (dict(frozen="b"), "rank 1 has b.*requires_grad=False.*rank 0 has b.*requires_grad=True"),
    (dict(bucket_mb=1), "rank 1 has bucket_mb=1 .*rank 0 has bucket_mb=25"),
    (dict(reduction="mean"), "rank 1 has .*reduction='mean'.*rank 0 has .*reduction='sum'"),
])  # fmt: skip
def test_ranks_with_other_models_or_options_are_told_the_first_difference(options, says):
    def wrap():
        here = dict(options) if rank() else {}
        wrapping = {key: here.pop(key) for key in ("bucket_mb", "reduction") if key in here}
        dp.DataParallel(Other(**here), world(), **wrapping)

    with pytest.raises(RankFailed, match=f"ranks disagree: {says}"):
        on_ranks(2, wrap)


def adamw_steps(freeze_after=None, branch=lambda step: "a", steps=3, **options):
    """Weights a and b, 1 at first, after AdamW on a's branch; and the gradients left."""
    model = Branches()
    for weight in (model.a.weight, model.b.weight):
        nn.init.ones_(weight)
    parallel = dp.DataParallel(model, world(), find_unused=True, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    weights = []
    for step in range(steps):
        optimizer.zero_grad()
        parallel(ONES, branch(step)).sum().backward()
        parallel.finish_gradient_synchronization()
        optimizer.step()
        weights.append((model.a.weight[0, 0].item(), model.b.weight[0, 0].item()))
        if step == freeze_after:
            model.a.weight.requires_grad_(False)
    return weights, [p.grad is None for p in model.parameters()]


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_a_parameter_that_no_rank_uses_keeps_no_gradient_and_does_not_decay(reduce_dtype):
    for weights, no_gradient in on_ranks(2, partial(adamw_steps, reduce_dtype=reduce_dtype)):
        assert no_gradient == [False, True]
        assert [b for _, b in weights] == [1.0] * 3 and weights[2][0] < 0.8


def test_a_parameter_that_one_rank_uses_moves_on_all():
    ranks = on_ranks(2, lambda: adamw_steps(branch=lambda step: "ab"[rank()]))
    assert ranks[0] == ranks[1] and ranks[0][1] == [False, False]
    assert all(weight < 0.8 for weight in ranks[0][0][-1])


def test_a_parameter_that_is_frozen_after_wrapping_stays():
    branch = lambda step: "a" if step == 0 else "b"
    for weights, no_gradient in on_ranks(2, lambda: adamw_steps(0, branch)):
        assert weights[0][0] == weights[1][0] == weights[2][0] != 1
        assert no_gradient == [True, False]


@pytest.mark.parametrize("find_unused", [True, False])
def test_a_parameter_that_is_unfrozen_after_wrapping_is_summed(find_unused):
    def step():
        model = Other(frozen="a")
        parallel = dp.DataParallel(model, world(), find_unused=find_unused)
        model.a.requires_grad_(True)
        for _ in range(2):
            parallel.zero_grad()
            ((model.a.sum() + model.b.sum()) * (1 + rank())).backward()
            parallel.finish_gradient_synchronization()
            yield model.a.grad.item(), model.b.grad.item()

    assert on_ranks(2, lambda: list(step())) == [[(3.0, 3.0)] * 2] * 2


def test_a_parameter_that_one_rank_alone_unfreezes_is_told():
    def differ():
        parallel = dp.DataParallel(Other(frozen="ab"), world())
        for name in "ab"[: 1 + rank()]:
            getattr(parallel.module, name).requires_grad_(True)
        sum(p.sum() for p in parallel.parameters()).backward()
        parallel.finish_gradient_synchronization()

    with pytest.raises(RankFailed, match="rank 1 has unfrozen b, rank 0 has no more"):
        on_ranks(2, differ)


def test_a_copy_of_the_wrapped_model_averages_weights():
    def average():
        parallel = dp.DataParallel(Other(), world())
        mean = torch.optim.swa_utils.AveragedModel(parallel)
        for value in 1.0, 2.0:
            nn.init.constant_(parallel.module.a, value)
            mean.update_parameters(parallel)
        return copy.deepcopy(mean).module.a.item()

    assert on_ranks(2, average) == [1.5, 1.5]


def test_a_second_reduction_of_one_backward_is_refused():
    def twice():
        parallel = dp.DataParallel(nn.Linear(2, 2), world(), find_unused=True)
        parallel(torch.ones(1, 2)).sum().backward()
        parallel.finish_gradient_synchronization()
        parallel.finish_gradient_synchronization()

    with pytest.raises(RankFailed, match="rank [01]: no backward since the last reduction.*join"):
        on_ranks(2, twice)


def two_models(overlap):
    a, b = Other("a"), Other("b")
    parallel = [dp.DataParallel(model, world(), overlap=overlap) for model in (a, b)]
    backward = [
        lambda: (a.a * (1 + rank())).backward(),
        lambda: (b.b * 10 * (1 + rank())).backward(),
    ]
    for go in backward if rank() == 0 else reversed(backward):
        go()
    for model in parallel:
        model.finish_gradient_synchronization()
    return a.a.grad.item(), b.b.grad.item()


def test_two_models_on_one_group_are_never_added_to_each_other():
    assert on_ranks(2, two_models, False) == [(3.0, 30.0)] * 2
    with pytest.raises(RankFailed, match="two DataParallel of one group would mix up"):
        on_ranks(2, two_models, True)


def test_two_models_take_turns():
    def turns():
        sums = []
        for model in [dp.DataParallel(Other("a"), world()) for _ in range(2)]:
            model.module.a.sum().backward()
            model.finish_gradient_synchronization()
            sums.append(model.module.a.grad.item())
        return sums

    assert on_ranks(2, turns) == [[2.0, 2.0]] * 2


def test_a_sparse_gradient_is_summed():
    def step():
        model = nn.Embedding(3, 2, sparse=True)
        parallel = dp.DataParallel(model, world())
        with parallel.no_sync():
            parallel(torch.tensor([0])).sum().backward()
        parallel(torch.tensor([rank()])).sum().backward()
        parallel.finish_gradient_synchronization()
        return model.weight.grad.tolist()

    assert on_ranks(2, step) == [[[3.0, 3.0], [1.0, 1.0], [0.0, 0.0]]] * 2


class Fails(torch.autograd.Function):
    """Backward ends in an exception."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d_x):
        raise MemoryError


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
def test_a_step_that_an_exception_ended_can_be_started_again(reduce_dtype):
    def step():
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        for weight in model.parameters():
            nn.init.constant_(weight, 2.0)
        parallel = dp.DataParallel(model, world(), bucket_mb=1e-9, reduce_dtype=reduce_dtype)
        x = torch.ones(1, 1)
        with parallel.no_sync():
            parallel(x).sum().backward()
        try:
            model[1](Fails.apply(model[0](x))).sum().backward()
        except MemoryError:
            parallel.zero_grad()
        parallel(x).sum().backward()
        parallel.finish_gradient_synchronization()
        return [p.grad.item() for p in model.parameters()]

    assert on_ranks(2, step) == [[4.0, 4.0]] * 2  # y = w v x: 2 of each rank


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
        num_labels = dp.valid_tokens(torch.zeros(len(x)), world())
        (parallel(x[:, None]).square().sum() / num_labels).backward()
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


def loss_and_gradient(labels):
    """The mean cross-entropy of Bias on labels in a list, and its gradient."""
    model, labels = Bias(), torch.tensor(labels)
    loss = nn.functional.cross_entropy(model(labels), labels)
    loss.backward()
    return loss.item(), model.logits.grad.tolist()


@question("Q1.1")
@pytest.mark.parametrize("ranks", [1, 2])
def test_dp_02_tokens_weigh_the_same_in_whatever_micro_batch_they_are(ranks):
    """Counts of valid labels [[1, 3], [2, 6]] over ranks and micro-batches; -100 does not count."""
    labels = [[[0], [1, 1, 2]], [[2, 2], [1, 0, 2, 2, 2, 2]]]

    def step():
        parts = labels if ranks == 1 else labels[rank() : rank() + 1]
        y = [torch.tensor([row + [-100] * (6 - len(row))]) for part in parts for row in part]
        parallel = dp.DataParallel(Bias(), world())
        num_labels = dp.valid_tokens(torch.cat(y), world())
        loss = dp.accumulate(parallel, [(y_bS, y_bS) for y_bS in y], num_labels)
        dist.all_reduce(loss)
        return num_labels.item(), loss.item(), parallel.module.logits.grad.tolist()

    loss, gradient = loss_and_gradient([label for part in labels for row in part for label in row])
    for num_labels, loss_here, gradient_here in on_ranks(ranks, step):
        assert num_labels == 12
        assert loss_here == pytest.approx(loss, abs=1e-14)
        assert gradient_here == pytest.approx(gradient, abs=1e-14)


@question("Q1.1")
def test_dp_03_a_short_last_window_weighs_its_own_tokens():
    """Five equal micro-batches in windows of 2, 2 and 1: one loss, one gradient, three times."""

    def windows():
        parallel, y = dp.DataParallel(Bias(), world()), torch.tensor([[0, 1]])
        for size in (2, 2, 1):
            num_labels = dp.valid_tokens(y.repeat(size, 1), world())
            loss = dp.accumulate(parallel, [(y, y)] * size, num_labels)
            yield loss.item() * dist.get_world_size(), parallel.module.logits.grad.tolist()
            parallel.zero_grad()

    loss, gradient = loss_and_gradient([0, 1])
    for loss_here, gradient_here in on_ranks(2, lambda: list(windows()))[0]:
        assert loss_here == pytest.approx(loss, abs=1e-14)
        assert gradient_here == pytest.approx(gradient, abs=1e-14)


def reference():
    """Loss and gradients of the proof's batch for two ranks, in one piece on one process."""
    batch = [pair for part in dp.proof_batch(2, CPU, m=4) for pair in part]
    x_BS, y_BS = (torch.cat(tensors) for tensors in zip(*batch))
    model = dp.tiny_model(CPU)
    nn.functional.cross_entropy(model(x_BS).flatten(0, 1), y_BS.flatten()).backward()
    return [p.grad for p in model.parameters()], (y_BS != -100).sum()


@question("Q1.3")
@question("Q1.4")
@pytest.mark.parametrize("around_forward", [True, False])
def test_dp_04_ranks_stay_identical_however_no_sync_is_placed(around_forward):
    def step():
        parallel = dp.DataParallel(dp.tiny_model(CPU), world(), bucket_mb=0.05)
        gradients, num_labels = reference()
        *first, last = dp.proof_batch(2, CPU, m=4)[rank()]
        for x_bS, y_bS in first:
            if around_forward:
                with parallel.no_sync():
                    dp.loss_share(parallel, x_bS, y_bS, num_labels).backward()
            else:
                loss = dp.loss_share(parallel, x_bS, y_bS, num_labels)
                with parallel.no_sync():
                    loss.backward()
        dp.loss_share(parallel, *last, num_labels).backward()
        parallel.finish_gradient_synchronization()
        ours = [p.grad for p in parallel.parameters()]
        return dp.max_error(ours, gradients), torch.cat([g.flatten() for g in ours])

    (error, ours), (other_error, theirs) = on_ranks(2, step)
    assert max(error, other_error) < 1e-12 and torch.equal(ours, theirs)


def branch_step(find_unused):
    parallel = dp.DataParallel(Branches(), world(), bucket_mb=1e-6, find_unused=find_unused)
    for _ in range(2):
        parallel.zero_grad()
        (parallel(ONES, "ab"[rank()]).sum() * (rank() + 1)).backward()
        parallel.finish_gradient_synchronization()
    return [p.grad[0, 0].item() for p in parallel.parameters()]


def test_dp_05_a_branch_that_one_rank_uses_counts_as_zero_on_the_other_if_so_declared():
    assert on_ranks(2, branch_step, True) == [[1, 2], [1, 2]]


def test_dp_05_and_is_an_error_with_names_and_rank_if_not():
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank [01]: no gradient for (a|b)\.weight.*find_unused"):
        on_ranks(2, branch_step, False, timeout=20)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("reduction, a", [("sum", 7.0), ("mean", 3.5)])
def test_dp_05_a_branch_that_only_an_earlier_micro_batch_used_keeps_its_gradient(reduction, a):
    def step():
        parallel = dp.DataParallel(Branches(), world(), find_unused=True, reduction=reduction)
        with parallel.no_sync():
            parallel(ONES * (3 + rank()), "a").sum().backward()
        parallel(ONES, "b").sum().backward()
        parallel.finish_gradient_synchronization()
        return parallel.module.a.weight.grad[0, 0].item()

    assert on_ranks(2, step) == [a, a]


# ── the loop of the run ──────────────────────────────────────────────────────────────────────

SMALL = dict(D=16, layers=2, heads=2)
LOOP = Namespace(steps=6, batch=13, micro_batches=3, bucket_mb=0.01, text=None)


def trained():
    """The weights after the chapter's own loop, in float64 on a small model."""
    torch.set_default_dtype(torch.float64)
    with patch.object(dp, "LanguageModel", partial(dp.LanguageModel, **SMALL)):
        return [p.detach() for p in dp.train(LOOP, world(), CPU).parameters()]


def trained_alone():
    """The same run on one process, without the chapter's steps: whole batches, one mean loss."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        model, text = dp.LanguageModel(**SMALL), dp.read_text(None, 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        for step in range(LOOP.steps):
            x_BS, y_BS = dp.sample(text, step, LOOP.batch, 64)
            model.zero_grad()
            nn.functional.cross_entropy(model(x_BS).transpose(1, 2), y_BS).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_six_steps_of_the_run_are_those_of_a_plain_loop(n):
    weights = trained_alone()
    for ours in on_ranks(n, trained):
        assert dp.max_error(ours, weights) < 1e-10


def test_a_run_without_the_sum_is_noticed_at_its_end():
    def unsummed():
        with patch.object(dp.DataParallel, "launch", lambda self, bucket: None):
            with patch.object(dp.DataParallel, "reset", lambda self: self.params_ready.clear()):
                trained()

    with pytest.raises(RankFailed, match="ranks disagree: rank 1 has weights .*, rank 0 has weigh"):
        on_ranks(2, unsummed)


def unlabelled_step(*counting):
    """Weights before and after a step of AdamW whose first sequences have labels; its loss."""
    torch.manual_seed(0)
    parallel = dp.DataParallel(dp.LanguageModel(**SMALL), world())
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1, weight_decay=0.1)
    x_BS = torch.arange(4 * 64).view(4, 64) % 256
    losses, weights = [], []
    for number in counting:
        y_BS = x_BS.clone()
        y_BS[number:] = -100
        losses.append(dp.train_step(parallel, optimizer, (x_BS, y_BS), 2, world()))
        weights.append(torch.cat([p.detach().flatten() for p in parallel.parameters()]))
    return losses, weights


@question("Q1.1")
def test_a_step_in_which_no_label_counts_has_no_loss_and_is_skipped():
    for losses, (first, second, third) in on_ranks(2, unlabelled_step, 4, 0, 1):
        assert losses[1] == 0 and losses[0] > 1 and losses[2] > 1
        assert torch.equal(first, second) and not torch.equal(second, third)
        assert third.isfinite().all()


def test_who_runs_out_of_batches_joins_with_none_of_its_own():
    """Rank 0 has three batches, rank 1 has one: each step is the one-process step on all of it."""
    sequences = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(3))
    by_rank = [[[0], [2], [3]], [[1]]]

    def steps():
        parallel = dp.DataParallel(dp.tiny_model(CPU), world())
        batches = [(sequences[i], sequences[i]) for i in by_rank[rank()]]
        found = []
        for x_bS, y_bS in dp.join(batches, (sequences[:0], sequences[:0]), world()):
            dp.accumulate(parallel, [(x_bS, y_bS)], dp.valid_tokens(y_bS, world()))
            found.append([p.grad.clone() for p in parallel.parameters()])
            parallel.zero_grad()
        return found

    for found in on_ranks(2, steps):
        assert len(found) == 3
        for gradients, whole in zip(found, ([0, 1], [2], [3])):
            model, x_BS = dp.tiny_model(CPU), sequences[whole]
            nn.functional.cross_entropy(model(x_BS).transpose(1, 2), x_BS).backward()
            assert dp.max_error(gradients, [p.grad for p in model.parameters()]) < 1e-12


# ── how large a bucket should be ─────────────────────────────────────────────────────────────


def slow_link():
    spec = importlib.util.spec_from_file_location("slow_link", ROOT / "benchmarks/slow_link.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("buckets, seconds, overlap, exposed", [
    ([[2], [1], [0]], [2, 2, 2], True, 4),  # 1 to 3, 3 to 5, 5 to 7; backward ends at 3
    ([[2], [1], [0]], [2, 2, 2], False, 6),
    ([[2], [1], [0]], [0.5, 0.5, 0.5], True, 0.5),  # the link waits for each gradient
    ([[0], [1], [2]], [0.5, 0.5, 0.5], True, 1.5),  # the first bucket is full last
    ([[2, 1], [0]], [1, 1], True, 1),  # 2 to 3, 3 to 4
])  # fmt: skip
def test_exposed_time_is_that_of_two_streams(buckets, seconds, overlap, exposed):
    arrivals = [3, 2, 1]  # the last layer's gradient comes first
    assert slow_link().predict(buckets, arrivals, seconds, overlap) == exposed


@pytest.mark.parametrize("order", ["reverse", "forward", "after backward"])
def test_a_slow_link_changes_neither_sums_nor_calls(order):
    args = Namespace(layers=3, backward=0.001, call=0.01, mb=0)
    for size, calls in (1, 3), (2, 2), (3, 1):
        measure = lambda: slow_link().measure(args, size, order, world())
        for calls_found, exposed, predicted, right in on_ranks(2, measure):
            assert right and calls_found == calls and exposed > 0
            assert 0.01 <= predicted <= 0.01 * calls + 1e-9


@pytest.mark.slow
def test_exposed_time_stands_beside_the_predicted_for_each_size_and_order():
    done = run_script(ROOT / "benchmarks/slow_link.py", "--layers", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [(row[0], row[2]) for row in rows] == [
        (size, order) for size in ("0.1", "0.2") for order in ("reverse", "forward", "after")]
    for row in rows:  # a busy machine makes it longer, nothing makes it shorter
        *_, measured, predicted, off = [x for x in row if x[0].isdigit() or x[0] == "-"][:5]
        assert float(measured) > 0.9 * float(predicted), row


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
    """Below the unigram entropy in 40 steps, where one step does not bring it; the same digits and
    weights on any launcher."""

    def digits(steps, torchrun=0):
        done = run_script(ROOT / "01_dp.py", "--steps", steps, "--ranks", 2, torchrun=torchrun)
        assert done.returncode == 0, done.stdout + done.stderr
        *table, weights = done.stdout.splitlines()[-3:]
        return [line.split()[:2] for line in table] + [weights]

    assert float(digits(40)[-2][1]) < 3.26 < float(digits(1)[-2][1])
    assert digits(11) == digits(11, torchrun=2)


@pytest.mark.slow
def test_the_order_of_events_is_drawn(tmp_path):
    picture = tmp_path / "order.svg"
    done = run_script(ROOT / "01_dp.py", "--ranks", 2, "--plot", picture)
    assert done.returncode == 0 and picture.stat().st_size > 10_000
    assert "bytes sent" in done.stdout and "weights" not in done.stdout
