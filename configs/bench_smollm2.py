"""The benchmark of the default model; `:debug` is a size that runs in seconds.

What each field does is said in specjax/cli/bench_config.py.
"""

from specjax.cli.bench_config import BenchConfig
from specjax.cli.config_file import config_of


def get_config(size=""):
    if size not in ("", "debug"):
        raise ValueError(f"size {size!r} is unknown: use debug, or leave it out")
    config = config_of(BenchConfig)
    config.target = "smollm2-135m-instruct"
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
