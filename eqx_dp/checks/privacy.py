"""`check_privacy`: a training step is checked against its plan, on its traced program."""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import equinox as eqx
import jax
import jax.extend.core as jex_core
from jaxtyping import PyTree

from ..paths import dotted, matches
from ..privacy import SENSITIVITY_OF_UNIT_NORM, NeighboringRelation, PrivacyPlan
from ..shown import shown
from . import numbers, rows
from .arguments import Argument, arguments_of, private_among, traceable
from .feedback import next_arguments
from .flow import Context
from .freshness import Calls, fresh_noise
from .privacy_flow import PrivacyFlow
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
from .terms import Affine, Key, Root, Turns
from .values import Cut, Path, Private, Public, Random, Sum, Value


@runtime_checkable
class TrainsPrivately(Protocol):
    """A step that knows its plan, such as one of `make_step`: `step(state, *batch, mask)`."""

    @property
    def plan(self) -> PrivacyPlan:
        """What sampling, noise and accounting follow."""
        ...

    @property
    def disclose(self) -> tuple[str, ...]:
        """What it discloses of each batch, under `disclosed` in its state."""
        ...


def check_privacy(
    fn: Callable[..., Any],
    *args: Any,
    private: Any = None,
    plan: PrivacyPlan | None = None,
    disclose: Iterable[str] = (),
    **kwargs: Any,
) -> PrivacyReport:
    """Checks that private data leaves a training step through the plan's noise, and no other way.

    The step is traced, on shapes alone, and its program is read equation by equation, through
    `jit`, `scan`, `while`, `cond`, `remat`, derivative rules and `shard_map`. Nothing is compiled
    or computed. In a test:

    ```python
    dp.check_privacy(step, state, xs, ys, is_padding_example=mask).raise_if_violated()
    dp.check_privacy(by_hand, model, opt_state, xs, ys, mask, private=(2, 3, 4), plan=plan)
    ```

    Each value is public, private, a clipped sum with its sensitivity, or made of releases. The
    engine (`filter_clipped_grad`) makes clipped sums and shows their bounds in the program. Linear
    arithmetic on them changes the sensitivity by a factor that is known. Independent normal noise
    of standard deviation s turns a sum of sensitivity S into a release of noise multiplier s / S.
    What is made of releases alone is post-processing.

    | rule | what is checked |
    |---|---|
    | release | a result that private data is in is a release, or named in `disclose`, or carried on \
in the state: then it is listed as kept, and must not be published |
    | noise | the noise multiplier of all releases of a step together, from the numbers in the \
program, and how many steps a call takes, are at least as the plan has them |
    | side door | no private value goes into a callback, a print, `eqx.error_if` or a mutable \
array, decides how long a loop runs or which branch is taken (outside of the engine), or a shape |
    | fresh noise | no two draws have one key, or one key and a key split from it; the loss's key \
is another one; keys change from turn to turn of a loop and from call to call |
    | examples apart | rows of the data do not meet before the engine clips |
    | padding | the engine is given a mask, if the plan samples |

    **Guarantee.** If the report is `ok`, one call of the step is, for the values that the arguments
    not named as private hold, a Gaussian mechanism on the private arguments with at least the
    report's `noise_multiplier` (repeated `steps` times on other samples), and nothing else in its
    results depends on them but what `kept` and `disclosed` list. It holds under these assumptions:

    - Private arguments hold one example a row. Arguments of equal length belong together row by
      row, and no example stands in two rows. Rows are drawn as the plan says (`plan.sampler`).
    - Results come back as the arguments at their places, as `check_precision` describes it. A key
      that nothing comes back as is another one in each call.
    - Different arguments and constants are different, independent keys, and the generator's numbers
      are independent for different keys. All keys are secret.
    - Numbers are real: what floating point loses, `check_precision` and the engine's own bounds
      speak of.
    - The data is in arguments. What a function closes over is taken for public.

    | case | the report |
    |---|---|
    | several losses with noise each | one mechanism: 1 / sum of (sensitivity / noise)^2, rooted |
    | a sum of k clipped sums of one batch | sensitivity k times as large |
    | a sum of clipped sums of disjoint slices | that of one |
    | a clipped sum times a traced number | undecided: give the factor as a constant |
    | noise of another distribution | undecided |
    | a clipped sum by other code than the engine's | undecided: its sensitivity is not known |
    | a clipped sum that is kept over calls, and then noised | undecided |
    | noise after a nonlinear optimizer | a violation: unbounded |
    | a call that takes several steps in a scan | `steps` of the plan, each on rows of its own |

    It does not see: what a caller does with results; timing, beyond loops and branches; what a
    compiler makes of the program.

    Args:
        fn: the step, jitted or not: any function, also one with several calls of the engine.
        *args: its arguments: trees of arrays, or of `jax.ShapeDtypeStruct` in their place, and of
            anything else. With sharding, in the same mesh context as in training.
        private: which of them hold private data: positions (`(2, 3)`), names or dotted paths
            (`("xs", "batch.label")`), or a tree prefix of the positional arguments with bools at
            its leaves. The mask and the indices of a sample are private, too. For a step of
            `make_step` it is known.
        plan: what the noise is held against; for a step of `make_step` it is known.
        disclose: patterns of dotted paths of results, or of their ends (`"2"`, `"loss"`), that are
            released without noise knowingly.
        **kwargs: more arguments, by name.

    Returns:
        A [`PrivacyReport`][]: `ok`, `violations`, `undecided`, `releases`, `kept`; `str()` is a
        table.

    Raises:
        ValueError: `private` is missing, or names nothing; `disclose` matches no result; `plan` is
            no plan.
    """
    made = cast(object, fn)
    if isinstance(made, TrainsPrivately):
        if private is None:
            private = (*range(1, len(args)), *(name for name in kwargs if name != "extra"))
        plan = made.plan if plan is None else plan
        disclose = (*disclose, *(f"disclosed.{name}" for name in made.disclose))
    if plan is not None and not isinstance(cast(object, plan), PrivacyPlan):
        raise ValueError(f"plan must be a PrivacyPlan or None; found {shown(plan)}.")
    args, kwargs = traceable((args, kwargs))
    arguments = arguments_of(fn, args, kwargs)
    is_private = private_among(arguments, private, args)
    try:
        program, results, _ = eqx.filter_make_jaxpr(fn)(*args, **kwargs)
    except jax.errors.JAXTypeError as error:
        return _untraceable(error, plan)
    names = [
        dotted(path) or "the result" for path, _ in jax.tree_util.tree_leaves_with_path(results)
    ]
    patterns = _checked_patterns(disclose, names)
    returns = next_arguments(args, kwargs, results)
    step = _Step(program, arguments, is_private, names, returns, _in_state(results))
    reports = (_report(step, call, plan, patterns) for call in _calls(step))
    report = next(reports)
    for later in reports:
        if report.violations:
            break
        report = report if later.ok else later
    return report


def _untraceable(error: Exception, plan: PrivacyPlan | None) -> PrivacyReport:
    said = str(error).strip().splitlines()[0]
    finding = Finding(
        "side door",
        f"the step cannot be traced, for a value decides a shape or what Python does: {said}",
        "see the error that JAX raises for this step",
        "Shapes and Python's if must not depend on traced values: use masks and jnp.where.",
        is_decided=False,
    )
    return PrivacyReport(plan, (), (finding,), (), (), (), math.inf, 0, ())


def _checked_patterns(disclose: Iterable[str], names: list[str]) -> tuple[str, ...]:
    patterns = (disclose,) if isinstance(disclose, str) else tuple(disclose)
    for pattern in patterns:
        if not any(_names(pattern, name) for name in names):
            raise ValueError(
                f"disclose names {shown(pattern)}, which is none of the results. Results are: "
                f"{', '.join(names[:20])}{' and more' if len(names) > 20 else ''}."
            )
    return patterns


def _names(pattern: str, name: str) -> bool:
    """Whether a pattern describes a dotted path, or its end."""
    return matches(pattern, name) or matches(f"**.{pattern}", name)


def _in_state(results: PyTree[Any]) -> list[bool]:
    """Whether each result is inside of something that may be a state, and not one of several."""
    is_several = type(results) in (tuple, list)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(results)]
    return [len(path) > 1 or not is_several for path in paths]


class _Step(NamedTuple):
    """A traced step, with what is known of its arguments and results."""

    program: jex_core.ClosedJaxpr
    arguments: list[Argument]
    is_private: list[bool]
    names: list[str]
    returns: list[list[int]]
    in_state: list[bool]


class _Call(NamedTuple):
    """What was found of a call of a step, of which arguments are as earlier calls left them.

    Attributes:
        flow: through the step.
        results: of the call.
        before: the results of the call before.
        keys: what keys among the arguments become.
    """

    flow: PrivacyFlow
    results: list[Value]
    before: list[Value]
    keys: Calls

    @property
    def releases(self) -> dict[Path, Noised]:
        """Those that leave the step."""
        public = [value for value in self.results if isinstance(value, Public)]
        leaving = self.flow.shown.union(*(value.releases for value in public))
        return {path: one for path, one in self.flow.releases.items() if path in leaving}


def _calls(step: _Step) -> Iterator[_Call]:
    """Call after call, until nothing new comes back."""
    back: frozenset[int] = frozenset()
    fixed: frozenset[int] = frozenset()
    counters: dict[Hashable, Turns] = {}
    before: list[Value] | None = None
    while True:
        flow = PrivacyFlow()
        flow.counters.update(counters)
        inputs = [
            _input(i, argument, step.is_private[i], i in back, i in fixed)
            for i, argument in enumerate(step.arguments)
        ]
        results = flow.program(step.program, inputs, Context())
        keys, now, counting = _next_call(step, inputs, results)
        if now != fixed or counting != counters:
            fixed, counters = now, counting
            continue
        yield _Call(flow, results, before or results, keys)
        kept = {
            i
            for value, at in zip(results, step.returns, strict=True)
            if isinstance(value, Private | Sum)
            for i in at
            if not step.is_private[i]
        }
        if kept <= back:
            return
        before, back = results, back | kept


def _input(i: int, argument: Argument, is_private: bool, is_back: bool, is_fixed: bool) -> Value:
    if is_private:
        return Private(rows.of_argument(argument.shape))
    if is_back:
        where = f"argument {argument.names[-1]}, from an earlier call"
        return Private(reason="kept", where=where, arguments=frozenset({i}))
    return numbers.argument(argument.names[-1], argument.shape, argument.is_key, not is_fixed)


def _next_call(
    step: _Step, inputs: list[Value], results: list[Value]
) -> tuple[Calls, frozenset[int], dict[Hashable, Turns]]:
    """What keys and counters among the arguments are in the next call."""
    after: defaultdict[int, list[Value]] = defaultdict(list)
    for value, at in zip(results, step.returns, strict=True):
        for i in at:
            after[i].append(value)
    steps: dict[Hashable, tuple[Any, ...]] = {}
    fixed, given, counting = set[int](), set[Hashable](), dict[Hashable, Turns]()
    for i, value in enumerate(inputs):
        term = value.term if isinstance(value, Public) else None
        root = term.root if isinstance(term, Key) else term
        if not isinstance(root, Root):
            continue
        if not after[i]:
            given.add(root.name)
            continue
        terms = [new.term if isinstance(new, Public) else None for new in after[i]]
        if all(new == term for new in terms):
            fixed.add(i)
        elif isinstance(terms[0], Affine) and terms[0][:2] == (root, 1):
            counting[root.name] = Turns("calls", None, terms[0].offset, None)
        elif isinstance(terms[0], Key) and terms[0].root.name == root.name:
            steps[root.name] = terms[0].path
    return Calls(steps, frozenset(given)), frozenset(fixed), counting


def _report(
    step: _Step, call: _Call, plan: PrivacyPlan | None, disclose: tuple[str, ...]
) -> PrivacyReport:
    flow, releases = call.flow, call.releases
    leaving, kept, disclosed = _outputs(step, call, disclose)
    multiplier, steps, released = _releases(step, call, plan)
    fresh, notes = fresh_noise(releases, flow.draws, flow.of_losses, flow.counters, call.keys)
    found = [*leaving, *flow.found, *_against_plan(call, plan, multiplier, steps), *fresh]
    for line in flow.unmasked:
        if plan is not None and plan.sampling_prob < 1:
            found.append(_no_mask(line))
        elif plan is None:
            notes.append(f"the engine is given no mask at {line}: no row may be padding")
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
        "the plan samples, and the engine is given no mask",
        line,
        "A sampled batch has padding, whose index is -1: without the mask the last example counts "
        "in every padding slot. Hand on is_padding_example=.",
    )


def _outputs(
    step: _Step, call: _Call, disclose: tuple[str, ...]
) -> tuple[list[Finding], tuple[str, ...], tuple[str, ...]]:
    """Results that are no releases: those that break the rule, those kept, those disclosed."""
    leaving = defaultdict[Finding, list[str]](list)
    kept, disclosed = list[str](), list[str]()
    hiding = {draw for release in call.releases.values() for draw in release.draws}
    for i, (name, value) in enumerate(zip(step.names, call.results, strict=True)):
        if isinstance(value, Public | Random):
            raw = value.noise if isinstance(value, Public) else value.draws
            if raw & hiding:
                leaving[_leaves("the noise that hides a clipped sum is in it")].append(name)
            elif isinstance(value, Public) and not step.returns[i] and _tells_noise(call, value):
                how = "the noise that hides a clipped sum can be drawn again with this key"
                leaving[_leaves(how)].append(name)
        elif any(_names(pattern, name) for pattern in disclose):
            disclosed.append(name)
        elif isinstance(value, Private) and value.reason == "mixed":
            continue  # found where the engine is called
        elif call.flow.models & set(step.returns[i]):
            before = call.before[i]  # which tells why
            leaving[_how(before if isinstance(before, Private | Sum) else value)].append(name)
        elif step.returns[i] and step.in_state[i] and not _is_to_be_hidden(value):
            kept.append(name)
        else:
            leaving[_how(value)].append(name)
    if kept and not call.releases and not leaving:
        how = "private data is in it, and nothing is released through noise"
        leaving[_leaves(how)].extend(kept)
    findings = [
        finding._replace(found=f"{_listed(names)}: {finding.found}")
        for finding, names in leaving.items()
    ]
    return findings, tuple(kept), tuple(disclosed)


def _tells_noise(call: _Call, value: Public) -> bool:
    """Whether a key of the noise is in a result, or one that it is made from."""
    hiding = {draw for release in call.releases.values() for draw in release.draws}
    keys = [*value.words, *([value.term] if isinstance(value.term, Key) else [])]
    return any(
        key.root == drawn.key.root and drawn.key.path[: len(key.path)] == key.path
        for key in keys
        for drawn in (call.flow.draws[path] for path in hiding if path in call.flow.draws)
    )


def _is_to_be_hidden(value: Private | Sum) -> bool:
    """Whether noise was added, in vain."""
    return isinstance(value, Private) and value.noised is not None


def _leaves(how: str, where: str = "") -> Finding:
    return Finding(
        "release",
        how,
        where or "the results",
        "Add the plan's noise to the clipped sum before anything else is made of it "
        "(plan.privatizer, first in the chain); leave out what is private, or name it in disclose= "
        "if it may be known.",
    )


def _how(value: Private | Sum) -> Finding:
    if not isinstance(value, Private):
        return _leaves("a clipped sum is in it, without noise")
    how = {
        "data": "private data is in it",
        "nonlinear": "a clipped sum is in it, and something nonlinear came before any noise",
        "rounded": "a clipped sum is in it that was rounded before any noise",
        "kept": "private data of an earlier call is in it",
        "mixed": "it is made of a clipped sum of unknown sensitivity",
        "noise known": "the noise of a release is taken off again",
        "taken": "private data is in it",
    }[value.reason]
    if value.noised is None or value.reason in ("mixed", "noise known"):
        return _leaves(how, value.where)
    stddev, line = value.noised
    is_unbounded = value.reason == "nonlinear"
    bound = "unbounded" if is_unbounded else "not known"
    made = ", and it was not made by filter_clipped_grad" if value.reason == "data" else ""
    return Finding(
        "noise",
        f"noise of standard deviation {stddev:.4g} was added, but the noise multiplier is {bound}: "
        f"{how}{made} (at {value.where or line})",
        line,
        "Add the noise to the clipped sum itself, first in the chain.",
        is_decided=is_unbounded,
    )


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")


def _releases(
    step: _Step, call: _Call, plan: PrivacyPlan | None
) -> tuple[float, int, tuple[Release, ...]]:
    """Noise by sensitivity of all releases together, how many steps they are, and each group."""
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE if plan is None else plan.neighboring_relation
    moved, sources = SENSITIVITY_OF_UNIT_NORM[relation], call.flow.sources

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


def _row(step: _Step, call: _Call, releases: Mapping[Path, Noised], multiplier: float) -> Release:
    outputs = tuple(
        name
        for name, value in zip(step.names, call.results, strict=True)
        if isinstance(value, Public) and value.releases & releases.keys()
    )
    parts = releases.values()
    stddev = min(part.stddev for part in parts)
    sensitivity = stddev / multiplier if multiplier else math.inf
    where = tuple(sorted({part.line for part in parts}))
    cuts = [call.flow.sources[term.source].cuts for part in parts for term in part.value.terms]
    turns = [
        loop.length or 0
        for loop in {loop for part in parts for loop in part.loops}
        if all(is_another_sample(cut, loop.path) for cut in cuts)
    ]
    return Release(outputs, sensitivity, stddev, multiplier, math.prod(turns), where)


def _against_plan(
    call: _Call, plan: PrivacyPlan | None, multiplier: float, steps: int
) -> list[Finding]:
    found: list[Finding] = []
    releases = call.releases.values()
    lines = " and ".join(dict.fromkeys(release.line for release in releases))
    for release in releases:
        bounds = [call.flow.sources[term.source].bound for term in release.value.terms]
        if math.inf in bounds:
            advice = "Set a finite l2_clip_norm."
            text = "a clipped sum has no finite clip norm: the noise multiplier is unbounded"
            found.append(Finding("noise", text, release.line, advice))
        elif not release.is_known:
            found.append(_not_known(release.value.why, release.line))
    if plan is None or not releases or found:
        return found
    if multiplier < plan.noise_multiplier * (1 - _TOLERANCE):
        is_tight = all(release.value.is_tight for release in releases)
        least = "" if is_tight else "at least "
        found.append(
            Finding(
                "noise",
                f"the noise multiplier is {least}{multiplier:.6g}, and the plan accounts for "
                f"{plan.noise_multiplier:.6g}",
                lines,
                "The standard deviation must be noise multiplier x sensitivity of all that is "
                "released in a step together: plan.privatizer(grad_fn, key) sets it for one sum. "
                "For k sums of one batch with a noise each, multiply each by sqrt(k).",
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
