r"""Compare drafters as Spec-Bench does: tau and speed by task, over its questions or your own.

    python -m specjax.spec_bench --config.prompts=question.jsonl
    python -m specjax.spec_bench --config.drafters="ngram,eagle3,eagle3 tree.kind=dynamic" \
        --config.temperatures="(0.0, 1.0)" --config.num_speculative_tokens="(1, 2, 4, 8)"

Decodes every question plainly and with each drafter, at each temperature and draft length, one row
at a time and in turn, so that speeds are compared within the same minute. Finished answers are kept
in the folder `out`, from which the same command resumes. At the end, OUT/report has the leaderboard
(report.md, report.html), report.csv, the answers in Spec-Bench's format, and pictures. All turns of
a question are asked; every drafter gets plain decoding's answers as history.

Exit codes: 0; 1 if the output differs from plain decoding by more than rounding explains; 2 for bad
input or a folder that cannot be written; 130 after Ctrl-C, SIGTERM or a closed terminal.
"""
