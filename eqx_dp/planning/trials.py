"""Candidates compiled, run and timed side by side."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..gradients import ClippedGrad, Prepared, described
from ..timing import Spread, interleaved
from .candidates import Candidate
from .made_up import made_up
from .memory import read_compiled, told
from .tuning import Trial, Tuning

# What takes so many times as long as the fastest in the first round is not timed again.
_HOPELESS = 2.0


class Call(NamedTuple):
    """The arguments of a call."""

    model: PyTree[Any]
    batch: tuple[PyTree[Any], ...]
    key: Any
    mask: Any

    def to_time(self, grad_fn: ClippedGrad[Any], batch_is_public: bool) -> "Call":
        """The arguments that are timed, where `grad_fn` wants them."""
        model = jax.tree.map(
            lambda x: made_up(x) if isinstance(x, jax.ShapeDtypeStruct) else x, self.model
        )
        rest = self.batch, self.key, self.mask
        if not batch_is_public:
            rest = made_up(rest)
        elif any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(rest)):
            raise ValueError(
                "batch_is_public is True, and the batch holds shapes in the place of arrays. Give "
                "public arrays, or leave it False: then values are made up."
            )
        batch, key, mask = rest
        if grad_fn.sharding is not None:
            model, batch = grad_fn.sharding.shard(model), grad_fn.sharding.shard_batch(batch)
        return Call(model, batch, key, mask)


class Runs(NamedTuple):
    """What is timed of a candidate: a call that computes all microbatches, and one of the first.

    `first` is None where each call computes all. `share` of what lies between is expected.
    """

    all: Callable[[], Any]
    first: Callable[[], Any] | None = None
    share: float = 1.0


class Work(NamedTuple):
    """What all candidates have in common."""

    grad_fn: ClippedGrad[Any]
    call: Prepared
    given: Call
    limit: int | None
    has_mask: bool

    def prepared(self, candidate: Candidate) -> tuple[Trial, Runs | None]:
        """Compiles a candidate and runs it once; without runs if it is not to be timed."""
        trial = Trial(*candidate)
        if problem := self._too_much(self._estimated(candidate), "by estimate"):
            return trial._replace(problem=problem), None
        began = time.perf_counter()
        try:
            program = self._compiled(candidate)
            found = read_compiled(program)
            seconds = time.perf_counter() - began
            trial = trial._replace(compile_seconds=seconds)
            if found is not None:
                trial = trial._replace(bytes=(found.total, found.temporary))
                if problem := self._too_much(found.total, "compiled"):
                    return trial._replace(problem=problem), None
            runs = self._runs(program, candidate)
            jax.block_until_ready(runs.all())
        except Exception as error:  # whatever a method, a compiler or a loss may raise
            first = str(error).strip().partition("\n")[0]
            return trial._replace(problem=f"{type(error).__name__}: {first}"[:200]), None
        return trial, runs

    def _estimated(self, candidate: Candidate) -> int:
        """Bytes that are held for a microbatch; of its own choice the function knows best."""
        if candidate == (self.call.choice.method, self.call.at_once):
            return 0
        fixed = self.grad_fn.with_choice(*candidate)
        given = self.given
        call = described(fixed, given.model, given.batch, given.key, given.mask)
        return call.choice.held * call.at_once

    def _too_much(self, size: int, how: str) -> str:
        if self.limit is None or size <= self.limit:
            return ""
        return f"takes {told(size)} {how}, more than {told(self.limit)}"

    def _compiled(self, candidate: Candidate) -> Any:
        fixed = self.grad_fn.with_choice(*candidate)
        arrays, static = eqx.partition(self.given.model, eqx.is_array)

        def run(arrays: Any, batch: Any, key: Any, mask: Any) -> Any:
            model = eqx.combine(arrays, static)
            return fixed(model, *batch, key=key, is_padding_example=mask)

        given = (
            arrays,
            self.given.batch,
            self.given.key,
            self._mask(self.call.examples.num_examples),
        )
        return jax.jit(run).lower(*given).compile()

    def _mask(self, real: int) -> Any:
        """So many real examples in front; None for a function that is given no mask."""
        if not self.has_mask:
            return None
        mask = jnp.arange(self.call.examples.num_examples) >= real
        rules = self.grad_fn.sharding
        return mask if rules is None else rules.shard_batch(mask)

    def _runs(self, program: Any, candidate: Candidate) -> Runs:
        arrays = eqx.filter(self.given.model, eqx.is_array)
        _, batch, key, _ = self.given
        full, one = self._mask(self.call.examples.num_examples), self._mask(1)

        def all_() -> Any:
            return program(arrays, batch, key, full)

        count = -(-self.call.of_device // candidate[1])
        expected = self.call.choice.batch.microbatches(candidate[1])
        if not self.has_mask or count == 1:
            return Runs(all_)
        share = min(1.0, max(0.0, (expected - 1) / (count - 1)))
        return Runs(all_, lambda: program(arrays, batch, key, one), share)


def measured(
    work: Work, tried: list[Candidate], rounds: int, tell: Callable[[str], None]
) -> Tuning:
    """Compiles the candidates and times them; of what it was measured for it says nothing."""
    trials: dict[Candidate, Trial] = {}
    runs: dict[Candidate, Runs] = {}
    for number, candidate in enumerate(tried, 1):
        tell(f"compiling {candidate[0]}, {candidate[1]} at once ({number} of {len(tried)})")
        trials[candidate], found = work.prepared(candidate)
        if found is not None:
            runs[candidate] = found
    if not runs:
        lines = [
            f"\n  {x.method}, {x.microbatch_size} at once: {x.problem}" for x in trials.values()
        ]
        raise ValueError(
            f"None of the methods and microbatches can be timed:{''.join(lines)}\nIf the loss "
            "refuses values that are made up, give a public batch and batch_is_public=True."
        )
    tell(f"timing {len(runs)} of them")
    for candidate, seconds in timed(runs, tried[0], rounds).items():
        low, median, high = map(float, np.quantile(seconds, (0.25, 0.5, 0.75)))
        trials[candidate] = trials[candidate]._replace(seconds=Spread(low, median, high))
    best = fastest(list(trials.values()))
    return Tuning(best.method, best.microbatch_size, tried[0], tuple(trials.values()), ())


def timed(
    runs: Mapping[Candidate, Runs],
    own: Candidate,
    rounds: int,
    turn: Callable[[Callable[[], Any]], float] | None = None,
) -> dict[Candidate, list[float]]:
    """Expected seconds of each candidate in each round.

    Its own candidate is timed in all rounds, however slow it is. `turn` is as for `interleaved`.
    """
    found = _rounds(runs, 1, turn)
    most = _HOPELESS * min(seconds[0] for seconds in found.values())
    left = {name: runs[name] for name in runs if name == own or found[name][0] <= most}
    for name, more in _rounds(left, rounds - 1, turn).items():
        found[name] += more
    return found


def _rounds(
    runs: Mapping[Candidate, Runs],
    rounds: int,
    turn: Callable[[Callable[[], Any]], float] | None,
) -> dict[Candidate, list[float]]:
    programs = {(name, True): run.all for name, run in runs.items()}
    programs |= {(name, False): run.first for name, run in runs.items() if run.first is not None}
    seconds = interleaved(programs, rounds, turn)

    def expected(name: Candidate, index: int) -> float:
        of_all = seconds[name, True][index]
        of_first = seconds[name, False][index] if (name, False) in seconds else of_all
        return of_first + runs[name].share * max(0.0, of_all - of_first)

    return {name: [expected(name, index) for index in range(rounds)] for name in runs}


def fastest(trials: list[Trial]) -> Trial:
    """The trial of the smallest median, of those that were timed; of equal ones the first."""
    return min((x for x in trials if x.seconds), key=lambda x: x.seconds.median if x.seconds else 0)
