"""Medusa heads as drafters."""

import pytest
from tiny_models import medusa_head

from specjax.drafters import head_drafter
from specjax.errors import InputError


def test_as_many_tokens_as_heads_by_default(tiny):
    drafter = head_drafter(medusa_head(tiny), tiny, draft_sample_method="greedy")
    assert drafter.drafter.num_speculative_tokens == 3
    assert not drafter.drafter.sampled
    with pytest.raises(InputError, match=r"draft_p_min=1\.0: use a number in \[0, 1\)"):
        head_drafter(medusa_head(tiny), tiny, draft_p_min=1.0)
