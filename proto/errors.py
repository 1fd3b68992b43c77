"""Every error Tramontane raises on purpose.

    TramontaneError
    +-- UserError            what was asked cannot be done; shown as one line, exit code 2
    |   +-- ConfigError      a flag, a parameter or their combination
    |   +-- RequestError     one request: an empty prompt, a prompt past the context
    |   |   +-- UnsatisfiableSchemaError  a model cannot follow the schema that its answer must have
    |   |   +-- PoisonRequestError          it makes the pipeline fail
    |   +-- CheckpointError  a model folder: missing, incomplete, misshapen, unsupported
    |   |   +-- InvalidModelConfigError  numbers that make no model
    |   +-- PlanError        the plan does not fit: too many stages, too little memory
    |   +-- AuthenticationError    a door was shown no key, or one that it does not know
    |   +-- NotHereError     a method that the server does not have
    +-- OverloadedError      too much is waiting already; says when to come back
    |   +-- QueueFullError          not even the smallest request could wait
    +-- DrainingError        the server finishes what runs, and takes nothing new
    +-- DeadlineExceededError        the time that a client gave is over
    +-- ConnectionLostError  a client cannot reach its server
    +-- PipelineError        a pipeline failed while it was working
        +-- StaleEpochError  a step of an epoch that a stage no longer (or not yet) obeys
        +-- LinkError        the way between two neighbouring stages is broken
        +-- RouterLostError  a router is gone, or nobody hears from it
        +-- LeaseError       another router drives the pipeline
        +-- StreamNotOpenError    a router has no stream to answer by
        +-- PipelineUnavailableError  a router's pipeline cannot make tokens now
            +-- PipelineSupersededError  a newer version of the application has it
            +-- ModelMismatchError  it is of another model or version, and never will

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


class InvalidModelConfigError(CheckpointError):
    """Numbers that make no model. Whoever read them from a file adds its name."""


class PlanError(UserError):
    """No plan fits the machines that are there."""


class OverloadedError(TramontaneError):
    """Nothing is wrong with the request, but too many are waiting. ``retry_after_s`` is a whole number."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message, retry_after_s)  # all of them, so that it can be pickled
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return str(self.args[0])


class QueueFullError(OverloadedError):
    """However small a request of the same client is, it would be refused too."""


class DrainingError(TramontaneError):
    """The server is about to stop: it finishes what it has begun, and takes nothing new."""


class PipelineError(TramontaneError):
    """A pipeline failed while requests were running on it."""


class StaleEpochError(PipelineError):
    """A step carried another epoch than the one its stage was fenced to."""


class LinkError(PipelineError):
    """A stage cannot hear from its neighbour, or send to it; why the neighbour fell silent, others know."""


class ExpertUnavailableError(PipelineError):
    """An expert actor died, or cannot be reached, before it answered; what it was asked can be asked again."""


class ExpertRelocatedError(ExpertUnavailableError):
    """An expert actor does not hold what it was asked for: another plan is followed by now."""


class LeaseError(PipelineError):
    """The pipeline's lease is another router's."""


class RouterLostError(PipelineError):
    """A router is gone, or its last words do not arrive; another one can go on with its requests."""


class StreamNotOpenError(PipelineError):
    """A router has no stream to the ingress that called it."""


class PipelineUnavailableError(PipelineError):
    """A router's pipeline is being started again; another router may be well."""


class PipelineSupersededError(PipelineUnavailableError):
    """A newer version of the application has taken a router's pipeline, or its place; it will take requests soon."""


class ModelMismatchError(PipelineUnavailableError):
    """A router has another model or version than a request is for; only one of the old ones could take it."""


class UnsatisfiableSchemaError(RequestError):
    """The model cannot go on as the answer's schema asks for; asked again it could not either."""


class PoisonRequestError(RequestError):
    """A request that has made the pipeline fail again and again; asked once more it would again."""


class UnknownJobError(RequestError):
    """There is no batch job of that name."""


class AuthenticationError(UserError):
    """An API key is missing, or is not one of those that a door knows."""


class UnimplementedError(UserError):
    """The server does not have this method, or not yet."""


class DeadlineExceededError(TramontaneError):
    """A client's patience ended before the answer came."""


class ConnectionLostError(TramontaneError):
    """A client cannot reach its server, or not any more; what is asked again may be answered."""


class ParameterError(RequestError):
    """One parameter is wrong; ``parameter`` is its name, None if the body as a whole is."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class UnknownModelError(RequestError):
    """The client named a model that is not served here."""


class JobRefusedError(RequestError):
    """What was submitted cannot become a job, or a file."""


class UnknownFileError(RequestError):
    """There is no file of that name."""


class FileTooLargeError(RequestError):
    """More bytes than a file may have."""


class JobStoreError(PipelineError):
    """The database of the jobs, or their storage, cannot be used now."""
