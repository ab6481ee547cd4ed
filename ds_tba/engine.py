"""When DeepSpeed's engine does what: finds the block, builds the offloader, hooks the class; nobody else knows it.

DeepSpeed has no plugin mechanism, so methods of the class are wrapped: ``__init__`` always (to look up one key of the
config); ``forward``, ``backward``, ``step``, ``destroy`` and what saves a model once there is an engine whose config
has a block of ours. Reading a config is wrapped too, to find the block
where it does not belong. References are to ``deepspeed/runtime/engine.py`` of 0.19.8.

[Note: Pipelines] ``PipelineEngine`` (``deepspeed/runtime/pipe/engine.py``) calls the base class's ``forward`` for each
micro-batch and never ``step``: its ``train_batch`` is one step, in which forwards and backwards of several
micro-batches alternate. Its ranks hold the layers of one stage each, and only ranks of the same stage have anything to
agree on.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ds_tba.config import (
    BLOCK,
    SUPPORTED_DEEPSPEED,
    UPDATE_BLOCK,
    AioConfig,
    OffloadConfig,
    is_off,
    parse_block,
    refuse_misnamed,
    zero_paths,
)
from ds_tba.core.hooks import OPEN_HOOKS, skip_frames, uncompiled
from ds_tba.core.tensors import mark_all_owned, mark_owned
from ds_tba.device.accelerator import KINDS, accelerator_of
from ds_tba.errors import ConfigError, IncompatibleError, StateError
from ds_tba.holders import ModelMemory
from ds_tba.offloader import ActivationOffloader
from ds_tba.ranks import VARIABLE, agreement, on_all_ranks, own_rank, ranks_on_machine
from ds_tba.reporting import show_log
from ds_tba.stats import expanded
from ds_tba.update import UpdateConfig, parse_update_block, refuse_half_updated

if TYPE_CHECKING:
    from ds_tba.plan.agreement import Agreement
    from ds_tba.update.zero3 import InterleavedUpdate

logger = logging.getLogger("ds_tba")

ATTRIBUTE = "activation_offloader"
UPDATE_ATTRIBUTE = "interleaved_optimizer_update"
_HOOKED = "_ds_tba_hooked"
_CHECKPOINT = "_ds_tba_checkpoint"  # where the last one is
_NO_HOOKS = "support saved tensor hooks"  # in the message of torch/_functorch/eager_transforms.py


class Engine(Protocol):
    """The parts of ``DeepSpeedEngine`` that are read and set here."""

    module: torch.nn.Module
    optimizer: object
    device: torch.device
    global_steps: int
    activation_offloader: ActivationOffloader
    interleaved_optimizer_update: InterleavedUpdate
    _config: Any  # DeepSpeedConfig


def hook(engine_class: type) -> None:
    """Let every engine built from now on look for the block. Idempotent."""
    _wrap(engine_class, "__init__", _init)


def hook_config(config_class: type) -> None:
    """Refuse a block in a wrong place, or under a wrong name, before DeepSpeed reads the config. Idempotent.

    Later is too late: DeepSpeed refuses unknown keys of some blocks without a word about the right place.
    """

    def initialize_params(_config: object, original: Original) -> object:
        refuse_misnamed(original.args[1])
        return original()

    if hasattr(config_class, "_initialize_params"):  # deepspeed/runtime/config.py
        _wrap(config_class, "_initialize_params", initialize_params)


Original = functools.partial[object]  # a call of DeepSpeed's own method


def _wrap(owner: type, name: str, around: Callable[[Any, Original], object]) -> None:
    """Have a method of DeepSpeed's run inside of ``around``, once."""
    original = getattr(owner, name)
    if getattr(original, _HOOKED, False):
        return

    @functools.wraps(original)
    def method(self: object, *args: object, **kwargs: object) -> object:
        return around(self, functools.partial(original, self, *args, **kwargs))

    setattr(method, _HOOKED, True)
    setattr(owner, name, method)


def _init(engine: Engine, original: Original) -> None:
    arguments = inspect.signature(original.func).bind(*original.args, **original.keywords).arguments
    ds_config = arguments.get("config_class")
    param_dict = getattr(ds_config, "_param_dict", None) or {}
    trains = arguments.get("optimizer") is not None or bool(param_dict.get("optimizer"))
    # Before DeepSpeed's own work: a bad block is told at once, and leaves no half built engine.
    update = _update_config(param_dict, ds_config, trains=trains)
    offloader = _build(param_dict, ds_config, trains=trains, device_rank=_device_rank(arguments.get("args")))
    try:
        original()
        if offloader is not None:
            _join(engine, offloader)
        if update is not None:
            _join_update(engine, update)
    except BaseException:
        if offloader is not None:
            offloader.close()
        raise


def attach(engine: Engine) -> ActivationOffloader:
    """Attach an offloader to a ``DeepSpeedEngine`` that exists already, and return it; the present one, if it has one.

    Raises:
        ConfigError: neither the engine's config nor ``DS_TBA_BLOCK`` has an enabled block, or it is a bad one.
        IncompatibleError: the engine uses a feature that cannot be combined with activation offload.
    """
    present: ActivationOffloader | None = getattr(engine, ATTRIBUTE, None)
    if present is not None:
        return present
    offloader = _build(engine._config._param_dict, engine._config)
    if offloader is None:
        raise ConfigError(
            f'attach() found no "{BLOCK}" block (or one with "enabled": false) in the engine\'s config: add '
            f'"{BLOCK}": {{"enabled": true, "nvme_path": "/local_nvme"}} to it, or set {VARIABLE}.'
        )
    try:
        _join(engine, offloader)
    except BaseException:
        offloader.close()
        raise
    return offloader


# ---- from config to offloader ---------------------------------------------------------------------------------------


def _build(
    param_dict: Mapping[str, object], ds_config: object, *, trains: bool = True, device_rank: int = -1
) -> ActivationOffloader | None:
    """Return the offloader for a config, or None without an enabled block; ranks succeed or fail together.

    An engine that does not train, such as TRL's for a reference model, gets the config of the one that does. A second
    offloader would take staging and a swap file for nothing, and write its report over the first one's.
    """
    variable = os.environ.get(VARIABLE, "")
    if is_off(param_dict.get(BLOCK)) or (BLOCK not in param_dict and not variable.strip()):
        return None

    def parse() -> tuple[OffloadConfig, AioConfig] | None:
        if BLOCK in param_dict:
            return parse_block(param_dict)
        try:
            return parse_block({**_config_in(variable), **param_dict})
        except ConfigError as error:
            raise ConfigError(f"{VARIABLE} of the environment: {error}") from None

    if not trains:
        parse()
        show_log()
        if own_rank() == 0:
            logger.info(
                "an engine without an optimizer (for evaluation, or of a reference model) keeps its "
                "activations in memory; if it trains with an optimizer that DeepSpeed does not know, call "
                "ds_tba.attach(engine)"
            )
        return None

    # Before anything of this machine is divided. Whatever the variables of a launcher say: srun, mpirun, Ray and people
    # who start ranks by hand set others, or none.
    ranks_on_node = ranks_on_machine()

    def make() -> ActivationOffloader | None:
        parsed = parse()
        if parsed is None:
            return None
        show_log()
        if variable.strip() and own_rank() == 0:
            used = "is used" if BLOCK not in param_dict else "is not used: the DeepSpeed config has the block itself"
            logger.info("%s of the environment %s", VARIABLE, used)
        _refuse_incompatible(ds_config)
        from deepspeed.accelerator import get_accelerator

        if device_rank >= 0:  # before DeepSpeed has set it, every rank's current device may be the first
            get_accelerator().set_device(device_rank)
        return ActivationOffloader(
            *parsed,
            accelerator_of(get_accelerator().device_name()),
            zero_paths=zero_paths(param_dict),
            rank=own_rank(),
            ranks_on_node=ranks_on_node,
        )

    return on_all_ranks(make)


def _config_in(variable: str) -> dict[str, object]:
    """Return the block in an environment variable or the file that it names, with ``"aio"`` of a whole config."""
    is_text = variable.lstrip().startswith("{")
    try:
        found = json.loads(variable if is_text else expanded(variable.strip()).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{variable!r} is neither the block as JSON nor a readable file with it ({why}).") from None
    config = found if isinstance(found, dict) and BLOCK in found else {BLOCK: found}
    return {key: config[key] for key in (BLOCK, "aio") if key in config}


def _device_rank(args: object) -> int:
    """Return the index that ``DeepSpeedEngine._set_distributed_vars`` will make current; below 0 it changes nothing."""
    local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or -1
    return int(getattr(args, "device_rank", local_rank))


def _refuse_incompatible(ds_config: object, block: str = BLOCK) -> None:
    import deepspeed

    version = deepspeed.__version__.partition("+")[0]
    if version not in SUPPORTED_DEEPSPEED:
        raise IncompatibleError(
            f"DeepSpeed {version} is not supported by this version of ds_tba, which was made for "
            f'{SUPPORTED_DEEPSPEED}: pip install "deepspeed{SUPPORTED_DEEPSPEED}", or remove "{block}".'
        )
    kind = deepspeed.accelerator.get_accelerator().device_name()
    if kind not in KINDS:
        raise IncompatibleError(f'the device is {kind}, and ds_tba serves the CPU and CUDA: remove "{block}".')
    compiler = getattr(ds_config, "compile_config", None)
    if getattr(compiler, "deepcompile", False):
        moves = "activations (offload_activation)" if getattr(compiler, "offload_activation", False) else "activations"
        raise IncompatibleError(
            f'DeepCompile moves {moves} and optimizer states itself and cannot be combined with "{block}": set '
            f'"compile": {{"deepcompile": false}}, or remove "{block}".'
        )


def _update_config(param_dict: Mapping[str, object], ds_config: object, *, trains: bool) -> UpdateConfig | None:
    """Return the block of the optimizer update, or None without an enabled one."""
    if UPDATE_BLOCK not in param_dict or not trains:
        return None
    config = parse_update_block(param_dict)
    if config is not None:
        show_log()
        _refuse_incompatible(ds_config, UPDATE_BLOCK)
    return config


# ---- from offloader to engine ---------------------------------------------------------------------------------------


def _join(engine: Engine, offloader: ActivationOffloader) -> None:
    """Tie an offloader to a built engine."""
    _hook_methods(type(engine))
    stage = _agreement_of_stage(engine) if offloader.config.is_planned else None
    offloader.watch(engine.module, stage=stage, meter=functools.partial(_memory, weakref.ref(engine)))
    engine.activation_offloader = offloader
    for module in engine.module.modules():
        # After ZeRO-3's own pre-forward hooks, which gather the parameters into new storage. Nowhere else: after a
        # graph break torch.compile compiles PyTorch's own modules only where they have hooks.
        if any(hasattr(parameter, "ds_id") for parameter in module._parameters.values()):
            offloader.on_close(module.register_forward_pre_hook(_mark_owned).remove)
    # HF and Accelerate never call destroy(). At interpreter exit the offloader closes by itself.
    weakref.finalize(engine, offloader.close_soon).atexit = False
    if own_rank() == 0:
        logger.info("%s", offloader.start_line())


def _memory(alive: weakref.ref[Engine]) -> ModelMemory:
    """Count what an engine holds on its device beside activations, for as long as it lives."""
    from ds_tba.explain.out_of_memory import memory_of

    engine = alive()
    return ModelMemory() if engine is None else memory_of(engine.module, engine.optimizer, torch.device(engine.device))


def _join_update(engine: Engine, config: UpdateConfig) -> None:
    """Take the optimizer updates of a built engine over; ranks succeed or fail together."""
    from deepspeed.accelerator import get_accelerator

    from ds_tba.update.zero3 import InterleavedUpdate

    def make() -> InterleavedUpdate:
        accelerator = accelerator_of(get_accelerator().device_name())
        return InterleavedUpdate(config, accelerator, engine.optimizer, rank=own_rank())

    update = on_all_ranks(make)
    engine.interleaved_optimizer_update = update
    _hook_methods(type(engine))
    update.highest_of_ranks = agreement().all_reduce_max
    if own_rank() == 0:
        logger.info(update.start_line())


def _mark_owned(module: torch.nn.Module, _inputs: object) -> None:
    if not torch.compiler.is_compiling():
        uncompiled(mark_owned, module)


def _hook_methods(engine_class: type) -> None:
    """Wrap the methods of DeepSpeed's engines once, on the classes that define them."""
    for defining in engine_class.__mro__:
        for name, around in _AROUND.get(defining.__name__, {}).items():
            _wrap(defining, name, functools.partial(_hooked, around))


def _hooked(around: Around | None, engine: Engine, original: Original) -> object:
    """Call ``around``; without that, refuse while the model is half updated."""
    offloader: Any = engine.__dict__.get(ATTRIBUTE)  # None on an engine that has only the optimizer update
    # A model of which only a part has taken a step would train on, or be saved, as if nothing had happened.
    if around in (_forward, _save_checkpoint, None):
        refuse_half_updated(getattr(engine, "optimizer", None))
    if around is _forward and offloader is None and torch.is_grad_enabled():
        OPEN_HOOKS.close()  # of an engine that may be given up: an exception that the program keeps holds it
    if around is None or (offloader is None and around is not _destroy):
        return original()
    try:
        return around(offloader, original, engine)
    except (MemoryError, RuntimeError) as error:
        if offloader is not None:
            offloader.note_failure(error)
        if isinstance(error, StateError) and _CHECKPOINT in engine.__dict__:
            raise StateError(f"{error} The last checkpoint is {engine.__dict__[_CHECKPOINT]}.") from error
        raise


def _forward(offloader: ActivationOffloader, original: Original, engine: Engine) -> object:
    if getattr(engine, "_is_compiled_autograd_enabled", False):
        raise IncompatibleError(
            f'compiled autograd compiles the hooks with which "{BLOCK}" brings activations back: call engine.compile() '
            f'without compiled_autograd_enabled=True, or remove "{BLOCK}".'
        )
    skip_frames((_mark_owned,))
    mark_all_owned(engine.module)
    try:
        with offloader.saving(inputs=(original.args, original.keywords)):
            result = original()
    except RuntimeError as error:
        if _NO_HOOKS not in str(error):
            raise
        raise IncompatibleError(
            f"the model's forward uses torch.func, which PyTorch does not run under saved-tensor hooks: {error} "
            f'Take the transform out of forward, or remove "{BLOCK}".'
        ) from error
    offloader.keep_saving()
    return result


def _backward(offloader: ActivationOffloader, original: Original, engine: Engine) -> object:
    offloader.stop_saving()
    return original()


def _step(offloader: ActivationOffloader, original: Original, engine: Engine) -> object:
    offloader.stop_saving()
    # Before the optimizer: gradients that may be wrong are refused while no parameter has taken them.
    offloader.note_micro_step()
    before = engine.global_steps
    result = original()
    if engine.global_steps > before:  # else a micro-step inside gradient accumulation
        offloader.note_step()
    return result


def _save_checkpoint(_offloader: ActivationOffloader, original: Original, engine: Engine) -> object:
    """Remember where a checkpoint is, for who has to go back to it."""
    asked = inspect.signature(original.func).bind(*original.args, **original.keywords).arguments
    result = original()
    engine.__dict__[_CHECKPOINT] = os.path.join(
        asked["save_dir"], str(asked.get("tag") or f"global_step{engine.global_steps}")
    )
    return result


def _train_batch(offloader: ActivationOffloader, original: Original, engine: Engine) -> object:
    with offloader.interleaving():
        result = original()
    offloader.note_step()
    return result


def _destroy(offloader: ActivationOffloader | None, original: Original, engine: Engine) -> object:
    update = engine.__dict__.get(UPDATE_ATTRIBUTE)
    if update is not None:  # before DeepSpeed takes the optimizer apart
        update.close()
    try:
        return original()
    finally:
        if offloader is not None:
            offloader.close()


def _collected(offloader: ActivationOffloader, original: Original, engine: Engine) -> object:
    """Close before ``__del__``, which runs wherever the garbage collector does: ``destroy`` must not block there."""
    engine.__dict__.pop(ATTRIBUTE, None)
    offloader.close_soon()
    return original()


# A function that calls a method of DeepSpeed's, with our work before and after it, and returns the method's result.
Around = Callable[[Any, Original, Any], object]
# By the class that defines the methods; those with None only refuse while the model is half updated.
_AROUND: Mapping[str, Mapping[str, Around | None]] = {
    "DeepSpeedEngine": {
        "forward": _forward,
        "backward": _backward,
        "step": _step,
        "save_checkpoint": _save_checkpoint,
        "save_16bit_model": None,
        "_zero3_consolidated_16bit_state_dict": None,
        "destroy": _destroy,
        "__del__": _collected,
    },
    "PipelineEngine": {"train_batch": _train_batch},  # see [Note: Pipelines]
}


# ---- ranks ----------------------------------------------------------------------------------------------------------


def _agreement_of_stage(engine: Engine) -> Agreement | None:
    """Return the ranks that hold the same stage of a pipeline; None without stages. A collective of all ranks."""
    pipeline: Any = engine.module
    if not getattr(engine, "pipeline_parallelism", False) or pipeline.num_stages == 1:
        return None
    from ds_tba.plan.agreement import Ranks

    topology = pipeline.topology()
    stages = [topology.get_axis_list("pipe", stage) for stage in range(pipeline.num_stages)]
    return Ranks.of_stage(stages)
