"""workshop · the exercises, cut from the chapters and graded by the project's own tests

Each chapter marks a few regions, and each region is a question. An exercise file is the chapter
with these regions empty, and with questions of accounting between its functions. The chapter's own
lines are the answers, and the chapter's own tests and proof grade what you write.

    python workshop.py                  the chapters, their questions, and what to do next
    python workshop.py start 03         write exercises/03_tp.py; with --question Q3.2, only that
    python workshop.py watch 03         grade the first open question at each save
    python workshop.py check 03         grade a chapter, a question, or all that was started
    python workshop.py hint Q3.2        a nudge; the same command again gives the next one
    python workshop.py show Q3.2        the chapter's lines beside yours
    python workshop.py reset Q3.2       empty one question; all other answers stay
    python workshop.py class FOLDER     where each learner stands whose exercises are in FOLDER

    start 03 --again        start over; your file is kept beside the new one, with the date
    check --trace           with tracebacks           check --json    for an instructor's program
    check --timeout 30      seconds that ranks may wait for each other, 15 by default

A question of a file of beyond/ has a capital letter for the chapter: QF.1 is in beyond/faults.py,
and `start faults` writes exercises/beyond/faults.py.

All your answers of a chapter are graded together first. An answer that fails there is graded alone:
in the chapter, with only that question's lines replaced by yours. So a wrong answer hides no other
answer. What you write outside the marks is not graded; write a helper function between the marks.
"""

import os
import signal

if __name__ == "__main__":  # before the other imports: Ctrl-C ends these at once, too
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import ast
import hashlib
import importlib
import json
import re
import select
import shutil
import sys
import textwrap
import time
import tomllib
import warnings
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).absolute().parent
EXERCISES = ROOT / "exercises"
PROGRESS, HINTS = EXERCISES / ".progress.json", EXERCISES / ".hints.json"
MINUTES = {1: 5, 2: 10, 3: 20}  # by stars: planned for a reader who has just read the chapter
DONE = "solved", "given"


class Refused(Exception):
    """A command that cannot be done; the sentence says why."""


# ── questions: regions of a chapter, and accounts between them ───────────────────────────────

HEAD = re.compile(r"( *)# ([QA][\dA-Z]\.\d+) (\*+) (.*)")
MORE = re.compile(r" *# {3,}(\S.*)")  # a comment that continues the text of its head
TAIL = re.compile(r" *# /([QA][\dA-Z]\.\d+) *")


@dataclass
class Region:
    """A marked region of a file: its head, and its lines [body, end), counted from 0. `end` is
    None where the end mark is missing."""

    id: str
    stars: int
    words: list
    indent: str
    body: int
    end: int | None = None


def regions(lines):
    """Find the marked regions in a file's lines: {id: Region}."""
    by_id, last = {}, None
    for i, line in enumerate(lines):
        if head := HEAD.fullmatch(line):
            last = by_id[head[2]] = Region(head[2], len(head[3]), [head[4]], head[1], i + 1)
        elif last and last.body == i and (more := MORE.fullmatch(line)):
            last.words.append(more[1])
            last.body += 1
        elif last and (tail := TAIL.fullmatch(line)) and tail[1] == last.id:
            last.end, last = i, None
    return by_id


@dataclass
class Question:
    """A question, its hints, and the chapter's answer as a list of lines. A question of code has a
    region of the chapter. A question of accounting has an account of tests/accounts.toml."""

    id: str
    chapter: Path
    stars: int
    text: str
    hints: list
    answer: list
    region: Region | None = None
    account: dict | None = None

    @property
    def minutes(self):
        return MINUTES[self.stars]

    @property
    def exercise(self):
        return EXERCISES / self.chapter.relative_to(ROOT)

    @property
    def short(self):
        """The word that names the chapter in a command: "03", or "faults"."""
        return self.chapter.name[:2] if self.chapter.parent == ROOT else self.chapter.stem

    @property
    def tests(self):
        """Paths of the chapter's tests."""
        name = f"{self.short}_*" if self.chapter.parent == ROOT else f"*{self.short}"
        return sorted((ROOT / "tests").glob(f"test_{name}.py"))

    @property
    def shown(self):
        """The path of the exercise file, as the learner writes it."""
        return f"{EXERCISES.name}/{self.chapter.relative_to(ROOT)}"

    @property
    def heading(self):
        return f"{self.id} {'*' * self.stars:3}"

    @property
    def stub(self):
        """The lines of a question that has no answer yet."""
        if self.account:
            return [bound(self.id, self.account, "...")]
        pad = self.region.indent
        words = textwrap.wrap(f"{self.id} {self.text}", 88 - len(pad), drop_whitespace=False)
        quoted = [f"{pad}    {json.dumps(line, ensure_ascii=False)}" for line in words]
        return [f"{pad}raise NotImplementedError(", *quoted, f"{pad})"]

    def marked(self, lines):
        """The region of an exercise file: the question without hints, lines, the end mark."""
        pad = self.region.indent if self.region else ""
        first = f"{pad}# {self.id} {'*' * self.stars} "
        rest = f"{pad}#".ljust(len(first))
        pads = dict(initial_indent=first, subsequent_indent=rest)
        head = textwrap.wrap(self.text, 100, break_on_hyphens=False, **pads)
        return [*head, *lines, f"{pad}# /{self.id}"]


def bound(id, account, expression):
    """The line that binds an expression to the name of a question of accounting."""
    return f"{id.replace('.', '_')} = lambda {', '.join(account['letters'])}: {expression}"


def chapters():
    """Paths of the chapters, then those of the files of beyond/."""
    return [*sorted(ROOT.glob("0[1-7]_*.py")), *sorted(ROOT.glob("beyond/*.py"))]


def questions(chapter):
    """Read the questions of a chapter, in the order in which they build on each other."""
    lines, asked = chapter.read_text().splitlines(), []
    further = tomllib.loads((ROOT / "tests/hints.toml").read_text())
    for region in sorted(regions(lines).values(), key=lambda region: region.id):
        text, *hints = re.split(r"\s*\bhint: ", " ".join(region.words))
        answer = lines[region.body : region.end]
        hints += further.get(region.id, [])
        what = region.id, chapter, region.stars, text, hints, answer
        asked.append(Question(*what, region=region))
    accounts = tomllib.loads((ROOT / "tests/accounts.toml").read_text())
    for id, account in reversed(accounts.items()):
        ids = [question.id for question in asked]
        if account["after"] in ids:
            answer = [bound(id, account, account["answer"])]
            what = id, chapter, account["stars"], account["text"], account["hint"], answer
            asked.insert(ids.index(account["after"]) + 1, Question(*what, account=account))
    return asked


# ── exercise files ───────────────────────────────────────────────────────────────────────────


def exercise(chapter, answers):
    """Compose an exercise file: the chapter with answers[id], or else a stub, in each region."""
    text, asked = chapter.read_text(), questions(chapter)
    lines, nodes, edits = text.splitlines(), ast.parse(text).body, []
    for question in asked:
        new = question.marked(answers.get(question.id) or question.stub)
        if region := question.region:
            edits.append((region.body - len(region.words), region.end + 1, new))
        else:  # below the function that holds the question before it
            inside = next(q.region for q in asked if q.id == question.account["after"])
            end = next(node.end_lineno for node in nodes if node.end_lineno > inside.body)
            below = max(end, inside.end + 1)
            edits.append((below, below, ["", "", *new]))
    for start, end, new in reversed(sorted(edits, key=lambda edit: edit[:2])):
        lines[start:end] = new
    return "\n".join(lines) + "\n"


def answers_in(path):
    """Read {id: lines} of every region of an exercise file that has both its marks."""
    lines = path.read_text().splitlines() if path.exists() else []
    marked = regions(lines).values()
    return {r.id: lines[r.body : r.end] for r in marked if r.end is not None}


def write(path, text):
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def set_aside(path):
    """Rename a learner's file to a name with the date, and print this name."""
    aside = path.with_name(f"{path.name}.{time.strftime('%Y-%m-%d_%H.%M.%S')}")
    while aside.exists():
        aside = aside.with_name(aside.name + "_")
    path.rename(aside)
    print(f"your file is kept as {path.parent.name}/{aside.name}")


# ── progress: the last verdict on each answer, kept from one run to the next ─────────────────


def digest(question, lines):
    """Hash all that a verdict depends on: the lines, the chapter around them, and its tests."""
    state = hashlib.sha256("\n".join(map(str.strip, lines)).encode())
    for path in (question.chapter, *question.tests, ROOT / "tests/accounts.toml"):
        state.update(path.read_bytes())
    return state.hexdigest()[:16]


def stored(path):
    """Read a dictionary that was written as JSON; an empty one if that cannot be done."""
    with suppress(OSError, ValueError):
        return dict(json.loads(path.read_text()))
    return {}


def progress():
    """Read {id: [state, digest of what the state depends on]}."""
    return stored(PROGRESS)


def record(state, answers):
    """Store a state for answers, pairs (question, lines); the states of others stay."""
    known = progress() | {q.id: [state, digest(q, lines)] for q, lines in answers}
    write(PROGRESS, json.dumps(known, indent=1) + "\n")


def states(asked):
    """Look up {id: state} without grading: the last verdict, if the lines are the same since."""
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
    """The result of grading an answer: a state, rows (label, text) that explain it, a traceback."""

    question: Question
    state: str
    rows: list = field(default_factory=list)
    trace: str = ""
    seconds: float = 0.0


def placed(chapter, answers):
    """Put lines into some regions of a chapter's text; answers are pairs (region, lines)."""
    whole = chapter.read_text().splitlines()
    for region, lines in sorted(answers, key=lambda pair: -pair[0].body):
        whole[region.body : region.end] = lines
    return "\n".join(whole) + "\n"


class Attempt:
    """An answer in its place in the chapter; in the learner's file it begins at line `start`."""

    def __init__(self, question, lines, start):
        self.question, self.id, self.lines, self.start = question, question.id, lines, start
        self.text, self.above, self.file = "\n".join(lines) + "\n", 0, ""
        self.ids = [question.id]
        if region := question.region:
            self.text, self.above = placed(question.chapter, [(region, lines)]), region.body

    @property
    def place(self):
        """The path and the line numbers of the answer in the learner's file."""
        first, last = self.start + 1, self.start + len(self.lines)
        return f"{self.question.shown}:{first}" + f"-{last}" * (last > first)

    def is_learners(self, number):
        """Tell whether line `number`, counted from 1, of the graded text is the learner's."""
        return 0 <= number - 1 - self.above < len(self.lines)

    def owner(self, number):
        """Return (path, number) of a line of the graded text in a file that a reader can open."""
        if self.is_learners(number):
            return self.question.shown, number - self.above + self.start
        longer = len(self.lines) - len(self.question.answer)
        return self.question.chapter.name, number - longer * (number > self.above)

    def at(self, number):
        """Return the path, the number and the text of a line of the graded text."""
        path, own = self.owner(number)
        return f"{path}:{own}  {self.text.splitlines()[number - 1].strip()}"

    def named(self, text):
        """Rewrite a traceback so that it names files that a reader can open."""
        owned = lambda match: 'File "{}", line {}'.format(*self.owner(int(match[1])))
        return re.sub(rf'File "{re.escape(self.file)}", line (\d+)', owned, text)

    def refused(self):
        """Return a Verdict on lines that do not compile, or None."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(self.text, "answer", "exec")
        except (SyntaxError, ValueError) as error:  # ValueError: a null byte
            number = getattr(error, "lineno", None) or 0
            line = self.at(number) if self.is_learners(number) else self.place
            rows = [("python", getattr(error, "msg", str(error))), ("line", line)]
            return Verdict(self.question, "does not parse", rows)


def attempt(question):
    """Read the learner's Attempt at a question, or return a Verdict where nothing can run."""
    if not question.exercise.exists():
        return Verdict(question, "not started")
    lines = question.exercise.read_text().splitlines()
    region = regions(lines).get(question.id)
    if region is None or region.end is None:
        mark = f"# /{question.id}" if region else f"# {question.id} {'*' * question.stars} ..."
        says = f"the line {mark} is missing in {question.shown}: write it, or reset {question.id}"
        return Verdict(question, "mark lost", [("mark", says)])
    tried = Attempt(question, lines[region.body : region.end], region.body)
    if tried.lines == question.stub:
        return Verdict(question, "not started")
    return tried.refused() or tried


# ── grading ──────────────────────────────────────────────────────────────────────────────────


def examiner():
    """Import tests/examiner.py on first use: it needs torch and pytest, which take seconds."""
    if "examiner" in sys.modules:
        return sys.modules["examiner"]
    os.environ.pop("CHAPTERS", None)
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # nothing runs yet
    try:
        return importlib.import_module("examiner")
    except ImportError as error:
        raise Refused(f"{error}: python -m pip install -r requirements.txt") from error
    finally:
        signal.signal(signal.SIGINT, before)


def hold_together(attempts, patience):
    """Return the ids of answers that are solved with the others of their chapter in place. An
    answer that prints is left out: it is graded alone, so that its prints are shown."""
    by_chapter, solved = {}, set()
    prints = lambda tried: re.search(r"\b(print|breakpoint)\(", "\n".join(tried.lines))
    for tried in attempts:
        if isinstance(tried, Attempt) and tried.question.region and not prints(tried):
            by_chapter.setdefault(tried.question.chapter, []).append(tried)
    for chapter, several in by_chapter.items():
        if len(several) > 1:
            text = placed(chapter, [(tried.question.region, tried.lines) for tried in several])
            ids = [tried.id for tried in several]
            all_of_it = SimpleNamespace(text=text, ids=ids, question=several[0].question)
            right = examiner().Trial(all_of_it, patience).found()[0]
            if right and right != {*ids}:  # the proof has not run: run it with these alone
                those = [tried for tried in several if tried.id in right]
                text = placed(chapter, [(tried.question.region, tried.lines) for tried in those])
                some = dict(text=text, ids=[tried.id for tried in those], proof_alone=True)
                some = SimpleNamespace(question=several[0].question, **some)
                right = examiner().Trial(some, patience).found()[0]
            solved |= right
    return solved


def grade(attempts, patience, together=True):
    """Yield a Verdict of each attempt, in their order. The answers of a chapter are graded together
    first, which runs each test once; those that fail are graded alone, one process per core."""
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
    """Store a verdict on the lines in a learner's file, and return the verdict."""
    lines = answers_in(verdict.question.exercise).get(verdict.question.id)
    if lines is not None:
        record(verdict.state, [(verdict.question, lines)])
    return verdict


# ── what the terminal shows ──────────────────────────────────────────────────────────────────

GREEN, RED = 32, 31
COLOURS = dict.fromkeys(DONE, GREEN) | dict.fromkeys(["wrong", "hangs", "does not parse"], RED)


def paint(state, width=0):
    """Colour a state, where the output is a terminal."""
    plain = state not in COLOURS or not sys.stdout.isatty() or "NO_COLOR" in os.environ
    padded = state.ljust(width)
    return padded if plain else f"\033[{COLOURS[state]}m{padded}\033[0m"


def told(verdict, trace=False):
    """Write a verdict as lines of text."""
    question, lines = verdict.question, []
    if verdict.rows:
        lines += textwrap.wrap(question.text, 92)
        lines += [f"{label:9} {text}" for label, text in verdict.rows]
    if trace and verdict.trace:
        lines += ["", *verdict.trace.rstrip().splitlines(), ""]
    head = f"  {question.heading}  {paint(verdict.state)}"
    return "\n".join([head, *(f"    {line}".rstrip() for line in lines)])


def bar(now, width=24):
    """Draw a progress bar over {id: state}."""
    done = sum(state in DONE for state in now.values())
    full = width * done // len(now)
    return f"[{'#' * full}{'.' * (width - full)}] {done} of {len(now)}"


def beside(question):
    """Show the chapter's lines beside the learner's, or below them in a narrow terminal."""
    answer = answers_in(question.exercise).get(question.id, ["(nothing yet)"])
    flush = lambda lines: textwrap.dedent("\n".join(lines)).splitlines()
    yours = [question.shown, "", *flush(answer)]
    ours = [question.chapter.name, "", *flush(question.answer)]
    left, right = (max(map(len, part)) for part in (yours, ours))
    if left + right + 3 > shutil.get_terminal_size((100, 24)).columns:
        return "\n".join(["", *yours, "", *ours])
    height = max(len(yours), len(ours))
    yours, ours = (part + [""] * (height - len(part)) for part in (yours, ours))
    return "\n".join(["", *(f"{a:{left}} │ {b}".rstrip() for a, b in zip(yours, ours))])


def next_step(asked, now):
    """Say in a line what to do next."""
    first = next((question for question in asked if now[question.id] not in DONE), None)
    if first is None:
        return "all of it is solved"
    if not first.exercise.exists():
        path = first.chapter.relative_to(ROOT)
        return f"next: read {path}, then python workshop.py start {first.short}"
    return f"next: {first.id}, with python workshop.py watch {first.short}"


def next_hint(question):
    """Return the question's hints so far and one more; which were shown is stored."""
    shown = stored(HINTS)
    count = min(shown.get(question.id, 0) + 1, len(question.hints))
    write(HINTS, json.dumps(shown | {question.id: count}) + "\n")
    lines = [f"hint {i}: {hint}" for i, hint in enumerate(question.hints[:count], 1)]
    more = [f"(hint {question.id} again gives one more)"] * (count < len(question.hints))
    return "\n".join([*lines, *more])


# ── commands ─────────────────────────────────────────────────────────────────────────────────


def find(word):
    """Return the questions that a word names: "Q3.2" one, "03", "03_tp.py" or "faults" several."""
    asked = [question for chapter in chapters() for question in questions(chapter)]
    named = [question for question in asked if question.id.lower() == word.lower()]
    if not named:
        stem = word.rpartition("/")[2].removesuffix(".py")
        named = [question for question in asked if stem in (question.short, question.chapter.stem)]
    if not named:
        known = ", ".join(dict.fromkeys(question.short for question in asked))
        raise Refused(f"{word} is no question, such as Q1.2, and no chapter: {known}")
    return named


def first_open(asked):
    """Return the first question that is not solved, or None."""
    now = states(asked)
    return next((question for question in asked if now[question.id] not in DONE), None)


def overview(asked):
    """Print the questions of each chapter and their states."""
    now = states(asked)
    for chapter in chapters():
        own = [question for question in asked if question.chapter == chapter]
        if own:
            path = str(chapter.relative_to(ROOT))
            print(f"{path:22}{bar({question.id: now[question.id] for question in own})}")
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
    path, number = asked[0].exercise, asked[0].short
    if path.exists() and not again:
        raise Refused(
            f"{asked[0].shown} exists: start {number} --again starts over and keeps a dated "
            f"copy; reset {asked[0].id} empties one question"
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
        raise Refused(f"{question.shown} does not exist yet: start {question.short}")
    answers = answers_in(path)
    answers.pop(question.id, None)
    set_aside(path)
    write(path, exercise(question.chapter, answers))
    print(f"{question.id} is empty again")
    return 0


def check(asked, patience, trace=False, as_json=False):
    """Grade questions, without those that are solved and unchanged; return 0 if all are solved."""
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
    """Turn a Verdict into a dictionary for --json."""
    q = verdict.question
    what = dict(question=q.id, chapter=q.chapter.name, stars=q.stars, minutes=q.minutes)
    return what | dict(state=verdict.state, seconds=round(verdict.seconds, 1)) | dict(verdict.rows)


def differs_outside(question):
    """Return a note if a learner's file differs from the chapter outside the marks."""
    path = question.exercise
    if not path.exists() or path.read_text() == exercise(question.chapter, answers_in(path)):
        return ""
    return f"   outside the marks this file differs from {question.chapter.name}: not graded"


# ── class ────────────────────────────────────────────────────────────────────────────────────


def learners(folders):
    """Find {name of a learner: their progress file}: in each folder, or one or two levels below."""
    files = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise Refused(f"{folder} is no folder")
        for pattern in ("", "exercises/", "*/", "*/exercises/"):
            for file in sorted(folder.glob(f"{pattern}{PROGRESS.name}")):
                home = file.absolute().parent
                files[(home.parent if home.name == EXERCISES.name else home).name] = file
    if not files:
        raise Refused(f"no {PROGRESS.name} in {', '.join(folders)}: nobody has checked an answer")
    return files


def classroom(folders, everything):
    """Print who is where: one line a learner, then the questions at which most learners are."""
    shorts, now_at, rows = list(dict.fromkeys(q.short for q in everything)), Counter(), []
    for name, file in learners(folders).items():
        known = stored(file)
        done = {q.id for q in everything if known.get(q.id, [""])[0] in DONE}
        per = Counter(q.short for q in everything if q.id in done)
        tried = [q for q in everything if q.id in known and q.id not in done]
        ahead = [q for q in everything if q.id not in done]
        current = (tried or ahead or [None])[0]
        at = f"{current.id} {known.get(current.id, ['open'])[0]}" if current else "all solved"
        now_at[current.id if current else "all solved"] += 1
        minutes = f"{(time.time() - file.stat().st_mtime) / 60:.0f}"
        rows.append((name, str(len(done)), *(str(per[s] or "") for s in shorts), at, minutes))
    head = ("who", "solved", *shorts, "now at", "minutes ago")
    wide = [max(map(len, column)) for column in zip(head, *rows)]
    for row in (head, *sorted(rows)):
        print("  ".join(word.ljust(width) for word, width in zip(row, wide)).rstrip())
    print("most are at " + ", ".join(f"{id} ({count})" for id, count in now_at.most_common(3)))
    return 0


# ── watch ────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def keys():
    """Yield a function that waits some seconds for a key, or until one of some files is readable.
    The function returns the key, "" at the end of input, or None. No key needs Enter."""
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
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)


class Watch:
    """The grading of the first open question of a chapter at each save of its exercise file."""

    KEYS = "h hint · s show the chapter's lines · l list · c check all · r reset · q quit"

    def __init__(self, asked, patience):
        self.asked, self.patience, self.question = asked, patience, first_open(asked)
        self.trial, self.seen = None, None
        if not asked[0].exercise.exists():
            raise Refused(f"{asked[0].shown} does not exist yet: start {asked[0].short}")
        if not sys.stdin.isatty():
            raise Refused(f"watch needs a terminal; without one, use check {asked[0].short}")
        examiner()  # now, and not at the first save

    def run(self):
        """Grade and read keys until q, or until all questions are solved."""
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
        """Tell whether the file changed since the last call."""
        with suppress(OSError):  # an editor may be about to replace it
            stat = self.question.exercise.stat()
            before, self.seen = self.seen, (stat.st_mtime_ns, stat.st_size)
            return before != self.seen

    def begin(self):
        """Start to grade the lines as they are now, of the next question if this one is solved. A
        grading of older lines is stopped."""
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
        """Show a verdict and the keys."""
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
        """Do what a key asks for; return True if that is to quit."""
        if key in ("q", "", "\x04"):
            return True
        if key == "h":
            print(next_hint(self.question))
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
    """Describe the command line."""
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
    add("hint", "a nudge; again, one more").add_argument("what", metavar="QUESTION")
    add("show", "the chapter's lines beside yours").add_argument("what", metavar="QUESTION")
    add("reset", "empty a question again").add_argument("what", metavar="QUESTION")
    seen = add("class", "where each learner stands")
    seen.add_argument("folders", metavar="FOLDER", nargs="+", help="of one learner, or of many")
    add("table", "all questions, as WORKSHOP.md has them")
    return parser


def run(args):
    """Do what the command line asks; return the exit status."""
    everything = [question for chapter in chapters() for question in questions(chapter)]
    if args.command in (None, "table"):
        return table(everything) if args.command else overview(everything)
    if args.command == "class":
        return classroom(args.folders, everything)
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
    print(next_hint(question) if args.command == "hint" else beside(question))
    return 0


def main(argv=None):
    """Run a command. Return 0 if it is done and all is solved, 1 if not all is solved, 2 if it was
    refused in a sentence, 130 if it was ended from outside, 141 if nobody reads the output."""
    for ended in signal.SIGTERM, signal.SIGINT:
        signal.signal(ended, signal.default_int_handler)
    try:
        code = run(build_parser().parse_args(argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 128 + signal.SIGPIPE
    except Refused as refused:
        print(refused, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
