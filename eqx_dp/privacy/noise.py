"""Gaussian noise on a clipped sum of gradients."""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsFloat, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ..expected import real_number
from ..paths import dotted
from ..precision import Policy, checked_policy, stage
from ..programs import in_marked_equation
from ..sharding import ShardingRules, checked_rules
from ..trees import PyTree
from .keys import (
    Secret,
    fold_text,
    fold_texts,
    fresh_noise_key,
    is_threefry,
    of_one_model,
    printed_without_key,
    refuse_to_pickle,
    shape_of_keys,
    single_key,
    words_of,
)
from .normals import normal
from .random_bits import is_partitionable


class GaussianPrivatizerState(NamedTuple):
    """State of `gaussian_privatizer`: all that the noise of every step to come depends on.

    Attributes:
        key: A fresh key, or the one handed in, or one made from the secret handed in; never
            changed. Secret: do not save it, and let `init` draw another one at the next start.
        step: How many updates have been made; a scalar int32.
    """

    key: PRNGKeyArray
    step: Int[Array, ""]

    def __repr__(self) -> str:
        # JAX shows what a key is made of, and does not show what a step has used up.
        is_gone = getattr(self.step, "is_deleted", None)
        is_there = isinstance(self.step, jax.core.Tracer) or is_gone is None or not is_gone()
        return f"{type(self).__name__}(key=<secret>, step={self.step if is_there else '<used up>'})"

    __pdoc__, __reduce__ = printed_without_key, refuse_to_pickle


def gaussian_privatizer(
    *,
    stddev: SupportsFloat,
    key: PRNGKeyArray | Secret | None = None,
    policy: Policy | None = None,
    sharding: ShardingRules | None = None,
) -> optax.GradientTransformation:
    """Adds independent Gaussian noise of one standard deviation to every entry of the gradients.

    The gradients are a *sum* of clipped per-example gradients, as `filter_clipped_grad` returns it.
    Noise comes first in the chain: `optax.chain(gaussian_privatizer(...), optax.adam(...))`. All
    that follows is post-processing and costs no privacy.

    Noise is drawn and scaled in the policy's noise dtype. It is added in the wider of that and the
    gradient's dtype, which is also the result's: nothing is narrowed. Without a policy the
    accumulate dtype is float32, and the noise dtype the wider of float32 and the gradient's. The
    numbers are those of `jax.random.normal` for the leaf's key. float32 ones are computed once, in
    one kernel a leaf, where they are added, and (but for leaves of short rows on a CPU) no array of
    noise is held.

    The noise of a leaf is a pure function of the key, the step, the leaf's path in the tree and its
    shape. The step is folded into the key with its 32 bits, the others with 64 bits of their
    hashes. Leaves of one tree have different paths, and so independent noise, however the
    tree is divided: one privatizer may serve several groups of `optax.multi_transform`,
    `optax.partition` or `optax.masked`.

    Without `key` every `init` draws a key from 256 random bits of the operating system. No two runs
    share noise then, and a run that goes on from a saved model takes a new `init`. **A key given by
    hand repeats its noise**: two runs with one key, or a second `init`, have the same noise. It
    cancels in the difference of their models, and neither is private any more.

    **Guarantee.** If one example changes the sum by at most `S` in L2 norm, one update is the
    Gaussian mechanism with noise multiplier `stddev / S` (Dwork and Roth 2014, appendix A; for
    sampled batches, Abadi et al. 2016). `PrivacyPlan.privatizer` sets `stddev` to match what is
    accounted for. The guarantee holds for real numbers and a secret key, as far as the generator's
    numbers for different keys are independent. In practice numbers of finite precision are
    discrete, and their low bits can give away more than the theory says (Mironov 2012); a float32
    normal is at most about 5.4 in size; and JAX's generator (threefry, unless configured otherwise)
    is not cryptographic.

    | case | what happens |
    |---|---|
    | `stddev` is 0 | gradients are returned unchanged, bit for bit and in their own dtype |
    | leaf is None (not trained) | stays None and uses no key |
    | leaf has no entries | is returned without entries |
    | gradient is NaN or infinite | the result is, too: clip before |
    | leaf is narrower than the accumulate dtype | refused, unless `policy.unsafe` |
    | leaf holds integers, booleans or complex numbers | refused |
    | two leaves whose paths read the same (keys of a dictionary with one `repr`) | refused |
    | one privatizer serves several groups of a tree's leaves | every leaf has its own noise |
    | a leaf moves to another place in the tree, or gets another shape | it gets other noise |
    | `sharding` and a generator whose values depend on it (not threefry) | refused |

    With sharding rules every device draws its own part of the noise, without communication, and the
    same key gives the same noise on any number of devices and hosts.

    Args:
        stddev: Standard deviation of the noise, in the unit of the gradients. A number, not a JAX
            array: it is part of the compiled program.
        key: None: fresh randomness at every `init`. Or, to repeat an experiment, a secret that is
            not used elsewhere: a number of any size or bytes, from which
            `key_from_secret(key, "noise")` makes a key; or one key, from `key_from_secret` or
            `jax.random.key` (which keeps 32 bits of its seed: an attacker can try all of them).
        policy: Gives the accumulate and noise dtypes, and whether narrow ones are allowed.
        sharding: The noise is placed where the rules place accumulators. The updates must then
            have the tree of the model that the rules describe.

    Returns:
        An `optax.GradientTransformation`; its state is a `GaussianPrivatizerState`.

    Raises:
        ValueError: If `stddev` is negative, not finite or traced; `key` is not one key or one
            secret; `sharding` is not rules, or the key's generator does not allow sharding. From
            `update`: if a leaf is refused as in the table above, or `stddev` is beyond the normal
            range of the noise dtype. From `init`: if a leaf is no array, or it would draw one key
            for several models under `vmap`.
    """
    policy, rules = checked_policy(policy), checked_rules(sharding)
    scale = _static_stddev(stddev)
    root = None if key is None else single_key(key)
    if rules is not None and root is not None:
        _check_generator(root)

    def init(params: optax.Params) -> GaussianPrivatizerState:
        _check_arrays_alone(params)
        if root is None:
            of_one_model(params)
        # A copy, since a step that donates its state would take the caller's own key along.
        own = fresh_noise_key() if root is None else jnp.copy(root)
        return GaussianPrivatizerState(own, jnp.zeros((), jnp.int32))

    def update(
        updates: optax.Updates,
        state: GaussianPrivatizerState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, GaussianPrivatizerState]:
        del params
        # The text keeps it apart from other keys: jax.random.split(key, n)[i] is fold_in(key, i).
        noisy = _noisy(updates, (state.key, state.step), scale, "eqx_dp noise", policy, rules)
        next_state = GaussianPrivatizerState(state.key, state.step + 1)
        return noisy, next_state

    return optax.GradientTransformation(init, cast(optax.TransformUpdateFn, update))


def add_noise(tree: PyTree[Array], key: PRNGKeyArray, stddev: SupportsFloat) -> PyTree[Array]:
    """Adds independent Gaussian noise of one standard deviation to every entry of a tree.

    For loops by hand, on a *sum* of clipped per-example gradients and before anything else is made
    of it. `check_privacy` sees the noise, its standard deviation and its key; noise that is drawn
    in another way it does not judge.

    ```python
    grads = grad_fn(model, x, y, is_padding_example=mask)
    noisy = dp.add_noise(grads, jax.random.fold_in(key, step), plan.noise_multiplier * sensitivity)
    ```

    Noise is drawn and added in the wider of float32 and a leaf's dtype. It is a pure function of
    the key, a leaf's path in the tree and its shape: leaves have independent noise.

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
        tree: what is to be released.
        key: one key, from `jax.random.fold_in`, `jax.random.split` or `key_from_secret`.
        stddev: standard deviation of the noise, in the unit of the tree. A number, not a JAX array:
            it is part of the compiled program.

    Returns:
        A tree of the same structure.

    Raises:
        ValueError: if `stddev` is negative, not finite or traced, `key` is not one key, or a leaf
            is refused as in the table above.
    """
    scale = _static_stddev(stddev)
    if shape_of_keys(key) != ():
        single_key(key)
    return _noisy(tree, (key, None), scale, "eqx_dp add_noise", None, None)


class NoiseMark(NamedTuple):
    """What is stated of the equation, a jitted call, that adds noise to the leaves of a tree.

    Operands are the leaves, one key and, where there is one, the number of the step. Results are
    the noisy leaves. The key of a leaf is the key with these words folded in one after another:
    the prefix, the step, the leaf's own.

    Attributes:
        stddev: standard deviation of the noise.
        prefix: words of the text that is folded in first.
        has_step: whether the step is folded in.
        leaves: for each leaf the words of its path and shape.
    """

    stddev: float
    prefix: tuple[int, ...]
    has_step: bool
    leaves: tuple[tuple[int, ...], ...]


def _noisy(
    tree: PyTree[Any],
    key_and_step: tuple[PRNGKeyArray, Int[Array, ""] | None],
    stddev: float,
    text: str,
    policy: Policy | None,
    rules: ShardingRules | None,
) -> PyTree[Array]:
    """Adds noise to the leaves of a tree; in a traced program, in one marked equation."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    paths = [path for path, _ in leaves]
    _check_told_apart(paths)
    gradients = [_checked_gradient(leaf, path, policy) for path, leaf in leaves]
    of_leaves = [f"{x.shape} {jax.tree_util.keystr(path)}" for path, x in leaves]

    def function(operands: Any) -> list[Array]:
        gradients, (key, step) = operands
        key = fold_text(key, text)
        key = key if step is None else jax.random.fold_in(key, step)
        return [
            _add_noise(gradient, stddev, policy, _draw_of(rules, path, own))
            for path, gradient, own in zip(
                paths, gradients, fold_texts(key, of_leaves), strict=True
            )
        ]

    def words(text: str) -> tuple[int, ...]:
        return tuple(words_of(text).tolist())

    mark = NoiseMark(
        stddev,
        words(text),
        key_and_step[1] is not None,
        tuple(map(words, of_leaves)),
    )
    noisy = in_marked_equation("eqx_dp_noise", mark, function, (gradients, key_and_step))
    return jax.tree_util.tree_unflatten(structure, noisy)


def _check_arrays_alone(params: optax.Params) -> None:
    """Refuses a whole model, whose functions and numbers fail in the next optimizer of a chain."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not hasattr(leaf, "dtype"):
            raise ValueError(
                f"an optimizer is made for arrays alone; found a {type(leaf).__name__} at "
                f"{dotted(path) or 'the root'}. Give it what is trained: "
                "optimizer.init(grad_fn.trainable(model)), which is eqx.filter(model, "
                "eqx.is_inexact_array) unless a filter_spec says otherwise."
            )


def _check_told_apart(paths: Sequence[tuple[Any, ...]]) -> None:
    times = collections.Counter(jax.tree_util.keystr(path) for path in paths)
    twins = [path for path, count in times.items() if count > 1]
    if twins:
        raise ValueError(
            f"several gradients have the path {twins[0]}, and would get the same noise. Give the "
            "nodes of the tree keys whose printed forms differ."
        )


def _draw_of(
    rules: ShardingRules | None, path: tuple[Any, ...], key: PRNGKeyArray
) -> Callable[[tuple[int, ...], Any], Array]:
    """Draws a leaf's standard normal numbers, by shape and dtype: each on the device it is for."""
    if rules is None:
        return functools.partial(normal, key)

    def draw(shape: tuple[int, ...], dtype: Any) -> Array:
        spec = rules.accumulator_spec(rules.spec(path, shape), shape)
        sharding = rules.on_axes(spec, AxisType.Explicit) if rules.is_explicit else None
        return rules.place(normal(key, shape, dtype, out_sharding=sharding), spec)

    return draw


def _add_noise(
    gradient: Float[Array, "*shape"],
    stddev: float,
    policy: Policy | None,
    draw: Callable[[tuple[int, ...], Any], Array],
) -> Float[Array, "*shape"]:
    if stddev == 0:
        return gradient
    least = jnp.float32 if policy is None else policy.noise_dtype
    sum_dtype = jnp.promote_types(gradient.dtype, least)
    noise_dtype = sum_dtype if policy is None else policy.noise_dtype
    _check_range(stddev, noise_dtype)
    with stage("draw"):
        noise = jnp.asarray(stddev, noise_dtype) * draw(gradient.shape, noise_dtype)
    with stage("noise"):
        noisy = gradient.astype(sum_dtype) + noise.astype(sum_dtype)
    return _computed_once(noisy)


def _computed_once(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns `x`, bit for bit. XLA computes it once, however many operations read it.

    XLA repeats cheap operations in every kernel that reads their result, and takes threefry for
    cheap; Adam's moments and update are three kernels. It does not repeat divisions. This one is by
    1, which XLA does not know: a number with its lowest bit set is not 0. What generates machine
    code does know, and leaves it out. `jax.lax.optimization_barrier` does not help on a CPU, where
    it is removed before kernels are formed.
    """
    integer = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, integer)
    return x / ((bits | 1) != 0).astype(x.dtype)


def _checked_gradient(
    leaf: object, path: tuple[Any, ...], policy: Policy | None
) -> Float[Array, "..."]:
    where = f"the gradient at {dotted(path) or 'the root'}"
    if not isinstance(leaf, (jax.Array, np.ndarray)):
        raise ValueError(
            f"{where} is a {type(leaf).__name__}, not an array; keep what is not trained out of "
            "the gradients (None in its place), as filter_clipped_grad does."
        )
    found = cast("np.dtype[Any]", leaf.dtype)
    if not jnp.issubdtype(found, jnp.floating):
        raise ValueError(
            f"{where} has dtype {found}, and Gaussian noise is for real floating-point numbers; "
            "keep what is not trained out of the gradients (None in its place)."
        )
    declared = np.dtype(np.float32) if policy is None else policy.accumulate_dtype
    # By significand: a policy that is not unsafe declares float32 or float64.
    narrower = jnp.finfo(found).nmant < jnp.finfo(declared).nmant
    if narrower and not (policy is not None and policy.unsafe):
        raise ValueError(
            f"{where} has dtype {found}, narrower than the accumulate dtype {declared}: the sum "
            f"over examples was rounded before the noise. Sum clipped gradients in {declared} (as "
            "filter_clipped_grad does with the same policy), or give a policy that is unsafe."
        )
    return jnp.asarray(leaf)


def _static_stddev(stddev: SupportsFloat) -> float:
    if isinstance(stddev, jax.Array):
        raise ValueError(
            "stddev must be a Python or numpy number, known before the step is compiled; found the "
            f"JAX array of shape {stddev.shape}. Pass float(stddev), outside of jit."
        )
    return real_number(
        "stddev",
        stddev,
        lambda real: real >= 0,
        "at least 0 (no noise)",
        advice=" It is noise multiplier times sensitivity, and the sensitivity is infinite without "
        "a finite clip norm: set l2_clip_norm.",
    )


def _check_range(stddev: float, dtype: Any) -> None:
    limits = jnp.finfo(dtype)
    if not float(limits.smallest_normal) <= stddev <= float(limits.max):
        raise ValueError(
            f"stddev {stddev} is beyond the normal range of the noise dtype {dtype} "
            f"({limits.smallest_normal} to {limits.max}): the noise would be rounded to zero or "
            "infinity. Rescale the gradients, or take a wider noise dtype."
        )


def _check_generator(key: PRNGKeyArray) -> None:
    if not is_threefry(key):
        generator = jax.random.key_impl(key)
        raise ValueError(
            f"The key's generator is {generator}, whose numbers depend on how an array is spread "
            "over devices; with sharding rules, noise has to be the same on any number of them. "
            "Use dp.key_from_secret(secret), whose keys are threefry's."
        )
    if not is_partitionable():
        raise ValueError(
            "jax_threefry_partitionable is off, so that numbers drawn depend on how an array is "
            "spread over devices. Leave it on (JAX's default)."
        )
