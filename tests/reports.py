"""Reports of decode runs, made by hand."""

import copy


def row(number, category, rounds, seconds, plain_seconds, prefill=0.25, **changes):
    """A row as `reporting.decode_report` writes it; `rounds` are (drafted, accepted, emitted)."""
    drafted, accepted, emitted = (list(counts) for counts in zip(*rounds, strict=True))
    tokens = sum(emitted)
    return {
        "question_id": number,
        "category": category,
        "drafter": "ngram",
        "token_ids": list(range(tokens)),
        "text": f"answer {number}",
        "new_tokens": tokens,
        "accept_lengths": emitted,
        "rounds": {
            "drafted": drafted,
            "accepted": accepted,
            "width": [3 if count else 1 for count in drafted],
        },
        "prefill_s": prefill,
        "decode_s": seconds,
        "batch": number,
        "plain": {"new_tokens": tokens, "prefill_s": prefill, "decode_s": plain_seconds},
        "identical": True,
        "first_difference": None,
        "margin_at_difference": None,
        **changes,
    }


ROWS = [
    row(0, "writing", [(2, 2, 3), (2, 0, 1), (0, 0, 1)], 1.0, 2.0, prefill=0.5),
    row(1, "math", [(2, 1, 2)], 0.5, 0.5),
    # The end of the sequence truncated one token of the last round.
    row(2, "qa", [(2, 2, 3), (2, 1, 1)], 1.0, 0.8),
]


def content(name="ngram", length="2", rows=ROWS, prompts="abc", **config):
    return copy.deepcopy(
        {
            "rows": rows,
            "summary": {
                "drafter": name,
                "device": "cpu",
                "dtype": "float32",
                "prompts": prompts,
                "versions": {"jax": "0.10"},
                "config": {
                    "target": "model",
                    "drafter": {"name": name, "exit_layer": None},
                    "num_speculative_tokens": length,
                    "sampling": {"temperature": 0.0, "max_new_tokens": 5},
                    "batch_size": 1,
                    "seed": 0,
                    "report": "r.json",
                    **config,
                },
            },
        }
    )
