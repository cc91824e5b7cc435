"""What a traced training step is checked against."""

from .precision import check_precision
from .precision_report import PrecisionReport

__all__ = ["PrecisionReport", "check_precision"]
