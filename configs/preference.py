"""Settings of the losses that learn which of two answers is preferred (--loss_type dpo, simpo, orpo)."""

from dataclasses import dataclass
from typing import Literal, get_args

from configs.setting import setting

PREFERENCE = "preference"
"""The task of these losses (`tasks.preference`)."""

REWARD_MODEL = "reward_model"
"""The task that learns a score from pairs of answers (`tasks.reward_model`)."""

LossType = Literal["dpo", "simpo", "orpo"]

PREFERENCE_LOSSES: tuple[LossType, ...] = get_args(LossType)
"""The values of --loss_type that need pairs of answers."""

DEFAULT_BETA: dict[LossType, float] = {"dpo": 0.1, "simpo": 2.0}
"""That of the DPO paper, and of the SimPO paper, whose log-probabilities are means over tokens."""

TAKEN_BY: dict[str, tuple[LossType, ...]] = {
    "beta": ("dpo", "simpo"),
    "preference_smoothing": ("dpo", "simpo"),
    "simpo_gamma": ("simpo",),
    "length_normalized": ("simpo",),
    "orpo_weight": ("orpo",),
    "share_prompts": PREFERENCE_LOSSES,
}
"""The losses that have each setting."""


@dataclass(frozen=True)
class PreferenceConfig:
    """Losses of chosen and rejected answers; need --loss_type dpo, simpo or orpo."""

    beta: float | None = setting(
        None,
        "how much a difference of log-probabilities counts (dpo: to those before training)",
        exclusive_minimum=0,
        default_text="0.1 for dpo, 2 for simpo",
    )
    preference_smoothing: float = setting(
        0.0,
        "share of pairs that are taken to be labelled the wrong way round (dpo, simpo)",
        minimum=0,
        exclusive_maximum=0.5,
    )
    simpo_gamma: float = setting(1.0, "margin between the rewards of both answers that is aimed at (simpo)", minimum=0)
    length_normalized: bool = setting(
        True, "compare mean log-probabilities of tokens; False: their sums over an answer (simpo)"
    )
    orpo_weight: float = setting(
        0.1, "weight of the odds ratio beside the chosen answer's cross-entropy (orpo)", exclusive_minimum=0
    )
    share_prompts: bool = setting(
        True, "compute the prompt of both answers once, in packed rows, if the model's attention can"
    )

    def beta_of(self, loss_type: LossType) -> float:
        """Beta, or the default of this loss."""
        return DEFAULT_BETA.get(loss_type, 0.0) if self.beta is None else self.beta
