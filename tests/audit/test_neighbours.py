"""Honest gradients and steps pass, whatever they are made of; what was found is shown and kept."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_dp as dp
from eqx_dp import audit
from tests import models
from tests.audit.by_hand import (
    BATCH,
    CLIP_NORM,
    LOSS,
    MASK,
    MODEL,
    NOISE,
    PLAN,
    SECRET,
    STDDEV,
    audited,
    clipped,
    rules_of,
    stepped,
)
from tests.gradients.cases import models as documented
from tests.sharding.losses import mesh_of
from tests.training import runs

METHODS = ["per_example", "book_keeping", "ghost"]
RELATIONS = list(dp.NeighboringRelation)


def gradient_of(case, make=dp.filter_clipped_grad, size=5, call=None, **options):
    """The audit of a case's clipped gradient."""
    options = {"l2_clip_norm": 0.2, "filter_spec": case.filter_spec} | options
    relation = options.pop("neighboring_relation", None)
    grad_fn = make(case.loss, **options)
    batch = case.batch(size)
    return audit.neighbours(
        grad_fn, case.model, *batch, neighboring_relation=relation, **(call or {})
    )


def assert_passes(report, least=0.9):
    """Without a violation, and close enough to the bound for that to mean something."""
    assert report.ok, str(report)
    assert least <= report.largest <= 1 + report.rounding
    assert report.rounding < 1e-4


@pytest.mark.parametrize(
    ("preset", "method"),
    [
        ("float32", "ghost"),
        ("mixed_bfloat16", "book_keeping"),
        *(
            pytest.param(p, m, marks=pytest.mark.slow)
            for p in ("float32", "mixed_bfloat16", "mixed_float16")
            for m in METHODS
        ),
    ],
)
def test_methods_and_policies(preset, method):
    policy = dp.load_policy(preset)
    make = dp.filter_value_and_clipped_grad
    assert_passes(gradient_of(models.mlp(), make, policy=policy, method=method))


def with_aux(model, x, label):
    return models.mlp_loss(model, x, label), {"logits": model(x)}


MASKED = {"key": jax.random.key(3), "is_padding_example": np.array([0, 1, 0, 0, 1], bool)}
slow = pytest.mark.slow
CASES = {
    "frozen leaves": (models.frozen_mlp(), {}),
    "a loss that draws": (models.dropout(), {"call": MASKED, "microbatch_size": 2}),
    "aux": (models.mlp()._replace(loss=with_aux), {"has_aux": True}),
    "several clip norms": (
        models.linear_regression(),
        {"l2_clip_norm": {"weight": 0.3, "bias": 0.1}, "normalize_by": 3.0},
    ),
    "CNN": (models.cnn(), {"microbatch_size": 2, "size": 7}),
}
OTHERS = {"GPT": models.gpt(), "GRU": documented.gru(), "LoRA": documented.low_rank_gpt()}


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    case, options = CASES[name]
    assert_passes(gradient_of(case, **options))


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_models_of_others(name):
    assert_passes(gradient_of(OTHERS[name], dp.filter_value_and_clipped_grad))


@pytest.mark.parametrize("relation", RELATIONS, ids=lambda relation: relation.name)
def test_relations(relation):
    report = gradient_of(models.linear_regression(), neighboring_relation=relation)
    assert_passes(report, least=0.8)
    assert {pair.others for pair in report.pairs} == {"as given", "hostile", "padding"}
    without = [pair for pair in report.pairs if pair.example.startswith("none -> ")]
    assert len(without) == (0 if relation.name == "REPLACE_ONE" else len(report.pairs))


def test_a_batch_of_every_kind_of_dtype():
    def loss(model, x):
        parts = [jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(x)]
        return jnp.sum(model * jnp.stack([jnp.tanh(part / 8) for part in parts]))

    rng = np.random.default_rng(0)
    kinds = ("bfloat16", "float16", "float8_e4m3fn", "float32", "int8", "uint16", "bool")
    x = {str(dtype): jnp.asarray(rng.integers(0, 2, (4, 3)), dtype) for dtype in kinds}
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1e-3)
    report = audit.neighbours(grad_fn, jnp.ones(len(x)), x)
    assert_passes(report)
    assert {
        *("none -> integers: min", "none -> opposite", "none -> floats: smallest_subnormal"),
        *("none -> nan", "none -> negated copy of another", "none -> x 2^-70"),
    } <= {pair.example for pair in report.pairs}


# On a mesh.


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_gradient_on_eight_devices(kind):
    case = models.mlp()
    rules = dp.ShardingRules(mesh_of(kind, data=8))
    grad_fn = dp.filter_value_and_clipped_grad(case.loss, l2_clip_norm=0.2, sharding=rules)
    with jax.set_mesh(rules.mesh):
        model = rules.shard(case.model)
    assert_passes(audit.neighbours(grad_fn, model, *case.batch(16)))


@pytest.mark.slow
def test_a_step_on_eight_devices():
    step = runs.make(sharding=runs.rules_of("Auto"))
    assert_passes(audit.neighbours(step, runs.small_model(), runs.XS[:8], runs.YS[:8]))


# Steps.


def test_a_made_step_is_not_used_up():
    step = runs.make(policy=dp.load_policy("mixed_bfloat16"), microbatch_size=3)
    state = step.init(runs.small_model())
    mask = np.arange(8) == 5
    report = audit.neighbours(step, state, runs.XS[:8], runs.YS[:8], is_padding_example=mask)
    assert_passes(report)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(eqx.filter(state, eqx.is_array)))


def test_the_step_of_the_readme():
    model = runs.small_model()
    grad_fn = dp.filter_clipped_grad(runs.loss, l2_clip_norm=CLIP_NORM, normalize_by=4)
    optimizer = optax.chain(PLAN.privatizer(grad_fn, key=SECRET), optax.adam(1e-3))

    @eqx.filter_jit
    def step(model, opt_state, x, y, is_padding_example):
        grads = grad_fn(model, x, y, is_padding_example=is_padding_example)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state

    report = audit.neighbours(
        *(step, model, optimizer.init(grad_fn.trainable(model)), runs.XS[:6], runs.YS[:6]),
        is_padding_example=MASK,
        private=(2, 3),
        sensitivity=grad_fn.sensitivity(PLAN.neighboring_relation),
    )
    assert_passes(report)


BEHIND = {
    "sgd": optax.sgd(0.1),
    "multi-steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "if-finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "signs": optax.chain(optax.clip_by_global_norm(0.1), optax.scale_by_sign(), optax.scale(-0.1)),
}


@pytest.mark.parametrize("name", BEHIND)
def test_optimizers_behind_the_noise(name):
    assert_passes(audited(*stepped(clipped, optax.chain(NOISE, BEHIND[name]))))


def test_a_noise_for_each_of_several_losses():
    """Two sums with a noise each: together they move by the root of the sum of squares."""
    one, other = (
        dp.gaussian_privatizer(stddev=2 * 2**0.5 * CLIP_NORM, key=SECRET + i) for i in range(2)
    )

    @jax.jit
    def step(model, states, x, y, mask):
        grads, state = one.update(clipped(model, x, y, mask), states[0])
        more, after = other.update(clipped(model, -x, y, mask), states[1])
        return optax.apply_updates(model, jax.tree.map(jnp.add, grads, more)), (state, after)

    states = one.init(MODEL), other.init(MODEL)
    assert_passes(audited(step, states, sensitivity=2**0.5 * CLIP_NORM))


def by_hand(model, key, x, y, mask):
    leaves, structure = jax.tree.flatten(clipped(model, x, y, mask))
    keys = jax.random.split(key, len(leaves))
    noise = (
        STDDEV * jax.random.normal(k, leaf.shape) for k, leaf in zip(keys, leaves, strict=True)
    )
    return structure.unflatten(map(jnp.add, leaves, noise))


# A model after certified noise lies on the noise's grid: it moves by whole steps of that.
ON_NO_GRID = dp.gaussian_privatizer(stddev=STDDEV, key=jax.random.key(3), certified=False)
RELEASED = {
    "a sum without noise": lambda: (clipped, ()),
    "noise of another kind": lambda: (jax.jit(by_hand), (jax.random.key(0),)),
    "a model after plain descent": lambda: (lambda s: (s[0], s[1:]))(
        stepped(clipped, optax.chain(ON_NO_GRID, optax.sgd(1.0)))
    ),
}


@pytest.mark.parametrize("name", RELEASED)
def test_what_is_released_may_be_named(name):
    fn, state = RELEASED[name]()
    first = name == "a model after plain descent"
    report = audited(fn, *state, release=lambda result: result[0] if first else result)
    assert_passes(report)


# The report.


def test_a_bound_that_is_not_tested_is_named():
    report = gradient_of(models.linear_regression(), l2_clip_norm=1e30)
    assert report.ok
    assert report.largest < 0.5
    assert "no example came near the bound" in str(report)


def test_the_report_is_a_table_and_a_file(tmp_path):
    report = gradient_of(models.linear_regression())
    report.raise_if_violated()
    lines = str(report).splitlines()
    assert lines[0] == f"no violation on {len(report.pairs)} pairs of ADD_OR_REMOVE_ONE neighbors"
    assert any(line.startswith("none -> as given  ") for line in lines)
    (tmp_path / "audit.json").write_text('{"canaries": {"kept": 1}, "neighbours": {"old": 1}}')
    report.save(tmp_path)
    found = json.loads((tmp_path / "audit.json").read_text())
    assert found["canaries"] == {"kept": 1}
    assert (found["neighbours"]["ok"], found["neighbours"]["largest"]) == (True, report.largest)
    assert len(found["neighbours"]["pairs"]) == len(report.pairs)
    report.save(tmp_path / "another.json")
    another = json.loads((tmp_path / "another.json").read_text())
    assert another == {"neighbours": found["neighbours"]}


def total_loss(model, x, y):
    return jax.vmap(LOSS, (None, 0, 0))(model, x, y).sum()


def test_a_violation_says_what_to_do_and_infinity_is_null(tmp_path):
    report = audited(*stepped(lambda model, x, y, mask: jax.grad(total_loss)(model, x, y)))
    assert "movement" in rules_of(report)
    assert report.largest == np.inf
    assert "what to do: Clip every example on its own" in str(report)
    report.save(tmp_path)
    assert json.loads((tmp_path / "audit.json").read_text())["neighbours"]["largest"] is None


def test_the_same_call_gives_the_same_report():
    one, other = (gradient_of(models.linear_regression()) for _ in range(2))
    assert one == other


# Bad input.

GRAD_FN = dp.filter_clipped_grad(LOSS, l2_clip_norm=CLIP_NORM)
X, Y = BATCH
HOW = {"private": (1, 2), "padding": 3, "sensitivity": 1.0}


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((clipped, MODEL, X, Y, MASK), {}, "say which arguments hold examples"),
        ((clipped, MODEL, X, Y, MASK), HOW | {"private": (1, 7)}, "say which arguments"),
        ((clipped, MODEL, X, Y, MASK), HOW | {"private": (1, "z")}, "say which arguments"),
        ((clipped, MODEL, X, Y, MASK), HOW | {"padding": None}, "say which arguments"),
        ((clipped, MODEL, X, Y, MASK), HOW | {"sensitivity": np.inf}, "finite number"),
        ((clipped, MODEL, X, Y, MASK), HOW | {"sensitivity": 0.0}, "above 0"),
        ((clipped, MODEL, X, Y, MASK), HOW, "adds no noise"),
        ((clipped, MODEL, X, Y, MASK), HOW | {"release": lambda result: ()}, "adds no noise"),
        ((GRAD_FN, MODEL, X, Y), {"private": (1,)}, "are known: leave them out"),
        ((GRAD_FN, MODEL), {}, "then the batch"),
        ((runs.make(),), {}, "give model or state"),
        ((GRAD_FN, MODEL, X, Y[:5]), {}, "equally many examples"),
        ((GRAD_FN, MODEL, X[:1], Y[:1]), {}, "at least 2"),
        ((GRAD_FN, MODEL, X, 3.0), {}, "must be arrays"),
        ((GRAD_FN, MODEL, X, Y), {"is_padding_example": np.ones(6, bool)}, "not True everywhere"),
        ((GRAD_FN, MODEL, X, Y), {"is_padding_example": np.ones(6)}, "the mask boolean"),
    ],
)
def test_bad_input(args, options, message):
    with pytest.raises(ValueError, match=message):
        audit.neighbours(*args, **options)


def test_noise_in_a_loop_is_not_seen():
    step, state = stepped(clipped)

    def twice(model, state, x, y, mask):
        def one(carry, _):
            return step(*carry, x, y, mask), None

        return jax.lax.scan(one, (model, state), None, length=2)[0]

    with pytest.raises(ValueError, match="outside of loops and branches"):
        audited(twice, state)


def test_a_step_without_noise_has_no_release():
    step = runs.make(dp.PrivacyPlan(0.25, 10, 0.0, 1e-5))
    with pytest.raises(ValueError, match=r"step\.grad_fn"):
        audit.neighbours(step, runs.small_model(), runs.XS[:8], runs.YS[:8])
    assert_passes(audit.neighbours(step.grad_fn, runs.small_model(), runs.XS[:8], runs.YS[:8]))


def test_an_error_on_the_examples_as_given_is_the_user_s():
    def refusing(model, x, y, mask):
        raise TypeError("of the user")

    with pytest.raises(TypeError, match="of the user"):
        audited(refusing)
