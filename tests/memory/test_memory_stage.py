"""The additive formula of a stage's bytes."""

from __future__ import annotations

from autosplit.memory.stage import stage_bytes


def test_peak_is_static_and_in_flight_and_the_worst_transient() -> None:
    stage = stage_bytes(static_bytes=1000, resident_bytes=30, in_flight=4, transients=(5, 17, 2))
    assert (stage.activation_bytes, stage.transient_bytes, stage.peak_bytes) == (120, 17, 1137)


def test_a_stage_without_nodes_needs_nothing() -> None:
    assert stage_bytes(static_bytes=0, resident_bytes=0, in_flight=3, transients=()).peak_bytes == 0
