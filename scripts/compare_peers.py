"""Decode the same token ids with specjax and with other engines, in turn, and print the ratios.

    python scripts/compare_peers.py --prompts=FILE.jsonl [--per_task=2] [--max_new_tokens=96]
    python scripts/compare_peers.py --peers=transformers,llama_cpp,openvino --weights=auto
    python scripts/compare_peers.py --peers=llama_cpp --model=FILE.gguf [--draft=DRAFT.gguf]

All decode greedily on the CPU: plainly, with prompt lookup and, with --draft, by llama.cpp's own
speculative decoding and specjax's `draft_model`, both with that model and --draft_tokens. specjax
also with `suffix`, and with draft lengths of `auto` by `ngram+eagle3` if these heads come with it
for the model, otherwise by the draft model if there is one; costs are measured in the first
iteration. A model without a chat template gets the prompts as raw text. transformers computes in
float32, llama.cpp with the file's weights and activations of 8 bits, OpenVINO with the file's
weights and what it chooses for the processor. They run in a virtual environment of their own, named
by --peer_python (`make compare` builds it), as processes that answer one request per line
(`peers/`). Times exclude loading and compiling; each is the median of --runs runs, alternating
between the systems. The time to the first token is that of a prompt that the system has not read
before.
"""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags, logging

_PROMPTS = flags.DEFINE_string("prompts", None, "JSONL in Spec-Bench's schema; built-in if unset.")
_PER_TASK = flags.DEFINE_integer("per_task", 2, "Prompts of each task.")
_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 96, "New tokens at most.")
_RUNS = flags.DEFINE_integer("runs", 3, "Timed runs of each system.")
_LOOKUP = flags.DEFINE_integer("num_speculative_tokens", 8, "Draft length of all prompt lookups.")
_DRAFT_TOKENS = flags.DEFINE_integer("draft_tokens", 4, "Draft length of all draft models.")
_PREFILL = flags.DEFINE_integer("prefill_tokens", 1000, "Prompt length of the prefill comparison.")
_PEERS = flags.DEFINE_list("peers", ["transformers"], "transformers, llama_cpp, openvino.")
_MODEL = flags.DEFINE_string("model", None, "Any GGUF file; the default model if unset.")
_DRAFT = flags.DEFINE_string("draft", None, "GGUF of a draft model, for llama_cpp and specjax.")
_WEIGHTS = flags.DEFINE_string(
    "weights",
    None,
    "Those of specjax: float, auto, int8, int4; by default auto with --model, else float.",
)
_ACTIVATIONS = flags.DEFINE_string(
    "activations", "auto", "Those of specjax: auto, float, 24, 16, 8; 8 bits as in llama.cpp."
)
_PYTHON = flags.DEFINE_string("peer_python", ".venv-peers/bin/python", "Python with the peers.")

PLAIN = "plain"
"""The name of plain decoding, which every system does."""


@dataclass(frozen=True)
class Way:
    """A way of decoding: the drafter of specjax and its draft length, and what peers do.

    Peers draft `lookup` tokens by prompt lookup or `draft` tokens with the draft model, or nothing
    if both are 0; if both are None, there is nothing like it in peers.
    """

    drafter: str
    length: int | str
    lookup: int | None = None
    draft: int | None = None


@dataclass(frozen=True)
class Decoded:
    """The new token ids of all prompts, and the tokens per second without prefill."""

    ids: list[list[int]]
    tokens_per_second: float


class Peer:
    """Another engine in its own process and environment, with a model and maybe a draft model."""

    def __init__(self, name: str, gguf: Path, draft: Path | None) -> None:
        script = Path(__file__).parent / "peers" / f"{name}_peer.py"
        models = [gguf, *([draft] if draft is not None and name == "llama_cpp" else [])]
        self._process = subprocess.Popen(
            [_PYTHON.value, script, *models],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.metadata = self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise SystemExit(f"the peer process ended with code {self._process.returncode}")
        return json.loads(line)

    def decode(
        self, ids: list[int], new_tokens: int, *, lookup: int = 0, draft: int = 0
    ) -> dict[str, Any]:
        """Return the new token ids, and the seconds of prefill and of the whole call."""
        request = {"ids": ids, "max_new_tokens": new_tokens, "lookup": lookup, "draft": draft}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Close the pipes, after which the process ends what it has started, and wait for it."""
        with self._process:
            pass


def decode_all(peer: Peer, prompts: Sequence[list[int]], way: Way) -> Decoded:
    """Return what a peer decodes from all prompts."""
    answers = [
        peer.decode(ids, _NEW_TOKENS.value, lookup=way.lookup or 0, draft=way.draft or 0)
        for ids in prompts
    ]
    seconds = sum(one["total_s"] - one["prefill_s"] for one in answers)
    # Their first token comes with the prefill, ours with the first round.
    count = sum(len(one["ids"]) - 1 for one in answers)
    return Decoded([one["ids"] for one in answers], count / seconds)


def ways_of(heads: Sequence[str], with_draft: bool) -> dict[str, Way]:
    """Return the ways of decoding by name, plain decoding first.

    `heads` are the kinds of heads that come with specjax for the model, and `with_draft` says that
    there is a draft model.
    """
    from specjax.engine.options import AUTO, FIXED

    ways = {
        PLAIN: Way("none", FIXED, 0, 0),
        "lookup": Way("ngram", _LOOKUP.value, _LOOKUP.value, 0),
        "suffix auto": Way("suffix", AUTO),
    }
    if with_draft:
        ways["draft"] = Way("draft_model", _DRAFT_TOKENS.value, 0, _DRAFT_TOKENS.value)
    if "eagle3" in heads:
        ways["ngram+eagle3 auto"] = Way("ngram+eagle3", AUTO)
    elif with_draft:
        ways["draft auto"] = Way("draft_model", AUTO)
    return ways


def main(argv: list[str]) -> None:
    """Run the comparison."""
    del argv
    logging.set_verbosity(logging.WARNING)
    from specjax.errors import InputError

    try:
        compare()
    except InputError as error:
        raise SystemExit(f"error: {error}") from None


def compare() -> None:
    """Decode with all systems in turn, and print speeds, ratios and equal tokens."""
    import specjax
    from specjax.apps.run.built_in_prompts import questions_of
    from specjax.engine import generate, plan
    from specjax.engine import requests as engine_requests
    from specjax.engine.options import DecodeOptions
    from specjax.loading import hub
    from specjax.loading.texts.questions import select
    from specjax.methods.find_head import included_heads

    gguf = Path(_MODEL.value) if _MODEL.value else hub.default_model_file()
    draft = Path(_DRAFT.value) if _DRAFT.value else None
    weights = _WEIGHTS.value or ("auto" if _MODEL.value else "float")
    model = specjax.load_model(
        _MODEL.value or hub.DEFAULT_MODEL, weights=weights, activations=_ACTIVATIONS.value
    )
    questions = select(questions_of(_PROMPTS.value), per_task=_PER_TASK.value)
    chat = model.tokenizer is not None and model.tokenizer.chat_template is not None
    asked = [question.first_turn if chat else question.turns[0] for question in questions]
    ids = [engine_requests.encode_prompt(model, prompt) for prompt in asked]
    ways = ways_of(included_heads(model), draft is not None)
    sampling = specjax.SamplingParams(max_new_tokens=_NEW_TOKENS.value)

    drafters: dict[str, Any] = {}
    engines = {}
    for name, way in ways.items():
        if way.drafter not in drafters:
            options = {"path": str(draft)} if way.drafter == "draft_model" else {}
            drafters[way.drafter] = specjax.make_drafter(way.drafter, model, **options)
        one = plan.plan_requests(
            model,
            ids,
            drafter=drafters[way.drafter],
            options=DecodeOptions(num_speculative_tokens=way.length, batch_size=1),
            sampling=sampling,
        )
        engines[name] = *one, generate.open_engine(one[0])

    def decode_ours(name: str) -> Decoded:
        own, requests, engine = engines[name]
        mine = generate.decode_requests(own, requests, engine=engine)
        return Decoded(mine.token_ids, mine.tokens_per_second)

    peers: dict[str, Peer] = {}
    with contextlib.ExitStack() as running:
        for name in _PEERS.value:
            peers[name] = Peer(name, gguf, draft)
            running.callback(peers[name].close)
        systems = {f"specjax {name}": functools.partial(decode_ours, name) for name in ways}
        for other, peer in peers.items():
            systems |= {
                f"{other} {name}": functools.partial(decode_all, peer, ids, way)
                for name, way in ways.items()
                if way.lookup is not None and (not way.draft or peer.metadata.get("drafts"))
            }
        rates, outputs = run_in_turn(systems)
        threads = ", ".join(f"{name} {peer.metadata['threads']}" for name, peer in peers.items())
        print(
            f"\n{gguf.name}{f', draft {draft.name}' if draft else ''}; {len(ids)} prompts, "
            f"{_NEW_TOKENS.value} new tokens, greedy; specjax: {model.weights} weights; threads: "
            f"{threads}; decode tokens/s, median (min..max) of {_RUNS.value}"
        )
        for line in table(rates, outputs):
            print(line)
        for line in ratios(rates, list(peers)):
            print(line)
        for name, peer in peers.items():
            compare_prefill(model, name, peer)


def run_in_turn(
    systems: Mapping[str, Callable[[], Decoded]],
) -> tuple[dict[str, list[float]], dict[str, list[list[int]]]]:
    """Run all systems in turn, `--runs` times; return each one's tokens/s by run, and its tokens.

    An iteration before the first only warms all of them up.
    """
    from specjax.apps.run.runner import turn_order

    names, rates, outputs = list(systems), {name: [] for name in systems}, {}
    for run in range(_RUNS.value + 1):
        for name in (names[number] for number in turn_order(len(names), run)):
            decoded = systems[name]()
            if run:
                rates[name].append(decoded.tokens_per_second)
                outputs[name] = decoded.ids
                print(f"run {run}: {name}: {decoded.tokens_per_second:.1f} tokens/s", flush=True)
    return rates, outputs


def table(
    rates: Mapping[str, Sequence[float]], outputs: Mapping[str, Sequence[list[int]]]
) -> list[str]:
    """Return a line per system: tokens/s, ratio to its own plain decoding, and equal tokens.

    Tokens are compared with the same engine's plain decoding, which speculation must not change,
    and with that of specjax, from which another precision may differ.
    """
    lines = []
    for name, values in rates.items():
        own = f"{name.split()[0]} {PLAIN}"
        remarks = []
        if name != own:
            pairs = zip(values, rates[own], strict=True)
            remarks.append(f"{_spread([a / b for a, b in pairs], 2)} x its plain")
        remarks += [
            f"tokens as {reference}: {_num_equal(outputs[name], outputs[reference])}"
            for reference in dict.fromkeys((own, f"specjax {PLAIN}"))
            if reference != name
        ]
        lines.append(f"  {name:26s} {_spread(values, 1):24s} {'; '.join(remarks)}".rstrip())
    return lines


def ratios(rates: Mapping[str, Sequence[float]], peers: Sequence[str]) -> list[str]:
    """Return lines with the tokens/s of specjax divided by those of each peer.

    A way of decoding that a peer does not have is compared with the peer's plain decoding.
    """
    lines = []
    for peer in peers:
        for name in rates:
            engine, _, way = name.partition(" ")
            if engine == "specjax":
                other = f"{peer} {way}" if f"{peer} {way}" in rates else f"{peer} {PLAIN}"
                pairs = zip(rates[name], rates[other], strict=True)
                lines.append(f"  {name} / {other} = {_spread([a / b for a, b in pairs], 2)}")
    return lines


def _num_equal(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> str:
    """Return how many of the prompts have the same tokens, of how many."""
    return f"{sum(a == b for a, b in zip(ours, theirs, strict=True))}/{len(ours)}"


def _spread(values: Sequence[float], digits: int) -> str:
    """Return the median of some runs, and their range, as a text."""
    numbers = statistics.median(values), min(values), max(values)
    return "{:.{d}f} ({:.{d}f}..{:.{d}f})".format(*numbers, d=digits)


def fresh_prompts(vocab_size: int, length: int, count: int) -> list[list[int]]:
    """Return `count` random prompts of `length` token ids, no two of which begin alike.

    So none of them is in a cache of prompts or of their beginnings that a system may keep. Ids are
    from the middle of the vocabulary, since special tokens are at its ends.
    """
    rng = np.random.default_rng(0)
    usual = np.arange(vocab_size // 10, vocab_size * 4 // 5)
    firsts = rng.choice(usual, count, replace=False)
    return [[int(first), *rng.choice(usual, length - 1).tolist()] for first in firsts]


def compare_prefill(model: Any, name: str, peer: Peer) -> None:
    """Print the time in which specjax and a peer read a long prompt that is new to them."""
    import specjax
    from specjax.engine import generate, plan
    from specjax.engine.options import DecodeOptions

    length, count = _PREFILL.value, _RUNS.value + 1
    prompts = fresh_prompts(model.config.vocab_size, length, count)
    own, requests = plan.plan_requests(
        model,
        prompts,
        options=DecodeOptions(batch_size=1),
        sampling=specjax.SamplingParams(max_new_tokens=1),
    )
    engine = generate.open_engine(own)
    mine, theirs = [], []
    for turn, ids in enumerate(prompts):
        ours = generate.decode_requests(own, [requests[turn]], engine=engine)
        answer = peer.decode(ids, 1)
        if turn:
            mine.append(ours.prefill_s + ours.decode_s)
            theirs.append(answer["prefill_s"])
    ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
    print(
        f"  first token of {length} tokens, new ones each time: specjax "
        f"{statistics.median(mine):.2f} s, {name} {statistics.median(theirs):.2f} s, "
        f"ratio {ratio:.2f}"
    )


if __name__ == "__main__":
    app.run(main)
