"""Tokenize text for training from scratch: `python -m train.corpus --config=FILE[:debug]`."""

from ml_collections import config_dict


def get_config(size=""):
    config = config_dict.ConfigDict()
    config.workdir = "build/corpus"  # the datasets; the same command resumes

    # One of both: files and folders of your own, such as texts,more.jsonl.gz, or a TFDS dataset, by
    # the directory that holds it or by its name.
    config.files = config_dict.placeholder(str)
    config.dataset = config_dict.placeholder(str)
    config.tfds = config_dict.ConfigDict()
    config.tfds.data_dir = config_dict.placeholder(str)
    config.tfds.split = "train"
    config.tfds.text_field = "text"

    # train = byte-level BPE of the corpus; else a model, or a directory with its tokenizer.
    config.tokenizer = "train"
    config.vocab_size = 8192  # of a tokenizer that is trained
    config.max_tokens = 512  # of a piece of a document; row_tokens of a trainer is at least that
    config.documents_per_part = 10_000  # what an interrupted run has to write again, at most
    config.limit = config_dict.placeholder(int)  # the first documents only

    if size == "debug":
        config.workdir = "build/corpus_debug"
        config.vocab_size = 300
        config.max_tokens = 64
        config.limit = 100
    elif size:
        raise ValueError(f"size {size!r} is unknown: use debug, or leave it out")
    return config
