"""On every layout, distributions are those of Hugging Face's model, and a pupil has the gradient of the divergence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cases import AnyCase, case_of
from compare import assert_close
from fsdp_cases import FSDPCase
from hf_reference import Tensors, gradients_as_in_files, load_model
from megatron_cases import Case, whole
from ragged import uneven_batch
from tiny_models import VOCAB
from worker_pool import Workers

from fivefold.algorithms.distillation import Direction, Distillation
from fivefold.algorithms.losses.policy_gradient import Reinforce
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.batch import Batch
from fivefold.config.schema.engine import OptimizerConfig
from fivefold.config.schema.fsdp import FSDPConfig
from fivefold.config.schema.megatron import MegatronConfig
from fivefold.engine.distillation import TopK
from fivefold.engine.energies import Energies
from fivefold.engine.entropy_changes import EntropyChanges

TOLERANCE = 1e-4
COEFF, TEMPERATURE = 0.7, 1.3
PUPIL, TEACHER = "qwen3_moe", "qwen2"  # the pupil has an output layer of its own, the teacher's is its embedding
CASES: list[tuple[str, str, int, Direction]] = [
    ("megatron:(attn:c2d2|ffn:t2e2)", "megatron:p2t2", 5, "reverse"),
    ("megatron:(attn:t2p2|ffn:t2)", "megatron:d2c2", 5, "forward"),
    ("megatron:d1", "megatron:t4", VOCAB, "jsd"),
    ("fsdp:d2t2", "fsdp:t2c2", 5, "mixed"),
]
"""Layouts of pupil and teacher, tokens of the divergence, and its direction."""
BETA = 0.3
CHUNK = 5
KEEPING: dict[str, AnyCase] = {
    "megatron:d1": Case("megatron:d1", MegatronConfig(logprob_chunk_size=CHUNK, logprob_recompute=False)),
    "fsdp:d2t2": FSDPCase("fsdp:d2t2", FSDPConfig(logprob_chunk_size=CHUNK, logprob_recompute=False)),
}
"""Pupils that keep their logits for the backward pass; the others compute them again."""


def second_teacher(k: int) -> dict[str, torch.Tensor]:
    """Return the columns of a second teacher, and the weights of both by sequence: the first may have none."""
    batch, generator = uneven_batch(), torch.Generator().manual_seed(5)
    logprobs_TV = (3 * torch.randn(batch.n_tokens, VOCAB, generator=generator)).log_softmax(1)
    logprobs_TK, tokens_TK = logprobs_TV.topk(k)
    weight_T = torch.cat([torch.full((n,), row % 4 / 4) for row, n in enumerate(batch.lengths)])
    return {
        "teacher_tokens/1": tokens_TK.int(),
        "teacher_token_logprobs/1": logprobs_TK,
        "teacher_weight": weight_T,
        "teacher_weight/1": 1 - weight_T,
        "whole": logprobs_TV,
    }


@dataclass(frozen=True)
class Expected:
    log_q_TV: torch.Tensor
    """The teacher's log-probs; 0 on the first token of each sequence."""
    loss: float
    gradients: Tensors


def log_probs(folder: Path, batch: Batch) -> tuple[object, list[torch.Tensor]]:
    model = load_model(folder)
    rows = [
        torch.log_softmax(model(tokens_L[None]).logits[0, :-1] / TEMPERATURE, -1)
        for tokens_L in batch.split(batch.tokens_T)
    ]
    return model, [torch.cat([torch.zeros(1, VOCAB), row]) for row in rows]


def hugging_face(models: Path, k: int, direction: str, scratch: Path) -> Expected:
    """In a worker: the mean over trained tokens of COEFF times the divergence over k tokens and the rest."""
    batch = uneven_batch()
    with torch.no_grad():
        log_q_TV = torch.cat(log_probs(models / TEACHER, batch)[1])
    model, rows = log_probs(models / PUPIL, batch)
    p_TV, other = torch.cat(rows).exp(), second_teacher(k)
    divergence_T = other["teacher_weight"] * divergence(p_TV, log_q_TV.exp(), k, direction)
    divergence_T = divergence_T + other["teacher_weight/1"] * divergence(p_TV, other["whole"].exp(), k, direction)
    loss = COEFF * (divergence_T * batch.mask_T).sum() / batch.mask_T.sum()
    loss.backward()
    return Expected(log_q_TV, float(loss), gradients_as_in_files(model, scratch))


def divergence(p_TV: torch.Tensor, q_TV: torch.Tensor, k: int, direction: str) -> torch.Tensor:
    """Return the divergence over the k tokens that q likes best and the rest."""
    chosen_TV = torch.zeros_like(q_TV).scatter(1, q_TV.topk(k).indices, 1.0)
    events = []
    for probability_TV in (p_TV, q_TV):
        rest_T1 = (probability_TV * (1 - chosen_TV)).sum(1, keepdim=True)
        events.append(
            torch.cat([torch.where(chosen_TV > 0, probability_TV, 1.0), rest_T1 if k < VOCAB else rest_T1 + 1], 1)
        )
    # An event with the probability 1 in both, in the place of one that is not there, adds nothing.
    p, q = events
    middle = BETA * q + (1 - BETA) * p
    reverse, forward, of_p, of_q = ((a * (a / b).log()).sum(1) for a, b in ((p, q), (q, p), (p, middle), (q, middle)))
    return {
        "reverse": reverse,
        "forward": forward,
        "mixed": BETA * forward + (1 - BETA) * reverse,
        "jsd": BETA * of_q + (1 - BETA) * of_p,
    }[direction]


def teacher_top_k(case: AnyCase, folder: Path, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In a worker: return tokens and log-probs of the whole batch; and of its own tokens what losses read of them."""
    engine, batch = case.engine(folder), uneven_batch()
    tokens_TK, logprobs_TK = engine.score(engine.share(batch), TopK(k, TEMPERATURE)).values()
    rows = engine._assembled(batch, torch.cat([tokens_TK.float(), logprobs_TK], 1).T)
    columns = engine.score(engine.share(batch), Energies(TEMPERATURE))
    for less_expected in (False, True):
        changes = engine.score(engine.share(batch), EntropyChanges(TEMPERATURE, less_expected=less_expected))
        columns[f"changes, {less_expected}"] = changes["entropy_changes"]
    return rows[:k].T.long(), rows[k:].T, engine._assembled(batch, torch.stack(list(columns.values())))


def pupil(
    case: AnyCase, folder: Path, tokens_TK: torch.Tensor, logprobs_TK: torch.Tensor, direction: Direction
) -> object:
    """In a worker: return the loss, the divergence, their gradient, and the number of logits kept for the gradient."""
    engine, batch = case.engine(folder, OptimizerConfig()), uneven_batch()
    batch = batch.with_fields(
        advantages=torch.zeros(batch.n_tokens),
        teacher_tokens=tokens_TK.int(),
        teacher_token_logprobs=logprobs_TK,
        **{name: column for name, column in second_teacher(tokens_TK.shape[1]).items() if name != "whole"},
    )
    over = "full" if tokens_TK.shape[1] == VOCAB else "top_k"
    loss = PolicyLoss(TEMPERATURE, Reinforce(), distillation=Distillation(COEFF, over, direction, BETA, n_teachers=2))
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        metrics = engine.forward_backward_of(batch, loss)
    logits = (tensor for tensor in kept if tensor.ndim == 2 and len(tensor) <= CHUNK and tensor.shape[1] >= VOCAB // 2)
    return metrics["loss"], metrics["teacher_kl"], whole(engine.gradients()), sum(tensor.numel() for tensor in logits)


@pytest.mark.parametrize(("layout", "of_teacher", "k", "direction"), CASES)
def test_a_pupil_has_the_gradient_of_the_divergence(
    layout: str, of_teacher: str, k: int, direction: Direction, models: Path, workers: Workers, tmp_path: Path
) -> None:
    batch = uneven_batch()
    (expected,) = workers(1).run(hugging_face, models, k, direction, tmp_path)
    teacher, case = case_of(of_teacher), KEEPING.get(layout) or case_of(layout)
    for tokens_TK, logprobs_TK, own_4T in workers(teacher.world_size).run(teacher_top_k, teacher, models / TEACHER, k):
        trained_T = batch.mask_T.bool()
        best = expected.log_q_TV.topk(k)
        torch.testing.assert_close(logprobs_TK[trained_T], best.values[trained_T], rtol=TOLERANCE, atol=TOLERANCE)
        told = expected.log_q_TV.gather(1, tokens_TK)[trained_T]
        torch.testing.assert_close(told, logprobs_TK[trained_T], rtol=TOLERANCE, atol=TOLERANCE)
        assert not logprobs_TK[~trained_T].any()
        squares_T = expected.log_q_TV.exp().square().sum(1)
        sampled_T = expected.log_q_TV.gather(1, batch.tokens_T[:, None]).squeeze(1)
        energies_T = 1 - 2 * sampled_T.exp() + squares_T
        changes_TV = expected.log_q_TV.exp() * (
            expected.log_q_TV - (expected.log_q_TV.exp() * expected.log_q_TV).sum(1, keepdim=True)
        )
        changes_T = changes_TV.gather(1, batch.tokens_T[:, None]).squeeze(1)
        less_T = changes_T - (expected.log_q_TV.exp() * changes_TV).sum(1)
        for mine_T, theirs_T in zip(own_4T, (sampled_T, energies_T, changes_T, less_T), strict=True):
            torch.testing.assert_close(mine_T[trained_T], theirs_T[trained_T], rtol=TOLERANCE, atol=TOLERANCE)
        assert own_4T[1][~trained_T].isnan().all()
        assert not own_4T[2:, ~trained_T].any()
    results = workers(case.world_size).run(pupil, case, models / PUPIL, tokens_TK, logprobs_TK, direction)
    for loss, divergence, *_ in results:
        assert loss == pytest.approx(expected.loss, rel=TOLERANCE)
        assert divergence == pytest.approx(expected.loss / COEFF, rel=TOLERANCE)
    assert_close(results[0][2], expected.gradients, TOLERANCE)
    if layout in KEEPING:
        assert sum(n_kept for *_, n_kept in results) == batch.mask_T.sum() * VOCAB, "each logit is kept once"
