"""Pages that are one file and need no network: a template with its style sheets and scripts inside.

The template escapes every text that it gets. The page's policy lets no script and no style be used
but these, and nothing be fetched.
"""

import base64
import hashlib
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from pyggml.cli.terminal.show import printable
from pyggml.files import replacing


def render(
    package: str,
    template: str,
    styles: Iterable[str],
    scripts: Iterable[str] = (),
    drawn: Iterable[str] = (),
    **fields: Any,
) -> str:
    """The page of a template of this package, which gets `style`, `script`, `policy`, `printable`
    and the fields.

    styles, scripts   files of the package, put one behind the other
    drawn             style sheets that pictures in the page bring with them
    """
    style, script = ("".join(part(package, n) for n in names) for names in (styles, scripts))
    allowed = " ".join(map(hash_of, (style, *drawn)))
    policy = f"default-src 'none'; style-src {allowed}"
    return fill(
        package,
        template,
        style=style,
        script=script,
        policy=f"{policy}; script-src {hash_of(script)}" if script else policy,
        printable=printable,
        **fields,
    )


def fill(package: str, template: str, **fields: Any) -> str:
    """A template of a package with its fields, every text of them escaped. It may extend base.html,
    what pages of one file begin and end with: `first`, `title`, the policy and the style sheets."""
    loader = ChoiceLoader([PackageLoader(name, "") for name in (package, "pyggml.cli.web")])
    environment = Environment(autoescape=True, undefined=StrictUndefined, loader=loader)
    return environment.get_template(template).render(**fields)


def write(path: Path, page: str) -> None:
    """Write a page. Raises PyggmlError if the disk refuses."""
    with replacing(path) as out:
        out.write(page.encode("utf-8", "backslashreplace"))


def part(package: str, name: str) -> str:
    """The text of a file in a package's folder."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def hash_of(text: str) -> str:
    """A text as a policy names it."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
