"""local_steps · Many steps alone, then one message

Over a slow link, workers cannot add up their gradients in every step. So each worker takes
`period` steps on its own weights. Then comes a round: all workers agree on new weights, from which
they start again.

    worker 0    start ── own steps, own data ──> local 0 ─┐  outer gradient = start - local
    worker 1    start ── own steps, own data ──> local 1 ─┼─ all-reduce: the mean of all workers
    ...                                                   ─┘  outer step: the next start of all

    rung                   sent by each rank in a period       held beside weights and moments
    a sum in every step    period · 2(n-1)/n · 4P              -
    LocalSGD by hand       2(n-1)/n · 4P                       -
    DiLoCo                 2(n-1)/n · 4P                       2P: start, velocity
      in int8              2(n-1)/n · P + 2(n-1) · 1,024       3P: and what was not sent
      in fragments         2(n-1)/n · 4P, a part at a time     2P
      n sites of L ranks   2(n-1)/n · 4P/L                     2P/L

These are the bytes that cross the slow link; a number has 4. In each round, a worker also tells all
others its round and its samples, in 16 bytes. Moments of the inner optimizer never travel. A sum is
held too, while it is on its way.

    python beyond/local_steps.py                          four workers; every method trains on text
    torchrun --nproc-per-node 4 beyond/local_steps.py     the same, started by torchrun

The link is simulated: bytes and their order are real, seconds are computed from them.

Guide: DiLoCo for cross-DC training · Cross-DC and federated training · LocalSGD and async
data-parallel variants. Sources: LocalSGD, arXiv:1805.09767; post-local, arXiv:1808.07217; federated
averaging, arXiv:1602.05629; DiLoCo, arXiv:2311.08105; Streaming DiLoCo, arXiv:2501.18512;
INTELLECT-1, arXiv:2412.01152.
Questions  QT.1 * where the outer gradient points   QT.2 ** where the outer step starts
           QT.3 ** what a late message finds
"""
# n ranks · r this rank · B sequences · D width · V vocabulary · P parameters

import copy
import importlib
import signal
import sys
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads ends it without a trace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

sys.path.append(str(Path(__file__).resolve().parents[1]))
dp = importlib.import_module("01_dp")
compression = importlib.import_module("beyond.compression")
memory_math = importlib.import_module("memory_math")


# ── by hand: the mean of the weights ─────────────────────────────────────────────────────────

# Two workers start at 1.0. Their own steps bring them to 0.8 and 0.6.
#
#     LocalSGD          mean of the weights: (0.8 + 0.6) / 2                       0.7
#     outer gradients   start minus local: 0.2 and 0.4, their mean is 0.3
#     outer step        rate 1:    1.0 - 1.0 · 0.3                                 0.7, the same
#                       rate 0.5:  1.0 - 0.5 · 0.3                                 0.85
#     wrong sign        local minus start, rate 1:  1.0 + 0.3                      1.3
#
# So LocalSGD is gradient descent with rate 1 on outer gradients. DiLoCo takes another optimizer.


def local_sgd_by_hand(weights_P, gradient, rate, period, steps, group):
    """Compute the weights (P) after `steps` steps, averaged over the group once in a period.

    gradient(weights_P, t) is the gradient of this worker's own data in step t, from 1 on.
    """
    for t in range(1, steps + 1):
        weights_P = weights_P - rate * gradient(weights_P, t)
        if t % period == 0:
            # all_reduce(SUM) over the workers, P: each now has the sum of all weights
            dist.all_reduce(weights_P, group=group)
            weights_P = weights_P / dist.get_world_size(group)
    return weights_P


# Post-local SGD adds up gradients in every step at first, and begins with LocalSGD later.


# ── an optimizer for outer gradients ─────────────────────────────────────────────────────────


class Outer:
    """The weights from which all workers started, and the velocity of the outer step, both (P).

    Nesterov's momentum, in torch's form. Rate 1 and momentum 0 are LocalSGD; DiLoCo has 0.7 and
    0.9. `compressor` is a `compression.Feedback`; without one, all numbers are sent.
    """

    def __init__(self, start_P, rate=0.7, momentum=0.9, compressor=None):
        self.start_P, self.velocity_P = start_P.clone(), torch.zeros_like(start_P)
        self.rate, self.momentum, self.compressor = rate, momentum, compressor
        self.round, self.samples, self.adopted = 0, 0, False
        self.sum_P = self.work = None  # of the outer gradients, on its way

    def begin(self, local_P, group):
        """Send this worker's part of the mean outer gradient; returns before it has arrived."""
        share = self.agree_on_share(group)
        # QT.1 * All workers add up what they send, and the outer step goes against the sum. Which
        #      difference does a worker send, and how much of it?
        #      hint: a gradient points away from where the worker went; all shares add up to 1
        self.sum_P = share * (self.start_P - local_P)
        # /QT.1
        if self.compressor:
            self.sum_P = self.compressor.reduce(self.sum_P, group)
        else:
            # all_reduce(SUM) over the workers, P: on its way while the worker goes on
            self.work = dist.all_reduce(self.sum_P, group=group, async_op=True)

    def agree_on_share(self, group):
        """Compute this worker's share of the mean: its samples, over those of all that count.

        A worker of an older round does not count: it started from other weights. It adopts the
        start and the velocity of the first worker that is up to date.
        """
        own = torch.tensor([self.round, self.samples], dtype=torch.float64)
        rounds, samples = compression.gather(own.to(self.start_P.device), group).T
        newest = int(rounds.max())
        counted = torch.where(rounds == newest, samples, 0.0)
        share = (counted[dist.get_rank(group)] / counted.sum().clamp(min=1)).item()
        if (rounds < newest).any():
            for state_P in (self.start_P, self.velocity_P):
                # broadcast over the workers, P: those of an older round now have it too
                dist.broadcast(state_P, group_src=int(rounds.argmax()), group=group)
        self.adopted, self.round, self.samples = self.round < newest, newest, 0
        return share

    def settle(self):
        """Wait until the sum has arrived."""
        if self.work:
            self.work.wait()
            self.work = None

    def finish(self):
        """Wait for the sum and take the outer step; returns the new start (P)."""
        self.settle()
        # QT.2 ** The workers' weights have moved on. From which weights does the outer step start?
        #      hint: torch's SGD(nesterov=True); where has the outer gradient been measured from?
        self.velocity_P.mul_(self.momentum).add_(self.sum_P)
        self.start_P.sub_(self.rate * (self.sum_P + self.momentum * self.velocity_P))
        # /QT.2
        self.round, self.sum_P = self.round + 1, None
        return self.start_P


def check_same_start(weights, group):
    """Raise 01's Disagreement unless all ranks have the same weights, bit by bit. Differences from
    different starts have no meaning, and training would still seem to run."""
    digest = sha256(weights.cpu().numpy().tobytes()).hexdigest()
    dp.agree([f"weights with the digest {digest[:12]}"], group)


# ── eight bits a number ──────────────────────────────────────────────────────────────────────


def to_codes(x):
    """Codes (rows, N) in 8 bits of numbers (rows, N), and the 256 numbers of each row that its
    codes stand for: 256 bins of one width, up to six deviations from the row's mean, and the mean
    of the numbers in each bin. Numbers beyond are in the outermost bins."""
    mean, deviation = x.mean(1, keepdim=True), x.std(1, correction=0, keepdim=True)
    place = (x - mean) / (6 * deviation).clamp(min=torch.finfo(x.dtype).tiny)  # -1 to 1
    codes = (128 * (place + 1)).floor().clamp(0, 255).long()
    zeros = x.new_zeros(len(x), 256)
    counts = zeros.scatter_add(1, codes, torch.ones_like(x))
    return codes.to(torch.uint8), zeros.scatter_add(1, codes, x) / counts.clamp(min=1)


def from_codes(codes, numbers):
    """The numbers (rows, N) that codes (rows, N) stand for."""
    return numbers.gather(1, codes.long())


class Int8(compression.Dense):
    """Codes cannot be added on their way: each rank adds up one chunk, and sends codes of the sum.

    The error of the second rounding belongs to the rank that made it. So own parts add up to what
    is applied, and `compression.Feedback` loses nothing. INTELLECT-1 has no feedback (decay=0).
    """

    def reduce(self, x_P, group):
        """Compute (applied, own), both (P), from this rank's x, (P)."""
        n, r = dist.get_world_size(group), dist.get_rank(group)
        codes, numbers = to_codes(F.pad(x_P, (0, -len(x_P) % n)).view(n, -1))  # a row, a chunk
        all_codes, all_numbers = torch.empty_like(codes), torch.empty_like(numbers)
        # all_to_all over the workers, P bytes: every rank now has all codes of its own chunk
        dist.all_to_all_single(all_codes, codes, group=group)
        # all_to_all over the workers, 256 numbers a chunk: what these codes stand for
        dist.all_to_all_single(all_numbers, numbers, group=group)
        chunk = from_codes(all_codes, all_numbers).sum(0, keepdim=True)  # the sum of all workers
        sum_codes, sum_numbers = (compression.gather(x[0], group) for x in to_codes(chunk))
        own, applied = from_codes(codes, numbers), from_codes(sum_codes, sum_numbers)
        own[r] += applied[r] - chunk[0]
        return applied.flatten()[: len(x_P)], own.flatten()[: len(x_P)]


def int8(size, decay=1.0):
    """An Int8 for so many numbers, with feedback; without it if decay is 0."""
    return compression.Feedback(Int8([(size,)]), decay)


# ── a worker: fragments that travel beside its steps, and sites of several ranks ─────────────

# period 6, three fragments, delay 1. A fragment leaves after a step, and arrives after the next:
#
#     step          1    2    3    4    5    6    7    8   ...
#     leaves             0         1         2         0
#     arrives                 0         1         2
#
# One fragment is on its way at a time. The link carries a third of P in two steps, where DiLoCo
# waits for all of P after the sixth step.


class LocalSteps:
    """A worker, which calls `after_step` after each step of its inner optimizer.

    Args:
        params: parameters; they become views of one flat tensor.
        across: process group of the workers. It may change between rounds: workers join and leave.
        site: process group of L ranks that are one worker and add up gradients in every step. Each
            of them holds and sends a slice of P/L numbers: `across` has the ranks of one slice.
        fragments, delay: the flat tensor is sent in so many parts, which arrive `delay` steps late.
        mix: part of its own weights that a worker keeps when a fragment arrives.
        rate, momentum: of the outer step.
        compressor: function of a size that returns a `compression.Feedback`, or None.

    Raises ValueError where fragments do not divide the period or a delay is too long.
    """

    def __init__(self, params, period, across, site=None, fragments=1, delay=0, mix=0.0,
                 rate=0.7, momentum=0.9, compressor=lambda size: None):  # fmt: skip
        check_period(period, fragments, delay)
        self.period, self.delay, self.mix, self.t = period, delay, mix, 0
        self.across, self.site, flat = across, site, parameters_to_vector(params).detach()
        L, place = (dist.get_world_size(site), dist.get_rank(site)) if site else (1, 0)
        self.weights = F.pad(flat, (0, -len(flat) % L))
        vector_to_parameters(self.weights[: len(flat)], params)  # views from here on
        self.parts = self.weights.view(L, -1).tensor_split(fragments, dim=1)
        self.slices = [part[place] for part in self.parts]  # those that this rank sends
        self.outers = [Outer(x, rate, momentum, compressor(len(x))) for x in self.slices]

    def after_step(self, samples=1):
        """Count a step that had so many samples; send and take in the fragments that are due."""
        self.t += 1
        for fragment, outer in enumerate(self.outers):
            outer.samples += samples
            if self.leaves(fragment, self.t):
                outer.begin(self.slices[fragment], self.across)
            if outer.sum_P is not None and self.leaves(fragment, self.t - self.delay):
                self.arrive(self.parts[fragment], outer)

    def leaves(self, fragment, t):
        """Whether a fragment leaves after step t: one after another, at equal distances."""
        distance = self.period // len(self.outers)
        return (t - (fragment + 1) * distance) % self.period == 0

    def arrive(self, part, outer):
        """Take the outer step of a fragment, gather it in the site, and go on from it."""
        start = outer.finish()
        if self.site:
            slices = start.new_empty(part.numel())
            # all_gather over the site, a fragment: its ranks now have all slices of the new start
            dist.all_gather_single(slices, start, group=self.site)
            start = slices
        # QT.3 ** A fragment was on its way for `delay` steps, in which its worker went on. What are
        #      the worker's weights now, if it keeps a part `mix` of its own?
        #      hint: mix 0 forgets the steps made since then; a worker that has just joined must
        mix = 0.0 if outer.adopted else self.mix
        part.copy_((1 - mix) * start.view_as(part) + mix * part)
        # /QT.3

    def state_dict(self):
        """Everything of this rank that its next step needs, beside the inner optimizer's state: in
        the middle of a period, the start is no longer among the weights. A sum on its way is waited
        for; it still counts at its own step."""
        for outer in self.outers:
            outer.settle()
        kept = {"t": self.t, "weights": self.weights, "outers": [vars(x) for x in self.outers]}
        return copy.deepcopy(kept)

    def load_state_dict(self, state):
        """Take what state_dict returned, on the same rank."""
        state = copy.deepcopy(state)
        self.t = state["t"]
        self.weights.copy_(state["weights"])
        for outer, saved in zip(self.outers, state["outers"]):
            vars(outer).update(saved)


def check_period(period, fragments, delay):
    """Raise ValueError unless fragments can leave at equal distances, one on its way at a time."""
    if period < 1 or fragments < 1 or period % fragments:
        raise ValueError(f"period {period} and {fragments} fragments: use a number of fragments "
                         "that divides the period, both at least 1")  # fmt: skip
    if not 0 <= delay < period // fragments:
        raise ValueError(f"delay {delay}: a fragment leaves every {period // fragments} steps and "
                         f"must arrive before the next one: use 0 to {period // fragments - 1}")


# ── the time of a step ───────────────────────────────────────────────────────────────────────


def traffic(P, n, fragments=1, e=4, int8=False):
    """The messages of a period, a list of `memory_math.Transfer`: P numbers of e bytes in each of n
    workers. Only sums that are not compressed travel beside steps."""
    call = lambda collective, size, hideable=False: memory_math.Transfer(
        "dp", "step", collective, fragments, size, n, hideable
    )
    counts, codes = call("all_gather", 16 * n), n * (-(-P // fragments // n) + 256 * e)
    if int8:
        return [counts, call("all_to_all", codes), call("all_gather", codes)]
    return [counts, call("all_reduce", e * P / fragments, hideable=True)]


def step_seconds(compute, messages, period, delay, link):
    """Mean seconds of a step: computation, `compute`, and what is not hidden of the messages of a
    period, a list from `traffic`. A message that may travel beside steps is hidden for the time of
    `delay` steps. `link` is a memory_math.Topology."""
    waited = 0.0
    for transfer in messages:
        seconds = link.seconds(memory_math.Layout(dp=transfer.ranks), transfer)
        hidden = transfer.count * delay * compute if transfer.hideable else 0.0
        waited += max(0.0, seconds - hidden)
    return compute + waited / period


def clock(events, compute, link, n):
    """Simulated seconds of a worker, from its Ledger's events and a link between n workers. A mark
    "step" takes `compute` seconds. Only a wait waits for an all-reduce; all other calls wait."""
    now = arrival = 0.0
    for event in events:
        hops = (n - 1) * (2 if event.what == "all_reduce" else 1)
        seconds = event.sent / link.outer + hops * link.latency
        if event.what == "step":
            now += compute
        elif event.what == "all_reduce":
            arrival = now + seconds
        elif event.what == "wait":
            now = max(now, arrival)
        else:
            now += seconds
    return max(now, arrival)


# ── from here on: proof, run, kit ────────────────────────────────────────────────────────────

PERIOD, STEPS, MEAN = 4, 8, dict(rate=1.0, momentum=0.0)  # two rounds; LocalSGD's outer step
sgd = lambda params: torch.optim.SGD(params, 0.5)
adamw = lambda params: torch.optim.AdamW(params, 3e-3, (0.9, 0.95), weight_decay=0.1)


def fresh(device, seed=0):
    """A float64 model; the same from the same seed."""
    torch.manual_seed(seed)
    return compression.language_model(D=6).double().to(device)


def batch(text, t, worker, B=8):
    """The samples (B, 3) of one worker in step t, and the bytes (B) after them."""
    x_B3, y_B3 = dp.sample(text, 1000 * t + worker, B, 3)
    return x_B3, y_B3[:, -1]


def backward(model, x_B3, y_B, divisor):
    """Compute the gradients of the sum of losses over a divisor."""
    device = next(model.parameters()).device
    model.zero_grad()
    loss_sum = F.cross_entropy(model(x_B3.to(device)), y_B.to(device), reduction="sum")
    (loss_sum / divisor).backward()


class Twin:
    """A worker of the twin. Torch's SGD takes the outer step, once for each fragment."""

    def __init__(self, device, inner=adamw, fragments=1, **options):
        self.model = fresh(device)
        self.flat = parameters_to_vector(self.model.parameters()).detach()
        vector_to_parameters(self.flat, self.model.parameters())  # views from here on
        self.inner, self.parts = inner(self.model.parameters()), self.flat.tensor_split(fragments)
        options = {"lr": 0.7, "momentum": 0.9, "nesterov": True} | options
        starts = [nn.Parameter(part.clone()) for part in self.parts]
        self.outer = [(start, torch.optim.SGD([start], **options)) for start in starts]

    def step(self, x_B3, y_B):
        """Take a step of its own."""
        backward(self.model, x_B3, y_B, len(y_B))
        self.inner.step()

    def arrive(self, f, gradient, mix, unrestored):
        """Take the outer step of a fragment, and go on from it."""
        start, outer = self.outer[f]
        if unrestored:
            start.data.copy_(self.parts[f])
        start.grad = gradient
        outer.step()
        self.parts[f].copy_(torch.lerp(start.data, self.parts[f], mix))


@cache
def twins(text, n, device, steps=STEPS, delay=0, mix=0.0, unrestored=False,
          B=lambda worker: 8, shares=lambda t: None, reborn=0, **options):  # fmt: skip
    """The weights (P) of each of n workers after all steps, in one process.

    shares(t) lists the workers' shares in a mean. Before step `reborn`, the last worker starts anew
    and takes the start of the others. `unrestored`: outer steps start from local weights.
    """
    workers, way = [Twin(device, **options) for worker in range(n)], {}
    fragments = len(workers[0].parts)
    for t in range(1, steps + 1):
        if t == reborn:
            workers[-1] = Twin(device, **options)
            workers[-1].outer = copy.deepcopy(workers[0].outer)
        for w, worker in enumerate(workers):
            worker.step(*batch(text, t, w, B(w)))
        for f in range(fragments):
            if (t - (f + 1) * PERIOD // fragments) % PERIOD == 0:
                each = shares(t) or [1 / n] * n
                deltas = [worker.outer[f][0].data - worker.parts[f] for worker in workers]
                way[f] = t + delay, sum(a * delta for a, delta in zip(each, deltas))
            if f in way and way[f][0] == t:
                for worker in workers:
                    worker.arrive(f, way[f][1], mix, unrestored)
    return [worker.flat for worker in workers]


class Job:
    """A rank that trains: a model, its inner optimizer, its LocalSteps. `who` chooses the data; the
    ranks of a site share the samples of one worker."""

    def __init__(self, text, who, model, across, site=None, inner=adamw, **options):
        self.text, self.who, self.model, self.across, self.site = text, who, model, across, site
        self.params, self.events = list(model.parameters()), []
        options = {"period": PERIOD} | options
        self.local = LocalSteps(self.params, across=across, site=site, **options)
        self.inner = inner(self.params)

    def steps(self, first, last, B=8, samples=None):
        """Take the steps first .. last; `samples` is what it tells the others, by default B."""
        with dp.Ledger() as ledger:
            for t in range(first, last + 1):
                x_B3, y_B = batch(self.text, t, self.who, B)
                if self.site:
                    L, place = dist.get_world_size(self.site), dist.get_rank(self.site)
                    x_B3, y_B = (whole.tensor_split(L)[place] for whole in (x_B3, y_B))
                backward(self.model, x_B3, y_B, B)
                if self.site:
                    dp.all_reduce_flat(self.model, self.site)
                self.inner.step()
                ledger.mark("step")
                self.local.after_step(samples or B)
        self.events += ledger.events
        return self

    def weights(self):
        """All parameters, (P)."""
        return parameters_to_vector(self.params).detach()

    def sent(self, group):
        """Bytes that left this rank over a group."""
        return sum(event.sent for event in self.events if event.group == group.group_name)


def proof_of_rungs(text, groups, device):
    """Rows of each rung beside its twin, and the bytes it sends across and holds."""
    world, n, r = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    L, P = n // 2, sum(p.numel() for p in fresh(device).parameters())
    slice_P, late = -(-P // L), dict(fragments=2, delay=1, mix=0.5)
    job = lambda **options: Job(text, r, fresh(device), world, **options).steps(1, STEPS)

    def row(name, job, right, rounds=STEPS // PERIOD, P=P, fragments=1):
        messages = traffic(P, dist.get_world_size(job.across), fragments, e=8)
        sent = job.sent(job.across), rounds * memory_math.sent(messages)
        held = sum(outer.start_P.nbytes + outer.velocity_P.nbytes for outer in job.local.outers)
        return dp.Row(name, dp.relative_error(job.weights(), right), sent, (held, 2 * 8 * P))

    goals_nP = torch.randn(n, 9, generator=torch.Generator().manual_seed(0)).double().to(device)
    pull = lambda weights_P, t: weights_P - goals_nP[r]  # the gradient of half a square
    average_P = local_sgd_by_hand(torch.zeros_like(goals_nP[0]), pull, 0.1, PERIOD, STEPS, world)
    right = (1 - 0.9**STEPS) * goals_nP.mean(0)
    yield dp.Row("LocalSGD by hand, on parabolas", dp.relative_error(average_P, right))
    one = Twin(device, inner=sgd)  # it has the samples of all workers, and steps once
    for t in range(1, STEPS + 1):
        one.step(*map(torch.cat, zip(*(batch(text, t, worker) for worker in range(n)))))
    yield row("LocalSGD, period 1: every step", job(period=1, inner=sgd, **MEAN), one.flat, STEPS)
    right = twins(text, n, device, inner=sgd, lr=1.0, momentum=0.0, nesterov=False)[r]
    yield row("LocalSGD", job(inner=sgd, **MEAN), right)
    yield row("DiLoCo", job(), twins(text, n, device)[r])
    right = twins(text, n, device, **late)[r]
    yield row("  in fragments, a step late", job(**late), right, fragments=2)
    tiers = Job(text, r // L, fresh(device), groups["across"], groups["site"]).steps(1, STEPS)
    yield row("  two sites, across", tiers, twins(text, 2, device)[r // L], P=slice_P)
    inside = STEPS * 2 * (L - 1) / L * 8 * P + STEPS // PERIOD * (L - 1) * 8 * slice_P
    yield dp.Row("  two sites, inside", 0.0, (tiers.sent(groups["site"]), inside))


def proof_of_workers(text, groups, device):
    """Rows of workers that do unequal work, leave, come back, or started from other weights."""
    world, n, r = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    job = lambda: Job(text, r, fresh(device), world, inner=sgd)
    error = lambda job, right: dp.relative_error(job.weights(), right)
    B, whole = lambda worker: 8 * (worker + 1), n * (n + 1) / 2
    shares = lambda t: [(worker + 1) / whole for worker in range(n)]
    right = twins(text, n, device, B=B, shares=shares, inner=sgd)[r]
    yield dp.Row("federated: by samples", error(job().steps(1, STEPS, B(r)), right))
    wrong = dp.relative_error(twins(text, n, device, B=B, inner=sgd)[r], right)
    alike = job().steps(1, STEPS, B(r), samples=1)
    yield dp.Row("  all workers alike", error(alike, right), wrong=wrong)

    visitor, fewer = job().steps(1, 4), [1 / (n - 1)] * (n - 1) + [0.0]
    if r < n - 1:
        visitor.local.across = groups["fewer"]
        visitor.steps(5, 8)
    else:  # away in the second round, it starts anew in the third
        visitor = job()
    visitor.local.across, visitor.events = world, []
    sent = visitor.steps(9, 12).sent(world)
    shares = lambda t: fewer if t in (8, 12) else None
    right = twins(text, n, device, steps=16, reborn=9, shares=shares, inner=sgd)[r]
    adopted = 2 * right.nbytes * (r < n - 1)  # start and velocity, in a broadcast round the ring
    sent = sent, memory_math.sent(traffic(len(right), n, e=8)) + adopted
    yield dp.Row("a worker leaves and comes back", error(visitor.steps(13, 16), right), sent)
    accepted = 0.0
    with suppress(dp.Disagreement):
        check_same_start(parameters_to_vector(fresh(device, r).parameters()).detach(), world)
        accepted = 1.0
    yield dp.Row("different weights are refused", accepted)


def proof_of_mistakes(text, groups, device):
    """Rows of DiLoCo, wrong on purpose; and of DiLoCo in int8."""
    world, n, r = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    job = lambda **options: Job(text, r, fresh(device), world, **options)
    right, unrestored = twins(text, n, device)[r], job()
    arrive = unrestored.local.arrive
    unrestored.local.arrive = lambda part, x: (x.start_P.copy_(part[0]), arrive(part, x))
    for name, wrong, options in [
        ("local minus start", job(rate=-0.7), dict(maximize=True)),
        ("outer step from local weights", unrestored, dict(unrestored=True)),
    ]:
        predicted = dp.relative_error(twins(text, n, device, **options)[r], right)
        error = dp.relative_error(wrong.steps(1, STEPS).weights(), right)
        yield dp.Row(name, error, wrong=predicted)
    error = dp.relative_error(job(compressor=int8).steps(1, STEPS).weights(), right)
    yield dp.Row("DiLoCo in int8", error, bound=(1e-6, 0.02))


def proof_of_int8(text, groups, device):
    """Rows of eight bits: nothing is lost, and how much is rounded."""
    world, n, r = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    draw, P = torch.Generator().manual_seed(1), 3001
    x = torch.randn(6, n, P, generator=draw, dtype=torch.float64).to(device)
    feedback = int8(P)
    applied, sent = compression.play(feedback.reduce, x, world)
    rest_P = feedback.residual_P.clone()
    # all_reduce(SUM) over the workers, P: the residuals of all workers
    dist.all_reduce(rest_P, group=world)
    error = dp.relative_error(applied.sum(0) + rest_P, x.sum((0, 1)))
    formula = memory_math.sent(traffic(P, n, e=8, int8=True)[1:])
    yield dp.Row("int8: nothing is lost", error, (sent, formula))
    even_P = x[0].sign()
    error = dp.relative_error(Int8([(P,)]).reduce(even_P[r], world)[0], even_P.sum(0))
    yield dp.Row("int8 of numbers of one size", error)
    width = 12 * x[0].std(1, correction=0, keepdim=True) / 256
    largest = ((from_codes(*to_codes(x[0])) - x[0]).abs() / width).max().item()
    yield dp.Row("int8: largest error, in bins", largest, bound=(0.25, 1.0))


def proof_of_time(text, groups, device):
    """Rows of a worker that resumes in the middle of a period, and of the simulated link."""
    world, n, r = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    late = dict(fragments=2, delay=1, mix=0.5)
    whole, first, second = (Job(text, r, fresh(device), world, **late) for _ in range(3))
    first.steps(1, 6)  # a fragment has just left
    second.local.load_state_dict(first.local.state_dict())
    second.inner.load_state_dict(copy.deepcopy(first.inner.state_dict()))
    whole.steps(1, STEPS + 1), second.steps(7, STEPS + 1)
    same = torch.equal(whole.weights(), second.weights())
    yield dp.Row("resumed: with another bit", float(not same))
    link = memory_math.Topology(node=1, outer=5e6, latency=1e-3)
    messages = traffic(len(whole.weights()), n, fragments=2, e=8)
    formula = STEPS * step_seconds(0.01, messages, PERIOD, 1, link) + 0.01
    error = abs(clock(whole.events, 0.01, link, n) / formula - 1)
    yield dp.Row("simulated seconds, and formula", error)


def trained(args, text, groups, device):
    """Train each method on the same text, (name, Job)."""
    n, r, world, B = dist.get_world_size(), dist.get_rank(), dist.group.WORLD, 32

    def job(text=text, who=r, across=world, **options):
        torch.manual_seed(0)
        model, options = compression.language_model().to(device), {"period": args.period} | options
        check_same_start(parameters_to_vector(model.parameters()).detach(), world)
        return Job(text, who, model, across, **options)

    train = lambda B=B, **options: job(**options).steps(1, args.steps, B)
    everyone = dict(who=0, site=world, period=args.steps + 1)
    yield "every step", train(n * B, **everyone)
    for period in sorted({1, args.period // 4 or 1, args.period}):
        yield f"LocalSGD, period {period}", train(**MEAN, period=period)
    first = args.steps // 2 // args.period * args.period
    later = job(**everyone).steps(1, first, n * B)
    later.site, later.who = None, r
    later.local = LocalSteps(later.params, args.period, world, **MEAN)
    yield f"  after {first} of every step", later.steps(first + 1, args.steps, B)
    own = text.tensor_split(n)[r]
    yield "  federated: own text, own number", train(2 * B * (r + 1) // (n + 1), text=own, **MEAN)
    for momentum in 0.0, 0.5, 0.9:
        yield f"DiLoCo, momentum {momentum}", train(momentum=momentum)
    yield "  in int8", train(compressor=int8)
    yield "  in int8, no feedback", train(compressor=lambda size: int8(size, 0.0))
    late = dict(fragments=args.fragments, delay=args.delay, mix=0.5)
    yield f"  {args.fragments} fragments, {args.delay} steps late", train(**late)
    yield "  two sites", train(n // 2 * B, who=r // (n // 2), **groups)


def run(args, groups, device):
    """Print the loss of every method beside its bytes and its simulated seconds."""
    text, compute = dp.read_text(args.text, 640), 0.01
    cut, link = len(text) * 9 // 10, memory_math.Topology(node=1, outer=10e6, latency=5e-3)
    x_B3, y_B3 = (whole.to(device) for whole in dp.sample(text[cut:], 0, 8192, 3))
    dp.say(f"\nunigram entropy {dp.unigram_entropy(text):.3f}; simulated are a step, 10 ms, and a "
           f"link of 10 MB/s and 5 ms\n{'':34}held-out loss   bytes across a step   ms a step")
    for name, job in trained(args, text[:cut], groups, device):
        with torch.no_grad():
            loss = F.cross_entropy(job.model(x_B3), y_B3[:, -1]).item()
        here = {job.across.group_name, dist.group.WORLD.group_name}  # marks and waits: of the world
        crossing = [event for event in job.events if event.group in here]
        seconds = clock(crossing, compute, link, dist.get_world_size(job.across)) / args.steps
        sent = job.sent(job.across) / args.steps
        dp.say(f"{name:34}{loss:13.3f}{sent:22,.0f}{1e3 * seconds:12.1f}")


def guide_figures():
    """Print the guide's job, 70B on two sites, as the formulas have it."""
    P, n, link = 70e9, 2, memory_math.Topology(node=1, outer=10e9, latency=0.05)
    compute = memory_math.training_flops(P, 4e6) / (0.4 * 1024 * memory_math.peak_flops("h100"))
    dp.say("\n70B on two sites, with 10 GB/s and 50 ms between them; a step has 4M tokens: "
           f"{compute:.1f} s on 1,024 H100\n{'':32}GB a step   times less   seconds a step")
    for name, period, delay, messages in [
        ("bf16, every step", 1, 0, traffic(P, n, e=2)),
        ("bf16, period 500", 500, 0, traffic(P, n, e=2)),
        ("fp32, period 500", 500, 0, traffic(P, n)),
        ("int8, period 100", 100, 0, traffic(P, n, int8=True)),
        ("fp32, period 100, 10 fragments", 100, 5, traffic(P, n, fragments=10)),
    ]:
        sent = memory_math.sent(messages) / period
        less, seconds = 2 * P / sent, step_seconds(compute, messages, period, delay, link)
        dp.say(f"{name:32}{sent / 1e9:9.2f}{less:13.0f}{seconds:17.2f}")


def main(args, device):
    """Prove, then train every method; 0 if everything is as claimed."""
    n = dist.get_world_size()
    dp.say(f"local_steps · {n} ranks · {dist.get_backend()} · {device.type}")
    groups, text = make_groups(n), dp.read_text(args.text, at_least=640)
    parts = proof_of_rungs, proof_of_workers, proof_of_mistakes, proof_of_int8, proof_of_time
    broken = dp.prove([row for part in parts for row in part(text, groups, device)], device)
    if args.steps:
        run(args, {name: groups[name] for name in ("site", "across")}, device)
        guide_figures()
    return broken


def make_groups(n):
    """This rank's groups: its site, half of the ranks; across, itself and its like of the other
    site; fewer, all ranks but the last. Every rank must make all groups."""
    one, other = [*range(n // 2)], [*range(n // 2, n)]
    lists = {"site": [one, other], "across": [*zip(one, other)], "fewer": [[*range(n - 1)]]}
    return {name: dist.new_subgroups_by_enumeration(ranks)[0] for name, ranks in lists.items()}


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    if ranks % 2 or ranks > 16:
        raise ValueError(f"{ranks} ranks: two sites need an even number, 2 to 16")
    check_period(args.period, args.fragments, args.delay)
    if left := args.steps % args.period:
        raise ValueError(f"--steps {args.steps} with --period {args.period}: the last {left} steps "
                         f"would reach nobody; use {args.steps - left + args.period}")
    dp.read_text(args.text, at_least=640)


if __name__ == "__main__":
    parser = dp.arguments(__doc__, ranks=4, steps=60)
    parser.add_argument("--period", type=int, default=20, help="steps between two rounds")
    parser.add_argument("--fragments", type=int, default=4, help="parts of a streamed message")
    parser.add_argument("--delay", type=int, default=2, help="steps that a fragment is on its way")
    dp.launch(main, parser.parse_args(), validate)
