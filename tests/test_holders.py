"""The table of who holds saved bytes, what fills the device by it, and what is advised."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from ds_tba.config import OffloadConfig, parse_block
from ds_tba.explain import sample
from ds_tba.explain.out_of_memory import Culprit, Diagnosis, Failure, ModelMemory
from ds_tba.holders import MAX_ROWS, Holder, merged, table

MIB = 1 << 20


def config(**keys: Any) -> OffloadConfig:
    return OffloadConfig(nvme_path="/nvme", **keys)


def holder(module: str, mib: int, tensors: int = 1, op: str = "Mul", largest: str = "[8, 64] float32") -> Holder:
    return Holder(module, op, tensors, mib * MIB, mib * MIB, largest=largest)


def diagnosis(*holders: Holder, peak_mib: int = 90, kept: dict[str, int] | None = None, **more: Any) -> Diagnosis:
    keys = {name: more.pop(name) for name in list(more) if name in OffloadConfig.model_fields}
    saved_bytes = more.pop("saved_bytes", peak_mib * MIB)
    return Diagnosis(config(**keys), holders, kept or {}, saved_bytes, peak_mib * MIB, **more)


LAYERS = holder("layers.*", 90, 32)
LOGITS = holder("lm_head", 60, 2, "LogSoftmax", "[1024, 32000] float32")
SCORES = holder("layers.*.attn", 60, 8, "Softmax", "[4, 8, 512, 512] float32")
MAPS = holder("layers.*", 60, 8, "Convolution", "[4, 8, 512, 512] float32")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("model.layers.17.mlp", "model.layers.*.mlp"),
        ("0", "*"),
        ("h.3.experts.12.w1", "h.*.experts.*.w1"),
        ("conv2d.layer1", "conv2d.layer1"),
        ("", ""),
    ],
)
def test_numbers_of_layers_are_merged(path: str, expected: str) -> None:
    assert merged(path) == expected


def test_a_storage_counts_where_it_is() -> None:
    one = Holder("mlp", "Gelu")
    for nbytes, where in ((5, "resident"), (7, "moved"), (11, "again"), (3, "moved")):
        one.add(nbytes, where, f"[{nbytes}]")
    assert one == Holder("mlp", "Gelu", 4, 26, 5, 10, 11, "[11]", 11)


def test_rows_beyond_the_first_are_one() -> None:
    lines = table([holder(f"m{number}", 50 - number) for number in range(MAX_ROWS + 3)])
    assert len(lines) == 1 + MAX_ROWS + 1
    assert lines[-1].startswith("3 more")
    assert f"{50 - MAX_ROWS + 49 - MAX_ROWS + 48 - MAX_ROWS}.00 MiB" in lines[-1]
    assert len({len(line) for line in lines}) == 1


def test_without_holders_there_is_no_table() -> None:
    assert table([]) == []


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (diagnosis(LAYERS), Culprit.SAVED),
        (diagnosis(LAYERS, LOGITS), Culprit.LOGITS),
        (diagnosis(LAYERS, SCORES), Culprit.ATTENTION),
        # Of the same shape, and a table of embeddings that is one tensor outside of all layers.
        (diagnosis(LAYERS, MAPS), Culprit.SAVED),
        (diagnosis(LAYERS, holder("embed", 60, 1, "Embedding")), Culprit.SAVED),
        (diagnosis(LAYERS, earlier_bytes=60 * MIB), Culprit.EARLIER),
        (diagnosis(LAYERS, earlier_bytes=30 * MIB), Culprit.SAVED),
        (diagnosis(LAYERS, model=ModelMemory(parameters=100 * MIB)), Culprit.MODEL),
        (diagnosis(LAYERS, in_use_bytes=200 * MIB), Culprit.MODEL),
        (diagnosis(LAYERS, in_use_bytes=100 * MIB), Culprit.SAVED),
        # The gradients that backward is about to make.
        (diagnosis(LAYERS, model=ModelMemory(50 * MIB, trained=50 * MIB), failure=Failure("forward")), Culprit.SAVED),
        (diagnosis(LAYERS, model=ModelMemory(50 * MIB, trained=50 * MIB), failure=Failure("backward")), Culprit.MODEL),
        (diagnosis(LAYERS, failure=Failure("optimizer step")), Culprit.STATES),
        (diagnosis(LAYERS, failure=Failure("backward", is_again=True)), Culprit.AGAIN),
        (diagnosis(LAYERS, failure=Failure("forward", asked_bytes=1000 * MIB)), Culprit.OPERATION),
        (diagnosis(failure=Failure("forward", 1000 * MIB, line="t.py:1: loss = cross_entropy(x, y)")), Culprit.LOGITS),
        (diagnosis(failure=Failure("forward", 1000 * MIB, line="t.py:1: x.log_softmax(-1)")), Culprit.LOGITS),
        (diagnosis(failure=Failure("forward", 1000 * MIB, line="t.py:1: w = w.softmax(-1)")), Culprit.ATTENTION),
        (
            diagnosis(failure=Failure("forward", MIB, local="scores [4, 8, 99, 99] float32", local_bytes=100 * MIB)),
            Culprit.ATTENTION,
        ),
        (
            diagnosis(failure=Failure("forward", MIB, local="logits [512, 32000] float32", local_bytes=100 * MIB)),
            Culprit.LOGITS,
        ),
    ],
)
def test_what_holds_most_or_was_about_to_is_the_culprit(found: Diagnosis, expected: Culprit) -> None:
    assert found.culprit is expected
    assert found.verdict()
    assert list(found.remedies())


def test_the_sentence_has_the_layer_the_op_and_the_shape() -> None:
    text = diagnosis(LAYERS, SCORES).verdict()
    for word in ("attention scores", "layers.*.attn", "Softmax", "[4, 8, 512, 512] float32", "60.00 MiB"):
        assert word in text


def test_the_largest_part_is_of_what_is_in_memory() -> None:
    moved = Holder("experts.*", "Gelu", 9, 500 * MIB, moved_bytes=500 * MIB)
    assert "layers.*" in diagnosis(moved, LAYERS).verdict()


def test_a_small_rest_in_memory_is_not_the_largest_part() -> None:
    moved = Holder("layers.*", "Gelu", 9, 500 * MIB, moved_bytes=500 * MIB)
    indices = Holder("embed", "", 1, 16 << 10, 16 << 10, largest="[1, 2048] int64")
    assert "the largest part is of layers.*" in diagnosis(moved, indices, peak_mib=20).verdict()


HOST = {"model": ModelMemory(200 * MIB, 200 * MIB, 400 * MIB, 200 * MIB, optimizer="FusedAdam"), "is_host": True}
DEVICE = {**HOST, "is_host": False}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (diagnosis(LAYERS, placement="keep"), {"placement": "adaptive", "activation_budget_bytes": 45 * MIB}),
        (diagnosis(LAYERS), {"activation_budget_bytes": 45 * MIB}),
        (diagnosis(LAYERS, activation_budget_bytes=8 * MIB), {"activation_budget_bytes": 4 * MIB}),
        (diagnosis(LAYERS), {"recompute": True}),
        (diagnosis(LAYERS, kept={"small": 9, "plan": 1}), {"min_tensor_bytes": 65536}),
        (diagnosis(LAYERS, kept={"staging full": 9}), {"io": {"staging_bytes": 512 << 20}}),
        (
            diagnosis(LAYERS, failure=Failure("backward", module="layers.0", is_again=True, is_ours=True)),
            {"recompute": False},
        ),
    ],
)
def test_the_key_that_would_have_helped_is_named_as_it_is_pasted(found: Diagnosis, expected: dict[str, Any]) -> None:
    advised = [block for _, keys in pasted(found) if (block := keys.get("activation_nvme_offload")) is not None]
    assert expected in advised
    for block in advised:
        assert parse_block({"activation_nvme_offload": {"nvme_path": "/nvme", **block}}) is not None


def pasted(found: Diagnosis) -> list[tuple[str, dict[str, Any]]]:
    """Each piece of advice with its keys."""
    return [
        (text, json.loads(keys[0])) for text in found.remedies() if (keys := re.search(r'\{".*\}', text)) is not None
    ]


def test_a_drive_that_no_key_names_is_in_the_advice() -> None:
    without = Diagnosis(OffloadConfig(placement="keep"), [LAYERS], {}, 90 * MIB, 90 * MIB)
    assert any(keys["activation_nvme_offload"].get("nvme_path") for _, keys in pasted(without))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (diagnosis(LAYERS, LOGITS), "fused linear cross entropy"),
        (diagnosis(LAYERS, SCORES), "scaled_dot_product_attention"),
        (diagnosis(LAYERS, earlier_bytes=60 * MIB), ".detach()"),
        (diagnosis(LAYERS, failure=Failure("backward", is_again=True)), "gradient_checkpointing_disable()"),
        (diagnosis(failure=Failure("backward"), model=ModelMemory(trained=200 * MIB)), "requires_grad_(False)"),
        (diagnosis(**DEVICE), '"stage": 2, "offload_optimizer": {"device": "cpu"}'),
        (diagnosis(**HOST), '"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}'),
    ],
)
def test_the_most_useful_is_the_first(found: Diagnosis, expected: str) -> None:
    assert expected in next(found.remedies())


def test_zero_keeps_the_stage_and_what_is_offloaded_already() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    found = diagnosis(model=ModelMemory(200 * MIB, optimizer="DeepSpeedCPUAdam", zero=zero))
    (text, keys), *_ = pasted(found)
    assert keys == {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    assert "offload_optimizer" not in text


def test_an_optimizer_that_deepspeed_does_not_offload_is_not_to_be_offloaded() -> None:
    found = diagnosis(model=ModelMemory(200 * MIB, 200 * MIB, optimizer="SGD"))
    assert "offload_optimizer" not in " ".join(found.remedies())


def test_half_the_micro_batch_is_the_same_step() -> None:
    keys = [keys for _, keys in pasted(diagnosis(LAYERS, model=ModelMemory(micro_batch=6, accumulation=2)))]
    assert {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4} in keys
    odd = " ".join(diagnosis(LAYERS, model=ModelMemory(micro_batch=3)).remedies())
    assert "micro" not in odd


def test_what_is_set_already_is_not_advised() -> None:
    found = " ".join(diagnosis(LAYERS, recompute=True).remedies())
    for word in ("recompute", "fused", "offload_optimizer", '"placement"'):
        assert word not in found


def test_states_that_are_not_there_yet_are_no_remedy() -> None:
    adam = {"parameters": 200 * MIB, "optimizer": "Adam"}
    told = [" ".join(diagnosis(model=ModelMemory(**adam, states=states)).remedies()) for states in (0, 1 << 30)]
    assert ["optimizer states" in one for one in told] == [False, True]
    stepping = diagnosis(model=ModelMemory(**adam), failure=Failure("optimizer step"))
    assert "optimizer states" in " ".join(stepping.remedies())


def test_the_functions_of_zero_3_made_no_tensor() -> None:
    class PreBackwardFunctionForModule(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, outputs: torch.Tensor) -> torch.Tensor:
            return outputs.view_as(outputs)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    made = PreBackwardFunctionForModule.apply(torch.nn.functional.gelu(torch.ones(2, requires_grad=True)))
    assert sample._op(made) == "Gelu"
