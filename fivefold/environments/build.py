"""Builds the environment of a recipe: the one place that knows them all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.environments.environment import Environment
from fivefold.environments.failing import Failing
from fivefold.environments.single_turn import SingleTurn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_environment(config: EnvironmentConfig | None, tokenizer: PreTrainedTokenizerBase) -> Environment:
    """Return what plays the episodes of a recipe; None: each prompt gets one completion.

    Raises:
        ValueError: the user's code cannot be imported, or has another form.
    """
    if config is None:
        return SingleTurn()
    return Failing(_build(config, tokenizer))


def _build(config: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase) -> Environment:
    if config.agent is not None:
        from fivefold.environments.agents.agent import Agent

        return Agent(config, tokenizer)
    if config.tools is not None:
        from fivefold.environments.agents.tools import Tools

        return Tools(config, tokenizer)
    if config.memory is not None:
        from fivefold.environments.agents.turn_game import TurnGame

        return TurnGame(config, tokenizer)
    if config.turn_template is not None:
        from fivefold.environments.agents.chat_game import ChatGame

        return ChatGame(config, tokenizer)
    from fivefold.environments.game import Game

    return Game(config, tokenizer)


def check_environment(config: EnvironmentConfig | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Import the user's code of an environment in this process, before any other is started.

    Raises:
        ValueError: it cannot be imported, has another form, or needs what the tokenizer lacks.
    """
    if config is None:
        return
    if config.agent is not None:
        from fivefold.environments.agents.agent import load_agent
        from fivefold.environments.agents.parsing import load_parser

        load_agent(config.agent)
        load_parser(config.parser, tokenizer)
        return
    if config.tools is not None:
        from fivefold.environments.agents.parsing import load_parser
        from fivefold.environments.agents.tools import check_template, load_tools

        load_tools(config.tools)
        check_template(tokenizer, config)
        load_parser(config.parser, tokenizer)
        return
    from fivefold.environments.game import load_game

    load_game(config)
    if config.turn_template is not None:
        from fivefold.environments.agents.chat_game import check_template as check_chat

        check_chat(tokenizer)
