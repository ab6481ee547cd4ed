"""When DeepSpeed's engine does what: finds the block, builds the offloader, hooks the class; nobody else knows it.

DeepSpeed has no plugin mechanism, so methods of the class are wrapped: ``__init__`` always (to look up one key of the
config); ``forward``, ``step`` and ``destroy`` once there is an engine whose config has a block of ours, and what saves
a model once one has that of the optimizer update. Reading a config is wrapped too, to find the block where it does not
belong. References are to ``deepspeed/runtime/engine.py`` of 0.19.8.

[Note: Pipelines] ``PipelineEngine`` (``deepspeed/runtime/pipe/engine.py``) calls the base class's ``forward`` for each
micro-batch and never ``step``: its ``train_batch`` is one step, in which forwards and backwards of several
micro-batches alternate. Its ranks hold the layers of one stage each, and only ranks of the same stage have anything to
agree on.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import logging
import os
import socket
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import distributed

from ds_tba.config import (
    BLOCK,
    SUPPORTED_DEEPSPEED,
    UPDATE_BLOCK,
    AioConfig,
    OffloadConfig,
    is_off,
    parse_block,
    refuse_misnamed,
    zero_block,
)
from ds_tba.core.tensors import OwnedStorages, mark_owned, skip_frames, uncompiled
from ds_tba.device.accelerator import adapted
from ds_tba.errors import ConfigError, IncompatibleError
from ds_tba.explain.out_of_memory import ModelMemory
from ds_tba.offloader import ActivationOffloader
from ds_tba.plan.agreement import Agreement, Alone, Ranks
from ds_tba.recompute.blocks import FRAMES
from ds_tba.stats import expanded
from ds_tba.update.config import UpdateConfig, parse_update_block
from ds_tba.update.interleaved import InterleavedUpdate
from ds_tba.update.zero3 import refuse_half_updated

logger = logging.getLogger("ds_tba")

ATTRIBUTE = "activation_offloader"
UPDATE_ATTRIBUTE = "interleaved_optimizer_update"
# Of the environment: the block for configs that a trainer makes by itself, as JSON or as a file's path.
VARIABLE = "DS_TBA_BLOCK"
_HOOKED = "_ds_tba_hooked"
_OWNED = "_ds_tba_owned"
_Made = TypeVar("_Made", bound=ActivationOffloader | InterleavedUpdate | None)
_NO_HOOKS = "support saved tensor hooks"  # in the message of torch/_functorch/eager_transforms.py
# Ranks may arrive minutes apart: one of them builds DeepSpeed's aio op while the others wait for it.
AGREEMENT_TIMEOUT = timedelta(minutes=30)
GOODBYE_TIMEOUT = timedelta(seconds=20)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def hook(engine_class: type) -> None:
    """Let every engine built from now on look for the block. Idempotent."""
    original = engine_class.__init__  # type: ignore[misc]
    if getattr(original, _HOOKED, False):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        arguments = signature.bind(self, *args, **kwargs).arguments
        ds_config = arguments.get("config_class")
        param_dict = getattr(ds_config, "_param_dict", None) or {}
        trains = arguments.get("optimizer") is not None or bool(param_dict.get("optimizer"))
        update = _update_config(param_dict, ds_config, trains=trains)
        offloader = _build(param_dict, ds_config, trains=trains, device_rank=_device_rank(arguments.get("args")))
        try:
            original(self, *args, **kwargs)
        except BaseException:
            if offloader is not None:
                offloader.close()
            raise
        if offloader is not None:
            _join(self, offloader)
        if update is not None:
            _join_update(self, update)

    setattr(__init__, _HOOKED, True)
    engine_class.__init__ = __init__  # type: ignore[misc]


def hook_config(config_class: type) -> None:
    """Refuse a block in a wrong place, or under a wrong name, before DeepSpeed reads the config. Idempotent.

    Later is too late: DeepSpeed refuses unknown keys of some blocks without a word about the right place.
    """
    original = getattr(config_class, "_initialize_params", None)  # deepspeed/runtime/config.py
    if original is None or getattr(original, _HOOKED, False):
        return

    @functools.wraps(original)
    def _initialize_params(self: Any, param_dict: Mapping[str, Any]) -> None:
        refuse_misnamed(param_dict)
        original(self, param_dict)

    setattr(_initialize_params, _HOOKED, True)
    config_class._initialize_params = _initialize_params  # type: ignore[attr-defined]


def attach(engine: Any) -> ActivationOffloader:
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
    _join(engine, offloader)
    return offloader


# ---- from config to offloader ---------------------------------------------------------------------------------------


def _build(
    param_dict: Mapping[str, Any], ds_config: Any, *, trains: bool = True, device_rank: int = -1
) -> ActivationOffloader | None:
    """The offloader for a config, or None without an enabled block; ranks succeed or fail together.

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
        _show_log()
        if _rank() == 0:
            logger.info(
                "an engine without an optimizer (for evaluation, or of a reference model) keeps its "
                "activations in memory; if it trains with an optimizer that DeepSpeed does not know, call "
                "ds_tba.attach(engine)"
            )
        return None

    # Before anything of this machine is divided. Whatever the variables of a launcher say: srun, mpirun, Ray and people
    # who start ranks by hand set others, or none.
    ranks_on_machine = _agree(None).get(_machine(), 1)

    def make() -> ActivationOffloader | None:
        parsed = parse()
        if parsed is None:
            return None
        _show_log()
        if variable.strip() and _rank() == 0:
            used = "is used" if BLOCK not in param_dict else "is not used: the DeepSpeed config has the block itself"
            logger.info("%s of the environment %s", VARIABLE, used)
        _refuse_incompatible(ds_config)
        return _new_offloader(*parsed, param_dict, device_rank, ranks_on_machine)

    return _on_all_ranks(make)


def _config_in(variable: str) -> dict[str, Any]:
    """The block in an environment variable or the file that it names; with ``"aio"`` where that is a whole config."""
    is_text = variable.lstrip().startswith("{")
    try:
        found = json.loads(variable if is_text else expanded(variable.strip()).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{variable!r} is neither the block as JSON nor a readable file with it ({why}).") from None
    config = found if isinstance(found, dict) and BLOCK in found else {BLOCK: found}
    return {key: config[key] for key in (BLOCK, "aio") if key in config}


def _device_rank(args: Any) -> int:
    """The device that ``DeepSpeedEngine._set_distributed_vars`` will make current; below 0 it leaves that as it is."""
    local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or -1
    return int(getattr(args, "device_rank", local_rank))


def _new_offloader(
    config: OffloadConfig,
    aio_config: AioConfig,
    param_dict: Mapping[str, Any],
    device_rank: int,
    ranks_on_machine: int,
) -> ActivationOffloader:
    from deepspeed.accelerator import get_accelerator

    if device_rank >= 0:  # before DeepSpeed has set it, every rank's current device may be the first
        get_accelerator().set_device(device_rank)
    zero = zero_block(param_dict)
    return ActivationOffloader(
        config,
        aio_config,
        adapted(get_accelerator()),
        zero_uses_nvme=any(
            (zero.get(key) or {}).get("device") == "nvme" for key in ("offload_param", "offload_optimizer")
        ),
        rank=_rank(),
        ranks_on_node=ranks_on_machine,
    )


def _refuse_incompatible(ds_config: Any, block: str = BLOCK) -> None:
    import deepspeed

    version = deepspeed.__version__.partition("+")[0]
    if version not in SUPPORTED_DEEPSPEED:
        raise IncompatibleError(
            f"DeepSpeed {version} is not supported by this version of ds_tba, which was made for "
            f'{SUPPORTED_DEEPSPEED}: pip install "deepspeed{SUPPORTED_DEEPSPEED}", or remove "{block}".'
        )
    compiler = getattr(ds_config, "compile_config", None)
    if getattr(compiler, "deepcompile", False):
        moves = "activations (offload_activation)" if getattr(compiler, "offload_activation", False) else "activations"
        raise IncompatibleError(
            f'DeepCompile moves {moves} and optimizer states itself and cannot be combined with "{block}": set '
            f'"compile": {{"deepcompile": false}}, or remove "{block}".'
        )


def _update_config(param_dict: Mapping[str, Any], ds_config: Any, *, trains: bool) -> UpdateConfig | None:
    """The block of the optimizer update, or None without an enabled one."""
    if UPDATE_BLOCK not in param_dict or not trains:
        return None
    config = parse_update_block(param_dict)
    if config is not None:
        _show_log()
        _refuse_incompatible(ds_config, UPDATE_BLOCK)
    return config


# ---- from offloader to engine ---------------------------------------------------------------------------------------


def _join(engine: Any, offloader: ActivationOffloader) -> None:
    """Tie an offloader to a built engine."""
    try:
        _hook_methods(type(engine), _AROUND)
        everyone = _agreement()
        offloader.watch(engine.module, _agreement_of_stage(engine) or everyone, everyone=everyone)
        engine.activation_offloader = offloader
        offloader.model_memory = functools.partial(_model_memory, weakref.ref(engine))
        for module in engine.module.modules():
            # After ZeRO-3's own pre-forward hooks, which gather the parameters into new storage. Nowhere else: after a
            # graph break torch.compile compiles PyTorch's own modules only where they have hooks.
            if any(hasattr(parameter, "ds_id") for parameter in module._parameters.values()):
                offloader.on_close(module.register_forward_pre_hook(_mark_owned).remove)
        # HF and Accelerate never call destroy(). At interpreter exit the offloader closes by itself.
        weakref.finalize(engine, offloader.close_soon).atexit = False
    except BaseException:
        offloader.close()
        raise
    offloader.rest(now=True)  # until its engine trains: a reference model's may have the config of one that does
    if _rank() == 0:
        logger.info("%s", offloader.start_line())
        logger.debug("%s", offloader.start_details())


def _model_memory(engine_of: Callable[[], Any]) -> ModelMemory:
    """What the engine holds on its device beside activations; every storage counts once."""
    engine = engine_of()
    if engine is None:
        return ModelMemory()
    device, seen = torch.device(engine.device).type, set[int]()

    def take(value: Any, depth: int = 3) -> int:
        if isinstance(value, torch.Tensor):
            if value.device.type != device or value.layout is not torch.strided:
                return 0
            storage = value.untyped_storage()
            is_new = storage.data_ptr() not in seen
            seen.add(storage.data_ptr())
            return storage.nbytes() if is_new else 0
        if isinstance(value, Mapping):
            value = list(value.values())
        return sum(take(one, depth - 1) for one in value) if depth and isinstance(value, (list, tuple)) else 0

    parameters = list(engine.module.parameters())
    held = take([parameters, [getattr(one, "ds_tensor", None) for one in parameters], list(engine.module.buffers())])
    gradients = take([one.grad for one in parameters])
    states, optimizer, name = 0, engine.optimizer, ""
    while optimizer is not None:  # DeepSpeed's is around the user's
        name = type(optimizer).__name__
        # Under ZeRO gradients are in buffers of its own.
        gradients += sum(take(value) for key, value in vars(optimizer).items() if "grad" in key)
        states += sum(take(value) for value in vars(optimizer).values())
        optimizer = vars(optimizer).get("optimizer")
    return ModelMemory(
        parameters=held,
        gradients=gradients,
        states=states,
        trained=sum(
            getattr(one, "ds_numel", one.numel()) * one.element_size() for one in parameters if one.requires_grad
        ),
        micro_batch=int(engine.train_micro_batch_size_per_gpu()),
        accumulation=int(engine.gradient_accumulation_steps()),
        optimizer=name,
        zero=zero_block(engine._config._param_dict),
    )


def _join_update(engine: Any, config: UpdateConfig) -> None:
    """Take the optimizer updates of a built engine over; ranks succeed or fail together."""
    from deepspeed.accelerator import get_accelerator

    def make() -> InterleavedUpdate:
        return InterleavedUpdate(config, adapted(get_accelerator()), engine.optimizer, rank=_rank())

    try:
        update = _on_all_ranks(make)
    except BaseException:
        offloader = getattr(engine, ATTRIBUTE, None)
        if offloader is not None:
            offloader.close()
        raise
    engine.interleaved_optimizer_update = update
    _hook_methods(type(engine), _AROUND, _SAVING)
    update.agree(_agreement().all_reduce_max)
    if _rank() == 0:
        logger.info(update.start_line())


def _mark_owned(module: torch.nn.Module, _inputs: Any) -> None:
    if not torch.compiler.is_compiling():
        uncompiled(mark_owned, module)


def _hook_methods(engine_class: type, *tables: _Table) -> None:
    """Wrap the methods of DeepSpeed's engines once, on the classes that define them."""
    for defining, table in itertools.product(engine_class.__mro__, tables):
        for name, around in table.get(defining.__name__, {}).items():
            original = getattr(defining, name)
            if not getattr(original, _HOOKED, False):
                setattr(defining, name, _wrapped(original, around))


def _wrapped(original: Callable[..., Any], around: Callable[..., Any] | None) -> Callable[..., Any]:
    """A method inside of ``around``; without that, refused while the model is half updated."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        offloader = self.__dict__.get(ATTRIBUTE)
        if around in (_forward, None):
            refuse_half_updated(getattr(self, "optimizer", None))
        if around is None or (offloader is None and around is not _destroy):
            return original(self, *args, **kwargs)
        try:
            return around(offloader, functools.partial(original, self, *args, **kwargs), self)
        except (MemoryError, RuntimeError) as error:
            if offloader is not None:
                offloader.note_failure(error)
            raise

    setattr(method, _HOOKED, True)
    return method


def _forward(offloader: ActivationOffloader, original: functools.partial[Any], engine: Any) -> Any:
    if getattr(engine, "_is_compiled_autograd_enabled", False):
        raise IncompatibleError(
            f'compiled autograd compiles the hooks with which "{BLOCK}" brings activations back: call engine.compile() '
            f'without compiled_autograd_enabled=True, or remove "{BLOCK}".'
        )
    skip_frames((_mark_owned, *FRAMES))
    engine.__dict__.setdefault(_OWNED, OwnedStorages()).mark(engine.module)
    if torch.is_grad_enabled():  # else a reference, say, for the loss of the forward before
        offloader.stop_saving()
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


def _backward(offloader: ActivationOffloader, original: functools.partial[Any], engine: Any) -> Any:
    offloader.stop_saving()
    if not getattr(engine, "pipeline_parallelism", False):  # whose loss_fn "until_backward" does not serve
        offloader.look_outside((original.args, original.keywords))
    return original()


def _step(offloader: ActivationOffloader, original: Callable[[], Any], engine: Any) -> Any:
    offloader.stop_saving()
    offloader.note_micro_step()
    before = engine.global_steps
    result = original()
    if engine.global_steps > before:  # else a micro-step inside gradient accumulation
        offloader.note_step()
        _tell_monitors(offloader, engine)
    return result


def _tell_monitors(offloader: ActivationOffloader, engine: Any) -> None:
    """Scalars for TensorBoard, W&B, Comet or CSV files, where DeepSpeed's config has one; beside DeepSpeed's own."""
    monitor = getattr(engine, "monitor", None)  # deepspeed/monitor/monitor.py: rank 0 writes
    if monitor is None or not monitor.enabled or engine.global_rank != 0:
        return
    monitor.write_events(
        [(f"Train/ActivationOffload/{name}", value, engine.global_samples) for name, value in offloader.scalars()]
    )


def _train_batch(offloader: ActivationOffloader, original: Callable[[], Any], engine: Any) -> Any:
    with offloader.interleaving():
        result = original()
    offloader.note_step()
    _tell_monitors(offloader, engine)
    return result


def _destroy(offloader: ActivationOffloader | None, original: Callable[[], Any], engine: Any) -> Any:
    update = engine.__dict__.get(UPDATE_ATTRIBUTE)
    if update is not None:  # before DeepSpeed takes the optimizer apart
        update.close()
    try:
        return original()
    finally:
        if offloader is not None:
            offloader.stop_saving()
            offloader.close()


def _collected(offloader: ActivationOffloader, original: Callable[[], Any], engine: Any) -> Any:
    """``__del__``: runs wherever the garbage collector does, and calls ``destroy``, which must not block there."""
    engine.__dict__.pop(ATTRIBUTE, None)
    offloader.stop_saving()
    offloader.close_soon()
    return original()


# By the class that defines the methods.
_Table = Mapping[str, Mapping[str, Callable[..., Any] | None]]
_AROUND: _Table = {
    "DeepSpeedEngine": {
        "forward": _forward,
        "backward": _backward,
        "step": _step,
        "destroy": _destroy,
        "__del__": _collected,
    },
    "PipelineEngine": {"train_batch": _train_batch},  # see [Note: Pipelines]
}
_SAVING: _Table = {
    "DeepSpeedEngine": dict.fromkeys(("save_checkpoint", "save_16bit_model", "_zero3_consolidated_16bit_state_dict"))
}


# ---- ranks ----------------------------------------------------------------------------------------------------------


def _rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def _agreement() -> Agreement:
    return Ranks() if distributed.is_initialized() and distributed.get_world_size() > 1 else Alone()


def _agreement_of_stage(engine: Any) -> Agreement | None:
    """The ranks that hold the same stage of a pipeline; None without stages. A collective of all ranks."""
    if not getattr(engine, "pipeline_parallelism", False) or engine.module.num_stages == 1:
        return None
    topology = engine.module.topology()
    stages = [topology.get_axis_list("pipe", stage) for stage in range(engine.module.num_stages)]
    return Ranks.of_part(stages, "stage")


def _on_all_ranks(make: Callable[[], _Made]) -> _Made:
    """Call ``make`` on each rank; where it raises on one, what it made on others is closed, and all raise."""
    made, problem = None, None
    try:
        made = make()
    except Exception as error:  # noqa: BLE001 - raised again below, once the other ranks know
        problem = error
    try:
        _agree(problem)
    except BaseException:
        if made is not None:
            made.close()
        raise
    return cast(_Made, made)


def _machine() -> str:
    """The kernel that this process runs on: containers of one machine share its drives and memory, and not its name."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _agree(problem: Exception | None) -> dict[str, int]:
    """Fail on every rank if any rank has a problem; return how many ranks each machine has.

    Uses the process group's key-value store and not a collective: a rank whose config lacks the block takes no part,
    and then the others end with an error that names it, instead of hanging.
    """
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        if problem is not None:
            raise problem
        return {}
    store = distributed.distributed_c10d._get_default_store()
    rank, size = distributed.get_rank(), distributed.get_world_size()
    build = store.add(f"ds_tba/{rank}/builds", 1)
    text = problem and f"{type(problem).__name__}: {problem}"
    store.set(f"ds_tba/{rank}/{build}", json.dumps({"problem": text, "machine": _machine()}))
    verdict = f"ds_tba/verdict/{build}"
    if rank == 0:  # which asks all of them: if each asked each, thousands of ranks would be at it for an hour
        store.set(verdict, json.dumps(_verdict(store, build, size)))
    found = None
    if problem is None:
        _answer(store, f"ds_tba/0/{build}", 0)  # a rank 0 that takes no part gives no verdict
        answer = _answer(store, verdict, 0, 2 * AGREEMENT_TIMEOUT)
        found = answer["problem"]
        if found is None:
            return dict(answer.get("machines", {}))
    store.set(f"ds_tba/{rank}/{build}/read", "")
    if rank == 0:  # which serves the store: stay until the others could read why
        with suppress(RuntimeError, distributed.DistError):
            store.wait([f"ds_tba/{other}/{build}/read" for other in range(1, size)], GOODBYE_TIMEOUT)
    raise ConfigError(found) if problem is None else problem


def _verdict(store: Any, build: int, size: int) -> dict[str, Any]:
    """The first problem that keeps the ranks from training, None where all can; and the ranks of each machine."""
    machines = Counter[str]()
    for rank in range(size):
        try:
            found = _answer(store, f"ds_tba/{rank}/{build}", rank)
        except ConfigError as error:
            return {"problem": str(error)}
        if found["problem"] is not None:
            text = f"rank {rank} cannot do what ds_config.json asks for, so no rank trains: {found['problem']}"
            return {"problem": text}
        machines[found.get("machine", "")] += 1
    return {"problem": None, "machines": machines}


def _answer(store: Any, key: str, rank: int, timeout: timedelta | None = None) -> dict[str, Any]:
    try:
        store.wait([key], timeout or AGREEMENT_TIMEOUT)
    except (RuntimeError, distributed.DistError) as error:
        raise ConfigError(
            f"rank {rank} did not take part in setting up ds_tba: give every rank the same ds_config.json, or the same "
            f"{VARIABLE}."
        ) from error
    answer: dict[str, Any] = json.loads(store.get(key))
    return answer


# ---- log ------------------------------------------------------------------------------------------------------------


def _show_log() -> None:
    """Make our start-up line and report visible where the script configured no logging.

    DeepSpeed's own logger shows warnings only, and "I set the JSON and nothing changed" is what users complain about.
    """
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [ds_tba] %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    with suppress(ValueError):
        logger.setLevel(os.environ.get("DS_TBA_LOG_LEVEL", "INFO").upper())
