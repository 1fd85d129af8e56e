"""Clock and power of the GPUs while something runs, as nvidia-smi tells them."""

from __future__ import annotations

import shutil
import statistics
import subprocess
from types import TracebackType

QUERY = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "--loop-ms=500"]


class CardSamples:
    """Samples clock and power twice a second between entering and leaving; nothing where there is no nvidia-smi."""

    def __enter__(self) -> CardSamples:
        self._process = None
        self._said = ""
        if shutil.which("nvidia-smi"):
            self._process = subprocess.Popen(QUERY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._said = self._process.communicate()[0]

    @property
    def figures(self) -> dict[str, float]:
        """Medians of the samples at work: SM clock in MHz, power in W; empty if there are none."""
        return at_work(self._said)


def at_work(said: str) -> dict[str, float]:
    """Medians over the samples that draw three quarters of the largest power or more: steps, not loading."""
    samples = [tuple(map(float, line.split(","))) for line in said.splitlines() if line.replace(" ", "")[:1].isdigit()]
    busy = [sample for sample in samples if sample[1] >= 0.75 * max(power for _, power in samples)]
    if not busy:
        return {}
    return {"sm_mhz": statistics.median(clock for clock, _ in busy), "watts": statistics.median(w for _, w in busy)}
