"""One update, without DeepSpeed's optimizer around it, and its division into chunks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ds_tba.device.accelerator import Accelerator
from ds_tba.update import UpdateConfig
from ds_tba.update.device import DevicePipeline
from ds_tba.update.formula import Hyper, Powers
from ds_tba.update.host import HostUpdate, SubGroup
from ds_tba.update.updater import GRAIN_ELEMENTS, Chunk, Split, Updater, chunks_of, inside


class Calls:
    """In place of CPUAdam: remembers what it was called with."""

    def __init__(self) -> None:
        self.made: list[tuple[float, int]] = []

    def adam_update(self, opt_id: int, step: int, lr: float, *numbers_and_tensors: Any) -> None:
        self.made.append((lr, numbers_and_tensors[-1].numel()))


SIZES = [1 << 14, 1 << 15, 5, (1 << 15) + 3]


def updater_of(accelerator: Accelerator, calls: Calls, share: float | None) -> Updater:
    config = UpdateConfig(chunk_bytes=1 << 16, device_share=share)
    pipeline = DevicePipeline(accelerator, torch.device("cpu"), config.chunk_elements, config.device_buffer_bytes)
    return Updater(config, accelerator, HostUpdate(calls, 0, None), pipeline, Powers(0.9, 0.999))


def sub_groups(step: int) -> list[SubGroup]:
    """Each with another learning rate, by which the calls are told apart."""
    return [
        SubGroup(
            *(torch.zeros(size) for _ in range(4)), torch.zeros(size), Hyper(number, 0.9, 0.999, 1e-8, 0.0), step, 1.0
        )
        for number, size in enumerate(SIZES)
    ]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, None])
def test_cpu_adam_hears_of_each_sub_group_once_in_order_before_its_parts(share: float | None) -> None:
    """Its hidden powers of the betas depend on that; see ``Powers``."""
    calls = Calls()
    updater = updater_of(Accelerator(), calls, share)
    updater.update(sub_groups(1))
    assert [lr for lr, elements in calls.made if elements == 0] == [0, 1, 2, 3]
    assert [lr for lr, _ in calls.made] == sorted(lr for lr, _ in calls.made)
    of_host = sum(elements for _, elements in calls.made)
    assert updater.counts.elements == sum(SIZES) == of_host + updater.counts.device_elements


class MemoryLater(Accelerator):
    """Has memory from the second update on."""

    has_memory = False

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if not self.has_memory:
            raise torch.OutOfMemoryError("none yet")
        return super().allocate(nbytes, device)


def test_the_device_computes_from_the_update_on_in_which_it_has_memory() -> None:
    accelerator, calls = MemoryLater(), Calls()
    updater = updater_of(accelerator, calls, 1.0)
    updater.update(sub_groups(1))
    assert sum(elements for _, elements in calls.made) == sum(SIZES)
    assert updater.report().fallbacks == {"no device memory": 1}
    accelerator.has_memory = True
    updater.update(sub_groups(2))
    assert updater.counts.device_elements > 0 and updater.report().fallbacks == {"no device memory": 1}


# ---- chunks ---------------------------------------------------------------------------------------------------------

PAGE = 1024  # elements of one


def of_sizes(*sizes: int) -> list[Chunk]:
    """Chunks of 256 elements of sub-groups with so many inside."""
    return chunks_of([size + 2 * PAGE for size in sizes], 256)


@pytest.mark.parametrize("sub_groups", [[], [0], [1], [127], [2175], [2176, 0, 5000], [3_000_001, 127, 256]])
@pytest.mark.parametrize("chunk_elements", [1, 128, 1000, 1 << 20])
def test_chunks_and_ends_are_every_element_once(sub_groups: list[int], chunk_elements: int) -> None:
    chunks = chunks_of(sub_groups, chunk_elements)
    for sub_group, elements in enumerate(sub_groups):
        end, stop = inside(elements)
        for chunk in (one for one in chunks if one.sub_group == sub_group):
            assert chunk.start == end and chunk.elements > 0 and chunk.elements % GRAIN_ELEMENTS == 0
            assert chunk.elements <= max(chunk_elements, GRAIN_ELEMENTS)
            end = chunk.stop
        assert end == stop and stop % GRAIN_ELEMENTS == 0
        if elements < 2 * PAGE + GRAIN_ELEMENTS:
            assert stop == 0
        else:
            assert inside(elements)[0] == PAGE <= elements - stop < PAGE + GRAIN_ELEMENTS
    assert chunks == sorted(chunks, key=lambda one: (one.sub_group, one.start))


@pytest.mark.parametrize("seed", range(200))
def test_every_chunk_is_handed_out_once(seed: int) -> None:
    chance = random.Random(seed)
    chunks = chunks_of([chance.randrange(7000) for _ in range(chance.randrange(6))], 256)
    share = chance.choice([None, 0, 0.3, 0.5, 1, chance.random()])
    odds = chance.choice([0, 0.1, 0.9])
    barred = frozenset(number for number in range(6) if chance.random() < odds)
    split = Split(chunks, share, barred)
    if is_given := chance.random() < 0.1:
        split.give_to_host()
    host: list[Chunk] = []
    device: list[Chunk] = []
    most = split.most_of_device()
    sides = [(split.for_host, host), (split.for_device, device)]
    while sides:
        side = chance.choice(sides)
        chunk = side[0]()
        side[1].append(chunk) if chunk is not None else sides.remove(side)
    assert sorted([*host, *device], key=lambda one: (one.sub_group, one.start)) == chunks
    assert host == [chunk for chunk in chunks if chunk in set(host)]  # CPUAdam's hidden state needs this order
    assert device == [chunk for chunk in reversed(chunks) if chunk in set(device)]
    assert not barred & {chunk.sub_group for chunk in device}
    if is_given:
        assert not device
    else:
        assert len(device) == most if share is not None else len(device) <= most


def test_what_may_not_go_to_the_device_does_not_end_its_part() -> None:
    chunks = of_sizes(2560, 300)
    split = Split(chunks, None, barred=frozenset({1}))
    assert split.for_device() == chunks[9] and split.for_device() == chunks[8]
    assert [split.for_host() for _ in range(10)] == [*chunks[:8], chunks[10], None]


@pytest.mark.parametrize(("share", "device"), [(0, 0), (0.04, 0), (0.06, 1), (0.5, 5), (0.94, 9), (0.96, 10), (1, 10)])
def test_a_share_is_rounded_to_whole_chunks(share: float, device: int) -> None:
    split = Split(of_sizes(2560), share)
    taken = 0
    while split.for_device() is not None:
        taken += 1
    assert taken == device
