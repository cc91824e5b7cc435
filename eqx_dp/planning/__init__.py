"""The cost of a private training step: its memory before it runs, its measured time."""

from .memory import MemoryPlan as MemoryPlan
from .memory import plan_memory as plan_memory
from .tuning import Tuning as Tuning
from .tuning import tune as tune
