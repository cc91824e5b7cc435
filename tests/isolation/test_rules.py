"""The table of primitives speaks of all that JAX can map."""

from jax.interpreters import batching

from eqx_dp.isolation.rules import _LOCAL, OPERAND_BY_OPERAND, REDUCTIONS, RULES, WRITES
from eqx_dp.programs.inside import HOLDERS

KNOWN = {*RULES, *HOLDERS, *_LOCAL, *OPERAND_BY_OPERAND, *WRITES, *REDUCTIONS}

# Nothing of an example goes in, or nothing that counts comes out.
HARMLESS = {"axis_index", "empty", "debug_callback", "debug_print", "inspect_sharding", "dce_sink"}

# Taken to mix examples: communication, references to memory, effects in order, sparse matrices,
# kernels of one vendor, primitives of other libraries, and what only builds or checks programs.
REFUSED = """
all_to_all ragged_all_to_all psend precv preduced all_gather_reduced reduced_vary_cast_p
unreduced_psum unreduced_reduce_scatter vary_unreduced_cast_p
freeze get new_ref io_callback
call_hi_primitive call_hi_primitive_linearized check announce_jaxpr custom_lin eval_jaxpr
from_edtype to_edtype remat_opt stage tie todense rng_bit_generator
global_array_to_host_local_array host_local_array_to_global_array
xla_metadata_call xla_metadata_value custom_vmap_call mpmd_map program_order
unreduced_pmax unreduced_pmin with_memory_space_constraint
buffer_callback tpu_custom_call bitcast add_dependency emit_pipeline
scaled_dot scaled_matmul scaled_matmul_wrapper linear_solve noinline maybe_set nontraceable
""".split()  # noqa: SIM905
FAMILIES = ("bcoo_", "bcsr_", "dot_product_attention_")


def mappable():
    return {primitive.name for primitive in batching.fancy_primitive_batchers}


def test_every_primitive_that_can_be_mapped_has_a_rule_or_is_known_to_have_none():
    left = {
        name
        for name in mappable() - KNOWN - HARMLESS - set(REFUSED)
        if not name.startswith(FAMILIES)
    }
    assert not left
