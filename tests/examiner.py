"""How an exercise is graded: by the tests that name its question, then by the chapter's own proof.
Each question is graded in a process of its own. A verdict is a few rows, (label, text).

A question of accounting is graded by memory_math. workshop.py starts a `Trial` of each.
"""

import builtins
import faulthandler
import gc
import itertools
import math
import operator
import os
import re
import runpy
import signal
import sys
import tempfile
import textwrap
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import is_dataclass
from multiprocessing import get_context
from pathlib import Path

import harness
import pytest
import torch
import torch.distributed as dist

import memory_math

CASES = 4  # of a test with more, those that differ most from each other: a learner waits
PRINTS = 12  # lines of print() that are shown
PROOF = {"07_5d": "--pp 1 --dp 2 --cp 1 --tp 1 --ep 2", "beyond": ""}  # others: two ranks
BREAKPOINT = (
    "breakpoint() needs a terminal, and grading has none: use print(), which is shown here, or run "
    "one rank as WORKSHOP.md says"
)

NEEDED = {  # of a comparison: what it asked for, and whether it got it
    "==": ("", operator.eq), "!=": ("anything but ", operator.ne), "is": ("", operator.is_),
    "<": ("less than ", operator.lt), "<=": ("at most ", operator.le), "in": ("one of ", None),
    ">": ("more than ", operator.gt), ">=": ("at least ", operator.ge),
}  # fmt: skip


# ── a process for each question ──────────────────────────────────────────────────────────────


class Trial:
    """The grading of a question, or of several of a chapter, in a process group of its own.

    attempt: a learner's lines in their place, as workshop.Attempt has them. `answer` can be read
    when there is a result.
    """

    def __init__(self, attempt, patience):
        self.attempt, self.started = attempt, time.monotonic()
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name, attempt.question.chapter.relative_to(harness.ROOT))
        path.parent.mkdir(exist_ok=True)
        path.write_text(attempt.text)
        attempt.file = str(path)
        fork = get_context("fork")
        self.answer, send = fork.Pipe(duplex=False)
        task = attempt, self.folder.name, send, patience
        self.process = fork.Process(target=examine, args=task)
        self.process.start()
        send.close()

    def found(self):
        """Wait for the end: the questions that are solved, and a failure or None."""
        try:
            return self.answer.recv()
        except EOFError:  # ended by its time-out, or by the learner's lines
            self.process.join()
            test, _, stack = Path(self.folder.name, "stack").read_text().partition("\n")
            died = "" if stack else harness.ended_by(self.process.exitcode)
            return set(), (test, "Died" if died else "Hung", died or stack, "")
        finally:
            self.printed = printed(self.folder.name)
            noted = Path(self.folder.name, "compared")
            self.attempt.compared = noted.read_text().split("\n") if noted.exists() else None
            self.stop()

    def result(self):
        """Of one question: (state, rows of (label, text), traceback, seconds)."""
        solved, failure = self.found()
        if failure:
            told = mispredicted if self.attempt.question.account else explain
            verdict = told(failure, self.attempt)
        elif solved:
            verdict = "solved", [], ""
        else:
            verdict = "not graded", [("tests", f"none marks {self.attempt.id}")], ""
        state, rows, trace = verdict
        return state, [*rows, *self.printed], trace, time.monotonic() - self.started

    def stop(self):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        with suppress(EOFError, OSError):  # when the last of its ranks is gone: each holds an end
            while self.answer.poll(10):
                self.answer.recv()
        self.answer.close()
        self.folder.cleanup()


def examine(attempt, folder, send, patience):
    """Send the questions that are solved, and the first failure or None. It runs in a process of
    its own. A failure is (test, kind of exception, its words, traceback)."""
    gc.freeze()  # nothing from before the fork has to be searched for garbage
    os.setsid()
    watch_prints(attempt, folder)
    log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    with open(f"{folder}/stack", "w") as stack:
        if attempt.question.account:
            faulthandler.dump_traceback_later(patience, exit=True, file=stack)
            send.send(({attempt.id}, predict(attempt)))
            return
        solved, failure = {*attempt.ids}, None
        if not getattr(attempt, "proof_alone", False):
            solved, failure = run(attempt, folder, patience, stack)
        if solved == {*attempt.ids} and not failure:
            failure = prove(attempt, folder, patience)
            solved = set() if failure else solved
        send.send((solved, failure))


def watch_prints(attempt, folder):
    """Let print() of the learner's lines write into a file as well, and refuse breakpoint()."""

    def refuse(*args, **kwargs):
        raise RuntimeError(BREAKPOINT)

    def printing(*words, sep=" ", end="\n", file=None, flush=False):
        caller = sys._getframe(1)
        own = getattr(attempt, "is_learners", None) if not attempt.question.account else None
        if caller.f_code.co_filename == attempt.file and (not own or own(caller.f_lineno)):
            who = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
            with open(f"{folder}/prints", "a") as shown:
                shown.write(who + (sep or " ").join(map(str, words)) + "\n")
        usual(*words, sep=sep, end=end, file=file, flush=flush)

    usual, builtins.print = builtins.print, printing
    sys.breakpointhook = refuse


def note_comparisons(folder):
    """Let torch.allclose and torch.equal write what they compared, where it is not the same."""

    def noting(function):
        def compares(value, expected, *args, **kwargs):
            same = function(value, expected, *args, **kwargs)
            if not same and value.shape == expected.shape:
                missing = value.isnan().sum().item()
                nans = f", {missing} of {value.numel()} are nan" if missing else ""
                gap = (value.double() - expected.double()).nan_to_num().abs().max().item()
                says = [brief(expected), f"{brief(value)}, off by {gap:.3g}{nans}"]
                Path(folder, "compared").write_text("\n".join(says))
            return same

        compares.__name__ = function.__name__
        return compares

    torch.allclose, torch.equal = noting(torch.allclose), noting(torch.equal)


def printed(folder):
    """Rows of what the learner's lines printed."""
    path = Path(folder, "prints")
    lines = path.read_text().splitlines() if path.exists() else []
    more = [f"... and {len(lines) - PRINTS} lines more"] if len(lines) > PRINTS else []
    return [("prints", line) for line in lines[:PRINTS] + more]


def prove(attempt, folder, patience):
    """Run the proof of the chapter with the answer in it. Return None, or a failure."""
    chapter = attempt.question.chapter
    kind = chapter.stem if chapter.parent == harness.ROOT else "beyond"
    flags = [*PROOF.get(kind, "--ranks 2").split(), "--steps", "0", "--timeout", str(patience)]
    with open(f"{folder}/proof", "w") as said:
        process = get_context("fork").Process(target=_proof, args=(attempt.file, flags, said))
        process.start()
        process.join(10 * patience)
    text = Path(folder, "proof").read_text()
    if process.exitcode is None:
        return "", "Proof", f"it did not end in {10 * patience:g} s", text
    if process.exitcode == 0:
        return None
    broken = [" ".join(x.split()) for x in text.splitlines() if x.endswith("NOT AS CLAIMED")]
    last = [line for line in text.splitlines() if line.strip() and " of 2: " not in line]
    waits = [line for line in text.splitlines() if re.match(r"some ranks waited", line)]
    return "", "Proof", cut([*broken, *waits, *last[-1:], "it said nothing"][0]), text


def _proof(file, flags, said):
    """Run a chapter as a script whose output goes into a file."""
    for stream in (1, 2):
        os.dup2(said.fileno(), stream)
    sys.stdout = sys.stderr = said
    sys.argv = [file, *flags]
    runpy.run_path(file, run_name="__main__")


# ── running the tests of a question ──────────────────────────────────────────────────────────


def run(attempt, folder, patience, stack):
    """Run the tests that questions mark, on the chapter in a folder; in a process of its own.

    Returns the questions whose tests all passed, and of the first test that failed (its name, the
    kind of its exception, that exception's words, the traceback), or None. A test does not run if
    its questions have failed already; the run ends when ranks hang. Ranks wait for each other
    `patience` seconds. A test that takes thrice as long is ended, with its process; `stack` says
    where it was.
    """
    for module in [name for name in sys.modules if re.match(r"0\d_|test_|beyond", name)]:
        del sys.modules[module]  # loaded from elsewhere, before the fork
    note_comparisons(folder)
    on_ranks = harness.on_ranks
    usual = on_ranks.__kwdefaults__["timeout"]  # a test that asks for twice that gets twice ours
    harness.on_ranks = lambda *given, timeout=usual: on_ranks(
        *given, timeout=max(min(timeout, patience), timeout * patience / usual)
    )
    os.environ["CHAPTERS"] = folder
    sys.path.insert(0, folder)
    os.chdir(harness.ROOT)
    questions = attempt.ids
    examiner = Examiner(questions, patience, stack)
    tests = map(str, attempt.question.tests)
    options = "-q --tb=native -p no:cacheprovider -o addopts= -m"
    pytest.main([*options.split(), "not slow and not reference", *tests], plugins=[examiner])
    return examiner.solved(), examiner.failure


def asked(item):
    """Return the questions that a test marks."""
    return {id for mark in item.iter_markers("question") for id in mark.args}


def differing(items, room=CASES):
    """Choose cases of a test: the first one, then always the one with most values not seen yet. A
    value counts more if its parameter has few, such as with and without."""
    values = lambda item: {(name, str(value)) for name, value in item.callspec.params.items()}
    left, chosen, seen = list(items), [], set()
    if len(left) <= room:
        return left
    names = Counter(name for name, _ in set().union(*map(values, left)))
    new = lambda item: sum(1 / names[name] for name, _ in values(item) - seen)
    while len(chosen) < room:
        chosen.append(max(left, key=new) if chosen else left[0])
        left.remove(chosen[-1])
        seen |= values(chosen[-1])
    return sorted(chosen, key=items.index)


class Examiner:
    """A pytest plugin that runs the tests of some questions and keeps the first failure."""

    def __init__(self, questions, patience, stack):
        self.questions, self.patience, self.stack = questions, patience, stack
        self.chosen, self.passed, self.failed, self.failure = Counter(), Counter(), set(), None

    def solved(self):
        return {id for id in self.questions if self.passed[id] == self.chosen[id] > 0}

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if asked(item) & {*self.questions}]
        items.sort(key=lambda item: len(asked(item)))  # what is about one question alone first
        of_test = lambda item: item.nodeid.partition("[")[0]
        cases = [list(group) for _, group in itertools.groupby(items, of_test)]
        items[:] = [item for group in cases for item in differing(group)]
        self.chosen.update(id for item in items for id in asked(item))

    def pytest_collectreport(self, report):
        if report.failed and not self.failure:
            self.failure = "", "Collection", report.longreprtext, report.longreprtext

    def pytest_runtest_setup(self, item):
        if asked(item) & {*self.questions} <= self.failed:
            pytest.skip("its questions have failed already")
        self.stack.seek(0)
        self.stack.truncate()
        self.stack.write(f"{item.name}\n")
        self.stack.flush()
        faulthandler.dump_traceback_later(3 * self.patience, exit=True, file=self.stack)

    def pytest_runtest_makereport(self, item, call):
        if call.when != "setup":
            faulthandler.cancel_dump_traceback_later()
        error = call.excinfo
        if error is None:
            self.passed.update(asked(item) if call.when == "call" else ())
        elif error.typename != "Skipped":
            self.failed |= asked(item)
            trace = "".join(traceback.format_exception(error.value))
            self.failure = self.failure or (item.name, error.typename, str(error.value), trace)
        if error and "hung for" in str(error.value):
            item.session.shouldstop = "each hang takes its time"

    def pytest_assertrepr_compare(self, op, left, right):
        words, holds = NEEDED.get(op, (op + " ", None))
        if holds and holds(left, right) is True:
            return None  # another part of the assertion failed
        value, expected, where = first_difference(left, right) if op == "==" else (left, right, "")
        of = f", at {where} of {brief(left, 60)}" if where else ""
        if op == "==" and expected in ([], (), {}) and isinstance(value, list | tuple | dict):
            what = "nothing that differs", f"{len(value)} that differ, first {brief([*value][0])}"
            what = (what[0], what[1].replace("1 that differ, first", "this differs:"))
        else:
            what = words + brief(expected), brief(value)
        pair = [f"expected: {what[0]}", f"found: {what[1]}{of}"]
        return [f"{brief(left)} {op} {brief(right)}", *pair, "."]


def first_difference(found, expected, where=""):
    """(found, expected, where) of the first part in which two nested values differ."""
    places = [
        list(x if isinstance(x, dict) else range(len(x)) if isinstance(x, list | tuple) else ())
        for x in (found, expected)
    ]
    for key in places[0] if places[0] == places[1] else ():
        same = found[key] == expected[key]
        if not (same.all() if hasattr(same, "all") else same):
            return first_difference(found[key], expected[key], f"{where}[{key!r}]")
    return found, expected, where


def brief(value, room=110):
    """A value in a line: of a tensor its shape and dtype too."""
    if hasattr(value, "shape") and hasattr(value, "flatten"):
        first = ", ".join(f"{x:.6g}" for x in value.flatten()[:6].tolist())
        more = ", ..." if math.prod(value.shape) > 6 else ""
        return f"[{first}{more}] of shape {tuple(value.shape)}, {value.dtype}"
    return cut(plain(value), room)


def plain(value):
    """A value as text: of a row of the proof, its name, and what is not as claimed."""
    if hasattr(value, "error") and hasattr(value, "held"):
        pairs = [(what, getattr(value, what)) for what in ("sent", "held")]
        bytes_ = [f", {what} {p[0]:,.0f} of {p[1]:,.0f}" for what, p in pairs if p and p[0] != p[1]]
        return f"{value.name}: error {value.error:.2g}{''.join(bytes_)}"
    if type(value) in (list, tuple):
        inside = ", ".join(map(plain, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if is_dataclass(value):
        return f"{type(value).__name__}(...)"
    return cut(repr(value), 60)


def cut(text, room=160):
    """A text in a line, without its middle where it is long."""
    text = " ".join(text.split())
    return text if len(text) <= room else f"{text[: room * 2 // 3]} ... {text[-room // 4 :]}"


# ── from a failure to a few rows ─────────────────────────────────────────────────────────────


def explain(failure, attempt):
    """(state, rows, traceback) of a failure as `run` returned it. The attempt says whose a line is:
    `file`, `id`, `place`, `is_learners(number)`, `at(number)`, `named(text)`."""
    test, kind, words, trace = failure
    if kind == "Collection" and attempt.file not in trace:
        return "not graded", [("tests", cut(trace.strip().splitlines()[-1]))], trace
    rows = claim(test)
    if kind == "Died":
        return "wrong", [*rows, ("died", words), ("line", attempt.place)], ""
    if kind == "Proof":
        rows = [("claim", f"the proof of {attempt.question.chapter.name} holds with this answer")]
        rows += [("expected", "every row as claimed"), ("found", words)]
        return "wrong", [*rows, line_of(trace, attempt)], attempt.named(trace)
    rank = re.match(r"rank ([\d, ]+) (raised|died|hung)", words) if kind == "RankFailed" else None
    waits = kind == "RankFailed" and not rank
    if kind == "Hung" or waits or rank and rank[2] == "hung":
        says, stacks = "it does not return", words
        if rank or waits:
            says, _, stacks = words.partition("\n")
        rows.append(("hangs", readable(says, attempt)))
        for stack in re.split(r"^(?=rank \d+: )", stacks, flags=re.M):
            rows += standing(stack, attempt) if "Traceback" not in stack else []
        if not any(attempt.place.partition(":")[0] in text for _, text in rows):
            rows.append(line_of(words, attempt))
        return "hangs", rows, attempt.named(words)
    text = words if rank else trace
    state, more = what_failed(text, rank, attempt)
    if re.search(r"\bnan\b", " ".join(text for label, text in more if label == "found")):
        more.append(("nan", "no number: 0 / 0, or -inf minus -inf, as in a row that sees nothing"))
    return state, rows + more, attempt.named(text)


def claim(test):
    """Rows of what a test claims, in words, and of its case."""
    name, _, case = test.removeprefix("test_").partition("[")
    rows = [("claim", textwrap.shorten(name.replace("_", " "), 120))] if name else []
    return rows + [("case", case[:-1])] * bool(case)


def line_of(text, attempt):
    """The row of the learner's line in which a traceback or a sentence stands, or of all lines."""
    numbers = re.findall(rf'{re.escape(attempt.file)}(?:", line |:)(\d+)', text)
    own = [int(number) for number in numbers if attempt.is_learners(int(number))]
    return "line", attempt.at(own[-1]) if own else attempt.place


def readable(text, attempt):
    """A sentence with "path:line" of files that a reader can open."""
    owned = lambda match: "{}:{}".format(*attempt.owner(int(match[1])))
    text = re.sub(rf"{re.escape(attempt.file)}:(\d+)", owned, text)
    return text.replace(f"{harness.ROOT}/", "")


def what_failed(text, rank, attempt):
    """(state, rows) of a traceback: what was expected, found or raised, and at which line."""
    who = f", on rank {rank[1]}" if rank else ""
    numbers = [int(n) for n in re.findall(rf'"{re.escape(attempt.file)}", line (\d+)', text)]
    own = any(map(attempt.is_learners, numbers))
    line = line_of(text, attempt)
    if rank and rank[2] == "died":
        return "wrong", [("died", text.partition(": ")[2] + who), line]
    name, message = last_exception(text)
    if name == "NotImplementedError" and attempt.id in message:
        return "not finished", [line]
    if name in ("AssertionError", "Failed"):
        return "wrong", [*compared(message, text, who, attempt.compared), line]
    hangs = re.search(r"[Tt]imed? ?out", message)
    rows = [("hangs" if hangs else "raised", cut(f"{name}: {message}") + who)]
    if numbers and not own:
        rows.append(("in", attempt.at(numbers[-1])))
    return "hangs" if hangs else "wrong", [*rows, line]


def last_exception(text):
    """(name, message) of the exception that a traceback ends with."""
    lines = text.splitlines()
    frame = max((i for i, line in enumerate(lines) if line.startswith("  File ")), default=-1)
    rest = lines[frame + 1 :]
    at = next((i for i, line in enumerate(rest) if line and not line[0].isspace()), 0)
    name, _, message = "\n".join(rest[at:]).partition(": ")
    return name.strip().rpartition(".")[2], message or name


def compared(message, text, who, noted=None):
    """Rows of a failed assertion: its own words, then what was expected and what was found."""
    says, _, but = message.partition("assert ")
    rows = [("of", cut(says))] if says.strip() else []
    pair = re.findall(r"^ *(expected|found): (.*)", message, flags=re.M)
    if noted and re.search(r"where False = <function .*?compares at ", but):
        pair = [("expected", noted[0]), ("found", noted[1])]
    elif equal := re.search(r"where False = <.*?(?:equal|allclose).*?>\(", but):
        value, expected, *_ = arguments(but[equal.end() :])
        expected = "the same values" if expected == "?" else expected  # pytest has cut it
        pair = [("expected", cut(expected)), ("found", cut(value))]
    elif raises := re.search(r"DID NOT RAISE <class '(?:\w+\.)*(\w+)'>", message):
        pair = [("expected", f"a refusal, {raises[1]}"), ("found", "nothing was raised")]
    if not pair:
        demanded = re.findall(r"^    (?:assert|with) (.*)", text, flags=re.M) or ["this assertion"]
        value = cut((but or message).splitlines()[0])
        if demanded[-1].startswith("not "):
            what, value = f"{demanded[-1][4:]} is empty, 0 or False", value.removeprefix("not ")
        else:
            what = f"{demanded[-1]} is true"
        pair = [("expected", what), ("found", value)]
    return rows + [(label, value + who * (label == "found")) for label, value in pair]


def arguments(call):
    """The arguments of a call, from the text after its opening bracket."""
    depth, parts = 0, [""]
    for letter in call:
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            break
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [*parts, "?"]


def standing(stack, attempt):
    """Rows of where a process stands: in the chapter, and in the learner's lines."""
    who = re.match(r"rank \d+", stack)
    who = who[0] if who else "stands"
    frames = re.findall(rf'"{re.escape(attempt.file)}", line (\d+) in (\w+)', stack)
    if not frames:
        other = re.search(r'File "(?:.*/)?([^/"]+)", line (\d+) in (\w+)', stack)
        return [(who, f"in {other[3]}, {other[1]}:{other[2]}")] if other else []
    rows = [(who, f"in {frames[0][1]}, {attempt.at(int(frames[0][0]))}")]
    own = next((int(n) for n, _ in frames if attempt.is_learners(int(n))), None)
    if own and own != int(frames[0][0]):
        rows.append(("from", attempt.at(own)))
    return rows


# ── accounts ─────────────────────────────────────────────────────────────────────────────────


def predict(attempt):
    """Return the failure of an accounting answer at the first layout where it is wrong, or None."""
    account, names = attempt.question.account, {"math": math}
    try:
        exec(compile(attempt.text, attempt.file, "exec"), names)
        for layout in account["layouts"]:
            given = dict(zip(account["letters"], layout))
            found = names[attempt.id.replace(".", "_")](**given)
            expected = eval(account["truth"], vars(memory_math) | given)
            if found is ...:
                return "", "NotImplementedError", attempt.id, ""
            number = isinstance(found, int | float)
            if not number or not math.isclose(found, expected, rel_tol=1e-6):
                at = ", ".join(f"{letter} = {amount(value)}" for letter, value in given.items())
                return at, "Wrong", f"{amount(expected)}\n{amount(found)}", ""
    except Exception as error:
        return "", type(error).__name__, str(error), traceback.format_exc()


def amount(value):
    """A number as it is read: thousands in groups, and six digits of one that is not whole."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return repr(value)
    return f"{value:,.0f}" if value == int(value) or abs(value) > 1e5 else f"{value:,.6g}"


def mispredicted(failure, attempt):
    """(state, rows, traceback) of the failure of an accounting answer."""
    layout, kind, words, trace = failure
    line = "line", attempt.at(1)
    if kind == "NotImplementedError":
        return "not started", [], ""
    if kind == "Wrong":
        expected, found = words.split("\n")
        return "wrong", [("at", layout), ("expected", expected), ("found", found), line], ""
    if kind == "Hung":
        return "hangs", [("hangs", "the expression does not come to an end"), line], words
    return "wrong", [("raised", f"{kind}: {words}"), line], attempt.named(trace)
