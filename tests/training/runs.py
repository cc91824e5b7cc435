"""Runs so small that a process of one costs little, for tests and for the processes they start."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors import safe_open

import eqx_dp as dp
from tests.sharding.losses import mesh_of

NUM_EXAMPLES = 64
SEED = 0x1234_5678_9ABC_DEF0_0FED_CBA9_8765_4321
XS = np.random.default_rng(0).normal(size=(NUM_EXAMPLES, 4)).astype(np.float32)
YS = (XS @ np.arange(4)).astype(np.float32)


def loss(model, x, y):
    return jnp.sum((model(x) - y) ** 2)


def zero_loss(model, x, y):
    """The gradient is zero, so noise alone moves the model."""
    return 0.0 * loss(model, x, y)


def plan_of(steps=10):
    # With much noise epsilon is computed fast.
    return dp.PrivacyPlan(sampling_prob=0.25, steps=steps, noise_multiplier=20.0, delta=1e-5)


def small_model(width=2, **options):
    return eqx.nn.Linear(4, width, key=jax.random.key(0), **options)


def make(plan=None, optimizer=None, loss=loss, **options):
    options = {"num_examples": NUM_EXAMPLES, "l2_clip_norm": 1.0} | options
    optimizer = optax.adam(1e-2) if optimizer is None else optimizer
    return dp.make_step(loss, optimizer, plan_of() if plan is None else plan, **options)


def seeded(*args, **options):
    """A step whose runs repeat."""
    return make(*args, **({"seed": SEED} | options))


def trainer(directory, step=None, data=(XS, YS), **options):
    options = {"progress": False, "save_every": 2} | options
    return dp.Trainer(make() if step is None else step, data, directory=directory, **options)


def batch_of(step, t, data=(XS, YS)):
    """What a step is called with behind its state."""
    indices, mask = step.sampler().batch(t)
    *batch, mask = step.shard_batch((*(x[indices] for x in data), mask))
    return batch, {"is_padding_example": mask}


def states_of(step, model, count, data=(XS, YS)):
    """The states after each of the first steps, taken without a trainer."""
    state = step.init(model)
    for t in range(count):
        batch, mask = batch_of(step, t, data)
        state = step(state, *batch, **mask)
        yield state


def leaves(tree):
    """All arrays of a tree, as numpy's; of keys, their words."""
    found = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array | np.ndarray)]
    assert found
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in found
    ]


def assert_same(one, other):
    """Bit for bit, shapes and dtypes included."""
    for a, b in zip(leaves(one), leaves(other), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def rules_of(kind, devices=8, **options):
    """The weight over `model`, which has two devices if there are that many."""
    over_model = 2 if devices > 1 else 1
    mesh = mesh_of(kind.lower(), data=devices // over_model, model=over_model)
    spec = jax.sharding.PartitionSpec("model", None)
    options = {"params": (("weight", spec),), "accumulators": "examples"} | options
    return dp.ShardingRules(mesh, **options)


# What is in a directory.


def entries(directory):
    """What each start wrote to the ledger, in their order."""
    found = [json.loads(file.read_text()) for file in (directory / "ledger").glob("*.json")]
    return sorted(found, key=lambda entry: entry["start"])


def stated(directory):
    return json.loads((directory / "privacy.json").read_text())


def stated_in(file):
    """The statement in a file of `save_model`."""
    with safe_open(file, "numpy") as opened:
        return json.loads(opened.metadata()["privacy"])


def released(directory):
    """The ledger's sum, which the statement has to agree with."""
    steps = sum(entry["steps"] for entry in entries(directory))
    statement = stated(directory)
    assert statement["steps_released"] == steps
    plan = dp.PrivacyPlan.from_json(json.dumps(statement["plan"]))
    assert statement["epsilon"] == plan.epsilon(steps)
    assert statement["delta"] == plan.delta
    return steps


def saved(directory):
    """The numbers of the checkpoints, as orbax has committed them."""
    folder = directory / "checkpoints"
    return sorted(int(x.name) for x in folder.iterdir() if x.name.isdecimal())


class Recording:
    """Which samples were read and which noise was added, in files that outlive a killed process.

    It is a source of data. The step's optimizer keeps the last gradient as it is, and the gradient
    is noise alone.
    """

    def __init__(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def step(self, plan=None, **options):
        optimizer = optax.chain(optax.trace(decay=0.0), optax.sgd(0.1))
        return make(plan, **({"optimizer": optimizer, "loss": zero_loss} | options))

    def trainer(self, directory, step):
        """A trainer whose samples and noise are noted."""
        return trainer(directory, step, self, callbacks=[self.note])

    def _note(self, kind, host, numbers):
        with (self.folder / f"{kind}-{host}.jsonl").open("ab", buffering=0) as file:
            file.write(f"{json.dumps(numbers)}\n".encode())

    def _noted(self, kind, host):
        file = self.folder / f"{kind}-{host}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [tuple(json.loads(line)) for line in lines]

    def __len__(self):
        return NUM_EXAMPLES

    def __getitem__(self, indices):
        if len(indices) > 1:  # one alone is looked at first, to learn what examples look like
            self._note("samples", jax.process_index(), sorted(map(int, indices)))
        return XS[indices], YS[indices]

    def note(self, event):
        """Notes the noise of a step that was taken."""
        arrays = jax.tree.leaves(event.state.opt_state[1][0].trace)
        parts = [x if x.is_fully_addressable else x.addressable_data(0) for x in arrays]
        noise = np.concatenate([np.ravel(np.asarray(part)) for part in parts])
        self._note("noises", jax.process_index(), noise.tolist())

    @property
    def noises(self):
        return self._noted("noises", 0)

    @property
    def taken(self):
        """How many steps were taken, at least, by all starts."""
        return len(self.noises)

    def assert_fresh(self, hosts=1):
        """No two steps had the same noise or the same sample; hosts had one noise."""
        assert len(set(self.noises)) == len(self.noises)
        assert np.std(np.ravel(self.noises)) > 0.1  # there was some
        for host in range(hosts):
            samples = self._noted("samples", host)
            assert len(set(samples)) == len(samples) >= len(self._noted("noises", host))
        assert all(set(self._noted("noises", host)) & set(self.noises) for host in range(hosts))
