"""The errors a user can meet. Each is also the standard class that it refines.

Messages read "where: what is wrong; got value; what to set".
"""


class MilesRolloutError(Exception):
    """The root of every error that this project raises on purpose."""


class RolloutParamsError(MilesRolloutError, ValueError):
    """What was asked for cannot be rolled out, replayed or scored."""


class RolloutStateError(MilesRolloutError, RuntimeError):
    """A rollout was used out of turn: interrupted, nested, called twice or never."""
