"""The dialect of docstrings, as rules that can be run: `python -m tests.docstrings`.

Google sections, Markdown, single backticks for code. The sources are parsed and not imported, so
that a hook before every commit takes a second.
"""

import ast
import builtins
import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

ROOT = Path(__file__).parents[1]
LONGEST_LINE = 100

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Warns")
# What other dialects, and haste, write in their place.
_MISSPELLED = re.compile(
    r"(args?|arguments?|params?|parameters?|keyword args|keyword arguments|other parameters"
    r"|attrs?|attributes?|fields|returns?|yields?|raises?|exceptions?|errors|warns?|warnings?"
    r"|examples?|notes?|see also|references?|todo)\s*:(\s.*)?",
    re.IGNORECASE,
)
_TEXT_RULES = {
    "double backticks": re.compile(r"(?<!`)``(?!`)"),
    "a Sphinx role": re.compile(r":[a-z]+(:[a-z]+)?:`"),
    "a Sphinx field": re.compile(r"^\s*:(param|type|return|returns|rtype|raises?)\b.*:", re.M),
    "a Sphinx directive": re.compile(r"^\s*\.\. [a-z-]+::", re.M),
    "a row of a table that goes on in another line": re.compile(r"^\s*\| .*[^|\s]\s*$", re.M),
    "a section or a table underlined": re.compile(r"^\s*(-{3,}|={3,}|~{3,})(\s+[-=~]+)*\s*$", re.M),
}
_ENTRY = re.compile(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*):(?: (.*))?$")
_REFERENCE = re.compile(r"\[`([\w.]+)`\]\[\]")

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_PUBLIC = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_Documented: TypeAlias = ast.Module | ast.ClassDef | _Function


class Problem(NamedTuple):
    """One thing that is not in the dialect."""

    path: str
    line: int
    says: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.says}"


class Names(NamedTuple):
    """What all sources define.

    Attributes:
        defined: every class, function, method and constant, by its bare name.
        exceptions: the classes that can be raised.
        members: the attributes of each class, its bases included, by its bare name.
        public: the classes and functions that `eqx_dp/__init__.py` exports, and the bases of these
            classes, each behind the path of the file that defines it.
    """

    defined: frozenset[str]
    exceptions: frozenset[str]
    members: dict[str, frozenset[str]]
    public: frozenset[tuple[str, str]]


def problems_of_all(root: Path = ROOT) -> list[Problem]:
    """The problems in `eqx_dp` and `examples`."""
    sources = sources_of(root)
    names = names_of(sources)
    return [problem for path, text in sources.items() for problem in problems(text, path, names)]


def sources_of(root: Path) -> dict[str, str]:
    """The sources that are held to the dialect, by path."""
    paths = sorted(path for top in ("eqx_dp", "examples") for path in (root / top).rglob("*.py"))
    return {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in paths}


def names_of(sources: dict[str, str]) -> Names:
    """What the sources define; what is public is what the package's own file imports."""
    defined: set[str] = set()
    bases: dict[str, set[str]] = {}
    paths: dict[str, str] = {}
    members: dict[str, frozenset[str]] = {}
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.ClassDef():
                    defined.add(node.name)
                    paths[node.name] = path
                    its = frozenset(_fields(node) + _properties(node))
                    members[node.name] = members.get(node.name, frozenset()) | its
                    bases[node.name] = _bases(node)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    defined.add(node.name)
                case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                    defined.add(name)
                case _:
                    pass
    exceptions = {
        name
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    while more := {name for name, its in bases.items() if its & exceptions} - exceptions:
        exceptions |= more
    for name in members:
        above = [name]
        for one in above:
            above += [base for base in bases[one] if base in members and base not in above]
        members[name] = frozenset[str]().union(*(members[one] for one in above))
    public = set(_exported("eqx_dp", sources))
    while (
        more := {(paths[b], b) for _, c in public for b in bases.get(c, ()) if b in paths} - public
    ):
        public |= more
    return Names(frozenset(defined), frozenset(exceptions), members, frozenset(public))


def _exported(
    folder: str, sources: dict[str, str], wanted: frozenset[str] | None = None
) -> frozenset[tuple[str, str]]:
    """The path and the name of what a package's own file imports from its files and rooms."""
    found: set[tuple[str, str]] = set()
    for node in ast.parse(sources[f"{folder}/__init__.py"]).body:
        if not isinstance(node, ast.ImportFrom) or node.level != 1:
            continue
        names = frozenset(one.name for one in node.names)
        names = names if wanted is None else names & wanted
        if node.module is None:  # rooms and files themselves
            for name in names:
                file = f"{folder}/{name}.py"
                if f"{folder}/{name}/__init__.py" in sources:
                    found |= _exported(f"{folder}/{name}", sources)
                elif file in sources:
                    own = (x for x in ast.parse(sources[file]).body if isinstance(x, _PUBLIC))
                    found |= {(file, one.name) for one in own if not one.name.startswith("_")}
            continue
        inside = f"{folder}/{node.module}"
        if f"{inside}.py" in sources:
            found |= {(f"{inside}.py", name) for name in names}
        else:
            found |= _exported(inside, sources, names)
    return frozenset(found)


def problems(text: str, path: str, names: Names) -> list[Problem]:
    """The problems of one file.

    Args:
        text: its source.
        path: for the message.
        names: what all files define.
    """
    found = [
        Problem(path, number, f"the line has {len(line)} characters")
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > LONGEST_LINE
    ]
    public = frozenset(name for where, name in names.public if where == path)
    for node, is_public in _documented(ast.parse(text), public - names.exceptions):
        doc = ast.get_docstring(node, clean=False)
        line = 1 if isinstance(node, ast.Module) else node.lineno
        text_of = inspect.cleandoc(doc) if doc else ""
        found += [Problem(path, line, said) for said in _of_docstring(node, text_of, names)]
        if is_public:
            found += [Problem(path, line, said) for said in _of_public(node, text_of)]
    for node in _strings_behind(ast.parse(text)):
        said = inspect.cleandoc(str(node.value))
        found += [Problem(path, node.lineno, one) for one in _of_text(said, names)]
    return sorted(found)


def _documented(
    node: ast.AST, public: frozenset[str], is_public: bool | None = None
) -> Iterator[tuple[_Documented, bool]]:
    """All that can have a docstring, and whether users see it.

    Args:
        node: where to look.
        public: the names that the package exports from this file.
        is_public: whether what is around is; None at the top.
    """
    if isinstance(node, ast.Module):
        yield node, False
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.ClassDef | _Function):
            yield from _documented(child, public, is_public)
            continue
        if is_public is None:
            its = child.name in public
        else:
            its = is_public and (child.name == "__call__" or not child.name.startswith("_"))
        if not _is_overload(child):
            yield child, its
        inner = its if isinstance(child, ast.ClassDef) else False
        yield from _documented(child, public, inner)


def _is_overload(node: ast.ClassDef | _Function) -> bool:
    return any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list)


def _strings_behind(module: ast.Module) -> Iterator[ast.Constant]:
    """The strings behind constants, which say what these are."""
    for node in ast.walk(module):
        if not isinstance(node, ast.Module | ast.ClassDef):
            continue
        for before, after in itertools.pairwise(node.body):
            match before, after:
                case ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str()) as said):
                    yield said
                case _:
                    pass


def _of_text(text: str, names: Names) -> Iterator[str]:
    for what, pattern in _TEXT_RULES.items():
        if found := pattern.search(text):
            yield f"{what}: {found[0].strip()!r}"
    for name in _REFERENCE.findall(text):
        if name.split(".")[-1] not in names.defined:
            yield f"a link to {name}, which nothing defines"


def _of_docstring(node: _Documented, text: str, names: Names) -> Iterator[str]:
    yield from _of_text(text, names)
    sections: dict[str, list[str]] = {}
    is_in_code, is_after_blank, current = False, True, None
    for line in text.splitlines():
        is_in_code ^= line.startswith("```")
        if line and not line.startswith(" ") and not is_in_code:
            name = line.removesuffix(":")
            current = None
            if name in SECTIONS and line.endswith(":"):
                if name in sections:
                    yield f"two sections {line}"
                if not is_after_blank:
                    yield f"no empty line before {line}"
                current = sections[name] = []
            elif _MISSPELLED.fullmatch(line):
                allowed = ", ".join(f"{section}:" for section in SECTIONS)
                yield f"{line!r} looks like a section; these are: {allowed} alone in their line"
        elif current is not None:
            current.append(line)
        is_after_blank = not line
    if list(sections) != [section for section in SECTIONS if section in sections]:
        yield f"the order of sections is {', '.join(SECTIONS)}; found {', '.join(sections)}"
    for section, lines in sections.items():
        yield from _of_section(node, section, lines, names)


def _of_section(node: _Documented, section: str, lines: list[str], names: Names) -> Iterator[str]:
    if not any(line.strip() for line in lines):
        yield f"nothing in {section}:"
        return
    if section in ("Returns", "Yields"):
        return
    entries: list[str] = []
    for line in lines:
        if entry := _ENTRY.match(line):
            entries += entry[1].split(", ")
            if not entry[2]:
                yield f"{section}: nothing is said of {entry[1]}"
        elif line.strip() and not line.startswith(" " * 8):
            yield f"{section}: {line.strip()!r} is neither an entry nor indented below one"
    if section in ("Raises", "Warns"):
        unknown = [name for name in entries if name not in names.exceptions]
        if unknown:
            yield f"{section}: {', '.join(unknown)} is no exception"
    elif section == "Args":
        yield from _compared("Args", entries, parameters(node))
    else:
        known = {*_fields(node), *_properties(node)}
        known.update(*(names.members.get(base, ()) for base in _bases(node)))
        yield from _compared("Attributes", entries, [n for n in known if n in entries])
        missing = [name for name in _fields(node) if name not in entries]
        if missing:
            yield f"Attributes: {', '.join(missing)} is not there"


def _compared(section: str, found: list[str], there: list[str]) -> Iterator[str]:
    extra = [name for name in found if name not in there]
    missing = [name for name in there if name not in found]
    if extra:
        yield f"{section}: there is no {', '.join(extra)}"
    if missing:
        yield f"{section}: {', '.join(missing)} is not there"
    if not extra and not missing and found != there and section == "Args":
        yield f"Args: the order is {', '.join(there)}"


def _of_public(node: _Documented, text: str) -> Iterator[str]:
    if not text:
        yield "public, and no docstring"
    takes = parameters(node)
    said = "Args:" in text.splitlines() or (
        isinstance(node, ast.ClassDef) and "Attributes:" in text.splitlines()
    )
    if takes and not said:
        yield f"{getattr(node, 'name', '')} is public and takes {', '.join(takes)}: no Args:"


def parameters(node: _Documented) -> list[str]:
    """The names of what a function, or a class, is called with; starred as a caller knows them."""
    if isinstance(node, ast.Module):
        return []
    if isinstance(node, ast.ClassDef):
        made = [n for n in node.body if isinstance(n, _Function) and n.name == "__init__"]
        return parameters(made[0]) if made else _fields(node)
    decorators = {ast.unparse(one).split("(")[0] for one in node.decorator_list}
    if decorators & {"property", "functools.cached_property"}:
        return []
    given = node.args
    names = [one.arg for one in (*given.posonlyargs, *given.args)]
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    if given.vararg:
        names.append(f"*{given.vararg.arg}")
    names += [one.arg for one in given.kwonlyargs]
    if given.kwarg:
        names.append(f"**{given.kwarg.arg}")
    return names


def _bases(node: _Documented) -> set[str]:
    """The names of what a class is made from, without parameters of a generic one."""
    bases = node.bases if isinstance(node, ast.ClassDef) else []
    return {ast.unparse(base).split("[")[0] for base in bases}


def _fields(node: _Documented) -> list[str]:
    """The public fields that a class annotates: of a dataclass, a module, a named tuple."""
    return [
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and not statement.target.id.startswith("_")
        and not ast.unparse(statement.annotation).startswith("ClassVar")
    ]


def _properties(node: _Documented) -> list[str]:
    """Properties of a class, and what its methods assign to `self`."""
    names = [n.name for n in node.body if isinstance(n, _Function)]
    assigned = [
        n.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
    ]
    return [*names, *dict.fromkeys(assigned)]


if __name__ == "__main__":
    all_problems = problems_of_all()
    print(*all_problems, sep="\n")
    sys.exit(bool(all_problems))
