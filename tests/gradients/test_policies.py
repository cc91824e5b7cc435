"""What each dtype of a policy, and its loss scale, does to a clipped gradient."""

import contextlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from tests import models, oracle
from tests.gradients import jitted
from tests.tiers import curated

# Relative error of the whole vector that the compute dtype allows: an upper bound on what a few
# layers make of one unit roundoff (2^-24, 2^-8, 2^-11, 2^-53).
PRESETS = {
    "float32": 1e-5,
    "mixed_bfloat16": 4e-2,
    "mixed_float16": 5e-3,
    "bfloat16": 4e-2,
    "float64": 1e-13,
}
AGREEING = [
    *((preset, models.mlp, "auto") for preset in PRESETS),
    ("mixed_float16", models.cnn, "book_keeping"),
    ("mixed_bfloat16", models.gpt, "ghost"),
]


@pytest.mark.parametrize(
    ("preset", "make", "method"),
    curated(AGREEING, AGREEING[1:3]),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_presets_agree_with_the_oracle(preset, make, method):
    case = make()
    batch = case.batch(6)
    norms = oracle.clipped_gradients(case.loss, case.model, *batch, l2_clip_norm=np.inf).grad_norm
    options = {"l2_clip_norm": float(np.median(norms)), "normalize_by": 2.0}
    truth = oracle.clipped_gradients(case.loss, case.model, *batch, **options)
    with jax.enable_x64(True) if preset == "float64" else contextlib.nullcontext():
        policy = dp.load_policy(preset)
        grad_fn = jitted.value_and_grad(case.loss, policy=policy, method=method, **options)
        per_example, grads = grad_fn(policy.cast_to_param(case.model), *batch)
    tolerance = PRESETS[preset]
    error = oracle.relative_error(grads, truth.grads)
    assert error < tolerance
    assert oracle.relative_error(per_example.loss, truth.loss) < tolerance
    assert oracle.relative_error(per_example.grad_norm, truth.grad_norm) < tolerance
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {policy.accumulate_dtype}
    assert per_example.grad_norm.dtype == policy.accumulate_dtype
    assert per_example.loss.dtype == policy.output_dtype
    # Half precision is really used: a policy that does nothing would agree too well.
    if policy.compute_dtype.itemsize == 2:
        assert error > 1e-4


def test_the_loss_sees_the_compute_dtype():
    seen = {}

    def loss(model, x, label):
        seen.update({name: leaf.dtype for name, leaf in model.items()})
        seen.update(x=x["x"].dtype, label=label.dtype)
        return jnp.sum(model["trained"] * model["frozen"] * x["x"])

    model = {"trained": jnp.ones(2), "frozen": jnp.ones(2, jnp.float16), "table": jnp.arange(2)}
    spec = {"trained": True, "frozen": False, "table": False}
    policy = dp.load_policy("mixed_bfloat16")
    grad_fn = jitted.grad(loss, l2_clip_norm=1.0, policy=policy, filter_spec=spec)
    grad_fn(model, {"x": np.ones((3, 2), np.float32)}, jnp.zeros(3, jnp.uint8))
    cast = dict.fromkeys(("trained", "frozen", "x"), jnp.bfloat16)
    assert seen == cast | {"table": jnp.int32, "label": jnp.uint8}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64])
def test_without_a_policy_the_model_runs_in_its_own_dtype(dtype):
    with jax.enable_x64(True):
        seen = set()

        def loss(model, x):
            seen.add((model["w"].dtype, x.dtype))
            return jnp.sum(model["w"] * x) + model["narrow"]

        model = {"w": jnp.ones(2, dtype), "narrow": jnp.zeros((), jnp.bfloat16)}
        x = jnp.ones((3, 2), jnp.float16)
        per_example, grads = jitted.value_and_grad(loss, l2_clip_norm=1.0)(model, x)
        assert seen == {(jnp.dtype(dtype), jnp.dtype(jnp.float16))}
        accumulate = jnp.float64 if dtype == jnp.float64 else jnp.float32
        assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(accumulate)}
        assert per_example.grad_norm.dtype == accumulate


@pytest.mark.parametrize("microbatch_size", curated([None, 64], [64]))
@pytest.mark.parametrize("preset", ["mixed_bfloat16", None])
def test_sums_are_in_the_accumulate_dtype(preset, microbatch_size):
    """Ones, whose sum half precision cannot hold: it ends at 256 in bfloat16, 2048 in float16."""
    policy = None if preset is None else dp.load_policy(preset)
    dtype = jnp.float16 if preset is None else jnp.float32
    grads = jitted.grad(
        models.dot, l2_clip_norm=np.inf, policy=policy, microbatch_size=microbatch_size
    )(jnp.ones(3, dtype), jnp.ones((4097, 3), dtype))
    np.testing.assert_array_equal(grads, np.full(3, 4097, np.float32))


# Loss scale

FLOAT16 = "params=float32,compute=float16,output=float32"
MODEL = eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0))
X, Y = (np.random.default_rng(0).normal(size=(5, n)).astype(np.float32) for n in (8, 4))
# Gradients from 1e-8, which float16 loses on the way back, to 1e4, where a scale overflows.
WEIGHTS = np.array([[1e-4, 1e-4], [3e-4, 1e-3], [1, 1], [50, 1], [100, 100]], np.float32)


def loss(model, x, y, weights):
    return weights[0] * (weights[1] * jnp.sum((model(x) - y) ** 2))


def each(policy, l2_clip_norm=np.inf, method="book_keeping"):
    """Each example's own gradient, flat."""
    grad_fn = jitted.grad(loss, l2_clip_norm=l2_clip_norm, method=method, policy=policy)
    ones = (slice(i, i + 1) for i in range(len(X)))
    return [oracle.vector(grad_fn(MODEL, X[one], Y[one], WEIGHTS[one])) for one in ones]


@pytest.mark.parametrize("scale", ["none", "32768"])
def test_a_loss_scale_saves_small_gradients_and_loses_large_ones(scale):
    """What is not finite adds zero."""
    pairs = zip(each(dp.parse_policy(f"{FLOAT16},loss_scale={scale}")), each(None), strict=True)
    errors = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs]
    assert errors[0] > 0.1 if scale == "none" else errors[0] < 5e-2
    assert errors[-1] < 5e-3 if scale == "none" else errors[-1] == 1


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("clip_norm", "scale", "method"),
    curated(
        [(1e-20, 1024, "book_keeping"), (1e-2, 0.125, "ghost"), (1e-20, 0.125, "per_example")],
        [(1e-20, 1024, "book_keeping")],
    ),
)
def test_the_clip_holds_with_a_loss_scale(clip_norm, scale, method):
    """Measured in float64: undoing the scale with the factor takes nothing from the guarantee."""
    policy = dp.parse_policy(f"{FLOAT16},loss_scale={scale}")
    norms = [np.linalg.norm(grads) for grads in each(policy, clip_norm, method)]
    assert max(norms) <= clip_norm
    assert min(norms[1 if scale > 1 else 2 : 3]) >= 0.999 * clip_norm
