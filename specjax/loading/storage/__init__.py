"""Checkpoints on disk: folders, arrays by Orbax or in safetensors, series of training runs."""
