"""The page: what it says, that it is one file, and that nothing in it is anybody else's HTML."""

import itertools
import json
import re
from pathlib import Path

import pytest

import eqx_dp as dp
from eqx_dp import report
from eqx_dp.report import description_of, page_of
from eqx_dp.report.charts import Axis, Line, chart, number
from eqx_dp.report.markup import Markup, escaped, tag
from eqx_dp.report.words import found_at, of_hundred
from tests.report.made import STEPS, Page, trained
from tests.training import runs

HOSTILE = (
    "</title></style><script>alert(1)</script>",
    '" onload="alert(1)" x=\'',
    "${title} $body {0} %s",
    "<img src=x onerror=alert(1)>&lt;b&gt;",
    "\x00\x1b[31m\ud800\u202egnp.exe",
    "]]></svg>--><!-- {{ 7 * 7 }}",
)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return description_of(trained(tmp_path_factory.mktemp("run")))


def page(said, **values):
    return Page(page_of(said | values))


def test_it_says_what_the_description_says(said):
    text = page(said).text()
    epsilon = runs.plan_of().epsilon(STEPS)
    for part in (
        said["name"],
        "64 examples",
        f"{epsilon:.3g}"[:4],
        "1 in 100,000",
        "which is added or removed. (ADD_OR_REMOVE_ONE)",
        said["covers"],
        *said["does_not_cover"],
        "Nothing was found that breaks the promise.",
        "This audit was not made.",
        "After step 6: 0.5.",
        "After step 6: not finite.",
        said["policy"],
        dp.__version__,
    ):
        assert part in text


def test_it_is_the_same_from_json(said):
    assert page_of(json.loads(json.dumps(said))) == page_of(said)


@pytest.mark.parametrize("relation", ["ADD_OR_REMOVE_ONE", "REPLACE_ONE", "REPLACE_SPECIAL"])
def test_it_is_plain_about_neighbors(said, relation):
    text = page(said, plan=said["plan"] | {"neighboring_relation": relation}).text()
    assert f"({relation})" in text
    assert "twice: once with your example in the data, and once with" in text


def test_what_nobody_should_overlook_stands_at_the_top(said):
    def top(**values):
        return page(said, **values).text().split("Who may see what")[0]

    assert "\N{MULTIPLICATION SIGN}" not in top()
    without = {"epsilon": None, "epsilon_over_steps": [(0, 0.0), (1, None)]}
    assert "There is no promise of privacy" in top(**without)
    assert "without a promise of privacy" in top(**without)
    assert "policy is unsafe" in top(is_unsafe=True)
    assert "found something" in top(checks=said["checks"] | {"privacy": {"ok": False}})
    assert "found something" in top(audit={"neighbours": {"ok": False}, "canaries": None})
    assert "newest start of the run, and not about earlier" in page(said, starts=2).text()
    assert "newest start of the run, and not about earlier" not in page(said).text()


def test_what_checks_and_audits_found_is_shown_whatever_it_is(said):
    privacy = {
        "ok": False,
        "violations": [{"rule": "noise", "found": "no noise"}, {"rule": "padding", "more": 3}],
        "releases": [],
        "notes": ["one", 2, None],
        "within": {"sensitivity": 1.5, "deep": {"a": [1]}},
        "times": 1234567,
        "is_sharded": True,
    }
    found = page(said, checks={"precision": None, "privacy": privacy})
    text = found.text()
    for part in ("no noise", "padding", "1,234,567", "sensitivity 1.5", '{"a": [1]}', "yes"):
        assert part in text
    assert "Something is not as it should be." in text
    undecided = {"ok": False, "violations": [], "undecided": [{"rule": "noise"}]}
    assert (
        "could not be decided"
        in page(said, checks={"precision": None, "privacy": undecided}).text()
    )
    many = {"ok": True, "rows": [{"row": row} for row in range(1000)]}
    assert "And 800 more" in page(said, audit={"neighbours": many, "canaries": None}).text()


@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_comes_from_the_run_is_text(said, name):
    """Names and texts of all kinds, wherever there can be one: the same elements as without."""
    row = {name: name, "where": name}

    def with_(name, row):
        check = {"ok": False, name: [row], "notes": [name], "facts": row, f"a{name}": name}
        return page(
            said,
            name=name,
            policy=name,
            covers=name,
            does_not_cover=[name],
            randomness=name,
            metrics={name: [[1, 0.5], [2, 0.25]]},
            checks={"precision": check, "privacy": check},
            audit={"neighbours": check, "canaries": check},
            made_by=row | {"jax": name},
            num_examples=name,
            made_at=name,
        )

    hostile, harmless = with_(name, row), with_("x", {"x": "x", "where": "x"})
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in harmless.elements]
    keys = [list(attributes) for _, attributes in hostile.elements]
    assert keys == [list(attributes) for _, attributes in harmless.elements]
    kept = escaped(name).splitlines()[0]
    assert page_of(said | {"name": name}).count(kept) == 2
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e\ud800-\udfff]", "".join(hostile.texts))


def test_it_is_one_file_that_needs_no_network_and_no_scripts(said):
    found = page(said)
    assert not found.tags() & {"script", "link", "img", "iframe", "object", "base", "form"}
    for _, attributes in found.elements:
        assert not any(name.startswith("on") or name in ("src", "style") for name in attributes)
        assert attributes.get("href", "#").startswith("#")
    assert ("meta", {"charset": "utf-8"}) in found.elements
    (policy,) = (a["content"] for _, a in found.elements if "http-equiv" in a)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    style = (Path(report.__file__).parent / "page.css").read_text()
    assert "url(" not in style
    assert "@import" not in style


def test_it_can_be_read_without_seeing_it(said):
    found = page(said, audit={"neighbours": {"ok": True, "rows": [{"a": 1}]}, "canaries": None})
    assert ("html", {"lang": "en"}) in found.elements
    levels = [int(tag[1]) for tag, _ in found.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    pictures = [attributes for tag, attributes in found.elements if tag == "svg"]
    assert len(pictures) == 4 - 1  # the curve, epsilon, accuracy; "error" was never finite
    assert all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in pictures)
    assert all(a.get("scope") in ("row", "col") for tag, a in found.elements if tag == "th")
    assert {"header", "nav", "main", "footer"} <= found.tags()
    ids = [a["id"] for _, a in found.elements if "id" in a]
    links = [a["href"] for tag, a in found.elements if tag == "a"]
    assert links == [f"#{name}" for name in ids]


@pytest.mark.parametrize("theme", [0, 1])
def test_colors_can_be_told_from_their_ground(theme):
    """WCAG 2.2, 1.4.3: a contrast of at least 4.5 for text, in light and in dark."""
    style = (Path(report.__file__).parent / "page.css").read_text()
    named = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[theme]
    colors = dict(re.findall(r"--([\w-]+): #([0-9a-f]{6})", named))

    def luminance(color):
        parts = (int(color[i : i + 2], 16) / 255 for i in (0, 2, 4))
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(c * w for c, w in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))

    def contrast(one, other):
        low, high = sorted(luminance(colors[name]) for name in (one, other))
        return (high + 0.05) / (low + 0.05)

    grounds = {name: f"{name}-ground" for name in ("good", "bad", "open")}
    pairs = [(ink, on) for ink in ("ink", "soft", "accent") for on in ("ground", "raised")]
    assert {pair: c for pair in (*pairs, *grounds.items()) if (c := contrast(*pair)) < 4.5} == {}


# Charts, and figures in words.


@pytest.mark.parametrize(
    "points",
    [
        [(0, 0.5)],
        [(0, 0.0), (1, 0.0)],
        [(5, 1e308), (6, 0.0)],
        [(1, 1e-320), (2, 0.0)],
        [(1, 1e16), (2, 1e16 + 2)],
        [(1, -3.0), (2, None), (3, 4.0)],
        [(step, float(step % 7)) for step in range(10_000)],
    ],
)
def test_a_chart_of_whatever_was_measured_has_points_within_it(points):
    drawn = chart("It says what is seen.", Axis("x"), Axis("y"), [Line(points)])
    places = re.findall(
        r"(-?[\d.]+|nan|inf),(-?[\d.]+|nan|inf)",
        " ".join(a["points"] for tag, a in Page(drawn).elements if tag == "polyline"),
    )
    assert 1 <= len(places) <= 401
    assert all(0 <= float(x) <= 420 and 0 <= float(y) <= 270 for x, y in places)


def test_a_chart_of_nothing_is_nothing():
    for points in ([], [(1, None)], [(1, -1.7e308), (2, 1.7e308)]):
        assert chart("x", Axis("x"), Axis("y"), [Line(points)]) == ""


def test_a_chart_is_broken_where_nothing_was_measured():
    points = [(1, 1.0), (2, None), (3, 2.0), (4, 3.0)]
    drawn = Page(chart("x", Axis("x"), Axis("y"), [Line(points)]))
    lines = [a["points"].split() for tag, a in drawn.elements if tag == "polyline"]
    assert [len(line) for line in lines] == [1, 2]


def test_figures_in_words():
    assert [number(x) for x in (0, 3, 1234567, 0.25, 12.3456, 1e-5, 1e20)] == [
        *("0", "3", "1.23e+06", "0.25", "12.35", "1e-05", "1e+20")
    ]
    assert [of_hundred(x) for x in (0.0, 0.001, 0.05, 0.12301, 0.5, 1.0)] == [
        *("0", "0.1", "5", "12.4", "50", "100")
    ]
    assert found_at([[0, 0.1], [1, 1]], 0.5) == pytest.approx(0.55)


def test_markup_is_escaped_once():
    inner = tag("b", "<")
    assert tag("p", inner, ">", title='"') == '<p title="&quot;"><b>&lt;</b>&gt;</p>'
    assert escaped(Markup("<b>")) == "<b>"
