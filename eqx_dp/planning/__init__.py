"""What a private training step will cost, before it runs."""

from .flops import FlopReport, flop_report

__all__ = ["FlopReport", "flop_report"]
