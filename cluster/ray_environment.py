"""What Ray must find in the environment before it is first imported: it reads this once.

Call `prepare` before anything imports ray; the processes Ray starts inherit it.
"""

import os
import secrets
import sys
from pathlib import Path

AUTH_MODE = "RAY_AUTH_MODE"
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
TOKEN = "RAY_AUTH_TOKEN"

_before = {name: os.environ.get(name) for name in (AUTH_MODE, TOKEN_PATH)}


def state_directory() -> Path:
    """Where this user's deployments leave what outlives a process."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "slipstream"


def prepare() -> None:
    """No usage statistics, and a token without which nobody can use our clusters."""
    if "ray" in sys.modules and os.environ.get(AUTH_MODE) != "token":
        raise RuntimeError(f"ray was imported before {__name__}.prepare was called: it would run without a token")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would starve the very processes that serve
    # Said on stdout, which is for answers.
    os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "A worker died or was killed|Raylet is terminated|has been marked dead"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # silences a warning about its next version
    os.environ[AUTH_MODE] = "token"
    os.environ[TOKEN_PATH] = str(_token_file())


def prepare_to_join() -> None:
    """Undo `prepare` for a cluster of someone else's: with its token, found where Ray itself looks for it."""
    for name, value in _before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if AUTH_MODE not in os.environ:
        found = TOKEN in os.environ or TOKEN_PATH in os.environ or (Path.home() / ".ray" / "auth_token").exists()
        os.environ[AUTH_MODE] = "token" if found else "disabled"


def _token_file() -> Path:
    """One for all local clusters of this user, readable by nobody else."""
    path = state_directory() / "ray_token"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.touch(mode=0o600)
        partial.write_text(secrets.token_hex(32))
        partial.replace(path)
    return path
