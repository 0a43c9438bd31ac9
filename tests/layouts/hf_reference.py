"""The reference for the engine: Hugging Face's model, one sequence at a time, plain autograd and torch's AdamW.

Losses are implemented here from their formulas, and share no code with `fivefold.algorithms`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fivefold.algorithms.losses.ppo import PPO
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.batch import Batch
from fivefold.config.schema.engine import OptimizerConfig

Tensors = dict[str, torch.Tensor]
Reference = tuple[torch.Tensor, torch.Tensor, float, Tensors]
"""Log-probs, entropies, loss and gradient."""


@dataclass(frozen=True)
class Step:
    loss: float
    grad_norm: float


def load_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logprobs_and_entropies(folder: Path, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies, float32 [T] each, 0 on every sequence's first token."""
    model = load_model(folder)
    with torch.no_grad():
        rows = [predict(model, tokens, temperature) for tokens in batch.split(batch.tokens_T)]
    logprobs, entropies = zip(*rows, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def gradients(folder: Path, batch: Batch, loss: PolicyLoss | SFTLoss, scratch: Path) -> tuple[float, Tensors]:
    """Return the loss, and its gradient under the names of the model's files."""
    model = load_model(folder)
    return _accumulate(model, batch, loss), gradients_as_in_files(model, scratch)


def gradients_with_auxiliary_loss(
    folder: Path, batch: Batch, kind: str, coefficient: float, scratch: Path
) -> tuple[float, Tensors]:
    """Return the mean over layers of an auxiliary loss, and the gradient of the SFT loss + `coefficient` x its sum.

    moe_aux_loss_coeff: E sum_e f_e p_e (Fedus et al. 2021, eq. 4 to 6), where f_e is the share of all choices that
    fall on expert e, as the model makes them, and p_e its mean probability. moe_z_loss_coeff: the mean of
    log^2 sum_e exp(logit_e) (Zoph et al. 2022, eq. 5). Both over each sequence, and their mean is weighted by the
    sequences' tokens.
    """
    model = load_model(folder)
    _accumulate(model, batch, SFTLoss())
    value, routed = 0.0, list[tuple[torch.Tensor, torch.Tensor]]()
    """Logits and choices of each router."""
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _module, _inputs, outputs: routed.append((outputs[0], outputs[2])))
    for tokens_L in batch.split(batch.tokens_T):
        weight = len(tokens_L) / batch.n_tokens
        routed.clear()
        model(tokens_L[None])
        for logits_TE, chosen_TK in routed:
            p_TE = logits_TE.softmax(-1)
            f_E = torch.bincount(chosen_TK.flatten(), minlength=p_TE.shape[1]) / chosen_TK.numel()
            losses = {
                "moe_aux_loss_coeff": p_TE.shape[1] * (f_E * p_TE.mean(0)).sum(),
                "moe_z_loss_coeff": logits_TE.logsumexp(-1).square().mean(),
            }
            value += weight * losses[kind].item() / len(routed)
            (coefficient * weight * losses[kind]).backward(retain_graph=True)
    return value, gradients_as_in_files(model, scratch)


def train(
    folder: Path,
    batch: Batch,
    loss: PolicyLoss | SFTLoss,
    config: OptimizerConfig,
    n_steps: int,
    scratch: Path,
    frozen: Sequence[str] = (),
) -> tuple[list[Step], Tensors]:
    """Make steps on one batch at the constant rate `config.lr`. Returns them and the weights after them.

    Parameters whose names match one of the patterns `frozen` stay as they are.
    """
    model = load_model(folder)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in frozen))
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for name, p in trained if not is_exempt(name, p)], "weight_decay": config.weight_decay},
            {"params": [p for name, p in trained if is_exempt(name, p)], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    steps = []
    for _ in range(n_steps):
        optimizer.zero_grad()
        value = _accumulate(model, batch, loss)
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in trained], config.gradient_clipping)
        optimizer.step()
        steps.append(Step(value, float(norm)))
    return steps, _as_in_files(model, scratch)


def is_exempt(name: str, parameter: torch.Tensor) -> bool:
    """Return whether a weight does not decay: norms and biases, those of all experts in one too."""
    return parameter.ndim == 1 or name.endswith("bias")


def gradients_as_in_files(model: Any, scratch: Path) -> Tensors:
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    # The offsets of routers, which are no parameters, and indexers have no gradient.
    return {
        name: grad
        for name, grad in _as_in_files(model, scratch).items()
        if not name.endswith("correction_bias") and ".indexer." not in name
    }


def _as_in_files(model: Any, scratch: Path) -> Tensors:
    """Return the model's tensors as transformers writes them: one tensor per expert, however they are in memory."""
    model.save_pretrained(scratch)
    return load_file(scratch / "model.safetensors")


def _accumulate(model: Any, batch: Batch, loss: PolicyLoss | SFTLoss) -> float:
    total = 0.0
    for index in range(len(batch)):
        sequence = batch.select([index])
        logprobs, entropy = predict(model, sequence.tokens_T, loss.temperature)
        cost = (
            sft_cost(logprobs, sequence)
            if isinstance(loss, SFTLoss)
            else policy_cost(logprobs, entropy, sequence, loss)
        )
        cost = cost / _divisor(batch, loss)
        cost.backward()
        total += float(cost)
    return total


def predict(model: Any, tokens_L: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logits_LV = model(tokens_L[None]).logits[0] / temperature
    log_p_LV = torch.log_softmax(logits_LV[:-1], dim=-1)
    logprobs = log_p_LV.gather(1, tokens_L[1:, None]).squeeze(1)
    entropy = -(log_p_LV.exp() * log_p_LV).sum(-1)
    first = torch.zeros(1)
    return torch.cat([first, logprobs]), torch.cat([first, entropy])


def sft_cost(logprobs_L: torch.Tensor, sequence: Batch) -> torch.Tensor:
    return -(logprobs_L * sequence.mask_T).sum()


def policy_cost(logprobs_L: torch.Tensor, entropy_L: torch.Tensor, sequence: Batch, loss: PolicyLoss) -> torch.Tensor:
    """Return the cost of one sequence, the mean or the sum over its tokens, as the aggregation says."""
    fields = [sequence.fields[name] for name in ("advantages", "old_logprobs", "ref_logprobs")]
    tokens = [
        _policy_token_cost(logprobs_L[t], entropy_L[t], *(float(field_L[t]) for field_L in fields), loss)
        for t in range(sequence.n_tokens)
        if sequence.mask_T[t]
    ]
    if not tokens:
        return logprobs_L.sum() * 0.0
    total = torch.stack(tokens).sum()
    return total / len(tokens) if loss.aggregation == "sequence_mean" else total


def _policy_token_cost(
    logprob: torch.Tensor, entropy: torch.Tensor, advantage: float, old: float, ref: float, loss: PolicyLoss
) -> torch.Tensor:
    ppo = loss.surrogate
    assert isinstance(ppo, PPO)
    assert ppo.eps_clip_higher is not None
    ratio = torch.exp(logprob - old)
    inside = 1 - ppo.eps_clip < float(ratio) < 1 + ppo.eps_clip_higher
    bounded = ratio if inside else ratio.detach().clamp(1 - ppo.eps_clip, 1 + ppo.eps_clip_higher)
    surrogate = -torch.minimum(ratio * advantage, bounded * advantage)
    if ppo.c_clip is not None and advantage < 0 and float(surrogate) > -advantage * ppo.c_clip:
        surrogate = torch.tensor(-advantage * ppo.c_clip)
    log_ratio = ref - logprob
    kl = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": torch.exp(log_ratio) - log_ratio - 1}[loss.kl_estimator]
    return surrogate - loss.entropy_coeff * entropy + loss.kl_coeff * kl


def _divisor(batch: Batch, loss: PolicyLoss | SFTLoss) -> float:
    if isinstance(loss, SFTLoss) or loss.aggregation == "token_mean":
        return float(batch.mask_T.sum())
    return float(sum(1 for mask in batch.split(batch.mask_T) if mask.sum() > 0))
