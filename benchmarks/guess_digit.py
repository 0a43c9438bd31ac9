"""Plays and learns the game of recipes/guess-digit.yaml without Fivefold's engines, to compare settings over seeds.

    python benchmarks/guess_digit.py --seeds 1-10
    python benchmarks/guess_digit.py --seeds 1-10 --steps 220 --lr 3e-4 --entropy 0.15 --constant --target 9

Game, groups, advantages by state, entropy bonus, AdamW and schedule are the recipe's; random numbers are not, so that a
seed here is another one there. All games of a step have few different texts, because a turn is one token: the model
computes each text once, and one core plays and learns 288 games in about 0.2 s. The last line has the share of games
that were won in the end, by seed.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.environments.guess_digit import GuessDigit

MODEL, PROMPT, DIGITS, TURNS, GAMES = "package:tiny-moe", "1+2=", range(1, 10), 3, 32
HELD_OUT = 200
"""Games of each digit that are played in the end."""

Text = tuple[int, ...]


@dataclass
class Played:
    """One game."""

    text: Text
    moves: list[tuple[Text, int]] = field(default_factory=list)
    """What the model read, and the token that it sampled."""
    reward: float = 0.0


class Player:
    """The model, and the game in its tokens."""

    def __init__(self, seed: int) -> None:
        folder = resolve_model_folder(MODEL)
        torch.manual_seed(seed)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._random = torch.Generator().manual_seed(seed)

    def logprobs(self, texts: list[Text]) -> Tensor:
        """Return the log-probs of the token after each text, [texts, vocabulary]."""
        longest = max(map(len, texts))
        tokens, mask = torch.zeros(2, len(texts), longest, dtype=torch.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
        logits = self.model(input_ids=tokens, attention_mask=mask).logits
        ends = torch.tensor([len(text) - 1 for text in texts])
        return torch.log_softmax(logits[torch.arange(len(texts)), ends], dim=-1)

    def play(self, n: int) -> list[Played]:
        """Return n games of each digit, one digit after the other."""
        played, going = [], []
        for digit in DIGITS:
            for _ in range(n):
                game = GuessDigit()
                game.reset(str(digit))
                played.append(Played(self._tokens(PROMPT)))
                going.append((game, played[-1]))
        for _ in range(TURNS):
            texts = list(dict.fromkeys(each.text for _, each in going))
            with torch.no_grad():
                chances = self.logprobs(texts).exp()
            rows = torch.tensor([texts.index(each.text) for _, each in going])
            chosen = torch.multinomial(chances[rows], 1, generator=self._random).flatten().tolist()
            left = []
            for (game, each), token in zip(going, chosen, strict=True):
                each.moves.append((each.text, token))
                answer, reward, is_over = game.step(self._tokenizer.decode([token]))
                each.reward += reward
                each.text = (*each.text, token, *self._tokens(answer))
                left += [] if is_over else [(game, each)]
            going = left
        return played

    def _tokens(self, text: str) -> Text:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def learn(seed: int, args: argparse.Namespace) -> float:
    """Return the share of games that are won after training."""
    player = Player(seed)
    decayed = [each for each in player.model.parameters() if each.ndim > 1]
    others = [each for each in player.model.parameters() if each.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr)
    for step in range(args.steps):
        left = 1 - step / args.steps
        bonus = args.entropy * (1 if args.constant else left)
        cost = cost_of(player, player.play(GAMES), bonus, args.target)
        optimizer.zero_grad()
        cost.backward()
        torch.nn.utils.clip_grad_norm_(player.model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * left
        optimizer.step()
    played = player.play(HELD_OUT)
    return sum(each.reward for each in played) / len(played)


def compared(games: list[Played]) -> list[float]:
    """Return the advantage of each game among these."""
    rewards = torch.tensor([each.reward for each in games])
    advantages: list[float] = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
    return advantages


def credited(group: list[Played]) -> dict[tuple[int, int], float]:
    """Return the advantage of each move: its game's, and how it compares among moves after the same text."""
    of_games, places = compared(group), defaultdict[Text, list[tuple[int, int]]](list)
    for row, each in enumerate(group):
        for turn, (text, _) in enumerate(each.moves):
            places[text].append((row, turn))
    advantages: dict[tuple[int, int], float] = {}
    for same in places.values():
        own = compared([group[row] for row, _ in same]) if len(same) > 1 else [0.0]
        advantages |= {place: of_games[place[0]] + more for place, more in zip(same, own, strict=True)}
    return advantages


def cost_of(player: Player, played: list[Played], entropy_coeff: float, most: float) -> Tensor:
    """Return the mean over sampled tokens of -advantage * log-prob - entropy_coeff * min(entropy, most)."""
    sums, reads = defaultdict[tuple[Text, int], float](float), Counter[Text]()
    for start in range(0, len(played), GAMES):
        group = played[start : start + GAMES]
        for (row, turn), advantage in credited(group).items():
            text, token = group[row].moves[turn]
            sums[text, token] += advantage
            reads[text] += 1
    texts = list(reads)
    logprobs = player.logprobs(texts)
    place = {text: row for row, text in enumerate(texts)}
    rows, tokens = (torch.tensor(each) for each in zip(*((place[text], token) for text, token in sums), strict=True))
    gained = (torch.tensor(list(sums.values())) * logprobs[rows, tokens]).sum()
    entropy_of = -(logprobs.exp() * logprobs).sum(1)
    bounded = (entropy_of.clamp(max=most) * torch.tensor(list(reads.values()))).sum()
    return (-gained - entropy_coeff * bounded) / reads.total()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1-10", help="first and last seed")
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--entropy", type=float, default=0.2, help="weight of the bonus in the first step")
    parser.add_argument("--target", type=float, default=2.2, help="entropy above which a token has no bonus, in nats")
    parser.add_argument("--constant", action="store_true", help="keep the weight")
    args = parser.parse_args()
    torch.set_num_threads(1)
    first, last = map(int, args.seeds.split("-"))
    won = {}
    for seed in range(first, last + 1):
        won[seed] = round(learn(seed, args), 3)
        print(seed, won[seed], flush=True)
    print(won)


if __name__ == "__main__":
    main()
