"""The heads that draft: EAGLE, Medusa, and draft models with the target's embedding."""
