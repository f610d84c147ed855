"""What README counts of each chapter, and the stamp that keeps it so.

    python tests/counts.py            print the rows that have changed
    python tests/counts.py --write    write them into README's map
"""

import importlib
import re
import sys

import kit
from harness import ROOT

README = ROOT / "README.md"
ROW = re.compile(r"\| \[(\w+\.py)\]\(\w+\.py\) \|.*")
COUNTED = "ranks", "lines", "questions"


def counts(file):
    """{column: number} of a chapter: the ranks it starts by itself, its lines, its questions."""
    text = (ROOT / file).read_text()
    started = re.search(r"arguments\(__doc__, ranks=(\d+)", text)
    if file.startswith("07"):
        ranks = importlib.import_module("07_5d").options([]).ranks
    else:
        ranks = int(started[1]) if started else "-"
    questions = len(re.findall(r"^ *# Q\d\.\d \*", text, re.M))
    return {"ranks": ranks, "lines": text.count("\n"), "questions": questions or "-"}


def stamped(text):
    """README's text with what it counts as it is today."""
    head = next(line for line in text.splitlines() if line.startswith("| chapter |"))
    columns = [cell.strip() for cell in head.split("|")]

    def row(match):
        cells, found = match[0].split("|"), counts(match[1])
        for column in COUNTED:
            cells[columns.index(column)] = f" {found[column]} "
        return "|".join(cells)

    text = re.sub(r"The last \d+ lines", f"The last {kit.kit().count(chr(10))} lines", text)
    return ROW.sub(row, text)


if __name__ == "__main__":
    before = README.read_text()
    after = stamped(before)
    print(*sorted({*after.splitlines()} - {*before.splitlines()}), sep="\n")
    if "--write" in sys.argv:
        README.write_text(after)
