"""The errors that ds_tba raises. Each message names the value, the rule and the repair."""

from __future__ import annotations


class DsTbaError(Exception):
    """Base of every error raised by ds_tba."""


class ConfigError(DsTbaError, ValueError):
    """A value of a block of ours (or of ``"aio"``) breaks a rule."""


class PathError(ConfigError):
    """A directory of ``nvme_path`` cannot hold a swap file."""


class IncompatibleError(DsTbaError, RuntimeError):
    """A DeepSpeed version or feature that cannot be combined with a block of ours."""


class BackendUnavailableError(DsTbaError, RuntimeError):
    """The I/O backend named in the config cannot run on this machine."""


class ModelError(DsTbaError, ValueError):
    """The model of ``ds_tba plan`` cannot be made, or does not run."""


class StorageError(DsTbaError, RuntimeError):
    """Base of the errors that concern bytes written to a swap file or read from it."""


class TransferError(StorageError):
    """One I/O request failed or moved fewer bytes than asked; the message has offset and byte counts."""


class ActivationLostError(StorageError):
    """Bytes that backward needs could not be read: training cannot go on with a correct gradient."""


class ActivationCorruptionError(StorageError):
    """Bytes that were read differ from those that were written (a lost, short, stale or torn write, or a bad read)."""


class UpdateInterruptedError(DsTbaError, RuntimeError):
    """An earlier optimizer update was not finished, so that the model is half updated."""


class ActivationModifiedError(DsTbaError, RuntimeError):
    """A tensor saved for backward was modified in place afterwards; the same check as autograd's own."""


class RecomputationError(DsTbaError, RuntimeError):
    """A block's forward did not save or return the same tensors when backward ran it again."""


class RematerializationError(DsTbaError, RuntimeError):
    """A rematerialized tensor was equal to forward's in an earlier step and differs from it in this one.

    Gradients since that earlier step may have been computed from wrong values.
    """


class ReportError(DsTbaError, ValueError):
    """A file is not a report."""


class StateError(DsTbaError, RuntimeError):
    """Use after close or in a forked child, an earlier exception in our bookkeeping, or a bug in ds_tba."""
