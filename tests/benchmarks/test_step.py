"""A whole step is measured, and like is compared with like: all contenders take the same step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import oracle
from tests.benchmarks import step, whole_steps
from tests.benchmarks.contenders import CLIP_NORM, opacus_is_installed
from tests.benchmarks.rows import ROWS, TINY
from tests.benchmarks.whole_steps import (
    case_of,
    of_jax_privacy,
    of_opacus,
    ordinary,
    ours,
    parts,
    updated,
)

BATCHES = 3


def case(name="mlp", noise_multiplier=0.0):
    """Examples from far apart, so that some are clipped and some are not."""
    row = ROWS[name](**TINY[name])
    if jnp.issubdtype(row.batch[0].dtype, jnp.floating):
        scale = jnp.array([0.1, 1.0, 3.0, 10.0]).reshape(-1, *[1] * (row.batch[0].ndim - 1))
        row = row._replace(batch=(scale * row.batch[0], row.batch[1]))
    return case_of(row, BATCHES, noise_multiplier)


def moved(case, run, steps=BATCHES):
    """How far some steps move each trained parameter."""
    for _ in range(steps):
        state = run()
    return displacement(case, state.model if hasattr(state, "model") else state[0])


def displacement(case, after):
    """Of a model, or of a tree of trained parameters."""
    return flat(trained(case, after)) - flat(trained(case, case.row.model))


def trained(case, tree):
    """The trained leaves of a model, or of a tree of gradients."""
    params, _, _ = case.row.split()
    kept = jax.tree.map(
        lambda param, leaf: None if param is None else leaf,
        params,
        tree,
        is_leaf=lambda x: x is None,
    )
    return jax.tree.leaves(kept)


def flat(leaves):
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in leaves])


def assert_close(found, expected, tolerance=1e-4):
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < tolerance, f"off by {error:.1e}"


@pytest.fixture
def descent(monkeypatch):
    """Plain gradient descent for Adam, whose first step shows little but signs."""
    monkeypatch.setattr(whole_steps, "OPTIMIZER", optax.sgd(0.1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt_lora", marks=pytest.mark.exhaustive)])
@pytest.mark.usefixtures("descent")
def test_private_steps_agree(name):
    """On batches with padding, in microbatches that do not divide them."""
    it = case(name)
    *batch, mask = (np.asarray(array) for array in it.batches[0])
    assert mask.any()
    truth = oracle.clipped_gradients(
        it.row.loss,
        it.row.model,
        *(array[~mask] for array in batch),
        l2_clip_norm=CLIP_NORM,
        filter_spec=it.row.filter_spec,
    )
    assert (truth.grad_norm > 1.05 * CLIP_NORM).any(), "nothing is clipped: the test says nothing"
    expected = -0.1 * flat(jax.tree.leaves(truth.grads)) / it.row.batch_size
    assert_close(moved(it, ours(it), steps=1), expected)
    own = moved(it, ours(it))
    for size in (1, 5):
        assert_close(moved(it, of_jax_privacy(it, size)), own)


@pytest.mark.slow
@pytest.mark.usefixtures("descent")
def test_ordinary_steps_agree():
    """Whole and in parts, with the mean gradient of the expected batch."""
    it = case()
    params, frozen, _ = it.row.split()
    losses = jax.vmap(it.row.loss_of_parts(), (None, None, 0, 0))
    for _ in range(BATCHES):
        grads = jax.grad(lambda p: losses(p, frozen, *it.row.batch).mean())(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    for size in (None, 2):
        assert_close(moved(it, ordinary(it, size)), displacement(it, params))


@pytest.mark.slow
@pytest.mark.usefixtures("descent")
@pytest.mark.parametrize("contender", [ours, lambda case: of_jax_privacy(case, 2)])
def test_private_steps_are_noisy(contender):
    """By the noise that the plan accounts for, a fresh one each step."""
    quiet, noisy = case(), case(noise_multiplier=50.0)
    once, twice = (moved(noisy, contender(noisy), steps=n) for n in (1, 2))
    expected = 0.1 * 50.0 * CLIP_NORM / noisy.row.batch_size
    found = once - moved(quiet, contender(quiet), steps=1)
    assert 0.8 < np.std(found) / expected < 1.2
    assert 0.8 < np.std(twice - once) / expected < 1.2
    assert abs(np.corrcoef(once, twice - once)[0, 1]) < 0.4


@pytest.mark.slow
@pytest.mark.usefixtures("descent")
def test_parts_make_up_the_whole_step():
    """Gradient on the step's own batches, then the optimizer, is the step without noise."""
    it = case()
    params, _, _ = it.row.split()
    grads = trained(it, parts(it)["gradient with padding"]())
    grads = jax.tree.unflatten(jax.tree.structure(params), grads)
    state = whole_steps.first_state(whole_steps.OPTIMIZER, params)
    after, _ = updated(whole_steps.OPTIMIZER, state, grads)
    assert_close(displacement(it, after), moved(it, ours(it), steps=1))
    noisy = case(noise_multiplier=50.0)
    added, _ = parts(noisy)["noise"]()
    found = np.std(displacement(noisy, added))
    assert 0.8 < found / (50.0 * CLIP_NORM / noisy.row.batch_size) < 1.2


@pytest.mark.skipif(
    not opacus_is_installed(), reason="torch and opacus are not installed (the extra `peers`)"
)
@pytest.mark.filterwarnings("ignore:Secure RNG turned off", "ignore:Full backward hook is firing")
def test_steps_of_opacus_agree():
    """With Adam: the first step has the size of the learning rate wherever there is a gradient."""
    it = case()
    own = moved(it, ours(it))
    start = flat(trained(it, it.row.model))
    for contender in of_opacus(it):
        for size in (None, 2):
            program = contender.prepare(it.row, size)
            for _ in range(BATCHES):
                found = program.run()
            assert_close(flat(program.leaves(found)) - start, own, 1e-2)
    noisy = case(noise_multiplier=50.0)
    for contender in of_opacus(noisy):
        program = contender.prepare(noisy.row, 2)
        found = flat(program.leaves(program.run())) - start
        assert np.linalg.norm(found - own) > 0.3 * np.linalg.norm(own)


def test_batches_hold_what_is_expected():
    it = case_of(ROWS["mlp"](**{**TINY["mlp"], "batch": 16}), 10)
    assert it.real == pytest.approx(16, abs=0.5)
    assert it.slots > 16


def test_parts_are_told_round_by_round():
    """What slows down a whole round leaves the ratios alone, and parts add up to the whole."""
    slow = np.array([1.0, 10.0, 1.0])
    in_seconds = {
        "ordinary": 1.0,
        "ours": 5.0,
        "gradient": 1.2,
        "gradient with padding": 2.0,
        "noise": 1.5,
        "optimizer": 0.5,
        "jax_privacy": 10.0,
        "opacus hooks": 20.0,
        "opacus ghost": 15.0,
    }
    seconds = {name: (value * slow).tolist() for name, value in in_seconds.items()}
    sizes = dict.fromkeys(seconds)
    cells = dict(
        zip(
            step._COLUMNS,
            step.line(step.Measured(case(), {**sizes, "jax_privacy": 4}, 8, seconds)),
            strict=True,
        )
    )
    told = [cells[name] for name in ("gradient", "padding", "noise", "optimizer", "rest")]
    assert told == ["1.20", "0.80", "1.50", "0.50", "1.00"]
    assert cells["microbatch"] == "8"
    assert cells["ours / ordinary (quartiles)"] == "5.00 (5.00-5.00)"
    assert cells["jax_privacy / ours, at its microbatch"] == "2.00 (2.00-2.00) at 4"
    assert cells["Opacus / ours"] == "ghost: 3.00 (3.00-3.00) at whole"


@pytest.mark.slow
def test_command(tmp_path, capsys):
    path = tmp_path / "table.md"
    told = ["--rows", "mlp", "--tiny", "--rounds", "1", "--batches", "2"]
    step.main([*told, "--markdown", str(path)])
    written = path.read_text()
    for column in step._COLUMNS:
        assert f"| {column} |" in written
    assert "| mlp | 4 |" in written
    assert f"goal: ours at most {step.GOAL} x ordinary" in written
    assert f"goal: ours at most {step.GOAL} x ordinary" in capsys.readouterr().out
    assert "--rows mlp --rounds 1 --batches 2 --tiny" in written
