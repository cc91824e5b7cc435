"""`check_privacy`: a training step is checked against its plan, on its traced program."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast, runtime_checkable

import equinox as eqx
import jax

from ..expected import expect, function
from ..paths import dotted
from ..privacy import PrivacyPlan
from ..shown import shown, some
from .arguments import arguments_of, private_among, traceable
from .calls import TracedStep, calls_of
from .feedback import next_arguments
from .privacy_report import Finding, PrivacyReport
from .verdict import names_it, report_on


@runtime_checkable
class TrainsPrivately(Protocol):
    """A step that knows its plan, such as one of `make_step`: `step(state, *batch, mask)`."""

    @property
    def plan(self) -> PrivacyPlan:
        """What sampling, noise and accounting follow."""
        ...

    def init(self, model: Any) -> Any:
        """The state before the first step."""
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
    | release | a result that private data is in is a release, is named in `disclose`, or stays in \
the state: then it is listed as kept, and must not be published |
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
      row, and no example stands in two rows. Rows are drawn as the plan says (`plan.sampler`). An
      example that is left out moves those behind it by one row, as the sampler does it.
    - Indices and other numbers in an argument do not repeat. Counters stay below 2^24.
    - Results come back as the arguments at their places, as `check_precision` describes it. A key
      that nothing comes back as is another one in each call.
    - Different arguments and constants are different, independent keys, and the generator's numbers
      are independent for different keys. All keys are secret, and so are seeds that the program
      holds as constants.
    - Numbers are real: what floating point loses, `check_precision` and the engine's own bounds
      speak of.
    - The data is in arguments. What a function closes over is taken for public.

    | case | the report |
    |---|---|
    | several losses with noise each | one mechanism: 1 / sum of (sensitivity / noise)^2, rooted |
    | a sum of k clipped sums of one batch | sensitivity k times as large |
    | a sum of clipped sums of all disjoint slices of a batch | that of one |
    | some of the slices, or each with noise of its own | twice that of each: rows move |
    | rows that meet constants of their slots (stratified times, ramps) | undecided: rows move |
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
            private = (*range(1, len(args)), *kwargs)
        plan = made.plan if plan is None else plan
    expect("plan", plan, (PrivacyPlan, type(None)), "a PrivacyPlan or None")
    function("fn", fn, "the step")
    args, kwargs = traceable((args, kwargs))
    arguments = arguments_of(fn, args, kwargs)
    is_private = private_among(arguments, private, args)
    try:
        program, results, _ = eqx.filter_make_jaxpr(fn)(*args, **kwargs)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        return _untraceable(error, plan)
    leaves = jax.tree_util.tree_leaves_with_path(results)
    names = [dotted(path) or "the result" for path, _ in leaves]
    patterns = _checked_patterns(disclose, names)
    returns = next_arguments(args, kwargs, results)
    # A result may be a state if it is inside of something, and not one of several by itself.
    is_several = type(results) in (tuple, list)
    in_state = [len(path) > 1 or not is_several for path, _ in leaves]
    step = TracedStep(program, arguments, is_private, names, returns, in_state)
    reports = (report_on(step, call, plan, patterns) for call in calls_of(step))
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
        if not any(names_it(pattern, name) for name in names):
            raise ValueError(
                f"disclose names {shown(pattern)}, which is none of the results. Results are: "
                f"{some(names, 20)}. "
                "Name one of them, or a pattern that matches one."
            )
    return patterns
