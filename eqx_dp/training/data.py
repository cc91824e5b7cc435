"""Where batches come from: drawn and read ahead of the steps that use them."""

import collections
import copy
import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from ..paths import dotted
from ..privacy import PoissonSampler
from ..trees import PyTree
from .sources import Source, checked_sources, end_threads, is_plain_tuple

Indices = Int[np.ndarray, " batch"]
Mask = Bool[np.ndarray, " batch"]

# Drawing some steps at once takes a tenth of the time, where a draw is small.
_STEPS_AT_ONCE, _SLOTS_AT_ONCE = 16, 2**17


class DataError(Exception):
    """A source of examples raised an error, or returned other shapes or dtypes than before.

    The message names the source and the kind of fault. The position of the example and the source's
    own message are private: which examples a step reads must stay secret, and a source's message
    may quote an example. Neither is in the message, its notes or its causes.
    """

    def __init__(self, message: str, details: Callable[[], str] | None = None):
        super().__init__(message)
        self._details = details

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args  # the details stay in the process

    def private_details(self) -> str:
        """The position of the example at fault, and the source's message. **Private**: do not log.

        It reads the examples of the batch one by one, to find the example.
        """
        return "Nothing more is known." if self._details is None else self._details()


class MaskedBatch(NamedTuple):
    """What a call takes: arguments of the loss with examples in front, and which are padding.

    A call that takes several steps takes their batches stacked: steps are in front.
    """

    examples: tuple[PyTree[np.ndarray], ...]
    is_padding_example: Mask


class Batches:
    """The batches of a run, by step.

    Padding slots hold zeros; nothing is read for them. A source is read for one example first, to
    learn what an example looks like, and has to give arrays of those shapes and dtypes always.

    Args:
        data: a source, or a tuple of sources of one length, one an argument of the loss.
        sampler: which examples take part in a step.
        readers: how many batches are read at the same time, each by a thread.
        ahead: how many batches are read before the call that uses the first of them; at least as
            many as there are readers. (The stacked batches of a call are one here.)

    Raises:
        ValueError: `data` is no source; sources differ in length, or hold another number of
            examples than the sampler draws from.
        DataError: a source cannot be read.
    """

    def __init__(self, data: Any, sampler: PoissonSampler, readers: int = 1, ahead: int = 1):
        self._readers, self._ahead = readers, max(readers, ahead)
        self._sources = checked_sources(data, sampler)
        self._sampler = sampler
        position = sampler.owned.start if len(sampler.owned) else 0
        self._example = [
            _read(name, source, np.array([position]), None) for name, source in self._sources
        ]

    @property
    def example(self) -> tuple[PyTree[np.ndarray], ...]:
        """One example, as the loss gets it, with a leading axis of one: its shapes and dtypes."""
        return _arguments(self._example)

    def zeros(self, steps: int) -> MaskedBatch:
        """What a call takes that takes so many steps, made up; without a padding example."""
        slots = (*([steps] if steps > 1 else []), self._sampler.capacity)
        examples = jax.tree.map(
            lambda one: np.zeros((*slots, *one.shape[1:]), one.dtype), self.example
        )
        return MaskedBatch(examples, np.zeros(slots, bool))

    def drawn_by(self, sampler: PoissonSampler) -> "Batches":
        """The same sources, with the batches of another sampler of as many examples."""
        other = copy.copy(self)
        other._sampler = sampler
        return other

    def from_step(
        self, start: int, stop: int, calls: Iterable[range] | None = None
    ) -> Generator[MaskedBatch]:
        """Batches of the steps from `start` to below `stop`, in their order.

        One thread draws and others read, while steps run: a batch's examples are read as soon as
        they are drawn, and no more than `ahead` batches beyond the one in use.

        The batches of steps that are taken together, in one of `calls`, come stacked.

        Raises:
            DataError: a source raised an error, or gave arrays of another shape or dtype.
        """
        draws = self._draws(start, stop)
        coming_calls = iter(calls or (range(step, step + 1) for step in range(start, stop)))
        drawer = ThreadPoolExecutor(1, thread_name_prefix="eqx_dp-draw")
        readers = ThreadPoolExecutor(self._readers, thread_name_prefix="eqx_dp-data")
        coming: collections.deque[Future[MaskedBatch]] = collections.deque()

        def read_on() -> None:
            call = next(coming_calls, None)
            if call is not None:
                drawn = drawer.submit(lambda: list(itertools.islice(draws, len(call))))
                coming.append(readers.submit(self._read_drawn, drawn))

        try:
            for _ in range(self._ahead):
                read_on()
            while coming:
                batch = coming.popleft().result()
                read_on()
                yield batch
        finally:
            for pool in (drawer, readers):
                pool.shutdown(cancel_futures=True)
            for _, source in self._sources:
                end_threads(source)

    def _read_drawn(self, draws: Future[list[tuple[Indices, Mask]]]) -> MaskedBatch:
        """The batch of a call: each step's examples are read by themselves, as ever."""
        batches = [self._batch(*draw) for draw in draws.result()]
        if len(batches) == 1:
            return batches[0]
        return jax.tree.map(lambda *parts: np.stack(parts), *batches)

    def _draws(self, start: int, stop: int) -> Iterator[tuple[Indices, Mask]]:
        """The examples of each step."""
        at_once = max(1, min(_STEPS_AT_ONCE, _SLOTS_AT_ONCE // self._sampler.capacity))
        for first in range(start, stop, at_once):
            steps = range(first, min(first + at_once, stop))
            yield from [self._sampler.batch(step) for step in steps]

    def _batch(self, indices: Indices, is_padding_example: Mask) -> MaskedBatch:
        drawn = indices[~is_padding_example]
        parts: list[Any] = []
        for (name, source), example in zip(self._sources, self._example, strict=True):
            found = _read(name, source, drawn, example) if len(drawn) else None
            parts.append(_padded(found, example, is_padding_example))
        return MaskedBatch(_arguments(parts), is_padding_example)


def _arguments(parts: Iterable[Any]) -> tuple[Any, ...]:
    """What the loss gets from what each source gave."""
    return tuple(x for part in parts for x in (part if is_plain_tuple(part) else (part,)))


def _read(name: str, source: Source, indices: Int[np.ndarray, " n"], like: Any) -> Any:
    """Examples of a source, as a tree of numpy arrays; `like` is what one example looked like."""
    found, fault = _attempt(source, indices, like)
    if fault is None:
        return found
    # Not raised where the source's own error is handled: Python would keep that as its context.
    raise DataError(
        f"{name}, a {type(source).__name__}: the source {fault.kind} when it was read for the "
        "examples of a step. Which example it was, and what the source said, is private: catch "
        "this error and look at error.private_details(). The run stops here; mend the source, and "
        "start it again to go on from the last checkpoint.",
        functools.partial(_details, name, source, indices, like, fault.words),
    )


class _Fault(NamedTuple):
    """What is wrong with examples: its kind, which says nothing of them, and all of it, private."""

    kind: str
    words: str


def _attempt(
    source: Source, indices: Int[np.ndarray, " n"], like: Any
) -> tuple[Any, _Fault | None]:
    try:
        # A list is an array in the making, not a tree: data sets give columns so.
        found = jax.tree.map(np.asarray, source[indices], is_leaf=lambda x: isinstance(x, list))
        return found, _fault(found, like, len(indices))
    except Exception as error:
        return None, _Fault(f"raised {type(error).__name__}", f"raised {error!r}")


def _fault(found: Any, like: Any, length: int) -> _Fault | None:
    leaves = jax.tree_util.tree_leaves_with_path(found)
    if not leaves:
        return _Fault("gave no arrays", "gave no arrays")
    for path, leaf in leaves:
        where = dotted(path) or "an array"
        if leaf.dtype.hasobject or leaf.dtype.kind in "USV":
            kind = "gave an array of a dtype that is no number"
            return _Fault(kind, f"gave {where} of dtype {leaf.dtype}, which is no number")
        if leaf.ndim == 0 or len(leaf) != length:
            kind = "gave an array without one entry for each example in front"
            return _Fault(kind, f"gave {where} of shape {leaf.shape} for {length} examples")
    if like is None:
        return None
    now, before = jax.tree.structure(found), jax.tree.structure(like)
    if now != before:
        return _Fault("gave another tree of arrays than before", f"gave {now}, and {before} before")
    for (path, leaf), first in zip(leaves, jax.tree.leaves(like), strict=True):
        now, before = ((x.shape[1:], x.dtype) for x in (leaf, first))
        if now != before:
            where = dotted(path) or "examples"
            return _Fault(
                "gave examples of another shape or dtype than before",
                "gave {} of shape {} and dtype {}, and of shape {} and dtype {} before".format(
                    where, *now, *before
                ),
            )
    return None


def _details(
    name: str, source: Source, indices: Int[np.ndarray, " n"], like: Any, words: str
) -> str:
    for index in indices if len(indices) > 1 else ():
        _, fault = _attempt(source, np.array([index]), like)
        if fault is not None:
            return f"{name}: index {index}: the source {fault.words}."
    where = f"index {indices[0]}" if len(indices) == 1 else f"{len(indices)} indices together"
    return f"{name}: {where}: the source {words}."


def _padded(found: Any, like: Any, is_padding_example: Mask) -> Any:
    """A batch: the examples found (None where there are none), and zeros in padding slots."""

    def fill(example: np.ndarray, leaf: np.ndarray | None = None) -> np.ndarray:
        filled = np.zeros((len(is_padding_example), *example.shape[1:]), example.dtype)
        if leaf is not None:
            filled[~is_padding_example] = leaf
        return filled

    return jax.tree.map(fill, like, *([] if found is None else [found]))
