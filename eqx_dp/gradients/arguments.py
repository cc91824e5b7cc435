"""The options of a clipped gradient, and the arguments of a call: model, batch, key, padding."""

import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from ..expected import flag, real_number, whole_number
from ..paths import below
from ..precision import JmpPolicy, Policy, checked_policy
from ..privacy import Sampling
from ..sharding import ShardingRules, checked_rules
from ..shown import shown
from ..trees import PyTree
from .clipping import Clipping, parse_clip_norm
from .outputs import STATE_ADVICE, argument_name, is_state

FilterSpec = PyTree[bool | Callable[[Any], bool]]
_Model = TypeVar("_Model")

METHODS = ("book_keeping", "ghost", "per_example")

MethodName: TypeAlias = Literal["auto", "book_keeping", "ghost", "per_example"]
"""The option `method`: a method by name, or "auto"."""


class Configuration(NamedTuple):
    """The options of a clipped gradient, as `filter_clipped_grad` explains them."""

    clipping: Clipping
    policy: Policy | None
    sharding: ShardingRules | None
    has_aux: bool
    keep_batch_dim: bool
    normalize_by: float
    microbatch_size: int | None
    method: str
    augmentations: int
    unit: Any = None

    def variant(self, method: str | None, microbatch_size: int | None) -> "Configuration":
        """The same with another method or microbatch; None keeps it."""
        method = self.method if method is None else _checked_method(method)
        size = _checked_microbatch_size(microbatch_size) or self.microbatch_size
        return self._replace(method=method, microbatch_size=size)


def checked_configuration(
    l2_clip_norm: PyTree[Any],
    rescale_to_unit_norm: bool,
    policy: Policy | JmpPolicy | None,
    sharding: ShardingRules | None,
    normalize_by: Any,
    microbatch_size: Any,
    has_aux: bool = False,
    keep_batch_dim: bool = False,
    method: object = "auto",
    augmentations: Any = 1,
) -> Configuration:
    """The options as the user gave them.

    Raises:
        ValueError: one of them is out of its range.
    """
    policy, sharding = checked_policy(policy), checked_rules(sharding)
    if isinstance(normalize_by, jax.core.Tracer):
        raise ValueError(
            "normalize_by is a traced value. It enters the sensitivity, so it has to be a known, "
            "public number: pass a Python float."
        )
    if isinstance(normalize_by, jax.Array | np.ndarray) and normalize_by.ndim == 0:
        normalize_by = normalize_by.item()
    wanted = "greater than 0 (from 1e-30 to 1e30)"
    divisor = real_number("normalize_by", normalize_by, lambda x: 1e-30 <= x <= 1e30, wanted)
    return Configuration(
        parse_clip_norm(l2_clip_norm, flag("rescale_to_unit_norm", rescale_to_unit_norm)),
        policy,
        sharding,
        flag("has_aux", has_aux),
        flag("keep_batch_dim", keep_batch_dim),
        divisor,
        _checked_microbatch_size(microbatch_size),
        _checked_method(method),
        whole_number("augmentations", augmentations, least=1, most=2**16),
    )


def _checked_method(method: object) -> str:
    if not isinstance(method, str) or method not in ("auto", *METHODS):
        allowed = ", ".join(map(repr, ("auto", *METHODS)))
        raise ValueError(f"method must be one of {allowed}, found {shown(method)}.")
    return method


def _checked_microbatch_size(size: object) -> int | None:
    return None if size is None else whole_number("microbatch_size", size, least=1, most=2**62)


def split_trainable(model: _Model, filter_spec: FilterSpec) -> tuple[_Model, _Model]:
    """Splits a model into its trained part and the rest, each with None in place of the other.

    Layers write an `eqx.nn.State` (for example running statistics), and gradient descent must not
    change it. A function gets a leaf and not its place in the tree, so it selects only parameters;
    True in a tree of booleans may select state as well. True above a part of the model means the
    floating-point arrays in it: activation functions, integers and Python numbers stay as they are.

    | filter_spec | of an `eqx.nn.State`, a `StateIndex.init` |
    |---|---|
    | a function of a leaf (the default is one) | nothing is trained |
    | a tree, a function above the state | nothing is trained |
    | a tree, True above the state | all of its floating-point arrays are trained |
    | a tree, True or a function inside of it | what it selects is trained |

    Args:
        model: any tree.
        filter_spec: a tree prefix of booleans and functions, as in `eqx.partition`.

    Raises:
        ValueError: `filter_spec` is something else, or no prefix.
    """

    def holds_state(node: Any) -> bool:
        return isinstance(node, eqx.nn.State | eqx.nn.StateIndex)

    def without_state(spec: Any, part: PyTree[Any]) -> Any:
        if isinstance(spec, bool):
            is_leaf = jax.tree_util.all_leaves([part])
            return (
                spec if is_leaf else jax.tree.map(lambda x: spec and eqx.is_inexact_array(x), part)
            )
        if not callable(spec):
            raise ValueError(
                "filter_spec must be a function of a leaf, or a tree of booleans and functions; "
                f"found {shown(spec)} in it."
            )
        return jax.tree.map(
            lambda node: not holds_state(node) and bool(spec(node)), part, is_leaf=holds_state
        )

    try:
        jax.tree.map(lambda *_: None, filter_spec, model)
    except ValueError as error:
        raise ValueError(
            "filter_spec is no prefix of the model's tree. Give a function of a leaf, or a tree "
            "made from the model: spec = jax.tree.map(lambda _: False, model), in which "
            f"eqx.tree_at puts True for what is trained. {error}"
        ) from error
    return eqx.partition(model, jax.tree.map(without_state, filter_spec, model))


def checked_trainable(
    model: PyTree[Any], filter_spec: FilterSpec
) -> tuple[PyTree[Array], PyTree[Any]]:
    """Splits a model, as [`split_trainable`][], and checks that the trained part can be trained.

    Raises:
        ValueError: nothing is trained, or something that is no real floating-point array.
    """
    check_numbers("model", model)
    params, rest = split_trainable(model, filter_spec)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise ValueError(
            "Nothing is trainable: filter_spec selects no leaf of the model. The default selects "
            "floating-point arrays outside of eqx.nn.State; a Python float is none (wrap it in "
            "jnp.asarray)."
        )
    for path, leaf in leaves:
        if not (eqx.is_array_like(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.floating)):
            raise ValueError(
                f"filter_spec selects {below('model', path)}, which is {shown(leaf)}: "
                "only real floating-point arrays can be trained. Narrow filter_spec, or hold a "
                "complex parameter as two real ones."
            )
    return jax.tree.map(jnp.asarray, params), rest


def takes_key(fun: Callable[..., Any], num_positional: int) -> tuple[bool, bool]:
    """Reads from a loss's signature whether it can be given a `key`, and whether it must be.

    If the model or the batch fills the parameter of that name, it is data.
    """
    try:
        parameters = inspect.signature(fun).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return True, False
    named = parameters.get("key")
    if named is not None and named.kind in (named.KEYWORD_ONLY, named.POSITIONAL_OR_KEYWORD):
        if named.kind is not named.KEYWORD_ONLY and list(parameters).index("key") < num_positional:
            return False, False
        return True, named.default is named.empty
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values()), False


def check_key(
    fun: Callable[..., Any], num_batch_arguments: int, key: Any, augmentations: int = 1
) -> None:
    """Refuses a call that lacks the key that its loss takes, or has one that it does not take.

    Raises:
        ValueError: a key is missing, or not wanted.
    """
    can, must = takes_key(fun, 1 + num_batch_arguments)
    if augmentations > 1 and not can:
        raise ValueError(
            f"augmentations={augmentations} calls the loss with as many keys, and the loss has no "
            "parameter named 'key' after the batch. Add one, and augment the example with it."
        )
    if key is None and (must or augmentations > 1):
        raise ValueError(
            "The loss takes a key and none was given: call with key=jax.random.key(...), a fresh "
            "one every step. It is split into one key an example."
        )
    if key is not None and not can:
        raise ValueError(
            "A key was given, and the loss has no parameter named 'key' after the batch. Add one "
            "(fun(model, *example, key)) or leave the key out."
        )


def check_numbers(name: str, tree: Any) -> None:
    """Raises a ValueError for a NumPy array of texts, objects or dates in a tree of this name."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSUMm":
            raise ValueError(
                f"{below(name, path)} is {shown(leaf)}, which JAX cannot compute with. Turn it "
                "into numbers, or leave it out. (A model may hold texts in a tuple or a list.)"
            )


_KEY_ADVICE = (
    "Give it by name, grad_fn(model, *batch, key=key): it is then split into one key an example. "
    "A key that is given by position is taken for data, and a key that the loss closes over is the "
    "same for all examples."
)


def check_mask(sampling: Sampling | None, is_padding_example: object) -> None:
    """Raises a ValueError if batches are samples and there is no mask.

    Args:
        sampling: how batches are drawn; None for batches without padding.
        is_padding_example: as for the call.
    """
    if sampling is not None and is_padding_example is None:
        raise ValueError(
            "is_padding_example is missing. This gradient is of samples, and a sampled batch has "
            "padding, whose index is -1: without the mask the last example would count in every "
            "padding slot. Pass on the mask that sampler.take or sampler.batch returns; for a "
            "batch without padding, np.zeros(length, bool)."
        )


class Examples(NamedTuple):
    """A batch, ready to be mapped over.

    Attributes:
        batch: the positional arguments after the model, examples in front of every leaf.
        keys: one key an example, or None.
        is_padding_example: True where a slot holds no real example, or None.
        num_examples: the length of the batch, padding included.
    """

    batch: tuple[PyTree[Array], ...]
    keys: Array | None
    is_padding_example: Array | None
    num_examples: int

    @property
    def leaves(self) -> list[Any]:
        """All arrays that have examples in front, or their shapes."""
        return jax.tree.leaves((self.batch, self.keys))

    def specs(self) -> list[PartitionSpec]:
        """Where one example of each leaf lives: as its type says, otherwise replicated."""

        def spec(x: Array) -> PartitionSpec:
            _, *entries = (*jax.typeof(x).sharding.spec, *[None] * x.ndim)
            return PartitionSpec(*entries[: x.ndim - 1])

        return [spec(x) for x in self.leaves]

    def one(self) -> tuple[tuple[PyTree[Any], ...], Any]:
        """Shapes and dtypes of one example and of its key."""
        return jax.tree.map(_without_example_axis, (self.batch, self.keys))


def read_examples(
    batch: tuple[PyTree[Any], ...], key: Any, is_padding_example: Any, policy: Policy | None
) -> Examples:
    """Checks a batch and brings it into the policy's compute dtype.

    Raises:
        ValueError: there is no batch; it holds an `eqx.nn.State` or a key for all examples; a
            leaf is no array of numbers or has no example axis; leading axes differ; the key is not
            a single key; the padding mask is no boolean vector of the batch's length.
    """
    for index, argument in enumerate(batch):
        if any(is_state(node) for node in jax.tree.leaves(argument, is_leaf=is_state)):
            raise ValueError(
                f"batch argument {index} holds an eqx.nn.State, which all examples share and which "
                f"has no axis of examples. {STATE_ADVICE}"
            )
    if not jax.tree.leaves(batch):
        raise ValueError(
            "No batch: give at least one argument after the model, with examples along its "
            "leading axis."
        )
    lengths = {
        argument_name(path): _length(argument_name(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
    }
    if len(set(lengths.values())) > 1:
        raise ValueError(_differing(batch, lengths))

    num_examples = next(iter(lengths.values()))
    batch = jax.tree.map(jnp.asarray, batch)
    if policy is not None:
        batch = policy.cast_to_compute(batch)
    return Examples(
        batch,
        None if key is None else _split(key, num_examples),
        None if is_padding_example is None else _read_mask(is_padding_example, num_examples),
        num_examples,
    )


def _length(where: str, leaf: Any) -> int:
    """How many examples an argument's leaf holds."""
    if not eqx.is_array(leaf) and not isinstance(leaf, np.ndarray):
        raise ValueError(
            f"{where} is of type {type(leaf).__name__}, not a JAX or numpy array. The model comes "
            "first, and every argument after it has examples along its leading axis: stack "
            "examples that are in a list (jnp.stack); close over anything else (functools.partial, "
            "a lambda)."
        )
    check_numbers(where, leaf)
    if leaf.ndim > 0:
        return leaf.shape[0]
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise ValueError(f"{where} is a PRNG key. {_KEY_ADVICE}")
    raise ValueError(
        f"{where} is a scalar: it has no leading axis of examples. The clipped gradient takes a "
        "whole batch, not one example; close over what all examples share."
    )


def _differing(batch: tuple[PyTree[Any], ...], lengths: dict[str, int]) -> str:
    """The error message for leading axes that differ."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if leaf.dtype == jnp.uint32 and leaf.shape in ((2,), (4,)):
            return f"{argument_name(path)} looks like a PRNG key ({shown(leaf)}). {_KEY_ADVICE}"
    found = ", ".join(f"{where} has {length}" for where, length in lengths.items())
    return (
        f"The batch's leading axes differ: {found}. All of them must be the number of examples. "
        "Stack examples that are in a list (jnp.stack)."
    )


def _without_example_axis(x: Array) -> jax.ShapeDtypeStruct:
    if x.shape[0] == 0 or any(jax.typeof(x).sharding.spec):  # on Explicit axes
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    # Indexing keeps the rest of the type, such as the mesh axes it varies along in a shard_map.
    return jax.eval_shape(lambda examples: examples[0], x)


def _split(key: Any, num_examples: int) -> Array:
    """One key an example."""
    try:
        return jax.random.split(key, num_examples)
    except (TypeError, ValueError):
        # JAX's own error would print a seed that was given instead of a key.
        kind = shown(key) if eqx.is_array(key) else f"a value of type {type(key).__name__}"
        raise ValueError(
            "key must be a single JAX key (jax.random.key(seed)), which is split here, one "
            f"key an example; found {kind}."
        ) from None


def _read_mask(is_padding_example: Any, num_examples: int) -> Array:
    if isinstance(is_padding_example, str | bytes):
        raise ValueError("is_padding_example must be a boolean array; found a text.")
    mask = jnp.asarray(is_padding_example)
    if mask.shape != (num_examples,) or mask.dtype != jnp.bool_:
        raise ValueError(
            f"is_padding_example must be boolean with shape ({num_examples},), one entry an "
            f"example; found {mask.dtype} with shape {mask.shape}."
        )
    return mask
