"""The benchmark of the default model; `:debug` is a size that runs in seconds."""

from ml_collections import config_dict

from specjax.cli.mesh_config import distributed_fields, mesh_fields


def get_config(size=""):
    if size not in ("", "debug"):
        raise ValueError(f"size {size!r} is unknown: use debug, or leave it out")
    config = config_dict.ConfigDict()
    config.target = "smollm2-135m-instruct"
    config.dtype = "auto"
    # JSONL in Spec-Bench's schema; without one the built-in prompts.
    config.prompts = config_dict.placeholder(str)
    config.per_task = 1
    config.max_new_tokens = 48
    # T(width) at these window sizes, batch sizes and capacities.
    config.widths = (1, 2, 4, 8, 16, 32)
    config.batch_sizes = (1, 4, 8, 16)
    config.capacities = (512, 8192)
    config.committed = 100
    # Measured beside the prediction: prompt lookup, and a drafter of each acceptance.
    config.num_speculative_tokens = 4
    config.ngram_tokens = 8
    config.acceptances = (0.6, 0.8, 0.9)
    # At the first batch size only: drafters that cost too much here.
    config.exit_layers = (15, 24)
    config.self_draft = True
    config.runs = 3
    # "auto" against plain decoding, by drafter, batch size and temperature. A mean whose 95 %
    # interval is wider than 3 % to a side is called unresolved: take more repeats.
    config.auto = config_dict.ConfigDict()
    config.auto.drafters = ("ngram", "draft_model", "eagle3", "ngram+eagle3")
    config.auto.batch_sizes = (1, 8)
    config.auto.temperatures = (0.0, 1.0)
    config.auto.prompts = 12
    config.auto.repeats = 5
    config.report = config_dict.placeholder(str)  # a JSON path
    # As in decode_smollm2.py.
    config.mesh = mesh_fields()
    config.distributed = distributed_fields()
    if size == "debug":
        config.max_new_tokens = 8
        config.widths = (1, 2)
        config.batch_sizes = (1, 2)
        config.capacities = (256, 512)
        config.acceptances = (0.8,)
        config.exit_layers = (15,)
        config.self_draft = False
        config.runs = 1
        config.auto.drafters = ("ngram", "ngram+eagle3")
        config.auto.batch_sizes = (2,)
        config.auto.temperatures = (0.0,)
        config.auto.prompts = 2
        config.auto.repeats = 2
    return config
