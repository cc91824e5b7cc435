"""The page: what it says, that it is one file, and that nothing in it is anybody else's HTML."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

import eqx_dp as dp
from eqx_dp import report
from eqx_dp.report import page_of
from eqx_dp.report.run import read_run
from tests.report.made import STEPS, Page, changed, copied, ledger_of, trained
from tests.tiers import curated
from tests.training import runs

PLAN = runs.plan_of()
HOSTILE = {
    "tags": "</title></style><script>alert(1)</script>",
    "attributes": '" onload="alert(1)" x=\'',
    "templates": "${title} $body {0} %s {{ 7 * 7 }} $\\frac{",
    "entities": "<img src=x onerror=alert(1)>&lt;b&gt;]]></svg>--><!--",
    "controls": "\x01\x1b[31m\u202egnp.exe",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("a run"))


@pytest.fixture
def copy(run, tmp_path):
    return copied(run, tmp_path / "copy")


def text_of(directory):
    return Page(page_of(directory)).text()


# What it says.


@pytest.mark.slow
def test_it_says_what_the_run_says_and_changes_nothing(run):
    files = lambda: {x: x.read_bytes() for x in run.rglob("*") if x.is_file()}  # noqa: E731
    before, text = files(), text_of(run)
    assert files() == before
    for part in (
        run.name,
        "64 examples",
        f"{PLAN.epsilon(STEPS):.3g}"[:4],
        "1 in 100,000",
        "an example is added or removed",
        *json.loads((run / "privacy.json").read_text())["does_not_cover"],
        "Nothing was found that breaks the promise.",
        "This was not done.",
        "After step 6: 0.5.",
        "After step 6: not finite.",
        json.loads(ledger_of(run).read_text())["policy"],
        dp.__version__,
        "times as likely with one example in the data as without it",
    ):
        assert part in text
    assert "\N{MULTIPLICATION SIGN}" not in text
    assert "subtract the noise" not in text


@pytest.mark.slow
def test_steps_that_may_have_been_released_count(run, copy):
    """Those of a process that was killed, and of other starts."""
    found = read_run(run)
    assert (found.plan, found.released, found.epsilon) == (PLAN, STEPS, PLAN.epsilon(STEPS))
    plan = json.loads(PLAN.to_json()) | {"unit": {"kind": "users", "per_step": 2}}
    changed(ledger_of(copy), steps=8, ended=False, plan=plan)
    assert read_run(copy).epsilon == PLAN.epsilon(8)
    entry = json.loads(ledger_of(copy).read_text())
    second = entry | {"start": 1, "steps": 1, "randomness": "seeded", "policy": None}
    (copy / "ledger" / "another.json").write_text(json.dumps(second))
    found = read_run(copy)
    assert (found.released, len(found.starts), found.starts[-1]["policy"]) == (9, 2, None)
    text = text_of(copy)
    assert "Number of starts: 2." in text
    assert "One example is protected: all rows of one user." in text
    assert "Anyone with the seed can subtract the noise." in text


def test_epsilon_is_rounded_up(run):
    (shown,) = re.findall(r"Here epsilon is (\d+\.\d+),", text_of(run))
    assert PLAN.epsilon(STEPS) <= float(shown) < 1.001 * PLAN.epsilon(STEPS)


def test_a_run_without_noise(tmp_path):
    runs.trainer(tmp_path, runs.make(dp.PrivacyPlan(0.25, 3, 0.0, 1e-5))).run(runs.small_model())
    text = text_of(tmp_path)
    assert "without a promise of privacy" in text
    assert "There is no promise of privacy: epsilon is infinite." in text
    assert "What an attack can find out" not in text


def test_what_checks_and_audits_found_is_shown_whatever_it_is(copy):
    privacy = {
        "ok": False,
        "violations": [{"rule": "noise", "found": "no noise"}, {"rule": "padding", "more": 3}],
        "releases": [],
        "notes": ["one", 2, None],
        "within": {"sensitivity": 1.5, "deep": {"a": [1]}},
        "times": 1234567,
        "is_sharded": True,
        "huge": 10**400,
        "infinite": float("inf"),
    }
    changed(copy / "checks.json", privacy=privacy)
    changed(ledger_of(copy), unsafe=True)
    text = text_of(copy)
    for part in ("no noise", "padding", "1,234,567", "sensitivity: 1.5", "'a': [1]", "yes", "inf"):
        assert part in text
    assert "Something is not as it should be." in text
    assert "The policy is unsafe: sums" in text
    assert "A check or an audit found something" in text


VERDICTS = {
    "good": ({"ok": True, "rows": [{"row": row} for row in range(1000)]}, "And 800 more"),
    "bad": ({"ok": False}, "Something is not as it should be"),
    "undecided": ({"ok": False, "undecided": [{"rule": "x"}]}, "could not be decided"),
    "silent": ({"lower": 2.0, "exceeds_plan": True}, "could not be decided"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_audits_have_a_verdict(copy, name):
    found, words = VERDICTS[name]
    changed(copy / "audit.json", canaries={"gradient": found})
    text = text_of(copy)
    assert "canaries, gradient" in text
    assert words in text


def test_audits_of_the_library_are_read(copy):
    grad_fn = dp.filter_clipped_grad(runs.loss, l2_clip_norm=1.0)
    dp.audit.neighbours(grad_fn, runs.small_model(), runs.XS[:4], runs.YS[:4]).save(copy)
    data = (np.zeros((30, 2), np.float32),)
    planted = dp.audit.canaries.plant_gradients(data, 20, norm=1.0, seed=0)
    planted.audit(np.zeros(20), PLAN, attack="loss").save(copy)
    is_ok = {name: one["ok"] for name, one in read_run(copy).audits.items()}
    assert is_ok == {"neighbours": True, "canaries, loss": True}
    assert "none -> x 1024" in text_of(copy)


# What is refused.


def test_no_run(tmp_path):
    (tmp_path / "file").touch()
    for directory in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(ValueError, match="found no run with a step"):
            page_of(directory)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\xff"])
@pytest.mark.parametrize("name", ["ledger/another.json", "checks.json", "audit.json"])
def test_files_that_are_damaged(copy, name, text):
    (copy / name).write_text(text, "latin-1")
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        read_run(copy)


# What it is made of.


@pytest.mark.parametrize("kind", curated(HOSTILE, ["tags", "attributes"]))
def test_whatever_comes_from_the_run_is_text(copy, kind):
    """Names and texts of all kinds, wherever there can be one: the same elements as without."""

    def page(name, folder):
        directory = copied(copy, copy.parent / folder)
        row = {name: name, "where": name}
        check = {"ok": False, name: [row], "notes": [name], "facts": row, f"a{name}": name}
        changed(directory / "checks.json", privacy=check, precision=check)
        changed(directory / "audit.json", neighbours=check, canaries={name: check})
        changed(ledger_of(directory), policy=name, made_by={"jax": name, name: name})
        (directory / "metrics.jsonl").write_text(json.dumps({"step": 7, name: 0.5}) + "\n")
        return Page(page_of(directory))

    hostile, harmless = page(HOSTILE[kind], kind), page("x", "harmless")
    shape = lambda page: [(tag, [*attributes]) for tag, attributes in page.elements]  # noqa: E731
    assert shape(hostile) == shape(harmless)
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e\ud800-\udfff]", "".join(hostile.texts))


def test_it_is_one_file_that_needs_no_network_and_no_scripts(run):
    found = Page(page_of(run))
    assert not found.tags() & {"script", "link", "img", "iframe", "object", "base", "form"}
    for _, attributes in found.elements:
        assert not any(name.startswith("on") or name == "src" for name in attributes)
        assert attributes.get("href", "#").startswith("#")
        assert attributes.get("xlink:href", "#").startswith("#")
        assert "url(h" not in attributes.get("style", "")
    (policy,) = (a["content"] for _, a in found.elements if "http-equiv" in a)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    style = (Path(report.__file__).parent / "page.css").read_text()
    assert "url(" not in style
    assert "@import" not in style


# What an attack can find out: above every attack, and hardly more than the best.


ALARMS = np.linspace(0, 1, 1001)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["REPLACE_ONE", "ADD_OR_REMOVE_ONE", "REPLACE_SPECIAL"])
def test_without_sampling_it_is_that_of_two_normal_distributions(name):
    """n steps with noise multiplier s are as one with s / sqrt(n) (Dong et al. 2022)."""
    relation = dp.NeighboringRelation[name]
    found = dp.PrivacyPlan(1.0, 9, 2.0, 1e-5, relation).trade_off(4)
    mu = 2 / 2.0
    best = norm.cdf(norm.ppf(ALARMS) + mu)
    assert np.all(found.found(ALARMS) >= best)
    assert np.max(found.found(ALARMS) - best) < 0.02
    assert found.right >= norm.cdf(mu / 2) >= found.right - 0.01
    assert found.advantage == pytest.approx(2 * found.right - 1)
    assert mu <= found.mu < 1.005 * mu
    assert found.distance <= 0.002


@pytest.mark.slow
def test_with_sampling_no_likelihood_ratio_test_finds_more():
    """One step, on whose result the best attack is a threshold: noise, or a mixture of two."""
    q, sigma = 0.4, 0.8
    found = dp.PrivacyPlan(q, 1, sigma, 1e-5).trade_off()
    cuts = np.linspace(-6, 6, 400)
    without = norm.sf(cuts / sigma)
    taken = (1 - q) * without + q * norm.sf((cuts - 1) / sigma)
    for alarms, true in ((without, taken), (1 - taken, 1 - without)):
        assert np.all(found.found(alarms) >= true - 1e-12)
    # A Gaussian mechanism of this mu reveals more at each pair, but for what the distance says.
    for epsilon, delta in found.pairs[:8]:
        implied = norm.cdf(found.mu / 2 - epsilon / found.mu)
        implied -= math.exp(epsilon) * norm.cdf(-found.mu / 2 - epsilon / found.mu)
        assert implied >= delta * (1 - 1e-6)
    gaussian = norm.cdf(norm.ppf(ALARMS) + found.mu)
    for distance, is_far in ((found.distance, False), (found.distance - 0.001, True)):
        moved = found.found(np.minimum(ALARMS + distance, 1)) + distance
        assert np.any(gaussian > moved + 1e-12) == is_far


def test_its_ends():
    nothing = dp.PrivacyPlan(0.5, 10, 1.0, 1e-5).trade_off(0)
    np.testing.assert_allclose(nothing.found(ALARMS), np.minimum(1, ALARMS + 1e-5))
    assert nothing.mu == 0
    assert nothing.right == pytest.approx(0.5, abs=1e-5)
    for noise in (0.0, 1e-4):
        everything = dp.PrivacyPlan(0.5, 10, noise, 1e-5).trade_off(1)
        np.testing.assert_array_equal(everything.found(ALARMS), 1.0)
        assert everything.mu == math.inf
        assert everything.right == 1
