"""Published files of other tools, translated by tools.translate and planned: the table of docs/other-tools.md.

    for name in axolotl-ai-cloud/axolotl hiyouga/LLaMA-Factory huggingface/trl huggingface/alignment-handbook \\
        pytorch/torchtune Lightning-AI/litgpt; do git clone https://github.com/$name CLONES/$name; done
    python -m benchmarks.translated_files --clones CLONES --out FOLDER

Of each tool's files that train a language model on given text or answers, ten are taken at even distances in the order
of their names. Each is translated, and its recipe goes through --dry_run with all of its settings but two: a config of
the same architecture with two layers takes the place of the model, and a small file with the same columns that of data
on the hub. A file that has a result in FOLDER is not tried again. The table is FOLDER/table.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.runs.stand_ins import NUM_ROWS, stand_in_data, stand_in_model
from configs.flags import parse_flags
from planning.dry_run import dry_run
from ranks.environment import read_environment
from tools.ending import status_of
from tools.translate.__main__ import main as translate_main

TEN = 10


@dataclass(frozen=True)
class Published:
    """One tool's files.

    Attributes:
        places: repository and glob of the files that are read.
        others: a pattern, in a file's name and text, of those that train no language model on text or answers.
        texts: repositories' files that hold command lines.
    """

    tool: str
    places: tuple[tuple[str, str], ...]
    others: str
    texts: tuple[tuple[str, str], ...] = ()


TOOLS = (
    Published(
        "axolotl",
        (("axolotl-ai-cloud/axolotl", "examples/**/*.y*ml"),),
        r"\Aexamples/(archived|cloud|.*(vision|voxtral|-vl|llava))|^(rl|reward_model|process_reward_model|processor_type|diffusion|ebft):",
    ),
    Published(
        "llamafactory",
        tuple(
            ("hiyouga/LLaMA-Factory", f"examples/{folder}/**/*.yaml")
            for folder in ("train_lora", "train_full", "train_qlora", "extras")
        ),
        r"^stage: (dpo|kto|rm|ppo)|^dataset: .*(mllm|llava)|^dataset: (med|math)$|^do_predict|\A(?![\s\S]*^do_train)",
    ),
    Published(
        "trl",
        (
            ("huggingface/trl", "examples/cli_configs/*.yaml"),
            ("huggingface/alignment-handbook", "recipes/*/sft/*.yaml"),
        ),
        r"\A.*_vlm",
        (("huggingface/trl", "trl/scripts/sft.py"), ("huggingface/trl", "examples/scripts/sft_*.py")),
    ),
    Published(
        "torchtune",
        (("pytorch/torchtune", "recipes/configs/*/*.yaml"),),
        r"PPO|DPO|KD|teacher_model|vision|multimodal|grpo|\A(?![\s\S]*^optimizer)",
    ),
    Published("litgpt", (("Lightning-AI/litgpt", "config_hub/finetune/*/*.yaml"),), r"\A\Z"),
)


_QUANTIZED = r"AWQ|GPTQ|AQLM"


def published_files(tool: Published, clones: Path) -> list[tuple[str, str, list[str]]]:
    """(repository, file, words for tools.translate) of all files of a tool, in the order of their names."""
    found = []
    for repository, pattern in tool.places:
        for path in sorted((clones / repository).glob(pattern)):
            name = str(path.relative_to(clones / repository))
            if not re.search(tool.others, f"{name}\n{path.read_text()}", re.MULTILINE):
                found.append((repository, name, [str(path)]))
    for repository, pattern in tool.texts:
        for path in sorted((clones / repository).glob(pattern)):
            for number, words in enumerate(commands_in(path.read_text()), 1):
                name = f"{path.relative_to(clones / repository)}, command {number}"
                if not re.search(tool.others, name):
                    found.append((repository, name, ["--", *words]))
    return found


def commands_in(text: str) -> Iterator[list[str]]:
    """The command lines in a script's docstring that start a fine-tuning."""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if re.match(r"\s*(accelerate launch|python|trl sft)\b", line) and "--model_name_or_path" in line:
            yield shlex.split(line)


def evenly(files: list[Any], count: int) -> list[Any]:
    """So many of a list at even distances, the first and the last among them."""
    if len(files) <= count:
        return files
    return [files[round(index * (len(files) - 1) / (count - 1))] for index in range(count)]


def try_file(words: list[str], folder: Path, clones: Path) -> dict[str, Any]:
    """Translate and plan one file. The result says how far it came, and what was replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder / "recipe.yaml"
    at = words.index("--") if "--" in words else len(words)
    given = [*words[:at], "--out", str(recipe), "--overwrite", *words[at:]]
    printed, status = forked(lambda: translate_main(given), folder / "translation.txt")
    if status != 0:
        return {"reached": False, "why": _error_in(printed, clones)}
    keys = [int(count) for count in re.findall(r"(\d+) (?:keys?:|set|needless|without)", printed.splitlines()[0])]
    settings = yaml.load(recipe.read_text(), Loader=yaml.BaseLoader)
    name = settings["train_config"].get("model_name", "")
    if found := re.search(_QUANTIZED, name):
        return {"reached": False, "keys": keys, "why": f"no run here trains on weights that {found[0]} quantized"}
    model = stand_in_model(name, folder.parent.parent)
    if model is None:
        return {"reached": False, "keys": keys, "why": f"no stand-in for the architecture of {name}"}
    flags, replaced = ["--model_name", str(model)], [f"a small {model.name}"]
    for dataset in settings["train_config"].get("dataset", "").split(","):
        own = settings.get(dataset, {})
        if not all(Path(part).exists() for part in own.get("data_path", "").split(",")):
            flags += [f"--{dataset}.data_path", str(stand_in_data(dataset, own, folder / dataset))]
            replaced.append(f"{NUM_ROWS} rows for {dataset}")
    ranks = re.search(r"--nproc_per_node (\d+)", printed)
    flags += ["--dry_run", "--dry_run_hardware", f"{ranks[1] if ranks else 1}xH100-80GB"]
    argv = ["--config", str(recipe), *flags]
    printed, status = forked(lambda: plan(argv), folder / "plan.txt")
    result = {"reached": status == 0, "keys": keys, "replaced": replaced}
    return result if result["reached"] else result | {"why": _error_in(printed, clones)}


def plan(argv: list[str]) -> int:
    """What `finetuning.py ... --dry_run` does. Returns the exit status."""
    return status_of(lambda: dry_run(argv, parse_flags(argv), read_environment()))


def forked(work: Callable[[], int], file: Path) -> tuple[str, int]:
    """What a copy of this process printed, which is also in the file, and its exit status. Torch is imported once."""
    child = os.fork()
    if child == 0:
        with file.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        status = 1
        try:
            status = work()
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return file.read_text(), os.waitstatus_to_exitcode(status)


def _error_in(text: str, clones: Path) -> str:
    lines = [line for line in text.splitlines() if line.startswith("error:")] or text.splitlines()[-1:] or ["no output"]
    return lines[0].removeprefix("error: ").replace(f"{clones}/", "")


def commit_of(clone: Path) -> str:
    """The commit that a clone is at, or what its file COMMIT says."""
    noted = clone / "COMMIT"
    if noted.exists():
        return noted.read_text().strip()
    command = ["git", "-C", str(clone), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def table(results: list[dict[str, Any]]) -> str:
    """The results as a table in Markdown."""
    lines = ["| tool | file | keys: set, needless, none | dry run |", "|---|---|---|---|"]
    for result in results:
        keys = result.get("keys")
        counts = f"{keys[0]}: {keys[1]}, {keys[2]}, {keys[3]}" if keys else ""
        end = "reached" if result["reached"] else f"no: {result['why']}"
        lines.append(f"| {result['tool']} | `{result['file']}` | {counts} | {end} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clones", type=Path, required=True, help="folder with OWNER/NAME of each repository")
    parser.add_argument("--out", type=Path, required=True, help="folder for recipes, plans and the table")
    parser.add_argument("--count", type=int, default=TEN, help="files of each tool")
    options = parser.parse_args(argv)
    clones, results = options.clones.absolute(), []
    for tool in TOOLS:
        files = published_files(tool, clones)
        print(f"{tool.tool}: {options.count} of {len(files)} files", flush=True)
        for number, (repository, file, words) in enumerate(evenly(files, options.count)):
            done = options.out.absolute() / tool.tool / f"{number:02}" / "result.json"
            if done.exists() and json.loads(done.read_text())["file"] == file:
                result = json.loads(done.read_text())
            else:
                result = {"tool": tool.tool, "repository": repository, "file": file}
                result |= try_file(words, done.parent, clones)
                done.write_text(json.dumps(result, indent=1))
            print(f"  {'reached' if result['reached'] else 'no'} {file} {result.get('why', '')}", flush=True)
            results.append(result)
    commits = {repository: commit_of(clones / repository) for tool in TOOLS for repository, _ in tool.places}
    sources = "".join(f"- https://github.com/{name}/tree/{commit}\n" for name, commit in commits.items())
    (options.out / "table.md").write_text(table(results) + "\n" + sources)


if __name__ == "__main__":
    main()
