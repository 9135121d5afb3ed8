"""Write tests/goldens: transformers' outputs for tiny models and for the default model.

Run it from the repository root, with a Python that has torch, transformers, accelerate,
sentencepiece and gguf:

    python scripts/data/make_goldens.py PATH/TO/SmolLM2-135M-Instruct.Q4_1.gguf
"""
# ruff: noqa: RUF001 - lines in many scripts are what is tested here

from __future__ import annotations

import argparse
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

GOLDENS = Path(__file__).parents[2] / "tests" / "goldens"
TOKENS = 24
TEXT = (
    "the quick brown fox jumps over the lazy dog; a model drafts, the target verifies. 0123456789"
)

COMMON = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[dict[str, Any], torch.dtype, dict[str, Any]]] = {
    # Padded: 96 rows for a tokenizer of 80 tokens.
    "grouped_tied": ({"tie_word_embeddings": True, "head_dim": 6}, torch.bfloat16, {}),
    "biased_untied": (
        {"attention_bias": True, "mlp_bias": True, "head_dim": 8, "tie_word_embeddings": False},
        torch.float16,
        {"max_shard_size": "10KB"},
    ),
    "llama3": (
        {"rope_parameters": LLAMA3, "num_key_value_heads": 4, "head_dim": 8},
        torch.bfloat16,
        {},
    ),
    "linear": (
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
            "num_key_value_heads": 1,
            "head_dim": 4,
        },
        torch.float32,
        {},
    ),
    "yarn": (
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "beta_fast": 4.0,
                "original_max_position_embeddings": 16,
            },
            "num_key_value_heads": 4,
            "head_dim": 8,
        },
        torch.bfloat16,
        {},
    ),
    # Its text exceeds the original positions, so that transformers uses the long factors.
    "longrope": (
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "short_factor": [1.0, 1.25, 1.5, 1.75],
                "long_factor": [1.0, 1.5, 2.5, 4.0],
                "original_max_position_embeddings": 16,
            },
            "head_dim": 8,
        },
        torch.bfloat16,
        {},
    ),
}

LINES = [
    "Hello, world!",
    "",
    " ",
    "   three leading spaces",
    "trailing spaces   ",
    "a  b   c    d",
    "tabs\tand\nnew\r\nlines\n\n\nthree",
    "\n",
    "\n \n  \n",
    "I'm, you're, he'll, we've, they'd, it's, don't; I'M YOU'RE",
    "0 12 345 6789 00001",
    "3.14159, -2.5e-10, 1,000,000 and 0xDEADBEEF",
    "2024-11-21T08:30:00Z v1.2.3",
    "naïve café, Ångström, façade",
    "Größe, Straße, ÄÖÜ äöü ß",
    "Привет, мир! Как дела?",
    "Γειά σου Κόσμε",
    "你好，世界！今天天气怎么样？",
    "こんにちは、世界。カタカナ",
    "안녕하세요 세계",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "emoji 🙂👍🏽👩‍👩‍👧‍👦🇩🇪 done",
    "combining: e\u0301 a\u0308 \u0915\u094d\u0937",
    "zero\u200bwidth\u00a0no-break\u3000ideographic",
    "def f(x: int) -> str:\n    return f'{x!r}'  # comment\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * c; }",
    "SELECT * FROM t WHERE a >= 1 AND b <> 'x';",
    '<html><body class="x">&amp;</body></html>',
    "https://example.org/a/b?c=d&e=f#g user@example.com",
    "$E = mc^2$ and \\frac{a}{b} ≤ √2 × π",
    "ALLCAPS camelCase snake_case kebab-case PascalCase",
    "antidisestablishmentarianism supercalifragilisticexpialidocious",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "!!! ??? ... --- === *** ### @@@",
    "“curly” ‘quotes’ — dash … ellipsis «guillemets»",
    "<|im_start|>user\nspecial tokens in text<|im_end|>\n<|endoftext|>",
    "<|im_start|><|im_end|> <repo_name>x<file_sep>",
    "replacement \ufffd and control \x07\x1b[0m",
    '{"json": [1, 2.0, null, true], "nested": {"k": "v"}}',
    "| a | b |\n|---|---|\n| 1 | 2 |",
]
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "Four"},
        {"role": "user", "content": "And 3+3?\nIn digits."},
    ],
]
PROMPTS = [
    "The capital of France is",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    [{"role": "user", "content": "Name three colours of the rainbow, one a line."}],
]


def tiny_model(name: str) -> None:
    """Save one random model and its logits for a few tokens."""
    settings, dtype, saving = MODELS[name]
    torch.manual_seed(sorted(MODELS).index(name))
    model = LlamaForCausalLM(LlamaConfig(**(COMMON | settings)))
    with torch.no_grad():
        for key, value in model.named_parameters():
            noise = torch.randn_like(value)
            if "norm" in key:
                value.copy_(1 + 0.1 * noise)
            elif key.endswith("bias"):
                value.copy_(0.1 * noise)
            elif "embed" in key and not model.config.tie_word_embeddings:
                value.copy_(noise)
            else:
                value.copy_(noise * value.shape[-1] ** -0.5)
    model.to(dtype).save_pretrained(GOLDENS / name, **saving)
    model = LlamaForCausalLM.from_pretrained(
        GOLDENS / name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = torch.randint(0, 80, (1, TOKENS))
    with torch.no_grad():
        out = model(tokens, output_hidden_states=True)
    rotary = model.model.rotary_emb
    short = {"short_frequencies": rotary.original_inv_freq.numpy()} if name == "longrope" else {}
    np.savez_compressed(
        GOLDENS / name / "golden.npz",
        **short,
        tokens=tokens.numpy().astype(np.int32),
        logits=out.logits.numpy(),
        layer_input_1=out.hidden_states[1].numpy(),
        frequencies=rotary.inv_freq.numpy(),
    )


def tiny_tokenizer(directory: Path) -> None:
    """Save a byte-level tokenizer of 80 tokens that starts text with bos."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=80, special_tokens=["<s>", "</s>", "<|im_end|>"], show_progress=False
    )
    backend.train_from_iterator([TEXT] * 4, trainer)
    while backend.get_vocab_size() < 80:
        backend.add_tokens([f"<extra{backend.get_vocab_size()}>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $A", "<s> $A $B:1", [("<s>", 0)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", model_max_length=64
    )
    fast.chat_template = (
        "{{ bos_token }}{% for message in messages %}\n"
        "  {%- if message.role not in ['user', 'assistant'] %}\n"
        "    {{- raise_exception('unknown role ' ~ message.role) }}\n"
        "  {%- endif %}\n"
        "  {{- message.content | trim }}<|im_end|>\n"
        "{%- endfor %}"
    )
    fast.save_pretrained(directory)
    path = directory / "generation_config.json"
    settings = json.loads(path.read_text()) | {"eos_token_id": [1, 2]}
    path.write_text(json.dumps(settings, indent=2) + "\n")
    texts = ["the fox", "a model drafts 42", "dog;  the\tQ"]
    chat = [{"role": "user", "content": " the lazy dog "}]
    golden = {
        "ids": {text: fast(text).input_ids for text in texts},
        "chat": chat,
        "chat_ids": fast.apply_chat_template(chat, return_dict=False),
    }
    (directory / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


def sentencepiece_tokenizer() -> None:
    """Save a small SentencePiece vocabulary and sentencepiece's own encoding of some lines."""
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT, *LINES[:12]] * 4),
        model_writer=trained,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        user_defined_symbols=["<turn>"],
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    pieces = range(model.get_piece_size())
    kinds = [
        2 * model.is_unknown(i) + 3 * model.is_control(i) + 6 * model.is_byte(i) or 1
        for i in pieces
    ]
    kinds[model.piece_to_id("<turn>")] = 4
    golden = {
        "tokens": [model.id_to_piece(i) for i in pieces],
        "scores": [model.get_score(i) for i in pieces],
        "kinds": kinds,
        "lines": {text: model.encode(text) for text in LINES if "<|" not in text},
    }
    path = GOLDENS / "sentencepiece.json"
    path.write_text(json.dumps(golden) + "\n")


def default_model(path: Path) -> None:
    """Save token ids and greedy continuations of the default model."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    lines = [
        {"text": text, "ids": ids, "decoded": tokenizer.decode(ids, skip_special_tokens=True)}
        for text in LINES
        for ids in [tokenizer(text).input_ids]
    ]
    chats = [
        {
            "messages": chat,
            "text": tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
            "ids": tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=False
            ),
        }
        for chat in CHATS
    ]
    _write_lines(GOLDENS / "smollm2_tokenizer.json", {"lines": lines, "chats": chats})
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    rows = [greedy_row(model, tokenizer, prompt) for prompt in PROMPTS]
    _write_lines(GOLDENS / "smollm2_greedy.json", {"rows": rows})


def greedy_row(model: Any, tokenizer: Any, prompt: str | list) -> dict[str, Any]:
    """Return a prompt's greedy tokens, ignoring end of sequence, and the smallest top-2 margin."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt).input_ids
    else:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]),
            # Without a mask, generate takes the end-of-turn tokens of a prompt for padding.
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=32,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=None,
        )
    margins = [float(-torch.diff(logits[0].topk(2).values)) for logits in out.logits]
    tokens = out.sequences[0, len(ids) :].tolist()
    return {"prompt": prompt, "ids": ids, "tokens": tokens, "margin": round(min(margins), 5)}


def _write_lines(path: Path, tables: dict[str, list[dict]]) -> None:
    """Write JSON with one row per line, so that a change shows as one line."""
    parts = [
        json.dumps(name) + ": [\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]"
        for name, rows in tables.items()
    ]
    path.write_text("{" + ",\n".join(parts) + "}\n")


def main() -> None:
    """Write all goldens anew."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gguf", type=Path, help="the default model's file")
    default = parser.parse_args().gguf
    for name in MODELS:
        shutil.rmtree(GOLDENS / name, ignore_errors=True)
        tiny_model(name)
    tiny_tokenizer(GOLDENS / "grouped_tied")
    sentencepiece_tokenizer()
    default_model(default)


if __name__ == "__main__":
    main()
