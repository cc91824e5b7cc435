"""Sums that rounding cannot move: part 2 of `eqx_dp/privacy/finite_precision.md`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from eqx_dp import device
from tests.sharding.losses import mesh_of
from tests.tiers import curated

pytestmark = pytest.mark.optimized

U = 2.0**-24
NUM, SIZE = 65_536, 64


def loss(w, x):
    return jnp.sum(w * x)


def clipped_sum(values, size, **options):
    """The clipped sum of some numbers, the examples, behind which there is padding."""
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0, microbatch_size=size, **options)
    slots = -(-len(values) // (8 * size)) * 8 * size
    x = np.zeros((slots, 1), np.float32)
    x[: len(values), 0] = values
    mask = np.arange(slots) >= len(values)
    return float(eqx.filter_jit(grad_fn)(jnp.zeros(1), x, is_padding_example=mask)[0])


def hostile_numbers():
    """Examples whose sums of microbatches are rounded up, and down if one comes before them all."""
    found = np.full((NUM // SIZE, SIZE), 0.9)
    between, total, last = 0.9 * (SIZE - 2), 0.0, 0.9
    for row in found:
        ulp = float(np.spacing(np.float32(total + 0.9 * SIZE)))
        for place, share, other in ((0, 0.49, last), (-1, 0.51, None)):
            rest = between + (row[0] if other is None else other)
            row[place] = (np.floor((rest + 0.9) / ulp) + share) * ulp - rest
        total, last = total + between + row[0] + row[-1], row[-1]
    return found.ravel().astype(np.float32)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_one_example_moves_the_sum_by_no_more_than_the_sensitivity(platform):
    """In float64, and in the two floats of a machine that has none."""
    values = hostile_numbers()
    assert 0 < values.min() < values.max() < 0.99  # so that none is clipped
    without, there = values[: NUM - 1], np.concatenate([[0], values[: NUM - 1]])
    # Added up as they come, in float32, they move by more, though the one more adds nothing.
    plain = [
        np.add.accumulate(np.resize(x, (NUM // SIZE, SIZE)).sum(axis=1, dtype=np.float32))[-1]
        for x in (np.append(without, 0), there)
    ]
    assert abs(float(plain[0]) - float(plain[1])) > 2
    with device._made_for(platform):
        moved = clipped_sum(there, SIZE) - clipped_sum(without, SIZE)
    assert abs(moved) <= 2.002 * U * NUM


FIGURES = [
    (64, 8, {}, 6.68e-5),
    (8192, 1024, {}, 5.11e-3),
    (4096, 128, {}, 4.37e-3),
    (65_536, 64, {}, 8.78e-3),
    (65_536, 1024, {}, 1.19e-2),
    (4096, 128, {"normalize_by": 3.0}, 6.32e-3),
    (4608, 64, {"sharding": 8}, 5.36e-3),
]


@pytest.mark.parametrize(
    ("num", "size", "options", "rho"), curated(FIGURES, [FIGURES[0], FIGURES[-1]])
)
def test_clip_norms_leave_room_for_what_rounding_moves(num, size, options, rho):
    """The figures of the table, and on devices."""
    if "sharding" in options:
        options = {"sharding": dp.ShardingRules(mesh_of("auto", data=8), examples=("data",))}
    values = np.where(np.arange(num) == 3, 1e3, 0)
    divided = options.get("normalize_by", 1)
    adds = clipped_sum(values, size, **options) * divided
    assert 1 / adds - 1 == pytest.approx(rho, rel=0.02, abs=3e-6)
    # Nor does the microbatch matter much for examples that add up.
    assert clipped_sum(np.full(num, 5.0), size, **options) > 0.985 * num / divided
    # In float64 there is nothing to leave room for.
    with jax.enable_x64(True):
        wide = dp.filter_clipped_grad(loss, l2_clip_norm=1.0, microbatch_size=size)
        adds = wide(jnp.zeros(1, jnp.float64), values[:, None])[0]
    assert 1 - 2e-8 < float(adds) <= 1
