"""Public functions refuse arguments of wrong types, and the error names the argument."""

import functools

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import eqx_dp as dp

MODEL = eqx.nn.Linear(4, 1, key=jax.random.key(0))
X, Y = np.full((8, 4), 0.7531, np.float32), np.zeros((8, 1), np.float32)
PLAN, RULES = dp.PrivacyPlan(0.25, 4, 20.0, 1e-5), jax.make_mesh((1,), ("data",))
SGD = optax.sgd(0.1)


def loss(model, x, y):
    return ((model(x) - y) ** 2).sum()


def clipped(fun=loss, **options):
    return dp.filter_clipped_grad(fun, **({"l2_clip_norm": 1.0} | options))


def made(loss=loss, optimizer=SGD, plan=PLAN, **options):
    options = {"num_examples": 8, "seed": 1, "l2_clip_norm": 1.0} | options
    return dp.make_step(loss, optimizer, plan, **options)


GRAD_FN, STEP = clipped(), made()
STATE, MASK = STEP.init(MODEL), np.zeros(8, bool)
BOUND = functools.partial(GRAD_FN, MODEL)


def trained(step=STEP, data=(X, Y), **options):
    return dp.Trainer(step, data, **options)


def saved(model=MODEL, file="/nowhere/a.safetensors", **options):
    dp.save_model(file, model, **options)


def planned(**options):
    dp.plan_memory(GRAD_FN, MODEL, X, Y, compiled=False, **options)


PLANNED = {"sampling_prob": 0.1, "steps": 3, "noise_multiplier": 1.0, "delta": 1e-5}
CALIBRATED = {"sampling_prob": 0.1, "steps": 3, "delta": 1e-5}
NUMBERS = (None, "x", object(), True, [1], np.ones(3), X)
# What the first part of the error has to hold, the call, and what it is given.
CASES = [
    ("The first argument", lambda x: clipped(x), ("x", 1, GRAD_FN)),
    ("l2_clip_norm", lambda x: clipped(l2_clip_norm=x), (None, "x", True, X, {"a": X})),
    ("filter_spec", lambda x: clipped(filter_spec=x)(MODEL, X, Y), (3, "x", {"a": X})),
    ("policy", lambda x: clipped(policy=x), ("float32", 1, np.float32, X)),
    ("sharding", lambda x: clipped(sharding=x), ("data", RULES, X)),
    ("has_aux", lambda x: clipped(has_aux=x), ("yes", None, 1)),
    ("keep_batch_dim", lambda x: clipped(keep_batch_dim=x), ("yes", None, 1)),
    ("rescale_to_unit_norm", lambda x: clipped(rescale_to_unit_norm=x), ("yes", None, 1)),
    ("normalize_by", lambda x: clipped(normalize_by=x), NUMBERS),
    ("microbatch_size", lambda x: clipped(microbatch_size=x), NUMBERS[1:]),
    ("method", lambda x: clipped(method=x), (None, "gost", 1, ["ghost"], X)),
    ("Nothing is trainable", lambda x: GRAD_FN(x, X, Y), (None, "x", 3, loss)),
    ("batch argument 0", lambda x: GRAD_FN(MODEL, x, Y), ("x", 3, [[1.0]] * 8)),
    ("is_padding_example", lambda x: GRAD_FN(MODEL, X, Y, is_padding_example=x), ("x", 3, X)),
    ("neighboring_relation", GRAD_FN.sensitivity, (None, "x", 1)),
    ("grad_fn", lambda x: dp.explain(x, MODEL, X), (None, "x", loss, BOUND)),
    ("grad_fn", lambda x: dp.plan_memory(x, MODEL, X), (None, "x", loss, BOUND)),
    ("grad_fn", lambda x: dp.tune(x, MODEL, X), (None, "x", loss, BOUND)),
    ("plan", lambda x: dp.explain(GRAD_FN, MODEL, X, Y, plan=x), ("x", 1)),
    ("plan", lambda x: dp.tune(GRAD_FN, MODEL, X, Y, plan=x), ("x", 1)),
    *((x, lambda value, x=x: dp.PrivacyPlan(**PLANNED | {x: value}), NUMBERS) for x in PLANNED),
    ("epsilon", lambda x: dp.PrivacyPlan.calibrate(epsilon=x, **CALIBRATED), NUMBERS),
    ("text", dp.PrivacyPlan.from_json, (None, 1, {})),
    ("num_examples", lambda x: PLAN.sampler(x, seed=1), NUMBERS),
    ("seed", lambda x: PLAN.sampler(8, seed=x), ("x", 1.5, [1])),
    ("grad_fn", lambda x: PLAN.privatizer(x, key=1), (None, "x", loss, BOUND)),
    ("key", lambda x: PLAN.privatizer(GRAD_FN, key=x), ("x", 1.5)),
    ("an optimizer", lambda x: PLAN.privatizer(clipped(), key=1).init(x), ("x", 3, loss)),
    ("updates", lambda x: dp.apply_updates(MODEL, x), (3, "x", X, MODEL.weight)),
    ("stddev", lambda x: dp.gaussian_privatizer(stddev=x, key=1), NUMBERS),
    ("name_or_path", dp.load_policy, (None, 1, object(), b"x", ["float32"])),
    ("text", dp.parse_policy, (None, 1, ["x"])),
    ("policy", lambda x: dp.apply_policy(MODEL, x), ("float32", 1)),
    ("dtypes.params", lambda x: dp.Policy(x, "float32", "float32"), (None, "x", 3, int)),
    ("modules.match", lambda x: dp.ModuleRule(x, "float32"), (None, 1, ["a"])),
    ("loss_scale", lambda x: dp.LossScale(x), (None, 1, "x", ["a"])),
    ("mesh", dp.ShardingRules, (None, "x", 1)),
    ("loss", lambda x: made(loss=x), (None, "x", 3)),
    ("optimizer", lambda x: made(optimizer=x), (None, "x", optax.sgd)),
    ("plan", lambda x: made(plan=x), (None, "x", 3)),
    ("num_examples", lambda x: made(num_examples=x), NUMBERS),
    ("seed", lambda x: made(seed=x), ("x", 1.5, [1], object())),
    ("ema", lambda x: made(ema=x), NUMBERS[1:]),
    ("Nothing is trainable", STEP.init, ("x", 3, loss)),
    ("starting model", STEP.init, (None,)),
    ("init_model", lambda x: STEP.init(init_model=x), ("x", 3, MODEL.weight)),
    ("shared", lambda x: made(shared=x), (None, "x", 1)),
    ("read_ahead", lambda x: trained(read_ahead=x), NUMBERS),
    ("records", dp.Records, (None, "x", 3, {})),
    ("decode", lambda x: dp.Records([1], x), ("x", 3)),
    ("state", lambda x: STEP(x, X, Y, is_padding_example=MASK), (None, "x", MODEL)),
    ("is_padding_example is missing", lambda x: STEP(STATE, X, Y, is_padding_example=x), (None,)),
    ("step", lambda x: trained(x), (None, "x", GRAD_FN)),
    ("data", lambda x: trained(data=x), (None, "x", 3, ())),
    ("directory", lambda x: trained(directory=x), (3, object(), b"x", ["x"])),
    ("save_every", lambda x: trained(save_every=x), NUMBERS),
    ("keep", lambda x: trained(keep=x), NUMBERS),
    ("evaluate_every", lambda x: trained(evaluate_every=x), NUMBERS[1:]),
    ("evaluate", lambda x: trained(evaluate=x), ("x", 3)),
    ("callbacks", lambda x: trained(callbacks=x), (3, "x", [3], None)),
    ("progress", lambda x: trained(progress=x), ("x", None)),
    ("steps", lambda x: trained().run(MODEL, steps=x), ("x", 1.5, True)),
    ("source", lambda x: dp.load_model(x, like=MODEL), (None, 3)),
    ("file", lambda x: saved(file=x), (None, 3, "x.bin", "/nowhere/a.safetensors")),
    ("model", lambda x: saved(x), (None, "x", 3)),
    ("policy", lambda x: saved(policy=x), ("float32", 3)),
    ("privacy", lambda x: saved(privacy=x), (3, object())),
    ("optimizer", lambda x: planned(optimizer=x), ("x", 3)),
    ("limit", lambda x: planned(limit=x), NUMBERS[1:]),
    ("policy", lambda x: dp.check_precision(GRAD_FN, MODEL, X, Y, policy=x), (None, "x", 3)),
    ("fn", lambda x: dp.check_precision(x, policy=dp.load_policy("float32")), (None, "x", 3)),
    ("fn", lambda x: dp.check_privacy(x, X, private=(0,)), (None, "x", 3)),
    ("plan", lambda x: dp.check_privacy(loss, X, private=(0,), plan=x), ("x", 3)),
]


@pytest.mark.parametrize(("name", "call", "wrong"), CASES, ids=[name for name, *_ in CASES])
def test_the_first_error_is_ours_and_names_the_argument(name, call, wrong, unchecked):
    for value in wrong:
        with pytest.raises(ValueError, match=r".") as caught:
            call(value)
        text = str(caught.value)
        assert name in text.split(";")[0], f"{value!r}: {text}"
        assert "0.7531" not in text  # no data
        assert "Linear(" not in text  # no model
