"""Reports of decode runs for tests: hand-made records, and readers."""

import copy
import json


def row(number, category, rounds, seconds, plain_seconds, prefill=0.25, **changes):
    """Return the record of a row; `rounds` are tuples (drafted, accepted, emitted)."""
    drafted, accepted, emitted = (list(counts) for counts in zip(*rounds, strict=True))
    tokens = sum(emitted)
    return {
        "drafter": "ngram",
        "question_id": number,
        "category": category,
        "turn": 0,
        "prompt_hash": str(number),
        "token_ids": list(range(tokens)),
        "text": f"answer {number}",
        "finish_reason": "length",
        "text_error": None,
        "logprobs": None,
        "drafted": drafted,
        "accepted": accepted,
        "emitted": emitted,
        "width": [3 if count else 1 for count in drafted],
        "drafter_index": [0 if count else -1 for count in drafted],
        "longest_path": None,
        "batch": number,
        "first_round": 0,
        "prefill_s": prefill,
        "decode_s": seconds,
        "waiting_s": 0.0,
        "first_token_s": 0.1,
        "total_s": 1.0,
        "plain_new_tokens": tokens,
        "plain_prefill_s": prefill,
        "plain_decode_s": plain_seconds,
        "plain_passes": tokens,
        "identical": True,
        "near_ties": [],
        "repeated_speeds": [],
        **changes,
    }


ROWS = [
    row(0, "writing", [(2, 2, 3), (2, 0, 1), (0, 0, 1)], 1.0, 2.0, prefill=0.5),
    row(1, "math", [(2, 1, 2)], 0.5, 0.5),
    # The end of the sequence truncated one token of the last round.
    row(2, "qa", [(2, 2, 3), (2, 1, 1)], 1.0, 0.8),
]


def content(name="ngram", length="2", rows=ROWS, prompts="abc", sampling=(), **config):
    """Return the records of one drafter: `run`, `rows` and `summary`."""
    sampling = {"temperature": 0.0, "max_new_tokens": 5} | dict(sampling)
    config = {
        "target": "model",
        "drafter": {"name": name, "exit_layer": None},
        "num_speculative_tokens": length,
        "sampling": sampling,
        "batch_size": 1,
        "seed": 0,
        "report": "r.jsonl",
        **config,
    }
    conditions = {"device": "cpu", "dtype": "float32", "batch_size": config["batch_size"]}
    rows = [
        {**one, "drafter": name, "prompt_hash": f"{prompts} {number}"}
        for number, one in enumerate(rows)
    ]
    return copy.deepcopy(
        {
            "run": {
                "drafter": name,
                "target": config["target"],
                **conditions,
                "temperature": sampling["temperature"],
                "max_new_tokens": sampling["max_new_tokens"],
                "lossy": False,
                "versions": {"jax": "0.10"},
                "trees": {},
                "config": config,
            },
            "rows": rows,
            "summary": {"drafter": name, "interrupted": False, "refused": None},
        }
    )


def as_lines(*contents):
    """Return the lines of a file with some drafters' records; records of None are left out."""
    records = []
    for kind in ("run", "rows", "summary"):
        for one in contents:
            found = one[kind] if kind == "rows" else [one[kind]]
            named = {"record": "row" if kind == "rows" else kind}
            records += [{**named, **record} for record in found if record is not None]
    return "".join(json.dumps(record) + "\n" for record in records)


def read(path):
    """Return the records of each drafter in a file."""
    found = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        kind, drafter = record.pop("record"), record["drafter"]
        parts = found.setdefault(drafter, {"rows": [], "summary": None})
        if kind == "row":
            parts["rows"].append(record)
        else:
            parts[kind] = record
    return list(found.values())


def read_one(path):
    """Return the records of a file with one drafter."""
    (found,) = read(path)
    return found
