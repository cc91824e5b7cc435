"""The clipped sum of any function of an example: means, counts, histograms."""

from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..expected import function
from ..losses import ClipNorms
from ..paths import below
from ..precision import JmpPolicy, Policy
from ..sharding import ShardingRules
from ..shown import shown
from ..trees import PyTree
from .arguments import checked_configuration, read_examples
from .clipped_grad import ClippedGrad, gradients_alone
from .program import check_key


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
