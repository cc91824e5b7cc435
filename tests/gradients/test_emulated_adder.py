"""What `eqx_dp/gradients/gram.md` assumes of tensor cores, against an adder that is emulated."""

import jax.numpy as jnp
import numpy as np
import pytest

from eqx_dp.gradients.norms import product_roundoff


def of_tensor_core(products, at_once):
    """A sum as tensor cores add: aligned to the largest term and cut at 24 bits, then cut again."""
    total = np.zeros(products.shape[1:])

    def cut(x, largest):
        ulp = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(largest), 1e-300))) - 23)
        return np.trunc(x / ulp) * ulp

    for start in range(0, len(products), at_once):
        terms = np.concatenate([total[None], products[start : start + at_once]])
        total = np.sum(cut(terms, np.abs(terms).max(axis=0)), axis=0)
        total = cut(total, total)
    return total


@pytest.mark.parametrize("at_once", [1, 4, 16, 32])
@pytest.mark.parametrize("kind", ["random", "one sign", "falling", "cancelling"])
def test_four_roundings_a_product_cover_a_tensor_core(kind, at_once):
    rng = np.random.default_rng(0)
    x, y = (np.float64(jnp.bfloat16(1) * rng.normal(size=(512, 200)).astype(jnp.bfloat16))
            for _ in range(2))  # fmt: skip
    products = x * y
    match kind:
        case "one sign":
            products = np.abs(products) + 2.0**-9
        case "falling":  # each smaller one is cut off beside the first
            products = 2.0 ** -(np.arange(512)[:, None] / 20) * (1 + np.abs(products))
        case "cancelling":
            products = np.concatenate([products, -products[::-1]])
    error = product_roundoff(np.dtype("float32"), "gpu", (1, 1))
    off = np.abs(of_tensor_core(products, at_once) - products.sum(axis=0))
    assert (off <= len(products) * error * np.abs(products).sum(axis=0)).all()
