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
    """Makes one jitted step of private training out of a loss, an optimizer and a plan.

    ```python
    step = dp.make_step(
        loss, optax.adam(1e-3), plan, num_examples=len(xs), seed=seed, l2_clip_norm=1.0
    )
    state, sampler = step.init(model), step.sampler(model, xs, ys)
    for t in range(plan.steps):
        indices, is_padding_example = sampler.batch(t)
        state = step(state, xs[indices], ys[indices], is_padding_example=is_padding_example)
    ```

    A step is the sum of clipped gradients (`filter_clipped_grad`, which explains the arguments that
    are not below) divided by the expected batch size, the plan's noise, and the optimizer's update,
    for which gradients and parameters are in the accumulate dtype; the sum of parameter and update
    is rounded once, to the dtype that the parameter is stored in. With sharding rules everything
    stays where the rules put it.

    **Guarantee.** Sample, noise and the loss's own keys of step t are functions of the seed, of
    what the run is, and of t, from streams that never meet: a run that is repeated, from its start
    or from any state of it, repeats itself and releases nothing twice. The models of all steps
    together are `plan.epsilon()`-differentially private, if batches come from `step.sampler()`, the
    seed is secret, and nothing is disclosed.

    **Two runs with one seed** are two runs with independent noise, up to 64 bits of a hash, where
    the hash (BLAKE2b) of what they are differs:

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
    | microbatch size, sharding, mesh, devices, hosts, `disclose` | the same | the same but for \
padding | the same but for padding |

    So take another seed for another data set, and for another start: where noise is the same, the
    difference of two models shows what is private without any. Where the sample is the same and the
    noise is not, each run keeps its own epsilon, and the two together do not compose as
    independent runs do.

    | case | what happens |
    |---|---|
    | nothing is sampled, or all is padding | noise alone moves the model |
    | an example's loss or gradient is not finite | it adds exactly zero |
    | `plan.noise_multiplier` is 0 | no noise; epsilon is infinite |
    | the same, and `l2_clip_norm` is `inf` | ordinary, non-private training |

    Args:
        loss: of one example, `loss(model, *example)`, or with `key=...`: it then gets a key of its
            own for each example and step.
        optimizer: any of optax's, without noise; it is given parameters, for weight decay, and what
            the step is given as `extra`. Its state may share arrays with the model or within
            itself: `init` copies. One that evaluates losses or gradients by itself (a line search,
            `optax.contrib.sam` in opaque mode, `sophia`) is refused: no noise would cover that.
        plan: sampling, noise, accounting.
        num_examples: in the data set, on all hosts together; a public number.
        seed: **secret** (`secrets.randbits(128)`, or bytes), a number of any size from 0 or bytes
            of any length, the same on all hosts. For one data set and one starting model; see the
            table above.
        l2_clip_norm: as for `filter_clipped_grad`.
        policy: as for `filter_clipped_grad`; noise follows it, too.
        sharding: as for `filter_clipped_grad`; noise and optimizer state follow it, too.
        filter_spec: what is trained.
        keep_batch_dim: whether `loss` is written for a batch; it then sees batches of one.
        rescale_to_unit_norm: as for `filter_clipped_grad`.
        microbatch_size: as for `filter_clipped_grad`; or "auto", for a Trainer to find the largest
            that fits into the memory of a device.
        method: as for `filter_clipped_grad`.
        disclose: names of figures of each batch that are to be seen although no plan accounts for
            them: "loss", "grad_norm", "num_examples". **Not private.**

    Raises:
        ValueError: `num_examples` or `seed` is no whole number in its range; a name in `disclose`
            is unknown; and as `filter_clipped_grad` and `plan.privatizer`.
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
