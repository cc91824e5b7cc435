"""Every test sees eqx_dp with its jaxtyping annotations checked at run time by beartype.

There are eight devices, so that sharding has something to spread over.
"""

import jax
import jaxtyping
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jaxtyping.install_import_hook("eqx_dp", "beartype.beartype")


@pytest.fixture
def unchecked():
    """Turns the run-time checks of annotations off: what a user of eqx_dp meets without them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
