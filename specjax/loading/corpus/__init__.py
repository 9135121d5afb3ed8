"""Corpora of text: documents in files and TFDS datasets, their tokens, and an index of them."""
