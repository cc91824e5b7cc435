"""The sentences of a report, for readers who have never heard of differential privacy."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .charts import number

_TWO_TRAININGS = {
    "ADD_OR_REMOVE_ONE": "once with your example in the data, and once without it",
    "REPLACE_ONE": "once with your example in the data, and once with any other in its place",
    "REPLACE_SPECIAL": "once with your example in the data, and once with a blank in its place",
}
_NEIGHBORS = {
    "ADD_OR_REMOVE_ONE": "Data sets that differ in one example, which is added or removed.",
    "REPLACE_ONE": "Data sets that differ in one example, which is replaced by any other.",
    "REPLACE_SPECIAL": "Data sets that differ in one example, which is replaced by a blank.",
}

ATTACK_SOURCE = (
    "The curve follows from the privacy loss distribution of the plan's steps: from delta as a "
    "function of epsilon (Dong, Roth, Su 2022, Gaussian differential privacy, section 2.3). It is "
    "rounded in favor of the attack."
)
STEPS = (
    "Each step of the training shows a little more of the data, so that epsilon grows with the "
    "number of steps. It depends on the plan alone, and not on the data."
)
ASSUMPTIONS = (
    "The promise holds for one run. If several models are trained on the same data, their epsilons "
    "add up, at most, and so do their deltas.",
    "It also supposes that the program does what it says. The checks below look for mistakes.",
)
CHECKS = (
    "The numbers above hold for a step that clips the gradient of each example, adds them up, and "
    "adds noise. Two checks read the program of the step, before the run begins, and compare it "
    "with that."
)
NEWEST_START = "They are about the newest start of the run, and not about earlier ones."
PRIVACY_CHECK = (
    "check_privacy follows the private data through the program: whatever leaves it has to have "
    "the noise that the plan accounts for."
)
PRECISION_CHECK = (
    "check_precision compares the number formats of the program with those that were declared: "
    "sums and noise with too few digits weaken the promise."
)
AUDIT = (
    "An audit attacks the training itself, to find mistakes that no calculation shows. If it finds "
    "nothing, that is no proof; if it finds more than epsilon allows, there is a mistake."
)
NEIGHBOURS = (
    "Runs a step on data sets that differ in one example, many of them hostile, and compares how "
    "far the result moves with how far it may."
)
CANARIES = (
    "Plants examples in the training data, and tries to tell from the model which of them were "
    "used: a lower bound on epsilon, beside the upper bound of the plan."
)
METRICS = (
    "What the run has measured of its models while it trained. It has to be measured on public or "
    "held-out data: epsilon does not cover these figures."
)


def lead(said: Mapping[str, Any]) -> str:
    """What the page is about."""
    examples = said["num_examples"]
    what = f"{examples:,} examples" if isinstance(examples, int) else "private examples"
    if said["steps_released"] == 0:
        return f"This run is to train a model on {what}. It has taken no step yet."
    if said["epsilon"] is None:
        return f"This model was trained on {what}, without a promise of privacy."
    return (
        f"This model was trained on {what} with differential privacy. That is a promise with a "
        "number: whoever sees the model, and whatever else they know, finds out little about any "
        "single example. This page says how little, and what the promise does not cover."
    )


def warnings_of(said: Mapping[str, Any]) -> list[str]:
    """What nobody should overlook."""
    found: list[str] = []
    if said["epsilon"] is None:
        found.append("There is no promise of privacy: epsilon is infinite.")
    if said["is_unsafe"]:
        found.append("The policy is unsafe: sums or noise may have too few digits.")
    if said["noise"] != "certified":
        found.append("The noise is not certified: it is no Gaussian. See what epsilon leaves out.")
    checks = [*said["checks"].values(), *(said["audit"] or {}).values()]
    if any(check is not None and not check["ok"] for check in checks):
        found.append("A check or an audit found something, or could not decide: see below.")
    return found


def cards(said: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The three figures of a report, each with its name and what it is."""
    epsilon, delta = said["epsilon"], said["delta"]
    grows = "One example can change how likely a result is, without any limit."
    if epsilon is not None and epsilon < 50:
        grows = (
            "Through one example a result becomes at most "
            f"{_rounded_up(math.exp(epsilon))} times as likely."
        )
    return [
        ("Epsilon", epsilon_in_words(epsilon), grows),
        ("Delta", _one_in(delta), f"The promise may fail with this probability, {number(delta)}."),
        (
            "Right guesses, at most",
            f"{of_hundred(said['right_guesses'])} of 100",
            "Of an attacker who has to guess whether an example was in the data, if both are as "
            "likely beforehand. A coin is right in 50.",
        ),
    ]


def protected(said: Mapping[str, Any]) -> dict[str, Any]:
    """What the promise is about, by name."""
    released = said["steps_released"]
    found = {
        "what is protected": "One example: one row of the training data, or one group of rows "
        "(all rows of a person, say) if the run was given groups.",
        "neighboring relation": f"{_NEIGHBORS[_relation(said)]} ({_relation(said)})",
        "examples in the data": said["num_examples"],
        "what is released": f"The models of {released:,} steps, all of them together."
        if released
        else "Nothing yet.",
    }
    if said["starts"] > 1:
        found["starts"] = (
            f"The run was started {said['starts']} times. All steps that these starts may have "
            "taken count, also those of a process that was killed before it saved them."
        )
    return found


def who_may_see(said: Mapping[str, Any]) -> dict[str, str]:
    """Who may see it and why, for each thing that there is."""
    few = "Only those who may see the data."
    covered = "Anyone: epsilon and delta cover them."
    found = {
        "the trained model, and those of all steps": covered
        if said["epsilon"] is not None
        else f"{few} There is no promise of privacy.",
        "the plan, the number of steps, epsilon": "Anyone: they do not depend on the data.",
        "metrics": "Anyone, if they were measured on public data. Epsilon does not cover them.",
        "which examples were drawn": "Nobody.",
        "how long each step took": f"{few} It depends on how many examples were drawn, and epsilon "
        "does not cover it.",
    }
    if said["randomness"] == "seeded":
        found["the seed"] = "Nobody: anyone with the seed can subtract the noise."
    return found


def meaning(said: Mapping[str, Any]) -> list[str]:
    """What epsilon and delta are, with this run's figures."""
    epsilon, delta, examples = said["epsilon"], said["delta"], said["num_examples"]
    here = "Here epsilon is infinite: there is no bound."
    if epsilon is not None:
        times = f"e to the power of {epsilon_in_words(epsilon)}"
        times += f", which is {_rounded_up(math.exp(epsilon))}" if epsilon < 50 else ""
        here = f"Here the factor is {times}."
    compared = ""
    if isinstance(examples, int) and examples > 0:
        compared = f" It should be far below 1 in {examples:,}, the number of examples."
    return [
        f"Imagine that the model was trained twice: {_TWO_TRAININGS[_relation(said)]}. "
        "Differential privacy adds random noise to every step of both. Somebody sees what one "
        "of them released, and has to say which of the two it was. The noise limits how well "
        "anybody can.",
        "Epsilon is that limit. Nothing that a training releases is more than e to the power of "
        "epsilon times as likely in one of the two as in the other. If epsilon is 0, they cannot "
        f"be told apart at all. The smaller epsilon is, the stronger is the promise. {here}",
        "Delta is a small probability with which the limit may be exceeded. Here it is "
        f"{number(delta)}: {_one_in(delta)}.{compared}",
        "The limit holds for every attack, known today or not, and for attackers who know all of "
        "the other examples. Real attackers know less, and mostly find out less.",
    ]


def attack(said: Mapping[str, Any]) -> list[str]:
    """What an attack can find out, with this run's figures."""
    return [
        "An attacker looks at all that was released, and says of an example whether it was in the "
        "data. Who says yes more often finds more of the examples that were in it, and raises more "
        "false alarms. The curve shows the best that any attack can do.",
        one_attack(said, 0.01),
    ]


def one_attack(said: Mapping[str, Any], share: float) -> str:
    """What an attack with that share of false alarms finds, at most."""
    found = of_hundred(found_at(said["trade_off"], share))
    return (
        f"An attack that raises a false alarm for {of_hundred(share)} of 100 examples that were "
        f"not in the data finds at most {found} of 100 that were."
    )


def found_at(corners: Sequence[Sequence[Any]], share: float) -> float:
    """True positives, at most, for a share of false positives."""
    false_positives, true_positives = np.asarray(corners).T
    return float(np.interp(share, false_positives, true_positives))


def epsilon_in_words(epsilon: float | None) -> str:
    """Epsilon, where None stands for infinity."""
    return "infinite" if epsilon is None else _rounded_up(epsilon)


def _rounded_up(bound: float) -> str:
    """A bound with four digits that count, and not below itself."""
    if bound <= 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(bound)) - 3)
    return number(math.ceil(bound / unit - 1e-9) * unit)


def of_hundred(share: float) -> str:
    """A share as so many of 100, rounded up: it is a bound."""
    digits = 1 if share >= 0.001 else 3
    rounded = math.ceil(share * 100 * 10**digits - 1e-6) / 10**digits
    return f"{rounded:g}"


def _one_in(probability: float) -> str:
    about = "" if math.isclose(1 / probability, round(1 / probability)) else "about "
    return f"{about}1 in {1 / probability:,.0f}"


def _relation(said: Mapping[str, Any]) -> str:
    return said["plan"]["neighboring_relation"]
