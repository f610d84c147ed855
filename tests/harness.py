"""How a test asks for ranks: `on_ranks(4, function, *args)` forks four, and returns four answers.

The ranks of each call are forked from the test's process and gone when it returns, so no test can
poison the next. A rank that raises, dies or hangs fails the test with its number and with where it
stood. A test's process itself never joins a group.
"""

import faulthandler
import gc
import importlib
import linecache
import os
import pickle
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(os.environ.get("CHAPTERS", ROOT)).resolve()), str(ROOT)]

import torch
import torch._dynamo  # an optimizer loads it: once here, or else in every rank
import torch.distributed as dist

torch.set_num_threads(1)  # a used pool of threads and a fork hang

IN_VAIN = "by peer|[Tt]imed? ?out"  # in the error of a rank that waited for another one
AFTER_A_FAILURE = 2  # seconds that the other ranks get to say what they saw
SIGNALS = {
    "SIGABRT": " (gloo aborts when ranks call a collective with different sizes)",
    "SIGKILL": " (by somebody, or for want of memory)",
}


class RankFailed(AssertionError):
    """A rank raised, died, hung or waited in vain. The text begins with its number."""


def chapter(name):
    """The module of a chapter, such as "03_tp", from $CHAPTERS, else from the repository."""
    return importlib.import_module(name)


def beyond(name):
    """The module of a file of the second folder, such as "faults", from $CHAPTERS/beyond, else from
    the repository."""
    return importlib.import_module(f"beyond.{name}")


def on_ranks(n, function, *args, timeout=40):
    """Run function(*args) on n forked gloo ranks; return what each returned, by rank.

    `timeout`, in seconds, bounds each collective and the whole. Raises RankFailed.
    """
    fork, ends, ranks = get_context("fork"), [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(n):
            here, there = fork.Pipe(duplex=False)
            task = (rank, n, function, args, folder, timeout, there)
            ranks.append(fork.Process(target=_rank, args=task))
            ranks[-1].start()
            there.close()  # so that a rank's death is the end of its pipe
            ends.append(here)
        try:
            return _answers(ranks, ends, folder, timeout)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _rank(rank, n, function, args, folder, timeout, answer):
    gc.freeze()  # of what was there before the fork, nothing is this rank's garbage
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    sys.stdout = sys.stderr = open(f"{folder}/{rank}.out", "w", buffering=1)
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=False)
    try:
        store = dist.FileStore(f"{folder}/store", n)
        given = dict(store=store, rank=rank, world_size=n, timeout=timedelta(seconds=timeout))
        dist.init_process_group("gloo", **given)
        dist.barrier()  # nobody leaves while another still connects
        said = pickle.dumps(("returned", function(*args)))
        dist.destroy_process_group()
    except BaseException:
        said = pickle.dumps(("raised", traceback.format_exc()))
    answer.send_bytes(said)
    os._exit(0)  # groups that a test left alive would abort an ordinary exit


def _answers(ranks, ends, folder, timeout):
    """Each rank's answer, in the order of ranks; or RankFailed with the first failure in time."""
    # a second more than a collective may take: a rank that waits in one says so before it is asked
    answers, failures, deadline = {}, [], time.monotonic() + timeout + 1
    while len(answers) + len(failures) < len(ranks):
        waiting = [end for rank, end in enumerate(ends) if rank not in answers | dict(failures)]
        ready = connection.wait(waiting, max(0, deadline - time.monotonic()))
        for rank in sorted(ends.index(end) for end in ready):
            try:
                how, said = pickle.loads(ends[rank].recv_bytes())
            except EOFError:
                ranks[rank].join()
                how, said = "died", ended_by(ranks[rank].exitcode)
            if how == "returned":
                answers[rank] = said
            else:
                failures.append((rank, f"rank {rank} {how}: {said}"))
                deadline = min(deadline, time.monotonic() + AFTER_A_FAILURE)
        if not ready:
            break
    if len(answers) == len(ranks):
        return [answers[rank] for rank in range(len(ranks))]
    own = [text for _, text in failures if not re.search(IN_VAIN, text)]
    if own:
        raise RankFailed(own[0])
    hung = [rank for rank in range(len(ranks)) if rank not in answers | dict(failures)]
    stacks = {r: _stack(ranks[r], Path(folder, f"{r}.out")) for r in hung}
    told = [text for _, text in failures] + [f"rank {r}: {stack}" for r, stack in stacks.items()]
    if says := _who_waits(len(ranks), {**dict(failures), **stacks}):
        raise RankFailed("\n".join([says, *told]))
    if failures:
        raise RankFailed(told[0])
    raise RankFailed("\n".join([f"rank {', '.join(map(str, hung))} hung for {timeout} s", *told]))


def ended_by(exitcode):
    """Name what ended a process that said nothing."""
    if exitcode >= 0:
        return f"it left by os._exit({exitcode}) and said nothing"
    name = signal.Signals(-exitcode).name
    return name + SIGNALS.get(name, "")


def _who_waits(n, told):
    """A sentence about n ranks of which some wait in a collective, or None if none does. `told` has
    the traceback or the stack of each rank that did not return."""
    waits = {rank: place for rank, text in told.items() if (place := _waits_in(text))}
    if not waits:
        return None
    rest = [rank for rank in range(n) if rank not in waits]
    if rest:
        operation, place = waits[min(waits)]
        among = sorted(rank for rank in waits if waits[rank][0] == operation)
        wait = "waits" if len(among) == 1 else "wait"
        return f"{_ranks(rest)} never called {operation}, which {_ranks(among)} {wait} in, {place}"
    if len({*waits.values()}) == 1:
        operation, place = waits[0]
        return f"{_ranks(waits)} wait in {operation} and do not meet there, {place}"
    return "ranks wait for each other: " + "; ".join(
        f"rank {rank} in {operation}, {place}" for rank, (operation, place) in sorted(waits.items())
    )


def _ranks(numbers):
    """Ranks as words: "rank 1", or "ranks 0, 1 and 3"."""
    *most, last = map(str, sorted(numbers))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _waits_in(text):
    """(operation, "path:line  source") where a rank waits for others, or None. The text is the
    traceback of an error that says so, or a stack, which has the innermost call first."""
    frames = re.findall(r'File "(.+)", line (\d+),? in (\S+)', text)
    if "Traceback" not in text:
        frames.reverse()
    elif not re.search(IN_VAIN, text):
        return None
    inside = []
    for path, number, name in reversed(frames):
        source = linecache.getline(path, int(number)).strip()
        if "/lib/python" in path:
            inside.append((path, name))
        elif not re.search(r"return call\(|wait\(work", source):  # these are the Ledger's
            calls = [name for path, name in inside if "/torch/distributed/" in path]
            calls = [name for name in calls if not name.startswith("wrapper")]
            if not calls and re.search(r"\bwait\(|finish", source):
                calls = ["wait"]
            return (calls[-1], f"{path}:{number}  {source}") if calls else None
    return None


def _stack(process, said):
    """Where a rank that hangs stands, innermost call first; it writes when it is asked to."""
    before, deadline, ours = len(said.read_text()), time.monotonic() + 5, f'  File "{__file__}"'
    os.kill(process.pid, signal.SIGUSR1)
    while process.is_alive() and time.monotonic() < deadline:
        if ours in said.read_text()[before:]:
            break
        time.sleep(0.05)
    return said.read_text()[before:].partition(ours)[0]


def run_script(script, *args, torchrun=0, cwd=ROOT, timeout=120, **env):
    """Run a script as its user does: by `python`, or by torchrun with that many ranks, or with the
    flags in a list. Returns the CompletedProcess; nothing that it started, or wrote where
    temporary files go, outlives the call.
    """
    with start_script(script, *args, torchrun=torchrun, cwd=cwd, **env) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said = "\n".join(process.communicate())
            raise AssertionError(f"{process.args} ran past {timeout} s\n{said}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def refusal(script, *args):
    """The sentence with which a script refuses its arguments, and exits with status 2. It runs in
    a process forked from here, where torch is loaded already; ranks that it starts, though it
    should not, end with it."""
    with tempfile.TemporaryFile("w+") as said:
        process = get_context("fork").Process(target=_run_as_main, args=(script, args, said))
        process.start()
        process.join(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        said.seek(0)
        sentence = said.read().removesuffix("\n")
    assert process.exitcode == 2 and "\n" not in sentence, f"{process.exitcode}: {sentence}"
    return sentence


def _run_as_main(script, args, said):
    os.setsid()
    sys.argv, sys.stderr = [str(word) for word in (script, *args)], said
    runpy.run_path(sys.argv[0], run_name="__main__")


@contextmanager
def start_script(script, *args, torchrun=0, cwd=ROOT, **env):
    """The Popen of a script, in a session of its own that ends with the block."""
    if isinstance(torchrun, int):
        torchrun = ["--standalone", "--nproc-per-node", torchrun] if torchrun else []
    launcher = ["-m", "torch.distributed.run", *torchrun] if torchrun else []
    command = [str(word) for word in (sys.executable, *launcher, script, *args)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder, **env}
        process = subprocess.Popen(
            command, cwd=cwd, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        with process:
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
