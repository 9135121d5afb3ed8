"""Mixtures of experts in training: how many tokens each expert is sent, and their balance."""
