r"""The allow-list grammar of answers: LaTeX or plain notation into a tree of known operations.

Nothing is evaluated here. A tree node is a tuple whose first item is its operation:

    ("num", Fraction, decimals)   decimals: digits after the point, None for an integer
    ("const", "pi" | "e" | "i" | "oo")    ("sym", name)    ("text", words)
    ("add", …) ("mul", …) ("div", a, b) ("pow", a, b) ("neg", a) ("pm", a) ("mp", a)
    ("fact", a) ("pct", a) ("deg", a) ("call", function, …) ("apply", unknown function, …)
    ("int" | "sum" | "prod", body, variable, low, high)      ("piecewise", (value, condition), …)
    ("rel", (operators), (terms)) ("in", a, b) ("ratio", …)
    ("list", …) ("tuple", …) ("set", …) ("union" | "inter" | "minus", a, b)
    ("interval", left closed, right closed, a, b) ("matrix", (row), …)

Length, nesting and the number of tokens are limited before anything is built.
"""

from fractions import Fraction

from .levels import Levels
from .lexer import (
    ENVIRONMENTS,
    FUNCTIONS,
    GREEK,
    MAX_CHARS,
    MAX_DEPTH,
    ONLY_APPLIED,
    TEXT_COMMANDS,
    TRIG,
    GrammarError,
    LimitError,
    Node,
    number,
    tokens,
)


def parse(text: str, whole_names: bool = False, sympy_names: bool = False) -> Node:
    """Parse an answer whose notation is plain (`plain_math`).

    Args:
        text: the answer.
        whole_names: `xy` is one symbol (programs' notation) and not x · y.
        sympy_names: E, I, pi and oo are constants.

    Returns:
        The tree.

    Raises:
        GrammarError: the text is outside the grammar.
        LimitError: it is too long or too deep.
    """
    if len(text) > MAX_CHARS:
        raise LimitError(f"answer of {len(text)} characters, at most {MAX_CHARS} are parsed")
    parser = _Parser(tokens(text), whole_names, sympy_names)
    node = parser.top()
    if parser.peek()[0] != "end":
        raise GrammarError(f"unexpected {parser.peek()[1]!r}")
    return node


class _Parser(Levels):
    """The values: numbers, names, commands, brackets."""

    def atom(self) -> Node:
        self.enter()
        kind, text, _ = self.take()
        if kind == "num":
            node = self.numeral(text)
        elif kind == "name":
            node = self.name(text)
        elif kind == "cmd":
            node = self.command(text)
        elif kind == "op" and text in "([{|":
            node = self.bracket(text)
        else:
            raise GrammarError(f"a value expected, got {text!r}")
        self.depth -= 1
        return node

    def numeral(self, text: str) -> Node:
        if self.peek()[1] == "\\overline" and "." in text:
            digits, self.at = self.group_text(self.at + 1)
            if not digits.isdigit() or len(digits) > MAX_DEPTH:
                raise GrammarError("a repeating decimal expected")
            places = len(text.partition(".")[2])
            period = Fraction(int(digits), (10 ** len(digits) - 1) * 10**places)
            return ("num", number(text)[1] + period, None)
        if self.peek()[1] == "_" and text.isdigit():  # 2516_8: digits in a stated base
            self.take()
            base = self.group_text(self.at)
            if base[0].isdigit():
                self.at = base[1]
                return ("base", text.lstrip("0"), base[0])
            raise GrammarError("a base expected after a number's subscript")
        return number(text)

    def name(self, text: str) -> Node:
        """A function call, a constant, or the first symbol of a run of letters."""
        called = self.peek()[1] in ("(", "^", "{", "_") or text not in ONLY_APPLIED
        if text in FUNCTIONS and called and (text not in GREEK or self.peek()[1] == "("):
            return self.call(FUNCTIONS[text])
        if text in ("Piecewise", "Integral") and self.peek()[1] == "(":
            return self.program_form(text)
        if self.sympy_names and text in ("E", "I", "pi", "oo"):
            return ("const", {"E": "e", "I": "i"}.get(text, text))
        if text in ("pi", "oo", "inf", "infinity"):
            return ("const", "pi" if text == "pi" else "oo")
        if not (self.whole_names or text in GREEK or len(text) == 1):
            head, text = text[0], text[1:]
            known = next((n for n in ("pi", "sqrt") if head + text[: len(n) - 1] == n), None)
            if known:
                head, text = known, (head + text)[len(known) :]
            self.at -= 1
            self.tokens[self.at : self.at + 1] = [("name", head, False), ("name", text, False)][
                : 2 if text else 1
            ]
            self.take()
            return self.name(head)
        return self.symbol(text)

    def symbol(self, text: str) -> Node:
        if self.accept("_"):
            index, self.at = self.group_text(self.at)
            text = f"{text}_{''.join(index.split())}"
        while self.accept("'"):
            text += "'"
        follows = self.peek()
        if text in ("e", "i"):
            return ("const", text)
        if follows[1] == "(" and (self.whole_names or text[:1] in "fghFGHPWQRT"):
            self.take()
            return ("apply", text, self.closed(")"))
        return ("sym", text)

    def call(self, function: str) -> Node:
        r"""A function with its argument: in brackets, or what follows it (`\sin 2x`)."""
        power: Node | None = None
        base: Node | None = None
        while self.peek()[1] in ("^", "_"):
            if self.take()[1] == "^":
                power = self.exponent() if self.peek()[1] != "{" else self.argument()
            else:
                base = self.argument()
        if power == ("neg", ("num", Fraction(1), None)) and function in TRIG:
            function, power = "a" + function, None
        if self.peek()[1] == "(":
            self.take()
            inner = self.closed(")")
            arguments = inner[1:] if inner[0] == "list" else (inner,)
        elif self.peek()[1] == "{":
            arguments = (self.argument(),)
        else:
            arguments = (self.bare_argument(),)
        node: Node = ("call", function, *arguments, *((base,) if base else ()))
        return ("pow", node, power) if power else node

    def bare_argument(self) -> Node:
        operator = self.accept("-")
        node = self.power()
        while self.starts_factor():
            text = self.peek()[1]
            if text in FUNCTIONS or text[1:] in FUNCTIONS or text == "(":
                break
            node = ("mul", node, self.power())
        return ("neg", node) if operator else node

    def closed(self, closing: str) -> Node:
        bars, self.bars = self.bars, 0
        node = self.top()
        self.expect(closing)
        self.bars = bars
        return node

    def bracket(self, opening: str) -> Node:
        bars, self.bars = self.bars, 1 if opening == "|" else 0
        closings = {"(": (")", "]"), "[": ("]", ")"), "{": ("}",), "|": ("|",)}[opening]
        node = self.top()
        closing = self.accept(*closings)
        if not closing:
            raise GrammarError(f"{closings[0]!r} expected, got {self.peek()[1]!r}")
        self.bars = bars
        if opening == "|":
            return ("call", "abs", node)
        if opening == "{":
            return node
        if opening + closing != "()":
            if node[0] == "list" and len(node) == 3:
                return ("interval", opening == "[", closing == "]", *node[1:])
            if opening + closing == "[]" and node[0] == "matrix":
                return node
            if opening + closing == "[]":
                return ("tuple", *node[1:]) if node[0] == "list" else ("tuple", node)
            raise GrammarError("an interval has two ends")
        return ("tuple", *node[1:]) if node[0] == "list" else node

    def command(self, text: str) -> Node:
        name = text[1:]
        if name == "frac":
            top = self.argument()
            return ("div", top, self.argument())
        if name == "sqrt":
            return self.root()
        if name == "binom":
            top = self.argument()
            return ("call", "binomial", top, self.argument())
        if name in ("pi", "infty"):
            return ("const", "pi" if name == "pi" else "oo")
        if name in FUNCTIONS and (name not in GREEK or self.peek()[1] == "("):
            return self.call(FUNCTIONS[name])
        if name in GREEK:
            return self.symbol(name)
        if name in ("{", "lfloor", "lceil"):
            closing = {"{": "\\}", "lfloor": "\\rfloor", "lceil": "\\rceil"}[name]
            node = self.closed(closing)
            if name == "{":
                return ("set", *node[1:]) if node[0] == "list" else ("set", node)
            return ("call", {"lfloor": "floor", "lceil": "ceiling"}[name], node)
        if name in ("int", "sum", "prod"):
            return self.big_operator(name)
        if name == "emptyset":
            return ("set",)
        if name == "begin":
            return self.matrix()
        if name in ("boxed", "fbox"):
            return self.argument()
        if text in TEXT_COMMANDS:
            return self.worded(text)
        raise GrammarError(f"unknown command {text!r}")

    def worded(self, command: str) -> Node:
        words, self.at = self.group_text(self.at)
        plain = words.strip("() .")
        if (command, plain) == (r"\mathbb", "R"):
            return ("interval", False, False, ("neg", ("const", "oo")), ("const", "oo"))
        if command in ("\\text", "\\textbf", "\\mbox", "\\textrm", "\\textit") or len(plain) != 1:
            return ("text", " ".join(plain.split()))
        self.tokens.insert(self.at, ("name", plain, False))
        self.take()
        return self.symbol(plain)

    def root(self) -> Node:
        degree: Node = ("num", Fraction(2), None)
        if self.accept("["):
            degree = self.top()
            self.expect("]")
        if self.peek()[1] == "{":
            body = self.argument()
        elif self.peek()[0] == "num":
            body = self.numeral(self.take()[1])
        else:
            body = self.argument()
        if degree[1] == 2:
            return ("call", "sqrt", body)
        return ("pow", body, ("div", ("num", Fraction(1), None), degree))

    def matrix(self) -> Node:
        environment, self.at = self.group_text(self.at)
        if environment not in ENVIRONMENTS:
            raise GrammarError(f"unknown environment {environment!r}")
        if environment == "array":
            self.at = self.group_text(self.at)[1]
        rows: list[tuple[Node, ...]] = []
        row: list[Node] = []
        while not self.accept("\\end"):
            if self.accept("\\\\"):
                rows.append(tuple(row))
                row = []
            elif not self.accept("&"):
                row.append(self.item())
        if row:
            rows.append(tuple(row))
        self.at = self.group_text(self.at)[1]
        if not rows or len({len(r) for r in rows}) != 1:
            raise GrammarError("a matrix needs rows of equal length")
        return ("matrix", *rows)

    def big_operator(self, name: str) -> Node:
        low, high = self.limits()
        if name == "int":
            return self.integral([(low, high)])
        if low[0] != "rel" or low[1] != ("=",) or low[2][0][0] not in ("sym", "const"):
            raise GrammarError("a sum needs a variable")
        variable = low[2][0][1]
        return (name, self.product(), variable, low[2][1], high)

    def limits(self) -> tuple[Node, Node]:
        low: Node | None = None
        high: Node | None = None
        while self.peek()[1] in ("^", "_"):
            if self.take()[1] == "^":
                high = self.argument()
            else:
                low = self.argument()
        if low is None or high is None:
            raise GrammarError("an operator without limits")
        return low, high

    def integral(self, bounds: list[tuple[Node, Node]]) -> Node:
        """One or more integrals in front of one body; the last differential is the outermost's."""
        while self.accept("\\int"):
            bounds.append(self.limits())
        node = self.sum()
        variables = []
        for _ in bounds:
            node, variable = self.split_differential(node)
            variables.append(variable)
        for (low, high), variable in zip(bounds[::-1], variables[::-1], strict=True):
            node = ("int", node, variable, low, high)
        return node

    @staticmethod
    def split_differential(body: Node) -> tuple[Node, str]:
        """Take the last `d x` off a product, or off the last term of a sum."""
        if body[0] == "add":
            term, variable = _Parser.split_differential(body[-1])
            return ("add", *body[1:-1], term), variable
        if body[0] == "mul" and body[2][0] == "sym":
            rest, symbol = body[1], body[2][1]
            if rest == ("sym", "d"):
                return ("num", Fraction(1), None), symbol
            if rest[0] == "mul" and rest[2] == ("sym", "d"):
                return rest[1], symbol
        raise GrammarError("an integral without its differential")

    def program_form(self, name: str) -> Node:
        """`Integral(f, (x, a, b))` and `Piecewise((f, condition), …)`."""
        self.take()
        inner = self.closed(")")
        parts = inner[1:] if inner[0] == "list" else (inner,)
        if name == "Integral":
            if len(parts) != 2 or parts[1][0] != "tuple" or len(parts[1]) != 4:
                raise GrammarError("Integral needs (f, (x, a, b))")
            _, variable, low, high = parts[1]
            return ("int", parts[0], variable[1], low, high)
        if any(p[0] != "tuple" or len(p) != 3 for p in parts):
            raise GrammarError("Piecewise needs (value, condition) pairs")
        return ("piecewise", *(p[1:] for p in parts))
