"""What a private training step will cost: its memory before it runs, its time as measured."""

from .memory import MemoryPlan as MemoryPlan
from .memory import plan_memory as plan_memory
from .tuning import Tuning as Tuning
from .tuning import tune as tune
