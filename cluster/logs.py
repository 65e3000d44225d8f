"""How every process of a deployment logs: one value, made from the flags, that travels into each of them.

Our own loggers only; Ray's and other libraries' stay as they are. Fields of a line are what a call gives as `extra`.
"""

import json
import logging
import sys
import time
from dataclasses import dataclass
from typing import Any

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
ROOMS = ("cluster", "scheduler", "worker")
STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Call it in a process, with the process's name, before anything is logged there."""

    format: str = "text"
    level: str = "info"
    file: str | None = None  # absolute; every process of a machine appends to it. None: each one's own stderr
    prompts: bool = False  # whether requests are logged with what they ask

    @property
    def is_for_machines(self) -> bool:
        """Whether what `serve` shows to people on a terminal is to be a line of the log instead."""
        return self.format == "json" or self.file is not None

    def __call__(self, process: str) -> None:
        """Our loggers write like this from now on."""
        handler = logging.StreamHandler(sys.stderr) if self.file is None else logging.FileHandler(self.file, delay=True)
        handler.setFormatter(JsonLines(process) if self.format == "json" else TextLines(process))
        for room in ROOMS:
            logger = logging.getLogger(room)
            logger.handlers = [handler]
            logger.setLevel(self.level.upper())
            logger.propagate = False


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, process, logger, event, and the fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "event": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """The same to be read by people."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback if there is one."""
        fields = "".join(f" {name}={value}" for name, value in _fields_of(record).items())
        line = f"{_time_of(record)} {record.levelname} {self._process} {record.name}: {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time_of(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z"


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in STANDARD and not name.startswith("_")}
