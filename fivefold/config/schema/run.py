"""What the recipes of all commands share: length of the run, saving, resuming and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from fivefold.config.keys import known_keys
from fivefold.config.limits import LARGEST_SEED
from fivefold.config.schema.fields import (
    NAME,
    Duration,
    NonNegative,
    NonNegativeFloat,
    OneLine,
    Passes,
    PathText,
    Positive,
    Section,
)
from fivefold.config.schema.machines import ClusterConfig, SchedulerConfig
from fivefold.config.schema.rules import absent, differs, given, reads_if, rule

_WRITES = reads_if(differs("mode", "disabled"), warns=True)
"""Condition of keys that shape the checkpoints of a run."""


LOSSES = ("nll", "loss")
"""Measures that should fall."""


def should_fall(metric: str) -> bool:
    """Return whether a metric is better the smaller it is; `metric` may begin with `eval/` or the like."""
    return metric.rpartition("/")[2] in LOSSES


class PeriodicConfig(Section):
    """An action that is done now and then, and always after the last step.

    The frequencies do not exclude each other: the action is due as soon as one of them says so.
    """

    freq_steps: Annotated[Positive | None, _WRITES] = None
    """Number of steps from one time to the next; null: steps are not counted."""
    freq_epochs: Annotated[Passes | None, _WRITES] = None
    """Number of passes over the data set from one time to the next; null: passes are not counted."""
    freq_secs: Duration | None = None
    """Time since the start or the last time, in seconds or as `15m`, after which the end of a step is the next time;
    null: time is not measured."""


class EarlyStoppingConfig(Section):
    """Ends a run early, once the held-out data show that it no longer gains (docs/recovery.md)."""

    patience: Positive
    """Number of evaluations in a row, none of them the best one so far, after which the run ends."""
    metric: OneLine | None = None
    """What is compared, such as `accuracy`; null: the first measure that the summary has, which is the loss (`nll`) in
    `fivefold sft`, and else the accuracy. Losses should fall, and everything else should rise."""
    min_gain: NonNegativeFloat = 0.0
    """By how much an evaluation must exceed the best one so far to be the best one."""


class EvaluationsConfig(PeriodicConfig):
    """When the held-out data are evaluated, besides after the last step."""

    before_training: bool = True
    """Evaluate before the first step too."""
    early_stopping: EarlyStoppingConfig | None = None


class SaverConfig(PeriodicConfig):
    """When the weights are saved as a Hugging Face folder, besides after the last step."""

    max_to_keep: Positive | None = 1
    """1: each time replaces `weights/`. Otherwise, each time has its own folder, such as `weights/step-000010/`,
    and the newest ones are kept, this many; null: all are."""


class RecoverConfig(PeriodicConfig):
    """Checkpoints of the whole run, from which the same command resumes after an interruption (docs/recovery.md).

    A checkpoint is written after the last step too, and when the run is interrupted by Ctrl-C, SIGTERM or a terminal
    that closes.
    """

    mode: PathText = "auto"
    """`auto`: resume from the newest checkpoint in the run's folder, if there is one. `latest-good`: the same, from the
    one before if it is damaged, and so on; what came after it is deleted and computed again. `disabled`: write no
    checkpoints, and read none. Otherwise: the folder of a checkpoint, or of a run whose newest checkpoint is meant, to
    start from."""
    freq_secs: Annotated[Duration | None, _WRITES] = 900.0
    """Time since the start or the last checkpoint, in seconds or as `15m`, after which the end of a step is the next
    time; null: time is not measured."""
    max_to_keep: Annotated[Positive, _WRITES] = 2
    """Number of the newest checkpoints that are kept; older ones are deleted once a newer one is complete."""
    keep_best: Annotated[OneLine | None, _WRITES] = None
    """Name of a metric, such as `eval/accuracy`: the checkpoint with its best value is kept as well, which is the
    smallest one of a loss (`nll`, `eval/loss`), and else the largest; null: only the newest are kept."""
    verify: bool = True
    """Compare the checksum of every file before a run resumes from a checkpoint; false: compare only the sizes."""
    snapshot: Annotated[Literal["auto", "copy", "blocking"], _WRITES] = "auto"
    """`copy`: state is copied to host memory, in float32, and written from there while training continues. `blocking`:
    it is written while training waits, through little host memory. `auto`: copies, unless they do not fit into the host
    memory of the run's GPU machines, as `fivefold plan` counts it."""
    write_attempts: Annotated[int, Field(ge=1, le=100)] = 2
    """Number of attempts at writing a checkpoint, after which a run that cannot write one ends with an error."""
    save_before: Duration | None = None
    """Time since the start of the command, such as `3h55m`, before which the run writes a checkpoint and exits with
    code 130, for queues with a time limit; null: there is no limit."""
    accept_changes: list[OneLine] = []
    """Keys or sections of the recipe that may differ from the checkpoint's although they decide what the run is, such
    as `[train_dataset, seed]`."""

    @property
    def is_enabled(self) -> bool:
        """Whether the run writes checkpoints."""
        return self.mode != "disabled"


PackagedTracker = Literal["wandb", "mlflow", "swanlab", "trackio"]
"""Trackers with a separate package."""
TrackerName = Literal["tensorboard", PackagedTracker]


class StatsConfig(Section):
    """Records of every step, besides its metrics. Only `fivefold train` records completions."""

    trackers: list[TrackerName] = ["tensorboard"]
    """Where every step's metrics go besides `metrics.jsonl`. `tensorboard`: events in the run's folder. `wandb`,
    `mlflow`, `swanlab`, `trackio`: the tracker of this name, whose package must be installed (docs/observing.md)."""
    n_logged_samples: NonNegative | Literal["all"] = 4
    """Completions of each step that are written to `samples.jsonl` and `samples/`; `all`: every one."""
    logged_tokens: bool = True
    """Write, for these completions, each token with its log-probs and its advantage to `samples/` too. For that the
    driver reads the columns of the replicas that generated them."""
    shown_samples_freq_steps: Positive | None = 10
    """Steps after which the best and the worst completion of a step are shown on the screen, as after the first step.
    None: none are shown."""

    @rule
    def _trackers(self) -> Iterator[str]:
        for name in dict.fromkeys(self.trackers):
            if self.trackers.count(name) > 1:
                yield f"trackers has {name} twice: name each tracker once"


class ProfileConfig(Section):
    """Traces of what the processes that train compute, for a few steps (docs/observing.md)."""

    steps: list[Positive] = []
    """Steps whose training is recorded, such as `[3, 4]`; the first ones compile and allocate."""
    ranks: Annotated[list[NonNegative], reads_if(given("steps"), warns=True)] = [0]
    """Ranks of the actor, and of the critic, that record."""
    memory: Annotated[bool, reads_if(given("steps"), warns=True)] = True
    """On GPUs, record every allocation too."""


class RunConfig(Section):
    """The keys of every kind of recipe."""

    experiment_name: Annotated[str, Field(pattern=NAME)]
    """Name of the experiment: the outer folder of its runs' outputs."""
    trial_name: Annotated[str, Field(pattern=NAME)] = "trial-0"
    """Name of this run: the inner folder of its outputs."""
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 1
    """Seed of all random choices: the order of rows, sampling, random weights."""
    cluster: ClusterConfig = ClusterConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    tokenizer_path: PathText | None = None
    """Folder or hub name of the tokenizer; null: `actor.path`."""
    trust_remote_code: bool = False
    """Run the Python code that a tokenizer's folder has (Moonlight, Kimi-K2), in every process that reads or writes
    text. It may do anything that the run may: read the code first."""
    chat_template: Annotated[str | None, Field(min_length=1)] = None
    """File with a chat template in Jinja, or the template itself, in place of the tokenizer's own; null: its own."""
    chat_template_kwargs: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], Any] = {}
    """Variables of the chat template, by name, in all chats of the run: `{enable_thinking: false}`."""
    total_train_epochs: Annotated[Positive, reads_if(absent("total_train_steps"), warns=True)] = 1
    """Number of passes over the data set."""
    total_train_steps: Positive | None = None
    """Number of training steps; null: as many as `total_train_epochs` take."""
    stats: StatsConfig = StatsConfig()
    saver: SaverConfig = SaverConfig()
    recover: RecoverConfig = RecoverConfig()
    profile: ProfileConfig = ProfileConfig()

    def n_steps(self, steps_per_epoch: int) -> int:
        """Return the number of training steps, with so many in a pass over the data set."""
        return self.total_train_steps or self.total_train_epochs * steps_per_epoch

    @rule
    def _accepted_changes(self) -> Iterator[str]:
        known = set(known_keys(type(self))) if self.recover.accept_changes else set()
        for key in self.recover.accept_changes:
            if key not in known:
                yield (
                    f"recover.accept_changes has {key!r}, which is no key of this recipe: name a key such as "
                    "train_dataset.path, or a section such as train_dataset"
                )
