"""Formulas of numbers, each said once: what they compute, their slopes, their text on a device.

    def swish(x, *, beta):
        return x * sigmoid(beta * x)

    f = formula(swish)                   an expression of the symbols x and beta
    f(array, beta=2.0)                   its value in NumPy's float64
    slope_of(f.result, symbol("x"))      its slope by x, an expression again

Called with symbols, such a function gives an expression: a graph in which equal parts are one
object, so that each is computed once. A device has a table of functions (`Language`) and writes
expressions in its own language.
"""
