"""Stands in for nltk, whose word lists no package carries: TextArena's own lists serve instead.

TextArena's word games take their secrets from nltk's data, which has to be downloaded. Here the
"basic" list is the everyday nouns and adjectives of TextArena's Taboo and Twenty Questions, and the
full one its US spelling dictionary. So the words are the same on every machine, and they are not
the ones of published TextArena figures.
"""

from __future__ import annotations

import functools
import json
import sys
import types
from importlib import resources
from typing import Any

_TABOO_CATEGORIES = ("animals", "food", "things")


def install() -> None:
    """Put the stand-in where `import nltk` finds it, and load TextArena's dictionary only once."""
    nltk, corpus = types.ModuleType("nltk"), types.ModuleType("nltk.corpus")
    nltk.__path__ = []
    vars(nltk).update(corpus=corpus, download=_download, pos_tag=_pos_tag)
    vars(corpus).update(words=_Words())
    sys.modules.update({"nltk": nltk, "nltk.corpus": corpus})
    from textarena.envs.utils import word_lists

    real = word_lists.EnglishDictionary

    @functools.lru_cache(maxsize=1)
    def dictionary() -> Any:
        return real(keep_proper_nouns=False, include_nltk=False)

    def shared(**options: bool) -> Any:
        """The games ask for the same dictionary each time, and never change it."""
        return dictionary()

    word_lists.EnglishDictionary = shared


@functools.lru_cache(maxsize=1)
def everyday_words() -> list[str]:
    """Return TextArena's everyday words, lower case, in order."""
    from textarena.envs.utils import word_lists

    folder = resources.files("textarena.envs")
    taboo = json.loads((folder / "Taboo" / "words.json").read_text("utf-8"))
    questions = folder / "TwentyQuestions" / "twenty_questions_words.json"
    found: set[str] = set()
    for category in _TABOO_CATEGORIES:
        for word, hints in taboo[category].items():
            found.update((word, *hints))
    for level in json.loads(questions.read_text("utf-8")).values():
        for words in level.values():
            found.update(words)
    english = word_lists.EnglishDictionary().us_words
    return sorted({w.lower() for w in found if w.isascii() and w.isalpha()} & english)


class _Words:
    def words(self, name: str = "en") -> list[str]:
        if name == "en-basic":
            return everyday_words()
        return _all_words()


@functools.lru_cache(maxsize=1)
def _all_words() -> list[str]:
    from textarena.envs.utils import word_lists

    english = word_lists.EnglishDictionary().us_words
    return sorted(word for word in english if word.isascii() and word.isalpha())


def _download(*_: Any, **__: Any) -> bool:
    return False


def _pos_tag(tokens: list[str]) -> list[tuple[str, str]]:
    """Call everything a noun: the everyday words nearly all are."""
    return [(token, "NN") for token in tokens]
