"""`check_privacy`: a training step is checked against its plan, on its traced program."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.tree_util import tree_leaves_with_path

from ..expected import expect, function
from ..paths import dotted
from ..privacy import PrivacyPlan, Sampler
from ..programs import users_line
from ..sharding import check_whole
from ..shown import shown, some
from ..trees import is_key, is_shape
from .arguments import Argument, arguments_of, coming_back, masks_among, statics_among, under
from .facts import ANY, EVEN, Fact, Kind, Reach, Row, of_array
from .facts import private as private_fact
from .flow import Context
from .privacy_flow import PrivacyFlow
from .privacy_report import PrivacyReport, finding
from .record import Record
from .roles import MASK
from .streams import Counter, Key, Stream
from .verdict import Result, TracedStep, report_on


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
    """Certifies that private data leaves a training step only through the plan's noise.

    The step is traced, on shapes alone, and its program is read equation by equation, through
    `jit`, `scan`, `while`, `cond`, `remat` and derivative rules. Nothing is compiled or computed.
    In a test:

    ```python
    dp.check_privacy(step, state, xs, ys, is_padding_example=mask).raise_if_violated()
    dp.check_privacy(by_hand, model, opt_state, xs, ys, mask, private=(2, 3, 4), plan=plan)
    ```

    It certifies these patterns, and calls everything else **undecided**, with the line and the
    plain rewrite. A **violation** is said only where it is proven.

    - **examples apart**: the engine (`filter_clipped_grad`) gets batch arguments of the step,
      or views of them row by row: work entry by entry, or mapped over rows (`vmap`, products
      with public matrices, padding, stacking of features), with operands that are the same for
      all slots; microbatches that a `scan` goes over; batches of a stack, one in each turn;
      rows looked up by one integer argument as it came, the same one for all tables.
    - **padding**: the mask is the step's mask argument as it came, or OR-ed with something; a
      plan without padding needs none.
    - **release**: the clip norm is one of the plan's unit; each result is public, a release, or
      named in `disclose` or `kept`.
    - **noise**: `plan.privatizer`, `gaussian_privatizer` or `add_noise` on clipped sums, and
      linear functions of them; the noise multiplier of all releases together, and how many
      steps a call takes, are at least as the plan has them.
    - **fresh noise**: the stream of the noise comes in as an argument, each state gives one
      noise, and the last state goes out at the same place; nothing else reads its key. The
      loss's key follows from an argument and is another one in each call; nothing else follows
      from it.
    - **side door**: no private value goes into a callback, a print, `eqx.error_if` or a mutable
      array, or decides how long a loop runs or which branch is taken (outside of the engine).
    - **sampling**: a `sampler` that is given draws as the plan accounts for.

    **Guarantee.** If the report is `ok`, one call of the step is a Gaussian mechanism on the
    private arguments with at least the report's `noise_multiplier`, repeated `steps` times on other
    samples, and its other results and side effects do not depend on them, except those that `kept`
    and `disclosed` list. It holds under these assumptions:

    - Private arguments hold one example a row. Arguments of equal length belong together row by
      row, and no example stands in two rows. Removing an example moves the later ones by one row,
      as the sampler does. The mask argument is the one that is called `is_padding_example`, or the
      only boolean vector of its length; it is True in the slots without an example. Entries of an
      index differ, except those of padding. Each batch of a stack is a separate sample.
    - All other arguments are the same for every example, and are chosen without the data. So are
      arrays that the step closes over, and what host functions return inside of a loss.
    - Results come back as the arguments at their places. What the caller gives to each call anew is
      another one each time (`notes` names it). Streams and keys among the arguments are independent
      and secret.
    - It trusts JAX's batching rules, the bounds that engine and noise state, `dp_accounting`, and
      real arithmetic. (For rounding there are `check_precision` and the engine's bounds.)

    - several losses, each with noise: one mechanism: 1 / sqrt(sum of (sensitivity / noise)^2).
    - a sum of k clipped sums of one batch: sensitivity k times as large.
    - several models on one batch, by `vmap` of the whole step: one mechanism, sqrt(models).
    - noise in one of two branches: counts as if both branches ran.
    - noise after a nonlinear optimizer: undecided: the sensitivity is unknown.
    - a call that takes several steps in a scan: `steps` of the plan, each on its own batch.
    - noise drawn by `jax.random.normal`; a sum that other code clipped: undecided.
    - slices of a batch (`x[i::k]`), other gathers, casts of bits: undecided.
    - constants or random numbers that differ by slot: undecided, because removing an example
      shifts the slots.
    - private values in a `shard_map` by hand: undecided (the engine's `sharding=` spreads rows).
    - numbers, texts and static fields in a private argument; private arrays of one host alone:
      undecided: they are in no program.
    - an array that the step closes over, as long as the batch or the data (`sampler=`):
      undecided.
    - no release at all, with a plan: undecided.
    - an error within the check: undecided, with the line.

    It does not see: what a caller does with results; timing, beyond loops and branches; numbers
    that Python or numpy computed before the program; what a compiler does with the program.

    Args:
        fn: the step, jitted or not: any function, also one with several calls of the engine.
        *args: its arguments: trees of arrays, or of `jax.ShapeDtypeStruct` in their place, and of
            anything else. With sharding, in the same mesh context as in training.
        private: which of them hold private data: positions (`(2, 3)`), names or dotted paths
            (`("xs", "batch.label")`). The mask and the indices of a sample are private, too. A step
            of `make_step` knows them.
        plan: what the noise is compared with; a step of `make_step` knows it.
        sampler: what draws the step's batches, to be compared with the plan; its number of examples
            tells what is as long as the data. (A step of `make_step` makes its own.)
        disclose: dotted paths of results, exactly as the report names them (`"2.loss"`), that you
            release without noise on purpose.
        kept: the same, of results that come back in the next call and that may hold private data.
            Nobody may see them, or anything computed from them.
        public_rows: positions, names or dotted paths of public arguments with a row for each
            example, which moves with the example.
        **kwargs: more arguments, by name.

    Returns:
        A [`PrivacyReport`][]: `ok`, `violations`, `undecided`, `releases`, `kept`; `str()` is a
        table.

    Raises:
        ValueError: `private` or `public_rows` is missing, or names nothing; `disclose` or `kept`
            names no result; `plan` is no plan; the step runs on devices of several processes, and
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
    arrays = [argument.leaf for argument in arguments]
    rows = [leaf for leaf, its in zip(arrays, is_private, strict=True) if its]
    check_whole(jax.sharding.get_mesh(), rows, arrays)
    try:
        program, results, _ = eqx.filter_make_jaxpr(fn)(*args, **kwargs)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        return _untraceable(error, plan)
    names = [dotted(path) or "the result" for path, _ in tree_leaves_with_path(results)]
    is_disclosed = _named_by("disclose", disclose, names)
    is_kept = _named_by("kept", kept, names)
    is_row = [any(either) for either in zip(is_private, has_rows, strict=True)]
    back_at = coming_back(args, kwargs, results)
    returns = [None if at is None or is_row[at] else at for at in back_at]
    masks = masks_among(arguments, is_row)

    def followed(back: dict[int, Fact]) -> tuple[PrivacyFlow, list[Fact]]:
        facts = [
            _rowwise(argument, i in masks) if is_row[i] else back.get(i) or _public(i, argument)
            for i, argument in enumerate(arguments)
        ]
        flow = PrivacyFlow()
        line_of = functools.partial(users_line, within="check_privacy")
        return flow, flow.program(program, facts, Context(line_of=line_of))

    def coming(found: list[Fact], which: Sequence[bool]) -> dict[int, Fact]:
        """The facts about arguments that private results come back as, if not known before."""
        return {
            at: private_fact("kept", f"argument {arguments[at].names[-1]}")
            for fact, at, is_meant in zip(found, returns, which, strict=True)
            if is_meant and at is not None and not fact.is_public and at not in back
        }

    back, (flow, found) = dict[int, Fact](), followed({})
    while now := coming(found, is_kept):
        back |= now
        flow, found = followed(back)
    # Values that are not named must not reach the model of the next call.
    others = coming(found, [not one for one in is_disclosed])
    later = followed(back | others)[0].record.found if others else ()
    reaches = any(one.rule == "release" for one in later)
    known = [*map(Result, names, found, returns, is_disclosed, is_kept)]
    same = _same_keys(arguments, flow.record.constants)
    step = TracedStep(flow.record, arguments, known, same, reaches)
    of_data = getattr(fn, "_num_examples", None) if sampler is None else sampler.num_examples
    entries = (private,) if isinstance(private, int | str) else tuple(private)
    _check_arguments(flow.record, rows, statics_among(fn, args, kwargs, entries), of_data)
    if plan is not None and sampler is not None and not plan.draws_as(sampler):
        drawn = f"batches are drawn by {sampler}, and the plan accounts for {plan.sampling}"
        flow.record.note(Context(line="sampler"), "sampling", drawn)
    return report_on(step, plan)


def _rowwise(argument: Argument, is_mask: bool) -> Fact:
    """An argument with one example in each row."""
    shape, name = argument.shape, argument.names[-1]
    index = ANY if is_mask else ""
    places = tuple(Row(shape[0], d, chosen_by=index) if d < 2 else None for d in range(len(shape)))
    is_index = np.issubdtype(argument.dtype, np.integer)
    role = MASK if is_mask else ("index", name) if is_index else ()
    return Fact(Reach(Kind.PRIVATE, reason="data"), places, role=role)


def _public(i: int, argument: Argument) -> Fact:
    """An argument that is the same for all examples: a stream, a key, a counter, or an array."""
    shape, dtype = argument.shape, argument.dtype
    if argument.stream is not None:
        return Fact(token=Stream(*argument.stream))
    places = (None,) * len(shape)
    if is_key(argument):
        is_plain = not shape and "rbg" not in str(dtype)  # whose children are not independent
        return Fact(places=places, token=Key(i) if is_plain else None)
    is_counter = not shape and np.issubdtype(dtype, np.integer)
    return Fact(places=places, token=Counter(i) if is_counter else None)


def _same_keys(arguments: Sequence[Argument], constants: Sequence[Any]) -> list[tuple[str, str]]:
    """Streams whose key another argument, or a constant of the step, holds as well."""
    found, keys = list[tuple[str, str]](), dict[bytes, str]()
    leaves = [(one.names[-1], one.stream, one.leaf) for one in arguments]
    leaves += [("a constant of the step", None, value) for value in constants]
    for name, stream, leaf in sorted(leaves, key=lambda leaf: leaf[1] is None):
        is_words = eqx.is_array(leaf) and (is_key(leaf) or leaf.dtype == np.uint32)
        if not is_words or (stream is not None and stream[1] != 0):
            continue
        for one in [leaf] if stream is None else leaf.reshape(-1):  # several, of several models
            words = _words(one)
            found += [(keys[words], name)] if words in keys else []
            keys |= {} if stream is None else {words: name}
    return found


def _words(leaf: Any) -> bytes:
    """What a key is made of, typed or as words."""
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf).tobytes()


def _check_arguments(
    record: Record, rows: Sequence[Any], statics: Sequence[str], of_data: int | None
) -> None:
    """What the program holds as constants, and what one host alone holds of a batch."""
    at, lengths = Context(line="the arguments"), {row.shape[0] for row in rows if row.shape}
    if statics:
        found = f"{some(statics, 3)}: private, and no array. It is part of the program, so all that"
        record.note(at, "release", f"{found} the step returns may depend on it", is_decided=False)
    for value in record.constants:
        shape, places = np.shape(value), of_array(value).places
        is_long = shape[0] in lengths and places[:1] != (EVEN,)
        is_long |= any(n == of_data and p != EVEN for n, p in zip(shape, places, strict=False))
        if is_long:
            found = f"the step closes over an array of shape {shape}, as long as the batch or data"
            record.note(Context(line="the step"), "examples apart", found, is_decided=False)
    own = [row for row in rows if not isinstance(row, jax.Array) or row.is_fully_addressable]
    if jax.process_count() > 1 and any(not is_shape(row) for row in own):
        found = "there are several processes, and private arguments are arrays of this one alone: "
        found += "put the parts of all together by rules.shard_batch((x, y, is_padding_example))"
        record.note(at, "examples apart", found, is_decided=False)


def _untraceable(error: Exception, plan: PrivacyPlan | None) -> PrivacyReport:
    said = str(error).strip().splitlines()[0]
    found = f"the step cannot be traced, for a value decides a shape or what Python does: {said}"
    undecided = finding("side door", found, "the error that JAX raises for this step", False)
    return PrivacyReport(plan, (), (undecided,), (), (), (), math.inf, 0, ())


def _named_by(what: str, patterns: Iterable[str], names: list[str]) -> list[bool]:
    known = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in known:
        if pattern not in names:
            raise ValueError(
                f"{what} names {shown(pattern)}, which is none of the results. Name them exactly: "
                f"{some(names, 20)}."
            )
    return [name in known for name in names]
