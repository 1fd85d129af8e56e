"""A run's output while it trains: events in metrics.jsonl, log lines, an epoch's bar, the tables at the end.

Rank 0 writes. Every rank makes the same calls, since some gather figures from all ranks.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from configs.tracking import TrackingConfig
from data.batches.counts import LABEL_TOKENS, BatchCounts
from ranks.collectives import gather_to_all
from ranks.environment import Environment, print_rank_zero
from reporting.allocator_retries import AllocatorRetries
from reporting.end_summary import end_figures, end_summary
from reporting.epoch_lines import epoch_line
from reporting.expert_line import expert_line
from reporting.instruments import DataWait, Instruments, StepRecord
from reporting.llama_recipes_lists import write_metrics_data
from reporting.log_line import TimeLeft, clock, log_line, perplexity, shown_perplexity
from reporting.memory_ledger import is_observed_step
from reporting.memory_table import MemoryTable
from reporting.metrics_file import MetricsFile
from reporting.report.page import write_at_end
from reporting.samples import NUM_PRINTED, sample_lines
from reporting.tables import print_for_people
from run_folder.saved_weights import SavedWeights
from utils.printing import print_line
from utils.progress import phase, progress_bar
from utils.units import GIB
from utils.wording import plural

T = TypeVar("T")

BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]"
"""tqdm's, without the time that is left of the bar itself."""


@dataclass(frozen=True)
class RunSpan:
    """The part of the run that this session trains."""

    num_epochs: int
    num_steps: int  # optimizer steps of the whole run
    after_step: int  # the step that a resumed run goes on after; 0 if it starts afresh


class RunReporter:
    """Reports one run, in one session."""

    def __init__(
        self,
        tracking: TrackingConfig,
        env: Environment,
        folder: Path,
        span: RunSpan,
        instruments: Instruments,
        *,
        metrics: MetricsFile,
        samples: MetricsFile,
        mean_over: str,
        compiles: bool,
    ) -> None:
        """
        Args:
            folder: the run's.
            samples: the file of generated samples.
            mean_over: what losses are means over (`tasks.task.Task.MEAN_OVER`).
            compiles: whether the first step compiles the model, which takes long.
        """
        self.tracking, self.env, self.folder, self.span = tracking, env, folder, span
        self.metrics, self.samples, self.instruments = metrics, samples, instruments
        self.mean_over = mean_over
        self.ledger = instruments.ledger
        self.on_phase = self.ledger.record  # for train_step to call at each of PHASES
        self._step = span.after_step  # the last one reported, whatever metrics.jsonl holds of earlier sessions
        self._compiles = compiles  # in the next step
        self._bar = progress_bar("epoch", is_hidden=True)
        self._memory_table, self._retries = MemoryTable(), AllocatorRetries()
        self._time_left = TimeLeft(span.num_steps)
        self._run_began = time.perf_counter()
        self._late_end: float | None = None  # of the previous step, if the next one had started by then
        self._end_is_written = threading.Lock()
        self.weights = SavedWeights(env, folder)

    def say(self, *lines: str) -> None:
        """Print lines on rank 0, above its bar."""
        print_rank_zero(self.env, *lines)

    def run_started(self, start: dict[str, Any], *, seconds_before: float) -> None:
        """Write the `start` event.

        Args:
            seconds_before: of the run's earlier sessions, if it was resumed.
        """
        self._run_began = time.perf_counter() - seconds_before
        self.metrics.write("start", **start)
        self.weights.keep_run_yaml()

    # A step

    def timed(self, batches: Iterable[T]) -> Iterator[tuple[T, DataWait]]:
        """Each batch with the wait for it."""
        iterator = iter(batches)
        while True:
            began = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            yield batch, DataWait(began, time.perf_counter() - began)

    @contextmanager
    def epoch_bar(self, epoch: int, *, first_step: int, num_steps: int) -> Iterator[None]:
        """Show a bar that moves as steps end. Its time left is the run's.

        Args:
            first_step: steps of the epoch that are done already.
            num_steps: all steps of the epoch.
        """
        name = f"epoch {epoch}/{self.span.num_epochs}"
        with progress_bar(name, total=num_steps, initial=first_step, bar_format=BAR_FORMAT) as self._bar:
            yield

    @contextmanager
    def recording(
        self, step: int, counts: BatchCounts, wait: DataWait, *, lr: float, ends_epoch: bool
    ) -> Iterator[StepRecord]:
        """A context for one step's computing. It measures memory, waits, a trace or FLOPs if they are due."""
        tools = self.instruments
        compiling = phase("compiling, in the first step") if self._compiles else nullcontext()
        if self._compiles:
            self._bar.set_postfix_str("compiling")
        with (
            compiling,
            self.ledger.step(is_observed=is_observed_step(step, last_of_epoch=ends_epoch)) as memory,
            tools.communication.step() as communication,
            tools.recorder(step, counts),
        ):
            yield StepRecord(step, counts, wait, lr, tools.scaler.scale, ends_epoch, memory, communication)
        self._compiles = False

    def step_ended(
        self, record: StepRecord, epoch: int, loss: float, grad_norm: float, *, ready_at: float | None = None
    ) -> float:
        """Write the step's events, and its log line if one is due. Every rank must call this.

        Args:
            record: of `recording`. If the step is observed, the next one has not been queued.
            ready_at: when its numbers were there, by time.perf_counter, if the next step has been queued: it ends then.

        Returns:
            The step's seconds, with the wait for its data. If the step started before the previous one was reported,
            its time counts from that step's end.
        """
        step, counts, scaler = record.step, record.counts, self.instruments.scaler
        began = record.wait.began if self._late_end is None else self._late_end
        seconds = (time.perf_counter() if ready_at is None else ready_at) - began
        # With the next step queued already, steps overlap on the host, and their times must still add up.
        self._late_end = ready_at
        event = {
            "step": step,
            "epoch": epoch,
            "loss": loss,
            **self._perplexity(loss),
            "grad_norm": grad_norm,
            "lr": record.lr,
            f"num_{self.mean_over}": counts.num_loss_terms,
            # The same, unless the loss is a mean over something else.
            "num_label_tokens": counts.num_label_tokens,
            "num_tokens": counts.num_tokens,
            "step_seconds": seconds,
            **self._rates(counts, seconds),
            "data_wait_seconds": record.wait.seconds_after(began),
            **({"loss_scale": record.loss_scale} if scaler.active else {}),
            **self._pinning(step),
        }
        self.metrics.write("train", **event)
        self._step = step
        if record.communication is not None:
            self.metrics.write("communication", step=step, **record.communication.figures())
        if record.memory is not None:
            self._write_memory(step, record.memory)
        if not math.isfinite(grad_norm):  # fp16 alone: under other precisions this has ended the run (StepNumbers.read)
            scales = f"loss scale {record.loss_scale:g} -> {scaler.scale:g}"
            self.say(f"step {step}: fp16 gradients overflowed: no update, {scales}")
        seconds_left, num_steps = self._time_left.seconds(step, seconds), self.span.num_steps
        if step == 1 or step % self.tracking.log_every_steps == 0 or step == num_steps:
            _, peak, _, num_retries = self.ledger.allocator()
            self.say(log_line(event, num_steps=num_steps, peak_gib=peak / GIB, seconds_left=seconds_left))
            if line := self._retries.line(step, num_retries):
                self.say(line)
        self._bar.set_postfix_str(f"{clock(seconds_left)} left, loss {loss:.4f}", refresh=False)
        self._bar.update()
        return seconds

    def _perplexity(self, loss: float) -> dict[str, float]:
        """exp(loss) is one for the loss of tokens alone."""
        return {"perplexity": perplexity(loss)} if self.mean_over == LABEL_TOKENS else {}

    def _pinning(self, step: int) -> dict[str, float]:
        """Of the session's first step: the host memory that was pinned, and the step's wait for it."""
        pinned = self.instruments.pinned
        if pinned is None or step != self.span.after_step + 1 or not pinned.num_bytes:
            return {}
        gib, seconds, waited = pinned.num_bytes / GIB, pinned.making_seconds, pinned.waited_seconds
        self.say(
            f"activation_offloading: {gib:.1f} GiB of host memory was pinned in {seconds:.1f} s, for which step {step} "
            f"waited {waited:.1f} s; later steps use it again"
        )
        return {"pinned_gib": gib, "pinning_seconds": seconds, "pinning_wait_seconds": waited}

    def _rates(self, counts: BatchCounts, seconds: float) -> dict[str, float]:
        per_second, world_size = counts.num_tokens / seconds, self.env.world_size
        return {
            "tokens_per_second": per_second,
            "tokens_per_second_per_device": per_second / world_size,
            "model_tflops_per_device": self.instruments.flops.count(counts) / seconds / world_size / 1e12,
        }

    def _write_memory(self, step: int, own: list[dict[str, Any]]) -> None:
        """Write the `memory` events of all ranks, and their table if it is asked for. Every rank must call this."""
        by_rank = gather_to_all(own)
        for rank, entries in enumerate(by_rank):
            for entry in entries:
                self.metrics.write("memory", step=step, rank=rank, **entry)
        if self.tracking.print_memory:
            self.say("\n".join(self._memory_table.lines(step, by_rank)))

    # Between steps

    def evaluated(
        self,
        step: int,
        epoch: int,
        loss: float,
        num_loss_terms: int,
        of_task: Mapping[str, float],
        of_answers: Mapping[str, float],
        samples: Sequence[Mapping[str, Any]],
        *,
        of_experts: Mapping[str, float],
    ) -> None:
        """Write the `eval` event and its log lines, and some generated samples.

        Args:
            of_task: its own figures by name (`tasks.task.Task.eval_figures`).
            of_answers: figures by name (`evaluation.measures`); empty if nothing was generated.
            samples: as `reporting.samples` prints them.
            of_experts: figures by name (`reporting.expert_line`); empty without a mixture of experts.
        """
        self._retries.begin_again(step, self.ledger.allocator()[-1])
        figures: dict[str, float] = {"step": step, "epoch": epoch, "loss": loss, **self._perplexity(loss)}
        figures[f"num_{self.mean_over}"] = num_loss_terms
        self.metrics.write("eval", **figures, **of_task, **of_answers, **of_experts)
        for sample in samples:
            self.samples.write("sample", step=step, **sample)
        line = f"eval | step {step} | epoch {epoch} | loss {loss:.4f}"
        if "perplexity" in figures:
            line += f" | perplexity {shown_perplexity(figures['perplexity'], 3)}"
        line += "".join(f" | {name} {value:.4f}" for name, value in of_task.items())
        line += "".join(f" | {name} {value:.2f}" for name, value in of_answers.items())
        if samples:
            self.say("\n".join(sample_lines(samples[:NUM_PRINTED])))
        self.say(line)
        if of_experts:
            self.say(expert_line(of_experts))

    def epoch_ended(self, epoch: int, seconds: float, train_loss: float, eval_loss: float | None) -> None:
        """Write the `epoch` event and its line."""
        self.metrics.write("epoch", epoch=epoch, seconds=seconds, train_loss=train_loss, eval_loss=eval_loss)
        self.say(epoch_line(epoch, seconds, train_loss, eval_loss, of_tokens=self.mean_over == LABEL_TOKENS))

    def checkpoint(self, *, step: int, seconds: float, blocked_seconds: float, bytes: int) -> None:
        """Write the `checkpoint` event, and run.yaml again if it is gone: a resumed run needs it, too."""
        self.weights.keep_run_yaml()
        self._retries.begin_again(step, self.ledger.allocator()[-1])
        self.metrics.write("checkpoint", step=step, seconds=seconds, blocked_seconds=blocked_seconds, bytes=bytes)

    # The end

    def run_ended(self, status: str) -> None:
        """Write the `end` event, once: later calls do nothing. Any thread may call this.

        Args:
            status: "finished", "stopped" or "failed".
        """
        # Never released: the watchdog's thread may end the run while the main thread does.
        if self._end_is_written.acquire(blocking=False):
            seconds = time.perf_counter() - self._run_began
            status = "failed" if self.metrics.num_lost or self.metrics.num_deleted() else status
            figures = end_figures(self.metrics.read())
            self.metrics.write("end", step=self._step, **figures, status=status, seconds=seconds)

    def run_failed(self) -> None:
        """Write the `end` event of a run that ended any other way than by `run_ended`."""
        self.run_ended("failed")

    def write_rest(self) -> list[str]:
        """Write the lists of --save_metrics, and all that a full disk has refused. Call this on rank 0, after the end.

        Returns:
            A clause for each file that still cannot be written.
        """
        refused = []
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)  # it may have been deleted or renamed
        for file in (self.metrics, self.samples):
            file.write_waiting()
            if missing := file.num_missing():
                why = "deleted or moved away" if file.num_deleted() else file.refusal or "too many waited"
                refused.append(f"{file.path} lacks {plural(missing, 'line')} ({why})")
        if reason := self.weights.write():
            refused.append(f"run.yaml cannot be written ({reason})")
        if self.tracking.save_metrics:
            events = self.metrics.read()
            try:
                if self.metrics.unreadable:  # half of the lists would look like all of them
                    self.say(f"metrics_data.json is left out, since {self.metrics.path} cannot be read")
                else:
                    write_metrics_data(self.folder, events)
            except OSError as error:
                refused.append(f"metrics_data.json cannot be written ({error.strerror})")
        return refused

    def show_end(self, status: str) -> None:
        """Print the table at the end."""
        if not self.env.is_rank_zero:
            return
        events, saved = self.metrics.read(), self.weights.read()
        print_for_people(*end_summary(events, self.folder, device_type=self.env.device.type, saved=saved))
        print_line(f"{status}: {self.folder}")

    def write_page(self) -> None:
        """Write report.html, if it was asked for. Call this after the end, however the run ended."""
        if self.tracking.report and self.env.is_rank_zero:
            self.say(write_at_end(self.folder))
