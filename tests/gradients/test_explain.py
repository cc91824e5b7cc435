"""What the engine says of its choices, and that everyone who asks is told the same."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import eqx_dp as dp
from eqx_dp import device
from tests import models

CASE = models.mlp()
PLAN = dp.PrivacyPlan(sampling_prob=0.05, steps=10, noise_multiplier=1.0, delta=1e-6)
SLOTS = PLAN.sampler(1000, seed=3).capacity


def clipped(case=CASE, **options):
    options = {"l2_clip_norm": 1.0, "filter_spec": case.filter_spec, **options}
    return dp.filter_clipped_grad(case.loss, **options)


def explained(case, size=4, plan=None, **options):
    return dp.explain(clipped(case, **options), case.model, *case.batch(size), plan=plan)


def test_a_row_for_every_trainable_leaf():
    case = models.cnn()
    found = explained(case, microbatch_size=2, policy=dp.load_policy("mixed_bfloat16"))
    paths = [f"{name}.{leaf}" for name in ("first", "norm", "second", "head")
             for leaf in ("weight", "bias")]  # fmt: skip
    assert [row.path for row in found.rows] == paths
    assert {row.way for row in found.rows} <= {"factored", "formed"}
    assert all(row.reason and row.flops > 0 and row.bytes > 0 for row in found.rows)
    assert {kind for row in found.rows for kind in row.uses} >= {"convolution", "contraction"}
    assert {row.compute_dtype for row in found.rows} == {"bfloat16"}
    assert {row.accumulate_dtype for row in found.rows} == {"float32"}
    lines = str(found).splitlines()
    for row, line in zip(found.rows, lines[1:-2], strict=True):
        assert line.startswith(row.path)
        assert row.reason in line
    assert f"method {found.method}, 2 of 4 examples at once" in lines[-2]


def l2_term(model, x):
    return jnp.sum(jnp.sin(x @ model["w"] + model["b"])) + jnp.sum(model["w"] ** 2)


def probe(model, x):
    """A library may call a layer to learn the shape of its result."""
    shape = jnp.sin(model["w"][jnp.argmax(x)]).shape
    return jnp.sum(jnp.sin(x @ model["w"])) + len(shape)


ONES = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
REASONS = {
    "what no use describes": (
        lambda m, x: jnp.sum(jnp.maximum(m["b"], x[:2])), "b", (), "formed",
        "used by more than products ('max')",
    ),
    "what is computed and thrown away": (probe, "w", ("contraction",), "factored", "one step"),
    "what is not used": (
        lambda m, x: jnp.sum(m["b"]), "w", (), "unused", "the loss does not depend on it",
    ),
    "a thin matrix at many steps": (
        lambda m, x: jnp.sum(jnp.tanh(jnp.outer(jnp.arange(50.0), x) @ m["w"])),
        "w", ("contraction",), "formed", "is cheaper than their inner products",
    ),
    "an L2 term": (
        l2_term, "w", ("contraction",), "formed", "weight decay in the optimizer (optax.adamw)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_reasons(name):
    loss, leaf, uses, way, reason = REASONS[name]
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0)
    (row,) = (row for row in dp.explain(grad_fn, ONES, jnp.ones((4, 3))).rows if row.path == leaf)
    assert (row.uses, row.way) == (uses, way)
    assert reason in row.reason


@pytest.mark.parametrize(
    ("product", "way"),
    [(jnp.dot, "formed"), (jax.checkpoint(jnp.dot), "factored")],
    ids=["plain-formed", "checkpoint-factored"],
)
def test_ghost_forms_a_leaf_if_what_it_is_made_of_takes_more_and_is_held(product, way):
    loss = lambda w, x: jnp.sum(product(x, w) ** 2)  # noqa: E731
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0, method="ghost")
    for width, its in ((3, way), (64, "factored")):
        (row,) = dp.explain(grad_fn, jnp.ones((width, width)), jnp.ones((4, 32, width))).rows
        assert row.way == its


def test_auto_goes_by_what_an_example_holds():
    few = explained(CASE)
    assert (few.method, few.microbatch_size) == ("book_keeping", None)
    wide = models.Case("wide", jnp.ones((2048, 2048)), lambda w, x: jnp.sum(jnp.sin(w * x)), None)
    many = dp.explain(clipped(wide), wide.model, jax.ShapeDtypeStruct((64, 2048), jnp.float32))
    assert many.method == "book_keeping"
    assert many.microbatch_size in range(1, 64)


def test_auto_on_a_gpu_goes_by_its_data_sheet():
    """Kernels that start are what a small model costs, gradients in memory a large one."""
    wide = dp.filter_clipped_grad(lambda w, x: jnp.sum((w @ x) ** 2), l2_clip_norm=1.0)
    with device._made_for("gpu:NVIDIA H100 80GB HBM3"):
        large = dp.explain(wide, jnp.ones((2048, 2048)), jnp.ones((64, 2048)))
        assert (explained(CASE).method, large.method) == ("per_example", "book_keeping")


# Operations

RULES = dp.ShardingRules(jax.make_mesh((8,), ("data",)))


def test_operations_of_an_mlp_are_counted_exactly():
    """Forward through all layers; back to every weight, and to all inputs but the first."""
    products = sum(2 * i * o for i, o in itertools.pairwise((6, 8, 8, 3)))
    with jax.set_mesh(RULES.mesh):
        assert explained(CASE, 16, sharding=RULES).flops == 16 * (3 * products - 2 * 6 * 8)


def test_what_rounding_of_the_sum_costs_is_told():
    """The rows of the table in `finite_precision.md`: blocks of 2 twice, then 8 parts."""
    with jax.set_mesh(RULES.mesh):
        few, many = (explained(CASE, size, sharding=RULES) for size in (16, 2**15))
    assert few.reserve == pytest.approx(2.002 * (2 * 2 * 1 + 16 * 7) * 2**-24)
    assert (few.across, many.across) == ("float32", "float64")
    assert f"of 8 parts in float64: {many.reserve:.2%} of the clip norm" in str(many)


# With a plan


def test_everyone_who_asks_with_a_plan_is_told_the_same():
    options = {"num_examples": 1000, "seed": 3, "l2_clip_norm": 1.0}
    step = dp.make_step(CASE.loss, optax.sgd(0.1), PLAN, **options)
    grad_fn = clipped(normalize_by=PLAN.sampling_prob * 1000)
    batch = CASE.batch(SLOTS)
    asked = dp.explain(grad_fn, CASE.model, *batch, plan=PLAN)
    for told in (grad_fn.of_samples(PLAN.batches), step.grad_fn):
        found = dp.explain(told, CASE.model, *batch)
        assert found == asked
        assert str(found) == str(asked)
        planned = dp.plan_memory(told, CASE.model, *batch, compiled=False)
        assert planned.microbatch_size == asked.microbatch_size
        with pytest.raises(ValueError, match="is_padding_example is missing"):
            told(CASE.model, *CASE.batch(4))
    assert 1 < asked.microbatch_size < SLOTS
    # The function that was asked about is as it was: it wants no mask.
    grad_fn(CASE.model, *CASE.batch(2))
    assert dp.explain(grad_fn, CASE.model, *batch).sample is None


# Rows that are compared: on a batch of one nothing is left to compare.


def clip(model, x):
    """Images against texts: each row's own pair against those of other rows."""
    image, text = jax.vmap(model)(x), x[:, :3]
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(image @ text.T)))


def simclr(model, x, key):
    """Two views of each row, against the views of other rows."""
    views = jax.vmap(model)(jnp.concatenate([x, x + jax.random.normal(key, x.shape)]))
    similar = views @ views.T - 1e9 * jnp.eye(len(views))
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(similar), len(x)))


def normed(model, x):
    """The variance within a batch, by hand."""
    return jnp.mean(jnp.var(jax.vmap(model)(x), axis=0))


ROWS, OF_BATCH = jnp.ones((8, 6)), {"l2_clip_norm": 1.0, "keep_batch_dim": True}


@pytest.mark.parametrize("loss", [clip, simclr, normed, lambda m, x: jnp.mean(jax.vmap(m)(x) ** 2)])
def test_a_loss_that_compares_rows_gives_a_warning(loss):
    key = jax.random.key(0) if loss is simclr else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        dp.explain(dp.filter_clipped_grad(loss, **OF_BATCH), CASE.model, ROWS, key=key)
    is_compared = loss in (clip, simclr, normed)
    assert ["compares rows" in str(one.message) for one in caught] == [True] * is_compared


def test_a_trainer_gives_that_warning():
    step = dp.make_step(simclr, optax.sgd(0.1), PLAN, num_examples=8, **OF_BATCH)
    with pytest.warns(UserWarning, match="compares rows"):
        dp.Trainer(step, (ROWS,), progress=False).run(CASE.model, steps=0)
