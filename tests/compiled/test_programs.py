"""Programs of GPUs and TPUs, from their own compilers (extra `compilers`); nothing runs."""

import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import eqx_dp as dp
from eqx_dp.device import made_for
from eqx_dp.rewrites import computed_once
from tests.benchmarks.compiled import OURS, SMALL, compiled, gradient, mesh_of, noise, on_mesh

pytestmark = [pytest.mark.slow, pytest.mark.optimized]


def compilable(on, axis_type=AxisType.Auto):
    try:
        return mesh_of(on, axis_type)
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=["h100:2", "tpu:v5e:2x2"])
def mesh(request):
    return compilable(request.param)


@pytest.mark.parametrize("method", OURS)
@pytest.mark.parametrize("row", ["MLP", "GPT"])
def test_products_are_narrow_and_no_host_waits(mesh, row, method):
    found = gradient(method, SMALL[row](), mesh)
    assert found.costs.narrow_share >= 0.95
    assert found.costs.waits == found.costs.callbacks == 0
    assert "f64[" not in found.text


@pytest.mark.parametrize("on", ["h100:2", "tpu:v5e:2x2"])
def test_nothing_waits_where_all_is_spread(on):
    mesh = compilable(on, AxisType.Explicit)
    found = gradient("book_keeping", SMALL["CNN"](), mesh, "bfloat16", is_spread=True)
    assert found.costs.waits == found.costs.callbacks == 0
    assert "f64[" not in found.text


def test_noise_takes_less_than_a_byte_an_entry(mesh):
    """On GPUs also where positions have 64 bits; so much is more than one v5e has."""
    for side in (2**12, 70_000) if mesh.devices.flat[0].platform == "gpu" else (2**12,):
        assert noise((side, side), mesh).temporary < side**2


def test_the_measured_array_is_the_added_one(mesh):
    """The equation that makes it, known by its constant, is in the program once."""

    def measured_and_added(x, y):
        made = computed_once(lambda its: its[0] * 3.25 + its[1], (x, y), x)
        return jnp.sum(made / jnp.sqrt(jnp.sum(made**2, axis=1, keepdims=True)), axis=0)

    with made_for(dp.ShardingRules(mesh)):
        x = on_mesh(mesh, jnp.zeros((4096, 1024)))
        text = compiled(measured_and_added, x, x).text
    assert text.count("constant(3.25)") == 1
    assert " conditional(" not in text
