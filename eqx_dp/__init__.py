"""Differentially private training for Equinox models in JAX."""
