"""A step of private training, made from a loss, an optimizer and a plan."""

from collections.abc import Callable, Iterable
from typing import Any, Concatenate, SupportsIndex, TypeVar

import equinox as eqx
import optax

from ..expected import expect, flag, function
from ..expected import optimizer as checked_optimizer
from ..gradients import FilterSpec, MethodName
from ..precision import Policy
from ..privacy import PrivacyPlan, Secret, real_number
from ..sharding import ShardingRules
from ..trees import PyTree
from .disclosure import Disclosed, checked_names
from .kept_secret import new_secret
from .settings import MicrobatchSize
from .step import Step

Model = TypeVar("Model")


def make_step(
    loss: Callable[Concatenate[Model, ...], Any],
    optimizer: optax.GradientTransformation,
    plan: PrivacyPlan,
    *,
    num_examples: SupportsIndex,
    seed: Secret | None,
    l2_clip_norm: PyTree[Any],
    policy: Policy | None = None,
    sharding: ShardingRules | None = None,
    filter_spec: FilterSpec = eqx.is_inexact_array,
    keep_batch_dim: bool = False,
    rescale_to_unit_norm: bool = False,
    microbatch_size: MicrobatchSize = None,
    method: MethodName = "auto",
    ema: float | None = None,
    disclose: Iterable[Disclosed] = (),
    shared: bool = False,
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
    in the accumulate dtype. Its state is stored in the policy's optimizer dtype, and updated in the
    wider of the two (but for numbers by themselves, such as learning rates that are state). The sum
    of parameter and update is rounded once, to the dtype that the parameter is stored in, as the
    policy's `rounding` says (see `apply_updates`). With sharding rules all arrays stay where the
    rules put them.

    **Guarantee.** Sample, noise, the loss's own keys and the bits of stochastic rounding of step t
    are functions of the seed, of the run's identity, and of t, from separate streams. So a run that
    is repeated, from its start or from any of its states, repeats itself and releases nothing
    twice. The models of all steps together are `plan.epsilon()`-differentially private, if batches
    come from `step.sampler()`, the seed is secret, and nothing is disclosed.

    **Two runs with one seed** have independent noise (up to 64 bits of a hash) if their identities
    differ. The identity is a hash (BLAKE2b) of what this table lists:

    | they differ in | noise, keys of the loss | `sampler(model, *batch)` | `sampler()` |
    |---|---|---|---|
    | plan, `num_examples`, `policy`, clip norms, `rescale_to_unit_norm`, `method`, `shared` | \
independent | independent | independent |
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
            the table above. None: random bits of this process, which nobody knows and nobody can
            give again. A Trainer with a directory then begins no run and goes on with none, but
            returns the state of a run that is finished.
        l2_clip_norm: as for `filter_clipped_grad`.
        policy: as for `filter_clipped_grad`; it also holds for the noise.
        sharding: as for `filter_clipped_grad`; it also holds for noise and optimizer state.
        filter_spec: which leaves are trained.
        keep_batch_dim: whether `loss` is written for a batch; it then gets batches of one.
        rescale_to_unit_norm: as for `filter_clipped_grad`.
        microbatch_size: as for `filter_clipped_grad`; or "auto": a Trainer then finds the largest
            that fits into the memory of a device; or "tune": a Trainer then measures which is
            fastest, and with `method="auto"` by which method (see `tune`). The run is that of a
            step that is made with what was chosen; the method is part of its identity.
        method: as for `filter_clipped_grad`.
        ema: the decay, in [0, 1), of a moving average of what is trained (0.999, say). It is in
            `state.averaged`, is saved in checkpoints, and is what a Trainer evaluates. It changes
            neither the steps nor epsilon: it is post-processing.
        disclose: names of figures of each batch that are shown although no plan accounts for them:
            "loss", "grad_norm", "num_examples". **Not private.**
        shared: whether every host can read every example. All hosts then deal one draw out evenly,
            and batches have fewer slots (see `PoissonSampler`): 4,608 and not 8,704, where 64 hosts
            expect 4,096 examples together. It belongs to the run, and stays as it is when the run
            is resumed. On one host it changes nothing but the identity.

    Raises:
        ValueError: `num_examples` or `seed` is not a whole number in its range, `ema` no number in
            its own; a name in `disclose` is unknown; and as for `filter_clipped_grad` and
            `plan.privatizer`.
    """
    function("loss", loss, "loss(model, *example)")
    checked_optimizer("optimizer", optimizer)
    expect("plan", plan, PrivacyPlan, "a dp.PrivacyPlan")
    known = new_secret() if seed is None else seed
    sampler = plan.sampler(num_examples, known)  # checks both
    return Step(
        plan=plan,
        num_examples=sampler.num_examples,
        l2_clip_norm=l2_clip_norm,
        policy=policy,
        sharding=sharding,
        filter_spec=filter_spec,
        rescale_to_unit_norm=rescale_to_unit_norm,
        microbatch_size=microbatch_size,
        method=method,
        ema=None if ema is None else real_number("ema", ema, lambda x: 0 <= x < 1, "in [0, 1)"),
        disclose=checked_names(disclose),
        shared=flag("shared", shared),
        _loss=loss,
        _update=optimizer,
        _keep_batch_dim=keep_batch_dim,
        _seed=sampler.seed,
        is_seed_known=seed is not None,
    )
