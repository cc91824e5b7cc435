"""A report on a run, for people who were not there: one description, as JSON and as a page."""

from .description import FORMAT as FORMAT
from .description import description_of as description_of
from .page import page_of as page_of
