"""The examples of sharding: what they print, and whether it is true."""

import ast
import contextlib
import functools
import importlib.util
import io
from types import ModuleType, SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tests.test_examples import EXAMPLES, run

WAYS = ["train_plainly", "train_plainly_by_shard_map"]
PRIVATE_WAYS = ["train_privately", "train_privately_by_shard_map"]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tour, losses = load("data_parallel"), load("sharded_loss")


@functools.cache
def cases():
    return {case.name: case for case in losses.make_cases()}


# examples/sharded_loss.py


@pytest.fixture(scope="module")
def measured():
    """What main returns and prints, and every gradient that it computes."""
    runs, output = [], io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        plain = losses.run
        patch.setattr(losses, "run", lambda *a: runs.append(plain(*a)) or runs[-1])
        figures = losses.main()
    # For every case one device, silent, Auto, Explicit.
    grads = {name: [r.grads for r in runs[4 * i : 4 * i + 4]] for i, name in enumerate(cases())}
    return SimpleNamespace(figures=figures, output=output.getvalue(), grads=grads)


@pytest.mark.slow
def test_all_cases_stay_within_their_limits(measured):
    found = {(figures.case, figures.axis_type) for figures in measured.figures}
    assert found == {(name, axes) for name in cases() for axes in ("Auto", "Explicit")}
    for figures in measured.figures:
        assert figures.error <= 1e-5, figures
        assert figures.flops <= 1.1 * figures.silent_flops, figures
        assert figures.temporary_bytes <= 1.2 * figures.silent_temporary_bytes, figures
        assert figures.flops <= 1.3 * figures.flops_share, figures


@pytest.mark.slow
def test_what_is_measured_is_printed(measured):
    lines = measured.output.splitlines()[2:]
    for figures, line in zip(measured.figures, lines, strict=True):
        assert line.startswith(figures.case)
        assert line.split()[-5:] == [str(round(figure)) for figure in figures[3:]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mean, data", "mean, residual"])
def test_mean_estimation_has_the_plain_gradient(measured, name):
    case = cases()[name]
    expected = float(case.model) - np.mean(np.float64(case.batch[0]))
    for grad in measured.grads[name]:
        assert float(grad) == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def gpt_examples():
    """Gradients of single examples, by JAX alone, on one device."""
    case = cases()["GPT"]

    def of_one(tokens, targets):
        loss = losses.next_token_loss
        return jax.grad(loss, argnums=1)(losses.SILENT, case.model, tokens[None], targets[None])

    return [np.float64(leaf) for leaf in jax.tree.leaves(jax.jit(jax.vmap(of_one))(*case.batch))]


@pytest.mark.slow
def test_gpt_has_the_gradient_of_clipping_by_hand(measured, gpt_examples):
    number = len(gpt_examples[0])
    norms = np.sqrt(sum(np.sum(g.reshape(number, -1) ** 2, axis=1) for g in gpt_examples))
    factors = np.minimum(1, cases()["GPT"].l2_clip_norm / norms)
    assert np.min(factors) < 0.9  # something is clipped
    expected = [np.tensordot(factors, g, axes=1) / number for g in gpt_examples]
    for grads in measured.grads["GPT"]:
        for found, right in zip(jax.tree.leaves(grads), expected, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
def test_the_losses_train_without_privacy_as_they_are(gpt_examples, axes):
    sharding = getattr(losses, axes.upper())
    for name, case in cases().items():
        rules = case.rules(getattr(AxisType, axes))
        with jax.set_mesh(rules.mesh):
            model, batch = rules.shard(case.model), rules.shard_batch(case.batch)
            loss = eqx.Partial(case.loss, sharding)
            grads = eqx.filter_jit(eqx.filter_grad(lambda m, *b, f=loss: f(m, *b)))(model, *batch)
        if name == "GPT":
            expected = [np.mean(leaf, axis=0) for leaf in gpt_examples]
        else:
            expected = [float(case.model) - np.mean(np.float64(case.batch[0]))]
        for found, right in zip(jax.tree.leaves(grads), expected, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "number"), [("mean, data", 1), ("mean, residual", 1), ("GPT", 11)]
)
def test_the_losses_constrain_on_auto_axes_and_are_silent_without(name, number):
    case = cases()[name]
    rules = case.rules(AxisType.Auto)

    def constraints(sharding):
        with jax.set_mesh(rules.mesh):
            program = jax.make_jaxpr(eqx.Partial(case.loss, sharding))(case.model, *case.batch)
        return str(program).count("sharding_constraint[")

    assert constraints(losses.AUTO) == number
    assert constraints(losses.SILENT) == 0


# examples/data_parallel.py


@pytest.mark.slow
def test_the_tour_runs_and_says_what_it_should(fast):
    output = run("data_parallel.py", env=fast)
    assert "on one point: shape ()" in output
    assert "on 16 points, by vmap: (16,)" in output
    for way in ("sharded jit", "shard_map"):
        assert f"on 8 devices, by {way}: (8, 2), equal to the flat vector: True" in output
    assert output.count("the same on all 8 devices: True") == 4
    assert output.count("all-reduce: ") == 4
    assert output.count(" in ENTRY ") == 4
    assert "False" not in output


@pytest.mark.parametrize("way", ["by_sharded_jit", "by_shard_map"])
def test_a_layer_on_eight_devices_is_the_flat_vector(way):
    model, (xs, _) = tour.make_model(jax.random.key(0)), tour.make_points(16)
    found = getattr(tour, way)(tour.make_mesh(8), model, xs)
    assert found.shape == (8, 2)
    assert [shard.data.shape for shard in found.addressable_shards] == [(1, 2)] * 8
    expected = xs @ np.asarray(model.weight)[0] + np.asarray(model.bias)
    np.testing.assert_allclose(np.ravel(found), expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def trained():
    """Every way to train, on eight devices."""
    return {way: getattr(tour, way)(tour.rules_on(8)) for way in WAYS + PRIVATE_WAYS}


def descend() -> np.ndarray:
    """Linear regression by gradient descent, in numpy."""
    model = tour.make_model(jax.random.split(jax.random.key(0))[0])
    xs, ys = (np.float64(x) for x in tour.make_points(tour.EXAMPLES))
    weight, bias = np.float64(model.weight)[0], np.float64(model.bias)[0]
    for _ in range(tour.PLAN.steps):
        residual = xs @ weight + bias - ys
        weight = weight - tour.RATE * residual @ xs / len(xs)
        bias = bias - tour.RATE * np.mean(residual)
    return np.append(weight, bias)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_plain_training_is_gradient_descent(trained, way):
    np.testing.assert_allclose(tour.parameters(trained[way].model), descend(), atol=1e-5)


def test_private_training_is_near_it(trained):
    found = tour.parameters(trained["train_privately"].model)
    assert 1e-3 < np.max(np.abs(found - descend())) < 0.1


@pytest.mark.parametrize("ways", [WAYS, PRIVATE_WAYS], ids=["plain", "private"])
def test_all_devices_end_with_the_parameters_of_one(trained, ways):
    alone = tour.parameters(getattr(tour, ways[0])(tour.rules_on(1)).model)
    for way in ways:
        copies = tour.parameters_by_device(trained[way].model)
        assert len(copies) == 8
        for copy in copies:
            np.testing.assert_array_equal(copy, copies[0])
            np.testing.assert_allclose(copy, alone, atol=1e-6)


@pytest.mark.parametrize("way", WAYS + PRIVATE_WAYS)
def test_devices_meet_in_one_reduction(trained, way):
    (place,) = tour.all_reduces(trained[way].program)
    assert " in ENTRY " in place


def test_all_reduces_are_found_in_loops_too():
    mesh = tour.make_mesh(8)

    def on_a_device(x):
        def add(total, row):
            return total + jax.lax.psum(row, "data"), None

        return jax.lax.scan(add, jnp.zeros(4), x)[0]

    specs = {"in_specs": jax.P("data"), "out_specs": jax.P()}
    mapped = jax.jit(jax.shard_map(on_a_device, mesh=mesh, **specs))
    (place,) = tour.all_reduces(mapped.lower(jnp.ones((32, 4))).compile().as_text())
    assert "ENTRY" not in place


def test_privacy_changes_three_lines():
    changed = tour.changed_lines(tour.train_plainly, tour.train_privately)
    assert [line[0] for line in changed].count("-") == 3
    assert [line[0] for line in changed].count("+") == 3


@pytest.mark.parametrize("name", ["data_parallel.py", "sharded_loss.py"])
def test_nothing_uses_pmap(name):
    nodes = list(ast.walk(ast.parse((EXAMPLES / name).read_text())))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {
        alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert "pmap" not in names
