"""Speculative decoding at rollout, as the frameworks write it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dialect_conversion import Conversion, convert_text, convert_words

METHOD, N_TOKENS = "rollout.speculative.method", "rollout.speculative.n_tokens"
NEMO_RL = "policy.generation.vllm_kwargs.speculative_config."
MODEL = "actor_rollout_ref.model."
VERL = ["actor_rollout_ref.model.path=some/model"]
SLIME = (
    "python3 train.py --hf-checkpoint some/model --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 "
)


def drafted(conversion: Conversion) -> tuple[object, object]:
    """Return the method and the number of drafted tokens of a recipe, which has no argument of the server for them."""
    assert not any("specul" in str(argument) for argument in conversion.recipe.get("rollout.server_args", []))
    return conversion.recipe.get(METHOD), conversion.recipe.get(N_TOKENS)


def with_vllm_config(framework: str, config: dict[str, object], tmp_path: Path) -> tuple[Conversion, str]:
    """Return a conversion with vLLM's own section, and what precedes its keys."""
    match framework:
        case "nemo_rl":
            words = [f"{NEMO_RL}{key}={json.dumps(value)}" for key, value in config.items()]
            own = ["policy.model_name=some/model", "policy.generation.backend=vllm", "grpo.max_num_steps=3"]
            return convert_words("nemo_rl", *own, *words), NEMO_RL
        case "roll":
            strategy = {"strategy_name": "vllm", "strategy_config": {"speculative_config": config}}
            infer = {"device_mapping": "list(range(0,8))", "strategy_args": strategy}
            text = json.dumps({"pretrain": "some/model", "actor_infer": infer})
            return convert_text("roll", tmp_path, text), "actor_infer.strategy_args.strategy_config.speculative_config."
        case "verl":
            at = "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config."
            words = [f"{at}{key}={value}" for key, value in config.items()]
            return convert_words("verl", *VERL, "actor_rollout_ref.rollout.name=vllm", *words), at
    at = "generator.inference_engine.engine_init_kwargs.speculative_config."
    words = [f"{at}{key}={value}" for key, value in config.items()]
    return convert_words("skyrl", "trainer.policy.model.path=some/model", *words), at


@pytest.mark.parametrize("framework", ["nemo_rl", "roll", "verl", "skyrl"])
def test_vllms_own_section_says_what_drafts(framework: str, tmp_path: Path) -> None:
    for method, known in (("mtp", "mtp"), ("deepseek_mtp", "mtp"), ("ngram", "ngram")):
        conversion, _ = with_vllm_config(framework, {"method": method, "num_speculative_tokens": 3}, tmp_path)
        assert drafted(conversion) == (known, 3)
    eagle = {"method": "eagle3", "model": "some/draft", "num_speculative_tokens": 3}
    conversion, at = with_vllm_config(framework, eagle, tmp_path)
    assert drafted(conversion) == (None, None)
    assert {f"{at}{key}" for key in eagle} <= conversion.unsupported()
    conversion, at = with_vllm_config(framework, {"method": "mtp", "num_speculative_tokens": 0}, tmp_path)
    assert drafted(conversion) == (None, None)
    assert conversion[f"{at}method"].outcome == "implied"
    others = {"method": "mtp", "num_speculative_tokens": 1, "draft_sample_method": "probabilistic"}
    conversion, at = with_vllm_config(framework, others, tmp_path)
    assert drafted(conversion) == ("mtp", 1)
    assert f"{at}draft_sample_method" in conversion.unsupported()


@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_sglangs_flags_say_what_drafts(framework: str, tmp_path: Path) -> None:
    def converted(flags: str) -> Conversion:
        return convert_text(framework, tmp_path, SLIME + flags)  # type: ignore[arg-type]

    chain = (
        "--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 3 --sglang-speculative-eagle-topk {width} "
        "--sglang-speculative-num-draft-tokens 4 --sglang-cuda-graph-max-bs 8"
    )
    conversion = converted(chain.format(width=1))
    assert drafted(conversion) == ("mtp", 3)
    assert conversion.recipe["rollout.server_args"] == ["--cuda-graph-max-bs=8"]
    assert not any("speculative" in key for key in conversion.unsupported())
    assert "sglang_speculative_eagle_topk" in converted(chain.format(width=4)).unsupported()
    for flags in (
        "--sglang-speculative-algorithm NGRAM",
        "--sglang-speculative-algorithm EAGLE3 --sglang-speculative-draft-model-path some/draft",
    ):
        conversion = converted(flags)
        assert drafted(conversion) == (None, None)
        assert "sglang_speculative_algorithm" in conversion.unsupported()
    conversion = converted("--enable-mtp-training --mtp-num-layers 1")
    assert "enable_mtp_training" in conversion.unsupported()
    assert "are not trained" in conversion["enable_mtp_training"].note


@pytest.mark.parametrize(
    ("engine", "keys", "wanted"),
    [
        ("vllm", ["num_speculative_tokens=2"], 2),
        ("vllm", [], 1),
        ("sglang", ["speculative_algorithm=NEXTN", "speculative_num_steps=4", "speculative_num_draft_tokens=5"], 4),
        ("sglang", [], 3),
    ],
)
def test_verls_layers_draft_if_they_are_switched_on(engine: str, keys: list[str], wanted: int) -> None:
    own = [*VERL, f"actor_rollout_ref.rollout.name={engine}", *(f"{MODEL}mtp.{key}" for key in keys)]
    switched = [f"{MODEL}mtp.enable=true", f"{MODEL}mtp.enable_rollout=true"]
    assert drafted(convert_words("verl", *own)) == (None, None)
    assert drafted(convert_words("verl", *own, switched[0])) == (None, None)
    conversion = convert_words("verl", *own, *switched)
    assert drafted(conversion) == ("mtp", wanted)
    assert not any("mtp" in key for key in conversion.unsupported())
    trained = convert_words("verl", *own, *switched, f"{MODEL}mtp.enable_train=true", f"{MODEL}mtp.detach_encoder=true")
    assert drafted(trained) == ("mtp", wanted)
    assert {key for key in trained.unsupported() if "mtp" in key} == {f"{MODEL}mtp.enable_train"}


def test_skyrls_layers_draft_and_are_not_trained() -> None:
    own = ["trainer.policy.model.path=some/model", "trainer.mtp.num_speculative_tokens=2"]
    assert drafted(convert_words("skyrl", *own)) == (None, None)
    conversion = convert_words("skyrl", *own, "trainer.mtp.enabled=true")
    assert drafted(conversion) == ("mtp", 2)
    assert "trainer.mtp.enabled" in conversion.unsupported()
