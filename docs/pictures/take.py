"""Takes the pictures of this folder: what `pyggml view` shows of a model and of a run.

usage: take.py MODEL.gguf RUNS CHROMIUM

RUNS is a folder of adapters that were trained on the model, CHROMIUM the browser's program. Wants
`pip install 'pyggml[view]' playwright pillow`.
"""

import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from os import environ
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).parent
# Name → what stands behind the # of the address, and what is clicked there once it is drawn.
PICTURES = {
    "view-model": ("/model/blk.0.attn_q.weight", []),
    "view-backward": ("/backward", 6 * ["[title='One step on']"]),
    "view-run": ("/run", ["tbody tr a"]),
}


@contextmanager
def served(model: str, runs: str) -> Iterator[str]:
    """The address of the view. The model's page names its file without a folder."""
    path, root = Path(model).absolute(), str(HERE.parents[1])
    options = [path.name, "--run", str(Path(runs).absolute()), "--port", "0"]
    command = [sys.executable, "-m", "pyggml", "view", *options]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=path.parent,
        env=environ | {"PYTHONPATH": root},
    ) as server:
        assert server.stdout is not None
        try:
            yield next(w for line in server.stdout for w in line.split() if w.startswith("http"))
        finally:
            server.terminate()


def take(page: Page, url: str, name: str) -> None:
    address, clicks = PICTURES[name]
    page.goto(f"{url}#{address}")
    for selector in clicks:
        page.locator(selector).first.click(timeout=120_000)
    page.wait_for_timeout(15_000)  # what is computed for it, and drawn
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(128).save(HERE / f"{name}.png", optimize=True)


def main() -> None:
    model, runs, chromium = sys.argv[1:]
    with served(model, runs) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        for name in PICTURES:
            take(page, url, name)
        browser.close()


if __name__ == "__main__":
    main()
