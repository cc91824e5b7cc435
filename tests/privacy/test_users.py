"""Users as the unit: which rows a step takes, and how far one user moves a sum."""

import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import eqx_dp as dp
from tests.tiers import METHODS, curated

OWNERS = np.array([2, 0, 2, 4, 2, 2, 0, 2, 4])
USERS = dp.Users(OWNERS, 2)


def sampler(num_users, seed=2**40, **options):
    return dp.PoissonSampler(num_users, 1.0, seed=seed, **options)


def taken(users, sampler, step):
    """The rows that a step takes, by user."""
    drawn, _ = sampler.batch(step, peek=True)
    rows, is_padding_row, _ = users.rows(sampler, step, peek=True)
    by_user = zip(drawn.tolist(), rows, is_padding_row, strict=True)
    return {user: its[~mask].tolist() for user, its, mask in by_user if user >= 0}


# The rows that are taken, or how many of them, by user.
@pytest.mark.parametrize(
    ("owners", "per_step", "num_users", "expected"),
    [
        (OWNERS, 2, 6, [[1, 6], [], 2, [], [3, 8], []]),  # three users without rows
        (OWNERS, 9, None, [[1, 6], [], [0, 2, 4, 5, 7], [], [3, 8]]),  # more than anybody has
        (np.array([-1, 0, -1, 0, 0], np.int8), 2, 1, [2]),  # some belong to nobody
        (jnp.zeros(1, int), 4, None, [[0]]),
    ],
)
def test_rows_are_those_of_the_users_drawn(owners, per_step, num_users, expected):
    users = dp.Users(owners, per_step, num_users)
    draws = sampler(len(expected), pad_to=4)
    for user, its in taken(users, draws, 3).items():
        assert its == expected[user] or len(set(its)) == len(its) == expected[user]
    rows, is_padding_row, is_padding_example = users.rows(draws, 3)
    assert rows.shape == is_padding_row.shape == (draws.capacity, per_step)
    # A user's padding repeats rows of that user.
    np.testing.assert_array_equal(is_padding_example, rows.min(axis=1) < 0)
    drawn = draws.batch(3, peek=True)[0][~is_padding_example]
    np.testing.assert_array_equal(np.asarray(owners)[rows[~is_padding_example]].T - drawn, 0)
    xs = np.arange(len(owners))[:, None] * np.array([1, 10], np.float32)
    ((x, y), z, mask), padding = users.take(draws, 3, (xs, jnp.asarray(xs)), xs, peek=True)
    for found in (x, y, z):
        np.testing.assert_array_equal(found, np.where(rows[..., None] < 0, np.nan, xs[rows]))
    np.testing.assert_array_equal(mask, is_padding_row)
    np.testing.assert_array_equal(padding, is_padding_example)


def test_rows_are_chosen_uniformly_and_independently():
    """All pairs of five rows alike, whatever another user or the last step took."""
    users, draws = dp.Users(np.arange(10) % 2, 2), sampler(2)
    found, pairs = [taken(users, draws, step) for step in range(1000)], {}
    for pair in itertools.combinations(range(5), 2):
        pairs |= {tuple(2 * row + user for row in pair): len(pairs) // 2 for user in (0, 1)}
    one, two = (np.array([pairs[tuple(its[user])] for its in found]) for user in (0, 1))
    for both, size in ((one, 10), (one + 10 * two, 100), (one[1:] + 10 * one[:-1], 100)):
        assert stats.chisquare(np.bincount(both, minlength=size)).pvalue > 1e-3
    hosts = [taken(users, sampler(2, hosts=2, host=host), 5) for host in (0, 1)]
    assert hosts[0] | hosts[1] == found[5]
    assert [taken(users, sampler(2, seed=2**41), step) for step in range(9)] != found[:9]


def test_nobody_owns_rows_of_two_users():
    by_hand = [[2, 7], [5], [2], [5, 5], [7, 9], [9, 7], [2, 5]]
    assert dp.Users.of_owners(by_hand, 2).user_of_example.tolist() == [-1, 0, 1, 0, 2, 2, -1]
    rng = np.random.default_rng(0)
    for people in (3, 6, 30):
        owners = [rng.choice(people, rng.integers(1, 4), replace=False) for _ in range(40)]
        users = dp.Users.of_owners(owners, 3)
        user_of = users.user_of_example
        pairs = [*zip(owners, user_of, strict=True)]
        user_of_person = {x: user for its, user in pairs if user >= 0 for x in its}
        for its, user in pairs:
            others = {user_of_person.get(x) for x in its}
            assert others == {user} if user >= 0 else others != {None}
        assert users.num_users == user_of.max() + 1 == len(set(user_of) - {-1})
        rows = np.concatenate([*taken(users, sampler(users.num_users), 0).values()])
        assert set(user_of[rows]) == set(range(users.num_users))


HOSTILE = {
    "alike": [1, 1, 1, 1],
    "cancel": [1, -1, 1, -1],
    "huge": [1e15, 1, 1e-15, 1e15],
    "not finite": [np.nan, 1, np.inf, 1],
}


@pytest.mark.optimized
@pytest.mark.parametrize("method", curated(METHODS, ["book_keeping"]))
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_user_moves_the_sum_by_at_most_the_norm_bound(kind, method):
    """In exact arithmetic: users with 2, 40 and 4 rows."""
    rng, users = np.random.default_rng(0), dp.Users(np.repeat([0, 1, 2], [2, 40, 4]), 4)
    loss = users.loss(lambda w, x, y: jnp.sum((w @ x - y) ** 2))
    options = {"l2_clip_norm": 1e-6, "rescale_to_unit_norm": True, "method": method}
    grad_fn = dp.filter_clipped_grad(loss, **options)
    xs, ys, w = (rng.normal(size=size).astype(np.float32) for size in ((46, 3), (46, 2), (2, 3)))
    (x, y, mask), _ = users.take(sampler(3), 0, xs, ys)
    x = x * np.array(HOSTILE[kind], np.float32)[:, None]
    for user in range(3):
        moved = grad_fn(w, x, y, mask, is_padding_example=np.arange(3) != user)
        square = sum(Fraction(float(entry)) ** 2 for entry in np.ravel(moved))
        assert square == 0 if kind == "not finite" else 0.99 < square <= 1


def test_the_loss_is_the_mean_over_the_rows_that_are_there():
    users = dp.Users(np.array([0, 0, 0, 1]), 4)
    (x, mask), padding = users.take(sampler(2), 0, np.array([1.0, 2, 4, 8], np.float32))
    batch, w = {"is_padding_example": padding}, jnp.ones(())

    def gradient(loss, **key):
        grad_fn = dp.filter_clipped_grad(users.loss(loss), l2_clip_norm=np.inf)
        return grad_fn(w, x, mask, **batch, **key)

    assert float(gradient(lambda w, x: w * jnp.log(x))) == pytest.approx(np.log(8) * 4 / 3)
    keyed = lambda w, x, *, key: w * jax.random.normal(key)  # noqa: E731
    keys = [jax.random.split(of_user, 4) for of_user in jax.random.split(jax.random.key(0))]
    normals = np.array([jax.vmap(jax.random.normal)(of_user) for of_user in keys])
    expected = np.mean(normals, axis=1, where=~mask).sum()
    assert float(gradient(keyed, key=jax.random.key(0))) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="takes a key and none was given"):
        gradient(keyed)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: dp.Users(np.zeros((3, 2), int), 2), "several people: dp.Users.of_owners"),
        (lambda: dp.Users(np.array([-1, 0]), 2), "found -1 to 0. To leave rows out"),
        (lambda: dp.Users.of_owners([[1], []], 2), r"owners\[1\] .* must hold at least one number"),
        (lambda: dp.Users.of_owners([[1], ["b"]], 2), r"owners\[1\] .* must be a whole number"),
        (lambda: dp.Users.of_owners([1], 2), r"owners\[0\] .* must be a tuple of numbers"),
        (lambda: dp.Users.of_owners([], 2), "at least one row"),
        (lambda: dp.Users(np.array(["a", "b"]), 2), "np.unique"),
        (lambda: dp.Users(OWNERS, 2, 4), "from 0 to 3; found 0 to 4"),
        (lambda: USERS.rows(sampler(9), 0), "draws from 9 examples, and there are 5 users"),
        (lambda: USERS.loss(np.ones(2)), r"loss must be a function, loss\(model, \*row\)"),
        (lambda: dp.Users(None, 2, 5).rows(sampler(5), 0), "user_of_example is None"),
        (
            lambda: USERS.take(sampler(5), 0, np.ones(9), np.ones(5)),
            "source 1 has shape .5,., and the data set has 9",
        ),
    ],
)
def test_what_is_refused(make, reason):
    assert USERS == dp.Users(None, 2) != dp.Users(OWNERS, 3)  # by what a plan says of them
    with pytest.raises(ValueError, match=reason):
        make()
