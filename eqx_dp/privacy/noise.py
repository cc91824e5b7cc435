"""Gaussian noise on a clipped sum of gradients."""

from typing import Any, NamedTuple, SupportsFloat, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jaxtyping import Array, PRNGKeyArray

from ..expected import expect
from ..paths import dotted
from ..precision import JmpPolicy, Policy, check_noise_range, checked_policy
from ..programs import in_marked_equation
from ..sharding import ShardingRules, checked_rules
from ..shown import shapes
from ..trees import PyTree
from .gaussian import LEAF_BITS, Leaf, Past, with_noise
from .keys import Secret, printed_without_key, refuse_to_pickle, single_key, without_key
from .noise_checks import check_arrays_alone, checked_gradient, noise_key, static_stddev
from .strategies import Banded
from .stream import NoiseStream, checked_stream, first_stream


class GaussianPrivatizerState(NamedTuple):
    """State of `gaussian_privatizer`: all that the noise of later steps depends on.

    **Secret**: do not save it, and let `init` draw another one at the next start.

    Attributes:
        stream: of the noise.
        past: What the last updates keep, latest first, if anything is kept.
    """

    stream: NoiseStream
    past: tuple[Past, ...] = ()

    __repr__, __pdoc__, __reduce__ = without_key, printed_without_key, refuse_to_pickle


def gaussian_privatizer(
    *,
    stddev: SupportsFloat,
    key: PRNGKeyArray | Secret | None = None,
    policy: Policy | JmpPolicy | None = None,
    sharding: ShardingRules | None = None,
    correlation: Banded | None = None,
) -> optax.GradientTransformation:
    """Adds independent Gaussian noise of one standard deviation to every entry of the gradients.

    The gradients are a *sum* of clipped per-example gradients, as `filter_clipped_grad` returns it.
    Noise comes first in the chain: `optax.chain(gaussian_privatizer(...), optax.adam(...))`. All
    that follows is post-processing and costs no privacy.

    Noise is drawn and added by integers alone, from one block of the cipher ChaCha for each two
    entries. The noisy sum is rounded to a multiple of a public power of two (`g`, from 2^-6 to
    2^-5 of `stddev`), and then to the wider of the policy's noise dtype and the gradient's, which
    is the result's. (Without a policy the accumulate dtype is float32, and the noise dtype the
    wider of float32 and the gradient's.)

    On GPUs, TPUs and meshes each leaf is one kernel (on a GPU two), and no array of noise is held
    beside a float32 result, in nearly all shardings. A GPU's compiler takes 20 s for each kernel.
    So small leaves are one kernel together, and leaves of one shape are, too, unless axes are
    Explicit: they are copied, at most 2^24 entries at once. One CPU holds a copy of the sum and 16
    bits an entry while it draws.

    The state is a stream of noise (see `noise_stream`): a key, and how many updates were made. The
    noise of an entry is a pure function of these, the leaf's number in the tree, and the entry's
    position in the leaf. Its bits are the same on CPUs, GPUs and TPUs, and for any compilation.

    Without `key` every `init` draws a key from 256 random bits of the operating system. No two runs
    share noise then, and a run that continues from a saved model calls `init` again. **A key given
    by hand repeats its noise**: two runs with one key, or a second `init` for a tree with the same
    paths and shapes, have the same noise. It cancels in the difference of their models, and neither
    is private any more. One privatizer may serve several groups of `optax.multi_transform`,
    `optax.partition` or `optax.masked`: their paths differ. A program that holds a compiled `init`
    asks the host for the key (on several hosts it holds one that is given: then call `init` outside
    of `jit`, or the secret is in printed programs and JAX's cache on disk).

    **Guarantee.** If one example changes the sum by at most `S` in L2 norm, one update is the
    Gaussian mechanism with noise multiplier `stddev / S` (Dwork and Roth 2014, appendix A; for
    sampled batches, Abadi et al. 2016). `PrivacyPlan.privatizer` sets `stddev` to match what is
    accounted for. It is proven for the numbers that the machine adds, and not for real numbers
    alone: with d entries and T steps, d T at most `entries_covered(delta)` (2e13 at 1e-5),
    epsilon grows by less than 5e-5 and delta by a thousandth, for an epsilon of at most 70.
    `finite_precision.md` has the proof. A plan has paid for it, and its privatizer refuses more
    entries. Assumed are a secret key, and a cipher that nobody can tell from random numbers.

    | case | what happens |
    |---|---|
    | `stddev` is 0 | gradients are returned unchanged, bit for bit and in their own dtype |
    | leaf is None (not trained) | stays None and uses no key |
    | leaf has no entries | is returned without entries |
    | gradient is NaN or infinite | the result is not finite: clip before |
    | gradient is huge, tiny or -0 | exactly the nearest multiple of `g` to the sum plus noise |
    | a float64 sum is beyond 2^62 `g` | it is taken for 2^62 `g` |
    | leaf is narrower than the accumulate dtype | refused, unless `policy.unsafe` |
    | leaf holds integers, booleans or complex numbers | refused |
    | one privatizer serves several groups of a tree's leaves | every leaf has its own noise |
    | the result is narrower than float32 (unsafe) | the noisy sum, made in float32, is rounded |
    | a tree has more than 2^20 leaves | refused |
    | a `shard_map` splits a leaf, and not the state | refused: all parts would get one noise |
    | the same with `check_vma=False`, or in a `pmap` | unseen; `check_privacy` is undecided |
    | more than 2^64 updates follow one `init` | noise repeats; a plan has fewer steps |
    | one state is given to two updates | both have the same noise; `check_privacy` reports it |

    With `correlation`, an update takes back part of the noise of updates before, which is drawn
    again, or kept in the state. One update is then no Gaussian mechanism by itself: all together
    are the matrix mechanism that `dp.Banded` describes, while the state is that of one `init`.

    With sharding rules every device draws its own part of the noise, without communication, and the
    same key gives the same noise on any number of devices and hosts.

    Args:
        stddev: Standard deviation of the noise, in the unit of the gradients. A number, not a JAX
            array: it is part of the compiled program.
        key: None: fresh randomness at every `init`. Or, to repeat an experiment, a secret that is
            not used elsewhere: a number of any size or bytes, from which a key of ChaCha is made;
            or such a key.
        policy: Gives the accumulate and noise dtypes, and whether narrow ones are allowed.
        sharding: The noise is placed where the rules place accumulators. The updates must then
            have the tree of the model that the rules describe.
        correlation: How noise of one step depends on that of steps before; None: independent.

    Returns:
        An `optax.GradientTransformation`; its state is a `GaussianPrivatizerState`.

    Raises:
        ValueError: If `stddev` is negative, not finite or traced; `key` is not one key or one
            secret; `sharding` is not rules. From `update`: if a leaf is refused as in the table
            above, or `stddev` is beyond the normal range of the noise dtype. From `init`: if a leaf
            is no array, or it would draw one key for several models under `vmap`.
    """
    policy, rules = checked_policy(policy), checked_rules(sharding)
    allowed = "a dp.Banded, or None for independent noise"
    expect("correlation", correlation, (Banded, type(None)), allowed)
    how = _How(static_stddev(stddev), policy, rules, correlation or Banded())
    root = None if key is None else single_key(key)

    def init(params: optax.Params) -> GaussianPrivatizerState:
        check_arrays_alone(params)
        # With what is masked: groups of one tree get streams of their own, also by one key.
        leaves = jax.tree_util.tree_leaves_with_path(
            params, lambda node: isinstance(node, optax.MaskedNode)
        )
        tree = [(jax.tree_util.keystr(path), np.shape(leaf)) for path, leaf in leaves]
        stream = first_stream(root, f"eqx_dp privatizer {tree}")
        return GaussianPrivatizerState(stream, no_past(params, how.correlation, rules))

    def update(
        updates: optax.Updates, state: GaussianPrivatizerState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, GaussianPrivatizerState]:
        noisy, stream, past = _noisy(updates, state.stream, how, state.past)
        return noisy, GaussianPrivatizerState(stream, past)

    return optax.GradientTransformation(init, cast(optax.TransformUpdateFn, update))


def add_noise(
    tree: PyTree[Array], state: NoiseStream, stddev: SupportsFloat
) -> tuple[PyTree[Array], NoiseStream]:
    """Adds independent Gaussian noise of one standard deviation to every entry of a tree.

    For a loop of your own: call it on a *sum* of clipped per-example gradients, before any other
    operation. `check_privacy` sees the noise, its standard deviation and its stream. It calls noise
    that is drawn in another way undecided.

    ```python
    state = dp.noise_stream()  # once
    ...
    grads = grad_fn(model, x, y, is_padding_example=mask)
    noisy, state = dp.add_noise(grads, state, plan.noise_multiplier * sensitivity)
    ```

    Noise is that of `gaussian_privatizer`, and the result is in the wider of float32 and a leaf's
    dtype. It is a pure function of the state, a leaf's number in the tree and the position in it.

    **Guarantee.** That of `gaussian_privatizer`: if one example changes the tree by at most `S` in
    L2 norm, the result is the Gaussian mechanism with noise multiplier `stddev / S`. Each call must
    get the state that the call before returned: two calls with one state have the same noise.

    | case | what happens |
    |---|---|
    | `stddev` is 0 | the tree and the state are returned unchanged |
    | leaf is None | stays None |
    | leaf is narrower than float32, holds integers, booleans or complex numbers | refused |
    | a `shard_map` or `pmap` splits a leaf | as for `gaussian_privatizer`: add noise outside |

    Args:
        tree: the sum that will be released.
        state: from `noise_stream`, or from the call before.
        stddev: standard deviation of the noise, in the unit of the tree. A number, not a JAX array:
            it is part of the compiled program.

    Returns:
        A tree of the same structure, and the state for the next call.

    Raises:
        ValueError: if `stddev` is negative, not finite or traced, `state` is no stream (a key, for
            instance), or a leaf is refused as in the table above.
    """
    return _noisy(tree, checked_stream(state), _How(static_stddev(stddev), None, None), ())[:2]


class NoiseMark(NamedTuple):
    """The mark of the equation (a jitted call) that adds noise to the leaves of a tree.

    Operands are the leaves, the stream's key and the two words of its counter, and what is kept.
    Results are the noisy leaves, the stream after the draw in the same order, and what the next
    step takes as kept. The noise follows from the operands of the stream and the leaves' numbers.

    Attributes:
        stddev: standard deviation of the noise.
        num_leaves: how many leaves there are.
        correlation: how noise depends on that of steps before.
    """

    stddev: float
    num_leaves: int
    correlation: Banded


class _How(NamedTuple):
    """The noise that a caller asks for.

    Attributes:
        stddev: its standard deviation.
        policy: as for `gaussian_privatizer`.
        rules: the same.
        correlation: as for `NoiseMark`.
    """

    stddev: float
    policy: Policy | None
    rules: ShardingRules | None
    correlation: Banded = Banded()


def _noisy(
    tree: PyTree[Any], stream: NoiseStream, how: _How, past: tuple[Past, ...]
) -> tuple[PyTree[Array], NoiseStream, tuple[Past, ...]]:
    """Adds noise to the leaves of a tree; in a traced program, in one marked equation.

    Also returns the stream after the draw, and what is kept for the next step.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    paths = [path for path, _ in leaves]
    gradients = [checked_gradient(leaf, path, how.policy) for path, leaf in leaves]
    if past and [x.shape for x in gradients] != [high.shape for high, _ in past[0]]:
        raise ValueError(
            "the updates have another tree than the params that init was given: "
            f"{shapes(gradients)} here, and noise of {shapes([high for high, _ in past[0]])} is "
            "kept. Give init and update one tree, as optimizer.init(grad_fn.trainable(model))."
        )
    if how.stddev == 0:
        return jax.tree_util.tree_unflatten(structure, gradients), stream, past
    mark = NoiseMark(how.stddev, len(gradients), how.correlation)

    def function(operands: Any) -> tuple[list[Array], NoiseStream, tuple[Past, ...]]:
        gradients, stream, past = operands
        placed = [_leaf(i, x, paths[i], how) for i, x in enumerate(gradients)]
        # The stream that is returned has the key as it came, which follows from no gradient.
        own = stream._replace(key=noise_key(stream.key, "noise", gradients))
        is_apart = how.rules is not None
        noisy, noise = with_noise(placed, own, how.stddev, is_apart, how.correlation, past)
        noisy = [_placed(x, path, how.rules) for x, path in zip(noisy, paths, strict=True)]
        fresh = [_placed(pair, path, how.rules) for pair, path in zip(noise, paths, strict=False)]
        return noisy, stream.grown(), (fresh, *past[:-1]) if past else ()

    operands = (gradients, stream, past)
    noisy, stream, kept = in_marked_equation("eqx_dp_noise", mark, function, operands)
    return jax.tree_util.tree_unflatten(structure, noisy), stream, kept


def no_past(params: PyTree[Any], correlation: Banded, rules: ShardingRules | None) -> Any:
    """What is kept before step 0: zeros, as many as a strategy keeps.

    Args:
        params: what is trained; arrays or their shapes.
        correlation: the strategy.
        rules: where sums, and so their noise, are placed.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)

    def zeros(path: tuple[Any, ...], x: Any) -> Any:
        # Two buffers, as a step donates both.
        return _placed(tuple(jnp.zeros(x.shape, jnp.uint32) for _ in range(2)), path, rules)

    return tuple([zeros(path, x) for path, x in leaves] for _ in range(correlation.kept))


def _leaf(number: int, gradient: Array, path: tuple[Any, ...], how: _How) -> Leaf:
    """A leaf, with the dtype of its noisy sum and the place of its noise."""
    if number >= 2**LEAF_BITS:
        raise ValueError(
            f"noise is drawn for at most 2**{LEAF_BITS} leaves; the gradient at {dotted(path)} is "
            "one more. Stack parameters of one shape."
        )
    least = jnp.float32 if how.policy is None else how.policy.noise_dtype
    result = jnp.promote_types(gradient.dtype, least)
    declared = result if how.policy is None else how.policy.noise_dtype
    check_noise_range(how.stddev, jnp.promote_types(declared, jnp.float32))
    where = jax.typeof(gradient).sharding
    if how.rules is not None and how.rules.is_explicit:
        where = how.rules.on_axes(_spec(gradient, path, how.rules), AxisType.Explicit)
    is_explicit = isinstance(where, NamedSharding) and bool(where.mesh.explicit_axes)
    return Leaf(gradient, number, result, where if is_explicit else None)


def _placed(arrays: Any, path: tuple[Any, ...], rules: ShardingRules | None) -> Any:
    """Puts each part of a noisy sum, or of what is kept of its noise, on its device."""
    if rules is None:
        return arrays
    return jax.tree.map(lambda x: rules.place(x, _spec(x, path, rules)), arrays)


def _spec(x: Array, path: tuple[Any, ...], rules: ShardingRules) -> Any:
    return rules.accumulator_spec(rules.spec(path, x.shape), x.shape)
