"""Products of bfloat16 parts: the bounds that rest on what is assumed of tensor cores.

The engine's own formulas are imported, as in `test_arithmetic`.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from eqx_dp import device
from eqx_dp.gradients import factored
from eqx_dp.gradients.gram import OuterProducts, gram_norms, likely_norm, one_term, sum_of_products
from eqx_dp.gradients.norms import SPLIT, in_parts
from tests.gradients.arithmetic import Machine, U
from tests.gradients.test_arithmetic import engine, hostile_products, share_of_engine
from tests.tiers import curated

pytestmark = pytest.mark.optimized


def test_parts_add_up():
    numbers = np.random.default_rng(0).normal(size=10_000) * 10.0 ** np.arange(-20, 30).repeat(200)
    x = jnp.asarray(numbers, jnp.float32)
    split = jax.jit(lambda x: sum(part.astype(jnp.float32) for part in reversed(in_parts(x, 2))))
    left = np.abs(np.float64(split(x)) - np.float64(x)) / np.abs(np.float64(x))
    assert SPLIT / 4 < left.max() <= SPLIT
    half = jnp.clip(x, -1, 1).astype(jnp.float16).astype(jnp.float32)
    assert jnp.array_equal(split(half), half)


DTYPES = [(jnp.bfloat16, 1), (jnp.float16, 2)]  # and the parts of the other side


@pytest.mark.parametrize("kind", curated(["random", "cancelling", "equal"], ["cancelling"]))
@pytest.mark.parametrize(("dtype", "parts"), curated(DTYPES, DTYPES[:1]))
@pytest.mark.parametrize("time", curated([1, 9], [9]))
def test_bounds_of_sums_of_parts(kind, dtype, parts, time):
    x, g = (y.astype(dtype).astype(np.float32) for y in hostile_products(kind, time))
    factor = np.full((1, 1), 1 / 3, np.float32)
    for seed, up in itertools.product(range(2), (True, False)):
        machine = Machine(up, seed=seed)
        with device._made_for("gpu"):
            if time == 1:
                _, bounds, x_added, scale = machine(lambda x, g: one_term(x, g, parts), x, g)
            else:
                _, bounds = machine(lambda x, g: gram_norms([OuterProducts(x, g)], parts), x, g)
                x_added, scale = x, np.ones((len(x), 1), np.float32)
            for i in range(len(x)):
                added = machine(
                    lambda x, g, by: sum_of_products(x, g, by, jnp.ones(1, bool), parts),
                    np.asarray(x_added)[i : i + 1], g[i : i + 1], factor * np.asarray(scale)[i],
                )  # fmt: skip
                most = np.float64(factor[0, 0]) * float(bounds[i]) * (1 + U)
                assert np.linalg.norm(np.float64(added)) <= most


LIKELY = {"half alike": (1 + 2**-13, 1 + 2**-11), "cancelling": (0.999 * 2**-10, 1.001 * 2**-10)}
LIKELY |= dict.fromkeys(["zero", "tiny"], (0, 0)) | dict.fromkeys(["huge", "nan"], (np.inf, np.inf))


@pytest.mark.parametrize("kind", LIKELY)
def test_likely_norms(kind):
    """The bound as a share of the norm (of the gross norm where terms cancel), or infinite."""
    x, g = hostile_products(kind, time=40, examples=3)
    match kind:
        case "half alike":
            x, g = (y.reshape(3, 2, 20, -1) for y in (x, g))  # two groups
            x += x[:, :, :1]
        case "zero" | "tiny" | "huge":
            x *= {"zero": 0, "tiny": 1e-25, "huge": 1e25}[kind]
        case "nan":
            g[0, 0, 0, 0] = np.nan
    x, g = (side.astype(jnp.bfloat16).astype(np.float32) for side in (x, g))
    with device._made_for("gpu"):
        found, bound = (np.float64(y)[0] for y in jax.jit(lambda *its: likely_norm(*its, 1))(x, g))
    norm = np.linalg.norm(np.swapaxes(np.float64(x[0]), 1, 2) @ np.float64(g[0]))
    if kind == "cancelling":
        norm = np.sum(np.linalg.norm(x[0], axis=-1) * np.linalg.norm(g[0], axis=-1))
    share = bound / max(norm, 1e-300) if np.isfinite(bound) else np.inf
    assert LIKELY[kind][0] <= share <= LIKELY[kind][1]
    assert kind != "half alike" or abs(found / norm - 1) < 1e-5


def test_likely_norms_are_for_accelerators_whatever_came_before(monkeypatch):
    seen = []
    other = lambda *sides: seen.append(device.platform()) or likely_norm(*sides)  # noqa: E731
    monkeypatch.setattr(factored, "likely_norm", other)
    for width, kind in ((5, "cpu"), (5, "gpu"), (7, "gpu"), (7, "cpu")):
        loss = lambda w, x, g: jnp.sum((x @ w) * g)  # noqa: E731
        grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0, method="ghost")
        with device._made_for(kind):
            operands = jnp.zeros((width, 7)), jnp.ones((1, 2, width)), jnp.ones((1, 2, 7))
            jax.make_jaxpr(grad_fn)(*operands)
    assert seen == ["gpu", "gpu"]


@pytest.mark.parametrize("off", curated([0.5, 1, 2], [0.5]))
def test_a_likely_norm_that_is_off_moves_nothing_beyond_the_clip_norm(off, monkeypatch):
    def other(*sides):
        seen.append(len(sides[0]))
        return jax.tree.map(lambda x: x * off, likely_norm(*sides))

    monkeypatch.setattr(factored, "likely_norm", other)
    x, g = (side[:1, 0] for side in hostile_products("random", time=2, examples=1))
    seen, x = [], np.tile(x, 2 + round(np.log2(off)))  # of shapes that nobody has traced
    loss = lambda w, x, g: jnp.sum((x @ w) * g)  # noqa: E731
    policy, options = dp.load_policy("mixed_bfloat16"), {"l2_clip_norm": 0.1, "method": "ghost"}
    with device._made_for("gpu"):
        grad_fn = dp.filter_clipped_grad(loss, policy=policy, **options)
        added = np.linalg.norm(np.float64(grad_fn(jnp.zeros((x.shape[-1], 4)), x, g)))
    assert seen == [1]
    assert 0.998 * 0.1 * min(1, 1 / off) < added <= 0.1 * min(1, 1 / off)


METHODS = [("per_example", 8), ("book_keeping", 8), ("ghost", 8), ("ghost", 2)]


@pytest.mark.parametrize(("method", "time"), curated(METHODS, METHODS[1:3]))
def test_one_example_adds_at_most_the_clip_norm(method, time):
    """Under a policy of 16 bits, as a GPU computes it; and all sums are as wide as declared."""
    x, g = (side[:, 0] for side in hostile_products("cancelling", time, examples=4))
    policy = "mixed_bfloat16"
    call = engine("no bias", method, 1e-6, policy)
    with device._made_for("gpu"):
        program = jax.make_jaxpr(call)(x[:1], g[:1])
        assert not dp.check_precision(call, x, g, policy=dp.load_policy(policy)).violations
        share = share_of_engine("no bias", method, x, g, clip_norm=1e-6, policy=policy)
    assert "cond" not in [e.primitive.name for e in dp.programs.equations(program)]
    assert 0 < share <= 1
