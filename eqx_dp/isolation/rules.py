"""What each of JAX's primitives does to the dimension along which examples stand.

A rule says to which dimension of the results a dimension of an operand goes, or None where the
primitive lets its entries meet (sums over it, reverses it, cuts it). Primitives that hold programs
are in `follow`. A primitive without a rule is taken to mix examples.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax.extend.core as jex_core

from .places import Apart, shape_of

Rule: TypeAlias = Callable[[jex_core.JaxprEqn, int, int], int | None]
"""`rule(equation, operand, dim)`, the dimension of the results or None."""


def _same(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int:
    del equation, operand
    return dim


def _but(name: str) -> Rule:
    """All dimensions stay, and entries along those in a parameter meet."""

    def rule(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
        del operand
        return None if dim in _dims(equation.params[name]) else dim

    return rule


def _without(name: str) -> Rule:
    """The dimensions in a parameter are gone, and what stood along them has met."""

    def rule(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
        del operand
        gone = _dims(equation.params[name])
        return None if dim in gone else dim - sum(axis < dim for axis in gone)

    return rule


def _dims(value: Any) -> tuple[int, ...]:
    return tuple(map(int, value)) if isinstance(value, tuple) else (int(value),)


def _leading(*core: int) -> Rule:
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


def _drawn(*generators: str) -> Rule:
    """Random numbers, keys of keys: of each key by itself, with these generators alone.

    JAX draws the numbers of a whole batch of `rbg` keys from the first of them.
    """

    def rule(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
        del operand
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
    del operand
    return equation.params["permutation"].index(dim)


def _broadcast(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    return _dims(equation.params["broadcast_dimensions"])[dim] if operand == 0 else None


def _pad(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    del operand
    return dim if tuple(equation.params["padding_config"][dim]) == (0, 0, 0) else None


def _tile(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    del operand
    return dim if equation.params["reps"][dim] == 1 else None


def _stack(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int:
    del operand
    return dim + (dim >= equation.params["axis"])


def _window(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    """A window of length one that takes every entry of the dimension as it is."""
    del operand
    params = equation.params
    lengths = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    is_one = all(params[name][dim] == 1 for name in lengths if name in params)
    return dim if is_one and tuple(params["padding"][dim]) == (0, 0) else None


def _product(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    """Batch dimensions come first, then what is left of each operand."""
    (contracted, batch) = equation.params["dimension_numbers"]
    if dim in contracted[operand]:
        return None
    if dim in batch[operand]:
        return batch[operand].index(dim)
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
    del operand
    along = equation.params["scatter_dimension"]
    if dim == along:
        return None
    return dim if equation.params["tiled"] else dim - (dim > along)


def _gather_of_all(equation: jex_core.JaxprEqn, operand: int, dim: int) -> int | None:
    """Devices' parts side by side, along a dimension of their own or one after the other."""
    del operand
    along = equation.params["all_gather_dimension"]
    if equation.params["tiled"]:
        return None if dim == along else dim
    return dim + (dim >= along)


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


_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz
complex conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1
floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2
logistic lt lt_to max min mul mulhi ne neg nextafter not one_minus_square or polygamma
population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt
select_if_vmap select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
square stop_gradient sub tan tanh threefry2x32 threefry4x32 philox2x32 philox4x32 random_clone
random_seed xor zeta name nonbatchable nondifferentiable_backward sharding_constraint
layout_constraint reshard mesh_cast pvary pcast pbroadcast ppermute psum psum_invariant pmax pmin
slice dynamic_slice dynamic_update_slice random_unwrap
""".split()  # noqa: SIM905
"""Each entry of a result follows from the entries of the operands at the same place.

Of slices, a dimension along which examples stand has to be taken whole: results of another length
are refused for every primitive.
"""

_AXES_GONE = """
reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor argmax argmin
""".split()  # noqa: SIM905

_ALONG_AXIS = ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")

_OF_MATRICES = """
cholesky eig eigh geqrf hessenberg lu qr schur svd symmetric_product tridiagonal
""".split()  # noqa: SIM905

_WINDOWS = """
reduce_window reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add
select_and_scatter_add
""".split()  # noqa: SIM905

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _same),
    **dict.fromkeys(_AXES_GONE, _without("axes")),
    **dict.fromkeys(_ALONG_AXIS, _but("axis")),
    **dict.fromkeys(_WINDOWS, _window),
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"),
        _scatter,
    ),
    **dict.fromkeys(("pure_callback", "ffi_call"), _callback),
    **dict.fromkeys(("random_bits", "random_gamma"), _drawn("key<fry>")),
    **dict.fromkeys(("random_fold_in", "random_split"), _drawn("key<fry>", "key<rbg>")),
    **dict.fromkeys(("random_wrap", "lu_pivots_to_permutation"), _leading(1)),
    **dict.fromkeys(_OF_MATRICES, _leading(2)),
    **dict.fromkeys(("geqp3", "householder_product"), _leading(2, 1)),
    "ormqr": _leading(2, 1, 2),
    "triangular_solve": _triangular_solve,
    "tridiagonal_solve": _tridiagonal_solve,
    "all_gather": _gather_of_all,
    "all_gather_invariant": _gather_of_all,
    "approx_top_k": _but("reduction_dimension"),
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast,
    "concatenate": _but("dimension"),
    "dot_general": _product,
    "fft": _fft,
    "gather": _gather,
    "pad": _pad,
    "pallas_call": _kernel,
    "ragged_dot_general": _ragged_product,
    "reduce": _without("dimensions"),
    "reduce_scatter": _scatter_of_all,
    "rev": _but("dimensions"),
    "sort": _but("dimension"),
    "split": _but("axis"),
    "squeeze": _without("dimensions"),
    "stack": _stack,
    "tile": _tile,
    "top_k": _but("axis"),
    "transpose": _transpose,
    "unstack": _without("axis"),
    "vprim": _virtual,
}


def convolved(
    equation: jex_core.JaxprEqn, operand: int, place: Apart, num_examples: int
) -> Apart | None:
    """Where examples are in a convolution's result, from where they are in one operand.

    Examples are among the examples of the convolution, among the features that a filter makes, or
    in its groups: each group meets no other, and all of it has to be one example's.
    """
    params = equation.params
    numbers = params["dimension_numbers"]
    spec = numbers.lhs_spec if operand == 0 else numbers.rhs_spec
    shape = shape_of(equation.invars[operand])
    size, features_out = shape[place.dim], shape_of(equation.invars[1])[numbers.rhs_spec[0]]
    batch_groups, groups = params["batch_group_count"], params["feature_group_count"]
    if operand == 1:
        return Apart(numbers.out_spec[1], place.inner) if place.dim == spec[0] else None
    if place.dim == spec[0]:
        of_group = size // batch_groups
        if of_group % (place.inner * num_examples) == 0:
            return Apart(numbers.out_spec[0], place.inner)
        return _of_groups(place.inner, of_group, features_out // batch_groups, numbers)
    if place.dim == spec[1]:
        return _of_groups(place.inner, size // groups, features_out // groups, numbers)
    return None


def _of_groups(inner: int, of_group: int, made: int, numbers: Any) -> Apart | None:
    """From groups of entries that one example has to itself to the features made of them."""
    return Apart(numbers.out_spec[1], inner // of_group * made) if inner % of_group == 0 else None
