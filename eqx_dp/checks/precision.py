"""`check_precision`: a whole training step is checked against its policy, on its traced program."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path

from ..expected import function
from ..precision import JmpPolicy, Policy, checked_policy
from ..programs import Context
from ..shown import function_name, some
from ..tables import Part, tabular
from ..trees import PyTree
from .arguments import arguments_of, arrays_in, coming_back
from .precision_flow import Operation, PrecisionFlow, Violation
from .privacy_report import as_json
from .widths import Facts, known_width


@tabular
class PrecisionReport(NamedTuple):
    """What `check_precision` found; its `str` is a table.

    Attributes:
        policy: what the step was checked against.
        violations: a row for each operation that is not as declared, with its stage, the declared
            dtype, what was found, and the source line.
        summary: the dtype of each operation: FLOPs of contractions, every sum over examples, every
            collective, every draw that feeds the noise, every addition of noise. Operations under a
            module rule have separate rows.
        notes: what the check could not see, or what the policy permits.
    """

    policy: Policy
    violations: tuple[Violation, ...]
    summary: tuple[Operation, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether everything runs as declared."""
        return not self.violations

    def raise_if_violated(self) -> None:
        """Does nothing if everything runs as declared.

        Raises:
            ValueError: if something does not; the message is the table.
        """
        if not self.ok:
            raise ValueError(f"The step does not keep to its policy.\n{self}")

    def to_json(self) -> str:
        """Writes the report as JSON.

        The keys are those of the attributes, and `ok`; the policy is its name and its text, and a
        row is an object.
        """
        return as_json("eqx_dp.PrecisionReport", self)

    def _parts(self) -> Iterator[Part]:
        count = len(self.violations)
        found = "as declared" if self.ok else f"{count} violation{'s' * (count != 1)}"
        name = self.policy.name or "the policy"
        yield f"{found}: {name} ({self.policy})"
        yield from (f"note: {note}" for note in self.notes)
        if self.violations:
            yield ""
            yield [("stage", "declared", "found", "where"), *self.violations]
        head = ("what", "stage", "dtype", "amount", "times", "where")
        yield ""
        yield [head, *map(_cells, self.summary)]


def _cells(row: Operation) -> tuple[str, ...]:
    amount = f"{row.amount:.3g} {'FLOPs' if row.kind == 'contraction' else 'numbers'}"
    return row.kind, row.stage, row.dtype, amount, str(row.times), row.where


def check_precision(
    fn: Callable[..., Any], *args: Any, policy: Policy | JmpPolicy, **kwargs: Any
) -> PrecisionReport:
    """Checks a whole training step against a policy: clipped gradient, noise and update.

    The step is traced, on shapes alone, and its program is read equation by equation, through
    `jit`, `scan`, `while`, `cond`, `remat`, derivative rules and `shard_map`. Nothing
    is compiled or computed. In a test:

    ```python
    dp.check_precision(step, model, opt_state, *batch, policy=policy).raise_if_violated()
    ```

    | stage | declared | what is checked |
    |---|---|---|
    | forward, backward | compute | matrix products and convolutions inside the loss |
    | the same | `matmul_precision` | they keep at least its digits of float32 |
    | module rule | compute of a rule | one operation at least; products, sums, roots in it |
    | clip norm | accumulate | norms of single gradients, and clip factors |
    | sum over examples | accumulate | the weighted sum |
    | sum over microbatches | accumulate | its addition to the total |
    | sum over devices | accumulate | every reduction of the clipped sum over a mesh axis |
    | between clip and noise | accumulate | every value that the clipped sum goes through |
    | noise draw | noise | the random bits, and every value from them to the addition |
    | noise addition | noise | the sum with the noise in it |
    | stored parameters | params | what is trained, as the step returns it |
    | the same | `rounding` | if it is stochastic: by random bits, of another key in each step |
    | optimizer state | optimizer | the arrays of optax's states that the step returns |

    Accumulate, noise and optimizer dtypes are lower limits: wider dtypes are accepted. A state is
    known by its type, one of optax's. Numbers by themselves in it may have any dtype. Parameters
    are known by the engine, which trains them: results that are made of an argument that it trains,
    and come back at its place. They have exactly the dtype, or the one that a module rule gives to
    parameters: for which modules is not checked. Frozen ones may have any.

    Operations entry by entry and reductions inside the loss may run in any dtype: a softmax or a
    layer norm that is wide inside is no violation. What follows the noise (the optimizer's
    arithmetic, casts of parameters to their storage dtype) is post-processing and not checked. The
    pass by which a `per_example` loss scale is chosen is counted (`loss scale probe`) and not
    checked, since it changes no gradient.

    Inside a module that a rule of the policy matches, forward and backward are checked against the
    rule's dtype; everywhere else against the policy's, also where such a module's parameter is read
    and used outside of the module. A rule under which nothing runs is a violation: the step was
    built without it, or does not call its modules.

    A clipped sum can also lose digits without a narrow dtype. Between clip and noise these count:

    | what happens to the sum | a violation if |
    |---|---|
    | a matrix product or convolution of float32 | it is not at the highest precision |
    | the same by a `DotAlgorithm` or a `DotAlgorithmPreset` | always |
    | a cast to integers, or of its bits | always: integers do not show digits |
    | a callback, a kernel by name (`ffi_call`) | always: the result is unknown |
    | `jax.debug` callbacks, and others that return nothing | never |

    Of a sum that is returned without noise, a note speaks alone. Products and callbacks on the
    noise are checked as those on the sum. Functions that take floats apart (`jnp.ldexp`,
    `jnp.frexp`, `jnp.signbit`) cast them to integers: multiply by a power of two instead. Noise
    counts from its addition, which must be an addition, not a scatter.

    What it does not see: the output dtype, and loss scales; that there is no noise at all,
    of which a note speaks alone; a reduction over devices of sums to each of which noise was added
    before; sums that the engine did not clip; noise that was drawn elsewhere and comes in as an
    argument, or that is kept in state; digits that arithmetic drops from floats (`jnp.round`,
    `jnp.sign`, a large number added and subtracted), from integers that overflow, or from the bits
    of the noise; a sum that comes back in another call; one that goes through a mutable reference;
    what a compiler does with the program. Any floating-point draw that is added to a clipped sum
    counts as its noise: operations after a dither of your own are not checked. Of a `while` loop
    one step is counted, of a `cond` all branches.

    Args:
        fn: the step, jitted or not: any function that calls what `filter_clipped_grad` returned.
        *args: its arguments: any trees of arrays, or of `jax.ShapeDtypeStruct` in their place, and
            of anything else. They must be sharded as in training, in the same mesh context (a step
            of `make_step` enters its own).
        policy: the declared policy; usually the one that the step was built with.
        **kwargs: more of its arguments, by name (`is_padding_example`).

    Returns:
        A [`PrecisionReport`][]: `ok`, `violations`, `summary`; `str()` is a table.

    Raises:
        ValueError: the function calls no part of the engine, so there is nothing to check; or
            `policy` is not a policy.
    """
    declared = checked_policy(policy)
    if declared is None:
        raise ValueError("policy is None: give the policy that the step was built with.")
    function("fn", fn, "the step")
    program, results, _ = eqx.filter_make_jaxpr(fn)(*args, **kwargs)
    returns = coming_back(args, kwargs, results)
    names = [argument.names[-1] for argument in arguments_of(fn, args, kwargs)]
    flow = PrecisionFlow(declared, names)
    inputs = [Facts(arguments=frozenset({i}), untouched=i) for i in range(len(names))]
    outputs = flow.program(program, inputs, Context())
    if not flow.stages:
        raise ValueError(
            f"Nothing to check: {function_name(fn)} calls neither the function that "
            "filter_clipped_grad returns nor a privatizer. Pass the whole training step."
        )
    flow.idle_rules()
    stored = _stored_otherwise(flow, results, outputs, returns)
    notes = {
        "the policy is unsafe: the privacy guarantee does not hold": declared.unsafe,
        "no clipped sum of the engine's is in the program": "sum" not in flow.stages,
        "a clipped sum is returned without noise": any(facts.clipped for facts in outputs),
    }
    said = tuple(note for note, is_so in notes.items() if is_so)
    return PrecisionReport(declared, (*flow.violations, *stored), flow.operations, said)


def _stored_otherwise(
    flow: PrecisionFlow, results: PyTree[Any], outputs: list[Facts], returns: list[int | None]
) -> list[Violation]:
    """A row for each dtype in which parameters or optimizer state are stored as not declared.

    Parameters are results at the place of an argument that the engine trains, and made of it: a
    gradient is not. State is known by its type, which is one of optax's. Of it, arrays of one axis
    or more count: numbers by themselves (learning rates that are state) are no moments.
    """
    policy = flow.policy
    params, state = policy.param_dtype, policy.optimizer_dtype
    stored = {params, *(rule.param_dtype for rule in policy.modules)}
    fixed = {i for facts, i in zip(outputs, returns, strict=True) if facts.untouched == i}
    wide = known_width(policy.accumulate_dtype)
    found: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for (path, leaf), facts, at in zip(arrays_in(results), outputs, returns, strict=True):
        is_trained = flow.trained & facts.arguments & {at}
        if not is_trained or not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        if leaf.dtype not in stored:
            found["stored parameters", str(params), str(leaf.dtype)].append(keystr(path))
        elif policy.rounding == "stochastic" and known_width(leaf.dtype).narrower(wide):
            draws = [draw.arguments - fixed for draw in facts.draws]
            how = "the same random bits in each step" if draws else "rounded without random bits"
            if not any(draws):
                found["stored parameters", "rounding stochastic", how].append(keystr(path))
    for path, node in tree_leaves_with_path(results, is_leaf=_is_state):
        for below, leaf in tree_leaves_with_path(node) if _is_state(node) else ():
            is_array = leaf.shape and jnp.issubdtype(leaf.dtype, jnp.floating)
            if is_array and jnp.promote_types(leaf.dtype, state) != leaf.dtype:
                found["optimizer state", str(state), str(leaf.dtype)].append(keystr(path + below))
    return [Violation(*row, f"the result{some(paths, 1)}") for row, paths in found.items()]


def _is_state(node: Any) -> bool:
    return isinstance(node, tuple) and type(node).__module__.split(".")[0] == "optax"
