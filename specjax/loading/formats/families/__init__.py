"""Families of models: the config fields and tensor names of each, one file per family."""
