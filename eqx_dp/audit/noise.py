"""The noise of several steps, recorded on data that do not change."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import numpy as np
from scipy import stats

from ..checks.arguments import next_arguments
from .arguments import Arguments, next_call
from .findings import Findings
from .subject import Subject

Draws = Sequence[Sequence[np.ndarray]]

DRAWS = 8
"""Steps whose noise is recorded."""
FALSE_ALARM = 1e-9
"""With which probability right noise of a leaf is taken for too little."""


class Noise(NamedTuple):
    """The noise of several steps.

    Attributes:
        draws: for each step, the noise of each leaf, in float64.
        degrees: how many independent numbers a leaf's entry stands for, over all steps.
    """

    draws: Draws
    degrees: int


def recorded_noise(subject: Subject, arguments: Arguments, *, on_padding: bool) -> Noise:
    """Calls a function several times in a row: on padding alone, or on the examples as given.

    As in training, what a call returns comes back in the next one; but for the first argument,
    usually the model, where something else comes back as well. Keys that do not come back are
    folded with the number of the call.

    With `release` what is released is taken for the noise, after its mean over calls.
    """
    mask = arguments.mask
    mask = np.ones_like(mask) if on_padding and mask is not None else mask
    call = first = arguments.on(arguments.examples, mask)
    found: list[list[np.ndarray]] = []
    comes_back: list[list[int]] = []
    for times in range(DRAWS):
        result, _, noise, _ = subject.call(*call)
        leaves = noise if subject.release is None else jax.tree.leaves(subject.release(result))
        found.append([np.asarray(leaf).astype(np.float64) for leaf in leaves])
        if times == 0:
            comes_back = _coming_back(arguments, first, result, whole=subject.release is None)
        call = next_call(first, result, comes_back, times + 1)
    if subject.release is None:
        return Noise(found, DRAWS)
    means = [np.mean(each, axis=0) for each in zip(*found, strict=True)]
    apart = [[np.asarray(x - m) for x, m in zip(draw, means, strict=True)] for draw in found]
    return Noise(apart, DRAWS - 1)


def _coming_back(
    arguments: Arguments, call: tuple[tuple[Any, ...], dict[str, Any]], result: Any, *, whole: bool
) -> list[list[int]]:
    """For each array of a result, which arrays of the next call it becomes."""
    args, kwargs = call
    of = next_arguments(args, kwargs, eqx.filter(result, eqx.is_array))
    places = {**dict(enumerate(args)), **dict(sorted(kwargs.items()))}  # as JAX flattens them
    owners = [
        place
        for place, tree in places.items()
        for _ in jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    ]
    fixed = {*arguments.private, arguments.padding}
    if not whole and any(owners[at] not in {0, *fixed} for each in of for at in each):
        fixed.add(0)
    return [[at for at in each if owners[at] not in fixed] for each in of]


def check_noise(noise: Noise, stddev: float | None, findings: Findings) -> None:
    """Holds the noise against what the plan says.

    | rule | found by |
    |---|---|
    | every leaf has noise, and as much as the plan says | its squares are chi-squared: less than \
their quantile of 1e-9 is too little |
    | it is new at every step | the same numbers at two steps |
    | no two leaves have the same | equal or proportional numbers at all steps |

    Without a plan `stddev` is None, and nothing is said of how much noise there is.
    """
    leaves = list(zip(*noise.draws, strict=True))
    for index, leaf in enumerate(leaves):
        where = f"noise of leaf {index} of {len(leaves)}, shape {leaf[0].shape}"
        if leaf[0].size == 0:
            continue
        if stddev is not None:
            _check_scale(leaf, noise.degrees, stddev, where, findings)
        if _repeats(leaf):
            found = "two steps have the same noise, or none"
            findings.add("noise", "repeated", found, where)
        for before in range(index):
            if _proportional(leaves[before], leaf):
                found = f"the leaf has the noise of leaf {before}, which cancels between the two"
                findings.add("noise", "shared", found, where)


def _check_scale(
    leaf: Sequence[np.ndarray], degrees: int, stddev: float, where: str, findings: Findings
) -> None:
    number = leaf[0].size * degrees
    square = float(sum(np.sum(np.square(draw / stddev)) for draw in leaf))
    chi_squared = cast(Any, stats.chi2)  # scipy is not typed
    if not square >= float(chi_squared.ppf(FALSE_ALARM, number)):
        share = math.sqrt(square / number)
        found = f"the noise has {share:.3g} times the standard deviation {stddev:.6g} of the plan"
        findings.add("noise", "scale", found, where, -share)


def _repeats(leaf: Sequence[np.ndarray]) -> bool:
    """Whether two draws are the same; of a single number, which may come twice, whether all are."""
    pairs = [np.array_equal(leaf[i], leaf[j]) for i in range(len(leaf)) for j in range(i)]
    return all(pairs) if leaf[0].size == 1 else any(pairs)


def _proportional(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    """Whether two leaves have one noise, up to a factor and rounding."""
    if one[0].shape != other[0].shape:
        return False
    a, b = (np.concatenate([draw.ravel() for draw in leaf]) for leaf in (one, other))
    size = math.sqrt(float(a @ a) * float(b @ b))
    return size > 0 and abs(float(a @ b)) > 0.9999 * size
