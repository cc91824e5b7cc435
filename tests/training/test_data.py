"""Sources of all kinds give their batches a step ahead, and those at fault are named."""

import re
import threading
import traceback
from typing import NamedTuple

import jax
import numpy as np
import pytest

import eqx_dp as dp
from eqx_dp.privacy import PoissonSampler
from eqx_dp.training.data import Batches
from tests.training import runs
from tests.training.runs import NUM_EXAMPLES, SEED, XS, YS


def sampler(sampling_prob=0.25, num_examples=NUM_EXAMPLES):
    return PoissonSampler(num_examples, sampling_prob, seed=SEED, pad_to=8)


def batches_of(data, sampler, steps, ahead=1):
    return Batches(data, sampler, ahead).drawn_by(sampler, steps)


class Source:
    """Gives what a function says for an array of positions; notes what it was asked for."""

    def __init__(self, read, length=NUM_EXAMPLES):
        self.read, self.length, self.asked = read, length, []

    def __len__(self):
        return self.length

    def __getitem__(self, indices):
        self.asked.append(np.array(indices))
        return self.read(indices)


class Pair(NamedTuple):
    x: np.ndarray
    y: np.ndarray


class Stored:
    """One record at a time, by a whole number, as grain's random-access sources."""

    def __len__(self):
        return NUM_EXAMPLES

    def __getitem__(self, index):
        if not isinstance(index, int):
            raise TypeError("by whole numbers alone")
        return repr(float(YS[index]))


class Bulk(Stored):
    def __getitem__(self, index):
        raise TypeError("all at once")

    def __getitems__(self, indices):
        return [Stored.__getitem__(self, index) for index in indices]


def expected(values, step=0, **options):
    """Rows at the places of a batch, zeros where there are none."""
    indices, mask = sampler(**options).batch(step)
    rows = np.zeros((len(indices), *values.shape[1:]), values.dtype)
    for place, index in enumerate(indices):
        if not mask[place]:
            rows[place] = values[index]
    return rows


def memory_mapped(tmp_path):
    stored = np.memmap(tmp_path / "x", np.float32, "w+", shape=XS.shape)
    stored[:] = XS
    return np.memmap(tmp_path / "x", np.float32, "r", shape=XS.shape)


SOURCES = {
    "numpy": (lambda _: XS, (XS,)),
    "memory-mapped": (memory_mapped, (XS,)),
    "tuple": (lambda _: (XS, YS), (XS, YS)),
    "dict": (lambda _: Source(lambda i: {"x": XS[i], "y": YS[i]}), ({"x": XS, "y": YS},)),
    "columns": (lambda _: Source(lambda i: {"y": YS[i].tolist()}), ({"y": YS.astype(float)},)),
    "arguments": (lambda _: Source(lambda i: (XS[i], YS[i])), (XS, YS)),
    "pair": (lambda _: Source(lambda i: Pair(XS[i], YS[i])), (Pair(XS, YS),)),
    "jax": (lambda _: Source(lambda i: jax.numpy.asarray(XS)[i]), (XS,)),
    "columns by name": (lambda _: {"x": XS, "y": YS}, ({"x": XS, "y": YS},)),
    "nested": (lambda _: (XS, {"a": {"y": YS}}), (XS, {"a": {"y": YS}})),
    "records": (lambda _: dp.Records(list(zip(XS, YS, strict=True))), (XS, YS)),
    "decoded": (
        lambda _: dp.Records(Stored(), lambda text: {"y": np.float32(text)}),
        ({"y": YS},),
    ),
    "records with lists": (
        lambda _: dp.Records([{"x": x.tolist()} for x in XS]),
        ({"x": XS.astype(float)},),
    ),
    "records of many": (lambda _: dp.Records(Bulk(), np.float32), (YS,)),
    "mixed": (lambda _: (XS, Source(lambda i: {"y": YS[i]})), (XS, {"y": YS})),
}


@pytest.mark.parametrize("name", SOURCES)
def test_sources(name, tmp_path):
    make, values = SOURCES[name]
    for step, batch in enumerate(batches_of(make(tmp_path), sampler(), 2)):
        wanted = jax.tree.map(lambda value, step=step: expected(value, step), values)
        assert jax.tree.structure(batch.examples) == jax.tree.structure(wanted)
        for found, rows in zip(
            jax.tree.leaves(batch.examples), jax.tree.leaves(wanted), strict=True
        ):
            assert found.dtype == rows.dtype
            np.testing.assert_array_equal(found, rows)
        np.testing.assert_array_equal(batch.is_padding_example, sampler().batch(step)[1])


def test_nothing_is_read_for_padding():
    source = Source(lambda i: XS[i] + 1)
    (batch,) = batches_of(source, sampler(), 1)
    indices, mask = sampler().batch(0)
    assert mask.any()
    _, asked = source.asked  # the first is of an example, to see what it looks like
    np.testing.assert_array_equal(asked, np.sort(indices[~mask]))  # and forward
    assert np.all(batch.examples[0][mask] == 0)
    assert np.all(batch.examples[0][~mask] != 0)


def test_an_empty_draw_reads_nothing():
    rare = sampler(sampling_prob=1e-9)
    source = Source(lambda i: {"x": XS[i], "label": np.arange(NUM_EXAMPLES)[i]})
    (batch,) = batches_of(source, rare, 1)
    assert len(source.asked) == 1  # an example, to see what it looks like
    assert batch.is_padding_example.all()
    assert batch.examples[0]["x"].shape == (rare.capacity, 4)
    assert batch.examples[0]["label"].dtype == np.arange(1).dtype
    assert not batch.examples[0]["x"].any()


def test_a_host_reads_only_what_it_owns():
    mine = PoissonSampler(NUM_EXAMPLES, 0.5, seed=SEED, hosts=2, host=1)
    source = Source(lambda i: XS[i])
    list(batches_of(source, mine, 5))
    assert set(np.concatenate(source.asked).tolist()) <= set(mine.owned)


def test_the_next_batch_is_read_while_a_step_runs():
    """The step of batch t returns only once batch t + 1 has been read."""
    reads = [threading.Event() for _ in range(4)]
    count = iter(range(-1, 100))  # the first read is of an example, to see what it looks like

    def read(indices):
        number = next(count)
        if number >= 0:
            reads[number].set()
        return XS[indices]

    for step, _ in enumerate(batches_of(Source(read), sampler(), 4)):
        if step < 3:
            assert reads[step + 1].wait(timeout=300)
    assert next(count) == 4  # and no further


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_batches_of_several_readers_come_in_order(ahead):
    """Whoever is slow; and no more are read than are asked for."""
    first, begun = threading.Event(), []

    def read(indices):
        begun.append(len(indices))
        if len(begun) == 2:  # of the first step, after that of an example
            first.wait(timeout=60 if ahead > 1 else 0.1)
        elif len(begun) > 2:
            first.set()  # another reader goes on meanwhile
        return XS[indices]

    for step, batch in enumerate(batches_of(Source(read), sampler(), 10, ahead)):
        np.testing.assert_array_equal(batch.examples[0], expected(XS, step))
        assert len(begun) <= 1 + (step + 1) + ahead
    assert step == 9
    assert len(begun) == 11


def test_a_loop_that_ends_early_waits_for_no_reader():
    reads = []

    def read(indices):
        reads.append(None)
        return XS[indices]

    batches = batches_of(Source(read), sampler(), 100, 30)
    next(batches)
    batches.close()
    assert len(reads) <= 1 + 1 + 31
    assert not [t for t in threading.enumerate() if t.name.startswith("eqx_dp-data")]


RAISED = "raised"
SHAPE = "gave examples of another shape, dtype or structure than before"
NUMBER = "gave something else than arrays of numbers"
FAULTS = [
    (lambda x, i: 1 / 0, f"{RAISED} ZeroDivisionError"),
    (lambda x, i: x[:, :3], SHAPE),
    (lambda x, i: x.astype(np.float64), SHAPE),
    (lambda x, i: x[:0], "gave an array without one entry for each example in front"),
    (lambda x, i: 1.0, "gave an array without one entry for each example in front"),
    (lambda x, i: x.astype(str), NUMBER),
    (lambda x, i: x.astype(object), NUMBER),
    (lambda x, i: (), NUMBER),
    (lambda x, i: [list(range(n)) for n in range(len(i) + 1)], f"{RAISED} ValueError"),
    (lambda x, i: {"x": x}, SHAPE),
]


@pytest.mark.parametrize(("bad", "kind"), FAULTS)
def test_a_fault_is_told_without_the_example(bad, kind):
    indices, mask = sampler().batch(1)
    culprit = int(indices[~mask][3])
    good = Source(lambda i: XS[i])
    source = Source(lambda i: bad(XS[i], i) if culprit in i else XS[i])
    with pytest.raises(dp.DataError) as caught:
        list(batches_of((good, source), sampler(), 2))
    assert f"data[1], a Source: the source {kind}" in str(caught.value)
    assert not re.search(r"\d", str(caught.value).replace("data[1]", ""))
    details = caught.value.private_details()
    assert re.match(rf"data\[1\] at \[.*\b{culprit}\b.*\]: the source ", details)


def test_what_a_source_says_is_not_shown_unasked():
    """Neither in the message nor in what Python prints of it; the one who asks is told."""
    culprit = int(sampler().batch(1)[0][~sampler().batch(1)[1]][3])

    def read(indices):
        if culprit in indices:
            try:
                raise KeyError("born 1970")
            except KeyError:
                raise ValueError("name=Alice") from None
        return XS[indices]

    with pytest.raises(dp.DataError) as caught:
        list(batches_of(Source(read), sampler(), 2))
    error = caught.value
    assert error.__cause__ is None
    assert error.__context__ is None
    told = "".join(traceback.format_exception(error)) + repr(error) + "".join(map(str, error.args))
    for private in ("Alice", "1970", f" {culprit},"):
        assert private not in told
    assert "ValueError" in str(error)
    assert "name=Alice" in error.private_details()
    assert re.search(rf"at \[.*\b{culprit}\b", error.private_details())


def test_a_fault_of_a_batch_as_a_whole_does_not_tell_how_many_there_are():
    source = Source(lambda i: XS[i] if len(i) == 1 else XS[i][:-1])
    count = np.sum(~sampler().batch(0)[1])
    with pytest.raises(dp.DataError) as caught:
        next(batches_of(source, sampler(), 1))
    assert str(count) not in str(caught.value)
    assert f"for {count} examples" in caught.value.private_details()


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            lambda i: YS[:1] if i else YS[:2],
            "records differ in shape or dtype",
        ),
        (lambda i: {"x": 1.0} if i else 1.0, "records differ in structure"),
        (lambda i: [1.0][i], "list index out of range"),
    ],
)
def test_records_at_fault_are_not_told(record, said):
    class Faulty(Stored):
        def __getitem__(self, index):
            return record(min(index, 1))

    everything = PoissonSampler(NUM_EXAMPLES, 1.0, seed=SEED)
    with pytest.raises(dp.DataError, match="data, a Records: the source raised") as caught:
        next(batches_of(dp.Records(Faulty()), everything, 1))
    assert said in caught.value.private_details()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((iter([1]),), "records must have a length and be indexed by whole numbers"),
        (({"x": XS},), "records must have a length"),
        (([1], 3), "decode must be a function, decode"),
    ],
)
def test_what_are_no_records(arguments, said, unchecked):
    with pytest.raises(ValueError, match=said):
        dp.Records(*arguments)


def test_the_first_example_is_looked_at():
    with pytest.raises(dp.DataError, match="data, a Source: the source raised KeyError"):
        Batches(Source(lambda i: {}["x"]), PoissonSampler(NUM_EXAMPLES, 0.5))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (list(range(NUM_EXAMPLES)), "data is a list: a source has a length"),
        ({0: 1}, "data[0] is a int"),
        ({}, "data is an empty dictionary"),
        ({"x": XS, "y": YS[:10]}, "data['y'] holds 10 examples"),
        ((XS, {"y": [1]}), "data[1]['y'] is a list"),
        (dp.Records([1, 2]), "data holds 2 examples"),
        ("a file", "data is a str"),
        (iter([1]), "data is a list_iterator"),
        ((XS, [1]), "data[1] is a list"),
        ((), "data is an empty tuple"),
        (XS[:-1], "data holds 63 examples, and the step was made with num_examples=64"),
        ((XS, YS[:10]), "data[1] holds 10 examples"),
        (Pair(XS, YS), "data holds 2 examples"),  # one source, of as many as it has fields
    ],
)
def test_what_is_no_source(data, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        dp.Trainer(runs.make(), data)
