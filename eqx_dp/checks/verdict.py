"""What is said of a step: findings, releases, and how they stand to the plan."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..paths import matches
from ..privacy import SENSITIVITY_OF_UNIT_NORM, NeighboringRelation, PrivacyPlan
from ..shown import some
from .facts import Cut, Fact, Kind
from .keys import CALLS, Calls, Key, Use, is_new, parted
from .marked import REASONS, Record
from .privacy_report import Finding, PrivacyReport
from .privacy_report import Release as Row
from .sums import Release, alternatives, noise_multiplier, samples_of, turns


class TracedStep(NamedTuple):
    """A step whose values are known, with what is known of its arguments and results.

    Attributes:
        record: what was noted on the way.
        arguments: what was known of its arrays.
        same: of keys among them, the first argument that holds the same.
        argument_names: their names.
        results: what is known of its results.
        names: dotted paths of the results.
        returns: for each result, the arguments that it may be in the next call.
        in_state: whether a result may be part of a state.
        disclosed: which results are released without noise knowingly.
        kept: which stay in the state without noise knowingly.
        reaches_model: whether what stays there and is not named reaches the next call's model.
    """

    record: Record
    arguments: list[Fact]
    same: dict[Any, Any]
    argument_names: list[str]
    results: list[Fact]
    names: list[str]
    returns: list[list[int]]
    in_state: list[bool]
    disclosed: list[bool]
    kept: list[bool]
    reaches_model: bool


def names_it(pattern: str, name: str) -> bool:
    """Whether a pattern describes a dotted path, or its end."""
    return matches(pattern, name) or matches(f"**.{pattern}", name)


def report_on(step: TracedStep, plan: PrivacyPlan | None) -> PrivacyReport:
    """The report on a step, held against a plan."""
    record = step.record
    calls = _next_call(step)
    leaving, kept, disclosed = _outputs(step, calls)
    multiplier, steps, released = _releases(step, plan)
    fresh, notes = _fresh_noise(step, calls)
    found = [*leaving, *record.found, *_against_plan(step, plan, multiplier, steps), *fresh]
    for line in record.unmasked:
        if plan is not None and plan.sampling_prob < 1:
            found.append(_no_mask(line))
        elif plan is None:
            notes.append(f"filter_clipped_grad is given no mask at {line}: no row may be padding")
    if plan is not None and plan.noise_multiplier * (1 + _TOLERANCE) < multiplier < math.inf:
        notes.append("there is more noise than the plan accounts for")
    found = list(dict.fromkeys(found))
    return PrivacyReport(
        plan,
        tuple(finding for finding in found if finding.is_decided),
        tuple(finding for finding in found if not finding.is_decided),
        released,
        kept,
        disclosed,
        multiplier,
        steps,
        tuple(dict.fromkeys(notes)),
    )


_TOLERANCE = 1e-4


def _no_mask(line: str) -> Finding:
    return Finding(
        "padding",
        "the plan samples, and filter_clipped_grad is given no mask",
        line,
        "Some slots of a sampled batch hold no example. Without the mask, what stands in them is "
        "clipped and summed like an example. Give the sampler's mask to the call: "
        "is_padding_example=mask.",
    )


def _next_call(step: TracedStep) -> Calls:
    """What keys and counters among the arguments are in the next call."""
    after: defaultdict[int, list[Fact]] = defaultdict(list)
    for fact, at in zip(step.results, step.returns, strict=True):
        for i in at:
            after[i].append(fact)
    given = frozenset(("argument", i) for i in range(len(step.arguments)) if not after[i])
    calls = Calls({}, {}, given, step.same)
    for i, facts in after.items():
        root = ("argument", i)
        numbers = {fact.number for fact in facts}
        number = numbers.pop() if len(numbers) == 1 else None
        if number is not None and number.root == root and not number.along:
            calls.steps[root] = number.offset
        keys = {fact.key for fact in facts}
        key = keys.pop() if len(keys) == 1 else None
        if key is not None and key.root == root:
            calls.paths[root] = key.path
    return calls


# What leaves.

_ADD_NOISE = (
    "Add the plan's noise to what filter_clipped_grad returns, before anything else is made of it: "
    "plan.privatizer stands first in the chain of the optimizer; in a loop by hand, "
    "dp.add_noise(grads, key, stddev)."
)
_BY_HAND = (
    "The check knows the noise of dp.add_noise(grads, key, stddev) and of plan.privatizer, and no "
    "other: use one of them in place of jax.random.normal."
)
_LEAVE_OUT = (
    "Leave it out of the results. If it may be known without noise, name its path in disclose=. A "
    "mean over examples is no release either: it needs a clipped sum and noise."
)
_STAYS = (
    "It comes back in the next call, and nobody may see it, nor what is made of it. If that is so, "
    "name its path in kept=."
)
_KEEP_SECRET = "Leave it out of the results: anyone with the key can subtract the noise."
_DECIDED = ("data", "rows", "nonlinear", "kept", "steered")


def _outputs(
    step: TracedStep, calls: Calls
) -> tuple[list[Finding], tuple[str, ...], tuple[str, ...]]:
    """Results that are no releases: those that break the rule, those kept, those disclosed."""
    record = step.record
    leaving = defaultdict[Finding, list[str]](list)
    kept, disclosed = list[str](), list[str]()
    for i, (name, fact) in enumerate(zip(step.names, step.results, strict=True)):
        if fact.is_public:
            slots = fact.draws & record.slots.keys()
            if slots:
                leaving[_slot_draws(record.slots[min(slots, key=str)])].append(name)
        elif step.disclosed[i]:
            disclosed.append(name)
        elif step.kept[i] and step.returns[i]:
            kept.append(name)
        elif record.found and fact.reason in ("mixed", "noised"):
            continue  # found where it was made
        else:
            leaving[
                _how(fact, bool(step.returns[i]) and step.in_state[i] and not step.reaches_model)
            ].append(name)
    for fact, line in record.shown:
        slots = fact.draws & record.slots.keys()
        if slots:
            leaving[_slot_draws(line)].append("of a print, a branch or a loop")
    findings = [
        finding._replace(found=f"result{'s' * (len(names) > 1)} {some(names, 3)}: {finding.found}")
        for finding, names in leaving.items()
    ]
    return findings, tuple(kept), tuple(disclosed)


def _slot_draws(line: str) -> Finding:
    return Finding(
        "examples apart",
        "it may tell of random numbers that slots of the batch meet one by one",
        line,
        "Draw them with a key of their own, use them for the loss alone, and do not return them.",
        is_decided=False,
    )


def _how(fact: Fact, stays: bool) -> Finding:
    if fact.is_noised:
        how = "noise was drawn by hand, and the check cannot tell whether it is enough"
        return Finding("noise", how, fact.where or "the results", _BY_HAND, is_decided=False)
    if fact.kind is Kind.SUM:
        how, advice = "a clipped sum is in it, without noise", _ADD_NOISE
        is_decided = True
    else:
        how = REASONS[fact.reason or "unknown"]
        is_decided = fact.reason in _DECIDED
        advice = _LEAVE_OUT if fact.reason in ("data", "rows", "unknown") else _ADD_NOISE
    if stays:
        return Finding(
            "release",
            f"{how}, and it stays in the state",
            fact.where or "the results",
            f"{_STAYS} {advice}",
            False,
        )
    return Finding("release", how, fact.where or "the results", advice, is_decided)


# Releases.


def _relation(plan: PrivacyPlan | None) -> NeighboringRelation:
    return NeighboringRelation.ADD_OR_REMOVE_ONE if plan is None else plan.neighboring_relation


def _releases(step: TracedStep, plan: PrivacyPlan | None) -> tuple[float, int, tuple[Row, ...]]:
    """The noise multiplier of all releases together, how many steps they are, and each of them."""
    record = step.record
    moved, sources = SENSITIVITY_OF_UNIT_NORM[_relation(plan)], record.sources
    table = list[Row]()
    for path, release in record.releases.items():
        alone = noise_multiplier([release], sources) / moved
        outputs = (n for n, f in zip(step.names, step.results, strict=True) if path in f.releases)
        sensitivity = release.stddev / alone if alone else math.inf
        table.append(
            Row(
                tuple(outputs),
                sensitivity,
                release.stddev,
                alone,
                turns(release, sources)[0],
                (release.context.line,),
            )
        )
    total, steps = math.inf, 1
    for taken in alternatives(record.releases):
        groups: dict[Any, list[Release]] = defaultdict(list)
        for release in taken:
            groups[samples_of(release, sources)].append(release)
        of_samples = sum(max(turns(one, sources)[0] for one in group) for group in groups.values())
        steps = max(steps, of_samples)
        together = [*groups.values()] if _are_apart(groups) else [taken]
        total = min([total, *(noise_multiplier(group, sources) / moved for group in together)])
    return total, steps, tuple(table)


def _are_apart(groups: Iterable[frozenset[Cut]]) -> bool:
    """Whether releases are of different batches for certain: of other entries of one argument."""
    known = [*groups]
    places = [{cut.ref: cut.where for cut in cuts if cut.how == "at"} for cuts in known]
    return all(
        any(ref in b and b[ref] != where for ref, where in a.items())
        for i, a in enumerate(places)
        for b in places[:i]
    )


def _against_plan(
    step: TracedStep, plan: PrivacyPlan | None, multiplier: float, steps: int
) -> list[Finding]:
    releases = [*step.record.releases.values()]
    if plan is None or not releases or any(f.rule == "noise" for f in step.record.found):
        return []
    lines = " and ".join(dict.fromkeys(release.context.line for release in releases))
    found = list[Finding]()
    if multiplier < plan.noise_multiplier * (1 - _TOLERANCE):
        is_tight = (
            all(term.is_plain for release in releases for row in release.rows for term in row)
            and not step.record.is_noised_again
            and not any(s.bound != s.whole for s in step.record.sources.values())
        )
        stddev = min(release.stddev for release in releases)
        sensitivity = f"{stddev / multiplier:.4g}" if multiplier else "unbounded"
        found.append(
            Finding(
                "noise",
                f"the noise multiplier is {'' if is_tight else 'at least '}{multiplier:.6g}, and "
                f"the plan accounts for {plan.noise_multiplier:.6g} (standard deviation "
                f"{stddev:.4g}, sensitivity of all releases of a step together "
                f"{'' if is_tight else 'at most '}{sensitivity})",
                lines,
                "The standard deviation must be the plan's noise multiplier times this "
                "sensitivity. plan.privatizer(grad_fn, key) sets it for one clipped sum. For k "
                "sums of one batch with noise each, multiply each standard deviation by sqrt(k)."
                if is_tight
                else "The check has only a bound on the sensitivity here. Add the noise to what "
                "filter_clipped_grad returns, before other arithmetic.",
                is_tight,
            )
        )
    if steps > plan.steps:
        text = f"a call takes {steps} steps, and the plan accounts for {plan.steps}"
        found.append(Finding("noise", text, lines, "Make a plan with as many steps."))
    return found


# Keys.


def _fresh_noise(step: TracedStep, calls: Calls) -> tuple[list[Finding], list[str]]:
    """Whether each noise has a key of its own, and another one in each turn and call."""
    record = step.record
    uses, found, notes = {**record.uses}, list[Finding](), list[str]()
    for i, fact in enumerate(step.results):
        is_carried = any(("argument", at) in calls.paths for at in step.returns[i])
        if fact.key is not None and not is_carried:
            context = next(iter(uses.values())).context if uses else None
            if context is not None:
                where = context._replace(line="the results", loops=(), branches=())
                uses["result", i] = Use("returned", fact.key, where)
    hiding = record.noises | {path: frozenset[Any]() for path in record.slots if path in uses}
    for path, leaves in hiding.items():
        use = uses[path]
        line = use.context.line
        for loop in (*use.context.loops, None):
            is_fresh = is_new(use.key, CALLS if loop is None else loop.path, calls)
            if not is_fresh:
                found.append(_stale(use, loop is None, line, is_fresh is False))
        for other, another in uses.items():
            if other == path or (path in record.slots and other in record.slots):
                continue
            others = record.noises.get(other, frozenset[Any]())
            if not _are_independent(use, leaves, another, others, calls):
                found.append(_shared(use, another, calls))
        notes += _given(step, use.key, calls)
    return found, notes


def _are_independent(
    a: Use, leaves: frozenset[Any], b: Use, others: frozenset[Any], calls: Calls
) -> bool:
    if parted(a.key, b.key, calls):
        return True
    if a.key.root is None or a.what != "noise" or b.what != "noise":
        return False
    roots = (calls.same.get(key.root, key.root) for key in (a.key, b.key))
    is_one_stream = len({*roots}) == 1 and a.key.path[:-1] == b.key.path[:-1]
    if is_one_stream and leaves and others and not leaves & others:
        return True  # other leaves of one tree
    choices, made = dict(a.context.branches), dict(b.context.branches)
    is_other_branch = any(made.get(choice, number) != number for choice, number in choices.items())
    return a.key == b.key and is_other_branch


def _stale(use: Use, is_call: bool, line: str, is_decided: bool) -> Finding:
    what = "noise" if use.what == "noise" else "numbers that slots of the batch meet"
    turn = "call" if is_call else "turn of a loop"
    is_constant = isinstance(use.key.root, tuple) and use.key.root[0] == "constant"
    found = f"the key of the {what} is the same one in each {turn}"
    if not is_decided:
        found = f"the key of the {what} is not proven to be another one in each {turn}"
    advice = (
        "Fold a counter of the state into it (jax.random.fold_in(key, step)), or split it and "
        "return the other half in the state."
    )
    if is_constant:
        advice = f"It is a constant of the program. {advice}"
    return Finding("fresh noise", found, line, advice, is_decided)


def _shared(noise: Use, use: Use, calls: Calls) -> Finding:
    shown = {
        "noise": "another noise",
        "draw": "other random numbers",
        "loss": "the loss",
        "returned": "a result",
        "door": "a print or callback",
    }[use.what]
    a, b = noise.key, use.key
    path = min(len(a.path), len(b.path))
    is_decided = a.root is not None and a.root == b.root and None not in (*a.path, *b.path)
    is_decided = is_decided and a.path[:path] == b.path[:path]
    found = f"one key, or one that follows from it, is used for the noise and for {shown}"
    if not is_decided:
        found = f"the key of the noise is not proven to be independent of that of {shown}"
    at = (
        ""
        if use.context.line in (noise.context.line, "the results")
        else f" (at {use.context.line})"
    )
    advice = "Use a key for nothing else than one noise: jax.random.split gives as many as needed."
    if use.what == "returned":
        advice = _KEEP_SECRET
    rule = (
        "release"
        if use.what == "returned"
        else "side door"
        if use.what == "door"
        else "fresh noise"
    )
    return Finding(rule, found + at, noise.context.line, advice, is_decided)


def _given(step: TracedStep, key: Key, calls: Calls) -> Sequence[str]:
    """What the caller has to see to."""
    roots = [key.root, *(getattr(one, "root", None) for one in key.path)]
    return [
        f"the caller gives {step.argument_names[root[1]]}: it, or a key and a number together, must "
        "never be the same in two calls"
        for root in roots
        if isinstance(root, tuple) and root in calls.given
    ]
