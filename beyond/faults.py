"""faults · A rank dies, and the others go on

Training on many machines loses a rank every few hours. This file keeps the loss of a rank from
costing more than one step: the ranks that are left form a new group in the same processes, get
back what the dead rank held, and go on with the same batch.

    rank 0            rank 1            rank 2 (dies)     rank 3
    weights           weights           weights           weights           the same on all
    moments 0 1 2     moments 3 4 5     moments 6 7 8     moments 9 10 11   each a quarter (ZeRO-1)
    copy of 9 10 11   copy of 0 1 2     copy of 3 4 5     copy of 6 7 8     of the left neighbour

    commit     a step is prepared beside the old state; it becomes the state only if all ranks can
    buddy      after a step each rank sends its c chunks of moments to its right neighbour
    recovery   the weights come from any rank, the moments of the dead one from its buddy
    elastic    fewer ranks share the chunks: all cut anew, or only the dead rank's given away

    moves                       elements
    buddy copy, each step       2c · P/12 from each rank
    recovery of one rank        P + 2c · P/12 to the new one; copies: 2c · P/12 from each rank
    4 to 3, all cut anew        2 · P/2 in all: half of the moments
    4 to 3, only the dead's     2 · P/6 in all: a third of the dead rank's stays with its buddy

    python beyond/faults.py                          four ranks; two are killed while they train
    torchrun --nproc-per-node 4 beyond/faults.py     the same, started by torchrun

Each rank that the launcher starts is a supervisor: it forks a worker, which trains, and tells a
store when its worker has died. Workers use gloo; NCCL must abort its communicator first: not shown.
Guide: Fault tolerance at scale (there, ZeRO replicates state; it does not) · Failure modes.
Sources: Llama 3, arXiv:2407.21783, section 3.3.4; Gemini, SOSP 2023 (copies in peers' memory).
Questions  QF.1 ** when may a step count?   QF.2 *** which rank sends which chunk?
           QF.3 ** which time tells a slow rank?
"""
# n ranks · r this rank · B sequences · S tokens of a sequence · D width · V vocabulary
# P parameters · c chunks of a rank

import ctypes
import importlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads ends it without a trace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

sys.path.append(str(Path(__file__).resolve().parents[1]))
dp = importlib.import_module("01_dp")

CHUNKS = 12  # of the moments: a multiple of 1, 2, 3, 4 and 6 ranks
RATE, BETAS, EPS, DECAY = 3e-3, (0.9, 0.95), 1e-8, 0.1


# ── the serial twin ──────────────────────────────────────────────────────────────────────────


class LanguageModel(nn.Module):
    """Bytes (B, S) to logits of the next byte (B, S, V), from the last three bytes."""

    def __init__(self, D=24, V=256):
        super().__init__()
        self.token, self.mix, self.head = nn.Embedding(V, D), nn.Linear(3 * D, D), nn.Linear(D, V)

    def forward(self, x_BS):
        x_BSD = self.token(F.pad(x_BS, (2, 0)))
        seen_BSD = torch.cat([x_BSD[:, 2:], x_BSD[:, 1:-1], x_BSD[:, :-2]], dim=-1)
        return self.head(torch.tanh(self.mix(seen_BSD)))


# ── by hand: a step that counts on all ranks or on none ──────────────────────────────────────

# A step has two halves. `prepare` computes the next weights and moments beside the old ones; it
# calls every collective that the step needs. `commit` is one more collective, of a few numbers. A
# rank enters it only when its half is complete. So:
#
#     a rank dies                 the others hold       and the step is
#     before or in prepare        the old state         dropped: those left prepare it anew
#     in commit                   both states           taken, if any rank saw the commit succeed:
#                                                       all ranks had then prepared it


def commit(unwell, leaving, joining, digest, group):
    """Share what decides about a step; returns (unwell, leaving, joining) of the whole group.

    A rank is unwell if it says so, or if the digests of the reduced gradient differ.
    """
    # QF.1 ** A rank has prepared its step. What must it know of all others before the step counts?
    #      hint: one collective, in which the worst answer wins; of -x the largest is -min(x)
    flags = torch.tensor([unwell, leaving, joining, digest, -digest], dtype=torch.int64)
    # all_reduce(MAX) over the ranks, 5: the worst answer, the largest and the smallest digest
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    unwell, leaving, joining, largest, negated_smallest = flags.tolist()
    return bool(unwell) or largest != -negated_smallest, bool(leaving), bool(joining)
    # /QF.1


# ── who holds which chunk ────────────────────────────────────────────────────────────────────


def cut_anew(owners, old, new):
    """Owners of the chunks when `new` ranks share them in equal runs: [0, 0, 0, 1, 1, 1, ...]."""
    return [new[chunk * len(new) // CHUNKS] for chunk in range(CHUNKS)]


def give_away(owners, old, new):
    """Owners of the chunks when each rank of `new` keeps its own, and the others' go round."""
    others = iter(new * CHUNKS)
    return [owner if owner in new else next(others) for owner in owners]


def holders(owners, old, alive):
    """The rank that has each chunk's moments: its owner, or the owner's right neighbour in `old`.

    Raises ValueError if a rank and its buddy are both gone.
    """
    found = []
    for owner in owners:
        buddy = old[(old.index(owner) + 1) % len(old)]
        if owner not in alive and buddy not in alive:
            raise ValueError(f"rank {owner} and its buddy rank {buddy} are both lost: "
                             "resume from a checkpoint")
        found.append(owner if owner in alive else buddy)
    return found


def moves(owners, old, alive, new, share):
    """What must travel when ranks `old` become `new`: ([(chunk, from, to)], owners afterwards)."""
    # QF.2 *** Ranks leave and come. Which rank sends which chunk to which rank?
    #      hint: compare the rank that has a chunk with the rank that shall have it
    now, then = holders(owners, old, alive), share(owners, old, new)
    travel = [(chunk, a, b) for chunk, (a, b) in enumerate(zip(now, then)) if a != b]
    return travel, then
    # /QF.2


# ── who is slow ──────────────────────────────────────────────────────────────────────────────


def slow(seconds):
    """Indices of ranks whose own work is slow: robust z over 3.5, and 5% over the median.

    `seconds` is the time of each rank's own work, from its last wait to its next collective. The
    time of the whole step is the same on all ranks, because all of them wait for the slowest. The
    robust z (Iglewicz and Hoaglin 1993) is a distance in units that one outlier cannot stretch.
    """
    # QF.3 ** All ranks finish a step at the same time. Which time tells which rank is slow?
    #      hint: a healthy rank's time is the median; the median distance from it is the unit
    median = statistics.median(seconds)
    spread = statistics.median(abs(t - median) for t in seconds)
    robust_z = [0.6745 * (t - median) / max(spread, 1e-9) for t in seconds]
    return [r for r, t in enumerate(seconds) if robust_z[r] > 3.5 and t > 1.05 * median]
    # /QF.3


def shares(B, seconds):
    """Sequences of each rank, B in all, in inverse proportion to its time for one sequence."""
    speeds = [1 / t for t in seconds]
    parts = [B * speed / sum(speeds) for speed in speeds]
    by_rest = sorted(range(len(parts)), key=lambda r: int(parts[r]) - parts[r])
    left = B - sum(map(int, parts))
    return [int(part) + (r in by_rest[:left]) for r, part in enumerate(parts)]


# ── a worker: trains, and outlives its neighbours ────────────────────────────────────────────


class Scenario(NamedTuple):
    """What shall happen: faults by (worker, step), and how the others answer."""
    name: str
    steps: int = 6
    faults: dict = {}  # (worker, step): "kill", "kill prepared", "stop", "flip" or "leave"
    spares: int = 0
    restart: bool = False  # a supervisor starts a new worker when its own has died
    rejoin: int = 0  # the step at which it asks to come in
    replace: bool = False  # those left wait for a new one; or else they go on without it
    share: object = cut_anew
    seconds: dict = {}  # worker: time for one sequence, by a clock of the scenario
    delays: dict = {}  # worker: how often it sleeps the time that it has computed
    wrong: str = ""  # a rule left out: "buddies", "batch" or "early"
    B: int = 24
    S: int = 16
    text: str | None = None
    shown: bool = False  # print a line every ten steps
    patience: float = 20.0  # seconds until a rank that does not answer counts as dead


class Worker:
    """One process of the training. `members` are the workers of its group, in their order."""

    def __init__(self, number, n, scenario, store):
        self.number, self.n, self.scenario, self.store = number, n, scenario, store
        self.members, self.round, self.t = [*range(n)], 0, 0
        self.faults, self.log, self.calls, self.leaving = dict(scenario.faults), [], 0, False
        self.text = dp.read_text(scenario.text, scenario.S + 1)
        torch.manual_seed(0)
        self.model = LanguageModel()
        self.parameters = list(self.model.parameters())
        flat = parameters_to_vector(self.parameters).detach()
        self.weights = F.pad(flat, (0, -len(flat) % CHUNKS))
        self.size = len(self.weights) // CHUNKS
        self.owners = cut_anew(None, None, self.members)
        self.moments = dict.fromkeys(self.chunks_of(number), self.weights.new_zeros(2, self.size))
        self.copies, self.staged, self.regrouped = {}, None, None
        # the handler only sets a flag: a collective inside it could meet another one half done
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "leaving", True))

    def equal_counts(self):
        """Sequences of each member when all get as many as the others."""
        n, B = len(self.members), self.scenario.B
        if self.scenario.wrong == "batch":  # wrong on purpose: those left keep what they had
            return [B // self.n] * n
        return [len(part) for part in torch.arange(B).tensor_split(n)]

    def run(self):
        """Train to the last step, whatever happens. Returns what the proof looks at."""
        with dp.Ledger() as self.ledger:
            if self.number >= self.n and not self.called():
                return None  # a spare that nobody needed
            while self.t < self.scenario.steps and self.number in self.members:
                try:
                    self.form()
                    while self.t < self.scenario.steps and self.step():
                        pass
                    if self.leaving:
                        break
                except RuntimeError as error:  # a peer is gone; gloo's words differ by rank
                    self.note("lost", str(error).splitlines()[0])
                if self.t < self.scenario.steps:
                    self.regroup()
        self.store.set("over", "")
        kept = {name: vars(self)[name] for name in ("weights", "moments", "copies", "log", "t")}
        return kept | {"sent": self.ledger.sent["isend"]}

    def chunks_of(self, worker):
        return [chunk for chunk in range(CHUNKS) if self.owners[chunk] == worker]

    def note(self, what, *facts):
        self.log.append((what, self.t, *facts))

    def at(self, call):
        """Leave word in the store, for the watchdog, of the call that comes next."""
        self.calls += 1
        self.store.set(f"at {self.number}", f"call {self.calls}, {call}")

    def step(self):
        """Prepare a step, commit it, take it. False where the group has to change."""
        self.inject("kill", "stop", "leave")
        self.staged = self.prepare()
        self.inject("kill prepared")
        if self.scenario.wrong == "early":  # wrong on purpose: what is prepared counts already
            self.weights, self.moments, self.copies = self.staged[:3]
            vector_to_parameters(self.weights, self.parameters)
        self.at("commit")
        first = self.number == self.members[0]
        if first and self.scenario.rejoin == self.t > 0:
            self.wait_for(self.waiting)  # the scenario wants the new one in at this step
        joining = first and not self.scenario.replace and bool(self.waiting())
        group, digest = dist.group.WORLD, self.staged[-1]
        unwell, self.leaving, joining = commit(False, self.leaving, joining, digest, group)
        if unwell:
            self.note("dropped")
            return True
        self.take()
        return not (joining or self.leaving)

    def inject(self, *kinds):
        """Let the scenario's fault happen, once."""
        kind = self.faults.get((self.number, self.t))
        if kind in kinds:
            del self.faults[self.number, self.t]
            how = {"stop": signal.SIGSTOP, "leave": signal.SIGTERM}.get(kind, signal.SIGKILL)
            os.kill(os.getpid(), how)

    def prepare(self):
        """The next state, beside the old one: (weights, moments, copies, seconds, digest)."""
        index, group = self.members.index(self.number), dist.group.WORLD
        x_BS, y_BS = dp.sample(self.text, self.t, self.scenario.B, self.scenario.S)
        started = time.perf_counter()
        rows = slice(sum(self.counts[:index]), sum(self.counts[: index + 1]))
        tokens = sum(self.counts) * self.scenario.S
        self.model.zero_grad()
        logits = self.model(x_BS[rows]).flatten(0, 1)
        loss = F.cross_entropy(logits, y_BS[rows].flatten(), reduction="sum") / tokens
        loss.backward()
        time.sleep(self.scenario.delays.get(self.number, 0) * (time.perf_counter() - started))
        seconds = time.perf_counter() - started
        if self.scenario.seconds:
            seconds = self.counts[index] * self.scenario.seconds.get(self.number, 1.0)
        gradient = torch.cat([*(p.grad.flatten() for p in self.parameters), loss.detach()[None]])
        self.at("all_reduce of the gradients")
        # all_reduce(SUM) over the ranks, P + 1: the gradient and the loss of the whole step
        dist.all_reduce(gradient, group=group)
        if self.faults.get((self.number, self.t)) == "flip":  # memory lost a bit
            del self.faults[self.number, self.t]
            gradient[0] = -gradient[0] + 1
        digest = gradient.view(torch.uint8).long().mul(torch.arange(gradient.nbytes) + 1).sum()
        self.loss = gradient[-1].item()
        gradient = F.pad(gradient[:-1], (0, len(self.weights) - len(gradient) + 1))
        moments, weights = {}, self.weights.clone()
        for chunk, old in self.moments.items():
            part = slice(chunk * self.size, (chunk + 1) * self.size)
            moments[chunk] = adamw(weights[part], gradient[part], old, self.t + 1)
        self.gather_weights(weights)
        return weights, moments, self.send_copies(moments), seconds, int(digest)

    def gather_weights(self, weights):
        """Fill in the chunks that other ranks have stepped."""
        group, n = dist.group.WORLD, len(self.members)
        owned = [self.chunks_of(worker) for worker in self.members]
        longest, chunks = max(map(len, owned)), weights.view(CHUNKS, self.size)
        row = weights.new_zeros(longest, self.size)
        row[: len(self.moments)] = chunks[sorted(self.moments)]
        rows = weights.new_empty(n * longest, self.size)
        self.at("all_gather of the weights")
        # all_gather over the ranks, c·P/12 from each: every rank now has all new weights
        dist.all_gather_single(rows, row, group=group)
        for numbers, part in zip(owned, rows.split(longest)):
            chunks[numbers] = part[: len(numbers)]

    def send_copies(self, moments):
        """Give the right neighbour a copy of the moments; returns the left neighbour's."""
        n, index = len(self.members), self.members.index(self.number)
        if n == 1 or self.scenario.wrong == "buddies":
            return {}
        numbers = self.chunks_of(self.members[index - 1])
        arriving = self.weights.new_empty(len(numbers), 2, self.size)
        self.at("copies to the buddy")
        leaving = torch.stack([moments[c] for c in sorted(moments)])
        exchange([(leaving, (index + 1) % n)], [(arriving, (index - 1) % n)])
        return dict(zip(numbers, arriving))

    def take(self):
        """Make the prepared state the state."""
        self.weights, self.moments, self.copies, seconds, _ = self.staged
        self.staged, self.t = None, self.t + 1
        vector_to_parameters(self.weights, self.parameters)
        self.note("step", self.loss, len(self.members))
        self.store.set("step", str(self.t))
        self.watch_speed(seconds)
        if self.scenario.shown and self.number == self.members[0] and self.t % 10 == 0:
            print(f"{self.t:4}{self.loss:7.3f}  {self.members}  {self.counts}", flush=True)

    def watch_speed(self, seconds):
        """Compare the time of each rank's own work; give the slow ones fewer sequences."""
        if not (self.scenario.seconds or self.scenario.delays) or len(self.members) < 3:
            return
        row = torch.tensor([seconds / max(1, self.counts[self.members.index(self.number)])])
        rows = row.new_empty(len(self.members))
        # all_gather over the ranks, 1 from each: every rank now knows the time of all
        dist.all_gather_single(rows, row, group=dist.group.WORLD)
        self.flagged.append(slow(rows.tolist()))
        for index, worker in enumerate(self.members):
            times = sum(index in ranks for ranks in self.flagged[-4:])
            if times >= 3 and self.counts == self.equal_counts():  # one slow step proves nothing
                self.counts = shares(self.scenario.B, rows.tolist())
                self.note("slow", worker, self.counts)

    def waiting(self):
        """Workers outside the group that ask to come in."""
        asked = [w for w in range(self.n, 4 * self.n) if self.store.check([f"joining {w}"])]
        return [w for w in asked if not self.store.check([f"called {w}"])]

    def called(self):
        """Wait outside the group; True when a group asks this worker in, False when all is over."""
        reached = lambda: int(self.store.get("step")) if self.store.check(["step"]) else 0
        self.wait_for(lambda: reached() >= self.scenario.rejoin)
        self.store.set(f"joining {self.number}", "")
        while not self.store.check([f"called {self.number}"]):
            if self.store.check(["over"]):
                return False
            time.sleep(0.005)
        self.round = int(self.store.get(f"called {self.number}"))
        self.accept(json.loads(self.store.get(f"members {self.round}")))
        return True

    def regroup(self):
        """Find out who is left, agree on the next members, and what has to travel."""
        self.round += 1
        dist.destroy_process_group()
        self.store.set(f"alive {self.round} {self.number}", str(self.t))
        alive = self.answers()
        dead, new = [w for w in self.members if w not in alive], list(alive)
        if self.scenario.replace and dead:
            there = lambda: self.store.check([f"members {self.round}"])  # another was faster
            self.wait_for(lambda: there() or len(self.waiting()) >= len(dead))
            fresh = dict(zip(dead, self.waiting()))
            new = [fresh.get(worker, worker) for worker in self.members]
        elif not self.scenario.replace:
            new += self.waiting()
        steps = [int(self.store.get(f"alive {self.round} {worker}")) for worker in alive]
        proposal = dict(old=self.members, alive=alive, new=new, owners=self.owners, t=max(steps))
        # several ranks may propose; the store keeps the first proposal, and all ranks take that one
        kept = self.store.compare_set(f"members {self.round}", "", json.dumps(proposal))
        self.accept(json.loads(kept))

    def answers(self):
        """The members that answer in this round. A supervisor marks its dead worker; a worker that
        neither answers nor is marked within the scenario's patience is condemned."""
        has = lambda word: self.store.check([word])
        told = lambda w: has(f"alive {self.round} {w}") or has(f"dead {w}")
        silent = lambda: [w for w in self.members if not told(w)]
        if not self.wait_for(lambda: not silent()):
            seen = [f"rank {w} is at {self.store.get(f'at {w}').decode()}" for w in self.members]
            for worker in silent():
                self.note("condemned", worker, *seen)
                self.store.set(f"condemned {worker}", "")
            self.wait_for(lambda: not silent())
        return [w for w in self.members if not has(f"dead {w}")]

    def wait_for(self, happened):
        """True when it has happened, False after the scenario's patience."""
        deadline = time.monotonic() + self.scenario.patience
        while not happened() and time.monotonic() < deadline:
            time.sleep(0.005)
        return bool(happened())

    def accept(self, agreed):
        """Take the members on which all agree; take a prepared step that others have taken."""
        if self.number in agreed["alive"] and self.t < agreed["t"]:
            self.take()
        for worker in set(agreed["new"]) - set(agreed["alive"]):
            self.store.set(f"called {worker}", str(self.round))
        self.members, self.regrouped, self.t = agreed["new"], agreed, agreed["t"]

    def form(self):
        """Meet the members in a new group, and give each what it lacks."""
        meeting = dist.PrefixStore(f"round {self.round}", self.store)
        patience = timedelta(seconds=self.scenario.patience)
        n, index = len(self.members), self.members.index(self.number)
        dist.init_process_group("gloo", store=meeting, rank=index, world_size=n, timeout=patience)
        if self.regrouped:
            self.recover(**self.regrouped)
        self.counts, self.flagged = self.equal_counts(), []
        before = self.ledger.sent["isend"]
        self.copies = self.send_copies(self.moments)
        self.note("copied", self.ledger.sent["isend"] - before)

    def recover(self, old, alive, new, owners, t):
        """Send the weights to new members, and each chunk of moments to its new owner."""
        sends, receives, group_rank = [], [], {worker: r for r, worker in enumerate(new)}
        travel, self.owners = moves(owners, old, alive, new, self.scenario.share)
        if self.scenario.wrong == "buddies":  # wrong on purpose: moments of the dead start at zero
            travel = []
        for worker in set(new) - set(alive):
            if self.number == alive[0]:
                sends.append((self.weights, group_rank[worker]))
            if self.number == worker:
                receives.append((self.weights, group_rank[alive[0]]))
        held = self.copies | self.moments
        for chunk, source, target in travel:
            if self.number == source:
                sends.append((held[chunk], group_rank[target]))
            if self.number == target:
                held[chunk] = self.weights.new_empty(2, self.size)
                receives.append((held[chunk], group_rank[source]))
        before = self.ledger.sent["isend"]
        exchange(sends, receives)
        self.note("recovered", self.ledger.sent["isend"] - before)
        zeros, own = self.weights.new_zeros(2, self.size), self.chunks_of(self.number)
        self.moments = {chunk: held.get(chunk, zeros) for chunk in own}
        vector_to_parameters(self.weights, self.parameters)


def adamw(weights, gradient, moments, t):
    """Step `weights` in place, the t-th time; returns the new (2, size) moments."""
    first = BETAS[0] * moments[0] + (1 - BETAS[0]) * gradient
    second = BETAS[1] * moments[1] + (1 - BETAS[1]) * gradient**2
    scale = (second / (1 - BETAS[1] ** t)).sqrt() + EPS
    weights.mul_(1 - RATE * DECAY).sub_(RATE / (1 - BETAS[0] ** t) * first / scale)
    return torch.stack([first, second])


def exchange(sends, receives):
    """Send and receive (tensor, group rank) pairs at once, so that no order can block."""
    group = dist.group.WORLD
    work = [dist.P2POp(dist.isend, x, group=group, group_peer=r) for x, r in sends]
    work += [dist.P2POp(dist.irecv, x, group=group, group_peer=r) for x, r in receives]
    for handle in dist.batch_isend_irecv(work) if work else ():
        handle.wait()


# ── from here on: proof, run, kit ────────────────────────────────────────────────────────────


def start(number, n, scenario, folder, dtype):
    """Fork a worker that trains and leaves its result in the folder; returns its process id."""
    if pid := os.fork():
        return pid
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # a worker ends with its supervisor
    torch.set_default_dtype(dtype)
    store = dist.FileStore(f"{folder}/store", -1)
    try:
        result = Worker(number, n, scenario, store).run()
    except ValueError as refusal:  # a rank and its buddy are lost
        result = {"refused": str(refusal)}
        store.set("over", "")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    torch.save(result, f"{folder}/{number}.partial")
    os.rename(f"{folder}/{number}.partial", f"{folder}/{number}.pt")
    os._exit(0)


def supervise(scenario, rank, n, folder, dtype):
    """Start this rank's worker, and the spares on rank 0; mark the dead, end the condemned."""
    folder.mkdir(exist_ok=True)
    store = dist.FileStore(f"{folder}/store", -1)
    numbers = [rank, *range(n, n + scenario.spares * (rank == 0))]
    running = {number: start(number, n, scenario, folder, dtype) for number in numbers}
    while running:
        time.sleep(0.005)
        for number, pid in list(running.items()):
            if store.check([f"condemned {number}"]):
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del running[number]
            if ended and status:
                store.set(f"dead {number}", "")
                if scenario.restart and number < n:
                    running[number + 2 * n] = start(number + 2 * n, n, scenario, folder, dtype)


def twin(steps, kept=lambda t: 24, forget=None):
    """The weights of one process after AdamW `steps`, flat and padded. `kept(t)` sequences count in
    step t; forget=(t, [chunks]) sets the moments of these chunks to zero before step t."""
    torch.manual_seed(0)
    model, text = LanguageModel(), dp.read_text(None, 17)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, BETAS, EPS, DECAY)
    P = sum(param.numel() for param in model.parameters())
    size = -(-P // CHUNKS)  # rounded up
    for t in steps:
        for state in optimizer.state.values():
            state["step"].fill_(t)
        if forget and forget[0] == t:
            lost = torch.isin(torch.arange(P) // size, torch.tensor(forget[1]))
            parts = lost.split([param.numel() for param in model.parameters()])
            for param, part in zip(model.parameters(), parts):
                for name in ("exp_avg", "exp_avg_sq"):
                    optimizer.state[param][name][part.view_as(param)] = 0
        x_BS, y_BS = (whole[: kept(t)] for whole in dp.sample(text, t, 24, 16))
        optimizer.zero_grad()
        F.cross_entropy(model(x_BS).flatten(0, 1), y_BS.flatten()).backward()
        optimizer.step()
    return F.pad(parameters_to_vector(model.parameters()).detach(), (0, size * CHUNKS - P))


def scenarios(n):
    """What the proof lets happen to n ranks, at step 2 of 6."""
    last, middle = n - 1, n - 2
    after = dict(restart=True, replace=True)
    yield Scenario("nobody dies")
    yield Scenario("killed while it prepares", faults={(middle, 2): "kill"}, **after)
    yield Scenario("killed before the commit", faults={(middle, 2): "kill prepared"}, **after)
    yield Scenario("a spare takes its place", faults={(middle, 2): "kill"}, spares=1, replace=True)
    yield Scenario("fewer, then all again", faults={(last, 2): "kill"}, restart=True, rejoin=4)
    yield Scenario("fewer, only its chunks", faults={(last, 2): "kill"}, share=give_away)
    yield Scenario("stopped, then condemned", faults={(middle, 2): "stop"}, patience=3.0, **after)
    yield Scenario("a gradient is corrupted", faults={(middle, 2): "flip"})
    yield Scenario("asked to leave", faults={(middle, 2): "leave"})
    yield Scenario("rank and buddy", faults={(0, 2): "kill", (1, 2): "kill"})
    yield Scenario("one rank is slow", seconds={middle: 2.0}, steps=9)
    yield Scenario("moments start at zero", faults={(middle, 2): "kill"}, wrong="buddies", **after)
    yield Scenario("each keeps its share", faults={(last, 2): "kill"}, wrong="batch")
    yield Scenario("stepped early", faults={(middle, 2): "kill prepared"}, wrong="early", **after)


def notes(workers, what):
    """All notes of one kind, over all workers."""
    return [note for worker in workers.values() for note in worker["log"] if note[0] == what]


def proof(results, n):
    """The rows of the table: each scenario beside one process that nothing happened to."""
    calm, right = results["nobody dies"], twin(range(6))
    whole, c = right.nbytes, CHUNKS // n  # bytes of the weights; chunks of a rank
    chunk = 2 * whole // CHUNKS  # bytes of the moments of a chunk
    error = lambda workers, wanted=right: max(
        dp.relative_error(worker["weights"], wanted) for worker in workers.values()
    )
    moved = lambda name, t: sum(x[2] for x in notes(results[name], "recovered") if x[1] == t)
    held = sum(m.nbytes for m in [*calm[0]["moments"].values(), *calm[0]["copies"].values()])
    sent, same = calm[0]["sent"], calm[0]["weights"]
    yield dp.Row("nobody dies", error(calm), (sent, 7 * c * chunk), (held, 2 * c * chunk))
    for name in [s.name for s in scenarios(n) if s.replace and not s.wrong]:
        yield dp.Row(name, error(results[name]), (moved(name, 2), whole + c * chunk))
        yield dp.Row("  beside the run of nobody dies", error(results[name], same))
    elastic = moved("fewer, then all again", 2), CHUNKS // 2 * chunk
    yield dp.Row("fewer, then all again", error(results["fewer, then all again"]), elastic)
    yield dp.Row("  and all again", 0.0, (moved("fewer, then all again", 5), whole + elastic[1]))
    only = moved("fewer, only its chunks", 2), c * (n - 2) / (n - 1) * chunk
    yield dp.Row("fewer, only its chunks", error(results["fewer, only its chunks"]), only)
    yield dp.Row("a gradient is corrupted", error(results["a gradient is corrupted"], same))
    yield from sentences(results, n)
    busy = error(results["one rank is slow"], twin(range(9)))
    yield dp.Row("one rank is slow, fewer sequences", busy)
    own = [1.0 + (r == n - 2) for r in range(n)]
    yield dp.Row("  slow by its own work", float(slow(own) != [n - 2]))
    yield dp.Row("  slow by the time of the step", float(slow([2.0] * n) != [n - 2]), wrong=1.0)
    for name, wrong in [
        ("moments start at zero", dict(forget=(2, [*range((n - 2) * c, (n - 1) * c)]))),
        ("each keeps its share", dict(kept=lambda t: 24 if t < 2 else 24 // n * (n - 1))),
        ("stepped early", dict(steps=[0, 1, 2, 2, 3, 4, 5])),  # 2 prepared again
    ]:
        predicted = dp.relative_error(twin(**dict(steps=range(6)) | wrong), right)
        yield dp.Row(name, error(results[name]), wrong=predicted)


def sentences(results, n):
    """Rows of what is told rather than computed: 0 if it is told, 1 if not."""
    dropped = notes(results["a gradient is corrupted"], "dropped")
    yield dp.Row("  all ranks drop that step", float([d[1] for d in dropped] != [2] * n))
    left = [worker["t"] for worker in results["asked to leave"].values()]
    yield dp.Row("asked to leave: all, after one step", float(left != [3] * n))
    told = [w.get("refused", "") for w in results["rank and buddy"].values()]
    both = all("rank 0 and its buddy rank 1 are both lost" in text for text in told)
    yield dp.Row("rank and buddy lost: refused", float(not (told and both)))
    words = notes(results["stopped, then condemned"], "condemned")
    call = lambda sentence: int(sentence.split("call ")[1].split(",")[0])
    late = [note[2] == n - 2 and call(note[n + 1]) < max(map(call, note[3:])) for note in words]
    yield dp.Row("the watchdog names who was stopped", float(not (words and all(late))))


def play(scenario, rank, n, folder, dtype):
    """Let a scenario happen. Returns the result of each worker that was left at its end."""
    folder = Path(folder, scenario.name.replace(" ", "_"))
    supervise(scenario, rank, n, folder, dtype)
    meet(f"{folder}/end", rank, n)
    dist.barrier(group=dist.group.WORLD)
    dist.destroy_process_group()
    results = {int(file.stem): torch.load(file, weights_only=False) for file in folder.glob("*.pt")}
    return {number: result for number, result in results.items() if result}


def meet(file, rank, n):
    """Form the group of the supervisors."""
    given = dict(store=dist.FileStore(file, n), rank=rank, world_size=n)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **given)


def train(args, rank, n, folder):
    """Train on text while one rank is slow and two are killed; a spare comes in, then a restart."""
    faults = {(1, args.steps // 4): "kill", (0, args.steps // 2): "kill"}
    scenario = Scenario("run", args.steps, faults, spares=1, restart=True, shown=True)
    scenario = scenario._replace(B=48, S=64, text=args.text, delays={n - 1: 2.0})
    text = dp.read_text(args.text, 65)
    dp.say(f"\nkilled: rank 1 at step {args.steps // 4}, rank 0 at step {args.steps // 2}; rank "
           f"{n - 1} takes thrice its time; unigram entropy {dp.unigram_entropy(text):.3f}")
    dp.say("step   loss  workers of the group  sequences of each")
    dist.destroy_process_group()
    play(scenario, rank, n, folder, torch.float32)
    meet(f"{folder}/after", rank, n)


def main(args, device):
    """Prove, then train while ranks are killed; 0 if everything is as claimed."""
    rank, n = dist.get_rank(), dist.get_world_size()
    dp.say(f"faults · {n} ranks · workers on gloo and CPU")
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    # broadcast of a name from rank 0: all supervisors now share one folder
    dist.broadcast_object_list(folder, group_src=0, group=dist.group.WORLD)
    dist.destroy_process_group()  # a process with a live group may not fork
    try:
        torch.set_default_dtype(torch.float64)
        results = {s.name: play(s, rank, n, folder[0], torch.float64) for s in scenarios(n)}
        meet(f"{folder[0]}/proof", rank, n)
        broken = dp.prove(list(proof(results, n)), torch.device("cpu"))
        if args.steps:
            train(args, rank, n, folder[0])
        dist.barrier(group=dist.group.WORLD)
    finally:
        if rank == 0:
            shutil.rmtree(folder[0], ignore_errors=True)
    return broken


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    if ranks not in (3, 4):
        raise ValueError(f"{ranks} ranks: the scenarios need 3 or 4, which divide {CHUNKS} chunks")
    dp.read_text(args.text, at_least=65)


if __name__ == "__main__":
    dp.launch(main, dp.arguments(__doc__, ranks=4, steps=60).parse_args(), validate)
