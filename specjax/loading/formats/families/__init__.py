"""Families of models: how each writes its config and names its tensors, one file per family."""
