"""Medusa."""
