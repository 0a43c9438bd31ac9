"""slime and miles: flags of a training program, from arrays and from files that a script reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from dialect_conversion import Conversion, convert_files, convert_fixture

from fivefold_import.framework import Framework

MODEL = "--hf-checkpoint Qwen/Qwen3-4B --rollout-batch-size 8 --n-samples-per-prompt 4"


def convert_flags(folder: Path, flags: str, framework: Framework = "slime", program: str = "train.py") -> Conversion:
    script = folder / "run.sh"
    script.write_text(f"python3 {program} {MODEL} {flags}\n", encoding="utf-8")
    return convert_files(framework, [script], [], {})


def test_the_files_of_models_are_read_wherever_the_script_is(tmp_path: Path) -> None:
    (tmp_path / "scripts" / "models").mkdir(parents=True)
    (tmp_path / "examples" / "mine").mkdir(parents=True)
    (tmp_path / "scripts" / "models" / "base.sh").write_text("MODEL_ARGS=(--moe-aux-loss-coeff ${COEFF:-0})\n")
    (tmp_path / "scripts" / "models" / "moe.sh").write_text(
        'COEFF=0.001 source "$(dirname -- "${BASH_SOURCE[0]}")/base.sh"\n', encoding="utf-8"
    )
    launch = "\npython3 train.py --hf-checkpoint Qwen/Qwen3-30B-A3B ${MODEL_ARGS[@]}\n"
    script = tmp_path / "examples" / "mine" / "run.sh"
    for source in (
        'HERE="$(cd -- "$(dirname -- "$0")" && pwd)"\nsource "${HERE}/../../scripts/models/moe.sh"',
        "source /root/slime/scripts/models/moe.sh",
        'ROOT=$(git rev-parse --show-toplevel)\nsource "$ROOT/scripts/models/moe.sh"',
    ):
        script.write_text(source + launch, encoding="utf-8")
        conversion = convert_files("slime", [script], [], {})
        assert conversion.recipe["actor.megatron.transformer.moe_aux_loss_coeff"] == 0.001, source
        assert conversion.report.problems == (), source


def test_variables_that_nothing_reads_are_no_problem_and_others_are(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    unknown = 'if [ "$(nvidia-smi -L | wc -l)" -gt 4 ]; then X=1; else X=0; fi\n'
    script.write_text(f"{unknown}python3 train.py {MODEL} --lr 1e-6\n", encoding="utf-8")
    assert convert_files("slime", [script], [], {}).report.problems == ()
    script.write_text(f"{unknown}python3 train.py {MODEL} --lr $X\n", encoding="utf-8")
    (problem,) = convert_files("slime", [script], [], {}).report.problems
    assert "the values of X" in problem


def test_a_script_without_one_training_command_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python3 tools/convert.py --hf-checkpoint a\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"no commands start train\.py or train_async\.py"):
        convert_files("slime", [script], [], {})


def test_overrides_may_have_dashes(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 train.py {MODEL} --lr 1e-6\n", encoding="utf-8")
    recipe = convert_files("slime", [script], ["lr=2e-6", "rollout-max-response-len=99"], {}).recipe
    assert (recipe["actor.optimizer.lr"], recipe["gconfig.max_new_tokens"]) == (2e-6, 99)


def test_megatrons_defaults_that_differ_are_written(tmp_path: Path) -> None:
    recipe = convert_flags(tmp_path, "--lr 1e-6 --min-lr 1e-7").recipe
    assert recipe["actor.optimizer.lr_scheduler_type"] == "linear"
    assert recipe["actor.optimizer.min_lr_ratio"] == 0.1
    assert recipe["train_dataset.shuffle"] is False


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"actor.reward_norm.std_level": "group", "actor.loss_aggregation": "sequence_mean"}),
        ("--calculate-per-token-loss", {"actor.loss_aggregation": "token_mean"}),
        (
            "--disable-grpo-std-normalization",
            {"actor.reward_norm.std_level": "none", "actor.reward_norm.mean_level": "group"},
        ),
        (
            "--disable-rewards-normalization",
            {"actor.reward_norm.std_level": "none", "actor.reward_norm.mean_level": "none"},
        ),
        ("--advantage-estimator cispo", {"actor.loss": "cispo"}),
        (
            "--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages",
            {"actor.advantage": "reinforce_pp_baseline", "actor.whiten_advantages": True},
        ),
        ("--use-kl-loss --kl-loss-coef 0.1", {"actor.kl_ctl": 0.1, "actor.kl_estimator": "k2"}),
        ("--kl-coef 0.1", {"actor.kl_ctl": 0.1, "actor.kl_in": "reward", "actor.kl_estimator": "k1"}),
        (
            "--use-tis --tis-clip-low 0.5",
            {"actor.rollout_correction.weight_cap": 2.0, "actor.rollout_correction.weight_floor": 0.5},
        ),
        ("--use-opsm --opsm-delta 0.01 --num-steps-per-rollout 2", {"actor.opsm_delta": 0.01}),
        ("--use-routing-replay", {"actor.router_replay": "old_logprobs"}),
        ("--num-steps-per-rollout 2", {"actor.ppo_n_minibatches": 2}),
        ("--use-opd --opd-kl-coef 0.5", {"actor.distill.coeff": 0.5, "teacher.path": "???"}),
    ],
)
def test_flags_of_the_algorithm(flags: str, expected: dict[str, object], tmp_path: Path) -> None:
    if "--use-kl-loss" in flags:
        flags += " --kl-loss-type k2"
    recipe = convert_flags(tmp_path, flags).recipe
    assert {key: recipe.get(key) for key in expected} == expected


def test_the_asynchronous_program_is_as_far_ahead_as_its_weights_are_old(tmp_path: Path) -> None:
    for flags, ahead, every in (("", 1, None), ("--update-weights-interval 3", 3, 3)):
        recipe = convert_flags(tmp_path, flags, program="train_async.py").recipe
        assert recipe["rollout.max_head_offpolicyness"] == ahead
        assert recipe.get("rollout.sync_freq_steps") == every
    assert "rollout.max_head_offpolicyness" not in convert_flags(tmp_path, "").recipe


def test_the_rollout_has_the_devices_that_it_names(tmp_path: Path) -> None:
    apart = "--actor-num-nodes 2 --actor-num-gpus-per-node 8 --rollout-num-gpus 16 --rollout-num-gpus-per-engine 4"
    recipe = convert_flags(tmp_path, f"{apart} --tensor-model-parallel-size 4").recipe
    assert (recipe["actor.backend"], recipe["rollout.backend"]) == ("megatron:d4t4", "sglang:d4t4")
    assert (recipe["cluster.n_nodes"], recipe["rollout.colocate"]) == (4, False)


def test_what_sglang_gets_is_handed_on_and_an_unknown_flag_is_not(tmp_path: Path) -> None:
    conversion = convert_flags(tmp_path, "--sglang-page-size 32 --sglang-disable-radix-cache --no-such-flag 1")
    assert conversion.recipe["rollout.server_args"] == ["--page-size=32", "--disable-radix-cache"]
    assert conversion.unsupported() == {"no_such_flag"}


def test_dropout_of_attention_is_refused(tmp_path: Path) -> None:
    flags = "--attention-dropout 0.1 --hidden-dropout 0.0"
    assert convert_flags(tmp_path, flags).unsupported() == {"attention_dropout"}


def test_miles_reads_slimes_flags_and_its_own(tmp_path: Path) -> None:
    assert convert_fixture("miles", "miles_lora.sh").recipe["actor.lora.rank"] == 32
    assert convert_flags(tmp_path, "--update-weight-transfer-mode p2p", "miles").unsupported() == set()
    replays = convert_flags(tmp_path, "--use-rollout-routing-replay --use-rollout-indexer-replay", "miles")
    assert replays.recipe["actor.router_replay"] == "rollout"
    assert replays.unsupported() == {"use_rollout_indexer_replay"}
    drops = convert_flags(tmp_path, "--lora-rank 8 --lora-dropout 0.1", "miles")
    assert drops.recipe["actor.lora.dropout"] == 0.1


def test_a_service_that_scores_gets_what_slime_sends(tmp_path: Path) -> None:
    flags = "--rm-type remote_rm --rm-url http://scores:8000/rm --reward-key acc --group-rm"
    conversion = convert_flags(tmp_path, flags)
    sent = {key: name for key, name in conversion.recipe.items() if key.startswith("reward.")}
    assert sent == {
        "reward.fn": "http",
        "reward.kwargs.url": "http://scores:8000/rm",
        "reward.kwargs.score": "acc",
        "reward.kwargs.fields.prompt": "prompt",
        "reward.kwargs.fields.response": "response",
        "reward.kwargs.fields.label": "ground_truth",
    }
    assert not [problem for problem in conversion.report.problems if "reward" in problem]
    assert conversion["group_rm"].outcome == "unsupported"
    assert "the argument `responses`" in conversion["group_rm"].note
    without = convert_flags(tmp_path, "--rm-type math --rm-url http://scores:8000/rm")
    assert (without.recipe["reward.fn"], without["rm_url"].outcome) == ("math", "implied")
