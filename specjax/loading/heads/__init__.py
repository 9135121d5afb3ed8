"""Trained heads: the class, saving and reading, and completion with the target's arrays."""
