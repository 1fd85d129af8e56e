"""--dry_run: the plan of a run, printed, and written as JSON if asked for. Nothing else is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from configs.absolute_paths import make_paths_absolute
from configs.changed_flags import changed_flags
from configs.run import RunConfig
from planning.alternatives.what_fits import NOTHING_FITS, fits_table, predictor, what_fits
from planning.data_at_hand import data_at_hand
from planning.larger_micro_batch import larger_micro_batch
from planning.machines.planned_environment import describes_hardware, planned_environment, planned_hardware
from planning.plan_table import parts_table, plan_table, verdict_line
from planning.planned_run import plan_of
from policies.quantization.choice import resolve_quantization
from policies.quantization.float8 import resolve_float8
from ranks.environment import Environment, print_rank_zero
from reporting.tables import print_for_people
from resolving.batches_and_steps import with_batches
from resolving.inputs import check_targets
from resolving.resolved import Resolved, resolve
from resolving.resume_state import look
from resolving.sizes import check_model_sizes
from utils.atomic_write import write_in_place
from utils.errors import ConfigError
from utils.progress import say_if_it_lasts


def dry_run(argv: Sequence[str], config: RunConfig, env: Environment) -> None:
    """Print the plan of the run that these flags would start. Only rank 0 of a launched run has anything to do.

    If no hardware is named the plan is for this machine, and refuses whatever the run would refuse here.

    Args:
        argv: the run's flags.

    Raises:
        ConfigError: if the run would be refused.
        FileWriteError: if the disk refuses the JSON; the plan has been printed.
    """
    if not env.is_rank_zero:
        return
    config = make_paths_absolute(config, env.started_in)
    planning, train = config.planning_config, config.train_config
    report = None if planning.dry_run_json is None else _checked(Path(planning.dry_run_json))
    is_here = not describes_hardware(planning)
    hardware = planned_hardware(train, planning, env)
    planned_env = planned_environment(hardware, train)
    if is_here:
        # --enable_fsdp stands for the launcher, which has not started anything yet.
        look(config, replace(env, launched=env.launched or train.enable_fsdp))
    resolved = resolve(config, planned_env)
    check_targets(resolved)
    if is_here:
        _check_device(resolved, env)
    resolved, data = data_at_hand(resolved, planned_env, is_here=is_here)
    if resolved.batch_flags:
        config, argv = with_batches(config, resolved.batches), changed_flags(argv, resolved.batch_flags)
    planned = say_if_it_lasts("planning this run")
    try:
        plan = plan_of(config, hardware, data)
    except NotImplementedError as error:  # of the meta device
        raise ConfigError(
            f"--dry_run: the code of {config.train_config.model_name} asks for values of tensors, which a plan does "
            "not have; leave it out: the run goes on without a plan, and says so"
        ) from error
    finally:
        planned()
    print_rank_zero(env, *plan.notes)
    print_for_people("", plan_table(plan), "", parts_table(plan.memory), "")
    faster = None if plan.memory.verdict == "does_not_fit" else larger_micro_batch(plan, data)
    print_rank_zero(env, verdict_line(plan), *filter(None, [faster]))
    changes = []
    if plan.memory.verdict == "does_not_fit":
        predict = predictor(config, data, env)
        changes = what_fits(argv, predict(config), predict)
        print_for_people("", fits_table(changes, plan.memory) if changes else NOTHING_FITS)
    if report is not None:
        values = plan.to_dict() | {"what_fits": [change.to_dict() for change in changes]}
        write_in_place(report, json.dumps(values, indent=2) + "\n")


def _check_device(resolved: Resolved, env: Environment) -> None:
    """Refuse what the devices of this machine cannot do."""
    config, policies = resolved.config, resolved.policies
    resolve_quantization(config.quantization_config, policies.precision, policies.layout, env.device)
    resolve_float8(
        config.train_config, policies.precision, policies.layout, resolved.widths, env.device_facts, env.device
    )
    check_model_sizes(config, resolved.model_config, resolved.context_length, env)


def _checked(path: Path) -> Path:
    """The path, if a file can be written there."""
    if path.is_dir() or not path.parent.is_dir():
        reason = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(f"--dry_run_json: {path} cannot be written ({reason}); give the path of a file")
    return path
