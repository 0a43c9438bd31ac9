"""Requests, sampling parameters, and paths of models."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fivefold.config import paths
from fivefold.config.schema.rollout import GenerationConfig, RolloutConfig
from fivefold.config.schema.train import EvaluatorConfig, TrainRecipe
from fivefold.rollout.protocol import NEVER, SamplingParams, group_requests
from fivefold.rules.rollout import server_problems


def test_sampling_params_carry_every_option_of_the_recipe() -> None:
    config = GenerationConfig(
        max_new_tokens=7, min_new_tokens=2, temperature=0.5, top_p=0.9, top_k=4, stop_token_ids=[1], stop=["x"]
    )
    params = SamplingParams.from_config(config)
    assert params == SamplingParams(7, 2, False, 0.5, 0.9, 4, (1,), ("x",))
    for evaluator, greedy, temperature in [
        (EvaluatorConfig(greedy=True), True, 1.0),
        (EvaluatorConfig(greedy=False, temperature=0.3), False, 0.3),
    ]:
        own = SamplingParams(7, 2, greedy, temperature, 0.9, 4, (1,), ("x",), seeded=not greedy, logprob_share=0.0)
        assert SamplingParams.for_evaluation(config, evaluator) == own
    evaluator = EvaluatorConfig(greedy=False, top_p=1.0, top_k=0, min_p=0.1, max_new_tokens=99)
    own = SamplingParams.for_evaluation(config, evaluator)
    assert (own.top_p, own.top_k, own.min_p, own.max_new_tokens, own.min_new_tokens) == (1.0, 0, 0.1, 99, 2)
    further = GenerationConfig(min_p=0.1, repetition_penalty=1.1, logit_bias={5: -1.0}, bad_token_ids=[6])
    params = SamplingParams.from_config(further)
    assert (params.min_p, params.repetition_penalty, params.bias) == (0.1, 1.1, {5: -1.0, 6: NEVER})
    assert further.alterations == ("min_p", "repetition_penalty", "logit_bias", "bad_token_ids")


def test_sampling_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="min_new_tokens=9 is above max_new_tokens=8"):
        SamplingParams.from_config(GenerationConfig(max_new_tokens=8, min_new_tokens=9))
    with pytest.raises(ValueError, match="at least 1 character"):
        SamplingParams.from_config(GenerationConfig(stop=["a", ""]))


def test_a_group_is_side_by_side_and_every_request_has_its_own_seed() -> None:
    requests = group_requests([[1, 2], [3], [1, 2]], 4, (1, "train", 0))
    assert [request.token_ids for request in requests] == [(1, 2)] * 4 + [(3,)] * 4 + [(1, 2)] * 4
    assert requests == group_requests([[1, 2], [3], [1, 2]], 4, (1, "train", 0))
    others = group_requests([[1, 2], [3], [1, 2]], 4, (1, "train", 1))
    assert len({request.seed for request in requests + others}) == 24


def test_a_package_path_names_a_model_that_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_MODELS", tmp_path)
    for name in ("tiny-b", "tiny-a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    (tmp_path / "notes").mkdir()
    assert paths.resolve_model_path("package:tiny-a") == str(tmp_path / "tiny-a")
    with pytest.raises(ValueError, match=r"package:tiny.*Ships: tiny-a, tiny-b$"):
        paths.resolve_model_path("package:tiny")
    with pytest.raises(ValueError, match="no model of that name"):
        paths.resolve_model_path("package:../tiny-a")


def test_folders_and_hub_names_stay_as_they_are(tmp_path: Path) -> None:
    assert paths.resolve_model_path("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert paths.resolve_model_path(str(tmp_path)) == str(tmp_path)
    with pytest.raises(ValueError, match="there is no such folder"):
        paths.resolve_model_path(str(tmp_path / "absent"))


def test_the_folder_of_a_run_or_of_a_checkpoint_is_no_model(tmp_path: Path) -> None:
    weights, checkpoint = tmp_path / "run" / "weights", tmp_path / "run" / "checkpoints" / "step-000002"
    for folder, file in ((weights, "config.json"), (checkpoint, "manifest.json")):
        folder.mkdir(parents=True)
        (folder / file).write_text("{}")
    assert paths.resolve_model_path(str(weights)) == str(weights)
    with pytest.raises(ValueError, match=f"is the folder of a run: its model is in {weights}$"):
        paths.resolve_model_path(str(tmp_path / "run"))
    with pytest.raises(ValueError, match=f"is a checkpoint: .* `fivefold checkpoints {checkpoint} --export latest -o"):
        paths.resolve_model_path(str(checkpoint))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.25, 0.5, 1.0])
def test_log_probs_are_asked_of_whole_groups_spread_over_the_prompts(share: float) -> None:
    requests = group_requests([[number] for number in range(40)], 3, (1,), share)
    asked = [requests[row].wants_logprobs for row in range(0, 120, 3)]
    assert [request.wants_logprobs for request in requests] == [wants for wants in asked for _ in range(3)]
    assert sum(asked) == math.ceil(40 * share)
    rows = [row for row, wants in enumerate(asked) if wants]
    assert rows[:1] == ([0] if share else [])
    assert {after - before for before, after in pairwise(rows)} <= {round(1 / share) if share else 0}


def test_training_is_seeded_and_asks_for_log_probs_as_the_recipe_says() -> None:
    plain = SamplingParams.for_training(recipe_of("vllm:d1", {}))
    assert (plain.seeded, plain.logprob_share) == (False, 1 / 8)
    chosen = SamplingParams.for_training(recipe_of("vllm:d1", {"seeded": True, "logprob_share": 0.25}))
    assert (chosen.seeded, chosen.logprob_share) == (True, 0.25)


@pytest.mark.parametrize(
    ("rollout", "actor"),
    [
        ({"max_head_offpolicyness": 1}, {}),
        ({}, {"recompute_logprob": False}),
        ({}, {"rollout_correction": {"method": "tis"}}),
    ],
)
def test_all_log_probs_are_asked_for_where_the_loss_reads_them(rollout: dict[str, Any], actor: dict[str, Any]) -> None:
    assert SamplingParams.for_training(recipe_of("vllm:d1", rollout, **actor)).logprob_share == 1


def recipe_of(backend: str, rollout: dict[str, Any], **actor: Any) -> TrainRecipe:
    values = {"experiment_name": "test", "actor": {"path": "model", **actor}, "train_dataset": {"path": "data"}}
    return TrainRecipe.model_validate({**values, "rollout": {"backend": backend, **rollout}})


def test_old_log_probs_of_the_rollout_need_all_of_them() -> None:
    with pytest.raises(
        ValueError, match=r"recompute_logprob=false needs .* rollout\.logprob_share=0\.5 asks for .* part"
    ):
        recipe_of("vllm:d1", {"logprob_share": 0.5}, recompute_logprob=False)
    recipe_of("vllm:d1", {"logprob_share": 0.5}, recompute_logprob=True)


def test_what_servers_alone_can_do_without_is_refused_for_the_embedded_engine() -> None:
    keys = {"logprob_share": 0.5, "seeded": True}
    assert list(server_problems(recipe_of("vllm:d1", keys))) == []
    chunks = {"max_head_offpolicyness": 1, "new_tokens_per_chunk": 64}
    assert list(server_problems(recipe_of("vllm:d1", chunks))) == []
    for wanted, more in {
        "new_tokens_per_chunk=64": chunks,
        "server_timeout_s=60": {"server_timeout_s": 60},
        "max_server_restarts=7": {"max_server_restarts": 7},
    }.items():
        [line] = server_problems(recipe_of("transformers:d1", more))
        assert line.startswith(f"rollout.{wanted} is for servers")
    lines = list(server_problems(recipe_of("transformers:d1", keys)))
    assert [line.partition(" is for servers")[0] for line in lines] == [
        "rollout.seeded=true",
        "rollout.logprob_share=0.5",
    ]
    assert "runs transformers, which always seeds each request" in lines[0]
    assert "runs transformers, which always gives every log-prob" in lines[1]


def test_sglang_cannot_keep_keys_and_values_of_older_weights() -> None:
    keys = {"max_head_offpolicyness": 1, "recompute_kv_cache": False}
    for backend in ("transformers:d1", "vllm:d1"):
        assert list(server_problems(recipe_of(backend, keys))) == []
    [line] = server_problems(recipe_of("sglang:d1", keys))
    assert line.startswith("rollout.recompute_kv_cache=false is for vLLM and the embedded engine: SGLang computes")


def test_only_the_embedded_engine_keeps_keys_and_values_by_itself() -> None:
    configs = {key: RolloutConfig(max_head_offpolicyness=1, recompute_kv_cache=key) for key in (None, False, True)}
    kept = {
        (key, is_server): config.keeps_cache(is_server=is_server)
        for key, config in configs.items()
        for is_server in (False, True)
    }
    assert [case for case, keeps in kept.items() if keeps] == [(None, False), (False, False), (False, True)]
