"""Named frames: what goes in comes out by name, what does not fit is refused, and kernels that take
a frame are kept for the next process."""

from typing import NamedTuple

import numpy as np
import pytest
from processes import printed

from pyggml.jit import JIT, kernel
from pyggml.jit.frames import (
    Bool,
    Float,
    Floats1,
    Floats2,
    Floats3,
    Frame,
    FrameType,
    Int,
    Ints2,
    Shorts1,
    Shorts3,
)
from pyggml.jit.tasks import launch, stage, task_code

needs_jit = pytest.mark.skipif(not JIT, reason="tasks need the JIT")


class Pair(NamedTuple):
    first: int
    second: int


class Every(Frame):
    """One field of each kind."""

    out: Floats1
    matrix: Floats2
    cube: Floats3
    span: Ints2
    bits: Shorts1
    cache: Shorts3
    pair: Pair
    n: Int
    scale: Float
    on: Bool


class More(Every):
    last: Int


class Sum(Frame):
    out: Floats1
    a: Float

    @kernel
    def of_two(f, b):
        return f.a + b


class Product(Sum):
    c: Float

    @kernel
    def of_two(f, b):
        return f.a * b * f.c


class Inherits(Product):
    pass


class Alike(Sum, common=True):
    @kernel
    def twice_of_two(f, b):
        return 2 * f.of_two(b)


class AlikeToo(Alike):
    d: Float


def write_of_two(f, task, thread):
    f.out[task] = f.of_two(np.float32(task))


@kernel
def read_pair(f):
    return f.pair.first - f.pair.second


@task_code(Every)
def read_every(f, task, thread):
    out = f.out
    out[0], out[1], out[2] = f.matrix[1, 2], f.cube[1, 1, 3], f.span[2, 1]
    out[3], out[4], out[5] = f.bits[4], f.cache[1, 0, 1], read_pair(f)
    out[6], out[7], out[8] = f.n, f.scale, f.on
    out[9], out[10] = f.cube.shape[2], f.matrix.shape[0]


@task_code(More)
def read_more(f, task, thread):
    f.out[task] = f.last + read_pair(f)


def values():
    return {
        "out": np.full(16, -1, np.float32),
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
        "cube": np.arange(16, dtype=np.float32).reshape(2, 2, 4),
        "span": np.arange(6, dtype=np.int32).reshape(3, 2) - 9,
        "bits": np.arange(60_000, 60_005, dtype=np.uint16),
        "cache": np.arange(8, dtype=np.uint16).reshape(2, 2, 2),
        "pair": Pair(1 << 40, 5),
        "n": -7,
        "scale": np.float32(0.25),
        "on": True,
    }


@pytest.mark.quick
@needs_jit
def test_a_task_reads_what_was_put_in():
    given = values()
    launch(stage(read_every, Every(**given), 1))
    wanted = [5, 15, -4, 60_004, 5, (1 << 40) - 5, -7, 0.25, 1, 4, 2]
    np.testing.assert_array_equal(given["out"][:11], np.float32(wanted))


@needs_jit
def test_a_field_that_is_put_anew_is_read_anew():
    given = values()
    frame = Every(**given)
    stages = stage(read_every, frame, 1)
    frame.put(n=12, on=False)
    launch(stages)
    assert given["out"][6] == 12 and given["out"][8] == 0


@pytest.mark.quick
@needs_jit
def test_a_frame_has_the_fields_of_its_base():
    given = values() | {"pair": Pair(9, 5)}
    launch(stage(read_more, More(**given, last=20), 3))
    assert given["out"][:4].tolist() == [24, 24, 24, -1]


@needs_jit
@pytest.mark.parametrize(("frame", "more", "wanted"), [
    (Sum, {}, [3, 4]), (Product, {"c": 2.0}, [0, 6]), (Inherits, {"c": 3.0}, [0, 9]),
])  # fmt: skip
def test_a_task_calls_the_kernels_of_its_frame_s_class(frame, more, wanted):
    out = np.zeros(2, np.float32)
    launch(stage(task_code(frame)(write_of_two), frame(out=out, a=3.0, **more), 2))
    assert out.tolist() == wanted


@needs_jit
def test_what_is_common_to_classes_is_compiled_once():
    out = np.zeros(1, np.float32)

    def write_twice(f, task, thread):
        f.out[task] = f.common.twice_of_two(np.float32(task))

    for frame, more in ((Alike, {}), (AlikeToo, {"d": 7.0})):
        launch(stage(task_code(frame)(write_twice), frame(out=out, a=3.0, **more), 1))
        assert out[0] == 6
    assert len(Alike.twice_of_two.overloads) <= 1  # none where the tasks were kept


def test_the_fields_of_a_common_class_come_first():
    class Behind(Frame):
        n: Int

    with pytest.raises(TypeError, match="^Mixed: the fields of Alike are not its first$"):
        type("Mixed", (Alike, Behind), {"__module__": __name__})


WRONG = {
    "scale": (1, "a float"),
    "n": (True, "an int"),
    "on": (1, "a bool"),
    "pair": ((1, 2), "a Pair of ints"),
    "matrix": (np.zeros((2, 3)), "a C-contiguous float32 array of 2 axes, found float64 of 2 axes"),
    "cube": (np.zeros((2, 3), np.float32), "of 3 axes, found float32 of 2 axes"),
    "span": (np.zeros((3, 4), np.int32)[:, ::2], "found int32 of 2 axes with gaps"),
    "bits": (np.zeros(3, np.float16), "a C-contiguous uint16 array of 1 axes"),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", WRONG)
def test_a_value_of_another_kind_is_refused_by_name(name):
    value, wanted = WRONG[name]
    with pytest.raises(TypeError, match=rf"^Every\.{name}: wanted .*{wanted}"):
        Every(**values() | {name: value})


@pytest.mark.quick
def test_a_field_that_is_missing_or_unknown_is_refused_by_name():
    given = values()
    del given["matrix"], given["on"]
    with pytest.raises(TypeError, match="^Every: matrix, on missing$"):
        Every(**given)
    with pytest.raises(TypeError, match="^Every has no field m$"):
        Every(**values(), m=1)


def declared(**fields):
    return type("Declared", (Frame,), {"__annotations__": fields, "__module__": __name__})


def test_numba_tells_layouts_of_a_class_apart():
    """A helper in another file, kept for the fields as they were, must not serve the new ones."""
    one, same, other = declared(a=Int, b=Bool), declared(a=Int, b=Bool), declared(b=Bool, a=Int)
    assert FrameType(one) == FrameType(same) != FrameType(other)


SCRIPT = """
import numpy as np
from numba.core import event
compiled = []
class Listener(event.Listener):
    def on_start(self, e): compiled.append(e)
    def on_end(self, e): pass
event.register("numba:run_pass", Listener())
from pyggml.kernels import gemm
from pyggml.backends.cpu import CPU
from pyggml.graph.dtypes import dtype
kind = dtype("Q4_K")
w = np.zeros((130, kind.row_bytes(256)), np.uint8)
for compute, tokens in (("f32", 40), ("int8", 1)):
    x, y = np.ones((tokens, 256), np.float32), np.zeros((tokens, 130), np.float32)
    p = gemm.Problem("mul_mat", tokens, 130, 256, kind, compute)
    work = CPU().alloc(gemm.scratch_bytes(p))
    gemm.mul_mat(y, x, gemm.Weight(w, kind, compute), work, False)()
print(len(compiled))
"""


@needs_jit
def test_a_second_process_compiles_no_task_again(tmp_path):
    found = [printed(SCRIPT, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    assert int(found[0]) > 0 and int(found[1]) == 0
