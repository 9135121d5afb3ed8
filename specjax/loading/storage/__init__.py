"""Checkpoints on disk: their folders, their arrays by Orbax or in safetensors, and the series of a training run."""
