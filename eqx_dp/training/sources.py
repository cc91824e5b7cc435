"""What examples are read from: anything that gives them at an array of positions."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, SupportsIndex, cast, runtime_checkable

import jax
import numpy as np
from jaxtyping import Int

from ..expected import function
from ..privacy import PoissonSampler
from ..shown import shown
from ..trees import PyTree
from .parquet import Parquet
from .readers import Readers


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
    data = dp.Records(records, decode=parse, readers=16)  # parse(record) is a tree of arrays
    ```

    | case | what happens |
    |---|---|
    | the source has `__getitems__` | it is asked for all records of a batch at once |
    | an example holds a list of numbers | it is an array, as data sets mean it |
    | records differ in shape, dtype or structure | `DataError` |
    | a record cannot be read or decoded | `DataError`, which does not say which |

    Args:
        records: `len(records)` examples; `records[i]` is one, for i from 0. With several readers it
            is indexed by several threads at the same time.
        decode: `decode(record)` is the example: numbers, arrays, or a tree of them. A tuple is
            several arguments of the loss. None for records that are so already.
        readers: how many records of a batch are read at the same time.

    Raises:
        ValueError: `records` has no length or cannot be indexed; `decode` is no function; `readers`
            is no whole number from 1 to 1024.
    """

    def __init__(
        self,
        records: Any,
        decode: Callable[[Any], PyTree[Any]] | None = None,
        readers: SupportsIndex = 1,
    ):
        if not isinstance(records, Source) or isinstance(records, (str, bytes, Mapping)):
            raise ValueError(
                "records must have a length and be indexed by whole numbers, as a list is; found "
                f"{shown(records)}."
            )
        if decode is not None:
            function("decode", decode, "decode(record), or None")
        self._records, self._decode, self._readers = records, decode, Readers(readers)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, indices: Int[np.ndarray, " n"], /) -> PyTree[np.ndarray]:
        """Some examples, stacked.

        Args:
            indices: their positions, at least one.
        """
        of_many = getattr(self._records, "__getitems__", None)
        if of_many is not None:
            records = of_many([int(i) for i in indices])
            examples = [self._decoded(record) for record in records]
        else:
            examples = self._readers.map(self._example, indices)
        if len({jax.tree.structure(example) for example in examples}) > 1:
            raise ValueError("records differ in structure")
        return jax.tree.map(_stacked, *examples)

    def close(self) -> None:
        """Ends the threads that read, until something is read again; a run does so at its end."""
        self._readers.close()

    def _example(self, index: Any) -> PyTree[Any]:
        return self._decoded(self._records[int(index)])

    def _decoded(self, record: Any) -> PyTree[np.ndarray]:
        example = record if self._decode is None else self._decode(record)
        # A list is an array in the making, not a tree: data sets give sequences so.
        return jax.tree.map(np.asarray, example, is_leaf=lambda x: isinstance(x, list))


def _stacked(*arrays: np.ndarray) -> np.ndarray:
    if len({(array.shape, array.dtype) for array in arrays}) > 1:
        raise ValueError("records differ in shape or dtype")
    return np.stack(arrays)


class Columns:
    """A dictionary of sources, which gives dictionaries of arrays."""

    def __init__(self, columns: Mapping[str, Source]):
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, indices: Any, /) -> dict[str, Any]:
        return {name: column[indices] for name, column in self._columns.items()}

    def close(self) -> None:
        """Ends the threads of those that have some."""
        for column in self._columns.values():
            end_threads(column)


def end_threads(source: Source) -> None:
    """Ends the threads of a source of this package; what others made is not ours to close."""
    if isinstance(source, (Records, Parquet, Columns)):
        source.close()


def checked_sources(data: Any, sampler: PoissonSampler) -> list[tuple[str, Source]]:
    """Sources by name, one an argument of the loss; a ValueError if something is none."""
    sources: list[tuple[str, Any]] = [("data", data)]
    if is_plain_tuple(data):
        sources = [(f"data[{i}]", part) for i, part in enumerate(data)]
    if not sources:
        raise ValueError("data is an empty tuple; it must hold a source an argument of the loss.")
    return [(name, _checked(name, source, sampler.num_examples)) for name, source in sources]


def _checked(name: str, source: Any, num_examples: int) -> Source:
    if isinstance(source, dict):
        columns = cast("dict[Any, Any]", source)
        if not columns:
            raise ValueError(f"{name} is an empty dictionary; it must hold sources.")
        checked = {key: _checked(f"{name}[{key!r}]", x, num_examples) for key, x in columns.items()}
        return Columns(checked)
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
            "Give the data set that the step was made for, or make the step anew."
        )
    return source


def is_plain_tuple(value: Any) -> bool:
    """Whether it stands for several arguments of the loss; a named tuple is one, with fields."""
    return isinstance(value, tuple) and not hasattr(value, "_fields")
