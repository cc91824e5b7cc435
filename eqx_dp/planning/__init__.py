"""What a private training step will cost, before it runs."""

from .flops import FlopReport, flop_report
from .memory import CompiledBytes, MemoryPlan, plan_memory, read_compiled
from .microbatch import largest_microbatch, plan_microbatch
from .parts import DeviceBytes
from .textbook import TransformerShape

__all__ = [
    "CompiledBytes",
    "DeviceBytes",
    "FlopReport",
    "MemoryPlan",
    "TransformerShape",
    "flop_report",
    "largest_microbatch",
    "plan_memory",
    "plan_microbatch",
    "read_compiled",
]
