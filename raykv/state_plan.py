"""What a rank knows of the recurrent state of one sequence."""

from __future__ import annotations

from dataclasses import dataclass

from raykv.core.explain import MissReason
from raykv.core.sequence_prefixes import SequencePrefixes
from raykv.core.state_copies import Save
from raykv.resume_points import Resume


@dataclass(slots=True)
class StatePlan:
    """What a rank knows of the state of a sequence that holds a row.

    Attributes:
        resume: where it began.
        num_inherited_tokens: tokens that its state covered before it computed anything here.
        prefixes: its own, and their names.
        miss: why it does not reuse all KV that is cached; None if it does.
        rolling: the state at the last boundary in what it generates, a checkpoint once it ends.
    """

    resume: Resume
    num_inherited_tokens: int
    prefixes: SequencePrefixes
    miss: MissReason | None = None
    rolling: Save | None = None
