"""The commands ``ds_tba plan`` and ``ds_tba estimate`` from their arguments to what they print."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Cli

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

def leaving(batch, sequence):
    raise SystemExit("no GPU")

def failing(batch, sequence):
    return Stack(256, 32), (torch.zeros(batch, sequence, 63),)
"""
GIB = 14.6 / 16 * 2**30  # of which PyTorch has that part, as of the smallest card in the table
BLOCK = {"nvme_path": "/nowhere", "min_tensor_bytes": 4096, "recompute": False, "io": {"staging_bytes": 1 << 20}}
GIVEN = ("--tflops", "1", "--write-gbps", "1e-3", "--read-gbps", "1e-3", "--copy-gbps", "50")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    write_config(tmp_path)
    return tmp_path


def write_config(directory: Path, **others: Any) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "activation_nvme_offload": BLOCK}
    (directory / "ds_config.json").write_text(json.dumps({**config, **others}))


def arguments_of(directory: Path, model: str = "stack", sequence: int = 256) -> list[str]:
    return [f"{directory}/models.py:{model}", "--config", f"{directory}/ds_config.json", "--seq", str(sequence)]


def estimate(directory: Path, *arguments: str, model: str = "stack", sequence: int = 256) -> dict[str, Any]:
    """The JSON of an estimate that went well, which is alone on the standard output."""
    with redirect_stdout(StringIO()) as out:
        assert main(["estimate", *arguments_of(directory, model, sequence), "--json", *arguments]) == 0
    return json.loads(out.getvalue())


def saved_bytes(batch: int, sequence: int) -> int:
    """What a layer saves: its input, q, k, v (one storage), attention's output, again as rows, a log-sum-exp."""
    row = 256 * 2
    return batch * sequence * (row + 3 * row + row + 4 * 4) + 24


def row(found: dict[str, Any], name: str) -> dict[str, Any]:
    (one,) = [one for one in found["rows"] if one["name"] == name]
    return {**one, **one["cost"]}


def test_everything_is_told(directory: Path, cli: Cli) -> None:
    write_config(directory, gradient_accumulation_steps=3, optimizer={"type": "AdamW"}, zero_optimization={"stage": 1})
    found = estimate(directory, *GIVEN)
    text = cli("estimate", *arguments_of(directory), *GIVEN).out
    (group,) = [one for one in found["groups"] if one["count"]]
    assert (group["name"], group["count"]) == ("layers.*", 32)
    assert group["saved_bytes"] == pytest.approx(32 * saved_bytes(2, 256), rel=0.01)
    assert found["saved_bytes"] == found["peak_saved_bytes"] == row(found, "as it is")["peak_saved_bytes"]
    assert found["ran_on"] == "meta" and found["attention"] == ["flash"]
    assert found["batch"] == 2
    adaptive, offload = row(found, "+ adaptive in a budget"), row(found, "offload all")
    assert offload["step_s"] > 10 * adaptive["step_s"]  # at 1 MB/s
    for words in ("flash", "layers.*", "+ adaptive", "rated 600 TBW assumed", "write and read as given",
                  "1 TFLOP/s", "bandwidth   to move all"):  # fmt: skip
        assert words in text
    assert all(len(line) == len(line.rstrip()) for line in text.splitlines())


def test_rematerialization_is_told(directory: Path, cli: Cli) -> None:
    """A layer saves its input, gate, silu, up and the product, the third and the last of which are made again."""
    found = estimate(directory, *GIVEN, "--gpu", "80GB", model="gated")
    text = cli("estimate", *arguments_of(directory, "gated"), *GIVEN, "--gpu", "80GB").out
    each = 8 * 2 * 256 * 256 * 2
    assert found["made_again_bytes"] == {"silu": each, "mul": each}
    keep, again = row(found, "as it is"), row(found, "+ rematerialize")
    assert again["rematerialized_bytes"] == 2 * each and again["written_bytes"] == 0
    kept_bytes = keep["peak_saved_bytes"] - 2 * each
    assert again["peak_saved_bytes"] == kept_bytes + 2 * each // 8  # backward begins with the last of the layers
    assert again["verdict"] == "fits" and "made again  can be" in text and "silu 2.00 MiB" in text

    write_config(directory, activation_nvme_offload={**BLOCK, "rematerialize": {"exclude": ["silu"]}})
    assert estimate(directory, *GIVEN, model="gated")["made_again_bytes"] == {"mul": each}
    write_config(directory, activation_nvme_offload={**BLOCK, "rematerialize": False})
    without = estimate(directory, *GIVEN, model="gated")
    assert not without["made_again_bytes"] and "+ rematerialize" not in {one["name"] for one in without["rows"]}
    assert row(without, "as it is")["peak_saved_bytes"] == keep["peak_saved_bytes"]


def test_a_config_without_a_drive_is_estimated(directory: Path) -> None:
    block = {"placement": "keep", "min_tensor_bytes": 4096}
    write_config(directory, activation_nvme_offload=block, zero_optimization={"stage": 3})
    found = estimate(directory, *GIVEN, model="gated")
    assert row(found, "+ rematerialize")["peak_saved_bytes"] < row(found, "as it is")["peak_saved_bytes"]


def test_an_op_that_there_is_no_rule_for_is_named(directory: Path, cli: Cli) -> None:
    write_config(directory, activation_nvme_offload={**BLOCK, "rematerialize": {"exclude": ["matmul"]}})
    given = arguments_of(directory, "gated", 64)
    assert 'rematerialize.exclude" names matmul: the ops are' in cli("estimate", *given, *GIVEN, status=2).err


def test_what_fits_the_gpu_is_said_with_everything_that_it_must_hold(directory: Path, cli: Cli) -> None:
    write_config(directory, optimizer={"type": "AdamW"}, zero_optimization={"stage": 2})
    found = estimate(directory, *GIVEN, "--gpu", "1000")
    held = found["rows"][0]["held"]
    assert held["always"]["parameters"] == held["always"]["gradients"] == found["parameter_bytes"]
    assert held["always"]["optimizer states"] == 12 * found["parameters"] == 12 * found["trained"]
    assert {one["verdict"] for one in found["rows"]} == {"fits"} and found["recommended"] == "as it is"
    assert "nothing has to be changed" in cli("plan", *arguments_of(directory), *GIVEN, "--gpu", "1000").out
    need = row(found, "as it is")["need_bytes"]
    moving = need - sum(held["always"].values()) - sum(held["passing"].values())
    kept = found["peak_saved_bytes"] + found["temporary_bytes"]
    assert found["peak_saved_bytes"] < moving / 1.05 <= kept + 1
    for factor, verdict in ((1.2, "fits"), (1.05, "tight"), (0.99, "does not fit")):
        given = (*GIVEN, "--gpu", f"{factor * need / GIB:.6f}")
        assert row(estimate(directory, *given), "as it is")["verdict"] == verdict
    divided = estimate(directory, *GIVEN, "--ranks", "4")
    assert divided["rows"][0]["held"]["always"]["gradients"] == held["always"]["gradients"] // 4
    text = cli("plan", *arguments_of(directory), *GIVEN, "--ranks", "4").out
    assert divided["recommended"] is None and "--gpu (24GB, or a name) says what fits" in text


def test_nodes_of_many_gpus_share_drives_and_a_network(directory: Path, cli: Cli) -> None:
    block = {**BLOCK, "nvme_path": ["/nvme0", "/nvme1"]}
    micro = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}
    write_config(directory, activation_nvme_offload=block, zero_optimization={"stage": 3}, **micro)
    given = (*GIVEN, "--write-gbps", "8", "--read-gbps", "16", "--drive-tbw", "1200")
    alone = estimate(directory, *given)
    many = estimate(directory, *given, "--nodes", "4", "--gpus-per-node", "8", "--network-gbps", "25")
    assert "scale" not in alone and many["write_bytes_per_s"] == alone["write_bytes_per_s"] / 8
    assert many["rows"][0]["held"]["always"]["parameters"] == -(-alone["parameter_bytes"] // 32)
    scale, name = many["scale"], "+ adaptive in a budget"
    assert scale["written_bytes"] == 8 * row(many, name)["written_bytes"] > 0
    # In two micro-steps two gathers of all parameters and one reduction of all gradients; 3 of 4 parts are elsewhere.
    assert scale["network_bytes"] == 2 * 3 * many["parameter_bytes"] * 3 // 4
    assert scale["network_s"] == pytest.approx(scale["network_bytes"] / 25e9)
    all_moved = row(many, "offload all")
    assert all_moved["life_days"] == pytest.approx(1200e12 / (8 * all_moved["written_bytes_per_day"]))
    text = cli("plan", *arguments_of(directory), *given, "--nodes", "4", "--gpus-per-node", "8").out
    assert "4 x 8 GPUs" in text and "of ZeRO-3 a step" in text and "each GPU has 1/8 of them" in text
    lines = (line for line in text.splitlines() if line.startswith(("GPU  ", "drive", "node", "job")))
    rows = {cells[0]: cells for cells in map(str.split, lines)}
    per_day = {which: float(rows[which][-3]) for which in ("GPU", "drive", "node", "job")}
    assert per_day["node"] == pytest.approx(8 * per_day["GPU"], rel=0.02)
    assert per_day["node"] == pytest.approx(2 * per_day["drive"], rel=0.02)
    fewer = estimate(directory, *given, "--nodes", "4", "--gpus-per-node", "8", "--ranks", "8")
    assert fewer["rows"][0]["held"]["always"]["parameters"] == -(-alone["parameter_bytes"] // 8)


def test_compression_lowers_the_wear_as_given_or_as_assumed(directory: Path, cli: Cli) -> None:
    given = (*GIVEN, "--write-gbps", "8", "--read-gbps", "16", "--drive-tbw", "1200")
    per_day = {}
    for ratio, told in ((None, ""), ("0.5", "leaves 0.5 of the bytes that are written a day (as given)")):
        options = given if ratio is None else (*given, "--compression-ratio", ratio)
        per_day[ratio] = row(estimate(directory, *options), "offload all")["written_bytes_per_day"]
        assert told in cli("plan", *arguments_of(directory), *options).out
    assert per_day["0.5"] == pytest.approx(per_day[None] / 2)
    io = {"staging_bytes": 340 * 4096, "compression": "zstd"}  # the buffers of lanes leave the 1 MiB from above
    write_config(directory, activation_nvme_offload={**BLOCK, "io": io})
    assumed = row(estimate(directory, *given), "offload all")["written_bytes_per_day"]
    assert assumed == pytest.approx(per_day[None] * 0.65)
    text = cli("plan", *arguments_of(directory), *given).out
    assert "compression leaves 0.65 of the bytes that are written a day (assumed" in text


def test_what_is_recommended_is_merged(directory: Path, cli: Cli) -> None:
    write_config(directory, zero_optimization={"stage": 2, "reduce_bucket_size": 1000})
    config = directory / "ds_config.json"
    on_cpu = (*GIVEN, "--memory-gbps", "100", "--batch", "64", "--device", "cpu")
    gib = row(estimate(directory, *on_cpu, model="gated"), "+ rematerialize")["need_bytes"] / 0.89 / GIB
    given = ["--config", str(config), "--seq", "256", "--gpu", f"{gib:.6f}", *on_cpu, "--write", str(config)]
    text = cli("plan", f"{directory}/models.py:gated", *given, "--drive-tbw", "1200").out
    assert "recommended '+ rematerialize': it fits" in text and "rated 1200 TBW as given" in text
    written = json.loads(config.read_text())
    assert written["activation_nvme_offload"] == {**BLOCK, "enabled": True, "placement": "keep"}
    assert (directory / "ds_config.json.bak").exists() and f"written to  {config}; what it was is in" in text


def test_a_file_in_which_nothing_has_to_be_changed_is_left_alone(directory: Path, cli: Cli) -> None:
    config = directory / "ds_config.json"
    given, before = ["--config", str(config), "--seq", "64", "--gpu", "80GB", *GIVEN], config.read_text()
    text = cli("plan", f"{directory}/models.py:gated", *given, "--write", str(config)).out
    assert f"not written {config}: nothing in it has to be changed" in text
    assert config.read_text() == before and not (directory / "ds_config.json.bak").exists()


def test_if_nothing_fits_the_holders_and_remedies_are_named(directory: Path, cli: Cli) -> None:
    given = ["--config", f"{directory}/ds_config.json", "--seq", "256", "--gpu", "0.5GB", *GIVEN]
    text = cli("plan", f"{directory}/models.py:stack", *given, status=3).out
    assert "NOTHING FITS" in text and "CUDA context: a larger GPU" in text
    assert len([line for line in text.splitlines() if ": " in line and line.startswith("  ") and "iB  " in line]) == 3
    text = cli("plan", f"{directory}/models.py:stack", *given, "--write", f"{directory}/new.json", status=3).out
    assert "not written" in text and not (directory / "new.json").exists()


def test_a_plan_without_a_config_makes_one(directory: Path, cli: Cli) -> None:
    path = directory / "new.json"
    given = ["--seq", "1k", "--gpu", "RTX 4090", *GIVEN, "--write", str(path), "--lora", "4"]
    text = cli("plan", f"{directory}/models.py:stack", *given).out
    assert "batch 1 x 1024 tokens, bfloat16, LoRA of rank 4" in text and "no --config was given" in text
    written = json.loads(path.read_text())
    assert written["train_micro_batch_size_per_gpu"] == 1 and written["bf16"] == {"enabled": True}
    trained = 32 * 4 * ((256 + 768) + (256 + 256)) / 1e6
    assert f"of which {trained:,.1f} M are trained" in text


def test_a_plan_needs_a_model(cli: Cli) -> None:
    assert "the following arguments are required: MODEL" in cli("plan", "--seq", "1k", status=2, exits=True).err


def test_batch_and_device_may_be_given(directory: Path) -> None:
    given = (*GIVEN, "--memory-gbps", "100")
    half = estimate(directory, *given)
    write_config(directory, bf16={"enabled": False})
    full = estimate(directory, *given, "--batch", "4", "--device", "cpu")
    assert full["batch"] == 4 and full["attention"] == ["flash"]
    assert full["parameter_bytes"] == 2 * half["parameter_bytes"]
    assert full["saved_bytes"] == pytest.approx(4 * half["saved_bytes"], rel=0.03)


def test_without_rates_the_drive_of_the_config_is_measured(directory: Path) -> None:
    write_config(directory, activation_nvme_offload={**BLOCK, "nvme_path": str(directory), "io": {"backend": "posix"}})
    found = estimate(directory, "--tflops", "1")
    notes = " ".join(found["notes"])
    assert f"measured here at {directory}" in notes and "which wrote" in notes and found["write_bytes_per_s"] > 0
    left = {path.name for path in directory.iterdir()} - {"__pycache__"}  # Python's own, of models.py
    assert left == {"ds_config.json", "models.py"}


def test_a_drive_that_is_not_here_has_the_data_sheet_s_rates(directory: Path) -> None:
    found = estimate(directory, "--tflops", "1")
    assert "data sheet" in " ".join(found["notes"]) and "/nowhere does not exist" in " ".join(found["notes"])
    one = estimate(directory, "--tflops", "1", "--write-gbps", "3")
    assert one["write_bytes_per_s"] == 3e9 and "write as given" in " ".join(one["notes"])


def test_without_the_block_the_defaults_are_taken(directory: Path) -> None:
    (directory / "ds_config.json").write_text("{}")
    found = estimate(directory, *GIVEN, "--batch", "2")
    assert found["parameter_bytes"] == 4 * found["parameters"]
    assert "its defaults are used" in " ".join(found["notes"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("", "{0}/models.py:absent"), "has no function 'absent'; it has stack, gated, leaving, failing"),
        (("", "{0}/models.py:failing"), "forward and backward failed in aten."),
        (("", "{0}/models.py:leaving"), "making the model failed: SystemExit: no GPU"),
        (("--config", "{0}/absent.json"), "cannot be read as ds_config.json: No such file"),
        (("--gpu", "nonsense"), "must be a size such as 24GB, or one of H100"),
    ],
)
def test_what_is_wrong_is_named(directory: Path, cli: Cli, arguments: tuple[str, str], says: str) -> None:
    given = {"": "{0}/models.py:stack", "--config": "{0}/ds_config.json", "--seq": "128"}
    given |= dict([arguments])
    text = [part.format(directory) for pair in given.items() for part in pair if part]
    assert says in cli("estimate", *text, *GIVEN, status=2).err


def test_a_config_with_a_wrong_key_is_refused(directory: Path, cli: Cli) -> None:
    write_config(directory, activation_nvme_offload={**BLOCK, "nvme_paht": "/x"})
    given = arguments_of(directory, "stack", 64)
    assert "did you mean `nvme_path`" in cli("estimate", *given, *GIVEN, status=2).err


def test_auto_is_taken_as_1_and_that_is_said(directory: Path) -> None:
    """Issue: "auto" of the Trainer's config ended the command after 20 s."""
    write_config(directory, train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto")
    found = estimate(directory, *GIVEN, sequence=64)
    assert found["batch"] == 1
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        assert f'"{key}" is "auto", which the trainer decides: 1 is assumed' in found["notes"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--seq", "1k", "--gpu", "riva"), "--gpu 'riva'"),
        (("--seq", "1k", "--config", "absent.json"), "absent.json cannot be read"),
        ((), "--seq is missing"),
        (("--longest",), "--longest needs --gpu"),
        (("--longest", "--gpu", "24GB", "--write", "x.json"), "--longest writes no config"),
    ],
)
def test_a_wrong_option_is_told_before_the_model_is_read(cli: Cli, given: tuple[str, ...], says: str) -> None:
    assert says in cli("plan", "absent.py:make", *given, status=2).err


@pytest.mark.parametrize(("option", "value"), [("--batch", "0"), ("--seq", "-1"), ("--seq", "x"), ("--tflops", "0")])
def test_numbers_must_be_above_0(cli: Cli, option: str, value: str) -> None:
    given = ["--config", "c.json", "m.py:f", "--seq", "64", f"{option}={value}"]
    error = cli("estimate", *given, status=2, exits=True).err
    assert option in error and repr(value) in error and "must be" in error


def test_an_hf_config_is_estimated(directory: Path, cli: Cli) -> None:
    pytest.importorskip("transformers")
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "use_cache": False}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **heads}
    (directory / "config.json").write_text(json.dumps(config))
    given = ["--config", f"{directory}/ds_config.json", f"{directory}/config.json", "--seq", "128"]
    found = json.loads(cli("estimate", *given, *GIVEN, "--json").out)
    assert found["ran_on"] == "meta" and [one["count"] for one in found["groups"]][:1] == [2]
    assert torch.bfloat16.itemsize * found["parameters"] == found["parameter_bytes"]


SMALL = {"vocab_size": 128, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}  # fmt: skip
VISION = {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8, "hidden_size": 32,
          "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}  # fmt: skip
TEXT = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "note"),
    [
        ({"model_type": "bart", "architectures": ["BartForConditionalGeneration"], **SMALL}, "where the model asks"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 128, "d_model": 32,
          "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}, ""),
        ({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **TEXT, "num_local_experts": 4},
         "ends at max_position_embeddings 64"),
        ({"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "image_token_index": 127,
          "text_config": {"model_type": "llama", **TEXT}, "vision_config": VISION}, "images and sound are left out"),
    ],
    ids=["encoder-decoder with a mask", "encoder-decoder", "mixture", "vision"],
)  # fmt: skip
def test_models_of_other_kinds_are_planned(tmp_path: Path, cli: Cli, config: dict[str, Any], note: str) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = cli("plan", str(tmp_path), "--seq", "128", "--gpu", "24 GB").out
    assert "recommended 'as it is'" in out and note in out


def test_the_example_of_the_readme_is_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[2]
    model = f"{root / 'examples/train_gpt.py'}:make_model"
    given = ["--batch", "8", "--seq", "512", "--tflops", "0.2", "--write-gbps", "2", "--read-gbps", "2"]
    main(["estimate", model, "--config", str(root / "ds_configs/minimal.json"), *given])
    told = capsys.readouterr().out
    assert "blocks.*" in told and "+ adaptive in a budget" in told


# ---- the block of the optimizer update ------------------------------------------------------------------------------

OFFLOADED = {"stage": 3, "offload_optimizer": {"device": "cpu"}}


def test_the_block_without_what_it_needs_is_told(directory: Path, cli: Cli) -> None:
    write_config(directory, zero_optimization={"stage": 2}, interleaved_optimizer_update={})
    given = arguments_of(directory, "stack", 64)
    assert '"zero_optimization.stage" is 2' in cli("estimate", *given, *GIVEN, status=2).err


def test_a_wrong_block_of_the_update_is_refused(directory: Path, cli: Cli) -> None:
    write_config(directory, zero_optimization=OFFLOADED, interleaved_optimizer_update={"device_shar": 0.5})
    given = arguments_of(directory, "stack", 64)
    assert "device_share" in cli("estimate", *given, *GIVEN, status=2).err
