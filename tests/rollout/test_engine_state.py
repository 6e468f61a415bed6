"""What an engine refuses, whatever samples behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cotutor.rollout.engine_state import EngineState, refuse_expandable_segments

ACTIONS: dict[str, Callable[[EngineState], object]] = {
    "generate": EngineState.generate,
    "load": EngineState.begin_load,
    "sleep 1": lambda s: s.sleep(1),
    "sleep 2": lambda s: s.sleep(2),
    "wake": EngineState.wake,
    "load all": lambda s: (s.begin_load(), s.end_load()),
    "close": EngineState.close,
}


@pytest.mark.parametrize(
    ("before", "refused", "message"),
    [
        (["sleep 1"], ["generate", "load", "sleep 1", "sleep 2"], r"asleep \(level 1\)"),
        (["sleep 2"], ["load", "sleep 1", "sleep 2"], r"asleep \(level 2\)"),
        (["sleep 2"], ["generate"], "hand all weights over"),
        (["sleep 2", "wake"], ["generate"], "without complete weights; hand all weights over"),
        (["sleep 2", "wake", "sleep 1", "wake"], ["generate"], "without complete weights"),
        (["load"], ["generate"], "without complete weights"),
        (["load", "sleep 1", "wake"], ["generate"], "without complete weights"),
        ([], ["wake"], "the engine is awake"),
        (["sleep 1", "wake"], ["wake"], "the engine is awake"),
        (["close"], ["generate", "load", "sleep 1", "sleep 2", "wake"], "the engine is closed"),
        (["sleep 1", "close"], ["wake", "generate"], "the engine is closed"),
    ],
)
def test_refused(before: list[str], refused: list[str], message: str) -> None:
    for action in refused:
        state = EngineState()
        for step in before:
            ACTIONS[step](state)
        with pytest.raises(RuntimeError, match=f"can't .*{message}"):
            ACTIONS[action](state)


def test_allowed_and_versions() -> None:
    state = EngineState(stale=True)
    with pytest.raises(RuntimeError, match="without complete weights"):
        state.generate()
    for action in ("load all", "generate", "sleep 1", "wake", "generate"):
        ACTIONS[action](state)
    assert state.version == 1
    for action in ("sleep 2", "wake", "load", "load all", "generate"):
        ACTIONS[action](state)
    assert state.version == 2
    assert state.close()
    assert not state.close()


def test_levels() -> None:
    with pytest.raises(ValueError, match="level 1 or 2, not 3"):
        EngineState().sleep(3)


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_by_name(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "max_split_size_mb:512, expandable_segments:True")
    with pytest.raises(RuntimeError, match=f"{variable} has expandable_segments:True"):
        refuse_expandable_segments()
    monkeypatch.setenv(variable, "max_split_size_mb:512,expandable_segments:False")
    refuse_expandable_segments()
