"""A report on a run, for people who were not there: one page of HTML."""

from .page import MARK as MARK
from .page import page_of as page_of
