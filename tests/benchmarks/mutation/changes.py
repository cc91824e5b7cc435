"""Small changes of a module's code, each of which a test should find."""

import ast
from collections.abc import Iterator
from typing import NamedTuple

_COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_CALLED = {"min": "max", "minimum": "maximum", "ceil": "floor", "any": "all", "fmin": "fmax"}
_CALLED |= {other: name for name, other in _CALLED.items()}


# Arguments that change no result: what is raised or shown, or how a function may be called.
_UNSEEN = {"strict", "stacklevel", "indent", "repr", "kw_only", "static"}
_SHOWN = {"__repr__", "__str__", "_repr_html_"}


NOT_EXCHANGED = 3
"""The exit status of a fork that cannot change a module that is imported."""


class Mutant(NamedTuple):
    """One change.

    Attributes:
        line: where it is.
        last: the last line of what is changed; of a branch, of its test.
        text: the function or method that it is in, and the code before and after.
        place: which node of the module is changed.
        turn: which of the node's changes it is.
        is_at_import: whether it runs when the module is imported, and not in a call.
        kind: what is changed: the name of a class of `ast`.
    """

    line: int
    last: int
    text: str
    place: int
    turn: int
    is_at_import: bool
    kind: str = ""

    def planted(self, source: str) -> ast.Module:
        """The module with the change."""
        return planted(source, self.place, self.turn)


class _Place(NamedTuple):
    """A node that may change, the function it is in, and whether it runs at import."""

    node: ast.expr | ast.stmt
    function: str
    is_at_import: bool


def mutants(source: str) -> list[Mutant]:
    """All changes of a module: operators, comparisons, constants, terms, branches, calls.

    Left alone are docstrings, annotations, what is raised, texts, and how a value is shown.
    """
    found: list[Mutant] = []
    for number, (node, function, is_at_import) in enumerate(_changeable(ast.parse(source))):
        before = _short(ast.unparse(node))
        head = node.test if isinstance(node, ast.If) else node
        for turn, changed in enumerate(_changed(node)):
            text = f"{function}: {before}  ->  {_short(ast.unparse(changed))}"
            last = head.end_lineno or node.lineno
            kind = type(node).__name__
            found.append(Mutant(node.lineno, last, text, number, turn, is_at_import, kind))
    return found


def planted(source: str, place: int, turn: int) -> ast.Module:
    """A module with one change; every other line stays where it is."""
    tree = ast.parse(source)
    node = [*_changeable(tree)][place].node
    new = [*_changed(node)][turn]
    for inner in ast.walk(new):
        if not hasattr(inner, "lineno"):
            ast.copy_location(inner, node)
    _replace(tree, node, new)
    return ast.fix_missing_locations(tree)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 90 else f"{text[:87]}..."


def _changeable(tree: ast.AST, function: str = "", is_at_import: bool = True) -> Iterator[_Place]:
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        in_call = isinstance(tree, ast.FunctionDef | ast.Lambda) and name == "body"
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or _is_left_alone(node):
                continue
            inner, at_import = function, is_at_import and not in_call
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                inner = f"{function}.{node.name}".lstrip(".")
            if isinstance(node, ast.expr | ast.stmt):
                yield _Place(node, inner, at_import)
            yield from _changeable(node, inner, at_import)


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Expr(ast.Constant()) | ast.Raise() | ast.JoinedStr():
            return True
        case ast.Import() | ast.ImportFrom() | ast.AnnAssign(annotation=ast.Name("TypeAlias")):
            return True
        case ast.keyword(arg=name):
            return name in _UNSEEN
        case ast.FunctionDef(name=name):
            return name in _SHOWN
        case ast.BinOp(left, _, right):
            return any(_is_text(side) for side in (left, right))
        case _:
            return False


def _is_text(node: ast.expr) -> bool:
    is_constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_constant or isinstance(node, ast.JoinedStr)


def _changed(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """The changes of one node, each in a copy of it."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARED:
            yield ast.Compare(node.left, [_COMPARED[type(op)]()], node.comparators)
        case ast.BinOp(left, op, right) if type(op) in _COMPUTED:
            yield ast.BinOp(left, _COMPUTED[type(op)](), right)
            yield left
            yield right
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            yield from values
        case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert(), operand):
            yield operand
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.If(test, body, orelse):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.Constant(value) if isinstance(value, bool):
            yield ast.Constant(not value)
        case ast.Constant(value) if isinstance(value, int | float):
            yield ast.Constant(value + 1 if isinstance(value, int) or value == 0 else value * 2)
        case ast.Call(ast.Name(name), args, keywords) if name in _CALLED:
            yield ast.Call(ast.Name(_CALLED[name], ast.Load()), args, keywords)
        case ast.Call(ast.Attribute(value, name), args, keywords) if name in _CALLED:
            yield ast.Call(ast.Attribute(value, _CALLED[name], ast.Load()), args, keywords)
        case ast.Expr(ast.Call()):
            yield ast.Pass()
        case _:
            pass


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
            elif isinstance(value, list):
                value[:] = [new if one is old else one for one in value]
