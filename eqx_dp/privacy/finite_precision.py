"""What finite precision costs: what a plan charges for it."""

import math
from typing import Any

import jax
import numpy as np
import optax

from .grid import GRID_BITS

PRECISION_EPSILON = 5e-5
"""What a plan adds to epsilon, because its noise is not exactly a Gaussian."""

PRECISION_SHARE = 1e-3
"""The share of delta that a plan charges for the same reason."""

MOST_EPSILON = 70.0
"""That share of delta suffices for an epsilon of at most this."""


def mean_square_error() -> float:
    """V of `finite_precision.md`: how far cells are off in relative terms, squared, on average.

    The cell of a pair at radius r is off by at most 4.4 c 2^-51 (2 r + 2). Here c =
    2^(GRID_BITS + 1) is the largest number of cells in a standard deviation. Half of the pair's
    mean square counts for each of its entries.
    """
    unit = 4.4 * 2.0 ** (GRID_BITS + 1) * 2.0**-51
    return unit**2 * (2**2 * 2 + 2 * 2 * 2 * math.sqrt(math.pi / 2) + 2**2) / 2


def entries_covered(delta: float) -> float:
    """How many noisy entries, those of all steps together, a plan with this delta has paid for.

    Args:
        delta: of the plan, in (0, 1).

    Returns:
        `PRECISION_EPSILON`^2 / (8 L V) with L = `MOST_EPSILON` + log(10^5 / delta): 2e13 for a
        delta of 1e-5.
    """
    return PRECISION_EPSILON**2 / (8 * (MOST_EPSILON + math.log(1e5 / delta)) * mean_square_error())


def within_charge(
    privatizer: optax.GradientTransformation, steps: int, delta: float, growth: float = 1.0
) -> optax.GradientTransformation:
    """The same noise for at most as many entries as a plan has paid for; a ValueError for more.

    `growth` is that of the errors, by `Banded.error_growth`.
    """
    most = entries_covered(delta) / steps / growth**2

    def checked(function: Any) -> Any:
        def call(tree: Any, *rest: Any, **options: Any) -> Any:
            entries = sum(math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(tree))
            if entries > most:
                raise ValueError(
                    f"the plan has paid for the finite precision of {most:.3g} noisy entries in "
                    f"each of {steps} steps (delta {delta:g}); found {entries}. Train fewer "
                    "parameters, or take fewer steps."
                )
            return function(tree, *rest, **options)

        return call

    return optax.GradientTransformation(checked(privatizer.init), checked(privatizer.update))
