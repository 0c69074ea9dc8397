"""JSON schemas of every kind: of random logits answers validate; what cannot hold is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator, FormatChecker

import pyggml
from pyggml import tokenizer
from pyggml.errors import ConfigError
from pyggml.generation import Completion, Sampling
from pyggml.generation.form import follower

BOOLEAN, NULL = {"type": "boolean"}, {"type": "null"}


def closed(properties, required=None, **more):
    required = [*properties] if required is None else required
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    } | more


def texts(**more):
    return {"type": "string", **more}


def lists(items, **more):
    return {"type": "array", "items": items, **more}


NODE = closed({"v": BOOLEAN, "kids": lists({"$ref": "#/$defs/node"}, maxItems=1)})
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMAS = {
    "nested arrays": lists(lists(lists(BOOLEAN, maxItems=2), minItems=1, maxItems=2), maxItems=3),
    "tuple": lists({"enum": [1, 2.5]}, prefixItems=[{"const": "v"}, DIGIT], minItems=2, maxItems=4),
    "enumeration": {"enum": ['a"b\\c', "é😀", -1.5, None, True, [1, {"a": 2}], {"k": []}]},
    "constant": {"const": {"a": [1, 2, {"b": None}], "": "\n"}},
    "pattern": texts(pattern="^(foo|ba[rz])-[0-9a-f]{4}$"),
    "pattern anywhere": texts(pattern="[0-9]{3}", maxLength=12),
    "pattern and length": texts(pattern="^[a-z]*$", minLength=3, maxLength=5),
    "length": texts(minLength=2, maxLength=4),
    "whole number": {"type": "integer", "minimum": -17, "maximum": 1234},
    "exclusive": {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 12},
    "number": {"type": "number", "minimum": -0.75, "exclusiveMaximum": 3.14},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    "fraction": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 2},
    "anyOf": {"anyOf": [DIGIT, texts(maxLength=2), closed({"a": NULL})]},
    "oneOf": {
        "oneOf": [
            closed({"t": {"const": "a"}, "x": DIGIT}),
            closed({"t": {"const": "b"}, "y": texts(maxLength=3)}),
        ]
    },
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    "recursion": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "of itself": closed({"next": {"anyOf": [{"$ref": "#"}, NULL]}}),
    "additional": {"type": "object", "additionalProperties": DIGIT, "maxProperties": 2},
    "additional beside": closed({"a": BOOLEAN}, additionalProperties=NULL, maxProperties=3),
    "names by pattern": closed({}, patternProperties={"^x[0-9]$": BOOLEAN}, maxProperties=2),
    "several names": {"type": "object", "additionalProperties": NULL, "minProperties": 2},
    "types": {"type": ["integer", "null", "boolean"], "minimum": 0, "maximum": 3},
    "optional": closed({"a": BOOLEAN, "b": BOOLEAN, "c": BOOLEAN}, ["b"]),
    "unicode": closed({'naïve "key"': BOOLEAN, "日本": NULL}),
    "words about it": {"type": "boolean", "title": "t", "default": True, "x-other": 1},
    **{
        f"format {name}": texts(format=name)
        for name in ("date", "date-time", "duration", "hostname", "ipv4", "ipv6", "uuid")
    },
}
REFUSED = {  # by the word that is to be in the sentence
    "uniqueItems": lists({}, uniqueItems=True),
    "contains": lists({}, contains=DIGIT),
    "not": {"not": texts()},
    '"if"': {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "oneOf": {"oneOf": [DIGIT, {"type": "number"}]},  # of which both may be
    "Unknown format: iri": texts(format="iri"),
    "Invalid type: float": {"type": "float"},
    "greater than maximum": {"type": "integer", "minimum": 5, "maximum": 3},
    "unsatisfiable": closed({}, ["zz"]),
}


@pytest.fixture(scope="module")
def words():
    return tokenizer.from_gguf(Path(pyggml.__file__).parents[1] / "cli/demo/base.gguf")


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_validates(name, words):
    """A model without any sense, at temperature 2."""
    schema, rng = SCHEMAS[name], np.random.default_rng(len(name))
    for seed in range(3):
        how = Sampling(temperature=2, seed=seed, json_schema=json.dumps(schema))
        completion, text = Completion(words, how, (), 2000), ""
        while completion.finish is None:
            logits = rng.normal(0, 4, words.n_vocab).astype(np.float32)
            for piece in [completion.take(logits), *completion.forced_pieces(99)]:
                text += piece.text
        assert completion.finish.reason == "stop", text[-99:]
        Draft202012Validator(schema, format_checker=FormatChecker()).validate(json.loads(text))


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_held_is_refused_by_name(word, words):
    with pytest.raises(ConfigError, match=re.escape(word)):
        follower(Sampling(json_schema=json.dumps(REFUSED[word])), words, ())
