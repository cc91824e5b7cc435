"""Runs `python -m tests.benchmarks`."""

from .command import main

main()
