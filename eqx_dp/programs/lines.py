"""Where an equation was written."""

import functools
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jex_core
from jax.extend import source_info_util

# Libraries between a user's call and an equation.
_BENEATH = ("jax", "jaxtyping", "beartype")

_FAMILY = ("equinox", "diffrax", "optimistix", "lineax")  # which reduce over all examples


def source_line(equation: jex_core.JaxprEqn) -> str:
    """The line that an equation comes from, for an error: the innermost that is not JAX's."""
    return source_info_util.summarize(equation.source_info)


def own_line(equation: jex_core.JaxprEqn, around: str = "", within: str = "") -> str:
    """The innermost line that is in no library; "" if there is none.

    JAX forgets the calls that led to a branch: then `around` is used, the line of the equation that
    holds its program. Callers of the function `within` of this package are ignored.
    """
    traceback: Any = equation.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        is_installed = _is_in_library(frame.file_name)
        if is_installed and frame.function_name == within:
            break
        if not is_installed:
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    file, _, _ = around.rpartition(":")
    return around if file and not _is_in_library(file) else ""


def users_line(equation: jex_core.JaxprEqn, around: str, within: str) -> str:
    """As [`own_line`][], but the line of a library if there is no other."""
    return own_line(equation, around, within) or source_line(equation)


@functools.cache
def _is_in_library(file_name: str) -> bool:
    """Whether a file is installed, Python's own, or of this package."""
    path = Path(file_name)
    ours, python = Path(__file__).parents[1], Path(sysconfig.get_path("stdlib"))
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    folders = {ours, python, Path(jax.__file__).parent}
    return is_installed or file_name.startswith("<frozen") or not folders.isdisjoint(path.parents)


def written_in(equation: jex_core.JaxprEqn) -> Iterator[tuple[str, str, Any]]:
    """The calls that led to an equation, innermost first, without JAX's own.

    Returns:
        For each, the name of its library, if that matters here, or ""; its file within the library;
        and the frame.
    """
    folders = {
        name: Path(file).parent
        for name in (*_BENEATH, *_FAMILY)
        if (file := getattr(sys.modules.get(name), "__file__", None)) is not None
    }
    traceback: Any = equation.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        file = Path(frame.file_name)
        library = next((name for name, at in folders.items() if at in file.parents), "")
        if library not in _BENEATH:
            path = file.relative_to(folders[library]) if library else file
            yield library, path.as_posix(), frame
