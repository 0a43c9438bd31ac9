"""Log-probabilities and entropies from the last hidden state, without the [tokens, vocabulary] logits.

The vocabulary is sharded over tensor-parallel ranks and the tokens are taken a chunk at a time, in the forward and in
the backward pass. What is kept between the two is one log-normaliser and one entropy a token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def linear_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float,
    entropy_gradient: bool,
    chunk_size: int,
    vocab: int,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(hidden @ weight.T / temperature)[target], and the entropy of that distribution: float32 [N] each.

    weight_VH is this rank's shard of the rows, in rank order; rows beyond `vocab` are filler and get no probability.
    hidden_NH is the same on all ranks; its gradient is this rank's part, to be summed over the group. The entropy
    carries a gradient only with `entropy_gradient`.
    """
    return _LinearLogprobs.apply(hidden_NH, weight_VH, targets_N, temperature, entropy_gradient, chunk_size, vocab, group)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        entropy_gradient: bool,
        chunk_size: int,
        vocab: int,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = group.rank() * weight.shape[0]
        real_rows = min(max(vocab - first, 0), weight.shape[0])
        statistics = hidden.new_empty(4, hidden.shape[0], dtype=torch.float32)
        for rows in _chunks(hidden.shape[0], chunk_size):
            logits = _logits(hidden[rows], weight[:real_rows], temperature)
            statistics[:, rows] = _local_statistics(logits, targets[rows] - first)
        log_normalizer, target_logit, entropy = _combine(statistics, group)
        ctx.save_for_backward(hidden, weight, targets, log_normalizer, entropy)
        ctx.constants = (temperature, entropy_gradient, chunk_size, first, real_rows)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return target_logit - log_normalizer, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprob: torch.Tensor, grad_entropy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, log_normalizer, entropy = ctx.saved_tensors
        temperature, entropy_gradient, chunk_size, first, real_rows = ctx.constants
        grad_hidden = torch.empty_like(hidden)
        accumulator = _WeightGradient(weight, real_rows)
        for rows in _chunks(hidden.shape[0], chunk_size):
            logits = _logits(hidden[rows], weight[:real_rows], temperature)
            grad_logits = _grad_logits(
                logits,
                targets[rows] - first,
                log_normalizer[rows],
                grad_logprob[rows],
                (grad_entropy[rows], entropy[rows]) if entropy_gradient else None,
            )
            grad_logits = (grad_logits / temperature).to(hidden.dtype)
            torch.mm(grad_logits, weight[:real_rows], out=grad_hidden[rows])
            accumulator.add(grad_logits, hidden[rows])
        return grad_hidden, accumulator.result(), None, None, None, None, None, None


def _chunks(n_tokens: int, chunk_size: int) -> list[slice]:
    return [slice(start, min(start + chunk_size, n_tokens)) for start in range(0, n_tokens, chunk_size)]


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """float32 [chunk, rows]. On CUDA the half-precision product is accumulated and left in float32."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = torch.mm(hidden, weight.t()).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _local_statistics(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """float32 [4, chunk] over this rank's rows: max, sum exp(l - max), sum exp(l - max) * l, and the target's logit or 0."""
    if logits.shape[1] == 0:
        return logits.new_tensor([-float("inf"), 0.0, 0.0, 0.0])[:, None].expand(4, logits.shape[0])
    maximum = logits.amax(dim=-1)
    weights = (logits - maximum[:, None]).exp()
    inside = (targets >= 0) & (targets < logits.shape[1])
    target = logits.gather(1, targets.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)
    return torch.stack([maximum, weights.sum(-1), (weights * logits).sum(-1), torch.where(inside, target, 0.0)])


def _combine(statistics_4N: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-normaliser, target logit and entropy, float32 [N] each, from every rank's statistics."""
    shards = statistics_4N.unsqueeze(0)
    if group.size() > 1:
        gathered = statistics_4N.new_empty(group.size() * 4, statistics_4N.shape[1])
        dist.all_gather_into_tensor(gathered, statistics_4N.contiguous(), group=group)
        shards = gathered.view(group.size(), *statistics_4N.shape)
    maximum_RN, sums_RN, weighted_RN, target_RN = shards.unbind(1)
    maximum = maximum_RN.amax(0)
    scale_RN = (maximum_RN - maximum).exp()
    total = (sums_RN * scale_RN).sum(0)
    log_normalizer = maximum + total.log()
    entropy = log_normalizer - (weighted_RN * scale_RN).sum(0) / total
    return log_normalizer, target_RN.sum(0), entropy


def _grad_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    log_normalizer: torch.Tensor,
    grad_logprob: torch.Tensor,
    entropy: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """d/dl of grad_logprob * logprob + grad_entropy * entropy: g (1[target] - p) - g_H p (log p + H)."""
    log_p = logits - log_normalizer[:, None]
    p = log_p.exp()
    grad = -grad_logprob[:, None] * p
    if entropy is not None:
        grad_entropy, value = entropy
        grad -= grad_entropy[:, None] * p * (log_p + value[:, None])
    inside = (targets >= 0) & (targets < logits.shape[1])
    if logits.shape[1] > 0:
        at_target = torch.where(inside, grad_logprob, 0.0)[:, None]
        grad.scatter_add_(1, targets.clamp(0, logits.shape[1] - 1)[:, None], at_target)
    return grad


class _WeightGradient:
    """Sum over chunks of grad_logits.T @ hidden, in float32.

    Under Megatron's DDP the sum goes straight into the parameter's `main_grad`. A tied weight is also the embedding's,
    whose gradient arrives by autograd; it gets none from here but still the sum in `main_grad`.
    """

    def __init__(self, weight: torch.Tensor, real_rows: int) -> None:
        self.weight = weight
        self.real_rows = real_rows
        self.in_place = "main_grad" in vars(weight)
        self.total = weight.main_grad if self.in_place else torch.zeros_like(weight, dtype=torch.float32)

    def add(self, grad_logits: torch.Tensor, hidden: torch.Tensor) -> None:
        total = self.total[: self.real_rows]
        if hidden.is_cuda and hidden.dtype != torch.float32:
            torch.addmm(total, grad_logits.t(), hidden, out_dtype=torch.float32, out=total)
        else:
            total.addmm_(grad_logits.t().to(total.dtype), hidden.to(total.dtype))

    def result(self) -> torch.Tensor | None:
        if not self.in_place:
            return self.total.to(self.weight.dtype)
        if vars(self.weight).get("zero_out_wgrad", False):
            return None
        self.weight.grad_added_to_main_grad = True
        # DDP's hook only fires on a gradient; it discards this one.
        return torch.empty_like(self.weight)
