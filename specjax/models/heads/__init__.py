"""Trained draft heads: EAGLE, Medusa, and draft models that use the target's embedding."""
