"""Run a notebook's cells as its kernel does, and keep their outputs.

`python tests/support/notebooks.py examples/quickstart.ipynb` writes the outputs of a run into the file.
"""

import contextlib
import io
import json
import pathlib
import re
import sys
from typing import Any

from IPython.core.interactiveshell import InteractiveShell


def run(cells: list[dict[str, Any]]) -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
    """Run code cells in turn; return the outputs of each, as a notebook holds them, and the names that are left."""
    shell, found = InteractiveShell.instance(), []
    for number, cell in enumerate(cells, start=1):
        shown: list[dict[str, str]] = []
        hook = shell.displayhook
        hook.write_output_prompt = hook.finish_displayhook = lambda: None
        hook.write_format_data = lambda data, metadata=None, shown=shown: shown.append(data)
        streams = {"stderr": io.StringIO(), "stdout": io.StringIO()}
        with contextlib.redirect_stdout(streams["stdout"]), contextlib.redirect_stderr(streams["stderr"]):
            shell.run_cell("".join(cell["source"]), store_history=True).raise_error()
        outputs = [
            {"output_type": "stream", "name": name, "text": text.getvalue().splitlines(keepends=True)}
            for name, text in streams.items()
            if text.getvalue()
        ]
        for data in shown:
            text = {"text/plain": data["text/plain"].splitlines(keepends=True)}
            outputs.append({"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": text})
        found.append(outputs)
    return found, shell.user_ns


def form(outputs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the kind of each output, and its text without numbers, units of time and the widths of tables."""
    found = []
    for one in outputs:
        text = "".join(one.get("text", one.get("data", {}).get("text/plain", "")))
        text = re.sub(r"\d[\d.]*(e-?\d+)?", "0", text)
        text = re.sub(r"0(s|ms|us)\b", "0s", re.sub(r"─+", "─", text))
        found.append((one.get("name", one["output_type"]), " ".join(text.split())))
    return found


def main(path: str) -> None:
    """Write the outputs of a run into a notebook."""
    file = pathlib.Path(path)
    notebook = json.loads(file.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, outputs) in enumerate(zip(cells, run(cells)[0], strict=True), start=1):
        cell["outputs"], cell["execution_count"] = outputs, number
    file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
