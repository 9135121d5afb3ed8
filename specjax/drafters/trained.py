"""Drafters made of trained heads."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.drafters import draft_model, eagle, medusa
from specjax.drafters.base import Drafter
from specjax.loading.heads.complete_parameters import complete_parameters
from specjax.loading.heads.head import Head
from specjax.loading.model import Model
from specjax.models.decoder import Decoder
from specjax.models.heads.draft_decoder import ReducedDecoder
from specjax.models.heads.eagle import Eagle
from specjax.models.heads.medusa import Medusa


def head_drafter(head: Head, target: Model, **options: Any) -> Drafter:
    """The drafter of a head for its target; what it borrows is the target's own arrays.

    Options are those of the drafter's kind. Raises InputError for a head of another target and for
    bad options.
    """
    params = complete_parameters(head, target)
    if head.kind == "draft_model":
        form = dataclasses.replace(target.form, scan_layers=True, cache_attention="blocks")
        decoder = Decoder(head.config.decoder, target.dtype, form=form)
        return draft_model.make(ReducedDecoder(decoder), params, **options)
    if head.kind == "medusa":
        return medusa.make(Medusa(head.config, target.dtype), params, **options)
    return eagle.make(Eagle(head.config, target.dtype), params, **options)
