"""Named frames: the arguments that all tasks of a kernel read, declared once as a class.

class Product(Frame):
    c: Floats1    # m rows of n numbers
    m: Int

Product(c=array, m=3)     in Python: the fields, written one after the other into int64 `words`
f.c, f.m                  in a task: a field, loaded where it is read
f.multiply(…)             a kernel that is declared in the class, called with f before the rest
f.common                  f as a frame of the nearest class that is declared with common=True

So one task serves several classes, each with kernels of its own, and is compiled for each; what
`f.common` is passed to, or called on, once for all that are alike in it. A field that no task reads
costs nothing. Numba knows a frame by its class and the layout of its
fields, so kernels that take one are cached.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Annotated, Any, ClassVar, NamedTuple, dataclass_transform, get_type_hints

import numpy as np
from llvmlite import ir
from numba.core.dispatcher import Dispatcher
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, signature
from numba.extending import (
    infer_getattr,
    lower_getattr_generic,
    models,
    register_model,
)
from numba.np.arrayobj import make_array, populate_array

from pyggml.jit import cgutils, types

_WORD = ir.IntType(64)
_SWITCHES = np.array([0, 1], np.float32)  # off, on
_WHOLE, _REAL, _BOOL = (int, np.integer), (float, np.floating), (bool, np.bool_)


# -- kinds of fields ------------------------------------------------------------------------------


class FieldKind(ABC):
    """What a field holds: how Python writes it into words, and how a task loads it."""

    @property
    @abstractmethod
    def n_words(self) -> int:
        """Words that it takes."""

    @property
    @abstractmethod
    def accepted(self) -> str:
        """What a value is, in the words of an error."""

    @property
    @abstractmethod
    def type(self) -> types.Type:
        """What Numba takes the field for."""

    @abstractmethod
    def words(self, value: Any) -> tuple[int, ...]:
        """A value as words; TypeError if it is none of this kind."""

    @abstractmethod
    def load(self, context: Any, builder: Any, words: Any) -> Any:
        """The LLVM value of the field, whose words begin at this pointer."""

    @property
    def layout(self) -> str:
        """What machine code that reads the field depends on."""
        return str(self.type)

    def _check(self, fits: bool) -> None:
        if not fits:
            raise TypeError(f"wanted {self.accepted}")


def _word(builder: Any, words: Any, i: int = 0) -> Any:
    return builder.load(builder.gep(words, [_WORD(i)]))


@dataclass(frozen=True)
class _Integer(FieldKind):
    """An int, at most 64 bits."""

    n_words = 1
    accepted = "an int"
    type = types.int64

    def words(self, value: Any) -> tuple[int, ...]:
        self._check(isinstance(value, _WHOLE) and not isinstance(value, bool))
        return (int(value),)

    def load(self, context: Any, builder: Any, words: Any) -> Any:
        return _word(builder, words)


@dataclass(frozen=True)
class _Boolean(FieldKind):
    """A bool."""

    n_words = 1
    accepted = "a bool"
    type = types.boolean

    def words(self, value: Any) -> tuple[int, ...]:
        self._check(isinstance(value, _BOOL))
        return (int(value),)

    def load(self, context: Any, builder: Any, words: Any) -> Any:
        return builder.icmp_signed("!=", _word(builder, words), _WORD(0))


@dataclass(frozen=True)
class _Switch(FieldKind):
    """A bool, or one that lies elsewhere as a float32, 0 or 1, and is read as tasks run."""

    n_words = 1
    accepted = "a bool or a float32 array of one number"
    type = types.boolean
    layout = "switch"

    def words(self, value: Any) -> tuple[int, ...]:
        at = _SWITCHES[int(value) :] if isinstance(value, _BOOL) else value
        self._check(isinstance(at, np.ndarray) and at.dtype == np.float32 and at.size > 0)
        return (at.ctypes.data,)

    def load(self, context: Any, builder: Any, words: Any) -> Any:
        bits = builder.inttoptr(_word(builder, words), ir.IntType(32).as_pointer())
        return builder.icmp_signed("!=", builder.load(bits), ir.IntType(32)(0))


@dataclass(frozen=True)
class _Number(FieldKind):
    """A float32."""

    n_words = 1
    accepted = "a float"
    type = types.float32

    def words(self, value: Any) -> tuple[int, ...]:
        self._check(isinstance(value, _REAL))
        return (int(np.float32(value).view(np.int32)),)

    def load(self, context: Any, builder: Any, words: Any) -> Any:
        bits = builder.trunc(_word(builder, words), ir.IntType(32))
        return builder.bitcast(bits, ir.FloatType())


@dataclass(frozen=True)
class _Array(FieldKind):
    """The address and the shape of a C-contiguous array."""

    item: types.Type
    n_axes: int

    @property
    def n_words(self) -> int:
        return 1 + self.n_axes

    @property
    def accepted(self) -> str:
        return f"a C-contiguous {self.item} array of {self.n_axes} axes"

    @property
    def type(self) -> types.Type:
        return types.Array(self.item, self.n_axes, "C")

    @cached_property
    def _dtype(self) -> np.dtype:
        return np.dtype(self.item.name)

    def words(self, value: Any) -> tuple[int, ...]:
        self._check(
            isinstance(value, np.ndarray)
            and value.dtype == self._dtype
            and value.ndim == self.n_axes
            and value.flags.c_contiguous
        )
        return value.ctypes.data, *value.shape

    def load(self, context: Any, builder: Any, words: Any) -> Any:
        array = make_array(self.type)(context, builder)
        item = context.get_data_type(self.item)
        size = context.get_constant(types.intp, context.get_abi_sizeof(item))
        shape = [_word(builder, words, 1 + axis) for axis in range(self.n_axes)]
        strides = [size]
        for n in reversed(shape[1:]):
            strides.insert(0, builder.mul(strides[0], n))
        populate_array(
            array,
            data=builder.inttoptr(_word(builder, words), item.as_pointer()),
            shape=shape,
            strides=strides,
            itemsize=size,
            meminfo=None,  # whoever made the frame keeps the memory
        )
        return array._getvalue()


@dataclass(frozen=True)
class _Group(FieldKind):
    """A NamedTuple of ints, which several frames have in common."""

    group: Any  # the class

    @property
    def n_words(self) -> int:
        return len(self.group._fields)

    @property
    def accepted(self) -> str:
        return f"a {self.group.__name__} of ints"

    @property
    def layout(self) -> str:
        return f"{self.group.__name__}{self.group._fields}"

    @property
    def type(self) -> types.Type:
        return types.NamedUniTuple(types.int64, self.n_words, self.group)

    def words(self, value: Any) -> tuple[int, ...]:
        self._check(isinstance(value, self.group) and all(isinstance(x, _WHOLE) for x in value))
        return tuple(value)

    def load(self, context: Any, builder: Any, words: Any) -> Any:
        values = [_word(builder, words, i) for i in range(self.n_words)]
        return context.make_tuple(builder, self.type, values)


Int = Annotated[int, _Integer()]
Bool = Annotated[bool, _Boolean()]
Switch = Annotated[bool | np.ndarray, _Switch()]
Float = Annotated[float, _Number()]
Floats1 = Annotated[np.ndarray, _Array(types.float32, 1)]
Floats2 = Annotated[np.ndarray, _Array(types.float32, 2)]
Floats3 = Annotated[np.ndarray, _Array(types.float32, 3)]
Floats4 = Annotated[np.ndarray, _Array(types.float32, 4)]
Ints1 = Annotated[np.ndarray, _Array(types.int32, 1)]  # int32
Ints2 = Annotated[np.ndarray, _Array(types.int32, 2)]
Bytes2 = Annotated[np.ndarray, _Array(types.uint8, 2)]
Longs1 = Annotated[np.ndarray, _Array(types.int64, 1)]  # int64
Longs2 = Annotated[np.ndarray, _Array(types.int64, 2)]
Bytes3 = Annotated[np.ndarray, _Array(types.uint8, 3)]  # uint8: blocks of a quantised type
Shorts1 = Annotated[np.ndarray, _Array(types.uint16, 1)]  # uint16: bits of float16 or bfloat16
Shorts3 = Annotated[np.ndarray, _Array(types.uint16, 3)]

# -- frames ---------------------------------------------------------------------------------------


class FrameField(NamedTuple):
    """Where a field begins, in words, and what it holds."""

    start: int
    kind: FieldKind


@dataclass_transform(kw_only_default=True)
class Frame:
    """Base of all frames; a subclass lists its fields and kernels, and inherits those of its base.

    The arrays that it was made of stay alive as long as it does. Making it raises TypeError for a
    field that is missing, unknown or of another kind.
    """

    fields: ClassVar[Mapping[str, FrameField]] = {}
    n_words: ClassVar[int] = 0
    COMMON: ClassVar[type["Frame"] | None] = None  # what `f.common` is a frame of; None: its own
    words: np.ndarray
    address: int  # of the words
    values: dict[str, Any]  # of the fields

    def __init_subclass__(cls, common: bool = False) -> None:
        fields, start = {}, 0
        for name, hint in get_type_hints(cls, include_extras=True).items():
            kind = _kind_of(hint)
            if kind is not None:
                fields[name] = FrameField(start, kind)
                start += kind.n_words
        cls.fields, cls.n_words = fields, start
        cls.COMMON = cls if common else cls.COMMON
        if cls.COMMON is not None and not cls.COMMON.fields.items() <= fields.items():
            raise TypeError(
                f"{cls.__name__}: the fields of {cls.COMMON.__name__} are not its first"
            )

    def __init__(self, **values: Any) -> None:
        missing = [name for name in self.fields if name not in values]
        if missing:
            raise TypeError(f"{type(self).__name__}: {', '.join(missing)} missing")
        words: list[int] = []
        for name in {**self.fields, **values}:  # in the order of the fields, unknown ones last
            words += self._words_of(name, values[name])
        self.words = np.array(words, np.int64)
        self.address = self.words.ctypes.data
        self.values = values

    def put(self, **values: Any) -> None:
        """Write fields anew; tasks that run afterwards read them."""
        for name, value in values.items():
            words = self._words_of(name, value)
            start = self.fields[name].start
            self.words[start : start + len(words)] = words
            self.values[name] = value

    def _words_of(self, name: str, value: Any) -> tuple[int, ...]:
        """A value as the words of this field."""
        field = self.fields.get(name)
        if field is None:
            raise TypeError(f"{type(self).__name__} has no field {name}")
        try:
            return field.kind.words(value)
        except TypeError as error:
            raise TypeError(
                f"{type(self).__name__}.{name}: {error}, found {_summary(value)}"
            ) from None


def _kind_of(hint: Any) -> FieldKind | None:
    for mark in getattr(hint, "__metadata__", ()):
        if isinstance(mark, FieldKind):
            return mark
    is_group = isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")
    return _Group(hint) if is_group else None


def _summary(value: Any) -> str:
    if isinstance(value, np.ndarray):
        gaps = "" if value.flags.c_contiguous else " with gaps"
        return f"{value.dtype} of {value.ndim} axes{gaps}"
    return f"{value!r}"


# -- what Numba knows of them ---------------------------------------------------------------------


class FrameType(types.Type):  # type: ignore[misc]  # Numba has no annotations
    """Numba's type of a frame: a pointer to its words."""

    def __init__(self, declaration: type[Frame]) -> None:
        self.declaration = declaration
        layout = [(name, f.start, f.kind.layout) for name, f in declaration.fields.items()]
        digest = hashlib.sha256(repr(layout).encode()).hexdigest()[:12]
        where = declaration.__module__, declaration.__qualname__
        super().__init__(name=f"Frame({'.'.join(where)}, {digest})")

    def __reduce__(self) -> tuple:
        where = self.declaration.__module__, self.declaration.__qualname__
        return _frame_type, (*where, self.name)


def _frame_type(module: str, name: str, known_as: str) -> types.Type:
    """The type that a cache file names; one that fits nothing if its class is gone or changed."""
    try:
        kind = FrameType(getattr(import_module(module), name))
    except (ImportError, AttributeError):
        return types.Opaque(known_as)
    return kind if kind.name == known_as else types.Opaque(known_as)


@register_model(FrameType)
class _Pointer(models.PrimitiveModel):  # type: ignore[misc] # Numba has no types
    def __init__(self, manager: Any, frame: Any) -> None:
        super().__init__(manager, frame, _WORD.as_pointer())


class _MethodType(types.BoundFunction):  # type: ignore[misc] # Numba has no types
    """Numba's type of `f.name`: a kernel of f's class that is called with f before the rest."""

    def __init__(self, code: Any, frame: FrameType) -> None:
        self._kernel = code

        class Signatures(AbstractTemplate):  # type: ignore[misc] # Numba has no types
            key = code

            def generic(self, args: tuple, kws: dict) -> Any:
                takes = types.Dispatcher(code).get_call_type(self.context, (frame, *args), kws)
                return signature(takes.return_type, *takes.args[1:], recvr=frame)

        super().__init__(Signatures, frame)

    def get_impl_key(self, sig: Any) -> Any:
        return self._kernel.get_overload(sig.args)


register_model(_MethodType)(_Pointer)


@infer_getattr
class _FieldTypes(AttributeTemplate):  # type: ignore[misc] # Numba has no types
    key = FrameType

    def generic_resolve(self, frame: FrameType, name: str) -> types.Type | None:
        if name == "common":
            return FrameType(frame.declaration.COMMON or frame.declaration)
        field = frame.declaration.fields.get(name)
        if field is not None:
            return field.kind.type
        code = getattr(frame.declaration, name, None)
        return _MethodType(code, frame) if isinstance(code, Dispatcher) else None


@lower_getattr_generic(FrameType)
def _load_field(context: Any, builder: Any, frame: FrameType, words: Any, name: str) -> Any:
    if name == "common":
        return words
    start, kind = frame.declaration.fields[name]
    return kind.load(context, builder, cgutils.gep_inbounds(builder, words, start))
