"""The command ``ds_tba plan`` from its arguments to what it prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli
from support.planned import LAYERS, LLAMA, WIDTH, small

pytest.importorskip("transformers")
BLOCK = {"nvme_path": "/nowhere", "min_tensor_bytes": 4096, "recompute": False, "io": {"staging_bytes": 1 << 20}}
ADAM = {"type": "AdamW"}
SLOW = ("--write-gbps", "1e-3", "--read-gbps", "1e-3")
FAST = ("--write-gbps", "8", "--read-gbps", "16", "--drive-tbw", "1200")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    write_config(tmp_path)
    return tmp_path


def write_config(directory: Path, **others: Any) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "optimizer": ADAM}
    config |= {"activation_nvme_offload": BLOCK, **others}
    (directory / "ds_config.json").write_text(json.dumps(config))


@pytest.fixture
def told(cli: Cli, directory: Path) -> Callable[..., str]:
    """Return a function that runs ``ds_tba plan`` for the model with the config, and returns its output."""

    def run(*arguments: str, status: int = 0, sequence: int = 256) -> str:
        config = ("--config", directory / "ds_config.json", "--seq", sequence)
        found = cli("plan", directory, *config, *arguments, status=status)
        return found.err if status == 2 else found.out

    return run


@pytest.fixture
def plan(told: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    return lambda *arguments, **options: json.loads(told("--json", *arguments, **options))


def row(found: dict[str, Any], name: str) -> dict[str, Any]:
    (one,) = [one for one in found["rows"] if one["name"] == name]
    return {**one, **one["cost"]}


def test_everything_is_told(directory: Path, told: Any, plan: Any) -> None:
    write_config(directory, gradient_accumulation_steps=3, zero_optimization={"stage": 1})
    found, text = plan(*SLOW), told(*SLOW)
    assert found["saved_bytes"] == row(found, "as it is")["peak_saved_bytes"]
    assert found["batch"] == 2 and found["recommended"] is None
    adaptive, offload = row(found, "+ adaptive in a budget"), row(found, "offload all")
    assert offload["step_s"] > 10 * adaptive["step_s"]  # at 1 MB/s
    assert found["parameter_bytes"] == 2 * found["parameters"]
    for words in ("+ adaptive", "rated 600 TBW together", "write 0.001 and read 0.001 GB/s", "ds_nvme_tune and fio",
                  "--gpu (24GB, or a name) says what fits"):  # fmt: skip
        assert words in text


def test_what_fits_the_gpu_is_said_with_everything_that_it_must_hold(directory: Path, told: Any, plan: Any) -> None:
    write_config(directory, zero_optimization={"stage": 2})
    found = plan("--gpu", "1000")
    held = found["held"]["always"]
    assert held["parameters"] == held["gradients"] == found["parameter_bytes"]
    assert held["optimizer states"] == 12 * found["parameters"] == 12 * found["trained"]
    assert {one["verdict"] for one in found["rows"]} == {"fits"} and found["recommended"] == "as it is"
    assert "nothing has to be changed" in told("--gpu", "1000")
    assert plan("--ranks", "4")["held"]["always"]["gradients"] == held["gradients"] // 4
    text = told("--gpu", "24GB", "--host-memory", "3GB")
    assert "the GPU holds CUDA context 1.00 GiB, " in text and "has 3.00 GiB of host memory free (" in text


def test_the_gpus_of_a_node_share_drives_and_divide_states(directory: Path, told: Any, plan: Any) -> None:
    write_config(directory, zero_optimization={"stage": 3})
    node = (*FAST, "--gpus-per-node", "8")
    parameter_bytes, many = plan(*FAST)["parameter_bytes"], plan(*node)
    assert many["held"]["always"]["parameters"] == -(-parameter_bytes // 8)
    moved = row(many, "offload all")
    assert moved["life_days"] == pytest.approx(1200e12 / (8 * moved["written_bytes_per_day"]))
    text = told(*node)
    assert "rated 1200 TBW together" in text and "its 8 GPUs share them" in text
    assert plan(*node, "--ranks", "2")["held"]["always"]["parameters"] == -(-parameter_bytes // 2)


def test_tokens_are_divided_among_ranks_by_the_option_or_the_config(directory: Path, plan: Any) -> None:
    whole, divided = plan(sequence=512), plan("--sequence-parallel", "2", sequence=512)
    assert divided["saved_bytes"] == plan(sequence=256)["saved_bytes"] < whole["saved_bytes"]
    assert "512 tokens" in divided["title"] and "sequence-parallel 2" in divided["title"]
    write_config(directory, sequence_parallel_size=2)
    assert plan(sequence=512)["saved_bytes"] == divided["saved_bytes"]


def test_a_node_s_rating_is_that_of_each_of_its_drives(directory: Path, told: Any) -> None:
    for ssd, rated in (({}, "rated 1200 TBW together"), ({"rated_endurance_tbw": 70}, "rated 140 TBW together")):
        write_config(directory, activation_nvme_offload={**BLOCK, "nvme_path": ["/no/a", "/no/b"], "ssd": ssd})
        assert rated in told(sequence=64)


def test_if_nothing_fits_the_holders_and_remedies_are_named(told: Any) -> None:
    text = told("--gpu", "0.5GB", status=3)
    assert "NOTHING FITS" in text and "CUDA context: a larger GPU" in text
    assert len([line for line in text.splitlines() if ": " in line and line.startswith("  ") and "iB  " in line]) == 3


def test_without_a_config_bf16_adamw_and_stage_2_are_assumed(directory: Path, cli: Cli) -> None:
    text = cli("plan", directory, "--seq", "1k", "--gpu", "RTX 4090", "--lora", "4").out
    assert "batch 1 x 1024 tokens, torch.bfloat16, lora 4" in text and "no --config was given" in text
    trained = LAYERS * 4 * (4 * 2 * WIDTH + 3 * (WIDTH + 2 * WIDTH)) / 1e6
    assert f"of which {trained:,.1f} M are trained" in text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--seq", "1k", "--gpu", "riva"), "--gpu 'riva' must be a size such as 24GB, or one of H100"),
        (("--seq", "1k", "--config", "absent.json"), "absent.json cannot be read as ds_config.json: No such file"),
        ((), "give the tokens of a sequence, such as --seq 32k"),
        (("--longest",), "or --longest and --gpu 24GB"),
        (("--seq", "1k"), "MODEL 'absent.json' cannot be read: it must be the config.json"),
    ],
)
def test_a_wrong_option_is_told_before_the_model_is_read(cli: Cli, given: tuple[str, ...], says: str) -> None:
    assert says in cli("plan", "absent.json", *given, status=2).err


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"activation_nvme_offload": {**BLOCK, "nvme_paht": "/x"}}, "did you mean `nvme_path`"),
        ({"activation_nvme_offlaod": BLOCK}, 'did you mean "activation_nvme_offload"'),
        ({"zero_optimization": {"activation_nvme_offload": BLOCK}}, "move the block to the top level"),
        ({"zero_optimization": {"stage": 2}, "interleaved_optimizer_update": {}}, '"zero_optimization.stage" is 2'),
        ({"interleaved_optimizer_update": {"device_shar": 0.5}}, "device_share"),
    ],
)
def test_a_config_that_a_run_refuses_is_refused(directory: Path, told: Any, block: dict[str, Any], says: str) -> None:
    write_config(directory, **block)
    assert says in told(status=2)


def test_auto_is_taken_as_1_and_that_is_said(directory: Path, plan: Any) -> None:
    """Issue: "auto" of the Trainer's config ended the command after 20 s."""
    write_config(directory, train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto")
    found = plan(sequence=64)
    assert found["batch"] == 1
    (note,) = [one for one in found["notes"] if '"auto", which the trainer decides, is taken as 1 or as on' in one]
    assert note.endswith(": train_micro_batch_size_per_gpu, gradient_accumulation_steps")


@pytest.mark.parametrize(("option", "value"), [("--batch", "0"), ("--seq", "-1"), ("--seq", "x"), ("--drive-tbw", "0")])
def test_numbers_must_be_above_0(cli: Cli, option: str, value: str) -> None:
    error = cli("plan", "config.json", "--seq", "64", f"{option}={value}", status=2, exits=True).err
    assert option in error and repr(value) in error and "must be" in error


SMALL = {"vocab_size": 128, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}  # fmt: skip
VISION = {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8, "hidden_size": 32,
          "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}  # fmt: skip
TEXT = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "note"),
    [
        ({"model_type": "bart", "architectures": ["BartForConditionalGeneration"], **SMALL}, ""),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 128, "d_model": 32,
          "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}, ""),
        ({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **TEXT, "num_local_experts": 4},
         "ends at max_position_embeddings 64"),
        ({"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "image_token_index": 127,
          "text_config": {"model_type": "llama", **TEXT}, "vision_config": VISION}, "images and sound are left out"),
        # Issue: AttributeError: 'Llama4Config' object has no attribute 'pad_token_id'.
        ({"model_type": "llama4", "architectures": ["Llama4ForCausalLM"],
          "text_config": {"model_type": "llama4_text", **TEXT, "intermediate_size_mlp": 128, "num_local_experts": 2},
          "vision_config": {**VISION, "model_type": "llama4_vision_model"}}, ""),
    ],
    ids=["encoder-decoder with a mask", "encoder-decoder", "mixture", "vision", "text of a multimodal one"],
)  # fmt: skip
def test_models_of_other_kinds_are_planned(tmp_path: Path, cli: Cli, config: dict[str, Any], note: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = cli("plan", tmp_path, "--seq", "128", "--gpu", "24 GB").out
    assert "recommended 'as it is'" in out and note in out


# ---- the longest sequence -------------------------------------------------------------------------------------------


def test_a_sequence_ends_where_the_positions_of_the_model_do(tmp_path: Path, cli: Cli) -> None:
    """Issue: --longest of BERT, which has 512 positions, ended with status 2."""
    (tmp_path / "config.json").write_text(json.dumps(small("BERT", 2, 256, 128)))
    found = json.loads(cli("plan", tmp_path, "--gpu", "24GB", "--longest", "--json").out)["rows"]
    assert {one["sequence"] for one in found} == {128}


def test_the_command_says_the_longest_of_each_setting(directory: Path, told: Any, plan: Any) -> None:
    (directory / "config.json").write_text(json.dumps(small("Llama", 6, 32000, 8192)))
    block = {"placement": "nvme", "nvme_path": "/local_nvme", "min_tensor_bytes": 4096}
    zero = {"contiguous_gradients": False}
    write_config(directory, train_micro_batch_size_per_gpu=1, zero_optimization=zero, activation_nvme_offload=block)
    drive = ("--longest", "--drive-tbw", "1", "--write-gbps", "4", "--read-gbps", "4")
    given = ("--gpu", "1425MB", *drive)
    plain, aided = (plan(*given, *more, sequence=128)["rows"] for more in ((), ("--fused-loss",)))
    assert {"as it is", "+ checkpointing", "+ checkpointing and NVMe", "offload all"} <= {one["name"] for one in plain}
    for before, after in zip(plain, aided, strict=True):
        assert before["name"] == after["name"] and 0 < before["sequence"] < after["sequence"]
    text = told(*given, "--fused-loss", sequence=128)
    assert f"{aided[0]['sequence']:,}" in text and "fused-loss" in text
    most = max(aided, key=lambda one: one["sequence"])
    assert f"recommended {most['name']!r}: {most['sequence']:,} tokens are the longest" in text
    assert most["life_days"] < 365 and "IT WEARS the drives out" in text
    told("--gpu", "1GB", *drive, sequence=128, status=3)
