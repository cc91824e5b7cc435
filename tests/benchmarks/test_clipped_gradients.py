"""The benchmark runs, and it compares like with like: everybody computes the same clipped sum."""

from types import SimpleNamespace

import equinox as eqx
import jax
import numpy as np
import pytest

from tests import oracle
from tests.benchmarks import clipped_gradients, measure, timing
from tests.benchmarks.contenders import CLIP_NORM, NON_PRIVATE, Contender, Program, in_jax, in_torch
from tests.benchmarks.rows import ROWS, TINY

JAX, TORCH = (
    [contender for contender in found if NON_PRIVATE not in contender.name]
    for found in (in_jax(), in_torch())
)


def assert_all_agree(row, contenders):
    """All of them, in microbatches where they can, against example by example in float64."""
    truth = oracle.clipped_gradients(
        row.loss, row.model, *row.batch, l2_clip_norm=CLIP_NORM, filter_spec=row.filter_spec
    )
    assert (truth.grad_norm > 1.05 * CLIP_NORM).any(), "nothing is clipped: the test says nothing"
    expected = flat(jax.tree.leaves(truth.grads))
    for contender in contenders:
        program = contender.prepare(row, 2 if contender.microbatched else None)
        program.run()  # twice: nothing of one run may be left over in the next
        found = flat(program.leaves(program.run()))
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert error < 1e-4, f"{contender.name} is off by {error:.1e}"


def flat(leaves):
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in leaves])


@pytest.mark.slow
def test_jax_contenders_agree():
    """With a frozen leaf, which travels beside what is trained."""
    row = ROWS["mlp"](**TINY["mlp"])
    trained = jax.tree.map(eqx.is_inexact_array, row.model)
    trained = eqx.tree_at(lambda model: model.layers[0].weight, trained, False)
    assert_all_agree(row._replace(filter_spec=trained), JAX)


@pytest.mark.slow
@pytest.mark.skipif(not TORCH, reason="torch and opacus are not installed (the extra `peers`)")
@pytest.mark.filterwarnings("ignore:Secure RNG turned off", "ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", ROWS)
def test_torch_contenders_agree(name):
    row = ROWS[name](**TINY[name])
    if not row.has_torch_twin:
        pytest.skip("this model has no twin in PyTorch")
    assert_all_agree(row, TORCH)


@pytest.mark.slow
def test_command(tmp_path, capsys, monkeypatch):
    # One example: no microbatch sizes to try, so every contender is compiled once.
    monkeypatch.setitem(TINY, "mlp", {**TINY["mlp"], "batch": 1})
    markdown, chart, curves = (tmp_path / name for name in ("a.md", "a.png", "b.png"))
    files = ["--markdown", str(markdown), "--chart", str(chart), "--curves", str(curves)]
    clipped_gradients.main(["--rows", "mlp", "--tiny", "--repeats", "1", *files])
    table = markdown.read_text()
    for contender in (*JAX, *TORCH):
        assert f"| {contender.name} |" in table
    assert "goal: at most 1.15" in capsys.readouterr().out
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in (chart, curves))


def test_measured_at_the_fastest_microbatch_size(monkeypatch):
    monkeypatch.setattr(timing, "_turn", lambda run: run())
    seconds = {None: 3.0, 1: 5.0, 2: 1.0}
    contender = Contender("it", lambda row, size: Program(lambda: seconds[size]), microbatched=True)
    row = SimpleNamespace(batch_size=4)
    size, program = measure.at_its_best(contender, row)
    assert (size, program.run()) == (2, 1.0)
    assert measure.at_its_best(contender._replace(microbatched=False), row)[0] is None


def test_ratios_are_taken_round_by_round():
    """A disturbance that slows down a whole round leaves the ratio alone."""
    base = measure.Result("a", None, [1.0, 10.0, 1.0], None, None)
    other = measure.Result("b", None, [2.0, 20.0, 2.0], None, None)
    assert measure.ratio(other, base) == (2.0, 2.0, 2.0)


def test_a_turn_of_several_runs_is_their_mean(monkeypatch):
    """After one run that is not timed; every batch has its turn."""
    monkeypatch.setattr(measure, "once", lambda run: run())
    runs = iter([100.0, 1.0, 2.0, 6.0])
    assert timing.interleaved({"it": lambda: next(runs)}, 1, measure.mean_of(3)) == {"it": [3.0]}
