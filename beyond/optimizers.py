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
    a step in backward                    2(n-1)/n · P, twice if it clips; holds one gradient

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

import importlib
import itertools
import math
import signal
import sys
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads ends it without a trace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

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
    """Step w (rows, columns), in place: each rank steps its share of the rows by `direction` of the
    summed gradient, and gets the other rows from the other ranks."""
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
    """Update the means m of g and v of g², in place; return the direction of Adam's step t. The
    means begin at zero: after t steps, the weights of all g add up to 1 - beta^t only."""
    m.lerp_(g, 1 - betas[0])
    v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    return (m / (1 - betas[0] ** t)).div_((v / (1 - betas[1] ** t)).sqrt_().add_(eps))


def adamw(w, g, state, t, rate, decay=0.1):
    """Step w by AdamW (arXiv:1711.05101, algorithm 2)."""
    direction = adam_direction(*remembered(state, w, "m", "v"), g, t)
    w.mul_(1 - rate * decay).sub_(direction, alpha=rate)


def adamw_fused(w, g, m, v, steps, rate, betas=(0.9, 0.95), eps=1e-8, decay=0.1):
    """Step lists of tensors by torch's AdamW, in one call; `steps` holds t for each, as a tensor.
    adamw above makes ten calls a tensor. (torch's foreach: nine for a list of any length.)"""
    options = dict(beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=decay)
    torch._fused_adamw_(w, g, m, v, [], steps, lr=rate, amsgrad=False, maximize=False, **options)


def lion(w, g, state, t, rate, betas=(0.9, 0.99), decay=0.1):
    """Step w by the sign of a mean (arXiv:2302.06675, algorithm 2). Every element moves by `rate`,
    3 to 10 times below AdamW's, also where g should be zero and is the noise of rounding."""
    (m,) = remembered(state, w, "m")
    # QM.1 * Lion has two betas and one mean. Which beta makes the step, which one the memory?
    #      hint: the step follows the gradient of now more closely than the memory does
    direction = m.lerp(g, 1 - betas[0]).sign_()
    w.mul_(1 - rate * decay).sub_(direction, alpha=rate)
    m.lerp_(g, 1 - betas[1])  # after the step: the step above needs the old mean
    # /QM.1


def sophia(w, g, state, t, rate, beta=0.96, gamma=0.05, eps=1e-12, decay=0.1):
    """Step w by m / (gamma h), at most 1 in each element (arXiv:2305.14342, algorithm 3), with h a
    mean of the curvature. Where h is small or negative, the step is a sign, as Lion's. The authors'
    code, rate' · clip(m / h', c), is the same where rate = rate' c and gamma h = c h'."""
    m, h = remembered(state, w, "m", "h")
    m.lerp_(g, 1 - beta)
    direction = (m / (gamma * h).clamp_(min=eps)).clamp_(-1, 1)
    w.mul_(1 - rate * decay).sub_(direction, alpha=rate)


def hutchinson(loss_share, params, seed):
    """Estimate the diagonal of this rank's part of the Hessian as u · (Hessian u). The u are random
    signs, the same on all ranks, so the parts of all ranks add up to the estimate of the whole. Its
    mean over u is the diagonal: u_i u_j has mean 0 for i != j. It costs a second backward."""
    draw = torch.Generator().manual_seed(seed)
    gradients = torch.autograd.grad(loss_share, params, create_graph=True)
    signs = [2 * torch.randint(2, p.shape, generator=draw).to(p) - 1 for p in params]
    inner = sum((g * u).sum() for g, u in zip(gradients, signs))
    return [u * Hu for u, Hu in zip(signs, torch.autograd.grad(inner, params))]


def gradient_of_own_labels(logits_bSV, uniform_bS, num_labels, params):
    """Compute this rank's part of the gradient for labels that the model draws; uniform_bS, in
    [0, 1), choose them. With g the sum of all parts, num_labels · g² estimates the diagonal of the
    Gauss-Newton matrix: such labels have gradients of mean 0, so products of two add nothing."""
    below_bSV = logits_bSV.softmax(-1).cumsum(-1) <= uniform_bS[..., None]
    labels_bS = below_bSV.sum(-1).clamp(max=logits_bSV.shape[-1] - 1)
    nats = F.cross_entropy(logits_bSV.flatten(0, -2), labels_bS.flatten(), reduction="sum")
    return torch.autograd.grad(nats / num_labels, params)


# ── a rule that looks at a block: a byte for each element, a maximum for each block ──────────


def dynamic_code(signed):
    """Return the 256 sorted values that a byte stands for (arXiv:2110.02861, section 1.3): 0, and
    seven decades up to 1, with 1, 2, 4 ... 64 values of each sign, or twice so many of one sign."""
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
    scaled, code = blocks / maxima.to(x).clamp(min=1e-30)[:, None], code.to(x)
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


# ── rules that look at rows and columns, or at a whole matrix ────────────────────────────────


def sum_of_ranks(x, group):
    """Return x, added up in place over the group if there is one."""
    if group is not None:
        # all_reduce(SUM) over dp, columns + 3 or 1: the sums over the rows of all ranks
        dist.all_reduce(x, group=group)
    return x


def adafactor(w, g, state, t, rate, group=None):
    """Step w by g / sqrt(v), v[i, j] = row[i] · column[j] / mean(row) (arXiv:1804.04235). A vector
    is one column, for which v is exact. The ranks of `group` hold other rows of the same w: of all
    rows come the column means, the mean of row, and the sizes of w and of the step, at most 1."""
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


def newton_schulz(x, steps=5):
    """Push the singular values s of a matrix towards 1; the directions stay. A step maps each s to
    3.4445 s - 4.7750 s³ + 2.0315 s⁵; five steps bring all from 0.02 to 1 between 0.68 and 1.14."""
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (2.0315 * gram @ gram - 4.7750 * gram) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


def muon(w, g, state, t, rate, momentum=0.95, decay=0.1):
    """Step a hidden matrix by its mean gradient with all singular values near 1 (Jordan 2024).
    Embeddings, the head and vectors take AdamW. Large models run the products in bf16."""
    (m,) = remembered(state, w, "m")
    m.lerp_(g, 1 - momentum)
    direction = newton_schulz(g.lerp(m, momentum))
    w.mul_(1 - rate * decay).sub_(direction, alpha=rate * max(1, w.shape[0] / w.shape[1]) ** 0.5)


def inverse_fourth_root(square):
    """Return the symmetric X with X⁴ = square^-1, for a symmetric positive matrix."""
    values, vectors = torch.linalg.eigh(square)
    return vectors * values.clamp(min=1e-30) ** -0.25 @ vectors.T


def shampoo(w, g, state, t, rate, every=10, eps=1e-6, decay=0.1):
    """Step a matrix by left^-1/4 · g · right^-1/4, as far as Adam would step (grafting). left adds
    up g gᵀ, right gᵀ g; their roots are renewed every `every` steps. The product equals
    (right ⊗ left)^-1/4 on g as one vector, and no P by P matrix is held (arXiv:1802.09568)."""
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


RULES = {f.__name__: f for f in (adamw, lion, sophia, adamw_8bit, adafactor, muon, shampoo)}


def state_bytes(rule, piece, size):
    """Return by formula the bytes that a rule remembers of a piece, in elements of `size` bytes."""
    rows, columns = piece.shape()
    P = rows * columns
    return dict(adamw=2 * P * size, lion=P * size, sophia=2 * P * size, muon=P * size,
                adafactor=(rows + columns) * size, adamw_8bit=2 * P + 8 * math.ceil(P / BLOCK),
                shampoo=2 * (rows**2 + columns**2 + P) * size)[rule]  # fmt: skip


def choose(method, shapes):
    """Return {parameter: name of its rule}, AdamW where the method does not take the whole tensor.
    Eight bits are for 4,096 elements or more, and not for embeddings (arXiv:2110.02861)."""
    fits = {
        "muon": lambda name, shape: len(shape) == 2 and name.startswith("blocks."),
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

    def of(self, tensors):  # a view where the tensor is contiguous
        return tensors[self.name].reshape(self.seen_as)[self.slices]

    def shape(self):  # (rows, columns); a vector is one column
        lengths = [part.stop - part.start for part in self.slices]
        return lengths[0], math.prod(lengths[1:])


def cut_flat(shapes, n, block=1):
    """Return the pieces of each rank: all tensors lie end to end, in n equal runs, as in ZeRO-1 and
    FSDP1. A cut inside a tensor moves back to a multiple of `block` from the tensor's start."""
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
    """Cut each tensor by rows, as FSDP2 does: every rank has a piece of each, in the same order."""
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
        #      hint: a piece must hold all that its new elements depend on, or ranks must share it;
        #      BLOCK and SIDE limit two of the rules
        parts = {
            "adamw_8bit": partial(cut_flat, block=BLOCK),
            "adafactor": cut_rows, "muon": cut_whole,
            "shampoo": partial(cut_whole, side=SIDE),
        }.get(rule, cut_flat)(fitting, n)  # fmt: skip
        # /QM.2
        for own, part in zip(layout, parts):
            own += part
    return layout


class Sharded:
    """An optimizer of n ranks: rank r steps layout[r], its pieces of params {name: tensor}, by
    rules {name: function}, and remembers only theirs, a dict for each piece in `states`. Without a
    group, it is the optimizer of one process, and layout has one list of pieces."""

    def __init__(self, params, rules, layout, group=None):
        self.params, self.rules, self.layout, self.group = params, rules, layout, group
        self.pieces, self.t = layout[dist.get_rank(group) if group else 0], 0
        self.states = [{} for _ in self.pieces]
        self.room = max(sum(math.prod(x.shape()) for x in pieces) for pieces in layout)

    def split(self, line, pieces):
        """Return the pieces that lie end to end in a line, as views."""
        shapes = [x.of(self.params).shape for x in pieces]
        parts = line[: sum(map(math.prod, shapes))].split([math.prod(x) for x in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes)]

    def pack(self, tensors, pieces):
        """Lay pieces of {name: tensor} end to end, with zeros up to the fullest rank's room."""
        line = next(iter(tensors.values())).new_zeros(self.room)
        for place, piece in zip(self.split(line, pieces), pieces):
            place.copy_(piece.of(tensors))
        return line

    def own_parts(self, tensors):
        """Return this rank's pieces of {name: tensor}, summed over the ranks."""
        if not self.group:
            return [piece.of(tensors) for piece in self.pieces]
        rows = torch.cat([self.pack(tensors, pieces) for pieces in self.layout])
        own = rows.new_empty(self.room)
        # reduce_scatter(SUM) over dp, P: this rank now holds the sums of its own pieces
        dist.reduce_scatter_single(own, rows, group=self.group)
        return self.split(own, self.pieces)

    @torch.no_grad()
    def step(self, gradients, rate):
        """Take one step on this rank's part {name: tensor} of the gradients."""
        self.t += 1
        for piece, g, state in zip(self.pieces, self.own_parts(gradients), self.states):
            self.rules[piece.name](piece.of(self.params), g, state, self.t, rate)
        if self.group:
            own = self.pack(self.params, self.pieces)
            rows = own.new_empty(len(self.layout), self.room)
            # all_gather over dp, P/n from each: every rank now holds all weights after the step
            dist.all_gather_single(rows.view(-1), own, group=self.group)
            for row, pieces in zip(rows, self.layout):
                for values, piece in zip(self.split(row, pieces), pieces):
                    piece.of(self.params).copy_(values)

    @torch.no_grad()
    def see_curvature(self, gradients, num_labels, beta=0.99):
        """Take {name: gradient} of labels that the model drew, summed and squared, into h."""
        for piece, g, state in zip(self.pieces, self.own_parts(gradients), self.states):
            _, h = remembered(state, piece.of(self.params), "m", "h")
            h.lerp_(num_labels * g.square(), 1 - beta)


# ── a step in backward: no gradient waits for the others ─────────────────────────────────────


class InBackward:
    """Steps a parameter as soon as backward has its gradient, and then frees the gradient, so one
    gradient is held and not all. Two things become impossible. Micro-batches cannot be added up:
    each backward is a step. And the norm of all gradients is known only when all tensors but the
    last have stepped. So `step` runs backward itself: once, or twice if it shall clip."""

    def __init__(self, params, rule, group):
        self.params, self.rule, self.group, self.t, self.most_held = params, rule, group, 0, 0
        self.states = {name: {} for name in params}
        for name, param in params.items():
            param.register_post_accumulate_grad_hook(partial(self.ready, name))

    @torch.no_grad()
    def ready(self, name, param):
        """Sum one gradient over ranks, use it, and free it; autograd calls this method."""
        held = sum(p.grad.nbytes for p in self.params.values() if p.grad is not None)
        self.most_held = max(self.most_held, held)
        # all_reduce(SUM) over dp, one tensor: every rank now holds the sum of this gradient
        dist.all_reduce(param.grad, group=self.group)
        self.use(name, param.grad)
        param.grad = None

    def step(self, loss_share, rate, max_norm=math.inf):
        """Take one step; `loss_share` runs a forward and returns this rank's share of the loss."""
        squares, scale, self.t = [], 1.0, self.t + 1
        # QM.3 *** All gradients together shall have a norm of at most max_norm. When is the norm
        #      known, and what has become of the gradients by then?
        #      hint: a gradient that was freed can be computed again, while no weight has changed
        if max_norm < math.inf:
            self.use = lambda name, g: squares.append(g.square().sum())
            loss_share().backward()
            scale = (max_norm / torch.stack(squares).sum().sqrt()).clamp(max=1)
        # /QM.3
        def step_one(name, g):
            self.rule(self.params[name], g * scale, self.states[name], self.t, rate)

        self.use = step_one
        loss_share().backward()


# ── rates: a stable phase does not know where it ends ────────────────────────────────────────


def wsd(t, total, peak, warmup=4, decay=8):
    """Return the rate of step t, from 1 to total: warm up, stay, decay (arXiv:2404.06395, section
    4). Before the decay no rate depends on `total`, as a cosine's does from the start. So one run
    serves every length: copy its state anywhere in the stable phase, and decay from there."""
    return peak * min(1, t / warmup, (total - t + 1) / decay)


# ── from here on: proof, run, kit ────────────────────────────────────────────────────────────


class Task:
    """A small model, and rank r's share of its batches; by default, whole batches."""

    def __init__(self, device, n=1, r=0, dtype=torch.float64, text=None, B=8, S=16):
        torch.manual_seed(0)
        self.model = dp.LanguageModel(D=33, layers=1, heads=3, S=S).to(device, dtype)
        self.model.blocks[0].self_attn.in_proj_bias.requires_grad_(False)  # a key's gets only noise
        self.params = {k: p for k, p in self.model.named_parameters() if p.requires_grad}
        self.shapes = {name: tuple(param.shape) for name, param in self.params.items()}
        self.text, self.B, self.S = dp.read_text(text, 65), B, S
        self.own = lambda whole: whole.tensor_split(n)[r].to(device)

    def batch(self, t):
        return map(self.own, dp.sample(self.text, t, self.B, self.S))

    def share(self, t):
        return dp.loss_share(self.model, *self.batch(t), self.B * self.S)

    def curvature(self, t):
        uniform_BS = torch.rand(self.B, self.S, generator=torch.Generator().manual_seed(t))
        given = self.own(uniform_BS), self.B * self.S, list(self.params.values())
        return gradient_of_own_labels(self.model(next(self.batch(t))), *given)

    def train(self, optimizer, rates, curvature_every=0, change=dict, seen=lambda loss: None):
        """Take a step for each rate. `change` maps gradients to others; `seen` gets each loss."""
        for t, rate in enumerate(rates, start=optimizer.t):
            if curvature_every and t % curvature_every == 0:
                optimizer.see_curvature(dict(zip(self.params, self.curvature(t))), self.B * self.S)
            share = self.share(t)
            seen(share.detach())
            parts = torch.autograd.grad(share, list(self.params.values()))
            optimizer.step(change(dict(zip(self.params, parts))), rate)
        return [param.detach() for param in self.params.values()]


def optimizer_of(task, method, group=None, pieces=None):
    """Return an optimizer over a group, or of one process, and the names of its rules."""
    names = choose(method, task.shapes)
    rules = RULES | {"adafactor": partial(adafactor, group=group)}
    rules = {parameter: rules[name] for parameter, name in names.items()}
    layout = cut(names, task.shapes, dist.get_world_size(group) if group else 1)
    return Sharded(task.params, rules, [pieces] if pieces else layout, group), names


@cache
def one_process(method, device, rates, way=None, n=1, **options):
    """Train the twin, which steps whole tensors or the pieces of way(shapes, n), to its weights."""
    task = Task(device)
    pieces = way and sum(way(task.shapes, n), [])
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
    errors = [dp.max_error(x, wanted) for x in (found, one_process(method, device, rates, way, n))]
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
        errors = [dp.max_error(values, wanted) for values in (task.params.values(), predicted)]
        yield dp.Row(name, errors[0], sent, (optimizer.most_held, max(sizes)), errors[1])


def estimates(device):
    """Rows of what is estimated or rounded."""
    x = Task(device).params["token.weight"].detach().view(-1)[:768].view(8, 96)  # normal numbers
    scales, w = torch.linspace(-1, 3, 96).to(x), x[0].clone().requires_grad_()
    (found,) = hutchinson((scales * w**2).sum() / 2, [w], seed=1)
    yield dp.Row("hutchinson, a diagonal Hessian", dp.relative_error(found, scales))
    code = dynamic_code(signed=True)
    codes, maxima = compress(x, code)
    back = restore(codes, maxima, code, x)
    worst = ((back - x).view(-1, BLOCK).abs().amax(1) / maxima).max().item()
    yield dp.Row("8 bits, error / maximum of block", worst, bound=(0.002, 0.9 / 64 / 2 + 1e-6))
    yield dp.Row("  of values that are codes", float((compress(back, code)[0] != codes).sum()))
    off = (torch.linalg.svdvals(newton_schulz(x)) - 1).abs().max().item()
    yield dp.Row("newton_schulz, singular values", off, bound=(0.01, 0.32))


class Launches(TorchFunctionMode):
    """While open, counts torch's functions as they are called. On a GPU, each launches a kernel."""
    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def launches(device, T=12):
    """Rows: adamw tensor by tensor, and in one call. A wrong number of launches adds 1 or more."""
    lists = torch.rand(4, T, 5, generator=torch.Generator().manual_seed(0)).double().to(device)
    one_by_one, in_one = ([list(tensors) for tensors in lists.clone()] for _ in range(2))
    steps = [torch.tensor(2.0, device=device) for _ in range(T)]
    with Launches() as single:
        for w, g, m, v in zip(*one_by_one):
            adamw(w, g, {"m": m, "v": v}, 2, 0.01)
    with Launches() as fused:
        adamw_fused(*in_one, steps, 0.01)
    yield dp.Row(f"adamw, {T} tensors: {10 * T} launches", abs(single.count - 10 * T))
    error = dp.max_error(in_one[0], one_by_one[0]) + abs(fused.count - 1)
    yield dp.Row(f"adamw_fused, {T} tensors: 1 launch", error)


def proof(group, device):
    """Yield the rows of the table."""
    rates = (0.01,) * 3
    for method in RULES:
        yield beside_the_twin(method, group, device, rates)
    yield cut_wrongly("adamw_8bit", cut_flat, group, device, rates)
    for method in "adafactor", "muon", "shampoo":
        yield cut_wrongly(method, cut_rows, group, device, rates)
    yield sign_before_the_sum(group, device)
    yield from in_backward(group, device, rates)
    yield from estimates(device)
    yield from launches(device)


def train(args, group, device):
    """Train one model with every rule; print what the ranks remember beside the loss."""
    n, r, last = dist.get_world_size(group), dist.get_rank(group), max(1, args.steps // 10)
    dp.say(f"\nunigram entropy {dp.unigram_entropy(dp.read_text(args.text, 65)):.3f}; loss: mean "
           f"of the last {last} steps\n{'':13}peak rate   bytes of state a parameter    loss")
    for method, peak in zip(RULES, (0.01, 0.01, 0.01, 0.01, 0.1, 0.05, 0.03)):
        task, losses = Task(device, n, r, torch.float32, args.text, B=24), []
        optimizer, _ = optimizer_of(task, method, group)
        rates = [wsd(t, args.steps, peak) for t in range(1, args.steps + 1)]
        task.train(optimizer, rates, 10 * (method == "sophia"), seen=losses.append)
        held = float(sum(x.nbytes for state in optimizer.states for x in state.values()))
        told = torch.tensor([held / sum(map(math.prod, task.shapes.values())),
                             sum(losses[-last:]) / last], device=device)  # fmt: skip
        # all_reduce(SUM) over dp, 2: the bytes of all ranks, and the shares of the loss
        dist.all_reduce(told, group=group)
        dp.say(f"{method:13}{peak:9.3f}{told[0]:26.2f}{told[1]:14.3f}")


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
    if ranks > 8:
        raise ValueError(f"{ranks} ranks: the proof has 8 sequences, so start at most 8")
    dp.read_text(args.text, at_least=65)


if __name__ == "__main__":
    dp.launch(main, dp.arguments(__doc__, ranks=4, steps=40).parse_args(), validate)
