"""data: an order without a list, shares without dice, shards that are fetched once, a cursor that
any number of ranks can go on from."""

import json
import os
import signal
import time
from collections import Counter
from hashlib import sha256

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import ROOT, RankFailed, beyond, on_ranks, refusal, run_script

data = beyond("data")
question = pytest.mark.question
SCRIPT = ROOT / "beyond/data.py"


def world():
    return dist.group.WORLD


@pytest.fixture
def folder(tmp_path):
    """72 samples of four tokens in six shards of two domains; sample i is [i, i, i, i]."""
    rows = torch.arange(72)[:, None].expand(72, 4)
    data.write(tmp_path / "far", {"a": rows[:48], "b": rows[48:]}, per_shard=12)
    return tmp_path / "far"


def read(loader, cursor, B, n=1, r=0):
    """The samples of a batch: their first tokens."""
    return loader.batch(cursor, B, n, r).x_BS[:, 0].tolist()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_data_proves_itself(ranks, tmp_path):
    done = run_script(SCRIPT, "--steps", 0, "--ranks", ranks, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT AS CLAIMED" not in done.stdout and list(tmp_path.iterdir()) == []
    assert done.stdout.count("bounded") == 4 and done.stdout.count("wrong on purpose") == 3


# ── the order ────────────────────────────────────────────────────────────────────────────────


def test_the_example_of_twelve_samples():
    orders = [[data.shuffled(j, 12, f"epoch {e}") for j in range(12)] for e in (0, 1)]
    assert orders[0] == [7, 0, 5, 10, 6, 1, 4, 2, 3, 11, 8, 9]
    assert orders[1] == [9, 7, 0, 1, 10, 5, 6, 2, 4, 11, 8, 3]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 17, 64, 65, 255, 256, 257, 1000])
def test_every_number_stands_at_one_place(size):
    for key in "ab":
        assert sorted(data.shuffled(j, size, key) for j in range(size)) == [*range(size)]


def test_a_place_is_found_in_an_order_of_any_size_at_once():
    size, seen = 10**15, [data.shuffled(j, 10**15, "large") for j in range(200)]
    assert len({*seen}) == 200 and max(seen) > size / 2 and min(seen) < size / 10


@question("QD.1")
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_a_batch_is_the_same_for_any_number_of_ranks(n):
    parts = [data.part(40, 12, n, r) for r in range(n)]
    assert sum(parts, []) == [*range(40, 52)]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@question("QD.1")
def test_each_sample_comes_once_while_ranks_leave_and_return(folder):
    """4, 3, 2, 4 ranks, six samples a batch: the cursor is all that one tells the next."""
    loader, cursor, seen = data.Loader(folder), 0, []
    for n in (4, 3, 2, 4, 1, 3, 3, 2, 4, 4, 1, 2):
        again = data.Loader(folder)
        cursor = again.resume(json.loads(json.dumps(loader.state(cursor))))
        seen += [sample for r in range(n) for sample in read(again, cursor, 6, n, r)]
        cursor += 6
    assert sorted(seen) == [*range(72)] and seen != sorted(seen)
    assert sorted(read(loader, 72, 72)) == [*range(72)] and read(loader, 72, 72) != seen


def test_a_rank_is_killed_and_the_others_go_on_with_what_nobody_has_read(folder):
    """Rank 2 of 3 dies; a new run of two ranks takes up the cursor that all had agreed on."""

    def steps(cursor, file, dies):
        r, n, loader = dist.get_rank(), dist.get_world_size(), data.Loader(folder)
        for _ in range(6):
            samples = read(loader, cursor, 6, n, r)
            if dies and r == 2 and cursor == 18:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()  # a step ends when all have taken it
            with open(f"{file}{r}", "a") as done:
                done.write(json.dumps([cursor, samples]) + "\n")
            cursor += 6
        return cursor

    with pytest.raises(RankFailed, match="rank 2"):
        on_ranks(3, steps, 0, folder / "first", True)
    lines = [json.loads(line) for r in range(3) for line in open(folder / f"first{r}")]
    cursor = 6 + min(max(c for c, _ in map(json.loads, open(folder / f"first{r}")))
                     for r in range(3))  # fmt: skip
    assert cursor == 18
    on_ranks(2, steps, cursor, folder / "second", False)
    lines = [line for line in lines if line[0] < cursor]
    lines += [json.loads(line) for r in range(2) for line in open(folder / f"second{r}")]
    seen = [sample for _, samples in lines for sample in samples]
    assert len(seen) == len({*seen}) == 18 + 36


def test_a_window_has_the_samples_of_its_shards_and_lasts_until_they_are_read(folder):
    loader = data.Loader(folder, window=2)
    order, windows = loader.orders[0], []
    for start in range(0, 144, 24):
        where = [order.where(number) for number in range(start, start + 24)]
        (window,) = {w for w, _, _ in where}
        shards = Counter(shard for _, shard, _ in where)
        assert shards == {i: 12 for i in order.shards(window)} and len(shards) == 2
        assert len({*where}) == 24
        windows.append([*shards])
    assert sorted(sum(windows[:3], [])) == sorted(sum(windows[3:], [])) == [*range(6)]
    assert order.windows_of(0) != order.windows_of(1)  # the second epoch has another order
    first = [order.where(number)[1] for number in range(12)]
    assert len({*first}) == 2, "a window's shards are mixed, and not read one after the other"


def test_unequal_shards_and_a_last_window_that_is_shorter():
    order = data.Order([5, 1, 7, 2, 3], 2, "key")
    where = [order.where(number)[1:] for number in range(18)]
    assert sorted(where) == [(i, row) for i, k in enumerate([5, 1, 7, 2, 3]) for row in range(k)]


# ── mixtures ─────────────────────────────────────────────────────────────────────────────────


def test_whole_numbers_keep_their_sum_and_are_off_by_less_than_one():
    assert data.largest_remainder(10, [1, 1, 1]) == [4, 3, 3]
    assert data.largest_remainder(7, [0.5, 0, 0.5]) == [4, 0, 3]
    assert data.largest_remainder(10, [5.5, 2.6, 1.9]) == [5, 3, 2]
    for weights in [-1, 2], [0, 0]:
        with pytest.raises(ValueError, match="not 0"):
            data.largest_remainder(3, weights)


@question("QD.2")
@pytest.mark.parametrize("counts", [
    [600, 250, 100, 50], [1, 1], [3, 3, 2], [7, 2, 1], [333, 333, 334], [998, 1, 1], [5], [0, 3, 2],
    [5, 5, 5, 1, 1, 1], [90, 9, 1],
])  # fmt: skip
def test_after_any_number_of_samples_each_domain_is_off_by_less_than_one(counts):
    domains, total = data.pattern(counts), sum(counts)
    assert Counter(domains) == {i: count for i, count in enumerate(counts) if count}
    drawn = [0] * len(counts)
    for j, domain in enumerate(domains, 1):
        drawn[domain] += 1
        for count, quota in zip(drawn, (j * share / total for share in counts)):
            assert quota - 1 < count < quota + 1, (j, drawn)


def test_phases_begin_where_they_say_and_samples_of_a_domain_are_numbered_on():
    mixture = data.Mixture([(0, [1, 0]), (10, [1, 3]), (14, [0, 1])])
    seen = [mixture.at(place) for place in range(20)]
    assert [domain for domain, _ in seen[:10]] == [0] * 10
    assert Counter(domain for domain, _ in seen[10:14]) == {0: 1, 1: 3}
    assert [domain for domain, _ in seen[14:]] == [1] * 6
    for domain in 0, 1:
        assert [number for of, number in seen if of == domain] == [*range(11 - 2 * domain)]
    assert mixture.drawn(20) == [11, 9] and mixture.drawn(0) == [0, 0]
    with pytest.raises(ValueError, match=r"phases start at \[0, 5, 5\]"):
        data.Mixture([(0, [1]), (5, [1]), (5, [1])])


def test_temperature_lies_between_proportion_and_all_alike():
    assert data.temperature([90, 10], 1) == pytest.approx([0.9, 0.1])
    assert data.temperature([90, 10], 0) == pytest.approx([0.5, 0.5])
    assert data.temperature([81, 1], 0.5) == pytest.approx([0.9, 0.1])


def test_a_curriculum_adds_levels_as_competence_reaches_them():
    phases = data.curriculum(2_000, 4, least=0.1)
    assert [weights for _, weights in phases] == [
        [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]  # fmt: skip
    for i, (place, _) in enumerate(phases[1:], 1):
        competence = (0.1**2 + (1 - 0.1**2) * place / 2_000) ** 0.5
        assert competence == pytest.approx(i / 4, abs=1e-3)
    mixture = data.Mixture(phases)
    seen = [mixture.at(place)[0] for place in range(2_000)]
    assert max(seen[: phases[1][0]]) == 0 and max(seen[: phases[2][0]]) == 1 and max(seen) == 3


def test_doremi_raises_the_weight_of_what_a_model_does_worse_than_its_reference():
    weights = data.doremi(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]), smoothing=0.0)
    assert weights.tolist() == pytest.approx([np.e / (np.e + 1), 1 / (np.e + 1)])
    smooth = data.doremi(torch.tensor([1.0, 0.0]), torch.zeros(2), smoothing=0.1)
    assert smooth.tolist() == pytest.approx([0.95, 0.05])
    smooth = data.doremi(torch.tensor([1.0, 0.0]), torch.ones(2), smoothing=0.1)
    assert smooth.tolist() == pytest.approx([0.95, 0.05])  # normed before it is smoothed


def test_excess_counts_labels_of_all_ranks_and_only_where_it_costs_more():
    def of_ranks():
        r = dist.get_rank()
        nats, reference = torch.tensor([[[3.0, 1.0]], [[2.0, 9.0]]])[r], torch.ones(1, 2) * 2
        y = torch.tensor([[[1, 1]], [[1, -100]]])[r]
        return data.excess(nats, reference, y, torch.tensor([0]), 2, world()).tolist()

    assert on_ranks(2, of_ranks) == [[pytest.approx(1 / 3), 0.0]] * 2  # (1 + 0 + 0) / 3 labels


# ── shards ───────────────────────────────────────────────────────────────────────────────────


def test_the_index_names_each_shard_its_samples_and_its_digest(folder):
    index = data.read_index(folder)
    assert (index["length"], index["dtype"], index["tokenizer"]) == (4, "uint8", "bytes")
    for name, shards in index["domains"].items():
        assert len(shards) == {"a": 4, "b": 2}[name]
        for file, samples, digest in shards:
            content = (folder / file).read_bytes()
            assert samples == 12 and len(content) == 48
            assert digest == sha256(content).hexdigest()


@pytest.mark.parametrize("largest, dtype", [(255, "uint8"), (256, "uint16"), (65_536, "int32")])
def test_tokens_take_as_few_bytes_as_they_need(largest, dtype, tmp_path):
    rows = torch.tensor([[1, largest, 3], [4, 5, 6]])
    data.write(tmp_path, {"a": rows}, 2)
    assert data.read_index(tmp_path)["dtype"] == dtype
    loader = data.Loader(tmp_path)
    found = sorted(loader.row(place).tolist() for place in range(2))
    assert found == sorted(rows.tolist())


def test_a_damaged_shard_and_a_missing_index_are_named(folder):
    file = folder / "a_00002.bin"
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="shard a_00002.bin has digest .* copy it once more"):
        data.Loader(folder).batch(0, 72)
    with pytest.raises(ValueError, match="index.json cannot be read"):
        data.Loader(folder / "nowhere")


def test_what_a_folder_cannot_give_is_refused(folder):
    with pytest.raises(ValueError, match="from tokenizer bytes, not 1234"):
        data.Loader(folder, tokenizer="1234")
    with pytest.raises(ValueError, match="each phase needs 2 weights"):
        data.Loader(folder, phases=[(0, [1.0])])
    with pytest.raises(ValueError, match="a batch of 73 would have a sample twice: 72 are there"):
        data.Loader(folder).batch(0, 73)
    state = data.Loader(folder).state(6)
    for other in dict(seed=1), dict(window=2), dict(phases=[(0, [1, 1])]):
        with pytest.raises(ValueError, match="had another order"):
            data.Loader(folder, **other).resume(state)
    assert data.Loader(folder, tokenizer="bytes").resume(state) == 6


def test_a_mixture_reads_each_domain_in_its_share(folder):
    loader = data.Loader(folder, phases=[(0, [1.0, 1.0])])
    samples = read(loader, 0, 48)
    assert sorted(samples) == [*sorted(x for x in samples if x < 48), *range(48, 72)]
    assert sum(x < 48 for x in samples) == 24 and len({*samples}) == 48


# ── staging ──────────────────────────────────────────────────────────────────────────────────


def test_a_node_fetches_each_shard_once_and_holds_two_windows(folder):
    source = data.Source(folder)
    staging = data.Staging(source, folder.parent / "near")
    loader = data.Loader(folder, window=2, staging=staging, ahead=18)
    peak = 0
    for cursor in range(0, 54, 6):
        assert read(loader, cursor, 6) == read(data.Loader(folder, window=2), cursor, 6)
        [copy.result() for copy in staging.copies.values()]
        peak = max(peak, staging.held())
    assert source.bytes == 72 * 4 and peak == 4 * 48


def test_shards_that_nobody_wants_any_more_are_deleted_and_what_is_left_is_used_again(folder):
    near = folder.parent / "near"
    staging = data.Staging(data.Source(folder), near)
    staging.prepare(["a_00000.bin", "a_00001.bin"])
    assert bytes(staging.open("a_00000.bin")) == (folder / "a_00000.bin").read_bytes()
    staging.prepare(["a_00001.bin"])
    [copy.result() for copy in staging.copies.values()]
    assert [path.name for path in near.iterdir()] == ["a_00001.bin"]
    (near / "b_00000.bin").write_bytes(b"an older file of this name, or half of one")
    source = data.Source(folder)
    again = data.Staging(source, near)
    assert bytes(again.open("b_00000.bin")) == (folder / "b_00000.bin").read_bytes()
    again.open("a_00001.bin")
    assert source.bytes == 48  # the damaged one alone was fetched


def test_what_a_thread_meets_is_raised_where_training_sees_it(folder):
    file = folder / "a_00001.bin"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    staging = data.Staging(data.Source(folder), folder.parent / "near")
    staging.prepare(["a_00001.bin"])
    with pytest.raises(ValueError, match="shard a_00001.bin has digest"):
        staging.open("a_00001.bin")
    assert not (folder.parent / "near/a_00001.bin").exists()


def test_a_shard_that_another_rank_does_not_fetch_is_named_after_a_while(folder):
    staging = data.Staging(data.Source(folder), folder.parent / "near", n=2, r=0, patience=0.2)
    staging.prepare(["a_00000.bin", "a_00001.bin"])
    staging.open("a_00000.bin")
    with pytest.raises(TimeoutError, match="shard a_00001.bin did not come .* another rank"):
        staging.open("a_00001.bin")


def test_ranks_of_a_node_share_out_what_they_fetch(folder):
    def steps():
        r = dist.get_rank()
        source = data.Source(folder)
        staging = data.Staging(source, folder.parent / "near", 2, r)
        loader = data.Loader(folder, window=2, staging=staging, ahead=12)
        seen = []
        for cursor in range(0, 60, 6):
            seen += read(loader, cursor, 6, 2, r)
            dist.barrier()
        return source.bytes, seen

    (first, one), (second, other) = on_ranks(2, steps)
    assert first + second == 72 * 4 and first == second
    assert len({*one, *other}) == 60


def test_a_source_takes_the_time_that_its_rate_says(folder):
    started = time.monotonic()
    data.Source(folder, rate=480.0).read("a_00000.bin")
    assert time.monotonic() - started >= 0.1


def test_waiting_by_hand():
    assert data.waiting(6, 0.05, 0.03, ahead=True) == pytest.approx(0.05 + 5 * 0.02)
    assert data.waiting(6, 0.05, 0.09, ahead=True) == pytest.approx(0.05)
    assert data.waiting(6, 0.05, 0.09, ahead=False) == pytest.approx(0.3)


def test_data_refuses_what_cannot_work(tmp_path):
    assert "use 8 or fewer" in refusal(SCRIPT, "--ranks", 9)
    short = tmp_path / "short.txt"
    short.write_bytes(b"too short")
    assert f"--text {short}" in refusal(SCRIPT, "--text", short)


@pytest.mark.slow
def test_data_trains_on_with_a_rank_less(tmp_path):
    done = run_script(SCRIPT, "--ranks", 3, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout.split("seconds waited")[1].split("\n\n")[0].splitlines()[1:]
    rows = [line.split() for line in table]
    assert [row[1] for row in rows] == ["3"] * 3 + ["2"] * 3
    assert [int(row[2]) for row in rows] == [240 * i for i in range(1, 7)]
    losses = [float(row[3]) for row in rows]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 3.26
    waits = [line.split()[-2:] for line in done.stdout.splitlines() if " ms  " in line]
    assert len(waits) == 4 and all(float(seen) >= 0.5 * float(wait) for seen, wait in waits)
    assert list(tmp_path.iterdir()) == []
