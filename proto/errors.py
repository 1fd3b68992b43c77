"""Every error that Tramontane raises on purpose.

    TramontaneError
    +-- UserError
    |   +-- ConfigError
    |   +-- PlanError
    |   +-- AuthenticationError
    |   +-- UnimplementedError
    |   +-- CheckpointError
    |   |   +-- InvalidModelConfigError
    |   +-- RequestError
    |       +-- ParameterError
    |       +-- UnknownModelError
    |       +-- UnsatisfiableSchemaError
    |       +-- NotFiniteError
    |       +-- PoisonRequestError
    |       +-- UnknownJobError
    |       +-- JobRefusedError
    |       +-- UnknownFileError
    |       +-- FileTooLargeError
    +-- OverloadedError
    |   +-- QueueFullError
    |   +-- QuotaExceededError
    +-- DrainingError
    +-- DeadlineExceededError
    +-- ConnectionLostError
    +-- PipelineError
        +-- StaleEpochError
        +-- LinkError
        +-- ExpertUnavailableError
        |   +-- ExpertRelocatedError
        +-- LeaseError
        +-- RouterLostError
        +-- StreamNotOpenError
        +-- JobStoreError
        +-- PipelineUnavailableError
            +-- PipelineRecoveringError
            +-- PipelineSupersededError
            +-- ModelMismatchError

A ``UserError`` says what was wrong and what to do about it. The command line prints it as one line
and exits with code 2. Broken internal invariants are assertions, not members of this tree.
"""

from collections.abc import Iterable
from difflib import get_close_matches

DEFECT = "the server has a defect; see its log"  # for clients, of errors that are not in this tree


MIN_PREFIX = 4  # characters of a name that is the beginning of a known one


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: "; did you mean max_tokens?", or nothing
    if none is similar.
    """
    known = list(known)
    # of versions the last is the newest
    longer = [each for each in known if len(name) >= MIN_PREFIX and each.startswith(name)]
    similar = longer[-1:] or get_close_matches(name[:64], known, n=1)
    return f"; did you mean {similar[0]}?" if similar else ""


class TramontaneError(Exception):
    """Root of all errors that are raised on purpose."""


# ---- the user can do something about it


class UserError(TramontaneError):
    """Something that the user asked for cannot be done; the message is one line."""


class ConfigError(UserError):
    """A flag, a parameter, or a combination of them is wrong."""


class PlanError(UserError):
    """No plan fits the available machines: too many stages, or too little memory."""


class AuthenticationError(UserError):
    """An API key is missing or unknown to the ingress."""


class UnimplementedError(UserError):
    """The server does not have this method, or not yet."""


class CheckpointError(UserError):
    """A model folder cannot be served: it is missing, incomplete, misshapen or not supported."""


class InvalidModelConfigError(CheckpointError):
    """The numbers of a configuration describe no model. The reader of the file adds its name to the
    message.
    """


# ---- one request


class RequestError(UserError):
    """One request cannot be accepted or completed."""


class ParameterError(RequestError):
    """One parameter is wrong; ``parameter`` is its name, or None if the body as a whole is
    wrong.
    """

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class UnknownModelError(RequestError):
    """The client named a model that is not served here."""


class UnsatisfiableSchemaError(RequestError):
    """The model cannot follow the schema of the response; a retry would fail as well."""


class NotFiniteError(RequestError):
    """The model's numbers for a request are not finite, so that no token follows; a retry would
    fail as well.
    """


class PoisonRequestError(RequestError):
    """A request has crashed the pipeline repeatedly; a retry would crash it again."""


class UnknownJobError(RequestError):
    """There is no batch job of that name."""


class JobRefusedError(RequestError):
    """What was submitted cannot become a job or a file."""


class UnknownFileError(RequestError):
    """There is no file of that name."""


class FileTooLargeError(RequestError):
    """A file has more bytes than the server accepts."""


# ---- the server


class OverloadedError(TramontaneError):
    """Too many requests are waiting; this one may be sent again after ``retry_after_s``, a whole
    number of seconds.
    """

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message, retry_after_s)  # all arguments, so that the error can be pickled
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return str(self.args[0])


class QueueFullError(OverloadedError):
    """The waiting queue has no room for even the smallest request of this client."""


class QuotaExceededError(OverloadedError):
    """A client has stored as much as it may; it has to delete something, or wait until something
    expires.
    """


class DrainingError(TramontaneError):
    """The server is about to stop: it finishes running requests and accepts no new ones."""


class DeadlineExceededError(TramontaneError):
    """The deadline that a client set has passed before its request was complete."""


class ConnectionLostError(TramontaneError):
    """A client cannot reach its server, or no longer; a retry may succeed."""


# ---- a pipeline and its parts


class PipelineError(TramontaneError):
    """A pipeline failed while requests were running on it."""


class StaleEpochError(PipelineError):
    """A step carried another epoch than the one that its stage was fenced to."""


class LinkError(PipelineError):
    """A stage cannot receive from its neighbor or send to it. Why the neighbor is silent is
    reported elsewhere.
    """


class ExpertUnavailableError(PipelineError):
    """An expert actor died or became unreachable before it returned its rows; the call can be
    repeated.
    """


class ExpertRelocatedError(ExpertUnavailableError):
    """An expert actor does not hold the requested experts, because a newer expert plan is in
    force.
    """


class LeaseError(PipelineError):
    """Another router holds the lease of the pipeline."""


class RouterLostError(PipelineError):
    """A router is dead or unreachable; another router can continue its requests."""


class StreamNotOpenError(PipelineError):
    """A router has no open stream to the ingress that called it."""


class JobStoreError(PipelineError):
    """The database or the storage of the batch jobs is unavailable."""


class PipelineUnavailableError(PipelineError):
    """The pipeline of this router is restarting; another router may be available."""


class PipelineRecoveringError(PipelineUnavailableError):
    """The pipeline of this router is being fenced again; the router queues the request if no other
    one can work on it now.
    """


class PipelineSupersededError(PipelineUnavailableError):
    """A newer version of the application took over the pipeline of this router, or its GPUs, and
    will accept requests soon.
    """


class ModelMismatchError(PipelineUnavailableError):
    """A router has another model or version than the request was made for; only a router of that
    version can run it.
    """
