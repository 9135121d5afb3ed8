"""Decode the same token ids with specjax and with transformers, in turn, and print the ratios.

    python scripts/compare_transformers.py --prompts=FILE.jsonl [--per_task=2] [--max_new_tokens=96]

Both sides decode greedily in float32 on the CPU: plainly and with prompt lookup (transformers:
`prompt_lookup_num_tokens`, on top of its own dynamic cache); specjax also with `ngram+eagle3` and
draft lengths of `auto`, the costs measured in the first iteration. torch and transformers conflict
with the pins of specjax, so they run in a virtual environment of their own, named by --peer_python
(`make compare` builds it), as a process that answers one request per line. Times exclude loading
and compiling; each is the median of --runs runs, alternating between the systems.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

from absl import app, flags, logging

_PROMPTS = flags.DEFINE_string("prompts", None, "JSONL in Spec-Bench's schema; built-in if unset.")
_PER_TASK = flags.DEFINE_integer("per_task", 2, "Prompts of each task.")
_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 96, "New tokens at most.")
_RUNS = flags.DEFINE_integer("runs", 3, "Timed runs of each system.")
_LOOKUP = flags.DEFINE_integer("num_speculative_tokens", 8, "Draft length of both prompt lookups.")
_PREFILL = flags.DEFINE_integer("prefill_tokens", 1000, "Prompt length of the prefill comparison.")
_PEER = flags.DEFINE_string("peer_python", ".venv-peers/bin/python", "Python with transformers.")


class Peer:
    """transformers in its own process and environment."""

    def __init__(self, python: str, gguf: Path) -> None:
        self._process = subprocess.Popen(
            [python, Path(__file__).parent / "peers" / "transformers_peer.py", gguf],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.metadata = self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer process ended with code {self._process.wait()}")
        return json.loads(line)

    def decode(self, ids: list[int], new_tokens: int, lookup: int) -> dict[str, Any]:
        """New ids, and seconds of prefill and of the whole call."""
        request = {"ids": ids, "max_new_tokens": new_tokens, "lookup": lookup}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()


def main(argv: list[str]) -> None:
    """Run the comparison."""
    del argv
    logging.set_verbosity(logging.WARNING)
    import specjax
    from specjax.cli.built_in_prompts import questions_of
    from specjax.decoding import generate, prompts, session
    from specjax.decoding.options import DecodeOptions
    from specjax.loading import load

    model = specjax.load_model(load.DEFAULT_MODEL, dtype="float32")
    questions = questions_of(_PROMPTS.value)
    questions = prompts.select(questions, per_task=_PER_TASK.value)
    ids = [prompts.encode_prompt(model, question.first_turn) for question in questions]
    peer = Peer(_PEER.value, load.default_model_file())
    sampling = specjax.SamplingParams(max_new_tokens=_NEW_TOKENS.value)

    def ours(drafter: str, length: int | str | None) -> session.Session:
        return session.plan_session(
            model,
            ids,
            drafter=specjax.make_drafter(drafter, model),
            options=DecodeOptions(num_speculative_tokens=length, batch_size=1),
            requests=sampling,
        )

    sessions = {
        "plain": ours("none", None),
        "lookup": ours("ngram", _LOOKUP.value),
        "auto": ours("ngram+eagle3", "auto"),
    }
    engines = {name: generate.open_engine(one) for name, one in sessions.items()}
    rates: dict[str, list[float]] = {}
    outputs: dict[str, list[list[int]]] = {}
    for turn in range(_RUNS.value + 1):
        for name, lookup in (("plain", 0), ("lookup", _LOOKUP.value), ("auto", None)):
            mine = generate.decode_session(sessions[name], engine=engines[name])
            outputs[f"specjax {name}"] = mine.token_ids
            if turn:
                rates.setdefault(f"specjax {name}", []).append(mine.tokens_per_second)
                print(f"run {turn}: specjax {name}: {mine.tokens_per_second:.1f} tokens/s")
            if lookup is None:
                continue
            # The first iteration only warms both up.
            asked = ids if turn else ids[:1]
            theirs = [peer.decode(prompt, _NEW_TOKENS.value, lookup) for prompt in asked]
            seconds = sum(one["total_s"] - one["prefill_s"] for one in theirs)
            # Their first token comes with the prefill, ours with the first round.
            count = sum(len(one["ids"]) - 1 for one in theirs)
            outputs[f"transformers {name}"] = [one["ids"] for one in theirs]
            if turn:
                rates.setdefault(f"transformers {name}", []).append(count / seconds)
                print(f"run {turn}: transformers {name}: {count / seconds:.1f}", flush=True)

    print(
        f"\n{len(ids)} prompts, {_NEW_TOKENS.value} new tokens, greedy, float32, "
        f"{peer.metadata['threads']} threads; decode tokens/s, median (min..max) of {_RUNS.value}"
    )
    for name, values in rates.items():
        print(
            f"  {name:22s} {statistics.median(values):7.1f}  ({min(values):.1f}..{max(values):.1f})"
        )
    for name, other in (("plain", "plain"), ("lookup", "lookup"), ("auto", "plain")):
        pairs = zip(rates[f"specjax {name}"], rates[f"transformers {other}"], strict=True)
        ratios = [a / b for a, b in pairs]
        print(
            f"  specjax {name} / transformers {other} = {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}..{max(ratios):.2f})"
        )
    compare_prefill(model, peer)
    reference = outputs["transformers plain"]
    for name, tokens in outputs.items():
        same = sum(a == b for a, b in zip(tokens, reference, strict=True))
        print(f"same tokens: {same}/{len(ids)}  ({name} against transformers plain)")


def compare_prefill(model: Any, peer: Peer) -> None:
    """Print the time to read a long prompt on both sides."""
    import numpy as np

    import specjax
    from specjax.decoding import generate, session

    length = _PREFILL.value
    ids = np.random.default_rng(0).integers(100, 40000, length).tolist()
    one = session.plan_session(model, [ids], requests=specjax.SamplingParams(max_new_tokens=1))
    engine = generate.open_engine(one)
    mine, theirs = [], []
    for turn in range(_RUNS.value + 1):
        ours = generate.decode_session(one, engine=engine)
        answer = peer.decode(ids, 1, 0)
        if turn:
            mine.append(ours.prefill_s + ours.decode_s)
            theirs.append(answer["prefill_s"])
    ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
    print(
        f"  first token of {length} tokens: specjax {statistics.median(mine):.2f} s, "
        f"transformers {statistics.median(theirs):.2f} s, ratio {ratio:.2f}"
    )


if __name__ == "__main__":
    app.run(main)
