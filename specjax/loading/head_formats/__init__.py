"""Trained heads in the layouts of other tools: Medusa, EAGLE-1/2, EAGLE-3 and speculators.

Tensors are read from and written to safetensors. Every name, shape and flag is accounted for; what
is missing or unexpected is an error that lists it.
"""

from specjax.loading.head_formats.read_write import (
    FORMATS,
    KINDS,
    head_format,
    read_foreign,
    write_foreign,
)

__all__ = ["FORMATS", "KINDS", "head_format", "read_foreign", "write_foreign"]
