"""The grammar of an answer that a chat request constrains: a forced tool call, JSON, or either.

Free text, and tools that the policy may but need not call, have no grammar.
"""

import json
from collections.abc import Mapping

from babylon.serving.openai_wire import ChatRequest, JsonObject, RequestError

# At most one line break with its indentation, or one space: a policy could write endless ones.
_SPACE = {"whitespace_pattern": r"(\n[ ]{0,40}|[ ])"}
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_ONES = ("items", "additionalProperties")
_OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties"}
_COMBINED = {"anyOf", "oneOf", "$ref"}


def answer_grammar(chat: ChatRequest) -> str | None:
    """Return the grammar in Lark's syntax, ``None`` for free text.

    ``tool_choice`` ``required`` or a named tool leaves only calls. Otherwise ``response_format``
    leaves JSON, and calls if there are tools.

    Raises:
        RequestError: 400, ``tool_choice`` or ``response_format`` is malformed, unknown, or names a
            tool that the request does not have.
    """
    schema = _answer_schema(chat.response_format)
    forced = chat.tool_choice not in (None, "none", "auto")
    if not forced and schema is None:
        return None
    tools = _callable(chat, forced=forced)
    rules, starts = list[str](), list[str]()
    if tools:
        more = "" if chat.parallel_tool_calls is False else ' ("\\n" call)*'
        names = [f"tool_{index}" for index in range(len(tools))]
        rules += [f"calls: call{more}", f"call: {' | '.join(names)}"]
        rules += [_call_rule(name, tool) for name, tool in zip(names, tools, strict=True)]
        starts.append("calls")
    if schema is not None and not forced:
        rules.append(f"json: {_json_rule(schema)}")
        starts.append("json")
    return "\n".join([f"start: {' | '.join(starts)}", *rules])


def _callable(chat: ChatRequest, *, forced: bool) -> list[JsonObject]:
    """Return the functions that may be called, at least one if a call is forced."""
    functions = [_function(tool) for tool in chat.usable_tools]
    choice = chat.tool_choice
    if forced and choice != "required":
        named = choice.get("function") if isinstance(choice, dict) else None
        name = named.get("name") if isinstance(named, dict) else None
        functions = [one for one in functions if one["name"] == name]
    if forced and not functions:
        raise RequestError(
            400,
            f"tool_choice {choice!r:.200}: send none, auto, required or"
            ' {"type": "function", "function": {"name": ...}} with the name of one of the tools',
        )
    return functions


def _function(tool: Mapping[str, object]) -> JsonObject:
    function = tool.get("function")
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return function
    raise RequestError(400, f"tool {tool!r:.200}: send a function with a name")


def _call_rule(rule: str, function: JsonObject) -> str:
    """Return the rule of a call in Hermes' format, spaced as in the chat templates."""
    schema = function.get("parameters") or {"properties": {}}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise RequestError(
            400, f"tool {function['name']!r:.80}: its parameters must be an object's schema"
        )
    name = json.dumps(function["name"], ensure_ascii=False)
    begin = json.dumps(f'<tool_call>\n{{"name": {name}, "arguments": ', ensure_ascii=False)
    arguments = _json_rule({"type": "object", **schema})
    return f'{rule}: {begin} {rule}_arguments "}}\\n</tool_call>"\n{rule}_arguments: {arguments}'


def _answer_schema(response_format: JsonObject | None) -> JsonObject | None:
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return schema
    raise RequestError(
        400,
        f"response_format {response_format!r:.200}: send text, json_object, or json_schema with"
        " json_schema.schema",
    )


def _json_rule(schema: JsonObject) -> str:
    try:
        closed = schema if _combines(schema) else _closed(schema)
        return f"%json {json.dumps({**closed, 'x-guidance': _SPACE}, ensure_ascii=False)}"
    except RecursionError as error:
        raise RequestError(400, "a JSON schema is nested too deeply: send a flatter one") from error


def _combines(schema: object) -> bool:
    """Return True if one object may be described by several parts of the schema."""
    if isinstance(schema, dict):
        described = schema.keys() & {"properties", "required"}
        if "allOf" in schema or (described and schema.keys() & _COMBINED):
            return True
        return any(map(_combines, schema.values()))
    return isinstance(schema, list) and any(map(_combines, schema))


def _closed(schema: JsonObject) -> JsonObject:
    """Return a schema whose objects have only their declared properties, unless it says otherwise.

    Every answer fits the given schema too. Left open, an answer could go on with properties that
    nobody asked for. What is no schema stays as it is, and the compiler refuses it.
    """
    closed = dict(schema)
    for name in _MAPS:
        if isinstance(of := schema.get(name), dict):
            closed[name] = {key: _closed_part(one) for key, one in of.items()}
    for name in _LISTS:
        if isinstance(of := schema.get(name), list):
            closed[name] = [_closed_part(one) for one in of]
    for name in _ONES:
        if name in schema:
            closed[name] = _closed_part(schema[name])
    declared, needed = schema.get("properties"), schema.get("required", [])
    if isinstance(declared, dict) and isinstance(needed, list) and not schema.keys() & _OPEN:
        names = [name for name in needed if isinstance(name, str)]
        closed |= {} if set(names) - declared.keys() else {"additionalProperties": False}
    return closed


def _closed_part(schema: object) -> object:
    return _closed(schema) if isinstance(schema, dict) else schema
