"""Every error Tramontane raises on purpose.

    TramontaneError
    +-- UserError            what was asked cannot be done; shown as one line, exit code 2
    |   +-- ConfigError      a flag, a parameter or their combination
    |   +-- RequestError     one request: an empty prompt, a prompt past the context
    |   +-- CheckpointError  a model folder: missing, incomplete, misshapen, unsupported
    |   +-- PlanError        the plan does not fit: too many stages, too little memory
    +-- PipelineError        a pipeline failed while it was working
        +-- StaleEpochError  a step of an epoch that a stage no longer (or not yet) obeys

A ``UserError`` says what was wrong and what to do about it. Broken internal
invariants are assertions, not members of this tree.
"""


class TramontaneError(Exception):
    """Root of all errors raised on purpose."""


class UserError(TramontaneError):
    """Something the user asked for cannot be done; the message is one line."""


class ConfigError(UserError):
    """A flag, a parameter, or a combination of them is wrong."""


class RequestError(UserError):
    """One request cannot be accepted."""


class CheckpointError(UserError):
    """A model folder cannot be served."""


class PlanError(UserError):
    """No plan fits the machines that are there."""


class PipelineError(TramontaneError):
    """A pipeline failed while requests were running on it."""


class StaleEpochError(PipelineError):
    """A step carried another epoch than the one its stage was fenced to."""
