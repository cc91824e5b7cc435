"""What a step truly gives away, by running it on neighboring data with the noise coupled.

The step runs eagerly in float64, with stand-ins for the engine, the noise and JAX's loops. Its
first draw at a position of a stream is a release: its sum s plus noise n. On a neighboring data set
the same release is handed out, so the noise there was n + s - s', and whatever draws at this
position again gets that noise. If the step is a Gaussian mechanism of noise multiplier m, the sums
of a call move by at most 1 / m in units of their noise, and, because the releases are the same,
every other result is the same too: it is computed from releases. A result that differs is a leak.
So is one that depends on the key of a stream (it is another one in each run), and what prints,
errors and loops show.

Two calls follow each other: a stream that comes back as it was adds the noise of the first again.
The stand-ins share no code with the package.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import NeighboringRelation

from .data import neighboring
from .grammar import Program

CLOSE = 1e-6
"""By how much movements and results may differ, relatively: rounding, in float64."""

PUBLIC = np.array([[0.5, -0.2, 0.1], [0.3, 0.8, -0.4], [-0.6, 0.2, 0.7]])
FROZEN = np.array([[0.2, 0.5, -0.3], [0.9, -0.1, 0.4], [-0.2, 0.6, 0.3]])
DISCLOSED = "loss"


class Stream(NamedTuple):
    """Stands in for a stream of noise."""

    key: Any
    counter: tuple[Any, Any]


class PrivatizerState(NamedTuple):
    stream: Stream
    past: tuple[Any, ...] = ()


class Draws:
    """The noise of a run: recorded by the first run, coupled to it in later ones."""

    def __init__(self, first: "Draws | None", offset: int):
        self.first, self.offset = first, offset
        self.sums: dict[tuple[Any, ...], tuple[list[np.ndarray], float]] = {}
        self.releases: dict[tuple[Any, ...], list[np.ndarray]] = {}
        self.units: dict[tuple[Any, ...], list[np.ndarray]] = {}
        self.made = 0
        self.shown: list[Any] = []
        self.calls = 0
        self.call_of: dict[tuple[Any, ...], int] = {}

    def secret(self) -> Stream:
        """A stream whose key nobody knows: a different one in each run."""
        self.made += 1
        return Stream(np.int64(1000 * self.made + self.offset), (np.uint32(0), np.uint32(0)))

    def add(self, tree: Any, stream: Stream, stddev: float) -> tuple[Any, Stream]:
        """`dp.add_noise`."""
        leaves, structure = jax.tree.flatten(tree)
        if isinstance(stream, PrivatizerState):
            raise TypeError("a privatizer's state is no stream")
        if float(stddev) == 0:
            return tree, stream
        low, high = stream.counter
        key = np.asarray(stream.key).tolist()
        is_known = isinstance(key, list)
        place = (str(key) if is_known else key - self.offset, int(low), int(high))
        held = [np.asarray(leaf, np.float64) for leaf in leaves] if not _traced(leaves) else None
        if held is not None and not is_known and place not in self.sums:
            result = self._release(place, held, float(stddev))
        else:
            units = self._units(place, leaves)
            result = [leaf + stddev * unit for leaf, unit in zip(leaves, units, strict=True)]
        return jax.tree.unflatten(structure, result), stream._replace(
            counter=(low + np.uint32(1), high)
        )

    def _release(self, place: tuple[Any, ...], sums: list[np.ndarray], stddev: float) -> list[Any]:
        self.sums[place] = sums, stddev
        self.call_of[place] = self.calls
        known = self.first.releases.get(place) if self.first else None
        if known is None or [a.shape for a in known] != [a.shape for a in sums]:
            units = self._fresh(place, [np.shape(a) for a in sums])
            known = [a + stddev * unit for a, unit in zip(sums, units, strict=True)]
        self.releases[place] = known
        self.units[place] = [(a - b) / stddev for a, b in zip(known, sums, strict=True)]
        return [jnp.asarray(a) for a in known]

    def _units(self, place: tuple[Any, ...], leaves: list[Any]) -> list[Any]:
        """The unit noise of a position that was drawn before, for leaves of any shapes."""
        drawn = self.units.get(place, [])
        fresh = self._fresh(place, [np.shape(leaf) for leaf in leaves])
        found: list[Any] = []
        for i, unit in enumerate(fresh):
            before = drawn[i].reshape(-1)[: unit.size] if i < len(drawn) else np.zeros(0)
            flat = np.concatenate([before, unit.reshape(-1)[before.size :]])
            found.append(flat.reshape(unit.shape))
        return found

    @staticmethod
    def _fresh(place: tuple[Any, ...], shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
        seed = [
            abs(hash(str(part))) % 2**31 if isinstance(part, str) else abs(part) for part in place
        ]
        return [np.random.default_rng([*seed, i]).normal(size=s) for i, s in enumerate(shapes)]

    def show(self, kind: str, *values: Any) -> None:
        """Notes what an observer of the run sees."""
        self.shown.append((kind, *(np.asarray(v).tolist() for v in jax.tree.leaves(values))))


def _traced(values: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


@dataclasses.dataclass
class ClippedSum:
    """`dp.filter_clipped_grad`, example by example."""

    loss: Callable[..., Any]
    l2_clip_norm: float
    normalize_by: float = 1.0

    @property
    def l2_norm_bound(self) -> float:
        return self.l2_clip_norm / self.normalize_by

    def sensitivity(self, relation: NeighboringRelation) -> float:
        return self.l2_norm_bound * (2 if relation is NeighboringRelation.REPLACE_ONE else 1)

    @staticmethod
    def trainable(model: Any) -> Any:
        return model

    def __call__(
        self, model: Any, *batch: Any, key: Any = None, is_padding_example: Any = None
    ) -> Any:
        loss, numbers = self.loss, (self.l2_clip_norm, self.normalize_by)
        if key is not None:  # independent for each example, so it may be coupled by content
            rows = zip(*(np.asarray(of, np.float32) for of in batch), strict=True)
            words = [hash(tuple(row.tobytes() for row in parts)) % 2**31 for parts in rows]
            batch = *batch, jnp.asarray(words, jnp.uint32)
        arguments = model, batch, is_padding_example, key
        functions = (loss.func, *loss.args) if isinstance(loss, partial) else (loss,)
        if any(function.__closure__ for function in functions) or _traced(arguments):
            return _sum_of(loss, numbers, *arguments)
        # Equal texts are one function: it is compiled once for all steps.
        text = *(function.__code__ for function in functions), numbers
        same = _COMPILED.setdefault(text, jax.jit(partial(_sum_of, loss, numbers)))
        return same(*arguments)


_COMPILED: dict[Any, Callable[..., Any]] = {}


def _sum_of(
    loss: Callable[..., Any],
    numbers: tuple[float, float],
    model: Any,
    batch: Any,
    mask: Any,
    key: Any,
) -> Any:
    """The sum of clipped gradients of a loss, of a clip norm and a divisor."""
    l2_clip_norm, normalize_by = numbers

    def of_row(model: Any, *row: Any) -> Any:
        if key is None:
            return loss(model, *row)
        own = jax.random.fold_in(jax.random.wrap_key_data(key), row[-1])
        return loss(model, *row[:-1], key=own)

    axes = (None, *[0] * len(batch))
    gradients = jax.vmap(jax.grad(of_row), axes)(model, *batch)
    leaves = jax.tree.leaves(gradients)
    flat = jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)
    norm = jnp.sqrt(jnp.sum(jnp.where(jnp.isfinite(flat), flat, 0) ** 2, axis=1))
    counts = jnp.isfinite(flat).all(1)
    if mask is not None:
        counts = counts & ~jnp.asarray(mask)
    factor = jnp.minimum(1, l2_clip_norm / jnp.where(norm > 0, norm, 1)) / normalize_by

    def total(leaf: Any) -> Any:
        along = (-1, *[1] * (leaf.ndim - 1))
        kept = jnp.where(counts.reshape(along), leaf * factor.reshape(along), 0)
        return kept.sum(0)

    return jax.tree.map(total, gradients)


class _In:
    """A module with some names replaced."""

    def __init__(self, module: Any, **replaced: Any):
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _stand_ins(draws: Draws, plan: Any) -> dict[str, Any]:
    """What a program sees in place of the package, its plan, JAX and Equinox."""

    def while_loop(condition: Any, body: Any, carry: Any) -> Any:
        if _traced(carry):
            return jax.lax.while_loop(condition, body, carry)
        turns = 0
        while bool(condition(carry)) and turns < 1000:
            carry, turns = body(carry), turns + 1
        draws.show("turns", turns)
        return carry

    def fori_loop(low: Any, high: Any, body: Any, carry: Any) -> Any:
        if _traced((low, high)):
            return jax.lax.fori_loop(low, high, body, carry)
        if not isinstance(low, int) or not isinstance(high, int):
            draws.show("turns", int(high) - int(low))
        for i in range(int(low), int(high)):
            carry = body(i, carry)
        return carry

    def cond(which: Any, yes: Any, no: Any, *operands: Any) -> Any:
        if _traced((which, operands)):
            results = yes(*operands), no(*operands)
            return jax.tree.map(lambda a, b: jnp.where(which, a, b), *results)
        draws.show("branch", bool(which))
        return yes(*operands) if bool(which) else no(*operands)

    def scan(body: Any, carry: Any, xs: Any = None, length: int | None = None) -> Any:
        count = len(jax.tree.leaves(xs)[0]) if length is None else length
        stacked: list[Any] = []
        for i in range(count):
            carry, out = body(carry, jax.tree.map(lambda a, i=i: jnp.asarray(a)[i], xs))
            stacked.append(out)
        return carry, jax.tree.map(lambda *a: jnp.stack(a), *stacked)

    def error_if(value: Any, predicate: Any, message: str) -> Any:
        if not _traced(predicate):
            draws.show("error", bool(np.any(predicate)))
        return value

    def print_(message: str, *values: Any) -> None:
        draws.show("print", *values)

    def pure_callback(function: Any, shape: Any, *values: Any) -> Any:
        draws.show("callback", *values)
        return function(*values)

    def stream_of(key: Any = None) -> Stream:
        if draws.calls:  # within a step: one key for all calls, which is in its program
            return Stream(np.array([7, 7]), (np.uint32(0), np.uint32(0)))
        return draws.secret() if key is None else Stream(np.array([key, 7]), (np.uint32(0),) * 2)

    def privatizer(grad_fn: ClippedSum) -> Any:
        stddev = plan.noise_multiplier * grad_fn.sensitivity(plan.neighboring_relation)

        def update(grads: Any, state: PrivatizerState, params: Any = None) -> Any:
            noisy, stream = draws.add(grads, state.stream, stddev)
            return noisy, state._replace(stream=stream)

        return optax.GradientTransformation(lambda params: PrivatizerState(stream_of()), update)

    def random_key_data(key: Any) -> Any:
        return key if isinstance(key, np.integer) else jax.random.key_data(key)

    names = {"while_loop": while_loop, "fori_loop": fori_loop, "cond": cond, "scan": scan}
    shown = _In(jax.debug, print=print_, callback=lambda f, *values: print_("", *values))
    random = _In(jax.random, key_data=random_key_data)
    lax = _In(jax.lax, **names)
    grad = lambda loss, **options: ClippedSum(loss, **options)  # noqa: E731
    unit = plan.unit and _In(None, loss=_loss_of_user)
    return {
        "dp": _In(None, add_noise=draws.add, noise_stream=stream_of, filter_clipped_grad=grad),
        "jax": _In(
            jax,
            lax=lax,
            debug=shown,
            pure_callback=pure_callback,
            random=random,
            jit=lambda function: function,
            checkpoint=lambda function: function,
        ),
        "eqx": _In(eqx, error_if=error_if),
        "plan": _In(plan, privatizer=privatizer, unit=unit),
    }


def _loss_of_user(loss: Callable[..., Any]) -> Callable[..., Any]:
    return partial(_of_user, loss)


def _of_user(loss: Callable[..., Any], model: Any, x: Any, y: Any, missing: Any) -> Any:
    losses = jax.vmap(loss, (None, 0, 0))(model, x, y)
    return jnp.where(missing, 0, losses).sum() / jnp.maximum(1, (~missing).sum())


class Truth(NamedTuple):
    """What replay found.

    Attributes:
        leak: a result that differs although all releases are the same, in words, or None.
        noise_multiplier: the smallest of a call, on these data.
    """

    leak: str | None
    noise_multiplier: float

    def breaks(self, noise_multiplier: float) -> str | None:
        """What is wrong, in words, if a step is said to have this noise multiplier."""
        if self.leak is None and self.noise_multiplier < noise_multiplier * (1 - CLOSE):
            found = f"{self.noise_multiplier:.3g}, not {noise_multiplier:.3g}"
            return f"the noise multiplier is {found}"
        return self.leak


def truth(program: Program, plan: Any, seeds: int = 4) -> Truth:
    """Runs a step on data sets and their neighbors, and compares."""
    model = {"b": np.float64(0.3), "w": np.array([0.4, -0.7, 0.9])}
    smallest, found = np.inf, None
    with jax.enable_x64(True), np.errstate(all="ignore"):
        for seed in range(seeds):
            sets = neighboring(program.layout, np.random.default_rng([program.seed, seed]))
            first = _run(program, plan, sets.base, sets.base, model, None, 0)
            for i, neighbor in enumerate(sets.neighbors):
                other = _run(program, plan, neighbor, sets.base, model, first[0], 500 + i)
                multiplier, leak = _compared(first, other)
                smallest, found = min(smallest, multiplier), found or leak
                if found:
                    break
    return Truth(found, float(smallest))


def _run(
    program: Program, plan: Any, data: Any, later: Any, model: Any, first: Draws | None, offset: int
) -> tuple[Draws, list[Any]]:
    """Two calls: on this data, and on a batch without the example in question."""
    draws = Draws(first, offset)
    closed = {name: jnp.asarray(data[name]) for name in ("DATA", "LABELS") if name in data}
    names = {"jnp": jnp, "optax": optax, "FROZEN": jnp.asarray(FROZEN), **closed}
    names |= _stand_ins(draws, plan)
    exec(compile(program.source, f"step {program.seed}", "exec"), names)
    model = jax.tree.map(jnp.asarray, model)
    state, results = names["initial"](model), list[Any]()
    for batch in (data, later):
        draws.calls += 1
        arguments = [_as_jax(value) for name, value in batch.items() if name not in closed]
        model, state, metrics = names["step"](model, state, jnp.asarray(PUBLIC), *arguments)
        results.append((model, _without_key(state, draws), metrics))
    return draws, results


def _as_jax(values: Any) -> Any:
    return jax.tree.map(lambda v: jnp.asarray(v) if isinstance(v, np.ndarray) else v, values)


def _without_key(state: Any, draws: Draws) -> Any:
    """A state that comes back, with keys in words that are the same in all runs."""

    def of(part: Any) -> Any:
        if not isinstance(part, Stream):
            return part
        key = np.asarray(part.key)
        return Stream(np.asarray(key - draws.offset if key.ndim == 0 else key), part.counter)

    return jax.tree.map(of, state, is_leaf=lambda part: isinstance(part, Stream))


def _compared(one: tuple[Draws, Any], other: tuple[Draws, Any]) -> tuple[float, str | None]:
    """The noise multiplier of a pair of runs, and what else differs."""
    (base, results), (draws, others) = one, other
    if base.sums.keys() != draws.sums.keys():
        return np.inf, "other positions of the stream are drawn"
    square = [0.0, 0.0]
    for place, (sums, stddev) in base.sums.items():
        moved, scale = draws.sums[place]
        if scale != stddev or [a.shape for a in moved] != [a.shape for a in sums]:
            return np.inf, "standard deviation or shape of a release depends on data"
        apart = sum(float(np.sum((a - b) ** 2)) for a, b in zip(sums, moved, strict=True))
        square[base.call_of[place] - 1] += apart / stddev**2
    largest = max(square)
    multiplier = 0.0 if np.isnan(largest) else np.inf if largest == 0 else largest**-0.5
    pairs = [("shown: ", base.shown, draws.shown)]
    pairs += [
        (f"call {i + 1}: ", *both) for i, both in enumerate(zip(results, others, strict=True))
    ]
    differences = (found for pair in pairs for found in _differences(pair[1], pair[2], pair[0]))
    return multiplier, next(differences, None)


def _differences(one: Any, other: Any, where: str) -> Iterator[str]:
    """The paths of leaves that differ, but for what is disclosed."""
    a = jax.tree_util.tree_leaves_with_path(one)
    b = jax.tree_util.tree_leaves_with_path(other)
    if [path for path, _ in a] != [path for path, _ in b]:
        yield f"{where}: other results"
        return
    for (path, x), (_, y) in zip(a, b, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name == f"2.{DISCLOSED}":
            continue
        if isinstance(x, str | bool | int) or isinstance(y, str | bool | int):
            same = x == y
        else:
            x, y = np.asarray(x), np.asarray(y)
            same = x.shape == y.shape and np.allclose(x, y, rtol=CLOSE, atol=1e-9, equal_nan=True)
        if not same:
            yield f"{where}{name} differs"
