"""Families of models: how each writes its config and names its tensors, a file a family."""
