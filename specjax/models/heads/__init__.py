"""Trained draft heads: EAGLE, Medusa, MTP, and draft models with the target's embedding."""
