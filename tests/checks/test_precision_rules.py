"""check_precision with module rules: in a matched module the rule's dtype, else the policy's."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jaxtyping import Array

import eqx_dp as dp
from tests import models
from tests.checks.test_precision import check, training_step
from tests.sharding.losses import mesh_of

pytestmark = pytest.mark.sampled(5)

BF16, F32 = jnp.bfloat16, jnp.float32
FIRST_WIDE = dp.parse_policy("p=f32,c=bf16,module:first.*=float32")
# The whole net is wide, but for the second layer.
SECOND_NARROW = dp.parse_policy("p=f32,c=bf16,module:second.*=bfloat16,module:Net=float32")


@jax.custom_vjp
def product(weight, x):
    return weight @ x


def product_forward(weight, x):
    return weight @ x, (weight, x)


def product_backward(residuals, g):
    weight, x = residuals
    return lax.dot_general(g, x, (((), ()), ((), ()))), weight.T @ g


product.defvjp(product_forward, product_backward)


def looped(weight, x):
    count = lax.stop_gradient((0, x))
    step = lambda c: (c[0] + 1, lax.stop_gradient(weight) @ c[1])  # noqa: E731
    return weight @ x + lax.while_loop(lambda c: c[0] < 2, step, count)[1]


def deep(weight, x):
    body = jax.checkpoint(jax.jit(lambda weight, x: weight @ x))
    scanned = lambda weight, x: lax.scan(lambda c, _: (body(weight, c), None), x, length=2)[0]  # noqa: E731
    return jax.jit(scanned)(weight, x)


def scanned_over(weight, x):
    return lax.scan(lambda c, w: (w @ c, None), x, jnp.stack([weight, weight]))[0]


def branching(weight, x):
    return lax.cond(jnp.max(x) > 0, lambda w, x: w @ x, lambda w, x: x, weight, x)


WAYS = {f.__name__: f for f in (deep, scanned_over, product, branching, looped)}


class Layer(eqx.Module):
    """A product, done in some way, in a dtype of its own if it is told one."""

    weight: Array
    way: str = eqx.field(static=True)
    dtype: str | None = eqx.field(static=True)

    def __call__(self, x: Array) -> Array:
        dtype = self.dtype or x.dtype
        return WAYS[self.way](self.weight.astype(dtype), x.astype(dtype)).astype(x.dtype)


class Net(eqx.Module):
    first: list[Layer]
    second: list[Layer]

    def __call__(self, x: Array) -> Array:
        for layer in (*self.first, *self.second):
            x = x + layer(x)
        return x


def net(*ways, first=None, second=None):
    layers = ([Layer(jnp.eye(6), way, dtype) for way in ways] for dtype in (first, second))
    return models.mlp()._replace(name="net", model=Net(*layers), loss=models.mlp_loss)


def found(case, policy, against=None):
    """What runs in the loss otherwise than declared, by the simplest method."""
    step = training_step(case, policy, method="per_example")
    report = check(*step, policy=policy if against is None else against)
    return {(row.stage, row.declared, row.found) for row in report.violations}


NARROW_IN_FIRST = "float32 (in first.*)", "bfloat16, narrower"
WIDE_IN_SECOND = "bfloat16", "float32, wider"


# What runs by a derivative rule is told of the line that calls the function.
FUNCTIONS = {way: way for way in WAYS} | {"product": "Layer.__call__"}


def is_violated_everywhere(report, ways):
    """Whether both faults were found, forward and backward, where the products are."""
    where = {
        (stage, way)
        for stage, *what, where in report.violations
        for way in ways
        if tuple(what) in (NARROW_IN_FIRST, WIDE_IN_SECOND) and f"({FUNCTIONS[way]}" in where
    }
    assert {tuple(row[1:3]) for row in report.violations} == {NARROW_IN_FIRST, WIDE_IN_SECOND}
    return where >= {("forward", way) for way in ways} and "backward" in dict(where)


@pytest.mark.parametrize(
    ("method", "ways"),
    [
        ("per_example", list(WAYS)),
        ("book_keeping", ["deep", "product"]),
        ("ghost", ["deep"]),
    ],
)
def test_rules_are_held_exactly(method, ways):
    honest, planted = net(*ways), net(*ways, first="bfloat16", second="float32")
    report = check(*training_step(honest, SECOND_NARROW, method=method), policy=SECOND_NARROW)
    report.raise_if_violated()
    assert not any("outside" in use.stage for use in report.summary)
    report = check(*training_step(planted, FIRST_WIDE, method=method), policy=FIRST_WIDE)
    assert is_violated_everywhere(report, ways)


def test_rules_on_eight_devices():
    mesh = mesh_of("explicit", data=8)
    rules = dp.ShardingRules(mesh, examples=("data",))
    planted = net("deep", "product", first="bfloat16", second="float32")
    with jax.set_mesh(mesh):
        step, model, state, *batch = training_step(
            planted, FIRST_WIDE, method="book_keeping", sharding=rules
        )
        batch = rules.shard_batch(tuple(batch))
        report = check(step, rules.shard(model), state, *batch, policy=FIRST_WIDE)
    assert is_violated_everywhere(report, ["deep", "product"])


def test_the_summary_says_what_ran_under_a_rule():
    report = check(
        *training_step(net("product"), FIRST_WIDE, method="per_example"), policy=FIRST_WIDE
    )
    dtypes = {use.stage: use.dtype for use in report.summary if use.kind == "contraction"}
    assert dtypes == {
        "forward": "bfloat16",
        "forward in first.*": "float32",
        "backward": "bfloat16",
        "backward in first.*": "float32",
    }


def test_a_step_built_without_the_rule():
    """Neither is a rule of another policy a licence, nor goes one unnoticed that is not there."""
    idle = ("module rule", "first.*=float32", "no call of a module under this rule")
    plain = dp.parse_policy("p=f32,c=bf16")
    assert found(net("product"), plain, against=FIRST_WIDE) == {idle}
    other = dp.parse_policy("p=f32,c=bf16,module:second.*=float32")
    wide = {(way, *WIDE_IN_SECOND) for way in ("forward", "backward")}
    assert found(net("product"), other, against=FIRST_WIDE) == {idle, *wide}


def test_a_parameter_that_is_used_outside_of_its_module():
    """What runs in the module is the rule's; where its weight is read, the policy's dtype holds."""

    def loss(model, x, label):
        return models.cross_entropy(model.first[0].weight @ model(x), label)

    mixed = ("forward", "bfloat16", "float32 x bfloat16, wider")
    assert mixed in found(net("product")._replace(loss=loss), FIRST_WIDE)


def test_operands_of_two_widths():
    """Half of a product in the compute dtype is not enough going forward."""

    def loss(model, x, label):
        y = lax.dot_general(model.layers[0].weight, x.astype(F32), (((1,), (0,)), ((), ())))
        return models.cross_entropy(y, label)

    case = models.mlp(depth=0)._replace(loss=loss)
    mixed = ("forward", "bfloat16", "bfloat16 x float32, wider")
    assert mixed in found(case, dp.parse_policy("p=f32,c=bf16"))


def test_a_loss_scale_keeps_the_dtypes_of_the_loss():
    policy = dp.parse_policy("p=f32,c=f16,o=f32,loss_scale=1024,module:first.*=float32")
    step = training_step(net("deep"), policy, method="book_keeping", microbatch_size=3)
    report = check(*step, policy=policy)
    report.raise_if_violated()
    dtypes = {(use.stage, use.dtype) for use in report.summary if use.kind == "contraction"}
    in_loss = {row for row in dtypes if "ward" in row[0]}
    assert in_loss == {
        *((way, "float16") for way in ("forward", "backward")),
        *((f"{way} in first.*", "float32") for way in ("forward", "backward")),
    }
