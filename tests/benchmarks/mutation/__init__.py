"""Mutants of privacy-critical modules, and the tests that should find each."""
