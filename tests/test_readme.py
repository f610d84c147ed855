"""README: what it points at exists, and what it counts is counted."""

import importlib
import re

import counts
from harness import ROOT

TEXT = (ROOT / "README.md").read_text()


def test_every_chapter_has_its_row():
    for path in [*ROOT.glob("0[1-7]_*.py"), ROOT / "memory_math.py"]:
        assert f"| [{path.name}]({path.name}) |" in TEXT


def test_what_it_counts_of_the_chapters_is_counted():
    assert counts.stamped(TEXT) == TEXT, "run: python tests/counts.py --write"


def test_every_link_and_picture_is_there():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_the_guides_42_sections_are_served_by_names_that_exist():
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| (.+) \|$", TEXT, re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 43))
    for _, where in rows:
        for file, names in re.findall(r"\[\w+\.py\]\((\w+)\.py\):? ?((?:`\w+`(?:, )?)*)", where):
            module = importlib.import_module(file)
            for name in re.findall(r"`(\w+)`", names):
                known = hasattr(module, name) or any(
                    hasattr(part, name) for part in vars(module).values() if isinstance(part, type)
                )
                commands = name in (ROOT / f"{file}.py").read_text()
                assert known or commands, f"{file}.{name}"


def test_two_commands_are_single_lines_that_need_nothing():
    lines = [line.strip() for line in TEXT.splitlines() if line.startswith("    python3 -m venv")]
    assert len(lines) == 2
    assert lines[0].endswith("python 07_5d.py") and lines[1].endswith("python -m pytest")


def test_what_it_counts_of_the_guide_is_counted():
    claims = importlib.import_module("memory_math").guide_claims()
    wrong = [claim for claim in claims if claim["verdict"] != "holds"]
    assert f"Of the {len(claims)} numbers" in TEXT and f"{len(wrong)} do not hold" in TEXT
