"""The command line: `eqx-dp COMMAND`, or `python -m eqx_dp COMMAND`."""

import argparse
import sys
from collections.abc import Sequence

from .commands import COMMANDS
from .extras import MissingExtra


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; without arguments, with those that the program was started with.

    Returns:
        The exit status: 0; 1 if an extra is not installed; 2 if something was refused, which is
        then told on standard error.
    """
    parsed = _parser().parse_args(arguments)
    if parsed.note:
        print(f"eqx-dp: {parsed.note}", file=sys.stderr)
    try:
        parsed.run(parsed)
    except MissingExtra as error:
        print(f"eqx-dp: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"eqx-dp: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eqx-dp", description="What precision and privacy cost on the machine at hand."
    )
    groups = {"": parser.add_subparsers(required=True, metavar="COMMAND")}
    for command in COMMANDS:
        *around, name = command.name.split()
        group = " ".join(around)
        if group not in groups:
            inner = groups[""].add_parser(group, help="measure on the machine at hand")
            groups[group] = inner.add_subparsers(required=True, metavar="COMMAND")
        sub = groups[group].add_parser(name, help=command.help, description=command.description)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run, note="")
        if command.former:  # not listed
            sub = groups[group].add_parser(command.former, description=command.description)
            command.add_arguments(sub)
            note = f"`{command.former}` is called `{name}` now; the old name still works"
            sub.set_defaults(run=command.run, note=note)
    return parser


if __name__ == "__main__":
    sys.exit(main())
