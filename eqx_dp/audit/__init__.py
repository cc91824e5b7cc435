"""Attacks on private training: what they find, beside what a plan says."""

from . import canaries

__all__ = ["canaries"]
