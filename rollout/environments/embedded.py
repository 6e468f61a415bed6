"""The embedded environment: guess a code from what is said about each of its symbols."""

from __future__ import annotations

import random
from dataclasses import dataclass

from cotutor.rollout.tasks import DOMAINS
from cotutor.rollout.verifiers.extraction import last_tag, nfkc, visible

from .protocol import Step


@dataclass(frozen=True)
class Code:
    """What codes there are: `length` of the `symbols`, which are ordered and may repeat."""

    noun: str
    symbols: str
    length: int


# Halving what is left finds any symbol within 4 (of 8) or 5 (of 20) guesses, all of them at once.
CODES = {
    "digits": Code("coins", DOMAINS["coins"].symbols, 3),
    "runes": Code("runes", DOMAINS["runes"].symbols, 2),
}


class GuessTheCode:
    """A secret code, a few guesses, and after each one a sign for every symbol of it.

    "=" means that the symbol is right, "+" that the code's symbol comes later in the list of
    symbols, "-" that it comes earlier. The score is 1 once the code was guessed, 0 before. Without
    the signs five guesses find 1 of 102 codes ("digits") or 1 of 80 ("runes").

    Args:
        game: a key of `CODES`.
        max_turns: how many guesses.
    """

    def __init__(self, game: str, max_turns: int = 5) -> None:
        self.max_turns = max_turns
        self._game = game
        self._code = CODES[game]
        self._secret = ""
        self._turns = 0
        self._last = Step("", False, 0.0)

    def reset(self, seed: int) -> str:
        """Draw the code of a seed and return the rules."""
        code = self._code
        rng = random.Random(f"{self._game} {seed}")
        self._secret = "".join(rng.choices(code.symbols, k=code.length))
        self._turns = 0
        text = (
            f"Guess {code.length} {code.noun}, each of {code.symbols}, like {self._example()}\n"
            f"For each of yours: = right, + higher, - lower. {self.max_turns} tries"
        )
        self._last = Step(text, False, 0.0)
        return text

    def step(self, message: str) -> Step:
        """Compare the guess in the message's last `<answer>…</answer>` with the code."""
        if not self._secret:
            raise RuntimeError("reset the environment before its first step")
        if self._last.done:
            return self._last
        self._turns += 1
        tagged = last_tag(visible(message), "answer")
        guess = "".join(nfkc(tagged or "").split()).lower()
        valid = len(guess) == len(self._secret) and set(guess) <= set(self._code.symbols)
        if guess == self._secret or self._turns == self.max_turns:
            self._last = Step("", True, float(guess == self._secret), not valid)
        else:
            left = f"{self.max_turns - self._turns} tries"
            told = self._signs(guess) if valid else f"wrong, write {self._example()}"
            self._last = Step(f"{told}\n{left}", False, 0.0, not valid)
        return self._last

    def render(self) -> str:
        """Return what the player was told last."""
        return self._last.text

    def score(self) -> float:
        """Return 1 once the code was guessed, 0 before."""
        return self._last.score

    def close(self) -> None:
        """Give up the episode."""
        self._secret = ""

    def _example(self) -> str:
        return f"<answer>{self._code.symbols[: self._code.length]}</answer>"

    def _signs(self, guess: str) -> str:
        place = self._code.symbols.index
        signs = []
        for mine, true in zip(guess, self._secret, strict=True):
            signs.append(mine + "=+-"[(place(true) > place(mine)) - (place(true) < place(mine))])
        return " ".join(signs)
