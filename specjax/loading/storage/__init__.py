"""Checkpoints on disk: their folders, their arrays by Orbax, and the series of a training run."""
