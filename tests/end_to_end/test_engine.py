"""The hook on the engine class, without launching anything: agreement of ranks, attach, refusals, finalizers."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ALONE
from support import runs
from support.doubles import raising
from torch import distributed

from ds_tba import engine, ranks
from ds_tba.config import OffloadConfig
from ds_tba.core.cache import TensorCache
from ds_tba.errors import ConfigError, IncompatibleError, PathError, StateError


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> distributed.Store:
    """This process as rank 0 of 2, with a key-value store to answer for rank 1."""
    store = distributed.HashStore()
    fake = SimpleNamespace(
        is_initialized=lambda: True,
        get_world_size=lambda: 2,
        get_rank=lambda: 0,
        distributed_c10d=SimpleNamespace(_get_default_store=lambda: store),
        DistError=distributed.DistError,
    )
    monkeypatch.setattr(ranks, "distributed", fake)
    monkeypatch.setattr(ranks, "AGREEMENT_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr(ranks, "GOODBYE_TIMEOUT", timedelta(seconds=1))
    return store


NONE = "none of them"


@pytest.mark.parametrize(
    ("keys", "other", "told"),
    [
        ({}, 'placement "adaptive"', ""),
        ({}, NONE, r'^rank 0 has placement "adaptive", and rank 1 has none of them.*the same "placement"'),
        ({"placement": "nvme"}, NONE, ""),
        ({"placement": "nvme", "only": ["*"]}, NONE, "^rank 0 has only or except, and rank 1 has none of them"),
        ({"placement": "keep", "report": {"trace_path": "x"}}, 'placement "adaptive"', "^rank 0 has report.trace_path"),
    ],
    ids=["equal", "a plan and none", "no plan", "names of modules and none", "a trace and none"],
)
def test_ranks_that_would_wait_for_each_other_are_refused(
    two_ranks: distributed.Store, keys: dict[str, Any], other: str, told: str
) -> None:
    """One plans and the other does not: it would wait in a collective until that times out."""
    config = OffloadConfig.model_validate({"nvme_path": "/local_nvme", **keys})
    closed: list[int] = []
    made = SimpleNamespace(shared_keys=config.shared_keys, close=lambda: closed.append(1))
    two_ranks.set("ds_tba/1/1", json.dumps({"problem": None, "keys": other}))
    with pytest.raises(ConfigError, match=told) if told else nullcontext():
        assert ranks.on_all_ranks(lambda: made) is made
    assert closed == [1] * bool(told)


def test_other_ranks_ask_rank_0_alone(two_ranks: distributed.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.distributed, "get_rank", lambda: 7)
    monkeypatch.setattr(ranks.distributed, "get_world_size", lambda: 8000)
    with pytest.raises(ConfigError, match="rank 0 did not take part"):
        ranks.agree(None)
    for number, verdict in ((2, "null"), (3, '"rank 5 cannot do it"')):
        two_ranks.set(f"ds_tba/0/{number}", '{"problem": null}')
        two_ranks.set(f"ds_tba/verdict/{number}", f'{{"problem": {verdict}}}')
    ranks.agree(None)
    with pytest.raises(ConfigError, match="rank 5 cannot do it"):
        ranks.agree(None)
    assert two_ranks.get("ds_tba/7/3/read") == b""
    with pytest.raises(PathError, match="mine"):
        ranks.agree(PathError("mine"))
    assert two_ranks.get("ds_tba/7/4/read") == b""


def test_a_disabled_block_asks_no_other_rank(two_ranks: distributed.Store) -> None:
    assert engine._build({"activation_nvme_offload": {"enabled": False}}, SimpleNamespace()) is None


def test_an_error_that_is_not_ours_reaches_the_others_too(
    two_ranks: distributed.Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine, "ActivationOffloader", raising(MemoryError("no memory for staging")))
    two_ranks.set("ds_tba/1/1", '{"problem": null}')  # ranks are counted first
    with pytest.raises(MemoryError):
        engine._build(runs.with_block(runs.plain_config(), tmp_path), SimpleNamespace())
    assert b"MemoryError: no memory for staging" in two_ranks.get("ds_tba/0/2")


def test_a_rank_without_the_block_is_named_instead_of_waited_for(two_ranks: distributed.Store) -> None:
    with pytest.raises(ConfigError, match=r"rank 1 did not take part.*the same ds_config.json"):
        ranks.agree(None)


OTHER_VERSION = r'DeepSpeed 0\.\d+\.\d is not supported.*pip install "deepspeed'


@pytest.mark.parametrize(
    ("version", "device", "told"),
    [
        ("0.19.4", "cpu", OTHER_VERSION),
        ("0.19.5", "cpu", ""),
        ("0.19.8+abc", "cuda", ""),
        ("0.20.0", "cuda", OTHER_VERSION),
        ("0.19.5", "xpu", "the device is xpu, and ds_tba serves the CPU and CUDA: remove"),
    ],
    ids=["too old", "the oldest", "with a suffix", "too new", "another device"],
)
def test_deepspeed_outside_the_supported_range_and_other_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, device: str, told: str
) -> None:
    accelerator = SimpleNamespace(get_accelerator=lambda: SimpleNamespace(device_name=lambda: device))
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(__version__=version, accelerator=accelerator))
    with pytest.raises(IncompatibleError, match=told) if told else nullcontext():
        engine._refuse_incompatible(SimpleNamespace())


PROGRAM = """
import gc, json, os
import deepspeed, torch
from pytest import raises
from support.disks import until
config = {config}
plain = {{key: value for key, value in config.items() if key != "activation_nvme_offload"}}
def build(config):
    torch.manual_seed(0)
    net = torch.nn.Sequential()
    net.up, net.act, net.down = torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 64)
    return deepspeed.initialize(model=net, model_parameters=net.parameters(), config=dict(config))[0]
def step(engine):
    loss = engine(torch.ones(2048, 64)).float().pow(2).mean()
    engine.backward(loss)
    engine.step()
    return loss.item()
{body}
print("good")
"""


def code_of(body: str, directory: Path) -> str:
    return PROGRAM.format(config=runs.with_block(runs.plain_config(), directory), body=textwrap.dedent(body))


def program(body: str, directory: Path, *, fails: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
    variables |= {**ALONE, "MASTER_PORT": str(runs.free_port())}
    done = runs.python("-c", code_of(body, directory), timeout_s=120, **variables)
    assert done.returncode == fails and done.stdout.endswith("good\n") != fails, done.stdout + done.stderr
    return done


def forked(body: str, directory: Path) -> runs.Result:
    """As :func:`program`, in a process that does not end as an interpreter does."""
    script = directory / "program.py"
    script.write_text(code_of(body, directory))
    done = runs.run(None, directory, script=script, start=runs.of_ranks.script)
    assert done.returncode == 0 and "good" in done.output.splitlines(), done.output
    return done


@pytest.mark.engine
def test_attach_does_explicitly_what_the_entry_point_does(tmp_path: Path) -> None:
    body = """
    engine = build(config)
    assert not hasattr(engine, "activation_offloader")
    import ds_tba
    offloader = ds_tba.attach(engine)
    assert ds_tba.attach(engine) is offloader is engine.activation_offloader
    step(engine)
    assert offloader.report().written_bytes > 0 and offloader.report().steps == 1
    assert "ds_tba" in repr(type(build(config).activation_offloader)), "the next engine attaches by itself"
    other = build(plain)
    assert not hasattr(other, "activation_offloader")
    step(other)
    with raises(ds_tba.ConfigError, match='no "activation_nvme_offload" block'):
        ds_tba.attach(other)
    """
    program(body, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


@pytest.mark.engine
def test_a_block_in_the_environment_serves_configs_without_one(tmp_path: Path) -> None:
    body = """
    import ds_tba
    block = config["activation_nvme_offload"]
    for held in ("  ", json.dumps(block), json.dumps({"activation_nvme_offload": block})):
        os.environ["DS_TBA_BLOCK"] = held
        assert hasattr(build(plain), "activation_offloader") == bool(held.strip())
    os.environ["HERE"] = os.getcwd()
    open("block.json", "w").write(json.dumps({"enabled": True, **block, "min_tensor_bytes": 8192}))
    os.environ["DS_TBA_BLOCK"] = "$HERE/block.json"
    engine = build(plain)
    step(engine)
    assert engine.activation_offloader.config.min_tensor_bytes == 8192
    assert build(config).activation_offloader.config.min_tensor_bytes == 1 << 20, "the config's own is used"
    off = {**config, "activation_nvme_offload": {"enabled": False}}
    assert not hasattr(build(off), "activation_offloader")
    reference = deepspeed.initialize(model=torch.nn.Linear(8, 8), config={"train_micro_batch_size_per_gpu": 1})[0]
    assert not hasattr(reference, "activation_offloader")
    assert ds_tba.attach(reference).config.min_tensor_bytes == 8192
    for held, *parts in (
        ("absent.json", "'absent.json' is neither", "No such file"),
        ("{not JSON", "neither the block as JSON"),
        ('{"nvme_pth": "/"}', "activation_nvme_offload.nvme_pth", "did you mean `nvme_path`?"),
        ('{"activation_nvme_offload": 1}', "it must be an object"),
        (json.dumps({"activation_nvme_offload": block, "aio": 1}), '"aio" is 1'),
    ):
        os.environ["DS_TBA_BLOCK"] = held
        with raises(ds_tba.ConfigError, match="^DS_TBA_BLOCK of the environment: ") as refused:
            build(plain)
        assert all(part in str(refused.value) for part in parts), refused.value
    assert hasattr(build({**plain, "aio": {}}), "activation_offloader"), "the config's own is used"
    """
    done = forked(body, tmp_path)
    assert "DS_TBA_BLOCK of the environment is used" in done.output
    assert done.output.count("DS_TBA_BLOCK of the environment is not used: the DeepSpeed config has the block") == 1


@pytest.mark.engine
def test_an_engine_without_an_optimizer_is_left_alone(tmp_path: Path) -> None:
    """TRL makes one for a reference model, from the config of the model that trains."""
    body = """
    engine = build(config)
    of_reference = {key: value for key, value in config.items() if key != "optimizer"}
    reference = deepspeed.initialize(model=torch.nn.Linear(64, 64), config=of_reference)[0]
    assert not hasattr(reference, "activation_offloader")
    with torch.no_grad():
        reference(torch.ones(2048, 64))
    step(engine)
    import ds_tba
    engine.destroy()
    assert json.load(open(config["activation_nvme_offload"]["report"]["path"]))["steps"] == 1
    net = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert hasattr(deepspeed.initialize(model=net, optimizer=optimizer, config=of_reference)[0], "activation_offloader")
    assert ds_tba.attach(reference) is reference.activation_offloader
    """
    done = forked(body, tmp_path)
    assert done.output.count("without an optimizer") == 1 and "ds_tba.attach(engine)" in done.output


@pytest.mark.engine
def test_engines_that_go_in_every_way_leave_nothing(tmp_path: Path) -> None:
    body = """
    import threading
    def lanes():
        return [thread for thread in threading.enumerate() if thread.name.startswith("ds_tba")]
    with raises(Exception, match="(?i)nosuchoptimizer"):
        build({**config, "optimizer": {"type": "NoSuchOptimizer"}})
    until(lambda: not lanes(), "the end of the lanes of an engine that was never built")
    engine = build({**config, "zero_optimization": {"stage": 3}})  # whose modules have hooks of ours
    step(engine)
    def ours(module):
        hooks = [*module._forward_pre_hooks.values(), module.__dict__.get("forward")]
        return [hook for hook in hooks if "ds_tba" in str(getattr(hook, "__module__", "")) + str(type(hook))]
    assert any(ours(module) for module in engine.module.modules())
    engine.destroy()
    assert not lanes()
    assert not any(ours(module) for module in engine.module.modules())
    engine.destroy()
    # An engine in a cycle, with a graph that is dropped after it, under a collector that runs all the time.
    gc.set_threshold(1)
    def scope():
        engine = build(config)
        engine.itself = engine
        loss = engine(torch.ones(2048, 64)).pow(2).mean()
        step(engine)
        return loss
    loss = scope()
    del loss
    gc.set_threshold(700)
    gc.collect()
    until(lambda: not lanes(), "the end of the lanes of an engine that was collected")
    # Two at once, left to interpreter exit.
    engines = [build(config), build(config)]
    a, b = step(engines[0]), step(engines[1])
    assert a == b
    """
    done = program(body, tmp_path)
    assert "Exception" not in done.stderr and "Error" not in done.stderr, done.stderr
    assert done.stderr.count("steps: activations take") >= 3


@pytest.mark.engine
def test_the_offloader_is_built_for_the_device_that_deepspeed_is_about_to_set(tmp_path: Path) -> None:
    """Last in ``current`` is what DeepSpeed has set itself, where it sets one."""
    body = """
    from types import SimpleNamespace
    from ds_tba import engine as ours
    api, accelerator_of = deepspeed.accelerator.get_accelerator(), ours.accelerator_of
    current, built_on = [], []
    api.set_device = current.append
    def accelerator_now(kind):
        built_on.append(current[-1])
        return accelerator_of(kind)
    ours.accelerator_of = accelerator_now
    os.environ["LOCAL_RANK"] = "1"
    def devices(args, *before, enabled=True):
        current[:], built_on[:] = [0, *before], []
        block, net = {**config["activation_nvme_offload"], "enabled": enabled}, torch.nn.Linear(64, 64)
        own = {**config, "activation_nvme_offload": block}
        engine = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters(), config=own)[0]
        engine.destroy()
        return built_on, current
    assert devices(None) == ([1], [0, 1, 1])
    assert devices(SimpleNamespace(local_rank=1)) == ([1], [0, 1, 1])
    assert devices(SimpleNamespace(device_rank=3)) == ([3], [0, 3, 3])
    assert devices(SimpleNamespace(device_rank=-1), 5) == ([5], [0, 5]), "the script's own"
    assert devices(None, enabled=False) == ([], [0, 1])
    """
    forked(body, tmp_path)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("phase", "hook"), [("forward", "forward_pre_hook"), ("backward", "full_backward_pre_hook")], ids=str
)
def test_what_filled_the_memory_is_told_and_the_error_stays(tmp_path: Path, phase: str, hook: str) -> None:
    """Once, although the interpreter ends of the error."""
    body = f"""
    engine = build(config)
    for _ in range(3):
        step(engine)
    engine.module.down.register_{hook}(lambda *_: torch.empty(1 << 46))
    step(engine)
    """
    said = program(body, tmp_path, fails=True).stderr
    told = said[said.index("memory ran out") :]
    assert said.count("memory ran out") == 1 and "can't allocate memory" in told
    assert f"rank 0, step 4, in the {phase}, 262144.00 GiB more did not fit" in told and "saved tensors hold" in told
    report = json.loads((tmp_path / "report.json").read_text())
    assert "act" in [one["module"] for one in report["holders"]] and "\nact " in told


def test_a_torch_func_transform_in_forward_names_the_way_out() -> None:
    forward = partial(torch.func.grad(lambda a: a.sin().sum()), torch.ones(3))
    offloader = SimpleNamespace(saving=lambda inputs: TensorCache([], "cpu", 0).saving(), stop_saving=lambda: None)
    with pytest.raises(IncompatibleError, match=r"torch\.func"):
        engine._forward(offloader, forward, SimpleNamespace(module=torch.nn.Identity()))  # type: ignore[arg-type]


def test_a_refusal_after_an_interrupt_names_the_last_checkpoint(tmp_path: Path) -> None:
    def refuse() -> None:
        raise StateError("load the last checkpoint.")

    class DeepSpeedEngine:
        global_steps = 7

        def save_checkpoint(self, save_dir: Path, tag: str | None = None) -> bool:
            if save_dir == tmp_path / "full":
                raise OSError("no space")
            return True

        def step(self) -> None:
            pass

        forward = backward = destroy = save_16bit_model = _zero3_consolidated_16bit_state_dict = __del__ = step

    engine._hook_methods(DeepSpeedEngine)
    made = DeepSpeedEngine()
    made.activation_offloader = SimpleNamespace(
        note_micro_step=refuse, stop_saving=lambda: None, note_failure=lambda _: None, close_soon=lambda: None
    )
    with pytest.raises(StateError, match=r"checkpoint\.$"):
        made.step()
    assert made.save_checkpoint(tmp_path)
    with pytest.raises(OSError, match="no space"):
        made.save_checkpoint(tmp_path / "full")
    with pytest.raises(StateError, match=f"load the last checkpoint. The last checkpoint is {tmp_path}/global_step7.$"):
        made.step()
    made.save_checkpoint(save_dir=tmp_path, tag="best")
    with pytest.raises(StateError, match=f"{tmp_path}/best.$"):
        made.step()
