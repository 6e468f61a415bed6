"""What a player's message says: its move, outside the thinking."""

from __future__ import annotations

from cotutor.rollout.verifiers.extraction import last_tag, visible

MAX_MOVE_CHARS = 2000  # games search a move with patterns that aren't linear


def move_of(message: str) -> tuple[str, bool]:
    """Return the move, and whether it stood in a tag.

    Args:
        message: the player's whole turn.

    Returns:
        The content of the last closed `<answer>…</answer>`, else everything outside the thinking;
        stripped, and cut to its last characters.
    """
    text = visible(message)
    tagged = last_tag(text, "answer")
    return (text if tagged is None else tagged).strip()[-MAX_MOVE_CHARS:], tagged is not None
