"""Every layer of `eqx.nn` by book-keeping, each way to its norm, leaf by leaf."""

import pytest

from tests.gradients.engine import agreement, layers, surveys
from tests.models import Case


@pytest.mark.parametrize("way", ["ghost", "kept"])
@pytest.mark.parametrize("case", layers.all_cases(), ids=lambda case: case.name)
def test_agrees_with_the_oracle(case: Case, way: str, monkeypatch: pytest.MonkeyPatch):
    surveys.force(monkeypatch, way)
    agreement.check(case, by_leaf=True)


@pytest.mark.parametrize("case", layers.site_cases(), ids=lambda case: case.name)
def test_nothing_is_whole(case: Case):
    assert surveys.whole(case) == {}
    # Nor lost on the way: every parameter has a use.
    assert all(surveys.kinds(case).values())
