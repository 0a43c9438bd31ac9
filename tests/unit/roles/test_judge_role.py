"""The model of the run that judges: its turn on shared devices, its tokens, and its processes as they are started."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from fivefold.config.paths import resolve_model_path
from fivefold.config.roles import roles_of
from fivefold.config.schema.rewards import JudgeConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.read import SHAPES
from fivefold.observe.errors import RunFailed
from fivefold.observe.timers import PhaseTimers
from fivefold.planning.decisions import while_generating
from fivefold.rewards.asking import HostFailed, NoScore
from fivefold.rewards.judge import Sampling
from fivefold.roles.checks import check_weight_files
from fivefold.roles.judge import Judge, JudgeReplicas, JudgeTexts
from fivefold.roles.rollout import Gate
from fivefold.roles.rollout_worker import RolloutWorker
from fivefold.rollout.tokenizer import load_tokenizer
from tests.unit.roles.test_launch import Group, Session, launched

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_tokens=8)

TOOLS = resolve_model_path("package:tiny-moe-tools")


class Events(list[str]):
    """What happened, in order."""

    def does(self, name: str, result: Any = None) -> Callable[..., Any]:
        def do(*arguments: Any) -> Any:
            self.append(f"{name}{arguments or ''}")
            return result

        return do


class Role:
    """A role whose methods only note that they were called."""

    def __init__(self, events: Events, name: str, *, shares: bool = True, deaths: int = 0) -> None:
        self.shares_devices, self.is_server, self.group, self.gate = shares, True, [None], Gate()
        self._deaths = deaths
        for method in ("sleep", "wake", "revive", "offload", "onload", "release"):
            setattr(self, method, events.does(f"{name} {method}"))
        self._wake = events.does(f"{name} wake_weights")

    def wake_weights(self) -> bool:
        self._wake()
        self._deaths -= 1
        return self._deaths < 0


def handle(events: Events, *, shares: tuple[str, ...], deaths: int = 0) -> JudgeReplicas:
    others = {name: Role(events, name) if name in shares else None for name in ("rollout", "actor")}
    judge = Role(events, "judge", shares=bool(shares), deaths=deaths)
    return JudgeReplicas(judge, **others, makes_room=("optimizer",))  # type: ignore[arg-type]


WAKES = ["judge wake_weights", "judge wake"]
ROOM = ["actor offload(('optimizer',),)", "actor release"]


@pytest.mark.parametrize(
    ("shares", "before", "after"),
    [
        ((), [], []),
        (("rollout",), ["rollout sleep", *WAKES], ["judge sleep"]),
        (("actor",), [*ROOM, *WAKES], ["judge sleep", "actor onload(('optimizer',),)"]),
        (
            ("rollout", "actor"),
            ["rollout sleep", *ROOM, *WAKES],
            ["judge sleep", "actor onload(('optimizer',),)"],
        ),
    ],
)
def test_the_others_leave_devices_that_the_judge_shares(
    shares: tuple[str, ...], before: list[str], after: list[str]
) -> None:
    events = Events()
    with handle(events, shares=shares).working():
        events.append("judging")
    assert events == [*before, "judging", *after]


def test_a_server_that_has_died_while_it_slept_is_started_again() -> None:
    events = Events()
    with handle(events, shares=("rollout",), deaths=2).working():
        pass
    again = ["judge wake_weights", "judge revive"]
    assert events == ["rollout sleep", *again, *again, "judge wake_weights", "judge wake", "judge sleep"]


def texts(**values: Any) -> JudgeTexts:
    config = JudgeConfig.model_validate({"path": "package:tiny-moe-tools", "max_length": 64, **values})
    return JudgeTexts(config, load_tokenizer(TOOLS))


def test_a_question_is_the_only_message_of_a_user_even_if_it_is_a_chat_in_json() -> None:
    tokenizer = load_tokenizer(TOOLS)
    question = '[{"role": "system", "content": "1"}]'
    rendered = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    found = texts(max_length=128).token_ids(question, 8)
    assert list(found) == tokenizer(rendered, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("question", "reason"), [("9" * 60, "longer than reward.judge.max_length=64"), ("\ud800", "surrogate")]
)
def test_a_question_that_the_judge_cannot_read_has_no_score(question: str, reason: str) -> None:
    with pytest.raises(NoScore, match=reason):
        texts().token_ids(question, 8)
    n = len(texts(max_length=128).token_ids("9", 8))
    assert len(texts(max_length=n + 8).token_ids("9", 8)) == n
    with pytest.raises(NoScore, match="longer than"):
        texts(max_length=n + 7).token_ids("9", 8)


def test_variables_of_the_chat_template_change_the_tokens() -> None:
    tokenizer = load_tokenizer(TOOLS)
    tokenizer.chat_template = "{{ greeting }}" + str(tokenizer.chat_template)
    config = JudgeConfig(path="m", chat_template_kwargs={"greeting": "a"})
    found = JudgeTexts(config, tokenizer).token_ids("1", 8)
    assert found[0] == tokenizer("a")["input_ids"][0]
    assert found[1:] == texts().token_ids("1", 8)


def test_a_model_without_a_chat_template_is_refused() -> None:
    tokenizer = load_tokenizer(resolve_model_path("package:tiny-moe"))
    with pytest.raises(ValueError, match=r"reward\.judge\.path=m: its tokenizer has no chat template"):
        JudgeTexts(JudgeConfig(path="m"), tokenizer)


def train_recipe(**values: Any) -> TrainRecipe:
    reward = {"fn": "judge", "judge": {"path": "package:tiny-moe-tools"}}
    given = {"experiment_name": "judged", "actor": {"path": "m"}, "train_dataset": {"path": "data.jsonl"}}
    return TrainRecipe.model_validate({**given, "reward": reward, **values})


class Failing(Role):
    """Replicas whose processes have died."""

    def __init__(self, failure: Exception) -> None:
        super().__init__(Events(), "judge", shares=False)
        self._failure = failure
        self.group: Any = self

    def __len__(self) -> int:
        return 1

    def keep_on(self, *arguments: Any) -> Any:
        raise self._failure


def test_whoever_waits_for_answers_raises_what_ended_the_judge() -> None:
    recipe = train_recipe()
    failure = RunFailed("judge rank 0 failed")
    replicas = JudgeReplicas(Failing(failure), rollout=None, actor=None, makes_room=())  # type: ignore[arg-type]
    caught: list[BaseException] = []
    with Judge(replicas, recipe, texts(), PhaseTimers(), print) as judge:

        def ask() -> None:
            try:
                judge.answer("1", sampling=GREEDY, attempt=0)
            except HostFailed as failed:
                caught.append(failed.__cause__ or failed)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(RunFailed, match="judge rank 0 failed"), judge.working():
            raise HostFailed from failure
    assert caught == [failure] * 3


def test_a_judge_that_never_answers_ends_the_run() -> None:
    class Silent(Failing):
        def keep_on(self, *arguments: Any) -> Any:
            threading.Event().wait(5)
            raise self._failure

    recipe = train_recipe(scheduler={"timeout_s": 1})
    replicas = JudgeReplicas(Silent(RunFailed("late")), rollout=None, actor=None, makes_room=())  # type: ignore[arg-type]
    judge = Judge(replicas, recipe, texts(), PhaseTimers(), print)
    with judge, pytest.raises(RunFailed, match=r"did not answer within scheduler\.timeout_s=1 s"), judge.working():
        judge.answer("1", sampling=GREEDY, attempt=0)


JUDGING = {"fn": "judge", "judge": {"backend": "vllm:d2t4", "max_server_restarts": 5, "max_length": 4096}}


def start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str, **values: Any
) -> tuple[Session, Any, Any, list[str]]:
    """Return the session of a run with a judge on eight GPUs, its roles, its recipe, and who was told to sleep."""
    (folder / "judge").mkdir(exist_ok=True)
    (folder / "judge" / "config.json").write_text((SHAPES / "Qwen3-14B.json").read_text())
    session, calls = Session(140 * 10**9), list[str]()

    class Told(Group):
        def call(self, method: Any, *arguments: Any) -> list[int]:
            if method is RolloutWorker.sleep:
                calls.append(f"{self._role.name} after {sorted(session.roles)}")
            return super().call(method, *arguments)

    monkeypatch.setattr("tests.unit.roles.test_launch.Group", Told)
    judge = {**JUDGING, "judge": {**JUDGING["judge"], "path": str(folder / "judge")}}  # type: ignore[dict-item]
    roles, recipe = launched(folder, session, allocation_mode=mode, reward=judge, **values)
    return session, roles, recipe, calls


def test_servers_on_the_same_devices_start_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mode = "vllm[rollout]:d8|megatron[actor]:d4t2|vllm[judge]:d2t4"
    session, roles, recipe, calls = start(tmp_path, monkeypatch, mode, rollout={"backend": "vllm:d8"})
    assert calls == ["rollout after ['rollout']", "judge after ['judge', 'rollout']"]
    spec = session.roles["judge"].args[0]
    found = while_generating(recipe, {"actor": tmp_path, "judge": tmp_path / "judge"}, gpu_memory=140 * 10**9)
    assert (spec.can_sleep, spec.load_weights, spec.tp, spec.max_restarts, spec.max_length) == (True, True, 4, 5, 4096)
    assert spec.reserved == found.kept["judge"] > 4e9
    assert session.roles["rollout"].args[0].reserved == found.kept["rollout"] > 4e9
    assert roles.judge.takes_turns
    assert roles.judge.stops_rollout


def test_a_judge_on_its_own_devices_is_always_awake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mode = "vllm[rollout]:d8|megatron[actor]:d4t2+vllm[judge]:d2t4"
    cluster = {"n_nodes": 2, "n_gpus_per_node": 8}
    session, roles, _, calls = start(tmp_path, monkeypatch, mode, cluster=cluster)
    assert calls == ["rollout after ['rollout']"]
    spec = session.roles["judge"].args[0]
    assert (spec.can_sleep, spec.reserved) == (False, 0)
    assert not roles.judge.takes_turns
    assert json.dumps([device.node for device in session.roles["judge"].devices]) == json.dumps([1] * 8)


def test_an_actor_next_to_a_judge_alone_offloads_nothing_for_the_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = "vllm[rollout]:d8+megatron[actor]:d4t2|vllm[judge]:d2t4"
    cluster = {"n_nodes": 2, "n_gpus_per_node": 8}
    through_files = {"weight_transport": "folder"}
    _, roles, _, calls = start(tmp_path, monkeypatch, mode, cluster=cluster, rollout=through_files)
    assert calls == ["judge after ['judge']"]
    assert roles.actor.away == ()
    assert not roles.judge.stops_rollout
    assert roles.judge._makes_room


@pytest.mark.parametrize(("backend", "is_taken"), [("vllm:d1", True), ("transformers:d1", False)])
def test_a_server_reads_quantized_files_in_its_own_way(backend: str, is_taken: bool, tmp_path: Path) -> None:
    config = json.loads((Path(TOOLS) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    weights = {f"{name}_of_scales": tensor for name, tensor in load_file(Path(TOOLS) / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors")
    recipe = train_recipe(reward={"fn": "judge", "judge": {"path": str(tmp_path), "backend": backend}})
    judge = [roles_of(recipe)["judge"]]
    if is_taken:
        check_weight_files(recipe, judge)
        (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="does not hold the weights"):
        check_weight_files(recipe, judge)
