"""Which cases run by every method at once: book-keeping, and others where they differ."""

from collections.abc import Iterable
from typing import Any

import pytest


def by_method(
    names: Iterable[str], *, ghost: Iterable[str] = (), per_example: Iterable[str] = ()
) -> list[Any]:
    """Every name by every method: by book-keeping at once, by others where named, else slow."""
    at_once = {"book_keeping": set(names), "ghost": set(ghost), "per_example": set(per_example)}
    return [
        pytest.param(name, method, marks=[] if name in quick else [pytest.mark.slow])
        for name in names
        for method, quick in at_once.items()
    ]
