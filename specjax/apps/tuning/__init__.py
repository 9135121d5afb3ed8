"""Measured costs and acceptance by rank, and the tree that they make fastest."""
