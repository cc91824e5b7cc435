"""What is said of a call of a step: findings, releases, and how they stand to the plan."""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping

from ..paths import matches
from ..privacy import SENSITIVITY_OF_UNIT_NORM, NeighboringRelation, PrivacyPlan
from ..shown import some
from .calls import StepCall, TracedStep
from .freshness import fresh_noise
from .key_paths import paths_part
from .privacy_report import Finding, PrivacyReport, Release
from .releases import (
    Noised,
    alternatives,
    batches,
    groups,
    is_another_sample,
    noise_multiplier,
    sensitivity_by_noise,
)
from .terms import Key
from .values import Cut, Path, Private, Public, Random, Sum


def names_it(pattern: str, name: str) -> bool:
    """Whether a pattern describes a dotted path, or its end."""
    return matches(pattern, name) or matches(f"**.{pattern}", name)


def report_on(
    step: TracedStep, call: StepCall, plan: PrivacyPlan | None, disclose: tuple[str, ...]
) -> PrivacyReport:
    """The report on a call, held against a plan; `disclose` has patterns of its results."""
    record, releases = call.record, call.releases
    leaving, kept, disclosed = _outputs(step, call, disclose)
    multiplier, steps, released = _releases(step, call, plan)
    fresh, notes = fresh_noise(releases, record, call.keys)
    found = [*leaving, *record.found, *_against_plan(call, plan, multiplier, steps), *fresh]
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
        tuple(notes),
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


def _outputs(
    step: TracedStep, call: StepCall, disclose: tuple[str, ...]
) -> tuple[list[Finding], tuple[str, ...], tuple[str, ...]]:
    """Results that are no releases: those that break the rule, those kept, those disclosed."""
    leaving = defaultdict[Finding, list[str]](list)
    kept, disclosed, lines = list[str](), list[str](), list[str]()
    hiding = call.hiding
    for i, (name, value) in enumerate(zip(step.names, call.results, strict=True)):
        if isinstance(value, Public | Random):
            raw = value.noise if isinstance(value, Public) else value.draws
            if raw & hiding:
                how = "the noise that hides a clipped sum is in it"
                leaving[_leaves(how, advice=_KEEP_SECRET)].append(name)
            elif isinstance(value, Public) and not step.returns[i] and _tells_noise(call, value):
                how = "the noise that hides a clipped sum can be drawn again with this key"
                leaving[_leaves(how, advice=_KEEP_SECRET)].append(name)
        elif any(names_it(pattern, name) for pattern in disclose):
            disclosed.append(name)
        elif call.record.found and isinstance(value, Private) and value.reason == "mixed":
            continue  # found where the engine is called
        elif call.record.models & set(step.returns[i]):
            before = call.before[i]  # which tells why
            leaving[_how(before if isinstance(before, Private | Sum) else value)].append(name)
        elif step.returns[i] and step.in_state[i] and not _is_to_be_hidden(value):
            kept.append(name)
            lines += [value.where] if isinstance(value, Private) and value.where else []
        else:
            leaving[_how(value)].append(name)
    if kept and not call.releases and not leaving:
        how = "private data is in it, and nothing is released through noise"
        leaving[_leaves(how, *lines[:1])].extend(kept)
        kept = []
    for value, line in call.record.shown:
        raw = value.noise if isinstance(value, Public) else value.draws
        if raw & hiding or (isinstance(value, Public) and _tells_noise(call, value)):
            how = "the noise that hides a clipped sum, or its key, goes into a host function"
            found = Finding("side door", how, line, _KEEP_SECRET)
            leaving[found].append("of a print or callback")
    for draw in sorted(hiding & call.record.used.keys()):
        how = "the noise of a release, which is in the model, the data or another private value too"
        leaving[Finding("fresh noise", how, call.record.used[draw], _OF_ITS_OWN, False)].append("")
    findings = [
        finding._replace(found=f"result{'s' * (len(names) > 1)} {some(names, 3)}: {finding.found}")
        for finding, names in leaving.items()
    ]
    return findings, tuple(kept), tuple(disclosed)


def _tells_noise(call: StepCall, value: Public) -> bool:
    """Whether a key of the noise is in a result, or one that it is made from."""
    draws = call.record.draws
    keys = [*value.words, *([value.term] if isinstance(value.term, Key) else [])]
    return any(
        key.root == drawn.key.root
        and len(key.path) <= len(drawn.key.path)
        and not paths_part(key.path, drawn.key.path, call.record.counters)
        for key in keys
        for drawn in (draws[path] for path in call.hiding if path in draws)
    )


def _is_to_be_hidden(value: Private | Sum) -> bool:
    """Whether noise was added, in vain."""
    return isinstance(value, Private) and value.noised is not None


_ADD_NOISE = (
    "Add the plan's noise to what filter_clipped_grad returns, before anything else is made of it: "
    "plan.privatizer stands first in the chain of the optimizer."
)
_LEAVE_OUT = (
    "Leave it out of the results. If it may be known without noise, name its path in disclose=. A "
    "mean over examples is no release either: it needs a clipped sum and noise."
)
_OF_ITS_OWN = "Draw noise with a key that is used for nothing else."
_KEEP_SECRET = "Leave it out of the results: who knows the noise can subtract it."


def _leaves(how: str, where: str = "", advice: str = _ADD_NOISE) -> Finding:
    return Finding("release", how, where or "the results", advice)


def _how(value: Private | Sum) -> Finding:
    if not isinstance(value, Private):
        return _leaves("a clipped sum is in it, without noise")
    how = {
        "data": "private data is in it",
        "nonlinear": "a clipped sum is in it, and something nonlinear came before any noise",
        "unknown": "a clipped sum is in it, through something of which no bound is known",
        "rounded": "a clipped sum is in it that was rounded before any noise",
        "kept": "private data of an earlier call is in it",
        "mixed": "it is made of a clipped sum of unknown sensitivity",
        "noise known": "the noise of a release is taken off again",
        "taken": "private data is in it",
        "slots": "private data is in it",
    }[value.reason]
    if value.noised is None or value.reason in ("mixed", "noise known"):
        is_of_rows = value.reason in ("data", "taken", "slots")
        where = "" if value.reason == "kept" else value.where
        return _leaves(how, where, _LEAVE_OUT if is_of_rows else _ADD_NOISE)
    stddev, line = value.noised
    is_unbounded = value.reason == "nonlinear"
    bound = "unbounded" if is_unbounded else "not known"
    made = ", and it was not made by filter_clipped_grad" if value.reason == "data" else ""
    is_elsewhere = value.reason != "kept" and value.where not in ("", line)
    at = f" (at {value.where})" if is_elsewhere else ""
    return Finding(
        "noise",
        f"noise of standard deviation {stddev:.4g} was added, but the noise multiplier is {bound}: "
        f"{how}{made}{at}",
        line,
        "Add the noise to what filter_clipped_grad returns, before anything else is made of it.",
        is_decided=is_unbounded,
    )


def _releases(
    step: TracedStep, call: StepCall, plan: PrivacyPlan | None
) -> tuple[float, int, tuple[Release, ...]]:
    """Noise by sensitivity of all releases together, how many steps they are, and each group."""
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE if plan is None else plan.neighboring_relation
    moved, sources = SENSITIVITY_OF_UNIT_NORM[relation], call.record.sources

    def once(releases: Mapping[Path, Noised]) -> float:
        found = [sensitivity_by_noise(group, releases, sources) for group in groups(releases)]
        return noise_multiplier(found) / moved

    def multiplier(releases: Mapping[Path, Noised]) -> float:
        return min(map(once, alternatives(releases)))

    by_call: defaultdict[frozenset[Hashable], dict[Path, Noised]] = defaultdict(dict)
    by_batch: defaultdict[frozenset[Cut], dict[Path, Noised]] = defaultdict(dict)
    for group in groups(call.releases):  # clip norms of one call are one release
        those = {path: call.releases[path] for path in group.releases}
        by_call[frozenset(source[0] for source in group.sources)].update(those)  # pyright: ignore
        for path, release in those.items():
            by_batch[batches(release, sources)][path] = release
    table = [_row(step, call, those, multiplier(those)) for those in by_call.values()]
    if len(set().union(*by_batch)) == len(by_batch) == sum(map(len, by_batch)):  # a step each
        total = min(map(multiplier, by_batch.values()), default=math.inf)
        return total, sum(row.times for row in table), tuple(table)
    return multiplier(call.releases), max((row.times for row in table), default=1), tuple(table)


def _row(
    step: TracedStep, call: StepCall, releases: Mapping[Path, Noised], multiplier: float
) -> Release:
    outputs = tuple(
        name
        for name, value in zip(step.names, call.results, strict=True)
        if isinstance(value, Public) and value.releases & releases.keys()
    )
    parts = releases.values()
    stddev = min(part.stddev for part in parts)
    sensitivity = stddev / multiplier if multiplier else math.inf
    where = tuple(sorted({part.at.line for part in parts}))
    cuts = [call.record.sources[term.source].cuts for part in parts for term in part.value.terms]
    turns = [
        loop.length or 0
        for loop in {loop for part in parts for loop in part.at.loops}
        if all(is_another_sample(cut, loop.path) for cut in cuts)
    ]
    return Release(outputs, sensitivity, stddev, multiplier, math.prod(turns), where)


def _against_plan(
    call: StepCall, plan: PrivacyPlan | None, multiplier: float, steps: int
) -> list[Finding]:
    found: list[Finding] = []
    releases = call.releases.values()
    lines = " and ".join(dict.fromkeys(release.at.line for release in releases))
    for release in releases:
        bounds = [call.record.sources[term.source].bound for term in release.value.terms]
        if math.inf in bounds:
            advice = "Set a finite l2_clip_norm."
            text = "a clipped sum has no finite clip norm: the noise multiplier is unbounded"
            found.append(Finding("noise", text, release.at.line, advice))
        elif not release.is_known:
            found.append(_not_known(release.value.why, release.at.line))
    if plan is None or not releases or found:
        return found
    if multiplier < plan.noise_multiplier * (1 - _TOLERANCE):
        is_tight = all(release.value.is_tight for release in releases)
        least = "" if is_tight else "at least "
        stddev = min(release.stddev for release in releases)
        sensitivity = f"{stddev / multiplier:.4g}" if multiplier else "unbounded"
        found.append(
            Finding(
                "noise",
                f"the noise multiplier is {least}{multiplier:.6g}, and the plan accounts for "
                f"{plan.noise_multiplier:.6g} (standard deviation {stddev:.4g}, sensitivity of all "
                f"releases of a step together {'' if is_tight else 'at most '}{sensitivity})",
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


def _not_known(why: str, line: str) -> Finding:
    reason = why or "the noise has no standard deviation that is a constant of the program"
    return Finding(
        "noise",
        f"the noise multiplier is not known: {reason}",
        line,
        "Give factors and standard deviations as Python numbers, so that they are constants.",
        is_decided=False,
    )
