"""Items as tokens: the context in pieces, the questions, and their choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvloom import KVLoomError
from kvloom_eval.tasks import Item, Question

INTRODUCTION = "Read the following text, then answer the question about it."
_DOCUMENTS, _QUESTION = "KVLOOMDOCUMENTS", "KVLOOMQUESTION"
_ANSWER_TOKENS = 256
"""Room for the question and its answers behind the context."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question as token ids."""

    question: list[int]
    choices: list[list[int]]
    right: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """An item as token ids."""

    head: list[int]
    """The template's beginning and the introduction, the same in all prompts of a kind."""
    pieces: list[list[int]]
    """The documents, each with what separates it from the next; the turns of a conversation are one."""
    asked: list[Asked]

    @property
    def context(self) -> list[int]:
        return [*self.head, *(token for piece in self.pieces for token in piece)]

    @property
    def without(self) -> list[int]:
        """The prompt's beginning with nothing to read: what precedes the questions where the context is left out."""
        return self.head


class Prompts:
    """Makes prompts with a model's chat template, or in plain text."""

    def __init__(self, tokenizer: Any, *, plain: bool = False) -> None:
        """Raises KVLoomError for a tokenizer without a chat template, unless `plain`."""
        self._tokenizer = tokenizer
        self._plain = plain
        if not plain and not getattr(tokenizer, "chat_template", None):
            raise KVLoomError(
                "the model has no chat template, so it was not trained to answer: evaluate its instruct version, or "
                "ask in plain text with --plain"
            )
        self._start = list(tokenizer("").input_ids)

    def count(self, text: str) -> int:
        """The number of tokens of a text by itself."""
        return len(self._ids(text))

    def of(self, item: Item) -> Prompt:
        """The tokens of an item."""
        if item.turns:
            head, between, after = self._conversation(item.turns)
            pieces = [self._ids(between)]
        else:
            head, after = self._documents()
            pieces = [self._ids(f"{document}\n\n") for document in item.documents]
        head_ids = [*(self._start if self._plain else ()), *self._ids(head)]
        return Prompt(head_ids, pieces, [self._asked(each, after) for each in item.questions])

    def overhead(self) -> int:
        """Tokens of a prompt that are no document: the template, the introduction, and separators."""
        return self.count(self._documents()[0]) + 32

    # -- inside --------------------------------------------------------------------------------------------------------

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def _documents(self) -> tuple[str, str]:
        """The text before the documents, and the text behind the question."""
        if self._plain:
            return f"{INTRODUCTION}\n\n", "\nAnswer:"
        content = f"{INTRODUCTION}\n\n{_DOCUMENTS}{_QUESTION}"
        head, rest = self._cut(self._render([("user", content)]), _DOCUMENTS)
        return head, self._cut(rest, _QUESTION)[1]

    def _conversation(self, turns: Sequence[tuple[str, str]]) -> tuple[str, str, str]:
        """The text before the first turn, the turns up to the question, and the text behind the question."""
        if self._plain:
            said = "".join(f"User: {user}\nAssistant: {assistant}\n" for user, assistant in turns)
            return "A conversation.\n\n", f"{said}User: ", "\nAssistant:"
        messages = [pair for user, assistant in turns for pair in (("user", user), ("assistant", assistant))]
        head = self._cut(self._render([("user", _DOCUMENTS)]), _DOCUMENTS)[0]
        before, after = self._cut(self._render([*messages, ("user", _QUESTION)]), _QUESTION)
        if not before.startswith(head):
            raise KVLoomError("the model's chat template begins conversations of several turns in another way")
        return head, before[len(head) :], after

    def _render(self, messages: Sequence[tuple[str, str]]) -> str:
        turns = [{"role": role, "content": content} for role, content in messages]
        try:
            return str(self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template is a program, and raises what it likes
            raise KVLoomError(f"the model's chat template failed: {error}; ask in plain text with --plain") from None

    def _cut(self, text: str, mark: str) -> tuple[str, str]:
        before, found, after = text.partition(mark)
        if not found or mark in after:
            raise KVLoomError("the model's chat template does not keep a message as it is; use --plain")
        return before, after

    def _asked(self, question: Question, after: str) -> Asked:
        ask = f"Question: {question.ask}" if self._plain else question.ask
        text = f"{ask}{after}{' ' if self._plain else ''}{question.lead}"
        ids = self._ids(text)
        choices = []
        for choice in question.choices:
            whole = self._ids(text + choice)
            choices.append(whole[len(ids) :] if whole[: len(ids)] == ids else self._ids(choice))
        return Asked(ids, choices, question.right)


def check_room(model: Any, context: int) -> None:
    """Raise KVLoomError if a context of this many tokens and a question are more than the model was made for."""
    longest = longest_context(model)
    if context > longest:
        raise KVLoomError(
            f"--context {context:,}: with a question that is {context + _ANSWER_TOKENS:,} tokens, and the model takes "
            f"{longest + _ANSWER_TOKENS:,}; give at most {longest:,}"
        )


def longest_context(model: Any) -> int:
    """The most tokens that leave room for a question; 2^31 for a model that names no limit."""
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return 2**31 if longest is None else int(longest) - _ANSWER_TOKENS
