"""Print the answers of a trained model: an exported folder, an adapter, a run or a checkpoint.

    python -m tools.generate RUN_OR_FOLDER --prompt "..." [--prompts FILE] [--chat]
                             [--max_new_tokens 128] [--temperature 0] [--seed 0] [--base FOLDER]
    python -m tools.generate RUN_OR_FOLDER --image FILE [--prompt "..."]

FILE holds one prompt per line, or JSON rows with "prompt", or with "messages" as in training: then the turns before the
last answer are the prompt. With --chat each prompt is a user's turn in the tokenizer's chat template. Temperature 0
takes the likeliest token each time. It runs on a GPU if there is one. To talk with the model: python -m tools.chat.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from tools.answering.flags import generate_flags

# Before the imports below: they take seconds, and some of them print.
if __name__ == "__main__":
    from tools.beginning import begin_importing

    imports_ended = begin_importing(lambda: generate_flags(None, __doc__))

import torch

from tasks.generation import AnswerSettings
from tools.answering.chat_form import ChatForm, as_user_turn
from tools.answering.loading import LoadedModel, load
from tools.answering.prompts import Prompt, check_text, read_prompts
from tools.answering.trained_on import TrainedOn, trained_on
from tools.ending import status_of
from utils.errors import ConfigError, TrainingError
from utils.printing import print_line, printable
from utils.quiet import quiet_tool
from utils.streams import refusal


def answer_all(given: argparse.Namespace) -> None:
    """Print each prompt's answer, below the prompt if there are several."""
    for text in given.prompt:
        if text or given.image is None:
            check_text(text)
    data = trained_on(given.path.expanduser())
    prompts = _prompts(given, data)
    if not prompts:
        raise ConfigError("--prompt: there is nothing to answer; give --prompt TEXT or --prompts FILE")
    loaded = load(given.path, given.base, given.image)
    chat, has_turns = None, any(prompt.turns is not None for prompt in prompts)
    # The processor of images writes a prompt as a user's turn by itself, if it has a template.
    writes_turns = loaded.task.READS_IMAGES and bool(getattr(loaded.processor, "chat_template", None)) and not has_turns
    if not writes_turns and (given.chat or has_turns):
        template = _chat_template(given, loaded)
        prompts = _prompts(given, data, template)  # again, now that it is known which roles the template has
        chat = ChatForm.of(loaded.processor, split_special_tokens=data.splits_special_tokens)
    if data.chats and not given.chat and not writes_turns and any(prompt.turns is None for prompt in prompts):
        print_line(
            f"{given.path} was trained on chats ({data.chats}), and these prompts are not written as turns; give "
            "--chat to ask as in training",
            to_stderr=True,
        )
    torch.manual_seed(given.seed)
    for prompt in prompts:
        text = _answer(given, prompt, loaded, chat)
        answer = f"> {prompt.shown}\n{text}\n" if len(prompts) > 1 else text
        # A terminal would obey control characters; another program gets what the model wrote.
        print(printable(answer) if sys.stdout.isatty() else answer, flush=True)
    if reason := refusal():
        raise TrainingError(f"standard output cannot be written ({reason}): some answers are lost")


def _prompts(given: argparse.Namespace, data: TrainedOn, chat_template: Any = "") -> list[Prompt]:
    from_file = read_prompts(given.prompts, data.row_settings(), chat_template) if given.prompts else []
    prompts = [*map(Prompt, given.prompt), *from_file]
    return prompts or ([] if given.image is None else [Prompt("")])


def _chat_template(given: argparse.Namespace, loaded: LoadedModel) -> Any:
    if loaded.task.READS_IMAGES:
        if given.prompts:
            raise ConfigError(f"--prompts: turns of {given.prompts} about an image are not answered; give texts")
        raise ConfigError(f"--chat: the processor of {given.path} has no chat template; leave it out")
    if not loaded.processor.chat_template:
        what = f"the tokenizer of {given.path} has no chat template"
        raise ConfigError(
            f"--chat: {what}; leave --chat out"
            if given.chat
            else f"--prompts: {given.prompts} holds turns, and {what} to write them; give texts"
        )
    return loaded.processor.chat_template


def _answer(given: argparse.Namespace, prompt: Prompt, loaded: LoadedModel, chat: ChatForm | None) -> str:
    turns = prompt.turns or (as_user_turn(prompt.shown) if given.chat else None)
    settings = AnswerSettings(given.max_new_tokens, given.temperature, image=given.image)
    written = prompt.shown
    if chat is not None and turns is not None:
        written, settings = chat.prompt(turns), chat.settings(settings)
    answer: str = loaded.task.generate(loaded.model, loaded.processor, written, settings).text
    return answer


def main(argv: Sequence[str] | None = None) -> int:
    quiet_tool()
    return status_of(lambda: answer_all(generate_flags(argv, __doc__)))


if __name__ == "__main__":
    imports_ended()
    sys.exit(main())
