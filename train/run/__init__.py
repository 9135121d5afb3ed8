"""A training run: set-up, loop, step, checkpoints, metrics and evaluation."""
