"""The launch kit: what chapters 01 to 06 share word for word, and the stamp that keeps it so.

    python tests/kit.py            name the chapters whose kit differs
    python tests/kit.py --write    stamp the lines between the two marks below into each chapter

A chapter copied alone into an empty folder must run, so the kit is copied, not imported.
"""

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
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from pydoc_data.topics import topics
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# ── launch kit: the same lines close chapters 01 to 06; a test keeps them identical ──────────

Event = namedtuple("Event", "what group sent at")  # a call, a wait or a mark; bytes; seconds


class Ledger:
    """While open, prices each `torch.distributed` call of this rank as a ring would send it.

    `events` holds calls, waits and marks in order, `sent` the bytes by call. It stands in front
    of the functions of `dist`; a call without a price raises KeyError, so none goes uncounted.
    """

    RING_BYTES = {  # call: (its arguments, n ranks, this rank) -> bytes that leave this rank
        "all_reduce": lambda a, n, me: 2 * (n - 1) / n * a["tensor"].nbytes,
        "all_gather_single": lambda a, n, me: (n - 1) * a["input_tensor"].nbytes,
        "reduce_scatter_single": lambda a, n, me: (n - 1) / n * a["input"].nbytes,
        "all_to_all_single": lambda a, n, me: a["input"].nbytes
        - a["input"][:1].nbytes * (a.get("input_split_sizes") or [len(a["input"]) / n] * n)[me],
        "broadcast": lambda a, n, me: (n - 1) / n * a["tensor"].nbytes,  # mean over the ring
        "isend": lambda a, n, me: a["tensor"].nbytes,
        "irecv": lambda a, n, me: 0,
        "barrier": lambda a, n, me: 0,
    }
    UNPRICED = "all_gather all_to_all gather scatter reduce reduce_scatter send recv".split()

    def __enter__(self):
        self.events, self.sent, self._patches = [], Counter(), ExitStack()
        for name in [*self.RING_BYTES, *self.UNPRICED]:
            counted = self._counted(name, getattr(dist, name))
            for module in (dist, dist.distributed_c10d):  # batch_isend_irecv looks in the latter
                self._patches.enter_context(patch.object(module, name, counted))
        wait = dist.Work.wait
        marked = lambda work, *timeout: self.mark("wait") or wait(work, *timeout)
        self._patches.enter_context(patch.object(dist.Work, "wait", marked))
        return self

    def __exit__(self, *_):
        self._patches.close()

    def mark(self, what, group=None, sent=0):
        name = (group or dist.group.WORLD).group_name
        self.events.append(Event(what, name, sent, time.perf_counter()))
        self.sent[what] += sent

    def _counted(self, name, real):
        signature = inspect.signature(real)

        def call(*args, **kwargs):
            given = signature.bind(*args, **kwargs).arguments
            n, me = (ask(given.get("group")) for ask in (dist.get_world_size, dist.get_rank))
            self.mark(name, given.get("group"), self.RING_BYTES[name](given, n, me))
            return real(*args, **kwargs)

        return call


# A line of the proof: error relative to the twin; bytes as (measured, by formula) or None; and, of
# a row that is wrong on purpose, the error that it must show.
Row = namedtuple("Row", "name error sent held wrong", defaults=[None, None, 0.0])


def relative_error(found, wanted):
    """max|found - wanted| / max|wanted|; where all wanted are zero, 0 if all found are, or inf."""
    gap, size = ((t.abs().max().item() if t.numel() else 0.0) for t in (found - wanted, wanted))
    return gap / size if size else math.inf if gap else 0.0


def prove(rows, device):
    """Print the table, bytes as on rank 0. 0 if every row is as claimed on every rank: its error
    at most 1e-10, or as predicted; its bytes equal to the formula. Otherwise 1."""
    off = lambda pair: abs(pair[0] - pair[1]) if pair else 0.0
    mine = [[row.error, row.wrong, off(row.sent), off(row.held)] for row in rows]
    worst = torch.tensor(mine, dtype=torch.float64, device=device).nan_to_num(math.inf)
    # all_reduce(MAX) over all ranks, four numbers a row: the worst rank speaks for all
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
    say(f"{'':36}    error         sent      formula         held      formula")
    broken = 0
    for row, (error, wrong, unsent, unheld) in zip(rows, worst.tolist()):
        holds = abs(error - wrong) <= max(1e-6 * wrong, 1e-10) and unsent < 0.5 and unheld < 0.5
        pairs = (row.sent or "--"), (row.held or "--")
        numbers = "".join(f"{x:>13}" if x == "-" else f"{x:13,.0f}" for pair in pairs for x in pair)
        note = f"  wrong on purpose: {wrong:.3g} predicted" if wrong else ""
        say(f"{row.name:36}{error:9.2g}{numbers}{note}{'' if holds else '  NOT AS CLAIMED'}")
        broken |= not holds
    return int(broken)


def read_text(path, at_least):
    """The bytes of a file as tokens, vocabulary 256; without a path, Python's own help topics.
    Raises ValueError where it cannot be read or is shorter than `at_least`."""
    try:
        text = Path(path).read_bytes() if path is not None else "\n".join(topics.values()).encode()
    except OSError as error:
        raise ValueError(f"--text {path}: {error.strerror}") from error
    if len(text) < at_least:
        name = f"--text {path}" if path is not None else "without --text, Python's help topics"
        raise ValueError(f"{name}: {len(text)} bytes, and one batch needs {at_least}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def unigram_entropy(text):
    """The loss, in nats per byte, of the best guess that looks at no context."""
    return torch.distributions.Categorical(torch.bincount(text).double()).entropy().item()


def sample(text, step, B, S):
    """A step's batch, the same on every rank: bytes (B, S), and the byte after each (B, S)."""
    starts_B1 = torch.randint(len(text) - S, (B, 1), generator=torch.Generator().manual_seed(step))
    windows = text[starts_B1 + torch.arange(S + 1)]
    return windows[:, :-1], windows[:, 1:]


def say(*words):
    """Print, on rank 0 alone."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def arguments(doc, ranks, steps):
    """A parser with the flags of every chapter."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=ranks, help="to start, where torchrun did not")
    parser.add_argument("--steps", type=int, default=steps, help="0: prove, and do not train")
    parser.add_argument("--text", help="file to train on; default: Python's own help topics")
    parser.add_argument("--timeout", type=float, help="seconds a collective may take; default: 20, "
                        "under torchrun 120")  # fmt: skip
    return parser


def launch(main, args, validate):
    """Run main(args, device) on every rank, torchrun's or args.ranks started here, and exit: 0 if
    each returned 0, 1 if not, 2 and a sentence if validate(args, ranks) raised ValueError."""
    torch.set_num_threads(1)  # a forked child must not inherit a pool of threads
    by_torchrun = "RANK" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if by_torchrun else args.ranks
    args.timeout = args.timeout if args.timeout is not None else 120 if by_torchrun else 20
    try:
        if ranks < 1:
            raise ValueError(f"--ranks {ranks}: at least one is needed")
        if vars(args).get("steps", 0) < 0:
            raise ValueError(f"--steps {args.steps}: 0 or more can be taken")
        if not args.timeout > 0:
            raise ValueError(f"--timeout {args.timeout}: more than 0 seconds are needed")
        plot = Path(vars(args).get("plot") or "plot.png")
        if not os.access(plot.parent, os.W_OK | os.X_OK) or plot.is_dir():
            raise ValueError(f"--plot {plot}: name a file, in a folder that can be written to")
        if plot.suffix not in (".png", ".pdf", ".svg", ""):
            raise ValueError(f"--plot {plot}: .png, .pdf and .svg can be drawn")
        validate(args, ranks)
    except ValueError as refused:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(refused, file=sys.stderr)
        sys.exit(2)
    if by_torchrun:
        _rank(int(os.environ["LOCAL_RANK"]), ranks, main, args)
    forks = sys.platform == "linux" and torch.cuda.device_count() < ranks
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        given, method = (ranks, main, args, folder), "fork" if forks else "spawn"
        try:
            started = mp.start_processes(_rank, given, ranks, join=False, start_method=method)
            while not started.join():
                pass
        except mp.ProcessExitedException:  # join() has ended the other ranks by SIGTERM
            codes = [(r, -p.exitcode) for r, p in enumerate(started.processes)]
            died = [(r, signal.Signals(c).name) for r, c in codes if c > 0 and c != signal.SIGTERM]
            sys.exit("\n".join(f"rank {r} was ended by {name}" for r, name in died) or 1)
        except KeyboardInterrupt:
            sys.exit(130)
    sys.exit(0)


def _rank(local, ranks, main, args, folder=None):
    """Meet the other ranks, run main, and leave with its exit status or with what went wrong."""
    torch.set_num_threads(1)
    env, local_ranks = os.environ, int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    on_gpu = torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if local_ranks == ranks:  # one machine: the loopback address needs no network
        env.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    rank = int(env.get("RANK", local))
    try:
        if folder:
            store = dist.FileStore(f"{folder}/store", ranks)
        else:  # a restarted attempt must not read the addresses of the one before
            attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"attempt {attempt}", next(dist.rendezvous("env://"))[0])
        given = dict(store=store, rank=rank, world_size=ranks)
        patience, backend = timedelta(seconds=args.timeout), "nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, timeout=patience, **given)
        code = main(args, device)
        dist.destroy_process_group()
    except Exception as error:
        lost = "by peer" in str(error)  # gloo: connection closed, or reset, by peer
        why = "lost another rank, which failed first" if lost else traceback.format_exc()
        sys.stderr.write(f"rank {rank} of {ranks}: {why}\n")  # at once: others write too
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an ordinary exit may abort where a reference to a group is left


# ── end of the launch kit ────────────────────────────────────────────────────────────────────

OPENS, CLOSES = "# ── launch kit: ", 'if __name__ == "__main__":'
CHAPTERS = sorted(Path(__file__).resolve().parents[1].glob("0[1-6]_*.py"))


def kit():
    """The lines of the kit, as every chapter must have them."""
    return cut(Path(__file__).read_text(), "# ── end of the launch kit")[1]


def cut(text, closes=CLOSES):
    """A file's text before its kit, in it, and after it. Raises ValueError where a mark is gone."""
    start = text.index(OPENS)
    end = text.index("\n" + closes, start) + 1
    return text[:start], text[start:end], text[end:]


if __name__ == "__main__":
    for chapter in CHAPTERS:
        try:
            before, found, after = cut(chapter.read_text())
        except ValueError:
            print(f"{chapter.name} has no line {OPENS!r}, or no {CLOSES!r} after it")
            continue
        if found != kit() and "--write" in sys.argv:
            chapter.write_text(before + kit() + after)
        if found != kit():
            print(chapter.name, "stamped" if "--write" in sys.argv else "differs")
