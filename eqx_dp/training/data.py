"""Where batches come from: sources of examples, read ahead of the steps that use them."""

import collections
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import jax
import numpy as np
from jaxtyping import Bool, Int

from ..expected import function
from ..privacy import Sampler, Users
from ..shown import shown
from ..trees import PyTree

Mask = Bool[np.ndarray, " batch"]
Indices = Int[np.ndarray, " n"]


@runtime_checkable
class Source(Protocol):
    """Anything that knows how many examples it holds, and gives those at an array of positions.

    Numpy arrays, memory-mapped files and data sets with fast random access are sources. Indexing
    gives an array, or a tree of arrays, with the examples in front; a tuple is several arguments of
    the loss.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Any, /) -> Any: ...


class Records:
    """A source whose examples are read one by one: `dp.Trainer(step, dp.Records(records))`.

    For what is indexed by one position and gives one example: a list, a data set of PyTorch or
    Hugging Face, grain's random-access sources (ArrayRecord files, Bagz). Only the records that are
    drawn are read.

    ```python
    records = grain.sources.ArrayRecordDataSource(paths)
    data = dp.Records(records, decode=parse)  # parse(record) is a tree of arrays
    ```

    | case | what happens |
    |---|---|
    | the source has `__getitems__` | it is asked for all records of a batch at once |
    | an example holds a list of numbers | it is an array, as data sets mean it |
    | records differ in shape, dtype or structure | `DataError` |
    | a record cannot be read or decoded | `DataError`, which does not say which |

    Args:
        records: `len(records)` examples; `records[i]` is one, for i from 0. (A Trainer's
            `read_ahead` reads several batches at the same time.)
        decode: `decode(record)` is the example: numbers, arrays, or a tree of them. A tuple is
            several arguments of the loss. None for records that are so already.

    Raises:
        ValueError: `records` has no length or cannot be indexed; `decode` is no function.
    """

    def __init__(self, records: Any, decode: Callable[[Any], PyTree[Any]] | None = None):
        if not isinstance(records, Source) or isinstance(records, (str, bytes, Mapping)):
            raise ValueError(
                "records must have a length and be indexed by whole numbers, as a list is; found "
                f"{shown(records)}."
            )
        if decode is not None:
            function("decode", decode, "decode(record), or None")
        self._records, self._decode = records, decode

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, indices: Indices, /) -> PyTree[np.ndarray]:
        """Some examples, stacked.

        Args:
            indices: their positions, at least one.
        """
        of_many = getattr(self._records, "__getitems__", None)
        whole = [int(i) for i in indices]
        records = [self._records[i] for i in whole] if of_many is None else of_many(whole)
        examples = [self._decoded(record) for record in records]
        if len({jax.tree.structure(example) for example in examples}) > 1:
            raise ValueError("records differ in structure")
        return jax.tree.map(_stacked, *examples)

    def _decoded(self, record: Any) -> PyTree[np.ndarray]:
        example = record if self._decode is None else self._decode(record)
        # A list is an array in the making, not a tree: data sets give sequences so.
        return jax.tree.map(np.asarray, example, is_leaf=lambda x: isinstance(x, list))


def _stacked(*arrays: np.ndarray) -> np.ndarray:
    if len({(array.shape, array.dtype) for array in arrays}) > 1:
        raise ValueError("records differ in shape or dtype")
    return np.stack(arrays)


class DataError(Exception):
    """A source of examples raised an error, or returned other shapes or dtypes than before.

    The message names the source and the kind of fault. The position of the example and the source's
    own message are private: which examples a step reads must stay secret, and a source's message
    may quote an example. Neither is in the message, its notes or its causes.
    """

    def __init__(self, message: str, details: str = "Nothing more is known."):
        super().__init__(message)
        self._details = details

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args  # the details stay in the process

    def private_details(self) -> str:
        """The positions that were read, and the source's message. **Private**: do not log."""
        return self._details


class MaskedBatch(NamedTuple):
    """What a step takes: arguments of the loss with examples in front, and which are padding."""

    examples: tuple[PyTree[np.ndarray], ...]
    is_padding_example: Mask


class Batches:
    """The batches of a run, by step.

    Padding slots hold zeros; nothing is read for them. A source is read for one example first, to
    learn what an example looks like, and has to give arrays of those shapes and dtypes always.

    Args:
        data: a source, or a tuple of sources of one length, one an argument of the loss.
        shape: a sampler: how many examples there are, and how many slots a batch has.
        ahead: how many batches are read at the same time, each by a thread, while a step runs.
        users: who owns the rows of the sources, if the sampler draws users.

    Raises:
        ValueError: `data` is no source; sources differ in length, or hold another number of
            examples.
        DataError: a source cannot be read.
    """

    def __init__(self, data: Any, shape: Sampler, ahead: int = 1, users: Users | None = None):
        self._ahead, self._users, self._slots = ahead, users, shape.capacity
        num_rows = shape.num_examples if users is None else users.num_rows
        self._sources = checked_sources(data, num_rows)
        first = np.array([shape.owned.start if shape.owned and users is None else 0])
        self._example = [_read(name, source, first, None) for name, source in self._sources]

    def zeros(self) -> MaskedBatch:
        """A batch that is made up, without a padding example."""
        nothing = np.arange(0)
        per_user = 1 if self._users is None else self._users.per_step
        is_padding_row = np.zeros((self._slots, per_user), bool)
        examples = self._arguments(nothing, nothing, is_padding_row)
        return MaskedBatch(examples, np.zeros(self._slots, bool))

    def drawn_by(self, sampler: Sampler, steps: int) -> Generator[MaskedBatch]:
        """The batches of a sampler's first steps, in their order, read while steps run.

        Raises:
            DataError: a source raised an error, or gave arrays of another shape or dtype.
        """
        pool = ThreadPoolExecutor(self._ahead, thread_name_prefix="eqx_dp-data")
        coming: collections.deque[Future[MaskedBatch]] = collections.deque()
        try:
            for step in range(steps + self._ahead):
                if step < steps:
                    coming.append(pool.submit(self._batch, sampler, step))
                if step >= self._ahead:
                    yield coming.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _batch(self, sampler: Sampler, step: int) -> MaskedBatch:
        if self._users is None:
            indices, is_padding_example = sampler.batch(step)
            is_padding_row = is_padding_example[:, None]
        else:
            rows, is_padding_row, is_padding_example = self._users.rows(sampler, step)
            indices = rows.ravel()
        slots = np.argsort(indices)[np.sum(indices < 0) :]  # a source is read forward
        examples = self._arguments(indices[slots], slots, is_padding_row)
        return MaskedBatch(examples, is_padding_example)

    def _arguments(
        self, indices: Indices, slots: Indices, is_padding_row: Bool[np.ndarray, "slots rows"]
    ) -> tuple[PyTree[np.ndarray], ...]:
        """What the loss gets: these examples in these slots, and zeros in all others."""

        def padded(found: np.ndarray) -> np.ndarray:
            filled = np.zeros((is_padding_row.size, *found.shape[1:]), found.dtype)
            filled[slots] = found
            shape = is_padding_row.shape[: 1 if self._users is None else 2]
            return filled.reshape(*shape, *found.shape[1:])

        parts: list[Any] = []
        for (name, source), example in zip(self._sources, self._example, strict=True):
            nothing = jax.tree.map(lambda leaf: leaf[:0], example)
            found = _read(name, source, indices, example) if len(slots) else nothing
            part = jax.tree.map(padded, found)
            parts += part if is_plain_tuple(part) else (part,)
        return (*parts,) if self._users is None else (*parts, is_padding_row)


def _read(name: str, source: Source, indices: Indices, like: Any) -> Any:
    """Examples of a source, as a tree of numpy arrays; `like` is what one example looked like."""
    found, fault, words = _attempt(source, indices, like)
    if not fault:
        return found
    # Not raised where the source's own error is handled: Python would keep that as its context.
    raise DataError(
        f"{name}, a {type(source).__name__}: the source {fault} when it was read for the "
        "examples of a step. Which example it was, and what the source said, is private: catch "
        "this error and look at error.private_details(). The run stops here; mend the source, and "
        "start it again to continue from the last checkpoint.",
        f"{name} at {list(map(int, indices))}: the source {words}.",
    )


def _attempt(source: Source, indices: Indices, like: Any) -> tuple[Any, str, str]:
    """What a source gave; the kind of fault, which says nothing of it; and all of it, private."""
    try:
        # A list is an array in the making, not a tree: data sets give columns so.
        is_dict = isinstance(source, dict)  # of sources
        given = jax.tree.map(lambda x: x[indices], source) if is_dict else source[indices]
        found = jax.tree.map(np.asarray, given, is_leaf=lambda x: isinstance(x, list))
    except Exception as error:
        return None, f"raised {type(error).__name__}", f"raised {error!r}"
    leaves = jax.tree.leaves(found)
    shapes = f"gave {jax.tree.map(_form, found)} for {len(indices)} examples"
    # bfloat16 and its like are of kind V, as structures are, but registered (2).
    if not leaves or any(x.dtype.kind in "OUSV" and x.dtype.isbuiltin != 2 for x in leaves):
        return None, "gave something else than arrays of numbers", shapes
    if any(leaf.ndim == 0 or len(leaf) != len(indices) for leaf in leaves):
        return None, "gave an array without one entry for each example in front", shapes
    if like is not None and jax.tree.map(_form, found) != (before := jax.tree.map(_form, like)):
        kind = "gave examples of another shape, dtype or structure than before"
        return None, kind, f"{shapes}, and {before} before"
    return found, "", ""


def _form(leaf: np.ndarray) -> str:
    """Dtype and shape of an example."""
    return f"{leaf.dtype}{list(leaf.shape[1:])}"


def checked_sources(data: Any, num_examples: int) -> list[tuple[str, Source]]:
    """Sources by name, one an argument of the loss; a ValueError if something is none."""
    sources: list[tuple[str, Any]] = [("data", data)]
    if is_plain_tuple(data):
        sources = [(f"data[{i}]", part) for i, part in enumerate(data)]
    if not sources:
        raise ValueError("data is an empty tuple; it must hold a source an argument of the loss.")
    return [(name, _checked(name, source, num_examples)) for name, source in sources]


def _checked(name: str, source: Any, num_examples: int) -> Source:
    if isinstance(source, dict):
        columns = cast("dict[Any, Any]", source)
        if not columns:
            raise ValueError(f"{name} is an empty dictionary; it must hold sources.")
        for key, column in columns.items():
            _checked(f"{name}[{key!r}]", column, num_examples)
        return cast(Source, source)
    if not isinstance(source, Source) or isinstance(source, (str, bytes, list)):
        raise ValueError(
            f"{name} is a {type(source).__name__}: a source has a length and is indexed by an "
            "array of integers, as numpy arrays are (np.asarray), or is a dictionary or a tuple of "
            "such. What gives one example at a time is one by dp.Records(...)."
        )
    if len(source) != num_examples:
        raise ValueError(
            f"{name} holds {len(source)} examples, and the step was made with num_examples="
            f"{num_examples}: sampling and noise would be those of another data set. "
            "Give the data set that the step was made for, or make a new step."
        )
    return source


def is_plain_tuple(value: Any) -> bool:
    """Whether it stands for several arguments of the loss; a named tuple is one, with fields."""
    return isinstance(value, tuple) and not hasattr(value, "_fields")
