"""The parts of the dry run one by one: the model's source, the clock, the kernels, the summary."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import runs
from support.replays import fixed
from support.traces import SIZE, resources
from torch.nn import functional

from ds_tba.cli.plan import _instructions
from ds_tba.cli.plan.dry_run import OpClock, cuda_kernels
from ds_tba.cli.plan.model import recipe_of
from ds_tba.cli.plan.rows import (
    ADAPTIVE,
    FRAGMENTATION,
    HOST_FULL,
    NEAR,
    TIGHT,
    UNIT,
    Row,
    Setup,
    fixed_rows,
    holders,
    longest_of,
    recommended,
)  # fmt: skip
from ds_tba.cli.plan.training import CONTEXT_BYTES, Device, DryRun, Training, account_of, brief, gpu_of, read_training
from ds_tba.config import ASSUMED_RATIO, OffloadConfig, Placement, parse_block
from ds_tba.errors import ConfigError, ModelError
from ds_tba.holders import REMEDIES, SAVED
from ds_tba.plan.plan import Prediction
from ds_tba.plan.trace import OUTSIDE, BlockTrace, StorageTrace, Trace

GUIDE = (runs.ROOT / "docs" / "guides" / "long_context.md").read_text().partition("## The example")[0]

# ---- where the model comes from -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, r'with "architectures" that transformers'),
        ({"architectures": []}, r'with "architectures" that transformers'),
        ({"architectures": [3]}, r'with "architectures" that transformers'),
        ({"architectures": ["Nonsense"]}, r'with "architectures" that transformers.* Nonsense'),
        ({"hidden_size": 63, "num_attention_heads": 4}, "cannot be read.*not a multiple"),
        ({"hidden_size": "big"}, "cannot be read.*hidden_size"),
        ({"model_type": "nonsense"}, "cannot be read.*nonsense"),
        ({"model_type": []}, "cannot be read"),
    ],
)
def test_an_hf_config_that_is_wrong_is_refused(tmp_path: Path, config: Any, says: str) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **config}))
    with pytest.raises(ModelError, match=says):
        recipe_of(str(path))


# ---- what the config says -------------------------------------------------------------------------------------------


def training_of(path: Path, config: Any) -> Training:
    path.write_text(json.dumps(config))
    return read_training(path)


def test_the_config_tells_how_it_is_trained(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("""{ // comments are read as DeepSpeed reads them
        "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true}, "optimizer": {"type": "AdamW"}, /* more */
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
        "activation_nvme_offload": {"placement": "keep", "min_tensor_bytes": 5}}""")
    found = read_training(path)
    assert (found.dtype, found.stage) == (torch.bfloat16, 3)
    assert found.number("train_micro_batch_size_per_gpu", 1) == 4
    assert found.offloads("param") and not found.offloads("optimizer")
    assert found.offload.min_tensor_bytes == 5 and not found.notes
    with pytest.raises(ConfigError, match="holds list"):
        training_of(path, [])


def test_without_the_block_its_defaults_are_taken_and_that_is_said(tmp_path: Path) -> None:
    found = training_of(tmp_path / "ds.json", {})
    assert found.offload.min_tensor_bytes == 1 << 20 and found.dtype is None
    notes = "\n".join(found.notes)
    assert "its defaults are used" in notes
    assert "the states of Adam and the temporary tensors of PyTorch's AdamW are counted" in notes
    assert read_training(None).stage == 2 and "no --config" in read_training(None).notes[0]


@pytest.mark.parametrize(
    ("bf16", "fp16", "dtype"), [("auto", "auto", torch.bfloat16), ("auto", True, torch.float16), (False, None, None)]
)
def test_auto_is_taken_as_on_and_said(tmp_path: Path, bf16: Any, fp16: Any, dtype: torch.dtype | None) -> None:
    found = training_of(tmp_path / "ds.json", {"bf16": {"enabled": bf16}, "fp16": {"enabled": fp16}})
    assert found.dtype is dtype
    assert any("bf16.enabled" in note for note in found.notes) is (bf16 == "auto")


# ---- what the device holds, by hand ---------------------------------------------------------------------------------

ALL, TRAINED = 8_030_261_248, 41_943_040  # Llama 3.1 8B; adapters of rank 16 on its linear layers
BUCKET_BYTES = 2 * 500_000_000
H100 = Device("H100", 80 << 30, 4e14, 3.35e12, 50e9)
NOTHING = Trace((), (), resources(), 0.0)


def run_of(trace: Trace, parameters: int = 1000, trained: int = 1000, temporary: int = 0) -> DryRun:
    """Of 16-bit parameters."""
    counts = {"parameters": parameters, "parameter_bytes": 2 * parameters, "trained": trained}
    return DryRun(trace=trace, temporary=(brief(0.0, trace.end_s, temporary),), trained_bytes=2 * trained, **counts)


def training_with(zero: Any, **config: Any) -> Training:
    whole = {"zero_optimization": zero, "optimizer": {"type": "AdamW"}, **config}
    return Training(whole, OffloadConfig(enabled=False), torch.bfloat16)


HOST, EIGHTH = {"device": "cpu"}, -(-ALL // 8)
# Keys of ZeRO and others, ranks, trained; parameters, gradients, states, gathered parameters, buckets, and what the
# optimizer's step takes.
HELD: dict[str, tuple[Any, Any, int, int, list[int]]] = {
    # Issue: 15.04 and 90.21 GiB of gradients and states were told instead of 0.08 and 0.47.
    "adapters": ({"stage": 2}, {}, 1, TRAINED, [2 * ALL, 2 * TRAINED, 12 * TRAINED, 0, BUCKET_BYTES, 4 * TRAINED]),
    "no ZeRO": ({}, {}, 8, ALL, [2 * ALL, 2 * ALL, 12 * ALL, 0, 0, 4 * ALL]),
    "ZeRO-1": ({"stage": 1}, {}, 8, ALL, [2 * ALL, 2 * ALL, 12 * EIGHTH, 0, BUCKET_BYTES, 4 * EIGHTH]),
    "ZeRO-2": ({"stage": 2}, {}, 8, ALL, [2 * ALL, 2 * EIGHTH, 12 * EIGHTH, 0, BUCKET_BYTES, 4 * EIGHTH]),
    "ZeRO-3": ({"stage": 3}, {}, 8, ALL, [2 * EIGHTH, 2 * EIGHTH, 12 * EIGHTH, 2 * 10**9, BUCKET_BYTES, 4 * 10**9]),
    "one rank has all parameters": ({"stage": 3}, {}, 1, ALL, [2 * ALL, 2 * ALL, 12 * ALL, 0, BUCKET_BYTES, 4 * 10**9]),
    "states are on the host": ({"stage": 1, "offload_optimizer": HOST}, {}, 1, ALL,
                               [2 * ALL, 2 * ALL, 0, 0, BUCKET_BYTES, 0]),
    "gradients are, too": ({"stage": 3, "offload_optimizer": HOST}, {}, 8, ALL,
                           [2 * EIGHTH, 0, 0, 2 * 10**9, BUCKET_BYTES, 0]),
    "parameters are, too": ({"stage": 3, "offload_optimizer": HOST, "offload_param": HOST}, {}, 1, ALL,
                            [0, 0, 0, 2 * 10**9, BUCKET_BYTES, 0]),
    "two small buckets": ({"stage": 2, "overlap_comm": True, "reduce_bucket_size": 1e6}, {}, 1, ALL,
                          [2 * ALL, 2 * ALL, 12 * ALL, 0, 4 * 10**6, 4 * ALL]),
    # The square of the hidden size, as Trainer sets it.
    "automatic buckets": ({"stage": 2, "reduce_bucket_size": "auto"}, {}, 1, ALL,
                          [2 * ALL, 2 * ALL, 12 * ALL, 0, 0, 4 * ALL]),
    "no buckets": ({"stage": 2, "contiguous_gradients": False}, {}, 1, ALL,
                   [2 * ALL, 2 * ALL, 12 * ALL, 0, 0, 4 * ALL]),
    "gradients in FP32": ({"stage": 2}, {"data_types": {"grad_accum_dtype": "fp32"}}, 1, ALL,
                          [2 * ALL, 4 * ALL, 12 * ALL, 0, 2 * BUCKET_BYTES, 4 * ALL]),
    "one moment": ({}, {"optimizer": {"type": "SGD"}}, 1, ALL, [2 * ALL, 2 * ALL, 8 * ALL, 0, 0, 4 * ALL]),
}  # fmt: skip


@pytest.mark.parametrize(("zero", "config", "ranks", "trained", "expected"), HELD.values(), ids=HELD)
def test_what_a_rank_holds(zero: Any, config: Any, ranks: int, trained: int, expected: list[int]) -> None:
    training = replace(training_with(zero, **config), ranks=ranks)
    found = account_of(training, run_of(NOTHING, ALL, trained), H100).held
    assert found.always["CUDA context"] == CONTEXT_BYTES
    always = [found.always[key] for key in ("parameters", "gradients", "optimizer states")]
    assert [*always, *found.passing.values(), found.stepping_bytes] == expected


def test_all_parameters_of_a_module_are_gathered_at_once() -> None:
    largest = 8 * 3 * 4096 * 14336  # all experts of a layer of Mixtral
    run = replace(run_of(NOTHING, 60 * largest), largest_module=largest)
    found = account_of(replace(training_with({"stage": 3}), ranks=8), run, H100).held
    assert found.passing["gathered parameters"] == 2 * largest


def test_the_temporary_tensors_of_pytorch_s_adamw_count_where_the_config_names_no_optimizer() -> None:
    """Issue: 19.7 GiB were told of 23.4 for 8B in full with ZeRO-3 on 8 cards, and recommended on 24 GB."""
    run, needs = run_of(NOTHING, ALL, ALL), {}
    for optimizer in ({}, {"type": "AdamW"}, {"type": "AdamW", "params": {"torch_adam": True}}):
        found = account_of(replace(training_with({"stage": 3}, optimizer=optimizer), ranks=8), run, H100).held
        needs[str(optimizer)] = (sum(found.always.values()) + found.stepping_bytes) / 2**30
    assert list(needs.values()) == pytest.approx([23.4, 19.7, 23.4], abs=0.05)
    assert needs["{}"] * 2**30 > 0.98 * (gpu_of("24GB", torch.bfloat16).memory_bytes or 0)  # not by NCCL's


@pytest.mark.parametrize(
    "config",
    [
        {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
        {"activation_checkpointing": {"cpu_checkpointing": True}},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}},
    ],
)
def test_keys_that_change_memory_and_are_not_counted_are_named(tmp_path: Path, config: Any) -> None:
    (note,) = [one for one in training_of(tmp_path / "ds.json", config).notes if "NOT COUNTED" in one]
    assert next(iter(config)) in note
    usual = {"activation_checkpointing": {"cpu_checkpointing": False}}
    assert not any("NOT COUNTED" in one for one in training_of(tmp_path / "ds.json", usual).notes)
    assert any("8 bits takes less" in one for one in training_of(tmp_path / "ds.json", usual).notes)


# ---- the clock ------------------------------------------------------------------------------------------------------


def seconds(run: Callable[[], object], flops: float = 1e30, memory: float = 1e30, launch: float = 0.0) -> float:
    """Return the seconds that a run takes on a device with these rates per second, and seconds for a launch."""
    with cuda_kernels(), OpClock(flops, memory, launch) as clock:
        run()
    return clock.now_s


def test_products_take_their_flops_and_the_rest_its_bytes_or_its_launch() -> None:
    a = torch.empty(64, 128, device="meta", requires_grad=True)
    b = torch.empty(128, 256, device="meta", requires_grad=True)
    product_s = 2 * 64 * 128 * 256 / 1e9
    assert seconds(lambda: a @ b, flops=1e9) == pytest.approx(product_s)
    assert seconds(lambda: (a @ b).backward(torch.empty(64, 256, device="meta")), 1e9) == pytest.approx(3 * product_s)
    assert seconds(a.exp, memory=1e9) == pytest.approx(2 * a.numel() * 4 / 1e9)
    assert seconds(lambda: torch.empty(1000, device="meta").view(10, 100).t(), 1.0, 1.0) == 0.0
    assert seconds(lambda: (a * a).view(128, 64), launch=1e-5) == pytest.approx(1e-5)


def test_causal_attention_is_half_of_it() -> None:
    q, k, v = (torch.empty(2, 4, 64, 32, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def attend(is_causal: bool) -> None:
        functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal).sum().backward()

    assert seconds(partial(attend, True), flops=1e9) == pytest.approx(seconds(partial(attend, False), flops=1e9) / 2)


# ---- the kernels ----------------------------------------------------------------------------------------------------


def saved_bytes(run: Any) -> list[int]:
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    out.sum().backward()
    return saved


def test_kernels_of_cuda_on_meta_and_nothing_is_left_behind() -> None:
    x = torch.empty(4, 64, device="meta", requires_grad=True)
    plain = saved_bytes(lambda: functional.dropout(x, 0.1))
    with cuda_kernels():
        assert saved_bytes(lambda: functional.dropout(x, 0.1)) == [4 * 64]
        assert functional.dropout(x, 0.1, training=False) is x
    assert plain == [4 * 64 * 4] == saved_bytes(lambda: functional.dropout(x, 0.1))


def attended(dtype: torch.dtype, heads: int, masked: bool = False) -> list[int]:
    """Bytes of each saved tensor, but seeds, of an attention of 4 heads for queries."""
    q = torch.empty(2, 4, 16, 64, dtype=dtype, device="meta", requires_grad=True)
    k = torch.empty(2, heads, 16, 64, dtype=dtype, device="meta", requires_grad=True)
    mask = torch.empty(16, 16, dtype=torch.bool, device="meta") if masked else None
    attend = functional.scaled_dot_product_attention
    with cuda_kernels():
        saved = saved_bytes(lambda: attend(q, k, k, mask, is_causal=not masked, enable_gqa=heads != 4))
    return sorted(nbytes for nbytes in saved if nbytes > 64)


@pytest.mark.parametrize(("dtype", "heads"), [(torch.bfloat16, 4), (torch.bfloat16, 2), (torch.float32, 4)])
def test_attention_saves_its_inputs_its_output_and_a_number_for_each_row(dtype: torch.dtype, heads: int) -> None:
    head_bytes = 2 * 16 * 64 * dtype.itemsize
    assert attended(dtype, heads) == sorted([*(each * head_bytes for each in (4, heads, heads, 4)), 2 * 4 * 16 * 4])


def test_attention_saves_scores_of_grouped_heads_in_fp32_and_the_bias_that_a_mask_becomes() -> None:
    scores = 2 * 4 * 16 * 16
    assert 4 * scores in attended(torch.float32, 2)
    assert 2 * scores in attended(torch.bfloat16, 4, masked=True)


def test_questions_for_a_truth_are_answered_and_no_others() -> None:
    mask = torch.empty(4, 4, dtype=torch.bool, device="meta")
    with OpClock(1.0, 1.0):
        assert mask.all() and (mask == 0).all() and not mask.any()
        assert mask.sum() == 16  # as transformers asks
        with pytest.raises(RuntimeError, match="meta"):
            mask.sum().item()


# ---- what it comes to -----------------------------------------------------------------------------------------------

FAST, SLOW = 1e12, 1.0


def stack(
    blocks: int, rate: float = FAST, staging_bytes: int = 100 * SIZE, nbytes: int = SIZE, head_bytes: int = SIZE
) -> Trace:
    """Blocks of 1 s that save bytes and a few that must stay, then a head; backward takes 2 s for each."""
    storages, passes = [], []
    end_s = 3.0 * blocks
    for number in range(blocks):
        packed_s, used_s = float(number), end_s - 2.0 * (number + 1)
        passes.append(BlockTrace(f"layers.{number}", packed_s, packed_s + 1.0, used_s, used_s + 2.0, (2 * number,)))
        for each, movable in ((nbytes, True), (8, False)):
            one = StorageTrace(each, f"layers.{number}", (number,), packed_s, packed_s, used_s, used_s + 2.0, movable)
            storages.append(one)
    storages.append(StorageTrace(head_bytes, "head", (OUTSIDE,), blocks, blocks, blocks, blocks))
    machine = resources(rate, rate, copy=FAST, staging_bytes=staging_bytes)
    return Trace(tuple(storages), tuple(passes), machine, end_s)


def setup_of(
    trace: Trace, memory_bytes: int | None = None, temporary: int = 0, zero: Any = None, **block: Any
) -> Setup:
    offload = OffloadConfig.model_validate({"nvme_path": "/local_nvme", **block})
    training = replace(training_with(zero or {}), offload=offload)
    return Setup(run_of(trace, temporary=temporary), training, with_memory(memory_bytes), 600.0)


def with_memory(nbytes: float | None) -> Device:
    return Device("small GPU", None if nbytes is None else int(nbytes), 1e12, 1e12, FAST)


def rows_of(setup: Setup) -> list[Row]:
    return [*fixed_rows(setup), setup.planned_row()]


def by_name(setup: Setup) -> dict[str, Row]:
    return {row.name: row for row in rows_of(setup)}


def row_of(setup: Setup, cost: Prediction) -> Row:
    return setup.row("", cost, cost.peak_saved_bytes + setup.run.temporary_bytes, {}, "")


def test_a_setting_that_moves_what_layers_save_says_that_checkpointing_must_be_off() -> None:
    """Issue: the block of "offload all" is that of checkpointing, and nothing told them apart."""
    rows = by_name(setup_of(stack(4)))
    assert rows["offload all"].merged == rows["+ checkpointing and NVMe"].merged
    for name in ("offload all", ADAPTIVE):
        assert rows[name].advice == "gradient checkpointing must be off (model.gradient_checkpointing_disable())"
    assert "turn on gradient checkpointing" in rows["+ checkpointing and NVMe"].advice
    block = rows["+ checkpointing and NVMe"].merged["activation_nvme_offload"]
    assert block["placement"] == "nvme" and f'"activation_nvme_offload": {json.dumps(block)}' in GUIDE


def test_everything_goes_to_nvme_whatever_its_size() -> None:
    trace = stack(8, rate=SLOW)
    small = replace(trace, resources=replace(trace.resources, staging_bytes=SIZE // 2))
    assert fixed(small, Placement.NVME).written_bytes >= 8 * SIZE  # the last may be handed over while it is written
    assert fixed(small).written_bytes == 0 and fixed(small).peak_saved_bytes == 8 * (SIZE + 8) + SIZE
    assert fixed(trace, recompute=True).step_s == fixed(trace).step_s + 8.0  # each block runs again


def test_the_inputs_of_checkpointed_blocks_go_to_nvme_also_where_nothing_else_saves_them() -> None:
    """As those of Llama's layers: its norm saves a copy in FP32."""
    plain = stack(4)
    saved, blocks = plain.storages, [replace(one, inputs=()) for one in plain.blocks]
    plain = replace(plain, blocks=tuple(blocks))
    entering = replace(saved[2], blocks=(), first_backward_use_s=blocks[1].backward_start_s)
    blocks[1] = replace(blocks[1], inputs=(2,))
    trace = replace(plain, storages=(*saved[:2], entering, *saved[2:]), blocks=tuple(blocks))
    kept, moved = (fixed(trace, where, recompute=True) for where in (Placement.KEEP, Placement.NVME))
    assert fixed(plain, Placement.NVME, recompute=True).written_bytes == kept.written_bytes == 0
    assert moved.written_bytes == SIZE


@pytest.fixture
def no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GiB of CUDA context would hide the traces of these tests."""
    monkeypatch.setattr("ds_tba.cli.plan.training.CONTEXT_BYTES", 0)


@pytest.mark.usefixtures("no_context")
def test_verdicts_have_margins() -> None:
    setup = setup_of(stack(4), 1)
    need = row_of(setup, fixed(setup.run.trace)).need_bytes
    assert need == 16 * 1000 + int(1.05 * (5 * SIZE + 32))  # of the model; 5 % are lost

    def verdict(memory_bytes: float) -> str:
        return fixed_rows(replace(setup, device=with_memory(memory_bytes)))[0].verdict

    assert verdict(need / 0.89) == "fits" and verdict(need / 0.91) == "tight" == verdict(need)
    assert verdict(need - 1) == "does not fit"
    # The optimizer's step, with fp32 gradients, needs more than a small micro-step.
    small = setup_of(replace(NOTHING, end_s=1.0), 1)
    assert row_of(small, fixed(small.run.trace)).need_bytes == 16 * 1000 + 4 * 1000


@pytest.mark.usefixtures("no_context")
def test_the_first_of_the_fastest_that_fit_is_recommended() -> None:
    trace = stack(8, staging_bytes=SIZE)
    everything = rows_of(setup_of(trace, 1000 * SIZE))
    assert {row.verdict for row in everything} == {"fits"}
    chosen = recommended(everything)
    assert chosen is everything[0] and not chosen.merged
    less = rows_of(setup_of(trace, int(5 * SIZE)))
    chosen = recommended(less)
    assert chosen is not None and chosen.name == "offload all" and less[0].verdict == "does not fit"
    worn = replace(chosen, life_days=5.0)
    sparing = replace(worn, name="slow", life_days=None, cost=replace(worn.cost, step_s=2 * worn.cost.step_s))
    assert recommended([worn, sparing]) is sparing and recommended([worn]) is worn
    assert recommended([worn, replace(sparing, verdict="tight")]).name == "slow"  # it can be tried, a drive cannot
    nothing = rows_of(setup_of(trace, SIZE))
    assert recommended(nothing) is None
    assert holders(nothing[0], setup_of(trace))[0][0] == SAVED


@pytest.mark.usefixtures("no_context")
def test_host_memory_is_recommended_before_a_drive_where_it_is_enough() -> None:
    """Issue: 8 GiB of free host memory were passed over for a drive that lasted 26 days."""
    plain = stack(4, rate=1e9, staging_bytes=SIZE)
    # As Llama's: what enters each block is saved, and checkpointing keeps it alone.
    blocks = tuple(replace(one, inputs=(2 * at,)) for at, one in enumerate(plain.blocks))
    trace = replace(plain, blocks=blocks, storages=(*plain.storages, *plain.storages[: 2 * len(blocks) : 2]))
    setup = replace(setup_of(trace, 1 << 40), tbw=1.0)
    rows = by_name(setup)
    ours, kept, drive = (rows[f"+ checkpointing{end}"] for end in (" and host", "", " and NVMe"))
    assert drive.cost.written_bytes and drive.life_days and drive.life_days < 365
    assert ours.cost.host_bytes == 4 * SIZE and ours.life_days is None and ours.need_bytes < kept.need_bytes
    block = OffloadConfig.model_validate(ours.merged["activation_nvme_offload"])
    assert block.placement == "host" and (block.host_budget_bytes or 0) >= 4 * SIZE
    tight = replace(setup, device=with_memory(ours.need_bytes / 0.89))
    chosen = recommended(rows_of(tight))
    assert chosen is not None and chosen.cost.host_bytes == 4 * SIZE and not chosen.written_bytes_per_day
    assert '"placement": "host"' in "".join(_instructions(chosen))
    poor = replace(tight, host_memory_bytes=4 * SIZE - 1)
    assert by_name(poor)["+ checkpointing and host"].verdict == HOST_FULL
    chosen = recommended(rows_of(poor))
    assert chosen is None or not chosen.cost.host_bytes
    assert by_name(poor)["+ checkpointing and host"].filled > 1


def test_what_layers_leave_to_the_allocator_counts_with_checkpointing_alone() -> None:
    setup = setup_of(stack(4))
    whole = replace(setup, run=replace(setup.run, largest_bytes=2 * SIZE))
    assert (setup.loose_bytes, whole.loose_bytes) == (0, SIZE // 2 + 4)
    kept, again = (by_name(whole)[name] for name in ("as it is", "+ checkpointing"))
    for row, loose_bytes in ((kept, 0), (again, SIZE // 2 + 4)):
        peak_bytes = int(1.05 * row.cost.peak_saved_bytes)
        assert row.need_bytes == whole.account.held.nbytes + loose_bytes + peak_bytes


@pytest.mark.usefixtures("no_context")
def test_the_budget_is_the_room_that_is_left() -> None:
    trace = stack(8, staging_bytes=SIZE)
    row = by_name(setup_of(trace, int(6.5 * SIZE), temporary=SIZE // 2))["+ adaptive in a budget"]
    block = row.merged["activation_nvme_offload"]
    room = int((0.9 * int(6.5 * SIZE) - 16 * 1000) / 1.05 - SIZE // 2)
    assert block["activation_budget_bytes"] == room and row.cost.peak_saved_bytes <= room and row.verdict == "fits"
    OffloadConfig.model_validate(block)


def test_a_step_is_no_shorter_than_what_zero_moves_over_pcie() -> None:
    """Issue: 0.865 s for Qwen3-30B with parameters in host memory, which take 2.4 s."""
    run = run_of(replace(NOTHING, end_s=0.865), 30_532_122_624, 1_000_000)
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    setup = Setup(run, training_with(zero), H100, 600.0)
    moved_s = 2 * 2 * 30_532_122_624 / 50e9
    row, *_ = rows_of(setup)
    assert moved_s == pytest.approx(2.44, rel=0.01) and row.cost.step_s == pytest.approx(moved_s, rel=0.01)
    assert row.host_bytes == 2 * 30_532_122_624 + 16 * 1_000_000 and not row.swap_bytes
    eighth, *_ = rows_of(replace(setup, training=replace(setup.training, ranks=8)))  # its link carries its own part
    assert eighth.cost.step_s == pytest.approx(0.865, rel=0.01)
    kept, *_ = rows_of(replace(setup, training=training_with({"stage": 3})))
    assert kept.cost.step_s == pytest.approx(0.865, rel=0.01) and not kept.host_bytes


def test_what_zero_keeps_on_drives_is_said_with_its_wear_and_its_time() -> None:
    trace, drive = stack(2, rate=1e9), {"device": "nvme", "nvme_path": "/local_nvme"}
    setup = setup_of(trace, 1 << 40, zero={"stage": 3, "offload_param": drive, "offload_optimizer": drive})
    run = replace(setup.run, parameters=10**10, parameter_bytes=2 * 10**10, trained=10**10, trained_bytes=2 * 10**10)
    row = by_name(replace(setup, run=run))["as it is"]
    states, parameters = 16 * 10**10, 2 * 10**10
    assert row.swap_bytes == states + parameters and not row.host_bytes
    # Parameters are read in forward and in backward, and written once; states are read and written.
    assert row.cost.step_s == pytest.approx(trace.end_s + (2 * parameters + 2 * states + parameters) / 1e9)
    assert row.written_bytes_per_day == pytest.approx((states + parameters) * 86400 / row.cost.step_s)
    host = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    offloading = by_name(setup_of(trace, 1 << 40, zero=host))["+ checkpointing and NVMe"]
    assert offloading.swap_bytes == offloading.cost.written_bytes > 0
    assert offloading.host_bytes == 16 * 1000 + OffloadConfig(nvme_path="/x").io.ring_bytes


def test_each_holder_has_a_remedy() -> None:
    setup = setup_of(stack(1))
    assert {name for name, _ in holders(fixed_rows(setup)[0], setup)} == set(REMEDIES)


def test_wear_is_told_by_day_and_compression_counts_in_it_and_in_its_limit() -> None:
    trace = stack(8, staging_bytes=2 * SIZE)
    packing: dict[str, Any] = {"io": {"compression": "lz4"}}
    plain, packed = setup_of(trace), setup_of(trace, **packing)
    row, less = (row_of(one, fixed(trace, Placement.NVME)) for one in (plain, packed))
    assert row.written_bytes_per_day == pytest.approx(row.cost.written_bytes * 86400 / row.cost.step_s)
    assert row.life_days == pytest.approx(600e12 / row.written_bytes_per_day)
    assert row_of(plain, fixed(trace)).life_days is None
    assert less.written_bytes_per_day == ASSUMED_RATIO * row.written_bytes_per_day
    ssd = {"rated_endurance_tbw": 600, "min_life_days": 365}
    limits = [setup_of(trace, ssd=ssd, **more).limits.write_limit_bytes_per_step for more in ({}, packing)]
    assert limits[1] == pytest.approx(limits[0] / ASSUMED_RATIO)


@pytest.mark.parametrize(
    ("text", "name", "gib"),
    [
        ("24GB", "RTX 4090", 23.6), ("80 GiB", "H100", 79.1), ("12GB", "T4", 10.95), ("24", "RTX 4090", 23.6),
        ("rtx-3090", "RTX 3090", 23.6), ("NVIDIA A100", "A100", 79.1), ("NVIDIA A100-SXM4-80GB", "A100-80", 79.1),
        ("L4", "L4", 22.0),
    ],
)  # fmt: skip
def test_a_gpu_is_a_size_or_a_name_and_pytorch_has_less(text: str, name: str, gib: float) -> None:
    assert gpu_of(text, torch.bfloat16)[:2] == (name, pytest.approx(gib * 2**30, abs=1))


# ---- the longest sequence -------------------------------------------------------------------------------------------

TOKEN_BYTES, HEAD_BYTES, MEMORY_BYTES = 1000, 300, 1 << 30


def growing(sequence: int, power: int = 1) -> Setup:
    """Blocks, and a head, that save bytes for each token; with checkpointing what blocks save is made again."""
    factor = sequence**power
    trace = stack(4, nbytes=TOKEN_BYTES * factor, head_bytes=HEAD_BYTES * factor)
    return setup_of(replace(trace, blocks=tuple(replace(one, inputs=()) for one in trace.blocks)), MEMORY_BYTES)


@pytest.mark.usefixtures("no_context")
@pytest.mark.parametrize(("first", "power"), [(UNIT, 1), (4096, 1), (1 << 24, 1), (4096, 2)])
def test_the_longest_is_what_a_line_by_hand_says(first: int, power: int) -> None:
    """Also of what grows faster than the sequence."""
    asked: list[int] = []

    def setup(sequence: int) -> Setup:
        asked.append(sequence)
        return growing(sequence, power)

    found = {row.name: (sequence, row) for sequence, row in longest_of(setup, first)}
    room_bytes = (TIGHT * MEMORY_BYTES - 16 * 1000) / (1 + FRAGMENTATION)
    # The head runs beside all that is saved; without that two blocks are there, as one ends and the next runs again.
    for name, token_bytes in (("as it is", 4 * TOKEN_BYTES + HEAD_BYTES), ("+ checkpointing", 2 * TOKEN_BYTES)):
        longest = (room_bytes / token_bytes) ** (1 / power)
        sequence, row = found[name]
        assert (1 - NEAR) * longest - UNIT <= sequence <= longest
        assert row.need_bytes <= TIGHT * MEMORY_BYTES
    assert len(set(asked)) < 30


# ---- the recipes of the guide of long context: their script does what it says ---------------------------------------


def test_the_configs_are_valid() -> None:
    configs = [json.loads(text) for text in re.findall(r"```json\n(\{.*?\n\})\n```", GUIDE, re.DOTALL)]
    assert len(configs) == 2 and all(parse_block(one) is not None for one in configs)


def test_the_script_puts_the_mlp_in_tiles_and_runs_trl_s(monkeypatch: pytest.MonkeyPatch) -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    sequence_parallel = pytest.importorskip("deepspeed.runtime.sequence_parallel.ulysses_sp")
    (script,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    ran: list[tuple[str, str]] = []
    monkeypatch.setattr(runpy, "run_module", lambda name, run_name: ran.append((name, run_name)))
    monkeypatch.setattr(modeling.LlamaMLP, "forward", modeling.LlamaMLP.forward)  # put back at the end
    tiles: list[int] = []
    real = sequence_parallel.TiledMLP.apply
    torch.manual_seed(0)
    mlp = modeling.LlamaMLP(modeling.LlamaConfig(hidden_size=16, intermediate_size=32, num_attention_heads=2))

    def gradients() -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 40 * 16).view(1, 40, 16).requires_grad_()
        mlp.zero_grad()
        output = mlp(x)
        output.square().sum().backward()
        return [output, x.grad, *(one.grad for one in mlp.parameters())]

    whole = [one.detach().clone() for one in gradients()]
    monkeypatch.setattr(sequence_parallel.TiledMLP, "apply", lambda *given: tiles.append(given[3]) or real(*given))
    exec(compile(script, "sft_in_tiles.py", "exec"), {})
    for one, other in zip(whole, gradients(), strict=True):
        torch.testing.assert_close(one, other)
    assert tiles == [3] and ran == [("trl.scripts.sft", "__main__")]  # 40 tokens in tiles of 16 at most
