"""Sandbox for untrusted chat templates: no access to the interpreter, and a limit on work.

Every value that a template creates or accesses is charged to a budget; a rendering that exceeds it is refused. The
budget counts steps, not time, so the result is the same on every machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import cache, lru_cache
from typing import Any, cast

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from glasshouse.errors import InputError

LONGEST = 100_000  # characters of a template
DEEPEST = 100  # levels of nested lists
WORK, SHARE = 20_000_000, 500  # budget of a rendering, and what each input character adds to it
_STEP = 100  # cost of accessing a value
_QUICK = ("count", "d", "default", "first", "last", "length")  # filters that do not traverse the value
_FILTERS = """abs capitalize dictsort e escape float indent int items join list lower map max min reject rejectattr
    replace reverse round safe select selectattr sort string title trim truncate unique upper wordcount"""
_METHODS = """capitalize casefold changed copy count cycle endswith find get index isalnum isalpha isascii isdecimal
    isdigit islower isnumeric isspace istitle isupper items join keys lower lstrip partition removeprefix removesuffix
    replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper values"""
_MANY: Any = (list, tuple, dict, range, type({}.keys()), type({}.values()), type({}.items()))
_BARE = {  # nodes whose inner value is only an intermediate result
    nodes.Getattr: "node",
    nodes.Getitem: "node",
    nodes.Call: "node",
    nodes.FilterBlock: "filter",
    nodes.CallBlock: "call",
}


@lru_cache(maxsize=32)
def compiled(template: str) -> jinja2.Template:
    """Compile a template; raise InputError if it cannot be parsed.

    >>> render(compiled("{{ greeting | upper }}!"), {"greeting": "hello"}, {}, datetime.now(), characters=5)
    'HELLO!'
    """
    if len(template) > LONGEST:
        raise InputError(f"the chat template has {len(template)} characters, but at most {LONGEST} are allowed.")
    try:
        return _sandbox().from_string(cast(nodes.Template, _Meter().visit(_sandbox().parse(template))))
    except jinja2.TemplateSyntaxError as error:
        reason = str(error.message).rstrip(".")
        raise InputError(f"line {error.lineno} of the chat template cannot be parsed: {reason}.") from None
    except Exception as error:
        raise InputError(f"the chat template cannot be compiled: {' '.join(str(error).split())}.") from None


@lru_cache(maxsize=32)
def reads(template: str, variable: str) -> bool:
    """Return whether a template reads a variable that it does not set itself.

    >>> reads("{% if tools %}yes{% endif %}", "tools"), reads("{% set tools = 1 %}{{ tools }}", "tools")
    (True, False)
    """
    compiled(template)  # raises for one that cannot be parsed
    return variable in meta.find_undeclared_variables(_sandbox().parse(template))


def render(
    template: jinja2.Template, variables: Mapping[str, Any], marks: Mapping[str, str], now: datetime, characters: int
) -> str:
    """Render a template; `marks` are characters that are never escaped, `characters` the size of the input."""
    context = cast(_Context, template.new_context(dict(variables)))
    context.left, context.now, context.marks = WORK + SHARE * characters, now, marks
    return "".join(template.root_render_func(context))


class _Context(Context):
    left = 0  # remaining work; a context that `render` did not create has none
    now: datetime
    marks: Mapping[str, str]

    def spend(self, work: int) -> None:
        self.left -= work
        if self.left < 0:
            raise SecurityError("it needs too much work")

    def grow(self, value: object, *others: object) -> None:
        """Charge for the largest result of an operation that can repeat a value as often as `others` say."""
        self.spend(_size(value) * max(map(_count, others), default=1))


def _size(value: object) -> int:
    """Return the cost of accessing a value; nested lists count as often as they occur.

    This is bounded: the elements were charged for, just as often, when the value was created.
    """
    size = 0
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for item in level:
            size += _STEP + (len(item) if isinstance(item, str) else 0)
            if isinstance(item, _MANY):
                inner += [*item, *item.values()] if isinstance(item, dict) else item
        if not inner:
            return size
        level = inner
    raise SecurityError(f"it nests more than {DEEPEST} lists")


def _count(value: object) -> int:
    """Return by what factor a value can enlarge another: a number can be a width or a repeat count."""
    if isinstance(value, int | str):
        return max(1, len(value) if isinstance(value, str) else abs(value))
    return _size(value)


@jinja2.pass_context
def _metered(context: _Context, value: object) -> object:
    """Charge for a value; every value that a template creates or accesses passes through here."""
    if type(value) is str:
        context.spend(_STEP + len(value))
        return value
    if isinstance(value, int) and value.bit_length() > 1024:
        raise SecurityError("it creates too large a number")
    if isinstance(value, Iterator) and not isinstance(value, LoopContext):
        value = list(value)
    context.spend(_size(value))
    return value


def _filter(name: str) -> Callable[..., object]:
    function: Callable[..., object] = FILTERS[name]
    wants = getattr(function, "jinja_pass_arg", None)

    @jinja2.pass_context
    def metered(context: _Context, value: object, *args: object, **kwargs: object) -> object:
        if name not in _QUICK:
            context.grow(value, *args, *kwargs.values())
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        return function(*([first[wants.name]] if wants else []), value, *args, **kwargs)

    return metered


@jinja2.pass_context
def _tojson(
    context: _Context,
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    context.grow(value, indent, separators)
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:  # marks must not be escaped
        text = re.sub("[^\0-\x7f]", lambda c: c[0] if c[0] in context.marks else json.dumps(c[0])[1:-1], text)
    return text


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


@jinja2.pass_context
def _strftime_now(context: _Context, form: str) -> str:
    context.spend(256 * len(form))  # the most that Python allows, as with %200Y
    return context.now.strftime(form)


class _Namespace(Namespace):
    def __repr__(self) -> str:  # without its content, which can be recursive
        return "<Namespace>"


class _Meter(NodeTransformer):
    """Wraps every expression in a template in the `metered` filter."""

    def generic_visit(self, node: nodes.Node, *args: object, **kwargs: object) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        field = "node" if isinstance(node, nodes.Filter) and node.name in _QUICK else _BARE.get(type(node))
        if field and isinstance(inner := getattr(node, field), nodes.Filter) and inner.name == "metered":
            setattr(node, field, inner.node)
        stored = getattr(node, "ctx", "load") != "load"
        if stored or not isinstance(node, nodes.Expr) or isinstance(node, nodes.NSRef | nodes.Slice):
            return node
        return nodes.Filter(node, "metered", [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """The {% generation %} tags of transformers, ignored: assistant turns are found by `segments`."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    context_class = _Context
    intercepted_binops = frozenset({"*", "**", "%"})
    _methods = frozenset(_METHODS.split())

    def __init__(self) -> None:
        # Unoptimised: constant folding at compile time would not be metered.
        added = (_Generation, loopcontrols)
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=added)
        self.filters = {name: _filter(name) for name in (*_QUICK, *_FILTERS.split())}
        self.filters |= {"tojson": _tojson, "metered": _metered}
        self.globals = {"range": self.globals["range"], "dict": dict, "namespace": _Namespace}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        return super().is_safe_attribute(obj, attr, value) and (not callable(value) or attr in self._methods)

    def wrap_str_format(self, value: object) -> None:
        """Let `is_safe_attribute` refuse `format`: a format can ask for any width."""

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if isinstance(owner := getattr(function, "__self__", None), str):
            cast(_Context, context).grow(owner, *args, *kwargs.values())
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        if operator == "%" and isinstance(left, str):
            raise SecurityError("it formats a text by %, which is not supported")
        if operator != "%":
            cast(_Context, context).spend(_count(left) * _count(right))
        return super().call_binop(context, operator, left, right)


@cache
def _sandbox() -> _Sandbox:
    return _Sandbox()
