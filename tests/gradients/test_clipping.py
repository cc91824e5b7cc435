"""Ways to clip, augmentations of an example, and clipped sums of functions, against plain numpy."""

import itertools
from contextlib import nullcontext

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from eqx_dp.gradients.clipping import AutoS, PerLayer, Quantile
from tests import models, oracle
from tests.gradients import jitted
from tests.gradients.test_clip_holds import LOSSES, SIZE, attack
from tests.tiers import by_method, curated

CASE, KEYED, KEY = models.mlp(), models.dropout(), jax.random.key(3)
NOISY = {"key": KEY, "is_padding_example": np.arange(8) % 4 == 1}


def clipped(leaves, rule, clip_norm):
    """One example's gradient, clipped as a rule says, in float64."""
    norm = oracle.vector(leaves)
    norm = np.linalg.norm(norm)
    match rule:
        case AutoS():
            return [x / (norm + rule.gamma) for x in leaves]
        case PerLayer():
            most = rule.clip_norm / np.sqrt(len(leaves))
            return [x * min(1, most / np.linalg.norm(x)) for x in leaves]
        case Quantile():
            counted = np.sign(clip_norm - norm) * rule.weight / 2
            return [*(x / max(norm, clip_norm) for x in leaves), counted]


def expected(rule, case, batch, mask, clip_norm=0.7):
    """The sum over examples: zero for padding, and for an example that is not finite."""
    one_by_one = oracle.clipped_gradients(case.loss, case.model, *batch, l2_clip_norm=np.inf)
    parts = jax.tree.leaves(one_by_one.contributions)
    each = [[x[i] for x in parts] for i in np.flatnonzero(~mask)]
    its = [leaves for leaves in each if oracle.vector(leaves).any()]
    sums = [clipped(leaves, rule, clip_norm) for leaves in its]
    return [np.sum(column, axis=0) for column in zip(*sums, strict=True)]


RULES = {
    "Quantile": Quantile(clip_norm=9.0, weight=0.5),
    "AutoS": AutoS(2.0),
    "PerLayer": PerLayer(0.5),
}
MASK = np.arange(16) % 5 == 2
BATCH = CASE.batch(16)[0].at[3].set(jnp.nan), CASE.batch(16)[1]
WAYS = {
    "book_keeping": {"method": "book_keeping"},
    "ghost": {"method": "ghost", "microbatch_size": 3},
    "per_example": {"method": "per_example", "normalize_by": 4.0},
    "rescaled": {"rescale_to_unit_norm": True},
    "bfloat16": {"policy": dp.load_policy("mixed_bfloat16")},
    "float16": {"policy": dp.load_policy("mixed_float16")},
    "devices": {"sharding": dp.ShardingRules(jax.make_mesh((8,), ("data",)))},
}


def on_mesh(options):
    return jax.set_mesh(options["sharding"].mesh) if "sharding" in options else nullcontext()


AT_ONCE = [("Quantile", "book_keeping"), ("PerLayer", "per_example")]


@pytest.mark.parametrize(("kind", "way"), curated(itertools.product(RULES, WAYS), AT_ONCE, every=2))
def test_rules(kind, way):
    rule = RULES[kind]
    options = WAYS[way]
    grad_fn = dp.filter_clipped_grad(CASE.loss, l2_clip_norm=rule, **options)
    given = {"clip_norm": jnp.float32(0.7)} if isinstance(rule, Quantile) else {}
    run = eqx.filter_jit(lambda *args, **its: grad_fn(*args, is_padding_example=MASK, **its))
    with on_mesh(options):
        found = jax.tree.leaves(run(CASE.model, *BATCH, **given))
    scale = options.get("normalize_by", 1.0)
    if isinstance(rule, PerLayer) and "rescale_to_unit_norm" in options:
        scale = rule.clip_norm
    truth = [x / scale for x in expected(rule, CASE, BATCH, MASK)]
    tolerance = 0.03 if "policy" in options else 1e-5 + oracle.room(16)
    assert oracle.relative_error(found, truth) < tolerance
    assert found[-1] == pytest.approx(truth[-1], rel=tolerance)  # the count is small
    bound = {Quantile: np.hypot(1, 0.25), PerLayer: 0.5, AutoS: 1}[type(rule)]
    assert grad_fn.l2_norm_bound == pytest.approx(bound / scale)


HOSTILE = {
    "AutoS0": AutoS(0.0),
    "AutoS1": AutoS(1.0),
    "PerLayer": PerLayer(1e-12),
    "Quantile": Quantile(),
}


@pytest.mark.optimized
@pytest.mark.parametrize(("kind", "method"), by_method(HOSTILE, book_keeping=("Quantile",)))
def test_the_bound_holds_for_hostile_values(kind, method):
    rule = HOSTILE[kind]
    loss, time, shape = LOSSES["tokens"]
    grad_fn = dp.filter_clipped_grad(
        lambda model, *its: loss(model[0], *its) + jnp.sum(model[1] * its[0]),
        l2_clip_norm=rule, method=method,
    )  # fmt: skip
    run = jax.jit(lambda model, *batch, **given: grad_fn(model, *batch, **given))
    for name in ("ordinary", "tokens cancel", "equal tokens", "lopsided", "huge", "tiny"):
        w, *batch = (np.asarray(x, np.float32) for x in attack(name, time, shape))
        model, batch = (w, np.zeros(shape[1], np.float32)), (*batch[:-1], batch[-1].astype(int))
        for clip_norm in [0, 1e-20, 1.0, np.nan, -np.inf] if kind == "Quantile" else [None]:
            given = {} if clip_norm is None else {"clip_norm": jnp.float32(clip_norm)}
            for i in range(SIZE):
                added = oracle.vector(run(model, *(x[i : i + 1] for x in batch), **given))
                share = np.linalg.norm(added) / grad_fn.l2_norm_bound
                assert share <= 1, (name, clip_norm, share - 1)
                assert name != "huge" or share > 0.7


def test_a_quantile_is_found_from_far_away():
    """A first clip norm that is wrong by 100 x, in either direction."""
    rng, quantile = np.random.default_rng(0), Quantile(0.8, weight=0.25)
    for clip_norm in (0.01, 100.0):
        for _ in range(200):
            counted = np.sum(np.where(np.exp(rng.normal(size=256)) <= clip_norm, 0.5, -0.5)) / 256
            noisy = quantile.weight * counted + rng.normal() / 256
            clip_norm = quantile.next(jnp.float32(clip_norm), noisy)
        assert clip_norm == pytest.approx(np.exp(0.8416), rel=0.25)
    for noisy in (-1e30, 1e30):
        assert 1e-12 <= quantile.next(jnp.float32(1e-12), noisy) <= 1.4e-12


@pytest.mark.parametrize("method", curated(["book_keeping", "ghost", "per_example"], []))
def test_augmentations_share_one_clip(method):
    batch = KEYED.batch(8)

    def mean(model, x, label, key):
        keys = jax.random.split(key, 3)
        return sum(KEYED.loss(model, x, label, key=key) for key in keys) / 3

    grad_fn = jitted.grad(KEYED.loss, l2_clip_norm=0.3, augmentations=3, method=method)
    found = grad_fn(KEYED.model, *batch, **NOISY)
    truth = oracle.clipped_gradients(mean, KEYED.model, *batch, l2_clip_norm=0.3, **NOISY)
    assert oracle.relative_error(found, truth.grads) < 1e-5 + oracle.room(8)


# Clipped sums


def histogram(x, key=None):
    shift = 0.0 if key is None else jax.random.uniform(key, ())
    return {"counts": jnp.histogram(x + shift, 4, (-2, 2))[0].astype(float), "mean": jnp.mean(x)}


SUMS = {"at once": {}, "in microbatches": {"microbatch_size": 3}, "devices": WAYS["devices"]}


@pytest.mark.parametrize(
    ("clip_norm", "way"),
    curated(itertools.product([1.0, 1e3, PerLayer(2.0)], SUMS), [(1.0, "in microbatches")]),
    ids=str,
)
def test_a_clipped_sum(clip_norm, way):
    options = SUMS[way]
    xs = BATCH[0].at[4].set(jnp.inf)
    sum_fn = dp.filter_clipped_sum(histogram, l2_clip_norm=clip_norm, normalize_by=2.0, **options)
    with on_mesh(options):
        found = jax.jit(lambda xs: sum_fn(xs, key=KEY, is_padding_example=MASK))(xs)
    truth, keys, plain = np.zeros(5), jax.random.split(KEY, 16), jax.jit(histogram)
    for i in np.flatnonzero(~MASK & np.isfinite(xs).all(1)):
        values = [np.float64(x) for x in jax.tree.leaves(plain(xs[i], keys[i]))]
        most, sizes = clip_norm, [np.linalg.norm(oracle.vector(values))] * 2
        if isinstance(clip_norm, PerLayer):
            most, sizes = np.sqrt(2), [np.linalg.norm(x) for x in values]
        truth += oracle.vector([x * min(1, most / n) for x, n in zip(values, sizes, strict=True)])
    np.testing.assert_allclose(oracle.vector(found), truth / 2, rtol=1e-5 + oracle.room(16))


@pytest.mark.parametrize("how", ["sum", *RULES])
def test_a_private_step_is_accounted_for_and_half_its_noise_is_found(how):
    plan = dp.PrivacyPlan(sampling_prob=0.1, steps=10, noise_multiplier=2.0, delta=1e-6)
    if how == "sum":
        private = dp.filter_clipped_sum(histogram, l2_clip_norm=2.0)
        call = lambda x, y, mask: private(x, is_padding_example=mask)  # noqa: E731
    else:
        private = dp.filter_clipped_grad(CASE.loss, l2_clip_norm=RULES[how])
        call = lambda x, y, mask: private(CASE.model, x, y, is_padding_example=mask)  # noqa: E731
    for share in (1.0, 0.5):
        stddev = share * plan.noise_multiplier * private.l2_norm_bound
        noise = dp.gaussian_privatizer(stddev=stddev, key=1)

        def step(state, *batch, noise=noise):
            return noise.update(call(*batch), state)

        shapes = jax.eval_shape(call, *BATCH, MASK)
        state = noise.init(jax.tree.map(jnp.zeros_like, shapes))
        report = dp.check_privacy(step, state, *BATCH, MASK, private=(1, 2, 3), plan=plan)
        assert report.ok == (share == 1), str(report)


# Refused


def sums(fun=histogram, **options):
    return dp.filter_clipped_sum(fun, **{"l2_clip_norm": 1.0, **options})


def grads(loss=CASE.loss, l2_clip_norm=1.0, **options):
    return dp.filter_clipped_grad(loss, l2_clip_norm=l2_clip_norm, **options)


REFUSED = {
    "gamma.*at least 0": lambda: AutoS(-1.0),
    "clip_norm.*at least 0": lambda: PerLayer(-1.0),
    "clip_norm.*finite": lambda: PerLayer(np.inf),
    "quantile.*in": lambda: Quantile(1.5),
    "weight.*in": lambda: Quantile(weight=0.0),
    "learning_rate.*greater": lambda: Quantile(learning_rate=-0.1),
    "clip_norm.*greater": lambda: Quantile(clip_norm=0.0),
    r"l2_clip_norm.*a.*whole model": lambda: grads(l2_clip_norm={"a": AutoS()}),
    "clip_norm was given.*Quantile": lambda: grads()(CASE.model, *BATCH, clip_norm=1.0),
    "clip_norm must be a real": lambda: grads(l2_clip_norm=Quantile())(
        CASE.model, *BATCH, clip_norm=np.ones(2)
    ),
    "augmentations must be": lambda: grads(augmentations=0),
    "augmentations=2.*'key'": lambda: grads(augmentations=2)(CASE.model, *BATCH),
    "none was given": lambda: grads(KEYED.loss, augmentations=2)(KEYED.model, *KEYED.batch(4)),
    "must be a function": lambda: sums(3),
    "must return arrays": lambda: sums(lambda x: None)(BATCH[0]),
    r"result of the function at n.*int32.*float": lambda: sums(lambda x: {"n": jnp.int32(1)})(
        BATCH[0]
    ),
    "no parameter named 'key'": lambda: sums(lambda x: x)(BATCH[0], key=KEY),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message, unchecked):
    with pytest.raises(ValueError, match=rf"(?s){message}"):
        REFUSED[message]()
