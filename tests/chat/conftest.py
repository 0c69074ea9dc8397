"""Conversations, templates of real models, and a vocabulary with names of turns."""

import functools
import json

import pytest

from pyggml.chat import ChatTemplate

import chats


@pytest.fixture(scope="session")
def conversations():
    return json.loads((chats.GOLDEN / "conversations.json").read_text("utf-8"))


@pytest.fixture(scope="session")
def template(shared):
    """Makes the template of a real model by its name."""

    @functools.cache
    def make(name):
        source = (shared / f"templates/{name}.jinja").read_text("utf-8")
        return ChatTemplate(source, name, {"bos_token": "<s>", "eos_token": "</s>"}, chats.DAY)

    return make


@pytest.fixture(scope="session")
def vocabulary():
    return chats.vocabulary
