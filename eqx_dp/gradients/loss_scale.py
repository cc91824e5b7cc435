"""What each example's loss is multiplied by before the backward pass: powers of two."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..isolation import run_apart
from ..precision import LossScale, Policy
from ..programs import evaluated
from ..sharding import Shard, whole
from .magnitudes import Largest, is_narrow, pulled_back
from .powers import power_of_two
from .program import Inputs
from .split import Split
from .tapped import evaluate, zero_tap
from .taps import Address, Uses
from .uses import ParamUse, contraction, convolution, lookup, scale, shift, vjp

# Where the largest float16 value is put: below 2^14, and float16 ends at 2^16. Two binades are left
# for what a probe with eight digits cannot tell, and for partial sums that exceed the whole.
_TARGET = 2.0**13
# Where values that the real pass holds in float32 are kept below.
_LARGEST_WIDE = 2.0**120


class LossScaling(NamedTuple):
    """The scale of each example's loss.

    Attributes:
        value: a power of two, the same for all, where there is no probe.
        dtype: the accumulate dtype, in which it is undone.
        probe: chooses a scale for each example from that example alone.
    """

    value: float
    dtype: np.dtype[Any]
    probe: "Probe | None" = None

    def __call__(
        self, params: list[Array | Shard], frozen: list[Array | Shard], examples: list[Array]
    ) -> Float[Array, " batch"] | None:
        """One scale an example of a batch; None where nothing is scaled."""
        probe = self.probe
        if probe is not None:
            arrays = list(map(whole, params)), list(map(whole, frozen))
            scale_of = functools.partial(probe.scale, *arrays)
            scales = run_apart(scale_of, probe.split.program.jaxpr.jaxpr, examples)
            return scales.astype(self.dtype)
        if self.value == 1:
            return None
        return jnp.full(len(examples[0]), self.value, self.dtype)


class Probe(NamedTuple):
    """A forward and a backward pass in bfloat16, which has float32's range, to see how large it is.

    Attributes:
        split: the loss, float16 replaced by bfloat16.
        uses: those of its roots.
    """

    split: Split
    uses: Uses

    def scale(
        self, params: list[Array], frozen: list[Array], example: list[Array]
    ) -> Float[Array, ""]:
        """The power of two that brings the largest float16 value of the backward pass near 2^13.

        Guarantee: it depends on this example and the parameters alone, so nothing of it has to be
        accounted for. It changes no gradient but by rounding: it is undone exactly.

        What counts is every value that is multiplied by the scale and that the real pass holds in
        float16, the loss's own cotangent and parameters' gradients included; the gradient at a
        contraction, a convolution, a lookup by a bound on it, so that it need not be formed.

        | largest float16 value | scale |
        |---|---|
        | 0, NaN or infinite | 1 (the pass for the gradient finds such an example) |
        | tiny | float32 values, the loss's too, stay below 2^121 |
        | huge | at least the loss's smallest normal number |
        """
        found = self._largest(*map(probed, (params, frozen, example)))
        usable = jnp.isfinite(found.narrow) & (found.narrow > 0) & jnp.isfinite(found.wide)
        narrow, wide = (jnp.where(usable & (size > 0), size, 1) for size in found)
        _, inverse = power_of_two(narrow)
        _, inverse_of_wide = power_of_two(wide)
        # Compared before it is multiplied: the inverse of a tiny number times 2^13 may overflow.
        most = jnp.minimum(inverse_of_wide, 1) * _LARGEST_WIDE
        scale = jnp.where(inverse < most / _TARGET, inverse * _TARGET, most)
        return jnp.where(usable, jnp.maximum(scale, self._smallest), 1)

    @property
    def _smallest(self) -> float:
        """The least scale: the loss's cotangent holds it exactly, and float32 its inverse."""
        loss: Any = self.split.program.jaxpr.out_avals[0]
        dtype = jnp.float16 if is_narrow(loss.dtype) else jnp.float32
        return float(jnp.finfo(dtype).smallest_normal)

    def _largest(self, params: list[Array], frozen: list[Array], example: list[Array]) -> Largest:
        """The largest values of one example's backward pass."""
        uses = _with_elementwise_formed(self.uses)
        roots, fixed = self.split.shared(params, frozen)

        def run(taps: dict[Address, Array], whole: dict[int, Array]) -> Array:
            values = [whole.get(root, value) for root, value in enumerate(roots)]
            inputs = [*values, *fixed, *example]
            loss, _, _ = evaluate(self.split.program, uses.at, inputs, taps, _bounded)
            return loss

        taps = {at: _probing_tap(use) for at, use in uses.at.items()}
        whole = {root: roots[root] for root in uses.whole}
        loss, pullback = jax.vjp(run, taps, whole)
        (bounds, _), largest = pulled_back(pullback, jnp.ones_like(loss))
        gradients = _of_leaves(uses, bounds)
        return largest._replace(narrow=jnp.max(jnp.stack([largest.narrow, *gradients])))


def _with_elementwise_formed(uses: Uses) -> Uses:
    """The uses, with leaves `whole` whose gradients are cheap to form: biases, scales."""
    return uses.without(
        {
            leaf: "its gradient is formed"
            for leaf, its in enumerate(uses.of)
            if its and all(use.kind.name in (scale.name, shift.name) for use in its.values())
        }
    )


def _probing_tap(use: ParamUse) -> Array:
    """A zero whose gradient is a bound at each step; of a `vjp` the parameter's own gradient."""
    if use.kind is vjp:
        return zero_tap(use, use.result.dtype)
    return jnp.zeros(use.result.shape[: len(use.scans)])


def _of_leaves(uses: Uses, bounds: dict[Address, Array]) -> list[Float[Array, ""]]:
    """Bounds on each leaf's gradient, from those at each use, of every step of a scan."""

    def of_use(at: Address, use: ParamUse) -> Float[Array, ""]:
        if use.kind is vjp:
            size = jnp.max(jnp.abs(bounds[at].astype(jnp.float32)), initial=0)
            return size if is_narrow(use.result.dtype) else jnp.zeros(())
        times = tuple(axis for axis, its in enumerate(use.scans) if its == "time")
        return jnp.max(jnp.sum(bounds[at], times))

    zero = jnp.zeros(())
    return [sum((of_use(*use) for use in its.items()), zero) for its in uses.of if its]


def _bounded(
    use: ParamUse, equation: jex_core.JaxprEqn, inputs: list[Any], tap: Array
) -> tuple[Array, Any]:
    """The result of a use; the gradient of the tap is a bound on the parameter's.

    No entry of the gradient is larger than the largest entry of the data, times the sum of the
    cotangents that it meets. Neither is a sum of some of its terms, in any order.
    """
    (result,) = evaluated(equation, inputs)
    if not is_narrow(jnp.result_type(inputs[use.operand])):
        return result, ()
    data = jnp.ones(())
    if use.kind.name not in (lookup.name, shift.name):
        data = jax.lax.stop_gradient(inputs[1 - use.operand])
        data = jnp.max(jnp.abs(data), initial=0).astype(jnp.float32)
    summed = _summed(use, result.ndim)

    @jax.custom_vjp
    def watched(result: Array, tap: Array, data: Array) -> Array:
        del tap, data
        return result

    def backward(data: Array, cotangent: Array) -> tuple[Array, Array, Array]:
        met = jnp.sum(jnp.abs(cotangent.astype(jnp.float32)), summed)
        return cotangent, data * jnp.max(met, initial=0), jnp.zeros_like(data)

    watched.defvjp(lambda result, tap, data: (result, data), backward)
    return watched(result, tap, data), ()


def _summed(use: ParamUse, ndim: int) -> tuple[int, ...]:
    """The axes of a result along which an entry of the parameter meets all there is."""
    operation, everything = use.operation, tuple(range(ndim))
    if not use.view.is_isometric:
        return everything
    if use.kind is contraction:
        (contracted, _), (batch, _) = operation.param("dimension_numbers")
        left = len(operation.operands[0]) - len(contracted)
        return everything[left:] if use.operand == 0 else everything[len(batch) : left]
    if use.kind is convolution:
        features = operation.param("dimension_numbers").out_spec[1]
        return tuple(axis for axis in everything if axis != features)
    if use.kind is lookup and operation.primitive == "gather":
        offset = operation.param("dimension_numbers").offset_dims
        return tuple(axis for axis in everything if axis not in offset)
    return everything


def probing_policy(policy: Policy) -> Policy:
    """The policy of a probe: bfloat16 wherever the other computes in float16."""

    def wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
        return np.dtype(jnp.bfloat16) if dtype == np.float16 else dtype

    return dataclasses.replace(
        policy,
        compute_dtype=wide(policy.compute_dtype),
        modules=tuple(
            dataclasses.replace(r, compute_dtype=wide(r.compute_dtype)) for r in policy.modules
        ),
        loss_scale=LossScale(),
        matmul=None,
    )


def probing_inputs(inputs: Inputs) -> Inputs:
    """What a probe is traced on."""
    arrays = inputs.params, inputs.frozen, inputs.example
    params, frozen, example = jax.tree.map(lambda x: probed([x])[0], arrays)
    return inputs._replace(params=params, frozen=frozen, example=example)


def probed(values: list[Any]) -> list[Any]:
    """Arrays, or shapes of arrays, with float16 replaced by bfloat16."""

    def wide(x: Any) -> Any:
        if x.dtype != jnp.float16:
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, weak_type=x.weak_type)
        return x.astype(jnp.bfloat16)

    return list(map(wide, values))


def loss_cotangent(loss: Float[Array, "*batch"], scale: Float[Array, "*batch"] | None) -> Array:
    """The cotangent that a backward pass starts from."""
    return jnp.ones_like(loss) if scale is None else scale.astype(loss.dtype)
