"""The commands and snippets in README and docs, run verbatim in a folder that contains only a checkout.

Why these cases: commands that nobody runs go stale. They are read from the Markdown itself, so each new command is
either run or listed in NOT_RUN with what it needs; an entry that matches no command any more fails. Commands may use
what earlier ones made (tiny/wan22, images, …), so they run in the order of the files, as one test; the run and the
prompt table that the docs call runs/NAME and bench.csv are made beforehand. A block with a title is a file that the
reader creates, so we write it. Messages quoted in docs/troubleshooting.md must be those of the code.
"""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from ranks import start

from benchmarks import recipes, step_time
from prefgrpo.commands.cli import read, split
from prefgrpo.config.loading import PEERS, load
from prefgrpo.rollout.assignment import busy_share
from prefgrpo.run.errors import batch_errors
from prefgrpo.update.memory import GIB

ROOT = Path(__file__).resolve().parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = {
    "make ": "runs this suite, or the demo (tests/project/test_demo.py)",
    "pip install ": "installs",
    "CUDA_VISIBLE_DEVICES=": "needs GPUs",
    "prefgrpo judge prompts ": "downloads from the publisher (tests/judge/test_published.py reads checkouts)",
    "prefgrpo judge serve ": "needs a GPU (tests/judge/test_vllm.py runs it with a small model)",
    "prefgrpo judge check ": "needs the judge that the line above serves (tests/judge/test_http.py)",
    "prefgrpo reward serve ": "needs the reward's weights, and does not end (tests/rewards/test_serve.py)",
    "curl ": "needs the server of the line above",
    "torchrun ": "abbreviated (tests/commands/test_score.py runs it on two ranks)",
    """prefgrpo score --rewards '["clip","aesthetic","pickscore"]'""": (
        "downloads three checkpoints; docs/scoring.md has the same command with another reward, which is run"
    ),
}
"""Prefix of a command that is not run (with a final $: the whole command) → reason."""
SNIPPETS = {"README.md": 1, "docs/ops.md": 8}
"""Number of Python blocks per page, all of which must run."""


def commands():
    """(file, command, its words) for every line in a ```bash block; continued lines joined, comments removed."""
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
    """A folder with the checkout's recipes, assets and docs, two finished runs and a prompt table."""
    folder = tmp_path_factory.mktemp("clean")
    for name in ("scripts", "prefgrpo", "docs"):
        (folder / name).symlink_to(ROOT / name)
    for page in FILES:
        for name, text in re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', page.read_text(), re.S | re.M):
            (folder / name).write_text(text)
    (folder / "bench.csv").write_text("index,prompt\n0,a red circle on the left\n1,a blue square on the right\n")
    short = "--train.steps 1 --train.updates-per-rollout 1 --rollout.prompts-per-step 2 --eval.max-prompts 2"
    prefgrpo(folder, ["train", "scripts/demo/demo.yaml", "--name", "NAME", *short.split()])
    shutil.copytree(folder / "runs" / "NAME", folder / "runs" / "OTHER")
    return folder


def prefgrpo(folder, argv):
    """Run a command in `folder`; fails unless it exits with 0."""
    run = start(argv, folder / "command.log", _enter, DOCS_PLACE=str(folder), HF_HUB_OFFLINE="1")
    assert run.wait(600) == 0, run.output
    return run.output


def test_every_exception_is_still_there_and_every_other_command_is_ours():
    for head in NOT_RUN:
        assert any(f"{text}$".startswith(head) for _, text, _ in FOUND), f"no command begins with {head!r} any more"
    assert [text for _, text, words in RUN if words[0] not in ("prefgrpo", "python")] == []
    assert {file for file, _, _ in RUN} >= {
        "README.md", "docs/objectives.md", "docs/evaluation.md", "docs/scoring.md", "docs/tutorial.md"
    }  # fmt: skip


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_commands_of_the_docs_run(place):
    for file, text, words in RUN:
        if words[0] == "python":
            subprocess.run([sys.executable, *words[1:]], cwd=place, check=True, timeout=600)
        else:
            assert prefgrpo(place, words[1:]).strip(), f"{file}: {text} prints nothing"
    logged = [json.loads(line) for line in (place / "runs" / "tutorial" / "metrics.jsonl").read_text().splitlines()]
    rewards = {"my_rewards.py:right_colour", "jpeg_compressibility", "vlm_pairwise"}
    assert {f"reward/{name}" for name in rewards} <= logged[1].keys()
    assert (place / "with_lora.png").is_file() and json.loads((place / "before.json").read_text())


def test_the_command_for_8_gpus_fits_its_recipe():
    """7 training GPUs have equal work, and every option is a field."""
    (words,) = [words for file, text, words in FOUND if file == "README.md" and "--nproc_per_node" in text]
    recipe = words.index("train") + 1
    left, values = split(words[recipe + 1 :], ())
    config = read(ROOT / words[recipe], values)
    ranks = int(words[words.index("--nproc_per_node") + 1])
    assert left == [] and batch_errors(config) == [] and busy_share(config, ranks) == 1.0
    assert [entry.options["plan"] for entry in config.rewards] == ["k_regular(2)"]
    assert len(words[0].split("=")[1].split(",")) == ranks


@pytest.mark.full
@pytest.mark.parametrize("file", SNIPPETS)
def test_a_snippet_runs_as_it_stands(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the front door writes a run
    for name in ("scripts", "prefgrpo"):
        (tmp_path / name).symlink_to(ROOT / name)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / file).read_text(), re.S | re.M)
    assert len(blocks) == SNIPPETS[file]
    for block in blocks:
        exec(compile(block, file, "exec"), {"__name__": "__main__"})


def test_the_estimate_for_8_gpus_is_that_of_its_commands():
    config = load(ROOT / "scripts/prefgrpo/lora_flux.yaml")
    minutes = sum(step_time.step_seconds(config, 8).values()) / 60
    row = recipes.count(config, 8)
    images = config.rollout.prompts_per_step * config.rollout.group_size
    said = (ROOT / "README.md").read_text().split("8 H100s, estimated**: ")[1].split("\n\n")[0]
    assert said.startswith(f"{minutes:.0f} minutes for a step of {images} images at {config.rollout.height}² (")
    assert f"on each GPU {(row.weights + row.stored) / GIB:.0f} GiB of weights and stored samples" in said


def said():
    """Every string constant in the package's code."""
    for file in (ROOT / "prefgrpo").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_messages_and_metrics_of_troubleshooting_are_those_of_the_code():
    page, texts = (ROOT / "docs" / "troubleshooting.md").read_text(), "\n".join(said())
    lines = [line for block in re.findall(r"^```text\n(.*?)^```", page, re.S | re.M) for line in block.splitlines()]
    parts = {part.strip(" ()") for line in lines for part in re.split("…|[,;:] ", line)} - {""}
    named = {*re.findall(r"`((?:judge|policy|reward|advantage)/\w+|grad_norm|samples_trained)`", page)}
    named -= {"reward/NAME_std"}
    assert len(lines) >= 8 and len(named) >= 5
    assert [text for text in parts if text not in texts] == []
    assert [name for name in named if name not in texts and name.split("/")[-1] not in texts] == []


def test_the_migration_table_is_the_one_that_hints_come_from():
    table = (ROOT / "docs" / "recipes.md").read_text().split("## Coming from another codebase")[1].split("\n## ")[0]
    listed = set()
    for ours, theirs in re.findall(r"^\| (`.*?) \|(.*)\|$", table, re.M):
        listed |= set(product(re.findall(r"\w+", ours), re.findall(r"\w+", theirs)))
    hinted = {(ours.split(".")[-1], name) for ours, theirs in PEERS.items() for name in theirs.split()}
    assert listed and hinted - listed == set()


def test_the_hardware_page_names_every_model_and_prompt_file_of_the_recipes():
    page = (ROOT / "docs" / "recipes.md").read_text()
    shipped = [path for path in (ROOT / "scripts").glob("*/[!_]*.yaml") if path.parent.name != "demo"]
    recipes = [load(path) for path in shipped]
    named = {name for r in recipes for name in (r.model.split("/")[-1], Path(r.data.prompts).name)}
    assert len(named) > 20 and [name for name in named if name not in page] == []
