"""What a command of the command line is, and what several of them need."""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax


class Command(NamedTuple):
    """One command.

    Attributes:
        name: what is typed; two words for a member of a group.
        help: a line on it.
        description: more, on its own help page.
        add_arguments: declares its arguments.
        run: does it. It raises ValueError for what it refuses.
        former: the name that it had before, which still works, with a note; none if empty.
    """

    name: str
    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]
    former: str = ""


def positive(text: str) -> int:
    """A whole number of at least 1, as an argument's type."""
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a whole number of at least 1")
    return value


def x64(name: str) -> AbstractContextManager[Any]:
    """The context in which the dtype, or the preset, of that name can be run."""
    return jax.enable_x64(True) if name == "float64" else nullcontext()
