"""The per-example gradient engine."""

from . import clipping as clipping
from .api import filter_clipped_grad as filter_clipped_grad
from .api import filter_clipped_sum as filter_clipped_sum
from .api import filter_value_and_clipped_grad as filter_value_and_clipped_grad
from .arguments import METHODS as METHODS
from .arguments import FilterSpec as FilterSpec
from .arguments import MethodName as MethodName
from .arguments import check_numbers as check_numbers
from .arguments import checked_trainable as checked_trainable
from .arguments import takes_key as takes_key
from .calls import Mark as Mark
from .calls import Prepared as Prepared
from .calls import mark_of as mark_of
from .calls import parts_that_stay as parts_that_stay
from .clip import PerExample as PerExample
from .clipped_grad import ClippedGrad as ClippedGrad
from .clipping import Quantile as Quantile
from .explain import Explanation as Explanation
from .explain import checked_grad_fn as checked_grad_fn
from .explain import described as described
from .explain import explain as explain
from .uses import scattering_of as scattering_of
