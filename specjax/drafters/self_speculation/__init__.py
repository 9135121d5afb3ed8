"""Drafters that run some of the target's layers, or all of them in fewer bits."""
