"""Who fills the device, and what would help? Judged by who holds saved bytes, what the model holds, and what failed.

Knows torch's modules and optimizers, and that DeepSpeed puts its optimizer around the user's; not DeepSpeed's engine.
``explain/sample.py`` finds holders, and ``explain/explainer.py`` reads errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_tba.config import BLOCK, OffloadConfig
from ds_tba.core.eligibility import Eligibility
from ds_tba.holders import Holder
from ds_tba.stats import readable

LARGE_PART = 1 / 3  # a holder of more than this part of the bytes in use is worth a word of advice
KIND_PART = 1 / 4  # a well known kind that holds more than this part of the saved bytes is named
MIB = 1 << 20
_LOGITS = re.compile(r"logit|cross_entropy|LogSoftmax|log_softmax|NllLoss|lm_head")
_SOFTMAX = re.compile(r"(?<!log_)(?<!Log)softmax", re.IGNORECASE)
_SCORES = re.compile(r"attn|attention|score|weights")
_OFFLOADED = re.compile(r"adam|lion|adagrad", re.IGNORECASE)
_SQUARE = re.compile(r"\d+, (\d{2,}), \1\]")  # the end of a shape


@dataclass(frozen=True)
class ModelMemory:
    """The bytes that a training holds on its device beside activations, and the part of its config that bears on them.

    Attributes:
        parameters, gradients, states: bytes now; states are the optimizer's, with its master weights and buffers.
        trained: bytes of the parameters that get a gradient.
        micro_batch, accumulation: sequences of a micro-batch (0 where that is not known), and micro-batches of a step.
        optimizer: name of its class.
        zero: the config's ``"zero_optimization"``.
    """

    parameters: int = 0
    gradients: int = 0
    states: int = 0
    trained: int = 0
    micro_batch: int = 0
    accumulation: int = 1
    optimizer: str = ""
    zero: Mapping[str, Any] = field(default_factory=dict)


class ModelMeter(Protocol):
    """Counts what a training holds beside activations."""

    def memory(self) -> ModelMemory:
        """Return that as it is now."""


def memory_of(model: nn.Module, optimizer: object, device: torch.device) -> ModelMemory:
    """Return what a model and its optimizer hold on a device.

    Args:
        optimizer: None where there is none; one around another, in its attribute ``optimizer``, counts with that.
    """
    parameters, seen = list(model.parameters()), set[int]()

    def taken(value: object) -> int:
        """Return the bytes of the storages in a value that were not counted yet."""
        nbytes = 0
        for one in tree_leaves(value):
            if isinstance(one, torch.Tensor) and one.device.type == device.type and one.layout is torch.strided:
                storage = one.untyped_storage()
                # Tied weights and views in ZeRO's flat buffers would count once for each name.
                nbytes += 0 if storage.data_ptr() in seen else storage.nbytes()
                seen.add(storage.data_ptr())
        return nbytes

    shards = [getattr(one, "ds_tensor", None) for one in parameters]  # of ZeRO-3
    held = taken([parameters, shards, list(model.buffers())])
    gradients = taken([one.grad for one in parameters])
    states, name = 0, ""
    while optimizer is not None:
        name = type(optimizer).__name__
        # Under ZeRO gradients are in buffers of its own.
        gradients += sum(taken(value) for key, value in vars(optimizer).items() if "grad" in key)
        states += sum(taken(value) for value in vars(optimizer).values())
        optimizer = vars(optimizer).get("optimizer")
    trained = sum(getattr(one, "ds_numel", one.numel()) * one.element_size() for one in parameters if one.requires_grad)
    return ModelMemory(parameters=held, gradients=gradients, states=states, trained=trained, optimizer=name)


@dataclass(frozen=True)
class Failure:
    """An allocation that failed, as far as its error tells.

    Attributes:
        phase: ``"forward"``, ``"backward"`` or ``"optimizer step"``; empty where nothing has failed.
        asked_bytes: 0 where the error does not say.
        module: path of the module that ran; empty outside of all.
        line: line of the program, with its text.
        is_again: True if a module ran in backward, for its tensors that were not saved.
        is_ours: True if it did because of ``"recompute": true``.
        local: the largest tensor of the functions that ran, as name, shape and line; empty where there is none.
        local_bytes: bytes of that tensor.
    """

    phase: str = ""
    asked_bytes: int = 0
    module: str = ""
    line: str = ""
    is_again: bool = False
    is_ours: bool = False
    local: str = ""
    local_bytes: int = 0

    def __str__(self) -> str:
        asked = f", {readable(self.asked_bytes)} more did not fit" if self.asked_bytes else ""
        at = f", in {self.module}" if self.module else ""
        return f"in the {self.phase}{asked}{at}{f' ({self.line})' if self.line else ''}"


class Culprit(Enum):
    """The kinds of what fills a device."""

    SAVED = "saved tensors"
    LOGITS = "logits"
    ATTENTION = "attention scores"
    EARLIER = "graphs of earlier steps"
    AGAIN = "a layer that runs again in backward"
    OPERATION = "one operation"
    MODEL = "parameters, gradients and optimizer states"
    STATES = "the optimizer's step"


@dataclass(frozen=True)
class Diagnosis:
    """The holders of a device's memory, and the judgement of them.

    Attributes:
        config: the block.
        holders: holders of saved bytes, the largest first.
        kept: bytes that were neither offloaded nor rematerialized so far, by reason.
        saved_bytes, peak_bytes: saved tensors in device memory, now and at their peak.
        earlier_bytes: the part of ``saved_bytes`` that was saved before the step began.
        in_use_bytes: bytes of the device in any use; 0 where that is not known.
        is_host: True if the device is the CPU.
    """

    config: OffloadConfig
    holders: Sequence[Holder]
    kept: Mapping[str, int]
    saved_bytes: int
    peak_bytes: int
    earlier_bytes: int = 0
    in_use_bytes: int = 0
    is_host: bool = False
    model: ModelMemory = ModelMemory()
    failure: Failure = Failure()

    @property
    def _model_bytes(self) -> int:
        model = self.model
        gradients = max(model.gradients, model.trained) if self.failure.phase == "backward" else model.gradients
        return model.parameters + gradients + model.states

    @property
    def _other_bytes(self) -> int:
        """Bytes in use by nothing that is known by name."""
        return max(0, self.in_use_bytes - self._model_bytes - self.saved_bytes - self.failure.local_bytes)

    @property
    def culprit(self) -> Culprit:
        """The kind that holds most, or was about to."""
        failure, at_once_bytes = self.failure, self.failure.asked_bytes + self.failure.local_bytes
        if failure.is_again:
            return Culprit.AGAIN
        if failure.phase == "optimizer step":
            return Culprit.STATES
        if max(self._model_bytes, self._other_bytes) > max(self.peak_bytes, at_once_bytes):
            return Culprit.MODEL
        if self.earlier_bytes > self.saved_bytes / 2 and self.earlier_bytes > at_once_bytes:
            return Culprit.EARLIER
        if at_once_bytes > self.peak_bytes:
            if _LOGITS.search(f"{failure.module} {failure.line} {failure.local}"):
                return Culprit.LOGITS
            has_scores = _SCORES.search(failure.local) and _SQUARE.search(failure.local)
            return Culprit.ATTENTION if has_scores or _SOFTMAX.search(failure.line) else Culprit.OPERATION
        for kind in (Culprit.LOGITS, Culprit.ATTENTION):
            of_kind_bytes = sum(self._bytes_of(one) for one in self.holders if _kind(one) is kind)
            if of_kind_bytes > KIND_PART * sum(map(self._bytes_of, self.holders)):
                return kind
        return Culprit.SAVED

    def verdict(self) -> str:
        """Return in a sentence what fills the device."""
        culprit, failure, model = self.culprit, self.failure, self.model
        of_kind = [one for one in self.holders if _kind(one) is culprit] or self.holders
        most = max(of_kind, key=self._bytes_of, default=None)
        where = "" if most is None else f"; the largest part is of {most}"
        at_once = f"{readable(failure.asked_bytes)} at once" if failure.asked_bytes else "more at once"
        at_once += f", beside {failure.local}" if failure.local else ""
        is_at_once = failure.asked_bytes + failure.local_bytes > self.peak_bytes
        if is_at_once and culprit in (Culprit.LOGITS, Culprit.ATTENTION):
            where = f": {failure.module or failure.line} asked for {at_once}"
        gradients = f"{readable(model.gradients)} of gradients"
        if model.trained > model.gradients:
            gradients += f" ({readable(model.trained)} when backward is done)"
        of_model = f"{readable(model.parameters)} of parameters, {gradients}, {readable(model.states)} of optimizer"
        others = f", {readable(self._other_bytes)} of other tensors" if self._other_bytes else ""
        why_again = '"recompute": true' if failure.is_ours else "gradient checkpointing"
        return {
            Culprit.SAVED: f"saved tensors (activations), {readable(self.peak_bytes)} at their peak{where}",
            Culprit.LOGITS: f"logits, the scores of every word for every token{where}",
            Culprit.ATTENTION: f"attention scores, which grow with the square of the sequence's length{where}",
            Culprit.EARLIER: (
                f"saved tensors of earlier steps, {readable(self.earlier_bytes)}: the program still holds a loss or an "
                f"output of them, and with it their graph{where}"
            ),
            Culprit.AGAIN: (
                f"{failure.module}, which runs again in backward ({why_again}): what it and the layers around it save "
                "is in memory until their own backward is done"
            ),
            Culprit.OPERATION: f"one operation, {failure.line or failure.module}: it asked for {at_once}",
            Culprit.MODEL: f"the model itself: {of_model} states{others}",
            Culprit.STATES: f"the optimizer's step, which makes its states at first: {of_model} states",
        }[culprit]

    def remedies(self) -> Iterator[str]:
        """Yield changes that help, the most useful first; each names the keys or the call."""
        culprit = self.culprit
        if culprit is Culprit.LOGITS:
            yield (
                "compute the loss of some tokens at a time, so that logits of all tokens never exist: a fused linear "
                "cross entropy (such as Liger's), or torch.utils.checkpoint around projection and loss of 1,000 tokens"
            )
        if culprit is Culprit.ATTENTION:
            yield (
                "use an attention that never makes these scores: torch.nn.functional.scaled_dot_product_attention, in "
                'Hugging Face\'s models attn_implementation="sdpa"'
            )
        if culprit is Culprit.OPERATION:
            yield "give that line less at a time: a shorter sequence, a smaller micro-batch, or the same in pieces"
        if culprit is Culprit.EARLIER:
            yield "keep numbers instead of graphs: loss.item(), or output.detach(), for what is kept beyond its step"
        if culprit is Culprit.AGAIN and not self.failure.is_ours:
            yield (
                "switch checkpointing off (model.gradient_checkpointing_disable()) and move saved tensors instead: "
                + self._budget(max(self.peak_bytes, self.failure.asked_bytes))
            )
        elif culprit is Culprit.AGAIN:
            yield f"move saved tensors instead: {_keys({BLOCK: {'recompute': False}})}"
        is_of_model = culprit in (Culprit.MODEL, Culprit.STATES)
        if not (is_of_model or culprit in (Culprit.EARLIER, Culprit.AGAIN)):
            yield from self._of_saved()
        if is_of_model or self._model_bytes > LARGE_PART * self.in_use_bytes > 0:
            yield from self._of_model()
        has_halves = self.model.micro_batch > 1 and self.model.micro_batch % 2 == 0
        if has_halves and not (is_of_model or culprit is Culprit.EARLIER):
            half, twice = self.model.micro_batch // 2, 2 * self.model.accumulation
            keys = {"train_micro_batch_size_per_gpu": half, "gradient_accumulation_steps": twice}
            yield f"halve the micro-batch and take twice as many: {_keys(keys)}"

    def _of_model(self) -> Iterator[str]:
        model, zero, drive = self.model, self.model.zero, {"device": "nvme", "nvme_path": self._drive}
        if self.culprit is Culprit.MODEL and model.trained and not model.states and self.failure.phase == "backward":
            yield (
                "parameters that need not be trained (a frozen backbone, LoRA) get no gradient after "
                "module.requires_grad_(False), before deepspeed.initialize"
            )
        offloaded = drive if self.is_host else {"device": "cpu"}
        is_offloaded = bool(zero.get("offload_optimizer"))
        if not (model.states or _OFFLOADED.search(model.optimizer)):
            pass  # DeepSpeed offloads only optimizers of its own, and there are no states to offload
        elif not (model.states or is_offloaded or self.culprit is Culprit.STATES):
            pass  # the first optimizer's step makes them: what is not there yet gives nothing back
        elif not is_offloaded:
            keys = {"stage": 3 if self.is_host else max(2, int(zero.get("stage", 0))), "offload_optimizer": offloaded}
            # DeepSpeed's own sizes are of large models: without these its buffers are larger than a small one.
            elements = max(MIB // 8, model.trained // 32)
            keys |= {"reduce_bucket_size": min(50_000_000, elements)}
            keys |= {"sub_group_size": min(1_000_000_000, elements)} if self.is_host else {}
            place = "on a drive" if self.is_host else "in host memory"
            yield f"keep optimizer states {place}: {_keys({'zero_optimization': keys})}"
        elif not zero.get("offload_param"):
            more = _keys({"zero_optimization": {"stage": 3, "offload_param": offloaded}})
            yield f"keep parameters there, too: {more}"
        yield "train on more ranks, which ZeRO divides these among, or train fewer parameters (LoRA)"

    def _of_saved(self) -> Iterator[str]:
        config, kept = self.config, self.kept
        if config.placement == "keep":
            yield f"move saved tensors to a drive, at nvme_path: {self._budget(self.peak_bytes // 2)}"
        elif config.placement == "adaptive":
            less = "lower" if config.activation_budget_bytes else "set"
            most_bytes = (config.activation_budget_bytes or self.peak_bytes) // 2
            yield f"{less} the limit of saved tensors, a step may take longer: {self._budget(most_bytes)}"
        if kept:
            reason = max(kept, key=kept.__getitem__)
            if reason.startswith(Eligibility.EXCLUDED.value):
                yield f"let more tensors leave: most of what stays is {reason}"
            elif "small" in reason and kept[reason] > LARGE_PART * sum(kept.values()) and config.min_tensor_bytes > 1:
                least = _keys({BLOCK: {"min_tensor_bytes": config.min_tensor_bytes // 16}})
                yield f"move smaller tensors, too: {least}"
            elif "staging" in reason:
                more = _keys({BLOCK: {"io": {"staging_bytes": 2 * config.io.ring_bytes}}})
                yield f"give writes more room in host memory, staging was full: {more}"
        if config.placement == "adaptive" and not config.recompute:
            again = _keys({BLOCK: {"recompute": True}})
            yield f"run layers again in backward, as gradient checkpointing does: {again}"

    def _bytes_of(self, one: Holder) -> int:
        """Return its bytes in memory, or its saved bytes where what is in memory is only a rest of the peak."""
        in_memory_bytes = sum(other.resident_bytes for other in self.holders)
        return one.resident_bytes if in_memory_bytes > LARGE_PART * self.peak_bytes else one.saved_bytes

    @property
    def _drive(self) -> str:
        paths = self.config.nvme_paths
        return paths[0] if paths else "/local_nvme"

    def _budget(self, most_bytes: int) -> str:
        keys: dict[str, object] = {"placement": "adaptive"} if self.config.placement != "adaptive" else {}
        keys |= {} if self.config.nvme_paths else {"nvme_path": self._drive}
        return _keys({BLOCK: {**keys, "activation_budget_bytes": max(MIB, most_bytes // MIB * MIB)}})


def _keys(keys: Mapping[str, object]) -> str:
    return f"{json.dumps(keys)} in ds_config.json"


def _kind(one: Holder) -> Culprit:
    """Return the kind that a holder looks like."""
    if _LOGITS.search(f"{one.module} {one.op}"):
        return Culprit.LOGITS
    return Culprit.ATTENTION if _SOFTMAX.search(one.op) and _SQUARE.search(one.largest) else Culprit.SAVED
