"""`check_privacy`: a training step is checked against its plan, on its traced program."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import numpy as np

from ..expected import expect, function
from ..paths import dotted
from ..privacy import PrivacyPlan, Sampler
from ..programs import users_line
from ..sharding import check_whole
from ..shown import shown, some
from ..trees import is_key
from .arguments import Argument, arguments_of, arrays_in, next_arguments, under
from .facts import Fact, Kind, Ref, key_bytes
from .flow import Context
from .keys import FIRST, Along, Key, Number
from .privacy_flow import PrivacyFlow
from .privacy_report import Finding, PrivacyReport
from .verdict import Result, TracedStep, names_it, report_on


def check_privacy(
    fn: Callable[..., Any],
    *args: Any,
    private: Any = None,
    plan: PrivacyPlan | None = None,
    sampler: Sampler | None = None,
    disclose: Iterable[str] = (),
    kept: Iterable[str] = (),
    public_rows: Iterable[int | str] = (),
    **kwargs: Any,
) -> PrivacyReport:
    """Checks that private data leaves a training step only through the plan's noise.

    The step is traced, on shapes alone, and its program is read equation by equation, through
    `jit`, `scan`, `while`, `cond`, `remat`, derivative rules and `shard_map`. Nothing is compiled
    or computed. In a test:

    ```python
    dp.check_privacy(step, state, xs, ys, is_padding_example=mask).raise_if_violated()
    dp.check_privacy(by_hand, model, opt_state, xs, ys, mask, private=(2, 3, 4), plan=plan)
    ```

    Each value is public, a clipped sum with a bound on its sensitivity, or private. The engine
    (`filter_clipped_grad`) makes clipped sums and shows their bounds in the program; the noise
    (`plan.privatizer`, `gaussian_privatizer`, `add_noise`) shows its standard deviation and its
    stream. Noise of standard deviation s turns a sum of sensitivity S into a release of noise
    multiplier s / S, and every value computed only from releases is post-processing. Only proven
    facts count: a value without a proven fact is private, and a claim without a proof is undecided.

    | rule | what is checked |
    |---|---|
    | release | a result with private data is a release, or is named in `disclose` or `kept` |
    | noise | the noise multiplier of all releases of a step together, and how many steps a call \
takes, are at least as the plan has them |
    | side door | no private value goes into a callback, a print, `eqx.error_if` or a mutable \
array, or decides how long a loop runs or which branch is taken (outside of the engine) |
    | fresh noise | each noise has a key for nothing else, another one in each turn of a loop and \
in each call; so has the key that the loss draws with, of which nothing may be shown |
    | examples apart | examples of the engine are rows of the private arguments, each once, and \
what they meet slot by slot is the same for all |
    | padding | the engine is given a mask, if the plan samples |
    | sampling | a `sampler` that is given draws as the plan accounts for: by its kind, for as \
many steps, and of its users |

    **Guarantee.** If the report is `ok`, one call of the step is a Gaussian mechanism on the
    private arguments with at least the report's `noise_multiplier`, repeated `steps` times on other
    samples, and its other results and side effects do not depend on them, except those that `kept`
    and `disclosed` list. It holds under these assumptions:

    - Private arguments hold one example a row. Arguments of equal length belong together row by
      row, and no example stands in two rows. Removing an example moves the later ones by one row,
      as the sampler does. Indices in an argument do not repeat, except those of padding. If a
      `scan` goes over stacks of batches, each batch is a separate sample.
    - All other arguments are the same for every example, and are chosen without the data. So are
      arrays that the step closes over, and what host functions return inside of a loss.
    - Results come back as the arguments at their places. Counters stay below 2^31. The caller never
      passes twice what has to be new (`notes` names it: a key, or a number folded into one).
    - Different keys among arguments and constants are independent and secret.
    - It trusts JAX's batching rules, the bounds that engine and noise state, `dp_accounting`, and
      real arithmetic. (For rounding there are `check_precision` and the engine's bounds.)

    | case | the report |
    |---|---|
    | several losses, each with noise | one mechanism: 1 / sqrt(sum of (sensitivity / noise)^2) |
    | a sum of k clipped sums of one batch | sensitivity k times as large |
    | noise drawn by `jax.random.normal`, or of another distribution | undecided: use `add_noise` |
    | sums over slices or chunks of a batch by hand, sums that a loop carries or stacks, one batch \
of a stack by its index | undecided: the engine makes microbatches, `scan` goes over batches |
    | an array that is not private meets rows slot by slot | undecided, unless `public_rows` \
names it |
    | rows that meet constants of their slots (ramps), or random numbers of their slots | \
undecided: rows move; draw in the loss, with its key |
    | a clipped sum times a traced number, a matrix, through a gather | undecided |
    | a clipped sum by other code than the engine's | undecided: its sensitivity is unknown |
    | sums of devices, added up by `psum` in `shard_map` | one sum, if rows are spread along the \
axes of the `psum` and devices have one model |
    | two kinds of noise from one state of a stream | a violation: they are the same noise |
    | a key that a loop splits and carries | undecided: split before it, or fold a counter in |
    | a host function returns a value | undecided: it may depend on any data |
    | noise that a privatizer keeps in its state | a violation, if it leaves in another way; \
undecided, if it comes back changed, in another place, or in another state |
    | private data stays in the state | undecided, unless `kept` names it; a violation if the next \
call's model is made of it |
    | noise in one of two branches | counts as if both branches ran |
    | noise after a nonlinear optimizer | a violation: unbounded |
    | a call that takes several steps in a scan | `steps` of the plan, each on its own batch |
    | an error within the check | undecided, with the line |

    It does not see: what a caller does with results; timing, beyond loops and branches; what a
    compiler does with the program.

    Args:
        fn: the step, jitted or not: any function, also one with several calls of the engine.
        *args: its arguments: trees of arrays, or of `jax.ShapeDtypeStruct` in their place, and of
            anything else. With sharding, in the same mesh context as in training.
        private: which of them hold private data: positions (`(2, 3)`), names or dotted paths
            (`("xs", "batch.label")`). The mask and the indices of a sample are private, too. A step
            of `make_step` knows them.
        plan: what the noise is compared with; a step of `make_step` knows it.
        sampler: what draws the step's batches, to be compared with the plan. (A step of
            `make_step` makes its own.)
        disclose: patterns of dotted paths of results, or of their ends (`"2"`, `"loss"`), that you
            release without noise on purpose.
        kept: patterns of results that come back in the next call and that may hold private data.
            Nobody may see them, or anything computed from them.
        public_rows: positions, names or dotted paths of public arguments with a row for each
            example, which moves with the example.
        **kwargs: more arguments, by name.

    Returns:
        A [`PrivacyReport`][]: `ok`, `violations`, `undecided`, `releases`, `kept`; `str()` is a
        table.

    Raises:
        ValueError: `private` or `public_rows` is missing, or names nothing; `disclose` or `kept`
            matches no result; `plan` is no plan; the step runs on devices of several processes, and
            a private argument is an array of this process alone.
    """
    own_plan = getattr(fn, "plan", None)
    if isinstance(own_plan, PrivacyPlan):  # of make_step: step(state, *batch, mask)
        private = (*range(1, len(args)), *kwargs) if private is None else private
        plan = own_plan if plan is None else plan
    expect("plan", plan, (PrivacyPlan, type(None)), "a PrivacyPlan or None")
    function("fn", fn, "the step")
    arguments = arguments_of(fn, args, kwargs)
    is_private = under(arguments, private, "private")
    if not any(is_private):
        raise ValueError("private must say which arguments hold private data: by places or names.")
    has_rows = under(arguments, public_rows, "public_rows")
    arrays = [leaf for _, leaf in arrays_in((args, kwargs))]
    rows = [leaf for leaf, its in zip(arrays, is_private, strict=True) if its]
    check_whole(jax.sharding.get_mesh(), rows, arrays)
    try:
        program, results, _ = eqx.filter_make_jaxpr(fn)(*args, **kwargs)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        return _untraceable(error, plan)
    leaves = jax.tree_util.tree_leaves_with_path(results)
    names = [dotted(path) or "the result" for path, _ in leaves]
    is_disclosed = _named_by("disclose", disclose, names)
    is_kept = _named_by("kept", kept, names)
    returns = next_arguments(args, kwargs, results)
    # A result may be a state if it is inside a tree, and not one of several single results.
    in_state = [len(path) > 1 or type(results) not in (tuple, list) for path, _ in leaves]

    def followed(back: dict[int, Fact]) -> tuple[PrivacyFlow, list[Fact]]:
        facts = [
            _private(i, argument)
            if is_private[i] or has_rows[i]
            else back.get(i) or _public(i, argument)
            for i, argument in enumerate(arguments)
        ]
        flow = PrivacyFlow()
        line_of = functools.partial(users_line, within="check_privacy")
        return flow, flow.program(program, facts, Context(line_of=line_of))

    def coming_back(found: list[Fact], which: list[bool]) -> dict[int, Fact]:
        """The facts about arguments that results come back as; those not known before."""
        return {
            i: x if x.reason == "past" else _kept(arguments[i])
            for x, at, is_meant in zip(found, returns, which, strict=True)
            if not x.is_public and (is_meant or x.reason == "past")
            for i in at
            if i not in back
        }

    back, (flow, found) = dict[int, Fact](), followed({})
    while now := coming_back(found, is_kept):
        back |= now
        flow, found = followed(back)
    # Returned values that are not named must not reach the model of the next call.
    others = coming_back(found, [not one for one in is_disclosed])
    later = followed(back | others)[0].record.found if others else ()
    reaches = any(finding.rule == "release" for finding in later)
    lengths = {a.shape[0] for i, a in enumerate(arguments) if is_private[i] and a.shape}
    _check_constants(flow, lengths | {getattr(fn, "_num_examples", None)})
    known = [*map(Result, names, found, returns, in_state, is_disclosed, is_kept)]
    last = [argument.names[-1] for argument in arguments]
    if plan is not None and sampler is not None and not plan.draws_as(sampler):
        drawn = f"batches are drawn by {sampler}, and the plan accounts for {plan.sampling}"
        advice = "Take plan.sampler(num_examples)."
        flow.record.note(Context(line="sampler"), "sampling", drawn, advice)
    step = TracedStep(flow.record, last, _same_keys(args, kwargs), known, reaches)
    return report_on(step, plan)


def _private(i: int, argument: Argument) -> Fact:
    """An argument with one example in each row."""
    shape = argument.shape
    refs = tuple(Ref(shape[0], dim) if dim < 2 else None for dim in range(len(shape)))
    return Fact(Kind.PRIVATE, refs=refs, indexes=("as it is", i), reason="data")


def _kept(argument: Argument) -> Fact:
    """An argument that holds what an earlier call kept."""
    return Fact(Kind.PRIVATE, reason="kept", where=f"argument {argument.names[-1]}")


def _public(i: int, argument: Argument) -> Fact:
    """An argument that is the same for all examples: a counter, a key, or an array."""
    shape, dtype, root = argument.shape, argument.dtype, ("argument", i)
    is_words = dtype == np.uint32 and shape[-1:] == (2,)
    if is_key(argument) or is_words:
        dims = shape[:-1] if is_words else shape
        along = (Along(FIRST, 1, dims[0]),) if dims and dims[0] > 1 else ()
        path = (Number(None, 0, along),) if dims else ()
        return Fact(key=Key(root if len(dims) < 2 else None, path, is_words))
    if not shape and np.issubdtype(dtype, np.integer) and np.dtype(dtype).itemsize >= 4:
        return Fact(number=Number(root))
    return Fact()


def _same_keys(args: Any, kwargs: Any) -> dict[Any, Any]:
    """Arguments and constants that hold the key of an earlier argument."""
    found, first = dict[Any, Any](), dict[bytes, Any]()
    for i, (_, leaf) in enumerate(arrays_in((tuple(args), dict(kwargs)))):
        if eqx.is_array(leaf) and (is_key(leaf) or leaf.dtype == np.uint32):
            words = key_bytes(leaf)
            root = first.setdefault(words, ("argument", i))
            found |= {("argument", i): root, ("constant", words): root}
    return found


def _check_constants(flow: PrivacyFlow, lengths: set[int | None]) -> None:
    """Arrays that the step closes over and that are as long as the batch or the data."""
    for value in flow.record.constants:
        if np.shape(value)[0] in lengths and 0 not in flow.constant(value).even:
            flow.record.note(
                Context(line="the step"),
                "examples apart",
                f"the step closes over an array of shape {np.shape(value)}, which has as many rows "
                "as the batch or the data",
                "Pass it as an argument. If it holds private data, name it in private=; if it has "
                "a public row for each example, name it in public_rows=.",
                is_decided=False,
            )


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


def _named_by(what: str, patterns: Iterable[str], names: list[str]) -> list[bool]:
    known = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in known:
        if not any(names_it(pattern, name) for name in names):
            raise ValueError(
                f"{what} names {shown(pattern)}, which is none of the results. Name one of them, "
                f"or a pattern that matches one: {some(names, 20)}."
            )
    return [any(names_it(pattern, name) for pattern in known) for name in names]
