"""The machine of several ranks as one (a plan that all follow must suit the slowest), and a slower one to be safe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from ds_tba.errors import TraceError
from ds_tba.planner.trace import PathRates, Resources, Traffic


def slowest(machines: Sequence[Resources]) -> Resources:
    """Each rate as it is where it is lowest, the least staging, and the traffic of the machine that has most of it.

    Paths are compared one by one where all machines have as many, else by their sums; where one machine has none,
    nothing can go to NVMe.

    Raises:
        TraceError: there is no machine.
    """
    if not machines:
        raise TraceError("there are no resources to take the slowest of: every rank has its own")
    return Resources(
        _paths([machine.paths for machine in machines]),
        min(machine.copy_out_bytes_per_s for machine in machines),
        min(machine.copy_in_bytes_per_s for machine in machines),
        min(machine.staging_bytes for machine in machines),
        is_synchronous=any(machine.is_synchronous for machine in machines),
        prefetches_from_backward_start=all(machine.prefetches_from_backward_start for machine in machines),
        traffic=max((machine.traffic for machine in machines), key=_moved_bytes),
    )


def scaled(resources: Resources, factor: float) -> Resources:
    """Every rate times ``factor``, and so much of staging where that is less than all of it.

    On a slow drive nothing is written before backward wants it: what a step costs is then a matter of the room in
    staging, which transfers of the step before still take a part of, and no longer of the rates.
    """
    paths = tuple(_combined(lambda rates: rates[0] * factor, (path,)) for path in resources.paths)
    return replace(
        resources,
        paths=paths,
        copy_out_bytes_per_s=resources.copy_out_bytes_per_s * factor,
        copy_in_bytes_per_s=resources.copy_in_bytes_per_s * factor,
        staging_bytes=max(1, int(resources.staging_bytes * min(1.0, factor))),
    )


def _paths(machines: Sequence[tuple[PathRates, ...]]) -> tuple[PathRates, ...]:
    if not all(machines):
        return ()
    if len({len(paths) for paths in machines}) > 1:
        machines = [(_combined(sum, paths),) for paths in machines]
    return tuple(_combined(min, paths) for paths in zip(*machines, strict=True))


def _combined(how: Callable[[Sequence[float]], float], paths: Sequence[PathRates]) -> PathRates:
    return PathRates(*(how([getattr(path, field.name) for path in paths]) for field in fields(PathRates)))


def _moved_bytes(traffic: tuple[Traffic, ...]) -> float:
    return sum((one.end_s - one.start_s) * (one.write_bytes_per_s + one.read_bytes_per_s) for one in traffic)
