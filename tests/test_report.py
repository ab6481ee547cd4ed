from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import get_args
from unittest.mock import Mock

import pytest
import torch
from conftest import Cli, Closing
from support import runs
from support.modelled_drive import ModelledDrive
from support.offloaders import finished, make, step

from ds_tba import report as report_module
from ds_tba.config import Compression
from ds_tba.errors import BackendUnavailableError, ConfigError, PathError
from ds_tba.offloader import ActivationOffloader
from ds_tba.plan.agreement import Alone
from ds_tba.report import OffloadReport, write_file
from ds_tba.storage.base import Refusal
from ds_tba.storage.tiers import Selection

COMPRESSED = {"compression", "  before compression", "  ratio"}  # names of rows


def two_directories(directory: Path) -> list[str]:
    paths = [directory / "a", directory / "b"]
    for path in paths:
        path.mkdir()
    return [str(path) for path in paths]


def test_the_sums(tmp_path: Path) -> None:
    # Else what is compared in forward is read once more.
    report = finished(tmp_path, 3, rematerialize=False).report()
    assert report.steps == report.micro_steps == 3 and report.state == "finished"
    assert report.offloaded_bytes == 3 * 2 * 512 * 512 * 4
    assert report.written_bytes + report.cancelled_bytes == report.offloaded_bytes
    assert report.read_bytes + report.forwarded_bytes == report.offloaded_bytes
    assert report.deduplicated_bytes == 3 * 512 * 512 * 4
    assert 0 < report.peak_staging_bytes <= 8 << 20
    assert (report.compression, report.uncompressed_bytes, report.compression_ratio) == (None, 0, 0.0)
    assert not COMPRESSED & {name for name, _ in report.rows()}
    (path,) = report.bandwidth
    assert path["tensor_bytes"] == path["stored_bytes"] == report.written_bytes


@pytest.mark.parametrize("codec", get_args(Compression))
def test_what_compression_leaves_is_told_and_is_the_wear(tmp_path: Path, codec: str) -> None:
    """In fields that a report without compression leaves at zero."""
    paths = two_directories(tmp_path)
    io = {"backend": "posix", "staging_bytes": 8 << 20, "compression": codec}
    offloader = finished(tmp_path, written_first=True, nvme_path=paths, rematerialize=False, io=io)
    report = offloader.report()
    assert (report.compression, report.integrity) == (codec, "sampled")
    assert 0 < report.written_bytes < report.uncompressed_bytes == report.offloaded_bytes
    assert report.compression_ratio == pytest.approx(report.written_bytes / report.uncompressed_bytes, abs=1e-4)
    assert sum(one["stored_bytes"] for one in report.bandwidth) == report.written_bytes
    assert sum(one["tensor_bytes"] for one in report.bandwidth) == report.uncompressed_bytes
    assert sum(one["written_bytes"] for one in report.wear) == report.written_bytes
    assert {name for name, _ in report.rows()} >= COMPRESSED


@pytest.mark.parametrize(
    ("block", "told"),
    [({}, "600 TBW assumed"), ({"ssd": {"rated_endurance_tbw": 1.0}, "ranks_on_node": 2}, "1 TBW")],
    ids=["assumed, one rank", "rated, two ranks"],
)
def test_wear_is_told_for_each_path_with_its_rating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: dict[str, object], told: str
) -> None:
    drive = ModelledDrive(1e9)
    monkeypatch.setattr("ds_tba.storage.tiers.select_backend", lambda *_, **__: Selection(drive, "the test's"))
    paths = two_directories(tmp_path)
    offloader = finished(tmp_path, written_first=True, nvme_path=paths, **block)
    report = offloader.report()
    assert f", {told})" in offloader.start_line()
    assert [one["path"] for one in report.wear] == paths
    assert sum(one["written_bytes"] for one in report.wear) == report.written_bytes > 0
    assert dict(report.rows())[f"wear of {paths[0]}"].endswith(f" days to {told})")
    assert report.summary().endswith(f" days to {told})")
    assert (" TB a day of 2 ranks (" in report.summary()) == ("ranks_on_node" in block)
    assert "TB a day" not in replace(report, steps=0).summary()


FULL = {"backend": "posix", "staging_bytes": 1 << 20, "swap_file_bytes": 1 << 20}


def saves(offloader: ActivationOffloader, ops: str) -> OffloadReport:
    """The report at the end of a forward that saves 1 MiB for each op, and whose backward has run."""
    made = torch.randn(1024, 256, requires_grad=True)
    with offloader.saving():
        for op in ops.split():
            made = getattr(made, op)()
        loss = made.sum()
    report = offloader.report()
    loss.backward()
    offloader.close()
    return report


def test_host_memory_behind_a_full_drive(tmp_path: Path) -> None:
    report = saves(make(tmp_path, io=FULL, placement="nvme", host_budget_bytes=1 << 20), "exp sin tanh")
    assert report.host_bytes == 1 << 20
    assert report.fallbacks == report.kept_bytes == 0  # one store refused it, and another took it


def test_a_storage_that_no_store_takes_is_one_fallback_however_often_it_is_tried(tmp_path: Path) -> None:
    """A budget tries again at each save."""
    offloader = make(tmp_path, io=FULL, placement="nvme", rematerialize=False)
    offloader.cache.limit(1 << 20)
    report = saves(offloader, "exp sigmoid tanh exp sigmoid")
    assert (report.offloaded_bytes, report.kept_bytes) == (1 << 20, 4 << 20)
    assert report.fallbacks_by_reason == {"no space in the swap file": 4} and report.fallbacks == 4


def test_the_json_is_there_while_training_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "REPORT_AGE_S", 0.0)
    path = tmp_path / "report.json"
    offloader = make(tmp_path, report={"path": str(path)})
    for steps in (1, 2):
        step(offloader)
        written = json.loads(path.read_text())
        assert written["steps"] == steps and written["state"] == "running"
    offloader.close()
    assert json.loads(path.read_text()) == json.loads(json.dumps(offloader.report().to_dict()))
    assert [one.name for one in tmp_path.iterdir()] == ["report.json"]


def test_a_run_that_is_steady_writes_the_json_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, written_s = [100.0], []
    monkeypatch.setattr(report_module.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(report_module, "write_file", lambda *_: written_s.append(now_s[0]))
    offloader = make(tmp_path, report={"path": str(tmp_path / "report.json")})
    for _ in range(400):  # of a tenth of a second
        step(offloader)
        now_s[0] += 0.1
    assert written_s[0] == 100.0 and 15 <= len(written_s) <= 21  # also a run that is killed early has one
    monkeypatch.undo()
    offloader.close()


def test_a_run_that_is_interrupted_as_it_writes_its_first_report_leaves_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler raises in the first forward, before anything is counted."""
    path = tmp_path / "report.json"
    offloader = make(tmp_path, report={"path": str(path)})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(report_module, "write_file", Mock(side_effect=KeyboardInterrupt))
        step(offloader)
    offloader.close()
    assert json.loads(path.read_text())["state"] == "finished"


def test_every_steps_logs_and_writes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ds_tba")
    offloader = make(tmp_path, report={"every_steps": 2})
    for _ in range(4):
        step(offloader)
    assert [record.getMessage().split(":")[1].strip() for record in caplog.records] == ["2 steps", "4 steps"]
    assert "kept" not in caplog.text  # a sum over steps
    offloader.close()


def test_a_file_is_written_at_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "report.json", []
    replace = os.replace

    def look(source: Path, target: Path) -> None:
        seen.append(source.name)
        if len(seen) == 3:
            raise OSError("full")
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    before = os.umask(0o027)
    try:
        write_file(path, "one")
        write_file(path, "two")
        with pytest.raises(OSError, match="full"):
            write_file(path, "three")
    finally:
        os.umask(before)
    assert path.read_text() == "two" and path.stat().st_mode & 0o777 == 0o640
    assert len(set(seen)) == 3 and [one.name for one in tmp_path.iterdir()] == ["report.json"]


def test_devices_and_pipes_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", "/dev/stdout", "/dev/report.json", "/proc/self/fd/1", "/dev/fd/1", tmp_path / "pipe"):
        said = rf"report\.path {path} is a directory, a device, .*: name a regular file"
        with pytest.raises(ConfigError, match=said):
            make(tmp_path, report={"path": str(path)})
    assert Path("/dev/null").is_char_device() and (tmp_path / "pipe").is_fifo()


def test_what_is_in_no_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.chdir(tmp_path)
    for name in ("file/x", "loop/x", "~nobody_at_all/x"):
        with pytest.raises(ConfigError, match=rf"report\.path {tmp_path / name}: its directory is missing"):
            make(tmp_path, report={"path": name})
    with pytest.raises(PathError, match=r"nvme_path .*/~nobody_at_all/x does not exist"):
        make(tmp_path, nvme_path="~nobody_at_all/x")


def test_the_start_line_says_by_which_rule_activations_go(tmp_path: Path, closing: Closing) -> None:
    def said(**block: object) -> str:
        return closing(make)(tmp_path, **block).start_line()

    assert 'placement "nvme" is a rule, not a plan' in said(placement="nvme", max_step_overhead=0.1)
    assert "steps +10.0% at most" in said(placement="adaptive", max_step_overhead=0.1)
    assert "least time within 4.88 KiB" in said(placement="adaptive", activation_budget_bytes=5000)
    assert "host memory, up to 3145728 bytes" in said(placement="host", host_budget_bytes=3 << 20, nvme_path=None)
    assert "measured, not moved" in said(placement="keep", nvme_path=None)


@pytest.mark.parametrize(
    ("block", "error", "told"),
    [
        ({"nvme_path": "/nowhere"}, PathError, "/nowhere"),
        ({"report": {"path": "/nowhere/report.json"}}, ConfigError, "/nowhere/report.json"),
        ({"report": {"path": "/tmp"}}, ConfigError, "/tmp"),
        ({"host_budget_bytes": 1 << 50}, ConfigError, "host_budget_bytes"),
        ({"io": {"backend": "gds"}}, BackendUnavailableError, "gds"),
        ({"rematerialize": {"exclude": ["no_op"]}}, ConfigError, "exclude"),  # late
        # By the key that was set, and no other.
        ({"io": {"backend": "posix", "swap_file_bytes": 1 << 55}}, PathError, r"^(?!.*staging_bytes).*swap_file_bytes"),
        ({"io": {"backend": "posix", "staging_bytes": 1 << 55}}, PathError, r"^(?!.*swap_file_bytes).*staging_bytes"),
    ],
)
def test_what_stands_in_the_way_raises_and_leaves_nothing(
    tmp_path: Path, block: dict[str, object], error: type[Exception], told: str
) -> None:
    files, threads = os.listdir("/proc/self/fd"), threading.active_count()
    with pytest.raises(error, match=f"(?s){told}"):
        make(tmp_path, **block)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (len(files), threads)


def test_a_report_that_cannot_be_written_does_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reports").mkdir()
    offloader = make(tmp_path, report={"path": str(tmp_path / "reports" / "report.json")})
    (tmp_path / "reports").rmdir()
    monkeypatch.setattr("ds_tba.report.REPORT_AGE_S", 0.0)
    step(offloader)
    step(offloader)
    offloader.close()
    assert caplog.text.count("cannot be written") == 1, "a long run would say it without end"


def test_a_forked_child_touches_neither_the_report_nor_the_lanes(tmp_path: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
from support.offloaders import make, step
from torch import nn
offloader = make(Path({str(tmp_path)!r}), report={{"path": {str(tmp_path / "report.json")!r}}})
step(offloader)
if os.fork() == 0:
    sys.exit(0)
os.wait()
assert '"state": "running"' in Path(offloader.config.report.path).read_text()  # the child's end would be another
step(offloader)
offloader.close()
"""
    done = runs.python("-W", "ignore", "-c", code)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["steps"] == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "(No such file or directory)"), ("[" * 100_000, ""), ("\0", ""), ("{", ""), ("", ""), ("[]", ""),
        ('{"steps": 1}', " missing "),
    ],
)  # fmt: skip
def test_what_is_no_report_is_told_in_our_words(tmp_path: Path, cli: Cli, text: str | None, words: str) -> None:
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    said = cli("report", str(path), status=2).err
    assert "is no report of ds_tba (" in said and words in said and len(said) < len(str(path)) + 200


def test_a_report_with_values_of_other_kinds_is_none(tmp_path: Path, cli: Cli) -> None:
    found = finished(tmp_path).report().to_dict()
    for name, value in (("wear", None), ("wear", [{}]), ("holders", [{}]), ("written_bytes", "much"), ("plan", [1])):
        (tmp_path / "report.json").write_text(json.dumps({**found, name: value}))
        assert "is no report of ds_tba (" in cli("report", str(tmp_path / "report.json"), status=2).err


def test_a_bound_that_is_no_budget_of_the_user_is_not_told_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloader = make(tmp_path, placement="adaptive", rematerialize=False)
    limits: list[tuple[object, ...]] = []
    monkeypatch.setattr(offloader.cache, "limit", lambda *limit: limits.append(limit))
    # Less than any plan can reach.
    monkeypatch.setattr("ds_tba.device.accelerator.MemoryMeter.room_bytes", lambda _: 1 << 10)
    offloader.watch(torch.nn.Linear(1, 1), Alone())
    for _ in range(6):
        step(offloader)
    offloader.close()
    assert limits[0] == (None, "activation_budget_bytes") and limits[-1] == (1 << 10, "")


# ---- where nothing was offloaded ------------------------------------------------------------------------------------


def nothing(offloader: ActivationOffloader, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of that, in training and at the end."""
    caplog.set_level("INFO", "ds_tba")
    for _ in range(3):
        step(offloader)
    offloader.close()
    return [record.getMessage() for record in caplog.records if "nothing was offloaded" in record.getMessage()]


def test_where_a_store_refuses_all_its_reason_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloader = make(tmp_path, placement="nvme", rematerialize=False)
    monkeypatch.setattr(offloader.cache.stores[0], "put", lambda *_, **__: Refusal.NO_SPACE)
    assert "what forward saves is kept, because of: no space in the swap file" in nothing(offloader, caplog)[0]


def test_a_step_without_a_forward_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "report.json"
    offloader = make(tmp_path, placement="nvme", report={"path": str(path)})
    for _ in range(2):
        offloader.note_step()
    (only,) = nothing(offloader, caplog)
    assert only.startswith("nothing was offloaded in step 1: no forward that saves activations")
    # Other steps have moved something.
    assert next(iter(json.loads(path.read_text()).items())) == ("state", "finished")
