"""What is shown: `help(dp)`, `repr`, tables, values in errors; no data, no secret is in it."""

import functools
import html
import pydoc
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import eqx_dp as dp
from eqx_dp.shown import shown
from tests.test_wrong_arguments import GRAD_FN, MODEL, PLAN, X, loss, made

SEED = 0x1234_5678_9ABC_DEF0_0FED_CBA9_8765_4321
# Another value, beside that of X, that no figure of a report has by chance.
Y, STEP = np.full((8, 1), 2.4689, np.float32), made(seed=SEED)
POLICY = dp.load_policy("float32")
PER_EXAMPLE = dp.PerExample(jnp.full(8, 0.7531), jnp.full(8, 2.4689), {"hit": jnp.ones(8)})

OBJECTS = {
    "step": lambda: STEP,
    "trainer": lambda: dp.Trainer(STEP, (X, Y)),
    "state": lambda: STEP.init(MODEL),
    "grad": lambda: GRAD_FN,
    "value and grad": lambda: dp.filter_value_and_clipped_grad(loss, l2_clip_norm=1.0),
    "per example": lambda: PER_EXAMPLE,
    "plan": lambda: PLAN,
    "sampler": lambda: PLAN.sampler(8, seed=SEED),
    "noise": lambda: PLAN.privatizer(GRAD_FN.of_samples(PLAN.batches), key=SEED).init(MODEL),
}
TABLES = {
    "explain": lambda: dp.explain(GRAD_FN.of_samples(None), MODEL, X, Y),
    "memory": lambda: dp.plan_memory(GRAD_FN, MODEL, X, Y, compiled=False),
    "precision": lambda: dp.check_precision(GRAD_FN, MODEL, X, Y, policy=POLICY),
    "privacy": lambda: dp.check_privacy(lambda x: x.sum(), X, private=(0,)),
    "neighbours": lambda: dp.audit.neighbours(GRAD_FN, MODEL, X, Y),
}


def test_help_is_short_and_names_all_in_groups():
    assert len(pydoc.plain(pydoc.render_doc(dp)).splitlines()) < 80
    named = set(re.findall(r"\w+", " ".join(re.findall(r"^    .*", dp.__doc__, re.M))))
    assert named == {*dir(dp)} - {"__version__"}


@pytest.mark.parametrize("name", OBJECTS)
def test_a_repr_is_one_short_line_without_values(name):
    text = repr(OBJECTS[name]())
    assert "\n" not in text
    assert len(text) < 330
    assert not re.search(r"Array\(|0\.7531|2\.4689| object at ", text)
    assert str(SEED) not in text
    assert f"{SEED:x}" not in text


@pytest.mark.parametrize("name", TABLES)
def test_a_table_shows_in_a_notebook(name):
    table = TABLES[name]()
    shown = table._repr_html_()
    assert shown == f"<pre>{html.escape(str(table))}</pre>"
    assert len(repr(table)) < 330
    assert "\n" not in repr(table)
    assert not re.search(r"0\.7531|2\.4689", repr(table) + shown)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((x, repr(x)) for x in (None, True, 3, 0.5, "text", PartitionSpec("data"), (None, "a"))),
        (np.full((2, 3), 7.5), "an array of float64 with shape (2, 3)"),
        (jax.random.key(0), "an array of key<fry> with shape ()"),
        ((1, np.full(2, 7)), "(1, an array of int64 with shape (2,))"),
        ([np.zeros(2)] * 9, "a value of type list"),
        ("x" * 81, "a value of type str"),
        (SEED, "a whole number beyond 2^64"),
        (functools.partial(print, np.full(2, 7)), "a value of type partial"),
        (MODEL, "a value of type Linear"),
        (eqx.nn.Linear, "the type Linear"),
    ],
)
def test_what_an_error_shows_of_a_value(value, expected):
    assert shown(value) == expected
