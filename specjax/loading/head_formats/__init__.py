"""Trained heads in the layouts of other tools: Medusa, EAGLE-1/2, EAGLE-3 and speculators.

Tensors are stored as safetensors. Every name, shape and flag is checked, and an error lists all
that are missing or unexpected.
"""

from specjax.loading.head_formats.read_write import (
    FORMATS,
    KINDS,
    head_format,
    read_foreign,
    write_foreign,
)

__all__ = ["FORMATS", "KINDS", "head_format", "read_foreign", "write_foreign"]
