"""`mptify report`: one page, whole in itself, that says what the ticket and the metrics say."""

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import typer
import yaml
from jinja2 import UndefinedError
from torch import nn
from typer.testing import CliRunner

import mptify
from mptify.cli import app
from mptify.cli.report import report
from mptify.errors import BadConfig, DamagedTicket, MptifyError
from mptify.report.collect import collect_report
from mptify.report.confusion import ConfusionMatrix, classes_context
from mptify.report.page import render_page
from mptify.report.templating import render
from mptify.ticket.codec import TicketLayer
from mptify.ticket.state import read_both, write
from mptify.ticket.ticket_summary import summarize
from mptify.training.evaluation import Evaluation

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
NARROW = "mptify:conv2_x0.25"


def run_report(*arguments):
    alone = typer.Typer()
    alone.command()(report)
    return CliRunner().invoke(alone, [str(one) for one in arguments])


def reported(*arguments):
    result = run_report(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return Page(Path(re.search(r"report: (.*) \([\d,]+ bytes\)", result.output)[1]))


def refused(*arguments):
    error = run_report(*arguments).exception
    assert isinstance(error, MptifyError), error
    return error


class Page(HTMLParser):
    """A page that was parsed: its tags are balanced, and nothing in it comes from elsewhere."""

    def __init__(self, file):
        super().__init__()
        self.file, self.source = Path(file), Path(file).read_text(encoding="utf-8")
        self.open, self.tags, self.ids, self.texts, self.rows = [], [], [], {}, []
        self.feed(self.source)
        assert not self.open, self.open
        self.check()

    def handle_starttag(self, name, attributes):
        attributes = dict(attributes)
        self.tags.append((name, attributes))
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if name not in ("meta", "img"):
            self.open.append((name, attributes))
        if name == "tr" and ("table", {"class": "confusion"}) in self.open:
            self.rows.append([])

    def handle_endtag(self, name):
        assert self.open
        assert self.open.pop()[0] == name

    def handle_data(self, data):
        section = next((one["id"] for name, one in self.open if name == "section"), "top")
        self.texts[section] = self.texts.get(section, "") + data
        if (
            self.rows
            and self.open
            and self.open[-1][0] in ("td", "th")
            and ("table", {"class": "confusion"}) in self.open
        ):
            self.rows[-1].append(data)

    def check(self):
        assert not {name for name, _ in self.tags} & {
            "script",
            "link",
            "iframe",
            "object",
            "base",
            "form",
        }
        for _, attributes in self.tags:
            assert not [key for key in attributes if key.startswith("on")]
            assert (
                attributes.get("src", "data:").startswith("data:image/png;base64,")
                or "src" not in attributes
            )
            assert attributes.get("href", "#").startswith("#")
        style = self.source[self.source.index("<style>") : self.source.index("</style>")]
        assert "url(" not in style
        assert "@import" not in style
        assert re.search(
            '<html lang="en">.*<meta charset="utf-8">.*width=device-width', self.source, re.DOTALL
        )
        assert "prefers-color-scheme: dark" in style
        assert all("alt" in attributes for name, attributes in self.tags if name == "img")
        assert all("aria-label" in attributes for name, attributes in self.tags if name == "svg")

    @property
    def text(self):
        return " ".join(self.texts.values())

    def matrix(self):
        return np.array(
            [[int(cell) if cell.isdigit() else 0 for cell in row[1:-1]] for row in self.rows[1:]]
        )


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A real run of two epochs with its baseline."""
    folder = tmp_path_factory.mktemp("page") / "run"
    changes = ["epochs=2", "data.train_images=400", "ticket.prune=0.7", "ticket.bn=insert"]
    arguments = ["search", NARROW, "--data", "digits", "--baseline", "--out", folder]
    result = CliRunner().invoke(
        app, [*map(str, arguments), *(word for change in changes for word in ("--set", change))]
    )
    assert result.exit_code == 0, (result.output, result.exception)
    return folder


@pytest.fixture(scope="module")
def page(searched):
    return reported(searched)


@pytest.fixture
def folder(searched, tmp_path):
    """A copy of the run that a test may change."""
    return Path(shutil.copytree(searched, tmp_path / "run"))


@pytest.fixture(scope="module")
def ticket(searched):
    return mptify.read(searched / "last.ticket")


# -- what the page says -----------------------------------------------------------------------


def test_the_page_lies_in_the_run_and_has_every_section(searched, page):
    assert page.file == searched / "report.html"
    assert page.ids == ["searched", "curves", "classes", "layers", "masks", "size", "again"]
    assert "http" not in page.source
    assert len(page.source) < 100_000


def test_the_figures_are_those_of_metrics_and_ticket(searched, page, ticket):
    rows = [json.loads(line) for line in (searched / "metrics.jsonl").read_text().splitlines()]
    dense = json.loads((searched / "baseline/summary.json").read_text())
    summary = summarize(*read_both(searched / "last.ticket"))
    assert f"{100 * rows[-1]['val_accuracy']:.2f} %" in page.texts["top"]
    assert f"{100 * dense['accuracy']:.2f} %" in page.texts["top"]
    assert f"{ticket.kept:,} of {ticket.count:,} random weights" in page.texts["top"]
    assert f"validation, epoch 2: {100 * rows[-1]['val_accuracy']:.4g} %" in page.texts["curves"]
    assert f"training, epoch 1: {rows[0]['loss']:.4g}" in page.texts["curves"]
    assert "dense validation, epoch 2" in page.texts["curves"]
    assert f"replaced, epoch 1: {100 * rows[0]['flipped']:.4g} %" in page.texts["curves"]
    for layer in summary.layers:
        for word in (
            layer.name,
            f"{layer.kept:,}",
            f"{layer.gain:.4g}",
            f"{layer.bits_per_weight:.4f}",
            layer.coded_as,
        ):
            assert word in page.texts["layers"], word
    for size in (summary.mask_bytes, summary.file_bytes, 4 * summary.weights):
        assert f"{size:,}" in page.texts["size"]
    assert f"{summary.entropy_bytes:,.0f}" in page.texts["size"]
    assert summary.digest in page.texts["searched"]
    assert f"mptify {mptify.__version__}, torch " in page.texts["top"]


def test_the_parts_of_the_file_add_up(page):
    section = page.source[page.source.index('id="size"') : page.source.index('id="again"')]
    *parts, whole, entropy, _ = (
        int(size.replace(",", "")) for size in re.findall(r"<td>([\d,]+)</td>", section)
    )
    assert len(parts) == 4  # masks, floats, gains, description
    assert sum(parts) == whole == (page.file.parent / "last.ticket").stat().st_size
    assert entropy == round(collect_report(page.file.parent).file.summary.entropy_bytes)


def test_the_confusion_matrix_counts_every_image_and_its_diagonal_the_right_ones(page, ticket):
    counts = page.matrix()
    assert counts.shape == (10, 10)
    assert counts.sum() == 359
    assert counts.trace() / 359 == ticket.notes["accuracy"]
    assert "The search measured" not in page.texts["classes"]


def test_the_commands_name_what_is_not_a_default(page):
    command = page.texts["again"].partition("mptify search ")[2].partition("mptify eval")[0]
    for option in ("--set epochs=2", "--set ticket.prune=0.7", "--baseline"):
        assert option in command


# -- whatever it is given ---------------------------------------------------------------------


def test_a_ticket_alone_has_no_curves_but_all_else(searched, tmp_path):
    file = Path(shutil.copy(searched / "best.ticket", tmp_path / "found.ticket"))
    page = reported(file)
    assert page.file == tmp_path / "found.html"
    assert "A ticket file holds no curves" in page.texts["curves"]
    assert page.matrix().sum() == 359
    assert f"mptify eval {file}" in page.texts["again"]


def test_a_cut_ticket_that_nobody_searched(tmp_path):
    file = tmp_path / "cut.ticket"
    CliRunner().invoke(app, ["convert", NARROW, "--bits", "32/32", "--out", str(file)])
    page = reported(file)
    assert "The validation images are unknown" in page.texts["classes"]
    assert "Standard deviation of the frozen weights" in page.texts["layers"]
    assert f"mptify convert {NARROW}" in page.texts["again"]
    mptify.save(mptify.transform(nn.Sequential(nn.Linear(4, 2))), file)
    commands = reported(file, "--no-data").texts["again"]
    assert "The model registry does not know its network" in commands


def test_dense_training_shows_curves_and_classes(searched):
    page = reported(searched / "baseline")
    summary = json.loads((searched / "baseline/summary.json").read_text())
    assert page.ids == ["searched", "curves", "classes", "again"]
    assert page.matrix().trace() / 359 == summary["accuracy"]
    assert "--set method=dense" in page.texts["again"]


def test_a_run_that_goes_on_shows_what_there_is(folder):
    shutil.rmtree(folder / "baseline")
    (folder / "summary.json").unlink()
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text(rows[0] + "\n")
    page = reported(folder, "--no-data")
    assert "1 of 2stopped or still running" in page.texts["top"]
    assert f"mptify search --resume --out {folder}" in page.texts["again"]
    assert "--no-data" in page.texts["classes"]
    for name in ("metrics.jsonl", "last.ticket", "best.ticket"):
        (folder / name).unlink()
    page = reported(folder)
    assert page.ids == ["searched", "curves", "classes", "again"]
    assert "No epoch has ended yet." in page.texts["curves"]
    assert "There is no network to evaluate yet" in page.texts["classes"]


def test_data_that_is_gone_is_a_sentence_on_the_page(folder):
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    (folder / "recipe.yaml").write_text(
        yaml.safe_dump(recipe | {"data": {"source": "arrays:gone.npz"}})
    )
    page = reported(folder)
    assert "arrays:gone.npz: there is no file 'gone.npz'." in page.texts["classes"]
    assert not page.rows


def test_fewer_images_can_be_run(folder):
    page = reported(folder, "--images", 50)
    assert page.matrix().sum() == 50


def test_what_was_searched_from_python_says_so(tmp_path):
    train = np.random.RandomState(0).randint(0, 256, (20, 8, 8, 1), np.uint8), np.arange(20) % 4
    network = mptify.models.conv2(width=0.25, in_chans=1, input_size=8, num_classes=4)
    mptify.search(network, train, train, {"epochs": 1, "batch": 10}, out=tmp_path / "run")
    page = reported(tmp_path / "run")
    assert "given from Python" in page.texts["searched"]
    assert "mptify.search(model, train, val, settings" in page.texts["again"]


def test_many_classes_are_shown_by_their_most_confused_pairs(searched):
    true = np.repeat(np.arange(40), 5)
    taken = true.copy()
    taken[:4], taken[10] = 7, 3  # class 0 four times for 7, class 2 once for 3
    names = tuple(f"kind {n}" for n in range(40))
    matrix = ConfusionMatrix(
        Evaluation(200, 0.975, 1.0, 0.1, 1.0), true, taken, 41, names, "digits"
    )
    context = classes_context(matrix, 0.5)
    assert context["matrix"] is None
    assert context["pairs"][0] == ("kind 0", "kind 7", "4", "80.0 %")
    assert context["noted"] == "50.00 %"
    assert context["many"]["worst"][0] == ("kind 0", "20.0 %")
    assert matrix.confused == [(0, 7, 4), (2, 3, 1)]
    assert np.isnan(matrix.by_class[40])
    assert matrix.by_class[0] == 0.2
    text = render_page(collect_report(searched), matrix)
    assert 'class="confusion"' not in text
    assert "The most confused pairs, 2 of 2" in text
    right = render_page(
        collect_report(searched), replace(matrix, labels=true, predicted=true, classes=40)
    )
    assert "Every image was classified correctly." in right


# -- what is refused --------------------------------------------------------------------------


def test_wrong_places_are_told_in_a_sentence(folder, tmp_path):
    assert "there is no such file or folder" in str(refused(tmp_path / "nowhere"))
    assert "holds no run: there is no recipe.yaml" in str(refused(tmp_path))
    assert "--device nowhere" in str(refused(folder, "--device", "nowhere"))
    data = (folder / "last.ticket").read_bytes()
    (folder / "last.ticket").write_bytes(data[:-5])
    assert isinstance(refused(folder), DamagedTicket)
    assert isinstance(refused(folder / "recipe.yaml"), DamagedTicket)
    (folder / "metrics.jsonl").write_text("{")
    assert "metrics.jsonl or summary.json is damaged" in str(refused(folder))
    (folder / "recipe.yaml").write_text("nothing: 1\n")
    assert isinstance(refused(folder), BadConfig)


def test_only_a_report_is_overwritten(folder, tmp_path):
    other = tmp_path / "mine.html"
    other.write_text("<p>mine</p>")
    assert "is not an mptify report" in str(refused(folder, "--out", other))
    assert other.read_text() == "<p>mine</p>"
    assert "is not an mptify report" in str(
        refused(folder / "last.ticket", "--out", folder / "last.ticket")
    )
    assert "does not exist" in str(refused(folder, "--out", tmp_path / "no/where.html"))
    for _ in range(2):
        reported(folder, "--no-data", "--out", tmp_path / "page.html")


# -- hostile tickets --------------------------------------------------------------------------

EVIL = "</title></style></pre>\"'><script>alert(1)</script><img src=http://x onerror=alert(1)>"


def test_no_ticket_writes_into_the_page(ticket, searched, tmp_path):
    layers = {
        f"{EVIL}{name}": TicketLayer(f"{EVIL}{name}", one.mask, one.gain)
        for name, one in ticket.layers.items()
    }
    recipe = ticket.notes["recipe"] | {"about": {EVIL: EVIL}, "data": {"source": EVIL}}
    notes = {
        EVIL: EVIL,
        "accuracy": EVIL,
        "labels": [EVIL] * 10,
        "input": {"mean": EVIL},
        "recipe": recipe,
        "odd": "\u202e\x00" + EVIL,
    }
    config = ticket.config.model_copy(update={"include": (EVIL,)})
    write(replace(ticket, layers=layers, notes=notes, config=config), tmp_path / "evil.ticket")
    page = reported(tmp_path / "evil.ticket")
    assert EVIL in page.texts["layers"]
    assert "\u202e" not in page.source
    assert "<script" not in page.source
    write(
        replace(
            ticket, notes=ticket.notes | {"labels": [EVIL] * 10, "recipe": {"model": EVIL, EVIL: 1}}
        ),
        tmp_path / "odd.ticket",
    )
    reported(tmp_path / "odd.ticket")


def test_a_class_name_can_not_write_into_the_page(searched):
    matrix = ConfusionMatrix(
        Evaluation(3, 1.0, 1.0, 0.1, 1.0),
        np.array([0, 1, 1]),
        np.array([0, 1, 0]),
        2,
        (EVIL, "a\u2028b"),
        EVIL,
    )
    source = render_page(collect_report(searched), matrix)
    assert "<script" not in source
    assert "onerror=alert(1)&gt;" in source
    assert "a\ufffdb" in source


def test_what_a_template_names_must_be_given():
    with pytest.raises(UndefinedError, match="'title' is undefined"):
        render("page.html.j2", generator="mptify report")


def test_the_same_run_gives_the_same_page(searched, tmp_path):
    first, second = (
        reported(searched, "--out", tmp_path / name).file.read_bytes()
        for name in ("a.html", "b.html")
    )
    assert first == second
