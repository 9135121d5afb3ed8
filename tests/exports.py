"""Heads to export, and exports changed as another tool might have."""

import functools
import json

import heads
import numpy as np
from heads import noisy
from safetensors.numpy import load_file, save_file

from specjax.files.folder_marker import MARKER
from specjax.loading.head_formats import write_foreign
from specjax.loading.heads.head import Head, TargetMetadata
from specjax.models.heads.medusa import MedusaConfig, parameter_table

VOCABULARY = 40
eagle_head = functools.cache(heads.eagle_head)


@functools.cache
def medusa_head(target, vocabulary=None, original=False, layers=1, seed=0):
    size = target.config.vocab_size
    width = target.config.hidden_size
    config = MedusaConfig(width, size, 3, layers, vocabulary or size, original)
    ids = None
    if vocabulary is not None:
        rng = np.random.default_rng(seed)
        ids = np.sort(rng.choice(size, vocabulary, replace=False)).astype(np.int32)
    params = noisy(parameter_table(config), seed, 0.3)
    return Head("medusa", config, params, ids, TargetMetadata.of(target))


def written(tmp_path, head, form, target, **options):
    path = tmp_path / "head"
    write_foreign(head, path, form, target, **options)
    return path


def edit(path, config=None, tensors=None, drop=()):
    """Change an export as another tool, or an accident, might have."""
    values = json.loads((path / "config.json").read_text()) | (config or {})
    (path / "config.json").write_text(json.dumps(values))
    (file,) = path.glob("*.safetensors")
    # Saving drops the notes of specjax, and it is no longer what specjax wrote.
    (path / MARKER).unlink(missing_ok=True)
    stored = {name: value for name, value in load_file(file).items() if name not in drop}
    stored |= {name: np.ascontiguousarray(value) for name, value in (tensors or {}).items()}
    save_file(stored, file)
