"""The verdict on a step: findings, releases, and their comparison with the plan."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..privacy import SENSITIVITY_OF_UNIT_NORM, Banded, NeighboringRelation, PrivacyPlan
from ..shown import some
from .arguments import Argument
from .facts import Fact, Kind
from .privacy_report import Finding, PrivacyReport, finding
from .privacy_report import Release as Row
from .record import REASONS, Record, is_by_hand, is_proven
from .streams import Key, Stream, Use, is_another, parted
from .sums import Release, noise_multiplier, turns


class Result(NamedTuple):
    """A result of a step.

    Attributes:
        name: its dotted path.
        fact: the fact about it.
        returns: the argument that it is in the next call.
        is_disclosed: whether it is released without noise on purpose.
        is_kept: whether it stays in the state without noise on purpose.
    """

    name: str
    fact: Fact
    returns: int | None
    is_disclosed: bool
    is_kept: bool


class TracedStep(NamedTuple):
    """A step whose values are known.

    Attributes:
        record: findings, sums, releases and keys.
        arguments: its arrays.
        results: its results.
        same: pairs of names: streams, and what holds the same key.
        reaches_model: whether unnamed values in the state reach the next call's model.
    """

    record: Record
    arguments: Sequence[Argument]
    results: Sequence[Result]
    same: Sequence[tuple[str, str]]
    reaches_model: bool


def report_on(step: TracedStep, plan: PrivacyPlan | None) -> PrivacyReport:
    """The report on a step, compared with a plan."""
    record, notes = step.record, [*step.record.assumed]
    multiplier, steps, released = _releases(step, plan)
    found = [*_leaving(step), *record.found, *_against_plan(record, plan, multiplier, steps)]
    found += [*_streams(step), *_losses(step, notes), *_units(record, plan)]
    for line, is_none in record.unmasked.items():
        if plan is not None and has_padding(plan):
            what = "the plan samples, and filter_clipped_grad is given no mask of the arguments"
            found.append(finding("padding", what, line, is_none))
        elif plan is None:
            notes.append(f"filter_clipped_grad is given no mask at {line}: no row may be padding")
    if plan is not None and not record.releases and not found and plan.noise_multiplier > 0:
        text = "no clipped sum of arguments that private= names is released with noise"
        found.append(finding("noise", text, "the step", is_decided=False))
    if any(source.batches for source in record.sources.values()):
        notes.append("arguments are read as stacks of batches, each of them a sample of its own")
    private = [result for result in step.results if not result.fact.is_public]
    return PrivacyReport(
        plan,
        tuple(dict.fromkeys(one for one in found if one.is_decided)),
        tuple(dict.fromkeys(one for one in found if not one.is_decided)),
        released,
        tuple(r.name for r in private if r.is_kept and not r.is_disclosed),
        tuple(result.name for result in private if result.is_disclosed),
        multiplier,
        steps,
        tuple(dict.fromkeys(notes)),
    )


_TOLERANCE = 1e-4


def has_padding(plan: PrivacyPlan) -> bool:
    """Whether batches of a plan have slots without an example."""
    return plan.batches.sampling_prob < 1


# Results.


def _leaving(step: TracedStep) -> list[Finding]:
    """Results that are no releases, and are neither kept nor disclosed by name."""
    leaving = defaultdict[Finding, list[str]](list)
    for result in step.results:
        fact = result.fact
        is_told = bool(step.record.found) and fact.reach.reason in ("mixed", "noised")
        is_allowed = result.is_disclosed or (result.is_kept and result.returns is not None)
        is_secret = fact.reach.reason == "secret"
        if not fact.is_public and not is_told and (is_secret or not is_allowed):
            stays = result.returns is not None and not step.reaches_model
            leaving[_how(fact, stays)].append(result.name)
    return [
        one._replace(found=f"result{'s' * (len(names) > 1)} {some(names, 3)}: {one.found}")
        for one, names in leaving.items()
    ]


def _how(fact: Fact, stays: bool) -> Finding:
    reach, is_sum = fact.reach, fact.reach.kind is Kind.SUM
    where = reach.where or "the results"
    if is_by_hand(fact):
        how = "noise was drawn by hand, and the check cannot tell whether it is enough"
        return finding("noise", how, where, is_decided=False)
    how = "a clipped sum is in it, without noise" if is_sum else REASONS[reach.reason]
    how += ", and it stays in the state" if stays else ""
    return finding("release", how, where, not stays and is_proven(fact))


# Releases.


def _releases(step: TracedStep, plan: PrivacyPlan | None) -> tuple[float, int, tuple[Row, ...]]:
    """The noise multiplier of all releases together, how many steps they are, and each of them."""
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE if plan is None else plan.neighboring_relation
    moved, sources = SENSITIVITY_OF_UNIT_NORM[relation], step.record.sources
    releases, table = [*step.record.releases.values()], list[Row]()
    # Several loops may go over the same batches: then all releases count for one step.
    lengths = defaultdict[Any, int](int)
    for release in releases:
        alone = noise_multiplier([release], sources) / moved
        sensitivity = release.stddev / alone if alone else math.inf
        times, where = turns(release)[0], (release.context.line,)
        table.append(Row(sensitivity, release.stddev, alone, times, where))
        lengths[release.batches] = max(times, lengths[release.batches])
    total = noise_multiplier(releases, sources) / moved
    return total, max(1, sum(lengths.values())), tuple(table)


def _against_plan(
    record: Record, plan: PrivacyPlan | None, multiplier: float, steps: int
) -> list[Finding]:
    releases, found = [*record.releases.values()], list[Finding]()
    if plan is None or not releases or any(one.rule == "noise" for one in record.found):
        return found
    lines = " and ".join(dict.fromkeys(release.context.line for release in releases))
    if multiplier < plan.noise_multiplier * (1 - _TOLERANCE):
        is_tight = _is_tight(record, releases)
        stddev = min(release.stddev for release in releases)
        sensitivity = f"{stddev / multiplier:.4g}" if multiplier else "unbounded"
        least, most = ("", "") if is_tight else ("at least ", "at most ")
        text = (
            f"the noise multiplier is {least}{multiplier:.6g}, and the plan accounts for "
            f"{plan.noise_multiplier:.6g} (standard deviation {stddev:.4g}, sensitivity of all "
            f"releases of a step together {most}{sensitivity})"
        )
        found.append(finding("noise", text, lines, is_tight))
    correlation = Banded() if plan.noise is None else plan.noise
    if others := {release.correlation for release in releases} - {correlation}:
        text = f"noise is correlated by {others.pop()}, and the plan accounts for {correlation}"
        found.append(finding("noise", text, lines))
    if steps > plan.steps:
        text = f"a call takes {steps} steps, and the plan accounts for {plan.steps}"
        found.append(finding("noise", text, lines))
    return found


def _is_tight(record: Record, releases: Sequence[Release]) -> bool:
    """Whether the noise multiplier is certainly no larger: one batch, and bounds that are met."""
    is_exact = all(one.is_exact for one in releases)
    batches = {source.rows for source in record.sources.values()}
    return is_exact and len(batches) == 1 and not record.is_noised_again


def _units(record: Record, plan: PrivacyPlan | None) -> list[Finding]:
    """Whether the clip norm is one of the plan's unit."""
    if plan is None:
        return []
    return [
        finding("release", _OTHER_UNIT, source.line, is_decided=False)
        for source in record.sources.values()
        if source.unit != plan.unit
    ]


_OTHER_UNIT = (
    "the plan's unit is another one than that whose gradients are clipped: with unit=dp.Users(...) "
    "clip plan.unit.loss(loss) and pass plan.unit.take(...), all rows of a user in one slot"
)


# Streams of noise.


def _streams(step: TracedStep) -> list[Finding]:
    """Whether each stream of noise goes out at its place, as its last draw left it."""
    drawn, found = step.record.streams, list[Finding]()
    for one, other in drawn.twice():
        how = "in each turn of a loop" if one is other else f"at {other.line}, too"
        text = f"one state of a stream gives this noise and that {how}"
        found.append(finding("fresh noise", text, one.line))
    used = {root: next(iter(uses)).line for (root, _), uses in drawn.drawn.items()}
    for i, argument in enumerate(step.arguments):
        if argument.stream is None or argument.stream[0] not in used:
            continue
        name, (root, part) = argument.names[-1], argument.stream
        after = [result.fact for result in step.results if result.returns == i]
        token = after[0].token if after else None
        is_next = isinstance(token, Stream) and (token.root, token.part) == (root, part)
        if not isinstance(token, Stream) or not is_next:
            text = f"the stream of noise {name} does not go out at its place"
            found.append(finding("fresh noise", text, used[root], is_decided=False))
        elif drawn.drawn.get((root, token.at)):
            text = f"the stream of noise {name} goes out as it was before a draw: the next call has"
            text += " the same noise"
            found.append(finding("fresh noise", text, used[root]))
    for result in step.results:
        token = result.fact.token
        if isinstance(token, Stream) and token.is_secret:
            own = None if result.returns is None else step.arguments[result.returns].stream
            if own != (token.root, token.part):
                text = f"result {result.name}: {REASONS['secret']}"
                found.append(finding("release", text, "the results"))
    for one, other in step.same:
        text = f"{one} and {other} hold the same key"
        found.append(finding("fresh noise", text, "the arguments"))
    return list(dict.fromkeys(found))


# Keys of losses.


def _losses(step: TracedStep, notes: list[str]) -> list[Finding]:
    """Whether the keys of losses are new in each call, and nothing else follows from them."""
    found = list[Finding]()
    back = {r.returns: r.fact.token for r in step.results if r.returns is not None}
    uses = [*step.record.uses]
    for result in step.results:
        token = result.fact.token
        if isinstance(token, Key) and token.root != result.returns:
            uses.append(Use(f"result {result.name}", token, "the results"))
    for use in (use for use in uses if use.what == "loss"):
        name = step.arguments[use.key.root].names[-1]
        if not use.is_fresh or not is_another(use.key, back):
            text = f"the loss's key, from {name}, is not proven to be another one in each call and"
            found.append(finding("fresh noise", f"{text} turn", use.line, is_decided=False))
        others = [one for one in uses if one.what != "loss" and one.key.root == use.key.root]
        for other in others:
            if not parted(use.key, other.key):
                text = f"the loss's key, from {name}, or what it follows from, is used at "
                text += f"{other.line}, too"
                found.append(finding("fresh noise", text, use.line, is_decided=False))
        if use.key.root not in back:
            notes.append(f"the caller gives {name}, and must not give it again in another call")
    return found
