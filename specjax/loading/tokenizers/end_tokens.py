"""Recognize end-of-sequence tokens by name, in every file format.

The names are those at which llama.cpp ends (`special_eog_ids` in llama-vocab.cpp), and two more of
chat models. Files seldom list all of them: a GGUF has room for three ids, and a base model's
generation_config.json omits the end of a turn.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

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
"""Names that end nothing in a vocabulary that has all names of one of the sets."""


def named_ends(ids: Mapping[str, int], plain_text: Collection[str] = ()) -> list[int]:
    """Return the ids of end-of-sequence tokens by name, ascending.

    `ids` maps a vocabulary's tokens to ids. `plain_text` are tokens that also stand for ordinary
    text; `</s>` among them is an HTML tag, as in Gemma's vocabulary, and no end.
    """
    found = _NAMES & ids.keys()
    for name, others in _PARTS_OF_A_TURN.items():
        if any(names <= ids.keys() for names in others):
            found -= {name}
    if "</s>" in plain_text:
        found -= {"</s>"}
    return sorted(ids[name] for name in found)
