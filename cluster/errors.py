"""What can go wrong around the core, by whose turn it is: the user's (exit code 2) or ours (1).

Every message is one line.
"""


class ConfigError(ValueError):
    """Something asked that cannot be served as given. Names the flag and its limit; nothing was started."""


class BringUpError(RuntimeError):
    """Something could not be started, or ended by itself; all of it is stopped."""


class ServerError(RuntimeError):
    """A running server could not be reached, or did not do what it was asked."""
