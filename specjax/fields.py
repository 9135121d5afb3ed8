"""Names of nested fields, as a config's overrides write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dict's values by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        inside = isinstance(value, Mapping)
        found |= dotted(value, f"{prefix}{name}.") if inside else {prefix + name: value}
    return found
