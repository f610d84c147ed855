"""How even is the load of experts, what does evenness cost, and what do copies of hot experts give?

    python benchmarks/expert_load.py                                      three ways, 80 steps
    python benchmarks/expert_load.py --balance none aux:0.02 capacity:1.25
    python benchmarks/expert_load.py --steps 300 --plot load.png          and a picture

Trains 05's model on text for each way to even the load. Prints the loss, the load of the busiest
expert and rank, and the share of choices that were dropped. Then places experts by the load that
the run without balancing had, and prints the load of the busiest rank before and after. "dense" has
one network as wide as the chosen expert and the shared one together.
"""

import importlib
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).resolve().parent.parent))
ep = importlib.import_module("05_ep")

WAYS = {  # to even the load, by a number x: (options of the router, rate of its bias)
    "none": lambda x: ({}, 0.0), "aux": lambda x: ({"balance": x}, 0.0),
    "bias": lambda x: ({}, x), "capacity": lambda x: ({"factor": x}, 0.0),
    "z": lambda x: ({"z": x}, 0.0), "dense": lambda x: (dict(E=1, F=128, shared=0), 0.0),
}  # fmt: skip


def way(text):
    """Read a word such as "aux:0.02": (options of `build`, rate of the bias)."""
    name, _, number = text.partition(":")
    try:
        return WAYS[name](None if name in ("none", "dense") else float(number))
    except (KeyError, ValueError):
        choices = "dense, none, aux:0.02, bias:0.02, capacity:1.25 or z:0.01"
        raise ValueError(f"--balance {text}: use words such as {choices}") from None


# ── copies of experts ────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def place_experts(moe, places):
    """Move experts, so that place i of all ranks' places holds expert places[i]. Copies of an
    expert take turns: the output stays what it was.

    Serving copies hot experts by measured load (DeepSeek-V3, section 3.4). In training the copies'
    gradients would need a sum in each step: that is data parallelism by another name.
    """
    e, path = len(places) // dist.get_world_size(moe.group), moe.path
    own = places[dist.get_rank(moe.group) * e :][:e]
    for name, weight in list(moe.experts.named_parameters()):
        whole = weight.new_empty(moe.router.E, *weight.shape[1:])
        # all_gather over ep, e experts from each rank: every rank now holds all experts
        dist.all_gather_single(whole, weight, group=moe.group)
        setattr(moe.experts, name, nn.Parameter(whole[own].clone()))
    moe.path = lambda x, chosen_sk, *rest: path(x, take_turns(chosen_sk, places), *rest)


def take_turns(chosen_sk, places):
    """Return the place for each choice: token t goes to the expert's copy t modulo their number."""
    copies = [[i for i, held in enumerate(places) if held == x] for x in range(max(places) + 1)]
    copies.append([len(places)])  # a dropped choice stays dropped
    turn = lambda token, expert: copies[expert][token % len(copies[expert])]
    turns = [[turn(t, expert) for expert in row] for t, row in enumerate(chosen_sk.tolist())]
    return chosen_sk.new_tensor(turns).view_as(chosen_sk)


def places_by_load(load_E, n, number):
    """Choose the expert of each of `number` places on n ranks, so that the busiest rank has little.

    Each further copy is of the expert with the most load per copy. Then the busiest copies first go
    to the rank with the least load that has room. Source: github.com/deepseek-ai/EPLB.
    """
    copies = [1] * len(load_E)
    per_copy = lambda expert: load_E[expert] / copies[expert]
    for _ in range(number - len(load_E)):
        copies[max(range(len(load_E)), key=per_copy)] += 1
    held, load = [[] for _ in range(n)], [0.0] * n
    for expert in sorted(range(len(load_E)), key=per_copy, reverse=True):
        for _ in range(copies[expert]):
            rank = min((r for r in range(n) if len(held[r]) < number // n), key=load.__getitem__)
            held[rank].append(expert)
            load[rank] += per_copy(expert)
    return sum(held, [])


def busiest_rank(load_E, places, n):
    """The busiest rank's tokens over the mean, if copies of an expert share its load evenly."""
    load = torch.tensor([load_E[x] / places.count(x) for x in places]).view(n, -1).sum(1)
    return (load.max() / load.mean()).item()


# ── the comparison ───────────────────────────────────────────────────────────────────────────


def unevenness(load_2E, n):
    """The busiest expert's and the busiest rank's tokens, over the mean; the variance of experts'
    tokens over the squared mean; the dropped share."""
    if load_2E.shape[1] == 1:  # a dense layer
        return [math.nan] * 4
    chosen_E, kept_E = load_2E.double()
    over_mean = lambda load: (load.max() / load.mean()).item()
    variance = (kept_E.var(correction=0) / kept_E.mean() ** 2).item()
    dropped = 1 - (kept_E.sum() / chosen_E.sum()).item()
    return [over_mean(kept_E), over_mean(kept_E.view(n, -1).sum(1)), variance, dropped]


def compare(args, device):
    """Train a model for each way, and print its first loss and means of its last ten steps.

    Returns {way: rows of a step: loss, and its unevenness}, {way: load (E,) of the last ten steps}.
    """
    text, n, runs, loads = ep.read_text(args.text, 0), dist.get_world_size(), {}, {}
    ep.say(
        f"8 experts on {n} ranks, of which a token chooses one beside a shared one\n{args.steps} "
        f"steps; the unigram entropy of the text is {ep.unigram_entropy(text):.3f}\n"
        "way            loss, first, last  busiest expert, rank   variance   dropped"
    )
    for how in args.balance:
        options, rate = way(how)
        groups = ep.make_groups(1 if how == "dense" else n)  # one network cannot be split by ep
        model = ep.build(groups, device, **options)
        losses, steps = zip(*ep.training(model, rate, args, groups, device))
        runs[how] = [[loss, *unevenness(load, n)] for loss, load in zip(losses, steps)]
        loads[how] = sum(steps[-10:])[0].tolist()
        loss, expert, rank, variance, dropped = torch.tensor(runs[how][-10:]).mean(0).tolist()
        load = f"{expert:18.2f}{rank:7.2f}{variance:13.3f}{dropped:10.1%}"
        ep.say(f"{how:14}{losses[0]:9.3f}{loss:9.3f}{load if how != 'dense' else ''}")
    return runs, loads


def draw(runs, path):
    """Draw, for each way to even the load, the busiest expert's load and the loss over steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    smooth = lambda series: torch.tensor(series).unfold(0, 10, 1).mean(1)
    series = {how: [smooth(column) for column in zip(*rows)] for how, rows in runs.items()}
    first = next(iter(series))
    for (how, (loss, expert, *_, dropped)), line in zip(series.items(), ["-", "--", "-", ":"] * 9):
        note = f" ({dropped.mean():.0%} of choices dropped)" if dropped.nan_to_num().any() else ""
        steps = range(9, 9 + len(loss))
        left.plot(steps, expert, line, label=how + note)
        right.plot(steps, loss - series[first][0], line)
    left.set_title("tokens of the busiest expert / mean", loc="left", fontsize=10)
    right.set_title(f"loss minus loss of {first}, nats per byte", loc="left", fontsize=10)
    left.set_ylim(bottom=1)
    left.legend(fontsize=9, frameon=False)
    for axis in (left, right):
        axis.set_xlabel("step (mean of 10)")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main(args, device):
    """Compare, place by load, draw."""
    (runs, loads), n = compare(args, device), dist.get_world_size()
    if "none" in loads:
        in_order, by_load = list(range(8)), places_by_load(loads["none"], n, 16)
        ratios = [busiest_rank(loads["none"], places, n) for places in (in_order, by_load)]
        in_words = "{:.2f} with experts in order, {:.2f} with 16 places by load"
        ep.say("without balancing, busiest rank / mean:", in_words.format(*ratios))
    if args.plot and dist.get_rank() == 0:
        draw(runs, args.plot)
        ep.say(f"drew {args.plot}")
    return 0


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    if 8 % ranks:
        raise ValueError(f"{ranks} ranks do not divide 8 experts: use 1, 2, 4 or 8")
    if args.batch < ranks:
        raise ValueError(f"--batch {args.batch}: each of {ranks} ranks needs at least 1")
    if args.steps < 10:
        raise ValueError(f"--steps {args.steps}: means of ten steps need at least 10")
    for text in args.balance:
        way(text)
    ep.read_text(args.text, at_least=65)


if __name__ == "__main__":
    parser = ep.arguments(__doc__, ranks=4, steps=80)
    parser.add_argument("--batch", type=int, default=32, help="sequences of 64 bytes in a step")
    parser.add_argument("--plot", metavar="FILE", help="draw load and loss over steps, after them")
    ways = "ways to even the load: dense, none, aux:0.02, bias:0.02, capacity:1.25, z:0.01"
    default = ["dense", "none", "bias:0.02"]
    parser.add_argument("--balance", nargs="+", default=default, metavar="WAY", help=ways)
    ep.launch(main, parser.parse_args(), validate)
