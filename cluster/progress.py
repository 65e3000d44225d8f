"""What the terminal shows while something takes long: a line with a clock for each phase, bars for downloads.

On stderr, so that stdout holds answers only; without a terminal one plain line per phase.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

log = logging.getLogger(__name__)


class Clock(TimeElapsedColumn):
    """The time since the beginning and, where it can be told, the time left."""

    def render(self, task: Task) -> Text:
        """Both of one phase."""
        elapsed = super().render(task)
        left = task.time_remaining
        if task.finished or left is None:
            return elapsed
        minutes, seconds = divmod(int(left), 60)
        return elapsed.append(f", {minutes}:{seconds:02} left" if minutes < 60 else f", {minutes / 60:.1f} h left")


class Display:
    """Enter it, then open phases and bars, one after the other or at once."""

    def __init__(self, *, as_log: bool = False) -> None:
        """`as_log`: nothing is drawn, each phase and warning is a line of the log instead."""
        self._as_log = as_log
        self._console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            Clock(),
            console=self._console,
            disable=as_log or not self._console.is_terminal,
        )

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Something of unknown length."""
        with self.bar(what, None):
            yield

    @contextlib.contextmanager
    def bar(self, what: str, total: float | None) -> Iterator[Callable[[float], None]]:
        """Something of known length; tell it how much is done in all."""
        if self._as_log:
            log.info(what)
        elif not self._console.is_terminal:
            self._console.print(what, highlight=False)
        task = self._progress.add_task(what, total=total)
        yield lambda completed: self._progress.update(task, completed=completed)
        done = total if total is not None else 1.0
        self._progress.update(task, total=done, completed=done)

    def warn(self, warnings: Sequence[str]) -> None:
        """One line each, above what is in progress."""
        for warning in warnings:
            if self._as_log:
                log.warning(warning)
                continue
            self._console.print(f"[yellow]warning:[/yellow] {escape(warning)}", highlight=False, soft_wrap=True)
