"""06_cp_ring: every way to attend equal to full attention, and the reported faults."""

import itertools
import math
import re
import resource
import subprocess
import sys
from functools import partial
from itertools import permutations
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import ROOT, RankFailed, chapter, on_ranks, refusal, run_script

cp = chapter("06_cp_ring")
CPU, LAYOUTS = torch.device("cpu"), ("contiguous", "zigzag", "striped")
SCRIPT = ROOT / "06_cp_ring.py"
world = lambda: dist.group.WORLD
rank = lambda: dist.get_rank()
question = pytest.mark.question


def dense(q, k, v, documents=None, causal=True, window=None, scale=None, length=None):
    """Full attention by loops over heads: the tests' own twin, with document -1 seeing nothing."""
    S, (H, K), out = q.shape[1], (q.shape[2], k.shape[2]), q.new_zeros(*q.shape[:3], v.shape[-1])
    i, j = torch.arange(S)[:, None], torch.arange(S)
    seen = ((j <= i) | (not causal))[None]
    if window:
        seen = seen & (j > i - window) & (j < i + window)
    if documents is not None:
        same = documents[:, :, None] == documents[:, None, :]
        seen = seen & same & (documents >= 0)[:, :, None]
    for head in range(H):
        key = head // (H // K)
        scores = q[:, :, head] @ k[:, :, key].mT * (scale or 1 / math.sqrt(q.shape[-1]))
        probs = scores.masked_fill(~seen, -math.inf).softmax(-1)
        out[:, :, head] = probs.masked_fill(~seen.any(-1)[..., None], 0) @ v[:, :, key]
    return out


def draw(S, H, K, d=4, B=2, dtype=torch.float64, width=None):
    """q, k, v and a gradient of the output, the same on every rank; `width` is that of values."""
    generator = torch.Generator().manual_seed(S)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    shapes = (H, d), (K, d), (K, width or d), (H, width or d)
    return [normal(B, S, *shape).to(dtype) for shape in shapes]


def gradients(attend, q, k, v, d_out):
    """Output, dq, dk, dv."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)]


def groups_of(n, u):
    """This rank's Ulysses group of u neighbours, and its ring of n/u."""
    grid = torch.arange(n).view(n // u, u)
    made = {tuple(ranks): dist.new_group(ranks) for ranks in (*grid.tolist(), *grid.T.tolist())}
    return [made[tuple(line.tolist())] for line in (grid[rank() // u], grid.T[rank() % u])]


def ways(n, layout, u=None):
    """{name: (attention, sharding, what ends the sharding)} in one layout; with u, both."""
    given = dict(group=world(), layout=layout)
    cut = partial(cp.shard, **given)
    found = {f.__name__: (partial(f, **given), cut) for f in (
        cp.ring_attention, cp.all_gather_attention, cp.ulysses_attention)}  # fmt: skip
    if u:
        ulysses, ring = groups_of(n, u)
        both = partial(cp.ulysses_ring_attention, group=ulysses, ring_group=ring, layout=layout)
        found[f"{u} x ring"] = both, lambda x, fill=0: cp.shard(
            cp.shard(x, ring, layout, fill, inner=u), ulysses, "contiguous", fill)  # fmt: skip
    return found


def errors(n, H, K, S, options, us=()):
    """{(way, layout, fused or not): largest relative error of output, dq, dk, dv} on this rank."""
    options = dict(options)
    *qkv, d_out = draw(S, H, K, width=options.pop("width", None))
    if options.pop("packed", False):
        options["documents"] = documents = torch.arange(2 * S).view(2, S) // 5
        documents[0, 3:5] = -1  # tokens that see nothing and that nothing sees
    wanted, found = gradients(partial(dense, **options), *qkv, d_out), {}
    every = {(name, layout): way for layout in LAYOUTS for u in us or [None]
             for name, way in ways(n, layout, u).items()}  # fmt: skip
    for fused in (True, False):
        with patch.dict(cp.FUSED, clear=not fused):
            for (name, layout), (attend, cut) in every.items():
                local = [cut(x, fill=1e3) for x in qkv]
                attend = partial(attend, length=S, **options)
                out, *grads = gradients(attend, *local, cut(d_out))
                out = out * cut(torch.ones_like(d_out))
                error = [((a - cut(b)).abs().max() / b.abs().max()).item()
                         for a, b in zip([out, *grads], wanted)]  # fmt: skip
                found[name, layout, fused] = math.nan if any(map(math.isnan, error)) else max(error)
    return found


def all_equal(n, cases, us=()):
    def every_case():
        return [(case, way, error) for case in cases for way, error in errors(n, *case, us).items()]

    for r, found in enumerate(on_ranks(n, every_case, timeout=120)):
        for case, (way, layout, fused), error in found:
            written = "" if fused else ", written out"
            assert error < 1e-12, f"rank {r} of {n}: {way}, {layout}{written}, H K S options {case}"


MASKS = [
    {"packed": True}, {"window": 3}, {"packed": True, "window": 3}, {"causal": False},
    {"causal": False, "window": 3, "width": 6}, {"causal": False, "packed": True, "scale": 0.3},
]  # fmt: skip


@question("Q6.1")
@question("Q6.2")
@question("Q6.3")
@question("Q6.4")
@question("Q6.5")
@question("Q6.6")
@pytest.mark.parametrize("n", [1, 2, 4])
def test_every_way_and_layout_equals_full_attention(n):
    """Output and gradients, with and without documents, odd lengths, H:K of 8:8, 8:2 and 8:1, and
    value heads that are narrower and wider than those of keys."""
    cases = [(8, 8, 16 * n, {}), (8, 2, 8 * n + 3, {"packed": True})]
    cases += [(8, 1, 8 * n + 1, {"width": 2}), (8, 4, 8 * n, {"width": 7, "scale": 0.3})]
    all_equal(n, cases, us=[2] if n > 1 else ())


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_every_way_sees_through_every_mask_what_full_attention_sees(options):
    """On lengths that no layout divides: without causality, too, nothing sees the padding."""
    all_equal(2, [(4, 2, 17, options)], us=[2])


@pytest.mark.slow
@pytest.mark.parametrize("n, us", [(3, []), (8, [2, 4])])
def test_every_way_and_layout_equals_full_attention_on_more_ranks(n, us):
    H, shapes = 24 if n == 3 else 8, [(8 * n, {}), *((6 * n + 5, options) for options in MASKS)]
    all_equal(n, [(H, K, *shape) for K, shape in zip(itertools.cycle((H, 2, 1)), shapes)], us)


# ── the proof ────────────────────────────────────────────────────────────────────────────────


def rows():
    right = [cp.by_hand_row(world(), CPU), *cp.attention_rows(world(), CPU)]
    wrong = cp.wrong_rows(world(), CPU) if dist.get_world_size() > 1 else []
    return [*right, cp.model_row(world(), CPU), *wrong]


@question("Q6.2")
@question("Q6.4")
@question("Q6.5")
@pytest.mark.parametrize("n", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_row_of_the_proof_is_as_claimed_on_every_rank(n):
    by_rank = on_ranks(n, rows)
    for row in (row for ranks in by_rank for row in ranks):
        for measured, formula in filter(None, (row.sent, row.held)):
            assert measured == pytest.approx(formula, abs=0.5), row.name
    for ranks in zip(*by_rank):
        error, wrong = max(row.error for row in ranks), max(row.wrong for row in ranks)
        assert error == pytest.approx(wrong, rel=1e-6, abs=1e-10), ranks[0].name
        assert wrong == 0 or wrong > 0.01, f"{ranks[0].name} would not show"
    assert len(by_rank[0]) == (12 if n == 1 else 14)


def test_bytes_sent_are_what_is_counted_by_hand():
    """Two ranks, 8 tokens each, H=4, K=2, d=4, batch 1, float32: a rank's k and v are 512 bytes.

    Forward: one hop of 512. Backward: one more of 512, and two of dk, dv, 512 each. The gather:
    512, and half of 1,024. Ulysses: half of 512 (q, out) or 256 (k, v), and as much back.
    In bf16 keys and values are half of that, their gradients in fp32 are not.
    """

    def step(attend, dtype):
        q, k, v, d_out = (cp.shard(x, world()) for x in draw(16, 4, 2, B=1, dtype=dtype))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        with cp.Ledger() as forward:
            out = attend(q, k, v, world())
        with cp.Ledger() as backward:
            out.backward(d_out)
        return [sum(ledger.sent.values()) for ledger in (forward, backward)]

    sent = lambda attend, dtype: on_ranks(2, step, attend, dtype)
    assert sent(cp.ring_attention, torch.float32) == [[512, 512 + 1024]] * 2
    assert sent(cp.ring_attention, torch.bfloat16) == [[256, 256 + 1024]] * 2
    assert sent(cp.all_gather_attention, torch.float32) == [[512, 512]] * 2
    assert sent(cp.all_gather_attention, torch.bfloat16) == [[256, 512]] * 2
    assert sent(cp.ulysses_attention, torch.float32) == [[768, 768]] * 2


@pytest.mark.parametrize("n, u", [(2, 2), (4, 2)])
def test_ulysses_inside_a_ring_sends_and_keeps_what_both_do(n, u):
    """In heads of this rank's tokens, H=8 and K=2, and v as wide as q: Ulysses sends 2(u-1)/u of
    all heads, and the ring 3·n/u - 2 times those of keys; what is kept falls as 1/n."""

    def step():
        attend, cut = ways(n, "zigzag", u=u)[f"{u} x ring"]
        q, k, v, d_out = (cut(x) for x in draw(16, 8, 2))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        with cp.Ledger() as ledger, cp.kept_bytes() as kept:
            attend(q, k, v).backward(d_out)
        return sum(ledger.sent.values()), sum(kept.values())

    tokens = 8 * 2 * 16 // n  # 8 bytes of each of a rank's tokens of two sequences
    rings = 3 * n // u - 2 if n > u else 0
    heads = 2 * (u - 1) / u * (8 + 2) + rings * 2
    held = tokens * 8 * (8 + 2) + tokens * 8  # q, out, k, v; lse
    assert on_ranks(n, step) == [(heads * tokens * 2 * 4, held)] * n


def test_ulysses_sends_less_than_a_ring_forward_from_h_over_k_plus_one_ranks_on():
    def sent(attend):
        q, k, v, _ = (cp.shard(x, world(), "contiguous") for x in draw(16, 8, 4, B=1))
        with cp.Ledger() as ledger:
            attend(q, k, v, world(), "contiguous")
        return sum(ledger.sent.values())

    ways = cp.ulysses_attention, cp.ring_attention
    for n, ratio in ((2, 3 / 2), (4, 3 / 4)):  # (H/K + 1) / n
        ulysses, ring = (on_ranks(n, sent, attend)[0] for attend in ways)
        assert ulysses / ring == ratio


# ── order of events ──────────────────────────────────────────────────────────────────────────


def order(layout):
    """What one forward and one backward did, in order: "post", "compute", "wait"."""
    real = {name: getattr(cp, name) for name in ("block_forward", "block_backward")}
    q, k, v, d_out = (cp.shard(x, world(), layout) for x in draw(16, 2, 2))
    q.requires_grad_(), k.requires_grad_()
    with cp.Ledger() as ledger:
        marked = lambda f: lambda *given: ledger.mark("compute") or f(*given)
        with patch.multiple(cp, **{name: marked(f) for name, f in real.items()}):
            out = cp.ring_attention(q, k, v, world(), layout)
            ledger.mark("turn")
            out.backward(d_out)
    names = [event.what for event in ledger.events if event.what != "irecv"]
    return " ".join("post" if name == "isend" else name for name in names)


@question("Q6.3")
@question("Q6.5")
def test_each_hop_is_posted_before_a_block_is_computed_and_waited_for_after_it():
    """A hop is two works, a send and a receive: two waits. Backward also sends dk, dv, which it
    waits for after the next block, so that every hop but the last has a block to hide behind."""
    hop = "wait wait"
    forward = f"post compute {hop} post compute {hop} post compute {hop} compute"
    first = f"post compute post {hop}"
    backward = f"{first} post compute {hop} post {hop} post compute {hop} post {hop}"
    backward += f" compute {hop} post {hop}"
    for found in on_ranks(4, order, "zigzag"):
        assert found.split(" turn ") == [forward, backward]


@question("Q6.3")
def test_a_rank_that_sees_nothing_of_a_block_computes_nothing_and_passes_it_on():
    for r, found in enumerate(on_ranks(4, order, "contiguous")):
        forward, backward = found.split(" turn ")
        assert (forward.count("compute"), backward.count("compute")) == (r + 1, r + 1)
        assert (forward.count("post"), backward.count("post")) == (3, 7)


def test_every_call_is_on_the_group_that_was_given():
    """Two rings of two in a world of four, each with sequences of its own."""

    def step():
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = pairs[rank() // 2]
        *qkv, d_out = (x + rank() // 2 for x in draw(8, 4, 2))
        wanted, groups, error = gradients(dense, *qkv, d_out), set(), 0.0
        for attend in (cp.ring_attention, cp.all_gather_attention, cp.ulysses_attention):
            attend, cut = (partial(f, group=group, layout="zigzag") for f in (attend, cp.shard))
            with cp.Ledger() as ledger:
                found = gradients(attend, *(cut(x) for x in qkv), cut(d_out))
                whole = cp.unshard(found[0], 8, group)
            groups |= {event.group for event in ledger.events if event.what != "wait"}
            error = max(error, (whole - wanted[0]).abs().max().item())
            error = max(error, *((a - cut(b)).abs().max().item() for a, b in zip(found, wanted)))
        return error, groups == {group.group_name}

    for error, own_group in on_ranks(4, step):
        assert error < 1e-12 and own_group


# ── layouts ──────────────────────────────────────────────────────────────────────────────────


@question("Q6.1")
@pytest.mark.parametrize("S, n", [(8, 2), (16, 4), (96, 8), (12, 1)])
def test_zigzag_is_the_order_of_torchs_own_load_balancer(S, n):
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
        _HeadTailLoadBalancer,
    )

    theirs = _HeadTailLoadBalancer(S, n, CPU)._generate_indices().flatten().tolist()
    assert cp._owned(S, n, "zigzag").flatten().tolist() == theirs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_rank_sees_of_each_block_is_the_causal_mask_cut_to_what_is_visible(layout):
    """By brute force over every pair of ranks, to 5 ranks, with and without documents."""
    for n in range(1, 6):
        for S in (2 * n, 6 * n):
            owned = cp._owned(S, n, layout)
            for documents in (None, torch.arange(S)[None] // 3):
                for r, j in ((r, j) for r in range(n) for j in range(n)):
                    wanted = owned[r][:, None] >= owned[j]
                    if documents is not None:
                        wanted &= documents[0, owned[r]][:, None] == documents[0, owned[j]]
                    found = torch.zeros_like(wanted)
                    ring = dict(masked=documents is not None, documents=documents, window=S)
                    ring = SimpleNamespace(causal=True, length=S, **ring)
                    sight = cp.other_sight(owned[r], owned[j], ring)
                    if sight:
                        block = torch.ones_like(found[sight.rows, sight.columns])
                        block = block.tril() if sight.causal else block
                        block = block if sight.mask is None else sight.mask[0, 0]
                        found[sight.rows, sight.columns] = block
                        assert found.any(), "a block without a visible pair would be computed"
                    assert torch.equal(found, wanted), (n, S, r, j)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shard_and_unshard_are_inverse_and_pad_only_what_they_must(layout):
    def step(S):
        x = torch.arange(3 * S).view(1, S, 3)
        part = cp.shard(x, world(), layout, fill=-7)
        mine = cp.positions(S, world(), layout)
        assert torch.equal(mine, mine.sort().values)
        assert torch.equal(part[0, mine < S], x[0, mine[mine < S]])
        assert (part[0, mine >= S] == -7).all()
        assert torch.equal(cp.unshard(part, S, world(), layout), x)
        return len(mine)

    for S in (1, 2, 9, 16):
        for n in (1, 2, 4):
            multiple = 2 * n if layout == "zigzag" else n
            assert on_ranks(n, step, S) == [math.ceil(S / multiple) * multiple // n] * n


def test_a_part_that_is_split_again_is_padded_at_the_end_of_the_sequence_only():
    def step():
        return [cp.positions(9, world(), layout, inner=3).tolist() for layout in LAYOUTS]

    (a, b, c), (d, e, f) = on_ranks(2, step)
    assert sorted(a + d) == sorted(c + f) == list(range(12)) and sorted(b + e) == list(range(12))
    assert b == [0, 1, 2, 9, 10, 11]


def test_zigzag_of_an_odd_number_of_tokens_a_rank_is_refused():
    """Such a part is not of `shard`'s making, and where its tokens stand is anybody's guess."""
    for attend in (cp.ring_attention, cp.all_gather_attention, cp.ulysses_attention):
        with pytest.raises(RankFailed, match="5 tokens a rank: zigzag needs an even number"):
            on_ranks(2, lambda: attend(*draw(5, 2, 2)[:3], world(), "zigzag"))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("inner", [1, 2, 3, 4])
def test_zigzag_pads_to_n_times_the_least_common_multiple_of_2_and_inner(n, inner):
    """(cp, tp) = (2, 2) needs 4 tokens, not 8: a part is halved by zigzag and split by tp."""
    for S in (1, 4, 9, 24):
        owned = cp._owned(S, n, "zigzag", inner)
        assert owned.numel() == math.ceil(S / (n * math.lcm(2, inner))) * n * math.lcm(2, inner)
        assert owned.flatten().sort().values.tolist() == list(range(owned.numel()))


DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7 + [2] * 4])


@pytest.mark.parametrize("way", ["ring_attention", "all_gather_attention", "ulysses_attention",
                                 "2 x ring"])  # fmt: skip
def test_documents_of_a_part_of_the_sequence_are_refused(way):
    """A part is what a rank holds, or any number of tokens that shard() would not pad to 16."""

    def step(S):
        attend, cut = ways(2, "zigzag", u=2)[way]
        qkv = [cut(x) for x in draw(16, 2, 2, B=1)[:3]]
        padded = F.pad(DOCUMENTS[:, :S], (0, 16 - S), value=-1)
        wanted = dense(*draw(16, 2, 2, B=1)[:3], documents=padded)
        return (attend(*qkv, documents=DOCUMENTS[:, :S]) - cut(wanted)).abs().max().item()

    least = 15 if way == "2 x ring" else 13  # one ring of one rank, twice
    assert max(on_ranks(2, step, least)) < 1e-14 and max(on_ranks(2, step, 16)) < 1e-14
    for S in (8, 9, least - 1):
        with pytest.raises(RankFailed, match=f"documents of {S} tokens, for 16 tokens.*pass those"):
            on_ranks(2, step, S)


@pytest.mark.parametrize("H, K", [(4, 3), (2, 4)])
def test_key_heads_that_do_not_divide_query_heads_are_refused_before_anything_is_sent(H, K):
    def step(attend):
        with cp.Ledger() as ledger:
            with pytest.raises(ValueError, match=f"{K} key/value heads do not divide {H} query"):
                attend(*draw(8, H, K)[:3], world(), "zigzag")
        return ledger.events

    for attend in (cp.ring_attention, cp.all_gather_attention, cp.ulysses_attention):
        assert on_ranks(2, step, attend) == [[], []]


def test_shapes_windows_and_lengths_that_do_not_fit_are_sentences():
    def step():
        q, k, v, _ = draw(8, 4, 2)
        wrong = [
            ((q[:, :6], k, v), {}, "only q may have more heads"),
            ((q, k, v[:, :, :1]), {}, "only q may have more heads"),
            ((q[..., :2], k, v), {}, "only q may have more heads"),
            ((q, k, v), {"window": 0}, "window 0: a token sees itself at least"),
            ((q, k, v), {"length": 9, "causal": False}, "length 9: shard.. gave the ranks 8"),
        ]  # fmt: skip
        for qkv, options, says in wrong:
            for attend in (cp.ring_attention, cp.all_gather_attention, cp.ulysses_attention):
                with pytest.raises(ValueError, match=says):
                    attend(*qkv, world(), **options)

    on_ranks(1, step)


def test_ranks_agree_on_the_sequence_or_say_what_differs():
    """Other lengths, other tokens, other documents, another window."""

    def step():
        tokens, r = torch.arange(16)[None], rank()
        agree = lambda tokens=tokens, **options: cp.agree_on_sequence(tokens, world(), **options)
        agree(documents=DOCUMENTS, window=3, causal=False)
        for says, wrong in {
            r"rank 1 has tokens of shape \(1, 15\).*, rank 0 has .*\(1, 16\)":
                lambda: agree(tokens[:, r:]),
            r"rank 1 has tokens .*digest \w+, rank 0": lambda: agree(tokens + r),
            "rank 1 has tokens .*bool": lambda: agree(tokens.to((torch.int64, torch.bool)[r])),
            "rank 1 has documents of": lambda: agree(documents=DOCUMENTS + r * (DOCUMENTS == 2)),
            "rank 1 has window 1, rank 0 has window 0": lambda: agree(window=r),
            "rank 1 has layout striped": lambda: agree(layout=("zigzag", "striped")[r]),
        }.items():  # fmt: skip
            with pytest.raises(cp.Disagreement, match=says):
                wrong()

    on_ranks(2, step)


def test_an_unknown_layout_is_refused_by_name():
    with pytest.raises(RankFailed, match="layout 'spiral': use contiguous, zigzag, striped"):
        on_ranks(1, lambda: cp.positions(8, world(), "spiral"))


# ── blocks and their merging ─────────────────────────────────────────────────────────────────


def random_blocks(blocks, hidden=()):
    """Scores and values of one row of queries over some blocks, those in `hidden` masked out."""
    torch.manual_seed(0)
    q, (k, v) = torch.randn(1, 4, 6, 8).double(), torch.randn(2, blocks, 1, 2, 5, 8).double()
    mask = torch.rand(blocks, 1, 1, 6, 5) > 0.4
    mask[:, :, :, 2] = False  # a row that sees nothing anywhere
    mask[list(hidden)] = False
    return q, k, v, mask


@question("Q6.2")
@question("Q6.4")
@pytest.mark.parametrize("hidden", [(), (0, 1, 2), (1, 2, 3), (0, 1, 2, 3)])
def test_cp_06_blocks_merge_in_every_order_of_arrival_whatever_they_hide(hidden):
    """Blocks and rows without a visible key weigh nothing, forward and backward."""
    q, k, v, mask = random_blocks(4, hidden)
    k_all, v_all = (torch.cat([*x], dim=2).repeat_interleave(2, dim=1) for x in (k, v))
    seen = torch.cat([*mask], dim=-1)
    scores = (q @ k_all.mT / math.sqrt(8)).masked_fill(~seen, -math.inf)
    wanted = scores.softmax(-1).nan_to_num() @ v_all
    wanted_lse = scores.logsumexp(-1)
    for arrival in permutations(range(4)):
        out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
        for j in arrival:
            cp.merge(out, lse, *cp.block_forward(q, k[j], v[j], False, mask[j]))
        assert torch.equal(lse.isinf(), wanted_lse.isinf())
        assert torch.allclose(out, wanted, rtol=0, atol=1e-14)
        assert torch.allclose(lse, wanted_lse, rtol=0, atol=1e-14)
    finite = lse.masked_fill(lse == -math.inf, 0)
    for j in range(4):
        for gradient in cp.block_backward(q, q, out, finite, k[j], v[j], False, mask[j]):
            assert gradient.isfinite().all() and (gradient.any() or not mask[j].any())


@question("Q6.2")
@question("Q6.5")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cp_06_rows_and_ranks_that_see_nothing_stay_finite_and_zero(layout):
    """The first half of the sequence is in no document: under `contiguous` ranks 0 and 1 of 4 have
    no visible key in any block, their own included."""

    def step():
        *qkv, d_out = draw(16, 4, 2)
        documents = (torch.arange(16) // 8 - 1).expand(2, 16)
        given = dict(group=world(), layout=layout)
        attend, cut = (partial(f, **given) for f in (cp.ring_attention, cp.shard))
        wanted = gradients(partial(dense, documents=documents), *qkv, d_out)
        found = gradients(partial(attend, documents=documents), *map(cut, qkv), cut(d_out))
        dark = cp.positions(16, world(), layout) < 8
        assert all(x.isfinite().all() and not x[:, dark].any() for x in found)
        return max((a - cut(b)).abs().max().item() for a, b in zip(found, wanted))

    assert max(on_ranks(4, step)) < 1e-12


@question("Q6.2")
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-11), (torch.float32, 1e-2)])
@pytest.mark.parametrize("first, second", [(1e4, -1e4), (-1e4, 1e4), (1e4, 1e4), (-1e4, -1e4)])
def test_blocks_whose_scores_are_ten_thousand_merge(first, second, dtype, tolerance):
    """In fp32 the ulp of ten thousand is 0.001, and that is all that may be lost."""
    q, k, v, _ = random_blocks(2)
    q[..., 0], k[..., 0] = math.sqrt(8), 0
    k[0, ..., 0], k[1, ..., 0] = first, second
    scores = torch.cat([q @ x.repeat_interleave(2, 1).mT / math.sqrt(8) for x in k], dim=-1)
    wanted = scores.softmax(-1) @ torch.cat([x.repeat_interleave(2, 1) for x in v], dim=2)
    out = torch.zeros(1, 4, 6, 8, dtype=dtype)
    lse = torch.full((1, 4, 6), -math.inf, dtype=dtype)
    for j in range(2):
        cp.merge(out, lse, *cp.block_forward(*(x.to(dtype) for x in (q, k[j], v[j])), False, None))
    assert torch.allclose(out.double(), wanted, rtol=0, atol=tolerance)


def test_why_a_masked_block_is_not_left_to_the_fused_operator():
    """Of a row that sees nothing it says 0, the log-sum-exp of one key of score 0."""
    q = torch.ones(1, 1, 1, 8)
    bias = torch.full((1, 1, 1, 1), -math.inf)
    assert cp.FUSED["cpu"][0](q, q, q, attn_mask=bias)[1].item() == 0
    assert cp.block_forward(q, q, q, False, bias == 0)[1].item() == -math.inf


def test_bf16_over_eight_ranks_is_as_good_as_over_one():
    """Against float64 of the same bf16 numbers: at most 1.2 times the error of one rank."""

    def error(attend, layout):
        *qkv, d_out = draw(64, 8, 2, d=16, dtype=torch.bfloat16)
        wanted = gradients(dense, *(x.double() for x in qkv), d_out.double())
        cut = partial(cp.shard, group=world(), layout=layout)
        found = gradients(partial(attend, group=world(), layout=layout), *map(cut, qkv), cut(d_out))
        assert all(x.dtype == torch.bfloat16 for x in found)
        return [((a - cut(b)).square().sum().item(), b.square().sum().item())
                for a, b in zip(found, wanted)]  # fmt: skip

    def by_tensor(n, attend, layout):
        ranks = on_ranks(n, error, attend, layout)
        return [math.sqrt(sum(gap for gap, _ in tensor) / tensor[0][1]) for tensor in zip(*ranks)]

    for attend in (cp.ring_attention, cp.all_gather_attention):
        for layout in LAYOUTS:
            one, eight = (by_tensor(n, attend, layout) for n in (1, 8))
            assert all(b <= 1.2 * a for a, b in zip(one, eight)), (layout, one, eight)
            assert max(one) < 0.01


# ── work ─────────────────────────────────────────────────────────────────────────────────────


@question("Q6.1")
def test_cp_10_pairs_by_rank_and_step_are_those_of_the_mask():
    assert cp.work(8, 4, "contiguous").sum(1).tolist() == [3, 7, 11, 15]
    assert cp.work(8, 4, "zigzag").sum(1).tolist() == [9, 9, 9, 9]
    assert cp.work(48, 4, "contiguous").sum(1).tolist() == [78, 222, 366, 510]
    assert cp.work(48, 4, "zigzag").tolist() == [[78, 72, 72, 72]] * 4
    assert cp.work(48, 4, "striped").sum(1).tolist() == [276, 288, 300, 312]
    for layout, wanted in zip(LAYOUTS, (0.576, 1.0, 0.942)):
        assert cp.efficiency(cp.work(48, 4, layout)) == pytest.approx(wanted, abs=5e-4)


@pytest.mark.parametrize("n, wanted", [(2, 2 / 3), (4, 4 / 7), (8, 8 / 15)])
def test_long_contiguous_rings_compute_n_of_2n_minus_1_of_the_time(n, wanted):
    assert cp.efficiency(cp.work(2**14, n, "contiguous")) == pytest.approx(wanted, abs=1e-3)


def test_work_is_what_attention_computes():
    """Counted where blocks are computed, not where they are predicted."""

    def pairs(layout):
        real, counted = cp.block_forward, []

        def counting(q, k, v, causal, *rest):
            counted.append(int(torch.ones(q.shape[2], k.shape[2]).tril().sum()) if causal
                           else q.shape[2] * k.shape[2])  # fmt: skip
            return real(q, k, v, causal, *rest)

        with patch.object(cp, "block_forward", counting):
            qkv = (cp.shard(x, world(), layout) for x in draw(48, 2, 2)[:3])
            cp.ring_attention(*qkv, world(), layout)
        return counted

    for layout in LAYOUTS:
        for r, counted in enumerate(on_ranks(4, pairs, layout)):
            assert counted == [x for x in cp.work(48, 4, layout)[r].tolist() if x]


# ── reported faults ──────────────────────────────────────────────────────────────────────────


class Fixed(torch.nn.Module):
    """Logits that are a parameter, one row a token: the loss of label 0 is 6 at every token."""

    def __init__(self, S):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(1, S, 2, dtype=torch.float64))
        with torch.no_grad():
            self.logits[..., 1] = math.log(math.exp(6) - 1)

    def forward(self, x_Bs, positions_s, attend):
        return self.logits[:, positions_s]


@pytest.mark.parametrize("valid, loss", [([7], 6.0), (range(8), 6.0), ([5, 6, 7], 6.0), ([], 0.0)])
@pytest.mark.parametrize("n", [2, 4])
def test_cp_01_the_loss_divides_by_the_valid_tokens_of_all_ranks(n, valid, loss):
    """One valid token of loss 6 is a loss of 6, and not 6/n, or 0/0 where a rank has none."""

    def step():
        labels = torch.full((1, 8), -100)
        labels[0, list(valid)] = 0
        model, twin = Fixed(8), Fixed(8)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        found = cp.train_step(model, optimizer, labels, labels, world(), None, "contiguous")
        if valid:
            F.cross_entropy(twin.logits[0], labels[0]).backward()
        wanted = twin.logits.grad if valid else torch.zeros_like(model.logits)
        return found.item(), (model.logits.grad - wanted).abs().max().item()

    for found, off in on_ranks(n, step):
        assert found == pytest.approx(loss, abs=1e-12) and off < 1e-14


@question("Q6.1")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("restart", [False, True])
def test_cp_04_rotary_positions_are_global_or_restart_with_each_document(layout, restart):
    """Per token beside the whole model; positions may be an array (B, s) of the tokens' own."""

    def step():
        torch.manual_seed(0)
        model = cp.LanguageModel(H=4, K=2, d=4).double()
        tokens, documents = torch.randint(256, (2, 16)), torch.tensor([5, 6, 5])
        documents = torch.arange(3).repeat_interleave(documents).expand(2, 16) if restart else None
        at = torch.tensor([*range(5), *range(6), *range(5)] if restart else range(16)).expand(2, 16)
        cut = partial(cp.shard, group=world(), layout=layout)
        attend = partial(cp.ring_attention, group=world(), layout=layout, documents=documents)
        if not restart:
            assert torch.equal(cut(at)[0], cp.positions(16, world(), layout))
        whole = model(tokens, at, partial(dense, documents=documents))
        return (model(cut(tokens), cut(at), attend) - cut(whole)).abs().max().item()

    assert max(on_ranks(2, step)) < 1e-12


def test_rotation_turns_by_the_distance_alone():
    """Scores of rotated queries and keys depend on how far apart they are, and on where not at all;
    at position p the first of two pairs turns by p radians, the second by p/100."""
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    score = lambda i, j: (cp.rotate(q, torch.tensor([i])) * cp.rotate(k, torch.tensor([j]))).sum()
    assert score(7, 3) == pytest.approx(score(104, 100).item(), abs=1e-10)
    assert abs(score(7, 3) - score(7, 4)) > 1e-4
    turned = cp.rotate(torch.tensor([[[[1.0, 1, 0, 0]]]]).double(), torch.tensor([2]))[0, 0, 0]
    assert turned.tolist() == pytest.approx(
        [math.cos(2), math.cos(0.02), math.sin(2), math.sin(0.02)]
    )
    far = torch.tensor([1001, 4097])  # angles in bf16 would be off by whole turns
    both = q[0].expand(1, 2, 1, 8)
    narrow, wide = (cp.rotate(both.to(dtype), far) for dtype in (torch.bfloat16, q.dtype))
    assert cp.relative_error(narrow.double(), wide) < 0.02


@pytest.mark.parametrize("S, padded", [(9, 12), (2, 4), (1, 4), (12, 12)])
@pytest.mark.parametrize("packed", [False, True])
def test_cp_05_padding_is_by_the_multiple_and_moves_nothing(S, padded, packed):
    """S=9 at cp=2 becomes 12, and what stands in the padding moves no output and no gradient."""

    def step():
        *qkv, d_out = draw(S, 4, 2)
        documents = (torch.arange(S) // 4).expand(2, S) if packed else None
        mine = cp.positions(S, world())
        attend = partial(cp.ring_attention, group=world(), documents=documents)
        found = [
            [x[:, mine < S] for x in gradients(
                attend, *(cp.shard(x, world(), fill=fill) for x in qkv), cp.shard(d_out, world()))]
            for fill in (0, 1e3, -1e5)
        ]  # fmt: skip
        wanted = gradients(partial(dense, documents=documents), *qkv, d_out)
        wanted = [cp.shard(x, world())[:, mine < S] for x in wanted]
        equal = all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))
        off = [(a - b).abs().max().item() for a, b in zip(found[0], wanted) if b.numel()]
        return len(mine), equal, max(off, default=0.0)

    for t, equal, off in on_ranks(2, step):
        assert t == padded // 2 and equal and off < 1e-12


@question("Q6.6")
@pytest.mark.parametrize(
    "n, H, K, S", [(2, 28, 7, 10), (4, 12, 12, 20), (4, 12, 3, 8), (2, 4, 1, 9), (4, 8, 2, 9)]
)
def test_cp_09_ulysses_with_heads_that_need_repeating_or_do_not_look_like_it(n, H, K, S):
    """Key/value heads that n does not divide are repeated, and their gradients are summed."""

    def step():
        *qkv, d_out = draw(S, H, K)
        wanted = gradients(dense, *qkv, d_out)
        given = dict(group=world(), layout="contiguous")
        attend, cut = (partial(f, **given) for f in (cp.ulysses_attention, cp.shard))
        found = gradients(attend, *map(cut, qkv), cut(d_out))
        found[0] = found[0] * cut(torch.ones_like(d_out))
        return max((a - cut(b)).abs().max().item() for a, b in zip(found, wanted))

    assert max(on_ranks(n, step)) < 1e-12


def test_cp_09_ulysses_names_heads_tokens_and_ranks_when_it_refuses():
    says = r"over 4 ranks.*7 query heads \(7 key/value heads, 12 tokens\).*a divisor of 7"
    with pytest.raises(RankFailed, match=says):
        on_ranks(4, lambda: cp.ulysses_attention(*(x[:, :3] for x in draw(12, 7, 7)[:3]), world()))


# ── memory ───────────────────────────────────────────────────────────────────────────────────


def kept(attend, n, S=64):
    def step():
        q, k, v = (cp.shard(x, world()).requires_grad_() for x in draw(S, 8, 2)[:3])
        with cp.kept_bytes() as found:
            out = attend(q, k, v, world())
        del out
        return sum(found.values())

    return on_ranks(n, step)


def test_what_the_model_keeps_falls_as_one_nth():
    """All activations of a forward pass, its parameters apart."""

    def step():
        x, y, model = torch.arange(64)[None], torch.arange(64)[None], cp.LanguageModel()
        attend = partial(cp.ring_attention, group=world())
        x, y = (cp.shard(whole, world()) for whole in (x, y))
        with cp.kept_bytes() as found:
            logits = model(x, cp.positions(64, world()), attend)
        for param in model.parameters():
            found.pop(param.untyped_storage()._cdata, None)
        del logits
        return sum(found.values())

    one, four = on_ranks(1, step)[0], on_ranks(4, step)
    assert one > 64 * 64 * 4 * 10 and four == [one / 4] * 4


def test_what_is_kept_falls_as_one_nth_but_for_gathered_keys():
    one, two, four = (kept(cp.ring_attention, n)[0] for n in (1, 2, 4))
    assert (one / 2, one / 4) == (two, four)
    keys = 2 * 2 * 64 * 2 * 4 * 8  # k and v of both whole sequences in float64
    assert [x - four for x in kept(cp.all_gather_attention, 4)] == [keys * 3 / 4] * 4


LIMITED = """
import resource, sys, torch
sys.path.insert(0, {folder!r})
from importlib import import_module
cp = import_module("06_cp_ring")
q, k, v = (torch.zeros(1, 8192, heads, 8) for heads in (8, 2, 2))
in_use = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**30, in_use + 2**30))
try:
    cp.causal_attention(q, k, v)
except RuntimeError as error:
    sys.exit("memory" in str(error) and "does not fit")
"""


@pytest.mark.slow
def test_a_sequence_trains_whose_scores_do_not_fit_in_a_gibibyte():
    """8,192 tokens, 8 heads, fp32: 2.1 GB of scores. The same limit, on each of 4 ranks of the
    ring, holds a step of training the model."""

    code = LIMITED.format(folder=str(ROOT))
    refused = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert refused.stderr.strip() == "does not fit", refused.stderr

    def step():
        in_use = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**30, in_use + 2**30))
        args = dict(steps=1, length=8192, attention="ring", layout="zigzag", text=None)
        return bool(cp.train(SimpleNamespace(**args), world(), CPU))

    assert on_ranks(4, step, timeout=200) == [True] * 4


# ── as a user runs it ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("wrong, says", [
    (["--length", 0], "--length 0"),
    (["--attention", "ulysses", "--ranks", 3], "3 ranks do not divide 8 heads"),
    (["--length", 10**9], f"{10**9 + 1}"),
])  # fmt: skip
def test_wrong_numbers_are_sentences(wrong, says):
    assert says in refusal(SCRIPT, *wrong)


def losses(out):
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", out)]


def plain_logits(weights, x_BS, at, H=8, K=2, d=8):
    """The model from its formulas: torch's own functions, and a complex number for rotations."""
    norm = lambda x, name: F.rms_norm(x, (H * d,), weights[name + ".weight"])
    linear = lambda x, name: F.linear(x, weights[name + ".weight"], weights.get(name + ".bias"))
    turn = torch.polar(torch.ones(len(at), d // 2, dtype=torch.float64),
                       at[:, None] * 10000.0 ** (-torch.arange(d // 2) * 2 / d))  # fmt: skip

    def rotate(x):
        x = torch.complex(x[..., : d // 2].contiguous(), x[..., d // 2 :].contiguous())
        return torch.cat([(x * turn[:, None]).real, (x * turn[:, None]).imag], dim=-1)

    h = weights["token.weight"][x_BS]
    heads = linear(norm(h, "norm_1"), "qkv").view(*h.shape[:2], -1, d)
    q, k, v = heads[:, :, :H], heads[:, :, H : H + K], heads[:, :, H + K :]
    q, k, v = (x.transpose(1, 2) for x in (rotate(q), rotate(k), v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    h = h + linear(out.transpose(1, 2).flatten(2), "out")
    h = h + linear(F.gelu(linear(norm(h, "norm_2"), "up")), "down")
    return linear(norm(h, "norm_3"), "head")


def plain_loop(text, steps, S):
    """Weights and losses of a plain loop on one process, of the same start and batches."""
    torch.manual_seed(0)
    weights = {name: x.detach().clone().requires_grad_()
               for name, x in cp.LanguageModel().named_parameters()}  # fmt: skip
    adam, seen = torch.optim.Adam(weights.values(), lr=5e-3), []
    for step in range(steps):
        x, y = cp.sample(text, step, 1, S)
        loss = F.cross_entropy(plain_logits(weights, x, torch.arange(S))[0], y[0])
        adam.zero_grad()
        loss.backward()
        adam.step()
        seen.append(loss.item())
    return weights, seen


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def trained(args):
    """(weights, printed losses) of the chapter's own loop."""
    said = []
    with patch.object(cp, "say", said.append):
        model = cp.train(SimpleNamespace(**args), world(), CPU)
    return {name: x.detach() for name, x in model.named_parameters()}, losses("\n".join(said))


def test_the_model_on_one_process_is_plain_torch(float64):
    """Logits and every gradient, at positions that do not begin at 0."""
    torch.manual_seed(1)
    model, x, at = cp.LanguageModel(), torch.randint(256, (2, 11)), torch.arange(5, 16)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    found, wanted = model(x, at, cp.causal_attention), plain_logits(weights, x, at)
    for logits in (found, wanted):
        logits.square().sum().backward()
    assert cp.relative_error(found, wanted) < 1e-12
    for name, param in model.named_parameters():
        assert cp.relative_error(param.grad, weights[name].grad) < 1e-10, name


@pytest.mark.parametrize("n", [1, 2, 4])
def test_six_steps_of_the_runs_own_loop_are_those_of_a_plain_loop(n, tmp_path, float64):
    """All weights, to 1e-10. Nine tokens over four ranks: under `contiguous` rank 3 has none but
    padding."""
    text = tmp_path / "text"
    text.write_text("to be or not to be, that is the question")
    args = dict(steps=6, length=9, text=text)
    wanted, wanted_losses = plain_loop(cp.read_text(text, 10), 6, 9)

    def every_way():
        ways = [("ring", layout) for layout in LAYOUTS]
        for attention, layout in ways + [("gather", "contiguous"), ("ulysses", "zigzag")]:
            weights, said = trained(args | dict(attention=attention, layout=layout))
            off = max(cp.relative_error(weights[name], wanted[name]) for name in wanted)
            yield attention, layout, off, said

    for ranks in zip(*on_ranks(n, lambda: list(every_way()))):
        for attention, layout, off, said in ranks:
            assert off < 1e-10, (attention, layout, off)
        assert ranks[0][3] == pytest.approx([wanted_losses[0], wanted_losses[5]], abs=6e-4)


def test_a_step_without_a_label_changes_nothing():
    """Loss 0, no step: momentum would go on."""

    def step():
        torch.manual_seed(0)
        model, x = cp.LanguageModel(H=2, K=1), torch.arange(8)[None]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        attend = partial(cp.ring_attention, group=world())
        step = lambda y: cp.train_step(model, optimizer, x, y, world(), attend, "zigzag")
        before, first = [p.clone() for p in model.parameters()], step(x + 1)
        after = [p.clone() for p in model.parameters()]
        assert first > 1 and not all(map(torch.equal, before, after))
        assert step(torch.full_like(x, -100)) == 0
        assert all(map(torch.equal, after, model.parameters()))

    on_ranks(2, step)


@pytest.mark.slow
def test_the_run_learns_more_than_unigrams_know_and_says_what_it_kept():
    done = run_script(SCRIPT, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    unigrams = float(re.search(r"unigrams (\S+) nats", done.stdout)[1])
    first, *_, last = losses(done.stdout)
    assert last < unigrams - 0.1 < first
    assert re.search(r"a rank kept \d+\.\d MB .* would be 537 MB", done.stdout)


@pytest.mark.slow
def test_torchrun_proves_and_draws_the_same(tmp_path):
    picture = tmp_path / "work.png"
    done = run_script(SCRIPT, "--steps", 0, "--plot", picture, torchrun=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "zigzag" in done.stdout and picture.stat().st_size > 10_000
