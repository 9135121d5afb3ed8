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
jaxtyping.install_import_hook("specjax", "beartype.beartype")

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
