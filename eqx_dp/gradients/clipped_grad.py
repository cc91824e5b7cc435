"""A loss whose gradient is clipped example by example: what `filter_clipped_grad` returns."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Generic, Required, Self, SupportsFloat, TypeAlias, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt32
from typing_extensions import TypedDict, TypeVar, Unpack

from ..device import made_for
from ..losses import KeyedOne, KeyedTwo, ThreeOrMore
from ..paths import below
from ..precision import Policy, agreed_policy, cast_parameters, check_sum_range, stage
from ..privacy import SENSITIVITY_OF_UNIT_NORM, NeighboringRelation, Sampling, check_relation
from ..programs import activation_bytes, matmul_flops
from ..sharding import ShardingRules, on_device
from ..shown import function_name, shown
from ..trees import PyTree
from .arguments import (
    METHODS,
    Configuration,
    FilterSpec,
    MethodName,
    check_key,
    check_mask,
    checked_trainable,
    read_examples,
    split_trainable,
)
from .calls import Prepared, run, specs_of
from .choice import DeviceBatch, choose, leaf_costs
from .clip import PerExample, TracedLoss
from .methods import clipped_sum
from .program import Inputs, refuse_batch_norm, trace
from .taps import find_uses

Key = PRNGKeyArray | UInt32[Array, " words"]
Mask = Bool[Array | np.ndarray, " batch"]
_Model = TypeVar("_Model", contravariant=True)
_Result = TypeVar("_Result", covariant=True, default=PyTree[Array])
_Example = TypeVar("_Example", bound=Callable[..., Any], covariant=True, default=Callable[..., Any])


class _Call(TypedDict, total=False):
    """The options of a call, for type checkers."""

    is_padding_example: Mask | None
    clip_norm: SupportsFloat | Float[Array, ""] | None


class _Keyed(_Call):
    key: Required[Key | None]


class _OfMany(_Call, total=False):
    key: Key | None


_Batch: TypeAlias = tuple[Any, Any, Any, *tuple[Any, ...]]  # three arguments or more
# A clipped gradient by what its loss takes after the model.
_One: TypeAlias = "ClippedGrad[_Model, _Result, Callable[[Any], Any]]"
_Two: TypeAlias = "ClippedGrad[_Model, _Result, Callable[[Any, Any], Any]]"
_More: TypeAlias = "ClippedGrad[_Model, _Result, ThreeOrMore]"
_KeyedOne: TypeAlias = "ClippedGrad[_Model, _Result, KeyedOne]"
_KeyedTwo: TypeAlias = "ClippedGrad[_Model, _Result, KeyedTwo]"


class ClippedGrad(eqx.Module, Generic[_Model, _Result, _Example]):
    """A function that sums the clipped per-example gradients of a loss, with its sensitivity.

    Made by [`filter_clipped_grad`][] and [`filter_value_and_clipped_grad`][]. In annotations write
    `dp.ClippedGrad[Model]`, or `dp.ClippedGrad[Model, tuple[dp.PerExample, PyTree[Array]]]`: the
    second parameter of the type is the result. (The third is what the loss takes after the model;
    with it, type checkers report an argument too few or too many.)
    """

    _fun: Callable[..., Any]
    _filter_spec: FilterSpec
    _configuration: Configuration = eqx.field(static=True)
    _finish: Callable[[PerExample, PyTree[Array]], _Result] = eqx.field(static=True)
    _sampling: Sampling | None = eqx.field(static=True, default=None)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._fun

    @property
    def __signature__(self) -> inspect.Signature:
        # The signature is that of __call__, not that of the loss in __wrapped__.
        _, *parameters = inspect.signature(type(self).__call__).parameters.values()
        return inspect.Signature(parameters)

    def __repr__(self) -> str:
        name = function_name(self.__wrapped__)
        return f"{type(self).__name__}({name}, l2_norm_bound={self.l2_norm_bound:g})"

    @property
    def policy(self) -> Policy | None:
        """The policy that it was made with, or None. A paired model brings its policy later."""
        return self._configuration.policy

    @property
    def sharding(self) -> ShardingRules | None:
        """The sharding rules that it was made with."""
        return self._configuration.sharding

    @property
    def l2_norm_bound(self) -> float:
        """An upper bound on the L2 norm of what one example adds to the result.

        With clip norms C_g of the groups g it is sqrt(sum of C_g^2) / normalize_by, and with
        `rescale_to_unit_norm` sqrt(number of groups) / normalize_by.
        """
        return self._configuration.clipping.l2_norm_bound / self._configuration.normalize_by

    def sensitivity(self, neighboring_relation: NeighboringRelation) -> float:
        """The L2 sensitivity of the result: the most that one example can change it.

        | relation | neighbors differ by | sensitivity |
        |---|---|---|
        | `ADD_OR_REMOVE_ONE` | one example, present or absent | `l2_norm_bound` |
        | `REPLACE_SPECIAL` | one example, zeroed out (made padding) | `l2_norm_bound` |
        | `REPLACE_ONE` | one example, replaced by any other | `2 * l2_norm_bound` |

        What rounding may move is within it: gradients are clipped to a little less than the clip
        norm, by shapes (on one device 0.05 % less for 64 examples, 0.4 % for 1,024;
        `dp.explain(...).reserve` is the share). `privacy/finite_precision.md` says for which sums
        that is proven.

        Args:
            neighboring_relation: one of `dp_accounting.NeighboringRelation`. There is no default,
                because a guarantee has no meaning without its neighboring relation.

        Raises:
            ValueError: it is none of them.
        """
        check_relation(neighboring_relation)
        return SENSITIVITY_OF_UNIT_NORM[neighboring_relation] * self.l2_norm_bound

    def of_samples(self, sampling: Sampling | None) -> Self:
        """The same function, for batches that are drawn in a given way.

        Guarantee: if batches are samples, a call without `is_padding_example` is refused when it is
            traced. The function itself does not change.

        Args:
            sampling: how batches are drawn (`plan.batches`). It also gives the expected number of
                slots that hold an example, by which `"auto"` chooses the microbatch. None for
                batches without padding.
        """
        return dataclasses.replace(self, _sampling=sampling)

    def _variant(
        self, *, method: MethodName | None = None, microbatch_size: int | None = None
    ) -> "ClippedGrad[Any]":
        """The same by another method or microbatch, None for its own; gradients alone."""
        changed = self._configuration.variant(method, microbatch_size)
        return ClippedGrad(self._fun, self._filter_spec, changed, gradients_alone, self._sampling)

    def trainable(self, model: PyTree[Any]) -> PyTree[Array]:
        """The trained part of a model: the model's tree, with None where it is not trained.

        The gradients have the same tree. So `optimizer.init(grad_fn.trainable(model))` makes a
        state that fits them, for any `filter_spec`, also if the model holds an `eqx.nn.State`. To
        type checkers it is a `PyTree`, as a gradient is: optax's annotations know no modules.

        Args:
            model: as for a call.
        """
        return split_trainable(model, self._filter_spec)[0]

    @overload
    def __call__(
        self: "_KeyedOne[_Model, _Result]", model: _Model, x: Any, /, **its: Unpack[_Keyed]
    ) -> _Result: ...
    @overload
    def __call__(
        self: "_KeyedTwo[_Model, _Result]", model: _Model, x: Any, y: Any, /, **its: Unpack[_Keyed]
    ) -> _Result: ...
    @overload
    def __call__(
        self: "_One[_Model, _Result]", model: _Model, x: Any, /, **its: Unpack[_Call]
    ) -> _Result: ...
    @overload
    def __call__(
        self: "_Two[_Model, _Result]", model: _Model, x: Any, y: Any, /, **its: Unpack[_Call]
    ) -> _Result: ...
    @overload
    def __call__(
        self: "_More[_Model, _Result]", model: _Model, /, *batch: *_Batch, **its: Unpack[_OfMany]
    ) -> _Result: ...
    def __call__(
        self,
        model: PyTree[Any],
        /,
        *batch: PyTree[Any],
        key: Key | None = None,
        is_padding_example: Mask | None = None,
        clip_norm: SupportsFloat | Float[Array, ""] | None = None,
    ) -> _Result:
        """Computes the sum of clipped gradients of a batch.

        Args:
            model: the model, as in `eqx.filter_grad`.
            *batch: arrays, or trees of arrays, with examples along every leading axis.
            key: one key; it is split into one key for each slot, which the loss gets as `key`. To
                repeat a step with the same noise, repeat its layout too: hosts, devices, padding.
            is_padding_example: True where a slot holds no real example; such a slot contributes
                exactly zero, for any content. None means no padding; a function that
                [`of_samples`][] returned refuses it, and `check_privacy` does in a step whose plan
                samples.
            clip_norm: with `dp.clipping.Quantile`, the clip norm of this call: a number, known or
                traced, that follows from public numbers and released ones. None: the first one.

        Raises:
            ValueError: see [`filter_clipped_grad`][].
        """
        check_mask(self._sampling, is_padding_example)
        with made_for(self.sharding):
            prepared = self._prepare(model, batch, key, is_padding_example, clip_norm)
            sums, per_example = run(clipped_sum, prepared, self._configuration)
        grads = [total / self._configuration.normalize_by for total in sums]
        leaves = prepared.structure.num_leaves
        tree = prepared.structure.unflatten(grads[:leaves])
        return self._finish(per_example, (tree, *grads[leaves:]) if grads[leaves:] else tree)

    def _prepare(
        self, model: Any, batch: tuple[Any, ...], key: Any, mask: Any, clip_norm: Any = None
    ) -> Prepared:
        """Checks and casts the arguments of a call, traces the loss, and chooses a method."""
        configuration = self._configuration
        policy, rules = agreed_policy(model, configuration.policy), configuration.sharding
        params, rest = checked_trainable(model, self._filter_spec)
        refuse_batch_norm(model)
        check_key(self._fun, len(batch), key, configuration.augmentations)
        examples = read_examples(batch, key, mask, policy)

        accumulate_dtype = _accumulate_dtype(params, policy)
        clipping, groups = configuration.clipping.of_call(params, clip_norm)
        frozen, static = eqx.partition(rest, eqx.is_array)
        specs = None if rules is None else specs_of(rules, model, params, frozen, examples)
        if policy is not None:
            with stage("cast"):
                params, frozen = (cast_parameters(part, policy) for part in (params, frozen))
        inputs = Inputs(params, frozen, static, *examples.one(), specs and specs.of_one)
        program = trace(self._fun, configuration._replace(policy=policy), inputs)
        leaves, others = jax.tree.leaves(params), jax.tree.leaves(frozen)
        sizes = [leaf.size for leaf in leaves]
        cuts = [None] * len(leaves) if specs is None else specs.cuts[: len(leaves)]
        is_spread = [cut is not None for cut in cuts]
        with on_device(rules):
            found = find_uses(program, len(leaves))
            by_method = {way: leaf_costs(found, sizes, is_spread, way) for way in METHODS}
        jaxpr = program.jaxpr.jaxpr
        of_example = [i >= len(leaves) + len(others) for i in range(len(jaxpr.invars))]
        activations, _ = activation_bytes(jaxpr, of_example)
        num_shards = 1 if rules is None else rules.num_shards
        num_examples, sampling = examples.num_examples, self._sampling
        of_device = DeviceBatch(num_examples // num_shards, sampling and sampling.of(num_examples))
        ways = {method: costs for method, (_, costs) in by_method.items()}
        flops = 3.0 * matmul_flops(jaxpr)
        is_narrow = all(leaf.dtype.itemsize <= 2 for leaf in leaves)
        choice = choose(ways, sizes, flops, activations, of_device, configuration, is_narrow)
        uses, costs = by_method[choice.method]
        added = num_examples, sum(sizes), sum(use.terms for use in uses.at.values())
        bound, divisor = clipping.l2_norm_bound, configuration.normalize_by
        check_sum_range(bound, divisor, accumulate_dtype, *added)
        loss_scale = 1.0 if policy is None else policy.loss_scale.value
        sum_cuts = [None if rules and rules.accumulators == "params_once" else x for x in cuts]
        of_loss = program, uses, leaves, others
        traced = TracedLoss(*of_loss, clipping, groups, accumulate_dtype, loss_scale, sum_cuts)
        structure = jax.tree.structure(params)
        return Prepared(traced, examples, choice, costs, activations, structure, specs, num_shards)

    def __get__(self, instance: object | None, _: type | None) -> Any:
        return self if instance is None else eqx.Partial(self, instance)


def _accumulate_dtype(params: PyTree[Array], policy: Policy | None) -> np.dtype[Any]:
    """The policy's, or float32, or float64 where a trainable leaf is float64.

    Raises:
        ValueError: a leaf is of 8 bits or less, and no policy says what it is computed in.
    """
    if policy is not None:
        return policy.accumulate_dtype
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if leaf.dtype.itemsize == 1:
            raise ValueError(
                f"{below('model', path)} is {shown(leaf)}, whose gradient would be rounded to as "
                'few bits. Give a policy that casts it, such as dp.load_policy("mixed_bfloat16").'
            )
    return np.dtype(jnp.result_type(jnp.float32, *jax.tree.leaves(params)))


def gradients_alone(_: PerExample, grads: PyTree[Array]) -> PyTree[Array]:
    """The result of a call that returns only gradients."""
    return grads
