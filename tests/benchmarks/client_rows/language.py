"""Rows of language models: long sequences, heads of their own and tied ones."""

from typing import Any

import equinox as eqx
from jaxtyping import Array

from .. import rows
from ..rows import GPT, Row


class Tied(eqx.Module):
    """A language model whose embedding is its head as well."""

    model: GPT

    def __init__(self, model: GPT) -> None:
        self.model = eqx.tree_at(lambda m: m.head.weight, model, None)

    def __call__(self, tokens: Array) -> Array:
        def is_none(x: Any) -> bool:
            return x is None

        words = self.model.embedding.weight
        tied = eqx.tree_at(lambda m: m.head.weight, self.model, words, is_leaf=is_none)
        return tied(tokens)


def gpt_untied(
    batch: int = 8, length: int = 256, width: int = 128, depth: int = 2, vocabulary: int = 1024
) -> Row:
    row = rows.gpt(batch, length, width, depth, vocabulary)
    return row._replace(name="gpt_untied", title=row.title.replace("GPT", "GPT, head untied,"))


def gpt_tied(
    batch: int = 8, length: int = 256, width: int = 128, depth: int = 2, vocabulary: int = 1024
) -> Row:
    row = gpt_untied(batch, length, width, depth, vocabulary)
    return row._replace(
        name="gpt_tied",
        model=Tied(row.model),
        title=row.title.replace("untied", "tied"),
    )
