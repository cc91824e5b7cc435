"""The mark by which a traced step shows where the engine clips and sums, and with what bounds."""

from collections.abc import Callable
from typing import NamedTuple

import jax.extend.core as jex_core
from jaxtyping import Array, PyTree

from ..programs import in_marked_equation, mark_on


class Mark(NamedTuple):
    """What the engine states of one equation, a jitted call, that holds all of its work on a batch.

    Operands are, in this order and behind what JAX puts in front: arrays that examples share
    (parameters, other arrays of the model, constants), arrays with examples in front, one key an
    example, the mask. Results are the clipped sum's leaves, then values with examples in front.

    Attributes:
        bounds: for each clip norm, the L2 norm that one example adds at most to its leaves' sums.
        groups: for each leaf the index of its clip norm.
        ranks: how many dimensions each leaf has.
        num_shared: how many operands examples share.
        num_batched: how many operands have examples in front, keys and mask aside.
        has_keys: whether there are keys.
        has_mask: whether there is a mask.
        num_examples: the length of the batch, padding included.
        num_results: how many results there are, values of single examples included.
    """

    bounds: tuple[float, ...]
    groups: tuple[int, ...]
    ranks: tuple[int, ...]
    num_shared: int
    num_batched: int
    has_keys: bool
    has_mask: bool
    num_examples: int
    num_results: int

    @property
    def num_operands(self) -> int:
        """How many operands the engine gave."""
        return self.num_shared + self.num_batched + self.has_keys + self.has_mask


def in_one_equation(
    mark: Mark, function: Callable[[PyTree[Array]], PyTree[Array]], operands: PyTree[Array]
) -> PyTree[Array]:
    """Calls a function; in a traced program, as one equation that carries the mark."""
    return in_marked_equation("eqx_dp_clipped_sum", mark, function, operands)


def mark_of(equation: jex_core.JaxprEqn) -> Mark | None:
    """The mark that an equation carries; None without."""
    mark = mark_on(equation)
    return mark if isinstance(mark, Mark) else None
