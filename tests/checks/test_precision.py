"""check_precision: passes what keeps to its policy, and finds each thing that does not."""

import contextlib
import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from jaxtyping import TypeCheckError

import eqx_dp as dp
from eqx_dp.gradients import clip, leaves
from eqx_dp.precision import stage
from tests import models
from tests.gradients.cases.models import VOCABULARY, StackedGPT, language_loss
from tests.sharding.losses import mesh_of

pytestmark = pytest.mark.sampled(6)

MIXED = dp.load_policy("mixed_bfloat16")
BF16, F32 = jnp.bfloat16, jnp.float32


def context(preset):
    return jax.enable_x64(True) if preset == "float64" else contextlib.nullcontext()


def training_step(case, policy, *, loss=None, between=None, noise=None, **options):
    """A step and shapes of its arguments: clipped gradients, what comes between, noise, Adam."""
    options = {"l2_clip_norm": 1.0, "policy": policy, "filter_spec": case.filter_spec} | options
    grad_fn = dp.filter_clipped_grad(loss or case.loss, normalize_by=4.0, **options)
    privatizer = noise or dp.gaussian_privatizer(
        stddev=1.0, key=jax.random.key(1), policy=policy, sharding=options.get("sharding")
    )
    optimizer = optax.chain(privatizer, optax.adam(1e-3))

    @eqx.filter_jit
    def step(model, state, *batch):
        grads = grad_fn(model, *batch)
        if between is not None:
            grads = jax.tree.map(between, grads)
        updates, state = optimizer.update(grads, state)
        return policy.cast_to_param(eqx.apply_updates(model, updates)), state

    def start(model):
        model = policy.cast_to_param(model)
        wide = policy.cast_to_accumulate(eqx.filter(model, case.filter_spec))
        return model, optimizer.init(wide), *case.batch(8)

    if "sharding" in options:  # arrays that live somewhere
        return step, *start(case.model)
    return step, *eqx.filter_eval_shape(start, case.model)


def check(*step, policy=MIXED):
    return dp.check_precision(*step, policy=policy)


def found(report):
    return {(row.stage, row.declared, row.found) for row in report.violations}


def by_hand(add):
    """A privatizer that a user writes: `add(sum, key)` for every leaf."""

    def update(updates, state, params=None):
        del params
        keys = iter(jax.random.split(state, 100))
        return jax.tree.map(lambda leaf: add(leaf, next(keys)), updates), state

    return optax.GradientTransformation(lambda params: jax.random.key(0), update)


# What keeps to its policy.


@pytest.mark.parametrize(
    ("case", "preset"),
    [
        pytest.param(case, preset, marks=pytest.mark.exhaustive if is_slow else ())
        for preset in dp.available_policies()
        for case in (models.mlp(), models.cnn(), models.gpt())
        for is_slow in [case.name == "gpt" and preset not in ("float32", "mixed_bfloat16")]
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_every_preset_passes(case, preset):
    with context(preset):
        policy = dp.load_policy(preset)
        method = "per_example" if case.name == "gpt" else "auto"
        report = check(*training_step(case, policy, method=method), policy=policy)
    report.raise_if_violated()
    assert report.ok
    assert report.notes == ()
    # Everything was seen, and in the dtype that was declared.
    dtypes = {(use.kind, use.stage): use.dtype for use in report.summary}
    narrow = policy.matmul
    assert dtypes["contraction", "forward"] == (narrow.forward if narrow else policy.compute_dtype)
    backward = {use.dtype for use in report.summary if use.stage == "backward"}
    products = (
        {"float8_e5m2 x float8_e4m3fn", "bfloat16"} if narrow else {policy.compute_dtype.name}
    )
    assert backward
    assert backward <= products
    assert dtypes["sum over examples", "sum over examples"] == policy.accumulate_dtype
    assert dtypes["draw", "noise draw"] == "float64"
    assert dtypes["noise addition", "noise addition"] == "float64"
    assert not any("outside" in use.stage for use in report.summary)


@pytest.mark.parametrize("method", ["per_example", "book_keeping", "ghost"])
def test_every_method_passes_in_microbatches(method):
    case = models.mlp(depth=0)
    report = check(*training_step(case, MIXED, method=method, microbatch_size=3))
    report.raise_if_violated()
    in_microbatches = [use for use in report.summary if use.stage == "sum over microbatches"]
    assert in_microbatches
    assert {use.dtype for use in in_microbatches} == {"float32"}
    assert not any("outside" in use.stage for use in report.summary)


@pytest.mark.parametrize(
    "method",
    [
        "book_keeping",
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("per_example", "ghost")),
    ],
)
def test_every_method_passes_through_scan_and_remat(method):
    policy = dp.parse_policy("p=f32,c=bf16,module:**.query_proj=float16,module:MLP=float32")
    report = check(*training_step(scanned_gpt(), policy, method=method), policy=policy)
    report.raise_if_violated()
    assert not any("outside" in use.stage for use in report.summary)
    dtypes = {(use.stage, use.dtype) for use in report.summary if use.kind == "contraction"}
    for way in ("forward", "backward"):
        assert {found for found in dtypes if way in found[0]} == {
            (way, "bfloat16"),
            (f"{way} in **.query_proj", "float16"),
            (f"{way} in MLP", "float32"),
        }


def scanned_gpt():
    """Layers under scan and checkpoint; of the model, shapes alone."""
    draw = lambda rng, size: (jnp.asarray(rng.integers(0, VOCABULARY, (size, 6)), jnp.int32),)  # noqa: E731
    model = eqx.filter_eval_shape(StackedGPT, jax.random.key(2))
    return models.Case("scanned_gpt", model, language_loss, draw)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("accumulators", ["params", "examples"])
def test_on_eight_devices(kind, accumulators):
    policy = dp.parse_policy("p=f32,c=f16,module:layers.1=float32,loss_scale=1024")
    mesh = mesh_of(kind, data=8)
    rules = dp.ShardingRules(mesh, examples=("data",), accumulators=accumulators)
    with jax.set_mesh(mesh):
        step, model, state, *batch = training_step(
            models.mlp(), policy, sharding=rules, microbatch_size=1
        )
        batch = rules.shard_batch(tuple(batch))
        report = check(step, rules.shard(model), state, *batch, policy=policy)
    report.raise_if_violated()
    dtypes = {(use.stage, use.dtype) for use in report.summary if use.kind == "contraction"}
    assert {("forward", "float16"), ("forward in layers.1", "float32")} <= dtypes
    collectives = [use for use in report.summary if use.kind == "collective"]
    assert collectives
    assert all("sum over devices" in use.stage for use in collectives)
    assert {use.dtype for use in collectives} == {"float32"}


def test_operations_are_counted():
    # 6 x 8, 8 x 8 and 8 x 3 for each of 8 examples, 2 FLOPs an entry; back through all of them
    # to the weights, and through the last two to the activations.
    report = check(*training_step(models.mlp(), MIXED, method="per_example"))
    flops = {use.stage: use.amount for use in report.summary if use.kind == "contraction"}
    entries = 6 * 8 + 8 * 8 + 8 * 3
    assert flops["forward"] == 2 * 8 * entries
    assert flops["backward"] == 2 * 8 * (entries + 8 * 8 + 8 * 3)
    draws = [use.amount for use in report.summary if use.kind == "draw"]
    assert set(draws) == {entries + 8 + 8 + 3}
    # On two microbatches, each one goes through half of that, twice.
    halves = check(*training_step(models.mlp(), MIXED, method="per_example", microbatch_size=4))
    assert {u.stage: u.amount for u in halves.summary if u.kind == "contraction"} == flops


# What does not: each planted once.


def test_a_sum_cast_down_before_the_noise():
    step = training_step(models.mlp(), MIXED, between=lambda g: g.astype(BF16).astype(F32))
    report = check(*step)
    assert found(report) == {("between clip and noise", "float32", "bfloat16")}
    assert {"test_precision.py" in row.where for row in report.violations} == {True}


def test_noise_drawn_narrow_and_cast_up():
    def add(total, key):
        return total + jax.random.normal(key, total.shape, BF16).astype(F32)

    report = check(*training_step(models.mlp(), MIXED, noise=by_hand(add)))
    assert ("noise draw", "float32", "bfloat16") in found(report)
    assert {row.stage for row in report.violations} == {"noise draw"}
    assert all("(test_noise_drawn_narrow" in row.where for row in report.violations)


def test_noise_from_too_few_bits():
    def add(total, key):
        uniform = (jax.random.bits(key, total.shape, jnp.uint16).astype(F32) + 0.5) / 2**16
        return total - jax.scipy.stats.norm.ppf(uniform)

    report = check(*training_step(models.mlp(), MIXED, noise=by_hand(add)))
    assert found(report) == {("noise draw", "float32", "16 random bits a number")}


def test_noise_that_goes_narrow_on_its_way():
    def add(total, key):
        noise = jax.random.normal(key, total.shape)
        return (noise.astype(BF16) * 2).astype(F32) + total

    report = check(*training_step(models.mlp(), MIXED, noise=by_hand(add)))
    assert found(report) == {("noise draw", "float32", "bfloat16")}


def test_noise_of_the_privatizers_own_draw_that_goes_narrow():
    def add(total, key):
        with stage("draw"):
            noise = jax.random.normal(key, total.shape, F32).astype(BF16)
        return total + noise.astype(F32)

    report = check(*training_step(models.mlp(), MIXED, noise=by_hand(add)))
    assert found(report) == {("noise draw", "float32", "bfloat16")}
    drawn = [(use.dtype, use.amount) for use in report.summary if use.kind == "draw"]
    assert drawn == [("bfloat16", 6 * 8 + 8 * 8 + 8 * 3 + 8 + 8 + 3)]


def test_noise_added_narrow():
    def add(total, key):
        return total.astype(BF16) + jax.random.normal(key, total.shape).astype(BF16)

    report = check(*training_step(models.mlp(), MIXED, noise=by_hand(add)))
    assert found(report) == {
        ("between clip and noise", "float32", "bfloat16"),
        ("noise draw", "float32", "bfloat16"),
        ("noise addition", "float32", "bfloat16"),
    }


def test_wide_noise_by_hand_passes():
    def add(total, key):
        return total + 2.0 * jax.random.normal(key, total.shape)

    report = check(*training_step(models.mlp(), MIXED, noise=by_hand(add)))
    report.raise_if_violated()
    assert {use.dtype for use in report.summary if use.kind == "draw"} == {"float32"}


def test_a_forward_pass_that_ran_wider():
    def loss(model, x, label):
        return models.mlp_loss(MIXED.cast_to_accumulate(model), x.astype(F32), label)

    report = check(*training_step(models.mlp(), MIXED, loss=loss))
    assert found(report) == {
        ("forward", "bfloat16", "float32, wider"),
        ("backward", "bfloat16", "float32, wider"),
    }


@pytest.mark.parametrize("method", ["per_example", "book_keeping", "ghost"])
def test_a_forward_pass_that_ran_narrower(method):
    policy = dp.load_policy("float32")

    def loss(model, x, label):
        return models.mlp_loss(MIXED.cast_to_compute(model), x.astype(BF16), label)

    step = training_step(models.mlp(depth=0), policy, loss=loss, method=method)
    report = check(*step, policy=policy)
    stages = {("forward", "float32", "bfloat16, narrower")}
    assert stages <= found(report) <= stages | {("backward", "float32", "bfloat16, narrower")}


@pytest.mark.parametrize("declared", ["highest", "tensorfloat32"])
def test_products_less_precise_than_declared(declared):
    policy = dp.parse_policy(f"p=f32,matmul_precision={declared}")
    assert check(*training_step(models.mlp(), policy), policy=policy).ok
    report = check(*training_step(models.mlp(), dp.load_policy("float32")), policy=policy)
    assert {(v.stage, v.declared) for v in report.violations} == {
        (stage, f"matmul_precision {declared}") for stage in ("forward", "backward")
    }


def test_one_convolution_that_ran_wider():
    def loss(model, image, label):
        model = eqx.tree_at(lambda m: m.second, model, MIXED.cast_to_accumulate(model.second))
        hidden = jax.nn.silu(model.norm(model.first(image)))
        hidden = jax.nn.silu(model.second(hidden.astype(F32))).astype(BF16)
        return models.cross_entropy(model.head(hidden.ravel()), label)

    step = training_step(models.cnn(), MIXED, loss=loss, method="per_example")
    assert ("forward", "bfloat16", "float32, wider") in found(check(*step))


def test_microbatches_accumulated_narrow():
    case = models.mlp()
    grad_fn = dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0, policy=MIXED)

    def step(model, *batch):
        def body(total, microbatch):
            grads = grad_fn(model, *microbatch)
            return jax.tree.map(lambda t, g: (t + g).astype(t.dtype), total, grads), None

        params = eqx.filter(model, eqx.is_inexact_array)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, BF16), params)
        parts = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), batch)
        return jax.lax.scan(body, zeros, parts)[0]

    report = check(step, case.model, *case.batch(8))
    assert found(report) == {("between clip and noise", "float32", "bfloat16")}
    assert "returned without noise" in str(report)


def test_an_all_reduce_in_bfloat16():
    case, mesh = models.mlp(), mesh_of("auto", data=8)
    grad_fn = dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0, policy=MIXED)

    def reduced(dtype):
        def step(params, *batch):
            def on_device(params, *batch):
                model = eqx.combine(params, case.model)
                grads = jax.tree.map(lambda g: g.astype(dtype), grad_fn(model, *batch))
                return jax.lax.psum(grads, "data")

            specs = (P(), *[P("data")] * len(batch))
            mapped = jax.shard_map(
                on_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False
            )
            return mapped(params, *batch)

        return check(step, eqx.filter(case.model, eqx.is_array), *case.batch(8))

    assert ("sum over devices", "float32", "bfloat16") in found(reduced(BF16))
    assert reduced(F32).ok


def test_a_clip_norm_computed_narrow(monkeypatch):
    def narrow(*args):
        return tuple(x.astype(BF16).astype(F32) for x in leaves.norm_and_bound(*args))

    monkeypatch.setattr(clip, "norm_and_bound", narrow)
    report = check(*training_step(models.mlp(), MIXED))
    assert found(report) == {("clip norm", "float32", "bfloat16")}


@pytest.mark.parametrize("method", ["per_example", "book_keeping", "ghost"])
def test_a_step_built_with_an_unsafe_policy(method):
    narrow = dp.parse_policy("p=f32,c=bf16,a=bf16,n=bf16,unsafe=true")
    step = training_step(models.mlp(depth=0), narrow, method=method, microbatch_size=3)
    report = check(*step)
    assert {row.stage for row in report.violations} >= {
        "clip norm",
        "sum over examples",
        "sum over microbatches",
        "noise draw",
        "noise addition",
    }
    # Against what it does declare it is right, and still said to be unsafe.
    own = check(*step, policy=narrow)
    assert own.ok
    assert "unsafe" in str(own)


def test_a_narrow_sum_over_devices_of_the_engine():
    narrow = dp.parse_policy("p=f32,c=bf16,a=bf16,n=f32,unsafe=true")
    mesh = mesh_of("auto", data=8)
    rules = dp.ShardingRules(mesh, examples=("data",))
    with jax.set_mesh(mesh):
        step, model, state, *batch = training_step(models.mlp(), narrow, sharding=rules)
        report = check(step, rules.shard(model), state, *rules.shard_batch(tuple(batch)))
    assert ("sum over devices", "float32", "bfloat16") in found(report)


def test_a_sum_over_examples_at_default_precision(monkeypatch):
    def default(leaf, factors, contributes):
        del contributes
        return jnp.tensordot(factors, leaf, axes=1)

    monkeypatch.setattr("eqx_dp.gradients.leaves.weighted_sum", default)
    monkeypatch.setattr("eqx_dp.gradients.leaves._SMALL", 0)  # each leaf has a sum of its own
    report = check(*training_step(models.mlp(), MIXED, method="per_example"))
    ((stage, declared, what),) = found(report)
    assert (stage, declared) == ("sum over examples", "float32")
    assert "default" in what


# What is no violation.


def test_no_alarm_on_what_goes_wide_inside_the_loss_by_design():
    def loss(model, x, label):
        hidden = jax.nn.relu(model.layers[0](x)).astype(F32)
        hidden = (hidden - hidden.mean()) * jax.lax.rsqrt(hidden.var() + 1e-5)
        weights = jax.nn.softmax(model.layers[1](hidden.astype(x.dtype)).astype(F32))
        logits = model.layers[2](weights.astype(x.dtype)).astype(F32)
        return models.cross_entropy(logits, label) + 0.1 * jnp.sum(logits**2)

    for method in ("per_example", "book_keeping"):
        check(*training_step(models.mlp(), MIXED, loss=loss, method=method)).raise_if_violated()


def test_no_alarm_on_attention_that_asks_for_wide_logits():
    def loss(model, x, label):
        heads = jnp.stack([model.layers[0](x)] * 3).reshape(3, 2, 4)
        mixed = jax.nn.dot_product_attention(heads, heads, heads).reshape(3, 8)
        logits = jnp.einsum("th,kh->k", mixed, model.layers[2].weight)
        return models.cross_entropy(logits, label)

    check(*training_step(models.mlp(), MIXED, loss=loss)).raise_if_violated()


def test_no_alarm_on_integers():
    def loss(model, x, label):
        table = jnp.arange(12, dtype=jnp.int8).reshape(4, 3)
        label = (jnp.ones(4, jnp.int8) @ table)[label].astype(jnp.int32) % 3
        return models.mlp_loss(model, x, label)

    check(*training_step(models.mlp(), MIXED, loss=loss)).raise_if_violated()


def test_no_alarm_on_what_follows_the_noise():
    declared = {"optimizer_dtype": BF16, "narrow_optimizer": True}
    policy = dataclasses.replace(dp.load_policy("bfloat16"), **declared)
    case = models.mlp()
    grad_fn = dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0, policy=policy)
    optimizer = optax.chain(
        dp.gaussian_privatizer(stddev=1.0, key=jax.random.key(0), policy=policy),
        optax.adam(1e-3, mu_dtype=BF16),
    )

    def step(model, state, batch):
        updates, state = optimizer.update(grad_fn(model, *batch), state)
        # A preconditioner of the user's own, in a dtype of its own.
        updates = jax.tree.map(lambda u: (u @ u.T @ u).astype(BF16) if u.ndim == 2 else u, updates)
        return (policy.cast_to_param(eqx.apply_updates(model, updates)), state), None

    model = policy.cast_to_param(case.model)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    state = optimizer.init(policy.cast_to_accumulate(params))

    def train(params, state, batches):
        def body(carry, batch):
            (model, state), _ = step(eqx.combine(carry[0], static), carry[1], batch)
            return (eqx.filter(model, eqx.is_inexact_array), state), None

        return jax.lax.scan(body, (params, state), batches)[0]

    batches = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), case.batch(8))
    report = check(train, params, state, batches, policy=policy)
    report.raise_if_violated()
    assert report.notes == ()
    # Two steps of a scan draw twice.
    assert {use.times % 2 for use in report.summary if use.kind == "draw"} == {0}


def test_optimizer_state_narrower_than_declared():
    """Of optax's states alone: a model, or a batch, in a tuple with names is none."""
    case = models.mlp()
    step, model, state, *batch = training_step(case, MIXED)
    narrow = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, BF16 if x.dtype == F32 else x.dtype), state
    )

    def rounding(model, state, *batch):
        model, state = step(
            model, jax.tree.map(lambda x: x.astype(F32) if x.dtype == BF16 else x, state), *batch
        )
        return model, jax.tree.map(lambda x: x.astype(BF16) if x.dtype == F32 else x, state)

    report = dp.check_precision(rounding, model, narrow, *batch, policy=MIXED)
    (found,) = report.violations
    assert found[:3] == ("optimizer state", "float32", "bfloat16")
    assert found.where.startswith("the result[1][1][0].mu")
    declared = dataclasses.replace(MIXED, optimizer_dtype=BF16, narrow_optimizer=True)
    dp.check_precision(rounding, model, narrow, *batch, policy=declared).raise_if_violated()
    dp.check_precision(step, model, state, *batch, policy=declared).raise_if_violated()


def test_no_alarm_on_a_loss_that_draws():
    case = models.dropout()
    grad_fn = dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0, policy=MIXED)
    privatizer = dp.gaussian_privatizer(stddev=1.0, key=jax.random.key(0), policy=MIXED)

    def step(model, state, key, *batch):
        of_sample, of_loss = jax.random.split(key)
        chosen = jax.random.bernoulli(of_sample, 0.5, (8,))
        grads = grad_fn(model, *batch, key=of_loss, is_padding_example=~chosen)
        return privatizer.update(grads, state)

    report = check(step, case.model, privatizer.init(None), jax.random.key(3), *case.batch(8))
    report.raise_if_violated()
    # Neither the sample nor dropout is noise.
    draws = [use for use in report.summary if use.kind == "draw"]
    assert draws
    assert all("eqx_dp/privacy" in use.where for use in draws), draws


# The report itself.


def test_nothing_to_check_is_an_error():
    def step(model, x):
        return eqx.filter_grad(lambda m: m(x).sum())(model)

    case = models.mlp()
    with pytest.raises(ValueError, match=r"Nothing to check: .*step calls neither"):
        check(step, case.model, case.batch(1)[0][0])


def test_what_is_no_policy_is_refused():
    with pytest.raises((ValueError, TypeCheckError), match="policy"):
        dp.check_precision(jnp.sin, 1.0, policy="float32")


def test_the_table_says_it_all():
    step = training_step(models.mlp(), MIXED, between=lambda g: g.astype(BF16).astype(F32))
    with pytest.raises(ValueError, match="does not keep to its policy") as error:
        check(*step).raise_if_violated()
    table = str(error.value)
    for text in (
        "1 violation",
        "mixed_bfloat16",
        "between clip and noise",
        "test_precision.py",
        "FLOPs",
    ):
        assert text in table


def test_shapes_are_enough():
    step, *args = training_step(models.mlp(), MIXED)
    structs = eqx.filter_eval_shape(lambda: args)
    assert check(step, *structs).violations == check(step, *args).violations == ()


def test_a_made_step_is_checked_as_it_is_called():
    def loss(model, x):
        return jnp.sum(model(x))

    step = dp.make_step(
        loss,
        optax.adam(1e-3),
        dp.PrivacyPlan(0.5, 3, 1.0, 1e-5),
        num_examples=8,
        seed=0,
        l2_clip_norm=1.0,
        policy=MIXED,
    )
    state = step.init(eqx.nn.Linear(3, 2, key=jax.random.key(0)))
    batch, mask = jnp.ones((8, 3)), jnp.zeros(8, bool)
    dp.check_precision(
        step, state, batch, is_padding_example=mask, policy=MIXED
    ).raise_if_violated()
