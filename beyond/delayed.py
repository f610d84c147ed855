"""delayed · A gradient meets weights that have moved on

In asynchronous training nobody waits. A gradient was computed from some weights, and is applied to
newer ones. The number of updates in between is its staleness s:

    w(t+1) = w(t) - rate · g(w(t - s))

    parameter server     worker 1 ── gradient ──> server: steps at once ── weights ──> worker 1
                         worker 2 ── gradient ──> ...                    no worker waits for another

    pipeline, no flush   stage r steps after each backward. n - r micro-batches are inside of it,
                         and each of them needs the weights that its own forward has met

                 staleness               sent for an update         held by the server or a stage
    server       n - 2, equal workers    P up and P down            (n - 1) · P: what workers have
    PipeDream    n - 1 - r on stage r    B·D each way, between      (n - r) · P on stage r
    2BW          1 on all stages           stages; 2BW m times      2P, and the sum of gradients

In a pipeline, P is the parameters of one stage. A pipeline that flushes is idle for (n-1)/(m+n-1)
of each step of m micro-batches. One that does not flush is idle at its beginning and its end alone.
The price of staleness is a smaller rate: see `greatest_rate`.

    python beyond/delayed.py                          a server and three workers; four stages
    torchrun --nproc-per-node 4 beyond/delayed.py     the same, started by torchrun

The order in which gradients arrive is a script, made from simulated speeds. So each run is the same
as its twin, which is one process that keeps old weights.

Guide: LocalSGD and async data-parallel variants. Sources: Downpour, NIPS 2012; rates by staleness,
arXiv:1511.05950; DC-ASGD, arXiv:1609.08326; PipeDream, arXiv:1806.03377; 2BW, arXiv:2006.09503.
Questions  QP.1 * how stale is a gradient?   QP.2 *** which weights does a backward need?
           QP.3 ** which version does a micro-batch meet with 2BW?
"""
# n ranks · r this rank · m micro-batches · B sequences · D width · V vocabulary · P parameters

import heapq
import importlib
import math
import signal
import sys
from collections import deque
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads ends it without a trace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters

sys.path.append(str(Path(__file__).resolve().parents[1]))
dp = importlib.import_module("01_dp")
pp = importlib.import_module("04_pp_schedules")


# ── by hand: two workers take turns ──────────────────────────────────────────────────────────

# The loss is w²/2, so the gradient is w. The rate is 0.5. Both workers fetch w = 1.
#
#   update   worker   has    gradient   new weight          one after another
#     0        A      1.0      1.0      1.0 - 0.5  = 0.5           0.5
#     1        B      1.0      1.0      0.5 - 0.5  = 0.0           0.25
#     2        A      0.5      0.5      0.0 - 0.25 = -0.25         0.125
#     3        B      0.0      0.0     -0.25                       0.0625
#
# After update 0, worker A has fetched 0.5; B's gradient still belongs to 1.0. Its staleness is 1.
# The steps go too far: each of them answers to a place where the weight is no longer.


def asynchronous_by_hand(weight, order, gradient, rate):
    """Compute the weight after all updates, in one process. order[t] is the worker whose gradient
    arrives as update t; gradient(weight, t) computes it."""
    fetched = dict.fromkeys(order, weight)
    for t, worker in enumerate(order):
        weight = weight - rate * gradient(fetched[worker], t)
        fetched[worker] = weight
    return weight


def arrivals(seconds, updates):
    """The order in which gradients arrive, and when: two lists. Worker w takes seconds[w] for each
    gradient; of two that are ready together, the lower worker comes first."""
    ready = [(took, worker) for worker, took in seconds.items()]
    heapq.heapify(ready)
    order, times = [], []
    for _ in range(updates):
        now, worker = heapq.heappop(ready)
        heapq.heappush(ready, (now + seconds[worker], worker))
        order.append(worker)
        times.append(now)
    return order, times


def stalenesses(order):
    """For each update, the number of updates since its worker fetched weights."""
    fetched, stale = dict.fromkeys(order, 0), []
    for t, worker in enumerate(order):
        # QP.1 * A worker fetches weights right after its own update. How many updates have come
        #      between its fetch and update t?
        #      hint: all workers fetch before update 0; after its update t, a worker has w(t+1)
        stale.append(t - fetched[worker])
        fetched[worker] = t + 1
        # /QP.1
    return stale


def greatest_rate(staleness, curvature=1.0):
    """The rate above which gradient descent with this staleness leaves a parabola's lowest point.

    w(t+1) = w(t) - rate · w(t-s) has solutions xᵗ with xˢ⁺¹ = xˢ - rate. The first of them leaves
    the unit circle at rate 2 sin(π / (4s + 2)): 2 for s = 0, 1 for s = 1, nearly π / (2s + 1).
    """
    return 2 * math.sin(math.pi / (4 * staleness + 2)) / curvature


# ── a parameter server ───────────────────────────────────────────────────────────────────────

# A rule computes what is applied, (P), from a gradient, the weights now, the weights from which the
# gradient was computed, and its staleness.


def plain(gradient_P, now_P, then_P, staleness):
    """The gradient as it is (Downpour SGD)."""
    return gradient_P


def aware(gradient_P, now_P, then_P, staleness):
    """A smaller step for an older gradient (arXiv:1511.05950): the greatest rate falls as 1/s."""
    return gradient_P / max(1, staleness)


def compensated(gradient_P, now_P, then_P, staleness, strength=0.04):
    """The gradient as it might be now, by a guess of the second derivative, strength · g²
    (arXiv:1609.08326). The server keeps the weights of each worker for it."""
    return gradient_P + strength * gradient_P**2 * (now_P - then_P)


def serve(weights_P, order, rate, group, rule=plain):
    """Run the server, rank 0: step with each gradient as it arrives. Returns the weights (P), and
    those that each worker has fetched, of which only `compensated` makes use."""
    fetched, sends = dict.fromkeys(order, weights_P), {}
    for worker, staleness in zip(order, stalenesses(order)):
        gradient_P = torch.empty_like(weights_P)
        # irecv from a worker, P: a gradient of the weights that this worker fetched
        dist.irecv(gradient_P, group=group, group_src=worker).wait()
        weights_P = weights_P - rate * rule(gradient_P, weights_P, fetched[worker], staleness)
        # isend to this worker alone, P: the newest weights; the server does not wait
        sends[worker] = dist.isend(weights_P, group=group, group_dst=worker)
        fetched[worker] = weights_P
    for send in sends.values():
        send.wait()
    return weights_P, fetched


def work(weights_P, order, gradient, group):
    """Run a worker: compute a gradient, send it, fetch weights, again. Returns the last weights."""
    for t in [t for t, worker in enumerate(order) if worker == dist.get_rank(group)]:
        # isend to the server, P: the gradient of update t
        dist.isend(gradient(weights_P, t), group=group, group_dst=0).wait()
        weights_P = torch.empty_like(weights_P)
        # irecv from the server, P: weights that have this gradient, and those of others
        dist.irecv(weights_P, group=group, group_src=0).wait()
    return weights_P


# ── a pipeline that does not flush ───────────────────────────────────────────────────────────

# 1F1B of 04 with n = 3 stages; on each stage, the number of updates that a forward has met:
#
#     stage 0   F0 F1 F2 .. .. B0 F3 B1 F4 B2      F0 F1 F2 meet 0, F3 meets 1, F4 meets 2
#     stage 1      F0 F1 .. B0 F2 B1 F3 B2 F4      F0 F1 meet 0, F2 meets 1, F3 meets 2
#     stage 2         F0 B0 F1 B1 F2 B2 F3 B3      F0 meets 0, F1 meets 1: never stale
#
# B3 of stage 0 comes after three updates, and F3 came after one. If B3 took the newest weights, it
# would be the gradient of no loss: forward with one function, backward with another.


class PipeDream:
    """A stage that steps after each backward. It keeps weights for as long as they are needed.

    A backward computes its forward again, so that the weights it takes stand in one place.
    stash=False is wrong on purpose: backward takes the newest weights.
    """

    def __init__(self, module, rate, stash=True):
        self.module, self.rate, self.stash = module, rate, stash
        self.versions = {0: {name: x.detach().clone() for name, x in module.named_parameters()}}
        self.updates, self.inside, self.most = 0, {}, 1  # `most`: versions held at once

    def version(self, i):
        """The version that micro-batch i meets, here the newest: after so many updates."""
        return self.updates

    def forward(self, i, x):
        """The output of the stage for micro-batch i; x is its input."""
        self.inside[i] = self.version(i), x
        with torch.no_grad():
            return functional_call(self.module, self.versions[self.inside[i][0]], x)

    def backward(self, i, d_y=None, loss=None):
        """Step with micro-batch i; return the gradient of its input, or None if that has none.

        d_y is the gradient of the output; the last stage has `loss` instead, a function of it.
        """
        # QP.2 *** Since the forward of micro-batch i, this stage has stepped with others. With
        #      which weights does backward compute, and which ones does the step change?
        #      hint: the chain rule needs the function that forward was
        version, x = self.inside.pop(i)
        weights = self.versions[version if self.stash else self.updates]
        # /QP.2
        weights = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        x = x.detach().requires_grad_(x.is_floating_point())  # bytes have no gradient
        y = functional_call(self.module, weights, x)
        y = loss(y) if loss else y
        inputs = [*weights.values(), x] if x.requires_grad else [*weights.values()]
        gradients = torch.autograd.grad(y, inputs, d_y)
        self.step(i, gradients[: len(weights)])
        self.forget()
        return gradients[-1] if x.requires_grad else None

    def step(self, i, gradients):
        """Make a version from the newest one and gradients."""
        newest = self.versions[self.updates].items()
        self.updates += 1
        self.versions[self.updates] = {
            name: weight - self.rate * gradient
            for (name, weight), gradient in zip(newest, gradients)
        }

    def needed(self):
        """The versions that micro-batches inside have met, and the newest."""
        return {version for version, _ in self.inside.values()} | {self.updates}

    def forget(self):
        """Drop the versions that no micro-batch needs any more."""
        self.versions = {v: self.versions[v] for v in sorted(self.needed())}
        self.most = max(self.most, len(self.versions))


class TwoBuffers(PipeDream):
    """PipeDream-2BW: one update for m micro-batches, and two versions on all stages.

    m is at least n - 1: the first stage begins with so many micro-batches before a backward.
    """

    def __init__(self, module, rate, m):
        super().__init__(module, rate)
        self.m, self.sums = m, None

    def version(self, i):
        """The version before the newest that this batch of m could meet: the same on all stages."""
        # QP.3 ** Update t is made of micro-batches t·m to t·m + m - 1. The first stage begins with
        #      them before update t - 1 is made. Which version do they meet, on every stage?
        #      hint: w(t+1) = w(t) - rate · g(w(t-1)); the first two batches meet version 0
        batch = i // self.m
        return batch - 1 if batch else 0
        # /QP.3

    def step(self, i, gradients):
        """Add up gradients; after the m-th micro-batch make a version."""
        self.sums = [a + b for a, b in zip(self.sums, gradients)] if self.sums else gradients
        if (i + 1) % self.m == 0:
            super().step(i, self.sums)
            self.sums = None

    def needed(self):
        """The newest version, and the one before it."""
        return {max(0, self.updates - 1), self.updates}


def run_stage(stage, micro_batches, D, groups):
    """Run a stage, rank r's, over a list of (x, function of the last output that is its loss).

    Args:
        groups: two process groups of the same ranks. Outputs and gradients travel in one each, so
            that no message can stand in the way of one that goes the other way.
    """
    ahead, back = groups
    n, r, sends = dist.get_world_size(ahead), dist.get_rank(ahead), deque()
    weight = next(stage.module.parameters())
    for (op,) in pp.one_f_one_b(n, len(micro_batches))[r]:
        x, loss = micro_batches[op.microbatch]
        message = weight.new_empty(len(x), D)
        if op.kind == "F":
            if r > 0:
                # irecv from the stage before, B·D: the input of this micro-batch
                dist.irecv(message, group=ahead, group_src=r - 1).wait()
            y = stage.forward(op.microbatch, message if r else x)
            if r < n - 1:
                # isend to the next stage, B·D: its input
                sends.append(dist.isend(y, group=ahead, group_dst=r + 1))
        else:
            if r < n - 1:
                # irecv from the next stage, B·D: the gradient of this stage's output
                dist.irecv(message, group=back, group_src=r + 1).wait()
                d_x = stage.backward(op.microbatch, message)
            else:
                d_x = stage.backward(op.microbatch, loss=loss)
            if r > 0:
                # isend to the stage before, B·D: the gradient of its output
                sends.append(dist.isend(d_x, group=back, group_dst=r - 1))
        while len(sends) > 2 * n:  # long received: its tensor need not be kept
            sends.popleft().wait()
    for send in sends:
        send.wait()


# ── from here on: proof, run, kit ────────────────────────────────────────────────────────────

RATE, B, D = 0.5, 8, 6


def stages(n, D, V=256):
    """The n stages of a language model: three bytes (B, 3) to logits of the next one (B, V)."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Embedding(V, D), nn.Flatten(), nn.Linear(3 * D, D), nn.Tanh())
    middle = [nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(n - 2)]
    return [first, *middle, nn.Linear(D, V)]


def fresh(n, device):
    """The stages of the proof, in float64."""
    return [stage.double().to(device) for stage in stages(n, D)]


def batch(text, t, device, B=B, m=1):
    """Samples (B, 3), number t, and a function of logits: an m-th of their mean loss."""
    x_B3, y_B3 = (whole.to(device) for whole in dp.sample(text, t, B, 3))
    return x_B3, lambda logits_BV: F.cross_entropy(logits_BV, y_B3[:, -1]) / m


def gradient_of(model, text, device, B=B):
    """(start weights (P), function (weights, t) -> gradient (P)) of a model."""
    params = list(model.parameters())

    def gradient(weights_P, t):
        vector_to_parameters(weights_P, params)
        x_B3, loss = batch(text, t, device, B)
        gradients = torch.autograd.grad(loss(model(x_B3)), params)
        return torch.cat([gradient.flatten() for gradient in gradients])

    return parameters_to_vector(params).detach(), gradient


def shared(weights_P, group):
    """The server's weights, on all ranks."""
    weights_P = weights_P.clone()
    # broadcast from the server, P: every rank now has the result
    dist.broadcast(weights_P, group_src=0, group=group)
    return weights_P


def asynchronous(model, text, order, rate, rule, device, B=B):
    """Train a model with a server and workers. Returns its weights (P), and the bytes that this
    rank sent and holds."""
    world = dist.group.WORLD
    weights_P, gradient = gradient_of(model, text, device, B)
    with dp.Ledger() as ledger:
        if dist.get_rank() == 0:
            weights_P, kept = serve(weights_P, order, rate, world, rule)
        else:
            weights_P = work(weights_P, order, gradient, world)
            kept = {"own": weights_P}
    held = sum(x.nbytes for x in {id(x): x for x in kept.values()}.values())
    return shared(weights_P, world), ledger.sent["isend"], held


def delayed_twin(text, n, order, device, divide=False, strength=0.0, late=True):
    """The weights (P) of w(t+1) = w(t) - rate · g(w(t-s)), in one process that keeps all weights.
    late=False: without staleness, which is gradient descent."""
    weights_P, gradient = gradient_of(nn.Sequential(*fresh(n, device)), text, device)
    history = [weights_P]
    for t, worker in enumerate(order):
        before = [u for u in range(t) if order[u] == worker]
        then_P = history[before[-1] + 1 if before else 0] if late else history[t]
        gradient_P = gradient(then_P, t)
        gradient_P = gradient_P + strength * gradient_P**2 * (history[t] - then_P)
        staleness = t - (before[-1] + 1 if before else 0)
        share = 1 / staleness if divide and staleness else 1.0
        history.append(history[t] - share * RATE * gradient_P)
    return history[-1]


def proof_of_server(text, device):
    """Rows of the parameter server, and of what staleness does."""
    n, r, updates = dist.get_world_size(), dist.get_rank(), 12
    order, _ = arrivals({worker: 1 + worker / 2 for worker in range(1, n)}, updates)
    model = lambda: nn.Sequential(*fresh(n, device))
    alone, *_ = asynchronous(model(), text, [1] * updates, RATE, plain, device)
    descent = delayed_twin(text, n, order, device, late=False)
    yield dp.Row("one worker: gradient descent", dp.relative_error(alone, descent))
    start_P, gradient = gradient_of(model(), text, device)
    by_hand = asynchronous_by_hand(start_P, order, gradient, RATE)
    late = delayed_twin(text, n, order, device)
    yield dp.Row("by hand, in one process", dp.relative_error(by_hand, late))
    wrong = dp.relative_error(late, descent)
    yield dp.Row("  beside gradient descent", dp.relative_error(by_hand, descent), wrong=wrong)
    for name, rule, options in [
        ("server and workers", plain, {}),
        ("  rates by staleness", aware, dict(divide=True)),
        ("  compensated", compensated, dict(strength=0.04)),
    ]:
        weights_P, sent, held = asynchronous(model(), text, order, RATE, rule, device)
        right = delayed_twin(text, n, order, device, **options)
        sent = sent, (updates if r == 0 else order.count(r)) * right.nbytes
        held = held, (n - 1 if r == 0 else 1) * right.nbytes
        yield dp.Row(name, dp.relative_error(weights_P, right), sent, held)
    for staleness in 0, 1, n - 1:
        matrix = torch.diag(torch.ones(staleness, dtype=torch.float64), -1)
        matrix[0, 0] = 1.0
        matrix[0, -1] -= greatest_rate(staleness)  # one update of the last weights, newest first
        radius = torch.linalg.eigvals(matrix).abs().max().item()
        yield dp.Row(f"greatest rate, staleness {staleness}", abs(radius - 1))


def pipeline_twin(modules, micro_batches, met, m=1, stash=True):
    """The weights {name: tensor} of each stage after all micro-batches, in one process. Micro-batch
    i meets version met(s, i) of stage s; m micro-batches make an update."""
    history = [[dict(module.named_parameters())] for module in modules]
    sums = [[0.0] * len(versions[0]) for versions in history]
    for i, (x, loss) in enumerate(micro_batches):
        parts = []
        for s, module in enumerate(modules):
            x = x.detach().requires_grad_(x.is_floating_point())
            forward = history[s][met(s, i)]
            weights = {k: w.detach().requires_grad_() for k, w in
                       (forward if stash else history[s][-1]).items()}  # fmt: skip
            parts.append((x, weights, functional_call(module, weights, x)))
            x = functional_call(module, forward, x)
        d_y, (x, weights, y) = None, parts.pop()
        parts.append((x, weights, loss(y)))
        for s in reversed(range(len(modules))):
            x, weights, y = parts[s]
            inputs = [*weights.values(), x][: len(weights) + x.requires_grad]
            gradients = torch.autograd.grad(y, inputs, d_y)
            d_y = gradients[-1]
            sums[s] = [a + b for a, b in zip(sums[s], gradients)]
            if (i + 1) % m == 0:
                newest = zip(history[s][-1].items(), sums[s])
                history[s].append({k: (w - RATE * g).detach() for (k, w), g in newest})
                sums[s] = [0.0] * len(weights)
    return [versions[-1] for versions in history]


class Flushed(TwoBuffers):
    """1F1B with a flush: of m micro-batches all meet the newest version, and then it steps."""

    def version(self, i):
        """The newest version."""
        return self.updates

    def needed(self):
        """The newest version."""
        return {self.updates}


def pipelines(n, m):
    """Each way to run a pipeline: name; make(module, rate); the version met(stage, micro-batch);
    micro-batches of an update, m or 1; micro-batches between flushes; versions of a stage."""
    newest = lambda s, i: max(0, i + 1 - n + s)
    unstashed = lambda *stage: PipeDream(*stage, stash=False)
    yield "PipeDream", PipeDream, newest, 1, None, lambda s: n - s
    yield "  backward with newest weights", unstashed, newest, 1, None, lambda s: n - s
    double = lambda *stage: TwoBuffers(*stage, m)
    yield "PipeDream-2BW", double, lambda s, i: max(0, i // m - 1), m, None, lambda s: 2
    flushed = lambda *stage: Flushed(*stage, m)
    yield "flushed", flushed, lambda s, i: i // m, m, m, lambda s: 1


def run_pipeline(make, rate, text, count, m, flush, D, groups, device, B=B, dtype=torch.float32):
    """Train this rank's stage on `count` micro-batches; returns it."""
    n, r = dist.get_world_size(), dist.get_rank()
    stage = make(stages(n, D)[r].to(device, dtype), rate)
    micro_batches = [batch(text, t, device, B, m) for t in range(count)]
    for first in range(0, count, flush or count):
        run_stage(stage, micro_batches[first : first + (flush or count)], D, groups)
    return stage


def proof_of_pipeline(text, groups, device):
    """Rows of pipelines, and of the time that they idle."""
    n, r, count = dist.get_world_size(), dist.get_rank(), 12
    m, ends = count // 3, (r > 0) + (r < n - 1)
    for name, make, met, every, flush, versions in pipelines(n, m):
        with dp.Ledger() as ledger:
            stage = run_pipeline(make, RATE, text, count, every, flush, D, groups, device,
                                 dtype=torch.float64)  # fmt: skip
        micro_batches = [batch(text, t, device, m=every) for t in range(count)]
        twin = lambda stash: pipeline_twin(fresh(n, device), micro_batches, met, every, stash)[r]
        right = twin(stash=True)
        error = lambda weights: max(dp.relative_error(weights[k], right[k]) for k in right)
        wrong = 0.0 if stage.stash else error(twin(stash=False))
        sent = ledger.sent["isend"], count * ends * 8 * B * D
        size = sum(weight.nbytes for weight in right.values())
        held = stage.most * size, versions(r) * size
        yield dp.Row(name, error(stage.versions[stage.updates]), sent, held, wrong)
    for name, size in ("flushed", m), ("not flushed", count):
        idle = pp.simulate(pp.one_f_one_b(n, size)).bubble
        yield dp.Row(f"idle time, {name}", abs(idle / ((n - 1) / (size + n - 1)) - 1))


def synchronous(model, text, updates, rate, device, B):
    """Train with the mean gradient of n - 1 workers in each step: all wait for the slowest."""
    n, r, world = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    weights_P, gradient = gradient_of(model, text, device, B)
    for t in range(0, updates, n - 1):
        share_P = gradient(weights_P, t + r - 1) / (n - 1) if r else torch.zeros_like(weights_P)
        # all_reduce(SUM) over server and workers, P: every rank now has the mean gradient
        dist.all_reduce(share_P, group=world)
        weights_P = weights_P - rate * share_P
    return weights_P


def run_servers(text, tail, updates, device, D=32, B=64):
    """Train with one worker, with workers that wait, and with a server; print loss and time."""
    n, rates = dist.get_world_size(), (0.5, 1.5, 3.0)
    seconds = {worker: 1 + worker / 2 for worker in range(1, n)}
    order, times = arrivals(seconds, updates)
    mean = sum(stalenesses(order)) / updates
    dp.say(f"\nunigram entropy {dp.unigram_entropy(text):.3f}; {updates} gradients, mean staleness "
           f"{mean:.1f}\nheld-out loss with rate{rates[0]:12}{rates[1]:8}{rates[2]:8}"
           "   simulated seconds")
    serving = lambda order, rule: lambda model, rate: asynchronous(
        model, text, order, rate, rule, device, B)[0]
    waiting = lambda model, rate: synchronous(model, text, updates, rate, device, B)
    for name, train, took in [
        ("one worker alone", serving([1] * updates, plain), updates * seconds[1]),
        ("all wait for the slowest", waiting, updates / (n - 1) * seconds[n - 1]),
        ("server, plain", serving(order, plain), times[-1]),
        ("server, rates by staleness", serving(order, aware), times[-1]),
        ("server, compensated", serving(order, compensated), times[-1]),
    ]:
        losses = []
        for rate in rates:
            model = nn.Sequential(*stages(2, D)).to(device)
            vector_to_parameters(train(model, rate), model.parameters())
            losses.append(held_out_loss(model, tail, device))
        dp.say(f"{name:28}{losses[0]:8.3f}{losses[1]:8.3f}{losses[2]:8.3f}{took:20.0f}")


def held_out_loss(model, tail, device):
    """The loss on text that was not trained on."""
    x_B3, loss = batch(tail, 0, device, 8192)
    with torch.no_grad():
        return loss(model(x_B3)).item()


def run_pipelines(text, tail, updates, m, groups, device, D=32, B=64):
    """Train each pipeline; print its loss, its idle time, and the versions that it holds."""
    n = dist.get_world_size()
    head = f"{n} stages, {updates} micro-batches"
    dp.say(f"\n{head:32}{'loss':>8}{'updates':>10}{'idle':>7}   versions on the first stage")
    for name, make, _, every, flush, _ in pipelines(n, m):
        stage = run_pipeline(make, RATE, text, updates, every, flush, D, groups, device, B)
        model = nn.Sequential(*stages(n, D)).to(device)
        for s, module in enumerate(model):
            flat = parameters_to_vector(module.parameters()).detach()
            if s == dist.get_rank():
                flat = parameters_to_vector(stage.versions[stage.updates].values())
            # broadcast from stage s over all stages, P: every rank now has this stage
            dist.broadcast(flat, group_src=s, group=dist.group.WORLD)
            vector_to_parameters(flat, module.parameters())
        idle = pp.simulate(pp.one_f_one_b(n, flush or updates)).bubble
        loss = held_out_loss(model, tail, device)
        dp.say(f"{name:32}{loss:8.3f}{stage.updates:10}{idle:7.1%}{stage.most:10}")


def main(args, device):
    """Prove, then train with a server and with pipelines; 0 if everything is as claimed."""
    n = dist.get_world_size()
    dp.say(f"delayed · {n} ranks · {dist.get_backend()} · {device.type}")
    groups, text = (dist.group.WORLD, dist.new_group()), dp.read_text(args.text, at_least=640)
    rows = [*proof_of_server(text, device), *proof_of_pipeline(text, groups, device)]
    broken = dp.prove(rows, device)
    if args.steps:
        text, tail = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
        run_servers(text, tail, args.steps, device)
        run_pipelines(text, tail, args.steps, args.micro_batches, groups, device)
    return broken


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    if not 2 <= ranks <= 5:
        raise ValueError(f"{ranks} ranks: use 2 to 5, a server and its workers, or as many stages")
    if args.micro_batches < ranks - 1:
        raise ValueError(f"--micro-batches {args.micro_batches}: use {ranks - 1} or more in an "
                         f"update: the first of {ranks} stages begins with so many")
    whole = math.lcm(ranks - 1, args.micro_batches)
    if args.steps % whole:
        raise ValueError(f"--steps {args.steps}: {ranks - 1} workers, and updates of "
                         f"{args.micro_batches} micro-batches, need a multiple of {whole}")
    dp.read_text(args.text, at_least=640)


if __name__ == "__main__":
    parser = dp.arguments(__doc__, ranks=4, steps=120)
    parser.add_argument("--micro-batches", type=int, default=4, help="of an update: 2BW, flushed")
    dp.launch(main, parser.parse_args(), validate)
