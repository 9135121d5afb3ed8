"""Decode the same token ids with specjax and with vLLM on the CPU, and compare.

    scripts/check_vllm.sh [--eagle3=HEAD] [--medusa=HEAD] [--per_task=1] [--max_new_tokens=64]

The target goes to a Hugging Face directory, the heads to the layouts that vLLM reads; both sides
decode greedily in float32: plainly, with EAGLE-3 (SafeAILab's layout and speculators') and with
Medusa. The heads are those that come with specjax, or --eagle3 and --medusa: a directory, or
"untrained" for one that is made here, EAGLE-3 from the target's own weights and Medusa from small
random blocks. vLLM needs torch and a virtual environment of its own
(--peer_python; check_vllm.sh builds it). Prints how many rows are the same, where others first
differ, and both acceptances by position. Exit codes: 0; 1 where a plain row, or a row of vLLM with
and without a head, differs.

vLLM's first token comes with its prefill, so that specjax is given that token as a part of the
prompt: the rounds of both then begin at the same tokens. At the end they differ: vLLM counts drafts
behind the last token that it may generate.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags, logging

_TARGET = flags.DEFINE_string("target", "smollm2-135m-instruct", "The target model.")
_EAGLE3 = flags.DEFINE_string("eagle3", None, "EAGLE-3 head: a directory or untrained.")
_MEDUSA = flags.DEFINE_string("medusa", None, "Medusa heads: a directory or untrained.")
_ONLY = flags.DEFINE_list("only", ["eagle3", "speculators", "medusa"], "Formats to compare.")
_PROMPTS = flags.DEFINE_string("prompts", None, "JSONL in Spec-Bench's schema; built-in if unset.")
_PER_TASK = flags.DEFINE_integer("per_task", 1, "Prompts of each task.")
_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "New tokens at most.")
_LENGTH = flags.DEFINE_integer("num_speculative_tokens", 4, "Draft length.")
_FOLDER = flags.DEFINE_string("workdir", "build/check_vllm", "Where the exports go.")
_PEER = flags.DEFINE_string("peer_python", ".venv-vllm/bin/python", "Python with vLLM.")
_UNTRAINED = "untrained"
_DRAFT_VOCABULARY = 8192


def ask_vllm(model: Path, prompts: list[list[int]], config: dict[str, Any] | None) -> dict:
    """What vLLM decodes, in a process of its own."""
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
            [_PEER.value, Path(__file__).with_name("vllm_peer.py"), answer],
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


def made_eagle3(model: Any, ids: np.ndarray) -> Any:
    """An EAGLE-3 head from the target's last layer and head, untrained."""
    import jax
    import jax.numpy as jnp
    from flax.core import meta

    from specjax.heads.head import Head, TargetFacts
    from specjax.models.eagle import Eagle, EagleConfig, default_taps
    from train.eagle import from_target

    config = EagleConfig(
        decoder=dataclasses.replace(model.config, num_layers=1),
        version=3,
        target_hidden_size=model.config.hidden_size,
        draft_vocab_size=len(ids),
        taps=default_taps(model.config.num_layers),
    )
    params = meta.unbox(Eagle(config, jnp.dtype("float32")).init(jax.random.key(0)))
    params = jax.tree.map(np.asarray, from_target(params, model, config, ids))
    return Head("eagle3", config, params, ids, TargetFacts.of(model), {"made": "untrained"})


def made_medusa(model: Any, ids: np.ndarray) -> Any:
    """Medusa heads with small random blocks on the target's own head."""
    from specjax.heads.head import Head, TargetFacts
    from specjax.models.medusa import MedusaConfig

    width, heads = model.config.hidden_size, _LENGTH.value
    config = MedusaConfig(width, model.config.vocab_size, heads, 1, len(ids), True)
    rng = np.random.default_rng(0)
    blocks = {
        "kernel": 0.02 * rng.standard_normal((heads, 1, width, width), np.float32),
        "bias": 0.1 * rng.standard_normal((heads, 1, width), np.float32),
    }
    facts = TargetFacts.of(model)
    return Head("medusa", config, {"blocks": blocks}, ids, facts, {"made": "untrained"})


def acceptance(accepted: list[float], drafts: float) -> str:
    """Acceptance by position, unconditional, and the mean acceptance length."""
    rates = [count / max(drafts, 1) for count in accepted]
    positions = " ".join(f"{rate:.3f}" for rate in rates)
    return f"{positions}   tau {1 + sum(rates):.3f}   {drafts:.0f} rounds"


def differences(name: str, mine: list[list[int]], theirs: list[list[int]], decode: Any) -> int:
    """Print how many rows are the same, and where the others part; returns their number."""
    parted = [row for row, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]]
    print(f"{name}: {len(mine) - len(parted)}/{len(mine)} rows identical")
    for row in parted:
        a, b = mine[row], theirs[row]
        place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if place is None:
            print(f"  row {row}: {len(a)} against {len(b)} tokens, alike as far as both go")
            continue
        context = decode(a[max(place - 6, 0) : place])
        print(
            f"  row {row}, token {place}: {decode([a[place]])!r} against {decode([b[place]])!r}",
            end="",
        )
        print(f" behind {context!r}")
    return len(parted)


def main(argv: list[str]) -> None:
    """Run the comparison."""
    del argv
    logging.set_verbosity(logging.WARNING)
    import specjax
    from specjax import metrics, prompts
    from specjax.built_in import BUILT_IN
    from specjax.errors import InputError
    from specjax.heads.drafters import head_drafter
    from specjax.heads.files import open_head
    from specjax.interchange import write_foreign

    if unknown := set(_ONLY.value) - {"eagle3", "speculators", "medusa"}:
        raise InputError(f"only={unknown.pop()!r}: use eagle3, speculators or medusa")
    folder = Path(_FOLDER.value)
    folder.mkdir(parents=True, exist_ok=True)
    given = {"eagle3": _EAGLE3.value, "medusa": _MEDUSA.value}
    kinds = {form: "medusa" if form == "medusa" else "eagle3" for form in _ONLY.value}
    model = specjax.load_model(_TARGET.value, dtype="float32")
    heads = {
        kind: open_head(kind, given[kind], model)
        for kind in set(kinds.values())
        if given[kind] != _UNTRAINED
    }
    questions = prompts.read_questions(_PROMPTS.value) if _PROMPTS.value else list(BUILT_IN)
    questions = prompts.select(questions, per_task=_PER_TASK.value)
    ids = [
        model.tokenizer.encode_chat([{"role": "user", "content": question.turns[0]}])
        for question in questions
    ]
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

    used = np.unique(np.concatenate([*plain, np.arange(_DRAFT_VOCABULARY)]))
    for kind in set(kinds.values()) - heads.keys():
        make = made_medusa if kind == "medusa" else made_eagle3
        heads[kind] = make(model, used[:_DRAFT_VOCABULARY].astype(np.int32))
    for form, kind in kinds.items():
        head = heads[kind]
        write_foreign(head, folder / form, form, model)
        config = {
            "method": kind,
            "model": str(folder / form),
            "num_speculative_tokens": _LENGTH.value,
        }
        peer_answer = ask_vllm(folder / "target", ids, config)
        started = [prompt + row[:1] for prompt, row in zip(ids, plain, strict=True)]
        mine = specjax.generate(
            model,
            started,
            drafter=head_drafter(head, model, draft_sample_method="greedy"),
            num_speculative_tokens=_LENGTH.value,
            sampling={"max_new_tokens": new - 1},
            batch_size=1,
        )
        rows = [row[:1] + more for row, more in zip(plain, mine.token_ids, strict=True)]
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
        accepted = metrics.num_accepted_tokens_per_pos(mine.drafted, mine.accepted)
        rounds = metrics.num_drafts(mine.drafted)
        print("    specjax", acceptance(list(accepted), rounds))
        print("    vLLM   ", acceptance(peer_answer["accepted_per_pos"], peer_answer["drafts"]))
        print(
            f"  vLLM {peer_answer['seconds']:.1f} s, without a head {peer['seconds']:.1f} s",
            flush=True,
        )
    raise SystemExit(1 if wrong else 0)


def run(argv: list[str]) -> None:
    """`main`, with bad input on one line."""
    from specjax.errors import InputError, one_line

    try:
        main(argv)
    except InputError as error:
        raise SystemExit(f"error: {one_line(error)}") from None


if __name__ == "__main__":
    app.run(run)
