"""02_zero: every stage equal to plain torch, bytes to the formulas, and the reported faults."""

import argparse
import contextlib
import copy
import dataclasses
import io
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import ROOT, RankFailed, chapter, on_ranks, refusal, run_script
from torch import nn
from torch.utils.checkpoint import checkpoint

zero = chapter("02_zero")
CPU = torch.device("cpu")
world = lambda: dist.group.WORLD
rank = lambda: dist.get_rank()
question = pytest.mark.question
STAGES = [(0, "flat"), (1, "flat"), (2, "flat"), (3, "flat"), (3, "per_parameter")]


def hybrid(n):
    halves = [list(range(n // 2)), list(range(n // 2, n))]
    make = dist.new_subgroups_by_enumeration
    return make(halves)[0], make([list(pair) for pair in zip(*halves)])[0]


def hybrid_unit(n):
    return dict(zip(("group", "replicate_group"), hybrid(n)))


# ── values, sent and held ────────────────────────────────────────────────────────────────────


@question("Q2.1")
@question("Q2.2")
@question("Q2.3")
@pytest.mark.parametrize("n", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_row_of_the_proof_is_as_claimed_on_every_rank(n):
    for rows in on_ranks(n, lambda: [*zero.proof(world(), CPU)], timeout=90):
        assert len(rows) == 9
        for row in rows:
            assert row.error == pytest.approx(row.wrong, rel=1e-6, abs=1e-10), row.name
            for measured, formula in filter(None, (row.sent, row.held)):
                assert measured == pytest.approx(formula, abs=0.5), row.name
            assert row.wrong == 0 or row.wrong > 0.01, f"{row.name} would not show"


@question("Q2.2")
def test_one_micro_batch_and_shards_with_replicas():
    def rows():
        for m, stages, unit in (1, STAGES, {}), (3, [(1, "flat"), (3, "flat")], hybrid_unit(4)):
            twin = zero.plain_training(4, m, CPU)
            for stage, layout in stages:
                tensors, optimizer, sent, held = zero.check(
                    stage, m, world(), CPU, layout=layout, **unit
                )
                yield zero.largest_error(tensors, twin) < 1e-10
                yield (round(sent), held) == zero.claimed(optimizer, m)

    assert all(all(found) for found in on_ranks(4, lambda: [*rows()], timeout=60))


@pytest.mark.parametrize("n", [2, 4])
def test_bf16_with_adamw_holds_what_the_table_says_of_each_kind(n):
    def held(stage):
        kind = torch.bfloat16, torch.optim.AdamW
        _, optimizer, _, found = zero.check(stage, 1, world(), CPU, *kind)
        p = sum(len(shard.own) for shard in optimizer.shards)
        P = sum(shape.numel() for shard in optimizer.shards for shape in shard.shapes)
        k = sum(len(shard.params) for shard in optimizer.shards)
        own = sum(piece.tensor.numel() for shard in optimizer.shards for piece in shard.pieces)
        n_of = 1 if stage == 0 else n
        table = [2 * p * (n_of if stage < 3 else 1), 2 * (P if stage < 2 else p + k), 12 * own]
        assert P / n_of <= p < P / n_of + len(optimizer.shards)
        return found == table == zero.claimed(optimizer, 1, (2, 2, 12))[1]

    assert on_ranks(n, lambda: all(held(stage) for stage in range(4))) == [True] * n


@pytest.mark.parametrize("n", [2, 3])
def test_by_hand_the_most_held_is_what_the_stages_say(n):
    """When gradients are reduced, in the second step, with momentum: all of one kind, or of one
    block."""

    def most(stage, most=0):
        model, m = zero.tiny_model(CPU), 3
        blocks = [model.token, *model.blocks, nn.Sequential(model.norm, model.head)]
        shards = [zero.BlockShard(block, world()) for block in blocks]
        for shard in shards if stage == 3 else ():
            shard.free()
        optimizer = torch.optim.SGD([shard.own for shard in shards], **zero.SGD)
        real, storages = zero.BlockShard.reduce, lambda x: x.untyped_storage()

        def reduce(shard):
            nonlocal most
            held = [*model.parameters(), *(shard.own for shard in shards)]
            held += [x.grad for x in held if x.grad is not None]
            held += [x for state in optimizer.state.values() for x in state.values()]
            sizes = {storages(x)._cdata: storages(x).nbytes() for x in held}
            most = max(most, sum(sizes.values()))
            real(shard)

        zero.BlockShard.reduce = reduce
        for _ in range(2):
            batch = zero.proof_batch(n, m, CPU)[rank()]
            zero.step_by_hand(stage, blocks, shards, optimizer, batch, n * m * 8)
        zero.BlockShard.reduce = real
        sizes = [sum(shape.numel() for shape in shard.shapes) for shard in shards]
        rows = [-(-P // n) for P in sizes]
        p, P = sum(rows), sum(sizes)
        reduced = [P if stage == 1 else p + size for size in sizes]
        whole = [n * (row if stage == 3 else p) for row in rows]
        return most == 8 * max(2 * p + g + params for g, params in zip(reduced, whole))

    assert on_ranks(n, lambda: [most(stage) for stage in (1, 2, 3)]) == [[True] * 3] * n


def test_a_hybrid_sends_shards_inside_a_group_and_sums_across():
    """8 ranks, 4 shards, 2 replicas: per group, to the byte, at stage 3 with m = 2."""

    def step():
        shared, replicas = hybrid(8)
        model, (a, b) = zero.tiny_model(CPU), zero.proof_batch(8, 2, CPU)[rank()]
        unit = {"replicate_group": replicas}
        optimizer = zero.sharded(model, 3, shared, torch.optim.SGD, unit=unit)
        zero.backward(model, [a], 8)
        with zero.Ledger() as ledger:
            zero.backward(model, [a, b], 16)
            optimizer.step()
        k = sum(len(shard.params) for shard in optimizer.shards)
        by_group = {shared.group_name: 0, replicas.group_name: 0}
        for event in ledger.events:
            if event.what != "wait":
                by_group[event.group] += event.sent
        return *by_group.values(), sum(len(shard.own) for shard in optimizer.shards), k

    for inside, across, p, k in on_ranks(8, step):
        assert (inside, across) == (3 * 2 * (3 * p + k) * 8, 2 * 2 * (1 / 2) * (p + k) * 8)


class Groups(nn.Module):
    """A bias, a tied pair and a matrix, none of which three ranks divide."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
        self.token = nn.Embedding(11, 7)
        self.head = nn.Linear(7, 11)
        self.head.weight = self.token.weight

    def forward(self, x_bS):
        return self.head(torch.tanh(self.blocks(self.token(x_bS))))


def groups_of(model, **more):
    """Matrices with decay at one rate, the rest without at another."""
    named = list(model.named_parameters())
    matrix = lambda name: "weight" in name
    return [
        {"params": [(k, p) for k, p in named if matrix(k)], "weight_decay": 0.1, **more},
        {"params": [(k, p) for k, p in named if not matrix(k)], "lr": 0.02, **more},
    ]


def train(optimizer, model, share_of, steps, start=0, zero_grad=True):
    """Steps under a scheduler that changes the rate, clipped. Returns norms."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step + start))
    norms = []
    for step in range(start, start + steps):
        x, y = torch.randint(11, (2, 12, 5), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        x, y = share_of(x), share_of(y)
        for k in range(2):
            zero.loss_share(model(x[k::2]), y[k::2], 60).backward()
        if isinstance(optimizer, zero.ZeroOptimizer):
            norms.append(optimizer.clip_grad_norm(0.3).item())
        else:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        optimizer.step()
        schedule.step()
    return norms


def fresh(dtype=torch.float64):
    torch.manual_seed(0)
    return Groups().to(dtype)


def shard_up(model, stage, layout, optimizer_class, kwargs, **more):
    if stage == 3:
        for module in (*model.blocks, model):
            zero.fully_shard(module, world(), layout)
    groups = groups_of(model, group=world())
    return zero.ZeroOptimizer(groups, optimizer_class, stage, bucket_mb=3e-4, **kwargs, **more)


def close(found, wanted):
    return all(zero.relative_error(f, w) < 1e-10 for f, w in zip(found, wanted, strict=True))


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    (torch.optim.AdamW, {"lr": 0.01}),
]


@question("Q2.1")
@question("Q2.2")
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("optimizer_class, kwargs", OPTIMIZERS, ids=["SGD", "AdamW"])
def test_ten_steps_equal_plain_torchs_with_groups_tied_clipped_and_scheduled(
    n, optimizer_class, kwargs
):
    plain = fresh()
    twin = optimizer_class(groups_of(plain), **kwargs)
    norms = train(twin, plain, lambda x: x, 10)

    def steps():
        found = []
        for stage, layout in STAGES:
            model = fresh()
            optimizer = shard_up(model, stage, layout, optimizer_class, kwargs)
            mine = train(optimizer, model, lambda x: x.chunk(n)[rank()], 10)
            with zero.gathered(model), torch.no_grad():
                found.append((mine, close(model.parameters(), plain.parameters())))
        return found

    for found in on_ranks(n, steps, timeout=60):
        assert all(equal and mine == pytest.approx(norms, rel=1e-10) for mine, equal in found)


def test_a_step_takes_a_closure_as_torchs_do():
    def step():
        model = fresh()
        optimizer = shard_up(model, 1, "flat", torch.optim.SGD, {"lr": 1e-3})

        def closure():
            optimizer.zero_grad()
            loss = model(torch.zeros(1, 1, dtype=torch.long)).square().sum()
            loss.backward()
            return loss

        before, loss = closure().item(), optimizer.step(closure).item()
        return before == loss, loss - closure().item()

    assert all(same and fell > 0 for same, fell in on_ranks(2, step))


# ── shards ───────────────────────────────────────────────────────────────────────────────────


@question("Q2.1")
@pytest.mark.parametrize("layout", ["flat", "per_parameter"])
def test_zero_02_shards_hold_each_element_once_for_every_numel_and_number_of_ranks(
    layout, monkeypatch
):
    monkeypatch.setattr(dist, "get_world_size", lambda group: group[0])
    monkeypatch.setattr(dist, "get_rank", lambda group: group[1])
    for n in range(1, 9):
        for numel in range(1, 65):
            shapes = [(numel,), (numel, 3), (), (1, 2, 2)]
            tensors = [torch.randn(shape) for shape in shapes]
            times = [torch.zeros(x.numel()) for x in tensors]
            for r in range(n):
                params = [nn.Parameter(x.clone()) for x in tensors]
                shard = zero.Shard(params, (n, r), layout=layout)
                for piece in shard.pieces:
                    i = next(i for i, p in enumerate(params) if p is piece.param)
                    times[i][piece.start : piece.stop] += 1
                    part = tensors[i].flatten()[piece.start : piece.stop]
                    assert torch.equal(shard.own[piece.where], part)
                rows = shard.pack(tensors)
                assert rows.shape == (n, len(shard.own))
                assert all(map(torch.equal, shard.unpack(rows), tensors))
                if layout == "flat":
                    assert rows.numel() - sum(map(torch.numel, tensors)) == -(numel * 4 + 5) % n
            assert all(torch.equal(x, torch.ones_like(x)) for x in times)


@question("Q2.1")
def test_zero_02_padding_is_the_complement_and_reaches_nothing():
    def step(numel):
        n, param = dist.get_world_size(), nn.Parameter(torch.arange(1.0, numel + 1))
        plain = nn.Parameter(param.detach().clone())
        groups = [{"params": [param], "group": world()}]
        optimizer = zero.ZeroOptimizer(groups, torch.optim.AdamW, stage=2, lr=0.1)
        twin = torch.optim.AdamW([plain], lr=0.1)
        for x in (param, plain):
            (x.square().sum() / (n if x is param else 1)).backward()
        (shard,) = optimizer.shards
        pad = -numel % n
        padding = torch.ones(len(shard.own), dtype=bool)
        for piece in shard.pieces:
            padding[piece.where] = False
        shard.grad[padding] = shard.own[padding] = torch.nan
        norm = optimizer.grad_norm_sq().sum().sqrt().item()
        optimizer.step()
        twin.step()
        saved = optimizer.state_dict()["state"][0]["exp_avg"]
        alike = torch.allclose(param, plain, rtol=1e-6) and saved.shape == param.shape
        return shard.rows.numel() - numel == pad, norm - plain.grad.norm().item(), alike

    for n, numels in ((8, (19, 1, 5)), (2, (57,)), (3, (7,))):
        for found in on_ranks(n, lambda: [step(numel) for numel in numels]):
            assert all(padded and abs(gap) < 1e-4 and alike for padded, gap, alike in found)


def test_a_state_dict_is_plain_torchs_and_loads_into_any_stage_and_number_of_ranks():
    cls, kwargs = OPTIMIZERS[1]
    plain = fresh()
    twin = cls(groups_of(plain), **kwargs)
    train(twin, plain, lambda x: x, 3)
    wanted, middle = twin.state_dict(), {k: v.clone() for k, v in plain.state_dict().items()}

    def save(stage, layout):
        model = fresh()
        optimizer = shard_up(model, stage, layout, cls, kwargs)
        train(optimizer, model, lambda x: x.chunk(4)[rank()], 3)
        with zero.gathered(model):
            weights = {k: v.detach().clone() for k, v in model.state_dict().items()}
        return weights, optimizer.state_dict()

    def at_its_first_rate(optimizer):
        for group in optimizer.param_groups:
            group.pop("initial_lr")
            group["lr"] = 0.02 if group["weight_decay"] != 0.1 else 0.01

    def go_on(stage, layout, weights, saved):
        model = fresh()
        optimizer = shard_up(model, stage, layout, cls, kwargs)
        with zero.gathered(model):
            model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        at_its_first_rate(optimizer)
        train(optimizer, model, lambda x: x.chunk(3)[rank()], 3, start=3)
        with zero.gathered(model), torch.no_grad():
            return [param.clone() for param in model.parameters()]

    all_saved = on_ranks(4, lambda: [save(*stage) for stage in STAGES])[-1]
    for _, saved in all_saved:
        assert saved["state"].keys() == wanted["state"].keys()
        for i, state in wanted["state"].items():
            assert saved["state"][i].keys() == state.keys()
            assert all(close([saved["state"][i][k]], [x]) for k, x in state.items())
        for mine, theirs in zip(saved["param_groups"], wanted["param_groups"]):
            theirs = {key: value for key, value in theirs.items() if key != "param_names"}
            assert mine == theirs
    twin.load_state_dict(copy.deepcopy(all_saved[1][1]))  # the plain optimizer takes it
    plain.load_state_dict(middle)
    at_its_first_rate(twin)
    train(twin, plain, lambda x: x, 3, start=3)
    every = lambda: [go_on(*to, *copy.deepcopy(each)) for each in all_saved for to in STAGES]
    for by_pair in on_ranks(3, every):
        assert len(by_pair) == 25
        for found in by_pair:
            assert close(found, [p.detach() for p in plain.parameters()])


def test_local_state_names_every_element_of_every_parameter_once():
    def state(layout):
        model = fresh()
        optimizer = shard_up(model, 3, layout, torch.optim.AdamW, {})
        train(optimizer, model, lambda x: x.chunk(3)[rank()], 1)
        found = []
        for name, (start, stop), tensors in optimizer.local_state():
            assert tensors["param"].shape == tensors["exp_avg"].shape == (stop - start,)
            found.append((name, start, stop, tensors["param"].clone()))
        with zero.gathered(model):
            return found, {k: p.detach().clone() for k, p in model.named_parameters()}

    for layout in ("flat", "per_parameter"):
        whole, times = None, {}
        for found, whole in on_ranks(3, state, layout):
            for name, start, stop, part in found:
                seen = times.setdefault(name, torch.zeros(whole[name].numel()))
                seen[start:stop] += 1
                assert torch.equal(part, whole[name].flatten()[start:stop])
        assert times.keys() == whole.keys()
        assert all(torch.equal(x, torch.ones_like(x)) for x in times.values())


# ── reported faults ──────────────────────────────────────────────────────────────────────────


@question("Q2.3")
@pytest.mark.parametrize("stage, layout", STAGES)
def test_zero_01_micro_batches_of_1_2_and_4_make_7(stage, layout):
    def step():
        model = nn.Linear(3, 1, bias=False)
        if stage == 3:
            zero.fully_shard(model, world(), layout)
        groups = [{"params": list(model.parameters()), "group": world()}]
        optimizer = zero.ZeroOptimizer(groups, torch.optim.SGD, stage, lr=1.0)
        for gradient in (1.0, 2.0, 4.0):
            model(torch.full((1, 3), gradient / 2)).sum().backward()
        optimizer.finish_reduce()
        (shard,) = optimizer.shards
        return [shard.grad[piece.where].tolist() for piece in shard.pieces]

    for r, found in enumerate(on_ranks(2, step)):
        whole = [7.0, 7.0, 7.0]
        cut = {"flat": [whole[:2], whole[2:]], "per_parameter": [whole, None]}[layout]
        assert found == ([whole] if stage == 0 else [cut[r]] if cut[r] else [])


@question("Q2.2")
def test_zero_04_the_norm_is_of_the_whole_gradient_and_replicas_count_once():
    def step():
        one, two = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(4))
        alone, _ = dist.new_subgroups(1)
        groups = [
            {"params": [one], "group": world()},
            {"params": [two], "group": alone, "replicate_group": world()},
        ]
        optimizer = zero.ZeroOptimizer(groups, torch.optim.SGD, stage=2, lr=1.0)
        ((one.flatten() * torch.tensor([3.0, 0, 0, 4])).sum() / 2 + (two * 3.0).sum()).backward()
        by_group = optimizer.grad_norm_sq().sqrt().tolist()
        norm = optimizer.clip_grad_norm(1.0).item()
        optimizer.step()
        return by_group, norm, one.flatten().tolist(), two.tolist()

    def check(found):
        by_group, norm, one, two = found
        assert by_group == [5, 12] and norm == 13
        assert one == pytest.approx([1 - 3 / 13, 1, 1, 1 - 4 / 13])
        assert two == pytest.approx([1 - 6 / 13] * 4)

    for found in on_ranks(2, step):
        check(found)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_06_a_frozen_weight_beside_a_trained_bias_stays_as_it_is(stage):
    def steps():
        torch.manual_seed(0)
        model, plain = nn.Linear(5, 5), nn.Linear(5, 5)
        plain.load_state_dict(model.state_dict())
        for module in (model, plain):
            module.weight.requires_grad_(False)
        before = model.weight.detach().clone()
        given = dict(lr=0.1, weight_decay=0.1)
        if stage == 3:
            zero.fully_shard(model, world(), "per_parameter")
        groups = [{"params": list(model.parameters()), "group": world()}]
        optimizer = zero.ZeroOptimizer(groups, torch.optim.AdamW, stage, **given)
        twin = torch.optim.AdamW(plain.parameters(), **given)
        for step in range(5):
            x = torch.randn(2, 5, generator=torch.Generator().manual_seed(step))
            for o, module, part in ((optimizer, model, x[rank()]), (twin, plain, x)):
                o.zero_grad()
                module(part).square().sum().backward()
                o.step()
        states = list(optimizer.state_dict()["state"])
        with zero.gathered(model):
            return (
                torch.equal(model.weight, before), states,
                torch.allclose(model.bias, plain.bias, rtol=1e-5),
            )  # fmt: skip

    assert on_ranks(2, steps) == [(True, [1], True)] * 2


@pytest.mark.parametrize("layout", ["flat", "per_parameter"])
def test_a_unit_holds_two_dtypes_one_collective_each(layout):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.bfloat16)

        def forward(self, x):
            return self.b(self.a(x).bfloat16())

    def step():
        torch.manual_seed(0)
        model, plain = Both(), Both()
        plain.load_state_dict(model.state_dict())
        zero.fully_shard(model, world(), layout)
        groups = [{"params": list(model.parameters()), "group": world()}]
        optimizer = zero.ZeroOptimizer(groups, torch.optim.SGD, stage=3, lr=0.1)
        x = torch.ones(1, 3)
        with zero.Ledger() as ledger:
            (model(x).sum() / 2).backward()
        plain(x).sum().backward()
        found = zero.whole_gradients(model, optimizer)
        calls = [event.what for event in ledger.events].count("all_gather_single")
        wanted = [p.grad for p in plain.parameters()]
        return calls, all(torch.equal(f, w) for f, w in zip(found, wanted))

    # once to compare, once each dtype, forward and backward
    assert on_ranks(2, step) == [(6, True)] * 2


def test_zero_08_small_gradients_survive_a_sum_in_the_reduce_dtype():
    def step(stage, reduce_dtype):
        found = []
        for large in range(8):
            model = nn.Linear(8, 1, bias=False, dtype=torch.bfloat16)
            unit = {"reduce_dtype": reduce_dtype}
            if stage == 3:
                zero.fully_shard(model, world(), **unit)
                unit = {}
            groups = [{"params": list(model.parameters()), "group": world()}]
            optimizer = zero.ZeroOptimizer(groups, torch.optim.SGD, stage, lr=1.0, **unit)
            x = torch.full((1, 8), 1.0 if rank() == large else 2**-8, dtype=torch.bfloat16)
            model(x).sum().backward()
            optimizer.finish_reduce()
            found.append((optimizer.shards[0].grad.dtype, optimizer.shards[0].grad.item()))
        return found

    def steps():
        dtypes = torch.float32, None
        return [[step(stage, dtype) for dtype in dtypes] for stage in (1, 2, 3)]

    for by_stage in on_ranks(8, steps):
        for in_fp32, in_bf16 in by_stage:
            assert in_fp32 == [(torch.float32, 1.02734375)] * 8
            assert in_bf16 == [(torch.bfloat16, 1.03125)] * 8  # the local sum rounds once


class Branch(nn.Module):
    """Calls its blocks in the order of names that it is given."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

    def forward(self, x, path):
        for name in path:
            x = getattr(self, name)(x)
        return x


@pytest.mark.parametrize("first, second, says", [
    (("ab", "ab"), ("ab", "aab"), "rank 1: forward entered a, expected b"),
    (("ab", "ab"), ("ab", "ba"), "rank 1: forward entered a, expected nothing more"),
    (("ab", "aab"), None, "ranks disagree .* rank 0 at forward of b, rank 1 at forward of a"),
    (("ab", "a"), None, "rank 0 at forward of b, rank 1 at backward of"),
])  # fmt: skip
def test_zero_09_a_branch_that_one_rank_takes_is_an_error_with_names(first, second, says):
    def steps():
        model = Branch()
        for module in (model.a, model.b, model):
            zero.fully_shard(module, world())
        for path in filter(None, (first, second)):
            model(torch.ones(1, 3), path[rank()]).sum().backward()

    with pytest.raises(RankFailed, match=says):
        on_ranks(2, steps, timeout=10)


# ── order ────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def watching(shards):
    """A list that grows by the bytes gathered of each shard whenever one comes or goes."""
    seen, nbytes = [], lambda x: x.untyped_storage().nbytes()

    def look(real):
        def call(shard):
            real(shard)
            tensors = [{x.untyped_storage()._cdata: x for x in (each.rows, *each.full)}
                       for each in shards]  # fmt: skip
            seen.append([sum(map(nbytes, each.values())) for each in tensors])

        return call

    watched = {name: look(getattr(zero.Shard, name)) for name in ("gather", "wait", "free")}
    with patch.multiple(zero.Shard, **watched):
        yield seen


def orders():
    """Events of a step, in order: of stage 2's backward, and of stage 3's forward in its second
    pass; "gradient" and "compute" are marked. And the most bytes stage 3 gathered in the step, with
    the formula: the root unit and two blocks."""
    n = dist.get_world_size()
    ((x_bS, y_bS),) = zero.proof_batch(n, 1, CPU)[rank()]
    model = zero.tiny_model(CPU)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: ledger.mark("gradient"))
    zero.sharded(model, 2, world(), bucket_mb=0.005)
    with zero.Ledger() as ledger:
        zero.backward(model, [(x_bS, y_bS)], 8)
    stage_2 = [event.what for event in ledger.events]

    model = zero.tiny_model(CPU)
    optimizer = zero.sharded(model, 3, world())
    for block in model.blocks:
        block.up.register_forward_pre_hook(lambda *_: ledger.mark("compute"))
    zero.backward(model, [(x_bS, y_bS)], 8)
    with zero.Ledger() as ledger, watching(optimizer.shards) as seen:
        share = zero.loss_share(model(x_bS), y_bS, 8)
        stage_3 = [event.what for event in ledger.events]
        share.backward()
    whole = [8 * n * len(unit.shards[0].own) for unit in model.zero_unit.window.units]
    return stage_2, stage_3, (max(map(sum, seen)), whole[0] + 2 * max(whole[1:]))


def in_flight(events, start, mark):
    """How many of `mark` stand between each call of `start` and its wait; calls land in order."""
    calls, waits = ([i for i, what in enumerate(events) if what == x] for x in (start, "wait"))
    return [events[i:j].count(mark) for i, j in zip(calls, waits, strict=True)]


@question("Q2.4")
@question("Q2.5")
@pytest.mark.parametrize("n", [2, 4])
def test_a_bucket_and_a_gather_fly_while_others_compute_and_the_window_is_two_blocks(n):
    for stage_2, stage_3, (most, formula) in on_ranks(n, orders):
        reduced = in_flight(stage_2, "all_to_all_single", "gradient")
        assert len(reduced) > 3 and min(reduced[:-1]) > 0
        assert in_flight(stage_3, "all_gather_single", "compute") == [0, 0, 1, 1, 1]
        assert most == formula


@question("Q2.5")
@pytest.mark.parametrize("layout", ["flat", "per_parameter"])
def test_backward_prefetches_too_and_not_if_told_not_to(layout):
    def gathers_before_first_gradient_of_each_block(prefetch):
        model, micro_batch = zero.tiny_model(CPU), zero.proof_batch(2, 1, CPU)[rank()]
        unit = {"prefetch": prefetch, "layout": layout}
        optimizer = zero.sharded(model, 3, world(), unit=unit)
        zero.backward(model, micro_batch, 8)
        ((x, y),) = micro_batch
        share = zero.loss_share(model(x), y, 8)
        seen = []
        with zero.Ledger() as ledger, watching(optimizer.shards) as window:
            for block in model.blocks:
                gathers = lambda: [e.what for e in ledger.events].count("all_gather_single")
                block.down.bias.register_hook(lambda _: seen.append(gathers()))
            share.backward()
        unit_bytes = [8 * 2 * len(unit.shards[0].own) for unit in model.zero_unit.window.units]
        most = max(map(sum, window))
        return seen, most <= unit_bytes[0] + 2 * max(unit_bytes[1:]), window[-1]

    for seen, fits, left in on_ranks(2, gathers_before_first_gradient_of_each_block, True):
        assert seen == [3, 4, 5, 5] and fits and left == [0] * 5
    for seen, fits, left in on_ranks(2, gathers_before_first_gradient_of_each_block, False):
        assert seen == [2, 3, 4, 5] and fits and left == [0] * 5


@question("Q2.4")
@pytest.mark.parametrize("bucket_mb", [1e-6, 1])
def test_shards_leave_whole_and_in_one_order_whatever_order_their_gradients_arrive_in(bucket_mb):
    def step():
        torch.manual_seed(0)
        model = Branch().double()
        groups = [{"params": list(model.parameters()), "group": world()}]
        optimizer = zero.ZeroOptimizer(groups, torch.optim.SGD, 2, bucket_mb=bucket_mb, lr=1.0)
        x = torch.full((1, 3), rank() + 1.0, dtype=torch.float64)
        if rank():
            y = model.a(x).sum() + 10 * model.b(x).sum()  # b's gradient comes first
        else:
            y = 10 * model.b(x).sum() + model.a(x).sum()
        with zero.Ledger() as ledger:
            y.backward()
            ledger.mark("backward is over")
            found = [g[0, 0].item() for g in zero.whole_gradients(model, optimizer)]
        calls = [event.what for event in ledger.events]
        in_backward = calls[: calls.index("backward is over")].count("all_to_all_single")
        total, shards = calls.count("all_to_all_single"), len(optimizer.shards)
        return found, in_backward - shards, total - shards

    assert on_ranks(2, step) == [([3, 30], 0, 0)] * 2


@question("Q2.4")
def test_one_gradient_lets_every_bucket_leave_that_waited_for_it():
    """Gradients come in the order 2, 1, 0. If bucket 1 is the first, two leave before 0 comes."""

    def step(order):
        model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3))).double()
        params = [model[i].weight for i in order]
        groups = [{"params": params, "group": world()}]
        zero.ZeroOptimizer(groups, torch.optim.SGD, 2, bucket_mb=1e-6, lr=1.0)
        with zero.Ledger() as ledger:
            model[0].weight.register_hook(lambda _: ledger.mark("the last gradient"))
            model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        calls = [event.what for event in ledger.events]
        return calls[: calls.index("the last gradient")].count("all_to_all_single")

    orders = [1, 2, 0], [0, 2, 1]  # one of them is the order of the buckets
    for early in on_ranks(2, lambda: sorted(map(step, orders))):
        assert early == [0, 2]


@pytest.mark.parametrize("stage, layout", STAGES)
def test_a_parameter_that_a_rank_does_not_use_counts_as_zero_there(stage, layout):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(2)])

        def forward(self, x):
            return x @ self.blocks[rank()].weight

    def step():
        model = Half().double()
        if stage == 3:
            zero.fully_shard(model, world(), layout)
        groups = [{"params": list(model.parameters()), "group": world()}]
        optimizer = zero.ZeroOptimizer(groups, torch.optim.SGD, stage, lr=1.0)
        for _ in range(2):
            model(torch.full((1, 3), rank() + 1.0).double()).sum().backward()
        optimizer.finish_reduce()
        return [g[0, 0].item() for g in zero.whole_gradients(model, optimizer)]

    assert on_ranks(2, step) == [[2, 4]] * 2


def same_gradients(build, call, layout="flat"):
    """Do the gradients of a module whose children are units equal its own, unsharded, twice?"""

    def step():
        torch.manual_seed(0)
        model, plain = build().double(), build().double()
        plain.load_state_dict(model.state_dict())
        for module in (*model.children(), model):
            zero.fully_shard(module, world(), layout)
        groups = [{"params": list(model.parameters()), "group": world()}]
        optimizer = zero.ZeroOptimizer(groups, torch.optim.SGD, 3, lr=1.0)
        x = torch.randn(2, 3).double()
        for _ in range(2):
            optimizer.zero_grad()
            with watching(optimizer.shards) as seen:
                call(model, x[[rank()]]).square().sum().backward()
            assert not any(seen[-1])
        call(plain, x).square().sum().backward()
        wanted = [p.grad for p in plain.parameters() if p.requires_grad]
        return close(zero.whole_gradients(model, optimizer), wanted)

    assert all(on_ranks(2, step))


@pytest.mark.parametrize("layout", ["flat", "per_parameter"])
@pytest.mark.parametrize("path", ["ab", "aab", "aba", "abba"])
def test_a_unit_may_be_called_again_if_every_rank_does(path, layout):
    same_gradients(Branch, lambda model, x: model(x, path), layout)


def test_a_unit_on_two_branches_is_there_for_both():
    class Fork(Branch):
        def forward(self, x):
            return self.a(x) + self.b(self.a(x.sin())) + self.b(x)

    same_gradients(Fork, lambda model, x: model(x))


def test_a_checkpointed_unit_is_there_for_its_second_forward():
    class Recomputed(Branch):
        def forward(self, x, path):
            for name in path:
                x = checkpoint(getattr(self, name), x, use_reentrant=False).tanh()
            return x

    same_gradients(Recomputed, lambda model, x: model(x.requires_grad_(), "ab"))


def test_frozen_units_pass_a_gradient_on_and_leave_the_window():
    def build():
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(6)))
        for module in model[1:5]:
            module.requires_grad_(False)
        return model

    same_gradients(build, lambda model, x: model(x))

    def peak():
        model = build()
        for module in (*model, model):
            zero.fully_shard(module, world())
        units = model.zero_unit.window.units
        shards = [shard for unit in units for shard in unit.shards]
        for _ in range(2):
            with watching(shards) as seen:
                model(torch.ones(1, 3)).sum().backward()
        return max(sum(size > 0 for size in now) for now in seen)

    assert on_ranks(2, peak) == [2, 2]


def test_nothing_is_gathered_outside_a_step_nor_kept_after_evaluation():
    def held():
        model = zero.tiny_model(CPU)
        optimizer = zero.sharded(model, 3, world())
        with torch.no_grad():
            model(torch.zeros(1, 4, dtype=torch.long))
        sizes = {param.numel() for param in model.parameters()}
        return sizes, zero.bytes_held(optimizer)[0], zero.claimed(optimizer, 1)[1][0]

    for sizes, found, claimed in on_ranks(2, held):
        assert sizes == {0} and found == claimed


# ── precision, refusals ──────────────────────────────────────────────────────────────────────


def test_parameters_are_gathered_in_one_dtype_summed_in_another_and_kept_in_a_third():
    def step():
        model = zero.tiny_model(CPU, torch.float32)
        before = [param.detach().clone() for param in model.parameters()]
        unit = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        optimizer = zero.sharded(model, 3, world(), torch.optim.SGD, unit=unit, lr=0.0)
        zero.backward(model, zero.proof_batch(2, 1, CPU)[rank()], 16)
        with zero.Ledger() as ledger:
            zero.backward(model, zero.proof_batch(2, 1, CPU)[rank()], 16)
        s = sum(len(shard.own) for shard in optimizer.shards)
        k = sum(len(shard.params) for shard in optimizer.shards)
        sent = ledger.sent["all_gather_single"] / s, ledger.sent["all_to_all_single"] / (s + k)
        dtypes = {(shard.own.dtype, shard.grad.dtype) for shard in optimizer.shards}
        with zero.gathered(model):
            kept = all(map(torch.equal, model.parameters(), before))
        return sent, dtypes, kept, zero.bytes_held(optimizer), s, k

    for sent, dtypes, kept, held, s, k in on_ranks(2, step):
        assert sent == (2 * 2, 4) and dtypes == {(torch.float32, torch.float32)} and kept
        assert held == [4 * s, 4 * (s + k), 0]


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "LBFGS", "SparseAdam"])
def test_an_optimizer_that_needs_whole_tensors_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} needs whole tensors"):
        optimizer_of(Vectors(), 1, getattr(torch.optim, name))


@pytest.mark.parametrize("name", zero.ELEMENT_WISE)
def test_an_element_wise_optimizer_steps_shards_as_the_whole_and_saves_its_state(name):
    def step():
        kind, model, plain = getattr(torch.optim, name), Vectors(), Vectors()
        twin = kind(plain.parameters(), lr=0.1)
        optimizer = optimizer_of(model, 2, kind, lr=0.1)
        for _ in range(2):
            for o, module in (optimizer, model), (twin, plain):
                o.zero_grad()
                (module(0.5) if module is model else module()).backward()
                o.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        found, wanted = optimizer.state_dict()["state"], twin.state_dict()["state"]
        for i, state in wanted.items():
            state = {k: torch.as_tensor(x) for k, x in state.items() if x is not None}
            assert found.get(i, {}).keys() == state.keys()
            assert close([found[i][k] for k in state], state.values()) if state else True
        return close(model.parameters(), plain.parameters())

    assert on_ranks(2, step) == [True] * 2


def test_wrong_use_is_a_sentence():
    def build():
        says = lambda text: pytest.raises(ValueError, match=text)
        make = lambda groups, stage: zero.ZeroOptimizer(groups, torch.optim.SGD, stage, lr=0.1)
        model = Branch()
        named = list(model.named_parameters())
        with says('each parameter group needs a "group"'):
            make([{"params": named}], 1)
        with says("stage 3: call fully_shard on what holds a.weight"):
            make([{"params": named, "group": world()}], 3)
        with says("stage 0 has no shards to replicate"):
            make([{"params": named, "group": world(), "replicate_group": world()}], 0)
        with says("layout 'rows': use 'flat' or 'per_parameter'"):
            zero.fully_shard(model, world(), layout="rows")
        zero.fully_shard(model.a, world())
        with says("a.weight is sharded already"):
            make([{"params": named, "group": world()}], 1)
        tied = nn.Linear(3, 3, bias=False)
        tied.weight = model.a.weight
        with says("weight belongs to another unit too"):
            zero.fully_shard(tied, world())

    on_ranks(1, build)


# ── what may happen to a run, and what it takes up again ─────────────────────────────────────


def test_the_norm_of_each_parameter_group_is_plain_torchs():
    plain = fresh()
    batch = torch.randint(11, (2, 4, 5), generator=torch.Generator().manual_seed(0))
    zero.loss_share(plain(batch[0]), batch[1], 20).backward()
    of = lambda group: sum(p.grad.square().sum().item() for _, p in group["params"])
    wanted = [of(group) for group in groups_of(plain)]

    def norms(stage, layout):
        model = fresh()
        optimizer = shard_up(model, stage, layout, torch.optim.SGD, {"lr": 0.1})
        x, y = (x.chunk(2)[rank()] for x in batch)
        zero.loss_share(model(x), y, 20).backward()
        return optimizer.grad_norm_sq().tolist()

    for found in on_ranks(2, lambda: [norms(*stage) for stage in STAGES]):
        assert all(x == pytest.approx(wanted, rel=1e-10) for x in found)


def test_the_next_bucket_leaves_before_the_last_one_is_waited_for():
    for stage_2, *_ in on_ranks(2, orders):
        found = [what for what in stage_2 if what != "gradient"]
        send, k = "all_to_all_single", found.count("wait")
        assert found == [send, *[send, "wait"] * (k - 1), "wait"]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_taken_up_from_its_checkpoint_goes_on_bit_by_bit(stage, dtype):
    def steps():
        model, batch = zero.tiny_model(CPU, dtype), zero.proof_batch(2, 1, CPU)[rank()]
        optimizer = zero.sharded(model, stage, world(), bucket_mb=0.002, lr=1e-4)

        def go_on():
            for _ in range(3):
                zero.train_step(model, optimizer, batch, 16)
            with zero.gathered(model):
                return {k: v.detach().clone() for k, v in model.state_dict().items()}

        weights, saved = go_on(), copy.deepcopy(optimizer.state_dict())
        wanted = go_on()
        with zero.gathered(model):
            model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        return all(torch.equal(x, wanted[k]) for k, x in go_on().items())

    assert on_ranks(2, steps) == [True] * 2


@pytest.mark.parametrize("which", ["param_dtype", "reduce_dtype"])
def test_small_gradients_add_up_in_the_shards_dtype(which):
    def step(unit):
        model = nn.Linear(8, 1, bias=False)
        zero.fully_shard(model, world(), **unit)
        groups = [{"params": list(model.parameters()), "group": world()}]
        optimizer = zero.ZeroOptimizer(groups, torch.optim.SGD, 3, lr=1.0)
        for gradient in (1.0, *[2**-9] * 8):
            model(torch.full((1, 8), gradient / 2, dtype=unit.get("param_dtype"))).sum().backward()
        return optimizer.shards[0].grad.tolist()

    assert on_ranks(2, step, {which: torch.bfloat16}) == [[1 + 2**-6] * 4] * 2


def test_the_norm_of_16_bit_gradients_is_not_rounded_to_16_bits():
    def norm():
        param = nn.Parameter(torch.ones(2200, dtype=torch.bfloat16))
        groups = [{"params": [param], "group": world()}]
        optimizer = zero.ZeroOptimizer(groups, torch.optim.SGD, 2, lr=1.0)
        (param.sum() / 2).backward()
        return optimizer.grad_norm_sq().item()

    assert on_ranks(2, norm) == [pytest.approx(2200)] * 2


def test_no_gradient_outlives_zero_grad():
    def left():
        model = zero.tiny_model(CPU)
        optimizer = zero.sharded(model, 2, world())
        zero.train_step(model, optimizer, zero.proof_batch(2, 1, CPU)[rank()], 16)
        return [p.tensor.grad for shard in optimizer.shards for p in shard.pieces]

    assert not any(x is not None for held in on_ranks(2, left) for x in held)


def test_a_state_dict_is_a_copy():
    def step():
        model = zero.tiny_model(CPU)
        optimizer = zero.sharded(model, 1, world(), lr=0.1)
        batch = zero.proof_batch(2, 1, CPU)[rank()]
        zero.train_step(model, optimizer, batch, 16)
        state = optimizer.state_dict()["state"]
        tensors = [x for each in state.values() for x in each.values()]
        return all(x.untyped_storage().nbytes() == x.nbytes for x in tensors)

    assert on_ranks(2, step) == [True] * 2


class Fails(nn.Module):
    """Two blocks, and an exception where it is asked for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))).double()
        self.scale = nn.Parameter(torch.ones(3).double())

    def forward(self, x, where=None):
        x = x * self.scale
        for i, block in enumerate(self.blocks):
            x = block(x)
            if (where, i) == ("forward", 1):
                raise KeyError(where)
            if (where, i) == ("backward", 1):
                x.register_hook(lambda _: {}[where])
        return x.square().sum()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("stage, layout", STAGES)
def test_a_run_goes_on_after_an_exception(where, first, stage, layout):
    def fail(model, x):
        with contextlib.suppress(KeyError):
            model(x, where).backward()

    def steps():
        model, plain = Fails(), Fails()
        for module in (*model.blocks, model) if stage == 3 else ():
            zero.fully_shard(module, world(), layout)
        given = [{"params": list(model.parameters()), "group": world()}]
        sgd = torch.optim.SGD
        pairs = (zero.ZeroOptimizer(given, sgd, stage, bucket_mb=1e-5, lr=0.1), model), (
            sgd(plain.parameters(), lr=0.1), plain)  # fmt: skip
        for step in range(3):
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(step)).double()
            for optimizer, module in pairs:
                mine = x[[rank()]] if module is model else x
                if first and not step or where == "backward":
                    fail(module, mine)
                optimizer.zero_grad()
                module(mine).backward()
                if where == "forward":
                    fail(module, mine)
                optimizer.step()
        with zero.gathered(model), torch.no_grad():
            return close(model.parameters(), plain.parameters())

    assert on_ranks(2, steps, timeout=10) == [True] * 2


@pytest.mark.parametrize("optimizer_class, options", [
    (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {"amsgrad": True}),
])  # fmt: skip
def test_state_that_one_parameter_group_alone_has(optimizer_class, options):
    def groups(model):
        one, two = groups_of(model)
        return [{**one, **options}, two]

    def steps(optimizer, model):
        train(optimizer, model, lambda x: x, 2)
        return optimizer.state_dict()["state"]

    plain = fresh()
    wanted = steps(optimizer_class(groups(plain), lr=0.1), plain)

    def sharded():
        model = fresh()
        given = [{**each, "group": world()} for each in groups(model)]
        optimizer = zero.ZeroOptimizer(given, optimizer_class, 2, lr=0.1)
        train(optimizer, model, lambda x: x.chunk(2)[rank()], 2)
        state = optimizer.state_dict()
        optimizer.load_state_dict(copy.deepcopy(state))
        optimizer.step()
        return state["state"]

    for found in on_ranks(2, sharded):
        for i, state in wanted.items():
            state = {k: v for k, v in state.items() if v is not None}
            assert found.get(i, {}).keys() == state.keys()
            assert all(close([found[i][k]], [x]) for k, x in state.items())


@pytest.mark.parametrize("stage, layout", STAGES)
def test_weights_written_after_the_optimizer_was_built_are_kept_in_16_bits(stage, layout):
    def step():
        model = zero.tiny_model(CPU, torch.bfloat16)
        unit = {"layout": layout} if stage == 3 else {}
        optimizer = zero.sharded(model, stage, world(), torch.optim.SGD, unit=unit, lr=0.0)
        with zero.gathered(model), torch.no_grad():
            for param in model.parameters():
                param.fill_(0.5)
        zero.train_step(model, optimizer, zero.proof_batch(2, 1, CPU)[rank()], 16)
        with zero.gathered(model):
            return all((param == 0.5).all().item() for param in model.parameters())

    assert on_ranks(2, step) == [True] * 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_one_checkpoint_around_two_units(reentrant):
    class Segment(Branch):
        def forward(self, x, path):
            both = lambda x: self.b(self.a(x).tanh()).tanh()
            return checkpoint(both, x, use_reentrant=reentrant)

    same_gradients(Segment, lambda model, x: model(x.requires_grad_(), "ab"))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_dtypes_are_two_buckets(stage):
    def step():
        params = [nn.Parameter(torch.full((3,), 257.0)), nn.Parameter(torch.ones(3).bfloat16())]
        groups = [{"params": params, "group": world()}]
        optimizer = zero.ZeroOptimizer(groups, torch.optim.SGD, stage, lr=0.5)
        (params[0].sum() + params[1].sum()).backward()
        optimizer.step()
        return [(param.dtype, param.tolist()) for param in params]

    wanted = [(torch.float32, [256.0] * 3), (torch.bfloat16, [0.0] * 3)]
    assert on_ranks(2, step) == [wanted] * 2


def test_a_state_dict_from_before_the_first_step_is_empty_and_loads():
    def save():
        optimizer = shard_up(fresh(), 1, "flat", torch.optim.AdamW, {})
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        return saved["state"]

    assert on_ranks(2, save) == [{}] * 2


# ── the run's own loop, beside plain torch ───────────────────────────────────────────────────


SMALL = dict(batch=8, micro_batches=2, steps=6, text=None)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_runs_own_loop_equals_a_plain_loop_on_the_same_batches(n):
    twin_class = zero.LanguageModel
    torch.manual_seed(0)
    plain, text = twin_class(D=12, layers=2).double(), zero.read_text(None, 65)
    adamw = torch.optim.AdamW(plain.parameters(), lr=3e-3)
    losses = []
    for step in range(6):
        x, y = zero.sample(text, step, 8, 64)
        assert len(y.unique()) > 10
        adamw.zero_grad()
        loss = nn.functional.cross_entropy(plain(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adamw.step()
        losses.append(loss.item())

    def run(stage):
        zero.LanguageModel = lambda: twin_class(D=12, layers=2).double()  # drawn as the twin's
        args = argparse.Namespace(**SMALL, stage=stage)
        steps = [*zero.training(args, world(), CPU)]
        model, found = steps[-1][0], [loss.item() for _, loss, *_ in steps]
        with zero.gathered(model), torch.no_grad():
            return found, close(model.parameters(), plain.parameters())

    for by_stage in on_ranks(n, lambda: [run(stage) for stage in range(4)], timeout=60):
        for found, equal in by_stage:
            assert equal and found == pytest.approx(losses, rel=1e-10)


def test_a_step_without_labels_is_skipped_and_its_loss_is_zero():
    def step():
        model = zero.tiny_model(CPU)
        optimizer = zero.sharded(model, 1, world(), lr=0.1)
        before = [param.detach().clone() for param in model.parameters()]
        x, y = torch.ones(1, 8).long(), torch.full((1, 8), -100)
        loss, norm, *_ = zero.train_step(model, optimizer, [(x, y)], 0, clip=1.0)
        return loss.item(), norm.item(), all(map(torch.equal, before, model.parameters()))

    assert on_ranks(2, step) == [(0.0, 0.0, True)] * 2


def test_the_loss_of_16_bit_logits_is_computed_in_32_bits():
    logits, y = torch.randn(2, 3, 50).bfloat16(), torch.arange(6).view(2, 3)
    wanted = nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())
    found = zero.loss_share(logits, y, 6)
    assert found.dtype == torch.float32 and found.item() == pytest.approx(wanted.item(), rel=1e-6)


# ── nothing in silence ───────────────────────────────────────────────────────────────────────


class Vectors(nn.Module):
    """Two vectors and their weighted sum: a's gradient is w, b's is 10 w."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(2, dtype=dtype)) for _ in range(2))

    def forward(self, w=1.0):
        return (self.a * w).sum() + (self.b * w * 10).sum()


def optimizer_of(model, stage, optimizer_class=torch.optim.SGD, unit=None, **options):
    if stage == 3:
        zero.fully_shard(model, world(), **(unit or {}))
    groups = [{"params": list(model.named_parameters()), "group": world()}]
    return zero.ZeroOptimizer(groups, optimizer_class, stage, **{"lr": 1.0, **options})


def values(model):
    with zero.gathered(model):
        return [param[0].item() for param in model.parameters()]


@pytest.mark.parametrize("stage", range(4))
def test_what_people_do_between_steps(stage):
    def steps():
        found = []
        model = Vectors()
        optimizer = optimizer_of(model, stage)
        for _ in range(3):  # in place of the optimizer's zero_grad
            model.zero_grad()
            model().backward()
            optimizer.step()
        found.append(values(model))
        model.zero_grad()
        model(3.0).backward()
        optimizer.scale_gradients(0.5)  # before anything else has summed them
        optimizer.step()
        found.append(values(model))
        optimizer.zero_grad(set_to_none=False)
        model().backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()  # of zeros
        found.append(values(model))
        optimizer.zero_grad()
        if rank() == 0 and stage < 3:  # the other rank has no backward
            model().backward()
            optimizer.step()
        elif stage < 3:
            optimizer.step()
        found.append(values(model))
        if stage < 3:
            model.a.data = torch.full((2,), 100.0).double()
            model.a.detach().numpy().sum()
            copy.deepcopy(model)().backward()
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            found.append(values(model))
        return found

    wanted = [[-6, -60], [-9, -90], [-9, -90], [-9, -90] if stage == 3 else [-10, -100]]
    wanted += [[98, -120]] if stage < 3 else []
    assert on_ranks(2, steps) == [wanted] * 2


@pytest.mark.parametrize("stage, layout", STAGES)
def test_a_parameter_that_no_rank_used_is_not_stepped(stage, layout):
    def steps():
        model, unit = Vectors(), {"layout": layout}
        options = dict(lr=0.1, weight_decay=0.5, unit=unit if stage == 3 else None)
        optimizer = optimizer_of(model, stage, torch.optim.AdamW, **options)
        with zero.gathered(model), torch.no_grad():
            model.a.fill_(1.0), model.b.fill_(1.0)
        model.forward = lambda: (model.b if rank() else model.b * 2).sum()
        for _ in range(2):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        return values(model)[0], list(optimizer.state_dict()["state"])

    assert on_ranks(2, steps) == [(1.0, [1])] * 2


@pytest.mark.parametrize("stage", range(4))
def test_a_weight_that_is_frozen_later_stays_and_one_unfrozen_is_refused(stage):
    def steps():
        model = Vectors()
        optimizer = optimizer_of(model, stage, torch.optim.AdamW, lr=0.1, weight_decay=0.1)
        model().backward()
        optimizer.step()
        before = values(model)
        optimizer.zero_grad()
        model.a.requires_grad_(False)
        model().backward()
        optimizer.step()
        after = values(model)
        other = Vectors()
        other.a.requires_grad_(False)
        unit = {"layout": "per_parameter"}
        optimizer = optimizer_of(other, stage, unit=unit)
        other.a.requires_grad_(True)
        with pytest.raises(RuntimeError, match="a was frozen when its optimizer was built"):
            optimizer.step()
        return before[0] == after[0], before[1] == after[1]

    assert on_ranks(2, steps) == [(True, False)] * 2


@pytest.mark.parametrize("stage", range(4))
def test_micro_batches_add_up_in_the_reduce_dtype_in_every_stage(stage):
    def steps():
        model, wide = Vectors(torch.bfloat16), {"reduce_dtype": torch.float32}
        optimizer = optimizer_of(model, stage, unit=wide, **({} if stage == 3 else wide))
        for weight in [1.0] + [2.0**-9] * 8:
            (model(weight) if rank() == 0 else model(0.0)).backward()
        optimizer.finish_reduce()
        (shard,) = optimizer.shards
        return {x for piece in shard.pieces for x in shard.grad[piece.where].tolist()}

    assert set.union(*on_ranks(2, steps)) == {1.015625, 10.15625}


@pytest.mark.parametrize("path, other", [("b", "b"), ("b", "ab"), ("a", "ab")])
@pytest.mark.parametrize("layout", ["flat", "per_parameter"])
def test_a_unit_that_some_ranks_skip_in_a_later_pass(path, other, layout):
    def step():
        torch.manual_seed(0)
        model, plain = Branch().double(), Branch().double()
        plain.load_state_dict(model.state_dict())
        for module in (model.a, model.b, model):
            zero.fully_shard(module, world(), layout)
        groups = [{"params": list(model.parameters()), "group": world()}]
        optimizer = zero.ZeroOptimizer(groups, torch.optim.SGD, 3, lr=0.1)
        sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(1)).double()
        for paths in (("ab", "ab"), (path, other), ("ab", "ab")):
            optimizer.zero_grad()
            sgd.zero_grad()
            model(x[[rank()]].requires_grad_(), paths[rank()]).square().sum().backward()
            for r in range(2):
                plain(x[[r]].requires_grad_(), paths[r]).square().sum().backward()
            optimizer.step()
            sgd.step()
        with zero.gathered(model), torch.no_grad():
            return close(model.parameters(), plain.parameters())

    assert on_ranks(2, step, timeout=20) == [True] * 2


@dataclasses.dataclass
class Output:
    y: torch.Tensor


@pytest.mark.parametrize("kind", ["dataclass", "in place on a view", "cached intermediate"])
def test_backward_may_reach_a_unit_by_any_tensor_that_it_returned(kind):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            self.between = torch.tanh(self.a(x))
            y = self.b(self.between)
            return Output(y) if kind == "dataclass" else y

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = Inner(), nn.Linear(3, 2)

        def forward(self, x):
            if kind == "dataclass":
                return self.head(self.inner(x).y)
            if kind == "cached intermediate":
                self.inner(x)
                return self.inner.between * 2
            y = self.inner(x.unsqueeze(1)).squeeze(1)
            y += x
            return self.head(y)

    def step():
        torch.manual_seed(0)
        model, plain = Outer().double(), Outer().double()
        plain.load_state_dict(model.state_dict())
        for module in (model.inner, model):
            zero.fully_shard(module, world())
        groups = [{"params": list(model.parameters()), "group": world()}]
        optimizer = zero.ZeroOptimizer(groups, torch.optim.SGD, 3, lr=0.1)
        sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(1)).double()
        for _ in range(2):
            for o, module, part in ((optimizer, model, x[[rank()]]), (sgd, plain, x)):
                o.zero_grad()
                module(part.clone().requires_grad_()).square().sum().backward()
                o.step()
        with zero.gathered(model), torch.no_grad():
            return close(model.parameters(), plain.parameters())

    assert on_ranks(2, step) == [True] * 2


def test_what_cannot_be_right_is_refused_in_a_sentence():
    def build():
        refused = lambda text: pytest.raises(RuntimeError, match=text)
        for stage in range(4):
            model = Vectors()
            optimizer = optimizer_of(model, stage)
            model().backward()
            with refused("not whole on one rank: use the ZeroOptimizer's clip_grad_norm"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.zero_grad()
        with refused(r"state_dict\(\) .* inside gathered"):
            model.state_dict()
        with refused("cannot copy a model"):
            copy.deepcopy(model)
        with refused("create_graph"):
            torch.autograd.grad(model(), list(model.parameters()), create_graph=True)
        with zero.gathered(model):
            assert model.state_dict()["a"].shape == (2,)
            with refused("run the model outside"):
                model()
        tied = Branch()
        zero.fully_shard(tied, world())
        group = {"params": [("a", tied.a.weight)], "group": world()}
        with pytest.raises(ValueError, match="stage 3 steps whole units"):
            zero.ZeroOptimizer([group], torch.optim.SGD, 3, lr=1.0)
        with pytest.raises(KeyError), zero.gathered(model), torch.no_grad():
            model.a.fill_(7.0)
            raise KeyError
        return values(model)[0]

    assert on_ranks(2, build) == [7.0] * 2


@pytest.mark.parametrize("what, says", [
    ("order", "rank 1 has group 0, a: .2,., float64, trained, rank 0 has group 0, b"),
    ("shape", r"rank 1 has group 0, a: \(3,\), float64, trained, rank 0 has group 0, a: \(2,\)"),
    ("unit", "rank 1 has a: .2,., float32, trained, rank 0 has a: .2,., float64, trained"),
    ("written", "rank 1 has a: values with digest .*, rank 0 has a: values with"),
])  # fmt: skip
def test_ranks_that_disagree_are_told_apart(what, says):
    def build():
        model = Vectors(torch.float32 if what == "unit" and rank() else torch.float64)
        if what in ("unit", "written"):
            zero.fully_shard(model, world())
            with zero.gathered(model), torch.no_grad():
                model.a.fill_(rank())
        pairs = list(model.named_parameters())[:: -1 if rank() and what == "order" else 1]
        if what == "shape" and rank():
            pairs[0] = "a", nn.Parameter(torch.zeros(3).double())
        zero.ZeroOptimizer([{"params": pairs, "group": world()}], torch.optim.SGD, 1, lr=1.0)

    with pytest.raises(RankFailed, match=f"Disagreement: ranks disagree: {says}"):
        on_ranks(2, build, timeout=20)


@pytest.mark.parametrize("stage, layout", STAGES)
@pytest.mark.parametrize("shape", [(0,), (5, 0)])
def test_a_parameter_without_elements(stage, layout, shape):
    def steps():
        model = Vectors()
        model.e = nn.Parameter(torch.zeros(shape).double())
        model.forward = lambda: model.a.sum() + model.b.sum() + model.e.sum()
        unit = {"layout": layout} if stage == 3 else None
        optimizer = optimizer_of(model, stage, torch.optim.AdamW, unit=unit)
        model().backward()
        optimizer.step()
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        return sorted(saved["state"])

    assert on_ranks(2, steps) == [[0, 1]] * 2


def test_load_state_dict_takes_options_and_copies_tensors():
    def steps():
        model = Vectors()
        optimizer = optimizer_of(model, 1, torch.optim.AdamW, lr=0.1)
        model().backward()
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] = 9.0
        optimizer.load_state_dict(saved)
        before = copy.deepcopy(saved)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        same = [torch.equal(x, before["state"][i][k])
                for i, each in saved["state"].items() for k, x in each.items()]  # fmt: skip
        return rate, all(same) and len(same) == 6

    assert on_ranks(2, steps) == [(0.1, True)] * 2


# ── as a user runs it ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("wrong, says", [
    (["--batch", 3], "--batch 3 sequences for 4 ranks with --micro-batches 1: each needs one, 4"),
    (["--micro-batches", 0], "--micro-batches 0"),
])  # fmt: skip
def test_wrong_numbers_are_sentences(wrong, says):
    assert says in refusal(ROOT / "02_zero.py", *wrong)


@pytest.mark.slow
def test_the_run_learns():
    given = dict(batch=32, micro_batches=1, steps=21, text=None)
    runs = {"stage": 1}, {"stage": 3, "micro_batches": 2}

    def run():
        for more in runs:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                zero.train(argparse.Namespace(**{**given, **more}), world(), CPU)
            yield printed.getvalue()

    for said in on_ranks(2, lambda: [*run()], timeout=100)[0]:
        rows = [line.split() for line in said.partition("step   loss")[2].splitlines()[1:]]
        assert [int(row[0]) for row in rows] == [0, 10, 20]
        assert float(rows[0][1]) > 5 and float(rows[-1][1]) < 2.8


@pytest.mark.slow
def test_the_picture_is_drawn_by_a_script_that_proves_before(tmp_path):
    done = run_script(ROOT / "02_zero.py", "--ranks", 2, "--plot", tmp_path / "zero.png")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "zero.png").stat().st_size > 10_000
