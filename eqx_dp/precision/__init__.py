"""Which dtype each stage of a private training step uses."""
