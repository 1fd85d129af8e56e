"""Print how much memory models need on each GPU by LoRA, QLoRA and full fine-tuning: the table of README.md.

    python -m tools.memory_table meta-llama/Llama-3.2-1B Qwen/Qwen3-30B-A3B [--card H100-80GB] [--num_cards 8]
    python -m tools.memory_table MODEL -- --context_length 8192 --pure_bf16

Each cell is the plan that `finetuning.py --dry_run` makes (docs/planning.md), in GiB: the peak of torch's tensors, and
the overhead of CUDA, NCCL and the allocator. It reads each model's config.json, no weights, and needs no GPU. Flags
after `--` are those of finetuning.py, for every cell.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.ending import status_of
from utils.errors import ConfigError
from utils.quiet import quiet_libraries

METHODS = {"LoRA": ("--use_peft",), "QLoRA": ("--use_peft", "--quantization", "4bit"), "full": ()}
# No replicated layers: what is needed, not what may be used.
FLAGS = (
    *("--batch_size_training", "1", "--context_length", "2048", "--activation_checkpointing", "full"),
    *("--num_replicated_layers", "0"),
)


def main(argv: Sequence[str] | None = None) -> int:
    given, flags = read_flags(argv)
    return status_of(lambda: print_table(given.models, given.card, given.num_cards, flags))


def read_flags(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and after "--" those of the runs."""
    words = list(sys.argv[1:] if argv is None else argv)
    place = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder with a config.json, or a name on the hub")
    parser.add_argument("--card", default="H100-80GB", help="the GPU (default %(default)s)")
    parser.add_argument("--num_cards", type=int, default=8, help="GPUs that share a model (default %(default)s)")
    return parser.parse_args(words[:place]), words[place + 1 :]


def print_table(models: Sequence[str], card: str, num_cards: int, flags: Sequence[str]) -> None:
    """Print a table in Markdown: a row for each model, a column for each method and number of GPUs.

    Raises:
        ConfigError: if a flag, a card or a model is refused.
    """
    from configs.changed_flags import changed_flags

    shared = changed_flags(FLAGS, flags)
    layouts = {"1 GPU": (card, ()), f"{num_cards} GPUs": (f"{num_cards}x{card}", ("--enable_fsdp",))}
    headings = ["GiB on each GPU", *(f"{method}, {layout}" for method in METHODS for layout in layouts)]
    print("| " + " | ".join(headings) + " |")
    print("|---|" + "---:|" * (len(headings) - 1))
    for model in models:
        cells = [
            _cell(hardware, ["--model_name", model, *shared, *method, *layout])
            for method in METHODS.values()
            for hardware, layout in layouts.values()
        ]
        print(f"| {Path(model).name} | " + " | ".join(cells) + " |", flush=True)


def _cell(hardware: str, flags: Sequence[str]) -> str:
    """The planned GiB of one run, in parentheses if the card has less; a dash if such a run would be refused."""
    from configs.flags import parse_flags
    from planning.machines.hardware import parse_hardware
    from planning.planned_run import plan_of

    config, cards = parse_flags(flags), parse_hardware(hardware)
    try:
        memory = plan_of(config, cards).memory
    except ConfigError as error:
        print(f"{' '.join(flags)}: {error}", file=sys.stderr)
        return "-"
    needed = memory.peak_gib + memory.overhead_gib
    return f"({needed:.0f})" if memory.verdict == "does_not_fit" else f"{needed:.1f}"


if __name__ == "__main__":
    from tools.beginning import begin_importing

    imports_ended = begin_importing(read_flags)
    import planning.planned_run  # noqa: F401

    imports_ended()
    quiet_libraries()
    sys.exit(main())
