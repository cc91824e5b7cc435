"""What a private training step will cost, before it runs."""

from .describe import Description as Description
from .describe import describe as describe
from .flops import FlopReport as FlopReport
from .flops import flop_report as flop_report
from .memory import MemoryPlan as MemoryPlan
from .memory import plan_memory as plan_memory
from .memory import read_compiled as read_compiled
from .microbatch import largest_microbatch as largest_microbatch
from .microbatch import plan_microbatch as plan_microbatch
from .narrowing import precision_sensitivity as precision_sensitivity
from .parts import DeviceBytes as DeviceBytes
from .parts import local_bytes as local_bytes
from .sensitivity_table import PrecisionSensitivity as PrecisionSensitivity
from .textbook import TransformerShape as TransformerShape
from .tune import limit_of as limit_of
from .tune import tune as tune
from .tuning import TunedGrad as TunedGrad
from .tuning import Tuning as Tuning
