"""Checks of a traced step: against its policy, and against its privacy plan."""

from .precision import PrecisionReport as PrecisionReport
from .precision import check_precision as check_precision
from .privacy import check_privacy as check_privacy
from .privacy_report import PrivacyReport as PrivacyReport
