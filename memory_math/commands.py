"""Part of memory_math: its command line, and the claims of the guide.

A command is a function `run_NAME`. Its parameters that are annotated with a help text are flags.
It returns rows (a table) and notes (lines). A key that starts with _ is for --json alone.
"""

import argparse  # noqa: I001
import ast
import importlib.util
import inspect
import json
import math
import sys
import textwrap
from collections import Counter
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Annotated, get_args

import memory_math
from memory_math import (  # noqa: I001
    as_flags, attention_flops, bubble, busiest, check_schedule, chinchilla_tokens, CONVENTIONS,
    count_active, count_parameters, daly_interval, data, data_sheet, dense_layer_keeps,
    effective_batch, estimate, flags_of, flops_per_token, FOLDER, GiB, gpu_hours, group_size,
    grouped, heaviest, hfu, hours_between_failures, HOURS_PER_FAILURE, in_flight,
    kept_activations, Layout, local_parameters, lost_share, lr_scale, MAY_BE_0, mbu,
    megatron_activations, mfu_of, model_from_config, nearest, offload_bytes, one_of_each,
    parameters_by_kind, PARTS, peak_flops, PEAKS, placed_layers, preset, remedies, replace,
    ring_all_reduce_bytes, ring_share_bytes, SCHEDULES, sent, state_items, symbols, Topology,
    total, tp_layer_traffic, traffic, training_days, training_flops, validate, way_out, weights,
    young_interval, zero_bytes, zero_traffic,
)

# ── the guide's claims: the one place where a formula is text, since it is shown beside its value ─

_ALLOWED = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Call, ast.Name)
_ALLOWED += (ast.Constant, ast.Attribute, ast.Load, ast.operator, ast.unaryop, ast.cmpop)
_ALLOWED += (ast.Tuple, ast.keyword)


def evaluate(formula, names):
    """The value of an arithmetic expression over names (numbers, or functions it may call)."""
    tree = ast.parse(formula, mode="eval")
    for node in ast.walk(tree):
        named = node.attr if isinstance(node, ast.Attribute) else ""
        if not isinstance(node, _ALLOWED) or named.startswith("_"):
            raise ValueError(f"{formula!r}: {type(node).__name__} has no place in a formula")
    return eval(compile(tree, formula, "eval"), {"__builtins__": {}}, names)


def substituted(formula, names):
    """A formula with its numbers put in."""
    tree = ast.parse(formula, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(names.get(node.id), (int, float)):
            value, short = names[node.id], f"{names[node.id]:g}"
            node.id = short if float(short) == value and type(value) is float else str(value)
    return ast.unparse(tree)


LEGEND = data("legend")["letters"]


def held(part, params, ranks=1, stage=0, recipe="bf16"):
    """Bytes of one part of a parameter's state on a rank: a name of `state_items`, or moments, or
    optimizer (moments and master copy)."""
    items, moments = state_items(int(params), int(ranks), stage, recipe), PARTS[-2:]
    groups = {"moments": moments, "optimizer": ("fp32 master", *moments)}
    return sum(items[name] for name in groups.get(part, [part]))


def layer_input(batch, seq, width):
    """Bytes of the input of a layer: what full recompute keeps."""
    return dense_layer_keeps(batch, seq, width, 1, 1, 1, 1)["norm of attention: input"]


def calls(transfers, collective=""):
    """Number of calls in a list of `Transfer`: of one collective, or of all."""
    return sum(x.count for x in transfers if collective in x.collective)


def one_call(transfers):
    """Bytes of the first call of a list of `Transfer`."""
    return transfers[0].size


IN_CLAIMS = (
    zero_bytes, in_flight, megatron_activations, ring_all_reduce_bytes, ring_share_bytes, bubble,
    chinchilla_tokens, training_flops, attention_flops, gpu_hours, training_days, mfu_of, hfu,
    lr_scale, hours_between_failures, peak_flops, zero_traffic, tp_layer_traffic, sent, Layout,
    held, layer_input, calls, one_call,
)  # fmt: skip


def guide_claims(section=None):
    """The guide's quantitative claims, in its order, each with the value `recomputed` here.

    A claim is data: id, lines, section, claim, inputs, formula, unit, guide (a number, or the two
    ends of a range), verdict, why, source. Its formula is evaluated over its inputs and the
    functions of this module. Raises ValueError if the data file or the section is missing.
    """
    file = FOLDER / "guide.json"
    if not file.exists():
        raise ValueError(f"the claims are in {FOLDER.name}/{file.name}, and it does not lie there")
    claims = json.loads(file.read_text())
    if section:
        names = {claim["section"] for claim in claims}
        chosen = {name for name in names if section.lower() in name.lower()}
        chosen = chosen or {nearest(section, names, "section of the guide")}
        claims = [claim for claim in claims if claim["section"] in chosen]
    known = {f.__name__: f for f in IN_CLAIMS} | {"math": math}
    for claim in claims:
        claim["recomputed"] = float(evaluate(claim["formula"], known | claim["inputs"]))
    return sorted(claims, key=lambda claim: claim["lines"])


def quantity(value, unit=""):
    """A number, or a range [low, high], with its unit as the guide writes it: decimal prefixes."""
    if isinstance(value, list):
        low, high = (quantity(end, unit) for end in value)
        if value[0] == 0:
            return f"at most {high}"
        if value[1] >= 1e4 * value[0]:
            return f"at least {low}"
        number, _, rest = low.partition(" ")
        return f"{number if high.endswith(rest) else low} to {high}"
    head, _, rest = unit.partition(" ")
    short = {"bytes": "B", "bytes/s": "B/s", "bits/s": "b/s", "FLOP/s": "FLOP/s"}.get(head)
    for prefix, size in ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6):
        if short and size <= value < 1000 * size:
            return f"{value / size:.4g} {prefix}{short} {rest}".strip()
    return f"{value:,.0f} {unit}" if 1e4 <= value < 1e15 else f"{value:.4g} {unit}"


def complaints(model, layout, net=Topology()):
    """Sentences, with numbers, on what makes a layout slow: groups that leave the node, heads held
    twice, ranks that idle, stages of unlike depth, ZeRO that communicates in every micro-batch."""
    lo, said, moved = layout, [], traffic(model, layout, busiest(model, layout))
    near = replace(net, outer=net.inner)
    for axis in "tp", "cp", "ep":
        calls = [x for x in moved if x.axis == axis]
        if calls and net.leaves_node(lo, axis):
            slow, fast = (sum(tier.seconds(lo, x) for x in calls) for tier in (net, near))
            where = f"--{axis} {getattr(lo, axis)} leaves the node of {net.node}"
            said.append(f"{where}: {slow:.3g} s of a step go there, {fast:.3g} s would in a node")
    if lo.tp > model.kv_heads and not model.mla:
        copies = lo.tp // model.kv_heads
        said.append(f"--tp {lo.tp}: {copies} ranks hold each of {model.kv_heads} key/value heads")
    idle = bubble(lo.schedule, lo.pp, lo.m, lo.v, limit=lo.limit).span_fraction or 0
    if idle > 0.15:
        then = bubble(lo.schedule, lo.pp, 8 * lo.pp, lo.v, limit=lo.limit).span_fraction
        now = f"--m {lo.m}: {lo.schedule} on {lo.pp} ranks idles {idle:.0%} of a step"
        said.append(f"{now}, {then:.0%} with --m {8 * lo.pp}")
    depths = [sum(0 <= x < model.layers for x in owned) for owned in placed_layers(model, lo)]
    if max(depths) * lo.pp > 1.1 * sum(depths):
        pace = f"a rank of {max(depths)} layers sets the pace"
        said.append(f"--pp {lo.pp}: {pace}, {sum(depths) / lo.pp:.3g} would be even")
    once = traffic(model, replace(lo, zero=1, shard=0), busiest(model, lo))
    now, then = (sent(x for x in calls if x.axis == "dp") / GiB for calls in (moved, once))
    if now > 2 * then > 0:
        said.append(f"--zero {lo.zero} sends {now:,.0f} GiB over dp a step, --zero 1 {then:,.0f}")
    if any(model.windows) and lo.cp > 1:
        said.append(f"--cp {lo.cp} sends all keys and values, also those that no window reaches")
    return said


def filling(schedule, n, c=1):
    """The fewest micro-batches, from n on, with which rank 0 holds as many as it ever holds."""
    if schedule in ("gpipe", "looped-bfs") or n == 1:
        return n
    most = in_flight(schedule, n, 4 * n, c)
    return next(m for m in range(n, 4 * n + 1) if in_flight(schedule, n, m, c) == most)


# ── the command line: a command is a function; its parameters, annotated with help, are flags ─
# A command returns rows (a table) and notes (lines). A key that starts with _ is for --json alone.


def shown(value):
    """A cell of a table."""
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return f"{value:,.2f}" if 0.01 <= abs(value) < 1e7 or not value else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(rows):
    """Dicts with the same keys as columns of text: words to the left, numbers to the right."""
    keys = [key for key in rows[0] if not key.startswith("_")]
    lines = [keys] + [[shown(row[key]) for key in keys] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    words = [isinstance(rows[0][key], str) for key in keys]
    align = lambda cell, width, word: cell.ljust(width) if word else cell.rjust(width)
    return ["  ".join(map(align, line, widths, words)).rstrip() for line in lines]


def described(model, layout):
    """The model, GPUs, tokens, and what differs from the default layout, as flags."""
    size = f"world of {layout.world}, {effective_batch(layout):,} tokens a step"
    return f"{model.name}, {size}: {' '.join(as_flags(layout)) or 'one rank'}"


def run_params(model, explain: Annotated[bool, "list every tensor"] = False):
    """Parameters of a model, by kind."""
    rows = [{"kind": kind, "parameters": n} for kind, n in parameters_by_kind(model).items()]
    if explain:
        shape = lambda w: " x ".join(map(str, w.shape))
        rows = [{"kind": w.name, "parameters": w.numel, "shape": shape(w)} for w in weights(model)]
    counts = {"all": count_parameters(model), "active per token": count_active(model)}
    rows += [{"kind": kind, "parameters": n, "shape": ""} for kind, n in counts.items()]
    return rows, [model.name, *model.notes]


def run_estimate(
    model,
    layout,
    hbm: Annotated[float, "GiB of a GPU; an 80 GB H100 shows 79.6"] = 80.0,
    explain: Annotated[bool, "print each formula with its numbers put in"] = False,
    rank: Annotated[int, "pipeline rank that --explain shows; -1: the heaviest"] = -1,
    versus: Annotated[str, 'a second layout, as what differs from the first: "--tp 4 --sp"'] = "",
):
    """Memory of a rank of every stage, whether it fits, and what to change."""
    rows, notes = [], []
    both = {"first": layout, "second": parsed_layout(versus, layout)} if versus else {"": layout}
    for which, lo in both.items():
        stages = estimate(model, lo)
        if not -1 <= rank < lo.pp:
            raise ValueError(f"--rank {rank}: use a pipeline rank from 0 to {lo.pp - 1}")
        top = heaviest(stages)
        for s in [top] if versus else stages:
            row = {"layout": which} if versus else {}
            blocks = sum(0 <= layer < model.layers for layer in s.layers)
            row |= {"rank": s.rank, "layers": blocks, "parameters": s.params}
            row |= {part: size / GiB for part, size in grouped(s).items()}
            row |= {"peak GiB": s.peak / GiB, "at": s.moment, "verdict": s.verdict(hbm * GiB)}
            moments = {name: [asdict(x) for x in items] for name, items in s.moments.items()}
            rows.append(row | {"_bytes": s.peak, "_overhead": s.overhead, "_moments": moments})
        notes += ["", described(model, lo), *model.notes]
        notes += [f"heaviest is rank {top.rank}: {top.peak / GiB:,.2f} GiB allocated by tensors"]
        span = lambda more: " to ".join(f"{(top.peak + x) / GiB:,.1f}" for x in more)
        notes += [f"reserved by the allocator, an estimate: {span(top.reserve)} GiB"]
        notes += [f"seen by the driver, an estimate: {span(top.overhead)} of {hbm:g} GiB"]
        notes += [f"slow: {sentence}" for sentence in complaints(model, lo)]
        notes += explained(model, lo, top if rank < 0 else stages[rank]) if explain else []
        notes += _changes(model, lo, hbm * GiB) if top.verdict(hbm * GiB) != "fits" else []
    return rows, notes


def _changes(model, layout, hbm):
    """Lines on what one change does, and on what several do together."""
    says = lambda verdict, to: f"{verdict} on {to.world} GPUs"
    line = lambda flags, peak, *end: f"  {flags:40}{peak / GiB:9,.2f} GiB  {says(*end)}"
    single = remedies(model, layout, hbm)[:6]
    lines = ["what one change does, the strongest first:", *(line(*row) for row in single)]
    together = way_out(model, layout, hbm)
    more = single and together[0] != single[0][0]
    return lines + ["and together:", line(*together)] * bool(more)


def explained(model, layout, stage):
    """Every line of a rank's budget with its formula, headed by its total; then the tensors that a
    layer of it keeps, and what the letters of the formulas mean."""
    line = lambda name, size, formula: f"  {name:44}{size:>19,}  = {formula}"
    notes = [f"rank {stage.rank} at the {stage.moment}: {stage.bytes_at(stage.moment):,} bytes"]
    items = stage.moments[stage.moment]
    notes += [line(item.name, item.bytes, item.formula) for item in items]
    letters = dict.fromkeys(x for item in items for x in item.letters)
    for layer in one_of_each(model, stage.layers):
        kept = kept_activations(model, layout, layer)
        notes += [f"layer {layer} keeps for backward, per micro-batch: {total(kept):,} bytes"]
        notes += [line(s.name, s.bytes, s.formula) for s in kept]
        letters |= dict.fromkeys(x for item in kept for x in item.letters)
    names = symbols(model, layout)
    return notes + ["where"] * bool(letters) + [
        f"  {letter} = {names[letter]:,}: {LEGEND[letter]}" for letter in letters
    ]


def run_traffic(
    model,
    layout,
    node: Annotated[int, "GPUs in a node"] = 8,
    inner: Annotated[float, "GB/s per GPU in a node, one direction"] = 450.0,
    outer: Annotated[float, "GB/s per GPU between nodes, one direction"] = 50.0,
):
    """Bytes and seconds by axis and collective, of a rank of the stage that sends most."""
    validate(model, layout)
    net, rank, rows = Topology(node, inner * 1e9, outer * 1e9), busiest(model, layout), []
    for x in sorted(traffic(model, layout, rank), key=lambda x: (x.axis, -x.sent)):
        row = {"axis": x.axis, "phase": x.phase, "collective": x.collective, "ranks": x.ranks}
        row |= {"calls": float(x.count), "MiB each": x.size / 2**20, "GiB sent": x.sent / GiB}
        row |= {"ms": 1e3 * net.seconds(layout, x), "_bytes": x.sent}
        row["links"] = "between nodes" if net.leaves_node(layout, x.axis) else "in a node"
        rows.append(row | {"runs": "beside compute" if x.hideable else "exposed"})
    all_of_it = sum(row["GiB sent"] for row in rows)
    return rows or [{"axis": "none"}], [
        f"{described(model, layout)}; a rank of stage {rank}, one step",
        f"{all_of_it:,.3f} GiB leave it, as rings: 2(n-1)/n of an all-reduce, (n-1)/n of others",
        f"times assume {inner:g} GB/s in a node of {node}, {outer:g} between nodes, per GPU and "
        "direction, 10 us a ring step",
    ]


def run_bubble(
    schedule: Annotated[str, ", ".join(SCHEDULES)] = "1f1b",
    p: Annotated[int, "pipeline ranks"] = 8,
    m: Annotated[int, "micro-batches"] = 32,
    v: Annotated[int, "chunks per rank"] = 1,
    costs: Annotated[tuple[float, ...], "F,I,W,comm"] = (1, 1, 1, 0),
    limit: Annotated[int, "micro-batches that zb-auto may hold; 0: 2 p - 1"] = 0,
):
    """Bubble of a schedule by closed form, and what its ranks hold."""
    if limit and schedule != "zb-auto":
        raise ValueError(f"--limit {limit} means nothing to --schedule {schedule}")
    b = bubble(schedule, p, m, v, costs, limit)
    percent = lambda x: None if x is None else 100 * x
    rows = [
        {"of": of, "time": time, "idle": idle, "% of ideal": percent(r), "% of all": percent(f)}
        for of, time, idle, r, f in (
            ("first start to last end", b.makespan, b.idle, b.ratio, b.fraction),
            ("longest span of a rank", b.span, b.span_idle, b.span_ratio, b.span_fraction),
        )
    ]
    few = [*range(p)] if p <= 16 else [*range(8), p - 1]
    held = [f"{float(in_flight(schedule, p, m, v, rank, limit)):g} on {rank}" for rank in few]
    notes = [f"{schedule}, p = {p}, m = {m}, v = {v}; F, I, W, comm = {costs}; ideal {b.ideal:g}"]
    notes += [b.note] * bool(b.note)
    return rows, [*notes, f"micro-batches in flight, by rank: {', '.join(held)}"]


def run_compute(
    model,
    tokens: Annotated[float, "to train on"] = 1.4e12,
    gpus: Annotated[int, "how many"] = 64,
    gpu: Annotated[str, ", ".join(PEAKS)] = "h100",
    precision: Annotated[str, "bf16, fp8, tf32 or fp16"] = "bf16",
    sparse: Annotated[bool, "use the 2:4 sparse peak, twice the dense one"] = False,
    mfu: Annotated[float, "assumed, unless --hours is given"] = 0.4,
    hours: Annotated[float, "measured wall-clock hours: the MFU is computed"] = 0.0,
    convention: Annotated[str, "how FLOPs are counted: " + ", ".join(CONVENTIONS)] = "6N",
    seq: Annotated[int, "tokens in a sequence, for attention"] = 8192,
    batch: Annotated[float, "tokens in a step"] = 4e6,
    price: Annotated[tuple[float, ...], "per GPU-hour; a range as 2,4"] = (3.0,),
    spares: Annotated[float, "share of GPUs that stand by for those that fail"] = 0.02,
    moved: Annotated[float, "GB that one GPU's HBM moved in a step: the MBU is computed"] = 0.0,
):
    """FLOPs by convention; hours, days and money at an MFU, or MFU and MBU of what was measured."""
    rows, peak = [], peak_flops(gpu, precision, sparse)
    for name, counts in CONVENTIONS.items():
        each = float(flops_per_token(model, seq, name))
        rows.append({"convention": name, "FLOPs/token": each, "FLOPs": each * tokens})
        rows[-1]["counts"] = counts
    flops = flops_per_token(model, seq, convention) * tokens
    seconds = 3600 * hours or flops / (gpus * peak * mfu)
    share, spent = mfu_of(flops, seconds, gpus, peak), gpus * seconds / 3600
    kind = f"{'2:4 sparse' if sparse else 'dense'} {precision} peak {peak / 1e12:g} TFLOP/s"
    step, (_, hbm) = seconds * batch / tokens, data_sheet(gpu)
    hours_apart, save = hours_between_failures(gpus), 60.0
    interval = daly_interval(save, 3600 * hours_apart)
    losses = lost_share(interval, save, 3600 * hours_apart, 600.0)
    paid = spent * (1 + spares) / max(1e-9, 1 - losses)
    cost = lambda hours: " to ".join(f"{hours * each:,.0f}" for each in price)
    state = state_items(count_parameters(model))
    on_disk = sum(state.values()) - state["gradients"]
    busy = f"MBU {mbu(1e9 * moved, step, hbm):.2%}: {moved:g} GB of HBM in a step of {step:.3g} s"
    return rows, [
        f"{model.name} on {gpus} {gpu}, {kind}",
        *model.notes,
        f"MFU {share:.2%} by {convention}; HFU {hfu(share, 'full'):.2%} if all is recomputed",
        *[f"{busy}, of {hbm / 1e12:g} TB/s"] * (moved > 0),
        f"{spent:,.0f} GPU-hours at {' to '.join(f'{each:g}' for each in price)}: {cost(spent)}; "
        f"{seconds / 86400:,.1f} days",
        f"with failures and checkpoints ({losses:.1%}) and spares ({spares:.1%}): "
        f"{paid:,.0f} GPU-hours, {cost(paid)}",
        f"a checkpoint (weights, master, moments) is {quantity(on_disk, 'bytes')}, one every "
        f"{interval / 60:,.0f} minutes",
        f"{tokens / count_active(model):.3g} tokens per active parameter; about 20 are optimal",
        f"{tokens / batch:,.0f} steps of {batch:,.0f} tokens; twice the batch takes "
        f"{lr_scale(2):.3g} x the learning rate (square root)",
    ]


def run_guide(
    section: Annotated[str, "part of a section's title"] = None,
    wrong: Annotated[bool, "only what does not hold"] = False,
):
    """The guide's worked examples: its number, the recomputed one, whether it holds, and why."""
    claims, notes, last = guide_claims(section), [], None
    rows = [claim for claim in claims if not (wrong and claim["verdict"] == "holds")]
    for c in rows:
        notes += [f"\n{c['section']}"] * (c["section"] != last)
        last, put_in = c["section"], substituted(c["formula"], c["inputs"])
        guide, here = (quantity(c[key], c["unit"]) for key in ("guide", "recomputed"))
        notes += [f"  line {c['lines'][0]}: {c['claim']}"]
        notes += [f"    guide {guide}; recomputed {here}; {c['verdict']}"]
        below = [c["formula"] + f" = {put_in}" * (put_in != c["formula"])]
        for text in below + [c["why"]] * (c["verdict"] != "holds"):
            notes += textwrap.wrap(text, 96, initial_indent=" " * 4, subsequent_indent=" " * 4)
    holds = sum(claim["verdict"] == "holds" for claim in claims)
    return rows, [*notes, f"\n{len(claims)} claims: {holds} hold, {len(claims) - holds} do not"]


def run_failures(
    gpus: Annotated[tuple[int, ...], "numbers of GPUs"] = (64, 512, 4096, 10000, 16384, 100000),
    mtbf: Annotated[float, "hours between failures of one GPU"] = HOURS_PER_FAILURE,
    save: Annotated[float, "seconds that a checkpoint stops the job"] = 60.0,
    restart: Annotated[float, "seconds from a failure to the next step"] = 600.0,
):
    """Hours between failures and the checkpoint interval that loses least, by number of GPUs."""
    rows = []
    for n in gpus:
        hours = hours_between_failures(n, mtbf)
        young, daly = (f(save, 3600 * hours) for f in (young_interval, daly_interval))
        row = {"GPUs": n, "hours between": hours, "a day": 24 / hours, "Young, min": young / 60}
        lost = 100 * lost_share(daly, save, 3600 * hours, restart)
        rows.append(row | {"Daly, min": daly / 60, "% of time lost": lost})
    ten = hours_between_failures(10_000, mtbf)
    return rows, [
        f"one GPU fails every {mtbf:,.0f} hours (Llama 3: 419 in 54 days on 16,384)",
        f"a checkpoint stops the job for {save:g} s, a restart for {restart:g} s",
        f"the guide: one an hour at 10,000 GPUs, and 1 to 3 a day; here one in {ten:.1f} hours",
    ]


def run_offload(
    model,
    layout,
    pcie: Annotated[float, "GB/s per GPU to CPU memory"] = 50.0,
    nvme: Annotated[float, "GB/s per GPU to NVMe"] = 6.0,
):
    """Bytes and seconds per step of states that live in CPU memory or on NVMe."""
    stage, rows = heaviest(estimate(model, layout)), []
    parts = local_parameters(model, layout, stage.layers)
    groups = {x: group_size(parts, x) for x in ("dense", "expert") if group_size(parts, x)}
    for tier in "cpu", "nvme":
        moved = Counter()
        for group, n in groups.items():
            moved.update(offload_bytes(n, layout.shards(group), layout.recipe, tier))
        for what, size in moved.items():
            seconds = size / 1e9 / (nvme if what.startswith("optimizer") else pcie)
            row = {"tier": tier, "what": what, "GiB": size / GiB, "seconds": seconds}
            rows.append(row | {"_bytes": size})
    return rows, [
        described(model, layout),
        *(f"{n:,} {x} parameters, cut over {layout.shards(x)} ranks" for x, n in groups.items()),
        f"assumes {pcie:g} GB/s per GPU to the CPU, {nvme:g} to NVMe, nothing overlapped",
    ]


def modelled_mfu(model, layout, net, peak, kernels):
    """An MFU: kernels reach a share of the peak, and the bubble and exposed communication add to a
    step. What can run beside kernels adds only where it takes longer than they do."""
    lo, idle = layout, bubble(layout.schedule, layout.pp, layout.m, layout.v).span_ratio or 0
    flops = flops_per_token(model, lo.seq, "causal") * effective_batch(lo) / lo.world
    waits = Counter()
    for x in traffic(model, lo, busiest(model, lo)):
        waits[x.hideable] += net.seconds(lo, x)
    again = hfu(1, lo.recompute if lo.recompute == "full" else "none")
    busy = max(flops * again / (peak * kernels) * (1 + idle), waits[True])
    return flops / peak / (busy + waits[False])


def run_designs(
    hbm: Annotated[float, "GiB of a GPU"] = 79.6,
    gpu: Annotated[str, ", ".join(PEAKS)] = "h100",
    kernels: Annotated[float, "share of the peak that kernels reach, assumed"] = 0.6,
    save: Annotated[float, "seconds that a checkpoint stops the job"] = 60.0,
):
    """The guide's reference designs and its decision matrix, as layouts that are run."""
    rows, notes = [], []
    for design in data("designs")["rows"]:
        model, lo = preset(design["model"]), Layout(**design["layout"])
        net, top = Topology(outer=design["between"] * 1e9), heaviest(estimate(model, lo))
        mfu = modelled_mfu(model, lo, net, peak_flops(gpu), kernels)
        hours = hours_between_failures(lo.world)
        losses = lost_share(daly_interval(save, 3600 * hours), save, 3600 * hours, 600)
        flops = flops_per_token(model, lo.seq, "causal") * design["tokens"]
        days = training_days(flops, lo.world, peak_flops(gpu) * mfu) / (1 - losses)
        tiers = Counter()
        for x in traffic(model, lo, 0):
            tiers[net.leaves_node(lo, x.axis)] += x.sent / GiB
        row = {"design": design["name"], "GPUs": lo.world, "peak GiB": top.peak / GiB}
        row |= {"verdict": top.verdict(hbm * GiB), "GiB in a node": float(tiers[False])}
        row |= {"between nodes": float(tiers[True]), "MFU %": 100 * mfu, "lost %": 100 * losses}
        row["days"] = days
        rows.append(row | {"_layout": " ".join(as_flags(lo)), "_line": design["line"]})
        change = ""
        if row["verdict"] != "fits":
            flags, _, says, to = way_out(model, lo, hbm * GiB)
            change = f"; {says} with {flags}, on {to.world:,} GPUs"
        notes += [f"{design['name']} (line {design['line']}): {rows[-1]['_layout']}{change}"]
    how = f"kernels at {kernels:.0%} of a {gpu}'s peak, exposed communication, bubble"
    return rows, ["", *notes, f"GiB: sent by a rank of stage 0 in a step. MFU is modelled: {how}",
                  f"lost: failures, and checkpoints that stop the job for {save:g} s (Daly)"]


def run_worksheet(model, layout, hbm: Annotated[float, "GiB of a GPU"] = 80.0):
    """The guide's memory budget worksheet, filled in for the heaviest rank."""
    lo, top = layout, heaviest(estimate(model, layout))
    cut = lambda stage: f"/ {lo.zero_ranks} of dp x cp" if lo.zero >= stage else "not cut"
    remarks = {
        "weights": f"/ tp {lo.tp} / pp {lo.pp}, {cut(3)}",
        "gradients": f"/ tp {lo.tp} / pp {lo.pp}, {cut(2)}",
        "optimizer": f"/ tp {lo.tp} / pp {lo.pp}, {cut(1)} (the guide forgets tp)",
        "activations": f"x {float(lo.in_flight(top.rank)):g} micro-batches in flight",
        "buffers": "logits, recomputed layer, ZeRO gathers (the guide has no line for them)",
    }
    rows = [{"line": x, "GiB": size / GiB, "": remarks[x]} for x, size in grouped(top).items()]
    where = f"rank {top.rank}, at the {top.moment}"
    rows.append({"line": "allocated", "GiB": top.peak / GiB, "": where})
    for word, more in zip(("least", "most"), top.overhead):
        remark = f"with {word} overhead, an estimate: {more / GiB:.1f} (the guide: 5 GB, later 11)"
        rows.append({"line": "total", "GiB": (top.peak + more) / GiB, "": remark})
    return rows, [described(model, lo), f"{top.verdict(hbm * GiB)}, of {hbm:g} GiB"]


PLOTS = "bubbles", "memory", "zero", "activations", "traffic"


def run_plot(
    model,
    layout,
    what: Annotated[str, ", ".join(PLOTS)],
    out: Annotated[str, "a PNG, SVG or PDF file"] = "picture.png",
):
    """Draw one of the pictures of figures/memory.py to a file."""
    validate(model, layout)
    nearest(what, PLOTS, "picture")
    path = FOLDER.with_name("figures") / "memory.py"
    if not path.exists():
        raise ValueError("pictures are drawn by figures/memory.py, and it does not lie here")
    spec = importlib.util.spec_from_file_location("figures_memory", path)
    drawings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawings)
    drawings.draw(sys.modules["memory_math"], what, model, layout, out)
    return [{"picture": what, "file": out}], []


COMMANDS = [run_params, run_estimate, run_traffic, run_bubble, run_compute, run_guide]
COMMANDS += [run_failures, run_offload, run_worksheet, run_designs, run_plot]
ALIASES = {"m": ["--micro-batches"]}


def number(kind, several, text):
    """A number above 0, whole if kind is int; several with commas between, where 0 too is one."""
    if several:
        return tuple(0 if word == "0" else number(kind, False, word) for word in text.split(","))
    least, most = (1, 10**12) if kind is int else (1e-12, 1e30)
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        what = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"{text} is not {what} from {least:g} to {most:g}")
    return value


def add_flags(parser, function, defaults):
    """A flag for each annotated parameter; without a default, or with None, a bare word."""
    for name, (kind, text, *choices) in flags_of(function).items():
        default, flag = defaults[name], "--" + name.replace("_", "-")
        if default in (None, inspect.Parameter.empty):
            parser.add_argument(name, nargs="?" if default is None else None, help=text)
            continue
        each, *several = get_args(kind) or [kind]
        plain = each is str or name in MAY_BE_0 or name in ("rank", "limit")
        read = kind if plain else partial(number, each, bool(several))
        how = dict(type=read, choices=choices[0] if choices else None)
        how = dict(action=argparse.BooleanOptionalAction) if kind is bool else how
        text = f"{text} (default: {default or 'none'})".replace("%", "%%")
        parser.add_argument(flag, *ALIASES.get(name, []), default=default, help=text, **how)


def parsed_layout(text, default):
    """The layout that flags in a text make of another."""
    parser = argparse.ArgumentParser(prog="--versus", add_help=False)
    add_flags(parser, Layout, vars(default))
    return Layout(**vars(parser.parse_args(text.split())))


def build_parser():
    """The command line, from the signatures of COMMANDS."""
    parser = argparse.ArgumentParser(description=memory_math.__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for run in COMMANDS:
        name, takes = run.__name__.removeprefix("run_"), inspect.signature(run).parameters
        sub = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="print data instead of text")
        if "model" in takes:
            which = sub.add_mutually_exclusive_group()
            which.add_argument("--model", default="llama-3-8b", help="a released model")
            which.add_argument("--config", help="a Hugging Face config.json")
        if "layout" in takes:
            add_flags(sub, Layout, vars(Layout()))
            sub.set_defaults(m=None)  # then as many as fill the pipeline
        add_flags(sub, run, {name: option.default for name, option in takes.items()})
    return parser


def read_config(path):
    """A Model from a config.json on disk; ValueError where it is none."""
    try:
        config = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--config {path}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--config {path}: not a JSON object")
    return model_from_config(config, Path(path).resolve().parent.name)


def read_layout(args):
    """(Layout, lines) of parsed arguments; without --m, as many micro-batches as fill the pipeline,
    and a line that says so."""
    named = {f.name: getattr(args, f.name) for f in fields(Layout)}
    if named["m"] is not None:
        return Layout(**named), []
    check_schedule(args.schedule, args.pp, 1, args.v)
    m = filling(args.schedule, args.pp, args.v)
    said = f"--m was not given: {m} micro-batches fill the pipeline of {args.pp} ranks"
    return Layout(**named | {"m": m}), [said] * (args.pp > 1)


def main(argv=None):
    """Run one command; wrong input is answered by a sentence and exit status 2."""
    args = build_parser().parse_args(argv)
    takes = {name: vars(args).get(name) for name in inspect.signature(args.run).parameters}
    said = []
    try:
        if "model" in takes:
            takes["model"] = read_config(args.config) if args.config else preset(args.model)
        if "layout" in takes:
            takes["layout"], said = read_layout(args)
        rows, notes = args.run(**takes)
    except ValueError as refused:
        print(refused, file=sys.stderr)
        return 2
    notes += said
    if args.json:
        rows = [{key.lstrip("_"): value for key, value in row.items()} for row in rows]
        print(json.dumps({"rows": rows, "notes": notes}, indent=1))
    else:
        print("\n".join(([] if args.run is run_guide else table(rows)) + notes))
    return 0
