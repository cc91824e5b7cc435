"""What makes a sum of clipped gradients private: sampling, noise, and the plan that ties them."""

from . import optimizers as optimizers
from .accounting import SENSITIVITY_OF_UNIT_NORM as SENSITIVITY_OF_UNIT_NORM
from .gaussian import can_certify as can_certify
from .keys import Secret as Secret
from .keys import checked_secret as checked_secret
from .keys import digest as digest
from .keys import fold_text as fold_text
from .keys import fold_texts as fold_texts
from .keys import fresh_secret as fresh_secret
from .keys import key_from_secret as key_from_secret
from .keys import printed_without_key as printed_without_key
from .keys import refuse_to_pickle as refuse_to_pickle
from .keys import shape_of_keys as shape_of_keys
from .keys import warn_of_small as warn_of_small
from .noise import GaussianPrivatizerState as GaussianPrivatizerState
from .noise import NoiseMark as NoiseMark
from .noise import add_noise as add_noise
from .noise import gaussian_privatizer as gaussian_privatizer
from .plan import NeighboringRelation as NeighboringRelation
from .plan import PrivacyPlan as PrivacyPlan
from .sample_size import SampleSize as SampleSize
from .sample_size import Sampling as Sampling
from .sampling import OVERFLOW_PROBABILITY as OVERFLOW_PROBABILITY
from .sampling import PoissonSampler as PoissonSampler
from .users import Users as Users
