"""A small reward model with random scores, and the scores that transformers gives with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

TINY = Path(__file__).resolve().parents[2] / "fivefold" / "models" / "tiny-moe"


def write_reward_model(folder: Path) -> Path:
    """Write a model for sequence classification with random scores, and return its folder."""
    model = AutoModelForSequenceClassification.from_pretrained(TINY, num_labels=1, dtype=torch.float32)
    model.score.weight.data.normal_(std=0.5, generator=torch.Generator().manual_seed(3))
    model.config.pad_token_id = None
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def check_scores(samples: Iterable[Mapping[str, Any]], folder: Path) -> None:
    """Check the reward `liked` of each of a run's samples, whose prompt and response are all of its tokens."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    for sample in samples:
        ids = tokenizer(sample["prompt"] + sample["response"])["input_ids"]
        expected = model(torch.tensor([[*ids, tokenizer.eos_token_id]])).logits[0, 0]
        assert sample["reward/liked"] == pytest.approx(float(expected), abs=2e-5)
        assert sample["reward"] == pytest.approx(sample["reward/right"] + 0.1 * sample["reward/liked"])
