"""Values that depend on parameters alone: evaluated once, and their gradients brought back."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqx_dp as dp
from eqx_dp.programs import equations
from tests import oracle
from tests.gradients.engine import agreement, uses
from tests.models import Case

pytestmark = pytest.mark.sampled(8)

WIDTH, TOKENS = 6, 4
MASK = np.random.default_rng(5).random((WIDTH, WIDTH)) > 0.4


def layers(w, x, of_slice):
    """A scan of checkpointed layers, over slices of a stack."""

    def layer(x, now):
        return jax.checkpoint(lambda x, w: jnp.tanh(x @ of_slice(w)))(x, now), None

    return lax.scan(layer, x, w)[0]


def masked(w):
    return jnp.where(MASK, w, 0)


def normed(v, g):
    return g[:, None] * v / jnp.linalg.norm(v, axis=1, keepdims=True)


def standardised(v):
    centred = v - jnp.mean(v, axis=1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, axis=1, keepdims=True) + 0.1)


def convolved(x, w):
    """Three channels, windows of two: all of the matrix is the kernel."""
    return lax.conv(x.reshape(1, 3, -1), w.reshape(WIDTH, 3, 2), (1,), "SAME")


def spectral(w, x):
    """Multiplies the lowest frequencies by complex weights made of two real leaves."""
    return jnp.fft.irfft(jnp.fft.rfft(x) * lax.complex(w["a"][: WIDTH // 2 + 1, 0], w["b"][0, :4]))


def penalty(w):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(w))


def penalised_layers(w, x):
    x, penalties = lax.scan(lambda x, w: (jnp.tanh(x @ w), 0.1 * penalty(w)), x, w)
    return jnp.sum(x) + jnp.sum(penalties)


@jax.custom_jvp
def added_up(w):
    """Its body is entry by entry, and its rule is not; the rule calls the function itself."""
    return jnp.tanh(w)


@added_up.defjvp
def _(primals, tangents):
    return added_up(*primals), jnp.cumsum(*tangents, axis=-1)


CASES = {
    "mask, one step": lambda w, x: masked(w["a"]) @ x[0],
    "mask, turned": lambda w, x: x[0] @ masked(w["a"].T),
    "mask, cut": lambda w, x: masked(w["a"])[1:4] @ x[0],
    "mask, negative": lambda w, x: (-masked(w["a"])) @ x[0],
    "rule that mixes entries": lambda w, x: added_up(w["a"]) @ x[0],
    "rule that mixes entries, scaled": lambda w, x: x @ jnp.exp(jax.jit(added_up)(2 * w["a"])),
    "rule of entries": lambda w, x: jax.nn.relu(w["a"]) @ x[0] + jax.nn.softplus(w["b"]) @ x[1],
    "mask, tokens": lambda w, x: x @ (w["a"] * MASK),
    "mask, twice": lambda w, x: jnp.sin(x @ masked(w["a"])) @ masked(w["a"]),
    "mask, and direct": lambda w, x: jnp.sin(x @ masked(w["a"])) @ w["a"],
    "mask in a scan": lambda w, x: layers(w["s"], x[0], masked),
    "mask in a scan over time": lambda w, x: layers(x, x[0], lambda x: masked(w["a"]) + x),
    "mask of a part that is repeated": lambda w, x: x[0] @ jnp.where(MASK, w["a"][0], 0),
    "exponential": lambda w, x: jnp.exp(w["g"]) * x,
    "exponential, one step": lambda w, x: jnp.exp(w["a"]) @ x[0],
    "softplus": lambda w, x: jax.nn.softplus(w["g"]) * x,
    "number": lambda w, x: 0.3 * w["a"] @ x[0],
    "shift": lambda w, x: (1 - w["g"]) * x,
    "norm": lambda w, x: normed(w["a"], w["g"]) @ x[0],
    "norm, turned": lambda w, x: x[0] @ normed(w["a"], w["g"]),
    "norm of all": lambda w, x: (w["a"] / jnp.linalg.norm(w["a"])) @ x[0],
    "norm, cut": lambda w, x: normed(w["a"], w["g"])[1:4] @ x[0],
    "norm of columns": lambda w, x: normed(w["a"].T, w["g"]).T @ x[0],
    "norm of columns, tokens": lambda w, x: x @ normed(w["a"].T, w["g"]),
    "norm, tokens": lambda w, x: x @ normed(w["a"], w["g"]).T,
    "norm, as a kernel": lambda w, x: convolved(x, normed(w["a"], w["g"])),
    "norm, twice": lambda w, x: jnp.sin(x @ normed(w["a"], w["g"])) @ normed(w["a"], w["g"]),
    "norm, and direct": lambda w, x: normed(w["a"], w["g"]) @ jnp.sin(w["a"] @ x[0]),
    "centred, one step": lambda w, x: (w["a"] - jnp.mean(w["a"], 0)) @ x[0],
    "standardised, one step": lambda w, x: standardised(w["a"]) @ x[0],
    "standardised, tokens": lambda w, x: x @ standardised(w["a"]),
    "norm in a scan": lambda w, x: layers(w["s"], x[0], lambda v: normed(v, w["g"])),
    "side by side": lambda w, x: x @ jnp.concatenate([w["a"], w["b"].T], axis=1),
    "stacked": lambda w, x: layers(jnp.stack([w["a"], -w["b"]]), x, lambda w: w),
    "stacked, and direct": lambda w, x: layers(jnp.stack([w["a"], w["b"]]), x, jnp.sin) @ w["a"],
    "stacked as they are, and direct": lambda w, x: (
        layers(jnp.stack([w["a"], w["b"]]), x, lambda w: w) @ w["a"]
    ),
    "product": lambda w, x: x @ (w["a"] @ w["b"]),
    "complex": spectral,
    "jitted": lambda w, x: jax.jit(lambda w, x: masked(w) @ jnp.sin(masked(w) @ x))(w["a"], x[0]),
    "every other": lambda w, x: x[:, :3] @ jnp.exp(w["a"][::2]),
    "stopped": lambda w, x: lax.stop_gradient(jnp.tanh(w["a"])) @ jnp.sin(w["a"] @ x[0]),
    "a table's rows": lambda w, x: w["a"][np.arange(TOKENS)] * x,
}
PENALTIES = {
    "penalty": lambda w, x: (w["a"] @ jnp.sin(w["b"] @ x[0]), 0.1 * penalty(w)),
    "penalty on tokens": lambda w, x: (x @ w["a"], 0.1 * penalty(w["a"])),
    "penalty on what is masked": lambda w, x: (masked(w["a"]) @ x[0], jnp.sum(abs(w["a"]))),
    "penalties": lambda w, x: (x @ w["a"], 0.1 * penalty(w["a"]) + x[0, 0] * jnp.sum(w["a"] ** 3)),
    "penalty on a table": lambda w, x: (w["a"][jnp.argsort(x[0])], 0.1 * penalty(w["a"])),
    "penalty in a scan": lambda w, x: (penalised_layers(w["s"], x), 0.0),
    "penalty on a stack": lambda w, x: (layers(w["s"], x, lambda w: w), 0.1 * penalty(w["s"])),
    "penalty on a tied table": lambda w, x: (
        jnp.sin(w["a"][jnp.argsort(x[0])]) @ w["a"].T,
        0.1 * penalty(w["a"]),
    ),
    "penalty that data weigh": lambda w, x: (x @ w["a"], x[0, 0] * penalty(w["a"])),
}


def case_of(name):
    use = {**CASES, **PENALTIES}[name]

    def loss(model, x):
        y = use(model, x)
        y, more = y if isinstance(y, tuple) else (y, 0.0)
        bent = jnp.cos(jnp.arange(y.size)).reshape(y.shape) * (y + jnp.sin(y))
        return jnp.sum(bent) + jnp.sum(jnp.tanh(model["c"] * x)) + more

    def draw(rng, size):
        return (jnp.asarray(rng.normal(size=(size, TOKENS, WIDTH)), jnp.float32),)

    shapes = {"a": (WIDTH, WIDTH), "b": (WIDTH, WIDTH), "c": (WIDTH,), "g": (WIDTH,)}
    rng = np.random.default_rng(7)
    model = {
        path: jnp.asarray(0.5 * rng.normal(size=shape), jnp.float32)
        for path, shape in {**shapes, "s": (3, WIDTH, WIDTH)}.items()
    }
    return Case(name, model, loss, draw)


@pytest.mark.sampled(20)
@agreement.EACH_METHOD
@pytest.mark.parametrize("name", [*CASES, *PENALTIES])
def test_agrees_with_the_oracle(name, method, monkeypatch):
    uses.force(monkeypatch, "factored")
    agreement.check(case_of(name), by_leaf=True, methods=[method])


# Each way through the engine that a derived value can take.
WAYS = "mask in a scan", "norm", "penalty", "side by side", "exponential"


@agreement.EACH_METHOD
@pytest.mark.parametrize("name", [*WAYS, "mask, one step", "mask, tokens", "shift"])
def test_agrees_with_the_oracle_with_every_gradient_kept(name, method, monkeypatch):
    uses.force(monkeypatch, "formed")
    agreement.check(case_of(name), by_leaf=True, methods=[method])


@pytest.mark.parametrize("name", [*WAYS, "stacked", "stacked as they are, and direct"])
def test_agrees_with_the_oracle_with_one_clip_norm(name):
    """Parameters of several clip norms are not measured as one."""
    agreement.check(case_of(name), methods=["book_keeping"])


def grad_fn_of(loss, **options):
    return dp.filter_value_and_clipped_grad(loss, l2_clip_norm=0.1, **options)


@pytest.mark.parametrize("method", agreement.METHODS)
def test_aux_has_no_gradient(method):
    """Neither a parameter nor what is derived from it becomes a use by leaving as aux."""
    case = case_of("mask, one step")

    def with_aux(model, x):
        return case.loss(model, x), (model["a"], masked(model["a"]), x[0])

    batch = case.batch(3)
    _, expected = grad_fn_of(case.loss, method=method)(case.model, *batch)
    found, grads = grad_fn_of(with_aux, has_aux=True, method=method)(case.model, *batch)
    assert oracle.relative_error(grads, expected) < 1e-6
    a, of_mask, x = found.aux
    np.testing.assert_array_equal(a, np.broadcast_to(case.model["a"], a.shape))
    np.testing.assert_array_equal(of_mask, np.where(MASK, a, 0))
    np.testing.assert_array_equal(x, batch[0][:, 0])


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("method", agreement.METHODS)
def test_an_example_that_is_not_finite_adds_zero(name, method):
    case = case_of(name)
    (x,) = case.batch(4)
    _, expected = grad_fn_of(case.loss, method=method)(case.model, x[:2])
    bad = x.at[2].set(jnp.nan).at[3].set(jnp.inf)
    _, grads = grad_fn_of(case.loss, method=method)(case.model, bad)
    assert oracle.relative_error(grads, expected) < 1e-6


@pytest.mark.parametrize("name", ["exponential, one step", "exponential", "norm", "penalty"])
@pytest.mark.parametrize("method", agreement.METHODS)
def test_a_derived_value_that_is_not_finite(name, method):
    case = case_of(name)
    model = {**case.model, "a": case.model["a"] * 1e30, "g": case.model["g"] + 1e30}
    broken = {**model, "a": model["a"].at[0, 0].set(jnp.inf)}
    for one in (model, broken):
        _, grads = grad_fn_of(case.loss, method=method)(one, *case.batch(3))
        assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(grads))


def test_an_infinite_slope_that_is_selected_away():
    """Half of the entries are the root of zero, and have no gradient."""
    w, x = np.random.default_rng(3).normal(size=(WIDTH, WIDTH)), np.ones((2, WIDTH))
    w, x = jnp.asarray(w, jnp.float32), jnp.asarray(x, jnp.float32)

    def loss(w, x):
        return jnp.sum(jnp.sin(x @ jnp.sqrt(jnp.tril(jax.nn.softplus(w)))))

    truth = oracle.clipped_gradients(loss, w, x, l2_clip_norm=0.3)
    for method in agreement.METHODS:
        grads = dp.filter_clipped_grad(loss, l2_clip_norm=0.3, method=method)(w, x)
        assert oracle.relative_error(grads, truth.grads) < 1e-5, method


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("preset", ["mixed_bfloat16", "mixed_float16"])
def test_narrow_policies(name, preset):
    case, policy = case_of(name), dp.load_policy(preset)
    _, expected = grad_fn_of(case.loss, method="per_example", policy=policy)(
        case.model, *case.batch(3)
    )
    for method in agreement.METHODS:
        _, grads = grad_fn_of(case.loss, method=method, policy=policy)(case.model, *case.batch(3))
        assert oracle.relative_error(grads, expected) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_microbatches_padding_and_devices(name):
    case = case_of(name)
    (x,) = case.batch(8)
    _, expected = grad_fn_of(case.loss, method="per_example")(case.model, x[:5])
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    for options in ({}, {"sharding": dp.ShardingRules(mesh)}):
        grad_fn = grad_fn_of(case.loss, method="book_keeping", microbatch_size=2, **options)
        _, grads = eqx.filter_jit(grad_fn)(case.model, x, is_padding_example=jnp.arange(8) >= 5)
        assert oracle.relative_error(grads, expected) < 1e-5


def test_effects_stay(capfd):
    """What prints a parameter prints it as often as it did."""
    case = case_of("mask, one step")

    def printing(model, x):
        jax.debug.print("sum {}", jnp.sum(masked(model["a"])))
        return case.loss(model, x)

    batch = case.batch(2)
    _, expected = grad_fn_of(case.loss, method="book_keeping")(case.model, *batch)
    _, grads = grad_fn_of(printing, method="book_keeping")(case.model, *batch)
    jax.effects_barrier()
    assert "sum" in capfd.readouterr().out
    assert oracle.relative_error(grads, expected) < 1e-6


def test_derived_values_are_evaluated_once():
    """Not for every example, nor in the loop over microbatches."""
    case = case_of("every other")
    grad_fn = grad_fn_of(case.loss, method="book_keeping", microbatch_size=2)
    program = jax.make_jaxpr(grad_fn)(case.model, *case.batch(4))
    shapes = [
        equation.outvars[0].aval.shape
        for equation in equations(program)
        if equation.primitive.name == "exp"
    ]
    assert shapes
    assert set(shapes) == {(3, WIDTH)}


@pytest.mark.parametrize("name", ["penalty on what is masked", "mask, one step", "penalties"])
def test_precision_is_checked(name):
    case, policy = case_of(name), dp.load_policy("mixed_bfloat16")
    grad_fn = grad_fn_of(case.loss, policy=policy)
    report = dp.check_precision(grad_fn, case.model, *case.batch(3), policy=policy)
    assert report.ok, str(report)


@pytest.mark.slow
def test_a_masked_autoregressive_flow():
    flows = pytest.importorskip("flowjax.flows")
    paramax, distributions = map(pytest.importorskip, ("paramax", "flowjax.distributions"))
    base = distributions.Normal(jnp.zeros(3))
    key = jax.random.key(0)
    model = flows.masked_autoregressive_flow(
        key, base_dist=base, flow_layers=2, nn_width=8, nn_depth=1
    )

    def draw(rng, size):
        return (jnp.asarray(rng.normal(size=(size, 3)), jnp.float32),)

    def loss(model, x):
        return -paramax.unwrap(model).log_prob(x)

    case = Case("flow", model, loss, draw)
    agreement.check(case, by_leaf=True)
