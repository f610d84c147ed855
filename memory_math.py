"""memory_math · what a training job holds, sends and computes, before anyone pays for it

First the lesson: six sections, each a few rules that fit on a board.

    1 state         a parameter costs 16 bytes: weight, gradient, optimizer; ZeRO divides them
    2 activations   what one dense layer keeps for its backward
    3 in flight     how many micro-batches wait for their backward, by schedule
    4 bubble        how long a pipeline rank idles
    5 traffic       the bytes that leave a rank in a step, axis by axis
    6 compute       FLOPs, utilisation, hours

Below the banner stands the tool. It reads a config.json as a list of weights, and splits that list
over ranks. Its tables are data in the folder memory_math/: models, families, weights, activations,
traffic, recipes, GPUs, each with its source, and legend.toml with every letter that a table uses.

    computed    bytes of weights, gradients, optimizer, activations; bytes sent; bubbles. They are
                exact for the tensors listed; a framework may allocate more (see `--impl`)
    estimated   what the allocator reserves and the driver sees: a range beside the computed bytes
    assumed     times: printed with the bandwidths and the convention that they rest on

    python memory_math.py params --model llama-3-8b
    python memory_math.py estimate --model llama-3-70b --tp 8 --sp --pp 4 --dp 8 --zero 1 --explain
    python memory_math.py traffic --model llama-3-70b --tp 8 --sp --dp 8
    python memory_math.py bubble --schedule zb-h2 --p 8 --m 32
    python memory_math.py compute --model llama-3-70b --tokens 1.4e12 --gpus 64 --gpu h100
    python memory_math.py guide --wrong

Units are bytes, seconds and FLOPs. GiB = 2**30, GB = 1e9. Memory is printed in GiB: a GPU sold with
80 GB shows 81,559 MiB = 79.6 GiB. Guide sections: all memory and capacity sections, ZeRO, cost
economics, MFU/HFU/MBU; `guide` prints the guide's own numbers beside the recomputed ones.
"""
# n ranks · m micro-batches · b sequences of this rank · s tokens of this rank · D width ·
# H query heads · K key/value heads · d width of a head · F hidden units · P parameters
# Every other letter of a table stands in memory_math/legend.toml; `--explain` prints it.

import math
import sys
import tomllib
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

GiB = 2**30
FOLDER = Path(__file__).with_name("memory_math")


def data(name):
    """The contents of a data file, memory_math/NAME.toml."""
    try:
        return tomllib.loads((FOLDER / f"{name}.toml").read_text())
    except OSError as error:
        sentence = f"memory_math.py needs its data: {error.filename}: {error.strerror}"
        if __name__ != "__main__":
            raise ImportError(sentence) from error
        print(sentence, file=sys.stderr)
        sys.exit(2)


# ── 1 · state: bytes of a parameter ──────────────────────────────────────────────────────────

# Mixed precision keeps a parameter five times:
#
#     weight, bf16   gradient, bf16   fp32 master   first moment   second moment
#          2       +       2        +      4      +      4       +      4         = 16 bytes
#
#     ZeRO stage on n ranks     0      1           2           3
#     bytes of a parameter      16     4 + 12/n    2 + 14/n    16/n        n = 8: 16, 5.5, 3.75, 2
#
# A model of 8 billion parameters: 128 GB on one rank, 44 GB with stage 1 on 8 ranks.

RECIPES = data("recipes")
PARTS = tuple(RECIPES["bf16-both"])


def state_items(params, ranks=1, stage=0, recipe="bf16", no_sync=False):
    """Bytes that one rank holds of `params` parameters under ZeRO, as {component: bytes}.

    Stage 1 divides the optimizer (master copy and moments) over the ranks, stage 2 the gradients
    too, stage 3 the weights too. A division with a rest is rounded up. no_sync: gradients are
    reduced after the last micro-batch only, so they stay whole. Source: Rajbhandari et al. 2020.
    """
    items, shard = {}, -(-params // ranks)
    for name, width in RECIPES[nearest(recipe, RECIPES, "recipe")].items():
        divided_from = 3 if name == "weights" else 2 if "gradients" in name else 1
        whole = stage < divided_from or (no_sync and "gradients" in name)
        items[name] = (params if whole else shard) * width
    return items


def zero_bytes(params, ranks=1, stage=0, recipe="bf16"):
    """Bytes of weights, gradients and optimizer state on one rank: the sum of `state_items`."""
    return sum(state_items(int(params), int(ranks), stage, recipe).values())


# ── 2 · activations: what one dense layer keeps for backward ─────────────────────────────────

# A product y = x W keeps x: its weight's gradient is xᵀ dy. A norm keeps its input. Attention keeps
# q, k, v and its output. Flash attention keeps one number per row of scores, not the scores.
#
# Llama 3 8B, one sequence of 8,192 tokens in bf16, MiB of one layer:
#
#     norm 64 · input 64 · q 64 · k 16 · v 16 · log-sum-exp 1 · output 64     attention   289
#     norm 64 · input 64 · gate 224 · up 224 · product 224                    MLP         800
#     and 2 · 4 bytes a token of statistics of the norms: 1,141,964,800 bytes in all
#
# Full recompute keeps only the first of these, the layer's input: 64 MiB.


def dense_layer_keeps(b, s, D, H, K, d, F, bytes=2):
    """Bytes that a Llama layer keeps for backward, as {tensor: bytes}: RMSNorm, flash attention,
    SwiGLU in one kernel, no dropout, one rank."""
    tokens = b * s
    return {
        "norm of attention: input": tokens * D * bytes,
        "norm of attention: statistics": tokens * 4,
        "attention input": tokens * D * bytes,
        "q": tokens * H * d * bytes,
        "k": tokens * K * d * bytes,
        "v": tokens * K * d * bytes,
        "log-sum-exp": tokens * H * 4,
        "attention output": tokens * H * d * bytes,
        "norm of the mlp: input": tokens * D * bytes,
        "norm of the mlp: statistics": tokens * 4,
        "mlp input": tokens * D * bytes,
        "mlp gate": tokens * F * bytes,
        "mlp up": tokens * F * bytes,
        "mlp product": tokens * F * bytes,
    }


def megatron_activations(seq, batch, hidden, heads=0, tp=1, sp=False):
    """Bytes that a GPT layer keeps (GELU, dropout, multi-head attention, 16 bits): Korthikanti et
    al. 2022, equations 1-4. With heads, attention keeps its probabilities: 5as/h more."""
    scores = 5 * heads * seq / hidden
    return seq * batch * hidden * ((34 + scores) / tp if sp else 10 + (24 + scores) / tp)


# ── 3 · in flight: micro-batches that wait for their backward ────────────────────────────────

# A pipeline rank keeps a micro-batch from its forward to its backward. Four ranks, eight
# micro-batches; the most that each rank keeps at once:
#
#     gpipe    8 8 8 8    all forwards come first
#     1f1b     4 3 2 1    rank r has its first backward after n - r forwards
#     zb-h2    7 7 7 7    a round trip ahead; its weight gradients wait as well
#     zb-v     4 4 4 4    two half stages a rank, the last stage on rank 0

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2",
             "zb-auto", "zb-v", "interleaved-zb", "dualpipev", "dualpipe")  # fmt: skip
CHUNKED = "interleaved", "looped-bfs", "interleaved-zb"  # c chunks of a rank, as many as wanted
V_SHAPED = "zb-v", "dualpipev"  # two chunks: rank r has stages r and 2n-1-r


def check_schedule(schedule, n, m, c=1):
    """Raise ValueError with a sentence where a schedule cannot run on n ranks with m micro-batches
    and c chunks of a rank."""
    nearest(schedule, SCHEDULES, "schedule")
    for name, value in ("p", n), ("m", m), ("v", c):
        if value < 1:
            raise ValueError(f"--{name} {value}: at least 1 is needed")
    if c > 1 and schedule not in CHUNKED:
        raise ValueError(f"{schedule} does not take v = {c} chunks: use {', '.join(CHUNKED)}")
    if schedule == "dualpipe" and n % 2:
        raise ValueError(f"dualpipe folds the ranks in two: {n} ranks are odd")


def micro_batch_group(n, m):
    """Micro-batches that pass through the chunks of a rank together: the fewest, at least n, whose
    last group is not smaller than n. Fewer micro-batches than ranks are one group."""
    return next((g for g in range(n, m + 1) if m % g == 0 or m % g >= n), m)


def in_flight(schedule, n, m, c=1, rank=0, limit=None):
    """Micro-batches whose activations a pipeline rank holds at its peak: a Fraction, in units of
    all layers of the rank (DualPipe: of one of its two stages).

    A backward in two parts counts as holding everything until its weight gradient. zb-auto holds
    `limit`, by default 2n - 1. Sources: Narayanan et al. 2021; Qi et al. 2024 (zero bubble, and
    ZB-V); DeepSeek-V3 report. The tests hold every rank's number to a simulation.
    """
    check_schedule(schedule, n, m, c)
    n, m, c, behind = Fraction(n), Fraction(m), Fraction(c), n - 1 - rank
    g = micro_batch_group(int(n), int(m))
    match schedule:
        case "gpipe" | "looped-bfs":
            held = m
        case "1f1b":
            held = behind + 1
        case "eager-1f1b":
            held = 2 * behind + 1
        case "interleaved":
            held = (2 * behind + 1 + (c - 1) * g) / c
        case "interleaved-zb":
            held = (n + (c - 1) * g) / c
        case "zb-h1":
            held = n
        case "zb-h2":
            held = 2 * n - 1
        case "zb-auto":
            held = limit or 2 * n - 1
        case "zb-v":  # with few micro-batches, rank 0 holds little of its last stage
            held = min(n, (m + 1 + rank) / 2)
        case "dualpipev":
            held = min(n + Fraction(1, 2), (m + 1 + rank) / 2)
        case "dualpipe":  # half of the micro-batches come from each end
            held = min(-(-m // 2), behind + 1) + min(m // 2, rank + 1)
    return min(m, Fraction(held))


# ── 4 · bubble: how long a pipeline rank idles ───────────────────────────────────────────────

# A rank computes m micro-batches: m (F + B), the ideal. The last rank waits until n - 1 ranks have
# run a forward, and the first waits as long for its last gradient: (n - 1)(F + B) is idle.
# Four ranks, eight micro-batches, F = 1, B = 2: 24 ideal, 9 idle; 9/24 = 37.5% of the ideal time,
# 9/33 = 27% of all time. GPipe and 1F1B idle alike; 1F1B keeps fewer micro-batches.
# A backward in two parts, I (input gradient) and W (weight gradient), lets W fill the bubble.


@dataclass(frozen=True)
class Bubble:
    """Idle time of a schedule, in the unit of the costs.

    idle: of the makespan, from the first start to the last end over all ranks. span_idle: of the
    longest time that one rank is between its own first start and last end; this is what a step
    costs where ranks may enter the next step at different times. From these are set: makespan and
    span (ideal time and idle); ratio and span_ratio, r = idle over ideal time; fraction and
    span_fraction, idle over all time, r / (1 + r). None where no closed form is known; `exact` is
    False for an estimate or a bound.
    """

    schedule: str
    ideal: float
    idle: float | None
    span_idle: float | None
    exact: bool = True
    note: str = ""

    def __post_init__(self):
        for idle, name, share in (self.idle, "makespan", ""), (self.span_idle, "span", "span_"):
            known = idle is not None
            time = self.ideal + idle if known else None
            vars(self)[name] = time
            vars(self)[f"{share}ratio"] = idle / self.ideal if known else None
            vars(self)[f"{share}fraction"] = idle / time if known else None


def closed_form(schedule, n, m, c, costs, limit):
    """(idle of the makespan, idle of the longest span, whether the form holds) of a schedule on n
    ranks, more than one; None where no form is known."""
    F, I, W, hop = costs
    B, others, g = I + W, n - 1, micro_batch_group(n, m)
    whole, equal, split, span = m % n == 0, F == I == W, W <= min(F, I), ...
    match schedule:
        case "gpipe" | "eager-1f1b":
            idle = others * (F + B) + 2 * others * hop
            holds = schedule == "gpipe" or 2 * hop <= F + B
        case "1f1b":
            idle = others * (F + B) + 2 * hop * (others * m / n + n - 2)
            holds = whole or not hop
        case "interleaved":  # hops stay hidden while a group's work is longer than its way
            idle = others * (F + B) / c + 2 * (c * n - 1) * hop
            holds = m >= n and (whole and n * c * hop <= g * min(F, B) or not hop)
        case "looped-bfs":
            idle = others * (F + B) / c + 2 * others * hop
            holds = m >= n and (whole and n * c * hop <= (m - n) * min(F, B) or not hop)
        case "zb-h1":
            idle = others * (F + I - W) + 4 * others * hop
            holds = split and (m >= n if not hop else m >= 2 * n and 2 * hop <= W)
        case "zb-h2":
            gap = F + I - 2 * W + 2 * hop
            idle, span = others * max(F + hop, gap), others * max(0, gap)
            holds = m >= 2 * n - 1 and W <= F and 2 * hop <= F + I
        case "zb-auto":
            idle, span = None, max(0, others * (I + 2 * hop) + (n - limit) * F)
            holds = m >= limit and split
        case "zb-v":
            idle, span = others * F / 2 + (5 * n - 7) * hop, (6 * n - 8) * hop
            holds = equal and m >= 2 * n and 4 * hop <= F
        case "interleaved-zb":
            idle, holds = others * (F + I - W) / c, split and not hop and m >= n
        case "dualpipev":  # a fused forward and backward takes F + B: the overlap gains nothing
            idle, holds = others * (F + 2 * I - W) / 2, not hop and m >= 2 * n
        case "dualpipe":
            idle, holds = (n / 2 - 1) * (F + 2 * I - W), not hop and m >= 2 * n and m % 2 == 0
    return idle, idle if span is ... else span, holds


def bubble(schedule, n, m, c=1, costs=(1, 1, 1, 0), limit=None):
    """`Bubble` of a schedule on n ranks, by its closed form.

    costs: seconds of a forward F, an input gradient I, a weight gradient W, each for all layers of
    a rank, and of a hop between ranks. limit: micro-batches that zb-auto may hold, by default
    2n - 1. Sources as of `in_flight`. The tests hold every form to a simulation.
    """
    n, m, c, limit = int(n), int(m), int(c), limit or 2 * int(n) - 1
    check_schedule(schedule, n, m, c)
    if len(costs) != 4 or min(costs) < 0 or not all(costs[:3]):
        raise ValueError(f"--costs {costs}: needed are F, I, W above 0 and a hop of 0 or more")
    ideal = m * sum(costs[:3])
    if n == 1:
        return Bubble(schedule, ideal, 0, 0)
    idle, span, holds = closed_form(schedule, n, m, c, costs, limit)
    if not holds:
        why = "no closed form for these costs and numbers: simulate it with 04_pp_schedules.py"
        return Bubble(schedule, ideal, None, None, False, why)
    if schedule == "zb-auto":
        held = f"a lower bound, if {limit} micro-batches may be held"
        return Bubble(schedule, ideal, idle, span, False, held)
    exact = len({*costs[:3]}) == 1 or not schedule.startswith("dualpipe")
    note = "" if exact else "an estimate: exact where F = I = W"
    return Bubble(schedule, ideal, idle, span, exact, note)


# ── 5 · traffic: bytes that leave a rank ─────────────────────────────────────────────────────

# A ring passes chunks of size/n. An all-gather or a reduce-scatter passes on n - 1 chunks, an
# all-reduce is one of each. For 8 ranks and a tensor of 800 bytes: 700 and 1,400 bytes.
#
#     axis  calls of a dense layer or a parameter, in one step            bytes a rank sends
#     dp    gradients: one all-reduce of P                                2(n-1)/n · 2P
#     tp    per layer and micro-batch: 4 all-reduces of b·s·D             4 · 2(n-1)/n · 2·b·s·D
#     cp    per layer and micro-batch: k and v to every other rank        (n-1) · 2·b·s·K·d · 2, ...
#     pp    per micro-batch: one activation forward, one gradient back    2·b·s·D each
#     ep    per layer and micro-batch: 4 all-to-alls of the rows          4 · (n-1)/n · 2·R·D


def ring_all_reduce_bytes(size, n):
    """Bytes that each of n ranks sends to all-reduce `size` bytes: 2(n-1)/n of them. Source, also
    of `ring_share_bytes`: Patarasuk & Yuan 2009."""
    return 2 * (n - 1) / n * size


def ring_share_bytes(size, n):
    """Bytes that each of n ranks sends in an all-gather to `size` bytes, in a reduce-scatter or an
    even all-to-all of them: (n-1)/n."""
    return (n - 1) / n * size


def dense_step_sends(P, layers, b, s, D, m=1, dp=1, tp=1):
    """Bytes that one rank of a dense model sends in a step, {axis: bytes}: bf16, plain data
    parallelism, tensor parallelism without sp; P parameters of the rank, layers blocks."""
    activation = 2 * b * s * D
    return {
        "dp": ring_all_reduce_bytes(2 * P, dp),
        "tp": m * layers * 4 * ring_all_reduce_bytes(activation, tp),
    }


@dataclass(frozen=True)
class Transfer:
    """`count` calls of a collective over `ranks` ranks, `size` bytes each (of the whole tensor)."""

    axis: str
    phase: str  # forward, backward, recompute, step
    collective: str  # all_reduce, all_gather, reduce_scatter, all_to_all, send
    count: float
    size: float
    ranks: int
    hideable: bool = False  # it can run beside computation

    @property
    def sent(self):
        """Bytes that leave one rank."""
        if self.collective == "send":
            return self.count * self.size
        per_call = ring_all_reduce_bytes if self.collective == "all_reduce" else ring_share_bytes
        return self.count * per_call(self.size, self.ranks)


def sent(transfers):
    """Bytes that leave one rank, summed over a list of `Transfer`."""
    return sum(transfer.sent for transfer in transfers)


# ── 6 · compute: FLOPs, utilisation, hours ───────────────────────────────────────────────────

# A weight meets a token in one multiply and one add: 2 FLOPs forward, 4 backward. So training costs
# 6 · P · tokens. 70e9 parameters on 1.4e12 tokens are 5.88e23 FLOPs; an H100 does 989.5e12 a second
# at most, and 40% of that in practice: 412,666 GPU-hours, 269 days on 64 GPUs.
# Attention adds scores and their sum over the values: 12 · layers · H · d · s more per token.


def training_flops(params, tokens):
    """FLOPs of training: 6 x parameters x tokens (Kaplan et al. 2020)."""
    return 6 * params * tokens


def seen_keys(seq, window=0, chunked=False):
    """Keys that a token sees on average under a causal mask: half of the sequence, or what a
    sliding window or a chunk of `window` tokens leaves."""
    window = min(window or seq, seq)
    return window / 2 if chunked else window - window * window / (2 * seq)


def attention_flops(
    layers, heads, head_dim, seq, causal=False, v_dim=None, window=0, chunked=False
):
    """FLOPs of attention scores and of their sum over the values, per token, forward and backward:
    12 · layers · heads · head_dim · seq. causal: the half that a mask leaves. Source: PaLM
    (Chowdhery et al. 2022), appendix B."""
    both = head_dim + (head_dim if v_dim is None else v_dim)
    keys = seen_keys(seq, window, chunked)
    return 6 * layers * heads * both * (keys if causal else 2 * keys)


def gpu_hours(flops, flops_per_second):
    """GPU-hours of `flops` at an achieved rate per GPU."""
    return flops / flops_per_second / 3600


def training_days(flops, gpus, flops_per_second):
    """Days of `flops` on `gpus` GPUs at an achieved rate per GPU."""
    return flops / (gpus * flops_per_second) / 86400


def mfu_of(flops, seconds, gpus, peak):
    """Model FLOPs utilisation: the FLOPs that the model needs over what all GPUs could do (PaLM,
    appendix B). A share above 1 is impossible: ValueError."""
    share = flops / (seconds * gpus * peak)
    if share > 1 + 1e-9:
        raise ValueError(
            f"MFU {share:.0%}: impossible. {gpus} GPUs of {peak:.4g} FLOP/s cannot do {flops:.4g} "
            f"FLOPs in {seconds:.4g} s; look for a wrong peak, count or time"
        )
    return share


def hfu(mfu, recompute="none", attention=None):
    """Hardware FLOPs utilisation: recompute repeats work that the model does not need.

    full repeats forward: 8 FLOPs for every 6. selective repeats the scores of attention and their
    sum: `attention`, their share of the model's FLOPs, is needed, and a third of it is added.
    Source: Korthikanti et al. 2022, appendix A.
    """
    if nearest(recompute, ("none", "selective", "full"), "recompute") != "selective":
        return mfu * (4 / 3 if recompute == "full" else 1)
    if attention is None:
        raise ValueError("hfu of selective recompute needs attention: its share of all FLOPs")
    return mfu * (1 + attention / 3)


def mbu(bytes_moved, seconds, bandwidth):
    """Memory bandwidth utilisation: the bytes that one GPU's HBM moved over what it could move. A
    share above 1 is impossible: ValueError."""
    share = bytes_moved / (seconds * bandwidth)
    if share > 1:
        raise ValueError(
            f"MBU {share:.0%}: impossible. {bandwidth:.4g} B/s do not move {bytes_moved:.4g} B in "
            f"{seconds:.4g} s; look for bytes of all GPUs, or of more than one step"
        )
    return share


def chinchilla_tokens(params, ratio=20):
    """Tokens that train a model best for its FLOPs: 20 a parameter (Hoffmann et al. 2022)."""
    return params * ratio


def effective_batch(layout):
    """Tokens of one step: micro-batch x sequence x micro-batches x data-parallel ranks."""
    return layout.batch * layout.seq * layout.m * layout.dp


def lr_scale(batch_ratio, rule="sqrt"):
    """Factor of the learning rate when the batch grows: sqrt (Adam; Malladi et al. 2022) or linear
    (SGD; Goyal et al. 2017)."""
    return {"sqrt": math.sqrt(batch_ratio), "linear": batch_ratio}[rule]


# ── from here on: the tool ───────────────────────────────────────────────────────────────────

import difflib
import importlib.util
import inspect
import itertools
import signal
from collections import Counter
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import Annotated


@lru_cache(maxsize=None)
def part(name):
    """The module configs or commands of the folder; it imports from this one, also as a script."""
    sys.modules.setdefault("memory_math", sys.modules[__name__])
    spec = importlib.util.spec_from_file_location(f"memory_math_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nearest(name, known, what):
    """The key of `known` that `name` spells; ValueError with the nearest ones if it spells none."""
    if isinstance(name, str) and name in known:
        return name
    close = difflib.get_close_matches(str(name).lower(), known, n=3, cutoff=0.4)
    others = "nearest are" if close else "use one of"
    raise ValueError(f"no {what} is named {name}: {others} {', '.join(close or sorted(known))}")


def divisors(*numbers):
    """The common divisors of numbers, as a sentence puts them: 1, 2, 4 or 8."""
    common = [str(i) for i in range(1, math.gcd(*numbers) + 1) if math.gcd(*numbers) % i == 0]
    return " or ".join([", ".join(common[:-1])] * bool(common[:-1]) + common[-1:])


# ── rows of a data file: which apply, and what their letters multiply to ─────────────────────


def applies(row, names):
    """True if the conditions of a row hold: each word of `when` has its value, or one of a list of
    values, and no word of `unless` has."""

    def holds(word, expected):
        value = names[word]
        if isinstance(expected, bool):
            return bool(value) == expected
        return value in (expected if isinstance(expected, list) else [expected])

    return all(holds(*pair) for pair in row.get("when", {}).items()) and not any(
        holds(*pair) for pair in row.get("unless", {}).items()
    )


def product(letters, names):
    """The product of letters, each a name of `names` or a number."""
    return math.prod(letter if isinstance(letter, int) else names[letter] for letter in letters)


def spelled(letters, names, over=None):
    """The product as text, and the same with numbers: `b * s * D / sp = 1 * 8,192 * 4,096 / 1`."""
    value = lambda letter: f"{letter if isinstance(letter, int) else names[letter]:,}"
    end = (f" / {over}", f" / {value(over)}") if over else ("", "")
    words = " * ".join(map(str, letters)) + end[0]
    numbers = " * ".join(map(value, letters)) + end[1]
    return words + f" = {numbers}" * (words != numbers)


# ── a model is a list of weights ─────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Weight:
    """One tensor. layer is -1 for the embedding, 0..L-1, and L for the final norm and the head;
    kind is embedding, norm, attention, mlp, router, expert, or buffer, which has no gradient;
    linear names the matrix of Megatron-LM that it is part of."""

    name: str
    shape: tuple
    axes: tuple
    layer: int
    kind: str
    linear: str = ""

    @property
    def numel(self):
        return math.prod(self.shape)

    def local_shape(self, degrees):
        """Its shape on one rank: what does not divide is padded up, as vocabularies are."""
        return [-(-n // degrees.get(axis, 1)) for n, axis in zip(self.shape, self.axes)]

    def local(self, degrees):
        """Elements on one rank."""
        return math.prod(self.local_shape(degrees))


@dataclass(frozen=True)
class Model:
    """The shape of a decoder-only transformer. `model_from_config` and `preset` build one."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    gated: bool = True  # SwiGLU or GeGLU: three matrices, not two
    layer_norm: bool = False  # LayerNorm; otherwise RMSNorm
    norm_bias: bool = True  # of a LayerNorm
    norms: str = "before"  # each block; or after it, both, or one norm for both blocks
    qk_norm: str = ""  # head: one for all heads; each: one a head; all: over all heads together
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    sinks: bool = False
    positions: int = 0  # learned positions
    mla: tuple = ()  # q rank (0: none), kv rank, rope dim, nope dim, value dim
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    expert_bias: bool = False
    shared_ffn: int = 0
    shared_gate: bool = False
    router_bias: str = ""  # buffer: balances without a gradient; weight: is learned
    dense_layers: frozenset = frozenset()  # of a mixture of experts: layers with an ordinary MLP
    windows: tuple = ()  # tokens that attention sees, per layer; 0: all
    chunked: bool = False  # the windows are chunks that see nothing of each other
    notes: tuple = ()  # sentences on what the config.json says and this model does not count

    def __post_init__(self):
        nearest(self.norms, ("before", "after", "both", "one"), "place of norms")
        nearest(self.qk_norm, ("", "head", "each", "all"), "norm of q and k")

    def is_moe(self, layer):
        return bool(self.experts) and layer not in self.dense_layers

    @property
    def qk_dim(self):
        return self.mla[2] + self.mla[3] if self.mla else self.head_dim

    @property
    def v_dim(self):
        return self.mla[4] if self.mla else self.head_dim

    def letters(self):
        """The letters and words of the tables, as numbers and flags."""
        q_rank, kv_rank, rope, nope, dv = self.mla or (0, 0, 0, 0, self.head_dim)
        return vars(self) | dict(
            D=self.hidden, H=self.heads, K=self.kv_heads, d=self.qk_dim, dv=dv, F=self.ffn,
            V=self.vocab, E=self.experts, k=self.top_k, expert_F=self.expert_ffn,
            shared_F=self.shared_ffn, q_rank=q_rank, kv_rank=kv_rank, rope=rope,
            kv_down=kv_rank + rope, kv_up=nope + dv, norm_bias=self.layer_norm and self.norm_bias,
        )  # fmt: skip


WEIGHTS = data("weights")


@lru_cache(maxsize=64)
def weights(model):
    """Every weight of the model: a tuple of `Weight`, layer after layer. A tied head is not listed:
    it is the embedding."""
    names, out = model.letters(), []

    @lru_cache
    def rows(section):
        as_list = lambda size: size if isinstance(size, list) else [size]
        return [
            (row["name"], tuple(product(as_list(size), names) for size in row["shape"]),
             tuple(row["split"]), row["kind"], row.get("linear", ""))
            for row in WEIGHTS[section] if applies(row, names)
        ]  # fmt: skip

    def add(section, layer, prefix=""):
        for name, shape, axes, kind, linear in rows(section):
            out.append(Weight(prefix + name, shape, axes, layer, kind, linear))

    add("first", -1)
    for layer in range(model.layers):
        for section in "layer", "moe" if model.is_moe(layer) else "dense":
            add(section, layer, f"layers.{layer}.")
    add("last", model.layers)
    return tuple(out)


def count_parameters(model):
    """All parameters, an exact integer: that of the released checkpoint."""
    return sum(w.numel for w in weights(model))


def count_active(model):
    """Parameters that one token meets: of the routed experts, top_k in each layer."""
    met = lambda w: w.numel * model.top_k // model.experts if w.kind == "expert" else w.numel
    return sum(map(met, weights(model)))


def parameters_by_kind(model):
    """Parameters of each kind of weight, {kind: parameters}."""
    kinds = dict.fromkeys(w.kind for w in weights(model))
    return {kind: sum(w.numel for w in weights(model) if w.kind == kind) for kind in kinds}


RELEASED = data("models")


def model_from_config(config, name="model"):
    """A Model from a Hugging Face config.json, a dict: see configs.py in the folder. ValueError
    names a field that is missing or contradicts another. `notes` name what is not counted."""
    return part("configs").model_from_config(config, name)



@lru_cache(maxsize=64)
def preset(name):
    """A released model by name; ValueError with the nearest names if there is none."""
    name = nearest(name.lower(), RELEASED, "model")
    return model_from_config(RELEASED[name], name)


# ── a layout splits the list ─────────────────────────────────────────────────────────────────

MAY_BE_0 = "zero", "shard"


@dataclass(frozen=True)
class Layout:
    """How a job is split, and how its layers are implemented. The command line is this class."""

    tp: Annotated[int, "tensor-parallel ranks"] = 1
    sp: Annotated[bool, "sequence parallelism inside tp"] = False
    pp: Annotated[int, "pipeline ranks"] = 1
    dp: Annotated[int, "data-parallel ranks"] = 1
    cp: Annotated[int, "context-parallel ranks"] = 1
    ep: Annotated[int, "expert-parallel ranks, folded into tp x cp x dp"] = 1
    etp: Annotated[int, "tensor-parallel ranks inside an expert"] = 1
    schedule: Annotated[str, "pipeline schedule", SCHEDULES] = "1f1b"
    v: Annotated[int, "chunks of a pipeline rank"] = 1
    limit: Annotated[int, "micro-batches that zb-auto may hold; default: 2 pp - 1"] = 0
    stages: Annotated[tuple[int, ...], "layers of each stage, as 7,8,8,7; default: even"] = ()
    zero: Annotated[int, "ZeRO stage", (0, 1, 2, 3)] = 0
    shard: Annotated[int, "ranks that share one ZeRO copy (hybrid); default: all of dp x cp"] = 0
    no_sync: Annotated[bool, "reduce gradients after the last micro-batch; they stay whole"] = False
    recipe: Annotated[str, "precision; activations: 16 bits, but in fp32", tuple(RECIPES)] = "bf16"
    batch: Annotated[int, "sequences in a micro-batch"] = 1
    seq: Annotated[int, "tokens in a sequence"] = 4096
    m: Annotated[int, "micro-batches in a step, per data-parallel rank"] = 1
    recompute: Annotated[str, "activation recomputation", ("none", "selective", "full")] = "none"
    attention: Annotated[str, "attention kernel", ("flash", "unfused")] = "flash"
    mlp: Annotated[str, "gated MLP keeps 3, 4 or 2 F", ("fused", "eager", "recompute")] = "fused"
    norm: Annotated[str, "norm", ("fused", "eager")] = "fused"
    gather: Annotated[str, "sp: gathered inputs for backward", ("again", "keep")] = "again"
    cp_variant: Annotated[str, "attention", ("ring", "all-gather", "ulysses")] = "ring"
    dropout: Annotated[bool, "dropout on attention and residuals"] = False
    loss: Annotated[str, "cross-entropy keeps 4, 6, 2 or 6 bytes a logit",
                    ("eager", "copies", "fused", "megatron")] = "eager"  # fmt: skip
    impl: Annotated[str, "whose buffers are listed too", ("torch", "megatron-te")] = "torch"

    @property
    def world(self):
        return self.tp * self.cp * self.dp * self.pp

    @property
    def itemsize(self):
        return 4 if self.recipe == "fp32" else 2

    @property
    def zero_ranks(self):
        """Ranks over which a dense parameter's state is divided."""
        return self.shard or self.dp * self.cp

    @property
    def expert_replicas(self):
        """Data-parallel ranks of an expert: tp x cp x dp / (etp x ep)."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    def shards(self, group):
        """Ranks over which ZeRO divides a dense or an expert parameter."""
        n = self.zero_ranks
        return math.gcd(n, self.expert_replicas) if group == "expert" else n

    def degrees(self, model):
        """The ranks that split each axis of a weight, {axis: ranks}."""
        kv = min(self.tp, model.kv_heads)
        return {"tp": self.tp, "kv": kv, "ep": self.ep, "etp": self.etp}

    def in_flight(self, rank):
        """Micro-batches that a pipeline rank holds, in all of its layers."""
        held = in_flight(self.schedule, self.pp, self.m, self.v, rank, self.limit)
        return held / 2 if self.schedule == "dualpipe" else held  # of two stages, it crosses one


def flags_of(function):
    """What a function, or Layout, takes: {parameter: (type, help, choices if it has some)}."""
    kinds = inspect.signature(function).parameters.items()
    return {name: (p.annotation.__origin__, *p.annotation.__metadata__)
            for name, p in kinds if hasattr(p.annotation, "__metadata__")}  # fmt: skip


def split_layers(layers, stages):
    """Layers of each stage: even; with a rest, the ends (embedding, head) get the fewest."""
    base, extra = divmod(layers, stages)
    inner_first = sorted(range(stages), key=lambda s: (abs(2 * s - stages + 1), s))
    heavy = set(inner_first[:extra])
    return [base + (s in heavy) for s in range(stages)]


def rank_stages(schedule, n, c=1):
    """Model stages of each pipeline rank, a list of tuples. DualPipe holds every stage twice."""
    if schedule in V_SHAPED:
        return [(r, 2 * n - 1 - r) for r in range(n)]
    if schedule == "dualpipe":
        return [(r, n - 1 - r) for r in range(n)]
    return [tuple(i * n + r for i in range(c)) for r in range(n)]


def validate(model, layout):
    """Raise ValueError, a sentence with the way out, if the model cannot be split like this."""
    lo, m = layout, model
    for name, (kind, _, *choices) in flags_of(Layout).items():
        value, least = getattr(lo, name), 0 if name in (*MAY_BE_0, "limit") else 1
        if kind is int and value < least:
            raise ValueError(f"--{name} {value}: at least {least} is needed")
        if choices and value not in choices[0]:
            nearest(value, [str(choice) for choice in choices[0]], f"--{name}")
    if not m.experts and (lo.ep, lo.etp) != (1, 1):
        raise ValueError(f"--ep {lo.ep} --etp {lo.etp}: {m.name} has no experts: leave both at 1")
    ffns = [m.ffn] * (not m.experts or bool(m.dense_layers)) + [m.shared_ffn] * bool(m.shared_ffn)
    ulysses = lo.cp if lo.cp_variant == "ulysses" else 1
    for flag, degree, what, *counts in (
        ("--tp", lo.tp, "attention heads", m.heads),
        ("--tp", lo.tp, "columns of an MLP", *ffns),
        ("--ep", lo.ep, "experts", m.experts or 1),
        ("--etp", lo.etp, "columns of an expert", m.expert_ffn or 1),
        ("--cp-variant ulysses with --cp", ulysses, "heads of a tp rank", m.heads // lo.tp),
        ("--shard", lo.zero_ranks, "dp x cp ranks", lo.dp * lo.cp),
        ("--ep x --etp", lo.ep * lo.etp, "tp x cp x dp ranks", lo.tp * lo.cp * lo.dp),
    ):
        for count in counts:
            if count % degree:
                use = divisors(*counts)
                raise ValueError(f"{flag} {degree} does not divide {count} {what}: use {use}")
    if m.kv_heads % lo.tp and lo.tp % m.kv_heads:
        use = divisors(m.kv_heads)
        raise ValueError(f"--tp {lo.tp} does not divide {m.kv_heads} key/value heads: use {use}")
    # a rank of cp has two chunks of its own size (zigzag), and cuts its tokens over tp under SP
    pieces = lo.cp * math.lcm(2 if lo.cp > 1 else 1, lo.tp if lo.sp else 1)
    if lo.seq % pieces:
        raise ValueError(f"--seq {lo.seq} does not divide into {pieces} pieces (cp, 2 or tp): "
                         f"use {lo.seq // pieces * pieces or pieces}")
    if 0 < m.positions < lo.seq:
        raise ValueError(f"--seq {lo.seq}: {m.name} has {m.positions} learned positions: "
                         f"use {m.positions} or fewer")
    check_schedule(lo.schedule, lo.pp, lo.m, lo.v)
    if lo.limit and lo.schedule != "zb-auto":
        raise ValueError(f"--limit {lo.limit} means nothing to --schedule {lo.schedule}")
    stages = 1 + max(map(max, rank_stages(lo.schedule, lo.pp, lo.v)))
    if stages > m.layers and not lo.stages:
        raise ValueError(f"--pp {lo.pp}: {stages} stages, and {m.name} has only {m.layers} layers: "
                         "--stages may leave some empty")
    wrong = len(lo.stages) != stages or sum(lo.stages) != m.layers or min(lo.stages) < 0
    if lo.stages and wrong:
        listed = ",".join(map(str, lo.stages))
        raise ValueError(f"--stages {listed}: needed are {stages} numbers that sum to {m.layers}")


# ── memory: the list of tensors kept for backward ────────────────────────────────────────────


@dataclass(frozen=True)
class Item:
    """A line of the budget, such as one tensor kept for backward: its bytes and their formula.
    part: one of `BUDGET`; core: recomputed by selective recompute; letters: of the formula."""

    name: str
    bytes: int
    formula: str
    part: str = "buffers"
    core: bool = False
    letters: tuple = ()


BUDGET = "weights", "gradients", "optimizer", "activations", "buffers"
ACTIVATIONS = data("activations")


@lru_cache(maxsize=64)
def symbols(model, layout):
    """The letters and words of the activation table, for this model on one rank of this layout."""
    m, lo = model, layout
    sp, selective = lo.tp if lo.sp else 1, lo.recompute == "selective"
    tokens = lo.batch * lo.seq // lo.cp
    keeps_far = lo.cp > 1 and lo.cp_variant == "all-gather" and lo.gather == "keep"
    kv, ulysses = max(1, m.kv_heads // lo.tp), lo.cp > 1 and lo.cp_variant == "ulysses"
    gathered = sp if lo.gather == "again" else 1
    return m.letters() | vars(lo) | dict(
        b=lo.batch, s=lo.seq // lo.cp, S=lo.seq, bytes=lo.itemsize, sp=sp, gathered=gathered,
        h=m.heads // lo.tp, kv=kv, f=m.ffn // lo.tp, v=-(-m.vocab // lo.tp),
        expert_f=m.expert_ffn // lo.etp, shared_f=m.shared_ffn // lo.tp,
        R=tokens // sp * m.top_k * lo.etp,  # a balanced router sends so many rows to a rank
        ulysses=ulysses, kv_dealt=math.lcm(kv, lo.cp) if lo.cp_variant == "ulysses" else kv,
        kv_tokens=lo.batch * lo.seq if keeps_far else tokens,
        per_head=bool(m.mla) or (lo.attention == "unfused" and not selective),
        shared_input=m.shared_ffn > 0 and sp > gathered, regathered=sp > 1 and gathered > 1,
    )  # fmt: skip


def _norm_rows(row, eager, layer_norm):
    """The rows of a norm: its input and its statistics; an RMSNorm that is written out computes in
    fp32, and keeps more."""
    elements, name = row["norm"], row["name"]
    if eager and not layer_norm:
        yield f"{name}: fp32 input", [4, *elements]
        yield f"{name}: normalised", [*elements, "bytes"]
    else:
        yield f"{name}: input", [*elements, "bytes"]
    yield f"{name}: statistics", [8 if layer_norm else 4, *row["rows"]]


@lru_cache(maxsize=512)
def saved_in(model, layout, *sections):
    """Rows of sections of the activation table, as a tuple of `Item`: those that apply."""
    names, out = symbols(model, layout), []
    for row in (row for section in sections for row in ACTIVATIONS[section]):
        if not applies(row, names):
            continue
        rows = [(row["name"], row.get("of"))]
        if "norm" in row:
            rows = _norm_rows(row, layout.norm == "eager", model.layer_norm)
        over = row.get("over")
        for name, letters in rows:
            size = product(letters, names) // names.get(over, 1)
            used = tuple(x for x in (*letters, over) if isinstance(x, str))
            formula = spelled(letters, names, over)
            out.append(Item(name, size, formula, core=row.get("core", False), letters=used))
    return tuple(out)


def layer_activations(model, layout, layer=0):
    """What one layer keeps for backward per micro-batch, before recompute drops any of it."""
    return saved_in(model, layout, "layer", "moe" if model.is_moe(layer) else "dense")


def kept_activations(model, layout, layer=0):
    """`layer_activations` after recompute: all, all but the attention core, or only the input."""
    if layout.recompute == "full":
        return saved_in(model, layout, "boundary")
    saved = layer_activations(model, layout, layer)
    return tuple(s for s in saved if not (layout.recompute == "selective" and s.core))


def recomputed(model, layout, layer=0):
    """What comes back in backward while one layer is recomputed, beside what it had kept."""
    had = {s.name for s in kept_activations(model, layout, layer)}
    every = layer_activations(model, replace(layout, recompute="none"), layer)
    return tuple(s for s in every if s.name not in had)


def total(items):
    """Bytes of a list of `Item`."""
    return sum(item.bytes for item in items)


# ── memory: a rank of every stage, at three moments ──────────────────────────────────────────


@dataclass
class StageMemory:
    """One pipeline rank: its layers, its parameters, and the items alive at each moment."""

    rank: int
    layers: list
    params: int
    moments: dict  # moment -> [Item]
    loose: int  # bytes of gradients that flow through one layer, where no item names them

    def bytes_at(self, moment):
        return total(self.moments[moment])

    @property
    def moment(self):
        return max(self.moments, key=self.bytes_at)

    @property
    def peak(self):
        """Bytes that the tensors listed allocate: torch.cuda.max_memory_allocated has these."""
        return self.bytes_at(self.moment)

    @property
    def reserve(self):
        """(least, most) bytes that the allocator reserves beside the peak, an estimate: 2 to 8 %
        for fragmentation, and gradients between the parts of a layer."""
        return 0.02 * self.peak, 0.08 * self.peak + self.loose

    @property
    def overhead(self):
        """(least, most) bytes that the driver sees beside the peak, an estimate: `reserve`, a CUDA
        context of 0.5 to 1 GiB, NCCL's 0.3 to 2 GiB."""
        low, high = self.reserve
        return low + 0.8 * GiB, high + 3 * GiB

    def verdict(self, hbm):
        """Whether the rank fits, is tight or does not fit `hbm` bytes."""
        low, high = (self.peak + more for more in self.overhead)
        return "fits" if high <= hbm else "tight" if low <= hbm else "does not fit"


def placed_layers(model, layout):
    """Layers of each pipeline rank; -1 is the embedding, L the final norm and the head."""
    ranks = rank_stages(layout.schedule, layout.pp, layout.v)
    stages = 1 + max(map(max, ranks))
    sizes = list(layout.stages) or split_layers(model.layers, stages)
    ends = [0, *itertools.accumulate(sizes)]
    of = [list(range(*pair)) for pair in itertools.pairwise(ends)]
    of[0].insert(0, -1)
    of[-1].append(model.layers)
    return [sorted(layer for stage in owned for layer in of[stage]) for owned in ranks]


@lru_cache(maxsize=64)
def _by_layer(model):
    layers = {}
    for w in weights(model):
        layers.setdefault(w.layer, []).append(w)
    return layers


def local_parameters(model, layout, layers):
    """Elements on one rank, {(layer, group): elements}; group is dense, expert or buffer. A rank
    that has the head of a tied model but not its embedding holds a copy of the embedding."""
    degrees, out = layout.degrees(model), Counter()
    for layer in layers:
        copies = layer == model.layers and model.tied and -1 not in layers
        for w in _by_layer(model)[layer] + _by_layer(model)[-1][:1] * copies:
            group = w.kind if w.kind in ("expert", "buffer") else "dense"
            out[layer, group] += w.local(degrees)
    return out


def one_of_each(model, layers):
    """A dense layer and a mixture-of-experts layer, as far as a rank has them."""
    return {model.is_moe(x): x for x in layers if 0 <= x < model.layers}.values()


def group_size(parts, group):
    """Elements of a group of `local_parameters`."""
    return sum(n for (_, g), n in parts.items() if g == group)


def _state_items(layout, parts):
    """Items of weights, gradients and optimizer; and the buffers that ZeRO-2 and ZeRO-3 work in."""
    held, how, recipe = Counter(), {}, RECIPES[layout.recipe]
    for group in "dense", "expert":
        params, ranks = group_size(parts, group), layout.shards(group)
        sizes = state_items(params, ranks, layout.zero, layout.recipe, layout.no_sync)
        for name, size in sizes.items():
            cut = f" / {ranks}" if size < params * recipe[name] else ""
            line = [f"{params:,} {group} * {recipe[name]}{cut}"] * (params > 0)
            held[name], how[name] = held[name] + size, how.get(name, []) + line
    if buffers := group_size(parts, "buffer"):
        held["weights"] += 4 * buffers
        how["weights"].append(f"{buffers:,} buffers * 4")
    units, work = Counter(), []  # what is gathered and reduced at once: the parts of one layer
    for (layer, group), n in parts.items():
        units[layer] += n * (group != "buffer" and layout.shards(group) > 1)
    unit = max(units.values(), default=0)
    for name, part, count in ("gathered", "weights", 2), ("unreduced", "gradients", 1):
        cut_from = 3 if part == "weights" else 2  # weights: of the next layer as well
        whole = part == "gradients" and layout.no_sync
        if layout.zero >= cut_from and unit and not whole:
            count, width = min(count, len(units)), recipe[part]
            size, formula = count * unit * width, f"{count} * {unit:,} * {width}"
            work.append(Item(f"{name} {part}", size, formula))
    part = lambda name: next((x for x in BUDGET[:2] if x in name), "optimizer")
    return [Item(name, held[name], " + ".join(how[name]), part(name)) for name in held], work


def _held_activations(model, layout, layers, flight, last_flight):
    """Items that wait for backward on a rank, each times the micro-batches in flight; last_flight:
    micro-batches whose head and loss wait."""
    kinds = Counter({-1: "embedding", model.layers: "head"}.get(x, model.is_moe(x)) for x in layers)
    lists = {"embedding": ("embedding", "first"), "head": ("head and loss", "last")}
    items = []
    for kind, count in kinds.items():
        if kind in lists:
            name, saved = lists[kind][0], saved_in(model, layout, lists[kind][1])
        else:
            name = f"{count} {'mixture-of-experts' if kind else 'dense'} layers"
            layer = next(x for x in one_of_each(model, layers) if model.is_moe(x) == kind)
            saved = kept_activations(model, layout, layer)
        held = last_flight if kind == "head" else flight
        size, line = math.ceil(held * count * total(saved)), f"{count} * {total(saved):,}"
        line = f"{held} in flight * {line}"
        items.append(Item(f"activations of {name}", size, line, "activations"))
    return items


def _dummy_gradients(model, layout, layers):
    """The buffers of Transformer Engine. It adds the true gradient of a weight to an fp32 buffer,
    and returns a 16-bit one that nobody reads: one for each distinct shape, kept for good. Source:
    transformer_engine/pytorch/module/base.py, get_dummy_wgrad."""
    degrees, shapes = layout.degrees(model), set()
    for layer in layers:
        rows, columns = Counter(), {}
        for w in _by_layer(model)[layer]:
            if w.linear:
                *_, row, columns[w.linear] = w.local_shape(degrees)
                rows[w.linear] += row
        shapes |= {(rows[name], columns[name]) for name in rows}
    size = 2 * sum(map(math.prod, shapes))
    listed = " + ".join(f"{a:,} x {b:,}" for a, b in sorted(shapes))
    return [Item("16-bit gradients of each shape", size, f"2 * ({listed})")] * (size > 0)


def stage_memory(model, layout, rank=0):
    """`StageMemory` of one pipeline rank: what is alive in the loss, in the deepest backward and at
    the optimizer step. Gradients count throughout, as from the second micro-batch on; a fused
    optimizer needs nothing of its own at the step."""
    lo, layers = layout, placed_layers(model, layout)[rank]
    parts, flight = local_parameters(model, lo, layers), lo.in_flight(rank)
    states, work = _state_items(lo, parts)
    held = partial(_held_activations, model, lo, layers, flight)
    again = [total(recomputed(model, lo, x)) for x in one_of_each(model, layers)]
    redo = [Item("one layer recomputed", max(again, default=0), "what it keeps otherwise")]
    names, has_head = symbols(model, lo), model.layers in layers
    peak, flowing, te = [], [], lo.impl == "megatron-te"
    if te:
        work = work + _dummy_gradients(model, lo, layers)
        flowing = [*saved_in(model, lo, "layer backward")]
    if has_head:
        peak = [*saved_in(model, lo, "loss peak", *["head backward"] * te)]
    backward_of_head = max(0, flight - 1)  # the first to go back has let go of its logits
    moments = {
        "loss" if has_head else "last forward":
            states + held(flight) + peak + (work if te else work[: lo.zero == 3]),
        "deepest backward": states + held(backward_of_head) + redo * (lo.recompute != "none")
            + work + flowing,
        "optimizer step": states,
    }  # fmt: skip
    widest = 3 * max(names["f"] * names["b"] * names["s"], names["expert_f"] * names["R"])
    widest += 2 * names["b"] * names["s"] * names["D"]
    loose = 0 if te else widest * names["bytes"]
    return StageMemory(rank, layers, sum(parts.values()), moments, loose)


def estimate(model, layout):
    """Memory of one rank of every pipeline rank: a list of `StageMemory`. Raises as `validate`."""
    validate(model, layout)
    return [stage_memory(model, layout, rank) for rank in range(layout.pp)]


def heaviest(stages):
    """The StageMemory with the highest peak."""
    return max(stages, key=lambda stage: stage.peak)


def grouped(stage, moment=None):
    """Bytes of a rank by part of `BUDGET`, at its peak."""
    sums = dict.fromkeys(BUDGET, 0)
    for item in stage.moments[moment or stage.moment]:
        sums[item.part] += item.bytes
    return sums


def as_flags(layout, base=Layout()):
    """The flags by which a layout differs from another: a list."""
    pairs = [(f.name, getattr(layout, f.name)) for f in fields(layout)]
    pairs = [(name, x) for name, x in pairs if x != getattr(base, name)]
    say = lambda x: ",".join(map(str, x)) if isinstance(x, tuple) else x
    texts = [f"--{name.replace('_', '-')} {say(x)}" for name, x in pairs]
    return [text.removesuffix(" True") for text in texts]


def remedies(model, layout, hbm):
    """Single changes that lower the peak, the best first: (flags, peak bytes, verdict, layout).
    Another axis takes its ranks from dp; where dp is odd, and for dp itself, it takes new GPUs."""
    lo, keeps = layout, {} if layout.dp % 2 else {"dp": layout.dp // 2}
    changes = [{"zero": z} for z in range(lo.zero + 1, 4)] + [{"dp": 2 * lo.dp}, {"ep": 2 * lo.ep}]
    changes += [{axis: 2 * getattr(lo, axis)} | keeps for axis in ("tp", "pp", "cp")]
    changes += [{"recompute": "selective"}, {"recompute": "full"}, {"sp": True}, {"batch": 1}]
    changes += [{"loss": "fused"}, {"attention": "flash"}, {"mlp": "recompute"}]
    now, better = heaviest(estimate(model, lo)).peak, []
    for change in changes:
        changed = replace(lo, **change)
        try:
            top = heaviest(estimate(model, changed))
        except ValueError:
            continue
        if top.peak < 0.97 * now:
            flags = " ".join(as_flags(changed, lo))
            better.append((flags, top.peak, top.verdict(hbm), changed))
    return sorted(better, key=lambda row: row[1])


def way_out(model, layout, hbm, most=9):
    """The changes that make a layout fit, at most `most` of them: each is the one that helps most
    after those before it. Returns (flags, peak bytes, verdict, layout)."""
    changed, peak, says = layout, None, ""
    while says != "fits" and most and (better := remedies(model, changed, hbm)):
        (_, peak, says, changed), most = better[0], most - 1
    return " ".join(as_flags(changed, layout)), peak, says, changed


# ── traffic: the calls of a step ─────────────────────────────────────────────────────────────

TRAFFIC = data("traffic")


def transfers(section, axis, n, hideable=False, **names):
    """Rows of a section of the traffic table, as a list of `Transfer`: those that apply, with the
    letters given. One rank sends nothing."""
    listed, names = [], {"n": n, **names}
    for row in TRAFFIC[section] if n > 1 else ():
        calls = product(row.get("calls", [1]), names)
        if applies(row, names) and calls:
            size, over = product(row["of"], names), names.get(row.get("over"), 1)
            size = size // over if isinstance(size, int) and size % over == 0 else size / over
            listed.append(Transfer(axis, row["phase"], row["call"], calls, size, n, hideable))
    return listed


def tp_layer_traffic(
    tokens, hidden, tp, itemsize=2, sp=False, regather=True, recompute="none", pairs=2, last=True
):
    """Tensor parallelism, one layer, one micro-batch: attention and MLP are each a pair of a column
    and a row product.

    Without sp: 2 all-reduces forward, 2 backward. With sp each becomes an all-gather and a
    reduce-scatter, the same bytes, and `regather` fetches the two inputs again for backward.
    Full recompute repeats forward except its last collective: nothing after it is needed. Routed
    experts stand outside the pairs: a layer of them has one, which is not the layer's last.
    """
    names = dict(tokens=tokens, D=hidden, bytes=itemsize, sp=sp, regather=regather)
    names |= dict(recompute=recompute, pairs=pairs, repeated=pairs - last)
    return transfers("layer over tp", "tp", tp, **names)


def ep_traffic(
    tokens, top_k, hidden, ep, itemsize=2, remote_rows=None, recompute="none", experts=0
):
    """Experts, one layer, one micro-batch: dispatch and combine, forward and backward.

    remote_rows: rows that leave the rank in one all-to-all, the mean of dispatch and combine; when
    balanced, tokens * top_k * (ep-1)/ep. experts: each rank first tells how many rows go to each
    expert, in 8 bytes an expert.
    """
    rows = tokens * top_k if remote_rows is None else remote_rows * ep / max(1, ep - 1)
    names = dict(R=rows, D=hidden, bytes=itemsize, E=experts, recompute=recompute)
    return transfers("experts", "ep", ep, **names)


def cp_traffic(
    variant, seq, heads, kv_heads, head_dim, cp, itemsize=2, batch=1, grad_itemsize=4,
    regather=True, recompute="none",
):  # fmt: skip
    """Context parallelism, one layer, one micro-batch: ring, all-gather or ulysses.

    ring sends KV to cp-1 neighbours in turn, again in backward, and dKV (grad_itemsize bytes) cp
    times, to bring it home. all-gather fetches KV, fetches it again unless it is kept, and
    reduce-scatters dKV. ulysses deals q, k, v and the output, and their gradients back; key/value
    heads that cp does not divide are repeated until it does. Recompute repeats what forward sent;
    a selective one starts inside ulysses, whose tensors are dealt out by then.
    """
    nearest(variant, ("ring", "all-gather", "ulysses"), "context-parallel variant")
    names = dict(b=batch, S=seq, K=kv_heads, d=head_dim, bytes=itemsize, grad_bytes=grad_itemsize)
    names |= dict(dealt_heads=heads + math.lcm(kv_heads, cp), hops=cp - 1)
    names |= dict(regather=regather, recompute=recompute)
    return transfers(variant, "cp", cp, variant == "ring", **names)


def pp_sends(schedule, n, c=1):
    """(forward, backward) sends of one micro-batch by each pipeline rank, a list. DualPipe feeds
    half of the micro-batches from each end."""
    ranks = rank_stages(schedule, n, c)
    routes = [sorted((stage, rank) for rank in range(n) for stage in ranks[rank])]
    if schedule == "dualpipe":
        routes = [sorted((ranks[rank][way], rank) for rank in range(n)) for way in (0, 1)]
    sends = [[0, 0] for _ in range(n)]
    for route in routes:
        for (_, here), (_, there) in itertools.pairwise(route):
            sends[here][0] += (here != there) / len(routes)
            sends[there][1] += (here != there) / len(routes)
    return sends


def pp_traffic(tokens, hidden, p, m, schedule="1f1b", v=1, itemsize=2, share=1, rank=0):
    """Pipeline, one step of one rank: each crossing sends an activation forward, and its gradient
    back. share > 1: each of so many tp ranks sends its part (sequence parallel)."""
    ahead, back = pp_sends(schedule, p, v)[rank]
    names = dict(tokens=tokens, D=hidden, bytes=itemsize, m=m, share=share, ahead=ahead, back=back)
    return transfers("boundary of stages", "pp", p, **names)


def zero_traffic(params, ranks, stage=0, recipe="bf16", replicas=1, m=1, no_sync=False):
    """Data parallelism, one step: gradients of `params` parameters, and what ZeRO adds.

    Stage 0 all-reduces; 1 reduce-scatters and gathers the new weights, the same bytes; 2 has to
    reduce-scatter in every micro-batch; 3 gathers weights in forward and again in backward of every
    micro-batch: 3/2 of stage 0. replicas > 1 (hybrid): each sum is all-reduced among them too.
    """
    weight, grad = (RECIPES[recipe][part] for part in ("weights", "gradients"))
    names = dict(P=params, weight_bytes=weight, grad_bytes=grad, stage=stage, m=m)
    names["reductions"] = 1 if stage < 2 or no_sync else m
    calls = transfers("zero", "dp", ranks, True, **names)
    names["P"] /= ranks
    return calls + transfers("replicas of a shard", "dp", replicas, True, **names)


def _copies_traffic(model, lo, layers):
    """Tensor parallelism, one step: gradients of what several tp ranks hold. Under sp each copy of
    a norm or a router saw other tokens. With sp or without, a norm of q and k saw other heads, and
    a repeated key/value head saw other queries."""
    listed = [w for x in layers for w in _by_layer(model)[x] if w.kind not in ("expert", "buffer")]
    size = 0
    for w in listed:
        if "kv" in w.axes:
            size += w.numel * (lo.tp > model.kv_heads)
        elif "tp" not in w.axes:
            size += w.numel * (lo.sp or w.name.endswith(("q_norm", "k_norm")))
    size *= RECIPES[lo.recipe]["gradients"]
    return [Transfer("tp", "step", "all_reduce", 1, size, lo.tp)] if size and lo.tp > 1 else []


def _twins_traffic(model, lo, layers, parts):
    """Pipeline, one step: gradients of what two pipeline ranks hold: a tied embedding with its ends
    on different ranks or, under DualPipe, every stage."""
    ends, size = {-1, model.layers} & {*layers}, 0
    if lo.schedule == "dualpipe" and lo.pp > 1:
        size = group_size(parts, "dense") + group_size(parts, "expert")
    elif model.tied and len(ends) == 1:
        size = _by_layer(model)[-1][0].local(lo.degrees(model))
    size *= RECIPES[lo.recipe]["gradients"]
    return [Transfer("pp", "step", "all_reduce", 1, size, 2)] if size else []


def _layer_traffic(model, lo, names, layer):
    """Everything that a rank sends for one layer of one micro-batch, a list of `Transfer`."""
    tokens, D, size = names["b"] * names["s"], names["D"], lo.itemsize
    how = dict(regather=lo.gather == "again", recompute=lo.recompute)
    moe = model.is_moe(layer)
    pairs = 1 if moe and not model.shared_ffn else 2
    out = tp_layer_traffic(tokens, D, lo.tp, size, lo.sp, pairs=pairs, last=not moe, **how)
    sizes = lo.seq, names["h"], names["kv"], model.qk_dim, lo.cp, size, lo.batch
    out += cp_traffic(lo.cp_variant, *sizes, **how)
    if moe:
        rows = tokens // names["sp"] * lo.etp
        out += tp_layer_traffic(rows, D, lo.etp, size, True, pairs=1, last=False, **how)
        sizes = rows, model.top_k, D, lo.ep, size
        out += ep_traffic(*sizes, recompute=lo.recompute, experts=model.experts)
    return out


def traffic(model, layout, rank=0):
    """Everything that a rank of pipeline rank `rank` sends in a step: a list of `Transfer`. Latent
    attention is counted with the pair of products of ordinary attention."""
    lo, layers, names = layout, placed_layers(model, layout)[rank], symbols(model, layout)
    tokens, D = names["b"] * names["s"], names["D"]
    shape = dict(tokens=tokens, D=D, bytes=lo.itemsize, sp=lo.sp, regather=lo.gather == "again")
    end = partial(transfers, axis="tp", n=lo.tp, **shape)
    out = end("embedding over tp") * (-1 in layers)
    out += end("head and loss over tp") * (model.layers in layers)
    for layer in (x for x in layers if 0 <= x < model.layers):
        out += _layer_traffic(model, lo, names, layer)
    out = [replace(x, count=x.count * lo.m) for x in out] + _copies_traffic(model, lo, layers)
    out += pp_traffic(tokens, D, lo.pp, lo.m, lo.schedule, lo.v, lo.itemsize, names["sp"], rank)
    parts = local_parameters(model, lo, layers)
    out += _twins_traffic(model, lo, layers, parts)
    for group in "dense", "expert":
        everyone = lo.expert_replicas if group == "expert" else lo.dp * lo.cp
        n, params = lo.shards(group) if lo.zero else everyone, group_size(parts, group)
        sizes = params, n, lo.zero, lo.recipe, everyone // n, lo.m, lo.no_sync
        out += zero_traffic(*sizes) if params else []
    counts = Counter()
    for x in out:
        counts[replace(x, count=0)] += x.count
    return [replace(x, count=count) for x, count in counts.items()]


def busiest(model, layout):
    """The pipeline rank that sends most."""
    return max(range(layout.pp), key=lambda rank: sent(traffic(model, layout, rank)))


@dataclass(frozen=True)
class Topology:
    """Two tiers. Bandwidths in bytes/s, one direction, per GPU (NVLink 4 is sold as 900 GB/s for
    both directions together: 450 here); latency in seconds per step of a ring."""

    node: int = 8
    inner: float = 450e9
    outer: float = 50e9
    latency: float = 10e-6

    def leaves_node(self, lo, axis):
        """True if the axis' groups leave the node; ranks are numbered tp, cp, dp, pp outward."""
        below = {"tp": 1, "cp": lo.tp, "dp": lo.tp, "ep": lo.etp, "pp": lo.tp * lo.cp * lo.dp}
        size = {"tp": lo.tp, "cp": lo.cp, "dp": lo.cp * lo.dp, "ep": lo.ep, "pp": lo.pp}
        return below[axis] * size[axis] > self.node

    def seconds(self, layout, transfer):
        """Bytes over the slowest link the group uses, and a latency for every step of the ring."""
        hops = transfer.ranks - 1
        steps = transfer.count * {"all_reduce": 2 * hops, "send": 1}.get(transfer.collective, hops)
        bandwidth = self.outer if self.leaves_node(layout, transfer.axis) else self.inner
        return transfer.sent / bandwidth + steps * self.latency


# ── compute, failures and offload ────────────────────────────────────────────────────────────

PEAKS = data("gpus")
NO_RATES = "hbm", "size", "words", "source"


def data_sheet(gpu):
    """The data sheet of a GPU, (precision -> dense FLOP/s, HBM bytes/s), by its key or by the name
    that its driver gives it ("NVIDIA H100 PCIe"). ValueError if no such GPU is known."""
    words = set(gpu.lower().replace("-", " ").split())
    known = [key for key, row in PEAKS.items() if words >= {*row["words"]} and "mig" not in words]
    closest = lambda key: len(PEAKS[key]["words"])
    row = PEAKS[max(known, key=closest) if known else nearest(gpu, PEAKS, "GPU")]
    rates = {name: tera * 1e12 for name, tera in row.items() if name not in NO_RATES}
    return rates, row["hbm"] * 1e12


def peak_flops(gpu, precision="bf16", sparse=False):
    """Peak FLOP/s of a GPU of `data_sheet`. sparse doubles it, and must be asked for: training is
    dense. ValueError if the GPU has no such precision."""
    peaks, _ = data_sheet(gpu)
    return peaks[nearest(precision, peaks, f"precision of {gpu}")] * (2 if sparse else 1)


CONVENTIONS = {
    "6N": "6 x all active parameters; attention not counted",
    "palm": "6N and full attention (PaLM, appendix B)",
    "full": "6 x parameters that multiply (no embedding table), full attention",
    "causal": "the same, with the half of attention that a causal mask leaves (Megatron-LM)",
}


def model_attention_flops(model, seq, causal=False):
    """`attention_flops` of all layers, each with its window."""
    windows = Counter(model.windows or [0] * model.layers)
    sizes = model.heads, model.qk_dim, seq, causal, model.v_dim
    each = lambda window: (window, model.chunked and window > 0)
    return sum(attention_flops(count, *sizes, *each(window)) for window, count in windows.items())


def flops_per_token(model, seq, convention="6N"):
    """Training FLOPs of one token, forward and backward, under a convention of `CONVENTIONS`."""
    nearest(convention, CONVENTIONS, "convention")
    active = count_active(model)
    attention = model_attention_flops(model, seq, convention == "causal")
    if convention in ("full", "causal"):
        active -= model.vocab * model.hidden * (not model.tied)  # a tied table multiplies: the head
        active -= model.positions * model.hidden
    return 6 * active + (0 if convention == "6N" else attention)


# Llama 3 report, section 3.3.4: 419 unexpected interruptions in 54 days on 16,384 GPUs.
HOURS_PER_FAILURE = 54 * 24 * 16384 / 419


def hours_between_failures(gpus, hours_of_one=HOURS_PER_FAILURE):
    """Expected hours between interruptions of a job on `gpus` GPUs."""
    if gpus < 1:
        raise ValueError(f"--gpus {gpus}: at least 1 is needed")
    return hours_of_one / gpus


def young_interval(save, mtbf):
    """Seconds between checkpoints that lose least: sqrt(2 x save x MTBF) (Young 1974)."""
    return math.sqrt(2 * save * mtbf)


def daly_interval(save, mtbf):
    """`young_interval` to higher order, where saves are not short beside the MTBF (Daly 2006, eq.
    37)."""
    if save >= 2 * mtbf:
        return mtbf
    x = math.sqrt(save / (2 * mtbf))
    return young_interval(save, mtbf) * (1 + x / 3 + x * x / 9) - save


def lost_share(interval, save, mtbf, restart=0.0):
    """Share of time lost to saving, to work done twice, and to restarts: to first order, and never
    more than all of it."""
    return min(1.0, save / interval + (interval / 2 + restart) / mtbf)


def offload_bytes(params, ranks=1, recipe="bf16", tier="cpu"):
    """Bytes that one rank moves per step for an optimizer that lives elsewhere, by direction.

    cpu (ZeRO-Offload): gradients out, new weights in, the step runs on the CPU. nvme
    (ZeRO-Infinity): besides, master and moments are read and written back. beyond/offload.py counts
    the same bytes in a run.
    """
    items = state_items(int(params), int(ranks), 3, recipe)
    optimizer = sum(n for name, n in items.items() if name == "fp32 master" or "moment" in name)
    moved = {"gradients out": items["gradients"], "weights in": items["weights"]}
    if tier == "nvme":
        moved |= {"optimizer read": optimizer, "optimizer written": optimizer}
    return moved


# ── parts of their own: the command line, and the guide's claims ─────────────────────────────


def guide_claims(section=None):
    """The guide's claims, each with the value `recomputed` here: see commands.py in the folder."""
    return part("commands").guide_claims(section)


def main(argv=None):
    """Run one command of commands.py in the folder: exit status 2 and a sentence if it is wrong."""
    return part("commands").main(argv)


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    sys.exit(main())
