"""compression · Send less of the gradient, lose none of it

Each of n ranks has a gradient of P numbers, and all ranks need the sum. On a slow link, a rank
sends a short message instead. What the message leaves out stays on the rank as a residual, and the
residual joins the next gradient. So nothing is lost, only late:

    all that was applied  +  the residuals of all ranks  =  all gradients of all ranks

    method       a rank's message                 sent by each rank, bytes              residual
    dense        all numbers                      2(n-1)/n · 4P                         0
    top-k        the k largest, and their places  (n-1) · 8k                            P
    random-k     k at places that all ranks draw  2(n-1)/n · 4k                         P
    sign         a bit a number, one scale        (n-1) · (P/8 + 4)                     P
    two-sided    the same, and the sum in bits    2(n-1)/n · P/8 + 8(n-1)               P + P/n
    low rank     two thin matrices, k columns     2(n-1)/n · 4k · (rows + columns)       P
    DCT          the largest waves of a tile      (n-1) · 6 a wave                      P

A number has 4 bytes. Messages of top-k, sign and DCT are gathered: each rank sends n - 1 of them.
Top-k sends less than dense only while k/P < 1/n: with 1,024 ranks, less than a thousandth.

    python beyond/compression.py                          four ranks; every method trains on text
    torchrun --nproc-per-node 4 beyond/compression.py     the same, started by torchrun

A rank needs its whole gradient and holds its whole residual: ZeRO-2 and ZeRO-3 do not go with it.
Micro-batches are added up first and compressed once.
Guide: Gradient compression for slow networks · Compression for cross-DC · DiLoCo (there, DisTrO).
Sources: error feedback, arXiv:1901.09847; top-k, arXiv:1809.07599; DGC, arXiv:1712.01887;
1-bit Adam, arXiv:2102.02888; PowerSGD, arXiv:1905.13727; DeMo, arXiv:2411.19870.
Questions  QK.1 * what a rank keeps   QK.2 ** which matrices may be summed
           QK.3 ** when top-k stops paying
"""
# n ranks · r this rank · B sequences · S tokens of a sequence · D width · V vocabulary
# P parameters

import copy
import importlib
import math
import signal
import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads ends it without a trace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

sys.path.append(str(Path(__file__).resolve().parents[1]))
dp = importlib.import_module("01_dp")


# ── by hand: the largest number now, the rest later ──────────────────────────────────────────

# A rank has the gradient (3, 2) in every step and may send one number of two.
#
#   step   gradient + residual    sent      residual
#    0     (3, 2) + (0, 0)        (3, 0)    (0, 2)
#    1     (3, 2) + (0, 2)        (0, 4)    (3, 0)
#    2     (3, 2) + (3, 0)        (6, 0)    (0, 2)
#   all    (9, 6)                 (9, 4)    (0, 2)    sent + residual = the gradients
#
# Without the residual, (3, 0) would be sent in every step. The second weight would never move.


def top_k_by_hand(gradient_P, residual_P, kept, group):
    """Compute what all ranks apply, and this rank's next residual, both (P).

    Every rank sends its `kept` largest numbers and their places. Source: arXiv:1809.07599, Alg. 1.
    """
    x_P = gradient_P + residual_P
    places = x_P.abs().topk(kept).indices
    all_values, all_places = gather(x_P[places], group), gather(places.int(), group)
    applied_P, residual_P = torch.zeros_like(x_P), x_P.clone()
    for values, at in zip(all_values, all_places.long()):  # rank by rank: one order on all ranks
        applied_P[at] += values
    residual_P[places] = 0
    return applied_P, residual_P


def gather(x, group):
    """The tensor x of every rank, (n, *x.shape)."""
    n = dist.get_world_size(group)
    messages = x.new_empty(n * x.numel())
    # all_gather over dp, n messages: every rank now has the message of every rank
    dist.all_gather_single(messages, x.flatten(), group=group)
    return messages.view(n, *x.shape)


# ── one place for what was not sent ──────────────────────────────────────────────────────────

# A compressor has one method, reduce(x_P, group). It returns two tensors (P): `applied`, which is
# the same on all ranks, and `own`, this rank's part of it. The own parts of all ranks add up to
# `applied`. So error feedback is the same few lines for all compressors.


class Feedback:
    """A compressor and the residual of this rank; `reduce` is called once a step.

    Args:
        decay: factor of the residual: 1 keeps all (error feedback), 0 forgets all, 0.999 is DeMo's.
        momentum: each rank adds up its gradients in a velocity before it compresses. A momentum
            after the compressor would see a late number as a new one (DGC, section 3.1).
        masking: a sent entry starts with velocity 0 again (DGC, section 3.3).
    """

    def __init__(self, compressor, decay=1.0, momentum=0.0, masking=False):
        self.compressor, self.decay = compressor, decay
        self.momentum, self.masking = momentum, masking
        self.residual_P = self.velocity_P = torch.tensor(0.0)

    def reduce(self, gradient_P, group):
        """Compute what all ranks apply, (P), from this rank's gradient, (P)."""
        self.velocity_P = self.momentum * self.velocity_P + gradient_P
        # QK.1 * A message leaves something out. What of it does the next message begin with?
        #      hint: `own` is this rank's part of what was applied; nothing else may be forgotten
        x_P = self.velocity_P + self.decay * self.residual_P
        applied_P, own_P = self.compressor.reduce(x_P, group)
        self.residual_P = x_P - own_P
        # /QK.1
        if self.masking:
            self.velocity_P = self.velocity_P * (own_P == 0)
        return applied_P

    def state_dict(self):
        """Everything of this rank that the next step needs. Each rank must save its own."""
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state):
        """Take what state_dict returned, on the same rank of as many ranks."""
        vars(self).update(copy.deepcopy(state))


class Dense:
    """All numbers, by all-reduce; `shapes` are those of the tensors of which x is made.

    The other compressors inherit what describes their messages: `summed` numbers are all-reduced,
    `gathered` numbers and `beside` bytes go to every rank; `state` is kept from step to step.
    """

    def __init__(self, shapes):
        self.sizes, self.state = [math.prod(shape) for shape in shapes], {}
        self.P = self.summed = sum(self.sizes)
        self.gathered = self.beside = 0

    def reduce(self, x_P, group):
        """Compute (applied, own), both (P), from this rank's x, (P)."""
        applied_P = x_P.clone()
        # all_reduce(SUM) over dp, P: every rank now holds the whole sum
        dist.all_reduce(applied_P, group=group)
        return applied_P, x_P

    def sent(self, n, e=4):
        """Bytes that each of n ranks sends in a step, with e bytes a number."""
        return 2 * (n - 1) / n * e * self.summed + (n - 1) * (e * self.gathered + self.beside)


# ── a few of the numbers ─────────────────────────────────────────────────────────────────────


class TopK(Dense):
    """The `kept` largest numbers of each rank. What remains of x has at most (1 - kept/P) |x|²."""

    def __init__(self, shapes, kept):
        super().__init__(shapes)
        self.summed, self.gathered, self.beside = 0, kept, 4 * kept

    def reduce(self, x_P, group):
        """Compute (applied, own): the gathered messages, added up, and this rank's message."""
        applied_P, rest_P = top_k_by_hand(x_P, 0, self.gathered, group)
        return applied_P, x_P - rest_P


def most_kept(P, n):
    """The largest k for which top-k sends less than a dense all-reduce, numbers having 4 bytes."""
    # QK.3 ** A ring sends 2(n-1)/n · 4P bytes, top-k (n-1) · 8k. Up to which k does top-k pay?
    #      hint: solve for k; where both send the same, top-k has gained nothing
    most = (P - 1) // n
    return most
    # /QK.3


class RandomK(Dense):
    """`kept` numbers at places that all ranks draw from one seed: the same places, so values can be
    all-reduced and places need no bytes. With feedback, values are not scaled by P / kept."""

    def __init__(self, shapes, kept):
        super().__init__(shapes)
        self.summed, self.state = kept, {"step": 0}

    def places(self, step):
        """The places of a step: (kept) different numbers below P."""
        draw = torch.Generator().manual_seed(step)
        return torch.randperm(self.P, generator=draw)[: self.summed]

    def reduce(self, x_P, group):
        """Compute (applied, own): zeros but for the places of this step."""
        places = self.places(self.state["step"]).to(x_P.device)
        self.state["step"] += 1
        values = x_P[places]
        own_P = torch.zeros_like(x_P).index_copy(0, places, values)
        # all_reduce(SUM) over dp, k: every rank now holds the sums at these places
        dist.all_reduce(values, group=group)
        return torch.zeros_like(x_P).index_copy(0, places, values), own_P


# ── one bit a number ─────────────────────────────────────────────────────────────────────────


def mean_size(x):
    """The mean of |x|: the scale with which signs come closest to x. What remains of x has at most
    (1 - 1/P) |x|² (arXiv:1901.09847, section 4)."""
    return x.abs().sum() / max(len(x), 1)


def pack(x):
    """The signs of x, eight to a byte; a zero counts as positive. The last byte is filled up."""
    positive = F.pad(x >= 0, (0, -len(x) % 8)).view(-1, 8)
    return (positive << torch.arange(8, device=x.device)).sum(1).to(torch.uint8)


def unpack(packed, scale, length):
    """The first `length` numbers, scale or -scale, of packed signs."""
    bits = (packed[:, None] >> torch.arange(8, device=packed.device)) & 1
    return torch.where(bits.flatten()[:length] > 0, scale, -scale)


class Sign(Dense):
    """A sign for each number and one scale. Signs cannot be added on their way: a sum of n signs is
    no sign. So messages are gathered, and from 64 ranks on that is more than dense."""

    def __init__(self, shapes, scale=mean_size):
        super().__init__(shapes)
        self.scale, self.summed, self.gathered, self.beside = scale, 0, 1, -(-self.P // 8)

    def reduce(self, x_P, group):
        """Compute (applied, own): scaled signs, added up over the ranks."""
        packed, scale = pack(x_P), self.scale(x_P)
        pairs = zip(gather(packed, group), gather(scale, group))
        return sum(unpack(*pair, self.P) for pair in pairs), unpack(packed, scale, self.P)


class TwoSidedSign(Sign):
    """Signs to the rank that adds up a chunk, and signs of its sum back to all. The sum is rounded
    too: its rank keeps a second residual, for its chunk (1-bit Adam, Alg. 1)."""

    def __init__(self, shapes, scale=mean_size):
        super().__init__(shapes, scale)
        self.state = {"server": torch.tensor(0.0)}

    def chunk(self, n):
        """Numbers of a rank's chunk: whole bytes, the same on all ranks."""
        return 8 * -(-self.P // (8 * n))

    def reduce(self, x_P, group):
        """Compute (applied, own). The sums' second residual makes up the difference."""
        n, r = dist.get_world_size(group), dist.get_rank(group)
        size, scale = self.chunk(n), self.scale(x_P)
        length = min(max(self.P - r * size, 0), size)  # the last chunks may be short, or empty
        packed = pack(F.pad(x_P, (0, n * size - self.P)))
        arrived = torch.empty_like(packed)
        # all_to_all over dp, P bits: every rank now has all ranks' signs of its own chunk
        dist.all_to_all_single(arrived, packed, group=group)
        signs, scales = arrived.view(n, -1), gather(scale, group)
        y = sum(unpack(*pair, length) for pair in zip(signs, scales)) + self.state["server"]
        sums, y_scale = pack(F.pad(y, (0, size - length))), self.scale(y)
        self.state["server"] = y - unpack(sums, y_scale, length)
        chunks = zip(gather(sums, group), gather(y_scale, group))
        applied_P = torch.cat([unpack(*pair, size) for pair in chunks])[: self.P]
        return applied_P, unpack(packed, scale, self.P)

    def sent(self, n, e=4):
        """Bytes: n - 1 chunks in bits to their ranks, its own to n - 1 ranks, and 2 scales."""
        return (n - 1) * (2 * self.chunk(n) // 8 + 2 * e)


class OneBitAdam:
    """Adam whose moments are dense for `warmup` steps; then the second moment stays as it is, and
    the first one travels in bits. As in the paper, no bias correction (arXiv:2102.02888, Alg. 1).

    A number whose second moment is still 0 takes no part afterwards: its step would be scale / eps.
    """

    def __init__(self, shapes, warmup, rate=3e-3, betas=(0.9, 0.999), eps=1e-8):
        self.warmup, self.rate, self.betas, self.eps = warmup, rate, betas, eps
        self.feedback, self.t = Feedback(Dense(shapes)), 0
        self.first_P = self.second_P = torch.tensor(0.0)

    def step(self, weights_P, gradient_P, group):
        """Change the weights in place; gradients of all ranks add up to the step's gradient."""
        beta1, beta2 = self.betas
        if self.t == self.warmup:
            self.compress()
        if self.t < self.warmup:
            whole_P = self.feedback.reduce(gradient_P, group)
            self.first_P = beta1 * self.first_P + (1 - beta1) * whole_P
            self.second_P = beta2 * self.second_P + (1 - beta2) * whole_P**2
        else:  # all ranks have one first moment: each brings an nth of it, and its own gradient
            share_P = beta1 * self.first_P / dist.get_world_size(group) + (1 - beta1) * gradient_P
            seen = self.second_P > 0
            self.first_P = torch.zeros_like(gradient_P)
            self.first_P[seen] = self.feedback.reduce(share_P[seen], group)
        weights_P -= self.rate * self.first_P / (self.second_P.sqrt() + self.eps)
        self.t += 1

    def compress(self):
        """End the warm-up: from now on, bits of those numbers whose second moment is not 0."""
        self.feedback = Feedback(TwoSidedSign([(int((self.second_P > 0).sum()),)]))

    state_dict, load_state_dict = Feedback.state_dict, Feedback.load_state_dict


# ── two thin matrices for a matrix ───────────────────────────────────────────────────────────


class LowRank(Dense):
    """PowerSGD: M (rows x columns) as left · rightᵀ, thin matrices of `rank` columns (Alg. 1).

    A matrix is compressed if that saves more than the factor `least`; the rest is sent as it is.
    """

    def __init__(self, shapes, rank, least=2.0):
        super().__init__(shapes)
        draw, rights, self.matrices, self.summed = torch.Generator().manual_seed(0), [], [], 0
        for shape, size in zip(shapes, self.sizes):
            rows, columns = shape[0], size // shape[0]
            thin = (rows + columns) * min(rows, columns, rank)
            self.matrices.append((rows, columns) if thin * least < size else None)
            if thin * least < size:
                few = min(rows, columns, rank)
                rights.append(torch.randn(columns, few, generator=draw, dtype=torch.float64))
            self.summed += thin if thin * least < size else size
        self.state = {"rights": rights}  # the next step starts with the directions of this one

    def reduce(self, x_P, group):
        """Compute (applied, own): the whole sum, and this rank's x, on all ranks' directions."""
        parts = list(zip(x_P.split(self.sizes), self.matrices))
        matrices = [part.view(shape) for part, shape in parts if shape]
        others = [part for part, shape in parts if not shape]
        rights = [right.to(x_P) for right in self.state["rights"]]
        # QK.2 ** left = M · right is linear in M, and so is right = Mᵀ · left. What is summed, and
        #      when are the columns of left made orthonormal?
        #      hint: all ranks need the same left before they compute their own right
        lefts = [matrix @ right for matrix, right in zip(matrices, rights)]
        sums = all_reduced([*lefts, *others], group)
        lefts = [torch.linalg.qr(left).Q for left in sums[: len(lefts)]]
        own_rights = [matrix.T @ left for matrix, left in zip(matrices, lefts)]
        rights = all_reduced(own_rights, group)
        # /QK.2
        self.state["rights"] = rights
        other_sums = sums[len(lefts) :]
        return self.joined(lefts, rights, other_sums), self.joined(lefts, own_rights, others)

    def joined(self, lefts, rights, others):
        """The flat tensor (P) of products left · rightᵀ and of what was not compressed."""
        products, others = iter([a @ b.T for a, b in zip(lefts, rights)]), iter(others)
        return torch.cat([next(products if shape else others).flatten() for shape in self.matrices])


def all_reduced(tensors, group):
    """The sums of tensors over the group, sent in one call."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    # all_reduce(SUM) over dp, all tensors: every rank now holds the whole sums
    dist.all_reduce(flat, group=group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors)]


# ── the largest waves of a tile ──────────────────────────────────────────────────────────────


def waves(N):
    """The orthonormal matrix (N, N) of the discrete cosine transform: row k is the k-th wave."""
    k, i = torch.arange(N, dtype=torch.float64)[:, None], torch.arange(N, dtype=torch.float64)
    rows = (2 / N) ** 0.5 * torch.cos(math.pi / N * k * (i + 0.5))
    rows[0] /= 2**0.5
    return rows


def tile(length, most=64):
    """The largest divisor of a length that is at most `most`."""
    return max(divisor for divisor in range(1, most + 1) if length % divisor == 0)


class DCT(Dense):
    """The `kept` largest waves of each tile of at most 64 x 64 numbers.

    With `vote`, as in DeMo: a wave's size is the mean over those ranks that sent it, and only the
    sign of each number is applied. Then the own parts do not add up to what is applied.
    """

    def __init__(self, shapes, kept=32, vote=False):
        super().__init__(shapes)
        self.kept, self.vote, starts, offset = kept, vote, [], 0
        self.tiles = []  # of each tensor: (tiles down, rows, tiles across, columns)
        for shape, size in zip(shapes, self.sizes):
            rows = shape[0] if len(shape) > 1 else 1
            a, b = tile(rows), tile(size // rows)
            self.tiles.append((rows // a, a, size // rows // b, b))
            begins = torch.arange(offset, offset + size, a * b)
            starts.append(begins.repeat_interleave(min(kept, a * b)))
            offset += size
        self.starts = torch.cat(starts)  # for each wave of the message, where its tile begins
        self.summed, self.gathered, self.beside = 0, len(self.starts), 2 * len(self.starts)

    def transform(self, x_P, back=False):
        """Numbers (P) to waves (P), tile after tile; or back."""
        done = []
        for part, (down, a, across, b) in zip(x_P.split(self.sizes), self.tiles):
            left, right = waves(a).to(x_P), waves(b).to(x_P)
            if back:
                tiles = left.T @ part.view(down, across, a, b) @ right
                done.append(tiles.transpose(1, 2).flatten())
            else:
                tiles = part.view(down, a, across, b).transpose(1, 2)
                done.append((left @ tiles @ right.T).flatten())
        return torch.cat(done)

    def reduce(self, x_P, group):
        """Compute (applied, own): the gathered waves, added up, and this rank's waves."""
        waves_P, largest = self.transform(x_P), []
        for part, (_, a, _, b) in zip(waves_P.split(self.sizes), self.tiles):
            kept = min(self.kept, a * b)
            largest.append(part.view(-1, a * b).abs().topk(kept).indices.flatten())
        starts, inside = self.starts.to(x_P.device), torch.cat(largest)
        values = waves_P[starts + inside]
        two_bytes = inside.to(torch.int16).view(torch.uint8)  # a place in a tile is below 4,096
        all_inside = gather(two_bytes, group).view(torch.int16).long()
        sums_P, senders_P = torch.zeros_like(x_P), torch.zeros_like(x_P)
        for sent, at in zip(gather(values, group), starts + all_inside):
            sums_P[at] += sent
            senders_P[at] += 1
        own_P = torch.zeros_like(x_P).index_copy(0, starts + inside, values)
        own_P = self.transform(own_P, back=True)
        if self.vote:
            return self.transform(sums_P / senders_P.clamp(min=1), back=True).sign(), own_P
        return self.transform(sums_P, back=True), own_P


# ── from here on: proof, run, kit ────────────────────────────────────────────────────────────

SHAPES = [(48, 20), (30,), (4, 2, 3)]  # of the proof: 1,014 numbers; only the first is compressed

# A twin is one process that has the x of all ranks, (n, P). It returns (applied, own parts).


def summed(own_nP):
    """What a twin returns if own parts are only added up."""
    return own_nP.sum(0), own_nP


def twin_top_k(x_nP, memory):
    """The 60 largest numbers of each rank."""
    least = x_nP.abs().sort(dim=1, descending=True).values[:, 59:60]
    return summed(torch.where(x_nP.abs() >= least, x_nP, 0.0))


def twin_random_k(x_nP, memory, factor=1.0):
    """60 numbers at random places, times a factor."""
    draw = torch.Generator().manual_seed(memory["t"])
    places = torch.randperm(x_nP.shape[1], generator=draw)[:60]
    mask_P = torch.zeros(x_nP.shape[1]).index_fill(0, places, 1.0)
    return summed(factor * mask_P.to(x_nP) * x_nP)


def signs(x):
    """x with all its sizes replaced by their mean; a zero counts as positive."""
    return torch.where(x >= 0, 1.0, -1.0).to(x) * x.abs().mean(-1, keepdim=True)


def twin_two_sided(x_nP, memory, forget=False):
    """Signs, and signs of their sums in chunks; `forget` drops the residual of the sums."""
    n, P = x_nP.shape
    y_P = signs(x_nP).sum(0) + memory.get("server", 0)
    applied_P = torch.cat([signs(chunk) for chunk in y_P.split(8 * -(-P // (8 * n)))])
    memory["server"] = 0 if forget else y_P - applied_P
    return applied_P, signs(x_nP)


def twin(gradients_tnP, reduce, decay=1.0):
    """What one process applies in each step, (t, P)."""
    residual_nP, memory, applied = torch.zeros_like(gradients_tnP[0]), {}, []
    for memory["t"], gradient_nP in enumerate(gradients_tnP):
        x_nP = gradient_nP + decay * residual_nP
        applied_P, own_nP = reduce(x_nP, memory)
        residual_nP = x_nP - own_nP
        applied.append(applied_P)
    return torch.stack(applied)


def ladder():
    """(name, compressor, twin) of each rung, for SHAPES. Without a twin, tests have a reference."""
    yield "dense", Dense(SHAPES), lambda x_nP, memory: summed(x_nP)
    yield "top-k", TopK(SHAPES, 60), twin_top_k
    yield "random-k", RandomK(SHAPES, 60), twin_random_k
    yield "sign", Sign(SHAPES), lambda x_nP, memory: summed(signs(x_nP))
    yield "two-sided sign", TwoSidedSign(SHAPES), twin_two_sided
    yield "low rank", LowRank(SHAPES, 2), None
    yield "DCT", DCT(SHAPES), None


def play(reduce, gradients_tnP, group):
    """What a rank applies in each step, (t, P), and the bytes that it sends in a step."""
    r = dist.get_rank(group)
    with dp.Ledger() as ledger:
        applied = [reduce(gradient_nP[r], group) for gradient_nP in gradients_tnP]
    return torch.stack(applied), sum(ledger.sent.values()) / len(applied)


def proof_of_rungs(gradients, group):
    """Rows of each rung: values, bytes sent and held, and that nothing is lost."""
    (n, P), r = gradients.shape[1:], dist.get_rank(group)
    for name, compressor, reduce in ladder():
        feedback = Feedback(compressor)
        applied, sent = play(feedback.reduce, gradients, group)
        if reduce:
            yield dp.Row(name, dp.relative_error(applied, twin(gradients, reduce)))
        state = compressor.state
        size = compressor.chunk(n) if "server" in state else 0
        chunk = slice(r * size, (r + 1) * size)
        held = [feedback.residual_P, *state.get("rights", []), state.get("server", applied[:0])]
        formula = 8 * (P + len(range(P)[chunk]) + 20 * 2 * (name == "low rank"))
        kept_P = feedback.residual_P.clone()
        kept_P[chunk] += state.get("server", 0)
        # all_reduce(SUM) over dp, P: the residuals of all ranks
        dist.all_reduce(kept_P, group=group)
        error = dp.relative_error(applied.sum(0) + kept_P, gradients.sum((0, 1)))
        held = sum(tensor.nbytes for tensor in held), formula
        yield dp.Row(f"{name}: nothing is lost", error, (sent, compressor.sent(n, 8)), held)


def proof_of_settings(gradients, group):
    """Rows of settings in which nothing is left out, and of how much is left out otherwise."""
    n, P = gradients.shape[1:]
    r, sum_P, even_P = dist.get_rank(group), gradients[0].sum(0), gradients[0, 0].sign()
    x_P = gradients[0, r]
    for name, compressor, x, y in [
        ("top-k of all numbers", TopK(SHAPES, P), x_P, sum_P),
        ("random-k of all numbers", RandomK(SHAPES, P), x_P, sum_P),
        ("low rank of full rank", LowRank(SHAPES, 48, least=0.0), x_P, sum_P),
        ("DCT of all waves", DCT(SHAPES, kept=4096), x_P, sum_P),
        ("sign of numbers of one size", Sign(SHAPES), even_P, n * even_P),
        ("two-sided sign of the same", TwoSidedSign(SHAPES), even_P, n * even_P),
    ]:
        yield dp.Row(name, dp.relative_error(compressor.reduce(x, group)[0], y))
    part = lambda rest, x: (rest.norm() / x.norm()).item() ** 2
    left = lambda compressor, x: part(x - compressor.reduce(x, group)[1], x)
    parts = ("top-k", TopK(SHAPES, 60), 1 - 60 / P), ("sign", Sign(SHAPES), 1 - 1 / P)
    for name, compressor, most in (*parts, ("DCT", DCT(SHAPES), 1 - 32 / 960)):
        yield dp.Row(f"{name}: part left out", left(compressor, x_P), bound=(0.1, most))
    M, applied_P = sum_P[:960].view(48, 20), LowRank(SHAPES, 2).reduce(x_P, group)[0]
    squares = torch.linalg.svdvals(M) ** 2
    best = (squares[2:].sum() / squares.sum()).item()  # no matrix of rank 2 is closer
    rest = part(M - applied_P[:960].view(48, 20), M)
    yield dp.Row("low rank: part left out of the sum", rest, bound=(best, 1.0))


def proof_of_mistakes(gradients, group):
    """Rows that are wrong on purpose: the sum of all that was applied, beside all gradients."""
    everything, scale = gradients.sum((0, 1)), gradients.shape[2] / 60
    scaled, forgetful = RandomK(SHAPES, 60), TwoSidedSign(SHAPES)
    scaled.reduce = lambda *x: [scale * y for y in RandomK.reduce(scaled, *x)]

    def reduce_and_forget(*x):
        forgetful.state = {"server": torch.tensor(0.0)}
        return TwoSidedSign.reduce(forgetful, *x)

    forgetful.reduce = reduce_and_forget
    for name, compressor, reduce, decay in [
        ("top-k without residual", TopK(SHAPES, 60), twin_top_k, 0.0),
        ("random-k, scaled and fed back", scaled, partial(twin_random_k, factor=scale), 1.0),
        ("two-sided, sums' residual forgotten", forgetful, partial(twin_two_sided, forget=True), 1),
    ]:
        applied = play(Feedback(compressor, decay).reduce, gradients, group)[0].sum(0)
        predicted = dp.relative_error(twin(gradients, reduce, decay).sum(0), everything)
        yield dp.Row(name, dp.relative_error(applied, everything), wrong=predicted)


def proof_of_memory(gradients, group):
    """Rows of what lasts from step to step: momentum, and checkpoints."""
    velocity_P, expected = 0, []
    for gradient_nP in gradients:
        velocity_P = 0.9 * velocity_P + gradient_nP.sum(0)
        expected.append(velocity_P)
    expected = torch.stack(expected)
    error = lambda of: dp.relative_error(play(of.reduce, gradients, group)[0], expected)
    yield dp.Row("momentum, all sent", error(Feedback(Dense(SHAPES), momentum=0.9)))
    masked = Feedback(Dense(SHAPES), momentum=0.9, masking=True)
    predicted = dp.relative_error(gradients.sum(1), expected)
    yield dp.Row("momentum, all sent and masked: none", error(masked), wrong=predicted)
    different = 0
    for _, compressor, _ in ladder():
        whole, first, second = (Feedback(copy.deepcopy(compressor), 0.9, 0.5) for _ in range(3))
        applied, _ = play(whole.reduce, gradients, group)
        play(first.reduce, gradients[:3], group)
        second.load_state_dict(first.state_dict())
        different += not torch.equal(play(second.reduce, gradients[3:], group)[0], applied[3:])
    yield dp.Row("resumed: methods with another bit", float(different))


def language_model(D=32, V=256):
    """Three bytes (B, 3) to logits of the next one (B, V)."""
    hidden = nn.Linear(3 * D, D), nn.Tanh()
    return nn.Sequential(nn.Embedding(V, D), nn.Flatten(), *hidden, nn.Linear(D, V))


class Descent:
    """Gradient descent on what a compressor applies."""

    def __init__(self, rate, compressor, **options):
        self.rate, self.feedback = rate, Feedback(compressor, **options)

    def step(self, weights_P, gradient_P, group):
        """Change the weights in place, as OneBitAdam.step does."""
        weights_P -= self.rate * self.feedback.reduce(gradient_P, group)


def methods(shapes, keep, steps):
    """(name, optimizer) of each line of the run. `keep` is the part of the numbers that is sent."""
    kept, some = int(keep * Dense(shapes).P), f"{keep:.2%}"
    yield "dense", Descent(0.5, Dense(shapes))
    yield f"top-k {some}", Descent(0.5, TopK(shapes, kept))
    yield f"top-k {some}, no residual", Descent(0.5, TopK(shapes, kept), decay=0.0)
    yield f"random-k {10 * keep:.2%}", Descent(0.5, RandomK(shapes, 10 * kept))
    yield "sign", Descent(0.5, Sign(shapes))
    yield "two-sided sign", Descent(0.5, TwoSidedSign(shapes))
    yield "low rank 2", Descent(0.5, LowRank(shapes, 2))
    yield "DCT", Descent(0.5, DCT(shapes))
    yield "dense, momentum", Descent(0.05, Dense(shapes), momentum=0.9)
    yield f"top-k {some}, momentum", Descent(0.05, TopK(shapes, kept), momentum=0.9, masking=True)
    yield "DeMo", Descent(3e-3, DCT(shapes, vote=True), decay=0.999)
    yield "dense Adam", OneBitAdam(shapes, warmup=steps)
    yield "1-bit Adam", OneBitAdam(shapes, warmup=max(1, steps // 4))


def train(optimizer, text, steps, group, device):
    """Train on text; return the loss on held-out text, and bytes that a rank sent in a step."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(0)
    model, cut, B = language_model().to(device), len(text) * 9 // 10, 256 * n
    weights_P = parameters_to_vector(model.parameters()).detach()
    with dp.Ledger() as ledger:
        for step in range(steps):
            vector_to_parameters(weights_P, model.parameters())
            x_B3, y_B3 = (whole.to(device) for whole in dp.sample(text[:cut], step, B, 3))
            mine = slice(r * 256, (r + 1) * 256)
            loss_sum = F.cross_entropy(model(x_B3[mine]), y_B3[mine, -1], reduction="sum")
            gradients = torch.autograd.grad(loss_sum / B, list(model.parameters()))
            gradient_P = torch.cat([gradient.flatten() for gradient in gradients])
            optimizer.step(weights_P, gradient_P, group)
    vector_to_parameters(weights_P, model.parameters())
    x_B3, y_B3 = (whole.to(device) for whole in dp.sample(text[cut:], 0, 8192, 3))
    with torch.no_grad():
        loss = F.cross_entropy(model(x_B3), y_B3[:, -1]).item()
    return loss, sum(ledger.sent.values()) / steps


def run(args, group, device):
    """Train every method on the same text; print loss beside bytes."""
    text, shapes = dp.read_text(args.text, 640), [p.shape for p in language_model().parameters()]
    dp.say(f"\n{args.steps} steps; a guess that knows no context has a loss of "
           f"{dp.unigram_entropy(text):.3f}\n{'':26}held-out loss   bytes a step   dense / bytes")
    dense = Dense(shapes).sent(dist.get_world_size(group))
    for name, optimizer in methods(shapes, args.keep, args.steps):
        loss, sent = train(optimizer, text, args.steps, group, device)
        dp.say(f"{name:26}{loss:13.3f}{sent:15,.0f}{dense / sent:16.1f}")


def main(args, device):
    """Prove, then train every method; 0 if everything is as claimed."""
    group, n = dist.group.WORLD, dist.get_world_size()
    dp.say(f"compression · {n} ranks · {dist.get_backend()} · {device.type}")
    draw, P = torch.Generator().manual_seed(1), Dense(SHAPES).P
    gradients = torch.randn(6, n, P, generator=draw, dtype=torch.float64).to(device) ** 3
    parts = proof_of_rungs, proof_of_settings, proof_of_mistakes, proof_of_memory
    broken = dp.prove([row for part in parts for row in part(gradients, group)], device)
    if args.steps:
        run(args, group, device)
    return broken


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    if ranks < 2:
        raise ValueError(f"{ranks} rank: it has nobody to send to; use 2 or more")
    P = sum(p.numel() for p in language_model().parameters())
    most = min(most_kept(P, ranks), P // 10)  # random-k sends ten times as many
    if not 1 <= args.keep * P <= most:
        raise ValueError(f"--keep {args.keep:g}: of {P:,} numbers, top-k sends at least one, and "
                         f"with {ranks} ranks at most {most / P:.4f} of them")
    dp.read_text(args.text, at_least=640)


if __name__ == "__main__":
    parser = dp.arguments(__doc__, ranks=4, steps=60)
    parser.add_argument("--keep", type=float, default=0.01, help="part of the numbers in a message")
    dp.launch(main, parser.parse_args(), validate)
