"""Random command lines on tiny models: each finishes, or is refused in one line, within its time.

    python -m benchmarks.random_commands [--first 0] [--count 1000] [--seconds 3600]
    python -m benchmarks.random_commands --first 17 --count 1 --show

A command is made from its number alone: a causal model, an encoder-decoder or a model of images; a way of training
(benchmarks.drawn.methods.py); up to two settings, drawn from the dataclasses of configs/, what they need to have
an effect, and a value for each that is valid or not. So a new setting takes part by itself. Every other command is a
dry run; the others run on one or two ranks. All are processes forked from this one.

What must hold: no traceback; exit status 0, or 2 for a refusal that names a flag, a file or a row, or 1 for what fails
in the middle of a run; whatever trains has a plan.json. Prints what went wrong; the exit status is 1 if anything did.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from benchmarks.drawn.methods import KINDS, LOSSES, draw_method, draw_plan, make_models, write_data
from benchmarks.runs.forked_commands import Ended, run_command, run_forked, wait
from configs.formats import DATASETS
from configs.run import SETTINGS
from configs.setting import Setting
from configs.values import choices

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
    "preference_config": ("--loss_type", "simpo"),
    "preference_dataset": ("--loss_type", "dpo"),
    "classification_dataset": ("--task", "text_classification"),
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
    "caption_dataset": "pictures",
    "preference_dataset": "formats/preferences.jsonl",
    "classification_dataset": "formats/moods.csv",
}
OF_KIND: dict[str, dict[str, str]] = {
    "causal": {"--context_length": "128"},
    "seq2seq": {"--max_source_length": "96", "--max_target_length": "32"},
    "image": {},
}
"""The lengths of rows."""
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
    is_dry: bool


def command(number: int, folder: Path) -> Command:
    """The command of this number, for models and data in `folder`."""
    draw, is_dry = random.Random(number), number % 2 == 0
    kind = KINDS[number // 2 % len(KINDS)]
    others = [name for name in SETTINGS if name not in (*FIXED, *COSTLY) and not name.startswith(OF_PLANS)]
    names = draw.sample(others, draw.choice([0, 1, 2, 2]))
    flags = {"--model_name": str(folder / "models" / kind), "--random_weights": "True"}
    flags |= {"--output_dir": str(folder / "run"), "--max_train_step": "2", "--num_workers_dataloader": "0"}
    flags |= OF_KIND[kind] | (draw_method(draw) if draw.random() < 0.8 else {})
    usual, loss = "caption_dataset" if kind == "image" else "samsum_dataset", dict[str, str]()
    if kind == "causal" and draw.random() < 0.4:
        usual, loss = draw.choice(LOSSES)
    if any(name.startswith("preference_config.") for name in names):
        usual = "preference_dataset"
    datasets = [name.split(".")[0] for name in names if name.split(".")[0] in DATASETS] or [usual]
    flags["--dataset"] = ",".join(dict.fromkeys(datasets))
    for dataset in dict.fromkeys(datasets):
        flags[f"--{dataset}.data_path"] = str(folder / DATA[dataset])
    for dataset in {"chat_dataset", "preference_dataset"}.intersection(datasets):
        flags[f"--{dataset}.chat_template"] = str(folder / "formats/chat.jinja")
    if usual in datasets:
        flags |= loss
    function = "rows.py:taught" if "--teacher_weight" in flags else "rows.py:rows"
    flags |= {"--custom_dataset.file": str(folder / function)} if "custom_dataset" in datasets else {}
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
    flags |= draw_plan(draw) if is_dry else {}
    world_size = 1 if is_dry else draw.choice([1, 1, 1, 2])
    return Command([word for item in flags.items() for word in item if word != _BARE], world_size, is_dry)


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


NAMED = re.compile(r"--\w|/\w|\brow \d|\w\.(py|json|jsonl|yaml|csv)\b")
FITS = re.compile(r"^(fits|tight|does not fit): ", re.MULTILINE)


def problem(ended: Ended, run: Path, *, is_dry: bool = False) -> str:
    """What is wrong with how a command ended; empty if it finished, or was refused in one line."""
    printed = "\n".join(ended.outputs)
    errors = re.findall(r"^error: (?!rank \d).*", ended.outputs[0], re.MULTILINE)
    if "Traceback" in printed:
        return "a traceback"
    if len(set(ended.statuses)) > 1 or ended.statuses[0] not in (0, 1, 2):
        return f"exit statuses {ended.statuses}"
    if ended.statuses[0]:
        if len(errors) != 1:
            return f"{len(errors)} error lines"
        if not NAMED.search(errors[0]):
            return "it names no flag, no file and no row"
        began = (run / "metrics.jsonl").exists()
        if ended.statuses[0] == 1:
            return "" if began else "it failed before the run began, and was not refused"
        return "refused after the run folder was made" if run.exists() else ""
    if is_dry:
        return "" if FITS.search(printed) and not run.exists() else "no verdict, or it wrote something"
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if not events or events[-1].get("status") != "finished":
        return "it ended with 0 and did not finish"
    trained = any(event["event"] == "train" for event in events)
    return "it trained without a plan" if trained and not (run / "plan.json").exists() else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=3600, help="begin nothing after so long")
    parser.add_argument("--show", action="store_true", help="print the output of every command")
    given = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    importlib.import_module("finetuning")  # once, for all forks
    problems, ends, begun = 0, Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_data(folder)
        # In a fork: this process must have no threads.
        wait(run_forked(lambda: make_models(folder / "models"), folder / "output"), time.monotonic() + 300)
        for number in range(given.first, given.first + given.count):
            if time.monotonic() - begun > given.seconds:
                print(f"no time left before command {number}: go on with --first {number}")
                break
            line = command(number, folder)
            ended = run_command(line.flags, line.world_size, folder)
            wrong = problem(ended, folder / "run", is_dry=line.is_dry)
            how = ("planned" if line.is_dry else "finished", "failed in mid-run", "refused")
            ends["wrong" if wrong else how[ended.statuses[0]]] += 1
            if wrong or given.show:
                print(
                    f"\ncommand {number}, {line.world_size} ranks, {ended.seconds:.1f} s: {wrong or 'as it should be'}"
                )
                print(shlex.join(["finetuning.py", *line.flags]), *ended.outputs, sep="\n", flush=True)
            problems += bool(wrong)
            for path in (folder / "run", folder / "outputs"):
                shutil.rmtree(path, ignore_errors=True)
    print(f"{sum(ends.values())} commands: {', '.join(f'{number} {end}' for end, number in sorted(ends.items()))}")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())
