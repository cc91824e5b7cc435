"""What a private training step will cost: its memory before it runs, its time as measured."""

from .memory import MemoryPlan as MemoryPlan
from .memory import plan_memory as plan_memory
from .tune import Tuning as Tuning
from .tune import tune as tune
