"""The page of a report: sections of plain sentences, charts and tables, in one file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from . import words
from .charts import Axis, Line, chart
from .findings import facts, findings, shown, spaced, table
from .markup import Markup, escaped, joined, tag

# Of a run that names its figures one by one, not all.
_MOST_METRICS = 24
_FALSE_ALARMS = (0.001, 0.01, 0.05, 0.1, 0.5)


def page_of(description: Mapping[str, Any]) -> str:
    """The page: HTML that needs no network and no scripts, for a wide window or a phone.

    Whatever stands in the description is escaped.
    """
    sections = (
        ("protected", "What is protected", _protected),
        ("meaning", "What epsilon and delta mean", lambda said: _paragraphs(*words.meaning(said))),
        ("attack", "What an attack can find out", _attack),
        ("steps", "Epsilon over the steps", _steps),
        ("limits", "What the promise does not cover", _limits),
        ("checks", "Checks of the training step", _checks),
        ("audit", "Audit", _audit),
        ("metrics", "Metrics", _metrics),
        ("plan", "Plan and versions", _plan),
    )
    links = (tag("li", tag("a", title, href=f"#{name}")) for name, title, _ in sections)
    body = joined(
        tag("header", *_head(description), tag("nav", tag("ul", *links), aria_label="Sections")),
        tag(
            "main",
            *(
                tag("section", tag("h2", title, id=name), *parts(description))
                for name, title, parts in sections
            ),
        ),
        tag("footer", tag("p", f"Made by eqx_dp at {description['made_at']}.", class_="soft")),
    )
    return Template(_file("page.html")).substitute(
        title=escaped(f"Privacy report: {description['name']}"), style=_file("page.css"), body=body
    )


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8").rstrip()


def _paragraphs(*texts: str) -> list[Markup]:
    return [tag("p", text) for text in texts]


def _verdict(kind: str, text: str) -> Markup:
    sign = {"good": "\N{CHECK MARK}", "bad": "\N{MULTIPLICATION SIGN}", "open": "\N{EN DASH}"}[kind]
    return tag("p", f"{sign}\N{NO-BREAK SPACE} {text}", class_=f"verdict {kind}")


def _head(said: Mapping[str, Any]) -> list[Markup]:
    verdicts = [_verdict("bad", text) for text in words.warnings_of(said)]
    return [
        tag("p", "Privacy report", class_="kicker"),
        tag("h1", said["name"]),
        tag("p", words.lead(said), class_="lead"),
        *verdicts,
        tag("dl", *(_card(*card) for card in words.cards(said)), class_="cards"),
    ]


def _card(name: str, value: str, text: str) -> Markup:
    return tag(
        "div", tag("dt", name), tag("dd", value, class_="value"), tag("dd", text), class_="card"
    )


def _protected(said: Mapping[str, Any]) -> list[Markup]:
    return [
        facts(words.protected(said)),
        tag("h3", "Who may see what"),
        facts(words.who_may_see(said)),
    ]


def _attack(said: Mapping[str, Any]) -> list[Markup]:
    corners = said["trade_off"]
    drawn = chart(
        "The curve of true positives, at most, over false positives, above the diagonal of blind "
        f"guessing. {words.one_attack(said, 0.01)}",
        Axis("false alarms (share of those not in the data)", 0.0, 1.0),
        Axis("found (share of those in the data)", 0.0, 1.0),
        (Line(((0.0, 0.0), (1.0, 1.0)), "beside"), Line(corners)),
    )
    caption = "No attack is above the solid line. Blind guessing is on the dashed line."
    rows = [
        (words.of_hundred(share), words.of_hundred(words.found_at(corners, share)))
        for share in _FALSE_ALARMS
    ]
    columns = ("False alarms, of 100 not in the data", "Found, of 100 in the data, at most")
    return [
        *_paragraphs(*words.attack(said)),
        tag("figure", drawn, tag("figcaption", caption)),
        table(columns, rows, "False alarms and examples found"),
        tag("p", words.ATTACK_SOURCE, class_="soft"),
    ]


def _steps(said: Mapping[str, Any]) -> list[Markup]:
    taken, planned = said["steps_released"], said["plan"]["steps"]
    known = [(step, value) for step, value in said["epsilon_over_steps"] if value is not None]
    if len(known) < 2:
        return _paragraphs("Epsilon is infinite after the first step: the run adds no noise.")
    lines = [Line([pair for pair in known if pair[0] <= taken])]
    ahead = [pair for pair in known if pair[0] >= taken]
    if len(ahead) > 1:
        lines.insert(0, Line(ahead, "ahead"))
    last = words.epsilon_in_words(said["epsilon"])
    drawn = chart(
        f"Epsilon rises with the number of steps, to {last} after {taken:,} of {planned:,} steps.",
        Axis("steps", 0.0, float(planned)),
        Axis("epsilon", 0.0),
        lines,
    )
    caption = "Solid: the steps of this run."
    caption += " Dotted: the steps that its plan still allows." if len(ahead) > 1 else ""
    return [
        *_paragraphs(words.STEPS),
        tag("figure", drawn, tag("figcaption", caption)),
        _details("The figures", table(("Steps", "Epsilon"), known, "Epsilon over the steps")),
    ]


def _limits(said: Mapping[str, Any]) -> list[Markup]:
    items = (tag("li", text) for text in said["does_not_cover"])
    return [
        *_paragraphs(
            said["covers"],
            "Not covered are:",
        ),
        tag("ul", *items),
        *_paragraphs(*words.ASSUMPTIONS),
    ]


def _checks(said: Mapping[str, Any]) -> list[Markup]:
    found, has_policy = said["checks"], said["policy"] is not None
    newest = [words.NEWEST_START] if said["starts"] > 1 else []
    return [
        *_paragraphs(words.CHECKS, *newest),
        tag("h3", "Privacy"),
        *_checked(found["privacy"], words.PRIVACY_CHECK, "It was not checked."),
        tag("h3", "Precision"),
        *_checked(
            found["precision"],
            words.PRECISION_CHECK,
            "It was not checked."
            if has_policy
            else "It was not checked: the run has no policy that declares dtypes.",
        ),
    ]


def _audit(said: Mapping[str, Any]) -> list[Markup]:
    found: Mapping[str, Any] = said["audit"] or {}
    return [
        *_paragraphs(words.AUDIT),
        tag("h3", "Neighbors"),
        *_checked(found.get("neighbours"), words.NEIGHBOURS, "This audit was not made."),
        tag("h3", "Canaries"),
        *_checked(found.get("canaries"), words.CANARIES, "This audit was not made."),
    ]


def _checked(found: Mapping[str, Any] | None, about: str, without: str) -> list[Markup]:
    if found is None:
        return [*_paragraphs(about), _verdict("open", without)]
    if found["ok"]:
        verdict = _verdict("good", "Nothing was found that breaks the promise.")
    elif "undecided" in found and not found.get("violations"):
        verdict = _verdict("open", "Something could not be decided. The table says what.")
    else:
        verdict = _verdict("bad", "Something is not as it should be. The table says what.")
    inside = findings(found)
    more = [_details("All that was found", inside, is_open=not found["ok"])] if inside else []
    return [*_paragraphs(about), verdict, *more]


def _details(summary: str, inside: Markup, is_open: bool = False) -> Markup:
    return tag("details", tag("summary", summary), inside, **({"open": ""} if is_open else {}))


def _metrics(said: Mapping[str, Any]) -> list[Markup]:
    found: Mapping[str, Any] = said["metrics"]
    if not found:
        return _paragraphs("The run recorded no metrics.")
    names = list(found)
    figures = [_metric(name, found[name]) for name in names[:_MOST_METRICS]]
    left = names[_MOST_METRICS:]
    more = [f"And {len(left):,} more, in the JSON file beside this page."] if left else []
    return [
        *_paragraphs(words.METRICS),
        tag("div", *figures, class_="figures"),
        *_paragraphs(*more),
    ]


def _metric(name: str, points: Sequence[Sequence[Any]]) -> Markup:
    label, (step, value) = spaced(name), points[-1]
    last = f"After step {step:,}: {'not finite' if value is None else shown(value)}."
    drawn = chart(
        f"{label} over the steps. {last}", Axis("steps", 0.0), Axis(label[:40]), [Line(points)]
    )
    rows = [(step, "not finite" if value is None else value) for step, value in points]
    return tag(
        "figure",
        tag("h3", label),
        drawn,
        tag("figcaption", last),
        _details("The figures", table(("Step", label), rows, f"{label} over the steps")),
    )


def _plan(said: Mapping[str, Any]) -> list[Markup]:
    plan = {key: value for key, value in said["plan"].items() if key not in ("format", "version")}
    if said["policy"] is not None:
        plan["policy"] = said["policy"]
    made_by, versions = said["made_by"], said["versions"]
    libraries = [
        (library, shown(made_by[library]) if library in made_by else "not recorded", version)
        for library, version in versions.items()
    ]
    others = {key: value for key, value in made_by.items() if key not in versions}
    return [
        facts(plan),
        tag("h3", "Versions"),
        table(("Library", "Of the run", "Of this report"), libraries, "Versions"),
        tag("h3", "Where the run was made"),
        facts(others),
    ]
