"""Every error that a user of asyppo-async can meet.

    AsyppoError
    |- ConfigError                 a setting is wrong; the message names the key and the value got
    |- TaskError                   a data set or a reward cannot be used
    |- FleetError
    |  |- FleetUnavailable         a server does not answer (refused, gone, past its deadline); another may
    |  |- FleetOverloaded          a server has no room now, or is within a load; try again later
    |  |- FleetMismatch            a server serves another model, tokenizer or run than the trainer wants
    |  |- ContractBroken           a server sends what the contract does not allow; another attempt may be well
    |  |- RequestRejected          the request itself is wrong; no retry helps
    |- WorkerError                 a worker group died, is missing, or reported an error
    |- WeightSyncError             a publication failed: transfer, load or probe
    |- TrainingDiverged            more non-finite steps than the budget allows
    |- CheckpointError             a checkpoint cannot be written, or none can be read
    |- TooManyLost                 more responses are lost than the budgets of the run allow
    |- Stalled                     nothing moved for `run.fail_after_s`

`ValueError` and `TypeError` are a caller's mistake in the Python API, `AssertionError` is a bug of ours.
"""


class AsyppoError(Exception):
    """Base of all errors that are reported to the user in one line, with a non-zero exit code."""

    server: str | None = None
    """Address of the server whose own failure it is; None: of no one server, or of nobody knows which."""


class ConfigError(AsyppoError):
    """A setting is missing, unknown, out of range or contradicts another."""


class TaskError(AsyppoError):
    """A data set or a reward cannot be used."""


class FleetError(AsyppoError):
    """Something about a fleet server; the message names its address."""


class FleetUnavailable(FleetError):
    """A server does not answer: refused, gone, draining or past its deadline."""


class FleetOverloaded(FleetError):
    """A server cannot take the request now: its queue is full, or it is in the middle of a load."""

    retry_after_s: float | None = None
    """When the server thinks that it may have room; None: it did not say."""


class FleetMismatch(FleetError):
    """A server serves another model, tokenizer or run than this trainer wants."""


class ContractBroken(FleetError):
    """What a server sent is not what the contract says: garbled, out of order, of the wrong length."""


class RequestRejected(FleetError):
    """The request itself is wrong, so no retry and no other server helps."""


class WorkerError(AsyppoError):
    """A worker group died, did not join, missed its deadline or reported an error of its own."""


class WeightSyncError(AsyppoError):
    """A publication failed; the message names the server, the phase and its own words."""


class TrainingDiverged(AsyppoError):
    """More optimizer steps had a non-finite loss or gradient than the budget allows."""


class CheckpointError(AsyppoError):
    """A checkpoint cannot be written, or is not complete; the message names the file."""


class TooManyLost(AsyppoError):
    """More responses are lost, to servers or to rewards, than `[failures]` allows."""


class Stalled(AsyppoError):
    """No progress for `run.fail_after_s`; the message says what each loop waits for."""
