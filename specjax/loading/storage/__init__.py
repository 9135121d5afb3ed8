"""Checkpoints on disk: their folders, their arrays by Orbax, and series of a run."""
