"""One step of private training: a batch and its mask in, the next state out."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, SupportsIndex, TypeVar, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, PRNGKeyArray

from ..gradients import PerExample
from ..paths import below
from ..privacy import GaussianPrivatizerState, fold_text, whole_number
from ..programs import is_changed_by_reading
from ..trees import PyTree
from ..updates import stored_state, widened
from .disclosure import disclosed
from .dispatch import Carry, Dispatch, FlatState
from .extra import checked_extra, updated
from .identity import texts_of
from .settings import MicrobatchSize
from .starting import Starting
from .state import (
    Specs,
    TrainState,
    constrained,
    is_gone,
    moved,
    refuse_used_up,
    strong,
)

Model = TypeVar("Model")
Mask = Bool[Array | np.ndarray, "*steps batch"]
# That a call may take: more would gain nothing, and hold as many batches.
_MOST_STEPS = 2**16


class _Arguments(NamedTuple):
    """What a compiled step is given beside what it uses up."""

    batch: tuple[PyTree[Any], ...]
    mask: Any
    extra: dict[str, Any]
    loss_root: PRNGKeyArray | None
    rounding_root: PRNGKeyArray | None
    specs: Specs
    step: Any


class Step(Starting[Model]):
    """A compiled step of private training, made by `make_step`.

    `state = step.init(model)`, then `state = step(state, *batch, is_padding_example=mask)` for the
    batches of `step.sampler()`. A call **uses up** its state: the buffers are donated to the next
    state. Copy what is still needed. A state that was used up is refused.

    `make_step` says what two steps with one seed have in common. Neither seed nor keys are in
    the printed form of a step, in an error, or in the compiled program.

    Attributes:
        plan: what sampling, noise and accounting follow.
        num_examples: in the data set.
        grad_fn: the clipped gradient.
        policy: as it was given, and so `sharding`, `method`, `l2_clip_norm` and
            `rescale_to_unit_norm`.
        disclose: what each batch discloses although no plan accounts for it.
        microbatch_size: how many examples a device processes at once; or who is to say that.
        filter_spec: what is trained.
        shared: whether hosts share one draw evenly.
        run: the text that `for_run` was given; empty without.
        steps_per_call: how many steps a call takes.
        unrecorded: what trainers without a directory took of its steps.
    """

    def with_microbatch_size(self, size: int | None) -> "Step[Model]":
        """The same step, with other microbatches.

        Args:
            size: how many examples a device processes at once; None for the engine's choice.
        """
        return self.with_choice(self.method, size)

    def with_choice(self, method: str, microbatch_size: MicrobatchSize) -> "Step[Model]":
        """The same step by another method, which is another program, and another microbatch.

        Args:
            method: as for `make_step`.
            microbatch_size: the same.
        """
        return dataclasses.replace(self, method=method, microbatch_size=microbatch_size)

    def for_run(self, run: str) -> "Step[Model]":
        """The same step, with another sample, other noise and other keys for the loss.

        Args:
            run: a text that is different for each run with this seed; not secret. It replaces an
                earlier text. With an empty text the step is as `make_step` made it.
        """
        return dataclasses.replace(self, run=run)

    def with_steps_per_call(self, number: SupportsIndex) -> "Step[Model]":
        """The same steps, several of them in one call, which takes less time beside them.

        ```python
        several = step.with_steps_per_call(8)
        state = several(state, xs, ys, is_padding_example=masks)  # 8 batches each, stacked
        ```

        A call scans over the batches. Sample, noise and keys of a step are those of the single step
        with its number, and its parameters the same up to rounding. `disclosed` has the figures of
        the last step. `check_privacy` and `check_precision` take it as any step.

        Args:
            number: of steps, at least 1. Arrays of a batch and the mask have so many entries in
                front of their examples. The step takes no `extra` if it is more than 1, because
                that may differ from step to step.

        Raises:
            ValueError: it is no whole number from 1 to 65,536.
        """
        number = whole_number("steps_per_call", number, least=1, most=_MOST_STEPS)
        if number == self.steps_per_call:
            return self
        if number not in self._known_several:
            self._known_several[number] = dataclasses.replace(self, steps_per_call=number)
        return self._known_several[number]

    @functools.cached_property
    def _known_several(self) -> dict[int, "Step[Model]"]:
        """By number, since a step that was traced is not traced again."""
        return {}

    def place(self, batch: PyTree[Any]) -> PyTree[Any]:
        """Puts this host's part of a batch where the step wants it.

        Args:
            batch: arrays with examples in front; with several steps a call, behind the steps.
        """
        if self.sharding is None:
            return jax.tree.map(jnp.asarray, batch)
        with self.mesh():
            return self.sharding.shard_batch(batch, stacked=self.steps_per_call > 1)

    def __call__(
        self,
        state: TrainState[Model],
        /,
        *batch: PyTree[Any],
        is_padding_example: Mask,
        extra: Mapping[str, Any] | None = None,
    ) -> TrainState[Model]:
        """Takes a step: clipped gradient, noise, update. Compiled once for each shape of batch.

        Args:
            state: the state after the step before. It is used up.
            *batch: arrays, or trees of arrays, with examples along their leading axes; behind the
                steps, if a call takes several.
            is_padding_example: True where a slot holds no real example: the sampler's mask.
            extra: more arguments of the optimizer's update, numbers or arrays by name, for instance
                `{"value": v}` for `optax.contrib.reduce_on_plateau`. **Public values only**, such
                as a loss on held-out data: they change what is released, and no noise covers them.
                The same names at every step.

        Raises:
            ValueError: as for `grad_fn`; `microbatch_size` is still a text; an array of `state` or
                `batch` was used up by an earlier step; the optimizer does not take `extra`.
        """
        flat = FlatState.of(state, self.sharding)
        refuse_used_up("batch", batch)
        after = self.next(flat, batch, is_padding_example, extra).state
        # JAX may read a numpy array where it lies: the caller may fill it anew from now on.
        return after if isinstance(after.step, Tracer) else jax.block_until_ready(after)

    def next(
        self,
        flat: FlatState[Model],
        batch: tuple[PyTree[Any], ...],
        mask: Mask,
        extra: Mapping[str, Any] | None = None,
    ) -> FlatState[Model]:
        """As a call of the step that is not waited for, for a loop that reads the state rarely.

        Args:
            flat: the state before, by `FlatState.of` or of the step before. Used up.
            batch: in memory that nobody writes to.
            mask: `is_padding_example`.
            extra: as for a call.
        """
        if any(map(is_gone, flat.carry.arrays)):
            refuse_used_up("state", flat.state)
        arguments = self._arguments(batch, mask, extra, flat)
        with self.mesh():
            carry, (count, shown) = self._taken(arguments, flat.carry)
        return FlatState(carry, count, flat.specs, shown)

    def lower(
        self,
        state: TrainState[Model],
        /,
        *batch: PyTree[Any],
        is_padding_example: Any,
        extra: Mapping[str, Any] | None = None,
    ) -> jax.stages.Lowered:
        """Lowers the step for these arguments; nothing is computed.

        Args:
            state: arrays or shapes of arrays; not used up. So the others.
            *batch: as for a call.
            is_padding_example: the same.
            extra: the same.
        """
        flat = FlatState.of(state, self.sharding)
        arguments = self._arguments(batch, is_padding_example, extra, flat)
        with self.mesh():
            return self._taken.lower(arguments, flat.carry)

    def _arguments(
        self,
        batch: tuple[PyTree[Any], ...],
        mask: Any,
        extra: Mapping[str, Any] | None,
        flat: FlatState[Model],
    ) -> _Arguments:
        if mask is None:
            raise ValueError(
                "is_padding_example is None. A sampled batch has padding, whose index is -1: "
                "without the mask the last example would count in every padding slot. Hand on the "
                "mask that sampler.take or sampler.batch returns; for a batch without padding, "
                "np.zeros(length, bool)."
            )
        if isinstance(self.microbatch_size, str):
            raise ValueError(
                f'microbatch_size is "{self.microbatch_size}", which a Trainer replaces; without '
                "one, take step.with_microbatch_size(size), or for what dp.tune(step.grad_fn, ...) "
                "returned, step.with_choice(*tuned.asked_for)."
            )
        if self.steps_per_call > 1:
            self._check_stacked(batch, mask, extra)
        return _Arguments(
            batch,
            mask,
            checked_extra(self._update, extra),
            self._loss_root if self._takes_key(len(batch)) else None,
            self._rounding_root,
            flat.specs,
            flat.step,
        )

    def _check_stacked(
        self, batch: tuple[PyTree[Any], ...], mask: Any, extra: Mapping[str, Any] | None
    ) -> None:
        number = self.steps_per_call
        if extra:
            raise ValueError(
                f"extra holds {', '.join(map(repr, extra))}, and a call takes {number} steps, each "
                "of which may want another value: take one step a call, steps_per_call=1."
            )
        arrays = {below("batch", path): x for path, x in jax.tree_util.tree_leaves_with_path(batch)}
        for name, array in {**arrays, "is_padding_example": mask}.items():
            if np.ndim(array) < 2 or np.shape(array)[0] != number:
                raise ValueError(
                    f"{name} has shape {np.shape(array)}, and a call takes {number} steps: stack "
                    f"{number} batches, so that all arrays have shape ({number}, slots, ...)."
                )

    @functools.cached_property
    def _taken(self) -> Dispatch[_Arguments, Carry, tuple[Array, dict[str, Array]]]:
        def take(
            arguments: _Arguments, carry: Carry
        ) -> tuple[Carry, tuple[Array, dict[str, Array]]]:
            model, opt_state, disclosed, average = strong(carry)
            arguments = arguments._replace(batch=strong(arguments.batch))
            state = TrainState(model, opt_state, arguments.step, disclosed, average)
            shown: dict[str, Array] = {}
            if self.steps_per_call == 1:
                after = self._next(state, arguments)
                state = constrained(after, arguments.specs, self.sharding)
            else:
                state, shown = self._several(state, arguments)
            carry = (state.model, state.opt_state, state.disclosed, state.average)
            return carry, (state.step, shown)

        return Dispatch(take)

    def _several(
        self, state: TrainState[Model], given: _Arguments
    ) -> tuple[TrainState[Model], dict[str, Array]]:
        """The state after a step for each batch, and what each of them disclosed."""
        arrays, rest = eqx.partition(state, eqx.is_array)

        def turn(arrays: Any, its: Any) -> tuple[Any, dict[str, Array]]:
            batch, mask = its
            its_state = eqx.combine(arrays, rest)
            after = self._next(its_state, given._replace(batch=batch, mask=mask))
            after = constrained(after, given.specs, self.sharding)
            after, others = eqx.partition(after, eqx.is_array)
            if not eqx.tree_equal(others, rest):
                raise ValueError(
                    "The optimizer's state holds values that are no arrays, and a step changes "
                    "them, so that several steps cannot be one program: take one step a call, "
                    "steps_per_call=1."
                )
            return after, eqx.combine(after, rest).disclosed

        arrays, shown = jax.lax.scan(turn, arrays, (given.batch, given.mask))
        if self.sharding is not None:  # for every host to read
            shown = {k: self.sharding.place(x, PartitionSpec(None)) for k, x in shown.items()}
        return eqx.combine(arrays, rest), shown

    def _next(self, state: TrainState[Model], given: _Arguments) -> TrainState[Model]:
        prepared = self.grad_fn.prepare(state.model, given.batch, given.loss_root, given.mask)
        params = self._wide(state.model)
        # Known while the step is traced: what it is, and so what its keys are.
        if is_changed_by_reading(prepared.traced.program.jaxpr):
            texts = self._texts(state.model, given.batch, given.extra)
        else:
            texts = texts_of(prepared, self.sharding, self._update, params, given.extra)
        text = "\n".join((self._known, *texts))
        if given.loss_root is not None:
            key = fold_text(given.loss_root, text)
            prepared = prepared.with_key(jax.random.fold_in(key, state.step))
        result = self.grad_fn.complete(prepared)
        values, grads = cast(
            "tuple[PerExample | None, PyTree[Array]]", result if self.disclose else (None, result)
        )
        noise_state, opt_state = state.opt_state
        grads, noise_state = self._noisy(grads, noise_state, text)
        grads, opt_state = widened((grads, opt_state), self.policy)
        updates, opt_state = updated(self._update, grads, opt_state, params, given.extra)
        opt_state = stored_state(opt_state, self.policy)
        key = None
        if given.rounding_root is not None:
            key = jax.random.fold_in(fold_text(given.rounding_root, text), state.step)
        model, average = self._parameters.updated(state.model, updates, key), state.average
        if self.ema is not None:
            average = moved(average, self._wide(model), self.ema, state.step + 1)
        return TrainState(
            model,
            (noise_state, opt_state),
            state.step + 1,
            disclosed(self.disclose, values, given.mask),
            average,
        )

    def _noisy(self, grads: PyTree[Array], state: Any, text: str) -> tuple[PyTree[Array], Any]:
        if not isinstance(state, GaussianPrivatizerState):  # there is no noise
            return grads, state
        grads, after = cast(
            Any, self._noise.update(grads, state._replace(key=fold_text(state.key, text)))
        )
        return grads, after._replace(key=state.key)
