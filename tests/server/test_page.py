"""The page in a real browser, by keyboard: an answer from a text, what each slot stands for, a narrow screen."""

import json
import os
import shutil
import subprocess

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
QUESTION = "What sport does he play?"
TEXT = "Radik Zhaparov is a Kazakh ski jumper. He has competed since 2003.\n\nAda <b>wrote</b> it. 😀 So."


class Browser:
    """A tab of Chromium, steered through a pair of pipes."""

    def __init__(self, folder):
        (theirs_in, self.write), (self.read, theirs_out) = os.pipe(), os.pipe()
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        command += ["--no-first-run", "--disable-dev-shm-usage", f"--user-data-dir={folder}", "about:blank"]
        redirected = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'  # where Chromium expects them
        self.process = subprocess.Popen(
            ["bash", "-c", redirected, "chromium", *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.session, self.number, self.rest = {}, 0, b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params, **self.session}
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                data = os.read(self.read, 2**16)
                assert data, "Chromium has ended"
                self.rest += data
            line, self.rest = self.rest.split(b"\0", 1)
            if (answer := json.loads(line)).get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def evaluate(self, expression):
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, condition):
        """Until an expression holds, at most half a minute."""
        look = f"const look = () => {condition} ? done(true) : setTimeout(look, 20); setTimeout(done, 30000); look();"
        assert self.evaluate(f"new Promise(done => {{ {look} }})"), condition

    def type(self, text):
        self.call("Input.insertText", text=text)

    def press(self, key):
        codes = {"Tab": {"windowsVirtualKeyCode": 9}, "Enter": {"windowsVirtualKeyCode": 13, "text": "\r"}}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **codes[key])

    def text(self, selector):
        return self.evaluate(f"document.querySelector('{selector}').textContent")


@pytest.fixture
def browser(tmp_path):
    opened = Browser(tmp_path)
    yield opened
    opened.process.terminate()
    opened.process.wait()


def test_a_question_is_asked_by_keyboard_and_the_slots_are_shown(browser, url, client):
    browser.call("Page.navigate", url=url)
    browser.wait_for("document.activeElement?.id === 'question'")
    browser.type(QUESTION)
    browser.press("Tab")
    browser.type(TEXT)
    browser.press("Tab")
    browser.press("Enter")
    browser.wait_for("/The API key is missing/.test(document.querySelector('#error').textContent)")
    assert browser.evaluate("document.activeElement.id") == "key"
    browser.type(client.api_key)
    browser.press("Enter")
    browser.wait_for("/ms$/.test(document.querySelector('#text-time').textContent)")

    documents = TEXT.split("\n\n")
    messages = [{"role": "user", "content": QUESTION}]
    expected = client.chat.completions.create(model="tiny", messages=messages, extra_body={"documents": documents})
    assert browser.text("#answer").strip() == expected.choices[0].message.content.strip()
    report = expected.model_extra["arcaligner"]
    assert browser.text("#slots").startswith(f"{report['statistics']['slots']} slots, ×")
    assert browser.text("#slots").endswith("0 of 2 passages kept")
    marks = browser.evaluate("[...document.querySelectorAll('article mark')].map(each => each.textContent)")
    assert marks == [documents[each["document"]][each["start"] : each["end"]] for each in report["segments"]]
    colors = (
        "new Set([...document.querySelectorAll('article mark')].map(each => getComputedStyle(each).backgroundColor))"
    )
    assert browser.evaluate(f"{colors}.size") > 1
    browser.call("Emulation.setDeviceMetricsOverride", width=320, height=640, deviceScaleFactor=1, mobile=True)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 320
