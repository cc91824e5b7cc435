"""check_precision of steps of the engine: what keeps to its policy passes, each fault is found."""

import contextlib
import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests import models
from tests.gradients.cases import layers
from tests.sharding.losses import mesh_of
from tests.tiers import METHODS, curated

FLOAT8, MIXED, WIDE = map(dp.load_policy, ("mixed_float8", "mixed_bfloat16", "float32"))
BF16, F32, E4 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn


def training_step(case, policy=MIXED, *, loss=None, between=None, noise=None, **options):
    """A step and shapes of its arguments: clipped gradients, what comes between, noise, Adam."""
    options = {"l2_clip_norm": 1.0, "policy": policy, "filter_spec": case.filter_spec} | options
    grad_fn = dp.filter_clipped_grad(loss or case.loss, normalize_by=4.0, **options)
    rules = options.get("sharding")
    privatizer = noise or dp.gaussian_privatizer(stddev=1.0, key=1, policy=policy, sharding=rules)
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

    if rules is None:
        return step, *eqx.filter_eval_shape(start, case.model)
    model, state, *batch = start(case.model)
    return step, rules.shard(model), state, *rules.shard_batch(tuple(batch))


def check(case, policy=MIXED, against=None, **options):
    """The report on a training step by one policy, against another or the same."""
    rules = options.get("sharding")
    with jax.set_mesh(rules.mesh) if rules else contextlib.nullcontext():
        step = training_step(case, policy, **options)
        return dp.check_precision(*step, policy=against or policy)


def found(report):
    return {(row.stage, row.declared, row.found) for row in report.violations}


def in_loss(report):
    return {(use.stage, use.dtype) for use in report.summary if use.kind == "contraction"}


def examples_over(kind, **more):
    return dp.ShardingRules(mesh_of(kind, data=8), examples=("data",), **more)


def narrow(g, dtype=BF16):
    return g.astype(dtype).astype(F32)


# What keeps to its policy.


@pytest.mark.parametrize(
    ("case", "preset"),
    [(models.mlp(), preset) for preset in dp.available_policies()]
    + [
        (models.cnn(), "mixed_bfloat16"),
        pytest.param(models.gpt(), "mixed_bfloat16", marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_every_preset_passes(case, preset):
    with jax.enable_x64(True) if preset == "float64" else contextlib.nullcontext():
        policy = dp.load_policy(preset)
        report = check(case, policy, method="per_example" if case.name == "gpt" else "auto")
    report.raise_if_violated()
    assert report.ok
    assert report.notes == ()
    # Everything was seen, and in the dtype that was declared.
    dtypes = {(use.kind, use.stage): use.dtype for use in report.summary}
    matmul = policy.matmul
    assert dtypes["contraction", "forward"] == (matmul.forward if matmul else policy.compute_dtype)
    backward = {use.dtype for use in report.summary if use.stage == "backward"}
    products = {"float8_e5m2 x float8_e4m3fn", "bfloat16"}
    assert backward
    assert backward <= (products if matmul else {policy.compute_dtype.name})
    assert dtypes["sum over examples", "sum over examples"] == policy.accumulate_dtype
    assert dtypes["draw", "noise draw"] == "64 bits"
    assert dtypes["noise addition", "noise addition"] == "int64"
    assert not any("outside" in use.stage for use in report.summary)


@pytest.mark.parametrize("policy", curated([MIXED, FLOAT8], [MIXED]), ids=lambda its: its.name)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_passes_in_microbatches(method, policy):
    case = models.mlp() if policy is FLOAT8 else models.mlp(depth=0)
    report = check(case, policy, method=method, microbatch_size=3)
    report.raise_if_violated()
    in_microbatches = [use for use in report.summary if use.stage == "sum over microbatches"]
    assert {use.dtype for use in in_microbatches} == {"float32"}
    assert not any("outside" in use.stage for use in report.summary)
    if policy is FLOAT8:
        eight = {("forward", "float8_e4m3fn"), ("backward", "float8_e5m2 x float8_e4m3fn")}
        assert eight <= in_loss(report)


SPREAD = [("auto", "params"), ("explicit", "examples"), ("auto", "examples")]


@pytest.mark.parametrize(("kind", "accumulators"), curated(SPREAD, SPREAD[:1]))
def test_on_eight_devices(kind, accumulators):
    policy = dp.parse_policy("p=f32,c=f16,module:layers.1=float32,loss_scale=1024")
    rules = examples_over(kind, accumulators=accumulators)
    report = check(models.mlp(), policy, sharding=rules, microbatch_size=1)
    report.raise_if_violated()
    assert {("forward", "float16"), ("forward in layers.1", "float32")} <= in_loss(report)
    collectives = [use for use in report.summary if use.kind == "collective"]
    assert all("sum over devices" in use.stage for use in collectives)
    assert {use.dtype for use in collectives} == {"float32"}


def wide_by_design(model, x, label):
    hidden = jax.nn.relu(model.layers[0](x)).astype(F32)
    hidden = (hidden - hidden.mean()) * lax.rsqrt(hidden.var() + 1e-5)
    weights = jax.nn.softmax(model.layers[1](hidden.astype(x.dtype)).astype(F32))
    logits = model.layers[2](weights.astype(x.dtype)).astype(F32)
    return models.cross_entropy(logits, label) + 0.1 * jnp.sum(logits**2)


def test_no_alarm_on_a_loss_nor_on_convolutions_of_8_bits():
    check(models.mlp(), loss=wide_by_design, method="book_keeping").raise_if_violated()
    check(layers.case("conv1d_all"), FLOAT8).raise_if_violated()


@pytest.mark.parametrize("rule", ["bfloat16:wide", "float32"])
def test_products_of_a_wide_module_are_in_its_compute_dtype(rule):
    """A rule of float32 in a policy of 8 bits says so, too."""
    # The innermost rule counts: the first layer multiplies in 8 bits.
    policy = dp.parse_policy(f"{FLOAT8},module:layers.0=bfloat16,module:MLP={rule}")
    report = check(models.mlp(), policy)
    report.raise_if_violated()
    assert {(at, dtype) for at, dtype in in_loss(report) if at.startswith("forward in")} == {
        ("forward in layers.0", "float8_e4m3fn"),
        ("forward in MLP", rule.partition(":")[0]),
    }


def test_no_alarm_on_what_follows_the_noise():
    declared = {"optimizer_dtype": BF16, "narrow_optimizer": True}
    policy = dataclasses.replace(dp.load_policy("bfloat16"), **declared)
    case = models.mlp()
    grad_fn = dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0, policy=policy)
    noise = dp.gaussian_privatizer(stddev=1.0, key=0, policy=policy)
    optimizer = optax.chain(noise, optax.adam(1e-3, mu_dtype=BF16))
    params, static = eqx.partition(policy.cast_to_param(case.model), eqx.is_inexact_array)

    def step(carry, batch):
        params, state = carry
        updates, state = optimizer.update(grad_fn(eqx.combine(params, static), *batch), state)
        # A preconditioner of the user's own, in a dtype of its own.
        updates = jax.tree.map(lambda u: (u @ u.T @ u).astype(BF16) if u.ndim == 2 else u, updates)
        return (policy.cast_to_param(eqx.apply_updates(params, updates)), state), None

    first = params, optimizer.init(policy.cast_to_accumulate(params))
    batches = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), case.batch(8))
    train = lambda first, batches: lax.scan(step, first, batches)[0]  # noqa: E731
    report = dp.check_precision(train, first, batches, policy=policy)
    report.raise_if_violated()
    assert report.notes == ()
    # Two steps of a scan draw twice.
    assert {use.times % 2 for use in report.summary if use.kind == "draw"} == {0}


def test_no_alarm_on_a_loss_that_draws():
    case = models.dropout()
    grad_fn = dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0, policy=MIXED)
    privatizer = dp.gaussian_privatizer(stddev=1.0, key=0, policy=MIXED)

    def step(model, state, key, *batch):
        of_sample, of_loss = jax.random.split(key)
        chosen = jax.random.bernoulli(of_sample, 0.5, (8,))
        grads = grad_fn(model, *batch, key=of_loss, is_padding_example=~chosen)
        return privatizer.update(grads, state)

    given = case.model, privatizer.init(None), jax.random.key(3), *case.batch(8)
    report = dp.check_precision(step, *given, policy=MIXED)
    report.raise_if_violated()
    # Neither the sample nor dropout is noise.
    draws = [use.where for use in report.summary if use.kind == "draw"]
    assert draws
    assert all("eqx_dp/privacy" in where for where in draws), draws


# Modules with a dtype of their own: in a matched module the rule's dtype, else the policy's.

FIRST_WIDE = dp.parse_policy("p=f32,c=bf16,module:first.*=float32")
# The whole net is wide, but for the second layer.
SECOND_NARROW = dp.parse_policy("p=f32,c=bf16,module:second.*=bfloat16,module:Net=float32")


@jax.custom_vjp
def product(weight, x):
    return weight @ x


product.defvjp(
    lambda weight, x: (weight @ x, (weight, x)),
    lambda kept, g: (jnp.tensordot(g, kept[1], 0), kept[0].T @ g),
)


def deep(weight, x):
    body = jax.checkpoint(jax.jit(lambda weight, x: weight @ x))
    scanned = lambda weight, x: lax.scan(lambda c, _: (body(weight, c), None), x, length=2)[0]  # noqa: E731
    return jax.jit(scanned)(weight, x)


WAYS = {f.__name__: f for f in (deep, product)}
# What runs by a derivative rule is told of the line that calls the function.
FUNCTIONS = {way: way for way in WAYS} | {"product": "Layer.__call__"}


class Layer(eqx.Module):
    """A product, done in some way, in a dtype of its own if it is told one."""

    weight: jax.Array
    way: str = eqx.field(static=True)
    dtype: str | None = eqx.field(static=True)

    def __call__(self, x):
        dtype = self.dtype or x.dtype
        return WAYS[self.way](self.weight.astype(dtype), x.astype(dtype)).astype(x.dtype)


class Net(eqx.Module):
    first: list[Layer]
    second: list[Layer]

    def __call__(self, x):
        for layer in (*self.first, *self.second):
            x = x + layer(x)
        return x


def net(*ways, first=None, second=None):
    parts = ([Layer(jnp.eye(6), way, dtype) for way in ways] for dtype in (first, second))
    return models.mlp()._replace(name="net", model=Net(*parts), loss=models.mlp_loss)


NARROW_IN_FIRST = "float32 (in first.*)", "bfloat16, narrower"
WIDE_IN_SECOND = "bfloat16", "float32, wider"


@pytest.mark.parametrize(
    ("method", "ways", "rules"),
    [
        ("per_example", [*WAYS], None),
        ("book_keeping", ["deep", "product"], None),
        ("ghost", ["deep"], None),
        *curated([("book_keeping", ["deep", "product"], examples_over("explicit"))], []),
    ],
)
def test_rules_of_modules_are_held_exactly(method, ways, rules):
    options = {"method": method} | ({"sharding": rules} if rules else {})
    report = check(net(*ways), SECOND_NARROW, **options)
    report.raise_if_violated()
    assert not any("outside" in use.stage for use in report.summary)
    report = check(net(*ways, first="bfloat16", second="float32"), FIRST_WIDE, **options)
    where = {
        (stage, way)
        for stage, *what, line in report.violations
        for way in ways
        if tuple(what) in (NARROW_IN_FIRST, WIDE_IN_SECOND) and f"({FUNCTIONS[way]}" in line
    }
    # Both faults, forward and backward, where the products are.
    assert {tuple(row[1:3]) for row in report.violations} == {NARROW_IN_FIRST, WIDE_IN_SECOND}
    assert where >= {("forward", way) for way in ways}
    assert "backward" in dict(where)


def test_a_step_built_without_the_rule():
    """Neither is a rule of another policy a licence, nor goes one unnoticed that is not there."""
    idle = ("module rule", "first.*=float32", "no call of a module")
    plain = dp.parse_policy("p=f32,c=bf16")
    assert found(check(net("product"), plain, FIRST_WIDE, method="per_example")) == {idle}
    other = dp.parse_policy("p=f32,c=bf16,module:second.*=float32")
    wide = {(way, *WIDE_IN_SECOND) for way in ("forward", "backward")}
    assert found(check(net("product"), other, FIRST_WIDE, method="per_example")) == {idle, *wide}


# What does not keep to its policy: each fault planted once.


def unscaled_product(model, x, label):
    narrow = [y.astype(E4) for y in (model.layers[0].weight, x)]
    return jnp.sum(jnp.matmul(*narrow, preferred_element_type=F32))


DEFAULT = "default (bfloat16 on accelerators)"
FAULTS = {
    "sum cast down before the noise": (
        MIXED, {"between": narrow}, ("between clip and noise", "float32", "bfloat16"),
    ),
    "wide step for 8 bits": (
        MIXED, {"against": FLOAT8},
        ("forward", "float8_e4m3fn, scaling per_example", "bfloat16, not scaled by the engine"),
    ),
    "8 bits for a wide step": (
        FLOAT8, {"against": MIXED}, ("forward", "bfloat16", "float8_e4m3fn, narrower"),
    ),
    "precision of products": (
        WIDE, {"against": dp.parse_policy("p=f32,matmul_precision=highest")},
        ("forward", "matmul_precision highest", f"float32 at precision {DEFAULT}"),
    ),
    "narrow sum over devices": (
        dp.parse_policy("p=f32,c=bf16,a=bf16,n=f32,unsafe=true"),
        {"sharding": examples_over("auto"), "against": MIXED},
        ("sum over devices", "float32", "bfloat16"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name):
    policy, options, expected = FAULTS[name]
    assert expected in found(check(models.mlp(), policy, **options))


def test_a_step_built_with_an_unsafe_policy():
    unsafe = dp.parse_policy("p=f32,c=bf16,a=bf16,n=bf16,unsafe=true")
    options = {"method": "book_keeping", "microbatch_size": 3}
    report = check(models.mlp(depth=0), unsafe, MIXED, **options)
    # (Noise itself is drawn and added wide.)
    assert {row.stage for row in report.violations} >= {"clip norm", "sum over examples"}
    # Against what it does declare it is right, and still said to be unsafe.
    own = check(models.mlp(depth=0), unsafe, **options)
    assert own.ok
    assert "unsafe" in str(own)


def optimizer_of_8_bits(scale_of):
    """Violations of a step whose loss casts to 8 bits by itself, by scales from the batch."""

    def loss(weight, x, scale):
        narrow = (x / scale).astype(E4).astype(x.dtype) * scale
        return jnp.sum((narrow @ weight) ** 2)

    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0, policy=FLOAT8)
    noise = dp.gaussian_privatizer(stddev=1.0, key=0, policy=FLOAT8)

    def step(weight, state, xs, largest):
        scale = jnp.broadcast_to(scale_of(xs, largest), len(xs))
        updates, state = noise.update(grad_fn(weight, xs, scale), state)
        return weight + updates, state, jnp.maximum(0.9 * largest, jnp.max(jnp.abs(xs)))

    weight = jnp.ones((4, 3))
    given = weight, noise.init(weight), jnp.ones((8, 2, 4)), jnp.ones(())
    return dp.check_precision(step, *given, policy=FLOAT8).violations


@pytest.mark.parametrize(
    "scale_of",
    [lambda xs, _: jnp.max(jnp.abs(xs)) / 448, lambda _, largest: largest / 448, lambda *_: 1.0],
    ids=["of the batch", "delayed", "none"],
)
def test_a_scale_that_the_engine_did_not_choose(scale_of):
    (operand,) = [row for row in optimizer_of_8_bits(scale_of) if row.stage == "operand"]
    assert "a scale that the engine did not choose" in operand.found
    assert operand.declared == "scaling per_example"
    assert __file__ in operand.where


def test_a_product_of_8_bits_that_the_engine_did_not_scale():
    report = check(models.mlp(depth=0), FLOAT8, loss=unscaled_product)
    assert {"operand", "forward"} <= {row.stage for row in report.violations}


def test_optimizer_state_narrower_than_declared():
    """Of optax's states alone: a model, or a batch, in a tuple with names is none."""
    step, model, state, *batch = training_step(models.mlp())

    def cast(tree, dtype, to):
        return jax.tree.map(lambda x: x.astype(to) if x.dtype == dtype else x, tree)

    def rounding(model, state, *batch):
        model, state = step(model, cast(state, BF16, F32), *batch)
        return model, cast(state, F32, BF16)

    rounded = eqx.filter_eval_shape(cast, state, F32, BF16)
    (row,) = dp.check_precision(rounding, model, rounded, *batch, policy=MIXED).violations
    assert row[:3] == ("optimizer state", "float32", "bfloat16")
    assert row.where.startswith("the result[1][1][0].mu")
    declared = dataclasses.replace(MIXED, optimizer_dtype=BF16, narrow_optimizer=True)
    dp.check_precision(rounding, model, rounded, *batch, policy=declared).raise_if_violated()
    dp.check_precision(step, model, state, *batch, policy=declared).raise_if_violated()


# What make_step returns, called as in training.


def made(policy=MIXED, rules=None, noise_multiplier=1.0):
    """A step, and arguments of a call."""
    plan = dp.PrivacyPlan(0.5, 3, noise_multiplier, 1e-5)
    options = {"num_examples": 8, "seed": 0, "l2_clip_norm": 1.0, "sharding": rules}
    loss = lambda model, x, y: jnp.sum((model(x) - y) ** 2)  # noqa: E731
    step = dp.make_step(loss, optax.adam(1e-3), plan, policy=policy, **options)
    state = step.init(eqx.nn.MLP(4, 2, 0, 0, key=jax.random.key(0)))
    batch = step.shard_batch((jnp.ones((8, 4)), jnp.ones((8, 2)), jnp.zeros(8, bool)))
    return step, state, batch


def check_made(step, state, batch, policy=MIXED):
    *batch, mask = batch
    return dp.check_precision(step, state, *batch, is_padding_example=mask, policy=policy)


@pytest.mark.parametrize("noise_multiplier", [1.0, 0.0])
def test_a_made_step_passes(noise_multiplier):
    """Without noise there is a note, and nothing else."""
    report = check_made(*made(noise_multiplier=noise_multiplier))
    report.raise_if_violated()
    assert any("without noise" in note for note in report.notes) == (noise_multiplier == 0)
    assert (report.notes == ()) == (noise_multiplier > 0)


@pytest.mark.parametrize(("kind", "inside"), curated([("explicit", True), ("auto", False)], []))
def test_a_made_step_on_eight_devices(kind, inside):
    """The step enters its mesh by itself, whether or not its caller has done so before."""
    mesh = mesh_of(kind, data=4, model=2)
    rules = dp.ShardingRules(mesh, params=(("**.weight", P("model", None)),))
    step, state, batch = made(rules=rules)
    with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
        report = check_made(step, state, batch)
    report.raise_if_violated()
    assert report.notes == ()
    (collective,) = [use for use in report.summary if use.kind == "collective"]
    assert (collective.stage, collective.dtype) == ("psum: sum over devices", "float32")
    # Shapes say as much.
    shapes = eqx.filter_eval_shape(lambda: (state, batch))
    assert check_made(step, *shapes).summary == report.summary
    unsafe = dp.parse_policy("p=f32,c=bf16,a=bf16,n=f32,unsafe=true")
    stages = {row.stage for row in check_made(*made(unsafe, rules)).violations}
    assert {"sum over examples", "sum over devices"} <= stages


# The report itself.


def test_nothing_to_check_is_an_error():
    step = eqx.filter_grad(lambda model, x: model(x).sum())
    with pytest.raises(ValueError, match=r"Nothing to check: .* calls neither"):
        dp.check_precision(step, models.mlp().model, jnp.ones(6), policy=MIXED)


def test_the_table_says_it_all():
    with pytest.raises(ValueError, match="does not keep to its policy") as error:
        check(models.mlp(), between=narrow).raise_if_violated()
    for text in ("1 violation", "mixed_bfloat16", "between clip and noise", __file__, "FLOPs"):
        assert text in str(error.value)


def test_a_report_as_json():
    report = check_made(*made(), policy=WIDE)
    assert not report.ok
    assert any(row.where.endswith(" in state.model.layers.0") for row in report.violations)
    read = json.loads(report.to_json())
    assert (read["format"], read["version"]) == ("eqx_dp.PrecisionReport", 1)
    assert read["ok"] is False
    assert read["policy"] == {"name": "float32", "text": str(report.policy)}
    assert [tuple(row.values()) for row in read["violations"]] == list(report.violations)
    assert [tuple(row.values()) for row in read["summary"]] == list(report.summary)
