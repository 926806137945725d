"""Lists the fields of request models in a wheel of vLLM or SGLang, without an import of the wheel.

    request_fields.py WHEEL <<< '{"chat": ["vllm/entrypoints/openai/chat_completion/protocol.py:ChatCompletionRequest"]}'

A name is a class, or an alias of a union of classes. The output has two lists per key. "fields" has the fields of all classes and base
classes, with aliases. "read" has the names that validators read from the body.
"""

import ast
import json
import sys
import zipfile

WHEEL = zipfile.ZipFile(sys.argv[1])
FILES = set(WHEEL.namelist())
MODULES = {}


def module(path):
    """Returns the definitions of a file by name, and the files of imported names."""
    if path not in MODULES:
        tree, names, imports = ast.parse(WHEEL.read(path)), {}, {}
        package = path.split("/")[:-1]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                place = "/".join(base + (node.module.split(".") if node.module else []))
                for name in node.names:
                    for file in (place + ".py", place + "/__init__.py", place + "/" + name.name + ".py"):
                        if file in FILES:
                            imports[name.asname or name.name] = file, name.name
                            break
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                names[node.name] = node
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                names[node.target.id] = node.value
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names[node.targets[0].id] = node.value
        MODULES[path] = names, imports
    return MODULES[path]


def resolve(path, name):
    """Returns the definition of a name, and the file."""
    names, imports = module(path)
    if name in names:
        return path, names[name]
    if name in imports:
        return resolve(*imports[name])
    return path, None


def classes(path, node):
    """Yields the classes of a name, a union or an annotation."""
    if isinstance(node, ast.ClassDef):
        yield path, node
        for base in node.bases:
            yield from classes(path, base)
    elif isinstance(node, ast.Name):
        where, found = resolve(path, node.id)
        if found is not None:
            yield from classes(where, found)
    elif isinstance(node, ast.Attribute):
        return
    else:
        for child in ast.iter_child_nodes(node):
            yield from classes(path, child)


def private(annotation):
    return "ClassVar" in ast.dump(annotation)


def fields(cls):
    """Yields the fields of a class without base classes."""
    for node in cls.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or private(node.annotation):
            continue
        if node.target.id.startswith("_") or node.target.id == "model_config":
            continue
        yield node.target.id
        for call in ast.walk(node):
            if isinstance(call, ast.Call):
                for keyword in call.keywords:
                    if keyword.arg in ("alias", "validation_alias"):
                        for text in ast.walk(keyword.value):
                            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                                yield text.value


def reads(cls):
    """Yields the names that validators of a class read from the body."""
    for method in cls.body:
        if not isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if "before" not in "".join(ast.dump(d) for d in method.decorator_list) or len(method.args.args) < 2:
            continue
        body = method.args.args[1].arg
        for node in ast.walk(method):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(
                    node.func.value, ast.Name) and node.func.value.id == body and node.args and isinstance(
                    node.args[0], ast.Constant):
                yield node.args[0].value
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == body and isinstance(
                    node.slice, ast.Constant):
                yield node.slice.value


answer = {}
for api, roots in json.load(sys.stdin).items():
    found, read = set(), set()
    for root in roots:
        path, name = root.rsplit(":", 1)
        where, definition = resolve(path, name)
        if definition is None:
            sys.exit(f"{sys.argv[1]} has no {root}")
        for _, cls in classes(where, definition):
            found.update(fields(cls))
            read.update(n for n in reads(cls) if isinstance(n, str))
    answer[api] = {"fields": sorted(found), "read": sorted(read)}
json.dump(answer, sys.stdout)
