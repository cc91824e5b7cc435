"""`check_precision`: a whole training step held against its policy, on its traced program."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax.extend.core as jex_core

from .checks import Check, Use, Violation
from .feedback import next_arguments
from .flow import NOTHING, Facts, Here, Walk
from .policy import Policy, checked_policy


class PrecisionReport(NamedTuple):
    """What `check_precision` found; its `str` is a table.

    Attributes:
        policy: the policy that the step was compared with.
        violations: a row for each operation that does not run as declared, with its stage, the
            declared dtype, what was found, and the source line.
        summary: what runs in which dtype: FLOPs of contractions, every sum over examples, every
            collective, every draw that feeds the noise, every addition of noise. Each module rule
            has rows of its own.
        notes: what the check could not see, and whether the policy is unsafe.
    """

    policy: Policy
    violations: tuple[Violation, ...]
    summary: tuple[Use, ...]
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

    def __str__(self) -> str:
        count = len(self.violations)
        found = "as declared" if self.ok else f"{count} violation{'s' * (count != 1)}"
        name = self.policy.name or "the policy"
        lines = [f"{found}: {name} ({self.policy})", *(f"note: {note}" for note in self.notes)]
        if self.violations:
            lines += ["", *_table([("stage", "declared", "found", "where"), *self.violations])]
        head = ("what", "stage", "dtype", "amount", "times", "where")
        lines += ["", *_table([head, *map(_cells, self.summary)])]
        return "\n".join(lines)


def _cells(use: Use) -> tuple[str, ...]:
    unit = "FLOPs" if use.kind == "contraction" else "numbers"
    return use.kind, use.stage, use.dtype, f"{use.amount:.3g} {unit}", str(use.times), use.where


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def check_precision(
    fn: Callable[..., Any], *args: Any, policy: Policy, **kwargs: Any
) -> PrecisionReport:
    """Compares a whole training step (clipped gradient, noise, update) with a policy.

    The step is traced, on shapes alone, and its program is read equation by equation, through
    `jit`, `scan`, `while`, `cond`, `remat`, derivative rules and `shard_map`. Nothing
    is compiled or computed. In a test:

    ```python
    dp.check_precision(step, model, opt_state, *batch, policy=policy).raise_if_violated()
    ```

    | stage | dtype | what must run in it |
    |---|---|---|
    | forward, backward | compute | matrix products and convolutions inside the loss |
    | the same | `matmul_precision` | they keep at least its digits of float32 |
    | module rule | compute of a rule | at least one operation runs under each rule |
    | clip norm | accumulate | norms of single gradients, and clip factors |
    | sum over examples | accumulate | the weighted sum |
    | sum over microbatches | accumulate | its addition to the total, and what a loop carries |
    | sum over devices | accumulate | every reduction of the clipped sum over a mesh axis |
    | between clip and noise | accumulate | every value that the clipped sum goes through |
    | noise draw | noise | the random bits, and every value from them to the addition |
    | noise addition | noise | the sum with the noise in it |

    Accumulate and noise dtypes are lower limits: wider dtypes are accepted.

    Elementwise operations and reductions inside the loss may run in any dtype: a softmax or a
    layer norm that computes in float32 inside is not a violation. What follows the noise (the
    optimizer, casts of parameters to their storage dtype) is post-processing and is not checked.
    The pass that chooses a `per_example` loss scale is counted (`loss scale probe`) and not
    checked, because it changes no gradient.

    Inside a module that a rule of the policy matches, forward and backward must run in the rule's
    dtype. Everywhere else they must run in the policy's compute dtype, also if such a module's
    parameter is read and used outside of the module. A rule under which nothing runs is a
    violation: the step was built without it, or does not call its modules.

    A clipped sum can also lose digits without a narrow dtype. Between clip and noise these count:

    | what happens to the sum | a violation if |
    |---|---|
    | a matrix product or convolution of float32 | it is not at the highest precision |
    | the same by a `DotAlgorithm` | its operands or sums have fewer digits than their dtypes |
    | arithmetic on its bits, or on integers made of it | it drops bits: and, or, shifts, division |
    | a cast to integers | they have fewer bits than the accumulate dtype has digits |
    | a callback, a kernel by name (`ffi_call`) | always: nothing is known of the result |
    | `jax.debug` callbacks, and others that return nothing | never |
    | it is kept in the step's state | any of this happens in a later call |

    For the last row, the check assumes that a result that holds an un-noised sum is given to the
    next call, as the argument in the same position: `state` of `step(model, state, *batch)` that
    returns `(model, state)`, or of `step(state, *batch)` that returns `state` or `(loss, state)`.
    The rows on products and callbacks hold for the noise as well. Functions that take floats apart
    (`jnp.ldexp`, `jnp.frexp`, `jnp.signbit`) are arithmetic on bits: multiply by the power of two
    instead.

    The check does not see:

    - storage and output dtypes, and loss scales;
    - that there is no noise at all (a note says so);
    - a reduction over devices of sums that already hold noise;
    - sums that the engine did not clip;
    - noise that was drawn elsewhere and is an argument, or that is kept in state;
    - digits that arithmetic drops from floats (`jnp.round`, `jnp.sign`, a large number added and
      subtracted), from integers that overflow, or from the bits of the noise;
    - a sum that reaches a later call in another way (cast by the caller, in another position, in
      another function, through a mutable reference);
    - what a compiler makes of the program.

    A floating-point draw that is added to a clipped sum is taken for its noise, so nothing is
    checked after random numbers of the user's own are added. Of a `while` loop one step is counted,
    of a `cond` all branches.

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
    program, results, _ = eqx.filter_make_jaxpr(fn)(*args, **kwargs)
    check, outputs = _walked(program.jaxpr, declared, next_arguments(args, kwargs, results))
    if not check.stages:
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        raise ValueError(
            f"Nothing to check: {name} calls neither the function that filter_clipped_grad returns "
            "nor a privatizer. Pass the whole training step."
        )
    check.idle_rules()
    uses = sorted(Use(*key[:3], *found, key[3]) for key, found in check.uses.items())
    notes = _notes(declared, check, any(facts.clipped for facts in outputs))
    return PrecisionReport(declared, tuple(check.violations), tuple(uses), notes)


def _walked(
    program: jex_core.Jaxpr, policy: Policy, returns: list[list[int]]
) -> tuple[Check, list[Facts]]:
    """Walks through call after call, until no un-noised sum comes back that had not before."""
    inputs = [NOTHING] * len(program.invars)
    while True:
        check = Check(policy)
        outputs = Walk(check).jaxpr(program, inputs, Here())
        back = {i for facts, at in zip(outputs, returns, strict=True) if facts.clipped for i in at}
        before = {i for i, facts in enumerate(inputs) if facts.clipped}
        if back <= before:
            return check, outputs
        inputs = [Facts(clipped=i in back | before) for i in range(len(inputs))]


def _notes(policy: Policy, check: Check, leaves_without_noise: bool) -> tuple[str, ...]:
    notes: list[str] = []
    if policy.unsafe:
        notes.append("the policy is unsafe: the privacy guarantee does not hold")
    if "sum" not in check.stages:
        notes.append("the program holds no clipped sum of the engine, so no sum was checked")
    if leaves_without_noise:
        notes.append("a clipped sum, or a value computed from it, is returned without noise")
    return tuple(notes)
