"""06 · Context parallel: attention over a sequence that no rank holds whole

Each of n ranks holds all parameters and s = S/n tokens of every sequence. All layers but attention
work on one token at a time, and need no other rank. In attention, a token's query meets the keys
and values of all tokens before it. Most of these are on other ranks. There are three ways to meet:
keys and values go round a ring of ranks; every rank gathers all keys and values; or a rank trades
most of its heads for more tokens, until it has all tokens of some heads (Ulysses).

    contiguous   rank 0  ■■□□□□□□   rank 1  □□■■□□□□   ...   the last rank computes the most
    zigzag       rank 0  ■□□□□□□■   rank 1  □■□□□□■□   ...   all ranks compute the same
    striped      rank 0  ■□□□■□□□   rank 1  □■□□□■□□   ...   nearly the same

The table counts elements of one sequence in one layer. Every way also keeps queries and output.
The gradients of keys and values travel in fp32 round a ring, where they are sums, and in a gather.

                   sent in forward     sent in backward               keys and values kept
    ring           2(n-1)·s·K·d        2(n-1)·s·K·d + 2n·s·K·d fp32   2·s·K·d
    all-gather     2(n-1)·s·K·d        2(n-1)·s·K·d fp32              2·S·K·d
    Ulysses        2(n-1)/n·s·(H+K)·d  2(n-1)/n·s·(H+K)·d             2·s·K·d
    Ulysses×ring   Ulysses in groups of u ranks, and a ring over n/u such groups

Ulysses sends less than a ring in forward if n > H/K + 1, and needs an H that n divides.

    python 06_cp_ring.py                          four ranks on this machine
    torchrun --nproc-per-node 4 06_cp_ring.py     the same, started by torchrun
    python 06_cp_ring.py --length 8192 --steps 5  no rank holds the 2.1 GB of scores

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
import signal
from collections import namedtuple
from functools import partial

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads ends it without a trace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import nn

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


# ── the axis by hand: post, compute, merge, wait ─────────────────────────────────────────────

# The scores of this rank's queries with one rank's keys are a block: (B, H, s, s). A row of scores
# belongs to one query, and each block holds a part of it. Softmax divides by the sum of the exps of
# the whole row. So each block also returns `lse`, the log-sum-exp of its part of each row.


def attend_to_block(q_BHsd, k_BHsd, v_BHsd, mask=None, scale=None):
    """Attention over the keys of one rank alone: its output (B, H, s, d) and its lse (B, H, s). A
    query sees a key where `mask` is True. A row that sees nothing has output 0 and lse -inf."""
    scores = _scores(q_BHsd, k_BHsd, mask, scale)
    lse_BHs = scores.logsumexp(-1)
    probs = (scores - lse_BHs.masked_fill(lse_BHs == -math.inf, 0)[..., None]).exp()
    return probs @ v_BHsd, lse_BHs


def _scores(q_BHsd, k_BHsd, mask, scale):
    """Scores of queries with keys (B, H, s, s), minus infinity where `mask` hides a key."""
    scores = q_BHsd @ k_BHsd.mT * (q_BHsd.shape[-1] ** -0.5 if scale is None else scale)
    return scores if mask is None else scores.masked_fill(~mask.to(scores.device), -math.inf)


# One query and four keys, two on each rank. The exps of the scores are 1, 3 | 4, 8, and the values
# are 8, 0 | 4, 4.
#                              rank 0's keys               rank 1's keys
#     lse                      ln(1 + 3) = ln 4            ln(4 + 8) = ln 12
#     output of the block      (1·8 + 3·0) / 4 = 2         (4·4 + 8·4) / 12 = 4
#     weight in the whole row  4 / 16                      12 / 16
#     merged                   4/16 · 2 + 12/16 · 4 = 3.5 = (1·8 + 3·0 + 4·4 + 8·4) / 16
def merge(out_BHsd, lse_BHs, block_out, block_lse):
    """Fold one more block into the output and lse of the blocks so far, in place."""
    # Q6.2 ** Each of two outputs is normalised by its own part of the row. How much does each of
    #         the two outputs weigh in the whole row?
    #         hint: subtract before you exp, and think of a row that sees nothing in both blocks
    total = torch.logaddexp(lse_BHs, block_lse)
    finite = total.masked_fill(total == -math.inf, 0)  # -inf minus -inf would not be a number
    old, new = (lse_BHs - finite).exp(), (block_lse - finite).exp()
    out_BHsd.copy_(old[..., None] * out_BHsd + new[..., None] * block_out)
    lse_BHs.copy_(total)
    # /Q6.2


def hop(x, n, r, group):
    """Post x to the next rank and a receive from the rank before. Returns a function that waits
    for both messages and returns the received tensor."""
    if n == 1:
        return lambda: x
    buffers = x, torch.empty_like(x)  # `wait` keeps both alive until both messages are done
    # isend + irecv over cp, all of x, in one batch: no order of ranks can deadlock
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, buffers[0], group=group, group_peer=(r + 1) % n),
        dist.P2POp(dist.irecv, buffers[1], group=group, group_peer=(r - 1) % n),
    ])  # fmt: skip

    def wait():
        for work in works:
            work.wait()
        return buffers[1]

    return wait


def ring_by_hand(q_BHsd, k_BHsd, v_BHsd, group):
    """Causal attention in forward only. Rank r holds chunk r of the sequence, and each query head
    has a key/value head of its own. Returns the output (B, H, s, d) for this rank's queries."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    out_BHsd, lse_BHs = torch.zeros_like(q_BHsd), torch.full_like(q_BHsd[..., 0], -math.inf)
    kv, s = torch.stack([k_BHsd, v_BHsd]), q_BHsd.shape[2]
    causal = torch.ones(s, s, dtype=torch.bool).tril()  # among a rank's own tokens
    for step in range(n):
        if step < n - 1:
            wait = hop(kv, n, r, group)  # post: the next rank needs these keys next
        home = (r - step) % n  # the rank whose keys are here: they have come `step` hops
        if home <= r:  # compute: no query sees the keys of a later chunk
            block = attend_to_block(q_BHsd, *kv, causal if home == r else None)
            merge(out_BHsd, lse_BHs, *block)
        if step < n - 1:
            kv = wait()  # wait: only now have the keys of the rank before arrived
    return out_BHsd


# ── layouts: which tokens a rank holds, and what they see of the tokens of another rank ──────

LAYOUTS = "contiguous", "zigzag", "striped"


def _owned(S, n, layout, inner=1):
    """Positions by rank (n, s), ascending on each rank. S is rounded up, so that `inner` ranks can
    split each rank's part again, and zigzag can halve it."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r}: use {', '.join(LAYOUTS)}")
    multiple = n * (math.lcm(2, inner) if layout == "zigzag" else inner)
    whole = torch.arange(math.ceil(S / multiple) * multiple)
    if layout == "contiguous":
        return rearrange(whole, "(n s) -> n s", n=n)
    if layout == "striped":
        return rearrange(whole, "(s n) -> n s", n=n)
    # Q6.1 * A late token sees more keys than an early token. Which two of the 2n chunks give every
    #        rank the same work? Rank 0 has the first chunk.
    #        hint: pair the chunk that sees the least with the chunk that sees the most
    chunks = rearrange(whole, "(c s) -> c s", c=2 * n)
    early, late = chunks[:n], chunks[n:].flip(0)
    return torch.cat([early, late], dim=1)
    # /Q6.1


def positions(S, group, layout="zigzag", inner=1):
    """Global positions (s,) of this rank's tokens, ascending, on the CPU. Positions from S on are
    padding: S is rounded up, so that every rank has equally many tokens, which `inner` divides
    (sequence parallelism, Ulysses inside a ring). Raises ValueError for an unknown layout."""
    return _owned(S, dist.get_world_size(group), layout, inner)[dist.get_rank(group)]


def shard(x_BS, group, layout="zigzag", fill=0, inner=1):
    """This rank's tokens (B, s, ...) of a whole sequence (B, S, ...), padded with `fill`, at this
    rank's `positions(S, group, layout, inner)`. Gradients flow through it."""
    positions_s = positions(x_BS.shape[1], group, layout, inner).to(x_BS.device)
    x_Bs = x_BS[:, positions_s.clamp(max=x_BS.shape[1] - 1)]
    padding = (positions_s >= x_BS.shape[1]).view(1, -1, *[1] * (x_BS.dim() - 2))
    return x_Bs.masked_fill(padding, fill)


def unshard(x_Bs, S, group, layout="zigzag"):
    """The whole sequence (B, S, ...), without padding, from each rank's tokens (B, s, ...). No
    gradient flows through it."""
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
# A rank's own keys: causal. Keys of an earlier rank: all queries see their first half, and nothing
# else. Keys of a later rank: the second half of the queries sees all of them, the first half none.

# The part of a block that is computed: a slice of its rows, which are queries, and a slice of its
# columns, which are keys. `causal`: row i sees the columns up to i. Without it, all rows see all
# columns, but those where `mask` (B, 1, rows, columns) is False.
Sight = namedtuple("Sight", "rows columns causal mask", defaults=[False, None])


def causal_sight(queries_s, keys_s):
    """What queries at ascending positions see of keys at ascending positions: a Sight, or None.
    In every layout the last queries see the first keys; their block is full or a staircase."""
    rows = slice(int((queries_s < keys_s[0]).sum()), len(queries_s))
    columns = slice(0, int((keys_s <= queries_s[-1]).sum()))
    if rows.start == rows.stop:
        return None
    return Sight(rows, columns, causal=bool(queries_s[rows.start] < keys_s[columns.stop - 1]))


class _Sights:
    """Which keys of each rank the queries of this rank may see, by the arguments of
    `ring_attention`, which are checked here. The group "alone" has one rank and sends nothing."""

    def __init__(self, q, k, v, group, layout,
                 documents=None, length=None, causal=True, window=None, scale=None):  # fmt: skip
        self.n, self.r, self.group = 1, 0, group
        if group != "alone":
            self.n, self.r = dist.get_world_size(group), dist.get_rank(group)
        self.owned_ns = _owned_exactly(q.shape[1], self.n, layout)
        tokens = self.owned_ns.numel()
        self.length, self.window = length or tokens, tokens if window is None else window
        self.causal, self.scale = causal, scale
        self.masked = documents is not None or window is not None
        check(q, k, v, self.window, self.length, tokens)
        self.documents = whole_documents(documents, tokens, self.n, layout)

    def sight(self, j):
        """What this rank's queries see of the keys of rank j: a Sight, or None."""
        queries_s, keys_s = self.owned_ns[self.r], self.owned_ns[j]
        if self.causal and not self.masked:
            return causal_sight(queries_s, keys_s)
        return other_sight(queries_s, keys_s, self)


# ── one block, forward and backward ──────────────────────────────────────────────────────────

# The operators behind torch's scaled_dot_product_attention, forward and backward. They never hold
# a block's scores, and they return its lse. They serve blocks without a mask, with keys and values
# of one width. Of a row that a mask hides, they say that its lse is 0, where -inf is right.
# A GPU's operator is not used: it rounds the output of each block to bf16.
FUSED = {
    "cpu": (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
}


def _fused(q, v, mask):
    """The two operators if they serve such a block, else None."""
    return FUSED.get(q.device.type) if mask is None and q.shape[-1] == v.shape[-1] else None


def _written_out(q_BHsd, k_BKsd, v_BKsd, causal, mask):
    """Keys and values for each query head, and a mask that says what `causal` says."""
    sharing = q_BHsd.shape[1] // k_BKsd.shape[1]
    k_BHsd, v_BHsd = (x.repeat_interleave(sharing, dim=1) for x in (k_BKsd, v_BKsd))
    if causal:
        mask = torch.ones(q_BHsd.shape[2], k_BHsd.shape[2], dtype=torch.bool).tril()
    return k_BHsd, v_BHsd, mask


def block_forward(q_BHsd, k_BKsd, v_BKsd, causal, mask=None, scale=None):
    """`attend_to_block` for key/value heads that query heads share, fused where possible."""
    if fused := _fused(q_BHsd, v_BKsd, mask):
        return fused[0](q_BHsd, k_BKsd, v_BKsd, is_causal=causal, scale=scale)
    k_BHsd, v_BHsd, mask = _written_out(q_BHsd, k_BKsd, v_BKsd, causal, mask)
    return attend_to_block(q_BHsd, k_BHsd, v_BHsd, mask, scale)


def block_backward(d_out, q_BHsd, out, lse_BHs, k_BKsd, v_BKsd, causal, mask=None, scale=None):
    """dq, dk, dv of one block, from the output and lse of the *whole* row. Probabilities are then
    those of full attention, and the gradients of blocks add up.
    Source: Dao, arXiv:2307.08691, section 3.1."""
    scale = q_BHsd.shape[-1] ** -0.5 if scale is None else scale
    if fused := _fused(q_BHsd, v_BKsd, mask):
        tensors = d_out, q_BHsd, k_BKsd, v_BKsd, out, lse_BHs
        return fused[1](*tensors, 0.0, causal, scale=scale)
    k_BHsd, v_BHsd, mask = _written_out(q_BHsd, k_BKsd, v_BKsd, causal, mask)
    scores = _scores(q_BHsd, k_BHsd, mask, scale)
    # Q6.4 ** Softmax couples a whole row, and this block is a part of the row. Which saved tensors
    #         stand for the other parts of the row?
    #         hint: the row's log-sum-exp, and <d_out, out>, the sum of p · dp over the whole row
    probs = (scores - lse_BHs[..., None]).exp()
    row_dot = (d_out * out).sum(-1, keepdim=True)
    d_scores = probs * (d_out @ v_BHsd.mT - row_dot) * scale
    # /Q6.4
    # query heads that share a key/value head give it the sum, before anything travels
    by_key = lambda x_BHsd: x_BHsd.unflatten(1, (k_BKsd.shape[1], -1)).sum(2)
    return d_scores @ k_BHsd, by_key(d_scores.mT @ q_BHsd), by_key(probs.mT @ d_out)


def _by_head(x_BsHd):
    """(B, H, s, d): a view in fp32 or float64, a copy in fp32 of a narrower dtype."""
    return x_BsHd.transpose(1, 2).to(_at_least_fp32(x_BsHd))


def _at_least_fp32(x):
    return torch.promote_types(x.dtype, torch.float32)


class _Attention(torch.autograd.Function):
    """
                  around a ring                         gathered
    gather                                              all_gather of k, v, which are kept
    visits        n-1 hops of k, v                      k, v of one rank after the other
    bring_home    n hops of dk, dv; the last goes home  reduce_scatter(SUM) of dk, dv
    forward: gather, visits; backward: visits again, bring_home
    """

    @staticmethod
    def forward(ctx, q, k, v, ring):
        kv = ring.gather(torch.cat([k.transpose(1, 2), v.transpose(1, 2)], dim=-1))
        out = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=_at_least_fp32(q))
        q_BHsd, out_BHsd, d = _by_head(q), out.transpose(1, 2), q.shape[-1]
        lse_BHs = torch.full_like(q_BHsd[..., 0], -math.inf)
        for j, kv_j in ring.visits(kv):
            if sight := ring.sight(j):
                rows, columns, *seen = sight
                k_j, v_j = kv_j[:, :, columns].to(out.dtype).split([d, v.shape[-1]], dim=-1)
                block = block_forward(q_BHsd[:, :, rows], k_j, v_j, *seen, ring.scale)
                merge(out_BHsd[:, :, rows], lse_BHs[:, :, rows], *block)
        ctx.ring, out = ring, out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse_BHs)
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, kv, out, lse_BHs = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=lse_BHs.dtype)
        dkv = ctx.ring.bring_home(_dkv_by_visit(d_out, q, out, lse_BHs, kv, ctx.ring, dq))
        dk, dv = dkv.transpose(1, 2).to(q.dtype).split([q.shape[-1], out.shape[-1]], dim=-1)
        return dq.to(q.dtype), dk, dv, None


def _dkv_by_visit(d_out_BsHd, q_BsHd, out_BsHd, lse_BHs, kv, ring, dq_BsHd):
    """Yield, for each visit, the gradient of its keys and values from this rank's queries, in fp32
    or wider. Adds the gradient of the queries to dq in place."""
    d_out, q, out = (_by_head(x) for x in (d_out_BsHd, q_BsHd, out_BsHd))
    dq, widths = dq_BsHd.transpose(1, 2), [q.shape[-1], out.shape[-1]]
    lse = lse_BHs.masked_fill(lse_BHs == -math.inf, 0)  # exp(-inf + inf) is not a number
    for j, kv_j in ring.visits(kv):
        dkv_j = torch.zeros_like(kv_j, dtype=q.dtype)
        if sight := ring.sight(j):
            rows, columns, *seen = sight
            k_j, v_j = kv_j[:, :, columns].to(q.dtype).split(widths, dim=-1)
            of_rows = [x[:, :, rows] for x in (d_out, q, out, lse)]
            dq_rows, *dkv = block_backward(*of_rows, k_j, v_j, *seen, ring.scale)
            dq[:, :, rows] += dq_rows
            dkv_j[:, :, columns] = torch.cat(dkv, dim=-1)
        yield dkv_j


# ── the ladder ───────────────────────────────────────────────────────────────────────────────

# `_Attention` takes the blocks one by one. `visits` posts the next hop, and then stands at its
# `yield` while `_Attention` computes and merges a block. `_Attention` then asks for the next block,
# and only then does `visits` wait: post, compute, wait.


class _Ring(_Sights):
    """Keys and values go round the ring. In backward they go round again, with their gradients."""

    def gather(self, kv):
        return kv

    def hop(self, x):
        return hop(x, self.n, self.r, self.group)

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

    def bring_home(self, dkv_by_visit):
        """The gradient of this rank's own keys and values: the sum of what all ranks add to it."""
        # Q6.5 *** Every rank adds to the gradient of the keys that visit it. How does the sum reach
        #          the rank that owns the keys?
        #          hint: the sum follows the keys, one hop behind, and makes one hop more than they
        sum_so_far = None
        for dkv in dkv_by_visit:
            if sum_so_far is not None:
                dkv += sum_so_far()
            sum_so_far = self.hop(dkv)
        return sum_so_far()
        # /Q6.5


class _Gathered(_Sights):
    """Every rank gathers all keys and values, and keeps them for backward."""

    def gather(self, kv):
        kv_n = kv.new_empty(self.n, *kv.shape)
        # all_gather over cp, 2·B·s·K·d from each: every rank now holds all keys and values
        dist.all_gather_single(kv_n.flatten(0, 1), kv, group=self.group)
        return kv_n

    def visits(self, kv_n):
        return enumerate(kv_n)

    def bring_home(self, dkv_by_visit):
        dkv_n = torch.stack([*dkv_by_visit])
        received_n = torch.empty_like(dkv_n)
        # all_to_all over cp, 2·B·s·K·d to each: every rank now holds all parts of its own dk, dv.
        # With the sum it is a reduce-scatter; gloo's own sends twice as much, and blocks
        dist.all_to_all_single(received_n, dkv_n, group=self.group)
        return received_n.sum(0)


def ring_attention(q, k, v, group, layout="zigzag", documents=None, **options):
    """Causal attention in which keys and values go round while blocks are computed.

    Args: q (B, s, H, d), k (B, s, K, d), v (B, s, K, any width): this rank's tokens as made by
    `shard(..., group, layout)`, equally many on every rank; K divides H. What a query may see:
    documents (B, S), the document of each token of the *whole* sequence, or -1. A token sees its
    own document only; a token of -1 sees nothing and gets 0. causal=False: later tokens too; then
    pass length=S, unless S is n·s. window=w: of these, the tokens less than w positions away.
    scale: the factor of the scores, by default d ** -0.5. With documents, a window, or a v of
    another width, the scores of a block stand in memory. `agree_on_sequence` compares the ranks.
    Returns (B, s, H, width of v). Sums in fp32 or wider. Raises ValueError where these do not fit.
    Source: Liu et al., arXiv:2310.01889; striped: Brandon et al., arXiv:2311.09431.
    """
    ring = _Ring(q, k, v, group, layout, documents, **options)
    return _Attention.apply(q, k, v, ring)


def all_gather_attention(q, k, v, group, layout="zigzag", documents=None, **options):
    """Causal attention that gathers all keys and values first. It is simple, hides no message, and
    holds keys and values of the whole sequence, which are K/H of the size of all queries. Arguments
    as in `ring_attention`. Source: The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.2."""
    ring = _Gathered(q, k, v, group, layout, documents, **options)
    return _Attention.apply(q, k, v, ring)


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
    whole = _Sights(q, k, v, group, layout, documents, **options)
    n, H, K = whole.n, q.shape[2], k.shape[2]
    if H % n:
        raise ValueError(
            f"Ulysses over {n} ranks: they do not divide {H} query heads ({K} key/value heads, "
            f"{whole.owned_ns.numel()} tokens): use a divisor of {H}, or a ring"
        )
    if attend is None:

        def attend(q, k, v):
            alone = _Ring(q, k, v, "alone", "contiguous", whole.documents, **options)
            return _Attention.apply(q, k, v, alone)

    k, v = (x.repeat_interleave(math.lcm(K, n) // K, dim=2) for x in (k, v))
    q, k, v = (_Exchange.apply(x, group, layout, True) for x in (q, k, v))
    return _Exchange.apply(attend(q, k, v), group, layout, False)


def ulysses_ring_attention(q, k, v, group, ring_group, layout="zigzag", documents=None, **options):
    """Ulysses over `group`, where links are fast, and a ring over `ring_group` for the heads that a
    rank then has: for more ranks than heads, in fewer hops. A rank's tokens are
    `shard(shard(x, ring_group, layout, inner=u), group, "contiguous")`, u the size of `group`.
    Other arguments as in `ring_attention`. Source: Fang & Zhao, USP, arXiv:2405.07719."""
    u, n = dist.get_world_size(group), dist.get_world_size(ring_group)
    documents = whole_documents(documents, q.shape[1] * u * n, n, layout, u)
    ring = partial(ring_attention, group=ring_group, layout=layout, documents=documents, **options)
    return ulysses_attention(q, k, v, group, attend=ring)


# ── a step: the model around attention, the divisor, the sum of gradients ────────────────────


def rotate(x_BsHd, positions_s):
    """Rotary embedding at global positions (s,) or (B, s). Source: Su et al., arXiv:2104.09864."""
    half = x_BsHd.shape[-1] // 2
    pace = 10000 ** (-torch.arange(half, device=x_BsHd.device, dtype=torch.float64) / half)
    angle = positions_s.to(x_BsHd.device)[..., None, None] * pace
    cos, sin = angle.cos().to(x_BsHd.dtype), angle.sin().to(x_BsHd.dtype)
    a, b = x_BsHd.split(half, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class LanguageModel(nn.Module):
    """Maps bytes (B, s) at global positions (s,) to logits of the next byte (B, s, V): attention,
    then an MLP. The model touches other ranks only inside attend(q, k, v)."""

    def __init__(self, H=8, K=2, d=8, V=256):
        super().__init__()
        D, self.heads = H * d, [H, K, K]
        self.token, self.qkv = nn.Embedding(V, D), nn.Linear(D, (H + 2 * K) * d)
        self.out, self.up, self.down = nn.Linear(D, D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.norm_1, self.norm_2, self.norm_3 = (nn.RMSNorm(D) for _ in range(3))
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, x_Bs, positions_s, attend):
        x_BsD = self.token(x_Bs)
        heads = self.qkv(self.norm_1(x_BsD)).unflatten(-1, (sum(self.heads), -1))
        q, k, v = heads.split(self.heads, dim=2)
        # keys are rotated before they travel, by the positions of the rank that holds them
        attended = attend(rotate(q, positions_s), rotate(k, positions_s), v)
        x_BsD = x_BsD + self.out(attended.flatten(2))
        x_BsD = x_BsD + self.down(F.gelu(self.up(self.norm_2(x_BsD))))
        return self.head(self.norm_3(x_BsD))


def loss_share(logits_BsV, labels_Bs, group):
    """This rank's share of the mean loss over the step's labels, and how many labels the step has,
    not counting -100. The shares of all ranks add up to the mean."""
    num_labels = (labels_Bs != -100).sum()
    # all_reduce(SUM) over cp, 1: every rank now knows the divisor of the whole step
    dist.all_reduce(num_labels, group=group)
    losses = F.cross_entropy(logits_BsV.flatten(0, 1), labels_Bs.flatten(), reduction="sum")
    return losses / num_labels.clamp(min=1), num_labels


def train_step(model, optimizer, x_BS, y_BS, group, attend, layout):
    """One step on whole sequences, of which this rank computes its own tokens. Returns the loss of
    the whole step. A step without a label changes nothing, on all ranks alike. The labels y come
    from the whole sequence, since the label of a rank's last token is a token of another rank."""
    cut = partial(shard, group=group, layout=layout)
    logits = model(cut(x_BS), positions(x_BS.shape[1], group, layout), attend)
    loss, num_labels = loss_share(logits, cut(y_BS, fill=-100), group)
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    for x in [loss, *(param.grad for param in model.parameters())]:
        # all_reduce(SUM) over cp, one tensor: each rank's part comes from its own tokens
        dist.all_reduce(x, group=group)
    if num_labels > 0:
        optimizer.step()
    return loss


# ── what a library adds: more masks than causal, and refusals ────────────────────────────────


def other_sight(queries_s, keys_s, ring):
    """As `causal_sight`, for all options of `ring_attention`. Padding, from `length` on, is never
    seen. With documents or a window, the Sight has a mask."""
    if ring.causal:
        sight = causal_sight(queries_s, keys_s)
    else:
        columns = slice(0, int((keys_s < ring.length).sum()))
        sight = Sight(slice(0, len(queries_s)), columns) if columns.stop else None
    if sight is None or not ring.masked:
        return sight
    queries_s, keys_s = queries_s[sight.rows], keys_s[sight.columns]
    distance = queries_s[:, None] - keys_s
    seen = (distance.abs() < ring.window) & ((distance >= 0) | (not ring.causal))
    if ring.documents is not None:
        of_queries, of_keys = ring.documents[:, queries_s, None], ring.documents[:, None, keys_s]
        seen = seen.to(of_keys.device) & (of_queries == of_keys) & (of_queries >= 0)
    mask = seen.view(-1, 1, *distance.shape)
    return Sight(sight.rows, sight.columns, mask=mask) if mask.any() else None


def whole_documents(documents_BS, tokens, n, layout, inner=1):
    """Documents of a whole sequence, padded with -1 to `tokens`, all that the ranks hold together.
    Raises ValueError unless shard() pads a sequence of that length to as many tokens."""
    if documents_BS is None:
        return None
    S = documents_BS.shape[1]
    if _owned(S, n, layout, inner).numel() != tokens:
        raise ValueError(
            f"documents of {S} tokens, for {tokens} tokens on all ranks together: "
            f"pass those of the whole sequence, or pad them with -1 to {tokens}"
        )
    return F.pad(documents_BS, (0, tokens - S), value=-1)


def check(q, k, v, window, length, tokens):
    """Raise ValueError unless queries, keys and values fit each other, and the options fit them."""
    H, K = q.shape[2], k.shape[2]
    if H % K:
        raise ValueError(f"{K} key/value heads do not divide {H} query heads")
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip("qkv", (q, k, v)))
        raise ValueError(f"{shapes}: only q may have more heads, and v another width, than k")
    if window < 1:
        raise ValueError(f"window {window}: a token sees itself at least, so 1 or more")
    if length > tokens:
        raise ValueError(f"length {length}: shard() gave the ranks {tokens} tokens together")


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
from copy import deepcopy
from itertools import product


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
    of values; `visible` (S, S) says to the twin what options say to `ring_attention`."""

    def __init__(self, S, H, K, device, visible=None, logit=0.0, width=8, **options):
        normal = partial(torch.randn, dtype=torch.float64, generator=torch.Generator())
        q, k, v = normal(2, S, H, 8), normal(2, S, K, 8), normal(2, S, K, width)
        if logit:
            q[..., 0], k[..., 0] = logit * math.sqrt(8), (torch.arange(S) >= S // 2)[:, None]
        self.qkv = [x.to(device).requires_grad_() for x in (q, k, v)]
        self.d_out, self.options = normal(2, S, H, width).to(device), dict(length=S, **options)
        masks = options.get("documents"), options.get("scale"), visible
        out = causal_attention(*self.qkv, *masks)
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


def attention_rows(group, device, K=2):
    """Yield a row for each way to attend, beside the twin, on a length that no layout divides. The
    formulas count heads: one head is the q or k, and the v or output, of all tokens of a rank."""
    n = dist.get_world_size(group)
    S, H, K_traded = 16 * n + 3, 4 * n, math.lcm(K, n)  # Ulysses repeats heads
    case, all_pairs = partial(Case, S, H, K, device), torch.ones(S, S, dtype=torch.bool)
    ring = ring_attention, (3 * n - 2) * K if n > 1 else 0, K
    gather = all_gather_attention, 2 * (n - 1) * K, n * K
    ulysses = ulysses_attention, 2 * (n - 1) / n * (H + K_traded), K_traded
    documents = (torch.arange(2 * S).view(2, S) // 7).to(device)
    plain, window = case(), all_pairs.tril().triu(-6).to(device)
    both_ways = case(all_pairs.to(device), width=12, scale=0.5, causal=False)
    for name, (attend, heads_sent, K_kept), layout, case in [
        *((f"ring, {layout}", ring, layout, plain) for layout in LAYOUTS),
        ("all-gather", gather, "zigzag", plain),
        ("Ulysses", ulysses, "zigzag", plain),
        ("ring, written out", ring, "zigzag", plain),
        ("ring, scores of 10,000", ring, "zigzag", case(logit=1e4)),
        ("ring, packed documents", ring, "zigzag", case(documents=documents)),
        ("all-gather, a window of 7", gather, "zigzag", case(window, window=7)),
        ("Ulysses, not causal, v of 12", ulysses, "zigzag", both_ways),
    ]:
        cut = partial(shard, group=group, layout=layout)
        with patch.dict(FUSED, clear="written out" in name):
            attend = partial(attend, group=group, layout=layout)
            _, error, sent, kept = case.run(attend, cut)
        tokens_8 = 8 * 2 * cut(case.d_out).shape[1]  # 8 bytes of each token of two sequences
        head = tokens_8 * (8 + case.qkv[2].shape[-1])
        held = head * (H + K_kept) + tokens_8 * H  # q, out, k, v; lse
        yield Row(name, error, (sent, head * heads_sent), (kept, held))


def model_row(group, device):
    """A step of the model beside its twin: loss and gradients."""
    n = dist.get_world_size(group)
    draw, S = torch.Generator().manual_seed(0), 16 * n
    x_BS = torch.randint(256, (1, S), generator=draw).to(device)
    documents = (torch.rand(1, S, generator=draw) < 0.1).cumsum(1).to(device)
    # the last token of a document has no label, so ranks have unequal numbers of labels
    y_BS = torch.where(documents == documents.roll(-1, 1), x_BS.roll(-1, 1), -100)
    assert len(x_BS.unique()) > S // 2 and len(y_BS.unique()) > S // 2, "a trivial batch"
    torch.manual_seed(0)
    twin = LanguageModel().double().to(device)
    model = deepcopy(twin)
    logits = twin(x_BS, torch.arange(S), partial(causal_attention, documents=documents))
    loss = F.cross_entropy(logits.transpose(1, 2), y_BS)
    loss.backward()
    attend = partial(ring_attention, group=group, documents=documents)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Ledger() as ledger:
        found = train_step(model, optimizer, x_BS, y_BS, group, attend, "zigzag")
    grads = [[param.grad for param in some.parameters()] for some in (model, twin)]
    pairs = [(found, loss.detach()), *zip(*grads)]
    error = max(relative_error(*pair) for pair in pairs)
    hops = (6 * n - 4) * 2 * 8 * 16 * 8 if n > 1 else 0  # K = 2, s = 16, d = 8, of 8 bytes
    sent = hops + 2 * (n - 1) / n * (8 + sum(x.nbytes for x, _ in pairs))  # 8: number of labels
    return Row("model: loss and gradients", error, (sum(ledger.sent.values()), sent))


def stop_short(ring, dkv_by_visit):
    """Wrong on purpose: after n-1 hops, as keys make, each sum is one rank before its home."""
    arrived = lambda: 0
    for dkv in dkv_by_visit:
        dkv += arrived()
        arrived = ring.hop(dkv)
    arrived()
    return dkv


def wrong_rows(group, device):
    """What goes wrong most often on two ranks and more, and the error that it must show."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    S, cut = 16 * n, partial(shard, group=group)
    case, owned_ns = Case(S, 4, 2, device), _owned(S, n, "zigzag")
    with patch.object(_Ring, "bring_home", stop_short):
        (_, _, dk, _), *_ = case.run(partial(ring_attention, group=group), cut)
    right, of_next = (case.expected[2][:, owned_ns[rank % n]] for rank in (r, r + 1))
    error, predicted = relative_error(dk, right), relative_error(of_next, right)
    yield Row("dk, dv one hop short", error, wrong=predicted)

    q, k, v = (x.detach() for x in case.qkv)
    offset = torch.arange(S // n) + r * (S // n)
    out = ring_attention(*(rotate(cut(x), offset) for x in (q, k)), cut(v), group)
    full = lambda at: cut(causal_attention(rotate(q, at), rotate(k, at), v))
    right, wrong = full(torch.arange(S)), full(owned_ns.flatten().argsort())
    error, predicted = relative_error(out, right), relative_error(wrong, right)
    yield Row("rotary offset by rank", error, wrong=predicted)


def work(S, n, layout):
    """Pairs of query and key that a ring of n computes, (n ranks, n steps), by the same `sight`
    that attention asks."""
    owned_ns, pairs = _owned(S, n, layout), torch.zeros(n, n, dtype=torch.long)
    for r, step in product(range(n), repeat=2):
        if sight := causal_sight(owned_ns[r], owned_ns[(r - step) % n]):
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
        starts = (F.pad(pairs.amax(0).cumsum(0), (1, 0)).double() / unit).tolist()
        for step, widths in enumerate((pairs.T.double() / unit).tolist()):
            shade, ink = ("#6fa8c9", "black") if step % 2 else ("#0b3c5d", "white")
            axis.barh(range(n), widths, 0.8, left=starts[step], color=shade)
            middle = (starts[step] + widths[-1] / 2, n - 1)
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
            say(f"step {step:3}  loss {loss.item():.3f}")
    say(f"a rank kept {sum(kept.values()) / 1e6:.1f} MB for backward, parameters and all; "
        f"the scores of full attention alone would be {32 * S**2 / 1e6:,.0f} MB")  # fmt: skip
    return model


def main(args, device):
    """Prove, say how even the work is, train or draw. Returns 0 if every row is as claimed."""
    group, n = dist.group.WORLD, dist.get_world_size()
    say(f"06 context parallel · {n} ranks · {dist.get_backend()} · {device.type} · float64")
    rows = [by_hand_row(group, device), *attention_rows(group, device), model_row(group, device)]
    broken = prove([*rows, *(wrong_rows(group, device) if n > 1 else [])], device)
    for layout in LAYOUTS:
        pairs = work(12 * n, n, layout)
        each = " ".join(map(str, pairs.sum(1).tolist()))
        say(f"{layout:11} {12 * n} tokens, pairs by rank {each}: {efficiency(pairs):.3f} efficient")
    if args.plot and dist.get_rank() == 0:
        plot(n, args.plot)
    if args.steps and not args.plot and not broken:
        train(args, group, device)
    return broken


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
    parser = arguments(__doc__, ranks=4, steps=20, plot="the work of each rank and step, by layout")
    add = parser.add_argument
    add("--length", type=int, default=4096, help="tokens of a sequence")
    add("--attention", choices=ATTENTION, default="ring", help="how keys meet queries in training")
    add("--layout", choices=LAYOUTS, default="zigzag", help="which tokens a rank holds")
    launch(main, parser.parse_args(), validate)
