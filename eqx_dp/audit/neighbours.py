"""Neighboring data sets, run with the same noise: how far one example moves what is released."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, SupportsFloat

import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting import NeighboringRelation

from ..gradients import ClippedGrad, PerExample
from ..privacy import PrivacyPlan
from ..shown import shown
from ..training import Step, TrainState
from ..trees import PyTree
from .arguments import MASK, Arguments, Place, arguments_of
from .comparisons import Comparisons
from .findings import Findings
from .neighbours_report import NeighboursReport
from .noise import check_noise, recorded_noise
from .recorded import Recording
from .subject import Subject
from .trials import Trials

_NEAR = 0.5


def neighbours(
    fn: Callable[..., Any],
    *args: Any,
    private: Sequence[Place] | None = None,
    padding: Place | None = None,
    sensitivity: SupportsFloat | None = None,
    plan: PrivacyPlan | None = None,
    neighboring_relation: NeighboringRelation | None = None,
    release: Callable[[Any], PyTree[Any]] | None = None,
    disclose: Iterable[str] = (),
    **kwargs: Any,
) -> NeighboursReport:
    """Runs a clipped gradient or a step on neighboring data sets, and measures what moves.

    ```python
    dp.audit.neighbours(grad_fn, model, xs, ys).raise_if_violated()
    dp.audit.neighbours(step, state, xs, ys).raise_if_violated()  # of make_step
    dp.audit.neighbours(
        by_hand, model, opt_state, xs, ys, mask,
        private=(2, 3), padding=4, plan=plan, sensitivity=grad_fn.sensitivity(relation),
    ).raise_if_violated()
    ```

    One slot of the batch holds a hostile example: zeros, NaN, infinities, the largest, lowest,
    smallest and subnormal numbers of its dtypes, itself scaled and negated, a copy of another
    example, a negated copy. The other slots are as given, hostile, or padding. Each data set is run
    with and without the example, with the same keys; what noise is added to is recorded, and so is
    the noise. A difference of two runs is then what one example moves, without noise. It is in
    float64. A gray-box audit of twelve libraries found 13 violations in this way (Cebere et al.,
    "Privacy in Theory, Bugs in Practice", 2026, arXiv 2602.17454).

    | rule | holds if |
    |---|---|
    | movement | no pair moves what is released by more than the sensitivity, up to `rounding` |
    | noise | it does not change with the data; with a plan: each leaf has as much as the plan \
says, new at every step, and no two leaves have the same |
    | beside the noise | a result that changes with the data changes with the noise, and is the \
same bits where noise and what it is added to are |
    | examples apart | losses, norms and aux of the other examples are the same bits; what an \
example adds is the same beside other examples |
    | padding | what a padding slot holds changes no bit; values of a padding slot are zero |
    | counters | no single integer among the results changes with the data |
    | form | shapes and dtypes of results are the same on all data |
    | compilations | nothing is compiled anew for other data of the same shapes |
    | stopped | no call raises an error |

    **Guarantee.** A violation of "movement" is a counterexample to the sensitivity: two neighboring
    data sets, and how far they are apart. The converse does not hold. This is a test on examples
    and no proof: it sees the pairs that it runs, one set of parameters, and one shape of batch.
    Where no example comes near the bound (`largest` is well below 1; a note says so), clipping was
    not put to the test: give a smaller clip norm, or larger examples. It does not see whether noise
    is Gaussian, how the batch was sampled, or what callbacks write. `check_privacy` reads the
    program, and the two complete each other.

    | relation | neighbors here |
    |---|---|
    | `ADD_OR_REMOVE_ONE` | an example against padding; without a mask, against a batch that is \
shorter by one |
    | `REPLACE_SPECIAL` | an example against padding; needs a mask |
    | `REPLACE_ONE` | every two candidates for the slot |

    The function is traced and compiled once, some 150 calls run, and a copy of what is released is
    held for every candidate: audit a model that is small. A function that reads values while it is
    traced is run as it is, and needs `release`.

    Args:
        fn: what `filter_clipped_grad` or `filter_value_and_clipped_grad` returned, a `Step`, or any
            function of theirs, jitted or not.
        *args: its arguments: the model (or a step's state, which is not used up), then a batch of
            at least two examples, made up or public.
        private: for other functions, which arguments hold examples along their leading axes:
            positions or names.
        padding: for other functions, which argument is the mask that is True where a slot holds no
            example: a position or a name. By default `is_padding_example`, if it is given.
        sensitivity: for other functions, by how much one example may move what is released, in L2
            norm: `grad_fn.sensitivity(relation)`.
        plan: what the noise is held against. A step has its own.
        neighboring_relation: the plan's if there is a plan; else by default `ADD_OR_REMOVE_ONE`.
        release: for other functions, from the result to what is released, a tree of arrays in the
            unit of `sensitivity`. None for whatever `gaussian_privatizer` adds noise to. With
            noise of another kind, or with a model after `optax.sgd(1.0)`, say what it is.
        disclose: dotted paths of results (`2`, `1.loss`; `*` and `**` are wild) that may depend on
            data although no plan accounts for it.
        **kwargs: more of its arguments, by name (`key`, `is_padding_example`, `extra`).

    Returns:
        A [`NeighboursReport`][]: `ok`, `violations`, `largest`, `pairs`; `str()` is a table.

    Raises:
        ValueError: an argument does not fit, as its error says; the function has no sensitivity, or
            an infinite one; no noise is found to record and no `release` is given.
        Exception: what the function itself raises on the examples as they are given.
    """
    own = (private, padding, sensitivity, release)
    inner = getattr(fn, "__wrapped__", None)  # a clipped gradient that was wrapped in a jit
    fn = inner if isinstance(inner, ClippedGrad) else fn
    if isinstance(fn, ClippedGrad):
        _refuse_own("a clipped gradient", own)
        relation = _relation(plan, neighboring_relation)
        subject = _of_gradient(fn, args)
        call = _with_mask(fn, args, kwargs)
        return _audited(subject, call, fn.sensitivity(relation), relation, None, ())
    if isinstance(fn, Step):
        _refuse_own("a step of make_step", own)
        if plan is not None or neighboring_relation is not None:
            raise ValueError("plan and neighboring_relation are the step's own: leave them out.")
        relation, paths = fn.plan.neighboring_relation, tuple(disclose)
        rules = fn.sharding
        context = nullcontext if rules is None else partial(jax.set_mesh, rules.mesh)
        subject = Subject(fn, None, context=context)
        with context():
            call = _with_mask(fn, _of_state(fn, args), kwargs)
        return _audited(subject, call, fn.grad_fn.sensitivity(relation), relation, fn.plan, paths)
    if private is None or sensitivity is None:
        raise ValueError(
            "private or sensitivity is missing: for a function that is neither a clipped gradient "
            "nor a step of make_step, say which arguments hold examples, private=(2, 3), and how "
            "far one may move what is released, sensitivity=grad_fn.sensitivity(relation); found "
            f"{shown(private)} and {shown(sensitivity)} for {shown(fn)}."
        )
    mask = MASK if padding is None and MASK in kwargs else padding
    subject = Subject(fn, release)
    call = arguments_of(fn, args, kwargs, private, mask)
    relation = _relation(plan, neighboring_relation)
    return _audited(subject, call, sensitivity, relation, plan, tuple(disclose))


def _audited(
    subject: Subject,
    call: Arguments,
    sensitivity: object,
    relation: NeighboringRelation,
    plan: PrivacyPlan | None,
    disclosed: tuple[str, ...],
) -> NeighboursReport:
    """Runs all data sets, and then some steps without data."""
    bound = _checked_sensitivity(sensitivity)
    if call.mask is None and relation == NeighboringRelation.REPLACE_SPECIAL:
        raise ValueError(
            "padding is missing: under REPLACE_SPECIAL an example is made padding. Say which "
            "argument is the mask."
        )
    as_given = call.on(call.examples, call.mask)
    subject, first = subject.tried(*as_given)
    _check_recorded(subject, first)
    base, findings = subject.observed(*as_given), Findings()
    if not base.released or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in base.released):
        raise ValueError("release must give floating-point arrays, at least one.")
    trials = Trials.of(call.examples, call.mask, last=call.mask is None)
    found = Comparisons(subject, call, trials, bound, relation, disclosed, base, findings)
    found.compare()
    notes = _notes(subject, found)
    if base.noise or (plan is not None and plan.noise_multiplier > 0):
        stddev = None if plan is None else plan.noise_multiplier * bound
        noise = recorded_noise(subject, call, on_padding=not findings.has("stopped"))
        check_noise(noise, stddev, findings)
        if stddev is None:
            notes.append("there is no plan: how much noise there is was not checked")
    return NeighboursReport(
        bound,
        relation,
        found.largest,
        found.rounding,
        tuple(found.pairs),
        findings.violations,
        tuple(notes),
    )


def _refuse_own(what: str, own: tuple[object, ...]) -> None:
    if any(option is not None for option in own):
        raise ValueError(
            f"private, padding, sensitivity and release are known for {what}: leave them out."
        )


def _relation(
    plan: PrivacyPlan | None, neighboring_relation: NeighboringRelation | None
) -> NeighboringRelation:
    if plan is None:
        return neighboring_relation or NeighboringRelation.ADD_OR_REMOVE_ONE
    if neighboring_relation not in (None, plan.neighboring_relation):
        raise ValueError(
            f"neighboring_relation is {shown(neighboring_relation)}, and the plan's is "
            f"{plan.neighboring_relation.name}: leave it out."
        )
    return plan.neighboring_relation


def _with_mask(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of a clipped gradient or a made step; without a mask all slots are real."""
    private = tuple(range(1, len(args)))
    if kwargs.get(MASK) is None:
        without = {name: value for name, value in kwargs.items() if name != MASK}
        size = len(arguments_of(fn, args, without, private, None).examples)
        kwargs = {**without, MASK: np.zeros(size, bool)}
    return arguments_of(fn, args, kwargs, private, MASK)


def _of_state(step: Step[Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A step's arguments; a model in the place of the state becomes its first state."""
    if not args:
        raise ValueError("the state is missing. Give neighbours(step, state, *batch).")
    state = args[0] if isinstance(args[0], TrainState) else step.init(args[0])
    return (state, *(step.shard_batch(argument) for argument in args[1:]))


def _of_gradient(grad_fn: ClippedGrad[Any], args: tuple[Any, ...]) -> Subject:
    """What a clipped gradient returns: gradients, and values of each example beside them."""
    if not args:
        raise ValueError("the model is missing. Give neighbours(grad_fn, model, *batch).")
    structure = jax.tree.structure(grad_fn.trainable(args[0]))

    def released(result: Any) -> Any:
        if jax.tree.structure(result) == structure:
            return result
        return result[1] if isinstance(result[0], PerExample) else result[0]

    def rows(result: Any) -> Any:
        if jax.tree.structure(result) == structure:
            return None
        if isinstance(result[0], PerExample):
            return result[0]._asdict()
        return {"aux": result[1]}

    return Subject(grad_fn, released, rows, lambda result: None)


def _checked_sensitivity(sensitivity: object) -> float:
    is_number = isinstance(sensitivity, int | float | np.number)
    if not is_number or isinstance(sensitivity, bool) or not 0 < float(sensitivity) < math.inf:
        raise ValueError(
            "sensitivity must be a number above 0 and finite, against which movements are measured "
            f"(an infinite one has no clip norm: set l2_clip_norm); found {shown(sensitivity)}."
        )
    return float(sensitivity)


def _check_recorded(subject: Subject, first: Recording) -> None:
    """Refuses what shows nothing that could be compared."""
    if subject.release is not None:
        return
    if not subject.is_traced:
        problem = "The function reads values while it is traced, so its noise cannot be recorded"
    elif first.in_loops:
        problem = "Noise is added inside of a loop or a branch, where it is not recorded"
    elif not first.sums:
        problem = "gaussian_privatizer adds no noise in this function"
    else:
        return
    raise ValueError(
        f"{problem}. Say what is released, release=lambda result: ..., in the unit of the "
        "sensitivity; or audit the clipped gradient (of a step, step.grad_fn) by itself."
    )


def _notes(subject: Subject, found: Comparisons) -> list[str]:
    notes: list[str] = []
    if found.largest < _NEAR:
        notes.append(
            f"no example came near the bound (at most {found.largest:.3g} of the sensitivity): "
            "clipping was hardly tried; give a smaller clip norm, or larger examples"
        )
    if not subject.is_traced:
        notes.append("the function reads values on the host: it was run as it is")
    if found.trials.mask is None:
        notes.append("the function takes no mask: what padding does was not tried")
    return notes
