"""The comparison with plain C runs, and both get right results; what it measures is told, not judged."""

import json
import pathlib
import sys

import isolated
import pytest

SCRIPT = pathlib.Path(__file__).with_name("overhead.py")


def test_comparison(tmp_path):
    """A row for each size, in a table and in JSON, with times that belong together."""
    ranks, result = 2, tmp_path / "overhead.json"
    arguments = ["--ranks", str(ranks), "--sizes", "1024", "65536", "--rounds", "2", "--json", str(result)]
    command = [sys.executable, SCRIPT, *arguments, "--limit", "120"]
    printed = isolated.run_command("the comparison", command, 120.0)
    told = json.loads(result.read_text())
    assert (told["ranks"], [row["bytes"] for row in told["rows"]]) == (ranks, [1024, 65536])
    for row in told["rows"]:
        ours, plain = row["ncclsync"], row["c"]
        assert 0 < plain["tenth_us"] <= plain["median_us"] <= plain["ninetieth_us"]
        assert ours["median_us"] == pytest.approx(plain["median_us"] * row["ratio"])
        assert ours["busbw_gb_per_s"] == pytest.approx(2 * (ranks - 1) / ranks * ours["algbw_gb_per_s"])
    assert "|   1 KiB |" in printed and "|  64 KiB |" in printed
