"""Translate a file of Axolotl, LLaMA-Factory, TRL, torchtune or LitGPT into a recipe for --config.

    python -m tools.translate axolotl.yaml
    python -m tools.translate axolotl.yaml --out my_recipe.yaml
    python -m tools.translate -- trl sft --model_name_or_path M --dataset_name D --learning_rate 2e-4

Every key becomes a setting, or a line says why it is needless here or has no counterpart: on standard output, and at
the top of the recipe. Nothing is fetched, and no model is read. Exit status: 0 written, 2 refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

# Before the imports below, which take a while.
if __name__ == "__main__":
    from tools.beginning import begin_tool

    begin_tool()

from tools.ending import status_of
from tools.translate.axolotl import AXOLOTL
from tools.translate.command import read_command
from tools.translate.engine import translate
from tools.translate.litgpt import LITGPT
from tools.translate.llamafactory import LLAMA_FACTORY
from tools.translate.recipe import counted, lines_of, recipe_text, start_command
from tools.translate.source import Source, read_source
from tools.translate.torchtune import TORCHTUNE
from tools.translate.translation import Tool
from tools.translate.trl import TRL
from utils.atomic_write import write_atomically
from utils.errors import ConfigError
from utils.printing import print_line

TOOLS = {"axolotl": AXOLOTL, "llamafactory": LLAMA_FACTORY, "trl": TRL, "torchtune": TORCHTUNE, "litgpt": LITGPT}
"""By the name that --tool has for them. A file is of the first that it fits."""


def tool_of(source: Source) -> Tool:
    """The tool whose file this is.

    Raises:
        ConfigError: if it looks like none.
    """
    for tool in TOOLS.values():
        if tool.fits(source.tree):
            return tool
    raise ConfigError(f"{source.name}: no file of a tool that is known here; give --tool {'|'.join(TOOLS)}")


def run(options: argparse.Namespace, command: Sequence[str]) -> None:
    """Write the recipe and print what became of the keys.

    Raises:
        ConfigError: if the file is refused, or the recipe is there already.
    """
    source = read_command(command) if command else read_source(Path(options.file))
    tool = TOOLS[options.tool] if options.tool else tool_of(source)
    out = Path(options.out or f"{Path(options.file or 'command').stem}_recipe.yaml")
    translation = translate(source, tool)
    beside = {name: out.with_name(f"{out.stem}.{name}.jinja") for name in translation.files}
    if not options.overwrite:
        for path in (out, *beside.values()):
            if path.exists():
                raise ConfigError(f"--out: {path} exists; give another name, or --overwrite")
    for name, path in beside.items():
        if translation.place_file(name, str(path)):
            write_atomically(path, translation.files[name])
    write_atomically(out, recipe_text(translation, tool.name, str(out)))
    print_line(f"{source.name}: {tool.name}, {counted(translation)}")
    for line in lines_of(translation):
        print_line(line)
    print_line(f"written: {out}; {start_command(translation, str(out))}")


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    command = given[given.index("--") + 1 :] if "--" in given else []
    parser = argparse.ArgumentParser(
        prog="python -m tools.translate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", help="the other tool's YAML file; none after --")
    parser.add_argument("--tool", choices=list(TOOLS), help="whose file it is; left out: as its keys say")
    parser.add_argument("--out", help="the recipe; left out: NAME_recipe.yaml in the working directory")
    parser.add_argument("--overwrite", action="store_true", help="replace the recipe, if it is there")
    options = parser.parse_args(given[: given.index("--")] if "--" in given else given)
    if (options.file is None) == (not command):
        parser.error("give a file, or a command after --")
    return status_of(lambda: run(options, command))


if __name__ == "__main__":
    sys.exit(main())
