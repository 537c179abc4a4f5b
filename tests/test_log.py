"""metrics.jsonl as it is found after crashes, full disks and edits by hand.

A line that is not a row costs only itself, wherever it stands; only a last line without its end is normal, because a
killed run leaves one. Expected rows are those that the test wrote.
"""

import json

import pytest

from prefgrpo.run.log import Log, read_metrics
from prefgrpo.run.run_folder import RunFolder

ROWS = [{"kind": "train", "step": step, "loss": 0.5} for step in (1, 2, 3)]
LINES = [json.dumps(row).encode() + b"\n" for row in ROWS]
FILES = {
    "whole": (LINES, [1, 2, 3], []),
    "torn end": ([*LINES, b'{"kind": "tr'], [1, 2, 3], []),
    "last line without its end, but whole": ([*LINES[:2], LINES[2][:-1]], [1, 2, 3], []),
    "bytes that are no text at the end": ([*LINES, b'\xff\xfe\x80{"ki'], [1, 2, 3], []),
    "zeros at the end": ([*LINES, bytes(100)], [1, 2, 3], []),
    "torn line in the middle": ([LINES[0], b'{"kind": "train", "st\n', LINES[2]], [1, 3], [2]),
    "bytes that are no text in the middle": ([LINES[0], b"\xff\xfe\x80\n", b"\n", LINES[2]], [1, 3], [2]),
    "JSON that is not a row": (
        [b'3\n[1]\nnull\n"x"\n{"step": 4}\n{"kind": "train", "step": true}\n{"kind": ["train"], "step": 1}\n', *LINES],
        [1, 2, 3],
        [1, 2, 3, 4, 5, 6, 7],
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_damaged_line_costs_only_itself(tmp_path, capsys, case):
    lines, steps, wanted = FILES[case]
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"".join(lines))
    damaged = []
    assert [row["step"] for row in read_metrics(file, damaged)] == steps and damaged == wanted
    log = Log(RunFolder(tmp_path), 10, 2, active=True)  # resumed after step 2
    for row in ROWS:
        log.row("train", row["step"], {"loss": 0.5})
    log.close()
    assert ("dropped damaged lines" in capsys.readouterr().out) is bool(wanted)
    assert file.read_bytes() == b"".join(LINES)
