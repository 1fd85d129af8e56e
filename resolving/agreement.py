"""The facts in which all ranks of a run must agree, compared before any weight is read.

Ranks with other settings would train together without a word, or wait for each other for ever. The flags are compared
as they were given, also harmless ones: one command for all ranks is easy to check. Paths of inputs may differ from
machine to machine; their contents are compared instead. Paths of outputs must be the same everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from configs.absolute_paths import WRITTEN
from configs.names import flag
from configs.run import SETTINGS, RunConfig
from policies.weights.fingerprint import describe_file
from ranks.agreement import Facts
from ranks.environment import Environment
from resolving.inputs import Inputs
from utils.software import code_checksum, git_commit, versions

_READ = {name for name, setting in SETTINGS.items() if setting.is_path} - {
    *WRITTEN,
    "train_config.dist_checkpoint_folder",
    "train_config.resume",
}
_SAME_COMMAND = "give the same command on every machine"
_SAME_SOFTWARE = "install the same on every machine"
_SAME_DEVICES = "start the ranks on devices of one kind"
_SAME_MODEL = "copy the model to every machine again"
_SAME_DATA = (
    "copy the data to every machine again; a dataset function must return the same rows in every process (seed its "
    "random choices, sort what it lists)"
)


def facts_at_start(config: RunConfig, env: Environment) -> Facts:
    """The facts that a rank knows as soon as it has started.

    Args:
        config: with absolute paths.
    """
    settings = {}
    for section, values in config.to_dict().items():
        for field, value in values.items():
            name = f"{section}.{field}"
            settings[flag(name)] = value if name not in _READ else ("a path" if value else None)
    # With the packages of kernels documents are packed by default (policies/linear_attention/kernels.py).
    compared = ("torch", "transformers", "peft", "flash-linear-attention", "mamba-ssm")
    software = {name: version for name, version in versions().items() if name in compared}
    code = f"commit {git_commit() or 'unknown'}, files {code_checksum()}"
    return {
        _SAME_COMMAND: settings,
        _SAME_SOFTWARE: software | {"this repository's code": code},
        _SAME_DEVICES: {"device": env.device.type},
    }


def facts_found(inputs: Inputs) -> Facts:
    """The facts that a rank knows when it has read config.json and its data."""
    resolved, adapter = inputs.resolved, inputs.resolved.config.train_config.from_peft_checkpoint
    of_model = {f"--model_name: {key} of config.json": value for key, value in resolved.model_config.to_dict().items()}
    of_model.pop("--model_name: _name_or_path of config.json", None)  # an input's path may differ
    of_model["--tokenizer_name: number of tokens"] = inputs.vocab_size
    of_adapter: dict[str, Any] = {}
    if adapter:
        file = Path(adapter) / "adapter_model.safetensors"
        of_adapter["--from_peft_checkpoint"] = describe_file(file) if file.is_file() else None
    return {
        _SAME_DEVICES: resolved.to_dict() | {"optimizer steps": inputs.num_steps},
        _SAME_MODEL: of_model | of_adapter,
        _SAME_DATA: {f"--dataset, {split}": value for split, value in inputs.data.fingerprints().items()},
    }
