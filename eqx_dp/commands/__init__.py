"""The commands of `eqx-dp`, one file each."""

from . import epsilon, policies, report

COMMANDS = {"policies": policies, "epsilon": epsilon, "report": report}
"""Modules by name: the first line of a docstring is the help; `add_arguments(parser)`; `run(...)`.

`run` takes the parsed arguments, returns what is printed, and raises a ValueError or OSError for
what it refuses.
"""

__all__ = ["COMMANDS"]
