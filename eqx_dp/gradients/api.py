"""Equinox's `filter_grad`, with the gradient of every example clipped before they are summed.

And the clipped sum of any function of an example: means, counts, histograms.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, Literal, Required, TypeAlias, TypeVar, cast, overload

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array
from typing_extensions import TypedDict, Unpack

from ..expected import function
from ..losses import Aux, ClipNorms, Example, Loss, LossWithAux, Model
from ..paths import below
from ..precision import JmpPolicy, Policy
from ..privacy import Users
from ..sharding import ShardingRules
from ..shown import shown
from ..trees import PyTree
from .arguments import FilterSpec, MethodName, check_key, checked_configuration, read_examples
from .clip import PerExample
from .clipped_grad import ClippedGrad, gradients_alone

# Gradients are a PyTree to type checkers, as in Equinox: optax's annotations know no modules.
_Grads: TypeAlias = PyTree[Array]
_Values: TypeAlias = tuple[PerExample, PyTree[Array]]
_Result = TypeVar("_Result")
_AnyLoss: TypeAlias = Callable[Concatenate[Model, Example], Any]
_Made: TypeAlias = ClippedGrad[Model, _Result, Callable[Example, Any]]


class _Options(TypedDict, total=False):
    """The options of both functions, for type checkers; [`filter_clipped_grad`][] explains them."""

    l2_clip_norm: Required[ClipNorms]
    policy: Policy | JmpPolicy | None
    sharding: ShardingRules | None
    filter_spec: FilterSpec
    keep_batch_dim: bool
    rescale_to_unit_norm: bool
    normalize_by: float | int
    microbatch_size: int | None
    method: MethodName
    augmentations: int


@overload
def filter_clipped_grad(
    fun: Loss[Model, Example], *, has_aux: Literal[False] = False, **options: Unpack[_Options]
) -> _Made[Model, _Grads, Example]: ...
@overload
def filter_clipped_grad(
    fun: LossWithAux[Model, Example, Aux], *, has_aux: Literal[True], **options: Unpack[_Options]
) -> _Made[Model, tuple[_Grads, Aux], Example]: ...
@overload
def filter_clipped_grad(
    *, has_aux: Literal[False] = False, **options: Unpack[_Options]
) -> Callable[[Loss[Model, Example]], _Made[Model, _Grads, Example]]: ...
@overload
def filter_clipped_grad(
    *, has_aux: Literal[True], **options: Unpack[_Options]
) -> Callable[[LossWithAux[Model, Example, Aux]], _Made[Model, tuple[_Grads, Aux], Example]]: ...
def filter_clipped_grad(
    fun: Callable[..., Any] | None = None,
    *,
    l2_clip_norm: ClipNorms,
    policy: Policy | JmpPolicy | None = None,
    sharding: ShardingRules | None = None,
    filter_spec: FilterSpec = eqx.is_inexact_array,
    has_aux: bool = False,
    keep_batch_dim: bool = False,
    rescale_to_unit_norm: bool = False,
    normalize_by: float | int = 1.0,
    microbatch_size: int | None = None,
    method: MethodName = "auto",
    augmentations: int = 1,
) -> Any:
    """Creates a function that sums the clipped gradients of a batch's examples.

    It belongs to Equinox's `filter_*` family: the gradient is taken with respect to the trainable
    leaves of the first argument. Use it as a call or as a decorator:

    ```python
    @dp.filter_clipped_grad(l2_clip_norm=1.0)
    def grad_fn(model, x, y):  # one example
        return jnp.square(model(x) - y).sum()

    grads = grad_fn(model, xs, ys)  # a batch
    ```

    Guarantee: the result is a sum over examples, divided by the public `normalize_by`. What one
    example adds depends on that example (and its key) alone; its L2 norm is at most
    `l2_norm_bound`: the clip factor comes from an upper bound on the true norm, rounding included.
    Clipping is correct at any scale that the gradient's dtype holds (after the loss scale: in
    float16 an entry beyond 65504 / loss scale is infinite). On GPUs and TPUs an example may add
    less, or nothing, where inner products of inputs or of cotangents leave float32's range:
    entries above about 2^63, or all below 2^-63.

    | example | adds |
    |---|---|
    | norm at most the clip norm | its gradient |
    | larger norm | its gradient, scaled to the clip norm |
    | gradient zero | zero |
    | loss or gradient NaN or infinite | exactly zero; its norm is reported as it is |
    | norm beyond the accumulate dtype's range | exactly zero; its norm is reported as infinite |
    | clip norm / norm below twice the smallest normal number | exactly zero |
    | clip norm zero | exactly zero; `plan.privatizer` and `make_step` refuse sensitivity zero |
    | padding, whatever the slot holds | exactly zero; its values are reported as zero |
    | none (empty batch, or all padding) | the result is zero; padding is not computed |

    Args:
        fun: `fun(model, *example)` or `fun(model, *example, key=...)`: the loss of one example,
            a real scalar, or a pair `(loss, aux)`. The model comes first.
        l2_clip_norm: the clip norm C >= 0 (`inf`: no clipping), or a tree of them: a prefix of
            the trainable parameters' tree, each number bounding the gradient of the leaves below it
            (per-layer clipping). Or a value of `dp.clipping`: `AutoS`, `PerLayer`, or `Quantile`,
            whose clip norm is an operand of the call (`grad_fn(..., clip_norm=C)`), and whose
            result holds `(gradients, count)` in place of the gradients.
        policy: which dtype each stage uses. Parameters and float inputs enter the loss in the
            compute dtype; the loss is cast to the output dtype; norms, factors and sums are in the
            accumulate dtype. Module rules give single modules another compute dtype. A model that
            is paired with a policy (`apply_policy`) brings it to the call. Give the policy here as
            well: `plan.privatizer` runs before there is a model and would otherwise draw noise
            without a policy. Without a policy the model runs in the dtypes that it has, and sums
            are float32, or float64 if a trainable leaf is float64.
        sharding: which axes of a mesh examples, parameters and sums are spread over. Every device
            then runs the method on its part of the batch, and one reduction sums over devices. The
            loss's own sharding constraints are moved outside the per-example boundary. None for one
            device, or for a loss without sharding constraints.
        filter_spec: which leaves are trained, as in `eqx.partition`: a function of a leaf, or a
            tree prefix of booleans, where True above a module means its floating-point arrays.
            Other leaves cost no gradient and are None in the result. A
            function selects nothing in an `eqx.nn.State` (running statistics), nor the initial
            values in an `eqx.nn.StateIndex`; True in a tree does.
        has_aux: whether `fun` returns `(loss, aux)`.
        keep_batch_dim: whether `fun` is written for a batch. It then gets batches of one, and aux
            leaves that start with that axis of length one lose it. Not for a loss that compares
            rows (a contrastive loss, batch norm by hand): on one row it is constant, and only noise
            trains. Make a group of rows one example instead. `explain` and `Trainer` warn.
        rescale_to_unit_norm: divide each clipped gradient by its clip norm, so that the learning
            rate does not depend on the clip norm.
        normalize_by: a public number > 0 that the sum is divided by, for instance the expected
            batch size. Never the number of examples that were sampled, which is private.
        microbatch_size: how many examples are processed at once. None leaves the choice to the
            engine; `explain` shows it. It changes memory and time but not the result (except for
            rounding), and need not divide the batch.
        method: `"book_keeping"` (one backward pass through activations; norms and sums follow from
            the inputs and cotangents of each use of a parameter), `"ghost"` (two backward
            passes; no cotangent is kept), `"per_example"` (per-example gradients side by side), or
            `"auto"`. By each of them, some leaves have per-example gradients in a microbatch;
            `explain` says which. `"auto"` takes book-keeping, or `"ghost"` if one example would
            hold too much memory; on GPUs and TPUs the method of least time by their data sheets.
        augmentations: how many times K the loss is called for each example, with K different keys.
            The loss of the example is the mean of the K, so that K augmentations cost one clip (De
            et al., "Unlocking High-Accuracy Differentially Private Image Classification through
            Scale", 2022); aux gets an axis of K in front. The loss
            must take a key, and augment its example with it. One example takes about K times the
            memory and time.

    Returns:
        A [`ClippedGrad`][], called as
        `grad_fn(model, *batch, key=None, is_padding_example=None)`. It returns the gradients: the
        model's tree, in the accumulate dtype, None where not trained; with `has_aux` a pair
        `(gradients, aux)`, where aux has examples along the leading axis (**not private**). Its
        `l2_norm_bound` and `sensitivity(neighboring_relation)` are what noise is calibrated to.
        To type checkers the gradients are a `PyTree`, which is Any: optax's annotations know no
        modules. Where you want the model's type, say so: `of_model: Model = grads`.

    Raises:
        ValueError: here or at the call, for: an option out of its range; a loss that is not a real
            scalar, returns its gradient, is written for a batch (without `keep_batch_dim`), needs a
            collective over the batch (`eqx.nn.BatchNorm`), or needs a key that is not given (or has
            no parameter for one, with `augmentations`); a key
            or an `eqx.nn.State` in the batch; a State in aux, or one that is closed over and
            written; no batch, or leading axes that differ; nothing trainable; a tree of clip norms
            that does not fit the model; a model that is paired with another policy; a module rule
            without effect on the model; a clip norm at which the sum of so many slots, or its
            quotient by `normalize_by`, could overflow, or lose entries to underflow; a trained leaf
            of 8 bits without a policy.
    """
    configuration = checked_configuration(
        l2_clip_norm,
        rescale_to_unit_norm,
        policy,
        sharding,
        normalize_by,
        microbatch_size,
        has_aux,
        keep_batch_dim,
        method,
        augmentations,
    )
    finish = (lambda values, grads: (grads, values.aux)) if has_aux else gradients_alone

    def wrap(fun: Callable[..., Any]) -> Any:
        if not callable(fun) or isinstance(fun, ClippedGrad):
            raise ValueError(
                "The first argument must be the loss, fun(model, *example), not yet "
                f"differentiated; found {shown(fun)}."
            )
        unit = getattr(fun, "unit", None)  # of `dp.Users.loss`
        own = configuration._replace(unit=unit if isinstance(unit, Users) else None)
        return eqx.module_update_wrapper(ClippedGrad(fun, filter_spec, own, finish))

    return wrap if fun is None else wrap(fun)


@overload
def filter_value_and_clipped_grad(
    fun: _AnyLoss[Model, Example], *, has_aux: bool = False, **options: Unpack[_Options]
) -> _Made[Model, _Values, Example]: ...
@overload
def filter_value_and_clipped_grad(
    *, has_aux: bool = False, **options: Unpack[_Options]
) -> Callable[[_AnyLoss[Model, Example]], _Made[Model, _Values, Example]]: ...
def filter_value_and_clipped_grad(fun: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Like [`filter_clipped_grad`][], and returns each example's loss, norm and aux as well.

    Args:
        fun: as for [`filter_clipped_grad`][].
        **options: the options of [`filter_clipped_grad`][], all of them by name.

    Returns:
        A [`ClippedGrad`][] that returns `(PerExample(loss, grad_norm, aux), gradients)`. The
        sensitivity is that of the gradients alone: the per-example values are **not private**.

    Raises:
        ValueError: as [`filter_clipped_grad`][].
    """
    clipped_grad: Any = filter_clipped_grad
    made = clipped_grad(fun, **options)
    return _with_values(made) if fun is not None else lambda fun: _with_values(made(fun))


filter_value_and_clipped_grad.__signature__ = inspect.signature(filter_clipped_grad)


def _with_values(grad_fn: ClippedGrad[Any, Any]) -> Any:
    """The same function, which returns the values of each example as well."""
    valued = dataclasses.replace(grad_fn, _finish=lambda per_example, grads: (per_example, grads))
    return eqx.module_update_wrapper(valued)


class _Linear(eqx.Module):
    """The loss <theta, fun(example)>, whose gradient with respect to theta is fun(example)."""

    fun: Callable[..., PyTree[Array]]

    def __call__(self, theta: PyTree[Array], *example: Any, **key: Any) -> Array:
        products = jax.tree.map(lambda t, x: jnp.sum(t * x), theta, self.fun(*example, **key))
        return jnp.sum(jnp.stack(jax.tree.leaves(products)))


class ClippedFunctionSum(ClippedGrad[PyTree[Array]]):
    """A function that sums clipped values of examples, with its sensitivity.

    Made by [`filter_clipped_sum`][]. It has the properties of a [`ClippedGrad`][], and takes no
    model.
    """

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return cast(_Linear, self._fun).fun

    def __call__(self, *batch: PyTree[Any], key: Any = None, **options: Any) -> PyTree[Array]:
        """The sum of clipped values of a batch; options are those of a [`ClippedGrad`][]."""
        fun = self.__wrapped__
        check_key(fun, len(batch) - 1, key)
        example, its_key = read_examples(batch, key, None, self.policy).one()
        named = {} if key is None else {"key": its_key}
        values = jax.eval_shape(lambda *its, **key: fun(*its, **key), *example, **named)
        for path, value in jax.tree_util.tree_leaves_with_path(values):
            if not jnp.issubdtype(value.dtype, jnp.floating):
                raise ValueError(
                    f"{below('the result of the function', path)} is {value.dtype}; it must be of "
                    "a floating-point dtype. Cast what counts: jnp.asarray(x, float)."
                )
        if not jax.tree.leaves(values):
            raise ValueError(f"The function must return arrays; it returned {shown(values)}.")
        zeros = jax.tree.map(jnp.zeros_like, values)
        return super().__call__(zeros, *batch, key=key, **options)


def filter_clipped_sum(
    fun: Callable[..., PyTree[Array]],
    *,
    l2_clip_norm: ClipNorms,
    policy: Policy | JmpPolicy | None = None,
    sharding: ShardingRules | None = None,
    rescale_to_unit_norm: bool = False,
    normalize_by: float | int = 1.0,
    microbatch_size: int | None = None,
) -> ClippedFunctionSum:
    """Creates a function that sums clipped values over a batch's examples.

    ```python
    sum_fn = dp.filter_clipped_sum(lambda x: (x, x**2), l2_clip_norm=5.0, normalize_by=len(xs))
    noise = plan.privatizer(sum_fn)
    moments = sum_fn(xs)
    (mean, square), _ = noise.update(moments, noise.init(moments))
    ```

    Guarantee: as [`filter_clipped_grad`][], of which it is a case: the sum of clipped gradients, at
        theta = 0, of the loss <theta, fun(example)>. What one example adds has, over all leaves of
        the result, an L2 norm of at most `l2_norm_bound`, whatever `fun` returns.

    | example | adds |
    |---|---|
    | norm of its values at most the clip norm | its values |
    | larger norm | its values, scaled to the clip norm |
    | a value is NaN or infinite | exactly zero, in all leaves |
    | padding | exactly zero |

    Args:
        fun: `fun(*example)` or `fun(*example, key=...)`: the values of one example, a tree of
            floating-point arrays of fixed shapes. It need not be differentiable.
        l2_clip_norm: as for [`filter_clipped_grad`][]; trees are those of `fun`'s result.
        policy: as for [`filter_clipped_grad`][]. Inputs and values are in the compute dtype.
        sharding: as for [`filter_clipped_grad`][].
        rescale_to_unit_norm: divide each example's clipped values by the clip norm.
        normalize_by: a public number > 0 that the sum is divided by, such as the number of examples
            of the data set; never the size of a sample.
        microbatch_size: how many examples are processed at once.

    Returns:
        A function, called as `sum_fn(*batch, key=None, is_padding_example=None)`. It returns the
        sum: the tree of `fun`'s result, in the accumulate dtype. `plan.privatizer` and
        `check_privacy` take it as they take a clipped gradient.

    Raises:
        ValueError: as [`filter_clipped_grad`][]; here or at the call: `fun` is no function, or does
            not return floating-point arrays.
    """
    function("fun", fun, "fun(*example)")
    configuration = checked_configuration(
        l2_clip_norm, rescale_to_unit_norm, policy, sharding, normalize_by, microbatch_size
    )
    return ClippedFunctionSum(_Linear(fun), eqx.is_inexact_array, configuration, gradients_alone)
