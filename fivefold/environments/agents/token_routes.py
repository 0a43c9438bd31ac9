"""Routes of tokens over a session: prompts and completions are lists of ids, with the log-probs of what was sampled.

/inference/v1/generate   vLLM's form
/generate                SGLang's form
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fivefold.environments.agents.chat import reply_of
from fivefold.environments.agents.session import Refused, Session, before_stop
from fivefold.environments.agents.tree import Turn


async def generate_as_vllm(session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request to `/inference/v1/generate`.

    Raises:
        Refused: see `Session.complete`; or the prompt is no list of tokens.
    """
    turn = await _sampled(session, body, "token_ids")
    sampled = turn.completion
    logprobs = [
        {"token": f"token_id:{token}", "logprob": logprob}
        for token, logprob in zip(sampled.token_ids.tolist(), sampled.logprobs.tolist(), strict=True)
    ]
    choice = {"token_ids": sampled.token_ids.tolist(), "logprobs": {"content": logprobs}}
    return reply_of("generate", body, turn, {**choice, "finish_reason": sampled.finish_reason})


async def generate_as_sglang(session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request to `/generate`.

    `weight_version` is the newest version of the weights that sampled one of its tokens.

    Raises:
        Refused: see `Session.complete`; or the prompt is no list of tokens, or more than the log-probs of sampled
            tokens is asked for.
    """
    for name in ("text", "image_data", "top_logprobs_num", "token_ids_logprob", "return_hidden_states"):
        if body.get(name):
            raise Refused(f"{name} is not supported: /generate takes input_ids, and gives ids with their log-probs")
    if body.get("logprob_start_len") not in (None, -1):
        raise Refused("logprob_start_len is not supported: prompts have no log-probs, leave it out")
    turn = await _sampled(session, body, "input_ids")
    sampled = turn.completion
    token_ids, logprobs = sampled.token_ids.tolist(), sampled.logprobs.tolist()
    text, stop = before_stop(turn.visible_text, body.get("sampling_params") or {})
    meta = {
        "id": body.get("rid") or f"turn-{id(turn):x}",
        "finish_reason": _reason(turn, stop),
        "prompt_tokens": len(turn.token_ids) - len(token_ids),
        "completion_tokens": len(token_ids),
        "weight_version": str(max(sampled.versions.tolist(), default=0)),
    }
    if body.get("return_logprob"):
        rows = [[logprob, token, None] for logprob, token in zip(logprobs, token_ids, strict=True)]
        meta |= {"input_token_logprobs": [], "output_token_logprobs": rows}
    return {"text": text, "output_ids": token_ids, "meta_info": meta}


def sglang_events(reply: Mapping[str, Any]) -> str:
    """Return a finished reply of `/generate` as the events of a stream: all of it at once, and the end."""
    return f"data: {json.dumps(reply)}\n\ndata: [DONE]\n\n"


async def _sampled(session: Session, body: Mapping[str, Any], name: str) -> Turn:
    """Return the turn after the tokens that the body has under `name`."""
    token_ids, n = body.get(name), len(session.tokenizer)
    if not isinstance(token_ids, list) or not all(isinstance(token, int) and 0 <= token < n for token in token_ids):
        raise Refused(f"{name}={token_ids!r:.80} must be a list of numbers from 0 to {n - 1}")
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, Mapping):
        raise Refused(f"sampling_params={sampling!r:.80} must be an object")
    return await session.complete_ids(token_ids, sampling)


def _reason(turn: Turn, stop: str | None) -> dict[str, Any]:
    """Return why a completion ended; `stop` is the stop text that it has."""
    token_ids = turn.completion.token_ids.tolist()
    if turn.completion.finish_reason == "length":
        return {"type": "length", "length": len(token_ids)}
    return {"type": "stop", "matched": stop or token_ids[-1]}
