"""What the 256 threads of a workgroup make together: a sum, or the greatest of their numbers.

    fn summed(me: u32, mine: f32) -> f32        fn highest(me: u32, mine: f32) -> f32

All threads call them, and each gets the result. Where the device has subgroups, threads in step
add up in registers first, and a workgroup waits twice instead of nine times. Both orders of a sum
are fixed.
"""

from collections.abc import Iterator

_FUNCTIONS = {"summed": ("{} + {}", "subgroupAdd"), "highest": ("max({}, {})", "subgroupMax")}
_BY_HALVES = """
var<workgroup> of_NAME: array<f32, 256>;
fn NAME(me: u32, mine: f32) -> f32 {
    of_NAME[me] = mine;
    workgroupBarrier();
    for (var n = 128u; n > 0u; n = n / 2u) {
        if (me < n) { of_NAME[me] = JOINED; }
        workgroupBarrier();
    }
    let total = of_NAME[0];
    workgroupBarrier();
    return total;
}
"""
_BY_SUBGROUPS = """
var<workgroup> of_NAME: array<f32, 256>;
fn NAME(me: u32, mine: f32) -> f32 {
    let part = TOGETHER(mine);
    if (lane == 0u) { of_NAME[subgroup] = part; }
    workgroupBarrier();
    var total = of_NAME[0];
    for (var i = 1u; i < n_subgroups; i++) { total = JOINED; }
    workgroupBarrier();
    return total;
}
"""
_NUMBERS = """
var<private> lane: u32;  // the thread's number in its subgroup
var<private> subgroup: u32;
var<private> n_subgroups: u32;
"""
_ARGUMENTS = """
    @builtin(subgroup_invocation_id) own_lane: u32,
    @builtin(subgroup_id) own_subgroup: u32,
    @builtin(num_subgroups) all_subgroups: u32,"""
_SET = "lane = own_lane; subgroup = own_subgroup; n_subgroups = all_subgroups;"


# Where a shader has room for more arguments of `main`, and for its first line.
ARGUMENTS, FIRST_LINE = "/* arguments */", "/* first line */"


def with_functions(shader: str, has_subgroups: bool) -> str:
    """A shader with those of the functions that it calls."""
    called = [name for name in _FUNCTIONS if f"{name}(" in shader]
    by_subgroups = has_subgroups and bool(called)
    shader = shader.replace(ARGUMENTS, _ARGUMENTS if by_subgroups else "")
    shader = shader.replace(FIRST_LINE, _SET if by_subgroups else "")
    return "\n".join([*_definitions(called, by_subgroups), shader])


def _definitions(names: list[str], by_subgroups: bool) -> Iterator[str]:
    if by_subgroups:
        yield _NUMBERS
    for name in names:
        joined, together = _FUNCTIONS[name]
        terms = ("total", f"of_{name}[i]")
        if not by_subgroups:
            terms = (f"of_{name}[me]", f"of_{name}[me + n]")
        text = _BY_SUBGROUPS if by_subgroups else _BY_HALVES
        text = text.replace("JOINED", joined.format(*terms)).replace("TOGETHER", together)
        yield text.replace("NAME", name)
