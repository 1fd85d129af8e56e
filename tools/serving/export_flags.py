"""The flags of tools.export, read before imports that take seconds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from utils.errors import ConfigError

DTYPES = ("bf16", "fp16", "fp32")
PROGRAMS = ("gguf", "vllm")  # the keys of tools.serving.checks.CHECKS


def export_flags(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """The flags.

    Raises:
        ConfigError: if they do not fit each other; a wrong flag or --help ends the process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tools.export", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="a run, a checkpoint's folder or .pt file, or an adapter's folder")
    parser.add_argument("--to", type=Path, help="the folder to make; it must not exist")
    parser.add_argument("--merge", action="store_true", help="merge a LoRA adapter into its base model")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: as stored; merged: as the base's")
    parser.add_argument(
        "--verify", action="store_true", help="compare logits too; needs memory for the whole model in fp32"
    )
    parser.add_argument("--base", help="the model that training started from, if the checkpoint does not say it")
    parser.add_argument("--check", choices=PROGRAMS, action="append", default=[], help="does this program take it?")
    parser.add_argument("--push_to_hub", metavar="NAME", help="upload it to NAME or OWNER/NAME, private if it is new")
    parser.add_argument("--public", action="store_true", help="of --push_to_hub: let everybody read it")
    given = parser.parse_args(argv)
    if given.public and given.push_to_hub is None:
        raise ConfigError("--public: it belongs to --push_to_hub; give both, or neither")
    if given.to is None:
        _check_as_it_is(given)
    return given


def _check_as_it_is(given: argparse.Namespace) -> None:
    """Refuse flags that ask for a new folder, or for nothing."""
    for flag in ("merge", "dtype", "verify", "base"):
        if getattr(given, flag):
            raise ConfigError(f"--{flag}: it is for a new folder; give --to DIR as well")
    if not given.check and given.push_to_hub is None:
        raise ConfigError("--to: there is nothing to do; give --to DIR, --check or --push_to_hub")
