"""Optimizers that know of the noise in their gradients, as optax transformations.

All of them are post-processing of noisy gradients, and cost no privacy.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsFloat, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int
from optax import tree as optax_tree

from ..expected import function, real_number
from ..expected import optimizer as checked_optimizer
from ..trees import PyTree

Model = TypeVar("Model")

_EPS = 1e-8  # as optax.adam's


def adam_corrected(
    learning_rate: optax.ScalarOrSchedule,
    noise_stddev: SupportsFloat,
    b1: SupportsFloat = 0.9,
    b2: SupportsFloat = 0.999,
    floor: SupportsFloat | None = None,
) -> optax.GradientTransformation:
    """Adam without the noise in its second moment (DP-AdamBC, Tang et al., arXiv 2312.14334).

    Noise of standard deviation s adds s^2 to the mean square of every gradient. Where this is most
    of it, Adam divides all gradients by one number, s, and is no more than gradient descent with
    momentum. Here s^2 is subtracted, so that parameters with small gradients move as far as others.

    ```python
    stddev = plan.noise_multiplier * grad_fn.sensitivity(plan.neighboring_relation)
    optimizer = optax.chain(plan.privatizer(grad_fn), dp.optimizers.adam_corrected(1e-3, stddev))
    ```

    The update is m / (sqrt(max(v, floor)) + 1e-8). m is the mean of past gradients g, and v that of
    g^2 - s^2, both by moving averages that are corrected for their start at zero. (This is Adam's v
    less s^2, with less rounding.)

    | case | what happens |
    |---|---|
    | `noise_stddev` is 0 | that of `optax.adam` |
    | v is below `floor`, as where noise hides the gradient | `floor` takes its place |
    | noise of one step depends on that of others | give its standard deviation in a single step |
    | the state is stored in less than float32 | small changes of v are lost, as in Adam |

    Args:
        learning_rate: as for `optax.adam`.
        noise_stddev: the standard deviation s of the noise in the gradients that it gets, at least
            0 and public: noise multiplier x sensitivity, if nothing stands between.
        b1: the decay of m, in [0, 1).
        b2: the decay of v, in [0, 1).
        floor: the least v, at least 0; the paper tunes it. None for three standard deviations of v
            where there is only noise, 3 s^2 sqrt(2 (1 - b2) / (1 + b2)).

    Raises:
        ValueError: a number is out of its range.
    """
    b1, b2 = _decay("b1", b1), _decay("b2", b2)
    variance = _at_least_0("noise_stddev", noise_stddev) ** 2
    spread = variance * math.sqrt(2 * (1 - b2) / (1 + b2))
    least = 3 * spread if floor is None else _at_least_0("floor", floor)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        squares = jax.tree.map(lambda g: g**2 - variance, updates)
        mu = optax_tree.update_moment(updates, state.mu, b1, 1)
        nu = optax_tree.update_moment(squares, state.nu, b2, 1)
        count = optax.safe_increment(state.count)
        m, v = (optax_tree.bias_correction(x, b, count) for x, b in ((mu, b1), (nu, b2)))
        updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(jnp.maximum(v, least)) + _EPS), m, v)
        return updates, optax.ScaleByAdamState(count, mu, nu)

    scale = optax.GradientTransformation(optax.scale_by_adam().init, update)
    return optax.chain(scale, optax.scale_by_learning_rate(learning_rate))


class DiskState(NamedTuple):
    """The state of `disk`.

    Attributes:
        inner: of the optimizer that gets the filtered gradients.
        step: how many steps were taken.
        filtered: the filtered gradient of the last step.
        ahead: how far the model is ahead of the iterate.
    """

    inner: optax.OptState
    step: Int[Array, ""]
    filtered: optax.Updates
    ahead: optax.Updates


def disk(
    optimizer: optax.GradientTransformation, kappa: SupportsFloat = 0.7
) -> optax.GradientTransformationExtraArgs:
    """Filters noise out of gradients (DiSK, Zhang et al., arXiv 2410.03883).

    A moving average of gradients has less noise, but lags behind. So the model that training holds,
    and at which gradients are taken, is ahead of the iterate x of the optimizer. With the
    paper's gamma = (1 - kappa) / kappa, for which one gradient a step is enough,

    - the model is y_t = x_t + gamma (x_t - x_(t-1)), and g_t its noisy gradient;
    - the filtered gradient is f_t = (1 - kappa) f_(t-1) + kappa g_t, with f_0 = g_0;
    - x_(t+1) is what the optimizer makes of x_t and f_t.

    Where the loss is quadratic, f_t is the gradient at x_t itself but for the noise, whose variance
    is kappa / (2 - kappa) of that of one step after many.

    Args:
        optimizer: gets filtered gradients, and x as its parameters. `adam_corrected` in it wants
            the standard deviation after the filter, sqrt(kappa / (2 - kappa)) of the plan's.
        kappa: the weight of the newest gradient, above 0 and at most 1 (no filter).

    Raises:
        ValueError: there is no optimizer, or kappa is out of its range.
    """
    checked_optimizer("optimizer", optimizer)
    kappa = real_number("kappa", kappa, lambda real: 0 < real <= 1, "above 0 and at most 1")
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> DiskState:
        zeros = optax_tree.zeros_like(params)
        return DiskState(inner.init(params), jnp.zeros((), jnp.int32), zeros, zeros)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        gain = jnp.where(state.step == 0, 1, kappa)  # weakly typed: dtypes stay
        filtered = jax.tree.map(lambda f, g: f + gain * (g - f), state.filtered, updates)
        iterate = None if params is None else optax_tree.sub(params, state.ahead)
        moved, after = inner.update(filtered, state.inner, iterate, **extra)
        ahead = optax_tree.scale((1 - kappa) / kappa, moved)
        updates = optax_tree.sub(optax_tree.add(moved, ahead), state.ahead)
        return updates, DiskState(after, state.step + 1, filtered, ahead)

    return optax.GradientTransformationExtraArgs(init, update)


def disk_iterate(model: Model, opt_state: PyTree[Any]) -> Model:
    """The iterate x of `disk`, to evaluate and to keep: the model is ahead of it.

    Args:
        model: the model that is trained, or the part of it that is.
        opt_state: the state of an optimizer that holds one `disk`.

    Raises:
        ValueError: it holds none.
    """
    ahead = _found(opt_state, "ahead", "disk")
    return eqx.apply_updates(model, jax.tree.map(jnp.negative, ahead))


class Scaled(eqx.Module):
    """A model, with a public scale for each entry of what is trained; see `adam_scaled`.

    Attributes:
        model: the model.
        scale: the model's tree, with None where nothing is trained; or None before `rescaled`.
    """

    model: Any
    scale: Any = None


def scaled_loss(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of a `Scaled` model: its value is that of the model, its gradient is scale x gradient.

    Args:
        loss: the loss of one example, `loss(model, *example)`, or with `key=...`.

    Raises:
        ValueError: it is no function.
    """
    function("loss", loss, "loss(model, *example)")

    def with_scale(scale: Any, leaf: Any) -> Any:
        value = jax.lax.stop_gradient(leaf)
        return leaf if scale is None else value + scale * (leaf - value)

    @functools.wraps(loss)
    def scaled(model: Scaled, *example: Any, **key: Any) -> Any:
        scaled = jax.tree.map(with_scale, model.scale, model.model, is_leaf=lambda x: x is None)
        return loss(scaled, *example, **key)

    return scaled


class AdamScaledState(NamedTuple):
    """The state of `adam_scaled`.

    Attributes:
        adam: of Adam, which gets noisy gradients of the model.
        scale: by which gradients of the next step are multiplied before they are clipped.
    """

    adam: optax.OptState
    scale: PyTree[Array]


def adam_scaled(
    learning_rate: optax.ScalarOrSchedule,
    scale_eps: SupportsFloat,
    b1: SupportsFloat = 0.9,
    b2: SupportsFloat = 0.999,
) -> optax.GradientTransformation:
    """Adam by scale-then-privatize (Ganesh, McMahan, Thakurta, arXiv 2507.01129, algorithm 8).

    Before it is clipped, each example's gradient is multiplied by s = 1 / (sqrt(v) + scale_eps),
    entry by entry, where v is Adam's second moment after the steps before. The noisy sum is divided
    by s, and goes to Adam. So large gradients have much noise and small ones little.

    ```python
    grad_fn = dp.filter_clipped_grad(
        dp.optimizers.scaled_loss(loss), l2_clip_norm=1.0, normalize_by=expected_batch,
        filter_spec=dp.optimizers.Scaled(eqx.is_inexact_array, False),
    )
    optimizer = optax.chain(plan.privatizer(grad_fn), dp.optimizers.adam_scaled(1e-3, 1e-3))
    model = dp.optimizers.Scaled(model)
    opt_state = optimizer.init(grad_fn.trainable(model))
    model = dp.optimizers.rescaled(model, opt_state)
    # A step:
    grads = grad_fn(model, x, y, is_padding_example=is_padding_example)
    updates, opt_state = optimizer.update(grads, opt_state)
    model = dp.optimizers.rescaled(eqx.apply_updates(model, updates), opt_state)
    ```

    **Guarantee.** It is that of any clipped gradient: s follows from noisy sums and is public, and
    gradients are clipped after they are scaled. A step that forgets `rescaled` is no less private.

    The clip norm is that of scaled gradients, whose entries are about 1 in size. It is for a loop
    of one's own: `make_step` does not change what is not trained. Each entry has its own scale,
    so the engine forms the gradient of each example, as its method "per_example" does.

    Args:
        learning_rate: as for `optax.adam`.
        scale_eps: above 0. A large one scales all entries alike; a small one lets entries whose
            gradients are small count most. To be tuned.
        b1: as for `optax.adam`.
        b2: as for `optax.adam`.

    Raises:
        ValueError: a number is out of its range.
    """
    b1, b2 = _decay("b1", b1), _decay("b2", b2)
    least = real_number("scale_eps", scale_eps, lambda real: real > 0, "above 0")
    adam: Any = optax.adam(learning_rate, b1, b2)

    def init(params: Any) -> AdamScaledState:
        scale = optax_tree.full_like(params.model, 1 / least)
        return AdamScaledState(adam.init(params.model), scale)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        noisy = jax.tree.map(jnp.divide, updates.model, state.scale)
        moved, of_adam = adam.update(noisy, state.adam)
        second = optax_tree.bias_correction(of_adam[0].nu, b2, of_adam[0].count)
        scale = jax.tree.map(lambda v: 1 / (jnp.sqrt(v) + least), second)
        return Scaled(moved), AdamScaledState(of_adam, scale)

    return optax.GradientTransformation(init, update)


def rescaled(model: Scaled, opt_state: PyTree[Any]) -> Scaled:
    """The model, with the scale that `adam_scaled` wants for the next step."""
    return Scaled(model.model, _found(opt_state, "scale", "adam_scaled"))


Factors = Sequence[tuple[Any, Any]]


def lora_orthonormal(
    optimizer: optax.GradientTransformation, factors: Callable[[Any], Factors]
) -> optax.GradientTransformationExtraArgs:
    """Keeps each adapter of LoRA in the factorization whose inner factor is orthonormal.

    The product Z = U F of two factors does not change if F is divided by 10 and U is multiplied by
    it. But the gradients of the factors are G F^T and U^T G, for the gradient G of Z: their norm,
    and so what is clipped, changes, and so does the noise in Z (Wang and Zhang, arXiv 2606.00944,
    who project on the tangent space of Z instead). Here F is the Q of a QR decomposition, R goes to
    U, and this is done again after each step.

    ```python
    def factors(model):
        return [(layer.down, layer.up) for layer in loras(model)]

    model = dp.optimizers.orthonormalized(model, factors)
    optimizer = dp.optimizers.lora_orthonormal(optax.adam(1e-3), factors)
    ```

    **Guarantee.** If two models have equal Z, and factors F that span the same space, then their
    gradients have equal norms, and their noise in Z has one distribution. Proof: F F^T = I leaves
    the freedom of an orthogonal matrix R alone, (U R^T)(R F). |G F^T|^2 + |U^T G|^2 is the same for
    each R, and so is the distribution of Gaussian noise in the factors. Noise of standard deviation
    s in the factors has an energy of s^2 (outputs rank + inputs |Z|^2) in Z, to first order. In any
    other factors it is s^2 (outputs |F|^2 + inputs |U|^2), which has no bound.

    Beside the last block of a pretrained encoder (`examples/finetune_reviews.py`), F times 10 moves
    the median norm from 1.05 to 2.44, and that energy from 13,700 to 1,370,000 s^2. Orthonormal
    factors have 1.05 and 13,800, whatever the factors were before.

    The factors are public, and so is what follows from them: it costs no privacy.

    Args:
        optimizer: gets noisy gradients of the factors, and makes an update of them.
        factors: a function of a model that returns each adapter's two factors: first F, which is
            not zero at the start (`down`), then U (`up`). F may stand on either side of U: it is
            (rank, inputs) with U (outputs, rank), or (inputs, rank) with U (rank, outputs).

    Raises:
        ValueError: there is no optimizer, or `factors` is no function.
    """
    checked_optimizer("optimizer", optimizer)
    function("factors", factors, "factors(model), which returns pairs of arrays")
    inner = optax.with_extra_args_support(optimizer)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        moved, state = inner.update(updates, state, params, **extra)
        after = orthonormalized(optax_tree.add(params, moved), factors)
        return optax_tree.sub(after, params), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def orthonormalized(model: Model, factors: Callable[[Any], Factors]) -> Model:
    """A model whose adapters are factorized as `lora_orthonormal` keeps them, with equal products.

    Args:
        model: the model, or the part of it that is trained.
        factors: as for `lora_orthonormal`.
    """

    def changed(inner: Array, outer: Array) -> tuple[Array, Array]:
        is_right = inner.shape[0] < inner.shape[1]
        q, r = jnp.linalg.qr(inner.T if is_right else inner)
        signs = jnp.where(jnp.diagonal(r) < 0, -1, 1).astype(r.dtype)  # as close as can be
        q, r = q * signs, signs[:, None] * r
        with jax.default_matmul_precision("highest"):  # a GPU would lose digits of the model
            return (q.T, outer @ r.T) if is_right else (q, r @ outer)

    replaced = [array for pair in factors(model) for array in changed(*pair)]
    return eqx.tree_at(lambda m: [x for pair in factors(m) for x in pair], model, replaced)


def _found(opt_state: PyTree[Any], name: str, maker: str) -> Any:
    """What an optimizer's state holds by some name."""
    found = optax_tree.get(opt_state, name)
    if found is None:
        raise ValueError(
            f"opt_state must be that of an optimizer with dp.optimizers.{maker} in it."
        )
    return found


def _decay(name: str, value: SupportsFloat) -> float:
    return real_number(name, value, lambda real: 0 <= real < 1, "at least 0 and below 1")


def _at_least_0(name: str, value: SupportsFloat) -> float:
    return real_number(name, value, lambda real: real >= 0, "at least 0")
