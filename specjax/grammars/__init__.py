"""Grammars: regular expressions and JSON schemas as tables of a vocabulary's tokens."""
