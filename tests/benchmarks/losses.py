"""The clip norm, attacked: losses drawn at random, on hostile numbers, by every method.

A loss is two losses of one matrix (products over time, convolutions, lookups, penalties, weights
that are masked, normed or centred), of which the second sees the matrix bent. It meets sets of
four examples: terms that cancel, numbers at the ends of their range, parameters of all sizes. Each
example is alone in a batch and its gradient is brought to norm one, so that all that rounding does
shows. `largest share` is what an example added at most, measured in float64; above 1 the guarantee
would be broken. Sets of which every example is selected away, because a number in it is not finite
in its dtype, prove nothing: `finite` counts the others. A loss that a dtype does not have, such as
complex products in bfloat16, is left out. A matrix that is seen bent is formed by every method, so
factored ones are not attacked here, but in `tests/gradients/test_clip_holds.py` (`test_uses`).
"""

import argparse
from collections.abc import Iterator

import jax
import numpy as np

import eqx_dp as dp
from tests.gradients.test_clip_holds import ATTACKS, METHODS, composition, shares

from .command import Part
from .page import Table

POLICIES = {
    "float32": None,
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
    "8 bits": "mixed_float8",
}


def _row(dtype: str, method: str, seeds: range, attacks: list[str]) -> dict[str, str]:
    policy = POLICIES[dtype] and dp.load_policy(str(POLICIES[dtype]))
    losses = sets = finite = above = 0
    largest = 0.0
    for seed in seeds:
        try:
            found = shares(composition(seed), method, attacks, policy)
        except AssertionError as error:
            print(f"seed {seed}, {dtype}, {method}: {error}", flush=True)
            above += 1
            continue
        except (TypeError, ValueError) as error:
            print(f"seed {seed}, {dtype}, {method}: left out: {error}"[:200], flush=True)
            continue
        losses, sets = losses + 1, sets + len(found)
        finite += sum(bool(np.any(share)) for share in found.values())
        largest = max(largest, *(float(np.max(share)) for share in found.values()))
        jax.clear_caches()
    row = {"dtype": dtype, "method": method, "losses": f"{losses:,}", "sets": f"{sets:,}"}
    row |= {"finite": f"{finite:,}", "largest share": f"{largest:.9f}", "above 1": f"{above}"}
    print(*row.values(), flush=True)
    return row


def _tables(options: argparse.Namespace) -> Iterator[Table]:
    attacks = ATTACKS[:2] if options.tiny else ATTACKS
    seeds = range(options.first, options.first + (1 if options.tiny else options.seeds))
    rows = [_row(dtype, method, seeds, attacks) for dtype in POLICIES for method in METHODS]
    yield Table("What an example adds, in clip norms", rows)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=20, help="losses for each dtype and method")
    parser.add_argument("--first", type=int, default=1000, help="the seed of the first")


PART = Part(__doc__, _tables, _options)
