"""Noise in a traced step, read from its marks: what it makes of a clipped sum."""

from typing import Any

from jax.extend.core import JaxprEqn

from ..privacy import NoiseMark
from .engine import models_of
from .facts import Fact, Kind, Reach, private, value_of
from .flow import Context
from .record import Record
from .streams import PAST, loops_of, state_of
from .sums import Release


def noise(
    record: Record, context: Context, equation: JaxprEqn, mark: NoiseMark, inputs: list[Fact]
) -> list[Fact]:
    """What noise makes of each leaf, and of the stream: of a clipped sum, a release."""
    size = mark.num_leaves
    leaves, state = inputs[:size], inputs[size:]
    count = PAST + 2 * size * mark.correlation.kept
    stream = state_of([fact.token for fact in state], count)
    is_plain = (
        models_of(equation) is not None and len(state) == count == len(equation.outvars) - size
    )
    if not size:
        return state
    if stream is None or not is_plain:
        key = state[0] if state else Fact()
        is_constant = is_plain and key.token is None and value_of(key) is not None
        found = "noise is not of a stream that comes in as an argument, as its last draw left it"
        if is_constant:
            found = "the key of the noise is a constant: it is the same noise in each call"
        record.note(context, "fresh noise", found, is_constant)
        return [private("noised", context.line)] * len(equation.outvars)
    if context.is_choice:
        record.note(context, "noise", "noise is added in a branch", is_decided=False)
        return [private("noised", context.line)] * len(equation.outvars)
    record.streams.use(context, stream)
    record.is_noised_again |= any(fact.is_public and fact.reach.is_noised for fact in leaves)
    noisy = [
        private("noised", fact.reach.where or context.line)
        if fact.reach.kind is Kind.PRIVATE or (fact.sum and not fact.sum.is_whole)
        else Fact(Reach(is_noised=True))
        for fact in leaves
    ]
    sums = [fact.sum for fact in leaves if fact.sum and fact.sum.is_whole]
    if sums and context.is_final:
        rows = tuple(row for one in sums for row in one.rows)
        is_exact = all(one.is_exact for one in sums)
        batches = {record.sources[term.leaf[0]].batches for row in rows for term in row}
        own = batches.pop() if len(batches) == 1 else frozenset[Any]()
        record.releases[context.path] = Release(
            rows, mark.stddev, mark.correlation, is_exact, own, context
        )
    after = stream._replace(at=context.path, loops=loops_of(context))
    return [*noisy, *(Fact(token=after._replace(part=part)) for part in range(count))]
