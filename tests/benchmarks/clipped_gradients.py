"""Clipped gradients of one batch: ours, and those of peers, on the same models and batches.

float32, clip norm 1. Each contender runs at the microbatch size that is fastest for it; `auto`
and `ghost` choose their own. All take turns in one process. A time is that
of the fastest turn, and a ratio that of two such times, with the quartiles of the ratios round by
round in parentheses. Memory is the temporary memory of the compiled program.
"""

import argparse
from collections.abc import Iterator, Sequence

import eqx_dp as dp

from .command import Part
from .contenders import (
    AUTO,
    CLIP_NORM,
    GHOST,
    IN_PARTS,
    JAX_PRIVACY,
    NON_PRIVATE,
    OPACUS,
    OPTAX,
    few,
    in_jax,
    in_torch,
    powers_of_two,
)
from .page import Table
from .rows import ROWS, Row, tiny
from .timing import Result, compared, measure

# Left out to save time.
_LONG = ("gpt_lora", "gpt_stacked")


def line(row: Row, found: dict[str, Result]) -> dict[str, str]:
    """A row of the table; `-` where one of the two does not run."""
    plain = fastest(found, (NON_PRIVATE, IN_PARTS))
    opacus = fastest(found, [name for name in found if name.startswith(OPACUS)])
    auto, whole, ghost = (found.get(name) for name in (AUTO, NON_PRIVATE, GHOST))
    return {
        "model": row.title,
        "auto, ms": "-" if auto is None else f"{1e3 * auto.best:.1f}",
        "its choice": choice(row),
        "auto / non-private, whole batch": times(auto, whole),
        "auto / non-private at its fastest": times(auto, plain),
        "jax_privacy / auto": times(found.get(JAX_PRIVACY), auto),
        "optax / auto": times(found.get(OPTAX), auto),
        "Opacus / auto": times(opacus, auto),
        "ghost / non-private, whole batch": times(ghost, whole),
        "memory: auto / non-private": memory(auto, whole),
        "memory: ghost / non-private": memory(ghost, whole),
    }


def fastest(found: dict[str, Result], names: Sequence[str]) -> Result | None:
    """The fastest of some contenders, of those that run."""
    running = [found[name] for name in names if name in found]
    return min(running, key=lambda result: result.best, default=None)


def times(result: Result | None, reference: Result | None) -> str:
    """The ratio of two times."""
    if result is None or reference is None:
        return "-"
    return compared(result.seconds, reference.seconds)


def memory(result: Result | None, reference: Result | None) -> str:
    """The ratio of temporary memory."""
    sizes = [one and one.program.temp_bytes for one in (result, reference)]
    return f"{sizes[0] / sizes[1]:.2f}" if sizes[0] is not None and sizes[1] else "-"


def choice(row: Row) -> str:
    """Method and microbatch size of `auto`."""
    options = {"l2_clip_norm": CLIP_NORM, "filter_spec": row.filter_spec}
    auto = dp.explain(dp.filter_clipped_grad(row.loss, **options), row.model, *row.batch)
    return f"{auto.method}, {auto.microbatch_size or 'whole'}"


def lines_of(
    rows: Sequence[Row], options: argparse.Namespace, with_opacus: bool
) -> tuple[list[dict[str, str]], list[str]]:
    """A line a row, and notes of who cannot take a row."""
    lines, notes = list[dict[str, str]](), list[str]()
    for row in rows:
        sizes, refused = few(row) if options.short else powers_of_two(row), dict[str, str]()
        contenders = in_jax(row, sizes) + (in_torch(row, sizes) if with_opacus else [])
        lines.append(line(row, measure(contenders, options.rounds, refused=refused)))
        print("  ".join(lines[-1].values()), flush=True)
        notes += [f"{row.title}: {name} does not run ({why})." for name, why in refused.items()]
    return lines, notes


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which rows."""
    parser.add_argument("--rows", nargs="+", choices=ROWS, help="which models")


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """One table, a line a model."""
    names = options.rows or [name for name in ROWS if not (options.short and name in _LONG)]
    rows = [ROWS[name](**(tiny(ROWS[name]) if options.tiny else {})) for name in names]
    lines, notes = lines_of(rows, options, with_opacus=True)
    yield Table("MLP, CNN, GPT", lines, "\n".join(notes))


PART = Part(__doc__, tables, add_options)
