"""Training of drafters on data that their target wrote, and of new models."""
