"""Plan a run: the memory of each rank, whether it fits, its time and its price.

    python -m tools.plan --model_name M --enable_fsdp --dry_run_hardware 4xV100-32GB
    python -m tools.plan --find [--sort time|price] --model_name M --dry_run_hardware 4xV100-32GB

The other flags are those of finetuning.py, which it runs with --dry_run (docs/planning.md). --find plans every
combination of method, precision, optimizer, strategy and micro-batch instead, and prints a table. Exit status: 0
whatever the verdict; 2 refused, as the run would be; 1 if the file of --dry_run_json could not be written.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.beginning import begin_tool
from tools.ending import status_of
from utils.compiled_code import keep_compiled_code
from utils.quiet import quiet_libraries
from utils.slow_imports import begin_imports

SCRIPT = Path(__file__).resolve().parent.parent / "finetuning.py"
NUM_COMMANDS = 3


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if "--find" in words and {"--help", "-h"}.intersection(words):
        print(__doc__)
        return 0
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--find", action="store_true")
    parser.add_argument("--sort", choices=("time", "price"), default="time")
    given, flags = parser.parse_known_args(words) if "--find" in words else (None, words)
    # As "--dry_run", "--dry-run" or "--dry_run=True".
    asked = [] if any(word.partition("=")[0].replace("-", "_") == "__dry_run" for word in flags) else ["--dry_run"]
    if given is None:
        return subprocess.run([sys.executable, str(SCRIPT), *flags, *asked]).returncode
    return status_of(lambda: find([*flags, *asked], given.sort))


def find(argv: Sequence[str], sort: str) -> None:
    """Print the table of runs, and the commands of the first ones.

    Raises:
        ConfigError: if no run could be planned.
    """
    keep_compiled_code()
    imports_ended = begin_imports()
    from configs.flags import parse_flags
    from planning.alternatives.find_runs import command_of, find_runs, find_table, sorted_runs
    from planning.alternatives.what_fits import predictor
    from planning.data_at_hand import data_at_hand
    from planning.machines.planned_environment import planned_environment, planned_hardware
    from ranks.environment import read_environment
    from reporting.tables import print_for_people
    from resolving.resolved import resolve

    imports_ended()
    config, env = parse_flags(argv), read_environment()
    quiet_libraries()
    hardware = planned_hardware(config.train_config, config.planning_config, env)
    planned_env = planned_environment(hardware, config.train_config)
    _, data = data_at_hand(resolve(config, planned_env), planned_env, is_here=False)
    found = find_runs(argv, config, hardware, predictor(config, data, env))
    ordered = sorted_runs(found, "price" if sort == "price" else "time")
    print_for_people(*data.notes, "", find_table(ordered), "")
    for one in [one for one in ordered if one.fits][:NUM_COMMANDS]:
        print_for_people(command_of(one, argv))


if __name__ == "__main__":
    begin_tool()
    sys.exit(main())
