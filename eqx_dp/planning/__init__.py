"""What a private training step will cost, before it runs."""

from .describe import Declared, Description, describe
from .flops import FlopReport, flop_report
from .memory import CompiledBytes, MemoryPlan, plan_memory, read_compiled
from .microbatch import largest_microbatch, plan_microbatch
from .narrowing import precision_sensitivity
from .parts import DeviceBytes, local_bytes
from .sensitivity_table import LayerError, PrecisionSensitivity
from .textbook import TransformerShape
from .tune import limit_of, tune
from .tuning import Trial, TunedGrad, Tuning

__all__ = [
    "CompiledBytes",
    "Declared",
    "Description",
    "DeviceBytes",
    "FlopReport",
    "LayerError",
    "MemoryPlan",
    "PrecisionSensitivity",
    "TransformerShape",
    "Trial",
    "TunedGrad",
    "Tuning",
    "describe",
    "flop_report",
    "largest_microbatch",
    "limit_of",
    "local_bytes",
    "plan_memory",
    "plan_microbatch",
    "precision_sensitivity",
    "read_compiled",
    "tune",
]
