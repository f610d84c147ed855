"""memory_math: every number it prints is held to something that it did not compute itself: to
released checkpoints, to tensors that torch keeps, to simulated schedules, to published figures."""

import json
import math
import time
from collections import Counter
from dataclasses import replace

import memory_math as mm
import pytest
import torch
import torch.nn.functional as nnf
from harness import ROOT, chapter, run_script
from memory_math import GiB, Layout, Model, model_from_config, preset
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

# ── parameters ───────────────────────────────────────────────────────────────────────────────

CHECKPOINTS = {  # as the released files count
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}

# config.json files that are no preset, as published but for what does not count
CONFIGS = {
    "TinyLlama-1.1B": (
        1_100_048_384,
        dict(model_type="llama", hidden_size=2048, intermediate_size=5632, num_hidden_layers=22)
        | dict(num_attention_heads=32, num_key_value_heads=4, vocab_size=32000, head_dim=None),
    ),
    "SmolLM2-135M": (
        134_515_008,
        dict(model_type="llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=30)
        | dict(num_attention_heads=9, num_key_value_heads=3, vocab_size=49152)
        | dict(tie_word_embeddings=True),
    ),
    "Qwen3-1.7B": (
        1_720_574_976,
        dict(model_type="qwen3", hidden_size=2048, intermediate_size=6144, num_hidden_layers=28)
        | dict(num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936)
        | dict(tie_word_embeddings=True, attention_bias=False),
    ),
    "Qwen1.5-MoE-A2.7B": (
        14_315_784_192,
        dict(model_type="qwen2_moe", hidden_size=2048, intermediate_size=5632)
        | dict(num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=16)
        | dict(vocab_size=151936, num_experts=60, num_experts_per_tok=4, decoder_sparse_step=1)
        | dict(moe_intermediate_size=1408, shared_expert_intermediate_size=5632),
    ),
    "gemma-3-4b-it, vision tower apart": (
        3_880_263_168,
        dict(model_type="gemma3", mm_tokens_per_image=256)
        | dict(
            text_config=dict(model_type="gemma3_text", hidden_size=2560)
            | dict(intermediate_size=10240, num_hidden_layers=34, sliding_window=1024)
        ),
    ),
    "distilgpt2": (
        81_912_576,
        dict(model_type="gpt2", n_embd=768, n_layer=6, n_head=12, vocab_size=50257, n_ctx=1024),
    ),
    "deepseek-moe layers from a frequency": (
        15_706_484_224,
        dict(model_type="deepseek_v2", hidden_size=2048, intermediate_size=10944)
        | dict(num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16)
        | dict(vocab_size=102400, q_lora_rank=None, kv_lora_rank=512, qk_rope_head_dim=64)
        | dict(qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=64, n_shared_experts=2)
        | dict(num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1)
        | dict(moe_layer_freq=1, num_nextn_predict_layers=1),
    ),
}


@pytest.mark.parametrize("name", mm.RELEASED)
def test_a_preset_has_the_parameters_of_its_checkpoint(name):
    assert mm.count_parameters(preset(name)) == CHECKPOINTS[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_has_the_parameters_of_its_checkpoint(name):
    parameters, config = CONFIGS[name]
    assert mm.count_parameters(model_from_config(config, name)) == parameters


def test_active_parameters():
    """Published as 12.9 B, 39 B, 3.3 B, 22 B, 2.4 B of which no embedding, and 37 B."""
    active = {name: mm.count_active(preset(name)) for name in mm.RELEASED}
    assert active["mixtral-8x7b"] == 12_879_925_248
    assert active["mixtral-8x22b"] == 39_161_468_928
    assert active["qwen3-30b-a3b"] == 3_353_032_704
    assert active["qwen3-235b-a22b"] == 22_190_763_520
    assert active["deepseek-v3"] == 37_552_297_472
    assert active["llama-3-8b"] == CHECKPOINTS["llama-3-8b"]


def test_mem_07_gated_mlps_and_the_parts_of_a_sharded_model():
    """A third matrix is 16 B; a sharded model has the parameters of the whole one."""
    big = Model("x", 80, 8192, 64, 64, 128, 24576, 152064)
    matrices = lambda m: mm.count_parameters(m) - mm.parameters_by_kind(m)["norm"]
    assert round(matrices(big) / 1e9, 2) == 72.28
    assert round(matrices(replace(big, gated=False)) / 1e9, 2) == 56.18
    for name, degrees in ("llama-3-8b", dict(tp=4, kv=4)), ("mixtral-8x7b", dict(tp=2, kv=2, ep=8)):
        listed = mm.weights(preset(name))
        ranks = lambda w: math.prod(degrees.get(axis, 1) for axis in w.axes)
        assert all(w.local(degrees) * ranks(w) == w.numel for w in listed)


MISTAKES = [
    (dict(), "model_type"),
    (dict(model_type="lama"), "nearest are llama"),
    (dict(hidden_size=None), "hidden_size is missing"),
    (dict(vocab_size=None), "vocab_size is missing"),
    (dict(num_hidden_layers=0), "num_hidden_layers is 0"),
    (dict(intermediate_size="4h"), "intermediate_size is '4h'"),
    (dict(num_attention_heads=7), "num_attention_heads 7 does not divide hidden_size"),
    (dict(num_key_value_heads=3), "num_key_value_heads 3 does not divide num_attention_heads"),
    (dict(model_type="mixtral", num_local_experts=2, num_experts_per_tok=3), "exceeds"),
    (dict(model_type="deepseek_v3"), "kv_lora_rank is missing"),
]


@pytest.mark.parametrize("change, sentence", MISTAKES, ids=lambda x: str(x)[:40])
def test_a_config_with_a_mistake_is_answered_by_its_field(change, sentence):
    config = dict(CONFIGS["TinyLlama-1.1B"][1]) if change else {}
    with pytest.raises(ValueError, match=sentence):
        model_from_config(config | change)


# ── activations: a block in torch, and what its graph really keeps ───────────────────────────


class FusedNorm(torch.autograd.Function):
    """RMSNorm as a kernel: keeps its input and one fp32 statistic a row."""

    @staticmethod
    def forward(ctx, x, weight):
        rstd = (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        return (x.float() * rstd).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight, rstd = ctx.saved_tensors
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            rstd = (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
            out = (x.float() * rstd).to(x.dtype) * weight
        return torch.autograd.grad(out, (x, weight), grad)


class FusedSwiGLU(torch.autograd.Function):
    """silu(gate) * up as a kernel: keeps its two inputs."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return nnf.silu(gate) * up

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            gate, up = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            out = nnf.silu(gate) * up
        return torch.autograd.grad(out, (gate, up), grad)


class SwiGLUDown(torch.autograd.Function):
    """SwiGLU and the product after it, which recomputes the activation: keeps gate and up."""

    @staticmethod
    def forward(ctx, gate, up, weight):
        ctx.save_for_backward(gate, up, weight)
        return nnf.silu(gate) * up @ weight.T

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = nnf.silu(inputs[0]) * inputs[1] @ inputs[2].T
        return torch.autograd.grad(out, inputs, grad)


class GatherAgain(torch.autograd.Function):
    """Sequence parallel: products of the gathered sequence that keep only this rank's piece."""

    @staticmethod
    def forward(ctx, x, ranks, *weights):
        ctx.ranks = ranks
        ctx.save_for_backward(x, *weights)
        return tuple(x.repeat(1, ranks, 1) @ w.T for w in weights)

    @staticmethod
    def backward(ctx, *grads):
        x, *weights = ctx.saved_tensors
        whole = x.repeat(1, ctx.ranks, 1).flatten(0, 1)
        back = sum(g @ w for g, w in zip(grads, weights))[:, : x.shape[1]]
        return back, None, *(g.flatten(0, 1).T @ whole for g in grads)


class Block(torch.nn.Module):
    """One layer of any Model, as one rank of a Layout runs it alone: a gathered sequence is its
    own piece repeated, a reduce-scatter a cut, so that every tensor has its true size."""

    def __init__(self, model, layout):
        super().__init__()
        self.m, self.lo = model, layout
        self.dtype = torch.float32 if layout.recipe == "fp32" else torch.bfloat16
        section = "moe" if model.is_moe(0) else "dense"
        names = [row[0] for part in ("layer", section) for row in mm._WEIGHTS[part]]
        degrees = layout.degrees(model)
        for w in mm.weights(model):
            if w.layer == 0 and (name := w.name.removeprefix("layers.0.")) in names:
                shape = [-(-n // degrees.get(axis, 1)) for n, axis in zip(w.shape, w.axes)]
                value = torch.randn(shape, generator=torch.Generator().manual_seed(0)) / 16
                self.register_parameter(
                    name.replace(".", "_"), torch.nn.Parameter(value.to(self.dtype))
                )

    def norm(self, x, name):
        weight = getattr(self, name)
        if self.m.layer_norm:
            return nnf.layer_norm(x, x.shape[-1:], weight, getattr(self, name + "_bias"))
        if self.lo.norm == "fused":
            return FusedNorm.apply(x, weight)
        wide = x.float()
        return (wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype) * weight

    def products(self, x, *names):
        """x times each weight, after the gather that sequence parallelism needs."""
        weights = [getattr(self, name) for name in names]
        if self.lo.sp and self.lo.gather == "again":
            return GatherAgain.apply(x, self.lo.tp, *weights)
        x = x.repeat(1, self.lo.tp, 1) if self.lo.sp else x
        biases = [getattr(self, name + "_bias", None) for name in names]
        return [nnf.linear(x, w, b) for w, b in zip(weights, biases)]

    def scattered(self, x):
        return x[:, : x.shape[1] // self.lo.tp] if self.lo.sp else x

    def qkv(self, x):
        m, lo = self.m, self.lo
        heads = lambda t, d: t.unflatten(-1, (-1, d))
        turn = lambda t: t * self.cos[: t.shape[1], None, : t.shape[-1]]
        if not m.mla:
            q, k, v = (heads(t, m.head_dim) for t in self.products(x, "q_proj", "k_proj", "v_proj"))
            if m.qk_norm:
                q, k = self.norm(q, "q_norm"), self.norm(k, "k_norm")
            return turn(q), turn(k), v
        rank_q, rank_kv, rope, nope, dv = m.mla
        names = ["q_a_proj" if rank_q else "q_proj", "kv_a_proj_with_mqa"]
        q, latent = self.products(x, *names)
        if rank_q:
            q = self.norm(q, "q_a_layernorm") @ self.q_b_proj.T
        q = heads(q, rope + nope)
        q = torch.cat([q[..., :nope], turn(q[..., nope:])], -1)
        kv = heads(self.norm(latent[..., :rank_kv], "kv_a_layernorm") @ self.kv_b_proj.T, nope + dv)
        k_rope = turn(latent[..., None, rank_kv:]).expand(-1, -1, q.shape[2], -1)
        return q, torch.cat([kv[..., :nope], k_rope], -1), kv[..., nope:].contiguous()

    def core(self, q, k, v):
        """Causal attention, (b, s, heads, d) to (b, s, heads * dv)."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.lo.attention == "flash":
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                gqa = q.shape[1] != k.shape[1]
                out = nnf.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        else:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
            far = torch.full((q.shape[2],) * 2, -math.inf, dtype=q.dtype).triu(1)
            p = (q @ k.mT * q.shape[-1] ** -0.5 + far).softmax(-1)
            out = (torch.native_dropout(p, 0.1, True)[0] if self.lo.dropout else p) @ v
        return out.transpose(1, 2).flatten(2)

    def mlp(self, gate, up, down):
        if not self.m.gated:
            return nnf.gelu(up, approximate="tanh") @ down.T + self.down_proj_bias
        if self.lo.mlp == "recompute":
            return SwiGLUDown.apply(gate, up, down)
        return (FusedSwiGLU.apply(gate, up) if self.lo.mlp == "fused" else nnf.silu(gate) * up) @ down.T

    def experts(self, x):
        """Softmax, the top k renormalised, rows sorted by expert, experts one after another."""
        m, shape = self.m, x.shape
        x = x.flatten(0, 1)
        p = (x @ self.router.T).float().softmax(-1)
        gates, chosen = p.topk(m.top_k)
        gates = gates / gates.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=m.experts).tolist()
        rows = x[order // m.top_k].split(counts)
        matrices = zip(self.experts_gate_proj, self.experts_up_proj, self.experts_down_proj)
        out = torch.cat([self.mlp(r @ g.T, r @ u.T, d) for r, (g, u, d) in zip(rows, matrices)])
        back = out[order.argsort()].unflatten(0, (-1, m.top_k))
        y = (back * gates.to(x.dtype)[..., None]).sum(1)
        if m.shared_ffn:
            gate, up = x @ self.shared_gate_proj.T, x @ self.shared_up_proj.T
            shared = self.mlp(gate, up, self.shared_down_proj)
            y = y + (shared * (x @ self.shared_gate.T).sigmoid() if m.shared_gate else shared)
        return y.view(shape)

    def forward(self, x):
        m, lo = self.m, self.lo
        lost = lambda t: torch.native_dropout(t, 0.1, True)[0] if lo.dropout else t
        q, k, v = self.qkv(self.norm(x, "norm1"))
        selective = lo.recompute == "selective"
        mixed = checkpoint(self.core, q, k, v, use_reentrant=False) if selective else self.core(q, k, v)
        y = self.scattered(nnf.linear(mixed, self.o_proj, getattr(self, "o_proj_bias", None)))
        y = lost(self.norm(y, "norm3") if m.norms == 4 else y)
        x = x + y
        y = self.norm(x, "norm2")
        if m.is_moe(0):
            y = self.experts(y)
        else:
            *gate, up = self.products(y, *["gate_proj", "up_proj"][not m.gated :])
            y = self.scattered(self.mlp(*gate or [None], up, self.down_proj))
        return x + lost(self.norm(y, "norm4") if m.norms == 4 else y)


def bytes_kept(run, known):
    """Bytes of the distinct storages that `run()` saves for backward, those of `known` apart."""
    skip, kept = {t.untyped_storage()._cdata for t in known}, {}

    def pack(t):
        storage = t.untyped_storage()
        kept[storage._cdata] = storage  # holds it, so that no address is used twice
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        out = run()
    out.sum().backward()
    return sum(s.nbytes() for cdata, s in kept.items() if cdata not in skip)


SMALL = dict(layers=1, hidden=64, heads=8, kv_heads=2, head_dim=8, ffn=96, vocab=512)
LLAMA = Model("llama", **SMALL)
GPT = Model("gpt", **SMALL | dict(kv_heads=8, ffn=256), gated=False, layer_norm=True)
GPT = replace(GPT, qkv_bias=True, out_bias=True, mlp_bias=True, tied=True, positions=64)
GEMMA = Model("gemma", **SMALL, norms=4, qk_norm=True, tied=True)
MLA = Model("mla", **SMALL | dict(kv_heads=8), mla=(40, 24, 4, 8, 6))
MIXTRAL = Model("mixtral", **SMALL, experts=4, top_k=2, expert_ffn=48)
SHARED = replace(MIXTRAL, shared_ffn=32, shared_gate=True)
BASE = Layout(batch=2, seq=32)
VARIANTS = {
    "llama, eager SwiGLU": (LLAMA, dict(mlp="eager")),
    "llama, fused": (LLAMA, {}),
    "llama, mlp recomputed": (LLAMA, dict(mlp="recompute")),
    "llama, norm written out": (LLAMA, dict(norm="eager")),
    "llama, fp32, norm written out": (LLAMA, dict(recipe="fp32", norm="eager")),
    "llama, core recomputed": (LLAMA, dict(recompute="selective")),
    "llama, full recompute": (LLAMA, dict(recompute="full")),
    "llama, unfused attention": (LLAMA, dict(attention="unfused")),
    "llama, unfused, dropout": (LLAMA, dict(attention="unfused", dropout=True)),
    "llama, unfused, core recomputed": (LLAMA, dict(attention="unfused", recompute="selective")),
    "llama, tp 2": (LLAMA, dict(tp=2)),
    "llama, tp 4 over 2 key heads": (LLAMA, dict(tp=4)),
    "llama, tp 2, sp, gathered again": (LLAMA, dict(tp=2, sp=True)),
    "llama, tp 2, sp, gathers kept": (LLAMA, dict(tp=2, sp=True, gather="keep")),
    "gpt, fp32": (GPT, dict(recipe="fp32")),
    "gpt, fp32, dropout": (GPT, dict(recipe="fp32", attention="unfused", dropout=True)),
    "gemma, four norms and q-k norms": (GEMMA, {}),
    "latent attention": (MLA, dict(attention="unfused")),
    "latent attention, flash": (replace(MLA, mla=(40, 24, 4, 8, 12)), {}),
    "latent attention, no q rank": (replace(MLA, mla=(0, 24, 4, 8, 12)), {}),
    "mixtral": (MIXTRAL, {}),
    "mixtral, eager": (MIXTRAL, dict(mlp="eager", norm="eager")),
    "shared expert with a gate": (SHARED, {}),
    "mixtral, full recompute": (MIXTRAL, dict(recompute="full")),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_list_of_saved_tensors_is_what_torch_keeps_to_the_byte(name):
    model, change = VARIANTS[name]
    layout = replace(BASE, **change)
    torch.manual_seed(0)
    block = Block(model, layout)
    assert sum(p.numel() for p in block.parameters()) == mm.local_parameters(model, layout, [0]).total()
    s = layout.seq // (layout.tp if layout.sp else 1)
    block.cos = torch.randn(layout.seq, model.qk_dim).to(block.dtype)
    x = torch.randn(layout.batch, s, model.hidden).to(block.dtype).requires_grad_()
    run = lambda: block(x)
    if layout.recompute == "full":
        run = lambda: checkpoint(block, x, use_reentrant=False)
    kept = bytes_kept(run, [*block.parameters(), block.cos])
    assert kept == mm.total(mm.kept_activations(model, layout))


@pytest.mark.parametrize("loss", ["eager", "copies", "fused"])
def test_the_head_keeps_its_input_and_the_logits(loss):
    model, layout = LLAMA, replace(BASE, loss=loss)
    kept, peak = (mm.total(mm.saved_in(model, layout, part)) for part in ("last", "loss peak"))
    T, V, h = 64, 512, 64
    before = 2 * T * h + 4 * T + 2 * T * h
    assert kept - before == {"eager": 4, "copies": 6, "fused": 2}[loss] * T * V
    assert kept + peak - before == {"eager": 12, "copies": 10, "fused": 2}[loss] * T * V
    if loss != "eager":
        return
    norm, head = torch.ones(h).bfloat16().requires_grad_(), torch.randn(V, h).bfloat16().requires_grad_()
    x, labels = torch.randn(T, h).bfloat16().requires_grad_(), torch.randint(V, (T,))
    logits = lambda: (FusedNorm.apply(x, norm) @ head.T).float()
    run = lambda: nnf.cross_entropy(logits(), labels, reduction="sum")
    assert bytes_kept(run, [norm, head, labels]) == kept + 4  # the weight of all labels, one fp32


def test_published_activation_figures():
    """Bytes of one layer that other systems measured, or that their papers print."""
    big, lo = preset("llama-3-70b"), Layout(tp=8, sp=True, seq=8192)
    assert mm.total(mm.layer_activations(big, replace(lo, gather="keep"))) == 516_169_728
    assert mm.total(mm.layer_activations(big, lo)) == 281_288_704
    small = mm.total(mm.layer_activations(preset("llama-3-8b"), Layout(seq=8192)))
    assert 32 * small == 36_542_873_600  # MemTracker on a whole Llama-3-8B
    gpt3 = Model("gpt3", 96, 12288, 96, 96, 128, 4 * 12288, 51200, gated=False, layer_norm=True)
    lo = Layout(seq=2048, attention="unfused", dropout=True)
    listed = mm.total(mm.layer_activations(gpt3, lo)) - 2 * 8 * 2048  # the paper counts no statistics
    assert listed == mm.megatron_activations(2048, 1, 12288, 96) == 2048 * 12288 * (34 + 80)
    for tp in 2, 8:
        sp = mm.total(mm.layer_activations(gpt3, replace(lo, tp=tp, sp=True))) - 2 * 8 * 2048 // tp
        assert sp == mm.megatron_activations(2048, 1, 12288, 96, tp, sp=True)
        alone = mm.total(mm.layer_activations(gpt3, replace(lo, tp=tp))) - 2 * 8 * 2048
        assert alone == mm.megatron_activations(2048, 1, 12288, 96, tp)
