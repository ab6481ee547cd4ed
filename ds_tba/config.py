"""The block ``"activation_nvme_offload"``: its keys, their rules, and refusals that name key, value, rule and repair.

This file knows JSON and every rule that needs no look at the machine. It cannot see DeepSpeed, torch or the file system
(``storage/path.py`` checks directories).
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args

from packaging.specifiers import SpecifierSet
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictStr,
    Tag,
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
# What people call our blocks, words in the order of the alphabet.
_NAMES = {
    "activation_nvme_offload": BLOCK, "nvme_offload": BLOCK, "activation_offload": BLOCK,
    "interleaved_optimizer_update": UPDATE_BLOCK, "interleaved_update": UPDATE_BLOCK,
    "interleaved_optimizer": UPDATE_BLOCK, "ds_tba": BLOCK, "dstba": BLOCK,
}  # fmt: skip
_LIKELY_PLACES = ((), ("zero_optimization",), ("activation_checkpointing",))
IO_ALIGNMENT_BYTES = 4096
# The fraction of staging that reading ahead may use while there are writes, which need the rest.
PREFETCH_FRACTION_OF_STAGING = 0.5
MIN_STAGING_BYTES = 256 << 20  # on a GPU, where the config has null

# ds_config.json as parsed, or one of its objects. Its values are anybody's JSON until a model has validated them.
DsConfig: TypeAlias = Mapping[str, Any]
PlacementMode = Literal["adaptive", "nvme", "host", "keep"]
BackendName = Literal["aio", "gds", "kvikio", "posix"]
Integrity = Literal["off", "sampled", "full"]
Compression = Literal["lz4", "zstd"]
CODEC_PACKAGE = "blosc2"
ASSUMED_RATIO = 0.65  # of compressed activations in BF16 to what they were; a run measures its own


class Placement(IntEnum):
    """The place of a saved storage. The numbers serve arrays of placements only."""

    KEEP = 0
    HOST = 1
    NVME = 2
    RECOMPUTE = 3
    REMATERIALIZE = 4

    @property
    def word(self) -> str:
        """The placement's name in the config and in reports."""
        return self.name.lower()


def refusal(rule: str) -> PydanticCustomError:
    """Return the error for a rule of ours that a value breaks, with the repair; :func:`validate` adds key and value."""
    return PydanticCustomError("rule", "{rule}", {"rule": rule})


def number(value: object) -> int | float:
    """Refuse ``true`` and ``"64"``, which pydantic would read as 1 and 64; in a config both are slips."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise refusal("it must be a JSON number, in the unit that the key's name says")
    return value


def _not_per_cent(value: float) -> float:
    """Refuse what may be meant as per cent. From 100 on it cannot be: that means whatever time it takes."""
    if 1 <= value < 100:
        raise refusal(
            f"it is a fraction of the step's time, so {value:g} is {100 * value:g} %; did you mean {value / 100:g}? "
            "It must be below 1, or 100 and more for no limit"
        )
    return value


def _path_or_paths(value: object) -> object:
    """Refuse with one message for the union; pydantic would print one for each branch."""
    paths = value if isinstance(value, list) else [value]
    if not paths or not all(isinstance(path, str) and path.strip() and "\0" not in path for path in paths):
        raise refusal("it must be a directory or a non-empty list of directories")
    return value


Validated = TypeVar("Validated", bound=BaseModel)
Count = Annotated[int, Field(ge=0, lt=1 << 62), BeforeValidator(number)]
Bytes = Count
Lanes = Annotated[int, Field(ge=1, le=64), BeforeValidator(number)]
Fraction = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(number), AfterValidator(_not_per_cent)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(number)]
Text = Annotated[StrictStr, Field(min_length=1, pattern=r"^[^\x00]*$")]  # no path has a NUL
Patterns = Annotated[list[Text], Field(min_length=1)]


class Block(BaseModel):
    """A block of the config, or a part of one. A key that it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class IoConfig(Block):
    """``io``: how bytes reach the swap file.

    ``staging_bytes``: derived from null (``storage/staging.py``). ``integrity``: ``sampled`` finds I/O blocks that were
    lost, cut short at either end, or are stale throughout. Only ``full`` finds a hole inside of a block, which a kernel
    or a drive that splits requests may leave. ``compression``: without loss, in the lanes.
    """

    backend: BackendName | None = None
    write_lanes: Lanes = 2
    read_lanes: Lanes = 2
    staging_bytes: Annotated[int, Field(ge=1 << 20, lt=1 << 62), BeforeValidator(number)] | None = None
    swap_file_bytes: Annotated[int, Field(ge=1 << 20, lt=1 << 62), BeforeValidator(number)] | None = None
    integrity: Integrity = "sampled"
    compression: Compression | None = None

    @property
    def ring_bytes(self) -> int:
        """Bytes of staging, set or derived."""
        return MIN_STAGING_BYTES if self.staging_bytes is None else self.staging_bytes


class SsdConfig(Block):
    """``ssd``: endurance figures the planner may not exceed."""

    rated_endurance_tbw: PositiveFloat | None = None
    min_life_days: PositiveFloat | None = None


class ReportConfig(Block):
    """``report``: where and how often the report is written."""

    path: Text | None = None
    trace_path: Text | None = None
    timeline_path: Text | None = None
    every_steps: Count = 0


class AioConfig(BaseModel):
    """DeepSpeed's own ``"aio"`` block (``runtime/swap_tensor/aio_config.py``); other keys are its business."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    # Direct I/O transfers no other sizes.
    block_size: Annotated[
        int, Field(ge=IO_ALIGNMENT_BYTES, le=1 << 30, multiple_of=IO_ALIGNMENT_BYTES), BeforeValidator(number)
    ] = 1 << 20
    queue_depth: Annotated[int, Field(ge=1, le=65536), BeforeValidator(number)] = 8
    single_submit: StrictBool = False
    overlap_events: StrictBool = True

    @model_validator(mode="after")
    def _fits_an_int(self) -> AioConfig:
        """Refuse what overflows in DeepSpeed's C++ (``deepspeed_aio_common.cpp``), which reads past a buffer then."""
        if not self.overlap_events and self.block_size * self.queue_depth >= 1 << 31:
            raise refusal(
                f"block_size {self.block_size} times queue_depth {self.queue_depth} must be below 2147483648 without "
                'overlap_events, or reads overwrite other memory: lower one of them, or set "overlap_events": true'
            )
        return self


# The kinds of ``rematerialize`` and ``recompute``: without them pydantic would print the errors of all branches.
_SWITCH, _DETAILS, _BY_NAME = "on or off", "in detail", "by name"


class RematerializeConfig(Block):
    """``rematerialize`` in detail: the names of ops whose outputs are not rematerialized."""

    exclude: list[Text] = []


class OffloadConfig(Block):
    """The block. Units are in the names; no value is ever the string ``"auto"``."""

    enabled: StrictBool = True
    nvme_path: Annotated[str | list[str], BeforeValidator(_path_or_paths)] | None = None
    placement: PlacementMode = "adaptive"
    min_tensor_bytes: Bytes = 1 << 20
    max_step_overhead: Fraction = 0.02
    activation_budget_bytes: Bytes | None = None
    rematerialize: Annotated[
        Annotated[StrictBool, Tag(_SWITCH)] | Annotated[RematerializeConfig, Tag(_DETAILS)],
        Discriminator(lambda value: _SWITCH if isinstance(value, bool) else _DETAILS),
    ] = True
    recompute: Annotated[
        Annotated[StrictBool, Tag(_SWITCH)] | Annotated[Patterns, Tag(_BY_NAME)],
        Discriminator(lambda value: _BY_NAME if isinstance(value, list) else _SWITCH),
    ] = False
    blocks: list[Text] | None = None
    only: Patterns | None = None
    except_: Patterns | None = Field(default=None, alias="except")  # a word of Python's
    host_budget_bytes: Bytes | None = 0
    until_backward: StrictBool = False
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
    def rematerialize_exclude(self) -> frozenset[str]:
        """Ops whose outputs are not rematerialized."""
        return frozenset(() if isinstance(self.rematerialize, bool) else self.rematerialize.exclude)

    @property
    def patterns(self) -> dict[str, list[str]]:
        """The patterns of modules' paths that choose what may leave device memory, by their key."""
        return {key: found for key, found in (("only", self.only), ("except", self.except_)) if found is not None}

    @property
    def shared_keys(self) -> str:
        """Name the keys for which ranks talk to each other, whatever else they have."""
        plans = 'placement "adaptive"' if self.placement == "adaptive" else "report.trace_path" * self.is_planned
        names = "only or except" if self.patterns else ""
        return " and ".join(filter(None, (plans, names))) or "none of them"

    @property
    def uses_nvme(self) -> bool:
        """True if any tensor may go to a swap file; under ``host`` with a path those for which the host has no room."""
        return self.placement in ("adaptive", "nvme") or (self.placement == "host" and self.nvme_path is not None)

    @property
    def is_planned(self) -> bool:
        """True where steps are recorded: for plans, or for ``report.trace_path`` alone."""
        return self.placement == "adaptive" or self.report.trace_path is not None

    @model_validator(mode="after")
    def _consistent(self) -> OffloadConfig:
        """Refuse values that contradict another key's, each with the repair."""
        least, io = self.min_tensor_bytes, self.io
        if self.enabled and self.uses_nvme and not self.nvme_paths:
            raise refusal(
                f'nvme_path is missing: placement "{self.placement}" needs a directory on an NVMe drive, for example '
                '"nvme_path": "/local_nvme"; without a drive "placement": "keep" measures and rematerializes'
            )
        budget_bytes = self.activation_budget_bytes
        if self.enabled and budget_bytes is not None and 0 < budget_bytes < least:
            raise refusal(
                f"activation_budget_bytes is {budget_bytes} bytes, below min_tensor_bytes {least}, so that it has room "
                "for no tensor that could be moved: 1 GiB is 1073741824; 0 asks for the lowest peak"
            )
        if self.enabled and self.placement == "host" and self.host_budget_bytes == 0:
            raise refusal(
                'host_budget_bytes is 0: placement "host" needs the bytes of host memory that it may take, or null for '
                "half of what is free"
            )
        files = [one for one in (self.report.path, self.report.trace_path, self.report.timeline_path) if one]
        if len({*files}) < len(files):
            raise refusal("report has one path for two files, of which only the last would stay: name one for each")
        if self.ssd.min_life_days is not None and self.ssd.rated_endurance_tbw is None:
            raise refusal(
                f"ssd.min_life_days is {self.ssd.min_life_days} without ssd.rated_endurance_tbw: a drive's life "
                "follows from its rating; set it from the data sheet, in terabytes written"
            )
        if self.uses_nvme and io.swap_file_bytes is not None and least > io.swap_file_bytes:
            raise refusal(
                f"io.swap_file_bytes {io.swap_file_bytes} is below min_tensor_bytes {least}, so the swap file could "
                "hold no tensor; raise io.swap_file_bytes to what one step saves, or leave it out: the free space is "
                "the limit then"
            )
        if self.uses_nvme and least > io.ring_bytes:
            raise refusal(
                f"min_tensor_bytes {least} is above the {io.ring_bytes} bytes of staging, so no tensor could ever be "
                "staged; lower min_tensor_bytes, or set io.staging_bytes to more"
            )
        return self


def parse_block(ds_config: DsConfig) -> tuple[OffloadConfig, AioConfig] | None:
    """Return the validated block of a whole ``ds_config.json``, or None where it is absent or ``"enabled": false``.

    Raises:
        ConfigError: naming for every bad key its value, the rule and the repair.
    """
    config = block_of(ds_config, BLOCK, OffloadConfig)
    return None if config is None else (config, validate(AioConfig, ds_config.get("aio") or {}, "aio"))


def zero_block(ds_config: DsConfig) -> DsConfig:
    """Return ``"zero_optimization"``, empty where it has the old form, ``true`` or ``false``."""
    zero = ds_config.get("zero_optimization")
    return zero if isinstance(zero, Mapping) else {}


def zero_paths(ds_config: DsConfig) -> tuple[str, ...]:
    """Return the directories of ZeRO's own offload to NVMe."""
    offloads = [zero_block(ds_config).get(key) for key in ("offload_param", "offload_optimizer")]
    found = [one for one in offloads if isinstance(one, Mapping)]
    return tuple(str(one.get("nvme_path")) for one in found if one.get("device") == "nvme")


def block_of(ds_config: DsConfig, name: str, model: type[Validated]) -> Validated | None:
    """Return the validated block of that name, or None; see :func:`parse_block`."""
    # Not validated where it is off: slips may stay in it.
    return None if name not in ds_config or is_off(ds_config[name]) else validate(model, ds_config[name], name)


def refuse_misnamed(ds_config: DsConfig) -> None:
    """Refuse what looks like a block of ours and is none: nobody would read it, and the run would go on without.

    It refuses a block's name inside of another block, and in likely places a name that is nearly a block's. A block
    that is switched off may stay, and so may keys such as ``"_activation_nvme_offload"``.

    Raises:
        ConfigError: naming the place, the right name and the right place.
    """
    for keys, value in _entries(ds_config):
        name, outer = keys[-1], keys[:-1]
        if value is None or value is False or is_off(value) or (name in BLOCKS and not outer):
            continue
        if name in BLOCKS:
            raise ConfigError(
                f'"{name}" is inside "{".".join(outer)}", where nobody reads it: move the block to the top level of '
                f'ds_config.json, beside "{outer[0]}".'
            )
        meant = _block_like(name)
        if meant is not None and outer in _LIKELY_PLACES:
            raise ConfigError(
                f'ds_config.json has a key "{".".join(keys)}", which nobody reads; did you mean "{meant}", at the top '
                f'level? Name it so. If not, remove the key, or rename it: "_{name}" is taken for a comment.'
            )


def is_off(block: object) -> bool:
    """Return whether a block of ours is switched off, whatever else is in it."""
    return isinstance(block, Mapping) and block.get("enabled") is False


def _entries(blocks: DsConfig, *outer: str) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield all keys of all blocks but those inside of ours, each with its path and value."""
    for key, value in blocks.items():
        yield (*outer, str(key)), value
        if isinstance(value, Mapping) and key not in BLOCKS:
            yield from _entries(value, *outer, str(key))


def _block_like(key: str) -> str | None:
    """Return the block whose name a key nearly is; a key that begins with no letter is a comment."""
    words = "_".join(sorted(key.lower().replace("-", "_").split("_")))
    close = difflib.get_close_matches(words, _NAMES, n=1, cutoff=NEAR_MISS_RATIO) if key[:1].isalpha() else []
    return _NAMES[close[0]] if close else None


def parse_keywords(keys: DsConfig, call: str) -> OffloadConfig:
    """Return the validated block whose keys are the keyword arguments of a call.

    Raises:
        ConfigError: a line for each bad key, with its value, the rule and the repair.
    """

    def plain(one: Any) -> object:  # paths are strings in a file, and NumPy's numbers plain ones
        return os.fspath(one) if isinstance(one, os.PathLike) else one.item()

    # No keyword of Python may be "except".
    block: dict[str, object] = {}
    for key, value in keys.items():
        try:
            block["except" if key == "except_" else key] = json.loads(json.dumps(value, default=plain))
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{call}({key}=...) is {value!r}, which no JSON file could have: give text, numbers, lists or objects."
            ) from error
    return validate(OffloadConfig, block, call, refused=f"{call}(...)")


def validate(model: type[Validated], block: object, at: str, refused: str = "ds_config.json") -> Validated:
    """Return the validated block.

    Raises:
        ConfigError: a line for each bad key, with its value, the rule and the repair.
    """
    if not isinstance(block, Mapping):
        raise ConfigError(f'"{at}" is {block!r}: it must be an object.')
    try:
        return model.model_validate(dict(block))
    except ValidationError as error:
        lines = dict.fromkeys(_explain(model, detail, at) for detail in error.errors())
        raise ConfigError(f"{refused} is refused:\n  " + "\n  ".join(lines)) from None


def _explain(model: type[BaseModel], detail: ErrorDetails, at: str) -> str:
    """Return one line for one pydantic error: key, value, rule, repair."""
    kind, value, steps = detail["type"], detail["input"], list(detail["loc"])
    if steps[:1] in (["rematerialize"], ["recompute"]):
        del steps[1:2]  # pydantic has the branch of the union there, which is no key
    key = ".".join([at, *map(str, steps)])
    if isinstance(value, str) and value == "auto":
        return f'"{key}" is "auto": this block has no "auto"; leave the key out for its default.'
    if kind == "extra_forbidden":
        keys = _keys_at(model, steps[:-1])
        closest = _did_you_mean(str(steps[-1]), keys) or f". The choices are {', '.join(keys)}."
        return f'"{key}": {value!r} is not a key of this block{closest}'
    if kind == "literal_error":
        choices = re.findall(r"'(\w+)'", detail["msg"])
        allowed = ", ".join(f'"{choice}"' for choice in choices)
        word = _SYNONYMS.get(value.lower(), value) if isinstance(value, str) else str(value)
        return f'"{key}" is {value!r}: it must be one of {allowed}{_did_you_mean(word, choices) or "."}'
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        known = ", ".join(f'"{one}"' for one in _keys_at(model, steps))
        rule = f"it must be {'true, false or ' if _DETAILS in detail['loc'] else ''}an object with keys among {known}"
    elif "url" not in detail:  # pydantic's own errors have a page in its documentation; this rule is ours
        rule = detail["msg"]
    else:
        rule = re.sub("^(Input|List|String) should", "it must", detail["msg"]).replace(" after validation", "")
    return f'"{key}" is {value!r}: {rule}{_hint(value)}.' if steps else f'"{key}": {rule}.'


# Words of DeepSpeed's offload blocks and of users, with ours: "cpu" has no letters in common with "host".
_SYNONYMS = {"cpu": "host", "ram": "host", "disk": "nvme", "ssd": "nvme", "none": "keep", "gpu": "keep"}


def _hint(value: object) -> str:
    """Return what to write instead of a string, where a number or a boolean is expected."""
    text = value.strip().lower() if isinstance(value, str) else ""
    try:
        return f"; drop the quotes: {text}" if isinstance(json.loads(text), (int, float)) else ""
    except (ValueError, RecursionError):
        return ""


def _keys_at(model: type[BaseModel], steps: list[int | str]) -> list[str]:
    """Return the keys of the block to which these steps lead."""
    for step in steps:
        field = model.model_fields.get(str(step))
        model = model if field is None else next(_models_in(field.annotation), model)
    return [field.alias or name for name, field in model.model_fields.items()]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _did_you_mean(word: str, choices: list[str]) -> str:
    close = difflib.get_close_matches(word.lower(), choices, n=1, cutoff=0.6)
    return f"; did you mean `{close[0]}`?" if close else ""


def matching(paths: Sequence[str], patterns: Sequence[str], key: str) -> list[str]:
    """Return the paths that the patterns of a key name; the path of a container names its members.

    Raises:
        ConfigError: a pattern names none.
    """
    named: set[str] = set()
    for pattern in patterns:
        its_paths = {path for path in paths if fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")}
        if not its_paths:
            close = ", ".join(difflib.get_close_matches(pattern, paths, n=3, cutoff=0))
            raise ConfigError(
                f'"{BLOCK}.{key}" has {pattern!r}, which matches no module of the model: the nearest are '
                f"{close or 'none, so name the layers in blocks'}."
            )
        named |= its_paths
    return [path for path in paths if path in named]
