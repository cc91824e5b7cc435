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
    source_line,
    switched,
)
from .operations import loops, matmul_flops, primitives

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
    "evaluated",
    "inside",
    "interpret",
    "literal_value",
    "looped",
    "loops",
    "matmul_flops",
    "open_jaxpr",
    "primitives",
    "programs_of",
    "rematerialised",
    "scanned",
    "settled",
    "source_line",
    "switched",
]
