"""Importing the sampling functions loads nothing else of specjax, and no Flax."""

import subprocess
import sys
from pathlib import Path


def test_sampling_loads_no_other_module():
    program = (
        "import sys, specjax.sampling\n"
        "names = [name for name in sys.modules if name.split('.')[0] in\n"
        "         ('specjax', 'flax', 'orbax', 'optax', 'tokenizers', 'gguf', 'safetensors')]\n"
        "print('\\n'.join(sorted(names)))\n"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    others = [
        name
        for name in done.stdout.split()
        if name not in ("specjax", "specjax.sampling") and not name.startswith("specjax.sampling.")
    ]
    assert others == []
    assert "specjax.sampling.chain" in done.stdout
