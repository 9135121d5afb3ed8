"""Families of models: config fields and tensor names of each, one file per family."""
