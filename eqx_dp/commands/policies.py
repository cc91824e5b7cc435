"""Lists the policies that come with the package, shows one in full, or checks a file."""

import argparse

import jax

from ..precision import available_policies, dtypes_of, load_policy, schema_text
from ..tables import aligned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("name", nargs="?", metavar="NAME", help="a preset, or a file (.toml)")
    what.add_argument(
        "--check",
        metavar="FILE",
        help="show it; the exit status is 2 if something is wrong with it",
    )
    what.add_argument("--schema", action="store_true", help="print the JSON Schema of policy files")


def run(arguments: argparse.Namespace) -> str:
    """The presets, a policy, or the schema.

    Raises:
        ValueError: a policy cannot be read.
    """
    if arguments.schema:
        return schema_text().rstrip("\n")
    name = arguments.check or arguments.name
    with jax.enable_x64(True):  # a policy may be looked at without the means to run it
        if name is not None:
            policy = load_policy(name)
            title = ": ".join(filter(None, (policy.name, policy.description)))
            dtypes = aligned([(stage, str(x)) for stage, x in dtypes_of(policy).items()])
            return "\n".join((title, *dtypes, f"in full: {policy}"))
        policies = [load_policy(one) for one in available_policies()]
    rows = [(str(policy.name), *map(str, dtypes_of(policy).values())) for policy in policies]
    notes = (f"{policy.name}: {policy.description}" for policy in policies)
    return "\n".join((*aligned([("policy", *dtypes_of(policies[0])), *rows]), "", *notes))
