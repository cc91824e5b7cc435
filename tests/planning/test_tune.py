"""A measured choice: what is tried, what decides, what is kept, and what is never read."""

import json
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from eqx_dp.gradients import METHODS
from eqx_dp.gradients.methods import clipped_sum
from eqx_dp.planning import Tuning, trials
from eqx_dp.planning.candidates import sizes_around
from eqx_dp.planning.made_up import made_up
from eqx_dp.planning.trials import Runs, timed
from tests import models
from tests.training import runs

CASE = models.linear_regression()
BATCH = CASE.batch(8)
FEW = {"methods": ("ghost", "per_example"), "microbatch_sizes": (2, 8), "rounds": 1}
PLAN = dp.PrivacyPlan(sampling_prob=0.2, steps=10, noise_multiplier=1.0, delta=1e-5)


def grad_fn(**options):
    return dp.filter_clipped_grad(CASE.loss, l2_clip_norm=1.0, **options)


@pytest.fixture
def clock(monkeypatch):
    """Candidates are compiled and run once, and take as long as a test says."""
    seconds = {}

    def taken(runs, own, rounds, turn=None):
        return {name: [seconds.get(name, 1.0)] * rounds for name in runs}

    monkeypatch.setattr(trials, "timed", taken)
    return seconds


def close(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# End to end, by the real clock.


@pytest.mark.slow
def test_the_same_function_fixed_to_what_was_fastest():
    original = dp.filter_value_and_clipped_grad(CASE.loss, l2_clip_norm=0.3, normalize_by=4.0)
    tuned = dp.tune(original, CASE.model, *BATCH, **FEW)
    tuning = tuned.tuning
    tried = {(x.method, x.microbatch_size): x for x in tuning.trials}
    assert tuning.own == ("book_keeping", 8)  # what "auto" takes
    assert set(tried) == {tuning.own} | {(m, s) for m in FEW["methods"] for s in (2, 8)}
    assert all(x.problem == "" and x.compile_seconds > 0 for x in tuning.trials)
    best = min(tuning.trials, key=lambda x: x.seconds.median)
    assert (best.method, best.microbatch_size) == (tuning.method, tuning.microbatch_size)
    assert tuned.asked_for == (tuning.method, tuning.microbatch_size)
    explained = dp.explain(tuned, CASE.model, *BATCH)
    assert (explained.method, explained.microbatch_size) == tuned.asked_for

    close(tuned(CASE.model, *BATCH), original(CASE.model, *BATCH))
    close(eqx.filter_jit(tuned)(CASE.model, *BATCH), original(CASE.model, *BATCH))
    assert tuned.l2_norm_bound == original.l2_norm_bound
    for relation in dp.NeighboringRelation:
        assert tuned.sensitivity(relation) == original.sensitivity(relation)
    lines = str(tuning).splitlines()
    assert len(lines) == 2 + len(tuning.trials)
    assert (
        lines[-1] == f"chosen: {best.method}, {best.microbatch_size} examples at once on a device"
    )
    assert lines[1].startswith("*")
    assert "1.00 x" in lines[1]


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.exhaustive
def test_on_a_mesh_with_a_plan_from_shapes_alone(kind, clock):
    mesh = jax.make_mesh((4,), ("data",), (getattr(jax.sharding.AxisType, kind),))
    rules = dp.ShardingRules(mesh)
    slots = PLAN.sampler(40, seed=1, pad_to=4).capacity
    shapes = eqx.filter_eval_shape(lambda: (CASE.model, CASE.batch(slots)))
    clock["ghost", 2] = 0.5
    tuned = dp.tune(grad_fn(sharding=rules), shapes[0], *shapes[1], plan=PLAN, **FEW)
    assert tuned.asked_for == ("ghost", 2)
    assert tuned.sharding is rules
    model, batch = rules.shard(CASE.model), rules.shard_batch(CASE.batch(slots))
    with jax.set_mesh(mesh):
        mask = rules.shard_batch(np.arange(slots) > 5)
        found = tuned(model, *batch, is_padding_example=mask)
        with pytest.raises(ValueError, match="is_padding_example is missing"):
            tuned(model, *batch)
    few = [x[:6] for x in CASE.batch(slots)]
    close(jax.device_get(found), grad_fn()(CASE.model, *few))


@pytest.mark.slow
def test_a_loss_with_keys_and_integers():
    case = models.dropout()
    original = dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0)
    key = jax.random.key(1)
    tuned = dp.tune(original, case.model, *case.batch(4), key=key, methods=("ghost",), rounds=1)
    # The same keys, but not the same microbatches: each example has its own.
    close(tuned(case.model, *case.batch(4), key=key), original(case.model, *case.batch(4), key=key))


# Nothing of the batch is read.


def test_no_value_of_the_batch_is_read(clock):
    def used_up(x):
        x = jnp.array(x)
        x.delete()  # shape and dtype are still there
        return x

    case = models.dropout()
    original = dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0)
    batch, key, mask = jax.tree.map(
        used_up, (case.batch(4), jax.random.PRNGKey(5), np.zeros(4, bool))
    )
    options = {"key": key, "is_padding_example": mask, **FEW, "microbatch_sizes": (2,)}
    found = dp.tune(original, case.model, *batch, **options).tuning
    assert not any(x.problem for x in found.trials)
    with pytest.raises(ValueError, match="deleted"):
        dp.tune(original, case.model, *batch, batch_is_public=True, **options)


def test_what_is_made_up_has_the_shapes_and_nothing_else():
    like = {
        "floats": np.full((3, 2), np.nan),
        "narrow": jnp.full(4, 1e30, jnp.bfloat16),
        "complex": jnp.ones(2, jnp.complex64),
        "integers": jnp.arange(5),
        "flags": np.ones(2, bool),
        "keys": jax.random.split(jax.random.key(3), 2),
        "other": jax.random.key(3, impl="rbg"),
        "empty": jnp.zeros((0, 2)),
        "none": None,
        "shape": jax.ShapeDtypeStruct((2,), jnp.float16),
    }
    found = made_up(like)
    for name, leaf in like.items():
        if leaf is not None:
            assert found[name].shape == leaf.shape
            is_wide = leaf.dtype in (np.float64, np.int64)
            assert found[name].dtype == (np.float32 if is_wide else leaf.dtype)
    for name in ("floats", "narrow", "shape"):
        assert 0 < float(jnp.abs(found[name]).max()) < 10
    assert not np.any(found["integers"])
    assert not np.any(found["flags"])
    assert not np.any(jax.random.key_data(found["keys"]))
    jax.random.normal(found["other"])
    close(found["floats"], made_up(like)["floats"])


@pytest.mark.slow
def test_a_loss_that_needs_true_values_gets_public_ones(clock):
    def loss(model, x, y):
        y = eqx.error_if(y, y < 1, "y must be at least 1")
        return CASE.loss(model, x, y)

    original = dp.filter_clipped_grad(loss, l2_clip_norm=1.0)
    x, y = BATCH
    with pytest.raises(ValueError, match=r"(?s)ghost, 8 at once:.*batch_is_public=True"):
        dp.tune(original, CASE.model, x, y, **FEW)
    tuned = dp.tune(original, CASE.model, x, jnp.abs(y) + 1, batch_is_public=True, **FEW)
    assert not any(trial.problem for trial in tuned.tuning.trials)
    shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
    with pytest.raises(ValueError, match="shapes in the place of arrays"):
        dp.tune(original, CASE.model, x, shape, batch_is_public=True, **FEW)


# What is tried.


@pytest.mark.parametrize(
    ("own", "slots", "expected"),
    [
        (1, 1, [1]),
        (8, 8, [8, 2]),
        (64, 64, [64, 16, 4]),
        (24, 24, [24, 4, 1]),
        (4, 64, [4, 1, 16, 64]),
        (24, 88, [24, 4, 64, 88]),
        (64, 100, [64, 16, 100]),
    ],
)
def test_sizes_lie_around_the_engines_own(own, slots, expected):
    assert sizes_around(own, slots) == expected


@pytest.mark.slow
def test_what_was_asked_for_stays(clock):
    found = dp.tune(grad_fn(method="ghost"), CASE.model, *BATCH, rounds=1).tuning
    assert [(x.method, x.microbatch_size) for x in found.trials] == [("ghost", 8), ("ghost", 2)]
    found = dp.tune(grad_fn(microbatch_size=3), CASE.model, *BATCH, rounds=1).tuning
    assert {(x.method, x.microbatch_size) for x in found.trials} == {(m, 3) for m in METHODS}
    both = grad_fn(microbatch_size=3, method="ghost")
    assert dp.tune(both, CASE.model, *BATCH, rounds=1).asked_for == ("ghost", 3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"methods": ()}, "methods must name at least one"),
        ({"methods": "ghost"}, "methods must be a tuple"),
        ({"methods": ("auto",)}, "methods must name at least one"),
        ({"methods": ("fast",)}, "method must be one of"),
        ({"microbatch_sizes": (0,)}, "microbatch_size must be an integer"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"memory_limit": 0}, "memory_limit must be at least 1"),
        ({"file": "no/such/folder/tuning.json"}, "found no folder 'no/such/folder'"),
    ],
)
def test_bad_input_is_named(options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        dp.tune(grad_fn(), CASE.model, *BATCH, **options)


def test_where_nothing_can_be_timed(unchecked):
    with pytest.raises(ValueError, match="no examples in the batch"):
        dp.tune(grad_fn(), CASE.model, *CASE.batch(0))
    with pytest.raises(ValueError, match="call it outside"):
        jax.jit(lambda x: dp.tune(grad_fn(), CASE.model, x, BATCH[1]))(BATCH[0])
    with pytest.raises(ValueError, match="grad_fn must be what filter_clipped_grad"):
        dp.tune(CASE.loss, CASE.model, *BATCH)
    with pytest.raises(ValueError, match=r"Give its \.grad_fn\.$"):
        dp.plan_memory(runs.make(), runs.small_model(), runs.XS, runs.YS)


def test_several_hosts_are_told_to_share_a_file(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="There are 2 processes"):
        dp.tune(grad_fn(), CASE.model, *BATCH)


# What decides.


def fake(taken):
    """Times that follow a table; a run gives its name."""
    asked = []

    def turn(run):
        asked.append(run())
        return taken[run()]

    return turn, asked


def run_of(name):
    return lambda: name


def test_the_expected_time_counts_the_microbatches_that_are_expected():
    runs = {("a", 4): Runs(run_of("all"), run_of("first"), 0.25), ("b", 8): Runs(run_of("once"))}
    turn, _ = fake({"all": 10.0, "first": 2.0, "once": 5.0})
    assert timed(runs, ("b", 8), 3, turn) == {("a", 4): [4.0] * 3, ("b", 8): [5.0] * 3}


def test_the_hopeless_are_timed_once_and_the_own_choice_always():
    runs = {(name, 1): Runs(run_of(name)) for name in "abc"}
    turn, asked = fake({"a": 9.0, "b": 1.0, "c": 2.1})
    found = timed(runs, ("a", 1), 4, turn)
    assert {name: len(seconds) for (name, _), seconds in found.items()} == {"a": 4, "b": 4, "c": 1}
    assert asked.count("c") == 1


@pytest.mark.slow
def test_a_plan_tells_how_many_microbatches_are_expected(monkeypatch):
    seen = {}

    def taken(runs, own, rounds, turn=None):
        seen.update(runs)
        return {name: [1.0] for name in runs}

    monkeypatch.setattr(trials, "timed", taken)
    slots = PLAN.sampler(40, seed=1).capacity
    batch = CASE.batch(slots)
    dp.tune(
        grad_fn(), CASE.model, *batch, plan=PLAN, methods=("ghost",), microbatch_sizes=(2, slots)
    )
    expected = PLAN.sampling.of(slots).microbatches(2)
    run = seen["ghost", 2]
    assert run.share == pytest.approx((expected - 1) / (-(-slots // 2) - 1))
    assert 0 < run.share < 1
    assert seen["ghost", slots].first is None
    per_example = dp.filter_value_and_clipped_grad(CASE.loss, l2_clip_norm=1.0)
    dp.tune(per_example, CASE.model, *batch, plan=PLAN, methods=("ghost",), microbatch_sizes=(2,))
    count = [int(np.count_nonzero(run()[0].grad_norm)) for run in seen["ghost", 2][:2]]
    assert count == [slots, 1]


def test_one_that_fails_is_named_and_the_others_are_timed(monkeypatch, clock):
    def broken(traced, method, *rest):
        if method == "ghost":
            raise RuntimeError("this method is broken\nand says a lot")
        return clipped_sum(traced, method, *rest)

    monkeypatch.setattr("eqx_dp.gradients.calls.clipped_sum", broken)
    tuning = dp.tune(grad_fn(), CASE.model, *BATCH, **FEW).tuning
    problems = {x.method: x.problem for x in tuning.trials}
    assert problems["ghost"] == "RuntimeError: this method is broken"
    assert problems["per_example"] == ""
    assert "this method is broken" in str(tuning)
    with pytest.raises(ValueError, match=r"(?s)None of the methods.*ghost, 8 at once: RuntimeErr"):
        dp.tune(grad_fn(method="ghost"), CASE.model, *BATCH, rounds=1)


@pytest.mark.slow
def test_what_does_not_fit_is_not_timed(clock):
    case = models.mlp()
    original, batch = dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0), case.batch(64)
    options = {"methods": ("per_example",), "microbatch_sizes": (1, 64), "rounds": 1}
    sizes = {
        (x.method, x.microbatch_size): x.bytes[0]
        for x in dp.tune(original, case.model, *batch, **options).tuning.trials
    }
    small = sizes["per_example", 1]
    assert small < min(sizes["per_example", 64], sizes["book_keeping", 64])
    clock["per_example", 1] = 5.0  # the slowest, and all that fits
    tuned = dp.tune(original, case.model, *batch, memory_limit=small, **options)
    assert tuned.asked_for == ("per_example", 1)
    problems = {(x.method, x.microbatch_size): x.problem for x in tuned.tuning.trials}
    assert "by estimate, more than" in problems["per_example", 64]  # without compiling it
    assert "compiled, more than" in problems["book_keeping", 64]


# What is kept.


def test_a_choice_is_kept_in_a_file(tmp_path, clock, monkeypatch):
    file = tmp_path / "tuning.json"
    clock["ghost", 2] = 0.5
    tuned = dp.tune(grad_fn(), CASE.model, *BATCH, file=file, **FEW)
    assert list(tmp_path.iterdir()) == [file]
    monkeypatch.setattr(trials, "timed", None)  # nothing is measured again
    clock["ghost", 2] = 2.0
    again = dp.tune(grad_fn(), CASE.model, *BATCH, file=file, **FEW)
    assert again.tuning == tuned.tuning
    assert again.asked_for == ("ghost", 2)
    shapes = eqx.filter_eval_shape(lambda: (CASE.model, CASE.batch(8, seed=5)))
    assert dp.tune(grad_fn(), shapes[0], *shapes[1], file=file, **FEW).tuning == tuned.tuning
    for other, options, name in (
        (grad_fn(), {"batch": CASE.batch(9)}, "batch"),
        (grad_fn(policy=dp.load_policy("mixed_bfloat16")), {}, "policy"),
        (grad_fn(), {"plan": PLAN}, "padding"),
        (grad_fn(), {"methods": ("ghost",)}, "tried"),
        (dp.filter_clipped_grad(lambda m, x, y: m["bias"] * y, l2_clip_norm=1.0), {}, "loss"),
    ):
        options = {"batch": BATCH, **FEW, **options}
        batch = options.pop("batch")
        with pytest.raises(ValueError, match=rf"(?s)something else.*\n  {name}: .*Remove the file"):
            dp.tune(other, CASE.model, *batch, file=file, **options)
    stale = json.loads(file.read_text())
    stale["measured_for"]["devices"] = "1 abacus"
    file.write_text(json.dumps(stale))
    with pytest.raises(ValueError, match="devices: 1 abacus there, 1 cpu"):
        dp.tune(grad_fn(), CASE.model, *BATCH, file=file, **FEW)
    applied = Tuning.from_json(file.read_text()).apply(grad_fn())
    assert applied.asked_for == ("ghost", 2)


def test_a_tuning_that_is_none_is_refused(tmp_path, clock):
    text = dp.tune(grad_fn(), CASE.model, *BATCH, **FEW).tuning.to_json()
    good = json.loads(text)
    assert Tuning.from_json(text).to_json() == text
    bad = [
        "",
        "[" * 100_000,
        "[]",
        "{}",
        json.dumps(good | {"version": 2}),
        json.dumps(good | {"more": 1}),
        json.dumps({k: v for k, v in good.items() if k != "own"}),
        *(json.dumps(good | {"microbatch_size": x}) for x in (0, True, 1.5, "8", None)),
        *(json.dumps(good | {name: 3}) for name in ("method", "own", "trials", "measured_for")),
        json.dumps(good | {"trials": [{}]}),
        text.replace("1.0", "NaN", 1),
        text.replace("1.0", "-1.0", 1),
    ]
    for other in bad:
        assert other != text
        with pytest.raises(ValueError, match="tuning"):
            Tuning.from_json(other)
    file = tmp_path / "tuning.json"
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"tuning.json cannot be read: .*Measure again"):
        dp.tune(grad_fn(), CASE.model, *BATCH, file=file)
    unknown = Tuning.from_json(json.dumps(good | {"method": "fast"}))
    with pytest.raises(ValueError, match="method must be one of"):
        unknown.apply(grad_fn())


@pytest.mark.slow
def test_nothing_is_printed_unless_asked_for(capsys, clock):
    dp.tune(grad_fn(), CASE.model, *BATCH, **FEW)
    assert capsys.readouterr() == ("", "")
    dp.tune(grad_fn(), CASE.model, *BATCH, progress=True, **FEW)  # no terminal
    assert capsys.readouterr().err == ""
