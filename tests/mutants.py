"""Every wait and hold that orders copies with kernels and I/O, taken out one at a time: a test must fail for each.

    PYTHONPATH=tests python tests/mutants.py [NAME ...]     (make mutants)

Works on a copy of the repository. ``test_mutants.py`` checks that each piece of code below is still there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_S = 600


@dataclass(frozen=True)
class Mutant:
    """``code`` of a file replaced; ``tests`` must notice."""

    name: str
    file: str
    code: str
    instead: str
    tests: str = "tests/storage/test_ordering.py"


STREAMS, SPACE, NVME = "ds_tba/device/copies.py", "ds_tba/storage/space.py", "ds_tba/storage/nvme.py"
STAGING, DEVICE = "ds_tba/storage/staging.py", "ds_tba/device/accelerator.py"
POOLS = "tests/device/test_copies.py"
REMAT = "ds_tba/remat/store.py"
HOST = "ds_tba/storage/host.py"
FORMULA, OF_FORMULA = "ds_tba/update/formula.py", "tests/update/test_formula.py"
UPDATE, OF_UPDATE = "ds_tba/update/device.py", "tests/update/test_device.py"
SLOTS_MADE = """\
        while len(self._free) < min(self._slots, most_jobs):
            try:
                arrays = [self._accelerator.allocate(self._array_bytes, self._device) for _ in range(ARRAYS_PER_CHUNK)]
                self._free.append([one.view(torch.float32) for one in arrays])
            except torch.OutOfMemoryError:
                # Not tried again in each step: the allocator gives its whole cache back before it refuses.
                self._slots = max(1, len(self._free))
                break
"""
SO_FAR = "        so_far = moment(self._accelerator)"
UPDATER, OF_UPDATER = "ds_tba/update/updater.py", "tests/update/test_updater.py"
OF_ENGINES = "tests/update/test_zero3.py"
OF_HOST = "ds_tba/update/host.py"
PINNING, OF_PINNING = "ds_tba/update/pinning.py", "tests/update/test_pinning.py"
MUTANTS = [
    Mutant("a copy out does not wait for the kernels that make the tensor", STREAMS,
           "            self._out_stream.wait_event(produced)\n", ""),
    Mutant("the tensor is not held until its copy is done", DEVICE,
           "AT_ONCE else source.untyped_storage()", "AT_ONCE else source[:0].clone().untyped_storage()"),
    Mutant("the tensor is let go before its copy is done", DEVICE,
           "        if self.storage is not None and self.event.query():", "        if self.storage is not None:"),
    Mutant("a lane writes before the copy into staging is done", SPACE,
           "            copy.wait()  # else", "            pass  # else"),
    Mutant("a copy in does not wait for the copy out into the same slot", STREAMS,
           "                self._in_stream.wait_event(after.event)\n", "                pass\n"),
    Mutant("a copy in does not wait until its memory is free", STREAMS,
           "            self._in_stream.wait_event(destination.allocated)\n", "", POOLS),
    Mutant("what comes back takes memory of the pool of the copies", STREAMS,
           "            data = accelerator.allocate(nbytes, device)  # in",
           "            with accelerator.on(self._in_stream):\n"
           "                data = accelerator.allocate(nbytes, device)  # in", POOLS),
    Mutant("memory that is cancelled goes to its next tenant under the copy", STREAMS,
           "            self._dropped.append(arrival)\n", "            pass\n", POOLS),
    Mutant("what a caller drops at once goes to its next tenant under the copy", NVME,
           "        loaded.arrival.join()\n", "        pass\n", POOLS),
    Mutant("what a caller drops at once goes to its next tenant under the copy from host memory", HOST,
           "        arrival.join()\n", "        pass\n", POOLS),
    Mutant("a store is closed while copies into memory that nobody wants run", STREAMS,
           "        self._in_stream.synchronize()\n        self._dropped.clear()\n", "        self._dropped.clear()\n",
           POOLS),
    Mutant("kernels do not wait for the copy in", DEVICE,
           "        consumer.wait_event(self.event)  #", "        pass  #"),
    Mutant("the allocator is not told who uses what came back", DEVICE,
           "            self._accelerator.share(self._data, consumer)\n", ""),
    Mutant("a slot is given back while copies use it", SPACE,
           "self.ring.slots.free_after(events, slot)", "self.ring.slots.free(slot)"),
    Mutant("a slot is given back while a copy out of it runs", SPACE,
           "part.uses + ([part.copy.event] if part.copy is not None else [])",
           "([part.copy.event] if part.copy is not None else [])"),
    Mutant("a slot is given back while a copy into it runs", SPACE,
           "part.uses + ([part.copy.event] if part.copy is not None else [])", "part.uses",
           "tests/storage/test_ordering.py tests/storage/test_nvme.py"),
    Mutant("a span in copies is free at once", STAGING,
           "            if all(event.query() for event in events):", "            if events:"),
    Mutant("room in host memory is given back while a copy into it runs", HOST,
           "ticket.uses + ([ticket.copy.event] if ticket.copy is not None else [])", "ticket.uses",
           "tests/storage/test_ordering.py tests/storage/test_host.py"),
    Mutant("room in host memory is given back while a copy out of it runs", HOST,
           "ticket.uses + ([ticket.copy.event] if ticket.copy is not None else [])",
           "([ticket.copy.event] if ticket.copy is not None else [])"),
    Mutant("a copy in from host memory does not wait for the copy out", HOST,
           "self._copies.allocate(ticket.nbytes, device), ticket.copy)",
           "self._copies.allocate(ticket.nbytes, device))"),
    Mutant("a store is closed while copies run", NVME,
           "self.copies.finish()\n", "pass\n"),
    Mutant("a store is closed while a put copies into staging", NVME,
           "while any(part.copy is None for part in self.writes) and time.monotonic() < deadline_s:", "while False:",
           "tests/storage/test_nvme.py"),
    Mutant("a slot is given back under a copy that failed after it was queued", NVME,
           "self.copies.drain()  # one that nobody knows of may be under way into the slot", "pass"),
    Mutant("the allocator is not told who uses what was saved on another stream", "ds_tba/core/cache.py",
           "            self._accelerator.share(tensor, self._accelerator.current_stream())\n", "            pass\n"),
    Mutant("host memory is closed while copies into it run", HOST,
           "self._closed = True\n            self._copies.finish()", "self._closed = True\n            pass"),
    Mutant("a second consumer does not wait for the copy in", "ds_tba/core/residency.py",
           "            data = arrival.join()  # every", "            data = arrival._data  # every"),
    Mutant("what is moved later does not wait for the kernels that make it", "ds_tba/core/residency.py",
           "        self._accelerator.current_stream().wait_event(kept_at)\n", "        pass\n",
           "tests/core/test_residency.py"),
    Mutant("a consumer does not wait for all parts of a storage", STREAMS,
           "event = moment(accelerator)  # the copies", "event = parts[0].event  # the copies"),
    Mutant("host memory is closed while copies out of it run", HOST,
           "            self._copies.finish()", "            pass", "tests/storage/test_host.py"),
    Mutant("a store is closed while copies out of the device run", STREAMS,
           "        self._out_stream.synchronize()\n        self._in_stream", "        self._in_stream"),
    Mutant("host memory does not bound what waits for its copy out", HOST,
           "self._copies.hold_at_most(max(0, self._ahead_limit_bytes - data.numel()))", "pass",
           "tests/storage/test_ordering.py tests/storage/test_host.py tests/gpu/test_gpu.py"),
    Mutant("host memory is given up while a copy out of it runs", NVME,
           "            arrival.wait()  # the memory", "            pass  # the memory"),
    Mutant("memory beside staging is used before kernels have left it", STAGING,
           "self.accelerator.current_stream().synchronize()\n        return memory", "return memory",
           "tests/storage/test_staging.py"),
    Mutant("what a lane writes is given up under the write", NVME,
           "if part.state in (_S.WRITING, _S.READING)", "if part.state in (_S.READING,)",
           "tests/storage/test_nvme.py tests/core/test_prefetch.py"),
    Mutant("what a lane reads is given up under the read", NVME,
           "if part.state in (_S.WRITING, _S.READING)", "if part.state in (_S.WRITING,)",
           "tests/storage/test_nvme.py"),
    Mutant("what prefetching came to leaves staging with the end of its write", SPACE,
           "stays = self.read_ahead.end(part) is not None", "stays = self.read_ahead.end(part) is Ahead.READ",
           "tests/core/test_prefetch.py"),
    Mutant("what prefetching came to and is given up counts for ever", NVME,
           "                    self.read_ahead.end(part)  # or its bytes would count against the bound for ever\n", "",
           "tests/storage/test_nvme.py"),
    Mutant("what differs when it is made again is made again all the same", "ds_tba/remat/sites.py",
           "        if not is_other:\n", "        if True:\n", "tests/remat/test_sites.py"),
    Mutant("an output is made again before its site was compared", "ds_tba/remat/recipe.py",
           "return not self.is_proven or self.visits >= self.next_visit", "return self.visits >= self.next_visit > 0",
           "tests/remat/test_sites.py"),
    Mutant("a site that was proven is compared no more", "ds_tba/remat/recipe.py",
           "return not self.is_proven or self.visits >= self.next_visit", "return not self.is_proven",
           "tests/remat/test_sites.py"),
    Mutant("what a device has not answered yet is taken for equal", REMAT,
           "return RecipeTicket(self, own, comparison)", "return RecipeTicket(self, own)",
           "tests/remat/test_sites.py"),
    Mutant("what differs late stays with its recipe", REMAT,
           "if is_equal and record.is_kept:", "if record.is_kept:", "tests/remat/test_sites.py"),
    Mutant("a parameter is an operand itself", "ds_tba/remat/recipe.py",
           "            if is_of_a_module(one):\n", "            if False:\n", "tests/remat/test_sites.py"),
    Mutant("a recipe does not hold its operands", "ds_tba/remat/recipe.py",
           "one.twin() for one", "one for one", "tests/remat/test_sites.py"),
    Mutant("a second consumer does not wait for what was made again", REMAT,
           "Arrival(accelerator, made,",
           'type("Late", (Arrival,), {"join": lambda self: self._data})(accelerator, made,',
           "tests/remat/test_sites.py"),
    Mutant("two threads load one record", "ds_tba/core/residency.py",
           "record.loading or self.begin_load(record)", "self.begin_load(record)",
           "tests/core/test_loads.py"),
    Mutant("a load that failed is waited for", "ds_tba/core/residency.py",
           "                self.end_load(record, loading, None)\n", "                pass\n",
           "tests/core/test_loads.py"),
    Mutant("bytes leave while their operation is under way", "ds_tba/core/cache.py",
           "mine.number != next_sequence_number() and", "True and", "tests/hazards/test_hazards.py"),
    Mutant("what a Function saves is shared", "ds_tba/core/hooks.py",
           "        return number + 1 if is_of_function else 0", "        return 0", "tests/hazards/test_hazards.py"),
    Mutant("what has no graph leaves while it is in use", "ds_tba/core/saved.py",
           "        if self.has_graph:\n            return True\n", "        return True\n",
           "tests/core/test_cache.py"),
    Mutant("the allocator is not told who makes from an operand", "ds_tba/remat/sites.py",
           "            self.accelerator.share(operand, self.accelerator.current_stream())", "            pass",
           "tests/remat/test_sites.py"),
    Mutant("staging is used before it was zeroed", STAGING,
           "self.accelerator.current_stream().synchronize()  # zeroing on the device", "#",
           "tests/storage/test_staging.py"),
    Mutant("the update forgets the weight decay of AdamW", FORMULA,
           "        master.add_(master, alpha=scalars.decay)\n", "        pass\n", OF_FORMULA),
    Mutant("the update adds the weight decay to the gradient itself", FORMULA,
           "alpha=scalars.decay, out=scratch)", "alpha=scalars.decay, out=gradient)", OF_FORMULA),
    Mutant("the update takes torch's square root on the CPU", FORMULA,
           "        target.copy_(source.double().sqrt_())\n", "        torch.sqrt(source, out=target)\n", OF_FORMULA),
    Mutant("the powers of the betas are never running products", FORMULA,
           "        if betas == self._betas and step == self._step + 1:", "        if False:", OF_FORMULA),
    Mutant("a second call of one step computes the powers anew", FORMULA,
           "        elif betas != self._betas or step != self._step:", "        else:", OF_FORMULA),
    Mutant("the corrections are computed in double", FORMULA,
           "root_scale = one / np.sqrt(one - powers[1])",
           "root_scale = np.float32(1 / np.sqrt(np.float64(one - powers[1])))", OF_FORMULA),
    Mutant("the trial leaves its object behind", FORMULA,
           "        op.destroy_adam(_TRIAL_ID)\n", "        pass\n", OF_FORMULA),
    Mutant("the update does not wait for what was there before it", UPDATE,
           "            stream.wait_event(so_far)", "            pass", OF_UPDATE),
    Mutant("the update does not wait for the former tenants of its memory", UPDATE,
           SLOTS_MADE + SO_FAR, SO_FAR + "\n" + SLOTS_MADE + "        #", OF_UPDATE),
    Mutant("the update of a chunk does not wait for its upload", UPDATE,
           "            self._compute.wait_event(uploaded)", "            pass", OF_UPDATE),
    Mutant("a chunk is written back before it is updated", UPDATE,
           "            self._down.wait_event(updated)", "            pass", OF_UPDATE),
    Mutant("a slot takes the next chunk before the last one was written back", UPDATE,
           "while self._in_flight and self._in_flight[0][0].query():", "while self._in_flight:", OF_UPDATE),
    Mutant("the memory of a failed chunk is given back while it is used", UPDATE,
           "self._held.append((slot, part))", "self._held.append(part)", OF_UPDATE),
    Mutant("nobody holds what a chunk reads on the device", UPDATE,
           "self._held.append((slot, part))", "self._held.append(slot)", OF_UPDATE),
    Mutant("a step of the update ends before it is written back", UPDATE,
           "(self._down, self._up, self._compute):", "(self._up, self._compute):", OF_UPDATE),
    Mutant("a step of the update ends before its uploads", UPDATE,
           "(self._down, self._up, self._compute):", "(self._down, self._compute):", OF_UPDATE),
    Mutant("a step of the update ends before a failed chunk", UPDATE,
           "(self._down, self._up, self._compute):", "(self._down, self._up):", OF_UPDATE),
    Mutant("slots are given back while they are used", UPDATE,
           "        for stream in (self._down, self._up, self._compute):\n",
           "        self._free.clear()\n        self._in_flight.clear()\n        self._held.clear()\n"
           "        for stream in (self._down, self._up, self._compute):\n", OF_UPDATE),
    Mutant("an upload of parameters is done before it is", UPDATE,
           "            self._upload_bytes(source, target)\n            return moment(self._accelerator)\n",
           "            event = moment(self._accelerator)\n"
           "            self._upload_bytes(source, target)\n            return event\n", OF_UPDATE),
    Mutant("the master is not written back", UPDATE,
           "for on_host, on_device in state + (", "for on_host, on_device in state[1:] + (", OF_UPDATE),
    Mutant("the multiplied gradient is not written back", UPDATE,
           "([(part.gradient, gradient)] if part.factor != 1.0 else [])", "[]", OF_UPDATE),
    Mutant("the parameters get bytes of the master", UPDATE,
           "accelerator.launch(cast, master, part.target)",
           "accelerator.copy(master.view(torch.uint8)[: part.target.nbytes], part.target.view(torch.uint8))",
           OF_UPDATE),
    Mutant("the ends of a sub-group are not updated", UPDATER,
           "                for _ in self._host.slices(end, self._pipeline.upload):\n",
           "                for _ in ():\n", OF_ENGINES),
    Mutant("CPUAdam does not hear of each sub-group in order", UPDATER,
           "            self._host.enter(sub_group)\n", "            pass\n", OF_UPDATER),
    Mutant("the last chunk of a sub-group is missing", UPDATER,
           "for start in range(*inside(elements), step)",
           "for start in range(*inside(elements), step)[:-1]", OF_UPDATER),
    Mutant("forked children share pages that are pinned", PINNING,
           "not keep_from_children(pages) or ", "", OF_PINNING),
    Mutant("memory that is unpinned is still missing in forked children", PINNING,
           "        show_to_children(pages)  # before malloc has it again\n", "", OF_PINNING),
    Mutant("what a checkpoint has replaced stays pinned until the next step", "ds_tba/update/zero3.py",
           "            self._updater.registry.keep(self._pinnable())\n", "            pass\n", OF_PINNING),
    Mutant("the trial does not cast", FORMULA,
           "        if not same_bits(master.to(dtype), low):\n", "        if False:\n", OF_FORMULA),
    Mutant("the trial does not unscale", FORMULA,
           "        if not same_bits(gradient.mul_(factor), on_device):\n", "        if False:\n", OF_FORMULA),
    Mutant("what the host has updated does not reach the model", OF_HOST,
           "            self.write(one, upload)\n", "            pass\n", OF_ENGINES),
    Mutant("the host forgets to unscale", OF_HOST,
           "        if part.factor != 1.0:\n", "        if False:\n", OF_ENGINES),
    Mutant("the device is given chunks as long as it has room", UPDATE,
           "        return self.has_room() and (self._upload_begins is None or bool(self._upload_begins.query()))",
           "        return self.has_room()", OF_UPDATE),
    Mutant("staging takes the next parameters before their copy is done", OF_HOST,
           "        event.synchronize()  # else", "        pass  # else", "tests/update/test_host.py"),
]  # fmt: skip


def killed(mutant: Mutant, root: Path) -> bool:
    """Whether a test fails on the mutant."""
    file = root / mutant.file
    source = file.read_text()
    file.write_text(source.replace(mutant.code, mutant.instead))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--basetemp", str(root / ".cache" / "pytest")]
    try:
        done = subprocess.run(
            [*command, *mutant.tests.split(), "-k", "not aio and not exact_on_a_late_device"],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return True  # a wait for something that never comes
    finally:
        file.write_text(source)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stdout + done.stderr)
    return done.returncode == 1


def main(names: list[str]) -> int:
    survivors = 0
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache") as directory:
        root = Path(directory) / "copy"
        ignored = shutil.ignore_patterns(".venv", ".cache", ".git", "__pycache__")
        shutil.copytree(ROOT, root, ignore=ignored)
        (root / ".cache").mkdir()
        for mutant in MUTANTS:
            if names and mutant.name not in names:
                continue
            found = killed(mutant, root)
            survivors += not found
            sys.stdout.write(f"{'killed  ' if found else 'SURVIVED'}  {mutant.name}\n")
            sys.stdout.flush()
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
