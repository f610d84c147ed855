"""05 · Expert parallelism: each rank holds some experts; tokens travel to the experts they chose

A mixture-of-experts layer has E small networks, the experts, in place of one large network. A
router chooses k experts for each token, and the layer adds up their results. Each of n ranks holds
e = E/n experts, a copy of all other weights, and its own s tokens, as in data parallelism. A token
is a row of D numbers. The layer sends rows to the ranks of their experts, and results back. It uses
all_to_all: each rank sends each other rank a part of its rows, and parts may differ in length.

    rank 0   s tokens, router   experts 0 .. e-1    ─┐  all_to_all: rows go out (dispatch)
    rank 1   s tokens, router   experts e .. 2e-1   ─┼─ all_to_all: results return (combine)
    ...                                             ─┘  backward: two more, for the gradients

    ladder          rows of D numbers that a rank sends in one all_to_all, if the load is even
    gather_tokens   s · (n-1)           every token goes to every rank
    one_hop         s · k · (n-1)/n     a token goes to each of its experts
    two_hops        s · (nodes - 1)     at most, between nodes; links inside a node are fast
    A rank holds e · 3·D·F weights of experts, with their gradients and optimizer state. Expert
    parallelism splits weights; it does not split activations.

    python 05_ep.py                                        four ranks on this machine
    torchrun --nproc-per-node 4 05_ep.py                   the same, started by torchrun

Ways to even the load, and copies of hot experts, are compared in benchmarks/expert_load.py.
Guide: Expert Parallelism · EP all-to-all bandwidth math · Load balancing in MoE training · FAQ.
Questions  Q5.1 ** which experts may not be chosen?   Q5.2 *** what is summed before a product?
           Q5.3 ** where do gradients go?             Q5.4 ** in which order do experts want rows?
           Q5.5 *** which rows need not cross?        Q5.6 ** over whom are gradients summed?
"""
# n ranks · B sequences · S tokens of a sequence · s tokens of this rank · D width
# F hidden units · E experts · e experts of this rank · k experts of a token · R rows received

import math
import signal
from collections import namedtuple

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads ends it without a trace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as nnf  # not F, which is a letter here

# ── the serial twin ──────────────────────────────────────────────────────────────────────────


def serial_mixture(x_sD, gates_sE, gate_up, down):
    """Compute the layer in one process: every expert on every token, times the token's gate.

    A token's gate for an expert is its weight in the sum, 0 where the token did not choose it. An
    expert is a SwiGLU network, down(silu(gate(x)) · up(x)); its `gate` is another thing, a matrix.
    gate_up holds the matrices gate and up, (E, 2F, D); down is (E, D, F).
    """
    y_sD = torch.zeros_like(x_sD)
    for gates_s, gate_up_FD, down_DF in zip(gates_sE.T, gate_up, down):
        gate_sF, up_sF = (x_sD @ gate_up_FD.T).chunk(2, -1)
        y_sD = y_sD + gates_s[:, None] * ((nnf.silu(gate_sF) * up_sF) @ down_DF.T)
    return y_sD


# ── the one collective of the axis ───────────────────────────────────────────────────────────


def size(group):
    """Return the number of ranks of a group; None stands for this rank alone."""
    return 1 if group is None else dist.get_world_size(group)


def _exchange(rows, sent, received, group):
    if group is None:
        return rows
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    # all_to_all over ep, of unequal parts, some empty: each rank now holds the rows that are for it
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


class _AllToAll(torch.autograd.Function):
    """
    forward   all_to_all: `sent` rows to each rank, `received` rows from each
    backward  all_to_all: `received` rows to each rank, `sent` rows from each
    """

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.splits = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx, d_rows):
        # Q5.3 ** A row went to the rank of its expert. To which rank does the row's gradient go?
        #         hint: to the rank that sent the row; what was received is now sent
        sent, received, group = ctx.splits
        return _exchange(d_rows, received, sent, group), None, None, None
        # /Q5.3


# ── first rung: every token goes to every rank ───────────────────────────────────────────────


def gather_tokens(x_sD, chosen_sk, gates_sk, experts, group):
    """Send every token to every rank; each rank returns the results of its own experts.

    Args: tokens (s, D), as many on every rank; the experts that each token chose and their gates
    (s, k); this rank's experts, called as experts(rows, number of rows of each). Returns (s, D).
    """
    n, s, e = size(group), len(x_sD), len(experts.down)
    first, splits = dist.get_rank(group) * e, ([s] * n, [s] * n, group)
    # all_to_all of n copies of a row, one for each rank; backward adds up the copies' gradients
    copies = (t.repeat(n, 1) for t in (x_sD, chosen_sk, gates_sk))
    x_RD, chosen_Rk, gates_Rk = (_AllToAll.apply(t, *splits) for t in copies)
    pairs = [(chosen_Rk == expert).nonzero() for expert in range(first, first + e)]
    token, choice = torch.cat(pairs).unbind(1)  # sorted by expert
    rows = gates_Rk[token, choice, None] * experts(x_RD[token], [len(pair) for pair in pairs])
    y_RD = torch.zeros_like(x_RD).index_add(0, token, rows)
    return _AllToAll.apply(y_RD, *splits).view(n, s, -1).sum(0)  # over ranks


# ── second rung: dispatch and combine ────────────────────────────────────────────────────────

# Two ranks with two tokens each, four experts, k 2. Rank 0 holds experts 0 and 1. Row a1 is token a
# on its way to expert 1. A rank numbers its choices: choice i is made by token i // k.
#                  rank 0: tokens a, b               rank 1: tokens c, d
#     chosen_sk    a 1 2 · b 0 1                     c 0 3 · d 0 3
#     order        2 0 3 1: b0 a1 b1 | a2            0 2 1 3: c0 d0 | c3 d3        by expert
#     sent         3, 1 rows to ranks 0, 1           2, 2
#     received     3, 2 rows from ranks 0, 1         1, 2
#     rank-major   b0 a1 b1 | c0 d0                  a2 | c3 d3                    as they arrive
#     regroup      0 3 4 1 2: b0 c0 d0 | a1 b1       0 1 2: a2 | c3 d3             expert-major
#     runs         3, 2 rows for experts 0, 1        1, 2 rows for experts 2, 3


Plan = namedtuple("Plan", "order sent received regroup runs shape group")  # shape: (s, k)


def make_plan(chosen_sk, e, group):
    """Count rows, tell each rank its counts, and order rows: a Plan.

    Expert i lives on rank i // e of the group. A choice of n·e or more is dropped: it is not sent.
    The host must know the lengths of messages, so this function waits for the device.
    """
    n = size(group)
    counts_E = chosen_sk.flatten().bincount(minlength=n * e + 1)[: n * e]
    # how many rows will come for each expert of this rank: e integers from each rank
    arriving_E = _exchange(counts_E, [e] * n, [e] * n, group)
    # Q5.4 ** Rows leave sorted by expert. In which order do the rows of several ranks arrive, and
    #         which order do the experts of this rank want?
    #         hint: the rows arrive by rank, then by expert; sort once before and once after
    order = chosen_sk.flatten().argsort(stable=True)[: counts_E.sum()]
    expert_R = torch.arange(e, device=order.device).repeat(n).repeat_interleave(arriving_E)
    regroup = expert_R.argsort(stable=True)
    # /Q5.4
    sent, received = (counts.view(n, e).sum(1).tolist() for counts in (counts_E, arriving_E))
    runs = arriving_E.view(n, e).sum(0).tolist()
    return Plan(order, sent, received, regroup, runs, chosen_sk.shape, group)


def dispatch(x_sD, plan):
    """Send each token's row to the ranks of its experts: (s, ...) to (R, ...), sorted by expert.

    A rank to which no row comes still takes part, forward and backward. Else the others wait.
    """
    rows = x_sD[plan.order // plan.shape[1]]
    return _AllToAll.apply(rows, plan.sent, plan.received, plan.group)[plan.regroup]


def combine(rows_RD, gates_sk, plan):
    """Bring rows (R, D) back, and add up the rows of each token, times their gates: (s, D).

    A choice that was not sent adds nothing. The sum runs over the k choices in their order, and so
    gives the same bits each time. (index_add on a GPU does not.)
    """
    # index_copy puts row i in place regroup[i]: it undoes the sort of dispatch, then that of order
    back_RD = torch.empty_like(rows_RD).index_copy(0, plan.regroup, rows_RD)
    rows = _AllToAll.apply(back_RD, plan.received, plan.sent, plan.group)
    results = rows.new_zeros(gates_sk.numel(), rows.shape[-1]).index_copy(0, plan.order, rows)
    return (gates_sk[..., None] * results.unflatten(0, plan.shape)).sum(1)


def one_hop(x_sD, chosen_sk, gates_sk, experts, group):
    """Send rows straight to the ranks of their experts, and results back. Args: gather_tokens'."""
    plan = make_plan(chosen_sk, len(experts.down), group)
    return combine(experts(dispatch(x_sD, plan), plan.runs), gates_sk, plan)


# ── third rung: cross to each node once ──────────────────────────────────────────────────────


def two_hops(x_sD, chosen_sk, gates_sk, experts, group, nodes=None):
    """Send a token to each node once, however many of the node's experts it chose.

    Ranks that have the same place in their nodes talk to each other across nodes. First hop: a
    token chooses nodes as it chose experts. Its row goes to the rank with this rank's place in each
    chosen node, with the token's choices and gates. Second hop: that rank does `one_hop` inside its
    node. It adds up the results of the token, so one row returns from each node. nodes: (group of
    the ranks of this node, group of the ranks with this rank's place in all nodes). Otherwise as
    gather_tokens. Source: DeepSeek-V3, arXiv:2412.19437, section 3.2.2.
    """
    inside, across = nodes
    per_node = len(experts.down) * size(inside)
    # Q5.5 *** A token names a node once for each choice. Which of these rows need not cross?
    #          hint: compare all pairs of choices, and look below the diagonal
    node_sk = chosen_sk.div(per_node, rounding_mode="floor")
    repeated_sk = (node_sk[:, :, None] == node_sk[:, None, :]).tril(-1).any(-1)
    node_sk = node_sk.masked_fill(repeated_sk, size(across))
    # /Q5.5
    plan = make_plan(node_sk, 1, across)
    x_RD, chosen_Rk, gates_Rk = (dispatch(t, plan) for t in (x_sD, chosen_sk, gates_sk))
    local_Rk = chosen_Rk - per_node * dist.get_rank(across)
    elsewhere_Rk = (local_Rk < 0) | (local_Rk >= per_node)
    local_Rk = local_Rk.masked_fill(elsewhere_Rk, per_node)
    y_RD = one_hop(x_RD, local_Rk, gates_Rk, experts, inside)
    return combine(y_RD, (node_sk < size(across)).to(y_RD.dtype), plan)


# ── router, experts, layer ───────────────────────────────────────────────────────────────────

# chosen (s, k), E for a dropped choice; gates (s, k); aux, an auxiliary loss, or None
Routing = namedtuple("Routing", "chosen gates aux")


def top(scores, k):
    """Return the numbers of the k largest scores in each row; of equal scores, the first, where
    torch.topk promises no order."""
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :k]


class PlainRouter(nn.Module):
    """Chooses the k of E experts with the largest logits; a token's gates are a softmax over these.

    A choice has no gradient: the router learns through the gates alone.
    """

    def __init__(self, D, E, k):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, D) / D**0.5)
        self.E, self.k = E, k

    def logits(self, x_bSD):
        """Return logits (s, E) in at least float32: in bfloat16 many would be equal."""
        wide = torch.promote_types(x_bSD.dtype, torch.float32)
        return nnf.linear(x_bSD.flatten(0, 1).to(wide), self.weight.to(wide))

    def forward(self, x_bSD):
        logits_sE = self.logits(x_bSD)
        chosen_sk = top(logits_sE.detach(), self.k)
        return Routing(chosen_sk, logits_sE.gather(1, chosen_sk).softmax(-1), None)


class Experts(nn.Module):
    """SwiGLU networks side by side, each for its own rows; weights as in the twin. Args: number of
    networks, widths D and F."""

    def __init__(self, E, D, F):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(E, 2 * F, D) / D**0.5)
        self.down = nn.Parameter(torch.randn(E, D, F) / F**0.5)

    def forward(self, x_RD, runs=None):
        """Map rows (R, D) to results (R, D): the first runs[0] rows are for the first expert, and
        so on; None gives all rows to one expert. An expert without rows takes part: its gradient is
        zeros, not None, and the sum over ranks needs it."""
        weights = (weight.to(x_RD.dtype).unbind() for weight in (self.gate_up, self.down))
        results = []
        for x, gate_up_FD, down_DF in zip(x_RD.split(runs or [len(x_RD)]), *weights):
            gate, up = nnf.linear(x, gate_up_FD).chunk(2, -1)
            results.append(nnf.linear(nnf.silu(gate) * up, down_DF))
        return torch.cat(results)


class MoE(nn.Module):
    """A router, experts spread over the ranks of a group, and one shared expert for all tokens.

    Args: router; F, hidden units of an expert; group, the ranks that share the experts, None for
    this rank alone; shared, hidden units of the shared expert, 0 for none; path, a rung of the
    ladder. Every rank draws all experts and keeps its own: any number of ranks starts alike. Raises
    ValueError where the group does not divide the experts, or its ranks build different layers.
    """

    def __init__(self, router, F, group, shared=0, path=one_hop):
        super().__init__()
        (E, D), n = router.weight.shape, size(group)
        if E % n:
            divisors = [d for d in range(1, E + 1) if E % d == 0]
            raise ValueError(f"ep {n} does not divide {E} experts: use one of {divisors}")
        self.router, self.group, self.path = router, group, path
        self.experts = Experts(E, D, F)
        self.shared = Experts(1, D, shared) if shared else None
        if group is not None:
            name, dtype = getattr(path, "func", path).__name__, self.experts.down.dtype
            layer = dict(E=E, k=router.k, D=D, F=F, shared=shared, path=name, dtype=dtype)
            agree([f"{name} {value}" for name, value in layer.items()], group)
        rank = 0 if group is None else dist.get_rank(group)
        for name, whole in list(self.experts.named_parameters()):
            setattr(self.experts, name, nn.Parameter(whole.detach().chunk(n)[rank].clone()))

    def forward(self, x_bSD, *options):
        """Map (b, S, D) to (b, S, D), without the residual; `options` are for the router. A token
        whose choices were all dropped gets the shared expert's result alone."""
        x_sD, (chosen_sk, gates_sk, aux) = x_bSD.flatten(0, 1), self.router(x_bSD, *options)
        y_sD = self.path(x_sD, chosen_sk, gates_sk, self.experts, self.group)
        if self.shared:
            y_sD = y_sD + self.shared(x_sD)
        y_bSD = y_sD.to(x_bSD.dtype).view_as(x_bSD)
        return y_bSD if aux is None else attach_loss(y_bSD, aux)


def shard_specs(module):
    """Return {name: (dimension, blocks)} of the parameters that ep splits, those of experts."""
    layers = [name for name, part in module.named_modules() if isinstance(part, MoE)]
    names = [f"{name}.experts.{weight}" for name in layers for weight in ("gate_up", "down")]
    return {name.lstrip("."): (0, 1) for name in names}


def reduce_gradients(module, dense, replicas):
    """Sum gradients over ranks after backward, in place. dense: the group of all ranks, each with
    other tokens; replicas: the group of the ranks that hold the same experts."""
    split = shard_specs(module)
    for name, param in module.named_parameters():
        # Q5.6 ** An expert has seen tokens of all ranks of its ep group. Which ranks have seen
        #         other tokens for the same weights?
        #         hint: the loss was divided by all tokens, so nothing is divided here
        holders = replicas if name in split else dense
        # all_reduce(SUM) over all ranks, or an expert's replicas: each holder now has the whole sum
        dist.all_reduce(param.grad, group=holders)
        # /Q5.6


# ── what a library adds ──────────────────────────────────────────────────────────────────────


def drop(chosen_sk, gates_sk, E, factor, first="token"):
    """Return the choices, with E in place of those beyond the capacity of their expert.

    Of s tokens, an expert takes ceil(factor · s·k / E): with a factor of 1, it takes 2 of 5 tokens
    that all choose expert 0 of 4. first: "token" keeps the earliest (Switch), "gate" those with the
    largest gates: tokens 1 and 3 for gates .1 .5 .3 .5 .2. A choice of E is padding's.
    """
    choices = int((chosen_sk < E).sum())
    most = math.ceil(round(factor * choices / E, 9))  # 1.1 · 100 is a hair above 110
    chosen, gates = chosen_sk.flatten().clone(), gates_sk.flatten()
    for expert in range(E):
        queue = (chosen == expert).nonzero().flatten()
        if first == "gate":
            queue = queue[gates[queue].argsort(descending=True, stable=True)]
        chosen[queue[most:]] = E
    return chosen.view_as(chosen_sk)


class Router(PlainRouter):
    """Chooses k of E experts for each token, with the options of published models.

    Args:
        score: "softmax", or "sigmoid" (DeepSeek-V3); scale: a factor of all gates.
        renormalize: gates of a token sum to 1, which after a softmax equals PlainRouter (Mixtral).
            Otherwise gates are probabilities (Switch).
        limit: (groups, kept): a token chooses within its best `kept` groups of experts only.
        factor, first: capacity factor of a rank's tokens, None for no limit, and `drop`'s rule.
        balance, z, scope: coefficients of the auxiliary losses; "batch" or "sequence".
        group: the ranks over whose tokens the load is balanced, dp x cp (x tp where tokens are
            split over tp); None for this rank alone.
        sequence_group: the ranks that hold parts of the same sequences, cp (x tp); None: no others.
        microbatches: auxiliary losses are means over the micro-batches of a step.

    `bias_E` takes part in the choice alone, and learns by `update_bias`. Raises ValueError where E,
    k and limit do not fit, where gates could not learn, or where ranks of the group differ.
    Sources: Switch, arXiv:2101.03961; z-loss, 2202.08906; DeepSeek-V3, 2412.19437, section 2.1.2.
    """

    def __init__(
        self, D, E, k, score="softmax", renormalize=True, scale=1.0, limit=None,
        factor=None, first="token", balance=0.0, z=0.0, scope="batch",
        group=None, sequence_group=None, microbatches=1,
    ):  # fmt: skip
        groups, kept = limit or (1, 1)
        if E % groups or kept > groups or not 1 <= k <= kept * E // groups:
            raise ValueError(f"k {k} from {kept} of {groups} groups of {E} experts does not work")
        if renormalize and k == 1:
            raise ValueError("k 1 renormalised is a gate of 1: the router would get no gradient")
        super().__init__(D, E, k)
        self.register_buffer("bias_E", torch.zeros(E))
        self.register_buffer("load_2E", torch.zeros(2, E, dtype=torch.long), persistent=False)
        self.score, self.renormalize, self.scale, self.limit = score, renormalize, scale, limit
        self.factor, self.first, self.balance, self.z = factor, first, balance, z
        self.scope, self.microbatches = scope, microbatches
        if group is not None:
            alike = [f"{name} {value}" for name, value in vars(self).items() if name[0] != "_"]
            agree([f"D {D}", *alike], group)
        self.group, self.sequence_group = group, sequence_group

    def forward(self, x_bSD, real_bS=None):
        """Map tokens (b, S, D) to a Routing. real_bS is False for padding: padding goes to no
        expert, and no count and no loss includes it."""
        logits_sE = self.logits(x_bSD)
        scores_sE = logits_sE.softmax(-1) if self.score == "softmax" else logits_sE.sigmoid()
        chosen_sk = self.choose(scores_sE.detach())
        gates_sk = scores_sE.gather(1, chosen_sk)
        if self.renormalize:
            gates_sk = gates_sk / (gates_sk.sum(-1, keepdim=True) + 1e-20)
        if real_bS is not None:
            chosen_sk = chosen_sk.masked_fill(~real_bS.reshape(-1, 1), self.E)
        kept_sk = chosen_sk
        if self.factor:
            kept_sk = drop(chosen_sk, gates_sk.detach(), self.E, self.factor, self.first)
        gates_sk = gates_sk.masked_fill(kept_sk == self.E, 0)
        self.count_in_backward(gates_sk, chosen_sk, kept_sk)
        aux = None
        if self.balance or self.z:
            aux = self.auxiliary_loss(logits_sE, scores_sE, chosen_sk, x_bSD.shape[:2])
        return Routing(kept_sk, gates_sk * self.scale, aux)

    def choose(self, scores_sE):
        """Return the k experts with the best biased scores, (s, k), within a token's best groups. A
        group is worth the sum of its k / kept best biased scores."""
        # Q5.1 ** Which experts may a token not choose, and what replaces the scores of these?
        #         hint: biased scores may be below zero
        biased_sE = scores_sE + self.bias_E.to(scores_sE.dtype)
        if self.limit:
            groups, kept = self.limit
            by_group = biased_sE.unflatten(-1, (groups, -1))
            best = by_group.sort(-1, descending=True).values[..., : max(1, self.k // kept)].sum(-1)
            allowed = torch.zeros_like(best, dtype=torch.bool).scatter(-1, top(best, kept), True)
            biased_sE = by_group.masked_fill(~allowed[..., None], -math.inf).flatten(-2)
        return top(biased_sE, self.k)
        # /Q5.1

    def auxiliary_loss(self, logits_sE, scores_sE, chosen_sk, shape):
        """Return this rank's part of the auxiliary losses; the parts of all ranks add up to them.

        The balance loss of a batch, or of a sequence, is E · Σ_i f_i · P_i, 1 for an even load. f_i
        is the share of choices that fell on expert i, P_i the mean of the expert's normalised
        scores. Products of means add up only if f_i is that of all ranks' tokens. f_i has no
        gradient, so a rank may multiply it by its own part of P_i. The z-loss is the mean of
        logsumexp(logits)².
        """
        sequences, real_s1 = self.scope == "sequence", chosen_sk[:, :1] < self.E
        split = lambda t_sE: t_sE.view(*shape, self.E).sum(1) if sequences else t_sE.sum(0)[None]
        counts_bE = split(nnf.one_hot(chosen_sk, self.E + 1)[..., : self.E].sum(1))
        scores_bE = split(real_s1 * scores_sE / scores_sE.sum(-1, keepdim=True))
        # Q5.2 *** f · P is a product of two means over tokens of several ranks. Which of the two
        #          has to be summed over ranks first, and over which ranks?
        #          hint: the ranks that hold parts of a sequence, or all ranks that share the batch
        holders = self.sequence_group if sequences else self.group
        if holders is not None:
            # all_reduce(SUM) over dp x cp (or cp), E integers: choices of the batch (or sequences)
            dist.all_reduce(counts_bE, group=holders)
        # /Q5.2
        tokens_b1 = counts_bE.sum(-1, keepdim=True) // self.k
        totals = torch.stack([(tokens_b1 > 0).sum(), tokens_b1.sum()])
        if sequences and self.group is not None:
            # all_reduce(SUM) over dp x cp, 2 integers: sequences and tokens, once for each holder
            dist.all_reduce(totals, group=self.group)
            totals = totals // size(self.sequence_group)
        segments, tokens = totals.clamp(min=1)
        f_bE = counts_bE / (self.k * tokens_b1).clamp(min=1).to(scores_sE.dtype)
        balance = self.E * (f_bE * scores_bE / tokens_b1.clamp(min=1)).sum() / segments
        z = (real_s1 * logits_sE.logsumexp(-1, keepdim=True).square()).sum() / tokens
        return (self.balance * balance + self.z * z) / self.microbatches

    def count_in_backward(self, gates_sk, chosen_sk, kept_sk):
        """Add how many tokens chose each expert, and how many it kept, to load_2E in backward. A
        forward may run without training (validation) or twice (recomputation); backward comes by
        the gates once."""
        pair = chosen_sk, kept_sk
        counts = [choices.flatten().bincount(minlength=self.E + 1)[: self.E] for choices in pair]

        def count(_):
            self.load_2E += torch.stack(counts)

        if gates_sk.requires_grad:
            gates_sk.register_hook(count)

    @torch.no_grad()
    def update_bias(self, rate):
        """Raise the bias of experts chosen less than the mean by `rate`, and lower the others'.

        Every rank calls this once a step. Returns the step's load (2, E): how many tokens of all
        ranks chose each expert, and how many it kept. The change is centred, so that biases do not
        drift together. Source: Wang et al., arXiv:2408.15664.
        """
        load_2E = self.load_2E.clone()
        self.load_2E.zero_()
        if self.group is not None:
            # all_reduce(SUM) over dp x cp, 2·E integers: every rank now takes the same step
            dist.all_reduce(load_2E, group=self.group)
        chosen_E = load_2E[0]
        change_E = rate * (chosen_E.sum() - self.E * chosen_E).sign().to(self.bias_E.dtype)
        self.bias_E += change_E - change_E.mean()
        return load_2E


class _AttachLoss(torch.autograd.Function):
    """
    forward   x, unchanged
    backward  the gradient of x, unchanged, and 1 for the auxiliary loss
    """

    @staticmethod
    def forward(ctx, x, aux):
        ctx.save_for_backward(torch.ones_like(aux))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d_x):
        return d_x, *ctx.saved_tensors


def attach_loss(x, aux):
    """Return x, through which backward also minimises `aux`, as if the loss had it as a term. So no
    pipeline stage but the last has to return a loss. Use the result in place of x."""
    return _AttachLoss.apply(x, aux)


# ── from here on: proof, run, kit ────────────────────────────────────────────────────────────

from functools import partial

Groups = namedtuple("Groups", "world ep replicas inside across")  # all ranks, and this rank's parts


def make_groups(ep, nodes=1, timeout=20):
    """Arrange all ranks as (replica, node, place in the node); return this rank's Groups."""
    ranks = torch.arange(dist.get_world_size()).view(-1, nodes, ep // nodes)
    rows = [ranks.flatten(1), ranks.flatten(1).T, ranks.flatten(0, 1)]
    rows.append(ranks.transpose(1, 2).flatten(0, 1))
    new = partial(dist.new_subgroups_by_enumeration, timeout=timedelta(seconds=timeout))
    return Groups(dist.group.WORLD, *(new(row.tolist())[0] for row in rows))


def serial_layer(x_BSD, weights, real_BS, k, bias=(), renormalize=True, balance=0.0, z=0.0):
    """The twin: the whole layer on the tokens of all ranks, from the formulas, in plain torch.

    weights: the layer's parameters by name. Returns the output, the auxiliary loss, and a mask
    (tokens, E) of the choices. The tests have a longer twin, with all options of Router.
    """
    x_sD, real_s1 = x_BSD.flatten(0, 1), real_BS.reshape(-1, 1).to(x_BSD.dtype)
    logits_sE = x_sD @ weights["router.weight"].T
    scores_sE, E = logits_sE.softmax(-1), logits_sE.shape[1]
    biased_sE = scores_sE.detach() + nnf.pad(scores_sE.new_tensor(bias), (0, E - len(bias)))
    chosen_sE = real_s1 * torch.zeros_like(biased_sE).scatter(1, biased_sE.topk(k).indices, 1.0)
    gates_sE = chosen_sE * scores_sE
    if renormalize:
        gates_sE = gates_sE / gates_sE.sum(-1, keepdim=True).clamp(min=1e-300)
    expert = lambda name: (weights[f"{name}.gate_up"], weights[f"{name}.down"])
    y_sD = serial_mixture(x_sD, gates_sE, *expert("experts"))
    y_sD = y_sD + serial_mixture(x_sD, x_sD.new_ones(len(x_sD), 1), *expert("shared"))
    tokens, log_z_s1 = real_s1.sum(), logits_sE.exp().sum(-1, keepdim=True).log()
    f_E, P_E = E / (k * tokens) * chosen_sE.sum(0), (real_s1 * scores_sE).sum(0) / tokens
    aux = balance * (f_E * P_E).sum() + z * (real_s1 * log_z_s1**2).sum() / tokens
    return y_sD.view_as(x_BSD), aux, chosen_sE


def rows_by_rank(kept_nsE, nodes):
    """Count rows from rank to rank on each rung: {name: (n, n)}. kept_nsE has a 1 for each row."""
    n, s, _ = kept_nsE.shape
    places, kept_nsE = n // nodes, kept_nsE.cpu()
    one_hop_nn = kept_nsE.view(n, s, n, -1).sum((1, 3))
    to_node = kept_nsE.view(n, s, nodes, -1).amax(-1).sum(1)  # tokens with an expert there
    across_nn, inside_nn = torch.zeros(2, n, n, dtype=torch.long)
    for sender in range(n):
        for to in range(n):
            node = to // places
            relay = node * places + sender % places  # the sender's place in the other node
            across_nn[sender, relay] = to_node[sender, node]
            inside_nn[relay, to] += one_hop_nn[sender, to]
    return {"gather_tokens": torch.full((n, n), s), "one_hop": one_hop_nn,
            "two_hops, across": across_nn, "two_hops, inside": inside_nn}  # fmt: skip


def bytes_sent(path, kept_nsE, D, k, groups):
    """By formula: bytes that leave this rank in forward and backward of a layer, in float64, and
    how many of them two_hops sends to other nodes."""
    n, e, rank = len(kept_nsE), kept_nsE.shape[2] // len(kept_nsE), dist.get_rank(groups.ep)
    nodes = dist.get_world_size(groups.across)
    rows, path = rows_by_rank(kept_nsE, nodes), getattr(path, "func", path)

    def hop(name, counts, k=0):
        """Rows go out and results return, and backward does both again. Counts and the k choices
        of a row have no gradient; its k gates have."""
        rows_nn = rows[name].clone().fill_diagonal_(0)
        out, back = rows_nn[rank].sum().item(), rows_nn[:, rank].sum().item()
        return 8 * (2 * D * (out + back) + k * (2 * out + back) + counts)

    if path is gather_tokens:
        return hop("gather_tokens", 0, k), 0
    if path is one_hop:
        return hop("one_hop", e * (n - 1)), 0
    across = hop("two_hops, across", nodes - 1, k)
    return across + hop("two_hops, inside", e * (n // nodes - 1)), across


def batch(n, device, padded=False):
    """Tokens of all ranks (2n, S, D), a weight for each of their numbers, to make a loss of it, and
    which tokens are real (2n, S). Tokens have a mean, so that the load is uneven."""
    draw, (B, S, D) = torch.Generator().manual_seed(1), (2 * n, 6, 16)
    x_BSD, weight_BSD = torch.randn(2, B, S, D, dtype=torch.float64, generator=draw)
    real_BS = torch.rand(B, S, generator=draw) > (0.4 if padded else -1)
    return (x_BSD + 0.5).to(device), weight_BSD.to(device) / (B * S), real_BS.to(device)


def both(path, groups, device, bias=(), E=8, D=16, F=12, **options):
    """A layer on the ranks, and the parameters of the whole layer by name, from one seed. bias: of
    the first experts' scores, so that they are chosen."""
    layers = []
    for world, group in (groups.world, groups.ep), (None, None):
        torch.manual_seed(0)
        router = Router(D, E, group=world, **options)
        router.bias_E[: len(bias)] = torch.tensor(bias)
        layers.append(MoE(router, F, group, shared=8, path=path).double().to(device))
    moe, whole = layers
    return moe, {name: w.detach().clone().requires_grad_() for name, w in whole.named_parameters()}


# What `check` saw on this rank: relative errors by name; (measured, formula) of bytes sent and of
# bytes held; bytes to other nodes in two hops; events; values and the right ones, by name; the
# twin's choices; the layer; the twin's parameters by name
Checked = namedtuple("Checked", "errors sent held across events pairs kept_nsE moe twin")


def check(groups, path, device, times=1, padded=False, bias=(), E=8, twin=serial_layer, **options):
    """Take one step of a layer, of `times` its loss, beside the twin on the tokens of all ranks."""
    n, rank, ep = dist.get_world_size(), dist.get_rank(), dist.get_world_size(groups.ep)
    own = lambda t_B: t_B.chunk(n)[rank]
    moe, weights = both(path, groups, device, bias, E, **options)
    x_BSD, weight_BSD, real_BS = batch(n, device, padded)
    x_BSD.requires_grad_()
    y_BSD, aux, kept_sE = twin(x_BSD, weights, real_BS, bias=bias, **options)
    ((y_BSD * weight_BSD).sum() + aux).backward()
    x_bSD = own(x_BSD.detach()).clone().requires_grad_()
    with Ledger() as ledger:
        y_bSD = moe(x_bSD, own(real_BS))
        (y_bSD * own(weight_BSD) * times).sum().backward()
    reduce_gradients(moe, groups.world, groups.replicas)

    pairs = {"output": (y_bSD, own(y_BSD)), "input": (x_bSD.grad, own(x_BSD.grad))}
    for name, param in moe.named_parameters():
        right = weights[name].grad
        pairs[name] = param.grad, right.chunk(ep)[rank % ep] if name in shard_specs(moe) else right
    errors = {name: relative_error(*pair) for name, pair in pairs.items()}
    kept_nsE = kept_sE.view(n // ep, ep, -1, E)[rank // ep].long()
    D, k, router = x_BSD.shape[-1], moe.router.k, moe.router
    formula, across = bytes_sent(path, kept_nsE, D, k, groups)
    if router.balance or router.z:  # counts for the balance loss
        formula += (E if router.scope == "batch" else 2) * 8 * 2 * (n - 1) / n
    held = held_by(moe.experts), 4 * 8 * (E // ep) * 3 * D * moe.experts.down.shape[-1]
    sent = sum(ledger.sent.values()), formula
    return Checked(errors, sent, held, across, ledger.events, pairs, kept_nsE, moe, weights)


def held_by(experts):
    """Return bytes of parameters, of gradients, and of what AdamW holds for them after a step."""
    optimizer = torch.optim.AdamW(experts.parameters(), lr=0)
    optimizer.step()
    held = [(w, w.grad, *optimizer.state[w].values()) for w in experts.parameters()]
    return sum(t.nbytes for tensors in held for t in tensors if t.dim())


def proof(groups, part, device):
    """Yield the rows of the table. groups: one ep group of all ranks; part: two ep groups of half
    the ranks each, or of this rank alone. The options of Router are held in the tests."""
    n, ep = dist.get_world_size(), dist.get_world_size(part.ep)
    hops, nodes = partial(two_hops, nodes=groups[3:]), dist.get_world_size(groups.across)
    rows = {
        f"gather_tokens, ep {n}": (groups, gather_tokens, dict(k=2)),
        f"one_hop, ep {n}": (groups, one_hop, dict(k=2)),
        f"two_hops, {nodes} nodes of {n // nodes}": (groups, hops, dict(k=2)),
        f"one_hop, ep {ep} in dp {n}": (part, one_hop, dict(k=2)),
        "  one expert takes everything": (groups, one_hop, dict(k=1, renormalize=False, bias=[9])),
        "  balance loss and z-loss, padding": (
            part, one_hop, dict(k=2, balance=0.1, z=0.01, padded=True)),
    }  # fmt: skip
    for name, (which, path, layer) in rows.items():
        checked = check(which, path, device, **layer)
        yield Row(name, max(checked.errors.values()), checked.sent, checked.held)
    if n > 1:  # each loss a mean over its rank's tokens, each gradient over those who hold it
        gradient, right = check(groups, one_hop, device, times=n, k=2).pairs["experts.down"]
        averaged = gradient / dist.get_world_size(groups.replicas)
        yield Row("expert gradients, replicas' mean", relative_error(averaged, right), wrong=n - 1)


# ── run ──────────────────────────────────────────────────────────────────────────────────────


class History(nn.Embedding):
    """Maps bytes (b, S) to (b, S, D): the sum of an embedding for each of the last four bytes."""

    def forward(self, x_bS):
        last4_bS4 = nnf.pad(x_bS, (3, 0)).unfold(1, 4, 1)
        return super().forward(last4_bS4 + 256 * torch.arange(4, device=x_bS.device)).sum(2)


def build(groups, device, D=64, E=8, F=64, shared=64, **options):
    """A model of the next byte: a token chooses one of E experts beside a shared one."""
    torch.manual_seed(0)
    router = Router(D, E, 1, renormalize=False, group=groups.world, **options)
    layer, head = MoE(router, F, groups.ep, shared), nn.Linear(D, 256)
    return nn.Sequential(History(4 * 256, D), nn.RMSNorm(D), layer, nn.RMSNorm(D), head).to(device)


def training(model, rate, args, groups, device):
    """Train on text, with this rate of the bias; yield each step's loss, in nats per byte, and its
    load (2, E)."""
    n, rank, text = dist.get_world_size(), dist.get_rank(), read_text(args.text, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    for step in range(args.steps):
        whole = sample(text, step, args.batch, 64)
        x_bS, y_bS = (part.tensor_split(n)[rank].to(device) for part in whole)
        logits = model(x_bS).flatten(0, 1)
        loss = nnf.cross_entropy(logits, y_bS.flatten(), reduction="sum") / (args.batch * 64)
        loss.backward()
        reduce_gradients(model, groups.world, groups.replicas)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        # all_reduce(SUM) over dp, 1: the shares of the loss, for the reader
        dist.all_reduce(loss, group=groups.world)
        yield loss.item(), model[2].router.update_bias(rate)


def train(args, groups, device):
    """Train without and with a bias that evens the load; print what each run reached."""
    entropy = unigram_entropy(read_text(args.text, 0))
    say(f"\n{args.steps} steps, 8 experts; the unigram entropy of the text is {entropy:.3f}")
    say("rate of the bias   loss, first and last   busiest expert's tokens / mean, last ten steps")
    for rate in 0.0, 0.02:
        losses, loads = zip(*training(build(groups, device), rate, args, groups, device))
        chosen_E = sum(loads[-10:])[0].double()
        busiest = (chosen_E.max() / chosen_E.mean()).item()
        say(f"{rate:16}{losses[0]:15.3f}{losses[-1]:9.3f}{busiest:13.2f}")


def draw(rows, path):
    """Draw how many rows each rank sends to each rank, on each rung of the ladder."""
    from matplotlib.figure import Figure

    figure, n = Figure(figsize=(12, 3.4), layout="constrained"), len(rows["one_hop"])
    for axes, (name, rows_nn) in zip(figure.subplots(1, len(rows)), rows.items()):
        axes.imshow(rows_nn, cmap="Blues", vmin=0, vmax=2 * rows["one_hop"].max())
        for i in range(n * n):
            axes.text(i % n, i // n, rows_nn.flatten()[i].item(), ha="center", va="center")
        axes.set(title=f"{name}: rows", xlabel="to rank", ylabel="from rank")
        axes.set(xticks=range(n), yticks=range(n))
    figure.savefig(path, dpi=110)


def main(args, device):
    """Prove, then train (or draw); 0 if everything is as claimed."""
    n = dist.get_world_size()
    nodes = 1 + (n % 2 == 0)
    groups, part = make_groups(n, nodes, args.timeout), make_groups(n // nodes, 1, args.timeout)
    say(f"05 expert parallelism · {n} ranks · {dist.get_backend()} · {device.type}")
    broken = prove(list(proof(groups, part, device)), device)
    rows = rows_by_rank(check(groups, one_hop, device, k=4).kept_nsE, nodes)
    node_n = torch.arange(n) // (n // nodes)
    other_nn = node_n[:, None] != node_n
    one, two = (rows[hop][other_nn].sum() for hop in ("one_hop", "two_hops, across"))
    say(f"\nk 4: {one} rows cross to another node in one hop, {two} in two hops")
    if args.plot and dist.get_rank() == 0:
        draw(rows, args.plot)
        say(f"drew {args.plot}")
    elif args.steps and not args.plot:
        train(args, groups, device)
    return broken


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    if 8 % ranks:
        raise ValueError(f"{ranks} ranks do not divide 8 experts: use 1, 2, 4 or 8")
    if args.batch < ranks:
        raise ValueError(f"--batch {args.batch}: each of {ranks} ranks needs at least 1")
    read_text(args.text, at_least=65)


# ── launch kit: the same lines close chapters 01 to 06; a test keeps them identical ──────────

import argparse
import faulthandler
import inspect
import linecache
import logging
import math
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, namedtuple
from contextlib import ExitStack, suppress
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from pydoc_data.topics import topics
from unittest.mock import patch

import torch.multiprocessing as mp

LOST, WAITED = 3, 4  # exit status of a rank whose peer has gone, or has not come in time
Event = namedtuple("Event", "what group sent at")  # a call, a wait or a mark; bytes; seconds


class Ledger(ExitStack):
    """While open, prices each `torch.distributed` call of this rank as a ring would send it:
    `events` has the calls, waits and marks in order, `sent` the bytes by call."""

    PRICES = {  # call: (its arguments, n ranks, rank r) -> bytes that leave rank r
        "all_reduce": lambda a, n, r: 2 * (n - 1) / n * a["tensor"].nbytes,
        "all_gather_single": lambda a, n, r: (n - 1) * a["input_tensor"].nbytes,
        "reduce_scatter_single": lambda a, n, r: (n - 1) / n * a["input"].nbytes,
        "all_to_all_single": lambda a, n, r: a["input"].nbytes
        - a["input"][:1].nbytes * (a.get("input_split_sizes") or [len(a["input"]) / n] * n)[r],
        "broadcast": lambda a, n, r: a["tensor"].nbytes * ((r - a["group_src"]) % n < n - 1),
        "isend": lambda a, n, r: a["tensor"].nbytes,
        **dict.fromkeys(["irecv", "barrier"], lambda a, n, r: 0),
    }
    UNPRICED = "all_gather all_to_all gather reduce reduce_scatter scatter send recv".split()

    def __enter__(self):
        self.events, self.sent, wait = [], Counter(), dist.Work.wait
        names = [*self.PRICES, *self.UNPRICED]
        calls = {name: self._priced(name, getattr(dist, name)) for name in names}
        for module in (dist, dist.distributed_c10d):  # batch_isend_irecv looks in the latter
            self.enter_context(patch.multiple(module, **calls))
        marked = lambda work, *seconds: self.mark("wait") or wait(work, *seconds)
        self.enter_context(patch.object(dist.Work, "wait", marked))
        return self

    def mark(self, what, group=None, sent=0):
        name = (group or dist.group.WORLD).group_name
        self.events.append(Event(what, name, sent, time.perf_counter()))
        self.sent[what] += sent

    def _priced(self, name, call):
        def priced(*args, **kwargs):
            a = inspect.signature(call).bind(*args, **kwargs).arguments
            n, r = (ask(a.get("group")) for ask in (dist.get_world_size, dist.get_rank))
            self.mark(name, a.get("group"), self.PRICES[name](a, n, r))
            return call(*args, **kwargs)

        return priced


# A line of the proof: error beside the twin; bytes as (measured, formula) or None; the error that a
# row must show if it is wrong on purpose; the (least, greatest) error of a method that loses on
# purpose.
Row = namedtuple("Row", "name error sent held wrong bound", defaults=[None, None, 0.0, None])


def relative_error(value, reference):
    """max|value - reference| / max|reference|; of a reference of zeros, 0 if equal, else inf."""
    gap, size = (t.abs().max().item() if t.numel() else 0.0 for t in (value - reference, reference))
    return gap / size if size else math.inf if gap else 0.0


def prove(rows, device):
    """Print the table. Return 0 if on every rank each error is at most 1e-10, or as predicted, or
    inside its bound, and all bytes equal their formula; else 1."""
    off = lambda pair: abs(pair[0] - pair[1]) if pair else 0.0
    slack = lambda row: max(1e-6 * row.wrong, 1e-10)
    bounds = [x.bound or (x.wrong - slack(x), x.wrong + slack(x)) for x in rows]
    outside = [max(low - x.error, x.error - high) for x, (low, high) in zip(rows, bounds)]
    worst = [[x.error, x.wrong, o, off(x.sent), off(x.held)] for x, o in zip(rows, outside)]
    worst = torch.tensor(worst).double().nan_to_num(math.inf).to(device)
    # all_reduce(MAX) over all ranks, five numbers a row: the worst rank speaks for all
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
    say("error: max|difference| / max|one process|; bytes: of rank 0, sent as a ring sends them")
    say(f"{'':36}    error   bytes sent      formula   bytes held      formula")
    broken = 0
    for row, (error, wrong, outside, unsent, unheld) in zip(rows, worst.tolist()):
        holds = outside <= 0 and unsent < 0.5 and unheld < 0.5
        pairs = [[f"{x:,.0f}" for x in pair] if pair else "--" for pair in (row.sent, row.held)]
        note = f"  wrong on purpose: {wrong:.3g} predicted" if wrong else ""
        note += "  bounded: {:.3g} to {:.3g}".format(*row.bound) if row.bound else ""
        note += "" if holds else "  NOT AS CLAIMED"
        say(f"{row.name:36}{error:9.2g}{''.join(f'{x:>13}' for pair in pairs for x in pair)}{note}")
        broken |= not holds
    return int(broken)


class Disagreement(ValueError):
    """Ranks hold different things where all must hold the same."""


def agree(lines, group):
    """Raise Disagreement, with the first line that differs, unless all ranks have the same lines
    of text. One all-gather of a digest; the lines follow only where digests differ."""
    digest, n = sha256("\n".join(lines).encode()).digest(), dist.get_world_size(group)
    dist.all_gather_object(digests := [None] * n, digest, group=group)
    if len(set(digests)) > 1:
        dist.all_gather_object(texts := [None] * n, [*lines, "no more"], group=group)
        rank = next(r for r, text in enumerate(texts) if text != texts[0])
        here, first = next(pair for pair in zip(texts[rank], texts[0]) if pair[0] != pair[1])
        raise Disagreement(f"ranks disagree: rank {rank} has {here}, rank 0 has {first}")


def read_text(path, at_least):
    """The bytes of a file, or of Python's own help topics, as tokens of a vocabulary of 256.
    Raises ValueError where they cannot be read or are fewer than `at_least`."""
    try:
        text = Path(path).read_bytes() if path is not None else "\n".join(topics.values()).encode()
    except OSError as error:
        raise ValueError(f"--text {path}: {error.strerror}") from error
    if len(text) < at_least:
        raise ValueError(f"--text {path}: {len(text)} bytes, and one batch needs {at_least}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def unigram_entropy(text):
    """The loss, in nats per byte, of the best guess that looks at no context."""
    return torch.distributions.Categorical(torch.bincount(text).double()).entropy().item()


def sample(text, step, B, S):
    """The batch of a step, the same on all ranks: bytes (B, S), and the byte after each (B, S)."""
    starts_B1 = torch.randint(len(text) - S, (B, 1), generator=torch.Generator().manual_seed(step))
    windows = text[starts_B1 + torch.arange(S + 1)]
    return windows[:, :-1], windows[:, 1:]


def say(*words):
    """Print, on rank 0 alone."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def arguments(doc, ranks, steps, plot=None):
    """A parser with the flags of every chapter; `plot` says what its --plot draws."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    add, seconds = parser.add_argument, 120 if "RANK" in os.environ else 20
    add("--ranks", type=int, default=ranks, help="ranks to start, where torchrun did not")
    add("--steps", type=int, default=steps, help="steps to train after the proof; may be 0")
    add("--text", help="file to train on; default: Python's own help topics")
    add("--timeout", type=float, default=seconds, help="seconds that a collective may take")
    if plot:
        add("--plot", metavar="FILE", help=f"draw {plot} (png, pdf or svg); do not train")
    return parser


def launch(main, args, validate):
    """Run main(args, device) on every rank, torchrun's or args.ranks started here, and exit: 0 if
    each returned 0, 1 if not, 2 and a sentence if validate(args, ranks) raised ValueError."""
    torch.set_num_threads(1)  # a forked child must not inherit a pool of threads
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    ranks = int(os.environ.get("WORLD_SIZE", args.ranks))
    try:
        for flag, least in ("ranks", 1), ("steps", 0), ("timeout", 0.001):
            if not (value := vars(args).get(flag, least)) >= least:
                raise ValueError(f"--{flag} {value}: must be at least {least}")
        plot = Path(vars(args).get("plot") or "here.png")
        if plot.suffix not in (".png", ".pdf", ".svg") or not os.access(plot.parent, os.W_OK):
            raise ValueError(f"--plot {plot}: name a .png, .pdf or .svg in a folder to write to")
        validate(args, ranks)
    except ValueError as refusal:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(refusal, file=sys.stderr)
        sys.exit(2)
    if "RANK" in os.environ:
        _rank(int(os.environ["LOCAL_RANK"]), ranks, main, args)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    method = "fork" if sys.platform == "linux" and torch.cuda.device_count() < ranks else "spawn"
    with tempfile.TemporaryDirectory() as folder:
        run = mp.start_processes(_rank, (ranks, main, args, folder), ranks, False, True, method)
        try:
            while not run.join(grace_period=2):
                pass
        except mp.ProcessExitedException:  # join() has ended the other ranks by SIGTERM
            codes = [process.exitcode for process in run.processes]
            stacks = [Path(folder, str(rank)).read_text() for rank in range(ranks)]
            sys.exit(_what_went_wrong(codes, stacks))
    sys.exit(0)


def _what_went_wrong(codes, stacks):
    """Which signal ended a rank; or, if no rank told a fault of its own, where each one stood."""
    killed = {r: signal.Signals(-code).name for r, code in enumerate(codes) if code < -1}
    said = [f"rank {r} was ended by {by}" for r, by in killed.items() if by != "SIGTERM"]
    if 1 not in codes and (WAITED in codes or {*codes} <= {0, LOST, -signal.SIGTERM}):
        said = ["some ranks waited in vain for others; each one stood at"]
        for r, stack in enumerate(stacks):
            silent = killed.get(r) == "SIGKILL"  # it did not even answer the launcher's SIGTERM
            said.append(f"rank {r} of {len(codes)}: {'no answer' if silent else _place(stack)}")
    return "\n".join(said) or (1 if 1 in codes else max(codes))


def _place(stack):
    """The innermost line of a stack that belongs neither to a library nor to the Ledger."""
    for file, number in re.findall(r'File "(.+)", line (\d+)', stack):
        line = linecache.getline(file, int(number)).strip()
        if "/lib/python" not in file and not re.search(r"return call\(|wait\(work", line):
            return f"line {number} of {Path(file).name}: {line}"
    return "the end, it had returned"


def _rank(local, ranks, main, args, folder=None):
    """Meet the other ranks, run main, and leave with its exit status or with what went wrong."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    env, local_ranks = os.environ, int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    rank, on_gpu = int(env.get("RANK", local)), torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if local_ranks == ranks:  # one machine: the loopback address needs no network
        env.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    if folder:
        tempfile.tempdir = folder  # what a rank leaves behind goes with the launcher's folder
        report, store = open(f"{folder}/{rank}", "w"), dist.FileStore(f"{folder}/store", ranks)
        faulthandler.register(signal.SIGTERM, report, chain=True)  # says where it stood
    else:  # a restarted attempt must not read the addresses of the one before
        attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
        report, store = sys.stderr, dist.PrefixStore(attempt, next(dist.rendezvous("env://"))[0])
    try:
        given = dict(timeout=timedelta(seconds=args.timeout), rank=rank, world_size=ranks)
        dist.init_process_group("nccl" if on_gpu else "gloo", store=store, **given)
        agree([f"--{flag} {value}" for flag, value in vars(args).items()], dist.group.WORLD)
        code = main(args, device)
        dist.destroy_process_group()
    except BrokenPipeError:  # what read the output, such as `head`, has left
        code = 128 + signal.SIGPIPE
    except Exception as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until this has been told
        stack = "".join(reversed(traceback.format_tb(error.__traceback__)))
        code = 2 if isinstance(error, Disagreement) else 1
        if waited := re.search("by peer|ime(d )?out", str(error)):
            code = LOST if waited[0] == "by peer" else WAITED
            where = f"rank {rank} of {ranks} waited in vain at {_place(stack)}"
            print(stack if folder else where, file=report)
        elif store.add(repr(error), 1) == 1:  # what ranks have in common is told once
            told = error if code == 2 else traceback.format_exc()
            print(f"rank {rank} of {ranks}: {told}", file=sys.stderr)
        report.flush()
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(code)  # an ordinary exit may abort where a reference to a group is left



if __name__ == "__main__":
    import torch._dynamo  # noqa: F401  an optimizer loads it: once here, not in each forked rank

    parser = arguments(__doc__, ranks=4, steps=80, plot="rows from rank to rank on each rung")
    parser.add_argument("--batch", type=int, default=32, help="sequences of 64 bytes in a step")
    launch(main, parser.parse_args(), validate)
