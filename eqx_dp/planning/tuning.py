"""A method and a microbatch that are chosen by measured time."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, SupportsIndex

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..device import device_memory, is_cpu, made_for
from ..expected import entries, expect, whole_number
from ..gradients import ClippedGrad, MethodName, checked_grad_fn, described
from ..privacy import PrivacyPlan
from ..tables import Part, tabular
from ..trees import PyTree, is_array_or_shape, is_key, is_shape
from .memory import format_bytes, read_compiled
from .step import on_mesh
from .timing import interleaved


class Trial(NamedTuple):
    """A trial of one method with one microbatch.

    Attributes:
        method: the method.
        microbatch_size: how many examples at once on a device.
        seconds: the median time of a call; `inf` if it was not timed.
        bytes: memory of the compiled program on a device; 0 if unknown.
        problem: why it was not timed; empty if it was.
    """

    method: MethodName
    microbatch_size: int
    seconds: float = math.inf
    bytes: int = 0
    problem: str = ""

    def row(self) -> tuple[str, ...]:
        """The cells of the table."""
        time = self.problem or f"{1e3 * self.seconds:.3g}"
        return self.method, str(self.microbatch_size), time, format_bytes(self.bytes)


@tabular
class Tuning(NamedTuple):
    """What [`tune`][] found; `str()` is a table.

    Attributes:
        method: of the fastest, for `filter_clipped_grad` or `make_step`.
        microbatch_size: of the fastest, for the same.
        trials: all trials, the fastest first.
    """

    method: MethodName
    microbatch_size: int
    trials: tuple[Trial, ...]

    def _parts(self) -> Iterator[Part]:
        rows = [trial.row() for trial in self.trials]
        yield [("method", "microbatch", "ms", "of a device"), *rows]


def tune(
    grad_fn: ClippedGrad[Any],
    model: PyTree[Any],
    *batch: PyTree[Any],
    key: Any = None,
    is_padding_example: Any = None,
    plan: PrivacyPlan | None = None,
    methods: Iterable[MethodName] = ("book_keeping", "ghost", "per_example"),
    microbatch_sizes: Iterable[int] | None = None,
    rounds: SupportsIndex = 5,
    limit: SupportsIndex | None = None,
) -> Tuning:
    """Compiles and times methods and microbatches, and says which is fastest on this machine.

    ```python
    found = dp.tune(dp.filter_clipped_grad(loss, l2_clip_norm=1.0), model, xs, ys, plan=plan)
    print(found)
    step = dp.make_step(..., method=found.method, microbatch_size=found.microbatch_size)
    ```

    Each candidate is compiled once. Rounds are interleaved, each in its own order, and the smallest
    median decides. With another method or microbatch the sum is the same up to rounding.

    **Guarantee.** No value of `batch`, `key` or `is_padding_example` is read: the timed batch is
    made up, of the same shapes and dtypes (floats standard normal, whole numbers 0, keys of zeros).
    So the choice depends on shapes, the loss, the model's values, the plan and the machine. A model
    before its training, or a released one, is public.

    | case | what happens |
    |---|---|
    | a candidate cannot be compiled or run | its row says why; the others are timed |
    | it takes more than `limit` | the same |
    | none of them is left | `ValueError`, with the reasons |
    | the loss refuses the made-up batch (such as by `equinox.error_if`) | it cannot be run |
    | another run may choose differently | write the two values into your program |

    Args:
        grad_fn: what `filter_clipped_grad` returned; its own method and microbatch do not count.
        model: the model. Here and in the batch, `jax.ShapeDtypeStruct` may stand for arrays.
        *batch: the batch of all devices, as for `grad_fn`.
        key: as for `grad_fn`.
        is_padding_example: as for `grad_fn`; it only counts whether there is one.
        plan: the plan that batches are drawn by; the batch must then be as long as its sampler's
            `capacity`. The timed batch has the expected number of examples; the rest is padding.
        methods: the methods to try.
        microbatch_sizes: the sizes to try; by default the engine's own choice, a quarter and four
            times of it, and all examples at once.
        rounds: how often each is timed.
        limit: bytes of a device that a candidate may take; by default all that a device reports,
            and half of the host's memory where that is the device.

    Returns:
        A `Tuning`: `method` and `microbatch_size` of the fastest, and `trials`, each with its
        `method`, `microbatch_size`, median `seconds`, `bytes` of a device, and `problem`; `str()`
        is a table.

    Raises:
        ValueError: `grad_fn` is something else; a number is out of its range; nothing can be timed;
            the program runs on several hosts, which may choose differently; and as for `grad_fn`.
    """
    rounds = whole_number("rounds", rounds, least=1, most=1000)
    rules = checked_grad_fn(grad_fn).sharding
    if limit is None:  # a program that does not fit would end the process
        with made_for(rules):
            limit = (device_memory() or 2**60) // (2 if is_cpu() else 1)
    limit = whole_number("limit", limit, least=1, most=2**60)
    if plan is not None:
        expect("plan", plan, PrivacyPlan, "a dp.PrivacyPlan, or None")
        grad_fn = grad_fn.of_samples(plan.batches)
    if jax.process_count() > 1:
        raise ValueError("Tune in one process: several would each choose by their own clock.")
    with on_mesh(rules):
        call = described(grad_fn, model, batch, key, is_padding_example)
        own, of_device = call.at_once, call.of_device
        if microbatch_sizes is None:
            microbatch_sizes = (max(1, own // 4), own, min(4 * own, of_device), of_device)
        sizes = sorted({*entries("microbatch_sizes", microbatch_sizes, "numbers")})
        arrays, static = eqx.partition(model, is_array_or_shape)
        arrays = jax.tree.map(lambda x: _made_up(x) if is_shape(x) else x, arrays)
        examples, key = jax.tree.map(_made_up, (batch, key))
        mask = None
        if is_padding_example is not None or call.choice.batch.sample is not None:
            places = np.arange(call.examples.num_examples) % max(1, of_device)
            mask = places >= math.ceil(call.choice.batch.real)
        if rules is not None:
            arrays, (examples, mask) = rules.shard(arrays), rules.shard_batch((examples, mask))
        tried = [
            _compiled(Trial(method, size), grad_fn, static, (arrays, examples, key, mask), limit)
            for method in entries("methods", methods, "names of methods")
            for size in sizes
        ]
        runs = {trial: run for trial, run in tried if run is not None}
        seconds = interleaved(runs, rounds)
    timed = [x._replace(seconds=float(np.median(seconds.get(x, math.inf)))) for x, _ in tried]
    timed.sort(key=lambda x: x.seconds)
    if not runs:
        why = "".join(f"\n  {x.method}, {x.microbatch_size}: {x.problem}" for x in timed)
        raise ValueError(f"None of the methods and microbatches can be timed:{why}")
    return Tuning(timed[0].method, timed[0].microbatch_size, tuple(timed))


def _compiled(
    trial: Trial, grad_fn: ClippedGrad[Any], static: PyTree[Any], given: tuple[Any, ...], limit: int
) -> tuple[Trial, Callable[[], Any] | None]:
    """The program of a candidate, after a first run; None, with the reason, if it fails."""
    variant = grad_fn._variant  # pyright: ignore[reportPrivateUsage]
    fixed = variant(method=trial.method, microbatch_size=trial.microbatch_size)

    def run(arrays: Any, batch: Any, key: Any, mask: Any) -> Any:
        return fixed(eqx.combine(arrays, static), *batch, key=key, is_padding_example=mask)

    try:
        program = jax.jit(run).lower(*given).compile()
        held = read_compiled(program)
        trial = trial._replace(bytes=0 if held is None else held.total)
        if trial.bytes > limit:
            return trial._replace(problem=f"takes more than {format_bytes(limit)}"), None
        jax.block_until_ready(program(*given))
    except Exception as error:  # any error of a method, a compiler or a loss
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        return trial._replace(problem=problem[:200]), None
    return trial, lambda: program(*given)


def _made_up(leaf: Any) -> Any:
    """An array of the same shape and dtype with public values; other leaves do not change."""
    if not hasattr(leaf, "dtype"):
        return leaf
    dtype = leaf.dtype if is_key(leaf) else jax.dtypes.canonicalize_dtype(leaf.dtype)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.zeros(leaf.shape, dtype)
    draws = np.random.default_rng(0).standard_normal(leaf.shape, np.float32)
    return jnp.asarray(draws).astype(dtype)
