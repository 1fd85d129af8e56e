"""Talk with a trained model in the terminal: an exported folder, an adapter, a run or a checkpoint.

    python -m tools.chat RUN_OR_FOLDER [--system TEXT] [--chat_template_kwargs JSON]
                         [--max_new_tokens 512] [--temperature 0] [--seed 0] [--base FOLDER]
    echo "Who are you?" | python -m tools.chat RUN_OR_FOLDER

Turns are written by the chat template that the run was trained with, and answers end with its tokens. Of a run, the
newest checkpoint answers, whether the run goes on or not. Ctrl-C stops an answer, Ctrl-D ends the chat. From a pipe,
each line is a question, and standard output gets the answers alone. It runs on a GPU if there is one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tools.answering.flags import chat_flags

# Before the imports below: they take seconds, and some of them print.
if __name__ == "__main__":
    from tools.beginning import begin_importing

    imports_ended = begin_importing(lambda: chat_flags(None, __doc__))

import torch

from tasks.generation import AnswerSettings
from tools.answering.chat_form import ChatForm
from tools.answering.loading import load
from tools.answering.prompts import check_text
from tools.answering.session import ChatSession
from tools.answering.terminal import QUOTES, AnswerPrinter, Input
from tools.answering.trained_on import trained_on
from tools.ending import status_of
from utils.errors import ConfigError, TrainingError, in_one_line
from utils.printing import print_line
from utils.quiet import quiet_tool
from utils.small_files import parse_json
from utils.streams import refusal

HELP = f"""\
/undo         takes your last message and its answer back
/reset        begins anew, with the same --system
/save [FILE]  writes the chat as a row of chat_dataset (chat-DATE-TIME.jsonl)
/help         shows this
/exit         ends, as Ctrl-D does
{QUOTES}           begins and ends a message of several lines
A message that begins with a slash has a space before it."""


def chat(given: argparse.Namespace) -> None:
    """Talk until standard input ends.

    Raises:
        ConfigError: for a flag, or if a message of a pipe cannot be answered.
    """
    if given.system is not None:
        check_text(given.system, "--system")
    template_kwargs = _template_kwargs(given.chat_template_kwargs)
    data = trained_on(given.path.expanduser())
    loaded = load(given.path, given.base)
    if not loaded.processor.chat_template:
        raise ConfigError(
            f"{given.path}: its tokenizer has no chat template, so turns cannot be written; ask by "
            f"python -m tools.generate {given.path} --prompt TEXT"
        )
    form = ChatForm.of(loaded.processor, split_special_tokens=data.splits_special_tokens)
    settings = AnswerSettings(given.max_new_tokens, given.temperature, may_be_shorter=True)
    session = ChatSession(loaded, form, settings, system=given.system, template_kwargs=template_kwargs)
    torch.manual_seed(given.seed)
    typed = Input()
    if data.sections and not data.chats:
        _note(f"{given.path} was trained on {', '.join(data.sections)}, not on chats; the template is its base's")
    if typed.is_terminal:
        _note(f"{loaded.path} answers; /help shows what you can type, Ctrl-C stops an answer, Ctrl-D ends")
    _talk(session, typed)
    if reason := refusal():
        raise TrainingError(f"standard output cannot be written ({reason}): some answers are lost")


def _talk(session: ChatSession, typed: Input) -> None:
    num_answers = 0
    while True:
        try:
            message = typed.message()
        except KeyboardInterrupt:
            if not typed.is_terminal:
                raise
            _note("\n(Ctrl-D or /exit ends)")
            continue
        if message is None:
            break
        word, _, rest = message.partition(" ")
        if word in ("/exit", "/quit"):
            return
        try:
            if word.startswith("/"):
                _do(session, word, rest.strip())
            elif message.strip():
                check_text(message, "this message")
                if num_answers and not typed.is_terminal:
                    print(flush=True)
                num_answers += 1
                _answer(session, message.strip(), typed)
        except ConfigError as error:
            if not typed.is_terminal:
                raise
            _note(f"error: {error}")
    if typed.is_terminal:
        print(flush=True)


def _answer(session: ChatSession, message: str, typed: Input) -> None:
    printer = AnswerPrinter()
    if not typed.is_terminal:
        answer = session.ask(message, printer)
        print(flush=True)
    else:
        try:
            with printer.stopped_by_ctrl_c():
                answer = session.ask(message, printer)
        except KeyboardInterrupt:
            _note("\n[stopped; your message is taken back]")
            return
        print(flush=True)
    if not answer.text:
        _note("[no answer; your message is taken back]")
    elif printer.stops():
        _note("[stopped]")
    elif answer.is_cut:
        _note("[cut: it has as many tokens as --max_new_tokens or the model allows]")


def _do(session: ChatSession, word: str, rest: str) -> None:
    """What a word with a slash asks for."""
    if word == "/help":
        _note(HELP)
    elif word == "/undo":
        question = session.undo()
        _note("there is nothing to take back" if question is None else f"taken back: {question}")
    elif word == "/reset":
        session.reset()
        _note("begun anew")
    elif word == "/save":
        file = Path(rest or f"chat-{datetime.now():%Y%m%d-%H%M%S}.jsonl").expanduser()
        session.save(file)
        _note(f"saved: {file}, a row of chat_dataset")
    else:
        raise ConfigError(f"{word} is not known; /help lists what is, and a space before it makes it a message")


def _note(text: str) -> None:
    """Print a line that is no answer."""
    print_line(text, to_stderr=True)


def _template_kwargs(text: str | None) -> dict[str, Any]:
    try:
        values = {} if text is None else parse_json(text.encode())
    except ValueError as error:
        raise ConfigError(f"--chat_template_kwargs: it is no JSON ({in_one_line(error)}); give an object") from error
    if not isinstance(values, dict):
        raise ConfigError('--chat_template_kwargs: it is no JSON object; give one, as {"enable_thinking": false}')
    return values


def main(argv: Sequence[str] | None = None) -> int:
    quiet_tool()
    return status_of(lambda: chat(chat_flags(argv, __doc__)))


if __name__ == "__main__":
    imports_ended()
    sys.exit(main())
