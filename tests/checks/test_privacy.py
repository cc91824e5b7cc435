"""`check_privacy`: how it is called, what its report holds, and that its bounds are bounds."""

import json
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_dp as dp
from tests.checks.privacy_steps import (
    PLAN,
    SLOTS,
    STDDEV,
    WIDTH,
    by_hand,
    clipped,
    data,
    first_state,
    made,
    mlp,
    next_key,
    prepared_by,
    updated,
    with_noise,
)


def honest(model, state, x, y, mask):
    key, state = next_key(state)
    grads = clipped()(model, x, y, is_padding_example=mask)
    return updated(model, state, with_noise(grads, key))


def leaking(model, state, x, y, mask):
    return *honest(model, state, x, y, mask), {"mean": x.mean(), "norm": jnp.ones(())}


ARGS = (mlp(), first_state(), *data())


@pytest.mark.parametrize(
    "private",
    [
        (2, 3, 4),
        ("x", "y", "mask"),
        ("2", 3, "mask"),
        (False, False, True, True, True),
    ],
)
def test_private_arguments_are_positions_names_or_a_prefix(private):
    assert dp.check_privacy(honest, *ARGS, private=private, plan=PLAN).ok


def test_private_arguments_may_be_parts_of_trees():
    def step(model, state, batch):
        return honest(model, state, batch["x"], batch["y"], batch["mask"])

    batch = dict(zip(("x", "y", "mask"), ARGS[2:], strict=True))
    for private in (
        "batch",
        ("batch.x", "batch.y", "2.mask"),
        (False, False, dict.fromkeys(batch, True)),
    ):
        assert dp.check_privacy(step, *ARGS[:2], batch, private=private, plan=PLAN).ok
    only_x = {"private": ("batch.x",), "plan": PLAN}
    report = dp.check_privacy(step, *ARGS[:2], batch, **only_x)
    assert not report.ok, str(report)
    assert "public_rows=" in str(report)
    rest = ("batch.y", "batch.mask")
    report = dp.check_privacy(step, *ARGS[:2], batch, public_rows=rest, **only_x)
    assert report.ok, str(report)


def test_private_arguments_may_be_shapes_and_numpy_arrays():
    shapes = eqx.filter_eval_shape(lambda: ARGS)
    assert dp.check_privacy(honest, *shapes, private=(2, 3, 4), plan=PLAN).ok
    arrays = [*ARGS[:2], *map(np.asarray, ARGS[2:])]
    assert dp.check_privacy(honest, *arrays, private=(2, 3, 4), plan=PLAN).ok
    leak = dp.check_privacy(leaking, *arrays, private=(2, 3, 4), plan=PLAN)
    assert [finding.rule for finding in leak.violations] == ["release"]


@pytest.mark.parametrize(
    ("private", "says"),
    [
        (None, "private must say which"),
        ((), "private must say which"),
        ((7,), "under which the step has no array.*model, state, x, y, mask"),
        (("z",), "'z', under which"),
        ((True, False), "no prefix"),
        ((False,) * 5, "False everywhere"),
        ((1.5,), "found"),
    ],
)
def test_what_is_private_has_to_be_said(private, says):
    with pytest.raises(ValueError, match=says):
        dp.check_privacy(honest, *ARGS, private=private, plan=PLAN)


def test_what_is_disclosed_has_to_be_there():
    with pytest.raises(ValueError, match=r"disclose names 'loss'.*0\.layers"):
        dp.check_privacy(honest, *ARGS, private=(2, 3, 4), plan=PLAN, disclose=("loss",))


def test_a_report_tells_everything():
    report = dp.check_privacy(leaking, *ARGS, private=(2, 3, 4), plan=PLAN)
    assert not report.ok
    (finding,) = report.violations
    assert finding.rule == "release"
    assert "2.mean" in finding.found
    assert "norm" not in finding.found
    with pytest.raises(ValueError, match=r"2\.mean"):
        report.raise_if_violated()
    disclosed = dp.check_privacy(leaking, *ARGS, private=(2, 3, 4), plan=PLAN, disclose="mean")
    disclosed.raise_if_violated()
    assert disclosed.disclosed == ("2.mean",)
    assert "disclosed, without noise: 2.mean" in str(disclosed)


def test_a_report_is_json_and_html():
    report = dp.check_privacy(leaking, *ARGS, private=(2, 3, 4), plan=PLAN)
    found = json.loads(report.to_json())
    assert found["ok"] is False
    assert found["noise_multiplier"] == pytest.approx(1.2)
    assert found["violations"][0]["rule"] == "release"
    assert found["releases"][0]["stddev"] == pytest.approx(STDDEV)
    assert found["plan"] == json.loads(PLAN.to_json())
    assert "2.mean" in report._repr_html_()
    assert report._repr_html_().startswith("<pre>")
    nothing = dp.check_privacy(lambda x: jnp.ones(3), jnp.ones(2), private=0)
    assert nothing.ok
    assert json.loads(nothing.to_json())["noise_multiplier"] == "inf"


def test_names_with_signs_are_escaped_in_html():
    report = dp.check_privacy(lambda x: {"<b>": x.sum()}, jnp.ones(2), private=0)
    assert "<b>" in str(report)
    assert "<b>" not in report._repr_html_()


def test_a_step_of_make_step_knows_its_plan_and_its_examples():
    case = made()
    report = dp.check_privacy(case.fn, *case.args, **case.kwargs)
    report.raise_if_violated()
    assert report.plan == case.fn.plan
    assert report.steps == 1
    (release,) = report.releases
    assert release.noise_multiplier == pytest.approx(1.2)
    assert "model.layers.0.weight" in release.outputs


def test_an_infinite_clip_norm_bounds_nothing():
    grad_fn = clipped(l2_clip_norm=math.inf)

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        return updated(model, state, with_noise(grad_fn(model, x, y, is_padding_example=mask), key))

    case = by_hand(step)
    report = dp.check_privacy(case.fn, *case.args, private=case.private, plan=PLAN)
    assert report.noise_multiplier == 0
    assert "unbounded" in str(report)


def test_private_data_in_a_shape_is_not_fine():
    def step(model, state, x, y, mask):
        return honest(model, state, x[~mask], y[~mask], mask[~mask])

    report = dp.check_privacy(step, *ARGS, private=(2, 3, 4), plan=PLAN)
    assert not report.ok
    assert "shape" in str(report)


def test_a_chain_of_optax_is_read_through_jit():
    grad_fn = clipped()
    optimizer = optax.chain(PLAN.privatizer(grad_fn, key=3), optax.adamw(1e-3))

    @eqx.filter_jit
    def step(model, state, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        updates, state = optimizer.update(grads, state, grad_fn.trainable(model))
        return eqx.apply_updates(model, updates), state

    args = (mlp(), optimizer.init(grad_fn.trainable(mlp())), *data())
    dp.check_privacy(step, *args, private=(2, 3, 4), plan=PLAN).raise_if_violated()
    other = dp.PrivacyPlan(0.5, 10, 2.4, 1e-5)
    report = dp.check_privacy(step, *args, private=(2, 3, 4), plan=other)
    assert "noise multiplier is 1.2, and the plan accounts for 2.4" in str(report)
    unplanned = dp.check_privacy(step, *args, private=(2, 3, 4))
    assert unplanned.ok
    assert unplanned.noise_multiplier == pytest.approx(1.2)


@pytest.mark.parametrize(
    "turns_none",
    [
        lambda x, n: jax.lax.while_loop(lambda c: c[1] < 0, lambda c: (0 * c[0], c[1]), (x, n))[0],
        lambda x, n: jax.lax.fori_loop(0, n, lambda i, c: jnp.zeros_like(c), x),
        lambda x, n: jax.lax.scan(lambda c, _: (jnp.zeros_like(c), None), x, None, length=0)[0],
    ],
)
def test_a_loop_may_take_no_turn(turns_none):
    def step(model, state, x, y, mask):
        return *honest(model, state, x, y, mask), turns_none(x, state.step)

    report = dp.check_privacy(step, *ARGS, private=(2, 3, 4), plan=PLAN)
    assert [finding.rule for finding in report.violations] == ["release"]


@pytest.mark.parametrize(
    "prepared",
    [
        lambda x, key: jax.lax.scan(lambda c, r: (c + r.sum(), r + c), 0.0, x)[1],
        lambda x, key: jax.lax.scan(lambda c, r: (c + 1, r * c), 0.0, x)[1],
        lambda x, key: jax.lax.scan(lambda c, r: (r, r + c), jnp.zeros(WIDTH), x)[1],
        lambda x, key: jax.lax.map(lambda i: x[i] * i, jnp.arange(SLOTS)),
    ],
    ids=["running sum", "counter", "row before", "number of the row"],
)
def test_rows_that_a_loop_goes_over_meet(prepared):
    case = prepared_by(lambda x, y, mask, key: (prepared(x, key), y, mask))
    report = dp.check_privacy(case.fn, *case.args, private=case.private, plan=PLAN)
    assert any(finding.rule == "examples apart" for finding in report.undecided), str(report)


def test_batches_of_two_turns_meet():
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)

    def epoch(params, state, xs, ys, masks):
        def turn(carry, batch):
            params, state, before = carry
            x, y, mask = batch
            key, state = next_key(state)
            model = eqx.combine(params, static)
            grads = grad_fn(model, x + before, y, is_padding_example=mask)
            return (*updated(params, state, with_noise(grads, key)), x), None

        carry = params, state, jnp.zeros(xs.shape[1:])
        return jax.lax.scan(turn, carry, (xs, ys, masks))[0][:2]

    batches = [jnp.stack([leaf] * 3) for leaf in data()]
    args = params, first_state(params), *batches
    report = dp.check_privacy(epoch, *args, private=(2, 3, 4), plan=PLAN)
    assert not report.ok, str(report)


def test_a_loop_may_turn_the_sign():
    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = clipped()(model, x, y, is_padding_example=mask)
        turned, _ = jax.lax.scan(
            lambda c, _: (jax.tree.map(jnp.negative, c), None), grads, None, length=1
        )
        difference = jax.tree.map(jnp.subtract, grads, turned)
        return updated(model, state, with_noise(difference, key))

    report = dp.check_privacy(step, *ARGS, private=(2, 3, 4), plan=PLAN)
    assert not report.ok
    assert report.noise_multiplier <= 0.6 * (1 + 1e-6)


# Sums through random linear programs: how far they really move, against what is said.


OPERATIONS = (
    lambda a, b, factor: factor * a,
    lambda a, b, factor: a / (1 + abs(factor)),
    lambda a, b, factor: jnp.concatenate([a[: a.size // 2], a[a.size // 2 :][::-1]]),
    lambda a, b, factor: a[: b.size] - b[: a.size],
    lambda a, b, factor: jnp.broadcast_to(a, (2, a.size)).reshape(-1),
    lambda a, b, factor: jnp.pad(a, 1)[1:],
    lambda a, b, factor: jnp.where(jnp.arange(a.size) % 2 == 0, a, a[::-1]),
    lambda a, b, factor: jnp.sum(jnp.stack([a, factor * a]), axis=0),
    lambda a, b, factor: jax.lax.scan(lambda c, _: (c + factor * a, None), a, length=3)[0],
    lambda a, b, factor: jax.lax.cond(factor > 0, lambda: a, lambda: 2 * a),
)


def linear_program(random, grads):
    """A few linear operations on the leaves of a clipped sum, drawn by a generator."""
    leaves = [leaf.reshape(-1) for leaf in jax.tree.leaves(grads)]
    for _ in range(random.integers(2, 7)):
        i, j = random.integers(len(leaves), size=2)
        operation = OPERATIONS[random.integers(len(OPERATIONS))]
        leaves[i] = operation(leaves[i], leaves[j], float(random.normal()))
    return leaves


@pytest.mark.parametrize("seed", range(10))
def test_a_sum_moves_no_further_than_is_said(seed):
    grad_fn, model, (x, y, mask) = clipped(normalize_by=1.0), mlp(), data()

    @jax.jit
    def sums(x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return linear_program(np.random.default_rng(seed), grads)

    def step(x, y, mask, key):
        return jnp.concatenate(dp.add_noise(sums(x, y, mask), key, 1.0))

    report = dp.check_privacy(step, x, y, mask, jax.random.key(0), private=(0, 1, 2))
    with_ = np.concatenate(sums(100 * x, y, mask))
    moved = [
        np.linalg.norm(with_ - np.concatenate(sums(100 * x, y, mask.at[i].set(True))))
        for i in range(5)
    ]
    assert report.releases
    assert max(moved) > 0
    assert max(moved) <= (1 + 1e-5) / report.noise_multiplier
