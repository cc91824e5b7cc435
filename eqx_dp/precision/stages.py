"""Marks in a program that say which stage of a private step an equation belongs to.

A mark is a `jax.named_scope`: it computes nothing, and stays with an equation through `vmap`,
differentiation, `scan`, `jit` and `shard_map`. `check_precision` reads them.
"""

import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias, get_args
from urllib.parse import quote, unquote

import jax

from .module_rule import ModuleRule

Stage: TypeAlias = Literal[
    "cast", "loss", "norm", "sum", "microbatches", "devices", "draw", "bits", "noise", "grid"
]
"""The purpose of an equation.

| stage | holds |
|---|---|
| cast | a model's parameters, from what they are stored in to the compute dtype |
| loss | the user's function of one example, forward and backward |
| norm | gradients of single examples where the engine forms them, their norms, clip factors |
| sum | the weighted sum over a microbatch's examples |
| microbatches | the addition of one microbatch's sum to the total |
| devices | the sum over devices |
| draw | the Gaussian |
| bits | the same, from the words of a cipher |
| noise | its addition |
| grid | the noisy sum, rounded to a multiple of a public number |
"""

_PREFIX = "eqx_dp."
_NARROW = _PREFIX + "narrow_product"
_MARK = re.compile(rf"eqx_dp\.({'|'.join(get_args(Stage))})\b")
_RULE = re.compile(r"eqx_dp\.rule\[([^\]]*)\]")


def stage(name: Stage) -> AbstractContextManager[Any]:
    """Marks equations traced inside; the innermost mark counts."""
    return jax.named_scope(_PREFIX + name)


def governed_by(rule: ModuleRule | None) -> AbstractContextManager[Any]:
    """Marks equations inside a module whose compute dtype a rule gives."""
    if rule is None:
        return nullcontext()
    return jax.named_scope(f"{_PREFIX}rule[{quote(rule.match, safe='*?')}]")


def in_narrow_product() -> AbstractContextManager[Any]:
    """Marks the casts, the scales and the product of a narrow product of the engine."""
    return jax.named_scope(_NARROW)


def is_in_narrow_product(scope: str) -> bool:
    """Whether an equation is a part of such a product."""
    return _NARROW in scope


def stage_of(scope: str) -> str | None:
    """The stage of an equation, from its name stack; None outside of the engine."""
    marks = _MARK.findall(scope)
    return marks[-1] if marks else None


def rules_at(scope: str) -> list[str]:
    """The patterns of the module rules around an equation, from its name stack, outermost first."""
    return [unquote(match) for match in _RULE.findall(scope)]


def is_backward(scope: str) -> bool:
    """Whether an equation comes from a transposition, by its name stack."""
    return "transpose(" in scope
