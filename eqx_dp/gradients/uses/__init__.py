"""Where a parameter is multiplied by data: one file a kind of equation (see `use.Kind`).

To add one, write its file and enter it here. A parameter that any other equation takes is formed.
"""

from . import contraction, convolution, lookup
from .use import Kind, Operation, ParamUse, ScanUse, operation_of

KINDS: tuple[Kind, ...] = (contraction, convolution, lookup)

__all__ = [
    "KINDS",
    "Kind",
    "Operation",
    "ParamUse",
    "ScanUse",
    "contraction",
    "convolution",
    "lookup",
    "operation_of",
]
