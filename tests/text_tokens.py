"""A dataset of tokens, with its tokenizer, of this repository's documentation."""

import json
from pathlib import Path

from train import corpus


def write_text_tokens(folder):
    """The directory of the dataset: 60 texts of 150 letters, in pieces of up to 32 tokens."""
    own = Path("docs/training.md").read_text()
    texts = [{"text": own[start : start + 150]} for start in range(0, 60 * 150, 150)]
    (folder / "own.jsonl").write_text("".join(json.dumps(one) + "\n" for one in texts))
    options = [f"--config.files={folder / 'own.jsonl'}", f"--config.workdir={folder / 'w'}"]
    options += ["--config=configs/corpus.py:debug", "--config.max_tokens=32"]
    assert corpus.main(options) == 0
    return folder / "w" / "tokens"
