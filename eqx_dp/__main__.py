"""The command line: `eqx-dp COMMAND`, or `python -m eqx_dp COMMAND`."""

import argparse
import os
import sys
from collections.abc import Sequence

from .commands import COMMANDS
from .extras import MissingExtra


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; without arguments, with those that the program was started with.

    Returns:
        The exit status: 0; 1 if an extra is not installed; 2 if something was refused, which
        standard error says.
    """
    parser = argparse.ArgumentParser(
        prog="eqx-dp", description="Precision and privacy of a training run."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        about = command.__doc__ or ""
        sub = commands.add_parser(name, help=about.partition("\n")[0], description=about)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    parsed = parser.parse_args(arguments)
    try:
        print(parsed.run(parsed), flush=True)
    except BrokenPipeError:  # the reader has what it wants, as `head`; Python flushes once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (MissingExtra, OSError, ValueError) as error:
        print(f"eqx-dp: {error}", file=sys.stderr)
        return 1 if isinstance(error, MissingExtra) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
