"""Write tests/goldens/vocabularies.json: where texts begin and end, by transformers and llama.cpp.

A tiny vocabulary is written as tokenizer.json with many post-processors, which transformers reads,
and as GGUF files that differ in their keys, whose vocabulary llama.cpp reads. Run it from the
repository root, with a Python that has transformers, gguf and llama-cpp-python:

    python scripts/data/make_vocabulary_goldens.py
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

GOLDENS = Path(__file__).parents[2] / "tests" / "goldens"
SPECIAL = ["<s>", "</s>", "<unk>", "[gMASK]", "<sop>", "[CLS]", "[SEP]"]
TEXTS = [
    "It's I'M we'LL 12345!\n\nx",
    "a1234567 (b) $5 <c> x^2 | y~z `code` \u20ac9",
    "  two  spaces and a tab\t\tend  ",
    "wait... \u201cquotes\u201d 100%+2=3; caf\u00e9 \u4f60\u597d\uff0c\u4e16\u754c\u3002 "
    "\u0663\u0664\u0665\u0666",
    "CamelCase snake_case 3.14 1,000,000\r\n  def f(x):\n    return x\n",
]
PRE = ("gpt-2", "smollm", "qwen2", "smaug-bpe", "glm4", "llama-bpe", "tekken")
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
NAMES = """<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn>
<|endoftext|> <|end_of_text|> <|eom_id|> </s> <eos> <EOT> _<EOT> [EOT] [EOS] <end_of_utterance>
<turn|> <|tool_response> <\uff5cend\u2581of\u2581sentence\uff5c> [e~[ <|fim_pad|> <fim-pad>
<fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
<|im_start|> <|user|> <|fim_prefix|> <pad> <s> [SEP] [MASK] <unused5> <repo_name>
""".split()  # noqa: SIM905 - a line for each would be a page
COMBINATIONS = {
    "gpt-oss": [["<|return|>", 3], ["<|call|>", 3], ["<|end|>", 3]],
    "solar": [["<|calls|>", 3], ["<|flush|>", 3], ["<|end|>", 3]],
    "phi": [["<|end|>", 3], ["<|call|>", 3]],
    "gemma 4": [["<eos>", 3], ["<turn|>", 3], ["<|tool_response>", 3], ["</s>", 3]],
    "qwen": [["<|endoftext|>", 3], ["<|im_end|>", 3], ["<|file_sep|>", 3], ["</s>", 1]],
}


def base() -> dict[str, Any]:
    """Return the tokens and merges of a byte-level BPE without merges into words."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        min_frequency=1,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Digits, signs and spaces in every company, so that merges cross all boundaries of words.
    numbers = [f"{i}{i + 1} {i}!{i}" for i in range(100)]
    signs = [f"{a}{b}" for a in "().,!$<>=^~|+'" for b in "a1 \n()"]
    backend.train_from_iterator(TEXTS * 3 + numbers + signs, trainer)
    state = json.loads(backend.to_str())["model"]
    vocabulary = sorted(state["vocab"], key=state["vocab"].get)
    return {"tokens": vocabulary, "merges": [" ".join(pair) for pair in state["merges"]]}


def directory_cases(model: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the tokens that transformers adds to a text, by post-processor and flags."""
    ids = {token: index for index, token in enumerate(SPECIAL)}
    template = processors.TemplateProcessing

    def around(*parts: str) -> Any:
        one = " ".join(parts)
        named = [(part, ids[part]) for part in parts if part in ids]
        return template(one, f"{one} $B:1", named)

    cases = {
        "none": None,
        "byte level": processors.ByteLevel(trim_offsets=False),
        "bos": around("<s>", "$A"),
        "eos": around("$A", "</s>"),
        "bos and eos": around("<s>", "$A", "</s>"),
        "glm": around("[gMASK]", "<sop>", "$A"),
        "bert": processors.BertProcessing(("[SEP]", 6), ("[CLS]", 5)),
        "roberta": processors.RobertaProcessing(("</s>", 1), ("<s>", 0)),
        "llama 3": processors.Sequence(
            [processors.ByteLevel(trim_offsets=False), around("<s>", "$A")]
        ),
    }
    chat = [{"role": "user", "content": "ab"}]
    for name, processor in cases.items():
        for flags in ({}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}):
            for kind, family in (
                ("PreTrainedTokenizerFast", "glm4"),
                ("LlamaTokenizer", "llama"),
                ("GemmaTokenizer", "gemma3_text"),
                ("Qwen2Tokenizer", "qwen2"),
            ):
                backend = tokenizers.Tokenizer(
                    models.BPE(
                        {token: index for index, token in enumerate(model["tokens"])},
                        [tuple(merge.split(" ")) for merge in model["merges"]],
                    )
                )
                backend.pre_tokenizer = pre_tokenizers.ByteLevel(False)
                backend.decoder = decoders.ByteLevel()
                backend.add_special_tokens(SPECIAL)
                if processor is not None:
                    backend.post_processor = processor
                settings = {
                    "tokenizer_class": kind,
                    "bos_token": "<s>",
                    "eos_token": "</s>",
                    "unk_token": "<unk>",
                    "chat_template": "{{ bos_token }}{{ messages[0]['content'] }}",
                    **flags,
                }
                with tempfile.TemporaryDirectory() as folder:
                    backend.save(f"{folder}/tokenizer.json")
                    files = {
                        "tokenizer_config.json": settings,
                        "config.json": {"model_type": family},
                    }
                    for file, content in files.items():
                        Path(folder, file).write_text(json.dumps(content))
                    read = AutoTokenizer.from_pretrained(folder)
                    yield {
                        "name": name,
                        "post_processor": json.loads(backend.to_str())["post_processor"],
                        "settings": settings,
                        "ids": read("ab")["input_ids"],
                        "chat_ids": read.apply_chat_template(chat, return_dict=False),
                    }


def distinct(cases: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cases, omitting those that repeat an earlier one for another class."""
    kept: dict[str, dict[str, Any]] = {}
    for case in cases:
        plain = {key: value for key, value in case["settings"].items() if key != "tokenizer_class"}
        kept.setdefault(json.dumps({**case, "settings": plain}), case)
    return list(kept.values())


def gguf_case(tokens: list[str], kinds: list[int], keys: dict[str, Any]) -> dict[str, Any]:
    """Return how llama.cpp encodes texts with a vocabulary that has these metadata keys."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/vocabulary.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        for key, value in keys.items():
            name = f"tokenizer.ggml.{key}"
            if isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, int):
                writer.add_uint32(name, value)
            elif isinstance(value, str):
                writer.add_string(name, value)
            else:
                writer.add_array(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        model = llama_cpp.Llama(path, vocab_only=True, verbose=False)
        vocabulary = model._model.vocab
        return {
            "ends": [
                index
                for index in range(len(tokens))
                if llama_cpp.llama_vocab_is_eog(vocabulary, index)
            ],
            "ids": [model.tokenize(text.encode(), add_bos=True, special=True) for text in TEXTS],
        }


def llama_cases(model: dict[str, Any]) -> dict[str, Any]:
    """Return llama.cpp's end tokens by name and by key, splitting by `pre`, added tokens."""
    tokens, merges = model["tokens"], model["merges"]
    plain = {"model": "gpt2", "merges": merges, "bos_token_id": 0, "eos_token_id": 2}
    kinds = [CONTROL] * len(SPECIAL) + [NORMAL] * (len(tokens) - len(SPECIAL))
    # Without the names of ends among the special tokens.
    quiet = [f"<|special_{index}|>" for index in range(len(SPECIAL))] + tokens[len(SPECIAL) :]

    def ends(extra: list[list[Any]], **keys: int) -> list[str]:
        names, types = [one for one, _ in extra], [kind for _, kind in extra]
        found = gguf_case(quiet + names, kinds + types, plain | {"pre": "gpt-2"} | keys)["ends"]
        return [(quiet + names)[index] for index in found if index != plain["eos_token_id"]]

    flags = [
        {},
        {"add_bos_token": True},
        {"add_eos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"pre": "llama-bpe"},
        {"pre": "llama-bpe", "add_bos_token": False},
    ]
    spm = json.loads((GOLDENS / "sentencepiece.json").read_text())
    spm_keys = {"model": "llama", "scores": spm["scores"]}
    spm_flags = [
        {},
        {"bos_token_id": 1, "eos_token_id": 2},
        {"add_bos_token": False},
        {"add_eos_token": True},
        {"add_space_prefix": False},
        {"pre": "default", "add_space_prefix": False, "add_bos_token": False},
    ]
    return {
        "ends_by_name": {
            f"{name} {kind}": ends([[name, kind]])
            for name in NAMES
            for kind in (NORMAL, CONTROL, USER_DEFINED)
        },
        "ends_of_several": [
            {"tokens": extra, "ends": ends(extra)} for extra in COMBINATIONS.values()
        ],
        "ends_by_key": [
            {"key": key, "ends": ends([["<end>", CONTROL]], **{key: len(quiet)})}
            for key in (
                "eot_token_id",
                "eom_token_id",
                "fim_pad_token_id",
                "fim_rep_token_id",
                "fim_sep_token_id",
            )
        ],
        "splits": {
            # "default" is that of a file without the key.
            name: gguf_case(tokens, kinds, plain | ({"pre": name} if name in PRE else {}))["ids"]
            for name in ("default", *PRE)
        },
        "added": [
            {"keys": keys, "ids": gguf_case(tokens, kinds, plain | keys)["ids"][0]}
            for keys in flags
        ],
        "sentencepiece": [
            {"keys": keys, **gguf_case(spm["tokens"], spm["kinds"], spm_keys | keys)}
            for keys in spm_flags
        ],
    }


def main() -> None:
    """Write the file."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    model = base()
    golden = {
        "made_by": [f"{name} {version(name)}" for name in ("transformers", "tokenizers", "gguf")]
        + [f"llama-cpp-python {llama_cpp.__version__}"],
        "base": model | {"special": SPECIAL},
        "texts": TEXTS,
        "directories": distinct(directory_cases(model)),
        "llama_cpp": llama_cases(model),
    }
    text = json.dumps(golden, ensure_ascii=False, separators=(",", ":"))
    (GOLDENS / "vocabularies.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
