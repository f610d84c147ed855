"""data · Which sample, and who has seen it

A run of weeks loses a rank every few hours, and goes on with another number of ranks. Its samples
must not notice: each comes once in an epoch, in an order that looks random. So nobody stores the
order. Each rank computes it, and a run keeps one number of it: the cursor.

    place in the order     0  1  2  3    4  5  6  7    8  9 ...     batches of four samples
    ranks that read it     0  1  2  3                               four ranks
                                         0  0  1  1    0  0 ...     two, later: the cursor was 4

    mixture    place 7             is sample 2 of the domain "code"
    order      sample 2 of "code"  is row 5 of shard 3, shuffled in a window of a few shards
    staging    shard 3             is a file on this node, fetched by one of the node's ranks
    batch      row 5               is tokens, labels, documents and positions

    on a node, of samples of t bytes                                  bytes
    fetched in an epoch, however many ranks the node has              t · samples
    held, if a batch and what is read ahead fit into a window         t · two windows, at most

    k windows take f seconds each to fetch and c to train on          seconds of waiting
    fetched when needed                                               k · f
    fetched a window ahead                                            f + (k - 1) · max(0, f - c)

    python beyond/data.py                          four ranks, then three, then two
    torchrun --nproc-per-node 4 beyond/data.py     the same, started by torchrun

Guide: Curriculum learning and data scheduling · FAQ · Failure modes (case 2: GPUs cannot consume
2 GB/s of text. At 6 P FLOPs a token, 405e9 parameters on 16,384 GPUs of 400e12 FLOP/s take 5.4 MB).
Sources: Black and Rogaway 2002; Balinski and Young 1975; arXiv:2305.10429 (DoReMi), 1903.09848.
Questions  QD.1 ** what is the whole state?   QD.2 *** which domain is next?
"""
# n ranks · r this rank · B sequences · b sequences of this rank · S tokens of a sequence
# P parameters

import importlib
import json
import shutil
import signal
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from itertools import accumulate
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads ends it without a trace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))
dp, tokens = (importlib.import_module(name) for name in ("01_dp", "beyond.tokens"))

QUANTUM = 1000  # samples after which a mixture repeats itself


# ── by hand: an order that nobody stores ─────────────────────────────────────────────────────

# A place has 2 · bits bits, and is cut into two halves. A round exchanges the halves, and flips
# bits of one of them, by a number that looks random and depends on the other half alone:
#
#     left, right = right, left ^ random_bits(right)
#
# A round can be undone, because the new left is the old right. So two places never become one,
# whatever `random_bits` is. Four rounds are a Feistel network. Here are the 12 samples of a small
# folder, with two bits in each half. The numbers 12 to 15 are no samples: what becomes one of them
# goes through the rounds again, until it is below 12.
#
#     place                                      0   1   2   3   4   5   6   7   8   9  10  11
#     sample, key "epoch 0"                     7   0   5  10   6   1   4   2   3  11   8   9
#     sample, key "epoch 1"                     9   7   0   1  10   5   6   2   4  11   8   3


def random_bits(x, key, bits):
    """A number of `bits` bits that looks random: the same for the same x and key, anywhere."""
    for shift in (29, 32):
        x = (x ^ key) * 0x9E3779B97F4A7C15 % 2**64
        x ^= x >> shift
    return x >> 64 - bits


@cache
def round_keys(key):
    """The keys of four rounds, from any text."""
    digest = sha256(key.encode()).digest()
    return [int.from_bytes(digest[i : i + 8]) for i in range(0, 32, 8)]


def shuffled(place, size, key):
    """The number, of 0 to size - 1, that stands at a place of the order that `key` names."""
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        left, right = place >> bits, place % 2**bits
        for round_key in round_keys(key):
            left, right = right, left ^ random_bits(right, round_key, bits)
        place = left << bits | right
        if place < size:
            return place


def part(cursor, B, n, r):
    """Places that rank r of n reads for the next batch of B samples."""
    # QD.1 ** A run on four ranks ended after `cursor` samples, and three ranks go on. Which places
    #      of the order does rank r read next?
    #      hint: the batch is the same for any n; only then is it cut
    places = torch.arange(cursor, cursor + B)
    return places.tensor_split(n)[r].tolist()
    # /QD.1


# ── shards are read one after the other, samples are not ─────────────────────────────────────


def find(place, counts):
    """(i, rest) of a place among runs of `counts`: it stands in run i, `rest` after its start."""
    ends = [*accumulate(counts)]
    i = bisect_right(ends, place)
    return i, place - ends[i] + counts[i]


class Order:
    """The order of a domain's samples: its shards are shuffled, and then the samples of a window.

    A window is a run of `window` shuffled shards. While it lasts, only its shards have to be near.
    The price: samples of different windows never meet in a batch. counts: samples of each shard.
    """

    def __init__(self, counts, window, key):
        self.counts, self.window, self.key, self.size = counts, window, key, sum(counts)
        self.per_epoch = -(-len(counts) // window)  # windows, rounded up
        self.windows_of = cache(self.windows_of)

    def windows_of(self, epoch):
        """The windows of an epoch, each a list of shards."""
        key, k = f"{self.key} {epoch}", len(self.counts)
        shards = [shuffled(i, k, key) for i in range(k)]
        return [shards[i : i + self.window] for i in range(0, k, self.window)]

    def shards(self, window):
        """The shards of a window; windows are counted on from epoch to epoch."""
        epoch, w = divmod(window, self.per_epoch)
        return self.windows_of(epoch)[w]

    def where(self, number):
        """(window, shard, row) of a sample; numbers are counted on from epoch to epoch."""
        epoch, place = divmod(number, self.size)
        windows = self.windows_of(epoch)
        w, place = find(place, [sum(self.counts[i] for i in shards) for shards in windows])
        counts = [self.counts[i] for i in windows[w]]
        place = shuffled(place, sum(counts), f"{self.key} {epoch} {w}")
        slot, row = find(place, counts)
        return epoch * self.per_epoch + w, windows[w][slot], row


# ── a mixture: in proportion after any number of samples ─────────────────────────────────────


def largest_remainder(total, weights):
    """Whole numbers that add up to `total`, in proportion to weights, each off by less than one.

    Raises ValueError where a weight is negative, or all of them are 0.
    """
    if min(weights) < 0 or sum(weights) == 0:
        raise ValueError(f"weights {weights}: use numbers from 0 on, of which one is not 0")
    parts = [total * weight / sum(weights) for weight in weights]
    by_rest = sorted(range(len(parts)), key=lambda i: int(parts[i]) - parts[i])
    more = by_rest[: total - sum(map(int, parts))]
    return [int(part) + (i in more) for i, part in enumerate(parts)]


def pattern(counts):
    """The domains of sum(counts) samples in turn, domain i counts[i] times.

    After any j of them, each domain has come j · counts[i] / total times, off by less than one.
    Dice are off by the root of j. `largest_remainder(j, counts)` is no way to count either: a
    domain's number can fall when j grows by one (the Alabama paradox). This is the quota method.
    """
    total, drawn, domains = sum(counts), [0] * len(counts), []
    for j in range(1, total + 1):
        # QD.2 *** Domain i has a share of counts[i] / total in any j samples, up to one sample. So
        #      its next sample may not come too early, nor too late. Which domain is sample j?
        #      hint: of the domains that may come, the one that has to come the soonest
        may_come = [i for i in range(len(counts)) if drawn[i] * total < j * counts[i]]
        domain = min(may_come, key=lambda i: (drawn[i] + 1) / counts[i])
        # /QD.2
        drawn[domain] += 1
        domains.append(domain)
    return domains


class Mixture:
    """The domain of each place. phases: [(first place, weights of the domains)], the first at 0."""

    def __init__(self, phases):
        self.firsts = [first for first, _ in phases]
        if self.firsts[0] != 0 or self.firsts != sorted({*self.firsts}):
            raise ValueError(f"phases start at {self.firsts}: start at 0, and then rise")
        self.patterns = [pattern(largest_remainder(QUANTUM, weights)) for _, weights in phases]
        self.domains = len(phases[0][1])

    def drawn(self, place):
        """How many samples of each domain stand before a place."""
        total = Counter()
        for first, until, domains in zip(self.firsts, [*self.firsts[1:], place], self.patterns):
            rounds, rest = divmod(max(0, min(place, until) - first), QUANTUM)
            for samples, times in ((domains, rounds), (domains[:rest], 1)):
                total.update({i: times * count for i, count in Counter(samples).items()})
        return [total[i] for i in range(self.domains)]

    def at(self, place):
        """(domain, number of the sample in it) of a place."""
        phase = bisect_right(self.firsts, place) - 1
        domain = self.patterns[phase][(place - self.firsts[phase]) % QUANTUM]
        return domain, self.drawn(place)[domain]


def temperature(sizes, exponent):
    """Weights of domains of these sizes. An exponent of 1 keeps proportions, 0 makes all alike;
    0.3 to 0.7 gives small domains more than their share."""
    return [size**exponent / sum(other**exponent for other in sizes) for size in sizes]


def curriculum(samples, levels, least=0.1):
    """Phases of a mixture whose domains are levels of difficulty, the easiest first.

    Competence grows as sqrt(least² + (1 - least²) · place / samples); level i is drawn from as soon
    as competence has reached i / levels (arXiv:1903.09848, equation 7).
    """
    phases = {}
    for i in range(levels):
        first = max(0, ((i / levels) ** 2 - least**2) / (1 - least**2) * samples)
        phases[round(first)] = [1.0] * (i + 1) + [0.0] * (levels - i - 1)
    return [*phases.items()]


def excess(nats_bS, reference_bS, y_bS, domains_b, domains, group):
    """By domain, of the whole step: how much more a label costs a model than it costs a reference,
    in nats, where it costs more, as a mean over its labels, (domains,)."""
    valid_bS = y_bS != -100
    more_bS = (nats_bS.detach() - reference_bS).clamp(min=0) * valid_bS
    sums = nats_bS.new_zeros(2, domains)
    sums[0].index_add_(0, domains_b, more_bS.sum(1))
    sums[1].index_add_(0, domains_b, valid_bS.sum(1).to(sums))
    # all_reduce(SUM) over dp, 2 · domains: the excess and the labels of each domain, of all ranks
    dist.all_reduce(sums, group=group)
    return sums[0] / sums[1].clamp(min=1)


def doremi(weights, excess, rate=1.0, smoothing=1e-3):
    """The next weights of the domains, by their excess (arXiv:2305.10429, Algorithm 1)."""
    weights = weights * (rate * excess).exp()
    return (1 - smoothing) * weights / weights.sum() + smoothing / len(weights)


# ── shards in a folder, and an index that knows their digests ────────────────────────────────


def write(folder, domains, per_shard, tokenizer="bytes"):
    """Write {domain: rows (samples, S + 1)} as shards of `per_shard` samples, and then their index.

    tokenizer: what made the tokens, a name or a digest.
    """
    folder, listed = Path(folder), {}
    folder.mkdir(parents=True, exist_ok=True)
    largest = max(int(rows.max()) for rows in domains.values())
    dtype = "uint8" if largest < 2**8 else "uint16" if largest < 2**16 else "int32"
    for name, rows in domains.items():
        listed[name] = []
        for i, shard in enumerate(rows.split(per_shard)):
            file, content = f"{name}_{i:05}.bin", shard.numpy().astype(dtype).tobytes()
            (folder / file).write_bytes(content)
            listed[name].append([file, len(shard), sha256(content).hexdigest()])
    length = next(iter(domains.values())).shape[1]
    index = {"length": length, "dtype": dtype, "tokenizer": tokenizer, "domains": listed}
    (folder / "index.partial").write_text(json.dumps(index, indent=1))
    (folder / "index.partial").rename(folder / "index.json")


def read_index(folder):
    """The index of a folder. Raises ValueError where none can be read."""
    try:
        return json.loads(Path(folder, "index.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: index.json cannot be read: {error}") from None


def checked(content, file, digest):
    """The content of a shard. Raises ValueError where it is not what the index says."""
    actual = sha256(content).hexdigest()
    if actual != digest:
        raise ValueError(f"shard {file} has digest {actual[:12]}, and the index says "
                         f"{digest[:12]}: copy it once more")  # fmt: skip
    return content


# ── staging: from far away, once for each node ───────────────────────────────────────────────


class Source:
    """A folder that is far away: `rate` bytes arrive in a second. It counts what was read."""

    def __init__(self, folder, rate=float("inf")):
        self.folder, self.rate, self.bytes = Path(folder), rate, 0

    def read(self, file):
        """The content of a file."""
        content = (self.folder / file).read_bytes()
        self.bytes += len(content)
        time.sleep(len(content) / self.rate)
        return content


class Staging:
    """A node's copies of shards. The node's rank `r` of `n` fetches every n-th shard of the index.

    The ranks of a node meet in a collective in every step, as training does anyway. So when one of
    them asks for a batch, all of them have read the batch before it, and its shards may go. When a
    rank is gone, those left make their Staging anew: nobody else fetches its part.
    """

    def __init__(self, source, folder, n=1, r=0, patience=20.0):
        self.source, self.folder, self.patience = source, Path(folder), patience
        self.folder.mkdir(parents=True, exist_ok=True)
        listed = sum(read_index(source.folder)["domains"].values(), [])
        self.digests = {file: digest for file, _, digest in listed}
        self.own = {file for i, (file, *_) in enumerate(listed) if i % n == r}
        self.pool, self.copies, self.opened = ThreadPoolExecutor(1), {}, {}
        self.events, self.waited = [], 0.0
        # what an earlier run has left here is checked, and then kept or fetched again
        self.prepare([file for file in self.own if (self.folder / file).exists()])

    def prepare(self, files):
        """Begin to fetch this rank's part of `files`, and delete its copies of all others."""
        self.events.append("prepare")
        for file in self.copies.keys() - files:
            self.copies.pop(file).result()
            (self.folder / file).unlink()
        for file in files:
            if file in self.own and file not in self.copies:
                self.events.append(f"ask {file}")
                self.copies[file] = self.pool.submit(self.fetch, file)
        for copy in self.copies.values():
            if copy.done():
                copy.result()  # raises here what the thread has met
        self.opened = {file: self.opened[file] for file in files if file in self.opened}

    def fetch(self, file):
        """Make a copy. It gets its name when it is whole, so that nobody reads a part."""
        final, digest = self.folder / file, self.digests[file]
        if final.exists() and sha256(final.read_bytes()).hexdigest() == digest:
            return
        unfinished = final.with_suffix(".partial")
        unfinished.write_bytes(checked(self.source.read(file), file, digest))
        unfinished.rename(final)

    def open(self, file):
        """The content of a copy, as soon as it is there; raises TimeoutError after `patience`."""
        if file not in self.opened:
            self.events.append(f"wait {file}")
            started = time.monotonic()
            if file in self.copies:
                self.copies[file].result()
            while not (self.folder / file).exists():
                if time.monotonic() > started + self.patience:
                    raise TimeoutError(f"shard {file} did not come to {self.folder} in "
                                       f"{self.patience} s: another rank of this node fetches it")
                time.sleep(0.002)
            self.waited += time.monotonic() - started
            content = np.memmap(self.folder / file, mode="r")
            self.opened[file] = checked(content, file, self.digests[file])
        return self.opened[file]

    def held(self):
        """Bytes of all copies on the node."""
        return sum(path.stat().st_size for path in self.folder.glob("*.bin"))


def waiting(k, fetch, compute, ahead):
    """Seconds that training waits for k windows, which take `fetch` seconds each to fetch and
    `compute` to train on: fetched a window ahead, or else when they are needed."""
    return fetch + (k - 1) * max(0, fetch - compute) if ahead else k * fetch


# ── the loader: from a cursor to a batch ─────────────────────────────────────────────────────


class Loader:
    """Batches of a folder of shards. The loader has no state: the run keeps the cursor.

    phases: [(first place, weights of the domains)]; without, all domains are one, and each sample
    comes once in an epoch. window: shards that are mixed. ahead: samples that `staging` fetches
    ahead. Raises ValueError where the folder's tokens are not from `tokenizer`, if one is passed.
    """

    def __init__(self, folder, seed=0, window=4, phases=(), tokenizer=None, staging=None, ahead=0):
        self.index, self.staging, self.ahead = read_index(folder), staging, ahead
        made_by, domains = self.index["tokenizer"], [*self.index["domains"].values()]
        if tokenizer not in (None, made_by):
            raise ValueError(f"{folder}: its tokens are from tokenizer {made_by}, not {tokenizer}")
        if not phases:
            domains, phases = [sum(domains, [])], [(0, [1.0])]
        if any(len(weights) != len(domains) for _, weights in phases):
            raise ValueError(f"{folder}: each phase needs {len(domains)} weights, one a domain")
        self.shards, self.mixture = domains, Mixture(phases)
        counts = [[samples for _, samples, _ in shards] for shards in domains]
        self.orders = [Order(each, window, f"{seed} {i}") for i, each in enumerate(counts)]
        self.size = sum(map(sum, counts))
        decides = json.dumps([self.index, seed, window, phases])
        self.digest = sha256(decides.encode()).hexdigest()
        digests = {file: digest for shards in domains for file, _, digest in shards}
        here = lambda file: checked(np.memmap(Path(folder, file), mode="r"), file, digests[file])
        self.content = staging.open if staging else cache(here)

    def batch(self, cursor, B, n=1, r=0):
        """Rank r's part, of n, of the batch of B samples that follows after `cursor` samples.

        Ranks that compute on the same samples, as those of tp, pp and cp do, pass the same n and r.
        """
        if B > self.size:
            raise ValueError(f"a batch of {B} would have a sample twice: {self.size} are there")
        if self.staging:
            self.staging.prepare(self.wanted(cursor, B + self.ahead))
        rows = [self.row(place) for place in part(cursor, B, n, r)]
        none = torch.zeros(0, self.index["length"], dtype=torch.int64)
        return tokens.batch_of(torch.stack(rows) if rows else none)

    def where(self, place):
        """(domain, shard, row) of a place."""
        domain, number = self.mixture.at(place)
        return domain, *self.orders[domain].where(number)[1:]

    def row(self, place):
        """The tokens (S + 1,) of a place."""
        domain, shard, row = self.where(place)
        tokens = np.frombuffer(self.content(self.shards[domain][shard][0]), self.index["dtype"])
        length = self.index["length"]
        return torch.from_numpy(tokens[row * length : (row + 1) * length].astype(np.int64))

    def wanted(self, cursor, count):
        """Files of the windows that `count` places from a cursor on touch. A window stays until its
        domain has left it, so that its shards are fetched once in an epoch."""
        files, places = {}, (self.mixture.drawn(place) for place in (cursor, cursor + count))
        for order, shards, now, later in zip(self.orders, self.shards, *places):
            first, last = (order.where(number)[0] for number in (now, max(now, later - 1)))
            for window in range(first, last + 1):
                files |= {shards[i][0]: None for i in order.shards(window)}
        return [*files]

    def state(self, cursor):
        """What a checkpoint keeps: the cursor, and a digest of what decides about the order."""
        return {"cursor": cursor, "order": self.digest}

    def resume(self, state):
        """The cursor of a checkpoint. Raises ValueError where the order was another one."""
        if state["order"] != self.digest:
            raise ValueError("the checkpoint's samples had another order: its shards, tokenizer, "
                             "seed, window or phases differ from these")
        return state["cursor"]


# ── from here on: proof, run, kit ────────────────────────────────────────────────────────────


def order_rows(loader, n, r, device):
    """Rows of the order: each sample once on changing ranks, and what loses samples."""
    B, seen = 24, torch.zeros(loader.size, dtype=torch.int64, device=device)
    per_shard, cursor, steps = loader.shards[0][0][1], 0, loader.size // B
    for step in range(steps):
        world = max(1, n - 3 * step // steps)  # n, n - 1, n - 2 ranks
        for place in part(cursor, B, world, r) if r < world else ():
            _, shard, row = loader.where(place)
            seen[shard * per_shard + row] += 1
        cursor += B
    # all_reduce(SUM) over all ranks, samples: how often each sample was read
    dist.all_reduce(seen, group=dist.group.WORLD)
    yield dp.Row(f"{n}, {max(1, n - 1)}, {max(1, n - 2)} ranks: samples not read once",
                 (seen != 1).double().mean().item())  # fmt: skip
    size, new = 3000, lambda epoch: [shuffled(j, size, f"{epoch}") for j in range(size)]
    yield dp.Row("3,000 places: samples that lack", 1 - len({*new(0)}) / size)
    same = lambda one, other: sum(a == b for a, b in zip(one, other)) / size
    yield dp.Row("  two epochs: places alike", same(new(0), new(1)), bound=(0.0, 0.003))
    yield dp.Row("  nobody told the shuffle the epoch", same(new(0), new(0)), wrong=1.0)
    if n > 1:
        apart = [[shuffled(j, size, f"rank {i}") for j in range(size // n)] for i in range(n)]
        missed, p = 1 - len({*sum(apart, [])}) / size, (1 - 1 / n) ** n
        slack = 4 * (p * (1 - p) / size) ** 0.5
        yield dp.Row("  seed + rank: samples missed", missed, bound=(p - slack, p + slack))
        steps, b = 5, 2
        read = [*range(steps * n * b), *part(steps * (n - 1) * b, n * b, 1, 0)]
        twice = 1 - len({*read}) / len(read)
        repeated = min(n, steps) / (steps + 1) / n  # all of a batch, if the steps were enough
        yield dp.Row("  resumed at step · new batch: repeated", twice, wrong=repeated)


def mixture_rows(group, device):
    """Rows of the mixture: shares after any number of samples, and DoReMi over ranks."""
    weights = [0.6, 0.25, 0.1, 0.05]
    mixture = Mixture([(0, weights)])
    worst = max(abs(c - j * w) for j in range(2 * QUANTUM)
                for c, w in zip(mixture.drawn(j), weights))  # fmt: skip
    yield dp.Row("mixture: off its share, samples", worst, bound=(0.4, 1.0))
    draw = torch.Generator().manual_seed(0)
    dice = torch.multinomial(torch.tensor(weights), 2 * QUANTUM, True, generator=draw)
    shares = torch.outer(torch.arange(1, len(dice) + 1), torch.tensor(weights))
    off = (F.one_hot(dice, 4).cumsum(0) - shares).abs().max().item()
    sigma = (2 * QUANTUM * 0.6 * 0.4) ** 0.5
    yield dp.Row("  by dice", off, bound=(sigma / 2, 4 * sigma))
    n, r = dist.get_world_size(group), dist.get_rank(group)
    model, reference = torch.rand(2, 12, 8, generator=draw, dtype=torch.float64)
    y, domains = torch.randint(-100, 2, (12, 8), generator=draw), torch.arange(12) % 3
    y[y < -50] = -100
    mine = [x.tensor_split(n)[r].to(device) for x in (model, reference, y, domains)]
    with dp.Ledger() as ledger:
        over_ranks = excess(*mine, 3, group)
    expected = []
    for domain in range(3):
        counted = (domains[:, None] == domain) & (y != -100)
        expected.append((model - reference).clamp(min=0)[counted].mean())
    weights, expected = torch.tensor([0.5, 0.3, 0.2]).double(), torch.stack(expected)
    found = doremi(weights.to(device), over_ranks).cpu()
    error = dp.relative_error(found, doremi(weights, expected))
    sent = ledger.sent["all_reduce"], 2 * (n - 1) / n * 2 * 3 * 8
    yield dp.Row("DoReMi's weights, from all ranks", error, sent)


def elastic_row(loader, rows, n, r, device):
    """Row of training: n ranks, then fewer, beside one process that has the rows in memory."""
    B, steps, cursor = 12, 3, 0
    model, twin = (tokens.tiny_model(device, H=2, K=1, d=8).double() for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for world in (max(1, n - lost) for lost in range(3)):
        group = dist.new_group([*range(world)])
        cursor = loader.resume(json.loads(json.dumps(loader.state(cursor))))
        for _ in range(steps):
            if r < world:
                batch = tokens.on(device, loader.batch(cursor, B, world, r))
                tokens.step(model, optimizer, batch, group)
            cursor += B
    optimizer = torch.optim.SGD(twin.parameters(), 0.5)
    for places in torch.arange(cursor).split(B):
        found = [loader.where(place)[1:] for place in places.tolist()]
        batch = tokens.batch_of(torch.stack([rows[24 * shard + row] for shard, row in found]))
        batch = tokens.on(device, batch)
        optimizer.zero_grad()
        (tokens.nats(twin, batch).sum() / (batch.y_BS != -100).sum()).backward()
        optimizer.step()
    pairs = zip(model.parameters(), twin.parameters())
    error = max(dp.relative_error(a.data, b.data) for a, b in pairs)
    return dp.Row("trained on n, n - 1, n - 2 ranks", error if r < world else 0.0)


def staging_rows(folder, rows, per_node, n, r):
    """Rows of staging: bytes fetched and held by a node, and the order of events."""
    whole = sum(path.stat().st_size for path in folder.glob("*.bin"))
    B, window, nodes = 24, 2, n // per_node
    for name, near, k, i in [
        ("staged once a node", f"node {r // per_node}", per_node, r % per_node),
        ("  each rank for itself", f"rank {r}", 1, 0),
    ]:
        source = Source(folder)
        staging = Staging(source, folder.parent / near, k, i)
        loader = Loader(folder, window=window, staging=staging, ahead=window * 24 - B)
        peak = 0
        for cursor in range(0, loader.size - B - loader.ahead + 1, B):
            loader.batch(cursor, B, n, r)
            [copy.result() for copy in staging.copies.values()]
            dist.barrier(group=dist.group.WORLD)  # training meets in its all-reduce
            peak = max(peak, staging.held())
            dist.barrier(group=dist.group.WORLD)
        dist.all_gather_object(gathered := [None] * n, source.bytes, group=dist.group.WORLD)
        fetched = sum(gathered) / nodes
        if k == per_node:
            yield dp.Row(name, 0.0, (fetched, whole), (peak, 2 * window * 24 * rows.shape[1]))
            yield dp.Row("  windows not asked for in advance", float(late(staging, loader)))
        elif per_node > 1:
            yield dp.Row(name, fetched / whole - 1, wrong=per_node - 1)


def late(staging, loader):
    """Whether a shard, but those of the first window, was asked for in the step that needed it."""
    events, first = staging.events, loader.wanted(0, 1)
    for i, event in enumerate(events):
        word, _, file = event.partition(" ")
        if word == "wait" and f"ask {file}" in events and file not in first:
            if "prepare" not in events[events.index(f"ask {file}") : i]:
                return True
    return False


def proof(args, group, device, folder):
    """All rows of the table."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    documents = map(list, tokens.paragraphs_of(dp.read_text(args.text, 0)[:20_000]))
    rows = tokens.pack(documents, 32)[:240]
    if r == 0:
        write(folder / "proof", {"text": rows}, per_shard=24)
    dist.barrier(group=group)
    yield from order_rows(loader := Loader(folder / "proof"), n, r, device)
    yield elastic_row(loader, rows, n, r, device)
    yield from mixture_rows(group, device)
    yield from staging_rows(folder / "proof", rows, 2 if n % 2 == 0 else n, n, r)


def domains_of(text):
    """{name: documents}: paragraphs of a text by their share of letters, and noise."""
    domains = {"prose": [], "code": []}
    for document in tokens.paragraphs_of(text):
        letters = sum(chr(byte).isalpha() or byte == ord(" ") for byte in document)
        domains["prose" if letters > 0.92 * len(document) else "code"].append([*document])
    draw = torch.Generator().manual_seed(0)
    domains["noise"] = torch.randint(33, 127, (100, 150), generator=draw).tolist()
    return {name: documents for name, documents in domains.items() if len(documents) > 30}


def train(args, group, device, folder):
    """Train on a mixture from slow shards, on n ranks and then on fewer."""
    n, r, B, S = dist.get_world_size(group), dist.get_rank(group), 24, 64
    text = dp.read_text(args.text, at_least=20_000)
    domains = domains_of(text[:300_000])
    packed = {name: tokens.pack(documents, S) for name, documents in domains.items()}
    weights = temperature([len(rows) for rows in packed.values()], 0.5)
    dp.say("\ndomain  samples   weight")
    for (name, rows), weight in zip(packed.items(), weights):
        dp.say(f"{name:6}{len(rows):9}{weight:9.3f}")
    if r == 0:
        write(folder / "run", packed, per_shard=32)
    dist.barrier(group=group)
    model, cursor = tokens.tiny_model(device), 0
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    dp.say(f"unigram entropy of the text {dp.unigram_entropy(text):.3f}\n"
           "step  ranks  cursor   loss  seconds waited for shards")
    for world, until in ((n, args.steps // 2), (max(1, n - 1), args.steps)):
        smaller = dist.new_group([*range(world)])
        if r < world:  # those left share out the shards anew
            staging = Staging(Source(folder / "run", rate=2e6), folder / "near", world, r)
            loader = Loader(folder / "run", phases=[(0, weights)], staging=staging, ahead=100)
        for t in range(cursor // B, until):
            if r < world:
                batch = tokens.on(device, loader.batch(cursor, B, world, r))
                loss = tokens.step(model, optimizer, batch, smaller)
            cursor += B
            if (t + 1) % 10 == 0:
                dp.say(f"{t + 1:4}{world:7}{cursor:8}{loss.item():7.3f}{staging.waited:8.2f}")
    say_waiting(folder, n, r)


def say_waiting(folder, n, r, k=6, fetch=0.05):
    """Print how long a rank waits for windows of slow shards, beside what `waiting` predicts. To
    train is to sleep here. Each rank stands for a node."""
    if r == 0:
        write(folder / "slow", {"all": torch.ones(48 * k, 65).long()}, per_shard=24)
    dist.barrier(group=dist.group.WORLD)
    dp.say(f"\n{k} windows of {1000 * fetch:.0f} ms: train on one  fetched       waited  predicted")
    for compute, ahead in ((0.03, 0), (0.03, 48), (0.09, 0), (0.09, 48)):
        source = Source(folder / "slow", rate=48 * 65 / fetch)
        staging = Staging(source, folder / f"near {r} {compute} {ahead}")
        loader = Loader(folder / "slow", window=2, staging=staging, ahead=ahead)
        for cursor in range(0, loader.size, 16):
            loader.batch(cursor, 16)
            time.sleep(compute / 3)
        staging.pool.shutdown()
        predicted = 1000 * waiting(k, fetch, compute, ahead)
        how = "a window ahead" if ahead else "when needed"
        dp.say(f"{1000 * compute:27.0f} ms  {how:14}{1000 * staging.waited:6.0f}{predicted:11.0f}")


def main(args, device):
    """Prove, then train; 0 if everything is as claimed."""
    group = dist.group.WORLD
    dp.say(f"data · {dist.get_world_size()} ranks · {device.type}")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    # broadcast of a name from rank 0: all ranks now share one folder
    dist.broadcast_object_list(folder, group_src=0, group=group)
    try:
        broken = dp.prove(list(proof(args, group, device, Path(folder[0]))), device)
        if args.steps:
            train(args, group, device, Path(folder[0]))
        dist.barrier(group=group)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0], ignore_errors=True)
    return broken


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    if ranks > 8:
        raise ValueError(f"{ranks} ranks share 12 sequences of a step: use 8 or fewer")
    dp.read_text(args.text, at_least=20_000)


if __name__ == "__main__":
    dp.launch(main, dp.arguments(__doc__, ranks=4, steps=60).parse_args(), validate)
