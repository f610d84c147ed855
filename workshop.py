"""workshop · the exercises, cut from the chapters and graded by the project's own tests

Each chapter marks a few regions, and each is a question. An exercise file is the chapter with these
regions emptied, and with questions of accounting between its functions. There is no second copy of
anything: the answer is the chapter, and what grades an answer are the tests that hold the chapter.

    python workshop.py                     the chapters, their questions, and what to do next
    python workshop.py start 03            write exercises/03_tp.py; --question Q3.2: only that
    python workshop.py watch 03            grade the first open question again at each save
    python workshop.py check 03            grade all of it; without 03, all that was started
    python workshop.py hint Q3.2           a nudge
    python workshop.py show Q3.2           the chapter's lines beside yours
    python workshop.py reset Q3.2          empty it again; the file as it was is kept beside it

    start 03 --again       start over; the file as it was is kept beside it, with its date
    check 03 --trace       with the tracebacks       --json    for an instructor's eyes
    check 03 --timeout 30  seconds that ranks may wait for each other, 10 by default

A question is graded alone: the chapter, with only that question's lines replaced by yours. So an
open or wrong answer hides no other, and what is written outside the marks takes no part; a helper
belongs between them. All of a file at once: CHAPTERS=exercises python -m pytest -k tp
"""

import argparse
import ast
import faulthandler
import hashlib
import json
import math
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from pathlib import Path

import memory_math as mm

ROOT = Path(__file__).absolute().parent
EXERCISES = ROOT / "exercises"
PROGRESS = EXERCISES / ".progress.json"
MINUTES = {1: 5, 2: 10, 3: 20}  # by stars: planned, for whoever has just read the chapter
DONE = "solved", "given"

HEAD = re.compile(r"( *)# ([QA]\d\.\d+) (\*+) (.*)")
MORE = re.compile(r" *# {3,}(\S.*)")  # a comment that stands under the text of its head
TAIL = re.compile(r" *# /([QA]\d\.\d+) *")


# ── questions of accounting: what a layout sends, holds or waits, as an expression ───────────


@dataclass(frozen=True)
class Account:
    """A number to predict from `letters`. `answer` is the reference's expression, `truth` what
    memory_math says, and `layouts` the values of the letters at which both are compared."""

    id: str
    after: str  # the question of the chapter that it follows
    stars: int
    letters: str
    text: str
    hint: str
    answer: str
    truth: callable
    layouts: tuple


ACCOUNTS = (
    Account(
        "A1.1", "Q1.4", 1, "P, n, K",
        "n ranks hold P bytes of gradients each, and sum them as a ring once a step, after K "
        "micro-batches. How many bytes leave a rank in a step?",
        "a reduce-scatter, then an all-gather; each passes on all chunks but one",
        "2 * (n - 1) / n * P",
        lambda P, n, K: mm.ring_all_reduce_bytes(P, n),
        ((337_664, 4, 3), (4_000_000, 8, 1), (1_000, 1, 2)),
    ),
    Account(
        "A1.2", "Q1.6", 2, "P, n",
        "gather_and_broadcast sums P bytes over n ranks. How many times as long as the ring's is "
        "its busiest rank's sending, if links are all alike? (n > 1)",
        "rank 0 sends the sum to each of the others",
        "(n - 1) * P / (2 * (n - 1) / n * P)",
        lambda P, n: (n - 1) * P / mm.ring_all_reduce_bytes(P, n),
        ((1_000_000, 2), (1_000_000, 8), (4_096, 64)),
    ),
)  # fmt: skip


# ── chapters and exercise files are lines; a region is what stands between two marks ─────────


@dataclass
class Region:
    """A marked stretch of a file: line numbers from 0; `end` is None if its last mark is lost."""

    id: str
    stars: int
    words: list
    indent: str
    body: int
    end: int | None = None


@dataclass
class Question:
    """A question with its reference answer; `region` is its place in the chapter, if it has one."""

    id: str
    chapter: Path
    stars: int
    text: str
    hint: str
    answer: list
    region: Region | None = None
    account: Account | None = None

    @property
    def minutes(self):
        return MINUTES[self.stars]

    @property
    def exercise(self):
        return EXERCISES / self.chapter.name

    @property
    def shown(self):
        """The exercise file as the learner names it."""
        return f"{EXERCISES.name}/{self.chapter.name}"

    @property
    def heading(self):
        return f"{self.id} {'*' * self.stars:3}"

    def stub(self):
        """The lines that stand for an answer which is not there yet."""
        if self.account:
            return [f"{self.name} = lambda {self.account.letters}: ..."]
        pad = self.region.indent
        words = textwrap.wrap(f"{self.id} {self.text}", 88 - len(pad))
        quoted = lambda line: json.dumps(line, ensure_ascii=False)
        lines = [pad + "    " + quoted(line + " " * (line is not words[-1])) for line in words]
        return [f"{pad}raise NotImplementedError(", *lines, f"{pad})"]

    @property
    def name(self):
        return self.id.replace(".", "_")

    def marked(self, lines):
        """The region as an exercise file has it: question, lines, end mark; no hint."""
        first = f"{self.region.indent if self.region else ''}# {self.id} {'*' * self.stars} "
        rest = first[: first.index("#") + 1].ljust(len(first))
        head = textwrap.wrap(self.text, 100, initial_indent=first, subsequent_indent=rest)
        return [*head, *lines, f"{first[: first.index('#')]}# /{self.id}"]


def regions(lines):
    """{id: Region} of a file's lines."""
    found, last = {}, None
    for i, line in enumerate(lines):
        if head := HEAD.fullmatch(line):
            last = Region(head[2], len(head[3]), [head[4]], head[1], i + 1)
            found[last.id] = last
        elif last and last.body == i and (more := MORE.fullmatch(line)):
            last.words.append(more[1])
            last.body += 1
        elif last and (tail := TAIL.fullmatch(line)) and tail[1] == last.id:
            last.end, last = i, None
    return found


def questions(chapter):
    """The questions of a chapter in the order in which they build on each other."""
    lines, found = chapter.read_text().splitlines(), []
    for region in regions(lines).values():
        text, _, hint = " ".join(region.words).partition("hint: ")
        answer = lines[region.body : region.end]
        where = region.id, chapter, region.stars, text.strip(), hint
        found.append(Question(*where, answer, region))
    found.sort(key=lambda question: question.id)
    for account in reversed(ACCOUNTS):
        ids = [question.id for question in found]
        if account.after in ids:
            where = account.id, chapter, account.stars, account.text, account.hint
            name = account.id.replace(".", "_")
            answer = [f"{name} = lambda {account.letters}: {account.answer}"]
            at = ids.index(account.after) + 1
            found.insert(at, Question(*where, answer, account=account))
    return found


def chapters():
    return sorted(ROOT.glob("0[1-7]_*.py"))


def all_questions():
    return [question for chapter in chapters() for question in questions(chapter)]


def exercise(chapter, answers):
    """The text of an exercise file: the chapter with answers[id] in its regions, or else stubs."""
    text = chapter.read_text()
    lines, asked = text.splitlines(), questions(chapter)
    nodes, edits = ast.parse(text).body, []  # an edit: from, to, and the new lines
    for question in asked:
        new = question.marked(answers.get(question.id) or question.stub())
        if region := question.region:
            edits.append((region.body - len(region.words), region.end + 1, new))
        else:  # below the function with the question that it follows
            inside = next(q.region for q in asked if q.id == question.account.after)
            end = next(node.end_lineno for node in nodes if node.end_lineno > inside.body)
            edits.append((max(end, inside.end + 1),) * 2 + (["", "", *new],))
    for start, end, new in reversed(sorted(edits, key=lambda edit: edit[:2])):
        lines[start:end] = new
    return "\n".join(lines) + "\n"


def answers_in(path):
    """{id: lines} of every region of an exercise file that has both its marks."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = regions(lines).values()
    return {r.id: lines[r.body : r.end] for r in found if r.end is not None}


# ── progress: what was found of which lines, kept from one run to the next ───────────────────


def digest(lines):
    return hashlib.sha256("\n".join(line.strip() for line in lines).encode()).hexdigest()[:16]


def progress():
    """{id: [state, digest of the lines that it was found of]}; empty where there is none."""
    with suppress(OSError, ValueError):
        return dict(json.loads(PROGRESS.read_text()))
    return {}


def record(states):
    """Keep {id: (state, lines)} beside what is known of other questions."""
    known = progress() | {id: [state, digest(lines)] for id, (state, lines) in states.items()}
    write(PROGRESS, json.dumps(known, indent=1) + "\n")


def write(path, text):
    """Write a file whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def state_of(question, known, answers):
    """"not started", "marks lost", what the last check found of these lines, or "not checked"."""
    if not question.exercise.exists():
        return "not started"
    lines = answers.get(question.id)
    if lines is None:
        return "marks lost"
    if lines == question.stub():
        return "not started"
    state, of = known.get(question.id, (None, None))
    return state if of == digest(lines) else "not checked"


def states(asked):
    """{id: state} of questions, without running anything."""
    files = {question.exercise: answers_in(question.exercise) for question in asked}
    known = progress()
    return {q.id: state_of(q, known, files[q.exercise]) for q in asked}


# ── grading: the project's tests, on the chapter with one region replaced ────────────────────


@dataclass
class Verdict:
    """What grading found: a state, rows of (label, text) that explain it, and the traceback."""

    question: Question
    state: str
    rows: list = field(default_factory=list)
    trace: str = ""
    seconds: float = 0.0


class Attempt:
    """A learner's lines in the chapter's place for them, and whose which line then is."""

    def __init__(self, question, lines, start):
        self.question, self.id, self.lines, self.start = question, question.id, lines, start
        self.file, self.text, self.shown = "", "\n".join(lines), question.shown
        if region := question.region:
            whole = question.chapter.read_text().splitlines()
            whole[region.body : region.end] = lines
            self.text = "\n".join(whole) + "\n"

    @property
    def place(self):
        first, last = self.start + 1, self.start + len(self.lines)
        return f"{self.shown}:{first}" + f"-{last}" * (last > first)

    def owner(self, number):
        """(path, number) as a reader finds line `number`, from 1, of what is graded."""
        into = number - 1 - (self.question.region.body if self.question.region else 0)
        if 0 <= into < max(1, len(self.lines)):
            return self.shown, self.start + into + 1
        longer = len(self.lines) - len(self.question.answer)
        return self.question.chapter.name, number - longer * (into >= 0)

    def is_mine(self, number):
        return self.owner(number)[0] == self.shown

    def at(self, number):
        """A line as a reader finds it, with its text."""
        path, own = self.owner(number)
        return f"{path}:{own}  {self.text.splitlines()[number - 1].strip()}"

    def named(self, text):
        """A traceback whose lines are those of files that a reader can open."""
        owned = lambda match: 'File "{}", line {}'.format(*self.owner(int(match[1])))
        return re.sub(rf'File "{re.escape(self.file)}", line (\d+)', owned, text)

    def refused(self):
        """A Verdict on lines that do not compile, or None."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(self.text, "answer", "exec")
        except (SyntaxError, ValueError) as error:
            number = getattr(error, "lineno", None) or 0
            seen = 0 < number <= self.text.count("\n") + 1 and self.is_mine(number)
            rows = [("python", getattr(error, "msg", str(error)))]
            rows.append(("line", self.at(number) if seen else self.place))
            return Verdict(self.question, "does not parse", rows)


def attempt(question):
    """The learner's Attempt at a question, or the Verdict that needs no grading."""
    if not question.exercise.exists():
        return Verdict(question, "not started")
    lines = question.exercise.read_text().splitlines()
    region = regions(lines).get(question.id)
    if region is None or region.end is None:
        lost = f"# /{question.id}" if region else f"# {question.id} {'*' * question.stars} ..."
        says = f"{question.shown} has lost the line {lost}: write it back, or reset {question.id}"
        return Verdict(question, "marks lost", [("mark", says)])
    body = lines[region.body : region.end]
    if body == question.stub():
        return Verdict(question, "not started")
    tried = Attempt(question, body, region.body)
    return tried.refused() or tried


def examine(tried, folder, send, patience):
    """In a process of its own: send how many tests passed, and the first failure or None."""
    os.setsid()
    log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    with open(f"{folder}/stack", "w") as stack:
        if tried.question.account:
            faulthandler.dump_traceback_later(patience, exit=True, file=stack)
            send.send((1, predict(tried)))
        else:
            import examiner

            chapter = tried.question.chapter.name
            send.send(examiner.run(tried.id, chapter, folder, patience, stack))


def predict(tried):
    """The first layout at which an accounting answer is wrong, as a failure; or None."""
    account, names = tried.question.account, {"math": math}
    try:
        exec(compile(tried.text, tried.file, "exec"), names)
        for layout in account.layouts:
            given = dict(zip(account.letters.split(", "), layout))
            found, expected = names[tried.question.name](**given), account.truth(**given)
            if found is ...:
                return "", "NotImplementedError", "", ""
            number = isinstance(found, int | float) and not isinstance(found, bool)
            if not number or not math.isclose(found, expected, rel_tol=1e-6):
                at = ", ".join(f"{letter} = {amount(value)}" for letter, value in given.items())
                return at, "Wrong", f"{amount(expected)}\n{amount(found)}", ""
    except Exception as error:
        return "", type(error).__name__, str(error), traceback.format_exc()


def amount(value):
    """A number as it is read: thousands in groups, and six digits of a small one."""
    if not isinstance(value, int | float):
        return repr(value)
    return f"{value:,.0f}" if value == int(value) or abs(value) > 1e5 else f"{value:,.6g}"


def misjudged(failure, tried):
    """(state, rows, traceback) of an accounting answer's failure."""
    layout, kind, words, trace = failure
    line = "line", tried.at(1)
    if kind == "NotImplementedError":
        return "not started", [], ""
    if kind == "Wrong":
        expected, found = words.split("\n")
        return "wrong", [("at", layout), ("expected", expected), ("found", found), line], ""
    if kind == "Hung":
        return "hangs", [("hangs", "the expression does not come to an end"), line], words
    return "wrong", [("raised", f"{kind}: {words}"), line], tried.named(trace)


class Trial:
    """A question while it is graded, in a process group of its own that ends with it."""

    def __init__(self, tried, patience):
        self.tried, self.started = tried, time.monotonic()
        self.folder = tempfile.TemporaryDirectory()
        tried.file = f"{self.folder.name}/{tried.question.chapter.name}"
        Path(tried.file).write_text(tried.text)
        self.answer, send = get_context("fork").Pipe(duplex=False)
        given = tried, self.folder.name, send, patience
        self.process = get_context("fork").Process(target=examine, args=given)
        self.process.start()
        send.close()

    def verdict(self):
        """Wait for the end of it; a Verdict."""
        verdict = Verdict(self.tried.question, "solved")
        try:
            passed, failure = self.answer.recv()
        except EOFError:  # ended by its own time-out, or by the learner's lines
            test, _, stack = Path(self.folder.name, "stack").read_text().partition("\n")
            passed, failure = 0, (test, "Hung", stack, "")
        if failure and self.tried.question.account:
            verdict.state, verdict.rows, verdict.trace = misjudged(failure, self.tried)
        elif failure:
            import examiner

            verdict.state, verdict.rows, verdict.trace = examiner.explain(failure, self.tried)
        elif not passed:
            verdict.state, verdict.rows = "not graded", [("tests", f"none marks {self.tried.id}")]
        verdict.seconds = time.monotonic() - self.started
        self.stop()
        return verdict

    def stop(self):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.answer.close()
        self.folder.cleanup()


def ready_to_grade():
    """Load what the tests need, once: the process of each question is forked from this one."""
    os.environ.pop("CHAPTERS", None)
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    try:
        import examiner  # noqa: F401
    except ImportError as error:
        raise Refused(f"{error}: python -m pip install -r requirements.txt") from error


def grade(attempts, patience, at_once=os.cpu_count() or 1):
    """Yield the Verdict of each attempt (or Verdict), in order, a few at a time."""
    if any(isinstance(tried, Attempt) and tried.question.region for tried in attempts):
        ready_to_grade()
    trials, waiting, done = {}, list(enumerate(attempts)), {}
    try:
        for i in range(len(attempts)):
            while i not in done:
                while waiting and len(trials) < at_once:
                    k, tried = waiting.pop(0)
                    if isinstance(tried, Verdict):
                        done[k] = tried
                    else:
                        trials[k] = Trial(tried, patience)
                ready = connection.wait([t.answer for t in trials.values()]) if trials else []
                for k in [k for k, trial in trials.items() if trial.answer in ready]:
                    done[k] = trials.pop(k).verdict()
            yield done[i]
    finally:
        for trial in trials.values():
            trial.stop()


# ── what the terminal shows ──────────────────────────────────────────────────────────────────

COLOURS = {"solved": 32, "given": 32, "wrong": 31, "hangs": 31, "does not parse": 31}


def paint(word, text=None):
    """A text in the colour of a state, where colours are seen."""
    text = word if text is None else text
    code = COLOURS.get(word.strip())
    plain = not code or not sys.stdout.isatty() or "NO_COLOR" in os.environ
    return text if plain else f"\033[{code}m{text}\033[0m"


def shown(verdict, trace=False):
    """The lines of a verdict."""
    question = verdict.question
    lines = [f"  {question.heading}  {paint(verdict.state)}"]
    if verdict.state not in (*DONE, "not started"):
        lines += textwrap.wrap(question.text, 92, initial_indent="    ", subsequent_indent="    ")
        for label, text in verdict.rows:
            lines.append(f"    {label:9} {text}")
    if trace and verdict.trace:
        lines += ["", textwrap.indent(verdict.trace.rstrip(), "    "), ""]
    return "\n".join(lines)


def bar(asked, now, width=24):
    """A progress bar over questions in their states."""
    done = sum(now[question.id] in DONE for question in asked)
    full = round(width * done / len(asked))
    return f"[{'#' * full}{'.' * (width - full)}] {done} of {len(asked)}"


def beside(question, lines):
    """The chapter's lines beside the learner's, or above them where the terminal is narrow."""
    flush = lambda part: textwrap.dedent("\n".join(part)).splitlines()
    yours, ours = flush(lines), flush(question.answer)
    left, right = (max(map(len, part), default=0) for part in (yours, ours))
    titles = str(question.exercise.relative_to(ROOT)), question.chapter.name
    if left + right + 3 > shutil.get_terminal_size((100, 24)).columns:
        parts = [[f"── {title}", *part] for title, part in zip(titles, (yours, ours))]
        return "\n".join([*parts[0], "", *parts[1]])
    left = max(left, len(titles[0]))
    rows = [titles, ("─" * left, "─" * right)]
    height = max(len(yours), len(ours))
    rows += zip(yours + [""] * (height - len(yours)), ours + [""] * (height - len(ours)))
    return "\n".join(f"{a:{left}} │ {b}".rstrip() for a, b in rows)


def next_step(asked, now):
    """A line that says what to do."""
    open_ = [question for question in asked if now[question.id] not in DONE]
    if not open_:
        return "everything is solved"
    first, number = open_[0], open_[0].chapter.name[:2]
    if not first.exercise.exists():
        return f"next: read {first.chapter.name}, then python workshop.py start {number}"
    return f"next: {first.id}, with python workshop.py watch {number}"


def table():
    """The questions as Markdown, for WORKSHOP.md."""
    rows = ["| | stars | minutes | question |", "|---|---|---|---|"]
    for chapter in chapters():
        asked = questions(chapter)
        total = sum(question.minutes for question in asked)
        rows.append(f"| **{chapter.name}** | | {total} | |")
        for q in asked:
            text = q.text.replace("|", "\\|").replace("*", "\\*")
            rows.append(f"| {q.id} | {q.stars} | {q.minutes} | {text} |")
    return "\n".join(rows)


# ── commands ─────────────────────────────────────────────────────────────────────────────────


class Refused(Exception):
    """What cannot be done, in a sentence."""


def find(word, asked):
    """The questions that a word names: those of a chapter ("03", "3", "03_tp"), or one ("Q3.2")."""
    known = [question for question in asked if question.id.lower() == word.lower()]
    if not known and re.fullmatch(r"0?[1-7](_\w+)?(\.py)?", word):
        number = word.lstrip("0")[0]
        known = [q for q in asked if q.chapter.name[1] == number]
    if not known:
        names = ", ".join(chapter.name[:2] for chapter in chapters())
        raise Refused(f"{word}: neither a question, such as Q1.2, nor a chapter: {names}")
    return known


def one(word, asked):
    """The question that a word names; a chapter's name means its first open one."""
    found = find(word, asked)
    now = states(found)
    return next((q for q in found if now[q.id] not in DONE), found[0])


def overview(asked):
    """List what there is and what is solved."""
    now = states(asked)
    for chapter in chapters():
        own = [question for question in asked if question.chapter == chapter]
        if own:
            print(f"{chapter.name:22} {bar(own, now)}")
        for q in own:
            print(f"  {q.heading}  {paint(now[q.id], f'{now[q.id]:11}')}  {q.minutes:2} min  "
                  f"{textwrap.shorten(q.text, 100, placeholder=' ...')}")  # fmt: skip
    print(next_step(asked, now))
    return 0


def set_aside(path):
    """Move a learner's file to a name with the date. Returns that name."""
    aside = path.with_name(f"{path.name}.{time.strftime('%Y-%m-%d_%H.%M.%S')}")
    while aside.exists():
        aside = aside.with_name(aside.name + "_")
    path.rename(aside)
    return aside.relative_to(ROOT)


def start(asked, only, again):
    """Write an exercise file."""
    path, chapter = asked[0].exercise, asked[0].chapter
    shown_path = path.relative_to(ROOT)
    if only and only not in asked:
        raise Refused(f"--question {only.id} is not one of {chapter.name}")
    if path.exists() and not again:
        raise Refused(
            f"{shown_path} is there already: start {chapter.name[:2]} --again begins anew and "
            f"keeps a dated copy; reset {(only or asked[0]).id} empties one question"
        )
    if path.exists():
        print(f"{set_aside(path)} is {shown_path} as it was")
    given = [question for question in asked if only and question is not only]
    write(path, exercise(chapter, {question.id: question.answer for question in given}))
    record({question.id: ("given", question.answer) for question in given})
    left = [only] if only else asked
    minutes = sum(question.minutes for question in left)
    print(f"wrote {shown_path}: {len(left)} to answer, about {minutes} minutes")
    print(f"next: python workshop.py watch {chapter.name[:2]}")
    return 0


def reset(question):
    """Empty one question; all other answers stay."""
    path = question.exercise
    if not path.exists():
        raise Refused(f"{path.relative_to(ROOT)} is not there: start {question.chapter.name[:2]}")
    answers = answers_in(path)
    answers.pop(question.id, None)
    print(f"{set_aside(path)} is {path.relative_to(ROOT)} as it was")
    write(path, exercise(question.chapter, answers))
    print(f"{question.id} is empty again")
    return 0


def check(asked, patience, trace=False, as_json=False):
    """Grade questions; 0 if all are solved."""
    now = states(asked)
    given = lambda q: Verdict(q, "given") if now[q.id] == "given" else attempt(q)
    verdicts, chapter = [], None
    for verdict in grade([given(question) for question in asked], patience):
        keep(verdict)
        verdicts.append(verdict)
        if not as_json:
            if verdict.question.chapter != chapter:
                chapter = verdict.question.chapter
                print(verdict.question.exercise.relative_to(ROOT))
                warn_outside(verdict.question)
            print(shown(verdict, trace), flush=True)
    now = {verdict.question.id: verdict.state for verdict in verdicts}
    if as_json:
        print(json.dumps([as_record(verdict) for verdict in verdicts], indent=1))
    else:
        print(f"{bar(asked, now)}   {next_step(asked, now)}")
    return int(any(state not in DONE for state in now.values()))


def keep(verdict):
    """Note what was found of a learner's lines."""
    lines = answers_in(verdict.question.exercise).get(verdict.question.id)
    if lines is not None:
        record({verdict.question.id: (verdict.state, lines)})


def as_record(verdict):
    q = verdict.question
    what = dict(question=q.id, chapter=q.chapter.name, stars=q.stars, minutes=q.minutes)
    return what | dict(state=verdict.state, seconds=round(verdict.seconds, 1)) | dict(verdict.rows)


def warn_outside(question):
    """Say where a learner's file differs from the chapter outside the marks."""
    path = question.exercise
    if path.exists() and path.read_text() != exercise(question.chapter, answers_in(path)):
        print(f"  note: outside the marks it is not {question.chapter.name} any more; only what "
              "stands between them is graded")  # fmt: skip


@contextmanager
def keys():
    """A function that returns the next key within so many seconds, or None; "" at end of input.
    From a terminal it needs no Enter."""
    terminal = sys.stdin.isatty()
    if terminal:
        import termios
        import tty

        before = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin)

    def key(seconds, *also):
        ready, _, _ = select.select([sys.stdin.fileno(), *also], [], [], seconds)
        if sys.stdin.fileno() not in ready:
            return None
        return os.read(sys.stdin.fileno(), 1).decode(errors="ignore")

    try:
        yield key
    finally:
        if terminal:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class Watch:
    """`watch`: grade the first open question of a chapter again at each save of its file."""

    HELP = "h hint · l list · c check all · s show the chapter's lines · r reset · q quit"

    def __init__(self, asked, patience):
        self.asked, self.patience = asked, patience
        self.path, self.trial, self.seen = asked[0].exercise, None, None
        if not self.path.exists():
            number = asked[0].chapter.name[:2]
            raise Refused(f"{self.path.relative_to(ROOT)} is not there: start {number}")
        ready_to_grade()
        self.question = self.first_open()

    def first_open(self):
        now = states(self.asked)
        return next((q for q in self.asked if now[q.id] not in DONE), None)

    def saved(self):
        """Whether the file changed since the last call."""
        with suppress(OSError):  # an editor may be replacing it
            stat = self.path.stat()
            before, self.seen = self.seen, (stat.st_mtime_ns, stat.st_size)
            return before != self.seen
        return False

    def begin(self):
        """Grade the question as the file has it now; what was running is out of date."""
        self.end()
        tried = attempt(self.question)
        if isinstance(tried, Verdict):
            self.tell(tried)
        else:
            self.trial = Trial(tried, self.patience)

    def end(self):
        if self.trial:
            self.trial.stop()
            self.trial = None

    def tell(self, verdict):
        """Show a verdict, and what can be done now."""
        keep(verdict)
        if sys.stdout.isatty():
            print("\033[2J\033[H", end="")
        print(f"{self.path.relative_to(ROOT)}   {bar(self.asked, states(self.asked))}\n")
        if verdict.state == "not started":
            print(textwrap.fill(f"{self.question.heading}  {self.question.text}", 96))
            print(f"\nanswer it between its marks in {self.path.relative_to(ROOT)}, and save")
        else:
            print(shown(verdict))
        if verdict.state == "solved":
            self.show()
            print("\nn next · " + self.HELP, flush=True)
        else:
            print("\n" + self.HELP, flush=True)

    def show(self):
        print("\n" + beside(self.question, answers_in(self.path).get(self.question.id, [])))

    def press(self, key):
        """Do what a key asks for; True if it is to quit."""
        if key in ("q", "", "\x04"):
            return True
        if key == "h":
            print(f"hint: {self.question.hint}", flush=True)
        elif key == "l":
            overview(self.asked)
        elif key == "c":
            self.end()
            check(self.asked, self.patience)
        elif key == "s":
            self.show()
        elif key == "r":
            self.end()
            reset(self.question)
        elif key == "n" and states([self.question])[self.question.id] in DONE:
            self.question = self.first_open()
            if self.question is None:
                print(f"all of {self.path.relative_to(ROOT)} is solved", flush=True)
                return True
            self.seen = None

    def run(self):
        """Until q, or until all is solved."""
        if self.question is None:
            print(f"all of {self.path.relative_to(ROOT)} is solved")
            return 0
        try:
            with keys() as key:
                while True:
                    if self.saved():
                        self.begin()
                    pressed = key(0.2, *([self.trial.answer] if self.trial else []))
                    if self.trial and self.trial.answer.poll():
                        trial, self.trial = self.trial, None
                        self.tell(trial.verdict())
                    if pressed is not None and self.press(pressed):
                        return 0
        except KeyboardInterrupt:
            return 0
        finally:
            self.end()


def build_parser():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    add = lambda name, help: commands.add_parser(name, help=help)
    starts = add("start", "write a chapter's exercise file")
    starts.add_argument("what", metavar="CHAPTER")
    starts.add_argument("--question", metavar="Q3.2", help="empty only this one")
    starts.add_argument("--again", action="store_true", help="start over, keeping a dated copy")
    checks = add("check", "grade a chapter, a question, or all that was started")
    checks.add_argument("what", metavar="CHAPTER", nargs="?")
    checks.add_argument("--json", action="store_true", help="for programs")
    checks.add_argument("--trace", action="store_true", help="with tracebacks")
    watches = add("watch", "grade the first open question at each save")
    watches.add_argument("what", metavar="CHAPTER")
    for graded in checks, watches:
        graded.add_argument("--timeout", type=float, default=10, help="seconds ranks may wait")
    for name, help in (("hint", "a nudge"), ("show", "the chapter's lines beside yours"),
                       ("reset", "empty a question again")):  # fmt: skip
        add(name, help).add_argument("what", metavar="QUESTION")
    add("table", "all questions, as WORKSHOP.md has them")
    return parser


def run(args):
    """Do what was asked; the exit status."""
    asked = all_questions()
    if args.command is None:
        return overview(asked)
    if args.command == "table":
        print(table())
        return 0
    if args.command == "check":
        given = find(args.what, asked) if args.what else [q for q in asked if q.exercise.exists()]
        if not given:
            raise Refused("nothing was started yet: python workshop.py start 01")
        return check(given, args.timeout, args.trace, args.json)
    if args.command == "start":
        only = one(args.question, asked) if args.question else None
        return start(find(args.what, asked), only, args.again)
    if args.command == "watch":
        return Watch(find(args.what, asked), args.timeout).run()
    question = one(args.what, asked)
    if args.command == "reset":
        return reset(question)
    print(textwrap.fill(f"{question.heading}  {question.text}", 96))
    if args.command == "hint":
        print(f"hint: {question.hint}")
    else:
        print("\n" + beside(question, answers_in(question.exercise).get(question.id, [])))
    return 0


def main(argv=None):
    try:
        return run(build_parser().parse_args(argv))
    except Refused as refused:
        print(refused, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
