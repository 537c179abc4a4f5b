"""A run folder with invented numbers, as a real run writes it, and its page through a strict HTML parser.

Mismatched end tags and repeated attributes fail.
"""

from __future__ import annotations

import base64
import io
import json
import math
from html.parser import HTMLParser
from itertools import permutations, product

import numpy as np
import torch
import yaml
from PIL import Image

from prefgrpo.report import write_report
from prefgrpo.tiny.scenes import COMBOS, SPLITS, caption, render

# ---- the parser ------------------------------------------------------------------------------------------------------

VOID = {"meta", "link", "img", "br", "input", "hr"}


class Node:
    """An element: tag, attributes, children (nodes and strings)."""

    def __init__(self, tag, attributes):
        self.tag = tag
        self.attributes = dict(attributes)
        self.children = []

    def all(self, tag=None, cls=None):
        """All descendants with this tag and class."""
        found = []
        for child in self.children:
            if isinstance(child, Node):
                fits = tag in (None, child.tag) and (cls is None or cls in child.attributes.get("class", "").split())
                found += [child] * fits + child.all(tag, cls)
        return found

    @property
    def text(self):
        """Text of all descendants, whitespace collapsed."""
        return " ".join(" ".join(c if isinstance(c, str) else c.text for c in self.children).split())


class _Parser(HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open = [Node("", {})]

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs), f"<{tag}> has an attribute twice"
        self.open[-1].children.append(Node(tag, attrs))
        if tag not in VOID:
            self.open.append(self.open[-1].children[-1])

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop().tag == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        self.open[-1].children.append(data)


def parse(text):
    """The tree of a whole page or a fragment; fails on tags that do not match."""
    parser = _Parser()
    parser.feed(text)
    parser.close()
    (root,) = parser.open
    return root


# ---- the folder ------------------------------------------------------------------------------------------------------

STEPS = 80
MEASURES = ("scenes", "scenes.all", "scenes.colour", "scenes.shape", "scenes.place")


def scenes(combos, seed):
    """uint8 [n, 32, 32, 3]: correct drawings of the combos."""
    images = render(combos, torch.Generator().manual_seed(seed))
    return (images.permute(0, 2, 3, 1) * 255).round().to(torch.uint8).numpy()


def train_row(step, total=80):
    """One training row with the metrics of a run with a judge that the report or a tracker shows."""
    done, wave = step / total, 1 + 0.3 * math.sin(step)
    return {
        "kind": "train", "step": step, "loss": 1e-6 * math.cos(step), "grad_norm": 4e-3 * wave,
        "updates": 2.0, "updates_skipped": 0.0,
        "reward/vlm_pairwise": 0.5, "reward/vlm_pairwise_std": 0.3 - 0.1 * done * wave,
        "reward/vlm_pairwise/missing_rate": 0.0, "reward/missing": 0.0 if step % 40 else 0.02,
        "policy/approx_kl": 1e-10 * wave * (1 + 5 * done), "policy/kl": 0.0,
        "judge/requests": 672.0, "judge/failures": 0.0, "judge/missing": 0.0, "judge/tie_rate": 0.0,
        "judge/order_inconsistency": 0.04 + 0.18 * done * wave, "judge/position_bias": 0.5 * wave,
        "diversity/pixels": 0.18 - 0.08 * done, "time/rollout": 0.43 * wave, "time/images_per_s": 30 * wave,
        "time/mfu": 0.3, "time/judge_wait": 0.14 * wave, "time/update": 0.4 * wave,
    }  # fmt: skip


def eval_row(step, total, name):
    """One evaluation row: win rates with intervals, and metrics before training and now."""
    gain, margin = 1 - np.exp(-4 * step / total), 0.06 * (step > 0)
    row = {"win_judge_first": 0.51 + 0.42 * gain, "win_judge_second": 0.49 + 0.42 * gain}
    for win, rate in (("win_judge", 0.5 + 0.42 * gain), ("win_scenes", 0.5 + 0.24 * gain)):
        row |= {win: rate, f"{win}_low": rate - margin, f"{win}_high": rate + margin}
    for k, measure in enumerate(MEASURES):
        row |= {f"{measure}_before": 0.4 + 0.08 * k, measure: 0.4 + 0.08 * k + (0.6 - 0.08 * k) * 0.8 * gain}
    return {"kind": "eval", "step": step, "set": name} | {f"{name}/{key}": value for key, value in row.items()}


def shown(folder, name, step):
    """Write images and prompts of one evaluation; the scenes before training differ from those now."""
    (folder / "eval").mkdir(exist_ok=True)
    chosen = SPLITS[name][::2]
    before, now = scenes([COMBOS[(COMBOS.index(c) + 47) % len(COMBOS)] for c in chosen], 1), scenes(chosen, 1 + step)
    np.savez_compressed(folder / "eval" / f"{name}_{step:06d}.npz", before=before, now=now)
    prompts = [caption(c, k % 3) for k, c in enumerate(chosen)]
    (folder / "eval" / f"{name}_prompts.json").write_text(json.dumps(prompts))


def outcomes(folder, name, step):
    """Outcome of each image of an evaluation (the kept ones, and as many others of the same prompts) with the judge's
    answers: win, loss, tie and no verdict in turn; for losses the two presentation orders disagree."""
    chosen, out = SPLITS[name][::2], []
    for k in range(2 * len(chosen)):
        after_first, before_first = ((0.9, 0.2), (0.4, 0.45), (0.5, 0.5), (None, 0.3))[k // 2 % 4]
        win = (1.0, 0.0, 0.5, 1.0)[k // 2 % 4]
        answers = [
            {"judge": "vlm_pairwise", "first": first, "p_first": p, "raw": f"answer {k} {first}",
             "reason": "" if p is not None else "timed out"}
            for first, p in (("after", after_first), ("before", before_first))
        ]  # fmt: skip
        row = {"prompt": k // 2, "wins": {"judge": win, "scenes": (0.5, 1.0, 0.0)[k % 3]}}
        out.append(row | ({"answers": answers} if k % 2 == 0 else {}))
    (folder / "eval" / f"{name}_{step:06d}.json").write_text(json.dumps(out))


def judgements(folder, step, size=8):
    """Judgement log of a step's first two groups (numbered from 0 within the step): every pair, in both orders."""
    with (folder / "judgements.jsonl").open("a") as file:
        for n, (first, second) in product(range(2), permutations(range(size), 2)):
            line = {"step": step, "reward": "vlm_pairwise", "group": 40 + n, "first": first, "second": second}
            line |= {"p_first": (1 + first) / (2 + first + second), "reason": "", "latency_s": 0.1, "retries": 0}
            line |= {"parts": {}, "raw": f"<A> {n} {first} {second}", "prompt": caption(SPLITS["train"][n])}
            file.write(json.dumps(line) + "\n")


def groups(folder, step, k=2, size=8, missing=True):
    """`k` judged groups of `size` scenes, with verdicts that follow a hidden quality; `missing` drops one pair."""
    (folder / "groups").mkdir(exist_ok=True)
    rng = np.random.default_rng(step)
    images = np.stack([scenes([COMBOS[int(i)] for i in rng.integers(0, 120, size)], step + n) for n in range(k)])
    quality = rng.normal(0, 1.5, (k, size))
    counts = 2.0 * (1 - np.eye(size))[None].repeat(k, 0)
    if missing:
        counts[0, 1, 2] = counts[0, 2, 1] = 0
    wins = counts / (1 + np.exp(quality[:, None, :] - quality[:, :, None]))
    prompts = np.array([caption(SPLITS["train"][n]) for n in range(k)])
    data = {"images": images, "wins": wins, "counts": counts, "rates": wins.sum(2) / counts.sum(2), "prompts": prompts}
    np.savez_compressed(folder / "groups" / f"step_{step:06d}.npz", **data)


def small_run(folder, rows, config="train: {steps: 10}\n"):
    """A run folder that holds only a configuration and metrics."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def make_run(folder, steps=STEPS, every=20, planned=None):
    """A complete run of `steps` steps with dev and test evaluations and groups."""
    config = {
        "name": "demo", "model": "tiny/flux", "eval": {"every": every}, "rewards": [{"name": "vlm_pairwise"}],
        "train": {"steps": planned or steps, "clip_range": 1e-5},
    }  # fmt: skip
    rows = [eval_row(0, steps, "dev"), eval_row(0, steps, "test"), *(train_row(s, steps) for s in range(1, steps + 1))]
    rows += [eval_row(step, steps, "dev") for step in range(every, steps + 1, every)]
    rows += [eval_row(steps, steps, "test")] * (planned is None)
    small_run(folder, rows, yaml.safe_dump(config, sort_keys=False))
    for step in range(every, steps + 1, every):
        shown(folder, "dev", step)
        groups(folder, step)
    if planned is None:
        shown(folder, "test", steps)
        outcomes(folder, "test", steps)
    judgements(folder, every)
    return folder


# ---- the page -------------------------------------------------------------------------------------------------------


def report(folder):
    """The page of a run, parsed."""
    return parse(write_report(folder).read_text(encoding="utf-8"))


def charts(page):
    """Title → figure element."""
    return {f.all("h3")[0].text: f for f in page.all("figure", "chart")}


def last(figure, name):
    """The last value of a series by its legend name, as printed."""
    spans = figure.all("div", "legend")[0].all("span")
    return next(span.all("b")[0].text for span in spans if span.text.startswith(name))


def rows_of(table):
    """The texts of a table's cells, by row, without its head."""
    return [[cell.text for cell in row.all("td")] for row in table.all("tr") if row.all("td")]


def cells(page, table):
    """First cell → the other cells of a table at the top: of `wins` or of `rewards`."""
    return {row[0]: row[1:] for row in rows_of(page.all("table", table)[0])}


def image(uri):
    """The image of a data URI."""
    return Image.open(io.BytesIO(base64.b64decode(uri.split(",", 1)[1])))


def pixels(element):
    """uint8 [H, W, 3] of an <img> or <image>."""
    return np.asarray(image(element.attributes["src" if element.tag == "img" else "href"]).convert("RGB"))


def arrays(file):
    """{name: array} of an npz file."""
    with np.load(file) as stored:
        return dict(stored)


def change(file, **changed):
    """Replace arrays of an npz file."""
    np.savez(file, **arrays(file) | changed)
