"""Whether a run may go on from a checkpoint: differences that would change the result are refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpointing.finding import Checkpoint
from configs.formats import DATASETS
from configs.fsdp import FsdpConfig
from configs.names import flag
from configs.optimizers import OPTIMIZERS
from configs.run import SETTINGS, RunConfig
from configs.training import TrainConfig
from policies.optimizers.kind import kind_of
from policies.rope_scaling import describe_parameters
from run_folder.checkpoint_folder import STATE
from utils.errors import ConfigError


def _dotted(names_of: Mapping[str, Sequence[str]]) -> frozenset[str]:
    return frozenset(f"{section}.{name}" for section, names in names_of.items() for name in names)


LAYOUT = _dotted(
    {
        "train_config": (
            *("use_fast_kernels", "compile", "activation_checkpointing", "loss_chunk_size", "enable_fsdp"),
            *("spare_layers", "activation_offloading", "num_offloaded_layers", "tile_tokens", "one_gpu"),
            "pad_to_multiple_of",
            # how the global batch is cut; its size stays
            *("batch_size_training", "gradient_accumulation_steps", "global_batch_size"),
        ),
        "fsdp_config": (
            *("sharding_strategy", "hsdp", "sharding_group_size", "replica_group_size", "context_parallel_size"),
            *("num_replicated_layers", "accumulate_unsharded", "fsdp_activation_checkpointing", "wrap"),
            *("fsdp_cpu_offload", "optimizer_cpu_offload", "direct_collectives"),
        ),
        "quantization_config": ("quant_storage",),
    }
)
"""Settings that decide where tensors are and how long. They change the result by rounding alone."""

MAY_CHANGE = LAYOUT | _dotted(
    {
        "train_config": (
            # contents are compared instead of names: config.json, the base's weights, the tokens of the data
            *("model_name", "task", "tokenizer_name", "trust_remote_code", "allow_unused_weights", "template_date"),
            *("low_cpu_fsdp", "num_workers_dataloader", "show_sample"),
            *("step_timeout_seconds", "timeout_seconds", "deterministic"),
            "min_steps",  # chose the global batch, which stays
            # length; if the learning rate depends on it, the number of steps is compared
            *("num_epochs", "max_train_step"),
            # evaluation and results
            *("early_stopping_patience", "stop_on_divergence"),
            *("run_validation", "val_batch_size", "max_eval_step", "eval_every_steps", "eval_before_training"),
            *("evals_per_epoch",),
            *("eval_generate", "num_beams", "max_new_tokens", "max_generate_samples"),
            *("output_dir", "overwrite", "resume", "resume_anyway", "save_every_steps", "save_every_minutes"),
            *("keep_last", "keep_best", "async_save", "save_model", "save_dtype", "save_optimizer"),
            *("dist_checkpoint_root_folder", "dist_checkpoint_folder"),
        ),
        "fsdp_config": ("checkpoint_type", "compile_optimizer"),
        "preference_config": ("share_prompts",),  # the checkpoint decides (`resolving.shared_prompts`)
    }
)
"""Settings that do not change the result. Every other one must be as in the checkpoint, settings added later too."""

DECIDE_TENSORS = _dotted(
    {
        "train_config": ("use_peft", "peft_method", "peft_dtype", "add_special_tokens"),
        "lora_config": ("r", "target_modules", "use_dora"),
        "llama_adapter_config": ("adapter_len", "adapter_layers"),
        "prefix_config": ("num_virtual_tokens",),
    }
)
"""Settings that decide which tensors a checkpoint holds and their shapes. If they differ, it cannot be loaded."""


def check_same(
    checkpoint: Checkpoint, config: RunConfig, metadata: Mapping[str, Any], *, num_steps: int | None = None
) -> list[str]:
    """Refuse to go on if the result would differ.

    Args:
        metadata: facts of precision, data or model that are known by now, by their names in state.json.
        num_steps: of the whole run; if given, the settings are compared too.

    Returns:
        Lines to print: with --resume_anyway, what has changed.

    Raises:
        ConfigError: it names every difference.
    """
    differences = {} if num_steps is None else _settings_that_differ(checkpoint, config, num_steps)
    # Earlier versions wrote no length of rows.
    compared = {name: (now, checkpoint.values.get(name, now)) for name, now in metadata.items()}
    compared.pop("packed_weights", None)
    if "train_config.context_length" in differences:  # which says it
        compared.pop("row_length", None)
    differences |= {name: _METADATA[name] for name, both in compared.items() if _is_another(name, *both)}
    if "model_config" in differences:
        differences["model_config"] = _what_differs(*compared["model_config"])
    if packed := _packed_otherwise(metadata.get("packed_weights"), checkpoint.values.get("packed_weights", _UNSAID)):
        differences["packed_weights"] = packed
    texts = list(dict.fromkeys(differences.values()))  # once for a field of two sections, which has one flag
    if differences and not config.train_config.resume_anyway:
        fits = DECIDE_TENSORS.isdisjoint(differences) and _has_states(
            checkpoint, config.train_config, config.fsdp_config
        )
        raise ConfigError(
            f"--resume: what differs from {checkpoint.folder} would change the result: {', '.join(texts)}; "
            f"give what was given there, or {'--resume_anyway' if fits else TRAIN_ON}"
        )
    _check_states(checkpoint, config.fsdp_config)
    return [f"resume_anyway: {text}" for text in texts]


def check_place(checkpoint: Checkpoint, *, num_steps: int, steps_per_epoch: int) -> None:
    """Refuse a place in the data that these data do not have.

    Args:
        num_steps: optimizer steps of the whole run. A run that has made them all reads no more data.

    Raises:
        ConfigError: if the epoch ends before the step of the epoch that the checkpoint is at.
    """
    state = checkpoint.values["state"]
    last = steps_per_epoch if state["epoch_end_due"] else steps_per_epoch - 1
    if state["step"] < num_steps and state["step_of_epoch"] > last:
        raise ConfigError(
            f"--resume: {checkpoint.folder}/{STATE} is at step {state['step_of_epoch']} of its epoch, and an epoch of "
            f"these data has {steps_per_epoch}; give the data that it was trained on, or another checkpoint"
        )


def trains_on(checkpoint: Checkpoint, num_steps: int) -> bool:
    """Whether a run of so many steps has any left after this checkpoint, or an evaluation that was due there."""
    state = checkpoint.values["state"]
    return state["step"] < num_steps or state["eval_due"] or state["epoch_end_due"]


def _has_states(checkpoint: Checkpoint, train: TrainConfig, fsdp: FsdpConfig) -> bool:
    """Whether its optimizer states can be loaded: of this optimizer, in the same dtype, for trained weights alone."""
    saved = checkpoint.values["settings"]
    there = saved["train_config"]
    num_frozen_there = there["num_freeze_layers"] if there["freeze_layers"] else 0
    num_frozen = train.num_freeze_layers if train.freeze_layers else 0
    # The dtype of adapters is --peft_dtype's, which is in DECIDE_TENSORS.
    same_dtype = train.use_peft or saved["fsdp_config"]["pure_bf16"] == fsdp.pure_bf16
    # A weight without states begins with new ones; states of a weight that is frozen now would be left over.
    return num_frozen <= num_frozen_there and same_dtype and _same_states(checkpoint, fsdp)


def _same_states(checkpoint: Checkpoint, fsdp: FsdpConfig) -> bool:
    """Whether the two optimizers keep the same states; a paged one only keeps them elsewhere."""
    there = checkpoint.values["settings"]["fsdp_config"]["optimizer"]
    # state.json may name an optimizer that this version does not have.
    return there in OPTIMIZERS and kind_of(fsdp.optimizer).has_states_of(kind_of(there))


def _is_another(name: str, now: Any, there: Any) -> bool:
    if name == "base_fingerprint":  # None if all weights are trained, and so saved
        return None not in (now, there) and now != there
    if name == "model_config":
        now, there = now | _NOT_COMPARED, there | _NOT_COMPARED
    return bool(now != there)


def _what_differs(now: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """What made config.json another one: its positions alone, the labels of the data alone, or the model."""
    ropes = [describe_parameters(_of_text(values).get("rope_parameters")) for values in (now, there)]
    if ropes[0] != ropes[1] and _without_positions(now) == _without_positions(there):
        shown = f"rotary positions: {ropes[0]} (there {ropes[1]})"
        return f"{shown}, a factor that follows from the rows' length unless --rope_factor says it"
    of_labels = dict.fromkeys(("id2label", "label2id", "problem_type"))
    if not _is_another("model_config", {**now, **of_labels}, {**there, **of_labels}):
        return "the training data: other classes"
    return _METADATA["model_config"]


def _of_text(values: Mapping[str, Any]) -> Mapping[str, Any]:
    text: Mapping[str, Any] = values.get("text_config") or values
    return text


def _without_positions(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of what is compared of config.json, all that `policies.rope_scaling.scaled_values` leaves as it is."""
    of_positions = ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings", "head_dim")
    text = {**_of_text(values), **dict.fromkeys(of_positions)}
    return ({**values, "text_config": text} if values.get("text_config") else text) | _NOT_COMPARED


def _packed_otherwise(now: Mapping[str, int] | None, there: Mapping[str, int] | None) -> str:
    """How the weights that are packed differ from those under the checkpoint; empty if they do not, or if one of the
    bases is not quantized, which the flags say."""
    if now is None or there is None or there == now:
        return ""
    if there is not _UNSAID:
        return f"--quantization packs {_shown_packed(now)} (there {_shown_packed(there)})"
    if now["linear"] and now["experts"]:  # the choice of linear layers has not changed
        return f"--quantization packs {_shown_packed(now)} (there unsaid; earlier versions kept experts in bf16)"
    return ""


def _shown_packed(counts: Mapping[str, int]) -> str:
    return " and ".join(f"{counts[kind]:,} weights of {noun}" for kind, noun in _PACKED.items())


def _check_states(checkpoint: Checkpoint, fsdp: FsdpConfig) -> None:
    """Refuse an optimizer for which the checkpoint's states mean nothing."""
    if not _same_states(checkpoint, fsdp):
        there = checkpoint.values["settings"]["fsdp_config"]["optimizer"]
        raise ConfigError(
            f"--resume_anyway: {fsdp.optimizer} cannot go on with the states of {there} in "
            f"{checkpoint.folder}; give --optimizer {there}, or {TRAIN_ON}"
        )


TRAIN_ON = "train on from the run's weights with --model_name (from an adapter with --from_peft_checkpoint)"
_METADATA = {
    "precision": "the precision",
    "data_fingerprint": "the training data: other samples",
    "row_length": "rows of another length: a default becomes a multiple of --context_parallel_size",
    "model_config": "--model_name: another config.json",
    "base_fingerprint": "--model_name: other weights than those under the checkpoint's adapter or frozen layers",
}
_NOT_COMPARED = {"dtype": None, "eos_token_id": None}
"""Of config.json: the precision is compared separately, and end tokens follow from the data."""
_UNSAID: Mapping[str, int] = {}  # by versions that did not write what is packed
_PACKED = {"linear": "linear layers", "experts": "experts"}


def _settings_that_differ(checkpoint: Checkpoint, config: RunConfig, num_steps: int) -> dict[str, str]:
    saved, unused = checkpoint.values["settings"], set(DATASETS).difference(config.train_config.datasets)
    differences = {}
    for section, values in config.to_dict().items():
        # Trackers and plans change no number.
        if section in unused or section in ("tracking_config", "planning_config"):
            continue
        for field, value in values.items():
            name = f"{section}.{field}"
            there = saved.get(section, {}).get(field, _before_it_was_added(name, value))
            before, now = _meaning(name, there), _meaning(name, value)
            # Files may have moved; their tokens are compared, by data_fingerprint.
            if name not in MAY_CHANGE and field != "data_path" and _comparable(name, before) != _comparable(name, now):
                differences[name] = f"{flag(name)} {_shown(now)} (there {_shown(before)})"
    train = config.train_config
    by_length = f"--warmup_ratio {train.warmup_ratio:g} raises lr" if train.warmup_ratio else ""
    if train.scheduler not in ("step", "constant"):
        by_length = f"--scheduler {train.scheduler} lowers lr"
    if by_length and num_steps != checkpoint.values["num_steps"]:
        differences["num_steps"] = (
            f"{num_steps} optimizer steps (there {checkpoint.values['num_steps']}), over which {by_length}"
        )
    return differences


def _before_it_was_added(name: str, now: Any) -> Any:
    """What earlier versions did without this setting: its default, unless it has none."""
    default = SETTINGS[name].default
    if SETTINGS[name].is_required:
        return now
    return list(default) if isinstance(default, tuple) else default


def _meaning(name: str, value: Any) -> Any:
    """The value itself; for None the default that it stands for, which earlier versions saved in its place."""
    return SETTINGS[name].stands_for if value is None else value


_NAME_FILES = (
    *("custom_dataset.file", "chat_dataset.chat_template", "preference_dataset.chat_template"),
    "train_config.from_peft_checkpoint",
)


def _comparable(name: str, value: Any) -> Any:
    """The value, or a set if the order of its parts means nothing; a path's last part, since files may have moved."""
    if name in _NAME_FILES and value:
        return Path(value).name
    if name != "lora_config.target_modules":
        return value
    return {part.strip() for part in (value.split(",") if isinstance(value, str) else value)}


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
