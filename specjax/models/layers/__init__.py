"""The layers of a decoder."""
