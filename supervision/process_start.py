"""The first moments of a process, before torch and transformers are imported, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from supervision.exit_status import let_ctrl_c_end_this
from supervision.failures import end_unless_flags_hold
from utils.slow_imports import begin_imports
from utils.streams import keep_standard_streams


def begin_process(argv: Sequence[str]) -> Callable[[], None]:
    """Prepare the standard streams and signals, and end the process at once if the flags are refused or ask for help.

    Returns:
        A function to call when the imports have ended.
    """
    # The order matters: nobody may keep a stream before it is replaced, and flags are refused before slow imports.
    keep_standard_streams()
    let_ctrl_c_end_this()
    end_unless_flags_hold(argv)
    return begin_imports()
