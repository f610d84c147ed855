"""The pictures of memory_math: what a rank holds and sends, drawn from its functions.

    python memory_math.py plot memory --model llama-3-70b --tp 8 --pp 8 --out memory.png

`draw` takes the module of memory_math, which calls it.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

COLOURS = "#0072B2 #E69F00 #000000 #56B4E9 #D55E00 #999999 #009E73 #CC79A7".split()
GiB = 2**30


def _lines(ax, curves, ticks=()):
    """{label: (x, y)} as lines that differ in dash and marker too; with ticks {x: word}, to
    logarithmic scales."""
    for i, (label, (x, y)) in enumerate(curves.items()):
        style = dict(color=COLOURS[i % 8], linestyle=("-", "--", ":", "-.")[i % 4], markersize=4)
        ax.plot(x, y, marker="os^vDPX*"[i % 8], label=label, **style)
    if ticks:
        ax.set(xscale="log", yscale="log")
        ax.set_xticks([*ticks], ticks.values())
        ax.yaxis.set_major_formatter("{x:,g}")


def bubbles(mm, ax, model, layout):
    """Idle share of a rank's span against m/p, every schedule; equal ones share a line."""
    p, steps, curves = layout.pp + layout.pp % 2 if layout.pp > 1 else 8, (1, 2, 3, 4, 6, 8), {}
    for schedule in mm.SCHEDULES:
        v = 2 if schedule in mm.CHUNKED else 1
        points = {}
        for n in steps if not schedule.startswith("dualpipe") else steps[1:]:
            share = mm.bubble(schedule, p, n * p, v).span_fraction
            if share is not None:
                points[n] = round(100 * share, 6)
        label = schedule + f" v={v}" * (v > 1) + " (a bound)" * (schedule == "zb-auto")
        curves.setdefault(tuple(points.items()), []).append(label)
    named = {", ".join(names): tuple(zip(*points)) for points, names in curves.items()}
    _lines(ax, dict(sorted(named.items(), key=lambda curve: -curve[1][1][-1])))
    ax.set(xlabel="micro-batches per pipeline rank, m / p", ylabel="idle, % of a rank's span")
    ax.set(title=f"Bubble on {p} ranks, F = I = W, no communication time", xticks=steps)
    ax.set_ylim(bottom=-1)


def memory(mm, ax, model, layout):
    """Bytes of each pipeline rank at its peak, stacked; the range that a driver would show; and
    what an 80 GB GPU has."""
    stages, room = mm.estimate(model, layout), 79.6
    floor, ranks = [0.0] * len(stages), range(len(stages))
    for part, colour in zip(mm.BUDGET, COLOURS):
        sizes = [mm.grouped(stage)[part] / GiB for stage in stages]
        ax.bar(ranks, sizes, 0.8, floor, label=part, color=colour, edgecolor="white")
        floor = [low + more for low, more in zip(floor, sizes)]
    low, high = ([stage.overhead[i] / GiB for stage in stages] for i in (0, 1))
    middle = [top + (a + b) / 2 for top, a, b in zip(floor, low, high)]
    spread = [(b - a) / 2 for a, b in zip(low, high)]
    style = dict(fmt="none", ecolor="black", capsize=3, label="seen by the driver, a range")
    ax.errorbar(ranks, middle, spread, **style)
    ax.axhline(room, color="black", linestyle="--", linewidth=1)
    ax.text(len(stages) - 0.5, room, "80 GB GPU", ha="right", va="bottom", fontsize=8)
    ax.set_xticks(ranks[:: 1 + len(ranks) // 20])
    ax.set(xlabel="pipeline rank", ylabel="GiB at the peak")
    flags = " ".join(flag.removeprefix("--") for flag in mm.as_flags(layout))
    ax.set_title(f"{model.name}: {flags or 'one rank'}", fontsize=10)


def zero(mm, ax, model, layout):
    """State bytes per rank against data-parallel ranks, for the four stages of ZeRO."""
    ranks, n = [2**i for i in range(0, 11)], mm.count_parameters(model)
    sizes = lambda stage: [mm.zero_bytes(n, r, stage, layout.recipe) / GiB for r in ranks]
    curves = {f"ZeRO-{stage}" if stage else "DDP": (ranks, sizes(stage)) for stage in range(4)}
    _lines(ax, curves, dict(zip(ranks, ranks)))
    ax.set(xlabel="data-parallel ranks", ylabel="GiB of state per rank")
    ax.set(title=f"{model.name}, {layout.recipe}: weights, gradients and optimizer")


def activations(mm, ax, model, layout):
    """Activations of all layers for one sequence, against its length, by recompute and kernel."""
    lengths, curves = [2**i * 1024 for i in range(1, 8)], {}
    for attention, recompute in (
        ("unfused", "none"), ("unfused", "selective"), ("flash", "none"), ("flash", "full"),
    ):  # fmt: skip
        change = dict(attention=attention, recompute=recompute, batch=1)
        layouts = [replace(layout, seq=length, **change) for length in lengths]
        of_layer = lambda lo, x: mm.total(mm.kept_activations(model, lo, x))
        kept = lambda lo: sum(of_layer(lo, x) for x in range(model.layers))
        name = f"{attention} attention, recompute {recompute}"
        curves[name] = lengths, [kept(x) / GiB for x in layouts]
    _lines(ax, curves, {length: f"{length // 1024}K" for length in lengths})
    ax.set(xlabel="tokens in the sequence", ylabel="GiB, all layers")
    ax.set(title=f"{model.name}: kept for backward, one sequence on tp {layout.tp}")


def traffic(mm, ax, model, layout):
    """Bytes that a rank of the busiest stage sends in a step, by axis and phase."""
    found, sums = mm.traffic(model, layout, mm.busiest(model, layout)), Counter()
    for x in found:
        sums[f"{x.axis} {x.phase}", mm.Topology().leaves_node(layout, x.axis)] += x.sent / GiB
    if not sums:
        raise ValueError("one rank sends nothing: split the job, as with --tp 8 --dp 8")
    rows = list(reversed(sums.items()))
    for far, colour in (False, COLOURS[0]), (True, COLOURS[1]):
        sizes = [size if leaves == far else 0 for (_, leaves), size in rows]
        style = dict(color=colour, edgecolor="white")
        ax.barh(range(len(rows)), sizes, label=["inside a node", "between nodes"][far], **style)
    for y, (_, size) in enumerate(rows):
        ax.text(size, y, f" {size:.3g}", va="center", fontsize=8)
    ax.set_yticks(range(len(rows)), [name for (name, _), _ in rows])
    ax.set(xscale="log", xlabel="GiB that leave one rank in a step (log scale)")
    ax.xaxis.set_major_formatter("{x:,g}")
    ax.set(title=f"{model.name}: {layout.m} micro-batches of {layout.batch} x {layout.seq}")


def draw(mm, what, model, layout, out):
    """Draw the picture named `what` to the file `out`; ValueError where that cannot be."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    if Path(out).suffix[1:] not in known:
        raise ValueError(f"--out {out}: its ending says no format; known are {', '.join(known)}")
    try:
        globals()[what](mm, ax, model, layout)
        ax.spines[["top", "right"]].set_visible(False)
        style = dict(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        ax.legend(reverse=what == "memory", **style)  # in the order of the stack
        figure.savefig(out, dpi=150)
    except OSError as error:
        raise ValueError(f"--out {out}: {error.strerror}") from error
    finally:
        plt.close(figure)
