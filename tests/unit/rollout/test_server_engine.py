"""The engine over a server, against a server that answers by a formula and logs its requests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import fivefold
from fivefold.rollout.contract import complete
from fivefold.rollout.engines import DIALECTS
from fivefold.rollout.protocol import GenerationRequest
from fivefold.rollout.servers import memory_share
from fivefold.rollout.servers.command import check_command, server_command
from fivefold.weights.table import TRANSPORTS
from fivefold.weights.transport import Route
from tests.unit.rollout import fake_server
from tests.unit.rollout.conftest import BATCH_SIZE, spec_of
from tests.unit.rollout.fake_server import LONG_TOKENS, Log, answer_to, write_python
from tests.unit.rollout.served import GENERATE, PROMPT, Served, forget, lose, requests_of, sampling, start

END, POSITIONS = 2, 128
DEAD = f"the server ended with status {fake_server.STATUS_IN_REQUEST}"

Folder = Callable[..., Path]

COMMANDS = {
    "vllm": "-m vllm.entrypoints.openai.api_server --model {model} --tokenizer {tokenizer} "
    "--uds {address} --dtype bfloat16 --seed 5 "
    "--tensor-parallel-size {tp} --pipeline-parallel-size {pp} --max-num-seqs 6 --max-model-len {length} "
    "--generation-config vllm --logprobs-mode processed_logprobs --middleware fivefold_generate.Generate "
    "--disable-log-stats --disable-uvicorn-access-log --uvicorn-log-level warning "
    "--worker-extension-cls fivefold_weights.WorkerWeights --scheduler-cls fivefold_scheduler.scheduler",
    "sglang": "-m fivefold_sglang --model-path {model} --tokenizer-path {tokenizer} "
    "--host 127.0.0.1 --port {address} --dtype bfloat16 --random-seed 5 "
    "--tp-size {tp} --pp-size {pp} --max-running-requests 6 --context-length {context} "
    "--log-level warning",
}
DUMMY_SLEEPER = {
    "vllm": "--load-format dummy --enable-sleep-mode --gpu-memory-utilization 0.4",
    "sglang": "--load-format dummy --enable-memory-saver --sleep-on-idle --mem-fraction-static 0.4",
}
LOAD = {
    "vllm": ["/collective_rpc", "/collective_rpc", "/reset_prefix_cache"],
    "sglang": ["/update_weights_from_disk"],
}
REFUSED = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}
PAUSES = {"vllm": ("/pause?mode=abort", "/resume"), "sglang": ("/pause_generation", "/continue_generation")}
SLEEP = {"vllm": "/sleep?level=2", "sglang": "/release_memory_occupation"}
WAKE_WEIGHTS = {"vllm": "/wake_up?tags=weights", "sglang": "/resume_memory_occupation"}
WAKE_CACHE = {"vllm": "/wake_up?tags=kv_cache", "sglang": "/resume_memory_occupation"}
SEED = {"vllm": "seed", "sglang": "sampling_seed"}


ONE_SERVER = pytest.mark.parametrize("server", ["sglang"], indirect=True)
"""Marks tests of behaviour that does not depend on the kind of server."""


@pytest.mark.parametrize(
    ("devices", "chosen", "wanted"), [("0,1", None, "1"), ("", None, "0"), (None, None, "0"), ("0", "0", "0")]
)
def test_vllm_has_its_second_model_runner_on_gpus_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: str | None, chosen: str | None, wanted: str
) -> None:
    for name, value in (("CUDA_VISIBLE_DEVICES", devices), ("VLLM_USE_V2_MODEL_RUNNER", chosen)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert DIALECTS["vllm"].environment(spec_of("vllm", tmp_path))["VLLM_USE_V2_MODEL_RUNNER"] == wanted


@pytest.mark.parametrize(("chosen", "wanted"), [(None, "fork"), ("spawn", "spawn")])
def test_vllms_processes_are_forked_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, wanted: str
) -> None:
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    if chosen is not None:
        monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", chosen)
    assert DIALECTS["vllm"].environment(spec_of("vllm", tmp_path))["VLLM_WORKER_MULTIPROC_METHOD"] == wanted


@pytest.mark.parametrize(
    ("transport", "chosen", "wanted"), [("nccl", None, "-2"), ("nccl", "0", "0"), ("ipc", None, None)]
)
def test_sglang_shares_memory_over_nccl_as_the_trainer_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, chosen: str | None, wanted: str | None
) -> None:
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    if chosen is not None:
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", chosen)
    spec = replace(spec_of("sglang", tmp_path), route=Route(TRANSPORTS[transport], "bfloat16", False))
    assert DIALECTS["sglang"].environment(spec).get("NCCL_CUMEM_ENABLE") == wanted


@pytest.fixture
def served(server: Served) -> Served:
    """The server with weights of version 7."""
    server.engine.wake()
    server.update(7)
    return server


def assert_answered(served: Served, requests: Sequence[GenerationRequest], version: int) -> None:
    completions = complete(served.engine, requests, sampling())
    for request, completion in zip(requests, completions, strict=True):
        token_ids, logprobs, reason = answer_to(request.token_ids, request.seed, 12)
        assert (completion.token_ids.tolist(), completion.logprobs.tolist()) == ([*token_ids], [*logprobs])
        assert completion.finish_reason == reason
        assert completion.versions.tolist() == [version] * len(token_ids)


@pytest.mark.parametrize("backend", COMMANDS)
def test_the_command_line_follows_from_the_replica(backend: str) -> None:
    spec = spec_of(backend, Path("/models/a"), tokenizer_path="/models/b", python="/opt/python", tp=2, pp=3)
    models = {"model": "/models/a", "tokenizer": "/models/b"}
    words = COMMANDS[backend].format(**models, address=81, tp=2, pp=3, length=60, context=66)
    assert server_command(DIALECTS[backend], spec, 81) == [
        "/opt/python",
        *words.split(),
        *DUMMY_SLEEPER[backend].split(),
    ]
    plain = replace(spec, load_weights=True, can_sleep=False, memory_fraction=None, arguments=("--x", "--y=1"))
    assert server_command(DIALECTS[backend], plain, 81) == ["/opt/python", *words.split(), "--x", "--y=1"]


def test_vllm_quantizes_as_the_recipe_says() -> None:
    spec = spec_of("vllm", Path("/models/a"), python="/opt/python", quantization="fp8_per_block")
    command = server_command(DIALECTS["vllm"], spec, 81)
    assert command[command.index("--quantization") + 1] == "fp8_per_block"


@pytest.mark.parametrize("argument", ["--uds=/tmp/socket", "--host=0.0.0.0", "--port", "--middleware"])
def test_the_recipe_cannot_say_where_vllm_listens_or_how_it_answers(argument: str, tmp_path: Path) -> None:
    spec = spec_of("vllm", Path("/models/a"), python=write_python(tmp_path), arguments=("--enforce-eager", argument))
    with pytest.raises(ValueError, match=rf"rollout\.server_args has {argument.split('=')[0]}, which follows"):
        check_command(DIALECTS["vllm"], spec)


@pytest.mark.parametrize(
    ("backend", "argument"),
    [
        ("vllm", "--data-parallel-size=2"),
        ("vllm", "-dp=2"),
        ("sglang", "--dp-size"),
        ("sglang", "--enable_dp_attention"),
    ],
)
def test_a_replica_gets_no_copies_of_the_attention(backend: str, argument: str, tmp_path: Path) -> None:
    own = ("--ep-size=2",) if backend == "sglang" else ("--enable-expert-parallel",)
    spec = spec_of(backend, Path("/models/a"), python=write_python(tmp_path), arguments=own)
    check_command(DIALECTS[backend], spec)
    with pytest.raises(ValueError, match=rf"a replica has no copies of attention.*{backend}:d2t4"):
        check_command(DIALECTS[backend], replace(spec, arguments=(*own, argument, "2")))


def test_the_server_is_started_as_its_command_line_says(server: Served) -> None:
    [row] = server.log.rows("start")
    flag = {"vllm": "--uds", "sglang": "--port"}[server.backend]
    address = row["command"][row["command"].index(flag) + 1]
    words = COMMANDS[server.backend].format(
        model=server.spec.path, tokenizer=server.spec.path, address=address, tp=1, pp=1, length=60, context=66
    )
    assert row["command"] == [*words.split(), *DUMMY_SLEEPER[server.backend].split()]


@pytest.mark.parametrize("backend", COMMANDS)
def test_a_server_gets_no_variables_of_a_rank_and_serves_from_the_checkpoint(
    backend: str, model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
    for name in ranks:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    options = {"load_weights": True, "max_length": 1000}
    spec = spec_of(backend, model_folder("qwen3_moe"), python=write_python(tmp_path), **options)
    engine = start(spec)
    [completion] = complete(engine, requests_of(1), sampling())
    engine.close()
    assert set(completion.versions.tolist()) == {0}
    [row] = Log(tmp_path).rows("start")
    assert not row["environment"].keys() & set(ranks)
    assert row["environment"]["CUDA_VISIBLE_DEVICES"] == "2,3"
    flag, length = {"vllm": ("--max-model-len", POSITIONS), "sglang": ("--context-length", POSITIONS + 6)}[backend]
    assert row["command"][row["command"].index(flag) + 1] == str(length)


@pytest.mark.parametrize("backend", COMMANDS)
def test_models_of_the_package_reach_the_server_as_folders(backend: str, tmp_path: Path) -> None:
    name = "package:tiny-moe"
    spec = spec_of(backend, tmp_path, path=name, tokenizer_path=name, python=write_python(tmp_path))
    start(spec).close()
    [row] = Log(tmp_path).rows("start")
    assert row["command"].count(str(Path(fivefold.__file__).parent / "models" / "tiny-moe")) == 2


def test_a_server_that_ends_at_its_start_is_an_error(model_folder: Folder, tmp_path: Path) -> None:
    python = write_python(tmp_path, **{fake_server.DIES_IN: "start"})
    with pytest.raises(RuntimeError, match=f"the server ended with status {fake_server.STATUS_AT_START}"):
        start(spec_of("sglang", model_folder("qwen3_moe"), python=python))


def test_a_server_that_dies_in_a_request_is_an_error(model_folder: Folder, tmp_path: Path) -> None:
    spec = spec_of("sglang", model_folder("qwen3_moe"), python=write_python(tmp_path), load_weights=True)
    engine = start(spec)
    requests = [*requests_of(10), *requests_of(1, fake_server.DEADLY), *requests_of(10)]
    with pytest.raises(RuntimeError, match=DEAD):
        complete(engine, requests, sampling())
    with pytest.raises(RuntimeError, match=DEAD):
        complete(engine, requests_of(1), sampling())
    engine.close()


def test_a_server_that_dies_loses_its_requests_and_is_started_again(model_folder: Folder, tmp_path: Path) -> None:
    model = model_folder("qwen3_moe")
    spec = spec_of("sglang", model, python=write_python(tmp_path), can_sleep=False, max_restarts=1)
    engine = start(spec)
    served = Served(spec, engine, tmp_path, load_file(model / "model.safetensors"))
    served.update(1)
    requests = [*requests_of(10), *requests_of(1, fake_server.DEADLY), *requests_of(30)]
    for number, request in enumerate(requests):
        engine.submit(number, request, sampling())
    done: dict[int, object] = {}
    while engine.has_weights:
        done |= dict(engine.collect(0.1))
    lost = engine.take_lost()
    assert 10 in lost
    assert done.keys() | lost.keys() == set(range(len(requests)))
    served.update(1)
    for number in lost.keys() - {10}:
        engine.submit(number, lost[number], sampling())
    while engine.n_running:
        done |= dict(engine.collect(0.1))
    assert len(done) == len(requests) - 1
    assert len(served.log.rows("start")) == 2
    # It may die as often as the recipe says.
    with pytest.raises(RuntimeError, match=DEAD):
        complete(engine, [lost[10]], sampling())
    engine.close()


@pytest.mark.parametrize("backend", COMMANDS)
def test_a_server_of_its_own_weights_answers_again_once_it_was_started_again(
    backend: str, model_folder: Folder, tmp_path: Path
) -> None:
    python = write_python(tmp_path, **{fake_server.DIES_IN: GENERATE[backend], fake_server.DIES_ONCE: "1"})
    options = {"load_weights": True, "can_sleep": False, "max_restarts": 1, "keeps_cache": backend == "vllm"}
    engine = start(spec_of(backend, model_folder("qwen3_moe"), python=python, **options))
    [request] = requests_of(1)
    assert lose(engine, {0: request}).keys() == {0}
    assert engine.has_weights
    [completion] = complete(engine, [request], sampling())
    assert set(completion.versions.tolist()) == {0}
    assert len(Log(tmp_path).rows("start")) == 2
    engine.close()


def test_a_server_that_dies_while_it_loads_is_an_error(model_folder: Folder, tmp_path: Path) -> None:
    model = model_folder("qwen3_moe")
    python = write_python(tmp_path, **{fake_server.DIES_IN: REFUSED["sglang"]})
    engine = start(spec_of("sglang", model, python=python))
    with pytest.raises(RuntimeError, match=DEAD):
        engine.update_weights(load_file(model / "model.safetensors").items(), 0)
    engine.close()


@pytest.mark.parametrize(("backend", "share"), [("vllm", 0.9), ("sglang", 0.88)])
def test_a_server_that_shares_devices_takes_the_memory_that_others_leave(
    backend: str, share: float, model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_share, "least_gpu_memory", lambda: 80_000)
    options = {"python": write_python(tmp_path), "memory_fraction": None, "reserved": 20_000}
    spec = spec_of(backend, model_folder("qwen3_moe"), **options)
    start(spec).close()
    [row] = Log(tmp_path).rows("start")
    assert float(row["command"][-1]) == pytest.approx(share - 20_000 / 80_000)
    start(replace(spec, can_sleep=False)).close()
    alone = Log(tmp_path).rows("start")[1]["command"]
    assert not {"--gpu-memory-utilization", "--mem-fraction-static"} & set(alone)
    with pytest.raises(ValueError, match=r"leaves nothing for the server: .*rollout\.colocate=false"):
        start(replace(spec, reserved=75_000))


@pytest.mark.parametrize("greedy", [False, True])
def test_a_request_has_every_option_of_sampling(served: Served, greedy: bool) -> None:
    params = sampling(
        max_new_tokens=9, min_new_tokens=4, temperature=0.7, top_p=0.9, top_k=11, greedy=greedy,
        stop_token_ids=[33, 9], stop=["ab", "\n"],
        min_p=0.25, repetition_penalty=1.2, logit_bias={"7": -2.0}, bad_token_ids=[8],
    )  # fmt: skip
    complete(served.engine, [GenerationRequest((5, 6), 77)], params)
    chosen = {"temperature": 0.7, "top_p": 0.9, "top_k": 11, "min_p": 0.25}
    chosen = {"temperature": 0.0, "top_p": 1.0} if greedy else chosen
    chosen = {**chosen, "repetition_penalty": 1.2, "logit_bias": {"7": -2.0, "8": -1e9}}
    common = {"stop_token_ids": [END, 9, 33], "stop": ["ab", "\n"], "skip_special_tokens": False, **chosen}
    expected = {
        "vllm": {
            "token_ids": [5, 6],
            "sampling_params": {
                "top_k": 0, "max_tokens": 9, "min_tokens": 4, "seed": 77,
                "include_stop_str_in_output": True, "detokenize": True, "logprobs": 0, **common,
            },
        },
        "sglang": {
            "input_ids": [5, 6],
            "return_logprob": True,
            "sampling_params": {
                "top_k": -1, "max_new_tokens": 9, "min_new_tokens": 4, "sampling_seed": 77,
                "no_stop_trim": True, **common,
            },
        },
    }  # fmt: skip
    assert served.bodies()[-1] == expected[served.backend]


def test_a_request_without_options_samples_from_the_whole_distribution(served: Served) -> None:
    complete(served.engine, [GenerationRequest((5, 6), 77)], sampling())
    asked = served.bodies()[-1]["sampling_params"]
    assert (asked["temperature"], asked["top_p"]) == (1.0, 1.0)
    assert asked["top_k"] == {"vllm": 0, "sglang": -1}[served.backend]
    assert (asked["stop"], asked["stop_token_ids"]) == ([], [END])
    assert asked.get("detokenize", False) is False


def test_seeds_of_requests_fit_signed_integers(served: Served) -> None:
    seeds = [0, 2**31 - 1, 2**31 + 3, 2**63 - 1, 2**64 - 1]
    complete(served.engine, [GenerationRequest((5,), seed) for seed in seeds], sampling())
    asked = sorted(body["sampling_params"][SEED[served.backend]] for body in served.bodies()[-len(seeds) :])
    assert asked == sorted(seed % 2**63 for seed in seeds)


@pytest.mark.parametrize("backend", COMMANDS)
def test_the_servers_own_seed_fits_every_library(backend: str) -> None:
    command = server_command(DIALECTS[backend], spec_of(backend, Path("/models/a"), seed=2**40 + 3), 81)
    flag = {"vllm": "--seed", "sglang": "--random-seed"}[backend]
    assert 0 <= int(command[command.index(flag) + 1]) < 2**31


def test_a_request_without_a_seed_draws_from_the_servers_random_numbers(served: Served) -> None:
    """The server of the test then takes the seed `LONG_TOKENS`."""
    requests = [GenerationRequest((5, 6, number), 99) for number in (7, 8) for _ in range(4)]
    before = len(served.bodies())
    completions = complete(served.engine, requests, replace(sampling(), seeded=False))
    bodies = served.bodies()[before:]
    asked = [body[PROMPT[served.backend]] for body in bodies]
    assert sorted(asked) == [[5, 6, number] for number in (7, 8) for _ in range(4)]
    assert all(SEED[served.backend] not in body["sampling_params"] for body in bodies)
    for completion, request in zip(completions, requests, strict=True):
        token_ids, logprobs, reason = answer_to(request.token_ids, LONG_TOKENS, 12)
        assert (completion.token_ids.tolist(), completion.logprobs.tolist()) == ([*token_ids], [*logprobs])
        assert completion.finish_reason == reason


def test_log_probs_that_are_not_asked_for_are_not_a_number(served: Served) -> None:
    requests = [GenerationRequest((5, 6, 7), 3, wants_logprobs=wants) for wants in (True, False)]
    asked, not_asked = complete(served.engine, requests, sampling())
    assert asked.token_ids.tolist() == not_asked.token_ids.tolist()
    assert not np.isnan(asked.logprobs).any()
    assert np.isnan(not_asked.logprobs).all()
    bodies = served.bodies()[-2:]
    if served.backend == "vllm":
        assert sorted("logprobs" in body["sampling_params"] for body in bodies) == [False, True]
    else:
        assert sorted(body["return_logprob"] for body in bodies) == [False, True]


@ONE_SERVER
def test_a_completion_whose_last_token_ends_it_has_stopped_also_at_the_limit(served: Served) -> None:
    """SGLang compares the number of tokens first, and does not look at the last one that a completion may have."""
    requests = [GenerationRequest((5, 6, 7), 11), GenerationRequest((5, 6, 8), 11)]
    ends = [answer_to(request.token_ids, request.seed, 12)[0][-1] for request in requests]
    assert ends[0] != ends[1]
    completions = complete(served.engine, requests, sampling(stop_token_ids=ends[:1]))
    assert [len(completion.token_ids) for completion in completions] == [12, 12]
    assert [completion.finish_reason for completion in completions] == ["stop", "length"]


@pytest.mark.parametrize(("needs_text", "skips"), [(True, False), (False, True)])
def test_sglang_needs_no_tokenizer_where_no_text_is_looked_at(needs_text: bool, skips: bool) -> None:
    command = server_command(DIALECTS["sglang"], spec_of("sglang", Path("/models/a"), needs_text=needs_text), 81)
    assert ("--skip-tokenizer-init" in command) == skips


@pytest.mark.parametrize("backend", sorted(DIALECTS))
@pytest.mark.parametrize("trusts", [True, False])
def test_a_server_runs_a_tokenizers_code_only_if_the_recipe_trusts_it(backend: str, trusts: bool) -> None:
    command = server_command(DIALECTS[backend], spec_of(backend, Path("/models/a"), trust_remote_code=trusts), 81)
    assert ("--trust-remote-code" in command) == trusts


@ONE_SERVER
def test_completions_are_in_the_order_of_the_requests(served: Served) -> None:
    requests = [request for i in range(4) for request in (*requests_of(1, fake_server.LATE), *requests_of(2 + i))]
    assert_answered(served, requests, version=7)
    path, prompt = GENERATE[served.backend], PROMPT[served.backend]
    replies = [row["body"][prompt][0] for row in served.log.rows("reply") if row["path"] == path]
    assert replies[-len(requests)] != fake_server.LATE, "the first request was answered first"


@ONE_SERVER
def test_as_many_requests_reach_the_server_as_it_decodes_together(served: Served) -> None:
    """The server answers `BATCH_SIZE` requests together, and none before as many have come."""
    assert_answered(served, requests_of(20 * BATCH_SIZE, fake_server.TOGETHER), version=7)
    assert served.log.rows("reply")[-1]["most_here"] == BATCH_SIZE


@ONE_SERVER
@pytest.mark.parametrize("n_prompt_tokens", [2, 48, 59])
def test_a_prompt_and_its_completion_may_have_all_of_the_length(served: Served, n_prompt_tokens: int) -> None:
    n_new = served.spec.max_length - n_prompt_tokens
    prompt = tuple(range(3, 3 + n_prompt_tokens))
    request = GenerationRequest(prompt, n_new - 1)
    [completion] = complete(served.engine, [request], sampling(max_new_tokens=n_new))
    assert (len(completion.token_ids), completion.finish_reason) == (n_new, "length")


def test_no_requests_have_no_completions(served: Served) -> None:
    assert complete(served.engine, [], sampling()) == []


def test_a_completion_that_is_aborted_at_once_is_an_error_and_one_that_has_tokens_continues(served: Served) -> None:
    aborted, at_once = (requests_of(1, token) for token in (fake_server.ABORTED, fake_server.ABORTED_AT_ONCE))
    with pytest.raises(RuntimeError, match="'abort'"):
        complete(served.engine, [*requests_of(3), *at_once, *requests_of(3)], sampling())
    forget(served.engine)
    [completion] = complete(served.engine, aborted, sampling())
    assert (len(completion.token_ids), completion.finish_reason) == (12, "length")
    assert_answered(served, requests_of(3), version=7)


@pytest.mark.parametrize("first_token", [fake_server.NOT_FINITE, fake_server.CUT_SHORT])
def test_a_token_without_a_log_prob_is_an_error(served: Served, first_token: int) -> None:
    with pytest.raises(RuntimeError, match=r"answered \d+ tokens with \d+ log-probs: every token needs a number"):
        complete(served.engine, [*requests_of(3), *requests_of(1, first_token)], sampling())
    forget(served.engine)


@ONE_SERVER
def test_a_request_that_the_model_cannot_answer_does_not_reach_the_server(served: Served) -> None:
    before = len(served.bodies())
    with pytest.raises(ValueError, match="token 67, but the model's vocabulary has 67"):
        complete(served.engine, [*requests_of(1), GenerationRequest((3, 67), 0)], sampling())
    forget(served.engine)
    assert len(served.bodies()) == before


def checksum(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@ONE_SERVER
def test_an_update_writes_every_tensor_once_in_the_servers_dtype(served: Served) -> None:
    row = served.log.rows("load")[-1]
    expected = [
        {"name": name, "dtype": "BF16", "shape": list(tensor.shape), "sha256": checksum(tensor.bfloat16())}
        for name, tensor in served.weights.items()
    ]
    assert all(tensor.dtype == torch.float32 for tensor in served.weights.values())
    assert sorted(row["tensors"], key=lambda tensor: tensor["name"]) == sorted(expected, key=lambda t: str(t["name"]))
    assert row["dtype"] == "bfloat16"
    assert {"config.json", "tokenizer.json"} <= set(row["files"])
    assert not Path(row["folder"]).exists()
    assert served.left_behind() == []


def test_a_server_is_told_to_load_the_folder(served: Served) -> None:
    # Requests that an earlier test has left unanswered are interrupted for the load.
    pause, resume = PAUSES[served.backend]
    load = LOAD[served.backend]
    expected = [pause, *load, resume] if served.engine.n_running else load
    assert served.posts_during(lambda: served.update(8)) == expected
    [*_, body] = [row["body"] for row in served.log.rows("request") if row["path"] == REFUSED[served.backend]]
    folder = served.log.rows("load")[-1]["folder"]
    assert (
        body
        == {
            "vllm": {"method": "reload_weights", "kwargs": {"weights_path": folder}},
            "sglang": {"model_path": folder, "weight_version": "8", "load_format": "safetensors", "flush_cache": True},
        }[served.backend]
    )
    assert_answered(served, requests_of(3), version=8)


def test_an_engine_waits_for_its_first_weights(model_folder: Folder, tmp_path: Path) -> None:
    engine = start(spec_of("sglang", model_folder("qwen3_moe"), python=write_python(tmp_path)))
    with pytest.raises(RuntimeError, match="no complete set of weights: none were loaded"):
        complete(engine, requests_of(1), sampling())
    engine.close()
    assert Log(tmp_path).posts() == []


def test_a_server_that_refuses_the_weights_is_an_error(served: Served) -> None:
    status, refusal = 400, served.folder / fake_server.REFUSAL
    refusal.write_text(str(status))
    with pytest.raises(
        RuntimeError, match=rf"refused {REFUSED[served.backend]} with status {status}: .*no such weights"
    ):
        served.update(8)
    refusal.unlink()
    assert served.left_behind() == []
    with pytest.raises(RuntimeError, match="the last update failed"):
        complete(served.engine, requests_of(1), sampling())
    served.update(9)
    assert_answered(served, requests_of(2), version=9)


@ONE_SERVER
def test_a_set_of_weights_that_does_not_fit_does_not_reach_the_server(served: Served) -> None:
    expert = "model.layers.1.mlp.experts.2.up_proj.weight"
    consumed: list[str] = []

    def wrong() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in served.weights.items():
            if name == "lm_head.weight":
                yield "lm_head.bias", tensor
            elif name == "model.norm.weight":
                yield name, tensor[:-1]
            elif name != expert:
                yield name, tensor
            if name == "model.embed_tokens.weight":
                yield name, tensor
            consumed.append(name)

    def update() -> None:
        with pytest.raises(ValueError, match="do not fit") as caught:
            served.engine.update_weights(wrong(), version=8)
        for problem in [
            f"missing: {expert}, lm_head.weight",
            "unknown: lm_head.bias",
            "sent twice: model.embed_tokens.weight",
            "wrong shape: model.norm.weight (31,), wanted (32,)",
        ]:
            assert problem in str(caught.value)

    assert served.posts_during(update) == []
    assert len(consumed) == len(served.weights), "other ranks wait in the collectives behind the iterator"
    assert served.left_behind() == []
    with pytest.raises(RuntimeError, match="the last update failed"):
        complete(served.engine, requests_of(1), sampling())


def test_a_server_sleeps_wakes_and_is_given_weights(served: Served) -> None:
    engine = served.engine
    assert served.posts_during(engine.sleep) == [SLEEP[served.backend]]
    for refused in (lambda: complete(engine, requests_of(1), sampling()), lambda: served.update(8)):
        with pytest.raises(RuntimeError, match=r"asleep: call wake\(\) and update_weights\(\) first"):
            refused()
    assert served.posts_during(engine.wake) == [WAKE_WEIGHTS[served.backend], WAKE_CACHE[served.backend]]
    with pytest.raises(RuntimeError, match="it has slept since"):
        complete(engine, requests_of(1), sampling())
    assert served.posts_during(lambda: served.update(8)) == LOAD[served.backend]
    assert_answered(served, requests_of(2), version=8)


def test_weights_come_before_the_cache_takes_its_memory(served: Served) -> None:
    engine = served.engine
    engine.sleep()
    assert served.posts_during(engine.wake_weights) == [WAKE_WEIGHTS[served.backend]]
    assert served.posts_during(lambda: served.update(9)) == LOAD[served.backend]
    with pytest.raises(RuntimeError, match=r"memory for its weights alone: call wake\(\) first"):
        complete(engine, requests_of(1), sampling())
    assert served.posts_during(engine.wake) == [WAKE_CACHE[served.backend]]
    assert_answered(served, requests_of(2), version=9)
    # A server that has only its weights' memory takes the rest before it gives all of it back.
    engine.sleep()
    engine.wake_weights()
    engine.sleep()
    engine.wake()


def test_a_server_that_cannot_sleep_is_not_asked_to(model_folder: Folder, tmp_path: Path) -> None:
    options = {"can_sleep": False, "memory_fraction": None}
    engine = start(spec_of("sglang", model_folder("qwen3_moe"), python=write_python(tmp_path), **options))
    engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        complete(engine, requests_of(1), sampling())
    engine.wake()
    with pytest.raises(RuntimeError, match="it has slept since"):
        complete(engine, requests_of(1), sampling())
    engine.close()
    assert Log(tmp_path).posts() == []


def test_sleeping_and_waking_twice_asks_the_server_once(served: Served) -> None:
    engine = served.engine
    posts = served.posts_during(
        lambda: [
            engine.wake(), engine.wake_weights(), engine.sleep(), engine.sleep(), engine.wake_weights(),
            engine.wake_weights(), engine.wake(), engine.wake(),
        ]
    )  # fmt: skip
    assert posts == [SLEEP[served.backend], WAKE_WEIGHTS[served.backend], WAKE_CACHE[served.backend]]
