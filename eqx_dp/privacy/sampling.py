"""Samplers: the batches of a run, one step at a time, on one host of some."""

import bisect
import dataclasses
import functools
import json
import math
from typing import Any, SupportsFloat, SupportsIndex, cast

import jax
import numpy as np
from jaxtyping import Bool, Int64, UInt64

from ..expected import expect, real_number, whole_number
from ..paths import below
from ..rows import drawn_from
from ..trees import PyTree
from .keys import Secret, checked_secret, fresh_secret, numbers_of, refuse_to_pickle, warn_of_small
from .sampling_kinds import Draw, Kind, Poisson

OVERFLOW_PROBABILITY = 1e-12
"""The largest probability, a step, that more examples are drawn than a batch has room for."""


@dataclasses.dataclass(frozen=True, init=False)
class Sampler:
    """Draws a fresh batch a step, by some kind of sampling.

    Without `seed` the sampler draws 256 random bits from the operating system, and stores them
    nowhere else. A batch is a pure function of `(seed, num_examples, kind, step)`, by SHAKE256
    (FIPS 202). Without the seed nobody can tell the numbers behind a batch from random ones, as far
    as anybody knows. Any step is drawn without those before it.

    A batch holds its examples in random order. If one more example is drawn, it takes any place,
    and what was there becomes the last: all others keep their slots. So the sum of their gradients
    is rounded as before, but for two microbatches (`finite_precision.md`).

    Batches have one static shape, `capacity`, so that a compiled step is compiled once. It is the
    smallest multiple of `pad_to` that a step overflows with probability at most
    `overflow_probability`, and at least `pad_to`. (For kinds other than `Poisson` there is one slot
    more: `overflow.md`.) Slots left over are padding.

    **Several hosts** share a step's work: each owns a stretch of the data set (`owned`), and its
    batch is that part of the draw. Each host makes the whole draw, from the same seed and step, so
    that they need not communicate. Together they hold what one host
    would (but for cuts), and a run may be resumed on another number of hosts. Every part has the
    same `capacity`: the smallest multiple of `pad_to` that the largest stretch overflows with
    probability at most `overflow_probability / (2 * hosts)`. (The factor of 2 is for neighboring
    data sets, whose borders between hosts lie elsewhere: `overflow.md`.)

    **A step is asked for once.** Epsilon is that of steps whose batches are drawn anew. A loop that
    counts from 0 again in each epoch would train on the same few batches, and lose more privacy
    than the plan says. So a sampler refuses a step that it was asked for before, unless the batch
    is only looked at (`peek=True`).

    With `shared=True` every host can read every example. All hosts make the whole draw, and it is
    dealt out to them evenly. Batches then have fewer slots, because only the number of all examples
    varies, not that of each host's. 64 hosts that expect 4,096 examples together have 4,608 slots,
    1.13 times as many. Where each host owns its examples, it expects 64 of them and needs more than
    2 times as many slots: 1.15 times as many overflow in one of ten steps.

    **Several devices** of a host share its batch in equal, contiguous slices. With `devices`, the
    examples drawn are dealt out to them: device by device as many, up to one.

    **Guarantee.** Privacy amplification by the kind of sampling holds for the batches before they
    are cut to `capacity`; delta has to pay for the probability of a cut, as that of `PrivacyPlan`
    does. It holds only as long as **the seed is secret** and hard to guess: with the seed, anyone
    can tell which examples were in which batch. A fresh one is. One that is given must come from
    the system (`secrets.token_bytes(32)`) and be kept like the data. Kinds other than `Poisson` and
    `FixedSize` bind the steps of one run together: the guarantee is for the steps of one seed, from
    step 0.

    **Not private.** Batches, and the number of examples in them, are drawn without noise. Use them
    in the training step alone; do not publish or log them.

    | case | what happens |
    |---|---|
    | no example is drawn | a batch of padding |
    | more are drawn than there is room for | a uniformly random `capacity` of them is kept |
    | the same on one of several hosts | the same with its part, independently of other hosts |
    | the same with `shared=True` | `hosts * capacity` of the whole draw are kept, then dealt out |
    | every example is in every step | every batch holds every example (that the host owns) once |
    | `pad_to` exceeds `num_examples` | `capacity` is `pad_to` |
    | `capacity` would be 0 (an example is hardly ever drawn) | it is `pad_to` |
    | `hosts` does not divide `num_examples` | some hosts own one example more than the others |
    | `hosts` exceeds `num_examples` | some own nothing: their batches are all padding |
    | `devices` does not divide what is drawn | the first devices have one example more |

    Args:
        num_examples: How many examples the data set holds, from 1 to 2**53.
        kind: How examples are drawn: a value of `dp.sampling`.
        seed: None for fresh bits, the same on every host. Or a secret, see above: a number of at
            least 0, or bytes; of any length.
        pad_to: `capacity` is a multiple of this, such as microbatch size times devices (those of
            one host), and of `devices`.
        steps: How many steps are accounted for; `batch` refuses later ones. None for no limit.
        hosts: How many hosts draw, `jax.process_count()`. All must have the same arguments, but for
            `host`.
        host: Which of them this one is, from 0: `jax.process_index()`.
        overflow_probability: With which a step may overflow at most, above 0 and below 1.
        devices: How many devices of a host share its batch.
        shared: Whether every host can read every example.

    Raises:
        ValueError: If an argument has the wrong type or is out of its range, or the kind is for a
            data set of another size.
    """

    num_examples: int
    kind: Kind
    seed: int | bytes = dataclasses.field(repr=False)
    pad_to: int = 1
    steps: int | None = None
    hosts: int = 1
    host: int = 0
    overflow_probability: float = OVERFLOW_PROBABILITY
    devices: int = 1
    shared: bool = False
    _asked: set[int] = dataclasses.field(init=False, repr=False, compare=False)

    # By hand, for the sake of its types: any number is accepted, floats and ints are stored.
    def __init__(
        self,
        num_examples: SupportsIndex,
        kind: Kind,
        *,
        seed: Secret | None = None,
        pad_to: SupportsIndex = 1,
        steps: SupportsIndex | None = None,
        hosts: SupportsIndex = 1,
        host: SupportsIndex = 0,
        overflow_probability: SupportsFloat = OVERFLOW_PROBABILITY,
        devices: SupportsIndex = 1,
        shared: bool = False,
    ):
        hosts = whole_number("hosts", hosts, least=1, most=2**53)
        expect("shared", shared, bool, "True (every host can read every example) or False")
        expect("kind", kind, Kind, "a kind of sampling, such as dp.sampling.Poisson(0.01)")
        checked = {
            "num_examples": whole_number("num_examples", num_examples, least=1, most=2**53),
            "kind": kind,
            "seed": fresh_secret() if seed is None else checked_secret("seed", seed),
            "pad_to": whole_number("pad_to", pad_to, least=1, most=2**53),
            "steps": None if steps is None else whole_number("steps", steps, least=1, most=2**64),
            "hosts": hosts,
            "host": whole_number(
                "host", host, least=0, most=hosts - 1, advice=" Hosts are counted from 0."
            ),
            "overflow_probability": real_number(
                "overflow_probability",
                overflow_probability,
                lambda real: 0 < real < 1,
                "between 0 and 1, both excluded (delta pays for it, so it must be far below delta)",
            ),
            "devices": whole_number("devices", devices, least=1, most=2**53),
            "shared": shared,
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        kind.check(self.num_examples)
        warn_of_small("seed", self.seed)
        object.__setattr__(self, "_asked", set[int]())

    __reduce__ = refuse_to_pickle

    @functools.cached_property
    def capacity(self) -> int:
        """Slots in every batch, the same on every host.

        It follows from `num_examples` and the other arguments, and shows no more than they do.
        """
        parts = 1 if self.shared else self.hosts
        most_drawn = -(-self.num_examples // parts)
        tau = self.overflow_probability / (1 if parts == 1 else 2 * parts)
        of_part = self._least_slots(most_drawn, tau)
        least = -(-of_part // self.hosts) if self.shared else of_part
        multiple = math.lcm(self.pad_to, self.devices)
        return max(1, -(-least // multiple)) * multiple

    @property
    def owned(self) -> range:
        """The examples that this host may draw.

        Every example is owned by exactly one host, but where examples are shared: then by all.
        """
        if self.shared:
            return range(self.num_examples)
        first, end = (host * self.num_examples // self.hosts for host in (self.host, self.host + 1))
        return range(first, end)

    def batch(
        self, step: SupportsIndex, *, peek: bool = False
    ) -> tuple[Int64[np.ndarray, "capacity"], Bool[np.ndarray, "capacity"]]:
        """Draws the batch of one step: on several hosts, this host's part of it.

        Args:
            step: Which step, counted from 0 over all epochs; each once.
            peek: Whether the batch is only looked at: the step may have been asked for before, and
                may be asked for later. No example of such a batch may enter a release.

        Returns:
            `(indices, is_padding_example)`, both on the host and of length `capacity`. First come
            the positions of the examples drawn, distinct and in random order, then padding, with
            index -1. With `devices`, each slice has its part of the examples first, and then its
            padding. (`take` and the Trainer read a data set on disk forward, in the order of
            positions, and then put examples into their slots.) **Not private.** Indexing with
            -1 picks the last example: pass the mask on, as `is_padding_example`, or that example
            counts in every padding slot and its privacy is lost. Positions are those in the whole
            data set on several hosts, too, all of them in `owned`; a host that holds these examples
            alone subtracts `owned.start`.

        Raises:
            ValueError: If `step` is not a whole number from 0 to 2**64 - 1, not below `steps`, or
                was asked for before.
        """
        step = whole_number("step", step, least=0, most=2**64 - 1)
        if self.steps is not None and step >= self.steps:
            raise ValueError(
                f"step must be below {self.steps}, the number of steps that the plan accounts for "
                f"(they are counted from 0); found {step}. Make a plan of more steps."
            )
        if not peek:
            if step in self._asked:
                raise ValueError(
                    f"this sampler has drawn step {step} before, and a batch that is used twice "
                    "costs more than the plan says. Count steps over all epochs: for t in "
                    "range(plan.steps). To look at a batch without using it, give peek=True."
                )
            self._asked.add(step)
        indices = np.full((self.devices, self.capacity // self.devices), -1, dtype=np.int64)
        drawn = self._drawn(step)
        for device, of_device in enumerate(indices):
            mine = drawn[device :: self.devices]
            of_device[: len(mine)] = mine
        return indices.ravel(), indices.ravel() < 0

    def take(
        self, step: SupportsIndex, *sources: PyTree[Any], peek: bool = False
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
            peek: As for `batch`.

        Returns:
            `(examples, is_padding_example)`: a tuple with one entry a source, of its structure,
            kind and dtypes, with `capacity` slots in front; and the mask. In slots that are
            padding stands NaN, or 0 in integers. A gradient that is NaN adds exactly zero, so
            padding of such data adds nothing if the mask is forgotten. Integers alone count then:
            let `grad_fn.of_samples(plan.batches)` refuse such a call. **Not private.**

        Raises:
            ValueError: As for `batch`; if there is no source, or a source holds something other
                than arrays, or another number of examples than `num_examples`.
        """
        check_sources(sources, self.num_examples)
        indices, is_padding_example = self.batch(step, peek=peek)
        return drawn_from(sources, indices, is_padding_example), is_padding_example

    def _drawn(self, step: int) -> Int64[np.ndarray, "drawn"]:
        """What this host's batch of a step holds, in random order: a cut keeps the first."""
        drawn = self._draw(step)
        drawn = drawn[np.argsort(self._numbers((str(step), "order"), len(drawn)))]
        if self.shared:
            return drawn[: self.hosts * self.capacity][self.host :: self.hosts]
        # Parts of one random order are random orders, independent of each other.
        own = drawn[(drawn >= self.owned.start) & (drawn < self.owned.stop)]
        return own[: self.capacity]

    @functools.cached_property
    def _draw(self) -> Draw:
        return self.kind.draws(self.num_examples, self._numbers)

    def _numbers(self, purpose: tuple[str, ...], count: int) -> UInt64[np.ndarray, "count"]:
        """Random numbers for a purpose; they depend on the kind and on `num_examples`, too."""
        name, kind = "eqx_dp sample of a kind", json.dumps(self.kind.fields())
        if isinstance(self.kind, Poisson):
            name, kind = "eqx_dp sample", self.kind.sampling_prob.hex()
        return numbers_of(self.seed, (name, str(self.num_examples), kind, *purpose), count)

    def _least_slots(self, part: int, tau: float) -> int:
        """Slots for the examples that are drawn from a part of the data set."""

        def fits(slots: int) -> bool:
            return self.kind.overflow(slots, part, self.num_examples) <= tau

        most = min(part, getattr(self.kind, "batch_size", part))
        least = bisect.bisect_left(range(most + 1), True, key=fits)
        return min(least + self.kind.extra_slots, most)


@dataclasses.dataclass(frozen=True, init=False)
class PoissonSampler(Sampler):
    """Draws batches by Poisson sampling: a `Sampler` whose kind is `dp.sampling.Poisson`.

    Every example takes part in a step with one probability, independently. From one example drawn
    to the next it is a geometrically distributed number of places. Time and memory are those of a
    batch, whatever the size of the data set. (Logarithms are rounded: the probability with which an
    example is drawn is off by less than 1e-8 of itself.)

    A batch is a pure function of `(seed, num_examples, sampling_prob, step)`. Privacy amplification
    is that of Abadi et al. (2016, section 3) and Zhu and Wang (2019). What `Sampler` says of seeds,
    slots, hosts, devices, edge cases and privacy holds here.

    Args:
        num_examples: How many examples the data set holds, from 1 to 2**53.
        sampling_prob: Probability with which each example takes part in a step, in (0, 1].
        **options: As for `Sampler`: `seed`, `pad_to`, `steps`, `hosts`, `host`,
            `overflow_probability`, `devices`, `shared`.

    Raises:
        ValueError: If an argument has the wrong type or is out of its range.
    """

    kind: Kind = dataclasses.field(init=False, repr=False)
    sampling_prob: float

    def __init__(self, num_examples: SupportsIndex, sampling_prob: SupportsFloat, **options: Any):
        kind = Poisson(cast(float, sampling_prob))
        object.__setattr__(self, "sampling_prob", kind.sampling_prob)
        super().__init__(num_examples, kind, **options)


def check_sources(sources: tuple[PyTree[Any], ...], length: int) -> None:
    """Raises a ValueError unless each source is arrays that are so long."""
    if not sources:
        raise ValueError("take needs at least one source of examples behind the step.")
    for position, source in enumerate(sources):
        for path, leaf in jax.tree_util.tree_leaves_with_path(source) or [((), None)]:
            problem = ""
            if leaf is None:
                problem = "holds no arrays"
            elif not isinstance(leaf, (np.ndarray, jax.Array)):
                problem = f"is a {type(leaf).__name__}, not an array"
            elif leaf.shape[:1] != (length,):
                problem = f"has shape {leaf.shape}"
            if problem:
                raise ValueError(
                    f"{below(f'source {position}', path)} {problem}, and the data set has {length} "
                    "examples (with users, rows). Give numpy or JAX arrays (np.asarray) with all "
                    "of them along their leading axis."
                )
