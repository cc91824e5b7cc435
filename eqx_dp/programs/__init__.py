"""Reading and rewriting JAX programs."""

from .channels_last import channels_last
from .operations import loops, matmul_flops, primitives
from .scans import scan_arity

__all__ = ["channels_last", "loops", "matmul_flops", "primitives", "scan_arity"]
