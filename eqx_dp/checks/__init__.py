"""What a traced training step is checked against."""

from .precision import check_precision
from .precision_report import PrecisionReport
from .privacy import check_privacy
from .privacy_report import PrivacyReport

__all__ = ["PrecisionReport", "PrivacyReport", "check_precision", "check_privacy"]
