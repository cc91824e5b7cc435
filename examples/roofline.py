"""What a compiled program does on a device, read from its text, and how long that takes at best."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from chips import Chip

_SHAPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\](\{[^}]*\})?")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
_CALLED = re.compile(r"(?:calls|body|to_apply|branch_computations)=\{?((?:%[\w.-]+(?:, )?)+)")
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"}
_SLICES = {"slice", "dynamic-slice", "gather", "dynamic-update-slice"}
_LINKS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


class Costs(NamedTuple):
    """Of one run on one device.

    Attributes:
        flops: of contractions and convolutions, by the bits of their operands.
        moved: bytes of the large memory that kernels read and write.
        linked: bytes that come from other devices; for a sum of which all get all, twice its size.
        kernels: how many start.
        waits: conditionals, and turns of loops of unknown length: a GPU's host waits for a flag.
        callbacks: to the host.
    """

    flops: Counter[int]
    moved: float
    linked: float
    kernels: float
    waits: float
    callbacks: float

    @property
    def narrow_share(self) -> float:
        """The share of products in 16 or 8 bits, by FLOPs."""
        narrow = sum(n for bits, n in self.flops.items() if bits <= 16)
        return narrow / max(self.flops.total(), 1)

    def seconds(self, chip: Chip) -> dict[str, float]:
        """By the data sheet: modelled, not measured. Products overlap memory; nothing else does."""
        peaks = {8: chip.flops_8, 16: chip.flops_16}
        products = sum(n / peaks.get(bits, chip.flops_32) for bits, n in self.flops.items())
        return {
            "products or memory": max(products, self.moved / chip.bandwidth),
            "between devices": self.linked / chip.links,
            "starts and waits": self.kernels * chip.start
            + (self.waits + self.callbacks) * chip.wait,
        }


class _Instruction(NamedTuple):
    name: str
    result: str
    operation: str
    rest: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.-]+)", self.rest.partition(")")[0])


def costs_of(text: str, turns: int = 1) -> Costs:
    """Reads the optimized program of a GPU or a TPU, `compiled.as_text()`.

    Args:
        text: the program.
        turns: of each loop of unknown length.
    """
    blocks: dict[str, list[_Instruction]] = {}
    name = entry = ""
    for line in text.splitlines():
        if head := re.match(r"^(ENTRY )?%(\S+) \(.*\{$", line):
            name = head[2]
            entry = name if head[1] else entry
        elif found := _INSTRUCTION.match(line):
            blocks.setdefault(name, []).append(_Instruction(*found.groups()))
    shapes = {each.name: each.result for block in blocks.values() for each in block}
    flops, sums = Counter[int](), dict.fromkeys(Costs._fields, 0.0)

    def visit(name: str, times: int, is_kernel: bool, links: bool) -> None:
        for each in blocks.get(name, ()):
            operation, inputs = each.operation, [shapes.get(x, "") for x in each.operands]
            flops.update({bits: times * n for bits, n in _flops(each, inputs)})
            trips = _trips(each, blocks) if operation == "while" else 1
            length, is_unknown = trips or turns, trips is None
            sums["waits"] += times * (operation == "conditional" or length * is_unknown)
            sums["callbacks"] += times * ("callback" in each.rest.partition("metadata=")[0])
            called = re.findall(r"%([\w.-]+)", " ".join(_CALLED.findall(each.rest)))
            if not is_kernel and operation not in _FREE and not operation.endswith("-done"):
                inside = blocks.get(called[0], []) if operation == "fusion" and called else [each]
                sums["moved"] += times * _moved(each, inside, shapes)
                sums["kernels"] += times
            if links and operation.startswith(_LINKS) and not operation.endswith("-done"):
                is_whole = operation.startswith("all-reduce") and "all-reduce-scatter" not in name
                sums["linked"] += times * _linked(each, inputs) * (2 if is_whole else 1)
            # A TPU's compiler writes a collective again where it is waited for, and in what runs
            # beside it.
            is_first = not re.search(
                "async.collective.(done|fusion)", " ".join([each.name, *called])
            )
            is_inside = is_kernel or operation not in ("while", "conditional", "call")
            for its in called:
                visit(its, times * length, is_inside, links and is_first)

    visit(entry, 1, False, True)
    return Costs(flops, *(sums[name] for name in Costs._fields[1:]))


def _trips(loop: _Instruction, blocks: dict[str, list[_Instruction]]) -> int | None:
    """The turns of a loop, as a GPU's compiler says, or by its condition; None if data says."""
    if told := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(told[1])
    named = re.search(r"condition=%([\w.-]+)", loop.rest)
    condition = {each.name: each for each in blocks.get(named[1], [])} if named else {}
    for each in condition.values():
        if each.operation == "compare" and "direction=LT" in each.rest:
            limit = condition.get(each.operands[1])
            if limit is not None and limit.operation == "constant":
                return int(limit.rest.partition(")")[0])
    return None


def _sizes(shape: str) -> Iterator[tuple[int, list[int]]]:
    """The bits and the lengths of an array, or of each in a tuple."""
    for dtype, lengths, _ in _SHAPE.findall(shape):
        digits = re.search(r"\d+", dtype)
        yield int(digits[0]) if digits else 8, [int(n) for n in lengths.split(",") if n]


def _bytes(shape: str) -> float:
    return sum(bits / 8 * math.prod(lengths) for bits, lengths in _sizes(shape))


def _outside(shape: str) -> float:
    """Bytes in the large memory: a TPU has arrays in spaces of its own, S(1) and others."""
    return _bytes(_SHAPE.sub(lambda x: "" if "S(" in (x[3] or "") else x[0], shape))


def _linked(collective: _Instruction, inputs: list[str]) -> float:
    """Bytes of what is collected, whichever side of the equation has it whole."""
    given, result = sum(map(_bytes, inputs)), _bytes(collective.result)
    has_both = collective.operation.endswith("-start") and result > given
    return max(given, result - given if has_both else result)


def _moved(kernel: _Instruction, inside: list[_Instruction], shapes: dict[str, str]) -> float:
    """Bytes that a kernel reads and writes: of arrays that it only cuts slices from, the slices.

    An array that is both operands, as of a Gram product, is read once.
    """
    moved = _outside(kernel.result)
    if kernel.operation == "copy-start":  # the result has both sides
        return moved
    for i, operand in enumerate(kernel.operands):
        if operand in kernel.operands[:i]:
            continue
        own = {x.name for x in inside if x.operation == "parameter" and x.rest.startswith(f"{i})")}
        own |= {operand} if inside == [kernel] else set()
        for x in inside:  # in the order in which they are computed
            if x.operation == "bitcast" and own.intersection(x.operands):
                own.add(x.name)
        users = [x for x in inside if x.name not in own and own.intersection(x.operands)]
        whole = _outside(shapes.get(operand, ""))
        if not users or any(x.operation not in _SLICES for x in users):
            moved += whole
        elif any(x.operation == "dynamic-update-slice" for x in users):  # in place
            moved -= whole
            moved += sum(2 * _bytes(shapes.get(x.operands[1], "")) for x in users)
        else:
            moved += sum(_bytes(x.result) for x in users)
    return moved


def _flops(each: _Instruction, inputs: list[str]) -> Iterator[tuple[int, float]]:
    """Bits and FLOPs of a contraction or a convolution."""
    is_convolution = each.operation == "convolution" or "__cudnn$conv" in each.rest
    if not is_convolution and each.operation != "dot":
        return
    (bits, left), (_, right) = (next(_sizes(shape)) for shape in inputs[:2])
    _, result = next(_sizes(each.result))
    if each.operation == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]+)\}", each.rest)
        added = math.prod(left[int(i)] for i in contracted[1].split(",")) if contracted else 1
        yield bits, 2.0 * math.prod(result) * added
        return
    # cuDNN's have the numbers of the forward product, whichever of the three arrays is the result.
    kernel, outputs = right, result
    if "convBackwardFilter" in each.rest:
        kernel, outputs = result, right
    elif "convBackwardInput" in each.rest:
        outputs = left
    labels = re.search(r"dim_labels=\w+?_(\w+?)->", each.rest)
    added = kernel[labels[1].index("i")] if labels else 1
    # TPUs multiply stacks of matrices as convolutions of a dilated image, which is zeros between.
    window, dilated = (
        [int(n) for found in re.findall(rf"{name}=([\dx]+)", each.rest) for n in found.split("x")]
        for name in ("window=\\{size", "lhs_dilate")
    )
    for i, size in enumerate(window):
        added *= -(-size // dilated[i]) if dilated else size
    yield bits, 2.0 * math.prod(outputs) * added
