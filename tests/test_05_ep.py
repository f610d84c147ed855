"""05_ep: every gradient equal to one process, bytes equal to the formulas, and reported faults."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from harness import ROOT, RankFailed, chapter, on_ranks, refusal, run_script
from torch import nn
from torch.utils.checkpoint import checkpoint

ep = chapter("05_ep")
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
    route, x = router(8, 16, k), double(3, 5, 8)
    expert, gates, _ = route(x)
    logits, chosen = (x.flatten(0, 1) @ route.weight.T).sort(-1, descending=True)
    assert torch.equal(expert, chosen[:, :k])
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
def test_with_all_scores_below_zero_no_expert_of_a_group_that_lost_is_chosen():
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
    route = router(8, 8, 2)
    with torch.no_grad():
        route.weight.zero_()
    assert route(double(2, 3, 8)).expert.tolist() == [[0, 1]] * 6
    route = router(8, 8, 2, score="sigmoid", limit=(4, 2))
    with torch.no_grad():
        route.weight.zero_()
    assert route(double(2, 3, 8)).expert.tolist() == [[0, 1]] * 6


def test_the_router_computes_in_at_least_fp32_and_the_layer_returns_what_it_got():
    x = double(4, 16, 8).bfloat16()
    layer = ep.MoE(ep.Router(8, 16, 2), 8, None, shared=4)
    exact = router(8, 16, 2)
    exact.weight.data = layer.router.weight.data.double()
    assert torch.equal(layer.router(x).expert, exact(x.double()).expert)
    assert layer.router(x).gates.dtype == torch.float32
    assert layer(x).dtype == torch.bfloat16
    assert exact(x.double()).gates.dtype == torch.float64


# ── capacity (ep-06) ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "N, E, k, factor, wanted",
    [(5, 4, 1, 1, 2), (3, 2, 1, 1, 2), (2, 8, 2, 1, 1), (10, 4, 2, 1.25, 7), (100, 10, 1, 1.1, 11),
     (4, 2, 2, 9.0, 4), (0, 4, 2, 1.0, 0)],
)  # fmt: skip
def test_capacity_rounds_up_and_is_never_more_than_there_are_tokens(N, E, k, factor, wanted):
    assert ep.capacity(N, E, k, factor) == wanted


def test_the_first_tokens_or_the_largest_gates_stay():
    expert = torch.zeros(5, 1, dtype=torch.long)
    gates = torch.tensor([[0.1], [0.5], [0.3], [0.5], [0.2]])
    assert ep.drop(expert, gates, 4, 1).flatten().tolist() == [0, 0, 4, 4, 4]
    assert ep.drop(expert, gates, 4, 1, "gate").flatten().tolist() == [4, 0, 4, 0, 4]
    two = torch.tensor([[1, 0], [1, 2], [0, 1], [1, 3]])  # capacity 2 each
    assert ep.drop(two, gates[:4].expand(4, 2), 4, 1).tolist() == [[1, 0], [1, 2], [0, 4], [4, 3]]


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
    wanted = 0.3 * by_formula(x, route.weight, 2, scope, score)
    torch.testing.assert_close(aux, wanted)
    gradients = [torch.autograd.grad(loss, route.weight)[0] for loss in (aux, wanted)]
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


def auxiliary_gradient(scope, dp, cp, K):
    """The router's gradient at coefficient 0.01 less that at 0: dp x cp ranks, K micro-batches."""
    torch.manual_seed(1)
    x_BSD, found = double(8, 12, 6) + 0.3, []
    d, c = divmod(dist.get_rank(), cp)
    rows = torch.arange(dp * cp).view(dp, cp).tolist()
    cps, _ = dist.new_subgroups_by_enumeration(rows)
    for coefficient in (0.01, 0.0):
        route = router(6, 8, 2, balance=coefficient, z=coefficient, scope=scope, group=world(),
                       sequence_group=cps, microbatches=K)  # fmt: skip
        layer = ep.MoE(route, 4, None).double()
        for micro_BSD in x_BSD.chunk(K):
            y = layer(micro_BSD.chunk(dp)[d].chunk(cp, 1)[c])
            (y.sum() / x_BSD.numel()).backward()
        dist.all_reduce(route.weight.grad, group=world())
        found.append(route.weight.grad)
    return found[0] - found[1]


GRID = [(1, 1), (2, 1), (1, 2), (2, 2)]


@question("Q5.2")
@pytest.mark.parametrize("scope", ["batch", "sequence"])
def test_the_balance_loss_is_as_strong_on_any_grid_of_ranks(scope):
    """ep-05. Its scope is the micro-batch, or the sequence: a sequence does not see K either."""
    found = {}
    for dp, cp in GRID:
        grid = lambda: [auxiliary_gradient(scope, dp, cp, K) for K in (1, 2, 4)]
        found[dp, cp] = on_ranks(dp * cp, grid)[0]
    for gradients in found.values():
        for gradient, alone in zip(gradients, found[1, 1]):
            assert ep.relative_error(gradient, alone) < 1e-10
    assert found[1, 1][0].abs().max() > 1e-6
    if scope == "sequence":
        for gradient in found[1, 1]:
            assert ep.relative_error(gradient, found[1, 1][0]) < 1e-10


def test_a_step_of_k_equal_micro_batches_balances_as_hard_as_one():
    x, gradients = double(2, 6, 8), []
    for K in (1, 2, 4):
        route = router(8, 8, 2, balance=0.1, z=0.1, microbatches=K)
        for _ in range(K):
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


# ── dispatch and combine, on the ladder ──────────────────────────────────────────────────────


def hold(found):
    """Every error at most 1e-10, every byte where the formula has it."""
    assert max(found.errors.values()) <= 1e-10, found.errors
    assert found.sent[0] == pytest.approx(found.sent[1], abs=0.5)
    assert found.held[0] == found.held[1]


def cases(groups):
    hops = partial(ep.two_hops, nodes=(groups.inside, groups.across))
    for path in (ep.gather_tokens, ep.one_hop, hops):
        yield path, PLAIN
        yield path, dict(k=2)
        yield path, dict(k=4, score="sigmoid", limit=(4, 2), scale=2.5, balance=0.1, z=0.1)
        yield path, PLAIN | dict(bias=[9.0])  # one expert takes everything
        yield path, dict(k=2, bias=[9.0, 9.0])  # and whole ranks have no token
        yield path, dict(k=4, factor=1.0)
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
            hold(found := ep.check(groups, path, CPU, E=16, **layer))
            if isinstance(path, partial):
                across = groups.across.group_name
                crossed = sum(e.sent for e in found.events if e.group == across)
                assert crossed == found.across and (crossed or nodes == 1)
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


def test_two_hops_send_fewer_bytes_across_nodes_and_as_few_as_distinct_nodes():
    def run():
        groups = ep.make_groups(8, 2)
        hops = partial(ep.two_hops, nodes=(groups.inside, groups.across))
        found = [ep.check(groups, path, CPU, E=16, k=4) for path in (ep.one_hop, hops)]
        return [f.across for f in found]

    crossed = on_ranks(8, run)
    assert all(two < one for one, two in crossed)
    assert sum(two for _, two in crossed) < 0.7 * sum(one for one, _ in crossed)


def uneven(path, tokens):
    """A layer whose ranks have tokens[rank] tokens, beside its twin on all of them."""
    groups = ep.make_groups(dist.get_world_size(), 2)
    if path is ep.two_hops:
        path = partial(path, nodes=(groups.inside, groups.across))
    for bias in ((), (9.0, 9.0)):  # then experts 0 and 1, of rank 0, take everything
        pair = ep.twins(path, groups, CPU, E=16, bias=bias, balance=0.1, z=0.1)
        beside_twin(*pair, groups, tokens)


def beside_twin(twin, moe, groups, tokens):
    n, r = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(2)
    x = double(1, sum(tokens), 16).requires_grad_()
    mine = x.detach().split(tokens, 1)[r].requires_grad_()
    twin(x).square().sum().backward()
    moe(mine).square().sum().backward()
    ep.reduce_gradients(moe, groups.world, groups.replicas)
    assert ep.relative_error(mine.grad, x.grad.split(tokens, 1)[r]) < 1e-10
    for (name, param), whole in zip(moe.named_parameters(), twin.parameters()):
        part = whole.grad.chunk(n)[r] if name in ep.shard_specs(moe) else whole.grad
        assert ep.relative_error(param.grad, part) < 1e-10, name


@question("Q5.3")
@question("Q5.4")
@pytest.mark.parametrize("path", [ep.gather_tokens, ep.one_hop, ep.two_hops])
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
        found = ep.check(groups, ep.one_hop, CPU)
        moe, twin = found.moe, found.twin
        split = ep.shard_specs(moe)
        parts = {True: torch.zeros(1).double(), False: torch.zeros(1).double()}
        for name, param in moe.named_parameters():
            parts[name in split] += param.grad.square().sum()
        dist.all_reduce(parts[True], group=groups.ep)
        norm = (parts[True] + parts[False]).sqrt()
        assert norm.item() == pytest.approx(nn.utils.get_total_norm(
            [p.grad for p in twin.parameters()]).item(), rel=1e-12)  # fmt: skip
        e = len(moe.experts.down)
        mine = slice(dist.get_rank(groups.ep) * e, (dist.get_rank(groups.ep) + 1) * e)
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
        for (name, param), whole in zip(moe.named_parameters(), twin.parameters()):
            part = whole.grad[mine] if name in split else whole.grad
            ratio = (param.grad * 0.01 / (norm + 1e-6)).norm() / part.norm()
            assert ratio.item() == pytest.approx(1.0, rel=1e-10), name

    on_ranks(n, step)


# ── the layer among others ───────────────────────────────────────────────────────────────────


def test_runs_of_rows_meet_their_own_matrix_and_empty_runs_get_zeros():
    x, weight, runs = double(7, 3).requires_grad_(), double(4, 5, 3).requires_grad_(), [2, 0, 4, 1]
    owner = torch.arange(4).repeat_interleave(torch.tensor(runs))
    wanted = torch.einsum("ri,roi->ro", x, weight[owner])
    torch.testing.assert_close(y := ep.grouped_linear(x, weight, runs), wanted)
    d_y = double(7, 5)
    for found, right in zip(*(torch.autograd.grad(t, (x, weight), d_y) for t in (y, wanted))):
        torch.testing.assert_close(found, right)


class Stage(nn.Module):
    """A residual MoE as a pipeline stage, as 04 calls it: the aux loss stays inside the stage."""

    def __init__(self, stage, m):
        super().__init__()
        torch.manual_seed(stage)
        self.last = stage == 1
        self.moe = ep.MoE(ep.Router(8, 8, 2, balance=1.0, microbatches=m), 4, None).double()

    def boundary(self, x):
        return torch.empty_like(x)

    def forward(self, x, micro_batch, later=None):
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
        me = dist.get_rank()
        stage = Stage(me, m)
        pp.execute(pp.SCHEDULES[schedule](2, m), {me: stage}, batch, world())
        return [p.grad for p in stage.parameters()]

    stages = [Stage(0, m), Stage(1, m)]
    for x in batch:
        stages[1](stages[0](None, x), x).backward()
    for gradients, stage in zip(on_ranks(2, step), stages):
        for found, param in zip(gradients, stage.parameters()):
            assert ep.relative_error(found, param.grad) < 1e-10


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


def test_copies_of_an_expert_take_turns_and_stay_alike():
    expert = torch.tensor([[0, 1], [0, 2], [0, 4], [1, 0]])
    assert ep.take_turns(expert, [0, 1, 2, 3, 0, 0]).tolist() == [[0, 1], [4, 2], [5, 6], [1, 0]]

    def step(together):
        torch.manual_seed(0)
        slots = [0, 1, 2, 3, 0, 0]
        layer = ep.MoE(ep.Router(8, 4, 2), 4, world(), slots=slots).double()
        x = double(2, 9, 8).chunk(2)[dist.get_rank()]
        layer(x).square().sum().backward()
        if together:
            ep.sum_over_copies(layer)
        return layer.experts.down.grad

    copies = torch.cat(on_ranks(2, step, True))[[0, 4, 5]]
    assert torch.equal(copies[0], copies[1]) and torch.equal(copies[0], copies[2])
    apart = torch.cat(on_ranks(2, step, False))[[0, 4, 5]]
    torch.testing.assert_close(apart.sum(0), copies[0])
    assert ep.relative_error(apart[0], apart[1]) > 0.1


def test_experts_that_ep_does_not_divide_are_refused_with_the_numbers():
    def refused():
        with pytest.raises(ValueError, match="ep 3 does not divide 8 experts: use one of .1, 2, 4"):
            ep.MoE(ep.Router(8, 8, 2), 4, world())

    on_ranks(3, refused)


# ── the script ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "given, said",
    [
        (["--ranks", 3], "3 ranks do not divide 8 experts: use 1, 2, 4 or 8"),
        (["--batch", 3], "--batch 3: each of 4 ranks needs at least 1"),
        (["--plot", "x.png", "--steps", 5], "--steps 5: a picture needs at least 10"),
    ],
)
def test_wrong_arguments_are_refused_before_a_rank_starts(given, said):
    assert refusal(ROOT / "05_ep.py", *given) == said


@pytest.mark.slow
def test_the_run_learns_more_than_the_dense_layer_and_the_bias_evens_the_load():
    done = run_script(ROOT / "05_ep.py", torchrun=4)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^ *\d+ +\d.*%$", done.stdout, re.M)
    steps = [[float(x.strip("%")) for x in line.split()] for line in lines]
    entropy = float(re.search(r"entropy of the text ([\d.]+)", done.stdout)[1])
    _, loss, dense, *_ = steps[-1]
    assert loss < dense < entropy - 0.8
    assert sum(step[3] for step in steps[-4:]) / 4 < 1.3


@pytest.mark.slow
def test_the_picture_shows_what_each_way_to_balance_reaches(tmp_path):
    done = run_script(ROOT / "05_ep.py", "--steps", 120, "--plot", tmp_path / "x.png", timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(re.findall(r"^(\w+) +last 10 steps: busiest expert ([\d.]+)", done.stdout, re.M))
    assert float(found["bias"]) < 1.3 < float(found["capacity"]) < float(found["none"])
    assert (tmp_path / "x.png").stat().st_size > 20_000
