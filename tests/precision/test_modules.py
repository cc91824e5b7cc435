"""Module rules, and models that are paired with their policy."""

import copy
import functools
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests import models, oracle
from tests.gradients import jitted
from tests.tiers import METHODS, curated

BF16, F16, F32 = map(jnp.dtype, ("bfloat16", "float16", "float32"))
# Three dtypes that cannot be mixed up, so that every cast tells which one it was.
MIXED = "params=float32,compute=bfloat16,output=float32,accumulate=float32,noise=float32"


def policy_of(*rules, base=MIXED):
    return dp.parse_policy(",".join([base, *(f"module:{rule}" for rule in rules)]))


SEEN = {}  # what the layers met in their last call, by name: dtypes of the weight and of the input


@pytest.fixture(autouse=True)
def nothing_seen():
    SEEN.clear()


class Layer(eqx.Module):
    weight: jax.Array
    name: str = eqx.field(static=True)

    def __call__(self, x, *, shift=None):
        SEEN[self.name] = (self.weight.dtype, x.dtype)
        x = jnp.tanh(self.weight @ x)
        if shift is not None:
            SEEN[f"{self.name}.shift"] = shift.dtype
            x = x + shift
        return x


class Head(Layer):
    pass


class Group(eqx.Module):
    inner: Layer
    head: Head

    def __call__(self, x):
        SEEN["group"] = x.dtype
        y = self.inner(x)
        SEEN["group.after inner"] = y.dtype
        return self.head(y)


class Net(eqx.Module):
    first: Layer
    groups: list[Group]
    heads: dict[str, Head]
    steps: jax.Array

    def __call__(self, x, *, which="a", shift=None):
        y = self.features(x, shift=shift)
        return jnp.abs(self.heads[which](y)), self.steps

    def features(self, x, shift=None):
        y = self.first(x, shift=shift)
        for group in self.groups:
            y = group(y)
        SEEN["after groups"] = y.dtype
        return y


def eye(name, kind=Layer):
    return kind(0.5 * jnp.eye(3), name)


def net():
    groups = [Group(eye(f"{i}.inner"), eye(f"{i}.head", Head)) for i in range(2)]
    heads = {name: eye(name, Head) for name in "ab"}
    return Net(eye("first"), groups, heads, jnp.arange(2))


X = jnp.arange(1.0, 4.0)


# What a paired model casts


def test_parameters_and_inputs_enter_in_the_compute_dtype_and_outputs_leave_in_the_output_dtype():
    model = dp.apply_policy(net(), policy_of())
    y, steps = model(X, shift=X)
    assert SEEN["first"] == SEEN["0.inner"] == SEEN["a"] == (BF16, BF16)
    assert SEEN["first.shift"] == BF16
    assert y.dtype == F32
    assert steps.dtype == jnp.int32
    # And the values are those of a model that was cast by hand.
    by_hand, _ = policy_of().cast_to_compute(net())(X.astype(BF16), shift=X.astype(BF16))
    np.testing.assert_array_equal(y, by_hand.astype(F32))


def test_a_module_of_a_paired_model_keeps_to_the_policy_when_it_is_called_alone():
    group = dp.apply_policy(net(), policy_of("**.head=float16")).groups[0]
    assert group(X).dtype == group.head(X).dtype == group.inner(X).dtype == BF16
    assert (SEEN["0.inner"], SEEN["0.head"]) == ((BF16, BF16), (F16, F16))


def test_decorated_methods_cast():
    class Decorated(eqx.Module):
        weight: jax.Array

        @eqx.filter_jit
        def __call__(self, x):
            SEEN["decorated"] = (self.weight.dtype, x.dtype)
            return self.weight * x

    assert dp.apply_policy(Decorated(jnp.ones(3)), policy_of("Decorated=float16"))(X).dtype == F32
    assert SEEN["decorated"] == (F16, F16)


def test_a_method_that_would_return_parameters_that_were_cast_is_refused():
    class Growing(eqx.Module):
        weight: jax.Array

        def grown(self):
            return eqx.tree_at(lambda m: m.weight, self, self.weight + 1)

    model = dp.apply_policy(Growing(jnp.ones(2)), policy_of())
    with pytest.raises(ValueError, match=r"grown returns a Growing.*apply_policy\(model, None"):
        model.grown()


def dots(fun, *args):
    """The operands' dtype and the precision of every matrix product of a traced function."""
    found = []
    for equation in dp.programs.equations(eqx.filter_make_jaxpr(fun)(*args)[0]):
        if equation.primitive.name == "dot_general":
            (dtype,) = {v.aval.dtype for v in equation.invars}
            found.append((dtype, str(equation.params["precision"])))
    return found


@pytest.mark.parametrize(
    ("declared", "found"), [("default", "None"), ("highest", "HIGHEST"), ("tensorfloat32", "HIGH")]
)
def test_matmul_precision_holds_inside_calls(declared, found):
    policy = dp.parse_policy(f"{MIXED},matmul_precision={declared},module:**.head=float16")
    model = dp.apply_policy(net(), policy)
    for call in (model, model.features, model.groups[0], model.groups[0].head):
        assert all(found in precision for _, precision in dots(call, X))
        assert dots(call, X)


# Rules


@pytest.mark.parametrize("rule", ["groups.0", "groups.0.**", "**.0", "groups.?", "Group"])
def test_a_rule_governs_a_module_and_all_in_it(rule):
    model = dp.apply_policy(net(), policy_of(f"{rule}=float16"))
    y, _ = model(X)
    assert SEEN["group"] == (BF16 if rule in ("groups.0", "groups.0.**", "**.0") else F16)
    assert SEEN["0.inner"] == SEEN["0.head"] == (F16, F16)
    assert SEEN["after groups"] == BF16
    assert SEEN["first"] == SEEN["a"] == (BF16, BF16)
    assert y.dtype == F32


def test_class_names_match_subclasses_and_dictionaries_are_paths():
    policy = policy_of("heads.b=float32", "Head=float16")
    model = dp.apply_policy(net(), policy)
    for which in "ab":
        model(X, which=which)
    assert SEEN["a"] == SEEN["0.head"] == (F16, F16)
    assert SEEN["b"] == (F32, F32)  # the first match wins
    assert SEEN["first"] == (BF16, BF16)
    dp.apply_policy(net(), policy_of("Layer=float16"))(X)  # the base class of Head
    assert SEEN["a"] == SEEN["first"] == (F16, F16)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (["**.haed=float32"], r"'\*\*.haed', which matches no module .* groups.0.head Head, "),
        (["Linear=float32"], r"'Linear', which matches no module .*\(root\) Net, first Layer"),
        (["first.weight=float32"], r"first.weight is a leaf; rules are for the modules"),
        (["**=float32", "first=float16"], r"'first' behind '\*\*', which takes every module"),
    ],
)
def test_a_rule_without_effect_is_refused(rules, message):
    policy = policy_of(*rules)
    with pytest.raises(ValueError, match=message):
        dp.apply_policy(net(), policy)
    grad_fn = dp.filter_clipped_grad(lambda m, x: m(x)[0].sum(), l2_clip_norm=1.0, policy=policy)
    with pytest.raises(ValueError, match=message):
        grad_fn(net(), X[None])


def test_an_optional_rule_may_match_nothing():
    dp.apply_policy(net(), policy_of("nothing=bf16:wide:optional", "first=f32"))


# Pairing


def test_pairing_again_changes_nothing():
    policy = policy_of("Head=float16")
    model = dp.apply_policy(net(), policy)
    assert dp.apply_policy(model, policy_of("Head=float16")) is model
    other = dp.apply_policy(net(), policy_of("Head=float16"))
    assert jax.tree.structure(other) == jax.tree.structure(model)
    assert jax.tree.structure(other) != jax.tree.structure(dp.apply_policy(net(), policy_of()))
    plain = dp.apply_policy(model, None)
    assert jax.tree.structure(plain) == jax.tree.structure(net())
    assert dp.apply_policy(plain, None) is plain


def test_what_cannot_be_paired():
    policy, other = policy_of(), policy_of("Head=float16")
    model = dp.apply_policy(net(), policy)
    with pytest.raises(ValueError, match=r"paired with params=.*, and params=.*Head=float16"):
        dp.apply_policy(model, other)
    assert dp.apply_policy(dp.apply_policy(model, None), other) is not model
    with pytest.raises(ValueError, match=r"model is a dict: only an eqx.Module.*policy=policy"):
        dp.apply_policy({"net": net()}, policy)
    with pytest.raises(ValueError, match=r"model.layers.0 is paired with a policy of its own"):
        dp.apply_policy(eqx.nn.Sequential([model]), policy)


def test_tree_at_and_modules_that_it_puts_in_fall_under_the_rules():
    model = dp.apply_policy(net(), policy_of("heads.a=float16"))
    model = eqx.tree_at(lambda m: m.first.weight, model, jnp.zeros((3, 3)))
    np.testing.assert_array_equal(model(X)[0], jnp.zeros(3))
    model = eqx.tree_at(lambda m: m.heads["a"], model, eye("new", Head))
    model(X)
    assert SEEN["new"] == (F16, F16)
    again = dp.apply_policy(model, policy_of("heads.a=float16"))
    again.heads["a"](X.astype(BF16))
    assert SEEN["new"] == (F16, F16)


def act(x):
    return jnp.abs(x)


@pytest.mark.slow
def test_serialisation_pickle_and_copies(tmp_path):
    policy = policy_of("Linear=float16")
    model = eqx.nn.MLP(3, 2, 4, 1, act, act, key=jax.random.key(0))
    paired = dp.apply_policy(model, policy)
    for other in (pickle.loads(pickle.dumps(paired)), copy.deepcopy(paired), copy.copy(paired)):
        assert jax.tree.structure(other) == jax.tree.structure(paired)
        np.testing.assert_array_equal(other(X), paired(X))
    path = tmp_path / "model.eqx"
    eqx.tree_serialise_leaves(path, paired)
    blank = jax.tree.map(lambda x: jnp.zeros_like(x) if eqx.is_array(x) else x, paired)
    for like in (blank, dp.apply_policy(blank, None)):
        read = eqx.tree_deserialise_leaves(path, like)
        assert jax.tree.structure(read) == jax.tree.structure(like)
        np.testing.assert_array_equal(read.layers[0].weight, model.layers[0].weight)


def test_a_module_used_twice():
    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __call__(self, token):
            embedding, linear = self.shared()
            hidden = embedding(token)
            y = linear(hidden)
            SEEN.update(hidden=hidden.dtype, y=y.dtype)
            return y

    embedding, key = eqx.nn.Embedding(4, 3, key=jax.random.key(0)), jax.random.key(1)
    pair = embedding, eqx.nn.Linear(3, 4, use_bias=False, key=key)
    tied = Tied(eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight))
    model = dp.apply_policy(tied, policy_of("Linear=float32"))
    assert model(jnp.array(1)).dtype == F32
    assert (SEEN["hidden"], SEEN["y"]) == (BF16, BF16)
    assert dots(model, jnp.array(1)) == [(F32, "None")]


def test_stateful_models():
    class Normed(eqx.Module):
        linear: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __call__(self, x, state):
            SEEN["state"] = {leaf.dtype for leaf in jax.tree.leaves(state) if leaf.ndim}
            return self.norm(self.linear(x), state)

    norm = eqx.nn.BatchNorm(3, "batch", mode="batch")
    linear = eqx.nn.Linear(3, 3, key=jax.random.key(0))
    plain, state = eqx.nn.make_with_state(lambda: Normed(linear, norm))()
    for rules in (["BatchNorm=float32"], ["**=float16"]):
        model = dp.apply_policy(plain, policy_of(*rules))
        run = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
        y, after = run(jnp.stack([X, 2 * X]), jax.tree.map(jnp.copy, state))
        assert y.dtype == F32
        assert SEEN["state"] == {x.dtype for x in jax.tree.leaves(after) if x.ndim} == {F32}
        assert eqx.nn.inference_mode(model)(X, after)[0].dtype == F32


# The engine


RULED = [policy_of("layers.2=float32"), policy_of("layers.2=bfloat16", base="params=float32")]


@functools.cache
def reference():
    case = models.mlp()
    batch = case.batch(5)
    norms = oracle.clipped_gradients(case.loss, case.model, *batch, l2_clip_norm=np.inf).grad_norm
    clip = float(np.median(norms))
    truth = oracle.clipped_gradients(case.loss, case.model, *batch, l2_clip_norm=clip)
    return case, batch, clip, truth


@pytest.mark.parametrize("policy", curated(RULED, RULED[:1]), ids=["wide head", "narrow head"])
def test_a_paired_model_and_a_policy_beside_the_model_are_one(policy):
    case, batch, clip, _ = reference()
    alone = jitted.grad(case.loss, l2_clip_norm=clip)
    beside = jitted.grad(case.loss, l2_clip_norm=clip, policy=policy)
    paired = dp.apply_policy(case.model, policy)
    grads = [
        oracle.vector(dp.apply_policy(grad_fn(model, *batch), None))
        for grad_fn, model in ((beside, case.model), (alone, paired), (beside, paired))
    ]
    np.testing.assert_array_equal(grads[0], grads[1])
    np.testing.assert_array_equal(grads[0], grads[2])
    assert (grads[0] != oracle.vector(alone(case.model, *batch))).any()


@pytest.mark.parametrize("method", curated(METHODS, ["book_keeping"]))
def test_no_example_passes_the_clip_norm(method):
    case, batch, clip, _ = reference()
    policy = policy_of("layers.0=float16", "layers.2=float32")
    grad_fn = jitted.grad(case.loss, l2_clip_norm=clip / 3, policy=policy, method=method)
    for i in range(5):
        grads = grad_fn(case.model, *(leaf[i : i + 1] for leaf in batch))
        assert np.linalg.norm(oracle.vector(grads)) <= clip / 3


@pytest.mark.parametrize("paired", [False, True])
def test_the_loss_sees_parameters_that_were_cast_and_outputs_in_the_surrounding_dtype(paired):
    policy = policy_of("heads.a=float16", "groups.0.head=float32")

    def loss(model, x):
        assert not paired or jax.tree.structure(model) != jax.tree.structure(net())
        SEEN["read"] = (model.first.weight.dtype, model.heads["a"].weight.dtype, x.dtype)
        y, _ = model(x)
        SEEN["output"] = y.dtype
        return jnp.sum(y)

    model = dp.apply_policy(net(), policy) if paired else net()
    given = None if paired else policy
    jitted.grad(loss, l2_clip_norm=1.0, policy=given)(model, X[None])
    # Inside the engine the output dtype is the loss's; the model's outputs stay as they are.
    assert SEEN["read"] == (BF16, F16, BF16)
    assert SEEN["output"] == BF16
    assert SEEN["a"] == (F16, F16)
    assert SEEN["0.head"] == (F32, F32)
    assert SEEN["first"] == (BF16, BF16)


def pair_loss(model, x):
    return jnp.sum(model(x)[0])


def test_two_policies_that_differ_are_refused():
    policy, other = policy_of("Head=float16"), dp.load_policy("mixed_bfloat16")
    model = dp.apply_policy(net(), policy)
    options = {"l2_clip_norm": 1.0}
    message = r"paired with params=.*module:Head=float16, and mixed_bfloat16 \(params=.*\) was"
    with pytest.raises(ValueError, match=message):
        dp.filter_clipped_grad(pair_loss, policy=other, **options)(model, X[None])
    jitted.grad(pair_loss, policy=policy_of("Head=float16"), **options)(model, X[None])
    grad_fn = dp.filter_clipped_grad(lambda m, x: pair_loss(m["net"], x), **options)
    with pytest.raises(ValueError, match=r"model.net is paired with a policy of its own"):
        grad_fn({"net": model}, X[None])
    grad_fn = dp.filter_clipped_grad(lambda m, x: jnp.sum(m(x)), **options)
    with pytest.raises(ValueError, match="model is a part of a paired model"):
        grad_fn(model.groups[0], X[None])
    jitted.grad(lambda m, x: jnp.sum(m(x)), policy=policy, **options)(model.groups[0], X[None])


def test_filter_specs_clip_trees_explanations_and_sharding_take_paired_models():
    case, batch, clip, truth = reference()
    policy = policy_of("layers.2=float32", base="params=float32")
    model = dp.apply_policy(case.model, policy)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rules = dp.ShardingRules(mesh, params=(("layers.*.weight", P()),))
    batch = tuple(jnp.concatenate([leaf, leaf[:3]]) for leaf in batch)
    padding = jnp.arange(8) >= 5
    grad_fn = dp.filter_clipped_grad(case.loss, l2_clip_norm=clip, sharding=rules)
    with jax.set_mesh(mesh):
        grads = eqx.filter_jit(grad_fn)(model, *batch, is_padding_example=padding)
    assert oracle.relative_error(dp.apply_policy(grads, None), truth.grads) < 1e-5

    spec = jax.tree.map(lambda _: False, model)
    spec = eqx.tree_at(lambda m: m.layers[2].weight, spec, True)
    norms = eqx.filter(jax.tree.map(lambda x: 1.0 if eqx.is_array(x) else None, model), spec)
    options = {"l2_clip_norm": norms, "filter_spec": spec}
    assert len(dp.explain(dp.filter_clipped_grad(case.loss, **options), model, *batch).rows) == 1
