"""06 · Context parallel: attention over a sequence that no rank holds

Each of n ranks holds S/n tokens of every sequence, and all parameters. Only attention needs other
tokens, and of those only keys and values: they go round, or to everyone, or heads are traded.

    contiguous   rank 0  ■■□□□□□□   rank 1  □□■■□□□□   ...   the last rank computes the most
    zigzag       rank 0  ■□□□□□□■   rank 1  □■□□□□■□   ...   all the same, at every step
    striped      rank 0  ■□□□■□□□   rank 1  □■□□□■□□   ...   nearly the same

    ladder         forward sends       backward sends                  kept beside q, out, lse
    all-gather     2(n-1) t·K·d        2(n-1) t·K·d of fp32            2 S·K·d
    ring           2(n-1) t·K·d        as much, and 2n t·K·d of fp32   2 t·K·d
    Ulysses        2(n-1)/n t·(H+K)·d  the same                        2 t·K·d
    Ulysses×ring   both, over u and n/u ranks                          2 t·K·d

Ulysses sends less than a ring forward if n > H/K + 1, needs n to divide H, and K counts as the
least common multiple of K and n. Parameters see S/n tokens: their gradients are summed over cp.

    python 06_cp_ring.py                          four ranks on this machine
    torchrun --nproc-per-node 4 06_cp_ring.py     the same, started by torchrun

Guide: SP/CP · Context parallelism · DeepSpeed-Ulysses · When should I add CP · very long context.
What does not hold: Llama 3 405B trained with CP=1 at 8K and CP=16 at 131K, never CP=2, and with an
all-gather of K and V, not a ring (arXiv:2407.21783, section 3.3.2, table 4). A "contiguous chunk"
leaves ranks idle: 4/7 of the work at 4. KV traffic per rank is (n-1)/n of the sequence: 1.5 times
from 2 to 4 ranks, not linear in CP.

Questions  Q6.1 * who owns which chunk?        Q6.2 ** how do two blocks become one?
           Q6.3 ** post, compute, wait?        Q6.4 ** what does backward recompute?
           Q6.5 *** how do dk, dv get home?    Q6.6 ** whose heads does each rank get?
"""
# B sequences · S tokens of each · t = S/n on this rank · H query heads · K key/value heads
# h, k heads on this rank · d size of a head · D = H·d width · V vocabulary (256) · n ranks

import argparse
import inspect
import logging
import math
import os
import sys
import tempfile
import time
import traceback
from collections import Counter, namedtuple
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from einops import rearrange
from torch import nn

__all__ = [
    "all_gather_attention",
    "positions",
    "ring_attention",
    "shard",
    "ulysses_attention",
    "ulysses_ring_attention",
    "unshard",
]

# ── the serial twin ──────────────────────────────────────────────────────────────────────────


def causal_attention(q_BSHd, k_BSKd, v_BSKd, documents_BS=None):
    """Full attention on one process, all scores in memory: (B, S, H, d), causal, query head i on
    key/value head i // (H/K), inside a document where documents are given."""
    group, S = q_BSHd.shape[2] // k_BSKd.shape[2], q_BSHd.shape[1]
    k_BSHd, v_BSHd = (x.repeat_interleave(group, dim=2) for x in (k_BSKd, v_BSKd))
    visible = torch.ones(S, S, dtype=torch.bool, device=q_BSHd.device).tril()
    if documents_BS is not None:
        visible = visible & (documents_BS[:, None, :, None] == documents_BS[:, None, None, :])
    scores = torch.einsum("bqhd,bkhd->bhqk", q_BSHd, k_BSHd) / math.sqrt(q_BSHd.shape[-1])
    probs = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", probs, v_BSHd)


def rotate(x_BtHd, positions_t):
    """Rotary embedding at global positions (t,) or (B, t). Source: Su et al., arXiv:2104.09864."""
    half = x_BtHd.shape[-1] // 2
    pace = 10000 ** (-torch.arange(half, device=x_BtHd.device, dtype=torch.float64) / half)
    angle = positions_t.to(x_BtHd.device)[..., None, None] * pace
    cos, sin = angle.cos().to(x_BtHd.dtype), angle.sin().to(x_BtHd.dtype)
    a, b = x_BtHd.split(half, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    """Attention, then an MLP, each on a normed copy of the residual stream."""

    def __init__(self, H, K, d):
        super().__init__()
        D, self.heads = H * d, [H, K, K]
        self.norm_attention, self.norm_mlp = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.out = nn.Linear(D, (H + 2 * K) * d), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x_BtD, positions_t, attend):
        heads = self.qkv(self.norm_attention(x_BtD)).unflatten(-1, (sum(self.heads), -1))
        q, k, v = heads.split(self.heads, dim=2)
        # keys are rotated before they travel, by the positions of the rank they live on
        attended = attend(rotate(q, positions_t), rotate(k, positions_t), v)
        x_BtD = x_BtD + self.out(attended.flatten(2))
        return x_BtD + self.down(F.gelu(self.up(self.norm_mlp(x_BtD))))


class LanguageModel(nn.Module):
    """Bytes (B, t) at global positions (t,) to logits of the next byte (B, t, V). All that it
    knows of other ranks is what attend(q, k, v) finds out."""

    def __init__(self, H=8, K=2, d=8, layers=2, V=256):
        super().__init__()
        self.token = nn.Embedding(V, H * d)
        self.blocks = nn.ModuleList(Block(H, K, d) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(H * d), nn.Linear(H * d, V, bias=False)

    def forward(self, x_Bt, positions_t, attend):
        x_BtD = self.token(x_Bt)
        for block in self.blocks:
            x_BtD = block(x_BtD, positions_t, attend)
        return self.head(self.norm(x_BtD))


def next_tokens(tokens_BS, documents_BS=None):
    """Labels, shifted while the sequence is whole: after sharding the neighbour lives elsewhere.
    -1, which does not count, at the end of the sequence and of each document."""
    labels_BS = F.pad(tokens_BS[:, 1:], (0, 1), value=-1)
    if documents_BS is None:
        return labels_BS
    return labels_BS.masked_fill(documents_BS != F.pad(documents_BS[:, 1:], (0, 1), value=-1), -1)


def valid_tokens(labels_Bt, group):
    """How many labels of the step count, over all ranks: a rank may have none. At least 1."""
    count = (labels_Bt != -1).sum()
    # all_reduce(SUM) over cp, 1: every rank now knows the divisor of the whole step
    dist.all_reduce(count, group=group)
    return count.clamp(min=1)


def loss_share(logits_BtV, labels_Bt, valid):
    """This rank's part of the mean over the step's `valid` labels: the parts add up to it."""
    lost = F.cross_entropy(
        logits_BtV.flatten(0, 1), labels_Bt.flatten(), reduction="sum", ignore_index=-1
    )
    return lost / valid


# ── the layouts: which tokens a rank owns, and what they see of another rank's ───────────────


def _owned(S, n, r, layout, inner=1):
    """The positions of rank r of n, ascending, after padding S to what the layout divides."""
    parts = (2 * n if layout == "zigzag" else n) * inner
    whole = torch.arange(-(-S // parts) * parts)
    if layout == "contiguous":
        return rearrange(whole, "(n t) -> n t", n=n)[r]
    if layout == "striped":
        return rearrange(whole, "(t n) -> n t", n=n)[r]
    if layout == "zigzag":
        # Q6.1 * A late token sees more than an early one. Which two of 2n chunks make all equal?
        #        hint: pair the chunk that sees least with the one that sees most
        chunks = rearrange(whole, "(c t) -> c t", c=2 * n)
        early, late = chunks[r], chunks[2 * n - 1 - r]
        return torch.cat([early, late])
        # /Q6.1
    raise ValueError(f"layout {layout!r}: use contiguous, zigzag or striped")


def positions(S, group, layout="zigzag", inner=1):
    """Global positions (t,) of this rank's tokens, ascending, on the CPU. Those from S on are
    padding: n·t is S rounded up to a multiple of n, or of 2n under zigzag, times `inner`, the
    ranks that will split a part once more (sequence parallelism, Ulysses inside a ring).
    Raises ValueError at a layout that is not contiguous, zigzag or striped."""
    return _owned(S, dist.get_world_size(group), dist.get_rank(group), layout, inner)


def shard(x_BS, group, layout="zigzag", fill=0, inner=1):
    """This rank's tokens (B, t, ...) of a whole (B, S, ...), which is padded with `fill`, never
    cut; the other arguments are those of `positions`. With autograd."""
    mine = positions(x_BS.shape[1], group, layout, inner).to(x_BS.device)
    part = x_BS[:, mine.clamp(max=x_BS.shape[1] - 1)]
    padding = (mine >= x_BS.shape[1]).view(1, -1, *[1] * (x_BS.dim() - 2))
    return part.masked_fill(padding, fill)


def unshard(x_Bt, S, group, layout="zigzag"):
    """The whole (B, S, ...) of every rank's (B, t, ...), without padding. Without autograd."""
    n, x_tB = dist.get_world_size(group), x_Bt.detach().transpose(0, 1).contiguous()
    parts = x_tB.new_empty(n * len(x_tB), *x_tB.shape[1:])
    # all_gather over cp, B·t from each: every rank now holds the sequence, rank after rank
    dist.all_gather_single(parts, x_tB, group=group)
    order = torch.cat([_owned(len(parts), n, rank, layout) for rank in range(n)])
    return parts[order.argsort().to(x_Bt.device)][:S].transpose(0, 1)


# Of a block, the rows and columns worth computing; whether row i sees columns up to i, or all; or
# a mask (B, 1, rows, columns), True where seen.
Sight = namedtuple("Sight", "rows columns causal mask")


@dataclass
class _Ring:
    """Where this rank stands, and what it may see."""

    n: int
    r: int
    group: object = None  # not touched where n is 1
    layout: str = "contiguous"
    documents_BS: torch.Tensor = None

    @classmethod
    def of(cls, group, *rest):
        return cls(dist.get_world_size(group), dist.get_rank(group), group, *rest)

    def sight(self, j, t):
        """What this rank's t queries see of the t keys of rank j, a Sight; None if nothing.

        Positions ascend in every layout, so the queries that see any key are the last ones, and
        the keys that are seen are the first. Cut to those, a block is all seen or a staircase.
        """
        mine, theirs = (_owned(self.n * t, self.n, rank, self.layout) for rank in (self.r, j))
        rows = slice(int((mine < theirs[0]).sum()), t)
        columns = slice(0, int((theirs <= mine[-1]).sum()))
        mine, theirs = mine[rows], theirs[columns]
        if not len(mine):
            return None
        if self.documents_BS is None:
            return Sight(rows, columns, bool(mine[0] < theirs[-1]), None)
        documents = F.pad(self.documents_BS, (0, self.n * t - self.documents_BS.shape[1]), value=-1)
        of_query, of_key = documents[:, mine, None], documents[:, None, theirs]
        causal = (mine[:, None] >= theirs).to(documents.device)
        mask = causal & (of_query == of_key) & (of_query >= 0)
        return Sight(rows, columns, False, mask[:, None]) if mask.any() else None

    def hop(self, x):
        """Post x to the next rank, and a receive from the one before. Returns a function that
        waits for both and returns what came."""
        if self.n == 1:
            return lambda: x
        came = torch.empty_like(x)
        to, source = (self.r + 1) % self.n, (self.r - 1) % self.n
        # isend + irecv over cp, all of x, in one batch: no order of ranks can deadlock
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, x, group=self.group, group_peer=to),
            dist.P2POp(dist.irecv, came, group=self.group, group_peer=source),
        ])  # fmt: skip

        def wait(sent=x):  # which must stay alive until it has left
            for work in works:
                work.wait()
            return came

        return wait

    def visits(self, kv):
        """Yield (home rank, keys and values) of every rank, own first. They travel on whether
        or not this rank could use them: another may."""
        for step in range(self.n):
            # Q6.3 ** The caller computes while this stands at `yield`. When does the next block
            #         set off, and when is it waited for?
            #         hint: a rank can forward what it has not used yet, not what has not come
            last = step == self.n - 1
            arriving = None if last else self.hop(kv)
            yield (self.r - step) % self.n, kv
            kv = None if last else arriving()
            # /Q6.3


# ── one block, and how blocks become one ─────────────────────────────────────────────────────

# SDPA's own operator, where it returns the log-sum-exp in the precision of the sum. On a GPU the
# flash operator rounds each block's output to bf16, which the merge would add up n times.
FUSED = {
    "cpu": (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
}


def _bias(mask, dtype):
    """What is added to scores so that those not seen weigh nothing."""
    bias = None if mask is None else torch.zeros_like(mask, dtype=dtype)
    return bias if mask is None else bias.masked_fill_(~mask, -math.inf)


def _scores(q_BHtd, k_BKtd, causal, mask):
    """Scores (B, H, rows, columns), minus infinity where not seen; keys by query head."""
    k_BHtd = k_BKtd.repeat_interleave(q_BHtd.shape[1] // k_BKtd.shape[1], dim=1)
    scores = q_BHtd @ k_BHtd.mT / math.sqrt(q_BHtd.shape[-1])
    if causal:
        mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
    return (scores if mask is None else scores.masked_fill(~mask, -math.inf)), k_BHtd


def block_forward(q_BHtd, k_BKtd, v_BKtd, causal, mask):
    """Attention inside one block: its output (B, H, rows, d), and the log-sum-exp (B, H, rows) of
    each row's scores, which is what it takes to merge it. A row that sees nothing: 0, -inf."""
    if q_BHtd.device.type in FUSED:
        given = dict(is_causal=causal, attn_mask=_bias(mask, q_BHtd.dtype))
        out, lse = FUSED[q_BHtd.device.type][0](q_BHtd, k_BKtd, v_BKtd, **given)
        # of a row that sees nothing the operator says 0, which would weigh like one key
        return out, lse if mask is None else lse.masked_fill(~mask.any(-1), -math.inf)
    scores, _ = _scores(q_BHtd, k_BKtd, causal, mask)
    lse = scores.logsumexp(-1, keepdim=True)
    probs = (scores - lse.masked_fill(lse == -math.inf, 0)).exp()
    return probs @ v_BKtd.repeat_interleave(q_BHtd.shape[1] // v_BKtd.shape[1], dim=1), lse[..., 0]


def block_backward(d_out_BHtd, q_BHtd, k_BKtd, v_BKtd, out_BHtd, lse_BHt, causal, mask):
    """dq, dk, dv of one block, given output and log-sum-exp of the *whole* row: then probabilities
    are those of full attention, and blocks need no merging. Source: Dao, arXiv:2307.08691, 3.1."""
    if q_BHtd.device.type in FUSED:
        tensors = d_out_BHtd, q_BHtd, k_BKtd, v_BKtd, out_BHtd, lse_BHt
        bias = _bias(mask, q_BHtd.dtype)
        return FUSED[q_BHtd.device.type][1](*tensors, 0.0, causal, attn_mask=bias)
    scores, k_BHtd = _scores(q_BHtd, k_BKtd, causal, mask)
    heads = k_BKtd.shape[1], q_BHtd.shape[1] // k_BKtd.shape[1]
    v_BHtd = v_BKtd.repeat_interleave(heads[1], dim=1)
    # Q6.4 ** Softmax couples a whole row, of which this block is a part. What stands for the rest?
    #         hint: the row's log-sum-exp; and <d_out, out>, which is the sum of p · dp over the row
    probs = (scores - lse_BHt[..., None]).exp()
    row_dot = (d_out_BHtd * out_BHtd).sum(-1, keepdim=True)
    d_scores = probs * (d_out_BHtd @ v_BHtd.mT - row_dot) / math.sqrt(q_BHtd.shape[-1])
    # /Q6.4
    dk_BHtd, dv_BHtd = d_scores.mT @ q_BHtd, probs.mT @ d_out_BHtd
    # the query heads of a group share one key: it gets the sum, before anything travels
    return d_scores @ k_BHtd, *(x.unflatten(1, heads).sum(2) for x in (dk_BHtd, dv_BHtd))


def merge(out_BHtd, lse_BHt, block_out, block_lse):
    """Fold a block into the running output and log-sum-exp, in place, in fp32 or wider."""
    # Q6.2 ** Two outputs, each normalised by its own part of the row. What does each weigh now?
    #         hint: subtract before you exp, and mind rows for which both parts are empty
    total = torch.logaddexp(lse_BHt, block_lse)
    anchor = total.masked_fill(total == -math.inf, 0)
    old, new = (lse_BHt - anchor).exp(), (block_lse - anchor).exp()
    out_BHtd.copy_(old[..., None] * out_BHtd + new[..., None] * block_out)
    lse_BHt.copy_(total)
    # /Q6.2


def _by_head(x_BtHd):
    """(B, H, t, d): a view, or a copy in fp32 of what is narrower."""
    return x_BtHd.transpose(1, 2).to(torch.promote_types(x_BtHd.dtype, torch.float32))


def _attend(q_BtHd, visits, ring):
    """Attention of this rank's queries over the keys and values of all visits. Returns the output
    (B, t, H, d) in q's dtype, and the log-sum-exp (B, H, t) of every row."""
    q_BHtd = _by_head(q_BtHd)
    out_BHtd = torch.zeros_like(q_BtHd, dtype=q_BHtd.dtype).transpose(1, 2)
    lse_BHt = torch.full_like(q_BHtd[..., 0], -math.inf)
    for j, kv_j in visits:
        if sight := ring.sight(j, q_BtHd.shape[1]):
            rows, columns, *seen = sight
            k_BKtd, v_BKtd = kv_j[:, :, :, columns].to(q_BHtd.dtype)
            block = block_forward(q_BHtd[:, :, rows], k_BKtd, v_BKtd, *seen)
            merge(out_BHtd[:, :, rows], lse_BHt[:, :, rows], *block)
    return out_BHtd.transpose(1, 2).to(q_BtHd.dtype), lse_BHt


def _attend_backward(d_out_BtHd, q_BtHd, out_BtHd, lse_BHt, visits, ring, dq_BtHd):
    """Yield, for each visit, what this rank's queries add to the gradients of its keys and values,
    (2, B, K, t, d) in fp32 or wider; add what it adds to dq in place."""
    d_out, q, out = (_by_head(x) for x in (d_out_BtHd, q_BtHd, out_BtHd))
    dq = dq_BtHd.transpose(1, 2)
    lse = lse_BHt.masked_fill(lse_BHt == -math.inf, 0)  # exp(-inf + inf) would not be a number
    for j, kv_j in visits:
        dkv_j = torch.zeros_like(kv_j, dtype=q.dtype)
        if sight := ring.sight(j, q.shape[2]):
            rows, columns, *seen = sight
            k, v = kv_j[:, :, :, columns].to(q.dtype)
            of_rows = d_out[:, :, rows], q[:, :, rows], k, v, out[:, :, rows], lse[:, :, rows]
            dq_rows, *dkv = block_backward(*of_rows, *seen)
            dq[:, :, rows] += dq_rows
            dkv_j[:, :, :, columns] = torch.stack(dkv)
        yield dkv_j


def _packed(k_BtKd, v_BtKd):
    """Keys and values as they travel, in one message: (2, B, K, t, d)."""
    return torch.stack([k_BtKd.transpose(1, 2), v_BtKd.transpose(1, 2)])


def _unpacked(dkv, like):
    return tuple(x.transpose(1, 2).to(like.dtype) for x in dkv)


# ── the ladder ───────────────────────────────────────────────────────────────────────────────


class _GatheredAttention(torch.autograd.Function):
    """
    forward   all_gather           k, v of every rank, which are kept
    backward  reduce_scatter(SUM)  dk, dv of every rank
    """

    @staticmethod
    def forward(ctx, q, k, v, ring):
        kv = _packed(k, v)
        kv_n = kv.new_empty(ring.n, *kv.shape)
        # all_gather over cp, 2·B·t·K·d from each: every rank now holds all keys and values
        dist.all_gather_single(kv_n.flatten(0, 1), kv, group=ring.group)
        out, lse = _attend(q, enumerate(kv_n), ring)
        ctx.ring = ring
        ctx.save_for_backward(q, kv_n, out, lse)
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, kv_n, out, lse = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=lse.dtype)
        visits = enumerate(kv_n)
        dkv_n = torch.cat([*_attend_backward(d_out, q, out, lse, visits, ctx.ring, dq)])
        dkv = dkv_n.new_empty(kv_n.shape[1:])
        # reduce_scatter(SUM) over cp, 2·B·S·K·d: what all ranks' queries ask of our own keys
        dist.reduce_scatter_single(dkv, dkv_n, group=ctx.ring.group)
        return dq.to(q.dtype), *_unpacked(dkv, q), None


def all_gather_attention(q, k, v, group, layout="zigzag", documents=None):
    """Causal attention that fetches every key and value first: simple, not hidden, and of full
    length in memory, which H/K query heads a key make bearable. As `ring_attention` otherwise.

    Source: The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.2.
    """
    return _GatheredAttention.apply(q, k, v, _Ring.of(group, layout, documents))


def _sum_on_the_way(dkv_by_visit, ring):
    """The gradients of this rank's own keys and values, from what all ranks add to them."""
    # Q6.5 *** Keys come by, and each rank adds to their gradient. How does the sum get home?
    #          hint: it follows the keys, one hop behind, and makes one hop more than they do
    sum_so_far = None
    for dkv in dkv_by_visit:
        if sum_so_far is not None:
            dkv += sum_so_far()
        sum_so_far = ring.hop(dkv)
    return sum_so_far()
    # /Q6.5


class _RingAttention(torch.autograd.Function):
    """
    forward   n-1 hops of k, v
    backward  n-1 hops of k, v again; n hops of dk, dv, the last of which takes them home
    """

    @staticmethod
    def forward(ctx, q, k, v, ring):
        out, lse = _attend(q, ring.visits(_packed(k, v)), ring)
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


def ring_attention(q, k, v, group, layout="zigzag", documents=None):
    """Causal attention in which keys and values go round while blocks are computed.

    Args: q (B, t, H, d), k, v (B, t, K, d), this rank's tokens by `shard(..., group, layout)`,
    equally many on every rank; K divides H. documents (B, S): the document of each token of the
    *whole* sequence, the same on all ranks; a token sees its own alone, one of -1 sees nothing
    and gets 0. Returns (B, t, H, d). Sums in fp32 or wider. Raises ValueError at no such layout.
    Source: Liu et al., arXiv:2310.01889; striped: Brandon et al., arXiv:2311.09431.
    """
    return _RingAttention.apply(q, k, v, _Ring.of(group, layout, documents))


def _trade(x, group, layout, heads_to_tokens):
    """One all-to-all: from some tokens of all heads, (B, t, H, d), to all tokens of some heads,
    (B, S, h, d) in the order of positions; or back."""
    n, tokens = dist.get_world_size(group), x.shape[1]
    S = n * tokens if heads_to_tokens else tokens
    order = torch.cat([_owned(S, n, rank, layout) for rank in range(n)]).to(x.device)
    # Q6.6 ** Each rank has a part of every head, and wants all of a part of them. What goes where?
    #         hint: the first dimension of what is sent says to whom, of what came, from whom
    if heads_to_tokens:
        out = rearrange(x, "b t (n h) d -> n b t h d", n=n).contiguous()
    else:
        out = rearrange(x[:, order], "b (n t) h d -> n b t h d", n=n).contiguous()
    came = torch.empty_like(out)
    # all_to_all over cp, 1/n of B·t·H·d to each: tokens arrive where their heads are, or return
    dist.all_to_all_single(came, out, group=group)
    if heads_to_tokens:
        return rearrange(came, "n b t h d -> b (n t) h d")[:, order.argsort()]
    return rearrange(came, "n b t h d -> b t (n h) d")
    # /Q6.6


class _Trade(torch.autograd.Function):
    """
    forward   all_to_all       heads for tokens, or tokens for heads
    backward  all_to_all back  the other one
    """

    @staticmethod
    def forward(ctx, x, *how):
        ctx.group, ctx.layout, ctx.heads_to_tokens = how
        return _trade(x, *how)

    @staticmethod
    def backward(ctx, d_x):
        return _trade(d_x, ctx.group, ctx.layout, not ctx.heads_to_tokens), None, None, None


def ulysses_attention(q, k, v, group, layout="contiguous", documents=None, attend=None):
    """Causal attention in which each rank takes 1/n of the heads, and all tokens of those.

    `attend` is what each rank then does with its heads; by default it attends alone. Key/value
    heads that n does not divide are repeated until it does, and autograd sums their gradients.
    As `ring_attention` otherwise. Raises ValueError where n does not divide H.
    Source: Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
    """
    n, t, H, K = dist.get_world_size(group), q.shape[1], q.shape[2], k.shape[2]
    if H % n:
        fit = [degree for degree in range(1, H + 1) if H % degree == 0]
        raise ValueError(
            f"Ulysses over {n} ranks: they do not divide {H} query heads ({K} key/value heads, "
            f"{n * t} tokens): use one of {fit}, or a ring, which divides tokens only"
        )
    k, v = (x.repeat_interleave(math.lcm(K, n) // K, dim=2) for x in (k, v))
    q, k, v = (_Trade.apply(x, group, layout, True) for x in (q, k, v))
    if attend is None:
        attended = _RingAttention.apply(q, k, v, _Ring(1, 0, documents_BS=documents))
    else:
        attended = attend(q, k, v)
    return _Trade.apply(attended, group, layout, False)


def ulysses_ring_attention(q, k, v, group, ring_group, layout="zigzag", documents=None):
    """Ulysses over `group`, where links are fast, and of what that gives each rank, a ring over
    `ring_group`: more ranks than heads, in fewer hops. As `ring_attention` otherwise, but a rank's
    tokens are `shard(shard(x, ring_group, layout, inner=u), group, "contiguous")`, u the size of
    `group`. Source: Fang & Zhao, USP, arXiv:2405.07719.
    """
    ring = partial(ring_attention, group=ring_group, layout=layout, documents=documents)
    return ulysses_attention(q, k, v, group, attend=ring)


# ── proof ────────────────────────────────────────────────────────────────────────────────────


class Case:
    """Queries, keys and values of whole sequences, the same on every rank, and what the twin
    makes of them: `expected`, the output and dq, dk, dv for given gradients of the output."""

    def __init__(self, S, H, K, device, packed=False, d=8, B=2, logit=0.0):
        draw = torch.Generator().manual_seed(0)
        sizes = (B, S, H, d), (B, S, K, d), (B, S, K, d), (B, S, H, d)
        *qkv, self.d_out = (
            torch.randn(size, generator=draw, dtype=torch.float64).to(device) for size in sizes
        )
        if logit:  # every score of the later half of the keys moves to about this
            qkv[0][..., 0], qkv[1][:, S // 2 :, :, 0] = math.sqrt(d), logit
        borders = torch.rand(B, S, generator=draw) < 4 / S
        self.documents = borders.cumsum(1).to(device) if packed else None
        self.qkv = [x.requires_grad_() for x in qkv]
        out = causal_attention(*self.qkv, self.documents)
        gradients = torch.autograd.grad(out, self.qkv, self.d_out)
        self.expected = [out.detach(), *gradients]

    def run(self, attend, cut):
        """Attend on this rank's part. Returns what should be as expected, bytes sent, and kept."""
        q, k, v = (cut(x.detach(), fill=1e3).requires_grad_() for x in self.qkv)  # odd padding
        with Ledger() as ledger:
            with kept_bytes() as kept:
                out = attend(q, k, v)
            out.backward(cut(self.d_out))
        real = cut(torch.ones_like(self.d_out[..., :1, :1])) == 1
        found = out.detach().where(real, 0), q.grad, k.grad, v.grad
        return found, sum(ledger.sent.values()), sum(kept.values())

    def error(self, found, cut):
        return max(relative_error(x, cut(y)) for x, y in zip(found, self.expected))


@contextmanager
def kept_bytes():
    """Bytes of each storage that autograd keeps for backward while this is open."""
    kept = {}
    keep = lambda x: kept.update({x.untyped_storage()._cdata: x.untyped_storage().nbytes()}) or x
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield kept


def two_groups(n, patience):
    """This rank's Ulysses group, of neighbours, and its ring, as near to square as n allows."""
    u = max(u for u in range(1, n + 1) if n % u == 0 and u * u <= n)
    grid, mine = torch.arange(n).view(n // u, u), []
    for lines in (grid, grid.T):
        for line in lines.tolist():
            group = dist.new_group(line, timeout=timedelta(seconds=patience))
            mine += [group] if dist.get_rank() in line else []
    return mine


def attention_rows(group, groups, device):
    """Every way of attending, beside the twin, on a length that nothing divides."""
    n, B, d, K = dist.get_world_size(group), 2, 8, 2
    H, S = 4 * n, 16 * n + 3
    cases = [Case(S, H, K, device, packed) for packed in (False, True)]
    u, m = (dist.get_world_size(part) for part in groups)
    rows = []

    def row(name, attend, cut, sent, keys, packed=False, case=None):
        case = case or cases[packed]
        attend = partial(attend, documents=case.documents)
        found, measured, kept = case.run(attend, cut)
        t = cut(case.d_out).shape[1]
        one_head = 8 * B * t * d  # bytes: float64
        held = one_head * (2 * H + 2 * keys) + 8 * B * t * H
        error = case.error(found, cut)
        rows.append(Row(name, error, (measured, sent * one_head), (kept, held)))

    def of(attend, layout):
        return partial(attend, group=group, layout=layout), partial(shard, group=group, layout=layout)

    trade = lambda n, keys: 2 * (n - 1) / n * (2 * H + 2 * keys)
    hops = lambda n, keys: 2 * (3 * n - 2) * keys if n > 1 else 0
    L, Lu = math.lcm(K, n), math.lcm(K, u)
    for layout in ("contiguous", "zigzag", "striped"):
        row(f"ring, {layout}", *of(ring_attention, layout), hops(n, K), K)
    with patch.dict(FUSED, clear=True):
        row("ring, zigzag, written out", *of(ring_attention, "zigzag"), hops(n, K), K)
    far = Case(S, H, K, device, logit=1e4), Case(S, H, K, device, logit=-1e4)
    for name, case in zip(("+1e4", "-1e4"), far):
        row(f"ring, zigzag, scores to {name}", *of(ring_attention, "zigzag"), hops(n, K), K, case=case)
    row("ring, zigzag, packed", *of(ring_attention, "zigzag"), hops(n, K), K, packed=True)
    row("all-gather, zigzag", *of(all_gather_attention, "zigzag"), 4 * (n - 1) * K, n * K)
    row("Ulysses, contiguous", *of(ulysses_attention, "contiguous"), trade(n, L), L)
    row("Ulysses, zigzag, packed", *of(ulysses_attention, "zigzag"), trade(n, L), L, packed=True)
    both = partial(ulysses_ring_attention, group=groups[0], ring_group=groups[1])
    outer = partial(shard, group=groups[1], inner=u)
    cut = lambda x, fill=0: shard(outer(x, fill=fill), groups[0], "contiguous", fill)
    row(f"Ulysses {u} × ring {m}, packed", both, cut, trade(u, Lu) + hops(m, Lu), Lu, packed=True)
    return rows


# ── launch kit: stamped
if __name__ == "__main__":
    pass
