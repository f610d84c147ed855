"""04 · Pipeline schedules: a schedule is a list

The layers are cut into stages, and the batch into micro-batches. Each rank holds a stage and works
on one micro-batch after another, in an order that is written down as a list. A list for each rank
is a schedule. The same lists are simulated, drawn and run here.

    rank 0  F0 F1 F2 F3 .. .. .. B0 F4 B1     F  forward
    rank 1     F0 F1 F2 .. .. B0 F3 B1 F4     B  backward, which is I and W together
    rank 2        F0 F1 .. B0 F2 B1 F3 B2     I  gradient of the stage's input
    rank 3           F0 B0 F1 B1 F2 B2 F3     W  gradients of the stage's weights

This picture draws B as long as F; in truth it takes about twice as long. A rank sends the output of
F to the rank of the next stage. It sends the gradient of its input to the rank of the stage before.
It sends nothing after a W, so W may be put off. A rank may hold several stages: its c chunks.

    bubble   idle time of a rank: (n-1)(F+B) with GPipe and with 1F1B, which is (n-1)/(m+n-1) of the
             step; c chunks divide the bubble by c, and schedules that put off W leave less
    held     activations of m micro-batches with GPipe, of min(m, n-r) on rank r with 1F1B
    sent     B·S·D elements for each micro-batch (of B sequences), direction, and boundary between
             ranks: n-1 boundaries, or cn-1 with chunks

    python 04_pp_schedules.py                                    prove all, train with 1f1b
    python 04_pp_schedules.py --schedule zb-h1 --plot zb-h1.png  draw one
    python 04_pp_schedules.py --simulate --ranks 64 --micro-batches 512 --schedule zb-v
    torchrun --nproc-per-node 4 04_pp_schedules.py

Guide: Pipeline Parallelism · Pipeline schedules · PP's activation surcharge · pipeline overlap. The
guide is wrong in four places: (P-1)/(P+M) is no share of the step; 1F1B has the same bubble as
GPipe; GPipe needs the most memory; c chunks multiply the messages by (cn-1)/(n-1), not by 1.2.

Questions  Q4.1 * what is GPipe's list?   Q4.2 * how many forwards come first in 1F1B?
           Q4.3 * what does an operation wait for?   Q4.4 ** which gradients can wait?
           Q4.5 ** what is the loss of a micro-batch?   Q4.6 *** who posts which message, and when?
"""
# n ranks · r this rank · m micro-batches · c chunks of a rank
# B sequences · S tokens of a sequence · D width · V vocabulary

import math
import signal
import time
from collections import defaultdict, deque, namedtuple
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from unittest.mock import patch

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads ends it without a trace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils.checkpoint import GraphExecGroup

# ── two schedules by hand ────────────────────────────────────────────────────────────────────

# An operation of a list. A list consists of cells. A cell is a tuple of operations that a rank runs
# without a pause: one operation, or two that are fused (only DualPipe fuses).
Op = namedtuple("Op", "kind stage microbatch direction", defaults=(0,))


def gpipe(n, m):
    """Return GPipe's lists: all forwards, then all backwards (Huang et al., arXiv:1811.06965)."""
    lists = []
    for r in range(n):
        # Q4.1 * Rank r holds stage r. In which order does it run m forwards and m backwards?
        #        hint: an operation is a cell of its own, a tuple of one
        forwards = [(Op("F", r, i),) for i in range(m)]
        backwards = [(Op("B", r, i),) for i in range(m)]
        lists.append(forwards + backwards)
        # /Q4.1
    return lists


def one_f_one_b(n, m):
    """Return the lists of 1F1B (PipeDream-Flush, Narayanan et al., arXiv:2006.09503).

    Each backward runs as soon as it can. A rank then holds fewer micro-batches than with GPipe, at
    most n - r on rank r. Its bubble is no smaller. With n = 4, m = 6 and F as long as B:

                warm-up    steady                cool-down
        rank 0  F0 F1 F2   F3 B0 F4 B1 F5 B2     B3 B4 B5
        rank 1  F0 F1      F2 B0 F3 B1 .. B3     B4 B5
        rank 2  F0         F1 B0 F2 B1 .. B4     B5
        rank 3             F0 B0 F1 B1 .. B5
    """
    # Q4.2 * How many forwards does rank r run before its first pair of F and B? With one too few,
    #        33 units of time become 54 at n = 4 and m = 8. With one too many, a rank holds more.
    #        hint: how many stages lie between rank r and the loss?
    warm_up = [min(m, n - 1 - r) for r in range(n)]
    # /Q4.2
    lists = []
    for r, w in enumerate(warm_up):
        cells = [(Op("F", r, i),) for i in range(w)]
        for i in range(w, m):  # steady: one forward, one backward
            cells += [(Op("F", r, i),), (Op("B", r, i - w),)]
        cells += [(Op("B", r, i),) for i in range(m - w, m)]  # cool-down: what is left
        lists.append(cells)
    return lists


# ── what an operation needs, and who gets its result ─────────────────────────────────────────

# Each result has a name: ("out", stage, i) is the output of a stage's F on micro-batch i, and
# ("grad", stage, i) the gradient of its input. ("dW", stage, i) is the gradients of its weights.


def result(op):
    """Return the name of what an operation leaves."""
    return {"F": "out", "I": "grad", "B": "grad", "W": "dW"}[op.kind], op.stage, op.microbatch


def needs(op, last):
    """Return the names of the results that an operation waits for; `last` is the last stage."""
    # Q4.3 * What must be there before F, before I or B, and before W can run?
    #        hint: what a neighbouring stage computes, and what this stage has computed itself
    if op.kind == "F":
        return [("out", op.stage - 1, op.microbatch)] if op.stage else []
    if op.kind == "W":
        return [("grad", op.stage, op.microbatch)]
    later = [("grad", op.stage + 1, op.microbatch)] if op.stage < last else []
    return [("out", op.stage, op.microbatch), *later]
    # /Q4.3


def placement(schedule):
    """Return {(direction, stage): rank}, read off the lists."""
    ops = [(r, op) for r, cells in enumerate(schedule) for cell in cells for op in cell]
    return {(op.direction, op.stage): r for r, op in ops}


def receiver(op, place, last):
    """Return the (rank, stage) that gets an operation's result: the next stage after F, the stage
    before after I or B; (None, None) if no stage needs it."""
    if op.kind == "W":
        return None, None
    stage = op.stage + (1 if op.kind == "F" else -1)
    return (place[op.direction, stage], stage) if 0 <= stage <= last else (None, None)


def show(*keys):
    """Return texts such as F3.7: the forward of stage 3 on micro-batch 7."""
    return [f"{kind}{stage}.{i}" for kind, stage, i, *_ in keys]


def messages(schedule, rank):
    """Return a rank's list as text, with its messages: "<1" after an operation that waits for a
    message from rank 1, ">1" after one whose result goes to rank 1.

    1F1B with n = 2 and m = 2 is "F0 >1  F1 >1  B0 <1  B1 <1" on rank 0 and "F0 <0  B0 >0  F1 <0
    B1 >0" on rank 1. Of several stages on a rank, an operation names its own: F4.0.
    """
    place, words = placement(schedule), []
    last, several = max(place)[1], len(place) > len(schedule)
    for op in (op for cell in schedule[rank] for op in cell):
        sources = [place[op.direction, key[1]] for key in needs(op, last)]
        to, _ = receiver(op, place, last)
        word = show(op)[0] if several else f"{op.kind}{op.microbatch}"
        word += "".join(f" <{source}" for source in sources if source != rank)
        words.append(word + f" >{to}" * (to not in (None, rank)))
    return "  ".join(words)


# ── the simulator ────────────────────────────────────────────────────────────────────────────

Timed = namedtuple("Timed", "rank ops start end")  # a cell, and when its rank ran it


def simulate(schedule, costs=(1, 1, 1, 0), kept=1.0):
    """Return the Timeline of a schedule. A cell starts when its rank is free and all that its
    operations need is there. It takes the sum of their times; then its results are there.

    Args:
        schedule: per rank a list of cells, a cell being a tuple of Ops.
        costs: (F, I, W, comm) in any unit; B takes I + W. F, I and W are for all layers of a rank
            (a chunk takes its share), or functions (stage, micro-batch) -> time. comm is the
            latency of a message.
        kept: the part of a micro-batch's activations that lives on from I to W.
    Raises ValueError for a schedule that cannot complete (with the operation that blocks each
    rank), or that has an operation too many or too few.
    """
    if not all(callable(cost) or 0 <= cost < math.inf for cost in costs):
        raise ValueError(f"--costs {costs}: each must be 0 or more, and finite; B is I + W")
    last = check_whole(schedule)
    share, prices = len(schedule) / (last + 1), dict(zip("FIW", costs))

    def duration(op):
        terms = [prices[kind] for kind in ("IW" if op.kind == "B" else op.kind)]
        return sum(t(op.stage, op.microbatch) if callable(t) else t * share for t in terms)

    todo, clock = [deque(cells) for cells in schedule], [0.0] * len(schedule)
    done, cells, going, crossings = {}, [], True, 0
    missing = lambda ops: [need for op in ops for need in needs(op, last) if need not in done]
    while going:
        going = False
        for rank, queue in enumerate(todo):
            while queue and not missing(queue[0]):
                ops, going = queue.popleft(), True
                inputs = [done[need] for op in ops for need in needs(op, last)]
                crossings += sum(source != rank for _, source in inputs)
                arrivals = [end + costs[3] * (source != rank) for end, source in inputs]
                start = max([clock[rank], *arrivals])
                clock[rank] = start + sum(map(duration, ops))
                cells.append(Timed(rank, ops, start, clock[rank]))
                done |= {result(op): (clock[rank], rank) for op in ops}
    heads = [(rank, queue[0]) for rank, queue in enumerate(todo) if queue]
    stuck = [f"rank {r} at {'&'.join(show(*ops))} for {show(*missing(ops))[0]}" for r, ops in heads]
    if stuck:
        raise ValueError(f"no rank can go on: {', '.join(stuck)}")
    return Timeline(sorted(cells, key=lambda cell: (cell.end, cell.start)), kept, crossings)


def check_whole(schedule):
    """Return the last stage of a schedule. Raises ValueError if an operation comes twice or is
    missing: what one stage does with a micro-batch, all stages do, and each I has its W."""
    place, seen, split = placement(schedule), set(), set()
    for rank, op in ((r, op) for r, cells in enumerate(schedule) for cell in cells for op in cell):
        if (home := place[op.direction, op.stage]) != rank:
            raise ValueError(f"rank {rank} has {show(op)[0]}, and rank {home} has its stage")
        if result(op) in seen:
            raise ValueError(f"rank {rank} has {show(op)[0]} a second time")
        seen.add(result(op))
        split |= {("dW", op.stage, op.microbatch)} if op.kind == "I" else set()
    last = max(place)[1]
    passes = {(kind, i) for kind, _, i in seen if kind != "dW"}
    due = split | {(kind, stage, i) for kind, i in passes for stage in range(last + 1)}
    for fault, keys in ("no rank has", due - seen), ("there is no I for", seen - due):
        if keys:
            raise ValueError(f"{fault} {', '.join(show(*sorted(keys)))}")
    return last


@dataclass
class Timeline:
    """When each cell ran, by simulation or by the clock.

    cells: Timed, in an order in which a single worker could run them. makespan: from the first
    start to the last end on any rank. span: the longest time from a rank's own first start to its
    own last end. ideal: the work of the busiest rank. bubble: the share of span beyond ideal.
    """

    cells: list
    kept: float = 1.0
    messages: int = 0  # results that pass from one rank to another, in either direction

    def __post_init__(self):
        ranks = defaultdict(list)
        for cell in self.cells:
            ranks[cell.rank].append(cell)
        self.ranks = [ranks[rank] for rank in sorted(ranks)]  # the cells of each
        self.share = len(self.ranks) / (1 + max(op.stage for c in self.cells for op in c.ops))
        self.makespan = max(c.end for c in self.cells) - min(c.start for c in self.cells)
        self.span = max(own[-1].end - own[0].start for own in self.ranks)
        self.ideal = max(sum(c.end - c.start for c in own) for own in self.ranks)
        self.bubble = 1 - self.ideal / self.span if self.span else 0.0

    def held(self, rank):
        """Return [(time, micro-batches whose activations the rank holds)]. Activations are held
        from F to B; where B is split, `kept` of them to W. All layers of a rank count 1."""
        share, curve, level = self.share, [], 0.0  # a stage's part of the layers of a rank
        freed = {"F": 0, "B": share, "I": share * (1 - self.kept), "W": share * self.kept}
        trained = {op[1:3] for cell in self.ranks[rank] for op in cell.ops if op.kind != "F"}
        for _, ops, start, end in self.ranks[rank]:
            level += share * sum(op.kind == "F" and op[1:3] in trained for op in ops)
            curve.append((start, level))
            level -= sum(freed[op.kind] for op in ops)
            curve.append((end, level))
        return curve

    @cached_property
    def peak(self):
        """The most that each rank ever holds."""
        return [max(level for _, level in self.held(rank)) for rank in range(len(self.ranks))]


# ── backward in two parts, for any module ────────────────────────────────────────────────────

# The rank of the stage before waits for the gradient of this stage's input (I). No rank waits for
# the gradients of the weights (W). autograd computes both in one pass; here it stops halfway.
#
#     y = x Wᵀ      I  d_x = d_y W       needed by the stage before
#                   W  d_W = d_yᵀ x      needed by the optimizer; keeps x and d_y until then
#
# autograd's graph has a node for each operation of forward, with edges to the nodes of its inputs.
# A node with an edge to a weight is a use of this weight. I asks autograd for the gradients of the
# stage's inputs and for the gradients that flow into each use. autograd computes only what somebody
# asks for: no product for a weight. W asks each use for its weight's gradient, and adds all
# results to .grad in one backward, so that hooks of parameters fire.
#
# Some gradients cannot wait, and I computes them whole: those of vectors (they cost no product), of
# a tensor that two uses share, of an autograd.Function that does not look at ctx.needs_input_grad
# (where it is told what is asked for), and of a use whose output has a hook, which must run once.
#
# Memory: each tensor that forward saves is put in a box. While I runs, the box of a use keeps its
# tensor for W, and every other box is emptied once it is read. A tensor that has to be computed
# first (by a checkpoint, or by 03's second all-gather) is computed once, in I.

# Nodes that only look at a weight, or cast it: the use is the node that reads their output.
LOOKS = set(
    "Alias AsStrided Clone Expand Permute ReshapeAlias Select Slice Split SplitWithSizes Squeeze T "
    "ToCopy Transpose Unbind UnsafeView Unsqueeze View".split()
)


def end_of(node):
    """Return the node that adds to a weight's .grad if `node` only looks at the weight, or None."""
    while node and node.name().rstrip("0123456789").removesuffix("Backward") in LOOKS:
        node = node.next_functions[0][0]
    return node if hasattr(node, "variable") else None


def asks(node):
    """Whether a node computes only what is asked for: torch's own do, an autograd.Function may."""
    function = getattr(node, "_forward_cls", None)
    return not function or "needs_input_grad" in function.backward.__code__.co_names


class SplitBackward:
    """The backward of one forward in two parts: input_gradients(), later weight_gradients()."""

    def __init__(self):
        self.uses = {}  # {node: its edges to weights that wait}
        self.arriving, self.added = {}, {}  # {edge: gradient}: into a use; to a weight
        self.hooked, self.needed, self.keeping, self.recomputed = set(), {}, False, GraphExecGroup()

    @contextmanager
    def boxes(self):
        """Run a forward in here: what it saves goes into boxes, by its own hooks if it has some."""
        plain, push = lambda t: t, torch._C._autograd._push_saved_tensors_default_hooks
        enter = lambda of: push(lambda t: [of.pack_hook(t), of.unpack_hook], self._open)
        register = torch.Tensor.register_hook
        hook = lambda t, call: (self.hooked.add(t.grad_fn), register(t, call))[1]
        with patch.object(saved_tensors_hooks, "__enter__", enter):
            with patch.object(torch.Tensor, "register_hook", hook):
                with saved_tensors_hooks(torch.Tensor.detach, plain):
                    yield

    def _open(self, box):
        kept, restore = box
        tensor = restore(kept)
        if self.keeping:
            use = torch._C._current_autograd_node() in self.uses
            box[:] = [tensor, lambda t: t] if use else []
        return tensor

    def _find_uses(self, outputs, inputs):
        """Find the uses of weights, and the edges that lead into the uses. Return the edges to
        those weights whose gradients cannot wait."""
        into, reads, todo, now = defaultdict(set), defaultdict(list), [(None, outputs)], []
        while todo:
            node, edges = todo.pop()
            for child, number in edges:
                end = end_of(child)
                if end is None and child and child not in into:
                    todo.append((child, child.next_functions))
                elif end and all(end.variable is not x for x in inputs):
                    reads[end].append((node, GradientEdge(child, number)))
                into[child].add(number)
        for end, pairs in reads.items():
            if end.variable._backward_hooks:
                raise ValueError("Tensor.register_hook on a weight would run twice where backward "
                                 "is split: use register_post_accumulate_grad_hook")  # fmt: skip
            nodes, edges = zip(*pairs)
            alone = len({*nodes} - {None} - self.hooked) == len({*edges}) == len(pairs)
            # Q4.4 ** A weight's gradient costs a product. When may it wait until W, and when not?
            #         hint: a vector costs none; the comment above names the other cases
            if end.variable.dim() >= 2 and alone and all(map(asks, nodes)):
                for node, edge in pairs:
                    self.uses.setdefault(node, []).append(edge)
            else:
                now.append(GradientEdge(end, 0))
            # /Q4.4
        self.arriving = [GradientEdge(node, k) for node in self.uses for k in into[node]]
        return now

    def _ask(self, node, weights):
        """Tell an autograd.Function whether its weights are asked for, or all else."""
        if hasattr(node, "needs_input_grad"):
            edges = [GradientEdge(*edge) for edge in node.next_functions if edge[0]]
            asked = iter((edge in self.uses[node]) == weights for edge in edges)
            tensors = self.needed.setdefault(node, node.needs_input_grad)
            node.needs_input_grad = tuple(needed and next(asked) for needed in tensors)

    def input_gradients(self, outputs, d_outputs, inputs):
        """I: return the gradients of `inputs`, None for one that was not used. `outputs` are edges
        into the graph."""
        now = self._find_uses([(edge.node, edge.output_nr) for edge in outputs], inputs)
        wanted, gradients = [*inputs, *now, *self.arriving], []
        for node in self.uses:
            self._ask(node, weights=False)
        self.keeping = True
        with self.recomputed:
            if wanted:
                gradients = torch.autograd.grad(
                    outputs, wanted, d_outputs, retain_graph=True, allow_unused=True
                )
        self.keeping, first = False, len(inputs)
        found = dict(zip(wanted[first:], gradients[first:]))
        self.added = {edge: found.pop(edge) for edge in now}
        self.arriving = found
        return gradients[:first]

    def weight_gradients(self):
        """W: compute what was left, and add all gradients of weights to .grad."""
        for node, edges in self.uses.items():
            self._ask(node, weights=True)
            into = {e: d for e, d in self.arriving.items() if e.node is node and d is not None}
            with self.recomputed:
                if into:
                    found = torch.autograd.grad([*into], edges, [*into.values()], allow_unused=True)
                    self.added |= zip(edges, found)
        added = {edge: d for edge, d in self.added.items() if d is not None}
        if added:
            torch.autograd.backward([*added], [*added.values()])
        self.__init__()  # the graph holds the boxes, which hold self: let go of the graph


# ── the serial twin, and the same model cut into stages ──────────────────────────────────────


def twin_loss(weights, x_BS, y_BS):
    """Return the loss of the whole model in plain torch, from {name: weight}. A label of -100 does
    not count. The head is "head.weight" if there is one, else the embedding's weight (tied)."""
    h_BSD = weights["embedding.weight"][x_BS]
    for k in range(sum(".up." in name for name in weights)):
        up, down = (weights[f"blocks.{k}.{name}.weight"] for name in ("up", "down"))
        h_BSD = h_BSD + F.gelu(h_BSD @ up.T) @ down.T
    logits_BSV = h_BSD @ weights.get("head.weight", weights["embedding.weight"]).T
    log_p_BS = logits_BSV.log_softmax(-1).gather(-1, y_BS.clamp(min=0)[..., None])[..., 0]
    return -log_p_BS[y_BS != -100].mean()


class Block(nn.Module):
    """x + down(gelu(up(x))), (B, S, D) to itself. Saves 9·B·S·D elements for backward, of which the
    inputs of the two matrices, 5·B·S·D, until W (and with them the gradients of their outputs)."""

    def __init__(self, D):
        super().__init__()
        self.up, self.down = (nn.Linear(*shape, bias=False) for shape in ((D, 4 * D), (4 * D, D)))
        for layer in (self.up, self.down):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)

    def forward(self, x_BSD):
        return x_BSD + self.down(F.gelu(self.up(x_BSD)))


class Stage(nn.Module):
    """Consecutive blocks {global index: Block}; the first stage embeds, the last returns the loss.

    A micro-batch is (x_BS, y_BS, divisor): bytes, the bytes after them (-100: not counted), and the
    number of counted ones in the whole step. The head is the embedding's own weight (tied).
    """

    def __init__(self, blocks, embedding, first, last):
        super().__init__()
        self.blocks, self.first, self.last = nn.ModuleDict(blocks), first, last
        self.D, self.embedding = embedding.embedding_dim, embedding if first or last else None

    def boundary(self, microbatch):
        """Return an empty tensor like the one that arrives from the stage before: (B, S, D)."""
        return next(self.parameters()).new_empty(*microbatch[0].shape, self.D)

    def forward(self, h_BSD, microbatch):
        x_BS, y_BS, divisor = microbatch
        if self.first:
            h_BSD = self.embedding(x_BS)
        for block in self.blocks.values():
            h_BSD = block(h_BSD)
        if not self.last:
            return h_BSD
        logits_BSV = F.linear(h_BSD, self.embedding.weight)
        # Q4.5 ** Micro-batches differ in how many bytes count; their gradients are summed. What is
        #         the loss of one?
        #         hint: not its mean, which would weigh a short one like a long one
        logits, targets = logits_BSV.flatten(0, 1), y_BS.flatten()
        total = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        return total / max(divisor, 1)  # a step in which no byte counts has loss 0
        # /Q4.5


def build(stages, layers, D=16, V=256):
    """Return the model as a list of stages, from one seed however it is cut. Parameters are named
    by global layer index. Raises ValueError where the layers cannot be cut equally."""
    if layers % stages:
        raise ValueError(f"{layers} layers cannot be cut into {stages} equal stages")
    torch.manual_seed(0)
    embedding, blocks = nn.Embedding(V, D), [(str(k), Block(D)) for k in range(layers)]
    nn.init.normal_(embedding.weight, std=D**-0.5)
    cut = lambda k: dict(blocks[k * layers // stages : (k + 1) * layers // stages])
    return [Stage(cut(k), embedding, k == 0, k == stages - 1) for k in range(stages)]


# ── the executor ─────────────────────────────────────────────────────────────────────────────


def tensors(x):
    """Return a tuple of tensors from None, a tensor or a sequence of tensors."""
    return () if x is None else (x,) if isinstance(x, torch.Tensor) else tuple(x)


class _Worker:
    """A rank at work: its stages, the results that it keeps, and the graphs for its backwards."""

    def __init__(self, schedule, stages, microbatches):
        ops = [op for cells in schedule for cell in cells for op in cell]
        self.stages, self.microbatches, self.last = stages, microbatches, max(o.stage for o in ops)
        self.split = {op[1:3] for op in ops if op.kind == "I"}
        self.trained = {op[1:3] for op in ops if op.kind in "IB"}
        self.results, self.losses, self.graphs, self.shapes = {}, {}, {}, {}
        self.arriving, self.timed = {}, []  # {result: what to wait for}; the cells so far

    def compute(self, cell):
        """Wait for what a cell needs, and run it. Return the output of each operation."""
        for need in [need for op in cell.ops for need in needs(op, self.last)]:
            for work in self.arriving.pop(need, ()):
                work.wait()
        start = time.perf_counter()
        outputs = [self.run(op) for op in cell.ops]
        self.timed.append(Timed(cell.rank, cell.ops, start, time.perf_counter()))
        return outputs

    def run(self, op):
        """Compute one operation. Return the tensors that the neighbouring stage is to get."""
        at = op.stage, op.microbatch
        if op.kind == "F":
            return self._forward(op, at)
        if op.kind == "W":
            self.graphs.pop(at).weight_gradients()
            return ()
        d_outputs = self.results.pop(("grad", op.stage + 1, op.microbatch))
        inputs, edges, split = self.graphs.pop(at)
        pairs = [(edge, d) for edge, d in zip(edges, d_outputs) if edge]
        if split:
            d_inputs = split.input_gradients(*map(list, zip(*pairs)), inputs) if pairs else ()
            self.graphs[at] = split
        else:
            if pairs:  # a frozen first stage has none
                torch.autograd.backward(*zip(*pairs))
            d_inputs = [x.grad for x in inputs]
        d_inputs = d_inputs or [None] * len(inputs)
        return tuple(torch.zeros_like(x) if d is None else d for x, d in zip(inputs, d_inputs))

    def _forward(self, op, at):
        arrived = self.results.pop(("out", op.stage - 1, op.microbatch), None)
        inputs = [x.requires_grad_() for x in arrived or () if x.is_floating_point()]
        x = arrived[0] if arrived and len(arrived) == 1 else arrived
        split = SplitBackward() if at in self.split else None
        with torch.set_grad_enabled(at in self.trained), split.boxes() if split else nullcontext():
            y = self.stages[op.stage](x, self.microbatches[op.microbatch])
        outputs = tensors(y)
        if at in self.trained:  # edges into the graph, not y: an output is freed once it is sent
            floats = [y for y in outputs if y.is_floating_point()]
            edges = [get_gradient_edge(y) if y.requires_grad else None for y in floats]
            self.graphs[at] = inputs, edges, split
            self.shapes["grad", op.stage + 1, op.microbatch] = [
                (y.shape, y.dtype, y.device) for y in floats
            ]
        if op.stage == self.last:
            self.losses[op.microbatch] = y.detach()
            self.results["grad", op.stage + 1, op.microbatch] = [torch.ones_like(y)]
        return tuple(y.detach() for y in outputs)

    def room(self, key, stage):
        """Return empty tensors like those that will arrive under a key, for `stage`."""
        kind, _, i = key
        if kind == "out":
            room = self.stages[stage].boundary(self.microbatches[i])
            return tuple(torch.empty_like(x) for x in tensors(room))
        return tuple(torch.empty(s, dtype=d, device=where) for s, d, where in self.shapes.pop(key))


@contextmanager
def summed_in_32_bits(stages):
    """Let gradients of 16-bit parameters add up in 32 bits inside, and round them at the end."""
    params = {p for stage in stages.values() for p in stage.parameters() if p.requires_grad}
    narrow = [p for p in params if torch.finfo(p.grad_dtype or p.dtype).bits < 32]
    before = [(p, p.grad, p.grad_dtype) for p in narrow]
    for p, grad, _ in before:
        p.grad, p.grad_dtype = None, torch.float32
        p.grad = None if grad is None else grad.float()
    yield
    for p, grad, dtype in before:
        total, p.grad, p.grad_dtype = p.grad, None, dtype
        if total is not None:
            p.grad = total.to(dtype) if grad is None else grad.copy_(total)


# No schedule deadlocks in execute(). Every rank walks the same list of all cells, in which no cell
# needs a later one, and posts a cell's messages when it passes the cell. So the first cell that is
# not done can always be done, even if each send and receive blocked. Two ranks post the messages
# between them in the same order. NCCL goes by this order alone: it ignores tags.


def execute(schedule, stages, microbatches, group):
    """Run a schedule on the ranks of `group`, one list each, and add up gradients in .grad.

    Args:
        schedule: per rank a list of cells, as in SCHEDULES; micro-batches of which it has only F
            run without gradients (validation).
        stages: {stage: module}, this rank's. A module is called module(x, microbatch). x is what
            the stage before returned (a tensor, or a tuple of several), None for the first; the
            last returns its scalar loss. module.boundary(microbatch) returns one or several empty
            tensors of the shape, dtype and device of x.
        microbatches: a sequence; its i-th is what modules get for micro-batch i.
    Returns {micro-batch: loss}, empty where the last stage is not, and this rank's cells as Timed,
    in seconds of this machine's clock (on a GPU, of launching them). Raises ValueError,
    Disagreement.
    """
    me, place = dist.get_rank(group), placement(schedule)
    rooms = meet(schedule, stages, microbatches, group)
    worker, leaving = _Worker(schedule, stages, microbatches), deque()
    with summed_in_32_bits(stages):
        for cell in simulate(schedule).cells:
            outputs = worker.compute(cell) if cell.rank == me else [()] * len(cell.ops)
            for op, output in zip(cell.ops, outputs):
                (to, stage), key = receiver(op, place, worker.last), result(op)
                if cell.rank == me and op.kind == "F" and to is not None:
                    check_fits(op, output, rooms[stage, op.microbatch][to])
                # Q4.6 *** The result of op, computed on cell.rank, is for `stage` on rank `to`, if
                #          for any. What does this rank do?
                #          hint: it may be the one, the other, both or neither
                if cell.rank == me == to:
                    worker.results[key] = output
                elif cell.rank == me and to is not None:
                    # isend to the neighbouring stage, B·S·D: both ends post it at this cell
                    sent = [y.contiguous() for y in output]
                    leaving.extend((dist.isend(y, group=group, group_dst=to), y) for y in sent)
                elif to == me:
                    worker.results[key] = room = worker.room(key, stage)
                    # irecv, B·S·D: posted while the sender computes, awaited where first used
                    works = [dist.irecv(y, group=group, group_src=cell.rank) for y in room]
                    worker.arriving[key] = works
                # /Q4.6
            outputs = output = sent = room = works = None  # a name would keep its tensor
            while len(leaving) > 2:  # what is sent is freed: backward starts from the graph's edge
                leaving.popleft()[0].wait()
        for work, _ in leaving:
            work.wait()
    return worker.losses, worker.timed


# ── ten more schedules, in a shorthand ───────────────────────────────────────────────────────


def spell(words, tracks):
    """Return one rank's list of cells, from words. "F" is the rank's next forward, "I" or "B" its
    next backward, "W" the weight gradients of the oldest I without one. "Fa" and "Fb" name one of
    several tracks; "&" fuses two operations into a cell.

    tracks: {letter: (forwards, backwards)}, each a list of (stage, micro-batch[, direction]) in
    their order. A word that finds nothing left to do is skipped, so that words may ask for too
    much: "F F F " + "F B " * m is 1F1B on rank 0 of 4 ranks, its cool-down included. A list says
    "W", of any track, or "Wa" and "Wb", but not both: each takes from a queue of its own.
    """
    todo, cells = defaultdict(deque), []
    for letter, (forwards, backwards) in tracks.items():
        todo["F" + letter] = deque(forwards)
        todo["B" + letter] = todo["I" + letter] = deque(backwards)
    for word in words.split():
        cell = ()
        for part in word.split("&"):
            if todo[part]:
                at = todo[part].popleft()
                cell += (Op(part[0], *at),)
                if part[0] == "I":
                    todo["W"].append(at)
                if part[0] == "I" and part != "I":
                    todo["W" + part[1:]].append(at)
        cells += [cell] if cell else []
    return cells


def looped(n, m, words, c=1, g=None):
    """Return every rank's list, by words(r) on rank r, whose k-th chunk is stage k·n + r.
    Micro-batches pass through all chunks of a rank in groups of g; backward takes the last chunk
    first."""
    groups = [range(m)[k : k + (g or m)] for k in range(0, m, g or m)]
    order = lambda r, chunks: [(k * n + r, i) for group in groups for k in chunks for i in group]
    track = lambda r: (order(r, range(c)), order(r, range(c)[::-1]))
    return [spell(words(r), {"": track(r)}) for r in range(n)]


def eager_1f1b(n, m):
    """1F1B that starts its backwards one round trip later, so that messages travel while a rank
    computes. Holds up to twice as much. Bubble (n-1)(F+B)."""
    return looped(n, m, lambda r: "F " * 2 * (n - 1 - r) + "F B " * m)


def zb_h1(n, m):
    """1F1B with the W put off, to fill the end of the step (Qi et al., arXiv:2401.10241). Bubble
    (n-1)(F+I-W), memory of 1F1B."""
    return looped(n, m, lambda r: "F " * (n - 1 - r) + "F I " * r + "F I W " * m)


def zb_h2(n, m):
    """Eager 1F1B with the W put off (source: as zb-h1). With F = I = W and 2n - 1 micro-batches, no
    rank idles between its first operation and its last; it holds 2n - 1 micro-batches."""
    return looped(n, m, lambda r: "F " * 2 * (n - 1 - r) + "F I " * 2 * r + "F I W " * m)


def looped_bfs(n, m, c=2):
    """GPipe with c chunks per rank, breadth first (Lamy-Poirier, arXiv:2211.05953). Bubble
    (n-1)(F+B)/c, memory of GPipe."""
    return looped(n, m, lambda r: "F " * m * c + "B " * m * c, c)


def interleaved(n, m, c=2, g=None):
    """1F1B with c chunks per rank (Narayanan et al., arXiv:2104.04473). Bubble (n-1)(F+B)/c; holds
    up to 1 + (n-1)/(cn) times as much as 1F1B."""
    g = group_size(n, m, g)
    ahead = lambda r: 2 * (n - 1 - r) + (c - 1) * g
    return looped(n, m, lambda r: "F " * ahead(r) + "F B " * m * c, c, g)


def interleaved_zb(n, m, c=2, g=None):
    """Interleaved 1F1B with the W put off (torch's InterleavedZeroBubble). Bubble (n-1)(F+I-W)/c,
    memory of 1F1B."""
    g = group_size(n, m, g)
    ahead = lambda r: n - 1 - r + (c - 1) * g
    return looped(n, m, lambda r: "F " * ahead(r) + "F I " * r + "F I W " * m * c, c, g)


def group_size(n, m, g=None):
    """Return g, or the least size of a group that works. In a group of fewer than n micro-batches,
    the first rank waits for the last; n = 8, m = 12 and g = 8 (a last group of 4) never ends.
    Raises ValueError."""
    sizes = [k for k in range(n, m + 1) if m % k == 0 or m % k >= n] or [m]
    if g not in (None, *sizes):
        stalls = f"--group {g} with --micro-batches {m} stalls {n} ranks"
        raise ValueError(f"{stalls}: use one of {sizes}")
    return g or sizes[0]


def folded(n, m, words):
    """Return every rank's list, by words(r). The stages go down the ranks and back up: rank r holds
    stage r, its track a, and stage 2n-1-r, its track b."""
    track = lambda stage: 2 * [[(stage, i) for i in range(m)]]
    return [spell(words(r), dict(a=track(r), b=track(2 * n - 1 - r))) for r in range(n)]


def zb_v(n, m):
    """Zero bubble in a V (Qi et al., arXiv:2405.15362): each rank holds what 1F1B's first does, and
    with F = I = W and 2n micro-batches no rank idles between its first operation and its last."""

    def words(r):
        start = "Fa " * (2 * (n - r) - 1) + "Fb Fa " * r + "Fb Ib Wb " * (n - r)
        steady = "Fa Ia Wa Fb Ib Wb " * (max(m, 2 * n - 1) - n)
        return start + steady + "Ia Ib " * r + "Ia Wa " * (n - r) + "Wb " * r + "Wa " * r

    return folded(n, m, words)


def _dual_words(r, half, m):
    """Return the eight steps of DualPipe at place r of `half`, the ranks from an end to the fold,
    for m micro-batches per chunk, 2·half or more. Names as in github.com/deepseek-ai/DualPipe.

    At the fold the first F and B of step 4 stay two cells. Fused, the forward would wait for the
    gradient, and all ranks for the forward.
    """
    first = "Fa Bb " if r == half - 1 else "Fa&Bb "
    both = [f"{'B' if k <= r else 'I'}{'ba'[k % 2]} " for k in range(2 * r + 2)]
    steps = [
        "Fa " * 2 * (half - 1 - r),                                   # 1  nF0
        "Fa Fb " * (r + 1),                                           # 2  nF0F1
        "Ib W Fb " * (half - 1 - r),                                  # 3  nB1W1F1
        first + "Fb&Ba " + "Fa&Bb Fb&Ba " * (m - 2 * half + r),       # 4  nF0B1F1B0
        "Bb Fb&Ba " * (half - 1 - r),                                 # 5  nB1F1B0
        "".join(both),                                                # 6  nB1B0
        "W Ia " * (half - 1 - r),                                     # 7  nWB0
        "W " * (r + 1),                                               # 8  nW
    ]  # fmt: skip
    return "".join(steps)


def dualpipev(n, m):
    """DualPipe cut in half: ZB-V's placement, and one copy of the weights. Bubble (n-1)(F+2B-3W)/2
    if F = I = W; holds n + 1/2."""
    return folded(n, m, lambda r: _dual_words(r, n, max(m, 2 * n)))


def dualpipe(n, m):
    """Two directions at once (DeepSeek-V3, arXiv:2412.19437). Rank r holds stage r of direction 0
    and stage n-1-r of direction 1, so two ranks hold each weight; m counts both directions. Bubble
    (n/2-1)(F+2B-3W) if F = I = W; holds n + 1."""
    if n % 2:
        raise ValueError(f"dualpipe folds the ranks in two: --ranks {n} is odd")
    lists, half = [], (m + 1) // 2
    track = lambda direction, stage, share: 2 * [[(stage, i, direction) for i in share]]
    for r in range(n):
        tracks = [track(0, r, range(half)), track(1, n - 1 - r, range(half, m))]
        a, b = tracks if r < n // 2 else tracks[::-1]
        words = _dual_words(min(r, n - 1 - r), n // 2, max(half, n))
        lists.append(spell(words, dict(a=a, b=b)))
    return lists


def zb_auto(n, m, limit=None, costs=(1, 1, 1, 0), kept=1.0):
    """Greedy: a rank that is free takes I if it can, else F if memory allows, else W (the heuristic
    of Qi et al., arXiv:2401.10241, section 3.1, without its look-ahead).

    limit: micro-batches whose activations a rank may hold (default 2n - 1, for no bubble within a
    rank's span; n is ZB-H1's memory). kept: the part of them that lives on from I to W.
    """
    limit = 2 * n - 1 if limit is None else limit
    if limit < 1:
        raise ValueError(f"--limit {limit}: a rank must be allowed one micro-batch")
    lists, free, never = [[] for _ in range(n)], [0.0] * n, math.inf
    count = [[0, 0, 0] for _ in range(n)]  # I, F and W that a rank has run
    arrival = {(kind, end, i): 0 for kind, end in (("F", -1), ("I", n)) for i in range(m)}

    def soonest(r):
        """(start, 0 for I 1 for F 2 for W, r, micro-batch) of what rank r would do next: the
        soonest, and of those that could start at once, I before F before W."""
        i, f, w = count[r]
        room = f - (1 - kept) * i - kept * w + 1 <= limit + 1e-9
        at_I = arrival.get(("I", r + 1, i), never) if i < f else never
        at_F = arrival.get(("F", r - 1, f), never) if room else never
        at_W = 0 if w < i else never
        starts = zip((at_I, at_F, at_W), (i, f, w))
        return min((max(free[r], at), k, r, number) for k, (at, number) in enumerate(starts))

    upcoming = [soonest(r) for r in range(n)]
    while (chosen := min(upcoming))[0] < never:
        start, k, r, i = chosen
        lists[r].append((Op("IFW"[k], r, i),))
        count[r][k] += 1
        free[r] = start + (costs[1], costs[0], costs[2])[k]
        arrival["IFW"[k], r, i] = free[r] + costs[3]
        for near in range(max(0, r - 1), min(n, r + 2)):
            upcoming[near] = soonest(near)
    return lists


SCHEDULES = {
    "gpipe": gpipe, "1f1b": one_f_one_b, "eager-1f1b": eager_1f1b, "interleaved": interleaved,
    "looped-bfs": looped_bfs, "zb-h1": zb_h1, "zb-h2": zb_h2, "zb-auto": zb_auto, "zb-v": zb_v,
    "interleaved-zb": interleaved_zb, "dualpipev": dualpipev, "dualpipe": dualpipe,
}  # fmt: skip


# ── what a library adds: agreement, shared weights, pictures ─────────────────────────────────

_all_gather = dist.all_gather  # torch's own: what is agreed upon is no part of a step's ledger


def describe(values):
    """Return the shapes and dtypes of tensors as text."""
    return ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in values)


def meet(schedule, stages, microbatches, group):
    """Compare the lists of all ranks, and return {what: {rank: description}} of what ranks have of
    their own. What arrives at a stage is under (stage, micro-batch), a parameter under its name.
    Ranks meet once for the same things. Raises ValueError, Disagreement."""
    n, me, m = dist.get_world_size(group), dist.get_rank(group), len(microbatches)
    if len(schedule) != n:
        raise ValueError(f"a schedule of {len(schedule)} ranks cannot run on {n}")
    lists = [(r, k, ops) for r, cells in enumerate(schedule) for k, ops in enumerate(cells)]
    ops = [(r, k, op) for r, k, cell in lists for op in cell]
    if (count := 1 + max(op.microbatch for *_, op in ops)) != m:
        raise ValueError(f"the schedule has {count} micro-batches, and {m} are given")
    if missing := {op.stage for r, _, op in ops if r == me} - {*stages}:
        raise ValueError(f"the schedule places stages {missing} on rank {me}, which lacks them")
    lines, own = [f"{show(op)[0]} at place {k} of list {r}" for r, k, op in ops], {}
    for stage, module in sorted(stages.items()):
        named = module.named_parameters()
        own |= {name: describe([param]) for name, param in named if param.requires_grad}
        for i, microbatch in enumerate(microbatches):
            own[stage, i] = describe(tensors(module.boundary(microbatch)))
    holder, key = stages[min(stages)], (group.group_name, lines, own)
    if getattr(holder, "_met", [None])[0] != key:
        with patch.object(dist.distributed_c10d, "all_gather", _all_gather):
            agree(lines, group)
            everybody = [None] * n
            # all_gather_object over the group: what each rank has
            dist.all_gather_object(everybody, own, group=group)
        table = defaultdict(dict)
        for rank, things in enumerate(everybody):
            for what, text in things.items():
                table[what][rank] = text
        holder._met = key, table
    return holder._met[1]


def check_fits(op, output, room):
    """Raise ValueError unless a stage's output is what the next one has room for."""
    if (found := describe(output)) != room:
        raise ValueError(f"{show(op)[0]} returns {found}, and boundary() of stage {op.stage + 1} "
                         f"makes room for {room}")  # fmt: skip


def share_gradients(schedule, stages, group):
    """Add up the gradients of weights that several ranks hold: a name on several ranks is one
    parameter (both ends of a tied embedding, or DualPipe's two copies of everything).

    Call it once a step, after the last execute(), in which ranks have met. A second call for the
    same gradients changes nothing. Raises ValueError where gradients have been added to since, or
    copies differ in shape.
    """
    me, params, parts, calls = dist.get_rank(group), {}, {}, []
    for _, module in sorted(stages.items()):
        params |= {name: p for name, p in module.named_parameters() if p.requires_grad}
    table = stages[min(stages)]._met[1]
    for name in sorted(name for name in params if len(table[name]) > 1):
        if len({*table[name].values()}) > 1:
            raise ValueError(f"{name} stands on several ranks and differs: {table[name]}")
        grad = params[name].grad
        if (seen := getattr(grad, "shared_at", None)) == grad._version:
            return
        if seen is not None:
            raise ValueError(f"the gradient of {name} was added up already, and changed since: "
                             "call share_gradients once, after a step's last execute")  # fmt: skip
        parts[name] = {r: grad if r == me else torch.empty_like(grad) for r in table[name]}
        for r in {*parts[name]} - {me}:
            calls += [(dist.isend, grad, r), (dist.irecv, parts[name][r], r)]
    calls = [dist.P2POp(call, part, group=group, group_peer=r) for call, part, r in calls]
    # batch_isend_irecv with the ranks that hold the same weights: one batch, so none goes first
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()
    for name, part in parts.items():  # in the order of ranks, so that copies stay equal to the bit
        grad = params[name].grad.copy_(sum(part[r] for r in sorted(part)))
        grad.shared_at = grad._version


def bars(timeline):
    """Yield (rank, op, start, length) of each operation. In a fused cell each operation gets its
    usual part: a B twice that of an F."""
    for rank, ops, start, end in timeline.cells:
        parts = [1 + (op.kind == "B") for op in ops]
        for k, op in enumerate(ops):
            unit = (end - start) / sum(parts)
            yield rank, op, start + unit * sum(parts[:k]), unit * parts[k]


def sketch(timeline, width=160):
    """Return a Gantt in characters: kind and micro-batch, lower case for a rank's second chunk and
    those after it, dots where it idles; "" where that takes more than `width` columns."""
    lines, drawn = [""] * len(timeline.ranks), [bar for bar in bars(timeline) if bar[-1]]
    if not drawn:
        return ""
    digits = 1 + len(str(max(op.microbatch for _, op, *_ in drawn)))
    unit = min(length for *_, length in drawn)
    column = lambda t: round(t / unit) * digits
    for rank, op, start, length in drawn:
        word = f"{op.kind}{op.microbatch}".ljust(digits, "_")
        word = word.lower() if op.stage >= len(lines) else word
        lines[rank] = lines[rank].ljust(column(start), ".") + word
        lines[rank] = lines[rank].ljust(column(start + length), "_")
    lines = [line.ljust(column(timeline.makespan), ".") for line in lines]
    return "\n".join(lines) if len(lines[0]) <= width else ""


# ── from here on: proof, run, kit ────────────────────────────────────────────────────────────

import weakref

FOLDED = "zb-v", "dualpipev"  # their boundary in the middle lies within a rank
KEPT = 5 / 9  # of what a Block saves, the part that lives on from I to W


class Scale:
    """Weighs the activations that autograd saves in some blocks: `peak` is the most bytes alive at
    once. It follows the tensors' storages: whatever keeps one, a graph or a box, is noticed."""

    def __init__(self, blocks):
        self.now = self.peak = 0
        weights = [param for block in blocks for param in block.parameters()]
        self.weights = {param.untyped_storage().data_ptr() for param in weights}
        saving = saved_tensors_hooks(self._save, lambda t: t)
        for block in blocks:
            block.register_forward_pre_hook(lambda *_: saving.__enter__())
            block.register_forward_hook(lambda *_: saving.__exit__())

    def _save(self, t):
        if t.untyped_storage().data_ptr() in self.weights:
            return t
        self._add(t.nbytes)
        weakref.finalize(t.untyped_storage(), self._add, -t.nbytes)
        return t

    def _add(self, nbytes):
        self.now += nbytes
        self.peak = max(self.peak, self.now)


def proof_batch(m, device, B=2, S=8):
    """Return m micro-batches of random bytes, some with fewer bytes that count than others."""
    generator = torch.Generator().manual_seed(1)
    x_mBS, y_mBS = torch.randint(256, (2, m, B, S), generator=generator).to(device)
    for i in range(m):
        y_mBS[i, :, : i % S] = -100
    assert len(x_mBS.unique()) > 8 and len(y_mBS.unique()) > 8, "a trivial batch proves nothing"
    return [(x_BS, y_BS, (y_mBS != -100).sum()) for x_BS, y_BS in zip(x_mBS, y_mBS)]


def twin_gradients(layers, batch, tied=True):
    """Return {name: gradient} of the serial twin on the whole batch at once, and its loss. Not
    tied, the head has a weight of its own, with the same values."""
    x, y, _ = (torch.cat(part) if part[0].dim() else part for part in zip(*batch))
    values = build(1, layers)[0].to(x.device, torch.float64).state_dict()
    values |= {} if tied else {"head.weight": values["embedding.weight"].clone()}
    weights = {name: value.requires_grad_() for name, value in values.items()}
    loss = twin_loss(weights, x, y)
    return dict(zip(weights, torch.autograd.grad(loss, [*weights.values()]))), loss.detach()


def mine(schedule, model, group):
    """Return {stage: module}, of a list of all stages those of this rank."""
    me = dist.get_rank(group)
    return {stage: model[stage] for (_, stage), rank in placement(schedule).items() if rank == me}


def check(schedule, layers, batch, group, share=True):
    """Compare a step by `schedule` with the twin. Return the largest relative error of the loss and
    of this rank's gradients; the bytes sent by all ranks; the most bytes saved in this rank's
    blocks. share: add up the gradients of weights that several ranks hold."""
    reference, loss = twin_gradients(layers, batch)
    stages = mine(schedule, build(1 + max(placement(schedule))[1], layers), group)
    model = nn.ModuleList(stages.values()).to(loss.device, torch.float64)
    scale = Scale([block for stage in model for block in stage.blocks.values()])
    with Ledger() as ledger:
        losses, _ = execute(schedule, stages, batch, group)
    if share:
        share_gradients(schedule, stages, group)
    totals = torch.stack([sum(losses.values(), 0 * loss), loss.new_tensor(ledger.sent.total())])
    # all_reduce(SUM) over pp, 2: the loss, which the last stage knows; the bytes of all ranks
    dist.all_reduce(totals, group=group)
    named = [pair for stage in model for pair in stage.named_parameters()]
    errors = [relative_error(param.grad, reference[name]) for name, param in named]
    return max(relative_error(totals[0], loss), *errors), totals[1].item(), scale.peak


def proof(args, group, device):
    """Yield a row for every schedule, and two that are wrong on purpose."""
    n, m, c = dist.get_world_size(group), args.micro_batches, args.chunks or 2
    batch, layers = proof_batch(m, device), n * math.lcm(2, c)
    B_S_D = batch[0][0].numel() * 16 * 8
    for name, schedule in schedules(args, n).items():
        error, sent, held = check(schedule, layers, batch, group)
        boundaries = 2 * (n - 1) if name in FOLDED else max(placement(schedule))[1]
        peak = simulate(schedule, kept=KEPT).peak[dist.get_rank(group)]
        formula = 2 * m * boundaries * B_S_D if n > 1 else 0
        yield Row(name, error, (sent, formula), (held, peak * layers / n * 9 * B_S_D))
    if n == 1 or m == 1:
        return
    whole, apart = (twin_gradients(layers, batch, tied)[0] for tied in (True, False))
    ends = {0: "embedding.weight", n - 1: "head.weight"}  # what each end has; others have neither
    end = ends.get(dist.get_rank(group))
    lacks = relative_error(apart[end], whole["embedding.weight"]) if end else 0.0
    undivided = [(x, y, labels / m) for x, y, labels in batch]
    error, *_ = check(one_f_one_b(n, m), layers, undivided, group)
    yield Row("losses not divided by m", error, wrong=m - 1)
    error, *_ = check(one_f_one_b(n, m), layers, batch, group, share=False)
    yield Row("tied ends not added up", error, wrong=lacks)


# ── run ──────────────────────────────────────────────────────────────────────────────────────


def runnable(n):
    """Return the names of the schedules that n ranks can run."""
    return [name for name in SCHEDULES if name != "dualpipe" or n % 2 == 0]


def schedules(args, n):
    """Return {name: schedule} on n ranks, each with the options that it takes: that of --schedule,
    or all. Raises ValueError."""
    made = {}
    for name in [args.schedule] if args.schedule else runnable(n):
        takes, options = inspect.signature(SCHEDULES[name]).parameters, {}
        for flag, key in {"chunks": "c", "group": "g", "limit": "limit"}.items():
            value = getattr(args, flag)
            if value is not None and key in takes:
                options[key] = value
            elif value is not None and args.schedule:
                raise ValueError(f"--{flag} {value} means nothing to --schedule {name}")
        if "costs" in takes:  # the greedy one is made for them
            options["costs"] = args.costs
        made[name] = SCHEDULES[name](n, args.micro_batches, **options)
    return made


def predict(args, n, say):
    """Print the chosen schedule, and what is simulated of it, or of all. Return {name: schedule}
    and {name: Timeline}."""
    made, name = schedules(args, n), args.schedule or "1f1b"
    timelines = {key: simulate(made[key], args.costs) for key in made}
    say(f"{name}\n{sketch(timelines[name]) or '(too wide to draw here)'}\n")
    say(f"the list of rank 0, with its messages (<: from, >: to)\n{messages(made[name], 0)}\n")
    say(f"{n} ranks, {args.micro_batches} micro-batches, times (F, I, W, message) {args.costs}.")
    say("idle: a step beyond the work of the busiest rank, and its share of the step; in a rank:")
    say("between its own first and last operation; held: micro-batches; passed: results sent\n")
    say(f"{'schedule':14}{'step':>8}{'idle':>8}{'share':>8}{'in a rank':>11}{'held':>8}  passed")
    for key, t in timelines.items():
        idle, inside = t.makespan - t.ideal, t.span - t.ideal
        say(f"{key:14}{t.makespan:8.5g}{idle:8.4g}{idle / t.makespan:8.1%}{inside:11.4g}"
            f"{max(t.peak):8.4g}{t.messages:8}")  # fmt: skip
    return made, timelines


def train_step(schedule, stages, optimizer, x_BS, y_BS, m, group):
    """Take one step on a batch in m micro-batches. Return the loss, on the rank of the last stage,
    else 0. A step in which no label counts is skipped, on all ranks."""
    optimizer.zero_grad()
    labels = (y_BS != -100).sum().item()
    microbatches = list(zip(x_BS.chunk(m), y_BS.chunk(m), [labels] * m))
    losses, _ = execute(schedule, stages, microbatches, group)
    share_gradients(schedule, stages, group)
    if labels:
        optimizer.step()
    return sum(losses.values(), torch.zeros((), device=x_BS.device))


def train(args, name, schedule, group, device):
    """Train on text by the schedule; print the loss beside the text's unigram entropy."""
    text, m, count = read_text(args.text, 0), args.micro_batches, 1 + max(placement(schedule))[1]
    stages = mine(schedule, build(count, max(count, 4 // count * count), D=64), group)
    params = {param for stage in stages.values() for param in stage.to(device).parameters()}
    optimizer = torch.optim.AdamW(params, lr=3e-3)
    say(f"\n{name} on text; its unigram entropy is {unigram_entropy(text):.3f}")
    for step in range(args.steps):
        x_BS, y_BS = (part.to(device) for part in sample(text, step, 4 * m, 64))
        loss = train_step(schedule, stages, optimizer, x_BS, y_BS, m, group)
        # all_reduce(SUM) over pp, 1: only the last stage knows the loss
        dist.all_reduce(loss, group=group)
        if step % 10 == 0 or step == args.steps - 1:
            say(f"step {step:3}  loss {loss.item():.3f}")


def main(args, device):
    """Predict, prove, then draw or train; 0 if everything is as claimed."""
    group, name = dist.group.WORLD, args.schedule or "1f1b"
    n = dist.get_world_size(group)
    say(f"04 pipeline schedules · {n} ranks · {dist.get_backend()} · {device.type}\n")
    made, timelines = predict(args, n, say)
    say("\nsent: by all ranks; held: the most bytes saved in this rank's blocks, and as simulated")
    broken = prove(list(proof(args, group, device)), device)
    if args.plot and dist.get_rank(group) == 0:
        gantt({name: timelines[name]}, args.plot)
    if not args.plot:
        train(args, name, made[name], group, device)
    return broken


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    counts = {"ranks": ranks, "micro-batches": args.micro_batches, "chunks": args.chunks}
    for flag, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"--{flag} {value}: at least 1 is needed")
    try:
        args.costs = [float(number) for number in str(args.costs).strip("[]").split(",")]
        F, I, W, comm = args.costs
    except ValueError as error:
        raise ValueError(f"--costs {args.costs}: four numbers are needed, F,I,W,comm") from error
    if F == I == W == 0:
        raise ValueError(f"--costs {args.costs}: one of F, I and W must take time")
    if args.plot and args.simulate:
        raise ValueError("leave out --simulate: --plot draws after the proof")
    read_text(args.text, at_least=65)
    for schedule in () if args.simulate else schedules(args, ranks).values():
        simulate(schedule, args.costs)


# ── pictures ─────────────────────────────────────────────────────────────────────────────────

NAMES = {"F": "forward", "I": "input gradient", "B": "both gradients", "W": "weight gradient"}
COLORS = {"F": "#dcebf7", "I": "#f4b678", "B": "#d0693c", "W": "#1f3f5b"}  # light to dark
GREY = "#8a8a8a"


def gantt(timelines, path):
    """Draw a Timeline, or {title: Timeline} as panels on one scale of time, into a picture file.

    A bar is an operation, its number the micro-batch; a rank's second chunk, or direction, has a
    dark foot. Under a rank's bars, in grey: the activations that it holds, on one scale for all.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    timelines = timelines if isinstance(timelines, dict) else {"": timelines}
    most, longest = (max(of(t) for t in timelines.values())
                     or 1.0 for of in (lambda t: max(t.peak), lambda t: t.makespan))  # fmt: skip
    height = 0.8 + sum(0.6 + 0.36 * len(t.ranks) for t in timelines.values())
    figure = Figure(figsize=(13, height), layout="constrained")
    panels = figure.subplots(len(timelines), squeeze=False).flat
    for axes, (title, t) in zip(panels, timelines.items()):
        title += f"   bubble {t.bubble:.1%} of a rank's span, holds {max(t.peak):.3g} micro-batches"
        axes.set_title(title, loc="left", size=10)
        axes.set(xlim=(0, longest), ylim=(len(t.ranks) - 0.4, -0.5))
        axes.set_yticks(range(len(t.ranks)), [f"rank {rank}" for rank in range(len(t.ranks))])
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(labelsize=7, left=False)
        for rank, op, start, length in bars(t):
            axes.barh(rank - 0.13, length, 0.46, start, color=COLORS[op.kind], ec="black", lw=0.3)
            if op.stage >= len(t.ranks) or op.direction:
                axes.barh(rank + 0.06, length, 0.08, start, color="black")
            if length > longest / 100:
                look = dict(color="white" if op.kind == "W" else "black", ha="center", va="center")
                axes.text(start + length / 2, rank - 0.15, op.microbatch, size=6.5, **look)
        for rank in range(len(t.ranks)):
            times, levels = zip(*t.held(rank))
            curve = [rank + 0.48 - 0.36 * level / most for level in levels]
            axes.fill_between(times, curve, rank + 0.48, step="post", fc=GREY)
    axes.set_xlabel("time, in units of F", size=8)
    patches = [Patch(fc=COLORS[kind], ec="black", lw=0.4, label=NAMES[kind]) for kind in NAMES]
    patches.append(Patch(fc="black", label="foot: a later chunk, or direction"))
    patches.append(Patch(fc=GREY, label="activations held"))
    figure.legend(handles=patches, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


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
    parser = arguments(__doc__, ranks=4, steps=60, plot="the schedule's predicted Gantt")
    add = parser.add_argument
    add("--schedule", choices=SCHEDULES, help="default: prove all, train with 1f1b")
    add("--micro-batches", type=int, default=8, help="micro-batches of a step")
    add("--chunks", type=int, help="stages per rank, where interleaved; default 2")
    add("--group", type=int, help="micro-batches per turn, where interleaved")
    add("--limit", type=int, help="micro-batches that a rank may hold, for zb-auto")
    add("--costs", default="1,1,1,0", metavar="F,I,W,COMM", help="times to predict with")
    add("--simulate", action="store_true", help="predict, and start no ranks")
    add("--list", action="store_true", help="the schedules, each with its source")
    args = parser.parse_args()
    if args.list:
        for name, make in SCHEDULES.items():
            print(f"{name}\n    " + inspect.getdoc(make).replace("\n", "\n    "))
    elif args.simulate:
        try:
            validate(args, args.ranks)
            predict(args, args.ranks, print)
        except ValueError as refused:
            sys.exit(print(refused, file=sys.stderr) or 2)
    else:
        launch(main, args, validate)
