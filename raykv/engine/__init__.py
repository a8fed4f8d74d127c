"""The built-in engine: continuous batching over one rank's KV, with transformers models."""

from .batch import ModelRunner, StepBatch
from .engine import Engine, EngineStats
from .params import (
    EngineLimits,
    GenerationRequest,
    SamplingParams,
    StopReason,
    TokenDelta,
    TokenOutput,
)
from .scheduler import Scheduler

__all__ = [
    "Engine",
    "EngineLimits",
    "EngineStats",
    "GenerationRequest",
    "ModelRunner",
    "SamplingParams",
    "Scheduler",
    "StepBatch",
    "StopReason",
    "TokenDelta",
    "TokenOutput",
]
