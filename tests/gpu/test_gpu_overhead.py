"""The comparison with plain C runs, and all get right results; what it measures is told, not judged."""

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
        ours, launcher, plain = row["ncclsync"], row["launcher"], row["c"]
        for one in (ours, launcher, plain):
            assert 0 < one["tenth_us"] <= one["median_us"] <= one["ninetieth_us"]
        assert launcher["median_us"] == pytest.approx(plain["median_us"] * row["launcher_ratio"])
        assert ours["median_us"] == pytest.approx(plain["median_us"] * row["ratio"])
        assert ours["busbw_gb_per_s"] == pytest.approx(2 * (ranks - 1) / ranks * ours["algbw_gb_per_s"])
    assert "|   1 KiB |" in printed and "|  64 KiB |" in printed
    words = dict(zip([1024, 65536], ["1 KiB", "64 KiB"], strict=True))
    above = [words[row["bytes"]] for row in told["rows"] if row["launcher_ratio"] > 1.05]
    where = f"at {', '.join(above)}" if above else "nowhere"
    assert f"The launcher takes more than 1.05 times as long as C: {where}\n" in printed
