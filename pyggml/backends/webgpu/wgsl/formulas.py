"""Formulas of numbers in WGSL: the functions that it has, and those that it lacks or has inexact
near 0. exp is within 3 + 2·|x| units of the last place, as the standard has it, and so is what is
made of it."""

from collections.abc import Mapping

from pyggml.formulas.formula import Formula
from pyggml.formulas.softcap import SOFTCAP, SOFTCAP_BACK
from pyggml.formulas.text import Language

# expm1 and tanh near 0 to 2e-7, erfc as in Numerical Recipes to 1.2e-7 of it, all relative.
FUNCTIONS = """
fn expm1(x: f32) -> f32 {
    let near = x * (1.0 + x * (0.5 + x * (0.16666667 + x * 0.041666667)));
    return select(exp(x) - 1.0, near, abs(x) < 0.03);
}
fn tangent(x: f32) -> f32 {
    let far = sign(x) * (1.0 - 2.0 / (exp(2.0 * abs(x)) + 1.0));
    return select(far, x * (1.0 - x * x * (0.33333333 - x * x * 0.13333333)), abs(x) < 0.1);
}
fn softplus(x: f32) -> f32 {
    let e = exp(-abs(x));
    return max(x, 0.0) + select(log(1.0 + e), e - 0.5 * e * e, e < 1e-3);
}
fn sigmoid(x: f32) -> f32 { return 1.0 / (1.0 + exp(-x)); }
fn erfc(x: f32) -> f32 {
    let z = abs(x);
    let t = 1.0 / (1.0 + 0.5 * z);
    let s = 1.48851587 + t * (-0.82215223 + t * 0.17087277);
    let r = 0.09678418 + t * (-0.18628806 + t * (0.27886807 + t * (-1.13520398 + t * s)));
    let tail = t * exp(-z * z - 1.26551223 + t * (1.00002368 + t * (0.37409196 + t * r)));
    return select(tail, 2.0 - tail, x < 0.0);
}
"""
_OWN = ("abs", "sqrt", "log", "exp", "expm1", "sin", "cos", "sigmoid", "softplus", "erfc")
WGSL = Language(
    {
        **{name: f"{name}({{0}})" for name in (*_OWN, "floor", "ceil", "trunc")},
        "where": "select({2}, {1}, {0})",
        "minimum": "min({0}, {1})",
        "maximum": "max({0}, {1})",
        "sgn": "sign({0})",
        "tanh": "tangent({0})",
        "pick": "{0}_at(first + min(u32(max({1}, 0.0)), N - 1u))",  # in a shader of rows
    },
    number=repr,
    let="let {0} = {1};",
)


def statements_of(formula: Formula, texts: Mapping[str, str]) -> str:
    """Statements that end with `let y = …;`, of further results `let y1 = …;` and so on. texts: of
    sources and settings; else a setting is p_NAME."""
    symbols = {**{name: f"p_{name}" for name in formula.settings}, **texts}
    statements, values = WGSL.lines(formula.results, symbols)
    results = (f"let y{i or ''} = {value};" for i, value in enumerate(values))
    return "\n".join([*statements, *results])


# The cap of a number and its gradient, where a shader has CAP; 0 is none.
CAPPED = f"""{FUNCTIONS}
fn capped(x: f32) -> f32 {{
    let p_cap = CAP;
    if (p_cap <= 0.0) {{ return x; }}
    {statements_of(SOFTCAP, {})}
    return y;
}}
fn capped_back(of_capped: f32, dy: f32) -> f32 {{
    let p_cap = CAP;
    if (p_cap <= 0.0) {{ return dy; }}
    {statements_of(SOFTCAP_BACK, {"y": "of_capped"})}
    return y;
}}
"""
