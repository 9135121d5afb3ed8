"""Requests through a fixed number of slots: rows come and go while others decode."""
