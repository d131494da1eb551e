"""The keys by which a run finds its checkpoints again: the same for reinforcement learning and fine-tuning.

Pure data. The docstring below a field is what `ostinato config` prints as its meaning.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

__all__ = ["ResumeConfig"]


class ResumeConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Checkpoints that are kept, and the one that a run goes on from (part of `trainer`)."""

    max_ckpt_to_keep: Annotated[int, Meta(ge=1)] | None = None
    """Newest checkpoints that are kept; null keeps all."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto goes on from the newest whole checkpoint in default_local_dir, where there is one; disable begins anew, and refuses a folder that
    has checkpoints; resume_path goes on from resume_from_path."""
    resume_from_path: str | None = None
    """A checkpoint, .../global_step_N, for resume_mode=resume_path."""

    @property
    def resume_problems(self) -> list[str]:
        """Sentences about these keys where they contradict each other."""
        if self.resume_mode != "resume_path" or self.resume_from_path is not None:
            return []
        return [
            "trainer.resume_from_path must name a checkpoint while trainer.resume_mode is resume_path, got null; "
            "write the folder global_step_N to go on from"
        ]
