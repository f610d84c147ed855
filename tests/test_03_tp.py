"""03_tp: loss and gradients equal to one process, bytes equal to the formulas, reported faults."""

import argparse
import itertools
import math
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import ROOT, RankFailed, chapter, on_ranks, refusal, run_script
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

tp = chapter("03_tp")
CPU, DOUBLE = torch.device("cpu"), torch.float64
world = lambda: dist.group.WORLD
rank = lambda: dist.get_rank()
question = pytest.mark.question
SMALL = tp.Config(D=32, hidden=48, V=53)
FULL = replace(SMALL, tied=False, bias=True)


def agree(pair):
    measured, formula = pair
    return measured == pytest.approx(formula, abs=0.5)


# ── values, sent, held ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_row_of_the_proof_is_as_claimed_on_every_rank(n):
    rows = lambda: list(tp.proof(SMALL, world(), CPU, 2, 16))
    for row in itertools.chain(*on_ranks(n, rows)):
        assert row.error == pytest.approx(row.wrong, rel=1e-6, abs=1e-10), row.name
        assert all(map(agree, filter(None, (row.sent, row.held)))), row
        assert row.wrong == 0 or row.wrong > 0.1, f"{row.name} would not show"


def grid(configs):
    """Everything that is off, over configurations and rungs, on this rank."""
    for c, sp in itertools.product(configs, tp.LADDER):
        error, sent = tp.check(c, world(), CPU, sp, 2, 16)
        held = tp.check_saved(c, world(), CPU, sp, 2, 16)
        n = dist.get_world_size()
        model = tp.LanguageModel(c, world(), sp).double()
        parameters = sum(p.nbytes for p in model.parameters()), tp.parameter_bytes(c, n)
        if error > 1e-10 or not all(map(agree, (sent, held, parameters))):
            yield c, sp, error, sent, held, parameters


@question("Q3.1")
@question("Q3.2")
@question("Q3.5")
def test_two_ranks_equal_one_process_on_every_rung():
    assert on_ranks(2, lambda: list(grid([SMALL, FULL]))) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_any_key_value_heads_ends_and_biases_on_every_rung(n):
    """Each number of key/value heads with both kinds of ends, on two of the four n each."""
    ends = dict(tied=True, bias=False), dict(tied=False, bias=True)
    configs = [replace(FULL, kv_heads=8 >> i, **ends[(i + n.bit_length()) % 2]) for i in range(4)]
    assert on_ranks(n, lambda: list(grid(configs)), timeout=200) == [[]] * n


@question("Q3.1")
def test_the_example_of_the_pair_by_hand():
    """x = 3, W_up = [1 2], W_down = [10; 100]: the numbers in the chapter's comment."""

    def by_hand():
        x, d_y = torch.full((1, 1, 1), 3.0), torch.ones(1, 1, 1)
        up, down = torch.tensor([[rank() + 1.0]]), torch.tensor([[10.0 ** (rank() + 1)]])
        return [t.item() for t in tp.mlp_by_hand(x, up, down, d_y, world())]

    assert on_ranks(2, by_hand) == [[630, 210, 30, 3], [630, 210, 300, 6]]


def test_the_proof_s_batch_is_not_trivial():
    """Sequences, tokens and labels differ; some labels count, and some do not."""
    x, y = tp.proof_batch(SMALL, 2, 16, CPU)
    assert min(len(x.unique()), len(y.unique())) > 10 and not torch.equal(*x)
    assert 4 <= (y == -100).sum() <= 12


def weights_of_a_plain_loop(c, text, steps, B, S):
    """The weights after steps of the twin on one process: AdamW, clipping, mean loss."""
    torch.manual_seed(0)
    twin = tp.Twin(c).double()
    optimizer, clipped = torch.optim.AdamW(twin.parameters(), lr=3e-3), 0
    for step in range(steps):
        x, y = tp.sample(text, step, B, S)
        optimizer.zero_grad()
        F.cross_entropy(twin(x).flatten(0, 1), y.flatten()).backward()
        clipped += nn.utils.clip_grad_norm_(twin.parameters(), 1.0).item() > 1
        optimizer.step()
    assert clipped == steps  # or clipping would not be seen
    return {name: param.detach() for name, param in twin.named_parameters()}


@pytest.mark.parametrize("n, sp", [(1, "off"), (2, "off"), (2, "overlap"), (4, "regather")])
def test_the_loop_of_main_trains_what_a_plain_loop_trains(n, sp):
    """Two copied key/value heads, biases, tied ends. Padded rows of the vocabulary stay zero."""
    c = replace(SMALL, V=257, kv_heads=2, bias=True)
    args = argparse.Namespace(text=None, steps=6, batch=4, sequence=16)

    def trained():
        model, _ = tp.build(c, world(), CPU, sp)
        status = tp.train(model, args, CPU)
        beyond = model.embedding.weight[max(0, 257 - rank() * -(-257 // n)) :].abs().sum().item()
        return status, beyond, tp.gather_whole(model, world())

    right = weights_of_a_plain_loop(c, tp.read_text(None, 0), 6, 4, 16)
    for status, beyond, whole in on_ranks(n, trained):
        assert (status, beyond) == (0, 0) and whole.keys() == right.keys()
        assert max(tp.relative_error(whole[name], right[name]) for name in right) < 1e-10


def test_a_group_need_not_be_the_world_nor_begin_at_rank_0():
    def two_groups():
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [3, 1])]
        return list(tp.proof(FULL, groups[rank() % 2], CPU, 1, 8))

    for row in itertools.chain(*on_ranks(4, two_groups)):
        assert row.error == pytest.approx(row.wrong, rel=1e-6, abs=1e-10), row.name
        assert all(map(agree, filter(None, (row.sent, row.held)))), row


def left_out(**changed):
    """The largest error of a step, with other functions in the place of the chapter's."""

    def step():
        with patch.dict(vars(tp), changed):
            return tp.check(replace(SMALL, bias=True), world(), CPU, "keep", 2, 16)[0]

    return max(on_ranks(2, step))


@pytest.mark.parametrize("name", ["gather_sequence", "scatter_sequence"])
def test_the_proof_sees_a_pair_that_does_half_of_its_work(name):
    there = {"gather_sequence": tp.all_gather, "scatter_sequence": tp.reduce_scatter}[name]
    own = lambda x, group: tp.by_rank(x, group)[dist.get_rank(group)]
    back = {"gather_sequence": own, "scatter_sequence": None}[name]
    mean = lambda x, group: tp.all_gather(x, group) / dist.get_world_size(group)
    assert left_out() < 1e-10 < 0.01 < left_out(**{name: tp.pair(there, back or mean)})


def test_the_proof_sees_gradients_of_copies_left_as_they_are():
    assert left_out(sum_replicated_gradients=lambda *_: None) > 0.01


@question("Q3.1")
def test_pairs_are_what_their_table_says():
    def both_ways(name):
        whole = torch.arange(8.0, dtype=DOUBLE).view(1, 4, 2)
        r = rank()
        x = {
            "copy_to_ranks": whole, "reduce_from_ranks": whole * (r + 1),
            "gather_sequence": whole[:, 2 * r : 2 * r + 2], "scatter_sequence": whole * (r + 1),
        }[name].clone().requires_grad_()  # fmt: skip
        y = getattr(tp, name)(x, world())
        weight = 1.0 if name == "reduce_from_ranks" else r + 1.0
        (y * weight).sum().backward()
        return y.tolist(), x.grad.unique().tolist()

    whole = torch.arange(8.0).view(1, 4, 2)
    thrice = [(3 * whole[:, 2 * r : 2 * r + 2]).tolist() for r in (0, 1)]
    wanted = {
        "copy_to_ranks": [(whole.tolist(), [3.0])] * 2,
        "reduce_from_ranks": [((3 * whole).tolist(), [1.0])] * 2,
        "gather_sequence": [(whole.tolist(), [3.0])] * 2,
        "scatter_sequence": [(thrice[r], [1.0, 2.0]) for r in (0, 1)],
    }
    for name, expected in wanted.items():
        assert on_ranks(2, both_ways, name) == expected, name


def test_a_sum_leaves_the_gradient_of_others_alone():
    """x + f(x): both branches get one gradient tensor, and f's sum must not be written into it."""

    def step():
        x = torch.zeros(2, 2, requires_grad=True)
        d_y = torch.ones(2, 2)
        (x + tp.copy_to_ranks(x, world())).backward(d_y)
        return x.grad[0, 0].item(), d_y[0, 0].item()

    assert on_ranks(2, step) == [(3.0, 1.0)] * 2


def test_the_bytes_of_the_four_journeys_of_a_layer():
    """Two all-reduces each way, or as many bytes in other calls; a quarter more to gather again."""

    def sent(sp):
        block = tp.Block(SMALL, world(), sp).double()
        x = torch.randn(2, 16 if sp == "off" else 4, 32, dtype=DOUBLE, requires_grad=True)
        with tp.Ledger() as ledger:
            block(x, torch.arange(16)).sum().backward()
        return {k: v for k, v in ledger.sent.items() if v}, [e.what for e in ledger.events]

    journey = 3 / 4 * 2 * 16 * 32 * 8
    sents = {sp: on_ranks(4, sent, sp)[0] for sp in tp.LADDER}
    assert sents["off"][0] == {"all_reduce": 8 * journey}
    assert sents["off"][1].count("all_reduce") == 4
    assert sents["keep"][0] == {"all_gather_single": 4 * journey, "all_to_all_single": 4 * journey}
    more = {"all_gather_single": 6 * journey, "all_to_all_single": 4 * journey}
    assert sents["regather"][0] == sents["overlap"][0] == more


def order_of_calls(product, S):
    """What a product of CHUNKS chunks of S tokens calls, in order."""
    matmul = torch.matmul
    with tp.Ledger() as ledger:
        marked = lambda *tensors: ledger.mark("matmul") or matmul(*tensors)
        with patch.object(torch, "matmul", marked):
            getattr(tp, product)(torch.ones(1, S, 2), torch.ones(2, 2), world())
    return [event.what for event in ledger.events]


@question("Q3.6")
def test_chunks_travel_while_others_are_multiplied():
    for order in on_ranks(2, order_of_calls, "gather_then_multiply", 4):
        assert order == ["all_gather_single"] * 4 + ["wait", "matmul"] * 4
    for order in on_ranks(2, order_of_calls, "multiply_then_scatter", 8):
        assert order == ["matmul", "all_to_all_single"] * 4 + ["wait"] * 4


def test_x_is_gathered_again_beside_the_product_of_backward():
    def order():
        layer = tp.ColumnParallelLinear(4, 4, world(), sp="overlap")
        y = layer(torch.ones(1, 4, 4).requires_grad_())
        with tp.Ledger() as ledger:
            y.sum().backward()
        return [event.what for event in ledger.events]

    calls = ["all_gather_single", *["all_to_all_single"] * 4, *["wait"] * 5]
    assert on_ranks(2, order) == [calls] * 2


@question("Q3.6")
def test_chunks_need_not_divide_the_tokens():
    def products(S):
        torch.manual_seed(0)
        x, w = torch.randn(2, S, 6, dtype=DOUBLE), torch.randn(6, 3, dtype=DOUBLE)
        own = lambda x_BSD: tp.by_rank(x_BSD, world())[rank()]
        product, gathered = tp.gather_then_multiply(own(x), w, world())
        scattered = tp.multiply_then_scatter(x, w, world())
        wanted = 2 * own(x @ w)
        return (product - x @ w).abs().max(), (gathered - x).abs().max(), (scattered - wanted).abs()

    for S in (2, 6, 10, 14):
        for errors in on_ranks(2, products, S):
            assert max(error.max() for error in errors) < 1e-12


# ── frozen, recomputed ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sp", tp.LADDER)
def test_frozen_weights_get_no_gradient(sp):
    def step():
        mlp = tp.MLP(4, 8, world(), bias=True, sp=sp)
        for p in mlp.parameters():
            p.requires_grad_(False)
        x = torch.ones(1, 4 if sp == "off" else 2, 4, requires_grad=True)
        mlp(x).sum().backward()
        return x.grad is not None and all(p.grad is None for p in mlp.parameters())

    assert on_ranks(2, step) == [True] * 2


def test_a_block_may_be_recomputed_and_sends_all_but_its_last_sum_once_more():
    """A recompute stops once it has what backward needs, which the last sum of a block is not; but
    the rung that overlaps has it inside the product, whose input is needed."""

    def step(sp):
        torch.manual_seed(0)
        block = tp.Block(FULL, world(), sp).double()
        data = torch.randn(2, 16 if sp == "off" else 8, 32, dtype=DOUBLE)
        gradients, sent = [], []
        for run in (block, partial(checkpoint, block, use_reentrant=False)):
            block.zero_grad()
            x = data.clone().requires_grad_()
            with tp.Ledger() as ledger:
                run(x, torch.arange(16)).square().sum().backward()
            gradients.append([x.grad, *(p.grad for p in block.parameters())])
            sent.append(sum(ledger.sent.values()))
        same = max(itertools.starmap(tp.relative_error, zip(*gradients))) == 0
        return same, (sent[1] - sent[0]) / (2 * 16 * 32 * 8 / 2)

    wanted = {"off": 2, "keep": 3, "regather": 3, "overlap": 4}
    for found in on_ranks(2, lambda: {sp: step(sp) for sp in wanted}):
        assert found == {sp: (True, journeys) for sp, journeys in wanted.items()}


def test_a_recomputed_block_keeps_no_tokens_that_it_would_gather_again():
    """Two checkpoints, one in the other: the tokens come back by recomputation."""

    def kept():
        block, send, tokens = tp.Block(SMALL, world(), "regather"), tp.start_all_gather, []

        def note(x, group):
            tokens.append(StorageWeakRef(x.untyped_storage()))
            return send(x, group)

        x = torch.randn(2, 8, 32, requires_grad=True)
        with patch.object(tp, "start_all_gather", note):
            y = checkpoint(block, x, torch.arange(16), use_reentrant=False)
            held = [not token.expired() for token in tokens]
            y.sum().backward()
        return held, len(tokens)

    assert on_ranks(2, kept) == [([False, False], 8)] * 2  # 2 + 2 recomputed + 2 again + 2 d_y


def test_regathering_computes_no_product_again():
    """Backward needs two products, for d_x and for the gradient of the weight."""

    class Count(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.products += function is torch.ops.aten.mm.default
            return function(*args, **kwargs or {})

    def products():
        layer, x = tp.ColumnParallelLinear(8, 4, world(), sp="regather"), torch.ones(2, 2, 8)
        y = layer(x.requires_grad_())
        with Count() as count:
            y.sum().backward()
        return count.products

    assert on_ranks(2, products) == [2, 2]


@pytest.mark.parametrize("sp", ["off", "keep", "regather"])
def test_every_product_of_a_weight_is_a_call_of_linear(sp):
    """Which is how another mechanism, such as a pipeline's, finds the products to split."""

    def products():
        model, seen, linear = tp.LanguageModel(FULL, world(), sp), [], F.linear

        def note(x, weight, bias=None):
            seen.append(weight)
            return linear(x, weight, bias)

        with patch.object(F, "linear", note):
            model(*tp.proof_batch(FULL, 1, 8, CPU))
        matrices = [p for name, p in model.named_parameters()
                    if p.dim() == 2 and "embedding" not in name]  # fmt: skip
        return {id(p) for p in seen} == {id(p) for p in matrices} and len(seen) == 9

    assert on_ranks(2, products) == [True] * 2


@pytest.mark.parametrize("sp", tp.LADDER)
def test_under_autocast_tokens_travel_in_bf16_and_gradients_are_right(sp):
    def step(on):
        torch.manual_seed(0)
        block = tp.Block(replace(SMALL, bias=True), world(), sp)
        x = torch.randn(2, 16 if sp == "off" else 8, 32, requires_grad=True)
        with tp.Ledger() as ledger:
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                y = block(x, torch.arange(16))
            y.square().sum().backward()
        return y.detach(), [x.grad, *(p.grad for p in block.parameters())], ledger.sent

    def both():
        (y, gradients, sent), (half_y, half, half_sent) = step(False), step(True)
        errors = [tp.relative_error(a, b) for a, b in zip([half_y, *half], [y, *gradients])]
        return max(errors), {g.dtype for g in half}, sum(half_sent.values()) / sum(sent.values())

    for error, dtypes, sent in on_ranks(2, both):
        assert error < 0.05 and dtypes == {torch.float32} and sent == 0.5


def test_under_autocast_regathering_keeps_less():
    def kept(sp):
        block = tp.Block(SMALL, world(), sp)
        with torch.autocast("cpu", torch.bfloat16):
            return tp.kept_bytes(block, torch.randn(2, 8, 32).requires_grad_(), torch.arange(16))

    keep, regather = (on_ranks(2, kept, sp)[0] for sp in ("keep", "regather"))
    tokens, weights = 2 * (2 * 8 * 32), (32 + 48) * 32  # of qkv and gate_up
    assert keep - regather == 2 * (tokens + weights)  # bf16; the casts of weights it holds unseen


# ── the two ends ─────────────────────────────────────────────────────────────────────────────


@question("Q3.4")
@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_loss_is_that_of_whole_rows_however_large(n):
    """V = 13, which 2 and 4 do not divide; logits in the thousands; ignored labels."""

    def losses():
        torch.manual_seed(0)
        whole = (1000 * torch.randn(2, 5, 13, dtype=DOUBLE)).requires_grad_()
        labels = torch.tensor([[0, 12, -7, 6, 7], [3, -7, 4, 9, 11]])
        flat = whole.flatten(0, 1), labels.flatten()
        right = F.cross_entropy(*flat, reduction="none", ignore_index=-7).view(2, 5)
        weight = torch.rand(2, 5, dtype=DOUBLE)
        (right * weight).sum().backward()
        own = lambda t: tp.shard(t, (2, ((13, 1),)), n, rank())
        part = own(whole.detach()).clone().requires_grad_()
        losses = tp.vocab_parallel_cross_entropy(part, labels, 13, world(), ignore_index=-7)
        (losses * weight).sum().backward()
        return tp.relative_error(losses, right), tp.relative_error(part.grad, own(whole.grad))

    for errors in on_ranks(n, losses):
        assert max(errors) < 1e-12


def test_bf16_logits_are_added_up_in_float32():
    def loss():
        logits = torch.zeros(1, 1, 4096, dtype=torch.bfloat16, requires_grad=True)
        lost = tp.vocab_parallel_cross_entropy(logits, torch.zeros(1, 1).long(), 8192, world())
        lost.sum().backward()
        return lost.dtype, lost.item(), logits.grad.dtype

    for dtype, value, gradient in on_ranks(2, loss):
        assert dtype == torch.float32 and gradient == torch.bfloat16
        assert value == pytest.approx(math.log(8192), rel=1e-6)


@question("Q3.3")
def test_each_id_has_one_owner_and_the_row_that_it_had():
    def rows(V):
        return [t.tolist() for t in tp.local_rows(torch.arange(V), V, -(-V // 4), world())]

    for V in (4, 10, 12):
        v, owners = -(-V // 4), [0] * V
        for r, (found, held) in enumerate(on_ranks(4, rows, V)):
            for i in range(V):
                owners[i] += held[i]
                assert found[i] == (i - r * v if held[i] else 0)
        assert owners == [1] * V


@question("Q3.3")
def test_an_embedding_finds_its_rows_and_puts_gradients_there():
    def step(sp):
        layer = tp.VocabParallelEmbedding(5, 2, world(), sp).double()
        whole = torch.arange(10, dtype=DOUBLE).view(5, 2)
        tp.load_whole(layer, {"weight": whole}, world())
        y = layer(torch.tensor([[0, 2, 3, 4], [2, 2, 4, 1]]))
        y.sum().backward()
        layer.weight = nn.Parameter(layer.weight.grad)
        return y.tolist(), tp.gather_whole(layer, world())["weight"][:, 0].tolist()

    wanted = [[[0, 1], [4, 5], [6, 7], [8, 9]], [[4, 5], [4, 5], [8, 9], [2, 3]]]
    assert on_ranks(2, step, "off") == [(wanted, [1, 1, 3, 1, 2])] * 2
    half = lambda r: [row[2 * r : 2 * r + 2] for row in wanted]
    assert on_ranks(2, step, "keep") == [(half(r), [1, 1, 3, 1, 2]) for r in (0, 1)]


@pytest.mark.parametrize("bad", [-1, 10, 11])
def test_an_id_beyond_the_vocabulary_is_an_error_and_not_zeros(bad):
    def look():
        tp.VocabParallelEmbedding(10, 2, world())(torch.tensor([[bad]]))

    with pytest.raises(RankFailed, match=f"IndexError: .*{bad}.*vocabulary of 10"):
        on_ranks(4, look)


def test_a_norm_and_rotary_angles_are_taken_in_float32_at_least():
    """bf16 has 8 bits: a mean square or an angle in bf16 is off by far more than its result's
    rounding, 1/256 of the largest element."""
    torch.manual_seed(0)
    x = torch.randn(4, 512, 2, 64).bfloat16()
    norm, flat = tp.RMSNorm(128).bfloat16(), x.flatten(2)
    right = flat.double() * (flat.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert ((norm(flat) - right).abs() <= right.abs() / 256).all()
    positions = torch.arange(512) + 30_000
    right = tp.rotary(x.double(), positions)
    assert tp.relative_error(tp.rotary(x, positions).double(), right) < 0.01
    turned = torch.view_as_complex(torch.stack(x.double().chunk(2, -1), -1))
    rates = 1e4 ** (-torch.arange(0, 64, 2).double() / 64)
    turned = turned * torch.polar(torch.ones(512, 32).double(), positions[:, None] * rates)[:, None]
    assert tp.relative_error(right, torch.cat([turned.real, turned.imag], -1)) < 1e-10


# ── gradients summed once, and their norm ────────────────────────────────────────────────────


@question("Q3.5")
def test_a_sum_is_taken_once_and_micro_batches_add_up_before_it():
    """Two ranks, two tokens each, two micro-batches: 8. Summed after each, it would be 12."""

    def gradient(when):
        norm, x = tp.RMSNorm(4).double(), torch.ones(1, 2, 4, dtype=DOUBLE)
        for micro_batch in range(2):
            norm(x).sum().backward()
            if when == "each" or micro_batch == 1:
                tp.sum_replicated_gradients(norm, world(), "keep")
        if when == "twice":
            tp.sum_replicated_gradients(norm, world(), "keep")
        return round(norm.weight.grad[0].item(), 3)

    assert on_ranks(2, gradient, "last") == [8.0] * 2
    for when in ("twice", "each"):
        with pytest.raises(RankFailed, match="gradient of weight was summed over tp"):
            on_ranks(2, gradient, when)


def test_a_copied_head_is_summed_once_too():
    def gradient(again):
        layer = tp.Attention(8, 4, 1, world())
        layer(torch.ones(1, 2, 8), torch.arange(2)).sum().backward()
        tp.sum_replicated_gradients(layer, world(), "off")
        if again:
            layer(torch.ones(1, 2, 8), torch.arange(2)).sum().backward()
            tp.sum_replicated_gradients(layer, world(), "off")

    on_ranks(2, gradient, False)
    with pytest.raises(RankFailed, match="gradient of qkv.weight was summed over tp"):
        on_ranks(2, gradient, True)


@pytest.mark.parametrize("sp", tp.LADDER)
def test_a_step_in_which_no_label_counts_changes_nothing(sp):
    def step():
        model, _ = tp.build(SMALL, world(), CPU, sp)
        before = [p.detach().clone() for p in model.parameters()]
        x, y = tp.proof_batch(SMALL, 2, 16, CPU)
        loss = tp.loss_and_gradients(model, x, y.fill_(-100))
        zeros = all(p.grad.count_nonzero() == 0 for p in model.parameters())
        model.zero_grad()
        optimizer, said = torch.optim.AdamW(model.parameters(), lr=1.0), []
        with patch.object(tp, "say", said.append):
            _, norm = tp.train_step(model, optimizer, x, y)
        same = all(map(torch.equal, before, model.parameters()))
        return loss.item(), zeros, norm.item(), same, said

    said = ["no label of the batch counts: this step is skipped"]
    assert on_ranks(2, step) == [(0.0, True, 0.0, True, said)] * 2


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_norm_counts_every_element_once_and_clips_alike(n):
    """Split, replicated and copied parameters, each with gradients of its own size."""
    c = replace(FULL, kv_heads=2)

    def clipped(max_norm):
        model, whole = tp.build(c, world(), CPU, "keep")
        specs = tp.shard_specs(model)
        for i, (name, p) in enumerate(model.named_parameters()):
            g = whole[name] * (i + 1)
            p.grad = tp.shard(g, specs[name], n, rank()).clone() if name in specs else g.clone()
        right = sum((w * (i + 1)).square().sum() for i, w in enumerate(whole.values())).sqrt()
        first = model.norm.weight.grad.clone()
        norm = tp.clip_grad_norm(model, world(), max_norm)
        scaled = tp.relative_error(model.norm.weight.grad, first * min(1, max_norm / right.item()))
        return (norm / right - 1).abs().item(), scaled

    for max_norm in (1.0, 1e9):
        for norm, scaled in on_ranks(n, clipped, max_norm):
            assert norm < 1e-12 and scaled < 1e-6


@pytest.mark.parametrize("layer", ["ColumnParallelLinear", "RowParallelLinear",
                                   "VocabParallelEmbedding"])  # fmt: skip
def test_torch_s_clipping_is_refused_by_the_name_of_ours(layer):
    """Every rank would find another norm. What is not split is clipped as ever."""

    def clip(parts):
        ours = getattr(tp, layer)(4, 4, world())
        params = [*(ours if parts else nn.Linear(4, 4)).parameters()]
        for p in params:
            p.grad = torch.ones_like(p)
        return nn.utils.clip_grad_norm_(params, 1.0).item()

    assert on_ranks(2, clip, False) == [pytest.approx(20**0.5)] * 2
    with pytest.raises(RankFailed, match="ValueError: torch's clip.*: use clip_grad_norm"):
        on_ranks(2, clip, True)


# ── what must be alike, and what is loaded ───────────────────────────────────────────────────


def test_ranks_with_different_configurations_are_told_so():
    def build():
        tp.LanguageModel(replace(SMALL, layers=1 + rank()), world())

    with pytest.raises(RankFailed, match="Disagreement: ranks disagree: rank 1 has .*layers=2"):
        on_ranks(2, build)


@pytest.mark.parametrize("change, says", [
    ({"blocks.2.norm1.weight": (32,)}, r"blocks.2.norm1.weight has shape \[32\] instead of None"),
    ({"norm.weight": None}, r"norm.weight has shape None instead of \[32\]"),
    ({"norm.weight": (1,)}, r"norm.weight has shape \[1\] instead of \[32\]"),
    ({"blocks.0.mlp.gate_up.weight": (96, 1)}, r"shape \[96, 1\] instead of \[96, 32\]"),
    ({"embedding.weight": (54, 32)}, r"shape \[54, 32\] instead of \[53, 32\]"),
    ({"blocks.0.attention.qkv.weight": (40, 32), "blocks.1.mlp.down.weight": (32, 24)},
     r"\[40, 32\] instead of \[64, 32\]; blocks.1.mlp.down.weight has shape \[32, 24\]"),
])  # fmt: skip
def test_what_does_not_fit_is_not_loaded(change, says):
    def load():
        model, whole = tp.build(SMALL, world(), CPU)
        for name, shape in change.items():
            whole[name] = shape and torch.ones(shape, dtype=DOUBLE)
        whole = {name: tensor for name, tensor in whole.items() if tensor is not None}
        before = [p.detach().clone() for p in model.parameters()]
        try:
            tp.load_whole(model, {name: tensor + 1 for name, tensor in whole.items()}, world())
        finally:
            assert all(map(torch.equal, before, model.parameters()))

    with pytest.raises(RankFailed, match=f"ValueError: .*{says}"):
        on_ranks(2, load)


# ── reported faults (tp-01 to tp-08, ck-02, co-10) ───────────────────────────────────────────


@question("Q3.2")
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("sp", tp.LADDER)
def test_tp_01_a_bias_is_added_once(n, sp):
    def output():
        layer = tp.RowParallelLinear(8, 3, world(), bias=True, sp=sp)
        nn.init.zeros_(layer.weight)
        nn.init.ones_(layer.bias)
        layer(x := torch.randn(2, 4, 8 // n)).sum().backward()
        return layer(x).unique().tolist(), layer.bias.grad.unique().tolist()

    seen = 8 if sp == "off" else 8 / n
    assert on_ranks(n, output) == [([1.0], [seen])] * n


def test_tp_01_what_is_whole_already_is_refused():
    def reduce_whole():
        tp.RowParallelLinear(8, 3, world())(torch.randn(2, 4, 8))

    def load_whole_as_part():
        layer = tp.RowParallelLinear(8, 3, world())
        layer.shard_spec = {}
        tp.load_whole(layer, {"weight": torch.zeros(3, 8)}, world())

    for wrong in (reduce_whole, load_whole_as_part):
        with pytest.raises(RankFailed, match="shape|size"):
            on_ranks(2, wrong)


@question("Q3.5")
@pytest.mark.parametrize("sp", ["off", "regather"])
def test_tp_03_copies_stay_the_same_to_the_bit_for_ten_steps(sp):
    """Norms, row-parallel biases, and the two key/value heads that four ranks hold (tp-07)."""
    c = replace(FULL, kv_heads=2)

    def train():
        model, _ = tp.build(c, world(), CPU, sp)
        model.float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x, y = tp.proof_batch(c, 2, 16, CPU)
        losses = []
        for _ in range(10):
            losses.append(tp.loss_and_gradients(model, x, y).item())
            optimizer.step()
            optimizer.zero_grad()
        specs, named = tp.shard_specs(model), dict(model.named_parameters())
        kv = [t[-8:].tolist() for name, t in named.items() if "qkv" in name]
        return losses, [t.tolist() for name, t in named.items() if name not in specs], kv

    ranks = on_ranks(4, train)
    assert all(ranks[r][:2] == ranks[0][:2] for r in range(4))
    assert ranks[0][2] == ranks[1][2] != ranks[2][2] == ranks[3][2]
    assert ranks[0][0][-1] < ranks[0][0][0]


@question("Q3.5")
def test_tp_03_copies_are_summed_under_sp_and_left_alone_without():
    def sums(sp):
        norm = tp.RMSNorm(2)
        norm.weight.grad = torch.tensor([1.0, 10.0]) * (rank() + 1)
        tp.sum_replicated_gradients(norm, world(), sp)
        return norm.weight.grad.tolist()

    assert on_ranks(2, sums, "regather") == [[3, 30]] * 2
    assert on_ranks(2, sums, "off") == [[1, 10], [2, 20]]


def test_tp_04_every_n_starts_from_the_same_weights():
    def start():
        torch.manual_seed(0)
        layers = nn.ModuleList([
            tp.ColumnParallelLinear(64, 256, world()), tp.RowParallelLinear(256, 64, world()),
            tp.VocabParallelEmbedding(64, 64, world()), tp.Attention(64, 8, 2, world()),
            tp.MLP(64, 96, world()),
        ])  # fmt: skip
        parts = [p.detach().flatten()[:32].tolist() for p in layers.parameters()]
        return parts, {k: v.tolist() for k, v in tp.gather_whole(layers, world()).items()}

    wanted = on_ranks(1, start)[0][1]
    fan_in = {"0.weight": 64, "1.weight": 256, "2.weight": 64, "3.qkv.weight": 64,
              "3.out.weight": 64, "4.gate_up.weight": 64, "4.down.weight": 96}  # fmt: skip
    for name, inputs in fan_in.items():
        assert torch.tensor(wanted[name]).std() == pytest.approx(inputs**-0.5, rel=0.05), name
    for n in (2, 4, 8):
        found = on_ranks(n, start)
        assert all(whole == wanted for _, whole in found)
        for of_ranks in zip(*(parts for parts, _ in found)):
            assert len({tuple(part) for part in of_ranks}) == n


def test_tp_04_no_two_layers_start_alike():
    def weights():
        model = tp.LanguageModel(SMALL, world())
        return [p.flatten()[:8].tolist() for p in model.parameters() if p.dim() == 2]

    for found in on_ranks(2, weights):
        assert len({tuple(values) for values in found}) == len(found) == 9


def test_tp_05_ten_tokens_on_four_ranks():
    """All logits zero: ln 10, and ln 12 if what fills the last rank counts."""

    def step(n, whole):
        model = nn.Module()
        model.embedding = tp.VocabParallelEmbedding(10, 4, world())
        if whole is not None:
            tp.load_whole(model, {"embedding.weight": torch.tensor(whole)}, world())
        x = torch.zeros(1, 3, 4, requires_grad=True)
        logits = F.linear(tp.copy_to_ranks(x, world()), model.embedding.weight)
        labels = torch.tensor([[0, 9, 4]])
        loss = tp.vocab_parallel_cross_entropy(logits, labels, 10, world())
        (loss.sum() + model.embedding(labels).sum()).backward()
        beyond = model.embedding.weight.grad[max(0, 10 - rank() * -(-10 // n)) :]
        gathered = tp.gather_whole(model, world())["embedding.weight"]
        return loss.tolist()[0], beyond.abs().sum().item(), gathered.tolist(), len(beyond)

    whole = None
    for n, filled in ((4, 2), (2, 0), (1, 0), (8, 6)):
        for loss, beyond, gathered, _ in (ranks := on_ranks(n, step, n, whole)):
            assert loss == pytest.approx([math.log(10)] * 3, abs=1e-6) and beyond == 0
            assert len(gathered) == 10 and (whole is None or gathered == whole)
        assert sum(rows for *_, rows in ranks) == filled
        whole = gathered


def test_tp_07_a_copied_head_counts_once():
    c = replace(SMALL, kv_heads=2)

    def gathered():
        model, _ = tp.build(c, world(), CPU)
        whole = tp.gather_whole(model, world())
        return sum(t.numel() for t in whole.values()), tp.check(c, world(), CPU, "off", 2, 16)[0]

    one, _ = on_ranks(1, gathered)[0]
    for count, error in on_ranks(4, gathered):
        assert count == one and error < 1e-10


def test_tp_07_three_ranks_cannot_share_eight_heads():
    with pytest.raises(RankFailed, match=r"tp 3 .*8 heads and 2 key/value.*\[1, 2, 4, 8\]"):
        on_ranks(3, lambda: tp.Attention(32, 8, 2, world()))


@pytest.mark.parametrize("sp", ["keep", "regather", "overlap"])
def test_tp_08_a_sequence_that_does_not_divide_is_refused_before_any_call(sp):
    def step():
        model = tp.LanguageModel(SMALL, world(), sp)
        with tp.Ledger() as ledger:
            try:
                model(*tp.proof_batch(SMALL, 1, 7, CPU))
            except ValueError as refused:
                return str(refused), ledger.events

    said = "tp 2 does not divide sequence 7: use one of [1, 7]"
    assert on_ranks(2, step) == [(said, [])] * 2


def test_ck_02_fused_blocks_are_cut_each_for_itself():
    """Filled with their index: 8 query heads of 2 and 2 + 2 key/value heads; gate and up of 4."""
    qkv, spec = torch.arange(24), (0, ((8, 2), (2, 2), (2, 2)))
    assert tp.shard(qkv, spec, 2, 1).tolist() == [*range(8, 16), 18, 19, 22, 23]
    assert tp.shard(qkv, spec, 4, 1).tolist() == [4, 5, 6, 7, 16, 17, 20, 21]
    assert tp.shard(qkv, spec, 4, 2).tolist() == [8, 9, 10, 11, 18, 19, 22, 23]
    assert tp.shard(torch.arange(8), (0, 2), 2, 1).tolist() == [2, 3, 6, 7]
    assert tp.shard(torch.arange(10), (0, ((10, 1),)), 4, 3).tolist() == [9, 0, 0]
    assert tp.shard(torch.arange(10), (0, ((10, 1),)), 8, 5).tolist() == [0, 0]
    for n in (1, 2, 4, 8):
        for whole, cut in (
            (qkv, spec), (torch.arange(16).view(8, 2), (0, 1)), (torch.arange(48), (0, 3)),
            (torch.arange(16).view(2, 8), (1, 1)), (torch.arange(22).view(11, 2), (0, ((11, 1),))),
        ):  # fmt: skip
            parts = [tp.shard(whole, cut, n, r) for r in range(n)]
            assert torch.equal(tp.unshard(parts, cut), whole)


def test_ck_02_three_hidden_units_are_not_two_halves_though_gate_and_up_are():
    with pytest.raises(RankFailed, match=r"tp 2 does not divide hidden 3: use one of \[1, 3\]"):
        on_ranks(2, lambda: tp.MLP(4, 3, world()))


def test_shards_go_from_any_n_to_any_other_bit_for_bit():
    def there(whole):
        model = tp.LanguageModel(FULL, world()).double()
        if whole:
            given = {name: torch.tensor(value, dtype=DOUBLE) for name, value in whole.items()}
            tp.load_whole(model, given, world())
        return {k: v.tolist() for k, v in tp.gather_whole(model, world()).items()}

    first = whole = on_ranks(1, there, None)[0]
    for n in (2, 8, 4, 1):
        whole = on_ranks(n, there, whole)[0]
        assert whole == first


def test_attention_sees_differences_of_positions_and_this_ranks_heads():
    def step():
        seen = []
        look = lambda *qkv: seen.append([tuple(t.shape) for t in qkv]) or tp.causal(*qkv)
        layer = tp.Attention(32, 8, 2, world(), sp="keep", attend=look).double()
        x = torch.randn(1, 4, 32, dtype=DOUBLE)
        outputs = [layer(x, at) for at in (torch.arange(16), torch.arange(16) + 100)]
        apart = layer(x, torch.arange(16) * 2)
        return seen[0], *((y - outputs[0]).abs().max().item() for y in (outputs[1], apart))

    for shapes, same, apart in on_ranks(4, step):
        assert shapes == [(1, 16, 2, 4), (1, 16, 1, 4), (1, 16, 1, 4)]
        assert same < 1e-10 < 1e-3 < apart


@pytest.mark.parametrize("layer", ["ColumnParallelLinear", "RowParallelLinear",
                                   "VocabParallelEmbedding"])  # fmt: skip
def test_a_rung_that_is_none_is_refused(layer):
    with pytest.raises(RankFailed, match="sp=False: use one of .*off.*regather"):
        on_ranks(1, lambda: getattr(tp, layer)(4, 4, world(), sp=False))


# ── as a user runs it ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("wrong, says", [
    (["--ranks", 3], "tp 3 cannot share 8 heads and 4 key/value heads: use one of [1, 2, 4, 8]"),
    (["--ranks", 6, "--heads", 16, "--kv-heads", 4], "use one of [1, 2, 4, 8, 16]"),
    (["--kv-heads", 3], "heads a multiple of key/value heads 3"),
    (["--hidden", 6], "tp 4 does not divide hidden 6: use one of [1, 2, 3, 6]"),
    (["--sequence", 10], "tp 4 does not divide sequence 10: use one of [1, 2, 5, 10]"),
])  # fmt: skip
def test_wrong_numbers_are_sentences(wrong, says):
    assert says in refusal(ROOT / "03_tp.py", *wrong)


@pytest.mark.slow
def test_four_ranks_print_the_loss_of_one_and_learn():
    """To six digits, with tensor and sequence parallelism, by any launcher."""
    losses, short = [], ("--steps", 21, "--batch", 8)
    for ranks, torchrun in ((["--ranks", 1], 0), (["--ranks", 4], 0), (["--sp", "overlap"], 2)):
        done = run_script(ROOT / "03_tp.py", *ranks, *short, torchrun=torchrun)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = done.stdout.splitlines()
        header = next(i for i, line in enumerate(lines) if line.startswith("step"))
        table = [line.split() for line in lines[header + 1 :]]
        losses.append([loss for _, loss, *_ in table])
        assert all(sent == formula for *_, sent, formula in table)
    assert losses[0] == losses[1] == losses[2]
    assert float(losses[0][-1]) < 3.26 < float(losses[0][0])


@pytest.mark.slow
def test_activations_are_drawn(tmp_path):
    picture = tmp_path / "activations.png"
    done = run_script(ROOT / "03_tp.py", "--ranks", 2, "--plot", picture)
    assert done.returncode == 0 and picture.stat().st_size > 10_000
