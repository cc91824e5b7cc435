"""One file a method: ways to the sum of clipped per-example gradients."""
