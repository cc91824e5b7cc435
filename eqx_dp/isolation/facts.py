"""What a value in the program of one example depends on."""

from dataclasses import dataclass
from typing import TypeAlias

import jax.extend.core as jex_core


@dataclass(frozen=True)
class Of:
    """A value that depends on no other example.

    Attributes:
        what: "nothing" (parameters, constants, and values computed from them), "example" (only on
            the current one), or "sum" (over examples, by the engine).
    """

    what: str


@dataclass(frozen=True)
class Meeting:
    """A value that may depend on other examples.

    Attributes:
        equation: where they meet.
        line: the user's line of the equation, or of the call to it; "" if there is none.
    """

    equation: jex_core.JaxprEqn
    line: str = ""


Fact: TypeAlias = Of | Meeting

SHARED, OWN, SUM = Of("nothing"), Of("example"), Of("sum")


def joined(facts: list[Fact], equation: jex_core.JaxprEqn) -> Fact:
    """The fact about a value that depends on several values, or may be any of them."""
    meeting = next((fact for fact in facts if isinstance(fact, Meeting)), None)
    if meeting is not None:
        return meeting
    found = {fact for fact in facts if fact != SHARED}
    return Meeting(equation) if len(found) > 1 else next(iter(found), SHARED)
