"""The versions of Python and of packages that results depend on."""

from __future__ import annotations

import importlib.metadata
import platform


def versions() -> dict[str, str]:
    """Return the versions of Python, jax, jaxlib, flax and specjax by name."""
    version_of = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "flax", "specjax"):
        try:
            version_of[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version_of[name] = "not installed"
    return version_of
