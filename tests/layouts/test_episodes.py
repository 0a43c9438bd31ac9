"""Cutting an episode into several sequences changes no log-prob, loss or gradient, on any layout.

whole   p r r t r r        one sequence of two turns
cut     p r r              the first turn, trained here
        p r r t r r        the same tokens again as the prompt of the second turn, which alone is trained here
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron_cases
import pytest
import torch
from compare import assert_close
from fsdp_cases import FSDPCase
from hf_reference import logprobs_and_entropies
from megatron_cases import Case
from tiny_models import VOCAB
from worker_pool import Workers

from fivefold.algorithms.losses.sequence_ratios import GSPO
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.batch import Batch
from tests.rows import long

TOLERANCE = 1e-4

TURNS = ((3, 4, 2, 5), (2, 6, 3, 7), (1, 3), (4, 9, 1, 2))
"""Of each episode, tokens of the prompt, of the first response, of a tool's answer and of the second response."""
LOSS = PolicyLoss(1.0, GSPO(eps_clip=0.2, eps_clip_higher=0.3), "sequence_mean", kl_coeff=0.1, kl_estimator="k3")
"""All that looks at sequences: a ratio over the tokens of an episode, and a mean over them."""


def whole_episodes(folder: Path) -> Batch:
    """Return each episode as one sequence, with old and reference log-probs near those of the model in `folder`."""
    generator = torch.Generator().manual_seed(3)
    lengths = tuple(map(sum, TURNS))
    masks = [torch.arange(len(turns)).remainder(2).repeat_interleave(torch.tensor(turns)) for turns in TURNS]
    batch = Batch(lengths, torch.randint(0, VOCAB, (sum(lengths),), generator=generator), torch.cat(masks).float())
    logprobs, _ = logprobs_and_entropies(folder, batch, temperature=1.0)
    noise = {name: 0.2 * torch.randn(batch.n_tokens, generator=generator) for name in ("old", "ref")}
    advantages = torch.tensor([1.0, -0.5, 0.75, -1.25]).repeat_interleave(torch.tensor(lengths))
    return batch.with_fields(
        advantages=advantages, old_logprobs=logprobs + noise["old"], ref_logprobs=logprobs + noise["ref"]
    )


def cut_episodes(whole: Batch) -> Batch:
    """Return the same episodes, each cut into a sequence for each of its turns."""
    rows, cuts = [], []
    offsets = whole.offsets()
    for number, turns in enumerate(TURNS):
        ends = [sum(turns[: turn + 2]) for turn in range(0, len(turns), 2)]
        rows.append([torch.arange(offsets[number], offsets[number] + end) for end in ends])
        cuts.append(tuple(ends))
    mask_rows = [
        [
            whole.mask_T[indices] * (torch.arange(len(indices)) >= (0 if turn == 0 else row[turn - 1].numel()))
            for turn, indices in enumerate(row)
        ]
        for row in rows
    ]
    taken = torch.cat([indices for row in rows for indices in row])
    return Batch(
        tuple(map(sum, cuts)),
        whole.tokens_T[taken],
        torch.cat([mask for row in mask_rows for mask in row]),
        {name: values_T[taken] for name, values_T in whole.fields.items()},
        tuple(cuts),
    )


@pytest.mark.parametrize(
    ("case", "model"),
    [
        (Case("megatron:d1"), "qwen3"),
        (Case("megatron:d2"), "qwen3"),
        (Case("megatron:c2"), "llama"),
        (Case("megatron:p2v2"), "llama"),
        (FSDPCase("fsdp:d2"), "qwen3"),
        *long((Case("megatron:(attn:p2t2c2|ffn:e4)"), "qwen3_moe")),
        *long((Case("megatron:(attn:c2d2|ffn:t2e2)"), "deepseek_v2")),
    ],
    ids=lambda value: getattr(value, "layout", value if isinstance(value, str) else ""),
)
def test_cutting_an_episode_changes_no_gradient(workers: Workers, models: Path, case: Any, model: str) -> None:
    folder = models / model
    whole = whole_episodes(folder)
    cut = cut_episodes(whole)
    assert len(cut.sequence_lengths) > len(cut) == len(whole)
    assert cut.totals().n_trained_tokens == whole.totals().n_trained_tokens
    run = workers(case.world_size).run
    (wanted, *_), got = (
        run(megatron_cases.gradients, case, folder, whole, LOSS),
        run(megatron_cases.gradients, case, folder, cut, LOSS),
    )
    for result in got:
        torch.testing.assert_close(
            result.logprobs_T[cut.mask_T > 0], wanted.logprobs_T[whole.mask_T > 0], rtol=TOLERANCE, atol=TOLERANCE
        )
        assert result.loss == pytest.approx(wanted.loss, rel=TOLERANCE)
    assert_close(got[0].gradients, wanted.gradients, TOLERANCE)
