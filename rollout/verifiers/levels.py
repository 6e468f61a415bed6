"""The levels of precedence of the answer grammar, from a list down to a power."""

from abc import ABC, abstractmethod

from .lexer import MAX_DEPTH, RELATIONS, GrammarError, LimitError, Node, Token, number


class Levels(ABC):
    """Recursive descent with one method for each level of precedence."""

    def __init__(self, tokens: list[Token], whole_names: bool, sympy_names: bool) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0
        self.bars = 0
        self.whole_names = whole_names
        self.sympy_names = sympy_names

    def peek(self, ahead: int = 0) -> Token:
        return self.tokens[min(self.at + ahead, len(self.tokens) - 1)]

    def take(self) -> Token:
        token = self.peek()
        self.at += 1
        return token

    def accept(self, *texts: str) -> str | None:
        kind, text, _ = self.peek()
        if kind in ("op", "cmd") and text in texts:
            self.at += 1
            return text
        return None

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise GrammarError(f"{text!r} expected, got {self.peek()[1]!r}")

    def enter(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise LimitError("answer nested too deeply")

    def top(self) -> Node:
        """A list: items between commas, semicolons, "and", "or"."""
        items = [self.item()]
        separators = []
        while True:
            separator = self.separator()
            if not separator:
                break
            separators.append(separator)
            items.append(self.item())
        grouped = ";" in separators and "," in separators
        if grouped and all(i[0] == "rel" for i in items):  # p=5,q=2; p=7,q=2
            groups: list[list[Node]] = [[items[0]]]
            for separator, item in zip(separators, items[1:], strict=True):
                if separator == ",":
                    groups[-1].append(item)
                else:
                    groups.append([item])
            items = [g[0] if len(g) == 1 else ("list", *g) for g in groups]
        return items[0] if len(items) == 1 else ("list", *items)

    def separator(self) -> str:
        found = ""
        while True:
            kind, text, _ = self.peek()
            if kind == "op" and text in ",;":
                found = ";" if ";" in (text, found) else ","
            elif kind == "word" or (kind == "name" and text in ("and", "or")):
                found = found or ";"
            elif kind == "cmd" and text in (r"\text", r"\mbox", r"\textrm", r"\mathrm"):
                words = self.group_text(self.at + 1)
                if words[0].strip(" ,.") not in ("and", "or"):
                    return found
                self.at = words[1] - 1
                found = found or ";"
            else:
                return found
            self.at += 1

    def item(self) -> Node:
        """A relation, a chain of them, or a value."""
        self.enter()
        terms = [self.collection()]
        operators = []
        while True:
            kind, text, _ = self.peek()
            if kind in ("op", "cmd") and text in RELATIONS:
                self.take()
                operator = RELATIONS[text]
                if operator in "<>" and self.accept("="):
                    operator += "="
                operators.append(operator)
                terms.append(self.collection())
            elif self.accept(r"\in"):
                terms[-1] = ("in", terms[-1], self.collection())
            elif self.accept(":"):
                right = self.collection()
                left = terms[-1]
                terms[-1] = (*left, right) if left[0] == "ratio" else ("ratio", left, right)
            else:
                break
        self.depth -= 1
        return ("rel", tuple(operators), tuple(terms)) if operators else terms[0]

    def collection(self) -> Node:
        node = self.sum()
        while operator := self.accept(r"\cup", r"\cap", r"\setminus"):
            name = {r"\cup": "union", r"\cap": "inter", r"\setminus": "minus"}[operator]
            node = (name, node, self.sum())
        return node

    def sum(self) -> Node:
        terms = [self.product()]
        while operator := self.accept("+", "-", r"\pm", r"\mp"):
            term = self.product()
            wrap = {"+": None, "-": "neg", r"\pm": "pm", r"\mp": "mp"}[operator]
            terms.append((wrap, term) if wrap else term)
        return terms[0] if len(terms) == 1 else ("add", *terms)

    def product(self) -> Node:
        node = self.unary()
        while True:
            if self.accept("*", r"\cdot", r"\times", r"\ast"):
                node = ("mul", node, self.unary())
            elif self.accept("/", r"\div"):
                node = ("div", node, self.unary())
            elif self.starts_factor():
                node = self.juxtaposed(node)
            else:
                return node

    def juxtaposed(self, left: Node) -> Node:
        """A product without a sign, or a mixed number."""
        before = self.peek(-1) if self.at else ("end", "", False)
        if left[0] == "neg" and left[1][0] == "num" and before[0] == "num":
            return ("neg", self.juxtaposed(left[1]))
        kind, text, _ = self.peek()
        if kind == "num":
            denominator = self.peek(2)
            if left[0] == "num" and self.peek(1)[1] == "/" and denominator[0] == "num":
                self.at += 3
                return self.mixed(left, ("div", number(text), number(denominator[1])))
            raise GrammarError("two numbers without a sign between them")
        whole = left[0] == "num" and before[0] == "num"
        right = self.power()
        if whole and text == r"\frac" and right[0] == "div":
            return self.mixed(left, right)
        return ("mul", left, right)

    @staticmethod
    def mixed(whole: Node, part: Node) -> Node:
        _, top, bottom = part
        if whole[2] is None and top[0] == bottom[0] == "num" and top[1] < bottom[1]:
            return ("add", whole, part)
        return ("mul", whole, part)

    def starts_factor(self) -> bool:
        kind, text, _ = self.peek()
        if kind == "name":
            return text not in ("and", "or")
        if kind == "num":
            return True
        if kind == "op":
            return text in "([{" if not (self.bars and text == "|") else False
        if kind == "cmd":
            if text in (r"\text", r"\mbox", r"\textrm", r"\mathrm"):
                return self.group_text(self.at + 1)[0].strip(" ,.") not in ("and", "or")
            stops = RELATIONS.keys() | {r"\cup", r"\cap", r"\setminus", r"\in", r"\pm", r"\mp"}
            stops |= {r"\}", r"\deg", r"\rfloor", r"\rceil", r"\cdot", r"\times", r"\div", r"\\"}
            return text not in stops and text != r"\ast" and text != r"\end"
        return False

    def unary(self) -> Node:
        self.enter()
        operator = self.accept("-", "+", r"\pm", r"\mp")
        if operator:
            node = self.unary()
            wrap = {"-": "neg", "+": None, r"\pm": "pm", r"\mp": "mp"}[operator]
            node = (wrap, node) if wrap else node
        else:
            node = self.power()
        self.depth -= 1
        return node

    def power(self) -> Node:
        base = self.postfix(self.atom())
        if self.accept("^", "**"):
            self.enter()
            exponent = self.exponent()
            self.depth -= 1
            return self.postfix(("pow", base, exponent))
        return base

    def exponent(self) -> Node:
        if self.peek()[:2] == ("op", "{"):
            node = self.argument()
            if self.accept("^", "**"):
                node = ("pow", node, self.exponent())
            return node
        if operator := self.accept("-", "+"):
            node = self.exponent()
            return ("neg", node) if operator == "-" else node
        return self.power()

    def postfix(self, node: Node) -> Node:
        while True:
            if self.accept("!"):
                node = ("fact", node)
            elif self.accept("%"):
                node = ("pct", node)
            elif self.accept(r"\deg"):
                node = ("deg", node)
            elif self.accept("'"):
                node = ("apply", "prime", node)
            else:
                return node

    def argument(self) -> Node:
        r"""The argument of a command: a group, or one sign (`\frac12`)."""
        if self.accept("{"):
            node = self.top()
            self.expect("}")
            return node
        kind, text, _ = self.peek()
        if kind == "num" and len(text) > 1:
            self.tokens[self.at] = (kind, text[1:], False)
            return number(text[0])
        return self.postfix(self.atom())

    def group_text(self, at: int) -> tuple[str, int]:
        """Return the raw text of the group that starts at token `at`, and where it ends."""
        if at >= len(self.tokens) or self.tokens[at][1] != "{":
            return (self.tokens[min(at, len(self.tokens) - 1)][1], at + 1)
        depth = 0
        words: list[str] = []
        for end in range(at, len(self.tokens)):
            text, spaced = self.tokens[end][1:]
            depth += (text == "{") - (text == "}")
            if depth == 0:
                return ("".join(words).strip(), end + 1)
            if end > at:
                words.append(" " * spaced + text)
        raise GrammarError("a group that never closes")

    @abstractmethod
    def atom(self) -> Node:
        """A value that no operator splits; the grammar's."""
