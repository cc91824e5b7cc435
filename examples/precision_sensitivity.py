"""What a narrower policy costs each layer of a model, and the narrowest policy within a tolerance.

The clipped sum of a public batch is computed in a wide policy, and again with one layer after the
other by a narrower one. The error is the norm of the difference, as a share of the sum's norm. Then
the costliest layers are kept in float32, one more at a time, until the whole sum is within the
tolerance.

**Not private**: the figures, and the choice, show something of every example. Give public ones.

    python examples/precision_sensitivity.py        # the digits model of digits.py, untrained
    python examples/precision_sensitivity.py --tolerance 0.01
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import digits
import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, PyTree

import eqx_dp as dp


class Sensitivity(NamedTuple):
    """What was measured.

    Attributes:
        alone: by policy and layer, the error if that layer alone follows the policy.
        everywhere: by policy, the error if all do.
        kept_wide: the layers that the recommended policy keeps in float32.
        recommended: the first policy within the tolerance, with rules; None if there is none.
        error: of the recommended policy.
    """

    alone: dict[str, dict[str, float]]
    everywhere: dict[str, float]
    kept_wide: tuple[str, ...]
    recommended: dp.Policy | None
    error: float


def rules(layers: Sequence[str], dtype: Any, matmul: Any) -> tuple[dp.ModuleRule, ...]:
    """For some layers, and all modules in them."""
    return tuple(dp.ModuleRule(f"{layer}.**", dtype, matmul) for layer in layers)


def one_narrow(policy: dp.Policy, layer: str, wide: np.dtype[Any]) -> dp.Policy:
    """A policy by which one layer follows another policy, and the rest is wide."""
    around = np.dtype("float32") if policy.matmul else wide  # no float64 beside [matmul]
    rest = [dp.ModuleRule("**", around, "wide", optional=True)] if policy.matmul else []
    own = rules([layer], policy.compute_dtype, None)
    return dp.Policy(around, around, around, modules=[*own, *rest], matmul=policy.matmul)


def sensitivity(
    loss: Callable[..., Any],
    model: PyTree[Any],
    public_batch: Sequence[Any],
    layers: Sequence[str],
    policies: Sequence[str],
    *,
    clip_norm: float,
    tolerance: float,
) -> Sensitivity:
    """Measures policies layer by layer, against float64 where JAX has it, else float32.

    Args:
        loss: of one example.
        model: the model.
        public_batch: arrays with public examples in front.
        layers: paths of modules.
        policies: names of presets or paths of files without rules, the narrowest first.
        clip_norm: of one example's gradient.
        tolerance: the largest error of the recommended policy.
    """
    wide = np.dtype("float64" if jax.config.read("jax_enable_x64") else "float32")

    def clipped_sum(policy: dp.Policy) -> Float[np.ndarray, " entries"]:
        grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=clip_norm, policy=policy)
        leaves = jax.tree.leaves(eqx.filter_jit(grad_fn)(model, *public_batch))
        return np.concatenate([np.asarray(x, np.float64).ravel() for x in leaves])

    exact = clipped_sum(dp.Policy(wide, wide, wide, matmul_precision="highest"))

    def error(policy: dp.Policy) -> float:
        return float(np.linalg.norm(clipped_sum(policy) - exact) / np.linalg.norm(exact))

    narrow = {name: dp.load_policy(name) for name in policies}
    alone = {
        name: {layer: error(one_narrow(policy, layer, wide)) for layer in layers}
        for name, policy in narrow.items()
    }
    everywhere = {name: error(policy) for name, policy in narrow.items()}
    for name, policy in narrow.items():
        costliest = sorted(layers, key=lambda layer: -alone[name][layer])
        for count in range(len(layers) + 1):
            kept, matmul = costliest[:count], "wide" if policy.matmul else None
            tried = dataclasses.replace(policy, modules=rules(kept, "float32", matmul))
            found = error(tried)
            if found <= tolerance:
                return Sensitivity(alone, everywhere, tuple(kept), tried, found)
    return Sensitivity(alone, everywhere, (), None, float("nan"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tolerance", type=float, default=0.05, help="(default: 0.05)")
    _, _, images, labels = digits.load_images()
    model, policies = digits.Digits(jax.random.key(0)), ("mixed_float8", "mixed_bfloat16")
    found = sensitivity(
        digits.loss,
        model,
        (images[:64], labels[:64]),
        ("conv1", "conv2", "linear"),
        policies,
        clip_norm=digits.CLIP_NORM,
        tolerance=parser.parse_args().tolerance,
    )
    for name in policies:
        told = ", ".join(f"{layer} {error:.1e}" for layer, error in found.alone[name].items())
        print(f"{name}: {told}; everywhere {found.everywhere[name]:.1e}")
    print(f"recommended, error {found.error:.1e}: {found.recommended}")


if __name__ == "__main__":
    main()
