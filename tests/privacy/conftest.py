import jaxtyping
import pytest


@pytest.fixture
def unchecked():
    """Turns the run-time checks of annotations off: what a user of eqx_dp meets without them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
