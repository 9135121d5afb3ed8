"""Corpora of text: documents of files and of TFDS datasets, their tokens, and an index of these."""
