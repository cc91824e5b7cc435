"""Where a parameter meets data: one file a kind of equation.

A kind is a module with `name`, `claims`, `residuals` and `gradient` (see `use.Kind`); one whose
gradient is a sum of outer products also has `matrix_axes` and `factors` (`use.MatrixKind`). To add
one, write its file and enter it here. What no kind claims is a use of the kind `vjp`.
"""

from . import contraction, convolution, lookup, scale, shift, vjp
from .use import Kind, MatrixKind, Operation, ParamUse, ScanUse, as_matrices, operation_of

KINDS: tuple[Kind, ...] = (contraction, convolution, lookup, scale, shift)

__all__ = [
    "KINDS",
    "Kind",
    "MatrixKind",
    "Operation",
    "ParamUse",
    "ScanUse",
    "as_matrices",
    "operation_of",
    "shift",
    "vjp",
]
