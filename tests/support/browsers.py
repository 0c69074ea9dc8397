"""What tests of pages share: a Chromium, and how far a page's colours stand apart."""

import re
import shutil
from importlib.resources import files

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


def launched():
    """For a fixture: Chromium until the fixture ends, where it is installed."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright (pip install playwright)")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def schemes(command):
    """A command's page, light and dark: name of a colour -> its red, green and blue."""
    css = files(f"pyggml.cli.commands.{command}").joinpath("web/page.css").read_text()
    for block in re.findall(r":root \{(.*?)\}", css, re.S):
        found = re.findall(r"--([\w-]+): #(\w{6})", block)
        yield {name: [int(text[i : i + 2], 16) for i in (0, 2, 4)] for name, text in found}


def contrast(one, other):
    """WCAG 2.1's: 1 of equal colours, 21 of black and white."""
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour):
    parts = [c / 255 for c in colour]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
