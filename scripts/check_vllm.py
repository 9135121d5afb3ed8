"""Decode the same token ids with specjax and with vLLM on the CPU, and compare.

    scripts/check_vllm.sh [--eagle3=HEAD] [--medusa=HEAD] [--per_task=1] [--max_new_tokens=64]

The target goes to a Hugging Face directory, the heads to the layouts that vLLM reads; both sides
decode greedily in float32: plainly, with EAGLE-3 (SafeAILab's layout and speculators') and with
Medusa. The heads are those that come with specjax, or --eagle3 and --medusa: a directory, or
"untrained" for one that is made here, EAGLE-3 from the target's own weights and Medusa from small
random blocks. vLLM needs torch and a virtual environment of its own
(--peer_python; check_vllm.sh builds it). Prints how many rows are the same, where others first
differ, and both acceptances by position. Exit codes: 0; 1 where a plain row, or a row of vLLM with
and without a head, differs; 2 for bad input; 130 after Ctrl-C or SIGTERM.

vLLM's first token comes with its prefill, and its last draft may reach after the last token that
it may generate. So specjax gets that first token as a part of the prompt, and capacity for one more
draft: the rounds of both are then the same.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags, logging

_FORMATS = ("eagle3", "speculators", "medusa")
_TARGET = flags.DEFINE_string("target", "smollm2-135m-instruct", "The target model.")
_HEADS = {
    kind: flags.DEFINE_string(kind, None, f"The {kind} head: a directory or untrained.")
    for kind in ("eagle", "eagle3", "medusa")
}
_ONLY = flags.DEFINE_list("only", list(_FORMATS), "Formats to compare; eagle is a further one.")
_PROMPTS = flags.DEFINE_string("prompts", None, "JSONL in Spec-Bench's schema; built-in if unset.")
_PER_TASK = flags.DEFINE_integer("per_task", 1, "Prompts of each task.")
_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "New tokens at most.")
_LENGTH = flags.DEFINE_integer("num_speculative_tokens", 4, "Draft length.")
_FOLDER = flags.DEFINE_string("workdir", "build/check_vllm", "Where the exports go.")
_PEER = flags.DEFINE_string("peer_python", ".venv-vllm/bin/python", "Python with vLLM.")
_UNTRAINED = "untrained"
_DRAFT_VOCABULARY = 8192


def ask_vllm(model: Path, prompts: list[list[int]], config: dict[str, Any] | None) -> dict:
    """The answer of vLLM to a request (see `vllm_peer.py`), from a separate process."""
    answer = Path(_FOLDER.value) / "answer.json"
    answer.unlink(missing_ok=True)
    request = {
        "model": str(model),
        "prompts": prompts,
        "max_new_tokens": _NEW_TOKENS.value,
        "dtype": "float32",
        "speculative_config": config,
    }
    log = Path(_FOLDER.value) / "vllm.log"
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
        raise SystemExit(
            f"error: vLLM ended with code {done.returncode}; the end of {log}:\n{last}"
        )
    return json.loads(answer.read_text())


def draft_vocabulary(texts: list[list[int]]) -> np.ndarray:
    """The tokens of some texts, and the lowest ids beside them."""
    used = np.unique(np.concatenate(texts))
    others = np.setdiff1d(np.arange(_DRAFT_VOCABULARY), used)
    return np.sort(np.concatenate([used, others])[:_DRAFT_VOCABULARY]).astype(np.int32)


def made(kind: str, model: Any, ids: np.ndarray) -> Any:
    """An untrained head: EAGLE from the target's last layer, Medusa from small random blocks."""
    import jax
    import jax.numpy as jnp
    from flax.core import meta

    from specjax.loading.heads.head import Head, TargetMetadata
    from specjax.models.heads.eagle import Eagle, EagleConfig, default_taps
    from specjax.models.heads.medusa import MedusaConfig
    from train.methods.eagle import from_target

    width, metadata, training = (
        model.config.hidden_size,
        TargetMetadata.of(model),
        {"made": "untrained"},
    )
    if kind == "medusa":
        heads = _LENGTH.value
        rng = np.random.default_rng(0)
        blocks = {
            "kernel": 0.02 * rng.standard_normal((heads, 1, width, width), np.float32),
            "bias": 0.1 * rng.standard_normal((heads, 1, width), np.float32),
        }
        shape = MedusaConfig(width, model.config.vocab_size, heads, 1, len(ids), True)
        return Head(kind, shape, {"blocks": blocks}, ids, metadata, training)
    version = 3 if kind == "eagle3" else 1
    config = EagleConfig(
        decoder=model.config.llama_layers(1),
        version=version,
        target_hidden_size=width,
        draft_vocab_size=len(ids),
        taps=default_taps(model.config.num_layers) if version == 3 else ("final_norm",),
    )
    params = meta.unbox(Eagle(config, jnp.dtype("float32")).init(jax.random.key(0)))
    params = jax.tree.map(np.asarray, from_target(params, model, config, ids))
    return Head(kind, config, params, ids, metadata, training)


def acceptance(accepted: Sequence[float], drafts: float) -> str:
    """Acceptance by position, unconditional, and the mean acceptance length."""
    rates = [count / max(drafts, 1) for count in accepted]
    positions = " ".join(f"{rate:.3f}" for rate in rates)
    return f"{positions}   tau {1 + sum(rates):.3f}   {drafts:.0f} rounds"


def decode_as_vllm(head: Any, model: Any, ids: list[list[int]], plain: list[list[int]]) -> tuple:
    """The rows that specjax decodes with a head, and the line of its acceptance."""
    import specjax
    from specjax import metrics
    from specjax.drafters import head_drafter

    left, length = _NEW_TOKENS.value - 1, _LENGTH.value
    mine = specjax.generate(
        model,
        [prompt + row[:1] for prompt, row in zip(ids, plain, strict=True)],
        drafter=head_drafter(head, model, draft_sample_method="greedy"),
        num_speculative_tokens=length,
        sampling={"max_new_tokens": left + length},
        batch_size=1,
    )
    rows = [row[:1] + more[:left] for row, more in zip(plain, mine.token_ids, strict=True)]
    sizes = np.maximum(mine.emitted, 0)
    counted = (mine.drafted > 0) & (sizes.cumsum(axis=1) - sizes < left)
    drafted, accepted = (np.where(counted, x, -1) for x in (mine.drafted, mine.accepted))
    positions = metrics.num_accepted_tokens_per_pos(drafted, accepted)
    return rows, acceptance(positions, metrics.num_drafts(drafted))


def differences(name: str, mine: list[list[int]], theirs: list[list[int]], decode: Any) -> int:
    """Print how many rows are the same, and the others' first difference; returns their number."""
    parted = [row for row, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]]
    print(f"{name}: {len(mine) - len(parted)}/{len(mine)} rows identical")
    for row in parted:
        a, b = mine[row], theirs[row]
        index = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if index is None:
            print(f"  row {row}: {len(a)} against {len(b)} tokens, alike as far as both go")
            continue
        context = decode(a[max(index - 6, 0) : index])
        print(
            f"  row {row}, token {index}: {decode([a[index]])!r} against {decode([b[index]])!r}",
            end="",
        )
        print(f" after {context!r}")
    return len(parted)


def compare() -> int:
    """Run the comparison; returns the exit code. Raises InputError."""
    logging.set_verbosity(logging.WARNING)
    import specjax
    from specjax.cli.built_in_prompts import questions_of
    from specjax.decoding import prompts
    from specjax.errors import InputError
    from specjax.loading.find_head import open_head
    from specjax.loading.head_formats import write_foreign
    from specjax.loading.head_formats.read_write import whole_vocabulary

    known = (*_FORMATS, "eagle")
    if unknown := set(_ONLY.value) - set(known):
        raise InputError(f"only={unknown.pop()!r}: use {', '.join(known)}")
    folder = Path(_FOLDER.value)
    folder.mkdir(parents=True, exist_ok=True)
    given = {kind: flag.value for kind, flag in _HEADS.items()}
    kinds = {form: "eagle3" if form == "speculators" else form for form in _ONLY.value}
    model = specjax.load_model(_TARGET.value, dtype="float32")
    heads = {
        kind: open_head(kind, given[kind], model)
        for kind in set(kinds.values())
        if given[kind] != _UNTRAINED
    }
    questions = questions_of(_PROMPTS.value)
    questions = prompts.select(questions, per_task=_PER_TASK.value)
    ids = [prompts.encode_prompt(model, question.first_turn) for question in questions]
    specjax.save_model(model, folder / "target")
    new = _NEW_TOKENS.value
    print(f"{len(ids)} prompts, {new} new tokens, greedy, float32, K = {_LENGTH.value}", flush=True)
    plain = specjax.generate(
        model, ids, sampling={"max_new_tokens": new}, drafter="none", batch_size=1
    ).token_ids
    peer = ask_vllm(folder / "target", ids, None)
    print(f"vLLM {peer['version']}, specjax in this checkout")
    wrong = differences(
        "plain, specjax against vLLM", plain, peer["token_ids"], model.tokenizer.decode
    )

    for kind in set(kinds.values()) - heads.keys():
        heads[kind] = made(kind, model, draft_vocabulary(plain))
    for form, kind in kinds.items():
        head = heads[kind]
        if form in ("medusa", "eagle"):
            # vLLM 0.32 stops at Medusa's token_map, and has none for EAGLE-1.
            head = whole_vocabulary(head)
        write_foreign(head, folder / form, form, model)
        config = {
            "method": kind,
            "model": str(folder / form),
            "num_speculative_tokens": _LENGTH.value,
        }
        peer_answer = ask_vllm(folder / "target", ids, config)
        rows, summary = decode_as_vllm(head, model, ids, plain)
        differences(
            f"{form}, specjax against vLLM", rows, peer_answer["token_ids"], model.tokenizer.decode
        )
        wrong += differences(
            f"{form}, vLLM against itself without a head",
            peer_answer["token_ids"],
            peer["token_ids"],
            model.tokenizer.decode,
        )
        print("  acceptance by position")
        print("    specjax", summary)
        print("    vLLM   ", acceptance(peer_answer["accepted_per_pos"], peer_answer["drafts"]))
        print(
            f"  vLLM {peer_answer['seconds']:.1f} s, without a head {peer['seconds']:.1f} s",
            flush=True,
        )
    return 1 if wrong else 0


def main(argv: list[str]) -> int:
    """Entry point, called with what absl's flags leave; returns the exit code."""
    from specjax.cli import command

    return command.run(lambda rest: compare(), argv[1:])


if __name__ == "__main__":
    app.run(main)
