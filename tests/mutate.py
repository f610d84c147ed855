"""Puts plausible faults into the code, one at a time, and says which ones nobody notices.

    python tests/mutate.py                 all files that have a list in tests/mutants/
    python tests/mutate.py 02_zero 07_5d   these
    python tests/mutate.py 02_zero --only "scale"   those whose reason contains a word

A mutant is an entry of tests/mutants/NAME.toml: `why` names the fault, `old` is text that occurs
once in the file, `new` replaces it. An entry with `equivalent` gives the reason why no test can
notice it; that reason is checked by nobody. Each mutant is written into a copy of the repository;
the proof of its file runs first (`--steps 0`), then the quick tests of the file. A mutant that
passes both survives. By hand, before a release: an hour for all.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LISTS = {path.stem: path for path in sorted((ROOT / "tests/mutants").glob("*.toml"))}
PATIENCE = 600  # seconds for a proof, and for a file's tests


def mutants(name):
    """The entries of a file's list."""
    return tomllib.loads(LISTS[name].read_text()).get("mutant", [])


def target(name, root=ROOT):
    """The file that a list is about: a chapter, memory_math, or a file of beyond/."""
    return next(p for p in (root / f"{name}.py", root / "beyond" / f"{name}.py") if p.exists())


def test_file(name):
    """The file of a name's tests: test_04_pp.py has those of 04_pp_schedules."""
    tests = sorted((ROOT / "tests").glob(f"test_*{name[:5] if name[0] == '0' else name}*.py"))
    return tests[0].relative_to(ROOT)


def mutated(text, mutant):
    """The text with the fault. Raises ValueError unless `old` occurs exactly once."""
    if text.count(mutant["old"]) != 1:
        raise ValueError(f"{mutant['why']!r}: its `old` occurs {text.count(mutant['old'])} times")
    return text.replace(mutant["old"], mutant["new"])


def passes(copy, *command):
    """Whether a command in the copy ends with status 0."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *command], cwd=copy, env=environment, timeout=PATIENCE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def notice(name, copy):
    """Who notices that the file in the copy is wrong: "proof", "tests" or None."""
    script = target(name, copy)
    if "--steps" in script.read_text() or "arguments(" in script.read_text():
        if not passes(copy, str(script), "--steps", "0"):
            return "proof"
    if not passes(copy, "-m", "pytest", "-x", "-q", str(test_file(name))):
        return "tests"
    return None


def main():
    """Print a line for each mutant; 0 if at least 95% of each list are noticed or equivalent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(LISTS), help="such as 02_zero")
    parser.add_argument("--only", default="", help="a word of the fault's description")
    args = parser.parse_args()
    survivors = total = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__"))
        for name in args.names:
            file = target(name, copy)
            text = file.read_text()
            for mutant in mutants(name):
                if args.only not in mutant["why"]:
                    continue
                file.write_text(mutated(text, mutant))
                who = notice(name, copy)
                if who is None:
                    who = "equivalent" if "equivalent" in mutant else "NOBODY"
                total, survivors = total + 1, survivors + (who == "NOBODY")
                print(f"{name:18}{who:12}{mutant['why']}", flush=True)
            file.write_text(text)
    print(f"{survivors} of {total} faults are noticed by nobody")
    return int(survivors > 0.05 * total)


if __name__ == "__main__":
    sys.exit(main())
