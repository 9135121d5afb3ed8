"""EAGLE and EAGLE-3."""
