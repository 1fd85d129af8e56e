"""Settings of the training: model, data, batches, schedule, evaluation and results."""

from dataclasses import dataclass

from configs.train_settings.data import DataSettings
from configs.train_settings.evaluation import EvaluationSettings
from configs.train_settings.model import ModelSettings
from configs.train_settings.results import ResultSettings
from configs.train_settings.schedule import ScheduleSettings


# Fields of later bases come first: --help and run.yaml begin with the model and end with the results.
@dataclass(frozen=True)
class TrainConfig(ResultSettings, EvaluationSettings, ScheduleSettings, DataSettings, ModelSettings):
    """The model, the batches, the schedule and where the results go."""
