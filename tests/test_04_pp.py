"""04_pp_schedules: lists against papers, torch and closed forms; the executor against one process,
the ledger and the simulator; and the reported faults of pipelines."""

import argparse
import dataclasses
import importlib
import random
import re
import runpy
import sys
import time
import weakref
from collections import Counter, namedtuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import ROOT, RankFailed, chapter, on_ranks, run_script
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pp = chapter("04_pp_schedules")
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "figures")]
asleep = importlib.import_module("sleeping_stages")
Sleeper = asleep.Sleeper
CPU = torch.device("cpu")
SCRIPT = ROOT / "04_pp_schedules.py"
question = pytest.mark.question
world = lambda: dist.group.WORLD
Op, SCHEDULES, simulate = pp.Op, pp.SCHEDULES, pp.simulate


def made(name, p, m, **options):
    """The schedule, or None where the shape is refused."""
    return None if name == "dualpipe" and p % 2 else SCHEDULES[name](p, m, **options)


def here(schedule, layers):
    """{stage: module} of this rank, in float64."""
    stages = pp.mine(schedule, pp.build(1 + max(pp.placement(schedule))[1], layers), world())
    return {key: stage.double() for key, stage in stages.items()}


def named(stages):
    return [pair for stage in stages.values() for pair in stage.named_parameters()]


# ── lists ────────────────────────────────────────────────────────────────────────────────────

# Makespan[/span](most held) at F = I = W = 1, by another simulation than the chapter's:
# p = 2 and m = 2 4 8 16, p = 4 and m = 4 8 16 32, p = 8 and m = 8 16 32 64.
TABLE = {
    "gpipe": "9(2) 15(4) 27(8) 51(16) 21(4) 33(8) 57(16) 105(32) 45(8) 69(16) 117(32) 213(64)",
    "1f1b": "9(2) 15(2) 27(2) 51(2) 21(4) 33(4) 57(4) 105(4) 45(8) 69(8) 117(8) 213(8)",
    "eager-1f1b": "9(2) 15(3) 27(3) 51(3) 21(4) 33(7) 57(7) 105(7) 45(8) 69(15) 117(15) 213(15)",
    "interleaved": "7.5(2) 13.5(2.5) 25.5(2.5) 49.5(2.5) 16.5(4) 28.5(5.5) 52.5(5.5) 100.5(5.5) "
    "34.5(8) 58.5(11.5) 106.5(11.5) 202.5(11.5)",
    "interleaved c=4": "6.75(2) 12.75(2.25) 24.75(2.25) 48.75(2.25) 14.25(4) 26.25(4.75) "
    "50.25(4.75) 98.25(4.75) 29.25(8) 53.25(9.75) 101.25(9.75) 197.25(9.75)",
    "looped-bfs": "7.5(2) 13.5(4) 25.5(8) 49.5(16) 16.5(4) 28.5(8) 52.5(16) 100.5(32) 34.5(8) "
    "58.5(16) 106.5(32) 202.5(64)",
    "zb-h1": "7(2) 13(2) 25(2) 49(2) 15(4) 27(4) 51(4) 99(4) 31(8) 55(8) 103(8) 199(8)",
    "zb-h2": "7(2) 13/12(3) 25/24(3) 49/48(3) 16/15(4) 27/24(7) 51/48(7) 99/96(7) 34/31(8) "
    "55/48(15) 103/96(15) 199/192(15)",
    "zb-auto": "7(2) 13/12(3) 25/24(3) 49/48(3) 15(4) 27/24(7) 51/48(7) 99/96(7) 31(8) 55/48(15) "
    "103/96(15) 199/192(15)",
    "zb-v": "7(2) 12.5/12(2) 24.5/24(2) 48.5/48(2) 15(4) 25.5/24(4) 49.5/48(4) 97.5/96(4) 31(8) "
    "51.5/48(8) 99.5/96(8) 195.5/192(8)",
    "interleaved-zb": "6.5(2) 12.5(2) 24.5(2) 48.5(2) 13.5(4) 25.5(4) 49.5(4) 97.5(4) 27.5(8) "
    "51.5(8) 99.5(8) 195.5(8)",
    "dualpipev": "- 13(2.5) 25(2.5) 49(2.5) - 27(4.5) 51(4.5) 99(4.5) - 55(8.5) 103(8.5) 199(8.5)",
    "dualpipe": "- 12(3) 24(3) 48(3) - 26(5) 50(5) 98(5) - 54(9) 102(9) 198(9)",
}


def test_words_take_from_their_tracks_what_is_there_and_i_alone_owes_a_w():
    tracks = dict(a=2 * [[(0, 0), (0, 1)]], b=2 * [[(1, 0)]])
    spelled = lambda words: [pp.show(*cell) for cell in pp.spell(words, tracks)]
    assert spelled("Fa&Fb Fa Fa Ba W Ib Ia W W W") == [
        ["F0.0", "F1.0"], ["F0.1"], ["B0.0"], ["I1.0"], ["I0.1"], ["W1.0"], ["W0.1"],
    ]  # fmt: skip
    assert spelled("Ib Ia Wa Wb Wa") == [["I1.0"], ["I0.0"], ["W0.0"], ["W1.0"]]


@question("Q4.1")
@question("Q4.2")
@question("Q4.3")
@pytest.mark.parametrize("row", TABLE)
def test_makespan_span_and_memory_are_those_of_an_independent_simulation(row):
    name, _, c = row.partition(" c=")
    shapes = [(p, k * p) for p in (2, 4, 8) for k in (1, 2, 4, 8)]
    for (p, m), wanted in zip(shapes, TABLE[row].split(), strict=True):
        if wanted != "-":
            found = re.fullmatch(r"([\d.]+)(?:/([\d.]+))?\(([\d.]+)\)", wanted)
            makespan, span, held = found.groups()
            t = simulate(SCHEDULES[name](p, m, **({"c": int(c)} if c else {})))
            assert t.makespan == float(makespan), (p, m)
            assert t.span == float(span or makespan), (p, m)
            assert max(t.peak) == float(held), (p, m)


FIGURES = {  # Zero Bubble (arXiv:2401.10241), figures 2 and 3, p = 4 and m = 8
    "1f1b": """F0F1F2F3............B0__F4B1__F5B2__F6B3__F7B4__..B5__..B6__..B7__
               ..F0F1F2........B0__F3B1__F4B2__F5B3__F6B4__F7B5__..B6__..B7__....
               ....F0F1....B0__F2B1__F3B2__F4B3__F5B4__F6B5__F7B6__..B7__........
               ......F0B0__F1B1__F2B2__F3B3__F4B4__F5B5__F6B6__F7B7__............""",
    "zb-h1": """F0F1F2F3......I0W0F4I1W1F5I2W2F6I3W3F7I4W4I5W5I6W6I7W7
                ..F0F1F2....I0F3I1W0F4I2W1F5I3W2F6I4W3F7I5W4I6W5I7W6W7
                ....F0F1..I0F2I1F3I2W0F4I3W1F5I4W2F6I5W3F7I6W4I7W5W6W7
                ......F0I0F1I1F2I2F3I3W0F4I4W1F5I5W2F6I6W3F7I7W4W5W6W7""",
    "zb-h2": """F0F1F2F3F4F5F6I0W0F7I1W1I2W2I3W3I4W4I5W5I6W6I7W7......
                ..F0F1F2F3F4I0F5I1F6I2W0F7I3W1I4W2I5W3I6W4I7W5W6W7....
                ....F0F1F2I0F3I1F4I2F5I3F6I4W0F7I5W1I6W2I7W3W4W5W6W7..
                ......F0I0F1I1F2I2F3I3F4I4F5I5F6I6W0F7I7W1W2W3W4W5W6W7""",
}


@question("Q4.1")
@question("Q4.2")
@pytest.mark.parametrize("name", FIGURES)
def test_the_figures_of_the_zero_bubble_paper_cell_for_cell(name):
    assert pp.sketch(simulate(SCHEDULES[name](4, 8))).split() == FIGURES[name].split()


KINDS = dict(FORWARD="F", FULL_BACKWARD="B", BACKWARD_INPUT="I", BACKWARD_WEIGHT="W")
TORCH = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "looped-bfs": "LoopedBFS",
    "interleaved-zb": "InterleavedZeroBubble", "zb-v": "ZBVZeroBubble", "dualpipev": "DualPipeV",
}  # fmt: skip


def torch_cells(rank):
    for action in rank:
        if action and action.computation_type.name in [*KINDS, "OVERLAP_F_B"]:
            parts = action.sub_actions or [action]
            yield tuple(Op(KINDS[a[1].name], a.stage_index, a.microbatch_index) for a in parts)


@question("Q4.1")
@question("Q4.2")
@pytest.mark.parametrize("name", TORCH)
def test_lists_are_torchs_own(name):
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    for p, m in [(p, k * p) for p in (2, 4, 8) for k in (1, 2, 4)]:
        if name == "dualpipev" and m < 2 * p:
            continue  # torch refuses these
        theirs = [list(torch_cells(rank)) for rank in get_schedule_ops(TORCH[name], p, m)]
        ours = SCHEDULES[name](p, m)
        if name == "1f1b":  # torch's table, not its runtime, is off by one on the last rank
            theirs, ours = theirs[:-1], ours[:-1]
        if name == "looped-bfs":  # torch takes a chunk's backwards last micro-batch first
            mirrored = lambda op: op._replace(microbatch=m - 1 - op.microbatch)
            turn = lambda cell: tuple(op if op.kind == "F" else mirrored(op) for op in cell)
            ours = [[turn(cell) for cell in cells] for cells in ours]
        assert ours == theirs, (p, m)


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_stage_runs_each_micro_batch_once_up_and_once_down(name):
    """pp-01: fewer micro-batches than ranks, and numbers that do not divide."""
    for p in (1, 2, 3, 4, 8):
        for m in (1, 2, 3, 4, 5, 7, 8, 12, 13):
            if not (schedule := made(name, p, m)):
                continue
            simulate(schedule)
            place = pp.placement(schedule)
            count = Counter(op[:3] for cells in schedule for cell in cells for op in cell)
            assert set(count.values()) == {1}
            stages = 1 + max(stage for _, stage in place)
            for stage in range(stages):
                for i in range(m):
                    kinds = "".join(k for k in "FBIW" if (k, stage, i) in count)
                    assert kinds in ("FB", "FIW"), (p, m, stage, i, kinds)


# bubble without comm, the most held on each rank, results sent, and of what the bubble is a part
Form = namedtuple("Form", "bubble peaks messages of")


def closed_form(name, n, m, c=2, g=None, limit=None, costs=(1, 1, 1, 0), kept=1.0):
    """Return the Form of a schedule; bubble and peaks are None where the formulas are not exact.
    DualPipe's F&B takes F + B: nothing is gained by the overlap."""
    (F, I, W, comm), g = costs, pp.group_size(n, m, g)
    B, even, cheap = I + W, F == I == W, W <= min(F, I)
    one, loop, vee = n - 1, c * n - 1, 2 * (n - 1)  # boundaries that a micro-batch passes
    bubble, peak, boundaries, exact = {  # a peak is a function of w = n - r, 1F1B's, and r
        "gpipe": (one * (F + B), lambda w, r: m, one, True),
        "1f1b": (one * (F + B), lambda w, r: min(m, w), one, True),
        "eager-1f1b": (one * (F + B), lambda w, r: min(m, 2 * w - 1), one, True),
        "interleaved": (one * (F + B) / c, lambda w, r: min(m, (2 * w - 1 + (c - 1) * g) / c),
                        loop, m >= n),
        "looped-bfs": (one * (F + B) / c, lambda w, r: m, loop, m >= n),
        "zb-h1": (one * (F + I - W), lambda w, r: w + r * kept, one, m >= n and cheap),
        "zb-h2": (one * (F + I - 2 * W), lambda w, r: 2 * w - 1 + 2 * r * kept, one,
                  m >= 2 * n - 1 and cheap),
        "zb-auto": (0, lambda w, r: 2 * n - 1, one, even and kept == 1 and m >= 2 * n - 1
                    and limit in (None, 2 * n - 1)),
        "zb-v": (0, lambda w, r: n, vee, even and m >= 2 * n),
        "interleaved-zb": (one * (F + I - W) / c, lambda w, r: (w + (c - 1) * g + r * kept) / c,
                           loop, m >= n and cheap),
        "dualpipev": (one * (F + 2 * B - 3 * W) / 2, lambda w, r: n + 1 / 2, vee,
                      even and m >= 2 * n),
        "dualpipe": ((n / 2 - 1) * (F + 2 * B - 3 * W), lambda w, r: n + 1, one,
                     even and m >= 2 * n and m % 2 == 0),
    }[name]  # fmt: skip
    form = Form(bubble, [peak(n - r, r) for r in range(n)], 2 * m * boundaries if n > 1 else 0,
                "span" if name in ("zb-h2", "zb-auto", "zb-v") else "makespan")  # fmt: skip
    return form if exact and not comm else form._replace(bubble=None, peaks=None)


@pytest.mark.parametrize("name", SCHEDULES)
def test_closed_forms_equal_the_simulation_where_they_are_exact(name):
    exact = 0
    every = [(1, 1, 1, 0), (2, 3, 1, 0), (3, 2, 2, 0), (1, 1.2, 0.7, 0), (1, 2, 1.5, 0)]
    for p in (2, 4, 8):
        for m in {1, 2, 3, p, p + 1, 2 * p - 1, 2 * p, 3 * p + 1, 4 * p, 8 * p}:
            schedule = SCHEDULES[name](p, m)
            for costs in every:
                t = simulate(schedule, costs)
                for kept in (1, 0.5):
                    form = closed_form(name, p, m, costs=costs, kept=kept)
                    assert t.messages == form.messages
                    if form.peaks:
                        exact += 1
                        whole = getattr(t, form.of)
                        assert whole - t.ideal == pytest.approx(form.bubble), (costs, p, m)
                        held = dataclasses.replace(t, kept=kept).peak
                        assert held == pytest.approx(form.peaks), (costs, kept, p, m)
    assert exact >= (12 if name in ("zb-auto", "zb-v", "dualpipe", "dualpipev") else 80)


def test_latency_costs_what_it_must():
    """Only 1F1B pays with every p micro-batches; a step further ahead hides it."""
    for p in (2, 4, 8):
        for m in (2 * p, 4 * p):
            for c in (0.1, 0.25, 1):
                more = {
                    name: simulate(SCHEDULES[name](p, m), (1, 1, 1, c)).makespan
                    - simulate(SCHEDULES[name](p, m)).makespan
                    for name in ("gpipe", "eager-1f1b", "1f1b", "interleaved")
                }
                assert more["gpipe"] == pytest.approx(2 * (p - 1) * c)
                assert more["eager-1f1b"] == pytest.approx(2 * (p - 1) * c)
                assert more["1f1b"] == pytest.approx(2 * c * ((p - 1) * m // p + p - 2))
                if c < 1:
                    assert more["interleaved"] == pytest.approx(2 * (2 * p - 1) * c)
    for p in (2, 4, 8):
        t, late = (simulate(SCHEDULES["zb-h1"](p, 4 * p), (1, 1, 1, c)).span for c in (0, 0.25))
        assert late - t == pytest.approx(4 * (p - 1) * 0.25)


@question("Q4.2")
def test_one_warm_up_forward_too_few_and_one_too_many():
    short = pp.looped(4, 8, lambda s: "F " * max(0, 2 - s) + "F B " * 8)
    assert simulate(short).makespan == 54
    long = simulate(pp.looped(4, 8, lambda s: "F " * (4 - s) + "F B " * 8))
    assert (long.makespan, long.peak) == (33, [5, 4, 3, 2])
    assert simulate(SCHEDULES["1f1b"](4, 8)).peak == [4, 3, 2, 1]


def test_greedy_zero_bubble_reaches_the_bound_of_each_memory_limit():
    for limit, bubble in [(8, 7), (10, 5), (12, 3), (15, 0)]:
        t = simulate(SCHEDULES["zb-auto"](8, 32, limit=limit, kept=0.5), kept=0.5)
        assert (t.span - t.ideal, max(t.peak) <= limit) == (bubble, True)
    assert simulate(SCHEDULES["zb-auto"](4, 8, limit=4, kept=0.5)).makespan == 27  # ZB-H1's
    for limit in (1, 2, 3):
        for costs in [(1, 1, 1, 0.5), (1, 1.3, 0.6, 2)]:
            assert max(simulate(SCHEDULES["zb-auto"](4, 8, limit=limit, costs=costs)).peak) <= limit


def test_groups_that_stall_or_deadlock():
    """pp-02: p = 8, m = 12 in groups of 8 never ends; p = 4, m = 6 in groups of 4 takes 27.5."""
    words = lambda p, m, g: lambda s: "F " * (2 * (p - 1 - s) + g) + "F B " * 2 * m
    truncated = lambda p, m, g: pp.looped(p, m, words(p, m, g), 2, g)
    with pytest.raises(ValueError, match="no rank can go on: rank 0 at F8.9 for out7.9") as stuck:
        simulate(truncated(8, 12, 8))
    assert len(re.findall(r"rank \d at \w+\.\d+ for \w+\.\d+", str(stuck.value))) == 8
    assert simulate(truncated(4, 6, 4)).makespan == 27.5
    assert simulate(SCHEDULES["interleaved"](4, 6)).makespan == 22.5
    for m in range(8, 30):  # the default group always reaches the bound
        t = simulate(SCHEDULES["interleaved"](8, m))
        assert t.makespan - t.ideal == 7 * 3 / 2
    with pytest.raises(ValueError, match=r"--group 8 with --micro-batches 12 stalls 8 ranks: .*12"):
        SCHEDULES["interleaved"](8, 12, g=8)
    peaks = [max(simulate(SCHEDULES["interleaved"](8, 24, g=g)).peak) for g in (8, 12, 24)]
    assert peaks == [11.5, 13.5, 19.5]


def test_lists_that_cannot_be_run_are_refused():
    F, B = (lambda *at: (Op("F", *at),)), (lambda *at: (Op("B", *at),))
    good = [[F(0, 0), B(0, 0)], [F(1, 0), B(1, 0)]]
    assert simulate(good).makespan == 6
    with pytest.raises(ValueError, match="rank 0 at B0.0 for grad1.0, rank 1 at B1.0 for out1.0"):
        simulate([good[0], good[1][::-1]])
    with pytest.raises(ValueError, match="rank 1 has F1.0 a second time"):
        simulate([good[0], good[1] + [F(1, 0)]])
    with pytest.raises(ValueError, match="no rank has grad0.0"):
        simulate([good[0][:1], good[1]])
    with pytest.raises(ValueError, match="no rank has dW1.0"):
        simulate([good[0], [F(1, 0), (Op("I", 1, 0),)]])
    with pytest.raises(ValueError, match="there is no I for dW0.0"):
        simulate([good[0] + [(Op("W", 0, 0),)], good[1]])
    with pytest.raises(ValueError, match="rank 0 has B0.0, and rank 1 has its stage"):
        simulate([good[0][::-1], [F(0, 1)] + good[1]])
    with pytest.raises(ValueError, match="each must be 0 or more"):
        simulate(good, (1, 1, -1, 0))
    fused = [[(Op("F", 0, 0), Op("B", 0, 0))]]
    with pytest.raises(ValueError, match="rank 0 at F0.0&B0.0 for out0.0"):
        simulate(fused)  # a cell starts when all of it can: this one needs its own result


def test_the_bubbles_of_deepseeks_table_by_its_own_letters():
    """pp-10: there, B is the whole backward; p = 8, F = W = 1, B = 2, F&B = 3."""
    ours = {name: closed_form(name, 8, 16).bubble for name in ("1f1b", "zb-h1", "dualpipe")}
    assert ours == {"1f1b": 7 * (1 + 2), "zb-h1": 7 * (1 + 2 - 2 * 1), "dualpipe": 3 * (3 + 2 - 3)}
    for name, bubble in ours.items():
        t = simulate(SCHEDULES[name](8, 16))
        assert t.makespan - t.ideal == bubble
    assert max(simulate(SCHEDULES["dualpipe"](8, 16)).peak) == 8 + 1
    with pytest.raises(ValueError, match="--ranks 3 is odd"):
        SCHEDULES["dualpipe"](3, 8)


def test_costs_by_stage_and_by_micro_batch():
    slow = simulate(SCHEDULES["1f1b"](4, 8), (lambda s, i: 1 + (s == 2), 1, 1, 0))
    assert slow.ideal == 8 * 4 and slow.makespan > 33
    uneven = simulate(SCHEDULES["gpipe"](1, 3), (lambda s, i: i, lambda s, i: 10 * i, 1, 0))
    assert uneven.makespan == 3 + 30 + 3


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_simulator_s_time_grows_as_the_operations_do(name):
    """Four times the micro-batches take about four times the time, not sixteen times."""

    def seconds(m):
        schedule, times = SCHEDULES[name](16, m), []
        for _ in range(3):
            start = time.process_time()
            simulate(schedule)
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(512) < 9 * seconds(128)


def test_a_picture_has_all_its_colours_and_numbers(tmp_path):
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    pp.gantt({"a": simulate(SCHEDULES["dualpipev"](2, 4))}, tmp_path / "a.png")
    pixels = (imread(tmp_path / "a.png")[..., :3] * 255).round().reshape(-1, 3)
    for kind, color in pp.COLORS.items():
        wanted = torch.tensor(to_rgb(color)).mul(255).round().numpy()
        assert (pixels == wanted).all(-1).sum() > 2000, kind  # the legend alone has fewer
    greys = [sum(w * c for w, c in zip((0.3, 0.59, 0.11), to_rgb(k))) for k in pp.COLORS.values()]
    first = pp.sketch(simulate(SCHEDULES["dualpipev"](2, 4))).split()[0]
    assert first == "F0F1F2f0i0w0f1F3b1__..f2B0__b2__..f3B1__b3__I2W2I3W3"
    assert all(light - dark > 0.12 for light, dark in zip(greys, greys[1:]))


def test_pictures_show_one_bubble_that_of_a_ranks_span(tmp_path):
    """27 units from first to last under zb-h2 as under zb-h1, and yet none that a rank idles in."""
    from matplotlib.axes import Axes

    titles, bubbles = [], {"1f1b": 9 / 33, "zb-h1": 3 / 27, "zb-h2": 0, "zb-v": 0}
    timelines = {name: simulate(SCHEDULES[name](4, 8)) for name in bubbles}
    assert {name: t.bubble for name, t in timelines.items()} == pytest.approx(bubbles)
    with patch.object(Axes, "set_title", lambda self, title, **_: titles.append(title)):
        pp.gantt(timelines, tmp_path / "a.png")
    shown = [re.search(r"bubble ([\d.]+)% of a rank's span", title)[1] for title in titles]
    assert shown == [f"{100 * bubble:.1f}" for bubble in bubbles.values()]


# ── the executor ─────────────────────────────────────────────────────────────────────────────


def prepared(p, shapes):
    """For every schedule and m what all ranks would reckon alike, once: (name, m, batch, schedule,
    its Timeline, the twin's answer)."""
    for m in shapes:
        batch = pp.proof_batch(m, CPU)
        twin = pp.twin_gradients(2 * p, batch)
        for name in SCHEDULES:
            schedule = made(name, p, m)
            yield name, m, batch, schedule, simulate(schedule, kept=pp.KEPT), twin


def proofs(cases):
    """What `check` finds on this rank in every case, with what it should find."""
    rows, me, p = [], dist.get_rank(), dist.get_world_size()
    for name, m, batch, schedule, t, twin in cases:
        known = dict(simulate=lambda *_: t, twin_gradients=lambda *_: twin)
        with patch.multiple(pp, **known):
            error, sent, held = pp.check(schedule, 2 * p, batch, world())
        unit = batch[0][0].numel() * 16 * 8
        form = closed_form(name, p, m, kept=pp.KEPT)
        wanted = [form.messages * unit, t.peak[me] * 2 * 9 * unit]
        formula = form.peaks[me] * 2 * 9 * unit if form.peaks else None
        rows.append((name, m, error, [sent, held], wanted, formula))
    return rows


def assert_proofs(p, shapes):
    for rows in on_ranks(p, proofs, list(prepared(p, shapes)), timeout=120):
        for name, m, error, found, wanted, formula in rows:
            assert error < 1e-10, (name, p, m)
            assert found == pytest.approx(wanted, abs=0.5), (name, p, m)
            if formula is not None:  # where no formula is exact, the simulation alone judges
                assert found[1] == pytest.approx(formula, abs=0.5), (name, p, m)


@question("Q4.4")
@question("Q4.5")
@question("Q4.6")
@pytest.mark.parametrize("p, shapes", [(2, (1, 2, 4, 8)), (4, (1, 3, 4, 8))])
def test_every_schedule_computes_sends_and_holds_what_it_should(p, shapes):
    """pp-01 too: m < p. Each micro-batch has another number of bytes that count."""
    assert_proofs(p, shapes)


@pytest.mark.slow
@pytest.mark.parametrize("p, shapes", [(4, (16,)), (8, (3, 8, 16, 32))])
def test_every_schedule_on_more_ranks(p, shapes):
    assert_proofs(p, shapes)


def trained(names, steps, optimizer=torch.optim.SGD):
    """After some steps by each schedule: this rank's parameters, by name of schedule."""
    p, results, m = dist.get_world_size(), {}, 4
    for name in names:
        schedule = made(name, p, m)
        stages = here(schedule, 2 * p)
        params = {q for _, q in named(stages)}
        stepper = optimizer(params, lr=0.1)
        for _ in range(steps):
            stepper.zero_grad()
            pp.execute(schedule, stages, pp.proof_batch(m, CPU), world())
            pp.share_gradients(schedule, stages, world())
            stepper.step()
        results[name] = {key: value.detach().tolist() for key, value in named(stages)}
    return results


def plain_step(weights, x, y, rate=0.1):
    """One SGD step of the whole model in plain torch, in place."""
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    pp.twin_loss(leaves, x, y).backward()
    for name, value in weights.items():
        value -= rate * leaves[name].grad


@pytest.mark.parametrize("p", [2, 4])
def test_tied_ends_and_copies_stay_equal_and_follow_the_twin(p):
    """pp-04: on two ranks, or on one (zb-v), or all weights twice (dualpipe). SGD shows scale."""
    wanted = pp.build(1, 2 * p)[0].double().state_dict()
    x, y, _ = zip(*pp.proof_batch(4, CPU))
    for _ in range(5):
        plain_step(wanted, torch.cat(x), torch.cat(y))
    names = "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe"
    answers = on_ranks(p, trained, names, 5)
    for name in names:
        copies = [ranks[name] for ranks in answers]
        seen = Counter(key for copy in copies for key in copy)
        assert seen.keys() == wanted.keys()
        assert seen["embedding.weight"] == (1 if name == "zb-v" else 2)
        assert set(seen.values()) - {1} == ({2} if name != "zb-v" else set())
        for key, value in wanted.items():
            alike = [copy[key] for copy in copies if key in copy]
            assert all(copy == alike[0] for copy in alike), f"copies of {key} drifted by {name}"
            assert pp.relative_error(torch.tensor(alike[0], dtype=torch.float64), value) < 1e-10


class Blocking:
    """A work that is done: the call that made it waited."""

    def wait(self):
        pass


def blocked_run(shapes):
    """The largest error, where sends and receives return only when the other side has come."""
    p, real, worst = dist.get_world_size(), (dist.isend, dist.irecv), 0.0
    blocking = [lambda *a, _real=r, **k: (_real(*a, **k).wait(), Blocking())[1] for r in real]
    for m in shapes:
        batch = pp.proof_batch(m, CPU)
        wanted, _ = pp.twin_gradients(2 * p, batch)
        for name in SCHEDULES:
            schedule = made(name, p, m)
            stages = here(schedule, 2 * p)
            with patch.object(dist, "isend", blocking[0]), patch.object(dist, "irecv", blocking[1]):
                pp.execute(schedule, stages, batch, world())
            pp.share_gradients(schedule, stages, world())
            errors = [pp.relative_error(q.grad, wanted[key]) for key, q in named(stages)]
            worst = max(worst, *errors)
    return worst


@question("Q4.6")
@pytest.mark.parametrize("p, shapes", [(2, (4, 7)), (4, (8,))])
def test_nothing_deadlocks_even_if_each_message_blocked(p, shapes):
    """pp-05: NCCL keeps the order of one stream, and p = 2 has one peer for both directions."""
    assert max(on_ranks(p, blocked_run, shapes)) < 1e-10


def shuffled(p, v, m, seed):
    """A schedule that nobody would write: any order in which it could run one at a time."""
    pick, last = random.Random(seed), p * v - 1
    place = [pick.randrange(p) for _ in range(p * v)]
    place[:p] = range(p)
    todo = [Op(k, s, i) for s in range(p * v) for i in range(m) for k in "FIW"]
    done, lists = set(), [[] for _ in range(p)]
    while todo:
        op = pick.choice([op for op in todo if all(n in done for n in pp.needs(op, last))])
        todo.remove(op)
        done.add(pp.result(op))
        lists[place[op.stage]].append((op,))
    return lists


def any_order(seeds):
    """The largest error over shuffled schedules, by seed."""
    p, batch = dist.get_world_size(), pp.proof_batch(3, CPU)
    layers = 2 * p
    return [pp.check(shuffled(p, 2, 3, seed), layers, batch, world())[0] for seed in seeds]


@question("Q4.3")
@question("Q4.6")
def test_any_order_that_can_run_is_run():
    for p in (2, 3):
        assert max(max(errors) for errors in on_ranks(p, any_order, range(6))) < 1e-10


class Wide(Sleeper):
    """A stage that passes on 64 MiB."""

    def __init__(self, last):
        super().__init__((0, 0, 0), last)

    def boundary(self, microbatch):
        return torch.empty(2**24)

    def forward(self, x, microbatch):
        first = torch.zeros(2**24, requires_grad=True) if x is None else x
        return super().forward(first, microbatch)


def wide():
    schedule = SCHEDULES["1f1b"](2, 3)
    with pp.Ledger() as ledger:
        pp.execute(schedule, {dist.get_rank(): Wide(dist.get_rank() == 1)}, range(3), world())
    return ledger.sent["isend"]


def test_large_messages_in_the_steady_state():
    """pp-05: neighbours that both send first would do so only while messages are small."""
    assert on_ranks(2, wide) == [3 * 2**26] * 2


def in_a_subgroup():
    groups = [dist.new_group(ranks) for ranks in ([3, 1], [2, 0])]
    group = groups[dist.get_rank() % 2 == 0]
    return pp.check(SCHEDULES["interleaved"](2, 4), 4, pp.proof_batch(4, CPU), group)[0]


def test_peers_are_ranks_of_the_group():
    assert max(on_ranks(4, in_a_subgroup)) < 1e-10


class Products(TorchDispatchMode):
    """Counts products of matrices, and gradients of tables."""

    COUNTED = "mm", "addmm", "bmm", "baddbmm", "embedding_dense_backward"

    def __enter__(self):
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        self.count += call.overloadpacket.__name__ in self.COUNTED
        return call(*args, **(kwargs or {}))


def frozen(name):
    """pp-09: stage 2 frozen, and one matrix of stage 1. Gradients, and W's products per cell."""
    schedule, products = SCHEDULES[name](4, 8), []
    stages = here(schedule, 8)
    stage = stages[dist.get_rank()]
    if dist.get_rank() == 2:
        stage.requires_grad_(False)
    if dist.get_rank() == 1:
        stage.blocks["2"].up.requires_grad_(False)
    run = pp._Worker.run

    def counted(self, op):
        with Products() as seen:
            output = run(self, op)
        products.extend([seen.count] if op.kind == "W" else [])
        return output

    with patch.object(pp._Worker, "run", counted):
        pp.execute(schedule, stages, pp.proof_batch(8, CPU), world())
    return {key: q.grad for key, q in named(stages)}, products


@question("Q4.4")
def test_frozen_weights_cost_no_product():
    whole, split = zip(*on_ranks(4, lambda: (frozen("1f1b"), frozen("zb-h1"))))
    weights = [5, 3, 0, 5]  # two blocks of two matrices; the first embeds, the last has the head
    for rank, ((plain, _), (deferred, products)) in enumerate(zip(whole, split)):
        assert products == [weights[rank]] * 8
        for key, value in plain.items():
            assert (value is None) == (deferred[key] is None), key
            if value is not None:
                assert pp.relative_error(deferred[key], value) < 1e-14, key
    assert all(value is None for value in split[2][0].values())
    assert split[1][0]["blocks.2.up.weight"] is None


# ── backward in two parts ────────────────────────────────────────────────────────────────────


def parts(module, *inputs, split=True, between=lambda: None):
    """A forward and a backward, whole or in two parts: the gradients of the input and of the
    parameters, and the products and the sent bytes of forward, I (or B) and W."""
    module.zero_grad()
    x = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
    leaves, backward, seen = [t for t in x if t.requires_grad], pp.SplitBackward(), []

    def counted(call):
        with Products() as products, pp.Ledger() as ledger:
            answer = call()
        seen.append((products.count, dict(ledger.sent)))
        return answer

    def forward():
        if not split:
            return module(*x)
        with backward.boxes():
            return module(*x)

    y = counted(forward)
    edges, d_y = [torch.autograd.graph.get_gradient_edge(y)], [torch.cos(y.detach())]
    del y
    if split:
        d_x = counted(lambda: backward.input_gradients(edges, d_y, leaves))
        assert all(p.grad is None for p in module.parameters())
        del edges, d_y
        between()
        counted(backward.weight_gradients)
    else:
        counted(lambda: torch.autograd.backward(edges, d_y))
        d_x = [t.grad for t in leaves]
    return [*d_x, *(p.grad for p in module.parameters())], seen


def same_in_two_parts(module, *inputs, kind="", products=None):
    """Assert equal gradients, and products of (I, W) that add up to those of B, or as given."""
    whole, (_, both) = parts(module, *inputs, split=False)
    whole = [g if g is None else g.clone() for g in whole]
    apart, (_, i, w) = parts(module, *inputs)
    for a, b in zip(whole, apart, strict=True):
        assert (a is None) == (b is None), kind
        assert a is None or pp.relative_error(b, a) < 1e-14, kind
    assert i[0] + w[0] == both[0], kind
    assert products in (None, (i[0], w[0])), kind
    return both, i, w


class Net(nn.Module):
    """A module from a function of (parameters, inputs)."""

    def __init__(self, call, *shapes):
        super().__init__()
        torch.manual_seed(0)
        weights = (nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes)
        self.call, self.w = call, nn.ParameterList(weights)

    def forward(self, *inputs):
        return self.call(*self.w, *inputs)


class Asks(torch.autograd.Function):
    """x Wᵀ, each gradient if it is asked for."""

    @staticmethod
    def forward(ctx, x, name, w):
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, d_y):
        x, w = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return d_y @ w if needs[0] else None, None, d_y.T @ x if needs[2] else None


class Whole(torch.autograd.Function):
    """x Wᵀ, both gradients, whatever is asked for."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, d_y):
        x, w = ctx.saved_tensors
        return d_y @ w, d_y.T @ x


def grouped(w, x):
    return torch.cat([F.linear(a, b) for a, b in zip(x.split([2, 0, 3]), w.unbind())])


def again(call):
    return lambda *args: checkpoint(call, *args, use_reentrant=False)


def hooked(t):
    t.register_hook(lambda grad: 2 * grad)
    return t


linear_norm = lambda w, b, g, x: F.layer_norm(F.linear(x, w, b), (6,), g)
SPLIT = {  # module, shapes of parameters and input, products of (I, W)
    "bias and norm": (lambda w, b, g, v, x: linear_norm(w, b, g, x).relu() @ v,
                      [(6, 6), (6,), (6,), (6, 6)], (5, 6), (2, 2)),
    "checkpoint": (again(lambda w, b, g, v, x: linear_norm(w, b, g, x).relu() @ v),
                   [(6, 6), (6,), (6,), (6, 6)], (5, 6), (3, 2)),  # one forward again, in I
    "bmm": (lambda w, v, x: torch.bmm(torch.bmm(x, w).tanh(), v),
            2 * [(3, 6, 6)], (3, 2, 6), (2, 2)),
    "experts, one empty": (lambda w, v, x: grouped(v, grouped(w, x).relu()),
                           2 * [(3, 6, 6)], (5, 6), (6, 6)),
    "a weight in two layouts": (lambda w, x: (x @ w).tanh() @ w.T, [(6, 6)], (5, 6), (2, 2)),
    "two weights of one use": (lambda b, w, x: torch.addmm(b, x, w),
                               [(5, 6), (6, 6)], (5, 6), (1, 1)),
    "a tensor with two uses": (lambda w, x: (x @ w).tanh() @ w, [(6, 6)], (5, 6), (4, 0)),
    "a Function that asks": (lambda w, v, x: Asks.apply(Asks.apply(x, "", w).tanh(), "", v),
                             2 * [(6, 6)], (5, 6), (2, 2)),
    "a Function that does not": (lambda w, v, x: Whole.apply(x, w).tanh() @ v,
                                 2 * [(6, 6)], (5, 6), (3, 1)),
    "a hook on a product": (lambda w, v, x: hooked(x @ w).tanh() @ v, 2 * [(6, 6)], (5, 6), (3, 1)),
    "cast": (lambda w, x: F.linear(x.float(), w.float()).double(), [(6, 6)], (5, 6), (1, 1)),
    "direct, and by a view": (lambda w, x: (x @ w).tanh() @ w + x @ w.T, [(6, 6)], (5, 6), (6, 0)),
    "weight unused": (lambda w, v, x: x @ v, 2 * [(6, 6)], (5, 6), (1, 1)),
}  # fmt: skip


@question("Q4.4")
def test_i_computes_no_weight_gradient_and_w_the_rest():
    for kind, (call, shapes, size, products) in SPLIT.items():
        module, x = Net(call, *shapes), torch.randn(size, dtype=torch.float64)
        same_in_two_parts(module, x, kind=kind, products=products)


def test_weights_are_trained_where_the_input_is_not_used():
    module = Net(lambda w, x: (w @ w.T).tanh(), (6, 6))
    (_, whole), (nothing, apart) = (
        [g if g is None else g.clone() for g in parts(module, torch.ones(5, 6), split=split)[0]]
        for split in (False, True)
    )
    assert nothing is None and pp.relative_error(apart, whole) < 1e-14


@question("Q4.4")
def test_a_first_stage_passes_gradients_on_in_i_and_ends_with_its_table_in_w():
    def call(table, w, v, ids):
        h = F.embedding(ids, table)
        return (h + (h @ w).relu() @ v) @ table.T

    shapes = [(9, 6), (6, 6), (6, 6)]
    same_in_two_parts(Net(call, *shapes), torch.randint(9, (5,)), products=(3, 4))


def test_a_hook_that_would_run_twice_is_refused():
    module = Net(lambda w, x: x @ w, (6, 6))
    module.w[0].register_hook(lambda grad: 2 * grad)
    with pytest.raises(ValueError, match="use register_post_accumulate_grad_hook"):
        parts(module, torch.randn(5, 6, dtype=torch.float64))


def test_hooks_of_parameters_fire_once_and_in_w():
    module, seen = Net(linear_norm, (6, 6), (6,), (6,)), []
    for k, p in enumerate(module.parameters()):
        p.register_post_accumulate_grad_hook(lambda p, k=k: seen.append(k))
    parts(module, torch.randn(5, 6, dtype=torch.float64), between=lambda: seen.append("W"))
    assert seen[0] == "W" and sorted(seen[1:]) == [0, 1, 2]


@question("Q4.4")
def test_memory_is_free_after_i_but_for_the_inputs_of_products():
    """Of relu(xW)V, I leaves x and relu(xW); W leaves nothing."""
    alive, sizes = {}, []

    def note(name, t):
        weakref.finalize(t.untyped_storage(), alive.pop, name)
        alive[name] = t.nbytes
        return t

    def call(w, v, x):
        h = note("h", note("product", x @ w).sigmoid())
        return note("y", note("exp", h.exp()) @ v)

    module = Net(call, (6, 6), (6, 6))
    x = torch.randn(5, 6, dtype=torch.float64)
    parts(module, x, between=lambda: sizes.append(sorted(alive)))
    assert sizes == [["exp"]] and not alive


def other_chapters():
    """03's layers under SP and 05's experts with an auxiliary loss, in two parts on two ranks: the
    bytes of I and W beside those of B, and the products of I and W."""
    tp, ep, found = chapter("03_tp"), chapter("05_ep"), {}
    torch.set_default_dtype(torch.float64)
    for sp in ("off", "keep", "regather", "overlap"):
        torch.manual_seed(0)
        layers = (tp.ColumnParallelLinear(8, 16, world(), True, sp),
                  tp.RowParallelLinear(16, 8, world(), True, sp))  # fmt: skip
        net = nn.Sequential(tp.RMSNorm(8), layers[0], nn.GELU(), layers[1])
        x = torch.randn(2, 8 if sp == "off" else 4, 8)
        found[sp] = same_in_two_parts(net, x)
    torch.manual_seed(0)
    moe = ep.MoE(ep.Router(8, 4, 2, balance=1.0, group=world()), 4, world())
    found["experts"] = same_in_two_parts(moe, torch.randn(2, 6, 8))
    return found


@question("Q4.4")
def test_layers_of_other_chapters_split_and_no_collective_runs_twice():
    for found in on_ranks(2, other_chapters):
        for kind, ((_, both), i, w) in found.items():
            assert Counter(i[1]) + Counter(w[1]) == Counter(both), kind
            assert not Counter(w[1]), kind
        for sp in ("off", "keep", "regather"):
            assert [part[0] for part in found[sp][1:]] == [2, 2], sp
        assert found["overlap"][2][0] == 0  # a Function that does not ask: whole, in I
        assert found["experts"][2][0] >= 5  # four matrices of two experts, and the router's


def validation():
    batch, p = pp.proof_batch(3, CPU), dist.get_world_size()
    up = lambda cells: [cell for cell in cells if cell[0].kind == "F"]
    schedule = [up(cells) for cells in SCHEDULES["zb-v"](p, 3)]
    stages = here(schedule, 2 * p)
    scale = pp.Scale([block for stage in stages.values() for block in stage.blocks.values()])
    losses, _ = pp.execute(schedule, stages, batch, world())
    grads = [q.grad for _, q in named(stages)]
    return sum(losses.values(), torch.zeros(())).item(), len(losses), scale.peak, grads


def test_lists_of_only_forwards_validate():
    _, loss = pp.twin_gradients(4, pp.proof_batch(3, CPU))
    answers = on_ranks(2, validation)
    assert answers[0][0] == pytest.approx(loss.item(), rel=1e-12)
    assert [answer[1] for answer in answers] == [3, 0]
    for _, _, saved, grads in answers:
        assert saved == 0 and set(grads) == {None}


def alive_outputs():
    """GPipe: the most sent tensors that were alive when one more was sent."""
    sent, most, real = [], [0], dist.isend

    def isend(tensor, **kwargs):
        most[0] = max(most[0], sum(ref() is not None for ref in sent))
        sent.append(weakref.ref(tensor))
        return real(tensor, **kwargs)

    with patch.object(dist, "isend", isend):
        pp.check(SCHEDULES["gpipe"](2, 12), 4, pp.proof_batch(12, CPU), world(), share=False)
    return most[0], len(sent)


def test_an_output_is_freed_once_it_is_sent():
    for most, sent in on_ranks(2, alive_outputs):
        assert sent == 12 and most <= 2


class Logged:
    """A message whose wait is logged."""

    def __init__(self, log, what, work):
        self.log, self.what, self.work = log, what, work

    def wait(self):
        self.log.append(("wait", self.what))
        self.work.wait()


def overlapped(name):
    """For receives and for sends: how many this rank posted, how many of them before a computation
    that came before their wait, and how many it had open at once."""
    log, run, real = [], pp._Worker.run, (dist.irecv, dist.isend)
    model = [Sleeper((0.001,) * 3, stage == 3) for stage in range(4)]
    stages = pp.mine(SCHEDULES[name](4, 8), model, world())

    def logged_run(self, op):
        log.append(("run", op))
        return run(self, op)

    def logged(what, call):
        def post(*args, **kwargs):
            log.append((what, len(log)))
            return Logged(log, len(log) - 1, call(*args, **kwargs))

        return post

    calls = {call.__name__: logged(call.__name__, call) for call in real}
    with patch.object(pp._Worker, "run", logged_run), patch.multiple(dist, **calls):
        pp.execute(SCHEDULES[name](4, 8), stages, range(8), world())
    counts = []
    for kind in ("irecv", "isend"):
        posts = [number for what, number in log if what == kind]
        between = [log[number : log.index(("wait", number))] for number in posts]
        hidden = sum(any(what == "run" for what, _ in events) for events in between)
        waits = [log.index(("wait", number)) for number in posts]
        most = max(sum(post <= at <= wait for post, wait in zip(posts, waits)) for at in posts)
        counts.append((len(posts), hidden, most))
    return counts


@question("Q4.6")
def test_messages_are_posted_ahead_of_a_computation_that_hides_them():
    least = {"gpipe": [7, 14, 14, 7], "1f1b": [4, 4, 4, 0]}
    for name, ranks in zip(least, zip(*on_ranks(4, lambda: [*map(overlapped, least)]))):
        received, sent = zip(*ranks)
        counts = [[posted for posted, *_ in kind] for kind in (received, sent)]
        assert counts == [[8, 16, 16, 8]] * 2
        assert all(hid >= ahead for (_, hid, _), ahead in zip(received, least[name])), received
        assert all(hidden >= posted - 3 for posted, hidden, _ in sent), sent
        assert all(most <= 3 for *_, most in received + sent), "an open message holds a buffer"


class Clock(torch.nn.Module):
    """A stage that takes time, and passes on by which time it was done: by its rank's own clock,
    which counts the work of the rank and, where that is later, the time in a message. No message
    that is on its way and no rank that waits for a core can put it off."""

    def __init__(self, stage, last, now, events):
        super().__init__()
        self.stage, self.last, self.now, self.events = stage, stage == last, now, events
        self.weight = nn.Parameter(torch.zeros(1, 1))
        self.seconds = 1e-4 * (1 + 3 * stage % 5)

    def boundary(self, microbatch):
        return torch.empty((), dtype=torch.float64)

    def take(self, kind, i, after=0.0):
        """Work; returns the time when it is done."""
        begun = time.perf_counter()
        time.sleep(self.seconds * (1 + (7 * i + ord(kind)) % 5))
        start = max(self.now[0], float(after))
        self.now[0] = start + time.perf_counter() - begun
        self.events.append((Op(kind, self.stage, i), start, self.now[0]))
        return torch.tensor(self.now[0], dtype=torch.float64)

    def forward(self, x, i):
        x = torch.zeros((), dtype=torch.float64, requires_grad=True) if x is None else x
        return _Tick.apply(x, self.weight, self, i)


class _Tick(torch.autograd.Function):
    """What arrives, either way, is a time; so is what leaves."""

    @staticmethod
    def forward(ctx, x, weight, clock, i):
        ctx.clock, ctx.i = clock, i
        return clock.take("F", i, x)

    @staticmethod
    def backward(ctx, d_y):
        kind = {(True, True): "B", (True, False): "I", (False, True): "W"}[ctx.needs_input_grad[:2]]
        after = 0.0 if ctx.clock.last or kind == "W" else d_y  # of the loss itself: no time
        return ctx.clock.take(kind, ctx.i, after), torch.zeros(1, 1), None, None


UNFUSED = [name for name in SCHEDULES if not name.startswith("dualpipe")]


def clocked(m):
    """Of a run by each schedule: its Timeline by the ranks' own clocks, and by the machine's."""
    found, me = {}, dist.get_rank()
    for name in UNFUSED:
        schedule, now, events = made(name, dist.get_world_size(), m), [0.0], []
        last = max(pp.placement(schedule))[1]
        stages = {stage: Clock(stage, last, now, events) for stage in range(last + 1)}
        _, timed = pp.execute(schedule, stages, range(m), world())
        own = [pp.Timed(me, (op,), start, end) for op, start, end in events]
        found[name] = asleep.together(own, world()), asleep.together(timed, world())
    return found


def test_measured_durations_simulated_give_the_measured_order():
    """With no slack. By the ranks' own clocks all starts are as simulated, and so is the order of
    all events; by the machine's, which counts messages and waits for a core as well, the order of
    each rank is its list's, nothing starts before what it needs has ended, nor before its time."""
    p, m = 3, 5
    for name, (own, real) in on_ranks(p, clocked, m)[0].items():
        schedule = made(name, p, m)
        last = max(pp.placement(schedule))[1]
        starts = lambda t: {cell.ops: cell.start for cell in t.cells}
        predicted, found = starts(asleep.replay(own, schedule)), starts(own)
        assert predicted == pytest.approx(found, abs=1e-9), name
        assert sorted(predicted, key=predicted.get) == sorted(predicted, key=found.get), name
        assert [[cell.ops for cell in cells] for cells in real.ranks] == schedule, name
        ended = {pp.result(op): cell.end for cell in real.cells for op in cell.ops}
        soonest = starts(asleep.replay(real, schedule))
        for (op,), start in starts(real).items():
            assert all(ended[need] <= start for need in pp.needs(op, last)), (name, op)
            assert start >= soonest[op,] - 1e-9, (name, op)


def test_a_fused_cell_is_replayed_at_the_time_it_took():
    for name in ("dualpipe", "dualpipev"):
        schedule = SCHEDULES[name](4, 8)
        t = simulate(schedule)
        assert asleep.replay(t, schedule).makespan == t.makespan


def test_the_table_of_predictions_row_by_row(capsys):
    wanted = {"1f1b": "33 9 27.3% 9 4 48", "zb-h2": "27 3 11.1% 0 7 48"}
    for name, row in wanted.items():
        assert command_line("--simulate", "--schedule", name) == 0
        assert capsys.readouterr().out.splitlines()[-1].split() == [name, *row.split()]


def test_bubbles_drawn_are_those_of_a_ranks_span(tmp_path):
    from matplotlib.axes import Axes

    drawn, plot = {}, Axes.plot

    def note(self, x, y, *look, label):
        drawn[label] = y
        return plot(self, x, y, *look, label=label)

    with patch.object(Axes, "plot", note):
        importlib.import_module("make").draw_bubbles(tmp_path / "a.png", 4)
    shares = [300 / (k * 4 + 3) for k in (1, 2, 3, 4, 6, 8)]
    assert drawn["gpipe = 1f1b = eager-1f1b"] == pytest.approx(shares)
    assert drawn["zb-h2 = zb-auto = zb-v"] == pytest.approx([20, 0, 0, 0, 0, 0])


def test_panels_share_a_scale_and_second_chunks_and_directions_have_a_foot(tmp_path):
    from matplotlib.axes import Axes

    limits, feet, set_, barh = [], [0], Axes.set, Axes.barh

    def noted_set(self, **given):
        limits.extend([given["xlim"]] if "xlim" in given else [])
        return set_(self, **given)

    def noted_barh(self, *at, color, **look):
        feet[0] += color == "black"
        return barh(self, *at, color=color, **look)

    timelines = {name: simulate(SCHEDULES[name](2, 4)) for name in ("gpipe", "dualpipe", "zb-v")}
    with patch.object(Axes, "set", noted_set), patch.object(Axes, "barh", noted_barh):
        pp.gantt(timelines, tmp_path / "a.png")
    assert limits == [(0, timelines["gpipe"].makespan)] * 3
    second = [op for t in timelines.values() for c in t.cells for op in c.ops
              if op.direction or op.stage >= 2]
    assert feet[0] == len(second) > 0


def test_forwards_alone_hold_nothing():
    up = [[cell for cell in cells if cell[0].kind == "F"] for cells in SCHEDULES["1f1b"](2, 3)]
    assert simulate(up).peak == [0, 0]


def given(**more):
    plain = dict.fromkeys(("schedule", "chunks", "group", "limit", "text"))
    plain |= dict(micro_batches=3, steps=3, costs=(1, 1, 1, 0))
    return argparse.Namespace(**plain | more)


def batches(steps, m):
    """Batches of random bytes; micro-batches differ in how many labels count. One step has none."""
    for step in range(steps):
        x, y = torch.randint(256, (2, 2 * m, 8), generator=torch.Generator().manual_seed(step))
        for i in range(2 * m):
            y[i, : i % 7] = -100
        yield x, y.fill_(-100) if step == 3 else y


def six_steps(name, m):
    """This rank's weights after six steps of `train_step`, and its losses."""
    schedule = SCHEDULES[name](dist.get_world_size(), m)
    stages = here(schedule, 8)
    optimizer = torch.optim.SGD({q for _, q in named(stages)}, lr=0.1, momentum=0.9)
    losses = [pp.train_step(schedule, stages, optimizer, x, y, m, world()).item()
              for x, y in batches(6, m)]  # fmt: skip
    return {key: value.detach().tolist() for key, value in named(stages)}, losses


@question("Q4.5")
@pytest.mark.parametrize("p, name", [(1, "gpipe"), (2, "1f1b"), (2, "zb-v"), (4, "zb-h1")])
def test_six_training_steps_are_those_of_one_process(p, name):
    """The loop that main runs, beside a plain one on whole batches; a step without labels is left
    out. The embedding's weight, tied, is one parameter."""
    weights = {k: v.requires_grad_() for k, v in pp.build(1, 8)[0].double().state_dict().items()}
    optimizer, losses = torch.optim.SGD(weights.values(), lr=0.1, momentum=0.9), []
    for x, y in batches(6, 4):
        if (y != -100).any():
            optimizer.zero_grad()
            losses.append(pp.twin_loss(weights, x, y))
            losses[-1].backward()
            optimizer.step()
        else:
            losses.append(torch.zeros(()))
    answers = on_ranks(p, six_steps, name, 4)
    seen = set()
    for rank, _ in answers:
        for key, value in rank.items():
            seen.add(key)
            found = torch.tensor(value, dtype=torch.float64)
            assert pp.relative_error(found, weights[key].detach()) < 1e-10, key
    assert seen == weights.keys()
    total = [sum(step) for step in zip(*(found for _, found in answers))]
    assert total == pytest.approx([loss.item() for loss in losses], rel=1e-10)


def proven():
    return pp.prove(list(pp.proof(given(), world(), CPU)), CPU)


def test_the_printed_proof_is_as_claimed():
    assert on_ranks(2, proven) == [0, 0]


def test_greedy_zero_bubble_goes_by_the_costs_it_is_given():
    for costs, makespan in [((1, 1, 1, 0.5), 34), ((2, 3, 1, 0.5), 68), ((3, 2, 2, 0), 67)]:
        schedule = SCHEDULES["zb-auto"](4, 8, limit=4, costs=costs)
        assert simulate(schedule, costs).makespan == pytest.approx(makespan)


# ── ranks agree, and nothing is dropped ──────────────────────────────────────────────────────


class Plain(nn.Module):
    """A stage from a function of (weight, x, micro-batch)."""

    def __init__(self, call, shape=(4,), dtype=torch.float32, room=None):
        super().__init__()
        self.call, self.w = call, nn.Parameter(torch.ones(shape, dtype=dtype))
        self.room = torch.empty(shape, dtype=dtype) if room is None else room

    def boundary(self, microbatch):
        return self.room

    def forward(self, x, microbatch):
        return self.call(self.w, x, microbatch)


def run_plain(calls, given, m=2, rooms=(None, None), shape=(4,), dtypes=2 * [torch.float32]):
    """This rank's gradient after 1F1B over two ranks, of stages from two functions."""
    r = dist.get_rank()
    stage = Plain(calls[r], shape, dtypes[r], rooms[r])
    pp.execute(SCHEDULES["1f1b"](dist.get_world_size(), m), {r: stage}, given, world())
    return stage.w.grad.tolist()


first = lambda w, x, i: i * w
last = lambda w, x, i: (x * w).sum()


def refused(*args, **kwargs):
    """The sentence of a run on two ranks that is refused."""
    with pytest.raises(RankFailed) as failed:
        on_ranks(2, lambda: run_plain(*args, **kwargs))
    return str(failed.value).strip().splitlines()[-1]


def test_ranks_that_have_other_lists_are_told_the_first_that_differs():
    def other_groups():
        schedule = SCHEDULES["interleaved"](2, 4, g=(2, 4)[dist.get_rank()])
        pp.execute(schedule, here(schedule, 4), pp.proof_batch(4, CPU), world())

    told = r"Disagreement: .*rank 1 has F0\.2 at place 2 of list 0, rank 0 has F2\.0"
    with pytest.raises(RankFailed, match=told):
        on_ranks(2, other_groups)


def test_as_many_micro_batches_as_the_schedule_has():
    ones = 8 * [torch.ones(4)]
    assert "has 4 micro-batches, and 8 are given" in refused([first, last], ones, 4)
    assert "has 8 micro-batches, and 4 are given" in refused([first, last], ones[:4], 8)
    assert on_ranks(2, run_plain, [first, last], ones, 8) == [[8.0] * 4] * 2


def test_what_arrives_is_what_there_is_room_for():
    half, brain, ones = torch.float16, torch.bfloat16, 2 * [torch.ones(4)]
    to_half = [lambda w, x, i: i.half() * w, last]
    sentence = refused(to_half, ones, dtypes=[half, brain])
    assert "F0.0 returns (4,) torch.float16, and boundary() of stage 1 makes room for" in sentence
    two = [lambda w, x, i: (i * w, i), last]
    assert "returns (4,) torch.float32, (4,) torch.float32, and" in refused(two, ones)
    narrow = on_ranks(2, run_plain, [lambda w, x, i: i * w, last], ones, 2)
    assert narrow == [[2.0] * 4] * 2


def test_boundaries_of_any_kind():
    """Not contiguous; two tensors, one of them of integers; other widths up and down; one that a
    micro-batch does not use: its gradient is zeros."""
    ones, square = [torch.ones(2, 2), 2 * torch.ones(2, 2)], (2, 2)
    plain = [[[3.0, 3.0]] * 2] * 2
    turned = [lambda w, x, i: (i * w).t().contiguous().t(), last]
    assert on_ranks(2, run_plain, turned, ones, 2, (None, None), square) == plain
    pair = [lambda w, x, i: (torch.arange(2), i * w), lambda w, x, i: (x[1] * w * x[0].max()).sum()]
    room = None, (torch.arange(2), torch.empty(2, 2))
    assert on_ranks(2, run_plain, pair, ones, 2, room, square) == plain
    wide = [lambda w, x, i: torch.cat([i * w, i * w], 1), lambda w, x, i: (x[:, :2] * w).sum()]
    assert on_ranks(2, run_plain, wide, ones, 2, (None, torch.empty(2, 4)), square) == plain
    unused = [first, lambda w, x, i: ((x if i[0, 0] == 1 else i) * w).sum()]
    assert on_ranks(2, run_plain, unused, ones, 2, (None, None), square)[0] == [[1.0, 1.0]] * 2


def in_bf16(m, twice):
    given = [torch.tensor([g]).bfloat16() for g in [1.0] + [2.0**-9] * (m - 1)]
    stage = Plain(lambda w, x, i: (i * w).sum(), (1,), torch.bfloat16)
    for _ in range(1 + twice):
        pp.execute(SCHEDULES["gpipe"](1, m), {0: stage}, given, world())
    return stage.w.grad.item()


def test_micro_batches_in_bf16_add_up_in_fp32():
    assert on_ranks(1, in_bf16, 9, False) == [1.015625]
    assert on_ranks(1, in_bf16, 9, True) == [2.03125]


def shared(how):
    """The gradient of the tied weight beside the twin's, after two runs of two micro-batches."""
    schedule, batch = SCHEDULES["1f1b"](2, 2), pp.proof_batch(4, CPU)
    stages, (wanted, _) = here(schedule, 2), pp.twin_gradients(2, batch)
    for k in range(2):
        pp.execute(schedule, stages, batch[2 * k : 2 * k + 2], world())
        for _ in range(how.count("each")):
            pp.share_gradients(schedule, stages, world())
    for _ in range(how.count("last")):
        pp.share_gradients(schedule, stages, world())
    (stage,) = stages.values()
    return pp.relative_error(stage.embedding.weight.grad, wanted["embedding.weight"])


def test_ends_are_added_up_once_a_step():
    """Once after the last run, as often as one likes; after each run, it is refused."""
    assert max(on_ranks(2, shared, "last")) < 1e-10
    assert max(on_ranks(2, shared, "last last")) < 1e-10
    with pytest.raises(RankFailed, match="embedding.weight was added up already"):
        on_ranks(2, shared, "each")


def another_tie():
    """A norm that stands in the stages of three ranks: its gradient on each."""
    schedule, r = SCHEDULES["1f1b"](3, 2), dist.get_rank()
    stage = Plain(lambda w, x, i: (w * (i if x is None else x)).sum().expand(1) if r < 2
                  else (w * x).sum(), (1,))  # fmt: skip
    pp.execute(schedule, {r: stage}, 2 * [torch.full((1,), 3.0)], world())
    pp.share_gradients(schedule, {r: stage}, world())
    return stage.w.grad.item()


def test_a_tie_of_any_name_is_summed_over_all_its_ranks():
    assert on_ranks(3, another_tie) == [3 * 2 * 3.0] * 3


def without_labels():
    schedule, batch = SCHEDULES["1f1b"](2, 2), pp.proof_batch(2, CPU)
    batch = [(x, torch.full_like(y, -100), torch.tensor(0)) for x, y, _ in batch]
    stages = here(schedule, 2)
    losses, _ = pp.execute(schedule, stages, batch, world())
    return [loss.item() for loss in losses.values()], [q.grad.any() for _, q in named(stages)]


def test_a_step_in_which_no_label_counts_has_loss_and_gradients_of_zero():
    answers = on_ranks(2, without_labels)
    assert [losses for losses, _ in answers] == [[], [0.0, 0.0]]
    assert not any(any(moved) for _, moved in answers)


def test_a_list_printed_with_its_messages():
    lists = SCHEDULES["1f1b"](2, 2)
    assert pp.messages(lists, 0) == "F0 >1  F1 >1  B0 <1  B1 <1"
    assert pp.messages(lists, 1) == "F0 <0  B0 >0  F1 <0  B1 >0"
    assert pp.messages(SCHEDULES["1f1b"](3, 1), 1) == "F0 <0 >2  B0 <2 >0"
    assert pp.messages(SCHEDULES["zb-v"](2, 1), 1).split("  ")[:2] == ["F1.0 <0", "F2.0 >0"]
    assert pp.messages(SCHEDULES["dualpipe"](2, 2), 0).startswith("F0.0 >1")


# ── as its user runs it ──────────────────────────────────────────────────────────────────────


def command_line(*words):
    """The exit status of the script in this process, where torch is imported; no ranks start."""
    with patch.object(sys, "argv", [str(SCRIPT), *map(str, words)]):
        with patch.object(pp.mp, "start_processes", side_effect=AssertionError("ranks started")):
            try:
                runpy.run_path(str(SCRIPT), run_name="__main__")
            except SystemExit as done:
                return done.code or 0
    return 0


@pytest.mark.parametrize("wrong, says", [
    (["--micro-batches", 0], "--micro-batches 0: at least 1"),
    (["--chunks", 0], "--chunks 0: at least 1"),
    (["--schedule", "dualpipe", "--ranks", 3], "--ranks 3 is odd"),
    (["--schedule", "gpipe", "--chunks", 2], "--chunks 2 means nothing to --schedule gpipe"),
    (["--schedule", "interleaved", "--group", 3], "--group 3 with --micro-batches 8 stalls 4"),
    (["--schedule", "zb-auto", "--limit", 0], "--limit 0"),
    (["--costs", "1,1,1"], "four numbers"),
    (["--costs=-1,1,1,0"], "each must be 0 or more"),
    (["--simulate", "--costs", "1,1,1"], "four numbers"),
    (["--costs", "1,1,nan,0"], "each must be 0 or more"),
    (["--costs", "1,1,inf,0"], "each must be 0 or more"),
    (["--costs", "1,1,x,0"], "--costs 1,1,x,0: four numbers"),
    (["--costs", "0,0,0,1"], "one of F, I and W must take time"),
    (["--simulate", "--plot", "a.png"], "leave out --simulate"),
    (["--simulate", "--ranks", 0], "--ranks 0"),
    (["--steps", -1], "--steps -1"),
])  # fmt: skip
def test_what_cannot_work_is_a_sentence(wrong, says, capsys):
    assert command_line(*wrong) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.count("\n") == 1


def test_predictions_need_no_ranks(capsys):
    shape = "--ranks", 16, "--micro-batches", 64, "--schedule", "zb-h1"
    assert command_line("--simulate", *shape) == 0
    assert re.search(r"zb-h1 +207 +15 ", capsys.readouterr().out)
    assert command_line("--simulate", "--costs", "2,3,1,0.5", "--schedule", "1f1b") == 0
    t = simulate(SCHEDULES["1f1b"](4, 8), (2, 3, 1, 0.5))
    assert re.search(rf"1f1b +{t.makespan:g} ", capsys.readouterr().out)
    assert command_line("--list") == 0
    listed = capsys.readouterr().out
    assert all(f"{name}\n" in listed for name in SCHEDULES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_it_learns_from_text(name):
    done = run_script(SCRIPT, "--ranks", 2, "--steps", 21, "--schedule", name)
    assert done.returncode == 0, done.stdout + done.stderr
    entropy = float(re.search(r"entropy is ([\d.]+)", done.stdout)[1])
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[0] > entropy + 1  # what has not been trained knows less than the unigrams
    assert losses[-1] < entropy - 0.3


@pytest.mark.slow
def test_it_draws_the_chosen_schedule_and_does_not_train(tmp_path):
    picture = tmp_path / "a.png"
    done = run_script(SCRIPT, "--ranks", 2, "--schedule", "zb-v", "--plot", picture)
    assert done.returncode == 0 and "loss " not in done.stdout, done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"] and picture.stat().st_size > 1e4
