"""optimizers · What a step remembers, and where this memory may be cut

An optimizer keeps a state for each parameter, often larger than the parameter itself. n ranks share
this state: each rank steps its own pieces of the parameters and remembers only what these pieces
need. Some rules look at one element at a time; they may be cut anywhere. Others look at a whole
matrix; they may not.

    rank 0   weights P   state of pieces 0   steps pieces 0 ─┐ all-gather: every rank
    rank 1   weights P   state of pieces 1   steps pieces 1 ─┤ holds all new weights
    ...                                                     ─┘

    rule        remembers of a tensor (rows, columns)       elements           may be cut
    adamw       means of g and g²                           2P                 anywhere
    lion        a mean of g                                 P                  anywhere
    sophia      means of g and of the curvature             2P                 anywhere
    adamw_8bit  codes of both means; maxima of 256          2P bytes + P/32    between blocks
    adafactor   means of g² by row and by column            rows + columns     by rows, with sums
    muon        a mean of g                                 P                  not at all
    shampoo     two squares, their roots, adamw's means     2(rows² + columns² + P)  into blocks

    moves in a step                    elements sent by each rank
    gradients in, weights out          2(n-1) · pieces of the fullest rank, about 2(n-1)/n · P
    adafactor's sums                   2(n-1)/n · (columns + 4) a tensor, more
    a step in backward                 2(n-1)/n · P; of gradients it holds one tensor, not P

    python beyond/optimizers.py                          four ranks, seven optimizers
    torchrun --nproc-per-node 4 beyond/optimizers.py     the same, started by torchrun

The run shows state beside loss at equal steps. It does not say which optimizer is best: rates were
not tuned, and the model is tiny.

Guide: Frontier and the future (there, "10-20% improvement" has no source) · FAQ (Lion saves half of
the moments: 4 of 16 bytes a parameter) · Fused operations · Async optimizer step · WSD.
Sources: AdamW 1711.05101 · Lion 2302.06675 · Sophia 2305.14342 · 8-bit 2110.02861 · Adafactor
1804.04235 · Shampoo 1802.09568, distributed 2309.06497 · WSD 2404.06395 · Muon: Jordan 2024 (blog).
Questions  QM.1 * which mean is used when?   QM.2 ** which rules may be cut where?
           QM.3 *** what must be known before the first tensor may step?
"""
# n ranks · r this rank · B sequences · b sequences of this rank · S tokens of a sequence
# D width · V vocabulary · F hidden units · P parameters

import copy
import importlib
import itertools
import math
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(Path(__file__).resolve().parents[1]))
dp = importlib.import_module("01_dp")

BLOCK = 256  # elements that share a maximum in 8-bit states
SIDE = 64  # rows and columns of a Shampoo block; large models take 1,024 to 8,192


# ── by hand: each rank steps its own rows ────────────────────────────────────────────────────

# Two ranks share a matrix, one row each. The gradient, summed over the ranks, is G. Lion's step is
# the sign of each element. Muon's step is the orthogonal matrix that is nearest to G.
#
#     G        sign, of the whole   sign, row by row   nearest, of the whole   nearest, row by row
#     1  0     1  0                 1  0               0.89 -0.45              1.00  0.00
#     1  1     1  1                 1  1               0.45  0.89              0.71  0.71
#
# A sign needs nothing but its own element. The nearest orthogonal matrix of a single row is the row
# divided by its length: the rank that has it cannot know how it stands to the other row. So Lion's
# matrix may be cut between ranks, and Muon's may not. The rest of this file is about that line.


def step_by_hand(w, gradient, direction, rate, group):
    """Step a matrix, in place, of which each rank steps an equal share of the rows.

    w (rows, columns) is the same on all ranks, gradient is this rank's part of a sum, and direction
    maps a gradient to a step. The rank remembers nothing of the other rows.
    """
    n, r = dist.get_world_size(group), dist.get_rank(group)
    own_w = w.chunk(n)[r].clone()
    own_gradient = torch.empty_like(own_w)
    # reduce_scatter(SUM) over dp, P: this rank now holds the whole gradient of its rows
    dist.reduce_scatter_single(own_gradient, gradient, group=group)
    own_w -= rate * direction(own_gradient)
    # all_gather over dp, P/n from each: every rank now holds all rows as they are after the step
    dist.all_gather_single(w, own_w, group=group)


# ── rules that look at one element ───────────────────────────────────────────────────────────

# A rule changes w in place and keeps what it remembers in `state`, a dict of tensors that is empty
# before the first step. t counts steps from 1. All rules shrink w first ("decoupled" decay), so the
# decay is not divided by a mean of gradients.


def remembered(state, w, *names):
    """Return the state's tensors of these names; before the first step they are zeros like w."""
    return [state[k] if k in state else state.setdefault(k, torch.zeros_like(w)) for k in names]


def adam_direction(m, v, g, t, betas=(0.9, 0.95), eps=1e-8):
    """Update the means m of g and v of g², in place; return the direction of Adam's step t.

    Both means begin at zero. After t steps their weights add up to 1 - beta^t, so they are divided
    by it.
    """
    m.lerp_(g, 1 - betas[0])
    v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    return (m / (1 - betas[0] ** t)).div_((v / (1 - betas[1] ** t)).sqrt_().add_(eps))


def adamw(w, g, state, t, rate, decay=0.1):
    """Step w by AdamW (arXiv:1711.05101, algorithm 2)."""
    direction = adam_direction(*remembered(state, w, "m", "v"), g, t)
    w.mul_(1 - rate * decay).sub_(direction, alpha=rate)


def lion(w, g, state, t, rate, betas=(0.9, 0.99), decay=0.1):
    """Step w by the sign of a mean (arXiv:2302.06675, algorithm 2). Every element moves by `rate`,
    so Lion takes a rate 3 to 10 times below AdamW's."""
    (m,) = remembered(state, w, "m")
    # QM.1 * Lion has two betas and one mean. Which beta makes the step, which one the memory?
    #      hint: the step follows the gradient of now more closely than the memory does
    direction = m.lerp(g, 1 - betas[0]).sign_()
    w.mul_(1 - rate * decay).sub_(direction, alpha=rate)
    m.lerp_(g, 1 - betas[1])  # after the step: the step above needs the old mean
    # /QM.1


def sophia(w, g, state, t, rate, beta=0.96, gamma=0.05, eps=1e-12, decay=0.1):
    """Step w by m / (gamma h), at most 1 in each element (arXiv:2305.14342, algorithm 3).

    h is a mean of the curvature. Where it is small or negative, the step is a sign, as Lion's. The
    authors' code has rate' · clip(m / h', c) instead: the same with rate = rate' c, gamma h = c h'.
    """
    m, h = remembered(state, w, "m", "h")
    m.lerp_(g, 1 - beta)
    direction = (m / (gamma * h).clamp_(min=eps)).clamp_(-1, 1)
    w.mul_(1 - rate * decay).sub_(direction, alpha=rate)


def see_curvature(w, estimate, state, beta=0.99):
    """Take a new estimate of the diagonal of the Hessian into Sophia's mean h."""
    remembered(state, w, "m", "h")[1].lerp_(estimate, 1 - beta)


def hutchinson(loss_share, params, seed):
    """Estimate the diagonal of this rank's part of the Hessian as u · (Hessian u), tensor by tensor.

    u holds random signs, the same on all ranks; the parts then add up to the estimate of the whole.
    The mean over u is the diagonal, because u_i u_j has mean 0 for i != j. Needs two backwards.
    """
    draw = torch.Generator().manual_seed(seed)
    gradients = torch.autograd.grad(loss_share, params, create_graph=True)
    signs = [2 * torch.randint(2, p.shape, generator=draw).to(p) - 1 for p in params]
    return [u * Hu for u, Hu in zip(signs, torch.autograd.grad(gradients, params, signs))]


def gradient_of_own_labels(logits_bSV, uniform_bS, num_labels, params):
    """Compute this rank's part of the gradient for labels that the model draws itself.

    uniform_bS are numbers in [0, 1) that choose the labels. Let g be the sum over ranks. Then
    num_labels · g² has the diagonal of the Gauss-Newton matrix as its mean: of such labels the
    gradient has mean zero, so labels add up their squares. Square after the sum over ranks.
    """
    below_bSV = logits_bSV.softmax(-1).cumsum(-1) <= uniform_bS[..., None]
    labels_bS = below_bSV.sum(-1).clamp(max=logits_bSV.shape[-1] - 1)
    nats = F.cross_entropy(logits_bSV.flatten(0, -2), labels_bS.flatten(), reduction="sum")
    return torch.autograd.grad(nats / num_labels, params)


# ── a rule that looks at a block: states of eight bits ───────────────────────────────────────


def dynamic_code(signed):
    """Return the 256 sorted values that a byte can stand for: seven decades up to 1, and 0.

    The decade up to 1 has 64 values of each sign, the one below it 32, and so on to 1. Without
    signs, each decade has twice as many. Source: Dettmers et al., arXiv:2110.02861, section 1.3.
    """
    values = [torch.zeros(1), torch.ones(1)]
    for k in range(7):
        edges = torch.linspace(0.1, 1, (1 if signed else 2) * 2**k + 1)
        middles = 10.0 ** (k - 6) * (edges[:-1] + edges[1:]) / 2
        values += [middles, -middles] if signed else [middles]
    return torch.cat(values).sort()[0]


def compress(x, code):
    """Return a byte for each element of x, and the largest |x| of each block in fp32."""
    blocks = F.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    maxima = blocks.abs().amax(1).float()
    code = code.to(x)
    scaled = blocks / maxima.to(x).clamp(min=1e-30)[:, None]
    nearest = torch.bucketize(scaled, (code[1:] + code[:-1]) / 2).to(torch.uint8)
    return nearest.flatten()[: x.numel()], maxima


def restore(codes, maxima, code, like):
    """Return the values that the bytes stand for, in the shape and dtype of `like`."""
    sizes = maxima.to(like).repeat_interleave(BLOCK)[: codes.numel()]
    return (code.to(like)[codes.long()] * sizes).view(like.shape)


def adamw_8bit(w, g, state, t, rate, decay=0.1):
    """Step w by AdamW, with both means kept as bytes between steps (arXiv:2110.02861)."""
    codes = {"m": dynamic_code(signed=True), "v": dynamic_code(signed=False)}
    means = [restore(*state[k], codes[k], w) if state else torch.zeros_like(w) for k in codes]
    direction = adam_direction(*means, g, t)
    w.mul_(1 - rate * decay).sub_(direction, alpha=rate)
    state.update({k: compress(mean, codes[k]) for k, mean in zip(codes, means)})


# ── a rule of rows and columns: it may be cut by rows, if ranks share sums ───────────────────


def adafactor(w, g, state, t, rate, total=lambda x: x):
    """Step w by g / sqrt(v), with v rebuilt from its row and column means (arXiv:1804.04235).

    v[i, j] = row[i] · column[j] / mean(row). A vector counts as one column, and then v is exact.
    `total` adds up a tensor over the ranks that hold other rows of the same w. Three numbers need
    all rows: the column means, the size of w, and the size of the step, which is at most 1.
    """
    w, g = (x.view(len(x), -1) for x in (w, g))
    if not state:
        state.update(row=torch.zeros_like(w[:, :1]), column=w.new_zeros(w.shape[1]))
    new, eps = t**-0.8, torch.finfo(w.dtype).eps  # the mean forgets less as t grows
    row = state["row"].lerp_(g.square().mean(1, keepdim=True), new)
    numbers = torch.stack([row.sum(), w.square().sum(), row.new_tensor(len(row))])
    sums = total(torch.cat([g.square().sum(0), numbers]))
    row_sum, w_squared, rows = sums[-3:]
    column = state["column"].lerp_(sums[:-3] / rows, new)
    v = row * column / (row_sum / rows).clamp(min=eps)
    direction = g * v.clamp(min=eps**2).rsqrt()
    elements = rows * len(column)
    length = (total(direction.square().sum()) / elements).sqrt().clamp(min=1)
    size_of_w = (w_squared / elements).sqrt().clamp(min=1e-3)
    w.sub_(direction * (min(rate, t**-0.5) * size_of_w / length))


# ── rules that look at a whole matrix ────────────────────────────────────────────────────────


def newton_schulz(x, steps=5):
    """Push all singular values of a matrix (rows, columns) towards 1; the directions stay.

    Each step maps a singular value s to 3.4445 s - 4.7750 s³ + 2.0315 s⁵. After five steps, values
    of 0.02 to 1 lie between 0.68 and 1.21. It needs products only, and these suit a GPU.
    """
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (2.0315 * gram @ gram - 4.7750 * gram) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


def muon(w, g, state, t, rate, momentum=0.95, decay=0.1):
    """Step a matrix by its mean gradient with all singular values near 1 (Jordan 2024, blog).

    Hidden matrices only: embeddings, the head and vectors take AdamW. Large models run the products
    in bf16; here they run in w's own dtype.
    """
    (m,) = remembered(state, w, "m")
    m.lerp_(g, 1 - momentum)
    direction = newton_schulz(g.lerp(m, momentum))
    w.mul_(1 - rate * decay).sub_(direction, alpha=rate * max(1, w.shape[0] / w.shape[1]) ** 0.5)


def inverse_fourth_root(square):
    """Return the symmetric X with X⁴ = square^-1, for a symmetric positive matrix."""
    values, vectors = torch.linalg.eigh(square)
    return vectors * values.clamp(min=1e-30) ** -0.25 @ vectors.T


def shampoo(w, g, state, t, rate, every=10, eps=1e-6, decay=0.1):
    """Step a matrix by left^-1/4 · g · right^-1/4, as long as Adam's step would be.

    left adds up g gᵀ, right adds up gᵀ g; their roots are renewed every `every` steps. The product
    is (right ⊗ left)^-1/4 applied to g as one vector, without ever holding a P by P matrix. The
    length of another rule's step is called grafting. Sources: arXiv:1802.09568, arXiv:2309.06497.
    """
    m, v = remembered(state, w, "m", "v")
    if t == 1:
        for side, length in zip(("left", "right"), w.shape):
            state[side] = eps * torch.eye(length, dtype=w.dtype, device=w.device)
    state["left"] += g @ g.T
    state["right"] += g.T @ g
    if (t - 1) % every == 0:
        state["roots"] = [inverse_fourth_root(state[side]) for side in ("left", "right")]
    left, right = state["roots"]
    direction = left @ g @ right
    length = adam_direction(m, v, g, t).norm() / direction.norm().clamp(min=1e-30)
    w.mul_(1 - rate * decay).sub_(direction * length, alpha=rate)


RULES = {rule.__name__: rule for rule in
         (adamw, lion, sophia, adamw_8bit, adafactor, muon, shampoo)}  # fmt: skip

# what a rule remembers of a piece (rows, columns) whose elements have so many bytes
STATE_BYTES = {
    "adamw": lambda rows, columns, size: 2 * rows * columns * size,
    "lion": lambda rows, columns, size: rows * columns * size,
    "sophia": lambda rows, columns, size: 2 * rows * columns * size,
    "adamw_8bit": lambda rows, columns, size: 2 * (
        rows * columns + 4 * math.ceil(rows * columns / BLOCK)),
    "adafactor": lambda rows, columns, size: (rows + columns) * size,
    "muon": lambda rows, columns, size: rows * columns * size,
    "shampoo": lambda rows, columns, size: 2 * (rows**2 + columns**2 + rows * columns) * size,
}  # fmt: skip


def choose(method, shapes):
    """Return {parameter: name of its rule}. A rule decides by the whole tensor, never by a piece.

    Muon is for hidden matrices. Eight bits are for tensors of at least 4,096 elements that are not
    embeddings (arXiv:2110.02861, section 2.3). What a method does not take is stepped by AdamW.
    """
    fits = {
        "muon": lambda name, shape: len(shape) == 2 and name not in ("token.weight", "head.weight"),
        "shampoo": lambda name, shape: len(shape) == 2,
        "adamw_8bit": lambda name, shape: math.prod(shape) >= 4096 and name != "token.weight",
    }.get(method, lambda name, shape: True)
    return {name: method if fits(name, shape) else "adamw" for name, shape in shapes.items()}


# ── who steps what: pieces of parameters, and three ways to cut ──────────────────────────────


class Piece(NamedTuple):
    """A part of a parameter: its name, the shape in which to see it, and slices of that shape."""

    name: str
    seen_as: tuple
    slices: tuple

    def of(self, tensors):
        """Return the view of this piece of {name: tensor}."""
        return tensors[self.name].view(self.seen_as)[self.slices]

    def shape(self):
        """Return (rows, columns); a vector is one column."""
        lengths = [part.stop - part.start for part in self.slices]
        return lengths[0], math.prod(lengths[1:])


def cut_flat(shapes, n, block=1):
    """Lay all tensors end to end and cut the line into n equal runs, as ZeRO-1 and FSDP1 do.

    A cut inside a tensor moves back to a multiple of `block`, counted from the tensor's start.
    Returns a list of pieces for each rank.
    """
    layout, start, end = [[] for _ in range(n)], 0, sum(map(math.prod, shapes.values()))
    for name, shape in shapes.items():
        length = math.prod(shape)
        cuts = [min(max(end * r // n - start, 0), length) for r in range(n + 1)]
        cuts = [cut if cut == length else cut // block * block for cut in cuts]
        for own, first, last in zip(layout, cuts, cuts[1:]):
            if first < last:
                own.append(Piece(name, (length,), (slice(first, last),)))
        start += length
    return layout


def cut_rows(shapes, n):
    """Cut each tensor by rows, as FSDP2 does; every rank has a piece of each, in the same order."""
    layout = [[] for _ in range(n)]
    for name, (rows, *rest) in shapes.items():
        for r, own in enumerate(layout):
            of_rank = slice(rows * r // n, rows * (r + 1) // n)
            own.append(Piece(name, (rows, *rest), (of_rank, *(slice(0, x) for x in rest))))
    return layout


def cut_whole(shapes, n, side=None):
    """Give each matrix, or each of its blocks of at most side by side, to one rank: the largest
    first, and always to the rank that has the fewest elements."""
    pieces, elements = [], lambda piece: math.prod(piece.shape())
    for name, shape in shapes.items():
        ranges = [[slice(a, min(a + (side or length), length)) for a in
                   range(0, length, side or length)] for length in shape]  # fmt: skip
        pieces += [Piece(name, tuple(shape), slices) for slices in itertools.product(*ranges)]
    layout = [[] for _ in range(n)]
    for piece in sorted(pieces, key=elements, reverse=True):
        min(layout, key=lambda own: sum(map(elements, own))).append(piece)
    return layout


def cut(rules, shapes, n):
    """Return the pieces of each rank, cut so that n ranks take the step of one process."""
    layout = [[] for _ in range(n)]
    for rule in dict.fromkeys(rules.values()):
        fitting = {name: shape for name, shape in shapes.items() if rules[name] == rule}
        # QM.2 ** Each rule looks at an element, a block, rows and columns, or a matrix. How may the
        #      tensors of a rule be cut?
        #      hint: a piece must hold all that its new elements depend on, or ranks must share it
        parts = {
            "adamw_8bit": partial(cut_flat, block=BLOCK),
            "adafactor": cut_rows,
            "muon": cut_whole,
            "shampoo": partial(cut_whole, side=SIDE),
        }.get(rule, cut_flat)(fitting, n)
        # /QM.2
        for own, part in zip(layout, parts):
            own += part
    return layout


def sum_over(group):
    """Return the function that adds up a tensor over the group, in place."""

    def total(x):
        # all_reduce(SUM) over dp, columns + 3 or 1: the sums over the rows of all ranks
        dist.all_reduce(x, group=group)
        return x

    return total


class Sharded:
    """An optimizer of n ranks: gradients are summed to whoever steps their piece, each rank steps
    its own pieces, and all ranks get all new weights.

    Args: params {name: tensor}, the same on all ranks; rules {name: function}; layout, the pieces
    of each rank. `states` has what this rank remembers, one dict for each of its pieces.
    """

    def __init__(self, params, rules, layout, group):
        self.params, self.rules, self.layout, self.group = params, rules, layout, group
        self.own, self.t = layout[dist.get_rank(group)], 0
        self.states = [{} for _ in self.own]
        self.room = max(sum(math.prod(x.shape()) for x in pieces) for pieces in layout)

    def pack(self, tensors, pieces):
        """Lay the pieces of {name: tensor} end to end, with zeros up to the fullest rank's room."""
        line = torch.cat([self.any.new_empty(0), *(x.of(tensors).flatten() for x in pieces)])
        return F.pad(line, (0, self.room - len(line)))

    @property
    def any(self):
        return next(iter(self.params.values()))

    def unpack(self, line, pieces):
        """Return the pieces that were packed, each in its shape."""
        shapes = [x.of(self.params).shape for x in pieces]
        parts = line[: sum(map(math.prod, shapes))].split([math.prod(x) for x in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes)]

    def reduce(self, tensors):
        """Sum {name: tensor} over ranks; return this rank's pieces of the sum."""
        rows = torch.cat([self.pack(tensors, pieces) for pieces in self.layout])
        own = rows.new_empty(self.room)
        # reduce_scatter(SUM) over dp, P: this rank now holds the sums of its own pieces
        dist.reduce_scatter_single(own, rows, group=self.group)
        return self.unpack(own, self.own)

    @torch.no_grad()
    def step(self, gradients, rate):
        """Take one step on this rank's part {name: tensor} of the gradients."""
        self.t += 1
        for piece, g, state in zip(self.own, self.reduce(gradients), self.states):
            self.rules[piece.name](piece.of(self.params), g, state, self.t, rate)
        lines = self.any.new_empty(len(self.layout), self.room)
        # all_gather over dp, P/n from each: every rank now holds all weights after the step
        dist.all_gather_single(lines.view(-1), self.pack(self.params, self.own), group=self.group)
        for line, pieces in zip(lines, self.layout):
            for piece, values in zip(pieces, self.unpack(line, pieces)):
                piece.of(self.params).copy_(values)

    @torch.no_grad()
    def see_curvature(self, gradients, num_labels):
        """Take the gradients of labels that the model drew itself into Sophia's states."""
        for piece, g, state in zip(self.own, self.reduce(gradients), self.states):
            see_curvature(piece.of(self.params), num_labels * g.square(), state)


def nbytes(x):
    """Count the bytes of all tensors in a nest of dicts and lists."""
    if torch.is_tensor(x):
        return x.nbytes
    return sum(map(nbytes, x.values() if isinstance(x, dict) else x))


# ── a step in backward: no gradient waits for the others ─────────────────────────────────────


class InBackward:
    """Steps a parameter as soon as backward has its gradient, and then frees the gradient. So the
    gradients never exist together: the most that is held is the largest tensor, not P.

    Two things become impossible. Micro-batches cannot be added up: each backward is a step. And the
    norm of all gradients, which clipping needs, is known only when the first tensors have stepped.
    So `step` runs backward itself, once, or twice where it shall clip.
    """

    def __init__(self, params, rule, group):
        self.params, self.rule, self.group, self.t, self.most_held = params, rule, group, 0, 0
        self.states = {name: {} for name in params}
        for name, param in params.items():
            param.register_post_accumulate_grad_hook(partial(self.ready, name))

    @torch.no_grad()
    def ready(self, name, param):
        """Sum one gradient over ranks, use it, free it; autograd calls this method."""
        held = sum(p.grad.nbytes for p in self.params.values() if p.grad is not None)
        self.most_held = max(self.most_held, held)
        # all_reduce(SUM) over dp, one tensor: every rank now holds the sum of this gradient
        dist.all_reduce(param.grad, group=self.group)
        self.use(name, param)
        param.grad = None

    def step_one(self, name, param, rate, scale):
        """Step one parameter by its gradient times scale."""
        self.rule(param, param.grad * scale, self.states[name], self.t, rate)

    def step(self, loss_share, rate, max_norm=math.inf):
        """Take one step; `loss_share` runs a forward and returns this rank's share of the loss."""
        squares, scale = [], 1.0
        self.t += 1
        # QM.3 *** All gradients together shall have a norm of at most max_norm. When is the norm
        #      known, and what has become of the gradients by then?
        #      hint: a gradient that was freed can be computed again, while no weight has changed
        if max_norm < math.inf:
            self.use = lambda name, param: squares.append(param.grad.square().sum())
            loss_share().backward()
            scale = (max_norm / torch.stack(squares).sum().sqrt()).clamp(max=1)
        self.use = partial(self.step_one, rate=rate, scale=scale)
        loss_share().backward()
        # /QM.3


# ── fewer launches: the same ten operations on lists of tensors, or all in one ───────────────


def adamw_foreach(w, g, m, v, t, rate, betas=(0.9, 0.95), eps=1e-8, decay=0.1):
    """Step lists of tensors by AdamW, in place: ten calls, however many tensors there are."""
    torch._foreach_lerp_(m, g, 1 - betas[0])
    torch._foreach_mul_(v, betas[1])
    torch._foreach_addcmul_(v, g, g, 1 - betas[1])
    direction = torch._foreach_div(m, 1 - betas[0] ** t)
    scale = torch._foreach_div(v, 1 - betas[1] ** t)
    torch._foreach_sqrt_(scale)
    torch._foreach_add_(scale, eps)
    torch._foreach_div_(direction, scale)
    torch._foreach_mul_(w, 1 - rate * decay)
    torch._foreach_add_(w, direction, alpha=-rate)


def adamw_fused(w, g, m, v, t, rate, betas=(0.9, 0.95), eps=1e-8, decay=0.1):
    """Step lists of tensors by AdamW in torch's one call; t is a list of tensors, one for each."""
    options = dict(beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=decay)
    torch._fused_adamw_(w, g, m, v, [], t, lr=rate, amsgrad=False, maximize=False, **options)


class Launches(TorchDispatchMode):
    """While open, counts the operations that torch dispatches; on a GPU, each is a launch or more.
    A foreach operation counts once, although it may launch several kernels for a long list."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += 1
        return operation(*args, **(kwargs or {}))


# ── rates: a stable phase does not know where it ends ────────────────────────────────────────


def wsd(t, total, peak, warmup=4, decay=4):
    """Return the rate of step t (1 to total): warm up, stay, decay linearly over the last steps.

    Before the decay, no rate depends on `total`. So one run serves every length: copy its state
    anywhere in the stable phase and decay from there. Source: MiniCPM, arXiv:2404.06395, section 4.
    """
    return peak * min(1, t / warmup, (total - t + 1) / decay)


def cosine(t, total, peak, warmup=4):
    """Return the rate of step t: warm up, then half a cosine to a tenth of the peak at `total`."""
    return peak * min(t / warmup, 0.55 + 0.45 * math.cos(math.pi * t / total))


# ── from here on: proof, run, kit ────────────────────────────────────────────────────────────


class LanguageModel(nn.Module):
    """Maps bytes (B, S) to logits of the next byte (B, S, V), by the last three bytes."""

    def __init__(self, D=32, F=64, V=256):
        super().__init__()
        self.token, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.mix, self.back = nn.Linear(3 * D, F), nn.Linear(F, D)

    def forward(self, x_BS):
        x_BSD = self.token(F.pad(x_BS, (2, 0)))
        seen_BSD = torch.cat([x_BSD[:, 2:], x_BSD[:, 1:-1], x_BSD[:, :-2]], dim=-1)
        return self.head(self.back(torch.tanh(self.mix(seen_BSD))))


class OneProcess:
    """The twin: one process that steps all pieces; it has Sharded's methods and sends nothing."""

    def __init__(self, params, rules, pieces):
        self.params, self.rules, self.pieces, self.t = params, rules, pieces, 0
        self.states = [{} for _ in pieces]

    @torch.no_grad()
    def step(self, gradients, rate):
        """Step every piece by its part of the gradients {name: tensor}."""
        self.t += 1
        for x, state in zip(self.pieces, self.states):
            self.rules[x.name](x.of(self.params), x.of(gradients), state, self.t, rate)

    @torch.no_grad()
    def see_curvature(self, gradients, num_labels):
        """Take the gradients of labels that the model drew itself into Sophia's states."""
        for x, state in zip(self.pieces, self.states):
            see_curvature(x.of(self.params), num_labels * x.of(gradients).square(), state)


class Task:
    """A model, and this rank's share of its batches; without a group, the whole batches."""

    def __init__(self, device, group=None, dtype=torch.float64, text=None, B=24, S=16):
        torch.manual_seed(0)
        self.model = LanguageModel().to(device, dtype)
        self.params, self.device = dict(self.model.named_parameters()), device
        self.shapes = {name: tuple(param.shape) for name, param in self.params.items()}
        self.text, self.B, self.S = dp.read_text(text, 65), B, S
        n, r = (dist.get_world_size(group), dist.get_rank(group)) if group else (1, 0)
        self.own = lambda whole: whole.tensor_split(n)[r].to(device)

    def share(self, t):
        """Compute this rank's share of the loss of step t."""
        x_bS, y_bS = map(self.own, dp.sample(self.text, t, self.B, self.S))
        return dp.loss_share(self.model, x_bS, y_bS, self.B * self.S)

    def gradients(self, t):
        """Compute this rank's part of the gradients of step t, by name."""
        parts = torch.autograd.grad(self.share(t), list(self.params.values()))
        return {name: part.contiguous() for name, part in zip(self.params, parts)}

    def train(self, optimizer, rates, curvature_every=0):
        """Take a step for each rate, from the optimizer's own t on."""
        for rate in rates:
            t = optimizer.t
            if curvature_every and t % curvature_every == 0:
                x_bS = self.own(dp.sample(self.text, t, self.B, self.S)[0])
                draw = torch.Generator().manual_seed(t)
                uniform_bS = self.own(torch.rand(self.B, self.S, generator=draw))
                given = self.model(x_bS), uniform_bS, self.B * self.S, list(self.params.values())
                parts = map(torch.Tensor.contiguous, gradient_of_own_labels(*given))
                optimizer.see_curvature(dict(zip(self.params, parts)), self.B * self.S)
            optimizer.step(self.gradients(t), rate)
        return [param.detach() for param in self.params.values()]


def functions(names, group=None):
    """Return {parameter: rule}; over a group, adafactor's rules share their sums."""
    shared = {"adafactor": partial(adafactor, total=sum_over(group))} if group else {}
    return {parameter: (RULES | shared)[name] for parameter, name in names.items()}


def beside_the_twin(method, group, device, rates, layout=None):
    """Train n ranks and the twin. Returns the error beside the twin, bytes sent as (measured,
    formula), bytes of the states likewise, and the error of one process that steps the pieces of
    `layout`, by default those of `cut`."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    task, twin, pieces = Task(device, group), Task(device), Task(device)
    names, every = choose(method, task.shapes), int(method == "sophia")
    alone = functions(names)
    rules = alone if layout else functions(names, group)
    layout = layout(task.shapes, n) if layout else cut(names, task.shapes, n)
    optimizer = Sharded(task.params, rules, layout, group)
    with dp.Ledger() as ledger:
        found = task.train(optimizer, rates, every)
    whole = cut(names, task.shapes, 1)[0]
    wanted = twin.train(OneProcess(twin.params, alone, whole), rates, every)
    cheap = pieces.train(OneProcess(pieces.params, alone, sum(layout, [])), rates, every)
    calls = len(rates) * (3 if every else 2)
    sums = sum(2 * (n - 1) / n * (shape[1:] or (1,))[0] + 2 * (n - 1) / n * 4
               for shape in task.shapes.values()) * (method == "adafactor" and rules is not alone)
    sent = 8 * (calls * (n - 1) * optimizer.room + len(rates) * sums)
    held = sum(STATE_BYTES[names[x.name]](*x.shape(), 8) for x in layout[r])
    return (dp.max_error(found, wanted), (sum(ledger.sent.values()), sent),
            (nbytes(optimizer.states), held), dp.max_error(cheap, wanted))  # fmt: skip


def proof(group, device):
    """Yield the rows of the table."""
    rates = [0.01] * 3
    for method in RULES:
        error, sent, held, _ = beside_the_twin(method, group, device, rates)
        yield dp.Row(method, error, sent, held)
    for method, layout, name in [
        ("adamw_8bit", cut_flat, "adamw_8bit cut inside a block"),
        ("adafactor", cut_rows, "adafactor by rows, without the sums"),
        ("muon", cut_rows, "muon by rows"),
        ("shampoo", cut_rows, "shampoo by rows"),
    ]:
        error, _, _, predicted = beside_the_twin(method, group, device, rates, layout)
        yield dp.Row(name, error, wrong=predicted)
    yield sign_before_the_sum(group, device)
    yield from in_backward(group, device)
    yield from estimates(device)
    yield from launches(device)
    yield from schedules(group, device)


def sign_before_the_sum(group, device, rate=0.01):
    """Row: each rank takes Lion's step on its own gradient, and then weights are averaged."""
    n, wanted = dist.get_world_size(group), Task(device)
    tasks = [Task(device) for _ in range(n)]
    for r, task in enumerate(tasks):
        task.own = lambda whole, r=r: whole.tensor_split(n)[r].to(device)
    here = Task(device, group)
    for task in (here, wanted, *tasks):
        OneProcess(task.params, {x: lion for x in task.params}, cut_rows(task.shapes, 1)[0]).step(
            task.gradients(0), rate)  # fmt: skip
    for param in here.params.values():
        # all_reduce(SUM) over dp, P: the sum of the weights, each moved by its own signs
        dist.all_reduce(param.data, group=group)
        param.data /= n
    mean = [sum(parts) / n for parts in zip(*(task.params.values() for task in tasks))]
    reference = list(wanted.params.values())
    found, predicted = (dp.max_error(x, reference) for x in (here.params.values(), mean))
    return dp.Row("lion: signs before the sum", found, wrong=predicted)


def in_backward(group, device, max_norm=0.1, steps=3):
    """Rows of the step in backward: plain, clipped in two passes, and clipped tensor by tensor."""
    n, largest = dist.get_world_size(group), lambda task: max(p.nbytes for p in task.params.values())
    clip = lambda g, norm: g * (max_norm / norm).clamp(max=1)
    norm_of = lambda parts: torch.stack([g.square().sum() for g in parts]).sum().sqrt()
    together = lambda parts: {k: clip(g, norm_of(parts.values())) for k, g in parts.items()}
    apart = lambda parts: {k: clip(g, g.norm()) for k, g in parts.items()}

    def twin(change):
        task = Task(device)
        rules = {name: adamw for name in task.params}
        optimizer = OneProcess(task.params, rules, cut_rows(task.shapes, 1)[0])
        for t in range(steps):
            optimizer.step(change(task.gradients(t)), 0.01)
        return list(task.params.values())

    own_norm = lambda w, g, *rest: adamw(w, clip(g, g.norm()), *rest)
    for name, rule, bound, reference, wrong in [
        ("step in backward", adamw, math.inf, lambda parts: parts, None),
        ("  clipped, in two passes", adamw, max_norm, together, None),
        ("  each tensor clipped by its own norm", own_norm, math.inf, together, apart),
    ]:
        task = Task(device, group)
        optimizer = InBackward(task.params, rule, group)
        with dp.Ledger() as ledger:
            for t in range(steps):
                optimizer.step(partial(task.share, t), 0.01, bound)
        whole = sum(param.nbytes for param in task.params.values())
        sent = 2 * (n - 1) / n * whole * steps * (2 if bound < math.inf else 1)
        expected = twin(reference)
        predicted = dp.max_error(twin(wrong), expected) if wrong else 0.0
        yield dp.Row(name, dp.max_error(task.params.values(), expected),
                     (sum(ledger.sent.values()), sent), (optimizer.most_held, largest(task)),
                     wrong=predicted)  # fmt: skip


def estimates(device):
    """Rows of what is estimated or rounded."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8, 96, generator=draw, dtype=torch.float64).to(device)
    scales = torch.linspace(-1, 3, 96, dtype=torch.float64, device=device)
    w = x[0].clone().requires_grad_()
    (found,) = hutchinson((scales * w**2).sum() / 2, [w], seed=1)
    yield dp.Row("hutchinson, of a diagonal Hessian", dp.relative_error(found, scales))
    logits = x[:1, :3].clone().requires_grad_()
    chances = logits.detach().softmax(-1)[0]
    edges = torch.cat([chances.new_zeros(1), chances.cumsum(0)])
    middles = ((edges[1:] + edges[:-1]) / 2)[:, None]  # one number for each of the three labels
    drawn = [gradient_of_own_labels(logits, u, 1, [logits])[0][0] for u in middles]
    mean = sum(chance * g**2 for chance, g in zip(chances, drawn))
    yield dp.Row("own labels: mean of g² over all", dp.relative_error(mean, chances - chances**2))
    for signed, values in (True, x), (False, x**2):
        code = dynamic_code(signed)
        codes, maxima = compress(values, code)
        back = restore(codes, maxima, code, values)
        gaps = (code[1:] - code[:-1]).max().item()
        off = (F.pad(back - values, (0, 0)).view(-1, BLOCK).abs().amax(1) / maxima).max().item()
        again = compress(back, code)[0]
        name = "8 bits, signed" if signed else "8 bits, unsigned"
        yield dp.Row(name, off, bound=(gaps / 8, gaps / 2))
        yield dp.Row("  of values that are codes", (again != codes).double().mean().item())
    values = torch.linalg.svdvals(newton_schulz(x))
    yield dp.Row("newton_schulz: singular values", (values - 1).abs().max().item(),
                 bound=(0.01, 0.32))  # fmt: skip


def launches(device, rate=0.01):
    """Rows: AdamW tensor by tensor, on lists, and in one call, on 6 and on 12 tensors."""
    for T in 6, 12:
        torch.manual_seed(T)
        make = lambda: [torch.randn(5, T, dtype=torch.float64).to(device) for _ in range(T)]
        w, g, m, v = make(), make(), make(), [x.square() for x in make()]
        for name, formula in ("adamw", 10 * T), ("adamw_foreach", 10), ("adamw_fused", 1):
            lists = copy.deepcopy([w, g, m, v])
            steps = [torch.tensor(2.0, device=device) for _ in range(T)]
            with Launches() as counter:
                if name == "adamw":
                    for w_, g_, m_, v_ in zip(*lists):
                        adamw(w_, g_, {"m": m_, "v": v_}, 2, rate)
                else:
                    globals()[name](*lists, steps if name == "adamw_fused" else 2, rate)
            reference = lists[0] if name == "adamw" else reference
            yield dp.Row(f"{name}, {T} tensors: {counter.count} launches",
                         dp.max_error(lists[0], reference) + abs(counter.count - formula))  # fmt: skip


def schedules(group, device, begun=5, total=8):
    """Rows: a run planned for 50 steps is left after 5, and ends after 8, beside a run planned so."""
    n = dist.get_world_size(group)
    for schedule, name in (wsd, "wsd: left after 5 of 50 steps"), (cosine, "cosine: the same"):
        short, long = ([schedule(t, T, 0.01) for t in range(1, T + 1)] for T in (total, 50))
        left = long[:begun] + short[begun:]
        task, ends = Task(device, group), []
        layout = cut_flat(task.shapes, n)
        optimizer = Sharded(task.params, {k: adamw for k in task.params}, layout, group)
        task.train(optimizer, long[:begun])
        weights, states = copy.deepcopy([[*task.params.values()], optimizer.states])
        task.train(optimizer, long[begun:begun + 2])  # the long run goes on, and is then left
        for param, saved in zip(task.params.values(), weights):
            param.data.copy_(saved)
        optimizer.states, optimizer.t = states, begun
        found = task.train(optimizer, short[begun:])
        for rates in short, left:
            twin = Task(device)
            rules = {name: adamw for name in twin.params}
            ends.append(twin.train(OneProcess(twin.params, rules, cut_rows(twin.shapes, 1)[0]), rates))
        wanted, predicted = ends
        yield dp.Row(name, dp.max_error(found, wanted), wrong=dp.max_error(predicted, wanted))


def main(args, device):
    """Prove, then train with every optimizer; 0 if everything is as claimed."""
    group = dist.group.WORLD
    dp.say(f"optimizers · {dist.get_world_size()} ranks · {dist.get_backend()} · {device.type}")
    return dp.prove(list(proof(group, device)), device)


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    if ranks > 24:
        raise ValueError(f"{ranks} ranks: the proof has 24 sequences, so start at most 24")
    dp.read_text(args.text, at_least=65)


if __name__ == "__main__":
    dp.launch(main, dp.arguments(__doc__, ranks=4, steps=60).parse_args(), validate)
