"""Write tests/goldens/detokenized.json: what sentencepiece reads in sequences of tokens.

The vocabulary is that of tests/goldens/sentencepiece.json. Each row is a sequence of ids and its
text. Control tokens are left out, since transformers joins the bytes around one that it skips, and
so does specjax; so are sequences that begin with the byte of a space, which transformers drops.

Run it from the repository root, with a Python that has sentencepiece and protobuf:

    python scripts/data/make_text_goldens.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

GOLDENS = Path(__file__).parents[2] / "tests" / "goldens"
ROWS, SPACE = 60, "<0x20>"
CONTROL, BYTE, BPE = 3, 6, 2


def processor(golden: dict) -> sentencepiece.SentencePieceProcessor:
    """sentencepiece with the vocabulary of a golden file."""
    model = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in zip(golden["tokens"], golden["scores"], golden["kinds"], strict=True):
        model.pieces.add(piece=token, score=score, type=kind)
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = BPE, True
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.remove_extra_whitespaces = False
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def main() -> None:
    """Write the rows, the same ones each time."""
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
    main()
