"""The benchmark of the default model; `:debug` only shows that all parts run.

`--help` says what each field does.
"""

from specjax.apps.command_line.config_file import config_of
from specjax.apps.run.bench_config import BenchConfig


def get_config(size=""):
    if size not in ("", "debug"):
        raise ValueError(f"size {size!r} is unknown: use debug, or leave it out")
    config = config_of(BenchConfig)
    config.target = "smollm2-135m-instruct"
    if size == "debug":
        config.widths = (1, 2)
        config.batch_sizes = (1, 2)
        config.capacities = (256, 512)
        config.num_prompts = 2
        config.max_new_tokens = 8
        config.drafters = ("ngram", "ngram+eagle3")
        config.num_speculative_tokens = ("auto", 1)
        config.decoded_batch_sizes = (2,)
        config.temperatures = (0.0,)
        config.runs = 2
    return config
