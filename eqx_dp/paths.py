"""Paths in a model's tree, and patterns that match them.

A path joins attribute names, keys and indices by dots: `blocks.3.attention.query_proj.weight`.
"""

import functools
import re
from typing import Any

import jax

_ANY_PARTS = r"(?:\.[^.]*)*"
_ENTRY = re.compile(r"\[(?:'([^']*)'|(\d+))\]")


def dotted(path: tuple[Any, ...]) -> str:
    """The dotted form of a path as `jax.tree_util.tree_leaves_with_path` gives it."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def below(name: str, path: tuple[Any, ...]) -> str:
    """A path below a name: `model.layers.0.weight`, `source 0 at images`."""
    tail = dotted(path)
    return f"{name}{' at ' if ' ' in name else '.'}{tail}" if tail else name


def dotted_name(saved: str) -> str:
    """The dotted form of an array's name in a checkpoint, which is `.model.layers[0].weight`."""
    return _ENTRY.sub(r".\1\2", saved).removeprefix(".")


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern describes a whole dotted path.

    | in a pattern | stands for |
    |---|---|
    | `**` | any number of parts, none included (a part of its own) |
    | `*` | any characters within one part, none included |
    | `?` | one character within a part |
    | the rest | itself |
    """
    # With a dot before every part, "any number of parts" needs no dots.
    return _expression(pattern).fullmatch(f".{path}") is not None


@functools.lru_cache
def _expression(pattern: str) -> re.Pattern[str]:
    parts = pattern.split(".")
    return re.compile("".join(_ANY_PARTS if part == "**" else _part(part) for part in parts))


def _part(part: str) -> str:
    wild = {"*": "[^.]*", "?": "[^.]"}
    return "\\." + "".join(wild.get(character, re.escape(character)) for character in part)
