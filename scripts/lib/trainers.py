"""The training commands of all methods, from their records."""

from __future__ import annotations

from specjax.methods import registry

METHODS = {
    training.name: training for method in registry.METHODS.values() for training in method.training
}
"""All ways to train, by the names that checkpoints record."""

TRAINERS = {name: training for name, training in METHODS.items() if training.alone}
"""Those of heads for a frozen target, which `reproduce_heads.py` trains."""
