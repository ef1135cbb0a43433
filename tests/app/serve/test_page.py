"""The page in a browser: it talks, draws, stops, says what went wrong, needs no mouse and no sight, asks nobody."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.app.serve.parrot import NEVER, told
from tests.app.serve.servers import Server

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[browser]'")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 30_000  # milliseconds
pytestmark = [
    pytest.mark.spec("ENG-085"),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH (Debian: apt-get install chromium)"),
]
Page = sync_api.Page
expect = sync_api.expect
Opened = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser) -> Iterator[Opened]:
    """Opens the page of a server. In the end: no request went elsewhere, and no script failed."""
    errors, requests, pages = [], [], []

    def open_page(server: Server, width: int = 1200, height: int = 800, **options: object) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        pages.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: requests.append((request.url, server.url)))
        page.goto(server.url)
        expect(page.locator("#model")).not_to_have_text("connecting…")
        if page.locator("#model").inner_text() != "not connected":
            expect(page.locator("#now")).to_contain_text("Connected")
        return page

    yield open_page
    for context in pages:
        context.close()
    assert errors == []
    assert requests
    assert [url for url, ours in requests if not url.startswith((ours, "data:"))] == []


def ask(page: Page, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def answers(page: Page) -> list[str]:
    """What the model has said, once it has ended."""
    expect(page.get_by_role("button", name="Stop")).to_be_disabled(timeout=PATIENCE)
    said = page.locator("#messages .assistant .said").all_inner_texts()
    return [text.strip() for text in said]


def test_it_shows_what_the_server_answers_and_what_that_cost(real, opened) -> None:
    page = opened(real)
    page.get_by_text("Settings").click()
    page.get_by_label("Tokens of an answer at most").fill("24")
    ask(page, "Genesis 1\n")
    wanted = real.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Genesis 1\n"}], "max_tokens": 24, "temperature": 0},
    ).json()["choices"][0]["message"]["content"]
    assert answers(page) == [wanted.strip()]
    expect(page.locator(".assistant .cost")).to_contain_text("24 tokens")
    expect(page.locator("#now")).to_contain_text("Token 24")
    figures = page.locator("#figures dd").all_inner_texts()
    assert [re.sub(r"[\d.]+", "1", figure) for figure in figures] == ["1", "1 KiB", "1 ms", "1 MiB"]


def test_the_picture_and_the_table_show_every_layer(real, opened) -> None:
    page = opened(real)
    ask(page, "And God said")
    answers(page)
    page.get_by_text("The newest token in numbers").click()
    expect(page.locator("#rows tr")).to_have_count(8)
    rows = [list(map(float, row.split())) for row in page.locator("#rows tr").all_inner_texts()]
    assert [row[0] for row in rows] == [*range(8)]
    assert all(sum(row[1:4]) == 4 for row in rows)  # K experts a layer
    assert "experts reused" in page.locator("#slots").get_attribute("aria-label")
    page.locator("#slots").hover(position={"x": 60, "y": 5})
    expect(page.locator("#pointed")).to_contain_text("layer 0, slot 0")
    colors = page.evaluate(
        "() => { const c = document.getElementById('slots');"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "return new Set(Array.from({length: d.length / 4}, (_, i) => d.slice(4 * i, 4 * i + 4).join())).size }"
    )
    assert colors > 2


def test_a_conversation_goes_on_and_begins_anew(parrot, opened) -> None:
    page = opened(parrot)
    ask(page, told("first"))
    ask_again = told("second <b>é</b> 😀")
    answers(page)
    ask(page, ask_again)
    assert answers(page) == ["first", "second <b>é</b> 😀"]
    assert page.locator("#messages b").count() == 0
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#messages .assistant")).to_have_count(0)


@pytest.mark.parametrize("how", ["button", "key"])
def test_stopping_keeps_what_was_said_and_ends_the_work(parrot, opened, how) -> None:
    abandoned = parrot.metric("texts_abandoned_total")
    page = opened(parrot)
    ask(page, told(f"begun and so{NEVER}"))
    expect(page.locator("#messages .assistant")).to_contain_text("begun")
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    (said,) = answers(page)
    assert said.startswith("begun")
    parrot.wait_for("texts_abandoned_total", abandoned + 1)
    ask(page, told("and on"))
    assert answers(page)[1] == "and on"


def test_an_error_is_said_and_the_question_is_not_lost(strict, opened) -> None:
    page = opened(strict)
    expect(page.get_by_role("alert")).to_contain_text("API key")
    page.get_by_label("API key").fill("let me in")
    page.get_by_label("Your message").focus()
    expect(page.locator("#model")).to_contain_text("parrot")
    expect(page.get_by_role("alert")).to_be_hidden()
    ask(page, "x" * 30_000)
    expect(page.get_by_role("alert")).to_contain_text("20480")
    expect(page.get_by_label("Your message")).to_have_value("x" * 30_000)
    ask(page, told("well"))
    assert answers(page) == ["well"]


def test_an_error_in_mid_answer_is_said_below_what_came_before(parrot, opened) -> None:
    page = opened(parrot)
    ask(page, told("some words ☠"))
    expect(page.get_by_role("alert")).to_contain_text("the disk failed")
    assert answers(page) == ["some words"]


def test_a_model_without_a_template_goes_on_from_the_text(bare, opened) -> None:
    page = opened(bare)
    expect(page.locator("#messages")).to_contain_text("no chat template")
    page.get_by_text("Settings").click()
    page.get_by_label("Tokens of an answer at most").fill("5")
    ask(page, "Genesis 1\n")
    (said,) = answers(page)
    assert "The word of".startswith(said[:11])


@pytest.mark.parametrize("width", [360, 480, 900, 1200])
def test_nothing_is_cut_off_at_any_width(real, opened, width) -> None:
    page = opened(real, width=width)
    ask(page, "unbroken" * 60)
    answers(page)
    assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_axe_finds_nothing_to_object_to(real, opened, scheme, width) -> None:
    """Names of controls, contrast, landmarks, headings, languages, live regions."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = opened(real, width=width, color_scheme=scheme, bypass_csp=True)
    page.get_by_text("Settings").click()
    page.get_by_text("The newest token in numbers").click()
    ask(page, "And God said")
    answers(page)
    found = axe.Axe().run(page).response["violations"]
    assert [(wrong["id"], [node["target"] for node in wrong["nodes"]]) for wrong in found] == []


def test_everything_can_be_reached_by_the_keyboard(real, opened) -> None:
    page = opened(real)
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    wanted = ["messages", "question", "send", "anew", "SUMMARY", "SUMMARY"]
    assert [name for name in reached if name in wanted][: len(wanted)] == wanted


def test_its_files_speak_of_no_other_place() -> None:
    folder = Path(__file__).parents[3] / "edge0_ref" / "app" / "serve" / "page"
    for path in folder.iterdir():
        for url in re.findall(
            r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", re.sub(r"^\s*//.*$", "", path.read_text("utf-8"), flags=re.M)
        ):
            assert urlsplit(url).netloc == "", path
