"""The experts of a model that is to be trained from scratch, by the names of GLM's config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from specjax.errors import InputError
from specjax.fields import Number, Whole
from specjax.models.config import Attention, Experts


@dataclass(frozen=True)
class ExpertSizes:
    """The section `model.experts` of a config: a mixture of experts after some dense layers.

    `scoring_func` is GLM's and DeepSeek-V3's sigmoids, with a bias of each expert where experts are
    chosen (2408.15664), or the softmax of Qwen3, whose layers these then are. Raises InputError for
    sizes that do not fit together.
    """

    num_experts: Annotated[int, Whole(1, 1 << 16)]
    num_experts_per_tok: Annotated[int, Whole(1, 1 << 16)]
    moe_intermediate_size: Annotated[int, Whole(1, 1 << 24)]
    n_shared_experts: Annotated[int, Whole(0, 1 << 8)]
    first_k_dense_replace: Annotated[int, Whole(0, 1 << 16)]
    n_group: Annotated[int, Whole(1, 1 << 16)]
    topk_group: Annotated[int, Whole(1, 1 << 16)]
    scoring_func: Literal["sigmoid", "softmax"]
    norm_topk_prob: bool
    routed_scaling_factor: Annotated[float, Number(1e-6, 1e6)]

    def __post_init__(self) -> None:
        count, groups = self.num_experts, self.n_group
        if count % groups or (groups > 1 and count == groups):
            raise InputError(
                f"model.experts.n_group={groups}: num_experts={count} cannot be split into so many "
                "groups of two or more; use a smaller divisor"
            )
        if self.topk_group > groups:
            raise InputError(
                f"model.experts.topk_group={self.topk_group}: there are n_group={groups} groups; "
                "use at most that many"
            )
        chosen_from = self.topk_group * count // groups
        if self.num_experts_per_tok > chosen_from:
            raise InputError(
                f"model.experts.num_experts_per_tok={self.num_experts_per_tok}: a token chooses "
                f"from {chosen_from} experts; use at most that many, or more experts or topk_group"
            )

    def fields(self, num_layers: int, head_dim: int) -> dict[str, Any]:
        """The fields of `DecoderConfig` that make it a model with these experts.

        Raises InputError where the dense layers are all there are.
        """
        if self.first_k_dense_replace >= num_layers:
            raise InputError(
                f"experts.first_k_dense_replace={self.first_k_dense_replace}: none of "
                f"num_layers={num_layers} layers has experts; use fewer, or leave the section out"
            )
        sigmoid = self.scoring_func == "sigmoid"
        attention = Attention(qk_norm=True)
        if sigmoid:
            attention = Attention(output_bias=False, rotary_width=head_dim)
        return {
            "experts": Experts(
                num_experts=self.num_experts,
                per_token=self.num_experts_per_tok,
                intermediate_size=self.moe_intermediate_size,
                router=self.scoring_func,
                normalize=self.norm_topk_prob,
                scale=self.routed_scaling_factor,
                selection_bias=sigmoid,
                groups=self.n_group,
                groups_per_token=self.topk_group,
                shared_size=self.n_shared_experts * self.moe_intermediate_size,
                num_dense=self.first_k_dense_replace,
            ),
            "family": "glm4_moe" if sigmoid else "qwen3_moe",
            "attention": attention,
        }
