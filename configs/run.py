"""All settings of one run in one frozen object."""

import os
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, get_type_hints

from configs.datasets import (
    AlpacaDataset,
    CaptionDataset,
    ChatDataset,
    CustomDataset,
    DataSource,
    GrammarDataset,
    InstructionDataset,
    SamsumDataset,
    SegmentsDataset,
    TextDataset,
    split_paths,
)
from configs.fsdp import FsdpConfig
from configs.peft import LlamaAdapterConfig, LoraConfig, PrefixConfig
from configs.planning import PlanningConfig
from configs.quantization import QuantizationConfig
from configs.setting import Setting, settings_of
from configs.tracking import TrackingConfig
from configs.training import TrainConfig


@dataclass(frozen=True)
class RunConfig:
    """The settings of a run. Each section is named like the prefix of its flags.

    `given` holds the dotted names of the settings in flags or the recipe ("fsdp_config.pure_bf16"). `notes` holds one
    line for each adapted setting; the run prints them. `recipe` is the file of --config.
    """

    train_config: TrainConfig
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    lora_config: LoraConfig = field(default_factory=LoraConfig)
    llama_adapter_config: LlamaAdapterConfig = field(default_factory=LlamaAdapterConfig)
    prefix_config: PrefixConfig = field(default_factory=PrefixConfig)
    quantization_config: QuantizationConfig = field(default_factory=QuantizationConfig)
    samsum_dataset: SamsumDataset = field(default_factory=SamsumDataset)
    alpaca_dataset: AlpacaDataset = field(default_factory=AlpacaDataset)
    grammar_dataset: GrammarDataset = field(default_factory=GrammarDataset)
    chat_dataset: ChatDataset = field(default_factory=ChatDataset)
    instruction_dataset: InstructionDataset = field(default_factory=InstructionDataset)
    text_dataset: TextDataset = field(default_factory=TextDataset)
    segments_dataset: SegmentsDataset = field(default_factory=SegmentsDataset)
    caption_dataset: CaptionDataset = field(default_factory=CaptionDataset)
    custom_dataset: CustomDataset = field(default_factory=CustomDataset)
    tracking_config: TrackingConfig = field(default_factory=TrackingConfig)
    planning_config: PlanningConfig = field(default_factory=PlanningConfig)
    given: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    recipe: str | None = None

    def value(self, name: str) -> Any:
        """The value of a setting by its dotted name."""
        section, field_name = name.split(".")
        return getattr(getattr(self, section), field_name)

    def was_given(self, name: str) -> bool:
        """Whether a flag or the recipe set `name` (dotted).

        Raises:
            KeyError: if there is no such setting.
        """
        if name not in SETTINGS:
            raise KeyError(name)
        return name in self.given

    @property
    def dataset_configs(self) -> dict[str, DataSource]:
        """The settings of the run's datasets, in the order of `--dataset`."""
        return {name: getattr(self, name) for name in self.train_config.datasets}

    @property
    def sources(self) -> dict[str, DataSource]:
        """What is mixed, by its name in messages: the datasets; of one dataset with weights, the parts of data_path."""
        configs = self.dataset_configs
        (name, config), *others = configs.items()
        if others or not self.train_config.dataset_weights or config.data_path is None:
            return configs
        parts = split_paths(config.data_path)
        short = [os.path.basename(part) for part in parts]
        labels = short if len(set(short)) == len(parts) else parts
        return {f"{name} {label}": replace(config, data_path=part) for label, part in zip(labels, parts, strict=True)}

    @property
    def streams(self) -> bool:
        """Whether the training examples are streamed."""
        return any(getattr(self, name).streaming for name in self.train_config.datasets if name in DATASETS)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """All settings by section and name, in plain types, as in run.yaml."""
        return {
            section: {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(getattr(self, section)).items()}
            for section in SECTIONS
        }


_TYPES = get_type_hints(RunConfig)

SECTIONS: dict[str, type] = {f.name: _TYPES[f.name] for f in fields(RunConfig) if is_dataclass(_TYPES[f.name])}
"""Config classes by section name, the prefix of their flags."""

SETTINGS: dict[str, Setting] = {
    f"{section}.{name}": setting for section, cls in SECTIONS.items() for name, setting in settings_of(cls).items()
}
"""All settings by dotted name."""

DATASETS: tuple[str, ...] = tuple(section for section in SECTIONS if section.endswith("_dataset"))
"""The sections of datasets, which are the names that --dataset knows."""


def dataset_of(config: DataSource) -> str:
    """The name that `--dataset` has for the dataset with these settings."""
    return next(name for name in DATASETS if isinstance(config, SECTIONS[name]))
