"""Every layer of `eqx.nn` by book-keeping, each way to its norm, leaf by leaf."""

import pytest

from tests.gradients.engine import agreement, layers, surveys


@pytest.mark.parametrize("way", ["ghost", "kept"])
@pytest.mark.parametrize("name", layers.ALL)
def test_agrees_with_the_oracle(name: str, way: str, monkeypatch: pytest.MonkeyPatch):
    surveys.force(monkeypatch, way)
    agreement.check(layers.case(name), by_leaf=True)


@pytest.mark.parametrize("name", layers.SITES)
def test_nothing_is_whole(name: str):
    case = layers.case(name)
    assert surveys.whole(case) == {}
    # Nor lost on the way: every parameter has a use.
    assert all(surveys.kinds(case).values())
