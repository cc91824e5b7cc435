"""What is refused, and that the message says what was found, where, and what to do instead."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, TypeCheckError, jaxtyped

import eqx_dp as dp
from tests import models
from tests.sharding.losses import AXIS_TYPES, Says, mesh_of
from tests.tiers import curated

pytestmark = pytest.mark.filterwarnings("ignore:When `eqx.nn.BatchNorm")

CASE = models.mlp()
X, LABEL = CASE.batch(8)
ONE, TWO = jnp.ones(()), jnp.ones(2)
FFT, NARROW = eqx.nn.Lambda(lambda x: abs(jnp.fft.rfft(x)).sum()), dp.load_policy("bfloat16")


def clipped(loss, **options):
    return dp.filter_clipped_grad(loss, **{"l2_clip_norm": 1.0, **options})


def call(loss, *args, key=None, is_padding_example=None, **options):
    """A call of a clipped gradient, when it is called."""
    given = {"key": key, "is_padding_example": is_padding_example}
    given = {name: value for name, value in given.items() if value is not None}
    return lambda: clipped(loss, **options)(*args, **given)


def product(model, x, *_):
    return model * x


def of_first(model, x):
    return model * x["x"]


def with_aux(model, x, label):
    return models.mlp_loss(model, x, label), x


VALUE_AND_GRAD = eqx.filter_value_and_grad(with_aux, has_aux=True)


def takes_rng(model, x, label, rng):
    return models.mlp_loss(model, x, label)


def odd(dtype, **options):
    model = {"w": ONE, "odd": (jnp if dtype is not str else np).ones(2, dtype)}
    return call(lambda m, x: jnp.sum(jnp.abs(m["odd"])) * x * m["w"], model, TWO, **options)


REFUSED = {
    # The loss.
    "no scalar": (call(product, jnp.ones(3), jnp.ones((2, 3))), r"(?s)scalar.*\(3,\)"),
    "batch of one, not reduced": (
        call(product, ONE, TWO, keep_batch_dim=True), r"(?s)scalar.*\(1,\)",
    ),
    **{
        f"a loss of {dtype}": (
            call(lambda m, x, dtype=dtype: (m * x).astype(dtype), ONE, TWO), f"(?s)loss.*{dtype}",
        ) for dtype in ("int32", "complex64")
    },
    "no array": (call(lambda model, x: None, ONE, TWO), "loss"),
    "no pair": (call(product, ONE, TWO, has_aux=True), "has_aux"),
    "a pair": (call(lambda m, x: (m * x, x), ONE, TWO), "has_aux"),
    "mapped already": (
        call(jax.vmap(models.mlp_loss, in_axes=(None, 0, 0)), CASE.model, X, LABEL),
        r"keep_batch_dim=True \(not if it compares rows.*\), and let it return the mean",
    ),
    "gradient": (
        call(eqx.filter_grad(models.mlp_loss), CASE.model, X, LABEL), "gradient.*loss itself",
    ),
    "value and gradient": (
        call(VALUE_AND_GRAD, CASE.model, X, LABEL, has_aux=True), "gradient.*loss itself",
    ),
    "gradient of an array": (
        call(jax.grad(lambda m, x: jnp.sum(m * x)), jnp.ones(6), X), "loss itself",
    ),
    "collective": (call(lambda m, x: jax.lax.psum(m * x, "batch"), ONE, TWO), "batch"),
    # The batch.
    "lengths": (call(CASE.loss, CASE.model, X, LABEL[:3]), r"(?s)\b8\b.*\b3\b|\b3\b.*\b8\b"),
    "no batch": (call(lambda model: model**2, ONE), "batch"),
    **{f"empty {x!r}": (call(lambda m, _: m**2, ONE, x), "batch") for x in (None, (), {})},
    "scalar": (call(of_first, ONE, {"x": TWO, "temperature": ONE}), r"(?s)temperature.*axis"),
    "a number within": (call(of_first, ONE, {"x": TWO, "other": 1.5}), "other"),
    "the model behind": (call(models.mlp_loss, X, CASE.model, LABEL), "The model comes first"),
    "lists": (call(models.mlp_loss, CASE.model, [[0.0] * 6] * 2, [0, 1]), "stack"),
    "one example": (
        call(models.mlp_loss, CASE.model, X[0], LABEL[0]),
        r"batch argument 1 is a scalar.*whole batch",
    ),
    **{
        f"array of {labels.dtype}": (
            call(models.mlp_loss, CASE.model, X, labels),
            r"batch argument 1 is an array of .*numbers",
        ) for labels in (np.array(["a"] * 8), np.array([b""] * 8, object))
    },
    "mask of another length": (
        call(models.dot, ONE, TWO, is_padding_example=np.zeros(3, bool)),
        r"is_padding_example.*\(2,\).*\(3,\)",
    ),
    # The model.
    "nothing to train": (
        call(lambda m, x: x, {"a": jnp.arange(3), "b": "text"}, TWO), "filter_spec",
    ),
    "trained integers": (odd("int32", filter_spec=lambda _: True), "(?s)odd.*int32"),
    "trained in 8 bits": (odd("float8_e4m3fn"), "(?s)odd.*float8_e4m3fn.*policy"),
    "True at integers": (odd("int32", filter_spec={"w": True, "odd": True}), "(?s)odd.*int32"),
    "texts": (odd(str), r"model\.odd is .*<U1.*tuple"),
    "trained complex": (odd("complex64"), "(?s)odd.*complex64"),
    "no prefix": (
        call(models.mlp_loss, CASE.model, X, LABEL, filter_spec={"layers": True}),
        r"filter_spec is no prefix.*eqx\.tree_at",
    ),
    # Keys.
    "key missing": (call(lambda model, x, *, key: model * x, ONE, TWO), "key"),
    "key for nothing": (call(models.dot, ONE, TWO, key=jax.random.key(0)), "key"),
    **{
        f"key by position, {kind}": (
            call(takes_rng, CASE.model, X, LABEL, key), r"batch argument 2 .*PRNG key.*key=key",
        ) for kind, key in (("typed", jax.random.key(0)), ("raw", jax.random.PRNGKey(0)))
    },
    # Options.
    "microbatch of none": (call(models.dot, ONE, TWO, microbatch_size=0), r"microbatch_size.*0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    run, message = REFUSED[name]
    # With annotations checked, as in some runs, a few do not get as far as the ValueError.
    with pytest.raises((ValueError, TypeCheckError), match=message):
        run()


NOTED = {
    "The model comes first": call(models.mlp_loss, X, LABEL),
    "given by name": call(models.mlp_loss, CASE.model, X, LABEL, np.zeros(8, bool)),
    'ModuleRule("1", "float32")': call(lambda m, x: m[0] * m[1](x), (ONE, FFT), X, policy=NARROW),
}


@pytest.mark.parametrize("note", NOTED)
def test_an_error_of_the_loss_says_what_may_mend_it(note):
    with pytest.raises((TypeError, ValueError)) as caught:
        NOTED[note]()
    assert note in "".join(caught.value.__notes__)


class Decomposed(eqx.Module):
    function: Callable[..., Any] = eqx.field(static=True)

    def __call__(self, x):
        matrix = jnp.outer(x, x) + jnp.eye(2, dtype=x.dtype)
        return sum(map(jnp.sum, jax.tree.leaves(self.function(matrix))))


@pytest.mark.parametrize("name", curated(["cholesky", "eigh", "lu", "qr", "svd"], ["qr", "svd"]))
def test_a_decomposition_in_16_bits_is_refused_by_the_path_of_its_module(name):
    function = jax.scipy.linalg.lu if name == "lu" else getattr(jnp.linalg, name)
    module = Decomposed(function)
    cured = dataclasses.replace(NARROW, modules=[dp.ModuleRule("1", "float32")])
    run, right = (
        call(lambda m, x: m[1](m[0] * x), (TWO, module), jnp.eye(2) + 1, policy=policy)
        for policy in (NARROW, cured)
    )
    with pytest.raises(TypeError, match="bfloat16") as caught:
        run()
    assert 'dp.ModuleRule("1", "float32")' in "".join(caught.value.__notes__)
    assert jnp.any(right()[0] != 0)


# A loss that is written for a batch


def batch_loss(model, x, label):
    logits = jax.vmap(model)(x)
    return jnp.mean(jax.vmap(models.cross_entropy)(logits, label))


@jaxtyped(typechecker=beartype)
def annotated_loss(model, x: Float[Array, "batch features"], label: Array):
    return batch_loss(model, x, label)


@pytest.mark.parametrize("loss", [batch_loss, annotated_loss])
def test_a_loss_written_for_a_batch_is_told_to_keep_its_axis(loss):
    with pytest.raises(ValueError, match=r"(?s)float32\[6\].*not if it compares") as caught:
        clipped(loss)(CASE.model, X, LABEL)
    cause = caught.value.__cause__
    assert cause is not None
    assert str(cause) in str(caught.value)
    eqx.filter_eval_shape(clipped(loss, keep_batch_dim=True), CASE.model, X, LABEL)


@pytest.mark.parametrize("kind", AXIS_TYPES)
def test_a_constrained_loss_with_rules_is_told_to_keep_its_axis(kind):
    rules, spec = dp.ShardingRules(mesh_of(kind, data=8)), PartitionSpec("data", None)
    loss = lambda model, x: jnp.mean(Says(kind).constrain(model * x, spec) ** 2)  # noqa: E731
    with jax.set_mesh(rules.mesh):
        arguments = rules.shard(jnp.ones(6)), rules.shard_batch(X)
        with pytest.raises(ValueError, match=r"(?s)float32\[6\].*keep_batch_dim=True"):
            clipped(loss, sharding=rules)(*arguments)
        clipped(loss, sharding=rules, keep_batch_dim=True)(*arguments)


# Errors of the loss itself


class OwnError(Exception):
    """Of a type that nobody else knows."""


def raises_own_error(*_):
    raise OwnError("mine")


def test_an_error_of_the_loss_keeps_its_type_and_says_what_the_loss_was_given():
    with pytest.raises(OwnError, match="mine") as caught:
        clipped(raises_own_error, policy=NARROW)(CASE.model, X, LABEL)
    notes = "\n".join(caught.value.__notes__)
    assert "batch argument 0 is bfloat16[6], batch argument 1 is int32[]" in notes
    assert "The policy computes" not in notes  # the error is not about dtypes


# Data, keys and models are not printed


def test_what_stands_in_the_batch_is_not_printed():
    with pytest.raises(ValueError, match=r"batch argument 1 at name is of type str") as caught:
        clipped(models.mlp_loss)(CASE.model, X, {"name": "Alice"})
    assert "Alice" not in str(caught.value)


def test_no_repr_prints_what_the_loss_is_bound_to():
    bound = functools.partial(models.mlp_loss, CASE.model)
    assert repr(clipped(models.mlp_loss)) == "ClippedGrad(mlp_loss, l2_norm_bound=1)"
    assert repr(clipped(bound)) == "ClippedGrad(partial, l2_norm_bound=1)"


# Losses in which examples meet


def batch_norm_loss(model, x, state):
    hidden, _ = model(x, state)
    return jnp.sum(hidden**2)


def of_a_batch(model, x, state):
    """The axis is bound inside the loss, so no axis is missing; the statistics are a batch's."""
    mapped = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return batch_norm_loss(mapped, x, state)


def batch_norm(mode):
    return eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, axis_name="batch", mode=mode)


@pytest.mark.parametrize("loss", [batch_norm_loss, of_a_batch])
@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_batch_norm_is_refused(mode, loss):
    model, state = batch_norm(mode)
    grad_fn = clipped(lambda model, x: loss(model, x, state), keep_batch_dim=loss is of_a_batch)
    advice = r"(?s)(?=.*BatchNorm)(?=.*mix)(?=.*GroupNorm|.*LayerNorm)"
    with pytest.raises(ValueError, match=advice):
        grad_fn(model, jnp.ones((4, 3)))
    arrays = lambda x: eqx.filter(grad_fn(model, x), eqx.is_array)  # noqa: E731
    with pytest.raises(ValueError, match=advice):
        jax.vmap(arrays, axis_name="batch")(jnp.ones((2, 4, 3)))
