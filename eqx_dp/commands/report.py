"""`eqx-dp report`: one page and one JSON file on the privacy of a run."""

import argparse
import json
from pathlib import Path

from ..report import FORMAT, description_of, page_of
from .command import Command

_PAGE = "report.html"
_BEGINNING = 2000


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="RUN", type=Path, help="the directory of a run")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help=f"the page, with JSON of the same name beside it (default: RUN/{_PAGE})",
    )


def _run(arguments: argparse.Namespace) -> None:
    page: Path = arguments.output or arguments.directory / _PAGE
    data = page.with_suffix(".json")
    if arguments.output is not None:
        _check_output(page)
    description = description_of(arguments.directory)
    _check_own(page)
    _check_own(data)
    _write(data, json.dumps(description, indent=2, allow_nan=False))
    _write(page, page_of(description))
    print(f"{page}\n{data}")


def _check_output(page: Path) -> None:
    if page.suffix != ".html":
        raise ValueError(f"--output: found the ending {page.suffix!r}; allowed: '.html'")
    if not page.parent.is_dir():
        raise ValueError(
            f"--output: found no folder {str(page.parent)!r}; allowed: one that exists"
        )


def _check_own(file: Path) -> None:
    """Refuses to write over what is no report, such as the record of the run."""
    try:
        with file.open("rb") as stream:
            is_own = FORMAT.encode() in stream.read(_BEGINNING)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ValueError(
            f"{file} cannot be replaced: {error.strerror}. Name another, by --output."
        ) from None
    if not is_own or file.is_symlink():
        raise ValueError(f"{file} is there, and is no report. Name another file, by --output.")


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(f"{text}\n", "utf-8")
    except OSError as error:
        raise ValueError(
            f"{file} cannot be written: {error.strerror}. Name another file, by --output."
        ) from None


COMMAND = Command(
    "report",
    "a page on the privacy of a run",
    "Makes one HTML page and one JSON file from the directory of a run, for readers who need not "
    "know differential privacy: what is protected, epsilon over the steps, what an attack can find "
    "out at most, what the checks said of the step, the audit if there was one, metrics, versions. "
    "The page needs no network. Nothing else in the directory is changed.",
    _add_arguments,
    _run,
)
