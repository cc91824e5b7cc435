"""Strategies: noise of a step that takes back part of the noise of the steps before."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, SupportsFloat, SupportsIndex, cast

import numpy as np
from jaxtyping import Float64
from scipy import signal

from ..expected import entries, flag, real_number, whole_number
from ..extras import extra

_MOST_BANDS = 64


@dataclasses.dataclass(frozen=True, init=False)
class Banded:
    """Correlated noise: each step adds fresh noise and takes back part of that of steps before.

    The noise of step t is stddev n_t, with z independent standard normals and

        n_t = z_t + d_1 z_(t-1) + d_2 z_(t-2) + ... - c_1 n_(t-1) - c_2 n_(t-2) - ...

    where d = `noising` and c = `strategy`, both 1 at first. An optimizer adds up gradients, so what
    is taken back disappears from the model: with d = (1, -0.5) a model after T steps carries half
    as much noise, and that of the last step.

    **What is stored.** Noise is a function of (secret, step, leaf), so the z of steps before are
    drawn again: `noising` needs no memory, and the time of as many draws a step as it has numbers.
    With `keep` they are kept instead, bit for bit: one draw a step, and 8 bytes an entry for each
    further number of `noising`. With a `strategy` the same is always kept, for each further number
    of the longer of the two: what it takes back follows from all draws before. What is kept is as
    secret as the key, and is not saved either. Noise is the same in each case, up to rounding.

    **The matrix mechanism** (Denisov et al. 2022; Choquette-Choo et al. 2023). Let C be the lower
    triangular Toeplitz matrix of the power series `strategy` / `noising`. The noisy gradients are
    C^-1 (C G + Z): what is released is C G + Z, independent noise on C G. C has no negative entries
    here, and they fall with the distance from the diagonal (both are checked). So one example moves
    C G most if all its gradients are alike and it takes part as often, and as early, as its
    sampling allows: `sensitivity`.

    **A start has noise of its own**: a fresh secret, and step 0 again. Its matrix is a block on the
    diagonal, whose columns are the first entries of those of C. The plan counts each start in whole
    cycles of its sampling, so that all starts together cost at most one long run
    (`correlated_noise.md`).

    | strategy | numbers |
    |---|---|
    | `Banded.lambda_cgd(x)` (arXiv 2601.22334) | noising 1, -x |
    | `Banded.bisr(bands)` (arXiv 2505.12128) | noising (1 - x)^(1/2): 1, -1/2, -1/8, -1/16 ... |
    | `Banded.band_mf(bands, steps)` (arXiv 2405.15913) | strategy, searched by jax_privacy |
    | `Banded((1.0,))` | independent noise |

    Args:
        noising: Weights of draws: 1 first, then at most 0; at most 64 numbers, finite.
        strategy: Weights of earlier noise: 1 first, then at least 0; at most 64 numbers, finite.
        keep: Whether earlier draws are kept in memory.

    Raises:
        ValueError: If one of them is not such a sequence, or `keep` is no bool.
    """

    noising: tuple[float, ...]
    strategy: tuple[float, ...] = (1.0,)
    keep: bool = dataclasses.field(default=False, compare=False)  # it changes no number

    def __init__(
        self,
        noising: Sequence[SupportsFloat] = (1.0,),
        strategy: Sequence[SupportsFloat] = (1.0,),
        keep: bool = False,
    ):
        object.__setattr__(self, "noising", _weights("noising", noising, -1))
        object.__setattr__(self, "strategy", _weights("strategy", strategy, 1))
        object.__setattr__(self, "keep", flag("keep", keep))

    @classmethod
    def lambda_cgd(cls, share: SupportsFloat, keep: bool = False) -> "Banded":
        """Takes back one share, in [0, 1), of the noise of the step before."""
        real = real_number("share", share, lambda real: 0 <= real < 1, "in [0, 1)")
        return cls((1.0, -real), keep=keep)

    @classmethod
    def bisr(cls, bands: SupportsIndex, keep: bool = False) -> "Banded":
        """The first entries of the inverse square root of the prefix sum."""
        count = whole_number("bands", bands, least=1, most=_MOST_BANDS)
        found = [1.0]
        for k in range(1, count):
            found.append(found[-1] * (2 * k - 3) / (2 * k))
        return cls(found, keep=keep)

    @classmethod
    def band_mf(cls, bands: SupportsIndex, steps: SupportsIndex) -> "Banded":
        """The banded C of least error for so many steps, if an example takes part once.

        With `dp.sampling.CyclicPoisson` of a cycle of at least `bands` an example's participations
        do not meet in C, and sampling amplifies privacy.

        Raises:
            MissingExtra: If jax_privacy is not installed.
        """
        count = whole_number("steps", steps, least=1, most=2**24)
        most = min(count, _MOST_BANDS)
        known = whole_number("bands", bands, least=1, most=most)
        toeplitz = extra("jax_privacy.matrix_factorization.toeplitz", name="mechanisms")
        found = np.asarray(toeplitz.optimize_banded_toeplitz(count, known), np.float64)
        return cls(strategy=np.minimum.accumulate(found / found[0]).tolist())

    @property
    def is_correlated(self) -> bool:
        """Whether it is anything else than independent noise."""
        return len(self.noising) > 1 or len(self.strategy) > 1

    @property
    def kept(self) -> int:
        """Of how many steps before something is kept."""
        further = max(len(self.noising), len(self.strategy)) - 1
        return further if self.keep or len(self.strategy) > 1 else 0

    def weights(self, steps: SupportsIndex) -> Float64[np.ndarray, " steps"]:
        """First column of C^-1: what each draw adds to the noise of its step and of later ones."""
        count = whole_number("steps", steps, least=1, most=2**24)
        return _column(self.strategy, self.noising, count)

    def column(self, steps: SupportsIndex) -> Float64[np.ndarray, " steps"]:
        """First column of C, for a run of so many steps.

        Raises:
            ValueError: If it has a negative entry, or one that is larger than the one before: of
                such strategies the sensitivity is not known here.
        """
        count = whole_number("steps", steps, least=1, most=2**24)
        found = _column(self.noising, self.strategy, count)
        if found.min() < 0 or np.diff(found, prepend=found[0]).max() > 1e-12:
            raise ValueError(
                f"{self} gives a matrix whose entries are negative or rise, for {count} steps: its "
                "sensitivity is not known. Take dp.Banded.bisr or lambda_cgd."
            )
        return found

    def error_growth(self, steps: SupportsIndex) -> float:
        """How many times as much finite precision costs as with independent noise.

        `correlated_noise.md` has the proof.
        """
        gross = float(np.abs(self.weights(steps)).sum()) * math.fsum(self.strategy)
        gross *= 1 + (len(self.noising) + len(self.strategy) - 2) / 8
        return gross * (1 + float(np.linalg.norm(self.column(steps))) / 16)

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

    def error(self, steps: SupportsIndex) -> float:
        """Root mean square of the noise in sums of the first 1, 2, ... steps; z of variance 1."""
        kept = np.cumsum(self.weights(steps))
        return float(np.sqrt(np.cumsum(kept**2).mean()))


@functools.lru_cache(maxsize=64)
def _column(
    under: tuple[float, ...], over: tuple[float, ...], steps: int
) -> Float64[np.ndarray, " steps"]:
    """The first coefficients of a quotient of power series."""
    impulse = np.zeros(steps)
    impulse[0] = 1.0
    return np.asarray(cast(Any, signal).lfilter(over, under, impulse))


def _weights(name: str, given: Sequence[SupportsFloat], sign: int) -> tuple[float, ...]:
    allowed = "at most 0" if sign < 0 else "at least 0"
    found = tuple(
        real_number(f"{name}[{i}]", x, math.isfinite, allowed)
        for i, x in enumerate(entries(name, given, "numbers"))
    )
    begins_with_1 = 1 <= len(found) <= _MOST_BANDS and found[0] == 1
    if not begins_with_1 or min(sign * np.array(found[1:]), default=0) < 0:
        raise ValueError(
            f"{name} must be 1 and then at most {_MOST_BANDS - 1} numbers that are {allowed}, such "
            f"as (1.0, {sign * 0.5}); found {found}."
        )
    return found
