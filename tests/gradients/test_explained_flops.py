"""What `explain` says of floating-point operations, against counts by hand."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import pytest

import eqx_dp as dp
from tests import models
from tests.benchmarks import rows

pytestmark = pytest.mark.optimized

BATCH, SIZES = 16, (48, 32, 32, 10)  # of the MLP
GPT = {"batch": 3, "length": 16, "width": 64, "depth": 2, "vocabulary": 40}
TOKENS, WIDTH = 3 * 16, 64
MATRICES = 2 * 12 * WIDTH**2 + 40 * WIDTH
ATTENTION = 2 * 2 * (2 * 16 * WIDTH)  # layers, products, each of 2 T d for a token


def flops_of(row, **options):
    options |= {"l2_clip_norm": 1.0, "filter_spec": row.filter_spec}
    return dp.explain(dp.filter_clipped_grad(row.loss, **options), row.model, *row.batch).flops


@pytest.mark.parametrize("method", ["book_keeping", "per_example", "ghost"])
@pytest.mark.parametrize("sharded", [False, True])
def test_an_mlp_is_counted_exactly(method, sharded):
    pairs = tuple(itertools.pairwise(SIZES))
    forward = BATCH * sum(2 * i * o for i, o in pairs)
    # Into every layer but the first the gradient goes on to what the layer was given.
    backward = forward + BATCH * sum(2 * i * o for i, o in pairs[1:])
    trained = sum(i * o + o for i, o in pairs)
    row = rows.mlp(BATCH, inputs=48, width=32, depth=2)
    rules = dp.ShardingRules(jax.make_mesh((8,), ("data",))) if sharded else None
    with jax.set_mesh(rules.mesh) if rules else contextlib.nullcontext():
        found = flops_of(row, method=method, sharding=rules)
    assert found.gradient == forward + backward
    assert found.sums == BATCH * trained
    assert (found.num_params, found.num_trained, found.num_tokens) == (trained, trained, BATCH)
    assert found.textbook == 6 * BATCH * trained
    assert "6 N D = " in str(found)
    assert "B D' = " in str(found)


@pytest.mark.slow
def test_a_transformer_is_6_n_d_and_attention():
    found = flops_of(rows.gpt(**GPT))
    assert found.gradient == pytest.approx(6 * TOKENS * MATRICES + 3 * TOKENS * ATTENTION, 0.02)
    assert found.num_tokens == TOKENS
    assert found.textbook == 6 * TOKENS * found.num_params


@pytest.mark.slow
def test_with_lora_parameters_that_are_frozen_have_no_gradient():
    found = flops_of(rows.gpt_lora(**GPT, rank=4))
    trained = 2 * (4 * (WIDTH + 3 * WIDTH) + 4 * (WIDTH + WIDTH))
    assert found.num_trained == trained
    forward = TOKENS * (2 * MATRICES + 2 * trained + ATTENTION)
    # What is frozen passes gradients on (but the first block's projections, with nothing to train
    # behind them) and has none of its own.
    backward = TOKENS * (2 * MATRICES + 4 * trained + 2 * ATTENTION)
    first = TOKENS * 2 * (3 * WIDTH**2 + 4 * WIDTH)
    assert found.gradient == pytest.approx(forward + backward - first, 0.001)
    assert found.sums == 3 * trained
    assert found.textbook == TOKENS * (4 * found.num_params + 2 * trained)
    assert "4 N D + 2 N D' = " in str(found)


def test_convolutions_have_no_tokens():
    case = models.cnn()
    grad_fn = dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0)
    found = dp.explain(grad_fn, case.model, *case.batch(4)).flops
    assert (found.num_tokens, found.textbook) == (0, 0)
    assert found.gradient > 0


def test_sums_are_a_small_share_of_a_long_sequence():
    shapes = jax.eval_shape(lambda: rows.gpt(**GPT | {"batch": 256, "length": 128}).model)
    tokens = jax.ShapeDtypeStruct((256, 128), jnp.int32)
    grad_fn = dp.filter_clipped_grad(rows.language_loss, l2_clip_norm=1.0)
    found = dp.explain(grad_fn, shapes, tokens, tokens).flops
    assert found.sums < 0.003 * found.gradient
