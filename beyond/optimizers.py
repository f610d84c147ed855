"""optimizers · What a step remembers, and where this memory may be cut

An optimizer keeps a state for each parameter, often larger than the parameter. n ranks can share
it: each rank steps its own pieces of the parameters, and remembers only what these pieces need.
Some rules look at one element at a time; they may be cut anywhere. Others look at a whole matrix.

    rank 0   weights P   state of pieces 0   steps pieces 0 ─┐ all-gather: every rank
    rank 1   weights P   state of pieces 1   steps pieces 1 ─┴ holds all new weights

    rule        remembers of a tensor (rows, columns)    elements                    may be cut
    adamw       means of g and g²                        2P                          anywhere
    lion        a mean of g                              P                           anywhere
    sophia      means of g and of the curvature          2P                          anywhere
    adamw_8bit  bytes for both means, maxima of 256      2P bytes + P/32 bytes       between blocks
    adafactor   means of g² by row and by column         rows + columns              by rows, + sums
    muon        a mean of g                              P                           not at all
    shampoo     g gᵀ, gᵀ g, their roots, adamw's means   2(rows² + columns² + P)     into blocks

    moves in a step                       elements that a rank sends
    gradients in, weights out             2(n-1) · pieces of the fullest rank: about 2(n-1)/n · P
    adafactor's sums, beside these        2(n-1)/n · (columns + 4) for each tensor
    a step in backward                    2(n-1)/n · P; it holds one gradient tensor, not P

    python beyond/optimizers.py                          four ranks, seven rules
    torchrun --nproc-per-node 4 beyond/optimizers.py     the same, started by torchrun

Guide: Fused operations · Async optimizer step · Frontier and the future · FAQ (Lion, WSD, 8-bit).
Sources: AdamW 1711.05101 · Lion 2302.06675 · Sophia 2305.14342 · 8-bit 2110.02861 · Adafactor
1804.04235 · Shampoo 1802.09568 and 2309.06497 · WSD 2404.06395 · Muon: Jordan 2024, a blog post
Questions  QM.1 * which mean is used when?   QM.2 ** which rules may be cut where?
           QM.3 *** what must be known before the first tensor may step?
"""
# n ranks · r this rank · B sequences · b sequences of this rank · S tokens of a sequence
# V vocabulary · P parameters

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
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(Path(__file__).resolve().parents[1]))
dp = importlib.import_module("01_dp")

BLOCK = 256  # elements that share a maximum in 8-bit states
SIDE = 64  # rows and columns of a Shampoo block, at most; large models take 1,024 to 8,192


# ── by hand: each rank steps its own rows ────────────────────────────────────────────────────

# Two ranks share a matrix, one row each. The gradient, summed over the ranks, is G. Lion's step is
# the sign of each element. Muon's step is the orthogonal matrix that is nearest to G.
#
#     G        signs, of the whole  signs, row by row  nearest, of the whole   nearest, row by row
#     1  0     1  0                 1  0               0.89 -0.45              1.00  0.00
#     1  1     1  1                 1  1               0.45  0.89              0.71  0.71
#
# A sign needs nothing but its own element. The nearest orthogonal matrix of a single row is the row
# divided by its length: the rank that has this row does not know its angle to the other row. So
# Lion's matrix may be cut between ranks, and Muon's may not.


def step_by_hand(w, gradient, direction, rate, group):
    """Step w (rows, columns), in place; each rank steps n-th part of the rows, and gets the others.

    `gradient` is this rank's part of a sum; `direction` maps a gradient to a step.
    """
    own_w = w.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()
    own_gradient = torch.empty_like(own_w)
    # reduce_scatter(SUM) over dp, P: this rank now holds the whole gradient of its rows
    dist.reduce_scatter_single(own_gradient, gradient, group=group)
    own_w -= rate * direction(own_gradient)
    # all_gather over dp, P/n from each: every rank now holds all rows as they are after the step
    dist.all_gather_single(w, own_w, group=group)


# ── rules that look at one element ───────────────────────────────────────────────────────────

# A rule changes w in place and keeps what it remembers in `state`, a dict of tensors that is empty
# before the first step. t counts steps from 1. Most rules shrink w by its decay apart from g.


def remembered(state, w, *names):
    """Return the state's tensors of these names; before the first step they are zeros like w."""
    return [state[k] if k in state else state.setdefault(k, torch.zeros_like(w)) for k in names]


def adam_direction(m, v, g, t, betas=(0.9, 0.95), eps=1e-8):
    """Update the means m of g and v of g², in place; return the direction of Adam's step t.

    Both means begin at zero: after t steps, the weights of all g add up to 1 - beta^t only.
    """
    m.lerp_(g, 1 - betas[0])
    v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    return (m / (1 - betas[0] ** t)).div_((v / (1 - betas[1] ** t)).sqrt_().add_(eps))


def adamw(w, g, state, t, rate, decay=0.1):
    """Step w by AdamW (arXiv:1711.05101, algorithm 2)."""
    direction = adam_direction(*remembered(state, w, "m", "v"), g, t)
    w.mul_(1 - rate * decay).sub_(direction, alpha=rate)


def lion(w, g, state, t, rate, betas=(0.9, 0.99), decay=0.1):
    """Step w by the sign of a mean (arXiv:2302.06675, algorithm 2).

    Every element moves by `rate`, which is 3 to 10 times below AdamW's. Where g is zero but for
    rounding, as that of the bias of attention's keys, the sign is noise.
    """
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


def hutchinson(loss_share, params, seed):
    """Estimate the diagonal of this rank's part of the Hessian as u · (Hessian u), tensor by tensor.

    u holds random signs, the same on all ranks, so the parts add up to the estimate of the whole.
    Its mean over u is the diagonal: u_i u_j has mean 0 for i != j. It costs a second backward.
    """
    draw = torch.Generator().manual_seed(seed)
    gradients = torch.autograd.grad(loss_share, params, create_graph=True)
    signs = [2 * torch.randint(2, p.shape, generator=draw).to(p) - 1 for p in params]
    return [u * Hu for u, Hu in zip(signs, torch.autograd.grad(gradients, params, signs))]


def gradient_of_own_labels(logits_bSV, uniform_bS, num_labels, params):
    """Compute this rank's part of the gradient for labels that the model draws itself.

    uniform_bS, in [0, 1), choose the labels. With g the sum over ranks, num_labels · g² has the
    diagonal of the Gauss-Newton matrix as its mean: such labels have gradients of mean zero, so the
    squares of single labels add up, and products of two labels do not count.
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
    means = []
    for k, signed in ("m", True), ("v", False):
        old = state.get(k), state.get(f"maxima of {k}"), dynamic_code(signed)
        means.append(restore(*old, w) if state else torch.zeros_like(w))
    direction = adam_direction(*means, g, t)
    w.mul_(1 - rate * decay).sub_(direction, alpha=rate)
    for mean, k, signed in zip(means, "mv", (True, False)):
        state[k], state[f"maxima of {k}"] = compress(mean, dynamic_code(signed))


# ── a rule of rows and columns: it may be cut by rows, if ranks share sums ───────────────────


def sum_of_ranks(x, group):
    """Return x, added up in place over the group if there is one."""
    if group is not None:
        # all_reduce(SUM) over dp, columns + 3 or 1: the sums over the rows of all ranks
        dist.all_reduce(x, group=group)
    return x


def adafactor(w, g, state, t, rate, group=None):
    """Step w by g / sqrt(v), with v rebuilt from its row and column means (arXiv:1804.04235).

    v[i, j] = row[i] · column[j] / mean(row). A vector counts as one column, and then v is exact.
    The ranks of `group` hold other rows of the same w. Four things need all rows: the column means,
    the mean of the rows' means, the size of w, and the size of the step, which is at most 1.
    """
    w, g = (x.view(len(x), -1) for x in (w, g))
    if not state:
        state.update(row=torch.zeros_like(w[:, :1]), column=w.new_zeros(w.shape[1]))
    new, eps = t**-0.8, torch.finfo(w.dtype).eps  # the mean forgets less as t grows
    row = state["row"].lerp_(g.square().mean(1, keepdim=True), new)
    numbers = torch.stack([row.sum(), w.square().sum(), row.new_tensor(len(row))])
    sums = sum_of_ranks(torch.cat([g.square().sum(0), numbers]), group)
    row_sum, w_squared, rows = sums[-3:]
    column = state["column"].lerp_(sums[:-3] / rows, new)
    v = row * column / (row_sum / rows).clamp(min=eps)
    direction = g * v.clamp(min=eps**2).rsqrt()
    elements = rows * len(column)
    squares = sum_of_ranks(direction.square().sum(), group)
    length = (squares / elements).sqrt().clamp(min=1)
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
        for side in "left", "right":
            state[f"{side} root"] = inverse_fourth_root(state[side])
    direction = state["left root"] @ g @ state["right root"]
    length = adam_direction(m, v, g, t).norm() / direction.norm().clamp(min=1e-30)
    w.mul_(1 - rate * decay).sub_(direction * length, alpha=rate)


RULES = {rule.__name__: rule for rule in
         (adamw, lion, sophia, adamw_8bit, adafactor, muon, shampoo)}  # fmt: skip


def state_bytes(rule, piece, itemsize):
    """Return by formula the bytes that a rule remembers of a piece, in elements of itemsize."""
    rows, columns = piece.shape()
    elements = rows * columns
    return {
        "adamw": 2 * elements * itemsize,
        "lion": elements * itemsize,
        "sophia": 2 * elements * itemsize,
        "adamw_8bit": 2 * elements + 2 * 4 * math.ceil(elements / BLOCK),
        "adafactor": (rows + columns) * itemsize,
        "muon": elements * itemsize,
        "shampoo": 2 * (rows**2 + columns**2 + elements) * itemsize,
    }[rule]


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
        """Return this piece of {name: tensor}: a view where the tensor is contiguous."""
        return tensors[self.name].reshape(self.seen_as)[self.slices]

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


class OneProcess:
    """An optimizer on one process: steps all pieces, each by the rule of its parameter.

    Args: params {name: tensor}, rules {name: function}, pieces. `states` has what is remembered,
    one dict for each piece.
    """

    def __init__(self, params, rules, pieces):
        self.params, self.rules, self.pieces, self.t = params, rules, pieces, 0
        self.states = [{} for _ in pieces]

    def own_parts(self, tensors):
        """Return the pieces of {name: tensor}."""
        return [piece.of(tensors) for piece in self.pieces]

    @torch.no_grad()
    def step(self, gradients, rate):
        """Take one step on {name: gradient}."""
        self.t += 1
        for piece, g, state in zip(self.pieces, self.own_parts(gradients), self.states):
            self.rules[piece.name](piece.of(self.params), g, state, self.t, rate)

    @torch.no_grad()
    def see_curvature(self, gradients, num_labels, beta=0.99):
        """Take {name: gradient} of labels that the model drew into the mean curvature h of Sophia.

        The sum over ranks comes first, the square after it.
        """
        for piece, g, state in zip(self.pieces, self.own_parts(gradients), self.states):
            _, h = remembered(state, piece.of(self.params), "m", "h")
            h.lerp_(num_labels * g.square(), 1 - beta)


class Sharded(OneProcess):
    """The same on n ranks: a rank steps layout[r], its own pieces, and remembers only these. It
    gives its part of the gradients to `step`, and after the step it holds all new weights."""

    def __init__(self, params, rules, layout, group):
        super().__init__(params, rules, layout[dist.get_rank(group)])
        self.layout, self.group = layout, group
        self.room = max(sum(math.prod(x.shape()) for x in pieces) for pieces in layout)

    def pack(self, tensors, pieces):
        """Lay pieces of {name: tensor} end to end, with zeros up to the room of the fullest rank."""
        parts = [next(iter(tensors.values())).new_empty(0), *(x.of(tensors) for x in pieces)]
        line = torch.cat([part.flatten() for part in parts])
        return F.pad(line, (0, self.room - len(line)))

    def unpack(self, line, pieces):
        """Return the pieces that `pack` laid end to end, each in its shape."""
        shapes = [x.of(self.params).shape for x in pieces]
        parts = line[: sum(map(math.prod, shapes))].split([math.prod(x) for x in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes)]

    def own_parts(self, tensors):
        """Sum {name: tensor} over the ranks, and return this rank's pieces of the sum."""
        rows = torch.cat([self.pack(tensors, pieces) for pieces in self.layout])
        own = rows.new_empty(self.room)
        # reduce_scatter(SUM) over dp, P: this rank now holds the sums of its own pieces
        dist.reduce_scatter_single(own, rows, group=self.group)
        return self.unpack(own, self.pieces)

    @torch.no_grad()
    def step(self, gradients, rate):
        super().step(gradients, rate)
        own = self.pack(self.params, self.pieces)
        rows = own.new_empty(len(self.layout), self.room)
        # all_gather over dp, P/n from each: every rank now holds all weights after the step
        dist.all_gather_single(rows.view(-1), own, group=self.group)
        for row, pieces in zip(rows, self.layout):
            for piece, values in zip(pieces, self.unpack(row, pieces)):
                piece.of(self.params).copy_(values)


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


# ── rates: a stable phase does not know where it ends ────────────────────────────────────────


def wsd(t, total, peak, warmup=4, decay=8):
    """Return the rate of step t (1 to total): warm up, stay, decay linearly over the last steps.

    Before the decay, no rate depends on `total`. So one run serves every length: copy its state
    anywhere in the stable phase and decay from there. A cosine depends on `total` from its first
    step on. Source: MiniCPM, arXiv:2404.06395, section 4.
    """
    return peak * min(1, t / warmup, (total - t + 1) / decay)


# ── from here on: proof, run, kit ────────────────────────────────────────────────────────────


class Task:
    """A small model, and one rank's share of its batches; by default, the whole batches."""

    def __init__(self, device, n=1, r=0, dtype=torch.float64, text=None, B=24, S=16):
        torch.manual_seed(0)
        self.model = dp.LanguageModel(D=32, layers=1, heads=2, S=S).to(device, dtype)
        self.model.blocks[0].self_attn.in_proj_bias.requires_grad_(False)  # see lion
        params = self.model.named_parameters()
        self.params = {name: param for name, param in params if param.requires_grad}
        self.shapes = {name: tuple(param.shape) for name, param in self.params.items()}
        self.text, self.B, self.S = dp.read_text(text, 65), B, S
        self.own = lambda whole: whole.tensor_split(n)[r].to(device)

    def batch(self, t):
        """Return this rank's bytes and labels of step t."""
        return map(self.own, dp.sample(self.text, t, self.B, self.S))

    def share(self, t):
        """Compute this rank's share of the loss of step t."""
        return dp.loss_share(self.model, *self.batch(t), self.B * self.S)

    def curvature(self, t):
        """Compute this rank's part of the gradients of labels that the model draws."""
        uniform_BS = torch.rand(self.B, self.S, generator=torch.Generator().manual_seed(t))
        given = self.own(uniform_BS), self.B * self.S, list(self.params.values())
        return gradient_of_own_labels(self.model(next(self.batch(t))), *given)

    def train(self, optimizer, rates, curvature_every=0, change=dict, seen=lambda loss: None):
        """Take a step for each rate. `change` maps gradients to others; `seen` gets each loss."""
        for t, rate in enumerate(rates, start=optimizer.t):
            if curvature_every and t % curvature_every == 0:
                parts = dict(zip(self.params, self.curvature(t)))
                optimizer.see_curvature(parts, self.B * self.S)
            share = self.share(t)
            seen(share.detach())
            parts = torch.autograd.grad(share, list(self.params.values()))
            optimizer.step(change(dict(zip(self.params, parts))), rate)
        return [param.detach() for param in self.params.values()]


def optimizer_of(task, method, group=None, pieces=None):
    """Return an optimizer of one process, or over a group, and the names of its rules."""
    names = choose(method, task.shapes)
    rules = RULES | {"adafactor": partial(adafactor, group=group)}
    rules = {parameter: rules[name] for parameter, name in names.items()}
    if group is None:
        return OneProcess(task.params, rules, pieces or cut(names, task.shapes, 1)[0]), names
    layout = cut(names, task.shapes, dist.get_world_size(group))
    return Sharded(task.params, rules, layout, group), names


def one_process(method, device, rates, pieces=None, **options):
    """Train the twin; return its weights. It steps whole tensors, or the given pieces."""
    task = Task(device)
    return task.train(optimizer_of(task, method, pieces=pieces)[0], rates, **options)


def beside_the_twin(method, group, device, rates):
    """Row: n ranks that step their own pieces, beside one process that steps whole tensors."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    task, every = Task(device, n, r), int(method == "sophia")
    optimizer, names = optimizer_of(task, method, group)
    with dp.Ledger() as ledger:
        found = task.train(optimizer, rates, every)
    error = dp.max_error(found, one_process(method, device, rates, curvature_every=every))
    sent = len(rates) * (2 + every) * (n - 1) * optimizer.room * 8
    if method == "adafactor":
        columns = [math.prod(shape[1:]) for shape in task.shapes.values()]
        sent += len(rates) * sum(2 * (n - 1) / n * (count + 4) * 8 for count in columns)
    held = sum(x.nbytes for state in optimizer.states for x in state.values())
    formula = sum(state_bytes(names[piece.name], piece, 8) for piece in optimizer.pieces)
    return dp.Row(method, error, (sum(ledger.sent.values()), sent), (held, formula))


def cut_wrongly(method, way, group, device, rates):
    """Row: n ranks whose pieces lack what the rule needs, beside one process that steps these."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    task, wanted = Task(device, n, r), one_process(method, device, rates)
    rules, layout = optimizer_of(task, method)[0].rules, way(task.shapes, n)
    found = task.train(Sharded(task.params, rules, layout, group), rates)
    predicted = one_process(method, device, rates, sum(layout, []))
    errors = [dp.max_error(values, wanted) for values in (found, predicted)]
    return dp.Row(f"{method}, {way.__name__}", errors[0], wrong=errors[1])


def sign_before_the_sum(group, device):
    """Row: each rank takes Lion's step on its own gradient, and then weights are averaged."""
    n, r, ends = dist.get_world_size(group), dist.get_rank(group), []
    for task in [Task(device), *(Task(device, n, i) for i in range(n))]:
        ends.append(task.train(optimizer_of(task, "lion")[0], [0.01]))
    wanted, mean = ends[0], [sum(tensors) / n for tensors in zip(*ends[1:])]
    found = [tensor / n for tensor in ends[1 + r]]
    for tensor in found:
        # all_reduce(SUM) over dp, P: the mean of weights that each rank moved by its own signs
        dist.all_reduce(tensor, group=group)
    errors = [dp.max_error(values, wanted) for values in (found, mean)]
    return dp.Row("lion, signs before the sum", errors[0], wrong=errors[1])


def in_backward(group, device, rates, limit=0.1):
    """Rows of the step in backward: plain, clipped in two passes, and clipped tensor by tensor."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    clip = lambda g, norm: g * (limit / norm).clamp(max=1)
    norm = lambda parts: torch.stack([g.square().sum() for g in parts.values()]).sum().sqrt()
    together = lambda parts: {name: clip(g, norm(parts)) for name, g in parts.items()}
    apart = lambda parts: {name: clip(g, g.norm()) for name, g in parts.items()}
    by_own_norm = lambda w, g, *rest: adamw(w, clip(g, g.norm()), *rest)
    for name, rule, bound, right, done in [
        ("adamw in backward", adamw, math.inf, dict, dict),
        ("  clipped, in two passes", adamw, limit, together, together),
        ("  each tensor by its own norm", by_own_norm, math.inf, together, apart),
    ]:
        task = Task(device, n, r)
        optimizer = InBackward(task.params, rule, group)
        with dp.Ledger() as ledger:
            for t, rate in enumerate(rates):
                optimizer.step(partial(task.share, t), rate, bound)
        wanted, predicted = (one_process("adamw", device, rates, change=x) for x in (right, done))
        sizes = [param.nbytes for param in task.params.values()]
        passes = len(rates) * (2 if bound < math.inf else 1)
        sent = sum(ledger.sent.values()), passes * 2 * (n - 1) / n * sum(sizes)
        error = dp.max_error(task.params.values(), wanted)
        wrong = dp.max_error(predicted, wanted)
        yield dp.Row(name, error, sent, (optimizer.most_held, max(sizes)), wrong)


def estimates(device):
    """Rows of what is estimated or rounded."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8, 96, generator=draw, dtype=torch.float64).to(device)
    scales, w = torch.linspace(-1, 3, 96).to(x), x[0].clone().requires_grad_()
    (found,) = hutchinson((scales * w**2).sum() / 2, [w], seed=1)
    yield dp.Row("hutchinson, a diagonal Hessian", dp.relative_error(found, scales))
    logits, chances = x[:1, :3].clone().requires_grad_(), x[0, :3].softmax(0)
    uniform = chances.cumsum(0) - chances / 2  # chooses each of the three labels once
    drawn = [gradient_of_own_labels(logits, u[None], 1, [logits])[0][0] for u in uniform]
    mean = sum(chance * g**2 for chance, g in zip(chances, drawn))
    yield dp.Row("g² of own labels, in the mean", dp.relative_error(mean, chances - chances**2))
    code = dynamic_code(signed=True)
    codes, maxima = compress(x, code)
    back = restore(codes, maxima, code, x)
    worst = ((back - x).view(-1, BLOCK).abs().amax(1) / maxima).max().item()
    yield dp.Row("8 bits, error / maximum of block", worst, bound=(0.002, 0.9 / 64 / 2 + 1e-6))
    changed = (compress(back, code)[0] != codes).double().mean().item()
    yield dp.Row("  of values that are codes", changed)
    off = (torch.linalg.svdvals(newton_schulz(x)) - 1).abs().max().item()
    yield dp.Row("newton_schulz, singular values", off, bound=(0.01, 0.32))


class Launches(TorchDispatchMode):
    """While open, counts the operations that torch dispatches: on a GPU, each is a launch or more."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += 1
        return operation(*args, **(kwargs or {}))


def launches(device, T=12):
    """Rows: adamw above, then torch's own by tensor, by lists (foreach) and in one call (fused).
    An error is that of the weights, plus 1 for each launch that the formula does not know."""
    lists = [[torch.full((5,), i + k / T, device=device).double() for k in range(1, T + 1)]
             for i in range(4)]  # fmt: skip
    options = dict(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    for name, kind, promised in [("adamw", None, 10 * T), ("torch's, foreach", "foreach", 13),
                                 ("torch's, fused", "fused", 2)]:  # fmt: skip
        w, g, m, v = copy.deepcopy(lists)
        times = [torch.tensor(1.0, device=device) for _ in w]
        with Launches() as counter:
            for x in zip(w, g, m, v) if kind is None else ():
                adamw(x[0], x[1], {"m": x[2], "v": x[3]}, 2, 0.01)
            if kind:
                importlib.import_module("torch.optim.adamw").adamw(w, g, m, v, [], times, **{kind: True}, amsgrad=False,
                                        maximize=False, **options)  # fmt: skip
        reference = w if kind is None else reference
        error = dp.max_error(w, reference) + abs(counter.count - promised)
        print(counter.count)
        yield dp.Row(f"{name}: {promised} launches", error)


def left_early(device, begun=5, total=14, planned=50):
    """Row: a run planned for 50 steps is copied after 5; the copy decays, and ends after 14."""
    short, long = ([wsd(t, T, 0.01) for t in range(1, T + 1)] for T in (total, planned))
    task = Task(device)
    optimizer, _ = optimizer_of(task, "adamw")
    task.train(optimizer, long[:begun])
    copied, its_optimizer = copy.deepcopy((task, optimizer))
    task.train(optimizer, long[begun : begun + 2])  # the long run goes on; the copy must not
    found = copied.train(its_optimizer, short[begun:])
    error = dp.max_error(found, one_process("adamw", device, short))
    return dp.Row(f"wsd, left after {begun} of {planned} steps", error)


def proof(group, device):
    """Yield the rows of the table."""
    rates = [0.01] * 3
    for method in RULES:
        yield beside_the_twin(method, group, device, rates)
    yield cut_wrongly("adamw_8bit", cut_flat, group, device, rates)
    for method in "adafactor", "muon", "shampoo":
        yield cut_wrongly(method, cut_rows, group, device, rates)
    yield sign_before_the_sum(group, device)
    yield from in_backward(group, device, rates)
    yield from estimates(device)
    yield from launches(device)
    yield left_early(device)


def train(args, group, device):
    """Train one model with every rule; print what the ranks remember beside the loss."""
    peaks = {"lion": 2e-3, "sophia": 2e-3, "adafactor": 0.1, "muon": 0.02}
    entropy, last = dp.unigram_entropy(dp.read_text(args.text, 65)), max(1, args.steps // 10)
    dp.say(f"\nunigram entropy {entropy:.3f}; loss: mean of the last {last} steps\n"
           "             peak rate   bytes of state a parameter, all ranks    loss")  # fmt: skip
    for method in RULES:
        task = Task(device, dist.get_world_size(group), dist.get_rank(group), torch.float32,
                    args.text, B=48)  # fmt: skip
        optimizer, _ = optimizer_of(task, method, group)
        losses, peak = [], peaks.get(method, 0.01)
        rates = [wsd(t, args.steps, peak) for t in range(1, args.steps + 1)]
        task.train(optimizer, rates, 10 * (method == "sophia"), seen=losses.append)
        held = sum(x.nbytes for state in optimizer.states for x in state.values())
        told = torch.stack([sum(losses[-last:]) / last, task.text.new_tensor(held).to(losses[0])])
        # all_reduce(SUM) over dp, 2: the shares of the loss, and the bytes of all ranks
        dist.all_reduce(told, group=group)
        size = sum(map(math.prod, task.shapes.values()))
        dp.say(f"{method:13}{peak:9.3f}{told[1] / size:25.2f}{told[0]:22.3f}")


def main(args, device):
    """Prove, then train with every rule; 0 if everything is as claimed."""
    group = dist.group.WORLD
    dp.say(f"optimizers · {dist.get_world_size()} ranks · {dist.get_backend()} · {device.type}")
    broken = dp.prove(list(proof(group, device)), device)
    if args.steps:
        train(args, group, device)
    return broken


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    if ranks > 16:
        raise ValueError(f"{ranks} ranks: the smallest matrix has 16 rows, so start at most 16")
    dp.read_text(args.text, at_least=65)


if __name__ == "__main__":
    dp.launch(main, dp.arguments(__doc__, ranks=4, steps=60).parse_args(), validate)
