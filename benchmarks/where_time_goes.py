"""Where the time of an optimizer step goes, for any command line of finetuning.py: milliseconds by kind of work.

    python -m benchmarks.where_time_goes [--nproc 2] -- --model_name M --pure_bf16 --compile ...
    python -m benchmarks.where_time_goes --traces outputs/run/profiler/*.json.gz

The run records three steps with --use_profiler; the table has a column for each rank. Kinds of work on several streams
may run at the same time, so their sum can be more than the step. "Of it not hidden" is communication while nothing
computes; "idle" is neither. On a CPU, the operators of all threads count. A traced step is slower than another, most of
all on a CPU; so compare shares of it.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.runs.launch import launch
from benchmarks.runs.trace_times import TraceTimes, read_trace, step_times

NEEDED = {"--max_train_step": "8", "--run_validation": "False", "--save_model": "False", "--save_every_steps": "0"}
"""What a short run should do, unless the command line says otherwise."""


def record(flags: Sequence[str], nproc: int, folder: Path) -> list[Path]:
    """The traces of a run's ranks.

    Raises:
        SystemExit: if the run did not finish.
    """
    names = {word.partition("=")[0] for word in flags if word.startswith("--")}
    more = [word for name, value in NEEDED.items() if name not in names for word in (name, value)]
    more += [] if "--output_dir" in names else ["--output_dir", str(folder / "run")]
    flags = [*flags, *more, "--use_profiler", "--profiler_dir", str(folder / "traces")]
    print("$ finetuning.py", shlex.join(flags), flush=True)
    if failure := launch(flags, nproc, by_torchrun="--enable_fsdp" in names):
        sys.exit(failure)
    return sorted((folder / "traces").iterdir())


def table(by_rank: Mapping[str, TraceTimes]) -> list[str]:
    """The lines of the table, in Markdown."""
    lines = [f"| ms per step | {' | '.join(by_rank)} |", "|---" * (len(by_rank) + 1) + "|"]
    for row in next(iter(by_rank.values())).rows:
        lines.append(f"| {row} | " + " | ".join(f"{times.rows[row]:.1f}" for times in by_rank.values()) + " |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    own, flags = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=1, help="processes, one per GPU")
    parser.add_argument("--traces", type=Path, nargs="+", help="of an earlier run, instead of flags")
    options = parser.parse_args(own)
    if bool(flags) == bool(options.traces):
        parser.error("give --traces, or the flags of a run after --")
    with tempfile.TemporaryDirectory() as folder:
        paths = options.traces or record(flags, options.nproc, Path(folder))
        by_rank = {}
        for path in paths:
            found = re.match(r"rank\d+", path.name)
            by_rank[found[0] if found else path.name] = step_times(read_trace(path))
    print("", *table(by_rank), sep="\n")
    for rank, times in by_rank.items():
        for name, milliseconds in times.other_names_ms.items():
            print(f"other on {rank}: {milliseconds:.2f} ms in {name[:100]}")
        for name, milliseconds in times.idle_before_ms.items():
            print(f"idle on {rank}: {milliseconds:.2f} ms before {name[:100]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
