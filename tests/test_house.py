"""The rules of the house: what must be so of every chapter, whatever it is about."""

import ast
import re
import subprocess
import sys

import kit
import pytest
from harness import ROOT, refusal, run_script

CHAPTERS = sorted(ROOT.glob("0[1-7]_*.py"))
ALONE = [*kit.CHAPTERS, *ROOT.glob("memory_math.py")]
SOURCES = [p for p in ROOT.rglob("*.py") if not {".venv", "exercises"} & set(p.parts)]
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
