"""What is made before training, as commands: the dataset of a configuration, the histories an agent learns from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError, ExitCode
from lockstep.guard import say

if TYPE_CHECKING:
    from lockstep.config.load import Loaded

logger = logging.getLogger(__name__)


def prepare_data(loaded: Loaded, to: Path | None = None) -> int:
    """Build or find the dataset of a configuration; `to`: also as a folder of windows."""
    import torch

    from lockstep.engine import settle, windows
    from lockstep.engine.build import plan
    from lockstep.engine.prepare import prepare
    from lockstep.runtime import signals

    if to is not None:
        windows.check_target(loaded.config, to)
    with signals.listening():
        decided = settle.decide(loaded.config)
        for line in settle.lines(decided):
            logger.warning("%s", line)
        planned = plan(settle.settled(loaded, decided), torch.device("cpu"), trains=False)
        prepared = prepare(planned.config, planned.objective, vocab_limit=planned.shape.vocab_size)
        if to is not None:
            for line in windows.export(planned.config, prepared, planned.objective, planned.shape.vocab_size, to):
                say(line)
    return ExitCode.DONE


def show_datasets(loaded: Loaded, *, verify: bool) -> int:
    """The prepared datasets, and with `verify` whether every byte of them is as it was."""
    from lockstep.data.listing import describe
    from lockstep.engine.choices import cache_roots

    lines, damaged = describe(cache_roots(loaded.config.data), verify=verify)
    say("\n".join(lines))
    return ExitCode.DATA if damaged else ExitCode.DONE


def remove_datasets(loaded: Loaded, *, dry_run: bool = False) -> int:
    """Remove them; or only say which would go."""
    from lockstep.data import cache
    from lockstep.engine.choices import cache_roots

    root = cache_roots(loaded.config.data)[0]  # the other is only read
    done = "Would remove" if dry_run else "Removed"
    say("\n".join(f"{done} {root / name}" for name in cache.clean(root, dry_run=dry_run)) or "Nothing to remove")
    return ExitCode.DONE


def collect_histories(loaded: Loaded, *, overwrite: bool = False, dry_run: bool = False) -> int:
    """Collect what an agent learns from, and say what has come of it; or only what would."""
    from lockstep.data.options import HistoryOptions
    from lockstep.runtime import signals

    config = loaded.config
    if not isinstance(config.data, HistoryOptions):
        what = f"family {config.family!r} learns from text, and not from histories"
        raise ConfigError(what, where="lockstep collect", hint=f"lockstep prepare {config.family}")
    from lockstep.engine.histories import gather, planned

    if dry_run:
        from lockstep.config.show import show

        say(show(loaded, only_set=True), "", *planned(config))
        return ExitCode.DONE
    with signals.listening():
        say(*loaded.notices)
        say(*gather(config, overwrite=overwrite).lines())
    return ExitCode.DONE
