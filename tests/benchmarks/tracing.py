"""How long tracing, lowering and compiling take, against jax_privacy.

The gradient of one batch is traced and lowered (and compiled, without `--short`) from cold caches,
the whole batch at once. The model is a GPT whose blocks are unrolled, or stacked and gone over by a
scan. It is small: what takes the time is how many equations there are, not how large they are. All
take turns in one process; the fastest turn counts, with the quartiles of the ratios round by round
in parentheses. Aims for 24 unrolled blocks: trace and lower at most 2 x jax_privacy's by
`book_keeping`, 3 x by `ghost`.
"""

import argparse
import functools
import gc
import itertools
import time
from collections.abc import Iterator

import jax

from .command import Part
from .contenders import BOOK_KEEPING, GHOST, GRADIENTS, JAX_PRIVACY, NON_PRIVATE, Gradient
from .page import Table
from .rows import Row, gpt, gpt_stacked, tiny
from .timing import compared, interleaved

SIZES = {"batch": 4, "length": 32, "width": 64, "vocabulary": 128}
DEPTH = 24
CONTENDERS = (NON_PRIVATE, JAX_PRIVACY, BOOK_KEEPING, GHOST)


def stages(gradient: Gradient, row: Row, with_compiling: bool) -> dict[str, float]:
    """Seconds to make a program from cold caches: nobody profits from the one before."""
    params, frozen, _ = row.split()
    jax.clear_caches()
    gc.collect()
    start = time.perf_counter()
    lowered = jax.jit(gradient).trace(params, frozen, *row.batch).lower()
    found = {"trace and lower": time.perf_counter() - start}
    if with_compiling:
        start = time.perf_counter()
        lowered.compile()
        found["compile"] = time.perf_counter() - start
    return found


def table(row: Row, rounds: int, with_compiling: bool) -> Table:
    """A line a contender. All take turns, each round in an order of its own."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}

    def turn(name: str) -> float:
        found[name].append(stages(GRADIENTS[name](row, None), row, with_compiling))
        return sum(found[name][-1].values())

    programs = {name: functools.partial(turn, name) for name in CONTENDERS}
    interleaved(programs, rounds, lambda run: run())
    lines = [{"contender": name} for name in CONTENDERS]
    for line, stage in itertools.product(lines, found[JAX_PRIVACY][0]):
        own, peer = ([x[stage] for x in found[who]] for who in (line["contender"], JAX_PRIVACY))
        line[f"{stage}, s"] = f"{min(own):.2f}"
        line[f"{stage} / jax_privacy"] = compared(own, peer)
    return Table(row.title, lines)


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """Unrolled, and stacked; with `--short` unrolled alone, and nothing is compiled."""
    for make in (gpt,) if options.short else (gpt, gpt_stacked):
        row = make(**(tiny(make) if options.tiny else {**SIZES, "depth": DEPTH}))
        yield table(row, options.rounds, not options.short)


PART = Part(__doc__, tables, rounds=(3, 3))
