"""The verdict on a step: findings, releases, and their comparison with the plan."""

import math
from collections import defaultdict
from typing import Any, NamedTuple

from ..paths import matches
from ..privacy import SENSITIVITY_OF_UNIT_NORM, Banded, NeighboringRelation, PrivacyPlan
from ..shown import some
from .facts import Fact, Kind
from .keys import CALLS, Calls, Use, is_new, parted
from .marked import DECIDED, REASONS, Record
from .privacy_report import Finding, PrivacyReport
from .privacy_report import Release as Row
from .sums import noise_multiplier, turns


class Result(NamedTuple):
    """A result of a step.

    Attributes:
        name: its dotted path.
        fact: the fact about it.
        returns: the arguments that it may be in the next call.
        is_state: whether it may be part of a state.
        is_disclosed: whether it is released without noise on purpose.
        is_kept: whether it stays in the state without noise on purpose.
    """

    name: str
    fact: Fact
    returns: list[int]
    is_state: bool
    is_disclosed: bool
    is_kept: bool


class TracedStep(NamedTuple):
    """A step whose values are known.

    Attributes:
        record: findings, sums, releases and keys.
        arguments: names of its arrays.
        same: of keys among them, the first argument that holds the same.
        results: its results.
        reaches_model: whether unnamed values in the state reach the next call's model.
    """

    record: Record
    arguments: list[str]
    same: dict[Any, Any]
    results: list[Result]
    reaches_model: bool


def names_it(pattern: str, name: str) -> bool:
    """Whether a pattern describes a dotted path, or its end."""
    return matches(pattern, name) or matches(f"**.{pattern}", name)


def report_on(step: TracedStep, plan: PrivacyPlan | None) -> PrivacyReport:
    """The report on a step, compared with a plan."""
    record, notes = step.record, list[str]()
    multiplier, steps, released = _releases(step, plan)
    found = [*_leaving(step), *record.found, *_against_plan(record, plan, multiplier, steps)]
    found += _fresh_noise(step, notes)
    for line in record.unmasked:
        if plan is not None and plan.sampling_prob < 1:
            what = "the plan samples, and filter_clipped_grad is given no mask"
            found.append(Finding("padding", what, line, _GIVE_MASK))
        elif plan is None:
            notes.append(f"filter_clipped_grad is given no mask at {line}: no row may be padding")
    if plan is not None and plan.noise_multiplier * (1 + _TOLERANCE) < multiplier < math.inf:
        notes.append("there is more noise than the plan accounts for")
    if not all(release.is_certified for release in record.releases.values()):
        notes.append("the noise is not certified, so epsilon is not proven: plan.uncertified_delta")
    if any(source.loops for source in record.sources.values()):
        notes.append("arguments are read as stacks of batches, each of them a sample of its own")
    private = [result for result in step.results if not result.fact.is_public]
    return PrivacyReport(
        plan,
        tuple(dict.fromkeys(finding for finding in found if finding.is_decided)),
        tuple(dict.fromkeys(finding for finding in found if not finding.is_decided)),
        released,
        tuple(r.name for r in private if r.is_kept and r.returns and not r.is_disclosed),
        tuple(result.name for result in private if result.is_disclosed),
        multiplier,
        steps,
        tuple(dict.fromkeys(notes)),
    )


_TOLERANCE = 1e-4
_GIVE_MASK = (
    "Some slots of a sampled batch hold no example, and would count as one. Give the sampler's "
    "mask: is_padding_example=mask."
)


# Results.

_ADD_NOISE = (
    "Add the plan's noise to the result of filter_clipped_grad, before any other operation: "
    "plan.privatizer comes first in the optimizer's chain; without optax, dp.add_noise."
)
_BY_HAND = (
    "The check knows the noise of dp.add_noise(grads, state, stddev) and of plan.privatizer alone: "
    "use one of them in place of jax.random.normal."
)
_LEAVE_OUT = (
    "Leave it out of the results, also as a mean. If you release it without noise on purpose, "
    "name its path in disclose=."
)
_STAYS = "If nobody sees it, or anything computed from it, name its path in kept=. "


def _leaving(step: TracedStep) -> list[Finding]:
    """Results that are no releases, and are neither kept nor disclosed by name."""
    leaving = defaultdict[Finding, list[str]](list)
    for name, fact, returns, is_state, is_disclosed, is_kept in step.results:
        is_told = bool(step.record.found) and fact.reason in ("mixed", "noised")
        is_secret = bool(returns) and (bool(fact.past) if fact.reason == "past" else is_kept)
        if not (fact.is_public or is_disclosed or is_secret or is_told):
            stays = bool(returns) and is_state and not step.reaches_model
            leaving[_how(fact, stays)].append(name)
    return [
        finding._replace(found=f"result{'s' * (len(names) > 1)} {some(names, 3)}: {finding.found}")
        for finding, names in leaving.items()
    ]


def _how(fact: Fact, stays: bool) -> Finding:
    where, is_sum = fact.where or "the results", fact.kind is Kind.SUM
    if fact.is_random:
        how = "noise was drawn by hand, and the check cannot tell whether it is enough"
        return Finding("noise", how, where, _BY_HAND, is_decided=False)
    how = "a clipped sum is in it, without noise" if is_sum else REASONS[fact.reason]
    advice = _LEAVE_OUT if fact.reason in ("data", "rows", "past", "unknown") else _ADD_NOISE
    is_decided = not stays and (is_sum or fact.reason in DECIDED)
    if stays:
        how, advice = f"{how}, and it stays in the state", _STAYS + advice
    return Finding("release", how, where, advice, is_decided)


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
        lengths[release.loops] = max(times, lengths[release.loops])
    total = noise_multiplier(releases, sources) / moved
    return total, max(1, sum(lengths.values())), tuple(table)


def _against_plan(
    record: Record, plan: PrivacyPlan | None, multiplier: float, steps: int
) -> list[Finding]:
    releases, found = [*record.releases.values()], list[Finding]()
    if plan is None or not releases or any(finding.rule == "noise" for finding in record.found):
        return []
    lines = " and ".join(dict.fromkeys(release.context.line for release in releases))
    if multiplier < plan.noise_multiplier * (1 - _TOLERANCE):
        is_tight = all(one.is_exact and not one.context.is_branch for one in releases)
        is_tight = is_tight and not record.is_noised_again
        stddev = min(release.stddev for release in releases)
        sensitivity = f"{stddev / multiplier:.4g}" if multiplier else "unbounded"
        least, most = ("", "") if is_tight else ("at least ", "at most ")
        text = (
            f"the noise multiplier is {least}{multiplier:.6g}, and the plan accounts for "
            f"{plan.noise_multiplier:.6g} (standard deviation {stddev:.4g}, sensitivity of all "
            f"releases of a step together {most}{sensitivity})"
        )
        found.append(Finding("noise", text, lines, _MORE_NOISE, is_tight))
    correlation = Banded() if plan.noise is None else plan.noise
    if others := {release.correlation for release in releases} - {correlation}:
        text = f"noise is correlated by {others.pop()}, and the plan accounts for {correlation}"
        found.append(Finding("noise", text, lines, "Take the noise of plan.privatizer."))
    if steps > plan.steps:
        text = f"a call takes {steps} steps, and the plan accounts for {plan.steps}"
        found.append(Finding("noise", text, lines, "Make a plan with as many steps."))
    return found


_MORE_NOISE = (
    "The standard deviation must be the plan's noise multiplier times this sensitivity, as "
    "plan.privatizer sets it; for k sums with noise each, sqrt(k) times as much."
)


# Keys.


def _next_call(step: TracedStep) -> Calls:
    """The keys and counters among the arguments of the next call."""
    after = defaultdict[int, list[Fact]](list)
    for result in step.results:
        for i in result.returns:
            after[i].append(result.fact)
    given = frozenset(("argument", i) for i in range(len(step.arguments)) if i not in after)
    calls = Calls({}, {}, given, step.same)
    for i, facts in after.items():
        root, number, key = ("argument", i), facts[0].number, facts[0].key
        if any((fact.number, fact.key) != (number, key) for fact in facts):
            continue
        if number is not None and number.root == root and not number.along:
            calls.steps[root] = number.offset
        if key is not None and key.root == root:
            calls.paths[root] = key.path
    return calls


def _fresh_noise(step: TracedStep, notes: list[str]) -> list[Finding]:
    """Whether each noise has its own key, and a different one in each turn and call."""
    calls, found, uses = _next_call(step), list[Finding](), {**step.record.uses}
    first = next(iter(uses.values()), None)
    for result in step.results:
        is_carried = any(("argument", i) in calls.paths for i in result.returns)
        if first and result.fact.key is not None and not is_carried:
            context = first.context._replace(line="the results")
            uses["result", result.name] = Use("returned", result.fact.key, context)
    for path, use in uses.items():
        if use.what not in ("noise", "slots"):
            continue
        for loop in (*(loop.path for loop in use.context.loops), CALLS):
            if not (is_fresh := is_new(use.key, loop, calls)):
                found.append(_stale(use, loop == CALLS, is_fresh is False))
        for other, another in uses.items():
            is_of_slots = use.what == "slots" and another.what in ("noise", "loss", "slots")
            if other != path and not is_of_slots and not parted(use.key, another.key, calls):
                found.append(_shared(use, another))
        for root in (use.key.root, *(getattr(one, "root", None) for one in use.key.path)):
            if isinstance(root, tuple) and root in calls.given:
                name = step.arguments[root[1]]
                notes.append(f"the caller gives {name}, and must not give it again in another call")
    return found


def _stale(use: Use, is_call: bool, is_decided: bool) -> Finding:
    is_same = "the same one" if is_decided else "not proven to be another one"
    each = "call" if is_call else "turn of a loop"
    found = f"the key of {_USES[use.what][1]} is {is_same} in each {each}"
    is_constant = isinstance(use.key.root, tuple) and use.key.root[0] == "constant"
    how = "Fold a counter of the state into it (jax.random.fold_in(key, step))."
    if use.what == "noise":
        how = (
            "Carry the stream: noisy, state = dp.add_noise(tree, state, stddev), and return state."
        )
    advice = "It is a constant of the program. " * is_constant + how
    return Finding("fresh noise", found, use.context.line, advice, is_decided)


_USES = {
    "noise": ("fresh noise", "the noise"),
    "draw": ("fresh noise", "other random numbers"),
    "loss": ("fresh noise", "the loss"),
    "slots": ("fresh noise", "the loss"),
    "returned": ("release", "a result: anyone with the key can subtract the noise"),
    "door": ("side door", "a print or callback"),
}


def _shared(a: Use, b: Use) -> Finding:
    (_, what), (rule, other) = _USES[a.what], _USES[b.what]
    other = "another noise" if b.what == "noise" else other
    paths = [*zip(a.key.path, b.key.path, strict=False)]
    is_decided = a.key.root is not None and a.key.root == b.key.root and not a.context.is_branch
    is_decided = is_decided and all(one == other and one is not None for one, other in paths)
    found = f"one key, or one that follows from it, is used for {what} and for {other}"
    if not is_decided:
        found = f"the key of {what} is not proven to be independent of that of {other}"
    if b.context.line not in (a.context.line, "the results"):
        found += f" (at {b.context.line})"
    advice = "Use each key for one noise only: jax.random.split gives as many as needed."
    return Finding(rule, found, a.context.line, advice, is_decided)
