"""What makes a sum of clipped gradients private: sampling, noise, and the plan that ties them."""

from .accounting import SENSITIVITY_OF_UNIT_NORM
from .arguments import real_number, whole_number
from .keys import Secret, digest, fold_text, fold_texts, key_from_secret, shape_of_keys
from .noise import GaussianPrivatizerState, gaussian_privatizer
from .plan import NeighboringRelation, PrivacyPlan
from .random_bits import is_partitionable, random_bits
from .sample_size import SampleSize, Sampling
from .sampling import OVERFLOW_PROBABILITY, PoissonSampler
from .trade_off import TradeOff, trade_off_of

__all__ = [
    "OVERFLOW_PROBABILITY",
    "SENSITIVITY_OF_UNIT_NORM",
    "GaussianPrivatizerState",
    "NeighboringRelation",
    "PoissonSampler",
    "PrivacyPlan",
    "SampleSize",
    "Sampling",
    "Secret",
    "TradeOff",
    "digest",
    "fold_text",
    "fold_texts",
    "gaussian_privatizer",
    "is_partitionable",
    "key_from_secret",
    "random_bits",
    "real_number",
    "shape_of_keys",
    "trade_off_of",
    "whole_number",
]
