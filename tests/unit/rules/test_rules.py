"""Checks of layouts against a model's sizes, and of recipes against models and cluster."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from fivefold.config.problems import RecipeError
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.read import find_shape
from fivefold.families.shape import ModelShape
from fivefold.layout.parallel import describe
from fivefold.layout.parser import parse_backend
from fivefold.rules.layouts import layout_problems
from fivefold.rules.models import check_examples
from fivefold.rules.recipe import check_recipe
from fivefold.rules.replay import replay_taken, with_replay

HYBRID = find_shape("Qwen3.5-35B-A3B")
MOE = ModelShape(
    family="qwen2_moe",
    n_layers=12,
    hidden=96,
    n_heads=12,
    n_kv_heads=4,
    head_dim=8,
    ffn_hidden=90,
    vocab=101,
    max_positions=2048,
    n_experts=6,
    top_k=2,
    expert_ffn_hidden=20,
    shared_expert_ffn_hidden=36,
    moe_layers=(True,) * 12,
    norm_topk_prob=True,
    qkv_bias=True,
    qk_norm=False,
    tied_embeddings=True,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
)
DENSE = replace(MOE, family="qwen2", n_experts=0, top_k=0, shared_expert_ffn_hidden=0, moe_layers=(False,) * 12)


@pytest.mark.parametrize(
    "text",
    [
        "megatron:t4",
        "megatron:p3v4",
        "megatron:d3c5",
        "megatron:d6e6",
        "megatron:(attn:t2c2p2|ffn:t2e2)",
        "megatron:(attn:d5|ffn:t5)",
        "fsdp:d5t4c3",
        "vllm:t4",
        "transformers:d7",
    ],
)
def test_a_layout_that_divides_every_size_is_accepted(text: str) -> None:
    assert list(layout_problems(parse_backend(text), MOE)) == []


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("megatron:t5", MOE, "12 attention heads cannot be split over t5"),
        ("megatron:t3", MOE, "4 key/value heads cannot be split over t3"),
        ("megatron:t4", replace(DENSE, ffn_hidden=90), "90 columns of the MLP cannot be split over t4"),
        ("megatron:t4", replace(MOE, moe_layers=(False,) + (True,) * 11), "90 columns of the MLP"),
        ("megatron:t4", replace(MOE, shared_expert_ffn_hidden=38), "38 columns of the shared expert"),
        ("megatron:t2c16", HYBRID, "16 key heads of gated delta nets cannot be split over t2 x c16"),
        ("megatron:p8v2", MOE, "12 layers are too few for p8*v2 = 16"),
        ("megatron:d4e4", MOE, "6 experts cannot be split over e4"),
        ("megatron:(attn:d3|ffn:t3)", MOE, "20 columns of an expert cannot be split over ffn t3"),
        ("megatron:d2e2", DENSE, "e2 splits experts, and qwen2 has none"),
        ("megatron:(attn:d2|ffn:t2)", DENSE, "ffn t2 splits experts, and qwen2 has none"),
        ("megatron:d1", replace(MOE, top_k=1), "each token visits one expert with norm_topk_prob=true"),
        ("fsdp:t3", MOE, "4 key/value heads cannot be split over t3"),
        ("fsdp:t4", replace(MOE, expert_ffn_hidden=22), "22 columns of an expert"),
        ("vllm:t6", replace(MOE, expert_ffn_hidden=24), "4 key/value heads"),
        ("vllm:t4", replace(MOE, expert_ffn_hidden=22), "22 columns of an expert"),
    ],
)
def test_a_layout_that_does_not_divide_a_size_is_refused(text: str, shape: ModelShape, message: str) -> None:
    assert any(message in line for line in layout_problems(parse_backend(text), shape))


def test_engines_that_generate_copy_key_value_heads() -> None:
    few_heads = replace(MOE, n_kv_heads=2)
    assert list(layout_problems(parse_backend("sglang:t4"), few_heads)) == []
    (line,) = layout_problems(parse_backend("megatron:t4"), few_heads)
    assert "2 key/value heads" in line


def test_virtual_stages_need_a_pipeline() -> None:
    layout = replace(parse_backend("megatron:p2v2"), pp=1)
    assert "one stage only" in next(layout_problems(layout, MOE))


def test_every_problem_is_listed() -> None:
    layout = parse_backend("megatron:d4t5p13e4")
    assert describe(layout) == "megatron tp5 pp13 dp4 ep4 edp5 (260 ranks)"
    assert len(list(layout_problems(layout, MOE))) == 5


def recipe(**changes: Any) -> TrainRecipe:
    base: dict[str, Any] = {
        "experiment_name": "check",
        "cluster": {"n_nodes": 1, "n_gpus_per_node": 8},
        "actor": {"path": "m", "backend": "megatron:d2t2e2"},
        "rollout": {"backend": "vllm:d2t2"},
        "train_dataset": {"path": "d"},
    }
    return TrainRecipe.model_validate({**base, **changes})


def test_the_problems_of_a_recipe_name_their_role() -> None:
    check_recipe(recipe(), MOE)
    bad = recipe(actor={"path": "m", "backend": "megatron:d1t3"}, rollout={"backend": "vllm:t5"})
    with pytest.raises(RecipeError) as caught:
        check_recipe(bad, MOE)
    assert {problem.partition(":")[0] for problem in caught.value.problems} == {"actor", "rollout"}


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        (
            "vllm:d1p6",
            "would span nodes 0, 1: .* whole nodes, so t x p = 6 must be a multiple of 4, and the role begin",
        ),
        ("sglang:d2t2p3", "would span nodes 0, 1: .* a multiple of 4"),
        ("vllm:d4t1p3", "would span nodes 0, 1: it fits on one, so t x p = 3 must divide the GPUs"),
        ("sglang:d1t4p3", None),
        ("sglang:d1t2p6", None),
        ("sglang:d2t2p2", None),
        ("vllm:d1t2p6", None),
        ("vllm:d1p8", None),
        ("sglang:d4t2", None),
        ("transformers:d8", None),
    ],
)
def test_a_replica_of_a_server_is_on_one_node_or_on_whole_nodes(backend: str, problem: str | None) -> None:
    """On nodes of 4, from the first."""
    cluster = {"n_nodes": 4, "n_gpus_per_node": 4}
    asked = recipe(cluster=cluster, rollout={"backend": backend}, actor={"path": "m", "backend": "megatron:d2t2"})
    if problem is None:
        check_recipe(asked, MOE)
        return
    with pytest.raises(RecipeError, match=f"rollout: a replica of .* {problem}") as caught:
        check_recipe(asked, MOE)
    assert len(caught.value.problems) == 1


def test_sglang_puts_whole_stages_on_nodes_or_whole_nodes_in_a_stage() -> None:
    def asked(backend: str) -> TrainRecipe:
        return recipe(cluster={"n_nodes": 4, "n_gpus_per_node": 6}, rollout={"backend": backend})

    check_recipe(asked("vllm:d1t4p3"), MOE)
    with pytest.raises(RecipeError, match="p3 and the 2 nodes of a replica must divide one another; change p and t"):
        check_recipe(asked("sglang:d1t4p3"), MOE)


def test_a_replica_on_listed_devices_is_on_one_node_or_on_whole_nodes_in_their_order() -> None:
    def listed(backend: str, devices: list[int]) -> TrainRecipe:
        actor = {"path": "m", "backend": "megatron:d4", "device_mapping": [4, 5, 6, 7]}
        rollout = {"backend": backend, "device_mapping": devices}
        return recipe(cluster={"n_nodes": 3, "n_gpus_per_node": 4}, actor=actor, rollout=rollout)

    check_recipe(listed("vllm:d2t2", [2, 3, 4, 5]), MOE)
    with pytest.raises(RecipeError, match="would span nodes 0, 1"):
        check_recipe(listed("vllm:d2t2", [1, 2, 3, 4]), MOE)
    check_recipe(listed("vllm:d1t4p2", [8, 9, 10, 11, 0, 1, 2, 3]), MOE)
    with pytest.raises(RecipeError, match=r"would span nodes 0, 2: .* \(or list whole nodes in its device_mapping\)"):
        check_recipe(listed("vllm:d1t4p2", [8, 0, 9, 1, 10, 2, 11, 3]), MOE)


SERVER_KEYS = {"memory_fraction": 0.5, "server_python": "/opt/python", "server_args": ["--enforce-eager"]}


@pytest.mark.parametrize("key", SERVER_KEYS)
@pytest.mark.parametrize("layout", [{}, {"allocation_mode": "transformers:d4+megatron:d2t2e2"}])
def test_keys_of_servers_need_a_server(key: str, layout: dict[str, str]) -> None:
    here = {} if layout else {"backend": "transformers:d4"}
    with pytest.raises(
        RecipeError, match=rf"rollout\.{key}=.* is for servers \(vLLM, SGLang\), and the rollout runs tr"
    ):
        check_recipe(recipe(rollout={**here, key: SERVER_KEYS[key]}, **layout), MOE)
    check_recipe(recipe(rollout={"backend": "sglang:d2t2", **SERVER_KEYS}), MOE)
    check_recipe(recipe(rollout=SERVER_KEYS, allocation_mode="sglang:d2t2+megatron:d2t2e2"), MOE)


@pytest.mark.parametrize("section", ["gconfig", "evaluator"])
def test_a_temperature_that_the_engine_does_not_take_is_refused(section: str) -> None:
    def with_temperature(value: float, backend: str = "vllm:d2t2") -> TrainRecipe:
        own = {section: {"temperature": value, "greedy": False}, "valid_dataset": {"path": "d"}}
        return recipe(rollout={"backend": backend}, **own)

    for accepted in (0.01, 1.0, 2.0):
        check_recipe(with_temperature(accepted), MOE)
    for refused in (0.009, 2.1):
        with pytest.raises(RecipeError, match=rf"{section}\.temperature={refused}: vLLM samples with 0\.01 to 2\.0"):
            check_recipe(with_temperature(refused), MOE)
        check_recipe(with_temperature(refused, "sglang:d2t2"), MOE)
        check_recipe(with_temperature(refused, "transformers:d2"), MOE)


def test_routes_are_replayed_only_where_they_are_recorded_and_asked_for() -> None:
    def asked(replay: str, rollout: str = "vllm:d2", **megatron: Any) -> TrainRecipe:
        actor = {"path": "m", "backend": "megatron:d2", "router_replay": replay, "megatron": megatron}
        return recipe(actor=actor, rollout={"backend": rollout})

    for replay in ("old_logprobs", "rollout"):
        check_recipe(asked(replay), MOE)
        with pytest.raises(RecipeError, match=rf"router_replay={replay}: the model has no experts: drop it"):
            check_recipe(asked(replay), DENSE)
        with pytest.raises(RecipeError, match=r"force_load_balancing=true sends tokens to random experts"):
            check_recipe(asked(replay, transformer={"moe_router_force_load_balancing": True}), MOE)
    with pytest.raises(RecipeError, match=r"=rollout: vLLM returns no routes with pipeline"):
        check_recipe(asked("rollout", "vllm:p2"), MOE)
    check_recipe(asked("old_logprobs", "vllm:p2"), MOE)
    check_recipe(asked("rollout", "sglang:p2"), MOE)
    random = {"transformer": {"moe_router_force_load_balancing": True}}
    for auto, shape, taken, said in (
        (asked("auto"), MOE, "rollout", r"rollout \(auto\)"),
        (asked("auto", "transformers:d2"), MOE, "rollout", r"rollout \(auto\)"),
        (asked("auto"), DENSE, "none", r"none \(auto\): the model has no experts"),
        (asked("auto", "vllm:p2"), MOE, "none", r"none \(auto\): vLLM returns no routes with pipeline stages"),
        (asked("auto", **random), MOE, "none", r"none \(auto\): .*force_load_balancing=true sends tokens to random"),
        (asked("none"), MOE, "none", "None"),
        (asked("old_logprobs"), MOE, "old_logprobs", "old_logprobs"),
    ):
        check_recipe(auto, shape)
        assert with_replay(auto, shape).actor.router_replay == taken
        assert re.fullmatch(f"{said}.*", str(replay_taken(auto, shape)))


def test_one_expert_whose_weight_is_always_1_is_for_fsdp() -> None:
    for top_k, normalises, is_refused in ((1, True, True), (2, True, False), (1, False, False)):
        shape = replace(MOE, top_k=top_k, norm_topk_prob=normalises)
        check_recipe(recipe(actor={"path": "m", "backend": "fsdp:d2"}), shape)
        refusal = pytest.raises(RecipeError, match=r"scale the weight of one expert: set actor\.backend=fsdp:d1")
        with refusal if is_refused else nullcontext():
            check_recipe(recipe(actor={"path": "m", "backend": "megatron:d2"}), shape)


def test_mbridge_has_no_latent_attention() -> None:
    actor = {"path": "m", "backend": "megatron:d2", "megatron": {"bridge_type": "mbridge"}}
    check_recipe(recipe(actor=actor), MOE)
    with pytest.raises(RecipeError, match=r"bridge_type=mbridge has no latent attention, which deepseek_v3 needs"):
        check_recipe(recipe(actor=actor), find_shape("DeepSeek-V3"))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"megatron": {"bridge_type": "mbridge"}}, "bridge_type=mbridge has no gated delta nets, which qwen3_5_moe"),
        ({"megatron": {"kernels": "te"}}, "kernels=te has no gated delta nets, which qwen3_5_moe needs"),
    ],
)
def test_what_gated_delta_nets_do_not_do_is_refused(section: dict[str, Any], message: str) -> None:
    actor = {"path": "m", "backend": "megatron:d2"}
    check_recipe(recipe(actor=actor), HYBRID)
    with pytest.raises(RecipeError, match=re.escape(message)):
        check_recipe(recipe(actor={**actor, **section}), HYBRID)


@pytest.mark.parametrize("megatron", [{"bridge_type": "mbridge"}, {"kernels": "te"}], ids=str)
def test_norms_over_all_heads_are_fivefolds_own(megatron: dict[str, Any]) -> None:
    actor = {"path": "m", "backend": "megatron:d2", "megatron": megatron}
    check_recipe(recipe(actor=actor), MOE)
    with pytest.raises(RecipeError, match=r"has no norms over all heads, which minimax_m2 needs: set it to fivefold"):
        check_recipe(recipe(actor=actor), find_shape("MiniMax-M2"))


def test_gelu_is_not_fused_as_swiglu() -> None:
    actor = {"path": "m", "backend": "megatron:d2", "megatron": {"transformer": {"bias_activation_fusion": True}}}
    check_recipe(recipe(actor=actor), DENSE)
    with pytest.raises(RecipeError, match=r"bias_activation_fusion=true fuses SwiGLU, and the MLPs of gemma3_text"):
        check_recipe(recipe(actor=actor), find_shape("gemma-3-1b"))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"megatron": {"bridge_type": "mbridge"}}, "bridge_type=mbridge has no sliding windows, which gpt_oss needs"),
        ({"megatron": {"kernels": "te"}}, "actor.megatron.kernels=te has no attention sinks, which gpt_oss needs"),
        ({"attn_impl": "flash_attention_4"}, "has not been tried with the sliding windows and attention sinks of gpt"),
    ],
)
def test_what_windows_sinks_and_joint_experts_do_not_do_is_refused(section: dict[str, Any], message: str) -> None:
    actor, shape = {"path": "m", "backend": "megatron:d2"}, find_shape("gpt-oss-20b")
    check_recipe(recipe(actor=actor), shape)
    check_recipe(recipe(actor={**actor, "lora": {}}), shape)
    for transport in ("adapter", "served_adapter"):
        rollout = {"backend": "vllm:d1", "weight_transport": transport}
        with pytest.raises(RecipeError, match=f"weight_transport={transport} does not carry adapters of the experts"):
            check_recipe(recipe(actor={**actor, "lora": {}}, rollout=rollout), shape)
    with pytest.raises(RecipeError, match=re.escape(message)):
        check_recipe(recipe(actor={**actor, **section}), shape)


def test_adapters_need_layers_that_have_them() -> None:
    for backend in ("megatron:d2", "fsdp:d2"):
        actor = {"path": "m", "backend": backend, "lora": {"targets": ["q_proj", "down_*"]}}
        check_recipe(recipe(actor=actor), MOE)
        with pytest.raises(RecipeError, match=r"actor\.lora\.targets: no layer is named 'w1': .*q_proj"):
            check_recipe(recipe(actor={**actor, "lora": {"targets": ["w1"]}}), MOE)
    te = {"path": "m", "backend": "megatron:d2", "megatron": {"kernels": "te"}, "lora": {}}
    with pytest.raises(RecipeError, match=r"actor\.lora needs actor\.megatron\.kernels=fivefold, and it is te"):
        check_recipe(recipe(actor=te), MOE)


def test_latent_attention_has_no_query_and_key_norms_to_decay() -> None:
    actor = {"path": "m", "backend": "megatron:d2", "megatron": {"optimizer": {"apply_wd_to_qk_layernorm": True}}}
    check_recipe(recipe(actor=actor), MOE)
    with pytest.raises(RecipeError, match=r"has no query and key norms to decay in deepseek_v3"):
        check_recipe(recipe(actor=actor), find_shape("DeepSeek-V3"))


def test_layers_of_transformer_engine_refuse_what_they_cannot_do() -> None:
    actor = {"path": "m", "backend": "megatron:d2", "megatron": {"kernels": "te"}}
    check_recipe(recipe(actor=actor), MOE)
    with pytest.raises(
        RecipeError, match=r"actor\.megatron\.kernels=te has no latent attention, which deepseek_v3 needs"
    ):
        check_recipe(recipe(actor=actor), find_shape("DeepSeek-V3"))
    with pytest.raises(RecipeError, match=r"actor\.megatron\.kernels=te does not divide sequences as c2 does"):
        check_recipe(recipe(actor={**actor, "backend": "megatron:c2"}), MOE)
    for own, message in (
        ({"dtype": "float32"}, "attends in bfloat16 only"),
        ({"attn_impl": "flash_attention_4"}, "TransformerEngine's own choice of kernels"),
        ({"megatron": {"kernels": "te", "use_deterministic_algorithms": True}}, "does not promise the same bits"),
        (
            {
                "megatron": {
                    "kernels": "te",
                    "recompute": "selective",
                    "transformer": {"recompute_modules": ["layernorm"]},
                }
            },
            "with kernels=te norms are parts of the linear layers",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            recipe(actor={**actor, **own})


@pytest.mark.parametrize("quantized", [["--quantization", "fp8"], ["--quantization=fp8"], ["-q", "fp8"]])
def test_graphs_of_vllm_would_keep_quantized_latent_attention(quantized: list[str]) -> None:
    latent = find_shape("DeepSeek-V3")

    def asked(backend: str, *arguments: str) -> TrainRecipe:
        return recipe(rollout={"backend": backend, "server_args": [*quantized, *arguments]})

    with pytest.raises(RecipeError, match=r"CUDA graphs in vLLM would continue with old weights: drop"):
        check_recipe(asked("vllm:d2"), latent)
    check_recipe(asked("vllm:d2", "--enforce-eager"), latent)
    with pytest.raises(RecipeError, match=rf"{quantized[0].split('=')[0]} in rollout\.server_args is for vLLM: SGLang"):
        check_recipe(asked("sglang:d2"), latent)
    check_recipe(asked("vllm:d2"), MOE)


def test_vllm_alone_quantizes_bfloat16_weights_that_it_gets() -> None:
    def asked(backend: str, **keys: Any) -> TrainRecipe:
        return recipe(rollout={"backend": backend, "quantization": "fp8_per_block", **keys})

    check_recipe(asked("vllm:d2"), MOE)
    with pytest.raises(RecipeError, match=r"quantization=fp8_per_block is for vLLM: SGLang quantizes weights when it"):
        check_recipe(asked("sglang:d2"), MOE)
    with pytest.raises(RecipeError, match=r"and -q in rollout\.server_args say the same"):
        check_recipe(asked("vllm:d2", server_args=["-q", "fp8"]), MOE)
    with pytest.raises(RecipeError, match=r"and they are float32"):
        check_recipe(asked("vllm:d2", dtype="float32"), MOE)
    with pytest.raises(RecipeError, match=r"CUDA graphs in vLLM would continue with old weights"):
        check_recipe(asked("vllm:d2"), find_shape("DeepSeek-V3"))
    check_recipe(asked("vllm:d2", server_args=["--enforce-eager"]), find_shape("DeepSeek-V3"))


def test_servers_speculate_with_what_they_verify_exactly() -> None:
    def asked(backend: str, method: str = "mtp", **keys: Any) -> TrainRecipe:
        return recipe(rollout={"backend": backend, "speculative": {"method": method}}, **keys)

    for backend in ("vllm:d2", "sglang:d2"):
        check_recipe(asked(backend), MOE)
        with pytest.raises(RecipeError, match=r"gconfig\.min_p: \w+ does not heed it for drafted tokens"):
            check_recipe(asked(backend, gconfig={"min_p": 0.1}), MOE)
        with pytest.raises(RecipeError, match=r"evaluator\.min_p: \w+ does not heed it"):
            check_recipe(asked(backend, valid_dataset={"path": "d"}, evaluator={"greedy": False, "min_p": 0.1}), MOE)
        with pytest.raises(RecipeError, match=r"servers tell the experts of drafted tokens too"):
            check_recipe(
                asked(backend, actor={"path": "m", "backend": "megatron:d2t2e2", "router_replay": "rollout"}), MOE
            )
    check_recipe(asked("vllm:d2", "ngram"), MOE)
    with pytest.raises(RecipeError, match=r"method=ngram is for vLLM: SGLang with n-grams cannot load weights from"):
        check_recipe(asked("sglang:d2", "ngram"), MOE)
    check_recipe(asked("sglang:d2", gconfig={"logit_bias": {"3": -1.0}}), MOE)
    for key, value in (("logit_bias", {"3": -1.0}), ("bad_token_ids", [3])):
        with pytest.raises(RecipeError, match=rf"gconfig\.{key}: vLLM does not heed it for drafted tokens"):
            check_recipe(asked("vllm:d2", gconfig={key: value}), MOE)
    with pytest.raises(RecipeError, match=r"rollout\.speculative=.* is for servers"):
        check_recipe(asked("transformers:d2"), MOE)


def test_a_server_on_shared_devices_cannot_keep_keys_and_values_of_older_weights() -> None:
    def asked(backend: str, *, colocate: bool) -> TrainRecipe:
        rollout = {"backend": backend, "colocate": colocate, "max_head_offpolicyness": 1, "recompute_kv_cache": False}
        return recipe(rollout=rollout)

    check_recipe(asked("vllm:d2t2", colocate=False), MOE)
    with pytest.raises(RecipeError, match=r"recompute_kv_cache=false needs devices for the rollout alone, and actor"):
        check_recipe(asked("vllm:d2t2", colocate=True), MOE)
    check_recipe(asked("transformers:d4", colocate=True), MOE)


def test_a_rollout_that_keeps_its_weights_for_several_steps_has_devices_of_its_own() -> None:
    def asked(backend: str, *, colocate: bool) -> TrainRecipe:
        return recipe(
            rollout={"backend": backend, "colocate": colocate, "max_head_offpolicyness": 1, "sync_freq_steps": 2}
        )

    check_recipe(asked("transformers:d4", colocate=False), MOE)
    for backend in ("vllm:d2t2", "transformers:d4"):
        with pytest.raises(RecipeError, match=r"sync_freq_steps=2 needs devices for the rollout alone, and actor"):
            check_recipe(asked(backend, colocate=True), MOE)
    with pytest.raises(ValueError, match=r"up to 2 training steps old, and max_head_offpolicyness=1 allows fewer"):
        recipe(rollout={"max_head_offpolicyness": 1, "sync_freq_steps": 3})


def test_router_losses_need_a_router() -> None:
    megatron = {"transformer": {"moe_aux_loss_coeff": 0.1}}
    check_recipe(recipe(actor={"path": "m", "backend": "megatron:d2", "megatron": megatron}), MOE)
    with pytest.raises(RecipeError, match=r"moe_aux_loss_coeff=0\.1 is about experts, and qwen2 has none"):
        check_recipe(recipe(actor={"path": "m", "backend": "megatron:d2", "megatron": megatron}), DENSE)


def test_keys_of_another_engine_are_refused() -> None:
    for backend, section, message in (
        ("fsdp:d2", {"megatron": {"recompute": "full"}}, r"recompute=full .* set actor\.fsdp\.recompute in its place"),
        ("fsdp:d2", {"megatron": {"transformer": {"moe_aux_loss_coeff": 0.1}}}, r"coeff=0\.1 is for .*: drop it"),
        ("megatron:d2", {"fsdp": {"recompute": "full"}}, r"actor\.fsdp\.recompute=full is for FSDP"),
        ("megatron:d2", {"fsdp": {"optimizer": {"state_on": "host"}}}, r"set actor\.megatron\.optimizer\.state_on in"),
    ):
        with pytest.raises(RecipeError, match=message):
            check_recipe(recipe(actor={"path": "m", "backend": backend, **section}), MOE)
    check_recipe(recipe(actor={"path": "m", "backend": "fsdp:d2", "fsdp": {"recompute": "full"}}), MOE)


def test_weights_are_kept_in_shares_that_divide_the_ranks() -> None:
    def asked(share: int, layouts: str) -> TrainRecipe:
        actor = {"path": "m", "kl_ctl": 0.1, "fsdp": {"reshard_after_forward": share}}
        return recipe(actor=actor, allocation_mode=layouts, rollout={}, cluster={"n_nodes": 2, "n_gpus_per_node": 8})

    alone = "vllm[rollout]:d2+fsdp[actor]:d2c2"
    check_recipe(asked(2, alone), MOE)
    for share in (3, 4):
        with pytest.raises(RecipeError, match=rf"actor\.fsdp\.reshard_after_forward={share} must be .* the 4 ranks"):
            check_recipe(asked(share, alone), MOE)
    with pytest.raises(RecipeError, match=r"ref: actor\.fsdp\.reshard_after_forward=2 must be .* the 3 ranks"):
        check_recipe(asked(2, f"{alone}+fsdp[ref]:d3"), MOE)


def test_a_reference_model_of_its_own_shape_is_checked_in_the_actors_layout() -> None:
    with pytest.raises(RecipeError, match="ref: e2 splits experts"):
        check_recipe(recipe(), MOE, {"ref": DENSE})


def test_a_reference_that_follows_the_actor_has_its_shape() -> None:
    asked = recipe(ref={"path": "r", "ema_decay": 0.9}, actor={"path": "m", "backend": "megatron:d2", "kl_ctl": 0.1})
    check_recipe(asked, MOE, {"ref": MOE})
    with pytest.raises(RecipeError, match=r"takes the actor's weights, but ref\.path=r is a model of another shape"):
        check_recipe(asked, MOE, {"ref": DENSE})


def test_only_ranks_of_trained_models_are_recorded() -> None:
    actor, profile = {"path": "m", "backend": "megatron:d2"}, {"steps": [1], "ranks": [0, 3]}
    critic = {"path": "c", "backend": "megatron:d4", "colocate": False}
    ppo = {"critic": critic, "actor": {**actor, "advantage": "gae"}, "rollout": {"backend": "vllm:d1t2"}}
    with pytest.raises(RecipeError, match=r"profile\.ranks has 3, but the last rank is 1 of the actor"):
        check_recipe(recipe(actor=actor, profile=profile), MOE)
    check_recipe(recipe(actor=actor, profile={**profile, "steps": []}), MOE)
    check_recipe(recipe(profile=profile, **ppo), MOE)
    with pytest.raises(RecipeError, match="the last rank is 1 of the actor and 3 of the critic"):
        check_recipe(recipe(profile={**profile, "ranks": [4]}, **ppo), MOE)


def test_recipes_of_fine_tuning_are_checked() -> None:
    values = {
        "experiment_name": "check",
        "cluster": {"n_gpus_per_node": 0},
        "actor": {"path": "m", "backend": "megatron:p13"},
        "train_dataset": {"path": "d"},
    }
    with pytest.raises(RecipeError, match="actor: 12 layers"):
        check_recipe(SFTRecipe.model_validate(values), MOE)


def test_lengths_are_those_of_dense_attention() -> None:
    sparse = find_shape("DeepSeek-V3.2")
    game = {"game": "fivefold.environments.guess_digit:GuessDigit"}
    played: dict[str, Any] = {"gconfig": {"max_new_tokens": 512}, "reward": {"fn": "environment"}}
    check_recipe(recipe(gconfig={"max_new_tokens": 2047}), sparse)
    check_recipe(recipe(gconfig={"max_new_tokens": 4096}), find_shape("DeepSeek-V3"))
    with pytest.raises(
        RecipeError,
        match=r"gconfig\.max_new_tokens=2048 leaves no room for a prompt: the model is computed for up to "
        r"index_topk=2048 tokens, where its attention is dense; lower it",
    ):
        check_recipe(recipe(gconfig={"max_new_tokens": 2048}), sparse)
    check_recipe(recipe(**played, environment={**game, "max_length": 2048}), sparse)
    with pytest.raises(RecipeError, match=r"environment\.max_length=2049 is too much: .* up to index_topk=2048 tokens"):
        check_recipe(recipe(**played, environment={**game, "max_length": 2049}), sparse)
    with pytest.raises(
        ValueError, match=r"has 2048 tokens, but the model .*, one of them behind each .*max_length=2047"
    ):
        check_examples(sparse, "train_dataset", 2048, 5, n_appended=1)
