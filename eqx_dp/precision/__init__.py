"""Which dtype each stage of a private training step uses."""

from .files import available_policies as available_policies
from .files import load_policy as load_policy
from .loss_scale import LossScale as LossScale
from .matmul import Matmul as Matmul
from .matmul import MatmulPrecision as MatmulPrecision
from .matmul import matmul_precision as matmul_precision
from .module_rule import ModuleRule as ModuleRule
from .pairing import agreed_policy as agreed_policy
from .pairing import apply_policy as apply_policy
from .pairing import inside_engine as inside_engine
from .policy import JmpPolicy as JmpPolicy
from .policy import Policy as Policy
from .policy import cast_parameters as cast_parameters
from .policy import checked_policy as checked_policy
from .policy import dtypes_of as dtypes_of
from .ranges import check_decompositions as check_decompositions
from .ranges import check_noise_range as check_noise_range
from .ranges import check_sum_range as check_sum_range
from .refusals import refusal as refusal
from .refusals import refusals_name as refusals_name
from .schema import schema_text as schema_text
from .stages import stage as stage
from .text import parse_policy as parse_policy
