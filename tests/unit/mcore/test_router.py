"""The choice of experts in groups, against the routers of Hugging Face's models."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from fivefold.mcore.choice import BestGroups

N_EXPERTS, HIDDEN, N_TOKENS = 24, 16, 200


# DeepSeek-V2 has 6 experts of 3 of 8 groups, DeepSeek-V3 8 of 4 of 8; neither is a multiple here.
@pytest.mark.parametrize(("top_k", "n_groups", "chosen"), [(6, 8, 3), (5, 6, 3), (2, 2, 1), (7, 4, 2)])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_experts_are_chosen_in_the_groups_of_hugging_faces_router(
    family: str, top_k: int, n_groups: int, chosen: int
) -> None:
    sizes = {
        "n_routed_experts": N_EXPERTS,
        "num_experts_per_tok": top_k,
        "n_group": n_groups,
        "topk_group": chosen,
        "hidden_size": HIDDEN,
        "num_attention_heads": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
    }
    generator = torch.Generator().manual_seed(top_k)
    weight, hidden = (torch.randn(size, HIDDEN, generator=generator) for size in (N_EXPERTS, N_TOKENS))
    if family == "deepseek_v2":
        router = DeepseekV2TopkRouter(DeepseekV2Config(**sizes, topk_method="group_limited_greedy"))
        scores_TE, n_best = (hidden @ weight.T).softmax(-1), 1
    else:
        router = DeepseekV3TopkRouter(DeepseekV3Config(**sizes))
        scores_TE, n_best = (hidden @ weight.T).sigmoid(), 2
    router.weight.data.copy_(weight)
    _, wanted_scores, wanted = router(hidden)
    found_scores, found = BestGroups(n_best)(scores_TE, top_k, n_groups, chosen)
    assert found.sort().values.equal(wanted.sort().values)
    torch.testing.assert_close(found_scores.sort().values, wanted_scores.sort().values)
