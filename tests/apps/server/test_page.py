"""The page in a real browser: what it shows, keys, dropped files, small and dark screens."""

import json

import numpy as np
import pytest

pytest.importorskip("PIL")

from browser import CHROMIUM, Browser

from arcaligner.apps.server.request import RequestCancelledError

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
QUESTION = "What sport does he play?"
TEXT = "Radik  Zhaparov is a Kazakh ski jumper.\nHe has competed since 2003.\n\nAda <b>wrote</b> it. 😀 So."


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.process.terminate()
    opened.process.wait()


@pytest.fixture
def browser(chromium, url, client):
    """The page, opened with the key, on a screen of the usual size."""
    chromium.call("Emulation.setDeviceMetricsOverride", width=1000, height=1400, deviceScaleFactor=1, mobile=False)
    chromium.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    chromium.opened.clear()
    chromium.call("Page.navigate", url=url)
    chromium.wait_for("document.activeElement?.id === 'key'")  # the page asks for the key when it opens
    chromium.type(client.api_key)
    chromium.press("Tab")
    chromium.wait_for("about")
    return chromium


def ask(browser, text=TEXT, question=QUESTION):
    browser.evaluate(f"$('question').value = {json.dumps(question)}; $('text').value = {json.dumps(text)};")
    browser.evaluate("$('form').requestSubmit()")
    browser.wait_for("!running")
    assert browser.seen("#error") == ""


def shown(browser, selector):
    """The text of each element that matches, as a reader sees it."""
    return browser.evaluate(f"[...document.querySelectorAll('{selector}')].map(element => element.innerText)")


def is_seen(browser, selector):
    return browser.evaluate(f"document.querySelector('{selector}').checkVisibility()")


def test_keyboard_alone_asks(browser, client):
    """A question is asked with the keyboard alone, and the page says what was cached."""
    browser.evaluate("$('question').focus()")
    browser.type(QUESTION)
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.id") == "text"
    browser.type(TEXT + " By hand.")
    browser.press("Enter", modifiers=2)
    browser.wait_for("!running && $('report').checkVisibility()")
    assert " ms; 0 of 2 passages were cached." in browser.seen("#cost")
    messages = [{"role": "user", "content": QUESTION}]
    documents = (TEXT + " By hand.").split("\n\n")
    expected = client.chat.completions.create(model="tiny", messages=messages, extra_body={"documents": documents})
    assert expected.choices[0].finish_reason == "length"  # the page shows this with an ellipsis
    assert browser.evaluate("$('answer').textContent") == expected.choices[0].message.content + " …"
    assert "The answer may be wrong" in browser.seen("#check")
    places = {url.split("/", 3)[2] for url in browser.opened if not url.startswith("data:")}
    assert places == {client.base_url.netloc.decode()}
    ask(browser, TEXT + " By hand.")
    slots = expected.model_extra["arcaligner"]["statistics"]["slots"]
    assert f" tokens of text compressed to {slots} slots, first token after " in browser.seen("#cost")
    assert " ms; 2 of 2 passages were cached." in browser.seen("#cost")


def test_text_is_shown_unchanged(browser):
    """The text is shown as written, and the marks of slots do not move a letter."""
    browser.evaluate(
        "$('tokens-per-slot').append(new Option('2')); $('tokens-per-slot').value = '2'"
    )  # slots of parts of words
    ask(browser)
    assert shown(browser, ".passage") == TEXT.split("\n\n")
    with_slots = browser.picture(".passage")
    assert browser.evaluate("document.querySelectorAll('.passage .slot').length") > 8
    browser.evaluate("for (const node of document.querySelectorAll('.passage')) node.textContent = node.textContent")
    changed = (np.asarray(with_slots) != np.asarray(browser.picture(".passage"))).any(axis=-1)
    assert 0 < changed.mean() < 0.03  # light lines are seen, and nothing else


def test_page_marks_the_answer(browser, monkeypatch):
    """The page marks the answer in the passage."""
    text = "😀 " + TEXT  # offsets count characters, of which a browser may count two
    place = {"start": text.index("jumper"), "end": text.index("competed") + 8}  # in two slots
    find_answer = "arcaligner.apps.server.request.find_answer"
    monkeypatch.setattr(find_answer, lambda answer, text: place if "Radik" in text else None)
    ask(browser, text)
    marks = browser.evaluate("[...document.querySelectorAll('mark')].map(element => element.textContent)")
    assert marks == ["jumper.", "\n", "He has competed"]
    yellow = [(np.asarray(browser.picture(part)) == (253, 224, 71)).all(-1).mean() for part in ("mark", "#answer")]
    assert yellow[0] > 0.5 and yellow[1] == 0
    assert "word for word" not in browser.seen("#check")
    monkeypatch.setattr(find_answer, lambda answer, text: None)
    ask(browser, text)
    assert "The answer does not appear word for word" in browser.seen("#check")
    assert browser.evaluate("document.querySelectorAll('mark').length") == 0


@pytest.mark.parametrize("way", ["Escape", "click"])
def test_progress_and_cancel(browser, held, way):
    """While the server works, progress is visible and the request can be stopped."""
    assert not is_seen(browser, "#stop") and not is_seen(browser, "#sign")
    browser.evaluate(f"$('question').value = '{QUESTION}'; $('form').requestSubmit()")
    assert held.begun.wait(30)
    assert is_seen(browser, "#stop") and browser.seen("#sign").startswith("Answering … ")
    browser.evaluate("$('stop').click()") if way == "click" else browser.press(way)
    browser.wait_for("!running")
    assert browser.seen("#error") == "Stopped." and not is_seen(browser, "#stop")
    assert isinstance(held.end_of_the_first(), RequestCancelledError)  # the next request can start
    ask(browser)


def test_page_with_and_without_corpus(browser, engine, monkeypatch):
    """The page names the corpus and its questions use it; without a corpus, an example has its own text."""
    assert browser.seen("#corpus") == "Corpus corpus: 2 documents, 2 passages. Model tiny."
    assert not is_seen(browser, "#examples")
    browser.evaluate("$('top-k').value = 1")
    ask(browser, text="")
    assert browser.evaluate("document.querySelectorAll('article').length") == 1
    head = browser.seen("article h3")
    assert " – characters 0 to " in head or " – Zhaparov – characters" in head
    monkeypatch.setattr(engine, "retriever", None)
    monkeypatch.setattr(engine, "limits", engine.limits.__class__(max_slots=400))
    browser.evaluate("learn()")
    browser.wait_for("$('examples').checkVisibility()")
    names = shown(browser, "#examples button")
    assert len(names) == 3 and all(name.endswith("?") for name in names)
    browser.evaluate("document.querySelectorAll('#examples button')[1].click(); $('form').requestSubmit()")
    browser.wait_for("!running")
    assert browser.evaluate("$('question').value") == names[1] and "Radik Zhaparov" in browser.seen("article")


def test_page_fits_small_dark_screens(browser):
    for width in (400, 320):
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=True)
        ask(browser, TEXT + " " + "y" * 200)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.picture().getpixel((2, 2)) == (255, 255, 255)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert max(browser.picture().getpixel((2, 2))) < 40
    text = browser.evaluate("getComputedStyle(document.querySelector('.passage')).color")
    assert min(int(channel) for channel in text.removeprefix("rgb(").rstrip(")").split(",")) > 200


def test_dropped_files_become_passages(browser, monkeypatch):
    """Dropped files become passages, and the page names those that cannot be read."""
    monkeypatch.setattr("arcaligner.apps.server.app.MAX_CHARACTERS", 20)
    browser.drop(
        "[new File(['# Ships\\n\\nOf wood.'], '../../ships.md'), new File(['A letter. Of Ada.'], 'ada.txt'),"
        " new File(['\\0'], 'b.bin'), new File([new ArrayBuffer(100 * 2**20)], 'large.bin'),"
        " new File(['A long one. Of Bob.'], 'bob.txt'), new File(['And a longer one. '.repeat(2)], 'long.txt')]"
    )
    lines = browser.seen("#files-read").splitlines()
    names = ("ships.md", "ada.txt", "bob.txt", "long.txt")
    assert lines[:4] == [f"{name}: 1 passage remove" for name in names]
    assert "b.bin is not text in UTF-8" in lines[4]
    assert lines[5].startswith("large.bin has 100 MiB; expected at most 16 MiB.")
    assert lines[6].startswith("long.txt is too long: only the first 1 passage of it can be used.")
    for number in (3, 2):
        browser.evaluate(f"document.querySelectorAll('#files-read button')[{number}].click()")
    ask(browser, text="Own.")
    assert shown(browser, "article h3") == ["Your text", "ships.md – Ships", "ada.txt"]
    browser.evaluate("$('top-k').value = 1")
    ask(browser, text="Own.", question="What are ships made of?")
    assert shown(browser, "article h3") == ["ships.md – Ships"]
    assert browser.seen("#chosen").startswith("1 of 3 passages sent")


def test_file_markup_stays_text(browser):
    evil = "<img src=x onerror=window.evil=1><script>window.evil=1</script>"
    browser.drop(
        f"[new File([{json.dumps(evil + ' A letter &amp; more.')}], 'a<img src=x onerror=window.evil=1>.html'),"
        f" new File([{json.dumps(evil + ' Of Ada.')}], 'b.txt')]".replace("</script>", "<\\/script>")
    )
    ask(browser, text=evil)
    assert browser.evaluate("window.evil === undefined && !document.querySelector('main img, main script')")
    passages = browser.seen("#passages")
    assert "A letter & more." in passages and evil in passages
    assert "a<img src=x onerror=window.evil=1>.html" in browser.seen("#files-read")
