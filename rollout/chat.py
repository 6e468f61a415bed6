"""From messages to token ids and back; what a message says is plain text, whatever it says.

A chat template is rendered with placeholders for the contents, so that nothing in a content can
steer it. The text is then encoded by a copy of the tokenizer in which every added token
(`<|im_end|>`, `<think>`, …) goes by a secret name. Only the template's own parts are translated to
these names, so `<|im_end|>` in a content is letters and signs. For contents without such strings
the ids are those of `tokenizer.apply_chat_template`, merges across a content's borders included.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError
from tokenizers import Encoding

from cotutor.rollout.added_tokens import ChatError, rename_added_tokens
from cotutor.rollout.problems import DataError
from cotutor.rollout.prompts import Message, PromptSet, reprompt_messages, strip_thinking
from cotutor.rollout.trajectory import Problem

_TEMPLATE_OPTION = "--students.N.chat-template"
# White space around a placeholder as a template may leave it, and what to strip off a content then
# (None: all white space). The two sides differ, so that they can be told apart.
_LEFT = {"\n\t\n": "", "\t\n": "\n", "": None}
_RIGHT = {"\n \n": "", "\n ": "\n", "": None}
# Glue can be split differently beside words than alone; these are tried until one doesn't merge.
_WORDS = ("x", "1", "(")


class PromptTooLong(DataError):
    """A prompt whose uncuttable part alone exceeds its budget."""


class _Rendered:
    """A template's own text around n contents, n + 1 parts, and what it strips off each content."""

    def __init__(self, parts: list[str], strips: list[tuple[str | None, str | None]]) -> None:
        self.parts = parts
        self.strips = strips

    def fill(self, contents: Sequence[str]) -> str:
        """The text with the contents in place."""
        text = [self.parts[0]]
        for content, part, (left, right) in zip(contents, self.parts[1:], self.strips, strict=True):
            text += [content.lstrip(left).rstrip(right), part]
        return "".join(text)


class Bridge(NamedTuple):
    """The ids between two responses; a token across a border of the content counts as glue."""

    before: list[int]  # from the end of a sampled response to where the user's words begin
    content: list[int]  # the user's words, and the end token that the template writes after them
    after: list[int]  # to where the next response begins, generation prompt included

    def ids(self) -> list[int]:
        """All of them, in order."""
        return [*self.before, *self.content, *self.after]


class Chat:
    """Renders messages with a tokenizer's chat template.

    Args:
        tokenizer: a Hugging Face tokenizer (of the fast kind) with a chat template.
        thinking: passed to the template as `enable_thinking`; None: the template's default.

    Raises:
        ChatError: no chat template, not a fast tokenizer, or added tokens that can't be renamed.
    """

    def __init__(self, tokenizer: Any, *, thinking: bool | None = None) -> None:
        self._name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ChatError(
                f"the tokenizer of {self._name} has no tokenizer.json: save it as a fast tokenizer"
            )
        if not tokenizer.chat_template:
            raise ChatError(
                f"the tokenizer of {self._name} has no chat template: "
                f"name a file with one by {_TEMPLATE_OPTION}"
            )
        self._tokenizer = tokenizer
        self._options = {} if thinking is None else {"enable_thinking": thinking}
        self._secret = secrets.token_hex(8)
        self._encoder, self._names, unknown = rename_added_tokens(backend, self._secret)
        self._ids = {name: self._encoder.token_to_id(name) for name in self._names.values()}
        # A model without byte fallback may have to say "unknown" in a content.
        self._added = frozenset(self._ids.values()) - {unknown}
        longest_first = sorted(self._names, key=len, reverse=True)
        self._any_name = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._known: set[str] = set()
        self._cache: dict[tuple[tuple[str, ...], bool], _Rendered] = {}
        self._end_id = self._find_end_id()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids of the messages and of the generation prompt.

        A system message goes in front of the first user message where the template has no place
        for it.
        """
        roles = tuple(message["role"] for message in messages)
        contents = [message["content"] for message in messages]
        try:
            rendered = self._render(roles)
        except TemplateError as error:
            if roles[:2] != ("system", "user"):
                raise self._refusal(error) from error
            contents = [f"{contents[0]}\n\n{contents[1]}", *contents[2:]]
            try:
                rendered = self._render(roles[1:])
            except TemplateError as second:
                raise self._refusal(second) from second
        return list(self._encode_rendered(rendered, contents).ids)

    def encode(self, text: str) -> list[int]:
        """The ids of a plain text: no string in it becomes an added token.

        Raises:
            ChatError: the tokenizer would drop a character without a trace.
        """
        self._require_known(text)
        return self._encode(text)

    def known(self, text: str) -> str:
        """A model's text with each character that this tokenizer would drop replaced by "?".

        Data with such a character is refused; a text that another model wrote must not stop a run.
        """
        lost = {c for c in set(text) - self._known if not c.isspace() and not self._encode(c)}
        return "".join("?" if c in lost else c for c in text) if lost else text

    def response(self, text: str) -> list[int]:
        """The ids of a text as if the model had sampled it: the text, then the turn's end token."""
        end = self._tokenizer.eos_token_id if self._end_id is None else self._end_id
        if end is None:
            raise ChatError(
                f"the tokenizer of {self._name} has no end token: set its eos_token, or name a "
                f"chat template that closes its turns by {_TEMPLATE_OPTION}"
            )
        return [*self.encode(text), end]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a response, without the end tokens and without special tokens."""
        ends = self.eos_ids()
        stop = len(ids)
        while stop and ids[stop - 1] in ends:
            stop -= 1
        return str(
            self._tokenizer.decode(
                list(ids[:stop]), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def eos_ids(self, generation_config: Any = None) -> set[int]:
        """All ids that end a response: the tokenizer's, the template's, the generation config's."""
        configured = getattr(generation_config, "eos_token_id", None)
        if not isinstance(configured, list):
            configured = [configured]
        ids = {*configured, self._tokenizer.eos_token_id, self._end_id}
        return {int(i) for i in ids if i is not None}

    def bridge(self, response_ids: Sequence[int], user: str) -> Bridge:
        """The ids from the end of a sampled response to the start of the next one.

        Append them to a trajectory and sample on: what stands before stays as it was sampled, also
        where the template would rewrite earlier turns (drop their thinking). The glue is what the
        template writes after the assistant's content; it is required to be the same in a longer
        dialogue. An end token that was sampled isn't repeated.

        Args:
            response_ids: the student's turn that the trajectory ends with.
            user: what the student is told next.

        Raises:
            ChatError: the template's glue depends on the turns before it.
        """
        glue = self._user_glue()
        encoding = self._encode_rendered(glue, [user])
        left, right = glue.strips[0]
        begin = len(glue.parts[0])
        end = begin + len(user.lstrip(left).rstrip(right))
        spans = encoding.offsets
        first = next((n for n, span in enumerate(spans) if span[0] >= begin), len(spans))
        stop = first
        while stop < len(spans) and spans[stop][1] <= end:
            stop += 1
        if stop < len(spans) and encoding.ids[stop] in self._added & self.eos_ids():
            stop += 1
        before = self._unless_sampled(encoding.ids[:first], response_ids)
        return Bridge(before, encoding.ids[first:stop], encoding.ids[stop:])

    def open_turn(self, response_ids: Sequence[int]) -> list[int]:
        """The ids from the end of a sampled response to where a user's words would begin.

        Append them and sample: the model writes the user's turn itself. They are `bridge`'s
        `before` for all words that don't merge with the glue.
        """
        return self._unless_sampled(self._glue_around_words()[0], response_ids)

    def close_turn(self, sampled_ids: Sequence[int]) -> list[int]:
        """The ids from the end of a user's turn that the model sampled to the next response."""
        return self._unless_sampled(self._glue_around_words()[1], sampled_ids)

    def _user_glue(self) -> _Rendered:
        """What the template writes around a user's words, from the end of the response before."""
        short = self._render(("user", "assistant", "user"))
        long = self._render(("user", "assistant", "user", "assistant", "user"))
        glue = _Rendered(short.parts[-2:], short.strips[-1:])
        if long.parts[-2:] != glue.parts:
            raise ChatError(
                f"the chat template of {self._name} writes a turn differently in a longer "
                f"dialogue: name another template by {_TEMPLATE_OPTION}"
            )
        return glue

    def _glue_around_words(self) -> tuple[list[int], list[int]]:
        """The ids before and after a user's words that merge with neither."""
        left, right = self._user_glue().parts
        for word in _WORDS:
            encoding = self._encoder.encode(left + word + right, add_special_tokens=False)
            span = (len(left), len(left) + len(word))
            if span in encoding.offsets:
                n = encoding.offsets.index(span)
                return encoding.ids[:n], encoding.ids[n + 1 :]
        return self._encode(left), self._encode(right)

    def _unless_sampled(self, glue: list[int], sampled: Sequence[int]) -> list[int]:
        """Glue without the end token that it begins with, where that was sampled already."""
        first = next((n for n, i in enumerate(glue) if i in self._added), None)
        if first is None or not sampled or glue[first] != sampled[-1]:
            return glue
        return glue if self._tokenizer.decode(glue[:first]).strip() else glue[first + 1 :]

    def _render(self, roles: tuple[str, ...], generate: bool = True) -> _Rendered:
        """Render the template with placeholders for the contents of these roles."""
        key = (roles, generate)
        if key not in self._cache:
            self._cache[key] = self._render_anew(roles, generate)
        return self._cache[key]

    def _render_anew(self, roles: tuple[str, ...], generate: bool) -> _Rendered:
        bare = self._split(roles, generate, "", "")
        padded = self._split(roles, generate, next(iter(_LEFT)), next(iter(_RIGHT)))
        # padded[n] = what is left of content n − 1's right pad + bare[n] + content n's left pad.
        strips: list[list[str | None]] = [["", ""] for _ in roles]
        for n, (part, wide) in enumerate(zip(bare, padded, strict=True)):
            rights = _RIGHT if n > 0 else {"": ""}
            lefts = _LEFT if n < len(roles) else {"": ""}
            fits = [
                (right, left)
                for right, left in product(rights, lefts)
                if wide == right + part + left
            ]
            if not fits:
                raise ChatError(
                    f"the chat template of {self._name} rewrites the white space of contents in a "
                    f"way that can't be followed: name another template by {_TEMPLATE_OPTION}"
                )
            right, left = fits[0]
            if n > 0:
                strips[n - 1][1] = rights[right]
            if n < len(roles):
                strips[n][0] = lefts[left]
        parts = [self._any_name.sub(lambda match: self._names[match[0]], part) for part in bare]
        return _Rendered(parts, [(left, right) for left, right in strips])

    def _split(self, roles: tuple[str, ...], generate: bool, left: str, right: str) -> list[str]:
        """The rendered template, cut at the placeholders."""
        slots = [f"slot{self._secret}n{n}e" for n in range(len(roles))]
        messages = [
            {"role": role, "content": left + slot + right}
            for role, slot in zip(roles, slots, strict=True)
        ]
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate, **self._options
        )
        pieces = re.split(f"(slot{self._secret}n[0-9]+e)", text)
        if pieces[1::2] != slots:
            raise ChatError(
                f"the chat template of {self._name} doesn't show every message once and in order: "
                f"name another template by {_TEMPLATE_OPTION}"
            )
        return list(pieces[0::2])

    def _encode(self, text: str) -> list[int]:
        return list(self._encoder.encode(text, add_special_tokens=False).ids)

    def _require_known(self, text: str) -> None:
        """Refuse characters that come to no token: BPE without an unknown token drops them."""
        new = set(text) - self._known
        lost = sorted(c for c in new if not c.isspace() and not self._encode(c))
        if lost:
            raise ChatError(
                f"the tokenizer of {self._name} drops {lost[0]!r}: train it with this character, "
                "with byte fallback or with an unknown token"
            )
        self._known |= new

    def _encode_rendered(self, rendered: _Rendered, contents: Sequence[str]) -> Encoding:
        for content in contents:
            self._require_known(content)
        encoding = self._encoder.encode(rendered.fill(contents), add_special_tokens=False)
        secret = re.compile(f"\ue000{self._secret}n[0-9]+\ue001")
        named = [self._ids[name] for part in rendered.parts for name in secret.findall(part)]
        structure = [i for i in encoding.ids if i in self._added]
        assert structure == [i for i in named if i in self._added], "a content became a token"
        return encoding

    def _find_end_id(self) -> int | None:
        """The added token that the template writes right after an assistant's content."""
        try:
            tail = self._render(("user", "assistant"), generate=False).parts[-1].lstrip()
        except TemplateError as error:
            raise self._refusal(error) from error
        match = re.match(f"\ue000{self._secret}n[0-9]+\ue001", tail)
        return self._ids[match[0]] if match else None

    def _refusal(self, error: TemplateError) -> ChatError:
        return ChatError(
            f"the chat template of {self._name} fails ({error}): "
            f"name another template by {_TEMPLATE_OPTION}"
        )


def fit_reprompt(
    chat: Chat,
    prompts: PromptSet,
    problem: Problem,
    demonstration: str,
    feedback: str,
    max_tokens: int,
) -> tuple[list[int], dict[str, int]]:
    """The reprompt, cut to a budget: the demonstration from its start, then the feedback's end.

    The question and the closing instruction are never cut. A section that is cut to nothing is
    left out; with both left out the reprompt is the student's own prompt.

    Returns:
        The ids, at most `max_tokens`, and the number of tokens cut: {"demonstration": n,
        "feedback": n}.

    Raises:
        PromptTooLong: the question alone doesn't fit.
    """

    def render(shown: str, said: str) -> list[int]:
        return chat.prompt(reprompt_messages(prompts, problem, shown, said))

    full = {"demonstration": strip_thinking(demonstration), "feedback": feedback}
    shown, said = full.values()
    ids = render(shown, said)
    if len(ids) > max_tokens and shown:
        cuts = _Cuts(lambda n: full["demonstration"][n:], lambda text: render(text, said))
        shown, ids = cuts.fewest(len(shown), max_tokens)
    if len(ids) > max_tokens and said:
        cuts = _Cuts(lambda n: feedback[: len(feedback) - n], lambda text: render(shown, text))
        said, ids = cuts.fewest(len(said), max_tokens)
    if len(ids) > max_tokens:
        raise PromptTooLong(
            f"{problem.source or problem.key}: the question alone takes {len(ids)} tokens of the "
            f"{max_tokens} allowed: raise --rollout.max-reprompt-tokens or leave the question out"
        )
    kept = {"demonstration": shown, "feedback": said}
    cut = {
        name: len(chat.encode(text)) - len(chat.encode(kept[name])) if kept[name] != text else 0
        for name, text in full.items()
    }
    return ids, cut


class _Cuts(NamedTuple):
    """How a section is shortened by n characters, and the prompt that comes of a section."""

    shorten: Callable[[int], str]
    render: Callable[[str], list[int]]

    def fewest(self, length: int, max_tokens: int) -> tuple[str, list[int]]:
        """The section and prompt for the fewest characters cut, by bisection; "" if none fits."""
        too_few, enough = 0, length
        text = self.shorten(enough)
        ids = self.render(text)
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            longer = self.shorten(middle)
            longer_ids = self.render(longer)
            if len(longer_ids) <= max_tokens:
                enough, text, ids = middle, longer, longer_ids
            else:
                too_few = middle
        return text, ids
