"""The table of primitives speaks of JAX's own, under the names that they have."""

import jax.extend.core.primitives
import pytest
from jax.interpreters import batching

from eqx_dp.isolation.follow import _LOCAL, _OPERAND_BY_OPERAND, _WRITES
from eqx_dp.isolation.rules import RULES
from eqx_dp.isolation.steering import REDUCTIONS
from eqx_dp.programs.inside import HOLDERS

KNOWN = {*RULES, *HOLDERS, *_LOCAL, *_OPERAND_BY_OPERAND, *_WRITES, *REDUCTIONS}
KNOWN |= {"reshape", "conv_general_dilated"}

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
scaled_dot scaled_matmul scaled_matmul_wrapper linear_solve noinline maybe_set nontraceable
""".split()  # noqa: SIM905
FAMILIES = ("bcoo_", "bcsr_", "dot_product_attention_")


def mappable():
    return {primitive.name for primitive in batching.fancy_primitive_batchers}


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_every_name_is_that_of_a_primitive(name):
    names = {p.name for p in vars(jax.extend.core.primitives).values() if hasattr(p, "name")}
    its_own = {"checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}
    others = {"pjit", "shard_map", "vprim", "select_if_vmap", "nondifferentiable_backward"}
    others |= {"pallas_call", "log2", "one_minus_square"}  # since JAX 0.11
    assert name in names | mappable() | its_own | others | {"pcast", "mesh_cast", "remat2"}


def test_every_primitive_that_can_be_mapped_has_a_rule_or_is_known_to_have_none():
    left = {
        name
        for name in mappable() - KNOWN - HARMLESS - set(REFUSED)
        if not name.startswith(FAMILIES)
    }
    assert not left
