"""From a loss, an optimizer and a plan to a step."""

from collections.abc import Callable, Iterable
from typing import Any, Concatenate, SupportsIndex, TypeVar

import equinox as eqx
import optax
from jaxtyping import PRNGKeyArray, PyTree

from ..gradients import ClippedGrad, FilterSpec, filter_clipped_grad, filter_value_and_clipped_grad
from ..precision import Policy
from ..privacy import PrivacyPlan, Secret
from ..sharding import ShardingRules
from .disclosure import checked_names
from .seeds import key_of
from .state import Unrecorded
from .step import MicrobatchSize, Step

Model = TypeVar("Model")


def make_step(
    loss: Callable[Concatenate[Model, ...], Any],
    optimizer: optax.GradientTransformation,
    plan: PrivacyPlan,
    *,
    num_examples: SupportsIndex,
    seed: Secret,
    l2_clip_norm: PyTree[Any],
    policy: Policy | None = None,
    sharding: ShardingRules | None = None,
    filter_spec: FilterSpec = eqx.is_inexact_array,
    keep_batch_dim: bool = False,
    rescale_to_unit_norm: bool = False,
    microbatch_size: MicrobatchSize = None,
    method: str = "auto",
    disclose: Iterable[str] = (),
) -> Step[Model]:
    """Makes one jitted step of private training from a loss, an optimizer and a plan.

    ```python
    step = dp.make_step(
        loss, optax.adam(1e-3), plan, num_examples=len(xs), seed=seed, l2_clip_norm=1.0
    )
    state, sampler = step.init(model), step.sampler(model, xs, ys)
    for t in range(plan.steps):
        indices, is_padding_example = sampler.batch(t)
        state = step(state, xs[indices], ys[indices], is_padding_example=is_padding_example)
    ```

    A step is the sum of clipped gradients (see `filter_clipped_grad`) divided by the expected batch
    size, the plan's noise, and the optimizer's update. The optimizer gets gradients and parameters
    in the accumulate dtype; the sum of parameter and update is rounded once, to the dtype that the
    parameter is stored in. With sharding rules all arrays stay where the rules put them.

    **Guarantee.** Sample, noise and the loss's own keys of step t are functions of the seed, of
    the run's identity, and of t, from separate streams. So a run that is repeated, from its start
    or from any of its states, repeats itself and releases nothing twice. The models of all steps
    together are `plan.epsilon()`-differentially private, if batches come from `step.sampler()`, the
    seed is secret, and nothing is disclosed.

    **Two runs with one seed** have independent noise (up to 64 bits of a hash) if their identities
    differ. The identity is a hash (BLAKE2b) of what this table lists:

    | they differ in | noise, keys of the loss | `sampler(model, *batch)` | `sampler()` |
    |---|---|---|---|
    | plan, `num_examples`, `policy`, clip norms, `rescale_to_unit_norm`, `method` | independent | \
independent | independent |
    | program of the optimizer: rates, schedules, weight decay | independent | independent | \
independent, if it runs on any two arrays |
    | program of the loss: constants, derivative rules, the model's architecture, `filter_spec` | \
independent | independent | **the same** |
    | the text of `for_run` | independent | independent | independent |
    | starting values of the model, examples of a data set of equal size, values in `extra`, the \
code of a callback, a state whose values were set by hand | **the same** | the same | the same |
    | microbatch size, sharding, mesh, devices, hosts, `disclose` | the same | the same except for \
padding | the same except for padding |

    So take another seed for another data set, and for another starting model: if two runs have the
    same noise, the difference of their models shows private data without noise. If two runs have
    the same sample and independent noise, each keeps its own epsilon, but the two together do not
    compose as independent runs do.

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
            decay) and the step's `extra`. Its state may share arrays with the model or within
            itself, because `init` copies. An optimizer that evaluates losses or gradients by itself
            (a line search, `optax.contrib.sam` in opaque mode, `sophia`) is refused: no noise would
            cover these.
        plan: sampling, noise, accounting.
        num_examples: the number of examples in the data set, on all hosts together; it is public.
        seed: **secret** (`secrets.randbits(128)`, or bytes): a number of at least 0 of any size, or
            bytes of any length, the same on all hosts. For one data set and one starting model; see
            the table above.
        l2_clip_norm: as for `filter_clipped_grad`.
        policy: as for `filter_clipped_grad`; it also holds for the noise.
        sharding: as for `filter_clipped_grad`; it also holds for noise and optimizer state.
        filter_spec: which leaves are trained.
        keep_batch_dim: whether `loss` is written for a batch; it then gets batches of one.
        rescale_to_unit_norm: as for `filter_clipped_grad`.
        microbatch_size: as for `filter_clipped_grad`; or "auto": a Trainer then finds the largest
            microbatch that fits into the memory of a device.
        method: as for `filter_clipped_grad`.
        disclose: names of figures of each batch that are shown although no plan accounts for them:
            "loss", "grad_norm", "num_examples". **Not private.**

    Raises:
        ValueError: `num_examples` or `seed` is not a whole number in its range; a name in
            `disclose` is unknown; and as for `filter_clipped_grad` and `plan.privatizer`.
    """
    sampler = plan.sampler(num_examples, seed)  # checks both

    def made(size: MicrobatchSize, run: str) -> Step[Model]:
        make_grad = filter_value_and_clipped_grad if names else filter_clipped_grad
        grad_fn = make_grad(
            loss,
            l2_clip_norm=l2_clip_norm,
            policy=policy,
            sharding=sharding,
            filter_spec=filter_spec,
            keep_batch_dim=keep_batch_dim,
            rescale_to_unit_norm=rescale_to_unit_norm,
            normalize_by=plan.sampling_prob * sampler.num_examples,
            microbatch_size=None if size == "auto" else size,
            method=method,
        )
        return Step(
            plan,
            sampler.num_examples,
            grad_fn,
            method,
            l2_clip_norm,
            rescale_to_unit_norm,
            names,
            size,
            filter_spec,
            run,
            unrecorded,
            loss,
            _noise(plan, grad_fn, key_of(sampler.seed, "noise", run)),
            optimizer,
            key_of(sampler.seed, "loss", run),
            sampler.seed,
            made,
        )

    names, unrecorded = checked_names(disclose), Unrecorded()
    return made(microbatch_size, run="")


def _noise(
    plan: PrivacyPlan, grad_fn: ClippedGrad[Any], key: PRNGKeyArray
) -> optax.GradientTransformation:
    if plan.noise_multiplier == 0:  # without noise, clipping may be without a bound as well
        grad_fn.expect_samples(plan.sampling)
        return optax.identity()
    return plan.privatizer(grad_fn, key=key)
