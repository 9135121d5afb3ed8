"""What a result depends on beside its program: the versions of Python and packages."""

from __future__ import annotations

import importlib.metadata
import platform


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    found = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "flax", "specjax"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
