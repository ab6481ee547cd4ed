"""The parts of the dry run one by one: the model's source, the clock, the kernels, the summary."""

from __future__ import annotations

import json
import os
import threading
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from traces import SIZE, one_block, resources, storage

from ds_tba.cli.estimate.dry_run import Answers
from ds_tba.cli.estimate.hardware import GivenRates, OpClock, compute_of, drives_of
from ds_tba.cli.estimate.kernels import Attention, attention_of, device_kernels
from ds_tba.cli.estimate.subject import Subject, loss_of, read_training, recipe_of
from ds_tba.cli.estimate.summary import breakdown_of, summarize
from ds_tba.cli.format import show
from ds_tba.config import OffloadConfig
from ds_tba.errors import ConfigError, ModelError
from ds_tba.planner.trace import OUTSIDE, BlockTrace, StorageTrace, Trace

GOOD = """
import torch
from torch import nn

def make(batch, sequence):
    return nn.Linear(sequence, 1), [torch.zeros(batch, sequence)]

def without_names(b, s): ...
def alone(batch, sequence): return nn.Linear(1, 1)
def odd(batch, sequence): return nn.Linear(1, 1), 3
"""


# ---- where the model comes from -------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(GOOD)
    return path


def test_a_function_is_called_with_batch_and_sequence(file: Path) -> None:
    subject = recipe_of(f"{file}:make")(3, 7)
    assert subject.forward().shape == (3, 1)
    assert [one.dtype for one in subject.to("meta", torch.bfloat16).inputs] == [torch.bfloat16]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model", "FILE.py:function"),
        ("missing.py:make", "there is no file missing.py"),
        ("{file}:absent", "it has make, without_names, alone, odd"),
        ("{file}:without_names", "without_names(b, s): missing a required argument: 'b'"),
        ("missing.json", "cannot be read"),
    ],
)
def test_a_wrong_source_is_named_with_the_rule(file: Path, text: str, says: str) -> None:
    with pytest.raises(ModelError, match="--model") as raised:
        recipe_of(text.format(file=file))
    assert says in str(raised.value)


@pytest.mark.parametrize(("name", "says"), [("alone", "returned Linear"), ("odd", "returned inputs of class int")])
def test_a_function_that_returns_something_else_is_refused(file: Path, name: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        recipe_of(f"{file}:{name}")(1, 1)


def test_a_file_that_fails_is_told(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import nothing_of_this_name")
    with pytest.raises(ModelError, match="No module named 'nothing_of_this_name'"):
        recipe_of(f"{path}:make")


def test_an_hf_config_without_architectures_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="architectures"):
        recipe_of(str(path))


def test_an_hf_config_makes_model_and_labels(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    path.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **heads}))
    with torch.device("meta"):
        subject = recipe_of(str(path))(2, 16)
    assert isinstance(subject.inputs, dict) and subject.inputs["labels"].shape == (2, 16)
    assert type(subject.model).__name__ == "LlamaForCausalLM"


def test_the_loss_is_found() -> None:
    x = torch.ones(3, requires_grad=True)
    three, one = x * 1, x.sum()
    assert loss_of(one) is one and loss_of({"loss": one}) is one and loss_of(SimpleNamespace(loss=one)) is one
    assert loss_of(three) == loss_of((three, x)) == loss_of({"logits": three}) == 3
    for wrong in (None, (), x.detach(), {"loss": None}, SimpleNamespace(loss=None)):
        with pytest.raises(ModelError, match="without a loss"):
            loss_of(wrong)


# ---- what the config says -------------------------------------------------------------------------------------------


def training_of(path: Path, config: Any) -> Any:
    path.write_text(json.dumps(config))
    return read_training(path)


def test_the_config_tells_how_it_is_trained(tmp_path: Path) -> None:
    found = training_of(
        tmp_path / "ds.json",
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
            "activation_nvme_offload": {"placement": "keep", "min_tensor_bytes": 5},
        },
    )
    assert (found.micro_batch, found.micro_steps, found.dtype, found.zero.stage) == (4, 2, torch.bfloat16, 3)
    assert (
        found.zero.offloads_parameters
        and not found.zero.offloads_optimizer
        and found.offload.min_tensor_bytes == 5
        and not found.notes
    )
    assert found.states(2**30) == (
        "AdamW's states 12.00 GiB; ZeRO stage 3 divides parameters, gradients and states by the number of ranks"
    )


def test_without_the_block_its_defaults_are_taken_and_that_is_said(tmp_path: Path) -> None:
    found = training_of(tmp_path / "ds.json", {"fp16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto"})
    assert found.offload.min_tensor_bytes == 1 << 20 and found.micro_batch is None and found.dtype is None
    assert any("defaults of the block" in note for note in found.notes)
    assert any('"fp16.enabled" is "auto"' in note for note in found.notes)
    assert found.states(10) == ""


def test_a_config_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_training(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="holds list"):
        training_of(tmp_path / "ds.json", [])


# ---- the clock ------------------------------------------------------------------------------------------------------


def test_products_take_their_flops_and_the_rest_its_bytes() -> None:
    a, b = torch.empty(64, 128, device="meta"), torch.empty(128, 256, device="meta")
    with OpClock(1e9, 1e30) as clock:
        a @ b
    assert clock.now_s == pytest.approx(2 * 64 * 128 * 256 / 1e9)
    with OpClock(1e30, 1e9) as clock:
        a.exp()
    assert clock.now_s == pytest.approx(2 * a.numel() * 4 / 1e9)
    with OpClock(1.0, 1.0) as clock:
        torch.empty(1000, device="meta").view(10, 100).t()
    assert clock.now_s == 0.0


def test_backward_takes_twice_the_time_of_a_product() -> None:
    a = torch.empty(64, 128, device="meta", requires_grad=True)
    b = torch.empty(128, 256, device="meta", requires_grad=True)
    with OpClock(1e9, 1e30) as clock:
        product = a @ b
        forward_s = clock.now_s
        product.backward(torch.empty_like(product))
    assert clock.now_s == pytest.approx(3 * forward_s)


def test_attention_of_the_cpu_counts_as_flash_does() -> None:
    taken = []
    for device in ("cpu", "cuda"):
        q, k, v = (torch.empty(2, 4, 64, 32, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        with device_kernels(device, "meta") as attention, OpClock(1e9, 1e30) as clock:
            functional.scaled_dot_product_attention(q, k, v).sum().backward()
        assert attention == {Attention.FLASH}
        taken.append(clock.now_s)
    assert taken[0] == pytest.approx(taken[1]) and taken[0] > 2 * 2 * 2 * 4 * 64 * 64 * 32 / 1e9


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
    norm = nn.RMSNorm(64, device="meta")
    plain = [saved_bytes(lambda: functional.dropout(x, 0.1)), saved_bytes(lambda: norm(x))]
    with device_kernels("cuda", "meta"):
        fused = [saved_bytes(lambda: functional.dropout(x, 0.1)), saved_bytes(lambda: norm(x))]
    assert plain[0] == [4 * 64 * 4] and fused[0] == [4 * 64]
    assert sorted(fused[1]) == [4 * 4, 64 * 4, 4 * 64 * 4] and sum(plain[1]) > sum(fused[1])
    assert [saved_bytes(lambda: functional.dropout(x, 0.1)), saved_bytes(lambda: norm(x))] == plain
    with device_kernels("cuda", "meta"):
        assert functional.dropout(x, 0.1, training=False) is x


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("case", ["plain", "causal", "mask", "float mask", "dropout", "strided", "narrow"])
def test_the_cpu_s_attention_saves_on_meta_what_it_saves_there(case: str, heads: int) -> None:
    def saved(device: str) -> list[int]:
        torch.manual_seed(0)
        q = torch.zeros(2, 4, 24, 16, device=device)
        k, v = (torch.zeros(2, heads, 24, 16, device=device) for _ in range(2))
        if case == "strided":
            q = torch.zeros(2, 4, 16, 24, device=device).transpose(2, 3)
        if case == "narrow":
            v = torch.zeros(2, heads, 24, 8, device=device)
        for one in (q, k, v):
            one.requires_grad_()
        mask = torch.ones(24, 24, dtype=torch.bool, device=device) if case == "mask" else None
        if case == "float mask":
            mask = torch.zeros(2, 1, 24, 24, device=device)
        given = {"attn_mask": mask, "dropout_p": 0.1 * (case == "dropout"), "is_causal": case == "causal"}
        gqa = heads != 4
        return saved_bytes(lambda: functional.scaled_dot_product_attention(q, k, v, enable_gqa=gqa, **given))

    with device_kernels("cpu", "meta"):
        on_meta = saved("meta")
    assert on_meta == saved("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device itself is asked")
def test_attention_of_a_cuda_device_that_is_not_here() -> None:
    def chosen(dtype: torch.dtype = torch.bfloat16, mask: bool = False, width: int = 64, heads: int = 4) -> Attention:
        q = torch.empty(2, 4, 16, width, dtype=dtype, device="meta")
        k = torch.empty(2, heads, 16, width, dtype=dtype, device="meta")
        given = torch.empty(16, 16, device="meta") if mask else None
        return attention_of("cuda", q, k, k, given, 0.1, is_causal=False, scale=None, enable_gqa=heads != 4)

    assert chosen() is chosen(torch.float16) is chosen(heads=2) is Attention.FLASH
    assert chosen(torch.float32) is chosen(mask=True) is chosen(width=512) is Attention.EFFICIENT
    assert chosen(torch.float32, heads=2) is chosen(torch.float64) is Attention.MATH


def test_questions_about_masks_are_answered_and_no_others() -> None:
    mask = torch.empty(4, 4, dtype=torch.bool, device="meta")
    with Answers() as answers:
        assert mask.all() and (mask == 0).all() and not mask.any()
        with pytest.raises(RuntimeError, match="meta"):
            mask.sum().item()
    assert answers.given == 3


# ---- what it comes to -----------------------------------------------------------------------------------------------

FAST, SLOW = 1e12, 1.0


def stack(blocks: int = 4, head_bytes: int = SIZE, rate: float = FAST, staging_bytes: int = 100 * SIZE) -> Trace:
    """Blocks of 1 s that save SIZE and a little that must stay, then a head; backward takes 2 s for each."""
    storages, passes = [], []
    end_s = 3.0 * blocks
    for number in range(blocks):
        packed_s, used_s = float(number), end_s - 2.0 * (number + 1)
        passes.append(BlockTrace(f"layers.{number}", packed_s, packed_s + 1.0, used_s, used_s + 2.0, (2 * number,)))
        for nbytes, movable in ((SIZE, True), (8, False)):
            one = StorageTrace(nbytes, f"layers.{number}", (number,), packed_s, packed_s, used_s, used_s + 2.0, movable)
            storages.append(one)
    storages.append(StorageTrace(head_bytes, "head", (OUTSIDE,), blocks, blocks, blocks, blocks))
    machine = resources(rate, rate, copy=FAST, staging_bytes=staging_bytes)
    return Trace(tuple(storages), tuple(passes), machine, end_s)


def config(**block: Any) -> OffloadConfig:
    return OffloadConfig.model_validate({"nvme_path": "/local_nvme", "recompute": False, **block})


def test_equal_blocks_are_one_group_and_the_rest_is_outside() -> None:
    trace = stack(4)
    larger = (replace(trace.storages[0], nbytes=2 * SIZE), *trace.storages[1:])
    first, others, head = breakdown_of(replace(trace, storages=larger))
    assert (first.name, first.count, first.nbytes, first.movable_bytes) == ("layers.0", 1, 2 * SIZE + 8, 2 * SIZE)
    assert (others.name, others.count, others.nbytes, others.total_bytes) == ("layers.1-3", 3, SIZE + 8, 3 * SIZE + 24)
    assert (head.name, head.count, head.total_bytes, others.forward_s) == ("head", 0, SIZE, 1.0)


def test_a_storage_of_several_blocks_counts_once() -> None:
    trace = stack(2)
    shared = (replace(trace.storages[0], blocks=(0, 1, OUTSIDE)), *trace.storages[1:])
    groups = breakdown_of(replace(trace, storages=shared))
    assert sum(group.total_bytes for group in groups) == sum(one.nbytes for one in trace.storages)
    assert (groups[0].name, groups[0].count) == ("layers.0-1", 2)  # the first has it, as if it were its own


def test_fast_drives_lower_the_peak_within_the_limits() -> None:
    found = summarize(stack(8, staging_bytes=2 * SIZE), config(ssd={"rated_endurance_tbw": 1.0}))
    assert found.predictions["keep"].peak_saved_bytes == 8 * (SIZE + 8) + SIZE
    assert found.predictions["offload"].peak_saved_bytes < 5 * SIZE and found.offload_gain > 0.5
    assert found.chosen.is_within and found.pays and found.peak_holder is None
    wear = found.wear["offload"]
    assert wear.written_bytes_per_day == pytest.approx(
        wear.written_bytes_per_step * 86400 / found.predictions["offload"].step_s
    )
    assert wear.life_days == pytest.approx(1e12 / wear.written_bytes_per_day)


def made_again(trace: Trace, seconds: float) -> Trace:
    """The large storages of all blocks but the first can be made again."""
    storages = list(trace.storages)
    for index in range(2, len(storages) - 1, 2):
        storages[index] = replace(storages[index], rematerialize_s=seconds, sources=(0,))
    return replace(trace, storages=tuple(storages))


def test_what_is_made_again_is_predicted_without_a_drive_and_in_the_plan() -> None:
    trace = made_again(stack(8, staging_bytes=SIZE // 2), 0.01)
    ops = ["silu" if one.rematerialize_s is not None else "" for one in trace.storages]
    found = summarize(trace, config(), ops)
    keep, again, plan = (found.predictions[name] for name in ("keep", "rematerialize", "plan"))
    assert list(found.predictions) == ["keep", "rematerialize", "recompute", "offload", "plan"]
    assert again.step_s == pytest.approx(keep.step_s + 7 * 0.01) and not again.written_bytes
    assert again.peak_saved_bytes < 0.5 * keep.peak_saved_bytes
    assert found.rematerialize_gain == pytest.approx(1 - again.peak_saved_bytes / keep.peak_saved_bytes)
    assert found.made_again_bytes["rematerialize"] == {"silu": 7 * SIZE}
    assert (
        found.made_again_bytes["plan"]["silu"] == plan.rematerialized_bytes == found.chosen.saved_bytes["rematerialize"]
    )
    assert found.to_dict()["made_again_bytes"] == found.made_again_bytes


def test_without_rematerialization_nothing_is_said_of_it() -> None:
    plain, turned_off = stack(8), config(rematerialize=False)
    found = summarize(made_again(plain, 0.01), turned_off).to_dict()
    assert found == summarize(plain, turned_off).to_dict() and "rematerialize" not in str(found["predictions"].keys())
    assert not {"made_again_bytes", "rematerialize"} & found.keys()


def test_slow_drives_do_not_pay() -> None:
    found = summarize(stack(40, rate=SLOW, staging_bytes=2 * SIZE), config())
    assert found.chosen.is_within and not found.pays and found.plan_gain < 0.1
    assert found.predictions["offload"].step_s > 1000


def test_the_head_that_holds_the_peak_is_named() -> None:
    found = summarize(stack(2, head_bytes=90 * SIZE), config())
    assert found.offload_gain < 0.1 and found.peak_holder is not None
    name, nbytes = found.peak_holder
    assert name == "head" and nbytes > 80 * SIZE


def test_the_bandwidth_needed_is_bytes_over_time() -> None:
    found = summarize(stack(4), config())
    assert found.bandwidth.moved_bytes == 5 * SIZE
    assert found.bandwidth.write_bytes_per_s == pytest.approx(5 * SIZE / 4.0)
    assert found.bandwidth.read_bytes_per_s == pytest.approx(5 * SIZE / 8.0)


def test_what_staging_cannot_hold_is_counted() -> None:
    trace = stack(2)
    small = replace(trace, resources=replace(trace.resources, staging_bytes=SIZE // 2))
    found = summarize(small, config())
    assert found.too_large_bytes == 3 * SIZE and found.offload_gain == 0.0


def test_nothing_saved_is_no_error() -> None:
    found = summarize(one_block(machine=resources()), config())
    assert found.predictions["keep"].peak_saved_bytes == 0 and found.offload_gain == 0.0 and not found.pays
    assert (
        summarize(one_block(storage(0.5, 2.0), machine=resources()), config()).predictions["keep"].peak_saved_bytes
        == SIZE
    )


def test_rates_have_their_source() -> None:
    given = compute_of("cpu", torch.float32, GivenRates(1e12, 2e9, 3e9))
    assert [one.value for one in (given.flops, given.memory, given.copy)] == [1e12, 2e9, 3e9]
    assert {one.source for one in (given.flops, given.memory, given.copy)} == {"as given"}
    half, full = (compute_of("cuda", dtype, GivenRates()).flops for dtype in (torch.bfloat16, torch.float32))
    assert half.value > full.value and "documented" in half.source
    measured = compute_of("cpu", torch.float32, GivenRates())
    assert measured.flops.value > 0 and measured.copy.source == "measured here"
    drives = drives_of(5e9, None)
    assert [path.write_bytes_per_s for path in drives.paths] == [5e9]
    assert "write as given" in drives.source and "read of the data sheet" in drives.source


def test_a_subject_is_put_into_training_mode() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
    assert Subject(model, ({"x": torch.ones(2)},)).to("meta", None).model.training


# ---- the file of --json ---------------------------------------------------------------------------------------------


def test_json_goes_to_pipes_but_not_through_symlinks(tmp_path: Path) -> None:
    link, pipe, precious = tmp_path / "link", tmp_path / "pipe", tmp_path / "precious"
    precious.write_text("of somebody else")
    link.symlink_to(precious)
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    for path in (link, pipe, Path("/dev/null")):
        assert show("estimate", lambda _: ([], {"a": 1}), Namespace(json=path)) == 0
    reader.join(10.0)
    assert json.loads(read[0]) == json.loads(link.read_text()) == {"a": 1}
    assert precious.read_text() == "of somebody else" and Path("/dev/null").is_char_device()
