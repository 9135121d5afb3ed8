"""Decoded rows as JSON lines, compared with plain decoding, and what is derived from them."""
