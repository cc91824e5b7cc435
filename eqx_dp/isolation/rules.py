"""What each of JAX's primitives does to the examples in its operands.

A rule says how examples stand in the results, from how they stand in one operand, or None where the
primitive lets them meet (sums over them, reverses them, cuts them). Primitives that hold programs
are in `follow`. A primitive without a rule is taken to mix examples.
"""

from collections.abc import Callable
from dataclasses import replace
from numbers import Integral
from typing import Any, TypeAlias

import jax.extend.core as jex_core

from ..programs import ENTRY_BY_ENTRY, UNCHANGED, inside, named
from .dependence import Apart, shape_of
from .folds import convolved, reshaped

Rule: TypeAlias = Callable[[jex_core.JaxprEqn, int, Apart, int], Apart | None]
"""`rule(equation, operand, apart, num_examples)`, how examples are in the results, or None."""

Dimension: TypeAlias = Callable[[jex_core.JaxprEqn, int, int], int | None]
"""`rule(equation, operand, dim)`, the dimension of the results that takes its place, or None."""


def _same(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int:
    return dim


def _but(name: str) -> Dimension:
    """All dimensions stay, and entries along those in a parameter meet."""

    def rule(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
        return None if dim in _dims_of(equation, operand, name) else dim

    return rule


def _without(name: str) -> Dimension:
    """The dimensions in a parameter are gone, and what stood along them has met."""

    def rule(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
        gone = _dims_of(equation, operand, name)
        return None if dim in gone else dim - sum(axis < dim for axis in gone)

    return rule


def _dims(value: Any) -> tuple[int, ...]:
    return tuple(map(int, value)) if isinstance(value, tuple) else (int(value),)


def _dims_of(equation: jex_core.JaxprEqn, operand: int, name: str) -> list[int]:
    """The dimensions of an operand that a parameter names; -1 is the last."""
    rank = len(shape_of(equation.invars[operand]))
    return [axis % rank for axis in _dims(equation.params[name])]


def _leading(*core: int) -> Dimension:
    """An operation on the last dimensions of each operand, `core` of them; the others stay."""

    def rule(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
        its_own = core[min(operand, len(core) - 1)]
        return dim if dim < len(shape_of(equation.invars[operand])) - its_own else None

    return rule


def _triangular_solve(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    """Right-hand sides stand side by side, each solved for by itself."""
    rank = len(shape_of(equation.invars[operand]))
    side_by_side = rank - 1 if equation.params["left_side"] else rank - 2
    return dim if dim < rank - 2 or (operand == 1 and dim == side_by_side) else None


def _tridiagonal_solve(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    """The same; the three diagonals have no such dimension."""
    rank = len(shape_of(equation.invars[operand]))
    return dim if dim != (rank - 2 if operand == 3 else rank - 1) else None


def _drawn(*generators: str) -> Dimension:
    """Random numbers, keys of keys: of each key by itself, with these generators alone.

    JAX draws the numbers of a whole batch of `rbg` keys from the first of them.
    """

    def rule(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
        key: Any = equation.invars[0].aval
        return dim if str(key.dtype) in generators else None

    return rule


def _fft(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    return _leading(len(equation.params["fft_lengths"]))(equation, operand, dim)


def _bitcast(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    """Wide numbers are made of several narrow ones, which stand along a last dimension."""
    is_joining = len(shape_of(equation.invars[0])) > len(shape_of(equation.outvars[0]))
    return _leading(int(is_joining))(equation, operand, dim)


def _transpose(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int:
    return equation.params["permutation"].index(dim)


def _broadcast(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    return _dims(equation.params["broadcast_dimensions"])[dim] if operand == 0 else None


def _pad(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    return dim if tuple(equation.params["padding_config"][dim]) == (0, 0, 0) else None


def _tile(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    return dim if equation.params["reps"][dim] == 1 else None


def _stack(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int:
    return dim + (dim >= equation.params["axis"])


def _window(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    """A window of length one that takes every entry of the dimension as it is."""
    params = equation.params
    lengths = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    is_one = all(params[name][dim] == 1 for name in lengths if name in params)
    return dim if is_one and tuple(params["padding"][dim]) == (0, 0) else None


def _product(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    """Batch dimensions come first, then what is left of each operand."""
    contracted, batch = equation.params["dimension_numbers"]
    if dim in contracted[operand] or dim in batch[operand]:
        return batch[operand].index(dim) if dim in batch[operand] else None
    taken = {*contracted[operand], *batch[operand]}
    before = len(batch[0]) + sum(d not in taken for d in range(dim))
    if operand == 0:
        return before
    left = len(shape_of(equation.invars[0])) - len(contracted[0]) - len(batch[0])
    return left + before


def _ragged_product(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    """Batch dimensions come first, in the sizes of groups as well."""
    numbers = equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    batch = [*numbers[1], tuple(range(len(numbers[1][0])))][operand]
    return batch.index(dim) if dim in batch else None


def _gather(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    numbers = equation.params["dimension_numbers"]
    rank = len(shape_of(equation.outvars[0]))
    looked_up = [d for d in range(rank) if d not in numbers.offset_dims]
    if operand == 0 and dim in numbers.operand_batching_dims:
        at = numbers.operand_batching_dims.index(dim)
        operand, dim = 1, numbers.start_indices_batching_dims[at]
    if operand == 1:
        return looked_up[dim] if dim < len(looked_up) else None
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    if dim in gone:
        return None
    return int(numbers.offset_dims[sum(d not in gone for d in range(dim))])


def _scatter(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    numbers = equation.params["dimension_numbers"]
    batching = _dims(numbers.scatter_indices_batching_dims), _dims(numbers.operand_batching_dims)
    apart = dict(zip(*batching, strict=True))
    rank = len(shape_of(equation.invars[0]))
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = [d for d in range(rank) if d not in gone]
    if operand == 0:
        if dim in numbers.operand_batching_dims:
            return dim
        if dim not in window:
            return None
        size = shape_of(equation.invars[2])[numbers.update_window_dims[window.index(dim)]]
        return dim if size == shape_of(equation.invars[0])[dim] else None
    if operand == 1:
        return apart.get(dim)
    if dim in numbers.update_window_dims:
        return window[numbers.update_window_dims.index(dim)]
    scattered = sum(d not in numbers.update_window_dims for d in range(dim))
    return apart.get(scattered)


def _scatter_of_all(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    """Each device keeps its part of a sum: of a dimension, or its place along one."""
    along = equation.params["scatter_dimension"]
    if dim == along:
        return None
    return dim if equation.params["tiled"] else dim - (dim > along)


def _gather_of_all(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    """Devices' parts side by side, along a dimension of their own or one after the other."""
    along = equation.params["all_gather_dimension"]
    if equation.params["tiled"]:
        return None if dim == along else dim
    return dim + (dim >= along)


def _sum_of_all(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    """Over devices; and over dimensions, where vmap has mapped an axis of that name away."""
    gone = [axis for axis in equation.params["axes"] if isinstance(axis, Integral)]
    return None if dim in gone else dim - sum(axis < dim for axis in gone)


def _callback(equation: jex_core.JaxprEqn, operand: int, dim: int) -> None:
    """A function on the host that is handed all examples at once may mix them."""


def _kernel(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    """A Pallas kernel that vmap has given a step of its grid for each example.

    That step reads the example's row of the operand and writes its rows of the results.
    """
    grid = equation.params["grid_mapping"]
    if dim != 0 or 0 not in grid.vmapped_dims or len(equation.invars) != grid.num_inputs:
        return None
    blocks = [grid.block_mappings[operand], *grid.block_mappings[grid.num_inputs :]]
    rows = [block.index_map_jaxpr.jaxpr for block in blocks]
    return 0 if all(row.outvars[0] is row.invars[0] for row in rows) else None


def _virtual(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    """Equinox's primitive for a mapped primitive: which axes it maps is what it is told."""
    return 0 if equation.params["__batch_axes"][operand] == dim else None


# Of slices, a dimension along which examples stand has to be taken whole: see `_along`.
_DIMENSIONS: tuple[tuple[str, Dimension], ...] = (
    (
        """
        bessel_i0e bessel_i1e clz complex conj eq_to igamma igamma_grad_a igammac imag le_to
        lt_to mulhi nextafter polygamma population_count real regularized_incomplete_beta
        select_if_vmap shift_left shift_right_arithmetic shift_right_logical threefry2x32
        threefry4x32 philox2x32 philox4x32 random_clone random_seed xor zeta nonbatchable
        nondifferentiable_backward ppermute slice dynamic_slice dynamic_update_slice
        random_unwrap
        """,
        _same,
    ),
    ("reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum", _without("axes")),
    ("reduce_xor argmax argmin", _without("axes")),
    ("cumlogsumexp cummax cummin cumprod cumsum split", _but("axis")),
    ("cholesky eig eigh geqrf hessenberg lu qr schur svd", _leading(2)),
    ("symmetric_product tridiagonal", _leading(2)),
    ("random_wrap lu_pivots_to_permutation", _leading(1)),
    ("geqp3 householder_product", _leading(2, 1)),
    ("ormqr", _leading(2, 1, 2)),
    ("reduce_window reduce_window_max reduce_window_min reduce_window_sum", _window),
    ("select_and_gather_add select_and_scatter_add", _window),
    ("scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub", _scatter),
    ("pure_callback ffi_call", _callback),
    ("random_bits random_gamma", _drawn("key<fry>")),
    ("random_fold_in random_split", _drawn("key<fry>", "key<rbg>")),
    ("psum psum_invariant pmax pmin", _sum_of_all),
    ("all_gather all_gather_invariant", _gather_of_all),
    ("approx_top_k", _but("reduction_dimension")),
    ("bitcast_convert_type", _bitcast),
    ("broadcast_in_dim", _broadcast),
    ("concatenate sort", _but("dimension")),
    ("dot_general", _product),
    ("fft", _fft),
    ("gather", _gather),
    ("pad", _pad),
    ("pallas_call", _kernel),
    ("ragged_dot_general", _ragged_product),
    ("reduce squeeze", _without("dimensions")),
    ("reduce_scatter", _scatter_of_all),
    ("rev", _but("dimensions")),
    ("stack", _stack),
    ("tile", _tile),
    ("top_k", _but("axis")),
    ("transpose", _transpose),
    ("triangular_solve", _triangular_solve),
    ("tridiagonal_solve", _tridiagonal_solve),
    ("unstack", _without("axis")),
    ("vprim", _virtual),
)


def _along(rule: Dimension) -> Rule:
    """A primitive that takes the examples along one dimension, all of them, to another."""

    def moved(
        equation: jex_core.JaxprEqn, operand: int, apart: Apart, num_examples: int
    ) -> Apart | None:
        dim = rule(equation, operand, apart.dim)
        if dim is None:
            return None
        before = shape_of(equation.invars[operand])[apart.dim : apart.dim + 1]
        # A dimension of another length was cut, or repeated.
        if any(shape_of(result)[dim : dim + 1] != before for result in equation.outvars):
            return None
        return replace(apart, dim=dim)

    return moved


RULES: dict[str, Rule] = {
    **dict.fromkeys(ENTRY_BY_ENTRY | UNCHANGED, _along(_same)),
    **{name: _along(rule) for names, rule in _DIMENSIONS for name in named(names)},
    "reshape": reshaped,
    "conv_general_dilated": convolved,
}

WRITES = named("swap addupdate")
"""What is written to a mutable array is read later, and where is not followed."""

REDUCTIONS = named("unvmap_any unvmap_all unvmap_max")
"""Equinox's, which see a whole batch from inside `vmap`."""

OPERAND_BY_OPERAND = named("optimization_barrier device_put")
"""Each result follows from the operand at its place."""

# Asking for one's own position exchanges nothing; neither does saying along what a value varies.
_LOCAL = named("axis_index pvary")


def axes_named(equation: jex_core.JaxprEqn) -> frozenset[Any]:
    """The names of the axes that an equation's collective goes over."""
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple) else (axes,)
    return frozenset(axis for axis in axes if not isinstance(axis, Integral))


def exchanges(equation: jex_core.JaxprEqn, bound: frozenset[Any]) -> bool:
    """Whether it exchanges values along axes, others than those that the program itself binds."""
    return bool(axes_named(equation) - bound) and equation.primitive.name not in _LOCAL


def sees_a_batch(equation: jex_core.JaxprEqn) -> bool:
    """Whether it acts on all examples that vmap hands it, those of a vmap around all of this too.

    A function with a batching rule that is left has not been mapped yet; what its rule does will
    not be seen here. A host function is handed whole batches unless it says otherwise.
    """
    if equation.primitive.name == "custom_vmap_call":
        return True
    method = equation.params.get("vmap_method")
    return method is not None and not method.startswith("sequential")


def is_known(equation: jex_core.JaxprEqn) -> bool:
    """Whether it is known what the primitive does with examples."""
    names = RULES.keys() | WRITES | REDUCTIONS
    is_one = equation.primitive.name in names or inside(equation) is not None
    return is_one or bool(axes_named(equation))
