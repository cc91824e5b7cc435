"""Equinox's `filter_grad`, with the gradient of every example clipped before they are summed."""

import inspect
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar, overload

import dp_accounting
import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PRNGKeyArray, PyTree, UInt32

from ..precision import LossScale, Policy, agreed_policy, cast_parameters, checked_policy, stage
from ..privacy import Sampling
from ..programs import matmul_flops
from ..sharding import ShardingRules, checked_rules
from ..shown import shown
from .calls import (
    Configuration,
    PerExample,
    Prepared,
    checked_method,
    checked_microbatch_size,
    places_of,
    run,
)
from .choice import Batch, Example, choose
from .clip import parse_clip_norm
from .cost import leaf_cost
from .examples import MaskRule, read_examples
from .loss_scale import LossScaling, Probe, probing_inputs, probing_policy
from .methods import Task
from .program import Inputs, Options, Program, refuse_batch_norm, takes_key, trace
from .taps import Uses, find_uses
from .trained import FilterSpec, checked_trainable, split_trainable

NeighboringRelation = dp_accounting.NeighboringRelation

Key = PRNGKeyArray | UInt32[Array, " words"]
# Gradients are a PyTree to type checkers, as in Equinox: optax's annotations know no modules.
_Aux = TypeVar("_Aux")
_Model = TypeVar("_Model")
_Result = TypeVar("_Result")


class ClippedGrad(eqx.Module, Generic[_Result]):
    """A loss whose gradient is clipped example by example and summed, and how much that can move.

    Made by [`filter_clipped_grad`][] and [`filter_value_and_clipped_grad`][].
    """

    _fun: Callable[..., Any]
    _filter_spec: FilterSpec
    _configuration: Configuration = eqx.field(static=True)
    _finish: Callable[[PerExample, PyTree[Array]], _Result] = eqx.field(static=True)
    _mask: MaskRule = eqx.field(static=True, default_factory=MaskRule)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._fun

    @property
    def __signature__(self) -> inspect.Signature:
        # Arguments are those of __call__, not those of the loss that __wrapped__ leads to.
        _, *parameters = inspect.signature(type(self).__call__).parameters.values()
        return inspect.Signature(parameters)

    def __repr__(self) -> str:
        # Not what the loss is bound to or closes over: a whole model, or a key.
        name = getattr(self._fun, "__name__", type(self._fun).__name__)
        return f"{type(self).__name__}({name}, l2_norm_bound={self.l2_norm_bound:g})"

    @property
    def policy(self) -> Policy | None:
        """The policy that it was made with, or None; that of a paired model is not known here."""
        return self._configuration.policy

    @property
    def sharding(self) -> ShardingRules | None:
        """The sharding rules that it was made with."""
        return self._configuration.sharding

    @property
    def l2_norm_bound(self) -> float:
        """The L2 norm that what one example adds to the result cannot exceed.

        With clip norms C_g of the groups g it is sqrt(sum of C_g^2) / normalize_by, and with
        `rescale_to_unit_norm` sqrt(number of groups) / normalize_by.
        """
        return self._configuration.clipping.l2_norm_bound / self._configuration.normalize_by

    def sensitivity(self, neighboring_relation: NeighboringRelation) -> float:
        """The L2 sensitivity of the result: how far one example can move it.

        ===================  ====================================================  ==============
        relation             neighbors differ by                                   sensitivity
        ===================  ====================================================  ==============
        ADD_OR_REMOVE_ONE    an example that is there or not                       l2_norm_bound
        REPLACE_SPECIAL      an example zeroed out (made padding)                  l2_norm_bound
        REPLACE_ONE          an example replaced by any other                      2 l2_norm_bound
        ===================  ====================================================  ==============

        Args:
            neighboring_relation: one of `dp_accounting.NeighboringRelation`. There is no default:
                a guarantee means nothing until it is said between which data sets it holds.

        Raises:
            ValueError: it is none of them.
        """
        match neighboring_relation:
            case NeighboringRelation.ADD_OR_REMOVE_ONE | NeighboringRelation.REPLACE_SPECIAL:
                return self.l2_norm_bound
            case NeighboringRelation.REPLACE_ONE:
                return 2 * self.l2_norm_bound
            case _:
                allowed = ", ".join(relation.name for relation in NeighboringRelation)
                raise ValueError(
                    f"neighboring_relation must be one of dp_accounting.NeighboringRelation "
                    f"({allowed}), found {shown(neighboring_relation)}."
                )

    def expect_samples(self, sampling: Sampling) -> None:
        """Batches are samples: calls have to say which slots are padding, and may count on it.

        That goes for all that are traced from now on. `plan.privatizer` says so.

        Args:
            sampling: how batches are drawn, from which follows how many slots of a batch are
                expected to hold an example; `"auto"` chooses the microbatch by that.
        """
        self._mask.sampling = sampling

    def of_samples(self, sampling: Sampling | None) -> "ClippedGrad[_Result]":
        """The same function for batches that are such samples (None: that have no padding)."""
        rule = MaskRule(sampling)
        return ClippedGrad(self._fun, self._filter_spec, self._configuration, self._finish, rule)

    def trainable(self, model: _Model) -> _Model:
        """What of a model is trained: its tree with None elsewhere, as that of the gradients.

        `optimizer.init(grad_fn.trainable(model))` makes an optimizer's state that fits them
        whatever `filter_spec` says, and where the model holds an `eqx.nn.State`.

        Args:
            model: as for a call.
        """
        return split_trainable(model, self._filter_spec)[0]

    def __call__(
        self,
        model: PyTree[Any],
        /,
        *batch: PyTree[Any],
        key: Key | None = None,
        is_padding_example: Bool[Array | np.ndarray, " batch"] | None = None,
    ) -> _Result:
        """Computes the sum of clipped gradients of a batch.

        Args:
            model: what is differentiated, as in `eqx.filter_grad`.
            *batch: arrays, or trees of arrays, with examples along every leading axis.
            key: split into one key an example, handed to the loss as `key`.
            is_padding_example: True where a slot holds no real example; such a slot contributes
                exactly zero, whatever it holds. None for no padding, which is refused once a plan
                that samples has made noise for this function.

        Raises:
            ValueError: see [`filter_clipped_grad`][].
        """
        self._mask.check(is_padding_example)
        return self.complete(self.prepare(model, batch, key, is_padding_example))

    def complete(self, prepared: "Prepared") -> _Result:
        """Runs a call that is prepared, and gives what the call gives.

        Args:
            prepared: by [`prepare`][] of the same function.
        """
        per_example, sums = run(prepared, self._configuration)
        grads = [total / self._configuration.normalize_by for total in sums]
        return self._finish(per_example, prepared.structure.unflatten(grads))

    def prepare(
        self, model: PyTree[Any], batch: tuple[PyTree[Any], ...], key: Any, is_padding_example: Any
    ) -> "Prepared":
        """Checks and casts the arguments of a call, traces the loss, and chooses a method.

        Args:
            model: as for the call, and so the others.
            batch: the positional arguments behind it.
            key: one key or None.
            is_padding_example: the mask or None.
        """
        configuration = self._configuration
        policy, rules = agreed_policy(model, configuration.policy), configuration.sharding
        params, rest = checked_trainable(model, self._filter_spec)
        refuse_batch_norm(model)
        _check_key(self._fun, len(batch), key)
        examples = read_examples(batch, key, is_padding_example, policy)

        accumulate_dtype = _accumulate_dtype(params, policy)
        groups = configuration.clipping.groups(params)
        frozen, static = eqx.partition(rest, eqx.is_array)
        places = None if rules is None else places_of(rules, model, params, frozen, examples)
        if policy is not None:
            with stage("cast"):
                params, frozen = (cast_parameters(part, policy) for part in (params, frozen))
        inputs = Inputs(
            params, frozen, static, *examples.one(), None if places is None else places.traced
        )
        flat = (jax.tree.leaves(params), jax.tree.leaves(frozen))
        program, uses = self._traced(inputs, policy)
        loss_scale = LossScale() if policy is None else policy.loss_scale
        probe = None
        if policy is not None and loss_scale.kind == "per_example":
            probe = Probe(*self._traced(probing_inputs(inputs), probing_policy(policy)))
        task = Task(
            program,
            uses,
            *flat,
            configuration.clipping,
            groups,
            accumulate_dtype,
            LossScaling(loss_scale.value, accumulate_dtype, probe),
            [leaf_cost(uses, leaf, param) for leaf, param in enumerate(flat[0])],
        )
        num_shards = 1 if rules is None else rules.num_shards
        num_examples, sampling = examples.num_examples, self._mask.sampling
        choice = choose(
            task.costs,
            task.params,
            Example(3.0 * matmul_flops(program.jaxpr), task.activations),
            Batch(num_examples // num_shards, sampling and sampling.of(num_examples)),
            configuration.method,
            configuration.microbatch_size,
        )
        return Prepared(task, examples, choice, jax.tree.structure(params), places, num_shards)

    def _traced(self, inputs: Inputs, policy: Policy | None) -> tuple[Program, Uses]:
        """One example's loss, and the uses of parameters in it."""
        configuration = self._configuration
        rules = configuration.sharding
        options = Options(configuration.has_aux, configuration.keep_batch_dim, policy, rules)
        program = trace(self._fun, options, inputs)
        return program, find_uses(program, len(jax.tree.leaves(inputs.params)))

    def __get__(self, instance: object | None, owner: type | None) -> Any:
        del owner
        return self if instance is None else eqx.Partial(self, instance)


def _accumulate_dtype(params: PyTree[Array], policy: Policy | None) -> np.dtype[Any]:
    """The policy's, or float32, or float64 where a trainable leaf is float64."""
    if policy is not None:
        return policy.accumulate_dtype
    return np.dtype(jnp.result_type(jnp.float32, *jax.tree.leaves(params)))


def _check_key(fun: Callable[..., Any], num_batch_arguments: int, key: Key | None) -> None:
    can, must = takes_key(fun, 1 + num_batch_arguments)
    if key is None and must:
        raise ValueError(
            "The loss takes a key and none was given: call with key=jax.random.key(...), a fresh "
            "one every step. It is split into one key an example."
        )
    if key is not None and not can:
        raise ValueError(
            "A key was given, and the loss has no parameter named 'key' behind the batch. Add one "
            "(fun(model, *example, key)) or leave the key out."
        )


def _grads_only(per_example: PerExample, grads: PyTree[Array]) -> PyTree[Array]:
    del per_example
    return grads


def _grads_and_aux(
    per_example: PerExample, grads: PyTree[Array]
) -> tuple[PyTree[Array], PyTree[Any]]:
    return grads, per_example.aux


def _values_and_grads(
    per_example: PerExample, grads: PyTree[Array]
) -> tuple[PerExample, PyTree[Array]]:
    return per_example, grads


def _configure(
    *,
    l2_clip_norm: PyTree[Any],
    policy: Policy | None,
    sharding: ShardingRules | None,
    has_aux: bool,
    keep_batch_dim: bool,
    rescale_to_unit_norm: bool,
    normalize_by: Any,
    microbatch_size: Any,
    method: str,
) -> Configuration:
    """Checks everything that can be checked before there is a model."""
    policy, sharding = checked_policy(policy), checked_rules(sharding)
    if isinstance(normalize_by, jax.core.Tracer):
        raise ValueError(
            "normalize_by is a traced value. It enters the sensitivity, so it has to be a known, "
            "public number."
        )
    is_number = eqx.is_array_like(normalize_by) and np.ndim(normalize_by) == 0
    if not is_number or isinstance(normalize_by, bool) or not 1e-30 <= float(normalize_by) <= 1e30:
        raise ValueError(
            f"normalize_by must be a number > 0 (from 1e-30 to 1e30), found {shown(normalize_by)}."
        )
    return Configuration(
        parse_clip_norm(l2_clip_norm, rescale_to_unit_norm),
        policy,
        has_aux,
        keep_batch_dim,
        sharding,
        float(normalize_by),
        checked_microbatch_size(microbatch_size),
        checked_method(method),
    )


@overload
def filter_clipped_grad(
    fun: Callable[..., Any],
    *,
    l2_clip_norm: PyTree[Any],
    policy: Policy | None = None,
    sharding: ShardingRules | None = None,
    filter_spec: FilterSpec = eqx.is_inexact_array,
    has_aux: Literal[False] = False,
    keep_batch_dim: bool = False,
    rescale_to_unit_norm: bool = False,
    normalize_by: float | int = 1.0,
    microbatch_size: int | None = None,
    method: str = "auto",
) -> ClippedGrad[PyTree[Array]]: ...


@overload
def filter_clipped_grad(
    fun: Callable[..., tuple[Any, _Aux]],
    *,
    l2_clip_norm: PyTree[Any],
    policy: Policy | None = None,
    sharding: ShardingRules | None = None,
    filter_spec: FilterSpec = eqx.is_inexact_array,
    has_aux: Literal[True],
    keep_batch_dim: bool = False,
    rescale_to_unit_norm: bool = False,
    normalize_by: float | int = 1.0,
    microbatch_size: int | None = None,
    method: str = "auto",
) -> ClippedGrad[tuple[PyTree[Array], _Aux]]: ...


@overload
def filter_clipped_grad(
    *,
    l2_clip_norm: PyTree[Any],
    policy: Policy | None = None,
    sharding: ShardingRules | None = None,
    filter_spec: FilterSpec = eqx.is_inexact_array,
    has_aux: Literal[False] = False,
    keep_batch_dim: bool = False,
    rescale_to_unit_norm: bool = False,
    normalize_by: float | int = 1.0,
    microbatch_size: int | None = None,
    method: str = "auto",
) -> Callable[[Callable[..., Any]], ClippedGrad[PyTree[Array]]]: ...


@overload
def filter_clipped_grad(
    *,
    l2_clip_norm: PyTree[Any],
    policy: Policy | None = None,
    sharding: ShardingRules | None = None,
    filter_spec: FilterSpec = eqx.is_inexact_array,
    has_aux: Literal[True],
    keep_batch_dim: bool = False,
    rescale_to_unit_norm: bool = False,
    normalize_by: float | int = 1.0,
    microbatch_size: int | None = None,
    method: str = "auto",
) -> Callable[[Callable[..., tuple[Any, _Aux]]], ClippedGrad[tuple[PyTree[Array], _Aux]]]: ...


def filter_clipped_grad(
    fun: Callable[..., Any] | None = None,
    *,
    l2_clip_norm: PyTree[Any],
    policy: Policy | None = None,
    sharding: ShardingRules | None = None,
    filter_spec: FilterSpec = eqx.is_inexact_array,
    has_aux: bool = False,
    keep_batch_dim: bool = False,
    rescale_to_unit_norm: bool = False,
    normalize_by: float | int = 1.0,
    microbatch_size: int | None = None,
    method: str = "auto",
) -> Any:
    """Creates a function that sums the clipped gradients of a batch's examples.

    A member of Equinox's `filter_*` family: the gradient is taken with respect to the first
    argument's trainable leaves. Use it as a call or as a decorator:

    ```python
    @dp.filter_clipped_grad(l2_clip_norm=1.0)
    def grad_fn(model, x, y):  # one example
        return jnp.square(model(x) - y).sum()

    grads = grad_fn(model, xs, ys)  # a batch
    ```

    Guarantee: the result is a sum over examples, divided by the public `normalize_by`. What one
    example adds depends on that example (and its key) alone; its L2 norm is at most
    `l2_norm_bound`: the clip factor comes from an upper bound on the true norm, rounding
    included. A gradient is clipped right at any scale that its own dtype holds (after the loss
    scale: in float16 an entry beyond 65504 / loss scale is infinite).

    ==========================================  ==================================================
    example                                     adds
    ==========================================  ==================================================
    norm at most the clip norm                  its gradient
    larger norm                                 its gradient, scaled to the clip norm
    gradient zero                               zero
    loss or gradient NaN or infinite            exactly zero; its norm is reported as it is
    norm beyond the accumulate dtype's range    exactly zero; its norm is reported as infinite
    clip norm / norm below the normal range     exactly zero
    padding, whatever the slot holds            exactly zero; its values are reported as zero
    none (empty batch, or all padding)          the result is zero; padding is not computed
    ==========================================  ==================================================

    Args:
        fun: `fun(model, *example)` or `fun(model, *example, key=...)`: the loss of one example,
            a real scalar, or a pair `(loss, aux)`. The model comes first.
        l2_clip_norm: the clip norm C >= 0 (`inf`: no clipping), or a tree of them: a prefix of
            the trainable parameters' tree, each number bounding the gradient of the leaves below it
            (per-layer clipping).
        policy: what dtype each stage uses. Parameters and float inputs enter the loss in the
            compute dtype, the loss leaves in the output dtype, norms, factors and sums are in the
            accumulate dtype. Module rules give single modules a compute dtype of their own. A model
            that is paired with a policy (`apply_policy`) brings it to the call; give it here as
            well for `plan.privatizer`, which is made before there is a model and would otherwise
            draw noise as without a policy. Without one the model runs in the dtypes that it has,
            and sums are float32, or float64 where a trainable leaf is.
        sharding: on which axes of a mesh examples, parameters and sums are spread. Every device
            then takes its part of the batch through the method, and one reduction sums over
            devices; the loss's own sharding constraints are moved out of the way. None for one
            device, or a loss that says nothing about sharding.
        filter_spec: which leaves are trained, as in `eqx.partition`: a function of a leaf, or a
            tree prefix of booleans. Other leaves cost no gradient and come back as None. A function
            selects nothing in an `eqx.nn.State` (running statistics), nor the initial values in
            an `eqx.nn.StateIndex`; True in a tree does.
        has_aux: whether `fun` returns `(loss, aux)`.
        keep_batch_dim: whether `fun` is written for a batch; it then sees batches of one, and aux
            leaves that start with that axis of length one lose it.
        rescale_to_unit_norm: divide each clipped gradient by its clip norm, which takes the clip
            norm out of the learning rate.
        normalize_by: a public number > 0 that the sum is divided by, the expected batch size, say.
            Never the number of examples that were sampled, which is private.
        microbatch_size: how many examples are processed at once; None for all, or, with `"auto"`,
            for the engine's choice. It changes memory and time, not the result (beyond rounding),
            and need not divide the batch.
        method: `"book_keeping"` (one backward pass through activations; norms and sums from what
            each use of a parameter met), `"ghost"` (two passes, and the memory of ordinary
            training), `"per_example"` (per-example gradients side by side), or `"auto"`:
            book-keeping where it saves anything, else per_example, in microbatches that suit what
            is held for an example unless `microbatch_size` says otherwise; and ghost where one
            example holds too much.

    Returns:
        A [`ClippedGrad`][], called as
        `grad_fn(model, *batch, key=None, is_padding_example=None)`. It returns the gradients: the
        model's tree, in the accumulate dtype, None where not trained; with `has_aux` a pair
        `(gradients, aux)`, aux having examples in front (**not private**). Its `l2_norm_bound`
        and `sensitivity(neighboring_relation)` say what to calibrate noise against.

    Raises:
        ValueError: here or at the call: an option out of its range; a loss that is no real scalar,
            is its own gradient, is written for a batch (without `keep_batch_dim`), needs a
            collective over the batch (`eqx.nn.BatchNorm`), or lacks a key; a key or an
            `eqx.nn.State` in the batch, a State in aux, or closed over and written; no batch, or
            leading axes that differ; nothing trainable; a tree of clip norms that does not fit; a
            model that is paired with another policy; a module rule that has no effect on the model.
    """
    configuration = _configure(
        l2_clip_norm=l2_clip_norm,
        policy=policy,
        sharding=sharding,
        has_aux=has_aux,
        keep_batch_dim=keep_batch_dim,
        rescale_to_unit_norm=rescale_to_unit_norm,
        normalize_by=normalize_by,
        microbatch_size=microbatch_size,
        method=method,
    )
    finish = _grads_and_aux if has_aux else _grads_only
    return _wrap(fun, filter_spec, configuration, finish)


@overload
def filter_value_and_clipped_grad(
    fun: Callable[..., Any],
    *,
    l2_clip_norm: PyTree[Any],
    policy: Policy | None = None,
    sharding: ShardingRules | None = None,
    filter_spec: FilterSpec = eqx.is_inexact_array,
    has_aux: bool = False,
    keep_batch_dim: bool = False,
    rescale_to_unit_norm: bool = False,
    normalize_by: float | int = 1.0,
    microbatch_size: int | None = None,
    method: str = "auto",
) -> ClippedGrad[tuple[PerExample, PyTree[Array]]]: ...


@overload
def filter_value_and_clipped_grad(
    *,
    l2_clip_norm: PyTree[Any],
    policy: Policy | None = None,
    sharding: ShardingRules | None = None,
    filter_spec: FilterSpec = eqx.is_inexact_array,
    has_aux: bool = False,
    keep_batch_dim: bool = False,
    rescale_to_unit_norm: bool = False,
    normalize_by: float | int = 1.0,
    microbatch_size: int | None = None,
    method: str = "auto",
) -> Callable[[Callable[..., Any]], ClippedGrad[tuple[PerExample, PyTree[Array]]]]: ...


def filter_value_and_clipped_grad(
    fun: Callable[..., Any] | None = None,
    *,
    l2_clip_norm: PyTree[Any],
    policy: Policy | None = None,
    sharding: ShardingRules | None = None,
    filter_spec: FilterSpec = eqx.is_inexact_array,
    has_aux: bool = False,
    keep_batch_dim: bool = False,
    rescale_to_unit_norm: bool = False,
    normalize_by: float | int = 1.0,
    microbatch_size: int | None = None,
    method: str = "auto",
) -> Any:
    """Like [`filter_clipped_grad`][], and returns each example's loss, norm and aux as well.

    Args: as those of [`filter_clipped_grad`][].

    Returns:
        A [`ClippedGrad`][] that returns `(PerExample(loss, grad_norm, aux), gradients)`. The
        sensitivity speaks of the gradients alone: the per-example values are **not private**.

    Raises:
        ValueError: as [`filter_clipped_grad`][].
    """
    configuration = _configure(
        l2_clip_norm=l2_clip_norm,
        policy=policy,
        sharding=sharding,
        has_aux=has_aux,
        keep_batch_dim=keep_batch_dim,
        rescale_to_unit_norm=rescale_to_unit_norm,
        normalize_by=normalize_by,
        microbatch_size=microbatch_size,
        method=method,
    )
    return _wrap(fun, filter_spec, configuration, _values_and_grads)


def _wrap(
    fun: Callable[..., Any] | None,
    filter_spec: FilterSpec,
    configuration: Configuration,
    finish: Callable[[PerExample, PyTree[Array]], Any],
) -> Any:
    """Wraps a loss, or makes the decorator that will."""

    def wrap(fun: Callable[..., Any]) -> Any:
        if not callable(fun) or isinstance(fun, ClippedGrad):
            raise ValueError(
                "The first argument must be the loss, fun(model, *example), not yet "
                f"differentiated; found {shown(fun)}."
            )
        return eqx.module_update_wrapper(ClippedGrad(fun, filter_spec, configuration, finish))

    return wrap if fun is None else wrap(fun)
