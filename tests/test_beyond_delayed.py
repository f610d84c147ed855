"""delayed: what the proof shows, who is how stale, and which weights a micro-batch meets."""

from itertools import count, islice

import pytest
import torch
import torch.distributed as dist
from harness import ROOT, RankFailed, beyond, on_ranks, refusal, run_script
from torch import nn
from torch.func import functional_call

delayed = beyond("delayed")
question = pytest.mark.question
SCRIPT = ROOT / "beyond/delayed.py"
CPU = torch.device("cpu")


def drawn(*shape, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def test_delayed_proves_itself(tmp_path):
    done = run_script(SCRIPT, "--steps", 0, "--ranks", 3, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT AS CLAIMED" not in done.stdout and "PipeDream-2BW" in done.stdout
    assert done.stderr == "" and list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 5])
def test_with_other_numbers_of_ranks_too(ranks, tmp_path):
    done = run_script(SCRIPT, "--steps", 0, "--ranks", ranks, "--micro-batches", 6, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


# ── server and workers ───────────────────────────────────────────────────────────────────────


def test_the_example_of_two_workers():
    by_hand = lambda updates: delayed.asynchronous_by_hand(
        1.0, "ABAB"[:updates], lambda w, t: w, 0.5
    )
    assert [by_hand(updates) for updates in range(5)] == [1.0, 0.5, 0.0, -0.25, -0.25]


def test_gradients_arrive_as_fast_as_their_workers_compute():
    order, times = delayed.arrivals({1: 1.0, 2: 2.0}, 6)
    assert order == [1, 1, 2, 1, 1, 2] and times == [1, 2, 2, 3, 4, 4]
    order, times = delayed.arrivals({1: 3.0, 2: 1.0, 3: 3.0}, 5)
    assert order == [2, 2, 1, 2, 3] and times == [1, 2, 3, 3, 3]


@question("QP.1")
@pytest.mark.parametrize("order, stale", [
    ("ABABAB", [0, 1, 1, 1, 1, 1]), ("AABA", [0, 0, 2, 1]), ("AAAA", [0, 0, 0, 0]),
    ("ABCCBA", [0, 1, 2, 0, 2, 4]),
])  # fmt: skip
def test_a_gradient_is_as_old_as_the_updates_since_its_fetch(order, stale):
    assert delayed.stalenesses(order) == stale, "updates between a worker's fetch and its update"


@question("QP.1")
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_equal_workers_are_all_one_round_behind(workers):
    order, _ = delayed.arrivals(dict.fromkeys(range(workers), 1.0), 4 * workers)
    stale = delayed.stalenesses(order)
    assert stale[workers:] == [workers - 1] * 3 * workers, "workers - 1, from the second round on"


@pytest.mark.parametrize("staleness", [0, 1, 2, 7])
def test_above_the_greatest_rate_a_parabola_is_left(staleness):
    def weight(rate, updates=6000):
        history = [1.0] * (staleness + 1)
        for _ in range(updates):
            history.append(history[-1] - rate * 5.0 * history[-1 - staleness])
        return abs(history[-1])

    greatest = delayed.greatest_rate(staleness, curvature=5.0)
    assert weight(0.98 * greatest) < 1e-3 and weight(1.02 * greatest) > 1e3


def test_rules_of_a_server():
    g, now, then = torch.tensor([3.0, -2.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.0, 2.0])
    assert delayed.plain(g, now, then, 4).tolist() == [3, -2]
    assert delayed.aware(g, now, then, 4).tolist() == [0.75, -0.5]
    assert delayed.aware(g, now, then, 1).tolist() == delayed.aware(g, now, then, 0).tolist()
    assert delayed.aware(g, now, then, 0).tolist() == [3, -2]
    assert delayed.compensated(g, now, then, 4, strength=0.5).tolist() == [7.5, -4]


def serving(order, rule, rate=0.1):
    """What the server ends with: worker w pulls the weights to goal w."""
    goals, world, r = drawn(3, 4), dist.group.WORLD, dist.get_rank()
    gradient = lambda weights, t: (weights - goals[r]) * (1 + t)
    if r:
        return delayed.work(torch.zeros(4).double(), order, gradient, world)
    return delayed.serve(torch.zeros(4).double(), order, rate, world, rule)


@pytest.mark.parametrize("order", [[1, 2, 1, 2], [1, 1, 1, 2, 1, 2, 2], [2, 2, 2]])
@pytest.mark.parametrize("rule", [delayed.plain, delayed.aware, delayed.compensated])
def test_a_server_steps_with_each_gradient_as_its_script_says(order, rule):
    (weights, fetched), *workers = on_ranks(3, serving, order, rule)
    history, last, goals = [torch.zeros(4).double()], {1: 0, 2: 0}, drawn(3, 4)
    for t, worker in enumerate(order):
        then = history[last[worker]]
        gradient = (then - goals[worker]) * (1 + t)
        applied = rule(gradient, history[-1], then, t - last[worker])
        history.append(history[-1] - 0.1 * applied)
        last[worker] = t + 1
    assert torch.allclose(weights, history[-1], rtol=0, atol=1e-12)
    for worker, has in enumerate(workers, 1):
        assert torch.equal(has, fetched.get(worker, torch.zeros(4).double()))
        assert torch.allclose(has, history[last[worker]], rtol=0, atol=1e-12)


# ── pipelines ────────────────────────────────────────────────────────────────────────────────


def modules(n):
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(n)]


def data(updates, m=1):
    x, goals = drawn(2, updates, 5, 4)
    square = lambda goal: lambda y: (y - goal).square().mean() / m
    return [(x[i], square(goals[i])) for i in range(updates)]


def met_by(make, n, updates, m=1):
    """(versions that micro-batches met, most versions held, final weights) of each stage."""

    def run():
        stage = make(modules(n)[dist.get_rank()])
        seen, version = [], stage.version
        stage.version = lambda i: seen.append(version(i)) or seen[-1]
        delayed.run_stage(stage, data(updates, m), 4, (dist.group.WORLD, dist.new_group()))
        return seen, stage.most, [*stage.versions[stage.updates].values()]

    return on_ranks(n, run)


def composed(n, updates, versions, m=1, rate=0.3):
    """The weights of all stages, from the gradient of the whole composition at once: micro-batch i
    meets version versions[s][i] of stage s."""
    parts = modules(n)
    history = [[{k: w.detach() for k, w in part.named_parameters()}] for part in parts]
    sums = None
    for i, (x, loss) in enumerate(data(updates, m)):
        chosen = [
            {k: w.clone().requires_grad_() for k, w in history[s][versions[s][i]].items()}
            for s in range(n)
        ]
        for part, weights in zip(parts, chosen):
            x = functional_call(part, weights, x)
        flat = [w for weights in chosen for w in weights.values()]
        gradients = torch.autograd.grad(loss(x), flat)
        sums = [a + b for a, b in zip(sums, gradients)] if sums else gradients
        if (i + 1) % m == 0:
            left = iter(sums)
            for versions_of in history:
                newest = versions_of[-1]
                versions_of.append({k: w - rate * next(left) for k, w in newest.items()})
            sums = None
    return [[*versions_of[-1].values()] for versions_of in history]


def equal(found, wanted):
    return all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(found, wanted))


@question("QP.2")
@pytest.mark.parametrize("n, updates", [(1, 4), (2, 5), (3, 7)])
def test_a_backward_meets_the_weights_of_its_forward(n, updates):
    """Stage s meets versions 0 .. 0, 1, 2, ..: its staleness is n - 1 - s."""
    versions = [[max(0, i - (n - 1 - s)) for i in range(updates)] for s in range(n)]
    stages = met_by(lambda module: delayed.PipeDream(module, 0.3), n, updates)
    wanted = composed(n, updates, versions)
    for s, (seen, most, weights) in enumerate(stages):
        assert seen == versions[s] and most == n - s, "n - s versions are held on stage s"
        assert equal(weights, wanted[s]), "weights of the recurrence w(t+1) = w(t) - rate g(w(t-s))"


@question("QP.3")
@pytest.mark.parametrize("n, m", [(2, 2), (3, 2), (3, 4)])
def test_with_two_buffers_all_stages_meet_the_version_before_the_newest(n, m):
    """Batches 0 and 1 meet version 0, batch 2 meets version 1, ..; m may be as small as n - 1."""
    versions = [[max(0, i // m - 1) for i in range(4 * m)]] * n
    stages = met_by(lambda module: delayed.TwoBuffers(module, 0.3, m), n, 4 * m, m)
    wanted = composed(n, 4 * m, versions, m)
    for (seen, most, weights), right in zip(stages, wanted):
        assert seen == versions[0] and most == 2, "version max(0, batch - 1), and two are held"
        assert equal(weights, right), "weights of w(t+1) = w(t) - rate g(w(t-1))"


def test_two_buffers_need_as_many_micro_batches_as_the_first_stage_begins_with():
    with pytest.raises(RankFailed, match="KeyError"):
        met_by(lambda module: delayed.TwoBuffers(module, 0.3, 1), 3, 6, 1)


def test_a_pipeline_that_flushes_is_torchs_gradient_descent():
    n, m = 3, 2

    def run():
        stage = delayed.Flushed(modules(n)[dist.get_rank()], 0.3, m)
        batches, groups = iter(data(3 * m, m)), (dist.group.WORLD, dist.new_group())
        for _ in range(3):
            delayed.run_stage(stage, [*islice(batches, m)], 4, groups)
        return stage.most, [*stage.versions[stage.updates].values()]

    whole = nn.Sequential(*modules(n))
    optimizer = torch.optim.SGD(whole.parameters(), 0.3)
    for i, (x, loss) in zip(count(1), data(3 * m, m)):
        loss(whole(x)).backward()
        if i % m == 0:
            optimizer.step()
            optimizer.zero_grad()
    for (most, weights), part in zip(on_ranks(n, run), whole):
        assert most == 1 and equal(weights, [*part.parameters()])


def test_the_weights_of_a_forward_stay_as_they_were():
    """A version is never changed in place: the module's own parameters too stay at the start."""
    module = modules(1)[0]
    stage, before = delayed.PipeDream(module, 0.3), [x.clone() for x in module.parameters()]
    first = stage.versions[0]
    stage.forward(0, drawn(5, 4))
    stage.forward(1, drawn(5, 4))
    stage.backward(0, drawn(5, 4))
    assert 0 in stage.versions and 1 in stage.versions, "micro-batch 1 still needs version 0"
    assert all(map(torch.equal, first.values(), before))
    assert all(map(torch.equal, module.parameters(), before))
    stage.backward(1, drawn(5, 4))
    assert set(stage.versions) == {2}


def test_delayed_refuses_what_cannot_work():
    assert "1 ranks: use 2 to 5" in refusal(SCRIPT, "--ranks", 1)
    assert "6 ranks: use 2 to 5" in refusal(SCRIPT, "--ranks", 6)
    told = refusal(SCRIPT, "--micro-batches", 2)
    assert "--micro-batches 2: use 3 or more" in told
    told = refusal(SCRIPT, "--steps", 100)
    assert "--steps 100" in told and "need a multiple of 12" in told


@pytest.mark.slow
def test_server_and_pipelines_train(tmp_path):
    done = run_script(SCRIPT, "--steps", 120, torchrun=4, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    table = done.stdout.split("held-out loss")[1].splitlines()[1:]
    lines = {line[:28].strip(): line[28:].split() for line in table}
    losses = {name: [float(x) for x in lines[name][:3]] for name in lines if "server," in name}
    entropy = 3.26
    assert losses["server, plain"][0] < entropy and losses["server, compensated"][0] < entropy
    assert losses["server, plain"][2] > losses["server, rates by staleness"][2]
    alone, plain = (float(lines[name][3]) for name in ("one worker alone", "server, plain"))
    assert plain < alone / 2, "three workers, simulated"
    pipelines = "PipeDream", "PipeDream-2BW", "flushed"
    assert [lines[name][-1] for name in pipelines] == ["4", "2", "1"]
