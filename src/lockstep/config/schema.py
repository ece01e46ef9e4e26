"""The one schema: sections of settings, composed per family."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lockstep.config.section import Section
from lockstep.data.options import DataOptions
from lockstep.engine.options import CheckpointOptions, TrainingOptions
from lockstep.health.options import DebugOptions
from lockstep.models.options import LlamaOptions
from lockstep.objectives.options import CausalOptions
from lockstep.report.options import ReportOptions, RunOptions
from lockstep.runtime.options import SystemOptions


class RunConfig(Section):
    """Everything that decides a run. Frozen; a family narrows `model` and `objective`."""

    family: Literal["llama"] = Field("llama", description="What is trained.", json_schema_extra={"role": "identity"})
    model: LlamaOptions = LlamaOptions()
    objective: CausalOptions = CausalOptions()
    training: TrainingOptions = TrainingOptions()
    data: DataOptions = DataOptions()
    system: SystemOptions = SystemOptions()
    debug: DebugOptions = DebugOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    report: ReportOptions = ReportOptions()
    run: RunOptions = RunOptions()


FAMILIES: dict[str, type[RunConfig]] = {"llama": RunConfig}
