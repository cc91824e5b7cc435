"""The yardstick of memory planning, small: eight devices, all sharded, mixed_bfloat16."""

import contextlib
import io

import jax
import pytest

from tests.test_sharding_examples import load

pytestmark = pytest.mark.optimized

SMALL = (
    *("--layers", "3", "--width", "64", "--heads", "4", "--length", "128"),
    *("--vocabulary", "128", "--batch", "4", "--microbatch", "2"),
)


@pytest.fixture(scope="module")
def example():
    return load("gpt_300m")


@pytest.fixture(scope="module")
def table(example):
    """What main returns and prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        rows = example.main([*SMALL, "--contenders", "book_keeping"])
    return {row.contender: row for row in rows}, output.getvalue()


@pytest.mark.slow
@pytest.mark.optimized
def test_the_table_has_the_compiled_bytes_beside_the_parts(table):
    rows, text = table
    row = rows["book_keeping"]
    # Memory is reused between parts, and the compiler adds workspace: no more than an order.
    assert row.compiled / 3 < row.parts < 3 * row.compiled
    assert "fits" in text
    assert "peak host memory" in text


def test_the_model_has_300_million_parameters_and_no_array(example):
    task = example.make_task(example.Sizes(), 24, 32 * 10**9)
    assert 290e6 < task.num_params < 330e6
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(task.model))


def test_refuses_sizes_that_do_not_divide(example, capsys):
    for wrong in (["--microbatch", "5"], ["--heads", "3"], ["--vocabulary", "9"]):
        with pytest.raises(SystemExit):
            example.main(wrong)
    assert "must divide" in capsys.readouterr().err
