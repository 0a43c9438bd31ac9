"""A game to try training with several turns on: guess a digit from 1 to 9 by hints."""

from __future__ import annotations

import urllib3


class GuessDigit:
    """Each wrong guess is answered by `<` or `>`: the digit is smaller, or larger.

    The prompt asks for a sum, because the package's small model then answers with a digit; the rest it has to learn. In
    three turns, one can be right in 7 of 9 games, for a tree of three guesses has seven nodes; without the hints in 3
    of 9.
    """

    def reset(self, ground_truth: str) -> None:
        """Begin with the digit of the row."""
        self._digit = int(ground_truth)

    def step(self, move: str) -> tuple[str, float, bool]:
        """Answer a guess. A move that is no digit gets no hint."""
        if not move.isdecimal():
            return "?1+2=", 0.0, False
        guess = int(move)
        if guess == self._digit:
            return "", 1.0, True
        return ("<" if self._digit < guess else ">") + "1+2=", 0.0, False


def play(base_url: str, prompt: str, ground_truth: str) -> float:
    """Play the same game as an agent, which asks the model through a URL and returns the reward."""
    game = GuessDigit()
    game.reset(ground_truth)
    text, reward, is_over = prompt, 0.0, False
    for _ in range(3):
        reply = urllib3.request("POST", f"{base_url}/completions", json={"prompt": text}, retries=False, timeout=None)
        move = reply.json()["choices"][0]["text"]
        hint, reward, is_over = game.step(move)
        if is_over:
            break
        text += move + hint
    return reward
