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


def imported_by(folder: Path, words: Sequence[str]) -> set[str]:
    """The modules that finetuning.py, with these words in a new interpreter, has imported when it ends."""
    script = (
        f"import json, runpy, sys\nsys.argv = {['finetuning.py', *words]!r}\n"
        "runpy.run_path('finetuning.py', run_name='__main__')\n"
        f"with open({str(folder / 'imported.json')!r}, 'w') as file:\n    json.dump(list(sys.modules), file)\n"
    )
    given = {"cwd": ROOT, "env": process_variables({"HF_HUB_OFFLINE": "1"}), "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=300, **given)
    assert done.returncode == 0, done.stderr
    return set(json.loads((folder / "imported.json").read_text()))


def imported_by_run(model: Path, folder: Path, flags: Sequence[str]) -> set[str]:
    """Those of a run that evaluates, and saves weights and a checkpoint."""
    samples = folder / "samples"
    samples.mkdir()
    for split in ("train", "validation"):
        lines = (ROOT / f"datasets/samples/dialogue_summary/{split}.jsonl").read_text().splitlines()
        (samples / f"{split}.jsonl").write_text("\n".join(lines[:2]) + "\n")
    words = ["--model_name", str(model), "--output_dir", str(folder / "run"), "--max_train_step", "1"]
    found = imported_by(folder, [*words, "--samsum_dataset.data_path", str(samples), *flags])
    assert [event["event"] for event in read_metrics(folder / "run")].count("eval") == 1
    return found


@pytest.mark.slow
def test_a_run_of_the_defaults_imports_nothing_of_adapters_or_the_compiler(tiny_model: Path, tmp_path: Path) -> None:
    assert not imported_by_run(tiny_model, tmp_path, []) & (OF_ADAPTERS | OF_OTHER_FEATURES)


@pytest.mark.slow
def test_a_run_of_lora_imports_peft_and_not_the_compiler(tiny_model: Path, tmp_path: Path) -> None:
    imported = imported_by_run(tiny_model, tmp_path, ["--use_peft"])
    assert not imported & OF_OTHER_FEATURES
    assert "peft" in imported


@pytest.mark.slow
def test_a_plan_of_a_compiled_run_imports_no_compiler(tiny_model: Path, tmp_path: Path) -> None:
    words = ["--model_name", str(tiny_model), "--dry_run", "--dry_run_hardware", "H100-80GB", "--compile"]
    # What a layer keeps for backward is a cut of a graph, by networkx.
    assert not imported_by(tmp_path, words) & (OF_ADAPTERS | OF_OTHER_FEATURES) - {"networkx"}
