"""What a command is at while it works, on standard error: what it found goes to standard output."""

import importlib.util
import itertools
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from ..extras import extra


@contextmanager
def working(total: int) -> Generator[Callable[[str], None]]:
    """A context that gives what is to be called at the beginning of each of so many parts.

    On a terminal a bar shows the part and the time, and goes when the work is done. Elsewhere, and
    without rich, each part is a line.
    """
    begun = itertools.count()
    has_rich = importlib.util.find_spec("rich") is not None
    console = extra("rich.console").Console(stderr=True) if has_rich else None
    if console is None or not console.is_terminal:

        def say(part: str) -> None:
            print(f"eqx-dp: {next(begun) + 1}/{total} {part}", file=sys.stderr, flush=True)

        yield say
        return
    rich = extra("rich.progress")
    columns = (
        rich.SpinnerColumn(),
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
    )
    with rich.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda part: bar.update(task, description=part, completed=next(begun))
