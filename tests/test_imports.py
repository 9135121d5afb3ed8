"""What importing a module loads: nothing of specjax but what it is for, and no large library."""

import subprocess
import sys

import pytest
from commands import ROOT

LARGE = ("flax", "orbax", "optax", "tokenizers", "gguf", "safetensors")


@pytest.mark.parametrize(
    ("imported", "own", "without"),
    [
        ("specjax.sampling", "specjax.sampling", LARGE),
        ("specjax.metrics", "specjax.metrics", ("jax", *LARGE)),
        ("specjax.controllers", "specjax.controllers", ("jax", *LARGE)),
        # Those alone who save or load a checkpoint need Orbax.
        ("specjax.loading.load, specjax.loading.checkpoints", "specjax", ("orbax",)),
    ],
)
def test_a_module_loads_no_more_than_it_needs(imported, own, without):
    code = f"import sys, {imported}; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    loaded = ran.stdout.split()
    ours = [name for name in loaded if name.startswith("specjax.")]
    assert [name for name in ours if name != own and not name.startswith(f"{own}.")] == []
    assert not {name.partition(".")[0] for name in loaded} & set(without)
    assert ours
