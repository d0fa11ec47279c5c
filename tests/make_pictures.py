"""Pictures of the documents, of a server that runs and of `ask`.

arcaligner corpus build tests/data/squad_dev_sample.jsonl --output squad.lance
arcaligner serve --corpus squad.lance
python tests/make_pictures.py http://127.0.0.1:8000 squad.lance    # docs/page.png, docs/ask.svg

They show times: the machine should have nothing else to do. The question is the first of the sample.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from browser import Browser
from rich.console import Console

DOCS = Path(__file__).parents[1] / "docs"
QUESTION = "What is the second busiest container port in the United States?"


def draw_page(url: str) -> None:
    """The page with a question, answered."""
    with tempfile.TemporaryDirectory() as folder:
        browser = Browser(folder)
        try:
            browser.call(
                "Emulation.setDeviceMetricsOverride", width=800, height=1900, deviceScaleFactor=1, mobile=False
            )
            browser.call("Page.navigate", url=url)
            browser.wait_for("about")
            browser.evaluate(f"$('question').value = {QUESTION!r}")
            browser.evaluate("$('form').requestSubmit()")
            browser.wait_for("!running", seconds=600)
            browser.evaluate("scrollTo(0, 0)")
            assert not browser.seen("#error"), browser.seen("#error")
            browser.picture().quantize(64).save(DOCS / "page.png", optimize=True)
        finally:
            browser.process.terminate()
            browser.process.wait()


def draw_terminal(corpus: str) -> None:
    """What `ask` prints."""
    command = ["arcaligner", "ask", "--corpus", corpus, QUESTION]
    run = [sys.executable, "-m", *command]
    said = subprocess.run(
        run,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=True,
        env=os.environ | {"COLUMNS": "110"},
    ).stdout
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=110, file=nowhere)
        shown = " ".join([*command[:-1], f'"{QUESTION}"'])
        console.print(f"$ {shown}\n{said}", markup=False, highlight=False)
    # The font is whatever the reader has: a picture loads nothing from elsewhere.
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="arcaligner ask"), flags=re.DOTALL)
    (DOCS / "ask.svg").write_text(drawn, "utf-8")


if __name__ == "__main__":
    draw_page(sys.argv[1])
    draw_terminal(sys.argv[2])
