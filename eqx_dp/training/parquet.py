"""Examples in Parquet files, read by pyarrow where they are drawn."""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex, cast

import jax
import numpy as np
from jaxtyping import Int

from ..expected import expect
from ..extras import extra
from ..shown import shown
from ..trees import PyTree
from .readers import Readers

# A batch reads whole row groups: larger ones than this cost more than their rows are worth.
_LARGE = 2**26


class _Group(NamedTuple):
    file: int
    number: int
    start: int


class Parquet:
    """A source of examples in Parquet files: `dp.Trainer(step, dp.Parquet("data", ("x", "y")))`.

    The files are not read ahead: their footers say how many rows they hold, and a batch reads the
    row groups in which its examples are. So what is in memory is a batch and the row groups that
    are being read, however large the files are. It needs pyarrow: `pip install 'eqx-dp[parquet]'`.

    **Row groups must be small**, because one is read as a whole for each row that is drawn from it:
    write files by `pyarrow.parquet.write_table(..., row_group_size=100)`. Where examples are large
    and few of them are drawn, ArrayRecord files are read faster: see [`Records`][].

    | column | gives, for n examples |
    |---|---|
    | numbers, truth values | an array of shape (n,) |
    | lists of one length, in lists of one length, ... | an array of shape (n, length, ...) |
    | tensors of one shape (`pyarrow.fixed_shape_tensor`) | an array of shape (n, *shape) |
    | lists of several lengths, of which a batch has several | `DataError` |
    | missing values | `ValueError` where a footer says so, else `DataError` |
    | texts, dates, structures | `ValueError`: write tokens or arrays |
    | numbers that the dtype asked for does not hold | `DataError` |

    On several hosts each reads the rows that it owns, which follow one another, so that it reads
    files of its own.

    Args:
        files: a file, a folder, whose files `*.parquet` are taken by name, or a tuple or list of
            files. What pyarrow opens may be named as well, such as `"s3://bucket/a.parquet"`. The
            examples are numbered in the order of files and rows, which has to stay as it is while
            a run lasts.
        columns: the name of a column; or a tuple of names, one an argument of the loss; or a
            dictionary of names, for a loss that takes a dictionary.
        dtypes: numpy's dtypes, by column, of those that are to be read in another one than that of
            the file.
        readers: how many row groups are read at the same time.

    Raises:
        ValueError: a file is no Parquet file, has no such column, or one of another type than the
            first file's; a column holds neither numbers nor lists of numbers, or lacks values;
            there is no file; an argument is none of the above.
        OSError: a file cannot be read.
        MissingExtra: pyarrow is not installed.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        columns: PyTree[str],
        *,
        dtypes: Mapping[str, Any] | None = None,
        readers: SupportsIndex = 1,
    ):
        self._readers = Readers(readers)
        self._files, self._columns = _listed(files), columns
        names = jax.tree.leaves(columns)
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(
                "columns must be the name of a column, or a tuple or dictionary of names; found "
                f"{shown(columns)}."
            )
        self._names = list(dict.fromkeys(names))
        expect("dtypes", {} if dtypes is None else dtypes, Mapping, "dtypes by column, or None")
        self._dtypes = {name: _checked_dtype(name, x) for name, x in (dtypes or {}).items()}
        if unknown := self._dtypes.keys() - set(self._names):
            raise ValueError(
                f"dtypes names {min(unknown)!r}, which is none of the columns that are read: "
                f"{', '.join(self._names)}."
            )
        self._footers = self._readers.map(_footer, self._files)
        self._check()
        self._groups, ends, start = list[_Group](), list[int](), 0
        for file, footer in enumerate(self._footers):
            for number in range(footer.num_row_groups):
                self._groups.append(_Group(file, number, start))
                start += footer.row_group(number).num_rows
                ends.append(start)
        self._ends = np.array(ends, np.int64)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._files)} files, columns={self._columns!r})"

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, indices: Int[np.ndarray, " n"], /) -> PyTree[np.ndarray]:
        """Some examples, in the form of `columns`.

        Args:
            indices: their positions, at least one.
        """
        indices = np.asarray(indices)
        groups = np.searchsorted(self._ends, indices, side="right")
        order = np.argsort(groups, kind="stable")
        wanted, first = np.unique(groups[order], return_index=True)
        rows = np.split(indices[order], first[1:])
        read = self._readers.map(self._rows, zip(wanted, rows, strict=True))
        found = {name: _joined(name, [part[name] for part in read], order) for name in self._names}
        return jax.tree.map(lambda name: found[name], self._columns)

    def close(self) -> None:
        """Ends the threads that read, until something is read again."""
        self._readers.close()

    def _rows(self, wanted: tuple[Any, np.ndarray]) -> dict[str, np.ndarray]:
        """Some rows of a row group, by column; the rest of the group is let go at once."""
        group = self._groups[wanted[0]]
        parquet = extra("pyarrow.parquet", name="parquet")
        with parquet.ParquetFile(
            self._files[group.file], metadata=self._footers[group.file]
        ) as opened:
            table = opened.read_row_group(group.number, columns=self._names, use_threads=False)
        taken = table.take(wanted[1] - group.start)
        return {
            name: _array(name, taken.column(name).combine_chunks(), self._dtypes.get(name))
            for name in self._names
        }

    def _check(self) -> None:
        """Refuses files without the columns, and columns that are no arrays."""
        first, largest = self._footers[0].schema.to_arrow_schema(), 0
        for file, footer in zip(self._files, self._footers, strict=True):
            schema = footer.schema.to_arrow_schema()
            for name in self._names:
                if name not in schema.names:
                    raise ValueError(
                        f"{file} has no column {name!r}; it has {', '.join(schema.names)}."
                    )
                if schema.field(name).type != first.field(name).type:
                    raise ValueError(
                        f"Column {name!r} is {schema.field(name).type} in {file}, and "
                        f"{first.field(name).type} in {self._files[0]}. Write all files alike."
                    )
            for number in range(footer.num_row_groups):
                group = footer.row_group(number)
                parts = [group.column(i) for i in range(group.num_columns)]
                parts = [x for x in parts if _is_of(x.path_in_schema, self._names)]
                largest = max(largest, sum(x.total_uncompressed_size for x in parts))
                if any(x.statistics is not None and x.statistics.null_count for x in parts):
                    raise ValueError(
                        f"{file} lacks values in the columns {', '.join(self._names)}. An example "
                        "is made of arrays: fill in what is missing, or leave such rows out."
                    )
        for name in self._names:
            _check_type(name, first.field(name).type)
        if largest > _LARGE:
            warnings.warn(
                f"A row group of {len(self._files)} file(s) takes {largest / 2**20:.0f} MiB, and "
                "is read as a whole for each batch that has a row of it. Write the files with "
                "smaller ones: pyarrow.parquet.write_table(..., row_group_size=100).",
                stacklevel=3,
            )


def _listed(files: Any) -> list[str]:
    """The files, by name; a ValueError if there are none."""
    one = isinstance(files, (str, os.PathLike))
    expect("files", files, (str, os.PathLike, Sequence), "a file, a folder, or a list of files")
    names = [files] if one else list(files)
    if not all(isinstance(name, (str, os.PathLike)) for name in names):
        raise ValueError(f"files must be paths; found {shown(files)}.")
    found = [os.fspath(name) for name in cast("list[str]", names)]
    if one and "://" not in found[0] and Path(found[0]).is_dir():
        found = sorted(str(path) for path in Path(found[0]).glob("*.parquet"))
    if not found:
        where = f"the folder {names[0]}, without a file *.parquet" if names else shown(files)
        raise ValueError(f"files names no Parquet file; found {where}.")
    return found


def _footer(file: str) -> Any:
    """What a file says of its row groups; a ValueError if it is no Parquet file."""
    parquet = extra("pyarrow.parquet", name="parquet")
    try:
        return parquet.read_metadata(file)
    except FileNotFoundError:
        raise ValueError(f"files names {file}, and there is no such file or folder.") from None
    except extra("pyarrow", name="parquet").ArrowInvalid as error:
        raise ValueError(
            f"{file} is no Parquet file, or damaged: {error}. Name Parquet files alone."
        ) from None


def _checked_dtype(name: Any, given: Any) -> np.dtype[Any]:
    """A dtype of numbers or truth values that pyarrow knows."""
    try:
        dtype = np.dtype(given)
        extra("pyarrow", name="parquet").from_numpy_dtype(dtype)
    except (TypeError, NotImplementedError):
        dtype = None
    if dtype is None or dtype.kind not in "biuf":
        raise ValueError(
            f"dtypes[{name!r}] must be one of numpy's dtypes of numbers, such as 'float32', or "
            f"'bool'; found {shown(given)}. (The policy casts inputs to others, as bfloat16.)"
        )
    return dtype


def _is_of(path: str, names: Sequence[str]) -> bool:
    """Whether a leaf of a Parquet schema is in one of some columns."""
    return any(path == name or path.startswith(f"{name}.") for name in names)


def _check_type(name: str, kind: Any) -> None:
    types, inner = extra("pyarrow.types", name="parquet"), kind
    while True:
        inner = getattr(inner, "storage_type", inner)
        if not _is_list(inner):
            break
        inner = inner.value_type
    if not (types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner)):
        raise ValueError(
            f"Column {name!r} is {kind}, and must hold numbers, truth values, or lists of them. "
            "Write what the loss computes with: tokens in place of a text, an array in place of an "
            "image's file. (dp.Records reads what it is given a `decode` for.)"
        )


def _is_list(kind: Any) -> bool:
    types = extra("pyarrow.types", name="parquet")
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _array(name: str, values: Any, dtype: np.dtype[Any] | None) -> np.ndarray:
    """A column of lists of one length, as an array."""
    compute, shape = extra("pyarrow.compute", name="parquet"), [len(values)]
    shape_of_tensor: Any = getattr(values.type, "shape", None)
    values = getattr(values, "storage", values)
    while _is_list(values.type):
        lengths = compute.unique(compute.list_value_length(values))
        if values.null_count or len(lengths) != 1:
            raise ValueError(
                f"column {name!r} lacks lists"
                if values.null_count
                else f"column {name!r} has lists of {len(lengths)} lengths"
            )
        shape.append(lengths[0].as_py())
        values = values.flatten()
    if values.null_count:
        raise ValueError(f"column {name!r} lacks values")
    found = values.to_numpy(zero_copy_only=False)
    if dtype is not None:
        as_asked = values.cast(extra("pyarrow", name="parquet").from_numpy_dtype(dtype))
        plain, found = found, as_asked.to_numpy(zero_copy_only=False)
        # Arrow refuses whole numbers that do not fit, and makes infinities of large floats.
        if found.dtype.kind == "f" and np.any(np.isinf(found) & ~np.isinf(plain)):
            raise ValueError(f"column {name!r} has numbers that {dtype} does not hold")
    if shape_of_tensor is not None:
        shape = [shape[0], *shape_of_tensor]
    return found.reshape(shape)


def _joined(name: str, parts: Sequence[np.ndarray], order: np.ndarray) -> np.ndarray:
    """The rows of some row groups, in the order in which they were asked for."""
    if len({part.shape[1:] for part in parts}) > 1:
        raise ValueError(f"column {name!r} has lists of several lengths")
    joined = np.concatenate(parts)
    found = np.empty_like(joined)
    found[order] = joined
    return found
