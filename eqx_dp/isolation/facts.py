"""What a value in the program of one example depends on."""

from dataclasses import dataclass
from typing import TypeAlias

import jax.extend.core as jex_core


@dataclass(frozen=True)
class Of:
    """A value that keeps to the rules.

    Attributes:
        what: "nothing" (parameters, constants, and what follows from them), "example" (the one at
            hand alone), or "sum" (over examples, which the engine asked for).
    """

    what: str


@dataclass(frozen=True)
class Meeting:
    """A value that may depend on other examples.

    Attributes:
        equation: where they meet.
        line: the user's line that it stands in, or that it is called from; "" if there is none.
    """

    equation: jex_core.JaxprEqn
    line: str = ""


Fact: TypeAlias = Of | Meeting

SHARED, OWN, SUM = Of("nothing"), Of("example"), Of("sum")


def joined(facts: list[Fact], equation: jex_core.JaxprEqn) -> Fact:
    """That of a value that depends on all of several, or may be any of them."""
    meeting = next((fact for fact in facts if isinstance(fact, Meeting)), None)
    if meeting is not None:
        return meeting
    found = {fact for fact in facts if fact != SHARED}
    return Meeting(equation) if len(found) > 1 else next(iter(found), SHARED)
