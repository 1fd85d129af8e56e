"""Print the answers of a trained model: an exported folder, an adapter, a run or a checkpoint.

    python -m tools.generate RUN_OR_FOLDER --prompt "..." [--prompts FILE] [--chat]
                             [--max_new_tokens 128] [--temperature 0] [--seed 0] [--base FOLDER]
    python -m tools.generate RUN_OR_FOLDER --image FILE [--prompt "..."]

FILE holds one prompt per line, or JSON lines with "prompt". With --chat each prompt is a user's turn in the tokenizer's
chat template. Temperature 0 takes the likeliest token each time. It runs on a GPU if there is one.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from utils.progress import say_if_it_lasts
from utils.quiet import quiet_imports, quiet_tool
from utils.streams import keep_standard_streams, refusal

# Before the imports below: they take seconds, and some of them print.
if __name__ == "__main__":
    keep_standard_streams()
    quiet_imports()
    imports_ended = say_if_it_lasts("importing torch and transformers")

import torch

from chat.conversation import Conversation
from chat.samples import chat_samples
from chat.template import ChatTemplate
from checkpointing.exporting.blueprint import load_tokenizer, read_model_config
from checkpointing.exporting.model_source import open_source
from checkpointing.exporting.verify import load_model
from data.images.opening import open_image
from data.processors.tokenizer_loading import tokenizer_of
from data.tokens.spans import BadExample
from run_folder.other_runs import run_folder_of
from run_folder.run_yaml import first_date
from tasks.finding import find_task
from tasks.generation import AnswerSettings
from tasks.task import Task
from tools.ending import status_of
from utils.errors import ConfigError, TrainingError, in_one_line
from utils.printing import print_line, printable
from utils.small_files import parse_json, read_text
from utils.template_date import give_date

_LEAST_TEMPERATURE = 1e-3  # logits divided by less may overflow
_MOST_TOKENS = 10**6


def read_prompts(file: Path) -> list[str]:
    """One prompt per line, or the "prompt" of each JSON line; empty lines are skipped.

    Raises:
        ConfigError: if the file cannot be read, holds none, or a JSON line has none.
    """
    try:
        lines = [line for line in read_text(file.expanduser(), encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prompts: {file} cannot be read ({error}); name a text file") from error
    if not lines:
        raise ConfigError(f"--prompts: {file} holds no prompt; write one per line")
    if file.suffix not in (".jsonl", ".json"):
        return lines
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompt = parse_json(line.encode())["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f'--prompts: {file}, line {number}, is not JSON with "prompt" ({in_one_line(error)}); give '
                '{"prompt": "..."} on each line'
            ) from error
        if not isinstance(prompt, str):
            raise ConfigError(f'--prompts: {file}, line {number}: "prompt" is not text; give it in quotes')
        prompts.append(prompt)
    return prompts


def check_image_file(image: Path) -> None:
    """Refuse a file that is not an image.

    Raises:
        ConfigError: if it is not there, or cannot be decoded.
    """
    try:
        open_image(image.expanduser())
    except BadExample as error:
        raise ConfigError(f"--image: {error}; give an image file") from error


def check_text(prompt: str) -> None:
    """Refuse a prompt that no tokenizer takes.

    Raises:
        ConfigError: if the prompt is empty, or is not valid text.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"--prompt: {prompt[:40]!a} is not text (no UTF-8 at character {error.start}); give it as UTF-8"
        ) from error
    if not prompt.strip():
        raise ConfigError("--prompt: a prompt is empty; give a text")


def as_user_turn(tokenizer: Any, prompt: str) -> str:
    """The prompt as the chat template shows it to the model, up to the assistant's answer."""
    turns = [{"role": "user", "content": prompt}]
    give_date(tokenizer, tokenizer.chat_template)
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


def turn_end_ids(tokenizer: Any) -> list[int]:
    """The token that ends the assistant's turn in training; it need not be the tokenizer's end token."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        samples = chat_samples(Conversation(turns, has_loss=(False, True)), ChatTemplate.of(tokenizer))
    except BadExample:
        return []
    answers = [span.text for spans in samples.spans for span in spans if span.has_loss]
    return tokenizer.encode(answers[-1], add_special_tokens=False)[-1:]


def load(path: Path, base: str | None, image: Path | None = None) -> tuple[Any, Any, Task]:
    """The model, on the device where it will answer, its tokenizer or processor, and its task.

    Raises:
        ConfigError: if there is none, it is not whole, or it does not write about images as it is asked to.
    """
    source = open_source(path, base)
    source.check(lambda num_bytes: None)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    task = find_task(read_model_config(source.settings))
    if (image is not None) != task.READS_IMAGES:
        about = "writes about an image; give its file" if task.READS_IMAGES else "reads text alone; leave it out"
        raise ConfigError(f"--image: the model of {path} {about}")
    if image is not None:
        check_image_file(image)
    tokenizer = load_tokenizer(source.tokenizer)
    tokenizer_of(tokenizer).template_date = first_date(run_folder_of(path))  # as in training; elsewhere today's
    model = load_model(source, task.AUTO_MODEL, dtype, say=lambda line: print_line(line, to_stderr=True))
    return model.to(device), tokenizer, task


def answer_all(given: argparse.Namespace) -> None:
    """Print each prompt's answer, below the prompt if there are several."""
    prompts = [*given.prompt, *(read_prompts(given.prompts) if given.prompts else [])]
    prompts = prompts or ([] if given.image is None else [""])
    if not prompts:
        raise ConfigError("--prompt: there is nothing to answer; give --prompt TEXT or --prompts FILE")
    if not (given.temperature == 0 or _LEAST_TEMPERATURE <= given.temperature < math.inf):  # NaN is none of these
        raise ConfigError(
            f"--temperature: {given.temperature} is neither 0 nor a number from {_LEAST_TEMPERATURE} on; give 0 for "
            "the likeliest token each time"
        )
    if not 1 <= given.max_new_tokens <= _MOST_TOKENS:
        raise ConfigError(
            f"--max_new_tokens: {given.max_new_tokens} is not from 1 to {_MOST_TOKENS}; give such a number"
        )
    if not 0 <= given.seed < 2**63:
        raise ConfigError(f"--seed: {given.seed} is not from 0 to 2^63 - 1; give another")
    for prompt in prompts:
        if prompt or given.image is None:
            check_text(prompt)
    model, tokenizer, task = load(given.path, given.base, given.image)
    if given.chat and task.READS_IMAGES:
        raise ConfigError("--chat: the processor writes the chat template around an image by itself; leave it out")
    if given.chat and not tokenizer.chat_template:
        raise ConfigError(f"--chat: the tokenizer of {given.path} has no chat template; leave --chat out")
    more_end_ids = turn_end_ids(tokenizer) if given.chat else []
    torch.manual_seed(given.seed)
    settings = AnswerSettings(
        max_new_tokens=given.max_new_tokens,
        temperature=given.temperature,
        add_bos=not given.chat,  # a template brings its own
        more_end_ids=more_end_ids,
        image=given.image,
    )
    for prompt in prompts:
        shown = as_user_turn(tokenizer, prompt) if given.chat else prompt
        text = task.generate(model, tokenizer, shown, settings)
        answer = f"> {prompt}\n{text}\n" if len(prompts) > 1 else text
        # A terminal would obey control characters; another program gets what the model wrote.
        print(printable(answer) if sys.stdout.isatty() else answer, flush=True)
    if reason := refusal():
        raise TrainingError(f"standard output cannot be written ({reason}): some answers are lost")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="an exported folder, an adapter's folder, a run, or a checkpoint")
    parser.add_argument("--prompt", action="append", default=[], help="may be given several times")
    parser.add_argument("--prompts", type=Path, help='a file: one per line, or .jsonl with "prompt"')
    parser.add_argument("--image", type=Path, help="a file, for a model of image and text")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="longest answer (128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token each time (default)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling at a temperature above 0")
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's turn in the chat template")
    parser.add_argument("--base", help="the base model, if it is not where the checkpoint says")
    given = parser.parse_args(argv)
    quiet_tool()
    return status_of(lambda: answer_all(given))


if __name__ == "__main__":
    imports_ended()
    sys.exit(main())
