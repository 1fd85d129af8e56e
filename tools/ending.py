"""How the tools end: a refusal, a failure or a disk's error is one line and the exit status; Ctrl-C ends silently."""

from __future__ import annotations

import signal
from collections.abc import Callable

from supervision.exit_status import FAILED, REFUSED, let_ctrl_c_end_this
from tools.beginning import begin_work
from utils.disk_errors import disk_refusal
from utils.errors import ConfigError, RunError, in_one_line
from utils.printing import print_line

_NO_HOME = "Could not determine home directory."  # pathlib's RuntimeError, of ~NAME without such a user


def status_of(work: Callable[[], object]) -> int:
    """Do a tool's work. Returns the exit status: 0, or 2 refused, or 1 failed, its error printed."""
    begin_work()
    try:
        work()
    except RunError as error:
        print_line("error: " + "\n".join(error.parts()), to_stderr=True)
        return REFUSED if isinstance(error, ConfigError) else FAILED
    except Exception as error:
        if str(error) == _NO_HOME:
            line = "error: a path begins with ~ and the name of nobody on this machine; write the whole path"
            print_line(line, to_stderr=True)
            return REFUSED
        if (reason := disk_refusal(error)) is None:
            raise
        what = in_one_line(f"{getattr(error, 'filename', None) or 'a file'} cannot be read or written ({reason})")
        print_line(f"error: {what}; mend that, and give the same command", to_stderr=True)
        return FAILED
    except KeyboardInterrupt:  # half-written files have been deleted on its way here
        let_ctrl_c_end_this()
        signal.raise_signal(signal.SIGINT)  # a shell sees that the signal ended it, and ends its loop, too
        return FAILED  # if somebody else's handler took the signal
    return 0
