"""Checkpoints on disk: their folders, their arrays by Orbax, and the numbered ones of a run."""
