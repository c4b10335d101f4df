"""Nothing is gathered, and nothing computed alike on all towers, that need not be: a table of programs.

`pytest tests/costs --all -k NAME` runs one row.
"""

import importlib
import pathlib
import zlib

import census
import costs
import pytest
from thorough import some

for file in sorted(pathlib.Path(__file__).parent.glob("rows_*.py")):
    importlib.import_module(file.stem)

ROWS = costs.ROWS_OF_TABLE
OF_MODELS = [name for name in ROWS if name.startswith(("bench", "application", "hub"))]
OF_OTHERS = [name for name in ROWS if name.startswith(("parity", "program"))]
OWN = [name for name in ROWS if name not in {*OF_MODELS, *OF_OTHERS}]
# Of names, not of places: a further row of a table does not change which others are asked.
EIGHTH = [name for name in OF_OTHERS if zlib.crc32(name.encode()) % 8 == 0]


def parameters(names):
    extra = pytest.mark.programs_extra
    return [pytest.param(name, marks=[extra] * bool(ROWS[name].extra), id=name) for name in names]


def check(name):
    if ROWS[name].extra:
        pytest.importorskip(ROWS[name].extra, reason=f"pip install {ROWS[name].extra}")
    costs.check(name)


@pytest.mark.slow(but=12)
@pytest.mark.parametrize("name", parameters(OWN))
def test_row(name):
    """A layer, a loss, a metric, a loop or a small program: all that its step has is listed."""
    unlisted = census.unlisted(costs.cost_of_row(name).ops)
    assert not unlisted, f"Expected a rule, or a reason in census.py, of {sorted(unlisted)}"
    check(name)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", parameters(OF_MODELS))
def test_model(name):
    """A whole model of bench's, keras.applications' or keras-hub's."""
    check(name)


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("name", parameters(some(EIGHTH, OF_OTHERS)))
def test_row_of_another_table(name):
    """A row of the parity tables, or a published program: an eighth of them, or all where thorough."""
    check(name)


def test_rows_are_many():
    """The table is not emptied by accident."""
    assert len(OWN) >= 100 and len(OF_MODELS) >= 15 and len(OF_OTHERS) >= 300


def test_a_cost_is_seen():
    """Rows that are sorted are gathered: the first thing that a row without a rule would show."""
    cost = costs.cost_of_row("sorted over the batch")
    assert cost.bytes_gathered() > cost.most_bytes and cost.share_alike() > costs.MOST_ALIKE
    assert cost.bytes_gathered({"TopKV2": ""}) == 0
    assert "gathered for TopKV2" in str(cost) and "is made whole" in str(cost)
