"""What a device does in one run of a compiled program: loops count by their iterations."""

import collections
import math
import re
from typing import NamedTuple

from tests.sharding.compiled import COLLECTIVE

_HEADER = re.compile(r"(?:ENTRY )?%?(\S+) \(.*\) -> .* \{$")
_EQUATION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)\("
)
_CALLED = re.compile(
    r"(body|condition|to_apply|calls|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\]")
_BITS = {"pred": 8, "bf16": 16}


class Sent(NamedTuple):
    """The collectives of one kind.

    Attributes:
        times: how often a device takes part in one.
        size: bytes of the whole arrays: of what is gathered, of what is summed.
    """

    times: float
    size: float


class Counted(NamedTuple):
    """What a device does in one run.

    Attributes:
        flops: of all contractions, a multiplication and an addition being two.
        sent: by the name of the collective.
    """

    flops: float
    sent: dict[str, Sent]


def counted(text: str, unknown: int = 1, taken: float = 1, narrow: tuple[str, ...] = ()) -> Counted:
    """Reads a compiled program's text.

    Args:
        text: the program.
        unknown: iterations of a loop of which the compiler does not know how many it has.
        taken: how often each branch of a conditional is taken where it is met. 1 where one of them
            does all the work, always; 1/2 in `ghost`, whose two passes take one each.
        narrow: collectives which the program itself asks for in 16 bits. The CPU's compiler has no
            arithmetic in bfloat16 and widens them; they count as they were asked for.
    """
    computations, entry = _computations(text)
    called_by = collections.defaultdict[str, list[tuple[str, float]]](list)
    for name, lines in computations.items():
        for line in lines:
            for callee, times in _calls(line, unknown, taken):
                called_by[callee].append((name, times))
    runs: dict[str, float] = {entry: 1.0}

    def runs_of(name: str) -> float:
        if name not in runs:
            runs[name] = sum(runs_of(caller) * times for caller, times in called_by[name])
        return runs[name]

    flops, sent = 0.0, collections.defaultdict[str, Sent](lambda: Sent(0, 0))
    for name, lines in computations.items():
        types = {m["name"]: m["type"] for line in lines if (m := _EQUATION.match(line))}
        for line in lines:
            if " dot(" in line:
                flops += runs_of(name) * _contraction(line, types)
            if match := COLLECTIVE.search(line):
                kind, its = match["name"], sent[match["name"]]
                # What is reduced is as large as the operand, what is gathered as the result.
                of = match["type"] if kind == "all-gather" else _operands(line, types)
                is_narrow = kind in narrow and kind.replace("-", "_") in line.partition("=")[0]
                size = _bytes(of.replace("f32[", "bf16[") if is_narrow else of)
                times = runs_of(name)
                sent[kind] = Sent(its.times + times, its.size + times * size)
    return Counted(flops, dict(sent))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    found, lines, entry = dict[str, list[str]](), list[str](), ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            lines = found[header[1]] = []
            entry = header[1] if line.startswith("ENTRY") else entry
        else:
            lines.append(line)
    return found, entry


def _calls(line: str, unknown: int, taken: float) -> list[tuple[str, float]]:
    """Which computations an equation runs, and how often."""
    trips = _TRIPS.search(line)
    of_loop = int(trips[1]) if trips else unknown
    found: list[tuple[str, float]] = []
    for attribute, names in _CALLED.findall(line):
        is_loop, is_call = attribute in ("body", "condition"), attribute in ("to_apply", "calls")
        times = of_loop if is_loop else 1 if is_call else taken
        found += [(name, times) for name in re.findall(r"[\w.\-]+", names)]
    return found


def _operands(line: str, types: dict[str, str]) -> str:
    """The types of an equation's operands."""
    equation = _EQUATION.match(line)
    assert equation is not None
    names = re.findall(r"%([\w.\-]+)", line[equation.end() :].partition(")")[0])
    return " ".join(types[name] for name in names)


def _contraction(line: str, types: dict[str, str]) -> int:
    equation = _EQUATION.match(line)
    assert equation is not None
    left = _shapes(_operands(line, types))[0][1]
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line)
    sizes = [left[int(i)] for i in contracted[1].split(",")] if contracted else []
    return 2 * math.prod(_shapes(equation["type"])[0][1]) * math.prod(sizes)


def _shapes(types: str) -> list[tuple[str, list[int]]]:
    return [(kind, [int(n) for n in dims.split(",") if n]) for kind, dims in _ARRAY.findall(types)]


def _bytes(types: str) -> float:
    return sum(
        math.prod(shape) * (_BITS.get(kind) or int(re.findall(r"\d+", kind)[0])) / 8
        for kind, shape in _shapes(types)
    )
