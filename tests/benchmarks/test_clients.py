"""Models of others: they are what they are called, and everybody computes the same clipped sum."""

import equinox as eqx
import jax
import numpy as np
import pytest

from tests.benchmarks import clients
from tests.benchmarks.client_rows import CLIENTS, TINY
from tests.benchmarks.contenders import AUTO, JAX_PRIVACY, NON_PRIVATE, in_jax
from tests.benchmarks.measure import Result
from tests.benchmarks.test_clipped_gradients import assert_all_agree

# Those that differ in length alone are the same when they are tiny.
NAMES = [name for name in CLIENTS if not name.endswith(("_512", "_1024"))]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_a_loss_on_one_example_and_a_batch(name):
    row = CLIENTS[name](**TINY[name])
    params, frozen, _ = row.split()
    example = [jax.eval_shape(lambda array: array[0], array) for array in row.batch]
    for loss, batch in ((row.loss_of_parts(), example), (row.total_of_parts(), row.batch)):
        assert jax.eval_shape(loss, params, frozen, *batch).shape == ()
    assert name.startswith(row.name)
    assert f"batch {row.batch_size}" in row.title


def test_the_loss_of_a_whole_batch_is_the_sum_of_examples():
    row = CLIENTS["experts"](**TINY["experts"])
    loss, whole = eqx.filter_jit(row.loss), eqx.filter_jit(row.batch_loss)
    each = [loss(row.model, *(array[i] for array in row.batch)) for i in range(row.batch_size)]
    np.testing.assert_allclose(whole(row.model, *row.batch), sum(each), rtol=1e-6)


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_auto_agrees(name):
    row = CLIENTS[name](**TINY[name])
    # Large enough to be clipped.
    larger = row._replace(loss=lambda *args: 100 * row.loss(*args))
    assert_all_agree(larger, [one for one in in_jax() if one.name == AUTO])


@pytest.mark.slow
def test_command(tmp_path, monkeypatch):
    markdown, chart = tmp_path / "a.md", tmp_path / "a.png"
    monkeypatch.setitem(TINY, "bag", {**TINY["bag"], "batch": 1})
    files = ["--markdown", str(markdown), "--chart", str(chart)]
    clients.main(["--short", "--rows", "bag", "--tiny", "--repeats", "1", *files])
    title = CLIENTS["bag"](**TINY["bag"]).title
    assert markdown.read_text().count(title) == 2, "in the summary, and as a table"
    assert chart.read_bytes().startswith(b"\x89PNG")


def of(seconds):
    return {
        name: Result(name, None, [value], None, 100 if name == NON_PRIVATE else 250)
        for name, value in seconds.items()
    }


def test_what_misses_its_goal_is_marked():
    row = CLIENTS["bag"](**TINY["bag"])
    names = NON_PRIVATE, clients.IN_PARTS, AUTO, clients.BOOK_KEEPING, clients.GHOST, JAX_PRIVACY
    results = list(of(dict(zip(names, (2.0, 1.0, 1.2, 1.0, 2.0, 1.5), strict=True))).values())
    for whole, time, met in ((0, "1.20 !", "2 of 4"), (1, "1.20", "2 of 3")):
        cells = clients.line(row, clients.Auto("book_keeping", None, whole), results)
        assert cells[4:] == (time, "0.80", "-", "2.50 !", "2.00", met)


def test_a_contender_that_cannot_take_a_row_is_left_out():
    row = CLIENTS["bag"](**TINY["bag"])
    results = list(of({NON_PRIVATE: 1.0, clients.IN_PARTS: 1.0}).values())
    cells = clients.line(row, clients.Auto("ghost", 1, 0), results)
    assert cells[1] == "does not run"
    assert cells[-1] == "0 of 0"


def test_few_sizes_are_tried_in_the_short_mode():
    row = CLIENTS["bag"](**{**TINY["bag"], "batch": 8})
    short = {one.name: one.sizes(row) for one in clients.contenders(row, short=True)}
    full = {one.name: one.sizes(row) for one in clients.contenders(row, short=False)}
    assert short[JAX_PRIVACY] == [None, 1]
    assert full[JAX_PRIVACY] == [None, 1, 2, 4]
    assert short[AUTO] == full[AUTO] == [None]
    assert set(full) - set(short) == {clients.PER_EXAMPLE}
