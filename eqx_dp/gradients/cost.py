"""What each way costs, and which one to take."""

from .leaves import Way, has_ghost, matrix_sizes
from .sites import lookup
from .taps import Site

# What moving one number to or from memory costs, in floating-point operations: near where it is
# used, and far from it. Measured on CPUs.
NEAR, FAR = 8, 40
_NEAR_BYTES = 8 * 2**20


def choose_way(sites: list[Site], num_examples: int) -> Way:
    """Takes the cheaper way to the norm and the sum of one leaf."""
    if not has_ghost(sites):
        return "kept"
    (site,) = sites
    if site.kind is lookup:
        return "ghost"
    groups, time, features_in, features_out = matrix_sizes(site)
    size = groups * features_in * features_out
    passes = 3 * (NEAR if 4 * size * num_examples <= _NEAR_BYTES else FAR)
    ghost = 2 * groups * time**2 * (features_in + features_out) if time > 1 else 0
    return "ghost" if ghost <= size * passes else "kept"
