"""What is measured and summed as one: a parameter, or parameters that are joined to a value.

A parameter's gradient is that of its own uses, and for every value derived from it the transposed
derivative of that value times the value's own gradient.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import jax.numpy as jnp

from .cost import LeafCost
from .derived import Derived
from .leaves import Way
from .taps import Uses
from .uses import contraction, convolution

Relation: TypeAlias = Literal["itself", "entrywise", "mapped", "penalised", "through"]


class Target(NamedTuple):
    """What is measured and summed as one.

    Attributes:
        leaves: the parameters that its gradient is of.
        group: of clip norms.
        relation: "itself" where the gradient with respect to one root is it, but for the order of
            entries; "entrywise" where it is that times a number for every entry; "penalised" where
            it is that of the parameter's own uses, and for each penalty the penalty's times a
            number; "through" where it goes through values derived from the parameter.
        roots: the roots whose uses it is made of; the parameter itself first, where it has some.
        way: how norm and sum are found.
        penalties: the last of those, where they are penalties.
    """

    leaves: tuple[int, ...]
    group: int
    relation: Relation
    roots: tuple[int, ...]
    way: Way
    penalties: tuple[int, ...] = ()


def find_targets(
    uses: Uses,
    derived: Sequence[Derived],
    costs: list[LeafCost],
    groups: list[int],
    is_mapped: Callable[[int, int], bool] = lambda leaf, root: False,
) -> tuple[list[Target], list[LeafCost]]:
    """What is measured and summed as one, and what every parameter costs.

    Args:
        uses: of every root.
        derived: the roots behind the parameters.
        costs: of every root, each by itself.
        groups: of clip norms, the one of every parameter.
        is_mapped: whether a parameter's gradient through a value is a known linear map of one
            outer product.
    """
    num_leaves = len(groups)
    used = {
        num_leaves + i: its
        for i, its in enumerate(derived)
        if costs[num_leaves + i].way != "unused"
    }
    above = [
        [root for root, its in used.items() if leaf in its.leaves] for leaf in range(num_leaves)
    ]
    is_direct = [costs[leaf].way != "unused" for leaf in range(num_leaves)]
    targets: list[Target] = []
    formed = set[int]()
    of_leaves = list(costs[:num_leaves])
    joined = {
        root
        for root, its in used.items()
        if its.joined is not None
        and all(above[leaf] == [root] and not is_direct[leaf] for leaf in its.leaves)
        and len({groups[leaf] for leaf in its.leaves}) == 1
        and costs[root].way != "whole"
    }
    for root in sorted(joined):
        parts = used[root].joined
        assert parts is not None
        leaves, cost = tuple(leaf for leaf, _ in parts.parts), costs[root]
        targets.append(Target(leaves, groups[leaves[0]], "itself", (root,), cost.way))
        sizes = [math.prod(layout.shape) for _, layout in parts.parts]
        for leaf, size in zip(leaves, sizes, strict=True):
            of_leaves[leaf] = _share(cost, size / max(sum(sizes), 1), len(leaves) > 1)
    for leaf, roots in enumerate(above):
        if roots and roots[0] in joined:
            continue
        if not roots:
            targets.append(Target((leaf,), groups[leaf], "itself", (leaf,), costs[leaf].way))
            continue
        its = tuple([leaf] * is_direct[leaf] + roots)
        first = its[0]
        is_alone = len(its) == 1 and first in used and used[first].entries is None
        if is_alone and costs[first].way == "inner_products" and is_mapped(leaf, first):
            targets.append(Target((leaf,), groups[leaf], "mapped", its, "inner_products"))
            size = 0 if first in formed else math.prod(used[first].value.shape)
            of_leaves[leaf] = _mapped(costs[first], size)
            formed.add(first)
            continue
        target, cost = _derived(leaf, groups[leaf], its, uses, used, costs, formed)
        targets.append(target)
        formed |= {root for root in its if target.relation == "through"}
        # What goes through a value is there beside the gradient with respect to that.
        through = 2 if target.relation == "through" else 1
        of_leaves[leaf] = cost._replace(copies=max(through, *(costs[r].copies for r in its)))
    return targets, of_leaves


def _derived(
    leaf: int,
    group: int,
    roots: tuple[int, ...],
    uses: Uses,
    derived: dict[int, Derived],
    costs: list[LeafCost],
    formed: set[int],
) -> tuple[Target, LeafCost]:
    """A parameter that values are derived from; of some the gradients are formed already."""
    first, *others = roots
    kinds = tuple(kind for root in roots for kind in costs[root].kinds)
    held = sum(costs[root].bytes for root in roots)
    if not others and derived[first].entries is not None and costs[first].way != "whole":
        size = math.prod(derived[first].value.shape)
        way: Way = "inner_products" if is_one_product(first, uses, derived, costs) else "kept"
        flops = costs[first].sum_flops if way == "inner_products" else costs[first].flops
        reason = f"{costs[first].reason}, times a number for every entry, squared"
        if way == "kept":
            reason = "its gradient is formed, and multiplied by a number for every entry"
            held += 4 * size
        cost = LeafCost(kinds, way, flops, costs[first].sum_flops + size, held, reason)
        return Target((leaf,), group, "entrywise", roots, way), cost
    values = [root for root in roots if root in derived and not _is_penalty(derived[root])]
    penalties = tuple(root for root in roots if root in derived and root not in values)
    if not values:
        own = costs[first] if first not in derived else None
        cost = _penalised(own, kinds, held, len(penalties))
        way = "inner_products" if cost.way == "inner_products" else "kept"
        return Target((leaf,), group, "penalised", roots, way, penalties), cost
    size = sum(math.prod(derived[root].value.shape) for root in values)
    new = [costs[root] for root in roots if root not in formed]
    reason = "its gradient goes through values derived from it, example by example"
    whole = [costs[root].reason for root in roots if costs[root].way == "whole"]
    cost = LeafCost(
        kinds,
        "whole" if whole else "kept",
        sum(its.norm_flops for its in new) + 4 * size,
        sum(its.sum_flops for its in new) + 2 * size,
        sum(its.bytes for its in new) + 4 * size,
        "; ".join([*whole[:1], reason]),
        through=sum(math.prod(derived[root].value.shape) for root in values if root not in formed),
    )
    roots = tuple(root for root in roots if root not in penalties) + penalties
    return Target((leaf,), group, "through", roots, "kept", penalties), cost


def is_one_product(
    root: int, uses: Uses, derived: dict[int, Derived], costs: list[LeafCost]
) -> bool:
    """Whether the gradient with respect to a root is one outer product, in every group."""
    its, entries = tuple(uses.of[root].values()), derived[root].entries
    if len(its) != 1 or costs[root].way != "inner_products" or entries is None:
        return False
    (use,) = its
    is_product = use.kind is contraction or use.kind is convolution
    return is_product and use.steps == 1 and entries.layout.is_isometric


def _is_penalty(value: Derived) -> bool:
    """Whether a derived value is one real number."""
    is_real = jnp.issubdtype(value.value.dtype, jnp.floating)
    return is_real and math.prod(value.value.shape) == 1


def _penalised(own: LeafCost | None, kinds: tuple[str, ...], held: int, count: int) -> LeafCost:
    """What a parameter costs that so many penalties depend on, beside its own uses."""
    if own is None:
        return LeafCost(kinds, "kept", 0, 0, held, "penalties alone depend on it")
    told = "a penalty's gradient is" if count == 1 else f"{count} penalties' gradients are"
    flops = count * own.sum_flops if own.way == "inner_products" else 0
    reason = f"{own.reason}; {told} found once"
    return LeafCost(kinds, own.way, own.norm_flops + flops, own.sum_flops, held, reason)


def _mapped(cost: LeafCost, size: int) -> LeafCost:
    """What a parameter costs whose gradient is a linear map of that of a value of some size."""
    reason = f"{cost.reason}, once a linear map that all examples share is known"
    return cost._replace(norm_flops=4 * cost.sum_flops, reason=reason, copies=2, through=size)


def _share(cost: LeafCost, share: float, is_joined: bool) -> LeafCost:
    """What a parameter costs that is a part of a value."""
    reason = f"{cost.reason}, of all parameters that are joined" if is_joined else cost.reason
    return cost._replace(
        norm_flops=cost.norm_flops * share,
        sum_flops=cost.sum_flops * share,
        bytes=int(cost.bytes * share),
        reason=reason,
    )
