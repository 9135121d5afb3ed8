"""The stages in which a target's drafters are made, and the export of their heads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lib.trainers import TRAINERS
from specjax.methods.heads.head import Head
from specjax.methods.saved_heads import read_head, save_head


class Stage(NamedTuple):
    """A command, as arguments after `python -m`, that resumes where it was stopped.

    It finishes `result`, a folder, and is at work in `folder`, which may be the same.
    """

    folder: Path
    result: Path
    command: list[str]


def stages(
    root: Path,
    kinds: Sequence[str],
    responses: Sequence[str],
    *,
    size: str | None,
    generate: bool,
    questions: bool,
    store_features: bool,
) -> list[Stage]:
    """Return the stages that make drafters in the folder `root`, in order.

    `kinds` are names of `TRAINERS`, and `responses` are existing datasets. With `generate` the
    target answers prompts, with `questions` too those that it asks itself; with `store_features`
    its features are stored for the kinds that read them. `size` is "debug", or None for full
    training.
    """
    suffix, data = f":{size}" if size else "", list(responses)
    found = []
    sources = {"responses": ("generate", [])} if generate else {}
    if generate and questions:
        sources["self_asked"] = ("ask", ["--config.prompts=target_questions"])
    for name, (folder, options) in sources.items():
        config = f"--config=configs/generate_smollm2.py{suffix}"
        folders = [f"--config.workdir={root / folder}", f"--config.output={root / name}"]
        command = ["train.generate", config, *options, *folders]
        found.append(Stage(root / folder, root / name, command))
        data.append(str(root / name))
    stored = data
    if store_features and any(TRAINERS[kind].reads_stored for kind in kinds):
        stored = [str(root / "features" / str(number)) for number in range(len(data))]
        for source, output in zip(data, stored, strict=True):
            command = ["train.features", f"--input={source}", f"--output={output}"]
            found.append(Stage(Path(output), Path(output), command))
    for kind in kinds:
        read = stored if TRAINERS[kind].reads_stored else data
        folders = [f"--config.data={','.join(read)}", f"--config.workdir={root / kind}"]
        command = [*TRAINERS[kind].command(suffix), *folders]
        found.append(Stage(root / kind, root / kind / "export", command))
    return found


def export_head(trained: Path, folder: Path) -> Head:
    """Write the head that a run in the folder `trained` exported in its compact form; return it.

    Prints the size. Raises InputError if a parameter does not fit.
    """
    head = read_head(trained / "export")
    write_head(head, folder)
    return head


def write_head(head: Head, folder: Path) -> None:
    """Write a head in its compact form, replacing an earlier one, and print its size."""
    save_head(head, folder, overwrite=True, compact=True)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"wrote {folder}: {size / 1e6:.1f} MB", flush=True)
