"""What a compiled program costs a device, and what its devices tell each other."""

import re
from typing import Any, NamedTuple

import equinox as eqx

COLLECTIVE = re.compile(
    r"= (?P<type>\S+|\(.*?\)) (?P<name>all-reduce|all-gather|all-to-all|reduce-scatter|"
    r"collective-permute|collective-broadcast)(?:-start)?\("
)


class Collective(NamedTuple):
    """A collective of a compiled program: its name, the type of its result, the loop it is in."""

    name: str
    type: str
    computation: str
    in_loop: bool


class Compiled(NamedTuple):
    """What one device does, and the program itself, to be called."""

    program: Any
    flops: float
    temporary_bytes: int
    collectives: list[Collective]


def compiled(function, *args):
    """Compiles `function` for its arguments as they are spread."""
    program = eqx.filter_jit(function).lower(*args).compile()
    return Compiled(
        program,
        program.compiled.cost_analysis()["flops"],
        program.compiled.memory_analysis().temp_size_in_bytes,
        collectives(program.compiled.as_text()),
    )


def collectives(text):
    """Reads the collectives out of a program's text, with the computation that each is in."""
    found, computation, called_by = [], "", {}
    for line in text.splitlines():
        header = re.match(r"(?:ENTRY )?%?(\S+) \(.*\) -> .* \{$", line)
        if header:
            computation = header.group(1)
        for attribute, names in re.findall(
            r"(body|condition|to_apply|calls|branch_computations|true_computation|"
            r"false_computation)=(\{[^}]*\}|%?[\w.\-]+)",
            line,
        ):
            for name in re.findall(r"[\w.\-]+", names):
                called_by.setdefault(name, []).append((computation, attribute))
        match = COLLECTIVE.search(line)
        if match:
            found.append((match.group("name"), match.group("type"), computation))

    def in_loop(name):
        return any(
            attribute in ("body", "condition") or in_loop(caller)
            for caller, attribute in called_by.get(name, [])
        )

    return [Collective(name, type_, where, in_loop(where)) for name, type_, where in found]
