"""05's layer beside the same experts on one process, and beside tokens gathered everywhere."""

import importlib

import torch
import torch.distributed as dist
from pairs import device, time_pair

ep = importlib.import_module("05_ep")
D, E, K, TOKENS = 512, 16, 2, 1024  # width, experts, choices, tokens a rank
NARROW, WIDE = 128, 1024  # experts' inner width: as narrow beside D as DeepSeek-V3's, and wide


class Gather(torch.autograd.Function):
    """Sends every rank's rows to every rank; backward adds up their gradients from all ranks. With
    `home`, forward adds up and backward sends. The sum is an all_to_all and an addition, because
    gloo's own reduce-scatter moves twice as many bytes.
    """

    @staticmethod
    def forward(ctx, x, group, home):
        ctx.hop, n = (group, home), dist.get_world_size(group)
        if home:
            parts = torch.empty_like(x)
            dist.all_to_all_single(parts, x.contiguous(), group=group)
            return parts.view(n, -1, *x.shape[1:]).sum(0)
        everyone = x.new_empty(n * len(x), *x.shape[1:])
        dist.all_gather_single(everyone, x.contiguous(), group=group)
        return everyone

    @staticmethod
    def backward(ctx, d_y):
        group, home = ctx.hop
        return Gather.apply(d_y, group, not home), None, None


def all_gathered(x_sD, chosen_sk, gates_sk, experts, group):
    """The naive layer: all tokens go to all ranks, and each rank returns its experts' results."""
    e, r = len(experts.down), dist.get_rank(group)
    x, expert, gates = (Gather.apply(t, group, False) for t in (x_sD, chosen_sk, gates_sk))
    pairs = [(expert == r * e + i).nonzero(as_tuple=True) for i in range(e)]
    token, choice = (torch.cat(parts) for parts in zip(*pairs))
    rows = experts(x[token], [len(t) for t, _ in pairs])
    y = torch.zeros_like(x).index_add(0, token, gates[token, choice][:, None] * rows)
    return Gather.apply(y, group, True)


def step(layer, x_BSD):
    """Return a function that runs forward and backward, from zero gradients."""

    def run():
        layer.zero_grad()
        x_BSD.grad = None
        layer(x_BSD).square().sum().backward()

    return run


def sent(run):
    """Return the bytes that a rank sends in a step, a mean over ranks."""
    with ep.Ledger() as ledger:
        run()
    total = torch.tensor(float(sum(ledger.sent.values())), device=device())
    dist.all_reduce(total, group=dist.group.WORLD)
    return total.item() / dist.get_world_size()


def build(path, F, group):
    """Build the layer, with the same weights on any number of ranks."""
    torch.manual_seed(0)
    return ep.MoE(ep.Router(D, E, K), F, group, path=path).to(device())


def pair(name, F, ours, theirs, their_layer):
    """Measure two steps with the same experts; their_layer is None on a rank without it."""
    layer, our_step = ours
    our_sent, their_sent = sent(our_step), sent(theirs)
    difference = 0.0
    if their_layer is not None:
        for weight, other in zip(layer.experts.parameters(), their_layer.experts.parameters()):
            gap = ep.relative_error(weight.grad, other.grad[: len(weight)])
            difference = max(difference, gap)
    shape = f"D {D}, F {F}, {E} experts, k {K}, {TOKENS} tokens a rank, forward and backward"
    return {
        "row": name,
        "ranks": dist.get_world_size(),
        "shape": shape,
        **time_pair(our_step, theirs, pairs=16),
        "ours_sent": our_sent,
        "theirs_sent": their_sent,
        "max_gradient_difference": difference,
    }


def rows(ranks):
    """Return two rows, each of forward and backward of a layer. Every rank calls this."""
    group, rank = dist.group.WORLD, dist.get_rank()
    x = torch.randn(ranks, TOKENS, D, generator=torch.Generator().manual_seed(1)).to(device())
    own = lambda: x[rank : rank + 1].clone().requires_grad_()

    narrow, naive = build(ep.one_hop, NARROW, group), build(all_gathered, NARROW, group)
    ours = narrow, step(narrow, own())
    name = "ep: one hop / every token to every rank"
    first = pair(name, NARROW, ours, step(naive, own()), naive)

    wide = build(ep.one_hop, WIDE, group)
    alone = build(ep.one_hop, WIDE, None) if rank == 0 else None
    theirs = step(alone, x.clone().requires_grad_()) if rank == 0 else lambda: None
    name = "ep: one hop / all ranks' tokens on one process"
    second = pair(name, WIDE, (wide, step(wide, own())), theirs, alone)
    return [first, second | {"note": f"{ranks} ranks share this machine's cores with that one"}]
