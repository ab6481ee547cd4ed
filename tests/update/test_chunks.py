from __future__ import annotations

import random

import pytest

from ds_tba.update.chunks import SLICE_ELEMENTS, Chunk, Split, chunks_of, tail_start


@pytest.mark.parametrize("sub_groups", [[], [0], [1], [127], [128], [129, 0, 5000], [3_000_001, 127, 256]])
@pytest.mark.parametrize("chunk_elements", [1, 128, 1000, 1 << 20])
def test_chunks_and_tails_are_every_element_once(sub_groups: list[int], chunk_elements: int) -> None:
    chunks = chunks_of(sub_groups, chunk_elements)
    for sub_group, elements in enumerate(sub_groups):
        end = 0
        for chunk in (one for one in chunks if one.sub_group == sub_group):
            assert chunk.start == end and chunk.elements > 0 and chunk.elements % SLICE_ELEMENTS == 0
            assert chunk.elements <= max(chunk_elements, SLICE_ELEMENTS)
            end = chunk.stop
        assert end == tail_start(elements) and elements - end < SLICE_ELEMENTS
    assert chunks == sorted(chunks, key=lambda one: (one.sub_group, one.start))


@pytest.mark.parametrize("seed", range(50))
def test_every_chunk_is_handed_out_once(seed: int) -> None:
    chance = random.Random(seed)
    chunks = chunks_of([chance.randrange(5000) for _ in range(chance.randrange(6))], 256)
    share = chance.choice([None, 0, 0.3, 0.5, 1, chance.random()])
    barred = {chunk for chunk in chunks if chance.random() < chance.choice([0, 0.1])}
    split = Split(chunks, share, lambda chunk: chunk not in barred)
    host: list[Chunk] = []
    device: list[Chunk] = []
    while len(host) + len(device) < len(chunks):
        before = len(host) + len(device)
        order = [(split.for_host, host), (split.for_device, device)]
        chance.shuffle(order)
        for take, taken in order[: chance.randrange(1, 3)] if share is None else order:
            chunk = take()
            if chunk is not None:
                taken.append(chunk)
        if chance.random() < 0.02:
            split.give_to_host()
        if len(host) + len(device) == before and (chunk := split.for_host()):
            host.append(chunk)
    assert split.for_host() is None and split.for_device() is None
    assert host + device[::-1] == chunks
    assert not barred & set(device)


@pytest.mark.parametrize(("share", "device"), [(0, 0), (0.04, 0), (0.06, 1), (0.5, 5), (0.94, 9), (0.96, 10), (1, 10)])
def test_a_share_is_rounded_to_whole_chunks(share: float, device: int) -> None:
    split = Split(chunks_of([2560], 256), share)
    taken = 0
    while split.for_device() is not None:
        taken += 1
    assert taken == device


def test_the_host_leaves_a_fixed_share_to_the_device() -> None:
    split = Split(chunks_of([2560], 256), 0.5)
    for _ in range(5):
        assert split.for_host() is not None
    assert split.for_host() is None
    split.give_to_host()
    for _ in range(5):
        assert split.for_host() is not None
    assert split.for_host() is split.for_device() is None
