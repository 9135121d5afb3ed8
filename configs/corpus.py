"""Tokenize text for training from scratch: `python -m train.corpus --config=FILE[:debug]`.

`--help` says what each field does.
"""

from specjax.apps.command_line.config_file import config_of
from train.pretraining.tokens import CorpusConfig


def get_config(size=""):
    config = config_of(CorpusConfig)
    config.workdir = "build/corpus"
    if size == "debug":
        config.workdir = "build/corpus_debug"
        config.vocab_size = 300
        config.max_tokens = 64
        config.limit = 100
    elif size:
        raise ValueError(f"size {size!r} is unknown: use debug, or leave it out")
    return config
