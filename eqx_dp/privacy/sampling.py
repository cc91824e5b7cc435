"""Poisson sampling: which examples take part in a step."""

import bisect
import dataclasses
import functools
from typing import Any, SupportsFloat, SupportsIndex, cast

import numpy as np
from jaxtyping import Bool, Int64, PyTree
from scipy import stats

from .arguments import real_number, sampling_probability, whole_number
from .keys import Secret, checked_secret, digest, public_bytes
from .sources import checked_source, drawn_from

OVERFLOW_PROBABILITY = 1e-12
"""The probability, a step, that more examples are drawn than there is room for: the most of it."""


@dataclasses.dataclass(frozen=True, init=False)
class PoissonSampler:
    """Draws one batch for each step. Each example takes part with one probability, independently.

    A batch is a pure function of `(seed, run, num_examples, sampling_prob, step)`, by BLAKE2b. No
    step needs another: step 1,000 is drawn without the 999 steps before it, and a run that is
    killed and resumed sees the same batches again, with the same release of numpy (numpy may change
    its streams between releases). If any of the five differs, batches are independent, as far as
    Philox's streams for different keys are.

    The draw is exact Poisson sampling in two parts: a binomially distributed number of examples,
    and then that many distinct examples, uniformly. Time and memory depend on the size of a batch
    and not on the size of the data set.

    All batches have one static shape, `capacity`, so that a step is compiled once. It is the
    smallest multiple of `pad_to` for which a step overflows with probability at most
    `overflow_probability`, and at least `pad_to`. Slots that are left over are padding.

    **Several hosts** share a step's work: each host owns a contiguous part of the data set
    (`owned`), and its batch is that part of the draw. All hosts make the same draw, from the same
    seed and step, without communication. Together they hold the Poisson sample that one host would
    draw (apart from cuts), so a run may be resumed on another number of hosts. Every host has the
    same `capacity`: the smallest multiple of `pad_to` for which the largest part overflows with
    probability at most `overflow_probability / (2 * hosts)`. (The factor of 2 is for neighboring
    data sets, whose borders between hosts differ: `PrivacyPlan.overflow_delta`.) Every host makes
    the whole draw, which takes the time and memory of all hosts' batches together.

    **Guarantee.** Privacy amplification by Poisson sampling (Abadi et al. 2016, section 3; Zhu and
    Wang 2019) holds for the batches before they are cut to `capacity`; the probability of a cut
    has to be added to delta, as `PrivacyPlan` does. It holds only if **the seed is secret** and
    hard to guess: anyone who knows the seed knows which examples were in which batch. Take the seed
    from the system (`secrets.randbits(128)` or `secrets.token_bytes(32)`) and protect it like the
    data. The same secret may also make the run's noise. Philox is not a cryptographic generator.

    **Not private.** Batches, and the number of examples in them, are drawn without noise. Use them
    in the training step alone; do not publish or log them.

    | case | what happens |
    |---|---|
    | no example is drawn | a batch of padding |
    | more are drawn than `capacity` | a uniformly random `capacity` of them is kept |
    | the same on one of several hosts | its own part is cut, independently of the other hosts |
    | more than `hosts * capacity` are drawn | as many, uniformly random, are kept and divided |
    | `sampling_prob` is 1 | every batch holds every example (that the host owns) once |
    | `pad_to` exceeds `num_examples` | `capacity` is `pad_to` |
    | `capacity` would be 0 (an example is hardly ever drawn) | it is `pad_to` |
    | `hosts` does not divide `num_examples` | some hosts own one example more than the others |
    | `hosts` exceeds `num_examples` | some own nothing: their batches are all padding |

    Args:
        num_examples: How many examples the data set holds, from 1 to 2**53 (up to where counts are
            exact as floats).
        sampling_prob: Probability with which each example takes part in a step, in (0, 1].
        seed: Secret, see above: a number of at least 0, or bytes; of any length.
        pad_to: `capacity` is a multiple of this, such as microbatch size times devices (those of
            one host).
        steps: How many steps are accounted for; `batch` refuses later ones. None for no limit.
        hosts: How many hosts draw, `jax.process_count()`. All hosts must have the same arguments,
            except for `host`.
        host: The index of this host, from 0: `jax.process_index()`.
        overflow_probability: The largest probability with which a step may overflow, above 0 and
            below 1.
        run: A text that is different for each run with this seed; public.

    Raises:
        ValueError: If an argument has the wrong type or is out of its range.
    """

    num_examples: int
    sampling_prob: float
    seed: int | bytes = dataclasses.field(repr=False)
    pad_to: int = 1
    steps: int | None = None
    hosts: int = 1
    host: int = 0
    overflow_probability: float = OVERFLOW_PROBABILITY
    run: bytes = dataclasses.field(default=b"", repr=False)

    # By hand, for the sake of its types: any number is accepted, floats and ints are stored.
    def __init__(
        self,
        num_examples: SupportsIndex,
        sampling_prob: SupportsFloat,
        seed: Secret,
        pad_to: SupportsIndex = 1,
        steps: SupportsIndex | None = None,
        hosts: SupportsIndex = 1,
        host: SupportsIndex = 0,
        overflow_probability: SupportsFloat = OVERFLOW_PROBABILITY,
        run: str | bytes = b"",
    ):
        hosts = whole_number("hosts", hosts, least=1, most=2**53)
        checked = {
            "num_examples": whole_number("num_examples", num_examples, least=1, most=2**53),
            "sampling_prob": sampling_probability(sampling_prob),
            "seed": checked_secret("seed", seed),
            "pad_to": whole_number("pad_to", pad_to, least=1, most=2**53),
            "steps": None if steps is None else whole_number("steps", steps, least=1, most=2**64),
            "hosts": hosts,
            "host": _checked_host(host, hosts),
            "overflow_probability": _checked_overflow(overflow_probability),
            "run": public_bytes("run", run),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @functools.cached_property
    def capacity(self) -> int:
        """The number of slots in every batch, the same on every host.

        It follows from `num_examples` and the other arguments, and shows no more than they do.
        """
        most_owned = -(-self.num_examples // self.hosts)
        tau = self.overflow_probability / (1 if self.hosts == 1 else 2 * self.hosts)
        least = _least_capacity(most_owned, self.sampling_prob, tau)
        return max(1, -(-least // self.pad_to)) * self.pad_to

    @property
    def owned(self) -> range:
        """The examples that this host draws for; every example is owned by exactly one host."""
        first, end = (host * self.num_examples // self.hosts for host in (self.host, self.host + 1))
        return range(first, end)

    def batch(
        self, step: SupportsIndex
    ) -> tuple[Int64[np.ndarray, "capacity"], Bool[np.ndarray, "capacity"]]:
        """Draws the batch of one step: on several hosts, this host's part of it.

        Args:
            step: Which step, counted from 0.

        Returns:
            `(indices, is_padding_example)`, two numpy arrays of length `capacity`. First come the
            positions of the examples drawn, distinct and in increasing order (so that a data set on
            disk is read forward); then padding, with index -1. **Not private.** Index -1 picks the
            last example: hand the mask on as `is_padding_example`, or that example counts in every
            padding slot and its privacy is lost. On several hosts, positions are those in the whole
            data set, all of them in `owned`; a host that holds only those examples subtracts
            `owned.start`.

        Raises:
            ValueError: If `step` is not a whole number from 0 to 2**64 - 1, or not below `steps`.
        """
        step = whole_number("step", step, least=0, most=2**64 - 1)
        if self.steps is not None and step >= self.steps:
            raise ValueError(
                f"step must be below {self.steps}, the number of steps that the plan accounts for "
                f"(they are counted from 0); found {step}. Make a plan of more steps."
            )
        mine = self._part(self._generator(step))
        indices = np.full(self.capacity, -1, dtype=np.int64)
        indices[: len(mine)] = np.sort(mine)
        return indices, indices < 0

    def take(
        self, step: SupportsIndex, *sources: PyTree[Any]
    ) -> tuple[tuple[PyTree[Any], ...], Bool[np.ndarray, "capacity"]]:
        """The examples of one step's batch, with the mask that says which slots are padding.

        ```python
        (x, y), is_padding_example = sampler.take(t, xs, ys)
        ```

        Args:
            step: As for `batch`.
            *sources: Numpy or JAX arrays, or trees of them, that hold the examples of the whole
                data set along their leading axis. Only the examples drawn are read from a
                memory-mapped file.

        Returns:
            `(examples, is_padding_example)`: a tuple with one entry a source, of the source's
            structure, kind of arrays and dtypes, with a leading axis of `capacity` slots; and the
            mask. Padding slots hold zeros. **Not private.**

        Raises:
            ValueError: As for `batch`; if there is no source, or a source holds something other
                than arrays, or another number of examples than `num_examples`.
        """
        if not sources:
            raise ValueError("take needs at least one source of examples behind the step.")
        for position, source in enumerate(sources):
            checked_source(source, f"source {position}", self.num_examples)
        indices, is_padding_example = self.batch(step)
        examples = tuple(drawn_from(source, indices, is_padding_example) for source in sources)
        return examples, is_padding_example

    def _generator(self, step: int) -> np.random.Generator:
        what_for = (
            "eqx_dp sample",
            self.run,
            str(self.num_examples),
            self.sampling_prob.hex(),
            str(step),
        )
        key = int.from_bytes(digest(self.seed, what_for, size=16), "little")
        return np.random.Generator(np.random.Philox(key=key))

    def _part(self, generator: np.random.Generator) -> Int64[np.ndarray, "drawn"]:
        drawn = int(generator.binomial(self.num_examples, self.sampling_prob))
        # A uniform subset of a uniform subset is a uniform subset: to cut is to draw fewer.
        kept = min(drawn, self.hosts * self.capacity)
        # Floyd's algorithm up to a twentieth of the examples, a partial shuffle of them all beyond:
        # either way no more than a constant a place.
        chosen = generator.choice(self.num_examples, size=kept, replace=False, shuffle=False)
        mine = self._of_owned(chosen)
        if len(mine) <= self.capacity:
            return mine
        # As chosen they are in no random order. All that are, not mine alone, are put into one:
        # hosts have the same generator, and would else cut the same places of their parts.
        return self._of_owned(generator.permutation(chosen))[: self.capacity]

    def _of_owned(self, indices: Int64[np.ndarray, "all"]) -> Int64[np.ndarray, "part"]:
        return indices[(indices >= self.owned.start) & (indices < self.owned.stop)]


def _checked_host(value: object, hosts: int) -> int:
    host = whole_number("host", value, least=0, most=2**53)
    if host >= hosts:
        raise ValueError(
            f"host must be below {hosts}, the number of hosts (they are counted from 0, as by "
            f"jax.process_index()); found {host}. Check hosts, which is jax.process_count()."
        )
    return host


def _checked_overflow(value: object) -> float:
    probability = real_number("overflow_probability", value)
    if not 0 < probability < 1:
        raise ValueError(
            "overflow_probability must be between 0 and 1, both excluded (it comes out of delta, "
            f"and so has to be far below it); found {probability}."
        )
    return probability


def _least_capacity(num_examples: int, sampling_prob: float, tau: float) -> int:
    binomial = cast(Any, stats.binom)  # scipy is not typed

    def fits(capacity: int) -> bool:
        return float(binomial.sf(capacity, num_examples, sampling_prob)) <= tau

    return bisect.bisect_left(range(num_examples + 1), True, key=fits)
