"""Renders chat templates with Jinja2, in the environment of the transformers library of Hugging Face.

    render_chats.py < cases > results

Each line of cases is a JSON object {"template", "vars"}. Each line of results is {"text"} or {"error"}. The time is always
2026-01-02 03:04:05.
"""
import datetime
import functools
import json
import sys

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(lineno)

    def _render(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(format):
    return datetime.datetime(2026, 1, 2, 3, 4, 5).strftime(format)


@functools.cache
def compiled(template):
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(template)


def main():
    for line in sys.stdin.buffer.read().split(b"\n")[:-1]:
        case = json.loads(line)
        try:
            result = {"text": compiled(case["template"]).render(**case["vars"])}
        except Exception as e:
            result = {"error": f"{type(e).__name__}: {e}"}
        sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
