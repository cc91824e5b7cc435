"""Canaries: planted examples, each in a training run or out of it by a fair coin.

An attacker who learns from a run's releases which canaries were in it has learned something about
single examples. The number of right guesses gives a lower bound on epsilon, to compare with the
plan's upper bound (Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run").
A second bound knows the shape of Gaussian noise, and is tighter (Mahloujifar, Melis and Chaudhuri,
"Auditing f-differential privacy in one run", arXiv 2410.22235). jax_privacy computes both.

```python
planted = dp.audit.canaries.plant_gradients((xs, ys), 2_000, norm=1.0, seed=coins)
step = dp.make_step(
    planted.loss(loss), optax.sgd(0.5), plan, num_examples=planted.num_examples, l2_clip_norm=1.0
)
state = dp.Trainer(step, planted.data).run(planted.model(model))
audit = planted.audit(planted.scores(state.model), plan, attack="gradient")
print(audit)  # a table
assert audit.ok
```

| made by | a canary is | attacked is | the bound says |
|---|---|---|---|
| [`plant`][] | an example | its loss in the trained model | what such examples give away |
| [`plant_gradients`][] | the gradient of a parameter of its own | that parameter | whether \
sampling, clipping and noise are those of the plan |

A run can have both kinds. The first has an attacker who sees only the losses of the trained model;
its bound is usually far below the plan's epsilon. The second is the worst case that the plan's
epsilon covers, so it finds faults. Any other scores of canaries, such as those of a user's own
attack, are audited in the same way.

**A canary that is out** still has its place in the data set, and its loss is NaN there, so that it
adds exactly zero, also to the count of `dp.clipping.Quantile`. So the number of examples, the
expected batch size, and the samples do not depend on the coins. With or without a canary, two data
sets differ in one example that is added, removed or zeroed out; the plan's epsilon holds for that
under each of its relations.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, SupportsFloat, SupportsIndex

import dp_accounting
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped

from ..expected import real_number, whole_number
from ..extras import extra
from ..privacy import PrivacyPlan, Secret, digest
from ..shown import shown
from ..trees import PyTree
from .canary_audit import CanaryAudit as CanaryAudit

GUESSES = (1 / 32, 1 / 16, 1 / 8, 3 / 8)
"""Shares of the canaries that are guessed to be in; the best one counts."""

# With few, all coins may fall the same way, and there is nothing to distinguish.
_LEAST = 20
_AT_ONCE = 256
# The content of a row that is no included canary (those have numbers from 0).
_EXAMPLE, _OUT = -1, -2


@dataclasses.dataclass(frozen=True, eq=False)
class Canaries:
    """A data set with canaries behind its examples; made by [`plant`][] or [`plant_gradients`][].

    Attributes:
        data: what to train on: one more source of examples in front, which tells the loss what each
            row is, and then the sources that were given; numpy arrays.
        is_in: which canaries are in. The scores must not depend on it.
        num_examples: rows of `data`: the examples, and all canaries, in or out. A plan's sampler
            and `make_step` take this number.
    """

    data: tuple[PyTree[Any], ...] = dataclasses.field(repr=False)
    is_in: Bool[np.ndarray, " canaries"] = dataclasses.field(repr=False)
    num_examples: int

    def audit(
        self, scores: Any, plan: PrivacyPlan, *, attack: str, confidence: SupportsFloat = 0.95
    ) -> CanaryAudit:
        """Two lower bounds on epsilon from a score for each canary.

        The numbers of canaries that are guessed to be in are fixed beforehand (`GUESSES`), and the
        threshold follows from all scores in the same way. So only the choice of the best guess
        costs confidence, by a union bound.

        Args:
            scores: numbers, one for each canary, in order; the higher, the likelier it is in. They
                may follow from everything that the plan accounts for (the models after all steps),
                from the canaries, and from anything public, but not from `is_in`. Infinite scores
                are allowed, NaN is not.
            plan: the plan that the run claims to follow: the bound is for its delta.
            attack: a name for what computed the scores.
            confidence: the probability, at least, with which the bound holds.

        Raises:
            ValueError: an argument is out of its range, or there is not one number for each canary.
            MissingExtra: jax_privacy is not installed.
        """
        scores, is_in = np.asarray(scores), self.is_in
        if scores.shape != is_in.shape or scores.dtype.kind not in "biuf" or np.isnan(scores).any():
            raise ValueError(
                f"scores must be {len(is_in)} numbers, one for each canary, minus infinity where "
                f"an attack cannot tell; found {shown(scores)}, or NaN in it."
            )
        sure = real_number("confidence", confidence, lambda x: 0.5 < x < 1, "above 0.5, below 1")
        auditing = extra("jax_privacy.auditing", name="audit")
        scores = scores.astype(np.float64)
        auditor = auditing.CanaryScoreAuditor(scores[is_in], scores[~is_in])
        falling = np.sort(scores)[::-1]
        thresholds = {float(falling[max(1, int(x * len(scores))) - 1]) for x in GUESSES}
        bounds = auditor.epsilon_one_run, auditor.epsilon_one_run_fdp
        share = (1 - sure) / len(GUESSES), plan.delta
        strategies = [auditing.Explicit(threshold) for threshold in thresholds]
        lower, gaussian = (
            max(float(bound(*share, threshold_strategy=x)) for x in strategies) for bound in bounds
        )
        upper = plan.epsilon(), float(dp_accounting.get_epsilon_gaussian(1 / plan.mu(), plan.delta))
        counts = len(is_in), int(is_in.sum())
        return CanaryAudit(attack, *counts, sure, plan.delta, lower, upper[0], gaussian, upper[1])


class ExampleCanaries(Canaries):
    """Canaries that are examples, made by [`plant`][]."""

    def loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """The loss to train with: on a row of `data`, NaN for canaries that are out.

        Args:
            loss: of one example, `loss(model, *example)`, with or without a `key`; without aux.
        """

        def planted(model: Any, is_there: Any, *example: Any, **named: Any) -> Any:
            value = loss(model, *example, **named)
            return jnp.where(is_there, value, jnp.full_like(value, jnp.nan))

        return _with_signature(planted, loss, "is_there")

    def examples(self) -> tuple[PyTree[Any], ...]:
        """All canaries, in and out, one tree for each source that was given."""
        first = self.num_examples - len(self.is_in)
        return jax.tree.map(lambda leaf: leaf[first:], self.data[1:])

    def loss_scores(
        self, loss: Callable[..., Any], trained: Any, start: Any = None, **named: Any
    ) -> Float[np.ndarray, " canaries"]:
        """The loss attack: how far training has brought the loss of each canary down.

        Args:
            loss: of one example: the one that was given to `loss`, or one of the attacker's own.
            trained: the model after training.
            start: the model before. Without it the score is minus the trained model's loss (Yeom et
                al. 2018), which also depends on how hard each canary is.
            **named: more arguments of the loss, the same for all canaries, such as a `key`.

        Returns:
            Scores for `audit`, in float64; minus infinity where a loss is NaN.
        """
        examples = jax.tree.map(jnp.asarray, self.examples())
        before = 0.0 if start is None else _losses(loss, start, examples, named)
        scores = before - _losses(loss, trained, examples, named)
        return np.where(np.isnan(scores), -np.inf, scores)


class Marked(eqx.Module):
    """A model with one more parameter for each canary. Called, it is the model.

    Attributes:
        model: the model.
        marks: zero before training.
    """

    model: Any
    marks: Float[Array, " canaries"]

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Calls the model.

        Args:
            *args: as the model takes them.
            **named: as the model takes them.
        """
        return self.model(*args, **named)


@dataclasses.dataclass(frozen=True, eq=False)
class GradientCanaries(Canaries):
    """Canaries that are gradients, made by [`plant_gradients`][].

    Attributes:
        norm: of the gradient of each canary.
    """

    norm: float

    def model(self, model: Any) -> Marked:
        """The model to train, with the canaries' parameters.

        Args:
            model: the model. A policy is for the step: do not pair the model with one.
        """
        return Marked(model, jnp.zeros(len(self.is_in), jnp.float32))

    def loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """The loss to train a `Marked` model with.

        On an example it is the given loss; on canary k, which is in, `norm * marks[k]`, whose
        gradient is a vector with one entry of `norm`; on one that is out, NaN.

        Args:
            loss: of one example, `loss(model, *example)`, with or without a `key`; without aux. It
                also runs on zeros in place of an example, in the canaries' rows, where its value is
                not used. If it is not finite there, the canaries add nothing.
        """

        def planted(marked: Marked, row: Any, *example: Any, **named: Any) -> Any:
            value = loss(marked.model, *example, **named)
            mark = self.norm * marked.marks[jnp.maximum(row, 0)]
            canary = jnp.where(row >= 0, mark, jnp.full_like(mark, jnp.nan)).astype(value.dtype)
            return jnp.where(row == _EXAMPLE, value, canary)

        return _with_signature(planted, loss, "row")

    def scores(self, trained: Marked) -> Float[np.ndarray, " canaries"]:
        """How far training has moved the parameter of each canary, in the direction of descent.

        With plain SGD, each is minus the learning rate times the sum of what the steps released
        there, the sufficient statistic of a Gaussian. Other optimizers weigh the steps, and the
        bound is lower. Weight decay and momentum do little; a rate that falls does more.

        Args:
            trained: the `Marked` model after training.

        Returns:
            Scores for `audit`, in float64.
        """
        return -np.asarray(trained.marks, np.float64)


def plant(
    data: tuple[PyTree[Any], ...], canaries: tuple[PyTree[Any], ...], *, seed: Secret
) -> ExampleCanaries:
    """Puts examples into a data set as canaries, each in or out by a fair coin.

    Good canaries are unlike the examples and unlike each other, as images of random pixels with
    random labels are. Their result says little about other examples.

    Args:
        data: the sources of examples, one for each argument of the loss: numpy or JAX arrays, or
            trees of them, with examples in front. They are copied into memory.
        canaries: as many sources of the same structure and shapes, with at least 20 canaries in
            front.
        seed: of the coins, a number of at least 0, or bytes; the same seed gives the same coins. It
            may be the run's: the coins have a key of their own.

    Returns:
        The data set and what belongs to it.

    Raises:
        ValueError: there are fewer than 20 canaries; or structures, shapes or numbers do not agree.
    """
    number, length = _length(canaries, "canaries"), _length(data, "data")
    number = whole_number("the number of canaries", number, least=_LEAST, most=2**31 - 1)
    if jax.tree.structure(canaries) != jax.tree.structure(data):
        raise ValueError("canaries must have the structure of data: one source for each of data's.")
    is_in = _coins(seed, "examples", number)
    is_there = np.concatenate([np.ones(length, bool), is_in])
    both = jax.tree.map(_joined, data, canaries)
    return ExampleCanaries((is_there, *both), is_in, length + number)


def plant_gradients(
    data: tuple[PyTree[Any], ...], number: SupportsIndex, *, norm: SupportsFloat, seed: Secret
) -> GradientCanaries:
    """Puts gradients into a data set as canaries, each in or out by a fair coin.

    Each canary has a parameter of its own, beside the model's, and its gradient is along that
    parameter alone ("Dirac canaries" in section 6 of Steinke et al. 2023). Canaries therefore
    disturb neither the model nor each other. The releases of a canary's parameter are exactly the
    mechanism that the plan accounts for, on one example with the largest gradient that clipping
    permits. The model is trained with the noise and the examples that it would have without
    canaries; only the size of the data set, by which sums are divided, is larger.

    Args:
        data: as for [`plant`][].
        number: of canaries, at least 20. With 3,000, noise that is four times too small is found
            at epsilon 1 and 3 with a wide margin.
        norm: of each canary's gradient, at least the run's clip norm (the largest, if there are
            several); above 0. It is rounded up to a power of two, so that no dtype rounds it.
        seed: as for [`plant`][].

    Returns:
        The data set and what belongs to it.

    Raises:
        ValueError: an argument is out of its range, or sources are not of one length.
    """
    number = whole_number("number", number, least=_LEAST, most=2**31 - 1)
    bound = real_number("norm", norm, lambda real: real > 0, "above 0; take the clip norm")
    length = _length(data, "data")
    is_in = _coins(seed, "gradients", number)
    rows = np.where(is_in, np.arange(number), _OUT)
    rows = np.concatenate([np.full(length, _EXAMPLE), rows]).astype(np.int32)
    both = jax.tree.map(
        lambda leaf: _joined(leaf, np.zeros((number, *leaf.shape[1:]), leaf.dtype)), data
    )
    rounded = 2.0 ** math.ceil(math.log2(bound))
    return GradientCanaries((rows, *both), is_in, length + number, rounded)


def _coins(seed: Secret, kind: str, number: int) -> Bool[np.ndarray, " canaries"]:
    key = int.from_bytes(digest(seed, ("eqx_dp canaries", kind, str(number)), size=16), "little")
    generator = np.random.Generator(np.random.Philox(key=key))
    return generator.integers(2, size=number).astype(bool)


def _length(sources: tuple[PyTree[Any], ...], name: str) -> int:
    """How many examples there are; refuses sources that are no arrays of one length."""
    leaves = jax.tree.leaves(sources)
    lengths = {x.shape[:1] if isinstance(x, np.ndarray | jax.Array) else () for x in leaves}
    if type(sources) is not tuple or len(lengths) != 1 or () in lengths:
        raise ValueError(
            f"{name} must be a tuple of sources: arrays, or trees of them, with equally many "
            f"examples along their leading axes; found {shown(sources)}."
        )
    return len(leaves[0])


def _joined(data: Any, canaries: Any) -> Shaped[np.ndarray, "rows ..."]:
    data, canaries = np.asarray(data), np.asarray(canaries)
    is_like = np.can_cast(canaries.dtype, data.dtype, "same_kind")
    if canaries.shape[1:] != data.shape[1:] or not is_like:
        raise ValueError(
            f"each canary must be like an example, {data.dtype} of shape {data.shape[1:]}; found "
            f"{canaries.dtype} of shape {canaries.shape[1:]}."
        )
    return np.concatenate([data, canaries.astype(data.dtype)])


def _losses(
    loss: Callable[..., Any], model: Any, examples: tuple[Any, ...], named: dict[str, Any]
) -> Float[np.ndarray, " canaries"]:
    @eqx.filter_jit
    def of_all(model: Any, examples: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return jax.lax.map(lambda x: loss(model, *x, **named), examples, batch_size=_AT_ONCE)

    return np.asarray(of_all(model, examples, named), np.float64)


def _with_signature(
    planted: Callable[..., Any], loss: Callable[..., Any], row: str
) -> Callable[..., Any]:
    """Gives a loss the signature of another, with a row after the model.

    The engine reads from it whether the loss takes a `key`.
    """
    planted = functools.wraps(loss)(planted)
    signature = inspect.signature(loss)
    parameters = list(signature.parameters.values())
    if parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        parameters.insert(1, inspect.Parameter(row, parameters[0].kind))
    planted.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore
    return planted
