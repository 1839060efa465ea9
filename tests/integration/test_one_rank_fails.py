"""Where one rank has no graph for a step, none is left waiting for it: real gloo ranks."""

from __future__ import annotations

from pathlib import Path

from tests.integration.launch import run_ranks

WORKER = Path(__file__).with_name("one_rank_fails_worker.py")


def test_every_rank_hears_of_the_rank_that_failed() -> None:
    told, failed = run_ranks(WORKER, 2, timeout=90)
    for what, own in (("capture", "CaptureError"), ("compile", "ConfigError")):
        assert told[what].startswith(f"VerificationError: rank 1 could not {what} the step: {own}")
        assert failed[what].startswith(f"{own}: ")
    assert told["afterwards"] == failed["afterwards"] == ""
    assert failed["later"].startswith("CaptureError: ")
    assert told["later"].startswith(
        "VerificationError: rank 1 could not capture the step again, CaptureError: "
    )
    lost = told["lost"]
    assert lost.startswith("CollectiveError: the exchange of decisions between ranks failed"), lost
    assert lost.endswith("Another rank has ended, or did not arrive.") and "pass '" not in lost
    # at once, not when its time ran out
    assert "Connection" in told["cause"] and "Timed out" not in told["cause"]
