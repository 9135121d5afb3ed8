"""Training data and drafters: what a target wrote, and what learns from it."""
