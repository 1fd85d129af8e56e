"""Random command lines on a tiny model: each finishes, or is refused in one line, within its time.

    python -m benchmarks.random_commands [--first 0] [--count 300] [--model M]
    python -m benchmarks.random_commands --first 17 --count 1 --show

A command is made from its number alone: two settings, drawn from the dataclasses of configs/, what they need to have
an effect, and a value for each that is valid or not. So a new setting takes part by itself. Each command runs on one or
two ranks, in processes forked from this one. Prints what went wrong; the exit status is 1 if anything did.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import runpy
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from benchmarks.runs.launch import ROOT, SCRIPT, free_port
from configs.formats import DATASETS
from configs.run import SETTINGS
from configs.setting import Setting
from configs.values import choices
from tools.make_tiny_model import make_tiny_model

LIMIT_SECONDS = 120
MODEL: dict[str, Any] = {"vocab_size": 600, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4}
# Every run is of these few steps.
FIXED = ("train_config.model_name", "train_config.output_dir", "train_config.max_train_step")
OF_PLANS = "planning_config."  # a plan is no run, and neither is a check that the model loads
# Valid, and costs more than all the others together: compiling, and a process of W&B.
COSTLY = ("train_config.compile", "tracking_config.use_wandb")
NEEDED: dict[str, tuple[str, ...]] = {
    "fsdp_config": ("--enable_fsdp",),
    "lora_config": ("--use_peft",),
    "llama_adapter_config": ("--use_peft", "--peft_method", "llama_adapter"),
    "prefix_config": ("--use_peft", "--peft_method", "prefix", "--batching_strategy", "padding"),
    "quantization_config": ("--use_peft", "--quantization", "4bit"),
}
"""What gives the settings of a section an effect. A dataset's section needs the dataset, with data."""
DATA = {
    "samsum_dataset": "dialogues.jsonl",
    "alpaca_dataset": "formats/alpaca_data.json",
    "grammar_dataset": "formats/grammar.csv",
    "chat_dataset": "formats/chats.jsonl",
    "instruction_dataset": "formats/questions.jsonl",
    "text_dataset": "formats/places.txt",
    "segments_dataset": "formats/segments.jsonl",
    "custom_dataset": "formats/questions.jsonl",
    "caption_dataset": "formats/questions.jsonl",  # whatever it holds, a model of text is refused
}
CUSTOM = """def rows(config, tokenizer, split):
    vars(config)  # or what it does not read is refused
    return [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 9
"""
WORDS = (
    "nosuch",
    "~nosuch/folder",
    "a/b",
    "..",
    "",
    "x" * 300,
    "two words",
    "line\nline",
    "[1, 2]",
    "{'a': 1}",
    "text",
)
NO_NUMBERS = ("", "nan", "inf", "-inf", "-1", "1e30", "many", "0.5.5", "[1]", "True", "1,000", "9" * 400)


class Command(NamedTuple):
    flags: list[str]
    world_size: int


def command(number: int, folder: Path, model: Path) -> Command:
    """The command of this number, for data in `folder`."""
    draw = random.Random(number)
    others = [name for name in SETTINGS if name not in (*FIXED, *COSTLY) and not name.startswith(OF_PLANS)]
    names = draw.sample(others, 2)
    flags = {"--model_name": str(model), "--output_dir": str(folder / "run"), "--max_train_step": "2"}
    flags |= {"--context_length": "128", "--num_workers_dataloader": "0"}
    datasets = [name.split(".")[0] for name in names if name.split(".")[0] in DATASETS] or ["samsum_dataset"]
    flags["--dataset"] = ",".join(dict.fromkeys(datasets))
    for dataset in dict.fromkeys(datasets):
        flags[f"--{dataset}.data_path"] = str(folder / DATA[dataset])
    flags |= {"--chat_dataset.chat_template": str(folder / "formats/chat.jinja")} if "chat_dataset" in datasets else {}
    flags |= {"--custom_dataset.file": str(folder / "rows.py:rows")} if "custom_dataset" in datasets else {}
    if any(SETTINGS[name].name == "streaming" for name in names) and draw.random() < 0.7:
        flags["--run_validation"] = "False"
    for name in names:
        needed = NEEDED.get(name.split(".")[0], ())
        if draw.random() < 0.8:
            flags |= _paired(needed)
    for name in names:
        given = {f"--{name}", f"--{SETTINGS[name].name}"}
        flags = {flag: value for flag, value in flags.items() if flag not in given}
        flags[f"--{name}"] = _value(SETTINGS[name], draw)
    return Command([word for item in flags.items() for word in item if word != _BARE], draw.choice([1, 1, 1, 2]))


_BARE = "\0"  # the value of a flag without one


def _paired(words: Sequence[str]) -> dict[str, str]:
    flags = [place for place, word in enumerate(words) if word.startswith("--")]
    return {
        words[place]: _BARE if place + 1 in flags or place + 1 == len(words) else words[place + 1] for place in flags
    }


def _value(setting: Setting, draw: random.Random) -> str:
    """A value for a setting: of its type three times of four, else anything."""
    kind: Any = setting.kind
    kinds = {kind, *get_args(kind)}
    is_odd = draw.random() < 0.25
    if setting.is_switch:
        return draw.choice(["maybe", "2", "", "[True]"] if is_odd else ["True", "False"])
    if allowed := choices(kind):
        return draw.choice(WORDS) if is_odd else str(draw.choice(allowed))
    if get_origin(kind) is tuple:
        return draw.choice([*WORDS, *NO_NUMBERS] if is_odd else ["1,2", "0.5,0.5", "q_proj,v_proj", "all-linear", "1"])
    if int in kinds:
        numbers = [str(max(int(setting.minimum or 0), number)) for number in (0, 1, 2, 3, 8)]
        return draw.choice([*NO_NUMBERS, "1000000", "1000000000000"] if is_odd else numbers)
    if float in kinds:
        return draw.choice(NO_NUMBERS if is_odd else ["0", "1e-4", "1e-2", "0.5", "1"])
    defaults = [str(setting.default)] if isinstance(setting.default, str) else ["None"]
    return draw.choice(WORDS if draw.random() < 0.5 else defaults)


@dataclass
class Ended:
    """The exit status and the output of each rank; a rank whose time was up has the status -9."""

    statuses: list[int] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    seconds: float = 0.0


def problem(ended: Ended, run: Path) -> str:
    """What is wrong with how a command ended; empty if it finished, or was refused in one line."""
    printed = "\n".join(ended.outputs)
    errors = re.findall(r"^error: (?!rank \d).*", ended.outputs[0], re.MULTILINE)
    if set(ended.statuses) - {0, 2} or len(set(ended.statuses)) > 1:
        return f"exit statuses {ended.statuses}"
    if "Traceback" in printed:
        return "a traceback"
    if ended.statuses[0] == 2:
        if len(errors) != 1:
            return f"{len(errors)} error lines"
        return "refused after the run folder was made" if run.exists() else ""
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return "" if events and events[-1].get("status") == "finished" else "it ended with 0 and did not finish"


def run_forked(run: Callable[[], Any], output: Path, **variables: str) -> int:
    """Run a function in a fork of this process, in a session of its own; its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        with open(output, "wb") as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
        os.environ.update(variables)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_script(flags: Sequence[str], cwd: Path) -> None:
    os.chdir(cwd)
    sys.argv, sys.path[0] = [SCRIPT, *flags], str(ROOT)
    runpy.run_path(SCRIPT, run_name="__main__")


def run_command(command: Command, folder: Path) -> Ended:
    """Run it on its ranks, for at most `LIMIT_SECONDS`."""
    size, port, started = str(command.world_size), str(free_port()), time.monotonic()
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"FINETUNING_GRACE_SCALE": "0.1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    outputs = [folder / f"output-{rank}" for rank in range(command.world_size)]
    pids = [
        run_forked(lambda: run_script(command.flags, folder), output, **shared, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank, output in enumerate(outputs)
    ]
    statuses = [_wait(pid, started + LIMIT_SECONDS) for pid in pids]
    texts = [output.read_text(errors="replace") for output in outputs]
    return Ended(statuses, texts, time.monotonic() - started)


def _wait(pid: int, deadline: float) -> int:
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -signal.SIGKILL
        time.sleep(0.005)


def write_data(folder: Path) -> None:
    rows = [{"dialogue": f"Ann: Is it {i}?\nBob: Yes, {i}.", "summary": f"Bob says {i}."} for i in range(9)]
    (folder / "dialogues.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.py").write_text(CUSTOM)
    shutil.copytree(ROOT / "datasets/samples/formats", folder / "formats")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--model", type=Path, help="default: made anew")
    parser.add_argument("--show", action="store_true", help="print the output of every command")
    given = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    importlib.import_module("finetuning")  # once, for all forks
    problems, ends = 0, Counter[str]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_data(folder)
        model = given.model
        if model is None:
            model = folder / "model"
            # In a fork: this process must have no threads.
            _wait(run_forked(lambda: make_tiny_model(model, **MODEL), folder / "output"), time.monotonic() + 300)
        for number in range(given.first, given.first + given.count):
            line = command(number, folder, model)
            ended = run_command(line, folder)
            wrong = problem(ended, folder / "run")
            ends["wrong" if wrong else "finished" if ended.statuses[0] == 0 else "refused"] += 1
            if wrong or given.show:
                print(
                    f"\ncommand {number}, {line.world_size} ranks, {ended.seconds:.1f} s: {wrong or 'as it should be'}"
                )
                print(shlex.join(["finetuning.py", *line.flags]), *ended.outputs, sep="\n", flush=True)
            problems += bool(wrong)
            for path in (folder / "run", folder / "outputs"):
                shutil.rmtree(path, ignore_errors=True)
    print(f"{given.count} commands: {', '.join(f'{number} {end}' for end, number in sorted(ends.items()))}")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())
