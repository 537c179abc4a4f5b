"""The recipes in scripts/METHOD/, dry-run on a tiny pipeline of their family with only model and prompts changed; some
train with a judge over HTTP.

Why these cases: a recipe breaks when a field is renamed or a value no longer fits its family (frames, a second guidance
scale, LoRA targets, a window), and users change only the model and the prompts.
"""

import json
import re
from collections import Counter
from dataclasses import replace
from inspect import signature

import pytest
import torch
import yaml
from PIL import Image
from servers import JudgeServer, images
from world import QUICK, linked, rows, tree

from benchmarks.recipes import GPUS, MODELS, NEVER_ON_GPU, count
from benchmarks.recipes import main as print_table
from prefgrpo import trainer as trainer_module
from prefgrpo.commands import cli
from prefgrpo.commands.cli import main
from prefgrpo.config.loading import flat_fields, from_dict, load, recipe_values
from prefgrpo.config.recipe import flatten, read_yaml
from prefgrpo.config.schema import Config, JudgeConfig
from prefgrpo.models import MODELS as FAMILIES
from prefgrpo.models import makes_clips
from prefgrpo.objectives import make_objective
from prefgrpo.parallel.world import Layout, World
from prefgrpo.rewards import load_class
from prefgrpo.rollout.assignment import assign_batches
from prefgrpo.run.errors import batch_errors, idle_errors, reward_errors
from prefgrpo.run.notes import idle_warning
from prefgrpo.update.memory import stored_bytes

FOLDER = __import__("pathlib").Path(__file__).resolve().parents[2] / "scripts"
RECIPES = sorted(p for p in FOLDER.glob("*/*.yaml") if p.stem.startswith(("lora_", "full_")))
PLAIN = [p for p in RECIPES if p.parent.name == "prefgrpo"]
"""One recipe per family and task, with a pairwise judge as its only reward."""
PAIRS = sorted(FOLDER.glob("prefgrpo/pairs_*.yaml"))
"""Recipes that train on pairs from a file."""


def name_of(recipe):
    """The run's name: lora_METHOD_REST for scripts/METHOD/lora_REST.yaml."""
    kind, _, rest = recipe.stem.partition("_")
    return f"{kind}_{recipe.parent.name}_{rest}"


def cases(recipes, quick):
    """Recipes as test parameters; all except those in `quick` are marked `full`."""
    return [pytest.param(p, id=name_of(p), marks=() if p in quick else pytest.mark.full) for p in recipes]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = linked(tmp_path_factory.mktemp("recipes"), FAMILIES)
    Image.new("RGB", (80, 120), "red").save(folder / "a.png")
    return folder


def options(place, recipe):
    """The only options changed from the recipe: model and prompts, with the columns that its rewards need."""
    config = load(recipe)
    row = {column: "x" for entry in config.rewards for column in load_class(entry.name).meta_keys}
    if config.data.prompts.startswith(("edits", "counting_edit", "first_frames")):
        row["source_image"] = "a.png"
    prompts = place / f"{name_of(recipe)}.jsonl"
    texts = ("a red circle", "a blue square")
    prompts.write_text("".join(json.dumps({"prompt": text} | row) + "\n" for text in texts))
    return ["--model", str(place / config.family), "--data.prompts", str(prompts)]


def test_every_family_has_a_recipe_of_its_name():
    assert {load(p).family for p in PLAIN} == set(FAMILIES)
    for recipe in RECIPES:
        config = load(recipe)
        assert config.name == name_of(recipe) and config.family in recipe.stem
        assert recipe.stem.startswith("lora_" if config.train.lora_rank else "full_")
        kind = "video" if makes_clips(config) else "image"
        for entry in config.rewards:
            assert kind in load_class(entry.name).takes, (recipe.stem, entry.name)


def test_a_recipe_keeps_its_gpus_busy_and_its_batches_whole():
    """At least nine tenths of the time of its GPUs, in rollout and in update; a group without signal takes no sample
    from a batch of another. Counted from the plan, not by the product's own arithmetic."""
    for recipe in RECIPES + PAIRS:
        config = load(recipe)
        ranks = GPUS.get(name_of(recipe), 8) // (config.parallel.ring * config.parallel.ulysses)
        plan = assign_batches(config, ranks)
        assert {len(batch.places) for batch in plan} == {config.rollout.batch_size}, recipe
        assert all(len(set(batch.slots)) == 1 for batch in plan), recipe
        assert batch_errors(config) == [], recipe
        made = Counter(batch.dp_rank for batch in plan)
        assert len(plan) >= 0.9 * ranks * max(made.values()), recipe
        trained = Counter((batch.update, batch.dp_rank) for batch in plan)
        rounds = sum(max(trained[u, rank] for rank in range(ranks)) for u in {batch.update for batch in plan})
        assert len(plan) >= 0.9 * ranks * rounds, recipe


MEMORY = 79.1 * 2**30
"""Bytes of an H100 80GB as torch tells them in its OutOfMemoryError."""


def test_a_recipe_fits_its_gpus_at_the_published_size(capsys):
    """Weights and stored samples leave a fifth of an H100's memory to activations; the docs give the range that their
    command prints. lora_wan_480p: 24 clips of 16·21·60·104 latents on a group of 8 GPUs, times the states that
    its window has.
    """
    for recipe in RECIPES + PAIRS:
        config = load(recipe)
        row = count(config, GPUS.get(config.name, 8)) if config.model in MODELS else None
        assert row is None or row.weights + row.stored <= 0.8 * MEMORY, (recipe, row)
    clips = load(FOLDER / "prefgrpo" / "lora_wan_480p.yaml")
    r = clips.rollout
    whole = stored_bytes(clips, MODELS[clips.model].latent_shape(clips), Layout(), 1)
    assert whole % (r.prompts_per_step * r.group_size * 16 * 21 * 60 * 104 * 2) == 0
    assert whole + 2 * 14.3e9 > MEMORY
    assert count(clips, 8).stored * 8 == whole
    print_table([])
    rows = re.findall(r"\| 8 \| ([\d.]+) \| [\d.]+ \| 100% \|", printed := capsys.readouterr().out)
    assert len(rows) == printed.count("`lora_") and (min(map(float, rows)), max(map(float, rows))) == (0.18, 9.56)
    assert "0.2 to 10 GiB (`lora_wan22_480p`)" in (FOLDER.parent / "docs" / "recipes.md").read_text()


def test_the_page_shows_how_busy_64_gpus_are(capsys):
    """The table is what its command prints; that the number of prompts that it names keeps GPUs busy is counted from
    the plan, and no smaller multiple of the recipe's does."""
    print_table(["64"])
    printed = capsys.readouterr().out
    page = (FOLDER.parent / "docs" / "recipes.md").read_text()
    assert f"<!-- busy -->\n\n{printed}\n<!-- /busy -->" in page, "run python -m benchmarks.recipes 64"
    lines = [line.split("|")[1:-1] for line in printed.splitlines()[2:]]
    rows = {(folder.strip(), name): cells for folder, names, *cells in lines for name in re.findall(r"`(\w+)`", names)}
    assert sorted(rows) == [(p.parent.name, p.stem) for p in RECIPES]
    for recipe in RECIPES:
        config = load(recipe)
        now, _, shares, _, enough = rows[recipe.parent.name, recipe.stem]
        shares = int(shares)
        assert (
            shares * config.parallel.ring * config.parallel.ulysses == 64
            and int(now) == config.rollout.prompts_per_step
        )

        def busy(prompts, config=config, shares=shares):
            plan = assign_batches(replace(config, rollout=replace(config.rollout, prompts_per_step=prompts)), shares)
            held = Counter((batch.update, batch.dp_rank) for batch in plan)
            updates = {batch.update for batch in plan}
            return len(plan) / sum(shares * max(held[u, rank] for rank in range(shares)) for u in updates)

        multiples = range(int(now), int(enough) + 1, int(now))
        assert [busy(prompts) >= 0.9 for prompts in multiples] == [False] * (len(multiples) - 1) + [True], recipe


def test_the_page_shows_what_has_run(capsys):
    """Every recipe is in one row; the dry runs and tiny runs below are those on a CPU."""
    print_table(["ran"])
    printed = capsys.readouterr().out
    page = (FOLDER.parent / "docs" / "recipes.md").read_text()
    assert f"<!-- ran -->\n\n{printed}\n<!-- /ran -->" in page, "run python -m benchmarks.recipes ran"
    named = re.findall(r"`(\w+/\w+)`", printed)
    recipes = {f"{p.parent.name}/{p.stem}" for p in RECIPES}
    assert set(named) <= recipes and len(set(named)) == len(named)
    assert printed.count("all others") == 1 and {"prefgrpo/lora_flux"} <= set(named)
    assert set(NEVER_ON_GPU) <= set(FAMILIES)


def world_of(gpus, kind="cuda"):
    return World(0, gpus, torch.device(kind), Layout(gpus))


def test_a_run_that_leaves_half_of_its_gpus_idle_is_refused_unless_that_is_confirmed():
    config = load(FOLDER / "dancegrpo" / "full_qwen_image.yaml")
    (mistake,) = idle_errors(config, world_of(64))
    assert mistake.startswith("rollout.prompts_per_step: 16 prompts in batches of 6 keep 25% of 64 processes busy; ")
    assert "; set 64, or" in mistake and "--allow-idle (allow_idle=True in Python)" in mistake
    assert idle_errors(config, world_of(32)) == [], "half of them"
    assert idle_errors(config, world_of(64, "cpu")) == []
    assert idle_errors(replace(config, rollout=replace(config.rollout, prompts_per_step=64)), world_of(64)) == []


def test_the_note_about_idle_gpus_names_more_prompts_only_where_they_help():
    config = load(FOLDER / "dancegrpo" / "full_qwen_image.yaml")
    assert idle_warning(config, 64).endswith("a multiple of 64, or rollout.prompts_per_step 64")
    nearly = replace(config, rollout=replace(config.rollout, prompts_per_step=61))
    assert idle_warning(nearly, 64).endswith("a multiple of 64"), "61 of 64 are busy"


def test_the_demo_takes_the_options_of_train():
    taken = signature(cli.train).parameters.keys() - {"recipe"}
    assert signature(cli.demo).parameters.keys() == taken


@pytest.mark.full
def test_the_command_and_the_trainer_can_confirm_idle_gpus(place, monkeypatch, tmp_path, capsys):
    """A refusal comes before anything is written; with the flag, the run trains."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trainer_module, "idle_errors", lambda config, world: idle_errors(config, world_of(64)))
    recipe = FOLDER / "prefgrpo" / "lora_flux.yaml"
    given = ["train", str(recipe), *options(place, recipe), "--train.steps", "1", "--rewards", "jpeg_compressibility"]
    assert main(given) == 2
    assert "% of 64 processes busy" in capsys.readouterr().err and tree(tmp_path) == {}
    assert main([*given, "--allow-idle"]) == 0


def names_in(values):
    """The configuration fields that nested values set."""
    keys = flatten(values)
    return {name for name in flat_fields(Config()) if any(key == name or key.startswith(f"{name}.") for key in keys)}


def test_there_are_few_fields_and_each_has_a_use():
    """A field is set by a recipe, or a page shows its use."""
    files = [*FOLDER.glob("*/*.yaml"), FOLDER.parent / "prefgrpo" / "tiny" / "demo.yaml"]
    pages = "".join(p.read_text() for p in [FOLDER.parent / "README.md", *(FOLDER.parent / "docs").glob("*.md")])
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml.*?\n(.*?)```", pages, re.S)]
    used = set().union(*(names_in(values) for values in [*map(read_yaml, files), *blocks] if isinstance(values, dict)))
    words = set(re.findall(r"\w+(?:\.\w+)*", pages.replace("-", "_")))
    fields = flat_fields(Config()).keys()
    assert len(fields) <= 88 and fields - used - words == set()


def test_no_line_of_a_recipe_is_without_effect():
    """A judge section where a reward asks a judge, and options that the reward's class takes."""
    for recipe in RECIPES + PAIRS:
        config = load(recipe)
        judged = [entry for entry in (*config.rewards, *config.measured) if load_class(entry.name).judged]
        assert judged or "judge" not in read_yaml(recipe), recipe
        assert judged or config.judge == JudgeConfig(), recipe
        assert reward_errors(config) == [], recipe


def test_a_few_of_the_published_values_are_in_the_recipes():
    think, flex = (load(FOLDER / f"unifiedreward/{n}.yaml") for n in ("full_think_flux", "lora_flex_wan22"))
    r, t = think.rollout, think.train
    assert (r.steps, r.window_size, r.group_size, r.eta, r.shift, r.height) == (25, 14, 8, 0.7, 3.0, 720)
    assert (t.lr, t.lora_rank, t.updates_per_rollout, t.clip_range) == (1e-5, 0, 2, 1e-4)
    r, t = flex.rollout, flex.train
    assert (r.steps, r.window_size, r.group_size, r.frames, r.height, r.width) == (20, 15, 6, 33, 240, 416)
    assert (r.guidance, r.guidance_2, t.lr, t.lora_rank, t.lora_alpha, t.kl_coef) == (4.0, 3.0, 4e-5, 64, 128, 0.004)


@pytest.mark.parametrize("recipe", cases(RECIPES, [FOLDER / "prefgrpo" / f"lora_{name}.yaml" for name in QUICK]))
def test_a_recipe_dry_runs(place, recipe, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(recipe), "--dry-run", *options(place, recipe)]) == 0
    out, err = capsys.readouterr()
    config = load(recipe)
    assert yaml.safe_load(out[: out.index("\nmemory per process")])["family"] == config.family
    endpoint = make_objective(config.train).inputs == "endpoint"
    checked = "velocity error" if endpoint else "max |ratio − 1| = 0.0e+00"
    assert checked in out and "nothing was written" in out
    assert f"samples [{config.rollout.batch_size}, " in out
    assert "prefgrpo.yaml: " in err and "rollout.steps 2 (was" in err
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("recipe", cases(PAIRS, [FOLDER / "prefgrpo" / "pairs_flux.yaml"]))
def test_a_recipe_for_pairs_dry_runs(place, recipe, monkeypatch, tmp_path, capsys):
    """Only model and table changed: 24 pairs of images, clips or edits, a quarter of them held out."""
    monkeypatch.chdir(tmp_path)
    config = load(recipe)
    assert config.name == recipe.stem == f"pairs_{config.family}"
    ending = "gif" if makes_clips(config) else "png"
    clip = {"save_all": True, "duration": 60} if makes_clips(config) else {}
    for name, colour in (("chosen", "red"), ("rejected", "blue")):
        frames = [Image.new("RGB", (80, 60), (k, k, k)) for k in range(12)]  # GIF drops a frame that changes nothing
        first = Image.new("RGB", (80, 60), colour)
        first.save(place / f"{name}.{ending}", **clip | ({"append_images": frames} if clip else {}))
    row = {"chosen": f"chosen.{ending}", "rejected": f"rejected.{ending}"}
    if "edit" in config.family:
        row["source_image"] = "a.png"
    table = place / config.data.pairs
    table.write_text("".join(json.dumps({"prompt": f"thing {k}"} | row) + "\n" for k in range(24)))
    given = ["--model", str(place / config.family), "--data.pairs", str(table)]
    assert main(["train", str(recipe), "--dry-run", *given]) == 0
    out, _ = capsys.readouterr()
    assert "velocity error" in out and "samples [2, " in out and "held out: 6 groups" in out
    assert tree(tmp_path) == {}


TRAINED = [FOLDER / "prefgrpo" / f"lora_{name}.yaml" for name in ("flux", "sd3", "qwen_image_edit", "wan22", "ltx2")]
"""Images, guidance, edits, clips of two experts, and clips with sound."""


@pytest.mark.parametrize("recipe", cases(TRAINED, TRAINED[:1]))
def test_a_family_trains_with_model_and_prompts_alone(place, recipe, monkeypatch, tmp_path):
    """Two steps of FLUX, one of the other families."""
    monkeypatch.chdir(tmp_path)
    config = load(recipe)
    steps = 2 if recipe.stem == "lora_flux" else 1
    with JudgeServer() as server:
        free = ["--judge.endpoints", server.url, "--train.steps", str(steps)]
        assert main(["train", str(recipe), *options(place, recipe), *free]) == 0
        asked = [body for body in server.requests if images(body)]
    size = config.rollout.group_size
    assert len(asked) >= steps * 4 * size, "four groups per step, one call per image"
    folder = tmp_path / "runs" / name_of(recipe)
    trained = [r for r in rows(folder) if r["kind"] == "train"]
    assert [r["step"] for r in trained] == [1, 2][:steps] and all(r["reward/missing"] == 0 for r in trained)
    assert any(r["grad_norm"] > 0 for r in trained) and trained[0]["policy/on_policy_error"] < 1e-2
    assert list((folder / "lora").rglob("*.safetensors")) and (folder / "report.html").is_file()


def test_a_recipe_extends_another(tmp_path):
    files = {
        "base": "seed: 7\ndata: {prompts: p}\nrollout: {height: 32, width: 48}\nrewards: scenes\n",
        "sub/a": "extends: ../base.yaml\nmodel: m\nrollout: {width: 64}\n",
    }  # fmt: skip
    (tmp_path / "sub").mkdir()
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    config = from_dict(recipe_values(tmp_path / "sub" / "a.yaml"))
    assert (config.seed, config.model) == (7, "m")
    assert (config.rollout.height, config.rollout.width, config.rewards[0].name) == (32, 64, "scenes")


def test_a_models_own_values_replace_those_of_another_model(place, tmp_path):
    recipe = FOLDER / "prefgrpo/lora_flux.yaml"
    own = from_dict(recipe_values(recipe, str(place / "flux")))
    assert own.rollout.height == 32 and own.rollout.group_size == load(recipe).rollout.group_size
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({"model": str(place / "flux"), "rollout": {"height": 16}}))
    assert recipe_values(tmp_path / "r.yaml", str(place / "flux"))["rollout"]["height"] == 16, "of this model: kept"
