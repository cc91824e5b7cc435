"""A method and a microbatch that are chosen by the clock, where formulas do not tell."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar

import jax
import jax.core

from ..device import device_memory, is_cpu
from ..expected import expect, whole_number
from ..gradients import ClippedGrad, checked_grad_fn, described
from ..privacy import PrivacyPlan
from ..shown import shown
from ..trees import PyTree
from .candidates import candidates, measured_for
from .progress import told_on_terminal
from .step import on_mesh
from .trials import Call, Work, measured
from .tuning import TunedGrad, Tuning

_Result = TypeVar("_Result")


def tune(
    grad_fn: ClippedGrad[_Result],
    model: PyTree[Any],
    *batch: PyTree[Any],
    key: Any = None,
    is_padding_example: Any = None,
    plan: PrivacyPlan | None = None,
    methods: Iterable[str] | None = None,
    microbatch_sizes: Iterable[int] | None = None,
    rounds: SupportsIndex = 5,
    memory_limit: SupportsIndex | None = None,
    batch_is_public: bool = False,
    file: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> TunedGrad[_Result]:
    """Compiles and times a handful of methods and microbatches, and fixes a function to the best.

    ```python
    grad_fn = dp.tune(dp.filter_clipped_grad(loss, l2_clip_norm=1.0), model, xs, ys, plan=plan)
    print(grad_fn.tuning)
    ```

    Each candidate is compiled once. Rounds are interleaved, each in an order of its own, and the
    smallest median decides. The function's own choice (that of `"auto"`) is always a candidate.

    **Guarantee.** No value of `batch`, `key` or `is_padding_example` is read, unless
    `batch_is_public`: what is timed is made up, of the same shapes and dtypes (floats standard
    normal, whole numbers 0, keys of zeros). So the choice depends on shapes, on the loss, on the
    model's values, on the plan and on the machine. A model before its training, and one that was
    released, is public. With a plan the time is the expected one: a microbatch costs what it costs,
    and as many are expected as the plan's sampling fills.

    Everything but method and microbatch stays: what a call returns, clip norms, policy, sharding,
    sensitivity. By another method or microbatch the sum is the same up to rounding.

    | case | what happens |
    |---|---|
    | a candidate cannot be compiled or run | its row in the table says why; the others are timed |
    | it takes more than `memory_limit` | the same |
    | none of them is left | `ValueError`, with every reason |
    | it is twice as slow as the fastest in the first round | it is not timed again |
    | the loss refuses what is made up (`equinox.error_if`, say) | as any that cannot be run |
    | `file` exists | nothing is measured: its choice is taken |
    | `file` was measured for something else | `ValueError`, which names each difference |
    | the clock may decide otherwise the next time | `file` or `tuning.to_json` keeps the choice |

    Args:
        grad_fn: what `filter_clipped_grad` returned. A method other than `"auto"`, and a microbatch
            size, that it was made with, stay.
        model: the model. Here and in the batch, `jax.ShapeDtypeStruct` may stand for arrays; for
            the model's it is standard normal numbers that are timed.
        *batch: the batch of all devices, as for `grad_fn`.
        key: as for `grad_fn`; its kind alone counts.
        is_padding_example: as for `grad_fn`; it only counts whether there is one.
        plan: the plan that batches are drawn by; the batch must then be as long as its sampler's
            `capacity`. Not needed if `plan.privatizer` was given `grad_fn`.
        methods: what to try instead of all methods.
        microbatch_sizes: what to try instead of sizes around the engine's own choice.
        rounds: how often each is timed.
        memory_limit: bytes of a device for model, batch, gradients and what is held in between; by
            default all that a device reports, and half of the host's memory where that is the
            device.
        batch_is_public: whether to time on the values of `batch`, `key` and `is_padding_example`;
            for a loss whose time, or success, depends on them. **Public values only**: the choice
            shows something of them.
        file: keeps the choice, as JSON: it is written there, and read where the file exists.
        progress: whether to show on a terminal what is being done.

    Returns:
        The function, fixed to its best method and microbatch. Its attribute `tuning` is a
        [`Tuning`][]: a table for `str()`, to be kept by `to_json`.

    Raises:
        ValueError: `grad_fn` is something else; a number is out of its range; nothing can be timed;
            the program runs on several hosts, which may choose differently; it is traced; `file` is
            for something else or cannot be; and as for `grad_fn`.
    """
    rounds = whole_number("rounds", rounds, least=1, most=1000)
    limit = limit_of(memory_limit)
    if plan is not None:
        expect("plan", plan, PrivacyPlan, "a dp.PrivacyPlan, or None")
        grad_fn = checked_grad_fn(grad_fn).of_samples(plan.sampling)
    rules = checked_grad_fn(grad_fn).sharding
    given = Call(model, batch, key, is_padding_example)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(given)):
        raise ValueError("tune runs programs, and was called while one is traced: call it outside.")
    with on_mesh(rules):
        call = described(grad_fn, model, batch, key, is_padding_example)
        has_mask = is_padding_example is not None or call.choice.batch.sample is not None
        tried = candidates(grad_fn, call, methods, microbatch_sizes)
        now = measured_for(grad_fn, call, model, batch, has_mask, tried)
        path = None if file is None else Path(file)
        if path is not None and path.exists():
            return _kept(path, now).apply(grad_fn)
        _check_place(path)
        with told_on_terminal("tuning", progress) as tell:
            work = Work(grad_fn, call, given.to_time(grad_fn, batch_is_public), limit, has_mask)
            tuning = measured(work, tried, rounds, tell)._replace(measured_for=now)
    if path is not None:
        beside = path.with_name(f"{path.name}.partial")
        beside.write_text(tuning.to_json())
        beside.replace(path)
    return tuning.apply(grad_fn)


def _kept(path: Path, now: tuple[tuple[str, str], ...]) -> Tuning:
    """The choice that a file keeps, if it was measured for this."""
    try:
        tuning = Tuning.from_json(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read: {error}. Name another file, or remove it."
        ) from None
    if lines := "".join(f"\n  {line}" for line in tuning.stale(now)):
        raise ValueError(
            f"{path} was measured for something else:{lines}\n"
            "Remove the file to measure again; or take its choice as it is, with "
            "Tuning.from_json(text).apply(grad_fn)."
        )
    return tuning


def limit_of(memory_limit: SupportsIndex | None) -> int | None:
    """The bytes of a device that a candidate may take, by what was asked for; None if unknown."""
    if memory_limit is not None:
        return whole_number("memory_limit", memory_limit, least=1, most=2**60)
    # What does not fit is an error on a device, and the end of the process on the host.
    memory = device_memory()
    return memory // 2 if memory is not None and is_cpu() else memory


def _check_place(path: Path | None) -> None:
    if jax.process_count() > 1:
        raise ValueError(
            f"There are {jax.process_count()} processes, and each might choose otherwise by its "
            "own clock. Tune in one process, with a file. Then apply Tuning.from_json(text) on "
            "all; or give make_step the method and the microbatch that were chosen."
        )
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"file: found no folder {shown(str(path.parent))}; make it first.")
