"""Training: data written by a target, and the drafters trained on it."""
