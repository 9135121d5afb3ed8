"""Write a trained head in another tool's format, or read a head written by another tool.

    python -m specjax.export --head=PATH --format=eagle3 --output=DIR

PATH is a head saved by specjax, a directory in one of the formats, or the kind of a bundled head,
such as eagle3. Formats are those of other tools, specjax, and compact, which is specjax's with
kernels and embeddings in 8 bits. The written head is read back and compared bit by bit. Exit codes:
0; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from specjax.apps.command_line.flags import run_flags
from specjax.errors import InputError
from specjax.fields import Choice, Flag, PathOrName, optional
from specjax.files import folders
from specjax.files.path_checks import output_folder, user_path
from specjax.loading.hub import DEFAULT_MODEL
from specjax.loading.load import DTYPE, load_model
from specjax.loading.model import Model
from specjax.loading.storage.checkpoint_directory import is_checkpoint
from specjax.methods import published_layouts
from specjax.methods.find_head import open_head
from specjax.methods.heads.eagle3_layer_ids import CONVENTIONS
from specjax.methods.heads.head import Head, check_same, whole_vocabulary
from specjax.methods.published_layouts import check_format
from specjax.methods.registry import HEADS
from specjax.methods.saved_heads import compacted, read_head, save_head

OWN = ("specjax", "compact")
FORMATS = (*published_layouts.FORMATS, *OWN)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of `specjax.export`."""

    head: Annotated[str, PathOrName()]
    """The head to export."""
    format: Annotated[str, Choice(FORMATS)]
    """The format to write."""
    output: Annotated[str, PathOrName()]
    """The directory to write."""
    target: Annotated[str, PathOrName()] = DEFAULT_MODEL
    """The head's target model."""
    dtype: Annotated[str, DTYPE] = "float32"
    """The dtype in which the target is loaded."""
    read_layer_ids: Annotated[str | None, optional(Choice(CONVENTIONS))] = None
    """What the layer ids of another tool's EAGLE-3 head count."""
    layer_ids: Annotated[str, Choice(CONVENTIONS)] = "input"
    """What the written layer ids count: inputs of layers (EAGLE, vLLM) or outputs (SpecForge,
    SGLang).
    """
    whole_vocabulary: Annotated[bool, Flag()] = False
    """Let a head that shares the target's output matrix use its whole vocabulary."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return run_flags(export, Flags, argv, program="python -m specjax.export", documentation=__doc__)


def export(options: Flags) -> int:
    """Export a head as the parsed flags say, and return the command's exit code.

    Raises InputError.
    """
    source, output = user_path("head", options.head), output_folder("output", options.output)
    where = f"output={options.output!r}"
    shipped = options.head in HEADS
    if not shipped and not source.is_dir():
        raise InputError(
            f"head={options.head!r}: no such directory; give that of a saved head, or the kind of "
            f"one that comes with specjax ({', '.join(HEADS)})"
        )
    own, compact = options.format in OWN, options.format == "compact"
    folders.check_replaceable(output, "drafter" if own else "head", where, overwrite=not own)
    head = None
    if not shipped and is_checkpoint(source):
        head = _prepared(read_head(source), options)
    target = load_model(options.target, dtype=options.dtype, weights="float", field="target")
    if shipped:
        head = _prepared(open_head(options.head, None, target), options)
    elif head is None:
        foreign = published_layouts.read_foreign(source, target, layer_ids=options.read_layer_ids)
        head = _prepared(foreign, options)
    if own:
        head = compacted(head) if compact else head
        save_head(head, output, compact=compact)
        check_same(head, read_head(output), str(output))
    else:
        published_layouts.write_foreign(
            head, output, options.format, target, layer_ids=options.layer_ids
        )
    print(_summary(head, target, options))
    return 0


def _prepared(head: Head, options: Flags) -> Head:
    """Return the head to write, after checking that the format can represent it."""
    if options.format not in OWN:
        check_format(head, options.format)
    return whole_vocabulary(head) if options.whole_vocabulary else head


def _summary(head: Head, target: Model, options: Flags) -> str:
    """Return a text about the written head."""
    vocabulary = f"{head.config.draft_vocab_size} of {target.config.vocab_size} tokens"
    lines = [
        f"{options.output}: {head.kind} for {target.name} as {options.format}, {vocabulary}; "
        "read again, it is the same head"
    ]
    if options.format == "medusa" and head.draft_ids is not None:
        lines.append("note: vLLM 0.32 stops at a token_map; --whole_vocabulary writes none")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
