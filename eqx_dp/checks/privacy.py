"""`check_privacy`: a training step is checked against its plan, on its traced program."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.tree_util import tree_leaves_with_path

from ..expected import expect, function
from ..paths import dotted
from ..privacy import PrivacyPlan, Sampler
from ..programs import Context, users_line
from ..sharding import check_whole
from ..shown import shown, some
from ..trees import is_key, is_shape
from .arguments import Argument, arguments_of, coming_back, masks_among, statics_among, under
from .facts import ANY, DATA, EVEN, Fact, Reach, Row, of_array
from .privacy_flow import PrivacyFlow
from .privacy_report import PrivacyReport
from .record import Record
from .roles import MASK
from .streams import CALL, KEY, Given, Key, Stream
from .verdict import Result, report_on


def check_privacy(
    fn: Callable[..., Any],
    *args: Any,
    private: Any = None,
    plan: PrivacyPlan | None = None,
    sampler: Sampler | None = None,
    disclose: Iterable[str] = (),
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
      named in `disclose`.
    - **noise**: `plan.privatizer`, `gaussian_privatizer` or `add_noise` on clipped sums, on sums of
      several, and on these times constant numbers; the noise multiplier of all releases together,
      and how many steps a call takes, are at least as the plan has them.
    - **fresh noise**: the stream of the noise comes in as an argument, each state gives one
      noise, and the last state goes out at the same place; nothing else reads its key. The
      loss's key is an argument that the caller gives anew to each call; a child of one
      (`split`), of which another child comes back; or one that the state keeps, with a number
      of the call folded in (`fold_in`). Nothing else follows from it. A loop ends each turn with
      the state after the turn's last draw.
    - **side door**: no private value goes into a callback, a print, `eqx.error_if` or a mutable
      array, or decides how long a loop runs or which branch is taken (outside of the engine).
      What is read from a mutable array counts as private.
    - **sampling**: a `sampler` that is given draws as the plan accounts for.

    **Guarantee.** If the report is `ok`, one call of the step is a Gaussian mechanism on the
    private arguments with at least the report's `noise_multiplier`, repeated `steps` times on other
    samples, and its other results and side effects do not depend on them, except those that
    `disclosed` lists. It holds under these assumptions:

    - Private arguments hold one example a row. Arguments of equal length belong together row by
      row, and no example stands in two rows. Removing an example moves the later ones by one row,
      as the sampler does. The mask argument is the one that is called `is_padding_example`, or the
      only boolean vector of its length; it is True in the slots without an example. Entries of an
      index differ, except those of padding. Each batch of a stack is a separate sample.
    - All other arguments are the same for every example, and are chosen without the data. So are
      arrays that the step closes over, and what host functions return inside of a loss.
    - Results come back as the arguments at their places. The loss's key is another one in each
      call, where the caller gives it anew or a number is folded in (`notes` names it). Streams and
      keys among the arguments are independent and secret.
    - It trusts JAX's batching rules, the bounds that engine and noise state, `dp_accounting`, and
      real arithmetic. (For rounding there are `check_precision` and the engine's bounds.)

    - several losses, each with noise: one mechanism: 1 / sqrt(sum of (sensitivity / noise)^2).
    - a sum of k clipped sums of one batch: sensitivity k times as large.
    - several models on one batch, by `vmap` of the whole step: one mechanism, sqrt(models).
    - noise in a branch, or several noises of stacked streams on one sum: undecided.
    - noise after a nonlinear optimizer: undecided: the sensitivity is unknown.
    - a call that takes several steps in a scan: `steps` of the plan, each on its own batch.
    - noise drawn by `jax.random.normal`; a sum that other code clipped; a clipped sum that is
      cut, or multiplied by anything but a constant number before the noise: undecided.
    - a value without noise that stays in the state: undecided, since nobody may see it.
    - slices of a batch (`x[i::k]`), other gathers, casts of bits: undecided. So is a mask that is
      computed from indices (`index < 0`): give one beside them.
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
        public_rows: positions, names or dotted paths of public arguments with a row for each
            example, which moves with the example.
        **kwargs: more arguments, by name.

    Returns:
        A [`PrivacyReport`][]: `ok`, `violations`, `undecided`, `releases`; `str()` is a table.

    Raises:
        ValueError: `private` or `public_rows` is missing, or names nothing; `disclose` names no
            result; `plan` is no plan; the step runs on devices of several processes, and
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
    program, results, _ = eqx.filter_make_jaxpr(fn)(*args, **kwargs)
    is_row = [any(either) for either in zip(is_private, has_rows, strict=True)]
    masks, flow = masks_among(arguments, is_row), PrivacyFlow(arguments)
    facts = [
        _rowwise(argument, i in masks) if is_row[i] else _public(i, argument)
        for i, argument in enumerate(arguments)
    ]
    line_of = functools.partial(users_line, within="check_privacy")
    found = flow.program(program, facts, Context(line_of=line_of))
    names = [dotted(path) or "the result" for path, _ in tree_leaves_with_path(results)]
    returns = coming_back(args, kwargs, results)
    back = [None if at is None or is_row[at] else at for at in returns]
    known = map(Result, names, found, back, _named_by(disclose, names))
    of_data = getattr(fn, "_num_examples", None) if sampler is None else sampler.num_examples
    entries = (private,) if isinstance(private, int | str) else tuple(private)
    _check_arguments(flow.record, rows, statics_among(fn, args, kwargs, entries), of_data)
    _check_keys(flow.record)
    if plan is not None and sampler is not None and not plan.draws_as(sampler):
        drawn = f"batches are drawn by {sampler}, and the plan accounts for {plan.sampling}"
        flow.record.add("sampling", drawn, "sampler", True)
    return report_on(flow.record, [*known], plan)


def _rowwise(argument: Argument, is_mask: bool) -> Fact:
    """An argument with one example in each row."""
    shape, is_index = argument.leaf.shape, np.issubdtype(argument.leaf.dtype, np.integer)
    index = ANY if is_mask else ""
    places = tuple(Row(shape[0], d, chosen_by=index) if d < 2 else None for d in range(len(shape)))
    token = MASK if is_mask else ("index", argument.names[-1]) if is_index else None
    return Fact(Reach(DATA, "", True), places, token=token)


def _public(i: int, argument: Argument) -> Fact:
    """An argument that is the same for all examples: a stream, a key, or an array."""
    if argument.stream is not None:
        return Fact(token=Stream(*argument.stream))
    places = (None,) * len(argument.leaf.shape)
    if is_key(argument.leaf):
        is_plain = not places and "rbg" not in str(argument.leaf.dtype)  # whose children differ
        return Fact(places=places, token=Key(i) if is_plain else None)
    return Fact(places=places, turns=frozenset({CALL}), token=Given(i))


def _check_keys(record: Record) -> None:
    """Whether several streams, of several models too, have one key."""
    known = dict[bytes, str]()
    for argument in record.arguments:
        if argument.stream is None or argument.stream[1] != KEY or not eqx.is_array(argument.leaf):
            continue
        for key in argument.leaf.reshape(-1):
            words, name = np.asarray(jax.random.key_data(key)).tobytes(), argument.names[-1]
            if words in known:
                found = f"{known[words]} and {name} hold the same key"
                record.add("fresh noise", found, "the arguments", True)
            known[words] = name


def _check_arguments(
    record: Record, rows: Sequence[Any], statics: Sequence[str], of_data: int | None
) -> None:
    """What the program holds as constants, and what one host alone holds of a batch."""
    lengths = {row.shape[0] for row in rows if row.shape}
    if statics:
        found = f"{some(statics, 3)}: private, and no array. It is part of the program, so all that"
        record.add("release", f"{found} the step returns may depend on it", "the arguments")
    for value in record.constants:
        known = enumerate(zip(np.shape(value), of_array(value).places, strict=True))
        if any(p != EVEN and (n == of_data or (not d and n in lengths)) for d, (n, p) in known):
            found = f"the step closes over an array of shape {np.shape(value)}, as long as the "
            record.add("examples apart", f"{found}batch or data", "the step")
    own = [row for row in rows if not isinstance(row, jax.Array) or row.is_fully_addressable]
    if jax.process_count() > 1 and any(not is_shape(row) for row in own):
        found = "there are several processes, and private arguments are arrays of this one alone: "
        found += "put the parts of all together by rules.shard_batch((x, y, is_padding_example))"
        record.add("examples apart", found, "the arguments")


def _named_by(disclose: Iterable[str], names: list[str]) -> list[bool]:
    known = (disclose,) if isinstance(disclose, str) else tuple(disclose)
    for name in known:
        if name not in names:
            raise ValueError(
                f"disclose names {shown(name)}, which is none of the results. Name them exactly: "
                f"{some(names, 20)}."
            )
    return [name in known for name in names]
