"""Decoding for callers: options, requests, compiled programs, scheduling and results."""
