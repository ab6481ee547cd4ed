"""Can all ranks train as the config asks, and how many of them share this machine? Settled before anything is built.

Knows torch.distributed's key-value store; makes no collective, because a rank whose config lacks the block takes no
part, and then the others end with an error that names it, instead of hanging.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from torch import distributed

from ds_tba.errors import ConfigError

if TYPE_CHECKING:
    from ds_tba.plan.agreement import Agreement

# Of the environment: the block for configs that a trainer makes by itself, as JSON or as a file's path.
VARIABLE = "DS_TBA_BLOCK"
# Ranks may arrive minutes apart: one of them builds DeepSpeed's aio op while the others wait for it.
AGREEMENT_TIMEOUT = timedelta(minutes=30)
GOODBYE_TIMEOUT = timedelta(seconds=20)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Built(Protocol):
    """Something that ranks build together."""

    @property
    def shared_keys(self) -> str: ...  # those of the config for which ranks talk to each other, in words

    def close(self) -> None:
        """Give back what it holds."""


_Made = TypeVar("_Made", bound=Built | None)


def own_rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def agreement() -> Agreement:
    """Return all ranks, as those that follow one plan."""
    from ds_tba.plan.agreement import Alone, Ranks

    return Ranks() if distributed.is_initialized() and distributed.get_world_size() > 1 else Alone()


def on_all_ranks(make: Callable[[], _Made]) -> _Made:
    """Call ``make`` on each rank; where it raises on one, what it made on others is closed, and all raise."""
    made, problem = None, None
    try:
        made = make()
    except Exception as error:  # noqa: BLE001 - raised again below, once the other ranks know
        problem = error
    try:
        agree(problem, "none of them" if made is None else made.shared_keys)
    except BaseException:
        if made is not None:
            made.close()
        raise
    return cast(_Made, made)


def machine() -> str:
    """Return the name of the kernel that this process runs on.

    Containers of one machine share its drives and memory, and not its host name.
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def ranks_on_machine() -> int:
    """Return how many ranks this machine has; all of them call it."""
    return agree(None).get(machine(), 1)


def agree(problem: Exception | None, keys: str = "") -> dict[str, int]:
    """Fail on every rank if any rank has a problem, or other keys; return how many ranks each machine has.

    Args:
        keys: see :class:`Built`. A rank that has them would wait in a collective for one that has not.
    """
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        if problem is not None:
            raise problem
        return {}
    # Not a collective: a rank that failed takes part in none, and the others would hang in it.
    store = distributed.distributed_c10d._get_default_store()
    rank, size = distributed.get_rank(), distributed.get_world_size()
    build = store.add(f"ds_tba/{rank}/builds", 1)  # or a second engine would read the verdict about the first
    text = problem and f"{type(problem).__name__}: {problem}"
    store.set(f"ds_tba/{rank}/{build}", json.dumps({"problem": text, "keys": keys, "machine": machine()}))
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


def _verdict(store: distributed.distributed_c10d.Store, build: int, size: int) -> dict[str, Any]:
    """Return the first problem that keeps ranks from training, None where all can; and the ranks of each machine."""
    machines, keys = Counter[str](), dict[str, int]()
    try:
        for rank in range(size):
            found = _answer(store, f"ds_tba/{rank}/{build}", rank)
            if found["problem"] is not None:
                raise ConfigError(
                    f"rank {rank} cannot do what ds_config.json asks for, so no rank trains: {found['problem']}"
                )
            machines[found.get("machine", "")] += 1
            keys.setdefault(found.get("keys", ""), rank)
    except ConfigError as error:
        return {"problem": str(error)}
    problem = None
    if len(keys) > 1:
        (first, rank), (other, other_rank), *_ = keys.items()
        problem = (
            f"rank {rank} has {first}, and rank {other_rank} has {other}: ranks plan, record and choose by name "
            'together. Give every rank the same "placement", "report.trace_path", "only" and "except".'
        )
    return {"problem": problem, "machines": machines}


def _answer(
    store: distributed.distributed_c10d.Store, key: str, rank: int, timeout: timedelta | None = None
) -> dict[str, Any]:
    """Return the answer of a rank (its problem, keys and machine), or the verdict for all of them."""
    try:
        store.wait([key], timeout or AGREEMENT_TIMEOUT)
    except (RuntimeError, distributed.DistError) as error:
        raise ConfigError(
            f"rank {rank} did not take part in setting up ds_tba: give every rank the same ds_config.json, or the same "
            f"{VARIABLE}."
        ) from error
    answer: dict[str, Any] = json.loads(store.get(key))
    return answer
