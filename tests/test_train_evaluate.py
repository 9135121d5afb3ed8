"""Held-out prompts, and the acceptance length measured on them."""

import numpy as np
from test_train_medusa import cycling
from toy_training import Listed, config_of, conversations

from specjax.drafters import make_drafter
from train.data.examples import Example
from train.run.evaluate import decode_prompts, held_out_prompts, tau_of


def test_prompts_end_where_answers_begin():
    source = Listed(conversations(30))
    prompts = held_out_prompts(source, np.arange(30), 4, room=8)
    assert len(prompts) == 4
    for prompt in prompts:
        assert any(prompt == one.tokens[: one.loss_mask.argmax()].tolist() for one in source)
    # From everywhere, though only half of those that are looked at are needed.
    marked = [
        Example(np.array([7, number, 8], np.int32), np.arange(3) >= 2, id=number)
        for number in range(40)
    ]
    found = [prompt[1] for prompt in held_out_prompts(Listed(marked), np.arange(40), 4, room=8)]
    assert found == [0, 11, 22, 33]
    long = Example(np.arange(20, dtype=np.int32), np.arange(20) >= 15, id=1)
    assert held_out_prompts(Listed([long]), np.array([0]), 4, room=8) == []
    assert held_out_prompts(source, np.array([], int), 4, room=8) == []


def test_tau_is_measured_by_decoding():
    """What the target says, drafted, is always accepted: K + 1 tokens per round."""
    target = cycling()
    said = [[(start + 7 * i) % 61 for i in range(2, 14)] for start in (3, 7)]
    drafter = make_drafter("simulated", target, continuations=said, acceptance=1.0)
    changes = {"eval.new_tokens": 12, "eval.num_speculative_tokens": 3}
    config = config_of(**changes).eval
    found = tau_of(decode_prompts(target, drafter, [[3, 10], [7, 14]], config, 0.0))
    assert found["tau"] == 4.0
    assert found["decoded_acc_pos_0"] == found["decoded_acc_pos_2"] == 1.0
