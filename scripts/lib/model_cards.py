"""Model cards of trained drafters: description, results, and the commands that trained them."""

from __future__ import annotations

import json
import runpy
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from specjax.fields import dotted
from specjax.loading.heads.head import Head


class Trainer(NamedTuple):
    """How a kind of drafter is trained: a module, its config, and what is changed in that."""

    module: str
    config: str
    options: tuple[str, ...] = ()

    def command(self, size: str = "") -> list[str]:
        """The arguments after `python -m`, at a size of the config."""
        return [self.module, f"--config={self.config}{size}", *self.options]


TRAINERS = {
    "eagle3": Trainer("train.eagle", "configs/train_eagle3.py"),
    "draft_model": Trainer("train.distill", "configs/train_distill.py"),
    "medusa": Trainer("train.medusa", "configs/train_medusa.py"),
    "eagle": Trainer("train.eagle", "configs/train_eagle1.py"),
    "mtp": Trainer("train.mtp", "configs/train_mtp.py", ("--config.mtp.export=head",)),
}
"""The kinds that `reproduce_heads.py` trains; each leaves a head."""

METHODS = {**TRAINERS, "medusa2": Trainer("train.medusa", "configs/train_medusa2.py")}
"""All methods of training, by the names that they record."""

_ROOT = Path(__file__).parents[2]

_UNRECORDED = ("data", "target", "workdir", "start_from", "distributed", "mesh")
"""Fields, or sections, that a head's record leaves out (`train.run.setup`)."""

_BEFORE = {
    # It was the only optimizer then.
    "optimizer": "adamw",
    # Medusa heads had no projection then.
    "medusa.projection": False,
}
"""The values that later fields have for heads trained before those fields existed."""


def card(head: Head, data: str = "", measured: Sequence[str] = ()) -> str:
    """A head's model card; `data` says where prompts come from, `measured` are lines of results."""
    size = sum(leaf.size for leaf in jax.tree.leaves(head.params))
    lines = [
        f"# {head.kind} for {head.target.name}",
        "",
        f"{size / 1e6:.2f} million parameters in half precision, logits over "
        f"{head.config.draft_vocab_size} of {head.target.vocab_size} tokens. The target's "
        "embedding, and its head where the drafter has none, are read from the target.",
        "",
        *_training(head, data),
        "- Licence: Apache-2.0, as the target's.",
        "",
        *measured,
    ]
    return "\n".join([*lines, curve(head.kind, head)])


def curve(kind: str, head: Head) -> str:
    """A head's evaluations while it was trained, on held-out conversations."""
    lines = [f"## {kind}: tau against tokens", ""]
    found, before, unseen = [], 0, 0
    for stage in _stages(head):
        rows = stage.get("curve", [])
        found += [{**row, "tokens": before + row["tokens"]} for row in rows]
        before += stage["tokens"]
        unseen = 0 if rows else unseen + stage["tokens"]
    if not found:
        return "\n".join([*lines, "Nothing was evaluated while it was trained.", ""])
    names = [name for name in found[-1] if name.startswith(("tau", "acc_pos"))]
    lines += [
        "On held-out conversations, by their own context (`tau_sim`, accuracies) and decoded "
        "(`tau`)." + (" Those of a later run's data are others." if len(_stages(head)) > 1 else ""),
        "",
    ]
    rows = [["tokens", *names]]
    for row in found:
        cells = [f"{row[name]:.3f}" if name in row else "" for name in names]
        rows.append([f"{row['tokens'] / 1e6:.2f}M", *cells])
    lines += [*table(rows), ""]
    if unseen:
        lines += [f"Nothing was evaluated in the last {unseen / 1e6:.2f} million tokens.", ""]
    return "\n".join(lines)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, of which the first row is the heading."""
    rule = "|" + "---:|" * len(rows[0])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], rule, *lines[1:]]


def _training(head: Head, origin: str) -> list[str]:
    """What a head was trained on, and by which commands."""
    stages = _stages(head)
    if not stages:
        return ["- How it was trained is not recorded."]
    data = stages[-1]["data"]
    tokens, steps = (sum(stage[name] for stage in stages) for name in ("tokens", "step"))
    stored = {bool(stage["data"].get("features")) for stage in stages}
    writers = [name for name, used in (("features", True), ("generate", False)) if used in stored]
    wrote = " or ".join(f"`train.{name}`" for name in writers)
    names = f"`--config.data` names folders that {wrote} wrote"
    names += ", EXPORT_N is W_N/export" if len(stages) > 1 else ""
    return [
        f"- Data: {data['conversations']} conversations, {data['tokens']} tokens, of which "
        f"{data['labels']}, written by the target itself, are learned from.",
        *([f"  {origin}"] if origin else []),
        f"- Trained on {tokens / 1e6:.2f} million tokens in {steps} steps, from the target's own "
        f"weights where they fit, by these commands ({names}):",
        "",
        "```",
        *(_command(stages, number) for number in range(len(stages))),
        "```",
        "",
        *_recipe(stages[-1]["method"]),
    ]


def _recipe(method: str) -> list[str]:
    if method not in TRAINERS:
        return []
    return [
        f"- `python scripts/reproduce_heads.py --workdir=W --kinds={method}` does not repeat these "
        "runs: it is a recipe from the target alone, which first writes answers of its own, and "
        "then trains as today's config file says.",
    ]


def _stages(head: Head) -> list[dict[str, Any]]:
    """The training metadata of the runs that led to a head, the first one first."""
    stages, about = [], head.training
    # A head that was not trained here brings no metadata, or others.
    while about.keys() >= {"method", "data", "config", "step", "tokens"}:
        stages.insert(0, about)
        about = about.get("earlier", {})
    return stages


def _command(stages: Sequence[dict[str, Any]], number: int) -> str:
    """A stage's command: the fields in which its record and its config file differ."""
    about = stages[number]
    if about["method"] not in METHODS:
        return f"# with a custom method, {about['method']}"
    module, file, _ = METHODS[about["method"]]
    usual = dotted(json.loads(runpy.run_path(str(_ROOT / file))["get_config"]().to_json()))
    # A record has the factors by name; the field is a text.
    scales = dotted(about["config"].get("learning_rate_scales", {}))
    scales = ",".join(f"{name}:{factor}" for name, factor in scales.items())
    fields = dotted(about["config"] | {"learning_rate_scales": scales})
    new = [
        name
        for name, value in usual.items()
        if name not in fields and value is not None and name.split(".")[0] not in _UNRECORDED
    ]
    fields |= {name: _BEFORE[name] for name in new if name in _BEFORE}
    sources = ",".join(about["data"]["sources"])
    words = [f"python -m {module} --config={file}", f"--config.data={sources}"]
    if number:
        words.append(f"--config.start_from=EXPORT_{number}")
    words.append(f"--config.workdir=W_{number + 1}")
    for name, value in fields.items():
        # A run in pieces ends as one in one piece does.
        unset = value is None or name == "minutes"
        unset |= name == "decay_steps" and value == about["config"]["steps"]
        if not unset and usual.get(name) != value:
            value = tuple(value) if isinstance(value, list) else value
            words.append(shlex.quote(f"--config.{name}={value}"))
    command = " \\\n    ".join(words)
    if unknown := [name for name in new if name not in _BEFORE]:
        values = ", ".join(f"{name}={usual[name]}" for name in unknown)
        command = (
            f"# not there when this was trained, what it was then is not known: {values}\n{command}"
        )
    return command
