"""07_5d: every gradient of every grid equal to one process and to plain torch, bytes by axis, its
own training loop, checkpoints that any grid can read, and runs that lose a rank."""

import argparse
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch
from zlib import crc32

import numpy as np
import pytest
import torch
import torch.distributed as dist
import twin_5d
from harness import ROOT, RankFailed, chapter, on_ranks, run_script
from torch.testing._internal.distributed.fake_pg import FakeStore

five = chapter("07_5d")
CPU = torch.device("cpu")
question = pytest.mark.question
SCRIPT = ROOT / "07_5d.py"
AXES = ("pp", "dp", "cp", "tp", "ep")
TINY = "--width 32 --hidden 32 --length 16"
ALONE = (1, 1, 1, 1, 1)


def options(*sizes, flags=""):
    """Arguments of a grid (pp, dp, cp, tp, ep), validated as the command line is."""
    argv = [word for axis, size in zip(AXES, sizes) for word in (f"--{axis}", str(size))]
    args = five.options([*argv, *flags.split()])
    five.validate(args, args.ranks)
    return args


def grid_of(args, **given):
    return five.Grid(args.pp, args.dp, args.cp, args.tp, args.ep, args.order, **given)


def ranks_of(sizes):
    return math.prod(sizes[:4])


def stir(model):
    """Change what starts as ones and zeros, and would hide mistakes: norms, and routers' biases.
    The same on every grid."""
    with torch.no_grad(), ExitStack() as whole:
        for stage in model.stages.values():
            whole.enter_context(five.zero.gathered(stage))
        small = {name: p for name, p in model.named.items() if len(model.shapes[name]) == 1}
        for name, x in {**small, **five.biases(model)}.items():
            x += 0.1 * torch.randn(x.shape, generator=torch.manual_seed(crc32(name.encode())))


def whole_state(model):
    """{name: whole tensor} of a model on one rank, biases included."""
    return {**model.named, **five.biases(model)}


def judged(args, grid):
    """Errors beside plain torch: of this rank's weights, of the loss, of each gradient it holds."""
    model = five.Model(args, grid, CPU)
    whole = five.twin_of(model)
    stir(model), stir(whole)
    state = whole_state(whole)
    x_BS, y_BS = five.proof_batch(args, grid)
    valid = (y_BS != -100).sum(1)
    assert len(x_BS.unique()) > 9 and len(valid.unique()) > len(valid) / 2 and valid.min() > 0
    random_ones = [w.flatten()[:8] for w in state.values()]
    assert len({tuple(w.tolist()) for w in random_ones}) == len(state), "weights that start alike"
    loss, gradients = twin_5d.Twin(args, state).gradients(x_BS, y_BS)
    weights = [(name, span, each["param"]) for name, span, each in model.optimizer.local_state()]
    model_loss, _ = model.gradients(x_BS, y_BS)
    return {
        "weights": five.largest_error(weights, state, model), "loss": abs(model_loss / loss - 1),
        "gradients": five.largest_error(five.local_gradients(model), gradients, model),
    }  # fmt: skip


def prove(*cases):
    """Run the proofs of grids of as many ranks, one after the other on the same ranks, hold each
    row to what it claims, and the model to plain torch. Returns the names of the last one's
    rows."""
    grids = [(case, options(*case[0], flags=case[1])) for case in cases]

    def rows():
        for case, args in grids:
            try:
                args, grid = five.small(args), grid_of(args)
                yield list(five.proof(args, grid, CPU)), judged(args, grid)
            except Exception as error:
                error.add_note(f"in the proof of {case}")
                raise

    ((n,),) = [{args.ranks for _, args in grids}]
    for case, *by_rank in zip(cases, *on_ranks(n, lambda: list(rows()), timeout=60 * len(cases))):
        for rows, errors in by_rank:
            assert max(errors.values()) < 1e-10, (case, errors)
        for row in (row for rows, _ in by_rank for row in rows):
            assert row.error == pytest.approx(row.wrong, rel=1e-6, abs=1e-10), (case, row.name)
            for measured, formula in filter(None, (row.sent, row.held)):
                assert measured == pytest.approx(formula, abs=0.5), (case, row.name)
    return [row.name for row in by_rank[0][0]]


def by_ranks(cases):
    """Parameters of a test: the cases of each number of ranks."""
    sizes = sorted({ranks_of(sizes) for sizes, _ in cases})
    return [
        pytest.param([case for case in cases if ranks_of(case[0]) == n], id=f"{n} ranks")
        for n in sizes
    ]


# ── values, bytes sent, bytes held ───────────────────────────────────────────────────────────

# every schedule, attention, recomputation, stage of ZeRO and switch at least once
CASES = [
    ((1, 1, 1, 1, 1), ""),
    ((2, 1, 1, 1, 1), "--schedule zb-h1 --recompute full --zero 0"),
    ((1, 2, 1, 1, 2), "--balance bias"),
    ((1, 1, 2, 1, 2), "--attention all-gather --recompute selective"),
    ((1, 1, 1, 2, 1), "--no-tied"),
    ((1, 1, 2, 2, 2), "--attention ulysses --no-sp"),
    ((1, 2, 1, 2, 1), "--zero 3 --experts 0"),
    ((3, 2, 1, 1, 1), "--zero 3 --experts 0 --no-tied --layers 6"),  # a stage of no end
]
SLOW_CASES = [
    ((2, 1, 1, 1, 1), "--schedule gpipe"),
    ((2, 1, 1, 2, 1), "--schedule zb-h2 --micro-batches 4"),
    ((2, 2, 1, 1, 2), "--schedule interleaved"),
    ((2, 1, 1, 1, 1), "--schedule eager-1f1b"),
    ((2, 1, 1, 1, 1), "--schedule looped-bfs --experts 0"),
    ((2, 1, 1, 1, 1), "--schedule zb-auto"),
    ((2, 1, 1, 1, 1), "--schedule zb-v --micro-batches 4"),
    ((2, 1, 1, 1, 1), "--schedule interleaved-zb"),
    ((2, 1, 1, 1, 1), "--schedule dualpipev --micro-batches 4"),
    ((2, 1, 1, 1, 1), "--schedule dualpipe --micro-batches 4"),
    ((2, 1, 1, 1, 1), "--schedule dualpipe --micro-batches 4 --no-tied --zero 0"),
    ((2, 2, 1, 1, 1), "--zero 3 --experts 0 --no-tied"),
    ((1, 1, 2, 2, 1), "--zero 3 --experts 0 --no-sp --recompute full"),
    ((1, 2, 1, 2, 2), "--zero 0 --no-sp --balance none"),
    ((1, 1, 1, 4, 1), "--no-tied"),
    ((4, 1, 1, 1, 1), ""),
    ((1, 1, 4, 1, 4), ""),
    ((1, 4, 1, 1, 4), "--recompute full"),
    ((1, 1, 2, 2, 2), "--recompute full --attention ulysses"),
    ((1, 1, 2, 2, 2), "--recompute selective --attention ulysses --no-sp"),
    ((1, 1, 2, 2, 2), "--recompute full --no-sp --every 1"),
    ((1, 1, 2, 1, 1), "--recompute selective"),
    ((3, 1, 1, 1, 1), "--layers 6"),
    ((1, 3, 1, 1, 3), "--experts 6 --batch 18"),
    ((1, 1, 3, 1, 1), "--length 66"),
    ((1, 1, 1, 3, 1), "--heads 6 --kv-heads 3 --width 48 --hidden 48 --length 66"),
    ((1, 2, 1, 1, 1), "--heads 32 --width 128"),
]
WITH_ALL_WRONG = (2, 1, 2, 2, 2), ""  # every entry of the table that is changed on purpose matters
SLOW_CASES += [
    ((*sizes, math.gcd(2, sizes[1] * sizes[2])), "") for sizes in product((1, 2), repeat=4)
    if math.prod(sizes) > 2 and sizes != WITH_ALL_WRONG[0][:4]
]  # fmt: skip


@question("Q7.1")
@question("Q7.2")
@question("Q7.3")
@pytest.mark.parametrize("cases", by_ranks(CASES))
def test_a_grid_equals_one_process(cases):
    prove(*cases)


@pytest.mark.slow
@pytest.mark.parametrize("cases", by_ranks(SLOW_CASES))
def test_every_grid_equals_one_process(cases):
    """Without the rows that are wrong on purpose: the test below has all of them on one grid."""
    with patch.object(five, "wrong_on_purpose", lambda *_: ()):
        prove(*cases)


@question("Q7.2")
def test_rows_that_are_wrong_on_purpose_are_among_them():
    names = prove(WITH_ALL_WRONG)
    assert {"norms counted once a tp rank", "experts summed over dp x cp"} < set(names)
    assert "tied embedding not summed" in names


@question("Q7.2")
def test_the_table_of_reductions_follows_sequence_parallelism():
    """By hand: norms and experts see other tokens on each tp rank only under SP."""
    assert five.reduction_table(sp=False) == {
        "whole": ("", "dp cp"), "cut by tp": ("tp", "dp cp"), "expert": ("ep", "edp"),
    }  # fmt: skip
    assert five.reduction_table(sp=True) == {
        "whole": ("", "dp cp tp"), "cut by tp": ("tp", "dp cp"), "expert": ("ep", "edp tp"),
    }  # fmt: skip


@question("Q7.3")
def test_every_grid_counts_the_parameters_of_one_process():
    """Each element once: split, replicated, on both ends, or on DualPipe's two ranks."""

    dualpipe = "--schedule dualpipe --micro-batches 4 --balance aux"

    def count(sizes):
        flags = dualpipe if sum(sizes) == 6 else ""
        both = (options(*sizes, flags=f"{flags} {ends}") for ends in ("", "--no-tied"))
        return [five.parameter_count(five.Model(args, grid_of(args), CPU)) for args in both]

    (wanted,) = on_ranks(1, count, (1, 1, 1, 1, 1))
    for n, sizes in [(2, (2, 1, 1, 1, 1)), (4, (2, 1, 2, 1, 2)), (4, (1, 1, 2, 2, 2))]:
        assert on_ranks(n, count, sizes) == [wanted] * n


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (2, 2, 1, 1, 2)])
def test_a_token_meets_some_of_the_parameters_and_mfu_counts_no_others(sizes):
    """By hand, of width 32, 4 layers, every other with 4 experts of 16, of which a token meets 2:
    ends 256 · 32 + 32; four attentions 32 · 64 + 32 · 32 and norms 64; two MLPs 3 · 32 · 32; two
    routers 4 · 32, shared experts 3 · 32 · 16, and experts 4 · 3 · 32 · 16."""

    def count():
        model = five.Model(options(*sizes, flags=TINY), grid_of(options(*sizes)), CPU)
        active = five.parameter_count(model, active=True)
        with patch.object(torch.cuda, "is_available", lambda: True):
            with patch.object(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3"):
                return five.parameter_count(model), active, five.utilisation(active, 1e9)

    n = ranks_of(sizes)
    outside = 8224 + 4 * (2048 + 1024 + 64) + 2 * 3072 + 2 * (128 + 1536)
    whole, active = outside + 2 * 6144, outside + 2 * 3072
    mfu = f"   MFU {6 * active * 1e9 / (n * 989.5e12):.1%}"
    assert on_ranks(n, count) == [(whole, active, mfu)] * n


# ── the grid ─────────────────────────────────────────────────────────────────────────────────


@question("Q7.1")
@pytest.mark.parametrize("order, tp_peers, pp_peers", [
    ("pp dp cp tp", [0, 1], [0, 8]),  # Megatron's and torchtitan's: tp adjacent, pp outermost
    ("dp pp cp tp", [0, 1], [0, 4]),  # Llama 3's: pp inside dp
    ("tp cp dp pp", [0, 8], [0, 1]),
])  # fmt: skip
def test_the_order_of_axes_decides_who_is_next_to_whom(order, tp_peers, pp_peers):
    def peers(rank):
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=16, store=FakeStore())  # no links
        grid = five.Grid(2, 2, 2, 2, 2, order)
        group = lambda axes: dist.get_process_group_ranks(grid[axes])
        return grid.at, {axes: group(axes) for axes in grid.GROUPS}

    ranks = on_ranks(1, lambda: [peers(rank) for rank in range(16)])[0]
    assert ranks[0][1]["tp"] == tp_peers and ranks[0][1]["pp"] == pp_peers
    for me, (at, groups) in enumerate(ranks):
        for axes, members in groups.items():
            names = axes.split()
            assert me in members
            for other in members:  # who shares a group differs in its axes and in nothing else
                fixed = "pp edp ep tp" if "e" in axes else "pp dp cp tp"
                for name in set(fixed.split()) - set(names):
                    assert ranks[other][0][name] == at[name]
        assert len(groups["ep"]) == len(groups["edp"]) == 2
        assert groups["ep"] == groups["cp"], "ep is the fast half of dp x cp: here, cp"


@pytest.mark.parametrize("sizes", [
    (1, 2, 1, 2, 1),
    pytest.param((2, 2, 1, 2, 1), marks=pytest.mark.slow),
    pytest.param((1, 2, 2, 2, 2), marks=pytest.mark.slow),
])  # fmt: skip
def test_co_04_data_follow_the_data_coordinate(sizes):
    """Peers of one dp coordinate see the same samples, other coordinates other ones; together the
    batch, whatever the order of the axes."""
    seen = {}
    for order in ("pp dp cp tp", "tp cp dp pp"):
        args = options(*sizes, flags="--batch 8")
        args.order = order

        def samples(args=args):
            model = five.Model(args, grid_of(args), CPU)
            ids = torch.arange(8)[:, None].expand(8, args.length).contiguous()
            parts = model.micro_batches(ids, ids)
            return model.grid.at["dp"], [part.x_bs[:, 0].tolist() for part in parts]

        by_rank = on_ranks(args.ranks, samples)
        seen[order] = {d: ids for d, ids in by_rank}
        assert all(seen[order][d] == ids for d, ids in by_rank)
        everywhere = [i for ids in seen[order].values() for part in ids for i in part]
        assert sorted(everywhere) == [*range(8)]
    assert seen["pp dp cp tp"] == seen["tp cp dp pp"]


def test_co_02_the_norm_is_the_same_on_every_grid_and_scale():
    def norm(args):
        args = five.small(args)
        model = five.Model(args, grid_of(args), CPU)
        draw = torch.Generator().manual_seed(5)
        x_BS, y_BS = torch.randint(256, (2, 8, 16), generator=draw)
        args.length = 16
        return model.gradients(x_BS, y_BS)[1]

    norms = []
    for pp, m in [(1, 1), (1, 4), (2, 4), (4, 2)]:
        flags = f"--experts 0 --layers 8 --micro-batches {m} --batch 8"
        args = options(pp, 1, 1, 1, 1, flags=flags)
        args.layers = 8
        with pytest.MonkeyPatch.context() as same_layers:
            same_layers.setattr(five, "n_stages", lambda args: 4)  # small(): eight layers for all
            norms += on_ranks(args.ranks, norm, args)
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-9)


INVALID = [
    ("--pp 0", "--pp 0"), ("--tp -1", "--tp -1"), ("--ranks 6", "16, and there are 6"),
    ("--dp 3 --ep 4", "--ep 4 does not divide --dp 3 x --cp 2"),
    ("--ep 3", "--ep 3"), ("--ep 4 --experts 6", "--experts 6"),
    ("--top-k 9", "from 2 to 4"), ("--top-k 0", "--top-k 0"), ("--top-k 1", "--top-k 1"),
    ("--tp 8", "--tp 8 does not divide --kv-heads 4"), ("--tp 3 --heads 6 --kv-heads 3", "64"),
    ("--heads 6", "heads 6"), ("--kv-heads 6", "heads 6"),
    ("--length 30", "--length 30 is no multiple of 4"),
    ("--batch 10", "--batch 10"), ("--batch 0", "--batch 0"),
    ("--micro-batches 5", "--micro-batches 5"), ("--layers 1", "--layers 1"),
    ("--order 'pp dp cp'", "--order"), ("--attention ulysses --heads 2 --kv-heads 2", "--cp 2"),
    ("--zero 3 --experts 0 --no-tied --schedule zb-h1", "zb-h1 splits"),
    ("--zero 3", "--experts 0"), ("--zero 3 --experts 0", "--no-tied"),
    ("--resume nowhere", "nowhere"), ("--text nowhere", "nowhere"),
    ("--schedule dualpipe --pp 3 --layers 6", "--pp 3 is odd"), ("--hidden 33", "33"),
    ("--schedule dualpipe --micro-batches 4 --balance bias", "say --balance aux"),
    ("--micro-batches 0", "--micro-batches 0: at least 1"), ("--heads 0", "--heads 0"),
    ("--save-every 0", "--save-every 0"), ("--every -1", "--every -1"), ("--width 0", "--width 0"),
    ("--steps -1", "--steps -1"), ("--experts -2", "--experts -2"), ("--rate 0", "--rate 0"),
    (f"--save {SCRIPT}", "exists"), ("--ranks 0", "there are 0 ranks"),
]  # fmt: skip


@pytest.mark.parametrize("flags, says", INVALID)
def test_co_09_what_does_not_multiply_out_is_refused_with_its_numbers(flags, says):
    args = five.options(shlex.split(flags))
    with pytest.raises(ValueError, match=f"(?i){re.escape(says)}"):
        five.validate(args, args.ranks)


# ── the step ─────────────────────────────────────────────────────────────────────────────────


@question("Q7.4")
def test_ft_02_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all():
    args = options(2, 2, 1, 1, 2, flags="--batch 4")

    def poisoned():
        model = five.Model(args, grid_of(args), CPU)
        x_BS, y_BS = torch.randint(256, (2, 4, args.length), generator=torch.manual_seed(0))
        before = [p.clone() for p in model.named.values()]
        if model.grid.me == 3:  # of one weight of the last stage: no other stage's are touched
            model.stages[1].norm.weight.register_hook(lambda grad: grad * float("nan"))
        _, norm = model.step(x_BS, y_BS, rate=0.1)
        same = all(torch.equal(a, b) for a, b in zip(before, model.named.values()))
        stepped = any(shard.optimizer.state for shard in model.optimizer.shards)
        return np.isfinite(norm), same, stepped

    assert on_ranks(4, poisoned) == [(False, True, False)] * 4


@question("Q7.4")
def test_clipping_scales_every_gradient_by_one_factor():
    args = options(2, 1, 1, 2, 1, flags="--batch 2 --micro-batches 2")

    def moved(max_norm):
        sgd = dict(optimizer_class=torch.optim.SGD, lr=0.0)
        model = five.Model(args, grid_of(args), CPU, **sgd)
        x_BS, y_BS = torch.randint(256, (2, 2, args.length), generator=torch.manual_seed(0))
        before = {name: p.clone() for name, p in model.named.items()}
        _, norm = model.step(x_BS, y_BS, rate=1.0, max_norm=max_norm)
        return norm, {name: (before[name] - p).detach() for name, p in model.named.items()}

    for (norm, whole), (_, clipped) in zip(on_ranks(4, moved, 1e9), on_ranks(4, moved, 0.5)):
        assert any(moves.abs().max() > 1e-3 for moves in whole.values()), "at the step's own rate"
        for name in whole:
            assert torch.allclose(clipped[name], whole[name] * 0.5 / norm, atol=1e-6)


def test_the_learning_rate_warms_up_and_decays():
    """By hand, of 100 steps: a tenth of the peak more each step, then half a cosine to a tenth."""
    args = options(*ALONE, flags="--steps 100 --rate 2.0")
    rates = [five.rate_at(step, args) for step in range(100)]
    cosine = [2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * k / 100)) / 2) for k in range(10, 100)]
    assert rates == pytest.approx([0.2 * (k + 1) for k in range(10)] + cosine, rel=1e-12)
    assert rates[50] == pytest.approx(1.1, rel=1e-12)
    args.decay = "wsd"
    rates = [five.rate_at(step, args) for step in range(100)]
    falling = [2.0 * k / 20 for k in range(19, 0, -1)]
    assert rates[10:] == pytest.approx([2.0] * 71 + falling, rel=1e-12)


@pytest.mark.parametrize("flags", ["--zero 0", "--zero 1", "--zero 3 --experts 0"])
def test_gradients_of_bf16_are_summed_in_fp32(flags):
    """1 on one rank and 2^-9 on the other: bf16 has no such number as their sum."""
    args = options(1, 2, 1, 1, 1, flags=f"{TINY} --precision bf16 {flags}")

    def summed():
        value = [1.0, 2**-9][dist.get_rank()]
        model = five.Model(args, grid_of(args), CPU)
        for shard in model.optimizer.shards:
            with patch.object(shard, "is_whole", True):
                for param, shape in zip(shard.params, shard.shapes):
                    param.data = torch.empty(shape, dtype=torch.bfloat16)
                    param.grad = torch.full(shape, value, dtype=param.grad_dtype)
                if args.zero == 3:
                    shard.reduce()
                    shard.finish_reduce()
        model.optimizer.finish_reduce()
        return {x.item() for *_, part in five.local_gradients(model) for x in part.unique()}

    assert on_ranks(2, summed) == [{1 + 2**-9}] * 2


def test_what_looks_at_weights_between_steps_disturbs_nothing():
    def run(look, zero):
        args = options(1, 2, 1, 1, 2, flags=f"{TINY} --batch 4 --zero {zero}")
        model, batch = five.Model(args, grid_of(args), CPU), five.proof_batch(args, grid_of(args))
        losses = []
        for _ in range(3):
            losses.append(model.step(*batch, rate=1e-2)[0])
            if look:
                kept = [param.detach().numpy() for param in model.named.values()]
                assert all(np.isfinite(x).all() for x in kept)
        return losses

    for zero in (0, 1):
        assert on_ranks(2, run, True, zero) == on_ranks(2, run, False, zero)


def test_bf16_learns_as_fp32_does_with_fp32_masters():
    def losses(precision):
        flags = f"{TINY} --precision {precision} --batch 4 --experts 0"
        args = options(1, 2, 1, 1, 2, flags=flags)
        model = five.Model(args, grid_of(args), CPU)
        draw = torch.randint(256, (2, 4, args.length), generator=torch.manual_seed(0))
        losses = [model.step(*draw, rate=3e-3)[0] for _ in range(20)]
        kinds = {tensors["param"].dtype for *_, tensors in model.optimizer.local_state()}
        return losses, kinds, {p.dtype for p in model.named.values()}

    for (bf16, *dtypes), (fp32, *_) in zip(
        on_ranks(2, losses, "bf16"), on_ranks(2, losses, "fp32")
    ):
        assert fp32[-1] < fp32[0] - 1 and bf16 == pytest.approx(fp32, rel=0.02)
        assert dtypes == [{torch.float32}, {torch.bfloat16}]


def test_validation_changes_nothing_and_equals_one_process():
    def evaluate(sizes):
        args = options(*sizes, flags="--batch 4 --precision fp32")
        model = five.Model(args, grid_of(args), CPU)
        x_BS, y_BS = torch.randint(256, (2, 4, args.length), generator=torch.manual_seed(0))
        loss = model.evaluate(x_BS, y_BS)
        loads = sum(router.load_2E.sum().item() for router in model.routers)
        return loss, loads, all(p.grad is None for p in model.named.values())

    (one,) = on_ranks(1, evaluate, (1, 1, 1, 1, 1))
    for loss, loads, untouched in on_ranks(4, evaluate, (2, 1, 2, 1, 2)):
        assert loss == pytest.approx(one[0], rel=1e-6) and loads == 0 and untouched


def test_every_schedule_validates():
    def evaluate(pp, schedules):
        found = {}
        for schedule in schedules:
            flags = f"{TINY} --micro-batches 4 --schedule {schedule}"
            args = options(pp, 1, 1, 1, 1, flags=flags)
            model = five.Model(args, grid_of(args), CPU)
            x_BS, y_BS = torch.randint(256, (2, 4, args.length), generator=torch.manual_seed(0))
            loss = model.evaluate(x_BS, y_BS)
            found[schedule] = loss, all(p.grad is None for p in model.named.values())
        return found

    (alone,) = on_ranks(1, evaluate, 1, ["gpipe"])
    wanted = pytest.approx(alone["gpipe"][0], rel=1e-6)
    for found in on_ranks(2, evaluate, 2, list(five.pp.SCHEDULES)):
        assert found == {schedule: (wanted, True) for schedule in five.pp.SCHEDULES}


def test_the_bias_of_a_router_keeps_fp32_and_forgets_a_skipped_step():
    def biased():
        args = options(1, 1, 1, 1, 1, flags=f"{TINY} --precision bf16 --balance bias")
        model = five.Model(args, grid_of(args), CPU)
        x_BS, y_BS = torch.randint(256, (2, 16, args.length), generator=torch.manual_seed(0))
        (bias_E, *_), (load_2E, *_) = zip(*((r.bias_E, r.load_2E) for r in model.routers))
        bias_E += 1.0
        model.step(x_BS, y_BS, rate=1e-3)
        moved = (bias_E - 1).abs().max().item()
        next(iter(model.named.values())).data[:] = float("nan")
        model.step(x_BS, y_BS, rate=1e-3)
        return moved, (bias_E - 1).abs().max().item() == moved, load_2E.sum().item()

    assert on_ranks(1, biased) == [(pytest.approx(1e-3, rel=0.9), True, 0)]


# ── its own training loop, and checkpoints (ck-01, ck-02, ck-05, ck-08, ck-10, ft-08) ─────────

SHORT = "--steps 6 --save-every 3 --batch 8 --width 32 --hidden 64 --length 32 --balance bias"
HERE = (2, 1, 1, 2, 1)
DENSE, TWO_WAYS = "--experts 0", "--no-tied --balance aux --schedule dualpipe --micro-batches 4"


class Stopped(Exception):
    """What interrupts a run."""


def train(sizes, flags, precision="fp64", stop=None, looks=None):
    """07's own loop on the ranks of a grid, interrupted before step `stop`. Each step also draws a
    random number, as dropout would. Returns by rank what rank 0 said, and looks(model, batch) of
    each step and validation."""
    args = options(*sizes, flags=f"{SHORT} {flags}")
    args.precision = precision
    real_step, real_evaluate = five.Model.step, five.Model.evaluate

    def run():
        said, seen, steps = [], [], []

        def step(model, *batch):
            if len(steps) == stop:
                raise Stopped
            steps.append(torch.rand(()))
            seen.extend([("step", looks(model, batch))] if looks else [])
            return real_step(model, *batch)

        def evaluate(model, *batch):
            seen.extend([("evaluate", looks(model, batch))] if looks else [])
            return real_evaluate(model, *batch)

        with ExitStack() as patches:
            patches.enter_context(patch.multiple(five.Model, step=step, evaluate=evaluate))
            patches.enter_context(patch.object(five.dp, "say", lambda *words: said.extend(words)))
            patches.enter_context(suppress(Stopped))
            five.train(args, grid_of(args), CPU)
        return said, seen

    return on_ranks(ranks_of(sizes), run, timeout=90)


def weights_in(folder, flags):
    """The whole weights and biases of the newest checkpoint in a folder, in float64."""

    def read():
        args = five.options(f"--pp 1 --dp 1 --cp 1 --tp 1 --ep 1 {SHORT} {flags}".split())
        args.precision, args.zero, args.schedule, args.order = "fp64", 0, "gpipe", "pp dp cp tp"
        model = five.Model(args, grid_of(args), CPU)
        assert five.load(model, folder) == 6
        return {name: x.detach().clone() for name, x in whole_state(model).items()}

    return on_ranks(1, read)[0]


def plain_run(flags, text=None):
    """The same six steps by a plain loop: whole weights and biases, and the loss of each step."""

    def run():
        args = options(*ALONE, flags=f"{SHORT} {flags}")
        args.precision = "fp64"
        args.schedule = "gpipe"
        twin = twin_5d.Twin(args, whole_state(five.Model(args, grid_of(args), CPU)))
        text = five.dp.read_text(args.text, 0)
        text = text[: len(text) - math.ceil(len(text) / 20)]
        batches = [five.dp.sample(text, step, args.batch, args.length) for step in range(6)]
        cosine = [0.1 + 0.45 * (1 + math.cos(math.pi * k / 6)) for k in range(1, 6)]
        losses = twin_5d.train(twin, batches, [3e-3 * part for part in [1, *cosine]])
        return {name: x.detach() for name, x in twin.w.items()}, losses

    return on_ranks(1, run)[0]


def assert_equal_weights(weights, plain):
    assert weights.keys() == plain.keys()
    for name in plain:  # biases are kept in fp32
        bound = 1e-6 if name.endswith("bias_E") else 1e-10
        assert five.dp.relative_error(weights[name], plain[name]) < bound, name


@pytest.mark.parametrize("sizes, flags", [
    (ALONE, ""), ((1, 2, 1, 1, 2), ""), (HERE, ""), ((1, 2, 1, 1, 1), f"{DENSE} --zero 3"),
    ((2, 1, 1, 1, 1), TWO_WAYS),
    pytest.param((1, 2, 2, 1, 4), "--balance aux --no-tied", marks=pytest.mark.slow),
])  # fmt: skip
def test_its_own_loop_trains_as_a_plain_loop_does(sizes, flags, tmp_path):
    """Six steps of AdamW with micro-batches, clipping, schedule and biases, in float64."""
    said, _ = train(sizes, f"{flags} --print-every 1 --save {tmp_path}")[0]
    plain = flags.replace("--zero 3", "").replace("dualpipe", "gpipe")
    weights, losses = plain_run(plain)
    steps = [line.split()[1] for line in said if re.match(" +[1-6]/6 ", line)]
    assert steps == [f"{loss:.3f}" for loss in losses]
    assert_equal_weights(weights_in(tmp_path, plain), weights)


OTHER = [
    (HERE, "", ALONE, "--zero 0"),
    (HERE, "", HERE, ""),
    (HERE, "", (1, 2, 2, 1, 4), ""),
    ((1, 2, 1, 2, 1), f"{DENSE} --zero 3", (2, 1, 1, 1, 1), DENSE),
    ((2, 1, 1, 1, 1), DENSE, (1, 2, 1, 1, 1), f"{DENSE} --zero 3"),
    ((2, 1, 1, 1, 1), TWO_WAYS, ALONE, "--no-tied --balance aux --micro-batches 4"),
]
SLOW_OTHER = [
    (HERE, "", (2, 2, 1, 1, 2), "--schedule interleaved"),
    (HERE, "", (4, 1, 1, 1, 1), ""),
    (HERE, "", (1, 1, 1, 4, 1), "--no-sp"),
    ((1, 1, 1, 2, 1), "--no-tied --balance aux --micro-batches 4", (2, 2, 1, 1, 2), TWO_WAYS),
]
OTHER += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_OTHER]


@pytest.mark.parametrize("sizes, flags, others, other_flags", OTHER)
def test_an_interrupted_run_goes_on_as_if_undisturbed(sizes, flags, others, other_flags, tmp_path):
    """Stopped after four steps, of which the checkpoint has three; resumed, on the same grid or
    another, it ends with the weights of a plain loop that nobody interrupted."""
    train(sizes, f"{flags} --save {tmp_path}", stop=4)
    assert [path.name for path in five.checkpoints(tmp_path)] == ["step_00000003"]
    folders = f"--save {tmp_path} --resume {tmp_path}"
    said, seen = train(others, f"{other_flags} {folders}", looks=lambda *_: None)[0]
    assert "going on from step 3" in said[0]
    assert [what for what, _ in seen].count("step") == 3
    plain = other_flags.replace("--zero 3", "").replace("dualpipe", "gpipe")
    plain = plain.replace("--schedule interleaved", "").replace("--no-sp", "")
    assert_equal_weights(weights_in(tmp_path, plain), plain_run(plain)[0])


@pytest.mark.parametrize("sizes, flags", [
    (HERE, ""), ((1, 2, 1, 1, 1), "--zero 3 --experts 0 --precision bf16"),
    ((2, 1, 1, 1, 1), TWO_WAYS),
])  # fmt: skip
def test_resuming_on_the_same_grid_goes_on_bit_for_bit(sizes, flags, tmp_path):
    precision, files = "bf16" if "bf16" in flags else "fp32", {}
    for name, stop, resume in ("calm", None, ""), ("broken", 4, ""), ("broken", None, "--resume"):
        folder = tmp_path / name
        train(
            sizes, f"{flags} --save {folder} {resume} {folder if resume else ''}", precision, stop
        )
        newest = five.checkpoints(folder)[-1]
        files[name] = [torch.load(newest / f"rank_{r:05}.pt") for r in range(ranks_of(sizes))]
    assert newest.name == "step_00000006"
    for calm, broken in zip(files["calm"], files["broken"]):
        assert torch.equal(calm["random"], broken["random"])
        assert len(calm["pieces"]) == len(broken["pieces"])
        for (*place, tensors), (*other_place, others) in zip(calm["pieces"], broken["pieces"]):
            assert place == other_place and tensors.keys() == others.keys()
            assert place[0].endswith("bias_E") or {"exp_avg", "exp_avg_sq", "step"} < {*tensors}
            assert all(torch.equal(tensors[key], others[key]) for key in tensors)


def test_text_that_is_held_out_is_in_no_batch(tmp_path):
    """The bytes of a text that say where they stand: below 128 in the first 19 twentieths."""
    draw, text = np.random.default_rng(0), tmp_path / "text"
    first, last = draw.integers(0, 128, 1900), draw.integers(128, 256, 100)
    text.write_bytes(bytes([*first, *last]))

    def sees(model, batch):
        whole = torch.cat([part.flatten() for part in batch[:2]])
        return whole.min().item() >= 128, whole.max().item() >= 128

    flags = f"--text {text} --steps 40 --validate-every 10 --length 16 --batch 32 --save-every 99"
    (_, seen), *_ = train((1, 2, 1, 1, 2), flags, looks=sees)
    assert [what for what, _ in seen].count("step") == 40 and ("evaluate", (True, True)) in seen
    assert {*seen} == {("step", (False, False)), ("evaluate", (True, True))}


@pytest.mark.parametrize("sizes, flags", [
    ((1, 2, 1, 2, 2), "--zero 0 --no-sp"), ((2, 1, 1, 1, 1), TWO_WAYS),
])  # fmt: skip
def test_every_element_is_in_a_checkpoint_exactly_once(sizes, flags, tmp_path):
    args, covered = options(*sizes, flags=f"{SHORT} {flags}"), {}

    def write():
        model = five.Model(args, grid_of(args), CPU)
        five.save(model, 1, tmp_path)
        return five.parameter_count(model)

    n = ranks_of(sizes)
    counted = on_ranks(n, write)
    path, manifest, _ = five.newest(tmp_path)
    for file in manifest["files"]:
        for name, cut, (start, stop), tensors in torch.load(path / file)["pieces"]:
            assert tensors["param"].numel() == stop - start
            covered.setdefault((name, cut), []).append((start, stop))
    for name, spans in covered.items():
        spans.sort()
        assert spans[0][0] == 0 and all(a[1] == b[0] for a, b in zip(spans, spans[1:])), name
    parameters = sum(b - a for (name, _), spans in covered.items()
                     for a, b in spans if not name.endswith("bias_E"))  # fmt: skip
    assert counted == [parameters] * n


FEW_RANKS = (1, 2, 1, 1, 2)


def write_steps(folder, *steps, sizes=FEW_RANKS, flags="", **given):
    """Checkpoints of these steps, all by one run."""
    args = options(*sizes, flags=f"{SHORT} {flags}")

    def write():
        model = five.Model(args, grid_of(args), CPU)
        for step in steps:
            five.save(model, step, folder, **given)

    on_ranks(ranks_of(sizes), write)


def test_ck_01_the_newest_whole_checkpoint_is_found_and_damage_is_named(tmp_path):
    write_steps(tmp_path, 1, 2)
    older, newer = five.checkpoints(tmp_path)
    shutil.copytree(newer, tmp_path / "step_00000009.partial")
    assert five.newest(tmp_path)[0] == newer, "an unfinished checkpoint does not exist"
    ways = {
        "rank_00001.pt": lambda said: (said[:-100], said[:-1] + b"?"),
        "manifest": lambda said: (said[:-9], b"", said.replace(b'"step": 2', b'"step": 7')),
    }
    for name, damage in ways.items():
        said = (newer / name).read_bytes()
        for damaged in damage(said):
            assert damaged != said
            (newer / name).write_bytes(damaged)
            path, manifest, damages = five.newest(tmp_path)
            assert path == older and manifest["step"] == 1
            assert damages == [f"{newer / name} is not what was written"]
        (newer / name).unlink()
        assert five.newest(tmp_path)[2] == [f"{newer / name} is missing"]
        (newer / name).write_bytes(said)
    for path in (older, newer):
        (path / "manifest").unlink()
    with pytest.raises(ValueError, match="(?s)no checkpoint is whole: .*2/man.* missing; .*1/man"):
        five.newest(tmp_path)


def test_a_resumed_run_says_what_it_passes_over_and_which_flags_changed(tmp_path):
    train(FEW_RANKS, f"--save {tmp_path} --steps 6")
    damaged = tmp_path / "step_00000006" / "rank_00000.pt"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    flags = f"--rate 0.001 --decay wsd --save {tmp_path} --resume {tmp_path} --validate-every 9"
    (said, _), (other, _) = train(FEW_RANKS, flags)
    assert "going on from step 3" in said[0]
    assert said[1:5] == [
        f"{damaged} is not what was written: passed over for step_00000003",
        "--decay cosine -> wsd", "--rate 0.003 -> 0.001", "--validate-every 10 -> 9",
    ]  # fmt: skip
    aside = [path.name for path in tmp_path.iterdir() if "old" in path.name]
    assert len(aside) == 1 and aside[0].startswith("step_00000006.old_")
    assert five.newest(tmp_path)[1]["step"] == 6


def test_a_checkpoint_that_this_run_cannot_go_on_from_is_refused(tmp_path):
    text, same = tmp_path / "text", tmp_path / "same"
    text.write_bytes(b"to be or not to be " * 99)
    shutil.copy(text, same)
    folder = tmp_path / "saved"
    write_steps(folder, 3, flags=f"--text {text}")
    here = f"--text {text} --resume {folder}"
    for flags, says in {
        f"{here} --width 128": "has width 32, not 128",
        f"{here} --experts 0 --ep 1": "has experts 4, not 0",
        f"{here} --experts 8": "has experts 4, not 8",
        f"{here} --no-tied": "has tied True, not False",
        f"{here} --text {SCRIPT}": "has text_sha256 ",
        f"{here} --steps 2": "step_00000003 is of step 3, past --steps 2",
        f"{here}/step_00000003": "step_00000003: there is no checkpoint in it",
        f"{here} --zero 3": "--zero 3 shards dense models",
        f"--save {folder}": "step_00000003 is there; --resume it, or move it",
        f"--resume {SCRIPT}": "there is no checkpoint in it",
    }.items():
        args = five.options([*SHORT.split(), *flags.split()])
        with pytest.raises(ValueError, match=re.escape(says)):
            five.validate(args, 16)
    for flags in (
        "", "--ep 1", "--tp 1 --ranks 8", "--steps 0", "--steps 3", "--balance aux",
        f"--text {same}",
    ):  # fmt: skip
        args = five.options([*SHORT.split(), *here.split(), *flags.split()])
        five.validate(args, args.ranks)
    text.write_bytes(b"to be or nut to be " * 99)
    with pytest.raises(ValueError, match="has text_sha256 "):
        five.validate(five.options([*SHORT.split(), *here.split()]), 16)


def test_only_the_older_checkpoints_of_this_run_are_removed(tmp_path):
    (tmp_path / "step_notes").mkdir()
    write_steps(tmp_path, 1)
    write_steps(tmp_path, 2, 4, 5, 6)
    names = lambda: {path.name for path in tmp_path.iterdir()} - {"step_notes"}
    assert names() == {"step_00000001", "step_00000005", "step_00000006"}
    write_steps(tmp_path, 7, 8, 9, 10, keep=3)
    assert names() == {f"step_{k:08}" for k in (1, 5, 6, 8, 9, 10)}

    def go_on():
        args = options(*FEW_RANKS, flags=SHORT)
        model = five.Model(args, grid_of(args), CPU)
        five.save(model, five.load(model, tmp_path) + 1, tmp_path)

    on_ranks(2, go_on)  # a resumed run is the run that it resumes
    assert names() == {f"step_{k:08}" for k in (1, 5, 6, 10, 11)}


def resume(folders, rename=lambda name: name):
    """What ranks that look into different folders say, and how many parameters have changed."""
    args = options(1, len(folders), 1, 1, 1, flags=SHORT)

    def run():
        model = five.Model(args, grid_of(args), CPU)
        model.named = {rename(name): param for name, param in model.named.items()}
        before = [param.detach().clone() for param in model.named.values()]
        try:
            said = five.load(model, folders[dist.get_rank()])
        except five.dp.Disagreement as refusal:
            said = str(refusal)
        return said, sum(not torch.equal(*two) for two in zip(before, model.named.values()))

    return on_ranks(len(folders), run)


def test_ranks_that_see_different_checkpoints_refuse(tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    write_steps(new, 2, 4)
    shutil.copytree(new / "step_00000002", old / "step_00000002")
    for said, changed in resume([new, old]):
        assert changed == 0 and f"rank 1 has {old}/step_00000002" in said
        assert f"rank 0 has {new}/step_00000004" in said
    other = tmp_path / "other" / "new"  # the same names, written by another run
    write_steps(other, 2)
    write_steps(other, 4, flags="--rate 0.1")
    here, there = resume([new, other])
    assert "of digest" in here[0] and here[0] == there[0] and here[1] == there[1] == 0
    damaged = tmp_path / "damaged"  # the same view, and a disk that lost a byte on one machine
    shutil.copytree(new, damaged)
    (damaged / "step_00000004" / "rank_00000.pt").write_bytes(b"")
    for said, changed in resume([damaged, new]):
        assert changed == 0 and f"rank 0 has {damaged}/step_00000002" in said


def test_a_checkpoint_with_other_names_changes_nothing(tmp_path):
    write_steps(tmp_path, 2)
    args = options(*ALONE, flags=SHORT)

    def run():
        model = five.Model(args, grid_of(args), CPU)
        model.optimizer.step()
        kept, saved = model.named["norm.weight"], five.pieces
        renamed = lambda model: (
            (name.replace("blocks.1.norm1", "blocks.1.norm_1").replace("bias_E", "bias"), *rest)
            for name, *rest in saved(model))  # fmt: skip
        kept.data += 1
        with patch.object(five, "pieces", renamed):
            five.save(model, 3, tmp_path)
        kept.data += 1
        with pytest.raises(five.dp.Disagreement) as refusal:
            five.load(model, tmp_path)
        return str(refusal.value), kept.unique().tolist()

    ((said, kept),) = on_ranks(1, run)
    assert kept == [3.0]
    lacks, has = said.split(" lacks ")[1].split(", and has ")
    assert lacks == "blocks.1.mlp.router.bias_E, blocks.1.norm1.weight, blocks.3.mlp.router.bias_E"
    assert has.split(" beyond")[0] == (
        "blocks.1.mlp.router.bias, blocks.1.norm_1.weight, blocks.3.mlp.router.bias")  # fmt: skip


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    args = options(*ALONE, flags=SHORT)

    def run():
        resource.setrlimit(resource.RLIMIT_FSIZE, (9999, 9999))
        with pytest.raises(five.dp.Disagreement) as refusal:
            five.save(five.Model(args, grid_of(args), CPU), 3, tmp_path)
        return str(refusal.value)

    ((said),) = on_ranks(1, run)
    file = tmp_path / "step_00000003.partial" / "rank_00000.pt"
    assert said == f"--save: {file} cannot be written: File too large"
    assert five.newest(tmp_path)[0] is None


def test_ranks_with_different_flags_refuse_before_the_first_step():
    def build():
        args = options(1, 2, 1, 1, 1, flags=f"{TINY} --rate {[0.003, 0.001][dist.get_rank()]}")
        with pytest.raises(five.dp.Disagreement) as refusal:
            five.main(args, CPU)
        return str(refusal.value)

    assert (
        on_ranks(2, build)
        == ["ranks disagree: rank 1 has --rate 0.001, rank 0 has --rate 0.003"] * 2
    )


LENGTHS = [  # flags, the least number of tokens that works, and one less
    ("--cp 2 --tp 2", 4), ("--cp 2 --tp 3 --heads 6 --kv-heads 3 --width 48 --hidden 48", 12),
    ("--cp 3 --tp 1 --ep 3 --experts 6", 6), ("--cp 1 --tp 2", 2), ("--cp 1 --tp 2 --no-sp", 1),
    ("--cp 2 --tp 4", 8), ("--cp 2 --tp 4 --no-sp", 4), ("--cp 2 --tp 4 --attention ulysses", 8),
    ("--cp 2 --tp 2 --attention ulysses --no-sp", 2),
]  # fmt: skip


@pytest.mark.parametrize("flags, parts", LENGTHS)
def test_a_sequence_is_cut_no_finer_than_zigzag_and_sp_need(flags, parts):
    for times in (1, 3):
        words = f"--pp 1 --dp 2 --ep 1 {flags} --length {times * parts}".split()
        args = five.options(words)
        five.validate(args, args.ranks)
    args = five.options(f"--pp 1 --dp 2 --ep 1 {flags} --length {3 * parts + parts // 2}".split())
    if parts > 1:
        with pytest.raises(ValueError, match=f"is no multiple of {parts}: "):
            five.validate(args, args.ranks)


# ── as a user runs it ────────────────────────────────────────────────────────────────────────

SMALL = "--pp 2 --dp 2 --cp 1 --tp 1 --ep 2 --batch 4 --print-every 1".split()


def test_the_script_proves_and_trains():
    done = run_script(SCRIPT, *SMALL, "--steps", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held out" in done.stdout and "NOT AS CLAIMED" not in done.stdout


def test_a_slow_run_says_how_far_it_is_and_how_long_it_will_take():
    """On a clock that goes 3 s on at each look, a step takes 6 s: a line every other step."""

    def lines():
        clock, said = iter(range(0, 1000, 3)), []
        args = options(1, 1, 1, 1, 1, flags=f"{TINY} --steps 9 --print-every 100")
        args.validate_every = 4
        with patch.object(five, "time", SimpleNamespace(perf_counter=lambda: next(clock))):
            with patch.object(five.dp, "say", said.append):
                five.train(args, grid_of(args), CPU)
        return said

    (said,) = on_ranks(1, lines)
    held_out = [i for i, line in enumerate(said) if "held out" in line]
    steps = [(i, *line.split()) for i, line in enumerate(said) if re.match(r" +\d+/", line)]
    assert [step[1] for step in steps] == ["1/9", "3/9", "5/9", "7/9", "9/9"]
    assert [step[5] for step in steps] == ["48s", "36s", "24s", "12s", "0s"]
    shown = [sum(i < at for i, *_ in steps) for at in held_out]
    assert shown == [0, 2, 4, 5], "before steps 0, 4 and 8, and at the end"


def final_line(text):
    return re.findall(r"held out ([\d.]+)", text)[-1:]


FEW = [*SMALL, *TINY.split(), "--steps", "40", "--save-every", "2", "--validate-every", "100"]


def test_every_flag_says_what_it_is():
    seen = []
    with patch.object(argparse.ArgumentParser, "parse_args", lambda self, _: seen.append(self)):
        with suppress(AttributeError):
            five.options([])
    assert len(seen[0]._actions) > 30
    assert all(action.help for action in seen[0]._actions)


def train_only(args, device):
    return five.train(args, grid_of(args, timeout=args.timeout), device)


@contextmanager
def launched(log, *flags):
    """The run as the script launches it, its proof apart, forked from here, for that saves ten
    times the import of torch; what it says is in a file."""

    def run():
        os.setsid()
        with open(log, "ab") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1) for n in (1, 2))
        five.dp.launch(train_only, five.options([str(word) for word in flags]), five.validate)

    log.write_text("")
    process = get_context("fork").Process(target=run)
    process.start()
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


@pytest.mark.slow
def test_any_rank_killed_at_any_moment_ten_times_and_the_run_ends_as_if_undisturbed(tmp_path):
    """Each attempt is killed within its first few steps, so that ten do not finish the run."""
    log, folder, draw, best = tmp_path / "log", tmp_path / "stormy", random.Random(0), 0
    with launched(log, *FEW, "--save", tmp_path / "calm") as process:
        process.join(60)
    undisturbed = final_line(log.read_text())
    assert process.exitcode == 0 and undisturbed
    for _ in range(10):
        with launched(log, *FEW, "--save", folder, "--resume", folder) as process:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            lines, ranks, deadline = draw.randint(0, 3), [], time.monotonic() + 30
            while len(ranks) < 4 or log.read_text().count("/40") < lines:
                assert time.monotonic() < deadline and process.is_alive(), log.read_text()
                time.sleep(0.01)
                ranks = children.read_text().split()
            time.sleep(draw.random() * 0.2)
            os.kill(int(draw.choice(ranks)), signal.SIGKILL)
            process.join(30)
            assert process.exitcode == 1 and "SIGKILL" in log.read_text(), log.read_text()
        if five.checkpoints(folder):
            path, manifest, _ = five.newest(folder)
            assert best <= manifest["step"] < 40
            best = manifest["step"]
    assert best > 0
    with launched(log, *FEW, "--save", folder, "--resume", folder) as process:
        process.join(60)
    assert process.exitcode == 0 and "going on from step" in log.read_text()
    assert final_line(log.read_text()) == undisturbed


@pytest.mark.slow
def test_torchrun_recovers_by_itself(tmp_path):
    """A rank kills itself once, in the first attempt, after the second checkpoint."""
    script = tmp_path / "run.py"
    script.write_text(f"""
import importlib, os, signal, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from test_07_5d import five, train_only
save = five.save
def save_and_die(model, step, folder, keep):
    save(model, step, folder, keep)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and model.grid.me == 1 and step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
five.save = save_and_die
five.dp.launch(train_only, five.options(), five.validate)
""")
    flags = "--pp 2 --dp 1 --cp 1 --tp 1 --ep 1 --batch 4 --steps 8 --save-every 2".split()
    folder, log = tmp_path / "saved", tmp_path / "log"
    with launched(log, *flags, *TINY.split()) as process:
        process.join(60)
    calm = final_line(log.read_text())
    torchrun = ["--standalone", "--nproc-per-node", 2, "--max-restarts", 1]
    done = run_script(
        script, *flags, *TINY.split(), "--save", folder, "--resume", folder,
        torchrun=torchrun, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "going on from step 4" in done.stdout
    assert final_line(done.stdout) == calm != []


def test_ft_01_a_rank_that_raises_is_named():
    def bad():
        args = options(1, 2, 1, 1, 1)
        model = five.Model(args, grid_of(args), CPU)
        if dist.get_rank() == 1:
            raise ValueError("step 3")
        model.gradients(*five.proof_batch(args, model.grid))

    with pytest.raises(RankFailed, match="(?s)rank 1 raised.*step 3"):
        on_ranks(2, bad)
