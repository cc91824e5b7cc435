"""Monte Carlo accounting."""

CONFIDENCE = 1 - 1e-6


def epsilon(*a):
    return 1.0


def fixed_size_epsilon(*a):
    return 1.0


def fixed_size_event(*a):
    return None
