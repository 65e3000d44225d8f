"""Where a model comes from: the one this project fetches by itself, a local directory, or a hub name."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from cluster.errors import ConfigError
from cluster.progress import Display

FETCHED = "smollm2"


def resolve_model(name: str, display: Display) -> Path:
    """A Hugging Face directory with weights and config. ConfigError when there is none to be had."""
    directory = Path(name).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").exists():
            raise ConfigError(f"--model: directory {name} has no config.json")
        return directory.resolve()
    if name == FETCHED:
        return _fetched(name, display)
    return _from_hub(name, display)


def _fetched(name: str, display: Display) -> Path:
    from worker.fetch import fetch

    words = {"verify": "Checking", "download": "Downloading", "convert": "Converting", "write": "Writing"}
    with contextlib.ExitStack() as bars:
        advance: dict[str, Callable[[float], None]] = {}

        def progress(phase: str, done: int, total: int) -> None:
            if phase not in advance:
                advance[phase] = bars.enter_context(display.bar(f"{words[phase]} {name}", total))
            advance[phase](done)

        try:
            return fetch(name, progress=progress)
        except ValueError as error:
            raise ConfigError(f"--model {name}: {error}") from error


def _from_hub(name: str, display: Display) -> Path:
    """Downloaded by the hub's own client, or from its cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    unknown = f"--model {name!r} is unknown: neither {FETCHED}, nor a directory, nor a model the hub gives us"
    if name.startswith((".", "/", "~")):
        raise ConfigError(unknown)
    try:
        with display.phase(f"Fetching {name} from the hub"):
            patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
            return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(unknown) from error
