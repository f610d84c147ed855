"""01 · Data parallel: every rank holds the whole model and works on its part of the batch

The gradient of a sum is the sum of the gradients. Each of n ranks computes the gradients of its
own sequences. An all-reduce adds these gradients up, so every rank takes the same step.

    rank 0   all P parameters   sequences 0 .. b-1      P gradients ─┐
    rank 1   all P parameters   sequences b .. 2b-1     P gradients ─┼─ all-reduce: every rank
    ...                                                              ─┘  holds the same sum

    rung                    calls in a step   sent by each rank   held for gradients and calls
    all_reduce_gradients    one a tensor      2(n-1)/n · P        P
    all_reduce_flat         one               2(n-1)/n · P        2P: gradients and their copy
    DataParallel            one a bucket      2(n-1)/n · P        P: gradients lie in the buckets
    ring_all_reduce         2(n-1) messages   2(n-1)/n · P        2P + P/n: and an arriving chunk

With m micro-batches in a step, a rank adds up its own gradients first and sends them once.

    python 01_dp.py                          four ranks on this machine
    torchrun --nproc-per-node 4 01_dp.py     the same, started by torchrun

How large a bucket should be has to be measured: benchmarks/slow_link.py does it.
Guide: Data Parallelism · DP and gradient overlap · gradient_as_bucket_view · Gradient accumulation.
Questions  Q1.1 * the divisor of the loss     Q1.2 * what must start equal
           Q1.3 ** when a bucket may leave    Q1.4 ** which micro-batch sends
           Q1.5 *** the chunks of a ring      Q1.6 *** the way home of whole sums
"""
# n ranks · r this rank · m micro-batches · B sequences · b sequences of this rank
# S tokens of a sequence · D width · V vocabulary · P parameters

import copy
import signal
from contextlib import contextmanager, nullcontext
from weakref import WeakValueDictionary

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads ends it without a trace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

# ── the serial twin: a small language model over bytes, from torch's own layers ──────────────


class LanguageModel(nn.Module):
    """Maps bytes (b, S) to logits of the next byte (b, S, V)."""

    def __init__(self, D=128, layers=5, heads=4, S=64, V=256):
        super().__init__()
        self.token, self.position = nn.Embedding(V, D), nn.Embedding(S, D)
        options = dict(dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(D, heads, 4 * D, **options) for _ in range(layers)
        )
        self.norm, self.head = nn.RMSNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, x_bS):
        later_SS = torch.ones(2 * x_bS.shape[1:], dtype=torch.bool, device=x_bS.device).triu(1)
        x_bSD = self.token(x_bS) + self.position.weight[: x_bS.shape[1]]
        for block in self.blocks:
            x_bSD = block(x_bSD, src_mask=later_SS)
        return self.head(self.norm(x_bSD))


# ── the axis by hand: one divisor, one start, one sum ────────────────────────────────────────

# Two ranks have four labels, with the losses 2, 4 and 6 on rank 0 and 8 on rank 1. The mean is 5.
#
#             sum   divided by the rank's labels   divided by the labels of the step
#   rank 0    12    12 / 3 = 4                     12 / 4 = 3
#   rank 1     8     8 / 1 = 8                      8 / 4 = 2
#   together        mean (4 + 8) / 2 = 6, wrong    sum 3 + 2 = 5, right
#
# The gradients follow the losses. So the loss is divided once, and gradients are only added.


def valid_tokens(y_bS, group):
    """Count the labels of the whole step, over all ranks; a label of -100 does not count."""
    num_labels = (y_bS != -100).sum()
    # all_reduce(SUM) over dp, 1: every rank now knows the divisor of the whole step
    dist.all_reduce(num_labels, group=group)
    return num_labels


def loss_share(model, x_bS, y_bS, num_labels):
    """Compute this part's share of the mean loss of the step; all shares add up to the mean.

    Where no label of the step counts (num_labels is 0), the share and its gradients are 0.
    """
    logits_bSV = model(x_bS)
    # Q1.1 * Ranks hold unequal numbers of labels. By which number does a rank divide its sum?
    #        hint: parts that add up need one divisor, and no part may divide by its own count
    loss_sum = F.cross_entropy(logits_bSV.flatten(0, 1), y_bS.flatten(), reduction="sum")
    loss = loss_sum / max(num_labels, 1)
    # /Q1.1
    return loss


@torch.no_grad()
def broadcast_parameters(module, group):
    """Give every rank of the group the parameters and buffers of its rank 0, in place."""
    # Q1.2 * Ranks that begin with different weights keep different weights. What must be equal?
    #        hint: a step changes parameters; a forward may change more than those
    for tensor in (*module.parameters(), *module.buffers()):
        # broadcast from rank 0 over dp, P in all: every rank now starts from the same model
        dist.broadcast(tensor, group_src=0, group=group)
    # /Q1.2


def gradients_of(module):
    """Return the gradients of all parameters that need one; RuntimeError names those without."""
    params = {name: param for name, param in module.named_parameters() if param.requires_grad}
    if missing := [name for name, param in params.items() if param.grad is None]:
        raise RuntimeError(f"no gradient for {', '.join(missing)}: ranks would add other tensors")
    return [param.grad for param in params.values()]


def all_reduce_gradients(module, group):
    """Add up the gradients over the group, in place, one call a tensor; call it once a step."""
    for gradient in gradients_of(module):
        # all_reduce(SUM) over dp, one tensor: every rank now holds the sum of the gradients
        dist.all_reduce(gradient, group=group)


def step_by_hand(model, micro_batches, num_labels, group, reduce=all_reduce_gradients):
    """Run backward on all micro-batches, then reduce once; return this rank's share of the loss."""
    loss = 0
    for x_bS, y_bS in micro_batches:
        share = loss_share(model, x_bS, y_bS, num_labels)
        share.backward()  # adds to .grad, so the sum over micro-batches costs no message
        loss = loss + share.detach()
    reduce(model, group)
    return loss


# ── fewer calls: one flat copy ───────────────────────────────────────────────────────────────


def all_reduce_flat(module, group, ring=False):
    """Add up the gradients over the group in one call, on a flat copy: each call has a cost of its
    own. `ring` takes ring_all_reduce below instead of torch's all_reduce."""
    gradients = gradients_of(module)
    flat_P = torch.cat([gradient.flatten() for gradient in gradients])
    if ring:
        ring_all_reduce(flat_P, group)
    else:
        # all_reduce(SUM) over dp, P: every rank now holds the sum of all gradients
        dist.all_reduce(flat_P, group=group)
    for gradient, part in zip(gradients, flat_P.split([g.numel() for g in gradients])):
        gradient.copy_(part.view_as(gradient))


# ── no copy and no waiting: buckets that leave while backward runs ───────────────────────────


class Bucket:
    """Gradients that travel together: `flat` is sent, and `views[param]` is a gradient's place."""

    def __init__(self, params, dtype):
        sizes = [param.numel() for param in params]
        self.flat = params[0].new_zeros(sum(sizes), dtype=dtype)
        self.views = {p: part.view_as(p) for p, part in zip(params, self.flat.split(sizes))}
        self.work = None  # the all-reduce on its way


def fill_buckets(params, bucket_mb, dtype=None):
    """Sort parameters into buckets of one dtype and device, of at most bucket_mb MB unless one
    tensor is larger. dtype is the buckets' own, by default that of the parameters.

    Backward finds the gradients of the last layers first, so the last parameter comes first. The
    values do not depend on this order, only the time does.
    """
    contents, filling = [], {}
    for param in reversed(list(params)):
        nbytes = param.numel() * (dtype or param.dtype).itemsize
        bucket_params, free = filling.get((param.dtype, param.device), ([], 0))
        if not bucket_params or nbytes > free:
            bucket_params, free = [], bucket_mb * 1e6
            contents.append(bucket_params)
        bucket_params.append(param)
        filling[param.dtype, param.device] = bucket_params, free - nbytes
    return [Bucket(bucket_params, dtype) for bucket_params in contents]


class BucketedDataParallel(nn.Module):
    """Wraps a module and adds up its gradients over a group while backward still runs.

    A step is: backward of each micro-batch, all but the last inside `no_sync()`;
    `finish_gradient_synchronization()`; the optimizer's step; zero the gradients.
    Source: Li et al., PyTorch Distributed, arXiv:2006.15704, section 3.2.
    """

    op, reduce_dtype = dist.ReduceOp.SUM, None

    def __init__(self, module, group, bucket_mb=25, overlap=True):
        super().__init__()
        self.module, self.group, self.bucket_mb, self.overlap = module, group, bucket_mb, overlap
        self.buckets, self.views, self.params_ready = [], {}, set()
        self.launched, self.synchronizing = 0, True
        broadcast_parameters(module, group)
        self.watch([param for param in module.parameters() if param.requires_grad])

    def watch(self, params):
        """Make buckets for parameters, and let autograd call `ready` after each gradient."""
        for bucket in fill_buckets(params, self.bucket_mb, self.reduce_dtype):
            self.buckets.append(bucket)
            self.views |= bucket.views
        for param in params:
            param.register_post_accumulate_grad_hook(self.ready)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def ready(self, param):
        """Note that this backward has added its part to param.grad. Autograd calls this method;
        whoever adds to a gradient without autograd must call it too."""
        self.deposit(param)
        if self.synchronizing:
            self.params_ready.add(param)
            if self.overlap:
                self.launch_full_buckets()

    def deposit(self, param):
        """Bring param.grad into its bucket. From then on, backward adds into the bucket itself."""
        view = self.views[param]
        if param.grad is not view:
            view.copy_(param.grad)
            param.grad = view

    def launch_full_buckets(self):
        """Send the buckets that are full, in the order of `self.buckets`.

        Collectives have no names: the first call of a rank meets the first call of the others, the
        second call meets the second. All ranks must send their buckets in one order.
        """
        # Q1.3 ** Gradients may arrive in another order on each rank. Which buckets may leave now?
        #         hint: collectives meet in the order in which each rank calls them
        while self.launched < len(self.buckets):
            bucket = self.buckets[self.launched]
            if not bucket.views.keys() <= self.params_ready:
                break
            self.launch(bucket)
            self.launched += 1
        # /Q1.3

    def launch(self, bucket):
        # all_reduce(SUM) over dp, one bucket: on its way while backward goes on
        bucket.work = dist.all_reduce(bucket.flat, op=self.op, group=self.group, async_op=True)

    @contextmanager
    def no_sync(self):
        """Keep the gradients of a micro-batch on this rank: the step's last one sends them too."""
        # Q1.4 ** Sums may be taken in any order. Which micro-batches can do without a message?
        #         hint: a gradient that was summed over ranks must not be summed again
        self.synchronizing = False
        try:
            yield
        finally:
            self.synchronizing = True
        # /Q1.4

    def finish_gradient_synchronization(self):
        """Send the buckets that are left and wait for all: each `.grad` is then the sum."""
        self.launch_full_buckets()
        self.reset()

    def reset(self):
        """Wait for the buckets that have left. The next gradient belongs to a new step."""
        for bucket in self.buckets[: self.launched]:
            bucket.work.wait()
        self.params_ready.clear()
        self.launched = 0


def accumulate(parallel, micro_batches, num_labels):
    """Run backward on m micro-batches, reduced once. Returns this rank's share of the loss."""
    loss, micro_batches = 0, list(micro_batches)
    for k, (x_bS, y_bS) in enumerate(micro_batches, start=1):
        with nullcontext() if k == len(micro_batches) else parallel.no_sync():
            share = loss_share(parallel, x_bS, y_bS, num_labels)
            share.backward()
        loss = loss + share.detach()
    parallel.finish_gradient_synchronization()
    return loss


# ── all-reduce by hand: chunks go round a ring, and every link is always busy ────────────────

# n = 4, four chunks. Each line has the chunks that ranks 0, 1, 2 and 3 send to the rank after them.
#
#   the receiver adds:     step 0   0 1 2 3     rank 1 adds chunk 0 of rank 0 to its own chunk 0
#                          step 1   3 0 1 2     rank 1 sends on what it has added up
#                          step 2   2 3 0 1     now the whole sum of chunk 1 is on rank 0,
#   the receiver copies:   step 0   1 2 3 0     of 2 on rank 1, of 3 on rank 2, of 0 on rank 3
#                          step 1   0 1 2 3
#                          step 2   3 0 1 2     every rank has sent 2(n-1) = 6 chunks


def pass_on(outgoing, incoming, group):
    """Send a tensor to the next rank of the ring and receive one from the rank before, at once."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    right = dist.P2POp(dist.isend, outgoing, group=group, group_peer=(r + 1) % n)
    left = dist.P2POp(dist.irecv, incoming, group=group, group_peer=(r - 1) % n)
    # posted together: if all ranks sent first and received then, all would wait for each other
    operations = [operation for operation in (right, left) if operation.tensor.numel()]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def ring_all_reduce(x, group):
    """Add up x (any numel) over the group, in place. If rank 0 gathered all x and sent the sum
    back, its link would carry (n-1) · x each way; here every rank sends less than 2 · x.

    Source: Patarasu & Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations,
    JPDC 69 (2009).
    """
    n, r = dist.get_world_size(group), dist.get_rank(group)
    chunks = x.view(-1).tensor_split(n)  # some are empty where numel < n: they are not sent
    buffer = torch.empty_like(chunks[0])
    # Q1.5 *** In step 0, rank r sends chunk r. Which chunk does it send in each step, and to which
    #          chunk does it add what arrives?
    #          hint: the chunk that arrives is the one to which your left neighbour has just added
    for step in range(n - 1):
        outgoing, incoming = chunks[(r - step) % n], chunks[(r - step - 1) % n]
        arriving = buffer[: incoming.numel()]
        pass_on(outgoing, arriving, group)
        incoming += arriving
    # /Q1.5
    # Q1.6 *** Rank r now holds the whole sum of the chunk that it added to last. Which chunks does
    #          it send next, and where does it put what arrives?
    #          hint: the same journey, with copies instead of sums, beginning one chunk later
    for step in range(n - 1):
        outgoing, incoming = chunks[(r + 1 - step) % n], chunks[(r - step) % n]
        pass_on(outgoing, incoming, group)
    # /Q1.6


# ── what a library adds: options, and modules and loops that were not made for it ────────────


class DataParallel(BucketedDataParallel):
    """BucketedDataParallel with options; a loop that would add up wrong gradients is refused.

    Args:
        bucket_mb: at most so many MB are sent at once, unless one tensor is larger.
        overlap: False sends all buckets after backward.
        reduction: "sum", or "mean", which divides by n as torch's DistributedDataParallel does.
        reduce_dtype: dtype in which micro-batches and ranks are added up. By default it is the
            parameter's own, and each `.grad` is a view of a bucket.
        find_unused: True lets a parameter lack a gradient on some ranks, where it counts as zero.
            If it lacks one on all ranks, its `.grad` is None on all ranks.

    Raises Disagreement if the ranks have different modules or options. All ranks together may
    unfreeze a parameter later, and freeze one with find_unused. Buffers are made equal once.
    """

    sending = WeakValueDictionary()  # {group: the DataParallel whose gradients are on their way}

    def __init__(self, module, group, bucket_mb=25, overlap=True,
                 reduction="sum", reduce_dtype=None, find_unused=False):  # fmt: skip
        self.op = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG}[reduction]
        self.reduce_dtype, self.find_unused = reduce_dtype, find_unused
        self.fresh = set()  # parameters that got a gradient since the last reduction
        self.flags = {}  # {tensor with one number for each of some parameters: those parameters}
        lines = [f"{bucket_mb=} {overlap=} {reduction=} {reduce_dtype=} {find_unused=}"]
        for name, x in (*module.named_parameters(), *module.named_buffers()):
            lines.append(f"{name} {tuple(x.shape)} {x.dtype} requires_grad={x.requires_grad}")
        agree(lines, group)
        super().__init__(module, group, bucket_mb, overlap)

    def refuse(self, problem, params=()):
        """Raise RuntimeError with this rank, a problem, and the names of parameters."""
        names = ", ".join(name for name, p in self.module.named_parameters() if p in params)
        raise RuntimeError(f"rank {dist.get_rank(self.group)}: {problem.format(names)}")

    def watch(self, params):
        """Make buckets for parameters. With find_unused, the last one also takes a number for each
        parameter, 1 where this rank has a gradient: the sum says how many ranks have one."""
        if self.find_unused and params:
            flags = params[0].new_zeros(len(params)).requires_grad_()
            self.flags[flags] = params
            params = [flags, *params]  # the first parameter lies in the last bucket
        super().watch(params)

    def forward(self, *args, **kwargs):
        """Run the module. Gradients that were zeroed before their reduction are forgotten: an
        exception ended their step, and every rank starts it again."""
        if any(param.grad is None for param in self.fresh):
            self.reset()
        return super().forward(*args, **kwargs)

    def ready(self, param):
        if param.grad is None:  # a custom backward returned None, and adds the gradient later
            return
        if self.synchronizing and param in self.params_ready:
            todo = "put no_sync() around all micro-batches but the last one of a step"
            self.refuse(f"{{}} got two gradients in one step: {todo}", {param})
        if self.synchronizing and self.overlap:
            if self.sending.setdefault(self.group, self) is not self:
                todo = "finish one before the backward of the other, or give overlap=False"
                self.refuse(f"two DataParallel of one group would mix up what they send: {todo}")
        super().ready(param)

    def deposit(self, param):
        if param.grad.is_sparse:
            param.grad = param.grad.to_dense()
        view = self.views[param]
        if view.dtype == param.dtype:
            super().deposit(param)
        else:
            view.add_(param.grad) if param in self.fresh else view.copy_(param.grad)
            param.grad.zero_()  # the bucket holds it: the next micro-batch adds to zeros
        self.fresh.add(param)

    def finish_gradient_synchronization(self):
        """Finish as above. Before it waits, it raises RuntimeError if a gradient is missing."""
        params = {p: name for name, p in self.module.named_parameters() if p.requires_grad}
        if unfrozen := [param for param in params if param not in self.views]:
            agree([f"unfrozen {params[param]}" for param in unfrozen], self.group)
            self.watch(unfrozen)
            for param in unfrozen:
                self.ready(param)
        if not self.fresh:
            todo = "a rank without a batch runs one on an empty batch, see join()"
            self.refuse(f"no backward since the last reduction: {todo}")
        # None is not zero: an optimizer decays a weight whose gradient is zero, and leaves a weight
        # alone whose gradient is None. The sum of the flags tells every rank which it has to be.
        for flags, params in self.flags.items():
            for param in set(params) - self.fresh:
                self.views[param].zero_()
            self.params_ready.update(params)
            flags.grad = flags.new_tensor([float(param in self.fresh) for param in params])
            self.ready(flags)
        if missing := self.views.keys() - self.params_ready:
            self.refuse("no gradient for {}: if that is meant, say find_unused=True", missing)
        super().finish_gradient_synchronization()
        counts = {p: c for flags, params in self.flags.items()
                  for p, c in zip(params, self.views[flags].tolist())}  # fmt: skip
        for param, view in self.views.items():
            if param.grad is not view or counts.get(param) == 0:
                param.grad = None if counts.get(param) == 0 else view.to(param.dtype)

    def reset(self):
        super().reset()
        self.fresh.clear()
        if self.sending.get(self.group) is self:
            del self.sending[self.group]

    def __deepcopy__(self, memo):
        """Copy the module alone: an average of weights needs neither group nor buckets."""
        return copy.deepcopy(self.module, memo)


def join(batches, empty, group):
    """Yield this rank's batches, then `empty` until every rank of the group has run out.

    Each batch is (x, y). `empty` has no sequences: a step on it adds zeros to the gradients and to
    the number of labels, so that the other ranks' labels alone are the divisor.
    """
    batches = iter(batches)
    while True:
        batch = next(batches, None)
        going = torch.tensor(float(batch is not None), device=empty[0].device)
        # all_reduce(MAX) over dp, 1: every rank now knows if some rank has a batch left
        dist.all_reduce(going, op=dist.ReduceOp.MAX, group=group)
        if not going:
            return
        yield empty if batch is None else batch


# ── from here on: proof, run, kit ────────────────────────────────────────────────────────────

from functools import partial


def tiny_model(device, seed=0):
    """Build the proof's twin in float64, the same from the same seed."""
    torch.manual_seed(seed)
    return LanguageModel(D=32, layers=2, heads=2, S=16).double().to(device)


def proof_batch(n, device, m=3):
    """Draw a batch; entry [r] has the m micro-batches of rank r, as pairs of bytes and labels.
    They differ in size and in the number of labels that count."""
    draw = torch.Generator().manual_seed(1)
    x_BS, y_BS = torch.randint(256, (2, n * m + n + 1, 16), generator=draw).to(device)
    y_BS[torch.rand(y_BS.shape, generator=draw) < torch.linspace(0, 0.8, len(y_BS))[:, None]] = -100
    ranks = zip(x_BS.tensor_split(n), y_BS.tensor_split(n))
    batch = [list(zip(x.tensor_split(m), y.tensor_split(m))) for x, y in ranks]
    counts = [(y != -100).sum().item() for part in batch for _, y in part]
    assert min(counts) > 0 and len({*counts}) > 1 and len(x_BS.unique()) > 50, "a trivial batch"
    return batch


def serial(shares):
    """Run on one process: add up the loss and gradients of (model, (x, y), divisor) shares."""
    losses, gradients = [], []
    for model, (x_bS, y_bS), divisor in shares:
        nats_bS = F.cross_entropy(model(x_bS).transpose(1, 2), y_bS, reduction="none")
        losses.append(nats_bS.sum() / divisor)
        gradients.append(torch.autograd.grad(losses[-1], list(model.parameters())))
    return [sum(losses).detach(), *(sum(parts) for parts in zip(*gradients))]


def max_error(values, references):
    """Return the largest relative error over pairs of tensors."""
    return max(relative_error(*pair) for pair in zip(values, references, strict=True))


def check(step, model, group):
    """Take one step(model, micro_batches, num_labels) on this rank's part of the proof's batch.

    Returns the loss of all ranks and the gradients; the bytes that this rank sent; and the bytes
    of its gradients and of the tensors that it sent.
    """
    storages, device = [], next(model.parameters()).device
    micro_batches = proof_batch(dist.get_world_size(group), device)[dist.get_rank(group)]
    num_labels = valid_tokens(torch.cat([y_bS for _, y_bS in micro_batches]), group)
    note = lambda args: storages.append(next(filter(torch.is_tensor, args)).untyped_storage())
    noted = lambda call: lambda *args, **options: note(args) or call(*args, **options)
    with Ledger() as ledger:
        with patch.multiple(dist, all_reduce=noted(dist.all_reduce), P2POp=noted(dist.P2POp)):
            loss = step(model, micro_batches, num_labels)
    # all_reduce(SUM) over dp, 1: the shares of the loss
    dist.all_reduce(loss, group=group)
    gradients = [param.grad for param in model.parameters()]
    storages += [gradient.untyped_storage() for gradient in gradients]
    held = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return [loss, *gradients], sum(ledger.sent.values()), sum(held.values())


def ladder(group, device):
    """Yield each rung: name, step, model, and by formula the bytes that a rank sends and holds."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    size = sum(param.nbytes for param in tiny_model(device).parameters())
    flags = 8 * len(list(tiny_model(device).parameters()))
    ring = lambda nbytes: 2 * (n - 1) / n * nbytes
    by_hand = lambda reduce: (partial(step_by_hand, group=group, reduce=reduce), tiny_model(device))
    yield "all_reduce_gradients", *by_hand(all_reduce_gradients), ring(size), size
    yield "all_reduce_flat", *by_hand(all_reduce_flat), ring(size), 2 * size
    for name, options, nbytes in [
        ("DataParallel, 3 micro-batches", {}, size),
        ("DataParallel(overlap=False)", dict(overlap=False), size),
        ("DataParallel(find_unused=True)", dict(find_unused=True), size + flags),
    ]:
        parallel = DataParallel(tiny_model(device), group, bucket_mb=0.05, **options)
        yield name, accumulate, parallel, ring(nbytes), nbytes
    chunks = [8 * len(chunk) for chunk in torch.empty(size // 8, device="meta").tensor_split(n)]
    # the first half of the way sends all chunks but r + 1, the second all but r + 2
    sent = 2 * size - chunks[(r + 1) % n] - chunks[(r + 2) % n]
    held = size + (size + chunks[0]) * (n > 1)
    yield "ring_all_reduce", *by_hand(partial(all_reduce_flat, ring=True)), sent, held


def mean_of_means(model, micro_batches, num_labels, group):
    """Wrong on purpose: each rank divides by its own labels, and then by the number of ranks."""
    own_labels = sum((y_bS != -100).sum() for _, y_bS in micro_batches)
    return step_by_hand(model, micro_batches, own_labels * dist.get_world_size(group), group)


def reduce_every_time(model, micro_batches, num_labels, group):
    """Wrong on purpose: sums that were reduced once are reduced again after each micro-batch."""
    return sum(step_by_hand(model, [part], num_labels, group) for part in micro_batches)


def proof(group, device):
    """Yield the rows of the table: every rung, and what it looks like to leave out an idea."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    batch, model = proof_batch(n, device), tiny_model(device)
    counts = [sum((y_bS != -100).sum() for _, y_bS in part) for part in batch]
    whole = [torch.cat(tensors) for tensors in zip(*(pair for part in batch for pair in part))]
    reference = serial([(model, whole, sum(counts))])
    for name, step, rung_model, sent, held in ladder(group, device):
        values, sent_here, held_here = check(step, rung_model, group)
        yield Row(name, max_error(values, reference), (sent_here, sent), (held_here, held))

    own = tiny_model(device, seed=r)
    with Ledger() as ledger:
        broadcast_parameters(own, group)
    sent = sum(param.nbytes for param in own.parameters()) * (r < n - 1)  # the last one sends none
    error = max_error(own.parameters(), model.parameters())
    yield Row("broadcast_parameters", error, (ledger.sent["broadcast"], sent))

    parts = [(rank, k, pair) for rank, part in enumerate(batch) for k, pair in enumerate(part)]
    seeded = [tiny_model(device, seed=rank) for rank in range(n)]
    for name, step, rung_model, shares in [
        ("each rank seeded apart", step_by_hand, seeded[r],
         [(seeded[rank], pair, sum(counts)) for rank, _, pair in parts]),
        ("mean of the ranks' means", mean_of_means, tiny_model(device),
         [(model, pair, n * counts[rank]) for rank, _, pair in parts]),
        # what was summed after micro-batch k of 3 is summed again, n times, after each later one
        ("every micro-batch is summed", reduce_every_time, tiny_model(device),
         [(model, pair, sum(counts) / n ** (2 - k)) for _, k, pair in parts]),
    ] if n > 1 else ():  # fmt: skip
        (_, *gradients), _, _ = check(partial(step, group=group), rung_model, group)
        predicted = max_error(serial(shares)[1:], reference[1:])
        yield Row(name, max_error(gradients, reference[1:]), wrong=predicted)

    gradients, calls, waits = order_of_events(group, device)
    early = sum(call < gradients[-1] for call in calls)
    as_claimed = 0 < early and len(waits) == len(calls) and waits[0] > gradients[-1]
    yield Row(f"{early} of {len(calls)} buckets leave early", 0.0 if as_claimed else math.inf)


def order_of_events(group, device, bucket_mb=0.05, overlap=True):
    """Return when, counted in events of a step, each gradient arrives, each bucket leaves, and
    each bucket is waited for."""
    model = tiny_model(device)
    batch = proof_batch(dist.get_world_size(group), device)[dist.get_rank(group)]
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: ledger.mark("gradient"))
    parallel = DataParallel(model, group, bucket_mb, overlap)
    with Ledger() as ledger:
        accumulate(parallel, batch[-1:], num_labels=1)
    order = [event.what for event in ledger.events]
    find = lambda what: [i for i, event in enumerate(order) if event == what]
    return find("gradient"), find("all_reduce"), find("wait")


# ── the run ──────────────────────────────────────────────────────────────────────────────────


def train_step(parallel, optimizer, batch, m, group):
    """Take one step on this rank's part of a batch; return the mean loss of the whole batch."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    x_bS, y_bS = (whole.tensor_split(n)[r] for whole in batch)
    num_labels = valid_tokens(y_bS, group)
    loss = accumulate(parallel, zip(x_bS.tensor_split(m), y_bS.tensor_split(m)), num_labels)
    if num_labels:
        optimizer.step()
    else:
        say("no label of the batch counts: the step is skipped")
    optimizer.zero_grad(set_to_none=False)
    # all_reduce(SUM) over dp, 1: the shares of the loss, for the reader
    dist.all_reduce(loss, group=group)
    return loss.item()


def train(args, group, device):
    """Train on text; return the model, whose weights are then the same on every rank."""
    torch.manual_seed(dist.get_rank(group))  # ranks start apart: DataParallel brings them together
    parallel = DataParallel(LanguageModel().to(device), group, args.bucket_mb)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=2e-3)
    text = read_text(args.text, at_least=65)
    say(f"\n{len(parallel.buckets)} buckets of {args.bucket_mb} MB; a guess that knows no context "
        f"has a loss of {unigram_entropy(text):.3f}\nstep   loss")  # fmt: skip
    for step in range(args.steps):
        batch = [whole.to(device) for whole in sample(text, step, args.batch, 64)]
        loss = train_step(parallel, optimizer, batch, args.micro_batches, group)
        if step % 10 == 0 or step == args.steps - 1:
            say(f"{step:4}{loss:7.3f}")
    weights = torch.cat([param.detach().flatten() for param in parallel.parameters()])
    digest = sha256(weights.cpu().numpy().tobytes()).hexdigest()[:12]
    agree([f"weights {digest}"], group)
    say(f"weights {digest} on every rank")
    return parallel.module


def plot(path, group, device):
    """Draw a step's events in their order: gradients above, each bucket from call to wait."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    settings = [(0.05, False), (0.1, True), (0.05, True)]
    for (bucket_mb, overlap), axes in zip(settings, figure.subplots(3, sharex=True)):
        gradients, calls, waits = order_of_events(group, device, bucket_mb, overlap)
        axes.vlines(gradients, 0.6, 1.6, color="#0b3c5d", linewidth=2)
        axes.axvline(gradients[-1], color="black", linestyle=":", linewidth=1)
        for row, (call, wait) in enumerate(zip(calls, waits)):
            axes.barh(-row, wait - call, 0.8, left=call, color="#f2a541")
        axes.set_yticks([1.1, (1 - len(calls)) / 2], ["gradients arrive", "buckets travel"])
        when = "during" if overlap else "after"
        axes.set_title(f"buckets of {bucket_mb} MB leave {when} backward", loc="left")
        axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("events of a step on rank 0, in their order; dotted: the last gradient")
    if dist.get_rank(group) == 0:
        figure.savefig(path, dpi=110)
        print(f"drew {path}")


def main(args, device):
    """Prove, then train or draw; 0 if everything is as claimed."""
    group = dist.group.WORLD
    say(f"01 data parallel · {dist.get_world_size()} ranks · {dist.get_backend()} · {device.type}")
    broken = prove(list(proof(group, device)), device)
    if args.plot:
        plot(args.plot, group, device)
    elif args.steps:
        train(args, group, device)
    return broken


def validate(args, ranks):
    """Refuse, in a sentence, what cannot work."""
    for flag in "batch", "micro_batches", "bucket_mb":
        if not (value := vars(args)[flag]) > 0:
            raise ValueError(f"--{flag.replace('_', '-')} {value}: must be greater than 0")
    read_text(args.text, at_least=65)


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
    parser = arguments(
        __doc__, ranks=4, steps=60, plot="the order in which gradients arrive and buckets leave"
    )
    parser.add_argument("--batch", type=int, default=32, help="sequences of 64 bytes in a step")
    parser.add_argument("--micro-batches", type=int, default=1, help="of each rank in a step")
    parser.add_argument("--bucket-mb", type=float, default=0.5, help="MB that are sent at once")
    launch(main, parser.parse_args(), validate)
