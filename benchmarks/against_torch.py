"""Every chapter beside torch's own implementation of the same thing, in one run, in turns.

    python benchmarks/against_torch.py dp zero           these chapters, at 2 ranks
    python benchmarks/against_torch.py dp --ranks 4      this one, at 4
    python benchmarks/against_torch.py all --json        all of them, as a list of rows
    torchrun --nproc-per-node 2 benchmarks/against_torch.py dp

A time says nothing about another machine; a ratio of times taken in turns says something.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
CHAPTERS = sorted(path.stem.removeprefix("rows_") for path in HERE.glob("rows_*.py"))


def measure(args, device):
    """On every rank: the rows of the chapters asked for; rank 0 prints them as JSON."""
    dist = importlib.import_module("torch.distributed")
    found = []
    for name in args.chapters:
        found += importlib.import_module(f"rows_{name}").rows(dist.get_world_size())
    if dist.get_rank() == 0:
        print(json.dumps(found))
    return 0


def collect(chapters, ranks):
    """The rows of chapters, each measured by processes of its own. Raises CalledProcessError."""
    found = []
    for name in chapters:
        command = [sys.executable, __file__, name, "--ranks", str(ranks), "--json"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        found += json.loads(done.stdout)
    return found


def table(rows):
    """Lines for a terminal."""
    yield f"{'row':52}{'ranks':>6}{'ours':>10}{'theirs':>10}{'ratio':>7}{'middle half':>14}  sent"
    for row in rows:
        if row.get("time_ratio") is None:
            yield f"{row['row']:52}{row['ranks']:6}  {row['note']}"
            continue
        low, high = row["spread"]
        both = row["ours_sent"], row["theirs_sent"]
        sent = ["-" if nbytes is None else f"{nbytes:,.0f}" for nbytes in both]
        yield (
            f"{row['row']:52}{row['ranks']:6}{row['ours_ms']:8.1f}ms{row['theirs_ms']:8.1f}ms"
            f"{row['time_ratio']:7.2f}{low:8.2f}-{high:.2f}"
            f"  {' / '.join(sent)} bytes"
        )
        difference = row["max_gradient_difference"]
        alike = "" if difference is None else f"; gradients differ by {difference:.0e}"
        yield f"    {row['shape']}{alike}{'; ' + row['note'] if row.get('note') else ''}"


def plot(rows, path):
    """Ratios as dots with their middle half; left of the line, this course is faster."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [row for row in rows if row.get("time_ratio") is not None]
    figure, axis = plt.subplots(figsize=(9, 0.8 + 0.32 * len(timed)), layout="constrained")
    for y, row in enumerate(reversed(timed)):
        axis.plot(row["spread"], [y, y], color="0.6", linewidth=3, solid_capstyle="round")
        axis.plot(row["time_ratio"], y, "o", color="#0b3c5d")
    labels = [f"{row['row']}, {row['ranks']} ranks" for row in reversed(timed)]
    axis.set_yticks(range(len(timed)), labels, fontsize=8)
    axis.axvline(1, color="k", linestyle=":", linewidth=1)
    axis.set_xlabel("time of a step here / time of a step there; bar: the middle half of the pairs")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="+", choices=[*CHAPTERS, "all"])
    parser.add_argument("--ranks", type=int, default=2, help="in each group; default: 2")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a collective may take")
    parser.add_argument("--json", action="store_true", help="rows as a list")
    parser.add_argument("--plot", metavar="PNG", help="draw the ratios")
    args = parser.parse_args()
    args.chapters = CHAPTERS if "all" in args.chapters else args.chapters
    if "RANK" in os.environ or (args.json and len(args.chapters) == 1):
        importlib.import_module("01_dp").launch(measure, args, lambda args, ranks: None)
    rows = collect(args.chapters, args.ranks)
    if args.plot:
        plot(rows, args.plot)
    print(json.dumps(rows, indent=1) if args.json else "\n".join(table(rows)))
