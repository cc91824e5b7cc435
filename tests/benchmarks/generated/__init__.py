"""Training steps made at random, and whether they leak: the opponent of `check_privacy`."""
