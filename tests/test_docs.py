"""The commands and snippets of README and docs, run as they stand, from a folder that holds a checkout alone.

Why these cases: a command that nobody runs rots. The table is read from the Markdown itself, so a new command is run
or named in NOT_RUN with what it needs; an entry there that no command has any more fails too. What one command makes
for another (tiny/wan22, images, …) is made in the order of the files, as a reader would (so they are one test); the run
and the table of prompts that they call runs/NAME and bench.csv are made beforehand.
"""

import os
import re
import shlex

import pytest
from tiny_run import start

ROOT = __import__("pathlib").Path(__file__).resolve().parent.parent
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = {
    "make ": "runs this suite, or the demo (test_demo.py)",
    "pip install ": "installs",
    "CUDA_VISIBLE_DEVICES=": "needs GPUs",
    "prefgrpo judge serve ": "needs a GPU (test_judge_serve.py runs it with a small model)",
    "prefgrpo judge check ": "needs the judge that the line above serves (test_judge_endpoints.py)",
    "prefgrpo reward serve ": "needs the reward's weights, and does not end (test_reward_serve.py)",
    "curl ": "needs the server of the line above",
    "torchrun ": "abbreviated (test_score.py runs it on two ranks)",
    """prefgrpo score --reward-spec '["clip","aesthetic","pickscore"]'""": (
        "downloads three checkpoints; docs/scoring.md has the same command with another reward, which is run"
    ),
}
"""How commands begin that are not run (or, with $, all of them), and why."""
SNIPPETS = {"README.md": 1, "docs/integrations.md": 1}
"""Python blocks that must be there and run (docs/ops.md: test_ops_docs.py)."""


def commands():
    """(file, command) of every line in a ```bash block, continued lines joined, comments taken off."""
    for file in FILES:
        for block in re.findall(r"^```bash\n(.*?)^```", file.read_text(), re.S | re.M):
            for line in block.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    text = re.sub(r"\s+", " ", line[: re.search(r"\s+#\s|$", line).start()]).strip()
                    yield file.relative_to(ROOT).as_posix(), text, words


def why_not(text):
    return next((why for head, why in NOT_RUN.items() if f"{text}$".startswith(head)), "")


FOUND = list(commands())
RUN = [(file, text, words) for file, text, words in FOUND if not why_not(text)]


def _enter():
    os.chdir(os.environ["DOCS_PLACE"])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A checkout's recipes, assets and docs, a finished run and a table of prompts."""
    folder = tmp_path_factory.mktemp("clean")
    for name in ("scripts", "prefgrpo", "docs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "bench.csv").write_text("index,prompt\n0,a red circle on the left\n1,a blue square on the right\n")
    short = "--train.steps 1 --train.updates-per-rollout 1 --rollout.prompts-per-step 2 --eval.max-prompts 2"
    prefgrpo(folder, ["train", "scripts/demo/demo.yaml", "--name", "NAME", "--judge.log", "true", *short.split()])
    return folder


def prefgrpo(folder, argv):
    """Run a command in `folder`; fails unless it ends with 0."""
    run = start(argv, folder / "command.log", _enter, DOCS_PLACE=str(folder), HF_HUB_OFFLINE="1")
    assert run.wait(600) == 0, run.output
    return run.output


def test_every_exception_is_still_there_and_every_other_command_is_ours():
    for head in NOT_RUN:
        assert any(f"{text}$".startswith(head) for _, text, _ in FOUND), f"no command begins with {head!r} any more"
    assert [text for _, text, words in RUN if words[0] != "prefgrpo"] == []
    assert {file for file, _, _ in RUN} >= {"README.md", "docs/training.md", "docs/judging.md", "docs/scoring.md"}


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_commands_of_the_docs_run(place):
    for file, text, words in RUN:
        assert prefgrpo(place, words[1:]).strip(), f"{file}: {text} says nothing"


@pytest.mark.parametrize("file", SNIPPETS)
def test_a_snippet_runs_as_it_stands(file):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / file).read_text(), re.S | re.M)
    assert len(blocks) == SNIPPETS[file]
    for block in blocks:
        exec(compile(block, file, "exec"), {})
