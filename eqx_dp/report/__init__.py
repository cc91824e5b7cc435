"""A report on a run, for people who were not there: one description, as JSON and as a page."""

from .description import FORMAT, description_of
from .page import page_of

__all__ = ["FORMAT", "description_of", "page_of"]
