"""Measures what README, the guides and the issues claim.

    python -m tests.benchmarks --list
    python -m tests.benchmarks NAME [options]     one part; --write replaces its section of the page
    python -m tests.benchmarks all --short        all parts, and all sections

The page is `tests/benchmarks/results.md`. Run it from the root of the repository, on a machine that
does nothing else.
"""

import argparse
import importlib
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from . import page
from .page import Table


class Part(NamedTuple):
    """One benchmark; it is the module's `PART`.

    Attributes:
        explanation: what is measured, for the page: the module's docstring.
        tables: measures, by the options.
        add_options: adds the options that it has beside the common ones.
        rounds: of measurement, and with `--short`.
    """

    explanation: str | None
    tables: Callable[[argparse.Namespace], Iterable[Table]]
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    rounds: tuple[int, int] = (7, 3)


# Modules by name, with the titles of their sections, in the order of the page.
TITLES = {
    "clipped_gradients": "Clipped gradients",
    "clients": "Models that others wrote",
    "sizes": "Large models",
    "step": "Whole private steps",
    "training": "A trainer beside a bare loop",
    "noise": "Noise",
    "mechanisms": "Other mechanisms",
    "accounting": "Epsilon, and bounds from below",
    "tracing": "Tracing and compiling",
    "sharding": "A loss that constrains shardings",
    "fully_sharded": "Parameters spread over devices",
    "large_gpt": "GPTs of 300M and 1B parameters",
    "compiled": "Programs of GPUs and TPUs",
    "checks": "The check of privacy, attacked",
    "losses": "The clip norm, attacked",
    "recorded": "Calls into noise, recorded and replayed",
    "audit": "Runs with canaries, attacked",
    "attacks": "An image from a gradient, members from a model",
    "mutants": "Mutants of the code, and the tests",
}
# These need virtual devices.
_DEVICES = {"sharding": 8, "fully_sharded": 8}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one part, or all."""
    given = sys.argv[1:] if argv is None else list(argv)
    head, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description=head + rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="python -m tests.benchmarks NAME --help shows the options of a part",
    )
    parser.add_argument("name", choices=("all", *TITLES), nargs="?", help="what is measured")
    parser.add_argument("--list", action="store_true", help="list what can be measured")
    options = parser.parse_args(given[:1])
    if options.name is None:
        print("\n".join(f"{name:18} {title}" for name, title in TITLES.items()))
    elif options.name == "all":
        _all(given[1:])
    else:
        _one(options.name, given[1:])


def _all(argv: Sequence[str]) -> None:
    """Each part in a process of its own, which begins with cold caches."""
    parser = _parser("all", "Measures all parts, and writes all sections of the page.")
    options = parser.parse_args(argv)
    failed: list[str] = []
    for name in TITLES:
        print(f"\n== {name}", flush=True)
        command = [sys.executable, "-m", "tests.benchmarks", name, "--write", *argv]
        if subprocess.run(command, check=False, cwd=Path(__file__).parents[2]).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"these parts failed, and their sections stay as they were: {', '.join(failed)}")
    print(f"\nwritten: {options.page}")


def _one(name: str, argv: Sequence[str]) -> None:
    """One part: its tables in the terminal, and with `--write` on the page."""
    if name in _DEVICES and _DEVICES[name] > jax.config.jax_num_cpu_devices:
        jax.config.update("jax_num_cpu_devices", _DEVICES[name])
    part: Part = importlib.import_module(f"{__package__}.{name}").PART
    parser = _parser(name, part.explanation or "")
    part.add_options(parser)
    options = parser.parse_args(argv)
    options.rounds = options.rounds or part.rounds[options.short]
    print(page.setting(), flush=True)
    tables: list[Table] = []
    for table in part.tables(options):
        tables.append(table)
        print(f"\n{table}", flush=True)
    if options.write:
        shown = [x for x in argv if x != "--write"]
        command = shlex.join(["python", "-m", "tests.benchmarks", name, *shown])
        measured = f"Measured by `{command}` on {page.setting()}."
        body = "\n\n".join(
            ((part.explanation or "").strip(), measured, *(table.markdown() for table in tables))
        )
        page.write_section(options.page, TITLES[name], body, list(TITLES.values()))


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.benchmarks {name}", description=description
    )
    parser.add_argument("--short", action="store_true", help="fewer rounds, rows and sizes")
    parser.add_argument("--rounds", type=_positive, help="rounds of measurement")
    parser.add_argument("--tiny", action="store_true", help="tiny models: to see that it works")
    parser.add_argument("--write", action="store_true", help="replace its section of the page")
    parser.add_argument("--page", type=Path, default=page.PAGE, help="the page")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, found {text!r}")
    return int(text)
