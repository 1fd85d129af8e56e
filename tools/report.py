"""Write one HTML page about one or more runs, or serve it while they go on.

    python -m tools.report RUN [RUN ...] [--out FILE] [--price_per_hour P]
    python -m tools.report RUN [RUN ...] --watch [--port N] [--price_per_hour P]

RUN is a run folder (--output_dir). The page of one run is written into its folder as report.html, that of several into
the working directory; --out names another file. It needs nothing but itself: it can be mailed, and opened offline.
--watch serves it on this machine alone until Ctrl-C, and waits for runs that are not there yet.
Exit status: 0 done, 1 a file could not be read or written, 2 refused.
"""

from __future__ import annotations

import argparse
import math
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

# Before the imports below, which take a while.
if __name__ == "__main__":
    from tools.beginning import begin_tool

    begin_tool()

from reporting.report.live import LivePage, ReportServer
from reporting.report.page import write_report
from reporting.report.run_files import holds_run
from run_folder.entries import REPORT as NAME
from supervision.exit_status import FAILED, REFUSED
from tools.beginning import begin_work
from utils.errors import ConfigError, in_one_line
from utils.printing import print_line
from utils.urls import refuse_url
from utils.wording import plural

_LOOK_SECONDS = 2.0


def check(given: argparse.Namespace) -> None:
    """Refuse flags that cannot hold.

    Raises:
        ConfigError: one line with the flag, the reason and the remedy.
    """
    price = given.price_per_hour
    if price is not None and not 0 <= price < math.inf:
        raise ConfigError(f"--price_per_hour: {price} is not a price; give a number from 0 on")
    if given.port is not None and not given.watch:
        raise ConfigError("--port: is for --watch; give both, or neither")
    if given.port is not None and not 0 <= given.port < 2**16:
        raise ConfigError(f"--port: {given.port} is not a port; give 1 to 65535, or leave it out for a free one")
    if given.out is not None and given.watch:
        raise ConfigError("--out: --watch writes no file; leave one of them out")
    if len({run.absolute() for run in given.runs}) < len(given.runs):
        raise ConfigError("RUN: a run is given twice; give each once")
    if given.out is not None:
        refuse_url("--out", str(given.out))
    if given.out is not None and not given.out.parent.is_dir():
        raise ConfigError(f"--out: there is no folder {given.out.parent}; make it, or give another file")
    for run in given.runs:
        if not given.watch and not holds_run(run):
            raise ConfigError(
                f"RUN: {run} holds no run (neither run.yaml nor metrics.jsonl); give the folder of a run, or --watch "
                "to wait for it"
            )


def write(given: argparse.Namespace) -> None:
    target = given.out or (given.runs[0] / NAME if len(given.runs) == 1 else Path(NAME))
    size = write_report(given.runs, target, price_per_hour=given.price_per_hour)
    print_line(f"{target}: {plural(len(given.runs), 'run')}, {size / 1024:,.0f} KiB")


def watch(given: argparse.Namespace) -> None:
    """Serve until Ctrl-C."""
    page = LivePage(given.runs, price_per_hour=given.price_per_hour, say=print_line)
    try:
        server = ReportServer(page, given.port or 0)
    except OSError as error:
        raise ConfigError(
            f"--port: {given.port} cannot be used ({error.strerror}); give another, or leave it out for a free one"
        ) from error
    with server:
        print_line(f"serving {server.url} until Ctrl-C; from elsewhere: ssh -L PORT:{server.url[7:-1]} THIS_MACHINE")
        threading.Thread(target=server.serve_forever, daemon=True).start()  # this thread prints, and takes Ctrl-C
        while True:
            page.say_changes()
            threading.Event().wait(_LOOK_SECONDS)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder")
    parser.add_argument("--out", type=Path, help="the file to write (RUN/report.html; of several runs report.html)")
    parser.add_argument("--price_per_hour", type=float, help="of each machine, in any currency: the page shows prices")
    parser.add_argument("--watch", action="store_true", help="serve the page while the runs go on; write no file")
    parser.add_argument("--port", type=int, help="of --watch (a free one)")
    given = parser.parse_args(argv)
    begin_work()
    try:
        check(given)
        watch(given) if given.watch else write(given)
    except KeyboardInterrupt:
        return 0
    except ConfigError as error:
        print_line(f"error: {error}", to_stderr=True)
        return REFUSED
    except OSError as error:
        print_line(f"error: {in_one_line(error)}", to_stderr=True)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
