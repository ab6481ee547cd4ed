"""The ``"activation_nvme_offload"`` block as pydantic models, and every rule that needs no look at the machine.

Knows JSON and the rules; does not know DeepSpeed, torch or the file system (``storage/swap_file.py`` checks
directories).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Annotated, Any, Literal

from packaging.specifiers import SpecifierSet
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from ds_tba.errors import ConfigError

BLOCK = "activation_nvme_offload"
UPDATE_BLOCK = "interleaved_optimizer_update"
BLOCKS = (BLOCK, UPDATE_BLOCK)
SUPPORTED_DEEPSPEED = SpecifierSet(">=0.19.5,<0.20", prereleases=True)
NEAR_MISS_RATIO = 0.8
_LIKELY_BLOCKS = ("zero_optimization", "activation_checkpointing")
IO_ALIGNMENT_BYTES = 4096
# Part of staging that reading ahead may use while there are writes.
PREFETCH_FRACTION_OF_STAGING = 0.5
# Staging where the config has null: bounds (the upper one for a GPU), and the part of the rank's available host memory.
MIN_STAGING_BYTES, MAX_STAGING_BYTES = 256 << 20, 1 << 30
STAGING_FRACTION = 1 / 16

_IN_NO_PATH = re.compile(r"[\0\ud800-\udfff]")

PlacementMode = Literal["adaptive", "nvme", "host", "keep"]
BackendName = Literal["aio", "gds", "kvikio", "posix"]
Integrity = Literal["off", "sampled", "full"]


class Placement(IntEnum):
    """Where a saved storage goes. The numbers serve arrays of placements only."""

    KEEP = 0
    HOST = 1
    NVME = 2
    RECOMPUTE = 3
    REMATERIALIZE = 4

    @property
    def word(self) -> str:
        """As in the config and in reports."""
        return self.name.lower()


def number(value: Any) -> Any:
    """Pydantic would read ``true`` as 1 and ``"64"`` as 64; in a config both are slips, not numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PydanticCustomError("number", "it must be a JSON number, in the unit that the key's name says")
    return value


def _path_or_paths(value: Any) -> Any:
    """One message for the union; pydantic would print one for each branch."""
    paths = value if isinstance(value, list) else [value]
    if not paths or not all(isinstance(path, str) and path.strip() for path in paths):
        raise PydanticCustomError("paths", "it must be a directory or a non-empty list of directories")
    for path in paths:
        _path(path)
    return value


def _path(value: Any) -> Any:
    if isinstance(value, str) and _IN_NO_PATH.search(value):
        raise PydanticCustomError(
            "path", "it must be a path, which has no NUL and no half of a surrogate pair; take that character out"
        )
    return value


Count = Annotated[int, BeforeValidator(number), Field(ge=0)]
Bytes = Annotated[int, BeforeValidator(number), Field(ge=0)]
PositiveInt = Annotated[int, BeforeValidator(number), Field(ge=1)]
Lanes = Annotated[int, BeforeValidator(number), Field(ge=1, le=64)]
Fraction = Annotated[float, BeforeValidator(number), Field(ge=0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, BeforeValidator(number), Field(gt=0, allow_inf_nan=False)]
NonEmptyStr = Annotated[StrictStr, Field(min_length=1)]
FilePath = Annotated[NonEmptyStr, BeforeValidator(_path)]


class Block(BaseModel):
    """A block of the config, or a part of one."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class IoConfig(Block):
    """``io``: how bytes reach the swap file.

    ``integrity``: ``sampled`` finds I/O blocks that were lost, cut short at either end, or hold older bytes throughout.
    Only ``full`` finds a hole inside of a block, which a kernel or a drive that splits requests may leave.
    ``staging_bytes``: null is derived when a run starts; see :func:`with_staging`.
    """

    backend: BackendName | None = None
    write_lanes: Lanes = 2
    read_lanes: Lanes = 2
    staging_bytes: Annotated[int, BeforeValidator(number), Field(ge=1 << 20)] | None = None
    swap_file_bytes: Annotated[int, BeforeValidator(number), Field(ge=1 << 20)] | None = None
    integrity: Integrity = "sampled"

    @property
    def ring_bytes(self) -> int:
        """Bytes of staging, as set or derived."""
        return MIN_STAGING_BYTES if self.staging_bytes is None else self.staging_bytes


class SsdConfig(Block):
    """``ssd``: endurance figures the planner may not exceed."""

    rated_endurance_tbw: PositiveFloat | None = None
    min_life_days: PositiveFloat | None = None


class ReportConfig(Block):
    """``report``: where and how often the report is written."""

    path: FilePath | None = None
    trace_path: FilePath | None = None
    every_steps: Count = 0


class AioConfig(BaseModel):
    """DeepSpeed's own ``"aio"`` block (``runtime/swap_tensor/aio_config.py``); unknown keys are its business."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    block_size: Annotated[int, BeforeValidator(number), Field(ge=IO_ALIGNMENT_BYTES, le=1 << 30)] = 1 << 20
    queue_depth: Annotated[int, BeforeValidator(number), Field(ge=1, le=65536)] = 8
    intra_op_parallelism: Annotated[int, BeforeValidator(number), Field(ge=1, le=64)] = 1
    single_submit: StrictBool = False
    overlap_events: StrictBool = True

    @model_validator(mode="after")
    def _aligned(self) -> AioConfig:
        if self.block_size % IO_ALIGNMENT_BYTES:
            raise PydanticCustomError(
                "aio_block_size",
                "block_size {value} must be a multiple of 4096 bytes; {repair} is the next one",
                {"value": self.block_size, "repair": -(-self.block_size // IO_ALIGNMENT_BYTES) * IO_ALIGNMENT_BYTES},
            )
        return self


class RematerializeConfig(Block):
    """``rematerialize`` in detail: what is not made again, by the names of its ops."""

    exclude: list[NonEmptyStr] = []


class OffloadConfig(Block):
    """The block. Units are in the names; no value is ever the string ``"auto"``."""

    enabled: StrictBool = True
    nvme_path: Annotated[str | list[str], BeforeValidator(_path_or_paths)] | None = None
    placement: PlacementMode = "adaptive"
    min_tensor_bytes: Bytes = 1 << 20
    max_step_overhead: Fraction = 0.02
    activation_budget_bytes: Bytes | None = None
    rematerialize: StrictBool | RematerializeConfig = True
    recompute: StrictBool = False
    blocks: list[NonEmptyStr] | None = None
    host_budget_bytes: Bytes = 0
    io: IoConfig = IoConfig()
    ssd: SsdConfig = SsdConfig()
    report: ReportConfig = ReportConfig()

    @property
    def nvme_paths(self) -> tuple[str, ...]:
        """``nvme_path`` as a tuple, empty where the placement needs none."""
        if self.nvme_path is None:
            return ()
        return (self.nvme_path,) if isinstance(self.nvme_path, str) else tuple(self.nvme_path)

    @property
    def rematerialize_enabled(self) -> bool:
        """Whether storages may be made again from others."""
        return self.rematerialize is not False

    @property
    def rematerialize_exclude(self) -> frozenset[str]:
        """Ops whose outputs are not made again."""
        return frozenset(() if isinstance(self.rematerialize, bool) else self.rematerialize.exclude)

    @property
    def uses_nvme(self) -> bool:
        """Whether any tensor may go to a swap file."""
        return self.placement in ("adaptive", "nvme")

    @model_validator(mode="after")
    def _consistent(self) -> OffloadConfig:
        if self.enabled and self.uses_nvme and not self.nvme_paths:
            raise PydanticCustomError(
                "nvme_path_needed",
                'nvme_path is missing: placement "{placement}" needs a directory on an NVMe drive, '
                'for example "nvme_path": "/local_nvme"',
                {"placement": self.placement},
            )
        if self.enabled and self.placement == "host" and not self.host_budget_bytes:
            raise PydanticCustomError(
                "host_budget_needed",
                'host_budget_bytes is 0: placement "host" needs the bytes of host memory that it may take',
            )
        repeated = sorted({path for path in self.blocks or () if (self.blocks or []).count(path) > 1})
        if repeated:
            raise PydanticCustomError(
                "blocks_repeated",
                "blocks names {repeated} more than once; name each layer once",
                {"repeated": ", ".join(repeated)},
            )
        if self.ssd.min_life_days is not None and self.ssd.rated_endurance_tbw is None:
            raise PydanticCustomError(
                "rated_endurance_needed",
                "ssd.min_life_days is {days} without ssd.rated_endurance_tbw: a drive's life follows from its rating; "
                "set it from the data sheet, in terabytes written",
                {"days": self.ssd.min_life_days},
            )
        if self.io.swap_file_bytes is not None and self.min_tensor_bytes > self.io.swap_file_bytes:
            raise PydanticCustomError(
                "swap_file_bytes",
                "io.swap_file_bytes {file} is below min_tensor_bytes {least}, so the swap file could hold no tensor; "
                "raise io.swap_file_bytes to what one step saves, or leave it out: the free space is the limit then",
                {"least": self.min_tensor_bytes, "file": self.io.swap_file_bytes},
            )
        if self.min_tensor_bytes > self.io.ring_bytes:
            raise PydanticCustomError(
                "min_tensor_bytes",
                "min_tensor_bytes {least} is above io.staging_bytes {staging}, so no tensor could ever be staged; "
                "lower min_tensor_bytes or raise io.staging_bytes",
                {"least": self.min_tensor_bytes, "staging": self.io.ring_bytes},
            )
        return self


def with_staging(config: OffloadConfig, host_bytes: float, *, is_host: bool) -> OffloadConfig:
    """The config with ``io.staging_bytes`` derived where it is null.

    Forward saves in bursts, which staging buffers while the drives write; a tensor that finds no room in staging is
    kept. Staging stays small on a CPU, whose own memory it takes, and with GPUDirect Storage, where it is device
    memory; also without a plan, where its size bounds what is read ahead onto the device.

    Args:
        host_bytes: host memory that is available to this rank.
        is_host: whether the training device is a CPU.
    """
    if config.io.staging_bytes is not None:
        return config
    is_small = is_host or config.io.backend in ("gds", "kvikio") or config.placement != "adaptive"
    most_bytes = MIN_STAGING_BYTES if is_small else MAX_STAGING_BYTES
    share_bytes = int(min(most_bytes, host_bytes * STAGING_FRACTION)) // IO_ALIGNMENT_BYTES * IO_ALIGNMENT_BYTES
    nbytes = max(share_bytes, MIN_STAGING_BYTES)
    return config.model_copy(update={"io": config.io.model_copy(update={"staging_bytes": nbytes})})


def parse_block(ds_config: Mapping[str, Any]) -> tuple[OffloadConfig, AioConfig] | None:
    """The validated block of a DeepSpeed config, or None where it is absent or ``"enabled": false``.

    Args:
        ds_config: the whole ``ds_config.json`` as a mapping.

    Raises:
        ConfigError: naming for every bad key its value, the rule and the repair.
    """
    config: OffloadConfig | None = block_of(
        ds_config, BLOCK, OffloadConfig, '{"enabled": true, "nvme_path": "/local_nvme"}'
    )
    if config is None or not config.enabled:
        return None
    aio = ds_config.get("aio") or {}
    if not isinstance(aio, Mapping):
        raise ConfigError(f'"aio" is {aio!r}: it must be an object.')
    return config, validate(AioConfig, aio, "aio")


def block_of(ds_config: Mapping[str, Any], name: str, model: type[Block], example: str) -> Any:
    """The validated block of that name, or None where it is absent.

    Raises:
        ConfigError: naming for every bad key its value, the rule and the repair.
    """
    if name not in ds_config:
        return None
    block = ds_config[name]
    if not isinstance(block, Mapping):
        raise ConfigError(f'"{name}" is {block!r}: it must be an object, for example {example}.')
    _refuse_auto(block, name)
    return validate(model, block, name)


def refuse_misplaced(ds_config: Mapping[str, Any]) -> None:
    """Refuse a block of ours inside of another one, where DeepSpeed ignores it or says only that it knows no such key.

    Raises:
        ConfigError: naming the place and the right one.
    """
    for keys, _ in _entries(ds_config):
        if len(keys) > 1 and keys[-1] in BLOCKS:
            raise ConfigError(
                f'"{keys[-1]}" is inside "{".".join(keys[:-1])}", where nobody reads it: move the block to the top '
                f'level of ds_config.json, beside "{keys[0]}".'
            )


def near_misses(ds_config: Mapping[str, Any], block: str = BLOCK) -> list[str]:
    """Keys that look like a misspelt name of ``block``, at the top level or in the blocks where one might look for it.

    Returns:
        Each with the block that it is in: ``"zero_optimization.nvme_offload"``.
    """
    names = (".".join(keys) for keys, _ in _entries(ds_config) if _is_like(keys[-1], block))
    return [name for name in names if name.rpartition(".")[0] in ("", *_LIKELY_BLOCKS)]


def _entries(blocks: Mapping[str, Any], *outer: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All keys of all blocks but those inside of ours, as paths, with their values."""
    for key, value in blocks.items():
        yield (*outer, str(key)), value
        if isinstance(value, Mapping) and key not in BLOCKS:
            yield from _entries(value, *outer, str(key))


def _is_like(key: str, block: str) -> bool:
    if key in BLOCKS:
        return False
    words = _sorted_words(key)
    stems = sum(stem in words for stem in block.split("_"))
    return stems >= 2 or difflib.SequenceMatcher(None, words, _sorted_words(block)).ratio() >= NEAR_MISS_RATIO


def _sorted_words(key: str) -> str:
    return "_".join(sorted(key.lower().replace("-", "_").split("_")))


def _refuse_auto(block: Mapping[str, Any], at: str) -> None:
    for key, value in block.items():
        if value == "auto":
            raise ConfigError(f'"{at}.{key}" is "auto": this block has no "auto"; leave the key out for its default.')
        if isinstance(value, Mapping):
            _refuse_auto(value, f"{at}.{key}")


def validate(model: Any, block: Mapping[str, Any], at: str) -> Any:
    try:
        return model.model_validate(dict(block))
    except ValidationError as error:
        lines = dict.fromkeys(_explain(model, detail, at) for detail in error.errors())
        raise ConfigError("ds_config.json is refused:\n  " + "\n  ".join(lines)) from None


def _explain(model: type[BaseModel], detail: ErrorDetails, at: str) -> str:
    """One line for one pydantic error: key, value, rule, repair."""
    steps = list(detail["loc"])
    key = ".".join([at, *map(str, steps)])
    value = detail["input"]
    if detail["type"] == "extra_forbidden":
        keys = _keys_at(model, steps)
        closest = _did_you_mean(str(steps[-1]), keys) or f". The choices are {', '.join(keys)}."
        return f'"{key}": {value!r} is not a key of this block{closest}'
    if detail["type"] == "literal_error":
        expected = str(detail.get("ctx", {}).get("expected", ""))
        choices = [choice.strip("'\" ") for choice in expected.replace(" or ", ",").split(",")]
        allowed = ", ".join(f'"{choice}"' for choice in choices)
        return f'"{key}" is {value!r}: it must be one of {allowed}{_did_you_mean(str(value), choices) or "."}'
    if not steps:
        return f'"{key}": {_rule(detail)}.'
    return f'"{key}" is {value!r}: {_rule(detail)}{_hint(key, value)}.'


def _rule(detail: ErrorDetails) -> str:
    message = detail["msg"]
    return message.replace("Input should", "it must").replace("Value error, ", "")


def _hint(key: str, value: Any) -> str:
    """What to write instead of a string, where a number or a boolean is expected."""
    if not isinstance(value, str):
        return ""
    text = value.strip()
    if text.lower() in ("true", "false"):
        return f"; drop the quotes: {text.lower()}"
    units = {"k": 10, "m": 20, "g": 30, "t": 40}
    digits = text.rstrip("iIbB ").strip() if key.endswith("_bytes") else text
    unit = units.get(digits[-1:].lower()) if key.endswith("_bytes") else None
    try:
        number = float(digits[:-1] if unit else digits)
    except ValueError:
        return ""
    if not math.isfinite(number):
        return ""
    if unit or text != digits:
        return f"; {value!r} would be {int(number * (1 << (unit or 0)))}"
    return f"; drop the quotes: {text}"


def _keys_at(model: type[BaseModel], steps: list[Any]) -> list[str]:
    for step in steps[:-1]:
        annotation = model.model_fields[str(step)].annotation if str(step) in model.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        model = annotation
    return list(model.model_fields)


def _did_you_mean(word: str, choices: list[str]) -> str:
    close = difflib.get_close_matches(word.lower(), choices, n=1, cutoff=0.6)
    return f"; did you mean `{close[0]}`?" if close else ""


# ---- the bounds of reading ahead, which the store keeps and a replay foresees ---------------------------------------


def may_read_ahead(
    nbytes: int, prefetched_bytes: int, retained_bytes: int, staging_bytes: int, *, while_writing: bool
) -> bool:
    """Whether ``nbytes`` more may be read ahead; the first storage always may.

    While there are writes, reads ahead leave a part of staging to them.
    """
    ahead_bytes = prefetched_bytes + nbytes
    bound_bytes = staging_bytes * PREFETCH_FRACTION_OF_STAGING if while_writing else staging_bytes
    return not prefetched_bytes or (ahead_bytes <= bound_bytes and ahead_bytes + retained_bytes <= staging_bytes)


def may_retain(nbytes: int, prefetched_bytes: int, retained_bytes: int, staging_bytes: int) -> bool:
    """Whether ``nbytes`` that are still to be written may stay in staging when their write ends.

    They have a slot, so that the part which reads ahead leave to writes does not matter. If it did, bytes that are
    being written when backward begins would hold up the reads behind them.
    """
    return prefetched_bytes + retained_bytes + nbytes <= staging_bytes
