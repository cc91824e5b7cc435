"""Honest gradients and steps pass, whatever they are made of; what was found is told and kept."""

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
from tests.gradients.engine import models as documented
from tests.sharding.losses import mesh_of
from tests.training import runs

pytestmark = pytest.mark.sampled(6)

METHODS = ["per_example", "book_keeping", "ghost"]
RELATIONS = list(dp.NeighboringRelation)
P = jax.sharding.PartitionSpec


def gradient_of(case, make=dp.filter_clipped_grad, size=5, key=None, mask=None, **options):
    """The audit of a case's clipped gradient."""
    options = {"l2_clip_norm": 0.2, "filter_spec": case.filter_spec} | options
    relation = options.pop("neighboring_relation", None)
    named = {} if key is None else {"key": key}
    named |= {} if mask is None else {"is_padding_example": mask}
    return audit.neighbours(
        make(case.loss, **options),
        case.model,
        *case.batch(size),
        neighboring_relation=relation,
        **named,
    )


def assert_passes(report, least=0.9):
    """Without a violation, and close enough to the bound for that to mean something."""
    assert report.ok, str(report)
    assert least <= report.largest <= 1 + report.rounding
    assert report.rounding < 1e-4


@pytest.mark.sampled(9)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("preset", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_methods_and_policies(preset, method):
    policy = dp.load_policy(preset)
    make = dp.filter_value_and_clipped_grad
    assert_passes(gradient_of(models.mlp(), make, policy=policy, method=method))


@pytest.mark.slow
def test_scales_of_each_example():
    policy = dp.parse_policy("params=float32,compute=float16,output=float32,loss_scale=1024")
    assert_passes(gradient_of(models.mlp(), policy=policy))


@pytest.mark.parametrize("case", [models.cnn(), models.gpt()], ids=lambda case: case.name)
def test_models(case):
    make = dp.filter_value_and_clipped_grad
    assert_passes(gradient_of(case, make, microbatch_size=2, size=7))


@pytest.mark.slow
@pytest.mark.parametrize("case", [documented.gru(), documented.low_rank_gpt()], ids=["GRU", "LoRA"])
def test_models_of_others(case):
    assert_passes(gradient_of(case))


def test_frozen_leaves():
    assert_passes(gradient_of(models.frozen_mlp()))


def test_keys_of_a_loss_that_draws():
    mask = np.array([False, True, False, False, True])
    report = gradient_of(models.dropout(), key=jax.random.key(3), mask=mask, microbatch_size=2)
    assert_passes(report)


@pytest.mark.slow
def test_aux_beside_the_gradient():
    def with_aux(model, x, label):
        return models.mlp_loss(model, x, label), {"logits": model(x)}

    case = models.mlp()._replace(loss=with_aux)
    assert_passes(gradient_of(case, has_aux=True))
    make = dp.filter_value_and_clipped_grad
    assert_passes(gradient_of(case, make, has_aux=True, microbatch_size=3))


@pytest.mark.parametrize("rescaled", [False, True])
def test_clip_norms_of_groups(rescaled):
    case = models.linear_regression()
    norms = {"weight": 0.3, "bias": 0.1}
    report = gradient_of(case, l2_clip_norm=norms, rescale_to_unit_norm=rescaled, normalize_by=3.0)
    assert_passes(report)
    assert report.sensitivity == pytest.approx((2**0.5 if rescaled else 0.1**0.5) / 3)


@pytest.mark.parametrize("relation", RELATIONS, ids=lambda relation: relation.name)
def test_relations(relation):
    report = gradient_of(models.linear_regression(), neighboring_relation=relation)
    assert_passes(report)
    directions = {pair.direction for pair in report.pairs}
    assert (
        directions
        == {
            "ADD_OR_REMOVE_ONE": {"add", "remove"},
            "REPLACE_SPECIAL": {"add", "zero out"},
            "REPLACE_ONE": {"replace"},
        }[relation.name]
    )
    assert {pair.others for pair in report.pairs} == {"as given", "hostile", "none"}


@pytest.mark.slow
def test_a_batch_of_every_kind_of_dtype():
    def loss(model, x):
        parts = [jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(x)]
        return jnp.sum(model * jnp.stack([jnp.tanh(part / 8) for part in parts]))

    rng = np.random.default_rng(0)
    x = {
        str(dtype): jnp.asarray(rng.integers(0, 2, (4, 3)), dtype)
        for dtype in ("bfloat16", "float16", "float8_e4m3fn", "float32", "int8", "uint16", "bool")
    }
    model = jnp.ones(len(x))
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1e-3)
    report = audit.neighbours(grad_fn, model, x)
    assert_passes(report)
    examples = {pair.example for pair in report.pairs}
    assert {"integers lowest", "integers largest", "not", "lowest", "smallest subnormal"} < examples


# On a mesh.


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.slow
def test_a_gradient_on_eight_devices(kind):
    case = models.mlp()
    rules = dp.ShardingRules(mesh_of(kind, data=8))
    make = dp.filter_value_and_clipped_grad
    grad_fn = make(case.loss, l2_clip_norm=0.2, sharding=rules)
    with jax.set_mesh(rules.mesh):
        batch = rules.shard_batch(case.batch(16))
        assert_passes(audit.neighbours(grad_fn, rules.shard(case.model), *batch))


@pytest.mark.slow
def test_a_step_on_eight_devices():
    step = runs.make(sharding=runs.rules_of("Auto"))
    report = audit.neighbours(step, runs.small_model(), runs.XS[:8], runs.YS[:8])
    assert_passes(report)


# Steps.


@pytest.mark.parametrize("options", [{}, {"disclose": ["loss", "num_examples"]}], ids=str)
def test_a_made_step(options):
    step = runs.make(policy=dp.load_policy("mixed_bfloat16"), microbatch_size=3, **options)
    state = step.init(runs.small_model())
    mask = np.arange(8) == 5
    report = audit.neighbours(step, state, runs.XS[:8], runs.YS[:8], is_padding_example=mask)
    assert_passes(report)
    assert report.notes == ()
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
        step,
        model,
        optimizer.init(grad_fn.trainable(model)),
        runs.XS[:6],
        runs.YS[:6],
        MASK,
        private=("x", "y"),
        padding="is_padding_example",
        sensitivity=grad_fn.sensitivity(PLAN.neighboring_relation),
        plan=PLAN,
    )
    assert_passes(report)


@pytest.mark.parametrize(
    "behind",
    [
        optax.sgd(0.1),
        optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
        optax.apply_if_finite(optax.adam(1e-2), 3),
        optax.multi_transform(
            {"a": optax.sgd(0.1), "b": optax.set_to_zero()}, {"weight": "a", "bias": "b"}
        ),
        optax.chain(optax.clip_by_global_norm(0.1), optax.scale_by_sign(), optax.scale(-0.1)),
    ],
    ids=["sgd", "multi-steps", "if-finite", "multi-transform", "signs"],
)
def test_optimizers_behind_the_noise(behind):
    assert_passes(audited(*stepped(clipped, optax.chain(NOISE, behind))))


@pytest.mark.slow
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


def test_noise_of_another_kind():
    @jax.jit
    def step(model, key, x, y, mask):
        leaves, structure = jax.tree.flatten(clipped(model, x, y, mask))
        keys = jax.random.split(key, len(leaves))
        noise = [
            STDDEV * jax.random.normal(k, leaf.shape) for k, leaf in zip(keys, leaves, strict=True)
        ]
        return structure.unflatten(map(jnp.add, leaves, noise))

    report = audited(step, jax.random.key(0), release=lambda grads: grads)
    assert_passes(report)


def test_a_model_after_plain_descent():
    """Its state comes back, and the noise of every step is told from that of the others."""
    step, state = stepped(clipped, optax.chain(NOISE, optax.sgd(1.0)))
    assert_passes(audited(step, state, release=lambda result: result[0]))


@pytest.mark.parametrize("relation", RELATIONS[:2], ids=lambda relation: relation.name)
def test_a_function_without_a_mask(relation):
    def total(model, x, y):
        return clipped(model, x, y, jnp.zeros(len(x), bool))

    report = audit.neighbours(
        total,
        MODEL,
        *BATCH,
        private=(1, "y"),
        sensitivity=CLIP_NORM * (2 if relation.name == "REPLACE_ONE" else 1),
        neighboring_relation=relation,
        release=lambda grads: grads,
    )
    assert_passes(report, least=0.6)
    assert "takes no mask" in str(report)


def test_a_function_that_is_not_traced_is_run_as_it_is():
    compiled = jax.jit(clipped, donate_argnums=0)

    def on_the_host(model, x, y, mask):
        np.asarray(mask)
        return compiled(model, x, y, mask)

    report = audited(on_the_host, release=lambda grads: grads, plan=None)
    assert_passes(report)
    assert "run as it is" in str(report)


# The report.


def test_a_bound_that_is_not_tried_is_told():
    report = gradient_of(models.linear_regression(), l2_clip_norm=1e30)
    assert report.ok
    assert report.largest < 0.5
    assert "no example came near the bound" in str(report)


def test_the_report_is_a_table_and_a_file(tmp_path):
    report = gradient_of(models.linear_regression())
    report.raise_if_violated()
    lines = str(report).splitlines()
    assert lines[0] == f"no violation on {len(report.pairs)} pairs of ADD_OR_REMOVE_ONE neighbors"
    assert any(line.startswith("as given  ") for line in lines)
    found = json.loads(report.to_json())
    assert list(found) == ["neighbours"]
    assert found["neighbours"]["ok"] is True
    assert found["neighbours"]["largest"] == report.largest
    assert len(found["neighbours"]["pairs"]) == len(report.pairs)
    (tmp_path / "audit.json").write_text('{"canaries": {"kept": 1}, "neighbours": {"old": 1}}')
    report.save(tmp_path)
    assert json.loads((tmp_path / "audit.json").read_text()) == {"canaries": {"kept": 1}, **found}
    report.save(tmp_path / "another.json")
    assert json.loads((tmp_path / "another.json").read_text()) == found


def test_what_is_not_finite_is_null_in_the_file():
    report = audited(*stepped(lambda model, x, y, mask: jax.grad(total_loss)(model, x, y)))
    assert report.largest == np.inf
    assert json.loads(report.to_json())["neighbours"]["largest"] is None


def total_loss(model, x, y):
    return jax.vmap(LOSS, (None, 0, 0))(model, x, y).sum()


def test_the_same_call_gives_the_same_report():
    one, other = (gradient_of(models.linear_regression()) for _ in range(2))
    assert one == other


# Bad input.

GRAD_FN = dp.filter_clipped_grad(LOSS, l2_clip_norm=CLIP_NORM)


@pytest.mark.parametrize(
    ("args", "options", "says"),
    [
        ((clipped, MODEL, *BATCH, MASK), {}, "private or sensitivity is missing"),
        ((GRAD_FN, MODEL, *BATCH), {"private": (1,)}, "known for a clipped gradient"),
        ((GRAD_FN,), {}, "model is missing"),
        ((GRAD_FN, MODEL), {}, "no argument holds the data"),
        ((GRAD_FN, MODEL, BATCH[0], BATCH[1][:5]), {}, "same number of examples"),
        ((GRAD_FN, MODEL, BATCH[0][:1], BATCH[1][:1]), {}, "at least two examples"),
        ((GRAD_FN, MODEL, BATCH[0], 3.0), {}, "array of numbers with examples"),
        ((GRAD_FN, MODEL, *BATCH), {"is_padding_example": np.ones(6, bool)}, "all slots are padd"),
        ((GRAD_FN, MODEL, *BATCH), {"is_padding_example": np.ones(5)}, "must be boolean"),
        ((runs.make(),), {}, "state is missing"),
        ((runs.make(), MODEL, *BATCH), {"plan": PLAN}, "the step's own"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input(args, options, says):
    with pytest.raises(ValueError, match=says):
        audit.neighbours(*args, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sensitivity": np.inf}, "above 0 and finite"),
        ({"sensitivity": 0.0}, "above 0 and finite"),
        ({"neighboring_relation": dp.NeighboringRelation.REPLACE_ONE}, "leave it out"),
        ({}, "adds no noise in this function"),
        ({"release": lambda result: ()}, "floating-point arrays"),
        ({"release": lambda result: MASK}, "floating-point arrays"),
    ],
    ids=["infinite", "zero", "relation", "no noise", "nothing released", "booleans released"],
)
def test_bad_options(options, says):
    with pytest.raises(ValueError, match=says):
        audited(clipped, **options)


@pytest.mark.parametrize("place", [7, -1, "z", True])
def test_a_place_that_is_no_argument(place):
    with pytest.raises(ValueError, match="private and padding name arguments"):
        audit.neighbours(clipped, MODEL, *BATCH, MASK, private=(1, place), sensitivity=1.0)


def test_noise_in_a_loop_is_not_recorded():
    step, state = stepped(clipped)

    def twice(model, state, x, y, mask):
        def one(carry, _):
            return step(*carry, x, y, mask), None

        return jax.lax.scan(one, (model, state), None, length=2)[0]

    with pytest.raises(ValueError, match="inside of a loop or a branch"):
        audited(twice, state)


def test_a_step_without_noise_has_no_release():
    plan = dp.PrivacyPlan(0.25, 10, 0.0, 1e-5)
    step = runs.make(plan)
    with pytest.raises(ValueError, match=r"step\.grad_fn"):
        audit.neighbours(step, runs.small_model(), runs.XS[:8], runs.YS[:8])
    assert_passes(audit.neighbours(step.grad_fn, runs.small_model(), runs.XS[:8], runs.YS[:8]))


def test_an_error_on_the_examples_as_given_is_the_user_s():
    def refusing(model, x, y, mask):
        raise TypeError("of the user")

    with pytest.raises(TypeError, match="of the user"):
        audited(refusing)


def test_a_violation_names_its_rule():
    report = audited(*stepped(lambda model, x, y, mask: jax.grad(total_loss)(model, x, y)))
    assert "movement" in rules_of(report)
    text = str(report)
    assert "what to do: Clip the gradient of every example" in text
