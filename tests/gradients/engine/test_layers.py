"""Every layer of `eqx.nn` by book-keeping, leaf by leaf."""

import pytest

from tests.gradients.engine import agreement, layers, uses

pytestmark = pytest.mark.sampled(6)


@pytest.mark.sampled(12)
@agreement.EACH_METHOD
@pytest.mark.parametrize("name", layers.ALL)
def test_agrees_with_the_oracle(name: str, method: str, monkeypatch: pytest.MonkeyPatch):
    uses.force(monkeypatch, "factored")
    agreement.check(layers.case(name), by_leaf=True, methods=[method])


# Where there is a choice of ways; site by site both are compared in the tests of the kinds.
CHOICE = ("linear_tokens", "conv2d_all", "lstm_scan")


@pytest.mark.parametrize("name", CHOICE)
def test_agrees_with_the_oracle_with_every_gradient_kept(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    uses.force(monkeypatch, "formed")
    agreement.check(layers.case(name), by_leaf=True)


@pytest.mark.parametrize("name", layers.SITES)
def test_nothing_is_whole(name: str):
    layers.case(name)
    # Nor lost on the way: every parameter has a use.
