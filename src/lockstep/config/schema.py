"""The one schema: sections of settings, composed per family."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from lockstep.config.section import Section
from lockstep.data.options import TEXT_SETTINGS, DataOptions, HistoryOptions
from lockstep.engine.options import AgentTrainingOptions, CheckpointOptions, EpochTrainingOptions, TrainingOptions
from lockstep.errors import ConfigError
from lockstep.health.options import DebugOptions
from lockstep.models.options import AgentOptions, EncoderOptions, LladaOptions, LlamaOptions, ModelOptions
from lockstep.objectives.options import CausalOptions, DiffusionOptions, DistillOptions, MlmOptions, ObjectiveOptions
from lockstep.report.options import ReportOptions, RunOptions
from lockstep.runtime.options import SystemOptions


class RunConfig(Section, frozen=True):
    """Everything that decides a run. Frozen; a family narrows `model` and `objective`."""

    family: str
    model: ModelOptions
    objective: ObjectiveOptions
    training: TrainingOptions = TrainingOptions()
    data: DataOptions = DataOptions()
    system: SystemOptions = SystemOptions()
    debug: DebugOptions = DebugOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    report: ReportOptions = ReportOptions()
    run: RunOptions = RunOptions()

    def check(self) -> None:
        """Refuse what each section allows, and the family cannot do."""
        self.objective.check(self.data.documents)
        self.system.check()


def _family(name: str) -> Any:
    return Field(name, description="What is trained.", json_schema_extra={"role": "identity"})


class LlamaConfig(RunConfig, frozen=True):
    """LLaMA, next-token prediction."""

    family: Literal["llama"] = _family("llama")
    model: LlamaOptions = LlamaOptions()
    objective: CausalOptions = CausalOptions()


class MlmConfig(RunConfig, frozen=True):
    """Encoders, masked-LM."""

    family: Literal["mlm"] = _family("mlm")
    model: EncoderOptions = EncoderOptions()
    objective: MlmOptions = MlmOptions()
    training: EpochTrainingOptions = EpochTrainingOptions()


class LladaConfig(RunConfig, frozen=True):
    """LLaDA, masked diffusion."""

    family: Literal["llada"] = _family("llada")
    model: LladaOptions = LladaOptions()
    objective: DiffusionOptions = DiffusionOptions()
    training: EpochTrainingOptions = EpochTrainingOptions()


class AdConfig(RunConfig, frozen=True):
    """Algorithm Distillation, in-context reinforcement learning."""

    family: Literal["ad"] = _family("ad")
    model: AgentOptions = AgentOptions()
    objective: DistillOptions = DistillOptions()
    training: AgentTrainingOptions = AgentTrainingOptions()
    data: HistoryOptions = HistoryOptions()

    def check(self) -> None:
        """Also refuse settings of texts: they would mean nothing here."""
        super().check()
        for section, names in (("data", TEXT_SETTINGS), ("report", ("sample_prompt", "sample_tokens"))):
            options: Section = getattr(self, section)
            usual = type(options)()
            for name in names:
                if getattr(options, name) != getattr(usual, name):
                    what = "is for families that learn from text"
                    raise ConfigError(what, where=f"{section}.{name}", hint="leave it out")


FAMILIES: dict[str, type[RunConfig]] = {
    "llama": LlamaConfig,
    "mlm": MlmConfig,
    "llada": LladaConfig,
    "ad": AdConfig,
}
