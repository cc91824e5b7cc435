"""`eqx-dp policies`: the presets, or one policy in full."""

import argparse
from typing import Any

import jax

from ..precision import Policy, available_policies, load_policy
from .command import Command
from .output import Table, check_output, show

_STAGES = ("params", "compute", "output", "accumulate", "noise")


def dtypes_of(policy: Policy) -> dict[str, str]:
    """A policy's five dtypes by stage."""
    found = (
        policy.param_dtype,
        policy.compute_dtype,
        policy.output_dtype,
        policy.accumulate_dtype,
        policy.noise_dtype,
    )
    return {stage: str(dtype) for stage, dtype in zip(_STAGES, found, strict=True)}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a preset, or a file that ends in .toml"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


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
    rows = [(str(policy.name), *dtypes_of(policy).values()) for policy in policies]
    notes = [f"{policy.name}: {policy.description}" for policy in policies]
    data = {"policies": [_data(policy) for policy in policies]}
    return Table("Presets", ("policy", *_STAGES), rows, notes, data, [])


def _in_full(policy: Policy) -> Table:
    rows = [*dtypes_of(policy).items()]
    rows += [
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
        "dtypes": dtypes_of(policy),
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
