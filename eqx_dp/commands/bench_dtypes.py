"""`eqx-dp bench dtypes`: how fast the device multiplies matrices of each dtype."""

import argparse
import math
import os
import re
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .command import Command, positive
from .output import Panel, Table, add_output_arguments, check_output, show
from .timing import once

# Of the memory that is free, what one product may take.
_MEMORY_SHARE = 0.5
# A product is not made smaller than this many columns, nor probed with more.
_PROBE_COLUMNS = 512
# A dtype of two bytes, or a shortened float32, that hardware multiplies is faster than float32 by
# more than this; float64 is slower by less than the other where there are units for it.
_FASTER, _NOT_MUCH_SLOWER = 1.2, 1 / 8


class Kind(NamedTuple):
    """A way to multiply matrices.

    Attributes:
        name: of the row.
        dtype: of the matrices.
        precision: what `jax.default_matmul_precision` is set to; None leaves it alone.
    """

    name: str
    dtype: str
    precision: str | None = None


# JAX shortens float32 on some devices unless told not to.
_FLOAT32 = Kind("float32", "float32", "highest")
_TENSORFLOAT32 = Kind("tensorfloat32", "float32", "tensorfloat32")


class Measured(NamedTuple):
    """One product's figures.

    Attributes:
        kind: what was multiplied.
        columns: of A.
        shortened: why there are fewer columns than asked for; empty if there are not.
        seconds: the median of several runs.
        flops: floating-point operations a second.
        widened: whether the compiled program converts A to a wider dtype before it multiplies.
    """

    kind: Kind
    columns: int
    shortened: str
    seconds: float
    flops: float
    widened: bool


def measure(
    kind: Kind, rows: int, columns: int, repeats: int, seconds: float, memory: int | None
) -> Measured:
    """Times `A @ A.T`, with fewer columns where memory or time does not suffice.

    Args:
        kind: what is multiplied.
        rows: of A.
        columns: of A, as asked for.
        repeats: how many runs the median is of.
        seconds: that all of them together may take, by what a small product took.
        memory: bytes that are free; None if unknown.
    """
    with _x64(kind):
        wanted, why = columns, ""
        # A, what it may be converted to, and a transposed copy of that.
        entry = jnp.dtype(kind.dtype).itemsize + 2 * max(4, jnp.dtype(kind.dtype).itemsize)
        while memory is not None and rows * columns * entry > _MEMORY_SHARE * memory:
            if columns <= _PROBE_COLUMNS:
                break
            columns, why = columns // 2, "memory"
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
    wider = {"float64": None, "float32": "f64"}.get(dtype, "f32|f64")
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
    if dtype == "float64":
        enough, than = ratio >= _NOT_MUCH_SLOWER, f"at least {_NOT_MUCH_SLOWER:g}"
    else:
        enough, than = ratio >= _FASTER, f"at least {_FASTER:g}"
    is_told = "no conversion in the compiled program, and"
    if enough:
        return True, f"{is_told} the rate is {than} of float32's"
    return False, f"{is_told} yet the rate is not {than} of float32's"


def _kinds() -> list[Kind]:
    kinds = [Kind("float64", "float64"), _FLOAT32]
    if _has_tensorfloat32():
        kinds.append(_TENSORFLOAT32)
    return [*kinds, Kind("float16", "float16"), Kind("bfloat16", "bfloat16")]


def _has_tensorfloat32() -> bool:
    """Whether the device is a GPU of NVIDIA's Ampere generation or later."""
    device = jax.local_devices()[0]
    generation = re.match(r"\d+", str(getattr(device, "compute_capability", "")))
    return device.platform == "gpu" and generation is not None and int(generation[0]) >= 8


def _x64(kind: Kind) -> AbstractContextManager[Any]:
    return jax.enable_x64(True) if kind.dtype == "float64" else nullcontext()


def _product(kind: Kind, rows: int, columns: int) -> tuple[Callable[[], Any], str]:
    """A program that multiplies, with its matrix, and the program's text."""
    a = jax.random.normal(jax.random.key(0), (rows, columns), jnp.float32).astype(kind.dtype)
    precision = nullcontext()
    if kind.precision is not None:
        precision = jax.default_matmul_precision(kind.precision)
    with precision:
        program = jax.jit(lambda a: a @ a.T).lower(a).compile()
    return lambda: program(a), program.as_text() or ""


def _free_memory() -> int | None:
    """Bytes that are free on the device, or on the host where it is the device; None if unknown."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        stats: dict[str, int] = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        return None if limit is None else limit - stats.get("bytes_in_use", 0)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # no such question on this system
        return None


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
    rows, columns = arguments.size
    kinds, memory = _kinds(), _free_memory()
    each = arguments.seconds / len(kinds)
    found = [measure(kind, rows, columns, arguments.repeats, each, memory) for kind in kinds]
    show(_table(rows, columns, arguments.repeats, found), arguments)


def _table(rows: int, columns: int, repeats: int, found: list[Measured]) -> Table:
    reference = next(one.flops for one in found if one.kind.name == "float32")
    lines: list[tuple[str, ...]] = []
    data: list[dict[str, Any]] = []
    notes: list[str] = []
    for one in found:
        ratio = one.flops / reference
        native, reason = support(one.kind.dtype, one.kind.name, ratio, one.widened)
        told = {None: "-", True: "native", False: "no native support"}[native]
        lines.append(
            (
                one.kind.name,
                f"{rows} x {one.columns}",
                f"{1e3 * one.seconds:.3g}",
                f"{one.flops / 1e12:.3g}",
                f"{ratio:.2f}",
                told,
            )
        )
        if native is not None:
            notes.append(f"{one.kind.name}: {told}, for {reason}")
        if one.shortened:
            notes.append(f"{one.kind.name}: {one.shortened}")
        data.append(
            {
                "dtype": one.kind.name,
                "rows": rows,
                "columns": one.columns,
                "sized_down": one.shortened or None,
                "seconds": one.seconds,
                "tflops": one.flops / 1e12,
                "ratio_to_float32": ratio,
                "converts_to_wider": one.widened,
                "native": native,
                "told_by": reason,
            }
        )
    title = f"A @ A.T, A of {rows} x {columns}, median of {repeats}, on {where()}"
    heads = ("dtype", "A", "ms", "TFLOP/s", "/ float32", "native support")
    names = [one.kind.name for one in found]
    rates: list[float | None] = [one.flops / 1e12 for one in found]
    everything = {
        "device": where(),
        "asked_for": {"rows": rows, "columns": columns},
        "repeats": repeats,
        "dtypes": data,
    }
    is_wide = math.log10(max(filter(None, rates)) / min(filter(None, rates))) > 1
    panels = [Panel("TFLOP/s", names, rates, logarithmic=is_wide)]
    return Table(title, heads, lines, notes, everything, panels)


COMMAND = Command(
    "bench dtypes",
    "time matrix products of each dtype",
    "Times A @ A.T for float64, float32, float16, bfloat16, and tensorfloat32 where the device has "
    "it, and tells which the device supports: from the rate beside float32's, and from whether the "
    "compiled program converts to a wider dtype first. Sizes that memory or time does not allow "
    "are halved until it does.",
    _add_arguments,
    _run,
)
