"""The stages of `scripts/check_accelerator.py`, the most important first, with time limits."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parents[1]
_SPEED = (r"speed-up .*", r"tokens per pass .*", r"same tokens as plain .*")


@dataclass(frozen=True)
class Stage:
    """A command: arguments for Python, its time limit in seconds, patterns of lines to print."""

    name: str
    arguments: tuple[str, ...]
    seconds: float
    shown: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The command, to be run from the root of a clone."""
        return [sys.executable, *self.arguments]

    def summary(self, output: str) -> str:
        """Return the parts of `output` that match the patterns, each once, in one line."""
        found = (match[0] for one in self.shown for match in re.finditer(one, output))
        return "; ".join(dict.fromkeys(" ".join(one.replace("│", " ").split()) for one in found))


def stages(size: str, folder: Path) -> list[Stage]:
    """Return the stages at a size: "full" for an accelerator, "debug" for a CPU.

    Files that a later stage needs are in `folder`. The time limits of "full" add up to nine
    minutes.
    """
    debug = size == "debug"
    longer = 10 if debug else 1
    new_tokens = f"--config.sampling.max_new_tokens={8 if debug else 128}"
    drafters = "--config.drafter.name=" + ("ngram" if debug else "ngram,eagle3,ngram+eagle3")
    auto = "--config.num_speculative_tokens=auto"
    tree = ("--config.drafter.name=token_recycling",)
    if not debug:
        tree = ("--config.drafter.name=eagle3", "--config.tree.kind=dynamic")
        tree += ("--config.tree.num_nodes=32",)

    def decode(name: str, seconds: float, *fields: str) -> Stage:
        arguments = ("-m", "specjax.decode", "--config.batch_size=1", new_tokens, *fields)
        return Stage(name, arguments, longer * seconds, _SPEED)

    def script(name: str, seconds: float, path: str, *arguments: str, shown: str) -> Stage:
        return Stage(name, (str(SCRIPTS / path), *arguments), longer * seconds, (shown,))

    return [
        script("kernels", 40, "accelerator/kernels.py", shown=r"(?m)^.*error.*$"),
        decode("decode, fixed", 90, drafters),
        decode("decode, auto", 70, drafters, auto),
        decode("decode, trees", 45, *tree),
        script(
            *("engine", 50, "load_test.py", "--rate=0", "--num_speculative_tokens=3"),
            *(("--requests=3", "--slots=2", "--new_tokens=2,6") if debug else ("--requests=64",)),
            shown=r"(?m)^(?:lost|tokens_per_second|ended).*$",
        ),
        script(
            *("rounds at 8B", 150, "bench_accelerator.py", "--minutes=2"),
            *(f"--size={'debug' if debug else '8b'}", f"--out={folder / 'rounds.jsonl'}"),
            shown=r"(?m)^.*(?:bytes/s|rows are left).*$",
        ),
        decode("weights in 8 bits", 45, "--config.weights=int8", drafters),
        script(
            *("compiling", 45, "costs/compile_seconds.py"),
            *(("--toy", "--drafters=ngram") if debug else ("--drafters=eagle3", "--auto")),
            shown=r"(?m)^.*\d\.\d.*$",
        ),
        Stage(
            "training",
            ("-m", "train.eagle", "--config=configs/train_eagle3.py:debug"),
            longer * 45,
            (r"(?m)^.*tokens/s.*$", r"(?m)^step 6.*$"),
        ),
        script(
            *("tests", 40, "accelerator/suite.py", *(("debug",) if debug else ())),
            shown=r"(?m)^.*(?:passed|failed|not installed).*$",
        ),
        script(
            *("transformers beside it", 35, "accelerator/transformers_beside.py"),
            *(("debug",) if debug else ()),
            shown=r"(?m)^.*(?:tokens/s|not installed).*$",
        ),
    ]
