"""Each process reads its own part of the data: batches are those of one device that reads all of it."""

import re
import subprocess
import sys

import numpy as np
import pytest
from processes import ROOT, SCRIPTS, environment


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("towers, samples, alone", [("2,2", "32,32", 4), ("2,1", "37,7", 1), ("1,2,1", "13,17,5", 1)])
def test_as_one_process_with_all_batches(mpirun, tmp_path, towers, samples, alone):
    """Even parts to the bit; uneven ones, some of which end earlier, within rounding. Each reads its own samples."""
    command = [sys.executable, str(SCRIPTS / "local.py"), str(tmp_path), towers, samples, str(alone)]
    subprocess.run(command, env=environment(), check=True, capture_output=True, timeout=200)
    expected, count = dict(np.load(tmp_path / "0.npz")), towers.count(",") + 1
    done = mpirun(count, "local.py", tmp_path, towers, samples, timeout_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(count):
        found = dict(np.load(tmp_path / f"{rank}.npz"))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if alone > 1:
                np.testing.assert_array_equal(found[name], value, err_msg=name)
            np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6, err_msg=name)
        said = " ".join(line for line in done.stdout.split("\n") if line.startswith(f"[{rank}]"))
        own = int(samples.split(",")[rank])
        assert f"loads {2 * own}, {own}" in said
        words = ["known number of samples.*assert_cardinality", "the same batch_size", "as many batches in process 0"]
        words += ["class_weight=, in whose place", "Give the Local itself to fit"]
        assert re.search(".*".join(words), said), done.stdout


@pytest.mark.slow
def test_files_by_shard(mpirun):
    """The example: each process reads half of the files, and both see the same loss."""
    done = mpirun(2, ROOT / "examples" / "own_part.py")
    found = re.findall(r"process (\d) of 2 read 384 samples: loss (\S+)", done.stdout)
    assert sorted(rank for rank, _ in found) == ["0", "1"] and len({loss for _, loss in found}) == 1, done
