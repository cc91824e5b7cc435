"""Sources of all kinds give their batches a step ahead, and those at fault are named."""

import re
import threading
import time
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


def expected(values, step=0, **options):
    """Rows at the places of a batch, zeros where there are none."""
    indices, mask = sampler(**options).batch(step)
    rows = np.zeros((len(indices), *values.shape[1:]), values.dtype)
    rows[~mask] = values[indices[~mask]]
    return rows


SOURCES = {
    "dict": (Source(lambda i: {"x": XS[i], "y": YS[i]}), ({"x": XS, "y": YS},)),
    "columns": (Source(lambda i: {"y": YS[i].tolist()}), ({"y": YS.astype(float)},)),
    "arguments": (Source(lambda i: (XS[i], YS[i])), (XS, YS)),
    "pair": (Source(lambda i: Pair(XS[i], YS[i])), (Pair(XS, YS),)),
    "jax": (Source(lambda i: jax.numpy.asarray(XS)[i]), (XS,)),
    "bfloat16": (XS.astype(jax.numpy.bfloat16), (XS.astype(jax.numpy.bfloat16),)),
    "columns by name": ({"x": XS, "y": YS}, ({"x": XS, "y": YS},)),
    "records": (dp.Records(list(zip(XS, YS, strict=True))), (XS, YS)),
    "decoded": (dp.Records(Stored(), lambda y: {"y": np.float32(y)}), ({"y": YS},)),
    "mixed": ((XS, Source(lambda i: {"a": {"y": YS[i]}})), (XS, {"a": {"y": YS}})),
}


@pytest.mark.parametrize("name", SOURCES)
def test_sources(name):
    source, values = SOURCES[name]
    for step, batch in enumerate(batches_of(source, sampler(), 2)):
        wanted = jax.tree.map(lambda value, step=step: expected(value, step), values)
        assert jax.tree.structure(batch.examples) == jax.tree.structure(wanted)
        for found, rows in zip(*map(jax.tree.leaves, (batch.examples, wanted)), strict=True):
            np.testing.assert_array_equal(found, rows, strict=True)
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


def test_a_host_reads_only_what_it_owns():
    mine = PoissonSampler(NUM_EXAMPLES, 0.5, seed=SEED, hosts=2, host=1)
    source = Source(lambda i: XS[i])
    list(batches_of(source, mine, 5))
    assert set(np.concatenate(source.asked).tolist()) <= set(mine.owned)


@pytest.mark.parametrize("ahead", [1, 5])
def test_the_next_batches_are_read_while_a_step_runs(ahead):
    """In their order, whichever reader is slow; no more are read than are asked for."""
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
        end = time.monotonic() + 300
        while len(begun) < min(step + 2 + ahead, 11):
            assert time.monotonic() < end
            time.sleep(0.001)
        assert len(begun) <= step + 2 + ahead
    assert (step, len(begun)) == (9, 11)


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


def raised_while_another_was_handled(x, i):
    try:
        raise KeyError("born 1970")
    except KeyError:
        raise ValueError("name=Alice") from None


SHAPE = "gave examples of another shape, dtype or structure than before"
NUMBER = "gave something else than arrays of numbers"
FAULTS = [
    (lambda x, i: 1 / 0, "raised ZeroDivisionError"),
    (lambda x, i: x[:, :3], SHAPE),
    (lambda x, i: x.astype(np.float64), SHAPE),
    (lambda x, i: {"x": x}, SHAPE),
    (lambda x, i: x[:0], "gave an array without one entry for each example in front"),
    (lambda x, i: x.astype(str), NUMBER),
    (lambda x, i: (), NUMBER),
    (raised_while_another_was_handled, "raised ValueError"),
]


@pytest.mark.parametrize(("bad", "kind"), FAULTS)
def test_a_fault_is_told_without_the_example(bad, kind):
    """Neither in the message nor in what Python prints of it; the one who asks is told."""
    indices, mask = sampler().batch(1)
    culprit = int(indices[~mask][3])
    good = Source(lambda i: XS[i])
    source = Source(lambda i: bad(XS[i], i) if culprit in i else XS[i])
    with pytest.raises(dp.DataError) as caught:
        list(batches_of((good, source), sampler(), 2))
    error = caught.value
    assert f"data[1], a Source: the source {kind}" in str(error)
    assert error.__cause__ is error.__context__ is None
    shown = (str(error), repr(error), *map(str, error.args), *traceback.format_exception(error))
    assert not [x for x in shown if "Alice" in x or "1970" in x or f" {culprit}," in x]
    assert not re.search(r"\d", str(error).replace("data[1]", ""))
    details = error.private_details()
    assert re.match(rf"data\[1\] at \[.*\b{culprit}\b.*\]: the source ", details)
    assert ("name=Alice" in details) == (bad is raised_while_another_was_handled)


def test_a_fault_of_a_batch_as_a_whole_does_not_tell_how_many_there_are():
    source = Source(lambda i: XS[i] if len(i) == 1 else XS[i][:-1])
    count = np.sum(~sampler().batch(0)[1])
    with pytest.raises(dp.DataError) as caught:
        next(batches_of(source, sampler(), 1))
    assert str(count) not in str(caught.value)
    assert f"for {count} examples" in caught.value.private_details()


def trainer(data):
    return dp.Trainer(runs.make(), data)


@pytest.mark.parametrize(
    ("make", "data", "message"),
    [
        (dp.Records, iter([1]), "records must have a length and be indexed by whole numbers"),
        (trainer, list(range(NUM_EXAMPLES)), "data is a list: a source has a length"),
        (trainer, {0: 1}, "data[0] is a int"),
        (trainer, {}, "data is an empty dictionary"),
        (trainer, (XS, {"y": [1]}), "data[1]['y'] is a list"),
        (trainer, {"x": XS, "y": YS[:10]}, "data['y'] holds 10 examples"),
        (trainer, dp.Records([1, 2]), "data holds 2 examples"),
        (trainer, Pair(XS, YS), "data holds 2 examples"),  # one source, not one for each field
        (trainer, XS[:-1], "data holds 63 examples, and the step was made with num_examples=64"),
    ],
)
def test_what_is_no_source(make, data, message, unchecked):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(data)


def test_the_first_example_is_looked_at():
    with pytest.raises(dp.DataError, match="data, a Source: the source raised KeyError"):
        trainer(Source(lambda i: {}["x"]))
