"""A report on a run, for people who did not train it: one page of HTML."""

from .page import MARK as MARK
from .page import page_of as page_of
