"""A step of private training, made from a loss, an optimizer and a plan."""

import inspect
import warnings
from collections.abc import Iterator
from types import FunctionType
from typing import Any, SupportsIndex

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from ..expected import expect, flag, function, real_number
from ..expected import optimizer as checked_optimizer
from ..gradients import FilterSpec, MethodName, Quantile, filter_clipped_grad
from ..losses import ClipNorms, Loss, Model
from ..precision import JmpPolicy, Policy
from ..privacy import PrivacyPlan, Secret, checked_secret, warn_of_small
from ..sharding import ShardingRules
from .state import AdaptiveState
from .step import Step

# Transformations that an optimizer must not hold, by the functions that make them.
_NOISES = ("gaussian_privatizer", "differentially_private_aggregate")
_CLIPS = ("clip_by_global_norm", "clip", "adaptive_grad_clip")


def make_step(
    loss: Loss[Model, ...],
    optimizer: optax.GradientTransformation,
    plan: PrivacyPlan,
    *,
    num_examples: SupportsIndex,
    l2_clip_norm: ClipNorms,
    policy: Policy | JmpPolicy | None = None,
    sharding: ShardingRules | None = None,
    filter_spec: FilterSpec = eqx.is_inexact_array,
    keep_batch_dim: bool = False,
    microbatch_size: int | None = None,
    method: MethodName = "auto",
    augmentations: int = 1,
    ema: float | None = None,
    shared: bool = False,
    seed: Secret | None = None,
) -> Step[Model]:
    """Makes one jitted step of private training from a loss, an optimizer and a plan.

    ```python
    step = dp.make_step(loss, optax.adam(1e-3), plan, num_examples=len(xs), l2_clip_norm=1.0)
    state, sampler = step.init(model), step.sampler()
    for t in range(plan.steps):
        (x, y), is_padding_example = sampler.take(t, xs, ys)
        state = step(state, x, y, is_padding_example=is_padding_example)
    ```

    A step is the sum of clipped gradients (see `filter_clipped_grad`) divided by the expected batch
    size, the plan's noise, and the optimizer's update. The optimizer gets gradients and parameters
    in the accumulate dtype. Its state is stored in the policy's optimizer dtype, and updated in the
    wider of the two (except scalars, such as learning rates that are state). The sum of parameter
    and update is rounded once, to the dtype that the parameter is stored in, as the policy's
    `rounding` says (see `apply_updates`). With sharding rules all arrays stay where the rules put
    them.

    **Randomness.** `step.init` draws 256 random bits from the operating system for the noise, the
    loss's own keys and stochastic rounding, and `step.sampler` draws others for the batches.
    Nothing stores them, so no two runs have noise or samples in common. The keys of step t follow
    from these bits, the purpose, t and the path of the leaf. Noise is certified (see
    `gaussian_privatizer`).

    **Guarantee.** The models of all steps that follow one `init`, seen together, are
    `plan.epsilon()`-differentially private, if there are at most `plan.steps` of them and batches
    come from one `step.sampler()`. Each further `init` is a separate release. `Trainer` counts the
    steps of all starts in one directory.

    | case | what happens |
    |---|---|
    | nothing is sampled, or all is padding | only noise moves the model |
    | an example's loss or gradient is not finite | it adds exactly zero |
    | `plan.noise_multiplier` is 0 | no noise; epsilon is infinite |
    | the same, and `l2_clip_norm` is `inf` | ordinary, non-private training |

    Args:
        loss: the loss of one example, `loss(model, *example)`, or with `key=...`: it then gets a
            separate key for each example and step.
        optimizer: an optax optimizer, without noise. Its update gets the parameters (for weight
            decay). Its state may share arrays with the model or within itself, because `init`
            copies. An optimizer that evaluates losses or gradients (a line search,
            `optax.contrib.sam` in opaque mode, `sophia`) is refused: no noise would cover these. So
            is one that holds a privatizer: the step adds the plan's noise.
        plan: sampling, noise, accounting.
        num_examples: the number of examples in the data set, on all hosts together; it is public.
            With `unit=dp.Users(...)` in the plan, the number of users.
        l2_clip_norm: as for `filter_clipped_grad`. (In place of its `rescale_to_unit_norm`, chain
            `optax.scale(1 / l2_clip_norm)` before the optimizer.)
        policy: as for `filter_clipped_grad`; it also holds for the noise.
        sharding: as for `filter_clipped_grad`; it also holds for noise and optimizer state.
        filter_spec: which leaves are trained.
        keep_batch_dim: whether `loss` is written for a batch; it then gets batches of one.
        microbatch_size: as for `filter_clipped_grad`; `dp.tune` measures a good one.
        method: as for `filter_clipped_grad`.
        augmentations: as for `filter_clipped_grad`: K views of an example, one clip. `loss` then
            takes a `key`, from which it makes a view.
        ema: the decay, in [0, 1), of a moving average of what is trained (0.999, say). It is in
            `state.averaged`, is saved in checkpoints, and is what a Trainer evaluates. It changes
            neither the steps nor epsilon: it is post-processing.
        shared: whether every host can read every example. All hosts then share one draw evenly, and
            batches have fewer slots (see `PoissonSampler`): 4,608 instead of 8,704, if 64 hosts
            expect 4,096 examples together. On one host it changes nothing.
        seed: **secret**: for experiments that must repeat. Keys then follow from the seed and the
            number of the start (0 for `step.init`), so two directories, data sets or starting
            models with one seed share their noise, and the difference of their models shows private
            data without noise. A number of at least 0, or bytes, the same on all hosts; take
            `secrets.randbits(128)`, because a small one can be guessed. None: fresh randomness.

    Raises:
        ValueError: `num_examples` or `seed` is not a whole number in its range, `ema` no number in
            its own; the optimizer holds a privatizer; and as for `filter_clipped_grad` and
            `plan.privatizer`.

    Warns:
        UserWarning: the optimizer clips the noisy gradient (`optax.clip_by_global_norm`); the seed
            is small enough to be guessed.
    """
    function("loss", loss, "loss(model, *example)")
    checked_optimizer("optimizer", optimizer)
    expect("plan", plan, PrivacyPlan, "a dp.PrivacyPlan")
    _refuse_noise(optimizer)
    num_examples = plan.sampler(num_examples, seed=b"its length").num_examples
    grad_fn = filter_clipped_grad(
        loss if plan.unit is None else plan.unit.loss(loss),
        l2_clip_norm=l2_clip_norm,
        policy=policy,
        sharding=sharding,
        filter_spec=filter_spec,
        keep_batch_dim=keep_batch_dim,
        normalize_by=plan.sampling_prob * num_examples,
        microbatch_size=microbatch_size,
        method=method,
        augmentations=augmentations,
    )
    if seed is not None:
        seed = checked_secret("seed", seed)
        warn_of_small("seed", seed)
    return Step(
        plan=plan,
        _num_examples=num_examples,
        grad_fn=grad_fn.of_samples(plan.batches),
        _ema=None if ema is None else real_number("ema", ema, lambda x: 0 <= x < 1, "in [0, 1)"),
        _shared=flag("shared", shared),
        _update=_adapted(optimizer, plan, l2_clip_norm),
        _filter_spec=filter_spec,
        _seed=seed,
    )


def _adapted(
    optimizer: optax.GradientTransformation, plan: PrivacyPlan, l2_clip_norm: Any
) -> optax.GradientTransformation:
    """The optimizer; with a clip norm in its state, if that follows a quantile.

    Then it is for a sum `(gradients, count)`, divided by the expected batch size, whose count moves
    the clip norm.
    """
    if not isinstance(l2_clip_norm, Quantile):
        return optimizer
    if plan.noise is not None:
        raise ValueError(
            "nothing accounts for a clip norm that changes with correlated noise. Take a fixed "
            "clip norm, dp.clipping.AutoS(), or a plan of independent noise."
        )

    def init(params: optax.Params) -> Any:
        return AdaptiveState(jnp.float32(l2_clip_norm.clip_norm), optimizer.init(params))

    def update(updates: Any, state: Any, params: optax.Params | None = None) -> tuple[Any, Any]:
        clip_norm = l2_clip_norm.next(state.clip_norm, updates[1])
        grads, inner = optimizer.update(updates[0], state.optimizer, params)
        return grads, AdaptiveState(clip_norm, inner)

    return optax.GradientTransformation(init, update)


def _refuse_noise(optimizer: optax.GradientTransformation) -> None:
    """Refuses an optimizer that holds a privatizer; warns of one that clips.

    Optimizers are functions, whose names say who made them, and those that are chained stand in the
    closure of the chain. Optimizers that are hidden in another way are not found.

    Raises:
        ValueError: a privatizer is in it.
    """
    makers = {function.__qualname__.split(".")[0] for function in _within(optimizer.update, set())}
    if noises := makers.intersection(_NOISES):
        raise ValueError(
            f"The optimizer holds {', '.join(noises)}, and the step adds the plan's noise itself: "
            "there would be noise twice. Give make_step the optimizer alone, without a privatizer."
        )
    if clips := makers.intersection(_CLIPS):
        warnings.warn(
            f"The optimizer clips the noisy gradient, which is mostly noise: {', '.join(clips)}. "
            "Leave it out: each example's gradient is clipped by l2_clip_norm.",
            stacklevel=3,
        )


def _within(value: object, seen: set[int]) -> Iterator[FunctionType]:
    """A function and those in its closure, at any depth."""
    if not isinstance(value, FunctionType) or id(value) in seen:
        return
    seen.add(id(value))
    yield value
    for found in jax.tree.leaves(dict(inspect.getclosurevars(value).nonlocals)):
        yield from _within(found, seen)
