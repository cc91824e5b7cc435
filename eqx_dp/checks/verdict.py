"""The verdict on a step: findings, releases, and their comparison with the plan."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..privacy import SENSITIVITY_OF_UNIT_NORM, Banded, NeighboringRelation, PrivacyPlan
from ..shown import some
from .facts import Fact
from .privacy_flow import SECRET
from .privacy_report import PrivacyReport
from .privacy_report import Release as Row
from .record import Record
from .streams import Key, Stream, is_another, parted
from .sums import is_tight, noise_multiplier, turns


class Result(NamedTuple):
    """A result of a step.

    Attributes:
        name: its dotted path.
        fact: the fact about it.
        returns: the argument that it is in the next call.
        is_disclosed: whether it is released without noise on purpose.
    """

    name: str
    fact: Fact
    returns: int | None
    is_disclosed: bool


def report_on(record: Record, results: Sequence[Result], plan: PrivacyPlan | None) -> PrivacyReport:
    """The report on a step, compared with a plan."""
    multiplier, steps, released = _releases(record, plan)
    if plan is not None:
        _against_plan(record, plan, multiplier, steps)
    _leaving(record, results)
    _streams(record, results)
    _losses(record, results)
    if plan is not None and not record.releases and not record.found and plan.noise_multiplier > 0:
        text = "no clipped sum of arguments that private= names is released with noise"
        record.add("noise", text, "the step")
    notes = [*record.assumed]
    are_stacks = {bool(source.batches) for source in record.sources.values()}
    if len(are_stacks) == 2:
        text = "one call of the engine gets batches, and another one gets stacks of batches"
        record.add("examples apart", text, "the step")
    if any(are_stacks):
        notes.append("arguments are read as stacks of batches, each of them a sample of its own")
    return PrivacyReport(
        plan,
        tuple(one for one in record.found if one.is_decided),
        tuple(one for one in record.found if not one.is_decided),
        released,
        tuple(r.name for r in results if r.is_disclosed and not r.fact.is_public),
        multiplier,
        steps,
        tuple(notes),
    )


# Results.


def _leaving(record: Record, results: Sequence[Result]) -> None:
    """Results that are no releases, and are not disclosed by name.

    That something private stays in the state is not decided: nobody may see it. Nor is what follows
    from another finding.
    """
    leaving, is_first = defaultdict[Any, list[str]](list), not record.found
    for name, fact, returns, is_disclosed in results:
        is_allowed = is_disclosed and fact.reach.why != SECRET
        if not fact.is_public and not is_allowed and (fact.is_proven or is_first):
            stays = returns is not None and returns not in record.trained
            how = fact.reach.why or "a clipped sum is in it, without noise"
            how += ", and it stays in the state" if stays else ""
            leaving[how, fact.reach.where, fact.is_proven and not stays].append(name)
    for (how, where, is_decided), names in leaving.items():
        found = f"result{'s' * (len(names) > 1)} {some(names, 3)}: {how}"
        record.add("release", found, where or "the results", is_decided)


# Releases.


def _releases(record: Record, plan: PrivacyPlan | None) -> tuple[float, int, tuple[Row, ...]]:
    """The noise multiplier of all releases together, how many steps they are, and each of them."""
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE if plan is None else plan.neighboring_relation
    moved, releases, table = SENSITIVITY_OF_UNIT_NORM[relation], record.releases, list[Row]()
    # Several loops may go over the same batches: then all releases count for one step.
    lengths = defaultdict[Any, int](int)
    for release in releases.values():
        alone = noise_multiplier([release], record.sources) / moved
        sensitivity = release.stddev / alone if alone else math.inf
        times, where = turns(release)[0], (release.context.line,)
        table.append(Row(sensitivity, release.stddev, alone, times, where))
        lengths[release.batches] = max(times, lengths[release.batches])
    total = noise_multiplier([*releases.values()], record.sources) / moved
    return total, max(1, sum(lengths.values())), tuple(table)


_TOLERANCE = 1e-4


def _against_plan(record: Record, plan: PrivacyPlan, multiplier: float, steps: int) -> None:
    if plan.batches.sampling_prob < 1:  # then batches have slots without an example
        text = "the plan samples, and filter_clipped_grad is given no mask of the arguments"
        for line, is_none in record.unmasked.items():
            record.add("padding", text, line, is_none)
    for source in record.sources.values():
        if source.unit != plan.unit:
            record.add("release", _OTHER_UNIT, source.line)
    releases = [*record.releases.values()]
    if not releases or any(one.rule == "noise" for one in record.found):
        return
    lines = " and ".join(dict.fromkeys(release.context.line for release in releases))
    if multiplier < plan.noise_multiplier * (1 - _TOLERANCE):
        is_known = is_tight(releases, record.sources) and len(record.drawn) == 1
        text = f"the noise multiplier is {'' if is_known else 'at least '}{multiplier:.6g}"
        text += f", and the plan accounts for {plan.noise_multiplier:.6g}"
        record.add("noise", text, lines, is_known)
    correlation = Banded() if plan.noise is None else plan.noise
    if others := {release.correlation for release in releases} - {correlation}:
        text = f"noise is correlated by {others.pop()}, and the plan accounts for {correlation}"
        record.add("noise", text, lines, True)
    if steps > plan.steps:
        text = f"a call takes {steps} steps, and the plan accounts for {plan.steps}"
        record.add("noise", text, lines, True)


_OTHER_UNIT = "what is clipped is not the plan's unit: with dp.Users, clip plan.unit.loss(loss)"


# Streams of noise, and keys of losses.


def _streams(record: Record, results: Sequence[Result]) -> None:
    """Whether each stream of noise goes out at its place, as its last draw left it."""
    used = {root: line for (root, _), (_, line) in record.drawn.items()}
    back = _coming_back(results)
    for i, argument in enumerate(record.arguments):
        if argument.stream is None or argument.stream[0] not in used:
            continue
        root, token = argument.stream[0], back.get(i)
        is_own = isinstance(token, Stream) and (token.root, token.part) == argument.stream
        is_old = isinstance(token, Stream) and is_own and (root, token.at) in record.drawn
        if is_old or not is_own:
            text = f"the stream of noise {argument.names[-1]} does not go out at its place, as its "
            record.add("fresh noise", f"{text}last draw left it", used[root], is_old)
    for name, fact, returns, _ in results:
        token = fact.token
        if isinstance(token, Stream) and token.is_secret:
            own = None if returns is None else record.arguments[returns].stream
            if own != (token.root, token.part):
                record.add("release", f"result {name}: {SECRET}", "the results", True)


def _coming_back(results: Sequence[Result]) -> dict[int, Any]:
    """What stands at the places of arguments in the next call."""
    return {r.returns: r.fact.token for r in results if r.returns is not None}


def _losses(record: Record, results: Sequence[Result]) -> None:
    """Whether the keys of losses are new in each call, and nothing else follows from them."""
    back = _coming_back(results)
    for name, fact, returns, _ in results:
        if isinstance(fact.token, Key) and fact.token != Key(-1 if returns is None else returns):
            record.use(fact, f"result {name}")
    for use in (use for use in record.uses if use.of_loss is not None):
        name = record.arguments[use.key.root].names[-1]
        lines = [
            other.line
            for other in record.uses
            if other != use and other.key.root == use.key.root and not parted(use.key, other.key)
        ]
        if lines or not is_another(use, back):
            text = f"the loss's key, from {name}, is not proven to be another one in each call"
            text = f"the loss's key, from {name}, is used at {lines[0]}, too" if lines else text
            record.add("fresh noise", text, use.line)
        record.assumed[f"the loss's key, from {name}, is another one in each call"] = None
