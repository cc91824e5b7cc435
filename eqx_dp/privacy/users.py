"""Users as the unit of privacy: the rows of one user are one example."""

import collections
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int64

from ..expected import entries, expect, function, whole_number
from ..rows import drawn_from
from ..shown import shown
from ..trees import PyTree
from .keys import numbers_of
from .sampling import Sampler, check_sources


@dataclasses.dataclass(frozen=True)
class Users:
    """Who owns which row, and how many rows of a user a step takes.

    A plan with `unit=dp.Users(...)` protects all rows of a user together (user-level sampling,
    Charles et al., arXiv 2407.07737): a step draws users by the plan's sampling, takes at most
    `per_step` rows of each, and clips the gradient of the mean loss of these rows.

    **Guarantee.** What a user adds to a sum of clipped gradients depends on the model, the user's
    own rows and the secret of the sampler, and its norm is at most `l2_norm_bound`, however many
    rows there are and whatever they hold. So the plan's epsilon is that for users: of data sets
    that differ by a user with all rows, added, removed, zeroed out or replaced. `num_users` is
    public, as the number of examples is.

    Rows are chosen uniformly at random, without replacement, anew in each step: a function of the
    sampler's seed, the step and the user, by SHAKE256. Epsilon does not rest on that.

    | case | what happens |
    |---|---|
    | a user has more than `per_step` rows | so many are chosen at random |
    | a user has fewer | all are taken; the mean is over those, and the rest is padding |
    | a user has no row | is_padding_example is True: the user adds exactly zero |
    | a row's loss or gradient is not finite | the user adds exactly zero in this step |
    | a row's user is -1, and `num_users` is given | no step takes it; without, it is refused |
    | a row has several owners | see `of_owners` |

    Args:
        user_of_example: for each row the index of its user, from 0; with `num_users` also -1, to
            leave the row out. Of names: `np.unique(names, return_inverse=True)[1]`. None where only
            the accounting is needed, as in a plan that was read from JSON.
        per_step: the most rows of a user in a step, at least 1.
        num_users: how many users there are. None for the largest index plus 1.

    Raises:
        ValueError: an argument has the wrong type or is out of its range, or there are no rows.
    """

    user_of_example: Int[np.ndarray, " rows"] | Int[Array, " rows"] | None = dataclasses.field(
        repr=False, compare=False
    )
    per_step: int
    num_users: int | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        users, num_users = self.user_of_example, self.num_users
        checked = {"per_step": whole_number("per_step", self.per_step, least=1, most=2**31)}
        if num_users is not None:
            checked["num_users"] = whole_number("num_users", num_users, least=1, most=2**53)
        if users is not None:
            users = _checked_users(users, num_users)
            checked = {"num_users": int(users.max()) + 1, **checked, "user_of_example": users}
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of_owners(cls, owners: Iterable[Iterable[int]], per_step: int) -> "Users":
        """Users of rows that belong to several people: of messages, of pictures with many faces.

        Those who own a row together are one user of the result, with all rows that just they own.
        Two groups that share a person cannot both be users: that person would count twice. So
        groups are chosen, and the rows of all others are left out. First come groups of the fewest
        owners, then those with the most rows, then those whose row comes first (the greedy choice
        of Ganesh et al. 2025, arXiv 2503.03622, but that all rows of a group are one example).

        **Guarantee.** Nobody owns rows of two users of the result. So the plan's epsilon is that
        for people in the fixed-graph model of that paper: of data sets with the same `owners` that
        differ in the rows of one person, which are emptied, or replaced, as the plan's relation
        says. **Who owns which row is taken for public**: the groups that are chosen, and
        `num_users`, follow from it, and from nothing else. If it is secret who wrote to whom, give
        each row to one owner that does not depend on the others, such as the sender, by `Users`
        itself. Then the others are not protected.

        | case | what happens |
        |---|---|
        | each row has one owner | all rows are kept; users with more rows have smaller numbers |
        | somebody has a row alone | that person's shared rows are left out: drop the row first |
        | an owner of a row is named twice | once counts |
        | a row has no owner | refused: give it to somebody, or leave it out |

        Args:
            owners: for each row the numbers of those who own it, from 0 to 2^53; at least one.
            per_step: as for `Users`.

        Returns:
            The users; rows that are left out have `user_of_example` -1.

        Raises:
            ValueError: `owners` holds something else, or there are no rows.
        """
        of_rows = [_owners(row, its) for row, its in enumerate(entries("owners", owners, "rows"))]
        rows, user_of = collections.Counter(of_rows), dict[frozenset[int], int]()
        taken = set[int]()
        for its in sorted(rows, key=lambda its: (len(its), -rows[its])):
            if taken.isdisjoint(its):
                user_of[its] = len(user_of)
                taken |= its
        users = np.array([user_of.get(its, -1) for its in of_rows], int)
        return cls(users, per_step, len(user_of) or None)

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self._rows_by_user[0])

    def loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """The loss of one user, from the loss of one row.

        It is the mean over the rows that are there, in float32 or wider. Give it to
        `filter_clipped_grad`, so that it is clipped once a user.

        Args:
            loss: `loss(model, *row)`, or with `key=...`: each row then gets its own key.

        Returns:
            `loss(model, *rows, is_padding_row)`, where rows have `per_step` rows in front, and with
            `key=...` if the given loss takes one.

        Raises:
            ValueError: it is no function.
        """
        function("loss", loss, "loss(model, *row)")

        def of_user(model: Any, *rows_and_mask: Any, **key: Any) -> Array:
            rows, is_padding_row = rows_and_mask[:-1], rows_and_mask[-1]
            keys = {name: jax.random.split(key, self.per_step) for name, key in key.items()}
            losses = jax.vmap(lambda row, key: loss(model, *row, **key))(rows, keys)
            losses = losses.astype(jnp.promote_types(losses.dtype, jnp.float32))
            there = jnp.sum(~is_padding_row)
            return jnp.sum(jnp.where(is_padding_row, 0, losses)) / jnp.maximum(there, 1)

        # It takes a key, by name, if the given loss does: the engine asks the signature.
        (*own, _), its = (list(inspect.signature(f).parameters.values()) for f in (of_user, loss))
        own += [key.replace(kind=key.KEYWORD_ONLY) for key in its if key.name == "key"]
        vars(of_user)["__signature__"] = inspect.Signature(own)
        vars(of_user)["unit"] = self
        return of_user

    def rows(
        self, sampler: Sampler, step: SupportsIndex, *, peek: bool = False
    ) -> tuple[Int64[np.ndarray, "n k"], Bool[np.ndarray, "n k"], Bool[np.ndarray, " n"]]:
        """The rows of one step's batch, on several hosts those of this host's users.

        Args:
            sampler: draws users: `num_users` is its number of examples.
            step: as for the sampler's `batch`.
            peek: the same.

        Returns:
            `(rows, is_padding_row, is_padding_example)`: positions of rows in the data set, a user
            in each slot; which of them are padding; and which slots hold no user, or one without
            rows. Behind a user's rows stand the same again, so that the loss of padding is finite
            where that of the rows is; a slot without rows has -1. **Not private.**

        Raises:
            ValueError: the sampler draws from another number of users, there is no
                `user_of_example`, or as for the sampler's `batch`.
        """
        if sampler.num_examples != self.num_users:
            raise ValueError(
                f"the sampler draws from {sampler.num_examples} examples, and there are "
                f"{self.num_users} users: make it for users, plan.sampler(users.num_users)."
            )
        users, _ = sampler.batch(step, peek=peek)
        order, starts = self._rows_by_user
        rows = np.full((len(users), self.per_step), -1)
        is_padding_row = np.ones(rows.shape, bool)
        for slot in np.flatnonzero(users >= 0):
            user = int(users[slot])
            its = order[starts[user] : starts[user + 1]]
            if len(its) > self.per_step:
                purpose = "eqx_dp rows of a user", str(self.num_users), str(step), str(user)
                numbers = numbers_of(sampler.seed, purpose, len(its))
                its = its[np.sort(np.argsort(numbers)[: self.per_step])]
            if len(its) > 0:
                rows[slot] = np.resize(its, self.per_step)
                is_padding_row[slot, : len(its)] = False
        return rows, is_padding_row, np.all(is_padding_row, axis=1)

    def take(
        self, sampler: Sampler, step: SupportsIndex, *sources: PyTree[Any], peek: bool = False
    ) -> tuple[tuple[PyTree[Any], ...], Bool[np.ndarray, " capacity"]]:
        """The rows of one step's batch, as the loss of a user takes them.

        ```python
        (x, y, is_padding_row), is_padding_example = users.take(sampler, t, xs, ys)
        ```

        Args:
            sampler: as for `rows`.
            step: as for `rows`.
            *sources: Numpy or JAX arrays, or trees of them, with all rows along the leading axis.
            peek: as for `rows`.

        Returns:
            `((*rows, is_padding_row), is_padding_example)`: for each source an array, or a tree of
            them, of shape (capacity, per_step, ...). A slot without rows holds NaN, or 0 in
            integers; both masks leave it out. **Not private.**

        Raises:
            ValueError: as for `rows`; or a source holds something other than arrays, or another
                number of rows.
        """
        rows, is_padding_row, is_padding_example = self.rows(sampler, step, peek=peek)
        check_sources(sources, self.num_rows)
        flat = drawn_from(sources, rows.ravel(), rows.ravel() < 0)
        taken = jax.tree.map(lambda x: x.reshape(*rows.shape, *x.shape[1:]), flat)
        return (*taken, is_padding_row), is_padding_example

    @functools.cached_property
    def _rows_by_user(self) -> tuple[np.ndarray, np.ndarray]:
        """All rows, ordered by user, and where those of each user begin."""
        if self.user_of_example is None or self.num_users is None:
            raise ValueError(
                "user_of_example is None, so nobody knows whose a row is. Give the users of all "
                "rows: dataclasses.replace(plan, unit=dp.Users(user_of_example, per_step))."
            )
        users = np.asarray(self.user_of_example)
        order = np.argsort(users, kind="stable")
        return order, np.searchsorted(users[order], np.arange(self.num_users + 1))


def _checked_users(users: Any, num_users: int | None) -> Int64[np.ndarray, " rows"]:
    """The users of all rows, or a ValueError."""
    expect("user_of_example", users, (np.ndarray, jax.Array), "an array, with one user a row")
    found = np.asarray(users)
    if found.ndim != 1 or found.dtype.kind not in "iu" or not found.size:
        raise ValueError(
            "user_of_example must hold whole numbers, one a row, and at least one row; found "
            f"{shown(users)}. Of names: np.unique(names, return_inverse=True)[1]. Of rows that "
            "belong to several people: dp.Users.of_owners(owners, per_step)."
        )
    most = 2**53 if num_users is None else num_users
    if found.min() < (0 if num_users is None else -1) or not 0 <= found.max() < most:
        raise ValueError(
            f"user_of_example must be from 0 to {most - 1}; found {found.min()} to {found.max()}. "
            "To leave rows out (-1, but not for all), give num_users."
        )
    return found.astype(np.int64)


def _owners(row: int, owners: Any) -> frozenset[int]:
    """Who owns a row, or a ValueError."""
    name = f"owners[{row}] (names: np.unique; padding: leave it out)"
    found = [whole_number(name, x, least=0, most=2**53) for x in entries(name, owners, "numbers")]
    if not found:
        raise ValueError(f"{name} must hold at least one number: whose the row is; found none.")
    return frozenset(found)
