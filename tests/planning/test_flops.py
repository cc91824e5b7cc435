"""The count of floating-point operations, against hand counts and against the compiler's."""

import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqx_dp as dp
from eqx_dp.programs import matmul_flops
from tests import models
from tests.benchmarks import rows

pytestmark = [pytest.mark.optimized, pytest.mark.sampled(4)]

BATCH = 16
SIZES = (48, 32, 32, 10)  # of the MLP
PAIRS = tuple(itertools.pairwise(SIZES))


def report_of(row, **options):
    return dp.flop_report(
        dp.filter_clipped_grad(
            row.loss,
            l2_clip_norm=1.0,
            filter_spec=row.filter_spec,
            method=options.pop("method", "auto"),
            microbatch_size=options.pop("microbatch_size", None),
        ),
        row.model,
        *row.batch,
        **options,
    )


@functools.cache
def mlp(**options):
    return report_of(rows.mlp(BATCH, inputs=48, width=32, depth=2), **options)


def gpt_sizes(**more):
    return {"batch": 3, "length": 16, "width": 64, "depth": 2, "vocabulary": 40, **more}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["book_keeping", "per_example", "ghost"])
def test_an_mlp_is_counted_exactly(method):
    found = mlp(method=method, compiled=False)
    forward = BATCH * sum(2 * i * o for i, o in PAIRS)
    # Into every layer but the first the gradient goes on to what the layer was given.
    backward = forward + BATCH * sum(2 * i * o for i, o in PAIRS[1:])
    trained = sum(i * o + o for i, o in PAIRS)
    biases = sum(2 * o for _, o in PAIRS)
    norms = 2 * trained if method == "per_example" else sum(2 * (i + o) for i, o in PAIRS) + biases
    assert found.row("forward").flops == forward
    assert found.row("backward").flops == backward
    assert found.row("norms").flops == BATCH * norms
    assert found.row("accumulation").flops == BATCH * trained
    assert found.row("noise").flops == 180 * trained
    stages = [row.stage for row in found.rows]
    assert ("second pass" in stages) == (method == "ghost")
    if method == "ghost":
        assert found.row("second pass").flops == backward
    assert sum(row.share for row in found.rows) == pytest.approx(1)
    assert (found.num_params, found.num_trainable, found.num_tokens) == (trained, trained, BATCH)
    assert found.textbook == 6 * BATCH * trained
    assert found.programs == ()


@pytest.mark.slow
def test_a_transformer_is_6_n_d_and_attention():
    found = report_of(rows.gpt(**gpt_sizes()), compiled=False)
    tokens, width = 3 * 16, 64
    in_matrices = 2 * 12 * width**2 + 40 * width
    attention = 2 * 2 * (2 * 16 * width)  # layers, products, each of 2 T d for a token
    by_hand = 6 * tokens * in_matrices + 3 * tokens * attention
    assert found.row("forward").flops + found.row("backward").flops == pytest.approx(by_hand, 0.02)
    assert found.num_tokens == tokens
    assert found.textbook == 6 * tokens * found.num_params


@pytest.mark.slow
def test_with_lora_parameters_that_are_frozen_have_no_gradient():
    row = rows.gpt_lora(**gpt_sizes(rank=4))
    found, full = report_of(row, compiled=False), report_of(rows.gpt(**gpt_sizes()), compiled=False)
    tokens, width, rank = 3 * 16, 64, 4
    trained = 2 * (rank * (width + 3 * width) + rank * (width + width))
    assert found.num_trainable == trained
    frozen = 2 * 12 * width**2 + 40 * width
    attention = 2 * 2 * (2 * 16 * width)
    forward = tokens * (2 * frozen + 2 * trained + attention)
    # What is frozen passes gradients on (but the first block's projections, with nothing to train
    # behind them) and has none of its own.
    backward = tokens * (2 * frozen + 4 * trained + 2 * attention)
    first = tokens * 2 * (3 * width**2 + rank * width)
    assert found.row("forward").flops == forward
    assert found.row("backward").flops == pytest.approx(backward - first, 0.001)
    assert found.row("accumulation").flops == 3 * trained
    assert found.row("accumulation").share < full.row("accumulation").share / 5
    assert found.textbook == tokens * (4 * found.num_params + 2 * trained)
    assert "4 N D + 2 N D'" in str(found)


def test_wide_accumulation_and_noise_are_a_small_share_of_a_long_sequence():
    shapes = jax.eval_shape(lambda: rows.gpt(**gpt_sizes(batch=256, length=128)).model)
    tokens = jax.ShapeDtypeStruct((256, 128), jnp.int32)
    grad_fn = dp.filter_clipped_grad(rows.language_loss, l2_clip_norm=1.0)
    found = dp.flop_report(grad_fn, shapes, tokens, tokens, compiled=False)
    assert found.row("accumulation").share < 0.003
    assert found.row("noise").share < 0.003


def assert_the_compiler_counts_much_the_same(found):
    """It counts activations, softmax and layer norms beside: at these small sizes at most a tenth
    of the loss and its gradient, and with what clipping does to entries a quarter of the step."""
    *programs, noise = found.programs
    for program, most in zip(programs, (1.1, 1.1, 1.25), strict=True):
        assert 1 <= program.compiled / program.flops < most, program
    # The loops that make keys are counted once.
    assert 0.45 < noise.compiled / noise.flops < 1.05
    assert "a loop's body is counted once" in noise.note


@pytest.mark.slow
def test_the_compiler_counts_much_the_same_in_a_transformer():
    assert_the_compiler_counts_much_the_same(report_of(rows.gpt(**gpt_sizes(depth=1))))


@pytest.mark.slow
def test_the_compiler_counts_much_the_same_and_microbatches_as_often_as_there_are():
    whole, parts = mlp(), mlp(microbatch_size=5)
    assert_the_compiler_counts_much_the_same(whole)
    one, four = whole.programs[2], parts.programs[2]
    assert "4 microbatches" in four.note
    assert four.compiled == pytest.approx(one.compiled * 20 / 16, rel=0.05)


@pytest.mark.slow
def test_loops_are_named_where_the_compiler_counts_them_once():
    def loss(weight, x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(weight @ x), None), x, None, length=9)[0].sum()

    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0)
    found = dp.flop_report(grad_fn, jnp.ones((32, 32)), jnp.ones((4, 32)))
    one, *_ = found.programs
    assert "a scan of 9 steps" in one.note
    assert one.flops == 9 * 4 * 2 * 32**2
    assert one.compiled == pytest.approx(one.flops / 9, rel=0.1)


@pytest.mark.slow
def test_it_prints_as_a_table():
    found = mlp()
    text = str(found)
    for row in found.rows:
        assert f"{row.flops:.3e}" in text
        assert f"{100 * row.share:.3f} %" in text
    assert "6 N D" in text
    assert "clipped gradient" in text


@pytest.mark.slow
def test_shapes_keys_and_options_of_the_engine():
    case = models.dropout()
    grad_fn = dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0, policy=dp.parse_policy("c=bf16"))
    shapes = jax.eval_shape(lambda: eqx.filter(case.model, eqx.is_array))
    model = eqx.combine(shapes, eqx.filter(case.model, eqx.is_array, inverse=True))
    batch = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.batch(4)]
    key = jax.eval_shape(lambda: jax.random.key(0))
    found = dp.flop_report(grad_fn, model, *batch, key=key)
    assert found.row("forward").flops == 4 * 2 * (6 * 8 + 8 * 3)
    assert found.programs[2].compiled > found.row("forward").flops


def test_sharded_by_formula():
    row = rows.mlp(BATCH, inputs=48, width=32, depth=2)
    rules = dp.ShardingRules(jax.make_mesh((8,), ("data",)))
    grad_fn = dp.filter_clipped_grad(row.loss, l2_clip_norm=1.0, sharding=rules)
    with jax.set_mesh(rules.mesh):
        found = dp.flop_report(grad_fn, row.model, *row.batch)
    assert found.row("backward").flops == mlp(compiled=False).row("backward").flops
    assert found.programs == ()


def test_refuses_what_is_no_clipped_gradient():
    with pytest.raises((ValueError, TypeError)):
        dp.flop_report(jax.grad(models.mlp_loss), models.mlp().model, *models.mlp().batch(2))
    with pytest.raises(ValueError, match="stage must be one of forward"):
        mlp(compiled=False).row("nothing")


def windows(length, window, stride, padding, dilation=1, holes=1):
    """How often a window meets an entry of the input, one by one."""
    padded = [None] * padding
    entries = padded + [i // holes if i % holes == 0 else None for i in range(holes * length)]
    entries = entries[: padding + holes * (length - 1) + 1] + padded
    reach = dilation * (window - 1) + 1
    return sum(
        entries[start + dilation * k] is not None
        for start in range(0, len(entries) - reach + 1, stride)
        for k in range(window)
    )


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "holes", "groups"),
    [(1, 0, 1, 1, 1), (2, 1, 1, 1, 1), (1, 2, 2, 1, 2), (1, 1, 1, 2, 1), (3, 2, 1, 1, 4)],
)
def test_a_convolution_meets_no_padding(stride, padding, dilation, holes, groups):
    def conv(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (stride,), [(padding,) * 2], (holes,), (dilation,), feature_group_count=groups
        )

    x, w = jnp.ones((2, 4, 9)), jnp.ones((8, 4 // groups, 3))
    expected = 2 * 2 * 8 * (4 // groups) * windows(9, 3, stride, padding, dilation, holes)
    assert matmul_flops(jax.make_jaxpr(conv)(x, w)) == expected
    gradient = jax.make_jaxpr(jax.grad(lambda x, w: conv(x, w).sum(), argnums=(0, 1)))(x, w)
    if groups == 1:
        assert matmul_flops(gradient) == 3 * expected


def test_scans_branches_and_loops():
    a = jnp.ones((4, 4))
    one = 2 * 4**3
    scan = lambda a: jax.lax.scan(lambda c, _: (c @ a, None), a, None, length=5)[0]  # noqa: E731
    branch = lambda a: jax.lax.cond(a[0, 0] > 0, lambda a: a @ a @ a, lambda a: a @ a, a)  # noqa: E731
    loop = lambda a: jax.lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c @ a, a)  # noqa: E731
    inside = lambda a: jax.jit(jax.checkpoint(lambda a: a @ a))(a)  # noqa: E731
    for function, times in ((scan, 5), (branch, 2), (loop, 1), (inside, 1)):
        assert matmul_flops(jax.make_jaxpr(function)(a)) == times * one
