"""Plays episodes of a recipe's environment in this process, and shows them turn by turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.config.paths import resolve_model_path
from fivefold.config.schema.train import TrainRecipe
from fivefold.data.prompts import load_prompts
from fivefold.environments.build import build_environment, check_environment
from fivefold.environments.play import Player, tasks_of
from fivefold.environments.user_code import EnvironmentFailed
from fivefold.evaluate import check_lengths
from fivefold.families.read import load_shape
from fivefold.rollout.protocol import SamplingParams, group_requests
from fivefold.rollout.tokenizer import decoded, tokenizer_of
from fivefold.rollout.transformers_engine import TransformersEngine
from fivefold.types import Episode, Prompt, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SLICE_S = 0.2
"""Seconds of the engine between two looks at whether an episode has ended."""


def play(recipe: TrainRecipe, model: str | None, n: int, *, with_ids: bool = False) -> Iterator[str]:
    """Play one episode of each of the first `n` prompts with the embedded engine; yield a text for each episode.

    Args:
        recipe: the recipe; of its roles, only the model of the rollout is loaded.
        model: folder, hub name or `package:<name>`; None: the recipe's actor.
        n: number of prompts.
        with_ids: whether the ids of tokens stand below their texts.

    Raises:
        ValueError: the model, the data or the environment cannot be loaded.
        EnvironmentFailed: the environment failed in an episode.
    """
    path = resolve_model_path(recipe.actor.path if model is None else model)
    tokenizer = tokenizer_of(recipe, path)
    check_environment(recipe.environment, tokenizer)
    shape = load_shape(resolve_model_folder(path))
    prompts = load_prompts(recipe.train_dataset, tokenizer, (path, shape)).prompts[:n]
    sampling = SamplingParams.for_training(recipe)
    check_lengths(recipe, shape, prompts, sampling)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = TransformersEngine.from_path(
        path,
        dtype=recipe.actor.dtype,
        device=device,
        max_batch_size=n,
        tokenizer_path=recipe.tokenizer_path,
        load_weights=True,
        trust_remote_code=recipe.trust_remote_code,
    )
    player = Player(engine, build_environment(recipe.environment, tokenizer))
    requests = group_requests([prompt.token_ids for prompt in prompts], 1, (recipe.seed, "play"))
    for number, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        player.begin(number, tasks_of(prompt, [request], replace(sampling, seeded=True)))
    while player.n_running:
        for number, [episode] in player.advance(SLICE_S):
            if episode.failure is not None:
                raise EnvironmentFailed(episode.failure)
            yield described(tokenizer, prompts[number], episode, with_ids=with_ids)


def described(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, episode: Episode, *, with_ids: bool = False) -> str:
    """Return an episode as a text: how it ended, its rewards, and the turns of each of its sequences.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the episode's prompt.
        episode: the episode.
        with_ids: whether the ids of tokens stand below their texts.
    """
    turns, effort = f"{episode.n_turns} turn{'s' * (episode.n_turns != 1)}", episode.effort
    ending = f"{episode.finish_reason} after {turns}; rewards: {_named(episode.rewards) or 'none yet'}"
    if effort.calls is not None:
        ending += f"; {effort.calls} call{'s' * (effort.calls != 1)} of tools"
    lines = [f"prompt {prompt.index + 1}: {ending}"]
    rewards = {move.start: move.rewards for move in episode.moves if move.rewards}
    n, begin, before = len(episode.trajectories), 0, list[Trajectory]()
    for number, trajectory in enumerate(episode.trajectories, start=1):
        counts = f"{len(trajectory.tokens_T)} tokens, {int(trajectory.mask_T.sum())} of them trained"
        lines.append(f"  sequence {number} of {n}: {counts}{_shared(trajectory, before)}")
        own = {start - begin: given for start, given in rewards.items()}
        lines += _spans(tokenizer, trajectory, own, with_ids=with_ids)
        begin += len(trajectory.tokens_T)
        before.append(trajectory)
    return "\n".join(lines)


def _shared(trajectory: Trajectory, before: Sequence[Trajectory]) -> str:
    """Return where a sequence leaves the earlier one with which it has the most tokens in common."""
    if not before:
        return ""
    common = [_n_common(trajectory, each) for each in before]
    most = max(common)
    return f"; the first {most} are as in sequence {common.index(most) + 1}"


def _n_common(one: Trajectory, other: Trajectory) -> int:
    """Return the number of tokens with which both sequences begin."""
    n = min(len(one.tokens_T), len(other.tokens_T))
    differs = one.tokens_T[:n] != other.tokens_T[:n]
    return int(differs.argmax()) if differs.any() else n


def _named(rewards: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in rewards.items())


def _spans(
    tokenizer: PreTrainedTokenizerBase,
    trajectory: Trajectory,
    rewards: Mapping[int, Mapping[str, float]],
    *,
    with_ids: bool,
) -> Iterator[str]:
    """Yield a line for each part of a sequence that is trained, or is not, with the rewards of turns by their start."""
    mask_T = trajectory.mask_T
    spans = np.split(trajectory.tokens_T, np.flatnonzero(mask_T[1:] != mask_T[:-1]) + 1)
    start = 0
    for number, (tokens, text) in enumerate(zip(spans, decoded(tokenizer, spans), strict=True)):
        kind = "model" if number % 2 else ("reads" if number else "prompt")
        given = f"  ({_named(rewards[start])})" if start in rewards else ""
        yield f"    {kind:>6} {len(tokens):>5}  {text!r}{given}"
        if with_ids:
            yield f"{'':>18}{' '.join(map(str, tokens.tolist()))}"
        start += len(tokens)
