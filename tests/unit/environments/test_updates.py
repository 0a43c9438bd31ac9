"""New weights while an agent waits for an answer: its call comes back whole, with the version of each token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.environments.agents import agent as agent_module
from fivefold.environments.agents.agent import Agent
from fivefold.environments.environment import Task
from fivefold.environments.play import Player
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.rollout.tokenizer import load_tokenizer
from fivefold.rollout.transformers_engine import TransformersEngine
from fivefold.types import Prompt
from tests.unit.environments.test_agents import post

MODEL, N_TOKENS = "fivefold/models/tiny-moe", 24


def test_a_call_goes_on_over_updates_and_the_agent_sees_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransformersEngine.from_path(
        MODEL, dtype="float32", device="cpu", max_batch_size=2, tokenizer_path=None, load_weights=True
    )
    engine.update_weights(list(engine.weights()), 1)
    tokenizer, replies = load_tokenizer(MODEL), []

    def agent(base_url: str, prompt: str) -> float:
        for _ in range(2):
            reply = post(base_url, "completions", prompt=prompt)
            replies.append(reply)
            prompt += reply["choices"][0]["text"] + "+1="
        return 1.0

    monkeypatch.setattr(agent_module, "load_agent", lambda _: agent)
    config = EnvironmentConfig(agent="tests.unit.environments.test_agents:unused", max_length=200, timeout_s=60.0)
    player = Player(engine, Agent(config, tokenizer))
    prompt = Prompt(0, "12+30=", tuple(tokenizer("12+30=").input_ids), "")
    sampling = SamplingParams(N_TOKENS, N_TOKENS, False, 1.0, 1.0, 0, (), ())
    player.begin(0, [Task(prompt, GenerationRequest(prompt.token_ids, 5), sampling)])
    version, done = 1, dict[int, list[Any]]()
    while not done:
        done = dict(player.advance(0.005))
        if engine.n_running:
            version += 1
            engine.update_weights(list(engine.weights()), version)
    [episode] = done[0]
    [sequence] = episode.trajectories
    assert [reply["usage"]["completion_tokens"] for reply in replies] == [N_TOKENS, N_TOKENS]
    assert (episode.n_turns, episode.finish_reason, int(sequence.mask_T.sum())) == (2, "done", 2 * N_TOKENS)
    versions = sequence.versions_T[sequence.mask_T]
    assert (np.diff(versions) >= 0).all()
    assert len(set(versions[:N_TOKENS].tolist())) > 1, "one call has tokens of several versions"
    assert versions.max() > versions[0]
