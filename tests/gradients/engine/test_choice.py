"""The method and the microbatch that are chosen: by brute force, and the same by all who ask."""

import math
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_dp as dp
from eqx_dp.gradients import choice, described
from eqx_dp.gradients.choice import DeviceBatch, LeafCost, Work, choose
from eqx_dp.planning.step import planned_step
from eqx_dp.privacy import PoissonSampler, SampleSize, Sampling
from tests import models

GHOST = LeafCost(("contraction",), "factored", 1e3, 1e4, 100, "")


def kept(entries, met=100):
    return LeafCost(("contraction",), "formed", 2 * entries, 1e4, met + 4 * entries, "")


UNUSED = LeafCost((), "unused", 0, 0, 0, "")
METHODS = ("book_keeping", "per_example", "ghost")


def batch_of(num_examples, prob):
    slots = PoissonSampler(num_examples, prob, seed=1).capacity
    return DeviceBatch(slots, Sampling(prob, 1e-12).of(slots))


def chosen(batch, *, cost=GHOST, entries=10_000, flops=1e6, method="auto", size=None):
    return choose([cost], [entries], flops, 10, batch, method, size)


def of_one_by_hand(method, flops, entries, size):
    """Of one leaf by inner products: for one example of so many at once."""
    alone = 1.25 if size == 1 else 1
    if method == "per_example":
        return alone * (flops + 2 * entries + 16 * 12 * entries)
    return alone * (flops * (5 / 3 if method == "ghost" else 1) + 1e3 + 16 * 11 * GHOST.bytes / 4)


def work_by_hand(sample, slots, of_one, entries, size):
    """Sizes of samples one by one: microbatches that hold an example, slots that they compute."""
    total = Work(0.0, 0.0, 0.0, 500.0 * entries)
    devices = 1 if sample is None else sample.slots // slots
    for of_all in range(slots * devices + 1):
        weight = probability(sample, slots * devices, of_all)
        drawn = -(-of_all // devices)
        count = -(-drawn // size)
        total = Work(
            total.gradient + weight * of_one * drawn,
            total.padding + weight * of_one * (count * min(size, slots) - drawn),
            total.passes + weight * count * (96 * entries + 1e6),
            total.noise,
        )
    return total


def probability(sample, slots, drawn):
    if sample is None:
        return float(drawn == slots)
    n, q = sample.num_examples, sample.sampling_prob
    each = [math.comb(n, k) * q**k * (1 - q) ** (n - k) for k in range(n + 1)]
    return sum(each[slots:]) if drawn == slots else (each[drawn] if drawn <= n else 0.0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 3, 8, 20, 100])
@pytest.mark.parametrize(
    "batch",
    [
        DeviceBatch(20, SampleSize(20, 24, 0.3)),
        DeviceBatch(5, SampleSize(20, 24, 0.3)),  # the first of four devices
        DeviceBatch(9, SampleSize(9, 9, 1.0)),
        DeviceBatch(20),
    ],
    ids=str,
)
def test_work_is_that_of_all_sample_sizes(batch, size, method):
    found = chosen(batch, method=method, size=size, entries=70, flops=4e3).work
    of_one = of_one_by_hand(method, 4e3, 70, min(size, batch.slots))
    expected = work_by_hand(batch.sample, batch.slots, of_one, 70, size)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-6)
    assert found.total == pytest.approx(sum(expected))
    assert min(found) >= 0


@pytest.mark.parametrize("flops", [0.0, 1e3, 1e6, 1e8])
@pytest.mark.parametrize("entries", [10, 10_000, 10**6])
@pytest.mark.parametrize(
    ("num_examples", "prob"),
    [(60_000, 64 / 60_000), (60_000, 256 / 60_000), (127, 1.0), (7, 1.0), (20, 0.3), (10**5, 1e-6)],
)
def test_the_least_work_of_all_sizes(num_examples, prob, entries, flops):
    batch = batch_of(num_examples, prob)
    found = chosen(batch, entries=entries, flops=flops)
    size = found.microbatch_size or batch.slots
    best = math.inf
    for method in ("book_keeping",):
        totals = {
            size: chosen(batch, entries=entries, flops=flops, method=method, size=size)
            for size in range(1, batch.slots + 1)
        }
        room = 30 * 2**20 - 4 * entries
        fitting = {s: its.work.total for s, its in totals.items() if s * its.held <= room}
        # Of the sizes that are looked at the best; of all it is next to that.
        even = [s for s in range(2, batch.slots + 1, 2) if batch.slots % s == 0]
        looked_at = [s for s in fitting if s in (1, 2, 4, batch.slots, *even) or s % 8 == 0]
        best = min(best, *(fitting[s] for s in looked_at))
        assert found.work.total <= 1.02 * min(fitting.values())
        if found.method == method:
            assert found.work == totals[size].work
    assert found.work.total == best


def test_a_plan_that_takes_every_example_goes_at_once():
    for num_examples in (7, 8, 127, 1000):
        assert chosen(batch_of(num_examples, 1.0)).microbatch_size is None


def test_costly_examples_go_two_by_two_and_cheap_ones_together():
    batch = batch_of(60_000, 64 / 60_000)
    assert chosen(batch, flops=1e10).microbatch_size == 2
    assert chosen(batch_of(60_000, 0.1 / 60_000), flops=1e10).microbatch_size == 1
    assert 64 < (chosen(batch, flops=1.0, entries=10**6).microbatch_size or 0) < batch.slots


def with_room(monkeypatch, examples, *, entries):
    """Beside the sums of so many entries."""
    monkeypatch.setattr(choice, "_CPU_SHARE", examples * GHOST.bytes + 4 * entries)


@pytest.mark.parametrize("prob", [1.0, 0.5, 0.01])
def test_no_more_is_held_than_fits(monkeypatch, prob):
    batch = batch_of(1000, prob)
    for room in (1, 3, 7, 9, 20):
        with_room(monkeypatch, room, entries=10**6)
        for flops in (1.0, 1e6):
            size = chosen(batch, flops=flops, entries=10**6).microbatch_size or batch.slots
            assert size <= max(2, room)  # two at once, however large
        most = max(2, 2 ** int(math.log2(room)))
        assert (
            chosen(DeviceBatch(batch.slots), entries=10**6).microbatch_size == most
            or batch.slots <= room
        )


@pytest.mark.parametrize(("fitting", "size"), [(0.9, None), (1, 1), (2, 2), (3, 2), (8, 2)])
def test_two_examples_at_once_however_large(monkeypatch, fitting, size):
    """On a CPU they take less time than one by one; two must fit into the memory that there is."""
    monkeypatch.setattr(choice, "device_memory", lambda: int(fitting * 2**30 / 0.4) + 9)
    found = choose([GHOST], [10_000], 1e10, 2**30, DeviceBatch(8), "auto", None)
    if size is None:
        assert found.method == "ghost"
    else:
        assert (found.method, found.microbatch_size) == ("book_keeping", size)


def test_room_for_a_batch_of_another_platform(monkeypatch):
    """There memory is what the device says, and a microbatch costs launches."""
    stats = {"bytes_limit": 100 * GHOST.bytes}
    device = types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert chosen(DeviceBatch(1000)).microbatch_size == 32
    assert (chosen(batch_of(1000, 0.5)).microbatch_size or 1000) <= 32
    passes = chosen(batch_of(1000, 0.5), method="ghost", size=8).work.passes
    assert passes > 1e9
    # A number moved is 64 operations, a kernel 1e8, and a leaf has 10 of them.
    work = chosen(DeviceBatch(1000), method="book_keeping", size=10, entries=70, flops=4e3).work
    assert work.gradient == pytest.approx(1000 * (4e3 + 1e3 + 64 * 11 * GHOST.bytes / 4))
    assert work.passes == pytest.approx(100 * (64 * 6 * 70 + 1e9))
    work = chosen(DeviceBatch(1000), method="per_example", size=10, entries=70, flops=4e3).work
    assert work.gradient == pytest.approx(1000 * (4e3 + 2 * 70 + 64 * 12 * 70))
    stats["bytes_limit"] = GHOST.bytes
    assert chosen(DeviceBatch(1000)).method == "ghost"


@pytest.mark.parametrize("sample", [None, SampleSize(20, 24, 0.3)])
@pytest.mark.parametrize("method", ["per_example", "book_keeping", "ghost"])
@pytest.mark.parametrize("size", [None, 1, 7, 400])
def test_what_was_asked_for_is_kept(method, size, sample):
    found = chosen(DeviceBatch(20, sample), method=method, size=size)
    assert (found.method, found.microbatch_size) == (method, size)
    assert found.reason == "as asked for"
    assert chosen(DeviceBatch(20, sample), size=7).microbatch_size == 7


def test_the_last_microbatch_is_not_left_half_empty(monkeypatch):
    with_room(monkeypatch, 32, entries=10**5)
    for slots, size in ((32, None), (36, 18), (40, 20), (64, 32), (96, 32), (60, 30)):
        found = chosen(DeviceBatch(slots), entries=10**5)
        assert found.microbatch_size == size, slots
        assert found.work.padding == 0


def test_what_each_method_holds_for_an_example():
    """Gradients come where activations were, but for those that scans or other values copy."""
    cases = {
        (kept(500), 10): (2100, 2000),
        (kept(500), 9000): (9000, 9000),
        (UNUSED, 10): (10, 10),
    }
    for (cost, activations), expected in cases.items():
        found = [
            choose([cost], [500], 1e6, activations, DeviceBatch(4), method, None).held
            for method in ("book_keeping", "per_example", "ghost")
        ]
        assert found == [*expected, activations]


def several(costs, entries, method="auto", slots=64):
    return choose(costs, entries, 1e6, 10, DeviceBatch(slots), method, None)


def test_a_leaf_that_the_loss_does_not_use_costs_no_more_than_its_noise():
    for method in METHODS:
        with_it, without = (
            several([GHOST, UNUSED][:n], [10_000, 10**6][:n], method) for n in (2, 1)
        )
        assert with_it.held == without.held
        assert with_it.work[:3] == without.work[:3]
        assert with_it.work.noise == without.work.noise + 500 * 10**6
    assert several([GHOST, UNUSED], [10_000, 10**6]).method == "book_keeping"


@pytest.mark.parametrize("sample", [None, SampleSize(0, 0, 0.3)])
def test_a_batch_without_slots(sample):
    found = chosen(DeviceBatch(0, sample))
    assert found.microbatch_size is None
    assert (found.work.gradient, found.work.padding, found.work.passes) == (0, 0, 0)


# Everyone who asks is told the same.


PLAN = dp.PrivacyPlan(sampling_prob=0.05, steps=10, noise_multiplier=1.0, delta=1e-6)
CASE = models.mlp()
SLOTS = PLAN.sampler(1000, seed=3).capacity


def gradient(**options):
    return dp.filter_clipped_grad(CASE.loss, l2_clip_norm=1.0, **options)


def told(**options):
    return gradient(**options).of_samples(PLAN.sampling)


def test_a_gradient_that_a_plan_was_given_and_one_that_is_asked_about_with_the_plan():
    batch = CASE.batch(SLOTS)
    one = dp.explain(told(), CASE.model, *batch)
    other = dp.explain(gradient(), CASE.model, *batch, plan=PLAN)
    assert one == other
    assert str(one) == str(other)
    assert one.microbatch_size is not None
    assert one.sample == PLAN.sampling.of(SLOTS)
    # The function that was asked about is as it was: it wants no mask.
    grad_fn = gradient()
    dp.explain(grad_fn, CASE.model, *batch, plan=PLAN)
    grad_fn(CASE.model, *CASE.batch(2))
    assert dp.explain(grad_fn, CASE.model, *batch).sample is None


def sizes_run(program):
    """The lengths of the microbatches in the loops of a program."""
    return {
        variable.aval.shape[0]
        for equation in equations(program)
        if equation.primitive.name == "while"
        for inner in equations(equation.params["body_jaxpr"])
        for variable in inner.outvars
        if inner.primitive.name == "gather" and variable.aval.shape[1:] == (6,)
    }


def equations(jaxpr):
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.slow
def test_the_planner_and_the_step_that_runs():
    grad_fn, batch = told(), CASE.batch(SLOTS)
    expected = dp.explain(grad_fn, CASE.model, *batch).microbatch_size
    assert 1 < expected < SLOTS
    assert dp.plan_memory(grad_fn, CASE.model, *batch, compiled=False).microbatch_size == expected
    assert described(grad_fn, CASE.model, batch).at_once == expected
    step = planned_step(grad_fn, CASE.model, batch, optax.sgd(1.0), None)
    assert sizes_run(jax.make_jaxpr(step.run)(*step.arguments)) == {expected}
    arrays, static = eqx.partition(CASE.model, eqx.is_array)
    running = jax.make_jaxpr(
        lambda arrays, mask: grad_fn(eqx.combine(arrays, static), *batch, is_padding_example=mask)
    )(arrays, np.zeros(SLOTS, bool))
    assert sizes_run(running) == {expected}


@pytest.mark.parametrize("options", [{"microbatch_size": 7}, {"method": "ghost"}])
def test_what_was_asked_for_is_kept_with_a_plan(options):
    found = dp.explain(told(**options), CASE.model, *CASE.batch(SLOTS))
    assert found.microbatch_size == options.get("microbatch_size")
    assert found.method == options.get("method", found.method)
    assert dp.plan_memory(
        told(), CASE.model, *CASE.batch(SLOTS), microbatch_size=5, compiled=False
    ).microbatch_size == 5  # fmt: skip


def test_a_plan_that_takes_every_example():
    plan = dp.PrivacyPlan(sampling_prob=1, steps=10, noise_multiplier=1.0, delta=1e-6)
    grad_fn = gradient()
    batch = CASE.batch(37)
    asked = dp.explain(gradient(), CASE.model, *batch, plan=plan)
    known = dp.explain(grad_fn, CASE.model, *batch)
    assert asked.microbatch_size is known.microbatch_size is None
    assert asked.sample == SampleSize(37, 37, 1.0)
    assert "37 slots, of which 37.0 are expected to hold an example; 1.00 microbatches of 37" in (
        str(asked)
    )
    assert known.sample is None
    grad_fn(CASE.model, *batch)  # nothing is sampled, and no mask is wanted


@pytest.mark.parametrize("noise_multiplier", [0, 1.0])
def test_a_made_step_tells_its_gradient(noise_multiplier):
    plan = dp.PrivacyPlan(0.05, 10, noise_multiplier, 1e-6)
    step = dp.make_step(
        CASE.loss, optax.sgd(0.1), plan, num_examples=1000, seed=3, l2_clip_norm=1.0
    )
    found = dp.explain(step.grad_fn, CASE.model, *CASE.batch(SLOTS))
    assert found.sample == plan.sampling.of(SLOTS)
    assert found == dp.explain(step.grad_fn, CASE.model, *CASE.batch(SLOTS), plan=plan)
    with pytest.raises(ValueError, match="is_padding_example is missing"):
        step.grad_fn(CASE.model, *CASE.batch(4))


def test_gradients_told_of_unlike_samples_are_compiled_apart():
    traced = []

    def loss(w, x):
        traced.append(x)
        return w * x

    compiled = eqx.filter_jit(
        lambda grad_fn, *args: grad_fn(*args, is_padding_example=np.zeros(4, bool))
    )
    for prob in (0.05, 0.06):
        grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0)
        compiled(grad_fn.of_samples(Sampling(prob, 1e-12)), jnp.ones(()), jnp.ones(4))
    times = len(traced)
    for prob in (0.05, 0.06):
        grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0)
        compiled(grad_fn.of_samples(Sampling(prob, 1e-12)), jnp.ones(()), jnp.ones(4))
    assert len(traced) == times > 0
