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
import json
import sys
import tempfile
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch, Rectangle
from matplotlib.path import Path as Curve
from matplotlib.text import Text
from PIL import Image
from PIL.PngImagePlugin import PngInfo

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
dp, zero, tp, pp, cp, five, memory = (
    importlib.import_module(name)
    for name in "01_dp 02_zero 03_tp 04_pp_schedules 06_cp_ring 07_5d memory_math".split()
)

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


def runs(parts):
    """Consecutive numbers as (first, length): [0, 1, 4] is [(0, 2), (4, 1)]."""
    starts = [k for k in parts if k - 1 not in parts]
    return [(k, next(n for n in range(1, len(parts) + 1) if k + n not in parts)) for k in starts]


def link(axes, left, right, height, **look):
    """An arc above two ranks. Returns where its top is."""
    points = [(left, 0.55), (left, 0.55 + height), (right, 0.55 + height), (right, 0.55)]
    codes = [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4]
    axes.add_patch(PathPatch(Curve(points, codes), fc="none", capstyle="butt", **look))
    return (left + right) / 2, 0.55 + 0.75 * height


def draw_07(path):
    """Sixteen ranks in a row: links above, rank 0's dark and as wide as what they carry; below, of
    each thing that an axis splits, the part that each rank holds."""
    found = on_ranks(grid_of_07, five.options(["--timeout", "120"]))
    groups, holds, sent = found["groups"], found["holds"], found["sent"]
    n, most = len(holds), max(sent.values())
    figure = Figure(figsize=(9, 5.2))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-4.15, 22.1), ylim=(-6.1, 5.6))
    axes.set_axis_off()
    axes.text(-4.0, 5.05, "Five ways to split one training step, on one grid of 16 ranks", size=13)
    high = lambda first, last: 0.95 * (last - first) ** 0.75
    for ranks in (ranks for rows in groups.values() for ranks in rows if 0 not in ranks):
        link(axes, ranks[0], ranks[-1], high(ranks[0], ranks[-1]), lw=0.7, ec="#cccccc")
    for k, (axis, rows) in enumerate(groups.items()):
        (own,) = (ranks for ranks in rows if 0 in ranks)
        lower, ls = (0.6, (0, (2, 1))) if axis == "ep" else (1.0, "-")  # its peers are cp's too
        look = dict(lw=0.8 + 3.5 * (sent[axis] / most) ** 0.5, ec=DARK, ls=ls)
        ends = 0.16 * (k - 2), own[-1] + (0.2 if axis == "cp" else -0.1)
        x, top = link(axes, *ends, lower * high(own[0], own[-1]), **look)
        box = dict(fc="white", ec="none", pad=0.8)
        axes.text(x, top, axis, size=9, ha="center", va="center", bbox=box)
    for rank, parts in enumerate(holds):
        axes.add_patch(_box(rank - 0.42, -0.3, 0.84, 0.8, DARK if rank == 0 else LIGHT))
        ink = "white" if rank == 0 else "black"
        axes.text(rank, 0.08, rank, color=ink, size=10, ha="center", va="center")
        for row, axis in enumerate(AXES):
            mine, whole = parts[axis]
            bottom, scale = -1.32 - 0.9 * row, 0.84 / whole
            axes.add_patch(_box(rank - 0.42, bottom, 0.84, 0.55, FAINT))
            for first, length in runs(mine):
                left = rank - 0.42 + first * scale
                axes.add_patch(_box(left, bottom, length * scale, 0.55, MIDDLE if rank else DARK))
    axes.text(-4.0, 0.08, "rank", size=10, va="center")
    for row, (axis, (splits, moves)) in enumerate(AXES.items()):
        middle = -1.05 - 0.9 * row
        axes.text(-4.0, middle, axis, size=10, weight="bold", va="center")
        axes.text(-3.25, middle, splits, size=8.5, va="center")
        axes.text(n - 0.2, middle + 0.17, f"{sent[axis] / 1000:,.1f} kB", size=9.5, va="center")
        axes.text(n - 0.2, middle - 0.2, moves, size=7.5, va="center", color="0.25")
    axes.text(n - 0.2, 0.08, "sent by rank 0 in a step", size=8.5, va="center")
    note = "dark: what rank 0 holds and whom it sends to (dashed: ep, over the plane dp x cp); "
    axes.text(-4.0, -5.65, note + "the wider a link, the more bytes. From 07_5d.py's default run.",
              size=8, color="0.25")  # fmt: skip
    with recorded(path) as data:
        figure.savefig(path)
    return data


def _box(left, bottom, width, height, color):
    return Rectangle((left, bottom), width, height, fc=color, ec="none")


# ── the chapters' own pictures ───────────────────────────────────────────────────────────────


def draw_schedules(path, p=4, m=8):
    """04: every schedule's predicted Gantt, on one scale."""
    timelines = {name: pp.simulate(make(p, m)) for name, make in pp.SCHEDULES.items()}
    with recorded(path, size=(9, 15.5)) as data:
        pp.gantt(timelines, path)
    return data


def draw_bubbles(path, p=8):
    """04: idle share of a rank's span by each schedule, against m/p."""
    with recorded(path, size=(9, 4.2)) as data:
        pp.bubbles(path, p)
    return data


def draw_ring(path, n=4):
    """06: the work of each rank and step, by layout."""
    with recorded(path, size=(9, 4.8)) as data:
        cp.plot(n, path)
    return data


def draw_saved(path):
    """03: what a block keeps for backward on 1 to 8 tensor-parallel ranks, with SP and without."""
    given = dict(ranks=8, timeout=60, batch=16, sequence=64, plot=str(path))
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
        memory.run_plot(memory.preset("llama-3-70b"), layout, "memory", out=str(path))
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
    "07_5d": draw_07, "02_zero": draw_zero, "03_tp": draw_saved,
    "04_pp_schedules": draw_schedules, "04_bubbles": draw_bubbles, "06_cp_ring": draw_ring,
    "memory_math": draw_memory,
}  # fmt: skip
# A training run's curves differ in their last digits from machine to machine: no hash, one command.
MEASURED = {"05_ep": "python 05_ep.py --steps 300 --plot figures/05_ep.png"}


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
