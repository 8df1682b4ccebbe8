"""How often a dense training saves its state."""

STATES = 20  # states saved over a training, at least
MAX_INTERVAL = 1000  # optimiser steps between two of them, at most


def save_interval(steps: int) -> int:
    """Optimiser steps between two states."""
    return max(1, min(MAX_INTERVAL, steps // STATES))
