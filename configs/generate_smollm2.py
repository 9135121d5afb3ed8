"""Let the default model answer prompts: `python -m train.generate --config=FILE[:debug]`.

`--help` says what each field does.
"""

from specjax.apps.command_line.config_file import config_of
from train.generation.answers import AnswersConfig


def get_config(size=""):
    config = config_of(AnswersConfig)
    config.workdir = "build/generate_smollm2"
    if size == "debug":
        config.workdir = "build/generate_smollm2_debug"
        config.corpus.num_prompts = 10
        config.questions.num_asked = 10
        config.questions.max_tokens = 64
        config.max_prompt_tokens = 200
        config.max_new_tokens = 8
        config.batch_size = 4
    elif size:
        raise ValueError(f"size {size!r} is unknown: use debug, or leave it out")
    return config
