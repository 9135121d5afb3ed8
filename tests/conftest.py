"""A strict session: warnings are errors, ranks never broadcast, every shape is checked."""

import os

# Before JAX is imported: a few devices, so that nothing relies on there being one.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import jax
import jaxtyping

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
# As everywhere in Python, an int will do where a float is declared.
jaxtyping.install_import_hook(
    "specjax", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
)

register_dataclass = jax.tree_util.register_dataclass


def register_unchecked(nodetype, data_fields, meta_fields, **rest):
    """`register_dataclass`, but JAX rebuilds specjax's nodes without __init__ and its checks.

    JAX puts shapes, booleans and placeholders where arrays are declared; only what specjax itself
    builds is to be checked.
    """
    if not nodetype.__module__.startswith("specjax"):
        return register_dataclass(nodetype, data_fields, meta_fields, **rest)

    def unflatten(meta, data):
        node = object.__new__(nodetype)
        for name, value in zip((*data_fields, *meta_fields), (*data, *meta), strict=True):
            object.__setattr__(node, name, value)
        return node

    def flatten(node):
        data = tuple((jax.tree_util.GetAttrKey(name), getattr(node, name)) for name in data_fields)
        return data, tuple(getattr(node, name) for name in meta_fields)

    jax.tree_util.register_pytree_with_keys(nodetype, flatten, unflatten)
    return nodetype


jax.tree_util.register_dataclass = register_unchecked

import pytest

from specjax.models.config import DecoderConfig
from specjax.models.loading import load_model, random_model


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than about 40 seconds; run with --slow")
    config.addinivalue_line("filterwarnings", "error")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        skip = pytest.mark.skip(reason="slow: run with --slow")
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(skip)
