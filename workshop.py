"""workshop · the exercises, cut from the chapters and graded by the project's own tests

Each chapter marks a few regions; each is a question. An exercise file is the chapter with those
regions empty, and with questions of accounting between its functions. There is no second copy of
anything: the answer is the chapter's, and what grades yours are the tests that hold the chapter.

    python workshop.py                  the chapters, their questions, and what to do next
    python workshop.py start 03         write exercises/03_tp.py; with --question Q3.2, only that
    python workshop.py watch 03         grade the first open question at each save
    python workshop.py check 03         grade a chapter, a question, or all that was started
    python workshop.py hint Q3.2        a nudge
    python workshop.py show Q3.2        the chapter's lines beside yours
    python workshop.py reset Q3.2       empty it again; all other answers stay

    start 03 --again        start over; the file as it was is kept beside it, with the date
    check --trace           with tracebacks           check --json    for an instructor
    check --timeout 30      seconds that ranks may wait for each other, 15 by default

An answer that does not pass beside your others is graded alone: in the chapter, with only that
question's lines replaced by yours. So a wrong answer hides no other. What is written outside the
marks takes no part; put a helper between them. The whole of a file at once, as it is:
CHAPTERS=exercises python -m pytest -k tp
"""

import argparse
import ast
import hashlib
import importlib
import json
import os
import re
import select
import shutil
import signal
import sys
import textwrap
import time
import tomllib
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).absolute().parent
EXERCISES = ROOT / "exercises"
PROGRESS = EXERCISES / ".progress.json"
MINUTES = {1: 5, 2: 10, 3: 20}  # by stars: planned for a reader who has just read the chapter
DONE = "solved", "given"


class Refused(Exception):
    """What cannot be done, in a sentence."""


# ── questions: regions of a chapter, and accounts between them ───────────────────────────────

HEAD = re.compile(r"( *)# ([QA]\d\.\d+) (\*+) (.*)")
MORE = re.compile(r" *# {3,}(\S.*)")  # a comment that stands under the text of its head
TAIL = re.compile(r" *# /([QA]\d\.\d+) *")


@dataclass
class Region:
    """A marked stretch of a file: its head, its lines [body, end) from 0, and its end mark, which
    a learner may have lost: `end` is None then."""

    id: str
    stars: int
    words: list
    indent: str
    body: int
    end: int | None = None


def regions(lines):
    """{id: Region} of a file's lines."""
    found, last = {}, None
    for i, line in enumerate(lines):
        if head := HEAD.fullmatch(line):
            last = found[head[2]] = Region(head[2], len(head[3]), [head[4]], head[1], i + 1)
        elif last and last.body == i and (more := MORE.fullmatch(line)):
            last.words.append(more[1])
            last.body += 1
        elif last and (tail := TAIL.fullmatch(line)) and tail[1] == last.id:
            last.end, last = i, None
    return found


@dataclass
class Question:
    """A question and the chapter's answer, a list of lines. A question of code has a region of the
    chapter; one of accounting has an account, as tests/accounts.toml describes it."""

    id: str
    chapter: Path
    stars: int
    text: str
    hint: str
    answer: list
    region: Region | None = None
    account: dict | None = None

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

    @property
    def stub(self):
        """The lines that stand where no answer is yet."""
        if self.account:
            return [bound(self.id, self.account, "...")]
        pad = self.region.indent
        words = textwrap.wrap(f"{self.id} {self.text}", 88 - len(pad), drop_whitespace=False)
        quoted = [f"{pad}    {json.dumps(line, ensure_ascii=False)}" for line in words]
        return [f"{pad}raise NotImplementedError(", *quoted, f"{pad})"]

    def marked(self, lines):
        """A region as an exercise file has it: the question, lines, the end mark; no hint."""
        pad = self.region.indent if self.region else ""
        first = f"{pad}# {self.id} {'*' * self.stars} "
        rest = f"{pad}#".ljust(len(first))
        pads = dict(initial_indent=first, subsequent_indent=rest)
        head = textwrap.wrap(self.text, 100, break_on_hyphens=False, **pads)
        return [*head, *lines, f"{pad}# /{self.id}"]


def bound(id, account, expression):
    """The line that answers a question of accounting."""
    return f"{id.replace('.', '_')} = lambda {', '.join(account['letters'])}: {expression}"


def chapters():
    """Paths of the chapters that have questions, in their order."""
    return sorted(ROOT.glob("0[1-7]_*.py"))


def questions(chapter):
    """A chapter's questions, in the order in which they build on each other."""
    lines, found = chapter.read_text().splitlines(), []
    for region in sorted(regions(lines).values(), key=lambda region: region.id):
        text, _, hint = " ".join(region.words).partition("hint: ")
        answer = lines[region.body : region.end]
        what = region.id, chapter, region.stars, text.strip(), hint, answer
        found.append(Question(*what, region=region))
    accounts = tomllib.loads((ROOT / "tests/accounts.toml").read_text())
    for id, account in reversed(accounts.items()):
        ids = [question.id for question in found]
        if account["after"] in ids:
            answer = [bound(id, account, account["answer"])]
            what = id, chapter, account["stars"], account["text"], account["hint"], answer
            found.insert(ids.index(account["after"]) + 1, Question(*what, account=account))
    return found


# ── exercise files ───────────────────────────────────────────────────────────────────────────


def exercise(chapter, answers):
    """The text of an exercise file: the chapter with answers[id] in its regions, or else stubs."""
    text, asked = chapter.read_text(), questions(chapter)
    lines, nodes, edits = text.splitlines(), ast.parse(text).body, []
    for question in asked:
        new = question.marked(answers.get(question.id) or question.stub)
        if region := question.region:
            edits.append((region.body - len(region.words), region.end + 1, new))
        else:  # below the function that holds the question which it follows
            inside = next(q.region for q in asked if q.id == question.account["after"])
            end = next(node.end_lineno for node in nodes if node.end_lineno > inside.body)
            below = max(end, inside.end + 1)
            edits.append((below, below, ["", "", *new]))
    for start, end, new in reversed(sorted(edits, key=lambda edit: edit[:2])):
        lines[start:end] = new
    return "\n".join(lines) + "\n"


def answers_in(path):
    """{id: lines} of every region of an exercise file that has both its marks."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = regions(lines).values()
    return {r.id: lines[r.body : r.end] for r in found if r.end is not None}


def write(path, text):
    """Write a file whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def set_aside(path):
    """Give a learner's file a name with the date, and say which."""
    aside = path.with_name(f"{path.name}.{time.strftime('%Y-%m-%d_%H.%M.%S')}")
    while aside.exists():
        aside = aside.with_name(aside.name + "_")
    path.rename(aside)
    print(f"{path.parent.name}/{aside.name} is your file as it was")


# ── progress: what was found of which lines, kept from one run to the next ───────────────────


def digest(question, lines):
    """What a verdict on lines hangs on: they, the chapter around them, and its tests."""
    found = hashlib.sha256("\n".join(map(str.strip, lines)).encode())
    tests = sorted((ROOT / "tests").glob(f"test_{question.chapter.name[:2]}_*.py"))
    for path in (question.chapter, *tests, ROOT / "tests/accounts.toml"):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def progress():
    """{id: [state, digest of the lines of which it was found]}; empty if nothing can be read."""
    with suppress(OSError, ValueError):
        return dict(json.loads(PROGRESS.read_text()))
    return {}


def record(state, answers):
    """Keep a state of answers, (question, lines), beside what is known of others."""
    known = progress() | {q.id: [state, digest(q, lines)] for q, lines in answers}
    write(PROGRESS, json.dumps(known, indent=1) + "\n")


def states(asked):
    """{id: state} without grading: what the last check found, if the lines are still the same."""
    known, now = progress(), {}
    answers = {path: answers_in(path) for path in {question.exercise for question in asked}}
    for q in asked:
        lines = answers[q.exercise].get(q.id)
        state, of = known.get(q.id, ("", ""))
        if not q.exercise.exists() or lines == q.stub:
            now[q.id] = "not started"
        elif lines is None:
            now[q.id] = "mark lost"
        else:
            now[q.id] = state if of == digest(q, lines) else "not checked"
    return now


# ── an answer in its place ───────────────────────────────────────────────────────────────────


@dataclass
class Verdict:
    """What was found of an answer: a state, rows of (label, text) that explain it, a traceback."""

    question: Question
    state: str
    rows: list = field(default_factory=list)
    trace: str = ""
    seconds: float = 0.0


def placed(chapter, answers):
    """A chapter's text with lines in some of its regions: answers are pairs (region, lines)."""
    whole = chapter.read_text().splitlines()
    for region, lines in sorted(answers, key=lambda pair: -pair[0].body):
        whole[region.body : region.end] = lines
    return "\n".join(whole) + "\n"


class Attempt:
    """A learner's lines, from line `start` of their file, in the chapter's place for them."""

    def __init__(self, question, lines, start):
        self.question, self.id, self.lines, self.start = question, question.id, lines, start
        self.text, self.above, self.file = "\n".join(lines) + "\n", 0, ""
        self.ids = [question.id]
        if region := question.region:
            self.text, self.above = placed(question.chapter, [(region, lines)]), region.body

    @property
    def place(self):
        """The learner's lines, as a reader finds them."""
        first, last = self.start + 1, self.start + len(self.lines)
        return f"{self.question.shown}:{first}" + f"-{last}" * (last > first)

    def is_mine(self, number):
        """Whether line `number`, from 1, of what is graded is the learner's."""
        return 0 <= number - 1 - self.above < len(self.lines)

    def owner(self, number):
        """(path, number) of the file in which a reader finds that line."""
        if self.is_mine(number):
            return self.question.shown, number - self.above + self.start
        longer = len(self.lines) - len(self.question.answer)
        return self.question.chapter.name, number - longer * (number > self.above)

    def at(self, number):
        """A line as a reader finds it, with its text."""
        path, own = self.owner(number)
        return f"{path}:{own}  {self.text.splitlines()[number - 1].strip()}"

    def named(self, text):
        """A traceback with the lines of files that a reader can open."""
        owned = lambda match: 'File "{}", line {}'.format(*self.owner(int(match[1])))
        return re.sub(rf'File "{re.escape(self.file)}", line (\d+)', owned, text)

    def refused(self):
        """A Verdict on lines that do not compile, or None."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(self.text, "answer", "exec")
        except (SyntaxError, ValueError) as error:  # ValueError: a null byte
            number = getattr(error, "lineno", None) or 0
            line = self.at(number) if self.is_mine(number) else self.place
            rows = [("python", getattr(error, "msg", str(error))), ("line", line)]
            return Verdict(self.question, "does not parse", rows)


def attempt(question):
    """The learner's Attempt at a question, or a Verdict where there is nothing to run."""
    if not question.exercise.exists():
        return Verdict(question, "not started")
    lines = question.exercise.read_text().splitlines()
    region = regions(lines).get(question.id)
    if region is None or region.end is None:
        lost = f"# /{question.id}" if region else f"# {question.id} {'*' * question.stars} ..."
        says = f"{question.shown} has lost the line {lost}: write it back, or reset {question.id}"
        return Verdict(question, "mark lost", [("mark", says)])
    tried = Attempt(question, lines[region.body : region.end], region.body)
    if tried.lines == question.stub:
        return Verdict(question, "not started")
    return tried.refused() or tried


# ── grading ──────────────────────────────────────────────────────────────────────────────────


def examiner():
    """tests/examiner.py, loaded by who grades: it needs what the tests need."""
    if "examiner" not in sys.modules:
        os.environ.pop("CHAPTERS", None)
        sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    try:
        return importlib.import_module("examiner")
    except ImportError as error:
        raise Refused(f"{error}: python -m pip install -r requirements.txt") from error


def hold_together(attempts, patience):
    """The ids of answers that pass all their tests with the others of their chapter in place."""
    by_chapter, solved = {}, set()
    for tried in attempts:
        if isinstance(tried, Attempt) and tried.question.region:
            by_chapter.setdefault(tried.question.chapter, []).append(tried)
    for chapter, several in by_chapter.items():
        if len(several) > 1:
            text = placed(chapter, [(tried.question.region, tried.lines) for tried in several])
            ids = [tried.id for tried in several]
            all_of_it = SimpleNamespace(text=text, ids=ids, question=several[0].question)
            solved |= examiner().Trial(all_of_it, patience).found()[0]
    return solved


def grade(attempts, patience, together=True):
    """Yield a Verdict of each attempt, in their order. Each is tried alone, with one process to a
    core at a time, unless it holds together with the others, which takes each test only once."""
    solved = hold_together(attempts, patience) if together else ()
    done = {i: tried for i, tried in enumerate(attempts) if isinstance(tried, Verdict)}
    for i, tried in enumerate(attempts):
        if i not in done and tried.id in solved:
            done[i] = Verdict(tried.question, "solved")
    waiting = [i for i in range(len(attempts)) if i not in done]
    trials = {}
    try:
        for i in range(len(attempts)):
            while i not in done:
                while waiting and len(trials) < (os.cpu_count() or 1):
                    k = waiting.pop(0)
                    trials[k] = examiner().Trial(attempts[k], patience)
                ready = connection.wait([trial.answer for trial in trials.values()])
                for k in [k for k, trial in trials.items() if trial.answer in ready]:
                    done[k] = Verdict(attempts[k].question, *trials.pop(k).result())
            yield done[i]
    finally:
        for trial in trials.values():
            trial.stop()


def keep(verdict):
    """Note what was found of the lines in a learner's file, and pass it on."""
    lines = answers_in(verdict.question.exercise).get(verdict.question.id)
    if lines is not None:
        record(verdict.state, [(verdict.question, lines)])
    return verdict


# ── what the terminal shows ──────────────────────────────────────────────────────────────────

GREEN, RED = 32, 31
COLOURS = dict.fromkeys(DONE, GREEN) | dict.fromkeys(["wrong", "hangs", "does not parse"], RED)


def paint(state, width=0):
    """A state in its colour, where colours are seen."""
    plain = state not in COLOURS or not sys.stdout.isatty() or "NO_COLOR" in os.environ
    padded = state.ljust(width)
    return padded if plain else f"\033[{COLOURS[state]}m{padded}\033[0m"


def told(verdict, trace=False):
    """The lines that tell a verdict."""
    question, lines = verdict.question, []
    if verdict.rows:
        lines += textwrap.wrap(question.text, 92)
        lines += [f"{label:9} {text}" for label, text in verdict.rows]
    if trace and verdict.trace:
        lines += ["", *verdict.trace.rstrip().splitlines(), ""]
    head = f"  {question.heading}  {paint(verdict.state)}"
    return "\n".join([head, *(f"    {line}".rstrip() for line in lines)])


def bar(now, width=24):
    """A progress bar over {id: state}."""
    done = sum(state in DONE for state in now.values())
    full = width * done // len(now)
    return f"[{'#' * full}{'.' * (width - full)}] {done} of {len(now)}"


def beside(question):
    """The chapter's lines beside the learner's, or below them where the terminal is narrow."""
    given = answers_in(question.exercise).get(question.id, ["(nothing yet)"])
    flush = lambda lines: textwrap.dedent("\n".join(lines)).splitlines()
    yours = [question.shown, "", *flush(given)]
    ours = [question.chapter.name, "", *flush(question.answer)]
    left, right = (max(map(len, part)) for part in (yours, ours))
    if left + right + 3 > shutil.get_terminal_size((100, 24)).columns:
        return "\n".join(["", *yours, "", *ours])
    height = max(len(yours), len(ours))
    yours, ours = (part + [""] * (height - len(part)) for part in (yours, ours))
    return "\n".join(["", *(f"{a:{left}} │ {b}".rstrip() for a, b in zip(yours, ours))])


def next_step(asked, now):
    """What to do, in a line."""
    first = next((question for question in asked if now[question.id] not in DONE), None)
    if first is None:
        return "all of it is solved"
    number = first.chapter.name[:2]
    if not first.exercise.exists():
        return f"next: read {first.chapter.name}, then python workshop.py start {number}"
    return f"next: {first.id}, with python workshop.py watch {number}"


# ── commands ─────────────────────────────────────────────────────────────────────────────────


def find(word):
    """The questions that a word names: one ("Q3.2"), or those of a chapter ("03", "03_tp.py")."""
    asked = [question for chapter in chapters() for question in questions(chapter)]
    named = [question for question in asked if question.id.lower() == word.lower()]
    if not named and (chapter := re.fullmatch(r"(0[1-7])(_\w+)?(\.py)?", word)):
        named = [question for question in asked if question.chapter.name.startswith(chapter[1])]
    if not named:
        known = ", ".join(chapter.name[:2] for chapter in chapters())
        raise Refused(f"{word} is no question, such as Q1.2, and no chapter: {known}")
    return named


def first_open(asked):
    """The first question that is not solved, or None."""
    now = states(asked)
    return next((question for question in asked if now[question.id] not in DONE), None)


def overview(asked):
    """List questions, and what is solved."""
    now = states(asked)
    for chapter in chapters():
        own = [question for question in asked if question.chapter == chapter]
        if own:
            print(f"{chapter.name:22}{bar({question.id: now[question.id] for question in own})}")
        for q in own:
            text = textwrap.shorten(q.text, 80, placeholder=" ...")
            print(f"  {q.heading}  {paint(now[q.id], 14)}  {q.minutes:2} min  {text}")
    print(next_step(asked, now))
    return 0


def table(asked):
    """Print the questions as Markdown, for WORKSHOP.md."""
    print("| question | stars | minutes | |\n|---|---|---|---|")
    for q in asked:
        print(f"| {q.id} | {q.stars} | {q.minutes} | {q.text.replace('|', chr(92) + '|')} |")
    return 0


def start(asked, only, again):
    """Write a chapter's exercise file."""
    path, number = asked[0].exercise, asked[0].chapter.name[:2]
    if path.exists() and not again:
        raise Refused(
            f"{asked[0].shown} is there already: start {number} --again starts over and keeps a "
            f"dated copy; reset {asked[0].id} empties one question"
        )
    if path.exists():
        set_aside(path)
    given = [question for question in asked if only and question.id != only]
    write(path, exercise(asked[0].chapter, {question.id: question.answer for question in given}))
    record("given", [(question, question.answer) for question in given])
    minutes = sum(question.minutes for question in asked if question not in given)
    print(f"wrote {asked[0].shown}: {len(asked) - len(given)} to answer, some {minutes} minutes")
    print(f"next: python workshop.py watch {number}")
    return 0


def reset(question):
    """Empty one question; all other answers stay."""
    path = question.exercise
    if not path.exists():
        raise Refused(f"{question.shown} is not there: start {question.chapter.name[:2]}")
    answers = answers_in(path)
    answers.pop(question.id, None)
    set_aside(path)
    write(path, exercise(question.chapter, answers))
    print(f"{question.id} is empty again")
    return 0


def check(asked, patience, trace=False, as_json=False):
    """Grade questions, but not again what is as it was when it was solved; 0 if all are solved."""
    now, verdicts, path = states(asked), [], None
    done = lambda question: now[question.id] in DONE
    attempts = [Verdict(q, now[q.id]) if done(q) else attempt(q) for q in asked]
    for verdict in map(keep, grade(attempts, patience)):
        verdicts.append(verdict)
        now[verdict.question.id] = verdict.state
        if as_json:
            continue
        if path != verdict.question.shown:
            path = verdict.question.shown
            print(path + differs_outside(verdict.question))
        print(told(verdict, trace), flush=True)
    if as_json:
        print(json.dumps([as_record(verdict) for verdict in verdicts], indent=1))
    else:
        print(f"{bar(now)}   {next_step(asked, now)}")
    return int(any(state not in DONE for state in now.values()))


def as_record(verdict):
    """A Verdict as a dictionary for --json."""
    q = verdict.question
    what = dict(question=q.id, chapter=q.chapter.name, stars=q.stars, minutes=q.minutes)
    return what | dict(state=verdict.state, seconds=round(verdict.seconds, 1)) | dict(verdict.rows)


def differs_outside(question):
    """A note if a learner's file is no longer the chapter's outside the marks."""
    path = question.exercise
    if not path.exists() or path.read_text() == exercise(question.chapter, answers_in(path)):
        return ""
    return f"   outside the marks it is not {question.chapter.name} any more: that is not graded"


# ── watch ────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def keys():
    """A function that waits so many seconds for a key, or for one of some files to be readable,
    and returns the key, "" at the end of input, or None. A terminal needs no Enter."""
    settings = None
    if sys.stdin.isatty():
        import termios
        import tty

        settings = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin)

    def key(seconds, *files):
        ready, _, _ = select.select([sys.stdin, *files], [], [], seconds)
        if sys.stdin in ready:
            return os.read(sys.stdin.fileno(), 1).decode(errors="ignore")

    try:
        yield key
    finally:
        if settings:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)


class Watch:
    """Grades the first open question of a chapter at each save of its exercise file."""

    KEYS = "h hint · s show the chapter's lines · l list · c check all · r reset · q quit"

    def __init__(self, asked, patience):
        self.asked, self.patience, self.question = asked, patience, first_open(asked)
        self.trial, self.seen = None, None
        if not asked[0].exercise.exists():
            number = asked[0].chapter.name[:2]
            raise Refused(f"{asked[0].shown} is not there: start {number}")
        examiner()  # now, and not at the first save

    def run(self):
        """Until q, or until all is solved."""
        try:
            with keys() as key:
                while self.question:
                    if self.saved():
                        self.begin()
                        continue
                    pressed = key(0.2, *([self.trial.answer] if self.trial else []))
                    if self.trial and self.trial.answer.poll():
                        trial, self.trial = self.trial, None
                        self.tell(Verdict(self.question, *trial.result()))
                    if pressed is not None and self.press(pressed):
                        return 0
            print(f"all of {self.asked[0].shown} is solved")
        except KeyboardInterrupt:
            pass
        finally:
            self.end()
        return 0

    def saved(self):
        """Whether the file changed since the last call."""
        with suppress(OSError):  # an editor may be about to replace it
            stat = self.question.exercise.stat()
            before, self.seen = self.seen, (stat.st_mtime_ns, stat.st_size)
            return before != self.seen

    def begin(self):
        """Grade the question as it is now, the next if it is solved: a grading of how it was is
        of no use."""
        self.end()
        if states([self.question])[self.question.id] in DONE:
            self.question = first_open(self.asked)
        if not self.question:
            return
        tried = attempt(self.question)
        if isinstance(tried, Verdict):
            self.tell(tried)
        else:
            self.trial = examiner().Trial(tried, self.patience)

    def end(self):
        if self.trial:
            self.trial.stop()
        self.trial = None

    def tell(self, verdict):
        """Show a verdict, and what can be done now."""
        keep(verdict)
        if sys.stdout.isatty():
            print("\033[2J\033[H", end="")
        print(f"{verdict.question.shown}   {bar(states(self.asked))}\n\n{told(verdict)}")
        if verdict.state == "solved":
            print(beside(self.question))
        elif not verdict.rows:
            print(textwrap.fill(self.question.text, 96))
            print("\nanswer it between its marks, and save")
        print("\n" + "n next · " * (verdict.state == "solved") + self.KEYS, flush=True)

    def press(self, key):
        """Do what a key asks for; True if that is to quit."""
        if key in ("q", "", "\x04"):
            return True
        if key == "h":
            print(f"hint: {self.question.hint}")
        elif key == "s":
            print(beside(self.question))
        elif key == "l":
            overview(self.asked)
        elif key == "c":
            self.end()
            check(self.asked, self.patience)
        elif key == "r":
            self.end()
            reset(self.question)
        elif key == "n" and states([self.question])[self.question.id] in DONE:
            self.seen = None
        sys.stdout.flush()


def build_parser():
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    add = lambda name, help: commands.add_parser(name, help=help)
    started = add("start", "write a chapter's exercise file")
    started.add_argument("what", metavar="CHAPTER")
    started.add_argument("--question", metavar="Q3.2", help="empty only this one")
    started.add_argument("--again", action="store_true", help="start over, keeping a dated copy")
    watched = add("watch", "grade the first open question at each save")
    watched.add_argument("what", metavar="CHAPTER")
    checked = add("check", "grade a chapter, a question, or all that was started")
    checked.add_argument("what", metavar="CHAPTER", nargs="?")
    checked.add_argument("--trace", action="store_true", help="with tracebacks")
    checked.add_argument("--json", action="store_true", help="for an instructor's program")
    for graded in watched, checked:
        graded.add_argument("--timeout", type=float, default=15, help="seconds that ranks may wait")
    add("hint", "a nudge").add_argument("what", metavar="QUESTION")
    add("show", "the chapter's lines beside yours").add_argument("what", metavar="QUESTION")
    add("reset", "empty a question again").add_argument("what", metavar="QUESTION")
    add("table", "all questions, as WORKSHOP.md has them")
    return parser


def run(args):
    """Do what was asked; returns the exit status."""
    everything = [question for chapter in chapters() for question in questions(chapter)]
    if args.command in (None, "table"):
        return table(everything) if args.command else overview(everything)
    if args.command == "check" and not args.what:
        asked = [question for question in everything if question.exercise.exists()]
        if not asked:
            raise Refused("nothing was started yet: python workshop.py start 01")
    else:
        asked = find(args.what)
    if args.command == "check":
        return check(asked, args.timeout, args.trace, args.json)
    if args.command in ("start", "watch"):
        asked = questions(asked[0].chapter)  # of a question, the chapter
    if args.command == "start":
        if args.question and args.question not in [question.id for question in asked]:
            raise Refused(f"--question {args.question} is not in {asked[0].chapter.name}")
        return start(asked, args.question, args.again)
    if args.command == "watch":
        return Watch(asked, args.timeout).run()
    question = first_open(asked) or asked[0]
    if args.command == "reset":
        return reset(question)
    print(textwrap.fill(f"{question.heading}  {question.text}", 96))
    print(f"hint: {question.hint}" if args.command == "hint" else beside(question))
    return 0


def main(argv=None):
    """Exit status: 0 done, and all solved; 1 not all solved; 2 refused, in a sentence; 130 ended
    from outside, with all that was being graded."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(build_parser().parse_args(argv))
    except Refused as refused:
        print(refused, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
