"""The rules of the house: what must be so of every chapter, whatever it is about."""

import ast
import itertools
import re
import signal
import subprocess
import sys
from pathlib import Path

import kit
import mutate
import pytest
from harness import ROOT, refusal, run_script, start_script

CHAPTERS = sorted(ROOT.glob("0[1-7]_*.py"))
ALONE = [*kit.CHAPTERS, *ROOT.glob("memory_math.py")]
SOURCES = [p for p in ROOT.rglob("*.py") if not {".venv", "exercises"} & set(p.parts)]
BANNER = "# ── from here on: proof, run, kit "
ROOM = {  # lines that a file may have, its launch kit included; the aim was 600 to 1,000
    "01_dp.py": 980,
    "02_zero.py": 1661,
    "03_tp.py": 1360,
    "04_pp_schedules.py": 1510,
    "05_ep.py": 1050,
    "06_cp_ring.py": 1200,
    "07_5d.py": 1170,
    "memory_math.py": 1500,
}
LESSON = {  # lines down to what a library adds, or down to the banner: what a newcomer reads
    "01_dp.py": 340,
    "02_zero.py": 950,
    "03_tp.py": 680,
    "04_pp_schedules.py": 850,
    "05_ep.py": 330,
    "06_cp_ring.py": 620,
    "07_5d.py": 380,
}
BEYOND = sorted(ROOT.glob("beyond/*.py"))
ALPHABET = {  # the letters of all files; small f, h and v are this rank's part of F, H and V
    "n": "ranks", "r": "this rank", "m": "micro-batches",
    "B": "sequences", "b": "sequences of this rank",
    "S": "tokens of a sequence", "s": "tokens of this rank", "D": "width",
    "H": "query heads", "K": "key/value heads", "d": "width of a head",
    "V": "vocabulary", "F": "hidden units", "P": "parameters",
    "E": "experts", "e": "experts of this rank", "k": "experts of a token",
    "C": "capacity of an expert", "R": "rows received", "c": "chunks of a rank",
}  # fmt: skip
QUESTION = re.compile(r"^ *# (Q\d\.\d+) (\*+) .+", re.M)

each = lambda files: pytest.mark.parametrize("path", files, ids=lambda path: path.name)


def imported(path):
    """The top-level names of all modules that a file imports, by statement or by name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]
        elif isinstance(node, ast.Constant) and re.fullmatch(r"0\d_\w+", str(node.value)):
            yield node.value


@each(kit.CHAPTERS)
def test_the_launch_kit_is_the_same_to_the_letter(path):
    assert kit.cut(path.read_text())[1] == kit.kit(), "run: python tests/kit.py --write"


@each(ALONE)
def test_a_chapter_knows_its_packages_and_no_other_file(path):
    known = {"torch", "numpy", "einops", "matplotlib"} | set(sys.stdlib_module_names)
    assert set(imported(path)) <= known


@each([*CHAPTERS, *ROOT.glob("memory_math.py")])
def test_importing_a_chapter_does_nothing(path):
    """It prints nothing, draws nothing, starts nothing, and joins no group."""
    look = (
        f"import importlib, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        f"importlib.import_module({path.stem!r})\n"
        "import threading, torch.distributed as dist\n"
        "assert not dist.is_initialized() and threading.active_count() == 1\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@each(kit.CHAPTERS)
def test_a_chapter_alone_in_an_empty_folder_proves_itself(path, tmp_path):
    alone = tmp_path / path.name
    alone.write_text(path.read_text())
    done = run_script(alone, "--ranks", 2, "--steps", 0, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "formula" in done.stdout and "NOT AS CLAIMED" not in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@each(kit.CHAPTERS)
def test_wrong_arguments_are_answered_by_a_sentence(path):
    wrong = [
        ("--ranks", 0), ("--ranks", -1), ("--steps", -1), ("--timeout", 0),
        ("--text", "no such file"), ("--text", ROOT / ".gitignore"),
        ("--plot", "no/such/folder.png"), ("--plot", ROOT / "tests"), ("--plot", "picture.txt"),
    ]  # fmt: skip
    for flag, value in wrong:
        assert f"{flag} {value}" in refusal(path, flag, value)


@each(CHAPTERS)
def test_each_question_has_stars_a_hint_and_an_end(path):
    text = path.read_text()
    lines = text.splitlines()
    questions = [match[1] for match in QUESTION.finditer(text)]
    assert 3 <= len(questions) <= 6 and len(set(questions)) == len(questions)
    for question in questions:
        start = next(i for i, line in enumerate(lines) if f"# {question} *" in line)
        end = next(i for i, line in enumerate(lines) if line.strip() == f"# /{question}")
        comments = [line for line in lines[start:end] if line.lstrip().startswith("#")]
        assert question[1] == path.name[1]
        assert any(line.strip().startswith("#") and "hint: " in line for line in comments[1:])
        assert 3 <= end - start - 1 <= 16, f"{question} spans {end - start - 1} lines"


@each(SOURCES)
def test_no_line_is_wider_than_100_columns(path):
    wide = [i for i, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 100]
    assert not wide


@each(CHAPTERS)
def test_public_functions_say_what_they_take_and_return(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node) or node.name == "main", node.name


# ── the limits: a file that outgrows them is looking for its simpler idea ────────────────────


@each([ROOT / name for name in ROOM])
def test_a_file_has_room_for_one_lesson(path):
    text = path.read_text()
    assert text.count("\n") <= ROOM[path.name]
    lesson = re.split(r"# ── (?:what a library adds|from here on)", text)[0]
    assert lesson.count("\n") <= LESSON.get(path.name, ROOM[path.name])


def test_a_file_of_the_second_folder_has_room_for_one_concept():
    lines = {path.name: path.read_text().count("\n") for path in BEYOND}
    assert {name: count for name, count in lines.items() if count > 700} == {}


@each([*CHAPTERS, *BEYOND])
def test_ctrl_c_is_heeded_before_torch_loads(path):
    """Loading takes seconds, and Python would answer Ctrl-C with a traceback."""
    before = path.read_text().split("\nimport torch\n")[0].removesuffix("\nimport numpy as np")
    first, second = before.splitlines()[-2:]
    assert first == 'if __name__ == "__main__":'
    assert second.startswith("    signal.signal(signal.SIGINT, signal.SIG_DFL)")


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc what a process has loaded")
def test_ctrl_c_while_torch_loads_ends_a_chapter_without_a_word():
    with start_script(CHAPTERS[0]) as process:
        while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == -signal.SIGINT


def test_the_launch_kit_stays_small():
    assert kit.kit().count("\n") <= 265


def legend(path):
    """{letter: words} of the comment that follows a file's docstring."""
    after = path.read_text().split('"""', 2)[2].strip().splitlines()
    lines = itertools.takewhile(lambda line: line.startswith("# "), after)
    entries = [entry for line in lines for entry in line.removeprefix("# ").split(" · ")]
    return dict(entry.strip().split(" ", 1) for entry in entries if entry.strip())


@each([*CHAPTERS, *BEYOND])
def test_a_file_has_ten_letters_of_one_alphabet(path):
    letters = legend(path)
    assert 0 < len(letters) <= 10
    assert letters == {letter: ALPHABET.get(letter) for letter in letters}


def test_readme_prints_the_alphabet():
    text = " ".join((ROOT / "README.md").read_text().split())
    missing = [f"{x} {words}" for x, words in ALPHABET.items() if f"`{x}` {words}" not in text]
    assert not missing


@each([*CHAPTERS, *BEYOND])
def test_the_lesson_comes_first(path):
    """One banner divides the lesson from its proof, and the launch kit brings its own imports."""
    text = path.read_text()
    assert text.count(BANNER) == 1
    if path in kit.CHAPTERS:
        lesson, below = text.split(BANNER)
        assert "def main" in below and "def launch" in below
        head = lesson.split("# ──")[0]
        used = lambda name: len(re.findall(rf"\b{name}\b", lesson)) > len(
            re.findall(rf"\b{name}\b", head)
        )
        names = [alias.asname or alias.name for node in ast.parse(lesson).body
                 if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
        names.remove("signal")  # for Ctrl-C while torch loads
        assert [name for name in names if not used(name.split(".")[-1])] == []


@each([*CHAPTERS, *BEYOND, *ROOT.glob("memory_math.py"), *ROOT.glob("workshop.py")])
def test_a_function_fits_a_screen(path):
    tree = ast.walk(ast.parse(path.read_text()))
    functions = [node for node in tree if isinstance(node, ast.FunctionDef)]
    assert [f.name for f in functions if f.end_lineno - f.lineno >= 55] == []


@each([*CHAPTERS, *BEYOND])
def test_every_flag_has_a_help_text(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    for call in calls:
        flags = [a.value for a in call.args if isinstance(a, ast.Constant)]
        if flags and str(flags[0]).startswith("--"):
            assert "help" in [keyword.arg for keyword in call.keywords], flags


def test_every_tracked_file_is_named_by_another():
    """No stray file is in git: a module is named by its chapter, its tests, or a page."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    files = [ROOT / name for name in listed.stdout.splitlines()]
    assert listed.returncode == 0 and files
    by_pattern = re.compile(r"test_\w+\.py|conftest\.py|rows_\w+\.py")  # pytest's, the benchmark's
    conventional = {".gitignore", "README.md", "run", "pyproject.toml", "requirements.txt"}
    texts = {path: path.read_text() for path in files if path.suffix in (".py", ".md", ".toml")}
    for path in files:
        if path.name in conventional or by_pattern.fullmatch(path.name):
            continue
        others = (text for other, text in texts.items() if other != path)
        known = path.suffix in (".py", ".md", ".png", ".toml", ".json")
        name = re.compile(rf"\b{re.escape(path.stem if known else path.name)}\b")
        assert any(map(name.search, others)), f"nobody names {path.relative_to(ROOT)}"


@pytest.mark.parametrize("name", mutate.LISTS)
def test_each_mutant_can_be_put_into_its_file(name):
    """The list of faults keeps up with the code; tests/mutate.py shows that each is noticed."""
    entries, text = mutate.mutants(name), mutate.target(name).read_text()
    assert len(entries) >= 12
    for entry in entries:
        assert mutate.mutated(text, entry) != text


def test_every_file_has_its_mutants():
    assert {path.stem for path in [*CHAPTERS, *BEYOND, ROOT / "memory_math.py"]} == {*mutate.LISTS}
