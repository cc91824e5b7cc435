"""Every test sees eqx_dp with its jaxtyping annotations checked at run time by beartype.

There are eight devices, so that sharding has something to spread over.
"""

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 8)
install_import_hook("eqx_dp", "beartype.beartype")
