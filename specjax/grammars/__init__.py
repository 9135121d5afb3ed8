"""Grammars that constrain decoding: regular expressions and JSON Schema."""
