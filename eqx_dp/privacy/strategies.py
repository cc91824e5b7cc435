"""Strategies: noise of a step that takes back part of the noise of the steps before."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, SupportsFloat, SupportsIndex, cast

import numpy as np
from jaxtyping import Float64
from scipy import optimize, signal

from ..expected import real_number, whole_number

_MOST_BANDS = 64


@dataclasses.dataclass(frozen=True, init=False)
class Banded:
    """Correlated noise: each step adds fresh noise and takes back part of that of steps before.

    Step t adds stddev (z_t + d_1 z_(t-1) + ... + d_(b-1) z_(t-b+1)), with z independent standard
    normals and d = `noising`. An optimizer adds up gradients, so what is taken back disappears from
    the model: with (1, -0.5) a model after T steps carries half as much noise, and the last.

    **Nothing is stored.** Noise is a function of (secret, step, leaf), so z of steps before is
    drawn again: no memory, and the time of `bands` draws a step.

    **The matrix mechanism** (Denisov et al. 2022; Choquette-Choo et al. 2023). Let C be the lower
    triangular Toeplitz matrix with C^-1 = `noising`. The noisy gradients are C^-1 (C G + Z): what
    is released is C G + Z, independent noise on C G. C has no negative entries here, and they fall
    with the distance from the diagonal (Fichtenberger et al. 2023; both are checked). So one
    example moves C G most if all its gradients are alike and it takes part as often, and as
    early, as its sampling allows: `sensitivity`.

    **A start has noise of its own**: a fresh secret, and step 0 again. Its matrix is a block on the
    diagonal, whose columns are the first entries of those of C. The plan counts each start in whole
    cycles of its sampling, so that all starts together cost at most one long run
    (`correlated_noise.md`).

    | strategy | noising |
    |---|---|
    | `Banded.lambda_cgd(x)` (arXiv 2601.22334) | 1, -x |
    | `Banded.bisr(bands)` (arXiv 2505.12128) | of (1 - x)^(1/2): 1, -1/2, -1/8, -1/16 ... |
    | `Banded.band_inv_mf(bands, steps, separation)` (the same paper) | searched: least error |
    | `Banded((1.0,))` | independent noise |

    Args:
        noising: First column of C^-1, from the diagonal down: 1 first, then at most 0; at most 64
            numbers, finite.

    Raises:
        ValueError: If `noising` is not such a sequence.
    """

    noising: tuple[float, ...]

    def __init__(self, noising: Sequence[SupportsFloat]):
        found = tuple(
            real_number(f"noising[{i}]", x, lambda real: real <= 1, "at most 0, after a first 1")
            for i, x in enumerate(noising)
        )
        if not 1 <= len(found) <= _MOST_BANDS or found[0] != 1 or max(found[1:], default=0) > 0:
            raise ValueError(
                f"noising must be 1 and then at most {_MOST_BANDS - 1} numbers that are at most 0, "
                f"such as (1.0, -0.5); found {found}."
            )
        object.__setattr__(self, "noising", found)

    @classmethod
    def lambda_cgd(cls, share: SupportsFloat) -> "Banded":
        """Takes back one share, in [0, 1), of the noise of the step before."""
        real = real_number("share", share, lambda real: 0 <= real < 1, "in [0, 1)")
        return cls((1.0, -real))

    @classmethod
    def bisr(cls, bands: SupportsIndex) -> "Banded":
        """The first entries of the inverse square root of the prefix sum."""
        count = whole_number("bands", bands, least=1, most=_MOST_BANDS)
        found = [1.0]
        for k in range(1, count):
            found.append(found[-1] * (2 * k - 3) / (2 * k))
        return cls(found)

    @classmethod
    def band_inv_mf(
        cls, bands: SupportsIndex, steps: SupportsIndex, separation: SupportsIndex
    ) -> "Banded":
        """The strategy of least error for so many steps, searched from `bisr` on (Nelder-Mead).

        Args:
            bands: numbers in `noising`.
            steps: of the run.
            separation: an example takes part at most once in so many steps (the cycle).
        """
        start = cls.bisr(bands)
        if len(start.noising) == 1:
            return start

        def error(rest: Float64[np.ndarray, "_"]) -> float:
            try:
                return cls((1.0, *rest)).rmse(steps, separation)
            except ValueError:  # not a strategy
                return math.inf

        found = cast(Any, optimize).minimize(error, start.noising[1:], method="Nelder-Mead")
        return (
            cls((1.0, *found.x)) if error(found.x) < error(np.array(start.noising[1:])) else start
        )

    @property
    def bands(self) -> int:
        """Draws a step."""
        return len(self.noising)

    @property
    def gross(self) -> float:
        """The sum of the sizes of `noising`."""
        return math.fsum(map(abs, self.noising))

    def column(self, steps: SupportsIndex) -> Float64[np.ndarray, " steps"]:
        """First column of C, for a run of so many steps.

        Raises:
            ValueError: If it has a negative entry, or one that is larger than the one before: of
                such strategies the sensitivity is not known here.
        """
        count = whole_number("steps", steps, least=1, most=2**24)
        found = _column(self.noising, count)
        if found.min() < 0 or np.diff(found, prepend=found[0]).max() > 1e-12:
            raise ValueError(
                f"noising {self.noising} gives a strategy whose entries are negative or rise, for "
                f"{count} steps: its sensitivity is not known. Take dp.Banded.bisr or lambda_cgd."
            )
        return found

    def error_growth(self, steps: SupportsIndex) -> float:
        """How many times as much finite precision costs as with independent noise.

        `correlated_noise.md` has the proof.
        """
        return self.gross * (1 + float(np.linalg.norm(self.column(steps))) / 16)

    def sensitivity(self, steps: SupportsIndex, separation: SupportsIndex) -> float:
        """How far one example moves C G, if its gradients are at most 1 in norm.

        The norm of the sum of the columns 0, b, 2 b, ... of C, where b is `separation`: no two
        participations are closer (Kalinin and Lampert 2024, arXiv 2405.13763, theorem 2).
        """
        column = self.column(steps)
        apart = whole_number("separation", separation, least=1, most=2**53)
        total = np.zeros_like(column)
        for first in range(0, len(column), apart):
            total[first:] += column[: len(column) - first]
        return float(np.linalg.norm(total))

    def rmse(self, steps: SupportsIndex, separation: SupportsIndex) -> float:
        """Root mean square error of the prefix sums of gradients, at noise multiplier 1.

        Of all steps, in units of the clip norm; noise multiplier: per unit of `sensitivity`.
        """
        count = whole_number("steps", steps, least=1, most=2**24)
        kept = np.cumsum(np.pad(self.noising, (0, max(0, count - self.bands)))[:count])
        return float(np.sqrt(np.cumsum(kept**2).mean()) * self.sensitivity(count, separation))


@functools.lru_cache(maxsize=64)
def _column(noising: tuple[float, ...], steps: int) -> Float64[np.ndarray, " steps"]:
    """1 / noising, as power series."""
    impulse = np.zeros(steps)
    impulse[0] = 1.0
    return np.asarray(cast(Any, signal).lfilter([1.0], noising, impulse))
