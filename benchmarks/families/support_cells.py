"""What works with a family, measured by running finetuning.py on its tiny model: one function for each column."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.families import documents
from benchmarks.families.measured_losses import TOLERANCE, own_losses
from benchmarks.families.published import PublishedModel, save_tiny
from benchmarks.runs.forked_commands import Ended, run_command, run_forked, wait
from benchmarks.runs.measurements import read_events, train_events
from data.sequences.tokenized import TokenSequence
from data.tokens.labels import IGNORE_INDEX
from tools.export import main as export
from utils.compat import list_text_model

NUM_STEPS, RESUMED_AFTER, BATCH = 3, 2, 4
LIMIT_SECONDS = 400  # layers of several kinds take a while to compile
# Adam steps by signs at first: at a larger rate, rounding decides those of gradients near zero, and losses drift apart.
LEARNING = ("--lr", "1e-4")
LEARNING_LORA = ("--use_peft", "--lora_config.r", "4", "--lora_dropout", "0", "--lr", "1e-3")
LORA = (*LEARNING_LORA, "--lora_config.target_modules", "all-linear")
FITS = re.compile(r"^(fits|tight|does not fit): ", re.MULTILINE)


@dataclass(frozen=True)
class SupportCell:
    """A column of a family: a measured difference, or what else is to be said of it."""

    apart: float | None = None  # the largest difference of a loss, as a share of it if that is above 1
    said: str = ""
    refused: str = ""  # the line of the refusal
    error: str = ""  # what went wrong

    @property
    def is_right(self) -> bool:
        return not self.error and (self.apart is None or self.apart <= TOLERANCE)


class RunFailed(Exception):
    """A run ended otherwise than it should."""


class RunRefused(Exception):
    """A run was refused in one line, which is the message."""


class FamilyRuns:
    """The tiny model of a family in a folder, and runs on it, each made when a column first needs it."""

    def __init__(self, published: PublishedModel, folder: Path) -> None:
        self.published, self.folder, self.model = published, folder, folder / "model"
        self.printed: dict[str, str] = {}  # by each run, rank 0
        in_fork(self.save, folder)

    def save(self) -> None:
        """Save the tiny model, and what its runs read."""
        save_tiny(self.published, self.model)

    def loss_of(self, model: Path, adapter: Path | None = None) -> float:
        """transformers' own loss of the documents to evaluate, one at a time, by the model in a folder."""
        return float(in_fork(partial(_own_loss, model, adapter), self.folder))

    def usual_flags(self) -> list[str]:
        """Those of all runs, of data."""
        usual = ["--dataset", f"{documents.__file__}:get_documents", "--num_workers_dataloader", "0"]
        return [*usual, "--context_length", str(documents.CONTEXT_LENGTH)]

    @cached_property
    def own_loss(self) -> float:
        """transformers' own loss of the documents to evaluate, one at a time: its mean over all their labels."""
        return self.loss_of(self.model)

    @cached_property
    def plain(self) -> Path:
        """A padded run of all weights in one process."""
        return self.run("plain", "--batching_strategy", "padding", "--save_every_steps", str(RESUMED_AFTER))

    @cached_property
    def adapted(self) -> Path:
        """A padded run of LoRA on all linear layers, and experts, in one process."""
        return self.run("lora", "--batching_strategy", "padding", *LORA)

    def run(self, name: str, *flags: str, world_size: int = 1, first: Callable[[], Any] = lambda: None) -> Path:
        """The folder of a run with these flags besides the usual ones.

        Raises:
            RunRefused: if it is refused.
            RunFailed: if it ends otherwise.
        """
        ended = self.end_of(self.folder / name, flags, world_size, first)
        _check(ended)
        self.printed[name] = ended.outputs[0]
        return self.folder / name

    def end_of(
        self, output: Path, flags: Sequence[str], world_size: int = 1, first: Callable[[], Any] = lambda: None
    ) -> Ended:
        usual = ["--model_name", str(self.model), "--output_dir", str(output), "--mixed_precision", "False"]
        usual += [*self.usual_flags(), "--max_train_step", str(NUM_STEPS)]
        usual += ["--batch_size_training", str(BATCH // world_size)]
        usual += [] if "--run_validation" in flags else ["--eval_before_training"]
        usual += [] if "--lr" in flags else LEARNING
        return run_command([*usual, *flags], world_size, self.folder, first, LIMIT_SECONDS)


def _check(ended: Ended) -> None:
    printed = "\n".join(ended.outputs)
    if ended.statuses[0] == 2 and "Traceback" not in printed:
        raise RunRefused("".join(re.findall(r"^error: (.*)", ended.outputs[0], re.MULTILINE)[:1]))
    if any(ended.statuses):
        raise RunFailed(f"exit status {ended.statuses}: {_last_line(printed)}")


def _last_line(printed: str) -> str:
    errors = re.findall(r"^(?:error: .*|\w*(?:Error|Exception)\b.*)", printed, re.MULTILINE)
    return (errors or printed.strip().splitlines() or [""])[-1][:300]


def measure_column(runs: FamilyRuns, column: Callable[[Any], SupportCell]) -> SupportCell:
    """A column, whatever happens."""
    try:
        return column(runs)
    except RunRefused as refusal:
        return SupportCell(refused=str(refusal).replace(str(runs.model), runs.published.model))
    except Exception as error:
        return SupportCell(error=f"{type(error).__name__}: {error}")


def padded(runs: FamilyRuns) -> SupportCell:
    """The run's loss before its first step, beside transformers' own."""
    return SupportCell(apart([first_loss(runs.plain)], [runs.own_loss]))


def packed(runs: FamilyRuns) -> SupportCell:
    return SupportCell(apart([first_loss(runs.run("packed", "--batching_strategy", "packing"))], [runs.own_loss]))


def compiled(runs: FamilyRuns) -> SupportCell:
    """The losses of steps whose layers dynamo and AOT autograd trace, beside those of the plain run."""
    flags = ("--batching_strategy", "padding", "--compile", "True", "--run_validation", "False")
    run = runs.run("compiled", *flags, first=_use_aot_eager)
    how = "".join(re.findall(r"^compute .*, (.*?) *$", runs.printed["compiled"], re.MULTILINE))
    return SupportCell(apart(_step_losses(run), _step_losses(runs.plain)), "" if how == "compiled layers" else how)


def lora(runs: FamilyRuns) -> SupportCell:
    """The run's last evaluation beside the loss of what plain peft loads, and whether experts have adapters."""
    loaded = runs.loss_of(runs.model, runs.adapted / "adapter")
    of_experts = _said_of_experts(runs, _experts_with_adapters(runs.adapted))
    return SupportCell(apart([best_loss(runs.adapted)], [loaded]), of_experts)


def merged(runs: FamilyRuns) -> SupportCell:
    """The LoRA run's last evaluation beside the loss of the model that `tools.export --merge` makes of it."""
    to = runs.folder / "merged"
    status = in_fork(partial(export, [str(runs.adapted), "--to", str(to), "--merge"]), runs.folder)
    if status:
        raise RunFailed(f"exit status {status}: {_last_line((runs.folder / 'output').read_text())}")
    return SupportCell(apart([best_loss(runs.adapted)], [runs.loss_of(to)]))


def four_bit(runs: FamilyRuns) -> SupportCell:
    """Whether a LoRA run on 4 bits finishes, and whether experts are in 4 bits."""
    run = runs.run("four_bit", "--batching_strategy", "padding", *LORA, "--quantization", "4bit")
    if not all(map(math.isfinite, _losses(run))):
        raise RunFailed(f"losses {_losses(run)}")
    are_packed = bool(re.search(r"quantization: .*linear layers and experts", runs.printed["four_bit"]))
    return SupportCell(said=_said_of_experts(runs, are_packed) or "finishes")


def two_ranks(runs: FamilyRuns) -> SupportCell:
    run = runs.run("two_ranks", "--batching_strategy", "padding", "--enable_fsdp", world_size=2)
    return SupportCell(apart(_losses(run), _losses(runs.plain)))


def plan(runs: FamilyRuns) -> SupportCell:
    ended = runs.end_of(runs.folder / "planned", ["--dry_run", "True"])
    _check(ended)
    if not FITS.search(ended.outputs[0]):
        raise RunFailed(f"no verdict: {_last_line(ended.outputs[0])}")
    return SupportCell(said="works")


def saved(runs: FamilyRuns) -> SupportCell:
    """The run's last evaluation beside the loss of the model that transformers loads."""
    loaded = runs.loss_of(runs.plain / "model")
    return SupportCell(apart([best_loss(runs.plain)], [loaded]))


def resumed(runs: FamilyRuns) -> SupportCell:
    """A run that goes on after a checkpoint, beside the one that was never interrupted: bit by bit."""
    run = runs.folder / "resumed"
    shutil.copytree(runs.plain, run, dirs_exist_ok=True)
    for left in (run / "model", *(run / "checkpoints").glob(f"step-*{NUM_STEPS}")):
        shutil.rmtree(left, ignore_errors=True)
    runs.run("resumed", "--batching_strategy", "padding", "--save_every_steps", str(RESUMED_AFTER), "--resume", "auto")
    are_equal = _losses(run) == _losses(runs.plain) and _are_equal(run / "model", runs.plain / "model")
    return SupportCell(said="bit by bit") if are_equal else SupportCell(error="not bit by bit")


COLUMNS: dict[str, Callable[[FamilyRuns], SupportCell]] = {
    "padded": padded,
    "packed": packed,
    "compiled": compiled,
    "LoRA": lora,
    "merged": merged,
    "4-bit": four_bit,
    "FSDP2": two_ranks,
    "plan": plan,
    "saved": saved,
    "resumed": resumed,
}


def apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    if len(ours) != len(theirs) or not ours:
        raise RunFailed(f"{len(ours)} losses beside {len(theirs)}")
    apart = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours, theirs, strict=True)]
    return max(apart) if all(map(math.isfinite, apart)) else math.inf


def _eval_losses(run: Path) -> list[float]:
    return [event["loss"] for event in read_events(run) if event["event"] == "eval"]


def first_loss(run: Path) -> float:
    return _eval_losses(run)[0]


def best_loss(run: Path) -> float:
    return min(_eval_losses(run)[1:])


def _step_losses(run: Path) -> list[float]:
    return [event["loss"] for event in train_events(run)]


def _losses(run: Path) -> list[float]:
    """Of the steps and evaluations."""
    return _step_losses(run) + _eval_losses(run)


def _use_aot_eager() -> None:
    torch.compile = partial(torch.compile, backend="aot_eager")  # of this fork


def in_fork(function: Callable[[], Any], folder: Path) -> Any:
    """Its result, which JSON can hold."""
    result = folder / "result.json"
    pid = run_forked(lambda: result.write_text(json.dumps(function())), folder / "output", OMP_NUM_THREADS="1")
    if wait(pid, time.monotonic() + 120):
        raise RunFailed(_last_line((folder / "output").read_text()))
    return json.loads(result.read_text())


def _own_loss(model_folder: Path, adapter: Path | None = None) -> float:
    torch.set_num_threads(1)
    list_text_model(AutoConfig.from_pretrained(model_folder))
    both: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, output_loading_info=True)
    model, report = both
    if any(report.values()):
        raise RunFailed(f"loading: {report}")
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    rows = documents.get_documents(None, AutoTokenizer.from_pretrained(model_folder), "validation")
    samples = [TokenSequence(np.array(row["input_ids"]), np.array(row["labels"]), 0) for row in rows]
    num_labels = [int(np.sum(sample.labels[1:] != IGNORE_INDEX)) for sample in samples]
    return float(np.average(own_losses(model.eval(), samples), weights=num_labels))


def _said_of_experts(runs: FamilyRuns, are_included: bool) -> str:
    if not runs.published.has_experts:
        return ""
    return "experts too" if are_included else "without experts"


def _experts_with_adapters(run: Path) -> bool:
    with safe_open(run / "adapter/adapter_model.safetensors", "pt") as tensors:
        return any(".experts." in key for key in tensors.keys())  # noqa: SIM118


def _are_equal(folder: Path, other: Path) -> bool:
    files = sorted(path.name for path in other.glob("*.safetensors"))
    return bool(files) and all((folder / name).read_bytes() == (other / name).read_bytes() for name in files)
