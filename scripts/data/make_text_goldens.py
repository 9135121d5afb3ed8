"""Write goldens of text: detokenized.json and chats.json in tests/goldens.

- detokenized.json: sequences of ids and what sentencepiece reads in them. The vocabulary is that of
  sentencepiece.json. Control tokens are left out, since transformers joins the bytes around one
  that it skips, and so does specjax; so are sequences that begin with the byte of a space, which
  transformers drops.
- chats.json: the templates of the folder chat_templates, conversations, and what transformers'
  `apply_chat_template` makes of each: `text`; `joined` where content in parts is replaced by one
  text, a line a part. None where it fails.

Run it from the repository root, with a Python that has transformers, sentencepiece and protobuf:

    python scripts/data/make_text_goldens.py
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from transformers import PreTrainedTokenizerFast

GOLDENS = Path(__file__).parents[2] / "tests" / "goldens"
ROWS, SPACE = 60, "<0x20>"
CONTROL, BYTE, BPE = 3, 6, 2


def processor(golden: dict) -> sentencepiece.SentencePieceProcessor:
    """Return a processor of sentencepiece with the vocabulary of a golden file."""
    model = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in zip(golden["tokens"], golden["scores"], golden["kinds"], strict=True):
        model.pieces.add(piece=token, score=score, type=kind)
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = BPE, True
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.remove_extra_whitespaces = False
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8").removesuffix("\n")
    for path in sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))
}
"""Small chat templates by name, with the constructs of the supported families' templates."""


def parts(*texts: str) -> list[dict[str, str]]:
    """Return content as a list of text parts."""
    return [{"type": "text", "text": text} for text in texts]


ASKED = {"role": "user", "content": "What is the weather in Ålesund?"}
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Ålesund", "days": 2}},
}
CALLS = [CALL, {**CALL, "id": "call00002", "function": {"name": "now", "arguments": {}}}]
TEXT_CALL = {**CALL, "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
ANSWERED = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "8 °C"}
CHATS = [
    [{"role": "system", "content": " Be brief. "}, ASKED],
    [{"role": "user", "content": parts("One.", " Two. ")}],
    [{"role": "user", "content": parts("One.")}, {"role": "assistant", "content": "Yes."}, ASKED],
    [{"role": "system", "content": parts("Be brief.")}, ASKED],
    [
        {"role": "system", "content": parts("Be brief.")},
        {"role": "user", "content": parts("One.")},
        {"role": "assistant", "content": parts("Yes.", "No.")},
        {"role": "user", "content": parts("Why?")},
    ],
    [{"role": "user", "content": []}],
    [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, ANSWERED],
    [ASKED, {"role": "assistant", "tool_calls": [CALL]}, ANSWERED],
    [ASKED, {"role": "assistant", "content": "", "tool_calls": [TEXT_CALL]}, ANSWERED],
    [
        ASKED,
        {"role": "assistant", "content": "Let me see.", "tool_calls": CALLS},
        ANSWERED,
        ANSWERED,
    ],
    [ASKED, {"role": "assistant", "tool_calls": [CALL]}, {**ANSWERED, "content": parts("8", "°C")}],
    [ASKED, {"role": "assistant", "content": "Yes.", "tool_calls": None, "name": None}, ASKED],
    [ASKED, {"role": "assistant", "content": "Yes.", "reasoning": "It is."}, ASKED],
    [ASKED, {"role": "assistant", "content": None, "reasoning_content": "It is."}, ASKED],
]


def joined(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its parts joined as one text."""
    if not isinstance(message.get("content"), list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in message["content"])}


def chats() -> None:
    """Write the text that transformers makes of each conversation with each template."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1}, "<s>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")

    def rendered(template: str, messages: list[dict[str, Any]]) -> str | None:
        try:
            return tokenizer.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=True, tokenize=False
            )
        except Exception:  # jinja2's, and TypeError where a list is added to a text
            return None

    rows = [
        {
            "template": name,
            "chat": number,
            "text": rendered(template, chat),
            "joined": rendered(template, list(map(joined, chat))),
        }
        for name, template in TEMPLATES.items()
        for number, chat in enumerate(CHATS)
    ]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    tables = [
        f'"{name}": {json.dumps(value, ensure_ascii=False, indent=1)}'
        for name, value in (("templates", TEMPLATES), ("chats", CHATS))
    ]
    content = ",\n".join([*tables, f'"rows": [\n{lines}\n]'])
    (GOLDENS / "chats.json").write_text("{" + content + "}\n", encoding="utf-8")


def detokenized() -> None:
    """Write the texts that sentencepiece decodes from fixed sequences of tokens."""
    golden = json.loads((GOLDENS / "sentencepiece.json").read_text())
    model = processor(golden)
    for text, ids in golden["lines"].items():
        assert model.encode(text) == ids, text
    tokens = [index for index, kind in enumerate(golden["kinds"]) if kind != CONTROL and index]
    in_bytes = [index for index in tokens if golden["kinds"][index] == BYTE]
    draw = random.Random(0)
    characters = [golden["tokens"].index(f"<0x{byte:02X}>") for byte in "\né☃🙂".encode()]
    rows = []
    while len(rows) < ROWS:
        ids = [
            draw.choice(draw.choice([tokens, in_bytes, characters]))
            for _ in range(draw.randrange(1, 8))
        ]
        if draw.random() < 0.5:
            first = draw.randrange(len(characters))
            ids += characters[first : first + draw.randrange(1, 6)]
        if golden["tokens"][ids[0]] != SPACE:
            rows.append([ids, model.decode(ids)])
    lines = ",\n".join(json.dumps(row) for row in rows)
    (GOLDENS / "detokenized.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    detokenized()
    chats()
