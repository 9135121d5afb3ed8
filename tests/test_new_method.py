"""A method is added by a folder of its own and its line in the registry (docs/extending.md)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = """
import sys

import jax
from conftest import tiny_config
from tiny_models import medusa_head

import specjax
from specjax.apps.run import decode
from specjax.loading.load import random_model
from specjax.methods import saved_heads
from specjax.methods.heads.head import Head
from specjax.methods.toy.head import MedusaConfig

target = random_model(tiny_config(), 0, dtype="float32")
other = medusa_head(target, heads=2, spread=4.0)
config = MedusaConfig(**vars(other.config))
head = Head("toy", config, other.params, other.draft_ids, other.target)
saved_heads.save_head(head, sys.argv[1])
drafter = specjax.make_drafter("ngram+toy", target, sys.argv[1])
options = {"max_new_tokens": 12, "ignore_eos": True}
plain, drafted = (
    specjax.generate(target, [[1, 2, 3]], drafter=one, sampling=options)
    for one in ("none", drafter)
)
assert plain.token_ids == drafted.token_ids
assert drafted.drafted.sum()
assert "toy" in specjax.drafters.TRAINED
assert decode.main(["--list"]) == 0
"""


def test_a_copied_folder_is_a_method_with_heads_options_and_lists(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__", "shipped_heads")
    tree = shutil.copytree(ROOT / "specjax", tmp_path / "specjax", ignore=ignored).parent
    heads = "specjax/shipped_heads"
    (tree / heads).symlink_to(ROOT / heads)
    methods = tree / "specjax" / "methods"
    folder = shutil.copytree(methods / "medusa", methods / "toy", ignore=lambda *_: ["layout.py"])
    for file in folder.glob("*.py"):
        text = file.read_text().replace("methods.medusa", "methods.toy")
        file.write_text(text.replace('"medusa"', '"toy"').replace("MEDUSA", "TOY"))
    registry = methods / "registry.py"
    imported, listed = "from specjax.methods.medusa.method import MEDUSA\n", "        MEDUSA,\n"
    text = registry.read_text()
    assert imported in text
    assert listed in text
    text = text.replace(imported, imported + "from specjax.methods.toy.method import TOY\n")
    registry.write_text(text.replace(listed, listed + "        TOY,\n"))
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "head")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tree, ROOT / "tests", ROOT)))},
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "toy" in ran.stdout
    assert "one draft token per head; needs a trained head" in ran.stdout
