"""From residuals and cotangents to each leaf's norms and weighted sum.

A factored leaf (Goodfellow, 2015; Li et al., "Large Language Models Can Be Strong Differentially
Private Learners", 2022) has its norm from inner products between time steps, and its sum as one
contraction over examples and time; no example's gradient is ever formed. Leaves whose uses are
equal have one program, which is traced once.

In ghost clipping (`MeasuredUse`), cotangents become norms, then sums, within the backward pass.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..device import is_cpu
from ..isolation import of_one
from ..precision import stage
from ..rewrites import computed_once
from ..sharding import evaluated_whole, whole
from .blocks import BLOCK, in_blocks
from .gram import (
    OneHot,
    OuterProducts,
    gram_norms,
    likely_norm,
    one_term,
    row_norms,
    sum_of_products,
    to_common_scale,
)
from .leaves import LeafGradient, Measure, combined, norm_and_bound, of_slices, within
from .norms import contracted, halves, has_float64, without_subnormal
from .uses import Member, ParamUse, Scattering, overlaps, parts_of_uses

Pair: TypeAlias = tuple[Any, Array]
"""Residuals of a use and its cotangent, examples in front, then the scans around it."""


class LeafForm(NamedTuple):
    """How the gradient of a factored leaf is found: leaves of equal form differ only in numbers.

    Attributes:
        shape: of the parameter.
        uses: all uses of it.
        dtype: the accumulate dtype.
        is_formed: whether each example's gradient is formed, of a leaf with one use.
        is_likely: whether its first norm and bound come from inner products: see `likely_norm`.
    """

    shape: tuple[int, ...]
    uses: tuple[ParamUse, ...]
    dtype: np.dtype[Any]
    is_formed: bool = False
    is_likely: bool = False


def leaf_gradient(
    form: LeafForm, pairs: Sequence[Pair], scattering: Scattering | None = None
) -> LeafGradient:
    """The gradient of one factored leaf from its uses.

    Args:
        form: of the leaf.
        pairs: of every use.
        scattering: how the weighted sum goes to devices slice by slice, which then hold a part each
            of the sum over all; None where it is this device's own.
    """
    if form.is_formed:
        return LeafGradient(computed_once(functools.partial(_formed, form), pairs[0], pairs[0][1]))
    if scattering is not None:
        return _sliced(form, pairs[0], scattering)
    norm, bound, held = measured(form, list(pairs))
    return LeafGradient(None, (norm, bound), functools.partial(summed, form, held))


def _formed(form: LeafForm, pair: Pair) -> Float[Array, "batch *shape"]:
    """Each example's gradient, from outer products."""
    (use,), parts = form.uses, parts_of_uses(form.uses, form.dtype)

    def of_one(residual: Any, cotangent: Array) -> Array:
        x, g = use.factors(residual, cotangent, form.dtype)
        return use.to_parameter(contracted("gtk,gtp->gkp", x, g, (parts, parts)))

    return jax.vmap(of_one)(*pair)


@functools.partial(jax.jit, static_argnums=0)
def measured(form: LeafForm, pairs: list[Pair]) -> tuple[Array, Array, Any]:
    """Norm, bound, and the parts of the weighted sum, see `_factored`."""
    pairs = [(residual, cotangent.astype(form.dtype)) for residual, cotangent in pairs]
    parts = [_factored(form, members, pairs) for members in _sets(form)]
    measures, batch = [part[:2] for part in parts], len(jax.tree.leaves(pairs)[0])
    return *combined(measures, batch, form.dtype), [held for _, _, held in parts]


@functools.partial(jax.jit, static_argnums=0)
def summed(
    form: LeafForm, held: Any, factors: Float[Array, "batch"], contributes: Bool[Array, " batch"]
) -> Array:
    """The weighted sum."""
    parts = parts_of_uses(form.uses, form.dtype)

    def of_block(operands: Any) -> Array:
        held, factors, contributes = operands
        sums: list[Array] = []
        for members, (products, powers) in zip(_sets(form), held, strict=True):
            # Powers of two are multiplied into the factor: g alone could vanish beside a large x.
            # No product is below the normal range, where numbers have lost digits.
            weights = without_subnormal(functools.reduce(jnp.multiply, powers, factors[:, None]))
            for (index, _), (x, g) in zip(members, products, strict=False):
                use = form.uses[index]
                sums.append(use.to_parameter(weighted(use, x, g, weights, contributes, parts)))
        return functools.reduce(jnp.add, sums)

    largest = max(math.prod(x.shape[1:]) for x in jax.tree.leaves(held))
    # A TPU writes sides in float32, and their parts: 128 MiB of each are enough.
    block = BLOCK if has_float64() else max(1, min(BLOCK, 2**25 // max(1, largest)))
    return in_blocks(of_block, (held, factors, contributes), form.dtype, block)


def _sliced(form: LeafForm, pair: Pair, scattering: Scattering) -> LeafGradient:
    """A stacked leaf's gradient; each slice is computed for its norm, and once more for the sum."""
    (use,) = form.uses
    form_of_slice, scans = _form_of_slice(use, form.dtype), len(use.slices)
    slices = jnp.arange(math.prod(use.slices))
    # Slices first, as the scan returned them: nothing is copied.
    first = jax.tree.map(lambda x: jnp.moveaxis(x, 0, scans), pair)
    stacked = jax.tree.map(lambda x: x.reshape(len(slices), *x.shape[scans:]), first)

    def at(index: Array) -> Pair:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, False), stacked)

    def measure(index: Array) -> Float[Array, "batch 2"]:
        return jnp.stack(first_measure(form_of_slice, at(index)), axis=-1)

    of_each = jax.lax.map(measure, slices)

    def weighted(factors: Float[Array, " batch"], contributes: Bool[Array, " batch"]) -> Array:
        def added(index: Array) -> Array:
            leaf, its = leaf_gradient(form_of_slice, [at(index)]), factors
            # What is computed again may be rounded otherwise: in `row_norms` as well.
            if leaf.formed is not None or use.kind.is_one_hot:
                with stage("norm"):
                    _, bounds = norm_and_bound([leaf], len(factors), form.dtype)
                    its = within(factors, bounds, of_each[index, :, 1])
            return scattering(leaf.sum(its, contributes & (its > 0)))

        return scattering.stacked(jax.lax.map(added, slices))

    return LeafGradient(None, of_slices(jnp.moveaxis(of_each, 0, 1)), weighted)


def _form_of_slice(use: ParamUse, dtype: np.dtype[Any]) -> LeafForm:
    """How the gradient of one iteration of the enclosing scans is found.

    A leaf that is not formed takes copies of both sides, and two terms x terms matrices. Tensor
    cores write and read these for longer than they multiply: there a formed leaf may take half as
    much again. It is also added once, not as two parts, and its bound is hardly above its norm. It
    is formed for its sum alone there, if inner products take fewer operations.
    """
    inner = use.inside()
    terms, (_, features_in, features_out) = inner.terms, inner.matrices
    size, both = features_in * features_out, terms * (features_in + features_out)
    formed = not inner.kind.is_one_hot and size < (1 if is_cpu() else 1.5) * (both + 2 * terms**2)
    likely = formed and both <= size and not is_cpu()
    return LeafForm(inner.shape, (inner,), dtype, formed, likely)


def first_measure(form: LeafForm, pair: Pair) -> Measure:
    """Norm and first bound of a leaf with one use. Without a proof the sum is scaled down to it."""
    if form.is_likely:
        x, g = sides(form.uses[0], *pair, form.dtype)
        return likely_norm(x, g, parts_of_uses(form.uses, form.dtype))
    return norm_and_bound([leaf_gradient(form, [pair])], len(pair[1]), form.dtype)


def _sets(form: LeafForm) -> tuple[tuple[Member, ...], ...]:
    sets = overlaps(form.uses)
    assert sets is not None
    return sets


def _factored(form: LeafForm, members: Sequence[Member], pairs: list[Pair]) -> tuple[Any, Any, Any]:
    """Norm and bound of what uses that overlap add, and what their weighted sum is made of.

    The latter is of each use the sides of its outer products, and the powers of two, of every
    example (and group), that they were divided by, to be multiplied one after the other.
    """
    terms = [
        OuterProducts(*sides(form.uses[index], *pairs[index], form.dtype), transposed)
        for index, transposed in members
    ]
    first, *others = terms
    parts = parts_of_uses(form.uses, form.dtype)
    rows = [use.x.rows for use in terms if isinstance(use.x, OneHot) and not use.transposed]
    if len(rows) == len(terms):  # all look up rows, none looks up columns
        values = jnp.concatenate([use.g for use in terms], axis=2)
        at = jnp.concatenate(rows, axis=2)
        norm, bound, sums = row_norms(at, values)
        terms, powers = [OuterProducts(OneHot(at), sums)], ()  # the first use stands for all
    elif not others and first.time == 1 and not isinstance(first.x, OneHot):
        norm, bound, x, scale = one_term(first.x, first.g, parts)
        terms, powers = [first._replace(x=x)], (scale,)
    else:
        terms, exponent = to_common_scale(terms, parts)
        norm, bound = gram_norms(terms, parts, form.dtype)
        tiny = jnp.finfo(form.dtype).tiny
        powers = halves(exponent, form.dtype)
        norm, scaled_back = (functools.reduce(jnp.multiply, powers, x) for x in (norm, bound))
        bound = jnp.where(bound > 0, jnp.maximum(scaled_back, tiny), bound)
        powers = tuple(x[:, None] for x in powers)
    return norm, bound, ([(use.x, use.g) for use in terms], powers)


def sides(
    use: ParamUse, residual: Any, cotangent: Array, dtype: np.dtype[Any]
) -> tuple[Any, Float[Array, "batch group time features_out"]]:
    """All examples' outer products."""
    x, g = jax.vmap(lambda r, g: use.factors(r, g, dtype))(residual, cotangent)
    return OneHot(x[..., 0]) if use.kind.is_one_hot else x, g


def weighted(
    use: ParamUse,
    x: Any,
    g: Float[Array, "batch group time features_out"],
    weights: Float[Array, "batch #group"],
    contributes: Bool[Array, " batch"],
    parts: int,
) -> Float[Array, "group features_in features_out"]:
    """The weighted sum of all examples' outer products."""
    if not isinstance(x, OneHot):
        return sum_of_products(x, g, weights, contributes, parts)
    groups, num_rows, features = use.matrices
    g = jnp.where(contributes[:, None, None, None], g * weights[..., None, None], 0)
    # One table of all groups. What a group has beyond its last row is zero, wherever it is added.
    rows = x.rows + num_rows * jnp.arange(groups)[:, None]
    table = jnp.zeros((groups * num_rows, features), g.dtype)
    table = table.at[rows.reshape(-1)].add(g.reshape(-1, features), mode="drop")
    return table.reshape(groups, num_rows, features)


class FormedUse(NamedTuple):
    """A use of a formed leaf whose kind has a rule of its own for the gradient.

    Attributes:
        use: the use.
        saves_memory: whether what the rule makes of the data goes as soon as it is used. Otherwise
            the compiler may hold that of several uses at once, which is a little faster.
    """

    use: ParamUse
    saves_memory: bool

    def tap(self) -> tuple[()]:
        """Nothing: the parameter is differentiated itself."""
        return ()

    def evaluated(
        self, equation: jex_core.JaxprEqn, inputs: list[Any], tap: Any
    ) -> tuple[Array, Any]:
        """The result of a use, which hands the parameter its gradient on the way back."""
        del tap
        operand, inputs = self.use.kind.operand, list(map(whole, inputs))
        parameter = inputs[operand]
        inputs[operand] = jax.lax.stop_gradient(parameter)
        (result,) = evaluated_whole(equation, inputs)
        return _answering(self, result, (), parameter, self.use.residual(inputs))

    def answer(self, residual: Any, cotangent: Array, request: Any) -> Array:
        """The gradient with respect to the operand, in the dtype of operand and data."""
        del request
        dtype, inner = self.use.data.dtype, self.use.inside()

        def of_example(pair: tuple[Any, Array]) -> Array:
            return inner.kind.outer_products(*pair, dtype)  # not narrow: it has nothing to restore

        def of_batch(*pair: Any) -> tuple[Array, Any]:
            return computed_once(jax.vmap(of_example), pair, pair[1]), ()

        pair = residual, cotangent
        gradient = of_one(of_batch)(*pair)[0] if self.saves_memory else of_example(pair)
        return inner.to_parameter(gradient)


class MeasuredUse(NamedTuple):
    """A use of `ghost` that keeps nothing: the only use of its leaf.

    Attributes:
        use: the use.
        dtype: the accumulate dtype.
        scattering: how the weighted sum leaves it, where each device keeps a part.
    """

    use: ParamUse
    dtype: np.dtype[Any]
    scattering: Scattering | None

    def tap(self) -> "Taps":
        """Zeros of the shapes of what is wanted."""
        part = self.use.inside().shape if self.scattering is None else self.scattering.part
        return Taps(*(jnp.zeros((*self.use.slices, *x), self.dtype) for x in ((2,), part)))

    def evaluated(
        self, equation: jex_core.JaxprEqn, inputs: list[Any], tap: "Taps"
    ) -> tuple[Array, Any]:
        """The result of a use, and its request: a zero.

        The cotangent of the request holds an example's factor and its limit, the bound that the
        factor was found from. On the way back, the cotangent of the result becomes those of `tap`.
        """
        (result,) = evaluated_whole(equation, inputs)
        request = jnp.zeros(2, self.dtype)
        residual = self.use.residual(inputs)
        result, request = cast(Any, _answering)(self, result, request, tap, residual)
        return self.use.received(result), request

    def answer(self, residual: Any, cotangent: Array, request: Array) -> "Taps":
        """Norm and bound of one example, and the weighted sum of all examples."""
        return Taps(*_answers(self)(residual, cotangent, request))

    def of_leaf(self, total: Float[Array, "..."]) -> Array:
        """The leaf's sum."""
        if self.scattering is not None:
            return self.scattering.stacked(total)
        return self.use.from_operand(total)


class Taps(NamedTuple):
    """Zeros at a use, whose cotangents are what is wanted.

    Attributes:
        measure: its cotangent is the norm and bound of one example.
        total: its cotangent is the weighted sum of all examples.
    """

    measure: Float[Array, "*slices 2"]
    total: Float[Array, "..."]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _answering(
    at: FormedUse | MeasuredUse, result: Array, request: Any, wanted: Any, residual: Any
) -> tuple[Array, Any]:
    """The result and the request as they are; the cotangent of `wanted` is the answer."""
    del at, wanted, residual
    return result, request


def _answering_forward(*operands: Any) -> tuple[Any, Any]:
    # Do not call `_answering` here: the call would stay in the program, which could then not be
    # differentiated.
    _, result, request, _, residual = operands
    return (result, request), residual


def _answering_back(at: Any, residual: Any, cotangents: tuple[Array, Any]) -> tuple[Any, ...]:
    cotangent, request = cotangents
    return cotangent, None, at.answer(residual, cotangent, request), None


_answering.defvjp(_answering_forward, _answering_back)


@functools.lru_cache(maxsize=1024)
def _answers(at: MeasuredUse) -> Callable[..., tuple[Array, Array]]:
    """Norm and bound of one example, and the weighted sum of all examples.

    Guarantee: what one example adds is at most its factor times its limit, however the pass rounded
    that found these: the same arrays are measured and added here, and scaled down to the limit.
    """

    @jax.jit
    def of_batch(residual: Any, cotangent: Array, request: Array) -> tuple[Array, Array]:
        form = _form_of_slice(at.use, at.dtype)  # of the platform that is traced for

        def added(operands: Any) -> Array:
            residual, cotangent, request = operands
            with stage("norm"):
                leaf = leaf_gradient(form, [(residual, cotangent)])
                _, bounds = norm_and_bound([leaf], len(cotangent), at.dtype)
                factors = within(request[:, 0], bounds, request[:, 1])
            with stage("sum"):
                return leaf.sum(factors, factors > 0)

        with stage("norm"):
            measure = first_measure(form, (residual, cotangent))
        total = computed_once(added, (residual, cotangent, request), cotangent)
        with stage("sum"):
            total = total if at.scattering is None else at.scattering(total)
        return jnp.stack(measure, axis=-1), total

    return jax.jit(of_one(of_batch))
