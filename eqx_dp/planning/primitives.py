"""Which of JAX's operations a compiler fuses into those that use them."""

ELEMENTWISE = frozenset(
    [
        "abs",
        "add",
        "add_any",
        "and",
        "atan2",
        "cbrt",
        "ceil",
        "clamp",
        "convert_element_type",
        "copy",
        "copy_p",
        "cos",
        "div",
        "eq",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "ge",
        "gt",
        "integer_pow",
        "is_finite",
        "le",
        "lgamma",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mesh_cast",
        "mul",
        "ne",
        "neg",
        "nextafter",
        "not",
        "or",
        "pow",
        "pvary",
        "real",
        "reduce_precision",
        "rem",
        "reshard",
        "round",
        "rsqrt",
        "select_n",
        "sharding_constraint",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "sin",
        "sqrt",
        "square",
        "stop_gradient",
        "sub",
        "tan",
        "tanh",
        "xor",
    ]
)
"""One entry from one entry."""

MOVING = frozenset(
    [
        "bitcast_convert_type",
        "broadcast_in_dim",
        "concatenate",
        "dynamic_slice",
        "expand_dims",
        "iota",
        "pad",
        "reshape",
        "rev",
        "slice",
        "squeeze",
        "transpose",
    ]
)
"""Entries go to other places, and are not computed."""

RENAMING = frozenset(["bitcast_convert_type", "expand_dims", "reshape", "squeeze"])
"""The same bytes, read in another shape."""

COSTLY = frozenset(
    [
        "cbrt",
        "cos",
        "div",
        "erf",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "logistic",
        "pow",
        "rsqrt",
        "sin",
        "sqrt",
        "tan",
        "tanh",
    ]
)
"""Elementwise, and not repeated where two operations want the result: it is stored."""

MATRIX = frozenset(["dot_general", "conv_general_dilated"])

IN_PLACE = frozenset(["scatter", "scatter-add", "scatter_add", "dynamic_update_slice"])

CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
}
"""Functions that are compiled where they are called, and the parameter that holds them."""


def reads_in_a_loop(name: str) -> bool:
    """Whether what it is given need not be in memory: the loop that reads may compute it."""
    return name.startswith(("reduce", "arg", "cum")) or name == "gather"
