"""All architectures, which are those that the files of this folder declare: name in
`general.architecture` -> declaration. The plainest is the first, the others are by name."""

from pyggml.files.declared import declared_in
from pyggml.models.architecture import Architecture

_BY_NAME = {a.name: a for a in declared_in(__name__, __path__, Architecture)}
_NAMES = sorted(_BY_NAME, key=lambda name: (name != "llama", name))
ARCHITECTURES = {name: _BY_NAME[name] for name in _NAMES if not _BY_NAME[name].embeds}
ENCODERS = {name: _BY_NAME[name] for name in _NAMES if _BY_NAME[name].embeds}
