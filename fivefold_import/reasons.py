"""Reasons that several frameworks' keys share: what Fivefold does in the place of what a key asks for.

A reason is in the report with each key that is implied or unsupported.
"""

from __future__ import annotations

# Algorithm

SAME_ADVANTAGE = "without a critic, every token of a response has the same advantage"
NO_REFERENCE = "no reference model is loaded, because there is no KL term"
ONE_KL = "there is one KL term, and it is in the loss"
CLIPPED_LOSS = "the loss is PPO's clipped loss"
CLIP = "PPO, which clips the ratio of each token"
NO_CORRECTION = "samples are not weighted by the mismatch of rollout and trainer"
NO_ROUTER_REPLAY = "only the actor replays the experts of tokens: actor.router_replay says which"
OLD_LOGPROBS = "old log-probabilities are computed where they can differ from the rollout's"
TRUNCATED_TRAINED = "a response that is cut off keeps its reward; actor.mask_truncated leaves it out of training"
NO_REPLAY = "samples of a file are not trained on: rollout.replay_buffer trains a run's own samples again"
IN_MEMORY = "samples go from rollout to trainer in memory"
SYNCHRONOUS = "training is synchronous: each step trains on samples of the newest weights"
AHEAD = "rollout.max_head_offpolicyness says how far the rollout may be ahead, and bounds what waits to be trained"
GOES_ON = "completions that are running when weights change continue with the new ones"
KEEPS_ALL = "no sample is dropped: a prompt begins only if it will be young enough when it is trained"
FIXED_BATCH = "each step samples train_dataset.batch_size prompts"
NO_CRITIC = "the run has no critic, because its advantages need none"
NO_STAGES = "a run has one stage"
ADAMW = "the optimizer is AdamW"

# Agents

ONE_COMPLETION = "each prompt gets one completion"
WRITE_GAME = "write it as a class with reset and step, and name that in environment.game=file.py:Class (docs/agents.md)"
WRITE_TOOLS = (
    "write the tools as functions with types and docstrings, and list them in "
    "environment.tools=[file.py:function] (docs/agents.md)"
)
WRITE_AGENT = (
    "write it as a function that asks the model at base_url and returns the reward, and name that in "
    "environment.agent=file.py:function (docs/agents.md)"
)
NO_AGENTS = (
    "this option of agents has no counterpart: docs/agents.md says what the classes and functions of `environment` do"
)
OWN_VALUES = "your own class or function has this value: a row gives it others in the column extra_info"
OWN_TEXTS = "write this text into the prompts of the rows, or into what your own class or function answers"
SAME_TURNS = "all turns of an episode have its advantage"
OWN_TURNS = "turns have different advantages by actor.credit, and not in this way"
EPISODES_COUNT = "steps, batches and groups count episodes, however many turns they have"
TOKENS_KEPT = "sampled tokens are kept and trained, and never encoded again"
ONE_SEQUENCE = "a request that continues the one before continues its sequence, and another one begins a sequence"
CALLS_READ = "calls are read in the form of Qwen's and Hermes' templates"
THOUGHTS_LEFT = "an answer's text has its thoughts: let the agent cut them off where it needs the rest alone"
IN_REPLICAS = "episodes are played in the processes of the rollout's replicas"

# Rewards

NO_REWARD_MODEL = (
    "a model that writes a judgement is reward.judge, or one behind an OpenAI-compatible URL, with reward.fn=judge and "
    "its question in reward.kwargs.template; a model with a score head is reward.model, with reward.fn=model"
)
JUDGE_HOSTED = "the section reward.judge has the judge's model, engine, layout and lengths"
OWN_QUESTION = (
    "reward.fn=judge asks its own question: write this one as template, and how its score is found as pattern"
)
OWN_REWARD = "a response's reward is what reward.fn returns, or the weighted sum of reward.rewards"
OWN_REWARD_KWARGS = f"{OWN_REWARD}; give reward.kwargs"
ONE_REWARD = "each response has one reward, less the punishment by actor.overlong_reward_penalty"
REWARDS_TOGETHER = "rewards are computed concurrently"

TEACHER_LAID_OUT = "the teacher is laid out as the actor, on its devices, by Fivefold's trainer: change teacher.backend"

# Training on given answers

NOTHING_GENERATED = "nothing is generated"
ONE_UPDATE = "a step makes one update on its batch"
NO_NESTED_COLUMNS = "a column holds a text or chat messages, and no mapping: prepare the file"

# Models and training

NO_MULTIMODAL = "of models that read more than text, Qwen2.5-VL, Qwen3-VL and Qwen3.5 read images"
NO_ADAPTERS = "all weights are trained, without adapters"
MERGED = (
    "the rollout gets the weights with the adapters merged into them; rollout.weight_transport=served_adapter lets "
    "servers keep them apart (docs/lora.md)"
)
DROPS_INPUTS = "adapters drop their inputs, as PEFT does"
ONLY_LORA = "adapters are LoRA's, and of no other kind"
FIRST_ADAPTERS = (
    "actor.lora.path begins with a folder of adapters with the recipe's layers and ranks: name it there if this one "
    "has (docs/lora.md)"
)
NEVER_ADAPTED = "routers, embeddings, the output layer and what reads images have no adapters"
ONE_SET = "a model has one set of adapters"
ADAPTERS_BEGIN = "A is drawn as PEFT draws it (actor.lora.init=xavier: as Megatron-Bridge does), and B is 0"
ADAPTERS_FLOAT32 = "adapters have float32 master weights"
NO_REMOTE_CODE = "no code of a tokenizer's is run, and none of a model's in any case"
ALWAYS_PACKED = "sequences are always packed"
ONE_BUDGET = (
    "passes without gradients have a token budget, actor.mb_spec.max_tokens_per_infer_mb, by default the same as in "
    "training"
)
TOKEN_BUDGET = "micro-batches always have a token budget"
BALANCED = "ranks are always balanced by the cost of their sequences"
CHUNKED_LOGPROBS = "log-probabilities and entropy are always computed in chunks"
FLOAT32_STATES = "moments and master weights are float32 unless actor.megatron.optimizer says otherwise"
FLOAT32_REDUCTION = "gradients are reduced in float32 unless actor.megatron.ddp.grad_reduce_in_fp32 is false"
MIXED_PRECISION = "training runs in bfloat16 or float32"
GLOBAL_COUNTS = "losses are divided by global counts"
NO_OFFLOAD = "the actor is offloaded by actor.offload, a reference by ref.offload, and nothing else is"
MOMENTS_ON_HOST = "the moments are there; weights and gradients stay on the GPU"
ALL_LEAVES = "and actor.offload.grads and .optimizer: all of the actor's state"
PLAN_OFFLOADS = "the plan offloads no more than generation needs"
EACH_STATE = "each kind of optimizer state has its own precision"
ONLY_TRAINING_RECOMPUTES = "only training recomputes activations"
KERNELS = "Fivefold chooses its kernels itself"
ATTENTION = "attention is PyTorch's FlashAttention 2 unless actor.attn_impl=flash_attention_4"
OWN_BRIDGE = "Fivefold's own bridge loads the same weights; bridge_type=mbridge would load them with mbridge"
OTHER_BRIDGE = "it must be installed; the weights are the same with bridge_type=fivefold, which needs nothing"
WEIGHTS_IN_BUCKETS = "rollout.weight_transport decides how weights go from actor to rollout"

# FSDP in the place of DeepSpeed, and Megatron-Core in the place of Archon

ON_MEGATRON = "Megatron-Core trains in its place: the notes say what differs"
EXPERTS_APART = (
    "Megatron-Core trains in the place of VeOmni, whose FSDP2 shards the weights too: its experts are spread over the "
    "degree e, and a large model may need t or p as well (`fivefold plan RECIPE --search`)"
)
ON_FSDP = "FSDP trains in its place, which shards weights, gradients and optimizer too"
NOT_FSDP = "this option of FSDP has no counterpart"
LAYER_UNITS = "each layer is gathered on its own, while the one before it computes"
WHOLE_IN_PASSES = "weights stay whole in the forward and the backward pass: none is gathered or freed"
STATES_SHARDED = "weights, gradients and optimizer states are sharded over all replicas"
NO_SHARD_GROUPS = f"{STATES_SHARDED}, not over groups of them"
SPLIT_CONTEXTS = "context parallelism is the degree c of a Megatron layout"
WHOLE_WEIGHTS = (
    "Archon shards the weights too; Megatron's distributed optimizer, laid out in its place, shards the "
    "optimizer's states only. A large model may need t, p or e: `fivefold plan RECIPE --search` proposes layouts"
)

# Rollout and sampling

NO_ENGINE_OPTIONS = "this is an option of the engine: write it in rollout.server_args, as on the engine's command line"
ENGINE_SCHEDULES = "the engine schedules its requests itself, and a step waits for all of them"
ROLLOUT_DEGREES = "a rollout backend takes the degrees d, t and p"
KEPT_LOGPROBS = "rollout.logprob_share says for how many prompts the rollout gives its log-probabilities"
TOKEN_IDS = "the engine is handed token ids"
LENGTHS = "the length follows from train_dataset.max_length and gconfig.max_new_tokens"
SAMPLING = "sampling is by the keys of gconfig"
ALWAYS_SAMPLED = "responses are sampled in training"
END_TOKEN = "a response ends with an end token"
IN_TURN = "roles that share devices take turns on their memory"

# Data and evaluation

SAMPLER = "train_dataset.sampler chooses the prompts of a step: easy_to_hard, replay, or your own class"
READ_FIRST = "data are read before the first step"
TOO_LONG = "prompts that are too long are dropped, and counted"
NOT_CUT = "prompts that are too long are dropped, not cut"
ONE_FOLDER = "there is one data set: list the files as train_dataset.path"
TEMPLATE = "the tokenizer's chat template is applied unchanged"
ALL_HELD_OUT = "all held-out data are evaluated at once"
GREEDY = "evaluation is greedy"
AS_IN_TRAINING = "evaluation samples as training does"

# The run

ONE_WORKER = "Ray places one worker on each device"
NO_RETRY = "an error ends the run: nothing is tried again"
SAME_COMMAND = "an error ends the run, and the same command resumes from its newest checkpoint"
ONE_SEED = "the recipe's `seed` is the only one"
TIMEOUT = "scheduler.timeout_s is the limit of every phase"
OWN_ENVIRONMENT = "set this environment variable in the shell that starts the run"
LAUNCHER = "this says how the launcher starts, not what it trains"
OWN_CODE = "this selects between versions of the framework's own code"
OWN_OUTPUTS = "everything is written below <cluster.fileroot>/<experiment_name>/<trial_name>"
SAMPLES_FILE = "the samples of each step are written to samples.jsonl"
METRICS = "metrics go to the console, TensorBoard and metrics.jsonl"
RECORDED = "profile.steps names the steps whose traces and snapshots of memory are written"
BETWEEN_STEPS = "weights are written between steps"
LAST_WEIGHTS = "the weights are saved after the last step, as a Hugging Face folder"
OWN_FREQUENCY = "it is off: checkpoints are written every recover.freq_secs, unless recover.mode is disabled"
IN_BACKGROUND = "the files of a checkpoint are written while training continues, unless recover.snapshot says otherwise"
WHOLE_CHECKPOINTS = "checkpoints hold all that a run needs to resume, and are read as a whole"
OTHER_CHECKPOINTS = (
    "a run resumes from checkpoints that Fivefold has written: name one in recover.mode, or, to start from the "
    "weights of this one, convert them and name their folder in actor.path"
)
RECIPES_SCHEDULE = "a run that resumes takes the schedule of the learning rate from its recipe"
NOT_TRAINED = "layers for multi-token prediction are not trained: rollout.speculative drafts with them as they are"

# Values

LEADS_NOWHERE = "this interpolation leads to no plain value"


def experts_apart(role: str) -> str:
    """Return the note on experts that share an adapter in the source."""
    return (
        "with Megatron-Bridge, the experts of a GPU share an adapter; here each expert has its own, whose rank is that "
        f"number over the experts that a token visits ({role}.lora.rank_of_experts)"
    )
