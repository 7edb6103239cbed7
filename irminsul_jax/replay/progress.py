"""Progress with rate and remaining time: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

QUIET_SECONDS = 10.0


class Meter:
    """Counts work that is done, from the moment its `with` block is entered. `unit` names what is counted, `scale` how
    many of what `update` counts make one unit (1e6 for bytes shown in MB)."""

    def __init__(self, console: Console, label: str, *, unit: str, total: int | None = None, scale: float = 1.0):
        self._console, self._unit, self._scale = console, unit, scale
        self._label, self._done, self._total = label, 0, total

    def __enter__(self) -> Meter:
        self._started = self._reported = time.perf_counter()
        self._bar = None
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[rate]}", markup=False),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task(self._label, total=self._total, rate="")
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        self.update(self._done + count)

    def update(self, done: int, total: int | None = None, label: str | None = None) -> None:
        """Sets what is done so far, and where given the total and what is being worked on."""
        self._done, self._total, self._label = done, total or self._total, label or self._label
        now = time.perf_counter()
        rate = done / max(now - self._started, 1e-9)
        shown = f"{rate / self._scale:,.0f} {self._unit}/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=self._total, description=self._label, rate=shown)
        elif now - self._reported >= QUIET_SECONDS:
            self._reported = now
            left = f", {(self._total - done) / rate:.0f} s left" if self._total and rate else ""
            share = f"{done / self._total:.0%}, " if self._total else ""
            self._console.print(f"{self._label}: {share}{shown}{left}", markup=False, highlight=False, soft_wrap=True)
