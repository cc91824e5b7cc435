"""Reading and rewriting JAX programs."""

from .channels_last import channels_last
from .derivative_rules import RULE_PARAMS, Rule, RuleOf, has_rules, with_rules
from .inside import (
    Call,
    Cond,
    LinearSolve,
    Scan,
    ShardMap,
    While,
    closed,
    equations,
    inside,
    open_jaxpr,
    programs_of,
    with_programs,
)
from .interpreter import (
    at,
    bound,
    evaluated,
    interpret,
    literal_value,
    looped,
    rematerialised,
    scanned,
    settled,
    switched,
)
from .lines import own_line, source_line, users_line, written_in
from .names import named
from .operations import equation_flops, loops, matmul_flops, primitives
from .shardings import PLACEMENTS, result_sharding, shardings

__all__ = [
    "PLACEMENTS",
    "RULE_PARAMS",
    "Call",
    "Cond",
    "LinearSolve",
    "Rule",
    "RuleOf",
    "Scan",
    "ShardMap",
    "While",
    "at",
    "bound",
    "channels_last",
    "closed",
    "equation_flops",
    "equations",
    "evaluated",
    "has_rules",
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
    "result_sharding",
    "scanned",
    "settled",
    "shardings",
    "source_line",
    "switched",
    "users_line",
    "with_programs",
    "with_rules",
    "written_in",
]
