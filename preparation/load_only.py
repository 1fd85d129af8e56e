"""--load_only: load the model as a run would, and print each rank's memory."""

from __future__ import annotations

from configs.run import RunConfig
from planning.load_check import load_table, loaded_on_all
from preparation.building import build_model
from preparation.start import follow_plan, join_ranks_of_rows, meet_ranks, start_ranks
from ranks.environment import Environment, print_rank_zero
from reporting.tables import print_for_people
from resolving.data_facts import DataFacts
from resolving.inputs import check_targets
from resolving.preflight import check_environment
from resolving.resolved import resolve
from run_folder.run_folder import RunFolder
from supervision.watchdog import Watchdog


def load_only(config: RunConfig, env: Environment, watchdog: Watchdog) -> None:
    """Load the model as a run would, and print each rank's memory, measured and planned. It reads no data.

    Raises:
        ConfigError: if the run is refused.
    """
    config, meeting = meet_ranks(config, env)
    with meeting.sharing_refusals():
        check_environment(config, env)
        RunFolder.plan(config, env).check_usable(is_rank_zero=env.is_rank_zero)
        resolved = resolve(config, env)
        check_targets(resolved)
        processor = resolved.task.load_processor(config.train_config)
        print_rank_zero(env, *resolved.config.notes, *resolved.notes)
        start_ranks(meeting, config, env, watchdog)
    resolved = join_ranks_of_rows(resolved, env)
    resolved, plan = follow_plan(resolved, env, lambda: DataFacts.of_processor(processor, resolved))
    built = build_model(resolved, processor, env)
    print_rank_zero(env, *plan.notes)
    found = loaded_on_all(built.model, env)
    if env.is_rank_zero:
        print_for_people("", load_table(found, plan.values), "", f"loaded in {built.load_seconds:.1f} s")
    watchdog.stop()
