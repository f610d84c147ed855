"""stability · The step that should not be taken, and how all ranks know it

A gradient has a NaN, a file is broken, a layer grows, the batch is too small to matter. The signs
of all four fit in one short vector. The ranks add this vector up once a step, before the optimizer
runs. Then every rank decides by itself from the same numbers, so all ranks decide alike.

    rank r      weights P · gradient of its b sequences P · shard of the reduced gradient P/n
                state 3P/n: its shard of the weights and of both moments (ZeRO-1)
                two snapshots of the state, 2 · 3P/n, in memory
    all ranks   a report a step: loss, log Z, two kinds of squared norms; the batch to read next

    sign in the report                          what follows
    the norm is not finite                      skip: no rank steps, and the next batch comes
    the norm is far above its own history       clip: the shard is scaled (on request)
    the loss is, in 2 of 3 steps                roll back: the state of a snapshot, other batches
    a parameter differs from its peers          its name is told
    squares of ranks and of their sum differ    noise scale: how many sequences are worth reading

    moves                        elements sent by each rank
    a step                       2(n-1)/n · P, as without a report
    its report                   2(n-1)/n · (3 + number of parameter tensors)
    a rollback                   (n-1)/n · P: the weights are gathered; the state is local

    python beyond/stability.py                          two ranks; a NaN and a broken file come
    torchrun --nproc-per-node 2 beyond/stability.py     the same, started by torchrun

Guide: Loss curves · Gradient norms · Failure modes · Real failure cases 1 and 3 · FAQ. There, a
bound of 3 sigma would fire each 741 healthy steps, and its own text allows one spike in 1,000. The
rule 64 · parameters · 1e-9 gives 4,480 tokens for 70B, not 4.5M. A batch of one repeated sequence
has a larger gradient, at most sqrt(B) times as large: it does not explode by itself.

Sources: PaLM, arXiv:2204.02311, section 5.1 (rollback, z-loss); McCandlish et al., 1812.06162,
appendix A.1 (noise scale); ZClip, 2504.02507 (norms and their history); Iglewicz & Hoaglin, 1993.
Questions  QS.1 ** which gradient was divided by what?   QS.2 ** who decides, and by which numbers?
           QS.3 * what goes back, and what goes on?
"""
# n ranks · r this rank · B sequences · b sequences of this rank · S tokens of a sequence
# D width · V vocabulary · P parameters

import importlib
import itertools
import math
import re
import signal
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads ends it without a trace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

sys.path.append(str(Path(__file__).resolve().parents[1]))
dp = importlib.import_module("01_dp")

RATE, BETAS, EPS, DECAY = 3e-3, (0.9, 0.95), 1e-8, 0.1
WINDOW, HISTORY = 128, 16  # steps that a value is compared with: at most, at least
HIGH = 4.0  # a value is high from here on, in robust standard deviations
FLOOR = 0.01  # a standard deviation is at least this share of the median
ODD = 3.0  # a parameter is odd if its norm is so many times that of its peers, or a part of it
PATIENCE = 5  # steps in a row that may be skipped
EVERY = 8  # steps between snapshots


# ── by hand: one report a step, and the same decision everywhere ─────────────────────────────

# Two ranks, four weights; each rank holds the reduced gradient of two of them.
#
#             its share of the loss   its shard of the gradient   alone it would say
#   rank 0            1.4             [0.3, nan]                  not finite, I skip
#   rank 1            1.5             [0.2, 0.1]                  a norm of 0.22, I step
#   report            2.9             squares [nan, 0.05]         all read this: all skip
#
# Alone, rank 1 steps: half of the weights are then one step older than the others, and no error is
# raised. A sum keeps what is bad: inf + x is inf or nan, and nan + x is nan.


class Report(NamedTuple):
    """The numbers of one step, the same on every rank."""

    loss: float  # mean over all tokens of the step
    log_z: float  # mean of log Z, the logarithm of the softmax's denominator
    local_square: float  # mean over ranks of the squared norm of a rank's own gradient
    squares: list  # squared norm of each parameter's reduced gradient

    @property
    def norm(self):
        """The norm of the reduced gradient."""
        return math.sqrt(sum(self.squares))


def step_report(loss, log_z, gradient_P, parts, count, group):
    """Add up what ranks know of a step; returns the Report.

    Args: this rank's shares of loss and log Z; its own gradient, not yet reduced; `parts`, what it
    holds of the reduced gradient, as (number of the parameter, tensor, ranks that hold the same);
    how many parameters there are.
    """
    square = lambda x: torch.linalg.vector_norm(x, dtype=torch.float64) ** 2
    numbers = torch.zeros(3 + count, dtype=torch.float64, device=gradient_P.device)
    numbers[0], numbers[1] = loss, log_z
    numbers[2] = square(gradient_P) / dist.get_world_size(group)
    for number, part, copies in parts:
        numbers[3 + number] += square(part) / copies  # each element counts once in the sum
    # all_reduce(SUM) over dp, 3 + count: every rank now reads the same numbers
    dist.all_reduce(numbers, group=group)
    loss, log_z, local_square, *squares = numbers.tolist()
    return Report(loss, log_z, local_square, squares)


def parts_of_shard(shard, start, sizes):
    """The parts of parameters in a shard of the flat gradient, from element `start` on, as
    (number of the parameter, tensor, 1). A parameter may begin or end in another shard."""
    begin = 0
    for number, size in enumerate(sizes):
        first, last = max(begin, start), min(begin + size, start + len(shard))
        if first < last:
            yield number, shard[first - start : last - start], 1
        begin += size


# ── high: far above its own history ──────────────────────────────────────────────────────────

# Losses 3.0 3.1 2.9 3.0 9.0: their mean is 4.2 and their standard deviation 2.7, so 9.0 is not even
# 2 of them away. The median is 3.0. Distances from it are 0 0.1 0.1 0 6: their median is 0.1. A
# spike moves neither. For normal values, 1.4826 · this distance is the standard deviation.
#
# A rule "three times the mean" sees nothing: a language model at 1.4 times its loss is broken.


def z_score(values, history):
    """The distance of values from the median of their history, in robust standard deviations."""
    history = torch.as_tensor(history, dtype=torch.float64)
    center = history.quantile(0.5)
    spread = 1.4826 * (history - center).abs().quantile(0.5)
    return (values - center) / torch.maximum(spread, FLOOR * center.abs())


def spike(losses, window=WINDOW):
    """Whether the last loss is high, and it or another one of the last three makes two."""
    high = []
    for i in range(max(len(losses) - 3, HISTORY), len(losses)):
        high.append(bool(z_score(losses[i], losses[max(i - window, 0) : i]) > HIGH))
    return sum(high) >= 2 and high[-1]


def norm_limit(norms, window=WINDOW):
    """The largest norm that is not high beside earlier norms; inf while they are few."""
    if len(norms) < HISTORY:
        return math.inf
    history = torch.tensor(norms[-window:], dtype=torch.float64)
    center = history.quantile(0.5)
    return (center + HIGH * (center / z_score(2 * center, history))).item()


# ── odd: unlike its peers ────────────────────────────────────────────────────────────────────


def odd_parameters(names, norms):
    """(name, ratio) of each parameter whose norm is unlike that of its peers, the oddest first.

    Peers have one name but for the number of their block. The ratio is to the median of peers. At
    the start of a run there is no history, but there are peers. A matrix that is too large shows
    in its neighbours: what it multiplies, in forward or in backward, makes their gradients large.
    """
    peers = {}
    for name, norm in zip(names, norms):
        kind = re.sub(r"\.\d+\.", ".*.", name, count=1)
        peers.setdefault(kind, []).append((name, max(norm, 1e-30)))
    ratios = {name: norm / statistics.median(norm for _, norm in same)
              for same in peers.values() for name, norm in same}  # fmt: skip
    odd = [(name, ratio) for name, ratio in ratios.items() if not 1 / ODD <= ratio <= ODD]
    return sorted(odd, key=lambda pair: -abs(math.log(pair[1])))


# ── noise: how much of a gradient is chance ──────────────────────────────────────────────────

# A batch of b sequences has the squared norm |G|² + S/b on average: G is the gradient of all data,
# and S the variance of a sequence's gradient, added up over the parameters. Two batch sizes give
# two equations. Data parallelism has both for free: a rank's b sequences, and all B = n · b.
#
# Two sequences have the gradients 1.5 and 0.5, so |G|² = 1 and S = 0.25. Two ranks draw one each:
#
#   draw       mean of ranks' squares   square of the mean   |G|²    S      S / |G|²
#   1.5 1.5    2.25                     2.25                 2.25    0      0
#   1.5 0.5    1.25                     1                    0.75    0.5    0.667
#   0.5 1.5    1.25                     1                    0.75    0.5    0.667
#   0.5 0.5    0.25                     0.25                 0.25    0      0
#   mean                                                     1       0.25   0.333, wrong
#
# The estimates are right on average, and 0.25 / 1 is the noise scale. A mean of ratios is not.


def estimates(report, n, b):
    """(|G|², S) of one step, where n ranks had b sequences each; n > 1. Single estimates are rough,
    and |G|² may even be negative. Source: McCandlish et al., arXiv:1812.06162, appendix A.1."""
    # QS.1 ** A rank has divided its gradient by the tokens of the step, not by its own. Which
    #      squares belong to batches of b and of B, and what are |G|² and S?
    #      hint: the gradient of b sequences is a mean over b sequences
    B, square_B = n * b, sum(report.squares)
    square_b = n**2 * report.local_square
    G = (B * square_B - b * square_b) / (B - b)
    S = (square_b - square_B) / (1 / b - 1 / B)
    # /QS.1
    return G, S


def noise_scale(reports, n, b):
    """S / |G|² in sequences, of the means over steps; inf if |G|² drowns in noise. Batches far
    above it bring little: |G|² + S/B is then nearly |G|²."""
    G, S = (statistics.fmean(column) for column in zip(*(estimates(x, n, b) for x in reports)))
    return S / G if G > 0 else math.inf


# ── z-loss: a number that the loss does not see ──────────────────────────────────────────────


def loss_shares(logits_bSV, y_bS, tokens, z_weight):
    """This rank's shares of the loss, of log Z, and of what is minimised: loss + z-loss.

    The loss does not change if one number is added to all logits of a token, so nothing holds this
    number. The z-loss, z_weight · (log Z)², pulls it to where log Z is 0. PaLM takes 1e-4.
    """
    log_z = logits_bSV.logsumexp(-1)
    loss = F.cross_entropy(logits_bSV.flatten(0, 1), y_bS.flatten(), reduction="sum") / tokens
    z_loss = z_weight * log_z.square().sum() / tokens
    return loss.detach(), log_z.detach().sum() / tokens, loss + z_loss


# ── a run that steps, skips, clips and rolls back ────────────────────────────────────────────


class Snapshot(NamedTuple):
    """A copy of this rank's state, and where the run was."""

    t: int  # steps taken
    cursor: int  # the next batch
    state: torch.Tensor


def adamw(state, gradient, t):
    """Step a shard, the t-th time: `state` (3, P/n) holds weights and both moments; in place."""
    weights, first, second = state
    first.lerp_(gradient, 1 - BETAS[0])
    second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
    scale = (second / (1 - BETAS[1] ** t)).sqrt() + EPS
    weights.mul_(1 - RATE * DECAY).sub_(RATE / (1 - BETAS[0] ** t) * first / scale)


class Trainer:
    """A data-parallel run with a sharded state, which looks at each step before it is taken.

    Args: a model, the same on all ranks; batch, a function from the cursor to (x_BS, y_BS), the
    same on all ranks; clip, whether a high norm is scaled down; skipped, the batches that are not
    to be read; window, how many steps a value is compared with: few while the loss falls fast. A
    checkpoint must keep `skipped` and `cursor` beside the state.
    """

    def __init__(self, model, batch, group, z_weight=0.0, clip=False, skipped=(), window=WINDOW):
        self.model, self.batch, self.group = model, batch, group
        self.z_weight, self.clip, self.window, self.skipped = z_weight, clip, window, set(skipped)
        self.n, self.r = dist.get_world_size(group), dist.get_rank(group)
        self.names, self.params = zip(*model.named_parameters())
        self.sizes = [param.numel() for param in self.params]
        flat_P = parameters_to_vector(self.params).detach()
        self.padding = -len(flat_P) % self.n
        self.weights = F.pad(flat_P, (0, self.padding))
        vector_to_parameters(self.weights[: len(flat_P)], self.params)  # views from here on
        self.state = self.weights.new_zeros(3, len(self.weights) // self.n)
        self.state[0] = self.weights.view(self.n, -1)[self.r]
        self.cursor, self.wasted, self.reports, self.snapshots = 0, 0, [], []

    def own_gradient(self):
        """Compute (share of the loss, share of log Z, flat gradient) of this rank's sequences."""
        x_BS, y_BS = self.batch(self.cursor)
        parts = (whole.tensor_split(self.n)[self.r] for whole in (x_BS, y_BS))
        x_bS, y_bS = (part.to(self.weights.device) for part in parts)
        logits_bSV = self.model(x_bS)
        loss, log_z, objective = loss_shares(logits_bSV, y_bS, y_BS.numel(), self.z_weight)
        gradients = torch.autograd.grad(objective, self.params)
        return loss, log_z, F.pad(parameters_to_vector(gradients), (0, self.padding))

    def look(self):
        """Compute the reduced gradient of the next batch: (Report, this rank's shard)."""
        loss, log_z, gradient_P = self.own_gradient()
        shard = torch.empty_like(self.state[0])
        # reduce_scatter(SUM) over dp, P: each rank now holds its shard of the whole gradient
        dist.reduce_scatter_single(shard, gradient_P, group=self.group)
        parts = parts_of_shard(shard, self.r * len(shard), self.sizes)
        return step_report(loss, log_z, gradient_P, parts, len(self.sizes), self.group), shard

    def step(self):
        """Read a batch; step, skip or roll back. Returns which, and the Report."""
        while self.cursor in self.skipped:
            self.cursor += 1
        t = len(self.reports)
        if t % EVERY == 0 and t not in [snapshot.t for snapshot in self.snapshots]:
            self.snapshots.append(Snapshot(t, self.cursor, self.state.clone()))
            self.snapshots = self.snapshots[-2:]
        report, shard = self.look()
        self.cursor += 1
        outcome = self.decide(report)
        if outcome == "stepped":
            if self.clip:
                limit = norm_limit([x.norm for x in self.reports], self.window)
                shard *= min(1.0, limit / report.norm)
            self.reports.append(report)
            adamw(self.state, shard, len(self.reports))
            self.gather()
        elif outcome == "rolled back":
            self.roll_back()
        return outcome, report

    def decide(self, report):
        """What to do about a step; RuntimeError after too many skipped steps in a row."""
        # QS.2 ** One rank's shard has a NaN, or one rank's sequences have a high loss. Who decides?
        #      hint: a decision is the same everywhere if all that it depends on is
        outcome = "stepped"
        if not math.isfinite(report.norm + report.loss):
            outcome = "skipped"
        elif spike([*(x.loss for x in self.reports), report.loss], self.window):
            outcome = "rolled back"
        # /QS.2
        self.wasted = self.wasted + 1 if outcome == "skipped" else 0
        if self.wasted > PATIENCE:
            raise RuntimeError(f"{self.wasted} steps in a row are not finite, up to batch "
                               f"{self.cursor - 1}: no batch is at fault; use a checkpoint")
        return outcome

    def roll_back(self):
        """Take the state of the older snapshot: damage may be older than what is seen of it. All
        batches since then are skipped; in PaLM they made no spike from another state."""
        snapshot = self.snapshots[0]
        # QS.3 * A bad step has changed the weights, and what else? What must not go back?
        #      hint: moments remember gradients; the same batches would come again
        self.state.copy_(snapshot.state)
        del self.reports[snapshot.t :]
        self.skipped |= {*range(snapshot.cursor, self.cursor)}
        # /QS.3
        self.snapshots = [snapshot]
        self.gather()

    def gather(self):
        """Give every rank the weights of all shards."""
        # all_gather over dp, P: every rank now holds the weights that the shards have
        dist.all_gather_single(self.weights, self.state[0], group=self.group)


# ── from here on: proof, run, kit ────────────────────────────────────────────────────────────


class Faulty(Trainer):
    """A run in which rank 0 finds a NaN in the first element of its gradient of some batches.
    alone: each rank decides by its own shard, and one that skips still sends its weights: without
    that, the others would wait for it in the all_gather."""

    def __init__(self, *args, nan=(), alone=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.nan, self.alone = nan, alone

    def own_gradient(self):
        loss, log_z, gradient_P = super().own_gradient()
        if self.cursor in self.nan and self.r == 0:
            gradient_P[0] = math.nan
        return loss, log_z, gradient_P

    def look(self):
        report, shard = super().look()
        own = [shard.square().sum().item()]
        return (report._replace(squares=own) if self.alone else report), shard

    def step(self):
        outcome, report = super().step()
        if self.alone and outcome == "skipped":
            self.gather()
        return outcome, report


class OnlyWeights(Trainer):
    """A run that rolls back its weights and keeps the moments of the bad steps."""

    def roll_back(self):
        moments = self.state[1:].clone()
        super().roll_back()
        self.state[1:] = moments


def fresh(device, D=16, layers=3, S=16, bad=None):
    """A model, the same from the same seed; the parameter named `bad` is 8 times too large."""
    torch.manual_seed(0)
    model = dp.LanguageModel(D, layers, heads=2, S=S).to(device)
    if bad:
        model.get_parameter(bad).data *= 8
    return model


def reader(text, B=12, S=16, broken=()):
    """The function from a cursor to its batch; batches of a broken file are noise after a byte."""

    def batch(cursor):
        x_BS, y_BS = dp.sample(text, cursor, B, S)
        if cursor in broken:
            noise = torch.Generator().manual_seed(cursor)
            x_BS, y_BS = x_BS * 0 + 101, torch.randint(256, y_BS.shape, generator=noise)
        return x_BS, y_BS

    return batch


def run(trainer, steps):
    """The outcomes of some steps."""
    return [trainer.step()[0] for _ in range(steps)]


class Twin:
    """One process with torch's AdamW, whose weights are flat and in n parts; float64."""

    def __init__(self, batch, device, n=1, z_weight=0.0):
        self.model, self.batch, self.z_weight = fresh(device), batch, z_weight
        flat_P = parameters_to_vector(self.model.parameters()).detach()
        self.size = -(-len(flat_P) // n)  # rounded up
        self.parts = [part.clone() for part in flat_P.split(self.size)]
        self.optimizer = torch.optim.AdamW(self.parts, RATE, BETAS, EPS, DECAY)

    weights = property(lambda self: torch.cat(self.parts))

    def gradients(self, cursor, rows=slice(None)):
        """Gradients of the mean loss of some sequences of a batch, and that loss."""
        vector_to_parameters(self.weights, self.model.parameters())
        x_bS, y_bS = (x[rows].to(self.weights.device) for x in self.batch(cursor))
        logits = self.model(x_bS).flatten(0, 1)
        loss = F.cross_entropy(logits, y_bS.flatten())
        objective = loss + self.z_weight * logits.logsumexp(-1).square().mean()
        return torch.autograd.grad(objective, [*self.model.parameters()]), loss.item()

    def step(self, cursor, limit=math.inf, without=()):
        """Step on a batch, with a norm of at most `limit`; parts in `without` are left out. Returns
        the gradient's norm before."""
        gradient_P = parameters_to_vector(self.gradients(cursor)[0])
        norm = gradient_P.norm().item()
        gradient_P *= min(1.0, limit / norm)
        for i, (part, gradient) in enumerate(zip(self.parts, gradient_P.split(self.size))):
            part.grad = None if i in without else gradient.clone()
        self.optimizer.step()
        return norm

    def train(self, cursors):
        """Step on these batches; returns the twin."""
        for cursor in cursors:
            self.step(cursor)
        return self


def weights_of(trainer):
    """The flat weights without their padding."""
    return trainer.weights[: sum(trainer.sizes)]


def report_rows(text, group, device):
    """Rows of the report: values beside one process, under three ways to split the gradient."""
    n, r, batch, steps = dist.get_world_size(group), dist.get_rank(group), reader(text), 4
    trainer = Trainer(fresh(device), batch, group, z_weight=0.01)
    with dp.Ledger() as ledger:
        run(trainer, steps)
    P, count = len(trainer.weights), len(trainer.sizes)
    sent = sum(ledger.sent.values()), steps * 2 * (n - 1) / n * 8 * (P + 3 + count)
    held = sum(x.state.nbytes for x in trainer.snapshots) + trainer.state.nbytes
    twin = Twin(batch, device, z_weight=0.01).train(range(steps))
    error = dp.relative_error(weights_of(trainer), twin.weights)
    yield dp.Row("4 steps, with z-loss", error, sent, (held, 2 * 3 * P / n * 8))
    gradients, loss = twin.gradients(steps)
    right = torch.stack([x.norm() for x in gradients])
    report, _ = trainer.look()
    found = lambda report: torch.tensor(report.squares, device=device).sqrt()
    yield dp.Row("  report: loss", abs(report.loss / loss - 1))
    yield dp.Row("  report: norms of flat shards", dp.relative_error(found(report), right))
    whole = [(i, x, n) for i, x in enumerate(gradients)]
    cut = [(i, x.tensor_split(n)[r], 1) if x.dim() > 1 else (i, x, n) for i, x, n in whole]
    for name, parts, wrong in [
        ("  matrices cut, vectors copied", cut, 0.0),
        ("  all copied", whole, 0.0),
        ("  each copy counts", [(i, x, 1) for i, x, _ in whole], math.sqrt(n) - 1),
    ]:
        report = step_report(0, 0, gradients[0], parts, count, group)
        yield dp.Row(name, dp.relative_error(found(report), right), wrong=wrong)
    for bad in "blocks.2.linear1.weight", "blocks.1.linear2.weight":
        trainer = Trainer(fresh(device, bad=bad), batch, group)
        odd = odd_parameters(trainer.names, found(trainer.look()[0]).tolist())
        yield dp.Row(f"  {bad[:16]} x 8 is named", float(not (odd and odd[0][0][:8] == bad[:8])))


def decision_rows(text, group, device):
    """Rows of skipped, clipped and rolled-back steps."""
    n, batch = dist.get_world_size(group), reader(text)
    skipping = Faulty(fresh(device), batch, group, nan={2})
    outcomes = run(skipping, 5)
    told = Trainer(fresh(device), batch, group, skipped={2})
    run(told, 4)
    right = Twin(batch, device).train([0, 1, 3, 4]).weights
    error = dp.relative_error(weights_of(skipping), right)
    yield dp.Row("a NaN: all skip the batch", error + (outcomes[2] != "skipped"))
    yield dp.Row("  state beside one that never saw", 1 - torch.equal(skipping.state, told.state))
    alone = Faulty(fresh(device), batch, group, nan={2}, alone=True)
    run(alone, 5)
    halves = Twin(batch, device, n)
    for cursor in range(5):
        halves.step(cursor, without={0} if cursor == 2 else ())
    error = dp.relative_error(weights_of(alone), right)
    yield dp.Row("  each rank decides alone", error, wrong=dp.relative_error(halves.weights, right))
    yield from rollback_rows(text, group, device)
    yield clip_row(text, group, device)


def clip_row(text, group, device):
    """The row of a broken file of one batch: its norm is high, and it is clipped."""
    first = 3 * HISTORY
    batch = reader(text, broken={first})
    clipping = Trainer(fresh(device), batch, group, clip=True, window=HISTORY)
    run(clipping, first + 2)
    twin, norms, limits = Twin(batch, device), [], []
    for cursor in range(first + 2):
        limits.append(math.inf)
        if len(history := norms[-HISTORY:]) == HISTORY:
            center = statistics.median(history)
            spread = 1.4826 * statistics.median(abs(norm - center) for norm in history)
            limits[-1] = center + HIGH * max(spread, FLOOR * center)
        norms.append(twin.step(cursor, limits[-1]))
    error = dp.relative_error(weights_of(clipping), twin.weights)
    return dp.Row("a high norm is clipped", error + (norms[first] <= limits[first]))


def rollback_rows(text, group, device):
    """Rows of a broken file: its second batch is recognised, when its first has been stepped on."""
    n, start, first = dist.get_world_size(group), 3 * EVERY, 4 * EVERY + 3
    batch, steps = reader(text, broken={first, first + 1}), first + 2
    trainer = Trainer(fresh(device), batch, group, window=HISTORY)
    outcomes = run(trainer, steps - 1)
    with dp.Ledger() as ledger:
        outcomes += run(trainer, 1)
    P, count = len(trainer.weights), len(trainer.sizes)
    # a rollback sends as a step: a gradient, a report, and the weights
    sent = sum(ledger.sent.values()), 2 * (n - 1) / n * 8 * (P + 3 + count)
    back = range(start, steps)  # batches since the older of two snapshots
    told = Trainer(fresh(device), batch, group, skipped=back)
    run(told, start)
    right = Twin(batch, device).train(range(start))
    error = dp.relative_error(weights_of(trainer), right.weights)
    right = right.train([steps, steps + 1]).weights
    expected = ["stepped"] * (steps - 1) + ["rolled back"]
    yield dp.Row("a broken file: rolled back", error + (outcomes != expected), sent)
    yield dp.Row("  state beside one that never saw", 1 - torch.equal(trainer.state, told.state))
    run(trainer, 2), run(told, 2)
    yield dp.Row("  and two steps later", 1 - torch.equal(trainer.state, told.state))
    error = dp.relative_error(weights_of(trainer), right) + (trainer.skipped != {*back})
    yield dp.Row("  and beside one process", error)
    forgot = OnlyWeights(fresh(device), batch, group, window=HISTORY)
    run(forgot, steps + 2)
    twin = Twin(batch, device).train(range(start))
    before = twin.weights  # of one part: n is 1
    part = twin.train(range(start, first + 1)).parts[0].copy_(before)
    twin.optimizer.state[part]["step"].fill_(start)
    wrong = dp.relative_error(twin.train([steps, steps + 1]).weights, right)
    error = dp.relative_error(weights_of(forgot), right)
    yield dp.Row("  only weights go back", error, wrong=wrong)


def noise_rows(text, group, device):
    """Rows of the noise scale: exact over all draws of 2 ranks, 2 of 4 sequences each."""
    twin = Twin(reader(text), device)
    pick = lambda i: parameters_to_vector(twin.gradients(0, slice(i, i + 1))[0])
    gradients = torch.stack([pick(i) for i in range(4)])
    gram = gradients @ gradients.T  # the square of a mean needs only the products of its terms
    draws, n, b = [*itertools.product(range(4), repeat=4)], 2, 2
    square = lambda draw: (gram[draw][:, draw].mean()).item()
    reports = []
    for draw in map(list, draws):  # a rank's own gradient is divided by the tokens of both
        own = [square(draw[:2]) / n**2, square(draw[2:]) / n**2]
        reports.append(Report(0, 0, statistics.fmean(own), [square(draw)]))
    mean = gradients.mean(0)
    G, S = mean.square().sum().item(), (gradients - mean).square().sum(1).mean().item()
    found = [statistics.fmean(column) for column in zip(*(estimates(x, n, b) for x in reports))]
    yield dp.Row("noise: |G|² over all 256 draws", abs(found[0] / G - 1))
    yield dp.Row("  S over all draws", abs(found[1] / S - 1))
    yield dp.Row("  noise scale", abs(noise_scale(reports, n, b) / (S / G) - 1))
    undone = [x._replace(local_square=x.local_square / n**2) for x in reports]
    negative = -(S / n + (n + 1) * b / n * G)  # what S becomes: B and b exchange their roles
    off = statistics.fmean(estimates(x, n, b)[1] for x in undone)
    yield dp.Row("  S, without multiplying by n", abs(off / S - 1), wrong=abs(negative / S - 1))
    pairs = itertools.product((1.5, 0.5), repeat=2)
    coin = [Report(0, 0, (x * x + y * y) / 8, [((x + y) / 2) ** 2]) for x, y in pairs]
    ratio = statistics.fmean(S / G for G, S in (estimates(x, 2, 1) for x in coin))
    yield dp.Row("  the example's scale", abs(noise_scale(coin, 2, 1) / 0.25 - 1))
    yield dp.Row("  a mean of ratios", abs(ratio / 0.25 - 1), wrong=1 / 3)
    same = statistics.fmean(gram.diagonal().tolist())  # a batch of one sequence, any number of it
    yield dp.Row("  one sequence, repeated: |G|² + S", abs(same / (G + S) - 1))
    trainer = Trainer(fresh(device), twin.batch, group)
    report, n = trainer.look()[0], trainer.n
    rows = [slice(12 * r // n, 12 * (r + 1) // n) for r in range(n)]
    squares = [parameters_to_vector(twin.gradients(0, x)[0]).square().sum().item() for x in rows]
    error = abs(n**2 * report.local_square / statistics.fmean(squares) - 1)
    yield dp.Row("  report: squares of ranks", error)


def closed_rows(device):
    """Rows that have a closed form: false alarms on normal losses, and the pull of the z-loss."""
    draws = torch.randn(10**6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = z_score(draws, draws)
    for sigma in 3, HIGH:
        share = math.erfc(sigma / math.sqrt(2)) / 2
        margin = 3 * math.sqrt((1 - share) / share / len(draws))
        counted = (scores > sigma).double().mean().item() / share
        yield dp.Row(f"{sigma:.0f} sigma: false alarms, of 1 in {1 / share:,.0f}", counted,
                     bound=(1 - margin, 1 + margin))  # fmt: skip
    V, rate, start = 16, 5.0, 10.0
    y_bS = torch.arange(V, device=device).view(1, V)
    for weight in 0.0, 0.01:
        logits_V = torch.full((V,), start, device=device).requires_grad_()
        for _ in range(50):
            _, _, objective = loss_shares(logits_V.expand(1, V, V), y_bS, V, weight)
            logits_V.data -= rate * torch.autograd.grad(objective, logits_V)[0]
        expected = (start + math.log(V)) * (1 - 2 * rate * weight / V) ** 50
        error = abs(logits_V.detach().logsumexp(0).item() / expected - 1)
        yield dp.Row(f"log Z after 50 steps, weight {weight}", error)


def train(args, group, device):
    """Train on text; a NaN and a broken file come. Print what the reports say."""
    B, S, D, layers = 16, 32, 32, 4
    text, n = dp.read_text(args.text, at_least=65), dist.get_world_size(group)
    bad, broken = args.steps // 4, range(args.steps // 2, args.steps // 2 + 3)
    batch = reader(text, B, S, broken)
    trainer = Faulty(fresh(device, D, layers, S), batch, group, z_weight=1e-4, nan={bad})
    dp.say(f"\nbatch {bad}: a NaN on rank 0; batches {broken[0]} to {broken[-1]}: a broken file; "
           f"unigram entropy {dp.unigram_entropy(text):.3f}\n"
           "batch  steps   loss   log Z    norm   noise scale, sequences")
    for _ in range(args.steps):
        cursor = trainer.cursor
        outcome, report = trainer.step()
        numbers = f"{report.loss:7.3f}{report.log_z:8.3f}{report.norm:8.3f}"
        line = f"{cursor:5}{len(trainer.reports):7}{numbers}"
        if outcome != "stepped" or cursor in broken:
            dp.say(line, f"  {outcome}")
        elif cursor % 15 == 14:
            dp.say(line, f"{noise_scale(trainer.reports[-32:], n, B // n):8.1f}")
    if len(trainer.reports) >= 32:
        repeated_sequence(trainer, batch, B)
    trainer = Trainer(fresh(device, D, layers, S, bad="blocks.2.linear1.weight"), batch, group)
    report, _ = trainer.look()
    odd = odd_parameters(trainer.names, [math.sqrt(square) for square in report.squares])
    dp.say("blocks.2.linear1 starts 8 times too large; gradients unlike their peers': "
           + ", ".join(f"{name} ({ratio:.1f} times)" for name, ratio in odd[:3]))


def repeated_sequence(trainer, batch, B):
    """Print how much larger the gradient is of a batch that has one sequence B times."""
    pairs = [estimates(x, trainer.n, B // trainer.n) for x in trainer.reports[-32:]]
    G, S = (statistics.fmean(column) for column in zip(*pairs))
    predicted = math.sqrt(max(G + S, 0) / max(G + S / B, 1e-30))
    squares = []
    for change in (lambda cursor: [x[:1].expand(B, -1) for x in batch(cursor)]), batch:
        trainer.batch = change
        reports = [trainer.look()[0] for trainer.cursor in range(16)]
        squares.append(statistics.fmean(sum(report.squares) for report in reports))
    ratio = math.sqrt(squares[0] / squares[1])
    dp.say(f"\nnorm of a batch of one sequence, repeated, to that of a batch (16 of each): "
           f"{ratio:.2f}; by |G|² and S: {predicted:.2f}; at most {math.sqrt(B):.2f}")


def main(args, device):
    """Prove, then train through a NaN and a broken file; 0 if everything is as claimed."""
    group, text = dist.group.WORLD, dp.read_text(args.text, at_least=65)
    dp.say(f"stability · {dist.get_world_size()} ranks · {dist.get_backend()} · {device.type}")
    torch.set_default_dtype(torch.float64)
    rows = [*report_rows(text, group, device), *decision_rows(text, group, device),
            *noise_rows(text, group, device), *closed_rows(device)]  # fmt: skip
    torch.set_default_dtype(torch.float32)
    broken = dp.prove(rows, device)
    if args.steps:
        train(args, group, device)
    return broken


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    if ranks not in (2, 4):
        raise ValueError(f"{ranks} ranks: a noise scale needs two batch sizes, and batches have 12 "
                         "or 16 sequences: use 2 or 4")
    if 0 < args.steps < 4 * HISTORY:
        raise ValueError(f"--steps {args.steps}: a spike needs {HISTORY} steps before it: use "
                         f"{4 * HISTORY} or more, or 0")
    dp.read_text(args.text, at_least=65)


if __name__ == "__main__":
    dp.launch(main, dp.arguments(__doc__, ranks=2, steps=150).parse_args(), validate)
