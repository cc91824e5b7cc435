"""Clipped gradients of models that others wrote, against jax_privacy and optax.

As the section before; the models are those of Equinox' documentation, written anew, and of flowjax,
diffrax and haliax. Aim: `auto` is never slower than jax_privacy.
"""

import argparse
from collections.abc import Iterator

from .client_rows import CLIENTS, MISSING
from .clipped_gradients import lines_of
from .command import Part
from .page import Table
from .rows import tiny


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which rows."""
    parser.add_argument("--rows", nargs="+", choices=CLIENTS, help="which models")


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """One table, a line a model."""
    rows = [
        CLIENTS[name](**(tiny(CLIENTS[name]) if options.tiny else {}))
        for name in options.rows or CLIENTS
    ]
    lines, notes = lines_of(rows, options, with_opacus=False)
    lines = [{k: cell for k, cell in line.items() if "Opacus" not in k} for line in lines]
    notes += [f"{name} is left out: {reason}" for name, reason in MISSING.items()]
    yield Table("Models of others", lines, "\n".join(notes))


PART = Part(__doc__, tables, add_options, rounds=(7, 5))
