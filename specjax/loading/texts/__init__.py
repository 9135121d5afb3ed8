"""Texts of many documents, from files and data sets, as tokens."""
