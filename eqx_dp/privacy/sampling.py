"""Poisson sampling: which examples take part in a step."""

import bisect
import dataclasses
import functools
from typing import Any, SupportsFloat, SupportsIndex, cast

import numpy as np
from jaxtyping import Bool, Int64
from scipy import stats

from .arguments import sampling_probability, whole_number

OVERFLOW_PROBABILITY = 1e-12
"""The largest probability, a step, that more examples are drawn than a batch has room for."""


@dataclasses.dataclass(frozen=True, init=False)
class PoissonSampler:
    """Draws a fresh batch a step: every example takes part with the same probability, on its own.

    A batch is a pure function of `(seed, step)`. No step needs another: step 1,000 is drawn without
    the 999 before it, and a run that is killed and resumed sees the same batches again. (The same
    means under the same release of numpy, which may change its streams between releases.)

    The draw is exact Poisson sampling in two parts: how many examples, binomially distributed, and
    then that many distinct examples, uniformly. Time and memory are those of a batch, whatever the
    size of the data set.

    Batches have one static shape, `capacity`, so that a compiled step is compiled once. It is the
    smallest multiple of `pad_to` that a step overflows with probability at most
    `OVERFLOW_PROBABILITY` (1e-12), and at least `pad_to`. Places left over are padding.

    **Guarantee.** Privacy amplification by Poisson sampling (Abadi et al. 2016, section 3; Zhu and
    Wang 2019) holds for the batches before they are cut to `capacity`; the probability of a cut
    has to be added to delta, as `PrivacyPlan` does. It holds only as long as **the seed is secret**
    and hard to guess: who knows it, knows which examples were in which batch. Take it from the
    system (`secrets.randbits(128)`) and keep it like the data. Philox is a good generator of
    numbers, not a cryptographic one.

    **Not private.** Batches, and how many examples they hold, are drawn without noise. They are
    for the training step alone, not to be published or logged.

    | case | what happens |
    |---|---|
    | no example is drawn | a batch of padding |
    | more are drawn than there is room for | a uniformly random `capacity` of them is kept |
    | `sampling_prob` is 1 | every batch holds every example once |
    | `pad_to` exceeds `num_examples` | `capacity` is `pad_to` |
    | `capacity` would be 0 (hardly ever an example) | it is `pad_to` |

    Args:
        num_examples: How many examples the data set holds, from 1 to 2**53 (up to where counts are
            exact as floats).
        sampling_prob: Probability with which each example takes part in a step, in (0, 1].
        seed: From 0 to 2**128 - 1; secret, see above.
        pad_to: `capacity` is a multiple of this, such as microbatch size times devices.
        steps: How many steps are accounted for; `batch` refuses later ones. None for no limit.

    Raises:
        ValueError: If an argument is not a number of its kind, or out of its range.
    """

    num_examples: int
    sampling_prob: float
    seed: int = dataclasses.field(repr=False)
    pad_to: int = 1
    steps: int | None = None

    # By hand, for the sake of its types: any number is accepted, floats and ints are stored.
    def __init__(
        self,
        num_examples: SupportsIndex,
        sampling_prob: SupportsFloat,
        seed: SupportsIndex,
        pad_to: SupportsIndex = 1,
        steps: SupportsIndex | None = None,
    ):
        checked = {
            "num_examples": whole_number("num_examples", num_examples, least=1, most=2**53),
            "sampling_prob": sampling_probability(sampling_prob),
            "seed": whole_number("seed", seed, least=0, most=2**128 - 1),
            "pad_to": whole_number("pad_to", pad_to, least=1, most=2**53),
            "steps": None if steps is None else whole_number("steps", steps, least=1, most=2**64),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @functools.cached_property
    def capacity(self) -> int:
        """Places in every batch; follows from `num_examples`, and is as public as that is."""
        least = _least_capacity(self.num_examples, self.sampling_prob)
        return max(1, -(-least // self.pad_to)) * self.pad_to

    def batch(
        self, step: SupportsIndex
    ) -> tuple[Int64[np.ndarray, "capacity"], Bool[np.ndarray, "capacity"]]:
        """Draws the batch of one step.

        Args:
            step: Which step, counted from 0.

        Returns:
            `(indices, is_padding_example)`, both on the host and of length `capacity`. First the
            positions of the examples drawn, distinct and in increasing order (a data set on disk is
            then read forward); behind them padding, with index -1. **Not private.** Indexing with
            -1 picks the last example: hand the mask on, as `is_padding_example`, or that example
            counts once a padding place and its privacy is lost.

        Raises:
            ValueError: If `step` is not a whole number from 0 to 2**64 - 1, or not below `steps`.
        """
        step = whole_number("step", step, least=0, most=2**64 - 1)
        if self.steps is not None and step >= self.steps:
            raise ValueError(
                f"step must be below {self.steps}, the number of steps that the plan accounts for "
                f"(they are counted from 0); found {step}. Make a plan of more steps."
            )
        generator = _generator(self.seed, step)
        drawn = int(generator.binomial(self.num_examples, self.sampling_prob))
        # A uniform subset of a uniform subset is a uniform subset: to cut is to draw fewer.
        kept = min(drawn, self.capacity)
        # Floyd's algorithm up to a twentieth of the examples, a partial shuffle of them all beyond:
        # either way no more than a constant a place.
        chosen = generator.choice(self.num_examples, size=kept, replace=False, shuffle=False)
        indices = np.full(self.capacity, -1, dtype=np.int64)
        indices[:kept] = np.sort(chosen)
        return indices, indices < 0


def _generator(seed: int, step: int) -> np.random.Generator:
    # A seed sequence fills four words with the entropy before it appends the spawn key, so that no
    # two pairs of a seed below 2**128 and a step are hashed from the same words. (As a list, [seed,
    # step], they could be: a seed's high words look like a step there.)
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(step,))))


def _least_capacity(num_examples: int, sampling_prob: float) -> int:
    binomial = cast(Any, stats.binom)  # scipy is not typed

    def fits(capacity: int) -> bool:
        exceeded = float(binomial.sf(capacity, num_examples, sampling_prob))
        return exceeded <= OVERFLOW_PROBABILITY

    return bisect.bisect_left(range(num_examples + 1), True, key=fits)
