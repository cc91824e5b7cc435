"""Where an equation was written."""

from collections.abc import Iterator
from typing import Any

import jax.extend.core as jex_core
from jax.extend import source_info_util

# Equinox's files are nobody's own code, and neither are those of what checks annotations.
_LIBRARIES = ("/jax/", "/jaxtyping/", "/beartype/", "/equinox/")


def frames_of(equation: jex_core.JaxprEqn) -> Iterator[Any]:
    """The calls that led to an equation, innermost first, without JAX's own."""
    traceback: Any = equation.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        file = frame.file_name.replace("\\", "/")
        if not any(library in file for library in _LIBRARIES[:-1]):
            yield frame


def line_of(equation: jex_core.JaxprEqn) -> str:
    """The user's line, or, where there is none, the innermost that JAX knows."""
    for frame in frames_of(equation):
        if _LIBRARIES[-1] not in frame.file_name.replace("\\", "/"):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return source_info_util.summarize(equation.source_info)
