"""Where an equation was written."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.extend.core as jex_core
from jax.extend import source_info_util

# What a call of the user's goes through on its way to an equation.
_BENEATH = ("jax", "jaxtyping", "beartype")

LIBRARIES = ("equinox", "diffrax", "optimistix", "lineax")
"""Libraries of one family, which share Equinox's ways to reduce over all examples."""


def source_line(equation: jex_core.JaxprEqn) -> str:
    """The line that an equation comes from, for an error: the innermost that is not JAX's."""
    return source_info_util.summarize(equation.source_info)


def own_line(equation: jex_core.JaxprEqn) -> str:
    """The innermost line of the user's, outside of Equinox and its family; "" if there is none."""
    for library, _, frame in written_in(equation):
        if not library:
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return ""


def written_in(equation: jex_core.JaxprEqn) -> Iterator[tuple[str, str, Any]]:
    """The calls that led to an equation, innermost first, without JAX's own.

    Returns:
        For each the name of the library that it is in, of those that matter here, or ""; its file,
        from there; and the frame.
    """
    folders = {
        name: Path(file).parent
        for name in (*_BENEATH, *LIBRARIES)
        if (file := getattr(sys.modules.get(name), "__file__", None)) is not None
    }
    traceback: Any = equation.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        file = Path(frame.file_name)
        library = next((name for name, at in folders.items() if at in file.parents), "")
        if library not in _BENEATH:
            path = file.relative_to(folders[library]) if library else file
            yield library, path.as_posix(), frame
