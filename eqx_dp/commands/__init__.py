"""The commands of `eqx-dp`, one file each.

To add one: write its file, and name it in `COMMANDS`.
"""

from . import bench_dtypes, bench_policies, epsilon, report, show_policies
from .command import Command

COMMANDS: tuple[Command, ...] = (
    show_policies.COMMAND,
    bench_dtypes.COMMAND,
    bench_policies.COMMAND,
    epsilon.COMMAND,
    report.COMMAND,
)

__all__ = ["COMMANDS", "Command"]
