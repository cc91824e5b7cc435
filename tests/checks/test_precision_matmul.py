"""check_precision of steps whose products are in narrow dtypes: faults are planted one by one."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import eqx_dp as dp
from eqx_dp.gradients import clip, methods, narrow_products
from tests import models
from tests.checks.test_precision import check, training_step
from tests.gradients.cases import layers

pytestmark = pytest.mark.sampled(2)

FLOAT8, MIXED = dp.load_policy("mixed_float8"), dp.load_policy("mixed_bfloat16")
E4 = jnp.float8_e4m3fn


def stages(report):
    return {violation.stage for violation in report.violations}


@pytest.mark.parametrize("method", ["book_keeping", "ghost", "per_example"])
def test_an_honest_step_passes(method):
    report = check(*training_step(models.mlp(), FLOAT8, method=method), policy=FLOAT8)
    assert report.ok, report
    products = {(row.stage, row.dtype) for row in report.summary if row.kind == "contraction"}
    assert ("forward", "float8_e4m3fn") in products
    assert ("backward", "float8_e5m2 x float8_e4m3fn") in products


def test_convolutions_and_wide_modules_pass():
    report = check(*training_step(layers.case("conv1d_all"), FLOAT8), policy=FLOAT8)
    assert report.ok, report
    policy = dp.parse_policy(f"{FLOAT8},module:layers.1=bfloat16:wide")
    report = check(*training_step(models.mlp(), policy), policy=policy)
    assert report.ok, report


def test_a_step_of_another_policy():
    assert stages(check(*training_step(models.mlp(), MIXED), policy=FLOAT8)) == {
        "forward",
        "backward",
    }
    assert "forward" in stages(check(*training_step(models.mlp(), FLOAT8), policy=MIXED))


def by_hand(scale_of, *extra):
    """A step whose loss casts to 8 bits by itself, by a scale from wherever."""

    def loss(weight, x, scale):
        narrow = (x / scale).astype(E4).astype(x.dtype) * scale
        return jnp.sum((narrow @ weight) ** 2)

    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0, policy=FLOAT8)
    noise = dp.gaussian_privatizer(stddev=1.0, key=jax.random.key(0), policy=FLOAT8)
    optimizer = optax.chain(noise, optax.sgd(0.1))

    @eqx.filter_jit
    def step(weight, state, xs, *extra):
        scale, kept = scale_of(xs, *extra)
        updates, state = optimizer.update(grad_fn(weight, xs, scale), state)
        return eqx.apply_updates(weight, updates), state, kept

    weight, xs = jnp.ones((4, 3)), jnp.ones((8, 2, 4))
    return step, weight, optimizer.init(weight), xs, *extra


def for_all(xs, scale):
    return jnp.broadcast_to(scale, len(xs))


def test_a_scale_from_the_batch():
    step = by_hand(lambda xs: (for_all(xs, jnp.max(jnp.abs(xs)) / 448), None))
    (found,) = [x for x in check(*step, policy=FLOAT8).violations if x.stage == "operand"]
    assert "a scale that the engine did not choose" in found.found
    assert found.declared == "scaling per_example"
    assert __file__ in found.where


def test_a_delayed_maximum_in_state():
    def delayed(xs, largest):
        return for_all(xs, largest / 448), jnp.maximum(0.9 * largest, jnp.max(jnp.abs(xs)))

    assert "operand" in stages(check(*by_hand(delayed, jnp.ones(())), policy=FLOAT8))


def test_an_unscaled_cast():
    assert "operand" in stages(check(*by_hand(lambda xs: (for_all(xs, 1.0), None)), policy=FLOAT8))


def test_a_product_of_8_bits_that_the_engine_did_not_scale():
    def loss(weight, x):
        narrow = [y.astype(E4) for y in (x, weight)]
        return jnp.sum(jnp.matmul(*narrow, preferred_element_type=jnp.float32))

    case = models.Case("by_hand", jnp.ones((4, 3)), loss, lambda _, n: (jnp.ones((n, 2, 4)),))
    assert {"operand", "forward"} <= stages(check(*training_step(case, FLOAT8), policy=FLOAT8))


def test_products_that_are_summed_in_bfloat16(monkeypatch):
    class Narrow(narrow_products._Product):
        def __call__(self, left, right):
            params = self.params | {"preferred_element_type": jnp.dtype(jnp.bfloat16)}
            values = self.primitive.bind(left.values, right.values, **params)
            return values.astype(jnp.float32)

    monkeypatch.setattr(narrow_products, "_Product", Narrow)
    report = check(*training_step(models.mlp(), FLOAT8, method="per_example"), policy=FLOAT8)
    assert not report.ok
    assert stages(report) == {"forward"}


def test_an_8_bit_sum_over_examples(monkeypatch):
    def narrow_sum(traced, leaves, *rest):
        def cast(leaf):
            return leaf._replace(weighted=lambda *x: leaf.sum(*x).astype(E4).astype(jnp.float32))

        return clip_and_sum(traced, list(map(cast, leaves)), *rest)

    clip_and_sum = clip.clip_and_sum
    monkeypatch.setattr(methods, "clip_and_sum", narrow_sum)
    report = check(*training_step(models.mlp(), FLOAT8, method="per_example"), policy=FLOAT8)
    assert "sum over examples" in stages(report)
    assert any("float8_e4m3fn" in violation.found for violation in report.violations)


def test_8_bits_between_clip_and_noise():
    step = training_step(models.mlp(), FLOAT8, between=lambda x: x.astype(E4).astype(jnp.float32))
    assert "between clip and noise" in stages(check(*step, policy=FLOAT8))
