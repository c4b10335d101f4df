"""The script that runs Keras' own tests on towers, on tests made here."""

import argparse
import json

import keras_suite
import pytest

TINY = '''
"""Stands for a file of Keras' tests."""
import unittest

import keras
import numpy as np


class Tiny(unittest.TestCase):
    def make_model(self):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    def test_trains(self):
        model = self.make_model()
        model.fit(np.ones((4, 3)), np.ones((4, 1)), batch_size=2, verbose=0)
        self.assertEqual(int(model.optimizer.iterations), 2)

    def test_new_failure(self):
        self.assertFalse(hasattr(self.make_model(), "towers"), "on two")

    def test_known_failure(self):
        self.assertNotIn("make_train_function", vars(self.make_model()))

    def test_fails_plainly(self):
        self.make_model()
        self.fail("always")

    def test_numbers(self):
        self.assertEqual(1 + 1, 2)
'''


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_what_fails_on_towers_alone_is_told(tmp_path, capsys):
    """A test passes, one fails on towers, one is known to, one fails plainly too."""
    path, told = tmp_path / "tiny_test.py", tmp_path / "told.json"
    path.write_text(TINY)
    (tmp_path / "none_test.py").write_text("def test_nothing():\n    assert False\n")
    arguments = [str(tmp_path), "--json", str(told)]
    name = f"{tmp_path.name}/tiny_test.py::Tiny::"
    known = {"*::test_known_failure": "Keras' own function is replaced, on the one object"}
    assert keras_suite.main(arguments, known) == 1
    printed = capsys.readouterr().out
    assert "1 files ran, 1 compile no model and did not\n5 tests on towers: 2 passed, 0 skipped, 3 failed" in printed
    assert "4 put a model on towers, 1 trained one there, by 2 calls of a step\n" in printed
    assert "fail on towers: 2, of these known: 1\n  known (1) *::test_known_failure: Keras' own" in printed
    assert f"  {name}test_new_failure: failed: AssertionError: True is not false : on two\n" in printed
    assert f"either: 1\n  {name}test_fails_plainly: failed: AssertionError: always" in printed
    (file,) = [keras_suite.read(one) for one in json.loads(told.read_text())]
    assert file.towers[f"{name}test_trains"] == keras_suite.Test("passed", compiled=1, attached=1, trained=2)

    known["*::test_new_failure"] = "a reason"
    assert keras_suite.summarize([file], 1, known)[1]
    known[f"{name}test_trains"] = "no more"
    text, good = keras_suite.summarize([file], 1, known)
    assert not good and f"known, but passes on towers as well: {name}test_trains" in text


@pytest.mark.slow
def test_a_process_that_ends_takes_no_other_test_along(tmp_path):
    """A test that hangs, or ends its process, is a failure; those behind it run."""
    path = tmp_path / "ends_test.py"
    path.write_text(
        "import os, time\n"
        "def test_before(): pass\n"
        "def test_ends(): os._exit(3)\n"
        "def test_between(): pass\n"
        "def test_hangs(): time.sleep(600)\n"
        "def test_behind(): pass\n"
    )
    options = argparse.Namespace(words=None, limit=3.0)
    tests, error = keras_suite.run_file(path, "ends_test.py", None, None, options)
    outcomes = {name.partition("::")[2]: test.outcome for name, test in tests.items()}
    assert error == ""
    assert outcomes == {
        "test_before": "passed",
        "test_ends": "ended",
        "test_between": "passed",
        "test_hangs": "ended",
        "test_behind": "passed",
    }
    assert tests["ends_test.py::test_ends"].message.startswith("exit code 3")
    assert tests["ends_test.py::test_hangs"].message.startswith("nothing for 3 s")


def test_a_file_that_cannot_be_imported_is_told(tmp_path, capsys):
    """It does not pass plainly here, which is no fault of towers."""
    path = tmp_path / "lacks_test.py"
    path.write_text("import nowhere_to_be_found  # compile(\ndef test_nothing(): pass\n")
    options = argparse.Namespace(words=None, limit=60.0)
    tests, error = keras_suite.run_file(path, "lacks_test.py", None, None, options)
    assert tests == {} and "No module named 'nowhere_to_be_found'" in error
    file = keras_suite.File("lacks_test.py", error=error, plain_error=error)
    text, good = keras_suite.summarize([file], 0, {})
    assert good and f"either: 1\n  lacks_test.py: {error}" in text
    # One that towers alone keep from being imported is a failure.
    file = keras_suite.File("lacks_test.py", error=error)
    text, good = keras_suite.summarize([file], 0, {})
    assert not good and f"  lacks_test.py: {error}" in text


def test_a_folder_that_is_none_is_an_error():
    """Told with the folders that there are."""
    with pytest.raises(SystemExit, match="such as trainers, callbacks"):
        keras_suite.find_files(["no_such_folder"])


def test_every_known_failure_has_a_reason():
    """And names a file."""
    for pattern, reason in {**keras_suite.KNOWN}.items():
        assert "_test.py::" in pattern and len(reason.split()) > 3, pattern
