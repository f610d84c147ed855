"""memory_math · what a training job holds, sends and costs, before anyone pays for it

One list of tensors drives everything. A config.json becomes a list of weights, each with its shape
and the axis that splits each dimension; a layout turns that list into bytes per rank. Activations
are a second list: one line per tensor kept for backward, written as the formula that is evaluated.

    exact      weights, gradients, optimizer states, saved activations, logits, bytes sent, bubbles
    a range    CUDA context, NCCL buffers, fragmentation, gradients in flight: never added to the
               exact bytes, always printed beside them
    assumed    times: printed with the bandwidths and the convention they rest on

Where to look: formulas are lines of tables. WEIGHTS (shapes), RECIPES (bytes of a parameter),
ACTIVATIONS (bytes kept; logits at its [last] and [loss peak]), SCHEDULE_FORMS (bubbles and
micro-batches in flight), TRAFFIC (bytes sent), PEAKS. `estimate --explain` puts numbers in.

    python memory_math.py params --model llama-3-8b
    python memory_math.py estimate --model llama-3-70b --tp 8 --sp --pp 4 --dp 8 --zero 1 --explain
    python memory_math.py traffic --model llama-3-70b --tp 8 --sp --dp 8
    python memory_math.py bubble --schedule zb-h2 --p 8 --m 32
    python memory_math.py compute --model llama-3-70b --tokens 1.4e12 --gpus 64 --gpu h100
    python memory_math.py guide --wrong
    python memory_math.py plot memory --model llama-3-70b --tp 8 --pp 8 --out memory.png

`estimate` says of a layout whether it fits and, if not, what would; and, if it is slow, why.

Units: bytes, seconds, FLOPs. GiB = 2**30, GB = 1e9; memory is printed in GiB. A GPU sold with
80 GB shows 81,559 MiB = 79.6 GiB. Guide sections: all memory and capacity sections, ZeRO, cost
economics, MFU/HFU/MBU; `guide` prints the guide's own numbers beside the recomputed ones.
"""
# T tokens of a micro-batch on this rank · b micro-batch · s sequence here · S whole sequence
# h hidden · A heads (a here) · K key/value heads (k here) · d head size · F ffn width (f here)
# V vocabulary · e bytes per element · L layers · p pipeline ranks · m micro-batches

import argparse
import ast
import difflib
import inspect
import itertools
import json
import math
import signal
import sys
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, get_args

GiB = 2**30
GUIDE = Path(__file__).with_name("memory_math_guide.json")


# ── formulas are text: shown to the reader, and evaluated ────────────────────────────────────

_ALLOWED = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Call, ast.Name)
_ALLOWED += (ast.Constant, ast.Attribute, ast.Load, ast.operator, ast.unaryop, ast.cmpop)
_ALLOWED += (ast.BoolOp, ast.boolop, ast.Tuple, ast.keyword)


@lru_cache(maxsize=None)
def _compiled(formula):
    tree = ast.parse(formula, mode="eval")
    for node in ast.walk(tree):
        named = node.attr if isinstance(node, ast.Attribute) else ""
        if not isinstance(node, _ALLOWED) or named.startswith("_"):
            raise ValueError(f"{formula!r}: {type(node).__name__} has no place in a formula")
    return compile(tree, formula, "eval")


def evaluate(formula, names):
    """The value of an arithmetic expression over names (numbers, or functions it may call)."""
    return eval(_compiled(formula), {"__builtins__": {}}, names)


def substituted(formula, names):
    """The formula with its numbers put in, as `--explain` prints it."""
    tree = ast.parse(formula, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(names.get(node.id), (int, float)):
            value, short = names[node.id], f"{names[node.id]:g}"
            node.id = short if float(short) == value and type(value) is float else str(value)
    return ast.unparse(tree)


def nearest(name, known, what):
    """The key of `known` that `name` spells, or ValueError with the nearest ones."""
    if isinstance(name, str) and name in known:
        return name
    close = difflib.get_close_matches(str(name).lower(), known, n=3, cutoff=0.4)
    others = "nearest are" if close else "use one of"
    raise ValueError(f"no {what} is named {name}: {others} {', '.join(close or sorted(known))}")


def divisors(*numbers):
    """The common divisors, as a sentence puts them: 1, 2, 4 or 8."""
    found = [str(i) for i in range(1, math.gcd(*numbers) + 1) if math.gcd(*numbers) % i == 0]
    return " or ".join([", ".join(found[:-1])] * bool(found[:-1]) + found[-1:])


# ── a model is a list of weights ─────────────────────────────────────────────────────────────

# name | each dimension, and after a slash the axis that splits it | kind | only where
# tp: heads, ffn or vocabulary. kv: key/value heads over tp, replicated where tp exceeds them.
# ep: whole experts. etp: tp inside an expert. All experts of a layer are one stacked tensor.
WEIGHTS = """
[first]
embedding          | V/tp h              | embedding
positions          | P h                 | embedding | P
[layer]
q_a_proj           | rq h                | attention | rq
q_a_layernorm      | rq                  | norm      | rq
q_b_proj           | A*d/tp rq           | attention | rq
q_proj             | A*d/tp h            | attention | not rq
q_proj.bias        | A*d/tp              | attention | qkv_bias
kv_a_proj_with_mqa | rkv+rope h          | attention | mla
kv_a_layernorm     | rkv                 | norm      | mla
kv_b_proj          | A*(nope+dv)/tp rkv  | attention | mla
k_proj             | K*d/kv h            | attention | not mla
k_proj.bias        | K*d/kv              | attention | qkv_bias
v_proj             | K*d/kv h            | attention | not mla
v_proj.bias        | K*d/kv              | attention | qkv_bias
q_norm             | d                   | norm      | qk_norm
k_norm             | d                   | norm      | qk_norm
o_proj             | h A*dv/tp           | attention
o_proj.bias        | h                   | attention | out_bias
norm1              | h                   | norm
norm1.bias         | h                   | norm      | layer_norm
norm2              | h                   | norm
norm2.bias         | h                   | norm      | layer_norm
norm3              | h                   | norm      | norms == 4
norm4              | h                   | norm      | norms == 4
[dense]
gate_proj          | F/tp h              | mlp       | gated
gate_proj.bias     | F/tp                | mlp       | gated and mlp_bias
up_proj            | F/tp h              | mlp
up_proj.bias       | F/tp                | mlp       | mlp_bias
down_proj          | h F/tp              | mlp
down_proj.bias     | h                   | mlp       | mlp_bias
[moe]
router             | E h                 | router
router.bias        | E                   | buffer    | router_bias
experts.gate_proj  | E/ep fe/etp h       | expert
experts.up_proj    | E/ep fe/etp h       | expert
experts.down_proj  | E/ep h fe/etp       | expert
shared.gate_proj   | Fs/tp h             | mlp       | Fs
shared.up_proj     | Fs/tp h             | mlp       | Fs
shared.down_proj   | h Fs/tp             | mlp       | Fs
shared.gate        | 1 h                 | router    | shared_gate
[last]
final_norm         | h                   | norm
final_norm.bias    | h                   | norm      | layer_norm
head               | V/tp h              | embedding | not tied
"""


def parse_table(text):
    """{section: [cells of each row]} of a table written as text."""
    sections = {}
    for line in text.strip().splitlines():
        if line.startswith("["):
            rows = sections[line.strip("[]")] = []
        else:
            rows.append([cell.strip() for cell in line.split("|")])
    return sections


@dataclass(frozen=True)
class Weight:
    """One tensor. layer is -1 for the embedding, 0..L-1, and L for the final norm and the head;
    kind is embedding, norm, attention, mlp, router, expert, or buffer, which has no gradient."""

    name: str
    shape: tuple
    axes: tuple
    layer: int
    kind: str

    @property
    def numel(self):
        return math.prod(self.shape)

    def local(self, degrees):
        """Elements on one rank; what does not divide is padded up, as vocabularies are."""
        return math.prod(-(-n // degrees.get(axis, 1)) for n, axis in zip(self.shape, self.axes))


@dataclass(frozen=True)
class Model:
    """The shape of a decoder-only transformer. Built by `model_from_config` or `preset`."""

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
    layer_norm: bool = False  # LayerNorm with a bias; otherwise RMSNorm
    norms: int = 2  # per layer; Gemma 2 and 3 also normalise what each block returns
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    positions: int = 0  # learned positions (GPT-2)
    mla: tuple = ()  # q rank (0: none), kv rank, rope dim, nope dim, value dim
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    dense_layers: frozenset = frozenset()  # of a mixture of experts: layers with an ordinary MLP

    def is_moe(self, layer):
        return bool(self.experts) and layer not in self.dense_layers

    @property
    def qk_dim(self):
        return self.mla[2] + self.mla[3] if self.mla else self.head_dim

    @property
    def v_dim(self):
        return self.mla[4] if self.mla else self.head_dim

    def letters(self):
        """The names that the tables use, as numbers and flags."""
        rq, rkv, rope, nope, _ = self.mla or (0, 0, 0, 0, 0)
        return vars(self) | dict(
            h=self.hidden, A=self.heads, K=self.kv_heads, d=self.qk_dim, dv=self.v_dim, F=self.ffn,
            V=self.vocab, P=self.positions, E=self.experts, fe=self.expert_ffn, Fs=self.shared_ffn,
            rq=rq, rkv=rkv, rope=rope, nope=nope,
        )  # fmt: skip


_WEIGHTS = parse_table(WEIGHTS)


@lru_cache(maxsize=64)
def weights(model):
    """Every weight of the model: a tuple of `Weight`, layer after layer. A tied head is not listed:
    it is the embedding. Source: the tensors of the released checkpoints."""
    names, out = model.letters(), []

    def add(section, layer, prefix=""):
        for name, dims, kind, *where in _WEIGHTS[section]:
            if not where or evaluate(where[0], names):
                sizes, axes = zip(
                    *(dim.split("/") if "/" in dim else (dim, "") for dim in dims.split())
                )
                shape = tuple(evaluate(size, names) for size in sizes)
                out.append(Weight(prefix + name, shape, axes, layer, kind))

    add("first", -1)
    for layer in range(model.layers):
        for section in "layer", "moe" if model.is_moe(layer) else "dense":
            add(section, layer, f"layers.{layer}.")
    add("last", model.layers)
    return tuple(out)


def count_parameters(model):
    """All parameters, an exact integer; equal to the released checkpoint."""
    return sum(w.numel for w in weights(model))


def count_active(model):
    """Parameters that one token meets: of the routed experts, top_k of each layer's."""
    met = lambda w: w.numel * model.top_k // model.experts if w.kind == "expert" else w.numel
    return sum(map(met, weights(model)))


def parameters_by_kind(model):
    """{kind: parameters}."""
    kinds = dict.fromkeys(w.kind for w in weights(model))
    return {kind: sum(w.numel for w in weights(model) if w.kind == kind) for kind in kinds}


# What a model_type implies beyond its config.json: traits, the fields that released files leave to
# the class defaults of transformers, and the field that counts the experts.
_BIASES = dict(qkv_bias=True, out_bias=True, mlp_bias=True)
_GEMMA = dict(tie_word_embeddings=True, head_dim=256)
_GEMMA3 = dict(vocab_size=262208, num_attention_heads=8, num_key_value_heads=4)
_FAMILIES = {
    "llama": ({}, {}),
    "mistral": ({}, {}),
    "mixtral": ({}, {}, "num_local_experts"),
    "qwen2": (dict(qkv_bias=True), {}),
    "qwen2_moe": (dict(qkv_bias=True, shared_gate=True), {}, "num_experts"),
    "qwen3": (dict(qk_norm=True), {}),
    "qwen3_moe": (dict(qk_norm=True), {}, "num_experts"),
    "deepseek_v2": ({}, {}, "n_routed_experts"),
    "deepseek_v3": (dict(router_bias=True), {}, "n_routed_experts"),
    "gemma": ({}, _GEMMA),
    "gemma2": (dict(norms=4), _GEMMA),
    "gemma3_text": (dict(norms=4, qk_norm=True), _GEMMA | _GEMMA3),
    "gpt2": (
        dict(gated=False, layer_norm=True, **_BIASES),
        dict(tie_word_embeddings=True, n_positions=1024),
    ),
}
_GPT2_NAMES = dict(hidden_size="n_embd", num_hidden_layers="n_layer", num_attention_heads="n_head")
_GPT2_NAMES |= dict(intermediate_size="n_inner")
_EXPERTS = {family: more[0] for family, (_, _, *more) in _FAMILIES.items() if more}


def _experts(config, get, refuse, counted, shape):
    """The fields of a Model that say what its experts are, and which layers have none."""
    experts, top_k, layers = get(counted), get("num_experts_per_tok"), shape["layers"]
    if top_k > experts:
        raise refuse(f"num_experts_per_tok {top_k} exceeds {counted} {experts}")
    width = get("moe_intermediate_size", *[shape["ffn"]] * (counted == "num_local_experts"))
    shared = get("n_shared_experts", 0, least=0) * width
    shared = get("shared_expert_intermediate_size", shared, least=0)
    first, sparse = get("first_k_dense_replace", 0, least=0), get("decoder_sparse_step", 1)
    every, dense = get("moe_layer_freq", 1), config.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not {*map(str, dense)} <= {*map(str, range(layers))}:
        raise refuse(f"mlp_only_layers is {dense!r}, not a list of layers 0 to {layers - 1}")
    dense = {i for i in range(layers) if i < first or i % every or (i + 1) % sparse or i in dense}
    sizes = dict(experts=experts, top_k=top_k, expert_ffn=width, shared_ffn=shared)
    return sizes | dict(dense_layers=frozenset(dense))


def model_from_config(config, name="model"):
    """A Model from a Hugging Face config.json, as a dict.

    Raises ValueError with a sentence that names the field which is missing or contradicts another.
    Layers that predict further tokens, and vision towers, are not counted.
    """
    refuse = lambda why: ValueError(f"config.json of {name}: {why}")
    if not isinstance(config.get("text_config", {}), dict):
        raise refuse("text_config is not an object")
    config = {**config, **config.get("text_config", {})}
    family = nearest(config.get("model_type", "(no model_type)"), _FAMILIES, "model_type")
    traits, defaults, *_ = _FAMILIES[family]
    config = defaults | {key: value for key, value in config.items() if value is not None}

    def get(key, *default, least=1, most=10**8):
        key = _GPT2_NAMES.get(key, key) if family == "gpt2" else key
        if key not in config and not default:
            raise refuse(f"{key} is missing")
        value = config.get(key, *default)
        if type(value) is not int or not least <= value <= most:
            raise refuse(f"{key} is {value!r}, not a whole number from {least} to {most}")
        return value

    def flag(key):
        if type(value := config.get(key, False)) is not bool and value not in (0, 1):
            raise refuse(f"{key} is {value!r}, neither true nor false")
        return bool(value)

    h, heads, mla = get("hidden_size"), get("num_attention_heads"), family.startswith("deepseek")
    if "head_dim" not in config and not mla and h % heads:
        raise refuse(f"num_attention_heads {heads} does not divide hidden_size {h}; no head_dim")
    kv_heads = get("num_key_value_heads", heads)
    if heads % kv_heads:
        raise refuse(f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    bias, layers = flag("attention_bias"), get("num_hidden_layers", most=10_000)
    shape = dict(name=name, layers=layers, hidden=h, heads=heads, kv_heads=kv_heads)
    shape |= dict(qkv_bias=bias, out_bias=bias, mlp_bias=flag("mlp_bias"))
    shape |= dict(head_dim=get("head_dim", h // heads), vocab=get("vocab_size"))
    shape |= dict(ffn=get("intermediate_size", *[4 * h] * (family == "gpt2")))
    shape |= dict(tied=flag("tie_word_embeddings"))
    shape |= dict(positions=get("n_positions") if family == "gpt2" else 0)
    if mla:
        sizes = map(get, ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        shape |= dict(mla=(get("q_lora_rank", 0, least=0), *sizes))
    counted = _EXPERTS.get(family)
    for key in sorted({*_EXPERTS.values()} - {counted}):
        if config.get(key):
            raise refuse(f"{key} is {config[key]!r}, and a {family} has {counted or 'no experts'}")
    if counted:
        shape |= _experts(config, get, refuse, counted, shape)
    return Model(**(shape | traits))


# The released config.json files, a line each: six columns, then what else matters. experts: how
# many, per token, their width, shared ones, dense layers first. mla: ranks and head sizes.
_COLUMNS = "hidden_size intermediate_size num_hidden_layers num_attention_heads".split()
_COLUMNS += "num_key_value_heads vocab_size".split()
_MORE = {
    "tied": ["tie_word_embeddings"],
    "head_dim": ["head_dim"],
    "experts": "experts num_experts_per_tok moe_intermediate_size".split()
    + ["n_shared_experts", "first_k_dense_replace"],
    "mla": "q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim".split(),
}
_RELEASED = """
llama-2-7b       llama        4096 11008  32  32  32  32000
llama-2-13b      llama        5120 13824  40  40  40  32000
llama-2-70b      llama        8192 28672  80  64   8  32000
llama-3-8b       llama        4096 14336  32  32   8 128256
llama-3-70b      llama        8192 28672  80  64   8 128256
llama-3.1-405b   llama       16384 53248 126 128   8 128256
llama-3.2-1b     llama        2048  8192  16  32   8 128256 tied=1
llama-3.2-3b     llama        3072  8192  28  24   8 128256 tied=1
mistral-7b       mistral      4096 14336  32  32   8  32000
mistral-7b-v0.3  mistral      4096 14336  32  32   8  32768
mistral-nemo-12b mistral      5120 14336  40  32   8 131072 head_dim=128
mixtral-8x7b     mixtral      4096 14336  32  32   8  32000 experts=8,2,14336,0,0
mixtral-8x22b    mixtral      6144 16384  56  48   8  32768 experts=8,2,16384,0,0
qwen2.5-0.5b     qwen2         896  4864  24  14   2 151936 tied=1
qwen2.5-1.5b     qwen2        1536  8960  28  12   2 151936 tied=1
qwen2.5-7b       qwen2        3584 18944  28  28   4 152064
qwen2.5-14b      qwen2        5120 13824  48  40   8 152064
qwen2.5-32b      qwen2        5120 27648  64  40   8 152064
qwen2.5-72b      qwen2        8192 29568  80  64   8 152064
qwen3-0.6b       qwen3        1024  3072  28  16   8 151936 head_dim=128 tied=1
qwen3-4b         qwen3        2560  9728  36  32   8 151936 head_dim=128 tied=1
qwen3-8b         qwen3        4096 12288  36  32   8 151936 head_dim=128
qwen3-14b        qwen3        5120 17408  40  40   8 151936 head_dim=128
qwen3-32b        qwen3        5120 25600  64  64   8 151936 head_dim=128
qwen3-30b-a3b    qwen3_moe    2048  6144  48  32   4 151936 head_dim=128 experts=128,8,768,0,0
qwen3-235b-a22b  qwen3_moe    4096 12288  94  64   4 151936 head_dim=128 experts=128,8,1536,0,0
deepseek-v2-lite deepseek_v2  2048 10944  27  16  16 102400 experts=64,6,1408,2,1
  mla=0,512,64,128,128
deepseek-v2      deepseek_v2  5120 12288  60 128 128 102400 experts=160,6,1536,2,1
  mla=1536,512,64,128,128
deepseek-v3      deepseek_v3  7168 18432  61 128 128 129280 experts=256,8,2048,1,3
  mla=1536,512,64,128,128
gemma-2b         gemma        2048 16384  18   8   1 256000
gemma-7b         gemma        3072 24576  28  16  16 256000
gemma-2-2b       gemma2       2304  9216  26   8   4 256000
gemma-2-9b       gemma2       3584 14336  42  16   8 256000
gemma-2-27b      gemma2       4608 36864  46  32  16 256000 head_dim=128
gemma-3-1b       gemma3_text  1152  6912  26   4   1 262144
gemma-3-4b       gemma3_text  2560 10240  34   8   4 262208
gemma-3-12b      gemma3_text  3840 15360  48  16   8 262208
gemma-3-27b      gemma3_text  5376 21504  62  32  16 262208 head_dim=128
gpt2             gpt2          768  3072  12  12  12  50257
gpt2-medium      gpt2         1024  4096  24  16  16  50257
gpt2-large       gpt2         1280  5120  36  20  20  50257
gpt2-xl          gpt2         1600  6400  48  25  25  50257
"""
_LINES = _RELEASED.replace("\n  ", " ").strip().splitlines()
RELEASED = {name: words for name, *words in map(str.split, _LINES)}


@lru_cache(maxsize=64)
def preset(name):
    """A released model by name; ValueError with the nearest names if there is none."""
    name = nearest(name.lower(), RELEASED, "model")
    family, *words = RELEASED[name]
    config = dict(zip(_COLUMNS, map(int, words)), model_type=family)
    for key, _, values in (word.partition("=") for word in words[6:]):
        config |= zip(_MORE[key], map(int, values.split(",")))
    config |= {_EXPERTS[family]: config.pop("experts")} if family in _EXPERTS else {}
    if family == "gpt2":
        config = {_GPT2_NAMES.get(key, key): value for key, value in config.items()}
    return model_from_config(config, name)


# ── a layout splits the list ─────────────────────────────────────────────────────────────────

# schedule | idle of the makespan | idle of the span, if another | where that holds | held by rank s
# p ranks, q = p-1, r = p-1-s ranks behind s · m micro-batches in groups of g · v chunks per rank
# F forward, I input gradient, W weight gradient, B all three, for all layers of a rank · c a hop
# X the shorter of forward and backward · n = m - (2p-1) · Z = F+I-2W+2c
# k what zb-auto may hold. Sources: Narayanan et al. 2021; Qi et al. 2024 (zero bubble); DeepSeek-V3
# report (DualPipe, an estimate where F, I, W differ). The tests hold each line to a simulation.
SCHEDULE_FORMS = """
gpipe          | q*B + 2*q*c             | | True | m
1f1b           | q*B + 2*c*(q*m/p + p-2) | | m%p == 0 or not c | r+1
eager-1f1b     | q*B + 2*q*c             | | 2*c <= B | 2*r+1
interleaved    | q*B/v + 2*(v*p-1)*c     | | m%p == 0 and p*v*c <= g*X or not c | (2*r+1+(v-1)*g)/v
looped-bfs     | q*B/v + 2*q*c           | | m%p == 0 and p*v*c <= (m-p)*X or not c | m
zb-h1          | q*(F+I-W) + 4*q*c       | | W <= min(F, I) and (m >= 2*p and 2*c <= W or not c) | p
zb-h2          | q*max(F+c, Z)           | q*max(0, Z) | n >= 0 and W <= F and 2*c <= F+I | 2*p-1
zb-auto        |                       | max(0, q*(I+2*c) + (p-k)*F) | m >= k and W <= min(F, I) | k
zb-v           | q*F/2 + (5*p-7)*c       | (6*p-8)*c | F == I == W and m >= 2*p and 4*c <= F | p
interleaved-zb | q*(F+I-W)/v             | | W <= min(F, I) and not c | p
dualpipev      | q*(F+2*I-W)/2           | | not c | p+1/2
dualpipe       | (p/2-1)*(F+2*I-W)       | | not c | p+1
"""
_FORMS = {name: cells for name, *cells in parse_table("[all]" + SCHEDULE_FORMS)["all"]}
SCHEDULES = tuple(_FORMS)
_CHUNKED = "interleaved", "looped-bfs", "interleaved-zb"  # v chunks per rank, as many as wanted
_V_SHAPED = "zb-v", "dualpipev"  # two chunks: rank s has stages s and 2p-1-s

# Bytes per parameter, by what holds them. Sources: ZeRO (Rajbhandari et al. 2020) section 3 for 16;
# Megatron-LM's distributed optimizer for 18; DeepSeek-V3 report section 3.3 for 13.
PARTS = "weights|gradients|fp32 gradients|fp32 master|first moment|second moment".split("|")
_RECIPES = """
bf16           2 2 0 4 4 4
bf16-fp32grad  2 4 0 4 4 4
bf16-both      2 2 4 4 4 4
bf16-pure      2 2 0 0 2 2
bf16-sgd       2 2 0 4 0 0
fp32           4 4 0 0 4 4
fp8            1 2 0 4 4 4
fp8-deepseek   1 4 0 4 2 2
"""
RECIPES = {
    name: {part: int(width) for part, width in zip(PARTS, widths) if int(width)}
    for name, *widths in map(str.split, _RECIPES.strip().splitlines())
}


_MAY_BE_0 = "zero", "shard"


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
    v: Annotated[int, "chunks per pipeline rank"] = 1
    stages: Annotated[tuple[int, ...], "layers of each stage, as 7,8,8,7; default: even"] = ()
    zero: Annotated[int, "ZeRO stage", (0, 1, 2, 3)] = 0
    shard: Annotated[int, "ranks that share one ZeRO copy (hybrid); default: all of dp x cp"] = 0
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
    loss: Annotated[str, "cross-entropy", ("eager", "copies", "fused")] = "eager"

    @property
    def world(self):
        return self.tp * self.cp * self.dp * self.pp

    @property
    def itemsize(self):
        return 4 if self.recipe == "fp32" else 2

    @property
    def zero_ranks(self):
        """Ranks over which a dense parameter's state is cut."""
        return self.shard or self.dp * self.cp

    @property
    def expert_replicas(self):
        """Data-parallel ranks of an expert: tp x cp x dp / (etp x ep)."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    def shards(self, group):
        """Ranks over which ZeRO cuts a dense or an expert parameter."""
        n = self.zero_ranks
        return math.gcd(n, self.expert_replicas) if group == "expert" else n

    def degrees(self, model):
        """{axis of a weight: ranks that split it}."""
        kv = min(self.tp, model.kv_heads)
        return {"tp": self.tp, "kv": kv, "ep": self.ep, "etp": self.etp}


def flags_of(function):
    """{parameter: (type, help, choices if it has some)} of what a function, or Layout, takes."""
    kinds = inspect.signature(function).parameters.items()
    return {name: (p.annotation.__origin__, *p.annotation.__metadata__)
            for name, p in kinds if hasattr(p.annotation, "__metadata__")}  # fmt: skip


def split_layers(layers, stages):
    """Layers per stage: even, and where it is not, the ends (embedding, head) are the lightest."""
    base, extra = divmod(layers, stages)
    inner_first = sorted(range(stages), key=lambda s: (abs(2 * s - stages + 1), s))
    heavy = set(inner_first[:extra])
    return [base + (s in heavy) for s in range(stages)]


def rank_stages(schedule, p, v=1):
    """Model stages of each pipeline rank: a list of tuples. DualPipe holds every stage twice."""
    if schedule in _V_SHAPED:
        return [(s, 2 * p - 1 - s) for s in range(p)]
    if schedule == "dualpipe":
        return [(s, p - 1 - s) for s in range(p)]
    return [tuple(c * p + s for c in range(v)) for s in range(p)]


def check_schedule(schedule, p, m, v=1):
    """ValueError with a sentence where a schedule cannot run p ranks, m micro-batches, v chunks."""
    nearest(schedule, SCHEDULES, "schedule")
    for name, value in ("p", p), ("m", m), ("v", v):
        if value < 1:
            raise ValueError(f"--{name} {value}: at least 1 is needed")
    if v > 1 and schedule not in _CHUNKED:
        raise ValueError(f"{schedule} does not take v = {v} chunks: use {', '.join(_CHUNKED)}")
    if v > 1 and (m < p or m % (m // p)):
        raise ValueError(f"{schedule} cannot group {m} micro-batches: use a multiple of {p}")
    if schedule.startswith("dualpipe") and m < 2 * p:
        raise ValueError(f"{schedule} on {p} ranks needs {2 * p} micro-batches or more, not {m}")
    if schedule == "dualpipe" and (p % 2 or m % 2):
        raise ValueError(f"dualpipe needs even numbers of ranks and micro-batches, not {p} and {m}")


def validate(model, layout):
    """ValueError, in one sentence with the way out, if the model cannot be split like this."""
    lo, m = layout, model
    for name, (kind, _, *choices) in flags_of(Layout).items():
        value, least = getattr(lo, name), 0 if name in _MAY_BE_0 else 1
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
    pieces = (2 * lo.cp if lo.cp > 1 else 1) * (lo.tp if lo.sp else 1)
    if lo.seq % pieces:
        raise ValueError(f"--seq {lo.seq} does not divide into {pieces} pieces (2 cp, tp by sp): "
                         f"use {lo.seq // pieces * pieces or pieces}")
    check_schedule(lo.schedule, lo.pp, lo.m, lo.v)
    stages = 1 + max(map(max, rank_stages(lo.schedule, lo.pp, lo.v)))
    if stages > m.layers:
        raise ValueError(f"--pp {lo.pp}: {stages} stages, and {m.name} has only {m.layers} layers")
    wrong = len(lo.stages) != stages or sum(lo.stages) != m.layers or min(lo.stages) < 0
    if lo.stages and wrong:
        given = ",".join(map(str, lo.stages))
        raise ValueError(f"--stages {given}: needed are {stages} numbers that sum to {m.layers}")


# ── memory: states ───────────────────────────────────────────────────────────────────────────


def state_items(params, ranks=1, stage=0, recipe="bf16"):
    """{component: bytes} that one rank holds of `params` parameters under ZeRO.

    Stage 1 cuts the optimizer (master and moments) over the ranks, 2 the gradients too, 3 the
    weights too; a cut that does not divide is padded up. Source: Rajbhandari et al. 2020, fig. 1.
    """
    items, shard = {}, -(-params // ranks)
    for name, width in RECIPES[nearest(recipe, RECIPES, "recipe")].items():
        cut_from = 3 if name == "weights" else 2 if "gradients" in name else 1
        items[name] = (shard if stage >= cut_from else params) * width
    return items


def zero_bytes(params, ranks=1, stage=0, recipe="bf16"):
    """Bytes of weights, gradients and optimizer state on one rank: the sum of `state_items`."""
    return sum(state_items(int(params), int(ranks), stage, recipe).values())


# ── memory: the list of tensors kept for backward ────────────────────────────────────────────

# name | bytes, per micro-batch | only where | core: recomputed by selective recompute
# A norm is a line of three: its elements, its rows, and what divides both. g divides an input that
# sequence parallelism gathered, u what it never does. Source, tensor by tensor: Korthikanti et al.
# 2022, section 4.1; the tests hold the lines to what torch keeps.
ACTIVATIONS = """
[layer]
norm of attention            | T*h T u
attention input              | T*h*e//g
norm of the q rank           | T*rq T 1            | rq
q up-projection input        | T*rq*e              | rq
norm of the kv rank          | T*rkv T 1           | mla
kv up-projection input       | T*rkv*e             | mla
rope part, beside the kv rank| T*rope*e            | mla
norm of q                    | T*a*d T*a 1         | qk_norm
norm of k                    | T*k*d T*k 1         | qk_norm
q                            | T*a*d*e
k                            | far*near*d*e        | not per_head
v                            | far*near*dv*e       | not per_head
k of every head              | far*a*d*e           | per_head
v of every head              | far*a*dv*e          | per_head
log-sum-exp                  | 4*T*a               | attention == 'flash'   | core
probabilities                | e*a*b*s*S           | attention == 'unfused' | core
attention dropout mask       | a*b*s*S             | attention == 'unfused' and dropout | core
dropped probabilities        | e*a*b*s*S           | attention == 'unfused' and dropout | core
attention output             | T*a*dv*e
output after all-to-all      | T*a*dv*e            | cp > 1 and cp_variant == 'ulysses'
attention residual mask      | T*h//u              | dropout
norm after attention         | T*h T u             | norms == 4
norm of the mlp              | T*h T u
mlp residual mask            | T*h//u              | dropout
norm after the mlp           | T*h T u             | norms == 4
[dense]
mlp input                    | T*h*e//g
mlp gate                     | T*f*e               | gated
mlp up                       | T*f*e
mlp activation               | T*f*e               | gated and mlp == 'eager'
mlp product                  | T*f*e               | mlp != 'recompute'
[moe]
router input                 | T*h*e//u
router probabilities, fp32   | 4*T*E//u
chosen experts               | 8*T*top_k//u
chosen probabilities and sum | 4*T*(top_k+1)//u
token of each row, and way back | 16*R
expert input                 | R*h*e
expert gate                  | R*x*e
expert up                    | R*x*e
expert activation            | R*x*e               | mlp == 'eager'
expert product               | R*x*e               | mlp != 'recompute'
expert output, by token      | R*h*e
gates                        | R*e
shared expert input          | T*h*e               | Fs and u > g
shared expert gate           | T*y*e               | Fs
shared expert up             | T*y*e               | Fs
shared expert activation     | T*y*e               | Fs and mlp == 'eager'
shared expert product        | T*y*e               | Fs and mlp != 'recompute'
shared output and its gate   | T*(h+1)*e//u        | shared_gate
[last]
norm at the end              | T*h T u
head input                   | T*h*e//g
log-probabilities, fp32      | 4*T*V               | loss == 'eager'
logits and an fp32 copy      | (e+4)*T*V           | loss == 'copies'
logits                       | e*T*V               | loss == 'fused'
[loss peak]
fp32 logits and gradient     | 8*T*V               | loss == 'eager'
fp32 gradient                | 4*T*V               | loss == 'copies'
[boundary]
norm of attention: input     | T*h*e//u
[first]
token ids                    | 8*T
embedding mask               | T*h//u              | dropout
"""


@dataclass(frozen=True)
class Item:
    """A line of the budget, as one tensor kept for backward is: its bytes, and how they come about.
    part: of `BUDGET`; core: recomputed by selective recompute."""

    name: str
    bytes: int
    formula: str
    part: str = "buffers"
    core: bool = False


BUDGET = "weights", "gradients", "optimizer", "activations", "buffers"


@lru_cache(maxsize=64)
def symbols(model, layout):
    """The letters of the activation table, as numbers of this model on one rank of this layout."""
    m, lo = model, layout
    u, cut = lo.tp if lo.sp else 1, lo.recompute == "selective"
    s, tokens = lo.seq // lo.cp, lo.batch * lo.seq // lo.cp
    keeps_far = lo.cp > 1 and lo.cp_variant == "all-gather" and lo.gather == "keep"
    k = max(1, m.kv_heads // lo.tp)
    return m.letters() | vars(lo) | dict(
        T=tokens, b=lo.batch, s=s, S=lo.seq, e=lo.itemsize, u=u, g=u if lo.gather == "again" else 1,
        a=m.heads // lo.tp, k=k, f=m.ffn // lo.tp,
        near=math.lcm(k, lo.cp) if lo.cp_variant == "ulysses" else k,  # repeated until cp divides
        V=-(-m.vocab // lo.tp), x=m.expert_ffn // lo.etp, y=m.shared_ffn // lo.tp,
        R=tokens // u * m.top_k * lo.etp,  # rows that a balanced router sends to a rank
        far=lo.batch * lo.seq if keeps_far else tokens,
        per_head=bool(m.mla) or (lo.attention == "unfused" and not cut),  # k, v repeated per head
    )  # fmt: skip


def _norm_rows(name, sizes, layout, layer_norm):
    """A norm keeps its input and its statistics; an RMSNorm written out computes in fp32, and keeps
    more. What it returns is kept by the product that reads it."""
    elements, rows, by = sizes.split()
    if layout.norm == "eager" and not layer_norm:
        yield f"{name}: fp32 input", f"4*{elements}//{by}"
        yield f"{name}: normalised", f"{elements}*e//{by}"
    else:
        yield f"{name}: input", f"{elements}*e//{by}"
    yield f"{name}: statistics", f"{8 if layer_norm else 4}*{rows}//{by}"


_ACTIVATIONS = parse_table(ACTIVATIONS)


@lru_cache(maxsize=512)
def saved_in(model, layout, *sections):
    """Rows of the activation table, as a tuple of `Item`: those that apply, evaluated."""
    names, out = symbols(model, layout), []
    for name, formula, *more in [row for section in sections for row in _ACTIVATIONS[section]]:
        if more and more[0] and not evaluate(more[0], names):
            continue
        is_norm = " " in formula
        rows = _norm_rows(name, formula, layout, model.layer_norm) if is_norm else [(name, formula)]
        core = more[1:] == ["core"]
        out += [Item(n, int(evaluate(f, names)), f, core=core) for n, f in rows]
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


def megatron_activations(seq, batch, hidden, heads=0, tp=1, sp=False):
    """Bytes of a layer with GELU, dropout and multi-head attention in 16 bits: Korthikanti et al.
    2022, equations 1-4. With heads, the attention stores its probabilities: 5as/h more."""
    scores = 5 * heads * seq / hidden
    return seq * batch * hidden * ((34 + scores) / tp if sp else 10 + (24 + scores) / tp)


# ── memory: how many micro-batches are in flight ─────────────────────────────────────────────


def _schedule_letters(p, m, v, limit):
    return dict(p=p, q=p - 1, m=m, v=v, g=m // max(1, m // p), k=limit or 2 * p - 1)


def in_flight(schedule, p, m, v=1, rank=0, limit=None):
    """Micro-batches whose activations a pipeline rank holds at its peak: a Fraction, in units of
    all layers of the rank (DualPipe: of one of its two stages). Split backwards are counted as
    holding everything until W; zb-auto holds its limit, by default 2p - 1."""
    check_schedule(schedule, p, m, v)
    sizes = _schedule_letters(p, m, v, limit) | dict(r=p - 1 - rank)
    held = evaluate(_FORMS[schedule][3], {name: Fraction(n) for name, n in sizes.items()})
    return min(Fraction(m), Fraction(held))


# ── memory: a rank of every stage, at three moments ──────────────────────────────────────────


@dataclass
class StageMemory:
    """One pipeline rank: its layers, its parameters, and the items alive at each moment."""

    rank: int
    layers: list
    params: int
    moments: dict  # moment -> [Item]
    loose: int  # bytes of gradients that flow through one layer: they belong to the range

    def bytes_at(self, moment):
        return total(self.moments[moment])

    @property
    def moment(self):
        return max(self.moments, key=self.bytes_at)

    @property
    def peak(self):
        return self.bytes_at(self.moment)

    @property
    def overhead(self):
        """(least, most) bytes of what no formula gives, an estimate: CUDA context 0.5 to 1 GiB,
        NCCL 0.3 to 2 GiB, fragmentation 2 to 8 %, gradients between the parts of a layer."""
        return 0.8 * GiB + 0.02 * self.peak, 3 * GiB + 0.08 * self.peak + self.loose

    def verdict(self, hbm):
        """fits, tight or does not fit, of `hbm` bytes."""
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
    """{(layer, group): elements} on one rank; group is dense, expert or buffer. A rank that has the
    head of a tied model but not its embedding holds a copy of the embedding."""
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
        for name, size in state_items(params, ranks, layout.zero, layout.recipe).items():
            cut = f" / {ranks}" if size < params * recipe[name] else ""
            line = [f"{params} {group} * {recipe[name]}{cut}"] * (params > 0)
            held[name], how[name] = held[name] + size, how.get(name, []) + line
    if buffers := group_size(parts, "buffer"):
        held["weights"] += 4 * buffers
        how["weights"].append(f"{buffers} buffers * 4")
    units, work = Counter(), []  # what is gathered and reduced at once: the parts of one layer
    for (layer, group), n in parts.items():
        units[layer] += n * (group != "buffer" and layout.shards(group) > 1)
    unit = max(units.values())
    for name, part, count in ("gathered", "weights", 2), ("unreduced", "gradients", 1):
        cut_from = 3 if part == "weights" else 2  # weights: of the next layer as well
        if layout.zero >= cut_from and unit:
            count, width = min(count, len(units)), recipe[part]
            work.append(Item(f"{name} {part}", count * unit * width, f"{count} * {unit} * {width}"))
    part = lambda name: next((x for x in BUDGET[:2] if x in name), "optimizer")
    return [Item(name, held[name], " + ".join(how[name]), part(name)) for name in held], work


def _held_activations(model, layout, rank, layers):
    """Items that wait for backward on a rank, each times the micro-batches in flight."""
    flight = in_flight(layout.schedule, layout.pp, layout.m, layout.v, rank)
    if layout.schedule == "dualpipe":
        flight /= 2  # a micro-batch crosses one of the rank's two stages
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
        size = math.ceil(flight * count * total(saved))
        formula = f"{flight} in flight * {count} * {total(saved)}"
        items.append(Item(f"activations of {name}", size, formula, "activations"))
    return items


def stage_memory(model, layout, rank=0):
    """`StageMemory` of one pipeline rank: what is alive in the loss, in the deepest backward and at
    the optimizer step. Gradients count throughout, as from the second micro-batch on; a fused
    optimizer needs nothing of its own at the step."""
    layers = placed_layers(model, layout)[rank]
    parts = local_parameters(model, layout, layers)
    states, work = _state_items(layout, parts)
    held = _held_activations(model, layout, rank, layers)
    again = [total(recomputed(model, layout, x)) for x in one_of_each(model, layers)]
    redo = [Item("one layer recomputed", max(again, default=0), "what it keeps otherwise")]
    names, has_head = symbols(model, layout), model.layers in layers
    peak = saved_in(model, layout, "loss peak") if has_head else ()
    peak = [Item(s.name, s.bytes, substituted(s.formula, names)) for s in peak]
    moments = {
        "loss" if has_head else "last forward": states + held + peak + work[: layout.zero == 3],
        "deepest backward": states + held + redo * (layout.recompute != "none") + work,
        "optimizer step": states,
    }
    widest = 3 * max(names["f"] * names["T"], names["x"] * names["R"]) + 2 * names["T"] * names["h"]
    return StageMemory(rank, layers, sum(parts.values()), moments, widest * names["e"])


def estimate(model, layout):
    """Memory of one rank of every pipeline rank: a list of `StageMemory`. Raises as `validate`."""
    validate(model, layout)
    return [stage_memory(model, layout, rank) for rank in range(layout.pp)]


def heaviest(stages):
    """The StageMemory with the highest peak."""
    return max(stages, key=lambda stage: stage.peak)


def grouped(stage, moment=None):
    """{part of `BUDGET`: bytes} of a rank, at its peak."""
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
    now, found = heaviest(estimate(model, lo)).peak, []
    for change in changes:
        changed = replace(lo, **change)
        try:
            top = heaviest(estimate(model, changed))
        except ValueError:
            continue
        if top.peak < 0.97 * now:
            flags = " ".join(as_flags(changed, lo))
            found.append((flags, top.peak, top.verdict(hbm), changed))
    return sorted(found, key=lambda row: row[1])


def way_out(model, layout, hbm, most=9):
    """Up to `most` changes, each the one that then helps most, until the layout fits: (flags, peak
    bytes, verdict, layout)."""
    changed, peak, says = layout, None, ""
    while says != "fits" and most and (found := remedies(model, changed, hbm)):
        (_, peak, says, changed), most = found[0], most - 1
    return " ".join(as_flags(changed, layout)), peak, says, changed


# ── traffic: bytes that leave a rank, as a ring sends them ───────────────────────────────────


def ring_all_reduce_bytes(size, n):
    """Bytes sent by each rank that all-reduces `size` bytes over n: 2(n-1)/n of them. Source, as of
    the next: Patarasuk & Yuan 2009."""
    return 2 * (n - 1) / n * size


def ring_share_bytes(size, n):
    """Bytes sent by each rank of an all-gather to, a reduce-scatter of, or an even all-to-all of
    `size` bytes over n: (n-1)/n of them."""
    return (n - 1) / n * size


@dataclass(frozen=True)
class Transfer:
    """`count` calls of a collective over `ranks` ranks, `size` bytes each (the whole tensor)."""

    axis: str
    phase: str  # forward, backward, recompute, step
    collective: str  # all_reduce, all_gather, reduce_scatter, all_to_all, send
    count: float
    size: float
    ranks: int
    hideable: bool = False  # can run beside computation

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


# phase and collective | calls | bytes of a call, of the whole tensor | only where
# n ranks of the group · P parameters of w bytes · g bytes of a gradient, dk and dv too · z ZeRO
# R rows to experts · E experts · pairs: attention and MLP, each between an f and a g
# Sources: pairs Shoeybi et al. 2019, with sp Korthikanti et al. 2022; experts Lepikhin et al. 2021;
# ring Liu et al. 2023; all-gather Llama 3 report; ulysses Jacobs et al. 2023; boundary Narayanan et
# al. 2021; zero Rajbhandari et al. 2020, section 7.
TRAFFIC = """
[layer over tp]
forward all_reduce       | pairs           | T*h*e | not sp
forward all_gather       | pairs           | T*h*e | sp
forward reduce_scatter   | pairs           | T*h*e | sp
backward all_reduce      | pairs           | T*h*e | not sp
backward all_gather      | pairs           | T*h*e | sp
backward reduce_scatter  | pairs           | T*h*e | sp
backward all_gather      | pairs           | T*h*e | sp and regather
recompute all_reduce     | pairs-last      | T*h*e | not sp and recompute == 'full'
recompute all_gather     | pairs           | T*h*e | sp and recompute == 'full'
recompute reduce_scatter | pairs-last      | T*h*e | sp and recompute == 'full'
[embedding over tp]
forward all_reduce       | 1               | T*h*e | not sp
forward reduce_scatter   | 1               | T*h*e | sp
backward all_gather      | 1               | T*h*e | sp
[head and loss over tp]
backward all_reduce      | 1               | T*h*e | not sp
forward all_gather       | 1               | T*h*e | sp
backward reduce_scatter  | 1               | T*h*e | sp
backward all_gather      | 1               | T*h*e | sp and regather
forward all_reduce       | 3               | 4*T
[experts]
forward all_to_all       | 1               | 8*E   | E
forward all_to_all       | 2               | R*h*e
backward all_to_all      | 2               | R*h*e
recompute all_to_all     | 1               | 8*E   | E and recompute == 'full'
recompute all_to_all     | 2               | R*h*e | recompute == 'full'
[ring]
forward send             | n-1             | 2*b*S*K*d*e//n
backward send            | n-1             | 2*b*S*K*d*e//n
backward send            | n               | 2*b*S*K*d*g//n
recompute send           | n-1             | 2*b*S*K*d*e//n | recompute != 'none'
[all-gather]
forward all_gather       | 1               | 2*b*S*K*d*e
backward all_gather      | 1               | 2*b*S*K*d*e    | regather
backward reduce_scatter  | 1               | 2*b*S*K*d*g
recompute all_gather     | 1               | 2*b*S*K*d*e    | recompute != 'none'
[ulysses]
forward all_to_all       | 1               | 2*b*S//n*(A+lcm(K,n))*d*e
backward all_to_all      | 1               | 2*b*S//n*(A+lcm(K,n))*d*e
recompute all_to_all     | 1               | 2*b*S//n*(A+lcm(K,n))*d*e | recompute == 'full'
[boundary of stages]
forward send             | m*ahead         | T*h*e/share
backward send            | m*back          | T*h*e/share
[zero]
backward all_reduce      | 1               | P*g   | z == 0
backward reduce_scatter  | 1 if z < 2 else m | P*g | z > 0
step all_gather          | 1               | P*w   | z == 1 or z == 2
forward all_gather       | m               | P*w   | z == 3
backward all_gather      | m               | P*w   | z == 3
[replicas of a shard]
backward all_reduce      | 1 if z < 2 else m | P*g   | z > 0
"""
_TRAFFIC = parse_table(TRAFFIC)


def transfers(section, axis, ranks, hideable=False, **names):
    """Rows of a section of the traffic table, as a list of `Transfer`: those that apply, evaluated
    over the names. One rank sends nothing."""
    found, names = [], {"n": ranks, "lcm": math.lcm, **names}
    for call, count, size, *where in _TRAFFIC[section] if ranks > 1 else ():
        if (not where or evaluate(where[0], names)) and (calls := evaluate(count, names)):
            size = evaluate(size, names)
            found.append(Transfer(axis, *call.split(), calls, size, ranks, hideable))
    return found


def tp_layer_traffic(
    tokens, hidden, tp, itemsize=2, sp=False, regather=True, recompute="none", pairs=2, last=True
):
    """Tensor parallelism, one layer, one micro-batch: attention and MLP each have an f/g pair.

    Without sp: 2 all-reduces forward, 2 backward. With sp each becomes an all-gather and a
    reduce-scatter, the same bytes, and `regather` fetches the two inputs again for backward.
    Full recompute repeats forward except its last collective: nothing after it is needed. Routed
    experts stand outside the pairs: a layer of them has one, which is not the layer's last.
    """
    names = dict(T=tokens, h=hidden, e=itemsize, sp=sp, regather=regather, recompute=recompute)
    return transfers("layer over tp", "tp", tp, **names, pairs=pairs, last=last)


def ep_traffic(
    tokens, top_k, hidden, ep, itemsize=2, remote_rows=None, recompute="none", experts=0
):
    """Experts, one layer, one micro-batch: dispatch and combine, forward and backward.

    remote_rows: rows that leave the rank in one of these, a mean of the two ways; balanced,
    tokens * top_k * (ep-1)/ep. experts: before rows, their numbers are told, 8 bytes an expert.
    """
    rows = tokens * top_k if remote_rows is None else remote_rows * ep / max(1, ep - 1)
    names = dict(R=rows, h=hidden, e=itemsize, E=experts, recompute=recompute)
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
    names = dict(b=batch, S=seq, A=heads, K=kv_heads, d=head_dim, e=itemsize, g=grad_itemsize)
    names |= dict(regather=regather, recompute=recompute)
    return transfers(variant, "cp", cp, variant == "ring", **names)


def pp_sends(schedule, p, v=1):
    """(forward, backward) sends of one micro-batch by each pipeline rank, a list. DualPipe feeds
    half of the micro-batches from each end."""
    ranks = rank_stages(schedule, p, v)
    routes = [sorted((stage, rank) for rank in range(p) for stage in ranks[rank])]
    if schedule == "dualpipe":
        routes = [sorted((ranks[rank][way], rank) for rank in range(p)) for way in (0, 1)]
    sends = [[0, 0] for _ in range(p)]
    for route in routes:
        for (_, here), (_, there) in itertools.pairwise(route):
            sends[here][0] += (here != there) / len(routes)
            sends[there][1] += (here != there) / len(routes)
    return sends


def pp_traffic(tokens, hidden, p, m, schedule="1f1b", v=1, itemsize=2, share=1, rank=0):
    """Pipeline, one step of one rank: each crossing sends an activation forward, and its gradient
    back. share > 1: each of so many tp ranks sends its part (sequence parallel)."""
    ahead, back = pp_sends(schedule, p, v)[rank]
    names = dict(T=tokens, h=hidden, e=itemsize, m=m, share=share, ahead=ahead, back=back)
    return transfers("boundary of stages", "pp", p, **names)


def zero_traffic(params, ranks, stage=0, recipe="bf16", replicas=1, m=1):
    """Data parallelism, one step: gradients of `params` parameters, and what ZeRO adds.

    Stage 0 all-reduces; 1 reduce-scatters and gathers the new weights, the same bytes; 2 has to
    reduce-scatter in every micro-batch; 3 gathers weights in forward and again in backward of every
    micro-batch: 3/2 of stage 0. replicas > 1 (hybrid): each sum is all-reduced among them too.
    """
    weight, grad = (RECIPES[recipe][part] for part in ("weights", "gradients"))
    names = dict(P=params, w=weight, g=grad, z=stage, m=m)
    calls = transfers("zero", "dp", ranks, True, **names)
    names["P"] /= ranks
    return calls + transfers("replicas of a shard", "dp", replicas, True, **names)


def _copies_traffic(model, lo, layers):
    """Tensor parallelism, one step: gradients of what several tp ranks hold. Under sp each copy of
    a norm or a router saw other tokens; a norm of q and k saw other heads, a repeated key/value
    head other queries, with sp and without."""
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
    """Pipeline, one step: gradients of what two pipeline ranks hold, a tied embedding whose ends
    lie apart or, with DualPipe, every stage."""
    ends, size = {-1, model.layers} & {*layers}, 0
    if lo.schedule == "dualpipe" and lo.pp > 1:
        size = group_size(parts, "dense") + group_size(parts, "expert")
    elif model.tied and len(ends) == 1:
        size = _by_layer(model)[-1][0].local(lo.degrees(model))
    size *= RECIPES[lo.recipe]["gradients"]
    return [Transfer("pp", "step", "all_reduce", 1, size, 2)] if size else []


def traffic(model, layout, rank=0):
    """Everything that a rank of pipeline rank `rank` sends in a step: a list of `Transfer`. Latent
    attention is counted with the f/g pair of ordinary attention."""
    lo, layers, names = layout, placed_layers(model, layout)[rank], symbols(model, layout)
    T, u, h, e = (names[letter] for letter in "Tuhe")
    how = dict(regather=lo.gather == "again", recompute=lo.recompute)
    end = partial(transfers, axis="tp", ranks=lo.tp, T=T, h=h, e=e, sp=lo.sp, **how)
    out = end("embedding over tp") * (-1 in layers)
    out += end("head and loss over tp") * (model.layers in layers)
    for layer in (x for x in layers if 0 <= x < model.layers):
        moe = model.is_moe(layer)
        pairs = 1 if moe and not model.shared_ffn else 2
        out += tp_layer_traffic(T, h, lo.tp, e, lo.sp, pairs=pairs, last=not moe, **how)
        sizes = lo.seq, names["a"], names["k"], model.qk_dim, lo.cp, e, lo.batch
        out += cp_traffic(lo.cp_variant, *sizes, **how)
        if moe:
            rows = T // u * lo.etp
            out += tp_layer_traffic(rows, h, lo.etp, e, True, pairs=1, last=False, **how)
            sizes = rows, model.top_k, h, lo.ep, e
            out += ep_traffic(*sizes, recompute=lo.recompute, experts=model.experts)
    out = [replace(x, count=x.count * lo.m) for x in out] + _copies_traffic(model, lo, layers)
    out += pp_traffic(T, h, lo.pp, lo.m, lo.schedule, lo.v, e, u, rank)
    parts = local_parameters(model, lo, layers)
    out += _twins_traffic(model, lo, layers, parts)
    for group in "dense", "expert":
        everyone = lo.expert_replicas if group == "expert" else lo.dp * lo.cp
        ranks = lo.shards(group) if lo.zero else everyone
        sizes = group_size(parts, group), ranks, lo.zero, lo.recipe, everyone // ranks, lo.m
        out += zero_traffic(*sizes) if sizes[0] else []
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
        n = transfer.ranks - 1
        steps = transfer.count * {"all_reduce": 2 * n, "send": 1}.get(transfer.collective, n)
        bandwidth = self.outer if self.leaves_node(layout, transfer.axis) else self.inner
        return transfer.sent / bandwidth + steps * self.latency


# ── bubbles ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Bubble:
    """Idle time of a schedule, in the unit of the costs.

    Two definitions: idle, of the makespan (first start to last end over all ranks), and span_idle,
    of the longest that any one rank is between its own first start and last end: the zero-bubble
    paper's, and what a step costs if ranks may enter the next one at different times. Two
    normalisations: ratio r, idle over ideal time; fraction r / (1 + r), idle over all time. None
    where no closed form is known; `exact` is False for an estimate or a bound.
    """

    schedule: str
    ideal: float
    idle: float | None
    span_idle: float | None
    exact: bool = True
    note: str = ""

    def _over(self, idle, base):
        return None if idle is None else idle / (self.ideal + base * idle)

    ratio = property(lambda self: self._over(self.idle, 0))
    fraction = property(lambda self: self._over(self.idle, 1))
    span_ratio = property(lambda self: self._over(self.span_idle, 0))
    span_fraction = property(lambda self: self._over(self.span_idle, 1))
    makespan = property(lambda self: None if self.idle is None else self.ideal + self.idle)
    span = property(lambda self: None if self.span_idle is None else self.ideal + self.span_idle)


def bubble(schedule, p, m, v=1, costs=(1, 1, 1, 0), limit=None):
    """`Bubble` of a schedule by its line of SCHEDULE_FORMS. costs: (F, I, W, comm), for all layers
    of a rank and one hop. limit: micro-batches that zb-auto may hold, by default 2p - 1."""
    p, m, v = int(p), int(m), int(v)
    check_schedule(schedule, p, m, v)
    if len(costs) != 4 or min(costs) < 0 or not all(costs[:3]):
        raise ValueError(f"--costs {costs}: needed are F, I, W above 0 and a hop of 0 or more")
    F, I, W, c = costs
    names = _schedule_letters(p, m, v, limit) | dict(n=m - 2 * p + 1, min=min, max=max)
    names |= dict(F=F, I=I, W=W, c=c, B=F + I + W, X=min(F, I + W), Z=F + I - 2 * W + 2 * c)
    idle, span, where, _ = _FORMS[schedule]
    made = lambda idle, span, *how: Bubble(schedule, m * (F + I + W), idle, span, *how)
    if p == 1:
        return made(0, 0)
    if not evaluate(where, names):
        return made(None, None, False, f"no closed form: simulate it. One holds where {where}")
    first, second = (evaluate(x, names) if x else None for x in (idle, span or idle))
    if schedule == "zb-auto":
        held = f"a lower bound, if {names['k']} micro-batches may be held"
        return made(first, second, False, held)
    exact = F == I == W or not schedule.startswith("dualpipe")
    return made(first, second, exact, "" if exact else "an estimate: exact where F = I = W")


# ── what is slow about a layout that is legal ────────────────────────────────────────────────


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
    idle = bubble(lo.schedule, lo.pp, lo.m, lo.v).span_fraction or 0
    if idle > 0.15:
        then = bubble(lo.schedule, lo.pp, 8 * lo.pp, lo.v).span_fraction
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
    return said


# ── compute, time and cost ───────────────────────────────────────────────────────────────────

# Dense peaks in TFLOP/s, and HBM in TB/s, from the vendors' data sheets. A sheet's headline is
# often the sparse figure, twice the dense one.
PEAKS = {
    "v100": dict(fp16=125, hbm=0.9),
    "a100": dict(bf16=312, tf32=156, hbm=2.039),
    "h100": dict(bf16=989.5, fp8=1979, tf32=494.7, hbm=3.35),
    "h100-pcie": dict(bf16=756, fp8=1513, hbm=2.0),
    "h100-nvl": dict(bf16=835, fp8=1671, hbm=3.9),
    "h200": dict(bf16=989.5, fp8=1979, hbm=4.8),
    "b200": dict(bf16=2250, fp8=4500, hbm=8.0),
    "mi300x": dict(bf16=1307, fp8=2615, hbm=5.3),
}


def data_sheet(gpu):
    """(precision -> dense FLOP/s, HBM bytes/s) of a GPU, by its key or by the name its driver gives
    it ("NVIDIA H100 PCIe"). ValueError if no such GPU is known."""
    words = set(gpu.lower().replace("-", " ").split())
    known = [key for key in PEAKS if words.issuperset(key.split("-")) and "mig" not in words]
    row = PEAKS[max(known, key=len) if known else nearest(gpu, PEAKS, "GPU")]
    peaks = {name: tera * 1e12 for name, tera in row.items()}
    return peaks, peaks.pop("hbm")


def peak_flops(gpu, precision="bf16", sparse=False):
    """Peak FLOP/s of a GPU of `data_sheet`. sparse doubles it, and must be asked for: training is
    dense. ValueError if the GPU has no such precision."""
    peaks, _ = data_sheet(gpu)
    return peaks[nearest(precision, peaks, f"precision of {gpu}")] * (2 if sparse else 1)


def attention_flops(layers, heads, head_dim, seq, causal=False, v_dim=None):
    """FLOPs of scores and of their sum over V, a token, forward and backward: 12 L a d s; half if
    causal. Source: PaLM (Chowdhery et al. 2022), appendix B."""
    both = head_dim + (head_dim if v_dim is None else v_dim)
    return 6 * layers * heads * both * seq / (2 if causal else 1)


CONVENTIONS = {
    "6N": "6 x all active parameters; attention not counted",
    "palm": "6N and full attention (PaLM, appendix B)",
    "full": "6 x parameters that multiply (no embedding table), full attention",
    "causal": "the same, with the half of attention that a causal mask leaves (Megatron-LM)",
}


def flops_per_token(model, seq, convention="6N"):
    """Training FLOPs of one token, forward and backward, under a convention of `CONVENTIONS`."""
    nearest(convention, CONVENTIONS, "convention")
    active = count_active(model)
    attention = attention_flops(
        model.layers, model.heads, model.qk_dim, seq, convention == "causal", model.v_dim
    )
    if convention in ("full", "causal") and not model.tied:  # a tied table multiplies as the head
        active -= model.vocab * model.hidden
    if convention in ("full", "causal"):
        active -= model.positions * model.hidden
    return 6 * active + (0 if convention == "6N" else attention)


def training_flops(params, tokens):
    """FLOPs: 6 x parameters x tokens (Kaplan et al. 2020)."""
    return 6 * params * tokens


def gpu_hours(flops, flops_per_second):
    """GPU-hours of `flops` at an achieved rate per GPU."""
    return flops / flops_per_second / 3600


def training_days(flops, gpus, flops_per_second):
    """Days of `flops` on `gpus` GPUs at an achieved rate per GPU."""
    return flops / (gpus * flops_per_second) / 86400


def mfu_of(flops, seconds, gpus, peak):
    """Model FLOPs of all ranks over what all GPUs could do, a share (PaLM, appendix B); above 1 is
    impossible: ValueError."""
    share = flops / (seconds * gpus * peak)
    if share > 1 + 1e-9:
        raise ValueError(
            f"MFU {share:.0%}: impossible. {gpus} GPUs of {peak:.4g} FLOP/s cannot do {flops:.4g} "
            f"FLOPs in {seconds:.4g} s; look for a wrong peak, count or time"
        )
    return share


def hfu(mfu, recompute="none"):
    """Hardware utilisation: a full recompute repeats forward, 8 FLOPs for every 6."""
    return mfu * (4 / 3 if recompute == "full" else 1)


def mbu(bytes_moved, seconds, bandwidth):
    """Bytes that one GPU's HBM moved over what it could; above 1 is impossible: ValueError."""
    share = bytes_moved / (seconds * bandwidth)
    if share > 1:
        raise ValueError(
            f"MBU {share:.0%}: impossible. {bandwidth:.4g} B/s do not move {bytes_moved:.4g} B in "
            f"{seconds:.4g} s; look for bytes of all GPUs, or of more than one step"
        )
    return share


def chinchilla_tokens(params, ratio=20):
    """About 20 tokens per parameter (Hoffmann et al. 2022)."""
    return params * ratio


def effective_batch(layout):
    """Tokens of one step: micro-batch x sequence x micro-batches x data-parallel ranks."""
    return layout.batch * layout.seq * layout.m * layout.dp


def lr_scale(batch_ratio, rule="sqrt"):
    """Factor of the learning rate when the batch grows: sqrt (Adam; Malladi et al. 2022) or linear
    (SGD; Goyal et al. 2017)."""
    return {"sqrt": math.sqrt(batch_ratio), "linear": batch_ratio}[rule]


# ── failures and offload ─────────────────────────────────────────────────────────────────────

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
    """The same to higher order, where saves are not short beside the MTBF (Daly 2006, eq. 37)."""
    if save >= 2 * mtbf:
        return mtbf
    x = math.sqrt(save / (2 * mtbf))
    return young_interval(save, mtbf) * (1 + x / 3 + x * x / 9) - save


def lost_share(interval, save, mtbf, restart=0.0):
    """Share of time lost to saving, to work done twice, and to restarts (first order)."""
    return save / interval + (interval / 2 + restart) / mtbf


def offload_bytes(params, ranks=1, recipe="bf16", tier="cpu"):
    """{direction: bytes} that one rank moves per step when its optimizer state lives elsewhere.

    cpu (ZeRO-Offload): gradients out, new weights in, the step runs on the CPU. nvme
    (ZeRO-Infinity): besides, master and moments are read and written back.
    """
    items = state_items(int(params), int(ranks), 3, recipe)
    optimizer = sum(n for name, n in items.items() if name == "fp32 master" or "moment" in name)
    moved = {"gradients out": items["gradients"], "weights in": items["weights"]}
    if tier == "nvme":
        moved |= {"optimizer read": optimizer, "optimizer written": optimizer}
    return moved


# ── the guide's claims ───────────────────────────────────────────────────────────────────────

_IN_CLAIMS = (
    zero_bytes, in_flight, megatron_activations, ring_all_reduce_bytes, bubble, chinchilla_tokens,
    training_flops, gpu_hours, training_days, mfu_of, lr_scale, hours_between_failures,
)  # fmt: skip


def guide_claims(section=None):
    """The guide's quantitative claims, in its order, each with the value `recomputed` here.

    A claim is data: id, lines, section, claim, inputs, formula, unit, guide (a number, or the two
    ends of a range), verdict, why, source. Its formula is evaluated over its inputs and the
    functions of this module. Raises ValueError if the data file or the section is missing.
    """
    if not GUIDE.exists():
        raise ValueError(f"the claims are in {GUIDE.name}, and it does not lie beside this module")
    claims = json.loads(GUIDE.read_text())
    if section:
        names = {claim["section"] for claim in claims}
        chosen = {name for name in names if section.lower() in name.lower()}
        chosen = chosen or {nearest(section, names, "section of the guide")}
        claims = [claim for claim in claims if claim["section"] in chosen]
    known = {f.__name__: f for f in _IN_CLAIMS} | {"math": math}
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


# ── pictures ─────────────────────────────────────────────────────────────────────────────────

_COLOURS = "#0072B2 #E69F00 #000000 #56B4E9 #D55E00 #999999 #009E73 #CC79A7".split()
_HATCHES = ["", "//", "", "..", "xx", "", "\\\\", "++"]


def _lines(ax, curves, ticks=()):
    """{label: (x, y)} as lines that differ in dash and marker too; with ticks {x: word}, to
    logarithmic scales."""
    for i, (label, (x, y)) in enumerate(curves.items()):
        style = dict(color=_COLOURS[i % 8], linestyle=("-", "--", ":", "-.")[i % 4], markersize=4)
        ax.plot(x, y, marker="os^vDPX*"[i % 8], label=label, **style)
    if ticks:
        ax.set(xscale="log", yscale="log")
        ax.set_xticks([*ticks], ticks.values())
        ax.yaxis.set_major_formatter("{x:,g}")


def plot_bubbles(ax, model, layout):
    """Idle share of a rank's span against m/p, every schedule; equal ones share a line."""
    p, steps, curves = layout.pp + layout.pp % 2 if layout.pp > 1 else 8, (1, 2, 3, 4, 6, 8), {}
    for schedule in SCHEDULES:
        v = 2 if schedule in _CHUNKED else 1
        points = {}
        for n in steps if not schedule.startswith("dualpipe") else steps[1:]:
            share = bubble(schedule, p, n * p, v).span_fraction
            if share is not None:
                points[n] = round(100 * share, 6)
        label = schedule + f" v={v}" * (v > 1) + " (a bound)" * (schedule == "zb-auto")
        curves.setdefault(tuple(points.items()), []).append(label)
    named = {", ".join(names): tuple(zip(*points)) for points, names in curves.items()}
    _lines(ax, dict(sorted(named.items(), key=lambda curve: -curve[1][1][-1])))
    ax.set(xlabel="micro-batches per pipeline rank, m / p", ylabel="idle, % of a rank's span")
    ax.set(title=f"Bubble on {p} ranks, F = I = W, no communication time", xticks=steps)
    ax.set_ylim(bottom=-1)


def plot_memory(ax, model, layout):
    """Bytes of each pipeline rank at its peak, stacked, with the range of overhead above."""
    stages, style = estimate(model, layout), dict(edgecolor="white", width=0.8)
    floor, ranks = [0.0] * len(stages), range(len(stages))
    for part, colour, hatch in zip(grouped(stages[0]), _COLOURS, _HATCHES):
        sizes = [grouped(stage)[part] / GiB for stage in stages]
        ax.bar(ranks, sizes, bottom=floor, label=part, color=colour, hatch=hatch, **style)
        floor = [low + more for low, more in zip(floor, sizes)]
    low, high = ([stage.overhead[i] / GiB for stage in stages] for i in (0, 1))
    middle = [top + (a + b) / 2 for top, a, b in zip(floor, low, high)]
    spread = [(b - a) / 2 for a, b in zip(low, high)]
    style = dict(fmt="none", ecolor="black", capsize=3, label="total with overhead, a range")
    ax.errorbar(ranks, middle, spread, **style)
    ax.set_xticks(ranks[:: 1 + len(ranks) // 20])
    ax.set(xlabel="pipeline rank", ylabel="GiB at the peak", title=f"{model.name}, rank by rank")


def plot_zero(ax, model, layout):
    """State bytes per rank against data-parallel ranks, for the four stages of ZeRO."""
    ranks, n = [2**i for i in range(0, 11)], count_parameters(model)
    sizes = lambda stage: [zero_bytes(n, r, stage, layout.recipe) / GiB for r in ranks]
    curves = {f"ZeRO-{stage}" if stage else "DDP": (ranks, sizes(stage)) for stage in range(4)}
    _lines(ax, curves, dict(zip(ranks, ranks)))
    ax.set(xlabel="data-parallel ranks", ylabel="GiB of state per rank")
    ax.set(title=f"{model.name}, {layout.recipe}: weights, gradients and optimizer")


def plot_activations(ax, model, layout):
    """Activations of all layers for one sequence, against its length, by recompute and kernel."""
    lengths, curves = [2**i * 1024 for i in range(1, 8)], {}
    for attention, recompute in (
        ("unfused", "none"), ("unfused", "selective"), ("flash", "none"), ("flash", "full"),
    ):  # fmt: skip
        change = dict(attention=attention, recompute=recompute, batch=1)
        layouts = [replace(layout, seq=length, **change) for length in lengths]
        kept = lambda lo: sum(total(kept_activations(model, lo, x)) for x in range(model.layers))
        name = f"{attention} attention, recompute {recompute}"
        curves[name] = lengths, [kept(x) / GiB for x in layouts]
    _lines(ax, curves, {length: f"{length // 1024}K" for length in lengths})
    ax.set(xlabel="tokens in the sequence", ylabel="GiB, all layers")
    ax.set(title=f"{model.name}: kept for backward, one sequence on tp {layout.tp}")


def plot_traffic(ax, model, layout):
    """Bytes that a rank of the busiest stage sends in a step, by axis and phase."""
    found, sums = traffic(model, layout, busiest(model, layout)), Counter()
    for x in found:
        sums[f"{x.axis} {x.phase}", Topology().leaves_node(layout, x.axis)] += x.sent / GiB
    if not sums:
        raise ValueError("one rank sends nothing: split the job, as with --tp 8 --dp 8")
    rows = list(reversed(sums.items()))
    for far, colour, hatch in (False, _COLOURS[0], ""), (True, _COLOURS[1], "//"):
        sizes = [size if leaves == far else 0 for (_, leaves), size in rows]
        style = dict(color=colour, hatch=hatch, edgecolor="white")
        ax.barh(range(len(rows)), sizes, label=["inside a node", "between nodes"][far], **style)
    for y, (_, size) in enumerate(rows):
        ax.text(size, y, f" {size:.3g}", va="center", fontsize=8)
    ax.set_yticks(range(len(rows)), [name for (name, _), _ in rows])
    ax.set(xscale="log", xlabel="GiB that leave one rank in a step (log scale)")
    ax.xaxis.set_major_formatter("{x:,g}")
    ax.set(title=f"{model.name}: {layout.m} micro-batches of {layout.batch} x {layout.seq}")


# ── the command line: a command is a function; its parameters, annotated with help, are flags ─
# It returns rows, a table, and notes, lines; a key that starts with _ is for --json alone.


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
    return rows, [model.name]


def run_estimate(
    model,
    layout,
    hbm: Annotated[float, "GiB of a GPU; an 80 GB H100 shows 79.6"] = 80.0,
    explain: Annotated[bool, "print each formula with its numbers put in"] = False,
    versus: Annotated[str, 'a second layout, as what differs from the first: "--tp 4 --sp"'] = "",
):
    """Memory of a rank of every stage, whether it fits, and what to change."""
    rows, notes = [], []
    both = {"first": layout, "second": parsed_layout(versus, layout)} if versus else {"": layout}
    for which, lo in both.items():
        stages = estimate(model, lo)
        top = heaviest(stages)
        for s in [top] if versus else stages:
            row = {"layout": which} if versus else {}
            blocks = sum(0 <= layer < model.layers for layer in s.layers)
            row |= {"rank": s.rank, "layers": blocks, "parameters": s.params}
            row |= {part: size / GiB for part, size in grouped(s).items()}
            row |= {"peak GiB": s.peak / GiB, "at": s.moment, "verdict": s.verdict(hbm * GiB)}
            moments = {name: [asdict(x) for x in items] for name, items in s.moments.items()}
            rows.append(row | {"_bytes": s.peak, "_overhead": s.overhead, "_moments": moments})
        low, high = ((top.peak + more) / GiB for more in top.overhead)
        notes += ["", described(model, lo)]
        notes += [f"heaviest is rank {top.rank}: {top.peak / GiB:,.2f} GiB exact"]
        notes += [f"with overhead, an estimate: {low:,.1f} to {high:,.1f} of {hbm:g} GiB"]
        notes += [f"slow: {sentence}" for sentence in complaints(model, lo)]
        notes += explained(model, lo, top) if explain else []
        if top.verdict(hbm * GiB) != "fits":
            notes.append("what one change does, the strongest first:")
            says = lambda verdict, to: f"{verdict} on {to.world} GPUs"
            line = lambda flags, peak, *end: f"  {flags:40}{peak / GiB:9,.2f} GiB  {says(*end)}"
            single = remedies(model, lo, hbm * GiB)[:6]
            notes += [line(*row) for row in single]
            together = way_out(model, lo, hbm * GiB)
            if single and together[0] != single[0][0]:
                notes += ["and together:", line(*together)]
    return rows, notes


def explained(model, layout, stage):
    """Every line of a rank's budget with its formula; then the tensors that a layer of it keeps."""
    notes = [f"rank {stage.rank} at the {stage.moment}, bytes:"]
    line = lambda name, size, formula: f"  {name:44}{size:>16,}  = {formula}"
    for item in stage.moments[stage.moment]:
        notes.append(line(item.name, item.bytes, item.formula))
    for layer in one_of_each(model, stage.layers):
        notes.append(f"layer {layer} keeps for backward, per micro-batch:")
        for s in kept_activations(model, layout, layer):
            put_in = substituted(s.formula, symbols(model, layout))
            notes.append(line(s.name, s.bytes, f"{s.formula} = {put_in}"))
    return notes


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
):
    """Bubble of a schedule by closed form, and what its ranks hold."""
    b = bubble(schedule, p, m, v, costs)
    percent = lambda x: None if x is None else 100 * x
    rows = [
        {"of": of, "time": time, "idle": idle, "% of ideal": percent(r), "% of all": percent(f)}
        for of, time, idle, r, f in (
            ("first start to last end", b.makespan, b.idle, b.ratio, b.fraction),
            ("longest span of a rank", b.span, b.span_idle, b.span_ratio, b.span_fraction),
        )
    ]
    few = [*range(p)] if p <= 16 else [*range(8), p - 1]
    held = [f"{float(in_flight(schedule, p, m, v, rank)):g} on {rank}" for rank in few]
    notes = [f"{schedule}, p = {p}, m = {m}, v = {v}; F, I, W, comm = {costs}; ideal {b.ideal:g}"]
    idle, span, *_ = _FORMS[schedule]
    form = b.note or f"idle = {idle}; of a span {span or 'the same'}"
    return rows, [*notes, form, f"micro-batches in flight, by rank: {', '.join(held)}"]


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
    price: Annotated[float, "per GPU-hour"] = 3.0,
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
    busy = f"MBU {mbu(1e9 * moved, step, hbm):.2%}: {moved:g} GB of HBM in a step of {step:.3g} s"
    return rows, [
        f"{model.name} on {gpus} {gpu}, {kind}",
        f"MFU {share:.2%} by {convention}; HFU {hfu(share, 'full'):.2%} if all is recomputed",
        *[f"{busy}, of {hbm / 1e12:g} TB/s"] * (moved > 0),
        f"{spent:,.0f} GPU-hours at {price:g}: {spent * price:,.0f}; {seconds / 86400:,.1f} days",
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


def run_worksheet(model, layout, hbm: Annotated[float, "GiB of a GPU"] = 80.0):
    """The guide's memory budget worksheet, filled in for the heaviest rank."""
    lo, top = layout, heaviest(estimate(model, layout))
    cut = lambda stage: f"/ {lo.zero_ranks} of dp x cp" if lo.zero >= stage else "not cut"
    flight = in_flight(lo.schedule, lo.pp, lo.m, lo.v, top.rank)
    remarks = {
        "weights": f"/ tp {lo.tp} / pp {lo.pp}, {cut(3)}",
        "gradients": f"/ tp {lo.tp} / pp {lo.pp}, {cut(2)}",
        "optimizer": f"/ tp {lo.tp} / pp {lo.pp}, {cut(1)} (the guide forgets tp)",
        "activations": f"x {float(flight):g} micro-batches in flight",
        "buffers": "logits, recomputed layer, ZeRO gathers (the guide has no line for them)",
    }
    rows = [{"line": x, "GiB": size / GiB, "": remarks[x]} for x, size in grouped(top).items()]
    where = f"rank {top.rank}, at the {top.moment}"
    rows.append({"line": "exact", "GiB": top.peak / GiB, "": where})
    for word, more in zip(("least", "most"), top.overhead):
        remark = f"with {word} overhead, an estimate: {more / GiB:.1f} (the guide: 5 GB, later 11)"
        rows.append({"line": "total", "GiB": (top.peak + more) / GiB, "": remark})
    return rows, [described(model, lo), f"{top.verdict(hbm * GiB)}, of {hbm:g} GiB"]


PLOTS = plot_bubbles, plot_memory, plot_zero, plot_activations, plot_traffic
PLOTS = {plot.__name__.removeprefix("plot_"): plot for plot in PLOTS}


def run_plot(
    model,
    layout,
    what: Annotated[str, ", ".join(PLOTS)],
    out: Annotated[str, "a PNG, SVG or PDF file"] = "picture.png",
):
    """Draw one of the pictures to a file."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    validate(model, layout)
    figure, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    if Path(out).suffix[1:] not in known:
        raise ValueError(f"--out {out}: its ending says no format; known are {', '.join(known)}")
    try:
        PLOTS[nearest(what, PLOTS, "picture")](ax, model, layout)
        ax.spines[["top", "right"]].set_visible(False)
        style = dict(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        ax.legend(reverse=what == "memory", **style)  # in the order of the stack
        figure.savefig(out, dpi=150)
    except OSError as error:
        raise ValueError(f"--out {out}: {error.strerror}") from error
    finally:
        plt.close(figure)
    return [{"picture": what, "file": out}], []


COMMANDS = [run_params, run_estimate, run_traffic, run_bubble, run_compute, run_guide]
COMMANDS += [run_failures, run_offload, run_worksheet, run_plot]


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
        plain = each is str or name in _MAY_BE_0
        read = kind if plain else partial(number, each, bool(several))
        how = dict(type=read, choices=choices[0] if choices else None)
        how = dict(action=argparse.BooleanOptionalAction) if kind is bool else how
        text = f"{text} (default: {default})".replace("%", "%%")
        parser.add_argument(flag, default=default, help=text, **how)


def parsed_layout(text, default):
    """The layout that flags in a text make of another."""
    parser = argparse.ArgumentParser(prog="--versus", add_help=False)
    add_flags(parser, Layout, vars(default))
    return Layout(**vars(parser.parse_args(text.split())))


def build_parser():
    """The command line, from the signatures of COMMANDS."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for run in COMMANDS:
        name, given = run.__name__.removeprefix("run_"), inspect.signature(run).parameters
        sub = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="print data instead of text")
        if "model" in given:
            which = sub.add_mutually_exclusive_group()
            which.add_argument("--model", default="llama-3-8b", help="a released model")
            which.add_argument("--config", help="a Hugging Face config.json")
        if "layout" in given:
            add_flags(sub, Layout, vars(Layout()))
        add_flags(sub, run, {name: option.default for name, option in given.items()})
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


def main(argv=None):
    """Run one command; wrong input is answered by a sentence and exit status 2."""
    args = build_parser().parse_args(argv)
    given = {name: vars(args).get(name) for name in inspect.signature(args.run).parameters}
    try:
        if "model" in given:
            given["model"] = read_config(args.config) if args.config else preset(args.model)
        if "layout" in given:
            given["layout"] = Layout(**{f.name: getattr(args, f.name) for f in fields(Layout)})
        rows, notes = args.run(**given)
    except ValueError as refused:
        print(refused, file=sys.stderr)
        return 2
    if args.json:
        rows = [{key.lstrip("_"): value for key, value in row.items()} for row in rows]
        print(json.dumps({"rows": rows, "notes": notes}, indent=1))
    else:
        print("\n".join(([] if args.run is run_guide else table(rows)) + notes))
    return 0


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    sys.exit(main())
