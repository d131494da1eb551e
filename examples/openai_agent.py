"""An agent in forty lines, written with the `openai` package and nothing else; it does arithmetic with a calculator.

As a program it asks the server that OPENAI_BASE_URL names: `echo '{"raw_prompt": [...]}' | python examples/openai_agent.py`.
"""

import ast
import asyncio
import json
import operator
import os
import sys

from openai import AsyncOpenAI

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.USub: operator.neg}
EXPRESSION = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
CALCULATOR = {"name": "calculator", "description": "Compute an arithmetic expression.", "parameters": EXPRESSION}


def calculate(node):
    """The value of an expression of integers, +, - and *."""
    match node:
        case ast.Expression(body=body):
            return calculate(body)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](calculate(left), calculate(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -calculate(operand)
        case ast.Constant(value=int() as value):
            return value
    raise ValueError("only integers, +, - and * can be computed")


async def agent(base_url, api_key, row):
    """Ask the model, run the calls that it makes, show it the results, and so on until it answers."""
    messages = list(row["raw_prompt"])
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(4):
            tools = [{"type": "function", "function": CALCULATOR}]
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return message.content
            for call in message.tool_calls:
                try:
                    result = str(calculate(ast.parse(json.loads(call.function.arguments)["expression"], mode="eval")))
                except (ValueError, SyntaxError, KeyError, TypeError) as error:
                    result = f"Error: {error}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return messages[-1]["content"]


if __name__ == "__main__":
    print(asyncio.run(agent(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], json.load(sys.stdin))))
