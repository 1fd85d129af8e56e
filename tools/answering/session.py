"""A chat: its turns so far, and what is done with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from chat.turns import Message
from tasks.generation import AnswerSettings, GeneratedAnswer
from tasks.listening import Listener
from tools.answering.chat_form import ChatForm, as_conversation
from tools.answering.loading import LoadedModel
from utils.atomic_write import write_atomically
from utils.errors import ConfigError


class ChatSession:
    """The turns of one chat with a model."""

    def __init__(
        self,
        loaded: LoadedModel,
        form: ChatForm,
        settings: AnswerSettings,
        *,
        system: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """
        Raises:
            ConfigError: if the template does not write the system's turn.
        """
        self._loaded, self._form, self._settings = loaded, form, form.settings(settings)
        self._template_kwargs = template_kwargs or {}
        self._saved: set[Path] = set()
        self._first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[Message] = [*self._first]
        if system is not None and system.strip() not in self._prompt([*self._first, {"role": "user", "content": "a"}]):
            raise ConfigError("--system: the chat template does not write the system's turn; leave --system out")

    def ask(self, question: str, listener: Listener) -> GeneratedAnswer:
        """The model's answer. An empty one takes the question back, since no template writes a turn without words.

        Raises:
            ConfigError: if the template does not take the turns, or the model has no positions for them; the question
                is taken back.
        """
        turns = [*self.messages, {"role": "user", "content": question}]
        written = self._form.prompt(as_conversation(turns, **self._template_kwargs))
        settings = replace(self._settings, listener=listener)
        answer: GeneratedAnswer = self._loaded.task.generate(
            self._loaded.model, self._loaded.processor, written, settings
        )
        if answer.text:
            self.messages = [*turns, {"role": "assistant", "content": answer.text}]
        return answer

    def undo(self) -> str | None:
        """Take the last question and its answer back. Returns the question; None if there is none."""
        if self.messages == self._first:
            return None
        *self.messages, question, _ = self.messages
        return str(question["content"])

    def reset(self) -> None:
        """Begin anew, with the same system's turn."""
        self.messages = [*self._first]

    def save(self, file: Path) -> None:
        """Write the chat as one row of `chat_dataset`.

        Raises:
            ConfigError: without an answer to save; if the file is there and not of this session, or cannot be written.
        """
        if self.messages == self._first:
            raise ConfigError("there is nothing to save")
        if file.exists() and file.absolute() not in self._saved:
            raise ConfigError(f"{file} is there already; give another name")
        try:
            write_atomically(file, json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")
        except OSError as error:
            raise ConfigError(f"{file} cannot be written ({error.strerror or error}); give another name") from error
        self._saved.add(file.absolute())

    def _prompt(self, turns: list[Message]) -> str:
        written, special = (
            self._form.prompt(as_conversation(turns, **self._template_kwargs)),
            self._form.template.special,
        )
        return special.plain(written) if special else written
