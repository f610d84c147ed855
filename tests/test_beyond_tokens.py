"""tokens: merges that all ranks learn, copies that meet, a split that cannot leak, packed rows."""

import math
import random
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import ROOT, beyond, on_ranks, refusal, run_script

tokens = beyond("tokens")
question = pytest.mark.question
SCRIPT = ROOT / "beyond/tokens.py"
EXAMPLE = [(ord("l"), ord("o")), (256, ord("w")), (ord(" "), 257)]


def world():
    return dist.group.WORLD


@pytest.mark.parametrize("ranks, torchrun", [(2, 0), pytest.param(3, 3, marks=pytest.mark.slow)])
def test_tokens_proves_itself(ranks, torchrun, tmp_path):
    flags = () if torchrun else ("--ranks", ranks)
    done = run_script(SCRIPT, "--steps", 0, *flags, cwd=tmp_path, torchrun=torchrun)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT AS CLAIMED" not in done.stdout and list(tmp_path.iterdir()) == []
    assert done.stdout.count("bounded") == 6 and done.stdout.count("wrong on purpose") == 1


# ── a tokenizer ──────────────────────────────────────────────────────────────────────────────


@question("QB.1")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_example_of_three_words_is_learned_by_ranks_that_share_them(n):
    documents = [b"low", b" low", b" lower"]
    learned = lambda: tokens.learn_merges(documents[dist.get_rank() :: n], 3, world())
    assert on_ranks(n, learned) == [EXAMPLE] * n


@question("QB.1")
def test_of_equally_frequent_pairs_all_ranks_merge_the_same_one():
    """The pair of the smallest tokens, in whatever order a rank has met them."""
    documents = [[b"xy ab", b"ba"], [b"ab yx", b"xy"]]  # a b and x y twice, and no other

    def learned():
        return tokens.learn_merges(documents[dist.get_rank()], 2, world())

    pairs = [(ord("a"), ord("b")), (ord("x"), ord("y"))]
    assert on_ranks(2, learned) == [pairs] * 2


@question("QB.1")
def test_a_pair_counts_where_it_is_frequent_in_all_documents_together():
    documents = [[b"cdcd cdcd qr"], [b"qr qr qr qr qr qr"]]  # 4 here, 1 + 6 there

    def learned():
        return tokens.learn_merges(documents[dist.get_rank()], 1, world())

    assert on_ranks(2, learned) == [[(ord("q"), ord("r"))]] * 2


@question("QB.1")
def test_merges_are_those_of_a_group_where_other_ranks_have_other_documents():
    documents = [[b"ab ab"], [b"ab"], [b"zz zz zz zz zz"]]

    def learned():
        group, r = dist.new_group([0, 1]), dist.get_rank()
        return tokens.learn_merges(documents[r], 1, group) if r < 2 else None

    assert on_ranks(3, learned) == [[(ord("a"), ord("b"))]] * 2 + [None]


def test_merging_is_from_the_left_and_once():
    assert tokens.merged((1, 1, 1, 2, 1, 1), (1, 1), 9) == (9, 1, 2, 9)
    assert tokens.merged((1, 2), (2, 1), 9) == (1, 2)


def test_words_are_encoded_by_the_merges_in_their_order():
    first = tokens.Tokenizer([(108, 111), (111, 119)])
    assert first.encode(b"low") == [256, 119]
    assert tokens.Tokenizer([(111, 119), (108, 111)]).encode(b"low") == [108, 256]
    assert tokens.Tokenizer(EXAMPLE).encode(b"low low") == [257, 258]
    assert tokens.Tokenizer([]).encode(b"ab") == [97, 98]


def test_any_bytes_come_back_and_no_merge_crosses_a_word():
    text = tokens.dp.read_text(None, 0)[:20_000].numpy().tobytes()
    pairs = tokens.naive_merges([text], 40)
    tokenizer = tokens.Tokenizer(pairs)
    draw = random.Random(0)
    for case in [text, b"", bytes(range(256)), *(draw.randbytes(50) for _ in range(50))]:
        assert tokenizer.decode(tokenizer.encode(case)) == case
    assert len(tokenizer.encode(text)) < 0.75 * len(text)
    words = [tokenizer.decode([token]) for token in range(256, 296)]
    assert not any(re.search(rb"\w\s|[a-z][0-9]", word) for word in words)


def test_the_digest_changes_with_all_that_a_token_means(monkeypatch):
    digest = tokens.Tokenizer(EXAMPLE).digest()
    assert digest == "656c67547597533a74e4923d3d3216fbcebb0b2fdbc0c43f77c19a76f031e845"
    assert digest == tokens.Tokenizer([list(pair) for pair in EXAMPLE]).digest()
    assert tokens.Tokenizer([EXAMPLE[0], (32, 108), EXAMPLE[1]]).digest() != digest
    monkeypatch.setattr(tokens, "WORD", re.compile(rb"\S+|\s+"))
    assert tokens.Tokenizer(EXAMPLE).digest() != digest


# ── new tokens ───────────────────────────────────────────────────────────────────────────────


def test_the_mean_row_is_that_of_unequal_parts():
    whole = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)).double()
    mean = lambda: tokens.mean_row(whole.tensor_split(3)[dist.get_rank()], 10, world())
    for found in on_ranks(3, mean):
        torch.testing.assert_close(found, whole.mean(0))


@pytest.mark.parametrize("seed", range(5))
def test_mean_rows_raise_no_loss_by_more_than_the_bound(seed):
    draw = torch.Generator().manual_seed(seed)
    h, head = torch.randn(50, 8, generator=draw).double(), torch.randn(20, 8, generator=draw)
    head, y = head.double() * 3, torch.randint(20, (50,), generator=draw)
    wider = tokens.extend(head, 30, head.mean(0))
    assert wider.shape == (50, 8) and torch.equal(wider[:20].detach(), head)
    before, after = (F.cross_entropy(h @ w.T, y, reduction="none") for w in (head, wider))
    rise = (after - before).detach()
    assert 0 <= rise.min() < rise.max() and rise.max() <= math.log1p(30 / 20)
    same = F.cross_entropy(h @ tokens.extend(head * 0, 30, head[0] * 0).T, y)
    assert same.item() == pytest.approx(math.log(50))


def test_frozen_rows_get_no_gradient_until_they_are_released():
    w = torch.nn.Parameter(torch.ones(4, 2))
    handle = tokens.freeze(w, 3)
    (w * 2).sum().backward()
    assert w.grad.tolist() == [[2, 2]] * 3 + [[0, 0]]
    handle.remove()
    (w * 2).sum().backward()
    assert w.grad.tolist() == [[4, 4]] * 3 + [[2, 2]]


# ── copies ───────────────────────────────────────────────────────────────────────────────────


def test_least_numbers_are_equal_as_often_as_the_sets_are_alike():
    """Over many orders: the share of equal ones is the Jaccard similarity, here 1/2."""
    one, other = {*range(1, 91)}, {*range(31, 121)}
    one, other = ({tokens.number(b"%d" % x) for x in each} for each in (one, other))
    equal = torch.cat([tokens.signature(one, seed) == tokens.signature(other, seed)
                       for seed in range(40)])  # fmt: skip
    assert len(equal) == 40 * tokens.BANDS * tokens.HASHES
    assert abs(equal.double().mean().item() - 0.5) < 4 * (0.25 / len(equal)) ** 0.5


def test_a_key_is_that_of_a_whole_band_and_of_its_place():
    least = torch.arange(tokens.BANDS * tokens.HASHES)
    keys, changed = tokens.band_keys(least), least.clone()
    changed[tokens.HASHES * 3] += 1
    differ = (tokens.band_keys(changed) != keys).nonzero().flatten().tolist()
    assert differ == [3] and len(keys.unique()) == tokens.BANDS
    assert len(tokens.band_keys(torch.zeros_like(least)).unique()) == tokens.BANDS


def test_the_chance_of_a_common_key():
    assert tokens.chance(0.5, bands=1, hashes=3) == 1 / 8
    assert tokens.chance(0.5, bands=2, hashes=1) == 3 / 4
    assert (tokens.chance(0), tokens.chance(1)) == (0, 1)
    assert 0.6 < tokens.chance(0.72) + 0.03 < 0.69


@pytest.mark.reference
def test_bands_find_as_many_copies_as_datasketch_finds():
    import datasketch

    draw, found, theirs, trials = random.Random(0), 0, 0, 120
    for trial in range(trials):
        x = [draw.randbytes(8) for _ in range(130)]
        pair = x[:100], x[:70] + x[100:]  # 70 of 130 in both
        ours = [tokens.band_keys(tokens.signature({*map(tokens.number, half)})) for half in pair]
        found += (ours[0] == ours[1]).any().item()
        hashes = []
        for half in pair:
            minhash = datasketch.MinHash(num_perm=112, seed=trial)
            minhash.update_batch(half)
            hashes.append(minhash)
        lsh = datasketch.MinHashLSH(num_perm=112, params=(tokens.BANDS, tokens.HASHES))
        lsh.insert("one", hashes[0])
        theirs += len(lsh.query(hashes[1]))
    p = tokens.chance(70 / 130)
    slack = 4 * (p * (1 - p) / trials) ** 0.5
    assert abs(found / trials - p) < slack and abs(theirs / trials - p) < slack


@question("QB.2")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_equal_keys_meet_whichever_ranks_have_them(n):
    keys = [[7, 8, 9, 12], [8, 12, 30, 7], [], ][:n]
    numbers = [[0, 1, 2, 3], [4, 5, 6, 7], []][:n]

    def found():
        r = dist.get_rank()
        mine = (torch.tensor(x[r], dtype=torch.int64) for x in (keys, numbers))
        return tokens.meet(*mine, world()).tolist()

    pairs = [pair for of_rank in on_ranks(n, found) for pair in of_rank]
    expected = [] if n == 1 else [[0, 7], [1, 4], [3, 5]]
    assert sorted(pairs) == expected


@question("QB.2")
def test_keys_are_shared_out_over_the_ranks():
    """Each rank gets about its share of many keys, and no pair is told twice."""
    draw = torch.Generator().manual_seed(0)
    keys = torch.randint(2**62, (400,), generator=draw)

    def found():
        return tokens.meet(keys, torch.arange(400) + 400 * dist.get_rank(), world()).tolist()

    pairs = on_ranks(2, found)
    assert all(150 < len(each) < 250 for each in pairs)
    assert sorted(pairs[0] + pairs[1]) == [[i, i + 400] for i in range(400)]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_chain_of_pairs_on_several_ranks_is_one_cluster(n):
    pairs = [[3, 5], [1, 5], [1, 2], [7, 8], [8, 9], [0, 9]]

    def first():
        own = torch.tensor(pairs[dist.get_rank() :: n]).view(-1, 2)
        return tokens.clusters(own, 11, world()).tolist()

    assert on_ranks(n, first) == [[0, 1, 1, 1, 4, 1, 6, 0, 0, 0, 10]] * n


def test_a_text_with_other_spaces_is_an_equal_copy_and_with_another_word_a_near_one():
    words = [b"word%d" % i for i in range(60)]
    texts = [b" ".join(words), b"\n ".join(words) + b" ", b" ".join([b"other", *words[1:]]),
             b" ".join(words[::-1])]  # fmt: skip

    def first():
        r = dist.get_rank()
        own = [*range(4)][r::2]
        parts = [texts[i] for i in own], own, 4, world()
        return [tokens.copies(*parts, near=near).tolist() for near in (False, True)]

    assert on_ranks(2, first) == [[[0, 0, 2, 3], [0, 0, 0, 3]]] * 2


def test_contamination_is_the_share_of_ngrams_that_a_question_has():
    ask = b"What is the largest city of the country that has the longest coast?"
    clean = b"one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    quote = b"so: " + ask.upper() + b" Nobody knows."

    def shares():
        r = dist.get_rank()
        return tokens.contamination([[clean], [quote]][r], [ask] if r == 0 else [], world())

    (none,), (some,) = on_ranks(2, shares)
    assert none == 0 and some == 1 / 4  # 16 words have 4 runs of 13, the question has 1


def test_the_split_has_its_share_and_depends_on_the_first_copy_alone():
    sides = [tokens.is_held_out(i, 0.1) for i in range(20_000)]
    assert abs(sum(sides) / len(sides) - 0.1) < 4 * (0.09 / len(sides)) ** 0.5
    assert sides[:50] == [tokens.is_held_out(i, 0.1) for i in range(50)]
    assert sides != [tokens.is_held_out(i, 0.1, key="another") for i in range(20_000)]
    assert not any(tokens.is_held_out(i, 0.0) for i in range(99))
    assert all(tokens.is_held_out(i, 1.0) for i in range(99))


# ── rows ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(4))
def test_packed_rows_have_every_token_once_and_cut_only_what_is_too_long(seed):
    draw, S = random.Random(seed), 15
    documents = [[draw.randint(1, 99) for _ in range(draw.randint(1, 40))] for _ in range(60)]
    rows = tokens.pack(documents, S)
    assert rows.shape[1] == S + 1
    pieces = []
    for row in rows.tolist():
        text = row[: len(row) - next((i for i, x in enumerate(row[::-1]) if x), 0)]
        pieces += [piece for piece in re.split(r"(?<= 0) ", " ".join(map(str, text)))]
    pieces = sorted(piece.removesuffix(" 0") for piece in pieces)
    right = []
    for document in documents:
        whole = [*document, 0]
        right += [whole[i : i + S + 1] for i in range(0, len(whole), S + 1)]
    right = [" ".join(map(str, x)).removesuffix(" 0") for x in right if x != [0]]
    assert pieces == sorted(right)
    used = sum(map(len, documents)) + len(documents)
    assert len(rows) <= 1.3 * used / (S + 1)


def test_the_longest_come_first_each_into_the_fullest_row_that_has_room():
    rows = tokens.pack([[1], [2] * 4, [3] * 6, [4] * 2], S=9)
    assert rows.tolist() == [[3] * 6 + [0] + [4] * 2 + [0], [2] * 4 + [0, 1, 0, 0, 0, 0]]


def test_a_document_may_not_contain_the_token_that_closes_it():
    with pytest.raises(ValueError, match="token 0 closes a document"):
        tokens.pack([[1, 0, 2]], 9)


def test_a_line_that_is_cut_anywhere_drops_less_than_a_row():
    assert tokens.join_and_cut([[1, 2], [3, 4, 5]], 2).tolist() == [[1, 2, 0], [3, 4, 5]]


@question("QB.3")
def test_what_a_packed_row_says_of_each_token():
    batch = tokens.batch_of(torch.tensor([[5, 6, 0, 7, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7]]))
    assert batch.x_BS.tolist() == [[5, 6, 0, 7, 0, 0], [1, 2, 3, 4, 5, 6]]
    assert batch.y_BS.tolist() == [[6, 0, -100, 0, -100, -100], [2, 3, 4, 5, 6, 7]]
    assert batch.documents_BS.tolist() == [[0, 0, 0, 1, 1, -1], [0] * 6]
    assert batch.positions_BS.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]


@question("QB.3")
def test_a_packed_row_has_the_loss_of_its_documents_alone():
    documents = [[1, 2, 3, 4], [9, 8, 7], [5, 6]]
    model = tokens.tiny_model("cpu", H=2, K=1, d=8).double()
    packed = tokens.batch_of(tokens.pack(documents, 16))
    alone = [tokens.batch_of(torch.tensor([[*document, 0]])) for document in documents]
    found, expected = (sum(tokens.nats(model, x).sum() for x in y) for y in ([packed], alone))
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    assert (packed.y_BS != -100).sum() == sum(map(len, documents))
    unmasked = tokens.nats(model, packed, masked=False).sum()
    assert abs(unmasked / expected - 1) > 1e-4


def test_tokens_refuses_what_cannot_work(tmp_path):
    assert "use 8 or fewer" in refusal(SCRIPT, "--ranks", 9)
    short = tmp_path / "short.txt"
    short.write_bytes(b"too short")
    assert f"--text {short}" in refusal(SCRIPT, "--text", short)


@pytest.mark.slow
def test_tokens_cleans_splits_merges_and_trains_on():
    done = run_script(SCRIPT, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(x) for x in re.findall(r"^ +\d+ on \w+ +([\d.]+)", done.stdout, re.M)]
    old, most = map(float, re.search(r"held out: ([\d.]+).*become ([\d.]+)", done.stdout).groups())
    drawn, mean = (float(re.search(f"with {how} rows: ([\\d.]+)", done.stdout)[1])
                   for how in ("random", "mean"))  # fmt: skip
    assert losses[1] < losses[0] and losses[3] < losses[2] and len(losses) == 4
    assert old < mean < most and mean < drawn
    total, equal, near = map(int, re.search(
        r"(\d+) paragraphs: (\d+) equal to an earlier one, (\d+) nearly", done.stdout).groups())
    assert 0 < equal < near < total and "; 0 of " in done.stdout
    cut = re.findall(r"^(?:bytes|64 merges) .*?([\d.]+)% +(\d+)%$", done.stdout, re.M)
    assert all(float(filled) < 2 and int(inside) > 90 for filled, inside in cut) and len(cut) == 2
