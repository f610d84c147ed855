"""speed · Compute again, fuse, replay: the same numbers with fewer bytes, or with fewer launches

No method here changes a gradient. Each one changes what is held, what moves to and from the memory
of the device (HBM), or how often Python starts an operation.

    method                     what is held or moved                            price
    recompute every k-th       boundary · (layers/k + k) + inside · k           one forward more
    the best plan              at most a given number of bytes                  the least forwards
    recompute ahead            one block's inside more                          nothing: waits hide
    FlashAttention             S·(d + 1) a head, instead of S² scores           scores again
    chunked cross-entropy      chunk·V logits, instead of tokens·V              both gradients held
    torch.compile              one graph; each break makes one more             compile time
    CUDA graph                 one launch for all operations                    fixed addresses

    `boundary` has the bytes of a block's input, `inside` those that its graph holds beside it. The
    least is held near k = sqrt(layers · boundary / (boundary + inside)), which is sqrt(layers) only
    if nothing is inside. A transformer's inside is some 16 boundaries: k = 1 is best to 34 layers.

    The chain of blocks is cut over n ranks (tensor parallel): each block ends in an all-reduce.
    A recomputed block sends once more only if another recomputed block needs its output.

    python beyond/speed.py                          two ranks
    torchrun --nproc-per-node 2 beyond/speed.py     the same, started by torchrun

Bytes, order, graphs and launches are counted. Only where there is a GPU is a step timed.
Guide: Memory math · Custom kernels, compile and CUDA graphs · Activation checkpointing in detail.
Sources: Chen, arXiv:1604.06174; Korthikanti, arXiv:2205.05198; Rotor, arXiv:1911.13214; Lynx,
arXiv:2406.08756; FlashAttention 1 and 2, arXiv:2205.14135, 2307.08691; Liger, arXiv:2410.10989.
Questions  QV.1 ** what besides the input must come back?   QV.2 *** which plan is the cheapest?
           QV.3 ** how is a sum corrected when a larger score comes?
"""
# n ranks · r this rank · B sequences · S tokens of a sequence · D width · F hidden units
# H query heads · d width of a head · V vocabulary

import importlib
import math
import signal
import sys
import time
from functools import lru_cache, partial
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads ends it without a trace

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # before a Ledger: it remembers dist's functions
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).resolve().parents[1]))
dp = importlib.import_module("01_dp")

DROP, RATE = 0.1, 0.1
worst = lambda found, wanted: max(map(dp.relative_error, found, wanted))


# ── by hand: a chain of blocks, and what of it is kept ───────────────────────────────────────


class Block:
    """This rank's part of x + down(mask · tanh(up(x))), as a partial sum over hidden units.

    up (F/n, D) and down (D, F/n) are cut by hidden units, so that the sum over ranks is the whole.
    Every rank draws the mask of all hidden units from the same state, and takes its part.
    """

    def __init__(self, up_FD, down_DF, n=1, r=0):
        self.up, self.down = up_FD.chunk(n)[r].clone(), down_DF.chunk(n, 1)[r].clone()
        self.hidden, self.n, self.r = len(up_FD), n, r
        self.params = [self.up.requires_grad_(), self.down.requires_grad_()]

    def __call__(self, x_BSD, draw):
        """The partial sum (B, S, D); `draw` is the torch.Generator of the mask."""
        options = dict(generator=draw, device=x_BSD.device, dtype=x_BSD.dtype)
        random_BSF = torch.rand(*x_BSD.shape[:2], self.hidden, **options)
        mask = (random_BSF.chunk(self.n, -1)[self.r] > DROP).to(x_BSD.dtype) / (1 - DROP)
        return torch.tanh(x_BSD @ self.up.T) * mask @ self.down.T


# Four blocks, every second input kept. (x0) is an input, [1] a graph with all that it holds.
#
#     forward 0, move 1, forward 2, move 3, loss     (x0)  (x2)
#     send 2, output 2, graph 3                      (x0)  (x2) [2] (x3) [3]
#     backward 3, backward 2                         (x0)
#     send 0, output 0, graph 1                      (x0) [0] (x1) [1]
#     backward 1, backward 0
#
# At most 3 inputs and 2 graphs were held, instead of 4 and 4; each block ran twice. Block 3 ran
# again without its sum over the ranks: backward needs the graph, and nobody needs the output.


class Chain:
    """Blocks that run forward and backward as a plan says. A plan is a list of (operation, block):

    forward   x of the next block; the input stays      move     the same; the input goes
    graph     the block's graph, and no output          send     graph; its sum is on its way
    output    the sum has come: x of the next block     loss     the gradient of the last x
    backward  the block's gradients; its graph and its input go
    """

    def __init__(self, blocks, group, draw, ledger, again=True):
        self.blocks, self.group, self.draw = blocks, group, draw
        self.ledger, self.again = ledger, again

    def run(self, plan, x_BSD, loss_gradient):
        """Returns ([gradients of x and of all parameters], most bytes held after an operation).
        `loss_gradient(output)` is d loss/d output."""
        self.inputs, self.graphs, self.sums, self.states = {0: x_BSD}, {}, {}, {}
        self.gradients, self.loss_gradient, self.d_BSD, most = {}, loss_gradient, None, 0
        for kind, i in plan:
            self.ledger.mark(f"{kind} {i}")
            getattr(self, kind)(i)
            most = max(most, self.held())
        params = [x for i in range(len(self.blocks)) for x in self.gradients[i]]
        return [self.d_BSD, *params], most

    def held(self):
        """Bytes of inputs, graphs, sums under way and the gradient of x, each storage once. States
        of the mask, 5 KB a block on a CPU, are not counted."""
        tensors = [*self.inputs.values(), *(total for total, _ in self.sums.values())]
        tensors += [x for leaf, _, saved in self.graphs.values() for x in (leaf, *saved)]
        tensors += [self.d_BSD] * (self.d_BSD is not None)
        return sum({x.untyped_storage()._cdata: x.nbytes for x in tensors}.values())

    def partial(self, i, x_BSD):
        """The partial sum of block i, with the same mask whenever it is computed."""
        # QV.1 ** A block may run twice in a step, and draws a mask. What must the second run have
        #      from the first one besides its input, and what must it leave as it was?
        #      hint: `states` may keep what `draw.get_state()` says; with `again` False, nothing
        before = self.draw.get_state()
        state = self.states.setdefault(i, before)
        if self.again:
            self.draw.set_state(state)
        partial = self.blocks[i](x_BSD, self.draw)
        if self.again and state is not before:
            self.draw.set_state(before)
        # /QV.1
        return partial

    def forward(self, i):
        with torch.no_grad():
            total = self.partial(i, self.inputs[i])
        # all_reduce(SUM) over tp, B·S·D: the parts of a block's hidden units, in place
        dist.all_reduce(total, group=self.group)
        self.inputs[i + 1] = self.inputs[i] + total

    def move(self, i):
        self.forward(i)
        del self.inputs[i]

    def graph(self, i):
        """Keep the graph of a partial sum, but not its values, which backward does not read."""
        leaf, saved = self.inputs[i].detach().requires_grad_(), []
        own = [param.untyped_storage()._cdata for param in self.blocks[i].params]
        look = lambda x: x.untyped_storage()._cdata in own or saved.append(x.detach())
        with saved_tensors_hooks(lambda x: (look(x), x)[1], lambda x: x):
            partial = self.partial(i, leaf)
        self.graphs[i] = leaf, get_gradient_edge(partial), saved
        return partial.detach()

    def send(self, i):
        total = self.graph(i)
        # all_reduce(SUM) over tp, B·S·D: posted here, waited for in `output`
        self.sums[i] = total, dist.all_reduce(total, group=self.group, async_op=True)

    def output(self, i):
        total, work = self.sums.pop(i)
        work.wait()
        self.inputs[i + 1] = self.inputs[i] + total

    def loss(self, i):
        self.d_BSD = self.loss_gradient(self.inputs.pop(i))

    def backward(self, i):
        block, (leaf, edge, _) = self.blocks[i], self.graphs.pop(i)
        d_leaf, *self.gradients[i] = torch.autograd.grad(edge, [leaf, *block.params], self.d_BSD)
        # all_reduce(SUM) over tp, B·S·D: each rank's hidden units give a part of d_leaf
        dist.all_reduce(d_leaf, group=self.group)
        self.d_BSD = self.d_BSD + d_leaf
        self.inputs.pop(i, None)


# ── plans: what is kept, what is computed again ──────────────────────────────────────────────


def every(layers, k):
    """The plan that keeps every k-th input and recomputes each block once."""
    plan = [("move" if i % k else "forward", i) for i in range(layers)] + [("loss", layers)]
    for first in reversed(range(0, layers, k)):
        group = range(first, min(first + k, layers))
        plan += [(kind, i) for i in group[:-1] for kind in ("send", "output")]
        plan += [("graph", group[-1]), *(("backward", i) for i in reversed(group))]
    return plan


def keep_all(layers):
    """The plan that recomputes nothing."""
    plan = [(kind, i) for i in range(layers) for kind in ("send", "output")]
    return [*plan, ("loss", layers), *(("backward", i) for i in reversed(range(layers)))]


def best_every(layers, boundary, inside):
    """The k whose plan `every` holds least. A group of `size` blocks stands beside the inputs of
    the groups before it and the gradient; the last group may be smaller than the others."""
    at = lambda groups, size: boundary * (groups + size) + inside * size
    held = lambda k: max(at(layers // k, k), at(-(-layers // k), (layers - 1) % k + 1))
    return min(range(1, layers + 1), key=held)


def cheapest(seconds, boundary, inside, budget):
    """(seconds of forward, plan) of the cheapest plan that holds at most `budget` bytes.

    `seconds` and `inside` have a number for each block. Dynamic programming over (first block, last
    block, free bytes), as Rotor (arXiv:1911.13214, section 4). Raises ValueError if none is small.
    """
    layers = len(seconds)
    x_of = lambda j: boundary if j < layers else 0  # the last x stands where its gradient will

    @lru_cache(None)
    def best(s, t, free):
        """Backward of blocks s to t. The input of s is held and paid for; `layers` is the loss."""
        if s == layers:
            return 0, (("loss", s),)
        choices = [(math.inf, ())]
        # QV.2 *** Block s is kept with its graph, or the input of a later block j is kept and s to
        #      j - 1 run again. What does each choice cost, and what does it leave free?
        #      hint: `best` of what follows, with fewer bytes free, and of what comes again
        if s == t and inside[s] <= free:
            choices.append((seconds[s], (("graph", s), ("backward", s))))
        if s < t and inside[s] + x_of(s + 1) <= free:
            cost, plan = best(s + 1, t, free - inside[s] - x_of(s + 1))
            plan = (("send", s), ("output", s), *plan, ("backward", s))
            choices.append((seconds[s] + cost, plan))
        for j in (j for j in range(s + 1, t + 1) if x_of(j) <= free):
            (after, plan), (again, rest) = best(j, t, free - x_of(j)), best(s, j - 1, free)
            first = [("move" if i > s else "forward", i) for i in range(s, j)]
            choices.append((sum(seconds[s:j]) + after + again, (*first, *plan, *rest)))
        # /QV.2
        return min(choices)

    cost, plan = best(0, layers, budget - 2 * boundary)  # without the first x, and a gradient
    if cost == math.inf:
        least = 2 * boundary + max([inside[0], *(boundary + more for more in inside[1:])])
        raise ValueError(f"no plan holds {budget} bytes or fewer: the least is {least}")
    return cost, list(plan)


def ahead(plan):
    """The plan with each recomputation begun before the backward that stands in front of it, so
    that its first sum travels while that backward computes."""
    plan = list(plan)
    for at in reversed(range(1, len(plan))):
        to = at
        while plan[at][0] in ("graph", "send") and plan[to - 1][0] == "backward":
            to -= 1
        plan.insert(to, plan.pop(at))
    return plan


# ── fused: what is not written does not have to be read ──────────────────────────────────────


class Meter(TorchDispatchMode):
    """While open, knows the tensors that operations make: `alive()` has the bytes of those that are
    still there, and `peak` the most there were after any operation."""

    def __enter__(self):
        self.storages, self.peak = {}, 0
        return super().__enter__()

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        out = call(*args, **(kwargs or {}))
        leaves = lambda tree: filter(torch.is_tensor, tree_leaves(tree))
        storages = lambda tree: [x.untyped_storage() for x in leaves(tree)]
        known = {x._cdata for x in storages((args, kwargs))}
        new = [x for x in storages(out) if x._cdata not in known]
        self.storages |= {x._cdata: (StorageWeakRef(x), x.nbytes()) for x in new}
        self.peak = max(self.peak, self.alive())
        return out

    def alive(self):
        self.storages = {key: x for key, x in self.storages.items() if not x[0].expired()}
        return sum(size for _, size in self.storages.values())


class Tiles:
    """Counts the bytes of the tiles that a fused kernel would read from HBM and write to it."""

    moved = 0

    def load(self, *tiles):
        self.moved += sum(x.nbytes for x in tiles)
        return tiles

    def store(self, whole, tile, *values):
        for x, value in zip(whole, values):
            x[..., tile, :] = value
            self.moved += x[..., tile, :].nbytes


def scores(q, k, rows, columns):
    """The scores (.., rows, columns) of two tiles, -inf where a key is later than its query."""
    s = q @ k.mT / math.sqrt(q.shape[-1])
    at = lambda tile: torch.arange(tile.start, tile.stop, device=q.device)
    return s.masked_fill(at(rows)[:, None] < at(columns), -math.inf)


class FlashAttention(torch.autograd.Function):
    """Causal attention by tiles (arXiv:2307.08691, algorithms 1 and 2): q, k, v (.., S, d) to
    (.., S, d). Scores exist for one pair of tiles at a time, in forward and again in backward;
    from one to the other go the output and one number for each query, log sum exp of its scores."""

    @staticmethod
    def forward(ctx, q, k, v, size, hbm):
        tiles = [slice(i, min(i + size, q.shape[-2])) for i in range(0, q.shape[-2], size)]
        out, lse = torch.empty_like(q), torch.empty_like(q[..., :1])
        for i, rows in enumerate(tiles):
            (q_i,) = hbm.load(q[..., rows, :])
            top = torch.full_like(q_i[..., :1], -math.inf)
            total, acc = torch.zeros_like(top), torch.zeros_like(q_i)
            for columns in tiles[: i + 1]:
                k_j, v_j = hbm.load(k[..., columns, :], v[..., columns, :])
                s = scores(q_i, k_j, rows, columns)
                # QV.3 ** total and acc are sums of exp(score - top). This tile may have a larger
                #      top. What becomes of the sums, and what does this tile add?
                #      hint: exp(score - new) = exp(score - top) · exp(top - new)
                new = torch.maximum(top, s.amax(-1, keepdim=True))
                p, shrink = torch.exp(s - new), torch.exp(top - new)
                total = total * shrink + p.sum(-1, keepdim=True)
                acc, top = acc * shrink + p @ v_j, new
                # /QV.3
            hbm.store([out, lse], rows, acc / total, top + total.log())
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tiles, ctx.hbm = tiles, hbm
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        delta = (d_out * out).sum(-1, keepdim=True)  # what the softmax's own sum takes away
        ctx.hbm.moved += d_out.nbytes + out.nbytes + delta.nbytes
        for j, columns in enumerate(ctx.tiles):
            k_j, v_j = ctx.hbm.load(k[..., columns, :], v[..., columns, :])
            dk_j, dv_j = torch.zeros_like(k_j), torch.zeros_like(v_j)
            for rows in ctx.tiles[j:]:
                q_i, d_i, lse_i, delta_i, dq_i = ctx.hbm.load(
                    *(x[..., rows, :] for x in (q, d_out, lse, delta, dq)))
                p = torch.exp(scores(q_i, k_j, rows, columns) - lse_i)
                ds = p * (d_i @ v_j.mT - delta_i) / math.sqrt(q.shape[-1])
                dk_j, dv_j = dk_j + ds.mT @ q_i, dv_j + p.mT @ d_i
                ctx.hbm.store([dq], rows, dq_i + ds @ k_j)
            ctx.hbm.store([dk, dv], columns, dk_j, dv_j)
        return dq, dk, dv, None, None


def flash_bytes(S, d, size, itemsize=8):
    """(forward, backward): bytes of HBM a head, for tiles of `size` tokens that divide S."""
    pairs = S * (S // size + 1) // 2  # rows of all tiles that are not in the future
    forward = S * d + pairs * 2 * d + S * (d + 1)
    backward = S * (2 * d + 1) + 4 * S * d + pairs * (4 * d + 2)
    return forward * itemsize, backward * itemsize


class ChunkedCrossEntropy(torch.autograd.Function):
    """Σ cross-entropy of x w^T / tokens: x (T, D), w (V, D), targets (T). Logits exist for `chunk`
    tokens at a time; forward computes both gradients, and backward only scales them (Liger)."""

    @staticmethod
    def forward(ctx, x_TD, w_VD, y_T, tokens, chunk):
        loss, dx, dw = x_TD.new_zeros(()), torch.empty_like(x_TD), torch.zeros_like(w_VD)
        for rows in (slice(at, at + chunk) for at in range(0, len(x_TD), chunk)):
            x_cD, y_c1 = x_TD[rows], y_T[rows, None]
            logits_cV = x_cD @ w_VD.T
            logits_cV -= logits_cV.logsumexp(-1, keepdim=True)
            loss -= logits_cV.gather(-1, y_c1).sum() / tokens
            d_cV = logits_cV.exp_().scatter_add_(-1, y_c1, -torch.ones_like(x_cD[:, :1]))
            d_cV /= tokens
            dx[rows] = d_cV @ w_VD
            dw.addmm_(d_cV.T, x_cD)
            del logits_cV, d_cV  # or they would stand beside the next chunk's
        ctx.save_for_backward(dx, dw)
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        dx, dw = ctx.saved_tensors
        return dx * d_loss, dw * d_loss, None, None, None


# ── fewer launches: a graph of operations ────────────────────────────────────────────────────


def graphs_of(function, *calls, **options):
    """torch.compile without a compiler: (results of the calls, the graphs that it found)."""
    graphs = []
    torch.compiler.reset()
    keep = lambda module, inputs: graphs.append(module.graph) or module.forward
    compiled = torch.compile(function, backend=keep, **options)
    return [compiled(*args) for args in calls], graphs


class Replay(TorchDispatchMode):
    """A function that was captured once, and runs again without Python in between.

    On a GPU this is a torch.cuda.CUDAGraph. Elsewhere it is its contract: the list of operations,
    with the tensors that each one read and wrote. Both write to the same addresses whenever they
    run, so new values have to be copied into the inputs, and shapes are fixed. Raises ValueError
    for another shape, and for a function that asks for a number, on which Python could decide.
    """

    def __init__(self, function, *inputs):
        super().__init__()
        self.inputs, self.recorded = [x.clone() for x in inputs], []
        if inputs[0].is_cuda:  # capture runs nothing: the function runs once before it, as it must
            side, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                function(*self.inputs)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(self.graph):
                self.outputs = function(*self.inputs)
        else:
            with self:
                self.outputs = function(*self.inputs)

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        if call is torch.ops.aten._local_scalar_dense.default:
            raise ValueError("a captured step asks for a number (.item()): keep it in a tensor")
        out = call(*args, **(kwargs or {}))
        self.recorded.append((call, args, kwargs or {}, out))
        return out

    def __call__(self, *inputs):
        """Copy the inputs to their addresses and replay; the outputs change with the next call."""
        for fixed, x in zip(self.inputs, inputs, strict=True):
            if fixed.shape != x.shape:
                shapes = f"captured for {[*fixed.shape]}, called with {[*x.shape]}"
                raise ValueError(f"{shapes}: capture again")
            fixed.copy_(x)
        self.replay()
        return self.outputs

    def replay(self):
        """Run the captured operations on whatever their addresses hold."""
        if self.inputs[0].is_cuda:
            return self.graph.replay()
        with torch.no_grad():
            for call, args, kwargs, out in self.recorded:
                for x, value in zip(tree_leaves(out), tree_leaves(call(*args, **kwargs))):
                    if x.data_ptr() != value.data_ptr():
                        x.copy_(value)


# ── from here on: proof, run, kit ────────────────────────────────────────────────────────────


draws = lambda device: torch.Generator(device).manual_seed(7)  # of the masks, as they begin


def random(seed, device, *shape):  # normal float64 numbers, the same on all ranks
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double().to(device)


def weights(widths, device, D=16):
    """[(up (F, D), down (D, F))] of whole blocks with F hidden units each."""
    wide = lambda F, *shape: random(F, device, *shape) / shape[1] ** 0.5
    return [(wide(F, F, D), wide(F + 1, D, F)) for F in widths]


def twin(whole, x_BSD, goal_BSD, apply=lambda block, *args: block(*args)):
    """Gradients of x and of whole blocks, on one process, with every graph kept by torch; or, with
    torch's checkpoint as `apply`, with graphs that are made again, and draw again."""
    draw, out = draws(x_BSD.device), (leaf := x_BSD.clone().requires_grad_())
    blocks = [Block(*pair) for pair in whole]
    for block in blocks:
        out = out + apply(block, out, draw)
    params = [param for block in blocks for param in block.params]
    return torch.autograd.grad(out, [leaf, *params], out.detach() * goal_BSD)


def part(gradients, n, r):
    """This rank's part of whole gradients: those of x, then of up and down of each block."""
    cut = lambda i, x: x.chunk(n, (i + 1) % 2)[r] if i else x
    return [cut(i, x) for i, x in enumerate(gradients)]


def measured(plan, whole, x_BSD, goal_BSD, group, again=True):
    """(gradients, most bytes held, bytes sent, events) of a plan on this rank."""
    n, r = dist.get_world_size(group), group.rank()
    with dp.Ledger() as ledger:
        blocks = [Block(*pair, n, r) for pair in whole]
        chain = Chain(blocks, group, draws(x_BSD.device), ledger, again)
        found, most = chain.run(plan, x_BSD, lambda out: out * goal_BSD)
    return found, most, ledger.sent["all_reduce"], [event[0] for event in ledger.events]


def recompute_rows(group, device, layers=6, D=16, F=32):
    """Rows of plans on a chain of equal blocks: gradients, bytes sent, bytes held."""
    n, r = dist.get_world_size(group), group.rank()
    whole, (x, goal) = weights([F] * layers, device, D), random(1, device, 2, 2, 8, D)
    right, c = part(twin(whole, x, goal), n, r), x.nbytes
    a = 3 * c * F // D // n  # tanh, the mask, their product
    formula = {k: c * (layers / k + k) + a * k for k in (1, 2, 3)}
    plans = {"keep all": (keep_all(layers), 2 * layers, c * (layers + 1) + a * layers)}
    for k in formula:
        plans[f"every {k}"] = every(layers, k), 3 * layers - layers / k, formula[k]
    plans["every 2, ahead"] = ahead(every(layers, 2)), 2.5 * layers, formula[2] + c + a
    for name, (plan, messages, held) in plans.items():
        found, most, sent, events = measured(plan, whole, x, goal, group)
        sent = sent, messages * 2 * (n - 1) / n * c
        yield dp.Row(name, worst(found, right), sent, (most, held))
    late = lambda events: float(events.index("send 2") > events.index("backward 5"))
    plain = measured(every(layers, 2), whole, x, goal, group)[-1]
    yield dp.Row("  its sum is sent before a backward", late(events))
    yield dp.Row("  not ahead", late(plain), wrong=1.0)
    found = measured(every(layers, 1), whole, x, goal, group, again=False)[0]
    second = part(twin(whole, x, goal, partial(checkpoint, use_reentrant=False)), n, r)
    yield dp.Row("a second mask", worst(found, right), wrong=worst(second, right))


def plan_rows(group, device, D=16, widths=(32, 8, 64, 16, 48)):
    """Rows of the cheapest plan for blocks of five widths, by budget."""
    n, r = dist.get_world_size(group), group.rank()
    whole, (x, goal) = weights(widths, device, D), random(1, device, 2, 2, 8, D)
    right, c = part(twin(whole, x, goal), n, r), x.nbytes
    inside = [3 * c * F // D // n for F in widths]
    all_kept, least = 6 * c + sum(inside), 3 * c + max(inside[1:])
    for share in (1, 0.5, 0):
        budget = least + int(share * (all_kept - least))
        _, plan = cheapest(widths, c, inside, budget)
        found, most, *_ = measured(plan, whole, x, goal, group)
        yield dp.Row(f"cheapest, {share:.0%} of the range", worst(found, right))
        yield dp.Row("  share of its bytes that it holds", most / budget, bound=(0.5, 1.0))


def fused_rows(device, S=32, d=8, size=8, V=256):
    """Rows of attention and cross-entropy beside torch's plain operations."""
    q, k, v, goal = random(2, device, 4, 2, 2, S, d)  # (B, H, S, d) each
    plain = lambda q, k, v: scores(q, k, slice(0, S), slice(0, S)).softmax(-1) @ v
    leaves = [x.requires_grad_() for x in (q.clone(), k.clone(), v.clone())]
    out = plain(*leaves)
    wanted = [out, *torch.autograd.grad(out, leaves, goal)]
    hbm, (forward, backward) = Tiles(), (4 * x for x in flash_bytes(S, d, size))
    with Meter() as meter:
        out = FlashAttention.apply(*leaves, size, hbm)
        held, moved = (meter.alive(), 4 * S * (d + 1) * 8), (hbm.moved, forward)
        found = [out, *torch.autograd.grad(out, leaves, goal)]
    yield dp.Row("FlashAttention, forward", worst(found, wanted), moved, held)
    yield dp.Row("  backward", 0.0, (hbm.moved - forward, backward))
    T, D, chunk = 24, 16, 8
    x, w, y = random(3, device, T, D), random(4, device, V, D), torch.arange(T, device=device) * 7
    x, w = x.requires_grad_(), w.requires_grad_()
    loss = F.cross_entropy(x @ w.T, y, reduction="sum") / 30
    wanted = [loss, *torch.autograd.grad(loss, [x, w])]
    with Meter() as meter:
        loss = ChunkedCrossEntropy.apply(x, w, y, 30, chunk)
        held = meter.peak, 8 * (T * D + V * D + chunk * V + chunk * D + 1)
        found = [loss, *torch.autograd.grad(loss, [x, w])]
    yield dp.Row("cross-entropy by chunks", worst(found, wanted), held=held)


def compile_rows(group, device):
    """Rows of torch.compile: graphs and breaks counted, results beside those without it."""
    x, w = random(8, device, 2, 8, 8)

    def decides(x, w):  # Python has to know a number
        y = x @ w
        return torch.tanh(-y if y.sum() < 0 else y) @ w

    def selects(x, w):  # the same, without a decision of Python's
        y = x @ w
        return torch.tanh(torch.where(y.sum() < 0, -y, y)) @ w

    def reduces(x, w):
        y = x @ w
        # all_reduce(SUM) over tp, B·D: traced into the graph, with its wait
        dist.all_reduce(y, group=group)
        return torch.tanh(y)

    for function, expected in (decides, 2), (selects, 1), (reduces, 1):
        (found,), graphs = graphs_of(function, (x, w))
        error = dp.relative_error(found, function(x, w)) + abs(len(graphs) - expected)
        yield dp.Row(f"compiled: {function.__name__}, {expected} graph(s)", error)
    inside = sum("all_reduce" in str(node.target) for node in graphs[0].nodes)
    yield dp.Row("  all-reduces inside it", abs(inside - 1.0))
    for dynamic, expected in (None, 2), (False, 4):
        _, graphs = graphs_of(selects, *((x[:k], w) for k in (3, 4, 5, 6)), dynamic=dynamic)
        yield dp.Row(f"  four sizes, dynamic={dynamic}", abs(len(graphs) - float(expected)))


def sgd(w, x, y):
    """Step w (D, D) in place on a batch; returns the loss."""
    loss = F.mse_loss(torch.tanh(x @ w), y)
    (gradient,) = torch.autograd.grad(loss, [w])
    with torch.no_grad():
        w.sub_(RATE * gradient)
    return loss.detach()


def replay_rows(device):
    """Rows of a captured training step: it is the step, and what breaks it is refused."""
    xs, ys = random(9, device, 2, 4, 8, 8)
    w, captured = (random(10, device, 8, 8).requires_grad_() for _ in range(2))
    wanted = [sgd(w, x, y) for x, y in zip(xs, ys)]
    replay = Replay(partial(sgd, captured), xs[0], ys[0])  # capturing takes the first step
    found = [replay(x, y).clone() for x, y in zip(xs[1:], ys[1:])]
    yield dp.Row("replayed training steps", worst([captured.data, *found], [w.data, *wanted[1:]]))
    replay, elsewhere = Replay(torch.square, xs[0]), xs[1]
    replay.replay()
    found, wrong = (dp.relative_error(x, elsewhere**2) for x in (replay.outputs, xs[0] ** 2))
    yield dp.Row("  new values at a new address", found, wrong=wrong)
    yield dp.Row("  copied to the old one", dp.relative_error(replay(elsewhere), elsewhere**2))


def train(args, group, device, layers=4, D=32, V=256):
    """Train on text, a plan after the other; print the loss and what each plan held and sent."""
    n, r, text = dist.get_world_size(group), group.rank(), dp.read_text(args.text, at_least=33)
    dp.say(f"\nunigram entropy {dp.unigram_entropy(text):.3f}\n"
           f"{'plan':18}{'loss':>8}{'blocks run':>12}{'bytes held':>12}{'sent in a step':>16}")
    plans = {"keep all": keep_all(layers), "every 1": every(layers, 1), "every 2": every(layers, 2)}
    for name, plan in {**plans, "every 2, ahead": ahead(plans["every 2"])}.items():
        whole = weights([2 * D] * layers, device, D)
        blocks = [Block(*(x.float() for x in pair), n, r) for pair in whole]
        token, head = (x.float().requires_grad_() for x in random(3, device, 2, V, D) / D**0.5)
        optimizer = torch.optim.AdamW([token, head, *sum((b.params for b in blocks), [])], 1e-2)
        with dp.Ledger() as ledger:
            chain = Chain(blocks, group, draws(device), ledger)
            for t in range(args.steps):
                batch = (whole.to(device) for whole in dp.sample(text, t, 16, 32))
                loss, held = train_step(chain, plan, token, head, *batch)
                optimizer.step()
        runs = sum(kind in ("forward", "move", "send", "graph") for kind, _ in plan)
        sent = ledger.sent["all_reduce"] / args.steps
        dp.say(f"{name:18}{loss:8.3f}{runs:12}{held:12,}{sent:16,.0f}")


def train_step(chain, plan, token, head, x_BS, y_BS):
    """Set the gradients of a language model, whose token embeddings and head are (V, D) and whose
    blocks are a chain's. Returns (loss, most bytes that the chain held)."""
    y, x_BSD = y_BS.flatten(), F.embedding(x_BS, token)

    def loss_gradient(x_BSD):
        leaf = x_BSD.flatten(0, 1).requires_grad_()
        loss = ChunkedCrossEntropy.apply(leaf, head, y, len(y), 64)
        d_leaf, head.grad = torch.autograd.grad(loss, [leaf, head])
        losses.append(loss.item())
        return d_leaf.view_as(x_BSD)

    losses = []
    (d_BSD, *gradients), held = chain.run(plan, x_BSD.detach(), loss_gradient)
    (token.grad,) = torch.autograd.grad(x_BSD, token, d_BSD)
    for param, gradient in zip(sum((block.params for block in chain.blocks), []), gradients):
        param.grad = gradient
    return *losses, held


def time_on(device):
    """Print milliseconds of a training step, where there is a GPU."""
    if device.type != "cuda":
        return dp.say("\nno GPU: nothing is timed")
    w, x, y = random(2, device, 3, 64, 64)
    step = partial(sgd, w.requires_grad_())
    for name, call in ("launched one by one", step), ("replayed", Replay(step, x, y)):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(100):
            call(x, y)
        torch.cuda.synchronize()
        dp.say(f"a step, {name:22}{10 * (time.perf_counter() - started):9.3f} ms")


def main(args, device):
    """Prove, then train with four plans; 0 if everything is as claimed."""
    group = dist.group.WORLD
    dp.say(f"speed · {dist.get_world_size()} ranks · {device}")
    parts = [f(group, device) for f in (recompute_rows, plan_rows, compile_rows)]
    parts += fused_rows(device), replay_rows(device)
    broken = dp.prove(sum(map(list, parts), []), device)
    if args.steps:
        train(args, group, device)
        time_on(device)
    return broken


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    if 8 % ranks:
        raise ValueError(f"{ranks} ranks do not divide 8 hidden units of a block: use 1, 2, 4 or 8")
    dp.read_text(args.text, at_least=33)


if __name__ == "__main__":
    dp.launch(main, dp.arguments(__doc__, ranks=2, steps=40).parse_args(), validate)
