"""A drafter with a smaller language model (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

Its cache always holds x_0 .. x_{n-3}, and a round begins with the tokens [x_{n-2}, x_{n-1}]. Thus
full acceptance, after which the last draft token was never fed to the model, leaves no gap, and all
rows stay aligned. The window keeps the tokens that were fed, with their visibility. When tokens are
committed, the path that equals them moves from the window into the cache; other committed tokens,
of a prompt or by another drafter, are run through the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.core.cache import KVCache, Window, commit
from specjax.core.causal_mask import causal
from specjax.core.drafter import Accepted, Context, LoadedDrafter, Noise
from specjax.core.growth.level import Level
from specjax.core.language_model import LanguageModel
from specjax.distributed.sharding import constrain_rows
from specjax.errors import InputError
from specjax.loading.load import load_draft_model, with_vocabulary
from specjax.loading.model import Model
from specjax.loading.quantize import float_model, in_stacked_form, quantized_model
from specjax.loading.user_messages import note
from specjax.methods.draft_model.head import KIND, ReducedDecoder
from specjax.methods.draft_model.other_tokenizer import TranslatedModel, token_map
from specjax.methods.draft_model.tokenizers import same_tokens
from specjax.methods.draft_model.wrapped import WrappedModel
from specjax.methods.heads.examined import WINDOW, TrueText, Variation, within
from specjax.methods.heads.head import Head
from specjax.methods.heads.head_drafter import HeadDrafter
from specjax.methods.heads.own_cache import OwnCacheDrafter
from specjax.methods.heads.shared_parameters import share_anew
from specjax.models.config import SlidingWindow
from specjax.models.decoder import Decoder
from specjax.models.form import Form
from specjax.trees import Draft

_NOTHING = -1
"""The entry of a window slot to which no token was fed."""


@struct.dataclass
class DraftModelState:
    """The cache of committed keys, and the window of the latest round with the tokens it was fed.

    `seen` has for each slot its path in the window: its ancestors and itself. Paths begin right
    after the cache. Slot 0 holds x_{n-2}; in a row of a single token it is on no path. In slots
    that were not fed, `fed` is -1, and the path is empty.
    """

    cache: KVCache
    window: Window
    fed: Int[Array, "B W"]
    seen: Bool[Array, "B W W"]


@dataclass(frozen=True, kw_only=True)
class DraftModel(OwnCacheDrafter, HeadDrafter):
    """A drafter that runs a separate, smaller model.

    Tokens that only one of the two vocabularies has are not drafted. If the model's logits cover
    only part of the vocabulary, "draft_ids" among its parameters are the token ids. Options
    are those of `OwnCacheDrafter`. Raises InputError for invalid options, and for a window of a
    model that has its own or is no decoder.
    """

    name: ClassVar[str] = KIND
    applies_window: ClassVar[bool] = False
    model: LanguageModel = field(kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _with_window(self.model, self.attention_window)

    @classmethod
    def of_model(cls, path: Any, target: Model, weights: str, **options: Any) -> LoadedDrafter:
        """Return a drafter for a model at `path`, which is anything that `load_model` accepts.

        `path` may also be a `Model`, whose kernels by default keep their bits; otherwise `weights`
        is the storage of the kernels (`DRAFT_WEIGHTS`). A model with another tokenizer drafts the
        tokens that it shares with the target (`other_tokenizer`). Raises InputError if loading
        fails, and if there is none.
        """
        if not isinstance(path, Model):
            path = load_draft_model(path, target, weights, field="drafter.path")
        elif weights == "float":
            path = float_model(path)
        elif weights != "auto":
            path = quantized_model(in_stacked_form(path), weights, field="drafter.weights")
        path = replace(path, kv_cache_dtype=target.kv_cache_dtype)
        if not same_tokens(target, path):
            tokens = token_map(target, path)
            note(f"drafter: {tokens.described(target, path)}")
            model = TranslatedModel(path.architecture, target.config.vocab_size)
            params = TranslatedModel.parameters(path.params, tokens)
            return LoadedDrafter(cls(model, **options), params)
        path = with_vocabulary(path, target.config.vocab_size)
        return LoadedDrafter(cls(path.architecture, **options), path.params)

    @classmethod
    def of_head(cls, head: Head, params: Any, target: Model, **options: Any) -> LoadedDrafter:
        """Return a drafter for a distilled head; `params` are the result of `complete_parameters`.

        `options` are those of `OwnCacheDrafter`.
        """
        kind = target.form.cache_attention
        form = Form("stacked", "blocks" if kind == "kernel" else kind)
        decoder = Decoder(
            head.config.decoder,
            target.activation_dtype,
            form=form,
            multiply=target.multiply,
            cache_dtype=target.cache_dtype,
        )
        return LoadedDrafter(cls(ReducedDecoder(decoder), **options), params)

    @property
    def own_positions(self) -> int:
        """The number of positions of the model."""
        return self.model.max_positions

    @property
    def slides(self) -> bool:
        """Whether the model takes a window, and has no embedding of positions."""
        decoder = self._decoder
        if decoder is None:
            return False
        windowed = self.attention_window is None and any(decoder.config.windowed)
        return not (windowed or decoder.config.embedding.positions)

    @property
    def _limited_model(self) -> LanguageModel:
        """The model, with the sliding window of the options."""
        return _with_window(self.model, self.attention_window)

    @property
    def _slots(self) -> int:
        """The number of window slots: for x_{n-2}, the root, and every draft token that is fed."""
        return 1 + self.window_slots

    @property
    def following_tokens(self) -> int:
        """Zero: an entry of the cache depends on its token and those before."""
        return 0

    @property
    def features(self) -> tuple[str, ...]:
        """None: the model reads tokens."""
        return ()

    def for_target(self, params: Any, target_params: Any) -> Any:
        """Return `params` with the arrays that a distilled model shares from `target_params`."""
        if isinstance(self.model, ReducedDecoder):
            return share_anew(params, target_params)
        return params

    def init(self, params: Any, batch: int, capacity: int) -> DraftModelState:
        """Return the state of rows without committed or fed tokens."""
        del params
        model, slots = self._limited_model, self._slots
        cache, window = model.make_cache(batch, capacity), model.make_window(batch, slots)
        return DraftModelState(cache, window, *_nothing_fed(batch, slots))

    def propose(
        self, params: Any, state: DraftModelState, context: Context, noise: Noise
    ) -> tuple[Draft, DraftModelState]:
        """Draft a chain or a tree with the model.

        The new state has the window of this round and the tokens that the model was fed.
        """
        batch, slots, last = context.length.shape[0], self._slots, context.length - 1
        model = self._limited_model
        # A row of one token has no x_{n-2}: nothing sees its slot 0.
        holds_token = (jnp.arange(slots) > 0)[None, None, :] | (last > 0)[:, None, None]

        def extend(
            carry: tuple,
            tokens: Int[Array, "B T"],
            positions: Int[Array, "B T"],
            start: Int[Array, ""] | int,
            seen: Bool[Array, "B T W"],
        ) -> tuple[Float[Array, "B T V"], tuple]:
            window, *fed = carry
            # Each token sees itself: the output of a token that sees nothing is NaN.
            itself = start + jnp.arange(tokens.shape[1])[:, None] == jnp.arange(slots)[None, :]
            result = model.extend(
                params, tokens, positions, state.cache, window, start, seen | itself[None]
            )
            fed = [
                lax.dynamic_update_slice(into, new, (0, start, *[0] * (into.ndim - 2)))
                for into, new in zip(fed, (tokens, seen), strict=True)
            ]
            return result.logits, (result.window, *fed)

        def step(level: Level, carry: tuple) -> tuple[Float[Array, "B T V"], tuple]:
            seen = jnp.pad(level.visible, ((0, 0), (0, 0), (1, 0)), constant_values=True)
            seen &= holds_token
            positions = level.positions(context)
            return extend(carry, level.tokens, positions, level.start + 1, seen)

        pair = jnp.stack([context.token_at(last - 1), context.token_at(last)], axis=1)
        positions = jnp.stack([jnp.maximum(last - 1, 0), last], axis=1)
        empty = (model.make_window(batch, slots), *_nothing_fed(batch, slots))
        seen = causal(jnp.arange(2), slots) & holds_token
        logits, carry = extend(empty, pair, positions, 0, seen)
        draft, carry = self.draft(
            logits[:, 1:],
            step,
            carry,
            context,
            noise,
            draft_ids=params.get("draft_ids") if isinstance(params, dict) else None,
        )
        window, *fed = carry
        return draft, DraftModelState(state.cache, window, *constrain_rows(fed))

    def observe(
        self, params: Any, state: DraftModelState, context: Context, accepted: Accepted
    ) -> DraftModelState:
        """Commit the tokens up to x_{n-3}, so that the cache holds their keys and values.

        The longest path in the window that equals the committed tokens moves into the cache; the
        model processes the rest.
        """
        wanted_length = jnp.maximum(context.length - 2, 0)
        longest = max(self.num_speculative_tokens, 1) + 1
        # Each slot's distance from the cache's first free position; -1 for slots without a path.
        depth = state.seen.sum(axis=2) - 1
        committed_tokens = context.tokens_from(state.cache.length, longest)
        committed_tokens = jnp.take_along_axis(committed_tokens, jnp.maximum(depth, 0), axis=1)
        matches = state.fed == committed_tokens
        matches &= depth < (wanted_length - state.cache.length)[:, None]
        matches &= (depth >= 0) & ~jnp.any(state.seen & ~matches[:, None, :], axis=2)
        path = matches[:, None, :] & (depth[:, None, :] == jnp.arange(longest)[None, :, None])
        count = path.any(axis=2).sum(axis=1, dtype=jnp.int32)
        cache = commit(state.cache, state.window, jnp.argmax(path, axis=2), count)
        cache = lax.while_loop(
            lambda cache: jnp.any(cache.length < wanted_length),
            lambda cache: self._read(
                params, cache, context, wanted_length, accepted.tokens.shape[1]
            ),
            cache,
        )
        return DraftModelState(cache, state.window, *_nothing_fed(*state.fed.shape))

    def _read(
        self,
        params: Any,
        cache: KVCache,
        context: Context,
        wanted_length: Int[Array, "B"],
        chunk: int,
    ) -> KVCache:
        """Return the cache after running up to `chunk` more committed tokens of each row.

        Rows whose cache already holds `wanted_length` tokens do not change.
        """
        batch, step, model = cache.length.shape[0], jnp.arange(chunk), self._limited_model
        result = model.extend(
            params,
            context.tokens_from(cache.length, chunk),
            cache.length[:, None] + step[None, :],
            cache,
            model.make_window(batch, chunk),
            0,
            causal(step, chunk),
            logits=False,
        )
        count = jnp.clip(wanted_length - cache.length, 0, chunk)
        return commit(cache, result.window, jnp.broadcast_to(step, (batch, chunk)), count)

    def teacher_forced(self, params: Any, text: TrueText) -> list[Float[Array, "A Vd"]]:
        """Return the logits of drafts after true tokens, of which the drafts' begin at `labels`.

        They depend on the prefix only, so those of one label are a later token's of an earlier one.
        """
        tokens, _, window, labels = text
        width = tokens.shape[0]
        result = self.model.extend(
            params,
            tokens[None],
            jnp.arange(width)[None],
            self.model.make_cache(1, 64),
            self.model.make_window(1, width),
            0,
            within(window, width)[None],
        )
        logits, drafts = result.logits[0, labels - 1], jnp.arange(labels.shape[0])
        steps = range(self.num_speculative_tokens)
        return [logits[jnp.minimum(drafts + step, labels.shape[0] - 1)] for step in steps]

    def own_params(self, params: Any) -> dict[str, Any]:
        """Return no parameters: those of a whole model may be anything."""
        del params
        return {}

    def window_remedy(self, size: int) -> str:
        """Return what to set if the model is right only with a window of `size` tokens."""
        return f"sliding_window={size} in the draft model's config"

    def variations(self) -> Iterator[Variation]:
        """Yield the drafter without the window of the model's config, if that has one."""
        decoder = self._decoder
        if decoder is None or decoder.config.sliding_window is None:
            return
        size = decoder.config.sliding_window.size
        decoder = replace(decoder, config=replace(decoder.config, sliding_window=None))
        is_wrapped = isinstance(self.model, WrappedModel)
        yield Variation(
            WINDOW,
            f"no window in place of {size} tokens",
            "sliding_window=null in the draft model's config",
            replace(self, model=replace(self.model, decoder=decoder) if is_wrapped else decoder),
        )

    @property
    def _decoder(self) -> Decoder | None:
        """The model's decoder, or None for another model."""
        is_wrapped = isinstance(self.model, WrappedModel)
        model = self.model.decoder if is_wrapped else self.model
        return model if isinstance(model, Decoder) else None


def _with_window(model: LanguageModel, window: SlidingWindow | None) -> LanguageModel:
    """Return a decoder with a window in all layers, and any model as it is without one."""
    if window is None:
        return model
    if isinstance(model, WrappedModel):
        return replace(model, decoder=_with_window(model.decoder, window))
    if not isinstance(model, Decoder):
        raise InputError(
            f"drafter.sliding_window={window.size}: the draft model is no decoder; leave it out"
        )
    if any(model.config.windowed):
        raise InputError(
            f"drafter.sliding_window={window.size}: the draft model has layers with windows of "
            f"{model.config.sliding_window.size} tokens; leave it out"
        )
    return replace(model, config=replace(model.config, sliding_window=window))


def _nothing_fed(batch: int, slots: int) -> tuple[Int[Array, "B W"], Bool[Array, "B W W"]]:
    """Return the fields `fed` and `seen` of an empty window."""
    fed = jnp.full((batch, slots), _NOTHING, jnp.int32)
    return constrain_rows((fed, jnp.zeros((batch, slots, slots), bool)))
