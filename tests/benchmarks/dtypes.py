"""How fast this device multiplies matrices of each dtype.

A @ A.T, the fastest of several runs. Of 8 bits products are summed in float32, as the engine does.
"""

import argparse
import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp

from eqx_dp.precision import MatmulPrecision, matmul_precision

from .command import Part
from .page import Table
from .timing import once


class Kind(NamedTuple):
    """A way to multiply matrices."""

    name: str
    dtype: str
    precision: MatmulPrecision = "default"


def kinds() -> list[Kind]:
    """TensorFloat-32 is for GPUs of NVIDIA's Ampere generation or later."""
    device = jax.local_devices()[0]
    generation = re.match(r"\d+", str(getattr(device, "compute_capability", "")))
    # JAX shortens float32 on some devices unless it is told not to.
    found = [Kind("float64", "float64"), Kind("float32", "float32", "highest")]
    if device.platform == "gpu" and generation is not None and int(generation[0]) >= 8:
        found.append(Kind("tensorfloat32", "float32", "tensorfloat32"))
    names = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    return [*found, *(Kind(name, name) for name in names)]


def seconds(kind: Kind, rows: int, columns: int, rounds: int) -> float:
    """Of one product, the fastest of several runs."""

    def squared(a):
        to = jnp.float32 if a.dtype.itemsize == 1 else a.dtype
        return jnp.matmul(a, a.T, preferred_element_type=to)

    with (
        jax.enable_x64(True) if kind.dtype == "float64" else nullcontext(),
        matmul_precision(kind.precision),
    ):
        a = jax.random.normal(jax.random.key(0), (rows, columns), jnp.float32).astype(kind.dtype)
        program = jax.jit(squared).lower(a).compile()
        once(lambda: program(a))
        return min(once(lambda: program(a)) for _ in range(rounds))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The size of the product."""
    parser.add_argument("--size", nargs=2, type=int, default=(1024, 8192), help="of A")


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """One table, a line a dtype."""
    rows, columns = (32, 64) if options.tiny else options.size
    found = {kind.name: seconds(kind, rows, columns, options.rounds) for kind in kinds()}
    lines = [
        {
            "dtype": name,
            "ms": f"{1e3 * s:.3g}",
            "TFLOP/s": f"{2e-12 * rows**2 * columns / s:.3g}",
            "x float32's rate": f"{found['float32'] / s:.2f}",
        }
        for name, s in found.items()
    ]
    yield Table(f"A @ A.T, A of {rows} x {columns}", lines)


PART = Part(__doc__, tables, add_options, rounds=(5, 3))
