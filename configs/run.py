"""All settings of one run in one frozen object."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, get_type_hints

from configs.datasets import CustomDataset, DataSource, split_paths
from configs.formats import DATASETS
from configs.fsdp import FsdpConfig
from configs.peft import LlamaAdapterConfig, LoraConfig, PrefixConfig
from configs.planning import PlanningConfig
from configs.preference import PreferenceConfig
from configs.quantization import QuantizationConfig
from configs.setting import Setting, settings_of
from configs.tracking import TrackingConfig
from configs.training import TrainConfig
from utils.urls import without_secrets


@dataclass(frozen=True)
class RunConfig:
    """The settings of a run. Each section is named like the prefix of its flags.

    `datasets` holds a section for every dataset, chosen or not, by its name; those that are left out have defaults.
    `given` holds the dotted names of the settings in flags or the recipe ("fsdp_config.pure_bf16"). `notes` holds one
    line for each adapted setting; the run prints them. `recipe` is the file of --config.
    """

    train_config: TrainConfig
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    lora_config: LoraConfig = field(default_factory=LoraConfig)
    llama_adapter_config: LlamaAdapterConfig = field(default_factory=LlamaAdapterConfig)
    prefix_config: PrefixConfig = field(default_factory=PrefixConfig)
    quantization_config: QuantizationConfig = field(default_factory=QuantizationConfig)
    preference_config: PreferenceConfig = field(default_factory=PreferenceConfig)
    datasets: Mapping[str, DataSource] = field(default_factory=dict, hash=False)
    tracking_config: TrackingConfig = field(default_factory=TrackingConfig)
    planning_config: PlanningConfig = field(default_factory=PlanningConfig)
    given: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    recipe: str | None = None

    def value(self, name: str) -> Any:
        """The value of a setting by its dotted name."""
        section, field_name = name.split(".")
        return getattr(self.section(section), field_name)

    def section(self, name: str) -> Any:
        """The settings of one section."""
        return self.datasets[name] if name in DATASETS else getattr(self, name)

    def with_sections(self, sections: Mapping[str, Any]) -> "RunConfig":
        """The settings with these sections, by name, in place of their own."""
        datasets = {name: section for name, section in sections.items() if name in DATASETS}
        others = {name: section for name, section in sections.items() if name not in DATASETS}
        return replace(self, datasets={**self.datasets, **datasets}, **others)

    def __post_init__(self) -> None:
        every = {name: self.datasets.get(name) or settings() for name, settings in DATASETS.items()}
        object.__setattr__(self, "datasets", every)  # a frozen dataclass has no other way

    @property
    def custom_dataset(self) -> CustomDataset:
        """The settings of the user's own data."""
        custom = self.datasets["custom_dataset"]
        assert isinstance(custom, CustomDataset)
        return custom

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
        return {name: self.datasets[name] for name in self.train_config.datasets}

    @property
    def sources(self) -> dict[str, DataSource]:
        """The parts of the mix, by their names in messages: the datasets, or the files of one dataset with weights."""
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
        return any(self.datasets[name].streaming for name in self.train_config.datasets if name in DATASETS)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """All settings by section and name, in plain types, as in run.yaml: without the secrets of URLs."""
        return {
            section: {name: _plain(value) for name, value in asdict(self.section(section)).items()}
            for section in SECTIONS
        }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return without_secrets(value) if isinstance(value, str) else value


_TYPES = get_type_hints(RunConfig)

SECTIONS: dict[str, type] = {
    name: section
    for f in fields(RunConfig)
    for name, section in (DATASETS if f.name == "datasets" else {f.name: _TYPES[f.name]}).items()
    if is_dataclass(section)
}
"""Config classes by section name, the prefix of their flags."""

SETTINGS: dict[str, Setting] = {
    f"{section}.{name}": setting for section, cls in SECTIONS.items() for name, setting in settings_of(cls).items()
}
"""All settings by dotted name."""
