"""Trained heads: the class, its checkpoints, and finding heads by name or path."""
