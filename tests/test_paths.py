"""Paths of a model's leaves, and patterns, against a matcher that knows no regular expressions."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eqx_dp.paths import dotted, matches

# The oracle: parts against parts, characters against characters, by recursion.


def meant(pattern, path):
    return _parts_match(pattern.split("."), path.split("."))


def _parts_match(pattern, path):
    if not pattern:
        return not path
    head, *rest = pattern
    if head == "**":
        return any(_parts_match(rest, path[n:]) for n in range(len(path) + 1))
    return bool(path) and _part_matches(head, path[0]) and _parts_match(rest, path[1:])


def _part_matches(pattern, part):
    if not pattern:
        return not part
    head, rest = pattern[0], pattern[1:]
    if head == "*":
        return any(_part_matches(rest, part[n:]) for n in range(len(part) + 1))
    return bool(part) and head in ("?", part[0]) and _part_matches(rest, part[1:])


# Patterns, and paths that match each or do not. Two stars beside something else are two stars
# within a part. Nothing but stars and question marks is special; an empty key is a part, too.
PATTERNS = {
    "head.weight": ("head.weight", "! head head.weights head.weight.a headxweight"),
    "blocks.?.bias": ("blocks.1.bias", "! blocks.10.bias blocks.a.b.bias"),
    "**": ("weight a.b.c",),
    "**.weight": ("weight a.b.weight", "! a.b.overweight weight.a"),
    "head.**": ("head head.weight head.a.b", "! heads heads.weight"),
    "**.a.**": ("a x.a.y", "! x.ab.y"),
    "**weight": ("weight overweight", "! head.weight"),
    "[ab]": ("[ab]", "! a"),
    "a+(b|c)$": ("a+(b|c)$", "! aab"),
    "*.b": (".b a.b", "! b a..b"),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern):
    for paths in PATTERNS[pattern]:
        for path in paths.removeprefix("! ").split():
            assert matches(pattern, path) is meant(pattern, path) is (paths[0] != "!")


FEW = st.text("ab.", max_size=8)


@given(st.one_of(st.text("ab.*?", max_size=8), st.text()), st.one_of(FEW, st.text()))
@settings(max_examples=100, deadline=None)
def test_patterns_mean_what_the_recursion_says(pattern, path):
    assert matches(pattern, path) is meant(pattern, path)


def test_many_stars_end():
    path = ".".join(["aaaaaaaaaa"] * 20)
    assert not matches("**.a*a*a*.**.*a*a.**.b", path)
    assert matches("**.a*a*a*.**.*a*a.**.*", path)


class Block(eqx.Module):
    weight: jax.Array
    parts: dict[str, Any]
    width: int = eqx.field(static=True)


def test_a_path_joins_attributes_keys_and_indices():
    one = jnp.ones(())
    model = [Block(one, {"a": (one, one), "c": {7: one}}, width=2)]
    paths = [dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(model)]
    assert paths == ["0.weight", "0.parts.a.0", "0.parts.a.1", "0.parts.c.7"]
    assert dotted(()) == ""  # a model that is one array
