"""Whole runs on neighboring data, with every call into noise recorded and replayed.

The idea is that of Re:cord-play (Cebere et al., arXiv 2602.17454), a gray-box audit that found 13
violations in 12 libraries. A run is recorded: what noise is added to, its standard deviation, the
state of its stream, and what it returned. The same run on a data set with one example less, or with
another one in its place, is replayed: each call into noise returns what it returned before. Then

- the two sums of each step are at most the sensitivity apart that the recorded noise was scaled
  for, its standard deviation / the plan's noise multiplier, in float64 (several calls together);
- they differ at steps alone in which the plan's sampling allows one example to take part;
- number, shapes, standard deviations and stream of the calls are the same;
- no state of a stream is used twice;
- the released model is the same, bit for bit: it follows from what was released.

The example that is exchanged is as given, large (times 1,024 or 2^40), NaN, infinite, or tiny.
`largest` near 1 says that the bound was tested. The last rows are faults: the audit must find them.

`audit.neighbours` has the same test for one step of a user's own. The authors' package dp-recorder
is on no index, needs Python below 3.12, and marks Python functions; the calls here are in compiled
programs, so a host callback stands in place of the noise.
"""

import argparse
import contextlib
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback

import eqx_dp as dp
from eqx_dp.audit.hostile import hostile_examples
from eqx_dp.privacy import noise

from .command import Part
from .page import Table

EXAMPLES, STEPS, SEED, CLIP_NORM = 24, 6, 0x5EED_0123_4567_89AB_CDEF, 0.5
RATE = optax.adam(1e-2)
HOSTILE = ("as given", "x 1024", "x 2^40", "one NaN", "inf", "floats: smallest_subnormal")
OWNERS = np.arange(EXAMPLES) // 3
RNG = np.random.default_rng(0)
XS = RNG.normal(size=(EXAMPLES, 4)).astype(np.float32)
YS = (XS @ np.arange(4.0)[:, None]).astype(np.float32)


class Call(NamedTuple):
    """One call into noise."""

    sums: list[np.ndarray]
    stream: bytes
    stddev: float
    returned: list[np.ndarray]


class Recorder:
    """Stands in place of the noise: records the calls of a run, or replays another's.

    One serves all runs of a row, so that each program is compiled once.
    """

    def __init__(self):
        self.calls: list[Call] = []
        self._replayed: list[Call] | None = None
        self._noise = np.random.default_rng(1)

    def begin(self, replayed: list[Call] | None) -> None:
        """Begins a run."""
        self.calls, self._replayed = [], replayed

    def __call__(self, tree: Any, stream: Any, how: Any, past: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        key = jax.random.key_data(stream.key)
        state = jnp.concatenate([key.ravel(), jnp.stack(stream.counter).ravel()])
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]

        def called(state: Any, *sums: Any) -> list[np.ndarray]:
            return self._called(
                [np.array(x) for x in sums], np.asarray(state).tobytes(), how.stddev
            )

        found = io_callback(called, shapes, state, *leaves, ordered=True)
        return jax.tree.unflatten(structure, found), stream.grown(), past

    def _called(self, sums: list[np.ndarray], stream: bytes, stddev: float) -> list[np.ndarray]:
        if self._replayed is None:
            normals = [self._noise.normal(size=x.shape) for x in sums]
            pairs = zip(sums, normals, strict=True)
            returned = [(x + stddev * z).astype(x.dtype) for x, z in pairs]
        else:
            returned = self._replayed[len(self.calls)].returned
        self.calls.append(Call(sums, stream, stddev, returned))
        return returned


Data = tuple[np.ndarray, ...]
Train = Callable[[Data], Any]


class Row(NamedTuple):
    """A way to train.

    Attributes:
        plan: what it says of its noise.
        made: makes what is compiled, and returns a function from (there, xs, ys) to the released
            model.
        may_differ: whether one example may take part in these steps.
        owners: whose the rows of the data are; one owner's are exchanged.
    """

    plan: dp.PrivacyPlan
    made: Callable[[], Train]
    may_differ: Callable[[list[int]], bool] = lambda steps: True
    owners: np.ndarray = np.arange(EXAMPLES)


def plan_of(sampling: Any = None, **options: Any) -> dp.PrivacyPlan:
    is_fixed = isinstance(sampling, dp.sampling.FixedSize)
    relation = dp.NeighboringRelation.REPLACE_ONE if is_fixed else None
    options |= {} if relation is None else {"neighboring_relation": relation}
    options |= {"sampling_prob": 0.5} if sampling is None else {"sampling": sampling}
    known: dict[str, Any] = {"steps": STEPS, "noise_multiplier": 2.0, "delta": 1e-5}
    return dp.PrivacyPlan(**known | options)


def model() -> Any:
    return eqx.nn.MLP(4, 1, 8, 1, key=jax.random.key(0))


def loss(model: Any, there: Any, x: Any, y: Any) -> Any:
    """Of one example; NaN if it is not there, so that it adds exactly zero."""
    return jnp.where(there, jnp.sum((model(x.astype(jnp.float32)) - y) ** 2), jnp.nan)


def step_of(plan: dp.PrivacyPlan, **options: Any) -> dp.Step[Any]:
    number = EXAMPLES if plan.unit is None else plan.unit.num_users
    options = {"num_examples": number, "l2_clip_norm": CLIP_NORM, "seed": SEED} | options
    return dp.make_step(loss, options.pop("optimizer", RATE), plan, **options)


def trainer(plan: dp.PrivacyPlan, *more: Any, **options: Any) -> Row:
    """A run of `Trainer`."""

    def made() -> Train:
        step = step_of(plan, **options)
        return lambda data: dp.Trainer(step, data, progress=False).run(model()).model

    return Row(plan, made, *more)


def made_step(plan: dp.PrivacyPlan) -> Row:
    """A loop around a step of `make_step`."""

    def made() -> Train:
        step = step_of(plan)

        def train(data: Data) -> Any:
            state, sampler = step.init(model()), step.sampler()
            for t in range(plan.steps):
                batch, mask = sampler.take(t, *data)
                state = step(state, *batch, is_padding_example=mask)
            return state.model

        return train

    return Row(plan, made)


def loop(
    plan: dp.PrivacyPlan, gradient: Any = None, chain: Any = None, rate: Any = lambda grads: 1.0
) -> Row:
    """README's loop; the last three arguments are its parts, to get them wrong."""

    def made() -> Train:
        divisor = plan.sampling_prob * EXAMPLES
        grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=CLIP_NORM, normalize_by=divisor)
        privatizer = plan.privatizer(grad_fn, key=SEED)
        optimizer = chain(privatizer) if chain else optax.chain(privatizer, RATE)

        @eqx.filter_jit
        def step(model: Any, state: Any, there: Any, x: Any, y: Any, mask: Any) -> Any:
            called: Any = gradient or grad_fn
            grads = called(model, there, x, y, is_padding_example=mask)
            updates, state = optimizer.update(grads, state)
            updates = jax.tree.map(lambda update: rate(grads) * update, updates)
            return eqx.apply_updates(model, updates), state

        def train(data: Data) -> Any:
            trained: Any = model()
            state = optimizer.init(grad_fn.trainable(trained))
            return after_all_steps(plan, step, trained, state, data)

        return train

    return Row(plan, made)


def after_all_steps(plan: dp.PrivacyPlan, step: Any, trained: Any, state: Any, data: Data) -> Any:
    """The model after a loop over the batches of the plan's sampler."""
    sampler: Any = plan.sampler(EXAMPLES, seed=SEED)
    for t in range(plan.steps):
        (there, x, y), mask = sampler.take(t, *data)
        trained, state = step(trained, state, there, x, y, mask)
    return trained


def stream_loop(plan: dp.PrivacyPlan, grows: bool = True) -> Row:
    """A loop with `noise_stream` and `add_noise`."""

    def made() -> Train:
        grad_fn: Any = dp.filter_clipped_grad(loss, l2_clip_norm=CLIP_NORM)
        stddev = plan.noise_multiplier * grad_fn.sensitivity(plan.neighboring_relation)

        @eqx.filter_jit
        def step(model: Any, stream: Any, there: Any, x: Any, y: Any, mask: Any) -> Any:
            grads = grad_fn(model, there, x, y, is_padding_example=mask)
            noisy, after = dp.add_noise(grads, stream, stddev)
            updates = jax.tree.map(lambda x: -0.01 * x, noisy)
            return eqx.apply_updates(model, updates), after if grows else stream

        def train(data: Data) -> Any:
            return after_all_steps(plan, step, model(), dp.noise_stream(SEED), data)

        return train

    return Row(plan, made)


def unclipped(model: Any, there: Any, x: Any, y: Any, is_padding_example: Any) -> Any:
    """Clips the sum, and not each gradient."""

    def total(model: Any) -> Any:
        losses = jax.vmap(loss, (None, None, 0, 0))(model, True, x, y)
        return jnp.sum(jnp.where(there & ~is_padding_example, losses, 0.0))

    grads = eqx.filter_grad(total)(model)
    factor = jnp.minimum(1, 1 / jnp.maximum(optax.global_norm(grads), 1e-9))
    return jax.tree.map(lambda x: factor * x, grads)


def once_a(cycle: int) -> Callable[[list[int]], bool]:
    return lambda steps: len({step % cycle for step in steps}) <= 1


def once_in(cycle: int) -> Callable[[list[int]], bool]:
    return lambda steps: len({step // cycle for step in steps}) == len(steps)


def rows() -> dict[str, Row]:
    """What is audited, by name."""
    kinds, plain = dp.sampling, plan_of()
    cyclic = kinds.CyclicPoisson(0.5, 2)
    bands = {"noise": dp.Banded.bisr(2)}
    users = plan_of(kinds.Poisson(0.5), unit=dp.Users(OWNERS, 2))
    cut = dp.filter_clipped_grad(loss, l2_clip_norm=2 * CLIP_NORM, normalize_by=12)
    return {
        "README's loop": loop(plain),
        "loop with add_noise": stream_loop(plain),
        "loop around make_step": made_step(plain),
        "Trainer": trainer(plain),
        "Trainer, CyclicPoisson": trainer(plan_of(cyclic), once_a(2)),
        "Trainer, FixedSize": trainer(plan_of(kinds.FixedSize(8, EXAMPLES))),
        "Trainer, BallsInBins": trainer(plan_of(kinds.BallsInBins(3)), once_a(3)),
        "Trainer, RandomAllocation": trainer(plan_of(kinds.RandomAllocation(3)), once_in(3)),
        "Trainer, users": trainer(users, lambda steps: True, OWNERS),
        "Trainer, AutoS": trainer(plain, l2_clip_norm=dp.clipping.AutoS()),
        "Trainer, PerLayer": trainer(plain, l2_clip_norm=dp.clipping.PerLayer(CLIP_NORM)),
        "Trainer, Quantile": trainer(plain, l2_clip_norm=dp.clipping.Quantile()),
        "Trainer, ghost": trainer(plain, method="ghost"),
        "Trainer, mixed_bfloat16": trainer(plain, policy=dp.load_policy("mixed_bfloat16")),
        "Trainer, microbatches of 3": trainer(plain, microbatch_size=3),
        "Trainer, bisr, BallsInBins": trainer(plan_of(kinds.BallsInBins(3), **bands), once_a(3)),
        "Trainer, bisr, CyclicPoisson": trainer(plan_of(cyclic, **bands), once_a(2)),
        "Trainer, strategy kept": trainer(
            plan_of(cyclic, noise=dp.Banded(strategy=(1.0, 0.5))), once_a(2)
        ),
        "FAULT: the sum is clipped, not each gradient": loop(plain, gradient=unclipped),
        "FAULT: twice the clip norm that noise is for": loop(plain, gradient=cut),
        "FAULT: a rate from the gradient before noise": loop(
            plain, rate=lambda grads: 1 / (1 + optax.global_norm(grads))
        ),
        "FAULT: momentum before noise": loop(
            plain, chain=lambda privatizer: optax.chain(optax.trace(0.9), privatizer)
        ),
        "FAULT: the stream does not grow": stream_loop(plain, grows=False),
        "FAULT: an example in each step": Row(
            plan_of(cyclic), trainer(plan_of(kinds.Poisson(0.9))).made, once_a(2)
        ),
    }


class Found(NamedTuple):
    """What the pairs of a row show."""

    pairs: int
    calls: int
    largest: float
    wrong: list[str]


def audited(row: Row) -> Found:
    """Records and replays a row's runs."""
    recorder = Recorder()
    pairs, calls, largest, wrong = 0, 0, 0.0, set[str]()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_changed(noise, "_noisy", recorder))
        # The recorder is a callback, which the checks of a Trainer refuse.
        stack.enter_context(_changed(dp.Trainer, "_checks", lambda *_: {}))
        train = row.made()
        for data, neighbor in neighbors(row):
            recorded = run(train, data, recorder, None)
            replayed = run(train, neighbor, recorder, recorded[0])
            moved, problems = compared(row, recorded, replayed)
            pairs, calls, largest = pairs + 1, calls + len(recorded[0]), max(largest, moved)
            wrong |= set(problems)
    jax.clear_caches()
    return Found(pairs, calls, largest, sorted(wrong))


def neighbors(row: Row) -> Iterator[tuple[Data, Data]]:
    """Data sets with a hostile example; and with another, large one, or none in its place."""
    is_replaced = row.plan.neighboring_relation is dp.NeighboringRelation.REPLACE_ONE
    for i, name in enumerate(HOSTILE):
        is_unit = row.owners == i % 3 + 4
        first = np.flatnonzero(is_unit)[0]
        given = {"x": XS[first], "y": YS[first]}
        options = hostile_examples(given, {"x": XS[0], "y": YS[0]})
        there, xs, ys = np.ones(EXAMPLES, bool), XS.copy(), YS.copy()
        xs[is_unit], ys[is_unit] = options[name]["x"], options[name]["y"]
        others = there & (is_replaced | ~is_unit), xs.copy(), ys.copy()
        others[1][is_unit], others[2][is_unit] = options["x 1024"]["x"], -options["x 1024"]["y"]
        yield (there, xs, ys), others


def run(
    train: Train, data: Data, recorder: Recorder, replayed: list[Call] | None
) -> tuple[list[Call], list[np.ndarray]]:
    """The calls of a run, and the arrays of the model."""
    recorder.begin(replayed)
    trained = train(data)
    leaves = [np.asarray(x) for x in jax.tree.leaves(eqx.filter(trained, eqx.is_array))]
    return recorder.calls, leaves


@contextlib.contextmanager
def _changed(owner: Any, name: str, value: Any) -> Generator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def compared(row: Row, one: Any, other: Any) -> tuple[float, Iterator[str]]:
    """The largest movement / sensitivity, and what is wrong."""
    (first, trained), (second, again) = one, other
    problems: list[str] = []
    traces = [[(x.stream, x.stddev, _shapes(x)) for x in run] for run in (first, second)]
    if traces[0] != traces[1]:
        problems.append("calls differ")
    if len({call.stream for call in first}) < len(first):
        problems.append("a stream's state is used twice")
    squares = np.zeros(STEPS)
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        scale = row.plan.noise_multiplier / a.stddev
        apart = [x.astype(np.float64) - y for x, y in zip(a.sums, b.sums, strict=True)]
        # A step may call more than once: one example moves all calls of a step together.
        squares[i * STEPS // len(first)] += sum(np.sum((scale * x) ** 2) for x in apart)
    distances = np.nan_to_num(np.sqrt(squares), nan=np.inf)
    # Sums round; two of the same examples in the same slots round in the same way.
    if max(distances) > 1 + 1e-5:
        problems.append("moves too far")
    if not row.may_differ([step for step, x in enumerate(distances) if x > 1e-5]):
        problems.append("takes part too often")
    if any(x.tobytes() != y.tobytes() for x, y in zip(trained, again, strict=True)):
        problems.append("another model")
    return float(max(distances)), iter(problems)


def _shapes(call: Call) -> list[tuple[int, ...]]:
    return [x.shape for x in call.sums]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    warnings.simplefilter("ignore")
    lines: list[dict[str, str]] = []
    for name, row in rows().items():
        if options.only and not any(part in name for part in options.only):
            continue
        found = audited(row)
        numbers = {"pairs": str(found.pairs), "calls": str(found.calls)}
        wrong = ", ".join(found.wrong) or "-"
        line = {"run": name} | numbers | {"largest": f"{found.largest:.5f}", "violations": wrong}
        lines.append(line)
        print(" | ".join(line.values()), flush=True)
    yield Table("Recorded and replayed", lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="*", help="runs whose name holds one of these")


PART = Part(__doc__, tables, add_options)
