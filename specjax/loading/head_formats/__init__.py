"""Trained heads in the layouts of other tools: Medusa, EAGLE, DFlash, DSpark and speculators.

Tensors are stored as safetensors. Every name, shape and flag is checked, and an error lists all
that are missing or unexpected.
"""

from specjax.loading.head_formats.read_write import (
    FORMATS,
    head_kind,
    read_foreign,
    write_foreign,
)

__all__ = ["FORMATS", "head_kind", "read_foreign", "write_foreign"]
