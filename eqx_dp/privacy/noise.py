"""Gaussian noise on a clipped sum of gradients."""

import collections
from typing import Any, NamedTuple, SupportsFloat, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jaxtyping import Array, Int, PRNGKeyArray

from ..expected import expect
from ..paths import dotted
from ..precision import JmpPolicy, Policy, check_noise_range, checked_policy
from ..programs import in_marked_equation
from ..sharding import ShardingRules, checked_rules
from ..shown import shapes
from ..trees import PyTree
from .gaussian import Leaf, Past, can_certify, with_certified_noise, with_noise_of_jax
from .keys import (
    Secret,
    outside_of_programs,
    printed_without_key,
    refuse_to_pickle,
    single_key,
    words_of,
)
from .noise_checks import check_arrays_alone, checked_gradient, noise_key, static_stddev
from .strategies import Banded


class GaussianPrivatizerState(NamedTuple):
    """State of `gaussian_privatizer`: all that the noise of later steps depends on.

    Attributes:
        key: A fresh key, or the one handed in, or one made from the secret handed in; never
            changed. Secret: do not save it, and let `init` draw another one at the next start.
        step: How many updates have been made; a scalar int32.
        past: What the last updates keep, latest first, if anything is kept. As secret as the key.
    """

    key: PRNGKeyArray
    step: Int[Array, ""]
    past: tuple[Past, ...] = ()

    def __repr__(self) -> str:
        # JAX would print the bits of the key, and cannot print arrays that a step has used up.
        is_gone = getattr(self.step, "is_deleted", None)
        is_there = isinstance(self.step, jax.core.Tracer) or is_gone is None or not is_gone()
        return f"{type(self).__name__}(key=<secret>, step={self.step if is_there else '<used up>'})"

    __pdoc__, __reduce__ = printed_without_key, refuse_to_pickle


def gaussian_privatizer(
    *,
    stddev: SupportsFloat,
    key: PRNGKeyArray | Secret | None = None,
    policy: Policy | JmpPolicy | None = None,
    sharding: ShardingRules | None = None,
    certified: bool = True,
    correlation: Banded | None = None,
) -> optax.GradientTransformation:
    """Adds independent Gaussian noise of one standard deviation to every entry of the gradients.

    The gradients are a *sum* of clipped per-example gradients, as `filter_clipped_grad` returns it.
    Noise comes first in the chain: `optax.chain(gaussian_privatizer(...), optax.adam(...))`. All
    that follows is post-processing and costs no privacy.

    Noise is drawn and added in float64, whatever is enabled outside, from 257 bits of the cipher
    ChaCha for each entry. The noisy sum is rounded to a multiple of a public power of two (`g`,
    from 2^-6 to 2^-5 of `stddev`), and then to the wider of the policy's noise dtype and the
    gradient's, which is the result's. (Without a policy the accumulate dtype is float32, and the
    noise dtype the wider of float32 and the gradient's.) Each leaf is one kernel, and small leaves
    together are one; no array of noise is held.

    The noise of an entry is a pure function of the key, the step, the leaf's path in the tree and
    its shape (63 bits of their hash), and the entry's position. Leaves of one tree have different
    paths, and so independent noise, however the tree is divided: one privatizer may serve several
    groups of `optax.multi_transform`, `optax.partition` or `optax.masked`. The noise is the same on
    every device and for any compilation, except for about one entry in 10^11, which float64 may
    round to the neighboring multiple of `g`.

    Without `key` every `init` draws a key from 256 random bits of the operating system. No two runs
    share noise then, and a run that continues from a saved model calls `init` again. **A key given
    by hand repeats its noise**: two runs with one key, or a second `init`, have the same noise. It
    cancels in the difference of their models, and neither is private any more. A program that holds
    a compiled `init` asks the host for the key (on several hosts it holds one that is given: then
    call `init` outside of `jit`, or the secret is in printed programs and JAX's cache on disk).

    **Guarantee.** If one example changes the sum by at most `S` in L2 norm, one update is the
    Gaussian mechanism with noise multiplier `stddev / S` (Dwork and Roth 2014, appendix A; for
    sampled batches, Abadi et al. 2016). `PrivacyPlan.privatizer` sets `stddev` to match what is
    accounted for. It is proven for the numbers that the machine adds, and not for real numbers
    alone: with d entries and T steps, d T at most `entries_covered(delta)` (4.4e12 at 1e-5),
    epsilon grows by less than 5e-5 and delta by a thousandth, for an epsilon of at most 70.
    `finite_precision.md` has the proof. A plan has paid for it, and its privatizer refuses more
    entries. Assumed are a secret key, a cipher that nobody can tell from random numbers, and
    float64 arithmetic by IEEE 754.

    With `certified=False` noise is what `jax.random.normal` draws in the noise dtype. In float32
    that has 2^23 values between -5.42 and 5.22, and is no Gaussian (`uncertified_delta`).

    | case | what happens |
    |---|---|
    | `stddev` is 0 | gradients are returned unchanged, bit for bit and in their own dtype |
    | leaf is None (not trained) | stays None and uses no key |
    | leaf has no entries | is returned without entries |
    | gradient is NaN or infinite | the result is not finite: clip before |
    | gradient is huge, tiny or -0 | exactly the nearest multiple of `g` to the sum plus noise |
    | leaf is narrower than the accumulate dtype | refused, unless `policy.unsafe` |
    | leaf holds integers, booleans or complex numbers | refused |
    | two leaves whose paths read the same (keys of a dictionary with one `repr`) | refused |
    | one privatizer serves several groups of a tree's leaves | every leaf has its own noise |
    | a leaf moves to another place in the tree, or gets another shape | it gets other noise |
    | the policy's noise dtype is narrower than float32 (unsafe) | noise as by `certified=False` |
    | lowered for other than a CPU, CUDA or ROCm (a TPU) | refused, unless `certified=False` |
    | a leaf has more than 2^32 entries | refused |
    | more than 2^32 updates follow one `init` | noise repeats; a plan has fewer steps |
    | a key of another generator | 256 bits are drawn with it; no harder to guess than it was |
    | `correlation`, and noise that is not certified | refused |

    With `correlation`, an update takes back part of the noise of updates before, which is drawn
    again, or kept in the state. One update is then no Gaussian mechanism by itself: all together
    are the matrix mechanism that `dp.Banded` describes, while the state is that of one `init`.

    With sharding rules every device draws its own part of the noise, without communication, and the
    same key gives the same noise on any number of devices and hosts.

    Args:
        stddev: Standard deviation of the noise, in the unit of the gradients. A number, not a JAX
            array: it is part of the compiled program.
        key: None: fresh randomness at every `init`. Or, to repeat an experiment, a secret that is
            not used elsewhere: a number of any size or bytes, from which
            a key of ChaCha is made; or one key, from
            `jax.random.key` (which keeps 32 bits of its seed: an attacker can try all of them).
        policy: Gives the accumulate and noise dtypes, and whether narrow ones are allowed.
        sharding: The noise is placed where the rules place accumulators. The updates must then
            have the tree of the model that the rules describe.
        certified: Whether the noise is the one that is proven.
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
    scale = static_stddev(stddev)
    allowed = "a dp.Banded, or None for independent noise"
    expect("correlation", correlation, (Banded, type(None)), allowed)
    known = correlation or Banded()
    root = None if key is None else single_key(key)

    def init(params: optax.Params) -> GaussianPrivatizerState:
        check_arrays_alone(params)
        # A copy, because a step that donates its state would delete the caller's key.
        own = noise_key(jnp.copy(outside_of_programs(root)), "init")
        return GaussianPrivatizerState(own, jnp.zeros((), jnp.int32), no_past(params, known, rules))

    def update(
        updates: optax.Updates, state: GaussianPrivatizerState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, GaussianPrivatizerState]:
        del params
        how = _How(scale, "eqx_dp noise", policy, rules, certified, known)
        noisy, past = _noisy(updates, (state.key, state.step), how, state.past)
        return noisy, GaussianPrivatizerState(state.key, state.step + 1, past)

    return optax.GradientTransformation(init, cast(optax.TransformUpdateFn, update))


def add_noise(
    tree: PyTree[Array], key: PRNGKeyArray, stddev: SupportsFloat, *, certified: bool = True
) -> PyTree[Array]:
    """Adds independent Gaussian noise of one standard deviation to every entry of a tree.

    For a loop of your own: call it on a *sum* of clipped per-example gradients, before any other
    operation. `check_privacy` sees the noise, its standard deviation and its key. It calls noise
    that is drawn in another way undecided.

    ```python
    grads = grad_fn(model, x, y, is_padding_example=mask)
    noisy = dp.add_noise(grads, jax.random.fold_in(key, step), plan.noise_multiplier * sensitivity)
    ```

    Noise is that of `gaussian_privatizer`, and the result is in the wider of float32 and a leaf's
    dtype. It is a pure function of the key, a leaf's path in the tree and its shape: leaves have
    independent noise.

    **Guarantee.** That of `gaussian_privatizer`: if one example changes the tree by at most `S` in
    L2 norm, the result is the Gaussian mechanism with noise multiplier `stddev / S`. The key must
    be secret, used for nothing else, and another one in each call.

    | case | what happens |
    |---|---|
    | `stddev` is 0 | the tree is returned unchanged |
    | leaf is None | stays None and uses no key |
    | leaf is narrower than float32, holds integers, booleans or complex numbers | refused |
    | two leaves whose paths read the same | refused |

    Args:
        tree: the sum that will be released.
        key: one key, from `jax.random.fold_in`, `jax.random.split` or `jax.random.key`.
        stddev: standard deviation of the noise, in the unit of the tree. A number, not a JAX array:
            it is part of the compiled program.
        certified: as for `gaussian_privatizer`.

    Returns:
        A tree of the same structure.

    Raises:
        ValueError: if `stddev` is negative, not finite or traced, `key` is not one key, or a leaf
            is refused as in the table above.
    """
    scale = static_stddev(stddev)
    if not isinstance(cast(object, key), (jax.Array, np.ndarray)):
        raise ValueError(f"key must be one key, not a secret; found a {type(key).__name__}.")
    single_key(key)
    how = _How(scale, "eqx_dp add_noise", None, None, certified)
    return _noisy(tree, (key, None), how, ())[0]


class NoiseMark(NamedTuple):
    """The mark of the equation (a jitted call) that adds noise to the leaves of a tree.

    Operands are the leaves, one key, the number of the step (where there is one), and what is kept.
    Results are the noisy leaves, and what the next step takes as kept. The noise of a leaf follows
    from the key, as if the prefix, the step and the leaf's own words were folded in one by one.

    Attributes:
        stddev: standard deviation of the noise.
        prefix: words of the text that says what the noise is for.
        has_step: whether there is a step.
        leaves: for each leaf the words of that text, its path and its shape.
        correlation: how noise depends on that of steps before.
        is_certified: whether it is the noise that is proven.
    """

    stddev: float
    prefix: tuple[int, ...]
    has_step: bool
    leaves: tuple[tuple[int, ...], ...]
    correlation: Banded
    is_certified: bool


class _How(NamedTuple):
    """The noise that a caller asks for.

    Attributes:
        stddev: its standard deviation.
        text: what it is for.
        policy: as for `gaussian_privatizer`.
        rules: the same.
        certified: the same.
        correlation: as for `NoiseMark`.
    """

    stddev: float
    text: str
    policy: Policy | None
    rules: ShardingRules | None
    certified: bool
    correlation: Banded = Banded()


def _noisy(
    tree: PyTree[Any],
    key_and_step: tuple[PRNGKeyArray, Int[Array, ""] | None],
    how: _How,
    past: tuple[Past, ...],
) -> tuple[PyTree[Array], tuple[Past, ...]]:
    """Adds noise to the leaves of a tree; in a traced program, in one marked equation.

    Also returns what is kept for the next step.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    paths = [path for path, _ in leaves]
    _check_distinct(tree)
    gradients = [checked_gradient(leaf, path, how.policy) for path, leaf in leaves]

    if past and [x.shape for x in gradients] != [high.shape for high, _ in past[0]]:
        raise ValueError(
            "the updates have another tree than the params that init was given: "
            f"{shapes(gradients)} here, and noise of {shapes([high for high, _ in past[0]])} is "
            "kept. Give init and update one tree, as optimizer.init(grad_fn.trainable(model))."
        )

    def words(text: str) -> tuple[int, ...]:
        return tuple(words_of(text).tolist())

    of_leaves = [
        words(f"{how.text} {x.shape} {jax.tree_util.keystr(path)}")
        for path, x in zip(paths, gradients, strict=True)
    ]
    has_step, is_certified = key_and_step[1] is not None, how.certified and can_certify(how.policy)
    mark = NoiseMark(
        how.stddev, words(how.text), has_step, tuple(of_leaves), how.correlation, is_certified
    )

    def function(operands: Any) -> tuple[list[Array], tuple[Past, ...]]:
        gradients, (key, step), past = operands
        if how.stddev == 0:
            return gradients, past
        placed = [_leaf(*leaf, how) for leaf in zip(gradients, paths, of_leaves, strict=True)]
        step = np.uint32(0) if step is None else step
        key = noise_key(key, "noise" if is_certified else "noise that is not certified", gradients)
        if is_certified:
            is_apart = how.rules is not None
            noisy, noise = with_certified_noise(
                placed, key, step, how.stddev, is_apart, how.correlation, past
            )
        elif how.correlation.is_correlated:
            raise ValueError(
                "correlated noise needs the noise of earlier steps again, which certified noise "
                "alone is made for. Take certified=True and a noise dtype of at least float32, or "
                "a plan of independent noise (noise=None)."
            )
        else:
            noisy = with_noise_of_jax(placed, key, (*map(np.uint32, mark.prefix), step), how.stddev)
            noise = []
        noisy = [_placed(x, path, how.rules) for x, path in zip(noisy, paths, strict=True)]
        fresh = [_placed(pair, path, how.rules) for pair, path in zip(noise, paths, strict=False)]
        return noisy, (fresh, *past[:-1]) if past else ()

    operands = (gradients, key_and_step, past)
    noisy, kept = in_marked_equation("eqx_dp_noise", mark, function, operands)
    return jax.tree_util.tree_unflatten(structure, noisy), kept


def no_past(params: PyTree[Any], correlation: Banded, rules: ShardingRules | None) -> Any:
    """What is kept before step 0: zeros, as many as a strategy keeps.

    Args:
        params: what is trained; arrays or their shapes.
        correlation: the strategy.
        rules: where sums, and so their noise, are placed.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)

    def zeros(path: tuple[Any, ...], x: Any) -> Any:
        pair = jnp.zeros(x.shape, jnp.uint32), jnp.zeros(x.shape, jnp.uint32)
        return _placed(pair, path, rules)

    return tuple([zeros(path, x) for path, x in leaves] for _ in range(correlation.kept))


def _check_distinct(tree: PyTree[Any]) -> None:
    # What another privatizer of this key has, in optax.partition and masked, has a path, too.
    every = jax.tree_util.tree_leaves_with_path(tree, lambda x: isinstance(x, optax.MaskedNode))
    times = collections.Counter(jax.tree_util.keystr(path) for path, _ in every)
    twins = [path for path, count in times.items() if count > 1]
    if twins:
        raise ValueError(
            f"several gradients have the path {twins[0]}, and would get the same noise. Give the "
            "nodes of the tree keys whose printed forms differ."
        )


def _leaf(gradient: Array, path: tuple[Any, ...], words: tuple[int, ...], how: _How) -> Leaf:
    """A leaf, with the dtypes and the place of its noise."""
    if gradient.size > 2**32:
        raise ValueError(
            f"the gradient at {dotted(path) or 'the root'} has {gradient.size} entries, and noise "
            "is drawn for at most 2**32 in one array. Divide the parameter."
        )
    least = jnp.float32 if how.policy is None else how.policy.noise_dtype
    result = jnp.promote_types(gradient.dtype, least)
    dtype = result if how.policy is None else how.policy.noise_dtype
    check_noise_range(how.stddev, dtype)
    where = jax.typeof(gradient).sharding
    if how.rules is not None and how.rules.is_explicit:
        where = how.rules.on_axes(_spec(gradient, path, how.rules), AxisType.Explicit)
    is_explicit = isinstance(where, NamedSharding) and bool(where.mesh.explicit_axes)
    return Leaf(gradient, words, dtype, result, where if is_explicit else None)


def _placed(arrays: Any, path: tuple[Any, ...], rules: ShardingRules | None) -> Any:
    """Puts each part of a noisy sum, or of what is kept of its noise, on its device."""
    if rules is None:
        return arrays
    return jax.tree.map(lambda x: rules.place(x, _spec(x, path, rules)), arrays)


def _spec(x: Array, path: tuple[Any, ...], rules: ShardingRules) -> Any:
    return rules.accumulator_spec(rules.spec(path, x.shape), x.shape)
