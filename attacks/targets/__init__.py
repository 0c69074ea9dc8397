"""The parsers of foreign bytes: how each is given an input, its seeds, and what it may raise.

A seed is an input that a parser reads to its end. Each is made by the library's own writers, so
that it follows the formats as they change.
"""

from collections.abc import Mapping

from attacks.targets import data, kernels, models, servers, templates
from attacks.targets.models import model, small_model
from attacks.targets.servers import serve_app
from attacks.targets.target import Target

__all__ = ["TARGETS", "Target", "model", "serve_app", "small_model"]

_FAMILIES = models, data, templates, servers, kernels
TARGETS: Mapping[str, Target] = {
    target.name: target for family in _FAMILIES for target in family.TARGETS
}
