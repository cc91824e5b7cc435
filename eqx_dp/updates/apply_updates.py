"""Adds an update to a model, and rounds it to the stored dtype."""

from typing import Any, TypeVar, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from ..paths import dotted
from ..precision import JmpPolicy, Policy, agreed_policy, checked_policy, refusal
from ..privacy import fold_text, fold_texts
from ..shown import shown
from ..trees import PyTree, is_key
from .rounding import rounded_stochastically, word_of

Model = TypeVar("Model")


def apply_updates(
    model: Model,
    updates: PyTree[Array | None],
    policy: Policy | JmpPolicy | None = None,
    *,
    key: PRNGKeyArray | None = None,
) -> Model:
    """Adds updates to a model, as `eqx.apply_updates`, and rounds as the policy says.

    Parameter and update are added in the accumulate dtype (in a wider one, if one of them has it).
    The sum is rounded once, to the dtype that the leaf is stored in (the param dtype, or that of a
    module rule): to the nearest number, or stochastically where the
    policy says `rounding = "stochastic"`. Stored in bfloat16, a parameter of size 1 loses every
    update below 1/256 when it is rounded to the nearest number. Rounded stochastically, it becomes
    one of its two neighbors, so that its mean is right: many small updates add up.

    ```python
    root = jax.random.key(secrets.randbits(63))
    model = dp.apply_updates(model, updates, policy, key=jax.random.fold_in(root, t))
    ```

    **Guarantee.** The rounding is post-processing of noisy gradients, and costs no privacy: it sees
    no data. Its bits come from a separate stream, independent of noise that was drawn with the same
    key. A leaf's bits are a function of the key and of the leaf's path alone, so a run that is
    resumed repeats them, and with keys of `jax.random.key` they are the same on any number of
    devices.

    | case | what happens |
    |---|---|
    | update is None | the leaf stays as it is, integers too |
    | the sum is a number that the param dtype holds, as for a zero update | that number, always |
    | the param dtype is as wide as the sum (float32 storage) | no rounding, and no key is needed |
    | the sum is NaN or infinite | it stays so |
    | the sum is beyond the largest finite number of the param dtype | to the nearest, or infinite |
    | the sum is subnormal | as any other; a processor may flush it to zero as it adds |
    | the leaf is complex, or an integer with an update | added, and cast to the leaf's dtype |

    Args:
        model: the model, in any tree.
        updates: what the optimizer returned: the model's tree, with None where nothing is trained.
        policy: gives the dtypes and the rounding; a paired model brings its own. Without one a leaf
            keeps its dtype, and is rounded to the nearest number.
        key: for stochastic rounding, another one at each step: `jax.random.fold_in(root, t)`.

    Raises:
        ValueError: the policy says "stochastic", something has to be rounded, and there is no key;
            `key` is not one key; the model is paired with another policy; or the updates are of
            another tree, or of other shapes, than the model.
    """
    policy = agreed_policy(model, checked_policy(policy))
    if key is not None:
        _check_key(key)
    leaves, structure = jax.tree_util.tree_flatten_with_path(
        updates, is_leaf=lambda leaf: leaf is None
    )
    texts = [jax.tree_util.keystr(path) for path, update in leaves if update is not None]
    keys: dict[str, PRNGKeyArray] = {}
    if key is not None and policy is not None and policy.rounding == "stochastic":
        folded = fold_texts(fold_text(key, "eqx_dp rounding"), texts)
        keys = dict(zip(texts, folded, strict=True))

    def added(path: tuple[Any, ...], update: Array | None, leaf: Any, kept: Any) -> Any:
        if update is None:
            return leaf
        if getattr(leaf, "shape", None) != jnp.shape(update):  # before one is broadcast
            where = f"updates at {dotted(path) or 'the root'}"
            raise refusal(where, f"{shown(update)} for {shown(leaf)}", _ALLOWED)
        if policy is None or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return (leaf + update).astype(leaf.dtype)
        wide = jnp.result_type(policy.accumulate_dtype, leaf.dtype, update.dtype)
        total = leaf.astype(wide) + update.astype(wide)
        return _stored(total, kept.dtype, policy, keys.get(jax.tree_util.keystr(path)))

    try:
        kept = model if policy is None else eqx.filter_eval_shape(policy.cast_to_param, model)
        parts = zip(*map(structure.flatten_up_to, (model, kept)), strict=True)
    except (TypeError, ValueError) as error:
        found = f"a tree that is not the model's: {error}"
        raise refusal("updates", found, _ALLOWED) from None
    pairs = zip(leaves, parts, strict=True)
    return cast(Model, structure.unflatten(added(*update, *both) for update, both in pairs))


_ALLOWED = "what optimizer.update returned for this model"


def _check_key(key: object) -> None:
    is_array = isinstance(key, jax.Array | np.ndarray)
    if not is_array or not is_key(key) or key.shape != ():
        # A number may be the secret.
        found = shown(key) if is_array else f"a value of type {type(key).__name__}"
        raise refusal("key", found, "one typed key of the step: jax.random.fold_in(root, t)")


def _stored(
    total: Float[Array, "*shape"], stored: np.dtype[Any], policy: Policy, key: PRNGKeyArray | None
) -> Float[Array, "*shape"]:
    """A sum as it is stored."""
    is_exact = jnp.promote_types(total.dtype, stored) == stored
    if policy.rounding == "nearest" or is_exact:
        return total.astype(stored)
    if key is None:
        allowed = 'a key of the step: the policy says params.rounding = "stochastic"'
        raise refusal("key", "None", allowed)
    # Of the two formats of 16 bits none holds the other's numbers: float32 holds both.
    total = total.astype(jnp.promote_types(total.dtype, stored))
    where = jax.typeof(total).sharding
    where = where if where.mesh.explicit_axes else None
    bits = jax.random.bits(key, total.shape, word_of(total.dtype), out_sharding=where)
    return rounded_stochastically(total, stored, bits)
