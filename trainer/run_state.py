"""What a checkpoint holds besides the sharded weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

INSIDE = "run:"  # marks a model folder inside the run folder


@dataclass
class RunState:
    """All that a resumed run must know besides the sharded weights; paths are the run folder's."""

    step: int = 0  # optimizer steps of all students so far
    phase: int = 0  # index into the schedule
    step_in_phase: int = 0
    exports: dict[str, list[str]] = field(default_factory=dict)  # model folders, the first initial
    policies: dict[str, str] = field(default_factory=dict)  # student → its newest sharded state
    gate: list[dict[str, Any]] = field(default_factory=list)  # one record a round
    feedback: dict[str, float] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)  # test scores by student
    end: dict[str, Any] = field(default_factory=dict)
    dialogues_start: dict[str, Any] = field(default_factory=dict)  # records by student, setting
    dialogues_end: dict[str, Any] = field(default_factory=dict)
    wall_time_s: float = 0.0
