"""Load an engine with requests at random times, and compare each answer with decoding it alone.

    python scripts/load_test.py --requests=64 --rate=0.5 --drafter=ngram --out=build/load

Requests arrive as a Poisson process of `--rate` per second (0: all at once), with prompts of all
lengths and answers of `--new_tokens`; some are aborted after a random time. Memory use is printed
meanwhile. At the end each answer is decoded again alone; aborted answers must be the beginnings of
these. With `--kv_page_size` caches have pages, also where `--num_kv_pages` are too few for all
rows; requests then share what they begin with, such as `--system` tokens, and with `--pairs` all
are served again with and without sharing, in turn, to compare the time to their first tokens:

    python scripts/load_test.py --rate=0 --system=1000 --kv_page_size=64 --pairs=5 --nocheck

Everything runs in this process. With `--out` a report and pictures are written. Exit code 1 if any
answer differs or a request is lost.
"""

from __future__ import annotations

import collections
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags, logging

from specjax.apps.report.engine_report import draw_engine, engine_report
from specjax.apps.rows.compare_outputs import first_difference
from specjax.apps.run.built_in_prompts import questions_of
from specjax.drafters import make_drafter
from specjax.engine.engine import Engine
from specjax.engine.requests import SamplingParams, encode_prompt
from specjax.loading.load import load_model
from specjax.sampling import RULES

_TARGET = flags.DEFINE_string("target", "smollm2-135m-instruct", "The target.")
_PROMPTS = flags.DEFINE_string("prompts", None, "A JSONL file of questions; else built-in ones.")
_REQUESTS = flags.DEFINE_integer("requests", 32, "How many requests.", lower_bound=1)
_RATE = flags.DEFINE_float("rate", 0.5, "Requests per second; 0: all at once.", lower_bound=0.0)
_SLOTS = flags.DEFINE_integer("slots", 8, "Slots.", lower_bound=1)
_NEW = flags.DEFINE_list("new_tokens", ["8", "128"], "Fewest and most new tokens of an answer.")
_IGNORE_EOS = flags.DEFINE_boolean("ignore_eos", False, "Let no answer end before its length.")
_DRAFTER = flags.DEFINE_string("drafter", "ngram", "The drafter.")
_LENGTH = flags.DEFINE_string("num_speculative_tokens", "fixed", "A number, fixed or auto.")
_VERIFY = flags.DEFINE_enum("verify", "coupled", sorted(RULES), "The rule.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "Of every second request; others are greedy.")
_ABORTS = flags.DEFINE_float("aborts", 0.1, "Share of requests that are aborted.")
_ABORT_AFTER = flags.DEFINE_float("abort_after", 10.0, "Mean seconds after which they are.")
_CHECK = flags.DEFINE_boolean("check", True, "Compare each answer with what it is alone.")
_PAGE_SIZE = flags.DEFINE_integer("kv_page_size", None, "Tokens of a page; else no pages.")
_PAGES = flags.DEFINE_integer("num_kv_pages", None, "Pages of the pool; else enough for all rows.")
_SYSTEM = flags.DEFINE_integer("system", 0, "Tokens with which all prompts begin.", lower_bound=0)
_PAIRS = flags.DEFINE_integer(
    "pairs", 0, "How often all are served again with and without shared pages.", lower_bound=0
)
_SEED = flags.DEFINE_integer("seed", 0, "Of arrivals, lengths and everything else.")
_OUT = flags.DEFINE_string("out", None, "A folder for the report and the pictures.")


@dataclass
class Client:
    """One request: when it arrives, its parameters, when it is aborted, and its output."""

    number: int
    arrival_s: float
    prompt: list[int]
    params: SamplingParams
    aborts_after_s: float | None
    reason: str | None = None
    ids: list[int] | None = None
    tokens: list[int] = field(default_factory=list)


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    del argv
    logging.set_verbosity(logging.WARNING)
    model = load_model(_TARGET.value, dtype="float32")
    length = _LENGTH.value
    length = int(length) if length.isdigit() else length
    rng = np.random.default_rng(_SEED.value)
    clients = make_clients(model, rng)
    if _CHECK.value and length == "auto" and _VERIFY.value != "coupled" and _TEMPERATURE.value:
        raise app.UsageError(
            f"--verify={_VERIFY.value} with --num_speculative_tokens=auto: sampled rows keep their "
            "distribution and not their tokens; use --verify=coupled, --temperature=0 or --nocheck"
        )
    options: dict[str, Any] = {
        "drafter": make_drafter(_DRAFTER.value, model),
        "num_speculative_tokens": length,
        "verify": _VERIFY.value,
        "seed": _SEED.value,
    }
    longest = max(len(one.prompt) + one.params.max_new_tokens for one in clients)
    if _PAIRS.value and _PAGE_SIZE.value is None:
        raise app.UsageError("--pairs: caches without pages share nothing; set --kv_page_size")

    def make_engine(shares: bool) -> Engine:
        pages: dict[str, Any] = {}
        if _PAGE_SIZE.value is not None:
            pages = {"kv_page_size": _PAGE_SIZE.value, "num_kv_pages": _PAGES.value}
            pages["enable_prefix_caching"] = shares
        return Engine(model, batch_size=_SLOTS.value, max_length=longest, **options, **pages)

    engine = make_engine(shares=True)
    print(f"{len(clients)} requests, {_SLOTS.value} slots, {_DRAFTER.value}, {_VERIFY.value}")
    run(engine, clients)
    lost = [one.number for one in clients if one.reason is None]
    reasons = collections.Counter(one.reason for one in clients if one.reason is not None)
    report = engine_report(engine.statistics)
    print("ended: " + ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items())))
    for name, value in report["summary"].items():
        print(f"{name}: {value if not isinstance(value, float) else round(value, 3)}")
    different = check(model, clients, longest, options) if _CHECK.value else []
    print(f"lost: {len(lost)}; different from alone: {len(different)} {different[:10]}")
    if _PAIRS.value:
        compare_sharing(make_engine, clients)
    if _OUT.value:
        folder = Path(_OUT.value)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "load.json").write_text(json.dumps(report, indent=1) + "\n")
        draw_engine(folder / "load.png", engine.statistics, f"{_SLOTS.value} slots")
    return 1 if lost or different else 0


def make_clients(model: Any, rng: np.random.Generator) -> list[Client]:
    """Return the requests in the order of their arrival."""
    questions = questions_of(_PROMPTS.value)
    fewest, most = map(int, _NEW.value)
    clients, now = [], 0.0
    system = rng.integers(model.config.vocab_size, size=_SYSTEM.value).tolist()
    for number in range(_REQUESTS.value):
        question = questions[number % len(questions)]
        new = int(rng.integers(fewest, most + 1))
        clients.append(
            Client(
                number,
                now,
                [*system, *encode_prompt(model, question.first_turn)],
                SamplingParams(
                    temperature=_TEMPERATURE.value if number % 2 else 0.0,
                    max_new_tokens=new,
                    seed=number,
                    ignore_eos=_IGNORE_EOS.value,
                ),
                rng.exponential(_ABORT_AFTER.value) if rng.random() < _ABORTS.value else None,
            )
        )
        if _RATE.value:
            now += float(rng.exponential(1 / _RATE.value))
    return clients


def run(engine: Engine, clients: list[Client]) -> None:
    """Pass requests to the engine when they are due, and collect the tokens of each."""
    engine.compile()
    waiting, running = collections.deque(clients), {}
    begin = said = time.monotonic()
    while waiting or running:
        now = time.monotonic() - begin
        while waiting and waiting[0].arrival_s <= now:
            one = waiting.popleft()
            running[engine.add(one.prompt, one.params, id=one.number)] = one
        for one in list(running.values()):
            if one.aborts_after_s is not None and now > one.arrival_s + one.aborts_after_s:
                one.aborts_after_s = None
                engine.abort(one.number)
        if not running:
            time.sleep(max(0.0, min(waiting[0].arrival_s - now, 0.05)))
            continue
        for delta in engine.step():
            one = running[delta.id]
            one.tokens += delta.token_ids
            if delta.output is not None:
                one.reason, one.ids = delta.output.finish_reason, delta.output.token_ids
                del running[delta.id]
        if time.monotonic() - said > 10:
            said = time.monotonic()
            print(
                f"{said - begin:6.0f} s: {engine.statistics.requests} ended, "
                f"{engine.num_unfinished} in the engine, {engine.num_waiting} of them waiting, "
                f"{engine.statistics.tokens} tokens, {megabytes():.0f} MB",
                flush=True,
            )


def compare_sharing(make_engine: Callable[[bool], Engine], clients: list[Client]) -> None:
    """Serve the requests again with and without shared pages; print the times to a first token.

    `make_engine` returns an engine whose requests share pages, or not. Nothing is aborted.
    """
    first_token_s: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(_PAIRS.value):
        for shares in (pair % 2 > 0, pair % 2 == 0):
            fresh = [
                replace(one, aborts_after_s=None, reason=None, ids=None, tokens=[])
                for one in clients
            ]
            with make_engine(shares) as engine:
                run(engine, fresh)
                summary = engine.statistics.summary()
            assert summary.first_token.p50 is not None
            first_token_s[shares].append(summary.first_token.p50)
            print(
                f"{'with' if shares else 'without'} sharing: {summary.prompt_tokens} prompt tokens "
                f"read, {summary.shared_tokens} shared, median first token after "
                f"{summary.first_token.p50:.3g} s, {summary.tokens_per_second:.3g} tokens/s",
                flush=True,
            )
    ratios = np.divide(first_token_s[False], first_token_s[True])
    print(
        f"first tokens come {np.median(ratios):.2f} times sooner with sharing (median of "
        f"{len(ratios)}, {ratios.min():.2f} to {ratios.max():.2f})"
    )


def megabytes() -> float:
    """Return the memory that this process uses now, in megabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def check(
    model: Any, clients: list[Client], longest: int, options: dict[str, Any]
) -> list[tuple[int, int]]:
    """Return the requests that differ from decoding them alone, each with the first difference."""
    # One slot: no other row is ever beside them.
    alone = Engine(model, batch_size=1, max_length=longest, **options)
    for one in clients:
        alone.add(one.prompt, one.params, id=one.number)
    found = {one.id: one.output.token_ids for one in alone if one.output is not None}
    different = []
    for one in clients:
        if one.ids is None:
            continue
        theirs, ours = found[one.number], one.ids
        if ours != one.tokens:
            different.append((one.number, -1))  # its deltas do not add up
        if one.reason == "abort":
            theirs = theirs[: len(ours)]
        if ours != theirs:
            different.append((one.number, first_difference(ours, theirs)))
    return different


if __name__ == "__main__":
    app.run(main, argv=sys.argv)
