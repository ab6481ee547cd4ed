"""What strangers get: a README whose links lead somewhere, a whole sdist, and a wheel unknown to a script."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest
from conftest import ALONE
from support import runs
from support.ranks import environment, free_port

README = (runs.ROOT / "README.md").read_text()
LONGEST_README = 90


def repository() -> str:
    (found,) = re.findall(r'^Repository = "(.*)"$', (runs.ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return str(found)


# ---- the README -----------------------------------------------------------------------------------------------------


def test_the_readme_is_short_and_names_the_command_of_the_tests() -> None:
    assert len(README.splitlines()) <= LONGEST_README
    assert "`make test`" in README


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)]+)\)", text)


def test_links_of_the_readme_lead_to_files_and_headings() -> None:
    found = [link for link in links(README) if not link.startswith("https://")]
    assert found
    for link in found:
        path, _, heading = link.partition("#")
        text = (runs.ROOT / path).read_text()
        slugs = [re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in text.splitlines()]
        assert not heading or heading in slugs, link


def test_the_project_has_one_address() -> None:
    project, site = ((runs.ROOT / name).read_text() for name in ("pyproject.toml", "mkdocs.yml"))
    assert f"repo_url: {repository()}\n" in site
    assert set(re.findall(r"https://github\.com/[\w-]+/ds_tba", project + site)) == {repository()}


# ---- what is published ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's files alone, to build from; of an unpacked sdist those that it lists."""
    path = tmp_path_factory.mktemp("release") / "source"
    if (runs.ROOT / ".git").exists():
        told = subprocess.run(["git", "ls-files", "-z"], cwd=runs.ROOT, capture_output=True, text=True)
        if told.returncode != 0:
            pytest.skip(f"git does not tell the repository's files: {told.stderr.strip()}")
        names = told.stdout.split("\0")
    else:
        names = (runs.ROOT / "ds_tba.egg-info" / "SOURCES.txt").read_text().splitlines()
    for name in names:
        if name and (runs.ROOT / name).exists():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(runs.ROOT / name, path / name)
    return path


def built(source: Path, kind: str, into: Path) -> Path:
    program = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(into)], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return into / done.stdout.splitlines()[-1]


def test_the_sdist_is_the_whole_repository(source: Path, tmp_path: Path) -> None:
    with tarfile.open(built(source, "sdist", tmp_path)) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert sorted(name for name in wanted - packed if ".egg-info" not in name) == []


# Nothing in it knows of ds_tba, and it is started by plain Python.
TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
    vocab_size=64, pad_token_id=0,
))
rows = [dict.fromkeys(("input_ids", "labels"), torch.randint(1, 64, (128,))) for _ in range(8)]
arguments = TrainingArguments(
    "out", deepspeed="ds_config.json", max_steps=2, per_device_train_batch_size=2, report_to=[], save_strategy="no",
    use_cpu=True, disable_tqdm=True, learning_rate=1e-3,
)
Trainer(model, arguments, train_dataset=rows).train()
"""


@pytest.mark.engine
def test_a_wheel_in_an_environment_of_its_own_serves_an_unmodified_trainer_script(source: Path, tmp_path: Path) -> None:
    """The environment is empty but for the wheel; the packages that it needs lie in another, as on a cluster."""
    pytest.importorskip("transformers")
    wheel = built(source, "wheel", tmp_path)
    venv.create(tmp_path / "venv", symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    shutil.unpack_archive(wheel, site, "zip")
    assert (site / "ds_tba" / "py.typed").exists() and not (site / "tests").exists()
    (description,) = (one.read_text() for one in site.glob("ds_tba-*.dist-info/METADATA"))
    assert [link for link in links(description) if link.startswith(f"{repository()}/blob/main/docs/")]
    assert [link for link in links(description) if not link.startswith("https://")] == []  # PyPI shows no others
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    config = runs.with_block(
        runs.plain_config(2, train_micro_batch_size_per_gpu="auto"), tmp_path, placement="nvme", min_tensor_bytes=4096
    )
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    (tmp_path / "train.py").write_text(TRAINER)
    rank = {**ALONE, "MASTER_PORT": str(free_port())}
    variables = environment(**rank, PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    variables.pop("PYTHONPATH", None)

    def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
        command, how = [tmp_path / "venv" / "bin" / "python", *arguments], {"capture_output": True, "text": True}
        return subprocess.run(command, env=variables, cwd=tmp_path, timeout=240, **how)

    assert ran("-c", "import ds_tba; print(ds_tba.__file__)").stdout.startswith(str(site))
    done = ran("train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[ds_tba] activations go to" in done.stdout + done.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["steps"] == 2 and found["offloaded_bytes"] > 0
