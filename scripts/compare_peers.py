"""Decode the same token ids with specjax and with other engines, in turn, and print the ratios.

    python scripts/compare_peers.py --prompts=FILE.jsonl [--per_task=2] [--max_new_tokens=96]
    python scripts/compare_peers.py --peers=transformers,llama_cpp,openvino --weights=auto

All decode greedily on the CPU: plainly and with prompt lookup; specjax also with `ngram+eagle3` and
draft lengths of `auto`, the costs measured in the first iteration. transformers computes in
float32, llama.cpp with the file's weights and activations of 8 bits, OpenVINO with the file's
weights and what it chooses for the processor. They run in a virtual
environment of their own, named by --peer_python (`make compare` builds it), as processes that
answer one request per line (`peers/`). Times exclude loading and compiling; each is the median of
--runs runs, alternating between the systems.
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
_PEERS = flags.DEFINE_list("peers", ["transformers"], "transformers, llama_cpp, openvino.")
_WEIGHTS = flags.DEFINE_string("weights", "float", "Those of specjax: float, auto, int8, int4.")
_PYTHON = flags.DEFINE_string("peer_python", ".venv-peers/bin/python", "Python with the peers.")


class Peer:
    """Another engine in its own process and environment."""

    def __init__(self, name: str, gguf: Path) -> None:
        self._process = subprocess.Popen(
            [_PYTHON.value, Path(__file__).parent / "peers" / f"{name}_peer.py", gguf],
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
        """Return the new token ids, and the seconds of prefill and of the whole call."""
        request = {"ids": ids, "max_new_tokens": new_tokens, "lookup": lookup}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def decode_all(self, prompts: list[list[int]], lookup: int) -> tuple[list[list[int]], float]:
        """Return the new token ids of all prompts, and the tokens per second without prefill."""
        answers = [self.decode(ids, _NEW_TOKENS.value, lookup) for ids in prompts]
        seconds = sum(one["total_s"] - one["prefill_s"] for one in answers)
        # Their first token comes with the prefill, ours with the first round.
        count = sum(len(one["ids"]) - 1 for one in answers)
        return [one["ids"] for one in answers], count / seconds


def main(argv: list[str]) -> None:
    """Run the comparison."""
    del argv
    logging.set_verbosity(logging.WARNING)
    import specjax
    from specjax.cli.built_in_prompts import questions_of
    from specjax.decoding import generate, prompts, session
    from specjax.decoding.options import DecodeOptions
    from specjax.loading import load

    model = specjax.load_model(load.DEFAULT_MODEL, weights=_WEIGHTS.value)
    questions = questions_of(_PROMPTS.value)
    questions = prompts.select(questions, per_task=_PER_TASK.value)
    ids = [prompts.encode_prompt(model, question.first_turn) for question in questions]
    peers = {name: Peer(name, load.default_model_file()) for name in _PEERS.value}
    sampling = specjax.SamplingParams(max_new_tokens=_NEW_TOKENS.value)

    def ours(drafter: str, length: int | str) -> session.Session:
        return session.plan_session(
            model,
            ids,
            drafter=specjax.make_drafter(drafter, model),
            options=DecodeOptions(num_speculative_tokens=length, batch_size=1),
            requests=sampling,
        )

    sessions = {
        "plain": ours("none", "fixed"),
        "lookup": ours("ngram", _LOOKUP.value),
        "auto": ours("ngram+eagle3", "auto"),
    }
    engines = {name: generate.open_engine(one) for name, one in sessions.items()}
    rates: dict[str, list[float]] = {}
    outputs: dict[str, list[list[int]]] = {}
    for turn in range(_RUNS.value + 1):
        for name, lookup in (("plain", 0), ("lookup", _LOOKUP.value), ("auto", None)):
            mine = generate.decode_session(sessions[name], engine=engines[name])
            found = {f"specjax {name}": (mine.token_ids, mine.tokens_per_second)}
            for other, peer in peers.items() if lookup is not None else ():
                # The first iteration only warms all of them up.
                found[f"{other} {name}"] = peer.decode_all(ids if turn else ids[:1], lookup)
            for system, (tokens, rate) in found.items() if turn else ():
                outputs[system] = tokens
                rates.setdefault(system, []).append(rate)
                print(f"run {turn}: {system}: {rate:.1f} tokens/s", flush=True)
    threads = ", ".join(f"{name} {peer.metadata['threads']}" for name, peer in peers.items())
    print(
        f"\n{len(ids)} prompts, {_NEW_TOKENS.value} new tokens, greedy; specjax: {model.weights} "
        f"weights; threads: {threads}; decode tokens/s, median (min..max) of {_RUNS.value}"
    )
    for name, values in rates.items():
        print(f"  {name:22s} {_spread(values, 1)}")
    for peer in peers:
        for name, other in (("plain", "plain"), ("lookup", "lookup"), ("auto", "plain")):
            pairs = zip(rates[f"specjax {name}"], rates[f"{peer} {other}"], strict=True)
            print(f"  specjax {name} / {peer} {other} = {_spread([a / b for a, b in pairs], 2)}")
        compare_prefill(model, peer, peers[peer])
    reference = outputs["specjax plain"]
    for name, tokens in outputs.items():
        same = sum(a == b for a, b in zip(tokens, reference, strict=True))
        print(f"same tokens: {same}/{len(ids)}  ({name} against specjax plain)")


def _spread(values: list[float], digits: int) -> str:
    """Return the median of some runs, and their range, as a text."""
    numbers = statistics.median(values), min(values), max(values)
    return "{:.{d}f} ({:.{d}f}..{:.{d}f})".format(*numbers, d=digits)


def compare_prefill(model: Any, name: str, peer: Peer) -> None:
    """Print the time in which specjax and a peer read a long prompt."""
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
        f"{name} {statistics.median(theirs):.2f} s, ratio {ratio:.2f}"
    )


if __name__ == "__main__":
    app.run(main)
