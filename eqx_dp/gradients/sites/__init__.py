"""Where a parameter meets data: one file a kind of equation.

A kind is a module with `name`, `claims`, `keep` and `gradient` (see `site.Kind`); one
that can say more also has `matrices` and `from_matrix` (`site.MatrixKind`). To add one, write
its file and enter it here.
"""

from . import contraction, convolution, lookup, scale, shift
from .site import Kind, MatrixKind

KINDS: tuple[Kind, ...] = (contraction, convolution, lookup, scale, shift)

__all__ = ["KINDS", "Kind", "MatrixKind"]
