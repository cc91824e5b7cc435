"""Every layer of `eqx.nn`, leaf by leaf, and whole models."""

import pytest

from tests.gradients.engine import agreement, layers, models, uses


@pytest.mark.sampled(12)
@agreement.EACH_METHOD
@pytest.mark.parametrize("name", layers.ALL)
def test_layers_agree_with_the_oracle(name: str, method: str, monkeypatch: pytest.MonkeyPatch):
    uses.force(monkeypatch, "factored")
    agreement.check(layers.case(name), by_leaf=True, methods=[method])


@pytest.mark.sampled(12)
@agreement.EACH_METHOD
@pytest.mark.parametrize("make", models.MODELS, ids=lambda make: make.__name__)
def test_models_agree_with_the_oracle(make, method):
    """With the ways that the engine chooses."""
    agreement.check(make(), size=4, methods=[method])


@pytest.mark.slow
@agreement.EACH_METHOD
def test_a_stacked_transformer(method, monkeypatch):
    """The embedding is the head; between them a scan of checkpoints."""
    uses.force(monkeypatch, "factored")
    agreement.check(models.stacked_gpt(), size=4, by_leaf=True, methods=[method])


def test_what_is_frozen_has_no_uses():
    kinds = uses.kinds(models.low_rank_gpt())
    assert len(kinds) == 4
    assert set(map(tuple, kinds.values())) == {("contraction",)}
