"""local_steps: what the proof shows, the workers' arithmetic, and who counts in a round."""

import copy
from argparse import Namespace

import pytest
import torch
import torch.distributed as dist
from harness import ROOT, RankFailed, beyond, on_ranks, refusal, run_script
from torch import nn

local_steps = beyond("local_steps")
compression, memory_math = local_steps.compression, local_steps.memory_math
question = pytest.mark.question
SCRIPT = ROOT / "beyond/local_steps.py"
CPU = torch.device("cpu")
MEAN = local_steps.MEAN


def drawn(*shape, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def worker(value, **options):
    """A LocalSteps of parameters with one value, across all ranks."""
    weight = nn.Parameter(torch.as_tensor(value, dtype=torch.float64).clone())
    return local_steps.LocalSteps([weight], across=dist.group.WORLD, **options)


def steps_of(local, changes, samples=1):
    """Own steps that add changes to the weights; returns the weights after each exchange."""
    seen = []
    for change in changes:
        local.weights += change
        local.after_step(samples)
        seen.append(local.weights.clone())
    return seen


def test_local_steps_proves_itself(tmp_path):
    done = run_script(SCRIPT, "--steps", 0, "--ranks", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT AS CLAIMED" not in done.stdout and "simulated seconds" in done.stdout
    assert done.stderr == "" and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_with_sites_of_three_ranks_too(tmp_path):
    done = run_script(SCRIPT, "--steps", 0, "--ranks", 6, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@question("QT.1")
@pytest.mark.parametrize("rate, after", [(1.0, 0.7), (0.5, 0.85)])
def test_the_example_of_two_workers(rate, after):
    """Start 1.0, workers at 0.8 and 0.6: the outer gradient is start minus local, so 0.7."""

    def step():
        local = worker([1.0], period=1, rate=rate, momentum=0.0)
        return steps_of(local, [[-0.2, -0.4][dist.get_rank()]])[0].item()

    assert on_ranks(2, step) == pytest.approx([after, after], abs=1e-12)


@question("QT.1")
@pytest.mark.parametrize("samples, change", [([3, 1], 0.5), ([2, 2], 0.6), ([0, 5], 0.8)])
def test_a_worker_counts_by_its_samples(samples, change):
    """Outer gradients 0.4 and 0.8."""

    def step():
        r = dist.get_rank()
        return steps_of(worker([0.0], period=1, **MEAN), [[-0.4, -0.8][r]], samples[r])[0].item()

    assert on_ranks(2, step) == pytest.approx([-change, -change], abs=1e-12)


def test_samples_are_counted_over_the_whole_period():
    def step():
        local = worker([0.0], period=2, **MEAN)
        own = [(-0.2, 1), (-0.6, 8)], [(-0.1, 1), (-0.3, 2)]
        for change, samples in own[dist.get_rank()]:
            local.weights += change
            local.after_step(samples)
        return local.weights.item()

    wanted = -(0.4 * 3 + 0.8 * 9) / 12
    assert on_ranks(2, step) == pytest.approx([wanted, wanted], abs=1e-12)


def test_a_worker_alone_takes_its_own_steps():
    """With rate 1 and no momentum, weights stay as they are, also in the middle of a period."""
    found = on_ranks(1, lambda: steps_of(worker([1.0, 2.0], period=2, **MEAN), [0.5, 0.25, 1.0]))[0]
    assert [x.tolist() for x in found] == [[1.5, 2.5], [1.75, 2.75], [2.75, 3.75]]


@question("QT.2")
def test_the_outer_step_is_torchs_nesterov_from_the_start():
    deltas = drawn(5, 2, 7)

    def step():
        local, r = worker(torch.zeros(7), period=1, rate=0.3, momentum=0.8), dist.get_rank()
        return steps_of(local, [-delta[r] for delta in deltas])

    weight = nn.Parameter(torch.zeros(7).double())
    outer = torch.optim.SGD([weight], 0.3, 0.8, nesterov=True)
    for found, delta in zip(on_ranks(2, step)[1], deltas):
        weight.grad = delta.mean(0)
        outer.step()
        assert torch.allclose(found, weight.data, rtol=0, atol=1e-12)


def averaged(post_local):
    """Weights of torch's averager, and of ours, after every step."""
    from torch.distributed.algorithms.model_averaging import averagers

    r, world, period = dist.get_rank(), dist.group.WORLD, 3
    gradients, late = drawn(11, 2, 5, seed=1), 4 if post_local else 0
    theirs = nn.Parameter(torch.ones(5).double())
    ours = nn.Parameter(torch.ones(5).double())
    averager = averagers.PeriodicModelAverager(period, late + period - 1, world)
    optimizers, local, pairs = [torch.optim.SGD([x], 0.1, 0.9) for x in (theirs, ours)], None, []
    for t, gradient in enumerate(gradients):
        if t == late:
            local = local_steps.LocalSteps([ours], period, world, **MEAN)
        for weight, optimizer in zip((theirs, ours), optimizers):
            weight.grad = gradient.mean(0) if t < late else gradient[r].clone()
            optimizer.step()
        averager.average_parameters([theirs])
        if local:
            local.after_step()
        pairs.append((theirs.data.clone(), ours.data.clone()))
    return pairs


@pytest.mark.parametrize("post_local", [False, True])
def test_the_mean_is_that_of_torchs_averager(post_local):
    for pairs in on_ranks(2, averaged, post_local):
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in pairs)


def test_by_hand_each_worker_steps_alone_and_the_mean_is_taken_in_time():
    """Weights 2^t with rate -1, and gradient = weights, on rank 1; rank 0 stays at 1."""

    def steps():
        gradient = lambda weights, t: weights * dist.get_rank()
        start = torch.ones(1).double()
        by_hand = local_steps.local_sgd_by_hand
        return [by_hand(start, gradient, -1.0, 2, t, dist.group.WORLD).item() for t in (1, 2, 3, 4)]

    assert on_ranks(2, steps) == [[1, 2.5, 2.5, 6.25], [2, 2.5, 5, 6.25]]


def departures(period, fragments, delay, steps):
    def events():
        local, seen = worker(torch.zeros(6), period=period, fragments=fragments, delay=delay), []
        for t in range(1, steps + 1):
            before = [outer.round for outer in local.outers]
            with local_steps.dp.Ledger() as ledger:
                local.after_step()
            left = [x for x in ledger.events if x.what == "all_reduce"]
            arrived = [i for i, x in enumerate(local.outers) if x.round > before[i]]
            seen.append((len(left), arrived))
        return seen

    return on_ranks(1, events)[0]


def test_fragments_leave_one_after_another_at_equal_distances():
    seen = departures(6, 3, 0, 8)
    assert [t for t, (left, _) in enumerate(seen, 1) if left] == [2, 4, 6, 8]
    assert [arrived for _, arrived in seen if arrived] == [[0], [1], [2], [0]]
    late = departures(6, 3, 1, 9)
    assert [t for t, (left, _) in enumerate(late, 1) if left] == [2, 4, 6, 8]
    assert {t: a for t, (_, a) in enumerate(late, 1) if a} == {3: [0], 5: [1], 7: [2], 9: [0]}


def test_a_sum_is_waited_for_only_when_it_is_due():
    def events():
        local = worker(torch.zeros(4), period=2, delay=1)
        with local_steps.dp.Ledger() as ledger:
            for _ in range(3):
                ledger.mark("step")
                local.after_step()
        return [x.what for x in ledger.events]

    what = on_ranks(2, events)[0]
    sent = what.index("all_reduce")
    assert what[sent + 1 :] == ["step", "wait"]


@question("QT.3")
@pytest.mark.parametrize("mix, wanted", [(0.0, [2.0, 2.0]), (0.5, [5.0, 7.0]), (1.0, [8.0, 12.0])])
def test_a_late_fragment_finds_a_worker_that_has_gone_on(mix, wanted):
    """Ranks go to 1 and 3, mean 2, and on to 8 and 12 while the sum is on its way."""

    def steps():
        local, r = worker([0.0], period=2, delay=1, mix=mix, **MEAN), dist.get_rank()
        return steps_of(local, [0.0, 1.0 + 2 * r, [7.0, 9.0][r]])[-1].item()

    assert on_ranks(2, steps) == pytest.approx(wanted, abs=1e-12)


def returning(mix):
    """Rank 1 misses a round, and comes back with weights of its own: 100. Weights and starts."""
    r, seen = dist.get_rank(), []
    alone, _ = dist.new_subgroups_by_enumeration([[0]])
    local = worker([0.0], period=1, rate=1.0, momentum=0.5, mix=mix)

    def step():
        local.weights -= 1.0 + r
        local.after_step()
        seen.append((local.weights.item(), local.outers[0].start_P.item()))

    step()
    if r == 0:
        local.across = alone
        step()
        local.across = dist.group.WORLD
    else:
        local = worker([100.0], period=1, rate=1.0, momentum=0.5, mix=mix)
        seen.append(None)
    step()
    step()
    return seen, local.outers[0].round


def nesterov(deltas, rate=1.0, momentum=0.5):
    weight = nn.Parameter(torch.zeros(1).double())
    outer = torch.optim.SGD([weight], rate, momentum, nesterov=True)
    for delta in deltas:
        weight.grad = torch.tensor([delta]).double()
        outer.step()
    return pytest.approx(weight.item(), abs=1e-12)


def test_a_worker_of_an_older_round_is_refused_then_equal_then_counted():
    (one, round_of_one), (other, round_of_other) = on_ranks(2, returning, 0.0)
    assert round_of_one == round_of_other == 4
    assert one[0][0] == other[0][0] == nesterov([1.5])
    assert one[1][0] == nesterov([1.5, 1])
    assert one[2][0] == other[2][0] == nesterov([1.5, 1, 1]), "rank 1 is refused, and adopts"
    assert one[3][0] == other[3][0] == nesterov([1.5, 1, 1, 1.5])


@question("QT.3")
def test_a_worker_that_has_just_joined_keeps_nothing_of_its_own():
    (one, _), (other, _) = on_ranks(2, returning, 0.25)
    assert [start for _, start in one[2:]] == [start for _, start in other[2:]]
    assert other[2][0] == other[2][1] != one[2][0], "it had 100; the others mix"
    assert other[3][0] != other[3][1], "later it mixes as they do"


def test_the_state_comes_from_a_worker_that_is_up_to_date():
    """Here rank 0 is the one that comes back."""

    def step():
        value = [100.0 if dist.get_rank() == 0 else 1.0]
        local = worker(value, period=1, rate=0.5, momentum=0.0)
        local.outers[0].round = dist.get_rank()
        steps_of(local, [-0.5])
        return local.weights.item(), local.outers[0].round

    assert on_ranks(2, step) == [(0.75, 2), (0.75, 2)], "half of the way from 1 to 0.5"


def test_nobody_who_counts_changes_nothing():
    def step():
        local = worker([2.0], period=1, **MEAN)
        return steps_of(local, [-1.0], samples=0)[0].item()

    assert on_ranks(2, step) == [2.0, 2.0]


def test_workers_that_start_with_different_weights_are_refused():
    check = lambda: local_steps.check_same_start(torch.zeros(3) + dist.get_rank(), dist.group.WORLD)
    with pytest.raises(RankFailed, match="ranks disagree: rank 1 has weights with the digest"):
        on_ranks(2, check)
    on_ranks(2, lambda: local_steps.check_same_start(torch.zeros(3), dist.group.WORLD))


def test_a_federated_round_sends_weights_and_counts_and_no_data():
    """All that leaves a rank: its round and samples, and P numbers."""

    def sizes():
        text = local_steps.dp.read_text(None, 640)
        own, world = text.tensor_split(2)[dist.get_rank()], dist.group.WORLD
        job = local_steps.Job(own, 0, local_steps.fresh(CPU), world).steps(1, 8)
        sent = [(x.what, x.sent) for x in job.events if x.what not in ("wait", "step")]
        return sent, 8 * len(job.weights())

    for sent, size in on_ranks(2, sizes):
        assert sent == [("all_gather_single", 16), ("all_reduce", size)] * 2


def test_a_site_sends_each_number_once_and_all_its_ranks_go_on_alike():
    """Seven numbers on two ranks: slices of four, the last with one of padding."""

    def steps():
        groups = local_steps.make_groups(4)
        weight = nn.Parameter(torch.zeros(7).double())
        site = dist.get_rank() // 2
        local = local_steps.LocalSteps([weight], 1, groups["across"], groups["site"], **MEAN)
        weight.data += torch.arange(7) * (1.0 + site)
        with local_steps.dp.Ledger() as ledger:
            local.after_step()
        across = [x.sent for x in ledger.events if x.what == "all_reduce"]
        return weight.detach().clone(), across, local.outers[0].start_P.numel()

    for weight, across, held in on_ranks(4, steps):
        assert torch.allclose(weight, torch.arange(7).double() * 1.5, atol=1e-12)
        assert across == [8 * 4] and held == 4


# ── eight bits ───────────────────────────────────────────────────────────────────────────────


def test_codes_stand_for_the_mean_of_their_bin():
    x = torch.cat([torch.zeros(98), torch.tensor([1.0, -1.0])]).double()[None]
    codes, numbers = local_steps.to_codes(x)  # deviation sqrt(0.02), bins of 12 · 0.1414 / 256
    assert codes.dtype == torch.uint8 and numbers.shape == (1, 256)
    assert codes[0, 0] == 128 and codes[0, 98] == 255 and codes[0, 99] == 0, "beyond six: outermost"
    assert torch.equal(local_steps.from_codes(codes, numbers), x)


def test_codes_keep_the_sum_of_a_row_and_lie_within_six_deviations():
    x = drawn(3, 5000) * torch.tensor([[1.0], [1e-6], [1e6]]) + 1
    codes, numbers = local_steps.to_codes(x)
    back = local_steps.from_codes(codes, numbers)
    assert torch.allclose(back.sum(1), x.sum(1), rtol=1e-12)
    width = 12 * x.std(1, correction=0, keepdim=True) / 256
    assert ((back - x).abs() <= width).all() and (codes.double().std(1) - 256 / 12).abs().max() < 1
    assert torch.equal(codes[0], local_steps.to_codes(7 * x[:1] - 3)[0][0]), "of any scale"


def test_equal_numbers_have_no_deviation_and_stay():
    x = torch.full((2, 9), 0.3).double()
    assert torch.allclose(local_steps.from_codes(*local_steps.to_codes(x)), x, rtol=1e-15)


@pytest.mark.parametrize("n, P", [(1, 40), (2, 41), (3, 1000)])
def test_int8_sends_bytes_and_one_result_to_all(n, P):
    x = drawn(n, P)

    def reduce():
        with local_steps.dp.Ledger() as ledger:
            compressor = local_steps.Int8([(P,)])
            applied, own = compressor.reduce(x[dist.get_rank()], dist.group.WORLD)
        return applied, own, sum(ledger.sent.values())

    answers = on_ranks(n, reduce)
    for applied, _, sent in answers:
        assert torch.equal(applied, answers[0][0]) and applied.shape == (P,)
        assert sent == 2 * (n - 1) * (-(-P // n) + 256 * 8)
        assert sent == pytest.approx(memory_math.sent(local_steps.traffic(P, n, 1, 8, True)[1:]))
    assert torch.allclose(sum(own for _, own, _ in answers), answers[0][0], atol=1e-12)
    assert (answers[0][0] - x.sum(0)).abs().max() < 0.2 * n


def test_resumed_with_int8_and_in_the_middle_of_a_period_it_goes_on_bit_by_bit():
    changes = drawn(9, 2, 700)

    def steps():
        r, options = dist.get_rank(), dict(period=3, compressor=local_steps.int8)
        whole, first, second = (worker(torch.zeros(700), **options) for _ in range(3))
        wanted = steps_of(whole, changes[:, r])[-1]
        steps_of(first, changes[:4, r])
        saved = first.state_dict()
        steps_of(first, changes[4:, r])  # what was saved must not move with it
        second.load_state_dict(saved)
        return torch.equal(steps_of(second, changes[4:, r])[-1], wanted)

    assert on_ranks(2, steps) == [True, True]


@pytest.mark.parametrize("at", [2, 3, 5])
def test_a_checkpoint_holds_a_sum_that_is_on_its_way(at):
    changes = drawn(8, 2, 10)

    def steps():
        r, options = dist.get_rank(), dict(period=4, fragments=2, delay=1, mix=0.25)
        whole, first, second = (worker(torch.zeros(10), **options) for _ in range(3))
        wanted = steps_of(whole, changes[:, r])[-1]
        steps_of(first, changes[:at, r])
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        return torch.equal(steps_of(second, changes[at:, r])[-1], wanted)

    assert on_ranks(2, steps) == [True, True]


# ── time ─────────────────────────────────────────────────────────────────────────────────────


def test_the_guides_job_over_a_slow_link():
    """70B in bf16 over 10 GB/s: 14 s for two sites; 500 steps make it 500 times less."""
    link = memory_math.Topology(node=1, outer=10e9, latency=0.0)
    messages = local_steps.traffic(70e9, 2, e=2)
    seconds = lambda period, delay=0: local_steps.step_seconds(4.0, messages, period, delay, link)
    assert seconds(1) == pytest.approx(4 + 14, rel=1e-6)
    assert seconds(500) == pytest.approx(4 + 14 / 500, rel=1e-6)
    assert seconds(500, 2) == pytest.approx(4 + 6 / 500, rel=1e-6)
    assert seconds(500, 4) == pytest.approx(4, abs=1e-6)
    sent = lambda **how: memory_math.sent(local_steps.traffic(70e9, 2, **how))
    ratio = lambda period, **how: period * memory_math.sent(messages) / sent(**how)
    assert ratio(500, e=4) == pytest.approx(250) and ratio(500, e=2) == pytest.approx(500)
    assert 2 * ratio(100, int8=True) == pytest.approx(400, rel=1e-6), "INTELLECT-1, beside fp32"


def test_a_message_of_fragments_pays_latency_for_each():
    link = memory_math.Topology(node=1, outer=1e6, latency=0.01)
    messages = local_steps.traffic(1000, 4, fragments=5, e=4)
    latency = 5 * (3 + 2 * 3) * 0.01
    bandwidth = (2 * 3 / 4 * 4000 + 5 * 3 * 16) / 1e6
    found = local_steps.step_seconds(1.0, messages, 10, 0, link)
    assert found == pytest.approx(1 + (latency + bandwidth) / 10)
    hidden = local_steps.step_seconds(1.0, messages, 10, 1, link)
    assert hidden == pytest.approx(1 + 5 * (3 * 0.01 + 3 * 16 / 1e6) / 10), "rolls are not hidden"


def test_the_clock_waits_for_a_sum_where_its_worker_waits():
    link = memory_math.Topology(node=1, outer=100.0, latency=1.0)
    event = lambda what, sent=0: Namespace(what=what, sent=sent)
    clock = lambda *events: local_steps.clock(events, 5.0, link, 3)
    step, wait, send = event("step"), event("wait"), event("all_reduce", 200)  # 2 s and 4 s latency
    assert clock(step, step) == 10
    assert clock(step, send, wait, step) == 5 + 6 + 5
    assert clock(step, send, step, wait) == 5 + 6
    assert clock(step, send, step, step, wait) == 15
    assert clock(step, send) == 11, "a sum that nobody has waited for arrives too"
    assert clock(event("all_gather_single", 100), step) == 1 + 2 + 5


def test_local_steps_refuses_what_cannot_work():
    assert "3 ranks: two sites need an even number" in refusal(SCRIPT, "--ranks", 3)
    assert "18 ranks" in refusal(SCRIPT, "--ranks", 18)
    told = refusal(SCRIPT, "--period", 5, "--fragments", 2)
    assert "period 5 and 2 fragments" in told
    assert "period 1 and 2 fragments" in refusal(SCRIPT, "--period", 1, "--fragments", 2)
    assert "period 0" in refusal(SCRIPT, "--period", 0)
    told = refusal(SCRIPT, "--period", 20, "--fragments", 4, "--delay", 5)
    assert "delay 5: a fragment leaves every 5 steps" in told and "use 0 to 4" in told
    told = refusal(SCRIPT, "--steps", 50)
    assert "the last 10 steps would reach nobody; use 60" in told


@pytest.mark.slow
def test_every_method_trains(tmp_path):
    done = run_script(SCRIPT, "--steps", 60, torchrun=2, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    table = done.stdout.split("held-out loss")[1].split("\n\n")[0].splitlines()[1:]
    rows = {line[:34].strip(): [float(x.replace(",", "")) for x in line[34:].split()]
            for line in table}  # fmt: skip
    assert len(rows) == 13
    assert max(loss for loss, _, _ in rows.values()) < 3.26, "the unigram entropy of the text"
    every, diloco = rows["every step"], rows["DiLoCo, momentum 0.9"]
    assert every[0] < diloco[0] and 19 < every[1] / diloco[1] < 20
    loss, sent, _ = rows["in int8"]
    assert sent < diloco[1] and loss == pytest.approx(diloco[0], abs=0.02)
    assert "bf16, period 500                     0.28          500             4.17" in done.stdout
