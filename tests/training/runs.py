"""A run so small that a process of it costs little, for tests and for the processes they start."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqx_dp as dp

NUM_EXAMPLES = 64
SEED = 0x1234_5678_9ABC_DEF0_0FED_CBA9_8765_4321
XS = np.random.default_rng(0).normal(size=(NUM_EXAMPLES, 4)).astype(np.float32)
YS = (XS @ np.arange(4)).astype(np.float32)


def loss(model, x, y):
    return jnp.sum((model(x) - y) ** 2)


def plan_of(steps=10):
    # With much noise epsilon is worked out fast.
    return dp.PrivacyPlan(sampling_prob=0.25, steps=steps, noise_multiplier=20.0, delta=1e-5)


def small_model(width=2):
    return eqx.nn.Linear(4, width, key=jax.random.key(0))


def make(plan=None, optimizer=None, loss=loss, **options):
    options = {"num_examples": NUM_EXAMPLES, "seed": SEED, "l2_clip_norm": 1.0} | options
    optimizer = optax.adam(1e-2) if optimizer is None else optimizer
    return dp.make_step(loss, optimizer, plan_of() if plan is None else plan, **options)


def trainer(directory, step=None, data=(XS, YS), **options):
    options = {"progress": False, "save_every": 2} | options
    return dp.Trainer(make() if step is None else step, data, directory=directory, **options)


def leaves(tree):
    """All arrays of a tree, as numpy's; of keys, their words."""
    found = jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in found
    ]


def assert_same(one, other):
    """Bit for bit."""
    for a, b in zip(leaves(one), leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def rules_of(kind, devices=8, **options):
    """The weight over `model`, which has two devices if there are that many."""
    over_model = 2 if devices > 1 else 1
    axis_type = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh(
        (devices // over_model, over_model),
        ("data", "model"),
        axis_types=(axis_type,) * 2,
        devices=jax.devices()[:devices],
    )
    spec = jax.sharding.PartitionSpec("model", None)
    options = {"params": (("weight", spec),), "accumulators": "examples"} | options
    return dp.ShardingRules(mesh, **options)


def assert_agrees(directory, plan):
    """The statement of privacy names a checkpoint that is there; returns its step."""
    if not (directory / "privacy.json").exists():
        return 0
    statement = json.loads((directory / "privacy.json").read_text())
    latest = statement["steps_done"]
    assert (directory / f"{latest:08d}" / "files.json").exists()
    assert statement["epsilon"] == plan.epsilon(latest)
    assert statement["plan"] == json.loads(plan.to_json())
    return latest


def latest(directory):
    """The folder of the checkpoint that counts."""
    done = json.loads((directory / "privacy.json").read_text())["steps_done"]
    return directory / f"{done:08d}"
