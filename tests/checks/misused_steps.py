"""Training steps with one fault each, in an otherwise honest step."""

MISUSED = {}
