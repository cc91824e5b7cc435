"""What a traced training step is checked against."""

from .precision import check_precision as check_precision
from .precision_report import PrecisionReport as PrecisionReport
from .privacy import check_privacy as check_privacy
from .privacy_report import PrivacyReport as PrivacyReport
