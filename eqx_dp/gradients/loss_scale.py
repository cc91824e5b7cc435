"""What each example's loss is multiplied by before the backward pass: powers of two."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..precision import LossScale, ModuleRule, Policy
from .clip import power_of_two
from .program import Inputs, Program
from .taps import Place, Site, Survey, evaluate
from .views import apply

# Where the largest cotangent at a site is put. Beyond, float16 has fourteen binades for what is
# larger: cotangents between sites (a mean over 4,096 positions divides by as many), and gradients
# that are sums over positions. Below, sixteen to the end of its normal numbers, ten of subnormal.
_TARGET = 2.0**2
# The loss itself is multiplied: in float16, by no more than this.
_LARGEST_SCALE = 2.0**15
_SMALLEST_SCALE = 2.0**-14


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
        self, params: list[Array], frozen: list[Array], examples: list[Array]
    ) -> Float[Array, " batch"] | None:
        """One scale an example; None where nothing is scaled.

        Args:
            params: the trainable leaves.
            frozen: the other arrays of the model.
            examples: the leaves of a batch, examples in front.
        """
        probe = self.probe
        if probe is not None:
            scales = jax.vmap(lambda example: probe.scale(params, frozen, example))(examples)
            return scales.astype(self.dtype)
        if self.value == 1:
            return None
        return jnp.full(len(examples[0]), self.value, self.dtype)


class Probe(NamedTuple):
    """A forward and a backward pass in bfloat16, which has float32's range, to see how large it is.

    Attributes:
        program: the loss of one example, float16 replaced by bfloat16.
        found: its sites.
    """

    program: Program
    found: Survey

    def scale(
        self, params: list[Array], frozen: list[Array], example: list[Array]
    ) -> Float[Array, ""]:
        """The power of two that brings the largest cotangent of one example near 4.

        Guarantee: it depends on this example and the parameters alone, so nothing of it has to be
        accounted for. It changes no gradient but by rounding: it is undone exactly.

        ==================================  ==========================================
        largest cotangent                   scale
        ==================================  ==========================================
        0, NaN or infinite                  1 (the real pass will see for itself)
        tiny                                at most 2^15: the loss is multiplied by it
        huge                                at least 2^-14
        ==================================  ==========================================
        """
        largest = self._largest(*map(probed, (params, frozen, example)))
        usable = jnp.isfinite(largest) & (largest > 0)
        _, inverse = power_of_two(jnp.where(usable, largest, 1))
        scale = jnp.clip(inverse * _TARGET, _SMALLEST_SCALE, _LARGEST_SCALE)
        return jnp.where(usable, scale, 1)

    def _largest(
        self, params: list[Array], frozen: list[Array], example: list[Array]
    ) -> Float[Array, ""]:
        """The largest cotangent at any site, and of any leaf that no site describes."""

        def run(taps: dict[Place, Array], whole: dict[int, Array]) -> Array:
            values = [whole.get(leaf, value) for leaf, value in enumerate(params)]
            loss, _, _ = evaluate(
                self.program, self.found, values, frozen, example, taps, _watched_at_site
            )
            return loss

        taps = {
            place: jnp.zeros(site.tap.shape[: len(site.scans)])
            for place, site in self.found.sites.items()
        }
        whole = {leaf: params[leaf] for leaf in self.found.whole}
        found = jax.grad(run, argnums=(0, 1))(taps, whole)
        largest = [
            jnp.max(jnp.abs(x.astype(jnp.float32)), initial=0) for x in jax.tree.leaves(found)
        ]
        return jnp.max(jnp.stack(largest), initial=0) if largest else jnp.zeros(())


def _watched_at_site(site: Site, inputs: list[Any], tap: Array) -> tuple[Array, Any]:
    (result,) = apply(site.equation, inputs)
    return _watched(result, tap), ()


@jax.custom_vjp
def _watched(result: Array, tap: Float[Array, ""]) -> Array:
    """The result as it is; the gradient of the tap is the largest entry of the cotangent."""
    del tap
    return result


def _watched_forward(result: Array, tap: Float[Array, ""]) -> tuple[Array, None]:
    return _watched(result, tap), None


def _watched_backward(_: None, cotangent: Array) -> tuple[Array, Float[Array, ""]]:
    return cotangent, jnp.max(jnp.abs(cotangent.astype(jnp.float32)), initial=0)


_watched.defvjp(_watched_forward, _watched_backward)


def probing_policy(policy: Policy) -> Policy:
    """The policy of a probe: bfloat16 wherever the other computes in float16."""

    def wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
        return np.dtype(jnp.bfloat16) if dtype == np.float16 else dtype

    return dataclasses.replace(
        policy,
        compute_dtype=wide(policy.compute_dtype),
        modules=tuple(ModuleRule(r.match, wide(r.compute_dtype)) for r in policy.modules),
        loss_scale=LossScale(),
    )


def probing_inputs(inputs: Inputs) -> Inputs:
    """What a probe is traced on."""
    arrays = inputs.params, inputs.frozen, inputs.example
    params, frozen, example = jax.tree.map(lambda x: probed([x])[0], arrays)
    return inputs._replace(params=params, frozen=frozen, example=example)


def probed(values: list[Any]) -> list[Any]:
    """Arrays, or shapes of arrays, with float16 replaced by bfloat16."""
    return [_to_bfloat16(x) if x.dtype == jnp.float16 else x for x in values]


def _to_bfloat16(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, weak_type=x.weak_type)
    return x.astype(jnp.bfloat16)


def seed(loss: Float[Array, "*batch"], scale: Float[Array, "*batch"] | None) -> Array:
    """The cotangent that a backward pass starts from."""
    return jnp.ones_like(loss) if scale is None else scale.astype(loss.dtype)
