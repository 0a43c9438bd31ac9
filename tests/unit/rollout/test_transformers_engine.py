"""The embedded engine against transformers itself: one prompt at a time, no cache, no padding."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import random
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
)

from fivefold.config.schema.rollout import GenerationConfig
from fivefold.families.registry import find_family
from fivefold.rollout import decode, forward, kv_cache
from fivefold.rollout.contract import RolloutEngine, complete
from fivefold.rollout.hf_model import build_model
from fivefold.rollout.protocol import GenerationRequest, SamplingParams, group_requests
from fivefold.rollout.tokenizer import load_tokenizer
from fivefold.rollout.transformers_engine import TransformersEngine
from fivefold.types import Completion

FAMILIES = ["llama", "mistral", "qwen2", "qwen3_moe", "qwen2_moe", "mixtral", "minimax_m2", "glm4_moe"]
FAMILIES += [
    "gpt_oss",
    "gemma3_text",
    "deepseek_v3",
    "deepseek_v2",
    "glm4_moe_lite",
    "deepseek_v32",
    "glm_moe_dsa",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
]
VOCABULARY = 67
END = 2

Folder = Callable[..., Path]


def engine_at(path: Path, **options: Any) -> TransformersEngine:
    return TransformersEngine.from_path(
        str(path),
        **{"dtype": "float32", "device": "cpu", "max_batch_size": 64, "tokenizer_path": None, "load_weights": True}
        | options,
    )


def sampling(**options: Any) -> SamplingParams:
    return SamplingParams.from_config(GenerationConfig(**{"max_new_tokens": 12} | options))


def ragged_prompts(n: int, seed: int = 0) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(3, VOCABULARY) for _ in range(source.randint(1, 9))] for _ in range(n)]


def tokens_of(completions: Iterable[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


def values_of(completions: Iterable[Completion], digits: int | None = None) -> list[tuple[object, ...]]:
    """Return all that completions hold; their log-probs rounded to `digits`.

    Kernels round differently with the alignment of memory and the size of a batch.
    """
    return [
        (
            c.token_ids.tolist(),
            (c.logprobs if digits is None else c.logprobs.round(digits)).tolist(),
            c.versions.tolist(),
            c.finish_reason,
        )
        for c in completions
    ]


def reference(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def teacher_forced(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Return the logits that predict each token of the answer, from one forward over prompt and answer."""
    logits = model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1]


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_equal_a_teacher_forced_forward(family: str, model_folder: Folder) -> None:
    path = model_folder(family)
    requests = group_requests(ragged_prompts(6), 3, (family,))
    completions = complete(engine_at(path), requests, sampling(temperature=0.7))
    model = reference(path)
    for request, completion in zip(requests, completions, strict=True):
        logits = teacher_forced(model, request.token_ids, completion.token_ids)
        tokens = torch.tensor(completion.token_ids)[:, None]
        expected = (logits / 0.7).log_softmax(-1).gather(1, tokens).squeeze(1)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_a_repetition_penalty_and_a_bias_are_those_of_transformers(penalty: float, model_folder: Folder) -> None:
    """Rows end at every step, so that the batch shrinks while each row keeps the tokens that it has."""
    path = model_folder("llama")
    bias, bad = {"7": 1.5, "9": -2.0}, [11, 12]
    stop = list(range(3, VOCABULARY, 8))
    own = sampling(repetition_penalty=penalty, min_p=0.01, logit_bias=bias, bad_token_ids=bad, stop_token_ids=stop)
    requests = group_requests(ragged_prompts(6), 4, ("penalty",))
    completions = complete(engine_at(path), requests, own)
    model = reference(path)
    process = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty), MinPLogitsWarper(0.01)])
    n_repeated = 0
    for request, completion in zip(requests, completions, strict=True):
        ids = [*request.token_ids, *completion.token_ids.tolist()]
        logits_TV = teacher_forced(model, request.token_ids, completion.token_ids)
        for token, value in bias.items():
            logits_TV[:, int(token)] += value
        logits_TV[:, bad] = -1e9
        for place, logits_V in enumerate(logits_TV, start=len(request.token_ids)):
            expected = process(torch.tensor([ids[:place]]), logits_V[None]).log_softmax(-1)[0, ids[place]]
            assert completion.logprobs[place - len(request.token_ids)] == pytest.approx(float(expected), abs=1e-4)
            n_repeated += ids[place] in ids[:place]
        assert not set(completion.token_ids.tolist()) & set(bad)
    assert n_repeated > 0
    assert len({len(completion.token_ids) for completion in completions}) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_completions_of_ragged_prompts_equal_those_of_single_prompts(family: str, model_folder: Folder) -> None:
    path = model_folder(family)
    prompts = ragged_prompts(10, seed=1)
    completions = complete(engine_at(path), group_requests(prompts, 1, ()), sampling(greedy=True, max_new_tokens=16))
    model = reference(path)
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = teacher_forced(model, prompt, completion.token_ids)
        assert completion.token_ids.tolist() == logits.argmax(-1).tolist(), "each is the best after those before it"
        assert END not in completion.token_ids[:-1]
        assert len(completion.token_ids) == 16 or completion.token_ids[-1] == END
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == END else "length")
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), logits.log_softmax(-1).amax(-1), rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["narrow_experts", "narrow_joint_experts", "odd_hidden"])
def test_experts_of_any_width_generate_what_transformers_generates(
    family: str, dtype: str, model_folder: Folder
) -> None:
    """torch's grouped matmul, transformers' default, takes only rows that are multiples of 16 bytes."""
    path = model_folder(family)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="batched_mm").eval()
    prompts = ragged_prompts(6, seed=10)
    answers = complete(engine_at(path, dtype=dtype), group_requests(prompts, 1, ()), sampling(greedy=True))
    # Rounding may break a tie in another way on another processor, so tokens are not compared but what they are worth.
    tolerance = 1e-4 if dtype == "float32" else 0.1
    for prompt, answer in zip(prompts, answers, strict=True):
        logprobs_TV = teacher_forced(model, prompt, answer.token_ids).float().log_softmax(-1)
        expected_T = logprobs_TV[torch.arange(len(answer.token_ids)), torch.tensor(answer.token_ids).long()]
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected_T, rtol=0, atol=tolerance)
        torch.testing.assert_close(expected_T, logprobs_TV.amax(-1), rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_kernels_that_transformers_takes_from_a_package_are_left_aside_on_cpus(
    family: str, model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def completions() -> list[list[int]]:
        requests = group_requests(ragged_prompts(3), 1, ())
        return tokens_of(complete(engine_at(model_folder(family)), requests, sampling(greedy=True)))

    wanted = completions()
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):

        @functools.wraps(inspect.unwrap(getattr(module, name)))
        def of_package(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("Triton kernels need a GPU")

        monkeypatch.setattr(module, name, of_package)
    assert completions() == wanted


def test_rows_that_end_early_leave_the_others_as_they_are(model_folder: Folder) -> None:
    """With a third of the vocabulary as stop tokens rows end at every step, and the batch shrinks many times."""
    path = model_folder("qwen3_moe")
    prompts, stop_ids = ragged_prompts(40, seed=2), list(range(3, VOCABULARY, 12))
    engine = engine_at(path)
    free = complete(engine, group_requests(prompts, 1, (7,)), sampling(max_new_tokens=30))
    stopped = complete(engine, group_requests(prompts, 1, (7,)), sampling(max_new_tokens=30, stop_token_ids=stop_ids))
    lengths = set()
    for long, short in zip(free, stopped, strict=True):
        ends = [i for i, token in enumerate(long.token_ids) if token in {END, *stop_ids}]
        expected = long.token_ids[: ends[0] + 1] if ends else long.token_ids
        assert short.token_ids.tolist() == expected.tolist()
        assert short.finish_reason == ("stop" if ends else "length")
        lengths.add(len(short.token_ids))
    assert len(lengths) > 8


def test_a_request_has_the_same_completion_in_any_batch(model_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_folder("qwen3_moe")
    requests = group_requests(ragged_prompts(9, seed=3), 4, (1, "train", 0))
    params = sampling(temperature=1.3, top_p=0.95, top_k=30)
    expected = complete(engine_at(path), requests, params)
    order = random.Random(0).sample(range(len(requests)), len(requests))
    shuffled = complete(engine_at(path, max_batch_size=5), [requests[i] for i in order], params)
    assert tokens_of(expected[i] for i in order) == tokens_of(shuffled)
    monkeypatch.setattr(forward, "_PREFILL_TOKENS", 12)
    assert tokens_of(complete(engine_at(path), requests, params)) == tokens_of(expected)
    assert len({tuple(tokens) for tokens in tokens_of(expected[:4])}) == 4, "a group's samples must differ"


def test_a_cache_that_has_to_grow_changes_no_completion(model_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_folder("llama")
    requests = group_requests(ragged_prompts(4, seed=4), 2, ())
    expected = complete(engine_at(path), requests, sampling(max_new_tokens=30))
    monkeypatch.setattr(kv_cache, "_GROWTH", 3)
    actual = complete(engine_at(path), requests, sampling(max_new_tokens=30))
    assert tokens_of(actual) == tokens_of(expected)


def test_end_tokens_come_from_model_generation_config_and_tokenizer(model_folder: Folder, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder("qwen2"))
    model.config.eos_token_id = 5
    model.generation_config.eos_token_id = [7, 8]
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folder("qwen2")).save_pretrained(tmp_path)
    ends = {2, 5, 7, 8}
    completions = complete(
        engine_at(tmp_path), group_requests(ragged_prompts(20), 8, ()), sampling(max_new_tokens=40, temperature=5.0)
    )
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert {c.token_ids[-1] for c in stopped} == ends
    assert all(ends.isdisjoint(c.token_ids[:-1]) for c in completions)


def test_no_completion_ends_before_min_new_tokens(model_folder: Folder) -> None:
    stops = {"stop_token_ids": [9, 10, 11, 12], "stop": ["a", "b"]}
    params = sampling(min_new_tokens=5, max_new_tokens=9, temperature=5.0, **stops)
    completions = complete(engine_at(model_folder("llama")), group_requests(ragged_prompts(20), 8, ()), params)
    lengths = [len(completion.token_ids) for completion in completions]
    assert min(lengths) == 5
    assert max(lengths) == 9
    assert all({END, 9, 10, 11, 12}.isdisjoint(completion.token_ids[:4]) for completion in completions)


def test_a_completion_ends_with_its_first_stop_text(model_folder: Folder) -> None:
    path = model_folder("qwen2")
    tokenizer = AutoTokenizer.from_pretrained(path)
    engine = engine_at(path)
    requests = group_requests(ragged_prompts(30, seed=6), 2, ())
    free = complete(engine, requests, sampling(temperature=3.0, max_new_tokens=30))
    texts = [tokenizer.decode(completion.token_ids) for completion in free]
    stops = [texts[0][5:7], texts[1][3:7], texts[2][8], "</s>"]
    stopped = complete(engine, requests, sampling(temperature=3.0, max_new_tokens=30, stop=stops))
    for long, text, short in zip(free, texts, stopped, strict=True):
        ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
        expected = text[: min(ends)] if ends else text
        assert tokenizer.decode(short.token_ids) == expected
        assert short.token_ids.tolist() == long.token_ids[: len(short.token_ids)].tolist()
        assert short.finish_reason == ("stop" if ends else "length")


@pytest.mark.parametrize("min_new_tokens", [2, 7])
def test_a_stop_text_before_min_new_tokens_ends_nothing(model_folder: Folder, min_new_tokens: int) -> None:
    path = model_folder("qwen2")
    tokenizer = AutoTokenizer.from_pretrained(path)
    engine = engine_at(path)
    requests = group_requests(ragged_prompts(30, seed=6), 2, ())
    free = complete(engine, requests, sampling(temperature=3.0, max_new_tokens=30, min_new_tokens=min_new_tokens))
    # Texts of two tokens, each of which is near the beginning of at least one completion.
    stops = [tokenizer.decode(completion.token_ids[start : start + 2]) for completion in free[:4] for start in (0, 2)]
    stopped = complete(
        engine, requests, sampling(temperature=3.0, max_new_tokens=30, min_new_tokens=min_new_tokens, stop=stops)
    )
    n_early = 0
    for long, short in zip(free, stopped, strict=True):
        texts = [tokenizer.decode(long.token_ids[:length]) for length in range(len(long.token_ids) + 1)]
        completed = [
            length
            for length in range(1, len(texts))
            if any(texts[length].count(stop) > texts[length - 1].count(stop) for stop in stops)
        ]
        n_early += any(length < min_new_tokens for length in completed)
        ends = [length for length in completed if length >= min_new_tokens]
        assert len(short.token_ids) == (ends[0] if ends else len(long.token_ids))
    assert n_early or min_new_tokens == 2


def test_a_stop_text_without_a_tokenizer_is_an_error(model_folder: Folder) -> None:
    path = str(model_folder("llama"))
    model, _ = build_model(path, dtype=torch.float32, device=torch.device("cpu"), load_weights=True)
    bare = TransformersEngine(model, None, end_token_ids=[END], max_batch_size=4, weight_version=0)
    request = GenerationRequest((5,), 0)
    assert len(complete(bare, [request], sampling())) == 1
    with pytest.raises(ValueError, match=r"stop=\['a'\] needs a tokenizer"):
        complete(bare, [request], sampling(stop=["a"]))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_named_as_in_the_file_and_replaced_in_place(family: str, model_folder: Folder) -> None:
    first, second = model_folder(family, 0), model_folder(family, 1)
    stored = load_file(second / "model.safetensors")
    source = {name: tensor for name, tensor in stored.items() if not find_family(family).keeps(name, 4)}
    engine: RolloutEngine = engine_at(first)
    before = {name: tensor.data_ptr() for name, tensor in engine.weights()}
    assert set(before) == set(source)

    engine.update_weights(((name, source[name]) for name in sorted(source, reverse=True)), version=3)

    for name, tensor in engine.weights():
        assert tensor.data_ptr() == before[name]
        assert torch.equal(tensor, source[name])
    requests = group_requests(ragged_prompts(5), 1, ())
    answers = complete(engine, requests, sampling(greedy=True))
    expected = complete(engine_at(second), requests, sampling(greedy=True))
    assert values_of(answers) == values_of(
        Completion.of(c.token_ids, c.logprobs, c.finish_reason, version=3) for c in expected
    )


def test_an_engine_built_from_the_config_alone_waits_for_weights(model_folder: Folder, tmp_path: Path) -> None:
    path = model_folder("qwen3_moe")
    AutoConfig.from_pretrained(path).save_pretrained(tmp_path)
    engine = engine_at(tmp_path, tokenizer_path=str(path), dtype="bfloat16", load_weights=False)
    requests = group_requests(ragged_prompts(3), 1, ())
    with pytest.raises(RuntimeError, match="no complete set of weights"):
        complete(engine, requests, sampling())
    source = load_file(path / "model.safetensors")
    engine.update_weights(source.items(), version=0)
    assert all(torch.equal(tensor, source[name].bfloat16()) for name, tensor in engine.weights())
    expected = complete(engine_at(path, dtype="bfloat16"), requests, sampling())
    assert values_of(complete(engine, requests, sampling())) == values_of(expected)


def test_a_set_of_weights_that_does_not_fit_is_refused(model_folder: Folder) -> None:
    path = model_folder("mixtral")
    source = load_file(path / "model.safetensors")
    expert = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    consumed: list[str] = []

    def wrong() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in source.items():
            if name == "lm_head.weight":
                yield "lm_head.bias", tensor
            elif name == "model.norm.weight":
                yield name, tensor[:-1]
            elif name != expert:
                yield name, tensor
            if name == "model.embed_tokens.weight":
                yield name, tensor
            consumed.append(name)

    engine = engine_at(path)
    with pytest.raises(ValueError, match="do not fit") as caught:
        engine.update_weights(wrong(), version=1)
    assert len(consumed) == len(source), "other ranks wait in the collectives behind the iterator"
    for problem in [
        f"missing: {expert}, lm_head.weight",
        "unknown: lm_head.bias",
        "sent twice: model.embed_tokens.weight",
        "wrong shape: model.norm.weight (31,), wanted (32,)",
    ]:
        assert problem in str(caught.value)
    with pytest.raises(RuntimeError, match="the last update failed"):
        complete(engine, [GenerationRequest((5,), 0)], sampling())


def test_a_tied_output_layer_is_not_sent(model_folder: Folder) -> None:
    engine = engine_at(model_folder("qwen2"))
    weights = dict(engine.weights())
    assert "lm_head.weight" not in weights
    with pytest.raises(ValueError, match=r"unknown: lm_head\.weight"):
        engine.update_weights([*weights.items(), ("lm_head.weight", weights["model.embed_tokens.weight"])], version=1)


def test_weights_that_the_engine_has_loaded_itself_outlive_its_sleep(model_folder: Folder) -> None:
    engine = TransformersEngine.from_path(
        str(model_folder("qwen3_moe")), dtype="float32", device="cpu", max_batch_size=64, tokenizer_path=None,
        load_weights=True,
    )  # fmt: skip
    requests = group_requests(ragged_prompts(3), 1, ())
    expected = complete(engine, requests, sampling())
    for _ in range(2):
        engine.sleep()
        engine.sleep()
        with pytest.raises(RuntimeError, match="asleep"):
            complete(engine, requests, sampling())
        engine.wake()
        engine.wake()
        assert engine.has_weights
        assert values_of(complete(engine, requests, sampling()), digits=6) == values_of(expected, digits=6)


@pytest.mark.parametrize("family", ["qwen2", "mixtral"])
def test_sleep_frees_the_weights_and_the_next_update_brings_them_back(family: str, model_folder: Folder) -> None:
    """`qwen2` has tied weights, and `mixtral` fused experts whose tensors in files are views."""
    path = model_folder(family)
    model, _ = build_model(str(path), dtype=torch.float32, device=torch.device("cpu"), load_weights=True)
    engine: RolloutEngine = TransformersEngine(model, None, end_token_ids=[END], max_batch_size=64, weight_version=0)
    requests = group_requests(ragged_prompts(3), 1, ())
    expected = complete(engine, requests, sampling())
    source = load_file(path / "model.safetensors")
    for _ in range(2):
        engine.sleep()
        engine.sleep()
        assert sum(parameter.untyped_storage().nbytes() for parameter in model.parameters()) == 0
        for refused in (
            lambda: complete(engine, requests, sampling()),
            lambda: engine.update_weights(source.items(), version=1),
            lambda: dict(engine.weights()),
        ):
            with pytest.raises(RuntimeError, match=r"asleep: call wake\(\) and update_weights\(\) first"):
                refused()
        engine.wake_weights()
        engine.update_weights(source.items(), version=0)
        with pytest.raises(RuntimeError, match=r"memory for its weights alone: call wake\(\) first"):
            complete(engine, requests, sampling())
        engine.wake()
        assert values_of(complete(engine, requests, sampling()), digits=3) == values_of(expected, digits=3)
        engine.sleep()
        engine.wake()
        with pytest.raises(RuntimeError, match="it has slept since"):
            complete(engine, requests, sampling())
        engine.update_weights(source.items(), version=0)
        engine.wake()
        assert values_of(complete(engine, requests, sampling()), digits=3) == values_of(expected, digits=3)


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_stop_token_outside_the_vocabulary_is_refused(token: int, model_folder: Folder) -> None:
    params = dataclasses.replace(sampling(min_new_tokens=2), stop_token_ids=(3, token))
    with pytest.raises(ValueError, match=f"stop_token_ids holds {token}, but the model's vocabulary has {VOCABULARY}"):
        complete(engine_at(model_folder("llama")), [GenerationRequest((5,), 0)], params)


def test_end_tokens_that_the_model_does_not_have_are_left_out(model_folder: Folder, tmp_path: Path) -> None:
    source = model_folder("llama")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    generation = {"eos_token_id": [-1, END, VOCABULARY]}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    requests, params = group_requests(ragged_prompts(3), 1, ()), sampling(min_new_tokens=2)
    actual, expected = (complete(engine_at(folder), requests, params) for folder in (tmp_path, source))
    assert values_of(actual) == values_of(expected)


class _LiveBuffers(TorchFunctionMode):
    """Counts, before each operation that makes a layer's new buffer, how many of `buffers` are still alive."""

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        super().__init__()
        self._buffers = [weakref.ref(buffer) for buffer in buffers]
        self.counts: list[int] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.new_zeros, Tensor.index_select):
            self.counts.append(sum(buffer() is not None for buffer in self._buffers))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("change", ["grow", "keep"])
def test_the_cache_is_replaced_layer_by_layer(change: str) -> None:
    n_layers, cache = 3, kv_cache.RowCache(n_rows=2, prompt_length=4, windows={})
    cache.begin_prompts(slice(0, 2), torch.arange(2))
    for layer in range(n_layers):
        cache.update(torch.ones(2, 1, 4, 2), torch.ones(2, 1, 4, 2), layer)
    cache.length = cache._keys[0].shape[2]
    with _LiveBuffers([*cache._keys.values(), *cache._values.values()]) as live:
        if change == "grow":
            cache.begin_token()
        else:
            cache.keep(torch.tensor([1]))
    assert live.counts == list(range(2 * n_layers, 0, -1))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "no tokens"),
        ((3, VOCABULARY), f"token {VOCABULARY}, but the model's vocabulary has {VOCABULARY}"),
        ((-1, 3), "token -1, but"),
        ((5,) * 120, "120 tokens with max_new_tokens=12 exceeds the model's 128 positions"),
    ],
)
def test_a_request_that_the_model_cannot_answer_is_refused(
    prompt: tuple[int, ...], message: str, model_folder: Folder
) -> None:
    with pytest.raises(ValueError, match=message):
        complete(engine_at(model_folder("llama")), [GenerationRequest(prompt, 0)], sampling())


def test_completions_do_not_depend_on_how_often_the_host_checks_for_ends(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_at(model_folder("qwen2"))
    requests = group_requests(ragged_prompts(20, seed=8), 2, ())
    cases = [
        sampling(max_new_tokens=45, temperature=3.0, stop_token_ids=[9, 40], stop=["ab", "c d", "Q", "</s>"]),
        sampling(max_new_tokens=45, temperature=3.0, stop=["a", "b"], min_new_tokens=13),
        sampling(max_new_tokens=45, temperature=2.0),
        sampling(max_new_tokens=5, temperature=2.0, stop=["a"]),
    ]
    monkeypatch.setattr(decode, "_MOST_UNSEEN", 1)
    each_token = [values_of(complete(engine, requests, params), digits=3) for params in cases]
    for most_unseen, share in [(8, 16), (8, 1), (64, 1)]:
        monkeypatch.setattr(decode, "_MOST_UNSEEN", most_unseen)
        monkeypatch.setattr(decode, "_UNSEEN_SHARE", share)
        assert [values_of(complete(engine, requests, params), digits=3) for params in cases] == each_token


def test_logits_that_overflow_are_reported_before_the_token_limit(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_folder("llama")
    model, _ = build_model(str(path), dtype=torch.float32, device=torch.device("cpu"), load_weights=True)
    engine = TransformersEngine(model, None, end_token_ids=[], max_batch_size=4, weight_version=0)
    n_forwards = 0

    def overflow(*_: Any) -> None:
        nonlocal n_forwards
        n_forwards += 1
        if n_forwards == 40:
            model.lm_head.weight[:] = torch.nan

    model.register_forward_pre_hook(overflow)
    with pytest.raises(RuntimeError, match="not finite"):
        complete(engine, [GenerationRequest((5,), 0)], sampling(max_new_tokens=100))
    assert n_forwards < 50


def test_weights_that_overflow_are_an_error(model_folder: Folder) -> None:
    path = model_folder("llama")
    source = load_file(path / "model.safetensors")
    source["model.layers.0.mlp.down_proj.weight"][0, 0] = torch.nan
    engine = engine_at(path)
    engine.update_weights(source.items(), version=1)
    with pytest.raises(RuntimeError, match="not finite"):
        complete(engine, [GenerationRequest((5,), 0)], sampling())


def test_a_checkpoint_that_lacks_a_tensor_is_an_error(model_folder: Folder, tmp_path: Path) -> None:
    path = model_folder("llama")
    model = AutoModelForCausalLM.from_pretrained(path)
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"does not fit its config.json: .*layers\.1\.mlp\.up_proj"):
        engine_at(tmp_path, tokenizer_path=str(path))


def test_a_checkpoint_with_a_tensor_of_another_shape_is_an_error(model_folder: Folder, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder("llama"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors") | {"model.norm.weight": torch.zeros(33)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"does not fit its config.json: .*model\.norm\.weight.*\[33\].*\[32\]"):
        engine_at(folder)


def test_a_checkpoint_that_is_not_finite_is_an_error_with_its_tensors(model_folder: Folder, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder("mixtral"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    up, norm = "model.layers.1.block_sparse_moe.experts.2.w3.weight", "model.norm.weight"
    tensors[up][5, 4] = torch.nan
    tensors[norm][0] = torch.inf
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="NaN or infinite") as raised:
        engine_at(folder, dtype="bfloat16")
    named = [line for line in str(raised.value).splitlines() if line.startswith("  ")]
    assert named == [f"  {name} in model.safetensors, read as torch.bfloat16" for name in (up, norm)]


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_a_folder_without_a_tokenizer_is_refused(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ValueError, match=rf"'{tmp_path}' has no usable tokenizer: .*recipe's `tokenizer_path`"):
        load_tokenizer(str(tmp_path))


def test_a_hub_that_gives_no_tokenizer_is_named_with_what_was_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(path: str, **_: Any) -> None:
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr("fivefold.rollout.tokenizer.AutoTokenizer.from_pretrained", unreachable)
    with pytest.raises(ValueError, match=r"'some/model' has no usable tokenizer: .*couldn't connect"):
        load_tokenizer("some/model")


def test_a_window_that_no_layer_uses_is_no_obstacle(model_folder: Folder, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(model_folder("qwen2"))
    config.use_sliding_window, config.sliding_window = True, 8
    assert set(config.layer_types) == {"full_attention"}
    config.save_pretrained(tmp_path)
    engine_at(tmp_path, load_weights=False, tokenizer_path=str(model_folder("qwen2")))


def test_a_sliding_window_in_a_family_that_is_not_known_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("gemma2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="asks for sliding_attention"):
        engine_at(tmp_path, load_weights=False)


def test_layers_with_a_window_keep_the_columns_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a cache of everything, over growth, two joins, dropped rows and dropped columns."""
    monkeypatch.setattr(kv_cache, "_GROWTH", 2)
    window, generator = 3, torch.Generator().manual_seed(0)

    def drawn(n_rows: int, n_tokens: int) -> Tensor:
        return torch.randn(n_rows, 1, n_tokens, 2, generator=generator)

    def filled(n_rows: int, length: int) -> kv_cache.RowCache:
        cache = kv_cache.RowCache(n_rows, length, {1: window})
        cache.begin_prompts(slice(0, n_rows), torch.arange(n_rows))
        states = drawn(n_rows, length)
        for layer in range(2):
            cache.update(states, states, layer)
        return cache

    def decode_tokens(cache: kv_cache.RowCache, n_rows: int, n_tokens: int) -> None:
        for _ in range(n_tokens):
            cache.begin_token()
            states = drawn(n_rows, 1)
            whole, _ = cache.update(states, states, 0)
            seen, values = cache.update(states, states, 1)
            assert seen.shape[2] == min(window, cache.length)
            torch.testing.assert_close(seen, whole[:, :, -window:])
            torch.testing.assert_close(values, seen)
            assert cache._keys[1].shape[2] <= window + 2

    cache = filled(2, 7)
    decode_tokens(cache, 2, 5)
    cache.join(filled(3, 2))
    decode_tokens(cache, 5, 5)
    cache.keep(torch.tensor([0, 3, 4]))
    cache.cut_left(6)
    decode_tokens(cache, 3, 4)
    longer = filled(1, 20)
    cache.join(longer)
    decode_tokens(cache, 4, 4)
