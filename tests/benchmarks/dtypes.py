"""How fast this device multiplies matrices of each dtype.

    python -m tests.benchmarks.dtypes

Times A @ A.T (of 8 bits summed in float32, as the engine does). A dtype has units of its own if the
compiled program does not convert it to a wider one first, and the rate tells.
"""

import argparse
import re
import statistics
from contextlib import nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp

from eqx_dp.precision import MatmulPrecision, matmul_precision
from eqx_dp.tables import aligned
from tests.benchmarks.timing import once

# A dtype of two bytes, or a shortened float32, that hardware multiplies is faster than float32 by
# more than this; float64 is slower by less than the other where there are units for it.
FASTER, NOT_MUCH_SLOWER = 1.2, 1 / 8


class Kind(NamedTuple):
    """A way to multiply matrices."""

    name: str
    dtype: str
    precision: MatmulPrecision = "default"


class Measured(NamedTuple):
    """Floating-point operations a second, and whether the program widens A first."""

    seconds: float
    flops: float
    widens: bool


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


def measure(kind: Kind, rows: int, columns: int, repeats: int) -> Measured:
    """Times a product; the median of several runs."""

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
        seconds = statistics.median(once(lambda: program(a)) for _ in range(repeats))
    widens = is_widened(program.as_text() or "", rows, columns, kind.dtype)
    return Measured(seconds, 2 * rows**2 * columns / seconds, widens)


def is_widened(program: str, rows: int, columns: int, dtype: str) -> bool:
    """Whether a compiled program's text converts A to a wider dtype, as it would to multiply it."""
    of_8_bits = "f16|bf16|f32|f64" if dtype.startswith("float8") else "f32|f64"
    wider = {"float64": None, "float32": "f64"}.get(dtype, of_8_bits)
    shapes = rf"(?:{rows},{columns}|{columns},{rows})"
    return wider is not None and bool(
        re.search(rf"= (?:{wider})\[{shapes}\]\S* convert\(", program)
    )


def support(kind: Kind, ratio: float, widens: bool) -> str:
    """Whether a dtype has units of its own; `ratio` is its rate by float32's."""
    if kind.name == "float32":
        return "-"
    least = NOT_MUCH_SLOWER if kind.dtype == "float64" else FASTER
    return "native" if ratio >= least and not widens else "no native support"


def table(rows: int, columns: int, repeats: int) -> list[str]:
    """A line for each dtype."""
    found = {kind: measure(kind, rows, columns, repeats) for kind in kinds()}
    base = next(one.flops for kind, one in found.items() if kind.name == "float32")
    heads = ("dtype", "ms", "TFLOP/s", "/ float32", "native support")
    cells = [
        (
            kind.name,
            f"{1e3 * one.seconds:.3g}",
            f"{one.flops / 1e12:.3g}",
            f"{one.flops / base:.2f}",
            support(kind, one.flops / base, one.widens),
        )
        for kind, one in found.items()
    ]
    return aligned([heads, *cells])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", nargs=2, type=int, default=(1024, 8192), help="of A")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    device = jax.local_devices()[0]
    print(f"A @ A.T, A of {arguments.size}, {device.device_kind}, JAX {jax.__version__}")
    print("\n".join(table(*arguments.size, arguments.repeats)))


if __name__ == "__main__":
    main()
