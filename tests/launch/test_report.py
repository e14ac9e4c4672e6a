"""The report as a page: complete, self-contained, escaped, the same twice."""

import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from launch.figures import binned, loss_limits, short_number
from launch.report import (
    difference_grid,
    headline,
    markdown_cell,
    print_summary,
    stage_grid,
    write_report,
)
from launch.study import Study, load_study
from tests.launch.fake_runs import curve, run_config, write_run, write_study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("runs") / "demo"
    return load_study([write_study(folder, {"rope": 1.9, "learned": 1.0})])


@pytest.fixture(scope="module")
def page(study: Study) -> str:
    return write_report(study).read_text()


class Outline(HTMLParser):
    """Tags, ids, addresses and texts of a page; every element must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)
        self._attributes(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._attributes(attrs)

    def _attributes(self, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids += [values["id"]] if "id" in values else []
        self.addresses += [v for n, v in values.items() if n.split(":")[-1] in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts += [data.strip()] if data.strip() else []


def drawings(page: str) -> str:
    return "".join(re.findall(r"<figure>.*?</figure>", page, re.DOTALL))


def test_page_is_self_contained(page: str) -> None:
    outline = Outline(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(outline.tags)
    assert outline.tags.count("svg") == 4 + 2  # figures, legend
    assert outline.addresses  # the drawings refer to parts of themselves
    assert all(address.startswith("#") for address in outline.addresses)
    assert not re.search(r"url\((?!#)|@import", page)
    assert len(outline.ids) == len(set(outline.ids))
    assert set(re.findall(r'(?:url\(|href=")#([^)"]+)', page)) <= set(outline.ids)


def test_drawings_have_the_page_colours_only(page: str) -> None:
    used = set(re.findall(r"var\(--(\w+)\)", page))
    light, dark = re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    for theme in (light, dark):
        assert used <= set(re.findall(r"--(\w+):", theme))
    assert {"ink", "muted", "line", "shade", "arm0", "arm1"} <= used
    assert not re.search(r"(?:fill|stroke): ?#", drawings(page))
    assert "font:" not in drawings(page)


def test_page_says_the_verdict_and_shows_the_tables(page: str, study: Study) -> None:
    texts = Outline(page).texts
    reach = study.reached[0]
    assert reach is not None
    assert f"rope reached learned’s final loss after {reach.share:.0%} of its steps." in texts
    assert f"step {reach.step:,} ({reach.share:.0%})" in texts
    for row in stage_grid(study).rows:
        assert set(row) <= set(texts)
    assert {"short", "128 × 64", "long", "256 × 32", "brief", "64 × 128"} <= set(texts)
    assert "model.positions" in texts
    assert any("mlflow server" in text for text in texts)
    assert any("hidden_size: 192" in text for text in texts)


def test_markdown_has_whole_tables(page: str, study: Study) -> None:
    text = (study.folder / "report.md").read_text()
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(tables) == 4
    for table in tables:
        assert len({line.rstrip().count("|") for line in table.splitlines()}) == 1
        assert len(table.splitlines()) >= 3
    assert "| short | 128 | 64 | 300 |" in text


def test_report_is_the_same_twice(page: str, study: Study) -> None:
    again = write_report(study)
    assert again.read_text() == page
    assert sorted(f.name for f in study.folder.glob("*report*")) == ["report.html", "report.md"]


def test_nothing_becomes_markup(tmp_path: Path) -> None:
    evil = "<b>$x$|[red]`&短"
    stages = ((evil, 128, 64, 300),)
    for name in ("rope[bold]", evil.replace("/", "")):
        write_run(tmp_path / name, curve(stages=stages), run_config(evil, stages=stages))
    study = load_study([tmp_path / "rope[bold]", tmp_path / evil])
    path = write_report(study)
    assert "b" not in Outline(path.read_text()).tags
    assert evil in Outline(path.read_text()).texts
    assert evil in Outline(drawings(path.read_text())).texts
    text = path.with_suffix(".md").read_text()
    assert "<b>" not in text.replace("\\<b", "")
    console = Console(file=io.StringIO(), width=200)
    print_summary(console, study)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert evil in printed
    assert "\nrope[bold] " in printed


def test_summary_prints_verdict_notes_and_tables(study: Study, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=160)
    print_summary(console, study)
    part = load_study([write_run(tmp_path / "part", curve()[:20], finished=False)])
    print_summary(console, part)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "rope reached learned’s final loss" in printed
    assert "loss diff" in printed
    assert "tokens/s" in printed
    assert "Note: part is not finished: its last step is 100 of 700." in printed


def test_headline_tells_every_outcome(tmp_path: Path) -> None:
    def verdict(folder: Path) -> list[str]:
        return list(headline(load_study([folder])))

    lost = verdict(write_study(tmp_path / "lost", {"rope": 1.0, "learned": 2.0}))
    assert lost[0] == "rope did not reach learned’s final loss."
    assert len(lost) == 2
    seeds = write_study(tmp_path / "seeds", {"rope": 2.0, "learned": 1.0}, (1, 2))
    assert "2 seeds" in verdict(seeds)[1]
    assert verdict(seeds)[2].startswith("Seed 1: rope needed ")
    records = [r | {"eval/loss": 9.0} for r in curve(rate=2.0)]
    (seeds / "rope-seed2" / "metrics.jsonl").unlink()
    write_run(tmp_path / "bad", records)
    (tmp_path / "bad" / "metrics.jsonl").rename(seeds / "rope-seed2" / "metrics.jsonl")
    assert verdict(seeds)[0] == "rope reached learned’s final loss with 1 of 2 seeds."
    blind = [{k: v for k, v in r.items() if "eval" not in k} for r in curve()]
    assert verdict(write_run(tmp_path / "blind", blind)) == [
        "There is no held-out loss to compare yet."
    ]


@pytest.mark.parametrize("records", [1, 3, 60])
def test_run_of_any_length_has_a_report(tmp_path: Path, records: int) -> None:
    page = write_report(load_study([write_run(tmp_path / "run", curve()[:records])])).read_text()
    texts = Outline(page).texts
    assert "loss difference" not in texts
    assert "Configuration" in texts


def test_run_of_nulls_has_a_report(tmp_path: Path) -> None:
    nulls = {"train/loss": None, "eval/loss": None, "lr": None}
    run = write_run(tmp_path / "run", [r | nulls for r in curve()])
    study = load_study([run])
    assert loss_limits(study) == (0.0, 1.0)
    assert "no held-out loss" in write_report(study).read_text()


def test_many_arms_are_all_drawn(tmp_path: Path) -> None:
    rates = {f"arm{n}": 1.0 + n / 10 for n in range(8)}
    study = load_study([write_study(tmp_path / "many", rates)])
    page = write_report(study).read_text()
    assert Outline(page).tags.count("svg") == 4 + 8
    # colours repeat after six arms: the first one's stands for two of them
    assert drawings(page).count("var(--arm0)") > 1.8 * drawings(page).count("var(--arm5)")


def test_unrelated_runs_are_reported_beside_them(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", curve(), run_config("one"))
    two = write_run(tmp_path / "two", curve(rate=2.0), run_config("two", "none"))
    study = load_study([one, two])
    assert write_report(study) == tmp_path / "one-vs-two" / "report.html"
    assert difference_grid(study).rows == [["model.positions", "rope", "none"]]


def test_binned_keeps_the_mean() -> None:
    y = np.arange(10_000.0)
    y[::7] = np.nan
    x_means, y_means = binned(np.arange(10_000.0), y)
    assert len(y_means) == 250
    assert y_means.mean() == pytest.approx(np.nanmean(y), rel=1e-3)
    assert np.allclose(x_means, y_means)
    short = np.array([1.0, 3.0])
    assert binned(short, short)[1].tolist() == [1.0, 3.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (5000, "5,000"), (25_000, "25k"), (1.5e6, "1.5M"), (2e9, "2B"), (0.5, "0.5")],
)
def test_short_number(value: float, text: str) -> None:
    assert short_number(value) == text


def test_markdown_cell() -> None:
    assert markdown_cell("a|b\nc`*") == "a\\|b c\\`\\*"
