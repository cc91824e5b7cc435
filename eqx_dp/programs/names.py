"""Primitives by name; those for which JAX gives no object stand here alone."""

from jax.extend.core import primitives as jax_primitives

_WITH_OBJECT = frozenset(
    value.name for name, value in vars(jax_primitives).items() if name.endswith("_p")
)

OF_LAX = frozenset(
    """all_gather_invariant all_gather_reduced debug_callback debug_print empty geqp3 geqrf
    inspect_sharding dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd_wrapper
    dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd_wrapper layout_constraint log2
    lu_pivots_to_permutation mulhi one_minus_square optimization_barrier ormqr pbroadcast philox2x32
    philox4x32 psum_invariant pvary ragged_dot_general random_clone random_unwrap random_wrap
    reduce_scatter reshard scatter-sub split stack
    symmetric_product threefry4x32 tile unstack""".split()  # noqa: SIM905
)
"""JAX's own without an object in `jax.extend.core.primitives`, whose results (if they have any)
follow from their operands. Isolation accepts them, and a test looks at each."""

WITHOUT_OBJECT = OF_LAX | frozenset(
    """addupdate buffer_callback call_exported custom_vmap_call ffi_call freeze io_callback
    linear_solve maybe_set new_ref nonbatchable nondifferentiable_backward nontraceable pallas_call
    pure_callback select_if_vmap shard_map tpu_custom_call triton_kernel_call unreduced_psum
    unvmap_all unvmap_any unvmap_max""".split()  # noqa: SIM905
)
"""All names without an object, for all supported JAX versions, also of Equinox and lineax."""


def named(text: str) -> frozenset[str]:
    """A set of primitives, by name.

    Raises:
        ImportError: JAX has no primitive of a name, and it is not in the list of the others.
    """
    names = frozenset(text.split())
    unknown = names - _WITH_OBJECT - WITHOUT_OBJECT
    if unknown:
        raise ImportError(f"JAX has no primitives of these names any more: {sorted(unknown)}.")
    return names


UNCHANGED = named(
    "copy sharding_constraint layout_constraint reshard stop_gradient name pvary pbroadcast"
)
"""Their result has the entries of their operand."""

REARRANGED = UNCHANGED | named(
    """broadcast_in_dim convert_element_type dynamic_slice reshape rev slice split squeeze tile
    transpose unstack"""
)
"""The entries of their results are those of the first operand, in another order or dtype."""

ENTRY_BY_ENTRY = named(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp
    convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
    integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul ne neg not
    one_minus_square or pow reduce_precision rem round rsqrt select_n sign sin sinh sqrt square sub
    tan tanh"""
)
"""An entry of their result is a function of the entries of their operands at the same place."""

CHEAP = named(
    """abs add add_any clamp concatenate dynamic_update_slice imag integer_pow max min mul neg pad
    real select_n square stack sub"""
)
"""Arithmetic that costs less than writing its result to memory and reading it again."""

SUMS_OF_DEVICES = named("psum psum_invariant unreduced_psum")
COLLECTIVES = SUMS_OF_DEVICES | named(
    "reduce_scatter all_gather all_gather_invariant all_to_all ppermute pmax pmin"
)
"""Devices exchange values by these."""

UNSEEN = named(
    """pure_callback io_callback buffer_callback ffi_call tpu_custom_call triton_kernel_call
    call_exported"""
)
"""Their results are unknown: host functions, kernels, exported programs."""
