"""Reading and rewriting JAX programs."""

from .channels_last import channels_last
from .checkpoint_results import checkpoint_results_compiled
from .derivative_rules import (
    RULE_PARAMS,
    Rule,
    RuleOf,
    has_rules,
    is_changed_by_reading,
    read_apart,
    with_rules,
)
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
from .operations import (
    equation_flops,
    has_free_dimensions,
    loops,
    matmul_flops,
    primitives,
)
from .ragged import with_masked_products
from .rewriting import inlined
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
    "checkpoint_results_compiled",
    "closed",
    "equation_flops",
    "equations",
    "evaluated",
    "has_free_dimensions",
    "has_rules",
    "inlined",
    "inside",
    "interpret",
    "is_changed_by_reading",
    "literal_value",
    "looped",
    "loops",
    "matmul_flops",
    "named",
    "open_jaxpr",
    "own_line",
    "primitives",
    "programs_of",
    "read_apart",
    "rematerialised",
    "result_sharding",
    "scanned",
    "settled",
    "shardings",
    "source_line",
    "switched",
    "users_line",
    "with_masked_products",
    "with_programs",
    "with_rules",
    "written_in",
]
