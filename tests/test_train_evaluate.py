"""Held-out prompts, and the acceptance length measured on them."""

import numpy as np
from toy_training import Listed, conversations

from specjax.drafters import LoadedDrafter
from specjax.drafters.draft_model import DraftModel
from train.data.examples import Example
from train.run.evaluate import held_out_prompts, measure_tau


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


def test_tau_is_measured_by_decoding(tiny):
    """The target as its own drafter is always accepted: K + 1 tokens per round."""

    def itself(head, target):
        return LoadedDrafter(DraftModel(target.architecture), head)

    found = measure_tau(
        tiny.params,
        tiny,
        [[3, 4, 5], [7, 1]],
        new_tokens=12,
        num_speculative_tokens=3,
        make_drafter=itself,
    )
    assert found["tau"] == 4.0
    assert found["decoded_acc_pos_0"] == found["decoded_acc_pos_2"] == 1.0
