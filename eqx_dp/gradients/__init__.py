"""The per-example gradient engine."""
