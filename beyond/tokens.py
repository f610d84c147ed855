"""tokens · Which text is trained on, and as which numbers

Text comes from everywhere: much of it twice, and some of it from the tests that will judge the
model. This file decides what stays, turns it into tokens, and packs the tokens into rows.

    documents  ->  without copies  ->  without test questions  ->  training | evaluation
               ->  tokens, by pairs that were merged           ->  rows of S + 1 tokens

Ranks share the documents. Copies of a document may stand on any two ranks. So each document sends
short keys, and equal keys meet on the rank that the key names:

    rank 0   "the cat sat on ..."   keys 17, 40, 93     17 ->  rank 1 of 2    40 -> rank 0 ...
    rank 1   "a cat sat on ..."     keys 17, 52, 88     17 ->  rank 1: the two share key 17

    b bands of k hashes, d documents of a rank        bytes that leave a rank, in the mean
    keys, each with its document's number             (n-1)/n · 16 · b · d
    n-grams of the evaluation set, g of them          8 · g, along a ring
    counts of pairs, for each merge                   2 (n-1)/n · 8 · V²
    sum of the old rows, for new tokens               2 (n-1)/n · 4 · 2D, in fp32

    python beyond/tokens.py                          two ranks
    torchrun --nproc-per-node 2 beyond/tokens.py     the same, started by torchrun

Guide: Failure modes (case 1: copies; case 4: tokenizer) · FAQ (contamination; new tokens; split).
Sources: byte-pair merges, arXiv:1508.07909; MinHash, Broder 1997; 14 bands of 8 hashes of 5-grams,
FineWeb, arXiv:2406.17557; 13-grams, GPT-3, arXiv:2005.14165, appendix C; best-fit packing,
arXiv:2404.10830; a mask between documents, Llama 3, arXiv:2407.21783, section 3.2.
Questions  QB.1 * which pair is merged?   QB.2 ** where do two copies meet?
           QB.3 ** what does a packed row say of each token?
"""
# n ranks · r this rank · B sequences · S tokens of a sequence · D width · V vocabulary

import importlib
import json
import math
import re
import signal
import sys
from collections import Counter, defaultdict, namedtuple
from functools import partial
from hashlib import blake2b, sha256
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads ends it without a trace

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))
dp, cp = (importlib.import_module(name) for name in ("01_dp", "06_cp_ring"))

END = 0  # the token that closes a document, and fills a row
WORD = re.compile(rb" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+|\s+")  # no merge crosses these
BANDS, HASHES = 14, 8  # copies that share 0.72 of their 5-grams are found every other time
PRIME = 2**31 - 1
PROBE = b"It's 1024 tokens, isn't it?\n\tif x != 'y': return None"


# ── by hand: a tokenizer ─────────────────────────────────────────────────────────────────────

# A token is a byte, or two tokens that were merged. To learn merges, count pairs of neighbours in
# all words, merge the most frequent pair everywhere, and begin again:
#
#     low low lower        l o: 3, o w: 3, w e: 1, e r: 1     merge 256 = l o, the first of the two
#     256 w  256 w  256 w e r       256 w: 3                  merge 257 = 256 w
#     257    257    257 e r
#
# To encode a new word, do the merges again, in the order in which they were learned.


def merged(word, pair, token):
    """A word, as a tuple of tokens, in which each `pair` has become `token`."""
    new, i = [], 0
    while i < len(word):
        here = word[i : i + 2] == pair
        new.append(token if here else word[i])
        i += 1 + here
    return tuple(new)


def learn_merges(documents, merges, group):
    """`merges` pairs, in their order, from all documents (bytes) of all ranks of the group."""
    counted = Counter(word for document in documents for word in WORD.findall(document))
    words = {tuple(word): count for word, count in counted.items()}
    device, V, pairs = device_of(group), 256 + merges, []
    for token in range(256, V):
        counts = Counter()
        for word, count in words.items():
            for pair in zip(word, word[1:]):
                counts[pair[0] * V + pair[1]] += count
        counts_VV = torch.zeros(V * V, dtype=torch.int64)
        counts_VV[list(counts)] = torch.tensor([*counts.values()], dtype=torch.int64)
        counts_VV = counts_VV.to(device)
        # QB.1 * Each rank has counted the pairs of its own words. Which pair do all ranks merge?
        #      hint: one sum; and of pairs that are equally frequent, all ranks take the same
        # all_reduce(SUM) over the ranks, V²: how often each pair occurs in all documents
        dist.all_reduce(counts_VV, group=group)
        best = int((counts_VV == counts_VV.max()).nonzero()[0])
        # /QB.1
        pairs.append(divmod(best, V))
        words = {merged(word, pairs[-1], token): count for word, count in words.items()}
    return pairs


def device_of(group):
    """The device whose tensors the group's backend sends."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


class Tokenizer:
    """Bytes to tokens, by merges in their order, and back."""

    def __init__(self, pairs):
        self.pairs = [tuple(pair) for pair in pairs]
        self.rank = {pair: i for i, pair in enumerate(self.pairs)}
        self.bytes = [bytes([i]) for i in range(256)]
        for one, other in self.pairs:
            self.bytes.append(self.bytes[one] + self.bytes[other])
        self.known = {}

    def encode(self, text):
        """The tokens of bytes, as a list."""
        return [token for word in WORD.findall(text) for token in self.encode_word(word)]

    def encode_word(self, word):
        """The tokens of one word: of all pairs in it, the one that was learned first is merged."""
        if word not in self.known:
            tokens, last = tuple(word), len(self.pairs)
            while len(tokens) > 1:
                first = min(self.rank.get(pair, last) for pair in zip(tokens, tokens[1:]))
                if first == last:
                    break
                tokens = merged(tokens, self.pairs[first], 256 + first)
            self.known[word] = tokens
        return self.known[word]

    def decode(self, tokens):
        """The bytes of tokens."""
        return b"".join(self.bytes[token] for token in tokens)

    def digest(self):
        """A name that changes when anything changes that a token means: the merges, the words, or
        what becomes of a text that was chosen for its traps. A folder of samples keeps it."""
        decides = [self.pairs, WORD.pattern.decode(), self.encode(PROBE)]
        return sha256(json.dumps(decides).encode()).hexdigest()


# ── new tokens for a trained model ───────────────────────────────────────────────────────────


def mean_row(shard, V, group):
    """The mean (D,) of the V rows of a matrix, of which each rank of the group has a part."""
    total = shard.detach().sum(0)
    # all_reduce(SUM) over tp, D: the sum of all rows
    dist.all_reduce(total, group=group)
    return total / V


def extend(weight, more, row):
    """A matrix (V + more, D) whose new rows are all `row` (D,), or the rows of a matrix.

    With the mean of the old rows in embedding and head, a new token's logit is the mean z of the
    old logits. exp(z) is at most the mean of the exps of the old logits. So the sum under softmax
    grows by at most 1 + more/V, and the loss of old tokens by at most ln(1 + more/V), whatever the
    model is. Rows that are drawn have no bound: one logit may be far above all others.
    """
    return torch.nn.Parameter(torch.cat([weight.detach(), row.expand(more, -1).to(weight)]))


def freeze(weight, first):
    """Let no gradient reach the rows from `first` on; returns a handle whose `remove` ends it. The
    optimizer must not decay `weight` meanwhile: decay needs no gradient."""
    frozen = torch.arange(len(weight), device=weight.device)[:, None] >= first
    return weight.register_hook(lambda gradient: gradient.masked_fill(frozen, 0))


# ── copies, equal and nearly equal ───────────────────────────────────────────────────────────


def number(content, bits=63):
    """A number of `bits` bits, from bytes."""
    return int.from_bytes(blake2b(content, digest_size=8).digest()) >> 64 - bits


def ngrams(document, n):
    """Numbers, of 63 bits, of all runs of n words: lower case, letters and digits alone."""
    words = re.findall(rb"\w+", document.lower()) or [document]
    return {number(b" ".join(words[i : i + n])) for i in range(max(1, len(words) - n + 1))}


def signature(grams, seed=0):
    """For each of BANDS · HASHES random orders of all numbers, the least number of a set.

    In a random order, each member of the union of two sets is the least with the same chance. So
    the least is in both with the chance of a member: their Jaccard similarity.
    """
    draw = torch.Generator().manual_seed(seed)
    a, b = torch.randint(1, PRIME, (2, BANDS * HASHES, 1), generator=draw)
    x = torch.tensor([*grams]) % PRIME
    return ((a * x + b) % PRIME).amin(1)


def band_keys(least):
    """A key for each band, (BANDS,): two documents share it if all HASHES of the band are equal."""
    bands = [b"%d %s" % (i, str(band.tolist()).encode()) for i, band in
             enumerate(least.view(BANDS, HASHES))]  # fmt: skip
    return torch.tensor([number(band) for band in bands])


def chance(similarity, bands=BANDS, hashes=HASHES):
    """The chance that two documents share a key, if a share of `similarity` of their n-grams, of
    those of either, is in both."""
    return 1 - (1 - similarity**hashes) ** bands


def meet(keys, numbers, group):
    """Pairs (p, 2) of document numbers that share a key, found by this rank for all ranks.

    keys, numbers: (k,) each, of this rank's documents, a document once for each of its keys.
    """
    n, device = dist.get_world_size(group), device_of(group)
    # QB.2 ** Two documents on two ranks have the same key. Neither rank knows of the other. To
    #      which rank does each of them send it, so that they meet?
    #      hint: the key is all that both ranks know
    owners = keys % n
    order = owners.argsort(stable=True)
    counts = torch.bincount(owners, minlength=n)
    # /QB.2
    counts, received = counts.to(device), counts.new_empty(n).to(device)
    # all_to_all over the ranks, 1: how many keys come from each rank
    dist.all_to_all_single(received, counts, group=group)
    sent = torch.stack([keys, numbers], dim=1)[order].to(device)
    pairs = sent.new_empty(int(received.sum()), 2)
    # all_to_all over the ranks, 2 · k: equal keys now stand on one rank, with their documents
    dist.all_to_all_single(pairs, sent, received.tolist(), counts.tolist(), group=group)
    by_key = defaultdict(list)
    for key, document in pairs.tolist():
        by_key[key].append(document)
    alike = [(min(them), other) for them in by_key.values() for other in them if other != min(them)]
    return torch.tensor(alike, dtype=torch.int64).view(-1, 2)


def clusters(alike, documents, group):
    """The first document that each document is a copy of, directly or by others: (documents,)."""
    n, device = dist.get_world_size(group), device_of(group)
    most = torch.tensor([len(alike)], device=device)
    # all_reduce(MAX) over the ranks, 1: the longest list of pairs, to which all are filled up
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    filled = F.pad(alike.to(device), (0, 0, 0, int(most) - len(alike)))  # by (0, 0): no news
    every = filled.new_empty(n * len(filled), 2)
    # all_gather over the ranks, 2 · longest: every rank now has all pairs
    dist.all_gather_single(every, filled, group=group)
    first = [*range(documents)]

    def root(document):
        while first[document] != document:
            first[document] = first[first[document]]
            document = first[document]
        return document

    for one, other in every.tolist():
        one, other = root(one), root(other)
        first[max(one, other)] = min(one, other)
    return torch.tensor([root(document) for document in range(documents)])


def copies(documents, numbers, total, group, near=True):
    """The first copy of each of `total` documents, (total,). This rank has `documents`, which have
    `numbers`. near=False: a copy has the same words; else about 0.72 or more of the same 5-grams.
    """
    if near:
        keys = [band_keys(signature(ngrams(document, 5))) for document in documents]
    else:
        words = [b" ".join(document.split()) for document in documents]
        keys = [torch.tensor([number(text)]) for text in words]
    keys, each = torch.stack(keys), torch.tensor(numbers)[:, None]
    alike = meet(keys.flatten(), each.expand_as(keys).flatten(), group)
    return clusters(alike, total, group)


# ── what the model will be judged by ─────────────────────────────────────────────────────────


def contamination(documents, questions, group, n=13):
    """By document of this rank, the share of its n-grams of words that occur in a question.

    Rank 0 has the questions; the others pass any. Source: GPT-3, arXiv:2005.14165, appendix C.
    """
    device = device_of(group)
    grams = sorted(set().union(*(ngrams(question, n) for question in questions)))
    count = torch.tensor([len(grams)], device=device)
    # broadcast from rank 0, 1: how many n-grams the questions have
    dist.broadcast(count, group_src=0, group=group)
    grams = torch.tensor(grams[: int(count)], dtype=torch.int64, device=device)
    grams = F.pad(grams, (0, int(count) - len(grams)))
    # broadcast from rank 0, g: the numbers of these n-grams
    dist.broadcast(grams, group_src=0, group=group)
    asked = {*grams.tolist()}
    return [len(own & asked) / len(own) for own in (ngrams(text, n) for text in documents)]


def is_held_out(first_copy, share, key="evaluation"):
    """Whether a document is kept for evaluation, by the number of its first copy: all copies of it
    fall on the same side. The number decides alone: no list of them has to be kept."""
    return number(f"{key} {first_copy}".encode()) < share * 2**63


# ── several documents in a row ───────────────────────────────────────────────────────────────

Batch = namedtuple("Batch", "x_BS y_BS documents_BS positions_BS")


def closed(documents, most):
    """Documents (lists of tokens), each closed by END, in pieces of at most `most` tokens.

    Raises ValueError where a document contains END.
    """
    for document in documents:
        if END in document:
            raise ValueError(f"token {END} closes a document: no document may contain it")
        tokens = [*document, END]
        pieces = [tokens[i : i + most] for i in range(0, len(tokens), most)]
        yield from (piece for piece in pieces if piece != [END])


def pack(documents, S):
    """Rows (samples, S + 1) of whole documents; only one that is longer than a row is cut.

    The longest comes first, and each into the fullest row that has room for it.
    """
    rows, with_room = [], defaultdict(list)
    for piece in sorted(closed(documents, S + 1), key=len, reverse=True):
        room = next((room for room in range(len(piece), S + 1) if with_room[room]), None)
        if room is None:
            rows.append([])
        row = with_room[room].pop() if room else rows[-1]
        row += piece
        with_room[S + 1 - len(row)].append(row)
    return torch.tensor([row + [END] * (S + 1 - len(row)) for row in rows])


def join_and_cut(documents, S):
    """Rows (samples, S + 1) of one line of all documents, which is cut anywhere. Nothing is filled;
    most rows begin inside a document. What is left over is shorter than a row, and dropped."""
    line = [token for document in documents for token in [*document, END]]
    return torch.tensor(line[: len(line) // (S + 1) * (S + 1)]).view(-1, S + 1)


def batch_of(rows):
    """What a model takes from rows (B, S + 1): a Batch of tokens, labels, documents, positions.

    A label of -100 does not count. The document of filling is -1, as 06 takes it.
    """
    x_BS, y_BS = rows[:, :-1], rows[:, 1:]
    ends_BS = x_BS == END
    starts_BS = F.pad(ends_BS[:, :-1], (1, 0), value=True)
    places_S = torch.arange(x_BS.shape[1])
    # QB.3 ** A row has several documents, and END is the last token of each. Which labels count?
    #      To which document does a token belong, from 0 on, and at which position of it is it?
    #      hint: no token follows from END; cumsum counts, and cummax remembers the last start
    y_BS = y_BS.masked_fill(ends_BS, -100)
    documents_BS = ends_BS.cumsum(1) - ends_BS.long()
    positions_BS = places_S - (places_S * starts_BS).cummax(1).values
    # /QB.3
    filling_BS = ends_BS & starts_BS
    return Batch(x_BS, y_BS, documents_BS.masked_fill(filling_BS, -1), positions_BS)


# ── from here on: proof, run, kit ────────────────────────────────────────────────────────────


def nats(model, batch, masked=True):
    """The loss of each label (B, S) under the model of 06, and 0 where a label does not count."""
    attend = partial(cp.causal_attention, documents=batch.documents_BS if masked else None)
    logits = model(batch.x_BS, batch.positions_BS, attend)
    return F.cross_entropy(logits.transpose(1, 2), batch.y_BS, reduction="none")


def step(model, optimizer, batch, group):
    """One step of all ranks, each on its part of a batch; returns the loss of the whole batch."""
    labels = (batch.y_BS != -100).sum()
    # all_reduce(SUM) over dp, 1: the one divisor of the step
    dist.all_reduce(labels, group=group)
    return descend(optimizer, nats(model, batch).sum() / labels, group)


def descend(optimizer, loss, group):
    """A step by the sum of all ranks' shares of a loss; returns that sum."""
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    for x in [loss, *(param.grad for each in optimizer.param_groups for param in each["params"])]:
        # all_reduce(SUM) over dp, one tensor: each rank's part comes from its own samples
        dist.all_reduce(x, group=group)
    optimizer.step()
    return loss


def tiny_model(device, **sizes):
    """The model of 06, the same from the same seed."""
    torch.manual_seed(0)
    return cp.LanguageModel(**sizes).to(device)


def on(device, batch):
    """A Batch on a device."""
    return Batch(*(x.to(device) for x in batch))


def paragraphs_of(text):
    """The paragraphs of a text (a tensor of bytes), as bytes."""
    parts = bytes(text.tolist()).replace(b"\0", b"").split(b"\n\n")
    return [part for part in parts if part.strip()]


def naive_merges(documents, merges):
    """The pairs that one process merges: text as strings, all pairs counted anew each time."""
    words = [word.decode("latin1") for document in documents for word in WORD.findall(document)]
    pairs = []
    for token in range(256, 256 + merges):
        counts = Counter(pair for word in words for pair in zip(word, word[1:]))
        one, other = min(counts, key=lambda pair: (-counts[pair], pair))
        words = [word.replace(one + other, chr(token)) for word in words]
        pairs.append((ord(one), ord(other)))
    return pairs


def tokenizer_rows(documents, group, merges=16):
    """Rows of the tokenizer: merges learned by all ranks, and text there and back."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    with dp.Ledger() as ledger:
        pairs = learn_merges(documents[r::n], merges, group)
    apart = sum(a != b for a, b in zip(pairs, naive_merges(documents, merges))) / merges
    sent = ledger.sent["all_reduce"], merges * 2 * (n - 1) / n * 8 * (256 + merges) ** 2
    yield dp.Row("merges, learned by all ranks", apart, sent)
    tokenizer, text = Tokenizer(pairs), b"\n\n".join(documents) + bytes(range(256))
    again = tokenizer.decode(tokenizer.encode(text))
    yield dp.Row("  text, encoded and decoded", float(again != text))


def vocabulary_rows(group, device, more=64):
    """Rows of new tokens: the mean over ranks, the bound on the loss, and rows that are frozen."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    model, V = tiny_model(device, H=2, K=1, d=8).double(), 256
    model.head.weight.data *= 4  # logits that differ, as those of a trained model do
    weights = model.token.weight, model.head.weight
    with dp.Ledger() as ledger:
        means = [mean_row(weight.tensor_split(n)[r], V, group) for weight in weights]
    error = max(dp.relative_error(mean, w.detach().mean(0)) for mean, w in zip(means, weights))
    D, limit = weights[0].shape[1], math.log1p(more / V)
    sent = ledger.sent["all_reduce"], 2 * (n - 1) / n * 8 * 2 * D
    yield dp.Row("mean row, of a split vocabulary", error, sent)
    draw = torch.Generator().manual_seed(2)
    rows = torch.randint(1, V, (8, 33), generator=draw)
    batch = on(device, batch_of(rows))
    loss = lambda: nats(model, batch).mean().item()
    old, kept = loss(), [weight.detach().clone() for weight in weights]
    dice = [torch.randn(more, D, generator=draw).to(w) * w.std().item() for w in kept]
    for name, rows, bound in [
        (f"{more} new tokens, mean rows: loss rises", means, (limit / 100, limit)),
        ("  random rows: over that bound", dice, (limit, math.inf)),
    ]:
        model.token.weight, model.head.weight = map(extend, kept, (more, more), rows)
        yield dp.Row(name, loss() - old, bound=bound)
    model.head.weight = extend(torch.zeros_like(kept[1]), more, means[1] * 0)
    yield dp.Row("  all logits alike: the bound itself", abs((loss() - math.log(V)) / limit - 1))
    model.head.weight = extend(kept[1], more, means[1])
    handle = freeze(model.head.weight, V)
    free = torch.autograd.grad(nats(model, batch).sum(), model.head.weight)[0]
    handle.remove()
    whole = torch.autograd.grad(nats(model, batch).sum(), model.head.weight)[0]
    whole[V:] = 0
    yield dp.Row("  frozen: gradient of the old rows", dp.relative_error(free, whole))


def with_copies(documents):
    """Documents (bytes), every fourth twice: once more as it is, then with its first word changed,
    and so on; and the number of the first copy of each."""
    first, copied = [*range(len(documents))], []
    for i in range(0, len(documents), 4):
        text = documents[i]
        copied.append(b" " + text.replace(b" ", b"\n ") if i % 8 else b"Anew " + text)
        first.append(i)
    return documents + copied, torch.tensor(first)


def brute_force(documents):
    """First copies by comparing the bands of all pairs of documents, on one process."""
    bands = torch.stack([signature(ngrams(text, 5)).view(BANDS, HASHES) for text in documents])
    first = torch.arange(len(documents))
    for i in range(len(documents)):
        alike = (bands[i + 1 :] == bands[i]).all(2).any(1).nonzero().flatten() + i + 1
        for j in alike.tolist():
            first[first == max(first[i], first[j])] = min(first[i], first[j])
    return first


def copy_rows(documents, group):
    """Rows of copies: exact and near ones over ranks, recall by the formula, and the split."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    documents, _ = with_copies([text for text in documents if len(text.split()) > 30][:80])
    total, own = len(documents), [*range(len(documents))][r::n]
    words = [b" ".join(text.split()) for text in documents]
    exact = torch.tensor([words.index(text) for text in words])
    near = brute_force(documents)
    for name, nearly, right in ("equal copies", False, exact), ("near copies", True, near):
        texts = [documents[i] for i in own]
        with dp.Ledger() as ledger:
            first = copies(texts, own, total, group, nearly)
        sent = ledger.sent["all_to_all_single"], keys_sent(texts, nearly, n, r)
        apart = (first != right).double().mean().item()
        yield dp.Row(f"{name}: {total - len({*right.tolist()})} of {total}, apart", apart, sent)
    for similarity in (0.6, 0.72, 0.85):
        found, p, trials = recall(similarity, 150), chance(similarity), 150
        slack = 4 * (p * (1 - p) / trials) ** 0.5
        bound = p - slack, min(1, p + slack)
        yield dp.Row(f"recall of copies alike by {similarity}", found, bound=bound)
    first = first.tolist()
    copied = sum(i != document for i, document in enumerate(first))
    apart = lambda side: sum(side(i) != side(first[i]) for i in range(total)) / copied
    together = apart(lambda i: is_held_out(first[i], 0.5))
    yield dp.Row("copies on both sides of the split", together)
    alone, slack = apart(lambda i: is_held_out(i, 0.5)), 4 * (0.25 / copied) ** 0.5
    yield dp.Row("  split by the document's number", alone, bound=(0.5 - slack, 0.5 + slack))


def keys_sent(documents, near, n, r):
    """Bytes of the two exchanges of `meet`, by counting keys of other ranks."""
    if near:
        keys = torch.cat([band_keys(signature(ngrams(text, 5))) for text in documents])
    else:
        keys = torch.tensor([number(b" ".join(text.split())) for text in documents])
    return 8 * (n - 1) + 16 * (keys % n != r).sum().item()


def recall(similarity, trials, size=100):
    """The share of pairs of sets of a Jaccard similarity that get a common key."""
    both, draw, found = round(size * similarity), torch.Generator().manual_seed(3), 0
    for _ in range(trials):
        x = torch.randint(2**62, (size,), generator=draw).tolist()
        half = (size - both) // 2
        one, other = x[: both + half], x[:both] + x[both + half :]
        found += (band_keys(signature(one)) == band_keys(signature(other))).any().item()
    return found / trials


def contamination_row(documents, group):
    """Row of contamination: three documents that quote a question, and no other."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    ask = lambda i: b"Question: " + b" ".join(b"word%d" % (i * k % 97) for k in range(20))
    questions = [ask(3), ask(5)]
    documents = [*documents[:30]]
    for i in (2, 7, 11):
        documents[i] = documents[i] + b" " + questions[i % 2].upper() + b" end"
    g = len(set().union(*(ngrams(question, 13) for question in questions)))
    with dp.Ledger() as ledger:
        shares = contamination(documents[r::n], questions if r == 0 else [], group)
    found = {i for i, share in zip([*range(30)][r::n], shares) if share > 0}
    right, sent = {2, 7, 11} & {*range(30)[r::n]}, (8 + 8 * g) * (r < n - 1)
    sent = ledger.sent["broadcast"], sent
    return dp.Row("documents that quote a question", float(found != right), sent)


def packing_rows(group, device):
    """Rows of packing: a packed row beside each of its documents alone."""
    documents = [[*range(1 + 40 * i, 1 + 40 * i + length)] for i, length in enumerate((9, 6, 11))]
    rows, model = pack(documents, 32).to(device), tiny_model(device, H=2, K=1, d=8).double()
    batch = Batch(*(x.to(device) for x in batch_of(rows.cpu())))
    parameters = [*model.parameters()]
    gradients = lambda loss: torch.autograd.grad(loss, parameters)
    worst = lambda found: max(map(dp.relative_error, found, alone))
    each = [batch_of(torch.tensor([[*document, END]])) for document in documents]
    each = [Batch(*(x.to(device) for x in one)) for one in each]
    alone = gradients(sum(nats(model, one).sum() for one in each))
    yield dp.Row("packed, beside each document alone", worst(gradients(nats(model, batch).sum())))
    running = batch._replace(positions_BS=torch.arange(32, device=device))
    yield dp.Row("  positions run on: rotary only", worst(gradients(nats(model, running).sum())))
    attend = partial(cp.ring_attention, group=group, documents=batch.documents_BS)
    logits = model(cp.shard(batch.x_BS, group), cp.positions(32, group), attend)
    labels = cp.shard(batch.y_BS, group, fill=-100)
    found = gradients(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
    for gradient in found:
        # all_reduce(SUM) over cp, one tensor: each rank has the gradient of its tokens
        dist.all_reduce(gradient, group=group)
    yield dp.Row("  over ranks, a ring of 06", worst(found))
    seen, tails = 0, []
    for document in sorted(documents, key=len, reverse=True):  # each sees those before it
        length = len(document)
        upto = Batch(*(x[..., : seen + length] for x in running))
        tails.append(nats(model, upto, masked=False)[:, seen:].sum())
        seen += length + 1
    found = worst(gradients(nats(model, running, masked=False).sum()))
    yield dp.Row("  without a mask", found, wrong=worst(gradients(sum(tails))))


def proof(text, group, device):
    """All rows of the table."""
    documents = paragraphs_of(text[:24_000])
    yield from tokenizer_rows(documents, group)
    yield from vocabulary_rows(group, device)
    yield from copy_rows(paragraphs_of(text[:60_000]), group)
    yield contamination_row(documents, group)
    yield from packing_rows(group, device)


def train(args, text, group, device, S=64, B=24, merges=64):
    """Clean and split a text; train on bytes; merge pairs, extend the vocabulary, train on."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    documents = paragraphs_of(text[:120_000])
    total, own = len(documents), [*range(len(documents))][r::n]
    texts = [documents[i] for i in own]
    equal, near = (copies(texts, own, total, group, nearly) for nearly in (False, True))
    counted = [total - len({*first.tolist()}) for first in (equal, near)]
    kept = [i for i in range(total) if near[i] == i]
    held_out, training = ([documents[i] for i in kept if is_held_out(i, 0.05) == side]
                          for side in (True, False))  # fmt: skip
    quoting = [share > 0 for share in contamination(training[r::n], held_out, group)]
    quoting = torch.tensor(sum(quoting), device=device)
    # all_reduce(SUM) over the ranks, 1: documents that share 13 words with one that is held out
    dist.all_reduce(quoting, group=group)
    dp.say(f"\n{total} paragraphs: {counted[0]} equal to an earlier one, {counted[1]} nearly. Of "
           f"the rest, {len(held_out)} are held out; {quoting.item()} of {len(training)} share 13 "
           "words with one of these")
    tokenizer = Tokenizer(learn_merges(training[r::n], merges, group))
    kinds = {"bytes": (training, list), f"{merges} merges": (training, tokenizer.encode),
             "held out": (held_out, list)}  # fmt: skip
    dp.say("\n             bytes a token   rows  filled up  begin inside a document, if cut")
    packed = {}
    for name, (documents, encode) in kinds.items():
        encoded = [encode(document) for document in documents]
        packed[name], size = pack(encoded, S), sum(map(len, documents))
        filled = (batch_of(packed[name]).documents_BS < 0).double().mean().item()
        line = join_and_cut(encoded, S)
        inside = (line[:-1, -1] != END).double().mean().item()
        dp.say(f"{name:13}{size / sum(map(len, encoded)):13.2f}{len(packed[name]):7}{filled:11.1%}"
               f"{inside:9.0%}")
    fit(args, *packed.values(), merges, group, device, B)


def fit(args, rows, merged_rows, held_out, merges, group, device, B):
    """Train on bytes; give the model tokens for the merges; train on these. Print the loss."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    model, unseen = tiny_model(device), on(device, batch_of(held_out[:48]))
    loss = lambda: (nats(model, unseen).sum() / (unseen.y_BS != -100).sum()).item()

    def steps(name, rows, count):
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.0)
        for t in range(count):
            drawn = torch.randint(len(rows), (B,), generator=torch.Generator().manual_seed(t))
            batch = on(device, batch_of(rows[drawn.tensor_split(n)[r]]))
            value = step(model, optimizer, batch, group)
            if (t + 1) % 15 == 0:
                dp.say(f"{t + 1:4} on {name:9}{value.item():7.3f}")

    dp.say("\nstep              loss of a token")
    steps("bytes", rows, args.steps // 2)
    old, weights = loss(), {"token": model.token.weight, "head": model.head.weight}
    dp.say(f"bytes held out: {old:.3f}; with {merges} new tokens it may become "
           f"{old + math.log1p(merges / 256):.3f} at most, if their rows are the mean")
    random_rows = lambda w: torch.randn(merges, w.shape[1]) * w.std().item()
    for name, rows_of in ("random", random_rows), ("mean", lambda w: w.detach().mean(0)):
        torch.manual_seed(0)
        for layer, weight in weights.items():
            getattr(model, layer).weight = extend(weight, merges, rows_of(weight))
        dp.say(f"  with {name} rows: {loss():.3f}")
    steps("merges", merged_rows, args.steps // 2)


def main(args, device):
    """Prove, then clean, tokenise and train; 0 if everything is as claimed."""
    group, text = dist.group.WORLD, dp.read_text(args.text, at_least=60_000)
    dp.say(f"tokens · {dist.get_world_size()} ranks · {device.type}")
    broken = dp.prove(list(proof(text, group, device)), device)
    if args.steps:
        train(args, text, group, device)
    return broken


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    if ranks > 8:
        raise ValueError(f"{ranks} ranks split 256 rows and share 24 sequences: use 8 or fewer")
    dp.read_text(args.text, at_least=60_000)


if __name__ == "__main__":
    dp.launch(main, dp.arguments(__doc__, ranks=2, steps=60).parse_args(), validate)
