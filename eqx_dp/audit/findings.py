"""Violations as they are found: of each kind the worst, and how often."""

from typing import Literal, TypeAlias

from .neighbours_report import Violation

Rule: TypeAlias = Literal[
    "movement",
    "noise",
    "beside the noise",
    "examples apart",
    "padding",
    "counters",
    "form",
    "compilations",
    "stopped",
]

ADVICE: dict[Rule, str] = {
    "movement": (
        "Clip the gradient of every example on its own, select away what is not finite "
        "(jnp.where), sum over examples, and divide by a public number alone: never by the number "
        "of examples sampled. Noise has to fit the sensitivity that is stated here."
    ),
    "noise": (
        "Draw the noise of every leaf and step from a key of its own, with standard deviation "
        "noise multiplier x sensitivity: plan.privatizer(grad_fn, key=secret), first in the chain, "
        "its state handed on from step to step."
    ),
    "beside the noise": (
        "Whatever a step returns has to be computed from the noised gradient and public values. "
        "Leave it out, or, if it may be known, name it in disclose."
    ),
    "examples apart": (
        "What an example adds may depend on that example alone: no statistics of the batch, no "
        "clipping of a microbatch as a whole, no division by how many examples there are."
    ),
    "padding": "Hand on the mask, is_padding_example, and select padding away (jnp.where).",
    "counters": "Count steps, and nothing that depends on the examples.",
    "form": "Give results the same shapes and dtypes on all data: pad and mask.",
    "compilations": (
        "Compile for shapes that are the same on all data: pad, and hand on a mask; hand over no "
        "value of the data as a static argument."
    ),
    "stopped": (
        "An error that depends on an example shows that it is there. Let the loss return NaN in "
        "its place: the clipped gradient counts such an example as zero."
    ),
}


class Findings:
    """Collects violations."""

    def __init__(self) -> None:
        self._worst: dict[tuple[Rule, str], tuple[float, str, str, int]] = {}

    def add(self, rule: Rule, kind: str, found: str, where: str, size: float = 0.0) -> None:
        """Notes a violation; of several of one kind the one of the largest `size` is shown."""
        worst = self._worst.get((rule, kind))
        times = 1 if worst is None else worst[3] + 1
        if worst is None or size > worst[0]:
            self._worst[rule, kind] = size, found, where, times
        else:
            self._worst[rule, kind] = *worst[:3], times

    def has(self, rule: Rule) -> bool:
        """Whether a rule was found not to hold."""
        return any(found == rule for found, _ in self._worst)

    @property
    def violations(self) -> tuple[Violation, ...]:
        """A row for each kind."""
        return tuple(
            Violation(
                rule,
                found if times == 1 else f"{found} ({times} times in all, this is the worst)",
                where,
                ADVICE[rule],
            )
            for (rule, _), (_, found, where, times) in self._worst.items()
        )
