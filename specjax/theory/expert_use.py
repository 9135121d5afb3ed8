"""How often a router chooses each expert, counted from committed tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from specjax.errors import InputError
from specjax.theory.argument_checks import Count, Result, check_broadcast, checked_count, unwrap


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertUse:
    """How often each expert is used by runs of consecutive tokens of a text.

    `share[m, e, n - 1]` is the share of runs of n tokens in which some token uses expert e of
    sparse layer m, so it covers both uneven loads and the similarity of neighboring tokens.
    """

    share: Float[np.ndarray, "M E n"]

    @classmethod
    def count(
        cls, texts: Sequence[Int[np.ndarray, "T M K"]], num_experts: int, *, longest: int = 8
    ) -> ExpertUse:
        """Return the use in all runs of up to `longest` tokens.

        `texts[i][t, m]` are the experts (0 to `num_experts` - 1) that token t of text i uses in
        layer m: the feature `experts` of committed tokens. Raises InputError if no text has
        `longest` tokens.
        """
        checked_count("num_experts", num_experts, 1)
        checked_count("longest", longest, 1)
        texts = [np.asarray(text) for text in texts if len(text) >= longest]
        if not texts:
            raise InputError(f"texts: none has {longest} tokens; give longer ones, or less longest")
        runs = np.zeros((texts[0].shape[1], num_experts, longest))
        for text in texts:
            if text.min() < 0 or text.max() >= num_experts:
                raise InputError(f"texts: give experts from 0 to {num_experts - 1}")
            used = (text[..., None] == np.arange(num_experts)).any(axis=2)
            # Every length is counted at the same starts, so that more tokens never use fewer.
            starts, in_run = len(text) - longest + 1, np.zeros((), bool)
            for length in range(longest):
                in_run = in_run | used[length : length + starts]
                runs[:, :, length] += in_run.sum(axis=0)
        return cls(runs / sum(len(text) - longest + 1 for text in texts))

    def distinct(self, tokens: Count, rows: Count = 1) -> Result:
        """Return the mean number of distinct experts per layer in a pass.

        The pass has `tokens` consecutive tokens of each of `rows` independent texts. Runs longer
        than those counted are taken for independent shorter ones, which is too many. So are trees,
        whose siblings are no consecutive tokens, in the other direction.
        """
        check_broadcast(tokens=tokens, rows=rows)
        tokens, rows = checked_count("tokens", tokens, 0), checked_count("rows", rows, 0)
        tokens, rows = np.broadcast_arrays(tokens, rows)
        longest = self.share.shape[2]
        missed = 1 - np.concatenate([np.zeros_like(self.share[..., :1]), self.share], axis=2)
        whole, rest = np.divmod(tokens, longest)
        per_row = missed[..., [longest]][..., 0, None] ** whole.ravel() * missed[..., rest.ravel()]
        used = (1 - per_row ** rows.ravel()).sum(axis=1).mean(axis=0)
        return unwrap(used.reshape(tokens.shape))
