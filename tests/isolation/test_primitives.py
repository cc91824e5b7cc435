"""The lists of primitives speak of all that JAX can map."""

from jax.interpreters import batching

from eqx_dp.isolation.primitives import HOLDING, is_known
from eqx_dp.programs.inside import HOLDERS

# Communication in the making, references to memory, effects in order, sparse matrices, kernels of
# one vendor, primitives of other libraries, and what only builds or checks programs.
REFUSED = """
announce_jaxpr bitcast add_dependency call_hi_primitive call_hi_primitive_linearized check
custom_lin dce_sink emit_pipeline eval_jaxpr freeze from_edtype get noinline
global_array_to_host_local_array host_local_array_to_global_array mpmd_map new_ref precv preduced
program_order psend ragged_all_to_all reduced_vary_cast_p remat_opt rng_bit_generator scaled_dot
stage swap tie to_edtype todense tpu_custom_call unreduced_pmax unreduced_pmin unreduced_psum
unreduced_reduce_scatter vary_unreduced_cast_p vprim with_memory_space_constraint
xla_metadata_call xla_metadata_value
""".split()  # noqa: SIM905
FAMILIES = ("bcoo_", "bcsr_")


class Equation:
    """As much of one as the lists ask for."""

    def __init__(self, primitive):
        self.primitive = primitive


def test_every_primitive_that_can_be_mapped_is_known_or_refused():
    mappable = list(batching.fancy_primitive_batchers)
    known = {one.name for one in mappable if is_known(Equation(one))}
    left = {one.name for one in mappable} - known - {*REFUSED, *HOLDERS, *HOLDING}
    assert not {name for name in left if not name.startswith(FAMILIES)}
