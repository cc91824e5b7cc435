"""What a terminal is told while programs are compiled and run."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from ..extras import extra


@contextmanager
def told_on_terminal(what: str, is_wanted: bool) -> Generator[Callable[[str], None]]:
    """What tells a terminal what is being done; elsewhere, and unasked, nothing is told."""
    if not is_wanted:
        yield lambda said: None
        return
    with extra("rich.console").Console().status(what) as status:
        yield lambda said: status.update(f"{what}: {said}")
