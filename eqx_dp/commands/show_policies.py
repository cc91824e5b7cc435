"""`eqx-dp policies`: the presets, or one policy in full."""

import argparse
from typing import Any

import jax

from ..precision import (
    Policy,
    available_policies,
    dtypes_of,
    load_policy,
    schema_text,
)
from .check_policy import checked
from .command import Command
from .output import Table, add_output_arguments, check_output, show


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a preset, or a file that ends in .toml"
    )
    parser.add_argument(
        "--check",
        metavar="FILE",
        help="read a policy and show it; the exit status is 0 if nothing is wrong with it, else 2",
    )
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="with --check: hold the policy's rules against what the function returns, a model; "
        "nothing is allocated",
    )
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON Schema of policy files, for editors"
    )
    add_output_arguments(parser, plot=False)


def _run(arguments: argparse.Namespace) -> None:
    _check_arguments(arguments)
    if arguments.schema:
        print(schema_text(), end="")
        return
    if arguments.model is not None:
        show(_in_full(checked(arguments.check, arguments.model)), arguments)
        return
    arguments.name = arguments.check or arguments.name
    check_output(arguments)
    # A policy may be looked at without the means to run it.
    with jax.enable_x64(True):
        if arguments.name is None:
            table = _listed([load_policy(name) for name in available_policies()])
        else:
            table = _in_full(load_policy(arguments.name))
    show(table, arguments)


def _check_arguments(arguments: argparse.Namespace) -> None:
    asked = [arguments.name is not None, arguments.check is not None, arguments.schema]
    if sum(asked) > 1:
        raise ValueError("policies: found several of NAME, --check, --schema; allowed: one of them")
    if arguments.model is not None and arguments.check is None:
        raise ValueError("--model: found no --check; allowed: with --check FILE")


def _listed(policies: list[Policy]) -> Table:
    rows = [(str(policy.name), *map(str, dtypes_of(policy).values())) for policy in policies]
    notes = [f"{policy.name}: {policy.description}" for policy in policies]
    data = {"policies": [_data(policy) for policy in policies]}
    return Table("Presets", ("policy", *dtypes_of(policies[0])), rows, notes, data, [])


def _in_full(policy: Policy) -> Table:
    scale = policy.loss_scale
    rows = [
        *((stage, str(dtype)) for stage, dtype in dtypes_of(policy).items()),
        ("rounding of params", policy.rounding),
        ("loss scale", scale.kind + (f" {scale.value:g}" if scale.kind == "static" else "")),
        ("matmul precision", policy.matmul_precision),
        ("matmul", str(policy.matmul or "in the compute dtype")),
        *((f"module {rule.match}", str(rule)) for rule in policy.modules),
        *([("narrow optimizer", "yes: moments may not move")] if policy.narrow_optimizer else []),
        ("unsafe", "yes: sums or noise may be too narrow" if policy.unsafe else "no"),
    ]
    notes = [f"as text: {policy}"]
    title = ": ".join(filter(None, (policy.name, policy.description)))
    return Table(title, ("stage", "dtype"), rows, notes, _data(policy), [])


def _data(policy: Policy) -> dict[str, Any]:
    return {
        "name": policy.name,
        "description": policy.description,
        "dtypes": {stage: str(dtype) for stage, dtype in dtypes_of(policy).items()},
        "rounding": policy.rounding,
        "loss_scale": {"kind": policy.loss_scale.kind, "value": policy.loss_scale.value},
        "matmul_precision": policy.matmul_precision,
        "matmul": None if policy.matmul is None else str(policy.matmul),
        "modules": {rule.match: str(rule) for rule in policy.modules},
        "unsafe": policy.unsafe,
        "narrow_optimizer": policy.narrow_optimizer,
        "text": str(policy),
    }


COMMAND = Command(
    "policies",
    "list the precision presets, show or check one policy",
    "Lists the presets with the dtype of every stage, shows one policy in full, or checks a file, "
    "also against a model.",
    _add_arguments,
    _run,
)
