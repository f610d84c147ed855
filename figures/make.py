"""Draws the README's pictures from the chapters: nothing in them is drawn by hand or timed.

    python figures/make.py                all of them, beside this file
    python figures/make.py 07_5d 02_zero  these

A picture is its data: every bar, line and word, as matplotlib holds it before it becomes pixels.
Each function below returns it, and its hash is written into the PNG, so that a test can tell a
picture that its chapter would no longer draw, whatever fonts a machine has.
"""

import argparse
import hashlib
import importlib
import itertools
import json
import sys
import tempfile
from contextlib import contextmanager, redirect_stdout
from io import BytesIO
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text
from PIL import Image
from PIL.PngImagePlugin import PngInfo

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
dp, zero, tp, pp, cp, five, memory = (
    importlib.import_module(name)
    for name in "01_dp 02_zero 03_tp 04_pp_schedules 06_cp_ring 07_5d memory_math".split()
)

COLOURS = {"pp": "#0b3c5d", "dp": "#b23a48", "cp": "#2e7d55", "tp": "#c77d0a", "ep": "#6a4c93"}
DARK, MIDDLE, LIGHT, FAINT = "#0b3c5d", "#6fa8c9", "#d6e6f0", "#e6e6e6"  # apart in greyscale too
PIXELS = 100  # per inch: nine inches are the width of a README


# ── a picture is its data ────────────────────────────────────────────────────────────────────


def data_of(figure):
    """What a figure shows: words as they are, bars and curves by their points, six digits each."""
    short = lambda points: [[float(f"{x:.6g}") for x in point] for point in points]
    shown = []
    for artist in figure.findobj(lambda a: isinstance(a, Text | Line2D | Patch | Collection)):
        if not artist.get_visible() or artist in (figure.patch, *(a.patch for a in figure.axes)):
            continue
        if isinstance(artist, Text) and artist.get_text():
            shown.append(artist.get_text())
        elif isinstance(artist, Line2D) and artist.axes and len(artist.get_xdata()) > 1:
            shown.append(short(artist.get_xydata()))
        elif isinstance(artist, Patch) and artist.axes:
            transform = artist.get_patch_transform()
            shown.append(short(transform.transform_path(artist.get_path()).vertices))
        elif isinstance(artist, Collection):
            shown += [short(path.vertices) for path in artist.get_paths()]
    return shown


def fingerprint(data):
    """The hash that a picture carries of its data."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


@contextmanager
def recorded(path, size=None):
    """Inside, what a chapter saves goes to `path`, on white, with the hash of its data, in (width,
    height) inches if given. Yields the list that then has the data."""
    real, data = Figure.savefig, []

    def save(figure, *_, **given):
        if size:
            figure.set_size_inches(size)
        real(figure, pixels := BytesIO(), dpi=PIXELS, facecolor="white")
        data.extend(data_of(figure))  # ticks are chosen when drawn
        about = PngInfo()
        about.add_text("Data", fingerprint(data))
        picture = Image.open(pixels).convert("RGB").quantize(64, dither=Image.Dither.NONE)
        picture.save(path, "PNG", optimize=True, pnginfo=about)

    with patch.object(Figure, "savefig", save):
        yield data


def on_ranks(function, args):
    """What rank 0 of args.ranks returns of function(args, device); the chapters' own launcher
    starts them. Raises RuntimeError if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        args.function, args.answer = function, Path(folder, "answer")
        try:
            dp.launch(_answer, args, validate=lambda args, ranks: None)
        except SystemExit as done:
            if done.code:
                raise RuntimeError(f"{function.__name__}: a rank failed") from None
        return json.loads(args.answer.read_text())


def _answer(args, device):
    found = args.function(args, device)
    if dist.get_rank() == 0:
        args.answer.write_text(json.dumps(found))
    return 0


# ── the whole idea: 07's grid, what its ranks hold, what its links carry ─────────────────────

AXES = {  # axis: what it splits, what moves over it
    "pp": ("layers", "activations on, their gradients back"),
    "dp": ("samples", "gradients summed, weights gathered"),
    "cp": ("positions", "keys and values round a ring"),
    "tp": ("heads, widths", "the tokens of a layer"),
    "ep": ("experts", "tokens to their experts and back"),
}


def grid_of_07(args, device):
    """Of 07's default run: {"groups": {axis: rank numbers}, "holds": per rank {axis: (parts that it
    holds, of how many)}, "sent": {axis: bytes of rank 0 in a step, by the ledger}}."""
    grid = five.Grid(args.pp, args.dp, args.cp, args.tp, args.ep, args.order)
    model, at = five.Model(args, grid, device), grid.at
    m, S = args.micro_batches, args.length
    x_BS, y_BS = torch.randint(256, (2, args.batch, S), generator=torch.Generator().manual_seed(0))
    with dp.Ledger() as ledger:
        model.step(x_BS, y_BS, args.rate)
    part = lambda axis, count: torch.arange(count).chunk(grid.size(axis))[at[axis]].tolist()
    blocks = [int(k) for stage in model.stages.values() for k in stage.blocks]
    samples = [s.chunk(grid.size("dp"))[at["dp"]] for s in torch.arange(args.batch).chunk(m)]
    positions = cp.positions(S, grid["cp"], model.layout, args.tp)
    mine = {
        "pp": (blocks, args.layers), "dp": (torch.cat(samples).tolist(), args.batch),
        "cp": (sorted(positions.tolist()), S), "tp": (part("tp", args.heads), args.heads),
        "ep": (part("ep", args.experts), args.experts),
    }  # fmt: skip
    holds = [None] * dist.get_world_size()
    # all_gather_object over all ranks: everybody's holdings
    dist.all_gather_object(holds, mine, group=grid["pp dp cp tp"])
    groups = {axis: grid.rows(axis).tolist() for axis in AXES}
    return {"groups": groups, "holds": holds, "sent": five.sent_by_axis(ledger, grid)}


def spans(numbers):
    """Sorted numbers as words: [0, 1, 2, 9] is "0-2, 9"."""
    starts = [k for k in numbers if k - 1 not in numbers]
    ends = [k for k in numbers if k + 1 not in numbers]
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in zip(starts, ends))


def draw_07(path):
    """The 16 ranks of 07's default run as a table: pp and dp by row, cp and tp by column. A chip
    of one colour marks the ranks of each of rank 0's groups; the list says what rank 0 sends."""
    found = on_ranks(grid_of_07, five.options(["--timeout", "120"]))
    groups, holds, sent = found["groups"], found["holds"], found["sent"]
    peers = {axis: next(ranks for ranks in rows if 0 in ranks) for axis, rows in groups.items()}
    figure = Figure(figsize=(9, 4.2))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 18), ylim=(8.4, 0))
    axes.set_axis_off()
    axes.text(0.3, 0.55, "07_5d.py: 16 ranks, five axes", size=13, va="center")
    axes.text(0.3, 1.05, "pp 2 x dp 2 x cp 2 x tp 2, experts over dp x cp", size=9, color="0.25")
    left, top, wide, high = 3.6, 2.7, 1.75, 1.22
    for line in range(4):
        pp_dp = holds[4 * line]
        words = f"layers {spans(pp_dp['pp'][0])}\nsequences {spans(pp_dp['dp'][0])}"
        name = f"pp {line // 2}  dp {line % 2}"
        axes.text(0.3, top + high * (line + 0.32), name, size=9.5, weight="bold", va="center")
        axes.text(0.3, top + high * (line + 0.66), words, size=7.5, va="center")
        cp_tp = holds[line]
        tokens = spans(cp_tp["cp"][0]).replace(", ", "\nand ")
        words = f"heads {spans(cp_tp['tp'][0])}\ntokens {tokens}"
        name = f"cp {line // 2}  tp {line % 2}"
        axes.text(left + wide * (line + 0.5), 1.62, name, size=9.5, weight="bold", ha="center")
        axes.text(left + wide * (line + 0.5), 1.72, words, size=7, ha="center", va="top")
    for rank, (row, column) in enumerate(itertools.product(range(4), range(4))):
        x, y = left + wide * column, top + high * row
        axes.add_patch(_box(x + 0.04, y + 0.04, wide - 0.08, high - 0.08, FAINT))
        axes.text(x + 0.15, y + 0.38, rank, size=11, va="center", weight="bold")
        chips = [axis for axis in AXES if rank in peers[axis]]
        for k, axis in enumerate(chips):
            at = x + 0.62 + 0.54 * (k % 2), y + 0.14 + 0.36 * (k // 2)
            axes.add_patch(_box(*at, 0.5, 0.3, COLOURS[axis]))
            axes.text(at[0] + 0.25, at[1] + 0.16, axis, size=7.5, color="white",
                      ha="center", va="center")  # fmt: skip
    axes.text(11.2, 2.1, "rank 0's group", size=8.5, color="0.25")
    axes.text(16.0, 2.1, "sends in a step", size=8.5, color="0.25")
    for k, (axis, (splits, moves)) in enumerate(AXES.items()):
        y = 2.75 + 1.0 * k
        axes.add_patch(_box(11.2, y - 0.25, 0.6, 0.42, COLOURS[axis]))
        axes.text(11.5, y - 0.03, axis, size=9, color="white", ha="center", va="center")
        axes.text(12.0, y - 0.12, f"ranks {', '.join(map(str, peers[axis]))}", size=9, va="center")
        axes.text(12.0, y + 0.32, f"{splits}: {moves}", size=7.5, color="0.25", va="center")
        axes.text(16.0, y - 0.12, f"{sent[axis] / 1000:,.1f} kB", size=9, va="center")
    note = "A chip marks a rank of rank 0's group. Bytes: of rank 0, one step, priced as a ring."
    axes.text(0.3, 8.0, note, size=8, color="0.25")
    with recorded(path) as data:
        figure.savefig(path)
    return data


def _box(left, bottom, width, height, color):
    return Rectangle((left, bottom), width, height, fc=color, ec="none")


# ── the chapters' own pictures ───────────────────────────────────────────────────────────────


def draw_buckets(path):
    """01: the order in which gradients arrive and buckets travel in a step, on four ranks."""
    return on_ranks(buckets_of_01, argparse.Namespace(ranks=4, steps=0, timeout=60, plot=str(path)))


def buckets_of_01(args, device):
    """01's picture, by its rank 0."""
    with recorded(args.plot, size=(9, 5)) as data, redirect_stdout(None):
        dp.plot(args.plot, dist.group.WORLD, device)
    return data


FOUR = "gpipe", "1f1b", "zb-h1", "dualpipe"


def draw_schedules(path, n=4, m=8, names=FOUR):
    """04: predicted Gantt charts of some schedules, on one scale."""
    timelines = {name: pp.simulate(pp.SCHEDULES[name](n, m)) for name in names}
    with recorded(path, size=(9, 1.2 + 1.85 * len(timelines))) as data:
        pp.gantt(timelines, path)
    return data


def draw_all_schedules(path):
    """04: every schedule's predicted Gantt chart."""
    return draw_schedules(path, names=pp.SCHEDULES)


def draw_bubbles(path, p=8):
    """04: idle share of a rank's span by each schedule, against m/n; equal ones share a line."""
    times, curves, figure = (1, 2, 3, 4, 6, 8), {}, Figure(figsize=(9, 4.2), layout="constrained")
    for name in pp.runnable(p):
        shares = [100 * pp.simulate(pp.SCHEDULES[name](p, k * p)).bubble for k in times]
        curves.setdefault(tuple(round(share, 6) for share in shares), []).append(name)
    axes = figure.subplots()
    axes.set_prop_cycle(color="#0072b2 #e69f00 #000000 #56b4e9 #d55e00 #999999 #009e73".split())
    for k, shares in enumerate(sorted(curves, key=lambda shares: shares[::-1], reverse=True)):
        look = "osD^vP*"[k % 7] + ("-", "--", ":")[k % 3]
        axes.plot(times, shares, look, label=" = ".join(curves[shares]))
    axes.set(title=f"Bubble of a rank's span, {p} ranks, F = I = W, no communication time")
    axes.set(xlabel="micro-batches per rank, m/n", ylabel="idle, % of a rank's span", xticks=times)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    with recorded(path, size=(9, 4.2)) as data:
        figure.savefig(path, dpi=120)
    return data


def draw_ring(path, n=4):
    """06: the work of each rank and step, by layout."""
    with recorded(path, size=(9, 4.8)) as data:
        cp.plot(n, path)
    return data


def draw_saved(path):
    """03: what a block keeps for backward on 1 to 8 tensor-parallel ranks, with SP and without."""
    given = dict(ranks=8, steps=0, timeout=60, batch=16, sequence=64, plot=str(path))
    return on_ranks(saved_of_03, argparse.Namespace(**given))


def saved_of_03(args, device):
    """03's picture, by its rank 0; measured there."""
    with recorded(args.plot, size=(9, 4)) as data:
        tp.plot(tp.Config(), args, dist.group.WORLD, device)
    return data


def draw_memory(path):
    """Bytes of each pipeline rank of Llama 3 70B at its peak, by memory_math."""
    layout = memory.Layout(tp=8, sp=True, pp=8, dp=8, zero=1, m=32, seq=8192)
    with recorded(path, size=(9, 4.2)) as data:
        plot = memory.part("commands").run_plot
        plot(memory.preset("llama-3-70b"), layout, "memory", out=str(path))
    return data


# ── ZeRO: what a rank holds, and what it pays for that ───────────────────────────────────────


def draw_zero(path, ranks=(8, 64)):
    """02: bytes of a parameter's state on a rank, and bytes sent for it in a step, by stage."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    kinds = {"weights": DARK, "gradients": MIDDLE, "optimizer: master, two moments": LIGHT}
    P = 8 * 64 * 10**4  # every shard divides: no padding
    for stage in range(4):
        for k, n in enumerate(ranks):
            items = memory.state_items(P, n, stage)
            parts = items["weights"], items["gradients"]
            parts = [size / P for size in (*parts, sum(items.values()) - sum(parts))]
            floor, at = 0, stage + 0.4 * k - 0.2
            for (kind, color), part in zip(kinds.items(), parts):
                label = kind if stage == k == 0 else None
                look = dict(color=color, ec="black", lw=0.6, label=label)
                left.bar(at, part, 0.36, floor, **look)
                floor += part
            left.text(at, floor + 0.2, f"{floor:.3g}", ha="center", fontsize=9)
            left.text(at, -0.75, f"n = {n}", ha="center", fontsize=8, color="0.25")
    for k, m in enumerate((1, 4)):
        for stage in range(4):
            moved = memory.sent(memory.zero_traffic(P, ranks[0], stage, m=m))
            units = moved / (2 * P * (ranks[0] - 1) / ranks[0])
            at = stage + 0.4 * k - 0.2
            label = f"{m} micro-batch{'es' * (m > 1)}" if stage == 0 else None
            right.bar(at, units, 0.36, color=(DARK, LIGHT)[k], ec="black", lw=0.6, label=label)
            right.text(at, units + 0.15, f"{units:.3g}", ha="center", fontsize=9)
    stages = "stage 0", "ZeRO-1", "ZeRO-2", "ZeRO-3"
    first_cut = "all copied", "optimizer cut", "gradients too", "weights too"
    left.set_xticks(range(4), [f"{a}\n{b}" for a, b in zip(stages, first_cut)])
    right.set_xticks(range(4), stages)
    for axes in (left, right):
        axes.tick_params(length=0, pad=14 if axes is left else 4)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    left.set_title("held on a rank, bytes a parameter (bf16, Adam)", loc="left", size=10, pad=14)
    right.set_title("sent by a rank in a step, in P (n-1)/n", loc="left", size=10, pad=14)
    with recorded(path) as data:
        figure.savefig(path)
    return data


PICTURES = {
    "07_5d": draw_07, "01_dp": draw_buckets, "02_zero": draw_zero, "03_tp": draw_saved,
    "04_pp_schedules": draw_schedules, "04_all": draw_all_schedules, "04_bubbles": draw_bubbles,
    "06_cp_ring": draw_ring, "memory_math": draw_memory,
}  # fmt: skip
# A training run's curves differ in their last digits from machine to machine: no hash, one command.
MEASURED = {
    "05_ep": "python benchmarks/expert_load.py --steps 300 --balance none aux:0.02 bias:0.02 "
    "capacity:1.25 --plot figures/05_ep.png"
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    names = parser.parse_args().names or PICTURES
    if unknown := sorted(set(names) - set(PICTURES)):
        parser.error(f"no picture is called {unknown[0]}: choose from {', '.join(PICTURES)}")
    for name in names:
        file = HERE / f"{name}.png"
        PICTURES[name](file)
        print(f"{file.relative_to(HERE.parent)}  {file.stat().st_size / 1000:.0f} kB")
