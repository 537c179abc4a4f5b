"""`prefgrpo score`: folders of files with their prompts, on one process and on two.

Why these cases: a file matched to the wrong prompt gives plausible but meaningless scores, so every way of matching is
tested with one file too many and one too few; scores must not depend on the number of processes; and an unreadable file
must be reported by name, not averaged in.
"""

import contextlib
import json

import numpy as np
import pytest
import yaml
from PIL import Image
from ranks import start_ranks
from reward_cases import make_checkpoints, picture
from servers import JudgeServer, Process

from benchmarks import clip_files
from prefgrpo.commands import cli
from prefgrpo.commands.generate import write
from prefgrpo.data.answer import Answer
from prefgrpo.data.file_names import file_name, find
from prefgrpo.data.prompts import DataError, Prompt, read_prompts
from prefgrpo.data.stored import read_media
from prefgrpo.rewards import build
from prefgrpo.rewards.base import Reward, Sample

TEXTS = ["a red circle", "a green box", "two blue dots", "a black cat", "a tree"]
JPEG = "jpeg_compressibility"


def image(seed, file=None, size=(40, 48)):
    pixels = picture(seed, *size).pixels
    if file is not None:
        Image.fromarray(pixels).save(file)
    return pixels


def prompts(folder, header="prompt", rows=TEXTS):
    file = folder / "prompts.csv"
    file.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Five prompts with three images each, and tiny checkpoints of three rewards."""
    folder = tmp_path_factory.mktemp("score")
    make_checkpoints("clip,aesthetic,pickscore", folder / "tiny")
    (folder / "images").mkdir()
    for p in range(5):
        for j in range(3):
            image(10 * p + j, folder / "images" / f"{p:06d}_{j}.png")
    prompts(folder)
    return folder


def run(*argv, code=0):
    """The JSON that `prefgrpo score argv` writes."""
    out = argv[argv.index("--out") + 1] if "--out" in argv else None
    assert cli.main(["score", *map(str, argv)]) == code
    return json.loads(out.read_text()) if out and code == 0 else None


def arguments(spec, images, table, *more):
    return ["--rewards", spec, "--images", images, "--prompts", table, *more]


def ids(*texts):
    return [Prompt(k, text) for k, text in enumerate(texts)]


# files and prompts


def test_names_of_generate_are_found(tmp_path):
    table = prompts(tmp_path, "index,prompt", [f"q{k},{t}" for k, t in enumerate(TEXTS)])
    held = read_prompts(table, unique=False)
    for naming in ("plain", "unigenbench", "vbench"):
        folder = tmp_path / naming
        folder.mkdir()
        for p in held:
            for j in (0, 1, 10):
                image(p.id, folder / file_name(p, j, naming, ".png"), (8, 8))
        (folder / "notes.txt").write_text("not an image")
        (folder / ".7.png").write_bytes(b"half an image of a process that was killed")
        found = find(folder, held)
        assert [g.prompt.id for g in found] == [k for k in range(5) for _ in range(3)]
        assert all(g.file.name in {file_name(g.prompt, j, naming, ".png") for j in (0, 1, 10)} for g in found)


def test_a_prompt_with_slashes_and_four_hundred_letters(tmp_path):
    held = ids("a/b c" + "ü" * 400, "x-1")
    for p in held:
        image(0, tmp_path / file_name(p, 0, "vbench", ".png"), (8, 8))
    assert [g.prompt.id for g in find(tmp_path, held)] == [0, 1]
    assert file_name(held[0], 0, "vbench", ".png").startswith("a_b cü")
    assert len(file_name(held[0], 0, "vbench", ".mp4").encode()) <= 255
    assert file_name(Prompt(12, "a"), 3, "plain", ".png") == "000012_3.png"
    with pytest.raises(DataError, match="needs an 'index' column"):
        file_name(held[0], 0, "unigenbench", ".png")


def test_a_column_names_the_files(tmp_path):
    (tmp_path / "sub").mkdir()
    names = ["b.png", "sub/a.png", "c.png"]
    for k, name in enumerate(names):
        image(k, tmp_path / name, (8, 8))
    held = read_prompts(prompts(tmp_path, "file,prompt", [f"{n},{t}" for n, t in zip(names, TEXTS, strict=False)]))
    assert [str(g.file.relative_to(tmp_path)) for g in find(tmp_path, held)] == names
    (tmp_path / "c.png").unlink()
    with pytest.raises(DataError, match=r"1 files named in column 'file' do not exist.*c\.png"):
        find(tmp_path, held)


def test_other_names_go_by_order(tmp_path):
    for k in (1, 2, 9, 10):
        image(k, tmp_path / f"out ({k}).jpg", (8, 8))
    found = [(g.prompt.id, g.file.name) for g in find(tmp_path, ids(*TEXTS[:2]))]
    assert found == [(0, "out (1).jpg"), (0, "out (2).jpg"), (1, "out (9).jpg"), (1, "out (10).jpg")]
    with pytest.raises(DataError, match=r"contains 4 files for 3 prompts; expected names as `prefgrpo generate`"):
        find(tmp_path, ids(*TEXTS[:3]))


def test_files_and_prompts_without_each_other_are_named(tmp_path):
    for k in (0, 1, 2):
        image(k, tmp_path / f"{k:06d}_0.png", (8, 8))
    with pytest.raises(DataError, match=r"1 files in .* match no prompt: 000002_0\.png"):
        find(tmp_path, ids(*TEXTS[:2]))
    with pytest.raises(DataError, match=r"1 prompts have no file in .*'a black cat'"):
        find(tmp_path, ids(*TEXTS[:4]))
    with pytest.raises(DataError, match="folder not found"):
        find(tmp_path / "none", ids("a"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="contains no image or clip"):
        find(tmp_path / "empty", ids("a"))


# the command


def test_a_fresh_clone_scores_a_folder(place, capsys):
    """The command from the issue gives the same values as calling the rewards directly."""
    out, table = place / "one.json", place / "prompts.csv"
    recipe = place / "tiny/rewards.yaml"
    found = run(*arguments(recipe, place / "images", table, "--out", out))
    said = capsys.readouterr().out
    assert "15 files; all scores are in" in said and "pickscore" in said
    assert list(found["rewards"]) == ["clip", "aesthetic", "pickscore"] and len(found["files"]) == 15
    options = {entry["name"]: entry["options"] for entry in yaml.safe_load(recipe.read_text())["rewards"]}
    for name, reward in build(list(options), options).items():
        samples = [Sample(f["prompt"], read_media(place / "images" / f["file"])) for f in found["files"]]
        values = [f["scores"][name]["value"] for f in found["files"]]
        np.testing.assert_allclose(values, [s.value for s in reward.score(samples)], rtol=1e-5, atol=1e-6)
        assert found["rewards"][name] == {"weight": 1.0, "mean": pytest.approx(np.mean(values)), "missing": 0}
    for row in found["files"]:
        assert row["prompt"] == TEXTS[row["index"]] and row["file"].startswith(f"{row['index']:06d}_")
        assert row["total"] == pytest.approx(sum(s["value"] for s in row["scores"].values()))


@pytest.mark.full
@pytest.mark.dist
def test_any_number_of_ranks_writes_the_same_bytes(place):
    """Two ranks score three and two of the five units; one process of one thread scores all."""
    alone = place / "alone.json"
    together = place / "together.json"
    argv = arguments(place / "tiny/rewards.yaml", place / "images", place / "prompts.csv", "--batch", 4, "--out")
    runs = start_ranks(["score", *map(str, argv), str(together)], together, 2, OMP_NUM_THREADS="1")
    run(*argv, alone)
    assert [r.wait() for r in runs] == [0, 0], runs[0].output
    assert together.read_bytes() == alone.read_bytes()


def test_a_file_that_cannot_be_read_is_missing_with_its_reason(tmp_path, capsys):
    folder = tmp_path / "images"
    folder.mkdir()
    for k in range(4):
        image(k, folder / f"{k:06d}_0.png")
    (folder / "000001_0.png").write_bytes(b"")
    (folder / "000002_0.png").write_bytes((folder / "000003_0.png").read_bytes()[:60])
    table = prompts(tmp_path, rows=TEXTS[:4])
    found = run(*arguments("jpeg_incompressibility:2", folder, table, "--out", tmp_path / "o"))
    empty, broken = (found["files"][k]["scores"]["jpeg_incompressibility"] for k in (1, 2))
    assert empty == {"value": None, "reason": "000001_0.png cannot be read (it is empty: 0 bytes)"}
    assert broken["value"] is None and broken["reason"].startswith("000002_0.png cannot be read (")
    assert found["rewards"]["jpeg_incompressibility"]["missing"] == found["total"]["missing"] == 2
    good = [found["files"][k]["total"] for k in (0, 3)]
    assert found["total"]["mean"] == pytest.approx(np.mean(good)) and found["files"][1]["total"] is None
    assert "it is empty" in capsys.readouterr().out


def test_files_of_any_kind(tmp_path):
    """Also upper-case suffixes, 16 bits and CMYK; orientation, alpha and profiles are in tests/data/test_prompts.py."""
    shown = image(3, size=(24, 32))
    grey = shown[..., 0]
    made = {"a.PNG": shown, "b.png": grey.astype(np.uint16) * 257, "c.TIFF": grey.astype(np.uint16) * 257}
    for name, pixels in (made | {"d.bmp": shown, "e.png": grey}).items():
        Image.fromarray(pixels).save(tmp_path / name)
        expected = shown if pixels is shown else np.repeat(shown[..., :1], 3, 2)
        np.testing.assert_array_equal(read_media(tmp_path / name).pixels, expected)
    Image.fromarray(shown).convert("CMYK").save(tmp_path / "f.jpg", quality=95)
    assert np.abs(read_media(tmp_path / "f.jpg").pixels.astype(int) - shown).mean() < 12
    Image.fromarray(grey.astype(np.float32)).save(tmp_path / "g.tif")
    (tmp_path / "h.png").symlink_to(tmp_path / "gone.png")
    for name, why in (("g.tif", r" \(expected 8 or 16 bits"), ("h.png", "")):
        with pytest.raises(DataError, match=f"{name} cannot be read{why}"):
            read_media(tmp_path / name)
    held = ids(*"abcdefgh")
    assert [g.file.name[0] for g in find(tmp_path, held)] == [p.text for p in held]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ending", ["png", "jpg", "webp", "tif"])
def test_broken_files_are_data_errors_whatever_is_broken(tmp_path, ending):
    rng = np.random.default_rng(0)
    file = tmp_path / f"a.{ending}"
    Image.fromarray(image(1, size=(16, 16))).save(file)
    whole = file.read_bytes()
    for k in range(100):
        data = np.frombuffer(whole[: rng.integers(1, len(whole)) if k % 5 == 0 else None], np.uint8).copy()
        data[rng.integers(0, min(len(data), 200), 4)] = rng.integers(0, 256, 4)
        file.write_bytes(data.tobytes())
        with contextlib.suppress(DataError):
            assert read_media(file).pixels.dtype == np.uint8


def test_nothing_scored_is_a_failure(tmp_path, capsys):
    image(0, tmp_path / "a.png")
    table = prompts(tmp_path, rows=["no quotes"])
    run(*arguments("ocr,jpeg_compressibility", tmp_path, table), code=1)
    assert "the prompt quotes no text" in capsys.readouterr().out


def test_clips_are_read_from_files(tmp_path):
    imageio = pytest.importorskip("imageio.v3")
    pytest.importorskip("imageio_ffmpeg")
    frames = np.stack([image(k, size=(32, 48)) for k in range(6)])
    for k in range(2):
        imageio.imwrite(tmp_path / f"{TEXTS[k]}-0.mp4", frames[: 6 - k], fps=8, macro_block_size=1)
    table = prompts(tmp_path, rows=TEXTS[:2])
    found = run(*arguments("jpeg_incompressibility", tmp_path, table, "--out", tmp_path / "o.json"))
    for k, row in enumerate(found["files"]):
        media = read_media(tmp_path / row["file"])
        assert media.pixels.shape == (6 - k, 32, 48, 3)
        assert np.abs(media.pixels[0].astype(int) - frames[0]).mean() < 20, "the decoded frames differ"
        expected = build("jpeg_incompressibility")["jpeg_incompressibility"].score([Sample("", media)])[0].value
        assert row["scores"]["jpeg_incompressibility"]["value"] == expected


@pytest.mark.parametrize(("size", "least"), [((1080, 64), 36), ((24, 40), 34), ((240, 416), 37)])
def test_a_written_clip_is_close_to_its_pixels(tmp_path, size, least):
    """Sizes that are no multiples of 16 stay. PSNR in dB; docs/scoring.md has 480 × 832, where it is 38.7."""
    pytest.importorskip("imageio_ffmpeg")
    pixels = clip_files.clip(*size, frames=5)
    write(tmp_path / "a.mp4", pixels, 24.0)
    media = read_media(tmp_path / "a.mp4")
    assert media.frame_rate == 24 and media.pixels.shape == pixels.shape
    psnr, mean, _ = clip_files.distance(pixels)
    assert psnr > least and mean < 3.5 and clip_files.distance(pixels, 5)[0] < psnr - 1


@pytest.mark.parametrize(("name", "options", "rate"), [("a.mp4", {"fps": 12.5}, 12.5), ("a.gif", {"duration": 50}, 20)])
def test_the_frame_rate_of_a_file(tmp_path, name, options, rate):
    imageio = pytest.importorskip("imageio.v3")
    pytest.importorskip("imageio_ffmpeg")
    imageio.imwrite(tmp_path / name, clip_files.clip(32, 48, frames=6), **options)
    assert read_media(tmp_path / name).frame_rate == rate


@pytest.mark.parametrize(
    ("durations", "rate"), [([1000, *[50] * 8], 9000 / 1400), ([100] * 6, 10 / 3), ([0, 0], None), ([40], 25)]
)
def test_the_frame_rate_of_a_gif_whose_frames_differ_in_duration(tmp_path, durations, rate):
    """A GIF states the duration of each frame; a writer merges equal ones, here five of six."""
    pytest.importorskip("imageio_ffmpeg")
    shades = [0] * 5 + [255] if durations == [100] * 6 else range(0, 20 * len(durations), 20)
    first, *more = (Image.new("L", (32, 32), shade) for shade in shades)
    first.save(tmp_path / "a.gif", save_all=True, append_images=more, duration=durations)
    assert read_media(tmp_path / "a.gif").frame_rate == (rate and pytest.approx(rate))


class Rate(Reward):
    takes = ("video",)

    def ask(self, asked):
        return [Answer(sample.media.frame_rate) for (sample,) in asked]


def test_the_reward_gets_the_frame_rate_of_the_file(tmp_path):
    imageio = pytest.importorskip("imageio.v3")
    pytest.importorskip("imageio_ffmpeg")
    for k, rate in enumerate((8, 24)):
        imageio.imwrite(tmp_path / f"{TEXTS[k]}-0.mp4", clip_files.clip(32, 48, frames=5), fps=rate)
    table = prompts(tmp_path, rows=TEXTS[:2])
    found = run(*arguments(f"{__name__}:Rate", tmp_path, table, "--out", tmp_path / "o.json"))
    assert [score["value"] for row in found["files"] for score in row["scores"].values()] == [8, 24]


def test_edits_with_their_sources(place, tmp_path):
    """The reward sees each edit with its own source."""
    make_checkpoints("image_similarity", tmp_path / "tiny")
    for name in ("sources", "edits"):
        (tmp_path / name).mkdir()
    for k in range(3):
        image(k, tmp_path / "sources" / f"{k}.png")
        image(k if k != 1 else 77, tmp_path / "edits" / f"{k:06d}_0.png")
    rows = [f"change it {k},sources/{k}.png" for k in range(3)]
    table = prompts(tmp_path, "instruction,source_image", rows)
    recipe = tmp_path / "tiny/rewards.yaml"
    found = run(*arguments(recipe, tmp_path / "edits", table, "--out", tmp_path / "a.json"))
    values = [f["scores"]["image_similarity"]["value"] for f in found["files"]]
    assert values[0] == pytest.approx(1.0, abs=1e-5) == values[2] and values[1] < 0.999


def test_a_judge_and_a_served_reward(place, tmp_path, capsys):
    """The judge gets groups by prompt; a monitor of weight 0 is reported but not summed."""
    with JudgeServer() as judge, Process("jpeg_incompressibility") as served:
        recipe = tmp_path / "rewards.yaml"
        judged = {"name": "vlm_pairwise", "options": {"plan": "round_robin"}}
        measured = {"name": "jpeg_incompressibility", "weight": 0, "options": {"url": served.url}}
        recipe.write_text(json.dumps({"judge": {"endpoints": [judge.url]}, "rewards": [judged, measured]}))
        found = run(*arguments(recipe, place / "images", place / "prompts.csv", "--out", tmp_path / "o.json"))
    assert len(judge.requests) >= 5 * 3, "fewer requests than pairs"
    local = build("jpeg_incompressibility")["jpeg_incompressibility"]
    for k in range(5):
        rows = [f for f in found["files"] if f["index"] == k]
        bright = [read_media(place / "images" / f["file"]).pixels.mean() for f in rows]
        wins = [f["scores"]["vlm_pairwise"]["value"] for f in rows]
        assert np.argsort(wins).tolist() == np.argsort(bright).tolist()
        for f in rows:
            media = read_media(place / "images" / f["file"])
            assert f["scores"]["jpeg_incompressibility"]["value"] == local.score([Sample("", media)])[0].value
            assert f["total"] == f["scores"]["vlm_pairwise"]["value"]


@pytest.mark.parametrize(
    ("spec", "more", "message"),
    [
        ("clipp", [], "did you mean 'clip'"),
        ("video_ocr", [], "takes video, but these are images"),
        ("image_similarity", [], "scores edits"),
        (
            '[{"name": "clip", "options": {"model": 3}}]',
            [],
            "'model' of reward 'clip': Input should be a valid string, got 3",
        ),
        (JPEG, ["--out", "/dev/null/o.json"], "--out /dev/null/o.json: "),
        (JPEG, ["--prompts", "none.csv"], "prompts file not found"),
        ("", [], "--rewards: expected for example clip:0.7"),
        ("none.yaml", [], "none.yaml"),
    ],
)
def test_mistakes(place, capsys, spec, more, message):
    run(*arguments(spec, place / "images", place / "prompts.csv", *more), code=2)
    assert message in capsys.readouterr().err
