"""The GPUs of this machine, asked without loading torch here: NVML, then nvidia-smi, then (AMD) torch in a child."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError, LockstepError
from lockstep.runtime import env

if TYPE_CHECKING:
    from lockstep.runtime.options import SystemOptions

WHICH = "--gpus"
MOST_WORKERS = 1024  # of the CPU on one machine: a slip of the finger is no reason to fork without end
SHOWN_HOLDERS = 3
QUERY = "index,uuid,name,memory.total,memory.free,utilization.gpu"
SHORT_QUERY = "index,utilization.gpu"  # the documented one: what every nvidia-smi answers
NO_GPU = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that mean the CPU; the last is SLURM's
ASK_SECONDS = 30  # a driver that is waking up is slow, one that is broken never answers
MIB = 1 << 20
AMD_DRIVER = Path("/dev/kfd")
LIST_BY_TORCH = """
import json, torch
cards = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
print(json.dumps([[number, card.name, card.total_memory] for number, card in enumerate(cards)]))
"""


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi numbers it."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    free_bytes: int
    utilisation: int  # percent; 0 where the card does not say


@dataclass(frozen=True)
class Holder:
    """A process that computes on a GPU."""

    pid: int
    command: str  # program and script, without arguments; "" where it cannot be seen (another container)
    memory_bytes: int  # 0 where the driver does not say


def visible_gpus() -> list[Gpu]:
    """The GPUs this process may use: all of them, or those of CUDA_VISIBLE_DEVICES (AMD: or HIP_) in its order."""
    return _restrict(all_gpus(), env.get("CUDA_VISIBLE_DEVICES", env.get("HIP_VISIBLE_DEVICES", "all")))


def choose(asked: str, *, cpu: bool, repeats: bool = False) -> list[int]:
    """The numbers `--gpus` stands for, in the order of the workers: nvidia-smi's, or labels of CPU workers.

    `all`; `auto`, the idlest one; `auto:memory`, the one with most free memory; `2`, the first two; `0,2`, these;
    `2,` (a list of one), number 2. On the CPU `all` and `auto` are one worker, `2` is two, `0,2` two with those labels.
    repeats: a GPU may be named several times, for workers that share it.
    """
    word = asked.strip()
    gpus = [] if cpu else visible_gpus()
    if not (cpu or gpus):
        wish = f" --gpus {_of_cpu(word)}" if word[:1].isdecimal() else ""
        where = "" if word == "all" else f"{WHICH} {word[:80]}"  # all is what nobody has to type
        raise ConfigError("no GPU can be used here", where=where, hint=f"--device cpu{wish}")
    if word == "all":
        return [0] if cpu else [gpu.index for gpu in gpus]
    if word in ("auto", "auto:memory"):
        rank = _by_memory if word == "auto:memory" else _by_idleness
        return [0] if cpu else [min(gpus, key=rank).index]
    if _is_number(word):
        return _first(int(word), range(MOST_WORKERS) if cpu else [gpu.index for gpu in gpus], cpu=cpu)
    numbers = _named(word, range(MOST_WORKERS) if cpu else [gpu.index for gpu in gpus], cpu=cpu)
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice and (cpu or not repeats):
        hint = "each once" if cpu else "each once, or --mode replicas, where workers may share one, or --device cpu"
        raise ConfigError(f"{twice[0]} is named twice: one worker a GPU", where=f"{WHICH} {word[:80]}", hint=hint)
    return numbers


def _of_cpu(word: str) -> str:
    """What means as many workers of the CPU: the word itself where it can, else a count; `0-3` was meant as four."""
    with contextlib.suppress(ConfigError):
        choose(word, cpu=True)
        return word
    numbers = [int(number) for number in re.findall("[0-9]{1,9}", word)]
    span = numbers[-1] - numbers[0] + 1 if "-" in word else len(numbers)
    return str(min(max(1, numbers[0] if _is_number(word) else span), MOST_WORKERS))


def _first(count: int, known: Sequence[int], *, cpu: bool) -> list[int]:
    if 1 <= count <= len(known):
        return list(known[:count])
    one = f"{WHICH} {count}, (with the comma) for GPU {count}; " if not cpu and count in known else ""
    have = f"1 to {len(known)} CPU workers" if cpu else f"there {_are(known)}"
    raise ConfigError(
        f"a number alone is a count, and {count} are too {'few' if count < 1 else 'many'}: {have}",
        where=f"{WHICH} {count}",
        hint=f"{one}{WHICH} {'1' if cpu else 'all'}{'' if cpu else ', or --device cpu'}",
    )


def _named(word: str, known: Sequence[int], *, cpu: bool) -> list[int]:
    """Numbers with commas, each there."""
    parts = [part.strip() for part in word.removesuffix(",").split(",")]
    numbers = [int(part) for part in parts if _is_number(part)]
    place = f"{WHICH} {word[:80]}"
    forms = "all, auto, auto:memory, a count, or numbers with commas"
    if len(numbers) < len(parts):
        wrong = next(part for part in parts if not _is_number(part))
        raise ConfigError(f"{wrong[:40]!r} is not understood", where=place, hint=f"{forms}; {_which(known, cpu=cpu)}")
    missing = [str(number) for number in numbers if number not in known]
    if missing:
        raise ConfigError(f"no GPU {', '.join(missing)[:80]}", where=place, hint=_which(known, cpu=cpu))
    return numbers


def _which(known: Sequence[int], *, cpu: bool) -> str:
    return f"labels from 0 to {len(known) - 1}" if cpu else f"there {_are(known)}; or --device cpu"


def _are(known: Sequence[int]) -> str:
    """The numbers that can be asked for, in words."""
    if len(known) == 1:
        return f"is GPU {known[0]}"
    return f"are {len(known)}: GPU {', '.join(map(str, known))}"


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) <= 9


def _by_idleness(gpu: Gpu) -> tuple[int, int, int]:
    return gpu.utilisation, -gpu.free_bytes, gpu.index


def _by_memory(gpu: Gpu) -> tuple[int, int, int]:
    return -gpu.free_bytes, gpu.utilisation, gpu.index


def check_asked(system: SystemOptions) -> None:
    """Refuse to train on the CPU where a GPU was asked for: by CUDA_VISIBLE_DEVICES or by system.device_id."""
    device, visible = system.device, env.get("CUDA_VISIBLE_DEVICES", "all")
    first = visible.partition(",")[0].strip()
    if device != "cpu" and visible != "all" and first not in NO_GPU and not first.startswith("MIG-"):
        gpus = all_gpus()
        if gpus and not _restrict(gpus, visible):
            numbers = f"GPUs {gpus[0].index}-{gpus[-1].index}" if len(gpus) > 1 else f"GPU {gpus[0].index}"
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES={visible[:80]} names none of the {numbers}",
                hint=f"CUDA_VISIBLE_DEVICES={gpus[0].index}, or --device cpu",
            )
    if system.device_id > 0 and (device == "cpu" or (device == "auto" and not visible_gpus())):
        raise ConfigError(
            f"{system.device_id} needs a GPU, and this run has none", where="system.device_id", hint="leave it out"
        )


def all_gpus() -> list[Gpu]:
    gpus = _ask_nvml()
    if gpus is None and shutil.which("nvidia-smi"):
        gpus = _ask_nvidia_smi()
    if not gpus and AMD_DRIVER.exists():
        gpus = _ask_torch()
    return gpus or []


def idlest_gpu() -> int:
    """The number of the GPU nvidia-smi calls least busy; ties go to the most free memory, then the lowest number."""
    if not shutil.which("nvidia-smi"):
        raise LockstepError(
            "cannot choose a GPU: nvidia-smi is not on PATH", hint="install the NVIDIA driver, or train_gpu.sh NUMBER"
        )
    gpus = _restrict(_ask_nvidia_smi(), env.get("CUDA_VISIBLE_DEVICES", "all"))
    if not gpus:
        raise LockstepError("cannot choose a GPU: nvidia-smi lists none that is visible", hint="run nvidia-smi")
    return min(gpus, key=_by_idleness).index


def busy_notices(indices: Sequence[int]) -> list[str]:
    """A line for each of these GPUs that somebody computes on already."""
    lines: list[str] = []
    for index in indices:
        found = holders(index)
        shown = ", ".join(_in_words(holder) for holder in found[:SHOWN_HOLDERS])
        more = f" and {len(found) - SHOWN_HOLDERS} more" if len(found) > SHOWN_HOLDERS else ""
        lines += [f"GPU {index} is in use: {shown}{more}"] if found else []
    return lines


def holders(index: int) -> list[Holder]:
    """The processes that compute on a GPU, the largest first; [] where nobody does or nobody can say."""
    found = _holders_by_nvml(index)
    if found is None:
        found = _holders_by_smi(index)
    known = [Holder(pid, command_of(pid), memory) for pid, memory in found]
    return sorted(known, key=lambda holder: (-holder.memory_bytes, holder.pid))


def _holders_by_nvml(index: int) -> list[tuple[int, int]] | None:
    with nvml() as library:
        if library is None:
            return None
        try:
            running = library.nvmlDeviceGetComputeRunningProcesses(library.nvmlDeviceGetHandleByIndex(index))
        except library.NVMLError:
            return None
        return [(int(process.pid), int(process.usedGpuMemory or 0)) for process in running]


def _holders_by_smi(index: int) -> list[tuple[int, int]]:
    rows = ask_smi("compute-apps", "pid,used_memory", f"--id={index}")
    return [(int(row["pid"]), smi_number(row["used_memory"]) * MIB) for row in rows if row["pid"].isdigit()]


def command_of(pid: int) -> str:
    """Program and script of a process: `python train.py`. Not its arguments, which may hold anything; '' if unseen."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").rstrip("\0").split("\0")
    except OSError:
        return ""
    program, *rest = words
    is_python = Path(program).name.startswith("python")
    script = next((word for word in rest if not word.startswith("-")), "") if is_python and "-c" not in rest else ""
    text = " ".join(Path(word).name for word in (program, script) if word)
    return env.redact("".join(letter if letter.isprintable() else "?" for letter in text))[:60]


def _in_words(holder: Holder) -> str:
    name = f" ({holder.command})" if holder.command else ""
    size = f"{holder.memory_bytes / 2**30:.1f} GiB" if holder.memory_bytes else "some memory"
    return f"pid {holder.pid}{name} holds {size}"


def _restrict(gpus: Sequence[Gpu], visible: str) -> list[Gpu]:
    """As CUDA reads the variable: numbers or (shortened) UUIDs, up to the first one that is not there."""
    if visible == "all":
        return list(gpus)
    chosen: list[Gpu] = []
    for word in (part.strip() for part in visible.split(",")):
        named = [
            gpu for gpu in gpus if word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word))
        ]
        if len(named) != 1 or named[0] in chosen:
            break
        chosen.append(named[0])
    return chosen


@contextlib.contextmanager
def nvml() -> Generator[Any]:
    """The driver's own library, opened; None where there is no library or no driver."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def driver_version() -> str:
    """Of the cards' driver; "" where it does not say."""
    with nvml() as library:
        if library is None:
            return ""
        try:
            return str(library.nvmlSystemGetDriverVersion())
        except library.NVMLError:
            return ""


def _ask_nvml() -> list[Gpu] | None:
    """What the driver's own library says; None where it says nothing."""
    with nvml() as library:
        if library is None:
            return None
        try:
            return [_describe(library, index) for index in range(library.nvmlDeviceGetCount())]
        except library.NVMLError:
            return None


def _describe(library: Any, index: int) -> Gpu:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    try:
        utilisation = int(library.nvmlDeviceGetUtilizationRates(handle).gpu)
    except library.NVMLError:  # not supported under MIG and on some cards
        utilisation = 0
    return Gpu(
        index=index,
        uuid=str(library.nvmlDeviceGetUUID(handle)),
        name=str(library.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
        utilisation=utilisation,
    )


def _ask_nvidia_smi() -> list[Gpu]:
    """What the command says; [] where it cannot reach a driver."""
    return _query(QUERY) or _query(SHORT_QUERY)


def _query(fields: str) -> list[Gpu]:
    found = [cells for cells in ask_smi("gpu", fields) if cells["index"].isdigit()]
    return [
        Gpu(
            index=int(cells["index"]),
            uuid=cells.get("uuid", ""),
            name=cells.get("name", "GPU"),
            memory_bytes=smi_number(cells.get("memory.total", "")) * MIB,
            free_bytes=smi_number(cells.get("memory.free", "")) * MIB,
            utilisation=smi_number(cells["utilization.gpu"]),
        )
        for cells in found
    ]


def ask_smi(what: str, fields: str, *extra: str, seconds: float = ASK_SECONDS) -> list[dict[str, str]]:
    """The rows of `nvidia-smi --query-<what>=<fields>`; [] where it is not there, fails or hangs."""
    command = ["nvidia-smi", *extra, f"--query-{what}={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    names = fields.split(",")
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


def _ask_torch() -> list[Gpu]:
    """What torch sees, asked in a child process so that this one never touches a GPU; [] where it cannot say."""
    environment = env.without("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    command = [sys.executable, "-c", LIST_BY_TORCH]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
        return [Gpu(number, f"AMD-{number}", name, size, size, 0) for number, name, size in json.loads(answer.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return []


def smi_number(cell: str) -> int:
    """A count, or 0 where nvidia-smi says nothing or [N/A]."""
    return int(float(cell)) if cell.replace(".", "", 1).isdigit() else 0
