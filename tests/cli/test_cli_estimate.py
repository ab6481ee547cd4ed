"""The command ``ds_tba estimate`` from its arguments to what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_tba.cli import main

MODELS = """
import torch
from torch import nn
from torch.nn import functional

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, sequence, width = x.shape
        q, k, v = self.qkv(x).view(batch, sequence, 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, sequence, width))

class Stack(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def stack(batch, sequence):
    return Stack(256, 32), (torch.zeros(batch, sequence, 256),)

class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))

class GatedStack(Stack):
    def __init__(self, width, depth):
        nn.Module.__init__(self)
        self.layers = nn.ModuleList(Gated(width) for _ in range(depth))

def gated(batch, sequence):
    return GatedStack(256, 8), (torch.zeros(batch, sequence, 256),)

def failing(batch, sequence):
    return Stack(256, 32), (torch.zeros(batch, sequence, 63),)
"""
BLOCK = {"nvme_path": "/nowhere", "min_tensor_bytes": 4096, "recompute": False, "io": {"staging_bytes": 1 << 20}}
GIVEN = ("--tflops", "1", "--write-gbps", "1e-3", "--read-gbps", "1e-3", "--copy-gbps", "50")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    write_config(tmp_path)
    return tmp_path


def write_config(directory: Path, **others: Any) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "activation_nvme_offload": BLOCK,
        **others,
    }
    (directory / "ds_config.json").write_text(json.dumps(config))


def estimate(directory: Path, *arguments: str, model: str = "stack", sequence: int = 256) -> dict[str, Any]:
    """The JSON of an estimate that went well."""
    out = directory / "out.json"
    given = [
        "--config",
        str(directory / "ds_config.json"),
        "--model",
        f"{directory}/models.py:{model}",
        "--seq",
        str(sequence),
    ]
    assert main(["estimate", *given, "--json", str(out), *arguments]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def saved_bytes(batch: int, sequence: int) -> int:
    """What a layer saves: its input, q, k, v (one storage), attention's output, again as rows, a log-sum-exp."""
    row = 256 * 2
    return batch * sequence * (row + 3 * row + row + 4 * 4) + 24


def test_everything_is_told(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(directory, gradient_accumulation_steps=3, optimizer={"type": "AdamW"}, zero_optimization={"stage": 1})
    found = estimate(directory, *GIVEN)
    text = capsys.readouterr().out
    (group,) = [one for one in found["groups"] if one["count"]]
    assert (group["name"], group["count"]) == ("layers.0-31", 32)
    assert group["saved_bytes"] == pytest.approx(saved_bytes(2, 256), rel=0.01)
    assert found["saved_bytes"] == found["peak_saved_bytes"] == found["predictions"]["keep"]["peak_saved_bytes"]
    assert found["ran_on"] == "meta" and found["attention"] == ["flash"] and found["batch"] == 2
    offload, plan = found["predictions"]["offload"], found["predictions"]["plan"]
    budgets = found["budgets"]
    assert [one["fraction"] for one in budgets] == [0.75, 0.5, 0.25] and budgets[0]["is_within"]
    assert budgets[0]["budget_bytes"] == int(0.75 * found["peak_saved_bytes"])
    assert str(budgets[0]["budget_bytes"]) in text
    assert offload["step_s"] > 10 * plan["step_s"] and not found["pays"]  # at 1 MB/s
    for words in ("3 micro-steps", "ZeRO stage 1 divides the states", "flash attention", "layers.0-31", "the plan",
                  "set ssd.rated_endurance_tbw", "write as given, read as given", "1 TFLOP/s"):  # fmt: skip
        assert words in text
    assert all(len(line) == len(line.rstrip()) for line in text.splitlines())


def test_rematerialization_is_told(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A layer saves its input, gate, silu, up and the product, the third and the last of which are made again."""
    found = estimate(directory, *GIVEN, "--gpu-memory", "80", model="gated")
    text = capsys.readouterr().out
    each = 8 * 2 * 256 * 256 * 2
    assert found["made_again_bytes"]["rematerialize"] == {"silu": each, "mul": each}
    keep, again = found["predictions"]["keep"], found["predictions"]["rematerialize"]
    assert again["rematerialized_bytes"] == 2 * each and again["written_bytes"] == 0
    saved_bytes = keep["peak_saved_bytes"] - 2 * each
    assert again["peak_saved_bytes"] == saved_bytes + 2 * each // 8  # backward begins with the last of the layers
    assert found["fits"]["rematerialize"]
    for words in ("rematerialize all  ", "made again  ", "silu 2.00 MiB", "no drive    ", "is taken as proven"):
        assert words in text
    assert all(len(line) == len(line.rstrip()) for line in text.splitlines())

    write_config(directory, activation_nvme_offload={**BLOCK, "rematerialize": {"exclude": ["silu"]}})
    assert estimate(directory, *GIVEN, model="gated")["made_again_bytes"]["rematerialize"] == {"mul": each}

    write_config(directory, activation_nvme_offload={**BLOCK, "rematerialize": False})
    capsys.readouterr()
    without = estimate(directory, *GIVEN, model="gated")
    assert set(without["predictions"]) == {"keep", "recompute", "offload", "plan"} and "made_again_bytes" not in without
    text = capsys.readouterr().out
    assert without["predictions"]["keep"] == keep
    assert not any(words in text for words in ("rematerialize all", "made again", "no drive", "proven"))


def test_a_config_without_a_drive_is_estimated(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = {"placement": "keep", "min_tensor_bytes": 4096}
    write_config(directory, activation_nvme_offload=block, zero_optimization={"stage": 3})
    found = estimate(directory, *GIVEN, model="gated")
    text = capsys.readouterr().out
    assert found["predictions"]["rematerialize"]["peak_saved_bytes"] < found["predictions"]["keep"]["peak_saved_bytes"]
    assert 'that of the run "rematerialize all"' in text


def test_an_op_that_there_is_no_rule_for_is_named(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(directory, activation_nvme_offload={**BLOCK, "rematerialize": {"exclude": ["matmul"]}})
    given = ["--config", f"{directory}/ds_config.json", "--model", f"{directory}/models.py:gated", "--seq", "64"]
    assert main(["estimate", *given, *GIVEN]) == 2
    assert 'rematerialize.exclude" names matmul: the ops are' in capsys.readouterr().err


def test_what_fits_the_gpu_is_said_with_everything_that_it_must_hold(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(directory, optimizer={"type": "AdamW"}, zero_optimization={"stage": 2})
    found = estimate(directory, *GIVEN, "--gpu-memory", "1000")
    need, keep = found["device_need"], found["predictions"]["keep"]["peak_saved_bytes"]
    assert need["parameter_bytes"] == need["gradient_bytes"] == found["parameter_bytes"]
    assert need["states_bytes"] == 12 * found["parameters"] and need["temporary_bytes"] > 0
    assert set(found["fits"].values()) == {True}
    needed_bytes = sum(need.values()) + keep
    for gib, fits in ((1.001 * needed_bytes / 2**30, True), (0.999 * needed_bytes / 2**30, False)):
        assert estimate(directory, *GIVEN, "--gpu-memory", str(gib))["fits"]["keep"] is fits
    assert "keep all" in capsys.readouterr().out
    divided = estimate(directory, *GIVEN, "--ranks", "4")
    assert divided["device_need"]["gradient_bytes"] == need["gradient_bytes"] // 4
    assert divided["device_need"]["parameter_bytes"] == need["parameter_bytes"]
    assert divided["fits"]["keep"] is None and "--gpu-memory GIB shows what fits" in capsys.readouterr().out
    offloading = {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "cpu"}}
    write_config(directory, optimizer={"type": "AdamW"}, zero_optimization=offloading)
    beside = estimate(directory, *GIVEN)["device_need"]
    assert beside["parameter_bytes"] == beside["states_bytes"] == 0


def test_batch_dtype_and_device_may_be_given(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = (*GIVEN, "--memory-gbps", "100")
    half = estimate(directory, *given)
    full = estimate(directory, *given, "--dtype", "fp32", "--batch", "4", "--device", "cpu")
    assert (
        full["batch"] == 4 and full["attention"] == ["flash"] and full["parameter_bytes"] == 2 * half["parameter_bytes"]
    )
    assert full["saved_bytes"] == pytest.approx(4 * half["saved_bytes"], rel=0.03)
    assert "as on CUDA" not in capsys.readouterr().out.rpartition("on cpu")[2]


def test_without_rates_the_drive_of_the_config_is_measured(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(directory, activation_nvme_offload={**BLOCK, "nvme_path": str(directory), "io": {"backend": "posix"}})
    found = estimate(directory, "--tflops", "1")
    text = capsys.readouterr().out
    assert f"measured here at {directory}" in found["drives"] and found["write_bytes_per_s"] > 0
    assert "measuring the drives wrote" in text
    left = {path.name for path in directory.iterdir()} - {"__pycache__"}  # Python's own, of models.py
    assert left == {"ds_config.json", "models.py", "out.json"}


def test_a_drive_that_is_not_here_has_the_data_sheet_s_rates(directory: Path) -> None:
    found = estimate(directory, "--tflops", "1")
    assert "data sheet" in found["drives"] and "/nowhere does not exist" in found["drives"]
    one = estimate(directory, "--tflops", "1", "--write-gbps", "3")
    assert one["write_bytes_per_s"] == 3e9 and "write as given" in one["drives"]


def test_without_the_block_the_defaults_are_taken(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "ds_config.json").write_text("{}")
    found = estimate(directory, *GIVEN, "--batch", "2")
    assert found["parameter_bytes"] == 4 * found["parameters"]
    assert "the defaults of the block are used" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "{0}/models.py:absent"), "has no function 'absent'; it has stack, gated, failing"),
        (("--model", "{0}/models.py:failing"), "forward and backward failed in aten."),
        (("--config", "{0}/absent.json"), "cannot be read as ds_config.json"),
        (("--json", "{0}/absent/out.json"), "cannot be written"),
    ],
)
def test_what_is_wrong_is_named(
    directory: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, str], says: str
) -> None:
    given = {"--config": "{0}/ds_config.json", "--model": "{0}/models.py:stack", "--seq": "128"}
    given |= dict([arguments])
    text = [part.format(directory) for pair in given.items() for part in pair]
    assert main(["estimate", *text, *GIVEN]) == 2
    assert says in capsys.readouterr().err


def test_a_config_with_a_wrong_key_is_refused(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(directory, activation_nvme_offload={**BLOCK, "nvme_paht": "/x"})
    given = ["--config", f"{directory}/ds_config.json", "--model", f"{directory}/models.py:stack", "--seq", "64"]
    assert main(["estimate", *given, *GIVEN]) == 2
    assert "did you mean `nvme_path`" in capsys.readouterr().err


def test_a_batch_must_be_known(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(directory, train_micro_batch_size_per_gpu="auto")
    given = ["--config", f"{directory}/ds_config.json", "--model", f"{directory}/models.py:stack", "--seq", "64"]
    assert main(["estimate", *given, *GIVEN]) == 2
    assert "--batch" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value"), [("--batch", "0"), ("--seq", "-1"), ("--seq", "x"), ("--tflops", "0")])
def test_numbers_must_be_above_0(directory: Path, capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    given = ["--config", "c.json", "--model", "m.py:f", "--seq", "64", f"{option}={value}"]
    with pytest.raises(SystemExit) as ended:
        main(["estimate", *given])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert option in error and repr(value) in error and "must be" in error


def test_an_hf_config_is_estimated(directory: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "use_cache": False}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **heads}
    (directory / "config.json").write_text(json.dumps(config))
    given = ["--config", f"{directory}/ds_config.json", "--model", f"{directory}/config.json", "--seq", "128"]
    out = directory / "out.json"
    assert main(["estimate", *given, *GIVEN, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["ran_on"] == "meta" and [one["count"] for one in found["groups"]][:2] == [1, 1]
    assert torch.bfloat16.itemsize * found["parameters"] == found["parameter_bytes"]


def test_the_example_of_the_readme_is_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[2]
    model = f"{root / 'examples/train_gpt.py'}:make_model"
    given = ["--batch", "8", "--seq", "512", "--tflops", "0.2", "--write-gbps", "2", "--read-gbps", "2"]
    main(["estimate", "--config", str(root / "ds_configs/minimal.json"), "--model", model, *given])
    told = capsys.readouterr().out
    assert "blocks.0-5" in told and "the plan" in told


# ---- the block of the optimizer update ------------------------------------------------------------------------------

OFFLOADED = {"stage": 3, "offload_optimizer": {"device": "cpu"}}


def test_the_block_without_what_it_needs_is_told(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(directory, zero_optimization={"stage": 2}, interleaved_optimizer_update={})
    given = ["--config", f"{directory}/ds_config.json", "--model", f"{directory}/models.py:stack", "--seq", "64"]
    assert main(["estimate", *given, *GIVEN]) == 2
    assert '"zero_optimization.stage" is 2' in capsys.readouterr().err


def test_a_wrong_block_of_the_update_is_refused(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(directory, zero_optimization=OFFLOADED, interleaved_optimizer_update={"device_shar": 0.5})
    given = ["--config", f"{directory}/ds_config.json", "--model", f"{directory}/models.py:stack", "--seq", "64"]
    assert main(["estimate", *given, *GIVEN]) == 2
    assert "device_share" in capsys.readouterr().err
