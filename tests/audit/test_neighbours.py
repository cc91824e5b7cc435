"""Honest gradients and steps pass, whatever they are made of; what was found is shown and kept."""

import json

import equinox as eqx
import jax
import numpy as np
import pytest

import eqx_dp as dp
from eqx_dp import audit
from tests import models
from tests.audit import by_hand as steps
from tests.audit.by_hand import BATCH, CLIP_NORM, LOSS, MASK, MODEL, STDDEV, audited, clipped
from tests.checks.privacy_steps import Noise, with_normals
from tests.tiers import curated
from tests.training import runs


def gradient_of(case, make=dp.filter_clipped_grad, size=5, call=None, **options):
    """The audit of a case's clipped gradient."""
    options = {"l2_clip_norm": 0.2, "filter_spec": case.filter_spec} | options
    grad_fn = make(case.loss, **options)
    return audit.neighbours(grad_fn, case.model, *case.batch(size), **(call or {}))


def assert_passes(report, least=0.9):
    """Without a violation, and close enough to the bound for that to mean something."""
    assert report.ok, str(report)
    assert least <= report.largest <= 1 + report.rounding
    assert report.rounding < 1e-4


def with_aux(model, x, label):
    return models.mlp_loss(model, x, label), {"logits": model(x)}


MASKED = {"key": jax.random.key(3), "is_padding_example": np.array([0, 1, 0, 0, 1], bool)}
VALUES = dp.filter_value_and_clipped_grad
CASES = {
    "ghost": (models.mlp(), {"method": "ghost"}),
    "bfloat16": (models.mlp(), {"policy": dp.load_policy("mixed_bfloat16"), "make": VALUES}),
    "frozen leaves": (models.frozen_mlp(), {}),
    "a loss that draws": (models.dropout(), {"call": MASKED, "microbatch_size": 2}),
    "aux": (models.mlp()._replace(loss=with_aux), {"has_aux": True}),
    "several clip norms": (
        models.linear_regression(),
        {"l2_clip_norm": {"weight": 0.3, "bias": 0.1}, "normalize_by": 3.0},
    ),
    "CNN": (models.cnn(), {"microbatch_size": 2, "size": 7}),
    "GPT": (models.gpt(), {"make": VALUES}),
}


@pytest.mark.parametrize("name", curated(CASES, ["a loss that draws", "several clip norms"]))
def test_gradients(name):
    case, options = CASES[name]
    assert_passes(gradient_of(case, **options))


@pytest.mark.parametrize("relation", dp.NeighboringRelation, ids=lambda relation: relation.name)
def test_relations(relation):
    report = gradient_of(models.linear_regression(), call={"neighboring_relation": relation})
    assert_passes(report, least=0.8)
    assert {pair.others for pair in report.pairs} == {"as given", "hostile", "padding"}
    without = [pair for pair in report.pairs if pair.example.startswith("none -> ")]
    assert len(without) == (0 if relation.name == "REPLACE_ONE" else len(report.pairs))


# Steps.


@pytest.mark.slow
def test_a_made_step_is_not_used_up():
    step = runs.make(policy=dp.load_policy("mixed_bfloat16"), microbatch_size=3)
    state = step.init(runs.small_model())
    mask = np.arange(8) == 5
    report = audit.neighbours(step, state, runs.XS[:8], runs.YS[:8], is_padding_example=mask)
    assert_passes(report)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(eqx.filter(state, eqx.is_array)))


def by_hand(model, key, *batch):
    return with_normals(clipped(model, *batch), Noise(None, key), STDDEV)


RELEASED = {
    "a sum without noise": (clipped,),
    "noise of another kind": (jax.jit(by_hand), jax.random.key(0)),
}


@pytest.mark.parametrize("name", RELEASED)
def test_what_is_released_may_be_named(name):
    assert_passes(audited(*RELEASED[name], release=lambda result: result))


# The report.


def test_a_bound_that_is_not_tested_is_named():
    report = gradient_of(models.linear_regression(), l2_clip_norm=1e30)
    assert report.ok
    assert report.largest < 0.5
    assert "no example came near the bound" in str(report)


def total_loss(model, x, y):
    return jax.vmap(LOSS, (None, 0, 0))(model, x, y).sum()


@pytest.mark.slow
def test_a_report_is_a_table_and_a_file_in_which_infinity_is_null(tmp_path):
    report = audited(*steps.stepped(lambda model, x, y, mask: jax.grad(total_loss)(model, x, y)))
    assert "movement" in steps.rules_of(report)
    assert report.largest == np.inf
    head = f"on {len(report.pairs)} pairs of ADD_OR_REMOVE_ONE neighbors"
    assert head in str(report).splitlines()[0]
    assert "what to do: Clip every example on its own" in str(report)
    file = tmp_path / "audit.json"
    file.write_text('{"canaries": {"kept": 1}, "neighbours": {"old": 1}}')
    report.save(tmp_path)
    found = json.loads(file.read_text())
    assert found["canaries"] == {"kept": 1}
    assert (found["neighbours"]["ok"], found["neighbours"]["largest"]) == (False, None)
    assert len(found["neighbours"]["pairs"]) == len(report.pairs)


# Bad input.

GRAD_FN = dp.filter_clipped_grad(LOSS, l2_clip_norm=CLIP_NORM)
X, Y = BATCH
HOW = {"private": (1, 2), "padding": 3, "sensitivity": 1.0}


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((clipped, MODEL, X, Y, MASK), {}, "say which arguments hold examples"),
        ((clipped, MODEL, X, Y, MASK), HOW | {"padding": None}, "say which arguments"),
        ((clipped, MODEL, X, Y, MASK), HOW | {"sensitivity": np.inf}, "finite number"),
        ((clipped, MODEL, X, Y, MASK), HOW | {"sensitivity": 0.0}, "above 0"),
        ((clipped, MODEL, X, Y, MASK), HOW, "adds no noise"),
        ((GRAD_FN, MODEL, X, Y), {"private": (1,)}, "are known: leave them out"),
        ((runs.make(),), {}, "give model or state"),
        ((GRAD_FN, MODEL, X, Y[:5]), {}, "equally many examples"),
        ((GRAD_FN, MODEL, X[:1], Y[:1]), {}, "at least 2"),
        ((GRAD_FN, MODEL, X, Y), {"is_padding_example": np.ones(6, bool)}, "not True everywhere"),
        ((GRAD_FN, MODEL, X, Y), {"is_padding_example": np.ones(6)}, "the mask boolean"),
    ],
)
def test_bad_input(args, options, message):
    with pytest.raises(ValueError, match=message):
        audit.neighbours(*args, **options)


def test_a_step_without_noise_has_no_release():
    step = runs.make(dp.PrivacyPlan(0.25, 10, 0.0, 1e-5))
    with pytest.raises(ValueError, match=r"step\.grad_fn"):
        audit.neighbours(step, runs.small_model(), runs.XS[:8], runs.YS[:8])
    assert_passes(audit.neighbours(step.grad_fn, runs.small_model(), runs.XS[:8], runs.YS[:8]))
