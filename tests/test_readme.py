"""README: what it points at exists, and what it counts is counted."""

import re
import tomllib

import counts
import guide
import pytest
from harness import ROOT

TEXT = (ROOT / "README.md").read_text()


def test_every_chapter_has_its_row():
    for path in [*ROOT.glob("0[1-7]_*.py"), ROOT / "memory_math.py"]:
        assert f"| [{path.name}]({path.name}) |" in TEXT


def test_every_file_of_the_second_folder_has_its_row():
    for path in (ROOT / "beyond").glob("*.py"):
        assert f"| [beyond/{path.name}](beyond/{path.name}) |" in TEXT


def test_what_it_counts_of_the_chapters_is_counted():
    assert counts.stamped(TEXT) == TEXT, "run: python tests/counts.py --write"


def test_every_link_and_picture_is_there():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_the_page_of_the_guide_is_what_its_map_says_today():
    assert guide.PAGE.read_text() == guide.page(), "run: python tests/guide.py --write"


def test_the_guides_42_sections_are_each_served():
    sections = tomllib.loads(guide.MAP.read_text())["section"]
    assert [section["number"] for section in sections] == list(range(1, 43))


def test_a_reference_that_names_nothing_is_refused():
    for wrong in ("{01_dp.NoSuchName}", "{07_5d --no-such-flag}"):
        with pytest.raises(KeyError):
            guide.REFERENCE.sub(guide.link, wrong)


def test_two_commands_are_single_lines_that_need_nothing():
    lines = [line.strip() for line in TEXT.splitlines() if line.startswith("    python3 -m venv")]
    assert len(lines) == 2
    assert lines[0].endswith("python 07_5d.py") and lines[1].endswith("python -m pytest")
