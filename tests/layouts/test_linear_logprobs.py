"""Chunked, vocabulary-parallel log-probs against log_softmax over the whole logits, and the memory they take."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron_cases import Case
from torch.utils._python_dispatch import TorchDispatchMode
from worker_pool import Workers

from fivefold.algorithms.losses.ppo import PPO
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.batch import Batch
from fivefold.bridge.mapping import padded_vocab
from fivefold.config.schema.engine import MicroBatchConfig, OptimizerConfig
from fivefold.config.schema.fsdp import FSDPConfig
from fivefold.config.schema.megatron import MegatronConfig
from fivefold.engine.heads import Head
from fivefold.engine.logprobs import Vocabulary, linear_logprobs
from tests.rows import long

HIDDEN = 12


@dataclass(frozen=True)
class Problem:
    n_tokens: int = 37
    vocab: int = 101
    chunk_size: int = 8
    recompute: bool = True
    temperature: float = 1.0
    entropy_gradient: bool = True
    n_others: int = 0
    """Further tokens at each place whose log-probs are asked for, all different; often the target is among them."""
    dtype: torch.dtype = torch.float32
    scale: float = 1.0
    """Scale of the logits."""
    tolerance: float = 1e-5
    """Tolerance of values in nats and of gradients, relative to the largest one if that is above 1."""


@dataclass(frozen=True)
class Tensors:
    hidden_NH: torch.Tensor
    weight_VH: torch.Tensor
    targets_N: torch.Tensor
    grads_2N: torch.Tensor
    """Gradients of log-prob and entropy."""
    others_NK: torch.Tensor
    grads_NK: torch.Tensor
    """Gradients of the others' log-probs."""


PROBLEMS = {
    "chunks that do not divide": Problem(),
    "kept logits": Problem(temperature=1.7, recompute=False),
    "kept logits of shards of filler": Problem(vocab=2, recompute=False),
    "others": Problem(n_others=5, temperature=1.7),
    "others, no entropy gradient": Problem(n_others=5, entropy_gradient=False),
    "others, kept logits": Problem(n_others=101, recompute=False, temperature=0.7),
    "others, kept logits of shards of filler": Problem(n_others=2, vocab=2, recompute=False),
    "others, no tokens": Problem(n_others=5, n_tokens=0),
    "others, bfloat16": Problem(n_others=5, dtype=torch.bfloat16, tolerance=2e-2),
    "one chunk": Problem(chunk_size=1000),
    "a token a chunk": Problem(chunk_size=1),
    "chunks that divide": Problem(n_tokens=32),
    "hot": Problem(temperature=1.7),
    "cold": Problem(temperature=0.3),
    "no entropy gradient": Problem(entropy_gradient=False, temperature=0.7),
    "no padding": Problem(vocab=64),
    "shards of filler alone": Problem(vocab=2),
    "no tokens": Problem(n_tokens=0),
    "no tokens, no entropy gradient": Problem(n_tokens=0, entropy_gradient=False),
    "one token": Problem(n_tokens=1),
    # Logits near 1000 are 6e-5 apart in float32.
    "large logits": Problem(scale=300.0, tolerance=1e-4),
    # 8 bits of mantissa, in the gradient of the logits too.
    "bfloat16": Problem(dtype=torch.bfloat16, tolerance=2e-2),
}


def make(problem: Problem) -> Tensors:
    """Return the tensors of a problem, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(problem.n_tokens, HIDDEN, generator=generator) * problem.scale
    weight = torch.randn(problem.vocab, HIDDEN, generator=generator)
    targets = torch.randint(0, problem.vocab, (problem.n_tokens,), generator=generator)
    grads = torch.randn(2, problem.n_tokens, generator=generator)
    shuffled = torch.rand(problem.n_tokens, problem.vocab if problem.n_others else 0, generator=generator).argsort(1)
    others = shuffled[:, : problem.n_others]
    grads_of_others = torch.randn(others.shape, generator=generator)
    return Tensors(hidden.to(problem.dtype), weight.to(problem.dtype), targets, grads, others, grads_of_others)


def on_full_logits(problem: Problem) -> dict[str, torch.Tensor]:
    """Compute log_softmax over [N, V] logits in float64, differentiated by autograd."""
    tensors = make(problem)
    hidden = tensors.hidden_NH.double().requires_grad_()
    weight = tensors.weight_VH.double().requires_grad_()
    log_p = torch.log_softmax(hidden @ weight.T / problem.temperature, dim=-1)
    logprobs = log_p.gather(1, tensors.targets_N[:, None]).squeeze(1)
    entropies = -(log_p.exp() * log_p).sum(-1)
    grad_logprob, grad_entropy = tensors.grads_2N.double()
    others = log_p.gather(1, tensors.others_NK)
    differentiated = grad_logprob @ logprobs + (grad_entropy @ entropies if problem.entropy_gradient else 0.0)
    (differentiated + (tensors.grads_NK * others).sum()).backward()
    return {
        "logprobs": logprobs.detach(),
        "entropies": entropies.detach(),
        "others": others.detach(),
        "hidden gradient": hidden.grad,
        "weight gradient": weight.grad,
    }


def predictions(
    problem: Problem, hidden: torch.Tensor, weight: torch.Tensor, tensors: Tensors, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute log-probs, entropies, and log-probs of other tokens if there are any."""
    options: dict[str, Any] = {
        "vocabulary": Vocabulary(problem.vocab, group, problem.chunk_size, problem.recompute),
        "temperature": problem.temperature,
        "entropy_gradient": problem.entropy_gradient,
    }
    others_NK = tensors.others_NK if problem.n_others else None
    return linear_logprobs(hidden, weight, tensors.targets_N, others_NK=others_NK, **options)


def sharded(problem: Problem, into_main_grad: bool) -> dict[str, torch.Tensor]:
    """In a worker: compute the same with the vocabulary sharded over all ranks, and gather the gradients."""
    tensors, group = make(problem), dist.group.WORLD
    rows = padded_vocab(problem.vocab, group.size()) // group.size()
    padded = torch.full((rows * group.size(), HIDDEN), 7.0, dtype=problem.dtype)  # filler that would win, if it counted
    padded[: problem.vocab] = tensors.weight_VH
    weight = torch.nn.Parameter(padded[group.rank() * rows : (group.rank() + 1) * rows].clone())
    if into_main_grad:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    hidden = tensors.hidden_NH.clone().requires_grad_()
    logprobs, entropies, others = predictions(problem, hidden, weight, tensors, group)
    assert logprobs.dtype == entropies.dtype == others.dtype == torch.float32
    assert entropies.requires_grad == problem.entropy_gradient
    outputs, grads = [logprobs], [tensors.grads_2N[0]]
    if problem.entropy_gradient:
        outputs, grads = [*outputs, entropies], [*grads, tensors.grads_2N[1]]
    if problem.n_others:
        outputs, grads = [*outputs, others], [*grads, tensors.grads_NK]
    torch.autograd.backward(outputs, grads)
    hidden_gradient = hidden.grad.clone()
    dist.all_reduce(hidden_gradient)
    local = weight.main_grad if into_main_grad else weight.grad
    shards = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(shards, local)
    whole = torch.cat(shards)
    assert not whole[problem.vocab :].any(), "filler rows got a gradient"
    return {
        "logprobs": logprobs.detach(),
        "entropies": entropies.detach(),
        "others": others.detach(),
        "hidden gradient": hidden_gradient,
        "weight gradient": whole[: problem.vocab],
    }


@pytest.mark.parametrize("into_main_grad", [False, True], ids=["to grad", "to main_grad"])
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("n_ranks", [1, 2, *long(4)])
def test_values_and_gradients_are_those_of_log_softmax(
    workers: Workers, n_ranks: int, name: str, into_main_grad: bool
) -> None:
    problem = PROBLEMS[name]
    wanted = on_full_logits(problem)
    for result in workers(n_ranks).run(sharded, problem, into_main_grad):
        for what, want in wanted.items():
            assert result[what].shape == want.shape
            size = max([1.0, *want.abs().flatten().tolist()])
            error = max([0.0, *(result[what].double() - want).abs().flatten().tolist()])
            assert error <= problem.tolerance * size, what


def kept_between_the_passes(problem: Problem, with_grad: bool) -> int:
    """In a worker: return the number of logits that a forward pass leaves behind."""
    tensors = make(problem)
    kept = []
    with torch.set_grad_enabled(with_grad), torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
        predictions(problem, tensors.hidden_NH.requires_grad_(), tensors.weight_VH, tensors, dist.group.WORLD)
    return sum(tensor.numel() for tensor in kept if tensor.shape[-1:] == (problem.vocab,))


@pytest.mark.parametrize("n_others", [0, 5])
@pytest.mark.parametrize(("recompute", "with_grad", "n_kept"), [(True, True, 0), (False, True, 37), (False, False, 0)])
def test_logits_are_kept_once_and_only_for_a_backward_pass(
    workers: Workers, recompute: bool, with_grad: bool, n_kept: int, n_others: int
) -> None:
    problem = Problem(recompute=recompute, n_others=n_others)
    assert workers(1).run(kept_between_the_passes, problem, with_grad) == [n_kept * problem.vocab]


@pytest.mark.parametrize("section", [MegatronConfig, FSDPConfig])
def test_the_keys_of_a_recipe_decide_which_logits_are_kept(section: type[MegatronConfig | FSDPConfig]) -> None:
    group = mock.Mock(spec=dist.ProcessGroup)
    for recompute in (True, False):
        options = section(logprob_chunk_size=7, logprob_recompute=recompute)
        head = Head.of(101, options, group, is_value=False)
        assert head == Head(Vocabulary(101, group, 7, recompute))
    assert Head.of(101, options, group, is_value=True).is_value


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation makes, backward passes included."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_the_largest_tensor_is_found_in_backward_passes_too() -> None:
    narrow = torch.ones(1, 30, requires_grad=True)
    total = narrow.expand(50, 30).sum()
    with LargestTensor() as largest:
        total.backward()
    assert largest.elements == 50 * 30


def largest_tensor(problem: Problem) -> int:
    with LargestTensor() as largest:
        sharded(problem, into_main_grad=True)
    return largest.elements


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_no_tensor_holds_more_logits_than_a_chunk(workers: Workers, n_ranks: int) -> None:
    vocab, chunk_size = 4096, 16
    largest = {
        n_tokens: max(
            workers(n_ranks).run(largest_tensor, Problem(n_tokens=n_tokens, vocab=vocab, chunk_size=chunk_size))
        )
        for n_tokens in (chunk_size, 3000)
    }
    assert largest[3000] == largest[chunk_size] <= vocab * chunk_size < 3000 * vocab / 100


def largest_tensor_of_an_engine(case: Case, folder: Path, batch: Batch, loss: PolicyLoss) -> int:
    engine = case.engine(folder, OptimizerConfig())
    with LargestTensor() as largest:
        engine.logprobs_of(batch, temperature=loss.temperature)
        engine.forward_backward_of(batch, loss)
    return largest.elements


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [("megatron:d1", "none"), ("megatron:t2", "full"), ("megatron:c2", "none"), ("megatron:p2", "full")],
)
def test_an_engine_never_holds_the_logits_of_all_tokens(
    workers: Workers, models: Path, tmp_path: Path, layout: str, recompute: str
) -> None:
    vocab, hidden, chunk_size = 20_000, 32, 16
    folder = tmp_path / "large-vocabulary"
    shutil.copytree(models / "qwen3", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": vocab}))
    n_tokens = 400
    fields = {name: torch.zeros(n_tokens) for name in ("advantages", "old_logprobs", "ref_logprobs")}
    batch = Batch((n_tokens,), torch.arange(n_tokens), (torch.arange(n_tokens) > 0).float(), fields)
    loss = PolicyLoss(1.0, PPO(), entropy_coeff=0.01, kl_coeff=0.1, kl_estimator="k3")
    case = Case(
        layout,
        MegatronConfig(logprob_chunk_size=chunk_size, recompute=recompute),
        micro_batches=MicroBatchConfig(max_tokens_per_mb=n_tokens),
        init_from_scratch=True,
    )
    largest = max(workers(case.world_size).run(largest_tensor_of_an_engine, case, folder, batch, loss))
    # The largest tensors are the gradient buffers, which hold the embedding and the output layer.
    assert largest < 2.5 * vocab * hidden < n_tokens * vocab / 4
