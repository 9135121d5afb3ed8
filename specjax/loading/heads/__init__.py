"""Trained heads: the class, saving and loading, and completion with the target's arrays."""
