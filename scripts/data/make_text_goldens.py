"""Write goldens of text: detokenized.json and chats.json in tests/goldens.

- detokenized.json: sequences of ids and what sentencepiece reads in them. The vocabulary is that of
  sentencepiece.json. Control tokens are left out, since transformers joins the bytes around one
  that it skips, and so does specjax; so are sequences that begin with the byte of a space, which
  transformers drops.
- chats.json: small chat templates with the constructs of the supported families' own,
  conversations, and what transformers' `apply_chat_template` makes of each: `text`; `joined` where
  content in parts is replaced by one text, a line a part. None where it fails.

Run it from the repository root, with a Python that has transformers, sentencepiece and protobuf:

    python scripts/data/make_text_goldens.py
"""

from __future__ import annotations

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
    """A processor of sentencepiece with the vocabulary of a golden file."""
    model = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in zip(golden["tokens"], golden["scores"], golden["kinds"], strict=True):
        model.pieces.add(piece=token, score=score, type=kind)
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = BPE, True
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.remove_extra_whitespaces = False
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


TEMPLATES = {
    # Texts are added up, as in SmolLM2's and Phi's.
    "added": """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n'
        + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}
        {%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    # Only texts are printed, tool calls and their results in tags, as in Qwen's.
    "texts_and_tools": """
        {%- for message in messages %}
            {%- if message.content is string %}{% set content = message.content %}
            {%- else %}{% set content = '' %}{% endif %}
            {%- if message.role == 'tool' %}
                {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
                    {{- '<|im_start|>user' }}
                {%- endif %}
                {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
                {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
                    {{- '<|im_end|>\n' }}
                {%- endif %}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' }}
                {%- if message.reasoning_content is string %}
                    {{- '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' }}
                {%- endif %}
                {{- content }}
                {%- if message.tool_calls %}
                    {%- for call in message.tool_calls %}
                        {%- if (loop.first and content) or not loop.first %}{{- '\n' }}{% endif %}
                        {%- if call.function %}{% set call = call.function %}{% endif %}
                        {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
                        {%- if call.arguments is string %}{{- call.arguments }}
                        {%- else %}{{- call.arguments | tojson }}{% endif %}
                        {{- '}\n</tool_call>' }}
                    {%- endfor %}
                {%- endif %}
                {{- '<|im_end|>\n' }}
            {%- endif %}
        {%- endfor %}
        {%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}""",
    # Whatever the content is, it is trimmed; one call, and results of any kind, as in Llama 3's.
    "trimmed": """{{- bos_token }}
        {%- if messages[0]['role'] == 'system' %}
            {{- '[system]' + messages[0]['content'] | trim }}{% set messages = messages[1:] %}
        {%- endif %}
        {%- for message in messages %}
            {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
                {{- '[' + message['role'] + ']' + message['content'] | trim + '<end>' }}
            {%- elif 'tool_calls' in message %}
                {%- if not message.tool_calls | length == 1 %}
                    {{- raise_exception('one tool call at once') }}
                {%- endif %}
                {%- set call = message.tool_calls[0].function %}
                {{- '[assistant]{"name": "' + call.name + '", "parameters": ' }}
                {{- call.arguments | tojson }}
                {{- '}<end>' }}
            {%- else %}
                {{- '[ipython]' }}
                {%- if message.content is mapping or message.content is iterable %}
                    {{- message.content | tojson }}
                {%- else %}{{- message.content }}{% endif %}
                {{- '<end>' }}
            {%- endif %}
        {%- endfor %}
        {%- if add_generation_prompt %}{{- '[assistant]' }}{% endif %}""",
    # Parts are printed one by one, and roles alternate, as in Gemma 3's.
    "parts": """{{ bos_token }}
        {%- if messages[0]['role'] == 'system' %}
            {%- if messages[0]['content'] is string %}
                {%- set first = messages[0]['content'] + '\n\n' %}
            {%- else %}{% set first = messages[0]['content'][0]['text'] + '\n\n' %}{% endif %}
            {%- set turns = messages[1:] %}
        {%- else %}{% set first = '' %}{% set turns = messages %}{% endif %}
        {%- for message in turns %}
            {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
                {{ raise_exception('roles must alternate') }}
            {%- endif %}
            {{- '<turn>' + message['role'] + '\n' + (first if loop.first else '') }}
            {%- if message['content'] is string %}{{ message['content'] | trim }}
            {%- elif message['content'] is iterable %}
                {%- for item in message['content'] %}
                    {%- if item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}
                {%- endfor %}
            {%- else %}{{ raise_exception('invalid content') }}{% endif %}
            {{- '<end>\n' }}
        {%- endfor %}
        {%- if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}""",
    # A macro collects what can be read, calls have keys and values, as in GLM's.
    "macro": """{%- macro readable(content) -%}
        {%- if content is string %}{{- content }}
        {%- elif content is iterable and content is not mapping %}
            {%- for item in content %}
                {%- if item is mapping and item.type == 'text' %}{{- item.text }}
                {%- elif item is string %}{{- item }}{% endif %}
            {%- endfor %}
        {%- else %}{{- content }}{% endif %}
        {%- endmacro -%}
        [gMASK]<sop>
        {%- for m in messages %}
            {{- '<|' + m.role + '|>\n' + readable(m.content) }}
            {%- if m.reasoning_content %}
                {{- '<think>' + m.reasoning_content + '</think>' }}
            {%- endif %}
            {%- for call in m.tool_calls or [] %}
                {{- '<call>' + call.function.name }}
                {%- for key, value in call.function.arguments.items() %}
                    {{- '<' + key + '>' + (value if value is string else value | tojson) }}
                {%- endfor %}
            {%- endfor %}
        {%- endfor %}
        {%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}""",
    # Calls instead of content, which may be none, as in Mistral's.
    "none_or_calls": """{{- bos_token }}
        {%- for message in messages %}
            {%- if message['role'] == 'user' %}{{- '[INST]' + message['content'] + '[/INST]' }}
            {%- elif message.tool_calls is defined and message.tool_calls is not none %}
                {{- '[TOOL_CALLS][' }}
                {%- for call in message.tool_calls %}
                    {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
                    {{- ', ' if not loop.last else ']' + eos_token }}
                {%- endfor %}
            {%- elif message['role'] == 'assistant' %}{{- message['content'] + eos_token }}
            {%- elif message['role'] == 'tool' %}
                {%- set content = message.content.content if message.content.content is defined
                    else message.content %}
                {{- '[RESULT]' + content | string + '[/RESULT]' }}
            {%- else %}{{- '[SYSTEM]' + message['content'] + '[/SYSTEM]' }}{% endif %}
        {%- endfor %}""",
}


def parts(*texts: str) -> list[dict[str, str]]:
    """Content as a list of text parts."""
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
    """The message with its parts as one text."""
    if not isinstance(message.get("content"), list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in message["content"])}


def chats() -> None:
    """Write what transformers makes of each conversation with each template."""
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
    """Write what sentencepiece reads in sequences of tokens, the same ones each time."""
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
    detokenized()
    chats()
