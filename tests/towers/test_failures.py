"""What has failed is raised once, whoever asks first; what rests on it is not used."""

import types

import numpy as np
import pytest
import tensorflow as tf
from parity import mlp, on_towers

from ncclsync import NcclSyncError
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.errors import NcclError, ProcessError
from ncclsync.towers.failures import Failures

FIRST, SECOND = NcclError(1, "first"), NcclError(2, "second")


def failures_of(saved=None):
    """Return failures with a communicator that has launched two groups for a step, which writes variable 7."""
    told = []
    communicator = types.SimpleNamespace(
        groups=lambda: (2, 0),
        failure=None,
        failed_group=1,
        was_delivered=True,
        agreed=2,
        peers=None,
        report_failure=told.append,
        interrupt=lambda: None,
    )
    communicator.find_failure = lambda: communicator.failure
    made = Failures(lambda user: communicator)
    made.save_by(saved)
    made.add(frozenset({7}))
    return made, communicator, told


def test_raised_once():
    """Not again while the towers are not joined yet, nor afterwards; the next failure is another."""
    failures, communicator, _ = failures_of()
    for failure in (FIRST, SECOND):
        communicator.failure = failure
        with pytest.raises(NcclError) as caught:
            failures.check()
        assert caught.value is failure
        failures.check()
        communicator.failure = None
        failures.check()


@pytest.mark.parametrize("is_raised", [False, True])
def test_a_failure_that_a_reader_gets(is_raised):
    """Counts as raised only to a reader that passes it on; another one may swallow it."""
    failures, communicator, _ = failures_of()
    result = tf.constant(1.0)
    failures.add(frozenset({8}), result)
    communicator.failure = FIRST
    with pytest.raises(NcclError):
        vars(result)["_numpy_internal"](is_raised=is_raised)
    if not is_raised:
        with pytest.raises(NcclError):
            failures.check()
    failures.check()
    with pytest.raises(NcclError):  # each time
        result.numpy()
    assert failures.lost == {7, 8}


def test_another_model_joins_the_towers_again():
    """The failure is kept, and a step that was enqueued meanwhile rests on it."""
    failures, communicator, _ = failures_of()
    communicator.failure = FIRST
    failures.keep()
    communicator.failure = None
    failures.add(frozenset({8}), tf.constant(1.0))
    assert failures.lost == {7, 8}
    with pytest.raises(NcclError, match="first"):
        failures.check()
    failures.check()
    failures.replaced(8)
    with pytest.raises(NcclSyncError, match=r"x that a step wrote .*first returned"):
        failures.raise_lost(lambda: "x")


@pytest.mark.parametrize(("was_delivered", "agreed"), [(False, 2), (True, 0)])
def test_what_has_received_nothing_is_not_lost(was_delivered, agreed):
    """Nor what a step wrote that not all processes had launched."""
    failures, communicator, _ = failures_of()
    communicator.was_delivered, communicator.agreed, communicator.failure = was_delivered, agreed, FIRST
    with pytest.raises(NcclError):
        failures.check()
    assert not failures.lost


def test_a_lost_variable_is_whole_once_all_of_it_was_written(tmp_path):
    """By an assignment, or from a checkpoint; not by a write that fails, or that reads what is lost."""
    model = on_towers(mlp, 2)
    weight = tf_compat.backend_variable(model.weights[0])
    saved, lost = tf.train.Checkpoint(weight=weight), model.towers.session.failures.lost
    path, value = saved.save(tmp_path / "saved"), weight.numpy()
    model.towers.replicas.of(weight)
    for write in (lambda: weight.assign(value), lambda: saved.restore(path)):
        lost.add(id(weight))
        with pytest.raises(ValueError, match="shape"):
            weight.assign(np.zeros([7, 7]))
        with pytest.raises(NcclSyncError, match="variables that are whole"):
            weight.assign_add(value)
        write()
        np.testing.assert_array_equal(weight, value)


def test_the_cause_of_a_step():
    """Python's error in its graph, unless another process has caused it; a failure; the error itself, which is told."""
    saves = []
    failures, communicator, told = failures_of(lambda: saves.append(communicator.failure))
    raised, wrapped = ValueError("in the graph"), tf.errors.UnknownError(None, None, "ValueError: in the graph")
    assert failures.cause_of(wrapped) is wrapped and told == [wrapped]
    failures.put(raised)
    assert failures.cause_of(wrapped) is raised
    assert failures.cause_of(wrapped) is wrapped  # once
    failures.put(raised)
    failures.forget()
    assert failures.cause_of(wrapped) is wrapped
    communicator.failure = FIRST
    assert not saves and failures.cause_of(wrapped) is FIRST and saves == [FIRST]
    assert failures.cause_of(wrapped) is FIRST and saves == [FIRST]
    failures.check()
    communicator.failure = SECOND
    failures.put(ProcessError("of another"))
    assert str(failures.cause_of(wrapped)) == "of another" and saves == [FIRST, SECOND]
    assert told == [wrapped] * 3


def test_a_ctrl_c_is_the_cause_of_what_fails_with_it():
    """Neither the failure nor Python's error is raised later."""
    failures, communicator, _ = failures_of(pytest.fail)
    pressed, communicator.failure = KeyboardInterrupt(), FIRST
    failures.put(ValueError("in the graph"))
    assert failures.cause_of(pressed) is pressed
    failures.check()
    error = NcclSyncError("a later one")
    communicator.failure = None
    assert failures.cause_of(error) is error
