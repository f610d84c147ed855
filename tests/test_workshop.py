"""workshop: its files, its grading, its commands as a learner uses them, and every wrong answer."""

import ast
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
import tomllib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import wrong_by_machine
from harness import ROOT, chapter, on_ranks

import memory_math
import workshop

QUESTIONS = [question for file in workshop.chapters() for question in workshop.questions(file)]
BY_ID = {question.id: question for question in QUESTIONS}
WRONG = [
    (id, wrong)
    for file in sorted((ROOT / "tests/wrong_answers").glob("*.toml"))
    for id, answers in tomllib.loads(file.read_text()).items()
    for wrong in answers
]
EQUIVALENT = tomllib.loads((ROOT / "tests/equivalent_answers.toml").read_text())
each_question = pytest.mark.parametrize("id", BY_ID)
each_chapter = pytest.mark.parametrize("file", workshop.chapters(), ids=lambda file: file.stem)


# ── questions and their files ────────────────────────────────────────────────────────────────


@each_question
def test_a_question_has_a_hint_an_answer_and_two_wrong_ones(id):
    question = BY_ID[id]
    assert question.text and len(question.hints) >= 2 and all(question.hints)
    assert question.answer and question.stars in (1, 2, 3)
    wrong = [answer for of, answer in WRONG if of == id]
    assert len(wrong) >= 2
    for answer in wrong:
        assert "\n".join(question.answer).count(answer["replace"]) == 1, answer["why"]


@each_chapter
def test_an_exercise_file_is_the_chapter_without_its_answers_and_hints(file):
    text, asked = workshop.exercise(file, {}), workshop.questions(file)
    assert "hint: " not in text
    found = workshop.regions(text.splitlines())
    assert found.keys() == {question.id for question in asked}
    lines = text.splitlines()
    for question in asked:
        region = found[question.id]
        assert lines[region.body : region.end] == question.stub
        assert " ".join(region.words) == question.text
        head = lines[region.body - len(region.words) : region.end]
        assert max(map(len, head)) <= 100
        assert question.account or ast.parse(text) and region.indent, "a stub runs when imported"


@each_chapter
def test_an_exercise_file_with_all_answers_is_the_chapter(file):
    answers = {question.id: question.answer for question in workshop.questions(file)}
    tree = ast.parse(workshop.exercise(file, answers))
    accounts = [node for node in tree.body if re.match(r"A\d_\d = ", ast.unparse(node))]
    assert len(accounts) == sum(id[0] == "A" for id in answers)
    tree.body = [node for node in tree.body if node not in accounts]
    assert ast.dump(tree) == ast.dump(ast.parse(file.read_text()))


@pytest.mark.parametrize("id", [id for id in BY_ID if id[0] == "A"])
def test_an_account_is_answered_by_what_memory_math_says(id):
    account = BY_ID[id].account
    for layout in account["layouts"]:
        given = dict(zip(account["letters"], layout))
        truth = eval(account["truth"], vars(memory_math) | given)
        assert eval(account["answer"], dict(given)) == pytest.approx(truth, rel=1e-12)


def asked_of(id, *layout):
    account = BY_ID[id].account
    given = dict(zip(account["letters"], layout, strict=True))
    return eval(account["truth"], vars(memory_math) | given)


def test_accounts_are_what_the_ledger_counts():
    n, V, S, K, d = 4, 64, 32, 4, 6
    dp, tp, cp = chapter("01_dp"), chapter("03_tp"), chapter("06_cp_ring")
    world = lambda: dist.group.WORLD

    def gradients():
        model = dp.tiny_model(torch.device("cpu"))
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        with dp.Ledger() as ledger:
            dp.all_reduce_gradients(model, world())
        return sum(ledger.sent.values()) / sum(p.nbytes for p in model.parameters())

    def loss():
        logits, labels = torch.randn(1, S, V // n), torch.zeros(1, S, dtype=torch.long)
        with tp.Ledger() as ledger:
            tp.vocab_parallel_cross_entropy(logits, labels, V, world())
        return sum(ledger.sent.values())

    def attention(how):
        q, k, v = torch.randn(3, 1, S // n, K, d, requires_grad=True)
        with cp.Ledger() as ledger:
            out = how(q, k, v, world())
            forward = sum(ledger.sent.values())
            out.sum().backward()
        return forward, sum(ledger.sent.values())

    def measured():
        return gradients(), loss(), attention(cp.ring_attention), attention(cp.ulysses_attention)

    for share, lost, (_, ring), (ulysses, _) in on_ranks(n, measured):
        assert share == pytest.approx(asked_of("A1.1", 1, n, 1, 1))
        assert lost == pytest.approx(asked_of("A3.2", S, V, n))
        assert ring == pytest.approx(asked_of("A6.1", S, K, d, n, 4, 4))
        assert ulysses == pytest.approx(asked_of("A6.2", S, K, K, d, n, 4))


def test_workshop_md_has_every_question_and_paths_that_fit(capsys):
    text = (ROOT / "WORKSHOP.md").read_text()
    workshop.table(QUESTIONS)
    assert capsys.readouterr().out.strip() in text, "paste: python workshop.py table"
    for name, minutes in ("Two hours", 120), ("One day", 390):
        section = re.search(rf"^### {name}.*?(?=^#|\Z)", text, re.M | re.S)[0]
        ids = re.findall(r"\b[QA]\d\.\d\b", section)
        assert len(ids) == len(set(ids)) and set(ids) <= BY_ID.keys()
        assert ids == [id for id in BY_ID if id in ids], "each builds on the last"
        assert 0.8 * minutes <= sum(BY_ID[id].minutes for id in ids) <= minutes


# ── as a learner uses it ─────────────────────────────────────────────────────────────────────


@pytest.fixture
def project(tmp_path):
    """A copy of the project, whose exercises are nobody's."""
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*.json"), ROOT / "pyproject.toml"]:
        shutil.copy(path, tmp_path)
    for folder in ("tests", "benchmarks", "beyond", "memory_math"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


def run(project, *args, columns=100):
    command = [sys.executable, "workshop.py", *args]
    env = os.environ | {"COLUMNS": str(columns), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def answer(project, id, lines):
    """Write a learner's lines between the marks of a question."""
    path = project / "exercises" / BY_ID[id].chapter.name
    text = path.read_text().splitlines()
    region = workshop.regions(text)[id]
    text[region.body : region.end] = [region.indent + line for line in lines]
    path.write_text("\n".join(text) + "\n")


def reference(id):
    pad = BY_ID[id].region.indent if BY_ID[id].region else ""
    return [line.removeprefix(pad) for line in BY_ID[id].answer]


def test_nothing_is_started_and_it_says_what_to_do(project):
    code, out, _ = run(project)
    assert code == 0 and all(id in out for id in BY_ID)
    assert out.endswith("next: read 01_dp.py, then python workshop.py start 01\n")
    for wrong in (["check"], ["watch", "01"], ["reset", "Q1.1"]):
        code, _, err = run(project, *wrong)
        assert code == 2 and "start 01" in err and err.count("\n") == 1


@pytest.mark.parametrize("wrong", [["check", "9"], ["hint", "Q9.9"], ["show", "dp"]])
def test_what_is_no_question_and_no_chapter_is_named(project, wrong):
    code, _, err = run(project, *wrong)
    assert code == 2 and wrong[1] in err and err.count("\n") == 1


def test_start_never_overwrites_and_again_keeps_a_dated_copy(project):
    assert run(project, "start", "01")[0] == 0
    answer(project, "Q1.1", ["loss = 1"])
    path = project / "exercises/01_dp.py"
    mine = path.read_text()
    code, _, err = run(project, "start", "01")
    assert code == 2 and "--again" in err and path.read_text() == mine
    for copies in 1, 2:
        assert run(project, "start", "01", "--again")[0] == 0
        aside = list(path.parent.glob("01_dp.py.20*"))
        assert len(aside) == copies and any(copy.read_text() == mine for copy in aside)
        assert path.read_text() == workshop.exercise(project / "01_dp.py", {})


def test_start_with_a_question_empties_that_one_alone(project):
    code, out, _ = run(project, "start", "01", "--question", "Q1.4")
    text = (project / "exercises/01_dp.py").read_text()
    assert code == 0 and text.count("raise NotImplementedError") == 1
    assert 'NotImplementedError(\n            "Q1.4 ' in text
    code, out, _ = run(project, "check", "01")
    assert code == 1 and out.count("  given\n") == 6 and "Q1.4 **   not started" in out
    assert run(project, "start", "01", "--question", "Q3.1")[0] == 2


def test_one_check_tells_right_wrong_hung_open_and_broken_apart(project):
    run(project, "start", "01")
    answer(project, "Q1.1", reference("Q1.1"))
    answer(project, "Q1.2", ["for tensor in module.parameters()", "    pass"])
    answer(project, "Q1.3", reference("Q1.3")[:-1])  # never launches another
    answer(project, "Q1.4", ["while True:", "    time.sleep(1)"])
    answer(project, "A1.1", ["A1_1 = lambda P, n, m, w: 2 * (n - 1) / n * P * w * m"])
    answer(project, "Q1.6", reference("Q1.6"))
    path = project / "exercises/01_dp.py"
    text = path.read_text().replace("    # /Q1.5\n", "").replace("tiny_model(", "my_model(", 1)
    path.write_text(text + "and this does not parse\n")
    code, out, _ = run(project, "check", "01", "--json", "--timeout", "4")
    found = {record["question"]: record for record in json.loads(out)}
    assert code == 1 and {id: record["state"] for id, record in found.items()} == {
        "Q1.1": "solved", "Q1.2": "does not parse", "Q1.3": "hangs", "Q1.4": "hangs",
        "A1.1": "wrong", "Q1.5": "mark lost", "Q1.6": "solved",
    }  # fmt: skip
    line = lambda words: next(i for i, x in enumerate(text.splitlines(), 1) if words in x)
    expected = f"exercises/01_dp.py:{line('for tensor in module')}  for tensor in module"
    assert found["Q1.2"]["line"].startswith(expected) and found["Q1.2"]["python"] == "expected ':'"
    slept = f"exercises/01_dp.py:{line('time.sleep(1)')}  time.sleep(1)"
    assert slept in found["Q1.4"]["rank 0"]
    assert found["A1.1"]["expected"] == "506,496" and found["A1.1"]["found"] == "1,519,488"
    assert "# /Q1.5" in found["Q1.5"]["mark"]
    assert all(record["minutes"] and record["chapter"] == "01_dp.py" for record in found.values())

    code, out, _ = run(project)
    states = dict(re.findall(r"^  (\S+) \*+ +(.+?)  +\d+ min", out, re.M))
    assert {id: states[id] for id in found} == {id: r["state"] for id, r in found.items()}
    assert "2 of 7" in out and "next: Q1.2" in out
    answer(project, "Q1.1", ["loss = loss_sum"])
    assert "Q1.1 *    not checked" in run(project)[1]

    seconds = {record["question"]: record["seconds"] for record in
               json.loads(run(project, "check", "Q1.6", "--json")[1])}  # fmt: skip
    assert found["Q1.6"]["seconds"] > 0 == seconds["Q1.6"], "graded again, and nothing had changed"
    with open(project / "tests/test_01_dp.py", "a") as tests:
        tests.write("\n")
    assert "Q1.6 ***  not checked" in run(project)[1]

    code, out, _ = run(project, "reset", "Q1.5")
    text = path.read_text()
    assert code == 0 and "# /Q1.5" in text and "my_model" not in text and "not parse" not in text
    assert reference("Q1.6")[-1] in text and "1_1 = lambda P, n, m, w: 2 *" in text


def test_a_wrong_answer_is_told_in_a_few_lines_and_traced_on_request(project):
    run(project, "start", "01")
    turned = [line.replace("r - step - 1", "r - step + 1") for line in reference("Q1.5")]
    answer(project, "Q1.5", turned)
    answer(project, "Q1.1", ["loss_sum = logits_bSV.sum()", "loss = loss_sum / loss_sum.missing"])
    code, out, _ = run(project, "check", "01", "--timeout", "4")
    assert code == 1 and "Traceback" not in out and len(out.splitlines()) < 30
    assert "claim     the ring sums any numel and sends twice all but two chunks" in out
    assert "raised    AttributeError: 'Tensor' object has no attribute 'missing', on rank 0" in out
    assert re.search(r"line      exercises/01_dp.py:\d+  loss = loss_sum / loss_sum.missing", out)
    code, out, _ = run(project, "check", "Q1.1", "--trace")
    assert re.search(r'File "exercises/01_dp.py", line \d+, in loss_share\n', out)
    assert not re.search(r'File "/.*/01_dp.py"', out)


def test_hint_and_show(project):
    run(project, "start", "01")
    answer(project, "Q1.6", ["return x"])
    code, out, _ = run(project, "hint", "Q1.6")
    text = workshop.textwrap.fill(f"Q1.6 ***  {BY_ID['Q1.6'].text}", 96)
    again = "(hint Q1.6 again gives one more)"
    assert code == 0 and out == f"{text}\nhint 1: {BY_ID['Q1.6'].hints[0]}\n{again}\n"
    first, second, third = (run(project, "hint", "A1.1")[1] for _ in range(3))
    a, b = BY_ID["A1.1"].hints
    assert a in first and b not in first and "(hint A1.1 again" in first
    assert a in second and b in second and "again" not in second and second == third
    wide, narrow = (run(project, "show", "Q1.6", columns=n)[1] for n in (150, 60))
    assert re.search(r"^return x +│ for step in range\(n - 1\):$", wide, re.M)
    assert re.search(r"^return x$", narrow, re.M)
    assert re.search(r"^for step in range\(n - 1\):$", narrow, re.M)


def test_watch_needs_a_terminal(project):
    run(project, "start", "01")
    code, _, err = run(project, "watch", "01")
    assert code == 2 and err == "watch needs a terminal; without one, use check 01\n"


def test_a_file_of_the_second_folder_is_named_by_its_name(project):
    code, out, _ = run(project, "start", "faults")
    path = project / "exercises/beyond/faults.py"
    assert code == 0 and "raise NotImplementedError" in path.read_text()
    assert "exercises/beyond/faults.py: 3 to answer" in out and "watch faults" in out
    assert run(project, "check", "QF.2", "--json")[0] == 1
    code, out, _ = run(project, "reset", "QF.2")
    assert code == 0 and "QF.2 is empty again" in out


def test_a_class_is_listed_by_who_is_where(project, tmp_path):
    known = {"ann": {"Q1.1": ["solved", ""], "Q1.2": ["wrong", ""]}, "bob": {"A1.1": ["given", ""]}}
    for name, states in known.items():
        folder = tmp_path / "class" / name / "exercises"
        folder.mkdir(parents=True)
        (folder / ".progress.json").write_text(json.dumps(states))
    code, out, _ = run(project, "class", "class")
    head, ann, bob, most = out.splitlines()
    assert code == 0 and head.split()[:3] == ["who", "solved", "01"]
    assert re.fullmatch(r"ann +1 +1 +Q1.2 wrong +0", ann)
    assert re.fullmatch(r"bob +1 +1 +Q1.1 open +0", bob)
    assert most == "most are at Q1.2 (1), Q1.1 (1)"
    assert run(project, "class", "class/ann")[1].splitlines()[1] == ann
    for wrong in ("nowhere", "tests"):
        code, _, err = run(project, "class", wrong)
        assert code == 2 and wrong in err and err.count("\n") == 1


def test_who_reads_only_the_head_sees_no_traceback(project):
    command = f"{sys.executable} workshop.py | head -1"
    done = subprocess.run(command, shell=True, cwd=project, capture_output=True, text=True)
    assert done.stdout.startswith("01_dp.py") and done.stderr == ""


@pytest.mark.parametrize("until", [0.3, 1.5])
def test_ctrl_c_ends_it_at_once_and_in_silence(project, until):
    run(project, "start", "01")
    answer(project, "Q1.4", ["while True:", "    time.sleep(1)"])
    heed = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "workshop.py", "check", "Q1.4"]
    process = subprocess.Popen(command, cwd=project, stderr=subprocess.PIPE, preexec_fn=heed)
    time.sleep(until)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130 and process.stderr.read() == b""


INSIDE_ANOTHER_MESSAGE = """
import pytest

def test_that_expects_another_error():
    with pytest.raises(ValueError, match="a name"):
        raise ValueError("rank 0 raised: NotImplementedError: Q1.3 Ranks may")
"""


def test_pytest_grades_a_whole_exercise_file_and_names_what_is_open(project):
    run(project, "start", "01", "--question", "Q1.5")
    (project / "tests" / "test_inside.py").write_text(INSIDE_ANOTHER_MESSAGE)
    files = ["tests/test_01_dp.py", "tests/test_inside.py"]
    command = [sys.executable, "-m", "pytest", *files, "-k", "ring or rank_0_has or another_error"]
    env = os.environ | {"CHAPTERS": "exercises"}
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)
    assert re.search(r"SKIPPED \[\d\] tests/test_01_dp.py:\d+: Q1.5 not started", done.stdout)
    assert "test_inside.py:4: Q1.3 not started" in done.stdout
    assert re.search(r"1 passed, \d+ skipped", done.stdout) and "Traceback" not in done.stdout
    answer(project, "Q1.5", ["return x"])
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "Q1.5 not started" not in done.stdout


class Terminal:
    """`watch` in a terminal: what it wrote so far, and keys for it."""

    def __init__(self, project, *args):
        self.master, slave = pty.openpty()
        self.before = termios.tcgetattr(slave)
        env = os.environ | {"COLUMNS": "120", "TERM": "xterm"}
        command = [sys.executable, "workshop.py", *args]
        heed = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(  # tests started in the background ignore Ctrl-C
            command, cwd=project, env=env, stdin=slave, stdout=slave, stderr=slave, preexec_fn=heed
        )
        self.slave, self.text = slave, ""

    def wait_for(self, words, seconds=60):
        """Read until words come; forget what came before them."""
        deadline = time.monotonic() + seconds
        while words not in self.text:
            ready, _, _ = select.select([self.master], [], [], 0.2)
            self.text += os.read(self.master, 65536).decode(errors="ignore") if ready else ""
            assert time.monotonic() < deadline, f"no {words!r} in:\n{self.text}"
        before, _, self.text = self.text.partition(words)
        return before

    def press(self, key):
        os.write(self.master, key.encode())

    def close(self):
        """Its exit status; the terminal must be as it was."""
        try:
            code = self.process.wait(10)
            assert termios.tcgetattr(self.slave)[3] == self.before[3]
            return code
        finally:
            self.process.kill()
            os.close(self.master)
            os.close(self.slave)


def test_watch_in_a_terminal_and_again_where_it_was_left(project):
    run(project, "start", "01")
    terminal = Terminal(project, "watch", "01")
    terminal.wait_for(BY_ID["Q1.1"].text[:60])
    terminal.press("h")
    terminal.wait_for("hint 1: parts that add up")
    undivided = [line.replace("/ max(num_labels, 1)", "") for line in reference("Q1.1")]
    answer(project, "Q1.1", undivided)
    terminal.wait_for("wrong")
    terminal.wait_for("found     ")
    answer(project, "Q1.1", ["while True:", "    time.sleep(1)"])
    time.sleep(1)  # while it hangs, another save ends that grading
    answer(project, "Q1.1", reference("Q1.1"))
    assert "hung" not in terminal.wait_for("\033[32msolved")
    terminal.wait_for("\r\n01_dp.py\r\n\r\nloss_sum = F.cross_entropy(")
    terminal.wait_for("n next")
    answer(project, "Q1.2", ["x = ("])  # a save goes on to the next question, as n does
    terminal.wait_for("1 of 7")
    terminal.wait_for("does not parse")
    terminal.wait_for("was never closed")
    terminal.press("r")
    terminal.wait_for("Q1.2 is empty again")
    terminal.wait_for(BY_ID["Q1.2"].text[:60])
    terminal.press("q")
    assert terminal.close() == 0

    terminal = Terminal(project, "watch", "01")
    terminal.wait_for("1 of 7")
    terminal.wait_for("Q1.2")
    answer(project, "Q1.2", reference("Q1.2"))
    terminal.wait_for("n next")
    terminal.press("n")
    terminal.wait_for(BY_ID["Q1.3"].text[:60])
    terminal.press("l")
    terminal.wait_for("next: Q1.3")
    terminal.process.send_signal(2)  # Ctrl-C
    assert terminal.close() == 0


def graded(id, *lines, patience=1):
    """The Verdict on a learner's lines."""
    attempt = workshop.Attempt(BY_ID[id], list(lines), 100)
    (verdict,) = workshop.grade([attempt.refused() or attempt], patience)
    return verdict.state, dict(verdict.rows)


@pytest.mark.parametrize("id, lines, state, rows", [
    ("A1.1", ["A1_1 = lambda P, n, m, w: P / 0"], "wrong", {"raised": "ZeroDivisionError"}),
    ("A1.1", ["A1_1 = lambda P, n, m, w: 'all'"], "wrong", {"found": "'all'"}),
    ("A1.1", ["A1_1 = lambda P, n: P"], "wrong", {"raised": "TypeError"}),
    ("A1.1", ["def A1_1(P, n, m, w):", "    while 1: pass"], "hangs", {"hangs": "the"}),
    ("A1.1", ["A1_1 = lambda P, n, m, w: ..."], "not started", {}),
    ("Q1.1", ["\0"], "does not parse", {"python": "source code string cannot contain null"}),
    ("Q1.1", ["    return )"], "does not parse", {"line": "exercises/01_dp.py:101  return )"}),
    ("Q4.2", ["    while True:", "        pass"], "hangs", {"stands": "in "}),
    ("Q4.2", ["    os._exit(3)"], "wrong", {"died": "it left by os._exit(3)"}),
    ("Q4.2", ["    os.kill(os.getpid(), 9)"], "wrong", {"died": "SIGKILL"}),
    ("Q1.4", ["        os._exit(3)"], "wrong", {"died": "it left by os._exit(3)"}),
    ("Q4.2", ["    breakpoint()"], "wrong", {"raised": "RuntimeError: breakpoint() needs a term"}),
    ("Q4.2", ["    print('n is', n)"], "wrong", {"prints": "n is "}),
    ("A4.2", ["A4_2 = lambda n, m, r: print(m) or m"], "wrong", {"prints": "8"}),
    ("Q1.2", [
        "    for tensor in module.state_dict().values():",
        "        if dist.get_rank(group):",
        "            dist.broadcast(tensor, group_src=0, group=group)",
    ], "hangs", {"hangs": "rank"}),
    ("Q4.2", ["    raise NotImplementedError('Q4.2')"], "not finished", {"line": "exercises/04"}),
])  # fmt: skip
def test_what_may_stand_between_the_marks_is_answered(id, lines, state, rows):
    found, told = graded(id, *lines, patience=1 if state == "hangs" else 15)
    assert found == state and all(told[label].startswith(text) for label, text in rows.items())


def test_a_rank_that_never_calls_is_named_in_the_learners_lines():
    lines = [line.replace("dist.all_reduce(", "dist.get_rank() and dist.all_reduce(")
             for line in BY_ID["Q3.4"].answer]  # fmt: skip
    state, told = graded("Q3.4", *lines, patience=4)
    assert state == "hangs" and "Connection" not in str(told)
    assert re.match(r"(rank 0 never called|ranks wait for each other)", told["hangs"])
    assert "all_reduce, which rank 1 waits in" in told["hangs"] or "rank 1 in all_" in told["hangs"]


def test_an_answer_without_a_number_says_so_and_where_it_may_come_from():
    naive = [line.replace("total.masked_fill(total == -math.inf, 0)", "total") for line in
             BY_ID["Q6.2"].answer]  # fmt: skip
    state, told = graded("Q6.2", *naive, patience=15)
    assert state == "wrong" and " are nan" in told["found"] and told["expected"][0] == "["
    assert "-inf minus -inf, as in a row that sees nothing" in told["nan"]


def test_an_answer_is_solved_only_if_the_chapters_proof_holds_with_it(monkeypatch):
    everything = lambda attempt, *_: ({*attempt.ids}, None)
    monkeypatch.setattr(workshop.examiner(), "run", everything)
    assert graded("Q1.1", *BY_ID["Q1.1"].answer, patience=15)[0] == "solved"
    own = [line.replace("max(num_labels, 1)", "(y_bS != -100).sum()") for line in
           BY_ID["Q1.1"].answer]  # fmt: skip
    state, told = graded("Q1.1", *own, patience=15)
    assert state == "wrong" and told["claim"] == "the proof of 01_dp.py holds with this answer"
    assert told["found"].endswith("NOT AS CLAIMED") and "exercises/01_dp.py" in told["line"]


def test_cases_of_a_test_are_chosen_to_differ():
    case = lambda **params: SimpleNamespace(callspec=SimpleNamespace(params=params))
    plain = [case(n=n, smoothing=0, dtype="float") for n in (1, 2, 3, 4, 5)]
    smoothed, half = case(n=1, smoothing=0.1, dtype="float"), case(n=5, smoothing=0, dtype="half")
    chosen = workshop.examiner().differing([*plain, smoothed, half])
    assert len(chosen) == 4 and chosen[0] is plain[0] and smoothed in chosen and half in chosen


def test_each_test_of_a_question_claims_something_in_words():
    for question in QUESTIONS:
        marked = 0
        for path in question.tests:
            for node in ast.parse(path.read_text()).body:
                marks = [d for d in getattr(node, "decorator_list", []) if "question(" in
                         ast.unparse(d)]  # fmt: skip
                if any(question.id in ast.unparse(mark) for mark in marks):
                    marked += 1
                    (words,) = workshop.examiner().claim(node.name)
                    assert len(words[1].split()) >= 3, f"{path.name}: {node.name} is no sentence"
        assert marked or question.account, f"no test marks {question.id}"


def test_a_wrong_answer_beside_right_ones_is_found_and_hides_none():
    wrong = [*BY_ID["Q1.1"].answer[:-1], "    loss = loss_sum"]
    lines = {"Q1.2": BY_ID["Q1.2"].answer, "Q1.1": wrong, "Q1.6": BY_ID["Q1.6"].answer}
    attempts = [tried(*answer) for answer in lines.items()]
    assert workshop.hold_together(attempts, 9) == {"Q1.2", "Q1.6"}
    states = [verdict.state for verdict in workshop.grade(attempts, 9)]
    assert states == ["solved", "wrong", "solved"]


def test_two_answers_with_a_convention_of_their_own_are_right_as_a_pair():
    before = "chunks[(r - step) % n], chunks[(r - step - 1) % n]"
    after = "chunks[(r + 1 - step) % n], chunks[(r - step) % n]"
    one_on = "chunks[(r - step - 1) % n], chunks[(r - step - 2) % n]"
    pair = [("Q1.5", before, one_on), ("Q1.6", after, before)]
    changed = [(id, "\n".join(BY_ID[id].answer).replace(old, new)) for id, old, new in pair]
    attempts = [tried(id, text.splitlines()) for id, text in changed]
    assert all(tried.lines != tried.question.answer for tried in attempts)
    assert workshop.hold_together(attempts, 15) == {"Q1.5", "Q1.6"}


def alive(group):
    """The processes of a group that have not ended."""
    stats = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True).stdout
    fields = [line.split() for line in stats.splitlines()]
    return sum(int(pgid) == group and state[0] != "Z" for pgid, state in fields)


def offspring(parent):
    """The processes that a process has started."""
    pids = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True).stdout
    return [int(pid) for pid in pids.split()]


def test_nothing_of_a_grading_outlives_it():
    attempt = workshop.Attempt(BY_ID["Q1.4"], ["        while True:", "            pass"], 100)
    trial = workshop.examiner().Trial(attempt, patience=60)
    deadline = time.monotonic() + 50
    while alive(trial.process.pid) < 3:  # its tests, and two ranks
        assert time.monotonic() < deadline
        time.sleep(0.05)
    trial.stop()
    assert not os.path.exists(trial.folder.name)
    deadline = time.monotonic() + 10
    while alive(trial.process.pid):  # a rank closes its files just before it is seen to be gone
        assert time.monotonic() < deadline


@pytest.mark.slow
def test_a_check_that_is_stopped_ends_with_all_that_it_grades(project):
    run(project, "start", "01")
    answer(project, "Q1.4", ["while True:", "    time.sleep(1)"])
    command = [sys.executable, "workshop.py", "check", "Q1.4", "--timeout", "60"]
    checking = subprocess.Popen(command, cwd=project, stderr=subprocess.PIPE)
    ranks, grading = lambda: [group for group in offspring(checking.pid) if alive(group) > 2], []
    deadline = time.monotonic() + 50
    while not (grading := ranks()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    checking.terminate()
    assert (checking.wait(20), checking.stderr.read()) == (130, b"")
    while any(map(alive, grading)):
        assert time.monotonic() < deadline


def test_two_copies_of_one_second_are_both_kept(tmp_path, capsys):
    for text in "first", "second":
        (tmp_path / "01_dp.py").write_text(text)
        workshop.set_aside(tmp_path / "01_dp.py")
    assert {copy.read_text() for copy in tmp_path.iterdir()} == {"first", "second"}


# ── every wrong answer ───────────────────────────────────────────────────────────────────────


def tried(id, lines):
    attempt = workshop.Attempt(BY_ID[id], lines, 100)
    return attempt.refused() or attempt


@pytest.fixture(scope="session")
def verdicts():
    """Verdicts on every wrong answer, (id, why), and on the chapter's own, (id, "")."""
    attempts = {(id, ""): tried(id, BY_ID[id].answer) for id in BY_ID}
    for id, wrong in (pair for pair in WRONG if pair[0] in BY_ID):
        text = "\n".join(BY_ID[id].answer).replace(wrong["replace"], wrong["with"])
        attempts[id, wrong["why"]] = tried(id, text.splitlines())
    return dict(zip(attempts, workshop.grade(list(attempts.values()), 30, together=False)))


@pytest.mark.sweep
@each_question
def test_the_chapters_own_answer_is_solved(verdicts, id):
    verdict = verdicts[id, ""]
    assert verdict.state == "solved", workshop.told(verdict, trace=True)


@pytest.mark.sweep
@pytest.mark.parametrize("id, why", [(id, wrong["why"]) for id, wrong in WRONG])
def test_a_wrong_answer_is_caught_and_says_what_was_found(verdicts, id, why):
    verdict = verdicts[id, why]
    labels = [label for label, _ in verdict.rows]
    assert verdict.state in ("wrong", "hangs"), workshop.told(verdict, trace=True)
    assert {"found", "raised", "hangs", "died"} & set(labels)
    assert "Traceback" not in workshop.told(verdict)
    place = f"exercises/{BY_ID[id].chapter.relative_to(ROOT)}:"
    assert any(place in text for _, text in verdict.rows)


# ── wrong answers made by machine ────────────────────────────────────────────────────────────


def machine_made(id):
    """{what is wrong: lines} of answers to a question with one small fault each."""
    compiles = lambda lines: isinstance(tried(id, lines), workshop.Attempt)
    return wrong_by_machine.mutants(BY_ID[id].answer, compiles)


@each_question
def test_at_least_six_wrong_answers_are_made_of_each_region(id):
    made = machine_made(id)
    assert len(made) >= 6 - 3 * (id[0] == "A")
    assert len({name.partition(",")[0] for name in made}) >= 2
    assert set(EQUIVALENT.get(id, {})) <= {*made}, "a reason for an answer that is not made"


@pytest.fixture(scope="session")
def shares(request):
    """[caught, equivalent, made] of all machine-made answers; printed when all were graded."""
    counts = [0, 0, 0]
    yield counts
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        caught, equivalent, made = counts
        print(f"\n{caught} of {made} machine-made answers are caught, {equivalent} are equivalent")


@pytest.mark.sweep
@each_question
def test_machine_made_answers_are_caught_or_equivalent(id, shares):
    made = machine_made(id)
    attempts = [tried(id, lines) for lines in made.values()]
    verdicts = dict(zip(made, workshop.grade(attempts, 8, together=False)))
    solved = {name for name, verdict in verdicts.items() if verdict.state == "solved"}
    reasons = EQUIVALENT.get(id, {})
    for i, count in enumerate([len(made) - len(solved), len(solved & {*reasons}), len(made)]):
        shares[i] += count
    assert solved <= {*reasons}, f"{id} is solved by {sorted(solved - {*reasons})}"
    assert solved >= {*reasons}, f"{id}: caught after all, {sorted({*reasons} - solved)}"
