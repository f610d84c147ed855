"""offload · What the device cannot hold waits on the host, or in files

A training state of 16 bytes a parameter does not have to live where the matrix products are. This
file moves it away, step by step, and counts every byte that crosses the link.

    where       ZeRO-Offload                      ZeRO-Infinity
    device      weights P, gradients P            a unit's weights and its gradient, at any depth
    host        master, moments: P/n; it steps    the next unit's weights; it steps
    files       -                                 weights, gradients, master, moments: P/n

    a rank moves, in each step, with bf16 weights                      bytes
    device to host     its part of the summed gradient                 2 · P/n
    host to device     its part of the new weights                     2 · P/n
    files to host      weights, once more for backward; gradients;     (2 + 2 + 2 + 12) · P/n
                       master and moments
    host to files      gradients, weights, master and moments          (2 + 2 + 12) · P/n

    Activations can wait on the host too: what autograd saves goes down, and comes up for backward.

    python beyond/offload.py                          two ranks; files in a temporary folder
    torchrun --nproc-per-node 2 beyond/offload.py     the same, started by torchrun

On a machine without a GPU the device is a counted memory: bytes and order are real, and its link
takes no time. Counted are weights, gradients, and the inputs of units.

Guide: DeepSpeed ZeRO stages 1, 2, 3, Infinity · CPU offload and SWAP.
Sources: ZeRO-Offload, arXiv:2101.06840, sections 3, 4; ZeRO-Infinity, arXiv:2104.07857, section 5.
Questions  QO.1 * what crosses the link?   QO.2 ** what is read while a unit computes?
           QO.3 ** whose gradient does a late step use?
"""
# n ranks · r this rank · B sequences · S tokens of a sequence · D width · V vocabulary
# F hidden units · P parameters

import importlib
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads ends it without a trace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector

sys.path.append(str(Path(__file__).resolve().parents[1]))
dp = importlib.import_module("01_dp")
memory_math = importlib.import_module("memory_math")

RATE, BETAS, EPS, DECAY = 3e-3, (0.9, 0.95), 1e-8, 0.1


# ── the serial twin ──────────────────────────────────────────────────────────────────────────


class LanguageModel(nn.Module):
    """Bytes (B, S) to logits (B, S, V): an embedding, blocks of two products, a head."""

    def __init__(self, blocks=4, D=16, V=256):
        super().__init__()
        hidden = lambda: nn.ModuleList([nn.Linear(D, 2 * D, False), nn.Linear(2 * D, D, False)])
        self.token = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(hidden() for _ in range(blocks))
        self.head = nn.Linear(D, V, False)

    def forward(self, x_BS):
        x_BSD = self.token(x_BS)
        for up, down in self.blocks:
            x_BSD = x_BSD + down(torch.tanh(up(x_BSD)))
        return self.head(x_BSD)


# ── by hand: the optimizer on the host ───────────────────────────────────────────────────────

# P = 8 bf16 parameters on n = 2 ranks. What rank 0 holds, and what crosses its link in a step:
#
#     device    weights    w0 w1 w2 w3 w4 w5 w6 w7        gradients    g0 g1 g2 g3 g4 g5 g6 g7
#     sum over ranks, each keeps its part: G0 G1 G2 G3
#     down      G0 G1 G2 G3                               4 · 2 bytes
#     host      master, m, v of 0 1 2 3, in fp32: steps   3 · 4 · 4 bytes that never move
#     up        W0 W1 W2 W3                               4 · 2 bytes
#     gather over ranks: W0 .. W7 on both devices
#
# Rajbhandari's cut is the cheapest one: gradients and weights are 2 bytes each, while the state
# that stays where it is has 12.


class Device:
    """A memory that counts: bytes on it now, the most there were, and what crossed its link."""

    def __init__(self, device):
        self.device, self.held, self.peak, self.moved = device, 0, 0, {"up": 0, "down": 0}

    def keep(self, tensor):
        """Count a tensor that is on the device from now on; returns it."""
        self.held += tensor.nbytes
        self.peak = max(self.peak, self.held)
        return tensor

    def drop(self, tensor):
        """Count no longer a tensor that is not needed any more."""
        self.held -= tensor.nbytes

    def up(self, tensor):
        """A copy on the device."""
        self.moved["up"] += tensor.nbytes
        return self.keep(tensor.to(self.device, copy=True))

    def down(self, tensor):
        """A copy on the host."""
        self.moved["down"] += tensor.nbytes
        return tensor.to("cpu", copy=True)


def adamw(state, gradient, t):
    """Step the (3, P/n) fp32 master and moments in place, the t-th time, on the host."""
    master, first, second = state
    gradient = gradient.to(master.dtype)
    first.lerp_(gradient, 1 - BETAS[0])
    second.lerp_(gradient**2, 1 - BETAS[1])
    scale = (second / (1 - BETAS[1] ** t)).sqrt() + EPS
    master.mul_(1 - RATE * DECAY).sub_(RATE / (1 - BETAS[0] ** t) * first / scale)


def offload_step(device, weights, gradient, state, t, group):
    """Sum on the device, step on the host (ZeRO-Offload). weights and gradient: (P,)."""
    own = device.keep(gradient.new_empty(len(gradient) // dist.get_world_size(group)))
    # reduce_scatter(SUM) over dp, P: this rank has its part of the whole gradient
    dist.reduce_scatter_single(own, gradient, group=group)
    # QO.1 * The master, both moments and the step are on the host. What has to cross the link?
    #      hint: the step needs one thing from the device, and the device one thing from the step
    on_host = device.down(own)
    adamw(state, on_host, t)
    new = device.up(state[0].to(weights.dtype))
    # /QO.1
    # all_gather over dp, P/n from each: every device now has all new weights
    dist.all_gather_single(weights, new, group=group)
    for tensor in (own, new, gradient):
        device.drop(tensor)


# ── in files: two units on the device, whatever the depth ────────────────────────────────────


class Store:
    """Files of a folder, read and written by threads beside the computation.

    A file takes bytes / rate seconds, if a rate in bytes a second is set. `events` has the order in
    which reads and writes were asked for and waited for; `moved` the bytes.
    """

    def __init__(self, folder, rate=None):
        self.folder, self.rate, self.events = Path(folder), rate, []
        self.moved, self.kinds, self.written = {"read": 0, "written": 0}, {}, {}
        self.reader, self.writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def write(self, name, tensor):
        """Start to write a host tensor; the caller may not change it before it is written."""
        self.kinds[name] = tensor.dtype, tensor.shape
        self.moved["written"] += tensor.nbytes
        self.written[name] = self.writer.submit(self._write, name, tensor)

    def read(self, name):
        """Start to read; `result()` of what is returned waits, and has the tensor."""
        self.events.append(f"read {name}")
        return self.reader.submit(self._read, name, self.written[name])

    def wait(self, work, name):
        """The tensor of a read."""
        self.events.append(f"wait {name}")
        return work.result()

    def _write(self, name, tensor):
        started = time.perf_counter()
        tensor.contiguous().view(torch.uint8).numpy().tofile(self.folder / name)
        self._take_its_time(started, tensor.nbytes)

    def _read(self, name, written):
        written.result()  # the file is whole, and a failed write is raised here
        started, (dtype, shape) = time.perf_counter(), self.kinds[name]
        data = torch.from_numpy(np.fromfile(self.folder / name, np.uint8)).view(dtype).view(shape)
        self.moved["read"] += data.nbytes
        self._take_its_time(started, data.nbytes)
        return data

    def _take_its_time(self, started, size):
        if self.rate:
            time.sleep(max(0.0, size / self.rate - (time.perf_counter() - started)))

    def close(self):
        """Wait until everything is written; a write that failed raises."""
        for work in self.written.values():
            work.result()
        for thread in (self.reader, self.writer):
            thread.shutdown()


class Streamed:
    """A model whose units are in files; the device holds the unit that computes, and the next one.

    Each rank's files have its n-th part of a unit: n ranks read at n times the rate. A unit is a
    list of tensors; `apply(unit number, tensors, x)` computes it.
    """

    def __init__(self, units, apply, device, store, group, ahead=True):
        self.apply, self.device, self.store, self.group = apply, device, store, group
        self.n, self.r, self.ahead, self.t = dist.get_world_size(group), group.rank(), ahead, 0
        self.shapes = [[tensor.shape for tensor in unit] for unit in units]
        self.dtype = units[0][0].dtype
        wider = torch.promote_types(self.dtype, torch.float32)
        for u, unit in enumerate(units):
            flat = torch.cat([tensor.flatten() for tensor in unit])
            flat = F.pad(flat, (0, -len(flat) % self.n)).view(self.n, -1)[self.r]
            store.write(f"weights {u}", flat.clone())
            zeros = torch.zeros(2, len(flat), dtype=wider)
            store.write(f"state {u}", torch.cat([flat.to(wider)[None], zeros]))

    def visits(self, order):
        """Yield (unit number, its whole flat weights on the device), the next one read ahead."""
        work = self.store.read(f"weights {order[0]}")
        for u, after in zip(order, [*order[1:], None]):
            own = self.device.up(self.store.wait(work, f"weights {u}"))
            # QO.2 ** A unit's weights have come. What is asked for before the unit computes?
            #      hint: the unit that is visited after this one, if there is one
            if after is not None and self.ahead:
                work = self.store.read(f"weights {after}")
            # /QO.2
            whole = self.device.keep(own.new_empty(self.n * len(own)))
            # all_gather over dp, P_u/n from each: the whole unit, for as long as it is needed
            dist.all_gather_single(whole, own, group=self.group)
            self.device.drop(own)
            self.store.events.append(f"compute {u}")
            yield u, whole
            self.device.drop(whole)
            if after is not None and not self.ahead:
                work = self.store.read(f"weights {after}")

    def tensors(self, u, flat):
        """The unit's tensors as views of its flat weights."""
        sizes = [shape.numel() for shape in self.shapes[u]]
        pieces = flat[: sum(sizes)].split(sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes[u])]

    def step(self, x_BS, loss_of):
        """Forward, backward and AdamW; `loss_of(logits)` is this rank's share. Returns the loss."""
        inputs, x, last, d_out = [], self.device.keep(x_BS), len(self.shapes) - 1, None
        with torch.no_grad():
            for u, whole in self.visits([*range(last)]):
                inputs.append(self.device.down(x))
                self.device.drop(x)
                x = self.device.keep(self.apply(u, self.tensors(u, whole), x))
        for u, whole in self.visits([*reversed(range(last + 1))]):
            x = x if u == last else self.device.up(inputs.pop())
            x.requires_grad_(x.is_floating_point())
            out = self.apply(u, self.tensors(u, whole.requires_grad_()), x)
            if u == last:
                out = loss = loss_of(out)
            torch.autograd.backward(out, d_out)
            d_out = x.grad
            self.device.drop(x)
            self.put_away(u, self.device.keep(whole.grad))
        self.t += 1
        for u in range(last + 1):
            self.step_unit(u)
        return loss.detach()

    def put_away(self, u, gradient):
        """Sum a unit's gradient over the ranks, and write this rank's part of it."""
        own = gradient.new_empty(len(gradient) // self.n)
        # reduce_scatter(SUM) over dp, P_u: this rank's part of the unit's gradient
        dist.reduce_scatter_single(own, gradient, group=self.group)
        self.store.write(f"gradient {u}", self.device.down(own))
        self.device.drop(gradient)

    def step_unit(self, u):
        """Step a unit on the host, from files to files."""
        names = f"state {u}", f"gradient {u}"
        state, gradient = (self.store.wait(self.store.read(name), name) for name in names)
        adamw(state, gradient, self.t)
        self.store.write(f"state {u}", state)
        self.store.write(f"weights {u}", state[0].to(self.dtype))


def seconds(compute, read, ahead=True):
    """Time of visits whose units take `compute` and `read` seconds each: lists of one length.

    One after the other, times add up. Read ahead, a unit's computation and the next unit's read run
    side by side, so that the longer of the two counts.
    """
    if not ahead:
        return sum(compute) + sum(read)
    return read[0] + sum(map(max, zip(compute, [*read[1:], 0.0])))


def offloaded_activations(device, model):
    """A context in which what autograd saves waits on the host, and comes back for backward.

    Parameters, which autograd saves too, stay where they are.
    """
    storage = lambda x: x.untyped_storage().data_ptr()
    stays = {storage(param) for param in model.parameters()}
    down = lambda x: (x, True) if storage(x) in stays else (device.down(x), False)
    up = lambda packed: packed[0] if packed[1] else device.up(packed[0])
    return torch.autograd.graph.saved_tensors_hooks(down, up)


# ── from here on: proof, run, kit ────────────────────────────────────────────────────────────


def compute_unit(u, tensors, x):
    """Compute a unit of LanguageModel: an embedding (ids come in), a block, or the head."""
    if not x.is_floating_point():
        return F.embedding(x, tensors[0])
    if len(tensors) == 2:
        return x + F.linear(torch.tanh(F.linear(x, tensors[0])), tensors[1])
    return F.linear(x, tensors[0])


def fresh(blocks, dtype, D=16):
    """A model, the same from the same seed."""
    torch.manual_seed(0)
    return LanguageModel(blocks, D).to(dtype)


def units_of(model):
    """The model's tensors, unit by unit."""
    parts = [model.token, *model.blocks, model.head]
    return [[param.detach() for param in part.parameters()] for part in parts]


def batch(text, t, B=8, S=16):
    """Sequences (B, S) of step t and their next bytes; never trivial."""
    x_BS, y_BS = dp.sample(text, t, B, S)
    assert len(y_BS.unique()) > 5
    return x_BS, y_BS


def share(logits, y_bS, tokens):
    """This rank's share of the mean loss over all tokens of the step."""
    return F.cross_entropy(logits.flatten(0, 1), y_bS.flatten(), reduction="sum") / tokens


def of_rank(text, t, group, device, B=8):
    """This rank's part of a step: (ids, function of logits)."""
    x_BS, y_BS = batch(text, t, B)
    n, r = dist.get_world_size(group), group.rank()
    x_bS, y_bS = (whole.tensor_split(n)[r].to(device) for whole in (x_BS, y_BS))
    return x_bS, lambda logits: share(logits, y_bS, y_BS.numel())


def twin(text, steps, blocks=4, late=False):
    """Weights of one process after AdamW steps, flat. late: a step has the gradient of the weights
    before the last step."""
    model, waiting = fresh(blocks, torch.float64), []
    optimizer = torch.optim.AdamW(model.parameters(), RATE, BETAS, EPS, DECAY)
    for t in range(steps):
        x_BS, y_BS = batch(text, t)
        loss = share(model(x_BS), y_BS, y_BS.numel())
        waiting.append(torch.autograd.grad(loss, [*model.parameters()]))
        if len(waiting) > late:
            for param, gradient in zip(model.parameters(), waiting.pop(0)):
                param.grad = gradient
            optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


def zero_offload(text, steps, group, device, dtype, late=False):
    """Train with `offload_step`. Returns the flat weights, the Device, and P rounded up to n."""
    n, r = dist.get_world_size(group), group.rank()
    model, memory = fresh(4, dtype).to(device), Device(device)
    params = [*model.parameters()]
    flat = parameters_to_vector(params).detach()
    P = -(-len(flat) // n) * n
    weights = memory.keep(F.pad(flat, (0, P - len(flat))))
    torch.nn.utils.vector_to_parameters(weights[: len(flat)], params)  # views from here on
    state = torch.zeros(3, P // n, dtype=torch.promote_types(dtype, torch.float32))
    state[0] = weights.view(n, -1)[r]
    waiting = []
    for t in range(steps):
        gradient = memory.keep(torch.zeros_like(weights))
        for param, part in zip(params, gradient.split([x.numel() for x in params])):
            param.grad = part.view_as(param)  # backward adds to it in place
        x_bS, loss_of = of_rank(text, t, group, device)
        loss_of(model(x_bS)).backward()
        model.zero_grad()  # its views would keep the gradient alive
        waiting.append(gradient)
        # QO.3 ** The host may step while the device computes the next gradient. Which gradient
        #      does a step then use, and which number has the step?
        #      hint: the oldest one that waits; late is True for a delayed step
        if len(waiting) > late:
            offload_step(memory, weights, waiting.pop(0), state, t + 1 - late, group)
        # /QO.3
    return weights[: len(flat)], memory, P


def infinity(text, steps, group, device, dtype, blocks=4, ahead=True):
    """Train with `Streamed` from files. Returns the flat weights, the Device, and the Store."""
    memory, units = Device(device), units_of(fresh(blocks, dtype))
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        model = Streamed(units, compute_unit, memory, store, group, ahead)
        start = dict(store.moved)
        for t in range(steps):
            model.step(*of_rank(text, t, group, device))
        moved = {kind: store.moved[kind] - start[kind] for kind in start}, dict(memory.moved)
        parts = [model.tensors(u, whole.clone()) for u, whole in model.visits(range(len(units)))]
        store.close()
    store.moved, memory.moved = moved
    return torch.cat([x.flatten() for unit in parts for x in unit]).cpu(), memory, store


def rows(text, group, device):
    """The rows of the table, over 3 steps."""
    n, steps = dist.get_world_size(group), 3
    right, late = twin(text, steps), twin(text, steps, late=True)
    with dp.Ledger() as ledger:
        weights, memory, P = zero_offload(text, steps, group, device, torch.float64)
    sent = sum(ledger.sent.values()), steps * 2 * (n - 1) / n * P * 8
    held = memory.peak, (2 * P + 2 * P / n) * 8  # weights, gradient, its part, the new part
    yield dp.Row("ZeRO-Offload", dp.relative_error(weights.cpu(), right), sent, held)
    _, memory, _ = zero_offload(text, steps, group, device, torch.bfloat16)
    formula = memory_math.offload_bytes(P, n)
    for way, name in ("down", "gradients out"), ("up", "weights in"):
        moved = memory.moved[way], steps * formula[name]
        yield dp.Row(f"  bf16: bytes {way} the link", 0.0, moved)
    weights, *_ = zero_offload(text, steps, group, device, torch.float64, late=True)
    yield dp.Row("  a step late, beside a late twin", dp.relative_error(weights.cpu(), late))
    wrong = dp.relative_error(late, right)
    yield dp.Row("  beside the twin", dp.relative_error(weights.cpu(), right), wrong=wrong)
    yield from infinity_rows(text, steps, group, device, right)
    yield from activation_rows(device)


def infinity_rows(text, steps, group, device, right):
    """Rows of the files: values, what the device holds at any depth, bytes, the order of reads."""
    n, deep_right = dist.get_world_size(group), twin(text, steps, blocks=12)
    weights, memory, store = infinity(text, steps, group, device, torch.float64)
    yield dp.Row("ZeRO-Infinity", dp.relative_error(weights, right))
    weights, deep, _ = infinity(text, steps, group, device, torch.float64, blocks=12)
    error = dp.relative_error(weights, deep_right)
    sizes = [sum(x.numel() for x in unit) for unit in units_of(fresh(4, torch.float32))]
    head, P = -(-sizes[-1] // n), sum(-(-size // n) * n for size in sizes)
    x_bS, _ = of_rank(text, 0, group, device)
    gathered, stepped = (n + 1) * head + x_bS.numel() * 16, 2 * n * head  # of the largest unit
    peak = 8 * max(gathered, stepped)
    yield dp.Row("  its device", 0.0, held=(memory.peak, peak))
    yield dp.Row("  three times the blocks", error, held=(deep.peak, peak))
    read, written = (sum(formula) for formula in file_bytes(P, head, n))
    _, memory, store = infinity(text, steps, group, device, torch.bfloat16)
    yield dp.Row("  bf16: bytes read from files", 0.0, (store.moved["read"], steps * read))
    yield dp.Row("  bf16: bytes written", 0.0, (store.moved["written"], steps * written))
    inputs = x_bS.numel() * (8 + 4 * 16 * 2)  # ids, and (b, S, D) of each block, in bf16
    down, up = 2 * P / n + inputs, 2 * (2 * P / n - head) + inputs
    yield dp.Row("  bf16: bytes down the link", 0.0, (memory.moved["down"], steps * down))
    yield dp.Row("  bf16: bytes up the link", 0.0, (memory.moved["up"], steps * up))
    units = len(sizes)
    beside = steps * (units - 2 + units - 1) + units - 1  # forward, backward, and the last look
    yield dp.Row("  reads that a unit computes beside", float(hidden(store.events) != beside))
    *_, store = infinity(text, steps, group, device, torch.float64, ahead=False)
    error = float(hidden(store.events) != beside)
    yield dp.Row("  read when it is needed", error, wrong=1.0)


def file_bytes(P, head, n):
    """(read, written) of a step with bf16 weights, each a tuple of bytes on one rank. Forward needs
    all units but the head, whose n-th part has `head` elements; backward needs all."""
    formula = memory_math.offload_bytes(P, n, tier="nvme")
    weights, gradients = formula["weights in"], formula["gradients out"]
    read = weights - 2 * head, weights, gradients, formula["optimizer read"]
    return read, (gradients, weights, formula["optimizer written"])


def hidden(events):
    """How many reads of weights were asked for before another unit computed."""
    count = asked = 0
    for i, event in enumerate(events):
        if event.startswith("read weights"):
            asked = i
        if event.startswith("wait weights"):
            count += any(between.startswith("compute") for between in events[asked:i])
    return count


def activation_rows(device):
    """Rows of activations that wait on the host: gradients bit by bit, and bytes both ways."""
    blocks, D, V, x_BS = 4, 16, 256, torch.arange(32, device=device).view(2, 16)
    model, memory = fresh(blocks, torch.float64).to(device), Device(device)
    gradients = lambda: torch.autograd.grad(model(x_BS).square().sum(), [*model.parameters()])
    wanted = gradients()
    with offloaded_activations(memory, model):
        found = gradients()
    worst = max(map(dp.relative_error, found, wanted))
    # a block keeps its input, and tanh's output for tanh and for the product after it
    total = x_BS.numel() * (8 + 8 * (blocks * (D + 2 * 2 * D) + D + V))
    down, up = ((memory.moved[way], total) for way in ("down", "up"))
    yield dp.Row("activations: bytes down the link", worst, down)
    yield dp.Row("  and up again", worst, up)


def train(args, group, device):
    """Train from files, and print the loss and what each place holds and moves a step."""
    blocks, D, B = 6, 32, 32
    text = dp.read_text(args.text, at_least=65)
    memory, units = Device(device), units_of(fresh(blocks, torch.float32, D))
    P = sum(x.numel() for unit in units for x in unit)
    dp.say(f"\nZeRO-Infinity, {P:,} parameters in files; unigram entropy "
           f"{dp.unigram_entropy(text):.3f}\nstep   loss")
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        model = Streamed(units, compute_unit, memory, store, group)
        for t in range(args.steps):
            loss = model.step(*of_rank(text, t, group, device, B))
            # all_reduce(SUM) over dp, 1: the loss of the whole step, to print it
            dist.all_reduce(loss, group=group)
            if (t + 1) % 20 == 0:
                dp.say(f"{t + 1:4}{loss.item():7.3f}")
        files = sum(path.stat().st_size for path in Path(folder).iterdir())
        store.close()
    dp.say(f"\nbytes of rank 0: device peak {memory.peak:,}, files {files:,}; moved in a step: "
           f"up {memory.moved['up'] // args.steps:,}, down {memory.moved['down'] // args.steps:,}")
    read_beside(units, group, device)


def read_beside(units, group, device, unit_seconds=0.02):
    """Print the time of visits to slow files, read ahead and not, beside what `seconds` predicts. A
    unit's computation is a sleep: the host waits for a device that computes."""
    blocks = units[1:-1]
    size = sum(x.nbytes for x in blocks[0]) / dist.get_world_size(group)
    rate = size / unit_seconds
    dp.say(f"\nvisits to {len(blocks)} units at {rate / 1e6:.1f} MB/s; a unit computes (sleeps) "
           f"{1000 * unit_seconds:.0f} ms\n                 measured  predicted   milliseconds")
    for ahead in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            store = Store(folder)
            model = Streamed(blocks, compute_unit, Device(device), store, group, ahead)
            for work in store.written.values():
                work.result()
            store.rate, started = rate, time.perf_counter()
            for _ in model.visits([*range(len(blocks))]):
                time.sleep(unit_seconds)
            took = time.perf_counter() - started
            store.close()
        predicted = seconds(*[[unit_seconds] * len(blocks)] * 2, ahead)
        name = "read ahead" if ahead else "one by one"
        dp.say(f"{name:16} {1000 * took:9.0f} {1000 * predicted:10.0f}")


def main(args, device):
    """Prove, then train from files; 0 if everything is as claimed."""
    group = dist.group.WORLD
    dp.say(f"offload · {dist.get_world_size()} ranks · the device is {device}")
    broken = dp.prove(list(rows(dp.read_text(args.text, at_least=65), group, device)), device)
    if args.steps:
        train(args, group, device)
    return broken


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    if ranks > 8:
        raise ValueError(f"{ranks} ranks share 8 sequences: use 8 or fewer")
    dp.read_text(args.text, at_least=65)


if __name__ == "__main__":
    dp.launch(main, dp.arguments(__doc__, ranks=2, steps=60).parse_args(), validate)
