"""`eqx-dp bench dtypes`: how fast the device multiplies matrices of each dtype."""

import argparse
import math
import os
import re
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..device import device_memory
from ..precision import MatmulPrecision, matmul_precision
from ..timing import once
from .command import Command, positive, x64
from .output import Panel, Table, add_output_arguments, check_output, show
from .working import working

# Of the memory that is free, what one product may take.
_MEMORY_SHARE = 0.5
# A product is not made smaller than this many columns, nor probed with more.
_PROBE_COLUMNS = 512
# A dtype of two bytes, or a shortened float32, that hardware multiplies is faster than float32 by
# more than this; float64 is slower by less than the other where there are units for it.
_FASTER, _NOT_MUCH_SLOWER = 1.2, 1 / 8


class ProductKind(NamedTuple):
    """A way to multiply matrices."""

    name: str
    dtype: str
    precision: MatmulPrecision = "default"


class Measured(NamedTuple):
    """One product's figures.

    Attributes:
        kind: what was multiplied.
        columns: of A.
        shortened: why A has fewer columns than asked for; empty if it has not.
        seconds: the median of several runs.
        flops: floating-point operations a second.
        widened: whether the compiled program converts A to a wider dtype before it multiplies.
    """

    kind: ProductKind
    columns: int
    shortened: str
    seconds: float
    flops: float
    widened: bool


def measure(
    kind: ProductKind, rows: int, columns: int, repeats: int, seconds: float, memory: int | None
) -> Measured:
    """Times `A @ A.T`, with fewer columns where memory or time does not suffice.

    `seconds` is what all runs together may take, by what a small product took; `memory` is the
    number of bytes that are free, None if unknown.
    """
    wanted, why, itemsize = columns, "", jnp.dtype(kind.dtype).itemsize
    # A, what it may be converted to, and a transposed copy of that.
    entries = (
        math.inf if memory is None else _MEMORY_SHARE * memory / (itemsize + 2 * max(4, itemsize))
    )
    while rows * columns > entries and columns > _PROBE_COLUMNS:
        columns, why = columns // 2, "memory"
    with x64(kind.dtype):
        small = min(columns, _PROBE_COLUMNS)
        run, _ = _product(kind, rows, small)
        once(run)
        expected = min(once(run), once(run)) / small
        while (repeats + 1) * expected * columns > seconds and columns // 2 >= small:
            columns, why = columns // 2, "time"
        run, text = _product(kind, rows, columns)
        once(run)
        taken = statistics.median(once(run) for _ in range(repeats))
    shortened = f"{columns:,} of {wanted:,} columns, for want of {why}" if why else ""
    flops = 2 * rows**2 * columns / taken
    return Measured(kind, columns, shortened, taken, flops, widens(text, rows, columns, kind.dtype))


def widens(program: str, rows: int, columns: int, dtype: str) -> bool:
    """Whether a compiled program's text converts A to a wider dtype, as it would to multiply it."""
    of_8_bits = "f16|bf16|f32|f64" if dtype.startswith("float8") else "f32|f64"
    wider = {"float64": None, "float32": "f64"}.get(dtype, of_8_bits)
    if wider is None:
        return False
    shapes = rf"(?:{rows},{columns}|{columns},{rows})"
    return re.search(rf"= (?:{wider})\[{shapes}\]\S* convert\(", program) is not None


def support(dtype: str, name: str, ratio: float, widened: bool) -> tuple[bool | None, str]:
    """Whether a dtype has units of its own, and how that was told; None for float32 itself."""
    if name == "float32":
        return None, "what the others are held against"
    if widened:
        return False, "the compiled program converts A to a wider dtype before it multiplies"
    least = _NOT_MUCH_SLOWER if dtype == "float64" else _FASTER
    is_told = "no conversion in the compiled program, and"
    if ratio >= least:
        return True, f"{is_told} the rate is at least {least:g} of float32's"
    return False, f"{is_told} yet the rate is not at least {least:g} of float32's"


def _kinds() -> list[ProductKind]:
    """TensorFloat-32 is for GPUs of NVIDIA's Ampere generation or later."""
    device = jax.local_devices()[0]
    generation = re.match(r"\d+", str(getattr(device, "compute_capability", "")))
    # JAX shortens float32 on some devices unless told not to.
    kinds = [ProductKind("float64", "float64"), ProductKind("float32", "float32", "highest")]
    if device.platform == "gpu" and generation is not None and int(generation[0]) >= 8:
        kinds.append(ProductKind("tensorfloat32", "float32", "tensorfloat32"))
    kinds += [ProductKind("float16", "float16"), ProductKind("bfloat16", "bfloat16")]
    return [*kinds, *(ProductKind(name, name) for name in ("float8_e4m3fn", "float8_e5m2"))]


def _product(kind: ProductKind, rows: int, columns: int) -> tuple[Callable[[], Any], str]:
    """A program that multiplies, with its matrix, and the program's text."""
    a = jax.random.normal(jax.random.key(0), (rows, columns), jnp.float32).astype(kind.dtype)
    with matmul_precision(kind.precision):
        program = jax.jit(_squared).lower(a).compile()
    return lambda: program(a), program.as_text() or ""


def _squared(a: Array) -> Array:
    """`A @ A.T`; of 8 bits summed in float32, as the engine does."""
    to = jnp.float32 if a.dtype.itemsize == 1 else a.dtype
    return jnp.matmul(a, a.T, preferred_element_type=to)


def where() -> str:
    """The device, in words."""
    device = jax.local_devices()[0]
    kind = "" if device.platform == device.device_kind else f" ({device.device_kind})"
    cores = f", {os.cpu_count()} cores" if device.platform == "cpu" else ""
    return f"{device.platform}{kind}{cores}, JAX {jax.__version__}"


# The command.


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size",
        nargs=2,
        type=positive,
        metavar=("ROWS", "COLUMNS"),
        default=(1024, 65536),
        help="of A (default: 1024 65536)",
    )
    parser.add_argument("--repeats", type=positive, default=5, help="runs of each (default: 5)")
    parser.add_argument(
        "--seconds", type=positive, default=60, help="that all runs may take, about (default: 60)"
    )
    add_output_arguments(parser)


def _run(arguments: argparse.Namespace) -> None:
    check_output(arguments)
    (rows, columns), repeats = arguments.size, arguments.repeats
    kinds, memory = _kinds(), device_memory(free=True)
    each = arguments.seconds / len(kinds)
    found: list[Measured] = []
    with working(len(kinds)) as begin:
        for kind in kinds:
            begin(f"timing {kind.name}")
            found.append(measure(kind, rows, columns, repeats, each, memory))
    show(_table(rows, columns, repeats, found), arguments)


def _table(rows: int, columns: int, repeats: int, found: list[Measured]) -> Table:
    reference = next(one.flops for one in found if one.kind.name == "float32")
    lines: list[tuple[str, ...]] = []
    data: list[dict[str, Any]] = []
    notes: list[str] = []
    for (name, dtype, _), of_a, shortened, seconds, flops, widened in found:
        ratio, rate = flops / reference, flops / 1e12
        native, reason = support(dtype, name, ratio, widened)
        told = {None: "-", True: "native", False: "no native support"}[native]
        size = f"{rows} x {of_a}"
        lines.append((name, size, f"{1e3 * seconds:.3g}", f"{rate:.3g}", f"{ratio:.2f}", told))
        if native is not None:
            notes.append(f"{name}: {told}, for {reason}")
        if shortened:
            notes.append(f"{name}: {shortened}")
        data.append(
            {
                "dtype": name,
                "rows": rows,
                "columns": of_a,
                "sized_down": shortened or None,
                "seconds": seconds,
                "tflops": rate,
                "ratio_to_float32": ratio,
                "converts_to_wider": widened,
                "native": native,
                "told_by": reason,
            }
        )
    rates = [one.flops / 1e12 for one in found]
    panel = Panel(
        "TFLOP/s", [one.kind.name for one in found], [*rates], max(rates) > 10 * min(rates)
    )
    return Table(
        f"A @ A.T, A of {rows} x {columns}, median of {repeats}, on {where()}",
        ("dtype", "A", "ms", "TFLOP/s", "/ float32", "native support"),
        lines,
        notes,
        {
            "device": where(),
            "asked_for": {"rows": rows, "columns": columns},
            "repeats": repeats,
            "dtypes": data,
        },
        [panel],
    )


COMMAND = Command(
    "bench dtypes",
    "time matrix products of each dtype",
    "Times A @ A.T for float64, float32, float16, bfloat16, float8_e4m3fn and float8_e5m2 (summed "
    "in float32), and tensorfloat32 where the device has it, and tells which the device supports: "
    "from the rate beside float32's, and from whether the compiled program converts to a wider "
    "dtype first. Sizes that memory or time does not allow are halved until it does.",
    _add_arguments,
    _run,
)
