"""Products with one matrix per expert, all experts in one launch: row i is one of expert ids[i].

rows   c[i] = a[i] · B[e]       the rows of an expert together; B = Wᵀ or W, W (E, …) of any type
sums   c[e] = Σ a[i]ᵀ · b[i]    over the rows i of expert e

An expert's product runs on the path that would serve it alone, with the same bits. Its frame is
written by compiled code: the words of a template, which a product of as many rows has, plus the
addresses that are its own. So the threads share out the tasks of all experts, and a token, whose
experts have a row each, costs little more than reading their weights.

Rows are sorted by expert and gathered, as many at a time (a wave) as stay in the caches; a single
row is read and written where it lies.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from pyggml.graph.dtypes import F32, DType
from pyggml.jit import kernel
from pyggml.jit.frames import Bool, Floats2, Frame, Int, Ints1, Longs1, Longs2
from pyggml.jit.regions import call_task, run_tasks
from pyggml.jit.scratch import LINE, Array, Layout, Scratch
from pyggml.jit.tasks import launch, stage, task_code
from pyggml.kernels.gemm.frames import BlockMatrix
from pyggml.kernels.gemm.path import Form, Operands, Problem, ProductPath, layout_of
from pyggml.kernels.gemm.paths import largest_of_each_path, path_of
from pyggml.kernels.kernel import Compute
from pyggml.sizes import round_up

LEAST_ROWS = 256  # that a wave has room for
FAMILIES = 64  # whose tables are remembered
COPIED_ROWS = 16  # of a task that gathers or scatters
_STAGES = 2  # of a path at most: packing, multiplying
# What a word of a frame is counted from: 0, an operand of the job, or memory of the launch.
_ZERO, _C, _A, _B, _SCRATCH, _PACKED = range(6)
# Words of a job: for each stage the address of its code and the number of tasks up to this job's
# last; then its frame.
_CODE, _END, _STAGE_WORDS = range(3)
_FRAME = _STAGES * _STAGE_WORDS
# Words of a wave's head: jobs, gathered rows, packed bytes; what is missing, see `_missing`.
_JOBS, _ROWS, _BYTES, _MISSING = range(4)


# -- frames of products of some number of rows ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Family:
    """The products of one expert: of `form`, with 1 to `most` rows. n, k: as in Problem; with
    strided, which sums over rows, c is (n, k)."""

    form: Form
    n: int
    k: int
    most: int
    weight_type: DType = F32
    compute: Compute = "f32"

    def problem(self, n_rows: int) -> Problem:
        """The product of so many rows."""
        if self.form == "strided":
            return Problem("strided", self.n, self.k, n_rows, a_in_columns=True, b_in_columns=True)
        return Problem(self.form, n_rows, self.n, self.k, self.weight_type, self.compute)

    def operands(self, n_rows: int) -> tuple[np.ndarray, ...]:
        """c, a and b of these shapes; they hold nothing, and take no memory before they do."""
        n, k, kind = self.n, self.k, self.weight_type
        if self.form == "strided":
            shapes: Any = (1, n, k), (n_rows, n), (n_rows, k)
            c, a, b = (np.empty(shape, np.float32) for shape in shapes)
            return c, a.T[None], b.T[None]
        rows, row = (n, k) if self.form == "mul_mat" else (k, n)
        c, a = (np.empty((n_rows, width), np.float32) for width in (n, k))
        return c, a, np.empty((rows, kind.row_bytes(row) // kind.numpy.itemsize), kind.numpy)

    @property
    def paths(self) -> dict[ProductPath, int]:
        """The paths that serve them, and the most rows of each."""
        sizes = [self.most] if self.form == "strided" else largest_of_each_path(self.most)
        paths: dict[ProductPath, int] = {}
        for n_rows in sorted(sizes):
            paths[path_of(self.problem(n_rows))] = n_rows
        return paths


class Template(NamedTuple):
    """A product of some number of rows: the words of its frame, what each is counted from, its
    stages' codes and tasks, and the bytes that it packs."""

    words: list[int]
    bases: list[int]
    stages: list[int]
    packed_bytes: int


class TemplateTable:
    """The templates of a family, made when they are needed; row n is that of n rows.

    joins         whether all of its products run in one launch; those of NumPy do not
    wave          rows that a wave gathers at most
    wave_bytes    that it packs at most
    n_scratch     bytes of the arrays that threads work in, the same for all of a path's products
    """

    def __init__(self, family: Family) -> None:
        self._family, self.n_scratch = family, 0
        self._scratch: dict[ProductPath, tuple[int, Layout]] = {}
        for path, n_rows in family.paths.items():
            own = _some(layout_of(path, family.problem(n_rows)), of_threads=True)
            self._scratch[path] = self.n_scratch, own
            self.n_scratch += own.n_bytes
        optional = {n: self._template(n) for n in family.paths.values()}
        self.joins = None not in optional.values()
        templates = {n: template for n, template in optional.items() if template}
        width = max((len(t.words) for t in templates.values()), default=0)
        shape = family.most + 1, width
        self.words, self.bases = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.stages = np.zeros((family.most + 1, _FRAME), np.int64)
        self.packed_bytes = np.zeros(family.most + 1, np.int64)
        self.wave = max(family.most, LEAST_ROWS)
        sizes = (t.packed_bytes * -(-self.wave // n) for n, t in templates.items())
        self.wave_bytes = max(sizes, default=0)

    def add(self, n_rows: int) -> None:
        """Make the template of this number of rows."""
        template = self._template(n_rows)
        assert template is not None
        n = len(template.words)
        self.words[n_rows, :n], self.bases[n_rows, :n] = template.words, template.bases
        self.packed_bytes[n_rows], self.stages[n_rows] = template.packed_bytes, template.stages

    def _template(self, n_rows: int) -> Template | None:
        """A product of n_rows as the words of its frame.

        None if its path does not launch tasks over one frame.
        """
        p = self._family.problem(n_rows)
        path, (c, a, b) = path_of(p), self._family.operands(n_rows)
        (start, own), shared = self._scratch[path], _some(layout_of(path, p), of_threads=False)
        scratch, packed = (np.empty(n, np.uint8) for n in (self.n_scratch, shared.n_bytes))
        o = Operands(c, a, b, scratch, accumulate=self._family.form == "strided")
        call = path.bind(p, o, **own.cut(scratch[start:]), **shared.cut(packed))
        if call.kernel is not launch or len({id(each.lies) for each in call.arguments}) != 1:
            return None
        memory = {_C: c, _A: a, _B: b, _SCRATCH: scratch, _PACKED: packed}
        frame = call.arguments[0].lies
        words, bases, n_packed = frame.words.tolist(), _bases(frame, memory), shared.n_bytes
        for place, array in _own_arrays(frame, memory):  # of each job, behind what it packs
            words[place], bases[place] = packed.ctypes.data + n_packed, _PACKED
            n_packed += round_up(array.nbytes, LINE)
        starts = {base: array.ctypes.data for base, array in memory.items()} | {_ZERO: 0}
        stages = [number for each in call.arguments for number in (each.code, each.n_tasks)]
        none = [0] * (_FRAME - len(stages))  # a path without packing: its only stage is the last
        return Template(
            [word - starts[base] for word, base in zip(words, bases, strict=True)],
            bases,
            none + stages,
            n_packed,
        )


def _own_arrays(frame: Frame, memory: dict[int, np.ndarray]) -> list[tuple[int, np.ndarray]]:
    """The arrays that a path makes for its product alone, such as a team's counters, which its
    packing sets to 0: the place of each one's address among the words, and the array."""
    owners = {id(_owner(a)) for a in memory.values()}
    arrays = ((frame.fields[n].start, v) for n, v in frame.values.items() if _is_array(v))
    return [(place, v) for place, v in arrays if v.size and id(_owner(v)) not in owners]


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def _bases(frame: Frame, memory: dict[int, np.ndarray]) -> list[int]:
    """What each word is counted from. The first of an array is an address in its owner's memory;
    that of a BlockMatrix is one in B."""
    bases, owners = [_ZERO] * frame.n_words, {id(_owner(a)): base for base, a in memory.items()}
    for name, field in frame.fields.items():
        value = frame.values[name]
        if isinstance(value, BlockMatrix):
            bases[field.start + BlockMatrix._fields.index("address")] = _B
        elif _is_array(value):
            bases[field.start] = owners.get(id(_owner(value)), _ZERO)
    return bases


def _owner(array: Any) -> Any:
    """What owns the memory that an array, or what NumPy puts between, looks into."""
    while array.base is not None:
        array = array.base
    return array


def _some(layout: Layout, of_threads: bool) -> Layout:
    """The arrays that each thread has its own of, or the others."""
    return Layout(**{n: a for n, a in layout.arrays.items() if a.of_threads == of_threads})


table_of = lru_cache(FAMILIES)(TemplateTable)

# -- the launch -----------------------------------------------------------------------------------


class ExpertFrame(Frame):
    """All products of one node."""

    ids: Ints1
    n_expert: Int
    is_sums: Bool
    a: Floats2
    a_repeats: Int  # ids for each of its rows
    rows: Floats2  # c; of sums, b
    rows_repeats: Int
    matrices: Int  # the address of the first expert's: B's, of sums c's
    matrix_bytes: Int
    most: Int  # rows of a job
    words: Longs2  # the table
    bases: Longs2
    stages: Longs2
    packed_bytes: Longs1
    order: Ints1  # numbers of rows, sorted by expert
    ends: Longs1  # of each expert's in `order`
    # of a wave
    head: Longs1
    jobs: Longs2
    gathered: Ints1  # numbers of its rows
    a_part: Floats2
    rows_part: Floats2
    packed: Longs1
    scratch: Int
    # addresses of the frame itself, and of the tasks below
    own: Int
    gather: Int
    pack: Int
    multiply: Int
    scatter: Int


@kernel
def _copy(to, of):
    for j in range(of.size):
        to[j] = of[j]


@task_code(ExpertFrame)
def _gather_task(f, task, thread):
    for i in range(task * COPIED_ROWS, min((task + 1) * COPIED_ROWS, f.head[_ROWS])):
        row = f.gathered[i]
        _copy(f.a_part[i], f.a[row // f.a_repeats])
        if f.is_sums:
            _copy(f.rows_part[i], f.rows[row // f.rows_repeats])


@task_code(ExpertFrame)
def _scatter_task(f, task, thread):
    for i in range(task * COPIED_ROWS, min((task + 1) * COPIED_ROWS, f.head[_ROWS])):
        _copy(f.rows[f.gathered[i]], f.rows_part[i])


@kernel
def _run_job(f, which, task, thread):
    """Task number `task` of a stage of all jobs."""
    jobs, end = f.jobs, _STAGE_WORDS * which + _END
    low, high = 0, f.head[_JOBS] - 1
    while low < high:
        middle = (low + high) // 2
        if jobs[middle, end] > task:
            high = middle
        else:
            low = middle + 1
    before = jobs[low - 1, end] if low else 0
    frame = jobs[low, _FRAME:].ctypes.data
    call_task(jobs[low, _STAGE_WORDS * which + _CODE], frame, task - before, thread)


@task_code(ExpertFrame)
def _pack_task(f, task, thread):
    _run_job(f, 0, task, thread)


@task_code(ExpertFrame)
def _multiply_task(f, task, thread):
    _run_job(f, 1, task, thread)


@kernel
def _run_wave(f):
    """Run the jobs that were added, and begin with the next ones."""
    head, jobs = f.head, f.jobs
    last, n_copies = head[_JOBS] - 1, (head[_ROWS] + COPIED_ROWS - 1) // COPIED_ROWS
    run_tasks(f.gather, f.own, n_copies)
    run_tasks(f.pack, f.own, jobs[last, _END])
    run_tasks(f.multiply, f.own, jobs[last, _STAGE_WORDS + _END])
    if not f.is_sums:
        run_tasks(f.scatter, f.own, n_copies)
    head[_JOBS] = head[_ROWS] = head[_BYTES] = 0


@kernel
def _sort(f):
    """Fill `order` and `ends`; whether all ids are experts."""
    ids, ends = f.ids, f.ends
    for e in range(f.n_expert):
        ends[e] = 0
    for i in range(ids.size):
        if ids[i] < 0 or ids[i] >= f.n_expert:
            return False
        ends[ids[i]] += 1
    start = 0
    for e in range(f.n_expert):
        n = ends[e]
        ends[e] = start
        start += n
    for i in range(ids.size):
        e = ids[i]
        f.order[ends[e]] = i
        ends[e] += 1
    return True


@kernel
def _missing(f):
    """A number of rows without a template; 0 if none is missing, −1 if an id is no expert."""
    if not _sort(f):
        return -1
    for e in range(f.n_expert):
        n = f.ends[e] - (f.ends[e - 1] if e else 0)
        if n >= f.most and f.stages[f.most, _STAGE_WORDS + _END] == 0:
            return f.most
        if n % f.most and f.stages[n % f.most, _STAGE_WORDS + _END] == 0:
            return n % f.most
    return 0


@kernel
def _add_job(f, expert, start, n):
    """The next job: n rows of an expert, from place `start` in `order`."""
    head, jobs = f.head, f.jobs
    n_gathered = n if n > 1 else 0
    is_full = head[_JOBS] == len(jobs) or head[_ROWS] + n_gathered > len(f.gathered)
    if is_full or head[_BYTES] + f.packed_bytes[n] > 8 * f.packed.size:
        _run_wave(f)
    first, row = head[_ROWS], f.order[start]
    for i in range(n_gathered):
        f.gathered[first + i] = f.order[start + i]
    a, other = f.a[row // f.a_repeats].ctypes.data, f.rows[row // f.rows_repeats].ctypes.data
    if n_gathered:
        a, other = f.a_part[first].ctypes.data, f.rows_part[first].ctypes.data
    own = f.matrices + expert * f.matrix_bytes
    c, b = (own, other) if f.is_sums else (other, own)
    packed = f.packed.ctypes.data + head[_BYTES]
    job, number, words, bases = jobs[head[_JOBS]], head[_JOBS], f.words[n], f.bases[n]
    for i in range(words.size):
        base = bases[i]
        from_where = f.scratch if base == _SCRATCH else packed if base == _PACKED else 0
        operand = c if base == _C else a if base == _A else b if base == _B else from_where
        job[_FRAME + i] = words[i] + operand
    for which in range(_STAGES):
        at = _STAGE_WORDS * which
        before = jobs[number - 1, at + _END] if number else 0
        job[at + _CODE] = f.stages[n, at + _CODE]
        job[at + _END] = before + f.stages[n, at + _END]
    head[_JOBS] += 1
    head[_ROWS] += n_gathered
    head[_BYTES] += f.packed_bytes[n]


@task_code(ExpertFrame)
def _all_task(f, task, thread):
    f.head[_MISSING] = _missing(f)
    if f.head[_MISSING] != 0:
        return
    f.head[_JOBS] = f.head[_ROWS] = f.head[_BYTES] = 0
    start = 0
    for expert in range(f.n_expert):
        first, end = start, f.ends[expert]
        while start < end:
            n = min(f.most, end - start)
            if f.is_sums and start > first:  # both are added to the same numbers
                _run_wave(f)
            _add_job(f, expert, start, n)
            start += n
    if f.head[_JOBS] > 0:
        _run_wave(f)


# -- what ops call --------------------------------------------------------------------------------


def layout(family: Family, n_rows: int, n_expert: int) -> Layout | None:
    """The scratch of a node with so many ids; None if its products run one by one."""
    if 0 in (family.n, family.k, n_rows):
        return None
    table = table_of(family)
    if not table.joins:
        return None
    wave = min(n_rows, table.wave)
    a, rows = (family.n, family.k) if family.form == "strided" else (family.k, family.n)
    n_jobs = min(n_rows, 2 * n_expert)
    return Layout(
        order=Array((n_rows,), np.int32),
        ends=Array((n_expert,), np.int64),
        head=Array((4,), np.int64),
        jobs=Array((n_jobs, _FRAME + table.words.shape[1]), np.int64),
        gathered=Array((wave,), np.int32),
        a_part=Array((wave, a)),
        rows_part=Array((wave, rows)),
        packed=Array((-(-table.wave_bytes // 8),), np.int64),
        scratch=Array((table.n_scratch,), np.uint8),
    )


class ProductsByExpert:
    """The products of a node, bound to its memory.

    ids (T, U) int32; a (R, k), of sums (R, n); rows: c (T · U, n), of sums b (R, k); R divides
    T · U, a row standing for as many ids; matrices: B of all experts, of sums c
    """

    def __init__(
        self,
        family: Family,
        ids: np.ndarray,
        a: np.ndarray,
        rows: np.ndarray,
        matrices: np.ndarray,
        scratch: Scratch,
    ) -> None:
        self._table = t = table_of(family)
        memory: dict[str, Any] = scratch | {"scratch": scratch["scratch"].ctypes.data}
        self._frame = f = ExpertFrame(
            ids=ids.reshape(-1), n_expert=len(matrices), is_sums=family.form == "strided", a=a,
            a_repeats=ids.size // len(a), rows=rows, rows_repeats=ids.size // len(rows),
            matrices=matrices.ctypes.data, matrix_bytes=matrices.strides[0], most=family.most,
            words=t.words, bases=t.bases, stages=t.stages, packed_bytes=t.packed_bytes, own=0,
            gather=_gather_task.address,
            pack=_pack_task.address, multiply=_multiply_task.address,
            scatter=_scatter_task.address, **memory,
        )  # fmt: skip
        f.put(own=f.address)
        self._stage, self._head = stage(_all_task, f, 1), scratch["head"]
        self._matrices = matrices

    def run(self) -> bool:
        """Compute them; False, and nothing was done, if an id is no expert."""
        while True:
            launch(self._stage)
            missing = int(self._head[_MISSING])
            if missing <= 0:
                return missing == 0
            self._table.add(missing)
