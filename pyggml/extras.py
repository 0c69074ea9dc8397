"""Extras of the installation: what a sentence says of how to get one."""

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname


def how_to_install(*extras: str) -> str:
    """pip install 'pyggml[hub]'; where pyggml runs from a checkout or was installed from one, with
    the checkout's path in place of the name, since that is what works there."""
    return f"pip install '{_checkout() or 'pyggml'}[{','.join(extras)}]'"


def _checkout() -> Path | None:
    root = Path(__file__).absolute().parents[1]
    if (root / "pyproject.toml").is_file():
        return root
    try:
        text = distribution("pyggml").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    url = urlsplit(json.loads(text)["url"]) if text else None
    if url is None or url.scheme != "file":
        return None
    folder = Path(url2pathname(unquote(url.path)))
    return folder if (folder / "pyproject.toml").is_file() else None
