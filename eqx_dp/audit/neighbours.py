"""Runs neighboring data sets with the same noise: how far does one example move a release?"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsFloat, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting import NeighboringRelation
from jaxtyping import Bool

from ..expected import real_number
from ..gradients import ClippedGrad
from ..paths import dotted, matches
from ..shown import shown
from ..training import Step, TrainState
from ..trees import PyTree, is_key
from .held import Run, run_held
from .hostile import Example, hostile_examples
from .neighbours_report import NeighboursReport, Pair, Violation

_Place: TypeAlias = int | str
_Arrays: TypeAlias = Sequence[np.ndarray]
_Mask: TypeAlias = Bool[np.ndarray, " slots"]

_PADDING = "is_padding_example"
_HOSTILE = ("x 1024", "nan", "negated", "zeros", "inf")

_ADVICE = {
    "movement": "Clip every example on its own, select away what is not finite, divide by public "
    "numbers alone, and use this sensitivity for the noise.",
    "noise": "Draw noise from a key that does not depend on the data: plan.privatizer(grad_fn).",
    "beside the noise": "Compute results from the noised gradient; or disclose what may be known.",
    "padding": "Pass on the mask, is_padding_example, and select padding away (jnp.where).",
    "stopped": "An error shows that the example is there. Let the loss return NaN instead.",
}


def neighbours(
    fn: Callable[..., Any],
    *args: Any,
    private: Sequence[_Place] | None = None,
    padding: _Place | None = None,
    sensitivity: SupportsFloat | None = None,
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
        private=(2, 3), padding=4, sensitivity=grad_fn.sensitivity(relation),
    ).raise_if_violated()
    ```

    One slot of the batch holds a hostile example: zeros, NaN, infinities, the largest, lowest,
    smallest and subnormal numbers of its dtypes, itself scaled and negated, a copy of another
    example, a negated copy. The other slots are as given, hostile, or padding. Each data set is run
    with and without the example, with the same keys. The sums before noise are recorded: their
    difference between two runs, in float64, is the movement by one example. The step's releases are
    held fixed: all other results must then be the same. A gray-box audit of twelve libraries found
    13 violations in this way (Cebere et al., "Privacy in Theory, Bugs in Practice", 2026, arXiv
    2602.17454).

    | rule | holds if |
    |---|---|
    | movement | no pair moves what is released by more than the sensitivity, up to `rounding` |
    | noise | it does not change with the data |
    | beside the noise | no other result changes with the data, but those in `disclose` |
    | padding | what a padding slot holds changes no bit of what is released |
    | stopped | no call raises an error |

    **Guarantee.** A violation of "movement" is a counterexample to the sensitivity: two neighboring
    data sets, and how far they are apart. The converse does not hold. This is a test on examples
    and no proof: it sees the pairs that it runs, one set of parameters, and one shape of batch. If
    no example comes near the bound (`largest` is well below 1; a note says so), clipping was not
    tested: give a smaller clip norm, or larger examples. It does not see how much noise there is,
    whether each step has new noise, how the batch was sampled, and what callbacks write:
    `check_privacy` reads the program.

    | relation | neighbors here |
    |---|---|
    | `ADD_OR_REMOVE_ONE`, `REPLACE_SPECIAL` | an example against padding |
    | `REPLACE_ONE` | every two candidates for the slot |

    The function is traced and compiled twice, some 150 calls run, and a copy of what is released is
    held for every candidate: audit a small model.

    Args:
        fn: what `filter_clipped_grad` or `filter_value_and_clipped_grad` returned, a `Step`, or any
            function of theirs that can be traced, jitted or not.
        *args: its arguments: the model (or a step's state, which is not used up), then a batch of
            at least two examples, made up or public.
        private: for other functions, which arguments hold examples along their leading axes:
            positions, or names of those given by name.
        padding: for other functions, which argument is the mask that is True where a slot holds no
            example: a position or a name; by default `is_padding_example`.
        sensitivity: for other functions, by how much one example may move what is released, in L2
            norm: `grad_fn.sensitivity(relation)`.
        neighboring_relation: what neighbors are, by default `ADD_OR_REMOVE_ONE`; a step has its
            plan's.
        release: for other functions, from the result to what is released, a tree of floating-point
            arrays in the unit of `sensitivity`. None for whatever `gaussian_privatizer` or
            `add_noise` adds noise to.
        disclose: dotted paths of results (`2`, `1.loss`; `*` and `**` are wild) that may depend on
            data although no plan accounts for it.
        **kwargs: more of its arguments, by name (`key`, `is_padding_example`).

    Returns:
        A [`NeighboursReport`][]: `ok`, `violations`, `largest`, `pairs`; `str()` is a table.

    Raises:
        ValueError: an argument does not fit, as its error says; no noise is found to record and no
            `release` is given.
        Exception: what the function itself raises on the examples as they are given.
    """
    inner = getattr(fn, "__wrapped__", None)  # a clipped gradient that was wrapped in a jit
    fn = inner if isinstance(inner, ClippedGrad) else fn
    relation, rules = neighboring_relation or NeighboringRelation.ADD_OR_REMOVE_ONE, None
    if isinstance(fn, ClippedGrad | Step):
        if any(x is not None for x in (private, padding, sensitivity, release)) or len(args) < 2:
            raise ValueError(
                "give model or state, then the batch, of a clipped gradient or a step; private, "
                "padding, sensitivity and release are known: leave them out."
            )
        grad_fn = fn.grad_fn if isinstance(fn, Step) else fn
        private, rules = range(1, len(args)), grad_fn.sharding
        if isinstance(fn, Step):
            relation = fn.plan.neighboring_relation
            args = (args[0] if isinstance(args[0], TrainState) else fn.init(args[0]), *args[1:])
        else:
            release = functools.partial(_part_like, jax.tree.structure(fn.trainable(args[0])))
        sensitivity = grad_fn.sensitivity(relation)
        if kwargs.get(_PADDING) is None:
            kwargs[_PADDING] = np.zeros(np.shape(jax.tree.leaves(args[1:])[0])[:1], bool)
    if rules is not None:
        with jax.set_mesh(rules.mesh):
            args = (args[0], *rules.shard_batch(args[1:]))
    args, kwargs = jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, (args, kwargs)
    )
    arguments, padding = dict(enumerate(args)) | kwargs, _PADDING if padding is None else padding
    places = [place for place in (*(private or ()), padding) if not isinstance(place, bool)]
    if sensitivity is None or not private or not arguments.keys() >= {*places}:
        raise ValueError(
            "say which arguments hold examples and which is the mask, private=(2, 3), padding=4, "
            "and how far one example moves what is released, sensitivity=grad_fn.sensitivity(...); "
            f"found {shown(private)}, {shown(padding)}, {shown(sensitivity)}."
        )
    bound = real_number("sensitivity", sensitivity, lambda real: real > 0, "above 0")
    with contextlib.nullcontext() if rules is None else jax.set_mesh(rules.mesh):
        return _Audit(fn, arguments, places, release, bound, relation, (*disclose,)).report()


def _part_like(structure: Any, result: Any) -> Any:
    """The first part of a result that has this structure: the gradients, beside values or aux."""
    parts = (result, *result) if isinstance(result, tuple) else (result,)
    return next(part for part in parts if jax.tree.structure(part) == structure)


@dataclasses.dataclass
class _Audit:
    """The pairs of one audit, and what was found on them.

    Attributes:
        fn: what is called.
        arguments: by position or name.
        places: which of them hold examples, and last which is the mask.
        release: from the result to what is released; None for what noise is added to.
        sensitivity: how far what is released may move.
        relation: what neighbors are.
        disclosed: patterns of the paths of results that may depend on data.
        rounding: how far movements may exceed 1.
        pairs: those compared.
        worst: violations by rule, each with its size.
    """

    fn: Callable[..., Any]
    arguments: dict[_Place, Any]
    places: list[_Place]
    release: Callable[[Any], PyTree[Any]] | None
    sensitivity: float
    relation: NeighboringRelation
    disclosed: tuple[str, ...]
    rounding: float = 0.0
    pairs: list[Pair] = dataclasses.field(default_factory=list[Pair])
    worst: dict[str, tuple[float, Violation]] = dataclasses.field(default_factory=dict[str, Any])

    def report(self) -> NeighboursReport:
        """Runs all data sets."""
        *batch, mask = (self.arguments[place] for place in self.places)
        leaves = [*jax.tree.leaves(batch), mask]
        lengths = {x.shape[:1] if eqx.is_array(x) and not is_key(x) else () for x in leaves}
        if len(lengths) > 1 or min(lengths) < (2,) or mask.dtype != bool or mask.all():
            raise ValueError(
                "data and mask must be arrays with equally many examples along their leading axes, "
                f"at least 2, the mask boolean and not True everywhere; found {shown(leaves)}."
            )
        batch, mask = jax.tree.map(np.asarray, (batch, mask))
        given = [jax.tree.map(lambda x, i=i: x[i], batch) for i in range(len(mask))]
        self._size, self._held = len(given), None
        self._base = self._called(given, mask)
        if self.release is None:
            both = zip(self._base.sums, self._base.noise, strict=True)
            self._held = [one + noise for one, noise in both]
            self._base = self._called(given, mask)
        self._results = _leaves(self._base.result)
        real = [int(i) for i in np.flatnonzero(~mask)]
        slot = real[len(real) // 2]
        options = (hostile_examples(example, example) for example in given)
        hostile = [x.get(_HOSTILE[i % 5], x["as given"]) for i, x in enumerate(options)]
        candidates = hostile_examples(given[slot], given[real[0]])
        at = Pair("as given", "", slot, 0.0)
        self._exchange(at, candidates, given, mask)
        self._exchange(at._replace(others="hostile"), candidates, hostile, mask)
        self._exchange(at._replace(others="padding"), candidates, given, np.ones_like(mask))
        for other in real:
            self._exchange(at._replace(slot=other), {"as given": given[other]}, given, mask)
        pairs, violations = tuple(self.pairs), tuple(found for _, found in self.worst.values())
        return NeighboursReport(self.sensitivity, self.relation, self.rounding, pairs, violations)

    def _exchange(
        self, pair: Pair, candidates: dict[str, Example], rows: list[Example], mask: _Mask
    ) -> None:
        """Compares the data sets whose slot holds nothing, or one of the candidates."""
        others, _, slot, _ = pair
        is_replaced = self.relation is NeighboringRelation.REPLACE_ONE
        present, padded = (np.where(np.arange(len(rows)) == slot, x, mask) for x in (False, True))
        zeros = jax.tree.map(np.zeros_like, rows[slot])
        left_out = self._run(others, [*rows[:slot], zeros, *rows[slot + 1 :]], padded)
        before: list[tuple[str, _Arrays | None]] = []
        for name, example in candidates.items():
            where, data = f"{name}; others {others}", [*rows[:slot], example, *rows[slot + 1 :]]
            seen, unseen = self._run(where, data, present), self._run(where, data, padded)
            if unseen and left_out and not _same(unseen, left_out):
                self._note("padding", "the content of a padding slot changes the sum", where)
            for other, sums in before if is_replaced else [("none", left_out)]:
                self._moves(pair._replace(example=f"{other} -> {name}"), sums, seen)
            before.append((name, seen))

    def _run(self, where: str, rows: list[Example], mask: _Mask) -> _Arrays | None:
        """The releases of a data set; None if the call fails. Other results must not change."""
        try:
            found = self._called(rows, mask)
        except Exception as error:  # any error came with the data
            return self._note("stopped", f"the call raised {type(error).__name__}", where)
        if not _same(found.noise, self._base.noise):
            self._note("noise", "the noise changes with the data", where)
        for path, leaf in _leaves(found.result).items() if self.release is None else ():
            is_disclosed = any(matches(pattern, path) for pattern in self.disclosed)
            if not is_disclosed and not _same([leaf], [self._results[path]]):
                self._note("beside the noise", f"result {path} changes, without noise", where)
        return self._released(found)

    def _moves(self, pair: Pair, one: _Arrays | None, other: _Arrays | None) -> None:
        """Records how far the releases move between two data sets.

        A sum of n contributions, each of at most the sensitivity S, rounds at most n + 1 times in
        every entry, and once more where noise has been added: with unit roundoff u it is off by at
        most u (n (n + 1) S + its norm) (Higham 2002, section 4.2). A movement is the difference of
        two.
        """
        if one is None or other is None:
            return
        with np.errstate(all="ignore"):
            apart = [a.astype(np.float64) - b for a, b in zip(one, other, strict=True)]
        movement, n = _norm(apart) / self.sensitivity, self._size
        norms = sum(size for size in map(_norm, (one, other)) if math.isfinite(size))
        roundoff = max(float(jnp.finfo(x.dtype).eps) / 2 for x in one)
        allowed = roundoff * (2 * n * (n + 1) + norms / self.sensitivity)
        self.rounding = max(self.rounding, allowed)
        self.pairs.append(pair._replace(movement=movement))
        if not movement <= 1 + allowed:
            found = f"one example moves what is released by {movement:.6g} times the sensitivity"
            self._note("movement", found, f"{pair.example}; others {pair.others}", movement)

    def _note(self, rule: str, found: str, where: str, size: float = 0.0) -> None:
        """Records a violation; the largest of each rule is kept."""
        if rule not in self.worst or size > self.worst[rule][0]:
            self.worst[rule] = size, Violation(rule, found, where, _ADVICE[rule])

    def _called(self, rows: list[Example], mask: _Mask) -> Run:
        """The call on other data, each array placed as the one that it replaces."""
        batch = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
        values = dict(self.arguments)
        for place, value in zip(self.places, (*batch, mask), strict=True):
            values[place] = jax.tree.map(_like, value, self.arguments[place])
        args = tuple(value for place, value in values.items() if isinstance(place, int))
        kwargs = {place: value for place, value in values.items() if isinstance(place, str)}
        return jax.block_until_ready(run_held(self.fn, args, kwargs, self._held))

    def _released(self, run: Run) -> _Arrays:
        """What is released, before noise."""
        given = run.sums if self.release is None else jax.tree.leaves(self.release(run.result))
        if not given:
            raise ValueError(
                "the function adds no noise by gaussian_privatizer or add_noise, outside of loops "
                "and branches. Say what is released in the unit of the sensitivity, release="
                "lambda result: ..., or audit the clipped gradient by itself (step.grad_fn)."
            )
        return [np.asarray(array) for array in given]


def _like(value: np.ndarray, like: jax.Array) -> jax.Array:
    return jax.device_put(value, like.sharding if like.committed else None)


def _leaves(tree: PyTree[Any]) -> dict[str, np.ndarray]:
    """All arrays of a tree on the host, by path; of keys their words."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array))
    words = ((path, jax.random.key_data(x) if is_key(x) else x) for path, x in leaves)
    return {dotted(path): np.asarray(x) for path, x in words}


def _norm(arrays: _Arrays) -> float:
    """The L2 norm of all arrays together, in float64; infinite if an entry is not finite."""
    with np.errstate(all="ignore"):
        square = sum(float(np.sum(np.square(x, dtype=np.float64))) for x in arrays)
    return math.sqrt(square) if math.isfinite(square) else math.inf


def _same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Bit for bit."""
    pairs = zip(one, other, strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
