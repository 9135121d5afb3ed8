"""Recognition of end-of-sequence tokens by their names, in every file format.

The names are those at which llama.cpp ends (`special_eog_ids` in llama-vocab.cpp), and two more of
chat models. Files rarely list all of them: a GGUF has fields for three ids, and a base model's
generation_config.json omits the token that ends a turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from specjax.errors import shown
from specjax.loading.user_messages import note

_NAMES = frozenset(
    {
        # Ends of a text or a turn.
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<end_of_turn>",
        "<|end_of_turn|>",  # OpenChat
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "</s>",
        "<eos>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<end_of_utterance>",
        "<turn|>",
        "<|tool_response>",
        "<|observation|>",  # GLM: the model asks for a tool's answer
        "<｜end▁of▁sentence｜>",  # noqa: RUF001 - DeepSeek's bars are not ASCII
        "[e~[",
        # What code models write after a file: padding, or the next one.
        "<|fim_pad|>",
        "<fim-pad>",
        "<fim_pad>",
        "<PAD>",
        "[PAD]",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<REPO>",
        "<reponame>",
        "<|file_sep|>",
    }
)

_PARTS_OF_A_TURN = {
    "<|end|>": tuple(
        {call, other} for call in ("<|call|>", "<|calls|>") for other in ("<|return|>", "<|flush|>")
    ),
    "</s>": ({"<|tool_response>"},),
}
"""Names that end no sequence if the vocabulary has all names of one of the sets."""


def named_ends(ids: Mapping[str, int], plain_text: Collection[str] = ()) -> list[int]:
    """Return the ids of end-of-sequence tokens, recognized by name, in ascending order.

    `ids` maps a vocabulary's tokens to ids. `plain_text` are tokens that also stand for ordinary
    text; `</s>` among them, as in Gemma's vocabulary, is an HTML tag and not an end.
    """
    ends = _NAMES & ids.keys()
    for name, others in _PARTS_OF_A_TURN.items():
        if any(names <= ids.keys() for names in others):
            ends -= {name}
    if "</s>" in plain_text:
        ends -= {"</s>"}
    return sorted(ids[name] for name in ends)


def ends_in_vocabulary(field: str, ids: Iterable[int], vocab_size: int) -> list[int]:
    """Return those of `ids`, the value of `field` in a file, that are tokens; log the others.

    A model never emits an id from `vocab_size` on. Configs of small models often have the end id of
    the model whose code they use.
    """
    ends = []
    for index in ids:
        if 0 <= index < vocab_size:
            ends.append(index)
        else:
            note(
                f"{field}={shown(index)} is outside the vocabulary of {vocab_size} tokens, and "
                "ends no row"
            )
    return ends
