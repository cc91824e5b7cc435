"""Paths of a model's leaves, and patterns, against a matcher that knows no regular expressions."""

from typing import Any, NamedTuple

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


@pytest.mark.parametrize(
    ("pattern", "path", "is_match"),
    [
        # itself
        ("weight", "weight", True),
        ("weight", "weights", False),
        ("weight", "head.weight", False),
        ("head.weight", "head.weight", True),
        ("head.weight", "head", False),
        ("head.weight", "headxweight", False),
        ("blocks.1.bias", "blocks.10.bias", False),
        # within a part
        ("*", "weight", True),
        ("*", "head.weight", False),
        ("*.weight", "head.weight", True),
        ("*.weight", "weight", False),
        ("*_proj", "query_proj", True),
        ("*_proj", "_proj", True),
        ("*_proj", "query_proj2", False),
        ("q*_*j", "query_proj", True),
        ("blocks.?.bias", "blocks.1.bias", True),
        ("blocks.?.bias", "blocks.10.bias", False),
        ("blocks.??.bias", "blocks.10.bias", True),
        ("a?b", "a.b", False),
        ("a*b", "a.b", False),
        # any number of parts
        ("**", "weight", True),
        ("**", "a.b.c", True),
        ("**", "", True),
        ("**.weight", "weight", True),
        ("**.weight", "a.b.weight", True),
        ("**.weight", "a.b.overweight", False),
        ("head.**", "head", True),
        ("head.**", "head.weight", True),
        ("head.**", "head.a.b", True),
        ("head.**", "heads", False),
        ("head.**", "heads.weight", False),
        ("a.**.b", "a.b", True),
        ("a.**.b", "a.x.y.b", True),
        ("a.**.b", "ab", False),
        ("a.**.b", "a.xb", False),
        ("**.a.**", "a", True),
        ("**.a.**", "x.a.y", True),
        ("**.a.**", "x.ab.y", False),
        ("**.**", "a", True),
        ("a.**.**", "a", True),
        ("a.**.**.b", "a.b", True),
        # two stars beside something else are two stars within a part
        ("**weight", "weight", True),
        ("**weight", "overweight", True),
        ("**weight", "head.weight", False),
        ("head**", "head.weight", False),
        # nothing else is special
        ("[ab]", "a", False),
        ("[ab]", "[ab]", True),
        ("a+(b|c)$^\\d{2}", "a+(b|c)$^\\d{2}", True),
        ("a+", "aa", False),
        ("Weight", "weight", False),
        ("gewicht_ü", "gewicht_ü", True),
        ("*", "two\nlines", True),
        # an empty key is a part too
        ("**.b", ".b", True),
        ("*.b", ".b", True),
        ("a.**.b", "a..b", True),
        ("a.b", "a..b", False),
    ],
)
def test_patterns(pattern, path, is_match):
    assert matches(pattern, path) is is_match
    assert meant(pattern, path) is is_match


WILD_PARTS = st.one_of(st.just("**"), st.text("ab*?", max_size=3))


@st.composite
def pattern_and_path(draw):
    """Half of the patterns are made from the path, so that many of them match."""
    parts = draw(st.lists(st.text("ab", max_size=3), min_size=1, max_size=5))
    if draw(st.booleans()):
        return ".".join(draw(st.lists(WILD_PARTS, min_size=1, max_size=5))), ".".join(parts)
    pattern = []
    for part in parts:
        pattern += draw(st.lists(st.just("**"), max_size=2))
        change = draw(st.sampled_from(["keep", "drop", "*", "?"]))
        if change == "keep" or (change == "drop" and not pattern):
            pattern.append(part)
        elif change != "drop":
            cut = draw(st.integers(0, len(part)))
            pattern.append(part[:cut] + change + part[cut + 1 :])
    return ".".join([*pattern, *draw(st.lists(st.just("**"), max_size=2))]), ".".join(parts)


@given(pattern_and_path())
@settings(max_examples=300, deadline=None)
def test_patterns_mean_what_the_recursion_says(drawn):
    pattern, path = drawn
    assert matches(pattern, path) is meant(pattern, path)


@given(st.text(), st.text())
@settings(deadline=None)
def test_any_text_is_a_pattern(pattern, path):
    assert matches(pattern, path) is meant(pattern, path)


def test_many_stars_end():
    path = ".".join(["aaaaaaaaaa"] * 20)
    assert not matches("**.a*a*a*.**.*a*a.**.b", path)
    assert matches("**.a*a*a*.**.*a*a.**.*", path)


class Pair(NamedTuple):
    left: Any
    right: Any


class Block(eqx.Module):
    weight: jax.Array
    parts: dict[str, Any]
    width: int = eqx.field(static=True)


def test_a_path_joins_attributes_keys_and_indices():
    one = jnp.ones(())
    model = [Block(one, {"a": (one, one), "b": Pair(one, None), "c": {7: one}}, width=2)]
    paths = [dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(model)]
    assert paths == [
        "0.weight",
        "0.parts.a.0",
        "0.parts.a.1",
        "0.parts.b.left",
        "0.parts.c.7",
    ]


def test_the_path_of_a_model_that_is_one_array_is_empty():
    assert dotted(()) == ""
