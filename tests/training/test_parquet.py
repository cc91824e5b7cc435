"""Examples in Parquet files, and in ArrayRecord files by `dp.Records`."""

import pickle
import re
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from eqx_dp.training.data import Batches
from tests.training import runs
from tests.training.runs import NUM_EXAMPLES, SEED, XS, YS, small_model

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def table(**columns):
    return pa.table(
        {name: pa.array(x) if isinstance(x, list) else x for name, x in columns.items()}
    )


def write(folder, name="a.parquet", rows=7, **columns):
    folder.mkdir(exist_ok=True)
    parquet.write_table(table(**columns), folder / name, row_group_size=rows)
    return folder / name


@pytest.fixture
def folder(tmp_path):
    """The examples of `runs`, in three files of which the last is one row group."""
    for name, rows in {"a": slice(0, 20), "b": slice(20, 21), "c": slice(21, 64)}.items():
        write(
            tmp_path / "data",
            f"{name}.parquet",
            x=[x.tolist() for x in XS[rows]],
            y=pa.array(YS[rows]),
            text=[str(y) for y in YS[rows]],
            rows=50 if name == "c" else 7,
        )
    return tmp_path / "data"


@pytest.mark.parametrize("readers", [1, 3])
def test_rows_are_those_of_the_arrays(folder, readers):
    """In any order, of any file and row group, and several times."""
    source = dp.Parquet(folder, ("x", "y"), dtypes={"x": np.float32}, readers=readers)
    assert len(source) == NUM_EXAMPLES
    indices = np.random.default_rng(1).integers(0, NUM_EXAMPLES, 100)
    for some in (indices, indices[:1], np.arange(NUM_EXAMPLES)):
        xs, ys = source[some]
        np.testing.assert_array_equal(xs, XS[some], strict=True)
        np.testing.assert_array_equal(ys, YS[some], strict=True)
    source.close()


def test_a_run_reads_them_and_leaves_no_thread(folder):
    step = runs.make()
    whole = runs.trainer(None, step).run(small_model(), 3)
    step.unrecorded.steps = 0
    source = dp.Parquet(folder, ("x", "y"), dtypes={"x": np.float32}, readers=2)
    state = runs.trainer(None, step, source, readers=2).run(small_model(), 3)
    runs.assert_same(state, whole)
    assert not [t for t in threading.enumerate() if t.name.startswith("eqx_dp-records")]


def test_the_form_of_an_example_is_that_of_columns(folder):
    at = np.array([3])
    assert dp.Parquet(folder, "y")[at].shape == (1,)
    assert set(dp.Parquet(folder, {"inputs": "x", "labels": "y"})[at]) == {"inputs", "labels"}
    files = [folder / "c.parquet", str(folder / "a.parquet")]
    np.testing.assert_array_equal(dp.Parquet(files, "y")[np.array([0, 43])], YS[[21, 0]])


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([[[1, 2]], [[3, 4]]]), np.array([[[1, 2]], [[3, 4]]])),
        (pa.array([True, False]), np.array([True, False])),
        (pa.array([1.5, 2], pa.float16()), np.array([1.5, 2], np.float16)),
        (pa.array([[1], [2]], pa.large_list(pa.uint8())), np.array([[1], [2]], np.uint8)),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)), np.array([[1, 2], [3, 4]], np.int32)),
        (
            pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12.0).reshape(2, 2, 3)),
            np.arange(12.0).reshape(2, 2, 3),
        ),
    ],
    ids=lambda x: str(x.type).replace(" ", "") if hasattr(x, "type") else "",
)
def test_what_columns_give(tmp_path, column, expected):
    file = write(tmp_path, x=column)
    np.testing.assert_array_equal(
        dp.Parquet(file, "x")[np.array([1, 0])], expected[::-1], strict=True
    )


REFUSED = {
    "no such column": ({"x": [1]}, {"columns": "z"}, "has no column 'z'; it has x."),
    "a text": ({"x": ["a"]}, {}, "Column 'x' is string, and must hold numbers"),
    "lists of texts": ({"x": [["a"]]}, {}, "Column 'x' is list<element: string>, and must"),
    "a structure": ({"x": [{"a": 1}]}, {}, "Column 'x' is struct<a: int64>, and must hold"),
    "a date": ({"x": pa.array([1], pa.timestamp("s"))}, {}, "Column 'x' is timestamp"),
    "missing": ({"x": [1, None]}, {}, "lacks values in the columns x. An example is made of"),
    "missing in a list": ({"x": [[1], [None]]}, {}, "lacks values in the columns x"),
    "another dtype's column": ({"x": [1]}, {"dtypes": {"y": "int8"}}, "dtypes names 'y', which is"),
    "no dtype": (
        {"x": [1]},
        {"dtypes": {"x": "tall"}},
        "dtypes['x'] must be one of numpy's dtypes",
    ),
    "a dtype of texts": ({"x": [1]}, {"dtypes": {"x": "U5"}}, "dtypes['x'] must be one of numpy's"),
    "no names": ({"x": [1]}, {"columns": 3}, "columns must be the name of a column, or a tuple"),
    "no columns": ({"x": [1]}, {"columns": ()}, "columns must be the name of a column"),
    "readers": ({"x": [1]}, {"readers": 0}, "readers must be at least 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, tmp_path, unchecked):
    columns, options, said = REFUSED[name]
    file = write(tmp_path, **columns)
    with pytest.raises(ValueError, match=re.escape(said)):
        dp.Parquet(file, **({"columns": "x"} | options))


def test_files_that_differ_are_refused(tmp_path):
    write(tmp_path, "a.parquet", x=[1])
    write(tmp_path, "b.parquet", x=[1.5])
    with pytest.raises(ValueError, match=r"Column 'x' is double in .*b.parquet, and int64 in"):
        dp.Parquet(tmp_path, "x")
    (tmp_path / "none").mkdir()
    for nothing in (tmp_path / "none", []):
        with pytest.raises(ValueError, match=r"files names no Parquet file; found .*(none|\(\))"):
            dp.Parquet(nothing, "x")
    (tmp_path / "c.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"c.parquet is no Parquet file, or damaged"):
        dp.Parquet(tmp_path, "x")


@pytest.mark.parametrize(
    ("column", "dtype", "said"),
    [
        ([[1], [1, 2]], None, r"shape \(2,\)"),
        ([1, 300], "uint8", "300"),  # arrow's own words
        ([1.5, 2.5], "int32", "1.5|2.5"),
        ([1.0, 1e300], "float32", "numbers that float32 does not hold"),
    ],
)
def test_what_a_batch_cannot_be_made_of_is_not_told(tmp_path, column, dtype, said):
    source = dp.Parquet(write(tmp_path, x=column * 1), "x", dtypes={"x": dtype} if dtype else None)
    sampler = dp.PoissonSampler(2, 1.0, SEED)
    with pytest.raises(dp.DataError, match="data, a Parquet: the source raised") as caught:
        next(Batches(source, sampler).from_step(0, 1))
    assert not re.search(said, str(caught.value).replace("private_details", ""))
    assert re.search(said, caught.value.private_details())


def test_large_row_groups_are_warned_about(tmp_path, monkeypatch):
    monkeypatch.setattr("eqx_dp.training.parquet._LARGE", 100)
    file = write(tmp_path, x=list(range(1000)), rows=1000)
    with pytest.warns(UserWarning, match=r"row group.*is read as a whole.*row_group_size=100"):
        dp.Parquet(file, "x")


def test_only_the_row_groups_of_a_batch_are_read(folder, monkeypatch):
    seen, read = [], parquet.ParquetFile.read_row_group

    def noted(self, number, **options):
        seen.append(number)
        assert options["columns"] == ["y"]
        return read(self, number, **options)

    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", noted)
    dp.Parquet(folder, "y")[np.array([15, 1, 0, 16, 20])]
    assert seen == [0, 2, 0]


def test_a_source_with_threads_can_be_pickled(folder):
    for source in (
        dp.Parquet(folder, "y", readers=2),
        dp.Records(list(YS), readers=2),
    ):
        before = source[np.arange(5)]
        again = pickle.loads(pickle.dumps(source))
        np.testing.assert_array_equal(again[np.arange(5)], before)
        again.close()
        source.close()
        np.testing.assert_array_equal(source[np.arange(5)], before)  # threads are made anew
        source.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("eqx_dp-records")]


def test_array_records_are_records(tmp_path):
    """As grain's source of them, which is this one."""
    module = pytest.importorskip("array_record.python.array_record_module")
    sources = pytest.importorskip("array_record.python.array_record_data_source")
    files = []
    for rows in (slice(0, 30), slice(30, 64)):
        files.append(str(tmp_path / f"{rows.start}.array_record"))
        writer = module.ArrayRecordWriter(files[-1], "group_size:1")
        for x, y in zip(XS[rows], YS[rows], strict=True):
            writer.write(np.append(x, y).tobytes())
        writer.close()

    def parse(record):
        row = np.frombuffer(record, np.float32)
        return row[:4], row[4]

    step = runs.make()
    whole = runs.trainer(None, step).run(small_model(), 3)
    step.unrecorded.steps = 0
    with sources.ArrayRecordDataSource(files) as records:
        assert hasattr(records, "__getitems__")
        data = dp.Records(records, decode=parse)
        runs.assert_same(runs.trainer(None, step, data).run(small_model(), 3), whole)


def test_hosts_read_rows_of_their_own(folder, monkeypatch):
    """Poisson samples of each host's rows; together they are the rows of the plan."""
    seen = {0: set(), 1: set()}
    source = dp.Parquet(folder, "y")
    for host in range(2):
        sampler = runs.plan_of().sampler(NUM_EXAMPLES, SEED, hosts=2, host=host)

        class Noted:
            def __len__(self):
                return NUM_EXAMPLES

            def __getitem__(self, indices, host=host):
                seen[host].update(indices.tolist())
                return source[indices]

        for batch in Batches(Noted(), sampler).from_step(0, 5):
            real = ~batch.is_padding_example
            assert set(np.asarray(batch.examples[0])[real]) <= set(YS[sampler.owned])
    assert max(seen[0]) < min(seen[1])
    assert jnp.asarray(YS).dtype == source[np.array([0])].dtype
