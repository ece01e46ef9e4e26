"""--dry-run: what would be trained and by how many workers, refused where training would be. Nothing is started."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.errors import ExitCode
from lockstep.guard import say
from lockstep.runtime import devices, env
from lockstep.start import checked, is_child, on_cpu

if TYPE_CHECKING:
    from lockstep.config.load import Loaded
    from lockstep.config.schema import RunConfig
    from lockstep.start import Start


def show_plan(loaded: Loaded, asked: Start | None = None) -> int:
    """The configuration and its sizes: of this start, or of one process that nobody has to start."""
    from lockstep.api import sizes
    from lockstep.config.show import show

    workers, nodes = 1, 1
    if asked:
        workers, nodes = _workers(loaded, asked)
        _check_named(loaded.config)
    say(show(loaded, only_set=True), "", sizes(loaded, workers=workers, nodes=nodes))
    return ExitCode.DONE


def _workers(loaded: Loaded, asked: Start) -> tuple[int, int]:
    """(how many workers, on how many machines). GPUs that are not here may be planned for."""
    if is_child():
        place = env.detect()
        return place.world, place.nodes
    if asked.nodes and asked.node is None:  # a plan is of all machines
        asked = replace(asked, node=0, address=asked.address or "the first")
    elsewhere = loaded.config.system.device == "cuda" and not devices.visible_gpus()
    gpus, _, nodes = checked(loaded, asked, cpu=elsewhere or on_cpu(loaded))
    return len(gpus) * nodes, nodes


def _check_named(config: RunConfig) -> None:
    """Refuse text and a checkpoint that are not there; a folder of histories is made by those who train on it."""
    options = config.data
    if config.family != "ad" and options.dataset_name in ("auto", "text") and options.data_path not in (None, "-"):
        from lockstep.engine.choices import choose_source

        choose_source(options.model_copy(update={"dataset_name": "text"}))
    if config.checkpoint.resume not in (None, "auto"):
        from lockstep.engine import resume  # which needs torch

        resume.find(config, {})
