"""05_ep: every gradient equal to one process, bytes equal to the formulas, and reported faults."""

import importlib
import math
import re
import sys
from argparse import Namespace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from harness import ROOT, RankFailed, chapter, on_ranks, refusal, run_script
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ep = chapter("05_ep")
sys.path.append(str(ROOT / "benchmarks"))
load = importlib.import_module("expert_load")
CPU = torch.device("cpu")
world = lambda: dist.group.WORLD
question = pytest.mark.question
double = partial(torch.randn, dtype=torch.float64)
PLAIN = dict(k=1, renormalize=False)


def router(D, E, k, **options):
    torch.manual_seed(0)
    return ep.Router(D, E, k, **options).double()


# ── routers ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("k", [2, 4])
def test_a_renormalised_softmax_is_the_softmax_over_the_chosen_logits(k):
    """Of Router and of PlainRouter, which are two ways to compute it."""
    torch.manual_seed(0)
    plain, route, x = ep.PlainRouter(8, 16, k).double(), router(8, 16, k), double(3, 5, 8)
    logits, chosen = (x.flatten(0, 1) @ route.weight.T).sort(-1, descending=True)
    for each in plain, route:
        expert, gates, aux = each(x)
        assert torch.equal(expert, chosen[:, :k]) and aux is None
        torch.testing.assert_close(gates, logits[:, :k].softmax(-1))


def test_without_renormalising_gates_are_probabilities_and_k_1_learns():
    route, x = router(8, 16, **PLAIN), double(3, 5, 8)
    _, gates, _ = route(x)
    torch.testing.assert_close(gates[:, 0], (x.flatten(0, 1) @ route.weight.T).softmax(-1).amax(-1))
    gates.sum().backward()
    assert route.weight.grad.abs().max() > 0.01


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(E=8, k=1), "k 1 renormalised"),
        (dict(E=8, k=9), "k 9"),
        (dict(E=8, k=0), "k 0"),
        (dict(E=8, k=2, limit=(3, 1)), "3 groups of 8"),
        (dict(E=8, k=4, limit=(4, 1)), "k 4 from 1 of 4 groups"),
    ],
)
def test_routers_that_cannot_work_are_refused_with_the_numbers(options, said):
    with pytest.raises(ValueError, match=said):
        ep.Router(4, **options)


@question("Q5.1")
def test_the_bias_takes_part_in_the_choice_and_in_nothing_else():
    route, x = router(8, 16, 3, score="sigmoid", scale=2.5), double(3, 5, 8)
    route.bias_E[5] = 4.0
    expert, gates, _ = route(x)
    scores = (x.flatten(0, 1) @ route.weight.T).sigmoid()
    assert (expert == 5).any(-1).all()
    chosen = scores.gather(1, expert)
    torch.testing.assert_close(gates, 2.5 * chosen / chosen.sum(-1, keepdim=True))
    assert "bias_E" in route.state_dict() and "bias_E" not in dict(route.named_parameters())


@question("Q5.1")
def test_with_all_scores_below_zero_no_expert_of_a_group_that_is_not_allowed_is_chosen():
    """With 0 in place of -inf, experts of the masked groups would win."""
    route, x = router(8, 16, 4, score="sigmoid", limit=(4, 2)), double(4, 16, 8)
    route.bias_E -= 3.0
    expert, _, _ = route(x)
    biased = (x.flatten(0, 1) @ route.weight.T).sigmoid() - 3.0
    for chosen, scores in zip(expert.tolist(), biased):
        best = [scores[g * 4 : g * 4 + 4].topk(2).values.sum() for g in range(4)]
        groups = sorted(range(4), key=lambda g: -best[g])[:2]
        allowed = [i for g in groups for i in range(g * 4, g * 4 + 4)]
        assert chosen == sorted(allowed, key=lambda i: -scores[i])[:4]


@question("Q5.1")
def test_equal_scores_go_to_the_first_experts():
    for options in {}, dict(score="sigmoid", limit=(4, 2)):
        route = router(8, 8, 2, **options)
        with torch.no_grad():
            route.weight.zero_()
        assert route(double(2, 3, 8)).chosen.tolist() == [[0, 1]] * 6


def test_the_router_computes_in_at_least_fp32_and_the_layer_returns_what_it_got():
    x = double(4, 16, 8).bfloat16()
    layer = ep.MoE(ep.Router(8, 16, 2), 8, None, shared=4)
    exact = router(8, 16, 2)
    exact.weight.data = layer.router.weight.data.double()
    assert torch.equal(layer.router(x).chosen, exact(x.double()).chosen)
    assert layer.router(x).gates.dtype == torch.float32
    assert layer(x).dtype == torch.bfloat16
    assert exact(x.double()).gates.dtype == torch.float64


# ── capacity (ep-06) ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "s, E, k, factor, right",
    [(5, 4, 1, 1, 2), (3, 2, 1, 1, 2), (2, 8, 2, 1, 1), (10, 4, 2, 1.25, 7), (100, 10, 1, 1.1, 11),
     (4, 2, 2, 9.0, 4), (0, 4, 2, 1.0, 0)],
)  # fmt: skip
def test_capacity_rounds_up_and_is_never_more_than_there_are_tokens(s, E, k, factor, right):
    """Every token chooses experts 0 .. k-1."""
    kept = ep.drop(torch.arange(k).repeat(s, 1), torch.ones(s, k), E, factor)
    assert [(kept == expert).sum().item() for expert in range(k)] == [right] * k


def test_the_first_tokens_or_the_largest_gates_stay():
    expert = torch.zeros(5, 1, dtype=torch.long)
    gates = torch.tensor([[0.1], [0.5], [0.3], [0.5], [0.2]])
    assert ep.drop(expert, gates, 4, 1).flatten().tolist() == [0, 0, 4, 4, 4]
    assert ep.drop(expert, gates, 4, 1, "gate").flatten().tolist() == [4, 0, 4, 0, 4]
    two = torch.tensor([[1, 0], [1, 2], [0, 1], [1, 3]])
    dropped = ep.drop(two, gates[:4].expand(4, 2), 4, 1)
    assert dropped.tolist() == [[1, 0], [1, 2], [0, 4], [4, 3]]


def test_a_dropped_token_gets_nothing_from_the_experts_and_keeps_its_residual():
    layer = ep.MoE(ep.Router(8, 4, **PLAIN, factor=1), 8, None).double()
    layer.router.bias_E[0] = 9.0
    x = double(1, 5, 8)
    assert layer(x)[0].abs().sum(-1).gt(0).tolist() == [True, True, False, False, False]


def test_ranks_with_unequal_numbers_of_tokens_have_their_own_capacities_and_finish():
    def step():
        layer = ep.MoE(ep.Router(8, 4, **PLAIN, factor=1, group=world()), 8, world()).double()
        layer.router.bias_E[0] = 9.0
        y = layer(double(1, [5, 3][dist.get_rank()], 8))
        y.sum().backward()
        return y[0].abs().sum(-1).gt(0).sum().item()

    assert on_ranks(2, step) == [2, 1]


# ── balance ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("scope", ["batch", "sequence"])
def test_the_balance_loss_is_1_when_all_is_even_whatever_k_and_flat_there(k, scope):
    """ep-07. Token t chooses experts t, t+1, .. of 4, by a bias that its scores do not see."""
    route = router(4, 4, k, renormalize=False, balance=1.0, scope=scope)
    with torch.no_grad():
        route.weight.zero_()
    even = torch.stack([torch.arange(4).roll(-t)[:k] for t in range(4)])
    route.choose = lambda scores: even.repeat(2, 1)
    aux = route(double(2, 4, 4)).aux
    aux.backward()
    assert aux.item() == pytest.approx(1.0, abs=1e-12)
    assert route.weight.grad.abs().max() < 1e-12


def by_formula(x_BSD, weight, k, scope, score):
    """The balance loss, written as in DeepSeek-V3, equations 17 to 20, token by token."""
    E, segments = len(weight), x_BSD if scope == "sequence" else [x_BSD.flatten(0, 1)]
    losses = []
    for x_TD in segments:
        logits = x_TD @ weight.T
        s = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
        T = len(s)
        f = [E / (k * T) * sum(i in row.topk(k).indices.tolist() for row in s) for i in range(E)]
        P = [sum(row[i] / row.sum() for row in s) / T for i in range(E)]
        losses.append(sum(f[i] * P[i] for i in range(E)))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("scope", ["batch", "sequence"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_balance_loss_and_its_gradient_are_the_formula(scope, score):
    x, route = double(3, 7, 6), router(6, 8, 2, score=score, balance=0.3, scope=scope)
    aux = route(x).aux
    right = 0.3 * by_formula(x, route.weight, 2, scope, score)
    torch.testing.assert_close(aux, right)
    gradients = [torch.autograd.grad(loss, route.weight)[0] for loss in (aux, right)]
    torch.testing.assert_close(*gradients)


def test_the_z_loss_is_the_mean_square_of_the_log_partition():
    x, route = double(3, 7, 6), router(6, 8, 2, z=0.01)
    logits = x.flatten(0, 1) @ route.weight.T
    torch.testing.assert_close(route(x).aux, 0.01 * logits.exp().sum(-1).log().square().mean())


def test_an_attached_loss_moves_the_weights_as_an_added_one():
    x, w = double(4, 3), double(3, 2).requires_grad_()
    aux = lambda: 0.1 * w.square().sum()
    added = torch.autograd.grad((x @ w).square().sum() + aux(), w)[0]
    attached = torch.autograd.grad(ep.attach_loss(x @ w, aux()).square().sum(), w)[0]
    torch.testing.assert_close(added, attached)


def auxiliary_gradient(scope, dp, cp, m):
    """The router's gradient at coefficient 0.01 less that at 0: dp x cp ranks, m micro-batches."""
    torch.manual_seed(1)
    x_BSD, gradients = double(8, 12, 6) + 0.3, []
    d, c = divmod(dist.get_rank(), cp)
    rows = torch.arange(dp * cp).view(dp, cp).tolist()
    cps, _ = dist.new_subgroups_by_enumeration(rows)
    for coefficient in (0.01, 0.0):
        route = router(6, 8, 2, balance=coefficient, z=coefficient, scope=scope, group=world(),
                       sequence_group=cps, microbatches=m)  # fmt: skip
        layer = ep.MoE(route, 4, None).double()
        for micro_BSD in x_BSD.chunk(m):
            y = layer(micro_BSD.chunk(dp)[d].chunk(cp, 1)[c])
            (y.sum() / x_BSD.numel()).backward()
        dist.all_reduce(route.weight.grad, group=world())
        gradients.append(route.weight.grad)
    return gradients[0] - gradients[1]


GRID = [(1, 1), (2, 1), (1, 2), (2, 2)]


@question("Q5.2")
@pytest.mark.parametrize("scope", ["batch", "sequence"])
def test_the_balance_loss_is_as_strong_on_any_grid_of_ranks(scope):
    """ep-05. Its scope is the micro-batch, or the sequence: a sequence does not see m either."""
    by_grid = {}
    for dp, cp in GRID:
        grid = lambda: [auxiliary_gradient(scope, dp, cp, m) for m in (1, 2, 4)]
        by_grid[dp, cp] = on_ranks(dp * cp, grid)[0]
    for gradients in by_grid.values():
        for gradient, alone in zip(gradients, by_grid[1, 1]):
            assert ep.relative_error(gradient, alone) < 1e-10
    assert by_grid[1, 1][0].abs().max() > 1e-6
    if scope == "sequence":
        for gradient in by_grid[1, 1]:
            assert ep.relative_error(gradient, by_grid[1, 1][0]) < 1e-10


def test_each_ranks_own_balance_loss_averaged_over_ranks_is_not_the_balance_loss():
    """The mean of products is the product of means and the covariance over ranks of f and P."""

    def run():
        x, real = ep.batch(4, CPU)[::2]
        weight, k = router(16, 8, 2).weight.detach(), 2
        route = router(16, 8, k, balance=1.0)
        mean = route(x.chunk(4)[dist.get_rank()]).aux.detach()
        dist.all_reduce(mean)
        scores = (x.flatten(0, 1) @ weight.T).softmax(-1)
        chosen = serial_choices(scores, real.flatten(), k)
        f, P = 8 / k * chosen.view(4, -1, 8).mean(1), scores.view(4, -1, 8).mean(1)
        covariance = ((f - f.mean(0)) * (P - P.mean(0))).mean(0).sum()
        right = (f.mean(0) * P.mean(0)).sum()
        assert mean.item() / 4 - right.item() == pytest.approx(covariance.item(), abs=1e-12)
        return abs(covariance / right).item()

    assert min(on_ranks(4, run)) > 0.01


@question("Q5.2")
@pytest.mark.parametrize("scope", ["batch", "sequence"])
@pytest.mark.parametrize("sequences", [[2, 2], [1, 3], [0, 4], [4, 0]])
def test_ranks_with_unequal_numbers_of_sequences_balance_as_one(sequences, scope):
    """The values of a reported fault: each rank counted as 1/n, whatever it held."""

    def run():
        torch.manual_seed(0)
        x_BSD, losses = double(4, 5, 8) + 0.3, []
        for balance, z in (1.0, 0.0), (0.0, 1.0):
            pair = []
            x_bSD = x_BSD.split(sequences)[dist.get_rank()]
            for group, tokens in (None, x_BSD), (world(), x_bSD):
                torch.manual_seed(1)
                route = ep.Router(8, 4, 2, balance=balance, z=z, scope=scope, group=group).double()
                loss = route(tokens).aux
                loss.backward()
                pair.append((loss.detach(), route.weight.grad))
            (right, gradient), (total, summed) = pair
            dist.all_reduce(total)
            dist.all_reduce(summed)
            assert ep.relative_error(summed, gradient) < 1e-12
            losses.append((right.item(), total.item()))
        return losses

    for losses in on_ranks(2, run):
        for right, total in losses:
            assert total == pytest.approx(right, rel=1e-12)
        if scope == "sequence":
            assert [right for right, _ in losses] == pytest.approx([1.290113, 2.780976], abs=1e-6)


@pytest.mark.parametrize("scope", ["batch", "sequence"])
def test_padding_goes_nowhere_and_no_count_no_loss_and_no_capacity_knows_it(scope):
    """A padded batch beside its real tokens alone, sequence by sequence; one is all padding."""
    lengths, options = [5, 2, 0, 7], dict(balance=0.3, z=0.1, scope=scope, factor=1.0)
    torch.manual_seed(2)
    x = double(4, 7, 6)
    real = torch.arange(7) < torch.tensor(lengths)[:, None]
    padded, alone = (ep.MoE(router(6, 4, 2, **options), 4, None).double() for _ in range(2))
    alone.load_state_dict(padded.state_dict())
    routing = padded.router(x, real)
    assert (routing.chosen[~real.flatten()] == 4).all() and not routing.gates[~real.flatten()].any()
    y = padded(x, real)
    assert not y[~real].any() and y[real].abs().sum(-1).gt(0).any()
    y.square().sum().backward()
    if scope == "batch":
        packed = alone.router(x[real][None])
        assert torch.equal(packed.chosen, routing.chosen[real.flatten()])
        torch.testing.assert_close(packed.aux, routing.aux)
        alone(x[real][None]).square().sum().backward()
        torch.testing.assert_close(padded.router.weight.grad, alone.router.weight.grad)
        assert padded.router.load_2E.tolist() == alone.router.load_2E.tolist()
    else:
        rows = [row[:length][None] for row, length in zip(x, lengths) if length]
        losses = [alone.router(row).aux for row in rows]
        z = 0.1 * (x[real] @ alone.router.weight.T).logsumexp(-1).square()
        own = [z[:5].mean(), z[5:7].mean(), z[7:].mean()]
        balance = sum(loss - part for loss, part in zip(losses, own)) / 3
        torch.testing.assert_close(routing.aux, balance + z.mean())


def test_a_step_of_m_equal_micro_batches_balances_as_hard_as_one():
    x, gradients = double(2, 6, 8), []
    for m in (1, 2, 4):
        route = router(8, 8, 2, balance=0.1, z=0.1, microbatches=m)
        for _ in range(m):
            route(x).aux.backward()
        gradients.append(route.weight.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


def test_the_bias_moves_once_a_step_from_exact_global_counts():
    """Counts beyond 256, which bf16 cannot tell apart, on two ranks that see different tokens."""

    def step():
        route = ep.Router(4, 4, **PLAIN, group=world())
        counts = [[300, 299, 300, 301], [301, 300, 299, 300]][dist.get_rank()]
        chosen = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))[:, None]
        route.choose = lambda scores: chosen
        for _ in range(2):  # two micro-batches
            route(torch.randn(1, 1200, 4)).gates.sum().backward()
        load = route.update_bias(0.1)
        assert route.load_2E.sum() == 0
        return load.tolist(), route.bias_E.tolist()

    (load, bias), other = on_ranks(2, step)
    assert (load, bias) == other and load == [[1202, 1198, 1198, 1202]] * 2
    assert bias == pytest.approx([-0.1, 0.1, 0.1, -0.1])


def test_the_bias_learns_from_what_tokens_chose_not_from_what_was_kept():
    """With a capacity of 2, experts 0 and 1 both keep two tokens; six tokens chose expert 0."""
    route = ep.Router(4, 4, **PLAIN, factor=1)
    route.choose = lambda scores: torch.tensor([0, 0, 0, 0, 0, 1, 1, 2])[:, None]
    route(torch.randn(1, 8, 4)).gates.sum().backward()
    load = route.update_bias(0.1)
    assert load.tolist() == [[5, 2, 1, 0], [2, 2, 1, 0]]
    assert route.bias_E.tolist() == pytest.approx([-0.125, -0.025, 0.075, 0.075])


def test_the_biases_do_not_drift_together():
    route = ep.Router(4, 4, **PLAIN)
    for _ in range(5):
        route.load_2E[0] = torch.tensor([9, 1, 1, 1])
        route.update_bias(0.1)
    assert route.bias_E.tolist() == pytest.approx([-0.75, 0.25, 0.25, 0.25])


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_and_validation_count_no_token_twice(reentrant):
    def step(recompute):
        torch.manual_seed(0)
        layer = ep.MoE(ep.Router(8, 8, 2, balance=0.1, group=world()), 4, world(), 4).double()
        x = double(2, 6, 8).requires_grad_()
        with torch.no_grad():
            layer(x)
        run = partial(checkpoint, layer, use_reentrant=reentrant) if recompute else layer
        run(x).sum().backward()
        gradients = [x.grad, *(p.grad for p in layer.parameters())]
        return layer.router.load_2E.sum(1).tolist(), gradients

    for (load, gradients), (again, recomputed) in zip(
        on_ranks(2, step, False), on_ranks(2, step, True)
    ):
        assert load == again == [24, 24]
        assert all(map(torch.equal, gradients, recomputed))


# ── the twin with all options ────────────────────────────────────────────────────────────────


def serial_choices(scores_sE, real_s, k, limit=None):
    """The twin's choices, token by token, as a mask (s, E) in the dtype of the scores."""
    chosen_sE, E = torch.zeros_like(scores_sE), scores_sE.shape[1]
    for token, row in enumerate(scores_sE.tolist()):
        allowed = range(E)
        if limit:
            per = E // limit[0]  # experts of a group
            value = lambda g: sum(sorted(row[g * per : (g + 1) * per])[-max(1, k // limit[1]) :])
            best = sorted(range(limit[0]), key=value, reverse=True)[: limit[1]]
            allowed = [expert for expert in allowed if expert // per in best]
        if real_s[token]:
            chosen_sE[token, sorted(allowed, key=lambda expert: -row[expert])[:k]] = 1
    return chosen_sE


def full_layer(
    x_BSD, weights, real_BS, k, ranks=1, bias=(), score="softmax", renormalize=True, scale=1.0,
    limit=None, factor=None, first="token", balance=0.0, z=0.0, scope="batch",
):  # fmt: skip
    """The twin with all options of Router: the whole layer on the tokens of all ranks.

    weights: the layer's parameters by name. Returns the output, the auxiliary loss, and a mask
    (tokens, E) of the choices that were not dropped.
    """
    x_sD, real_s = x_BSD.flatten(0, 1), real_BS.flatten().to(x_BSD.dtype)
    logits_sE = x_sD @ weights["router.weight"].T
    scores_sE = logits_sE.softmax(-1) if score == "softmax" else 1 / (1 + (-logits_sE).exp())
    E = logits_sE.shape[1]
    biased_sE = scores_sE.detach() + F.pad(scores_sE.new_tensor(bias), (0, E - len(bias)))
    chosen_sE = serial_choices(biased_sE, real_s, k, limit)
    gates_sE = chosen_sE * scores_sE
    if renormalize:
        gates_sE = gates_sE / gates_sE.sum(-1, keepdim=True).clamp(min=1e-300)
    kept_sE = chosen_sE.clone()
    for rank, own in enumerate(torch.arange(len(x_sD)).chunk(ranks) if factor else ()):
        most = math.ceil(round(factor * real_s[own].sum().item() * k / E, 9))
        for expert in range(E):
            queue = [token for token in own.tolist() if chosen_sE[token, expert]]
            if first == "gate":
                queue.sort(key=lambda token: -gates_sE[token, expert].item())
            kept_sE[queue[most:], expert] = 0
    both = lambda name: (weights[f"{name}.gate_up"], weights[f"{name}.down"])
    y_sD = ep.serial_mixture(x_sD, scale * kept_sE * gates_sE, *both("experts"))
    y_sD = y_sD + ep.serial_mixture(x_sD, x_sD.new_ones(len(x_sD), 1), *both("shared"))
    terms, share_sE = [], real_s[:, None] * scores_sE / scores_sE.sum(-1, keepdim=True)
    for segment in torch.arange(len(x_sD)).chunk(len(x_BSD) if scope == "sequence" else 1):
        T = real_s[segment].sum()
        f_E, P_E = E / (k * T) * chosen_sE[segment].sum(0), share_sE[segment].sum(0) / T
        terms.append((f_E * P_E).sum())
    log_z = logits_sE.exp().sum(-1).log()
    aux = balance * sum(terms) / len(terms) + z * (real_s * log_z**2).sum() / real_s.sum()
    return y_sD.view_as(x_BSD), aux, kept_sE


# ── dispatch and combine, on the ladder ──────────────────────────────────────────────────────


@question("Q5.4")
def test_the_plan_of_the_comment_is_what_make_plan_makes():
    """The arrays above make_plan: tokens a, b on rank 0 and c, d on rank 1."""

    def rows():
        chosen = [[[1, 2], [0, 1]], [[0, 3], [0, 3]]][dist.get_rank()]
        plan = ep.make_plan(torch.tensor(chosen), 2, world())
        tokens = torch.tensor([[0, 1], [2, 3]][dist.get_rank()])
        arrived = ep.dispatch(tokens, plan)
        word = "".join("abcd"[token] for token in arrived)
        return plan.order.tolist(), plan.sent, plan.received, plan.regroup.tolist(), plan.runs, word

    assert on_ranks(2, rows) == [
        ([2, 0, 3, 1], [3, 1], [3, 2], [0, 3, 4, 1, 2], [3, 2], "bcdab"),
        ([0, 2, 1, 3], [2, 2], [1, 2], [0, 1, 2], [1, 2], "acd"),
    ]


def hold(checked):
    """Every error at most 1e-10, every byte where the formula has it, and nothing trivial."""
    assert max(checked.errors.values()) <= 1e-10, checked.errors
    assert checked.sent[0] == pytest.approx(checked.sent[1], abs=0.5)
    assert checked.held[0] == checked.held[1]
    used = checked.kept_nsE.sum((0, 1)).gt(0).tolist()
    gradients = checked.twin["experts.down"].grad.abs().amax((1, 2))
    assert all(gradients[i] > 1e-4 for i in range(len(used)) if used[i])


def cases(groups):
    hops = partial(ep.two_hops, nodes=(groups.inside, groups.across))
    for path in (ep.gather_tokens, ep.one_hop, hops):
        yield path, PLAIN
        yield path, dict(k=2, padded=True)
        yield path, dict(k=4, score="sigmoid", limit=(4, 2), scale=2.5, balance=0.1, z=0.1)
        yield path, PLAIN | dict(bias=[9.0])  # one expert takes everything
        yield path, dict(k=4, score="sigmoid", limit=(4, 2), scope="sequence", balance=0.1, z=0.1)
        yield path, dict(k=2, bias=[9.0, 9.0], scope="sequence", balance=0.1)  # idle ranks
        yield path, dict(k=4, factor=1.0, padded=True)
        yield path, dict(k=2, factor=1.1, first="gate", bias=[9.0])


@question("Q5.3")
@question("Q5.4")
@question("Q5.5")
@question("Q5.6")
@pytest.mark.parametrize(
    "n, size, nodes",
    [(1, 1, 1), (2, 1, 1), (2, 2, 2), (4, 2, 2), (4, 4, 2), (4, 4, 4)]
    + [pytest.param(8, *grid, marks=pytest.mark.slow) for grid in ((2, 1), (4, 2), (8, 2), (8, 4))],
)
def test_the_ladder_equals_one_process_with_16_experts_whatever_the_routing(n, size, nodes):
    def run():
        groups = ep.make_groups(size, nodes)
        for path, layer in cases(groups):
            twin = partial(full_layer, ranks=n)
            hold(checked := ep.check(groups, path, CPU, E=16, twin=twin, **layer))
            if isinstance(path, partial):
                across = groups.across.group_name
                crossed = sum(e.sent for e in checked.events if e.group == across)
                assert crossed == checked.across and (crossed or nodes == 1)
        return True

    assert all(on_ranks(n, run))


@pytest.mark.parametrize("n", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_row_of_the_proof_is_as_claimed_on_every_rank(n):
    def rows():
        nodes = 1 + (n % 2 == 0)
        return list(ep.proof(ep.make_groups(n, nodes), ep.make_groups(n // nodes), CPU))

    for row in zip(*on_ranks(n, rows)):
        worst = max(rank.error for rank in row)
        assert worst == pytest.approx(row[0].wrong, rel=1e-6, abs=1e-10), row[0].name
        for measured, formula in filter(None, (pair for r in row for pair in (r.sent, r.held))):
            assert measured == pytest.approx(formula, abs=0.5), row[0].name


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_proofs_batch_is_not_trivial(n):
    """Tokens and weights of the loss vary; some tokens are padding, not all, and unequally many."""
    x, weight, real = ep.batch(n, CPU, padded=True)
    assert x.std(dim=(1, 2)).min() > 0.5 and weight.abs().min() > 0
    assert len({*x.flatten().tolist()}) == x.numel()
    assert 0.3 < real.double().mean() < 0.8 and len({*real.sum(1).tolist()}) > 1
    assert ep.batch(n, CPU)[2].all()


def plain_layer(x_BSD, weights, k):
    """The layer written out, one token after the other: a second opinion on the proof's twin."""
    rows = []
    for x in x_BSD.flatten(0, 1):
        logits, chosen = (weights["router.weight"] @ x).topk(k)
        y = torch.zeros_like(x)
        for gate, i in zip(logits.softmax(-1), chosen.tolist()):
            g, u = (weights["experts.gate_up"][i] @ x).chunk(2)
            y = y + gate * (weights["experts.down"][i] @ (g * g.sigmoid() * u))
        g, u = (weights["shared.gate_up"][0] @ x).chunk(2)
        rows.append(y + weights["shared.down"][0] @ (g * g.sigmoid() * u))
    return torch.stack(rows).view_as(x_BSD)


@pytest.mark.parametrize("plain", [True, False])
def test_the_layer_on_one_process_and_the_twin_are_what_is_written_out_token_by_token(plain):
    """Values, gradients, and gradients of the input's gradient."""
    torch.manual_seed(0)
    route = ep.PlainRouter(8, 6, 2) if plain else ep.Router(8, 6, 2)
    layer, x = ep.MoE(route, 5, None, shared=3).double(), double(2, 4, 8).requires_grad_()
    weights, real = dict(layer.named_parameters()), torch.ones(2, 4)
    right = plain_layer(x, weights, 2)
    inputs = [x, *weights.values()]
    second = lambda y: torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
    expected = second(right)
    again = torch.autograd.grad(sum(g.square().sum() for g in expected), x)
    for y in layer(x), *(twin(x, weights, real, 2)[0] for twin in (ep.serial_layer, full_layer)):
        torch.testing.assert_close(y, right)
        gradients = second(y)
        torch.testing.assert_close(gradients, expected)
        twice = torch.autograd.grad(sum(g.square().sum() for g in gradients), x)
        torch.testing.assert_close(twice, again)


def test_two_hops_send_fewer_bytes_across_nodes_and_a_limit_of_nodes_fewer_still():
    def run():
        groups = ep.make_groups(8, 2)
        hops = partial(ep.two_hops, nodes=(groups.inside, groups.across))
        given = groups, hops, CPU, 1, False, (), 16, partial(full_layer, ranks=8)
        free, limited = ep.check(*given, k=4), ep.check(*given, k=4, limit=(2, 1))
        rows = ep.rows_by_rank(free.kept_nsE, 2)
        one = rows["one_hop"][:4, 4:].sum() + rows["one_hop"][4:, :4].sum()
        two = rows["two_hops, across"].fill_diagonal_(0).sum()
        return one.item(), two.item(), free.across, limited.across

    ranks = on_ranks(8, run)
    one, two = ranks[0][:2]
    assert all(limited < free for _, _, free, limited in ranks) and two < 0.7 * one
    assert sum(limited for *_, limited in ranks) < 0.7 * sum(free for *_, free, _ in ranks)


def uneven(path, tokens):
    """A layer whose ranks have tokens[rank] tokens, beside its twin on all of them."""
    groups = ep.make_groups(dist.get_world_size(), 2)
    if path is ep.two_hops:
        path = partial(path, nodes=(groups.inside, groups.across))
    n, r = dist.get_world_size(), dist.get_rank()
    for bias in ((), (9.0, 9.0)):  # then experts 0 and 1, of rank 0, take everything
        options = dict(k=2, balance=0.1, z=0.1)
        moe, twin = ep.both(path, groups, CPU, bias=bias, E=16, **options)
        torch.manual_seed(2)
        x = double(1, sum(tokens), 16).requires_grad_()
        own = x.detach().split(tokens, 1)[r].requires_grad_()
        y, aux, _ = ep.serial_layer(x, twin, torch.ones(x.shape[:2]), bias=bias, **options)
        (y.square().sum() + aux).backward()
        moe(own).square().sum().backward()
        ep.reduce_gradients(moe, groups.world, groups.replicas)
        assert ep.relative_error(own.grad, x.grad.split(tokens, 1)[r]) < 1e-10
        for name, param in moe.named_parameters():
            whole = twin[name].grad
            part = whole.chunk(n)[r] if name in ep.shard_specs(moe) else whole
            assert ep.relative_error(param.grad, part) < 1e-10, name


@question("Q5.3")
@question("Q5.4")
@pytest.mark.parametrize("path", [ep.one_hop, ep.two_hops])
def test_ranks_with_few_tokens_and_with_none_take_part(path):
    on_ranks(4, uneven, path, [5, 0, 1, 7], timeout=20)


@pytest.mark.parametrize("factor", [None, 1.0])
def test_unused_experts_get_zeros_and_memory_that_nobody_wrote_is_not_read(factor):
    """ep-01: every new buffer is filled with NaN; all tokens go to expert 0 of 4, on rank 0."""

    def step():
        torch.use_deterministic_algorithms(True)
        assert torch.empty(3).isnan().all()
        torch.manual_seed(0)
        layer = ep.MoE(ep.Router(8, 4, **PLAIN, factor=factor), 8, world(), shared=4).double()
        layer.router.bias_E[0] = 9.0
        x = double(2, 6, 8).requires_grad_()
        y = layer(x)
        y.sum().backward()
        assert all(t.isfinite().all() for t in (y, x.grad, *(p.grad for p in layer.parameters())))
        used = lambda weight: weight.grad.abs().sum((1, 2)).gt(0).tolist()
        return [used(weight) for weight in layer.experts.parameters()]

    assert on_ranks(2, step) == [[[True, False]] * 2, [[False, False]] * 2]


def test_a_rank_that_leaves_out_its_empty_message_stops_the_others():
    """What the chapter must not do: without this, ep-01 would hang in silence."""

    def step():
        plan = ep.make_plan(torch.zeros(3, 1, dtype=torch.long), 2, world())
        if dist.get_rank() == 0 or sum(plan.received):
            ep.dispatch(double(3, 8), plan)
        else:
            dist.barrier(group=world())

    with pytest.raises(RankFailed):
        on_ranks(2, step, timeout=2)


@question("Q5.6")
@pytest.mark.parametrize("n, size", [(4, 2), (4, 4), (2, 1)])
def test_gradients_after_clipping_are_those_of_ep_1(n, size):
    """ep-03: the norm adds up over ep, and every gradient keeps its ratio of 1."""

    def step():
        groups = ep.make_groups(size)
        checked = ep.check(groups, ep.one_hop, CPU, k=2)
        moe, twin = checked.moe, checked.twin
        split = ep.shard_specs(moe)
        parts = {True: torch.zeros(1).double(), False: torch.zeros(1).double()}
        for name, param in moe.named_parameters():
            parts[name in split] += param.grad.square().sum()
        dist.all_reduce(parts[True], group=groups.ep)
        norm = (parts[True] + parts[False]).sqrt()
        right = nn.utils.get_total_norm([w.grad for w in twin.values()])
        assert norm.item() == pytest.approx(right.item(), rel=1e-12)
        torch.nn.utils.clip_grad_norm_(twin.values(), 0.01)
        for name, param in moe.named_parameters():
            whole = twin[name].grad
            part = whole.chunk(size)[dist.get_rank(groups.ep)] if name in split else whole
            ratio = (param.grad * 0.01 / (norm + 1e-6)).norm() / part.norm()
            assert ratio.item() == pytest.approx(1.0, rel=1e-10), name

    on_ranks(n, step)


# ── the layer among others ───────────────────────────────────────────────────────────────────


def test_runs_of_rows_meet_their_own_expert_and_an_expert_without_rows_gets_zeros():
    torch.manual_seed(0)
    experts, x, runs = ep.Experts(4, 3, 5).double(), double(7, 3).requires_grad_(), [2, 0, 4, 1]
    owner = torch.arange(4).repeat_interleave(torch.tensor(runs))
    gate, up = torch.einsum("ri,roi->ro", x, experts.gate_up[owner]).chunk(2, -1)
    right = torch.einsum("rf,rdf->rd", F.silu(gate) * up, experts.down[owner])
    torch.testing.assert_close(y := experts(x, runs), right)
    inputs, d_y = (x, experts.gate_up, experts.down), double(7, 3)
    gradients = torch.autograd.grad(y, inputs, d_y, retain_graph=True)
    torch.testing.assert_close(gradients, torch.autograd.grad(right, inputs, d_y))
    assert not gradients[1][1].any() and not gradients[2][1].any()


def test_every_product_of_a_weight_is_a_plain_linear():
    """So that a pipeline can split any stage's backward without a word from this chapter."""
    layer, seen = ep.MoE(ep.Router(8, 4, 2), 4, None, shared=4), []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function in (F.linear, torch.Tensor.matmul, torch.matmul, torch.bmm):
                seen.append(args[1].shape)
            return function(*args, **(kwargs or {}))

    with Watch():
        layer(torch.randn(1, 6, 8))
    assert seen == [(4, 8)] + 5 * [(8, 8), (8, 4)]


class Stage(nn.Module):
    """A residual MoE as a pipeline stage, as 04 calls it: the aux loss stays inside the stage."""

    def __init__(self, stage, m):
        super().__init__()
        torch.manual_seed(stage)
        self.last = stage == 1
        self.moe = ep.MoE(ep.Router(8, 8, 2, balance=1.0, microbatches=m), 4, None).double()

    def boundary(self, x):
        return torch.empty_like(x)

    def forward(self, x, micro_batch, *_):
        x = micro_batch if x is None else x
        y = x + self.moe(x)
        return y.square().sum() if self.last else y


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_pipeline_of_moe_stages_has_one_process_gradients_and_every_stage_its_aux_loss(schedule):
    pp = chapter("04_pp_schedules")
    m = 4
    torch.manual_seed(3)
    batch = [double(2, 6, 8) for _ in range(m)]

    def step():
        rank = dist.get_rank()
        stage = Stage(rank, m)
        pp.execute(pp.SCHEDULES[schedule](2, m), {rank: stage}, batch, world())
        return [p.grad for p in stage.parameters()]

    stages = [Stage(0, m), Stage(1, m)]
    for x in batch:
        stages[1](stages[0](None, x), x).backward()
    for gradients, stage in zip(on_ranks(2, step), stages):
        for gradient, param in zip(gradients, stage.parameters()):
            assert ep.relative_error(gradient, param.grad) < 1e-10


def test_shard_specs_name_the_experts_and_their_dimension_and_nothing_else():
    layer = ep.MoE(ep.Router(8, 4, 2), 4, None, shared=4)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(8, 8), layer])})
    specs = ep.shard_specs(model)
    assert specs == {f"layers.1.experts.{w}": (0, 1) for w in ("gate_up", "down")}
    assert ep.shard_specs(layer) == {f"experts.{w}": (0, 1) for w in ("gate_up", "down")}
    assert specs.keys() < dict(model.named_parameters()).keys()


def test_every_rank_starts_with_its_slice_of_the_same_experts():
    def weights():
        torch.manual_seed(0)
        layer = ep.MoE(ep.Router(8, 8, 2), 4, world(), shared=4)
        return layer.experts.down.detach(), layer.router.weight.detach()

    torch.manual_seed(0)
    whole = ep.MoE(ep.Router(8, 8, 2), 4, None, shared=4)
    parts, routers = zip(*on_ranks(4, weights))
    assert torch.equal(torch.cat(parts), whole.experts.down)
    assert all(torch.equal(weight, whole.router.weight) for weight in routers)


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(k=3), "rank 1 has k 3, rank 0 has k 2"),
        (dict(balance=0.1), "rank 1 has balance 0.1, rank 0 has balance 0.0"),
        (dict(F=5), "rank 1 has F 5, rank 0 has F 4"),
        (dict(path=ep.gather_tokens), "rank 1 has path gather_tokens, rank 0 has path one_hop"),
    ],
)
def test_ranks_that_build_different_layers_are_told_before_a_row_is_sent(change, said):
    def build():
        given = dict(k=2, balance=0.0, F=4, path=ep.one_hop) | (change if dist.get_rank() else {})
        with pytest.raises(ep.Disagreement, match=said):
            route = ep.Router(8, 4, given["k"], balance=given["balance"], group=world())
            ep.MoE(route, given["F"], world(), path=given["path"])

    on_ranks(2, build)


def test_experts_that_ep_does_not_divide_are_refused_with_the_numbers():
    def refused():
        with pytest.raises(ValueError, match="ep 3 does not divide 8 experts: use one of .1, 2, 4"):
            ep.MoE(ep.Router(8, 8, 2), 4, world())

    on_ranks(3, refused)


# ── copies of experts ────────────────────────────────────────────────────────────────────────


def test_copies_of_an_expert_take_turns():
    expert = torch.tensor([[0, 1], [0, 2], [0, 4], [1, 0]])
    assert load.take_turns(expert, [0, 1, 2, 3, 0, 0]).tolist() == [[0, 1], [4, 2], [5, 6], [1, 0]]
    assert load.take_turns(expert[:0], [0, 1, 2, 3, 0, 0]).shape == (0, 2)


def test_places_by_load_give_copies_to_hot_experts_and_even_work_to_ranks():
    """Load 90 10 10 10 on two ranks: in order, a rank has 100 of 120; by load, 65 and then 60."""
    assert load.places_by_load([90, 10, 10, 10], 2, 4) == [0, 3, 1, 2]
    places = load.places_by_load([90, 10, 10, 10], 2, 6)
    assert sorted(places) == [0, 0, 0, 1, 2, 3]
    each = {0: 30, 1: 10, 2: 10, 3: 10}
    ranks = [sum(each[i] for i in places[r : r + 3]) for r in (0, 3)]
    assert sorted(ranks) == [50, 70]
    assert load.busiest_rank([90, 10, 10, 10], places, 2) == pytest.approx(70 / 60)


def test_experts_placed_by_measured_load_leave_the_output_and_relieve_the_busiest_rank():
    def run():
        torch.manual_seed(0)
        layer = ep.MoE(ep.Router(8, 8, 2, group=world()), 4, world(), shared=4).double()
        layer.router.bias_E[:2] = torch.tensor([0.2, 0.1])  # both of rank 0
        torch.manual_seed(dist.get_rank())
        x = double(2, 32, 8)
        before = layer(x)
        before.sum().backward()
        tokens = layer.router.update_bias(0.0)[1].tolist()
        plans, make_plan = [], ep.make_plan
        ep.make_plan = lambda *args: plans.append(make_plan(*args)) or plans[-1]
        layer(x)
        load.place_experts(layer, load.places_by_load(tokens, 4, 16))
        after = layer(x)
        ep.make_plan = make_plan
        assert ep.relative_error(after, before) < 1e-12 and len(layer.experts.down) == 4
        return [sum(plan.received) for plan in plans]

    before, after = zip(*on_ranks(4, run))
    assert sum(before) == sum(after) == 4 * 64 * 2
    assert max(before) > 2 * 128 > 1.2 * 128 > max(after)


# ── the run ──────────────────────────────────────────────────────────────────────────────────

RUN = dict(text=None, batch=5, steps=6)


def plain_training(how, args):
    """The run's loop in one process and plain torch, on the weights that the chapter draws."""
    options, rate = load.way(how)
    model = ep.build(ep.Groups(None, None, None, None, None), CPU, **options)
    weights = {name: w.detach().clone().requires_grad_() for name, w in model.named_parameters()}
    layer = {name[2:]: w for name, w in weights.items() if name[0] == "2"}
    bias, text = torch.zeros(8), ep.read_text(args.text, 0)
    optimizer = torch.optim.AdamW(weights.values(), lr=5e-3, weight_decay=0.0)
    norm = lambda x, name: F.rms_norm(x, (64,), weights[f"{name}.weight"])
    for step in range(args.steps):
        x, y = ep.sample(text, step, args.batch, 64)
        before = [F.pad(x, (lag, 0))[:, :64] for lag in (3, 2, 1, 0)]
        h = sum(weights["0.weight"][256 * place + byte] for place, byte in enumerate(before))
        z, aux, chosen = norm(h, "1"), 0.0, None
        if how == "dense":
            gate, up = (z @ layer["experts.gate_up"][0].T).chunk(2, -1)
            out = (F.silu(gate) * up) @ layer["experts.down"][0].T
        else:
            given = dict(k=1, bias=bias.tolist(), renormalize=False, **options)
            out, aux, _ = full_layer(z, layer, torch.ones(z.shape[:2]), **given)
            scores = (z.flatten(0, 1) @ layer["router.weight"].T).softmax(-1) + bias
            chosen = scores.argmax(-1).bincount(minlength=8)
        logits = norm(out, "3") @ weights["4.weight"].T + weights["4.bias"]
        optimizer.zero_grad()
        (F.cross_entropy(logits.flatten(0, 1), y.flatten()) + aux).backward()
        optimizer.step()
        if chosen is not None:
            change = rate * (chosen.double().mean() - chosen).sign()
            bias = bias + change - change.mean()
    return {name: w.detach() for name, w in weights.items()}, bias


@pytest.mark.parametrize("how", ["dense", "none", "aux:0.02", "bias:0.02"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_runs_own_loop_trains_as_one_process_in_plain_torch(n, how):
    """Six steps of the loop that main runs, five sequences a step: ranks hold unequally many."""

    def run():
        torch.set_default_dtype(torch.float64)
        options, rate = load.way(how)
        args, groups = Namespace(**RUN), ep.make_groups(1 if how == "dense" else n)
        model = ep.build(groups, CPU, **options)
        start = {name: w.detach().clone() for name, w in model.named_parameters()}
        losses = [loss for loss, _ in ep.training(model, rate, args, groups, CPU)]
        right, bias = plain_training(how, args)
        for name, weight in model.named_parameters():
            split = name in ep.shard_specs(model) and how != "dense"
            part = right[name].chunk(n)[dist.get_rank()] if split else right[name]
            assert (weight.detach() - part).abs().max() < 1e-10, name
            stays = how == "dense" and "router" in name  # of one expert
            assert stays or not torch.equal(weight.detach(), start[name]), name
        if how != "dense":
            assert ep.relative_error(model[2].router.bias_E, bias) < 1e-10
            assert bias.any() == how.startswith("bias")
        return losses

    losses = on_ranks(n, run)
    assert all(each == losses[0] for each in losses) and losses[0][-1] < losses[0][0]


def means_of_the_last_ten(*ways, steps=60):
    """Columns of the run's table: {way: mean} of loss, busiest expert, rank, variance, dropped."""

    def run():
        args = Namespace(text=None, batch=16, steps=steps, balance=ways)
        runs, _ = load.compare(args, CPU)
        return {how: torch.tensor(rows[-10:]).mean(0).tolist() for how, rows in runs.items()}

    (means,) = on_ranks(1, run, timeout=200)
    return [{how: row[i] for how, row in means.items()} for i in range(5)]


def test_the_bias_and_the_auxiliary_loss_even_the_load_that_is_uneven_without_them():
    _, expert, _, variance, _ = means_of_the_last_ten("none", "aux:0.02", "bias:0.02", steps=40)
    assert expert["bias:0.02"] < 1.4 < 1.8 < expert["none"]
    assert variance["aux:0.02"] < 0.5 * variance["none"]


@pytest.mark.slow
def test_the_table_of_coefficients_and_factors_is_in_order():
    """Load variance falls with the coefficient, the dropped share with the capacity factor."""
    ways = "dense none aux:0.001 aux:0.02 aux:0.1 bias:0.02 capacity:1.0 capacity:1.25 capacity:2.0"
    loss, _, _, variance, dropped = means_of_the_last_ten(*ways.split())
    assert loss["none"] < loss["dense"]
    order = [variance[how] for how in ("aux:0.1", "aux:0.02", "aux:0.001", "none")]
    assert order == sorted(order)
    assert dropped["none"] == dropped["aux:0.1"] == dropped["bias:0.02"] == 0
    assert 0.4 > dropped["capacity:1.0"] > dropped["capacity:1.25"] > dropped["capacity:2.0"]
    assert loss["aux:0.1"] - loss["none"] < 0.1 and loss["capacity:1.0"] > loss["none"]


# ── the script ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--ranks", 3], "3 ranks do not divide 8 experts: use 1, 2, 4 or 8"),
        (["--batch", 3], "--batch 3: each of 4 ranks needs at least 1"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_before_a_rank_starts(flags, said):
    assert refusal(ROOT / "05_ep.py", *flags) == said


def test_wrong_words_for_a_balance_are_refused():
    said = "dense, none, aux:0.02, bias:0.02, capacity:1.25 or z:0.01"
    for flag in "aux", "bias:x", "fair":
        words = refusal(ROOT / "benchmarks/expert_load.py", "--balance", "none", flag)
        assert words == f"--balance {flag}: use words such as {said}"


@pytest.mark.slow
def test_the_run_learns_and_the_bias_evens_the_load_that_is_uneven_without_it():
    done = run_script(ROOT / "05_ep.py", torchrun=4)
    assert done.returncode == 0, done.stdout + done.stderr
    entropy = float(re.search(r"entropy of the text is ([\d.]+)", done.stdout)[1])
    runs = re.findall(r"^ +(0\.\d+) +([\d.]+) +([\d.]+) +([\d.]+)$", done.stdout, re.M)
    (rate, _, loss, uneven), (another, _, last, even) = [map(float, run) for run in runs]
    assert (rate, another) == (0, 0.02) and max(loss, last) < entropy - 0.8
    assert even < 1.3 < 1.8 < uneven


@pytest.mark.slow
def test_the_mixture_learns_more_than_the_dense_layer():
    done = run_script(ROOT / "benchmarks/expert_load.py", timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^(dense|none|bias:0.02) +([\d.]+) +([\d.]+)", done.stdout, re.M)
    loss = {how: float(last) for how, _, last in lines}
    assert max(loss["none"], loss["bias:0.02"]) < loss["dense"]
    before, after = re.findall(r"([\d.]+) with", done.stdout)
    assert float(after) < 1.2 < float(before)


@pytest.mark.slow
def test_the_pictures_are_drawn(tmp_path):
    done = run_script(ROOT / "05_ep.py", "--ranks", 2, "--plot", tmp_path / "x.png", timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "entropy" not in done.stdout and (tmp_path / "x.png").stat().st_size > 10_000
    flags = "--ranks", 2, "--steps", 20, "--balance", "none", "bias:0.02", "capacity:1.25"
    script = ROOT / "benchmarks/expert_load.py"
    done = run_script(script, *flags, "--plot", tmp_path / "y.png", timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "y.png").stat().st_size > 20_000
