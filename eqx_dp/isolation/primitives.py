"""Which primitives keep examples apart once `vmap` has mapped them.

JAX's own batching rules are trusted: they give each example the result that it would get alone. A
primitive that is not in the lists below, or whose rule mixes examples, is refused. A test goes over
every accepted one: no example changes another, bit for bit, and its own results stay mapped.
"""

import weakref
from collections.abc import Callable
from numbers import Integral
from typing import Any

import jax.extend.core as jex_core
from jax.extend.core import primitives as jax_primitives

from ..programs import OF_LAX, named

REFERENCES = named("addupdate freeze get new_ref swap")
"""They read or write a mutable array, which outlives the example."""

STATEFUL = named("io_callback")
"""A function on the host that may remember what it is given."""

CALLBACKS = named("pure_callback ffi_call buffer_callback")
"""A function on the host gets whole batches unless it says otherwise."""

REDUCTIONS = named("unvmap_all unvmap_any unvmap_max")
"""Equinox's, which see a whole batch from inside `vmap`."""

ATTENTION = frozenset(name for name in OF_LAX if name.startswith("dot_product_attention"))
"""By cuDNN. See `_is_plain_attention`."""

# The loop of the incomplete beta function runs for all elements until the last has converged.
_MIXING = named("custom_vmap_call regularized_incomplete_beta")
_MEETING = REFERENCES | STATEFUL | REDUCTIONS | _MIXING

# The random numbers of a batch of other keys all come from the first of them.
_APART = ("key<fry>", "key<chacha12>", "key<chacha20>")
GENERATORS: dict[str, tuple[str, ...]] = {
    "random_bits": _APART,
    "random_gamma": _APART,
    "random_fold_in": (*_APART, "key<rbg>"),
    "random_split": (*_APART, "key<rbg>"),
}

# Reading a device's own position, or marking what a value varies along, exchanges nothing.
_LOCAL = named("axis_index pvary pbroadcast")

_NOT_JAXS = {"after_all", "create_token", "custom_lin", "rng_bit_generator", "rng_uniform"}
_OBJECTS = {value for name, value in vars(jax_primitives).items() if name.endswith("_p")}
_JAXS = frozenset(value for value in _OBJECTS if value.name not in _NOT_JAXS)
_OF_EQUINOX = named("maybe_set nonbatchable nondifferentiable_backward nontraceable select_if_vmap")

_OWN_RULES: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def engines_rule(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a batching rule of the engine, of a `jax.custom_batching.custom_vmap`.

    Its first result has examples in front, each entry from one example alone; all others are sums
    over examples. No other batching rule is accepted.
    """
    _OWN_RULES.add(rule)
    return rule


def is_engines(equation: jex_core.JaxprEqn) -> bool:
    """Whether an equation has a batching rule of the engine."""
    rule = getattr(equation.params.get("rule"), "rule", None)
    return equation.primitive.name == "custom_vmap_call" and rule in _OWN_RULES


def axes_named(equation: jex_core.JaxprEqn) -> frozenset[Any]:
    """The names of the axes that an equation's collective goes over."""
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple) else (axes,)
    return frozenset(axis for axis in axes if not isinstance(axis, Integral))


def is_known(equation: jex_core.JaxprEqn) -> bool:
    """Whether the lists name the primitive."""
    known = OF_LAX | _OF_EQUINOX | _MEETING | CALLBACKS | {"pallas_call"}
    return equation.primitive in _JAXS or equation.primitive.name in known


def keeps_apart(equation: jex_core.JaxprEqn, bound: frozenset[Any]) -> bool:
    """Whether a mapped equation's result for an example depends only on that example.

    Args:
        equation: one whose programs are not followed.
        bound: names of axes that the program of one example binds itself.
    """
    name = equation.primitive.name
    if axes_named(equation) - bound and name not in _LOCAL:
        return False
    if name in GENERATORS:
        key: Any = equation.invars[0].aval
        return str(key.dtype) in GENERATORS[name]
    if name in CALLBACKS:
        return str(equation.params.get("vmap_method")).startswith("sequential")
    if name == "pallas_call":
        return _is_plain_kernel(equation.params["grid_mapping"])
    if name in ATTENTION:
        return _is_plain_attention(equation)
    return is_known(equation) and name not in _MEETING


def _is_plain_kernel(grid: Any) -> bool:
    """Whether a Pallas kernel has only its blocks.

    Scratch memory, and references to whole arrays, outlive a step of the grid, and `vmap` makes one
    step for each example.
    """
    spaces = {str(block.block_aval.memory_space).lower() for block in grid.block_mappings}
    return not (grid.scratch_avals or grid.num_index_operands or spaces - {"none", "default"})


def _is_plain_attention(equation: jex_core.JaxprEqn) -> bool:
    """Whether attention by cuDNN treats an example alike, whatever else is in the batch.

    In 8 bits (where nothing is said of dropout) it returns the largest values of the batch. Dropout
    is drawn by an example's place in the batch; offsets and tables of pages count over the batch.
    """
    packed: list[Any] = equation.invars[6:10]
    return equation.params.get("dropout_rate") == 0 and all(0 in x.aval.shape for x in packed)
