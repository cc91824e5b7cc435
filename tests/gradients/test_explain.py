"""What the engine says of its choices, and the choices themselves."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError
from scipy import stats

import eqx_dp as dp
from eqx_dp.gradients import choice, described
from eqx_dp.paths import dotted
from tests import models


def explained(case, size=4, **options):
    grad_fn = dp.filter_clipped_grad(
        case.loss, l2_clip_norm=1.0, filter_spec=case.filter_spec, **options
    )
    return dp.explain(grad_fn, case.model, *case.batch(size))


def test_a_row_for_every_trainable_leaf():
    case = models.cnn()
    found = explained(case)
    paths = [
        dotted(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(case.model)
        if hasattr(leaf, "dtype")
    ]
    assert [row.path for row in found.rows] == paths
    assert {row.way for row in found.rows} <= {"factored", "formed"}
    assert all(row.reason and row.flops > 0 and row.bytes > 0 for row in found.rows)
    assert {kind for row in found.rows for kind in row.uses} >= {"convolution", "contraction"}


def test_it_prints_as_a_table():
    found = explained(models.cnn(), microbatch_size=2)
    lines = str(found).splitlines()
    assert len(lines) == len(found.rows) + 3  # heading, total, operations of the whole
    assert lines[0].split() == [
        "leaf",
        "uses",
        "way",
        "why",
        "compute",
        "accumulate",
        "FLOPs",
        "bytes",
    ]
    for row, line in zip(found.rows, lines[1:-2], strict=True):
        assert line.startswith(row.path)
        assert row.reason in line
        assert line.split()[-4:-3] == ["float32"]
    assert lines[-2].startswith("total")
    assert "2 of 4 examples at once" in lines[-2]
    assert f"method {found.method}" in lines[-2]


def test_what_no_site_describes_and_what_is_not_used():
    model = {"a": jnp.ones(3), "unused": jnp.ones(2)}
    loss = lambda m, x: jnp.sum(jnp.maximum(m["a"], x))  # noqa: E731
    case = models.Case("max", model, loss, models.mlp().draw)
    grad_fn = dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0, method="book_keeping")
    formed, unused = dp.explain(grad_fn, model, jnp.ones((2, 3))).rows
    assert formed.uses == ()
    assert (formed.way, formed.reason) == ("formed", "used by more than products ('max')")
    assert (unused.way, unused.reason) == ("unused", "the loss does not depend on it")


@pytest.mark.parametrize("method", ["per_example", "book_keeping", "ghost"])
def test_what_was_asked_for(method):
    found = explained(models.mlp(), method=method, microbatch_size=3)
    assert (found.method, found.microbatch_size) == (method, 3)
    assert found.reason == "as asked for"


def test_auto_goes_by_what_an_example_holds(monkeypatch):
    few = explained(models.mlp())
    assert (few.method, few.microbatch_size) == ("book_keeping", None)

    monkeypatch.setattr(choice, "_CPU_SHARE", 2 * sum(row.bytes for row in few.rows) // 4)
    some = explained(models.mlp())
    assert (some.method, some.microbatch_size) == ("book_keeping", 2)

    monkeypatch.setattr(choice, "device_memory", lambda: 100)
    found = explained(models.mlp())
    assert found.method == "ghost"
    assert "too much to hold" in str(found)


def test_many_steps_and_thin_matrices_are_formed():
    """No norm is cheaper without the gradient."""
    model = jnp.ones((3, 2))
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))  # noqa: E731
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0)
    found = dp.explain(grad_fn, model, jnp.ones((2, 50, 3)))
    assert found.method == "book_keeping"
    assert [row.way for row in found.rows] == ["formed"]


def test_shapes_and_a_steps_own_arguments_will_do():
    case = models.mlp()
    grad_fn = dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0)
    batch = case.batch(4)
    of_shapes = dp.explain(grad_fn, *eqx.filter_eval_shape(lambda *args: args, case.model, *batch))
    padding = jnp.zeros(4, bool)
    assert of_shapes == dp.explain(grad_fn, case.model, *batch, is_padding_example=padding)


@pytest.mark.parametrize("preset", ["float32", "mixed_float16"])
def test_a_call_is_described_by_shapes_that_outlive_the_trace(preset):
    """The planner reads them when tracing is over: a tracer among them would be one that leaked."""
    case, policy = models.cnn(), dp.load_policy(preset)
    grad_fn = dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0, policy=policy)
    call = described(grad_fn, case.model, case.batch(4))
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(call))
    assert not any(isinstance(x, jax.core.Tracer) for x in call.traced.consts)
    assert {str(x.dtype) for x in call.traced.params} == {str(policy.compute_dtype)}
    assert {str(x.dtype) for x in call.sums} == {"float32"}
    trained = jax.tree.leaves(eqx.filter(case.model, eqx.is_inexact_array))
    assert [x.shape for x in call.traced.params] == [x.shape for x in trained]


@pytest.mark.slow
def test_a_variant_differs_in_what_it_is_told(unchecked):
    case = models.mlp()
    grad_fn = dp.filter_value_and_clipped_grad(
        case.loss, l2_clip_norm=1.0, method="ghost", microbatch_size=3, normalize_by=2.0
    )
    batch = case.batch(4)
    for options in ({}, {"method": "per_example"}, {"microbatch_size": 2}):
        other = grad_fn._variant(**options)
        call = described(other, case.model, batch)
        expected = {"method": "ghost", "microbatch_size": 3} | options
        assert call.choice.method == expected["method"]
        assert call.choice.microbatch_size == expected["microbatch_size"]
        assert other.l2_norm_bound == grad_fn.l2_norm_bound
    _, grads = grad_fn(case.model, *batch)
    for one, two in zip(
        jax.tree.leaves(grads), jax.tree.leaves(grad_fn._variant()(case.model, *batch)), strict=True
    ):
        assert jnp.array_equal(one, two)
    for options in ({"method": "best"}, {"microbatch_size": 0}):
        with pytest.raises(ValueError, match="must be"):
            grad_fn._variant(**options)


def test_what_filter_clipped_grad_did_not_return():
    case = models.mlp()
    with pytest.raises((ValueError, TypeCheckError), match="grad_fn"):
        dp.explain(case.loss, case.model, *case.batch(4))


def test_an_l2_term_is_answered_with_weight_decay():
    """The other uses of the matrix are told as well; a bias is no such term."""

    def loss(model, x):
        return jnp.sum(jnp.sin(x @ model["w"] + model["b"])) + jnp.sum(model["w"] ** 2)

    model = {"b": jnp.ones(2), "w": jnp.ones((3, 2))}
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0)
    bias, matrix = dp.explain(grad_fn, model, jnp.ones((4, 3))).rows
    assert bias.reason == "used by more than products ('add')"
    assert matrix.uses == ("contraction",)
    assert matrix.way == "formed"
    assert matrix.reason.startswith("used by more than products (")
    assert "weight decay in the optimizer (optax.adamw)" in matrix.reason


def test_dtypes_are_those_of_the_policy():
    found = explained(models.mlp(), policy=dp.load_policy("mixed_bfloat16"))
    assert {(row.compute_dtype, row.accumulate_dtype) for row in found.rows} == {
        ("bfloat16", "float32")
    }


def test_figures_are_those_of_the_method_and_add_up():
    case = models.mlp()
    entries = [x.size for x in jax.tree.leaves(eqx.filter(case.model, eqx.is_inexact_array))]
    for method in ("book_keeping", "per_example"):
        found = explained(case, method=method)
        if method == "per_example":
            assert [row.bytes for row in found.rows] == [4 * 4 * n for n in entries]
            assert [row.flops for row in found.rows] == [4 * 4 * n for n in entries]
            assert {row.way for row in found.rows} == {"formed"}
        *_, total, _ = str(found).splitlines()
        assert f"{sum(row.flops for row in found.rows):.2e}" in total
        assert f"{sum(row.bytes for row in found.rows) / 2**20:.2f} MiB" in total


# With a plan.


PLAN = dp.PrivacyPlan(sampling_prob=0.05, steps=10, noise_multiplier=1.0, delta=1e-6)
EXPECTED = re.compile(
    r"batch: (\d+) slots, of which ([\d.]+) are expected to hold an example; ([\d.]+) microbatches "
    r"of (\d+) are expected to be computed\n"
    r"expected time of a step, without the optimizer: gradient (\d+)%, padding (\d+)%, "
    r"sums over microbatches (\d+)%, noise (\d+)%"
)


def with_plan(slots, plan=PLAN, **options):
    case = models.mlp()
    grad_fn = dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0, **options)
    found = dp.explain(grad_fn, case.model, *case.batch(slots), plan=plan)
    without = dp.explain(grad_fn, case.model, *case.batch(slots))
    return found, without


@pytest.mark.parametrize("size", [None, 1, 8, 10_000])
def test_a_plans_samples_in_two_lines(size):
    slots = PLAN.sampler(1000, seed=3).capacity
    found, without = with_plan(slots, method="ghost", microbatch_size=size)
    text, same = str(found).splitlines(), str(without).splitlines()
    assert text[:-2] == same  # the table is the same, and without a plan it is all
    told = EXPECTED.fullmatch("\n".join(text[-2:]))
    assert told
    sample = PLAN.sampling.of(slots)
    at_once = min(size or slots, slots)
    assert int(told[1]) == slots
    assert float(told[2]) == pytest.approx(sample.mean, abs=0.06)
    assert sample.mean == pytest.approx(50, abs=0.7)
    assert float(told[3]) == pytest.approx(sample.microbatches(at_once), abs=0.006)
    assert int(told[4]) == at_once
    assert sum(int(told[part]) for part in (5, 6, 7, 8)) == pytest.approx(100, abs=2)
    assert int(told[6]) == 0 or size != 1
    assert found.work.total == pytest.approx(sum(found.work))


def test_a_plans_samples_on_a_mesh():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    slots = PLAN.sampler(1000, seed=3, pad_to=4).capacity
    with jax.set_mesh(mesh):
        found, _ = with_plan(slots, microbatch_size=8, sharding=dp.ShardingRules(mesh))
    told = EXPECTED.search(str(found))
    assert told
    # Examples are dealt out: the first device has a quarter of them, rounded up.
    drawn = np.arange(slots + 1)
    weights = stats.binom.pmf(drawn, 1000, PLAN.sampling_prob)
    expected = np.sum(weights * np.ceil(np.ceil(drawn / 4) / 8))
    assert float(told[3]) == pytest.approx(expected, abs=0.05)  # the batch is rounded up
    assert int(told[1]) == slots


def test_a_batch_without_slots_and_a_plan():
    found, _ = with_plan(0)
    assert "batch: 0 slots, of which 0.0 are expected to hold an example; 0.00" in str(found)


def test_nothing_to_train_but_empty_leaves_and_a_plan():
    grad_fn = dp.filter_clipped_grad(lambda w, x: jnp.sum(w) * jnp.sum(x), l2_clip_norm=1.0)
    found = dp.explain(grad_fn, jnp.zeros(0), jnp.ones((4, 2)), plan=PLAN)
    assert "4 slots" in str(found)
