"""A tab of Chromium for tests."""

import base64
import io
import json
import os
import shutil
import subprocess

from PIL import Image

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
FLAGS += "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"


class Browser:
    """A tab of Chromium, steered through a pair of pipes."""

    def __init__(self, folder):
        (theirs_in, self.write), (self.read, theirs_out) = os.pipe(), os.pipe()
        redirected = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out} >/dev/null 2>&1'  # where Chromium expects them
        command = ["bash", "-c", redirected, "chromium", CHROMIUM, *FLAGS.split(), f"--user-data-dir={folder}"]
        self.process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out))
        os.close(theirs_in)
        os.close(theirs_out)
        self.session, self.number, self.rest, self.opened = {}, 0, b"", []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        self.call("Network.enable")

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
            answer = json.loads(line)
            if answer.get("method") == "Network.requestWillBeSent":
                self.opened.append(answer["params"]["request"]["url"])
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def evaluate(self, expression):
        reply = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def wait_for(self, condition, seconds=60):
        """Waits until a JavaScript expression is true."""
        look = f"const look = () => {condition} ? done(true) : setTimeout(look, 20); "
        look += f"setTimeout(done, {1000 * seconds}); look();"
        assert self.evaluate(f"new Promise(done => {{ {look} }})"), (condition, self.seen("body"))

    def type(self, text):
        self.call("Input.insertText", text=text)

    def press(self, key, **more):
        codes = {"Tab": {"windowsVirtualKeyCode": 9}, "Enter": {"windowsVirtualKeyCode": 13, "text": "\r"}}
        codes["Escape"] = {"windowsVirtualKeyCode": 27}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **codes[key], **more)

    def seen(self, selector):
        """The visible text of an element."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def picture(self, selector=None) -> Image.Image:
        """A screenshot of the page, or of one element."""
        clip = {}
        if selector is not None:
            box = self.evaluate(
                f"{{ const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
                " ({x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height, scale: 1}) }"
            )
            clip = {"clip": box, "captureBeyondViewport": True}
        data = base64.b64decode(self.call("Page.captureScreenshot", **clip)["data"])
        return Image.open(io.BytesIO(data)).convert("RGB")

    def drop(self, files):
        """Drops files, given as JavaScript, on the page."""
        self.evaluate(
            f"{{ const data = new DataTransfer(); for (const file of {files}) data.items.add(file);"
            " document.body.dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true})) }"
        )
        self.wait_for("!running")
