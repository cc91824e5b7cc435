"""Which rows of a table run by README's command, and which in the slow tier."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def curated(rows: Iterable[Any], at_once: Sequence[Any]) -> list[Any]:
    """All rows; those that are not in `at_once` are slow."""
    rows = [*rows]
    assert all(row in rows for row in at_once)
    return [row if row in at_once else _slow(row) for row in rows]


def by_method(
    names: Iterable[str],
    *,
    book_keeping: Iterable[str] | None = None,
    ghost: Iterable[str] = (),
    per_example: Iterable[str] = (),
) -> list[Any]:
    """Every name by every method: by book-keeping at once, or where named; others where named."""
    names = [*names]
    at_once = {
        "book_keeping": names if book_keeping is None else book_keeping,
        "ghost": ghost,
        "per_example": per_example,
    }
    rows = [(name, method) for name in names for method in at_once]
    return curated(rows, [(name, method) for method in at_once for name in at_once[method]])


def _slow(row: Any) -> Any:
    return pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow)
