"""verl's trainers whose rollout has its own devices."""

from __future__ import annotations

from dialect_conversion import Conversion, convert_words

BATCH = "train_dataset.batch_size"
ACTOR = "actor_rollout_ref.actor."
ASYNC = "async_training."
ON_ONE_NODE = ["trainer.n_gpus_per_node=6", "rollout.nnodes=1", "rollout.n_gpus_per_node=2"]
SEPARATE = [
    "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "data.train_files=a.parquet",
    "algorithm.adv_estimator=grpo",
    f"{ACTOR}ppo_mini_batch_size=32",
]


def converted(*words: str) -> Conversion:
    return convert_words("verl", *SEPARATE, *words)


def test_a_step_has_the_prompts_between_two_updates_of_the_rollouts_weights() -> None:
    """verl's default is 4 times one mini-batch; `verl_async_fsdp.sh` has other numbers."""
    assert converted(f"{ASYNC}staleness_threshold=0.5").recipe[BATCH] == 4 * 32


def test_one_step_off_is_one_step_ahead_with_batches_of_its_own() -> None:
    conversion = converted("data.train_batch_size=64", *ON_ONE_NODE)
    assert conversion.recipe[BATCH] == 64
    assert conversion.recipe["actor.ppo_n_minibatches"] == 2
    assert conversion.recipe["rollout.max_head_offpolicyness"] == 1
    assert any("one step ahead" in note for note in conversion.report.notes)


def test_rollout_and_trainer_share_nodes_or_have_their_own() -> None:
    cases = [
        # trainer: nodes x GPUs; rollout: nodes x GPUs; the cluster
        ((1, 6), (1, 2), (1, 8)),
        ((2, 4), (2, 4), (2, 8)),
        ((2, 8), (1, 8), (3, 8)),
        ((2, 8), (2, 8), (4, 8)),
    ]
    for (nodes, gpus), (others, their_gpus), cluster in cases:
        trainer = [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={gpus}", f"{ACTOR}strategy=megatron"]
        rollout = [f"rollout.nnodes={others}", f"rollout.n_gpus_per_node={their_gpus}"]
        conversion = converted("data.train_batch_size=64", *trainer, *rollout)
        assert (conversion.recipe["cluster.n_nodes"], conversion.recipe["cluster.n_gpus_per_node"]) == cluster
        assert conversion.recipe["actor.backend"] == f"megatron:d{nodes * gpus}"
        assert conversion.recipe["rollout.backend"] == f"vllm:d{others * their_gpus // 2}t2"
        assert conversion.recipe["rollout.colocate"] is False
        assert conversion.unsupported() == set()
        assert not conversion.report.problems
    uneven = converted("trainer.nnodes=2", "trainer.n_gpus_per_node=6", "rollout.nnodes=1", "rollout.n_gpus_per_node=4")
    assert {"rollout.nnodes", "rollout.n_gpus_per_node"} <= uneven.unsupported()
