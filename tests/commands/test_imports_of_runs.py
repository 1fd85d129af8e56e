"""Imports begin where the feature begins: what runs of the defaults, and of LoRA, have imported when they end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT, process_variables, read_metrics

OF_ADAPTERS = {"peft", "bitsandbytes", "policies.adapters.apply"}  # the second by the first, if it is installed
OF_COMPILING = {
    *("torch._inductor.compile_fx", "torch._inductor.codecache", "torch._inductor.async_compile"),
    *("torch._functorch.aot_autograd", "functorch.compile", "networkx"),
}
OF_OTHER_FEATURES = OF_COMPILING | {
    *("matplotlib", "rouge_score", "tensorboard", "torch.utils.tensorboard", "wandb", "plotly", "torchao", "kernels"),
    *("evaluation.generation", "flash_attn"),
    *("pytest", "tools", "benchmarks", "checkpointing.exporting", "checkpointing.old_format"),
}
"""Not pandas, which the datasets package imports, nor `torch._dynamo` and sympy, which transformers and FSDP import."""


def imported_by(folder: Path, *commands: Sequence[str]) -> list[set[str]]:
    """The modules that finetuning.py has imported when it ends, with each of these command lines in turn.

    All of them run in one new interpreter, so that those imported by an earlier one are among a later one's.
    """
    script = (
        "import json, runpy, sys\nimported = []\n"
        f"for words in {[list(words) for words in commands]!r}:\n"
        "    sys.argv = ['finetuning.py', *words]\n"
        "    runpy.run_path('finetuning.py', run_name='__main__')\n"
        "    imported.append(list(sys.modules))\n"
        f"with open({str(folder / 'imported.json')!r}, 'w') as file:\n    json.dump(imported, file)\n"
    )
    given = {"cwd": ROOT, "env": process_variables({"HF_HUB_OFFLINE": "1"}), "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=300, **given)
    assert done.returncode == 0, done.stderr
    return [set(names) for names in json.loads((folder / "imported.json").read_text())]


@pytest.mark.slow
def test_runs_of_the_defaults_import_nothing_of_adapters_those_of_lora_peft_and_neither_the_compiler(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Both evaluate, and save weights and a checkpoint."""
    samples = tmp_path / "samples"
    samples.mkdir()
    for split in ("train", "validation"):
        lines = (ROOT / f"datasets/samples/dialogue_summary/{split}.jsonl").read_text().splitlines()
        (samples / f"{split}.jsonl").write_text("\n".join(lines[:2]) + "\n")
    words = ["--model_name", str(tiny_model), "--max_train_step", "1", "--samsum_dataset.data_path", str(samples)]
    runs = [tmp_path / "defaults", tmp_path / "lora"]
    commands = [[*words, "--output_dir", str(run)] for run in runs]
    by_defaults, by_lora = imported_by(tmp_path, commands[0], [*commands[1], "--use_peft"])
    for run in runs:
        assert [event["event"] for event in read_metrics(run)].count("eval") == 1
    assert not by_defaults & (OF_ADAPTERS | OF_OTHER_FEATURES)
    assert not by_lora & OF_OTHER_FEATURES
    assert "peft" in by_lora


@pytest.mark.slow
def test_a_plan_of_a_compiled_run_imports_no_compiler(tiny_model: Path, tmp_path: Path) -> None:
    words = ["--model_name", str(tiny_model), "--dry_run", "--dry_run_hardware", "H100-80GB", "--compile"]
    (imported,) = imported_by(tmp_path, words)
    # What a layer keeps for backward is a cut of a graph, by networkx.
    assert not imported & (OF_ADAPTERS | OF_OTHER_FEATURES) - {"networkx"}
