"""`lockstep doctor`: is everything here that training needs? One line a check, with a remedy for what is not well."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import json as json_text
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from lockstep import __version__, home
from lockstep.errors import ExitCode, LockstepError
from lockstep.runtime import collective, devices, env

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
LITTLE_DISK_BYTES, NO_DISK_BYTES = 10 << 30, 200 << 20
LITTLE_SHM_BYTES, NO_SHM_BYTES = 1 << 30, 8 << 20  # Docker gives 64 MiB, which NCCL and loader processes outgrow
SHARED_MEMORY = Path("/dev/shm")
NAME_SECONDS = 5.0
HUB = "https://huggingface.co"
HUB_SECONDS = 10.0
NEEDED = {  # package -> module, what training with local data cannot do without
    "numpy": "numpy", "safetensors": "safetensors", "pydantic": "pydantic", "ruamel.yaml": "ruamel.yaml",
    "tokenizers": "tokenizers", "psutil": "psutil", "filelock": "filelock",
}  # fmt: skip
OPTIONAL = {  # package -> (module, what it is for)
    "nvidia-ml-py": ("pynvml", "GPU facts"),
    "rich": ("rich", "progress bar"),
    "transformers": ("transformers", "models and tokenizers of the hub"),
    "datasets": ("datasets", "datasets of the hub"),
    "huggingface-hub": ("huggingface_hub", "downloads"),
    "accelerate": ("accelerate", "--launch accelerate"),
    "tensorboard": ("tensorboard", "TensorBoard files"),
    "matplotlib": ("matplotlib", "plots"),
    "h5py": ("h5py", "HDF5 histories"),
}

Mark = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True)
class Check:
    """What was looked at, how it is, and what to do about it."""

    name: str
    state: Mark
    found: str
    remedy: str = ""


def doctor(*, json: bool = False, network: bool = False) -> tuple[str, int]:
    """Every check as text or JSON, and the exit code: 1 when something needed is missing or fails."""
    checks = [_plain(check) for check in examine(network=network)]
    failed = [check for check in checks if check.state == "FAIL"]
    code = ExitCode.FAILED if failed else ExitCode.DONE
    if json:
        record = {"lockstep": __version__, "ok": not failed, "checks": [asdict(check) for check in checks]}
        return json_text.dumps(record, indent=2, ensure_ascii=False), code
    width = max(len(check.name) for check in checks)
    lines = [
        f"{check.state:<4}  {check.name:<{width}}  {check.found}" + (f"; try: {check.remedy}" if check.remedy else "")
        for check in checks
    ]
    warned = sum(check.state == "warn" for check in checks)
    summary = f"{len(failed)} failed, {warned} to look at, {len(checks) - len(failed) - warned} fine"
    return "\n".join([*lines, "", summary]), code


def examine(*, network: bool) -> Iterator[Check]:
    """All checks, the cheap ones first."""
    yield python()
    yield Check("lockstep", "ok", f"{__version__} in {Path(__file__).parent}")
    yield from packages()
    gpus = devices.visible_gpus()
    trial = collective.attempt("gloo")
    yield torch(trial, gpus)
    yield gpu_list(gpus)
    if gpus and not gpus[0].uuid.startswith("AMD-"):
        yield driver()
        yield in_use(gpus)
    yield exchange(trial)
    if len(gpus) > 1 and trial.devices > 1:
        yield exchange(collective.attempt("nccl"))
    yield cache()
    yield output(home.RUNS)
    yield disk(home.RUNS)
    yield shared_memory(SHARED_MEMORY)
    yield port()
    yield host_name(socket.gethostname())
    yield token()
    if network:
        yield hub(env.get("HF_ENDPOINT") or HUB)


def _plain(check: Check) -> Check:
    """One line without secrets or control bytes, whatever a driver or a package has said."""

    def clean(text: str) -> str:
        return env.redact("".join(letter if letter.isprintable() else " " for letter in text))

    return Check(check.name, check.state, clean(check.found), clean(check.remedy))


# ------------------------------------------------------------------------------------------------ software


def python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Check:
    text = ".".join(map(str, version))
    if version[:2] < OLDEST_PYTHON:
        return Check("Python", "FAIL", f"{text}, too old", f"Python {'.'.join(map(str, OLDEST_PYTHON))} or newer")
    return Check("Python", "ok", f"{text} ({sys.executable})")


def packages(has: Callable[[str], bool] | None = None) -> Iterator[Check]:
    """What is not installed; nothing is imported for it."""
    has = has or _is_installed
    pip = f"{sys.executable} -m pip install"
    missing = [name for name, module in NEEDED.items() if not has(module)]
    if missing:
        yield Check("packages", "FAIL", f"missing: {', '.join(missing)}", f"{pip} {' '.join(missing)}")
    lacking = {name: why for name, (module, why) in OPTIONAL.items() if not has(module)}
    if lacking:
        words = ", ".join(f"{name} ({why})" for name, why in lacking.items())
        yield Check("optional packages", "warn", f"missing: {words}", f"{pip} {' '.join(lacking)}")
    if not missing and not lacking:
        yield Check("packages", "ok", "all there")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def torch(trial: collective.Trial, gpus: list[devices.Gpu]) -> Check:
    """Whether torch can be imported, is new enough, and sees the GPUs that the driver has."""
    pip = f"{sys.executable} -m pip install"
    if not trial.torch:
        return Check("torch", "FAIL", f"cannot be imported: {trial.error}", f"{pip} 'torch>=2.11'")
    build = f"CUDA {trial.cuda}" if trial.cuda else f"ROCm {trial.hip}" if trial.hip else "CPU only"
    found = f"{trial.torch}, {build}"
    numbers = tuple(int(part) for part in trial.torch.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < OLDEST_TORCH:
        return Check("torch", "FAIL", f"{found}: too old", f"{pip} 'torch>={'.'.join(map(str, OLDEST_TORCH))}'")
    if gpus and not (trial.cuda or trial.hip):
        return Check(
            "torch", "FAIL", f"{found}, and there are {len(gpus)} GPUs", f"{pip} --force-reinstall torch (a GPU build)"
        )
    if gpus and trial.devices < len(gpus):
        return Check(
            "torch", "FAIL", f"{found}, sees {trial.devices} of {len(gpus)} GPUs",
            "a driver new enough for this CUDA, or a torch built for the driver's",
        )  # fmt: skip
    return Check("torch", "ok", found)


def exchange(trial: collective.Trial) -> Check:
    """Whether two processes can add up their numbers."""
    name = f"{trial.backend} all-reduce"
    if trial.agreed:
        return Check(name, "ok", f"2 processes agree ({trial.seconds:.1f} s)")
    remedy = {
        "gloo": "let this machine's name lead to an address of it in /etc/hosts, or GLOO_SOCKET_IFNAME=lo",
        "nccl": "NCCL_DEBUG=INFO lockstep doctor, more /dev/shm, or NCCL_P2P_DISABLE=1",
    }[trial.backend]
    if not trial.torch:
        return Check(name, "FAIL", "not tried: torch is missing", "see torch above")
    return Check(name, "FAIL", trial.error, remedy)


# ------------------------------------------------------------------------------------------------ devices


def gpu_list(gpus: list[devices.Gpu]) -> Check:
    if gpus:
        kinds = sorted({f"{gpu.name} ({gpu.memory_bytes / 2**30:.0f} GiB)" for gpu in gpus})
        numbers = ", ".join(str(gpu.index) for gpu in gpus)
        return Check("devices", "ok", f"{len(gpus)} x {', '.join(kinds)}: GPU {numbers}")
    visible = env.get("CUDA_VISIBLE_DEVICES", env.get("HIP_VISIBLE_DEVICES", "all"))
    if visible != "all" and devices.all_gpus():
        found = f"every GPU is hidden by CUDA_VISIBLE_DEVICES={visible[:40]!r}: training runs on the CPU"
        return Check("devices", "warn", found, "unset CUDA_VISIBLE_DEVICES")
    if shutil.which("nvidia-smi"):
        return Check("devices", "FAIL", "nvidia-smi is here and finds no GPU", "nvidia-smi, and mend what it says")
    return Check("devices", "ok", "no GPU: training runs on the CPU")


def driver() -> Check:
    with devices.nvml() as library:
        version = str(library.nvmlSystemGetDriverVersion()) if library else ""
    rows = [] if version else devices.ask_smi("gpu", "driver_version")
    version = version or (rows[0]["driver_version"] if rows else "")
    if not version:
        return Check("driver", "warn", "does not say its version", "nvidia-smi")
    return Check("driver", "ok", f"NVIDIA {version}")


def in_use(gpus: list[devices.Gpu]) -> Check:
    lines = devices.busy_notices([gpu.index for gpu in gpus])
    if not lines:
        return Check("GPUs in use", "ok", "none")
    return Check("GPUs in use", "warn", "; ".join(lines), "--gpus auto, or end those processes")


# ------------------------------------------------------------------------------------------------ places


def cache() -> Check:
    """Whether prepared datasets can be kept."""
    try:
        from lockstep.data.cache import entries
        from lockstep.data.options import DataOptions
        from lockstep.engine.choices import cache_roots
    except ImportError as error:
        return Check("dataset cache", "FAIL", f"not looked at: no package {error.name}", "see packages above")
    root = cache_roots(DataOptions())[0]
    trouble = _trouble(root)
    if trouble:
        return Check("dataset cache", "FAIL", f"{root}: {trouble}", "DATASET_CACHE_DIR=DIR, a folder you can write to")
    found = entries(root)
    size = sum(entry.bytes for entry in found)
    return Check("dataset cache", "ok", f"{root}: {len(found)} datasets, {_size(size)}, {_size(_free(root))} free")


def output(folder: Path) -> Check:
    trouble = _trouble(folder)
    if trouble:
        return Check("output folder", "FAIL", f"{folder.absolute()}: {trouble}", "--out DIR, a folder you can write to")
    return Check("output folder", "ok", str(folder.absolute()))


def disk(folder: Path, free: int | None = None) -> Check:
    free = _free(folder) if free is None else free
    state: Mark = "FAIL" if free < NO_DISK_BYTES else "warn" if free < LITTLE_DISK_BYTES else "ok"
    remedy = "" if state == "ok" else "free some space, or --out DIR on another disk: a checkpoint is 12 bytes a weight"
    return Check("disk space", state, f"{_size(free)} free for {folder.absolute()}", remedy)


def shared_memory(folder: Path, total: int | None = None) -> Check:
    if total is None:
        try:
            total = shutil.disk_usage(folder).total
        except OSError:
            return Check("shared memory", "warn", f"no {folder}", f"mount -t tmpfs tmpfs {folder}")
    state: Mark = "FAIL" if total < NO_SHM_BYTES else "warn" if total < LITTLE_SHM_BYTES else "ok"
    remedy = "" if state == "ok" else f"docker run --shm-size=8g, or mount -o remount,size=8g {folder}"
    return Check("shared memory", state, f"{_size(total)} in {folder}", remedy)


def _trouble(folder: Path) -> str:
    """Why nothing can be written to a folder, or to where it would be made; '' if it can. Leaves nothing behind."""
    try:
        place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        if not place.is_dir():
            return f"{place} is not a folder"
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as error:
        return f"cannot be written: {error.strerror or error}"


def _free(folder: Path) -> int:
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    return shutil.disk_usage(place).free


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"


# ------------------------------------------------------------------------------------------------ network


def port(address: str = "127.0.0.1") -> Check:
    """Whether a free port can be had on the loopback interface and reached."""
    try:
        with socket.create_server((address, 0)) as server:
            number = server.getsockname()[1]
            with socket.create_connection((address, number), timeout=NAME_SECONDS):
                return Check("free port", "ok", f"{number} on {address}")
    except OSError as error:
        return Check("free port", "FAIL", f"none on {address}: {error.strerror or error}", "ip link set lo up")


def host_name(name: str) -> Check:
    """Whether this machine finds itself by name: gloo and many machines need it."""
    remedy = f"a line '127.0.0.1 {name}' (or its real address) in /etc/hosts"
    pool = concurrent.futures.ThreadPoolExecutor(max_workers=1)
    try:
        return Check("host name", "ok", f"{name} is {pool.submit(socket.gethostbyname, name).result(NAME_SECONDS)}")
    except TimeoutError:
        return Check("host name", "warn", f"{name}: no answer in {NAME_SECONDS:g} s", remedy)
    except (OSError, UnicodeError):
        return Check("host name", "warn", f"{name} leads to no address", remedy)
    finally:
        pool.shutdown(wait=False)


def token() -> Check:
    """Whether there is a hub token. What it is stays where it is."""
    value = env.get("HF_TOKEN")
    if value and (value != value.strip() or len(value.split()) > 1):
        return Check("HF_TOKEN", "warn", "set, with spaces or line ends in it", "export HF_TOKEN=... without them")
    if value:
        return Check("HF_TOKEN", "ok", "set")
    kept = Path(env.get("HF_HOME") or "~/.cache/huggingface") / "token"
    with contextlib.suppress(OSError, RuntimeError):
        if kept.expanduser().is_file():
            return Check("HF_TOKEN", "ok", f"not set; a token is in {kept}")
    return Check("HF_TOKEN", "ok", "not set; only gated models and datasets need it")


def hub(address: str) -> Check:
    """Whether the hub answers. Anything below 500 is an answer."""
    import urllib.error
    import urllib.request

    remedy = "HTTPS_PROXY, HF_ENDPOINT for a mirror, or HF_HUB_OFFLINE=1 with what is here"
    try:
        if not address.startswith(("http://", "https://")):
            raise LockstepError("not an http address")
        request = urllib.request.Request(address, method="HEAD")
        with urllib.request.urlopen(request, timeout=HUB_SECONDS) as answer:
            status = answer.status
    except urllib.error.HTTPError as error:
        status = error.code
        error.close()
    except (OSError, ValueError, LockstepError) as error:
        return Check("hub", "FAIL", f"{address} does not answer: {str(error)[:200]}", remedy)
    if status >= 500:
        return Check("hub", "FAIL", f"{address} answers {status}", remedy)
    return Check("hub", "ok", f"{address} answers")
