"""A language model whose embedding is its head as well."""

from typing import Any

import equinox as eqx
from jaxtyping import Array

from ..rows import GPT, Row, gpt


class Tied(eqx.Module):
    """A GPT that looks words up in the matrix of its head."""

    model: GPT

    def __init__(self, model: GPT) -> None:
        self.model = eqx.tree_at(lambda m: m.head.weight, model, None)

    def __call__(self, tokens: Array) -> Array:
        def is_none(x: Any) -> bool:
            return x is None

        words = self.model.embedding.weight
        tied = eqx.tree_at(lambda m: m.head.weight, self.model, words, is_leaf=is_none)
        return tied(tokens)


def gpt_tied(
    batch: int = 8, length: int = 256, width: int = 128, depth: int = 2, vocabulary: int = 1024
) -> Row:
    row = gpt(batch, length, width, depth, vocabulary)
    return row._replace(title=f"{row.title}, head tied", model=Tied(row.model))
