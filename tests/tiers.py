"""Which rows of a table run by README's command, which in the slow tier, and which by hand."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

METHODS = ["per_example", "book_keeping", "ghost"]
"""Every way to clip; which one is chosen is `method`."""


def curated(rows: Iterable[Any], at_once: Sequence[Any], every: int = 1) -> list[Any]:
    """All rows; of those that are not in `at_once` one in `every` is slow, the rest exhaustive."""
    rows = [*rows]
    assert all(row in rows for row in at_once)
    later = itertools.count()

    def placed(row: Any) -> Any:
        if row in at_once:
            return row
        mark = pytest.mark.exhaustive if next(later) % every else pytest.mark.slow
        return pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=mark)

    return [placed(row) for row in rows]


def by_method(
    names: Iterable[str],
    *,
    book_keeping: Iterable[str] | None = None,
    ghost: Iterable[str] = (),
    per_example: Iterable[str] = (),
    every: int = 1,
) -> list[Any]:
    """Every name by every method: by book-keeping at once, or where named; others: `curated`."""
    names = [*names]
    at_once = {
        "book_keeping": names if book_keeping is None else book_keeping,
        "ghost": ghost,
        "per_example": per_example,
    }
    rows = [(name, method) for name in names for method in at_once]
    chosen = [(name, method) for method in at_once for name in at_once[method]]
    return curated(rows, chosen, every)
