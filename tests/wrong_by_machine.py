"""Wrong answers that a machine makes: the chapter's own lines with one small fault.

`mutants(lines)` makes answers of as many kinds as fit: a line dropped, two lines swapped, `if` for
`while`, one more, one less, another operator, a condition turned round, no group, another name.
"""

import ast
import hashlib
import itertools
import textwrap

EACH = 8  # answers to a question
OTHER = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.FloorDiv: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}  # fmt: skip


def of_lines(node):
    """Yield (kind, function that makes the fault) for the statements that stand in a node."""
    for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
        for i, line in enumerate(body if isinstance(body, list) else ()):
            yield "line dropped", lambda body=body, i=i: body.__setitem__(i, ast.Pass())
            if i:
                yield "lines swapped", lambda body=body, i=i: body.insert(i - 1, body.pop(i))
            if isinstance(line, ast.While):
                once = ast.If(line.test, line.body, [])
                yield "if for while", lambda body=body, i=i, once=once: body.__setitem__(i, once)


def of_node(node):
    """Yield (kind, function that makes the fault) for a node itself."""
    match node:
        case ast.Constant(value=bool()):
            yield "flag", lambda: setattr(node, "value", not node.value)
        case ast.Constant(value=int()):
            yield "one more", lambda: setattr(node, "value", node.value + 1)
            yield "one less", lambda: setattr(node, "value", node.value - 1)
        case ast.Constant(value=str()) if node.value:
            yield "word left out", lambda: setattr(node, "value", node.value.rpartition(" ")[0])
        case ast.BinOp() | ast.AugAssign() | ast.BoolOp() if type(node.op) in OTHER:
            yield "operator", lambda: setattr(node, "op", OTHER[type(node.op)]())
        case ast.Compare() if type(node.ops[0]) in OTHER:
            yield "comparison", lambda: node.ops.__setitem__(0, OTHER[type(node.ops[0])]())
        case ast.UnaryOp():
            yield "sign", lambda: setattr(node, "op", ast.UAdd())
        case ast.If() | ast.IfExp() | ast.While():
            yield "condition", lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
        case ast.Call():
            for i, keyword in enumerate(node.keywords):
                kind = "group" if keyword.arg == "group" else "argument"
                yield f"{kind} left out", lambda i=i: node.keywords.pop(i)
            if len(node.args) > 1:
                first = slice(0, 2)
                yield "arguments swapped", lambda: node.args.__setitem__(first, node.args[1::-1])
        case ast.Subscript(slice=ast.Constant() | ast.Name() | ast.BinOp()):
            before = ast.BinOp(node.slice, ast.Sub(), ast.Constant(1))
            yield "index", lambda: setattr(node, "slice", before)


def of_names(tree):
    """Yield (kind, function that makes the fault) for each name that another one could replace."""
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    names = sorted({node.id for node in used})
    for node in used:
        if isinstance(node.ctx, ast.Load) and len(names) > 1:
            other = names[(names.index(node.id) + 1) % len(names)]
            yield "another name", lambda node=node, other=other: setattr(node, "id", other)


def every_fault(lines):
    """Yield (kind, lines) for each fault that fits into the lines."""
    pad = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    text = "def answer():\n" + textwrap.indent(textwrap.dedent("\n".join(lines)), "    ")
    for index in itertools.count():
        tree = ast.parse(text)
        nodes = ast.walk(tree.body[0])
        small = (pair for node in nodes for pair in itertools.chain(of_lines(node), of_node(node)))
        faults = itertools.chain(small, of_names(tree))
        fault = next(itertools.islice(faults, index, None), None)
        if fault is None:
            return
        fault[1]()
        yield fault[0], [pad + line[4:] for line in unparsed(tree)]


def unparsed(tree):
    """The lines of the function in a tree."""
    return ast.unparse(ast.fix_missing_locations(tree)).splitlines()[1:]


def mutants(lines, compiles):
    """Return {kind and changed line: lines} of at most EACH wrong answers, of as many kinds as fit.
    They are the same ones each time. `compiles(lines)` says which can stand in the place."""
    text = "def answer():\n" + textwrap.indent(textwrap.dedent("\n".join(lines)), "    ")
    plain, kinds = [line[4:] for line in unparsed(ast.parse(text))], {}
    for kind, new in every_fault(lines):
        bare = textwrap.dedent("\n".join(new)).splitlines()
        pairs = enumerate(itertools.zip_longest(plain, bare, fillvalue=""), 1)
        at, changed = next(((i, b) for i, (a, b) in pairs if a != b), (0, ""))
        if at and compiles(new):
            kinds.setdefault(kind, {})[f"{kind}, line {at}: {changed.strip()}"] = new
    shuffled = lambda names: sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    turns = itertools.zip_longest(*(shuffled(named) for named in kinds.values()))
    chosen = [name for turn in turns for name in turn if name][:EACH]
    return {name: kinds[name.partition(",")[0]][name] for name in chosen}
