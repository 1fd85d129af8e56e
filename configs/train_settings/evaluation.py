"""Settings of evaluations: when, of how much, and what decides which is the best."""

import math
from dataclasses import dataclass

from configs.setting import setting

DIVERGENCE_STEPS = 20
"""The mean loss of so many steps is compared with that of the run's first ones."""
DIVERGENCE_FACTOR = 1.5


@dataclass(frozen=True)
class EvaluationSettings:
    """What is measured while a run trains, and what it decides."""

    run_validation: bool | None = setting(
        None, "evaluate at the end of each epoch", stands_for=True, default_text="True if there is validation data"
    )
    val_batch_size: int = setting(1, "rows per rank per evaluation batch", unit="rows", minimum=1)
    max_eval_step: int = setting(0, "end an evaluation after so many batches; 0: no limit", unit="batches", minimum=0)
    eval_every_steps: int = setting(
        0, "also evaluate every so many optimizer steps; 0: only at the end of each epoch", unit="steps", minimum=0
    )
    evals_per_epoch: int = setting(
        0,
        "eval_every_steps as a number of evaluations in an epoch, its end counted; 0: as eval_every_steps says",
        unit="evaluations",
        minimum=0,
    )
    eval_before_training: bool = setting(False, "evaluate once before the first step")
    early_stopping_patience: int = setting(
        0,
        "end the run after so many evaluations in a row that are not the best (best_metric); 0: take all its steps",
        unit="evaluations",
        minimum=0,
    )
    stop_on_divergence: bool = setting(
        False,
        f"end the run, with a checkpoint and as failed, if the mean loss of the last {DIVERGENCE_STEPS} steps is over "
        f"{DIVERGENCE_FACTOR:g} times that of its first {DIVERGENCE_STEPS}; without this, a line says so",
    )
    eval_generate: bool = setting(
        False,
        "also let the model answer the validation prompts at each evaluation, and measure the answers, by ROUGE or "
        "as eval_metric says",
    )
    eval_metric: tuple[str, ...] = setting(
        (),
        "measures of the answers: rouge, exact_match, choice, chrf, json, or your own as FILE.py:FUNCTION, which gets "
        "prompt, reference and answer and returns a number or several by name; several as a,b (eval_generate)",
        default_text="rouge",
    )
    eval_json_schema: str | None = setting(
        None, "file with a JSON schema that answers must fit (eval_metric json)", is_path=True
    )
    temperature: float = setting(
        0.0, "draw the answers at this temperature, by seed; 0: none is drawn (eval_generate)", minimum=0, maximum=100
    )
    top_p: float = setting(
        1.0,
        "draw among the likeliest tokens that have this probability together (temperature)",
        exclusive_minimum=0,
        maximum=1,
    )
    num_beams: int = setting(1, "beams of the beam search (eval_generate); 1: greedy", unit="beams", minimum=1)
    max_new_tokens: int = setting(
        128, "longest answer that is generated (eval_generate)", unit="tokens", minimum=1, maximum=10**6
    )
    max_generate_samples: int = setting(
        0,
        "generate for so many of the evaluated samples, evenly spaced over the set (eval_generate); 0: for all",
        unit="samples",
        minimum=0,
    )
    best_metric: str = setting(
        "eval_loss",
        "metric by which an evaluation is the best, whose weights are saved: eval_loss, the lowest, or the highest of "
        "ROUGE's rouge1, rouge2, rougeL, exact_match, choice, chrf, json_valid, json_match or your own (eval_metric)",
    )

    def eval_every(self, steps_per_epoch: int) -> int:
        """Optimizer steps from one evaluation to the next; 0: only at the end of each epoch."""
        return math.ceil(steps_per_epoch / self.evals_per_epoch) if self.evals_per_epoch else self.eval_every_steps
