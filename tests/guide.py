"""GUIDE.md: where each section of the guide is served, with links that this command makes.

    python tests/guide.py            print what differs
    python tests/guide.py --write    write GUIDE.md

The map is tests/guide_map.toml. In its text, {01_dp} becomes a link to the file,
{01_dp.DataParallel.no_sync} a link to the line of that definition, and {07_5d --order} a link
to the line of that flag. A name that does not exist raises KeyError.
"""

import ast
import re
import sys
import tomllib

from harness import ROOT

import memory_math

PAGE, MAP = ROOT / "GUIDE.md", ROOT / "tests" / "guide_map.toml"
REFERENCE = re.compile(r"\{([\w/.]+?)(?:\.py)?(?:\.([A-Za-z_][\w.]*)| (-[\w-]+))?\}")


def definitions(path):
    """{name: line} of the functions, classes, methods and constants of a Python file."""
    lines = {}

    def visit(body, prefix):
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                lines[prefix + node.name] = node.lineno
                visit(node.body if isinstance(node, ast.ClassDef) else [], f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in getattr(node, "targets", None) or [node.target]:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            lines[prefix + name.id] = node.lineno

    visit(ast.parse(path.read_text()).body, "")
    return lines


def link(match):
    """The link that stands for a {reference} of the map."""
    file, name, flag = match.groups()
    path = ROOT / (file if (ROOT / file).is_file() else f"{file}.py")
    where = path.relative_to(ROOT)
    if name:
        return f"[`{name}`]({where}#L{definitions(path)[name]})"
    if flag:
        line = next((i for i, text in enumerate(path.read_text().splitlines(), 1)
                     if f'"{flag}"' in text or f'"{flag[2:]}":' in text), None)  # fmt: skip
        if line is None:
            raise KeyError(f"{where} has no flag {flag}")
        return f"[`{flag}`]({where}#L{line})"
    return f"[{where}]({where})"


def page():
    """The text of GUIDE.md."""
    data = tomllib.loads(MAP.read_text())
    fill = lambda text: REFERENCE.sub(link, text)
    claims = memory_math.guide_claims()
    wrong = [claim for claim in claims if claim["verdict"] != "holds"]
    rows = "".join(
        f"| {section['number']} | {section['title']} | {fill(section['where'])} |\n"
        for section in data["section"]
    )
    corrections = "".join(
        f"{i}. **{c['claim']}** (line {c['lines']}): {fill(c['right'])}\n"
        for i, c in enumerate(data["correction"], 1)
    )
    counts = dict(claims=len(claims), wrong=len(wrong))
    return data["page"].strip().format(sections=rows, corrections=corrections, **counts) + "\n"


if __name__ == "__main__":
    before = PAGE.read_text() if PAGE.exists() else ""
    print(*sorted({*page().splitlines()} - {*before.splitlines()}), sep="\n")
    if "--write" in sys.argv:
        PAGE.write_text(page())
