"""Measure the CPU-seconds of compiling, by program, of this checkout and of an earlier commit.

    python scripts/costs/compile_seconds.py --commit=HEAD~5 --drafters=none,ngram,eagle3 --auto

Each measurement is a process of its own without a cache of compiled programs: it compiles the
programs that `specjax.generate` runs for the default model (`--toy`: a random model of three
layers). Seconds are the process's own CPU time, all threads together, so that other work on the
machine adds little.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from absl import app, flags

_COMMIT = flags.DEFINE_string("commit", None, "An earlier commit to measure beside this checkout.")
_DRAFTERS = flags.DEFINE_list("drafters", ["none", "ngram", "eagle3"], "Drafters, each by itself.")
_AUTO = flags.DEFINE_bool("auto", False, 'With num_speculative_tokens="auto", else fixed.')
_BATCH = flags.DEFINE_integer("batch_size", 1, "Slots.", lower_bound=1)
_TOY = flags.DEFINE_bool("toy", False, "A random model of three layers; drafters without weights.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Of the requests.", lower_bound=0.0)
_CHILD = """
import json, sys, threading, time
import jax
drafter, auto, batch, toy, temperature = json.loads(sys.argv[1])
jax.config.update("jax_enable_compilation_cache", False)
seconds, lock, real = {}, threading.Lock(), jax.stages.Lowered.compile
def timed(lowered, *arguments, **options):
    name = str(lowered.compiler_ir().operation.attributes["sym_name"]).strip('"')
    with lock:  # programs that compile side by side would count for each other
        begin = time.process_time()
        compiled = real(lowered, *arguments, **options)
        seconds[name] = seconds.get(name, 0.0) + time.process_time() - begin
    return compiled
jax.stages.Lowered.compile = timed
import specjax
from specjax.loading.load import random_model
from specjax.models.config import DecoderConfig
if toy:
    model = random_model(DecoderConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=3, num_heads=4,
        num_kv_heads=2, head_dim=16, max_positions=512), 0)
else:
    model = specjax.load_model("smollm2-135m-instruct")
try:
    from specjax.engine.generate import open_engine
    from specjax.engine.options import DecodeOptions
    from specjax.engine.plan import plan_requests
except ModuleNotFoundError:  # an earlier commit
    from specjax.decoding.generate import open_engine
    from specjax.decoding.options import DecodeOptions
    from specjax.decoding.session import plan_session
options = {"num_speculative_tokens": "auto"} if auto else {}
begin = time.process_time()
loaded = None if drafter == "none" else specjax.make_drafter(drafter, model)
arguments = {"drafter": loaded, "options": DecodeOptions(batch_size=batch, **options)}
sampling = specjax.SamplingParams(max_new_tokens=200, temperature=temperature)
try:
    plan, _ = plan_requests(model, [[1, 2, 3]] * batch, sampling=sampling, **arguments)
except NameError:
    plan = plan_session(model, [[1, 2, 3]] * batch, requests=sampling, **arguments)
engine = open_engine(plan)
begin = time.process_time()
engine.compile()
whole = time.process_time() - begin
seconds["tracing and lowering"] = whole - sum(seconds.values())
print(json.dumps({"all": whole, **seconds}))
"""


def main(argv: list[str]) -> None:
    """Measure, and print a table for each drafter."""
    del argv
    here = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as folder:
        checkouts = {"this checkout": here}
        if _COMMIT.value is not None:
            there = Path(folder) / "checkout"
            git = ["git", "-C", str(here), "worktree"]
            subprocess.run([*git, "add", "--detach", str(there), _COMMIT.value], check=True)
            checkouts = {_COMMIT.value: there, **checkouts}
        try:
            for drafter in _DRAFTERS.value:
                found = {name: _measure(path, drafter) for name, path in checkouts.items()}
                _print(drafter, found)
        finally:
            if _COMMIT.value is not None:
                subprocess.run([*git, "remove", "--force", str(there)], check=True)


def _measure(checkout: Path, drafter: str) -> dict[str, float]:
    """Return the CPU-seconds of compiling an engine of a checkout, by program."""
    settings = drafter, _AUTO.value, _BATCH.value, _TOY.value, _TEMPERATURE.value
    arguments = json.dumps(settings)
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, arguments],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _print(drafter: str, found: dict[str, dict[str, float]]) -> None:
    print(f"{drafter}{', auto' if _AUTO.value else ''}: CPU-seconds")
    names = list(dict.fromkeys(name for seconds in found.values() for name in seconds))
    print(f"  {'':28}" + "".join(f"{name[:16]:>18}" for name in found))
    for name in names:
        cells = [seconds.get(name) for seconds in found.values()]
        print(f"  {name:28}" + "".join(f"{'' if c is None else f'{c:.1f}':>18}" for c in cells))
    if len(found) > 1:
        first, last = (seconds["all"] for seconds in found.values())
        print(f"  this checkout / {next(iter(found))}: {last / first:.2f}")


if __name__ == "__main__":
    app.run(main)
