r"""Compare drafters as Spec-Bench does: tau and speed by task, over its questions or your own.

    python -m specjax.spec_bench --config.prompts=question.jsonl
    python -m specjax.spec_bench --config.drafters="ngram,eagle3,eagle3 tree.kind=dynamic" \
        --config.temperatures="(0.0, 1.0)" --config.num_speculative_tokens="(1, 2, 4, 8)"

Decodes every question plainly and with each drafter, at each temperature and draft length, one row
at a time and in turn, so that speeds are compared within the same minute. Finished answers are kept
in the folder `out`: the same command resumes there. Then OUT/report has the leaderboard
(report.md, report.html), report.csv, the answers in Spec-Bench's schema, and pictures. Both turns
of a question are asked; the answers of plain decoding are the history of all drafters.

Exit codes: 0; 1 if the output differs from plain decoding by more than rounding explains; 2 for bad
input or a folder that cannot be written; 130 after Ctrl-C, SIGTERM or a closed terminal.
"""
