"""The built-in engine: continuous batching over one rank's KV, with transformers models."""

from .batch import ModelRunner, StepBatch
from .engine import Engine, EngineStats
from .lifecycle import Lifecycle
from .params import (
    EngineLimits,
    GenerationRequest,
    SamplingParams,
    StopReason,
    TokenDelta,
    TokenOutput,
)
from .scheduler import Scheduler
from .weights import ReloadableRunner, WeightsStatus

__all__ = [
    "Engine",
    "EngineLimits",
    "EngineStats",
    "GenerationRequest",
    "Lifecycle",
    "ModelRunner",
    "ReloadableRunner",
    "SamplingParams",
    "Scheduler",
    "StepBatch",
    "StopReason",
    "TokenDelta",
    "TokenOutput",
    "WeightsStatus",
]
