"""Reading and rewriting JAX programs."""

from .channels_last import channels_last
from .inside import (
    Call,
    Cond,
    LinearSolve,
    Scan,
    ShardMap,
    While,
    closed,
    inside,
    open_jaxpr,
    programs_of,
)
from .interpreter import (
    at,
    evaluated,
    interpret,
    literal_value,
    looped,
    rematerialised,
    scanned,
    settled,
    switched,
)
from .lines import own_line, source_line, written_in
from .names import named
from .operations import equation_flops, loops, matmul_flops, primitives

__all__ = [
    "Call",
    "Cond",
    "LinearSolve",
    "Scan",
    "ShardMap",
    "While",
    "at",
    "channels_last",
    "closed",
    "equation_flops",
    "evaluated",
    "inside",
    "interpret",
    "literal_value",
    "looped",
    "loops",
    "matmul_flops",
    "named",
    "open_jaxpr",
    "own_line",
    "primitives",
    "programs_of",
    "rematerialised",
    "scanned",
    "settled",
    "source_line",
    "switched",
    "written_in",
]
