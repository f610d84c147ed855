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

Ulysses sends less forward than a ring if n > H/K + 1; n must divide H, and K counts there as the
least common multiple of K and n. Each rank sees S/n tokens: gradients of parameters are summed.

    python 06_cp_ring.py                          four ranks on this machine
    torchrun --nproc-per-node 4 06_cp_ring.py     the same, started by torchrun
    python 06_cp_ring.py --length 8192 --steps 5  4.3 GB of scores, which nobody holds

Guide: SP/CP · Context parallelism · DeepSpeed-Ulysses · When should I add CP · very long context.
What does not hold: Llama 3 405B trained with CP=1 at 8K and CP=16 at 131K, not CP=2, and gathered
K and V, no ring (arXiv:2407.21783, section 3.3.2 and table 4). A "contiguous chunk" a rank keeps 4
ranks busy 4/7 of the time. KV traffic is not linear in CP: a rank gets (n-1)/n of all keys and
values, from 2 to 4 ranks 1.5 times as much.

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
import signal
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
    "all_gather_attention", "positions", "ring_attention", "shard", "ulysses_attention",
    "ulysses_ring_attention", "unshard",
]  # fmt: skip

# ── the serial twin ──────────────────────────────────────────────────────────────────────────


def causal_attention(q_BSHd, k_BSKd, v_BSKd, documents=None):
    """Full attention on one process, all scores in memory: (B, S, H, d), causal, query head i on
    key/value head i // (H/K), inside a document where documents are given."""
    group, S = q_BSHd.shape[2] // k_BSKd.shape[2], q_BSHd.shape[1]
    k_BSHd, v_BSHd = (x.repeat_interleave(group, dim=2) for x in (k_BSKd, v_BSKd))
    visible = torch.ones(S, S, dtype=torch.bool, device=q_BSHd.device).tril()
    if documents is not None:  # (B, S)
        visible = visible & (documents[:, None, :, None] == documents[:, None, None, :])
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
    -100, which does not count, at the end of the sequence and of each document."""
    labels_BS = F.pad(tokens_BS[:, 1:], (0, 1), value=-100)
    if documents_BS is None:
        return labels_BS
    return labels_BS.masked_fill(documents_BS != F.pad(documents_BS[:, 1:], (0, 1), value=-1), -100)


def valid_tokens(labels_Bt, group):
    """How many labels of the step count, over all ranks: a rank may have none. At least 1."""
    count = (labels_Bt != -100).sum()
    # all_reduce(SUM) over cp, 1: every rank now knows the divisor of the whole step
    dist.all_reduce(count, group=group)
    return count.clamp(min=1)


def loss_share(logits_BtV, labels_Bt, valid):
    """This rank's part of the mean over the step's `valid` labels: the parts add up to it."""
    return F.cross_entropy(logits_BtV.flatten(0, 1), labels_Bt.flatten(), reduction="sum") / valid


# ── the layouts: which tokens a rank owns, and what they see of another rank's ───────────────


LAYOUTS = "contiguous", "zigzag", "striped"


def _owned(S, n, layout, inner=1):
    """Positions by rank, (n, t), ascending in each, after padding S to what the layout divides."""
    parts = (2 * n if layout == "zigzag" else n) * inner
    whole = torch.arange(-(-S // parts) * parts)
    if layout == "contiguous":
        return rearrange(whole, "(n t) -> n t", n=n)
    if layout == "striped":
        return rearrange(whole, "(t n) -> n t", n=n)
    if layout == "zigzag":
        # Q6.1 * A late token sees more than an early one. Which two of 2n chunks make all equal?
        #        hint: pair the chunk that sees least with the one that sees most
        chunks = rearrange(whole, "(c t) -> c t", c=2 * n)
        early, late = chunks[:n], chunks[n:].flip(0)
        return torch.cat([early, late], dim=1)
        # /Q6.1
    raise ValueError(f"layout {layout!r}: use {', '.join(LAYOUTS)}")


def _owned_exactly(t, n, layout):
    """Positions by rank where each holds t tokens already."""
    owned_nt = _owned(n * t, n, layout)
    if owned_nt.shape[1] != t:
        raise ValueError(f"{t} tokens a rank: zigzag needs an even number, to which shard() pads")
    return owned_nt


def positions(S, group, layout="zigzag", inner=1):
    """Global positions (t,) of this rank's tokens, ascending, on the CPU. Those from S on are
    padding: n·t is S rounded up to a multiple of n, or of 2n under zigzag, times `inner`, the
    ranks that will split a part once more (sequence parallelism, Ulysses inside a ring).
    Raises ValueError at a layout that is not contiguous, zigzag or striped."""
    return _owned(S, dist.get_world_size(group), layout, inner)[dist.get_rank(group)]


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
    order = _owned_exactly(len(x_tB), n, layout).flatten()
    return parts[order.argsort().to(x_Bt.device)][:S].transpose(0, 1)


# The rows and columns of a block that are worth computing; whether row i of them sees columns up
# to i, or all; or a mask (B, 1, rows, columns), True where seen.
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
        mine, theirs = _owned_exactly(t, self.n, self.layout)[[self.r, j]]
        rows = slice(int((mine < theirs[0]).sum()), t)
        columns = slice(0, int((theirs <= mine[-1]).sum()))
        mine, theirs = mine[rows], theirs[columns]
        if not len(mine):
            return None
        if self.documents_BS is None:
            return Sight(rows, columns, bool(mine[0] < theirs[-1]), None)
        padding = self.n * t - self.documents_BS.shape[1]
        if padding < 0:
            raise ValueError(f"documents of {self.n * t - padding} tokens, for {self.n * t} tokens")
        documents = F.pad(self.documents_BS, (0, padding), value=-1)
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

# SDPA's own operators, where they return what merging needs: not on a GPU, whose flash operator
# rounds each block's output to bf16; and not with a mask, where they call the log-sum-exp of a row
# that sees nothing 0, as if it had seen one key.
FUSED = {
    "cpu": (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
}


def _scores(q_BHtd, k_BHtd, causal, mask):
    """Scores (B, H, rows, columns), minus infinity where not seen."""
    scores = q_BHtd @ k_BHtd.mT / math.sqrt(q_BHtd.shape[-1])
    if causal:
        mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def block_forward(q_BHtd, k_BKtd, v_BKtd, causal, mask):
    """Attention inside one block: its output (B, H, rows, d), and the log-sum-exp (B, H, rows) of
    each row's scores, which is what it takes to merge it. A row that sees nothing: 0, -inf."""
    fused, _ = FUSED.get(q_BHtd.device.type, (None, None))
    if fused and mask is None:
        return fused(q_BHtd, k_BKtd, v_BKtd, is_causal=causal)
    sharing = q_BHtd.shape[1] // k_BKtd.shape[1]
    k_BHtd, v_BHtd = (x.repeat_interleave(sharing, dim=1) for x in (k_BKtd, v_BKtd))
    scores = _scores(q_BHtd, k_BHtd, causal, mask)
    lse_BHt1 = scores.logsumexp(-1, keepdim=True)
    probs = (scores - lse_BHt1.masked_fill(lse_BHt1 == -math.inf, 0)).exp()
    return probs @ v_BHtd, lse_BHt1[..., 0]


def block_backward(d_out_BHtd, q_BHtd, k_BKtd, v_BKtd, out_BHtd, lse_BHt, causal, mask):
    """dq, dk, dv of one block, given output and log-sum-exp of the *whole* row: probabilities are
    then those of full attention, and gradients just add. Source: Dao, arXiv:2307.08691, 3.1."""
    _, fused = FUSED.get(q_BHtd.device.type, (None, None))
    if fused and mask is None:
        return fused(d_out_BHtd, q_BHtd, k_BKtd, v_BKtd, out_BHtd, lse_BHt, 0.0, causal)
    sharing = q_BHtd.shape[1] // k_BKtd.shape[1]
    k_BHtd, v_BHtd = (x.repeat_interleave(sharing, dim=1) for x in (k_BKtd, v_BKtd))
    scores = _scores(q_BHtd, k_BHtd, causal, mask)
    # Q6.4 ** Softmax couples a whole row, of which this block is a part. What stands for the rest?
    #         hint: the row's log-sum-exp; and <d_out, out>, which is the sum of p · dp over the row
    probs = (scores - lse_BHt[..., None]).exp()
    row_dot = (d_out_BHtd * out_BHtd).sum(-1, keepdim=True)
    d_scores = probs * (d_out_BHtd @ v_BHtd.mT - row_dot) / math.sqrt(q_BHtd.shape[-1])
    # /Q6.4
    dk_BHtd, dv_BHtd = d_scores.mT @ q_BHtd, probs.mT @ d_out_BHtd
    # query heads that share a key give it their sum, before anything travels
    by_key = (-1, sharing)
    return d_scores @ k_BHtd, *(x.unflatten(1, by_key).sum(2) for x in (dk_BHtd, dv_BHtd))


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
    and gets 0; a block's scores then stand in memory, (B, H, t, t). Returns (B, t, H, d). Sums in
    fp32 or wider. Raises ValueError at a layout that is none, or that `shard` did not make.
    Source: Liu et al., arXiv:2310.01889; striped: Brandon et al., arXiv:2311.09431.
    """
    return _RingAttention.apply(q, k, v, _Ring.of(group, layout, documents))


def _trade(x, group, layout, heads_to_tokens):
    """One all-to-all: from some tokens of all heads, (B, t, H, d), to all tokens of some heads,
    (B, S, h, d) in the order of positions; or back."""
    n = dist.get_world_size(group)
    t = x.shape[1] if heads_to_tokens else x.shape[1] // n
    order = _owned_exactly(t, n, layout).flatten().to(x.device)
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


@contextmanager
def kept_bytes():
    """{storage: bytes} of all that autograd keeps for backward while this is open."""
    kept = {}
    keep = lambda x: kept.update({x.untyped_storage()._cdata: x.untyped_storage().nbytes()}) or x
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield kept


class Case:
    """Whole sequences, the same on every rank, and what the twin makes of them: `expected`, the
    output and dq, dk, dv. With `logit`, that is added to all scores of the later half's keys."""

    def __init__(self, S, H, K, device, packed=False, logit=0.0, d=8, B=2):
        draw = torch.Generator().manual_seed(0)
        normal = partial(torch.randn, generator=draw, dtype=torch.float64)
        q, k, v, self.d_out = (normal(B, S, heads, d) for heads in (H, K, K, H))
        if logit:
            q[..., 0], k[..., 0] = logit * math.sqrt(d), (torch.arange(S) >= S // 2)[:, None]
        documents_BS = (torch.rand(B, S, generator=draw) < 4 / S).cumsum(1).to(device)
        self.documents = documents_BS if packed else None
        self.qkv = [x.to(device).requires_grad_() for x in (q, k, v)]
        self.d_out = self.d_out.to(device)
        out = causal_attention(*self.qkv, self.documents)
        self.expected = [out.detach(), *torch.autograd.grad(out, self.qkv, self.d_out)]

    def run(self, attend, cut):
        """Attend on this rank's part, padded with 1000s. Returns the output and gradients found,
        the largest error, bytes sent, and bytes kept for backward."""
        q, k, v = (cut(x.detach(), fill=1e3).requires_grad_() for x in self.qkv)
        with Ledger() as ledger:
            with kept_bytes() as kept:
                out = attend(q, k, v, documents=self.documents)
            out.backward(cut(self.d_out))
        out = out.detach() * cut(torch.ones_like(self.d_out))  # whatever padding got is dropped
        found = [out, q.grad, k.grad, v.grad]
        error = max(relative_error(x, cut(y)) for x, y in zip(found, self.expected))
        return found, error, sum(ledger.sent.values()), sum(kept.values())


def two_groups(n, patience):
    """This rank's Ulysses group, of neighbours, and its ring, as near to square as n allows."""
    u = max(u for u in range(1, n + 1) if n % u == 0 and u * u <= n)
    grid, mine = torch.arange(n).view(n // u, u), []
    for ranks in (*grid.tolist(), *grid.T.tolist()):  # in this order on every rank
        group = dist.new_group(ranks, timeout=timedelta(seconds=patience))
        mine += [group] if dist.get_rank() in ranks else []
    return mine


def attention_rows(group, pair, device, B=2, K=2, d=8):
    """Every way to attend, beside the twin, on a length that no layout divides."""
    n, u, m = (dist.get_world_size(some) for some in (group, *pair))
    S, H = 16 * n + 3, 4 * n
    plain, packed = (Case(S, H, K, device, packed) for packed in (False, True))
    high, low = (Case(S, H, K, device, logit=logit) for logit in (1e4, -1e4))
    # in heads of this rank's tokens; key/value heads are sent and kept in pairs
    around = lambda n, K: (2 * (n - 1) + 2 * (n - 1) + 2 * n) * K if n > 1 else 0
    traded = lambda n, K: 2 * (n - 1) / n * (2 * H + 2 * K)
    Kn, Ku = math.lcm(K, n), math.lcm(K, u)

    def by(attend, layout):
        given = dict(group=group, layout=layout)
        return partial(attend, **given), partial(shard, **given)

    zigzag, both = by(ring_attention, "zigzag"), partial(ulysses_ring_attention, group=pair[0])
    outer = partial(shard, group=pair[1], inner=u)
    inner = lambda x, fill=0: shard(outer(x, fill=fill), pair[0], "contiguous", fill)
    claims = [  # name, attention and sharding, case, heads sent, key/value heads kept
        ("ring, contiguous", by(ring_attention, "contiguous"), plain, around(n, K), K),
        ("ring, striped", by(ring_attention, "striped"), plain, around(n, K), K),
        ("ring, zigzag", zigzag, plain, around(n, K), K),
        ("ring, zigzag, written out", zigzag, plain, around(n, K), K),
        ("ring, zigzag, packed documents", zigzag, packed, around(n, K), K),
        ("ring, zigzag, scores of 10,000", zigzag, high, around(n, K), K),
        ("ring, zigzag, scores of -10,000", zigzag, low, around(n, K), K),
        ("all-gather, zigzag", by(all_gather_attention, "zigzag"), plain, 4 * (n - 1) * K, n * K),
        ("Ulysses, contiguous", by(ulysses_attention, "contiguous"), plain, traded(n, Kn), Kn),
        ("Ulysses, zigzag, packed", by(ulysses_attention, "zigzag"), packed, traded(n, Kn), Kn),
        (f"Ulysses {u} × ring {m}, packed", (partial(both, ring_group=pair[1]), inner), packed,
         traded(u, Ku) + around(m, Ku), Ku),
    ]  # fmt: skip
    rows = []
    for name, (attend, cut), case, heads_sent, K_kept in claims:
        with patch.dict(FUSED, clear="written out" in name):
            _, error, sent, kept = case.run(attend, cut)
        head = 8 * B * cut(case.d_out).shape[1] * d
        held = head * (2 * H + 2 * K_kept) + head // d * H  # q, out, k, v; log-sum-exp
        rows.append(Row(name, error, (sent, head * heads_sent), (kept, held)))
    return rows


def sum_over_ranks(tensors, group):
    """Parameters are on every rank, and each rank's gradients come from its own tokens."""
    for x in tensors:
        # all_reduce(SUM) over cp, one tensor: every rank now holds the sum over all tokens
        dist.all_reduce(x, group=group)


def model_row(group, device, K=2, d=8):
    """The model beside its twin: loss and gradients; and a rank's activations, which must be 1/n
    of what the same code keeps where it has the whole sequence."""
    n, S = dist.get_world_size(group), 16 * dist.get_world_size(group) - 3
    draw = torch.Generator().manual_seed(0)
    x_BS = torch.randint(256, (1, S), generator=draw).to(device)
    documents_BS = (torch.rand(1, S, generator=draw) < 0.1).cumsum(1).to(device)
    y_BS = next_tokens(x_BS, documents_BS)

    def backward(x, y, at, attend, valid):
        torch.manual_seed(0)
        model = LanguageModel(K=K, d=d, layers=1).double().to(device)
        with kept_bytes() as kept:
            logits = model(x, at, partial(attend, documents=documents_BS))
        loss = loss_share(logits, y, valid)
        loss.backward()
        for param in model.parameters():
            kept.pop(param.untyped_storage()._cdata, None)
        return [loss.detach(), *(p.grad for p in model.parameters())], sum(kept.values())

    wanted, _ = backward(x_BS, y_BS, torch.arange(S), causal_attention, (y_BS != -100).sum())
    mine, labels = positions(S, group), shard(y_BS, group, fill=-100)
    alone = lambda *qkv, documents: _RingAttention.apply(*qkv, _Ring(1, 0, documents_BS=documents))
    x_padded, y_padded = F.pad(x_BS, (0, n * len(mine) - S)), F.pad(y_BS, (0, n * len(mine) - S))
    _, kept_alone = backward(x_padded, y_padded, torch.arange(n * len(mine)), alone, 1)
    with Ledger() as ledger:
        valid = valid_tokens(labels, group)
        attend = partial(ring_attention, group=group)
        found, kept = backward(shard(x_BS, group), labels, mine, attend, valid)
        sum_over_ranks(found, group)
    around = (6 * n - 4) * K * 8 * len(mine) * d if n > 1 else 0
    sent = around + 2 * (n - 1) / n * sum(x.nbytes for x in (valid, *found))
    error = max(relative_error(x, y) for x, y in zip(found, wanted))
    name = "model: loss, gradients; kept 1/n"
    return Row(name, error, (sum(ledger.sent.values()), sent), (kept, kept_alone / n))


def merge_unshifted(out_BHtd, lse_BHt, block_out, block_lse):
    """Wrong on purpose: nothing is subtracted before exp, which overflows from 710 on."""
    old, new = lse_BHt.exp()[..., None], block_lse.exp()[..., None]
    out_BHtd.copy_((old * out_BHtd + new * block_out) / (old + new))
    lse_BHt.copy_((old + new).log()[..., 0])


def stop_short(dkv_by_visit, ring):
    """Wrong on purpose: n-1 hops, as keys make, leave each sum one rank before its home."""
    came = lambda: 0
    for dkv in dkv_by_visit:
        dkv += came()
        came = ring.hop(dkv)
    came()
    return dkv


def wrong_rows(group, device):
    """What goes wrong most often, and the error that it must show. Zigzag, no padding."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    S, H, K, cut = 16 * n, 4, 2, partial(shard, group=group)
    attend, here = partial(ring_attention, group=group), globals()
    case = Case(S, H, K, device, logit=1e4)
    with patch.dict(here, merge=merge_unshifted):
        (out, *_), *_ = case.run(attend, cut)
    right, early = case.expected[0], (torch.arange(S, device=device) < S // 2)[:, None, None]
    lost = relative_error(cut(right * early), cut(right))
    error = relative_error(out.nan_to_num(), cut(right))
    rows = [Row("merge without maximum, NaN as 0", error, wrong=lost)]
    if n == 1:
        return rows

    case = Case(S, H, K, device)
    with patch.dict(here, _sum_on_the_way=stop_short):
        (_, _, dk, _), *_ = case.run(attend, cut)
    owned_nt = _owned(S, n, "zigzag")
    mine, of_next = (case.expected[2][:, owned_nt[rank % n]] for rank in (r, r + 1))
    error, predicted = relative_error(dk, mine), relative_error(of_next, mine)
    rows += [Row("dk, dv one hop short", error, wrong=predicted)]

    q, k, v = (x.detach() for x in case.qkv)
    offset = torch.arange(S // n) + r * (S // n)
    out = attend(*(rotate(cut(x), offset) for x in (q, k)), cut(v))
    full = lambda at: cut(causal_attention(rotate(q, at), rotate(k, at), v))
    right, wrong = full(torch.arange(S)), full(owned_nt.flatten().argsort())
    error, predicted = relative_error(out, right), relative_error(wrong, right)
    rows += [Row("rotary offset by rank", error, wrong=predicted)]

    logits = torch.zeros(1, S // n, 256, device=device)
    labels = torch.full((1, S // n), -100 if r else 7, device=device)  # those of rank 0 count
    mean = loss_share(logits, labels, valid_tokens(labels, group))
    of_means = loss_share(logits, labels, (labels != -100).sum().clamp(min=1)) / n
    sum_over_ranks([mean, of_means], group)
    return [*rows, Row("mean of local means", relative_error(of_means, mean), wrong=1 - 1 / n)]


def work(S, n, layout):
    """Pairs of query and key that a ring of n computes, (n ranks, n steps), by the same `sight`
    that attention asks."""
    pairs, t = torch.zeros(n, n, dtype=torch.long), _owned(S, n, layout).shape[1]
    for r in range(n):
        ring = _Ring(n, r, layout=layout)
        for step in range(n):
            if sight := ring.sight((r - step) % n, t):
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
    axes[-1].set_xlabel(
        f"time to attend to {12 * n} tokens, in fair shares; dotted: the end of a step"
    )
    figure.savefig(path, dpi=120)
    print(f"drew {path}")


# ── the run ──────────────────────────────────────────────────────────────────────────────────

ATTENTION = dict(ring=ring_attention, gather=all_gather_attention, ulysses=ulysses_attention)


def train(args, group, device):
    """Train on one long sequence a step, 1/n of it on this rank, and say what is kept."""
    S = args.length
    text = read_text(args.text, S + 1)
    torch.manual_seed(0)
    model = LanguageModel().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    attend = partial(ATTENTION[args.attention], group=group, layout=args.layout)
    cut, mine = partial(shard, group=group, layout=args.layout), positions(S, group, args.layout)
    scores = 4 * len(model.blocks) * 8 * S**2
    say(f"{args.attention}, {args.layout}, {S} tokens: unigrams {unigram_entropy(text):.2f} nats")
    for step in range(args.steps):
        x_BS, y_BS = (x.to(device) for x in sample(text, step, 1, S))
        labels = cut(y_BS, fill=-100)
        with kept_bytes() as kept:
            logits = model(cut(x_BS), mine, attend)
            loss = loss_share(logits, labels, valid_tokens(labels, group))
        loss.backward()
        loss = loss.detach()
        sum_over_ranks([loss, *(param.grad for param in model.parameters())], group)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == args.steps - 1:
            say(f"step {step:3}  loss {loss:.3f}")
    say(
        f"a rank kept {sum(kept.values()) / 1e6:.1f} MB for backward, parameters and all; "
        f"the scores of full attention alone would be {scores / 1e6:,.0f} MB"
    )
    return 0


def main(args, device):
    """Prove, say how even the work is, train. 0 if every row is as claimed."""
    group, n = dist.group.WORLD, dist.get_world_size()
    say(f"06 context parallel · {n} ranks · {dist.get_backend()} · {device.type} · float64")
    pair = two_groups(n, args.timeout)
    rows = attention_rows(group, pair, device) + [model_row(group, device)]
    if prove(rows + wrong_rows(group, device), device):
        return 1
    for layout in LAYOUTS:
        pairs = work(12 * n, n, layout)
        each = " ".join(map(str, pairs.sum(1).tolist()))
        say(f"{layout:11} {12 * n} tokens, pairs by rank {each}: {efficiency(pairs):.3f} efficient")
    if args.plot and dist.get_rank() == 0:
        plot(n, args.plot)
    return train(args, group, device) if args.steps > 0 else 0


def validate(args, ranks):
    """Raises ValueError, with a sentence, at what cannot work, before any process starts."""
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
    parser = arguments(__doc__, ranks=4, steps=20)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--attention", choices=ATTENTION, default="ring")
    parser.add_argument("--layout", choices=LAYOUTS, default="zigzag")
    parser.add_argument("--plot", metavar="PNG", help="draw the work of each rank and step")
    launch(main, parser.parse_args(), validate)
