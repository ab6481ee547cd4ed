"""How does a training loop without DeepSpeed offload its activations? With one context around the loop, one in it.

Reads the keys of the block from keyword arguments, finds the device, and tells the offloader of forwards and steps. It
imports no DeepSpeed. Cannot see when a backward is over: the next forward, or the end of the step, says so.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_tba.config import AioConfig, OffloadConfig, parse_keywords
from ds_tba.core.hooks import skip_frames
from ds_tba.core.tensors import mark_all_owned
from ds_tba.device.accelerator import KINDS, Accelerator, accelerator_of
from ds_tba.errors import ConfigError, IncompatibleError, StateError
from ds_tba.offloader import ActivationOffloader
from ds_tba.ranks import on_all_ranks, own_rank, ranks_on_machine
from ds_tba.reporting import show_log

if TYPE_CHECKING:
    from ds_tba.report import OffloadReport

logger = logging.getLogger("ds_tba")


class Offloader:
    """Offloads what autograd saves in a training loop of your own::

        with ds_tba.Offloader(model, nvme_path="/local_nvme") as offloader:
            for batch in batches:
                with offloader.saving():
                    loss = model(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                offloader.step()

    Under several ranks of ``torch.distributed`` each of them makes one, at the same point of the program.

    Args:
        model: whose forward runs in :meth:`saving`. Without it nothing is planned: the placement is ``"nvme"``,
            ``"host"`` or ``"keep"``.
        device: of the training; None takes that of the model's parameters, or the current CUDA device if there is one.
        keys: those of ``"activation_nvme_offload"``, with the same defaults and meanings; ``"except"`` as ``except_``.

    Raises:
        ConfigError: a key is unknown or has a bad value, or it asks for what a loop cannot tell.
        IncompatibleError: the device is neither a CPU nor a CUDA device of this process.
        PathError, BackendUnavailableError: training cannot start; the message names the repair.
    """

    def __init__(
        self, model: nn.Module | None = None, *, device: torch.device | str | None = None, **keys: Any
    ) -> None:
        self._model = model
        self._offloader = _built(model, device, keys)
        # Without the context nobody may call close(). At interpreter exit the offloader closes by itself.
        weakref.finalize(self, self._offloader.close_soon).atexit = False
        try:
            if model is not None:
                self._offloader.watch(model)
        except BaseException:
            self._offloader.close()
            raise
        if own_rank() == 0:
            logger.info("%s", self._offloader.start_line())

    def __enter__(self) -> Offloader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._offloader.note_failure(error)
        self.close()

    @contextmanager
    def saving(self, *inputs: Any) -> Iterator[None]:
        """Offload what the forward inside saves; compute the loss inside, too.

        Args:
            inputs: tensors (or lists and dicts of them) that the loop refills between steps, such as static buffers.

        Raises:
            StateError: the offloader is closed, or an exception came in the middle of our bookkeeping.
        """
        self._refuse_closed("saving")
        self._offloader.cache.refuse_broken()  # before its lock is asked for, which an interrupt may have left taken
        skip_frames(())
        if self._model is not None:
            mark_all_owned(self._model)
        # A loop does not say when a backward is over: it is once another forward begins.
        if torch.is_grad_enabled() and not self._offloader.cache.expects_forward:
            self._offloader.note_micro_step()
        with self._offloader.saving(inputs):
            yield

    def step(self) -> None:
        """Note that the optimizer has stepped; call it once after each ``optimizer.step()``.

        Raises:
            StateError: the offloader is closed.
        """
        self._refuse_closed("step")
        self._offloader.note_micro_step()
        self._offloader.note_step()

    def report(self) -> OffloadReport:
        """Return the counters of this rank as they are now."""
        return self._offloader.report()

    def explain(self) -> str:
        """Return what fills the device: who holds saved bytes, and which key would help."""
        return self._offloader.explain()

    def close(self) -> None:
        """Give lanes, memory and disk space back, and write the last report. Idempotent.

        A signal handler that calls it in the middle of a save waits for its own thread, up to 90 s: set a flag there
        instead, and close between two steps.
        """
        if self._offloader.is_closed:
            return
        self._offloader.close()
        report = self._offloader.report()
        if report.micro_steps and not report.steps:
            logger.warning(
                "Offloader.step() was never called, so that nothing was planned and no step counted: call it once "
                "after each optimizer.step()"
            )

    def _refuse_closed(self, call: str) -> None:
        # A closed one has no store any more: its forwards would keep everything, without a word, and no report has its
        # steps.
        if self._offloader.is_closed:
            raise StateError(f"{call}() after close(): make a new ds_tba.Offloader for another training.")


def _built(model: nn.Module | None, device: torch.device | str | None, keys: Mapping[str, Any]) -> ActivationOffloader:
    """Return an offloader of the core, and of what else the keys ask for; ranks succeed or fail together."""
    ranks_on_node = ranks_on_machine()

    def make() -> ActivationOffloader:  # all that may fail: what fails before, on one rank, leaves the others waiting
        config = parse_keywords(keys, "ds_tba.Offloader")
        _refuse_untold(config, model)
        accelerator = _accelerator_of(model, device)
        show_log()
        return ActivationOffloader(config, AioConfig(), accelerator, rank=own_rank(), ranks_on_node=ranks_on_node)

    return on_all_ranks(make)


def _refuse_untold(config: OffloadConfig, model: nn.Module | None) -> None:
    """Refuse what is no model, and what needs more than a loop tells."""
    if not isinstance(model, nn.Module | None):
        raise ConfigError(
            f"the model is {model!r}: it must be a torch.nn.Module, or left out; keys are given by name, as in "
            'ds_tba.Offloader(model, nvme_path="/local_nvme").'
        )
    if config.until_backward:
        raise ConfigError(
            "until_backward is true: a loop of your own does not tell when backward begins. Leave it out, and compute "
            "the loss inside of saving()."
        )
    if not config.enabled:
        raise ConfigError("enabled is false: make no ds_tba.Offloader, contextlib.nullcontext() stands in.")
    if model is None and (config.is_planned or config.patterns):
        raise ConfigError(
            f"a model is missing, for {config.shared_keys}: give it, as in ds_tba.Offloader(model, ...), or leave that "
            'out; placement "nvme", "host" and "keep" need none.'
        )


def _accelerator_of(model: nn.Module | None, named: torch.device | str | None) -> Accelerator:
    """Return that of the device that the user names, or of the model's."""
    parameter = None if model is None else next(model.parameters(), None)
    if named is None:
        named = parameter.device if parameter is not None else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(named)
    devices = 1 if device.type == "cpu" else torch.cuda.device_count()
    if device.type not in KINDS or (device.index or 0) >= devices:
        raise IncompatibleError(
            f"the device is {device}, and ds_tba serves the CPU and the CUDA devices of this process: train there "
            "without it."
        )
    if device.type == "cpu":
        return accelerator_of("cpu")
    with torch.cuda.device(device):  # the accelerator is of the device that is current
        return accelerator_of("cuda")
