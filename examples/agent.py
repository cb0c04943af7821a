"""A small agent: a loop over the OpenAI client with two tools, a calculator and a file store.

It works with every server that parses tool calls:

    python -m sglang.launch_server ... --tool-call-parser qwen
    python examples/agent.py "What is 12 * 7 + 30? Save it in result.txt." --url http://127.0.0.1:30000/v1
"""

import argparse
import ast
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openai import OpenAI

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
MOST_STEPS = 8


def calculate(expression: str) -> str:
    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("only whole numbers, +, -, * and // are allowed")

    return str(value(ast.parse(expression, mode="eval").body))


def file_tools(folder: Path) -> dict[str, Callable[..., str]]:
    def inside(path: str) -> Path:
        if not (folder / path).resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{path} is outside the store")
        return folder / path

    def write_file(path: str, text: str) -> str:
        inside(path).write_text(text)
        return "saved"

    return {"read_file": lambda path: inside(path).read_text(), "write_file": write_file}


def described(name: str, what: str, *arguments: str) -> dict[str, Any]:
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": what, "parameters": parameters}}


TOOLS = [
    described("read_file", "read a file", "path"),
    described("write_file", "write a text to a file", "path", "text"),
    described("calculate", "compute a number", "expression"),
]


def run(client: OpenAI, task: str, folder: Path) -> str:
    """Asks until the model answers without a tool call; returns that answer."""
    tools = {"calculate": calculate, **file_tools(folder)}
    messages: list[Any] = [{"role": "user", "content": task}]
    model = client.models.list().data[0].id
    for _ in range(MOST_STEPS):
        reply = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, temperature=0)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            try:
                result = tools[call.function.name](**json.loads(call.function.arguments))
            except (KeyError, TypeError, ValueError, SyntaxError, ArithmeticError, OSError) as error:
                result = f"error: {error}"  # the model reads it, and may try something else
            print(f"{call.function.name} {call.function.arguments} -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise SystemExit(f"The task is not done after {MOST_STEPS} steps.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", default="What is 12 * 7 + 30? Save it in result.txt.")
    parser.add_argument("--url", default="http://127.0.0.1:30000/v1")
    parser.add_argument("--folder", type=Path, default=Path("."), help="the file store")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    print(run(OpenAI(base_url=args.url, api_key="none"), args.task, args.folder))
