"""Buffers of a program, the operations between them, and the bytes held at the worst moment."""

import dataclasses
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence

Held = Counter[str]
"""Bytes by what they are for."""


@dataclasses.dataclass(eq=False)
class Buffer:
    """A piece of memory. Two are the same only if they are one object.

    Attributes:
        size: bytes on a device.
        purpose: what it is for.
        is_own: whether the body that it occurs in allocates it; what comes from outside is counted
            there.
    """

    size: int
    purpose: str
    is_own: bool = True


@dataclasses.dataclass(eq=False)
class Operation:
    """Something that reads and writes whole buffers, as a compiler's fused loop does.

    Attributes:
        reads: what has to be there until it is done.
        writes: what it allocates.
        inside: held by a body of its own at its worst moment, a loop's or a branch's.
        takes_over: pairs (written, read) that may share their memory, if nobody reads on.
        is_late: whether what it writes is allocated inside, so that ``inside`` counts it.
    """

    reads: list[Buffer]
    writes: list[Buffer]
    inside: Held = dataclasses.field(default_factory=Counter[str])
    takes_over: list[tuple[Buffer, Buffer]] = dataclasses.field(
        default_factory=list[tuple[Buffer, Buffer]]
    )
    is_late: bool = False


def breadth_first(operations: Sequence[Operation]) -> list[Operation]:
    """The order in which XLA's CPU compiler runs them: whatever is ready, first come first served.

    That lets independent operations run side by side. It is not the order that holds least: all
    that is ready is made, whether or not it is wanted soon.
    """
    maker = {buffer: i for i, one in enumerate(operations) for buffer in one.writes}
    waits = [
        {maker[buffer] for buffer in one.reads if buffer in maker} - {i}
        for i, one in enumerate(operations)
    ]
    users: defaultdict[int, list[int]] = defaultdict(list)
    for i, makers in enumerate(waits):
        for made in sorted(makers):
            users[made].append(i)
    left = list(map(len, waits))
    ready = deque(i for i, count in enumerate(left) if count == 0)
    order: list[Operation] = []
    while ready:
        done = ready.popleft()
        order.append(operations[done])
        for user in users[done]:
            left[user] -= 1
            if left[user] == 0:
                ready.append(user)
    return order


def worst_moment(
    operations: Sequence[Operation],
    results: Iterable[Buffer | None],
    carried: Sequence[Buffer] = (),
    has_room: bool = True,
) -> Held:
    """What a body holds at its worst moment, beside what it was given.

    Args:
        operations: in the order in which they run.
        results: what the body gives back.
        carried: in a loop the memory of what it carries: a result is written straight there, unless
            the one of the step before is still to be read.
        has_room: whether there is room outside for results, which then count there.
    """
    times = _Times(operations)
    kept = {b: i for i, b in reversed(list(enumerate(results))) if b is not None and b.is_own}
    elsewhere = times.written_elsewhere(kept, carried) if has_room else set[Buffer]()
    live: dict[Buffer, int] = {}
    worst, most = Counter[str](), -1
    for now, operation in enumerate(operations):
        for buffer in operation.writes:
            old = times.taken_over(buffer, now)
            if old is not None and live.get(old) and old not in kept:
                del live[old]
            live[buffer] = 0 if buffer in elsewhere else buffer.size
        there = dict(live)
        if operation.is_late:
            for buffer in operation.writes:
                del there[buffer]
        total = sum(there.values()) + operation.inside.total()
        if total > most:
            most, worst = total, Counter(operation.inside)
            for buffer, size in there.items():
                worst[buffer.purpose] += size
        for buffer in (*operation.reads, *operation.writes):
            if times.last_read[buffer] == now and buffer not in kept:
                live.pop(buffer, None)
    return worst


class _Times:
    """When buffers are written and last read."""

    def __init__(self, operations: Sequence[Operation]):
        self.operations = operations
        self.last_read: dict[Buffer, int] = {}
        self.written: dict[Buffer, int] = {}
        for now, operation in enumerate(operations):
            for buffer in operation.writes:
                self.written[buffer] = now
                self.last_read.setdefault(buffer, now)
            for buffer in operation.reads:
                self.last_read[buffer] = now

    def taken_over(self, buffer: Buffer, now: int) -> Buffer | None:
        """Whose memory a buffer is written to, if it is one that is read no more."""
        for new, old in self.operations[now].takes_over:
            if new is buffer and old in self.written and self.last_read[old] == now:
                return old
        return None

    def written_elsewhere(
        self, results: dict[Buffer, int], carried: Sequence[Buffer]
    ) -> set[Buffer]:
        """Results, and whose memory they take over, for which there is room outside."""
        found: set[Buffer] = set()
        for result, index in results.items():
            free = self.last_read.get(carried[index], -1) if index < len(carried) else -1
            buffer: Buffer | None = result
            while buffer is not None and free <= self.written[buffer]:
                found.add(buffer)
                buffer = self.taken_over(buffer, self.written[buffer])
        return found
