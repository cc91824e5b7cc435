"""Makes one HTML page on the privacy of a run, for readers new to differential privacy.

It says what is protected, epsilon over the steps, what an attack can find out at most, what the
checks said of the step, the audit if there was one, metrics, versions. The page needs no network.
Nothing else in the directory is changed.
"""

import argparse
from pathlib import Path

from ..report import MARK, page_of

_PAGE = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("directory", metavar="RUN", type=Path, help="the directory of a run")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help=f"the page (default: RUN/{_PAGE})"
    )


def run(arguments: argparse.Namespace) -> str:
    """Writes the page.

    Returns:
        Its path.

    Raises:
        ValueError: there is no run; the file is there and is no report.
        OSError: the file cannot be written.
    """
    page: Path = arguments.output or arguments.directory / _PAGE
    content = page_of(arguments.directory)
    if page.is_symlink() or (page.exists() and MARK not in page.read_text("utf-8", "replace")):
        raise ValueError(f"{page} is there, and is no report. Name another file, by --output.")
    page.write_text(content, "utf-8")
    return str(page)
