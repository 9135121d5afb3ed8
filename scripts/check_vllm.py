"""Decode with exported heads in specjax and in vLLM on the CPU, and compare tokens and acceptance.

    scripts/check_vllm.sh [--heads=eagle3,DIR] [--target=NAME] [--per_task=1] [--max_new_tokens=64]

The target goes to a Hugging Face directory, and each head to every layout that vLLM reads; both
sides decode the same token ids greedily in float32, plainly and with the head. A head is the kind
of one that comes with specjax, or a directory; one for which vLLM reads no draft vocabulary uses
the target's whole output head. vLLM needs an environment of its own (--peer_python; check_vllm.sh
builds it). Prints how many rows are the same, and both acceptances by position. Exit codes: 0; 1
where a plain row, or a row of vLLM with and without a head, differs; 2 for bad input.

vLLM's first token comes with its prefill, and its last draft may reach after the last token that
it may generate. So specjax gets that first token as a part of the prompt, and capacity for one more
draft: the rounds of both are then the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags, logging

_TARGET = flags.DEFINE_string("target", "smollm2-135m-instruct", "The target model.")
_HEADS = flags.DEFINE_list("heads", ["eagle3"], "Directories of heads, or kinds of included ones.")
_PROMPTS = flags.DEFINE_string("prompts", None, "JSONL in Spec-Bench's schema; built-in if unset.")
_PER_TASK = flags.DEFINE_integer("per_task", 1, "Prompts of each task.")
_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "New tokens at most.")
_LENGTH = flags.DEFINE_integer("num_speculative_tokens", 3, "Draft length.")
_FOLDER = flags.DEFINE_string("workdir", "build/check_vllm", "Where the exports go.")
_PEER = flags.DEFINE_string("peer_python", ".venv-vllm/bin/python", "Python with vLLM.")


def ask_vllm(prompts: list[list[int]], config: dict[str, Any] | None) -> dict[str, Any]:
    """Return vLLM's answer to a request (see `peers/vllm_peer.py`), from a process of its own."""
    folder = Path(_FOLDER.value)
    answer, log = folder / "answer.json", folder / "vllm.log"
    answer.unlink(missing_ok=True)
    request = {
        "model": str(folder / "target"),
        "prompts": prompts,
        "max_new_tokens": _NEW_TOKENS.value,
        "speculative_config": config,
    }
    with log.open("w") as file:
        done = subprocess.run(
            [_PEER.value, Path(__file__).parent / "peers" / "vllm_peer.py", answer],
            input=json.dumps(request),
            text=True,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    if done.returncode or not answer.exists():
        last = "\n".join(log.read_text().splitlines()[-15:])
        raise SystemExit(f"vLLM ended with code {done.returncode}; the end of {log}:\n{last}")
    return json.loads(answer.read_text())


def decode_as_vllm(
    head: Any, model: Any, prompts: list[list[int]], plain: list[list[int]]
) -> tuple[list[list[int]], str]:
    """Return the rows that specjax decodes with a head, and a line of its acceptance."""
    import specjax
    from specjax import metrics
    from specjax.drafters import head_drafter

    left, length = _NEW_TOKENS.value - 1, _LENGTH.value
    mine = specjax.generate(
        model,
        [prompt + row[:1] for prompt, row in zip(prompts, plain, strict=True)],
        drafter=head_drafter(head, model, draft_sample_method="greedy"),
        num_speculative_tokens=length,
        sampling={"max_new_tokens": left + length, "ignore_eos": True},
        batch_size=1,
    )
    rows = [row[:1] + more[:left] for row, more in zip(plain, mine.token_ids, strict=True)]
    sizes = np.maximum(mine.emitted, 0)
    counted = (mine.drafted > 0) & (sizes.cumsum(axis=1) - sizes < left)
    drafted, accepted = (np.where(counted, x, -1) for x in (mine.drafted, mine.accepted))
    positions = metrics.num_accepted_tokens_per_pos(drafted, accepted)
    return rows, acceptance(positions, metrics.num_drafts(drafted))


def acceptance(accepted: Any, drafts: float) -> str:
    """Return acceptance by position, unconditional, the acceptance length, and the rounds."""
    rates = [count / max(drafts, 1) for count in accepted]
    shown = " ".join(f"{rate:.3f}" for rate in rates)
    return f"{shown}   tau {1 + sum(rates):.3f}   {drafts:.0f} rounds"


def differences(name: str, mine: list[list[int]], theirs: list[list[int]]) -> int:
    """Print how many rows are the same, and the first difference of others; return their number."""
    apart = [row for row, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]]
    print(f"{name}: {len(mine) - len(apart)}/{len(mine)} rows identical")
    for row in apart:
        pairs = zip(mine[row], theirs[row], strict=False)
        first = next((at for at, (a, b) in enumerate(pairs) if a != b), "the end")
        print(f"  row {row} differs from token {first} on")
    return len(apart)


def formats_of(head: Any) -> list[str]:
    """Return the layouts of other tools that can hold a head."""
    from specjax.errors import InputError
    from specjax.methods.published_layouts import FORMATS, check_format

    found = []
    for form in FORMATS:
        with suppress(InputError):
            check_format(head, form)
            found.append(form)
    return found


def main(_: list[str]) -> int:
    """Run the comparison; return the exit code."""
    from specjax.errors import InputError

    try:
        return compare()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def compare() -> int:
    """Decode with each head on both sides, and print the differences; return the exit code."""
    logging.set_verbosity(logging.WARNING)
    import specjax
    from specjax.apps.run.built_in_prompts import questions_of
    from specjax.engine.requests import encode_prompt
    from specjax.errors import InputError
    from specjax.loading.texts.questions import select
    from specjax.methods.find_head import read_any_head, shipped_head
    from specjax.methods.heads.head import whole_vocabulary
    from specjax.methods.published_layouts import write_foreign

    folder = Path(_FOLDER.value)
    folder.mkdir(parents=True, exist_ok=True)
    model = specjax.load_model(_TARGET.value, dtype="float32", weights="float")
    heads = [
        shipped_head(name, model) or read_any_head(name, model, "heads") for name in _HEADS.value
    ]
    for head in heads:
        if not formats_of(head):
            raise InputError(f"heads: vLLM has no layout for {head.kind}; leave it out")
    if model.tokenizer is None:
        rng = np.random.default_rng(0)
        ids = rng.integers(0, model.config.vocab_size, (8, 12)).tolist()
    else:
        questions = select(questions_of(_PROMPTS.value), per_task=_PER_TASK.value)
        ids = [encode_prompt(model, question.first_turn) for question in questions]
    specjax.save_model(model, folder / "target")
    sampling = {"max_new_tokens": _NEW_TOKENS.value, "ignore_eos": True}
    plain = specjax.generate(model, ids, sampling=sampling, drafter="none", batch_size=1).token_ids
    peer = ask_vllm(ids, None)
    print(f"vLLM {peer['version']}; {len(ids)} prompts, {_NEW_TOKENS.value} new tokens, greedy")
    wrong = differences("plain, specjax and vLLM", plain, peer["token_ids"])
    for head in heads:
        block = head.kind in ("dflash", "dspark") and not head.config.selector_rank
        if head.kind != "eagle3" and not block:
            # vLLM has no draft vocabulary here, or reads another output head with it.
            head = whole_vocabulary(head)
        rows, summary = decode_as_vllm(head, model, ids, plain)
        for form in formats_of(head):
            write_foreign(head, folder / form, form, model)
            config = {"method": head.kind, "model": str(folder / form)}
            answer = ask_vllm(ids, {**config, "num_speculative_tokens": _LENGTH.value})
            theirs = answer["token_ids"]
            differences(f"{head.kind} as {form}, specjax and vLLM", rows, theirs)
            wrong += differences("  vLLM with and without it", theirs, peer["token_ids"])
            print("    specjax", summary)
            print(
                "    vLLM   ", acceptance(answer["accepted_per_pos"], answer["drafts"]), flush=True
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    app.run(main)
