"""`eqx-dp policies`: the presets, or one policy in full."""

import argparse
from typing import Any

import jax

from ..precision import Policy, available_policies, dtypes_of, load_policy
from .command import Command
from .output import Table, add_output_arguments, check_output, show


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a preset, or a file that ends in .toml"
    )
    add_output_arguments(parser, plot=False)


def _run(arguments: argparse.Namespace) -> None:
    check_output(arguments)
    # A policy may be looked at without the means to run it.
    with jax.enable_x64(True):
        if arguments.name is None:
            table = _listed([load_policy(name) for name in available_policies()])
        else:
            table = _in_full(load_policy(arguments.name))
    show(table, arguments)


def _listed(policies: list[Policy]) -> Table:
    rows = [(str(policy.name), *map(str, dtypes_of(policy).values())) for policy in policies]
    notes = [f"{policy.name}: {policy.description}" for policy in policies]
    data = {"policies": [_data(policy) for policy in policies]}
    return Table("Presets", ("policy", *dtypes_of(policies[0])), rows, notes, data, [])


def _in_full(policy: Policy) -> Table:
    rows = [
        *((stage, str(dtype)) for stage, dtype in dtypes_of(policy).items()),
        ("loss scale", _told_loss_scale(policy)),
        ("matmul precision", policy.matmul_precision),
        *((f"module {rule.match}", str(rule.compute_dtype)) for rule in policy.modules),
        ("unsafe", "yes: sums or noise may be too narrow" if policy.unsafe else "no"),
    ]
    notes = [f"as text: {policy}"]
    title = ": ".join(filter(None, (policy.name, policy.description)))
    return Table(title, ("stage", "dtype"), rows, notes, _data(policy), [])


def _told_loss_scale(policy: Policy) -> str:
    scale = policy.loss_scale
    return f"{scale.kind} {scale.value:g}" if scale.kind == "static" else scale.kind


def _data(policy: Policy) -> dict[str, Any]:
    return {
        "name": policy.name,
        "description": policy.description,
        "dtypes": {stage: str(dtype) for stage, dtype in dtypes_of(policy).items()},
        "loss_scale": {"kind": policy.loss_scale.kind, "value": policy.loss_scale.value},
        "matmul_precision": policy.matmul_precision,
        "modules": [
            {"match": rule.match, "compute": str(rule.compute_dtype)} for rule in policy.modules
        ],
        "unsafe": policy.unsafe,
        "text": str(policy),
    }


COMMAND = Command(
    "policies",
    "list the precision presets, or show one policy in full",
    "Lists the presets with the dtype of every stage, or shows one policy in full.",
    _add_arguments,
    _run,
)
