"""A step does what the loop of the README does, bit for bit, and is compiled once."""

import contextlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_dp as dp
from eqx_dp.privacy import GaussianPrivatizerState, fold_text, key_from_secret, stream_of
from tests.sharding.losses import mesh_of
from tests.tiers import curated
from tests.training import runs
from tests.training.runs import NUM_EXAMPLES, XS, YS, assert_same, leaves, seeded, small_model


def run(step, model, steps=3):
    *_, state = runs.states_of(step, model, steps)
    return state


def key_of(stream):
    """The key that a seeded step has for the noise, or of which the others are made."""
    return key_from_secret(seeded()._secret_of(0), stream)


@contextlib.contextmanager
def counted_compilations():
    """How long each compilation within took."""
    durations = []

    def note(name, seconds, **rest):
        if name == "/jax/core/compile/backend_compile_duration":
            durations.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield durations
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def test_a_step_is_the_loop_written_out():
    plan, model, steps = runs.plan_of(), small_model(), 4
    adam = optax.adamw(1e-2)
    expected_batch = plan.sampling_prob * NUM_EXAMPLES
    grad_fn = dp.filter_clipped_grad(runs.loss, l2_clip_norm=1.0, normalize_by=expected_batch)
    step = seeded(plan, adam)
    optimizer = optax.chain(plan.privatizer(grad_fn), adam)
    sampler = step.sampler()

    @eqx.filter_jit
    def by_hand(model, opt_state, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), opt_state

    expected, opt_state = model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    opt_state = (GaussianPrivatizerState(stream_of(key_of("noise"))), *opt_state[1:])
    for t in range(steps):
        indices, mask = sampler.batch(t)
        expected, opt_state = by_hand(expected, opt_state, XS[indices], YS[indices], mask)

    state = run(step, model, steps)
    assert int(state.step) == steps
    assert_same(state.model, expected)
    assert_same(state.opt_state[1], opt_state[1])
    assert_same(state.opt_state[0].stream.counter, opt_state[0].stream.counter)
    assert not np.array_equal(leaves(state.model)[0], leaves(model)[0])


CORRELATED = {
    "sampling": dp.sampling.CyclicPoisson(0.5, 4),
    "noise": dp.Banded(strategy=(1.0, 0.5, 0.2)),
}


@pytest.mark.parametrize(
    "how", curated([{"sampling_prob": 0.25}, CORRELATED], [CORRELATED]), ids=["alone", "kept"]
)
def test_a_step_uses_up_its_state_and_not_the_caller_s_model(how):
    plan = dp.PrivacyPlan(steps=8, noise_multiplier=20.0, delta=1e-5, **how)
    model, step = small_model(), seeded(plan)
    before, state = leaves(model), step.init(model)
    after = step(state, XS[:4], YS[:4], is_padding_example=np.zeros(4, bool))
    for kept, tree in ((False, (state.model, state.opt_state)), (True, after)):
        arrays = jax.tree.leaves(eqx.filter(tree, eqx.is_array))
        assert [x.is_deleted() for x in arrays] == [not kept] * len(arrays)
    assert_same(before, leaves(model))


def rules_of_length_one():
    """Explicit axes, one of them of length one: XLA gives such shardings other names."""
    mesh = mesh_of("explicit", data=8, model=1)
    return dp.ShardingRules(mesh, params=(("weight", jax.P(None, "model")),))


RULES = {
    "none": lambda: None,
    "auto": lambda: runs.rules_of("Auto"),
    "explicit": lambda: runs.rules_of("Explicit"),
    "of length one": rules_of_length_one,
}


@pytest.mark.parametrize("name", curated(RULES, ["none"]))
def test_a_step_is_traced_and_compiled_once(name):
    traces = 0

    def counting(model, x, y):
        nonlocal traces
        traces += 1
        return runs.loss(model, x, y)

    rules = RULES[name]()
    # Sums over rows and columns are what the compiler would put elsewhere, if it was left to it.
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=1)
    optimizer = optax.chain(factored, optax.adamw(1e-2))
    step = seeded(loss=counting, optimizer=optimizer, sharding=rules)
    state, seen = step.init(small_model()), []
    where = [x.sharding for x in jax.tree.leaves(eqx.filter(state, eqx.is_array))]
    for t in range(4):
        batch, mask = runs.batch_of(step, t)
        with counted_compilations() as compiled:
            state = step(state, *batch, **mask)
        seen.append((traces, len(compiled)))
    assert seen == [(seen[0][0], 1)] + [(seen[0][0], 0)] * 3
    assert where == [x.sharding for x in jax.tree.leaves(eqx.filter(state, eqx.is_array))]
    if rules is not None:
        moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim == 2]
        assert any("data" in str(x.sharding.spec) for x in moments) == (name != "of length one")
        alone = run(seeded(optimizer=optimizer), small_model(), 4).model
        np.testing.assert_allclose(state.model.weight, alone.weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("views", curated([1, 3], [3]))
def test_a_loss_gets_a_key_an_example_and_step(views):
    """Its keys are those of `grad_fn` for (seed, t): one root a step, split over examples."""
    plan, model = dp.PrivacyPlan(0.25, 3, 0.0, 1e-5), small_model()

    def keyed(model, x, key):
        return model.weight[0, 0] * jax.random.normal(key) + 0 * x[0]

    options = {"loss": keyed, "optimizer": optax.sgd(1.0), "l2_clip_norm": np.inf}
    step = seeded(plan, **options, augmentations=views)
    sampler, seen = step.sampler(), []
    state = step.init(model)
    for t in range(2):
        indices, mask = sampler.batch(0, peek=True)  # the same examples: only the keys differ
        before = float(state.model.weight[0, 0])
        x = np.ones((len(indices), 4), np.float32)
        state = step(state, x, is_padding_example=mask)
        seen.append(before - float(state.model.weight[0, 0]))
        root = jax.random.fold_in(fold_text(key_of("step"), "loss"), t)
        keys = jax.random.split(root, len(indices))
        if views > 1:
            keys = jax.vmap(lambda key: jax.random.split(key, views))(keys)
        drawn = np.asarray(jnp.vectorize(jax.random.normal)(keys)).reshape(len(mask), -1)
        drawn = drawn.mean(axis=1)[~mask]
        assert len(set(drawn.tolist())) == len(drawn)
        np.testing.assert_allclose(seen[-1], drawn.sum() / (0.25 * NUM_EXAMPLES), rtol=1e-4)
    assert seen[0] != seen[1]


def test_without_noise_and_bound_it_is_ordinary_training():
    plan, model = dp.PrivacyPlan(0.25, 3, 0.0, 1e-5), small_model()
    step = seeded(plan, optax.sgd(0.01), l2_clip_norm=np.inf)
    state, sampler = run(step, model), step.sampler()

    weight, bias = (np.asarray(leaf, np.float64) for leaf in (model.weight, model.bias))
    for t in range(3):
        indices, mask = sampler.batch(t)
        x, y = XS[indices[~mask]], YS[indices[~mask]]
        slope = 2 * (x @ weight.T + bias - y[:, None]) / (0.25 * NUM_EXAMPLES)
        weight, bias = weight - 0.01 * slope.T @ x, bias - 0.01 * slope.sum(0)
    np.testing.assert_allclose(state.model.weight, weight, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.model.bias, bias, rtol=1e-5, atol=1e-6)


def test_a_paired_model_needs_the_policy_in_the_step(tmp_path):
    policy = dp.load_policy("mixed_bfloat16")
    model = dp.apply_policy(small_model(), policy)
    with pytest.raises(ValueError, match="Give the policy to make_step as well"):
        runs.trainer(tmp_path / "run", seeded()).run(init_model=lambda: model)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="float32"):
        seeded(policy=dp.load_policy("float32")).init(model)
    seeded(policy=policy).init(model)


def test_the_compiled_program_holds_no_key():
    """It may be printed, and may be kept in a cache on disk."""

    def keyed(model, x, y, key):
        return runs.loss(model, x, y) * jax.random.uniform(key)

    def lowered(seed):
        step = seeded(loss=keyed, seed=seed)
        state = step.init(small_model())
        return step.lower(state, XS, YS, is_padding_example=np.zeros(64, bool)).as_text()

    assert lowered(1) == lowered(2)


def test_a_state_that_was_used_up_is_named():
    step, mask = seeded(), np.zeros(4, bool)
    used = step.init(small_model())
    state = step(used, XS[:4], YS[:4], is_padding_example=mask)
    advice = "Go on with the state that the step returned"
    with pytest.raises(ValueError, match=rf"state\.model\.weight and \d+ more: .*{advice}"):
        step(used, XS[:4], YS[:4], is_padding_example=mask)
    with pytest.raises(ValueError, match=r"model\.weight and 1 more: the array is gone"):
        step.init(used.model)
    copied = jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, state)
    after = step(state, XS[:4], YS[:4], is_padding_example=mask)
    assert_same(after, step(copied, XS[:4], YS[:4], is_padding_example=mask))


@pytest.mark.slow
def test_a_batch_may_be_filled_anew_after_the_call():
    """JAX reads numpy arrays where they lie, and a step may be under way when it returns."""

    def trained(*, spoil):
        step = seeded(loss=lambda model, x: jnp.sum(model(x) ** 2))
        state = step.init(eqx.nn.MLP(512, 4, 1024, 2, key=jax.random.key(0)))
        x, rng = np.zeros((64, 512), np.float32), np.random.default_rng(0)
        for _ in range(4):
            x[:] = rng.normal(size=x.shape)
            state = step(state, x, is_padding_example=np.zeros(len(x), bool))
            if spoil:
                x[:] = 1e3
        return state.model

    assert_same(trained(spoil=False), trained(spoil=True))


def test_a_step_is_lowered_for_a_tpu_and_an_ensemble_has_a_key_for_each_model():
    step, model = runs.make(optimizer=optax.sgd(0.1)), small_model()

    def take(state):
        return step(state, XS, YS, is_padding_example=np.zeros(64, bool))

    jax.jit(take).trace(step.init(model)).lower(lowering_platforms=("tpu",))
    with pytest.raises(ValueError, match="init is under vmap: 3 models would get one key"):
        jax.vmap(lambda rate: (rate, step.init(model)))(jnp.ones(3))
    with pytest.raises(ValueError, match="init draws secrets, which no compiled program may hold"):
        eqx.filter_jit(step.init)(model)
    states = jax.tree.map(lambda *x: jnp.stack(x), *(step.init(model) for _ in range(3)))
    weights = np.asarray(jax.vmap(take)(states).model.weight)
    assert len({weight.tobytes() for weight in weights}) == 3
