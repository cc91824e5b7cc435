"""What a loss may say about sharding, where, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests.sharding.losses import WEIGHT, Says, X, assert_like_free, gradient, mesh_of
from tests.tiers import curated

KINDS = ["auto", "explicit"]
MESHES = {kind: mesh_of(kind, data=4, model=2) for kind in KINDS}


# Where a loss may constrain.


def over_both_axes_of_the_mesh(says):
    def loss(w, x):
        x = jnp.concatenate([x, x[:, :1]], 1).reshape(-1, 4)  # 6 tokens an example
        x = says.constrain(x, P(("data", "model")))
        return jnp.sum(jnp.tanh(says.einsum("nd,df->nf", x, w, P("data"))) ** 2)

    return loss


def in_a_scan(says):
    def loss(w, x):
        def body(carry, x):
            new = jnp.tanh(carry + says.einsum("bd,df->bf", x, w, P("data")))
            return says.constrain(new, P("data")), None

        start = says.constrain(jnp.zeros((x.shape[0], 6)), P("data"))
        carry, _ = jax.lax.scan(body, start, jnp.swapaxes(x, 0, 1))
        return jnp.sum(carry**2)

    return loss


def under_cond_and_jit(says):
    @jax.jit
    def layer(w, x):
        return says.constrain(jnp.tanh(says.einsum("btd,df->btf", x, w, P("data"))), P("data"))

    def loss(w, x):
        hidden = layer(w, x)
        # The predicate is an example's own: that of a batch of one.
        return jax.lax.cond(
            jnp.sum(x) > 0,
            lambda h: jnp.sum(says.constrain(h, P("data")) ** 2),
            lambda h: 3 * jnp.sum(h**2),
            hidden,
        )

    return loss


# Functions that bring derivatives of their own.


def hidden(says, w, x):
    return says.einsum("btd,df->btf", x, w, P("data"))


def of_a_number(says):
    """`softplus(x)` is `logaddexp(x, 0)`, with a rule of its own: what is 0 knows no mesh."""
    return lambda w, x: jnp.sum(jax.nn.softplus(hidden(says, w, x)))


def that_sees_zeros(says):
    @jax.custom_vjp
    def both(x, y):
        return jnp.sin(x), jnp.cos(y)

    def forward(x, y):
        assert x.perturbed
        assert not y.perturbed
        return (jnp.sin(x.value), jnp.cos(y.value)), x.value

    def backward(x, cotangents):
        first, second = cotangents
        assert isinstance(second, SymbolicZero)
        return says.constrain(jnp.cos(x) * first, P("data")), None

    both.defvjp(forward, backward, symbolic_zeros=True)
    return lambda w, x: jnp.sum(both(hidden(says, w, x), x)[0])


PLAIN = [over_both_axes_of_the_mesh, in_a_scan, under_cond_and_jit]
WITH_RULES = [of_a_number, that_sees_zeros]


@pytest.mark.parametrize("kind", curated(KINDS, [KINDS[1]]))
@pytest.mark.parametrize("make_loss", curated([*PLAIN, *WITH_RULES], PLAIN[:2]))
def test_where_a_batch_may_be_constrained(make_loss, kind, request):
    if make_loss in WITH_RULES:
        request.getfixturevalue("unchecked")
    assert_like_free(make_loss, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", curated(["book_keeping", "ghost", "per_example"], ["ghost"]))
def test_a_loss_on_one_example_speaks_of_the_other_axes(kind, method):
    def make_loss(says):
        def loss(w, x):
            w = says.constrain(w, P(None, "model"))
            hidden = jnp.tanh(says.einsum("td,df->tf", x, w, P(None, "model")))
            return jnp.sum(says.constrain(hidden, P(None, "model")) ** 2)

        return loss

    assert_like_free(make_loss, kind, keep_batch_dim=False, method=method)


def jitted_with_shardings(mesh, *entries):
    spread = NamedSharding(mesh, P(*entries))
    return jax.jit(lambda x: jnp.tanh(x), in_shardings=spread, out_shardings=spread)


def put(mesh, *entries):
    return lambda x: jnp.tanh(jax.device_put(x, NamedSharding(mesh, P(*entries))))


@pytest.mark.parametrize("move", [jitted_with_shardings, put])
def test_other_ways_to_constrain(move):
    layer = move(MESHES["auto"], None, None, "model")
    found = gradient(lambda w, x: jnp.sum(layer(x @ w) ** 2), MESHES["auto"])
    plain = gradient(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2))
    np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-6)


# What cannot be moved.


def constrained(*entries, value=lambda w, x: x):
    def loss(w, x):
        spread = jax.lax.with_sharding_constraint(value(w, x), P(*entries))
        return jnp.sum(x @ w) + jnp.sum(spread)

    return loss


def under(function):
    return lambda w, x: jnp.sum(x @ w) + jnp.sum(function(w, x))


def resharded(sharding):
    return under(lambda w, x: jax.sharding.reshard(x, sharding))


def depends_on_the_length(w, x):
    return jnp.sum((jax.lax.with_sharding_constraint(x, P("data")) if len(x) == 1 else x) @ w)


def with_shard_map(axis):
    spread = {"in_specs": P(), "out_specs": P(), "axis_names": {axis}}
    return under(lambda w, x: jax.shard_map(lambda x: 2 * x, **spread)(x))


def in_a_backward_rule():
    says = Says("auto")

    @jax.custom_vjp
    def double(x):
        return 2 * x

    def backward(_, cotangent):
        return (2 * says.constrain(cotangent, P(None, None, "data")),)

    double.defvjp(lambda x: (2 * x, None), backward)
    return lambda w, x: jnp.sum(double(says.einsum("btd,df->btf", x, w, P("data"))))


def of_parameters_and_examples(parameter_first):
    """In a batch of one both calls share one program."""

    @jax.jit
    def spread(x):
        return jax.lax.with_sharding_constraint(x, P("data"))

    def loss(w, x):
        calls = [lambda: spread(w[None, :, :4]), lambda: spread(x[:, :4])]
        first, second = calls if parameter_first else reversed(calls)
        return jnp.sum(first()) + jnp.sum(second()) + jnp.sum(x @ w)

    return loss


OF_EXAMPLES = NamedSharding(mesh_of("auto", batch=8), P("batch"))
UNNAMED = r"P\('model',?\).*test_constraints.*rules do not name.*examples=\('data', 'model'\)"
NO_EXAMPLES = "spec P.*carries no examples.*'data'.*params="
INSTEAD = "batch of one.*with_sharding_constraint instead"
NO_EXAMPLES_THERE = "with spec.*test_constraints.*carries no examples"
WITHOUT_RULES = r"test_constraints.*sharding=dp\.ShardingRules"
REFUSED = {
    "an axis that the rules lack": ("auto", constrained("model"), UNNAMED),
    "time": ("auto", constrained(None, "data"), NO_EXAMPLES),
    "a parameter": ("auto", constrained("data", value=lambda w, x: w), NO_EXAMPLES),
    "a sum": ("auto", constrained("data", value=lambda w, x: jnp.sum(x, 0)), NO_EXAMPLES),
    "jit": ("auto", under(lambda w, x: jitted_with_shardings(MESHES["auto"], "data")(x)), INSTEAD),
    "put": ("auto", under(lambda w, x: put(MESHES["auto"], "data")(x)), INSTEAD),
    "another mesh": (
        "auto",
        under(lambda w, x: lax.with_sharding_constraint(x, OF_EXAMPLES)),
        r"\('batch',\).*rules.*\('data', 'model'\)",
    ),
    "reshard": ("explicit", resharded(P("model")), r"batch of one.*'model'.*Rules\(examples="),
    "a backward rule": ("auto", in_a_backward_rule(), NO_EXAMPLES_THERE),
    "a parameter, then examples": ("auto", of_parameters_and_examples(True), NO_EXAMPLES),
    "one example": ("auto", constrained("data"), "carries no examples", {"keep_batch_dim": False}),
    "no rules": ("auto", constrained("data"), WITHOUT_RULES, {"sharding": None}),
    "length": ("auto", depends_on_the_length, "depend on the length"),
    "a collective": ("auto", under(lambda w, x: lax.pmean(x, "data")), "mixes examples"),
    "a shard_map": ("auto", with_shard_map("model"), "shard_map over the axis 'model'.*test_const"),
    "a shard_map over examples": ("explicit", with_shard_map("data"), "shard_map.*take the shard"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_moved(name):
    kind, loss, message, *options = REFUSED[name]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        gradient(loss, MESHES[kind], **dict(*options))


def test_what_is_spread_over_both_axes_with_rules_that_name_both():
    rules = dp.ShardingRules(MESHES["auto"], examples=("data", "model"))
    found = gradient(constrained(("data", "model")), MESHES["auto"], rules)
    # What is added to the loss has no parameter.
    plain = gradient(lambda w, x: jnp.sum(x @ w))
    np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-6)


def product(rules):
    return dp.filter_clipped_grad(lambda w, x: jnp.sum(x @ w), l2_clip_norm=1.0, sharding=rules)


def test_rules_inside_a_shard_map():
    grad_fn = product(dp.ShardingRules(MESHES["auto"]))
    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
    with pytest.raises(ValueError, match="outside of shard_map"):
        jax.jit(jax.shard_map(grad_fn, mesh=MESHES["auto"], **specs))(WEIGHT, X)


@pytest.mark.parametrize(
    ("of_rules", "in_context", "meshes"),
    [
        (mesh_of("auto", data=8), MESHES["auto"], "'model': 2.*'data': 8"),
        (MESHES["explicit"], MESHES["auto"], "Auto.*Explicit.*one mesh"),
    ],
    ids=["other axes", "another kind of axes"],
)
def test_another_mesh_in_context(of_rules, in_context, meshes):
    message = rf"(?s)mesh in context.*{meshes}"
    with jax.set_mesh(in_context), pytest.raises(ValueError, match=message):
        product(dp.ShardingRules(of_rules))(jnp.asarray(WEIGHT), X)
