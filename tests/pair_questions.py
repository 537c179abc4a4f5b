"""The question which of two media is better, to a judge: `ask(judge, pairs)` in the tests of judges."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media
from prefgrpo.judge.client import Judge, open_judge
from prefgrpo.judge.event_loop import loop_thread
from prefgrpo.judge.template import SHOWN, PairTemplates, Shown, load_pair_templates


class Asker(NamedTuple):
    """A judge and the templates of the question."""

    judge: Judge
    templates: PairTemplates

    def submit(self, prompt: str, first: Media, second: Media, source: Sequence[Media] = ()) -> Future[Answer]:
        """Ask about one pair without waiting."""
        template = self.templates.about(first, second)
        return loop_thread().submit(self.judge.ask(template, {"prompt": prompt}, (first, second), source))

    def judge_group(
        self, prompt: str, media: Sequence[Media], pairs: Sequence[tuple[int, int]], source: Sequence[Media] = ()
    ) -> list[Answer]:
        """Ask about pairs of `media`, and wait for the answers."""
        asked = [(media[i], media[j]) for i, j in pairs]
        return self.judge.ask_all(self.templates.about(*media), {"prompt": prompt}, asked, source)


def asker(judge: Judge | JudgeConfig, template: str = "compare", shown: Shown = SHOWN) -> Asker:
    """An open judge, or that of a config, with a template."""
    return Asker(open_judge(judge), load_pair_templates(template, shown=shown))
