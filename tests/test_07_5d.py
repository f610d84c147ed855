"""07_5d: every gradient of every grid equal to one process, bytes by axis, checkpoints that any
grid can read, and runs that lose a rank."""

import os
import random
import re
import shutil
import signal
import sys
import time
from contextlib import contextmanager, suppress
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import ROOT, RankFailed, chapter, on_ranks, run_script

five = chapter("07_5d")
CPU = torch.device("cpu")
question = pytest.mark.question
SCRIPT = ROOT / "07_5d.py"
AXES = ("pp", "dp", "cp", "tp", "ep")
TINY = "--width 32 --hidden 32 --length 16"


def options(*sizes, flags=""):
    """Arguments of a grid (pp, dp, cp, tp, ep), validated as the command line is."""
    argv = [word for axis, size in zip(AXES, sizes) for word in (f"--{axis}", str(size))]
    args = five.options([*argv, *flags.split()])
    five.validate(args, args.ranks)
    return args


def grid_of(args, **given):
    return five.Grid(args.pp, args.dp, args.cp, args.tp, args.ep, args.order, **given)


def prove(*cases):
    """Run the proofs of grids of as many ranks, one after the other on the same ranks, and hold
    each row to what it claims. Returns the names of the last one's rows."""
    grids = [(case, options(*case[0], flags=case[1])) for case in cases]

    def rows():
        for case, args in grids:
            try:
                yield list(five.proof(five.small(args), grid_of(args), CPU))
            except Exception as error:
                error.add_note(f"in the proof of {case}")
                raise

    ((n,),) = [{args.ranks for _, args in grids}]
    for case, *by_rank in zip(cases, *on_ranks(n, lambda: list(rows()), timeout=60 * len(cases))):
        for rows in zip(*by_rank, strict=True):
            error, wrong = max(row.error for row in rows), max(row.wrong for row in rows)
            assert error == pytest.approx(wrong, rel=1e-6, abs=1e-9), (case, rows[0].name)
            for row in rows:
                for measured, formula in filter(None, (row.sent, row.held)):
                    assert measured == pytest.approx(formula, abs=0.5), (case, row.name)
    return [row.name for row in by_rank[0]]


def by_ranks(cases):
    """Parameters of a test: the cases of each number of ranks."""
    sizes = sorted({int(np.prod(sizes[:4])) for sizes, _ in cases})
    return [
        pytest.param([case for case in cases if np.prod(case[0][:4]) == n], id=f"{n} ranks")
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
]
WITH_ALL_WRONG = (2, 1, 2, 2, 2), ""  # every entry of the table that is changed on purpose matters
SLOW_CASES += [
    ((*sizes, ep), "") for sizes in product((1, 2), repeat=4) for ep in (1, 2)
    if (sizes[1] * sizes[2]) % ep == 0 and np.prod(sizes) > 2
    and ((*sizes, ep), "") != WITH_ALL_WRONG
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
        return [five.Model(args, grid_of(args), CPU).parameters() for args in both]

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
        active = model.parameters(active=True)
        with patch.object(torch.cuda, "is_available", lambda: True):
            with patch.object(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3"):
                return model.parameters(), active, five.utilisation(active, 1e9)

    n = int(np.prod(sizes[:4]))
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
    def peers():
        grid = five.Grid(2, 2, 2, 2, 2, order)
        group = lambda axes: dist.get_process_group_ranks(grid[axes])
        return grid.at, {axes: group(axes) for axes in grid.GROUPS}

    ranks = on_ranks(16, peers)
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
    ("--length 30", "--length 30"), ("--batch 10", "--batch 10"), ("--batch 0", "--batch 0"),
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
    import shlex

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
        return np.isfinite(norm), same, model.optimizer.has_state

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
    args = options(1, 1, 1, 1, 1, flags="--steps 100 --rate 1.0")
    rates = [five.rate_at(step, args) for step in range(100)]
    assert rates[0] == 0.1 and max(rates) <= 1.0 and rates[9] == 1.0
    assert rates[99] == pytest.approx(0.1, abs=0.01)
    args.decay = "wsd"
    rates = [five.rate_at(step, args) for step in range(100)]
    assert rates[10:80] == [1.0] * 70 and rates[90] == pytest.approx(0.5)


def test_bf16_learns_with_fp32_masters():
    def losses():
        args = options(1, 2, 1, 1, 2, flags=f"{TINY} --precision bf16 --batch 4 --steps 20")
        model = five.Model(args, grid_of(args), CPU)
        draw = torch.randint(256, (2, 4, args.length), generator=torch.manual_seed(0))
        found = [model.step(*draw, rate=3e-3)[0] for _ in range(20)]
        kinds = {tensors["param"].dtype for *_, tensors in model.optimizer.local_state()}
        return found, kinds, {p.dtype for p in model.named.values()}

    for found, kinds, dtypes in on_ranks(2, losses):
        assert found[-1] < found[0] - 1
        assert kinds == {torch.float32} and dtypes == {torch.bfloat16}


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


# ── checkpoints (ck-01, ck-02, ck-05, ck-08, ck-10, ft-08) ───────────────────────────────────

SHORT = "--steps 8 --batch 8 --width 32 --hidden 64 --length 32 --micro-batches 2 --balance bias"
HERE = (2, 1, 1, 2, 1)


def steps(sizes, flags, stop, folder=None, resume=False, save_at=None):
    """(loss, norm and a random number of each step up to `stop`, the state then), from the newest
    checkpoint if it is to resume; otherwise saved after step `save_at`, or the last."""
    args = options(*sizes, flags=f"{SHORT} {flags}")
    model = five.Model(args, grid_of(args), CPU, weight_decay=0.1)
    text, found = five.dp.read_text(None, 0), []
    first = five.load(model, folder) if resume else 0
    for step in range(first, stop):
        batch = five.dp.sample(text, step, args.batch, args.length)
        found.append((*model.step(*batch, five.rate_at(step, args)), torch.rand(()).item()))
        if folder and not resume and step + 1 == (save_at or stop):
            five.save(model, step + 1, folder)
    state = [(name, span, {k: t.clone() for k, t in tensors.items()})
             for name, span, tensors in model.optimizer.local_state()]  # fmt: skip
    return found, state


@pytest.mark.parametrize("sizes, flags", [
    (HERE, ""),
    ((1, 2, 1, 1, 1), "--zero 3 --experts 0 --precision bf16"),
    ((2, 1, 1, 1, 1), "--schedule dualpipe --micro-batches 4 --balance aux"),
])  # fmt: skip
def test_resuming_on_the_same_grid_goes_on_bit_for_bit(sizes, flags, tmp_path):
    n = int(np.prod(sizes[:4]))
    undisturbed = on_ranks(n, steps, sizes, flags, 4)
    saved = on_ranks(n, steps, sizes, flags, 4, tmp_path, False, 2)
    rest = on_ranks(n, steps, sizes, flags, 4, tmp_path, True)
    for (all_found, all_state), (found, _), (more, state) in zip(undisturbed, saved, rest):
        assert found == all_found and more == all_found[2:] and len(more) == 2
        for (name, span, tensors), (other_name, other_span, others) in zip(all_state, state):
            assert (name, span) == (other_name, other_span) and tensors.keys() == others.keys()
            assert {"param", "exp_avg", "exp_avg_sq", "step"} <= tensors.keys()
            assert all(torch.equal(tensors[key], others[key]) for key in tensors)


DENSE, TWO_WAYS = "--experts 0", "--no-tied --balance aux --schedule dualpipe --micro-batches 4"
OTHER = [
    (HERE, "", (1, 1, 1, 1, 1), "--zero 0"),
    (HERE, "", (1, 2, 2, 1, 4), ""),
    ((1, 2, 1, 2, 1), f"{DENSE} --zero 3", (2, 1, 1, 1, 1), DENSE),
    ((2, 1, 1, 1, 1), DENSE, (1, 2, 1, 1, 1), f"{DENSE} --zero 3"),
    ((2, 1, 1, 1, 1), TWO_WAYS, (1, 1, 1, 1, 1), "--no-tied --balance aux --micro-batches 4"),
]
SLOW_OTHER = [
    (HERE, "", (2, 2, 1, 1, 2), "--schedule interleaved"),
    (HERE, "", (4, 1, 1, 1, 1), ""),
    (HERE, "", (1, 1, 1, 4, 1), "--no-sp"),
    ((1, 1, 1, 2, 1), "--no-tied --balance aux --micro-batches 4", (2, 2, 1, 1, 2), TWO_WAYS),
]
OTHER += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_OTHER]


@pytest.mark.parametrize("sizes, flags, others, other_flags", OTHER)
def test_resuming_on_another_grid_goes_on_within_rounding(
    sizes, flags, others, other_flags, tmp_path
):
    n, m = (int(np.prod(each[:4])) for each in (sizes, others))
    expected = on_ranks(n, steps, sizes, flags, 4, tmp_path, False, 2)[0][0][2:]
    found = on_ranks(m, steps, others, other_flags, 4, tmp_path, True)[0][0]
    losses_and_norms = np.array(found)[:, :2], np.array(expected)[:, :2]
    np.testing.assert_allclose(*losses_and_norms, rtol=2e-4)


@pytest.mark.parametrize("sizes, flags", [
    ((1, 2, 1, 2, 2), "--zero 0 --no-sp"), ((2, 1, 1, 1, 1), TWO_WAYS),
])  # fmt: skip
def test_every_element_is_in_a_checkpoint_exactly_once(sizes, flags, tmp_path):
    def count():
        args = options(*sizes, flags=f"{SHORT} {flags}")
        return five.Model(args, grid_of(args), CPU).parameters()

    n, covered = int(np.prod(sizes[:4])), {}
    on_ranks(n, steps, sizes, flags, 1, tmp_path)
    path, manifest = five.newest(tmp_path)
    for file in manifest["files"]:
        for name, cut, (start, stop), tensors in torch.load(path / file)["pieces"]:
            assert tensors["param"].numel() == stop - start
            covered.setdefault((name, cut), []).append((start, stop))
    for name, spans in covered.items():
        spans.sort()
        assert spans[0][0] == 0 and all(a[1] == b[0] for a, b in zip(spans, spans[1:])), name
    parameters = sum(b - a for (name, _), spans in covered.items()
                     for a, b in spans if not name.endswith("bias_E"))  # fmt: skip
    assert on_ranks(n, count) == [parameters] * n


def test_ck_01_a_file_that_is_not_what_was_written_is_refused_by_name(tmp_path):
    on_ranks(4, steps, HERE, "", 1, tmp_path)
    path, _ = five.newest(tmp_path)
    ways = {
        "rank_00002.pt": lambda said: (said[:-100], said[:-1] + b"?"),
        "manifest": lambda said: (said[:-9], b"", said.replace(b'"step": 1', b'"step": 7')),
    }
    for name, damage in ways.items():
        said = (path / name).read_bytes()
        for damaged in damage(said):
            assert damaged != said
            (path / name).write_bytes(damaged)
            with pytest.raises(ValueError, match=f"{name} is not what was written"):
                five.newest(tmp_path)
        (path / name).unlink()
        with pytest.raises(ValueError, match=f"{name} is missing"):
            five.newest(tmp_path)
        (path / name).write_bytes(said)


def test_ck_01_an_unfinished_checkpoint_does_not_exist(tmp_path):
    on_ranks(4, steps, HERE, "", 1, tmp_path)
    path, _ = five.newest(tmp_path)
    shutil.copytree(path, tmp_path / "step_00000009.partial")
    assert five.newest(tmp_path)[0] == path


def test_a_checkpoint_that_this_run_cannot_go_on_from_is_refused(tmp_path):
    on_ranks(2, steps, (1, 2, 1, 1, 2), "", 3, tmp_path)
    here = f"--resume {tmp_path}"
    for flags, says in {
        f"{here} --width 128": "has width 32, not 128",
        f"{here} --experts 0 --ep 1": "has experts 4, not 0",
        f"{here} --experts 8": "has experts 4, not 8",
        f"{here} --no-tied": "has tied True, not False",
        f"{here} --text {SCRIPT}": f"has text None, not {SCRIPT}",
        f"{here} --steps 2": "step_00000003 is of step 3, past --steps 2",
        f"{here}/step_00000003": "step_00000003: there is no checkpoint in it",
        f"{here} --zero 3": "--zero 3 shards dense models",
        f"--save {tmp_path}": "step_00000003 is there; --resume it, or move it",
        f"--resume {SCRIPT}": "there is no checkpoint in it",
    }.items():
        args = five.options([*SHORT.split(), *flags.split()])
        with pytest.raises(ValueError, match=re.escape(says)):
            five.validate(args, 16)
    for flags in ("", "--ep 1", "--tp 1 --ranks 8", "--steps 0", "--steps 3", "--balance aux"):
        args = five.options([*SHORT.split(), *here.split(), *flags.split()])
        five.validate(args, args.ranks)


def test_what_is_beside_checkpoints_is_neither_read_nor_removed(tmp_path):
    def save_four():
        args = options(1, 1, 1, 1, 1, flags=TINY)
        model = five.Model(args, grid_of(args), CPU)
        for step in range(1, 5):
            five.save(model, step, tmp_path)

    (tmp_path / "step_notes").mkdir()
    on_ranks(1, save_four)
    assert five.newest(tmp_path)[0].name == "step_00000004"
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"step_notes", "step_00000003", "step_00000004"}


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
            path, manifest = five.newest(folder)
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
def save_and_die(model, step, folder):
    save(model, step, folder)
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
