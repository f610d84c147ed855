"""06 · Context parallel: attention over a sequence that no rank holds whole

Each of n ranks holds all parameters and s = S/n tokens of every sequence. All layers but attention
work on one token at a time. Attention also needs the keys and values of other tokens. The ranks
pass keys and values round a ring, or gather all of them, or exchange tokens for heads.

    contiguous   rank 0  ■■□□□□□□   rank 1  □□■■□□□□   ...   the last rank computes the most
    zigzag       rank 0  ■□□□□□□■   rank 1  □■□□□□■□   ...   all ranks compute the same
    striped      rank 0  ■□□□■□□□   rank 1  □■□□□■□□   ...   nearly the same

A rank sends so many elements of each sequence in a layer, and keeps so many for backward beside
queries, output and log-sum-exp:

                   forward             backward                       kept
    ring           2(n-1)·s·K·d        2(n-1)·s·K·d + 2n·s·K·d fp32   2·s·K·d
    all-gather     2(n-1)·s·K·d        2(n-1)·s·K·d fp32              2·S·K·d
    Ulysses        2(n-1)/n·s·(H+K)·d  the same                       2·s·K·d
    Ulysses×ring   Ulysses over u ranks, and a ring over n/u          2·s·K·d

Ulysses sends less than a ring in forward if n > H/K + 1. n must divide H. If n does not divide K,
key/value heads are repeated, and K is then the least common multiple of K and n.
Each rank computes gradients from its own tokens. Their sum over the ranks is the gradient.

    python 06_cp_ring.py                          four ranks on this machine
    torchrun --nproc-per-node 4 06_cp_ring.py     the same, started by torchrun
    python 06_cp_ring.py --length 8192 --steps 5  no rank holds the 4.3 GB of scores

Guide: SP/CP · Context parallelism · DeepSpeed-Ulysses · When should I add CP · very long context.
The guide errs here. Llama 3 405B trained with CP=1 at 8K and CP=16 at 131K, not with CP=2, and it
gathered K and V, without a ring (arXiv:2407.21783, section 3.3.2 and table 4). With one contiguous
chunk a rank, 4 ranks compute 4/7 of the time. KV traffic is not linear in CP: a rank receives
(n-1)/n of all keys and values, which is 1.5 times as much on 4 ranks as on 2.

Questions  Q6.1 * who holds which chunk?       Q6.2 ** how do two blocks become one?
           Q6.3 ** post, compute, wait?        Q6.4 ** what does backward recompute?
           Q6.5 *** how do dk, dv get home?    Q6.6 ** which heads does each rank get?
"""
# n ranks · r this rank · B sequences · S tokens of a sequence · s tokens of this rank · D width
# H query heads · K key/value heads · d width of a head · V vocabulary

import math
from collections import namedtuple
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import nn

__all__ = [
    "agree_on_sequence", "all_gather_attention", "positions", "ring_attention", "shard",
    "ulysses_attention", "ulysses_ring_attention", "unshard",
]  # fmt: skip

# ── the serial twin ──────────────────────────────────────────────────────────────────────────


def causal_attention(q_BSHd, k_BSKd, v_BSKd, documents=None, scale=None, visible=None):
    """Full attention on one process, with all scores in memory: output (B, S, H, d). Query head i
    uses key/value head i // (H/K). A token sees itself and the tokens before it, or instead what
    `visible` (S, S) allows, and sees only its own document if `documents` (B, S) is passed."""
    S, sharing = q_BSHd.shape[1], q_BSHd.shape[2] // k_BSKd.shape[2]
    k_BSHd, v_BSHd = (x.repeat_interleave(sharing, dim=2) for x in (k_BSKd, v_BSKd))
    if visible is None:
        visible = torch.ones(S, S, dtype=torch.bool, device=q_BSHd.device).tril()
    if documents is not None:
        visible = visible & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = torch.einsum("bqhd,bkhd->bhqk", q_BSHd, k_BSHd)
    scores = scores * (q_BSHd.shape[-1] ** -0.5 if scale is None else scale)
    probs = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", probs, v_BSHd)


def rotate(x_BsHd, positions_s):
    """Rotary embedding at global positions (s,) or (B, s). Source: Su et al., arXiv:2104.09864."""
    half = x_BsHd.shape[-1] // 2
    pace = 10000 ** (-torch.arange(half, device=x_BsHd.device, dtype=torch.float64) / half)
    angle = positions_s.to(x_BsHd.device)[..., None, None] * pace
    cos, sin = angle.cos().to(x_BsHd.dtype), angle.sin().to(x_BsHd.dtype)
    a, b = x_BsHd.split(half, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    """Attention, then an MLP, each on a normalised copy of the residual stream."""

    def __init__(self, H, K, d):
        super().__init__()
        D, self.heads = H * d, [H, K, K]
        self.norm_attention, self.norm_mlp = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.out = nn.Linear(D, (H + 2 * K) * d), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x_BsD, positions_s, attend):
        heads = self.qkv(self.norm_attention(x_BsD)).unflatten(-1, (sum(self.heads), -1))
        q, k, v = heads.split(self.heads, dim=2)
        # keys are rotated before they travel, by the positions of the rank that holds them
        attended = attend(rotate(q, positions_s), rotate(k, positions_s), v)
        x_BsD = x_BsD + self.out(attended.flatten(2))
        return x_BsD + self.down(F.gelu(self.up(self.norm_mlp(x_BsD))))


class LanguageModel(nn.Module):
    """Bytes (B, s) at global positions (s,) to logits of the next byte (B, s, V). The model touches
    other ranks only inside attend(q, k, v)."""

    def __init__(self, H=8, K=2, d=8, layers=2, V=256):
        super().__init__()
        self.token = nn.Embedding(V, H * d)
        self.blocks = nn.ModuleList(Block(H, K, d) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(H * d), nn.Linear(H * d, V, bias=False)

    def forward(self, x_Bs, positions_s, attend):
        x_BsD = self.token(x_Bs)
        for block in self.blocks:
            x_BsD = block(x_BsD, positions_s, attend)
        return self.head(self.norm(x_BsD))


def next_tokens(tokens_BS, documents_BS=None):
    """The label of each token: the token after it, or -100 at the end of the sequence and of each
    document. Labels are made from the whole sequence, since a rank lacks its last token's label."""
    labels_BS = F.pad(tokens_BS[:, 1:], (0, 1), value=-100)
    if documents_BS is None:
        return labels_BS
    return labels_BS.masked_fill(documents_BS != F.pad(documents_BS[:, 1:], (0, 1), value=-1), -100)


def count_labels(labels_Bs, group):
    """Number of labels in the whole step, over all ranks, not counting -100."""
    count = (labels_Bs != -100).sum()
    # all_reduce(SUM) over cp, 1: every rank now knows the divisor of the whole step
    dist.all_reduce(count, group=group)
    return count


def local_loss(logits_BsV, labels_Bs, num_labels):
    """This rank's part of the mean over the step's labels. The sum of all parts is the loss."""
    losses = F.cross_entropy(logits_BsV.flatten(0, 1), labels_Bs.flatten(), reduction="sum")
    return losses / num_labels.clamp(min=1)


# ── the axis by hand: post, compute, merge, wait ─────────────────────────────────────────────


def attend_to_block(q_BHsd, k_BHsd, v_BHsd, causal):
    """Attention over the keys of one rank alone: its output (B, H, s, d), and the log-sum-exp
    (B, H, s) of each row of scores, by which blocks are merged."""
    scores = q_BHsd @ k_BHsd.mT / math.sqrt(q_BHsd.shape[-1])
    if causal:
        future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores.softmax(-1) @ v_BHsd, scores.logsumexp(-1)


# One query and four keys, two on each rank. Their exponentiated scores are 1, 3 | 4, 8, and their
# values 8, 0 | 4, 4.
#                              rank 0's keys               rank 1's keys
#     log-sum-exp              ln(1 + 3) = ln 4            ln(4 + 8) = ln 12
#     output of the block      (1·8 + 3·0) / 4 = 2         (4·4 + 8·4) / 12 = 4
#     weight in the whole row  4 / 16                      12 / 16
#     merged                   4/16 · 2 + 12/16 · 4 = 3.5 = (1·8 + 3·0 + 4·4 + 8·4) / 16
def merge(out_BHsd, lse_BHs, block_out, block_lse):
    """Fold one more block into the output and log-sum-exp of the blocks so far, in place."""
    # Q6.2 ** Each of two outputs is normalised by its own part of the row. How much does each of
    #         the two outputs weigh in the whole row?
    #         hint: subtract before you exp, and think of a row that sees nothing in both blocks
    total = torch.logaddexp(lse_BHs, block_lse)
    finite = total.masked_fill(total == -math.inf, 0)  # -inf minus -inf would not be a number
    old, new = (lse_BHs - finite).exp(), (block_lse - finite).exp()
    out_BHsd.copy_(old[..., None] * out_BHsd + new[..., None] * block_out)
    lse_BHs.copy_(total)
    # /Q6.2


def ring_by_hand(q_BHsd, k_BHsd, v_BHsd, group):
    """Causal attention in forward only. Rank r holds chunk r of the sequence, and each query head
    has a key/value head of its own. Returns the output (B, H, s, d) for this rank's queries."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    out_BHsd, lse_BHs = torch.zeros_like(q_BHsd), torch.full_like(q_BHsd[..., 0], -math.inf)
    kv, works = torch.stack([k_BHsd, v_BHsd]), []
    arriving = torch.empty_like(kv)
    for step in range(n):
        if step < n - 1:
            # isend + irecv over cp, 2·B·H·s·d: post; rank r+1 computes with these keys next
            works = dist.batch_isend_irecv([
                dist.P2POp(dist.isend, kv, group=group, group_peer=(r + 1) % n),
                dist.P2POp(dist.irecv, arriving, group=group, group_peer=(r - 1) % n),
            ])  # fmt: skip
        home = (r - step) % n  # the rank whose keys are here: they have come `step` hops
        if home <= r:  # compute: no query sees the keys of a later chunk
            merge(out_BHsd, lse_BHs, *attend_to_block(q_BHsd, *kv, causal=home == r))
        while works:
            works.pop().wait()  # wait: only now may the buffers change places
        kv, arriving = arriving, kv
    return out_BHsd


# ── layouts: which tokens a rank holds, and what they see of the tokens of another rank ──────

LAYOUTS = "contiguous", "zigzag", "striped"


def _owned(S, n, layout, inner=1):
    """Positions by rank (n, s), ascending on each rank, after S is padded to a multiple."""
    whole = torch.arange(-(-S // (multiple := _multiple(n, layout, inner))) * multiple)
    if layout == "contiguous":
        return rearrange(whole, "(n s) -> n s", n=n)
    if layout == "striped":
        return rearrange(whole, "(s n) -> n s", n=n)
    # Q6.1 * A late token sees more keys than an early token. Which two of the 2n chunks give every
    #        rank the same work?
    #        hint: pair the chunk that sees the least with the chunk that sees the most
    chunks = rearrange(whole, "(c s) -> c s", c=2 * n)
    early, late = chunks[:n], chunks[n:].flip(0)
    return torch.cat([early, late], dim=1)
    # /Q6.1


def _multiple(n, layout, inner=1):
    """The number of tokens that a padded sequence is a multiple of: each rank's part is split by
    `inner`, and in zigzag each rank's part is two halves."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r}: use {', '.join(LAYOUTS)}")
    return n * (math.lcm(2, inner) if layout == "zigzag" else inner)


def positions(S, group, layout="zigzag", inner=1):
    """Global positions (s,) of this rank's tokens, ascending, on the CPU. Positions from S on are
    padding: S is rounded up to a multiple of n, so that `inner` ranks can split each part once more
    (sequence parallelism, Ulysses inside a ring), and zigzag can halve it.
    Raises ValueError if the layout is not contiguous, zigzag or striped."""
    return _owned(S, dist.get_world_size(group), layout, inner)[dist.get_rank(group)]


def shard(x_BS, group, layout="zigzag", fill=0, inner=1):
    """This rank's tokens (B, s, ...) of a whole sequence (B, S, ...), padded with `fill`, at this
    rank's `positions(S, group, layout, inner)`. Autograd sees this function."""
    positions_s = positions(x_BS.shape[1], group, layout, inner).to(x_BS.device)
    x_Bs = x_BS[:, positions_s.clamp(max=x_BS.shape[1] - 1)]
    padding = (positions_s >= x_BS.shape[1]).view(1, -1, *[1] * (x_BS.dim() - 2))
    return x_Bs.masked_fill(padding, fill)


def unshard(x_Bs, S, group, layout="zigzag"):
    """The whole sequence (B, S, ...), without padding, from each rank's tokens (B, s, ...).
    Autograd does not see this function."""
    n, x_sB = dist.get_world_size(group), x_Bs.detach().transpose(0, 1).contiguous()
    x_SB = x_sB.new_empty(n * len(x_sB), *x_sB.shape[1:])
    # all_gather over cp, B·s from each: every rank now holds the sequence, rank after rank
    dist.all_gather_single(x_SB, x_sB, group=group)
    order = _owned_exactly(len(x_sB), n, layout).flatten()
    return x_SB[order.argsort().to(x_Bs.device)][:S].transpose(0, 1)


def _owned_exactly(s, n, layout):
    """Positions by rank (n, s) where each rank already holds s tokens, padding included."""
    owned_ns = _owned(n * s, n, layout)
    if owned_ns.shape[1] != s:
        raise ValueError(f"{s} tokens a rank: zigzag needs an even number, to which shard() pads")
    return owned_ns


# What a block of scores is cut to before it is computed: slices of its rows and columns; whether
# row i sees columns up to i, or all; or else a mask (B, 1, rows, columns), True where seen.
Sight = namedtuple("Sight", "rows columns causal mask")

# 8 tokens, 2 ranks, zigzag; x marks a key that a query sees:
#
#                            keys of rank 0     keys of rank 1
#                            0  1  6  7         2  3  4  5
#     queries of rank 0   0  x  .  .  .         .  .  .  .
#                         1  x  x  .  .         .  .  .  .
#                         6  x  x  x  .         x  x  x  x
#                         7  x  x  x  x         x  x  x  x
#     queries of rank 1   2  x  x  .  .         x  .  .  .
#                         3  x  x  .  .         x  x  .  .
#                         4  x  x  .  .         x  x  x  .
#                         5  x  x  .  .         x  x  x  x
#
# My own tokens: causal. Keys of an earlier rank: only their first half, for all my queries. Keys
# of a later rank: all of them, only for the second half of my queries.


def causal_sight(queries_s, keys_s):
    """The part of a block that queries at ascending positions see of keys at ascending positions,
    a Sight; None if they see nothing. Queries that see any key are the last ones, and keys that are
    seen are the first ones, so what is left is full or a staircase, in every layout."""
    rows = slice(int((queries_s < keys_s[0]).sum()), len(queries_s))
    columns = slice(0, int((keys_s <= queries_s[-1]).sum()))
    if rows.start == rows.stop:
        return None
    return Sight(rows, columns, bool(queries_s[rows.start] < keys_s[columns.stop - 1]), None)


@dataclass
class _Ring:
    """The place of this rank in a ring, and which keys a query may see: see `ring_attention`."""

    n: int
    r: int
    group: object = None  # not touched where n is 1
    layout: str = "contiguous"
    documents: torch.Tensor = None
    length: int = None
    causal: bool = True
    window: int = None
    scale: float = None

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f"window {self.window}: a token sees itself at least, so 1 or more")

    @classmethod
    def of(cls, group, layout, documents, options):
        place = dist.get_world_size(group), dist.get_rank(group), group, layout
        return cls(*place, documents, **options)

    def sight(self, j, s):
        """What this rank's s queries see of the s keys of rank j, a Sight; None if nothing."""
        owned_ns = _owned_exactly(s, self.n, self.layout)
        if self.causal and self.window is None and self.documents is None:
            return causal_sight(owned_ns[self.r], owned_ns[j])
        return masked_sight(owned_ns[self.r], owned_ns[j], self)

    def hop(self, x):
        """Post x to the next rank and a receive from the rank before. Returns a function that waits
        for both messages and returns the received tensor."""
        if self.n == 1:
            return lambda: x
        buffers = x, torch.empty_like(x)  # `wait` keeps both alive until both messages are done
        to, source = (self.r + 1) % self.n, (self.r - 1) % self.n
        # isend + irecv over cp, all of x, in one batch: no order of ranks can deadlock
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, buffers[0], group=self.group, group_peer=to),
            dist.P2POp(dist.irecv, buffers[1], group=self.group, group_peer=source),
        ])  # fmt: skip

        def wait():
            for work in works:
                work.wait()
            return buffers[1]

        return wait

    def visits(self, kv):
        """Yield (home rank, its keys and values) for every rank, starting with this rank. A rank
        passes on the keys that it cannot use too: another rank may use them."""
        for step in range(self.n):
            # Q6.3 ** The caller computes a block while this function stands at `yield`. When is
            #         the next block sent, and when is it waited for?
            #         hint: a rank can pass keys on before it uses them, not before they arrive
            last = step == self.n - 1
            arriving = None if last else self.hop(kv)
            yield (self.r - step) % self.n, kv
            kv = None if last else arriving()
            # /Q6.3


# ── one block, forward and backward ──────────────────────────────────────────────────────────

# The operators behind torch's scaled_dot_product_attention. They never hold a block's scores, and
# return the log-sum-exp that merging needs. A GPU's operator rounds each block's output to bf16, so
# it is not used. With a mask, the operator returns a log-sum-exp of 0 for a row that sees nothing,
# where -inf is right, so a masked block is written out.
FUSED = {
    "cpu": (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
}


def _as_wide(x, width):
    """x with zeros behind its last dimension, up to `width`: the fused operators want one width."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _scores(q_BHsd, k_BKsd, causal, mask, scale):
    """Scores (B, H, rows, columns), minus infinity where a key is not seen."""
    k_BHsd = k_BKsd.repeat_interleave(q_BHsd.shape[1] // k_BKsd.shape[1], dim=1)
    scores = q_BHsd @ k_BHsd.mT * scale
    if causal:
        mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
    return scores if mask is None else scores.masked_fill(~mask.to(scores.device), -math.inf)


def block_forward(q_BHsd, k_BKsd, v_BKsd, causal, mask=None, scale=None):
    """Attention over one block: its output (B, H, rows, width of v), and the log-sum-exp
    (B, H, rows) of each row of scores. A row that sees nothing has output 0, log-sum-exp -inf."""
    scale = q_BHsd.shape[-1] ** -0.5 if scale is None else scale
    fused, _ = FUSED.get(q_BHsd.device.type, (None, None))
    if fused and mask is None:
        width = max(q_BHsd.shape[-1], v_BKsd.shape[-1])
        qkv = (_as_wide(x, width) for x in (q_BHsd, k_BKsd, v_BKsd))
        out, lse = fused(*qkv, is_causal=causal, scale=scale)
        return out[..., : v_BKsd.shape[-1]], lse
    scores = _scores(q_BHsd, k_BKsd, causal, mask, scale)
    lse_BHs1 = scores.logsumexp(-1, keepdim=True)
    probs = (scores - lse_BHs1.masked_fill(lse_BHs1 == -math.inf, 0)).exp()
    v_BHsd = v_BKsd.repeat_interleave(q_BHsd.shape[1] // v_BKsd.shape[1], dim=1)
    return probs @ v_BHsd, lse_BHs1[..., 0]


def block_backward(d_out, q_BHsd, out, lse_BHs, k_BKsd, v_BKsd, causal, mask=None, scale=None):
    """dq, dk, dv of one block, from the output and log-sum-exp of the *whole* row. Probabilities
    are then those of full attention, and the gradients of blocks add up.
    Source: Dao, arXiv:2307.08691, section 3.1."""
    scale = q_BHsd.shape[-1] ** -0.5 if scale is None else scale
    _, fused = FUSED.get(q_BHsd.device.type, (None, None))
    if fused and mask is None:
        widths = [x.shape[-1] for x in (q_BHsd, k_BKsd, v_BKsd)]
        tensors = (_as_wide(x, max(widths)) for x in (d_out, q_BHsd, k_BKsd, v_BKsd, out))
        gradients = fused(*tensors, lse_BHs, 0.0, causal, scale=scale)
        return [x[..., :width] for x, width in zip(gradients, widths)]
    sharing = q_BHsd.shape[1] // k_BKsd.shape[1]
    k_BHsd, v_BHsd = (x.repeat_interleave(sharing, dim=1) for x in (k_BKsd, v_BKsd))
    scores = _scores(q_BHsd, k_BKsd, causal, mask, scale)
    # Q6.4 ** Softmax couples a whole row, and this block is a part of the row. Which saved tensors
    #         stand for the other parts of the row?
    #         hint: the row's log-sum-exp, and <d_out, out>, the sum of p · dp over the whole row
    probs = (scores - lse_BHs[..., None]).exp()
    row_dot = (d_out * out).sum(-1, keepdim=True)
    d_scores = probs * (d_out @ v_BHsd.mT - row_dot) * scale
    # /Q6.4
    # query heads that share a key/value head give it the sum, before anything travels
    by_key = lambda x_BHsd: x_BHsd.unflatten(1, (-1, sharing)).sum(2)
    return d_scores @ k_BHsd, by_key(d_scores.mT @ q_BHsd), by_key(probs.mT @ d_out)


def _by_head(x_BsHd):
    """(B, H, s, d): a view in fp32 or float64, a copy in fp32 of a narrower dtype."""
    return x_BsHd.transpose(1, 2).to(torch.promote_types(x_BsHd.dtype, torch.float32))


def _packed(k_BsKd, v_BsKd):
    """Keys and values side by side in one message: (B, K, s, width of k + width of v)."""
    return torch.cat([k_BsKd.transpose(1, 2), v_BsKd.transpose(1, 2)], dim=-1)


def _unpacked(dkv, q):
    """dk and dv (B, s, K, width) in q's dtype; dk is as wide as q."""
    d = q.shape[-1]
    return [x.transpose(1, 2).to(q.dtype) for x in (dkv[..., :d], dkv[..., d:])]


# The two functions below and `visits` take turns. Each asks for the next visit only after it has
# merged a block, so `visits` runs on from its `yield`, and waits, only then: post, compute, wait.


def _attend(q_BsHd, width, visits, ring):
    """Attention of this rank's queries over the keys and values of all visits. Returns the output
    (B, s, H, width of v) in q's dtype, and the log-sum-exp (B, H, s) of every row."""
    q_BHsd, d = _by_head(q_BsHd), q_BsHd.shape[-1]
    out_BsHd = q_BHsd.new_zeros(*q_BsHd.shape[:3], width)
    out_BHsd, lse_BHs = out_BsHd.transpose(1, 2), torch.full_like(q_BHsd[..., 0], -math.inf)
    for j, kv_j in visits:
        if sight := ring.sight(j, q_BsHd.shape[1]):
            rows, columns, *seen = sight
            kv = kv_j[:, :, columns].to(q_BHsd.dtype)
            block = block_forward(q_BHsd[:, :, rows], kv[..., :d], kv[..., d:], *seen, ring.scale)
            merge(out_BHsd[:, :, rows], lse_BHs[:, :, rows], *block)
    return out_BsHd.to(q_BsHd.dtype), lse_BHs


def _attend_backward(d_out_BsHd, q_BsHd, out_BsHd, lse_BHs, visits, ring, dq_BsHd):
    """Yield, for each visit, the gradient of its keys and values from this rank's queries, packed,
    in fp32 or wider. Adds the gradient of the queries to dq in place."""
    d_out, q, out = (_by_head(x) for x in (d_out_BsHd, q_BsHd, out_BsHd))
    dq, d = dq_BsHd.transpose(1, 2), q.shape[-1]
    lse = lse_BHs.masked_fill(lse_BHs == -math.inf, 0)  # exp(-inf + inf) is not a number
    for j, kv_j in visits:
        dkv_j = torch.zeros_like(kv_j, dtype=q.dtype)
        if sight := ring.sight(j, q.shape[2]):
            rows, columns, *seen = sight
            kv = kv_j[:, :, columns].to(q.dtype)
            of_rows = [x[:, :, rows] for x in (d_out, q, out, lse)]
            dq_rows, *dkv = block_backward(*of_rows, kv[..., :d], kv[..., d:], *seen, ring.scale)
            dq[:, :, rows] += dq_rows
            dkv_j[:, :, columns] = torch.cat(dkv, dim=-1)
        yield dkv_j


# ── the ladder ───────────────────────────────────────────────────────────────────────────────


class _RingAttention(torch.autograd.Function):
    """
    forward   n-1 hops of k, v
    backward  n-1 hops of k, v again; n hops of dk, dv, of which the last takes them home
    """

    @staticmethod
    def forward(ctx, q, k, v, ring):
        out, lse = _attend(q, v.shape[-1], ring.visits(_packed(k, v)), ring)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        ring, dq = ctx.ring, torch.zeros_like(q, dtype=lse.dtype)
        visits = ring.visits(_packed(k, v))
        dkv = _sum_on_the_way(_attend_backward(d_out, q, out, lse, visits, ring, dq), ring)
        return dq.to(q.dtype), *_unpacked(dkv, q), None


def _sum_on_the_way(dkv_by_visit, ring):
    """The gradient of this rank's own keys and values: the sum of what all ranks add to it."""
    # Q6.5 *** Every rank adds to the gradient of the keys that visit it. How does the sum reach the
    #          rank that owns the keys?
    #          hint: the sum follows the keys, one hop behind, and makes one hop more than the keys
    sum_so_far = None
    for dkv in dkv_by_visit:
        if sum_so_far is not None:
            dkv += sum_so_far()
        sum_so_far = ring.hop(dkv)
    return sum_so_far()
    # /Q6.5


def ring_attention(q, k, v, group, layout="zigzag", documents=None, **options):
    """Causal attention in which keys and values go round while blocks are computed.

    Args: q (B, s, H, d), k (B, s, K, d), v (B, s, K, any width): this rank's tokens as made by
    `shard(..., group, layout)`, equally many on every rank; K divides H. What a query may see:
    documents (B, S), the document of each token of the *whole* sequence, or -1. A token sees its
    own document only; a token of -1 sees nothing and gets 0. causal=False: later tokens too; then
    pass length=S, unless S is n·s. window=w: of these, the tokens less than w positions away.
    scale: the factor of the scores, by default d ** -0.5. With documents or a window, the scores of
    a block, (B, H, s, s), stand in memory. `agree_on_sequence` compares the ranks' sequences.
    Returns (B, s, H, width of v). Sums in fp32 or wider. Raises ValueError where these do not fit.
    Source: Liu et al., arXiv:2310.01889; striped: Brandon et al., arXiv:2311.09431.
    """
    _check(q, k, v)
    return _RingAttention.apply(q, k, v, _Ring.of(group, layout, documents, options))


class _GatheredAttention(torch.autograd.Function):
    """
    forward   all_gather           k, v of every rank, which are kept
    backward  reduce_scatter(SUM)  dk, dv of every rank
    """

    @staticmethod
    def forward(ctx, q, k, v, ring):
        kv = _packed(k, v)
        kv_n = kv.new_empty(ring.n, *kv.shape)
        # all_gather over cp, 2·B·s·K·d from each: every rank now holds all keys and values
        dist.all_gather_single(kv_n.flatten(0, 1), kv, group=ring.group)
        out, lse = _attend(q, v.shape[-1], enumerate(kv_n), ring)
        ctx.ring = ring
        ctx.save_for_backward(q, kv_n, out, lse)
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, kv_n, out, lse = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=lse.dtype)
        visits = enumerate(kv_n)
        dkv_n = torch.stack([*_attend_backward(d_out, q, out, lse, visits, ctx.ring, dq)])
        received_n = torch.empty_like(dkv_n)
        # all_to_all over cp, 2·B·s·K·d to each: every rank now holds all parts of its own dk, dv.
        # With the sum it is a reduce-scatter; gloo's own sends twice as much, and blocks
        dist.all_to_all_single(received_n, dkv_n, group=ctx.ring.group)
        return dq.to(q.dtype), *_unpacked(received_n.sum(0), q), None


def all_gather_attention(q, k, v, group, layout="zigzag", documents=None, **options):
    """Causal attention that gathers all keys and values first. It is simple, hides no message, and
    holds keys and values of the whole sequence, which are K/H of the size of all queries. Arguments
    as in `ring_attention`. Source: The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.2."""
    _check(q, k, v)
    return _GatheredAttention.apply(q, k, v, _Ring.of(group, layout, documents, options))


def _exchange(x, group, layout, heads_to_tokens):
    """One all-to-all: from some tokens of all heads, (B, s, H, d), to all tokens of some heads,
    (B, S, h, d) in the order of positions; or back."""
    n = dist.get_world_size(group)
    s = x.shape[1] if heads_to_tokens else x.shape[1] // n
    order = _owned_exactly(s, n, layout).flatten().to(x.device)
    # Q6.6 ** Each rank holds some tokens of all heads and needs all tokens of some heads. Which
    #         part of its tensor does a rank send to which rank?
    #         hint: in what is sent, the first dimension is the receiver; in what came, the sender
    if heads_to_tokens:
        out = rearrange(x, "b s (n h) d -> n b s h d", n=n).contiguous()
    else:
        out = rearrange(x[:, order], "b (n s) h d -> n b s h d", n=n).contiguous()
    came = torch.empty_like(out)
    # all_to_all over cp, 1/n of B·s·H·d to each: tokens arrive where their heads are, or return
    dist.all_to_all_single(came, out, group=group)
    if heads_to_tokens:
        return rearrange(came, "n b s h d -> b (n s) h d")[:, order.argsort()]
    return rearrange(came, "n b s h d -> b s (n h) d")
    # /Q6.6


class _Exchange(torch.autograd.Function):
    """
    forward   all_to_all       heads for tokens, or tokens for heads
    backward  all_to_all back  the other one
    """

    @staticmethod
    def forward(ctx, x, group, layout, heads_to_tokens):
        ctx.back = group, layout, not heads_to_tokens
        return _exchange(x, group, layout, heads_to_tokens)

    @staticmethod
    def backward(ctx, d_x):
        return _exchange(d_x, *ctx.back), None, None, None


def ulysses_attention(q, k, v, group, layout="contiguous", documents=None, attend=None, **options):
    """Causal attention in which each rank computes 1/n of the heads, over all tokens.

    `attend(q, k, v)` is what a rank does with its heads; by default it attends alone. Key/value
    heads that n does not divide are repeated until n divides them, and autograd sums their
    gradients. Arguments as in `ring_attention`. Raises ValueError if n does not divide H.
    Source: Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
    """
    _check(q, k, v)
    n, s, H, K = dist.get_world_size(group), q.shape[1], q.shape[2], k.shape[2]
    if H % n:
        divisors = [degree for degree in range(1, H + 1) if H % degree == 0]
        raise ValueError(
            f"Ulysses over {n} ranks: they do not divide {H} query heads ({K} key/value heads, "
            f"{n * s} tokens): use one of {divisors}, or a ring, which divides tokens only"
        )
    if attend is None:
        documents = _whole(documents, n * s, _multiple(n, layout))
        alone = _Ring(1, 0, documents=documents, **options)
        attend = lambda q, k, v: _RingAttention.apply(q, k, v, alone)
    k, v = (x.repeat_interleave(math.lcm(K, n) // K, dim=2) for x in (k, v))
    q, k, v = (_Exchange.apply(x, group, layout, True) for x in (q, k, v))
    return _Exchange.apply(attend(q, k, v), group, layout, False)


def ulysses_ring_attention(q, k, v, group, ring_group, layout="zigzag", documents=None, **options):
    """Ulysses over `group`, where links are fast, and a ring over `ring_group` for the heads that a
    rank then has: for more ranks than heads, in fewer hops. A rank's tokens are
    `shard(shard(x, ring_group, layout, inner=u), group, "contiguous")`, u the size of `group`.
    Other arguments as in `ring_attention`. Source: Fang & Zhao, USP, arXiv:2405.07719."""
    u, n = dist.get_world_size(group), dist.get_world_size(ring_group)
    documents = _whole(documents, q.shape[1] * u * n, _multiple(n, layout, u))
    ring = partial(ring_attention, group=ring_group, layout=layout, documents=documents, **options)
    return ulysses_attention(q, k, v, group, attend=ring)


# ── what a library adds: more masks than causal, and refusals ────────────────────────────────


def masked_sight(queries_s, keys_s, ring):
    """What queries at ascending positions see of keys at ascending positions, a Sight with a mask
    unless all of what it is cut to is seen. Padding is never seen."""
    tokens, documents = ring.n * len(keys_s), ring.documents
    S = ring.length or (tokens if documents is None else documents.shape[1])
    if S > tokens:
        raise ValueError(f"length {S}: shard() gave the ranks {tokens} tokens together")
    if not ring.causal and ring.window is None and documents is None:  # no scores to be masked
        columns = slice(0, int((keys_s < S).sum()))
        return Sight(slice(0, len(queries_s)), columns, False, None) if columns.stop else None
    distance = queries_s[:, None] - keys_s
    seen = (distance.abs() < (ring.window or tokens)) & (keys_s < S)
    seen = (seen & (distance >= 0) if ring.causal else seen)[None]
    if documents is not None:
        whole_BS = _whole(documents, tokens, _multiple(ring.n, ring.layout))
        query_documents, key_documents = whole_BS[:, queries_s, None], whole_BS[:, None, keys_s]
        seen = seen.to(documents.device) & (query_documents == key_documents)
        seen = seen & (query_documents >= 0)
    if not seen.any():
        return None
    rows, columns = (_span(seen.any(0).any(dim)) for dim in (1, 0))
    mask = seen[:, rows, columns]
    return Sight(rows, columns, False, None if mask.all() else mask[:, None])


def _span(flags):
    """The slice from the first True to the last True."""
    first, last = flags.nonzero().flatten()[[0, -1]].tolist()
    return slice(first, last + 1)


def _whole(documents_BS, tokens, multiple):
    """Documents of a whole sequence, padded with -1 to `tokens`. shard() pads by less than
    `multiple`, so shorter documents are not of the whole sequence: of one rank's part, say."""
    if documents_BS is None:
        return None
    padding = tokens - documents_BS.shape[1]
    if not 0 <= padding < multiple:
        raise ValueError(
            f"documents of {tokens - padding} tokens, for {tokens} tokens on all ranks together: "
            f"pass those of the whole sequence, or pad them with -1 to {tokens}"
        )
    return F.pad(documents_BS, (0, padding), value=-1)


def _check(q, k, v):
    """Raise ValueError unless queries, keys and values fit each other."""
    H, K = q.shape[2], k.shape[2]
    if H % K:
        raise ValueError(f"{K} key/value heads do not divide {H} query heads")
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip("qkv", (q, k, v)))
        raise ValueError(f"{shapes}: only q may have more heads, and v another width, than k")


def agree_on_sequence(x_BS, group, layout="zigzag", **options):
    """Raise Disagreement unless all ranks shard the same whole sequences x (B, S) in the same way,
    with the same options of `ring_attention`. Call it once, before the first attention: lengths
    that differ end in an abort, and tokens or documents that differ in wrong numbers."""
    lines = []
    for name, value in {"tokens": x_BS, "layout": layout, **options}.items():
        if torch.is_tensor(value):
            digest = sha256(str(value.tolist()).encode()).hexdigest()[:8]
            value = f"of shape {tuple(value.shape)}, {value.dtype}, digest {digest}"
        lines.append(f"{name} {value}")
    agree(lines, group)


# ── from here on: proof, run, kit ────────────────────────────────────────────────────────────

from contextlib import contextmanager


@contextmanager
def kept_bytes():
    """Collect {storage: bytes} of all that autograd keeps for backward while this is open."""
    kept = {}
    keep = lambda x: kept.update({x.untyped_storage()._cdata: x.untyped_storage().nbytes()}) or x
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield kept


class Case:
    """Whole sequences, the same on every rank, and what the twin makes of them: `expected`, the
    output and dq, dk, dv. `logit` is added to all scores of the later half's keys; `width` is that
    of value heads; options are those of `ring_attention`."""

    def __init__(self, S, H, K, device, logit=0.0, packed=False, d=8, width=8, B=2, **options):
        draw = torch.Generator().manual_seed(0)
        normal = partial(torch.randn, generator=draw, dtype=torch.float64)
        shapes = (B, S, H, d), (B, S, K, d), (B, S, K, width), (B, S, H, width)
        q, k, v, d_out = (normal(*shape) for shape in shapes)
        if logit:
            q[..., 0], k[..., 0] = logit * math.sqrt(d), (torch.arange(S) >= S // 2)[:, None]
        documents_BS = (torch.rand(B, S, generator=draw) < 4 / S).cumsum(1).to(device)
        documents = documents_BS if packed else None
        self.options = dict(documents=documents, length=S, **options)
        self.qkv = [x.to(device).requires_grad_() for x in (q, k, v)]
        self.d_out = d_out.to(device)
        distance = (torch.arange(S)[:, None] - torch.arange(S)).to(device)
        visible = distance.abs() < options.get("window", S)
        if options.get("causal", True):
            visible &= distance >= 0
        out = causal_attention(*self.qkv, documents, options.get("scale"), visible)
        self.expected = [out.detach(), *torch.autograd.grad(out, self.qkv, self.d_out)]

    def run(self, attend, cut):
        """Attend on this rank's part, padded with 1000s. Returns the output and gradients, the
        largest error, bytes sent, and bytes kept for backward."""
        q, k, v = (cut(x.detach(), fill=1e3).requires_grad_() for x in self.qkv)
        with Ledger() as ledger:
            with kept_bytes() as kept:
                out = attend(q, k, v, **self.options)
            out.backward(cut(self.d_out))
        out = out.detach() * cut(torch.ones_like(self.d_out))  # the output of padding is dropped
        results = [out, q.grad, k.grad, v.grad]
        error = max(relative_error(x, cut(y)) for x, y in zip(results, self.expected))
        return results, error, sum(ledger.sent.values()), sum(kept.values())


def two_groups(n, patience):
    """This rank's Ulysses group, of neighbours, and its ring, as near to square as n allows."""
    u = max(u for u in range(1, n + 1) if n % u == 0 and u * u <= n)
    grid, groups = torch.arange(n).view(n // u, u), []
    for ranks in (*grid.tolist(), *grid.T.tolist()):  # in this order on every rank
        group = dist.new_group(ranks, timeout=timedelta(seconds=patience))
        groups += [group] if dist.get_rank() in ranks else []
    return groups


def by_hand_row(group, device):
    """The ring by hand beside the twin: its output. Keys and values are sent n-1 times."""
    n, cut = dist.get_world_size(group), partial(shard, group=group, layout="contiguous")
    case = Case(16 * n, 4, 4, device)
    q, k, v = (cut(x.detach()).transpose(1, 2) for x in case.qkv)
    with Ledger() as ledger:
        out = ring_by_hand(q, k, v, group)
    error = relative_error(out.transpose(1, 2), cut(case.expected[0]))
    sent = sum(ledger.sent.values()), (n - 1) * (k.nbytes + v.nbytes)
    return Row("ring by hand, forward", error, sent)


def attention_rows(group, pair, device, K=2):
    """Every way to attend, beside the twin, on a length that no layout divides. The formulas count
    heads: one head is d elements of q or k, and one value, for each token of this rank."""
    n, u, m = (dist.get_world_size(some) for some in (group, *pair))
    H, case = 4 * n, partial(Case, 16 * n + 3, 4 * n, K, device)
    Kn, Ku = math.lcm(K, n), math.lcm(K, u)  # key/value heads, as Ulysses repeats them
    around = lambda n, K: (3 * n - 2) * K if n > 1 else 0
    traded = lambda n, K: 2 * (n - 1) / n * (H + K)
    whole = {"group": group, "layout": "zigzag"}
    pairs = {"group": pair[0], "ring_group": pair[1]}
    ring = "ring", partial(ring_attention, **whole), around(n, K), K
    gather = "all-gather", partial(all_gather_attention, **whole), 2 * (n - 1) * K, n * K
    ulysses = "Ulysses", partial(ulysses_attention, **whole), traded(n, Kn), Kn
    heads_sent = traded(u, Ku) + around(m, Ku)
    both = "Ulysses×ring", partial(ulysses_ring_attention, **pairs), heads_sent, Ku
    plain = case()
    claims = [(*way, "zigzag", "", plain) for way in (ring, gather, ulysses, both)]
    claims += [(*ring, layout, "", plain) for layout in ("contiguous", "striped")]
    claims += [(*ring, "zigzag", ", written out", plain)]
    claims += [(*ring, "zigzag", f", scores of {x:,}", case(logit=x)) for x in (10_000, -10_000)]
    others = {
        ", packed documents": case(packed=True),
        ", a window of 7": case(window=7),
        ", not causal, v of 12": case(causal=False, scale=0.5, width=12),
    }
    ways = ring, gather, ulysses, both
    claims += [(*way, "zigzag", *other) for other in others.items() for way in ways]
    outer = partial(shard, group=pair[1], inner=u)
    rows = []
    for name, attend, heads_sent, K_kept, layout, setting, case in claims:
        cut = partial(shard, group=group, layout=layout)
        if "×" in name:
            cut = lambda x, fill=0: shard(outer(x, fill=fill), pair[0], "contiguous", fill)
        else:
            attend = partial(attend, layout=layout)
        with patch.dict(FUSED, clear="written out" in setting):
            _, error, sent, kept = case.run(attend, cut)
        tokens_8 = 8 * len(case.d_out) * cut(case.d_out).shape[1]
        head = tokens_8 * (case.qkv[0].shape[-1] + case.qkv[2].shape[-1])
        held = head * (H + K_kept) + tokens_8 * H  # q, out, k, v; log-sum-exp
        name += f", {layout}" * (layout != "zigzag") + setting
        rows.append(Row(name, error, (sent, head * heads_sent), (kept, held)))
    return rows


def sum_over_ranks(tensors, group):
    """Sum in place, over ranks: each rank's gradients come from its own tokens only."""
    for x in tensors:
        # all_reduce(SUM) over cp, one tensor: every rank now holds the sum over all tokens
        dist.all_reduce(x, group=group)
    return tensors


def model_row(group, device, K=2, d=8):
    """The model beside its twin: loss and gradients. A rank's activations must be 1/n of what the
    same code keeps where one rank has the whole sequence."""
    n = dist.get_world_size(group)
    draw, S, s = torch.Generator().manual_seed(0), 16 * n, 16
    x_BS = torch.randint(256, (1, S), generator=draw).to(device)
    documents_BS = (torch.rand(1, S, generator=draw) < 0.1).cumsum(1).to(device)
    y_BS = next_tokens(x_BS, documents_BS)
    assert len(x_BS.unique()) > S // 2 and len(y_BS.unique()) > S // 2, "a trivial batch"

    def backward(x, y, positions_s, attend, num_labels):
        torch.manual_seed(0)
        model = LanguageModel(K=K, d=d, layers=1).double().to(device)
        with kept_bytes() as kept:
            logits = model(x, positions_s, partial(attend, documents=documents_BS))
        loss = local_loss(logits, y, num_labels)
        loss.backward()
        for param in model.parameters():
            kept.pop(param.untyped_storage()._cdata, None)
        return [loss.detach(), *(p.grad for p in model.parameters())], sum(kept.values())

    twin = x_BS, y_BS, torch.arange(S)
    expected, _ = backward(*twin, causal_attention, (y_BS != -100).sum())
    alone = lambda *qkv, documents: _RingAttention.apply(*qkv, _Ring(1, 0, documents=documents))
    _, kept_alone = backward(*twin, alone, torch.tensor(1))
    cut = partial(shard, group=group)
    with Ledger() as ledger:
        num_labels = count_labels(cut(y_BS), group)
        here = cut(x_BS), cut(y_BS), positions(S, group)
        results, kept = backward(*here, partial(ring_attention, group=group), num_labels)
        sum_over_ranks(results, group)
    around = (6 * n - 4) * K * 8 * s * d if n > 1 else 0
    sent = around + 2 * (n - 1) / n * sum(x.nbytes for x in (num_labels, *results))
    error = max(relative_error(x, y) for x, y in zip(results, expected))
    name = "model: loss, gradients; kept 1/n"
    return Row(name, error, (sum(ledger.sent.values()), sent), (kept, kept_alone / n))


def merge_unshifted(out_BHsd, lse_BHs, block_out, block_lse):
    """Wrong on purpose: nothing is subtracted before exp, which overflows from 710 on."""
    old, new = lse_BHs.exp()[..., None], block_lse.exp()[..., None]
    out_BHsd.copy_((old * out_BHsd + new * block_out) / (old + new))
    lse_BHs.copy_((old + new).log()[..., 0])


def stop_short(dkv_by_visit, ring):
    """Wrong on purpose: after n-1 hops, as keys make, each sum is one rank before its home."""
    arrived = lambda: 0
    for dkv in dkv_by_visit:
        dkv += arrived()
        arrived = ring.hop(dkv)
    arrived()
    return dkv


def wrong_rows(group, device):
    """What goes wrong most often, and the error that it must show. Zigzag, no padding."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    S, H, K, cut = 16 * n, 4, 2, partial(shard, group=group)
    attend, chapter = partial(ring_attention, group=group), globals()
    case = Case(S, H, K, device, logit=1e4)
    with patch.dict(chapter, merge=merge_unshifted):
        (out, *_), *_ = case.run(attend, cut)
    right, early = case.expected[0], (torch.arange(S, device=device) < S // 2)[:, None, None]
    predicted = relative_error(cut(right * early), cut(right))
    error = relative_error(out.nan_to_num(), cut(right))
    rows = [Row("merge without maximum, NaN as 0", error, wrong=predicted)]
    if n == 1:
        return rows

    case = Case(S, H, K, device)
    with patch.dict(chapter, _sum_on_the_way=stop_short):
        (_, _, dk, _), *_ = case.run(attend, cut)
    owned_ns = _owned(S, n, "zigzag")
    right, of_next = (case.expected[2][:, owned_ns[rank % n]] for rank in (r, r + 1))
    error, predicted = relative_error(dk, right), relative_error(of_next, right)
    rows += [Row("dk, dv one hop short", error, wrong=predicted)]

    q, k, v = (x.detach() for x in case.qkv)
    offset = torch.arange(S // n) + r * (S // n)
    out = attend(*(rotate(cut(x), offset) for x in (q, k)), cut(v))
    full = lambda at: cut(causal_attention(rotate(q, at), rotate(k, at), v))
    right, wrong = full(torch.arange(S)), full(owned_ns.flatten().argsort())
    error, predicted = relative_error(out, right), relative_error(wrong, right)
    rows += [Row("rotary offset by rank", error, wrong=predicted)]

    logits = torch.zeros(1, S // n, 256, device=device)
    labels = torch.full((1, S // n), -100 if r else 7, device=device)  # only rank 0's count
    mean = local_loss(logits, labels, count_labels(labels, group))
    of_means = local_loss(logits, labels, (labels != -100).sum()) / n
    sum_over_ranks([mean, of_means], group)
    return [*rows, Row("mean of local means", relative_error(of_means, mean), wrong=1 - 1 / n)]


def work(S, n, layout):
    """Pairs of query and key that a ring of n computes, (n ranks, n steps), by the same `sight`
    that attention asks."""
    pairs, s = torch.zeros(n, n, dtype=torch.long), _owned(S, n, layout).shape[1]
    for r in range(n):
        ring = _Ring(n, r, layout=layout)
        for step in range(n):
            if sight := ring.sight((r - step) % n, s):
                rows, columns = (part.stop - part.start for part in sight[:2])
                pairs[r, step] = rows * (rows + 1) // 2 if sight.causal else rows * columns
    return pairs


def efficiency(pairs):
    """Share of its time that a rank computes, if each step takes as long as its slowest rank."""
    return (pairs.sum() / (len(pairs) * pairs.amax(0).sum())).item()


def plot(n, path):
    """Draw each layout's ring: a lane per rank, a shade per step, white where a rank waits."""
    from matplotlib.figure import Figure

    every = {layout: work(12 * n, n, layout) for layout in LAYOUTS}
    unit = every["zigzag"].sum(1).max().item()
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots(3, sharex=True)
    for axis, (layout, pairs) in zip(axes, every.items()):
        starts = F.pad(pairs.amax(0).cumsum(0), (1, 0)).double() / unit
        for step in range(n):
            widths = pairs[:, step].double() / unit
            shade, ink = ("#6fa8c9", "black") if step % 2 else ("#0b3c5d", "white")
            axis.barh(range(n), widths, 0.8, left=starts[step].item(), color=shade)
            middle = (starts[step].item() + widths[-1].item() / 2, n - 1)
            axis.annotate(f"step {step}", middle, ha="center", va="center", color=ink, fontsize=8)
            axis.axvline(starts[step + 1], color="0.5", linewidth=0.6, linestyle=":")
        title = f"{layout}: ranks compute {efficiency(pairs):.0%} of the time"
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_yticks(range(n), [f"rank {r}" for r in range(n)], fontsize=8)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlim(right=(2 * n - 1) / n)
    axes[-1].set_xlabel(
        f"causal attention over {12 * n} tokens: work relative to a perfectly balanced ring; "
        "dotted: the end of a step"
    )
    figure.savefig(path, dpi=120)
    print(f"drew {path}")


# ── the run ──────────────────────────────────────────────────────────────────────────────────

ATTENTION = dict(ring=ring_attention, gather=all_gather_attention, ulysses=ulysses_attention)


def train_step(model, optimizer, x_BS, y_BS, group, attend, layout):
    """One step on whole sequences, of which this rank computes its own tokens. Returns the loss of
    the whole step. A step without a label changes nothing, on all ranks alike."""
    cut = partial(shard, group=group, layout=layout)
    labels = cut(y_BS, fill=-100)
    num_labels = count_labels(labels, group)
    logits = model(cut(x_BS), positions(x_BS.shape[1], group, layout), attend)
    loss = local_loss(logits, labels, num_labels)
    loss.backward()
    loss, *_ = sum_over_ranks([loss.detach(), *(p.grad for p in model.parameters())], group)
    if num_labels > 0:
        optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(args, group, device):
    """Train on one long sequence a step, 1/n of it on this rank. Returns the model."""
    S, layout = args.length, args.layout
    text = read_text(args.text, S + 1)
    torch.manual_seed(0)
    model = LanguageModel().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    attend = partial(ATTENTION[args.attention], group=group, layout=layout)
    agree_on_sequence(sample(text, 0, 1, S)[0], group, layout)
    say(f"{args.attention}, {layout}, {S} tokens: unigrams {unigram_entropy(text):.2f} nats")
    for step in range(args.steps):
        batch = (x.to(device) for x in sample(text, step, 1, S))
        with kept_bytes() as kept:
            loss = train_step(model, optimizer, *batch, group, attend, layout)
        if step % 5 == 0 or step == args.steps - 1:
            say(f"step {step:3}  loss {loss:.3f}")
    scores = 4 * len(model.blocks) * 8 * S**2
    say(
        f"a rank kept {sum(kept.values()) / 1e6:.1f} MB for backward, parameters and all; "
        f"the scores of full attention alone would be {scores / 1e6:,.0f} MB"
    )
    return model


def main(args, device):
    """Prove, say how even the work is, train or draw. Returns 0 if every row is as claimed."""
    group, n = dist.group.WORLD, dist.get_world_size()
    say(f"06 context parallel · {n} ranks · {dist.get_backend()} · {device.type} · float64")
    pair = two_groups(n, args.timeout)
    rows = [by_hand_row(group, device), *attention_rows(group, pair, device)]
    if prove([*rows, model_row(group, device), *wrong_rows(group, device)], device):
        return 1
    for layout in LAYOUTS:
        pairs = work(12 * n, n, layout)
        each = " ".join(map(str, pairs.sum(1).tolist()))
        say(f"{layout:11} {12 * n} tokens, pairs by rank {each}: {efficiency(pairs):.3f} efficient")
    if args.plot and dist.get_rank() == 0:
        plot(n, args.plot)
    if args.steps and not args.plot:
        train(args, group, device)
    return 0


def validate(args, ranks):
    """Raise ValueError, with a sentence, at what cannot work, before any process starts."""
    if args.length < 1:
        raise ValueError(f"--length {args.length}: at least one token is needed")
    if args.attention == "ulysses" and 8 % ranks:
        raise ValueError(f"--attention ulysses: {ranks} ranks do not divide 8 heads: use 2, 4, 8")
    read_text(args.text, args.length + 1)


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

WAITED = 3  # exit status of a rank that waited in vain for another
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
    worst = [[x.error, out, off(x.sent), off(x.held)] for x, out in zip(rows, outside)]
    worst = torch.tensor(worst).double().nan_to_num(math.inf).to(device)
    # all_reduce(MAX) over all ranks, four numbers a row: the worst rank speaks for all
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
    say("error: max|difference| / max|one process|; bytes: of rank 0, sent as a ring sends them")
    say(f"{'':36}    error   bytes sent      formula   bytes held      formula")
    broken = 0
    for row, (error, out, unsent, unheld) in zip(rows, worst.tolist()):
        holds = out <= 0 and unsent < 0.5 and unheld < 0.5
        pairs = [[f"{x:,.0f}" for x in pair] if pair else "--" for pair in (row.sent, row.held)]
        note = f"  wrong on purpose: {row.wrong:.3g} predicted" if row.wrong else ""
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
            while not run.join():
                pass
        except mp.ProcessExitedException:  # join() has ended the other ranks by SIGTERM
            codes = [process.exitcode for process in run.processes]
            stacks = [Path(folder, str(rank)).read_text() for rank in range(ranks)]
            sys.exit(_what_went_wrong(codes, stacks))
    sys.exit(0)


def _what_went_wrong(codes, stacks):
    """Which signal ended a rank; or, if no rank told a fault of its own, where each one stood."""
    killed = {r: -code for r, code in enumerate(codes) if code < 0 and code != -signal.SIGTERM}
    said = [f"rank {r} was ended by {signal.Signals(by).name}" for r, by in killed.items()]
    if {*codes} <= {0, WAITED, -signal.SIGTERM}:
        said = ["some ranks waited in vain for others; each one stood at"]
        said += [f"rank {r} of {len(codes)}: {_place(stack)}" for r, stack in enumerate(stacks)]
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
        if re.search("by peer|imed out", str(error)):
            code = WAITED
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
    parser = arguments(__doc__, ranks=4, steps=20, plot="the work of each rank and step, by layout")
    add = parser.add_argument
    add("--length", type=int, default=4096, help="tokens of a sequence")
    add("--attention", choices=ATTENTION, default="ring", help="how keys meet queries in training")
    add("--layout", choices=LAYOUTS, default="zigzag", help="which tokens a rank holds")
    launch(main, parser.parse_args(), validate)
