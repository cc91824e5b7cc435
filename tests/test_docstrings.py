"""One dialect of docstrings, held over the package and the examples; and that faults are seen."""

import ast
import textwrap

import pytest

from .docstrings import ROOT, names_of, problems, problems_of_all, sources_of

PACKAGE = {
    "eqx_dp/__init__.py": "from .room import shown, Shown",
    "eqx_dp/room/__init__.py": "from .file import shown, Shown",
    "eqx_dp/room/file.py": "class OurError(ValueError): ...\nclass Shown(Base[int]): ...",
    "eqx_dp/room/base.py": "class Base: ...",
    "eqx_dp/room/other.py": "def shown(): ...",
}
PATH = "eqx_dp/room/file.py"


def found(source: str, path: str = PATH) -> list[str]:
    return [one.says for one in problems(textwrap.dedent(source), path, names_of(PACKAGE))]


def test_the_package_and_the_examples_keep_to_the_dialect():
    assert "\n".join(map(str, problems_of_all())) == ""


def test_what_the_package_exports_is_found_where_it_is_defined():
    public = names_of(sources_of(ROOT)).public
    defined = {
        (path, node.name)
        for path, text in sources_of(ROOT).items()
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    assert {name for _, name in public - defined} == {"NeighboringRelation"}  # dp_accounting's
    assert ("eqx_dp/audit/canaries.py", "plant") in public


def test_a_docstring_in_the_dialect_has_no_problem():
    source = '''
        """A file with `code`, and a [`shown`][] link.

        ```python
        Args: this is code
        ```

        | a table | of two |
        |---|---|
        | one | row |
        """

        CONSTANT = 1
        """What it is."""

        def shown(first, /, *rest, third=None, **more):
            """Does it.

            Args:
                first: what
                    and more of it.
                *rest, third: both.
                **more: others.

            Returns:
                Something: whatever.

            Raises:
                OurError: if so.
                ValueError: if not.
            """

        class Shown(NamedTuple):
            """A pair.

            Attributes:
                one: this.
                both: a property may be told of.
            """

            one: int
            _hidden: int

            @property
            def both(self):
                """Both."""

            def at(self, i):
                """One.

                Args:
                    i: which.
                """
        '''
    assert found(source) == []


TAKES_ONE = '''
def shown(one):
    """Does it.

    {}
    """
'''


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ("Args:\n        one: what.\n\n    See ``one``.", "double backticks"),
        ("Args:\n        one: a :class:`list`.", "a Sphinx role"),
        (":param one: what.", "a Sphinx field"),
        (".. note::\n\n    What.", "a Sphinx directive"),
        ("Parameters\n    ----------\n    one\n        what.", "underlined"),
        ("=====  =====\n    one    what\n    =====  =====", "underlined"),
        ("| a | row\n    that is | two |", "a row of a table that goes on"),
        ("Arguments:\n        one: what.", "looks like a section"),
        ("args:\n        one: what.", "looks like a section"),
        ("Args: one, what.", "looks like a section"),
        ("Args :\n        one: what.", "looks like a section"),
        (
            "Args:\n        one: what.\n\n    Raise:\n        ValueError: so.",
            "looks like a section",
        ),
        ("Args:\n        one: what.\n\n    Return:\n        It.", "looks like a section"),
        ("Args:\n        one: what.\n\n    Returns:", "nothing in Returns"),
        ("Args:\n        one:", "nothing is said of one"),
        ("Args:\n        the one.", "neither an entry nor indented"),
        ("Args:\n        one: what.\n        two: more.", "there is no two"),
        ("Args:\n        two: what.", "one is not there"),
        ("Text.\n    Args:\n        one: what.", "no empty line before"),
        ("Args:\n        one: what.\n\n    Raises:\n        If it fails.", "neither an entry"),
        ("Args:\n        one: what.\n\n    Raises:\n        Failure: so.", "is no exception"),
        ("Args:\n        one: what.\n\n    Raises:\n        ValueErorr: so.", "is no exception"),
        (
            "Raises:\n        ValueError: so.\n\n    Args:\n        one: what.",
            "the order of sections",
        ),
        ("Args:\n        one: a [`gone`][].", "a link to gone, which nothing defines"),
        ("Says nothing of it.", "no Args:"),
    ],
)
def test_a_planted_fault_is_seen(section, says):
    assert says in "\n".join(found(TAKES_ONE.format(section)))


def test_arguments_in_another_order_are_seen():
    source = TAKES_ONE.replace("one", "one, two").format("Args:\n        two: b.\n        one: a.")
    assert found(source) == ["Args: the order is one, two"]


def test_a_long_line_is_seen_in_code_and_in_text():
    assert found(f"x = 1  # {'x' * 91}") == []
    assert found(f"x = 1  # {'x' * 92}") == ["the line has 101 characters"]
    assert found(f'"""{"x" * 98}\n"""') == ["the line has 101 characters"]


def test_only_what_is_exported_needs_args():
    unsaid = TAKES_ONE.format("Says nothing of it.")
    assert found(unsaid) == ["shown is public and takes one: no Args:"]
    assert found(unsaid, path="eqx_dp/room/other.py") == []
    assert found(unsaid.replace("shown", "_shown")) == []


def test_a_public_class_tells_its_fields_and_its_methods_their_arguments():
    source = '''
        class Shown(eqx.Module):
            """A pair."""

            one: int

            def at(self, i):
                """One."""

            def _hidden(self, i):
                """No matter."""

            @property
            def both(self):
                """Both."""
        '''
    assert found(source) == [
        "Shown is public and takes one: no Args:",
        "at is public and takes i: no Args:",
    ]


def test_what_a_public_class_inherits_is_public():
    source = '''
        class Base(Generic[T]):
            """What it does."""

            def at(self, i):
                """One."""
        '''
    assert found(source, path="eqx_dp/room/base.py") == ["at is public and takes i: no Args:"]
    assert found(source, path="eqx_dp/room/other.py") == []


def test_a_field_that_is_not_told_and_one_that_is_not_there_are_seen():
    source = '''
        class Hidden(NamedTuple):
            """A pair.

            Attributes:
                one: this.
                three: that.
            """

            one: int
            two: int
        '''
    assert found(source) == ["Attributes: there is no three", "Attributes: two is not there"]


def test_strings_behind_constants_are_read():
    assert found('X = 1\n"""A ``constant``."""') == ["double backticks: '``'"]
